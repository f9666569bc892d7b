"""Groups of NCCL, as far as they can be tested without a GPU: barriers, timeouts, groups that some
ranks make.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardmesh as sm
from shardmesh.mesh import errors
from shardmesh.mesh.monitor import timeouts
from shardmesh.mesh.processes import process
from shardmesh.mesh.processes.process import ProcessGroup, ProcessWorld, process_world
from shardmesh.mesh.processes.torch_groups.works import TorchWork
from tests.mesh.comm.nccl_like import CPU, GPU, NcclLikeGroup, NcclLikeWork
from tests.mesh.monitor.driven_ranks import DrivenRank, driven_ranks

SOON_S = 60.0  # tells an answer from a hang

# -- barriers --------------------------------------------------------------------------------------


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
    assert (handle.devices, handle.is_aborted, handle.works[0].is_completed()) == (
        [GPU],
        False,
        True,
    )


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


# -- works -----------------------------------------------------------------------------------------


def test_a_work_keeps_its_buffers_until_it_has_been_waited_for() -> None:
    """Freed before, their memory could be given to a tensor of another stream. The NCCL-like world
    (nccl_world.py) relies on it.
    """
    x = torch.ones(2)
    alive, work = weakref.ref(x), TorchWork([NcclLikeWork(NcclLikeGroup(seconds=0.0))], (x,))
    del x
    assert alive() is not None
    work.wait()
    assert alive() is None


# -- groups ----------------------------------------------------------------------------------------


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
    """torch would split the default group's communicator, which waits for all ranks, also those
    that make no such group.
    """
    split: list[Any] = []
    monkeypatch.setattr(distributed_c10d, "_get_split_source", split.append)
    group: Any = bound_world.group(ranks)
    made = group.channel
    assert not split
    assert made.bound_device_id is None
    assert dist.get_process_group_ranks(made) == list(ranks)
    assert distributed_c10d._get_default_group().bound_device_id == GPU


def test_the_device_stays_bound_after_an_error(
    bound_world: ProcessWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no connection")

    monkeypatch.setattr(dist, "new_group", refuse)
    group: Any = bound_world.group((0, 1))
    with pytest.raises(RuntimeError, match="no connection"):
        _ = group.channel
    assert distributed_c10d._get_default_group().bound_device_id == GPU


@pytest.mark.parametrize(
    ("backends", "seconds"),
    [("cuda:nccl", 360.0), ("cpu:gloo,cuda:nccl", 360.0), ("cpu:gloo,cuda:gloo", 3650 * 86400.0)],
)
def test_groups_have_the_timeout_of_their_backends(
    backends: str,
    seconds: float,
    two: list[DrivenRank],
    bound_world: ProcessWorld,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: list[Any] = []
    bound_world.monitor = two[1].monitor
    monkeypatch.setattr(dist, "get_backend_config", lambda: backends)
    monkeypatch.setattr(
        process,
        "new_group",
        lambda ranks, job, timeout, *_: given.append(timeout) or NcclLikeGroup(),
    )
    monkeypatch.setattr(timeouts, "manage", lambda handle, is_own: given.append(is_own))
    group: Any = bound_world.group((0, 1))
    _ = group.channel
    bound_world.monitor = None
    assert given == [timedelta(seconds=seconds), True]


class Options:
    """Stands for `ProcessGroupNCCL.Options`."""

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream, self._timeout = is_high_priority_stream, timedelta(minutes=10)


@pytest.mark.parametrize("timeout", [None, timedelta(seconds=360)])
@pytest.mark.parametrize(
    ("default", "backends"),
    [
        ("cpu:gloo,cuda:nccl", "cuda:nccl"),
        ("nccl", None),
        ("cpu:gloo,cuda:gloo", None),
        ("gloo", None),
        ("cpu:gloo,xpu:xccl", "xpu:xccl"),
    ],
)
def test_nccl_has_streams_of_high_priority_and_no_gloo_beside_it(
    default: str,
    backends: str | None,
    timeout: timedelta | None,
    bound_world: ProcessWorld,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Gloo would connect each rank with each other as soon as the group is made."""
    given: dict[str, Any] = {}
    monkeypatch.setattr(dist, "get_backend_config", lambda: default)
    monkeypatch.setattr(distributed_c10d, "default_pg_nccl_timeout", timedelta(minutes=10))
    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=Options), raising=False)
    monkeypatch.setattr(
        dist, "new_group", lambda ranks, **kwargs: given.update(kwargs) or NcclLikeGroup()
    )
    monkeypatch.setattr(timeouts, "group_timeout", lambda _: timeout)
    monkeypatch.setattr(timeouts, "manage", lambda handle, is_own: None)
    if timeout is not None:
        monkeypatch.setattr(bound_world, "monitor", object())
    group: Any = bound_world.group((0, 1))
    _ = group.channel
    monkeypatch.setattr(bound_world, "monitor", None)
    assert (given["backend"], given["timeout"]) == (backends, timeout)
    options = given["pg_options"]
    assert (options is not None) == ("nccl" in default)
    if options is not None:
        assert options.is_high_priority_stream
        # torch warns if it differs from the group's
        assert options._timeout == (
            timeout or distributed_c10d._get_default_timeout(dist.Backend(backends or default))
        )


def used_on_the_host() -> list[Any]:
    """Return the devices of a group's backends before and after it is used on the CPU, and the
    results.
    """
    mesh = sm.init_device_mesh("cpu", (2, 1), axis_names=("a", "b"), backend="cpu:gloo,cuda:fake")
    group: Any = mesh.group("a")
    found: list[Any] = [sorted(device.type for device in group.channel._device_types)]
    x = torch.tensor([1.0 + mesh.get_rank()])
    group.all_reduce(x)
    y, rest = torch.empty(2), torch.empty(1)
    group.all_gather(y, x + mesh.get_rank())
    group.reduce_scatter(rest, y)
    objects = group.all_gather_object(mesh.get_rank())
    group.barrier()
    found += [x.tolist(), y.tolist(), rest.item(), objects]
    found.append(sorted(device.type for device in group.channel._device_types))
    sent = torch.empty(1)
    group.permute(sent, x + mesh.get_rank(), dst=1 - group.rank, src=1 - group.rank)
    dist.all_reduce(x, group=mesh.get_group("a"))
    return [*found, sent.item(), x.item()]


def test_a_group_has_gloo_once_it_is_used_on_the_host() -> None:
    first = [["cuda"], [3.0], [3.0, 4.0], 6.0, [0, 1], ["cpu", "cuda"], 4.0, 6.0]
    second = [["cuda"], [3.0], [3.0, 4.0], 8.0, [0, 1], ["cpu", "cuda"], 3.0, 6.0]
    assert sm.launch(used_on_the_host, 2) == [first, second]
