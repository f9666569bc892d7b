"""Timeouts of torch's groups: by backend, kept in step with the settings, released when the monitor
stops.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.constants import default_pg_timeout

from shardmesh.mesh.launch import process_groups
from shardmesh.mesh.launch.environment import REQUIRED
from shardmesh.mesh.launch.session import session
from shardmesh.mesh.monitor import timeouts
from shardmesh.mesh.settings import settings, watchdog

STALL_AND_A_MINUTE = timedelta(seconds=360)


class Backend:
    """Stands for one backend of a group; `options` as gloo's."""

    def __init__(self, name: str) -> None:
        self.name = lambda: name
        self.timeout: timedelta | None = None

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self.timeout = timeout


class Group:
    """Stands for one of torch's process groups, with these backends by device type."""

    def __init__(self, **backends: str) -> None:
        self.backends = {kind: Backend(name) for kind, name in backends.items()}
        self._device_types = [torch.device(kind) for kind in backends]

    def _get_backend(self, device: torch.device) -> Backend:
        return self.backends[device.type]

    @property
    def timeouts(self) -> dict[str, timedelta | None]:
        return {kind: backend.timeout for kind, backend in self.backends.items()}


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    before = settings().mode, settings().timeout
    managed = dict(timeouts._managed)
    timeouts._managed.clear()
    yield
    settings().mode, settings().timeout = before
    timeouts._managed.clear()
    timeouts._managed.update(managed)


@pytest.mark.parametrize(
    "backends", ["nccl", "cuda:nccl", "cpu:gloo,cuda:nccl", "xccl", "cpu:gloo,cuda:unknown"]
)
def test_groups_of_a_device_have_the_stall_time_and_a_minute(backends: str) -> None:
    assert timeouts.group_timeout(backends) == STALL_AND_A_MINUTE
    watchdog(timeout=5)
    assert timeouts.group_timeout(backends) == timedelta(seconds=65)
    settings().timeout = float("inf")
    assert timeouts.group_timeout(backends) == timeouts.ON_HOST


@pytest.mark.parametrize(
    "backends",
    ["gloo", "cpu:gloo", "cpu:gloo,cuda:gloo", "mpi", "cpu:fake,cuda:fake,hpu:fake,xpu:fake"],
)
def test_groups_of_the_host_have_practically_none(backends: str) -> None:
    assert timeouts.group_timeout(backends) == timeouts.ON_HOST


def test_torchs_own_apply_without_the_monitor() -> None:
    settings().mode = "off"
    assert [timeouts.group_timeout(backends) for backends in ("gloo", "nccl")] == [None, None]


def test_managed_timeouts_follow_the_settings() -> None:
    own = Group(cpu="gloo", cuda="nccl")
    default = Group(cpu="gloo", cuda="nccl")
    gloo = Group(cpu="gloo", cuda="gloo")
    for group in (own, default, gloo):
        timeouts.manage(group, is_own=group is own)

    def found() -> list[dict[str, timedelta | None]]:
        return [group.timeouts for group in (own, default, gloo)]

    def expected(device: timedelta) -> list[dict[str, timedelta]]:
        host = timeouts.ON_HOST
        return [
            {"cpu": host, "cuda": device},
            {"cpu": device, "cuda": device},
            {"cpu": host, "cuda": host},
        ]

    assert found() == expected(STALL_AND_A_MINUTE)
    watchdog(timeout=1000)
    assert found() == expected(timedelta(seconds=1060))
    with session(timeout=20):
        assert found() == expected(timedelta(seconds=80))
    assert found() == expected(timedelta(seconds=1060))


def test_timeouts_are_told() -> None:
    group: Any = Group(cpu="gloo", cuda="nccl")
    for backend, timeout in (("cpu", timeouts.ON_HOST), ("cuda", STALL_AND_A_MINUTE)):
        group.backends[backend].options = SimpleNamespace(_timeout=timeout)
    assert (
        timeouts.backends_text(group)
        == "cpu: gloo, waits without limit; cuda: nccl, 360 s; device bound: none"
    )
    group.bound_device_id = torch.device("cuda", 1)
    assert timeouts.backends_text(group).endswith("; device bound: cuda:1")
    assert timeouts.backends_text(Group(cpu="fake")) == "cpu: fake; device bound: none"


def test_released_timeouts_are_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    group, seen = Group(cuda="nccl"), []
    timeouts.manage(group, is_own=True)
    monkeypatch.setattr(
        distributed_c10d, "_set_pg_timeout", lambda timeout, handle: seen.append((timeout, handle))
    )
    timeouts.release()
    watchdog(timeout=1000)
    assert seen == [(default_pg_timeout, group)]
    assert group.timeouts == {"cuda": STALL_AND_A_MINUTE}


@pytest.mark.parametrize(
    ("backend", "expected"),
    [("nccl", STALL_AND_A_MINUTE), (None, STALL_AND_A_MINUTE), ("gloo", timeouts.ON_HOST)],
)
def test_the_default_group_is_started_with_them(
    backend: str | None, expected: timedelta, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Any] = []
    for name in REQUIRED:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(
        torch,
        "get_device_module",
        lambda _: SimpleNamespace(is_available=lambda: True, device_count=lambda: 1),
    )
    monkeypatch.setattr(dist, "is_backend_available", lambda _: True)
    monkeypatch.setattr(
        dist, "init_process_group", lambda *args, timeout, **_: given.append(timeout)
    )
    monkeypatch.setattr(timeouts, "manage", lambda handle, is_own: given.append(is_own))
    process_groups._start_default_group("cuda", backend)
    assert given == [expected, False]
