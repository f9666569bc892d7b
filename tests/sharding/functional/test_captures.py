"""Tensors that a mapped function closes over go in as arguments do: values and gradients to the
second order, types, errors.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn

import shardmesh as sm
from shardmesh import P
from tests.sharding.functional.helpers import leaf, put, same, values
from tests.sharding.ranks import collectives, every_rank, launched, on_mesh, same_error

X, W = values(6, 5), values(5, 4, seed=1)
SPECS = [
    P(),
    P(None, "b"),
    P("b"),
    P("a"),
    P(unreduced="b"),
    P(None, ("a", "b")),
    P("b", sizes={"b": (4, 1)}),
]


def score(x, w):
    """Return a scalar of this rank's parts of both, for any shapes."""
    return sm.psum((x.sum() * w.sin()).square().sum() + w.square().sum(), ("a", "b"))


def linear_score(x, w):
    return sm.psum((x.sum() * sm.psum(w, "b")).square().sum(), ("a", "b"))


def closing_over(mesh, w, f, **more):
    return sm.shard_map(lambda x: f(x, w), mesh=mesh, in_specs=P("a"), out_specs=P(), **more)


def with_argument(mesh, spec, f):
    return sm.shard_map(f, mesh=mesh, in_specs=(P("a"), spec), out_specs=P())


@pytest.mark.one_in(5)
@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("check", [True, "always", "values", False])
def test_a_captured_sharded_tensor_keeps_its_layout(spec, check):
    f = linear_score if spec.unreduced else score

    @every_rank(2, 2)
    def program(mesh):
        x = put(mesh, X, P("a"))
        kept = closing_over(mesh, shared := put(mesh, W, spec), f, check=check)
        given = with_argument(mesh, spec, f)
        for _ in range(2):
            same(kept(x), given(x, shared).full_tensor())
        mine, theirs = put(mesh, W, spec, grad=True), put(mesh, W, spec, grad=True)
        kept = closing_over(mesh, mine, f, check=check)
        for _ in range(2):  # the second call is one whose signature is known
            kept(x).backward()
            given(x, theirs).backward()
        assert sm.typeof(mine.grad) is sm.typeof(theirs.grad)
        same(mine.grad, theirs.grad.full_tensor())

    program()


@pytest.mark.parametrize("spec", [P(), P(None, "b"), P("a")], ids=str)
def test_gradients_to_the_second_order(spec):
    @every_rank(2, 2)
    def program(mesh):
        x, w = put(mesh, X, P("a"), grad=True), put(mesh, W, spec)
        given = with_argument(mesh, spec, score)

        def first(f):
            return sm.grad(lambda x, w: f(x, w), (0, 1))

        def second(f):
            return sm.grad(lambda x, w: sum(g.sin().sum() for g in first(f)(x, w)), (0, 1))

        def kept(x, w):
            return closing_over(mesh, w, score)(x)

        for mine, theirs in ((first(kept), first(given)), (second(kept), second(given))):
            for g, wanted in zip(mine(x, w), theirs(x, w), strict=True):
                assert sm.typeof(g) is sm.typeof(wanted)
                same(g, wanted.full_tensor())

    program()


@every_rank(2, 2)
def test_a_plain_tensor_counts_as_replicated(mesh):
    """Its gradient is that of the whole computation; leaves and others, under every check, as often
    as it is used.
    """
    x = put(mesh, X, P("a"))
    wanted = leaf(W)
    ((X @ wanted).square().sum() + (X @ wanted).sum()).backward()
    for check in (True, "always", "values", False):
        mine = leaf(W)
        double = 2 * mine
        for w in (mine, double / 2):
            mine.grad = None
            f = closing_over(
                mesh,
                w,
                lambda x, w: sm.psum((x @ w).square().sum() + (x @ w).sum(), "a"),
                check=check,
            )
            for _ in range(2):
                mine.grad = None
                f(x).backward(retain_graph=True)
                torch.testing.assert_close(mine.grad, wanted.grad)


