"""Startup faults: each is named on every rank within seconds, with the rank that caused it."""

from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from types import SimpleNamespace
from typing import cast

import pytest
import torch.distributed as dist

from shardmesh.mesh.comm.world import World
from shardmesh.mesh.errors import LaunchEnvironmentError, MeshMismatchError
from shardmesh.mesh.launch import job_store
from shardmesh.mesh.launch.progress import Progress
from shardmesh.mesh.monitor.startup import same_mesh
from shardmesh.mesh.monitor.startup.rank_info import (
    RankInfo,
    disagreement,
    file_store_fault,
    own_rank_info,
    what_must_agree,
)
from shardmesh.mesh.monitor.store_keys import StoreKeys
from tests.forked import Forked, by_hand, free_port
from tests.mesh.monitor.startup import starts
from tests.mesh.monitor.startup.starts import Rank, StartOutcome

Start = Callable[[Sequence[Rank | dict[str, str]]], list[StartOutcome]]


@pytest.fixture
def start(forked: Forked) -> Start:
    return partial(starts.start, forked)


@pytest.fixture
def launcher() -> dist.TCPStore:
    """A store like torchrun's."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def by_launcher(size: int, launcher: dist.TCPStore, **common: str) -> list[dict[str, str]]:
    return by_hand(size, launcher.port, TORCHELASTIC_USE_AGENT_STORE="True", **common)


def the_error(outcomes: list[StartOutcome]) -> str:
    """Return the error that all ranks raised. It is not a timeout, which has another text."""
    texts = {outcome.text for outcome in outcomes}
    assert len(texts) == 1, texts
    (text,) = texts
    assert text.startswith("LaunchEnvironmentError: ")
    return text.removeprefix("LaunchEnvironmentError: ")


def assert_all_started(outcomes: list[StartOutcome]) -> None:
    assert [outcome.text for outcome in outcomes] == [""] * len(outcomes)


def test_matching_ranks_start(start: Start) -> None:
    assert_all_started(start(by_hand(4)))


def test_a_default_group_can_be_started_again(start: Start, launcher: dist.TCPStore) -> None:
    assert_all_started(start([Rank(env, again=True) for env in by_hand(2)]))
    assert_all_started(start([Rank(env, again=True) for env in by_launcher(2, launcher)]))


@pytest.mark.one_in(4)
@pytest.mark.parametrize("rank", [0, 1])
def test_two_processes_of_one_rank(rank: int, start: Start) -> None:
    envs = by_hand(3)
    # Not all ranks are there before the second.
    outcomes = start([*envs[:2], Rank(envs[2], delay=1.0), dict(envs[rank])])
    text = the_error(outcomes)
    assert text.startswith(
        f"two processes are RANK={rank} at MASTER_ADDR=127.0.0.1, "
        f"MASTER_PORT={envs[0]['MASTER_PORT']}: "
    )
    for outcome in (outcomes[rank], outcomes[3]):
        assert f"process {outcome.pid} on host {socket.gethostname()}" in text


def test_a_second_process_of_a_rank_of_a_job_that_runs(start: Start) -> None:
    envs = by_hand(2)
    *job, late = start([*envs, Rank(dict(envs[1]), delay=3.0)])
    assert_all_started(job)
    assert "two processes are RANK=1" in late.text
    assert f"The job has started already, with process {job[1].pid}" in late.text


def test_a_rank_beyond_the_world(start: Start) -> None:
    envs = by_hand(3)
    envs[2]["RANK"] = "5"
    outcomes = start(envs)
    text = the_error(outcomes)
    assert text.startswith(f"rank 5 (process {outcomes[2].pid} on host ")
    assert "cannot start: RANK=5 with WORLD_SIZE=3: ranks go from 0 to WORLD_SIZE - 1" in text


def test_rank_that_serves_the_store_cannot_start(start: Start) -> None:
    envs = by_hand(3)
    envs[0]["WORLD_SIZE"] = "three"
    text = the_error(start(envs))
    assert text.startswith("rank 0 (process ")
    assert "cannot start: WORLD_SIZE='three': it must be a whole number" in text


@pytest.mark.one_in(4)
@pytest.mark.parametrize(("outlier", "size"), [(2, "8"), (0, "2")])
def test_another_world_size(outlier: int, size: str, start: Start) -> None:
    envs = by_hand(4)
    envs[outlier]["WORLD_SIZE"] = size
    outcomes = start(envs)
    text = the_error(outcomes)
    rest = ", ".join(str(rank) for rank in range(4) if rank != outlier)
    assert text.startswith(
        f"rank {outlier} does not fit the others:\n  WORLD_SIZE: rank {outlier} has {size}, ranks "
        f"{rest} have 4"
    )
    assert f"rank {outlier} is process {outcomes[outlier].pid} on host" in text


def test_another_version_of_torch_and_another_setting(start: Start) -> None:
    envs = by_hand(3)
    envs[0]["SHARDMESH_STALL_WARN_S"] = "7"
    text = the_error(
        start([Rank(env, torch="2.0.1" if env["RANK"] == "2" else "2.99") for env in envs])
    )
    assert text.startswith(
        "ranks 0, 2 do not fit the others:\n  torch: rank 2 has 2.0.1, ranks 0, 1 have 2.99\n"
    )
    assert "SHARDMESH_STALL_WARN_S: rank 0 has 7, ranks 1, 2 have nothing" in text


def test_a_tie_is_a_tie(start: Start) -> None:
    envs = by_hand(2)
    envs[0]["TORCH_DISTRIBUTED_DEBUG"] = "DETAIL"
    text = the_error(start(envs))
    assert text.startswith(
        "the ranks do not agree:\n  TORCH_DISTRIBUTED_DEBUG: rank 0 has DETAIL, rank 1 has nothing "
        "(no majority)"
    )


def test_missing_ranks_are_named(start: Start) -> None:
    outcomes = start([Rank(env, timeout=2.0) for env in by_hand(4)[:2]])
    text = the_error(outcomes)
    assert text.startswith("ranks 2, 3 of 4 did not come to MASTER_ADDR=127.0.0.1, MASTER_PORT=")
    assert all(
        re.search(r"^waiting for ranks 2, 3 of 4 \(\d s\)$", outcome.said, re.MULTILINE)
        for outcome in outcomes
    )


def test_rank_0_is_missing(start: Start) -> None:
    (outcome,) = start([Rank(by_hand(2)[1], timeout=1.0)])
    assert "rank 1 cannot reach rank 0 at MASTER_ADDR=127.0.0.1" in outcome.text
    assert "waiting for rank 0 of 2 at MASTER_ADDR=127.0.0.1" in outcome.said


def test_a_rank_of_another_job(start: Start, launcher: dist.TCPStore) -> None:
    ours = by_launcher(2, launcher, TORCHELASTIC_RUN_ID="ours")
    theirs = by_launcher(2, launcher, TORCHELASTIC_RUN_ID="theirs")
    first, second, stray = start([ours[0], Rank(ours[1], delay=5.0), Rank(theirs[1], delay=2.5)])
    assert_all_started([first, second])
    assert "belongs to job 'ours' (rank 0, process" in stray.text
    assert "one of job 'theirs'" in stray.text
    assert f"rank 1 of job 'theirs' (process {stray.pid} on host" in first.said


def test_another_job_by_hand_on_one_port(start: Start) -> None:
    envs = by_hand(2)
    *job, intruder, stray = start([*envs, *(Rank(dict(env), delay=3.0) for env in envs)])
    assert_all_started(job)
    assert all(
        "The job has started already, with process" in late.text for late in (intruder, stray)
    )


def test_processes_restarted_by_torchrun(start: Start, launcher: dist.TCPStore) -> None:
    """Keys that an attempt without rank 2 left in the launcher's store do not affect the next
    attempt.
    """
    envs = by_launcher(3, launcher, TORCHELASTIC_MAX_RESTARTS="1", TORCHELASTIC_RUN_ID="job")
    died = start([Rank(env, dies=1.0) for env in envs[:2]])
    assert all("has died" in outcome.text for outcome in died)
    assert_all_started(start([Rank(envs[0], delay=0.5), Rank(envs[1], delay=1.0), envs[2]]))
    assert_all_started(start(envs))


def test_port_is_used_by_another_program(start: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        (outcome,) = start(by_hand(2, server.getsockname()[1])[:1])
    assert "the port is in use by " in outcome.text


def test_mesh_that_a_rank_already_has_is_not_new(start: Start) -> None:
    shapes = [[4], [2, 2], [4, 1]]
    again = [[4], [4], [2, 2], [4], [4, 1], [2, 2], [4, 1]]
    assert_all_started(
        start([Rank(env, shapes=again if env["RANK"] == "2" else shapes) for env in by_hand(4)])
    )


def test_ranks_that_make_another_mesh(start: Start) -> None:
    outcomes = start(
        [Rank(env, shapes=[[4], [4, 1] if env["RANK"] == "2" else [2, 2]]) for env in by_hand(4)]
    )
    texts = {outcome.text for outcome in outcomes}
    assert len(texts) == 1
    (text,) = texts
    assert text.startswith(
        "MeshMismatchError: rank 2 made another mesh than ranks 0, 1, 3 as mesh 2 of the program: "
        "they differ in"
    )
    assert "they differ in shape." in text
    assert "rank 2: DeviceMesh(cpu, axis_0=4, axis_1=1) at " in text


def test_meshes_in_another_order(start: Start) -> None:
    outcomes = start(
        [
            Rank(env, shapes=[[2, 1], [1, 2]][:: 1 if env["RANK"] == "0" else -1])
            for env in by_hand(2)
        ]
    )
    assert all(
        "the ranks made different meshes as mesh 1 of the program" in outcome.text
        for outcome in outcomes
    )


# ---------------------------------------------------------------------------------- in this process


def test_votes_that_decide_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks 0 and 2 differ: none of them is the outlier before another rank has come."""
    monkeypatch.setattr(same_mesh, "_DECIDED_S", 0.05)
    keys = StoreKeys(dist.HashStore(), "meshes")

    def mesh_call(rank: int) -> same_mesh.MeshCall:
        fields = dict.fromkeys(same_mesh._FIELDS, [4, 1] if rank == 2 else [2, 2])
        return same_mesh.MeshCall(rank, "mesh", fields, "train.py:1")

    def append(*ranks: int) -> None:
        for rank in ranks:
            keys.append("made", json.dumps(asdict(mesh_call(rank))) + "\n")

    append(0)
    keys.set("first", json.dumps(mesh_call(0).fields))
    others = threading.Timer(0.3, append, (1, 3))
    others.start()
    outlier, world = mesh_call(2), cast(World, SimpleNamespace(size=4, monitor=None))
    with pytest.raises(MeshMismatchError, match=r"rank 2 made another mesh than ranks 0, 1, 3 "):
        same_mesh._compare(world, keys, json.dumps(outlier.fields), outlier, 1)
    others.join()


