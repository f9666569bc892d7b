"""Several microbatches: gradients are sharded in each of them or whole until the end, depending on
the form.
"""

from __future__ import annotations

import pytest
import torch

import shardmesh as sm
from tests.sharding.parallel.data.training import (
    FORMS,
    TARGETS,
    TOKENS,
    gradients,
    loss_of,
    model,
    on_ranks,
    own_rows,
    reference_gradients,
    same,
)


def _parts(mesh, count):
    return [
        (own_rows(mesh, x), own_rows(mesh, y))
        for x, y in zip(TOKENS.chunk(count), TARGETS.chunk(count), strict=True)
    ]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("form", FORMS)
def test_gradients_of_micro_batches(form):
    """The mean over microbatches equals that of the batch, with `accumulate_grads` and by
    accumulating into `.grad`.
    """

    def program(mesh):
        made = FORMS[form](model(), mesh)
        for context in (sm.accumulate_grads(), torch.enable_grad(), sm.accumulate_grads()):
            made.zero_grad()
            with context:
                for tokens, targets in _parts(mesh, 2):
                    (loss_of(made, tokens, targets) / 2).backward()
            same(gradients(made), reference_gradients())

    on_ranks((2, 2), program)


@pytest.mark.parametrize("form", ["ddp", "zero1", "fsdp"])
def test_steps_with_accumulation_and_clipping(form):
    def step(made, optimizer, parts):
        with sm.accumulate_grads():
            for part in parts:
                (loss_of(made, *part) / len(parts)).backward()
        norm = torch.nn.utils.clip_grad_norm_(made.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()
        return norm.full_tensor() if isinstance(norm, sm.ShardedTensor) else norm

    def program(mesh):
        made = FORMS[form](model(), mesh)
        optimizer = torch.optim.SGD(made.parameters(), lr=0.5, momentum=0.9)
        return [step(made, optimizer, _parts(mesh, 2)) for _ in range(4)], {
            n: x.detach().full_tensor() for n, x in made.named_parameters()
        }

    reference = model()
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.5, momentum=0.9)
    norms = []
    for _ in range(4):
        loss_of(reference).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.05))
        optimizer.step()
        optimizer.zero_grad()
    for found, values in on_ranks((4,), program):
        torch.testing.assert_close(torch.stack(found), torch.stack(norms), rtol=1e-12, atol=0)
        same(values, {name: x.detach() for name, x in reference.named_parameters()})


@pytest.mark.parametrize(("form", "whole"), [("zero1", True), ("zero2", False), ("fsdp", False)])
def test_memory_between_micro_batches(form, whole):
    """ZeRO-1 keeps whole gradients; ZeRO-2 and FSDP only this rank's parts."""

    def program(mesh):
        made = FORMS[form](model(), mesh)
        with sm.accumulate_grads():
            tokens, targets = _parts(mesh, 2)[0]
            loss_of(made, tokens, targets).backward()
            unit = made.blocks[0].__dict__["_shardmesh_unit"]
            held = [bucket.deferred is not None for bucket in unit.plan.buckets]
            there = [x._local.grad is not None for x in made.blocks[0].parameters() if x.dim()]
        assert all(bucket.deferred is None for bucket in unit.plan.buckets)
        return all(held), any(there)

    assert set(on_ranks((4,), program)) == {(whole, not whole)}


def test_module_used_in_one_micro_batch_only():
    def program(mesh):
        for form in ("zero1", "ddp", "fsdp"):
            made = FORMS[form](model(), mesh)
            with sm.accumulate_grads():
                for skip, (tokens, targets) in zip(((0,), (1,)), _parts(mesh, 2), strict=True):
                    loss_of(made, tokens, targets, skip=skip).backward()

            def both(m):
                halves = zip(TOKENS.chunk(2), TARGETS.chunk(2), strict=True)
                return sum(
                    loss_of(m, x, y, skip=skip)
                    for skip, (x, y) in zip(((0,), (1,)), halves, strict=True)
                )

            same(gradients(made), reference_gradients(both))

    on_ranks((4,), program)
