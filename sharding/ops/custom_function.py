"""Custom functions (`torch.autograd.Function`) applied to ShardedTensors.

    forward    y = Gelu.apply(x)     its lines run on the global x, and autograd puts Gelu's node on the wrapper of y
    here       y._local              gets a node of the graph of local tensors, which leads to x._local
    backward   that node hands the gradient of y, as a ShardedTensor in the layout dual to y's, to Gelu.backward, and takes what this
               returns to the layout dual to x's

Autograd runs on local tensors and a custom function sees the wrappers, so its results are taken over when they are first used in
a computation with gradients. The wrappers' own graph, in which there are only custom functions, is never run by autograd.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from ..layout.layout import Layout
from ..layout.spec import P
from ..redistribute.linear import redistribute_grad
from ..tensor.autograd.engine_hooks import with_memory
from ..tensor.sharded_tensor import ShardedTensor

Result: TypeAlias = tuple[Tensor, Layout, int]  # this rank's part, layout, lineage

_INTERNAL = ("torch.", "torch_")  # checkpointing's reentrant form and modules' full backward hooks are more than their backward


def take_over(x: ShardedTensor, node: Any, number: int) -> None:
    """Give the local tensor of a custom function's result the gradient history that its wrapper has.

    Where gradients are off, as in the forward of another custom function, only what backward will not get from autograd is kept.

    Args:
        x: the result.
        node: the autograd node of its wrapper.
        number: which of the node's results it is.

    Raises:
        RuntimeError: the history is not one of custom functions of ShardedTensors alone.
    """
    if not torch.is_grad_enabled():
        if _is_custom(node) and _saves(node, number):
            node.results = {**getattr(node, "results", {}), number: (x._local.detach(), x._layout, x._lineage)}
        return
    x._local = _with_history(node, number, (x._local, x._layout, x._lineage))


def _saves(node: Any, number: int) -> bool:
    """Whether a custom function has saved this result of its own."""
    return any(_is_result(x, node) and x.output_nr == number for x in node.saved_tensors)


def _is_result(x: Any, node: Any) -> bool:
    return isinstance(x, Tensor) and not isinstance(x, ShardedTensor) and x.grad_fn is node


_REFUSED = (
    "this ShardedTensor came out of an autograd function of torch's own (a module's full backward hook and the reentrant form of "
    "checkpoint are such), which worked on the wrapper, so its gradient would be lost; use x.register_hook for a hook, and "
    "checkpoint(..., use_reentrant=False)"
)


def _is_custom(node: Any) -> bool:
    return isinstance(node, BackwardCFunction) and not f"{node._forward_cls.__module__}.".startswith(_INTERNAL)  # type: ignore[attr-defined]


def _leaves(node: Any) -> list[ShardedTensor]:
    """The tensors that the custom functions behind a node were applied to, each once."""
    if not _is_custom(node):
        raise RuntimeError(_REFUSED)
    found: dict[int, ShardedTensor] = {}
    waiting, seen = [node], {node}
    while waiting:
        for before, _ in waiting.pop().next_functions:
            leaf = getattr(before, "variable", None)
            if isinstance(leaf, ShardedTensor):
                found.setdefault(id(leaf), leaf)
            elif before is not None and before not in seen:
                if not _is_custom(before):
                    raise RuntimeError(_REFUSED)
                seen.add(before)
                waiting.append(before)
    return list(found.values())


def _with_history(node: Any, number: int, result: Result) -> Tensor:
    """The local tensor of a custom function's result, in the graph of local tensors."""
    leaves = _leaves(node)
    return _Applied.apply(node, number, result, leaves, *[leaf._local for leaf in leaves])  # type: ignore[return-value]


class _Applied(torch.autograd.Function):
    """A result of custom functions, made of what the first of them were applied to."""

    @staticmethod
    def forward(ctx: Any, node: Any, number: int, result: Result, leaves: Sequence[ShardedTensor], *locals_: Tensor) -> Tensor:
        local, ctx.layout, ctx.lineage = result
        out = local.view_as(local)
        ctx.node, ctx.number, ctx.leaves = node, number, leaves
        if _saves(node, number):
            ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        results = dict.fromkeys([ctx.number], (ctx.saved_tensors[0], ctx.layout, ctx.lineage)) if ctx.saved_tensors else {}
        with torch._C._EnableTorchFunction():  # type: ignore[attr-defined]
            gradient = _made(with_memory(grads[0]), ctx.layout.dual, ctx.lineage)
            found = _pulled(ctx.node, ctx.number, gradient, results)
            return (*[None] * 4, *[_local_gradient(leaf, found.get(id(leaf))) for leaf in ctx.leaves])


