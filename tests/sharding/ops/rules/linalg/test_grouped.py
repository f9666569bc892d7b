"""`grouped_mm`: dims that may be sharded without communication, and supported dtypes and widths."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import shardmesh as sm
from shardmesh import P
from tests.sharding.ops.rules.table import f
from tests.sharding.ranks import collectives, every_rank, on_mesh, same_error

ROWS, MATRICES = f(70, 40, dtype=torch.float32), f(3, 40, 24, dtype=torch.float32)
ENDS = torch.tensor([20, 20, 70], dtype=torch.int32)


def _product(mesh, rows, matrices, dtype=torch.float32, operands=(ROWS, MATRICES)):
    placed = [
        sm.distribute_tensor(x.to(dtype), mesh, spec, src_data_rank=None)
        for x, spec in zip(operands, (rows, matrices), strict=True)
    ]
    return F.grouped_mm(*placed, offs=sm.distribute_tensor(ENDS, mesh, P(), src_data_rank=None))


@pytest.mark.parametrize(
    ("rows", "matrices", "result"),
    [
        (P("a"), P(), P("a", None)),
        (P(), P(None, None, "a"), P(None, "a")),
        (P(None, "a"), P(None, "a"), P(None, None, unreduced={"a"})),
        (P(), P("a"), P(None, None, unreduced={"a"})),
        (P("a", sizes={"a": (7, 0, 63)}), P(), P("a", None, sizes={"a": (7, 0, 63)})),
    ],
)
def test_no_communication(rows, matrices, result):
    def program(mesh):
        with collectives() as records:
            y = _product(mesh, rows, matrices)
        assert not records
        assert y.spec == result
        torch.testing.assert_close(
            y.full_tensor(), F.grouped_mm(ROWS, MATRICES, offs=ENDS), rtol=1e-5, atol=1e-4
        )

    on_mesh((3,), program)


@every_rank(3)
def test_parts_with_unaligned_rows(mesh):
    """16 columns of two bytes over three ranks: no part is a multiple of 16 bytes."""
    operands = f(70, 40), f(3, 40, 16)
    y = _product(mesh, P(), P(None, None, "a"), torch.bfloat16, operands)
    expected = F.grouped_mm(*[x.bfloat16() for x in operands], offs=ENDS)
    torch.testing.assert_close(y.full_tensor(), expected, rtol=2e-2, atol=2e-2)


@every_rank(3)
def test_rows_after_the_last_group_have_zero_gradient(mesh):
    """Kernels neither write these rows of the result nor of the gradient."""
    ends = sm.distribute_tensor(ENDS - 30, mesh, P())
    rows = sm.distribute_tensor(ROWS, mesh, P()).requires_grad_()
    F.grouped_mm(rows, sm.distribute_tensor(MATRICES, mesh, P("a")), offs=ends).pow(
        2
    ).sum().backward()
    assert torch.equal(rows.grad.full_tensor()[40:], torch.zeros(30, 40))


@every_rank(3)
def test_rows_sorted_by_group_stay_sharded(mesh):
    """Each rank multiplies its part of the rows."""
    numbers = torch.arange(70) * 7 % 3
    groups, order = sm.distribute_tensor(numbers, mesh, P("a"), src_data_rank=None).sort(
        stable=True
    )
    assert groups.spec == order.spec == P("a")
    ends = groups.float().histc(3, 0, 2).cumsum(0, dtype=torch.int32)
    rows, matrices = (
        sm.distribute_tensor(x, mesh, spec, src_data_rank=None)
        for x, spec in ((ROWS, P("a")), (MATRICES, P()))
    )
    y = F.grouped_mm(rows[order], matrices, offs=ends)
    assert y.spec == P("a", None)
    expected = torch.stack([ROWS[i] @ MATRICES[numbers[i]] for i in numbers.argsort(stable=True)])
    torch.testing.assert_close(y.full_tensor(), expected, rtol=1e-5, atol=1e-4)


def test_device_errors_are_raised():
    text = same_error((3,), lambda mesh: _product(mesh, P("a"), P(), torch.float64), RuntimeError)
    assert "float64" in text
    short = ROWS, MATRICES[:, :36]
    text = same_error(
        (3,), lambda mesh: _product(mesh, P("a"), P(), torch.float32, short), RuntimeError
    )
    assert "contraction" in text or "BF16" in text


def test_abstract_mesh():
    """float32, which the kernel for "meta" refuses."""
    mesh = sm.AbstractMesh((64,), ("dp",))
    layouts = (
        sm.Layout.of(mesh, P("dp"), (6400, 40)),
        sm.Layout.of(mesh, P(), (3, 40, 24)),
        sm.Layout.of(mesh, P(), (3,), torch.int32),
    )

    def step(rows, matrices, ends):
        rows, matrices = rows.requires_grad_(), matrices.requires_grad_()
        y = F.grouped_mm(rows, matrices, offs=ends)
        y.sum().backward()
        return y, rows.grad

    y, grad = sm.debug.eval_shape(step, *layouts).result
    assert (y.spec, y.shape, grad.spec, grad.shape) == (
        P("dp", None),
        (6400, 24),
        P("dp", None),
        (6400, 40),
    )
