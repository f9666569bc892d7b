"""Training with compositions: microbatches, clipping, mixed precision, Muon, and checkpoints from
one composition to another.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.func import functional_call

import shardmesh as sm
from tests.device import DEVICE
from tests.sharding.parallel.compositions import (
    EVEN,
    STEPS,
    UNEVEN,
    Composition,
    adamw,
    batch_of,
    by_one_process,
    loss_in,
    on,
    parallelized,
    stepped,
    train,
    used,
    whole,
)
from tests.sharding.parallel.costs import StepCosts, of_data
from tests.sharding.parallel.models import gpt, loss_of

MICRO, MAX_NORM = 2, 0.05


def here(mesh):
    return dict(zip(mesh.axis_names, mesh.coordinate, strict=True))


def parity(found, expected, rtol=1e-12):
    torch.testing.assert_close(torch.stack(found).mean(0), torch.stack(expected), rtol=rtol, atol=0)


# -- microbatches, and clipping -------------------------------------------------------------------

ODD, SMALL = replace(UNEVEN, layers=1), replace(EVEN, layers=1)
CLIPPED = [
    Composition("ddp", "", "plain", ODD, (4,)),
    Composition("zero1", "tp", "global", ODD, (2, 2)),
    Composition("zero2", "", "plain", SMALL, (4,)),
    Composition("fsdp", "sp", "global", ODD, (2, 2)),
    Composition("hsdp", "", "global", ODD, (2, 2)),
    Composition("hybrid", "", "plain", ODD, (2, 2)),
]


def _accumulated(optimizer, model, losses):
    """Step with the clipped mean gradient of several losses; return their mean and the gradient
    norm before clipping.
    """
    kept = []
    with sm.accumulate_grads():
        for loss in losses:
            (loss / MICRO).backward()
            kept.append(whole(loss))
    norm = sm.training.clip_grad_norm_(model.parameters(), MAX_NORM)
    optimizer.step()
    optimizer.zero_grad()
    return torch.stack([torch.stack(kept).mean(), norm])


def _clipped_by_one_process(case):
    model = gpt(case.config).to(DEVICE)
    optimizer, found = adamw(model), []
    for step in range(STEPS):
        batches = (batch_of(case.config, case.b, MICRO * step + i) for i in range(MICRO))
        found.append(
            _accumulated(
                optimizer, model, (loss_of(model(inputs), targets) for inputs, targets in batches)
            )
        )
    return found


@pytest.mark.one_in(5, each=["case.inputs"])
@pytest.mark.parametrize("case", CLIPPED, ids=str)
def test_micro_batches_and_clipping(case):
    """Every step is clipped; the norms equal those of one process."""

    def program(mesh):
        model = parallelized(case, mesh)
        optimizer = adamw(model)
        return torch.stack(
            [
                _accumulated(
                    optimizer,
                    model,
                    (loss_in(case, model, mesh, MICRO * step + i) for i in range(MICRO)),
                )
                for step in range(STEPS)
            ]
        )

    expected = _clipped_by_one_process(case)
    assert min(norm for _, norm in expected) > MAX_NORM
    parity(on(case, program), expected)


@pytest.mark.parametrize("case", [case for case in CLIPPED if case.inputs == "plain"], ids=str)
def test_calls_and_bytes_of_micro_batches(case):
    """Sharded gradients are summed per microbatch, whole ones once."""

    def backward(model, mesh):
        with sm.accumulate_grads():
            for i in range(MICRO):
                loss_in(case, model, mesh, i).backward()

    def program(mesh):
        model = parallelized(case, mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            found = used(lambda: backward(model, mesh))
            optimizer.step()
            optimizer.zero_grad()
        return found, here(mesh)

    for found, coordinate in on(case, program):
        assert found == of_data(StepCosts(case, coordinate), MICRO)


# -- precision -------------------------------------------------------------------------------------


def test_float32():
    case = Composition("fsdp", "sp", "global", replace(UNEVEN, dtype=torch.float32), (2, 2))
    found = on(case, lambda mesh: train(case, mesh, parallelized(case, mesh))[0])
    torch.testing.assert_close(torch.stack(found).mean(0), by_one_process(case), rtol=1e-5, atol=0)


HALF = torch.bfloat16
# The logits, no block.
MIXED = sm.parallel.MixedPrecisionPolicy(
    param_dtype=HALF, reduce_dtype=torch.float32, output_dtype=torch.float32
)


def _mixed_by_hand(case, ranks):
    """Compute each rank's loss in bfloat16, sum gradients in float32, and step the float32
    parameters.
    """
    model = gpt(case.config).to(DEVICE)
    model.cos, model.sin = model.cos.to(HALF), model.sin.to(HALF)  # as what goes into a block is
    optimizer, found = adamw(model), []
    for step in range(STEPS):
        parts = zip(*[x.chunk(ranks) for x in batch_of(case.config, case.b, step)], strict=True)
        losses, sums = [], {name: torch.zeros_like(p) for name, p in model.named_parameters()}
        for inputs, targets in parts:
            halves = {
                name: p.detach().to(HALF).requires_grad_() for name, p in model.named_parameters()
            }
            losses.append(loss_of(functional_call(model, halves, (inputs,)).float(), targets))
            for (name, _), grad in zip(
                halves.items(), torch.autograd.grad(losses[-1], list(halves.values())), strict=True
            ):
                sums[name] += grad.float()
        for name, p in model.named_parameters():
            p.grad = sums[name] / ranks
        optimizer.step()
        found.append(torch.stack(losses).mean().detach())
    return found


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("form", "shape"), [("ddp", (4,)), ("zero1", (4,)), ("hsdp", (2, 2)), ("hybrid", (2, 2))]
)
def test_mixed_precision_equals_manual_computation(form, shape):
    case = Composition(form, "", "plain", replace(EVEN, dtype=torch.float32), shape)
    case = replace(case, config=replace(case.config, vocabulary=31))
    found = on(case, lambda mesh: train(case, mesh, parallelized(case, mesh, mp_policy=MIXED))[0])
    parity(found, _mixed_by_hand(case, 4), rtol=1e-5)


@pytest.mark.parametrize(("form", "shape"), [("fsdp", (4,)), ("zero2", (2, 2)), ("hybrid", (2, 2))])
def test_bytes_of_mixed_precision(form, shape):
    """Parameters are sent in 2 bytes per element, gradients in 4."""
    case = Composition(form, "", "plain", replace(UNEVEN, dtype=torch.float32), shape)

    def program(mesh):
        model = parallelized(case, mesh, mp_policy=MIXED)
        for step in range(2):
            found = used(lambda step=step: loss_in(case, model, mesh, step).backward())
            torch.optim.SGD(model.parameters(), lr=0.1).step()
        return found, here(mesh)

    for found, coordinate in on(case, program):
        assert found == of_data(StepCosts(case, coordinate, param_bytes=2, sum_bytes=4))


# -- Muon ------------------------------------------------------------------------------------------


def _muon(model):
    named = list(model.named_parameters())
    return sm.optim.Muon(
        named, lr=0.02, adamw=["*embed*", "lm_head*"], adamw_lr=1e-2, ns_dtype=torch.float64
    )


def _by_muon(model, losses):
    optimizer = _muon(model)
    return torch.stack([stepped(optimizer, loss) for loss in losses])


@pytest.mark.parametrize(
    "case",
    [
        Composition("fsdp", "tp", "global", UNEVEN, (2, 2)),
        Composition("zero1", "", "plain", UNEVEN, (4,)),
    ],
    ids=str,
)
def test_muon(case):
    def program(mesh):
        model = parallelized(case, mesh)
        return _by_muon(model, (loss_in(case, model, mesh, step) for step in range(STEPS)))

    model = gpt(case.config).to(DEVICE)
    batches = (batch_of(case.config, case.b, step) for step in range(STEPS))
    expected = _by_muon(model, (loss_of(model(inputs), targets) for inputs, targets in batches))
    parity(on(case, program), list(expected))


# -- checkpoints -----------------------------------------------------------------------------------


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (
            Composition("fsdp", "tp", "global", UNEVEN, (2, 2)),
            Composition("zero1", "", "global", UNEVEN, (2, 1)),
        ),
        (
            Composition("hsdp", "", "plain", EVEN, (2, 2)),
            Composition("fsdp", "sp", "global", EVEN, (2, 2)),
        ),
    ],
    ids=str,
)
def test_another_composition_resumes_from_a_checkpoint(before, after, tmp_path):
    """Half of the steps with one, half with the other: all losses equal those of one process."""
    half = STEPS // 2

    def losses(case, mesh, model, optimizer, steps):
        return torch.stack([stepped(optimizer, loss_in(case, model, mesh, step)) for step in steps])

    def first(mesh):
        model = parallelized(before, mesh)
        optimizer = adamw(model)
        found = losses(before, mesh, model, optimizer, range(half))
        sm.checkpoint.save(sm.checkpoint.state_dict(model, optimizer), tmp_path)
        return found

    def second(mesh):
        model = parallelized(after, mesh)
        optimizer = adamw(model)
        sm.checkpoint.load_state_dict(
            model,
            sm.checkpoint.load(tmp_path, like=sm.checkpoint.state_dict(model, optimizer)),
            optimizer,
        )
        return losses(after, mesh, model, optimizer, range(half, STEPS))

    assert before.b == after.b
    found = [
        torch.stack(on(case, program)).mean(0)
        for case, program in ((before, first), (after, second))
    ]
    torch.testing.assert_close(torch.cat(found), by_one_process(before), rtol=1e-12, atol=0)
