"""Arrival: one rank's call of a collective, as the simulated world compares and describes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..comm.recording.trace_buffer import TraceBuffer


@dataclass(frozen=True, slots=True)
class Arrival:
    """A rank's arrival at a collective.

    Attributes:
        agree: arguments that must be equal on all ranks.
        tag: the text of the `CommTag`, "" if there is none; must be equal on all ranks, too.
        lineage: how the value was computed; 0 if unknown.
        trace_buffer: the rank's ledger; None if nothing is recorded.
        step: the step that its thread has marked; None if that is unknown.
    """

    op: str
    agree: tuple[Any, ...]
    buffers: tuple[Any, ...]
    tag: str = ""
    lineage: int = 0
    trace_buffer: TraceBuffer | None = None
    step: int | None = None

    def __str__(self) -> str:
        words = [str(a).removeprefix("torch.") for a in self.agree]
        if self.op == "all_to_all":
            words += [f"out_splits={list(self.buffers[2])}", f"in_splits={list(self.buffers[3])}"]
        if self.op == "permute":
            words += [f"dst={self.buffers[2]}", f"src={self.buffers[3]}"]
        return f"{self.op}({', '.join(words)})" + (f" for {self.tag}" if self.tag else "")
