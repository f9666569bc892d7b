"""Gradients that a unit holds back over several backward passes, until one that reduces them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from .....mesh.comm.thread_context import thread_context
from ....tensor.sharded_tensor import ShardedTensor
from ..storage.gather_op import Grads
from .grad_reduction import Bucket


def refuse_recording() -> None:
    """Raise a NotImplementedError in a recording of `sm.jit`.

    Its calls would not see what an earlier one held back.
    """
    if thread_context.recorder is not None:
        raise NotImplementedError(
            "sm.jit of a backward that holds gradients back for a later call "
            "(set_requires_gradient_sync(False) or set_requires_all_reduce(False)): call backward "
            "of all micro-batches in the function, inside of sm.accumulate_grads()"
        )


class HeldGrads:
    """The gradients that a unit holds back.

    Attributes:
        buckets: buckets whose unreduced gradients accumulate, and the factor of these gradients.
        parts: by parameter number, gradients in the layout dual to the parameter's: reduced
            over the axes that split it, pending over those that replicate it.
    """

    def __init__(self) -> None:
        self.buckets: dict[Bucket, float] = {}
        self.parts: dict[int, Tensor] = {}

    def add(self, parts: Mapping[int, Tensor | None]) -> None:
        """Add to the held parts."""
        for i, part in parts.items():
            if part is not None:
                refuse_recording()
                held = self.parts.get(i)
                self.parts[i] = part.clone() if held is None else held.add_(part)

    def exchange(self, parts: Grads, parameters: Sequence[ShardedTensor], *, keep: bool) -> Grads:
        """Return the parts with the held ones added.

        With `keep`, hold back those of parameters that are replicated over an axis instead.
        """
        numbers: set[int] = set()
        if keep:
            numbers = {i for i, x in enumerate(parameters) if x._layout.dual is not x._layout.grad}
        elif not self.parts:
            return parts
        self.add({i: parts[i] for i in numbers})
        found = [None if i in numbers else part for i, part in enumerate(parts)]
        for i in self.parts.keys() - numbers:
            refuse_recording()
            held, part = self.parts.pop(i), found[i]
            found[i] = held if part is None else part.add_(held)
        return found
