"""After a verdict every process of the job ends soon, whatever started it and whatever it does;
other processes are not ended.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from shardmesh.mesh.comm.recording.trace_buffer import Header, RankState
from shardmesh.mesh.errors import WatchError
from shardmesh.mesh.monitor import process_hooks, termination
from shardmesh.mesh.monitor.verdict import Verdict
from shardmesh.mesh.settings import settings
from tests.forked import ROOT, Ended, Forked, statuses
from tests.mesh.monitor import forked_ranks as programs
from tests.mesh.monitor.attempts import LAST
from tests.mesh.monitor.driven_ranks import DrivenRank, driven_ranks


@pytest.fixture
def two(tmp_path) -> list[DrivenRank]:
    return driven_ranks(tmp_path, 2)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("how", ["communicates", "computes"])
def test_programs_that_swallow_the_error_are_ended(forked: Forked, how: str) -> None:
    ended = forked(programs.swallows, 4, how, SHARDMESH_EXIT_S="6")
    assert statuses(ended) == [1] * 4
    for rank in (0, 1, 3):
        output = ended[rank].output
        assert output.count("caught") > (1 if how == "communicates" else 0)
        assert re.search(
            rf"shardmesh: rank {rank} is ended \d+ s after its job failed \(SHARDMESH_EXIT_S\), "
            rf"here:",
            output,
        )
        # The program may go on until its process is ended.
        words = re.sub(r"(\ncaught)+\s*\Z", "", output)
        # The verdict is the library's last word.
        assert words.rstrip().endswith("ValueError: no more data")


def test_programs_that_leave_the_job_are_not_ended(forked: Forked) -> None:
    ended = forked(programs.goes_on_alone, 4, SHARDMESH_EXIT_S="4")
    assert statuses(ended) == [0, 0, 1, 0]
    assert ["went on" in rank.output for rank in ended] == [True, True, False, True]


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    "how", ["thread", "asynchronous", "raw", "destroyed", "destroyed and a thread"]
)
def test_processes_end_despite_pending_collectives_and_threads(forked: Forked, how: str) -> None:
    ended = forked(programs.waits_at_exit, 4, how, SHARDMESH_EXIT_S="5")
    assert statuses(ended) == [1] * 4
    assert all("StallError" in rank.output for rank in ended)


def test_a_rank_whose_threads_outlive_its_program(forked: Forked) -> None:
    ended = forked(programs.hangs_at_exit, 4, SHARDMESH_EXIT_S="5")
    assert statuses(ended) == [1] * 4
    assert all("StallError" in ended[rank].output for rank in (0, 1, 3))


@pytest.mark.one_in(4)
@pytest.mark.parametrize("how", ["stopped", "computes", "stopped, and threads"])
def test_process_that_cannot_end_itself_is_killed_by_another(forked: Forked, how: str) -> None:
    ended = forked(programs.cannot_end, 4, how, SHARDMESH_EXIT_S="2")
    assert statuses(ended) == [1, 1, -signal.SIGKILL, 1]
    assert any("rank 2 does not react and is killed" in ended[rank].output for rank in (0, 1, 3))


def test_broken_connection_reports_the_lost_rank(forked: Forked) -> None:
    ended = forked(programs.dies_in_a_raw_collective, 4, SHARDMESH_MONITOR_TORCH="off")
    assert statuses(ended) == [1, 1, -signal.SIGKILL, 1]
    for rank in (0, 1, 3):
        last = ended[rank].output.rpartition("rank 2 died.")[2]
        assert last.count("\n") == 3, ended[rank].output
        assert f"rank {rank} raised" not in ended[rank].output


@pytest.mark.one_in(4)
@pytest.mark.parametrize("outlier", [0, 2])
def test_rank_that_raises_before_its_mesh(forked: Forked, outlier: int) -> None:
    ended = forked(programs.raises_before_its_mesh, 4, outlier)
    assert statuses(ended) == [1] * 4
    for rank in {0, 1, 2, 3} - {outlier}:
        assert (
            "cannot start: it raised ValueError before it made a mesh: no such file: config.toml"
            in ended[rank].output
        )
        assert "of the child" not in ended[rank].output


@pytest.mark.one_in(4)
@pytest.mark.parametrize("how", ["dies", "sleeps"])
def test_rank_that_never_arrives(forked: Forked, how: str) -> None:
    ended = forked(programs.never_comes, 4, how)
    assert statuses(ended) == [1, 1, -signal.SIGKILL if how == "dies" else 1, 1]
    assert "waiting for rank" in ended[0].output
    assert all(
        "rank 2 of 4 did not come to MASTER_ADDR=" in ended[rank].output for rank in (0, 1, 3)
    )


def test_reused_store(forked: Forked) -> None:
    """torchrun keeps one store for all attempts; a program may start the default group itself."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def attempt(number: str) -> list[Ended]:
        env = {
            "TORCHELASTIC_RESTART_COUNT": number,
            "TORCHELASTIC_MAX_RESTARTS": "1",
            "TORCHELASTIC_RUN_ID": "job",
        }
        return forked(programs.restarted, 4, store.port, env)

    first = attempt("0")
    assert all("ValueError: no more data" in rank.output for rank in first)
    again = attempt("1")
    assert statuses(again) == [0] * 4
    assert [rank.output for rank in again] == ["result 40.0 monitor on\n"] * 4


