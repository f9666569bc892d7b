"""Mapped functions with some axes manual: inside, tensors are sharded over the others."""

from __future__ import annotations

import pytest
import torch

import shardmesh as sm
from shardmesh import P
from tests.sharding.functional.helpers import leaf, put, same, same_gradients, values
from tests.sharding.ranks import collectives, every_rank, same_error

X, W = values(6, 4), values(4, 6, seed=1)


def over_a(mesh, in_specs, out_specs):
    return sm.shard_map(mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names={"a"})


@every_rank(2, 2)
def test_the_function_sees_sharded_tensors_on_the_other_axes(mesh):
    @over_a(mesh, (P("a"), P()), P("a"))
    def matmul(x, w):
        for t in (x, w):
            assert isinstance(t, sm.ShardedTensor)
            assert t.mesh is mesh["b"]
        assert tuple(x.shape) == (3, 4)
        assert w.spec == P(None, "b")
        return x @ w

    for _ in range(2):
        x = put(mesh, X, P("a"), grad=True)
        w = put(mesh, W, P(None, "b"), grad=True)
        px = leaf(X)
        pw = leaf(W)
        y = matmul(x, w)
        assert y.spec == P("a", "b")
        same_gradients([x, w], [px, pw], y.square().sum(), (px @ pw).square().sum())


@every_rank(2, 2)
def test_sums_over_the_manual_axis_of_what_is_split_over_the_others(mesh):
    @over_a(mesh, (P("a"), P()), P())
    def loss(x, w):
        y = sm.psum(x.t() @ x, "a") @ w  # [4, 4] @ [4, 6/b]
        return y.square().sum()

    for _ in range(2):
        x = put(mesh, X, P("a"), grad=True)
        w = put(mesh, W, P(None, "b"), grad=True)
        px = leaf(X)
        pw = leaf(W)
        same_gradients([x, w], [px, pw], loss(x, w), (px.t() @ px @ pw).square().sum())


@every_rank(2, 2)
def test_a_dim_that_both_kinds_of_axes_split(mesh):
    @over_a(mesh, P("a"), (P("a"), P()))
    def f(x):
        assert tuple(x.shape) == (4, 4)
        assert x.spec == P("b", None)
        return x.exp(), sm.psum(x.square(), "a").sum()

    whole = values(8, 4)
    for _ in range(2):
        x, px = put(mesh, whole, P(("a", "b")), grad=True), leaf(whole)
        y, total = f(x)
        assert y.spec == P(("a", "b"), None)
        same_gradients([x], [px], y.sum() + total, px.exp().sum() + px.square().sum())


@every_rank(2, 2)
def test_a_dim_that_a_global_axis_splits_first(mesh):
    """Manual axes cut first: P(("b", "a")) becomes P(("a", "b")), which moves."""
    f = over_a(mesh, P("a"), P("a"))(lambda x: x * 2)
    whole = values(8, 4)
    with collectives() as records:
        y = f(put(mesh, whole, P(("b", "a"))))
    assert records
    same(y, whole * 2)


@every_rank(2, 2)
def test_uneven_parts(mesh):
    f = over_a(mesh, (P("a"), P()), (P("a"), P()))(
        lambda x, w: (x @ w, sm.psum((x @ w).square().sum(), "a"))
    )
    rows = values(5, 4)
    for _ in range(2):
        x = put(mesh, rows, P("a"), grad=True)
        w = put(mesh, W[:, :3], P(None, "b"), grad=True)
        px = leaf(rows)
        pw = leaf(W[:, :3])
        y, loss = f(x, w)
        same(y, rows @ W[:, :3])
        same_gradients([x, w], [px, pw], loss, (px @ pw).square().sum())


@every_rank(2, 2)
def test_plain_tensors_are_sharded_inside_too(mesh):
    @over_a(mesh, (P("a"), P()), P())
    def loss(x, w):
        assert isinstance(x, sm.ShardedTensor)
        assert isinstance(w, sm.ShardedTensor)
        return sm.psum((x @ w).square().sum(), "a")

    for _ in range(2):
        x, w, px, pw = leaf(X), leaf(W), leaf(X), leaf(W)
        same_gradients([x, w], [px, pw], loss(x, w), (px @ pw).square().sum())


@every_rank(2, 2)
def test_pending_over_either_kind_of_axis(mesh):
    both = over_a(mesh, P("a", None), P(unreduced="a"))(
        lambda x: x.sum(0)
        # Rows over a, columns whole, x split over b by rows.
    )
    x, px = put(mesh, values(8, 4), P(("a", "b")), grad=True), leaf(values(8, 4))
    for _ in range(2):
        x.grad = px.grad = None
        y = both(x)
        assert dict(y.spec.unreduced) == {"a": "sum", "b": "sum"}
        same_gradients([x], [px], y.square().sum(), px.sum(0).square().sum())


