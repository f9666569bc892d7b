"""Environments that are wrong: each ends in one LaunchEnvironmentError of one line, at once, before
anything of its size is made.
"""

# ruff: noqa: RUF001

from __future__ import annotations

import os
import socket
import threading
import time
import tracemalloc
from typing import Any

import pytest

from shardmesh.mesh.doctor.facts import HIDDEN, Place, relevant
from shardmesh.mesh.doctor.job_checks import launcher, settings
from shardmesh.mesh.errors import LaunchEnvironmentError
from shardmesh.mesh.launch import job_store
from shardmesh.mesh.launch.environment import (
    complete_environment,
    device_index,
    launch_environment,
    launchers_of,
)
from shardmesh.mesh.launch.progress import Progress
from shardmesh.mesh.monitor.startup.rank_info import what_must_agree
from shardmesh.mesh.settings import check_environment, from_environment
from shardmesh.mesh.topology import torchrun_node_size
from tests.forked import Forked, by_hand, free_port
from tests.mesh.monitor.healthy_host import facts
from tests.mesh.monitor.startup.starts import Rank, start

JOB = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
NO_NUMBERS = {
    "text": "x",
    "negative": "-1",
    "plus": "+1",
    "float": "1.0",
    "exponent": "1e3",
    "hex": "0x1",
    "spaces": " 1",
    "newline": "1\n",
    "underscore": "1_0",
    "Arabic": "١",
    "full width": "１",
    "Devanagari": "१",
    "superscript": "²",
    "bold": "𝟏",
    "long": "1" * 5000,
    "20 digits": "9" * 20,
    "escapes": "\x1b[2J",
    "list": "0,1",
    "quotes": "'1'",
}
NUMBERS = ("RANK", "WORLD_SIZE", "MASTER_PORT", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
WRONG: dict[str, dict[str, str]] = {
    **{
        f"{name} is {what}": JOB | {name: value}
        for name in NUMBERS
        for what, value in NO_NUMBERS.items()
    },
    "more ranks than torch takes": JOB | {"WORLD_SIZE": str(2**31)},
    "more ranks than any job": JOB | {"WORLD_SIZE": "1048577"},
    "a rank that is too large": JOB | {"RANK": "2"},
    "a port that is too large": JOB | {"MASTER_PORT": "65536"},
    "a port of 32 bits": JOB | {"MASTER_PORT": str(2**32)},
    "port 0": JOB | {"MASTER_PORT": "0"},
    "an address with a newline": JOB | {"MASTER_ADDR": "a\nb"},
    "an address with escapes": JOB | {"MASTER_ADDR": "\x1b]0;x\x07"},
    "a long address": JOB | {"MASTER_ADDR": "a" * 5000},
    **{
        f"without {name}": {key: value for key, value in JOB.items() if key != name} for name in JOB
    },
}
SETTINGS: dict[str, dict[str, str]] = {
    **{
        f"{name}={value!r}": {name: value}
        for name in (
            "SHARDMESH_STALL_WARN_S",
            "SHARDMESH_STALL_TIMEOUT_S",
            "SHARDMESH_EXIT_S",
            "SHARDMESH_HOST_LOST_S",
        )
        for value in ("x", "-1", "nan", "١٢", "", "0x10", "\x1b[2J")
    },
    "the mode": {"SHARDMESH_MONITOR": "yes" * 1000},
    "torch's calls": {"SHARDMESH_MONITOR_TORCH": "1"},
}


def test_there_are_many() -> None:
    assert len(WRONG) + len(SETTINGS) >= 130


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_environment_is_one_line(name: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(LaunchEnvironmentError) as found:
            launch_environment(WRONG[name])
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    text = str(found.value)
    assert text.isprintable()
    assert len(text) < 6000
    assert Place.of(WRONG[name]).size >= 1  # the doctor goes on, and reports it
    assert launcher(facts(relevant(WRONG[name]))).status == "fault"


@pytest.mark.parametrize("name", SETTINGS)
def test_a_wrong_setting_is_one_line_and_reported_by_the_doctor(name: str) -> None:
    with pytest.raises(LaunchEnvironmentError) as found:
        from_environment(SETTINGS[name])
    assert str(found.value).isprintable()
    assert len(str(found.value)) < 300
    assert settings(facts(SETTINGS[name])).status == "fault"


def test_a_wrong_setting_ends_the_start_and_not_the_import(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDMESH_MONITOR", "yes")
    with pytest.raises(LaunchEnvironmentError, match="SHARDMESH_MONITOR='yes'"):
        check_environment()


@pytest.mark.parametrize("value", NO_NUMBERS.values(), ids=NO_NUMBERS)
def test_launchers_numbers_that_are_none(value: str) -> None:
    assert launchers_of({"SLURM_PROCID": value, "SLURM_STEP_NUM_TASKS": "2"}) == []
    assert launchers_of({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": value}) == []
    assert torchrun_node_size(4, {"LOCAL_WORLD_SIZE": value}) is None
    with pytest.raises(LaunchEnvironmentError):
        device_index({"LOCAL_RANK": value}, "cuda", 2)


@pytest.mark.parametrize(
    "tasks",
    ["4(x1000000000)", "4(x99999999999999)", "4(x0)", "x", "(x2)", "4(x٢)", ",,,", "4" * 5000],
    ids=range(8),
)
def test_tasks_per_node_are_not_written_out(tasks: str) -> None:
    env = JOB | {
        "SLURM_PROCID": "0",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": tasks,
        "SLURM_NODEID": "1",
    }
    since = time.monotonic()
    complete_environment(env)
    assert time.monotonic() - since < 10


def test_tasks_per_node() -> None:
    env = JOB | {
        "SLURM_PROCID": "0",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "4(x2),3",
    }
    assert [
        complete_environment(env | {"SLURM_NODEID": str(node)}).get("LOCAL_WORLD_SIZE")
        for node in range(4)
    ] == ["4", "4", "3", None]


# -- secrets ---------------------------------------------------------------------------------------

SECRETS = [
    "SLURM_JWT",
    "NCCL_API_KEY",
    "TORCH_HUB_TOKEN",
    "SHARDMESH_SECRET",
    "OMPI_COMM_PASSWORD",
    "MASTER_AUTH",
    "CUDA_LICENSE_KEY",
]


@pytest.mark.parametrize("name", SECRETS)
def test_secrets_are_neither_shown_nor_sent(name: str) -> None:
    env = JOB | {name: "hunter2", name.lower(): "hunter2"}
    assert "hunter2" not in str(relevant(env).values())
    assert relevant(env)[name] == HIDDEN
    assert "hunter2" not in settings(facts(relevant(env))).facts
    assert "hunter2" not in str(what_must_agree(2, "cpu", "gloo", env))


# -- the address -----------------------------------------------------------------------------------


def test_an_address_that_does_not_resolve_is_said_soon(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_store, "addresses", lambda name: ())
    address = job_store.Address("no-such-host.invalid", free_port(), False)
    since = time.monotonic()
    with pytest.raises(LaunchEnvironmentError, match=r"'no-such-host\.invalid' does not resolve"):
        job_store.open_store(address, 0, 2, Progress(0, 60.0))
    assert time.monotonic() - since < 10
    with pytest.raises(LaunchEnvironmentError, match=r"'no-such-host\.invalid' does not resolve"):
        job_store.open_store(address, 1, 2, Progress(1, 0.5))
    assert capfd.readouterr().err.count("'no-such-host.invalid' does not resolve") == 1


def test_a_resolver_that_does_not_answer_is_the_reason(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(job_store, "_SLOW_LOOKUP_S", 0.05)
    monkeypatch.setattr(job_store, "_ANSWER_S", 0.5)
    monkeypatch.setattr(job_store.socket, "getnameinfo", lambda *_: time.sleep(1.0))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = job_store.Address("127.0.0.1", silent.getsockname()[1], False)
        with pytest.raises(LaunchEnvironmentError, match="the resolver does not answer"):
            job_store.open_store(address, 1, 2, Progress(1, 2.0))


@pytest.mark.xdist_group("processes")
def test_strays_do_not_keep_a_job_from_starting(forked: Forked) -> None:
    envs = by_hand(2)
    port = int(envs[0]["MASTER_PORT"])
    strays: list[Any] = []

    def come() -> None:
        deadline = time.monotonic() + 80
        while len(strays) < 300 and time.monotonic() < deadline:
            try:
                strays.append(socket.create_connection(("127.0.0.1", port), 1))
            except OSError:
                time.sleep(0.05)

    thread = threading.Thread(target=come)
    thread.start()
    try:
        outcomes = start(forked, [envs[0], Rank(envs[1], delay=3.0)])
        assert [outcome.text for outcome in outcomes] == ["", ""]
        assert len(strays) == 300
    finally:
        thread.join()
        for stray in strays:
            stray.close()
    assert os.environ.get("RANK") is None
