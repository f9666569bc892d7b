"""Operators on a rank outside a tensor's mesh.

It holds an empty part with the same autograd graph.

A tensor on another mesh may depend on the result, and backward through a redistribution between two
meshes needs the ranks of both. So a tensor requires grad here if it does elsewhere, and backward
visits the same nodes: operators run on stand-ins, meta tensors of the global shapes.

    part (0,) -> stand-in [4, 8] on "meta" -- the operator --> stand-in [4, 16] -> part (0,)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ...mesh.comm.thread_context import thread_context
from ..autograd.engine_hooks import transforming
from ..autograd.transforms import Linear, under_transforms
from ..layout.layout import Layout
from ..layout.spec import P
from ..tensor.sharded_tensor import ShardedTensor
from ..trees import map_tensors
from .rules.registry import RESULT_IS_VIEW, functions
from .strategy import AS_RETURNED, OpStrategy, name_of, with_values

_CASTS = frozenset(functions("to", "type"))


@thread_context.setting(outside_mesh=True)
def run(
    func: Callable[..., Any],
    strategy: OpStrategy,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    local_args: Any,
    local_kwargs: Any,
    operands: list[Any],
) -> Any:
    """Return the operator's results, with empty parts.

    Raises:
        NotImplementedError: the shape of a result depends on values.
    """
    _check_shapes_known(strategy)
    first = operands[0]
    # whether the result requires grad depends on the first operand alone
    if func in RESULT_IS_VIEW or func in _CASTS:
        return _wrap_results(
            strategy,
            _example(strategy),
            first,
            lambda t: first._local.view_as(first._local).to(t.dtype),
        )
    in_graph = transforming() or (
        torch.is_grad_enabled() and any(x._local.requires_grad for x in operands)
    )
    if not in_graph:
        if not strategy.in_place:
            return _wrap_results(strategy, _example(strategy), first, _part_on(first))
        if not first._local.is_inference():
            increment_version(first._local)
        return first
    whole = [_stand_in(x._local, x._layout.shape, "meta") for x in operands]
    whole_args, whole_kwargs = with_values(args, kwargs, whole)
    result = func(*whole_args, **whole_kwargs)
    if not strategy.in_place:
        return _wrap_results(strategy, result, first, _part_on(first))
    first._local.copy_(_part_on(first)(whole[0]))
    first._sync_requires_grad()
    return first


class _StandIn(torch.autograd.Function):
    """Replace a tensor in the graph by one of another shape and device, without values."""

    @staticmethod
    @thread_context.setting(outside_mesh=True)
    def forward(ctx: Any, x: Tensor, shape: Sequence[int], device: Any) -> Tensor:
        ctx.shape, ctx.device = x.shape, x.device
        return x.new_empty(shape, device=device)

    @staticmethod
    @thread_context.setting(outside_mesh=True)
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return _stand_in(grads[0], ctx.shape, ctx.device), None, None


@dataclass(eq=False)
class _StandInMap(Linear):
    """`_StandIn` under transforms of torch.func: zeros of another shape and device.

    Attributes:
        before, after: (shape, device) of the argument and of the result.
    """

    before: tuple[Sequence[int], Any]
    after: tuple[Sequence[int], Any]

    @property
    def transpose(self) -> _StandInMap:
        return _StandInMap(self.after, self.before)

    def batched(self, count: int) -> _StandInMap:
        return _StandInMap(
            *(((*shape, count), device) for shape, device in (self.before, self.after))
        )

    @thread_context.setting(outside_mesh=True)
    def __call__(self, x: Tensor) -> Tensor:
        return x.new_zeros(self.after[0], device=self.after[1])


@thread_context.setting(outside_mesh=True)
def _stand_in(x: Tensor, shape: Sequence[int], device: Any) -> Tensor:
    if transforming():
        return under_transforms(x, _StandInMap((x.shape, x.device), (shape, device)))
    return _StandIn.apply(x, shape, device)  # type: ignore[return-value]


def _part_on(x: ShardedTensor) -> Callable[[Tensor], Any]:
    device = x.mesh.device
    return lambda whole: _stand_in(whole, (0,), device)


@thread_context.setting(outside_mesh=True)
def unknown(layout: Layout, *sources: ShardedTensor) -> ShardedTensor:
    """Return a result with an empty part, outside the mesh, in the graph of what it is made of."""
    on = _part_on(sources[0])
    parts = [x._local for x in sources if x._local.requires_grad] if torch.is_grad_enabled() else []
    if not parts or not (layout.dtype.is_floating_point or layout.dtype.is_complex):
        return ShardedTensor._make(
            torch.empty(0, dtype=layout.dtype, device=sources[0].mesh.device), layout
        )
    whole = sum(_stand_in(part.to(layout.dtype), layout.shape, "meta") for part in parts)
    return ShardedTensor._make(on(whole), layout)  # type: ignore[arg-type]


def _check_shapes_known(strategy: OpStrategy) -> None:
    if strategy.outputs is AS_RETURNED and strategy.example is None:
        raise NotImplementedError(
            f"{name_of(strategy.func)}: the shape of its result depends on values, which this "
            "rank, outside the mesh, does not have"
        )


def _example(strategy: OpStrategy) -> Any:
    """Return meta tensors like the operator's results."""
    if strategy.outputs is AS_RETURNED:
        return strategy.example
    if strategy.outputs is None or strategy.in_place:
        return None
    return (
        strategy.outputs.meta
        if type(strategy.outputs) is Layout
        else [layout.meta for layout in strategy.outputs]
    )


def _wrap_results(
    strategy: OpStrategy, result: Any, like: ShardedTensor, part: Callable[[Tensor], Any]
) -> Any:
    """Return the whole results as `ShardedTensor`s with an empty part on this rank."""
    if strategy.outputs is AS_RETURNED:
        return map_tensors(
            lambda t: ShardedTensor._make(part(t), whole_like(t, like._layout)), (result,)
        )[0]
    if strategy.outputs is None:
        return None
    if type(strategy.outputs) is Layout:
        return ShardedTensor._make(part(result), strategy.outputs)
    parts = zip(result, strategy.outputs, strict=True)
    return strategy.container([ShardedTensor._make(part(t), layout) for t, layout in parts])


def whole_like(tensor: Tensor, layout: Layout) -> Layout:
    """Return the layout of a tensor that every rank holds whole."""
    return Layout.of(layout.mesh, P(), tensor.shape, tensor.dtype)
