"""The monitor's files: a folder that is full, deleted, swept or invisible to others only costs the
diagnosis.
"""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import HashStore, TCPStore

from shardmesh.mesh.comm.recording.trace_buffer import BUFFER_BYTES, Header
from shardmesh.mesh.errors import PeerError
from shardmesh.mesh.monitor.agreement import Agreement
from shardmesh.mesh.monitor.recording import files
from shardmesh.mesh.monitor.recording import job_directory as directory_module
from shardmesh.mesh.monitor.recording.cleanup import sweep
from shardmesh.mesh.monitor.recording.files import folder_prefix, make_file, parent_folder
from shardmesh.mesh.monitor.recording.job_directory import Alarm
from shardmesh.mesh.monitor.verdict import Verdict
from tests.forked import ROOT, Ended, Forked, free_port, statuses
from tests.mesh.monitor import forked_ranks as programs
from tests.mesh.monitor.driven_ranks import DrivenRank, driven_ranks

VERDICT = Verdict("lost", (1,), "", (), "rank 1 died")


@pytest.fixture
def two(tmp_path: Path) -> list[DrivenRank]:
    return driven_ranks(tmp_path, 2)


# -- one process -----------------------------------------------------------------------------------


def test_files_are_allocated_before_they_are_mapped(tmp_path: Path) -> None:
    found = make_file(tmp_path / "buffer", BUFFER_BYTES).stat()
    assert found.st_size == BUFFER_BYTES
    assert found.st_blocks * 512 >= BUFFER_BYTES


def test_reopened_file_keeps_its_contents(tmp_path: Path) -> None:
    path = tmp_path / "alarm"
    path.write_bytes(b"12345678")
    assert make_file(path, 8).read_bytes() == b"12345678"
    assert make_file(path, 4).read_bytes() == b"12345678"
    assert make_file(path, 16).read_bytes() == b"12345678" + bytes(8)


def test_full_disk_raises_and_leaves_no_file(tmp_path: Path) -> None:
    program = f"""
import os, resource
resource.setrlimit(resource.RLIMIT_FSIZE, ({BUFFER_BYTES // 2}, {BUFFER_BYTES // 2}))
from shardmesh.mesh.monitor.recording.job_directory import JobDirectory
try:
    JobDirectory("job", 0, 1)
except OSError as error:
    print(error.errno, os.listdir("{tmp_path}/{folder_prefix()}job"))
"""
    env = os.environ | {
        "SHARDMESH_WATCH_DIR": str(tmp_path),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    found = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True, check=False
    )
    assert found.stdout == f"{errno.EFBIG} ['alarm']\n", found.stderr
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != BUFFER_BYTES // 2


def test_small_shared_memory_uses_another_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("SHARDMESH_WATCH_DIR", raising=False)
    monkeypatch.setattr(files, "_SHARED_MEMORY", tmp_path)
    free = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    assert parent_folder(0) == tmp_path
    assert parent_folder(free) != tmp_path
    monkeypatch.setattr(files, "_SHARED_MEMORY", tmp_path / "none")
    assert parent_folder(0) != tmp_path / "none"


def test_relative_folder_is_resolved_at_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SHARDMESH_WATCH_DIR", "watched")
    monkeypatch.chdir(tmp_path)
    assert parent_folder() == Path(files._start_folder, "watched")


def test_hosts_sharing_a_folder_do_not_look_up_each_others_processes(
    monkeypatch: pytest.MonkeyPatch, two: list[DrivenRank]
) -> None:
    """All hosts have the same number for the set of processes outside containers."""
    buffer = two[0].monitor.directory.buffer_of(1)
    assert buffer is not None
    assert directory_module.is_local(buffer)
    monkeypatch.setattr(directory_module, "boot_id", lambda: "another host")
    assert not directory_module.is_local(buffer)


@pytest.fixture
def old_folders(tmp_path: Path) -> Path:
    make_old(tmp_path, 30)
    return tmp_path


def make_old(parent: Path, count: int, buffers: int = 4) -> None:
    for n in range(count):
        folder = parent / f"{folder_prefix()}dead{n}"
        folder.mkdir()
        for rank in range(buffers):
            (folder / f"rank{rank}.trace").touch()
        os.utime(folder, (long_ago := time.time() - 600 - n, long_ago))


def test_concurrent_sweeps(old_folders: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(sweep, [old_folders] * 8))  # raises what one of them raises
    assert [path.name for path in old_folders.iterdir()] == [f"{folder_prefix()}dead0"]


