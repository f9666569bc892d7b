"""Which rank a process is and which device it uses: by launcher, by what it sees of the devices,
and by what the program has chosen.

torch itself reads CUDA_VISIBLE_DEVICES here, on a made-up machine of four devices.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from shardmesh.mesh import LaunchEnvironmentError, MeshError, init_device_mesh
from shardmesh.mesh.doctor.facts import Place
from shardmesh.mesh.launch import job_store, process_groups, rank_zero, rendezvous
from shardmesh.mesh.launch.environment import (
    LAUNCHERS,
    REQUIRED,
    complete_environment,
    hint_if_unconnected,
    launch_environment,
)
from shardmesh.mesh.launch.progress import Progress
from shardmesh.mesh.monitor import timeouts
from shardmesh.mesh.monitor.startup.rank_info import own_rank_info, shared_device

IDS = tuple(f"GPU-{letter * 8}-0000" for letter in "abcd")
HIDDEN = -1  # no device

MASTER = {"MASTER_ADDR": "node1", "MASTER_PORT": "29500"}
NUMBERS = {"RANK": "5", "WORLD_SIZE": "8"}
SRUN = {
    "SLURM_PROCID": "5",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
}
OPEN_MPI = dict(zip(LAUNCHERS[0][1:], ("5", "8", "1", "4"), strict=True))
MPICH = dict(zip(LAUNCHERS[1][1:], ("5", "8", "1", "4"), strict=True))
DAEMON = SRUN | {
    "SLURM_PROCID": "1",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
}

# Rank 5 of 8, the second of four processes on its host.
STARTED: dict[str, dict[str, str]] = {
    "torchrun": {**MASTER, **NUMBERS, "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"},
    "torchrun, started by srun": {
        **MASTER,
        **NUMBERS,
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "4",
        **DAEMON,
    },
    "srun": {**MASTER, **SRUN},
    "srun, with the variables of torch": {**MASTER, **NUMBERS, **SRUN},
    "srun with PMI": {**MASTER, **SRUN, "PMI_RANK": "5", "PMI_SIZE": "8"},
    "Open MPI": {**MASTER, **OPEN_MPI},
    "Open MPI on nodes of Slurm": {**MASTER, **OPEN_MPI, **DAEMON},
    "MPICH": {**MASTER, **MPICH},
    "MPICH on nodes of Slurm": {**MASTER, **MPICH, **DAEMON},
    "empty variables": {**MASTER, **SRUN, "RANK": "", "WORLD_SIZE": "", "LOCAL_RANK": ""},
}
BY_HAND = {**MASTER, **NUMBERS}


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A machine of four devices, as torch.cuda sees it; returns its state."""
    state: dict[str, Any] = {"current": 0, "initialized": False}
    for name in (
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "CUDA_VISIBLE_DEVICES",
        *REQUIRED,
        *(name for one in LAUNCHERS for name in one[1:]),
    ):
        monkeypatch.delenv(name, raising=False)
    stand_ins = {
        "_is_compiled": lambda: True,
        "_raw_device_count_nvml": lambda: len(IDS),
        "_raw_device_uuid_nvml": lambda: list(IDS),
        "_cached_device_count": None,
        "is_available": lambda: torch.cuda.device_count() > 0,
        "is_initialized": lambda: state["initialized"],
        "current_device": lambda: state["current"],
        "set_device": lambda index: state.update(current=index, initialized=True),
    }
    for name, value in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, value)
    # Of MIG: a process sees one part of a device.
    monkeypatch.setattr(torch._C, "_cuda_getDeviceCount", lambda: 1, raising=False)
    return state


def start(
    monkeypatch: pytest.MonkeyPatch, env: Mapping[str, str], visible: str | None = None
) -> None:
    for name, value in {
        **env,
        **({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}),
    }.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("name", STARTED)
