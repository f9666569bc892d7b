"""What a job asks of its members, in which order: with members that nobody has started."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import shardmesh as sm
from shardmesh.mesh.elastic import protocol
from shardmesh.mesh.elastic.membership import ElasticJobError, LeftOutError
from shardmesh.mesh.elastic.protocol import Decision, Version, Write
from shardmesh.mesh.errors import LaunchEnvironmentError
from shardmesh.mesh.monitor import termination
from shardmesh.sharding.elastic import job as job_module
from shardmesh.sharding.elastic.job import (
    ElasticJob,
    _CopiedVersion,
    _Copies,
    _Holding,
    _newest_common,
)
from shardmesh.sharding.elastic.pipelines import own_states
from shardmesh.sharding.elastic.recovery import StateLostError
from shardmesh.sharding.elastic.snapshot import Snapshot
from tests.sharding.elastic.states import fsdp, mesh_over, on_ranks
from tests.sharding.elastic.test_pipelines import Form, job_state


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
    job._joining, job._is_completing, job._interrupted_at = {2: object()}, False, 0.0  # type: ignore
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


class Voting(Members):
    """Members whose votes fail since rank 2 is lost.

    Attributes:
        agreed: whether they agree on the step that this rank can complete.
    """

    def __init__(self, write: Write, agreed: bool = False, **fails: Exception) -> None:
        super().__init__(**fails)
        self.member = protocol.first_member(1, [0, 1, 2], 0, write)
        self.world = SimpleNamespace(observers=[])
        self.agreed = agreed

    def vote(self, _: bool) -> bool:
        self.member = protocol.enter_vote(protocol.enter_reductions(self.member))
        raise self.fails.get("vote", RuntimeError("rank 2 is lost"))

    def interrupt(self, _: Exception) -> None:
        self.member = protocol.interrupt(protocol.lose(self.member, [2]))

    def agree(self) -> Decision:
        self.asked.append("agree")
        if error := self.fails.pop("agree", None):
            raise error
        source = self.member.next if self.agreed else self.member.current
        decision = Decision(1, (0, 1), source, (0, 1), ())
        self.member = protocol.adopt(self.member, decision)
        return decision


def voting_job(
    members: Voting, monkeypatch: pytest.MonkeyPatch
) -> tuple[ElasticJob, list[torch.optim.SGD]]:
    """Return a job whose state is a linear layer with a gradient of 1, and its two optimizers."""
    job = job_with(members, monkeypatch)
    job._joining, job._hooks, job._is_told_to_go = {}, [], False
    job.has_left, job.losses, job.first_step, job._last = False, [], 0, None
    job.mesh = SimpleNamespace(coordinate=(0,))  # type: ignore[assignment]
    layer = torch.nn.Linear(1, 1)
    for parameter in layer.parameters():
        parameter.grad = torch.ones_like(parameter)
        parameter.data.zero_()
    optimizers = [torch.optim.SGD([p], 1.0) for p in layer.parameters()]
    for optimizer in optimizers:
        optimizer.register_step_pre_hook(job._before_write)
    job.state, job._parameters = {"layer": layer}, list(layer.parameters())
    job._versions = {members.member.current: Snapshot({"state": job.state})}
    return job, optimizers


@pytest.mark.parametrize("write", list(Write))
@pytest.mark.parametrize(
    ("fails", "ends"),
    [
        ({}, contextlib.nullcontext()),  # they agree to take the step again
        ({"vote": KeyboardInterrupt()}, pytest.raises(ElasticJobError, match="has caught")),
    ],
    ids=["agreed", "interrupted"],
)
def test_a_step_that_was_given_up_writes_nothing(
    write: Write, fails: Any, ends: Any, monkeypatch: pytest.MonkeyPatch
):
    """Its program catches the error, and steps its optimizers all the same."""
    job, optimizers = voting_job(Voting(write, **fails), monkeypatch)
    caught: list[str] = []
    with ends, job.attempt():
        for optimizer in [*optimizers, *optimizers]:
            try:
                optimizer.step()
            except BaseException as error:
                caught.append(type(error).__name__)
    assert len(caught) == 4
    for parameter in job.state["layer"].parameters():
        assert torch.equal(parameter.data, torch.zeros_like(parameter))


def test_all_optimizers_write_a_step_that_this_rank_has_promised(monkeypatch: pytest.MonkeyPatch):
    job, optimizers = voting_job(Voting(Write.LOCAL, agreed=True), monkeypatch)
    with job.attempt():
        for optimizer in optimizers:
            optimizer.step()
    for parameter in job.state["layer"].parameters():
        assert torch.equal(parameter.data, -torch.ones_like(parameter))
    assert len(job.losses) == 1


@pytest.mark.parametrize("agreed", [False, True])
def test_a_spare_goes_on_after_an_error_in_the_agreement(
    agreed: bool, monkeypatch: pytest.MonkeyPatch
):
    """It has voted, and nothing to write: nobody counts on it."""
    members = Voting(Write.LOCAL, agreed, agree=ArithmeticError("a bad batch"))
    job, _ = voting_job(members, monkeypatch)
    job.mesh = SimpleNamespace(coordinate=None)  # type: ignore[assignment]
    with job.attempt():
        pass
    assert members.asked == ["agree", "agree"]
    assert job.losses == []  # the others tell them


def test_a_rank_that_has_promised_a_step_ends_by_an_error_in_the_agreement(
    monkeypatch: pytest.MonkeyPatch,
):
    members = Voting(Write.LOCAL, agree=ArithmeticError("a bad batch"))
    job, (optimizer, _) = voting_job(members, monkeypatch)
    with pytest.raises(ArithmeticError), job.attempt():
        optimizer.step()


@contextmanager
def leaving_nothing(members: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Assert that a job which does not begin in the block has taken back what it had set."""
    members.size, members.world = 2, SimpleNamespace(observers=[])
    monkeypatch.setattr(job_module, "Membership", lambda *_: members)
    monkeypatch.setattr(job_module, "current_world", lambda: members.world)
    handler = signal.getsignal(signal.SIGTERM)
    yield
    assert members.asked[-1] == "close"
    assert members.world.observers == []
    assert termination.is_interruptible()
    assert signal.getsignal(signal.SIGTERM) is handler


