"""amax, amin and similar: gradients of ties, NaN, and communication."""

from __future__ import annotations

import math

import pytest
import torch

import shardmesh as sm
from shardmesh import P
from shardmesh.sharding.ops.rules.check import prove
from tests.sharding.ranks import collectives, launched, on_mesh

# Of every column the extreme stands in several rows, in unequal numbers on the ranks: 2 of 5 rows
# on one of two ranks.
TIED = torch.tensor([[3, 1, 0], [3, 1, 2], [1, 1, 2], [3, 0, 2], [0, 1, 2]], dtype=torch.float64)
SMALL = {"meshes": [(2,), (3,), (2, 2)], "most": 12}


@pytest.mark.one_in(5)
@pytest.mark.parametrize("values", [TIED, -TIED], ids=["highest", "lowest"])
@pytest.mark.parametrize("dim", [0, 1, (0, 1), ()])
@pytest.mark.parametrize("extreme", [torch.amax, torch.amin])
def test_ties_share_the_gradient(extreme, dim, values):
    prove(extreme, (values, dim), **SMALL)
    prove(extreme, (values, dim, True), **SMALL)


@pytest.mark.parametrize(
    "func", [torch.max, torch.min, torch.aminmax, lambda x: torch.aminmax(x, dim=0)]
)
def test_other_call_forms(func):
    prove(func, (TIED,), **SMALL)


def test_second_derivative():
    prove(
        lambda x: torch.autograd.grad((torch.amax(x, 0) ** 3).sum(), x, create_graph=True)[0],
        (TIED + 1,),
        meshes=[(2,)],
        most=4,
    )


@pytest.mark.parametrize(
    "extreme", [torch.amax, torch.amin, lambda x, _: torch.max(x), lambda x, _: torch.min(x)]
)
def test_nan_and_infinities(extreme):
    x = torch.tensor([[math.nan, 1.0], [2.0, -math.inf], [math.inf, math.nan]], dtype=torch.float64)

    def program(mesh):
        y = sm.distribute_tensor(x, mesh, P("a"), src_data_rank=None).requires_grad_()
        found = extreme(y, 0)
        found.sum().backward()
        return found.full_tensor(), y.grad.full_tensor()

    leaf = x.clone().requires_grad_()
    expected = extreme(leaf, 0)
    expected.sum().backward()
    for found, grad in on_mesh((3,), program):
        torch.testing.assert_close(found, expected, equal_nan=True)
        torch.testing.assert_close(grad, leaf.grad, equal_nan=True)


def test_pending_without_gradient_and_reduced_with_it():
    def program(mesh):
        x = sm.distribute_tensor(TIED, mesh, P("a"), src_data_rank=None)
        with collectives() as records:
            pending = x.amax(0)
        lazily, y = launched(records), x.requires_grad_().amax(0)
        return lazily, pending.spec, y.spec, y.detach().tolist() == pending.tolist()

    for lazily, pending, reduced, same in on_mesh((2,), program):
        assert lazily == []
        assert pending == P(None, unreduced={"a": "max"})
        assert reduced == P(None)
        assert same


def test_bool_and_integers():
    prove(torch.amax, (TIED.long(), 0), **SMALL)
    prove(torch.amin, (TIED > 1, 1), **SMALL)
    prove(torch.amax, (torch.zeros(3, 0), 0), **SMALL)
