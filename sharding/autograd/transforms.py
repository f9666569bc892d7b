"""Communication under `torch.func`: `vmap`, `jvp` and `grad` of linear maps between ranks.

A `ShardedTensor` is a local tensor and a layout, and operators run on the local tensor. So a
transform of the local tensors is a transform of the program on `ShardedTensor`s, as long as
communication has a rule for each transform:

    vmap    the batch is one more dim at the end, which nothing splits; the ranks communicate once
            for all examples
    jvp     communication is linear: tangents are redistributed as their values are
    grad    the transpose

`sm.vmap`, `sm.jvp`, `sm.grad` and the others open the levels of `torch.func` for that, and count
them. A level opened by other code transforms the wrappers, which hold no values:
`ops/torch_transforms.py` runs what it makes of the operators, or it raises.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ...mesh.comm.thread_context import thread_context
from ..layout.layout import Layout
from ..layout.spec import P
from .engine_hooks import (
    in_foreign_forward_mode,
    transform_depth,
    transforms_active,
    with_memory,
    with_tangents,
)


class Linear(ABC):
    """A linear map between parts of this rank, which may communicate."""

    @property
    @abstractmethod
    def transpose(self) -> Linear:
        """The map of gradients."""

    @abstractmethod
    def batched(self, count: int) -> Linear:
        """Return the same map for parts with a batch dim of this length at the end."""

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor:
        """Apply the map to a plain tensor, outside of any transform."""


class _Transformed(torch.autograd.Function):
    """A linear map under transforms.

    The signature that torch.func requires costs 15 us more per call than the plain one.
    """

    @staticmethod
    def forward(x: Tensor, op: Any, comm_dtype: torch.dtype | None) -> Tensor:
        x = with_memory(x)
        out = op(x)
        # torch would treat it as a view, also for tangents
        shared = out.untyped_storage()._cdata == x.untyped_storage()._cdata
        return out.clone() if shared else out

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.op, ctx.comm_dtype = inputs[1:3]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad = with_memory(grads[0])
        comm_dtype = grad.dtype if ctx.comm_dtype is None else ctx.comm_dtype
        return under_transforms(grad.to(comm_dtype), ctx.op.transpose).to(grad.dtype), None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        with with_tangents():
            return under_transforms(with_memory(tangents[0]), ctx.op)

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], x: Tensor, op: Any, comm_dtype: torch.dtype | None
    ) -> tuple[Tensor, Any]:
        return under_transforms(
            x.movedim(in_dims[0], -1), op.batched(info.batch_size), comm_dtype
        ), -1


def under_transforms(x: Tensor, op: Any, comm_dtype: torch.dtype | None = None) -> Tensor:
    """Apply a linear map to a part inside transforms.

    Args:
        op: a `Linear`.
        comm_dtype: dtype in which the gradient is communicated; by default its own.
    """
    return _Transformed.apply(x, op, comm_dtype)  # type: ignore[return-value]


def batched_layout(layout: Layout, count: int) -> Layout:
    """Return the layout with a batch dim of this length at the end, whole on every rank."""
    return Layout.of(
        layout.mesh,
        P.of_cuts([*layout.spec.cuts, ()], layout.pending),
        (*layout.shape, count),
        layout.dtype,
    )


# -- levels of torch.func --------------------------------------------------------------------------


@contextmanager
def own_level(*randomness: str) -> Iterator[None]:
    """Count a level of torch.func that this library opens; `randomness` is that of a `vmap`."""
    before = thread_context.vmap_randomness
    thread_context.level_count += 1
    thread_context.vmap_randomness += randomness
    try:
        yield
    finally:
        thread_context.level_count -= 1
        thread_context.vmap_randomness = before


def check_same_randomness() -> None:
    """Raise RuntimeError inside a `vmap` whose examples should have different random numbers."""
    other = next((kind for kind in thread_context.vmap_randomness if kind != "same"), None)
    if other is not None:
        raise RuntimeError(
            f"random numbers of a ShardedTensor inside sm.vmap(..., randomness={other!r}): they "
            "are the same for all examples. Pass randomness='same', or draw them for the whole "
            "batch before sm.vmap and map over them"
        )


def is_foreign() -> bool:
    """Return True inside a transform of torch.func that this library has not started."""
    return transforms_active() and transform_depth() > thread_context.level_count


def refuse_foreign(context: str) -> None:
    """Raise a RuntimeError inside a transform of torch's own; `context` says what was called."""
    if is_foreign() or in_foreign_forward_mode():
        raise RuntimeError(
            f"{context} inside a transform of torch's own (torch.func, torch.autograd.forward_ad), "
            "which does not transform the parts of ShardedTensors; use this library's transform of "
            "that name: sm.vmap, sm.grad, sm.vjp, sm.jvp, sm.jacfwd, sm.jacrev, sm.hessian, "
            "sm.linearize"
        )


def on_own_level(f: Callable[..., Any], *args: Any) -> Any:
    """Return `f(*args)`, called by a transform of torch.func that this library runs."""
    with own_level():
        return f(*args)
