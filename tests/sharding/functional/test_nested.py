"""Mapped functions inside other functions: aliases, nesting, recursion, methods, keys and compiled
callers.
"""

from __future__ import annotations

import torch

import shardmesh as sm
from shardmesh import P
from tests.sharding.functional.helpers import leaf, put, same, same_gradients, values
from tests.sharding.ranks import collectives, every_rank

X, W = values(6, 4), values(4, 5, seed=1)


@every_rank(2)
def test_an_argument_as_the_result(mesh):
    mapped = sm.shard_map(
        lambda x, w: (x, w, w), mesh=mesh, in_specs=(P("a"), P()), out_specs=(P("a"), P(), P())
    )
    for _ in range(2):
        x, w, px, pw = put(mesh, X, P("a"), grad=True), put(mesh, W, grad=True), leaf(X), leaf(W)
        y, v, u = mapped(x, w)
        assert y is not x
        loss, plain = y.square().sum() + (v * u).sum(), px.square().sum() + (pw * pw).sum()
        same_gradients([x, w], [px, pw], loss, plain)


@every_rank(2, 2)
def test_a_mapped_function_in_another(mesh):
    @sm.shard_map(mesh=mesh, in_specs=P("a"), out_specs=P(), axis_names={"a"})
    def f(x):
        assert isinstance(x, sm.ShardedTensor)
        total = sm.shard_map(
            lambda y: sm.psum(y.square().sum(), "b") * (1 + sm.axis_size("a")),
            in_specs=P(None, "b"),
            out_specs=P(),
        )(x)
        return sm.psum(total, "a")

    for _ in range(2):
        x, px = put(mesh, X, P("a"), grad=True), leaf(X)
        same_gradients([x], [px], f(x), 3 * px.square().sum())


@every_rank(2)
def test_recursion_and_methods(mesh):
    class MappedMethod:
        def __init__(self, scale):
            self.scale = scale

        @sm.shard_map(mesh=mesh, in_specs=(None, P("a")), out_specs=P())
        def total(self, x):
            return sm.psum(x.sum(), "a") * self.scale

    def halve(x):
        return (
            x.sum()
            if x.shape[0] <= 1
            else halve(x[: x.shape[0] // 2]) + halve(x[x.shape[0] // 2 :])
        )

    for scale in (2, 3, 2):
        same(MappedMethod(scale).total(put(mesh, X, P("a"))), X.sum() * scale)
    mapped = sm.shard_map(
        lambda x: sm.psum(halve(x), "a"), mesh=mesh, in_specs=P("a"), out_specs=P()
    )
    same(mapped(put(mesh, X, P("a"))), X.sum())


@every_rank(2, 2)
def test_a_nested_function_is_cached_too(mesh):
    """In the steady state neither function tells shapes; types go through the inner one."""
    inner = sm.shard_map(lambda y: sm.psum(y.square().sum(), "b"), in_specs=P("b"), out_specs=P())
    outer = sm.shard_map(
        lambda x: sm.psum(inner(x), "a"),
        mesh=mesh,
        in_specs=P("a"),
        out_specs=P(),
        axis_names={"a"},
    )
    x = put(mesh, values(8, 4), P(("a", "b")))
    outer(x)
    with collectives() as records:
        same(outer(x), values(8, 4).square().sum())
    assert [record.op for record in records] == ["all_reduce", "all_reduce"]


@every_rank(2)
def test_called_from_a_compiled_function(mesh):
    mapped = sm.shard_map(
        lambda x, w: sm.psum((x @ w).sum(), "a"), mesh=mesh, in_specs=(P("a"), P()), out_specs=P()
    )
    step = torch.compile(lambda x, w: mapped(x, w) * 2, backend="eager")
    for _ in range(2):
        same(step(put(mesh, X, P("a")), put(mesh, W)), 2 * (X @ W).sum())


@every_rank(2)
def test_hooks_of_results(mesh):
    mapped = sm.shard_map(lambda x: x.exp(), mesh=mesh, in_specs=P("a"), out_specs=P("a"))
    for _ in range(2):
        x, seen = put(mesh, X, P("a"), grad=True), []
        y = mapped(x)
        y.register_hook(seen.append)
        y.retain_grad()
        (2 * y).sum().backward()
        same(seen[0], torch.full_like(X, 2))
        same(y.grad, torch.full_like(X, 2))
        same(x.grad, 2 * X.exp())
