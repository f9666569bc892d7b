"""Backward passes and `torch.autograd.grad` of sharded tensors: seeds, and the results' layouts.

loss    replicated on n ranks: each starts from 1/n, which sums to 1     pending: each starts from 1
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.overrides import TorchFunctionMode

from ...autograd import engine_hooks
from ...autograd.grad_origin import Origin, note_origin
from ...layout.spec import P
from ...lineage import loss_context, mixed
from ...redistribute.linear import redistribute_grad, redistribute_grads
from ..sharded_tensor import ShardedTensor
from .leaf_grads import GRADIENT, add
from .local_part import part_of


def backward(
    tensors: Any,
    grad_tensors: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    grad_variables: Any = None,
    inputs: Any = None,
) -> None:
    """Run `x.backward(...)` or `torch.autograd.backward` on the local graph.

    Sharded and plain tensors may be mixed.
    """
    tensors = [summable(y) for y in _as_list(tensors)]
    output_grads = [None] * len(tensors) if grad_tensors is None else _as_list(grad_tensors)
    seeds = [_seed(y, g) for y, g in zip(tensors, output_grads, strict=True)]
    leaves = None if inputs is None else [part_of(x) for x in _as_list(inputs)]
    sharded = [y for y in tensors if isinstance(y, ShardedTensor)]
    with loss_context(sharded, mixed(GRADIENT, sharded)) if sharded else nullcontext():
        torch.autograd.backward(
            [part_of(y) for y in tensors], seeds, retain_graph, create_graph, inputs=leaves
        )


def backward_inside(
    mode: TorchFunctionMode, tensors: Any, grad_tensors: Any = None, *args: Any, **options: Any
) -> None:
    """Run `torch.autograd.backward` inside of a mode that has intercepted it.

    What backward computes again then runs inside of the mode, too, unless there are `inputs`.
    """
    if options.get("inputs") is not None or len(args) > 3:
        return torch.autograd.backward(tensors, grad_tensors, *args, **options)
    edges = [get_gradient_edge(y) if isinstance(y, Tensor) else y for y in _as_list(tensors)]
    with mode:  # which does not see a backward from edges
        return torch.autograd.backward(edges, grad_tensors, *args, **options)


def summable(y: Any) -> Any:
    """Reduce axes that are pending with kinds other than sum.

    Only for sums is the gradient of a contribution that of the result.
    """
    if not isinstance(y, ShardedTensor) or all(kind == "sum" for _, kind in y.spec.unreduced):
        return y
    return y.redistribute(
        y.spec.with_unreduced({a: kind for a, kind in y.spec.unreduced if kind == "sum"})
    )


def _seed(y: Tensor, gradient: Tensor | None) -> Tensor | None:
    return seed(y, gradient) if isinstance(y, ShardedTensor) else gradient


def seed(x: ShardedTensor, gradient: Tensor | None) -> Tensor:
    """Return this rank's part of the gradient that backward starts from.

    1/n on each of the n replicas of a scalar, so that the pending sum is 1; 1 if the scalar itself
    is pending.

    Raises:
        RuntimeError: no gradient given for a tensor that is not a real scalar.
    """
    layout = x._layout
    if gradient is not None:
        if not isinstance(gradient, ShardedTensor):
            gradient = distribute_like(gradient, x)
        return redistribute_grad(
            gradient._local, gradient._layout, layout.dual.replace(dtype=gradient.dtype)
        )
    if x.numel() != 1:
        raise RuntimeError(
            f"backward() without a gradient needs a scalar, and this is {layout}; pass gradient=, "
            "or reduce it first"
        )
    if not layout.dtype.is_floating_point:
        raise RuntimeError(
            f"backward() without a gradient needs a real scalar, and this is {layout}; pass "
            "gradient="
        )
    copies = layout.mesh.size(layout.replicated_axes) if layout.replicated_axes else 1
    return note_origin(
        torch.full_like(x._local, 1 / copies),
        layout.dual,
        Origin(torch.ones_like(x._local), layout.grad),
    )


def distribute_like(gradient: Tensor, x: ShardedTensor) -> ShardedTensor:
    """Lay out a plain gradient, equal on every rank, as its tensor."""
    if gradient.shape != x.shape:
        raise ValueError(
            f"a gradient of shape {list(gradient.shape)} for a tensor of shape {list(x.shape)}"
        )
    # its own gradient is summed over the ranks
    if gradient.requires_grad and torch.is_grad_enabled():
        return ShardedTensor.from_local(gradient, x.mesh, P()).redistribute(x._layout.grad.spec)
    gradient = gradient if x.mesh.coordinate is not None else gradient.new_empty(0)
    whole = ShardedTensor._make(gradient, x._layout.replicated.replace(dtype=gradient.dtype))
    return whole.redistribute(x._layout.grad.spec)


def register_wrapper(leaf: ShardedTensor) -> None:
    """Register a hook that moves gradients from the wrapper of a leaf to its local tensor.

    Autograd itself reaches the wrapper where a custom function of the leaf returns a plain tensor.
    """
    with torch._C.DisableTorchFunctionSubclass():
        if Tensor._post_accumulate_grad_hooks.__get__(leaf) is None:  # type: ignore[attr-defined]
            Tensor.register_post_accumulate_grad_hook(leaf, _take_from_wrapper)


def _take_from_wrapper(leaf: Any) -> None:
    with torch._C.DisableTorchFunctionSubclass():
        gradient = Tensor.grad.__get__(leaf)  # type: ignore[attr-defined]
        Tensor.grad.__set__(leaf, None)  # type: ignore[attr-defined]
    add(leaf, seed(leaf, gradient))


def grad(
    outputs: Any,
    inputs: Any,
    grad_outputs: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    only_inputs: bool = True,
    allow_unused: bool | None = None,
    is_grads_batched: bool = False,
    materialize_grads: bool = False,
) -> tuple[Any, ...]:
    """Run `torch.autograd.grad` on `ShardedTensor`s; each gradient has its input's own layout.

    Communication: that of backward, and one reduction per replicated input.
    """
    outputs, inputs = [summable(y) for y in _as_list(outputs)], _as_list(inputs)
    if is_grads_batched:
        raise NotImplementedError(
            "is_grads_batched=True is not supported for ShardedTensors; call grad once per gradient"
        )
    output_grads = [None] * len(outputs) if grad_outputs is None else _as_list(grad_outputs)
    input_grads = torch.autograd.grad(
        [part_of(y) for y in outputs],
        [part_of(x) for x in inputs],
        [_seed(y, g) for y, g in zip(outputs, output_grads, strict=True)],
        retain_graph=retain_graph,
        create_graph=create_graph,
        allow_unused=allow_unused,
        materialize_grads=materialize_grads,
    )
    if create_graph:
        input_grads = [_in_graph(x, g) for x, g in zip(inputs, input_grads, strict=True)]
    return reduce_to_inputs(inputs, input_grads)


def reduce_to_inputs(inputs: Sequence[Any], grads: Sequence[Tensor | None]) -> tuple[Any, ...]:
    """Reduce the gradients of sharded inputs to the layouts of the inputs, in buckets."""
    inputs_and_grads = enumerate(zip(inputs, grads, strict=True))
    sharded = [
        (i, x._layout.replace(dtype=g.dtype), g)
        for i, (x, g) in inputs_and_grads
        if g is not None and isinstance(x, ShardedTensor)
    ]
    done: list[Any] = list(grads)
    if sharded:
        pairs: Any = [(layout.dual, layout.grad) for _, layout, _ in sharded]
        whole = redistribute_grads([engine_hooks.with_memory(g) for _, _, g in sharded], pairs)
        for (i, layout, _), g in zip(sharded, whole, strict=True):
            done[i] = ShardedTensor._make_guarded(g, layout.grad, 0)
    return tuple(done)


def _in_graph(x: Tensor, grad: Tensor | None) -> Tensor | None:
    """Connect the gradient of an empty part to the graph, as on other ranks.

    Some operators of torch compute it without a graph.
    """
    if grad is None or grad.requires_grad or grad.numel() or not isinstance(x, ShardedTensor):
        return grad
    return grad + x._local


def _as_list(x: Any) -> list[Any]:
    return [x] if isinstance(x, Tensor) else list(x)