@pytest.mark.parametrize(
    ("agree", "error", "match"),
    [
        (lambda: None, LaunchEnvironmentError, "has taken its last step before"),
        (Members(agree=LeftOutError("others go on")).agree, LeftOutError, "others go on"),
    ],
    ids=["finished", "left out"],
)
def test_a_process_that_cannot_join_closes_its_job(
    agree: Any, error: type[Exception], match: str, monkeypatch: pytest.MonkeyPatch
):
    members: Any = Members()
    members.agree = agree
    decision = Decision(1, (0, 1), members.member.current, (0, 1), ())
    welcome = SimpleNamespace(decision=SimpleNamespace(decision=decision))
    monkeypatch.setattr(job_module, "is_joining", lambda: True)
    monkeypatch.setattr(job_module, "enter", lambda: SimpleNamespace(welcome=welcome))

    def dies(job: ElasticJob) -> None:
        assert not termination.is_interruptible()
        raise RuntimeError("rank 1 died")

    monkeypatch.setattr(ElasticJob, "_rebuild", dies)
    with leaving_nothing(members, monkeypatch), pytest.raises(error, match=match):
        ElasticJob(lambda _: {}, make_mesh=lambda _: None)  # type: ignore[arg-type, return-value]


def test_a_job_whose_first_copies_fail_is_closed(monkeypatch: pytest.MonkeyPatch):
    members: Any = Members()
    mesh = SimpleNamespace(coordinate=(0,))
    monkeypatch.setattr(ElasticJob, "_mesh_of", lambda *_: mesh)
    monkeypatch.setattr(ElasticJob, "_first_state", lambda *_: ({}, protocol.Write.LOCAL))

    def dies(job: ElasticJob, *_: Any) -> None:
        assert not termination.is_interruptible()
        raise RuntimeError("rank 1 died")

    monkeypatch.setattr(ElasticJob, "_first_copies", dies)
    with (
        leaving_nothing(members, monkeypatch),
        pytest.raises(RuntimeError, match="rank 1 died"),
    ):
        ElasticJob(lambda _: {}, make_mesh=lambda _: None)  # type: ignore[arg-type, return-value]


def holding(
    knows_losses: bool, has_layouts: bool = False, copied: tuple[_CopiedVersion, ...] = ()
) -> _Holding:
    return _Holding(False, False, False, copied, knows_losses, has_layouts, False)


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
        decision = Decision(2, (0, 1), Version(3, 0, 0, (0, 1)), (0,), ())
        with pytest.raises(StateLostError) as caught:
            job._raise_lost(decision, dict.fromkeys((0, 1), holding(True)))
        return str(caught.value)

    first, second = losing()
    assert first == second
    assert first.startswith("after step 3 rank 0 of those that are left had the state of this step")


# -- copies ----------------------------------------------------------------------------------------


