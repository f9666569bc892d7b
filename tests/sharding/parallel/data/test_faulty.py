"""Exceptions anywhere in a step leave the model sharded, and the next step is correct."""

from __future__ import annotations

import pytest
import torch

import shardmesh as sm
from shardmesh.parallel import fully_shard
from shardmesh.sharding.autograd import engine_hooks
from tests.sharding.parallel.data.training import (
    FORMS,
    TARGETS,
    TOKENS,
    GatedBlock,
    batch,
    check_gradients,
    gradients,
    loss_of,
    mesh_of,
    model,
    on_ranks,
    reference_gradients,
    same,
)

KINDS = [RuntimeError, KeyboardInterrupt]
SOME = ["ddp", "zero1", "fsdp", "fsdp, kept", "hybrid"]


def _in_forward(module, kind):
    def fail(*_):
        raise kind("on purpose")

    return module.register_forward_pre_hook(fail)


def _in_backward(module, kind):
    def fail(_):
        raise kind("on purpose")

    return module.register_forward_pre_hook(lambda _, args: args[0].register_hook(fail) and None)


def _at_rest(made):
    assert all(isinstance(x, sm.ShardedTensor) for x in made.parameters())
    assert type(made.shift) is torch.Tensor
    assert engine_hooks.saved_tensor_hooks() is None


def _one_failure(mesh, form, place, where, kind, sharded):
    made = FORMS[form](model(), mesh)
    hook = where(made.get_submodule(place), kind)
    with pytest.raises(kind, match="on purpose"):
        loss_of(made, *batch(mesh, sharded)).backward()
    _at_rest(made)
    hook.remove()
    made.zero_grad()
    check_gradients(made, mesh)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("where", [_in_forward, _in_backward])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", SOME)
def test_next_step_is_correct(form, kind, where):
    on_ranks(
        (2, 2),
        _one_failure,
        form,
        "blocks.0.b" if form == "fsdp" else "norm",
        where,
        kind,
        form == "fsdp",
    )


def _all_failures(form):
    for where in (_in_forward, _in_backward):
        for kind in KINDS:
            _one_failure(mesh_of(4), form, "blocks.1.a", where, kind, False)


@pytest.mark.parametrize("form", ["ddp", "fsdp"])
def test_next_step_is_correct_on_processes(world4, form):
    world4(_all_failures, form)


def test_an_interrupt_in_a_hook_of_the_outermost_module():
    """Its own hooks run outside of its forward."""

    def program(mesh):
        made = fully_shard(model(), mesh, units=GatedBlock)
        hook = made.blocks[0].register_forward_hook(
            lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)
        )
        with pytest.raises(KeyboardInterrupt):
            loss_of(made, *batch(mesh, False))
        hook.remove()
        _at_rest(made)
        check_gradients(made, mesh)

    on_ranks((2,), program)


@pytest.mark.parametrize("form", ["ddp", "zero1", "fsdp"])
def test_a_failed_micro_batch(form):
    """Gradients in `accumulate_grads` when an exception leaves it are not added to those of the
    next block after zero_grad.
    """

    def program(mesh):
        made = FORMS[form](model(), mesh)
        with pytest.raises(RuntimeError, match="no more"), sm.accumulate_grads():
            loss_of(made, *batch(mesh, False)).backward()
            raise RuntimeError("no more")
        made.zero_grad()
        check_gradients(made, mesh)
        made.zero_grad()
        with sm.accumulate_grads():
            check = loss_of(made, *batch(mesh, False))
            check.backward()
        expected = {name: x.grad.full_tensor() for name, x in made.named_parameters()}
        made.zero_grad()
        loss_of(made, *batch(mesh, False)).backward()
        for name, x in made.named_parameters():
            torch.testing.assert_close(x.grad.full_tensor(), expected[name], rtol=1e-12, atol=1e-12)

    on_ranks((4,), program)


# -- parameters without gradients ------------------------------------------------------------------


def _partly(m, tokens=None, targets=None, there=True):
    """Run a block that uses only `a` on this rank."""
    block = m.blocks[1]
    if not there:
        block.forward = lambda x: x + block.a(x).sum(-1, keepdim=True)
    return loss_of(m) if tokens is None else loss_of(m, tokens, targets)


@pytest.mark.parametrize("form", SOME)
def test_unused_on_all_ranks(form):
    def program(mesh):
        made = FORMS[form](model(), mesh)
        check_gradients(made, mesh, lambda m, *given: _partly(m, *given, there=False))
        assert made.blocks[1].b.weight.grad is None

    on_ranks((2, 2), program)


@pytest.mark.parametrize("form", ["ddp", "zero1", "fsdp"])
def test_parameter_unused_on_one_rank_raises(form):
    def program(mesh):
        made = FORMS[form](model(), mesh)
        with pytest.raises(sm.errors.CollectiveMismatchError) as caught:
            _partly(made, *batch(mesh, False), there=mesh.get_rank() != 2).backward()
        return str(caught.value)

    for text in on_ranks((4,), program):
        assert "ranks [2] call " in text
        scalar = "blocks.1.g, " if form == "ddp" else ""
        named = f"{scalar}blocks.1.norm.weight, blocks.1.norm.bias, blocks.1.b.weight"
        assert (
            f"blocks.1: sum gradients of 2 parameters, without {named}, which took no part in the "
            "loss" in " ".join(text.split())
        )