def test_folder_deleted_while_it_is_listed(
    old_folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    def vanishing(path: Path, pattern: str) -> Iterator[Path]:
        """Raise as `glob` does if the folder is removed before it is read."""
        shutil.rmtree(path)
        raise FileNotFoundError(path)

    monkeypatch.setattr(Path, "glob", vanishing)
    sweep(old_folders)


def test_remains_of_a_killed_sweep_are_removed(tmp_path: Path) -> None:
    gone = tmp_path / f"{folder_prefix()}dead.gone"
    gone.mkdir()
    sweep(tmp_path)
    assert gone.exists()  # somebody deletes it
    os.utime(gone, (long_ago := time.time() - 600, long_ago))
    sweep(tmp_path)
    assert not gone.exists()


@pytest.mark.slow
def test_sweep_of_ten_thousand_old_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_old(tmp_path, 10_000, buffers=1)
    sweep(tmp_path)  # of one start: some of them
    assert 1 < len(list(tmp_path.iterdir())) < 10_000
    monkeypatch.setattr("shardmesh.mesh.monitor.recording.cleanup._LONGEST_S", 600.0)
    sweep(tmp_path)
    assert len(list(tmp_path.iterdir())) == 1


# -- the folder is gone, and the job goes on -------------------------------------------------------


def test_verdict_reaches_other_ranks_without_the_folder(two: list[DrivenRank]) -> None:
    shutil.rmtree(two[0].monitor.directory.folder)
    assert two[1].monitor.directory.post(VERDICT) == VERDICT
    assert two[0].monitor.directory.verdict() == VERDICT
    two[0].monitor.close()


def test_long_verdict_is_truncated(two: list[DrivenRank]) -> None:
    two[1].monitor.directory.post(Verdict("raised", (1,), "ValueError", (), "x" * 1_000_000))
    found = two[0].monitor.directory.verdict()
    assert found is not None
    assert (found.kind, found.ranks) == ("raised", (1,))
    assert found.text.startswith("xxx")


def test_process_stopped_while_writing_does_not_block_others(
    two: list[DrivenRank], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory_module, "_TO_LOCK_S", 0.05)
    with (two[1].monitor.directory.folder / "alarm").open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert two[0].monitor.directory.post(VERDICT) == VERDICT


def test_first_of_verdict_and_giving_up_wins(two: list[DrivenRank], tmp_path: Path) -> None:
    one, other = two[0].monitor.directory, two[1].monitor.directory
    assert one.give_up()
    assert not other.give_up()
    other.post(VERDICT)
    assert one.verdict() is None
    three, four = driven_ranks(tmp_path / "b", 2)
    three.monitor.directory.post(VERDICT)
    assert not four.monitor.directory.give_up()
    assert four.monitor.directory.alarm[0] == Alarm.VERDICT


def test_ranks_that_gave_up_only_record(
    two: list[DrivenRank], capsys: pytest.CaptureFixture[str]
) -> None:
    recorder = two[0].monitor.add_recorder(two[0].world.group((0, 1)))
    two[0].world.monitor = two[0].monitor
    two[1].monitor.give_up("the folder is full")
    for how in ("sum", "max"):
        two[1].call(how=how)
        recorder.enter("all_reduce", "sum", torch.float32, 4, 16, 16)  # neither waits nor compares
    assert (two[0].world.monitor, recorder.monitor) == (None, None)
    assert two[0].world.trace_buffer.words[Header.RECORDS] == 2  # the ledger goes on where it was
    assert capsys.readouterr().err == "shardmesh: this job is not monitored: the folder is full\n"
    two[0].monitor.waiting.wait_for_work(recorder, 1, _Done())
    two[0].monitor.waiting.wait_for_peers(recorder, 1, [1])
    two[0].monitor.waiting.rendezvous(recorder, 1)
    two[0].monitor.waiting.wait_for_votes(recorder)


class _Done:
    def wait(self, *_: object) -> None: ...

    def is_completed(self) -> bool:
        return True


def test_verdict_is_raised_after_the_folder_is_deleted(two: list[DrivenRank]) -> None:
    shutil.rmtree(two[0].monitor.directory.folder)
    two[1].monitor.raised(ValueError("no such file"))
    with pytest.raises(PeerError, match="no such file"):
        two[0].monitor.check()


# -- the store -------------------------------------------------------------------------------------


def test_rank_that_has_seen_all_does_not_poll(two: list[DrivenRank]) -> None:
    asking = Agreement(HashStore(), "job", "stale", 0, 2)
    asking.check_visible(two[0].monitor.directory, (0, 1), has_relay=False)
    assert asking._thread is None


def test_giving_up_does_not_block_with_the_main_thread(capsys: pytest.CaptureFixture[str]) -> None:
    store: Any = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    waiting = threading.Thread(target=store.get, args=("soon",))
    waiting.start()
    time.sleep(0.2)  # until it waits
    Agreement(store, "job", "stale", 0, 2).decline("the folder is full")
    assert waiting.is_alive()
    other = store.clone()
    other.set("soon", "1")
    waiting.join()
    Agreement(store, "job", "stale", 1, 2).decline("the folder is full")
    assert other.get("shardmesh/monitor/job/without") == b"rank 0: the folder is full"
    assert (
        capsys.readouterr().err
        == "shardmesh: this job is not monitored: rank 0: the folder is full\n"
    )


# -- processes -------------------------------------------------------------------------------------


def assert_all_train(ended: list[Ended], monitor: str, warnings: int) -> None:
    assert statuses(ended) == [0] * 4, [rank.output for rank in ended]
    assert all(f"result 40.0 monitor {monitor}" in rank.output for rank in ended)
    assert sum(rank.output.count("this job is not monitored") for rank in ended) == warnings


@pytest.mark.one_in(4)
@pytest.mark.parametrize("ranks", [[2], [0, 1, 2, 3]])
def test_ranks_without_room_keep_training(forked: Forked, ranks: list[int]) -> None:
    ended = forked(programs.no_room, 4, ranks)
    assert_all_train(ended, "off", 1)
    assert any(
        "its files cannot be made: [Errno 28] No space left on device" in rank.output
        for rank in ended
    )


def test_ranks_that_cannot_see_each_others_files(forked: Forked) -> None:
    assert_all_train(forked(programs.other_folders, 4, [2]), "off", 1)


def test_full_folder(forked: Forked) -> None:
    ended = forked(programs.simply_trains, 4, mounts={"watch": "size=1m"})
    assert_all_train(ended, "off", 1)
    assert any("No space left on device" in rank.output for rank in ended)


def test_folder_that_fills_up_later(forked: Forked) -> None:
    """All memory was allocated at the start: even a verdict has room."""
    ended = forked(programs.fills_up, 4, mounts={"watch": "size=16m"})
    assert statuses(ended) == [1] * 4
    assert all(
        "result 40.0 monitor on" in rank.output and "ValueError: no more data" in rank.output
        for rank in ended
    )


def test_read_only_folder(forked: Forked) -> None:
    ended = forked(programs.simply_trains, 4, mounts={"watch": "ro"})
    assert_all_train(ended, "off", 1)
    assert any("Read-only file system" in rank.output for rank in ended)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("options", ["size=64m", "size=1m", "ro"])
def test_shared_memory_of_a_container(forked: Forked, options: str) -> None:
    """If it is full, the files are put into the temporary folder."""
    assert_all_train(
        forked(programs.simply_trains, 4, own=False, mounts={"/dev/shm": options}), "on", 0
    )


def test_containers_with_shared_memory_of_their_own(forked: Forked) -> None:
    assert_all_train(
        forked(programs.in_containers, 4, own=False, mounts={"/dev/shm": "size=64m"}), "off", 1
    )


def test_processes_are_not_ended_without_a_monitor(forked: Forked) -> None:
    ended = forked(programs.raises_without_a_watch, 4, SHARDMESH_EXIT_S="1")
    assert statuses(ended) == [0, 1, 0, 0]
    assert ["went on" in rank.output for rank in ended] == [True, False, True, True]


def test_folder_deleted_before_all_ranks_have_opened_it(forked: Forked) -> None:
    assert_all_train(forked(programs.vanishes, 4, "early"), "off", 1)


def test_folder_deleted_later_is_harmless(forked: Forked) -> None:
    ended = forked(programs.vanishes, 4, "late")
    assert statuses(ended) == [1] * 4
    assert all(
        "result 40.0 monitor on" in rank.output and "ValueError: no more data" in rank.output
        for rank in ended
    )


def test_folder_deleted_repeatedly(forked: Forked) -> None:
    ended = forked(programs.vanishes, 4, "always")
    assert statuses(ended) == [0] * 4, [rank.output for rank in ended]
    assert all("result 40.0" in rank.output for rank in ended)
    assert sum(rank.output.count("this job is not monitored") for rank in ended) <= 1


def test_a_rank_in_another_folder(forked: Forked) -> None:
    try:
        assert_all_train(
            forked(programs.changes_folder, 4, SHARDMESH_WATCH_DIR="watched-by-tests"), "on", 0
        )
    finally:
        shutil.rmtree(ROOT / "watched-by-tests", ignore_errors=True)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("how", ["raises", "exits", "dies", "loader"])
def test_ranks_that_fork(forked: Forked, how: str) -> None:
    assert_all_train(forked(programs.forks, 4, how), "on", 0)


def test_two_jobs_at_once(forked: Forked) -> None:
    ended = forked(programs.two_jobs, 8, [str(free_port()), str(free_port())])
    assert_all_train(ended[:4], "on", 0)
    assert statuses(ended[4:]) == [1] * 4
    assert all("ValueError: no more data" in rank.output for rank in ended[4:])
