"""Works of gloo under a profiler: their threads need the interpreter's lock to finish them, so
nothing may hold it and wait for them.
"""

from __future__ import annotations

import random
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from shardmesh.mesh import init_device_mesh
from shardmesh.mesh.monitor import waiting
from shardmesh.mesh.monitor.monitor import Monitor
from shardmesh.mesh.monitor.waiting import is_done, is_done_now
from shardmesh.mesh.processes.torch_groups.works import MonitoredMessage
from tests.mesh.monitor.driven_ranks import DrivenRank, driven_ranks
from tests.pool import Pool


@pytest.fixture
def two(tmp_path: Path) -> list[DrivenRank]:
    return driven_ranks(tmp_path, 2)


class LockedWork:
    """A work of gloo that ends after so many timed waits, whose lock is taken until then: asking it
    would never return.
    """

    def __init__(self, waits: int, error: str = "") -> None:
        self.left, self.error = waits, error

    def wait(self, slice_: timedelta | None = None) -> bool:
        self.left -= 1
        if slice_ is not None and self.left >= 0:
            raise RuntimeError("Operation timed out!\nException raised from wait at Work.cpp:97")
        self.left = -1
        if self.error:
            raise RuntimeError(self.error)
        return True

    def is_completed(self) -> bool:
        assert self.left < 0, "a deadlock"
        return True


@pytest.mark.parametrize("waits", [0, 1, 5])
def test_a_waiting_rank_does_not_ask_a_work_that_is_pending(
    waits: int, two: list[DrivenRank], monkeypatch: pytest.MonkeyPatch
) -> None:
    monitor: Monitor = two[0].monitor
    monkeypatch.setattr(monitor.waiting, "_diagnose", lambda *_: True)
    recorder = monitor.add_recorder(two[0].world.group(two[0].everyone))
    monitor.waiting.wait_for_work(recorder, 0, LockedWork(waits))
    with pytest.raises(RuntimeError, match="connection closed"):
        monitor.waiting.wait_for_work(recorder, 0, LockedWork(waits, "connection closed"))


def test_whether_a_work_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "_Work", LockedWork)
    monkeypatch.setattr(waiting, "_wait", LockedWork.wait)
    work = LockedWork(2)
    assert [is_done(work) for _ in range(4)] == [False, False, True, True]
    assert is_done(LockedWork(0, "connection closed"))


def test_a_work_is_not_asked_under_a_profiler() -> None:
    with profile(activities=[ProfilerActivity.CPU]):
        assert not is_done_now(LockedWork(1))
    assert is_done_now(LockedWork(-1))


def test_a_message_is_not_asked_under_a_profiler(two: list[DrivenRank]) -> None:
    monitor: Monitor = two[0].monitor
    recorder = monitor.add_recorder(two[0].world.group(two[0].everyone))
    with profile(activities=[ProfilerActivity.CPU]):
        assert not MonitoredMessage([LockedWork(1)], (), recorder, monitor).is_completed()
    assert MonitoredMessage([LockedWork(-1)], (), recorder, monitor).is_completed()


def late_ranks(rounds: int) -> int:
    """Collectives of shardmesh and of the program, whose slices of waiting end when the last rank
    comes.
    """
    mesh = init_device_mesh("cpu", (4,), axis_names=("a",))
    group, x, draw = mesh.group("a"), torch.ones(8), random.Random(0)

    def unchanged(saved: Any) -> Any:
        return saved

    with (
        profile(activities=[ProfilerActivity.CPU]),
        torch.autograd.graph.saved_tensors_hooks(unchanged, unchanged),
    ):
        for i in range(rounds):
            late = 0.0095 + 0.001 * draw.random()
            if dist.get_rank() == i % 4:
                time.sleep(late)
            if i % 2:
                group.all_reduce(x)
            else:
                dist.all_reduce(x, async_op=True).wait()
            x.fill_(1)
    return rounds


def test_collectives_under_a_profiler_and_hooks_of_saved_tensors(world4: Pool) -> None:
    assert world4(late_ranks, 150) == [150] * 4
