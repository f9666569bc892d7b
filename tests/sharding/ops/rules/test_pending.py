"""Linear operators pass pending sums through without communication; others reduce them
first, once.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import shardmesh as sm
from shardmesh import P
from shardmesh.sharding.ops.rules.check import place
from tests.sharding.ops.rules.table import b, f, i, pos
from tests.sharding.ranks import collectives, launched, on_mesh

X = f(4, 6)
PENDING = P(unreduced={"a"})

# x and y are pending, r is replicated, s is split.
PASS = {
    "sum": lambda x, y, r: x.sum(0),
    "sum to another dtype": lambda x, y, r: x.sum(dtype=torch.float32),
    "mean": lambda x, y, r: x.mean(),
    "add": lambda x, y, r: x + y,
    "sub": lambda x, y, r: x - y,
    "scaled add": lambda x, y, r: torch.add(x, y, alpha=3),
    "lerp": lambda x, y, r: torch.lerp(x, y, 0.3),
    "number": lambda x, y, r: 2 * x / 3,
    "neg": lambda x, y, r: -x,
    "product with replicated": lambda x, y, r: x * r * 2 / (r + 9),
    "cast": lambda x, y, r: x.float().to(torch.bfloat16).double(),
    "view": lambda x, y, r: x.view(2, 2, 6).transpose(0, 1).unsqueeze(0).flatten(1),
    "expand": lambda x, y, r: x[:, None].expand(4, 3, 6),
    "cat and split": lambda x, y, r: torch.cat(torch.stack([x, y]).chunk(2, dim=2)[::-1]),
    "index": lambda x, y, r: x[1:, 2][None],
    "flip, roll, triangle": lambda x, y, r: x.flip(0).roll(1, 1).tril(),
    "pad with zeros": lambda x, y, r: F.pad(x, (1, 1)),
    "clone": lambda x, y, r: x.clone().contiguous(),
    "matmul, left": lambda x, y, r: x @ r.T,
    "matmul, right": lambda x, y, r: r.T @ x,
    "linear": lambda x, y, r: F.linear(x, r, r[:, 0]),
    "einsum": lambda x, y, r: torch.einsum("ij,kj->ik", x, r),
    "where with a replicated mask": lambda x, y, r: torch.where(r > 0, x, y),
    "where against zero": lambda x, y, r: torch.where(r > 0, x, 0.0) + torch.where(r > 0, 0, x),
    "masked_fill with zero": lambda x, y, r: x.masked_fill(r > 0, 0),
    "dropout": lambda x, y, r: F.dropout(x, 0.5),
    "cumsum": lambda x, y, r: x.cumsum(1),
    "embedding of a pending table": lambda x, y, r: F.embedding((r[:, 0] > 0).long(), x),
    "attention of pending values": lambda x, y, r: F.scaled_dot_product_attention(
        r[None], r[None], x[None]
    ),
    "in place": lambda x, y, r: x.clone().add_(y).mul_(r).mul_(2).div_(3).zero_(),
}
REDUCE = {
    "exp": lambda x, y, r: x.exp(),
    "affine": lambda x, y, r: x + 1,
    "replicated summand": lambda x, y, r: x + r,
    "comparison": lambda x, y, r: x > 0,
    "denominator": lambda x, y, r: r / x,
    "cast to integers": lambda x, y, r: x.long(),
    "sum as integers": lambda x, y, r: x.sum(dtype=torch.int64),
    "max": lambda x, y, r: x.amax(0),
    "softmax": lambda x, y, r: x.softmax(1),
    "norm": lambda x, y, r: torch.linalg.vector_norm(x),
    "layer_norm": lambda x, y, r: F.layer_norm(x, (6,)),
    "masked_fill": lambda x, y, r: x.masked_fill(r > 0, 1.0),
    "pad": lambda x, y, r: F.pad(x, (1, 1), value=1.0),
    "mask": lambda x, y, r: torch.where(x > 0, r, 0),
    "variance": lambda x, y, r: x.var(),
}


def operands(mesh, spec=PENDING):
    return (
        place(X, mesh, spec, 1),
        place(f(4, 6, seed=5), mesh, spec, 2),
        sm.distribute_tensor(f(4, 6, seed=7), mesh),
    )


@pytest.mark.parametrize("name", PASS)
def test_passes(name):
    def program(mesh):
        x, y, r = operands(mesh)
        with collectives() as records:
            out = PASS[name](x, y, r)
        assert not records
        assert sm.typeof(out).pending == {"a": "sum"}

    on_mesh((3,), program)


@pytest.mark.parametrize("name", REDUCE)
def test_reduces_once(name):
    def program(mesh):
        x, y, r = operands(mesh)
        with collectives() as records:
            out = REDUCE[name](x, y, r)
        assert launched(records) == ["all_reduce"]
        assert not sm.typeof(out).pending

    on_mesh((3,), program)


def test_a_product_of_two_sums_reduces_one_of_them():
    def program(mesh):
        x, y, _ = operands(mesh)
        with collectives() as records:
            product = x * y
        assert launched(records) == ["all_reduce"]
        torch.testing.assert_close(product.full_tensor(), X * f(4, 6, seed=5))

    on_mesh((3,), program)


def test_reduced_to_a_shard_next_to_a_sharded_operand():
    def program(mesh):
        x, s = place(X, mesh, PENDING), sm.distribute_tensor(X, mesh, P(None, "a"))
        with collectives() as records:
            out = x.maximum(s)
        assert launched(records) in (["reduce_scatter"], ["all_to_all"])
        assert out.spec == P(None, "a")

    on_mesh((2,), program)


def test_backward_of_what_passes_needs_one_reduction():
    """Two layers, column then row: no communication up to the loss, and one all_reduce for the
    replicated input.
    """

    def program(mesh):
        x = sm.distribute_tensor(f(4, 6), mesh).requires_grad_()
        w1 = sm.distribute_tensor(f(8, 6), mesh, P("a"))
        w2 = sm.distribute_tensor(f(6, 8), mesh, P(None, "a"))
        with collectives() as forward:
            loss = F.linear(F.gelu(F.linear(x, w1)), w2).sum()
        with collectives() as backward:
            loss.backward()
        assert not forward
        assert launched(backward) == ["all_reduce"]

    on_mesh((2,), program)


@pytest.mark.parametrize("kind", ["max", "min", "product"])
def test_other_kinds_pass_through_operators_that_only_move_values(kind):
    def program(mesh):
        x = sm.from_local(f(4, 6, seed=mesh.world.rank), mesh, P(unreduced={"a": kind}))
        with collectives() as records:
            moved = torch.cat([x.t().reshape(3, 8), x.view(3, 8)]).unsqueeze(0).expand(2, -1, -1)[0]
        assert not records
        assert sm.typeof(moved).pending == {"a": kind}
        doubled = 2 * x
        assert not sm.typeof(doubled).pending
        torch.testing.assert_close(doubled.full_tensor(), 2 * x.full_tensor())

    on_mesh((2,), program)


def test_pending_value_read_as_a_number_is_equal_on_every_rank():
    def program(mesh):
        x = place(pos(3), mesh, PENDING)
        total = x.sum()
        assert sm.typeof(total).pending
        return [float(total), total.item(), bool(total > 5), f"{total:.3f}", x.tolist()]

    first, *others = on_mesh((3,), program)
    assert all(other == first for other in others)
    assert first[0] == pytest.approx(float(pos(3).sum()))


def test_bools_and_counts():
    """any, all and counts over split dims are pending max, min and sum, exact also where a rank has
    nothing.
    """

    def program(mesh):
        x = sm.distribute_tensor(b(2, 3), mesh, P("a"))
        assert sm.typeof(x.any(0)).pending == {"a": "max"}
        assert sm.typeof(x.all(0)).pending == {"a": "min"}
        assert sm.typeof(x.sum(0)).pending == {"a": "sum"}
        assert torch.equal(x.all(0).full_tensor(), b(2, 3).all(0))
        assert torch.equal((~x.any(0)).full_tensor(), ~b(2, 3).any(0))
        labels = sm.distribute_tensor(i(2, 3), mesh, P("a"))
        assert (labels == labels).all().item() is True

    on_mesh((3,), program)


# -- operands pending over different axes ----------------------------------------------------------

JOINS = {
    "stack": lambda x, y, r: torch.stack([x, y], 1),
    "cat": lambda x, y, r: torch.cat([x, y]),
    "hstack": lambda x, y, r: torch.hstack([x, y]),
    "add": lambda x, y, r: x + y,
    "sub": lambda x, y, r: torch.sub(x, y, alpha=2),
    "rsub": lambda x, y, r: torch.rsub(x, y),
    "lerp": lambda x, y, r: torch.lerp(x, y, 0.3),
    "where": lambda x, y, r: torch.where(r > 0, x, y),
}
MOVES = ("stack", "cat", "hstack")  # values of every pending kind


def _over(axes, kind):
    return P(unreduced=dict.fromkeys(axes, kind))


@pytest.mark.one_in(4, each=["name", "kind", "axes"])
@pytest.mark.parametrize("axes", [("a", "ab"), ("ab", "b"), ("a", "b"), ("ab", "ab")], ids="-".join)
@pytest.mark.parametrize("kind", ["sum", "avg", "max", "min", "product"])
@pytest.mark.parametrize("name", JOINS)
def test_operands_pending_over_different_axes_stay_pending(name, kind, axes):
    passes = name in MOVES or kind in ("sum", "avg")
    values = X, f(4, 6, seed=5), f(4, 6, seed=7)

    def gradients(mesh=None):
        """Return the gradients of whole values that are made pending before they are joined."""
        x, y, r = (v.clone() if mesh is None else sm.distribute_tensor(v, mesh) for v in values)
        leaves = [x.requires_grad_(), y.requires_grad_()]
        if mesh is not None:
            x, y = (
                leaf.redistribute(_over(where, kind))
                for leaf, where in zip(leaves, axes, strict=True)
            )
        out = JOINS[name](x, y, r)
        weights = torch.arange(out.numel(), dtype=out.dtype).reshape(out.shape)
        (out * (weights if mesh is None else sm.distribute_tensor(weights, mesh))).sum().backward()
        return [leaf.grad for leaf in leaves]

    def program(mesh):
        x, y = (
            place(v, mesh, _over(where, kind), i)
            for i, (v, where) in enumerate(zip(values[:2], axes, strict=True))
        )
        r = sm.distribute_tensor(values[2], mesh)
        with collectives() as records:
            out = JOINS[name](x, y, r)
        if passes:
            assert not records
            assert sm.typeof(out).pending == {"a": kind, "b": kind}
        torch.testing.assert_close(out.full_tensor(), JOINS[name](*values))
        if kind != "product":
            for grad, expected in zip(gradients(mesh), gradients(), strict=True):
                torch.testing.assert_close(grad.full_tensor(), expected)

    on_mesh((2, 2), program)


def test_operands_with_a_replicated_or_another_kind_among_them_are_reduced():
    def program(mesh):
        x, y = (place(X, mesh, _over(where, "sum"), seed) for seed, where in enumerate(("a", "ab")))
        r = sm.distribute_tensor(f(4, 6, seed=7), mesh)
        most = place(X, mesh, _over("b", "max"))
        for joined, expected in (
            (torch.stack([x, y, r]), [X, X, f(4, 6, seed=7)]),
            (torch.stack([x, most]), [X, X]),
        ):
            assert not sm.typeof(joined).pending
            torch.testing.assert_close(joined.full_tensor(), torch.stack(expected))

    on_mesh((2, 2), program)


def test_cat_along_a_split_dim_of_operands_pending_over_different_axes():
    def program(mesh):
        x = place(X, mesh, P("c", unreduced={"a"}))
        y = place(X, mesh, P("c", unreduced={"a", "b"}), 1)
        with collectives() as records:
            out = torch.cat([x, y])
        assert "all_reduce" not in launched(records)
        assert sm.typeof(out).pending == {"a": "sum", "b": "sum"}
        torch.testing.assert_close(out.full_tensor(), torch.cat([X, X]))

    on_mesh((2, 2, 2), program)


def test_an_axis_of_one_rank_does_not_make_an_operand_pending():
    def program(mesh):
        x, y = place(X, mesh, _over("b", "sum")), place(X, mesh, _over("a", "sum"))
        out = x + y
        assert "b" not in sm.typeof(out).pending
        torch.testing.assert_close(out.full_tensor(), X + X)

    on_mesh((1, 2), program)
