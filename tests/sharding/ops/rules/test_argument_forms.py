"""Tensors in place of numbers: alpha, beta and value as 0-d tensors of every layout."""

from __future__ import annotations

import pytest
import torch

import shardmesh as sm
from shardmesh import P
from tests.sharding.ops.rules.table import f
from tests.sharding.ranks import collectives, launched, on_mesh, same_error

X, Y, Z, SQUARE = f(6, 4), f(6, 4, seed=1), f(6, 4, seed=2), f(6, 6, seed=3)

CALLS = {
    "add_": lambda x, y, z, square, n: x.add_(y, alpha=n),
    "sub_": lambda x, y, z, square, n: x.sub_(y, alpha=-n),
    "a number added": lambda x, y, z, square, n: x.add_(2, alpha=n),
    "add": lambda x, y, z, square, n: torch.add(x, y, alpha=n),
    "rsub": lambda x, y, z, square, n: torch.rsub(x, y, alpha=n),
    "addcmul_": lambda x, y, z, square, n: x.addcmul_(y, z, value=n),
    "addcdiv": lambda x, y, z, square, n: torch.addcdiv(x, y, z, value=n),
    "addmm": lambda x, y, z, square, n: torch.addmm(x, square, z, alpha=n, beta=n * 2),
}


def numbers(mesh, value):
    """Return the number as a plain tensor, replicated, and pending."""
    number = sm.distribute_tensor(value, mesh, P(), src_data_rank=None)
    return value, number, number.redistribute(P(unreduced={"a"}))


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize(
    "value", [torch.tensor(-1.5, dtype=torch.float64), torch.tensor(3), torch.tensor(0.0)], ids=str
)
def test_0d_tensor_is_its_value(name, value):
    call = CALLS[name]
    expected = call(X.clone(), Y, Z, SQUARE, value.item())

    def program(mesh):
        for number in numbers(mesh, value):
            made = call(
                *[
                    sm.distribute_tensor(t.clone(), mesh, P("a"), src_data_rank=None)
                    for t in (X, Y, Z, SQUARE)
                ],
                number,
            )
            torch.testing.assert_close(made.full_tensor(), expected)

    on_mesh((4,), program)


def test_changed_value_on_the_same_line_is_used():
    def program(mesh):
        x = sm.distribute_tensor(X, mesh, P("a"), src_data_rank=None)
        for value in (2.0, -1.0):
            for number in numbers(mesh, torch.tensor(value)):
                torch.testing.assert_close(x.add(x, alpha=number).full_tensor(), X * (1 + value))

    on_mesh((2,), program)


def test_only_a_pending_number_communicates():
    def program(mesh):
        x = sm.distribute_tensor(X, mesh, P("a"), src_data_rank=None)
        for number, wanted in zip(
            numbers(mesh, torch.tensor(2.0)), ([], [], ["all_reduce"]), strict=True
        ):
            with collectives() as records:
                x.add_(x, alpha=number)
            assert launched(records) == wanted

    on_mesh((2,), program)


@pytest.mark.parametrize(
    "number", [torch.ones(2), torch.ones((), requires_grad=True)], ids=["dims", "gradient"]
)
def test_non_numbers_raise(number):
    def program(mesh):
        x = sm.distribute_tensor(X, mesh, P("a"), src_data_rank=None)
        x.add_(x, alpha=sm.distribute_tensor(number, mesh, P(), src_data_rank=None))

    assert "'alpha' must be Number" in same_error((2,), program, TypeError)


def test_ranks_outside_the_mesh_continue():
    def program(mesh):
        sub = sm.DeviceMesh("cpu", [0, 2])
        x = sm.distribute_tensor(torch.ones(4), sub, [sm.Shard(0)], src_data_rank=None)
        x.add_(x, alpha=x.sum())
        return None if sub.coordinate is None else x.full_tensor().tolist()

    assert on_mesh((3,), program) == [[5.0] * 4, None, [5.0] * 4]