def info(rank: int, **alike: str) -> RankInfo:
    return own_rank_info(rank, {"WORLD_SIZE": "4", **alike}, 0, {})


def test_most_common_value_wins() -> None:
    assert disagreement([info(rank, x="1") for rank in range(4)]) == ""
    text = disagreement([info(0, x="1"), info(1, x="2"), info(2, x="1"), info(3, x="3")])
    assert (
        "ranks 1, 3 do not fit the others:\n  x: rank 1 has 2, rank 3 has 3, ranks 0, 2 have 1\n"
        in text
    )


def test_ranks_that_have_no_vote_are_named() -> None:
    assert "  ranks 2, 3 had not come yet\n" in disagreement(
        [info(0, x="1"), info(1, x="2")], missing=[2, 3]
    )


def test_values_that_may_differ_are_not_compared() -> None:
    env = {
        "NCCL_ALGO": "Ring",
        "NCCL_SOCKET_IFNAME": "eth7",
        "SHARDMESH_MONITOR": "on",
        "SHARDMESH_WATCH_DIR": "/x",
        "PYTHONHASHSEED": "1",
    }
    found = what_must_agree(2, "cpu", "gloo", env)
    assert list(found) == [
        "WORLD_SIZE",
        "shardmesh",
        "torch",
        "Python",
        "device type",
        "backend",
        "NCCL_ALGO",
        "SHARDMESH_MONITOR",
    ]


def test_file_store_of_a_killed_job(tmp_path) -> None:
    store = dist.FileStore(str(tmp_path / "store"), 2)
    assert file_store_fault(store, 0) == ""
    assert file_store_fault(store, 0) == ""  # this process, again
    # No process has that number.
    other = RankInfo(1, "host", 2**22 + 5, info(0).machine, 1, 0, "", {})
    store.set("shardmesh/file/1", other.to_json())
    assert (
        "process 4194309 on host host has ended, so the file was left by a job that was killed"
        in file_store_fault(store, 1)
    )


def test_port_without_a_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_store, "_ANSWER_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = job_store.Address("127.0.0.1", server.getsockname()[1], False)
        with pytest.raises(
            LaunchEnvironmentError, match=r"is not a torch\.distributed store: it is "
        ):
            job_store.open_store(address, 1, 2, Progress(1, 5.0))


def test_host_without_an_address() -> None:
    address = job_store.Address("no-such-host.invalid", free_port(), True)
    with pytest.raises(
        LaunchEnvironmentError,
        match=r"rank 1 cannot reach the launcher's store at MASTER_ADDR=no-such-host\.invalid",
    ):
        job_store.open_store(address, 1, 2, Progress(1, 0.1))
