"""progress: a bar on the terminal for loops that take longer than two seconds."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Sized
from typing import TypeVar

from ..comm.current_world import current_world

Item = TypeVar("Item")
_AFTER_S = 2.0  # shorter loops have no bar
_EVERY_S = 0.1  # between two drawings
_WIDTH = 24  # of the bar, in characters
_CLEAR = "\r\x1b[K"  # to the beginning of the line, which is erased


def progress(
    iterable: Iterable[Item], label: str = "", *, total: int | None = None
) -> Iterator[Item]:
    """progress(iterable, label) -> its items; a bar on stderr if they take over two seconds.

        training  [########                ]  41/120  34%  2.1/s  0:38 left

    Only rank 0 draws it, and only on a terminal: nothing is written to a pipe or a file. It is
    erased at the end.

    Args:
        iterable: what to iterate over.
        label: the text before the bar.
        total: the number of items; by default the length of the iterable, if it has one.

    Communication: none.

    Example:
        >>> for step in sm.training.progress(range(steps), "training"):
        ...     train_step()
    """
    if total is None and isinstance(iterable, Sized):
        total = len(iterable)
    if not sys.stderr.isatty() or current_world().rank != 0:
        yield from iterable
        return
    since = drawn = time.monotonic()
    is_drawn = False
    try:
        for done, item in enumerate(iterable, 1):
            yield item
            now = time.monotonic()
            if now - since >= _AFTER_S and now - drawn >= _EVERY_S:
                text = _text(label, done, total, now - since)
                width = shutil.get_terminal_size().columns - 1
                sys.stderr.write(f"{_CLEAR}{text[:width]}")
                sys.stderr.flush()
                is_drawn, drawn = True, now
    finally:
        if is_drawn:
            sys.stderr.write(_CLEAR)
            sys.stderr.flush()


def _text(label: str, done: int, total: int | None, seconds: float) -> str:
    """Return the bar, or without a total the number of items."""
    rate = done / seconds
    speed = f"{rate:.1f}/s" if rate >= 1 else f"{1 / rate:.1f} s each"
    if not total:
        return "  ".join(filter(None, [label, f"{done}", speed]))
    share = min(done / total, 1.0)
    bar = ("#" * int(share * _WIDTH)).ljust(_WIDTH)
    left = int((total - done) / rate) if done < total else 0
    parts = [label, f"[{bar}]", f"{done}/{total}", f"{share:.0%}", speed, f"{_clock(left)} left"]
    return "  ".join(filter(None, parts))


def _clock(seconds: int) -> str:
    minutes, rest = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
