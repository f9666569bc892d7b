"""What members tell each other in an agreement, as text in a store: reports and decisions.

Every value that is read is checked, since everybody who reaches the store's port can write to it.
"""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

from ..abstract_mesh import MOST_RANKS
from ..monitor.store_values import (
    checked,
    checked_list,
    checked_ranks,
    has_fields,
    json_object,
    message,
    whole,
)
from .protocol import Copy, Decision, Report

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
        rank, epoch, committed, copies = _items(fields["report"], 4)
        report = Report(
            _rank(rank), whole(epoch), _copy(committed), tuple(map(_copy, checked(copies, list)))
        )
        failure = fields["failure"]
        return ToldReport(report, None if failure is None else _failure(failure))


class ToldDecision(NamedTuple):
    """A decision, and the failures that its reports had."""

    decision: Decision
    failures: tuple[Failure, ...]

    def to_json(self) -> str:
        return json.dumps({"decision": self.decision, "failures": self.failures})

    @staticmethod
    def from_json(text: str) -> ToldDecision:
        """Return the decision in a text. Raises: ValueError."""
        fields = has_fields(json_object(text), ("decision", "failures"))
        epoch, members, source, providers, lost = _items(fields["decision"], 5)
        parts = tuple(whole(part) for part in checked(lost, list))
        decision = Decision(
            whole(epoch), checked_ranks(members), _copy(source), checked_ranks(providers), parts
        )
        failures = tuple(map(_failure, checked_list(fields["failures"], list)))
        return ToldDecision(decision, failures)


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


def _rank(value: Any) -> int:
    return whole(value, MOST_RANKS - 1)


def _copy(value: Any) -> Copy:
    step, origin, epoch, members = _items(value, 4)
    return Copy(whole(step), whole(origin), whole(epoch), checked_ranks(members))


def _failure(value: Any) -> Failure:
    rank, step, reason = _items(value, 3)
    number = -1 if rank == -1 else _rank(rank)
    return Failure(number, whole(step), message(checked(reason, str)))
