"""Softmax, log_softmax and logsumexp over a sharded dim."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import shardmesh as sm
from shardmesh import P
from shardmesh.sharding.ops.rules.check import place
from tests.sharding.ranks import collectives, launched, on_mesh, same_error

X = torch.randn(6, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
OPERATORS = {
    "softmax": lambda x: F.softmax(x, 1),
    "log_softmax": lambda x: torch.log_softmax(x, 1),
    "softmin": lambda x: F.softmin(x, 1),
    "logsumexp": lambda x: x.logsumexp(1),
    "logsumexp of all": lambda x: torch.logsumexp(x, (0, 1), keepdim=True),
}
ALONG = [P(None, "a"), P(None, ("b", "a")), P("b", "a"), P(None, "a", unreduced={"b"})]


@pytest.mark.one_in(5)
@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("spec", ALONG, ids=str)
def test_values_and_gradients_of_gradients(name, spec):
    """On 4 x 2 ranks, so that of 10 columns parts are uneven, and under 8 ranks some have one or
    two.
    """
    call = OPERATORS[name]

    def second(x):
        y = call(x)
        (g,) = torch.autograd.grad((y * y.detach().cos()).sum(), x, create_graph=True)
        (h,) = torch.autograd.grad((g * g).sum(), x)
        return y.detach(), g.detach(), h

    wanted = second(X.clone().requires_grad_())

    def program(mesh):
        for got, want in zip(second(place(X, mesh, spec).requires_grad_()), wanted, strict=True):
            torch.testing.assert_close(got.full_tensor(), want)

    on_mesh((4, 2), program)


@pytest.mark.parametrize("name", ["softmax", "log_softmax", "logsumexp"])
def test_two_reductions_per_row_in_forward_and_one_in_backward(name):
    def program(mesh):
        x = place(X.float(), mesh, P(None, "a")).requires_grad_()
        with collectives() as forward:
            y = OPERATORS[name](x)
        assert launched(forward) == ["all_reduce"] * 2
        assert {r.bytes_received for r in forward} == {2 * 3 * 6 * 4 // 4}
        loss = (y * y.detach()).sum()
        with collectives() as backward:
            loss.backward()
        assert launched(backward) == ["all_reduce"]

    on_mesh((4,), program)


def test_unsharded_dim_needs_no_communication():
    def program(mesh):
        x = place(X, mesh, P("a")).requires_grad_()
        with collectives() as records:
            F.softmax(x, 1).square().sum(1).backward(gradient=place(X[:, 0], mesh, P("a")))
            x.logsumexp(-1)
        assert records == []

    on_mesh((3,), program)


INF = float("inf")
EXTREMES = [
    [-INF] * 5,
    [INF, 1, 2, 3, 4],
    [1, -INF, -INF, -INF, -INF],
    [800, -800, 0, 800, 5],
    [0, 1, torch.nan, 2, 3],
]
EXTREMES = torch.tensor(EXTREMES, dtype=torch.float64)


@pytest.mark.parametrize("name", ["softmax", "log_softmax", "logsumexp"])
@pytest.mark.parametrize("sizes", [(2, 2, 1), (5, 0, 0), (0, 1, 4)], ids=str)
def test_infinities_and_empty_parts(name, sizes):
    """As in torch: the softmax of a row of -inf is NaN, and its logsumexp is -inf."""
    leaf = EXTREMES.clone().requires_grad_()
    want = OPERATORS[name](leaf)
    weight = torch.arange(1.0, 1 + want.numel()).view(want.shape)
    want.backward(weight)

    def program(mesh):
        x = sm.distribute_tensor(
            EXTREMES, mesh, P(None, "a", sizes={"a": sizes}), src_data_rank=None
        ).requires_grad_()
        got = OPERATORS[name](x)
        torch.testing.assert_close(got.detach().full_tensor(), want.detach(), equal_nan=True)
        got.backward(weight)
        torch.testing.assert_close(x.grad.full_tensor(), leaf.grad, equal_nan=True)

    on_mesh((3,), program)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_accumulates_in_float32(dtype):
    """2000 equal numbers: their sum of exponentials could not be counted in bfloat16."""
    x = torch.zeros(2, 2000, dtype=dtype)

    def program(mesh):
        split = place(x, mesh, P(None, "a"))
        for call in OPERATORS.values():
            got, want = call(split), call(x)
            assert got.dtype is dtype
            assert torch.equal(got.full_tensor(), want)

    on_mesh((4,), program)


def test_dtype_is_that_of_the_computation():
    def program(mesh):
        x = place(torch.arange(12).view(3, 4), mesh, P(None, "a"))
        for got, want in (
            (
                F.softmax(x, 1, dtype=torch.float64),
                F.softmax(torch.arange(12.0, dtype=torch.float64).view(3, 4), 1),
            ),
            (x.softmax(1, torch.float32), F.softmax(torch.arange(12.0).view(3, 4), 1)),
            (
                torch.log_softmax(x, -1, dtype=torch.float32),
                F.log_softmax(torch.arange(12.0).view(3, 4), 1),
            ),
        ):
            assert got.dtype is want.dtype
            torch.testing.assert_close(got.full_tensor(), want)
        with pytest.raises(RuntimeError, match="not implemented for 'Long'"):
            x.softmax(1)

    on_mesh((2,), program)


@pytest.mark.parametrize("name", ["softmax", "log_softmax", "softmin", "logsumexp"])
def test_dim_out_of_range_raises(name):
    """5 is not taken modulo 2."""

    def program(mesh):
        getattr(F if name == "softmin" else torch, name)(place(X, mesh, P(None, "a")), 5)

    assert "out of range" in same_error((2,), program, IndexError)
