"""Selection along a sharded dim: a few candidates per rank are gathered, never the dim."""

from __future__ import annotations

import math

import pytest
import torch

import shardmesh as sm
from shardmesh import P
from shardmesh.sharding.ops.rules.check import prove
from tests.sharding.ops.rules.table import b, f, i
from tests.sharding.ranks import collectives, launched, on_mesh, same_error

NAN = math.nan


def received(records):
    """Return the bytes that this rank received."""
    return sum(record.bytes_received for record in records)


CALLS = {
    "max": lambda x: torch.max(x, 1),
    "min": lambda x: x.min(1, keepdim=True),
    "argmax": lambda x: x.argmax(1),
    "argmin of all": lambda x: x.argmin(),
    "aminmax": lambda x: torch.aminmax(x, dim=1),
    "topk": lambda x: x.topk(3, 1),
    "smallest": lambda x: x.topk(2, -1, largest=False),
}


@pytest.mark.parametrize("name", CALLS)
def test_bytes_do_not_grow_with_the_dim(name):
    """A few candidates of 16 bytes for each row and rank; the rows of a rank are 96 elements of 8
    bytes each, or 9600.
    """
    call = CALLS[name]

    def counted(size):
        def program(mesh):
            x = sm.distribute_tensor(
                f(4, size), mesh, P(None, "a"), src_data_rank=None
            ).requires_grad_()
            with collectives() as records:
                made = call(x)
                first = made if isinstance(made, torch.Tensor) else made[0]
                if first.is_floating_point():
                    first.sum().backward()
            return received(records)

        return max(on_mesh((4,), program))

    few = counted(4 * 96)
    assert few == counted(4 * 9600) <= 4 * 4 * 3 * (3 * 16 + 8)


@pytest.mark.parametrize("name", [name for name in CALLS if name != "aminmax"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8])
def test_values_and_indices_share_a_collective(name, dtype):
    """Also where parts are uneven. The gradient is a slice at first, and gathered when it is
    differentiated again.
    """

    def program(mesh):
        x = sm.distribute_tensor(f(4, 5).mul(8).to(dtype), mesh, P(None, "a"), src_data_rank=None)
        with collectives() as records:
            made = CALLS[name](x.requires_grad_(dtype.is_floating_point))
        made = made if isinstance(made, torch.Tensor) else made[0]
        if made.requires_grad:
            total, whole = made.square().sum(), CALLS[name](x.full_tensor())[0].square().sum()
            (grad,), (expected,) = (
                torch.autograd.grad(t, x, create_graph=True) for t in (total, whole)
            )
            (again,), (expected_again,) = (
                torch.autograd.grad(t.pow(3).sum(), x) for t in (grad, expected)
            )
            assert torch.equal(grad.full_tensor(), expected.full_tensor())
            assert torch.equal(again.full_tensor(), expected_again.full_tensor())
        return launched(records)

    for there in on_mesh((4,), program):
        assert len(there) == 1, there


@pytest.mark.one_in(5)
@pytest.mark.parametrize(
    "spec",
    [
        P("a"),
        P(None, "a"),
        P("b", "a"),
        P(("b", "a")),
        P(None, ("a", "b")),
        P("a", unreduced={"b"}),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8])
def test_first_of_equal_elements(spec, dtype):
    x = (torch.arange(35).reshape(5, 7) * 5 % 4).to(dtype)

    def program(mesh):
        y = sm.distribute_tensor(x, mesh, spec.padded(2).with_unreduced({}), src_data_rank=None)
        if spec.unreduced and dtype is not torch.uint8:
            y = y.redistribute(spec)
        for dim in (0, 1):
            for name in ("max", "min"):
                for got, want in zip(getattr(y, name)(dim), getattr(x, name)(dim), strict=True):
                    assert torch.equal(got.full_tensor(), want)
        for name in ("argmax", "argmin"):
            assert torch.equal(getattr(y, name)().full_tensor(), getattr(x, name)())
        assert torch.equal(y.topk(3, 1).values.full_tensor(), x.topk(3, 1).values)

    on_mesh((2, 2), program)


@pytest.mark.parametrize("sizes", [(0, 2, 0, 4), (6, 0, 0, 0), (1, 1, 1, 3)])
@pytest.mark.parametrize(
    "values",
    [
        [3, NAN, 1, NAN, 5, 5],
        [1, 5, 5, 2, 5, 0],
        [math.inf, 1, math.inf, -math.inf, 0, 2],
        [-math.inf] * 6,
    ],
)
def test_holes_infinities_and_empty_parts(sizes, values):
    x = torch.tensor(values, dtype=torch.float64)

    def program(mesh):
        y = sm.distribute_tensor(x, mesh, P("a", sizes={"a": sizes}), src_data_rank=None)
        for func in (torch.max, torch.min):
            for got, want in zip(func(y, 0), func(x, 0), strict=True):
                torch.testing.assert_close(got.full_tensor(), want, rtol=0, atol=0, equal_nan=True)
        assert y.argmax().item() == x.argmax().item()
        assert y.argmin().item() == x.argmin().item()
        torch.testing.assert_close(
            y.topk(4).values.full_tensor(), x.topk(4).values, rtol=0, atol=0, equal_nan=True
        )
        for got, want in zip(torch.aminmax(y), torch.aminmax(x), strict=True):
            torch.testing.assert_close(got.full_tensor(), want, rtol=0, atol=0, equal_nan=True)

    on_mesh((4,), program)


