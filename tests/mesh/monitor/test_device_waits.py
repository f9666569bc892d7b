"""Hosts that wait for accelerators: in which collective a rank is blocked; deadlocks between
devices. Streams and events are stand-ins.
"""

from __future__ import annotations

import contextlib
import ctypes
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shardmesh.mesh import errors
from shardmesh.mesh.comm.call_site import frame_of_thread
from shardmesh.mesh.comm.recording import stream_events
from shardmesh.mesh.comm.recording.trace_buffer import Header
from shardmesh.mesh.monitor import process_hooks, termination, timeouts, watchdog
from shardmesh.mesh.monitor.verdict import Verdict
from shardmesh.mesh.monitor.watchdog import place_of
from shardmesh.mesh.settings import settings
from tests.mesh.comm import nccl_like
from tests.mesh.comm.nccl_like import GPU, NcclLikeGroup
from tests.mesh.monitor.driven_ranks import DrivenRank, driven_ranks

SOON_S = 60.0  # tells an answer from a hang
TO_DECIDE_S = 0.8  # more than half a second, in which ranks that wait are taken to wait for good
Step = tuple[int, tuple[int, ...]]


class Event:
    """Stands for an event of a stream that is stuck."""

    is_done = False

    def record(self, stream: Any) -> None:
        self.is_done = False

    def query(self) -> bool:
        return self.is_done


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The device of all ranks: its current stream, and where the main threads of all ranks wait for
    it, if they do.
    """
    made = SimpleNamespace(stream=1, place=(1, 2), waits=True)
    module = SimpleNamespace(
        Event=Event, current_stream=lambda _: SimpleNamespace(stream_id=made.stream)
    )
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)
    monkeypatch.setattr(watchdog, "place_of", lambda _: (made.place, made.waits))
    return made


@pytest.fixture
def three(tmp_path: Path) -> list[DrivenRank]:
    return driven_ranks(tmp_path, 3)


def begin(rank: DrivenRank, ranks: tuple[int, ...], op: str = "all_reduce") -> int:
    number = rank.call(op, ranks=ranks)
    if rank.recorder(ranks) not in rank.monitor.recorders:
        rank.monitor.recorders.append(rank.recorder(ranks))
    return number


def wait(rank: DrivenRank, ranks: tuple[int, ...], number: int) -> Any:
    """Let the current stream wait for a collective; return the event."""
    recorder = rank.recorder(ranks)
    recorder.stream_mark = rank.monitor.stream_events.mark(number, GPU)
    recorder.leave(number)
    assert recorder.stream_mark is not None
    return recorder.stream_mark.event


def launch(rank: DrivenRank, *groups: tuple[int, ...], op: str = "all_reduce") -> None:
    """Call collectives of these groups whose results the device waits for."""
    for ranks in groups:
        wait(rank, ranks, begin(rank, ranks, op))


def verdict_of(ranks: list[DrivenRank], seconds: float = TO_DECIDE_S) -> Verdict | None:
    """Return the verdict of the ranks' watchdogs within some time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and ranks[0].monitor.standing() is None:
        for rank in ranks:
            rank.monitor.watchdog._tick()
        time.sleep(0.02)
    return ranks[0].monitor.standing()


PAIR, ALL = (0, 1), (0, 1, 2)

# -- all hosts have called everything --------------------------------------------------------------


@pytest.mark.parametrize("later", [0, 300])
def test_collectives_in_different_orders_are_a_deadlock(
    later: int, device: SimpleNamespace, three: list[DrivenRank]
) -> None:
    for rank in three:
        launch(rank, ALL)
        assert rank.recorder(ALL).stream_mark is not None
        rank.recorder(ALL).stream_mark.event.is_done = True  # type: ignore[union-attr]
    launch(three[0], PAIR, ALL)
    launch(three[1], ALL, PAIR)
    launch(three[2], ALL)
    for rank in three:
        launch(rank, *[ALL] * later)
    verdict = verdict_of(three, SOON_S)
    assert verdict is not None
    assert (verdict.kind, verdict.ranks) == ("deadlock", (0,))
    assert (
        "blocked on each other in different groups; rank 0 left the order of the others"
        in verdict.text
    )
    for line in (
        "rank 0: all_reduce(sum, float32, 4 elements) over ranks 0, 1",
        "over ranks 0, 1, 2",
    ):
        assert line in verdict.text
    assert f"{Path(__file__).parent.name}/driven_ranks.py:" in verdict.text


