"""Types through the backward of `torch.autograd.Function`s inside mapped functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import shardmesh as sm
from shardmesh import P
from tests.sharding.functional.helpers import put, same, values
from tests.sharding.ranks import collectives, every_rank, launched, on_mesh, same_error

X, W = values(6, 4), values(4, seed=1)


def function(name: str, forward: Callable[..., Any], backward: Callable[..., Any]) -> Any:
    members = {
        "forward": staticmethod(forward),
        "backward": staticmethod(backward),
        "__module__": __name__,
    }
    return type(name, (torch.autograd.Function,), members)


Copy = function("Copy", lambda ctx, x: x, lambda ctx, g: sm.psum(g, "a"))  # Megatron's f
Sum = function("Sum", lambda ctx, x: sm.psum(x, "a"), lambda ctx, g: g)  # and g
SumAsPsum = function("SumAsPsum", lambda ctx, x: sm.psum(x, "a"), lambda ctx, g: sm.psum(g, "a"))
CopyAsIs = function("CopyAsIs", lambda ctx, x: x.view_as(x), lambda ctx, g: g)
Clipped = function("Clipped", lambda ctx, x: x.view_as(x), lambda ctx, g: g.clamp(-1, 1))
Nothing = function("Nothing", lambda ctx, x: x * 1, lambda ctx, g: torch.zeros_like(g))
Regularised = function("Regularised", lambda ctx, x: x * 1, lambda ctx, g: g + torch.ones_like(g))


class MaskedProduct(torch.autograd.Function):
    """With an argument that is no tensor, and a mask."""

    @staticmethod
    def forward(ctx: Any, w: Tensor, factor: float, x: Tensor) -> Tensor:
        ctx.save_for_backward(w, x)
        ctx.factor, ctx.mask = factor, x > 0
        return w * x.relu() * factor

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (w, x), g = ctx.saved_tensors, grads[0] * ctx.factor
        return (g * x.relu()).sum(0), None, torch.where(ctx.mask, g * w, torch.zeros_like(g))


class ExpOfContext(torch.autograd.Function):
    """It keeps its result, in the other form of custom functions."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.exp()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * ctx.saved_tensors[0]


def over(mesh: sm.DeviceMesh, f: Any, **more: Any) -> Any:
    return sm.shard_map(f, mesh=mesh, in_specs=(P(), P("a")), out_specs=P(), **more)


def refused(f: Any, calls_before: int = 0, **more: Any) -> str:
    """Return the text of the error in backward of f(w, x), the same on every rank."""

    def program(mesh: sm.DeviceMesh) -> None:
        mapped = over(mesh, f, **more)
        args = (put(mesh, W, grad=True), put(mesh, X, P("a"), grad=True))
        for _ in range(calls_before):
            mapped(*args)
        mapped(*args).backward()

    return same_error((2,), program, sm.errors.ShardingTypeError, silent=False)


# -- errors ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("calls_before", [0, 3])
@pytest.mark.parametrize("check", [True, "always", "values"])
def test_sum_with_identity_backward_raises(check: bool | str, calls_before: int) -> None:
    text = refused(lambda w, x: Sum.apply((x * w).square().sum()), calls_before, check=check)
    assert (
        "backward of Sum: the gradient of argument 'x' is pending over 'a', and the argument "
        "varies over 'a'" in text
    )
    assert "test_custom_functions.py:" in text
    assert "return psum(gradient, 'a')" in text


def test_identity_with_sum_backward() -> None:
    """On a value that is replicated: the gradient of that is a share, which is summed in
    any case.
    """
    for f in (
        lambda w, x: sm.psum((Copy.apply(w) * x).sum(), "a"),
        lambda w, x: sm.psum((CopyAsIs.apply(Copy.apply(w)) * x).sum(), "a"),
    ):
        text = refused(f)
        assert (
            "backward of Copy: the gradient of argument 'x' is replicated over 'a', and the "
            "argument is replicated over 'a'" in text
        )


def test_by_grad_inside_and_when_recomputed() -> None:
    assert "backward of Sum" in refused(
        lambda w, x: sm.grad(lambda x: Sum.apply(x.square().sum()))(x).sum() * 0 + w.sum()
    )
    assert "backward of Sum" in refused(sm.remat(lambda w, x: Sum.apply((w * x).square().sum())))


def test_of_the_last_value_of_a_nested_function() -> None:
    def program(mesh: sm.DeviceMesh) -> None:
        inner = sm.shard_map(
            lambda x: Sum.apply(x.square().sum()), in_specs=P("a"), out_specs=P(), mesh=mesh["a"]
        )
        outer = sm.shard_map(
            lambda x: inner(x), mesh=mesh, in_specs=P(), out_specs=P(), axis_names={"b"}
        )
        sm.grad(outer)(put(mesh, X, P("a")))

    assert "backward of Sum" in same_error(
        (2, 2), program, sm.errors.ShardingTypeError, silent=False
    )


