"""The relay between hosts, simulated by folders of one machine: records of one host are read on the
other until it becomes silent.
"""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore, PrefixStore, TCPStore

from shardmesh.mesh.comm.recording.recorder import Neighbour
from shardmesh.mesh.comm.recording.trace_buffer import (
    BUFFER_BYTES,
    LONG_SLOTS,
    RECORDS,
    SLOT_WORDS,
    Header,
    RankState,
    TraceBuffer,
    called_at,
    row_of,
)
from shardmesh.mesh.monitor.hosts import relay as relay_module
from shardmesh.mesh.monitor.hosts.mirror import (
    _HEADER_WORDS,
    BufferCopy,
    BufferSource,
    make_copy,
)
from shardmesh.mesh.monitor.hosts.relay import Relay, start_relay
from shardmesh.mesh.monitor.monitor import Monitor
from shardmesh.mesh.monitor.recording.job_directory import JobDirectory, may_span_hosts
from shardmesh.mesh.monitor.verdict import Verdict

LIMIT_S = 60.0
_prefixes = itertools.count()


def soon(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.01)


def record(buffer: TraceBuffer, number: int, call: str, place: str = "train.py:1") -> None:
    buffer.write_record(
        number, (number, buffer.text(call), buffer.text(place), 10, 20, 7, 100, 200)
    )


# -- copies of trace buffers -----------------------------------------------------------------------


def carry(source: BufferSource, copy: BufferCopy) -> int:
    """Copy once; return the number of bytes sent."""
    changed = source.changed_parts()
    missing = copy.missing(source.versions)
    assert set(missing) <= set(changed)
    copy.write({start: changed[start] for start in missing}, source.versions)
    return sum(map(len, changed.values()))


@pytest.fixture
def pair(tmp_path: Path) -> tuple[TraceBuffer, BufferSource, BufferCopy]:
    buffer = TraceBuffer.private(2, 4)
    buffer.words[Header.HEARTBEAT] = buffer.words[Header.PID_SPACE] = 77
    return buffer, BufferSource(buffer), make_copy(tmp_path / "rank2.trace")


def test_copy_equals_the_trace_buffer(pair):
    buffer, source, copy = pair
    buffer.add_group(99, "dp\t0,2")
    buffer.words[Header.DOING] = buffer.text("loading data")
    row = row_of(0)
    buffer.words[row : row + SLOT_WORDS], buffer.words[called_at(0)] = (
        memoryview(bytes(range(SLOT_WORDS * 8))).cast("Q"),
        1,
    )
    for number in range(70):
        record(buffer, number, f"call {number % 3}")
    buffer.write_stack("  File train.py, line 3")
    carry(source, copy)
    other = copy.buffer
    assert list(other.records()) == list(buffer.records())
    assert (other.find_group(99), other.group_text(0)) == (0, "dp\t0,2")
    assert other.read_text(other.words[Header.DOING]) == "loading data"
    assert (
        other.words[row : row + SLOT_WORDS].tolist()
        == buffer.words[row : row + SLOT_WORDS].tolist()
    )
    assert (other.read_stack(), other.words[Header.RANK], other.words[Header.PID_SPACE]) == (
        "  File train.py, line 3",
        2,
        0,
    )


def test_only_changes_are_sent(pair):
    buffer, source, copy = pair
    for number in range(2 * RECORDS + 100):
        record(buffer, number, "call")
    first = carry(source, copy)
    assert first < 40_000, "the last records, not all"
    assert carry(source, copy) == 0
    record(buffer, 2 * RECORDS + 100, "another call")
    assert 0 < carry(source, copy) < 10_000
    assert copy.buffer.last == buffer.last


def test_times_are_on_the_readers_clock(pair):
    buffer, source, copy = pair
    (
        buffer.words[Header.HEARTBEAT],
        buffer.words[Header.BLOCKED_SINCE],
        buffer.words[Header.BLOCKED],
    ) = 5_000_000_000, 2_000_000_000, 1
    carry(source, copy)
    now = time.monotonic_ns()
    beat = copy.buffer.words[Header.HEARTBEAT]
    assert 0 <= now - beat < 1_000_000_000
    assert beat - copy.buffer.words[Header.BLOCKED_SINCE] == 3_000_000_000
    buffer.words[Header.STEP] += 1
    carry(source, copy)
    assert copy.buffer.words[Header.HEARTBEAT] == beat, "its watchdog has not moved"


