"""`TimelineEvent`: what takes time in a step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

COMPUTE = "compute"  # the lane of operators and waits


@dataclass(frozen=True)
class TimelineEvent:
    """One operator, one collective, or the time in which operators wait for one.

    Attributes:
        name: the operator.
        kind: "operator", "collective" or "wait".
        lane: "compute", or the mesh axes of a collective.
        start, duration: in seconds since the start of the step.
        node: the name of the node in `as_text()`.
        details: bytes, flops, ranks, what it is for.
    """

    name: str
    kind: str
    lane: str
    start: float
    duration: float
    node: str
    details: dict[str, Any] = field(repr=False)

    @property
    def end(self) -> float:
        return self.start + self.duration
