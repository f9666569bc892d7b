"""Join a computation that has run to the program's autograd graph as one node.

The node has the inputs and the results of the computation, and its backward computes the gradients
by the computation's own history.

    x ──► [ results, with a history of their own ] ──► detached results ──► Join ──► results
    x ◄── gradients ◄──────────────────────────────────────────────────── backward of Join
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ..autograd.first_derivative import without_derivative
from ..functional.transforms.parts import with_part
from ..tensor.sharded_tensor import local_of
from .opaque import Saved

_ONCE = (
    "the derivative of a gradient through a graph of sm.jit (create_graph=True): its backward is a "
    "graph as well, without history; call the module itself, or put sm.jit around the whole step"
)


class History:
    """How results depend on leaves.

    Args:
        outputs: the results, with their history.
        leaves: tensors of which gradients are wanted.

    Attributes:
        slots: the number of a leaf for each place from which it gets a gradient, or once.
    """

    def __init__(self, outputs: Sequence[Tensor], leaves: Sequence[Tensor]) -> None:
        self._leaves, self._uses = leaves, _uses_of(outputs, leaves)
        self.slots = [i for i, uses in enumerate(self._uses) for _ in range(max(1, len(uses)))]

    def gradients(self, outputs: Sequence[Tensor], seeds: Sequence[Tensor]) -> list[Tensor | None]:
        """Return the gradients of the leaves, each in the parts that its uses contribute.

        Autograd adds the parts to those of other code one by one, as in eager code, which decides
        the last bits of the sum.
        """
        parts: list[list[Tensor]] = [[] for _ in self._leaves]
        handles = [
            node.register_hook(functools.partial(_note_part, parts[i], place))
            for i, uses in enumerate(self._uses)
            for node, place in uses
        ]
        try:
            sums = torch.autograd.grad(
                outputs, self._leaves, seeds, retain_graph=True, allow_unused=True
            )
        finally:
            for handle in handles:
                handle.remove()
        gradients: list[Tensor | None] = []
        for leaf, total, summands, uses in zip(self._leaves, sums, parts, self._uses, strict=True):
            values = summands if uses and not leaf._backward_hooks else [total]  # hooks get the sum
            gradients += [*values, *[None] * (max(1, len(uses)) - len(values))]
        return gradients


def _uses_of(outputs: Sequence[Tensor], leaves: Sequence[Tensor]) -> list[list[tuple[Any, int]]]:
    """Return for each leaf the nodes that send it a gradient, and at which place among theirs."""
    uses: dict[int, list[tuple[Any, int]]] = {id(x): [] for x in leaves}
    for node, place, leaf in _edges_to_leaves(outputs):
        if id(leaf) in uses:
            uses[id(leaf)].append((node, place))
    return [uses[id(x)] for x in leaves]


def _edges_to_leaves(outputs: Sequence[Tensor]) -> Iterator[tuple[Any, int, Tensor]]:
    """Yield for each edge to a leaf the node that sends the gradient, its place, and the leaf.

    The place is that of the leaf's gradient among those that the node sends. A leaf is yielded once
    for each such edge.
    """
    todo = [x.grad_fn for x in outputs]
    seen = set(todo)
    while todo:
        node = todo.pop()
        for place, (other, _) in enumerate(node.next_functions if node is not None else ()):
            leaf = getattr(other, "variable", None)
            if leaf is not None:
                yield node, place, leaf
            elif other is not None and other not in seen:
                seen.add(other)
                todo.append(other)


def _note_part(parts: list[Tensor], place: int, sent: Sequence[Any], received: Any) -> None:
    if sent[place] is not None:
        parts.append(sent[place])


def with_known_numbers(results: Sequence[Any]) -> list[Any]:
    """Return the results of a recorded call with a backward that can run outside of the recording.

    Backward computes with the values of traced numbers that autograd has saved.
    """
    flat = list(results)
    at = [
        i for i, x in enumerate(flat) if isinstance(x, Tensor) and local_of(x).grad_fn is not None
    ]
    outputs = [local_of(flat[i]) for i in at]
    if not outputs:
        return flat
    leaves = list({id(leaf): leaf for _, _, leaf in _edges_to_leaves(outputs)}.values())
    history = History(outputs, leaves)

    def backward(saved: Sequence[Any], grads: Sequence[Tensor | None]) -> list[Any]:
        pairs = [(x, g) for x, g in zip(outputs, grads, strict=True) if g is not None]
        with WithoutTraced():
            return history.gradients([x for x, _ in pairs], [g for _, g in pairs])

    inputs = [leaves[i] for i in history.slots]
    joined = join(backward, (), [x.detach() for x in outputs], inputs)
    for i, x in zip(at, joined, strict=True):
        flat[i] = with_part(flat[i], x)
    return flat


def join(
    backward: Callable[[Sequence[Any], Sequence[Any]], list[Any]],
    saved: Sequence[Any],
    results: list[Tensor],
    inputs: Sequence[Tensor],
) -> tuple[Tensor, ...]:
    """Return results whose history is one node with these inputs; see `Join`.

    They have one in each grad mode: a function may turn gradients on inside of `torch.no_grad()`.
    """
    if torch.is_grad_enabled():
        return Join.apply(backward, saved, results, *inputs)
    with torch.enable_grad():
        return Join.apply(backward, saved, results, *inputs)


class Join(torch.autograd.Function):
    """The node between the inputs of a call and its results.

    Args:
        backward: returns the gradients of the inputs, from what was saved and those of the results.
        saved: tensors and numbers that it needs, and what opaque functions have saved.
    """

    @staticmethod
    def forward(
        ctx: Any,
        backward: Callable[[Sequence[Any], Sequence[Any]], list[Any]],
        saved: Sequence[Any],
        results: list[Tensor],
        *inputs: Tensor,
    ) -> Any:
        ctx.backward_of_call = backward
        flat, ctx.tree = list(saved), None
        if any(type(x) is Saved for x in flat):
            flat, ctx.tree = pytree.tree_flatten(flat)
        ctx.tensors = [i for i, x in enumerate(flat) if isinstance(x, Tensor)]
        ctx.save_for_backward(*[flat[i] for i in ctx.tensors])
        ctx.others = [None if isinstance(x, Tensor) else x for x in flat]
        ctx.set_materialize_grads(False)
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:  # type: ignore[override]
        flat = list(ctx.others)
        for i, x in zip(ctx.tensors, ctx.saved_tensors, strict=True):
            flat[i] = x
        saved = flat if ctx.tree is None else pytree.tree_unflatten(flat, ctx.tree)
        with torch.no_grad():
            gradients = ctx.backward_of_call(saved, grads)
        return (None, None, None, *without_derivative(gradients, _ONCE))


class WithoutTraced(TorchDispatchMode):
    """Pass operators the values of traced numbers that autograd has saved.

    Outside of the recording these numbers have no values.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = pytree.tree_map_only(
            torch.SymFloat, lambda x: x.node.hint, (tuple(args), kwargs or {})
        )
        return func(*args, **kwargs)
