"""Events of accelerators' streams that wait for this rank's last collectives, in order.

host      G#4   G#5   H#7   x.item()   has called all of them, and stops
stream    G#4 | G#5 ...                the first event that is pending is behind G#5: so far it came
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch

MARKS = 1024  # as many collectives as hosts may be ahead, see `trace_buffer.LONG_SLOTS`


@dataclass(eq=False, slots=True)
class Mark:
    """A place in a stream behind a collective.

    Attributes:
        number: of the collective's record.
        stream: (device, id of the stream).
        event: recorded there; None once the place is no longer known.
    """

    number: int
    stream: tuple[torch.device, Any]
    event: Any

    def is_pending(self) -> bool:
        """Return whether the stream is known not to have come to this place."""
        try:
            return self.event is not None and not self.event.query()
        except RuntimeError:  # recorded in a CUDA graph, or the device has failed
            return False


class StreamEvents:
    """The last marks of a rank."""

    def __init__(self) -> None:
        self._marks: deque[Mark] = deque()

    def mark(self, number: int, device: torch.device) -> Mark | None:
        """Record an event behind a collective; None on devices without streams."""
        module = torch.get_device_module(device.type)
        if not hasattr(module, "current_stream"):  # such as torch.mps
            return None
        stream = module.current_stream(device)
        event = None
        if len(self._marks) >= MARKS:
            oldest = self._marks.popleft()
            event, oldest.event = oldest.event if oldest.stream[0] == device else None, None
        event = module.Event() if event is None else event
        event.record(stream)
        mark = Mark(number, (device, getattr(stream, "stream_id", None)), event)
        self._marks.append(mark)
        return mark

    def first_pending(self) -> int | None:
        """Return the number of the record of the first collective that has not completed.

        None where there is none, or where it is not known: several streams are behind, or all
        collectives that are known are pending.
        """
        marks = list(self._marks)
        streams: dict[Any, list[Mark]] = {}
        for mark in marks:
            streams.setdefault(mark.stream, []).append(mark)
        firsts = [(bisect_left(its, True, key=Mark.is_pending), its) for its in streams.values()]
        behind = [(first, its) for first, its in firsts if first < len(its)]
        if len(behind) != 1 or (not behind[0][0] and len(marks) >= MARKS):
            return None
        first, its = behind[0]
        return its[first].number
