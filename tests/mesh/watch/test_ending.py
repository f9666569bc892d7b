"""After a verdict every process ends, by itself and soon, whoever started it and whatever it does; and nobody else is ended."""

from __future__ import annotations

import signal
from typing import Any

import pytest
import torch.distributed as dist

from shardmesh.mesh.errors import WatchError
from shardmesh.mesh.watch import ending
from shardmesh.mesh.watch.page import H
from shardmesh.mesh.watch.settings import settings
from shardmesh.mesh.watch.verdict import Verdict
from tests.mesh.watch import forked_ranks as programs
from tests.mesh.watch.forked import Forked, statuses
from tests.mesh.watch.hands import Hand, played


@pytest.fixture
def two(tmp_path) -> list[Hand]:
    return played(tmp_path, 2)


def test_programs_that_swallow_the_error_are_ended(forked: Forked) -> None:
    ended = forked(programs.swallows, 4, SHARDMESH_EXIT_S="1")
    assert statuses(ended) == [1] * 4
    for rank in (0, 1, 3):
        output = ended[rank].output
        assert output.count("caught") > 1
        assert f"shardmesh: rank {rank} is ended 1 s after its job failed (SHARDMESH_EXIT_S), here:" in output
        assert output.rstrip().endswith("ValueError: no more data")  # the verdict is the last word


def test_programs_that_leave_the_job_are_not(forked: Forked) -> None:
    ended = forked(programs.goes_on_alone, 4, SHARDMESH_EXIT_S="1")
    assert statuses(ended) == [0, 0, 1, 0]
    assert ["went on" in rank.output for rank in ended] == [True, True, False, True]


@pytest.mark.parametrize("how", ["thread", "asynchronous", "raw", "destroyed", "destroyed and a thread"])
def test_nothing_keeps_a_process_at_its_end(forked: Forked, how: str) -> None:
    ended = forked(programs.waits_at_exit, 4, how, SHARDMESH_EXIT_S="2")
    assert statuses(ended) == [1] * 4
    assert all("StallError" in rank.output for rank in ended)


@pytest.mark.parametrize("how", ["stopped", "computes"])
def test_a_process_that_cannot_end_itself_is_killed_by_another(forked: Forked, how: str) -> None:
    ended = forked(programs.cannot_end, 4, how, SHARDMESH_EXIT_S="2")
    assert statuses(ended) == [1, 1, -signal.SIGKILL, 1]
    assert "rank 2 does not react and is killed" in ended[0].output


def test_who_is_lost_is_the_last_word_of_a_broken_connection(forked: Forked) -> None:
    ended = forked(programs.dies_in_a_raw_collective, 4, SHARDMESH_GUARD_TORCH="off")
    assert statuses(ended) == [1, 1, -signal.SIGKILL, 1]
    for rank in (0, 1, 3):
        last = ended[rank].output.rpartition("rank 2 died:")[2]
        assert last.count("\n") == 2, ended[rank].output
        assert f"rank {rank} raised" not in ended[rank].output


def test_a_rank_that_raises_before_its_mesh(forked: Forked) -> None:
    ended = forked(programs.raises_before_its_mesh, 4)
    assert statuses(ended) == [1] * 4
    for rank in (0, 1, 3):
        assert "cannot start: it raised ValueError before it made a mesh: no such file: config.toml" in ended[rank].output


def test_a_store_that_was_used_before(forked: Forked) -> None:
    """torchrun keeps one store for all attempts; a program may start the default group itself."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    env = {"STORE": str(store.port), "TORCHELASTIC_MAX_RESTARTS": "1", "TORCHELASTIC_RUN_ID": "job"}
    first = forked(programs.restarted, 4, TORCHELASTIC_RESTART_COUNT="0", **env)
    assert all("ValueError: no more data" in rank.output for rank in first)
    again = forked(programs.restarted, 4, TORCHELASTIC_RESTART_COUNT="1", **env)
    assert statuses(again) == [0] * 4
    assert [rank.output for rank in again] == ["result 40.0 watch on\n"] * 4


def test_a_collective_of_one_rank_on_torchs_default_group(forked: Forked) -> None:
    ended = forked(programs.calls_the_default_group_alone, 4)
    assert [rank.output for rank in ended] == [f"result {[float(n) for n in range(8)]} 40.0\n"] * 4


# -- who is never ended ------------------------------------------------------------------------------------------------


class World:
    """That a default group has started."""

    def __init__(self, over: bool) -> None:
        self.over = over

    def is_over(self, default: Any) -> bool:
        return self.over


@pytest.fixture
def failed(two: list[Hand], monkeypatch: pytest.MonkeyPatch) -> Any:
    """A watch over a job that has failed, in a process that no test runner runs."""
    watch = two[0].watch
    watch.fail(Verdict("lost", (1,), "", (), "rank 1 died"))
    monkeypatch.setattr(ending, "is_hosted", lambda: False)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "group", type("group", (), {"WORLD": object()}))
    monkeypatch.setattr(watch, "world", World(over=False))
    return watch


def test_a_process_that_is_only_what_the_job_was(failed: Any) -> None:
    assert ending.may_end(failed)


def test_under_a_test_runner_nothing_is_ended(two: list[Hand], failed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert ending.is_hosted()
    assert not ending.may_end(failed)
    assert two[1].page.words[H.EXIT_S] == 0  # which other ranks read


def test_a_program_that_left_the_job_is_not_ended(failed: Any) -> None:
    failed.world.over = True
    assert not ending.may_end(failed)


def test_a_forked_child_is_not_ended(failed: Any) -> None:
    failed.pid += 1
    assert not ending.may_end(failed)


def test_nothing_is_ended_while_the_ranks_pause(failed: Any) -> None:
    with failed.paused():
        assert not ending.may_end(failed)


def test_nothing_is_ended_where_it_is_turned_off(failed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings(), "exit_s", 0.0)
    assert not ending.may_end(failed)


@pytest.mark.parametrize(
    ("error", "broken"),
    [
        (RuntimeError("[/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:32660."), True),
        (ConnectionResetError("Connection reset by peer"), True),
        (dist.DistNetworkError("recvValue failed"), True),
        (RuntimeError("CUDA out of memory"), False),
        (ValueError("Connection closed by peer"), False),
    ],
)
def test_broken_connections(error: Exception, broken: bool) -> None:
    assert ending.is_broken_connection(error) == broken


def test_who_meets_the_verdict_meets_it_again(two: list[Hand]) -> None:
    two[1].watch.fail(Verdict("lost", (1,), "", (), "rank 1 died"))
    for _ in range(2):
        with pytest.raises(WatchError):
            two[0].watch.check()
    assert two[0].watch.failed_at
