"""What members tell each other, as text in a store: reports, decisions, and ranks that join.

Every value that is read is checked, since everybody who reaches the store's port can write to it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from ..abstract_mesh import MOST_RANKS
from ..monitor.startup.rank_info import RankInfo
from ..monitor.store_values import (
    checked,
    checked_list,
    checked_ranks,
    has_fields,
    json_object,
    message,
    number,
    whole,
)
from .protocol import Decision, Report, Version, Write
from .rank_stores import StoreAddress

_SHOWN_REASON = 500  # characters


class Failure(NamedTuple):
    """Why a step failed on a rank that lives.

    Attributes:
        rank: the rank, by its number at the start of the job; -1 if no rank is at fault.
        step: the number of the step, from 0.
        reason: the error, `ValueError: ...`; equal reasons count as the same.
    """

    rank: int
    step: int
    reason: str


class ToldReport(NamedTuple):
    """A report, and why the step failed on this rank; None if other ranks are the reason."""

    report: Report
    failure: Failure | None

    def to_json(self) -> str:
        return json.dumps({"report": self.report, "failure": self.failure})

    @staticmethod
    def from_json(text: str) -> ToldReport:
        """Return the report in a text. Raises: ValueError."""
        fields = has_fields(json_object(text), ("report", "failure"))
        rank, epoch, committed, versions = _items(fields["report"], 4)
        report = Report(
            _rank(rank),
            whole(epoch),
            _version(committed),
            tuple(map(_version, checked(versions, list))),
        )
        failure = fields["failure"]
        return ToldReport(report, None if failure is None else _failure(failure))


class ToldDecision(NamedTuple):
    """A decision, and what its members need to know beyond it.

    Attributes:
        decision: what the survivors have agreed on.
        failures: those of its reports.
        joining: which processes its members are that have joined, until all have confirmed them.
    """

    decision: Decision
    failures: tuple[Failure, ...]
    joining: dict[int, Announcement]

    def to_json(self) -> str:
        joining = _announcements_json(self.joining)
        return json.dumps({**self._asdict(), "joining": joining})

    @staticmethod
    def from_json(text: str) -> ToldDecision:
        """Return the decision in a text. Raises: ValueError."""
        fields = has_fields(json_object(text), ToldDecision._fields)
        epoch, members, source, providers, lost = _items(fields["decision"], 5)
        parts = tuple(whole(part) for part in checked(lost, list))
        decision = Decision(
            whole(epoch), checked_ranks(members), _version(source), checked_ranks(providers), parts
        )
        failures = tuple(map(_failure, checked_list(fields["failures"], list)))
        joining = _announcements(fields["joining"])
        if not set(decision.members).issuperset(joining):
            raise ValueError("who joins is no member")
        return ToldDecision(decision, failures, joining)


class Announcement(NamedTuple):
    """A process that wants to become a member.

    Attributes:
        token: by which it recognizes the answer.
        info: which process it is.
        address: where it serves its store.
    """

    token: str
    info: RankInfo
    address: StoreAddress

    def to_json(self) -> str:
        return json.dumps(
            {"token": self.token, "info": self.info.to_json(), "address": self.address._asdict()}
        )

    @staticmethod
    def from_json(text: str) -> Announcement:
        """Return the announcement in a text. Raises: ValueError."""
        fields = has_fields(json_object(text), Announcement._fields)
        return Announcement(
            _token(fields["token"]),
            RankInfo.from_json(checked(fields["info"], str)),
            StoreAddress.from_json(json.dumps(fields["address"])),
        )


class Welcome(NamedTuple):
    """What a process needs to know that has become a member.

    Attributes:
        rank: its number.
        host: the rank that serves the store in which the decision is.
        write: how the optimizers write.
        size: the number of ranks at the start of the job.
        backend: of the default group.
        decision: by which it has become a member.
        members: (number, which process it is and where it serves its store), of all that there
            have been.
    """

    rank: int
    host: int
    write: Write
    size: int
    backend: str
    decision: ToldDecision
    members: dict[int, Announcement]

    def to_json(self) -> str:
        members = _announcements_json(self.members)
        fields = {**self._asdict(), "decision": self.decision.to_json(), "members": members}
        return json.dumps(fields)

    @staticmethod
    def from_json(text: str) -> Welcome:
        """Return the welcome in a text. Raises: ValueError."""
        fields = has_fields(json_object(text), Welcome._fields)
        backend = checked(fields["backend"], str)
        if not re.fullmatch("[a-z:,]+", backend):
            raise ValueError("it names no backend")
        return Welcome(
            _rank(fields["rank"]),
            _rank(fields["host"]),
            Write(whole(fields["write"], max(Write))),
            whole(fields["size"], MOST_RANKS),
            backend,
            ToldDecision.from_json(checked(fields["decision"], str)),
            _announcements(fields["members"]),
        )


def shortened_reason(error: BaseException) -> str:
    """Return an error as the reason of a failure."""
    return f"{type(error).__name__}: {error}"[:_SHOWN_REASON]


def kind_of_reason(reason: str) -> str:
    """Return what two reasons have in common that are the same: all but their numbers.

    An error that tells how much memory was free tells another number each time.
    """
    return re.sub(r"0x[0-9a-f]+|[0-9][0-9.,]*", "#", reason)


def _items(value: Any, count: int) -> list[Any]:
    items = checked(value, list)
    if len(items) != count:
        raise ValueError(f"it has {len(items)} entries in place of {count}")
    return items


def _announcements_json(announcements: Mapping[int, Announcement]) -> dict[str, str]:
    return {str(rank): one.to_json() for rank, one in announcements.items()}


def _announcements(value: Any) -> dict[int, Announcement]:
    return {
        number(rank): Announcement.from_json(checked(one, str))
        for rank, one in checked(value, dict).items()
    }


def _token(value: Any) -> str:
    token = checked(value, str)
    if not re.fullmatch("[0-9a-f]{16}", token):
        raise ValueError("a token is 16 hexadecimal digits")
    return token


def _rank(value: Any) -> int:
    return whole(value, MOST_RANKS - 1)


def _version(value: Any) -> Version:
    step, origin, epoch, members = _items(value, 4)
    return Version(whole(step), whole(origin), whole(epoch), checked_ranks(members))


def _failure(value: Any) -> Failure:
    rank, step, reason = _items(value, 3)
    number = -1 if rank == -1 else _rank(rank)
    return Failure(number, whole(step), message(checked(reason, str)))