def test_a_process_that_joins_has_copies_before_it_has_a_state():
    def joining() -> Any:
        mesh = mesh_over(range(2), (2,), "s")
        job = ElasticJob.__new__(ElasticJob)
        job._refresh_every = 1
        members: Any = Members()
        members.hosts = lambda: None
        job._members = members
        redundancy = job._first_copies(Snapshot(fsdp(mesh)), mesh)
        assert redundancy is not None
        return redundancy.steps

    assert on_ranks(2, joining) == [(0,), (0,)]


def test_copies_of_a_pipeline_that_a_process_joins_have_all_stages():
    def joining() -> Any:
        job = ElasticJob.__new__(ElasticJob)
        tree = Snapshot(job_state(Form((2,), "p"), range(2))).tree()
        assert list(own_states(tree))
        return list(own_states(job._whole_on(mesh_over(range(2), (2,), "p"), tree)))

    assert on_ranks(2, joining) == [[], []]


def test_copies_on_hosts_that_the_topology_does_not_know():
    """Two ranks are on the first host: their copies are on the other one."""

    def copying() -> Any:
        mesh = mesh_over(range(3), (3,), "s")
        job = ElasticJob.__new__(ElasticJob)
        job._refresh_every = 1
        members: Any = Members()
        members.hosts = lambda: {0: 0, 1: 0, 2: 1}
        job._members = members
        redundancy = job._first_copies(Snapshot(fsdp(mesh)), mesh)
        assert redundancy is not None
        return sorted(redundancy._placement.sent)

    assert on_ranks(3, copying)[0] == [(0, 2), (1, 2), (2, 0)]


def test_a_loss_in_the_confirm_leaves_the_copies_before_and_after(monkeypatch: pytest.MonkeyPatch):
    members: Any = Members()
    source = members.member.current
    members.member = protocol.interrupt(members.member)
    members.member = protocol.adopt(members.member, Decision(1, (0, 1), source, (0, 1), ()))
    members.regroup = lambda: SimpleNamespace(size=2)
    job = ElasticJob.__new__(ElasticJob)
    job._members, job._build = members, lambda _: {}
    job._layouts, job._meshes, job._versions, job._hooks = {}, {}, {}, []
    job.losses, job.first_step = [], 0
    before, after, mesh = object(), object(), SimpleNamespace(coordinate=(0,))
    job._redundancies = {0: _Copies(before, (0, 1))}  # type: ignore[arg-type]
    monkeypatch.setattr(job, "_mesh_of", lambda _: mesh)
    monkeypatch.setattr(job, "_recover", lambda _, like: like)
    monkeypatch.setattr(job, "_first_copies", lambda *_: after)
    members.fails["confirm"] = RuntimeError("rank 1 died")
    with pytest.raises(RuntimeError, match="rank 1 died"):
        job._rebuild()
    assert job._redundancies == {0: (before, (0, 1)), 1: (after, (0, 1))}
    del members.fails["confirm"]
    job._rebuild()
    assert job._redundancies == {1: (after, (0, 1))}


def test_the_newest_copies_are_those_that_all_have_who_had_a_part():
    old, new = _CopiedVersion(1, 4, (0, 2, 3, 5)), _CopiedVersion(2, 4, (0, 2, 3, 7))

    def newest(*copied: tuple[_CopiedVersion, ...]) -> _CopiedVersion | None:
        told = {number: holding(True, copied=one) for number, one in enumerate(copied)}
        return _newest_common(told, (0, 2, 7)[: len(copied)])

    assert newest((new,), (old, new)) == new  # rank 0 got through the confirm
    assert newest((old, new), (old,)) == old  # rank 2 has been interrupted before it
    assert newest((old, new), (old,), (new,)) == old  # of which rank 7 had no part
    assert newest((old, new), (old, new), (new,)) == new
    assert newest((old, new), (old, new), ()) == old
    assert newest((new,), (old,)) is None
    assert newest((), ()) is None
    assert newest((old, old._replace(step=6)), (old, old._replace(step=6)), ()) == old._replace(
        step=6
    )


def test_an_optimizer_of_a_pipeline_has_no_other_parameters():
    def program() -> None:
        def build(mesh: sm.DeviceMesh) -> Any:
            state = job_state(Form((2,), "p"), range(2))
            other = torch.nn.Parameter(torch.ones(2))
            parameters = [*state["model"].parameters(), other]
            return {**state, "optimizers": [torch.optim.SGD(parameters)]}

        with pytest.raises(ValueError, match="of the optimizer are not the model's"):
            ElasticJob(build, make_mesh=lambda _: mesh_over(range(2), (2,), "p"))

    sm.simulate(2)(program)()
