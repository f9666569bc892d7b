"""After a verdict communicators of accelerators are aborted, so that hosts and
`destroy_process_group` do not wait for their kernels.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shardmesh.mesh import errors
from shardmesh.mesh.monitor import termination, timeouts
from shardmesh.mesh.monitor.verdict import Verdict
from tests.mesh.comm.nccl_like import NcclLikeGroup, NcclLikeWork
from tests.mesh.monitor.driven_ranks import DrivenRank, driven_ranks

SOON_S = 60.0  # tells an answer from a hang
VERDICT = Verdict("lost", (1,), "", (), "rank 1 died")


class Job(SimpleNamespace):
    """This rank, and its groups with stuck collectives: one of shardmesh, one of the program, one
    of gloo.
    """

    rank: DrivenRank
    nccl: list[NcclLikeGroup]
    gloo: NcclLikeGroup

    @property
    def aborted(self) -> list[bool]:
        return [group.is_aborted for group in (*self.nccl, self.gloo)]

    def until(self, is_done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + SOON_S
        while not is_done():
            assert time.monotonic() < deadline
            self.rank.monitor.watchdog._tick()
            time.sleep(0.01)


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    rank = driven_ranks(tmp_path, 2)[0]
    groups = [
        NcclLikeGroup(kinds, seconds=10 * SOON_S)
        for kinds in (("cpu", "cuda"), ("cuda",), ("cpu",))
    ]
    for group in groups:
        group.works.append(NcclLikeWork(group))
    monkeypatch.setattr(timeouts, "torch_groups", lambda: list(groups))
    monkeypatch.setattr(termination, "alarm_signal", None)
    monkeypatch.setattr(type(rank.monitor), "is_of_this_job", lambda _: True)
    return Job(rank=rank, nccl=groups[:2], gloo=groups[2])


def test_communicators_are_aborted_before_the_program_gets_the_verdict(job: Job) -> None:
    """So the program may destroy its groups, which waits for kernels under a lock that an abort
    needs.
    """
    job.rank.monitor.fail(VERDICT)
    with pytest.raises(errors.RankLostError):
        job.rank.monitor.check()
    assert job.aborted == [True, True, False]
    destroying = threading.Thread(
        target=lambda: [group.shutdown() for group in job.nccl], daemon=True
    )
    destroying.start()
    destroying.join(SOON_S)
    assert not destroying.is_alive()


def test_communicators_are_aborted_when_the_program_raises(job: Job) -> None:
    job.rank.monitor.raised(ValueError("no more data"))
    assert job.aborted == [True, True, False]


def test_a_host_that_waits_for_a_kernel_is_set_free(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    monkeypatch.setattr(signal, "pthread_kill", lambda *_: order.append("signal"))
    monkeypatch.setattr(termination, "alarm_signal", 50)

    def item() -> None:
        while not job.nccl[0].is_aborted:
            time.sleep(0.001)
        order.append("free")

    waiting = threading.Thread(target=item, daemon=True)
    waiting.start()
    job.rank.monitor.fail(VERDICT)
    job.rank.monitor.watchdog._tick()
    assert job.aborted == [False] * 3, "a program has time to come by itself"
    job.until(lambda: not waiting.is_alive())
    assert order[0] == "signal", (
        "so that the program never sees what an aborted collective computed"
    )


def test_communicators_of_another_job_are_left_alone(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program has destroyed the groups of this job and made new ones."""
    monkeypatch.setattr(type(job.rank.monitor), "is_of_this_job", lambda _: False)
    job.rank.monitor.fail(VERDICT)
    with pytest.raises(errors.RankLostError):
        job.rank.monitor.check()
    assert job.aborted == [False] * 3


@pytest.mark.parametrize("how", ["slow", "refused"])
def test_an_abort_that_fails_or_takes_long_does_not_hide_the_verdict(
    how: str, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[Any] = []

    def abort(backend: Any) -> None:
        called.append(backend)
        if how == "refused":
            raise RuntimeError("communicator was aborted before")
        released.wait(SOON_S)

    released = threading.Event()
    monkeypatch.setattr(timeouts, "_LONGEST_ABORT_S", 0.05)
    monkeypatch.setattr("tests.mesh.comm.nccl_like.NcclLikeBackend.abort", abort)
    job.rank.monitor.fail(VERDICT)
    for _ in range(2):
        with pytest.raises(errors.RankLostError):
            job.rank.monitor.check()
    released.set()
    assert len(called) == 2, "once for each communicator"


def test_groups_without_an_accelerator_are_looked_at_once(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The watchdog runs until the interpreter has ended, and looking up a backend gives up the
    interpreter: Python before 3.14 aborts a process that ends meanwhile.
    """
    lookups: list[NcclLikeGroup] = []
    lookup = NcclLikeGroup._get_backend
    monkeypatch.setattr(
        NcclLikeGroup,
        "_get_backend",
        lambda group, kind: lookups.append(group) or lookup(group, kind),
    )
    monkeypatch.setattr(timeouts, "torch_groups", lambda: [job.gloo])
    job.rank.monitor.fail(VERDICT)
    with pytest.raises(errors.RankLostError):
        job.rank.monitor.check()
    job.rank.monitor.failed_at -= int(1e9)  # as if the main thread had had its time
    for _ in range(3):
        job.rank.monitor.watchdog._tick()
    assert lookups == [job.gloo]
