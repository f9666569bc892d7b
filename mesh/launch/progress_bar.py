"""progress: a bar on the terminal for what takes longer than two seconds.

progress(iterable, label)              of a loop, one item after the other
byte_progress(label, total, measure)   of a block that writes files, drawn by a thread
"""

from __future__ import annotations

import contextlib
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import TypeVar

from ..comm.current_world import current_world

Item = TypeVar("Item")
_AFTER_S = 2.0  # shorter loops have no bar
_EVERY_S = 0.1  # between two drawings
_WIDTH = 24  # of the bar, in characters
_CLEAR = "\r\x1b[K"  # to the beginning of the line, which is erased
_GB = 1e9


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
    if not _has_terminal():
        yield from iterable
        return
    since = drawn = time.monotonic()
    is_drawn = False
    try:
        for done, item in enumerate(iterable, 1):
            yield item
            now = time.monotonic()
            if now - since >= _AFTER_S and now - drawn >= _EVERY_S:
                _draw(_text(label, done, total, now - since))
                is_drawn, drawn = True, now
    finally:
        if is_drawn:
            _draw("")


@contextlib.contextmanager
def byte_progress(
    label: str, total: int = 0, measure: Callable[[], int] | None = None
) -> Iterator[None]:
    """with byte_progress(label, total, measure): a bar on stderr after two seconds of the block.

        writing  [#####                   ]  3.2/16.1 GB  20%  0.8 GB/s  0:16 left
        reading  0:12

    A thread draws it, so that the block may be one long call. Rank 0 only, on a terminal only.

    Args:
        label: the text before the bar.
        total: bytes that the block has to write.
        measure: returns how many are written; it is called ten times a second. Without it the bar
            is the time since the block began.

    Communication: none.
    """
    if not _has_terminal():
        yield
        return
    ended = threading.Event()
    thread = threading.Thread(
        target=_draw_until, args=(ended, label, total, measure), name=f"bar of {label}", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _draw_until(
    ended: threading.Event, label: str, total: int, measure: Callable[[], int] | None
) -> None:
    since = time.monotonic()
    if ended.wait(_AFTER_S):
        return
    while True:
        seconds = time.monotonic() - since
        _draw(
            f"{label}  {_clock(int(seconds))}"
            if measure is None
            else _byte_text(label, measure(), total, seconds)
        )
        if ended.wait(_EVERY_S):
            break
    _draw("")


def _has_terminal() -> bool:
    return sys.stderr.isatty() and current_world().rank == 0


def _draw(text: str) -> None:
    """Write the text over the line of the bar; an empty text erases it."""
    width = shutil.get_terminal_size().columns - 1
    sys.stderr.write(f"{_CLEAR}{text[:width]}")
    sys.stderr.flush()


def _text(label: str, done: int, total: int | None, seconds: float) -> str:
    """Return the bar, or without a total the number of items."""
    rate = done / seconds
    speed = f"{rate:.1f}/s" if rate >= 1 else f"{1 / rate:.1f} s each"
    if not total:
        return "  ".join(filter(None, [label, f"{done}", speed]))
    return _bar(label, done, total, f"{done}/{total}", speed, rate)


def _byte_text(label: str, done: int, total: int, seconds: float) -> str:
    """Return the bar of bytes, in GB."""
    rate = done / seconds
    amount = f"{done / _GB:.1f}/{total / _GB:.1f} GB"
    speed = f"{rate / _GB:.1f} GB/s" if rate >= _GB else f"{rate / 1e6:.0f} MB/s"
    return _bar(label, done, max(total, 1), amount, speed, rate)


def _bar(label: str, done: int, total: int, amount: str, speed: str, rate: float) -> str:
    share = min(done / total, 1.0)
    bar = ("#" * int(share * _WIDTH)).ljust(_WIDTH)
    parts = [label, f"[{bar}]", amount, f"{share:.0%}", speed]
    if rate:
        parts.append(f"{_clock(int(max(total - done, 0) / rate))} left")
    return "  ".join(filter(None, parts))


def _clock(seconds: int) -> str:
    minutes, rest = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