def test_ranks_are_numbered_as_the_launcher_does(
    name: str, machine: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    env = STARTED[name]
    assert launch_environment(env) == (5, 8)
    place = Place.of(env)
    assert (place.rank, place.size, place.local_rank, place.local_size) == (5, 8, 1, 4)
    start(monkeypatch, env)
    assert rank_zero._ranks_of_this_host(5) == range(4, 8)
    process_groups._bind_device("cuda")
    assert machine["current"] == 1


# (CUDA_VISIBLE_DEVICES, the device of LOCAL_RANK=1, that of LOCAL_RANK=3); or the error's text
SEEN = [
    (None, 1, 3),
    ("0,1,2,3", 1, 3),
    ("3,2,1,0", 1, 3),
    ("2", 0, 0),
    ("2,", 0, 0),
    (
        "0,1,",
        1,
        r"LOCAL_RANK=3 but this process sees 2 cuda devices \(CUDA_VISIBLE_DEVICES='0,1,'\): start "
        r"at most 2",
    ),
    (" 1, 3", 1, "LOCAL_RANK=3 but this process sees 2 cuda devices"),
    ("0,9,1", 0, 0),  # devices end at one that does not exist
    ("0,-1,1", 0, 0),
    (",".join(IDS), 1, 3),
    (IDS[2], 0, 0),
    ("GPU-c", 0, 0),
    (f"{IDS[3]},{IDS[0]}", 1, "LOCAL_RANK=3 but this process sees 2 cuda devices"),
    ("MIG-1111,MIG-2222", 0, 0),
    ("", HIDDEN, HIDDEN),
    ("-1", HIDDEN, HIDDEN),
    ("0,0", HIDDEN, HIDDEN),  # torch and CUDA count a repeated device as none
    (f"{IDS[0]},{IDS[0]}", HIDDEN, HIDDEN),
    ("GPU-none", HIDDEN, HIDDEN),
]


@pytest.mark.parametrize(("visible", "second", "fourth"), SEEN)
def test_devices_that_a_process_sees(
    visible, second, fourth, machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    for local_rank, expected in (("1", second), ("3", fourth)):
        machine.update(current=0, initialized=False)
        start(monkeypatch, {**BY_HAND, "LOCAL_RANK": local_rank}, visible)
        if expected == HIDDEN:
            expected = (
                rf"finds no such device in this process: no cuda devices "
                rf"\(CUDA_VISIBLE_DEVICES='{visible}'\)"
            )
        if isinstance(expected, str):
            with pytest.raises(LaunchEnvironmentError, match=expected):
                process_groups._bind_device("cuda")
        else:
            process_groups._bind_device("cuda")
            assert machine["current"] == expected


@pytest.mark.parametrize(
    ("visible", "text"),
    [
        (None, "sees 4 cuda devices, so"),
        ("0,3", r"sees 2 cuda devices \(CUDA_VISIBLE_DEVICES='0,3'\)"),
    ],
)
def test_which_of_several_is_unknown_without_a_local_rank(
    visible, text, machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A launcher with other numbers says nothing about these ranks.
    start(monkeypatch, BY_HAND | DAEMON, visible)
    with pytest.raises(
        LaunchEnvironmentError, match=f"LOCAL_RANK is not set and this process {text}"
    ):
        process_groups._bind_device("cuda")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    process_groups._bind_device("cuda")
    assert not machine["initialized"]


def test_a_launcher_alone_makes_no_job() -> None:
    for env in (
        SRUN,
        OPEN_MPI,
        MPICH,
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "8"},
        {**SRUN, "SLURM_STEP_NUM_TASKS": "1"},
    ):
        assert launch_environment(env) is None
        assert complete_environment(env) == env
    with pytest.raises(LaunchEnvironmentError, match="but not RANK, WORLD_SIZE, MASTER_PORT"):
        launch_environment({**SRUN, "MASTER_ADDR": "node1"})


def test_processes_that_do_not_know_of_each_other_are_told_what_to_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start(monkeypatch, SRUN)
    with pytest.raises(
        MeshError,
        match=(
            r"the world has 1\. This process is number 5 of 8 that srun has started.*set "
            r"MASTER_ADDR"
        ),
    ):
        init_device_mesh("cpu", (8,))
    dist.destroy_process_group()
    assert hint_if_unconnected({**SRUN, **OPEN_MPI}).startswith(
        "This process is number 5 of 8 that mpirun has started"
    )
    assert hint_if_unconnected({}) == hint_if_unconnected({**MASTER, **SRUN}) == ""
    assert launch_environment(
        {**MASTER, **SRUN, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}
    ) == (0, 1)


@pytest.mark.parametrize(
    ("tasks", "node", "expected"),
    [("2(x3),1", "3", "1"), ("2(x3),1", "", None), ("4(x2)", "", "4"), ("4", "1", None)],
)
def test_tasks_of_a_node(tasks: str, node: str, expected: str | None) -> None:
    env = {**MASTER, **SRUN, "SLURM_STEP_TASKS_PER_NODE": tasks, "SLURM_NODEID": node}
    assert complete_environment(env).get("LOCAL_WORLD_SIZE") == expected


# -- what the program has chosen -------------------------------------------------------------------


def test_the_device_bound_to_the_default_group_is_used(
    machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(monkeypatch, BY_HAND | {"LOCAL_RANK": "1"})
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        group: Any = dist.group.WORLD
        group.bound_device_id = torch.device("cuda", 3)
        process_groups._bind_device("cuda")
        assert machine["current"] == 3
        assert process_groups.local_device("cuda") == torch.device("cuda", 3)
    finally:
        dist.destroy_process_group()


def test_a_device_that_the_program_has_chosen_is_kept(
    machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(monkeypatch, BY_HAND | {"LOCAL_RANK": "1"})
    torch.cuda.set_device(2)
    process_groups._bind_device("cuda")
    assert machine["current"] == 2
    torch.cuda.set_device(0)  # what is current by default may have been chosen or not
    process_groups._bind_device("cuda")
    assert machine["current"] == 1


def test_a_group_that_the_program_has_started_needs_a_choice_as_well(
    machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(monkeypatch, BY_HAND)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 8)
    with pytest.raises(
        LaunchEnvironmentError, match="LOCAL_RANK is not set and this process sees 4 cuda devices"
    ):
        process_groups._bind_device("cuda")
    torch.cuda.set_device(0)
    process_groups._bind_device("cuda")
    assert machine["current"] == 0


# -- the default process group ---------------------------------------------------------------------

STALL_AND_A_MINUTE = timedelta(seconds=360)


@pytest.mark.parametrize(
    ("device_type", "backend", "started", "timeout", "fits"),
    [
        ("cuda", None, "cpu:gloo,cuda:nccl", STALL_AND_A_MINUTE, {"cpu", "cuda"}),
        ("cuda", "cpu:gloo,cuda:nccl", "cpu:gloo,cuda:nccl", STALL_AND_A_MINUTE, {"cpu", "cuda"}),
        ("cuda", "nccl", "nccl", STALL_AND_A_MINUTE, {"cuda"}),
        ("cuda", "NCCL", "nccl", STALL_AND_A_MINUTE, {"cuda"}),
        ("cuda", "cuda:nccl", "cuda:nccl", STALL_AND_A_MINUTE, {"cuda"}),
        ("cuda", "gloo", "gloo", timeouts.ON_HOST, {"cpu", "cuda"}),
        ("cpu", None, "gloo", timeouts.ON_HOST, {"cpu", "cuda"}),
    ],
)
def test_backends_and_timeouts_of_the_default_group(
    device_type: str,
    backend: str | None,
    started: str,
    timeout: timedelta,
    fits: set[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: list[Any] = []
    monkeypatch.setattr(dist, "is_backend_available", lambda _: True)
    monkeypatch.setattr(
        dist,
        "init_process_group",
        lambda name, timeout, **options: given.extend((name, timeout, options.keys())),
    )
    monkeypatch.setattr(timeouts, "manage", lambda handle, is_own: None)
    process_groups._start_default_group(device_type, backend)
    assert given == [started, timeout, {"store", "rank", "world_size"}]  # no device is bound
    running: Any = dist.Backend(started)
    monkeypatch.setattr(
        dist, "get_backend_config", lambda: str(distributed_c10d.BackendConfig(running))
    )
    process_groups._check_backend(device_type, backend)
    for kind in ("cpu", "cuda"):
        if kind in fits:
            process_groups._check_backend(kind, None)
        else:
            with pytest.raises(
                MeshError,
                match=f'a mesh of device type "{kind}" does not fit the default process group',
            ):
                process_groups._check_backend(kind, None)


# -- one device for each rank ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device_type", "backend", "visible", "expected"),
    [
        ("cuda", "nccl", None, "uuid 1"),
        ("cuda", "cpu:gloo,cuda:nccl", "3,2", "uuid 1"),
        ("cuda", "nccl", "MIG-1,MIG-2", "MIG-2"),
        ("cuda", "cpu:gloo,cuda:gloo", None, ""),
        ("cpu", "cpu:gloo,cuda:nccl", None, ""),
    ],
)
def test_name_of_a_device(
    device_type, backend, visible, expected, machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    start(monkeypatch, {}, visible)
    machine["current"] = 1

    class Properties:
        uuid = "uuid 1"

    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda index: Properties() if index == 1 else None
    )
    assert process_groups._identity(device_type, backend) == expected


def test_ranks_that_share_a_device_are_named() -> None:
    def infos(*devices: str):
        return [
            own_rank_info(rank, {"WORLD_SIZE": "4"}, 0, {}, device)
            for rank, device in enumerate(devices)
        ]

    host = os.uname().nodename
    assert shared_device(infos("a", "b", "c", "d")) == shared_device(infos("", "", "", "")) == ""
    text = shared_device(infos("a", "b", "a", "a"))
    assert text.startswith(
        f"ranks share a device, but NCCL needs one for each:\n  ranks 0, 2, 3: device a of host "
        f"{host}\nStart at most"
    )
    assert shared_device([*infos("a"), replace(infos("a")[0], rank=1, host="another")]) == ""


def test_ranks_that_share_a_device_raise_the_same_error() -> None:
    store, address = dist.HashStore(), job_store.address_of(MASTER)
    infos = [own_rank_info(rank, {"WORLD_SIZE": "2"}, 0, {}, "GPU-a") for rank in range(2)]

    def error(rank: int) -> str:
        with pytest.raises(LaunchEnvironmentError) as caught:
            rendezvous.StoreRendezvous(
                store, infos[rank], Progress(rank, 60.0), address, rank == 0
            ).run()
        return str(caught.value)

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(error, range(2))) == [shared_device(infos)] * 2


def test_the_name_of_the_device_is_given_to_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[str] = []
    start(monkeypatch, {**MASTER, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "2"})

    class Properties:
        uuid = "uuid 2"

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Properties())
    monkeypatch.setattr(dist, "is_backend_available", lambda _: True)

    def stop(*args: Any, device: str) -> None:
        given.append(device)
        raise LaunchEnvironmentError("enough")

    monkeypatch.setattr(rendezvous, "rendezvous", stop)
    with pytest.raises(LaunchEnvironmentError, match="enough"):
        process_groups._start_default_group("cuda", "NCCL")
    assert given == ["uuid 2"]
