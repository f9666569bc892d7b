"""`jvp` in forward mode, `linearize`, `jacfwd`, `jacrev`, `hessian`: trees, arguments, errors, and
what they move.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import shardmesh as sm
from shardmesh import P
from tests.sharding.functional.helpers import leaf, put, same, values
from tests.sharding.functional.transforms.test_gradients import inside, same_trees
from tests.sharding.ranks import collectives, every_rank, launched, on_mesh, same_error

X, W, V = values(4, 3), values(3, 2, seed=1), values(4, 3, seed=2)


def f(x, w):
    return {"y": (x @ w).sin(), "n": (x.sum(), w.prod())}


class CubeWithoutJvp(torch.autograd.Function):
    """A function without a forward derivative."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, g):
        return 3 * ctx.saved_tensors[0] ** 2 * g


# -- jvp -------------------------------------------------------------------------------------------


@every_rank(2)
def test_tangents_have_the_layout_of_their_values(mesh):
    x, v = put(mesh, X, P("a")), put(mesh, V, P("a"))
    with collectives() as records:
        out, tangent = sm.jvp(lambda x: x.sin().sum().redistribute(P()), (x,), (v,))
    assert launched(records) == ["all_reduce", "all_reduce"]
    same(out, X.sin().sum())
    same(tangent, (X.cos() * V).sum())
    assert not out.requires_grad
    assert not tangent.requires_grad


@every_rank(2)
def test_has_aux_and_constants(mesh):
    x, v = put(mesh, X, P("a")), put(mesh, V)  # a tangent in another layout
    g = lambda x: ({"y": x * 2, "n": 3, "count": (x > 0).sum()}, {"x": x + 1, "s": "text"})  # noqa: E731
    out, tangent, aux = sm.jvp(g, (x,), (v,), has_aux=True)
    same(tangent["y"], 2 * V)
    assert (out["n"], tangent["n"], aux["s"]) == (3, 3, "text")
    same(aux["x"], X + 1)
    assert tangent["count"].tolist() == 0
    same(sm.jvp(lambda x: put(mesh, W) * 2, (x,), (v,))[1], torch.zeros_like(W))
    out, tangent = sm.jvp(lambda x: x * 2, (X,), (V,))  # plain
    torch.testing.assert_close(tangent, 2 * V)


@every_rank(2)
def test_pending_primals_and_results(mesh):
    for kind in ("sum", "avg", "max", "min", "product"):
        x = put(mesh, X).redistribute(P(unreduced={"a": kind}))
        out, tangent = sm.jvp(lambda x: x.redistribute(P()), (x,), (put(mesh, V),))
        same(out, X)
        same(tangent, V)
    parts = torch.stack([X, V])
    x, v = put(mesh, parts, P("a")), put(mesh, parts.cos(), P("a"))
    for name in ("amax", "amin", "prod"):
        g = lambda x: getattr(x, name)(0)  # noqa: B023, E731
        for mine, wanted in zip(
            sm.jvp(g, (x,), (v,)), torch.func.jvp(g, (parts,), (parts.cos(),)), strict=True
        ):
            same(mine, wanted)


@every_rank(2)
def test_an_operator_without_a_forward_derivative(mesh):
    mapped = sm.shard_map(
        lambda x: sm.psum(CubeWithoutJvp.apply(x), "a"), mesh=mesh, in_specs=P("a"), out_specs=P()
    )
    for _ in range(2):
        out, tangent = sm.jvp(mapped, (put(mesh, X, P("a")),), (put(mesh, V, P("a")),))
        same(out, X[:2] ** 3 + X[2:] ** 3)
        same(tangent, (3 * X**2 * V)[:2] + (3 * X**2 * V)[2:])


@every_rank(2)
def test_no_grad_and_expanded_tensors(mesh):
    x = put(mesh, X, P("a"))
    with torch.no_grad():
        same(sm.jvp(lambda x: (x * 2).sin(), (x,), (x,))[1], 2 * X * (2 * X).cos())
    first: Any = x[:1]
    row = first.redistribute(P()).expand(4, 3)
    same(sm.jvp(torch.sin, (row,), (put(mesh, V),))[1], X[:1].cos() * V)


