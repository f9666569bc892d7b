"""Sums of a unit's gradients over the ranks: now, or when several micro-batches are done."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .....mesh.monitor.recording.recorder import CommTag
from ....layout.layout import Layout
from ....redistribute.autograd import redistribute_locals
from ....tensor.autograd import leaf_grads
from ....tensor.sharded_tensor import ShardedTensor
from ..precision import MixedPrecisionPolicy
from ..storage.flat import FlatBucket
from ..storage.gather_op import Grads
from ..storage.param_storage import Levels
from .grad_places import Filling

_NAMED = 4  # so many parameters are named in a message


@dataclass(eq=False)
class Bucket:
    """Parameters of one dtype.

    Attributes:
        numbers: which of the unit's parameters.
        levels: their values on this rank.
        policy: in which dtypes.
        waiting: gradients that wait for the end of `accumulate_grads`, whole; `used` says of which parameters there is one.
    """

    numbers: list[int]
    levels: Levels
    policy: MixedPrecisionPolicy
    waiting: Tensor | None = None
    used: set[int] = field(default_factory=set)
    scales = False  # its sums are, which are shorter

    @property
    def sum_dtype(self) -> torch.dtype:
        """In which gradients are summed."""
        return self.policy.reduced_as(self.levels.shard.dtype)

    @property
    def flat(self) -> FlatBucket:
        return self.levels.flat

    def make(self) -> Filling:
        """See `Places`."""
        return self.flat.places(self.sum_dtype)

    def start(
        self, unit: str, grads: Grads, scale: float, missing: Sequence[str], fill: bool, filled: Filling | None
    ) -> Callable[[], Grads]:
        """Launch the sum; call what comes back for the gradients of this rank's parts.

        Args:
            unit: of whom, for messages.
            grads: of the whole parameters.
            scale: with which the sums are multiplied.
            missing: the paths of those that are trained and have no gradient.
            fill: whether these have one of zeros, as on other ranks they may have one.
            filled: a buffer in which some of the gradients lie in their places already; it is used up.

        Communication: one reduce_scatter, none if there is no gradient.
        """
        count = sum(grad is not None for grad in grads)
        if count == 0 and not (fill and missing):
            return lambda: list(grads)
        note = summing(unit, count + len(missing), ()) if fill else summing(unit, count, missing)
        whole, late = self.flat.gradient_buffer(grads, self.sum_dtype, filled), scale
        if self.sum_dtype is torch.float16:  # whose sums would overflow
            whole, late = whole.mul_(scale), 1.0
        wait, given = self.flat.start_reduce(whole, note), [grad is not None for grad in grads]
        if fill and missing:
            given = [True] * len(grads)
        return lambda: self._parts(wait(), late, given)

    def _parts(self, piece: Tensor, scale: float, given: Sequence[bool]) -> Grads:
        shard = self.levels.shard
        scaled = piece if scale == 1 else piece.mul_(scale)
        parts = self.flat.shards_in(scaled.to(shard.device, shard.dtype))
        return [part if there else None for part, there in zip(parts, given, strict=True)]

    def keep(self, grads: Grads) -> None:
        """Add gradients to those that wait."""
        if all(grad is None for grad in grads):
            return
        if self.waiting is None:
            device = self.flat.mesh.device
            self.waiting = torch.zeros(self.flat.cutting.length, dtype=self.sum_dtype, device=device)
        places = self.flat.wholes_in(self.waiting)
        given = [(place, grad) for place, grad in zip(places, grads, strict=True) if grad is not None]
        torch._foreach_add_([place for place, _ in given], [grad.to(self.sum_dtype) for _, grad in given])
        self.used.update(i for i, grad in enumerate(grads) if grad is not None)

    def kept(self) -> Grads:
        """The gradients that waited."""
        if self.waiting is None:
            return [None] * len(self.numbers)
        found: Grads = [x if i in self.used else None for i, x in enumerate(self.flat.wholes_in(self.waiting))]
        self.forget()
        return found

    def forget(self) -> None:
        """Let go the gradients that wait."""
        self.waiting = None
        self.used.clear()


def put_together(found: Grads, waits: Sequence[tuple[Bucket, Callable[[], Grads]]]) -> Grads:
    """The gradients of a unit's parameters, with those of the buckets in their places."""
    for bucket, wait in waits:
        for i, part in zip(bucket.numbers, wait(), strict=True):
            found[i] = part
    return found


def summing(unit: str, count: int, unused: Sequence[str]) -> CommTag:
    """What a sum of gradients is for."""
    return CommTag(f"{unit}: sum gradients of {count} parameters{_without(unused)}")


def _without(paths: Sequence[str]) -> str:
    """Parameters that got no gradient, as a message says it."""
    more = f" and {len(paths) - _NAMED} more" if len(paths) > _NAMED else ""
    return f", without {', '.join(paths[:_NAMED])}{more}, which took no part in the loss" if paths else ""


def differentiable(grads: Grads, bases: Sequence[Layout], rests: Sequence[Layout], scale: float) -> Grads:
    """The sums as part of a graph, for gradients of gradients.

    Communication: as of a redistribution of the gradients.
    """
    there = [(i, grad * scale) for i, grad in enumerate(grads) if grad is not None]
    pairs = [(bases[i].dual.replace(dtype=grad.dtype), rests[i].dual.replace(dtype=grad.dtype)) for i, grad in there]
    found: Grads = [None] * len(grads)
    for (i, _), part in zip(there, redistribute_locals([grad for _, grad in there], pairs), strict=True):
        found[i] = part.to(rests[i].dtype)
    return found


def add_later(parameters: Sequence[ShardedTensor], parts: Grads) -> None:
    """Add gradients to `.grad`, as autograd would have."""
    for parameter, part in zip(parameters, parts, strict=True):
        if part is not None:
            leaf_grads.add(parameter, part)