@every_rank(2, 2)
def test_gathers_and_exchanges_over_the_manual_axis(mesh):
    @over_a(mesh, P("a"), (P(), P("a"), P(None, "a")))
    def f(x):
        whole = sm.all_gather(x, "a", axis=0, tiled=True)
        return (
            whole,
            sm.psum_scatter(whole, "a", scatter_dimension=0, tiled=True),
            sm.all_to_all(x, "a", 1, 0, tiled=True),
        )

    for _ in range(2):
        x, px = put(mesh, W, P("a", "b"), grad=True), leaf(W)
        with pytest.raises(
            NotImplementedError, match="dim 1 is split over axes that are not manual"
        ):
            f(x)
    g = over_a(mesh, P("a"), (P(), P("a")))(
        lambda x: (sm.all_gather(x, "a", tiled=True), sm.ppermute(x, "a", [(0, 1), (1, 0)]))
    )
    for _ in range(2):
        x, px = put(mesh, W, P("a", "b"), grad=True), leaf(W)
        whole, swapped = g(x)
        same(whole, W)
        same(swapped, torch.cat([W[2:], W[:2]]))
        same_gradients(
            [x], [px], (whole.sin().sum() + swapped.cos().sum()), px.sin().sum() + px.cos().sum()
        )


@every_rank(2, 2)
def test_types_are_those_of_the_manual_axes(mesh):
    wrong = over_a(mesh, P("a"), P())(lambda x: x.exp().sum())
    with pytest.raises(
        sm.errors.ShardingTypeError,
        match=r"result.* varies over 'a'.*exp at .*test_partly_manual.py:\d+",
    ):
        wrong(put(mesh, X, P("a", "b")))


def test_wrong_axes_and_results():
    def unknown(mesh):
        sm.shard_map(lambda x: x, mesh=mesh, in_specs=P(), out_specs=P(), axis_names={"a", "z"})(X)

    assert "axis_names=['a', 'z'] must name one or more axes of the mesh, ['a', 'b']" in same_error(
        (2, 2), unknown, ValueError
    )

    def none(mesh):
        sm.shard_map(lambda x: x, mesh=mesh, in_specs=P(), out_specs=P(), axis_names=())(X)

    assert "axis_names=[]" in same_error((2, 2), none, ValueError)

    def not_manual(mesh):
        over_a(mesh, P("b"), P())(lambda x: x)(X)

    text = same_error((2, 2), not_manual, ValueError)
    assert "argument 0" in text
    assert "names 'b', and the manual axes are ['a']" in text

    def plain_result(mesh):
        over_a(mesh, P(), P())(lambda x: torch.ones(3))(X)

    assert "is a plain tensor, and some axes are not manual" in same_error(
        (2, 2), plain_result, TypeError, silent=False
    )

    def unbound(mesh):
        over_a(mesh, P(), P())(lambda x: sm.psum(x, "b"))(X)

    assert "unbound axis name 'b'" in same_error((2, 2), unbound, sm.errors.UnboundAxisError)


@every_rank(2, 2)
def test_a_nested_function_makes_the_other_axes_manual(mesh):
    @over_a(mesh, (P("a"), P()), P())
    def outer(x, w):
        inner = sm.shard_map(
            lambda y, v: sm.psum((y @ v).square().sum(), ("a", "b")),
            in_specs=(P("b"), P()),
            out_specs=P(),
        )
        return inner(x, w)

    whole = values(8, 4)
    for _ in range(2):
        x = put(mesh, whole, P(("a", "b")), grad=True)
        w = put(mesh, W, grad=True)
        px = leaf(whole)
        pw = leaf(W)
        same_gradients([x, w], [px, pw], outer(x, w), (px @ pw).square().sum())


@every_rank(2, 2)
def test_an_axis_cannot_be_made_manual_twice(mesh):
    again = sm.shard_map(lambda x: x, mesh=mesh, in_specs=P(), out_specs=P())
    outer = sm.shard_map(lambda x: again(x).to_local(), mesh=mesh, in_specs=P(), out_specs=P())
    with pytest.raises(ValueError, match="'a' is manual already"):
        outer(X)
    same(sm.shard_map(lambda x: x + 1, mesh=mesh, in_specs=P(), out_specs=P())(X), X + 1)
