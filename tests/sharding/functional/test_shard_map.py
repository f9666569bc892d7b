"""`shard_map` against the plain computation in one process: arguments, specs, results,
gradients.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

import shardmesh as sm
from shardmesh import P, Replicate, Shard
from tests.sharding.functional.helpers import leaf, put, same, same_gradients, values
from tests.sharding.ranks import collectives, every_rank, on_mesh

X, W = values(6, 4), values(4, 5, seed=1)


def mean_loss(x, w):
    """Return a loss of rows of x: the sum over the axis "a"."""
    return sm.psum((x @ w).square().sum(), "a")


def plain_loss(x, w):
    return (x @ w).square().sum()


# -- calling ---------------------------------------------------------------------------------------


@every_rank(2)
def test_called_and_as_a_decorator(mesh):
    def loss(x, w):
        """A doc string."""
        return mean_loss(x, w)

    called = sm.shard_map(loss, mesh=mesh, in_specs=(P("a"), P()), out_specs=P())
    decorated = sm.shard_map(mesh=mesh, in_specs=(P("a"), P()), out_specs=P())(loss)
    for mapped in (called, decorated):
        assert (mapped.__name__, mapped.__doc__) == ("loss", "A doc string.")
        for _ in range(3):
            x, w = put(mesh, X, P("a"), grad=True), put(mesh, W, grad=True)
            px, pw = leaf(X), leaf(W)
            same_gradients([x, w], [px, pw], mapped(x, w), plain_loss(px, pw))


@every_rank(2, 2)
def test_columns_and_rows_over_two_axes(mesh):
    @sm.shard_map(mesh=mesh, in_specs=(P("a"), P(None, "b")), out_specs=P("a", "b"))
    def matmul(x, w):
        assert x.shape[0] == 3
        return x @ w

    x = put(mesh, X, P("a"), grad=True)
    w = put(mesh, W, P(None, "b"), grad=True)
    px = leaf(X)
    pw = leaf(W)
    y = matmul(x, w)
    assert y.spec == P("a", "b")
    same_gradients([x, w], [px, pw], (y * y).sum(), plain_loss(px, pw))


@every_rank(2)
def test_placements_for_specs(mesh):
    mapped = sm.shard_map(
        torch.matmul, mesh=mesh, in_specs=([Shard(0)], [Replicate()]), out_specs=[Shard(0)]
    )
    same(mapped(put(mesh, X, P("a")), put(mesh, W)), X @ W)


@every_rank(2)
def test_in_specs_default_to_the_arguments_layouts(mesh):
    @sm.shard_map(out_specs=P())
    def loss(x, w, scale):
        assert tuple(x.shape) == (3, 4)
        return mean_loss(x, w) * scale

    for _ in range(2):
        x, w, px, pw = put(mesh, X, P("a"), grad=True), put(mesh, W, grad=True), leaf(X), leaf(W)
        same_gradients([x, w], [px, pw], loss(x, w, 3), 3 * plain_loss(px, pw))
    same(loss(put(mesh, X, P("a")), W, 0.5), 0.5 * plain_loss(X, W))


@every_rank(2)
def test_default_mesh(mesh):
    mapped = sm.shard_map(lambda x: sm.psum(x, "a"), in_specs=P(), out_specs=P())
    with sm.set_mesh(mesh):
        same(mapped(X), 2 * X)
    with pytest.raises(TypeError, match="set_mesh"):
        mapped(X)


# -- trees -----------------------------------------------------------------------------------------


@every_rank(2)
def test_trees_and_specs_as_prefixes(mesh):
    @sm.shard_map(
        mesh=mesh,
        in_specs=({"x": P("a"), "rest": P()}, [P("a"), (P(), None)]),
        out_specs=(P("a"), {"total": P(), "n": None}),
    )
    def f(tree, more):
        y, (w, n) = more
        out = tree["x"] @ w + y + tree["rest"][0] * tree["rest"][1]["bias"]
        return out, {"total": sm.psum([out.sum(), out.square().sum()], "a"), "n": n}

    y, bias, scale = values(6, 5, seed=2), values(5, seed=3), values(seed=4)
    for _ in range(2):
        parts = [
            put(mesh, X, P("a"), grad=True),
            put(mesh, scale, grad=True),
            put(mesh, bias, grad=True),
            put(mesh, W, grad=True),
        ]
        plain = [leaf(X), leaf(scale), leaf(bias), leaf(W)]
        rest = (parts[1], {"bias": parts[2]})
        out, found = f({"rest": rest, "x": parts[0]}, [put(mesh, y, P("a")), (parts[3], "seven")])
        whole = plain[0] @ plain[3] + y + plain[1] * plain[2]
        assert found["n"] == "seven"
        same(out, whole)
        same(found["total"][0], whole.sum())
        same_gradients(parts, plain, found["total"][1], whole.square().sum())


@every_rank(2)
def test_one_spec_for_all(mesh):
    mapped = sm.shard_map(
        lambda *xs: {"sum": sum(xs), "parts": list(xs)},
        mesh=mesh,
        in_specs=P("a"),
        out_specs=P("a"),
    )
    x, y = put(mesh, X, P("a")), put(mesh, 2 * X, P("a"))
    for _ in range(2):
        found = mapped(x, y)
        same(found["sum"], 3 * X)
        same(found["parts"][1], 2 * X)


@every_rank(2)
def test_static_arguments(mesh):
    module = nn.Linear(4, 5, dtype=torch.float64).requires_grad_(False)
    seen = []

    @sm.shard_map(mesh=mesh, in_specs=(P("a"), None, None, None), out_specs=P("a"))
    def f(x, power, name, layer):
        seen.append((power, name))
        return layer(x) ** power

    x = put(mesh, X, P("a"))
    for power in (1, 2, 1, 2):
        same(f(x, power, f"power {power}", module), module(X) ** power)
    assert seen == [(1, "power 1"), (2, "power 2")] * 2


@every_rank(2)
def test_keyword_arguments(mesh):
    mapped = sm.shard_map(
        lambda x, *, scale, shift=0: x * scale + shift, mesh=mesh, in_specs=P("a"), out_specs=P("a")
    )
    x = put(mesh, X, P("a"))
    for scale in (2, 3, 2):
        same(mapped(x, scale=scale), X * scale)
        same(mapped(x, scale=scale, shift=1), X * scale + 1)
    with pytest.raises(TypeError, match="shift= contains a ShardedTensor"):
        mapped(x, scale=1, shift=x)


@every_rank(2)
def test_no_arguments_no_results(mesh):
    mapped = sm.shard_map(
        lambda: sm.psum(torch.ones(3), "a"), mesh=mesh, in_specs=(), out_specs=P()
    )
    nothing = sm.shard_map(lambda x: None, mesh=mesh, in_specs=P(), out_specs=None)
    for _ in range(2):
        same(mapped(), torch.full((3,), 2.0))
        assert nothing(X) is None


class XY(NamedTuple):
    x: Any
    y: Any


@every_rank(2)
def test_named_tuples_and_dicts_of_any_order(mesh):
    swap = sm.shard_map(
        lambda t: XY(t.y, t.x), mesh=mesh, in_specs=(XY(P("a"), P()),), out_specs=XY(P(), P("a"))
    )
    of_dicts = sm.shard_map(
        lambda d: d["x"] @ d["w"], mesh=mesh, in_specs=({"x": P("a"), "w": P()},), out_specs=P("a")
    )
    for _ in range(2):
        found = swap(XY(put(mesh, X, P("a")), W))
        assert type(found) is XY
        same(found.x, W)
        same(found.y, X)
        same(of_dicts({"w": W, "x": put(mesh, X, P("a"))}), X @ W)
        same(of_dicts(OrderedDict(x=X, w=W)), X @ W)


@every_rank(2)
def test_arrays_are_static(mesh):
    mapped = sm.shard_map(
        lambda x, n: x * n.sum(), mesh=mesh, in_specs=(P("a"), None), out_specs=P("a")
    )
    for n in (1, 2, 1):
        same(mapped(put(mesh, X, P("a")), np.ones(n)), X * n)
    with pytest.raises(TypeError, match="argument 1 is a ndarray, neither a tensor"):
        sm.shard_map(lambda x, n: x, mesh=mesh, in_specs=P("a"), out_specs=P("a"))(X, np.ones(2))


@every_rank(2)
def test_keys_as_arguments(mesh):
    """Another key is not another signature: only the first call tells shapes."""

    def f(x, key):
        with sm.random.seeded(sm.random.fold_in(key, sm.axis_index("a"))):
            return x * 0 + torch.rand(3, 4)

    mapped = sm.shard_map(f, mesh=mesh, in_specs=(P("a"), P()), out_specs=P("a"))
    x, key, drawn = put(mesh, X, P("a")), sm.random.key(0), []
    for step in (0, 1, 0):
        with collectives() as records:
            y = mapped(x, sm.random.fold_in(key, step))
        assert bool(records) == (not drawn)
        drawn.append(y.full_tensor())
    assert torch.equal(drawn[0], drawn[2])
    assert not torch.equal(drawn[0], drawn[1])


# -- plain tensors ---------------------------------------------------------------------------------


@every_rank(2)
def test_plain_tensors_are_the_same_on_every_rank(mesh):
    mapped = sm.shard_map(mean_loss, mesh=mesh, in_specs=(P("a"), P()), out_specs=P())
    for _ in range(2):
        x, w, px, pw = leaf(X), leaf(W), leaf(X), leaf(W)  # x is cut, w taken whole
        same_gradients([x, w], [px, pw], mapped(x, w), plain_loss(px, pw))
        same(mapped(X, W), plain_loss(X, W))


@every_rank(2)
def test_gradients_of_plain_tensors_are_those_of_the_whole_on_every_rank(mesh):
    w = leaf(W)
    sm.shard_map(mean_loss, mesh=mesh, in_specs=(P("a"), P()), out_specs=P())(
        put(mesh, X, P("a")), w
    ).backward()
    grads = mesh.group("a").all_gather_object(w.grad)
    assert torch.equal(grads[0], grads[1])


# -- shapes and dtypes -----------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [0, 1, 3, 5])
def test_uneven_and_empty_parts(rows):
    def program(mesh):
        whole = values(rows, 4)
        mapped = sm.shard_map(
            lambda x, w: ((x @ w).exp(), mean_loss(x, w)),
            mesh=mesh,
            in_specs=(P("a"), P()),
            out_specs=(P("a"), P()),
        )
        for _ in range(2):
            x = put(mesh, whole, P("a"), grad=True)
            w = put(mesh, W, grad=True)
            px = leaf(whole)
            pw = leaf(W)
            y, loss = mapped(x, w)
            assert y.shape == (rows, 5)
            same(y, (whole @ W).exp())
            same_gradients([x, w], [px, pw], loss, plain_loss(px, pw))

    on_mesh((4,), program)


@every_rank(3)
def test_parts_of_given_sizes(mesh):
    spec = P("a", sizes={"a": (1, 0, 5)})
    mapped = sm.shard_map(lambda x: x * 2, mesh=mesh, in_specs=spec, out_specs=spec)
    for _ in range(2):
        y = mapped(put(mesh, X, P("a")))
        assert y.to_local().shape[0] == (1, 0, 5)[mesh.coordinate[0]]
        same(y, X * 2)


@every_rank(3)
def test_results_not_split_like_chunk_need_sizes(mesh):
    def repeated(x):
        return x[:1].expand(2, 4) if x.shape[0] else x

    whole = values(2, 4)  # parts of 1, 1, 0 rows become 2, 2, 0
    x = put(mesh, whole, P("a"))
    same(
        sm.shard_map(repeated, mesh=mesh, in_specs=P("a"), out_specs=P("a"))(x),
        whole.repeat_interleave(2, 0),
    )
    one = sm.shard_map(
        lambda x: x[: 1 + sm.axis_index("a").item()], mesh=mesh, in_specs=P("a"), out_specs=P("a")
    )
    rows = values(9, 4)
    with pytest.raises(ValueError, match=r"result.*sizes"):
        one(put(mesh, rows, P("a")))
    sized = sm.shard_map(
        one.f, mesh=mesh, in_specs=P("a"), out_specs=P("a", sizes={"a": (1, 2, 3)})
    )
    same(sized(put(mesh, rows, P("a"))), torch.cat([rows[:1], rows[3:5], rows[6:]]))


@every_rank(2)
def test_scalars_in_and_out(mesh):
    mapped = sm.shard_map(
        lambda x, s: (s * 2, sm.psum(s * x.sum(), "a")),
        mesh=mesh,
        in_specs=(P("a"), P()),
        out_specs=P(),
    )
    scale = values(seed=5)
    for _ in range(2):
        s, ps = put(mesh, scale, grad=True), leaf(scale)
        twice, loss = mapped(put(mesh, X, P("a")), s)
        assert twice.shape == ()
        same_gradients([s], [ps], loss + twice, ps * X.sum() + 2 * ps)


@every_rank(1, 2)
def test_an_axis_of_one_rank(mesh):
    @sm.shard_map(mesh=mesh, in_specs=(P("a"), P(None, "b")), out_specs=P())
    def f(x, w):
        return sm.psum(sm.psum((x @ w).square().sum(), "a"), "b")

    x = put(mesh, X, P("a"), grad=True)
    w = put(mesh, W[:, :4], P(None, "b"), grad=True)
    px = leaf(X)
    pw = leaf(W[:, :4])
    same_gradients([x, w], [px, pw], f(x, w), plain_loss(px, pw))


@every_rank(2)
def test_arguments_that_are_not_contiguous(mesh):
    whole = values(8, 6).t()
    f = sm.shard_map(
        lambda x: (x.square(), x[:, ::2].t()),
        mesh=mesh,
        in_specs=P(None, "a"),
        out_specs=(P(None, "a"), P("a")),
    )
    for _ in range(2):
        x, px = put(mesh, whole, P(None, "a"), grad=True), leaf(whole)
        y, z = f(x)
        same(z, torch.cat([whole[:, :4:2], whole[:, 4::2]], 1).t())
        same_gradients([x], [px], (y.sum() + z.sum()), px.square().sum() + px[:, ::2].sum())


@every_rank(2)
def test_other_dtypes(mesh):
    @sm.shard_map(mesh=mesh, in_specs=P("a"), out_specs=(P("a"), P("a"), P()))
    def f(x):
        return x > 0, (x * 3).int(), sm.psum(x, "a").sum(0)

    low = X.bfloat16()
    for _ in range(2):
        positive, number, total = f(put(mesh, low, P("a")))
        assert (positive.dtype, number.dtype, total.dtype) == (
            torch.bool,
            torch.int32,
            torch.bfloat16,
        )
        same(positive, low > 0)
        same(number, (low * 3).int())
        torch.testing.assert_close(total.full_tensor(), (low[:3] + low[3:]).sum(0))


@every_rank(2)
def test_pending_in_and_out(mesh):
    """A pending argument is passed as each rank's share, and a share is returned as pending."""
    mapped = sm.shard_map(
        lambda x: 2 * x, mesh=mesh, in_specs=P(unreduced="a"), out_specs=P(unreduced="a")
    )
    partial = sm.shard_map(
        lambda x, w: x @ w, mesh=mesh, in_specs=(P(None, "a"), P("a")), out_specs=P(unreduced="a")
    )
    for _ in range(2):
        x = put(mesh, X, P(None, "a"), grad=True)
        w = put(mesh, W, P("a"), grad=True)
        px = leaf(X)
        pw = leaf(W)
        y = mapped(partial(x, w))
        assert y.spec.unreduced
        same_gradients([x, w], [px, pw], y.square().sum(), 4 * plain_loss(px, pw))