@pytest.mark.slow
def test_every_attempt_of_torchrun_ends_and_the_next_one_starts_clean(tmp_path: Path) -> None:
    """Each attempt but the last fails, and leaves ranks that would not end by themselves."""
    env = {
        k: v
        for k, v in os.environ.items()
        if not k.startswith(("SHARDMESH_", "TORCHELASTIC_", "PYTEST_"))
    }
    env |= {
        "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
        "SHARDMESH_WATCH_DIR": str(tmp_path),
        "SHARDMESH_EXIT_S": "4",
    }
    command = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=4",
        f"--max-restarts={LAST}",
    ]
    command = [sys.executable, *command, "-m", "tests.mesh.monitor.attempts"]
    found = subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, check=False, timeout=500
    )
    assert found.returncode == 0, found.stderr
    assert found.stdout.count("result 10.0 monitor on") == 4
    said = found.stderr
    # Later attempts do not repeat it.
    assert said.count("PeerError: rank 2 raised ValueError: attempt 0") >= 3
    assert said.count("StallError: ranks 0, 1, 3 have waited") >= 6
    assert "rank 2 does not react and is killed" in said


def test_a_collective_of_one_rank_on_torchs_default_group(forked: Forked) -> None:
    ended = forked(programs.calls_the_default_group_alone, 4)
    assert [rank.output for rank in ended] == [f"result {[float(n) for n in range(8)]} 40.0\n"] * 4


# -- who is never ended ----------------------------------------------------------------------------


class World:
    """That a default group has started."""

    def __init__(self, over: bool) -> None:
        self.over = over

    def is_over(self, default: Any) -> bool:
        return self.over