@pytest.mark.parametrize("shape", [(3,), (5,), (1,), (2, 2)])
def test_uneven_parts(shape):
    def program(mesh):
        for spec in (P("a"), P(None, "a")):
            x, v, w = put(mesh, X, spec), put(mesh, V, spec), put(mesh, W, P("a"))
            same_trees(
                sm.jvp(lambda x, w=w: f(x, w), (x,), (v,)),
                torch.func.jvp(lambda x: f(x, W), (X,), (V,)),
            )
            g = lambda x: F.rms_norm(x, (3,)).softmax(0).roll(1, 0)  # noqa: E731
            same_trees(sm.jvp(g, (x,), (v,)), torch.func.jvp(g, (X,), (V,)))
            same(sm.jacfwd(g)(x), torch.func.jacfwd(g)(X))
            same(sm.jacrev(g)(x), torch.func.jacrev(g)(X))

    on_mesh(shape, program)


@pytest.mark.parametrize(
    ("call", "kind", "match"),
    [
        (
            lambda x: sm.jvp(torch.sin, (x,), (x, x)),
            ValueError,
            "pass a tree like that of the primals",
        ),
        (
            lambda x: sm.jvp(torch.sin, (x,), (x[:1],)),
            ValueError,
            r"a tangent of shape \[1, 3\] for a primal of shape \[4, 3\]",
        ),
        (lambda x: sm.jvp(torch.sin, (x,), (1.0,)), ValueError, "a tangent of shape None"),
        (lambda x: sm.jvp(torch.sin, (X,), (x,)), TypeError, "its primal is a plain tensor"),
        (
            lambda x: sm.jvp(torch.sin, (x.long(),), (x,)),
            TypeError,
            "only floating tensors have gradients",
        ),
        (lambda x: sm.jvp(lambda x: "text", (x,), (x,)), TypeError, "which contains no tensor"),
        (
            lambda x: sm.linearize(torch.sin, x)[1](x, x),
            ValueError,
            "(?s)linearize: .* pass a tree like that of the primals",
        ),
        (
            lambda x: sm.jacfwd(torch.sin)(x.long()),
            TypeError,
            "jacfwd: leaf 0 of the argument is a torch.int64 tensor",
        ),
        (
            lambda x: sm.jacrev(lambda x: x > 0)(x),
            TypeError,
            "jacrev: leaf 0 of the result is a torch.bool tensor",
        ),
    ],
)
def test_mismatched_arguments_raise(call, kind, match):
    text = same_error((2,), lambda mesh: call(put(mesh, X, P("a"))), kind, silent=False)
    assert re.search(match, text), text


# -- linearize -------------------------------------------------------------------------------------


@every_rank(2)
def test_linearize_runs_the_function_once(mesh):
    calls = []

    def counted(x, w):
        calls.append(1)
        return f(x, w)

    x, w = put(mesh, X, P("a")), put(mesh, W, P(None, "a"))
    out, f_jvp, aux = sm.linearize(lambda x, w: (counted(x, w), "aux"), x, w, has_aux=True)
    assert aux == "aux"
    for v in (V, V.sin()):
        wanted = torch.func.jvp(f, (X, W), (v, W))
        same_trees((out, f_jvp(put(mesh, v, P("a")), w)), wanted)
    assert len(calls) == 1
    out, f_jvp = sm.linearize(lambda x: {"x": 2 * x, "c": torch.ones(2), "n": 1}, x)
    assert f_jvp(x)["c"].tolist() == [0, 0]


@every_rank(2)
def test_linearize_inside(mesh):
    def body(x, v):
        out, f_jvp = sm.linearize(lambda x: (sm.psum(x.sin().sum(0), "a"), x.cos()), x)
        return out, f_jvp(v), f_jvp(2 * v)

    mapped = inside(mesh, body, ((P(), P("a")),) * 3, (P("a"), P("a")))
    g = lambda x: (x.sin().sum(0), x.cos())  # noqa: E731
    out, tangent = torch.func.jvp(g, (X,), (V,))[:2]
    for _ in range(2):
        same_trees(
            mapped(put(mesh, X, P("a")), put(mesh, V, P("a"))),
            (out, tangent, [2 * t for t in tangent]),
        )


# -- Jacobians -------------------------------------------------------------------------------------


