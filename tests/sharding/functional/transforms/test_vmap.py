"""`vmap` over sharded and plain arguments, over mapped functions and inside them."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch.func import vmap

import shardmesh as sm
from shardmesh import P, Shard
from tests.sharding.functional.helpers import leaf, put, same, same_gradients, values
from tests.sharding.ranks import collectives, every_rank, launched, on_mesh, same_error

X, W = values(4, 6, 8), values(8, 3, seed=1)


def f(x, w):
    return (x @ w).tanh().sum(0)


WANTED = vmap(f, (0, None))(X, W)

# -- layout of the batch ---------------------------------------------------------------------------


@every_rank(2, 2)
def test_the_batch_dim_of_results_is_split_as_in_the_arguments(mesh):
    for spec in (
        P(),
        P(None, "a"),
        P(None, "a", "b"),
        P("a"),
        P("a", "b"),
        P("b", None, "a"),
        P(("b", "a")),
    ):
        y = sm.vmap(f, (0, None))(put(mesh, X, spec), put(mesh, W))
        same(y, WANTED)
        assert y.spec.dims[0] == spec.padded(3).dims[0]
    assert sm.vmap(f, (0, None), 1)(put(mesh, X, P("a")), put(mesh, W)).spec.dims == ((), ("a",))


@every_rank(2, 2)
def test_spmd_axis_name(mesh):
    for name, dims in (("a", ("a",)), (("b", "a"), ("b", "a")), ((), ())):
        y = sm.vmap(f, (0, None), spmd_axis_name=name)(put(mesh, X, P("b")), put(mesh, W, P("a")))
        same(y, WANTED)
        assert y.spec.dims[0] == dims
    with sm.set_mesh(mesh):
        y = sm.vmap(f, (0, None), spmd_axis_name="a")(X, W)  # plain arguments
    same(y, WANTED)
    assert y.spec == P("a", None)


@every_rank(2)
def test_no_communication_without_redistribution(mesh):
    xs, w = put(mesh, X, P("a")), put(mesh, W)
    with collectives() as records:
        sm.vmap(f, (0, None))(xs, w)
    assert launched(records) == []
    with collectives() as records:
        sm.vmap(lambda x, w: f(x, w).redistribute(P()), (0, None))(put(mesh, X, P(None, "a")), w)
    assert launched(records) == ["all_reduce"], "one for all examples"


@every_rank(2)
def test_redistributing_arguments_is_implicit_communication(mesh):
    with sm.ops.implicit_comm("forbid"), pytest.raises(sm.errors.ImplicitCommError, match="vmap"):
        sm.vmap(f, (0, None), spmd_axis_name=())(put(mesh, X, P("a")), put(mesh, W))


@pytest.mark.parametrize("batch", [1, 2, 3, 5])
def test_uneven_batches(batch):
    xs = values(batch, 2, 8)

    def program(mesh):
        x, w, px, pw = put(mesh, xs, P("a"), grad=True), put(mesh, W, grad=True), leaf(xs), leaf(W)
        y, py = sm.vmap(f, (0, None))(x, w), vmap(f, (0, None))(px, pw)
        same_gradients([x, w], [px, pw], y.square().sum(), py.square().sum())

    on_mesh((3,), program)


@every_rank(3)
def test_sizes_of_the_batch(mesh):
    sizes = P("a", sizes={"a": (3, 0, 1)})
    y = sm.vmap(f, (0, None))(put(mesh, X, sizes), put(mesh, W))
    same(y, WANTED)
    assert y.spec.sizes == sizes.sizes


@every_rank(2, 2)
def test_axes_of_arguments_and_results(mesh):
    x, w = put(mesh, X, P("a", None, "b")), put(mesh, values(6, 5), P("b"))
    g = lambda d, c: {"y": d["x"].sin() * c, "n": (d["x"].sum(), c.cos())}  # noqa: E731
    out_axes: Any = {"y": 1, "n": (0, -1)}
    wanted = vmap(g, ({"x": 1}, 0), out_axes)({"x": X}, values(6, 5)[:, :1].expand(6, 8))
    c = put(mesh, values(6, 5), P())[:, :1].expand(6, 8)
    found = sm.vmap(g, ({"x": 1}, 0), out_axes)({"x": x}, c)
    same(found["y"], wanted["y"])
    for one, other in zip(found["n"], wanted["n"], strict=True):
        same(one, other)
    same(sm.vmap(lambda x, *, w: x @ w)(x, w=put(mesh, torch.stack([W] * 4))), X @ W)
    same(sm.vmap(lambda x: (x * 2, w.sum()), 0, (0, None))(put(mesh, X))[1], values(6, 5).sum())
    same(sm.vmap(lambda: put(mesh, W) * 2, axis_size=5)(), torch.stack([W * 2] * 5))
    assert sm.vmap(lambda x: 3.0)(put(mesh, X)).tolist() == [3.0] * 4


@every_rank(2)
def test_plain_and_sharded_together(mesh):
    xs = put(mesh, X, P(None, "a"))
    scale = torch.arange(4.0).double()
    same(sm.vmap(lambda x, s: (x * s).sum(0))(xs, scale), (X * scale[:, None, None]).sum(1))
    torch.testing.assert_close(sm.vmap(f, (0, None))(X, W), WANTED)  # plain in, plain out
    w = leaf(W)
    # Split: the plain argument is one value of all ranks.
    y = sm.vmap(f, (0, None))(put(mesh, X, P("a")), w)
    y.sum().backward()
    pw = leaf(W)
    vmap(f, (0, None))(X, pw).sum().backward()
    torch.testing.assert_close(w.grad, pw.grad)


def test_ranks_outside_the_mesh():
    def rank():
        mesh = sm.DeviceMesh("cpu", [0, 1], axis_names=("a",))
        x, w = put(mesh, X, P(None, "a"), grad=True), put(mesh, W, grad=True)
        y = sm.vmap(f, (0, None))(x, w)
        out, tangent = sm.jvp(f, (x[0], w), (x[1], w))
        g = sm.vmap(sm.grad(lambda x, w: f(x, w).sum()), (0, None))(x, w)
        shapes = [list(t.shape) for t in (y, out, tangent, g)]
        y.sum().backward()
        return shapes, None if mesh.coordinate is None else (y.full_tensor(), x.grad.full_tensor())  # type: ignore[union-attr]

    found = sm.simulate(3)(rank)()
    px = leaf(X)
    vmap(f, (0, None))(px, W).sum().backward()
    for shapes, values_ in found:
        assert shapes == [[4, 3], [3], [3], [4, 6, 8]]
        if values_ is not None:
            torch.testing.assert_close(values_[0].detach(), WANTED)
            torch.testing.assert_close(values_[1], px.grad)


# -- mapped functions ------------------------------------------------------------------------------


@every_rank(2, 2)
def test_a_mapped_function_whose_mesh_has_the_axis_of_the_batch(mesh):
    for given in (mesh, None):
        mapped = sm.shard_map(
            lambda x, w: sm.psum(f(x, w), "b"), mesh=given, in_specs=(P("b"), P()), out_specs=P()
        )
        for _ in range(2):
            y = sm.vmap(mapped, (0, None))(put(mesh, X, P("a", "b")), put(mesh, W))
            same(y, WANTED)
            assert y.spec == P("a", None)
    whole = sm.shard_map(f, mesh=mesh, in_specs=(P(), P()), out_specs=P())
    same(sm.vmap(whole, (0, None), spmd_axis_name=("a", "b"))(put(mesh, X), put(mesh, W)), WANTED)
    twice = sm.vmap(sm.vmap(whole, (0, None)), (0, None))
    same(twice(put(mesh, X[:, :, None], P("a", "b")), put(mesh, W)), (X @ W).tanh())


@every_rank(2)
def test_one_collective_for_all_examples(mesh):
    mapped = sm.shard_map(
        lambda x, w: sm.psum(f(x, w), "a"), mesh=mesh, in_specs=(P("a"), P()), out_specs=P()
    )
    x, w = put(mesh, X, P(None, "a")), put(mesh, W)
    mapped(x[0], w)
    with collectives() as records:
        same(sm.vmap(mapped, (0, None))(x, w), WANTED)
    assert launched(records) == ["all_reduce"]
    same(sm.vmap(mapped, (0, None))(X, W), WANTED)  # plain


# -- errors ----------------------------------------------------------------------------------------


def refused(mesh_shape, call, kind, match, silent=True):
    text = same_error(
        mesh_shape, lambda mesh: call(mesh, put(mesh, X, P("a")), put(mesh, W)), kind, silent=silent
    )
    assert re.search(match, text), text


@pytest.mark.parametrize(
    ("call", "kind", "match"),
    [
        (
            lambda mesh, x, w: sm.vmap(f)(x, w),
            ValueError,
            r"mapped dims must have one size \(argument \[0\]: 4, argument \[1\]: 8\)",
        ),
        (
            lambda mesh, x, w: sm.vmap(f, (3, None))(x, w),
            ValueError,
            r"has shape \[4, 6, 8\], and in_axes map it over dim 3",
        ),
        (
            lambda mesh, x, w: sm.vmap(f, (0, None, 0))(x, w),
            ValueError,
            "in_axes: expected an int or None, .* for a tuple of 2; got a tuple of 3",
        ),
        (
            lambda mesh, x, w: sm.vmap(f, (0, "b"))(x, w),
            TypeError,
            r"in_axes\[1\]: expected .*; got 'b'",
        ),
        (lambda mesh, x, w: sm.vmap(f, None)(x, w), ValueError, "map no argument; pass axis_size="),
        (
            lambda mesh, x, w: sm.vmap(lambda x, n: x, 0)(x, 3),
            ValueError,
            r"argument \[1\] is 3, and in_axes map it",
        ),
        (
            lambda mesh, x, w: sm.vmap(f, (0, None), axis_name="i")(x, w),
            NotImplementedError,
            "axis_name='i'",
        ),
        (
            lambda mesh, x, w: sm.vmap(f, (0, None), None)(x, w),
            ValueError,
            "result depends on the example, and its out_axes are None",
        ),
        (
            lambda mesh, x, w: sm.vmap(f, (0, None), 2)(x, w),
            ValueError,
            r"result has shape \[3\] for one example",
        ),
        (lambda mesh, x, w: sm.vmap(lambda x: "y")(x), TypeError, "neither a tensor nor a number"),
        (
            lambda mesh, x, w: sm.vmap(f, (0, None), spmd_axis_name="z")(x, w),
            ValueError,
            "spmd_axis_name='z' is not an axis of",
        ),
        (
            lambda mesh, x, w: sm.vmap(torch.add)(x, put(mesh, X, P("b"))),
            ValueError,
            "mapped dims are split differently",
        ),
        (
            lambda mesh, x, w: sm.vmap(lambda x: sm.rand((2,), mesh))(put(mesh, X)),
            RuntimeError,
            "randomness='error'",
        ),
        (
            lambda mesh, x, w: sm.vmap(lambda x: w * 2)(x),
            ValueError,
            "they are split over.*pass sharded tensors as arguments",
        ),
    ],
)
def test_mismatched_arguments_raise(call, kind, match):
    refused((2, 2), call, kind, match)


def test_specs_that_name_the_axis_of_the_batch():
    def call(mesh, x, w):
        mapped = sm.shard_map(
            lambda x, w: sm.psum(f(x, w), "a"), mesh=mesh, in_specs=(P("a"), P()), out_specs=P()
        )
        same(sm.vmap(mapped, (0, None), spmd_axis_name=())(x, w), WANTED)
        sm.vmap(mapped, (0, None))(x, w)

    refused(
        (2,),
        call,
        ValueError,
        silent=False,
        match=r"specs name 'a', over which vmap has split its examples.*spmd_axis_name=\(\)",
    )


def test_a_captured_tensor_that_requires_grad_raises():
    w = leaf(W)

    def call(mesh, x, _):
        same(sm.vmap(lambda x: f(x, w.detach()))(x), WANTED)
        sm.vmap(lambda x: f(x, w * 1))(x)

    match = (
        r"test_vmap.py:\d+: a tensor of shape \[8, 3\] that requires grad and is not an argument"
    )
    refused((2,), call, sm.errors.ShardingTypeError, match, silent=False)


@every_rank(2)
def test_random_numbers_that_are_the_same_for_all_examples(mesh):
    y = sm.vmap(lambda x: torch.nn.functional.dropout(x, 0.5), randomness="same")(
        put(mesh, torch.ones(3, 8), P(None, "a"))
    )
    rows = y.full_tensor()
    assert torch.equal(rows[0], rows[1])
    assert set(rows.flatten().tolist()) == {0.0, 2.0}


@every_rank(2)
def test_an_exception_inside_resets_state(mesh):
    x, w = put(mesh, X, P("a")), put(mesh, W)

    def fails(x, w):
        raise KeyError("inside")

    for transform in (
        sm.vmap(fails, (0, None)),
        sm.vmap(sm.grad(fails), (0, None)),
        lambda x, w: sm.jvp(fails, (x, w), (x, w)),
    ):
        with pytest.raises(KeyError, match="inside"):
            transform(x, w)
    same(sm.vmap(f, (0, None))(x, w), WANTED)
    assert not torch._C._are_functorch_transforms_active()
    assert torch.autograd.forward_ad._current_level == -1


# -- torch's own transforms around -----------------------------------------------------------------


@every_rank(2)
def test_transforms_of_torch_around_are_refused(mesh):
    mapped = sm.shard_map(
        lambda x: sm.psum(x.sin().sum(), "a"), mesh=mesh, in_specs=P("a"), out_specs=P()
    )
    plain, sharded = X[0], put(mesh, X[0], P("a")) * 1
    programs = {
        "shard_map": mapped,
        "from_local": lambda x: sm.from_local(x, mesh, [Shard(0)]).sum(),
        "distribute_tensor": lambda x: sm.distribute_tensor(x, mesh, [Shard(0)]).sum(),
        "beside": lambda x: (sharded * x).sum(),
    }
    torchs = {
        "vmap": lambda f, x: torch.func.vmap(f)(x[None]),
        "grad": lambda f, x: torch.func.grad(f)(x),
        "vjp": lambda f, x: torch.func.vjp(f, x),
        "jvp": lambda f, x: torch.func.jvp(f, (x,), (x,)),
        "jacrev": lambda f, x: torch.func.jacrev(f)(x),
        "jacfwd": lambda f, x: torch.func.jacfwd(f)(x),
        "hessian": lambda f, x: torch.func.hessian(f)(x),
    }
    for transform in torchs.values():
        for program in programs.values():
            with pytest.raises(RuntimeError, match=r"sm\.vmap, sm\.grad, sm\.vjp, sm\.jvp"):
                transform(program, plain)
        with pytest.raises(RuntimeError, match=r"sm\.(vmap|jvp)|wrapper of a ShardedTensor"):
            transform(mapped, sharded)


@every_rank(2)
def test_forward_mode_of_torch_inside_is_refused_on_simulated_ranks(mesh):
    body = lambda x: torch.func.jvp(lambda x: sm.psum(x.sin(), "a"), (x,), (x,))[1]  # noqa: E731
    mapped = sm.shard_map(body, mesh=mesh, in_specs=P("a"), out_specs=P())
    with pytest.raises(RuntimeError, match=r"on simulated ranks: .*use sm\.jvp"):
        mapped(put(mesh, X[0], P("a")))