@pytest.fixture
def failed(two: list[DrivenRank], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a monitor of a failed job, in a process without a test runner."""
    monitor = two[0].monitor
    monitor.fail(Verdict("lost", (1,), "", (), "rank 1 died"))
    monkeypatch.setattr(termination, "is_hosted", lambda: False)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "group", type("group", (), {"WORLD": object()}))
    monkeypatch.setattr(monitor, "world", World(over=False))
    return monitor


def test_process_that_only_ran_the_job_is_ended(failed: Any) -> None:
    assert termination.may_end(failed)


def test_processes_under_a_test_runner_are_not_ended(
    two: list[DrivenRank], failed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    assert termination.is_hosted()
    assert not termination.may_end(failed)
    assert two[1].buffer.words[Header.EXIT_S] == 0  # which other ranks read


def test_a_program_that_left_the_job_is_not_ended(failed: Any) -> None:
    failed.world.over = True
    assert not termination.may_end(failed)


def test_a_forked_child_is_not_ended(failed: Any) -> None:
    failed.pid += 1
    assert not termination.may_end(failed)


def test_paused_ranks_are_not_ended(failed: Any) -> None:
    with failed.paused("in the debugger"):
        assert not termination.may_end(failed)


def test_termination_can_be_turned_off(failed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings(), "exit_s", 0.0)
    assert not termination.may_end(failed)


@pytest.mark.parametrize(
    ("state", "stuck"),
    [("R", False), ("T", True), ("t", False), ("Z", False)],
    ids=["runs", "stopped", "debugged", "dead"],
)
def test_ranks_that_are_killed_by_another(
    two: list[DrivenRank], monkeypatch: pytest.MonkeyPatch, state: str, stuck: bool
) -> None:
    """A process stopped by a debugger is not stuck."""
    buffer = two[1].buffer
    buffer.words[Header.EXIT_S], buffer.words[Header.AWARE] = 10, state == "R"
    monkeypatch.setattr(
        termination, "process_state", lambda pid: (state, buffer.words[Header.BORN])
    )
    assert termination._is_stuck(buffer) == stuck
    with two[1].monitor.paused("in the debugger"):
        assert not termination._is_stuck(buffer)


@pytest.mark.parametrize(
    ("error", "broken"),
    [
        (
            RuntimeError(
                "[/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:32660."
            ),
            True,
        ),
        (ConnectionResetError("Connection reset by peer"), True),
        (dist.DistNetworkError("recvValue failed"), True),
        (RuntimeError("CUDA out of memory"), False),
        (ValueError("Connection closed by peer"), False),
    ],
)
def test_broken_connections(error: Exception, broken: bool) -> None:
    assert termination.is_broken_connection(error) == broken


def test_verdict_is_raised_again(two: list[DrivenRank]) -> None:
    two[1].monitor.fail(Verdict("lost", (1,), "", (), "rank 1 died"))
    for _ in range(2):
        with pytest.raises(WatchError):
            two[0].monitor.check()
    assert two[0].monitor.failed_at


def alarm() -> None:
    process_hooks._on_alarm(0, sys._getframe(1))


def test_a_program_that_is_not_interruptible_goes_on_until_it_is(
    two: list[DrivenRank], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_hooks, "monitors", {two[0].monitor})
    two[1].monitor.fail(Verdict("lost", (1,), "", (), "rank 1 died"))
    with termination.interruptible(False):
        alarm()
        with pytest.raises(WatchError, match="rank 1 died"), termination.interruptible(True):
            alarm()
        assert not termination.is_interruptible()
        two[0].monitor.notified = False
        alarm()
    with pytest.raises(WatchError, match="rank 1 died"):
        alarm()


class Protected:
    """Code of others: it is interrupted as it is entered, left and deleted."""

    def wait(self) -> None:
        alarm()

    def __enter__(self) -> None:
        self.wait()

    def __exit__(self, *_: object) -> None:
        self.wait()

    def __del__(self) -> None:
        self.wait()


def test_entering_and_leaving_a_block_is_not_interrupted(
    two: list[DrivenRank], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_hooks, "monitors", {two[0].monitor})
    two[1].monitor.fail(Verdict("lost", (1,), "", (), "rank 1 died"))
    with Protected():
        assert not two[0].monitor.notified
    assert not two[0].monitor.notified
    with pytest.raises(WatchError, match="rank 1 died"), Protected():
        alarm()


def test_a_block_that_is_interruptible_is_so_where_another_one_is_left(
    two: list[DrivenRank], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As what an elastic job does at the end of an attempt."""

    @contextlib.contextmanager
    def attempt() -> Iterator[None]:
        yield
        alarm()
        assert not two[0].monitor.notified
        with termination.interruptible(True):
            with Protected():
                assert not two[0].monitor.notified
            alarm()

    monkeypatch.setattr(process_hooks, "monitors", {two[0].monitor})
    two[1].monitor.fail(Verdict("lost", (1,), "", (), "rank 1 died"))
    with pytest.raises(WatchError, match="rank 1 died"), attempt():
        pass
    assert termination._block_of is None


def test_a_late_watchdog_sets_no_deadline_for_a_program_that_goes_on(
    two: list[DrivenRank], monkeypatch: pytest.MonkeyPatch
) -> None:
    set_at: list[str] = []
    monkeypatch.setattr(termination, "end_after_exit_time", lambda: set_at.append("deadline"))
    monkeypatch.setattr(termination, "is_hosted", lambda: False)
    monitor = two[0].monitor
    monkeypatch.setattr(monitor, "is_of_this_job", lambda: True)
    two[1].monitor.fail(Verdict("lost", (1,), "", (), "rank 1 died"))
    assert termination.may_end(monitor)
    termination.set_deadline(monitor, True)
    monitor.suspend()
    assert set_at == ["deadline"]
    assert not termination.may_end(monitor)
    termination.set_deadline(monitor, True)
    assert set_at == ["deadline"]
    assert termination._deadline_of is None


def test_a_suspended_monitor_interrupts_and_ends_nothing(
    two: list[DrivenRank], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other ranks still see that its process lives, until it is forgotten."""
    monitor = two[0].monitor
    monkeypatch.setattr(process_hooks, "monitors", {monitor})
    two[1].monitor.fail(Verdict("lost", (1,), "", (), "rank 1 died"))
    monitor.suspend()
    alarm()
    assert not monitor.is_on
    assert monitor.buffer.words[Header.AWARE]
    assert monitor.buffer.words[Header.STATE] == RankState.RUNNING
    folder = monitor.directory.folder
    assert folder.exists()
    process_hooks.forget_monitor(monitor)
    assert monitor.buffer.words[Header.STATE] == RankState.CLOSED
    assert not process_hooks.monitors
    assert not folder.exists()
