"""Starting the world: the launch environment, the default group and devices, in this process,
without workers.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardmesh.mesh import (
    DeviceMesh,
    LaunchEnvironmentError,
    MeshError,
    current_world,
    init_device_mesh,
)
from shardmesh.mesh.launch import process_groups
from shardmesh.mesh.launch.environment import REQUIRED, launch_environment

WHOLE = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in (*REQUIRED, "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def set_environment(monkeypatch: pytest.MonkeyPatch, **values: str) -> None:
    for name, value in values.items():
        monkeypatch.setenv(name, value)


def free_port() -> int:
    with socket.create_server(("localhost", 0)) as server:
        return server.getsockname()[1]


def test_plain_python_is_a_world_of_one() -> None:
    assert current_world().size == 1
    mesh = init_device_mesh("cpu", (1, 1), axis_names=("dp", "tp"))
    assert (mesh.world.size, mesh.coordinate, dist.get_world_size(), dist.get_backend()) == (
        1,
        (0, 0),
        1,
        "gloo",
    )
    x = torch.ones(2)
    mesh.group(("dp", "tp")).all_reduce(x)
    dist.all_reduce(x, group=mesh.get_group("tp"))
    assert x.tolist() == [1, 1]
    with pytest.raises(
        MeshError,
        match=r"\(axis_0=2\) needs 2 ranks, but the world has 1\. Either start 2 processes",
    ):
        init_device_mesh("cpu", (2,))


def test_the_world_follows_the_default_group() -> None:
    before = init_device_mesh("cpu", (1,))
    assert init_device_mesh("cpu", (1,)) is before
    group = before.group()
    assert group.handle is dist.group.WORLD  # type: ignore[attr-defined]
    dist.destroy_process_group()
    assert current_world() is not before.world
    with pytest.raises(LaunchEnvironmentError, match="was destroyed"):
        before.get_group()
    after = init_device_mesh("cpu", (1,))
    assert after is not before
    assert after == before
    assert after.get_group() is dist.group.WORLD


def test_the_environment_starts_the_default_group(monkeypatch: pytest.MonkeyPatch) -> None:
    set_environment(
        monkeypatch, RANK="0", WORLD_SIZE="1", MASTER_ADDR="localhost", MASTER_PORT=str(free_port())
    )
    assert DeviceMesh("cpu", [0]).world is current_world()
    assert dist.is_initialized()


def test_partial_environment_raises() -> None:
    assert launch_environment({}) is None
    assert launch_environment(WHOLE) == (1, 2)


@pytest.mark.parametrize("name", REQUIRED)
def test_a_missing_variable_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rest = {k: v for k, v in WHOLE.items() if k != name}
    set_environment(monkeypatch, **rest)
    with pytest.raises(
        LaunchEnvironmentError, match=f"but not {name}. Start the program with torchrun"
    ) as caught:
        init_device_mesh("cpu", (2,))
    assert all(f"{k}={v}" in str(caught.value) for k, v in rest.items())


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"RANK": "2"}, "RANK=2 with WORLD_SIZE=2: ranks go from 0"),
        ({"RANK": "-1"}, "RANK='-1': it must be a whole number"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE='two'"),
        ({"MASTER_PORT": "123456"}, "MASTER_PORT=123456"),
    ],
)
def test_invalid_variables_raise(values: dict[str, str], message: str) -> None:
    with pytest.raises(LaunchEnvironmentError, match=message):
        launch_environment(WHOLE | values)


def test_a_port_in_use_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
        set_environment(
            monkeypatch, RANK="0", WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT=str(port)
        )
        with pytest.raises(
            LaunchEnvironmentError,
            match=rf"MASTER_PORT={port}: the port is in use by .* \(process {os.getpid()}\)",
        ):
            init_device_mesh("cpu", (2,))


def test_the_fake_backend_counts_groups() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=8)
    mesh = init_device_mesh("cpu", (2, 2, 2), axis_names=("a", "b", "c"))
    x = torch.ones(2)
    for axes in (*mesh.axis_names, ("a", "c"), mesh.axis_names):
        mesh.group(axes).all_reduce(x)
    out = torch.empty(16)
    mesh.group().all_gather(out, x)
    assert mesh.coordinate == (1, 0, 1)
    assert mesh.to_torch().shape == (2, 2, 2)


def test_backend_that_differs_from_the_running_group_raises() -> None:
    init_device_mesh("cpu", (1,), backend="gloo")
    init_device_mesh("cpu", (1,), backend="cpu:gloo")
    with pytest.raises(
        MeshError, match=r"backend='nccl', but the default process group exists already.*gloo"
    ):
        init_device_mesh("cpu", (1,), backend="nccl")


class Accelerator:
    """Stands for torch.cuda on a machine with four devices."""

    def __init__(self) -> None:
        self.current, self.count = 0, 4

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return self.count

    def set_device(self, index: int) -> None:
        self.current = index


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> Accelerator:
    found = Accelerator()
    monkeypatch.setattr(torch, "get_device_module", lambda device_type: found)
    return found


def test_the_device_is_bound_by_local_rank(
    accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_environment(monkeypatch, **WHOLE | {"RANK": "7", "WORLD_SIZE": "8"}, LOCAL_RANK="3")
    process_groups._bind_device("cuda")
    assert accelerator.current == 3


@pytest.mark.parametrize("local_rank", ["0", "3"])
def test_the_only_visible_device_is_bound_on_every_rank(
    local_rank: str, accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    accelerator.current, accelerator.count = -1, 1
    set_environment(monkeypatch, **WHOLE, LOCAL_RANK=local_rank)
    process_groups._bind_device("cuda")
    assert accelerator.current == 0


@pytest.mark.parametrize(
    ("local_rank", "message"),
    [("4", "LOCAL_RANK=4 but this process sees 4 cuda devices"), ("", "LOCAL_RANK is not set")],
)
def test_devices_that_cannot_be_bound_raise(
    local_rank: str, message: str, accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_environment(monkeypatch, **WHOLE)
    if local_rank:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    with pytest.raises(LaunchEnvironmentError, match=message):
        process_groups._bind_device("cuda")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_missing_device_raises() -> None:
    with pytest.raises(
        LaunchEnvironmentError,
        match=r'"cuda": torch .* finds no such device in this process: no cuda devices',
    ):
        init_device_mesh("cuda", (1,))


def test_device_type_without_a_backend_raises(
    accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    dist.init_process_group("cpu:gloo", store=dist.HashStore(), rank=0, world_size=1)
    with pytest.raises(
        MeshError, match=r'device type "cuda" does not fit the default process group'
    ):
        init_device_mesh("cuda", (1,))
