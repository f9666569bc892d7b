"""Detect writes to the buffer of a collective that is under way, before `wait` returns.

Every operator that writes raises the version that a tensor shares with its views. So a write to a
buffer that alone uses its memory is detected at no cost; where other tensors share the memory, the
write may have been to those. With `SHARDMESH_MONITOR=full` every input is compared bit for bit with
a copy, which also detects writes through `.data` and NumPy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...errors import CollectiveError
from ...settings import settings
from ..work import Work

if TYPE_CHECKING:
    from .recorder import Recorder

_settings = settings()


class Guarded(Work):
    """A collective under way whose buffer must not change.

    Args:
        x: the input, or the one buffer of a collective that works in place.
        in_place: whether the collective itself writes to x.
        recorder, number: what recorded it, and the number of its record.
        over: called when it has ended.
    """

    __slots__ = ("_before", "_error", "_number", "_over", "_recorder", "_version", "_work", "_x")

    def __init__(
        self,
        work: Work,
        x: Tensor,
        in_place: bool,
        recorder: Recorder,
        number: int,
        over: Callable[[], None],
    ) -> None:
        self._work, self._recorder, self._number, self._over = work, recorder, number, over
        self._x: Tensor | None = x
        self._error: CollectiveError | None = None
        self._before = _bytes(x).clone() if _settings.mode == "full" and not in_place else None
        self._version = (
            -1 if x.is_inference() or x.nbytes < x.untyped_storage().nbytes() else x._version
        )

    def wait(self) -> None:
        if self._x is None:  # waited for before
            if self._error is not None:
                raise self._error
            return self._work.wait()
        if self._is_written(self._x):
            self._error = CollectiveError(
                f"{self._recorder.call_and_line(self._number)}: its buffer was written to while it "
                "was under way, so that ranks may have received new values in place of the old "
                "ones. Call wait() first, or write to a clone."
            )
        self._x = self._before = None
        self._work.wait()
        self._over()
        if self._error is not None:
            raise self._error

    def _is_written(self, x: Tensor) -> bool:
        if self._version >= 0 and x._version != self._version:
            return True
        return self._before is not None and not torch.equal(_bytes(x), self._before)

    def is_completed(self) -> bool:
        return self._work.is_completed()


def _bytes(x: Tensor) -> Tensor:
    return x.detach().resolve_conj().resolve_neg().reshape(-1).view(torch.uint8)
