"""Reports and decisions as text; what no member has written is refused."""

from __future__ import annotations

import json

import pytest

from shardmesh.mesh.elastic import protocol
from shardmesh.mesh.elastic.messages import Failure, ToldDecision, ToldReport, shortened_reason
from shardmesh.mesh.elastic.protocol import Copy, Decision

COPY = Copy(3, 1, 1, (0, 2, 3))
FAILURE = Failure(2, 3, "ValueError: no more data")
REPORT = ToldReport(protocol.report(protocol.first_member(2, (0, 2, 3), 0)), FAILURE)
DECISION = ToldDecision(Decision(2, (0, 3), COPY, (0, 3), ()), (FAILURE, Failure(-1, 3, "")))


def test_reports_and_decisions_are_read_as_they_were_written():
    assert ToldReport.from_json(REPORT.to_json()) == REPORT
    assert ToldReport.from_json(REPORT._replace(failure=None).to_json()).failure is None
    assert ToldDecision.from_json(DECISION.to_json()) == DECISION


def replaced(text: str, name: str, index: int, value: object) -> str:
    fields = json.loads(text)
    fields[name][index] = value
    return json.dumps(fields)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        json.dumps({"report": [], "failure": None}),
        json.dumps({"report": None, "failure": None, "more": 1}),
        replaced(REPORT.to_json(), "report", 0, -1),
        replaced(REPORT.to_json(), "report", 0, True),
        replaced(REPORT.to_json(), "report", 1, "1"),
        replaced(REPORT.to_json(), "report", 2, [1, 2, 3]),
        replaced(REPORT.to_json(), "report", 3, [[1, 2, 3, [0, -1]]]),
        replaced(REPORT.to_json(), "failure", 2, 7),
    ],
)
def test_another_report_is_refused(text: str):
    with pytest.raises(ValueError, match=r"."):
        ToldReport.from_json(text)


@pytest.mark.parametrize(
    "text",
    [
        REPORT.to_json(),
        replaced(DECISION.to_json(), "decision", 1, [0, 1.5]),
        replaced(DECISION.to_json(), "decision", 4, [-1]),
        replaced(DECISION.to_json(), "failures", 0, [0, 1]),
        replaced(DECISION.to_json(), "failures", 0, {}),
    ],
)
def test_another_decision_is_refused(text: str):
    with pytest.raises(ValueError, match=r"."):
        ToldDecision.from_json(text)


def test_a_reason_is_not_longer_than_a_line_or_two():
    assert shortened_reason(KeyError("x")) == "KeyError: 'x'"
    assert len(shortened_reason(ValueError("x" * 10_000))) == 500
