"""A time in which a rank of a pipeline is busy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from .actions import Cell


class ShardCommunication(NamedTuple):
    """What `fully_shard` does for all parameters of a stage.

    Attributes:
        stage: the stage.
        kind: "G" gathers its parameters, "R" reduces its gradients.
    """

    stage: int
    kind: Literal["G", "R"]

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}"


@dataclass(frozen=True)
class Event:
    """A time in which a rank is busy.

    Attributes:
        cell: the action or overlap; or what `fully_shard` does for a stage; None for a step of the
            optimizer.
        start: when it starts; the first action of the schedule starts at 0.
        end: when it ends.
    """

    cell: Cell | ShardCommunication | None
    start: float
    end: float


Events: TypeAlias = tuple[tuple[Event, ...], ...]