@every_rank(4)
def test_a_capture_is_prepared_once(mesh):
    """One reduction of its gradient, however often it is used."""
    w, x = leaf(W), put(mesh, X, P("a"))
    f = sm.shard_map(
        lambda x: sm.psum((x @ w + x @ w.sin() + x @ (w * w)).sum(), "a"),
        mesh=mesh,
        in_specs=P("a"),
        out_specs=P(),
    )
    f(x).backward()
    with collectives() as records:
        f(x).backward()
    assert launched(records) == ["all_reduce"] * 3, (
        "the psum of the loss, its backward, and the gradient of w"
    )


@every_rank(2)
def test_a_module(mesh):
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.LayerNorm(8), nn.LSTM(8, 3)).double()
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            p.copy_(values(*p.shape, seed=i))
    rows = values(4, 6, 5)
    f = sm.shard_map(
        lambda x: sm.psum(model(x)[0].square().sum(), "a"),
        mesh=mesh,
        in_specs=P(None, "a"),
        out_specs=P(),
    )
    f(put(mesh, rows, P(None, "a"))).backward()
    found = [p.grad for p in model.parameters()]
    wanted = torch.autograd.grad(model(rows)[0].square().sum(), list(model.parameters()))
    for g, whole in zip(found, wanted, strict=True):
        torch.testing.assert_close(g, whole)


@every_rank(2, 2)
def test_over_the_axes_that_stay_global_it_stays_sharded(mesh):
    w, x = put(mesh, W, P(None, "b"), grad=True), put(mesh, X, P("a"))
    seen = []

    def f(x):
        y = x @ w
        seen.append(str(sm.typeof(y)))
        return sm.pmean(y.square().mean(), "a")

    f = sm.shard_map(f, mesh=mesh, in_specs=P("a"), out_specs=P(), axis_names={"a"})
    for _ in range(2):
        w.grad = None
        f(x).backward()
        plain = leaf(W)
        (X @ plain).square().mean().backward()
        same(w.grad, plain.grad)
    assert set(seen) == {"f64[3, 4]{V:a} @ P(None, 'b') on (b=2)"}


@every_rank(2, 2)
def test_nested_functions(mesh):
    """The inner function captures from outside both, and from the outer one."""
    w, x = put(mesh, W, P("b", "a"), grad=True), put(mesh, X, P("a", "b"))

    def outer(x):
        y = x.sin()
        inner = sm.shard_map(
            lambda z: sm.psum((z * y).sum() * w.square().sum(), ("a", "b")),
            in_specs=P(None, "b"),
            out_specs=P(),
        )
        return inner(x)

    f = sm.shard_map(outer, mesh=mesh, in_specs=P("a"), out_specs=P(), axis_names={"a"})
    given = sm.shard_map(
        lambda x, w: sm.psum((x * x.sin()).sum() * w.square().sum(), ("a", "b")),
        mesh=mesh,
        in_specs=(P("a", "b"), P("b", "a")),
        out_specs=P(),
    )
    for _ in range(2):
        w.grad = None
        out = f(x)
        out.backward()
        other = put(mesh, W, P("b", "a"), grad=True)
        wanted = given(x, other)
        wanted.backward()
        same(out, wanted.full_tensor())
        same(w.grad, other.grad.full_tensor())


@every_rank(2)
def test_an_argument_of_a_nested_function(mesh):
    w, x = put(mesh, W, P()), put(mesh, X, P("a"))
    inner = sm.shard_map(lambda w: w.sum(), mesh=mesh["a"], in_specs=P(), out_specs=P())
    with pytest.raises(ValueError, match="manual already"):
        sm.shard_map(lambda x: x * inner(w), mesh=mesh, in_specs=P("a"), out_specs=P("a"))(x)