@pytest.mark.parametrize("form", SOME)
def test_find_unused_parameters(form):
    """On a rank that did not use a parameter, its gradient counts as zero."""

    def program(mesh):
        made = FORMS[form](model(), mesh, find_unused_parameters=True)
        there = mesh.get_rank() != 2
        _partly(made, *batch(mesh, False), there=there).backward()
        return {name: x.grad.full_tensor() for name, x in made.named_parameters()}

    def reference():
        parts = []
        for rank in range(4):
            made = model()
            tokens, targets = (x.chunk(4)[rank] for x in (TOKENS, TARGETS))
            _partly(made, tokens, targets, there=rank != 2).backward()
            parts.append(
                {
                    name: torch.zeros_like(x) if x.grad is None else x.grad
                    for name, x in made.named_parameters()
                }
            )
        return {name: sum(part[name] for part in parts) / 4 for name in parts[0]}

    expected = reference()
    for found in on_ranks((2, 2), program):
        for name, x in expected.items():
            torch.testing.assert_close(found[name], x, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("accumulate", [False, True])
def test_units_skipped_on_some_ranks(accumulate):
    """With find_unused_parameters and parameters that are whole on each rank."""

    def skipped(rank):
        return (rank % 2,) if rank < 3 else (0, 1)

    def program(mesh):
        made = FORMS["ddp"](model(), mesh, find_unused_parameters=True)
        for _ in range(2):
            made.zero_grad()
            with sm.accumulate_grads() if accumulate else torch.enable_grad():
                loss_of(made, *batch(mesh, False), skip=skipped(mesh.get_rank())).backward()
        return gradients(made)

    def reference(m):
        parts = zip(TOKENS.chunk(4), TARGETS.chunk(4), strict=True)
        return sum(loss_of(m, *part, skip=skipped(rank)) for rank, part in enumerate(parts)) / 4

    for found in on_ranks((4,), program):
        same(found, reference_gradients(reference))


@pytest.mark.parametrize("form", ["ddp", "zero1", "fsdp"])
def test_unit_skipped_on_one_rank_raises(form):
    def program(mesh):
        made = FORMS[form](model(), mesh)
        with pytest.raises(sm.errors.CollectiveMismatchError) as caught:
            loss_of(made, *batch(mesh, False), skip=(1,) if mesh.get_rank() == 0 else ()).backward()
        return str(caught.value)

    assert all("blocks.1: " in text for text in on_ranks((4,), program))


@pytest.mark.one_in(5)
@pytest.mark.parametrize("find", [False, True])
@pytest.mark.parametrize("form", SOME)
def test_frozen_parameters(form, find):
    """They get no gradient, also with accumulation or find_unused_parameters, and are not reported
    as unused.
    """

    def frozen():
        made = model()
        made.blocks[0].requires_grad_(False)
        made.blocks[1].a.requires_grad_(False)
        return made

    def program(mesh):
        made = FORMS[form](frozen(), mesh, find_unused_parameters=find)
        check_gradients(made, mesh, of=frozen())
        made.zero_grad()
        with sm.accumulate_grads():
            loss_of(made, *batch(mesh, False)).backward()
        same(gradients(made), reference_gradients(net=frozen()))

    on_ranks((2, 2), program)


@pytest.mark.parametrize("form", SOME)
def test_requires_grad_flipped_between_steps(form):
    def program(mesh):
        made, reference = FORMS[form](model(), mesh), model()
        for flag in (False, True, False):
            for m in (made, reference):
                m.zero_grad()
                m.blocks[0].a.requires_grad_(flag)
                m.norm.requires_grad_(not flag)
            check_gradients(made, mesh, of=reference)

    on_ranks((2, 2), program)


# -- tied and ignored ------------------------------------------------------------------------------


def _tied_blocks():
    made = model()
    made.blocks[1].a.weight = made.blocks[0].a.weight
    return made


@pytest.mark.parametrize("form", ["ddp", "zero1", "fsdp"])
def test_parameters_tied_across_units(form):
    def program(mesh):
        made = FORMS[form](_tied_blocks(), mesh)
        assert made.blocks[1].a.weight is made.blocks[0].a.weight
        check_gradients(made, mesh, of=_tied_blocks())

    on_ranks((4,), program)


def test_tie_across_calls_raises():
    def program(mesh):
        made = _tied_blocks()
        fully_shard(made.blocks[0], mesh)
        with pytest.raises(
            ValueError,
            match=(
                r"weight is tied to a\.weight, which is in a unit of its own; shard both in one "
                r"call"
            ),
        ):
            fully_shard(made.blocks[1], mesh)

    on_ranks((2,), program)


def test_ignored_parameters_are_unchanged():
    def program(mesh):
        plain = model()
        kept = [plain.blocks[0].a.weight]
        made = fully_shard(plain, mesh, units=GatedBlock, ignored_params=kept)
        assert made.blocks[0].a.weight is kept[0]
        loss_of(made, *batch(mesh, False)).backward()
        assert type(kept[0].grad) is torch.Tensor  # of this rank's part of the batch

    on_ranks((2,), program)
