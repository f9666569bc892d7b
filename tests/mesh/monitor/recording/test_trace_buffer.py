"""Trace buffers: what a rank writes and others read, their limits, and the job's folder."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest

from shardmesh.mesh.comm.recording.trace_buffer import (
    BUFFER_BYTES,
    GROUPS,
    MAGIC,
    RECORDS,
    STACK_BYTES,
    TEXT_BYTES,
    Header,
    RankState,
    TraceBuffer,
    stable_hash,
)
from shardmesh.mesh.monitor.recording import job_directory as directory_module
from shardmesh.mesh.monitor.recording.cleanup import is_left, sweep
from shardmesh.mesh.monitor.recording.files import folder_prefix
from shardmesh.mesh.monitor.recording.job_directory import (
    JobDirectory,
    is_dead,
    is_stopped,
    open_buffer,
)
from shardmesh.mesh.monitor.verdict import Observation, Verdict


@pytest.fixture
def buffer() -> TraceBuffer:
    return TraceBuffer.private(1, 4)


def record(buffer: TraceBuffer, number: int, group: int = 0, call: str = "barrier") -> None:
    buffer.write_record(
        number, [group << 48 | number, buffer.text(call), buffer.text("a.py:1"), 10, 20, 30, 40, 50]
    )


# -- records ---------------------------------------------------------------------------------------


def test_record_round_trip(buffer: TraceBuffer) -> None:
    record(buffer, 0, group=3, call="all_reduce\tsum")
    found = buffer.last
    assert found is not None
    assert found[:5] == (0, 3, 0, "all_reduce\tsum", "a.py:1")
    assert found[5:] == (10, 20, 30, 40, 50)


def test_buffer_without_records(buffer: TraceBuffer) -> None:
    assert buffer.last is None
    assert buffer.blocked is None
    assert list(buffer.records()) == []
    assert buffer.record(0) is None
    assert buffer.record(-1) is None


def test_newest_records_are_kept(buffer: TraceBuffer) -> None:
    for number in range(RECORDS + 3):
        record(buffer, number)
    assert buffer.record(2) is None
    assert buffer.record(RECORDS + 3) is None
    assert [found.number for found in buffer.records()] == list(range(3, RECORDS + 3))
    assert [found.sequence for found in buffer.records()] == list(range(3, RECORDS + 3))


def test_large_numbers(buffer: TraceBuffer) -> None:
    """Groups take 16 bits and sequences 48 of one word; numbers do not wrap."""
    number = (1 << 40) + 5
    buffer.write_record(number, [0xFFFF << 48 | number, 0, 0, 1, 2, (1 << 64) - 1, 3, 4])
    found = buffer.record(number)
    assert found is not None
    assert (found.group, found.sequence, found.lineage) == (0xFFFF, number, (1 << 64) - 1)


def test_current_collective(buffer: TraceBuffer) -> None:
    record(buffer, 0, call="all_gather")
    record(buffer, 1)
    buffer.words[Header.BLOCKED] = 1
    assert buffer.blocked is not None
    assert buffer.blocked.call == "all_gather"


# -- texts -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", ["", "x", "f32[8, 4] @ P('dp')", "größe", "\N{SNOWMAN}" * 9, "a\tb\nc"]
)
def test_text_round_trip(buffer: TraceBuffer, text: str) -> None:
    assert buffer.read_text(buffer.text(text)) == text


def test_a_text_is_written_once(buffer: TraceBuffer) -> None:
    first = buffer.text("somewhere/train.py:12")
    end = buffer.words[Header.TEXT_END]
    assert buffer.text("somewhere/train.py:12") == first
    assert buffer.words[Header.TEXT_END] == end


def test_long_texts_are_truncated(buffer: TraceBuffer) -> None:
    assert buffer.read_text(buffer.text("x" * 10_000)) == "x" * 4096


def test_lone_surrogate_is_accepted(buffer: TraceBuffer) -> None:
    """As in a file name that is not UTF-8."""
    assert buffer.read_text(buffer.text("bad\udcff.py:3")) == "bad?.py:3"


def test_full_table_of_texts(buffer: TraceBuffer) -> None:
    texts = [f"{n:04} " + "x" * 4000 for n in range(TEXT_BYTES // 4000 + 5)]
    places = [buffer.text(text) for text in texts]
    lost = places[-1]
    assert buffer.read_text(lost) == "?"
    assert all(
        buffer.read_text(place) == text
        for place, text in zip(places, texts, strict=True)
        if place != lost
    )
    assert buffer.words[Header.TEXT_END] <= TEXT_BYTES
    record(buffer, 0, call=texts[-1])
    assert buffer.last is not None
    assert buffer.last.call == "?"
    assert buffer.read_text(buffer.text("short")) == "short"  # there is room for this one
    assert texts[-1] not in buffer._texts  # of which there may be ever new ones


@pytest.mark.parametrize("place", [-1, 0, TEXT_BYTES - 4, TEXT_BYTES, 1 << 40])
def test_invalid_text_offset(buffer: TraceBuffer, place: int) -> None:
    assert buffer.read_text(place) == ""


# -- groups ----------------------------------------------------------------------------------------


def test_groups_are_found_by_their_key(buffer: TraceBuffer) -> None:
    numbers = [buffer.add_group(stable_hash(f"group {n}"), f"axis{n}\t0,1") for n in range(3)]
    assert numbers == [0, 1, 2]
    assert buffer.find_group(stable_hash("group 1")) == 1
    assert buffer.find_group(stable_hash("group 3")) is None
    assert buffer.group_text(2) == "axis2\t0,1"
    assert buffer.group_key(2) == stable_hash("group 2")


def test_a_full_table_of_groups(buffer: TraceBuffer) -> None:
    for n in range(GROUPS):
        assert buffer.add_group(n + 1, "x\t0,1") == n
    assert buffer.add_group(GROUPS + 1, "x\t0,1") is None
    assert buffer.find_group(GROUPS + 1) is None
    assert buffer.words[Header.GROUPS] == GROUPS


def test_group_outside_the_table_has_no_text(buffer: TraceBuffer) -> None:
    for n in range(300):
        buffer.text(f"{n} " * 1000)  # so that something stands where its text would be
    assert buffer.group_text(0xFFFF) == ""


def test_hashes_do_not_depend_on_the_process() -> None:
    assert stable_hash("(0, 1) 0") == 3238981434332414913


# -- stacks ----------------------------------------------------------------------------------------


def test_stacks_round_trip_and_are_truncated(buffer: TraceBuffer) -> None:
    buffer.words[Header.STACK_WANTED] = 3
    buffer.write_stack("File a.py, line 1")
    assert buffer.read_stack() == "File a.py, line 1"
    assert buffer.words[Header.STACK_GIVEN] == 3
    buffer.write_stack("x" * STACK_BYTES * 2)
    assert set(buffer.read_stack()) == {"x"}
    buffer.write_stack("short")
    assert buffer.read_stack() == "short"
    assert buffer.group_text(0) == ""  # what comes after the stack is untouched
    assert buffer.words[Header.GROUPS] == 0


# -- files -----------------------------------------------------------------------------------------


@pytest.fixture
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SHARDMESH_WATCH_DIR", str(tmp_path))
    return tmp_path


def test_other_ranks_see_writes(parent: Path) -> None:
    mine, other = JobDirectory("job", 0, 2), JobDirectory("job", 1, 2)
    record(mine.buffer, 0, call="all_reduce")
    seen = other.buffer_of(0)
    assert seen is not None
    assert seen.words[Header.RANK] == 0
    assert seen.words[Header.SIZE] == 2
    assert seen.words[Header.PID] == os.getpid()
    assert seen.last == mine.buffer.last
    assert sorted(path.name for path in mine.folder.iterdir()) == [
        "alarm",
        "rank0.trace",
        "rank1.trace",
    ]
    assert mine.folder == parent / f"{folder_prefix()}job"
    assert mine.folder.stat().st_mode & 0o777 == 0o700


def test_missing_or_invalid_buffer(parent: Path) -> None:
    directory = JobDirectory("job", 0, 2)
    assert directory.buffer_of(1) is None
    directory.path(1).write_bytes(b"")
    assert open_buffer(directory.path(1)) is None
    directory.path(1).write_bytes(bytes(BUFFER_BYTES))
    assert open_buffer(directory.path(1)) is None  # without the magic word
    directory.path(1).write_bytes(MAGIC.to_bytes(8, "little"))
    assert open_buffer(directory.path(1)) is None  # too short


def test_first_verdict_wins(parent: Path) -> None:
    one, two = JobDirectory("job", 0, 2), JobDirectory("job", 1, 2)
    first = Verdict(
        "mismatch", (1,), "shape", (Observation(1, "all_reduce", "a.py:1"),), "rank 1 differs"
    )
    assert one.alarm[0] == two.alarm[0] == 0
    assert one.post(first) == first
    assert two.alarm[0] == 1
    assert two.post(Verdict("stall", (0,), "", (), "rank 0 is late")) == first
    assert two.verdict() == one.verdict() == first
    assert not list(one.folder.glob("verdict.*.*"))


def test_verdict_is_saved_before_ranks_see_it(
    parent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that sees it may end its process, and with it the thread that writes the file."""
    directory, seen = JobDirectory("job", 0, 2), []
    save = directory._save

    def saved(verdict: Verdict) -> None:
        save(verdict)
        seen.append((directory.verdict(), (directory.folder / "verdict.json").exists()))

    monkeypatch.setattr(directory, "_save", saved)
    directory.post(Verdict("lost", (1,), "", (), "rank 1 died"))
    assert seen == [(None, True)]


