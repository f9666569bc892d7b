"""Gradients of a unit that are reduced later than in the backward that computed them.

sm.accumulate_grads()                    whole ones, until the end of the block   (ZeRO-1)
set_requires_gradient_sync(False)        whole ones, until a backward that reduces
set_requires_all_reduce(False)           reduced over the axes that split the parameter, until
                                         a backward that also reduces over the others   (HSDP)
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from .....mesh.comm.thread_context import thread_context
from ....tensor.autograd import leaf_grads
from ..controls import UnitControls
from ..plan import UnitPlan
from .averaging import Grads
from .grad_places import GradBuffer
from .grad_reduction import Bucket, accumulate_later


class HeldGrads:
    """The gradients of a unit that wait for their reduction.

    Whole ones of split parameters are in the unit's buckets.
    """

    def __init__(self, plan: UnitPlan, controls: UnitControls) -> None:
        self._plan, self._controls = plan, controls
        self._buckets: dict[Bucket, float] = {}  # held until a backward, and their factor
        self._parts: dict[int, Tensor] = {}  # by parameter number, in the dual of its layout

    # -- until the end of `accumulate_grads()` -----------------------------------------------------

    def defer(self, grads: Grads, scale: float) -> None:
        """Add whole gradients to those that are reduced when `accumulate_grads()` ends."""
        if not any(bucket.used for bucket in self._plan.buckets):
            leaf_grads.before_reduction(
                self._plan.options.mesh.world,
                lambda: self._reduce_deferred(scale),
                self._drop_deferred,
            )
        for bucket in self._plan.buckets:
            bucket.defer(bucket.own(grads))

    def _reduce_deferred(self, scale: float) -> None:
        """Add the deferred gradients to `.grad`. Communication: one reduce_scatter per dtype."""
        with torch.no_grad(), self._plan.summing_grads():
            for bucket in self._plan.buckets:
                grads, buffer = bucket.pop_deferred()
                parts = bucket.start(grads, scale, buffer, self._controls)()
                accumulate_later(bucket.parameters, parts)

    def _drop_deferred(self) -> None:
        for bucket in self._plan.buckets:
            bucket.drop_deferred()

    # -- until a backward that reduces -------------------------------------------------------------

    def hold(self, grads: Grads, unsharded: Grads, scale: float) -> None:
        """Add gradients to those that a later backward reduces.

        Args:
            grads: whole gradients.
            unsharded: those of unsharded parameters, scaled; None for the others.
            scale: a factor for the others, once they are reduced.
        """
        _refuse_recording()
        for bucket in self._plan.buckets:
            bucket.defer(bucket.own(grads))
            self._buckets[bucket] = scale
        self._add(unsharded, range(len(unsharded)))

    def join(
        self, bucket: Bucket, grads: Grads, buffer: GradBuffer | None
    ) -> tuple[Grads, GradBuffer | None]:
        """Return a bucket's gradients with the held ones added, and the buffer they are in."""
        if bucket not in self._buckets:
            return grads, buffer
        _refuse_recording()
        del self._buckets[bucket]
        bucket.defer(grads)
        return bucket.pop_deferred()

    def exchange(self, parts: Grads) -> Grads:
        """Return reduced gradients with the held ones added.

        Without `all_reduces_grads`, hold back those of parameters that are replicated over an axis.
        """
        later: set[int] = set()
        if not self._controls.all_reduces_grads:
            layouts = [x._layout for x in self._plan.parameters]
            later = {i for i, layout in enumerate(layouts) if layout.dual is not layout.grad}
        elif not self._parts:
            return parts
        self._add(parts, later)
        now = [None if i in later else part for i, part in enumerate(parts)]
        for i in self._parts.keys() - later:
            _refuse_recording()
            held, part = self._parts.pop(i), now[i]
            now[i] = held if part is None else part.add_(held)
        return now

    def _add(self, parts: Grads, numbers: Iterable[int]) -> None:
        for i in numbers:
            part = parts[i]
            if part is not None:
                _refuse_recording()
                held = self._parts.get(i)
                self._parts[i] = part.clone() if held is None else held.add_(part)

    def reduce(self) -> None:
        """Reduce held gradients of parameters that the ended backward did not reach.

        Communication: as a backward of the unit, or none.
        """
        plan = self._plan
        if self._buckets:
            with torch.no_grad(), plan.summing_grads():
                for bucket, scale in list(self._buckets.items()):
                    grads, buffer = self.join(bucket, [None] * len(bucket.numbers), None)
                    parts: Grads = [None] * len(plan.slots)
                    bucket.put(bucket.start(grads, scale, buffer, self._controls)(), parts)
                    if plan.options.offloaded is not None:
                        plan.options.offloaded.synchronize()
                    self._add(parts, bucket.numbers)
        if self._controls.all_reduces_grads:
            accumulate_later(plan.parameters, self.exchange([None] * len(plan.slots)))

    def drop(self) -> None:
        """Drop all of them."""
        self._buckets, self._parts = {}, {}
        self._drop_deferred()


def _refuse_recording() -> None:
    """Raise a NotImplementedError in a recording of `sm.jit`.

    Its calls would not see what an earlier one held back.
    """
    if thread_context.recorder is not None:
        raise NotImplementedError(
            "sm.jit of a backward that holds gradients back for a later call "
            "(set_requires_gradient_sync(False) or set_requires_all_reduce(False)): call backward "
            "of all microbatches in the function, inside of sm.accumulate_grads()"
        )