def test_lost_rank_comes_back(pair):
    buffer, source, copy = pair
    carry(source, copy)
    copy.set_reason("host-b is down")
    copy.mark_lost()
    assert (
        copy.buffer.words[Header.STATE],
        copy.buffer.read_text(copy.buffer.words[Header.DOING]),
    ) == (RankState.LOST, "host-b is down")
    copy.write({0: bytes(buffer.data[: _HEADER_WORDS * 8])}, source.versions)
    assert (copy.buffer.words[Header.STATE], copy.buffer.words[Header.DOING]) == (
        RankState.RUNNING,
        0,
    )


def test_buffer_of_another_rank_is_never_written(tmp_path):
    path = tmp_path / "rank2.trace"
    path.write_bytes(bytes(BUFFER_BYTES))
    buffer = TraceBuffer(bytearray(BUFFER_BYTES))
    buffer.begin(2, 4)
    buffer.words[Header.PID_SPACE] = 5
    path.write_bytes(buffer.data)
    make_copy(path).mark_lost()
    assert path.read_bytes() == bytes(buffer.data)


# -- hosts -----------------------------------------------------------------------------------------


class Ranks:
    """Four ranks: 0 and 1 on one host, 2 and 3 on another."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.worlds = [SimpleWorld(rank) for rank in range(4)]
        self.monitors, self.relays = [], []
        for rank, world in enumerate(self.worlds):
            (parent := folder / f"host{rank // 2}").mkdir(exist_ok=True)
            monkeypatch.setenv("SHARDMESH_WATCH_DIR", str(parent))
            self.monitors.append(Monitor(world, JobDirectory("job", rank, 4)))
        for monitor in self.monitors:
            self.add_relay(monitor)

    def add_relay(self, monitor: Monitor) -> Relay:
        client = TCPStore("127.0.0.1", self.server.port, is_master=False, wait_for_workers=False)
        relay = Relay(monitor, PrefixStore("test", client), "here:1")
        relay.start()
        self.relays.append(relay)
        return relay

    def beat(self) -> None:
        """Do what the ranks' watchdogs do."""
        for monitor, relay in zip(self.monitors, self.relays, strict=False):
            if not relay._over.is_set():
                monitor.buffer.words[Header.HEARTBEAT] = time.monotonic_ns()
                relay.look()

    def buffer(self, reader: int, rank: int) -> TraceBuffer | None:
        return self.monitors[reader].directory.buffer_of(rank)

    def sees(self, reader: int, rank: int, state: int) -> Callable[[], bool]:
        def check() -> bool:
            self.beat()
            buffer = self.buffer(reader, rank)
            return buffer is not None and buffer.words[Header.STATE] == state

        return check

    def close(self) -> None:
        for monitor, relay in zip(self.monitors, self.relays, strict=False):
            monitor.buffer.words[Header.STATE] = RankState.CLOSED
            relay.close()


class SimpleWorld(SimpleNamespace):
    def __init__(self, rank: int) -> None:
        super().__init__(rank=rank, size=4)


@pytest.fixture
def ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    monkeypatch.setattr(relay_module, "_TICK_S", 0.02)
    monkeypatch.setenv("SHARDMESH_HOST_LOST_S", "0.5")
    made = Ranks(tmp_path, monkeypatch)
    soon(
        lambda: all(
            made.buffer(reader, rank) is not None for reader in range(4) for rank in range(4)
        )
    )
    yield made
    made.close()


def test_all_ranks_see_all_buffers_until_they_end(ranks):
    record(ranks.monitors[3].buffer, 0, "all_reduce")
    soon(
        lambda: ranks.buffer(0, 3).last is not None and ranks.buffer(0, 3).last.call == "all_reduce"
    )
    assert (
        ranks.buffer(0, 3).words[Header.PID_SPACE],
        ranks.buffer(0, 1).words[Header.PID_SPACE] > 0,
    ) == (0, True)
    for rank in (2, 3):
        ranks.monitors[rank].buffer.words[Header.STATE] = RankState.ENDED
        ranks.relays[rank].close()
    assert not ranks.relays[2]._thread.is_alive()
    soon(ranks.sees(1, 2, RankState.ENDED))
    soon(ranks.sees(1, 3, RankState.ENDED))


