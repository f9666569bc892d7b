"""`grad`, `value_and_grad`, `vjp`, `jvp` over global functions, over mapped functions and inside
them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import shardmesh as sm
from shardmesh import P
from tests.sharding.functional.helpers import leaf, put, same, values
from tests.sharding.ranks import collectives, every_rank, launched, same_error

X, W, B = values(6, 4), values(4, 5, seed=1), values(5, seed=2)
PARAMS = {"w": W, "b": [B]}


def loss_of(params: Any, x: Any) -> Any:
    return (x @ params["w"] + params["b"][0]).tanh().square().mean()


def plain_grads(f: Callable[..., Any], *args: Any) -> tuple[Tensor, Any]:
    """Return the value, and the gradient with respect to the first argument, of plain tensors."""
    leaves, tree = pytree.tree_flatten(args[0])
    leaves = [leaf(x) for x in leaves]
    value = f(pytree.tree_unflatten(leaves, tree), *args[1:])
    found = torch.autograd.grad(value, leaves, allow_unused=True, materialize_grads=True)
    return value.detach(), pytree.tree_unflatten(list(found), tree)


def same_trees(sharded: Any, plain: Any, like: Any = None) -> None:
    one, other = pytree.tree_leaves(sharded), pytree.tree_leaves(plain)
    assert len(one) == len(other)
    for x, y in zip(one, other, strict=True):
        same(x, y)
    for x, y in zip(one, pytree.tree_leaves(like) if like is not None else one, strict=True):
        assert sm.typeof(x) is sm.typeof(y)


def params_on(mesh: sm.DeviceMesh) -> Any:
    """Return parameters with w sharded by columns over b if the mesh has b, and the bias alike."""
    split = "b" in mesh.axis_names
    return {
        "w": put(mesh, W, P(None, "b") if split else P()),
        "b": [put(mesh, B, P("b") if split else P())],
    }


# -- over global functions -------------------------------------------------------------------------


@every_rank(2, 2)
def test_trees_over_a_global_function(mesh):
    params, x = params_on(mesh), put(mesh, X, P("a"))
    value, found = sm.value_and_grad(loss_of)(params, x)
    plain, wanted = plain_grads(loss_of, PARAMS, X)
    same(value, plain)
    same_trees(found, wanted, params)
    same_trees(sm.grad(loss_of)(params, x), wanted, params)
    assert not value.requires_grad
    assert not found["w"].requires_grad
    assert params["w"].grad is None


@every_rank(2)
def test_argnums(mesh):
    f = lambda x, w, b: (x @ w + b).square().sum()  # noqa: E731
    x, w, b = put(mesh, X, P("a")), put(mesh, W), put(mesh, B)
    leaves = [leaf(t) for t in (X, W, B)]
    wanted = torch.autograd.grad(f(*leaves), leaves)
    for argnums in (0, 1, (1,), (2, 0), (0, 1, 2)):
        found = sm.grad(f, argnums=argnums)(x, w, b)
        assert isinstance(found, tuple) == isinstance(argnums, tuple)
        same_trees(
            found, [wanted[i] for i in ((argnums,) if isinstance(argnums, int) else argnums)]
        )


@every_rank(2)
def test_aux(mesh):
    f = lambda w, x: ((x @ w).square().sum(), {"y": x @ w, "name": "aux"})  # noqa: E731
    x, w = put(mesh, X, P("a")), put(mesh, W)
    (value, aux), found = sm.value_and_grad(f, has_aux=True)(w, x)
    plain, wanted = plain_grads(lambda w, x: f(w, x)[0], W, X)
    same(value, plain)
    same(found, wanted)
    same(aux["y"], X @ W)
    assert aux["name"] == "aux"
    assert not aux["y"].requires_grad
    found, aux = sm.grad(f, has_aux=True)(w, x)
    same(found, wanted)
    assert aux["name"] == "aux"


@every_rank(2)
def test_a_parameter_used_many_times_and_several_in_one_bucket(mesh):
    def f(params, x):
        for _ in range(5):
            x = (x @ params["w"]).tanh() @ params["v"] + params["b"]
        return x.square().sum()

    given = {"w": W, "v": values(5, 4, seed=3), "b": values(4, seed=4)}
    params, x = {name: put(mesh, t) for name, t in given.items()}, put(mesh, X, P("a"))
    with collectives() as records:
        found = sm.grad(f)(params, x)
    assert launched(records) == ["all_reduce"]
    assert records[0].bytes_received == sum(t.numel() for t in given.values()) * 8
    same_trees(found, plain_grads(f, given, X)[1], params)


@every_rank(2)
def test_unused_and_mixed_dtypes(mesh):
    given = {"used": W.float(), "double": B, "unused": X, "half": B.bfloat16()}

    def f(params, x):
        return (
            (x.float() @ params["used"]).sum()
            + (params["double"] ** 3).sum()
            + params["half"].float().sum()
        )

    params = {name: put(mesh, t, P("a") if name == "unused" else P()) for name, t in given.items()}
    found = sm.grad(f)(params, put(mesh, X, P("a")))
    same_trees(found, plain_grads(f, given, X)[1], params)
    assert found["half"].dtype is torch.bfloat16


@every_rank(2)
def test_arguments_that_require_grad_are_not_modified(mesh):
    params = pytree.tree_map(lambda t: t.requires_grad_(), params_on(mesh))
    x = put(mesh, X, P("a"), grad=True)
    same_trees(sm.grad(loss_of)(params, x), plain_grads(loss_of, PARAMS, X)[1])
    assert x.grad is None
    assert all(p.grad is None for p in pytree.tree_leaves(params))


@every_rank(2)
def test_a_leaf_that_is_pending(mesh):
    total = put(mesh, X, P("a")).sum(0)
    assert total.spec.unreduced
    found = sm.grad(lambda t: (2 * t).square().sum())(total)
    assert sm.typeof(found) is sm.typeof(total).dual, "the gradient of a share is that of the whole"
    same(found, 8 * X.sum(0))


@every_rank(2)
def test_nested(mesh):
    f = lambda w, x: (x @ w).sin().sum()  # noqa: E731
    x, w = put(mesh, X, P("a")), put(mesh, W)
    pw = leaf(W)
    (g,) = torch.autograd.grad(f(pw, X), [pw], create_graph=True)
    (wanted,) = torch.autograd.grad(g.square().sum(), [pw], create_graph=True)
    same(sm.grad(lambda w: sm.grad(f)(w, x).square().sum())(w), wanted.detach())
    third = sm.grad(lambda w: sm.grad(lambda w: sm.grad(f)(w, x).square().sum())(w).square().sum())(
        w
    )
    same(third, torch.autograd.grad(wanted.square().sum(), [pw])[0])


@every_rank(2)
def test_losses_of_every_layout(mesh):
    """A pending loss is reduced, a sharded one of one element too."""
    x = put(mesh, X, P("a"))
    for f in (
        lambda x: x.square().sum(),
        lambda x: x.square().sum().redistribute(P()),
        lambda x: x.square().sum((0, 1), keepdim=True),
    ):
        value, found = sm.value_and_grad(f)(x)
        same(value.reshape(()), X.square().sum())
        same(found, 2 * X)


def test_arguments_that_cannot_be_differentiated_raise():
    def not_scalar(mesh):
        sm.grad(lambda x: x * 2)(put(mesh, X, P("a")))

    assert "must return a scalar tensor, and it returned [6, 4]" in same_error(
        (2,), not_scalar, TypeError
    )

    def number(mesh):
        sm.grad(lambda x: 2.0)(put(mesh, X, P("a")))

    assert "it returned 2.0" in same_error((2,), number, TypeError)

    def integers(mesh):
        sm.grad(lambda t: t["x"].sum())({"n": put(mesh, X), "x": put(mesh, torch.arange(4))})

    assert "leaf 1 of the arguments to differentiate is a torch.int64 tensor" in same_error(
        (2,), integers, TypeError
    )

    def a_string(mesh):
        sm.vjp(lambda x, y: x.sum(), put(mesh, X), "y")

    assert "'y'" in same_error((2,), a_string, TypeError)


@every_rank(2)
def test_a_loss_that_depends_on_nothing(mesh):
    value, found = sm.value_and_grad(lambda x: put(mesh, torch.ones(())))(put(mesh, X, P("a")))
    same(value, torch.ones(()))
    same(found, torch.zeros_like(X))


# -- over mapped functions -------------------------------------------------------------------------


@every_rank(2)
def test_over_a_mapped_function(mesh):
    @sm.shard_map(mesh=mesh, in_specs=({"w": P(), "b": [P()]}, P("a")), out_specs=P())
    def mapped(params, x):
        return sm.pmean(loss_of(params, x), "a")

    params, x = params_on(mesh), put(mesh, X, P("a"))
    plain, wanted = plain_grads(loss_of, PARAMS, X)
    for _ in range(2):
        value, found = sm.value_and_grad(mapped)(params, x)
        same(value, plain)
        same_trees(found, wanted, params)
    with collectives() as records:
        sm.value_and_grad(mapped)(params, x)
    assert launched(records) == ["all_reduce"] * 3, "of the loss, its gradient, and all parameters"


@every_rank(2)
def test_over_a_function_that_calls_mapped_functions(mesh):
    rows = sm.shard_map(
        lambda x, w: (x @ w).tanh(), mesh=mesh, in_specs=(P("a"), P()), out_specs=P("a")
    )
    f = lambda w, x: rows(rows(x, w) @ w.t(), w).square().mean()  # noqa: E731
    plain = lambda w, x: (((x @ w).tanh() @ w.t()) @ w).tanh().square().mean()  # noqa: E731
    w, x = put(mesh, W), put(mesh, X, P("a"))
    for _ in range(2):
        with collectives() as records:
            found = sm.grad(f)(w, x)
        same(found, plain_grads(plain, W, X)[1])
    assert launched(records) == ["all_reduce"], "used four times, reduced once"


@every_rank(2)
def test_second_derivatives_over_a_mapped_function(mesh):
    mapped = sm.shard_map(
        lambda w, x: sm.psum((x @ w).sin().sum(), "a"),
        mesh=mesh,
        in_specs=(P(), P("a")),
        out_specs=P(),
    )
    w, x, pw = put(mesh, W), put(mesh, X, P("a")), leaf(W)
    (g,) = torch.autograd.grad((X @ pw).sin().sum(), [pw], create_graph=True)
    (wanted,) = torch.autograd.grad(g.square().sum(), [pw])
    for _ in range(2):
        same(sm.grad(lambda w: sm.grad(mapped)(w, x).square().sum())(w), wanted)


# -- inside mapped functions -----------------------------------------------------------------------


def inside(mesh, f, out_specs, in_specs=(P(), P("a")), **more):
    return sm.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, **more)


def mean_loss(params, x):
    return sm.pmean(loss_of(params, x), "a")


@every_rank(2)
def test_inside(mesh):
    mapped = inside(mesh, lambda params, x: sm.value_and_grad(mean_loss)(params, x), (P(), P()))
    params, x = params_on(mesh), put(mesh, X, P("a"))
    plain, wanted = plain_grads(loss_of, PARAMS, X)
    for _ in range(3):
        value, found = mapped(params, x)
        same(value, plain)
        same_trees(found, wanted, params)
    with collectives() as records:
        mapped(params, x)
    assert launched(records) == ["all_reduce"] * 3, (
        "of the loss, its gradient, and all parameters in one"
    )


@every_rank(2)
def test_inside_with_respect_to_a_varying_value(mesh):
    mapped = inside(
        mesh,
        lambda w, x: sm.grad(lambda w, x: sm.psum((x @ w).square().sum(), "a"), argnums=(0, 1))(
            w, x
        ),
        (P(), P("a")),
    )
    leaves = [leaf(W), leaf(X)]
    wanted = torch.autograd.grad((leaves[1] @ leaves[0]).square().sum(), leaves)
    for _ in range(2):
        same_trees(mapped(put(mesh, W), put(mesh, X, P("a"))), wanted)


@every_rank(2)
def test_inside_without_any_collective(mesh):
    """A loss of replicated values alone: each of n ranks has it, the gradient is that of one."""
    mapped = inside(mesh, lambda w, x: sm.grad(lambda w: w.square().sum())(w), P())
    for _ in range(2):
        same(mapped(put(mesh, W), put(mesh, X, P("a"))), 2 * W)


@every_rank(2, 2)
def test_inside_over_two_axes(mesh):
    def f(w, x):
        return sm.value_and_grad(lambda w: sm.psum((x @ w).sin().sum(), ("a", "b")))(w)

    mapped = inside(mesh, f, (P(), P(None, "b")), (P(None, "b"), P("a")))
    whole = values(4, 6, seed=6)
    plain, wanted = plain_grads(lambda w: (X @ w).sin().sum(), whole)
    for _ in range(2):
        value, found = mapped(put(mesh, whole, P(None, "b")), put(mesh, X, P("a")))
        same(value, plain)
        same(found, wanted)


@every_rank(2)
def test_inside_nested_and_outside_again(mesh):
    def f(w, x):
        return sm.grad(
            lambda w: sm.grad(lambda w: sm.psum((x @ w).sin().sum(), "a"))(w).square().sum()
        )(w)

    pw = leaf(W)
    (g,) = torch.autograd.grad((X @ pw).sin().sum(), [pw], create_graph=True)
    (wanted,) = torch.autograd.grad(g.square().sum(), [pw])
    mapped = inside(mesh, f, P())
    for _ in range(2):
        same(mapped(put(mesh, W), put(mesh, X, P("a"))), wanted)
    once = inside(mesh, lambda w, x: sm.grad(lambda w: sm.psum((x @ w).sin().sum(), "a"))(w), P())
    for _ in range(2):
        same(sm.grad(lambda w: once(w, put(mesh, X, P("a"))).square().sum())(put(mesh, W)), wanted)


@every_rank(2)
def test_inside_several_calls_in_turn(mesh):
    """Each call of grad has types of its own, which are remembered in order."""

    def f(w, x):
        one = sm.grad(lambda x: sm.psum(x.square().sum(), "a"))(x)
        two = sm.grad(lambda w: sm.pmean((x @ w).sum(), "a"))(w)
        return one, two

    mapped = inside(mesh, f, (P("a"), P()))
    for _ in range(3):
        one, two = mapped(put(mesh, W), put(mesh, X, P("a")))
        same(one, 2 * X)
        same(two, X.sum(0)[:, None].expand(4, 5) / 2)


@every_rank(2, 2)
def test_inside_where_some_axes_are_global(mesh):
    def f(params, x):
        return sm.value_and_grad(lambda p, x: sm.pmean(loss_of(p, x), "a"))(params, x)

    mapped = inside(mesh, f, (P(), P()), axis_names={"a"})
    params, x = params_on(mesh), put(mesh, X, P("a"))
    plain, wanted = plain_grads(loss_of, PARAMS, X)
    for _ in range(2):
        value, found = mapped(params, x)
        same(value, plain)
        same_trees(found, wanted, params)


INSIDE_WRONG = {
    "a varying loss": (
        lambda w, x: sm.grad(lambda w: (x @ w).sum())(w),
        "the loss varies over 'a'",
    ),
    "a pending loss": (
        lambda w, x: sm.grad(lambda w: sm.pcast(w.sum(), "a", to="unreduced"))(w),
        "the loss is pending over 'a'",
    ),
}


@pytest.mark.parametrize("name", INSIDE_WRONG)
def test_losses_inside_that_are_not_replicated(name):
    f, text = INSIDE_WRONG[name]

    def program(mesh):
        inside(mesh, f, P())(put(mesh, W), put(mesh, X, P("a")))

    found = same_error((2,), program, sm.errors.ShardingTypeError)
    assert text in found
    assert "psum(loss, 'a')" in found


@every_rank(2)
def test_inside_without_checks(mesh):
    mapped = inside(
        mesh, lambda w, x: sm.grad(lambda w: sm.psum((x @ w).sum(), "a"))(w), P(), check=False
    )
    with pytest.raises(RuntimeError, match="check=False"):
        mapped(put(mesh, W), put(mesh, X, P("a")))
