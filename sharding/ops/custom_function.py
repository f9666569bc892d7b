"""Custom functions (`torch.autograd.Function`) applied to ShardedTensors.

    forward    y = Gelu.apply(x)     runs on the global x; autograd puts Gelu's node on the wrapper
                                     of y
    here       y._local              gets a node in the graph of local tensors, which leads to
                                     x._local
    backward   that node passes the gradient of y, as a ShardedTensor in the layout dual to y's, to
               Gelu.backward, and redistributes the result to the layout dual to x's

Autograd runs on local tensors, but a custom function sees the wrappers, so the history of its
results is transferred to the local tensors when they are first used in a computation with
gradients. The graph of the wrappers has only custom functions, and autograd never runs it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from ...mesh.comm.thread_context import thread_context
from ..autograd.engine_hooks import with_memory
from ..layout.layout import Layout
from ..layout.spec import P
from ..redistribute.linear import redistribute_grad
from ..tensor.sharded_tensor import ShardedTensor
from .plain_operands import implicit_replication, replicated_gradients

Result: TypeAlias = tuple[Tensor, Layout, int]  # this rank's part, layout, lineage

# reentrant checkpoints and modules' full backward hooks do more than their backward
_INTERNAL = ("torch.", "torch_")


def take_over(x: ShardedTensor, node: Any, number: int) -> None:
    """Transfer the gradient history of a custom function's result to its local tensor.

    Autograd has put it on the wrapper.

    With gradients off, as in the forward of another custom function, only what autograd will not
    pass to backward is kept.

    Args:
        x: the result.
        node: the autograd node of its wrapper.
        number: its index among the node's results.

    Raises:
        RuntimeError: the history contains anything but custom functions of ShardedTensors.
    """
    if not torch.is_grad_enabled():
        if _is_custom(node) and _saves(node, number):
            node.results = {
                **getattr(node, "results", {}),
                number: (x._local.detach(), x._layout, x._lineage),
            }
        return
    if node.name().endswith("UndefinedGradBackward"):
        x._local = _without_gradient(node, number)
        return
    with torch._C.DisableTorchFunctionSubclass():  # type: ignore[attr-defined]
        owner = x.view_as(x).grad_fn
    x._local = _with_history(node, number, (x._local, x._layout, x._lineage), owner)


def _without_gradient(node: Any, number: int) -> Tensor:
    """Return this rank's part of a result of `gradcheck`'s function for undefined gradients.

    By it `torch.autograd.gradcheck` passes undefined gradients to backward.
    """
    source = getattr(node.next_functions[number][0], "variable", None)
    if not isinstance(source, ShardedTensor):
        raise RuntimeError(_NOT_CUSTOM)
    return torch._C._functions.UndefinedGrad()(source._local)  # type: ignore[attr-defined]


def _saves(node: Any, number: int) -> bool:
    """Return True if a custom function has saved this one of its results."""
    return any(_is_result(x, node) and x.output_nr == number for x in node.saved_tensors)


def _is_result(x: Any, node: Any) -> bool:
    return isinstance(x, Tensor) and not isinstance(x, ShardedTensor) and x.grad_fn is node


_NOT_CUSTOM = (
    "this ShardedTensor is the result of an autograd function of torch's own (such as a module's "
    "full backward hook or the reentrant form of checkpoint), which ran on the wrapper, so its "
    "gradient would be lost; use x.register_hook for a hook, and checkpoint(..., "
    "use_reentrant=False)"
)


def _is_custom(node: Any) -> bool:
    return isinstance(
        node, BackwardCFunction
    ) and not f"{node._forward_cls.__module__}.".startswith(_INTERNAL)  # type: ignore[attr-defined]


def _leaves(node: Any) -> list[ShardedTensor]:
    """Return the tensors that the custom functions before a node were applied to, each once."""
    if not _is_custom(node):
        raise RuntimeError(_NOT_CUSTOM)
    leaves: dict[int, ShardedTensor] = {}
    waiting, seen = [node], {node}
    while waiting:
        for before, _ in waiting.pop().next_functions:
            leaf = getattr(before, "variable", None)
            if isinstance(leaf, ShardedTensor):
                leaves.setdefault(id(leaf), leaf)
            elif before is not None and before not in seen:
                if not _is_custom(before):
                    raise RuntimeError(_NOT_CUSTOM)
                seen.add(before)
                waiting.append(before)
    return list(leaves.values())


def _with_history(node: Any, number: int, result: Result, owner: Any) -> Tensor:
    """Return the local tensor of a custom function's result, in the graph of local tensors.

    Args:
        owner: a node of C++ that keeps this one alive: the Python object of a custom function's
            node does not (before torch 2.13).
    """
    leaves = _leaves(node)
    return _Applied.apply(node, number, result, owner, leaves, *[leaf._local for leaf in leaves])  # type: ignore[return-value]


class _Applied(torch.autograd.Function):
    """A result of custom functions as a function of the leaves they were applied to."""

    @staticmethod
    def forward(
        ctx: Any,
        node: Any,
        number: int,
        result: Result,
        owner: Any,
        leaves: Sequence[ShardedTensor],
        *locals_: Tensor,
    ) -> Tensor:
        local, ctx.layout, ctx.lineage = result
        out = local.view_as(local)
        ctx.node, ctx.number, ctx.owner, ctx.leaves = node, number, owner, leaves
        ctx.implicit_replication = thread_context.implicit_replication
        if _saves(node, number):
            ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        results = (
            dict.fromkeys([ctx.number], (ctx.saved_tensors[0], ctx.layout, ctx.lineage))
            if ctx.saved_tensors
            else {}
        )
        with torch._C._EnableTorchFunction():  # type: ignore[attr-defined]
            gradient = _with_lineage(with_memory(grads[0]), ctx.layout.dual, ctx.lineage)
            with implicit_replication() if ctx.implicit_replication else nullcontext():
                leaf_gradients = _run_backward(ctx.node, ctx.number, gradient, results, ctx.owner)
            return (
                *[None] * 5,
                *[_local_gradient(leaf, leaf_gradients.get(id(leaf))) for leaf in ctx.leaves],
            )


def _with_lineage(local: Tensor, layout: Layout, lineage: int) -> ShardedTensor:
    out = ShardedTensor._make(
        local, layout if layout.dtype is local.dtype else layout.replace(dtype=local.dtype)
    )
    out._lineage = lineage
    return out


def _run_backward(
    node: Any, number: int, gradient: ShardedTensor, results: Mapping[int, Result], owner: Any
) -> dict[int, Any]:
    """Run the backward of a node and of custom functions before it; return gradients by leaf id."""
    waiting: dict[Any, dict[int, Any]] = {node: {number: gradient}}
    leaf_gradients: dict[int, Any] = {}
    while waiting:
        last = max(waiting, key=lambda n: n._sequence_nr())
        incoming = waiting.pop(last)
        context = _BackwardContext(last, results if last is node else {}, owner)
        gradients = last._forward_cls.backward(
            context, *_gradients_or_zeros(last, incoming, gradient)
        )
        gradients = gradients if isinstance(gradients, tuple) else (gradients,)
        if thread_context.implicit_replication:
            gradients = replicated_gradients(gradients, gradient.mesh)
        _check(last, gradients)
        needed = [g for g, needs in zip(gradients, last.needs_input_grad, strict=False) if needs]
        edges = [edge for edge in last.next_functions if edge[0] is not None]
        for (before, n), g in zip(edges, needed, strict=True):
            if g is None:
                continue
            leaf = getattr(before, "variable", None)
            sums, key = (
                (leaf_gradients, id(leaf))
                if leaf is not None
                else (waiting.setdefault(before, {}), n)
            )
            sums[key] = sums[key] + g if key in sums else g
    return leaf_gradients


def _gradients_or_zeros(
    node: Any, gradients: dict[int, Any], like: ShardedTensor
) -> Iterable[ShardedTensor]:
    """Yield the gradients of all results of a node; zeros for those that have none."""
    for number, metadata in enumerate(node._input_metadata):
        if number in gradients:
            yield gradients[number]
        else:
            layout = Layout.of(like.mesh, P(), tuple(metadata.shape), metadata.dtype)
            yield _with_lineage(
                torch.zeros(layout.local_shape, dtype=metadata.dtype, device=like._local.device),
                layout,
                like._lineage,
            )


def _check(node: Any, gradients: Sequence[Any]) -> None:
    for number, (gradient, needs) in enumerate(zip(gradients, node.needs_input_grad, strict=False)):
        if needs and not (gradient is None or isinstance(gradient, ShardedTensor)):
            raise RuntimeError(
                f"backward of {node._forward_cls.__qualname__} returned a "
                f"{type(gradient).__name__} as the gradient of argument {number}, which is a "
                "ShardedTensor; return a ShardedTensor computed from the gradients and the saved "
                "tensors, or None"
            )


def _local_gradient(leaf: ShardedTensor, gradient: Any) -> Tensor | None:
    """Return this rank's part of a leaf's gradient, in the layout dual to the leaf's.

    Raises:
        RuntimeError: it has another shape or another mesh.
    """
    if gradient is None:
        return None
    if (
        gradient.ndim >= leaf.ndim
        and gradient.shape != leaf.shape
        and leaf.broadcast_to(gradient.shape).shape == gradient.shape
    ):
        gradient = gradient.sum_to_size(leaf.shape)  # as autograd does
    if gradient.shape != leaf.shape or gradient.mesh is not leaf.mesh:
        raise RuntimeError(
            f"a custom function returned the gradient {gradient._layout} for {leaf._layout}; the "
            "shape and the mesh must be the same"
        )
    layout = leaf._layout.dual
    return redistribute_grad(
        gradient._local.to(layout.dtype), gradient._layout.replace(dtype=layout.dtype), layout
    )


class _BackwardContext:
    """The `ctx` of a custom function's backward: its own, except for results that it saved.

    Autograd returns those as the bare wrapper, which has no values.
    """

    def __init__(self, node: Any, results: Mapping[int, Result], owner: Any) -> None:
        object.__setattr__(self, "_node", node)
        object.__setattr__(self, "_results", results)
        object.__setattr__(self, "_owner", owner)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._node, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._node, name, value)

    @property
    def saved_tensors(self) -> tuple[Any, ...]:
        node = self._node
        return tuple(
            self._result(x.output_nr) if _is_result(x, node) else x for x in node.saved_tensors
        )

    def _result(self, number: int) -> ShardedTensor:
        if number in self._results:
            return _with_lineage(*self._results[number])
        node = self._node
        if number not in getattr(node, "results", {}):
            raise RuntimeError(
                f"{node._forward_cls.__qualname__} saved its result {number} for backward, and "
                "only another one of its results was used; save its inputs instead, or apply the "
                "function to local tensors: ShardedTensor.from_local(F.apply(x.to_local()), "
                "x.mesh, x.placements, shape=x.shape)"
            )
        local, layout, lineage = result = node.results[number]
        return _with_lineage(
            _with_history(node, number, result, self._owner) if torch.is_grad_enabled() else local,
            layout,
            lineage,
        )
