"""Actions: what a rank does in one slot of a pipeline schedule, and its text.

    2F5                    forward of stage 2 for microbatch 5
    2B5                    its backward, as a whole
    2I5, 2W5               its backward in two parts: for the stage's inputs, for its weights
    (0F5;3B2)OVERLAP_F_B   a forward and a backward of two stages of one rank, executed together

The text is that of torch.distributed.pipelining, and so are the kinds of communication: `2SEND_F5`
sends the activations that stage 2 computed for microbatch 5, and `3RECV_F5` receives them as the
input of stage 3; `SEND_B` and `RECV_B` do the same with gradients, from stage 3 to stage 2.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple, TypeAlias, cast

Kind: TypeAlias = Literal["F", "B", "I", "W"]
CommunicationKind: TypeAlias = Literal["SEND_F", "RECV_F", "SEND_B", "RECV_B"]

_ACTION = re.compile(r"([0-9]{1,9})([FBIW])([0-9]{1,9})")
_COMMUNICATION = re.compile(r"([0-9]{1,9})((?:SEND|RECV)_[FB])([0-9]{1,9})")
_NAMES = {"F": "forward", "B": "backward", "I": "backward for inputs", "W": "backward for weights"}
_OVERLAP = re.compile(r"\(([^;]*);([^;]*)\)OVERLAP_F_B")


class Action(NamedTuple):
    """A computation of one stage for one microbatch.

    Attributes:
        stage: the stage, from 0, where the inputs enter.
        kind: "F" forward, "B" backward, "I" backward for the inputs, "W" backward for the weights.
        microbatch: the microbatch, from 0.
    """

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @property
    def description(self) -> str:
        """The action in words, as in "the forward of stage 2, microbatch 5"."""
        return f"the {_NAMES[self.kind]} of stage {self.stage}, microbatch {self.microbatch}"

    @property
    def result(self) -> Action:
        """The action by which others name what this one computes: 2I5 for 2B5, else itself.

        A backward as a whole and a backward for the inputs both compute the gradient of the
        stage's inputs, which is all that other actions use.
        """
        return self._replace(kind="I") if self.kind == "B" else self

    def operands(self, last_stage: int) -> list[Action]:
        """Return the results that this action uses."""
        stage, kind, microbatch = self
        if kind == "F":
            return [Action(stage - 1, "F", microbatch)] if stage else []
        if kind == "W":
            return [Action(stage, "I", microbatch)]
        forward = Action(stage, "F", microbatch)
        if stage == last_stage:
            return [forward]
        return [forward, Action(stage + 1, "I", microbatch)]


class Overlap(NamedTuple):
    """A forward and a backward of one rank that are executed together, as in DualPipe.

    Their kernels and their communication fill each other's gaps. Neither uses the other's result.
    """

    forward: Action
    backward: Action

    def __str__(self) -> str:
        return f"({self.forward};{self.backward})OVERLAP_F_B"


Cell: TypeAlias = Action | Overlap
Row: TypeAlias = tuple[Cell, ...]
Rows: TypeAlias = tuple[Row, ...]


class Communication(NamedTuple):
    """A send or a receive of one stage for one microbatch, between two ranks.

    Attributes:
        stage: the stage whose rank sends or receives.
        kind: "SEND_F" and "RECV_F" for activations, which go from stage s to s + 1; "SEND_B" and
            "RECV_B" for gradients, which go from stage s + 1 to s.
        microbatch: the microbatch.
    """

    stage: int
    kind: CommunicationKind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @property
    def is_send(self) -> bool:
        return self.kind.startswith("SEND")

    @property
    def peer_stage(self) -> int:
        """The stage at the other end."""
        upwards = self.kind in ("SEND_F", "RECV_B")
        return self.stage + 1 if upwards else self.stage - 1

    @property
    def value(self) -> Action:
        """The result that is moved, named by the action that computes it."""
        stage = self.stage if self.is_send else self.peer_stage
        return Action(stage, "F" if self.kind.endswith("F") else "I", self.microbatch)


def actions_of(cell: Cell) -> tuple[Action, ...]:
    """Return the action of a cell, or both of an overlap."""
    return (cell,) if isinstance(cell, Action) else tuple(cell)


def actions_in(row: Iterable[Cell]) -> list[Action]:
    """Return the actions of a row in order, those of overlaps one by one."""
    return [action for cell in row for action in actions_of(cell)]


def parse_action(text: str) -> Action:
    """Return the action that a text stands for.

    Example:
        >>> parse_action("2F5").microbatch
        5

    Raises:
        ValueError: the text is no action.
    """
    match = _ACTION.fullmatch(text.strip())
    if match is None:
        raise ValueError(
            f"{text!r} is not an action of a pipeline schedule: write stage, F, B, I or W, and "
            "microbatch, such as '2F5'"
        )
    stage, kind, microbatch = match.groups()
    return Action(int(stage), cast(Kind, kind), int(microbatch))


def parse_cell(text: str) -> Cell | Communication | None:
    """Return the action, the overlap or the communication that a text stands for.

    None for the empty text, an idle slot.

    Raises:
        ValueError: the text is none of these.
    """
    text = text.strip()
    if not text:
        return None
    if match := _OVERLAP.fullmatch(text):
        return Overlap(parse_action(match[1]), parse_action(match[2]))
    if match := _COMMUNICATION.fullmatch(text):
        kind = cast(CommunicationKind, match[2])
        return Communication(int(match[1]), kind, int(match[3]))
    return parse_action(text)


def stages_of(rows: Sequence[Iterable[Cell]]) -> dict[int, int]:
    """Return the rank of each stage, by the first rank that has an action of it."""
    rank_of: dict[int, int] = {}
    for rank, row in enumerate(rows):
        for action in actions_in(row):
            rank_of.setdefault(action.stage, rank)
    return rank_of
