"""Modules that are registered under several parents or in several units, and parameters tied across
units.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardmesh as sm
from shardmesh import P
from shardmesh.parallel import data_parallel, fully_shard
from tests.sharding.parallel.data.training import gradients, on_ranks, same

RANKS = 2
_ROWS = torch.arange(12.0, dtype=torch.float64).reshape(4, 3).sin()


class Block(nn.Module):
    def __init__(self, shared):
        super().__init__()
        self.own, self.shared = nn.Linear(3, 3), shared

    def forward(self, x):
        return self.own(x).tanh() + self.shared(x)


class Skip(nn.Module):
    def __init__(self, down, up):
        super().__init__()
        self.down, self.up = down, up

    def forward(self, x):
        return self.up(self.down(x).tanh())


class TwoPaths(nn.Module):
    """Registers modules in a list, and those of the list in another module, as MONAI's DynUNet
    does.
    """

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(3, 4)), nn.Linear(4, 3)])
        self.skip = Skip(*self.blocks)

    def forward(self, x):
        return self.skip(x)


class TwiceInOne(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(3, 3)
        self.b = self.a

    def forward(self, x):
        return self.b(self.a(x).tanh())


class Checkpointed(nn.Sequential):
    def forward(self, x):
        for inner in self:
            x = checkpoint(inner, x, use_reentrant=False)
        return x


def _blocks(container=nn.Sequential):
    shared = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    return container(Block(shared), Block(shared))


def _deeper():
    """The shared module is inside of one unit, and directly inside of another that is nested in a
    third.
    """
    shared = nn.Linear(3, 3)
    return nn.Sequential(
        Skip(Block(shared), nn.Sequential(Block(nn.Sequential(shared)))), Block(nn.Linear(3, 3))
    )


def _tied():
    first, second = Block(nn.Linear(3, 3)), Block(nn.Linear(3, 3))
    second.own.weight = first.shared.weight
    return Checkpointed(first, second)


MODELS = {
    "two paths": TwoPaths,
    "twice in one": TwiceInOne,
    "two units": _blocks,
    "two units, recomputed": lambda: _blocks(Checkpointed),
    "nested units": _deeper,
    "tied across units": _tied,
}


def _model(name):
    torch.manual_seed(0)
    return MODELS[name]().double().eval()


def _one_by_one(m, mesh):
    for inner in m.modules():
        if isinstance(inner, Block):
            fully_shard(inner, mesh)
    return fully_shard(m, mesh)


FORMS = {
    "ddp": lambda m, mesh: data_parallel(m, mesh),
    "ddp, units": lambda m, mesh: data_parallel(
        m, mesh, units=lambda _, inner: isinstance(inner, (Block, Skip))
    ),
    "zero1": lambda m, mesh: data_parallel(
        m, mesh, optimizer="dp", units=lambda _, inner: type(inner) in (Block, Skip, nn.Linear)
    ),
    "fsdp": lambda m, mesh: fully_shard(
        m, mesh, units=lambda _, inner: type(inner) in (Block, Skip, nn.Linear)
    ),
    "fsdp, blocks": lambda m, mesh: fully_shard(
        m, mesh, units=lambda _, inner: isinstance(inner, (Block, nn.ModuleList))
    ),
    "fsdp, one by one": _one_by_one,
}


@pytest.mark.one_in(3, each=["name", "form", "sharded"])
@pytest.mark.parametrize("sharded", [False, True], ids=["plain", "sharded"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_one_process(name, form, sharded):
    if form == "fsdp, one by one" and name == "tied across units":
        pytest.skip("refused: shard both in one call")
    if form in ("ddp, units", "fsdp, blocks") and name == "twice in one":
        pytest.skip("no such unit")
    if form == "fsdp, blocks" and name == "two paths":
        pytest.skip("a list is no unit that is called")

    def run(made, x):
        for _ in range(2):
            made(x).square().mean().backward()
        return gradients(made)

    def program(mesh):
        made = FORMS[form](_model(name), mesh)
        rank = mesh.get_rank()
        return run(
            made,
            sm.distribute_tensor(_ROWS, mesh, P("dp"), src_data_rank=None)
            if sharded
            else _ROWS.chunk(2)[rank],
        )

    expected = run(_model(name), _ROWS)
    for found in on_ranks((RANKS,), program):
        same(found, expected)


@pytest.mark.parametrize("form", ["ddp, units", "zero1", "fsdp"])
@pytest.mark.parametrize("name", ["two units", "tied across units"])
def test_a_unit_that_is_called_alone(name, form):
    """The outer unit gathers what the unit shares, although the model does not run."""

    def run(made, x):
        for inner in (made[1], made[0]):
            inner(x).square().mean().backward()
        return gradients(made)

    expected = run(_model(name), _ROWS)
    for found in on_ranks(
        (RANKS,), lambda mesh: run(FORMS[form](_model(name), mesh), _ROWS.chunk(2)[mesh.get_rank()])
    ):
        same(found, expected)
