"""What dead jobs have left is deleted, and nothing else: no folder of a living job, of another
container, of another user, or elsewhere.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given

from shardmesh.__main__ import main
from shardmesh.mesh.comm.recording.trace_buffer import BUFFER_BYTES, MAGIC, Header, RankState
from shardmesh.mesh.monitor.recording import job_directory
from shardmesh.mesh.monitor.recording.cleanup import (
    is_left,
    remove_jobs_of,
    remove_left,
    sweep,
)
from shardmesh.mesh.monitor.recording.files import folder_prefix
from shardmesh.mesh.monitor.recording.job_directory import JobDirectory, is_dead, open_header
from shardmesh.mesh.monitor.verdict import Verdict

STRANGER = 65534
SIZE = 3
IS_ROOT = hasattr(os, "geteuid") and os.geteuid() == 0

# What a rank's process is, as others see it -> whether it may be alive.
PROCESSES = {
    "lives": True,
    "is dead": False,
    "is another process by now": False,
    "has left": False,
    "has raised": True,
    "is of another container": True,
    "is of another container, and has left": True,
    "is of another version": True,
    "is dead, of another version": False,
}
# What else the folder is -> whether it may be deleted.
FOLDERS = {
    "ours": True,
    "a stranger's": False,
    "open to others": False,
    "a link": False,
    "of another name": False,
}


@pytest.fixture(scope="module")
def dead_pid() -> int:
    done = subprocess.Popen(["true"])
    done.wait()
    return done.pid


def make_rank(folder_name: str, rank: int, process: str, parent: Path, dead_pid: int) -> Path:
    directory = JobDirectory(folder_name, rank, SIZE, parent)
    words = directory.buffer.words
    if process.startswith("is dead"):
        words[Header.PID] = dead_pid
    if process == "is another process by now":
        words[Header.BORN] += 1
    if process.startswith("is of another container"):
        words[Header.PID_SPACE] ^= 6
        words[Header.PID] = dead_pid  # there it may be alive
    if process.endswith("has left"):
        words[Header.STATE] = RankState.ENDED
    if process == "has raised":
        words[Header.STATE] = RankState.RAISED
    if process.endswith("another version"):
        words[Header.MAGIC] = MAGIC + 8
        os.truncate(directory.path(rank), BUFFER_BYTES - 4096)
    return directory.folder


def make_folder(
    parent: Path, name: str, processes: list[str], kind: str, age_s: float, dead_pid: int
) -> Path:
    elsewhere = parent.parent / "elsewhere"
    elsewhere.mkdir(exist_ok=True)
    above = elsewhere if kind == "a link" else parent
    folder = above / f"{folder_prefix()}{name}"
    folder.mkdir(mode=0o700)
    for rank, process in enumerate(processes):
        make_rank(name, rank, process, above, dead_pid)
    then = time.time() - age_s
    os.utime(folder, (then, then))
    if kind == "a link":
        link = parent / folder.name
        link.symlink_to(folder)
        return link
    if kind == "of another name":
        return folder.rename(parent / f"shardmesh-{os.getuid() + 1}-{name}")
    if kind == "open to others":
        folder.chmod(0o777)
    if kind == "a stranger's":
        os.chown(folder, STRANGER, STRANGER)
    return folder


JOBS = st.lists(
    st.tuples(
        st.lists(st.sampled_from(sorted(PROCESSES)), max_size=SIZE),
        st.sampled_from(sorted(kind for kind in FOLDERS if IS_ROOT or kind != "a stranger's")),
        st.sampled_from([0.0, 1000.0]),
    ),
    min_size=1,
    max_size=6,
)


@given(jobs=JOBS, by=st.sampled_from(["sweep", "doctor"]))
def test_only_what_dead_jobs_have_left_is_deleted(
    jobs: list[tuple[list[str], str, float]],
    by: str,
    tmp_path_factory: pytest.TempPathFactory,
    dead_pid: int,
) -> None:
    parent = tmp_path_factory.mktemp("jobs") / "shared"
    parent.mkdir()
    folders = [make_folder(parent, f"job{n}", *job, dead_pid) for n, job in enumerate(jobs)]
    expected = []
    for folder, (processes, kind, age) in zip(folders, jobs, strict=True):
        is_whole_or_old = len(processes) == SIZE or age > 0
        if (
            FOLDERS[kind]
            and is_whole_or_old
            and not any(PROCESSES[process] for process in processes)
        ):
            expected.append(folder)
    if by == "doctor":
        assert sorted(remove_left([parent])) == sorted(expected)
    else:
        sweep(parent)
        kept = [folder for folder in expected if folder.exists()]
        assert len(kept) == min(1, len(expected))  # to find out what happened
        expected = [folder for folder in expected if folder not in kept]
    left = {folder for folder in folders if os.path.lexists(folder)}
    assert left == set(folders) - set(expected)
    for folder, (processes, _, _) in zip(folders, jobs, strict=True):
        if folder in left:
            assert len(list(folder.glob("rank*.trace"))) == len(processes)


def test_a_half_written_folder_is_left_to_the_job_that_makes_it(
    tmp_path: Path, dead_pid: int
) -> None:
    """Its first rank has died before the second one has made its file."""
    folder = make_folder(tmp_path, "begins", ["is dead"], "ours", 0.0, dead_pid)
    assert not is_left(folder, time.time())
    assert is_left(folder, time.time() - 1000)


def test_a_rank_whose_files_are_half_written(tmp_path: Path) -> None:
    folder = tmp_path / f"{folder_prefix()}half"
    folder.mkdir(mode=0o700)
    (folder / "rank0.4711").write_bytes(b"")
    (folder / "rank0.trace").write_bytes(b"")
    assert open_header(folder / "rank0.trace") is None
    assert list(remove_left([tmp_path])) == []
    os.utime(folder, (1, 1))
    assert list(remove_left([tmp_path])) == [folder]


def test_the_proc_of_another_namespace_says_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dead_pid: int
) -> None:
    """As after `unshare --pid` without mounting /proc: numbers there mean other processes."""
    folder = make_folder(tmp_path, "job", ["is dead"] * SIZE, "ours", 1000.0, dead_pid)
    header = open_header(folder / "rank0.trace")
    assert header is not None
    assert is_dead(header)
    monkeypatch.setattr(job_directory.os, "readlink", lambda path: str(os.getpid() + 1))
    assert not is_dead(header)
    assert list(remove_left([tmp_path])) == []


@pytest.mark.parametrize("only_theirs", [False, True])
def test_jobs_of_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dead_pid: int, only_theirs: bool
) -> None:
    """Of an interrupted `launch` only its own job's folder is deleted, and not while one of its
    processes lives. The variable may be set for the ranks alone.
    """
    environment = {"SHARDMESH_WATCH_DIR": str(tmp_path)}
    if not only_theirs:
        monkeypatch.setenv("SHARDMESH_WATCH_DIR", str(tmp_path))
        environment = dict(os.environ)
    own = make_folder(tmp_path, "own", ["is dead"] * SIZE, "ours", 0.0, dead_pid)
    other = make_folder(tmp_path, "other", ["is dead", "is dead", "lives"], "ours", 0.0, dead_pid)
    remove_jobs_of({1, dead_pid}, environment)
    assert (own.exists(), other.exists()) == (False, True)
    remove_jobs_of({os.getpid(), dead_pid}, environment)
    assert other.exists()


@pytest.mark.parametrize(
    ("field", "is_left_behind"),
    [("KeyboardInterrupt", False), ("SIGTERM", False), ("SIGHUP", False), ("ValueError", True)],
)
def test_last_rank_of_an_interrupted_job_removes_the_folder(
    field: str, is_left_behind: bool, tmp_path: Path
) -> None:
    one, two = JobDirectory("job", 0, 2, tmp_path), JobDirectory("job", 1, 2, tmp_path)
    one.post(Verdict("raised", (0,), field, (), "rank 0 ..."))
    one.leave(RankState.ENDED)
    assert one.folder.exists()
    two.leave(RankState.ENDED)
    assert one.folder.exists() == is_left_behind


def test_the_doctor_deletes_and_says_what(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    dead_pid: int,
) -> None:
    monkeypatch.setenv("SHARDMESH_WATCH_DIR", str(tmp_path))
    monkeypatch.setattr(
        "shardmesh.mesh.doctor.command._examine_host", lambda here, mesh: pytest.skip.Exception
    )
    dead = [
        make_folder(tmp_path, name, ["is dead"] * SIZE, "ours", 0.0, dead_pid)
        for name in ("one", "two")
    ]
    living = make_folder(tmp_path, "three", ["lives"] * SIZE, "ours", 0.0, dead_pid)
    with pytest.raises(AttributeError):  # there is no report
        main(["doctor", "--fix"])
    said = capsys.readouterr().err
    for folder in dead:
        assert f"shardmesh doctor: deleted {folder}, which a dead job had left" in said
    assert list(tmp_path.glob("shardmesh-*")) == [living]


def test_a_killed_job_is_swept_by_the_next(tmp_path: Path) -> None:
    """Real processes: each is killed with its files in place; a job keeps those of the last one
    before it.
    """
    program = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from shardmesh.mesh.monitor.recording.cleanup import sweep\n"
        "from shardmesh.mesh.monitor.recording.job_directory import JobDirectory\n"
        "JobDirectory(sys.argv[1], 0, 1, Path(sys.argv[2]))\n"
        "sweep(Path(sys.argv[2]))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    for number in range(3):
        subprocess.run(
            [sys.executable, "-c", program, f"job{number}", str(tmp_path)], check=False, timeout=100
        )
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"{folder_prefix()}job{number}" for number in (1, 2)
    ]
