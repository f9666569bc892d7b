"""Groups of NCCL, as far as they can be tested without a GPU: barriers, timeouts, groups that some ranks make."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from shardmesh.mesh import errors
from shardmesh.mesh.comm.process import ProcessGroup
from tests.mesh.comm.nccl_like import CPU, GPU, NcclLikeGroup
from tests.mesh.monitor.hands import Hand, played

SOON_S = 60.0  # tells an answer from a hang

# -- barriers ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def two(tmp_path: Path) -> list[Hand]:
    """Two ranks; the other one has called its barrier."""
    ranks = played(tmp_path, 2)
    ranks[0].world.monitor = ranks[0].monitor
    ranks[1].call("barrier", "", torch.uint8, 0, moved=0)
    return ranks


def group_of(hand: Hand, handle: NcclLikeGroup) -> ProcessGroup:
    given: Any = handle
    return ProcessGroup(hand.world, hand.everyone, given)


@pytest.mark.parametrize("bound", [None, GPU])
def test_a_slow_barrier_does_not_abort_the_communicator(
    two: list[Hand], bound: torch.device | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    handle = NcclLikeGroup(bound=bound)
    group_of(two[0], handle).barrier()
    assert (handle.devices, handle.is_aborted, handle.works[0].is_completed()) == ([GPU], False, True)


def test_a_barrier_reports_a_lost_rank(two: list[Hand]) -> None:
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


def test_a_failed_barrier_raises_torchs_error(two: list[Hand]) -> None:
    handle = NcclLikeGroup(bound=GPU)
    handle.is_aborted = True
    with pytest.raises(RuntimeError, match="NCCL communicator was aborted"):
        group_of(two[0], handle).barrier()


def test_a_barrier_uses_the_cpu_backend_also_if_a_device_is_bound(two: list[Hand]) -> None:
    handle = NcclLikeGroup(("cpu", "cuda"), GPU, seconds=0.0)
    group_of(two[0], handle).barrier()
    assert handle.devices == [CPU]