def test_a_cycle_through_the_groups_of_a_mesh(device: SimpleNamespace, tmp_path: Path) -> None:
    four = driven_ranks(tmp_path, 4)
    for rank, groups in zip(
        four, [((0, 2), (0, 1)), ((0, 1), (1, 3)), ((2, 3), (0, 2)), ((1, 3), (2, 3))], strict=True
    ):
        launch(rank, *groups)
    verdict = verdict_of(four, SOON_S)
    assert verdict is not None
    assert (verdict.kind, verdict.ranks, len(verdict.seen)) == ("deadlock", (), 4)


def one_order(device: SimpleNamespace, three: list[DrivenRank]) -> None:
    """A kernel before takes long."""
    for rank in three[:2]:
        launch(rank, PAIR, ALL)
    launch(three[2], ALL)


def asynchronous(device: SimpleNamespace, three: list[DrivenRank]) -> None:
    """Rank 1 starts both before its stream waits for either."""
    launch(three[0], PAIR, ALL)
    both = {ranks: begin(three[1], ranks) for ranks in (ALL, PAIR)}
    for ranks, number in both.items():
        wait(three[1], ranks, number)
    launch(three[2], ALL)


def two_streams(device: SimpleNamespace, three: list[DrivenRank]) -> None:
    launch(three[0], PAIR, ALL)
    launch(three[1], ALL)
    device.stream = 2
    launch(three[1], PAIR)
    launch(three[2], ALL)


def broadcasts(device: SimpleNamespace, three: list[DrivenRank]) -> None:
    """The source of a broadcast may need nobody."""
    launch(three[0], PAIR, ALL, op="broadcast")
    launch(three[1], ALL, PAIR, op="broadcast")
    launch(three[2], ALL, op="broadcast")


def computing(device: SimpleNamespace, three: list[DrivenRank]) -> None:
    """The hosts are elsewhere; the device is not asked."""
    launch(three[0], PAIR, ALL)
    launch(three[1], ALL, PAIR)
    launch(three[2], ALL)
    device.waits = False


def completed(device: SimpleNamespace, three: list[DrivenRank]) -> None:
    launch(three[0], PAIR, ALL)
    launch(three[1], ALL, PAIR)
    launch(three[2], ALL)
    for rank in three:
        for mark in rank.monitor.stream_events._marks:
            mark.event.is_done = True


@pytest.mark.parametrize(
    "program", [one_order, asynchronous, two_streams, broadcasts, computing, completed]
)
def test_what_is_not_certain_is_no_deadlock(
    program: Callable[..., None], device: SimpleNamespace, three: list[DrivenRank]
) -> None:
    program(device, three)
    assert verdict_of(three) is None


