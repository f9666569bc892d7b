"""Reduction of a unit's gradients over ranks: during backward, or after the last micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .....mesh.comm.recording.recorder import CommTag
from ....layout.layout import Layout
from ....redistribute.autograd import redistribute_locals
from ....tensor.autograd import leaf_grads
from ....tensor.sharded_tensor import ShardedTensor
from ..precision import MixedPrecisionPolicy
from ..storage.flat import FlatBucket
from ..storage.gather_op import Grads
from ..storage.param_storage import ParamStorage
from .averaging import scaled
from .grad_places import GradBuffer

_NAMED = 4  # parameters listed in a message


@dataclass(eq=False)
class Bucket:
    """The parameters of a unit that have one dtype.

    Attributes:
        numbers: the indices of the parameters in the unit.
        storage: their values on this rank.
        policy: dtypes.
        deferred: whole gradients take_deferred until the end of `accumulate_grads`; `used` has the
            indices of those that exist.
    """

    numbers: list[int]
    storage: ParamStorage
    policy: MixedPrecisionPolicy
    deferred: Tensor | None = None
    used: set[int] = field(default_factory=set)
    scales = False  # the reduced shards are scaled, which are smaller

    @property
    def sum_dtype(self) -> torch.dtype:
        """The dtype in which gradients are reduced."""
        return self.policy.reduced_as(self.storage.shard.dtype)

    @property
    def flat(self) -> FlatBucket:
        return self.storage.flat

    def make(self) -> GradBuffer:
        """Allocate a buffer; see `GradBufferSource`."""
        return self.flat.new_grad_buffer(self.sum_dtype)

    def start(
        self,
        unit: str,
        grads: Grads,
        scale: float,
        missing: Sequence[str],
        fill: bool,
        filled: GradBuffer | None,
        hook: Callable[[Tensor], object] | None = None,
    ) -> Callable[[], Grads]:
        """Launch the reduce_scatter; the returned function waits and gives the gradients of the
        local parts.

        Args:
            unit: the unit's name, for messages.
            grads: the unreduced gradients of whole parameters.
            scale: a factor for the reduced gradients.
            missing: the paths of trained parameters without a gradient.
            fill: whether to use zeros for these, since other ranks may have a gradient.
            filled: a buffer that already has some of the gradients; it is consumed.
            hook: called with this rank's piece of the reduced gradients, scaled, which it may
                write.

        Communication: one reduce_scatter, none if there is no gradient.
        """
        count = sum(grad is not None for grad in grads)
        if count == 0 and not (fill and missing):
            return lambda: list(grads)
        tag = (
            reduction_tag(unit, count + len(missing), ())
            if fill
            else reduction_tag(unit, count, missing)
        )
        whole, scale_after = self.flat.fill_grad_buffer(grads, self.sum_dtype, filled), scale
        if self.sum_dtype is torch.float16:  # scale first: a sum in float16 may overflow
            whole, scale_after = whole.mul_(scale), 1.0
        has_grad = [grad is not None or (fill and bool(missing)) for grad in grads]
        piece = self.flat.start_reduce(whole, tag)
        return lambda: self._parts(piece.wait(), scale_after, has_grad, hook)

    def _parts(
        self,
        piece: Tensor,
        scale: float,
        given: Sequence[bool],
        hook: Callable[[Tensor], object] | None,
    ) -> Grads:
        scaled = piece if scale == 1 else piece.mul_(scale)
        if hook is not None:
            hook(scaled)
        parts = self.flat.shards_in(self.storage.as_shard(scaled))
        return [part if there else None for part, there in zip(parts, given, strict=True)]

    def defer(self, grads: Grads) -> None:
        """Add gradients to the deferred ones."""
        if all(grad is None for grad in grads):
            return
        if self.deferred is None:
            device = self.flat.mesh.device
            self.deferred = torch.zeros(
                self.flat.layout.length, dtype=self.sum_dtype, device=device
            )
        views = self.flat.wholes_in(self.deferred)
        given = [(view, grad) for view, grad in zip(views, grads, strict=True) if grad is not None]
        torch._foreach_add_(
            [view for view, _ in given], [grad.to(self.sum_dtype) for _, grad in given]
        )
        self.used.update(i for i, grad in enumerate(grads) if grad is not None)

    def take_deferred(self) -> Grads:
        """Return the deferred gradients and drop them."""
        if self.deferred is None:
            return [None] * len(self.numbers)
        found: Grads = [
            x if i in self.used else None for i, x in enumerate(self.flat.wholes_in(self.deferred))
        ]
        self.drop_deferred()
        return found

    def drop_deferred(self) -> None:
        """Drop the deferred gradients."""
        self.deferred = None
        self.used.clear()


def merge_parts(found: Grads, waits: Sequence[tuple[Bucket, Callable[[], Grads]]]) -> Grads:
    """Fill in the gradients of the buckets' parameters, once each bucket's reduction has
    finished.
    """
    for bucket, wait in waits:
        for i, part in zip(bucket.numbers, wait(), strict=True):
            found[i] = part
    return found


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


def differentiable(
    grads: Sequence[Tensor | None],
    bases: Sequence[Layout],
    rests: Sequence[Layout],
    scales: Sequence[float],
) -> Grads:
    """Scale and reduce gradients differentiably, from layouts in use to layouts at rest.

    Communication: that of redistributing the gradients.
    """
    wholes = {i: scaled(grad, scales[i]) for i, grad in enumerate(grads) if grad is not None}
    pairs = [
        (bases[i].dual.replace(dtype=x.dtype), rests[i].dual.replace(dtype=x.dtype))
        for i, x in wholes.items()
    ]
    reduced: Grads = [None] * len(grads)
    for i, part in zip(wholes, redistribute_locals(list(wholes.values()), pairs), strict=True):
        reduced[i] = part.to(rests[i].dtype)
    return reduced


def accumulate_later(parameters: Sequence[ShardedTensor], parts: Grads) -> None:
    """Add gradients to `.grad`, as autograd would."""
    for parameter, part in zip(parameters, parts, strict=True):
        if part is not None:
            leaf_grads.add(parameter, part)
