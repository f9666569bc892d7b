"""Whether optimizers have stepped at all places of a pipeline.

Stages have parameters of their own, so no values of other ranks differ if one rank alone leaves
out a step, as where a gradient scaler finds infinities in its gradients only. What each rank has
seen of its parameters since the step before goes along with the loss, in the same all_reduce:

    place 0   updated       1 * ONE_UPDATED                       a sum: 1 place is updated, and
    place 1   not updated   1 << _FIRST_PLACE + 1                 place 1 is not
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from ....kernels.transfer.host_copies import is_asynchronous, start_to_host
from ....mesh.comm.first_use import FirstUse
from ...tensor.sharded_tensor import local_of

ONE_UPDATED = 1 << 2  # below it is the number of the loss's dtype, which is in the same sum
_FIRST_PLACE = 12
_MOST_PLACES = 40  # a float64 has integers of 53 bits


class Updates:
    """What one rank of a pipeline knows of the updates of parameters between steps.

    Args:
        place, count: of this rank, and the number of places.
    """

    def __init__(self, place: int, count: int) -> None:
        self._place, self._count = place, count
        self._versions: int | None = None  # at the end of the step before
        self._earlier: Callable[[], Tensor] | None = None
        self._has_warned = False
        self._has_stepped = False  # versions do not count what torch's fused steps write
        self._ids: set[int] = set()
        _first_pipeline.begin()
        with _lock:
            _alive.add(self)

    def note_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Note a step of an optimizer, if it has parameters of this rank's stages."""
        if any(id(x) in self._ids for group in optimizer.param_groups for x in group["params"]):
            self._has_stepped = True

    def since_last_step(self, parameters: Iterable[Tensor]) -> int:
        """Return what to add to the sum of all places.

        0 before the second step, if no parameter requires a gradient, and in a pipeline of more
        places than the sum has bits for.
        """
        if self._versions is None or self._count > _MOST_PLACES:
            return 0
        versions = _versions(parameters)
        if not versions:
            return 0
        if self._has_stepped or versions != self._versions:
            return ONE_UPDATED
        return 1 << (_FIRST_PLACE + self._place)

    def end_step(
        self, parameters: Iterable[Tensor], total: Tensor, placement: Sequence[int]
    ) -> None:
        """Note the parameters, and warn if some places were updated and others were not.

        On a device the host reads the sum of the step before, for which it need not wait.

        Args:
            total: the sum over all places, one element.
            placement: the place of each stage.
        """
        parameters = list(parameters)
        self._versions = _versions(parameters)
        self._ids = {id(x) for x in parameters}
        self._has_stepped = False
        if total.is_meta or self._has_warned:
            return
        own = start_to_host(total)
        read = self._earlier if is_asynchronous(total.device.type) else own
        self._earlier = own
        if read is not None:
            self._warn(int(read().item()), placement)

    def _warn(self, total: int, placement: Sequence[int]) -> None:
        updated = total % (1 << _FIRST_PLACE) // ONE_UPDATED
        kept = total >> _FIRST_PLACE
        if not updated or not kept:
            return
        self._has_warned = True
        stages = [stage for stage, place in enumerate(placement) if kept >> place & 1]
        text = "stage" if len(stages) == 1 else "stages"
        warnings.warn(
            f"pipeline: between two steps the parameters of {text} "
            f"{', '.join(map(str, stages))} were not changed, and those of other stages were. Call "
            "optimizer.step() on every rank, and let what may skip it, such as a gradient scaler, "
            "decide alike on all ranks; parameters that are not to change need no gradients",
            stacklevel=4,  # at the line that calls Pipeline.step
        )


# -- steps of optimizers ---------------------------------------------------------------------------

_alive: weakref.WeakSet[Updates] = weakref.WeakSet()
_lock = threading.Lock()


def _note_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    with _lock:
        alive = list(_alive)
    for updates in alive:
        updates.note_step(optimizer)


def _install() -> None:
    """Register one hook, which stays.

    A hook of each pipeline would be removed when the pipeline is collected as garbage, and that may
    be while torch calls the hooks of a step.
    """
    register_optimizer_step_post_hook(_note_step)


_first_pipeline = FirstUse()
_first_pipeline.before(_install)


def _versions(parameters: Iterable[Tensor]) -> int:
    """Return a number that is another one after any write, 0 if nothing requires a gradient."""
    return sum(1 + local_of(x)._version for x in parameters if x.requires_grad)
