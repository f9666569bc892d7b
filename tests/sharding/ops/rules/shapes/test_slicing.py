"""Arranging along a split dim: what moves is what changes ranks, in one exchange; gradients of
gradients; writes to slices.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F

import shardmesh as sm
from shardmesh import P
from shardmesh.sharding.ops.rules.check import prove
from tests.device import DEVICE
from tests.sharding.ops.rules.table import c, f, i
from tests.sharding.ranks import collectives, launched, on_mesh, same_error

NUMBERS = torch.arange(1.0, 161).view(16, 10)
RAGGED = P("a", sizes={"a": (7, 0, 8, 1)})
CALLS = {
    "slice": lambda x: x[3:14],
    "first half": lambda x: x[:8],
    "every third": lambda x: x[1::3],
    "few rows": lambda x: x[5:7],
    "no rows": lambda x: x[9:9],
    "row": lambda x: x[5],
    "row and columns": lambda x: x[-1, None, 2:7],
    "select": lambda x: x.select(0, 12),
    "narrow": lambda x: x.narrow(0, 2, 9),
    "split": lambda x: x.split([5, 0, 11]),
    "chunk": lambda x: x.chunk(3),
    "tensor_split": lambda x: x.tensor_split([4, 13]),
    "unbind": lambda x: x.unbind(0),
    "flip": lambda x: x.flip(0),
    "rot90": lambda x: x.rot90(2),
    "roll": lambda x: x.roll(1, 0),
    "roll back": lambda x: x.roll(-3, 0),
    "cat": lambda x: torch.cat([x, x + 160]),
    "vstack": lambda x: torch.vstack([x, x + 160, x + 320]),
    "pad": lambda x: F.pad(x, (0, 0, 2, 5)),
    "pad and crop": lambda x: F.pad(x, (1, 1, -3, 4)),
    "reflect": lambda x: F.pad(x[None], (0, 0, 2, 3), "reflect"),
    "circular": lambda x: F.pad(x[None], (0, 0, 1, 0), "circular"),
    "repeat_interleave": lambda x: x.repeat_interleave(3, 0),
    "unfold": lambda x: x.unfold(0, 3, 1),
}


@pytest.mark.one_in(7)
@pytest.mark.parametrize("spec", [P("a"), RAGGED], ids=["even", "ragged"])
@pytest.mark.parametrize("name", CALLS)
def test_only_elements_that_change_ranks_move(name, spec):
    """One exchange, in which every rank gets each number that its result has and its parts had not,
    once.
    """

    def program(mesh):
        x = sm.distribute_tensor(NUMBERS, mesh, spec, src_data_rank=None)
        with collectives() as records:
            made = CALLS[name](x)
        whole = [made] if isinstance(made, torch.Tensor) else list(made)
        plain = CALLS[name](NUMBERS)
        for y, expected in zip(
            whole, [plain] if isinstance(plain, torch.Tensor) else plain, strict=True
        ):
            assert torch.equal(y.full_tensor(), expected)
        held = {n + more for n in x.to_local().flatten().tolist() for more in (0, 160, 320)} | {0.0}
        got = {n for y in whole for n in y.to_local().flatten().tolist()}
        assert len(records) <= 1
        assert sum(r.bytes_received for r in records) == 4 * len(got - held)

    on_mesh((4,), program)


def test_rolling_by_k_moves_k_rows():
    def program(mesh):
        x = sm.distribute_tensor(NUMBERS, mesh, P("a"), src_data_rank=None).requires_grad_()
        for shift in (1, 3):
            with collectives() as there:
                rolled = x.roll(shift, 0)
            with collectives() as back:
                torch.autograd.grad(rolled.sum(), x)
            assert [(r.bytes_sent, r.bytes_received) for r in there + back] == [
                (shift * 40, shift * 40)
            ] * 2

    on_mesh((4,), program)


def test_values_written_into_a_copy_are_sent_to_their_ranks():
    """Rows 6 to 11 are on ranks 1 and 2, which lack two each of the five written rows (0 1 | 2 3 |
    4).
    """

    def program(mesh):
        x = sm.distribute_tensor(NUMBERS, mesh, P("a"), src_data_rank=None)
        rows = sm.distribute_tensor(NUMBERS[:5] + 160, mesh, P("a"), src_data_rank=None)
        with collectives() as records:
            made = torch.slice_scatter(x, rows, 0, 6, 11)
        assert torch.equal(
            made.full_tensor(), torch.slice_scatter(NUMBERS, NUMBERS[:5] + 160, 0, 6, 11)
        )
        assert launched(records) == ["all_to_all"]
        return records[0].bytes_received

    assert on_mesh((4,), program) == [0, 2 * 40, 2 * 40, 0]


@pytest.mark.parametrize(
    "call",
    [torch.tril, torch.triu, lambda x: x.clone().tril_(-1), torch.trace, lambda x: x[:, 2:4]],
)
@pytest.mark.parametrize(
    "spec", [P("a", "b"), P("b", "a"), P(("b", "a")), P("a", sizes={"a": (3, 13)})]
)
def test_no_communication(call, spec):
    columns = spec.padded(2).dims[1]

    def program(mesh):
        x = sm.distribute_tensor(NUMBERS, mesh, spec, src_data_rank=None)
        with collectives() as records:
            made = call(x)
        assert torch.equal(made.full_tensor(), call(NUMBERS))
        assert launched(records) == [] or (columns and made.shape == (16, 2))

    on_mesh((2, 2), program)


@pytest.mark.parametrize(
    ("name", "elements"),
    [("cumsum", 1), ("cumprod", 1), ("logcumsumexp", 1), ("cummax", 3), ("cummin", 3)],
)
def test_scans_communicate_only_totals(name, elements):
    """From each of the three other ranks a row of totals; with extremes go their places, twice as
    wide.
    """

    def program(mesh):
        x = sm.distribute_tensor(NUMBERS, mesh, P("a"), src_data_rank=None).requires_grad_()
        with collectives() as there:
            made = getattr(x, name)(0)
        values = made if name[3:6] not in ("max", "min") else made[0]
        with collectives() as back:
            torch.autograd.grad(values.sum(), x)
        assert sum(r.bytes_received for r in there) == 3 * 40 * elements
        assert sum(r.bytes_received for r in back) == 3 * 40

    on_mesh((4,), program)


# -- values and gradients --------------------------------------------------------------------------

DOUBLED = {
    "slice": lambda x: x[1:4].exp() * x[2:5],
    "row": lambda x: x[2] * x[3].sin(),
    "split": lambda x: torch.cat([p**3 for p in x.split([1, 4])]),
    "one of the pieces": lambda x: x.chunk(2)[1] ** 3,
    "flip and roll": lambda x: x.flip(0) ** 2 * x.roll(1, 0),
    "repeat": lambda x: x.repeat(2, 1) ** 3,
    "repeat_interleave": lambda x: x.repeat_interleave(2, 0) ** 3,
    "unfold": lambda x: x.unfold(0, 3, 1) ** 3,
    "diff": lambda x: x.diff(dim=0) ** 3,
    "cat": lambda x: torch.cat([x, x * x]) ** 2,
    "pad": lambda x: F.pad(x, (0, 0, 1, 1)) ** 3,
    "replicate": lambda x: F.pad(x[None], (0, 0, 2, 1), "replicate") ** 3,
    "triangle": lambda x: x.tril() ** 3,
    "trace": lambda x: x.trace() ** 3,
    "cumsum": lambda x: x.cumsum(0) ** 3,
    "cumprod": lambda x: (x * torch.ones_like(x)).cumprod(0) ** 2,
    "cumprod of zeros": lambda x: F.pad(x, (0, 0, 1, 0)).roll(2, 0).cumprod(0) ** 2,
    "logcumsumexp": lambda x: x.logcumsumexp(0) ** 3,
    "cummax": lambda x: x.cummax(0).values ** 3,
    "slice_scatter": lambda x: torch.slice_scatter(x, x[:2] ** 2, 0, 1, 5, 2) ** 3,
    "diagonal_scatter": lambda x: torch.diagonal_scatter(x, x[1, :3] ** 2) ** 3,
    "meshgrid": lambda x: torch.meshgrid(x[:, 0], x[0], indexing="ij")[0] ** 3,
    "kron": lambda x: torch.kron(x, x[:2]),
}
LAYOUTS = [P("a"), P("a", sizes={"a": (0, 4, 1)}), P(None, "a"), P(unreduced={"a"})]


@pytest.mark.one_in(5)
@pytest.mark.parametrize("name", DOUBLED)
def test_gradients_of_gradients(name):
    plain = f(5, 3).requires_grad_()
    expected = _twice(DOUBLED[name](plain), plain)

    def program(mesh):
        for spec in LAYOUTS:
            value = sm.distribute_tensor(plain.detach(), mesh, src_data_rank=None)
            x = value.redistribute(spec).detach().requires_grad_()
            for got, want in zip(_twice(DOUBLED[name](x), x), expected, strict=True):
                torch.testing.assert_close(got.full_tensor(), want)

    on_mesh((3,), program)


def _twice(made, x):
    """Return the gradient of the sum of squares, and the gradient of that gradient's sum of
    squares.
    """
    (grad,) = torch.autograd.grad((made * made).sum(), x, create_graph=True)
    (twice,) = torch.autograd.grad((grad * grad).sum(), x)
    return grad.detach(), twice


@pytest.mark.parametrize("name", DOUBLED)
def test_ranks_outside_the_mesh_take_part_in_backward(name):
    """The tensor lies on ranks 0 and 1, and what is made of its slices on ranks 1 and 2."""
    plain = f(5, 3).requires_grad_()
    made = DOUBLED[name](plain)
    (expected,) = torch.autograd.grad((made * made).sum(), plain)

    def rank():
        one, two = (sm.DeviceMesh(DEVICE, ranks, axis_names=("a",)) for ranks in ([0, 1], [1, 2]))
        x = sm.distribute_tensor(plain.detach(), one, P("a"), src_data_rank=None).requires_grad_()
        made = DOUBLED[name](x).redistribute(two, P())
        (made * made).sum().backward()
        return None if one.coordinate is None else x.grad.full_tensor()

    for grad in sm.simulate(3)(rank)()[:2]:
        torch.testing.assert_close(grad, expected)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("kind", ["max", "min", "avg", "product"])
def test_other_pending_kinds_stay_pending_or_are_reduced(kind):
    for func in (
        lambda x: x[1:4],
        lambda x: x[2],
        lambda x: x.roll(1, 0),
        lambda x: torch.cat([x, x]),
        lambda x: F.pad(x, (0, 0, 1, 2)),
        lambda x: F.pad(x, (0, 0, 1, 2), value=1.5),
        lambda x: x.tril(),
        lambda x: x.cumsum(0),
        lambda x: x.chunk(2)[0],
        torch.trace,
        lambda x: x.repeat(2, 1),
        lambda x: torch.slice_scatter(x, x[:1], 0, 2, 3),
    ):
        prove(func, (f(5, 3),), kinds=(kind,), meshes=[(2,), (2, 2)], most=20)


@pytest.mark.parametrize(
    "value",
    [c(5, 3), i(5, 3), i(5, 3) > 3, i(5, 3).bfloat16(), i(5, 3).int()],
    ids=lambda x: str(x.dtype),
)
def test_dtypes(value):
    for func in (
        lambda x: x[1:4],
        lambda x: x[2],
        lambda x: x.flip(0),
        lambda x: x.split(2),
        lambda x: torch.cat([x, x]),
        torch.tril,
    ):
        prove(func, (value,), meshes=[(3,)], most=10)
    prove(lambda x: x.cumsum(0), (value,), meshes=[(3,)], most=10)


def test_a_part_that_is_not_contiguous():
    def program(mesh):
        x = sm.distribute_tensor(
            NUMBERS.t().contiguous(), mesh, P(None, "a"), src_data_rank=None
        ).t()
        assert not x.to_local().is_contiguous()
        for name, call in CALLS.items():
            if name not in ("split", "chunk", "tensor_split", "unbind"):
                assert torch.equal(call(x).full_tensor(), call(NUMBERS)), name

    on_mesh((4,), program)


def test_half_precision_cumsum_accumulates_in_float32():
    value = torch.full((600,), 1.0, dtype=torch.bfloat16)

    def program(mesh):
        x = sm.distribute_tensor(value, mesh, P("a"), src_data_rank=None)
        assert torch.equal(x.cumsum(0).full_tensor(), value.cumsum(0))

    on_mesh((3,), program)


# -- layouts and views -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "spec"),
    [
        (lambda x: x[3:14], P("a", None)),
        (lambda x: x[:4], P("a", None)),
        (lambda x: x[:3], P(None, None)),
        (lambda x: x[3], P(None)),
        (lambda x: x[:, 3], P("a")),
        (lambda x: x[2:, None], P("a", None, None)),
        (lambda x: torch.cat([x, x]), P("a", None)),
        (lambda x: F.pad(x, (0, 0, -13, 0)), P(None, None)),
        (lambda x: x.cumsum(0), P("a", None)),
        (torch.trace, P(unreduced={"a"})),
    ],
)
def test_result_is_even_or_unsharded(call, spec):
    def program(mesh):
        assert call(sm.distribute_tensor(NUMBERS, mesh, P("a"), src_data_rank=None)).spec == spec

    on_mesh((4,), program)


def test_a_dim_too_short_for_all_axes_keeps_the_major_ones():
    def program(mesh):
        x = sm.distribute_tensor(NUMBERS, mesh, P(("b", "a")), src_data_rank=None)
        assert x[4:7].spec == P("b", None)
        assert x[4:5].spec == P(None, None)

    on_mesh((2, 2), program)


def test_slices_without_communication_are_views():
    """Slices of replicated dims, and of sharded dims where every rank keeps its part."""

    def program(mesh):
        x = sm.distribute_tensor(NUMBERS, mesh, P("a"), src_data_rank=None)
        x[:, 2:4].zero_()
        x[:].mul_(2)
        x.narrow(1, 0, 1).neg_()
        x[::2].add_(1)
        return x.full_tensor()

    plain = NUMBERS.clone()
    plain[:, 2:4].zero_()
    plain.mul_(2)
    plain.narrow(1, 0, 1).neg_()
    plain[::2].add_(1)
    assert all(torch.equal(x, plain) for x in on_mesh((4,), program))


@pytest.mark.parametrize("grad", [False, True])
def test_writing_to_a_moved_slice_raises(grad):
    def program(mesh):
        x = sm.distribute_tensor(NUMBERS, mesh, P("a"), src_data_rank=None).requires_grad_(grad) * 1
        for view in (
            x[1:9],
            x[3],
            x[:8, 1],
            x.split([5, 11])[0],
            x.chunk(2)[1],
            x.narrow(0, 1, 5),
            x.unfold(0, 2, 2),
        ):
            with pytest.raises(RuntimeError, match="base had to be redistributed"):
                view.add_(1)
        assert torch.equal(x.detach().full_tensor(), NUMBERS)

    on_mesh((4,), program)


def test_invalid_arguments_raise_torchs_errors_before_communication():
    def program(mesh):
        x = sm.distribute_tensor(NUMBERS, mesh, P("a"), src_data_rank=None)
        for kind, call in (
            (IndexError, lambda: x[16]),
            (IndexError, lambda: x[-17:, 10]),
            (IndexError, lambda: x[1, 2, 3]),
            (ValueError, lambda: x[::-1]),
            (RuntimeError, lambda: x.narrow(0, 10, 9)),
            (IndexError, lambda: x.select(0, 16)),
            (RuntimeError, lambda: x.split([3, 4])),
            (RuntimeError, lambda: torch.cat([x, x[:, :3]])),
            (IndexError, lambda: x.roll(1, 2)),
            (IndexError, lambda: x.flip(2)),
            (RuntimeError, lambda: x.unfold(0, 17, 1)),
            (RuntimeError, lambda: F.pad(x[None], (0, 0, 16, 0), "reflect")),
            (IndexError, lambda: x.cumsum(2)),
        ):
            with collectives() as records, pytest.raises(kind):
                call()
            assert not records

    on_mesh((4,), program)


# -- real processes --------------------------------------------------------------------------------


def _weighted(call, x):
    """Return every piece with a different weight."""
    return torch.cat([piece * (n + 1) for n, piece in enumerate(call(x))])


def _on_processes() -> None:
    mesh = sm.init_device_mesh(DEVICE, (4,), axis_names=("a",))
    for spec in (P("a"), RAGGED):
        plain = NUMBERS.clone().requires_grad_()
        x = sm.distribute_tensor(NUMBERS, mesh, spec, src_data_rank=None).requires_grad_()
        for name, call in CALLS.items():
            if name in ("split", "chunk", "tensor_split", "unbind"):
                call = partial(_weighted, call)
            made, expected = call(x), call(plain)
            assert torch.equal(made.detach().full_tensor(), expected.detach()), name
            (grad,), (wanted,) = (
                torch.autograd.grad((y * y).sum(), leaf)
                for y, leaf in ((made, x), (expected, plain))
            )
            assert torch.equal(grad.full_tensor(), wanted), name
        torch.testing.assert_close(x.detach().cumsum(0).full_tensor(), NUMBERS.cumsum(0))


def test_on_four_processes(world4):
    world4(_on_processes)


def test_circular_padding_longer_than_the_dim_raises():
    def program(mesh):
        x = sm.distribute_tensor(NUMBERS[None], mesh, P(None, "a"), src_data_rank=None)
        F.pad(x, (0, 0, -14, 3), "circular")

    assert "cuts dim 1 of 16 to 2" in same_error((2,), program, ValueError)