def test_another_rank_relays_after_the_first_one_ends(ranks):
    ranks.monitors[0].buffer.words[Header.STATE] = RankState.ENDED
    ranks.relays[0].close()
    record(ranks.monitors[1].buffer, 0, "broadcast")
    soon(lambda: ranks.buffer(2, 1).last is not None)
    assert ranks.buffer(2, 0).words[Header.STATE] == RankState.ENDED
    record(ranks.monitors[2].buffer, 0, "all_gather")
    soon(lambda: ranks.buffer(1, 2).last is not None)


def test_verdict_reaches_all_hosts_before_a_rank_ends(ranks):
    verdict = Verdict("raised", (3,), "ValueError", (), "rank 3 raised ValueError: the reason")
    ranks.monitors[3].fail(verdict)
    ranks.relays[3].close()
    assert ranks.monitors[0].standing() == verdict
    assert ranks.monitors[1].standing() == verdict


def test_a_verdict_is_told_by_ranks_that_go_on_after_they_raised(ranks):
    """Those that raise are no speakers, and their monitors are not closed either."""
    verdict = Verdict("raised", (3,), "ValueError", (), "rank 3 raised ValueError: the reason")
    for rank in (2, 3):
        ranks.monitors[rank].buffer.words[Header.STATE] = RankState.RAISED
        assert not ranks.relays[rank]._is_speaker()
    ranks.monitors[3].fail(verdict)
    for rank in (2, 3):
        ranks.relays[rank].speak_on()
    assert [rank for rank in (2, 3) if ranks.relays[rank]._is_speaker()] == [2]
    soon(lambda: ranks.monitors[0].standing() == verdict)
    ranks.relays[2].leave()
    ranks.relays[2]._thread.join(LIMIT_S)
    assert not ranks.relays[2]._thread.is_alive()


def test_ranks_whose_end_is_seen_otherwise_are_lost(ranks):
    record(ranks.monitors[2].buffer, 0, "all_reduce")
    for rank in (2, 3):
        ranks.relays[rank]._over.set()
        ranks.relays[rank]._thread.join()
    ranks.monitors[0].ended_elsewhere = lambda: [3]
    ranks.monitors[0].relay = ranks.relays[0]
    ranks.monitors[0].look_elsewhere()
    assert ranks.buffer(1, 3).words[Header.STATE] == RankState.LOST
    assert ranks.buffer(1, 2).words[Header.STATE] == RankState.RUNNING


def test_stack_is_requested_and_received(ranks):
    asking, asked = ranks.buffer(1, 3).words, ranks.monitors[3].buffer
    for text in ("first", "second"):
        asking[Header.STACK_WANTED] += 1
        soon(lambda: asked.words[Header.STACK_WANTED] != asked.words[Header.STACK_GIVEN])
        asked.write_stack(text)
        soon(lambda: asking[Header.STACK_WANTED] == asking[Header.STACK_GIVEN])
        assert ranks.buffer(1, 3).read_stack() == text


def test_silent_host_is_lost_and_may_come_back(ranks):
    for rank in (2, 3):
        ranks.relays[rank]._over.set()
        ranks.relays[rank]._thread.join()
    soon(ranks.sees(1, 2, RankState.LOST))
    assert ranks.sees(1, 3, RankState.LOST)()
    reason = ranks.buffer(1, 2).read_text(ranks.buffer(1, 2).words[Header.DOING])
    assert "(ranks 2, 3) is down, frozen or cut off: silent since" in reason
    assert "while the store at here:1 answers" in reason
    ranks.relays[2] = ranks.add_relay(ranks.monitors[2])
    soon(ranks.sees(1, 2, RankState.RUNNING))


class Broken:
    """A connection that breaks once, while sending."""

    def __init__(self, whole: PrefixStore) -> None:
        self.whole = whole

    def __getattr__(self, name: str) -> object:
        return getattr(self.whole, name)

    def multi_set(self, keys: list[str], values: list[bytes]) -> None:
        if any(b"lost on its way" in value for value in values):
            raise RuntimeError("broken pipe")
        self.whole.multi_set(keys, values)

    def clone(self) -> PrefixStore:
        return self.whole