@every_rank(2)
def test_recomputed_pieces(mesh):
    w, plain, x = put(mesh, W, P(None, "a"), grad=True), leaf(values(5)), put(mesh, X, P("a"))

    def f(x, w, plain):
        return sm.psum(sm.remat(lambda x: ((x * plain) @ w).sin().square().sum())(x), "a")

    sm.shard_map(lambda x: f(x, w, plain), mesh=mesh, in_specs=P("a"), out_specs=P())(x).backward()
    other, other_plain = put(mesh, W, P(None, "a"), grad=True), leaf(values(5))
    sm.shard_map(f, mesh=mesh, in_specs=(P("a"), P(None, "a"), P()), out_specs=P())(
        x, other, other_plain
    ).backward()
    same(w.grad, other.grad.full_tensor())
    torch.testing.assert_close(plain.grad, other_plain.grad)


@every_rank(2)
def test_gradients_inside(mesh):
    """`sm.grad` inside, of captures, and through a loss with captures."""
    w, x = put(mesh, W, P()), put(mesh, X, P("a"))
    wanted = leaf(W)
    (X @ wanted).square().sum().backward()
    f = sm.shard_map(
        lambda x: sm.grad(lambda w: sm.psum((x @ w).square().sum(), "a"))(w),
        mesh=mesh,
        in_specs=P("a"),
        out_specs=P(),
    )
    for _ in range(2):
        same(f(x), wanted.grad)


@every_rank(2)
def test_collectives_of_captures(mesh):
    w, plain = put(mesh, W, P(None, "a"), grad=True), leaf(W)

    def several():
        return (
            sm.all_gather(w, "a", axis=1, tiled=True),
            *sm.psum([plain, plain.square()], "a"),
            sm.pmax(w, "a"),
        )

    f = sm.shard_map(several, mesh=mesh, in_specs=(), out_specs=P())
    for _ in range(2):
        gathered, total, squares, _ = f()
        same(gathered, W)
        same(total, 2 * W)
        same(squares, 2 * W.square())
    (gathered.sum() + total.sum()).backward()
    same(w.grad, torch.ones_like(W))
    torch.testing.assert_close(plain.grad, 2 * torch.ones_like(W))


@every_rank(2)
def test_the_part_itself(mesh):
    """`to_local` of a capture is its local part, with its type and gradient."""
    w, x = put(mesh, W, P(None, "a"), grad=True), put(mesh, X, P())
    f = sm.shard_map(lambda x: x @ w.to_local(), mesh=mesh, in_specs=P(), out_specs=P(None, "a"))
    f(x).sum().backward()
    same(w.grad, X.sum(0)[:, None].expand(5, 4))
    with pytest.raises(
        sm.errors.ShardingTypeError,
        match="redistribute it before the call, or pass it as an argument",
    ):
        sm.shard_map(
            lambda x: x @ w.redistribute(P()).to_local(), mesh=mesh, in_specs=P(), out_specs=P()
        )(x)


@every_rank(2)
def test_a_constant_that_later_requires_grad(mesh):
    c, x = values(5), put(mesh, X, P("a"))
    f = sm.shard_map(lambda x: x * c, mesh=mesh, in_specs=P("a"), out_specs=P("a"))
    f(x)
    f(x)
    c.requires_grad_()
    f(x).sum().backward()
    torch.testing.assert_close(c.grad, X.sum(0))


# -- checks ----------------------------------------------------------------------------------------


def refused(capture, f, kind=sm.errors.ShardingTypeError, out_specs=P("a"), **more):
    def program(mesh):
        w = capture(mesh)
        sm.shard_map(lambda x: f(x, w), mesh=mesh, in_specs=P("a"), out_specs=out_specs, **more)(
            put(mesh, X, P("a"))
        )

    return same_error((2, 2), program, kind, silent=False)


def test_a_sharded_capture_varies_over_its_axes():
    text = refused(lambda mesh: put(mesh, W, P("b")), lambda x, w: x * w.sum())
    assert "varies over 'b'" in text
    assert "f64[5, 4] @ P('b', None) on (a=2, b=2), which it closes over at" in text


def test_plain_captures_that_differ():
    def own(mesh):
        return torch.full((5,), float(mesh.get_rank()), requires_grad=True, dtype=torch.float64)

    text = refused(own, lambda x, w: x * w)
    assert "a tensor of f64[5] that requires grad, which it closes over at" in text
    assert "at (0, 1) it differs" in text


