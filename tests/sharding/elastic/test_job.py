"""What a job asks of its members, in which order: with members that nobody has started."""

from __future__ import annotations

from typing import Any

import pytest

import shardmesh as sm
from shardmesh.mesh.elastic import protocol
from shardmesh.mesh.elastic.membership import LeftOutError
from shardmesh.mesh.elastic.protocol import Copy, Decision
from shardmesh.sharding.elastic.job import ElasticJob, _Holding
from shardmesh.sharding.elastic.recovery import StateLostError


class Members:
    """Members that note what is asked of them.

    Attributes:
        asked: the names of the methods, in order.
        fails: the errors that methods raise.
    """

    def __init__(self, **fails: Exception) -> None:
        self.member = protocol.first_member(0, (0, 1), 0)
        self.verdict = ""
        self.asked: list[str] = []
        self.fails = fails

    def __getattr__(self, name: str) -> Any:
        def method(*_: Any) -> object:
            assert len(self.asked) < 100, "without end"
            self.asked.append(name)
            if name in self.fails:
                raise self.fails[name]
            return object()

        return method


def job_with(members: Members, monkeypatch: pytest.MonkeyPatch) -> ElasticJob:
    job = ElasticJob.__new__(ElasticJob)
    job._members = members  # type: ignore[assignment]
    job.events = []
    job._joining, job._is_completing, job._interrupted_at = (object(),), False, 0.0  # type: ignore
    job._member_ranks = members.member.members
    monkeypatch.setattr(job, "_rebuild", lambda: None)
    return job


def test_members_meet_before_they_are_interrupted_for_one_that_joins(
    monkeypatch: pytest.MonkeyPatch,
):
    members = Members()
    job_with(members, monkeypatch)._take_in()
    assert members.asked == ["wait_for_all", "pause", "agree"]


def test_a_loss_where_they_meet_is_like_any_other(monkeypatch: pytest.MonkeyPatch):
    members = Members(wait_for_all=RuntimeError("rank 1 died"))
    job = job_with(members, monkeypatch)
    job._take_in()
    assert members.asked == ["wait_for_all", "interrupt", "agree"]
    assert not job._joining


def test_an_error_of_the_agreement_is_not_tried_again(monkeypatch: pytest.MonkeyPatch):
    members = Members(agree=KeyError(4))
    with pytest.raises(KeyError):
        job_with(members, monkeypatch)._go_on(RuntimeError("rank 1 died"))


def test_a_rank_that_is_told_to_go_may_hear_that_others_have_gone_on(
    monkeypatch: pytest.MonkeyPatch,
):
    members = Members(agree=LeftOutError("others go on"))
    job = job_with(members, monkeypatch)
    monkeypatch.setattr(job, "close", lambda: None)
    job._is_told_to_go = False
    with pytest.raises(LeftOutError):
        job._go_on(RuntimeError("rank 1 died"))
    job.leave()
    job._go_on(RuntimeError("rank 1 died"))
    assert job.has_left
    assert members.asked[-1] == "leave"


def holding(knows_losses: bool, has_layouts: bool = False) -> _Holding:
    return _Holding(False, False, False, None, knows_losses, has_layouts)


def test_ranks_that_go_back_to_a_checkpoint_have_the_losses_of_those_before():
    @sm.simulate(3)
    def telling() -> Any:
        rank = sm.init_device_mesh("cpu", (3,), axis_names=("s",)).get_rank()
        job = ElasticJob.__new__(ElasticJob)
        job._knows_losses = rank != 0
        job.losses, job.first_step = ([], 0) if rank == 0 else ([0.5, float(rank)], 4)
        told = {0: holding(False), 1: holding(True), 2: holding(True)}
        job._tell_losses(told, 5)
        return job.losses, job.first_step, job._knows_losses

    assert telling() == [
        ([0.5, 1.0], 4, True),
        ([0.5, 1.0], 4, True),
        ([0.5, 2.0], 4, True),
    ]


def test_what_is_lost_has_one_text_on_all_ranks():
    @sm.simulate(2)
    def losing() -> str:
        sm.init_device_mesh("cpu", (2,), axis_names=("s",))
        job = ElasticJob.__new__(ElasticJob)
        job._layouts = {}
        decision = Decision(2, (0, 1), Copy(3, 0, 0, (0, 1)), (0,), ())
        with pytest.raises(StateLostError) as caught:
            job._raise_lost(decision, dict.fromkeys((0, 1), holding(True)))
        return str(caught.value)

    first, second = losing()
    assert first == second
    assert first.startswith("after step 3 rank 0 of those that are left had the state of this step")