def test_indices_of_topk_point_at_the_values():
    x = i(40, high=5)

    def program(mesh):
        values, indices = sm.distribute_tensor(x, mesh, P("a"), src_data_rank=None).topk(9)
        assert torch.equal(x[indices.full_tensor()], values.full_tensor())
        assert len(set(indices.tolist())) == 9

    on_mesh((3,), program)


@pytest.mark.parametrize(
    "call",
    [
        lambda x: x.max(1).values,
        lambda x: x.topk(2, 0).values,
        lambda x: x.max(0).values.max(0).values,
    ],
)
def test_double_backward(call):
    def squares(x):
        (grad,) = torch.autograd.grad((call(x) ** 3).sum(), x, create_graph=True)
        return (grad**2).sum()

    expected = f(5, 4).requires_grad_()
    squares(expected).backward()

    def program(mesh):
        for spec in (P("a"), P(None, "a")):
            x = sm.distribute_tensor(f(5, 4), mesh, spec, src_data_rank=None).requires_grad_()
            squares(x).backward()
            torch.testing.assert_close(x.grad.full_tensor(), expected.grad)

    on_mesh((3,), program)


@pytest.mark.parametrize("name", ["max", "min", "argmax", "argmin"])
def test_all_elements_equal_the_single_process(name):
    prove(getattr(torch, name), (f(3, 4, 2),), {}, most=30)
    prove(getattr(torch, name), (i(2, 3, 4, high=3),), {}, meshes=[(3,), (2, 2)], most=20)


def test_named_results():
    def program(mesh):
        x = sm.distribute_tensor(f(6, 4), mesh, P("a"), src_data_rank=None)
        assert type(x.max(0)) is torch.return_types.max
        assert type(torch.topk(x, 2, 0)) is torch.return_types.topk
        assert type(torch.aminmax(x, dim=0)) is torch.return_types.aminmax

    on_mesh((2,), program)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda x: x.topk(7, 0), "not in range"),
        (lambda x: x.max(2), "out of range|out of bounds"),
        (lambda x: x[:0].redistribute(P("a")).max(0), "non-zero|no identity|zero size"),
    ],
)
def test_torchs_errors(call, words):
    def program(mesh):
        x = sm.distribute_tensor(f(6, 4), mesh, P("a"), src_data_rank=None)
        with pytest.raises((RuntimeError, IndexError), match=words):
            call(x)

    on_mesh((2,), program)


def test_bools():
    prove(torch.max, (b(5, 4), 0), {}, meshes=[(3,)], most=8)


@pytest.mark.parametrize(
    "spec", [P("a"), P("b", "a"), P(("b", "a")), P(None, "a"), P("a", unreduced={"b"})], ids=str
)
@pytest.mark.parametrize("name", ["max", "min"])
def test_ties_share_the_gradient_of_an_extreme(name, spec):
    """Three of one rank and one of another get a quarter each; and again when
    differentiated twice.
    """
    values = torch.tensor(
        [[3.0, 3.0, 0.0], [0.0, 3.0, 0.0], [1.0, 2.0, 0.0], [3.0, 1.0, 2.0]], dtype=torch.float64
    )

    def squares(x):
        (grad,) = torch.autograd.grad(getattr(x, name)() ** 3 + (x * x).sum(), x, create_graph=True)
        return grad, (grad**2).sum()

    plain = values.clone().requires_grad_()
    wanted, total = squares(plain)
    total.backward()

    def program(mesh):
        x = sm.distribute_tensor(values, mesh, spec.with_unreduced({}), src_data_rank=None)
        x = x.redistribute(spec.padded(2)).detach().requires_grad_()
        grad, total = squares(x)
        torch.testing.assert_close(grad.detach().full_tensor(), wanted.detach())
        total.backward()
        torch.testing.assert_close(x.grad.full_tensor(), plain.grad)

    on_mesh((2, 2), program)


@pytest.mark.parametrize("call", [lambda x: x.max(0), lambda x: x.argmin(), lambda x: x.topk(1)])
def test_ranks_with_an_empty_part_raise_the_same_error(call):
    """torch tells only from values that it has no order of complex numbers; nobody must wait for
    those that were told.
    """

    def program(mesh):
        call(
            sm.distribute_tensor(
                torch.ones(4, dtype=torch.complex64),
                mesh,
                P("a", sizes={"a": (1, 0, 3)}),
                src_data_rank=None,
            )
        )

    assert "complex" in same_error((3,), program, RuntimeError)