def test_plain_captures_that_later_differ():
    def program(mesh):
        w = leaf(values(5))
        f = sm.shard_map(
            lambda x: x * w, mesh=mesh, in_specs=P("a"), out_specs=P("a"), check="values"
        )
        f(put(mesh, X, P("a")))
        with torch.no_grad():
            w[0] = mesh.get_rank()
        f(put(mesh, X, P("a")))

    assert "which it closes over" in same_error((2,), program, sm.errors.ReplicaError, silent=False)


def test_ranks_with_different_captures_raise():
    def program(mesh):
        w, here = leaf(values(5)), mesh.get_rank()
        sm.shard_map(lambda x: x * w if here else x, mesh=mesh, in_specs=P("a"), out_specs=P("a"))(
            put(mesh, X, P("a"))
        )

    with pytest.raises((sm.errors.ShardingTypeError, sm.errors.PeerError)):
        on_mesh((2,), program)


def test_a_capture_on_another_mesh():
    text = refused(lambda mesh: put(mesh["b"], W, P("b")), lambda x, w: x * w.sum())
    assert "redistribute it there first, or pass it as an argument" in text


@pytest.mark.parametrize(
    "write",
    [lambda w: w.add_(1), lambda w: torch.add(w, 1, out=w), lambda w: w.__setitem__(0, 1.0)],
)
def test_writing_to_a_capture_raises(write):
    text = refused(lambda mesh: put(mesh, W, P("b")), lambda x, w: (write(w), x)[1])
    assert "writes to a tensor that the mapped function closes over; write to a clone of it" in text


def test_a_new_capture_in_a_cached_call():
    def program(mesh):
        w, here = put(mesh, X, P("a")), {"it": False}
        f = sm.shard_map(
            lambda x: x * w if here["it"] else x, mesh=mesh, in_specs=P("a"), out_specs=P("a")
        )
        f(put(mesh, X, P("a")))
        here["it"] = True
        f(put(mesh, X, P("a")))

    assert "pass the ShardedTensor as an argument" in same_error(
        (2,), program, RuntimeError, silent=False
    )


# -- against JAX -----------------------------------------------------------------------------------

JAX = """
import jax, jax.numpy as jnp, numpy as np, sys
X, W = np.load(sys.argv[1]).values()
mesh = jax.make_mesh((2,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
P = jax.P
def loss(w, x):
    f = lambda x: jax.lax.psum(jnp.sin(x @ w).sum(), "a")
    return jax.shard_map(f, mesh=mesh, in_specs=P("a"), out_specs=P())(x)
first = jax.grad(loss)(W, X)
second = jax.grad(lambda w: (jax.grad(loss)(w, X) ** 2).sum())(W)
np.savez(sys.argv[2], loss=loss(W, X), first=first, second=second)
"""


@pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="needs the extra jax-oracle")
def test_against_jax(tmp_path):
    """Closing over a differentiated value: loss, gradient, second derivative."""
    np.savez(tmp_path / "in.npz", X=X.numpy(), W=W.numpy())
    env = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_ENABLE_X64": "1",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
    }
    subprocess.run(
        [sys.executable, "-c", JAX, str(tmp_path / "in.npz"), str(tmp_path / "out.npz")],
        env=env,
        check=True,
    )
    wanted = {
        name: torch.from_numpy(found) for name, found in np.load(tmp_path / "out.npz").items()
    }

    def program(mesh):
        x, w = put(mesh, X, P("a")), put(mesh, W, P())

        def loss(w):
            return sm.shard_map(
                lambda x: sm.psum((x @ w).sin().sum(), "a"),
                mesh=mesh,
                in_specs=P("a"),
                out_specs=P(),
            )(x)

        same(loss(w), wanted["loss"])
        same(sm.grad(loss)(w), wanted["first"])
        same(sm.grad(lambda w: sm.grad(loss)(w).square().sum())(w), wanted["second"])

    on_mesh((2,), program)
