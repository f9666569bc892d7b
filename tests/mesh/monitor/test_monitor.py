"""The monitor of one rank; the tests write the trace buffers of the others: what it raises,
publishes, waits for and leaves behind.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from shardmesh.mesh import errors
from shardmesh.mesh import settings as settings_module
from shardmesh.mesh.comm.null import NullWorld
from shardmesh.mesh.comm.recording.recorder import CommTag, route_of
from shardmesh.mesh.comm.recording.trace_buffer import GROUPS, Header, RankState
from shardmesh.mesh.monitor import process_hooks, waiting
from shardmesh.mesh.monitor.process_hooks import notify_peers, start_monitor
from shardmesh.mesh.monitor.verdict import ERRORS, Verdict
from shardmesh.mesh.settings import collective_check, from_environment, settings, watchdog
from shardmesh.mesh.text import ranks_text
from tests.mesh.monitor.driven_ranks import DrivenRank, driven_ranks

SOON_S = 60.0  # tells an answer from a hang


@pytest.fixture
def two(tmp_path: Path) -> list[DrivenRank]:
    return driven_ranks(tmp_path, 2)


@pytest.fixture
def four(tmp_path: Path) -> list[DrivenRank]:
    return driven_ranks(tmp_path, 4)


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    before = settings().mode, settings().warn, settings().timeout
    yield
    settings().mode, settings().warn, settings().timeout = before


def recorded_call(
    rank: DrivenRank, op: str = "all_reduce", how: str = "sum", size: int = 4, lineage: int = 0
) -> None:
    """Call a collective of all ranks with this rank's monitor, which compares and waits as in a
    job.
    """
    recorder = next((s for s in rank.monitor.recorders), None) or rank.monitor.add_recorder(
        rank.world.group(rank.everyone)
    )
    rank.world.comm_context.lineage = lineage
    recorder.enter(op, how, torch.float32, size, 16, 16)


# -- comparing -------------------------------------------------------------------------------------


def test_ranks_that_agree_continue(two: list[DrivenRank]) -> None:
    for n in range(300):
        two[1].call(size=n)
        recorded_call(two[0], size=n)
    assert two[0].monitor.standing() is None


@pytest.mark.parametrize("number", [0, 1, 2, 3, 5, 63, 64, 100])
def test_the_second_of_two_sees_the_difference(two: list[DrivenRank], number: int) -> None:
    for _ in range(number):
        two[1].call()
        recorded_call(two[0])
    two[1].call(how="max")
    with pytest.raises(errors.CollectiveMismatchError, match="the reduction differs") as caught:
        recorded_call(two[0])
    assert caught.value.ranks == ()
    assert caught.value.verdict.field == "reduction"
    assert two[1].monitor.standing() == caught.value.verdict


def test_every_later_collective_raises_the_verdict_again(two: list[DrivenRank]) -> None:
    two[1].call(how="max")
    texts = []
    for _ in range(2):
        with pytest.raises(errors.CollectiveMismatchError) as caught:
            recorded_call(two[0])
        texts.append(str(caught.value))
    assert texts[0] == texts[1]
    with pytest.raises(errors.CollectiveMismatchError) as caught:
        two[1].monitor.check()
    assert str(caught.value) == texts[0]


def test_lineage_difference_raises(four: list[DrivenRank]) -> None:
    one, other = 1 << 48 | 2 << 32 | 3 << 16, 4 << 48 | 5 << 32 | 6 << 16
    for rank in (1, 2):
        four[rank].call(lineage=one)
    four[3].call(lineage=other)
    with pytest.raises(errors.CollectiveMismatchError) as caught:
        recorded_call(four[0], lineage=one)
    assert caught.value.ranks == (3,)
    assert caught.value.verdict.field == "lineage"


def test_line_difference_does_not_raise(four: list[DrivenRank]) -> None:
    for rank in (1, 2, 3):
        four[rank].call(lineage=1 << 48 | 2 << 32 | 3 << 16)
    recorded_call(four[0], lineage=1 << 48 | 9 << 32 | 9 << 16)
    assert four[0].monitor.standing() is None


# -- waiting ---------------------------------------------------------------------------------------


def later(call: Callable[[], object], seconds: float = 0.3) -> threading.Timer:
    """Call the function later in another thread; the timer is `finished` just before the call."""

    def begun() -> None:
        timer.finished.set()
        call()

    timer = threading.Timer(seconds, begun)
    timer.start()
    return timer


def test_first_collective_of_a_group_waits_for_all_ranks(two: list[DrivenRank]) -> None:
    timer = later(two[1].call)
    recorded_call(two[0])
    assert timer.finished.is_set()
    timer.join()
    recorded_call(two[0])  # and the others do not


def test_strict_waits_each_time(two: list[DrivenRank]) -> None:
    two[1].call()
    recorded_call(two[0])
    collective_check("strict")
    for _ in range(2):
        timer = later(two[1].call)
        recorded_call(two[0])
        assert timer.finished.is_set()
        timer.join()


def test_messages_wait_for_nobody_in_strict_mode(two: list[DrivenRank]) -> None:
    two[1].call()
    recorded_call(two[0])
    collective_check("strict")
    sender = two[0].monitor.recorders[0]
    tag, route = CommTag("activations"), route_of(1, None)
    for _ in range(3):
        sender.enter("permute", "", torch.float32, -1, 16, 0, tag, route, is_message=True)
    assert two[0].monitor.standing() is None
    for text in ("activations", "gradients"):
        two[1].call("permute", "", size=-1, tag=text, route=route_of(None, 0))
    for _ in range(2):
        two[1].call("permute", "", size=-1, tag="gradients", route=route_of(None, 0))
    with pytest.raises(errors.CollectiveMismatchError, match="for activations"):
        sender.enter("permute", "", torch.float32, -1, 16, 0, tag, route, is_message=True)


def test_waiting_rank_shows_its_collective(two: list[DrivenRank]) -> None:
    found: list[str] = []

    def look() -> None:
        blocked = two[0].buffer.blocked
        found.append("nothing" if blocked is None else blocked.call.split("\t")[0])
        two[1].call("all_gather", "")

    timer = later(look)
    recorded_call(two[0], "all_gather", "")
    timer.join()
    assert found == ["all_gather"]
    assert two[0].buffer.blocked is None


def test_waiting_rank_raises_a_verdict(two: list[DrivenRank]) -> None:
    timer = later(lambda: two[1].monitor.raised(ValueError("no such file")))
    with pytest.raises(errors.PeerError, match="rank 1 raised ValueError: no such file") as caught:
        recorded_call(two[0])
    timer.join()
    assert caught.value.ranks == (1,)


def test_waiting_rank_polls_at_growing_intervals(
    two: list[DrivenRank], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In 200 ms of waiting: at 10, 20 and 30 ms, then every 25 ms; the first times only for a
    verdict.
    """
    monitor, now, looked, diagnosed = two[0].monitor, [0], [], []

    class Work:
        def wait(self, slice_: timedelta) -> None:
            now[0] += int(slice_.total_seconds() * 1e9)
            if now[0] < 200_000_000:
                raise RuntimeError("timeout")

        def is_completed(self) -> bool:
            return False

    monkeypatch.setattr(waiting, "monotonic_ns", lambda: now[0])
    monkeypatch.setattr(monitor, "checked", lambda: looked.append(now[0]) or monitor)
    monkeypatch.setattr(monitor.waiting, "_diagnose", lambda *_: diagnosed.append(now[0]) or True)
    recorder = monitor.add_recorder(two[0].world.group(two[0].everyone))
    monitor.waiting.wait_for_work(recorder, 0, Work())
    assert [at // 1_000_000 for at in looked] == [20]
    assert [at // 1_000_000 for at in diagnosed] == [30, 55, 80, 105, 130, 155, 180]


def test_waiting_rank_raises_when_a_rank_dies(two: list[DrivenRank]) -> None:
    timer = later(two[1].die)
    with pytest.raises(errors.RankLostError, match="rank 1 died") as caught:
        recorded_call(two[0])
    timer.join()
    assert caught.value.ranks == (1,)


@pytest.fixture
def beyond(four: list[DrivenRank]) -> list[DrivenRank]:
    """Ranks in a group that does not fit into their tables: it is recorded, but not compared, and
    arrivals are unknown.
    """
    for rank in four:
        rank.buffer.words[Header.GROUPS] = GROUPS
        rank.block(
            rank.call(
                "permute", "", size=-1, route=route_of((rank.rank + 1) % 4, (rank.rank - 1) % 4)
            )
        )
    return four


def test_groups_beyond_the_table_do_not_wait(beyond: list[DrivenRank]) -> None:
    monitor, recorder = beyond[0].monitor, beyond[0].recorder()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(monitor.waiting.wait_for_peers, recorder, 0, [1, 3]).result(SOON_S)
    assert monitor.standing() is None


def test_groups_beyond_the_table_are_not_diagnosed(beyond: list[DrivenRank]) -> None:
    settings().timeout = 0.5
    assert beyond[0].diagnosed(waited=60.0) is None


# -- telling ---------------------------------------------------------------------------------------


def test_exception_is_published_once(two: list[DrivenRank]) -> None:
    two[1].call("all_gather", "")
    try:
        raise KeyError("loss")
    except KeyError as error:
        two[1].monitor.raised(error)
        two[1].monitor.raised(ValueError("a second one"))
    found = two[0].monitor.standing()
    assert found is not None
    assert (found.kind, found.ranks, found.field) == ("raised", (1,), "KeyError")
    assert "test_exception_is_published_once" in found.text  # the traceback
    assert "all_gather" in found.seen[0].call
    assert two[1].buffer.words[Header.STATE] == RankState.RAISED


def test_verdict_is_not_published_as_an_exception(two: list[DrivenRank]) -> None:
    verdict = Verdict("stall", (1,), "", (), "rank 1 is late")
    two[0].monitor.raised(verdict.error())
    assert two[1].monitor.standing() is None


def test_tell_of_reaches_every_monitor_of_the_process(
    two: list[DrivenRank], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_hooks, "monitors", {two[0].monitor})
    notify_peers(RuntimeError("out of memory"))
    found = two[1].monitor.standing()
    assert found is not None
    assert "rank 0 raised RuntimeError: out of memory" in found.text


def test_published_state(two: list[DrivenRank]) -> None:
    buffer = two[1].monitor.directory.buffer_of(0)
    assert buffer is not None

    def state() -> str:
        return buffer.read_text(buffer.words[Header.DOING])

    with two[0].monitor.paused("downloads the data"):
        assert state() == "downloads the data"
        with two[0].monitor.paused("in the debugger"), two[0].monitor.paused():
            assert state() == "in the debugger"
        assert state() == "downloads the data"
    assert buffer.words[Header.DOING] == 0


def test_nested_pauses(two: list[DrivenRank]) -> None:
    monitor = two[0].monitor
    with monitor.paused("in the debugger"):
        with monitor.paused("in the debugger"):
            assert two[1].monitor.ns_since(0) == 0
        assert two[1].monitor.ns_since(0) == 0
    assert 0 < two[1].monitor.ns_since(0) < 60e9  # since the pause ended


@pytest.mark.parametrize("kind", ERRORS)
def test_each_kind_of_verdict_has_its_error(kind: str) -> None:
    error = Verdict(kind, (2,), "", (), "what happened").error()
    assert isinstance(error, ERRORS[kind])
    assert isinstance(error, errors.WatchError)
    assert error.ranks == (2,)
    assert str(error) == "what happened"


def test_ranks_text() -> None:
    assert ranks_text([2]) == "rank 2"
    assert ranks_text([0, 1, 3]) == "ranks 0, 1, 3"
    assert ranks_text(range(100)) == "ranks 0, 1, 2, 3, 4, 5, 6, 7, ..., 96, 97, 98, 99"


# -- the watchdog's thread -------------------------------------------------------------------------


@pytest.fixture
def running(two: list[DrivenRank]) -> Iterator[list[DrivenRank]]:
    """Both with a watchdog that runs."""
    for rank in two:
        rank.monitor.notified = True  # the main thread is this test's: it is not to be called away
        rank.monitor.watchdog.start()
    yield two
    for rank in two:
        rank.monitor.watchdog.stop()


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + SOON_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_heartbeat(running: list[DrivenRank]) -> None:
    before = running[0].buffer.words[Header.HEARTBEAT]
    until(lambda: running[0].buffer.words[Header.HEARTBEAT] > before)


def test_the_stack_of_another_rank(running: list[DrivenRank]) -> None:
    lines = "\n".join(running[0].monitor.stack_of(1))
    assert "test_the_stack_of_another_rank" in lines
    assert "in stack\n" not in lines  # the watchdog's own frames are not the rank's


def test_the_watchdog_finds_a_stall_by_itself(
    running: list[DrivenRank], capfd: pytest.CaptureFixture[str]
) -> None:
    """If the main thread waits without polling, as for a GPU."""
    running[0].call()
    running[1].call()
    running[0].monitor.recorders.append(running[0].recorder())
    watchdog(warn=0.1, timeout=1.0)
    running[0].call()
    until(lambda: running[1].monitor.standing())
    found = running[1].monitor.standing()
    assert found is not None
    assert (found.kind, found.ranks) == ("stall", (1,))
    printed = capfd.readouterr().err
    assert printed.count("shardmesh: rank 0: rank 0 has waited") == 1
    assert "for rank 1 in number 1" in printed


def test_watchdog_checks_completed_collectives(running: list[DrivenRank]) -> None:
    for rank in running:
        for _ in range(3):
            rank.call()
        rank.monitor.recorders.append(rank.recorder())
    until(lambda: running[0].recorder().settled == 3)


# -- the end ---------------------------------------------------------------------------------------


def test_closing(two: list[DrivenRank]) -> None:
    folder = two[0].monitor.directory.folder
    two[0].monitor.close(RankState.ENDED)
    two[0].monitor.close()  # once is enough
    assert two[0].buffer.words[Header.STATE] == RankState.ENDED
    two[1].monitor.close()
    assert not folder.exists()


def test_forked_child_publishes_nothing(two: list[DrivenRank]) -> None:
    two[0].monitor.pid += 1
    two[0].monitor.raised(ValueError("in a child"))
    two[0].monitor.close()
    assert two[1].monitor.standing() is None
    assert two[0].buffer.words[Header.STATE] == RankState.RUNNING


def test_final_check_waits_for_arriving_ranks_and_prints_the_error(
    two: list[DrivenRank], capsys: pytest.CaptureFixture[str]
) -> None:
    """A broadcast's source has all it needs at once, and may be at its end before the others see
    that they differ.
    """
    two[1].call()
    recorded_call(two[0])
    timer = later(
        lambda: two[1].monitor.fail(
            Verdict("mismatch", (0,), "source", (), "rank 0 called another collective")
        ),
        0.05,
    )
    recorded_call(two[0])
    two[0].monitor.settle()
    timer.join()
    assert "shardmesh: rank 0: rank 0 called another collective" in capsys.readouterr().err
    assert two[0].monitor.abandoned  # so that the process ends with an error


def test_final_check_terminates(two: list[DrivenRank]) -> None:
    """Whether or not the other ranks arrive."""
    two[1].call()
    recorded_call(two[0])
    two[0].monitor.settle()
    assert two[0].monitor.is_settled(two[0].monitor.recorders[0])
    recorded_call(two[0])
    two[0].monitor.settle()
    assert not two[0].monitor.is_settled(two[0].monitor.recorders[0])


def test_files_that_cannot_be_created(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv("SHARDMESH_WATCH_DIR", str(file))
    assert start_monitor(NullWorld(0, 2), "job") is None
    assert "this job is not monitored" in capsys.readouterr().err


def test_single_process_has_no_monitor() -> None:
    assert NullWorld(0, 4).monitor is None


# -- settings --------------------------------------------------------------------------------------


def test_settings_of_the_environment() -> None:
    assert from_environment({}) == settings_module.Settings("on", 30.0, 300.0)
    found = from_environment(
        {
            "SHARDMESH_MONITOR": "strict",
            "SHARDMESH_STALL_WARN_S": "1.5",
            "SHARDMESH_STALL_TIMEOUT_S": "20",
        }
    )
    assert found == settings_module.Settings("strict", 1.5, 20.0)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("SHARDMESH_MONITOR", "yes"),
        ("SHARDMESH_STALL_WARN_S", "soon"),
        ("SHARDMESH_STALL_TIMEOUT_S", "0"),
        ("SHARDMESH_STALL_TIMEOUT_S", "-1"),
        ("SHARDMESH_STALL_WARN_S", "nan"),
        ("SHARDMESH_STALL_WARN_S", ""),
    ],
)
def test_invalid_settings_raise(name: str, value: str) -> None:
    with pytest.raises(errors.LaunchEnvironmentError, match=name) as caught:
        from_environment({name: value})
    assert repr(value) in str(caught.value)
    assert "write" in str(caught.value)


@pytest.mark.parametrize("mode", ["on", "strict", "full", "off"])
def test_collective_check_sets_the_mode(mode: str) -> None:
    collective_check(mode)
    assert settings().mode == mode


def test_invalid_arguments_of_collective_check_and_watchdog_raise() -> None:
    before = settings().mode, settings().warn, settings().timeout
    with pytest.raises(
        ValueError, match=r"collective_check\('yes'\): write one of 'on', 'strict', 'full', 'off'"
    ):
        collective_check("yes")
    for value in (0, -1.0, float("nan")):
        with pytest.raises(
            ValueError, match=r"watchdog\(timeout=.*write a positive number of seconds"
        ):
            watchdog(warn=1, timeout=value)
        with pytest.raises(ValueError, match=r"watchdog\(warn="):
            watchdog(warn=value, timeout=1)
    assert (settings().mode, settings().warn, settings().timeout) == before


def test_watchdog_sets_given_values() -> None:
    watchdog(warn=7)
    assert (settings().warn, settings().timeout) == (7.0, 300.0)
    watchdog(timeout=8)
    assert (settings().warn, settings().timeout) == (7.0, 8.0)


def test_settings_are_read_on_first_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings_module, "_settings", None)
    monkeypatch.setenv("SHARDMESH_STALL_WARN_S", "3")
    assert settings_module.settings().warn == 3.0
    monkeypatch.setenv("SHARDMESH_STALL_WARN_S", "4")
    assert settings_module.settings().warn == 3.0