def test_devices_in_a_deadlock_whose_hosts_are_anywhere(
    device: SimpleNamespace, three: list[DrivenRank], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as in a launch for which the device's queue has no room."""
    computing(device, three)
    monkeypatch.setattr(watchdog, "_STUCK_NS", 1e8)
    verdict = verdict_of(three, SOON_S)
    assert verdict is not None
    assert (verdict.kind, verdict.ranks) == ("deadlock", (0,))


# -- a host waits before it calls what others wait for ---------------------------------------------


def test_hosts_that_wait_before_the_others_collective_are_a_deadlock(
    device: SimpleNamespace, three: list[DrivenRank]
) -> None:
    launch(three[0], PAIR)
    launch(three[1], ALL)
    launch(three[2], ALL)
    verdict = verdict_of(three, SOON_S)
    assert verdict is not None
    assert (verdict.kind, verdict.ranks) == ("deadlock", (0,))


@pytest.mark.parametrize("waits", [True, False])
def test_a_stall_names_the_rank_that_the_others_wait_for_in_the_end(
    waits: bool, device: SimpleNamespace, three: list[DrivenRank], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 waits for rank 1 and that for rank 2, which is as seen only if the hosts are known to
    wait.
    """
    device.waits = waits
    launch(three[0], PAIR)
    launch(three[1], ALL)
    assert verdict_of(three[:2]) is None
    monkeypatch.setattr(settings(), "timeout", 0.1)
    three[0].monitor.watchdog._tick()
    verdict = three[0].monitor.standing()
    assert verdict is not None
    assert (verdict.kind, verdict.ranks) == ("stall", (2,) if waits else (1,))


def test_a_rank_whose_host_is_elsewhere_may_come(
    device: SimpleNamespace, three: list[DrivenRank], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its device waits, but what the others wait for is not called yet."""
    device.waits = False
    monkeypatch.setattr(watchdog, "_STUCK_NS", 1e8)
    launch(three[0], PAIR)
    launch(three[1], ALL)
    launch(three[2], ALL)
    assert verdict_of(three) is None
    assert [rank.buffer.stuck is not None for rank in three] == [True] * 3
    assert [rank.buffer.blocked for rank in three] == [None] * 3
    monkeypatch.setattr(settings(), "timeout", 0.1)
    three[1].monitor.watchdog._tick()
    verdict = three[1].monitor.standing()
    assert verdict is not None
    assert (verdict.kind, verdict.ranks) == ("stall", (0,)), "as others do not make it wait"


def test_a_rank_whose_device_is_slow_still_votes(
    device: SimpleNamespace, three: list[DrivenRank]
) -> None:
    launch(three[2], (1, 2))
    assert verdict_of([three[2]]) is None
    assert three[2].buffer.blocked is not None
    three[0].call(ranks=ALL)
    three[1].call("all_gather", ranks=ALL)
    assert three[0].diagnosed(0, ALL, waited=TO_DECIDE_S) is None
    three[2].call(ranks=ALL)
    verdict = three[0].diagnosed(0, ALL, waited=TO_DECIDE_S)
    assert verdict is not None
    assert (verdict.kind, verdict.ranks) == ("mismatch", (1,))


def test_a_rank_that_goes_on_is_not_blocked(
    device: SimpleNamespace, three: list[DrivenRank]
) -> None:
    launch(three[0], ALL)
    assert verdict_of(three[:1], 0.1) is None
    blocked = three[0].buffer.blocked
    assert blocked is not None
    assert blocked.call.startswith("all_reduce")
    device.place = (1, 3)
    three[0].monitor.watchdog._tick()
    assert three[0].buffer.blocked is None


def test_a_wait_of_the_host_is_not_overwritten(
    device: SimpleNamespace, three: list[DrivenRank]
) -> None:
    launch(three[0], PAIR)
    number = three[0].call("all_gather", ranks=ALL)
    three[0].block(number)
    assert verdict_of(three[:1], 0.1) is None
    device.place = None
    three[0].monitor.watchdog._tick()
    assert three[0].buffer.words[Header.BLOCKED] == number + 1


def test_a_rank_whose_host_goes_on_takes_part_in_no_deadlock(three: list[DrivenRank]) -> None:
    """Rank 0 has started something that rank 1 has not, computes, and will call what rank 1 waits
    in.
    """
    begin(three[0], PAIR)
    three[1].block(three[1].call(ranks=ALL))
    three[2].call(ranks=ALL)
    assert verdict_of(three[:1]) is None


def test_events_are_used_again(
    device: SimpleNamespace, three: list[DrivenRank], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_events, "MARKS", 4)
    events = three[0].monitor.stream_events
    made = [events.mark(number, GPU) for number in range(10)]
    assert (
        len({id(mark.event) for mark in made if mark is not None and mark.event is not None}) == 4
    )
    assert events.first_pending() is None, "one before may be pending, too"
    for mark in made[6:8]:
        assert mark is not None
        mark.event.is_done = True
    assert events.first_pending() == 8
    assert [mark.is_pending() for mark in made if mark is not None][5:] == [
        False,
        False,
        False,
        True,
        True,
    ]


# -- where the main thread is ----------------------------------------------------------------------


class Stuck:
    """What waits in C until it is released."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.lock.acquire()
        self.item = self.to = self.result = self.lock.acquire
        acquire = self.lock.acquire
        self.value: Any = type("Value", (), {"__bool__": acquire, "__float__": acquire})()
        self.queue: queue.SimpleQueue[int] = queue.SimpleQueue()


def _truth(x: Stuck) -> None:
    if x.value:
        pass


def _inside_torch(x: Stuck) -> None:
    space: dict[str, Any] = {}
    exec(
        compile("def item(f):\n    f()", f"{Path(torch.__file__).parent}/inside.py", "exec"), space
    )
    SimpleNamespace(item=space["item"]).item(x.result)


@contextlib.contextmanager
def running(call: Callable[[Stuck], object]) -> Iterator[int]:
    stuck = Stuck()

    def run() -> None:
        with contextlib.suppress(TypeError):
            call(stuck)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield thread.ident or 0
    finally:
        stuck.lock.release()
        stuck.queue.put(1)
        thread.join()


@pytest.mark.parametrize(
    "call",
    [
        lambda x: x.item(),
        lambda x: x.to(*[True], timeout=-1),
        lambda x: SimpleNamespace(item=x.item).item(),
        lambda x: float(x.value),
        lambda x: not x.value,
        _truth,
        _inside_torch,
    ],
)
def test_calls_that_wait_for_a_device(call: Callable[[Stuck], object]) -> None:
    with running(call) as ident:
        deadline = time.monotonic() + SOON_S
        while not place_of(frame_of_thread(ident))[1]:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        places = {place_of(frame_of_thread(ident)) for _ in range(3)}
    assert len(places) == 1


@pytest.mark.parametrize(
    "call",
    [
        lambda x: x.result(),
        lambda x: x.queue.get(),
        lambda x: x.lock.acquire(),
        lambda x: x.result(bool(1)),
    ],
)
def test_other_calls(call: Callable[[Stuck], object]) -> None:
    with running(call) as ident:
        for _ in range(5):
            time.sleep(0.01)
            assert not place_of(frame_of_thread(ident))[1]


# -- a whole deadlock ------------------------------------------------------------------------------


@pytest.mark.skipif(
    threading.current_thread() is not threading.main_thread(),
    reason="signals go to the main thread",
)
def test_a_host_that_waits_in_a_deadlock_raises_it(
    device: SimpleNamespace, three: list[DrivenRank], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The main thread waits in C and does not return on a signal, as in a synchronization, until
    the communicator is aborted.
    """
    libc = ctypes.CDLL(None)
    mutex = ctypes.create_string_buffer(128)
    libc.pthread_mutex_lock(mutex)
    handle = NcclLikeGroup(seconds=SOON_S)
    monkeypatch.setattr(
        nccl_like.NcclLikeBackend, "abort", lambda _: libc.pthread_mutex_unlock(mutex)
    )
    monkeypatch.setattr(timeouts, "torch_groups", lambda: [handle])
    monkeypatch.setattr(type(three[0].monitor), "is_of_this_job", lambda _: True)
    monkeypatch.setattr(watchdog, "place_of", place_of)
    monkeypatch.setattr(process_hooks, "monitors", [three[0].monitor])
    number = signal.SIGRTMIN + 12
    monkeypatch.setattr(termination, "alarm_signal", number)
    before = signal.signal(number, process_hooks._on_alarm)
    x = SimpleNamespace(item=libc.pthread_mutex_lock)
    at_the_latest = threading.Timer(SOON_S, libc.pthread_mutex_unlock, (mutex,))
    launch(three[0], PAIR, ALL)
    launch(three[1], ALL, PAIR)
    launch(three[2], ALL)
    at_the_latest.start()
    for rank in three:
        rank.monitor.watchdog.start()
    try:
        with pytest.raises(errors.DeadlockError, match="rank 0 left the order of the others"):
            x.item(mutex)
    finally:
        at_the_latest.cancel()
        for rank in three:
            rank.monitor.watchdog.stop()
        signal.signal(number, before)