def _made(local: Tensor, layout: Layout, lineage: int) -> ShardedTensor:
    out = ShardedTensor._make(local, layout if layout.dtype is local.dtype else layout.replace(dtype=local.dtype))
    out._lineage = lineage
    return out


def _pulled(node: Any, number: int, gradient: ShardedTensor, results: Mapping[int, Result]) -> dict[int, Any]:
    """Run the backward of a node, and of the custom functions before it, later ones first. Return gradients by the leaf's id."""
    waiting: dict[Any, dict[int, Any]] = {node: {number: gradient}}
    found: dict[int, Any] = {}
    while waiting:
        last = max(waiting, key=lambda n: n._sequence_nr())
        given = waiting.pop(last)
        context = _Context(last, results if last is node else {})
        gradients = last._forward_cls.backward(context, *_materialized(last, given, gradient))
        gradients = gradients if isinstance(gradients, tuple) else (gradients,)
        _check(last, gradients)
        wanted = [g for g, needs in zip(gradients, last.needs_input_grad, strict=False) if needs]
        edges = [edge for edge in last.next_functions if edge[0] is not None]
        for (before, n), g in zip(edges, wanted, strict=True):
            if g is None:
                continue
            leaf = getattr(before, "variable", None)
            sums, key = (found, id(leaf)) if leaf is not None else (waiting.setdefault(before, {}), n)
            sums[key] = sums[key] + g if key in sums else g
    return found


def _materialized(node: Any, given: dict[int, Any], like: ShardedTensor) -> Iterable[ShardedTensor]:
    """The gradients of all results of a node; zeros for those that have none."""
    for number, metadata in enumerate(node._input_metadata):
        if number in given:
            yield given[number]
        else:
            layout = Layout.of(like.mesh, P(), tuple(metadata.shape), metadata.dtype)
            yield _made(torch.zeros(layout.local_shape, dtype=metadata.dtype, device=like._local.device), layout, like._lineage)


def _check(node: Any, gradients: Sequence[Any]) -> None:
    for number, (gradient, needs) in enumerate(zip(gradients, node.needs_input_grad, strict=False)):
        if needs and not (gradient is None or isinstance(gradient, ShardedTensor)):
            raise RuntimeError(
                f"backward of {node._forward_cls.__qualname__} gave a {type(gradient).__name__} as the gradient of argument {number}, "
                "which is a ShardedTensor; return a ShardedTensor made of the gradients and of what was saved, or None"
            )


def _local_gradient(leaf: ShardedTensor, gradient: Any) -> Tensor | None:
    """This rank's part of a leaf's gradient, in the layout dual to the leaf's.

    Raises:
        RuntimeError: it has another shape, or lies on another mesh.
    """
    if gradient is None:
        return None
    if gradient.ndim >= leaf.ndim and gradient.shape != leaf.shape and leaf.broadcast_to(gradient.shape).shape == gradient.shape:
        gradient = gradient.sum_to_size(leaf.shape)  # as autograd does
    if gradient.shape != leaf.shape or gradient.mesh is not leaf.mesh:
        raise RuntimeError(
            f"a custom function gave the gradient {gradient._layout} for {leaf._layout}; the shape and the mesh must be the same"
        )
    layout = leaf._layout.dual
    return redistribute_grad(gradient._local.to(layout.dtype), gradient._layout.replace(dtype=layout.dtype), layout)


class _Context:
    """The context that a custom function's backward sees: its own, but for results that it saved.

    These come back from autograd as the bare wrapper, which has no values.
    """

    def __init__(self, node: Any, results: Mapping[int, Result]) -> None:
        object.__setattr__(self, "_node", node)
        object.__setattr__(self, "_results", results)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._node, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._node, name, value)

    @property
    def saved_tensors(self) -> tuple[Any, ...]:
        node = self._node
        return tuple(self._result(x.output_nr) if _is_result(x, node) else x for x in node.saved_tensors)

    def _result(self, number: int) -> ShardedTensor:
        if number in self._results:
            return _made(*self._results[number])
        node = self._node
        if number not in getattr(node, "results", {}):
            raise RuntimeError(
                f"{node._forward_cls.__qualname__} saved its result {number} for backward, and only another one of its results was used; "
                "save what it was made from, or apply the function to local tensors: ShardedTensor.from_local(F.apply(x.to_local()), "
                "x.mesh, x.placements, shape=x.shape)"
            )
        local, layout, lineage = result = node.results[number]
        return _made(_with_history(node, number, result) if torch.is_grad_enabled() else local, layout, lineage)
