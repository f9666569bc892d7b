"""Record uncaught exceptions of threads other than the main one, shown with a stall: they often
explain why the main thread waits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

from ..comm.recording.trace_buffer import Header, TraceBuffer


def install(buffers: Callable[[], Iterable[TraceBuffer]]) -> None:
    """Install a `threading.excepthook` that writes each error to these trace buffers."""
    before = threading.excepthook

    def hook(args: Any) -> None:
        if args.exc_type is not SystemExit:
            name = "a thread" if args.thread is None else f"thread {args.thread.name!r}"
            text = f"its {name} raised {args.exc_type.__name__}: {args.exc_value}".removesuffix(
                ": "
            )
            for buffer in buffers():
                buffer.words[Header.THREAD_ERROR] = buffer.text(text)
        before(args)

    threading.excepthook = hook


def raised_in_thread(buffer: TraceBuffer) -> str:
    """Return which thread of a rank last raised what, for messages; "" if none has."""
    at = buffer.words[Header.THREAD_ERROR]
    return f"; {buffer.read_text(at)}" if at else ""
