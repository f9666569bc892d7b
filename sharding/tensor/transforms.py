"""Parts that a transform of `torch.func` works on: batched by `vmap`, dual numbers of `jvp`, tracked by `grad`.

A `ShardedTensor` is a local tensor and a layout, and operators run on the local tensor. So a transform of the local tensors is one of the
program on `ShardedTensor`s, as long as what communicates has a rule for each transform:

    vmap    the batch is one more dim at the end, which nothing splits; the ranks communicate once for all examples
    jvp     communication is linear: the tangent of what is moved is the tangent, moved
    grad    its transpose

`sm.vmap`, `sm.jvp`, `sm.grad` and their like open the levels of `torch.func` for that, and count them. A level that somebody else has
opened around the program would be handed wrappers, which hold no values: that is refused.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..layout.layout import Layout
from ..layout.spec import P
from .autograd.engine_hooks import (
    in_foreign_forward_mode,
    transform_depth,
    transforms_active,
    with_memory,
    with_tangents,
)


class Linear(ABC):
    """A linear map from this rank's part to this rank's part, which may communicate."""

    @property
    @abstractmethod
    def transpose(self) -> Linear:
        """The map that takes gradients back."""

    @abstractmethod
    def batched(self, count: int) -> Linear:
        """The same for parts with a batch dim of this length at the end."""

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor:
        """The map of a plain tensor, outside of any transform."""


class _Transformed(torch.autograd.Function):
    """A linear map under transforms, in the form that torch.func asks for, which takes torch 15 us longer to call than the other one."""

    @staticmethod
    def forward(x: Tensor, op: Any, travel: torch.dtype | None) -> Tensor:
        x = with_memory(x)
        out = op(x)
        shared = out.untyped_storage()._cdata == x.untyped_storage()._cdata  # which torch would take for a view, with tangents to match
        return out.clone() if shared else out

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.op, ctx.travel = inputs[1:3]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad = with_memory(grads[0])
        travel = grad.dtype if ctx.travel is None else ctx.travel
        return under_transforms(grad.to(travel), ctx.op.transpose).to(grad.dtype), None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        with with_tangents():
            return under_transforms(with_memory(tangents[0]), ctx.op)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], x: Tensor, op: Any, travel: torch.dtype | None) -> tuple[Tensor, Any]:
        return under_transforms(x.movedim(in_dims[0], -1), op.batched(info.batch_size), travel), -1


def under_transforms(x: Tensor, op: Any, travel: torch.dtype | None = None) -> Tensor:
    """A linear map of a part that a transform may be at work on.

    Args:
        op: a `Linear`.
        travel: dtype in which the gradient goes back; by default its own.
    """
    return _Transformed.apply(x, op, travel)  # type: ignore[return-value]


def batched_layout(layout: Layout, count: int) -> Layout:
    """The layout with a batch dim of this length at the end, whole on every rank."""
    return Layout.of(layout.mesh, P.of_cuts([*layout.spec.cuts, ()], layout.pending), (*layout.shape, count), layout.dtype)


# -- whose level it is -------------------------------------------------------------------------------------------------


class _Thread(threading.local):
    levels = 0  # how many levels of torch.func this library has opened
    randomness: tuple[str, ...] = ()  # of the `vmap`s among them


_thread = _Thread()


@contextmanager
def own_level(*randomness: str) -> Iterator[None]:
    """Inside, the innermost level of torch.func is one that this library has opened; one of `vmap` with this randomness."""
    before = _thread.randomness
    _thread.levels += 1
    _thread.randomness += randomness
    try:
        yield
    finally:
        _thread.levels -= 1
        _thread.randomness = before


def check_same_randomness() -> None:
    """Raises: RuntimeError where a sharded tensor of random numbers would not be the same for all examples of a `vmap`."""
    other = next((kind for kind in _thread.randomness if kind != "same"), None)
    if other is not None:
        raise RuntimeError(
            f"random numbers of a ShardedTensor inside sm.vmap(..., randomness={other!r}): they are the same for all examples. Say so with "
            "randomness='same', or draw them for the whole batch before, and map over them"
        )


def is_foreign() -> bool:
    """Whether a transform of torch.func is at work that this library has not opened."""
    return transforms_active() and transform_depth() > _thread.levels


def refuse_foreign(what: str) -> None:
    """Raises: RuntimeError inside a transform of torch's own."""
    if is_foreign() or in_foreign_forward_mode():
        raise RuntimeError(
            f"{what} inside a transform of torch's own (torch.func, torch.autograd.forward_ad), which does not see the "
            "parts of ShardedTensors; use this library's transform of that name: sm.vmap, sm.grad, sm.vjp, sm.jvp, sm.jacfwd, sm.jacrev, "
            "sm.hessian, sm.linearize"
        )


def on_own_level(f: Callable[..., Any], *args: Any) -> Any:
    """`f(*args)`, called by a transform of torch.func that this library runs."""
    with own_level():
        return f(*args)
