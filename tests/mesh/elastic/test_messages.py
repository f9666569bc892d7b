"""Reports, decisions and who joins, as text; what no member has written is refused."""

from __future__ import annotations

import json

import pytest

from shardmesh.mesh.elastic import protocol
from shardmesh.mesh.elastic.messages import (
    Announcement,
    Failure,
    ToldDecision,
    ToldReport,
    Welcome,
    shortened_reason,
)
from shardmesh.mesh.elastic.protocol import Decision, Version
from shardmesh.mesh.elastic.rank_stores import StoreAddress
from shardmesh.mesh.monitor.startup.rank_info import RankInfo

VERSION = Version(3, 1, 1, (0, 2, 3))
FAILURE = Failure(2, 3, "ValueError: no more data")
REPORT = ToldReport(protocol.report(protocol.first_member(2, (0, 2, 3), 0)), FAILURE)
INFO = RankInfo(1, "host", 12, "boot/pid", 34, 0, "", {})
ANNOUNCED = Announcement("0123456789abcdef", INFO, StoreAddress("127.0.0.1", 41001))
DECISION = ToldDecision(
    Decision(2, (0, 3, 4), VERSION, (0, 3), ()), (FAILURE, Failure(-1, 3, "")), {4: ANNOUNCED}
)


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
        json.dumps({**json.loads(DECISION.to_json()), "joining": {"5": ANNOUNCED.to_json()}}),
        json.dumps({**json.loads(DECISION.to_json()), "joining": {"4": "{}"}}),
    ],
)
def test_another_decision_is_refused(text: str):
    with pytest.raises(ValueError, match=r"."):
        ToldDecision.from_json(text)


def test_a_reason_is_not_longer_than_a_line_or_two():
    assert shortened_reason(KeyError("x")) == "KeyError: 'x'"
    assert len(shortened_reason(ValueError("x" * 10_000))) == 500


WELCOME = Welcome(4, 0, protocol.Write.UNDO, 3, "gloo", DECISION, {0: ANNOUNCED, 4: ANNOUNCED})


def test_who_joins_and_who_is_welcome_is_read_as_it_was_written():
    assert Announcement.from_json(ANNOUNCED.to_json()) == ANNOUNCED
    assert Welcome.from_json(WELCOME.to_json()) == WELCOME


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("rank", -1),
        ("write", 3),
        ("size", "3"),
        ("backend", "gloo; rm"),
        ("decision", {}),
        ("members", {"-1": ANNOUNCED.to_json()}),
        ("members", {"0": ANNOUNCED._replace(token="x").to_json()}),
        ("members", []),
        ("more", 1),
    ],
)
def test_another_welcome_is_refused(name: str, value: object):
    text = json.dumps({**json.loads(WELCOME.to_json()), name: value})
    with pytest.raises(ValueError, match=r"."):
        Welcome.from_json(text)


def test_a_member_that_has_joined_holds_nothing_and_is_not_asked_for_the_version():
    decision = Decision(2, (0, 3, 4), VERSION, (0, 3), ())
    assert decision.is_held_by_all
    assert not decision._replace(providers=(0,)).is_held_by_all
    member = protocol.joining_member(4, decision, 0, protocol.Write.LOCAL)
    assert (member.versions, member.step, member.epoch) == ((), VERSION.step, 2)
    confirmed = protocol.finish_confirm(protocol.enter_confirm(member))
    assert confirmed.versions == (confirmed.current,)


def test_the_leader_decides_who_joins_as_all_know_from_before():
    members = [protocol.interrupt(protocol.first_member(rank, (0, 1), 0)) for rank in (0, 1)]
    reports = {member.rank: protocol.report(member) for member in members}
    decision = protocol.decide(members[0], reports, None, lambda *_: (), joining=[2])
    assert decision is not None
    assert decision.members == (0, 1, 2)
    assert decision.providers == (0, 1)
