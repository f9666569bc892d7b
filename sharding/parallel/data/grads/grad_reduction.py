"""Reduction of a unit's gradients over ranks: during backward, or after the last microbatch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .....mesh.comm.recording.recorder import CommTag
from ....tensor.autograd import leaf_grads
from ....tensor.sharded_tensor import ShardedTensor
from ..controls import UnitControls
from ..precision import MixedPrecisionPolicy
from ..slot import Slot
from ..storage.flat import FlatBucket
from ..storage.param_storage import ParamStorage
from .averaging import Grads
from .grad_places import GradBuffer

_NAMED = 4  # parameters listed in a message


@dataclass(eq=False)
class Bucket:
    """The parameters of a unit that have one dtype.

    Attributes:
        unit: the unit's name, for messages.
        numbers: the indices of the parameters in the unit.
        slots: the parameters.
        storage: their values on this rank.
        policy: dtypes.
        deferred: the sum of whole gradients of several backward passes, until it is reduced; `used`
            has the indices of the gradients in it.
    """

    unit: str
    numbers: list[int]
    slots: list[Slot]
    storage: ParamStorage
    policy: MixedPrecisionPolicy
    deferred: Tensor | None = None
    used: set[int] = field(default_factory=set)
    scales = False  # the reduced shards are scaled, which are smaller

    @property
    def parameters(self) -> list[ShardedTensor]:
        """The sharded parameters."""
        return [slot.value for slot in self.slots]

    def own(self, grads: Grads) -> Grads:
        """Return those of a unit's gradients that are the bucket's."""
        return [grads[i] for i in self.numbers]

    def put(self, parts: Grads, into: Grads) -> None:
        """Set the bucket's gradients among those of the unit."""
        for i, part in zip(self.numbers, parts, strict=True):
            into[i] = part

    @property
    def sum_dtype(self) -> torch.dtype:
        """The dtype in which gradients are reduced."""
        return self.policy.reduction_dtype(self.storage.shard.dtype)

    @property
    def flat(self) -> FlatBucket:
        return self.storage.flat

    def make(self) -> GradBuffer:
        """Allocate a buffer; see `GradBufferSource`."""
        return self.flat.new_grad_buffer(self.sum_dtype)

    def start(
        self, grads: Grads, scale: float, filled: GradBuffer | None, controls: UnitControls
    ) -> Callable[[], Grads]:
        """Launch the reduce_scatter; the returned function waits and gives the local gradients.

        Args:
            grads: the unreduced gradients of the bucket's whole parameters.
            scale: a factor for the reduced gradients.
            filled: a buffer that already has some of the gradients; it is consumed.
            controls: `allows_unused` for zeros where a trained parameter has no gradient, since
                other ranks may have one; `reduce_hook`, which may write this rank's piece of the
                reduced, scaled gradients.

        Communication: one reduce_scatter, none if there is no gradient.
        """
        pairs = zip(self.slots, grads, strict=True)
        unused = [slot.path for slot, x in pairs if x is None and slot.value.requires_grad]
        count, fills = sum(grad is not None for grad in grads), controls.allows_unused
        if count == 0 and not (fills and unused):
            return lambda: list(grads)
        tag = reduction_tag(self.unit, count + len(unused) * fills, () if fills else unused)
        whole, scale_after = self.flat.fill_grad_buffer(grads, self.sum_dtype, filled), scale
        if self.sum_dtype is torch.float16:  # scale first: a sum in float16 may overflow
            whole, scale_after = whole.mul_(scale), 1.0
        piece = self.flat.start_reduce(whole, tag)
        has_grad = [grad is not None or bool(fills and unused) for grad in grads]
        hook = controls.reduce_hook
        return lambda: self._parts(piece.wait(), scale_after, has_grad, hook)

    def _parts(
        self,
        piece: Tensor,
        scale: float,
        has_grad: Sequence[bool],
        hook: Callable[[Tensor], object] | None,
    ) -> Grads:
        scaled = piece if scale == 1 else piece.mul_(scale)
        if hook is not None:
            hook(scaled)
        shard = self.storage.as_shard(scaled)
        parts = self.flat.shards_in(shard)
        is_here = shard.device == scaled.device  # else its values may still be on their way
        if is_here and not all(part.is_contiguous() for part in parts):
            # Those that are split along another dim than 0 are copied by autograd in any case, to
            # the strides of their parameters. Copy the others too, so that the piece is freed.
            parts = [part.clone(memory_format=torch.contiguous_format) for part in parts]
        return [part if exists else None for part, exists in zip(parts, has_grad, strict=True)]

    def defer(self, grads: Grads) -> None:
        """Add gradients to the deferred ones."""
        if all(grad is None for grad in grads):
            return
        if self.deferred is None:
            device = self.flat.mesh.device
            self.deferred = torch.zeros(
                self.flat.layout.length, dtype=self.sum_dtype, device=device
            )
        sums = self.flat.wholes_in(self.deferred)
        pairs = [(x, grad) for x, grad in zip(sums, grads, strict=True) if grad is not None]
        # of another dtype, they are converted as they are added: whole copies would take memory
        torch._foreach_add_([x for x, _ in pairs], [grad for _, grad in pairs])
        self.used.update(i for i, grad in enumerate(grads) if grad is not None)

    def pop_deferred(self) -> tuple[Grads, GradBuffer | None]:
        """Return the deferred gradients and their buffer, and forget them."""
        whole, used = self.deferred, self.used
        self.drop_deferred()
        if whole is None:
            return [None] * len(self.numbers), None
        views = self.flat.wholes_in(whole)
        grads: Grads = [x if i in used else None for i, x in enumerate(views)]
        return grads, GradBuffer(whole, views)

    def drop_deferred(self) -> None:
        """Drop the deferred gradients."""
        self.deferred, self.used = None, set()


def reduction_tag(unit: str, count: int, unused: Sequence[str]) -> CommTag:
    """Return the tag of a gradient reduction."""
    return CommTag.of(f"{unit}: sum gradients of {count} parameters{_without(unused)}")


def _without(paths: Sequence[str]) -> str:
    """Return the part of a tag that lists parameters without a gradient."""
    more = f" and {len(paths) - _NAMED} more" if len(paths) > _NAMED else ""
    return (
        f", without {', '.join(paths[:_NAMED])}{more}, which took no part in the loss"
        if paths
        else ""
    )


def accumulate_later(parameters: Sequence[ShardedTensor], parts: Grads) -> None:
    """Add gradients to `.grad`, as autograd would."""
    for parameter, part in zip(parameters, parts, strict=True):
        if part is not None:
            leaf_grads.add(parameter, part)
