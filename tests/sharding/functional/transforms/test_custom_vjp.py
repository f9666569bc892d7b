"""`custom_vjp`: functions with gradients of their own."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

import shardmesh as sm
from shardmesh import P
from tests.sharding.functional.helpers import put, same, values
from tests.sharding.functional.vjp_programs import PROGRAMS, answers_of_jax
from tests.sharding.ranks import every_rank, on_mesh, same_error

X, W = values(6, 4), values(4, seed=1)


def made(fun: Any, fwd: Any, bwd: Any, **more: Any) -> Any:
    rule = sm.custom_vjp(fun, **more)
    rule.defvjp(fwd, bwd)
    return rule


EXP = made(torch.exp, lambda x: (x.exp(), x.exp()), lambda y, g: (g * y,))
TIMES = made(
    lambda w, x: w * x,
    lambda w, x: (w * x, (w, x)),
    lambda kept, g: ((g * kept[1]).sum(0), g * kept[0]),
)


# -- as in JAX -------------------------------------------------------------------------------------


class Ours:
    """The library that `vjp_programs` uses."""

    def __init__(self, mesh: sm.DeviceMesh) -> None:
        self.mesh = mesh
        self.custom_vjp = sm.custom_vjp
        self.grad = sm.grad
        self.P = P
        self.psum = sm.psum
        self.exp = torch.exp
        self.clip = torch.clip

    def array(self, x: list[float]) -> torch.Tensor:
        return torch.tensor(x, dtype=torch.float64)

    def shard_map(self, f: Any, in_specs: Any, out_specs: Any) -> Any:
        return sm.shard_map(f, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs)


@pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="needs the extra jax-oracle")
def test_programs_of_jax_line_by_line() -> None:
    expected = answers_of_jax()

    def program(mesh: sm.DeviceMesh) -> None:
        for name, run in PROGRAMS.items():
            for _ in range(2):
                leaves = pytree.tree_leaves(run(Ours(mesh)))
                found = [x.full_tensor() if isinstance(x, sm.ShardedTensor) else x for x in leaves]
                torch.testing.assert_close([x.tolist() for x in found], expected[name], msg=name)

    on_mesh((2,), program)


# -- outside of mapped functions -------------------------------------------------------------------


@pytest.mark.parametrize("spec", [None, P(), P("a"), P(None, "a")])
def test_three_orders_on_plain_and_sharded_tensors(spec: P | None) -> None:
    def program(mesh: sm.DeviceMesh) -> None:
        x: Any = X if spec is None else put(mesh, X, spec)
        gradient = lambda x: EXP(x * 0.5).sum()  # noqa: E731
        for order in range(1, 4):
            gradient = sm.grad(gradient)
            found = gradient(x)
            torch.testing.assert_close(
                found if spec is None else found.full_tensor(), (X * 0.5).exp() * 0.5**order
            )
            before = gradient
            gradient = lambda x, before=before: before(x).sum()  # noqa: E731

    on_mesh((3,), program)


@every_rank(2)
def test_trees_and_gradients_in_any_layout(mesh: sm.DeviceMesh) -> None:
    """A plain gradient, one laid out otherwise, and none."""
    rule = made(
        lambda p, k: {"y": p["w"] * p["x"] * p["z"], "k": k},
        lambda p, k: ({"y": p["w"] * p["x"] * p["z"], "k": k}, p),
        lambda k, p, g: (
            {
                "w": (g["y"] * p["x"] * p["z"]).redistribute(P(None, "a")),
                "x": torch.ones(6, 4),
                "z": None,
            },
        ),
        nondiff_argnums=(1,),
    )
    p = {"w": put(mesh, X, P("a")), "x": put(mesh, X + 1), "z": put(mesh, X - 1)}
    found = sm.grad(lambda p: rule(p, "any")["y"].sum())(p)
    for name, wanted in {
        "w": (X + 1) * (X - 1),
        "x": torch.ones_like(X),
        "z": torch.zeros_like(X),
    }.items():
        assert sm.typeof(found[name]).spec == p[name].spec
        torch.testing.assert_close(found[name].full_tensor(), wanted, check_dtype=False)


@every_rank(2)
def test_backward_and_no_grad(mesh: sm.DeviceMesh) -> None:
    w, x = put(mesh, W, grad=True), put(mesh, X, P("a"), grad=True)
    TIMES(w, x).sum().backward()
    same(w.grad, X.sum(0))
    same(x.grad, W.expand(6, 4))
    with torch.no_grad():
        assert not TIMES(w, x).requires_grad
    assert not TIMES(w.detach(), x.detach()).requires_grad


@every_rank(2)
def test_forward_derivatives(mesh: sm.DeviceMesh) -> None:
    x = put(mesh, X, P("a"))
    same(sm.jvp(EXP, (x,), (x,))[1], X.exp() * X)


def test_names() -> None:
    def f(x: Any, n: int = 2) -> Any:
        """What it does."""
        return x**n

    rule = made(
        f, lambda x, n: (x**n, x), lambda n, x, g: (g * n * x ** (n - 1),), nondiff_argnames=["n"]
    )
    assert (rule.__name__, rule.__doc__, rule.nondiff) == ("f", "What it does.", [1])
    torch.testing.assert_close(sm.grad(lambda x: rule(x).sum())(X), 2 * X)
    torch.testing.assert_close(sm.grad(lambda x: rule(n=3, x=x).sum())(X), 3 * X**2)


# -- inside ----------------------------------------------------------------------------------------


@every_rank(3)
def test_inside_with_share_or_whole_gradients(mesh: sm.DeviceMesh) -> None:
    """The gradient of what is replicated may be this rank's share, or the whole; also at calls that
    are not followed any longer.
    """
    summed = made(
        lambda w, x: w * x,
        lambda w, x: (w * x, (w, x)),
        lambda kept, g: (sm.psum((g * kept[1]).sum(0), "a"), g * kept[0]),
    )
    for rule in (TIMES, summed):
        loss = sm.shard_map(
            lambda w, x, r=rule: sm.psum((r(w, x) ** 2).sum(), "a"),
            mesh=mesh,
            in_specs=(P(), P("a")),
            out_specs=P(),
        )
        for _ in range(3):
            w, x = put(mesh, W, grad=True), put(mesh, X, P("a"), grad=True)
            loss(w, x).backward()
            same(w.grad, 2 * (W * X**2).sum(0))
            same(x.grad, 2 * W**2 * X)


@every_rank(3)
def test_a_first_call_without_backward(mesh: sm.DeviceMesh) -> None:
    """Its gradients are known only once backward has run: calls are tracked until then."""
    summed = made(
        lambda w, x: w * x,
        lambda w, x: (w * x, (w, x)),
        lambda kept, g: (sm.psum((g * kept[1]).sum(0), "a"), g * kept[0]),
    )
    loss = sm.shard_map(
        lambda w, x: sm.psum(summed(w, x).sum(), "a"),
        mesh=mesh,
        in_specs=(P(), P("a")),
        out_specs=P(),
    )
    w, x = put(mesh, W, grad=True), put(mesh, X, P("a"), grad=True)
    for _ in range(8):
        loss(w, x)
    for _ in range(3):
        w.grad = None
        loss(w, x).backward()
        same(w.grad, X.sum(0))


@every_rank(2)
def test_inside_of_grad_inside(mesh: sm.DeviceMesh) -> None:
    """Beside other calls whose types are remembered."""

    def f(w: Any, x: Any) -> Any:
        one = sm.grad(lambda w: sm.psum(TIMES(w, x).square().sum(), "a"))(w)
        two = sm.grad(lambda w: sm.psum(EXP(TIMES(w, x)).sum(), "a"))(w)
        return one + two

    mapped = sm.shard_map(f, mesh=mesh, in_specs=(P(), P("a")), out_specs=P())
    for _ in range(3):
        same(
            mapped(put(mesh, W), put(mesh, X, P("a"))),
            2 * (W * X**2).sum(0) + (X * (W * X).exp()).sum(0),
        )


@every_rank(2, 1)
def test_with_global_axes_and_recomputation(mesh: sm.DeviceMesh) -> None:
    f = sm.remat(lambda x: sm.psum(EXP(x).sum(), "a"))
    for axes in ({"a"}, {"a", "b"}):
        mapped = sm.shard_map(f, mesh=mesh, in_specs=P("a"), out_specs=P(), axis_names=axes)
        for _ in range(2):
            same(sm.grad(mapped)(put(mesh, X, P("a"))), X.exp())


# -- errors ----------------------------------------------------------------------------------------


def error_of(rule: Any, *args: Any, kind: type[Exception] = TypeError) -> str:
    return same_error(
        (2,),
        lambda mesh: sm.grad(lambda *xs: rule(*xs).sum(), tuple(range(len(args))))(*args),
        kind,
    )


def test_wrong_results_of_bwd_raise() -> None:
    def rule(back: Any) -> Any:
        def named(w: Any, x: Any) -> Any:
            return w["k"] * x

        return made(named, lambda w, x: (w["k"] * x, (w, x)), back)

    args = {"k": X}, X
    short = error_of(rule(lambda kept, g: (g,)), *args)
    assert "test_custom_vjp.py:" in short
    assert (
        "bwd of custom_vjp(named) returned a tuple of 1, and named has 2 arguments to "
        "differentiate (w, x)" in short
    )
    assert "gives argument 'w' a gradient that is not a tree like it" in error_of(
        rule(lambda kept, g: (g, g)), *args
    )
    assert "gives argument 'x' 'g' as its gradient" in error_of(
        rule(lambda kept, g: (None, "g")), *args
    )
    wrong = error_of(rule(lambda kept, g: ({"k": g[0]}, g)), *args, kind=ValueError)
    assert "gives argument 'w'['k'], of shape [6, 4], a gradient of shape [4]" in wrong


def test_other_invalid_uses_raise() -> None:
    assert "fwd returned a tensor of shape [6, 4]; return a pair" in error_of(
        made(torch.exp, torch.exp, lambda y, g: (g,)), X
    )
    with pytest.raises(
        AttributeError, match=r"custom_vjp\(exp\) was called before exp.defvjp\(fwd, bwd\)"
    ):
        sm.custom_vjp(_exp)(X)
    with pytest.raises(ValueError, match="nondiff_argnames has 'q', and the arguments are"):
        sm.custom_vjp(_exp, nondiff_argnames=["q"])
    with pytest.raises(TypeError, match="'k' can only be passed by name"):
        made(lambda x, *, k=1: x, _exp, _exp)(X)
    with pytest.raises(NotImplementedError, match=r"use sm\.grad"):
        torch.func.grad(lambda x: TIMES(x, x).sum())(W)
    sharded = "a plain tensor, a gradient that is a ShardedTensor"

    def program(mesh: sm.DeviceMesh) -> None:
        rule = made(_exp, lambda x: (x, None), lambda _, g: (put(mesh, X),))
        sm.grad(lambda x: rule(x).sum())(X)

    assert sharded in same_error((2,), program, TypeError)


def _exp(x: Any) -> Any:
    return x.exp()


_exp.__name__ = "exp"


def test_types_of_gradients_inside() -> None:
    """Megatron's pair: a sum whose backward is the identity is refused, and names the argument."""

    def total(x: Any) -> Any:
        return sm.psum(x, "a")

    rule = made(total, lambda x: (total(x), None), lambda _, g: (g,))

    def program(mesh: sm.DeviceMesh) -> None:
        mapped = sm.shard_map(
            lambda x: rule(x.square().sum()), mesh=mesh, in_specs=P("a"), out_specs=P()
        )
        sm.grad(mapped)(X)

    text = same_error((2,), program, sm.errors.ShardingTypeError, silent=False)
    assert (
        "bwd of custom_vjp(total): the gradient of argument 'x' is pending over 'a', and the "
        "argument varies over 'a'" in text
    )
    assert "test_custom_vjp.py:" in text
