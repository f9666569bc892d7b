"""Ranks that are lost after their hosts ran ahead of the device: all have called what the others'
streams wait for.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shardmesh.mesh.comm.recording.recorder import Recorder
from shardmesh.mesh.monitor import watchdog
from shardmesh.mesh.processes.process import ProcessGroup
from tests.mesh.comm.nccl_like import GPU, NcclLikeGroup, NcclLikeWork
from tests.mesh.monitor.driven_ranks import DrivenRank, driven_ranks


class Event:
    """Stands for an event of a stream that waits for the last work of the communicator."""

    handle: NcclLikeGroup
    work: NcclLikeWork | None = None

    def record(self, stream: Any) -> None:
        self.work = self.handle.works[-1]

    def query(self) -> bool:
        return self.work is None or self.work.is_completed()


@pytest.fixture
def handle(monkeypatch: pytest.MonkeyPatch) -> NcclLikeGroup:
    made = NcclLikeGroup(bound=GPU, seconds=60.0)
    module = SimpleNamespace(Event=Event, current_stream=lambda device: None)
    monkeypatch.setattr(Event, "handle", made, raising=False)
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)
    monkeypatch.setattr(watchdog, "_ALIVE_S", 0.0)
    return made


@pytest.fixture
def three(tmp_path: Path) -> list[DrivenRank]:
    ranks = driven_ranks(tmp_path, 3)
    ranks[0].world.monitor = ranks[0].monitor
    return ranks


def call(driven: list[DrivenRank], handle: NcclLikeGroup, async_op: bool = False) -> Any:
    """Call a collective of these ranks on all of them; on rank 0 on a device, whose host does not
    wait.
    """
    ranks, world, given = tuple(rank.rank for rank in driven), driven[0].world, handle
    for rank in driven[1:]:
        rank.call(ranks=ranks)
    group: Any = world._groups.setdefault(ranks, ProcessGroup(world, ranks, given))  # type: ignore[arg-type]
    if group.recorder is None:
        group.recorder = driven[0].monitor.add_recorder(group)
    group.recorder.enter("all_reduce", "sum", torch.float32, 4, 16, 16)

    def start(group: NcclLikeGroup, async_op: bool) -> NcclLikeWork | None:
        group.works.append(NcclLikeWork(group))
        return group.works[-1] if async_op else None

    return group._start(start, (SimpleNamespace(device=GPU),), async_op)


def ticks(rank: DrivenRank, times: int = 1) -> Any:
    for _ in range(times):
        rank.monitor.watchdog._tick()
    return rank.monitor.standing()


@pytest.mark.parametrize("calls", [1, 3, 100])
def test_a_lost_rank_is_found_while_a_stream_waits(
    calls: int, three: list[DrivenRank], handle: NcclLikeGroup
) -> None:
    for _ in range(calls):
        call(three, handle)
    assert ticks(three[0], 3) is None
    three[1].die()
    assert ticks(three[0]) is None  # the collective may have all that it needs
    verdict = ticks(three[0])
    assert (verdict.kind, verdict.ranks) == ("lost", (1,))
    assert f"rank 1 died, while ranks 0, 2 wait in number {calls - 1} of" in verdict.text
    assert not handle.is_aborted


def test_a_completed_collective_needs_no_rank(
    three: list[DrivenRank], handle: NcclLikeGroup
) -> None:
    call(three, handle)
    three[1].die()
    assert ticks(three[0]) is None
    handle.works[-1].end = 0.0
    assert ticks(three[0], 3) is None


def test_an_asynchronous_collective_counts_once_it_is_waited_for(
    three: list[DrivenRank], handle: NcclLikeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = call(three, handle, async_op=True)
    three[2].die()
    assert ticks(three[0], 3) is None
    monkeypatch.setattr(NcclLikeWork, "wait", lambda _: True)  # only the stream waits
    work.wait()
    assert ticks(three[0], 2).ranks == (2,)


def test_ranks_of_other_groups_do_not_count(three: list[DrivenRank], handle: NcclLikeGroup) -> None:
    call(three[:2], handle)
    three[2].die()
    assert ticks(three[0], 3) is None


def test_the_device_is_not_asked_while_all_ranks_live(
    three: list[DrivenRank], handle: NcclLikeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(Recorder, "is_on_stream", lambda recorder: asked.append(recorder))
    call(three, handle)
    ticks(three[0], 3)
    assert not asked
    three[1].die()
    ticks(three[0])
    assert len(asked) == 1


def test_an_event_that_cannot_be_asked_is_no_proof(
    three: list[DrivenRank], handle: NcclLikeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: Event) -> bool:
        raise RuntimeError(
            "operation not permitted on an event last recorded in a capturing stream"
        )

    monkeypatch.setattr(Event, "query", refuse)
    call(three, handle)
    three[1].die()
    assert ticks(three[0], 3) is None