def test_operators_that_are_not_linear_in_a_share() -> None:
    assert "clamp of a value that is pending over 'a'" in refused(
        lambda w, x: (Clipped.apply(w)).sum() + sm.psum(x.sum(), "a")
    )
    assert "pending over 'a'" in refused(
        lambda w, x: (Regularised.apply(w)).sum() + sm.psum(x.sum(), "a")
    )


# -- correct functions -----------------------------------------------------------------------------

RIGHT = {
    "psum": (
        lambda w, x: SumAsPsum.apply((x * w).square().sum()),
        lambda w, x: (x * w).square().sum(),
    ),
    "copy": (
        lambda w, x: sm.psum((CopyAsIs.apply(w) * x).sin().sum(), "a"),
        lambda w, x: (w * x).sin().sum(),
    ),
    "product": (
        lambda w, x: sm.psum(MaskedProduct.apply(w, 2.0, x).sin().sum(), "a"),
        lambda w, x: (w * x.relu() * 2).sin().sum(),
    ),
    "replicated": (
        lambda w, x: (
            ExpOfContext.apply(MaskedProduct.apply(w, 2.0, w[None])).sum() + sm.psum(x.sum(), "a")
        ),
        lambda w, x: (w * w.relu() * 2).exp().sum() + x.sum(),
    ),
    "exp": (
        lambda w, x: sm.psum(ExpOfContext.apply(x * w).sum(), "a"),
        lambda w, x: (x * w).exp().sum(),
    ),
    "clipped": (lambda w, x: sm.psum(Clipped.apply(x * w).sum(), "a"), lambda w, x: (x * w).sum()),
    "nothing": (
        lambda w, x: sm.psum((w * x).sum(), "a") + Nothing.apply(w).sum(),
        lambda w, x: (w * x).sum() + 0 * w.sum(),
    ),
    "recomputed": (
        sm.remat(lambda w, x: sm.psum(ExpOfContext.apply(w * x).sum(), "a")),
        lambda w, x: (w * x).exp().sum(),
    ),
}


@pytest.mark.parametrize("name", RIGHT)
def test_correct_functions_are_unchanged(name: str) -> None:
    """Call it twice: the second call is not tracked."""
    mapped, plain = RIGHT[name]
    w, x = W.clone().requires_grad_(), X.clone().requires_grad_()
    loss = plain(w, x)
    if name == "nothing":
        loss = loss - 0 * w.sum()
    expected = torch.autograd.grad(loss, (w, x))

    def program(mesh: sm.DeviceMesh) -> None:
        f = over(mesh, mapped)
        for _ in range(3):
            found = sm.grad(f, (0, 1))(put(mesh, W), put(mesh, X, P("a")))
            for ours, theirs in zip(found, expected, strict=True):
                same(ours, theirs)

    on_mesh((3,), program)


@every_rank(2)
def test_second_derivatives(mesh: sm.DeviceMesh) -> None:
    first = sm.grad(
        sm.shard_map(
            lambda x: SumAsPsum.apply(x.pow(3).sum()), mesh=mesh, in_specs=P("a"), out_specs=P()
        )
    )
    for _ in range(2):
        torch.testing.assert_close(sm.grad(lambda x: first(x).sum())(X), 6 * X)


@every_rank(2)
def test_retained_graph(mesh: sm.DeviceMesh) -> None:
    x = put(mesh, X, P("a"), grad=True)
    loss = sm.shard_map(
        lambda x: SumAsPsum.apply(x.square().sum()), mesh=mesh, in_specs=P("a"), out_specs=P()
    )(x)
    loss.backward(retain_graph=True)
    loss.backward()
    same(x.grad, 4 * X)


@every_rank(2)
def test_cached_calls_are_not_tracked(mesh: sm.DeviceMesh) -> None:
    """Nothing is communicated for it, ever."""
    seen: list[bool] = []

    def f(x: Any) -> Any:
        from shardmesh.sharding.autograd.named_axes import current_axis_env

        seen.append(current_axis_env().checker is not None)  # type: ignore[union-attr]
        return SumAsPsum.apply(x.square().sum())

    mapped = sm.shard_map(f, mesh=mesh, in_specs=P("a"), out_specs=P())
    for _ in range(2):
        mapped(put(mesh, X, P("a"), grad=True)).backward()
    assert seen == [True, False]
    never = sm.shard_map(f, mesh=mesh, in_specs=P("a"), out_specs=P())
    with collectives() as records:
        for _ in range(7):
            never(put(mesh, X, P("a"), grad=True))
    assert seen[2:] == [True] * 5 + [False] * 2
    assert launched(records).count("all_gather_object") == 1


def test_check_false_tracks_nothing() -> None:
    """As in JAX with check_vma=False: the program is trusted."""

    def program(mesh: sm.DeviceMesh) -> None:
        mapped = sm.shard_map(
            lambda x: Sum.apply(x.square().sum()),
            mesh=mesh,
            in_specs=P("a"),
            out_specs=P(),
            check=False,
        )
        same(sm.grad(mapped)(put(mesh, X, P("a"))), X)

    on_mesh((2,), program)