def test_verdict_after_the_folder_is_deleted(parent: Path) -> None:
    directory = JobDirectory("job", 0, 2)
    for path in directory.folder.iterdir():
        path.unlink()
    directory.folder.rmdir()
    verdict = Verdict("left", (), "", (), "gone")
    assert directory.post(verdict) == verdict


def test_last_rank_removes_the_folder(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    one, two = JobDirectory("job", 0, 2), JobDirectory("job", 1, 2)
    one.leave(RankState.ENDED)
    assert one.folder.exists()
    two.leave(RankState.CLOSED)
    assert not one.folder.exists()


def test_rank_that_ends_before_others_arrive_leaves_its_buffer(
    parent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others learn from it that the rank has ended."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    one = JobDirectory("job", 0, 3)
    one.leave(RankState.ENDED)
    two = JobDirectory("job", 1, 3)
    seen = two.buffer_of(0)
    assert seen is not None
    assert seen.words[Header.STATE] == RankState.ENDED
    two.leave(RankState.ENDED)
    assert one.folder.exists()
    JobDirectory("job", 2, 3).leave(RankState.ENDED)
    assert not one.folder.exists()


def test_folder_is_kept_after_an_error(parent: Path) -> None:
    directory = JobDirectory("job", 0, 1)
    directory.post(Verdict("lost", (0,), "", (), "died"))
    directory.leave(RankState.ENDED)
    assert directory.verdict() is not None


def folder_of(parent: Path, job: str, age_s: float, *, dead: bool = True) -> Path:
    directory = JobDirectory(job, 0, 2)
    directory.buffer.words[Header.BORN] += dead
    then = time.time() - age_s
    os.utime(directory.folder, (then, then))
    return directory.folder


def test_files_of_dead_jobs_are_swept_except_the_newest(parent: Path) -> None:
    old = [folder_of(parent, f"old{n}", 1000 + n) for n in range(14)]
    other = parent / "somebody-elses"
    other.mkdir()
    sweep(parent)
    assert [folder.exists() for folder in old] == [True] + [False] * 13
    assert other.exists()


def test_live_jobs_and_new_folders_are_not_swept(parent: Path) -> None:
    living = [folder_of(parent, f"living{n}", 2000, dead=False) for n in range(3)]
    empty_and_new = parent / f"{folder_prefix()}begins"
    empty_and_new.mkdir()
    old = [folder_of(parent, f"old{n}", 1000 + n) for n in range(14)]
    sweep(parent)
    assert all(folder.exists() for folder in [*living, empty_and_new])
    assert [folder.exists() for folder in old] == [True] + [False] * 13


def test_jobs_of_another_container_are_not_swept(parent: Path) -> None:
    directory = JobDirectory("job", 0, 1)
    directory.buffer.words[Header.PID_SPACE] += 1
    directory.buffer.words[Header.BORN] += 1
    assert not is_dead(directory.buffer)  # nobody can tell
    assert not is_left(directory.folder, 0.0)


def test_a_process_that_stopped_and_died(parent: Path) -> None:
    child = subprocess.Popen(["sleep", "60"])
    try:
        buffer = JobDirectory("job", 0, 1).buffer
        buffer.words[Header.PID], buffer.words[Header.BORN] = (
            child.pid,
            directory_module.born(child.pid),
        )
        assert not is_dead(buffer)
        assert not is_stopped(buffer)
        child.send_signal(19)  # SIGSTOP
        deadline = time.monotonic() + 60
        while not is_stopped(buffer) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert is_stopped(buffer)
        assert not is_dead(buffer)
    finally:
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert is_dead(buffer)  # a zombie
    child.wait(10)
    assert is_dead(buffer)  # gone


def test_another_process_with_the_same_number_is_not_the_rank(parent: Path) -> None:
    buffer = JobDirectory("job", 0, 1).buffer
    assert not is_dead(buffer)
    buffer.words[Header.BORN] -= 1
    assert is_dead(buffer)


def test_a_verdict_as_json() -> None:
    seen = Observation(1, "all_reduce(sum, f32)", "tränen.py:3"), Observation(0, "?", "")
    verdict = Verdict("mismatch", (1, 3), "dtype", seen, "zwei\nZeilen")
    assert Verdict.from_json(verdict.to_json()) == verdict
