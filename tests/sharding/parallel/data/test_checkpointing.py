"""`torch.utils.checkpoint` around units, inside them and inside their modules: correct gradients,
less memory.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardmesh as sm
from shardmesh import P
from shardmesh.sharding.parallel.data.plan import UnitPlan
from tests.device import DEVICE
from tests.sharding.parallel.data.training import (
    FORMS,
    batch,
    gradients,
    loss_of,
    model,
    on_ranks,
    reference_gradients,
    same,
    whole,
)


class _Around(nn.Module):
    def __init__(self, inner, reentrant):
        super().__init__()
        self.inner, self.reentrant = inner, reentrant

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


def _around_units(form, mesh, reentrant):
    made = FORMS[form](model(), mesh)
    for i, block in enumerate(made.blocks):
        made.blocks[i] = _Around(block, reentrant)
    return made


def _around_inside(form, mesh, reentrant):
    """Make the checkpointed modules the units."""
    made = model()
    for i, block in enumerate(made.blocks):
        made.blocks[i] = _Around(block, reentrant)
    return FORMS[form](made, mesh, units="blocks.?")


def _part_of_a_unit(form, mesh, reentrant):
    made = FORMS[form](model(), mesh)
    for block in made.blocks:
        inner = nn.Sequential(block.norm, block.a, nn.Tanh(), block.b)
        block.forward = lambda x, block=block, inner=inner: (
            x + block.g * checkpoint(inner, x, use_reentrant=reentrant)
        )
    return made


def _as_named(found):
    return {name.replace(".inner", ""): x for name, x in found.items()}


@pytest.mark.one_in(5)
@pytest.mark.parametrize("form", ["ddp", "zero1", "fsdp", "hybrid"])
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("place", [_around_units, _around_inside, _part_of_a_unit])
def test_gradients(form, reentrant, place):
    def program(mesh):
        made = place(form, mesh, reentrant)
        for _ in range(2):
            made.zero_grad()
            loss_of(made, *batch(mesh, False)).backward()
            same(_as_named(gradients(made)), reference_gradients())

    on_ranks((2, 2), program)


def test_checkpointing_needs_no_more_gathers():
    """A unit that is checkpointed is gathered once for its recomputation and its backward."""

    def program(mesh, place):
        made = FORMS["fsdp"](model(), mesh) if place is None else place("fsdp", mesh, False)
        for _ in range(2):
            with sm.debug.comm_budget() as used:
                loss_of(made, *batch(mesh, False)).backward()
        return used.by_op

    expected = on_ranks((4,), program, None)[0]
    assert on_ranks((4,), program, _around_units)[0] == expected
    assert on_ranks((4,), program, _around_inside)[0] == expected


def test_recomputation_looks_for_no_replaced_parameters(monkeypatch):
    """Forward has taken them over; each recomputed block would look through all units again."""
    plans = []
    adopt = UnitPlan.adopt_materialized

    def counted(plan):
        plans.append(plan)
        adopt(plan)

    monkeypatch.setattr(UnitPlan, "adopt_materialized", counted)

    def program(mesh):
        made = _around_units("fsdp", mesh, reentrant=False)
        loss_of(made, *batch(mesh, False)).backward()
        return len(made.blocks) + 1

    units = on_ranks((2,), program)
    assert len(plans) == len(set(plans)) == sum(units)


@pytest.mark.parametrize("place", [_around_units, _around_inside, _part_of_a_unit])
def test_sharded_inputs(place):
    def program(mesh):
        made = place("fsdp", mesh, False)
        loss_of(made, *batch(mesh, True)).backward()
        same(_as_named(gradients(made)), reference_gradients())

    on_ranks((4,), program)


class _Checkpointing(nn.Module):
    """Checkpoints part of its own forward, as Hugging Face layers do."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False)

    def inner(self, x):
        return self.linear(x).tanh()


@pytest.mark.parametrize("needs_grad", [False, True])
def test_sharded_arguments_that_require_grad_or_not(needs_grad):
    """The first block's argument is the input itself, the second's is the result of an operator."""

    def program(mesh):
        torch.manual_seed(0)
        made = nn.Sequential(_Checkpointing(), _Checkpointing()).double()
        x = (
            torch.linspace(-1, 1, 32, dtype=torch.float64)
            .view(8, 4)
            .to(DEVICE)
            .requires_grad_(needs_grad)
        )
        made(x).square().sum().backward()
        expected, input_grad = gradients(made), x.grad
        made.zero_grad()
        sm.parallel.fully_shard(made, mesh, units=_Checkpointing)
        x = sm.device_put(x.detach(), mesh, P("dp")).requires_grad_(needs_grad)
        made(x).square().sum().backward()
        same({**gradients(made), "x": whole(x.grad)}, {**expected, "x": input_grad})

    on_ranks((4,), program)


def test_activations_are_not_kept():
    """Between forward and backward a checkpointed unit keeps its input and output, and nothing of
    what it computed.
    """
    wide = 64

    def saved(mesh, around):
        made = FORMS["fsdp"](model(f=wide), mesh)
        if around:
            for i, block in enumerate(made.blocks):
                made.blocks[i] = _Around(block, False)
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
            loss_of(made, *batch(mesh, False))
        return sum(x.numel() for x in kept if x.shape[-1:] == (wide,))

    assert on_ranks((2,), saved, True) == [0, 0]
    assert min(on_ranks((2,), saved, False)) > 0
