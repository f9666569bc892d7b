"""Operators on ragged operands: sizes are kept if all operands can have them, otherwise an operand
is moved first.
"""

from __future__ import annotations

from itertools import product

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import shardmesh as sm
from shardmesh import P
from shardmesh.sharding.ops.rules.check import RuleError, prove
from shardmesh.sharding.ops.rules.propagation import CannotKeep
from tests.sharding.ranks import collectives, launched, on_mesh
from tests.sharding.strategies import AXES, ragged_specs

CALLS = {
    "add": (lambda x, y: x + y, (6, 4), (6, 4)),
    "broadcast": (lambda x, y: x * y.exp(), (6, 4), (4,)),
    "broadcast a dim of one": (lambda x, y: x - y, (6, 4), (6, 1)),
    "matmul": (torch.matmul, (6, 4), (4, 5)),
    "matmul in batches": (torch.matmul, (3, 6, 4), (4, 5)),
    "linear": (F.linear, (6, 4), (5, 4)),
    "einsum": (lambda x, y: torch.einsum("ij,jk->ki", x, y), (6, 4), (4, 5)),
    "reductions": (lambda x, y: x.sum(0) + y.mean(1) + x.amax(0) * y.std(1), (6, 4), (4, 6)),
    "transpose": (lambda x, y: x.t() @ y.transpose(0, 1), (6, 4), (5, 6)),
    "merge dims": (lambda x, y: x.flatten() + y.reshape(24), (6, 4), (3, 2, 4)),
    "split a dim": (lambda x, y: x.unflatten(0, (2, 3)) * y, (6, 4), (2, 3, 4)),
    "dims that stay": (lambda x, y: x.view(6, 2, 2).sum(2) + y.squeeze(1), (6, 4), (6, 1, 2)),
    "cat": (lambda x, y: torch.cat([x, y]), (6, 4), (3, 4)),
    "stack": (lambda x, y: torch.stack([x, y], 1), (6, 4), (6, 4)),
    "slices": (lambda x, y: x[1:4, None] * y[:, 2:6].unsqueeze(0), (6, 4), (4, 7)),
    "rows by number": (lambda x, y: x[[3, 0, 3]] @ y, (6, 4), (4, 5)),
    "softmax": (lambda x, y: F.softmax(x, 1) @ y.softmax(0), (6, 4), (4, 5)),
    "norms": (
        lambda x, y: F.layer_norm(x, (4,)) * torch.linalg.vector_norm(y, dim=0),
        (6, 4),
        (6, 4),
    ),
    "where": (lambda x, y: torch.where(x > 0, y, x * 2), (6, 4), (6, 4)),
    "attention": (lambda x, y: F.scaled_dot_product_attention(x, y, y), (3, 2, 5, 4), (3, 2, 6, 4)),
    "expand": (lambda x, y: x[:, None].expand(-1, 3, -1) * y, (6, 4), (3, 4)),
    "roll and flip": (lambda x, y: x.roll(2, 0) + y.flip(0), (6, 4), (6, 4)),
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", CALLS)
@given(data=st.data())
@settings(max_examples=12, deadline=None)
def test_operators_equal_the_single_process(name, data):
    """Values and gradients for any sharding of the operands: uneven, empty, equal or not."""
    call, *shapes = CALLS[name]
    mesh_shape = data.draw(st.sampled_from([(2,), (3,), (2, 2)]))
    mesh = sm.AbstractMesh(mesh_shape, AXES[: len(mesh_shape)])
    specs = [data.draw(ragged_specs(mesh, shape)) for shape in shapes]
    generator = torch.Generator().manual_seed(0)
    plain = [
        torch.randn(shape, dtype=torch.float64, generator=generator).requires_grad_()
        for shape in shapes
    ]
    expected = call(*plain)
    weight = torch.randn(expected.shape, dtype=torch.float64, generator=generator)
    wanted = torch.autograd.grad(expected, plain, weight, allow_unused=True, materialize_grads=True)

    def program(mesh):
        pairs = zip(plain, specs, strict=True)
        leaves = [
            sm.distribute_tensor(x.detach(), mesh, spec, src_data_rank=None) for x, spec in pairs
        ]
        leaves = [x.requires_grad_() for x in leaves]
        result = call(*leaves)
        assert result.to_local().shape == sm.typeof(result).local_shape
        torch.testing.assert_close(result.detach().full_tensor(), expected.detach())
        (result * sm.distribute_tensor(weight, mesh, src_data_rank=None)).sum().backward()
        for leaf, grad in zip(leaves, wanted, strict=True):
            if leaf.grad is not None:
                assert sm.typeof(leaf.grad) is sm.typeof(leaf).grad
                torch.testing.assert_close(leaf.grad.full_tensor(), grad)

    on_mesh(mesh_shape, program)


# -- what is kept ----------------------------------------------------------------------------------

ROWS = P("a", sizes={"a": (3, 0, 5)})
COLUMNS = P(None, "a", sizes={"a": (3, 0, 5)})
EMBEDDED = P("a", None, None, sizes={"a": (3, 0, 5)})


def laid_out(mesh, shape, spec, dtype=torch.float64):
    numbers = torch.arange(torch.Size(shape).numel()).reshape(shape)
    return sm.distribute_tensor((numbers % 5).to(dtype), mesh, spec, src_data_rank=None)


@pytest.mark.parametrize(
    ("call", "shapes", "specs", "result"),
    [
        (torch.exp, [(8, 4)], [ROWS], ROWS),
        (torch.add, [(8, 4), (8, 4)], [ROWS, ROWS], ROWS),
        (torch.add, [(8, 4), (8, 4)], [ROWS, P()], ROWS),
        (torch.add, [(8, 4), (4,)], [ROWS, P()], ROWS),
        (torch.matmul, [(8, 4), (4, 5)], [ROWS, P()], ROWS),
        (torch.matmul, [(5, 4), (4, 8)], [P(), COLUMNS], COLUMNS),
        (torch.matmul, [(4, 8), (8, 4)], [COLUMNS, ROWS], P(unreduced={"a"})),
        (torch.matmul, [(4, 8), (8, 4)], [COLUMNS, P()], P(unreduced={"a"})),
        (lambda x: x.sum(1), [(8, 4)], [ROWS], P("a", sizes={"a": (3, 0, 5)})),
        (lambda x: x.sum(0), [(8, 4)], [ROWS], P(unreduced={"a"})),
        (lambda x: x.t(), [(8, 4)], [ROWS], COLUMNS),
        (lambda x: x[:, 1:3], [(8, 4)], [ROWS], ROWS),
        (lambda x: x[:, None], [(8, 4)], [ROWS], EMBEDDED),
        (lambda x: x.view(8, 2, 2), [(8, 4)], [ROWS], EMBEDDED),
        (
            lambda x: x.unflatten(0, (4, 2)),
            [(8, 4)],
            [P("a", sizes={"a": (2, 0, 6)})],
            P("a", sizes={"a": (1, 0, 3)}),
        ),
        (lambda x: x.flatten(), [(8, 4)], [ROWS], P("a", sizes={"a": (12, 0, 20)})),
        (lambda x: F.softmax(x, -1), [(8, 4)], [ROWS], ROWS),
        (lambda x: x.to(torch.float32), [(8, 4)], [ROWS], ROWS),
        (lambda x: torch.cat([x, x], 1), [(8, 4)], [ROWS], ROWS),
        (lambda i, w: F.embedding(i.long(), w), [(8, 2), (5, 3)], [ROWS, P()], EMBEDDED),
    ],
)
def test_sizes_are_kept_without_communication(call, shapes, specs, result):
    def program(mesh):
        operands = [laid_out(mesh, shape, spec) for shape, spec in zip(shapes, specs, strict=True)]
        with collectives() as records:
            made = call(*operands)
        assert launched(records) == []
        assert made.spec == result.padded(made.ndim)
        plain = call(*[x.full_tensor() for x in operands])
        assert torch.equal(made.full_tensor(), plain)

    on_mesh((3,), program)


@pytest.mark.parametrize(
    ("call", "shapes", "specs", "result"),
    [
        # The first of equals stays.
        (torch.add, [(8, 4), (8, 4)], [ROWS, P("a", sizes={"a": (0, 8, 0)})], ROWS),
        (
            torch.add,
            [(8, 1), (8, 4)],
            [ROWS, P("a", sizes={"a": (0, 8, 0)})],
            P("a", sizes={"a": (0, 8, 0)}),
        ),
        (torch.add, [(8, 4), (8, 1)], [P("a"), ROWS], P("a")),
        (torch.add, [(8, 4), (8, 1)], [ROWS, P("a")], ROWS),
        # A cut inside a row.
        (lambda x: x.unflatten(0, (4, 2)), [(8, 4)], [P("a", sizes={"a": (3, 5)})], P("a")),
    ],
)
def test_one_operand_is_moved(call, shapes, specs, result):
    """One all_to_all gives the smaller operand, or the one that is not supported, the required
    sizes.
    """

    def program(mesh):
        operands = [laid_out(mesh, shape, spec) for shape, spec in zip(shapes, specs, strict=True)]
        with collectives() as records:
            made = call(*operands)
        assert len(records) == 1
        assert made.spec == result.padded(made.ndim)
        assert torch.equal(made.full_tensor(), call(*[x.full_tensor() for x in operands]))

    ranks = max([len(sizes) for spec in specs for _, sizes in spec.sizes])
    on_mesh((ranks,), program)


JOINT = P(("a", "b"), sizes={("a", "b"): (1, 3, 0, 4)})
OUTER = P(("a", "b"), sizes={"a": (3, 5)})


@pytest.mark.parametrize("spec", [JOINT, OUTER, P("a", "b", sizes={"a": (3, 5), "b": (1, 3)})])
def test_several_axes(spec):
    def program(mesh):
        x = laid_out(mesh, (8, 4), spec)
        with collectives() as records:
            made = (x.exp() + x) * 2
        assert launched(records) == []
        assert sm.typeof(made) is sm.typeof(x)
        assert sm.typeof(made.t().t()) is sm.typeof(x)

    on_mesh((2, 2), program)


def test_axes_of_one_rank_are_ignored():
    def program(mesh):
        x = laid_out(mesh, (8, 4), P(("a", "b", "c"), sizes={("a", "b"): (3, 5)}))
        y = laid_out(mesh, (8, 1), P("b", sizes={"b": (3, 5)}))
        with collectives() as records:
            made = x + y
            x.add_(y)
            x.mul_(2)
        assert launched(records) == []
        assert list(sm.typeof(made).boxes()) == list(sm.typeof(x).boxes())

    on_mesh((1, 2, 1), program)


def test_reducing_pending_values_does_not_move_parts():
    """Nothing but reductions over the other axis."""
    kept = P("a", sizes={"a": (1, 7)})

    def program(mesh):
        x = laid_out(mesh, (8, 4), P("a", "b", sizes={"a": (1, 7)})).requires_grad_()
        with collectives() as records:
            assert torch.zeros_like(x.sum(1)).spec == kept
            assert x.var(1).spec == kept
            assert x.detach().amax(1).spec == kept.with_unreduced({"b": "max"})
            largest = x.amax(1)
            assert largest.spec == kept
            (grad,) = torch.autograd.grad(largest, x, laid_out(mesh, (8,), kept))
        assert set(launched(records)) == {"all_reduce"}
        assert grad.spec == x.spec

    on_mesh((2, 2), program)


# -- in place --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "other"), list(product([ROWS, P("a"), P("a", sizes={"a": (0, 8, 0)})], repeat=2))
)
def test_written_tensor_does_not_move(written, other):
    def program(mesh):
        x, y = laid_out(mesh, (8, 1), written), laid_out(mesh, (8, 1), other)
        expected = (x.full_tensor() + y.full_tensor()) * 3
        local = x.to_local()
        x.add_(y)
        x *= 3
        assert x.spec == written.padded(2)
        assert x.to_local().data_ptr() == local.data_ptr()
        assert torch.equal(x.full_tensor(), expected)
        x[:, 0] = y.squeeze(1)
        x.copy_(y)
        assert x.spec == written.padded(2)
        assert torch.equal(x.full_tensor(), y.full_tensor())

    on_mesh((3,), program)


def test_moving_the_written_tensor_raises():
    def program(mesh):
        x = laid_out(mesh, (8, 4), ROWS)
        with pytest.raises(CannotKeep, match="would have to change its layout"):
            x.cumsum_(0)

    on_mesh((3,), program)


def test_random_fills_do_not_depend_on_the_layout():
    def program(mesh):
        filled = []
        for spec in (ROWS, P()):
            sm.random.manual_seed(1)
            x = laid_out(mesh, (8, 4), spec)
            torch.nn.init.normal_(x)
            filled.append(F.dropout(x, 0.5).full_tensor())
        assert torch.equal(*filled)

    on_mesh((3,), program)


def test_check_rule_tries_ragged_operands():
    """An operator that is correct on equal parts only."""

    def halves(x):
        if not isinstance(x, sm.ShardedTensor):
            return x * 1
        assert not x.spec.sizes
        return x * 1

    with pytest.raises(RuleError, match="sizes="):
        prove(halves, (torch.randn(5, dtype=torch.float64),))