def test_nothing_is_lost_after_a_broken_connection(ranks):
    ranks.relays[2]._store = Broken(ranks.relays[2]._store)
    record(ranks.monitors[2].buffer, 0, "lost on its way")
    soon(
        lambda: (
            ranks.beat()
            or ((last := ranks.buffer(0, 2).last) is not None and last.call == "lost on its way")
        )
    )
    assert [relay for relay in ranks.relays if relay._is_speaker()] == [
        ranks.relays[0],
        ranks.relays[2],
    ], "it was not told by rank 3"


def test_without_the_store_all_other_hosts_are_lost(ranks):
    for relay in ranks.relays:
        relay._try_to = lambda act: time.sleep(0.01)  # type: ignore[method-assign]
    soon(ranks.sees(1, 2, RankState.LOST))
    reason = ranks.buffer(1, 2).read_text(ranks.buffer(1, 2).words[Header.DOING])
    assert re.search(
        r"has no answer from the store at here:1 since \d\.\d s, and so knows nothing of \S+ "
        r"\(ranks 2, 3\)",
        reason,
    ), reason


def test_relay_only_runs_if_there_may_be_other_hosts(monkeypatch, tmp_path):
    monkeypatch.setenv("SHARDMESH_WATCH_DIR", str(tmp_path))
    monitor = Monitor(SimpleWorld(0), JobDirectory("job", 0, 1))
    assert start_relay(monitor, HashStore()) is None
    assert may_span_hosts({}, 4)
    assert may_span_hosts({"LOCAL_WORLD_SIZE": "2"}, 4)
    assert not may_span_hosts({"LOCAL_WORLD_SIZE": "4"}, 4)
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    relay = start_relay(monitor, PrefixStore("default", server))
    assert relay is not None
    relay._thread.join(LIMIT_S)
    assert (relay._thread.is_alive(), relay.has_others) == (False, False)


# -- comparing with copies -------------------------------------------------------------------------


def lineage_of(*hashes: int) -> int:
    return sum(h << at for h, at in zip(hashes, (48, 32, 16), strict=True))


def buffer_after(count: int, wrong: dict[int, tuple[int, int]]) -> TraceBuffer:
    """Return a trace buffer whose first row holds the last fingerprints of `count` collectives,
    some of which (fingerprint, lineage) differ.
    """
    buffer = TraceBuffer.private(0, 2)
    row = row_of(0)
    for sequence in range(max(0, count - LONG_SLOTS), count):
        fingerprint, lineage = wrong.get(sequence, (5, lineage_of(1, 1, 1)))
        at = row + sequence % LONG_SLOTS * SLOT_WORDS
        buffer.words[at], buffer.words[at + 1] = (sequence & 0xFFFF) << 48 | fingerprint, lineage
    return buffer


@pytest.mark.parametrize(
    ("called", "neighbour_called", "wrong", "expected"),
    [
        (100, 100, {}, None),
        (100, 60, {}, None),  # the copy is older
        (100, 60, {50: (6, 0)}, 50),
        (100, 60, {50: (5, lineage_of(2, 2, 2))}, 50),
        (100, 60, {50: (5, lineage_of(2, 2, 1))}, None),  # one of three hashes is the same
        (100, 110, {70: (6, 0), 80: (6, 0)}, 70),
        (400, 100, {29: (6, 0)}, 29),  # hosts run ahead
        (1100, 100, {29: (6, 0)}, None),  # no longer there
        (1100, 1100, {78: (6, 0)}, None),  # perhaps just being overwritten
        (1100, 1100, {88: (6, 0)}, 88),
        (70_000, 69_990, {69_980: (6, 0)}, 69_980),  # numbers wrap in the table
    ],
)
def test_the_first_collective_that_differs(called, neighbour_called, wrong, expected):
    own = buffer_after(called, {})
    recorder: Any = SimpleNamespace(words=own.words, row=row_of(0), called=called, number=0)
    neighbour = Neighbour(buffer_after(neighbour_called, wrong), 0)
    both = min(called, neighbour_called)
    assert relay_module._first_difference(recorder, neighbour, 0, both) == expected
    later = (expected or 0) + 1
    following = next((n for n in wrong if n >= later and expected), None)
    assert relay_module._first_difference(recorder, neighbour, later, both) == following
