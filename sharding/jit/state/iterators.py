"""Whether a function advances an iterator, which a graph would not do."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

_resumed: dict[int, int] = {}  # id of a generator that is watched -> how often it was resumed


def iterator_state(x: Any) -> Any:
    """Return something that differs when an iterator has been advanced."""
    if isinstance(x, types.GeneratorType):
        return _resumed.get(id(x), 0), x.gi_frame is None
    if isinstance(getattr(x, "__dict__", None), dict):
        return tuple(
            (name, value)
            for name, value in vars(x).items()
            if isinstance(value, (int, float, str, bool))
        )
    try:
        reduced = x.__reduce__()
    except TypeError:
        return repr(x)
    return _places(reduced)


def _places(x: Any) -> Any:
    """Return the numbers of a reduced iterator, and how many elements its parts have left."""
    if isinstance(x, tuple):
        return tuple(map(_places, x))
    if isinstance(x, Iterator):
        return iterator_state(x)
    return x if isinstance(x, int) else len(x) if isinstance(x, (list, str, dict, set)) else None


@contextmanager
def counting_resumptions(iterators: Sequence[Any]) -> Iterator[None]:
    """Count how often these generators are resumed in this thread in the block.

    A running profiler is called as before.
    """
    frames = {
        id(x.gi_frame): id(x)
        for x in iterators
        if isinstance(x, types.GeneratorType) and x.gi_frame is not None
    }
    if not frames:
        yield
        return
    before = sys.getprofile()

    def profile(frame: types.FrameType, event: Any, argument: Any) -> None:
        if event == "call" and id(frame) in frames:
            number = frames[id(frame)]
            _resumed[number] = _resumed.get(number, 0) + 1
        if before is not None:
            before(frame, event, argument)

    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(before)
