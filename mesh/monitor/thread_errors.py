"""Uncaught exceptions of other threads than the main one, shown with a stall: mostly they are why the main thread waits."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

from .recording.trace_buffer import H, Page


def install(pages: Callable[[], Iterable[Page]]) -> None:
    """From now on, write down on these pages which thread of the process has raised what."""
    before = threading.excepthook

    def hook(args: Any) -> None:
        if args.exc_type is not SystemExit:
            name = "a thread" if args.thread is None else f"thread {args.thread.name!r}"
            text = f"its {name} raised {args.exc_type.__name__}: {args.exc_value}".removesuffix(": ")
            for page in pages():
                page.words[H.THREAD_ERROR] = page.text(text)
        before(args)

    threading.excepthook = hook


def raised_in_thread(page: Page) -> str:
    """Which thread of a rank has raised what last, for messages; "" where none has."""
    at = page.words[H.THREAD_ERROR]
    return f"; {page.read_text(at)}" if at else ""