@every_rank(2)
def test_jacobians_of_trees(mesh):
    x, w = put(mesh, X, P("a")), put(mesh, W, P(None, "a"))
    for argnums in (0, 1, (0, 1), (1,)):
        for ours, theirs in ((sm.jacfwd, torch.func.jacfwd), (sm.jacrev, torch.func.jacrev)):
            same_trees(ours(f, argnums)(x, w), theirs(f, argnums)(X, W))
    tree = {"x": x, "b": [w.sum(), put(mesh, torch.ones(2).double())]}
    plain = {"x": X, "b": [W.sum(), torch.ones(2).double()]}
    g = lambda t: (t["x"].sin() * t["b"][0]).sum() + (t["b"][1] ** 2).sum()  # noqa: E731
    for ours, theirs in ((sm.jacfwd, torch.func.jacfwd), (sm.jacrev, torch.func.jacrev)):
        same_trees(ours(g)(tree), theirs(g)(plain))
    g = lambda x: (x.sin().sum(), {"mean": x.mean(), "name": "aux"})  # noqa: E731
    for transform in (sm.jacfwd, sm.jacrev, sm.hessian):
        found, aux = transform(g, has_aux=True)(x)
        assert aux["name"] == "aux"
        same(aux["mean"], X.mean())
    same(found, torch.func.hessian(lambda x: x.sin().sum())(X))
    assert sm.jacfwd(torch.sin)(x).spec.dims[0] == ("a",)
    assert sm.jacrev(torch.sin)(x).spec.dims[2] == ("a",)


@every_rank(2)
def test_the_number_of_collectives_does_not_depend_on_the_number_of_elements(mesh):
    x = put(mesh, X, P("a"))
    with collectives() as records:
        sm.jacfwd(lambda x: x.square().sum().redistribute(P()))(x)
    assert launched(records) == ["all_reduce"] * 2


@every_rank(2)
def test_a_function_of_plain_tensors_over_a_mapped_one(mesh):
    mapped = sm.shard_map(
        lambda x, w: sm.psum((x @ w).sin().sum(0), "a"),
        mesh=mesh,
        in_specs=(P("a"), P()),
        out_specs=P(),
    )
    plain = lambda x, w: (x @ w).sin().sum(0)  # noqa: E731
    for _ in range(2):
        same_trees(sm.jacfwd(mapped, (0, 1))(X, W), torch.func.jacfwd(plain, (0, 1))(X, W))
        torch.testing.assert_close(
            sm.jacrev(mapped, (0, 1))(X, W), torch.func.jacrev(plain, (0, 1))(X, W)
        )
        same_trees(sm.jvp(mapped, (X, W), (V, W)), torch.func.jvp(plain, (X, W), (V, W)))
        out, back = sm.vjp(mapped, X, W)
        torch.testing.assert_close(back(out), torch.func.vjp(plain, X, W)[1](plain(X, W)))


@every_rank(2)
def test_gradients_of_captured_tensors(mesh):
    """The inner gradient is with respect to a constant, and depends on what the outer one is with
    respect to.
    """
    x, w = put(mesh, X, P("a")), put(mesh, W)
    loss = lambda x, w: (x @ w).sin().sum()  # noqa: E731
    found = sm.grad(lambda x: sm.grad(lambda w: loss(x, w))(w).square().sum())(x)
    px = leaf(X)
    (g,) = torch.autograd.grad(loss(px, pw := leaf(W)), [pw], create_graph=True)
    same(found, torch.autograd.grad(g.square().sum(), px)[0])


@every_rank(2)
def test_tensors_made_inside_a_transform_outlive_it(mesh):
    """A tensor first created inside a transform and cached is not one of the transform's
    tensors.
    """
    body = lambda x: sm.all_to_all(x * (sm.axis_index("a") + 1), "a", 1, 0, tiled=True)  # noqa: E731
    mapped = sm.shard_map(body, mesh=mesh, in_specs=P("a"), out_specs=P("a"))
    x = put(mesh, values(4, 2), P("a"))
    tangent = sm.jvp(lambda x: mapped(x).cumsum(0), (x,), (x,))[1]
    same(mapped(x).cumsum(0), tangent.full_tensor())
    same(
        sm.jvp(sm.grad(lambda x: mapped(x).square().sum()), (x,), (x,))[1],
        sm.grad(lambda x: mapped(x).square().sum())(x).full_tensor(),
    )
