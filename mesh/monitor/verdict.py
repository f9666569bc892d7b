"""The verdict on a job that cannot continue.

The kind of fault, the outliers, the field that differs, and what each rank did.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from ..errors import (
    CollectiveMismatchError,
    DeadlockError,
    MeshMismatchError,
    PeerError,
    RankLostError,
    StallError,
    WatchError,
)
from ..text import printable, shortened
from .store_values import (
    MOST_RANKS,
    checked,
    checked_list,
    checked_ranks,
    has_fields,
    json_object,
    whole,
)

_COLUMNS = 120
# field of a verdict on a rank that was ended from outside -> how
INTERRUPTIONS = {
    "KeyboardInterrupt": "interrupted (Ctrl-C)",
    "SIGTERM": "ended by SIGTERM",
    "SIGHUP": "ended by SIGHUP",
}

# kind of verdict -> the error that ranks raise
ERRORS: dict[str, type[WatchError]] = {
    "mismatch": CollectiveMismatchError,
    "deadlock": DeadlockError,
    "mesh": MeshMismatchError,
    "stall": StallError,
    "lost": RankLostError,
    "left": RankLostError,
    "raised": PeerError,
}


@dataclass(frozen=True, slots=True)
class Observation:
    """What one rank was observed doing.

    Attributes:
        rank: global rank.
        call: its collective, as text: `all_reduce(sum, f32, 4 elements) over dp`; or what else it
            does.
        place: file:line in the user's program; "" if it is not known.
    """

    rank: int
    call: str
    place: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """Why the ranks of a job cannot go on.

    Attributes:
        kind: "mismatch" (ranks called different collectives), "deadlock" (they wait for each
            other), "stall" (one does not arrive), "mesh" (they made different meshes), "lost" (one
            died or cannot be reached), "left" (one ended its program), "raised" (one raised).
        ranks: global ranks at fault; empty if votes are equal, so that no rank is named by a guess.
        field: what differs in a mismatch: "operation", "reduction", "dtype", "shape", "layout",
            "purpose", "lineage", "source", "route", "splits"; of
            meshes "shape", "axis names", "rank order" or "device type"; "" if nothing does.
        seen: what each rank did, the blamed ones first.
        text: the complete text of the error, see `compose_text`.
    """

    kind: str
    ranks: tuple[int, ...]
    field: str
    seen: tuple[Observation, ...]
    text: str

    @property
    def is_interruption(self) -> bool:
        """Whether nothing is wrong: the job was ended by Ctrl-C, SIGTERM or SIGHUP."""
        return self.kind == "raised" and self.field in INTERRUPTIONS

    def error(self) -> WatchError:
        """Return the error that every rank raises."""
        return ERRORS[self.kind](self.text, self)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Verdict:
        """Return the verdict in a text that anybody may have written. Raises: ValueError."""
        fields = has_fields(json_object(text), Verdict.__dataclass_fields__)
        seen = tuple(_observation(one) for one in checked_list(fields["seen"], dict))
        if checked(fields["kind"], str) not in ERRORS:
            raise ValueError(f"there is no kind of verdict {shortened(fields['kind'], 40)}")
        named, complete = (printable(checked(fields[name], str)) for name in ("field", "text"))
        return Verdict(fields["kind"], checked_ranks(fields["ranks"]), named, seen, complete)


def _observation(fields: dict[str, Any]) -> Observation:
    has_fields(fields, Observation.__dataclass_fields__)
    call, place = (printable(checked(fields[name], str)) for name in ("call", "place"))
    return Observation(whole(fields["rank"], MOST_RANKS - 1), call, place)


def compose_text(said: str, advice: str, lines: Iterable[str] = ()) -> str:
    """Return the text of a verdict, wrapped to 120 columns.

    What happened, what to do about it, what each rank did.
    """
    return "\n".join(part for line in (said, advice, *lines) for part in _wrap_line(line))


def _wrap_line(line: str) -> list[str]:
    """Return the line in pieces that fit; a line of a stack or a traceback stays whole."""
    if len(line) <= _COLUMNS or line.lstrip().startswith("|"):
        return [line]
    indent = " " * (len(line) - len(line.lstrip()) + 4)
    call, at, place = line.rpartition(" at ")
    whole = f"{call} at\0{place}" if at else line  # file:line stays on the line of its "at"
    pieces = textwrap.wrap(
        whole, _COLUMNS, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    return [piece.replace("\0", " ") for piece in pieces]
