"""The recorder of a graph that is being made in this thread; collectives and random numbers are shown to it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol


class StepRecorder(Protocol):
    """Runs functions that are not torch operators, and records them.

    Attributes:
        draws: which random numbers have been drawn; its `relative` says whether their positions follow from that at the start.
    """

    draws: Any

    def collective(self, group: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call the method `name` of the group with these arguments, record the call, and return its result."""

    def draw(self, part: Callable[..., Any], seed: int, stream: int, parameters: Sequence[Any]) -> Any:
        """Return `part(seed, stream, *parameters)`, a random tensor, and record that a later call draws the one at its own position."""

    def node_of(self, x: Any) -> Any:
        """Return what stands for a tensor in the graph, None for one that the recording has neither made nor used."""


class _Tracing(threading.local):
    recorder: StepRecorder | None = None


tracing = _Tracing()
