"""Groups of NCCL, as far as they can be tested without a GPU: barriers, timeouts, groups that some ranks make."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardmesh.mesh import errors
from shardmesh.mesh.comm import process
from shardmesh.mesh.comm.process import ProcessGroup, ProcessWorld, process_world
from shardmesh.mesh.monitor import timeouts
from tests.mesh.comm.nccl_like import CPU, GPU, NcclLikeGroup
from tests.mesh.monitor.driven_ranks import DrivenRank, driven_ranks

SOON_S = 60.0  # tells an answer from a hang

# -- barriers ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def two(tmp_path: Path) -> list[DrivenRank]:
    """Two ranks; the other one has called its barrier."""
    ranks = driven_ranks(tmp_path, 2)
    ranks[0].world.monitor = ranks[0].monitor
    ranks[1].call("barrier", "", torch.uint8, 0, moved=0)
    return ranks


def group_of(rank: DrivenRank, handle: NcclLikeGroup) -> ProcessGroup:
    given: Any = handle
    return ProcessGroup(rank.world, rank.everyone, given)


@pytest.mark.parametrize("bound", [None, GPU])
def test_a_slow_barrier_does_not_abort_the_communicator(
    two: list[DrivenRank], bound: torch.device | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    handle = NcclLikeGroup(bound=bound)
    group_of(two[0], handle).barrier()
    assert (handle.devices, handle.is_aborted, handle.works[0].is_completed()) == ([GPU], False, True)


def test_a_barrier_reports_a_lost_rank(two: list[DrivenRank]) -> None:
    handle = NcclLikeGroup(bound=GPU, seconds=0.0)
    group = group_of(two[0], handle)
    group.barrier()
    handle.seconds = SOON_S
    timer = threading.Timer(0.3, two[1].die)
    timer.start()
    with pytest.raises(errors.RankLostError, match="rank 1 died"):
        group.barrier()
    timer.join()
    assert not handle.is_aborted


def test_a_failed_barrier_raises_torchs_error(two: list[DrivenRank]) -> None:
    handle = NcclLikeGroup(bound=GPU)
    handle.is_aborted = True
    with pytest.raises(RuntimeError, match="NCCL communicator was aborted"):
        group_of(two[0], handle).barrier()


def test_a_barrier_uses_the_cpu_backend_also_if_a_device_is_bound(two: list[DrivenRank]) -> None:
    handle = NcclLikeGroup(("cpu", "cuda"), GPU, seconds=0.0)
    group_of(two[0], handle).barrier()
    assert handle.devices == [CPU]


# -- groups ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def bound_world() -> Iterator[ProcessWorld]:
    """Rank 1 of four, whose default group has a bound device."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    distributed_c10d._get_default_group().bound_device_id = GPU
    yield process_world()
    dist.destroy_process_group()


@pytest.mark.parametrize("ranks", [(0, 1), (1,), (0, 1, 2, 3)])
def test_groups_are_made_without_the_bound_device(
    ranks: tuple[int, ...], bound_world: ProcessWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch would split the default group's communicator, which waits for all ranks, also those that make no such group."""
    split: list[Any] = []
    monkeypatch.setattr(distributed_c10d, "_get_split_source", split.append)
    group: Any = bound_world.group(ranks)
    made = group.channel
    assert not split
    assert made.bound_device_id is None
    assert dist.get_process_group_ranks(made) == list(ranks)
    assert distributed_c10d._get_default_group().bound_device_id == GPU


def test_the_device_stays_bound_after_an_error(bound_world: ProcessWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no connection")

    monkeypatch.setattr(dist, "new_group", refuse)
    group: Any = bound_world.group((0, 1))
    with pytest.raises(RuntimeError, match="no connection"):
        _ = group.channel
    assert distributed_c10d._get_default_group().bound_device_id == GPU


@pytest.mark.parametrize(("backends", "seconds"), [("cuda:nccl", 360.0), ("cpu:gloo,cuda:nccl", 360.0), ("cpu:gloo,cuda:gloo", 604800.0)])
def test_groups_have_the_timeout_of_their_backends(
    backends: str, seconds: float, two: list[DrivenRank], bound_world: ProcessWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Any] = []
    bound_world.monitor = two[1].monitor
    monkeypatch.setattr(dist, "get_backend_config", lambda: backends)
    monkeypatch.setattr(process, "new_group", lambda ranks, job, timeout: given.append(timeout) or NcclLikeGroup())
    monkeypatch.setattr(timeouts, "manage", lambda handle, is_own: given.append(is_own))
    group: Any = bound_world.group((0, 1))
    _ = group.channel
    bound_world.monitor = None
    assert given == [timedelta(seconds=seconds), True]
