"""The autograd nodes through which parameters come to a unit.

    parameter --- _Enter ------------- _Gathered ------------------------- a view, one per parameter ---> what the unit computes with
                    |                      |                                    |
    backward:       wait for the sum  <--  start summing gradients over ranks   put the gradient where it is summed

Between the first two, other units go on with their backward: `_Enter` is made before them in forward, so autograd turns to it after them.
Where nothing is waited for there, as with DDP, it is left out.
To the views it turns at once, as it does to leaves: while the gradient is still in the processor's cache, and before the next is made,
which may take its memory. They are nodes of torch's own with a hook, which take a third of the time of an `autograd.Function`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ....tensor.autograd import engine_hooks
from ..grads.grad_places import Placing

Grads = list[Tensor | None]


class Passage:
    """One use of a unit's parameters.

    Attributes:
        values: the tensors that the unit computes with; no gradient goes through it.
        reduce: from their gradients, and a scale, to what gives the gradients of the parameters' local parts later.
        differentiable: the same at once, for gradients of gradients.
        placing: where gradients are put as they are made.
        waits: whether what `reduce` gives is to be called later, when other units have gone on.
        scale: with which gradients are multiplied; `factors` are what those of some are multiplied with besides.
    """

    def __init__(
        self,
        values: Callable[[], Sequence[Tensor]],
        reduce: Callable[[Grads, float, Placing], Callable[[], Grads]],
        differentiable: Callable[[Grads, float], Grads],
        placing: Placing,
        *,
        waits: bool = True,
    ) -> None:
        self.values, self.reduce, self.differentiable, self.placing, self.scale = values, reduce, differentiable, placing, 1.0
        self.waits = waits
        self.factors: Sequence[float] = ()
        self.wait: Callable[[], Grads] | None = None

    def weigh(self, scales: Sequence[float]) -> None:
        """Gradients are to be multiplied with these."""
        self.scale = max(scales, default=1.0)
        self.factors = () if min(scales, default=1.0) == self.scale else [scale / self.scale for scale in scales]

    def weighed(self, i: int, grad: Tensor) -> Tensor:
        """A gradient, multiplied with what differs between parameters."""
        return grad if not self.factors or self.factors[i] == 1 else grad * self.factors[i]

    def enter(self, parts: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The parts, behind the node at which backward waits."""
        if not self.waits:
            return tuple(parts)
        entered: tuple[Tensor, ...] = _Enter.apply(self, *parts)  # type: ignore[assignment]
        self._note_leaves(entered)
        return entered

    def gathered(self, entered: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """What the unit computes with."""
        found: tuple[Tensor, ...] = _Gathered.apply(self, *entered)  # type: ignore[assignment]
        if not self.waits:
            self._note_leaves(found)
        return tuple([_used(self, i, x) if x.requires_grad else x for i, x in enumerate(found)])


    def _note_leaves(self, outputs: Sequence[Tensor]) -> None:
        """Keep the nodes that add gradients to `.grad`, which are those before the node that has made these."""
        node = next((x.grad_fn for x in outputs if x.grad_fn is not None), None)
        self.placing.leaves = [] if node is None else [leaf for leaf, _ in node.next_functions]


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, passage: Passage, *parts: Tensor) -> tuple[Tensor, ...]:
        ctx.passage = passage
        ctx.set_materialize_grads(False)
        return _without_frozen(ctx, [x.view_as(x) for x in parts])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        wait, ctx.passage.wait = ctx.passage.wait, None
        return None, *(grads if wait is None else wait())


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, passage: Passage, *parts: Tensor) -> tuple[Tensor, ...]:
        ctx.passage, ctx.parts = passage, [(x.shape, x.dtype, x.device) for x in parts]
        ctx.set_materialize_grads(False)
        return _without_frozen(ctx, passage.values())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        passage: Passage = ctx.passage
        placing = passage.placing.taken(passage.scale)
        asked = [
            placing.placed.get(i, grad) if grad is not None and needed else None
            for i, (grad, needed) in enumerate(zip(grads, ctx.needs_input_grad[1:], strict=True))
        ]
        if torch.is_grad_enabled() and any(grad is not None and grad.requires_grad for grad in asked):
            return None, *passage.differentiable(asked, passage.scale)
        passage.wait = passage.reduce(asked, passage.scale, placing)
        if not passage.waits or torch.is_anomaly_enabled():  # which looks at the values between the nodes
            found, passage.wait = passage.wait(), None
            return None, *found
        return None, *[None if grad is None else _promised(*part) for grad, part in zip(asked, ctx.parts, strict=True)]


def _used(passage: Passage, number: int, value: Tensor) -> Tensor:
    """Return a view of a value, whose gradient is put where it is summed."""

    def arrives(grads: tuple[Tensor | None, ...]) -> tuple[Tensor, ...] | None:
        (grad,) = grads
        if grad is None:
            return None
        placing = passage.placing
        placing.forget(number)
        grad = passage.weighed(number, grad)
        if torch.is_grad_enabled() or torch.is_anomaly_enabled() or not placing.put(number, grad, passage.scale):
            return (grad,)
        return (_promised(grad.shape, grad.dtype, grad.device),)

    found = value.view_as(value)
    node: Any = found.grad_fn
    if node is not None:  # gradients are on
        node.register_prehook(arrives)
        engine_hooks.run_as_soon_as_ready(node)
    return found


def _without_frozen(ctx: Any, values: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The outputs of a node; those of parameters that are not trained get no gradient."""
    ctx.mark_non_differentiable(*[x for x, needed in zip(values, ctx.needs_input_grad[1:], strict=True) if not needed])
    return tuple(values)


@lru_cache(4096)
def _promised(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Stands for a gradient that lies elsewhere or is under way; the next node puts the real one in its place, nobody else sees it."""
    return torch.empty((), dtype=dtype, device=device).expand(shape)
