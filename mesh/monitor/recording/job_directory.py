"""The trace buffers of a job's ranks on this host, in one folder, and the verdict that ends it.

/dev/shm/shardmesh-1000-5f3a.../     named by the user and the job
    rank0.trace  rank1.trace ...     written by their ranks; those of other hosts' ranks are copies
                                     written by `relay.py`
    alarm                            whether there is a verdict, and its text
    verdict.json                     the same, for reading it later
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import socket
import threading
import time
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from ...comm.recording.trace_buffer import (
    BUFFER_BYTES,
    HEADER_BYTES,
    MAGIC,
    SIZE_BITS,
    Header,
    RankState,
    TraceBuffer,
    stable_hash,
)
from ...text import whole_number
from ..verdict import Verdict
from .files import (
    folder_prefix,
    make_file,
    make_own_folder,
    map_file,
    open_own,
    parent_folder,
    read_file,
    remove_folder,
    trace_files,
)

ALARM_BYTES = 1 << 18
_LONGEST_TEXT = 16_000
_VERDICT = 16  # where the verdict starts in the alarm file, after the flag and its length
_TO_LOCK_S = 1.0  # a process that is stopped while it holds the lock must not stop the others
_PAUSE_S = 0.001
_MOST_VERDICT = 1 << 24  # bytes


class Alarm:
    """The first word of the alarm file."""

    NONE, VERDICT, UNMONITORED = range(3)


class JobDirectory:
    """What the ranks of one job share on this host.

    Everything that a running job needs is mapped memory of files that were allocated beforehand, so
    it keeps working when the folder is deleted or its file system is full.

    Attributes:
        folder: where the files are.
        buffer: this rank's trace buffer.
        alarm: words; the first is one of `Alarm`.
    """

    def __init__(self, job: str, rank: int, size: int, parent: Path | None = None) -> None:
        """Create the files of this rank. Raises: OSError if that fails."""
        self.rank, self.size = rank, size
        self.folder = (parent_folder() if parent is None else parent) / f"{folder_prefix()}{job}"
        make_own_folder(self.folder)
        self._alarm_file = open_own(make_file(self.folder / "alarm", ALARM_BYTES), os.O_RDWR)
        weakref.finalize(self, os.close, self._alarm_file)
        self._alarm = memoryview(mmap.mmap(self._alarm_file, ALARM_BYTES))
        self.alarm: Any = self._alarm.cast("Q")
        self._posting = threading.Lock()
        self.buffer = self._make_buffer()
        self._buffers: dict[int, TraceBuffer] = {rank: self.buffer}

    def _make_buffer(self) -> TraceBuffer:
        path = self.path(self.rank)
        temporary = path.with_suffix(f".{os.getpid()}")
        try:
            buffer = TraceBuffer(map_file(make_file(temporary, BUFFER_BYTES), BUFFER_BYTES))
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
        words = buffer.words
        buffer.begin(self.rank, self.size)
        words[Header.PID], words[Header.BORN], words[Header.PID_SPACE] = (
            os.getpid(),
            born(os.getpid()),
            pid_space(),
        )
        words[Header.CLOCK] = time.time_ns() - time.monotonic_ns()
        words[Header.HEARTBEAT] = time.monotonic_ns()
        words[Header.HOST] = buffer.text(socket.gethostname())
        temporary.replace(path)  # others see the whole file or none
        return buffer

    def path(self, rank: int) -> Path:
        return self.folder / f"rank{rank}.trace"

    @property
    def file_id(self) -> str:
        """An identifier that is equal on two ranks exactly if they see the same files.

        Whatever the names of their folders.
        """
        stat_result = os.fstat(self._alarm_file)
        return f"{stat_result.st_dev}:{stat_result.st_ino}"

    def buffer_of(self, rank: int) -> TraceBuffer | None:
        """Return the trace buffer of a rank; None as long as there is none."""
        buffer = self._buffers.get(rank)
        if buffer is None:
            buffer = open_buffer(self.path(rank))
            if buffer is not None:
                self._buffers[rank] = buffer
        return buffer

    def post(self, verdict: Verdict) -> Verdict:
        """Make this the verdict of the job, unless there is one; return the one that stands.

        It is saved before the alarm is raised, at which ranks, this one too, may end at once.
        """
        with self._job_lock():
            if self.alarm[0] == Alarm.NONE:
                self._write(verdict)
                self._save(verdict)
                self.alarm[0] = Alarm.VERDICT
        return self.verdict() or verdict

    def _write(self, verdict: Verdict) -> None:
        encoded = verdict.to_json().encode()
        if len(encoded) > ALARM_BYTES - _VERDICT:
            encoded = (
                replace(verdict, seen=(), text=verdict.text[:_LONGEST_TEXT]).to_json().encode()
            )
        self._alarm[_VERDICT : _VERDICT + len(encoded)] = encoded
        self.alarm[1] = len(encoded)

    def _save(self, verdict: Verdict) -> None:
        """Write the verdict for later readers.

        Without room, or without the folder, the ranks still have it in the alarm.
        """
        unfinished = self.folder / f"verdict.{os.getpid()}"
        try:
            file = open_own(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            with open(file, "w") as text:
                text.write(verdict.to_json())
            unfinished.replace(self.folder / "verdict.json")
        except OSError:
            with contextlib.suppress(OSError):
                unfinished.unlink()

    def verdict(self) -> Verdict | None:
        if self.alarm[0] != Alarm.VERDICT:
            return None
        return Verdict.from_json(bytes(self._alarm[_VERDICT : _VERDICT + self.alarm[1]]).decode())

    def give_up(self) -> bool:
        """Let the ranks of this host go on without the monitor.

        Return whether this call decided so; False after a verdict.
        """
        with self._job_lock():
            is_first = self.alarm[0] == Alarm.NONE
            if is_first:
                self.alarm[0] = Alarm.UNMONITORED
        return is_first

    @contextlib.contextmanager
    def _job_lock(self) -> Iterator[None]:
        """Lock the job's processes on this host; the lock of a process that dies is released."""
        deadline = time.monotonic() + _TO_LOCK_S
        with self._posting:
            while not self._try_lock() and time.monotonic() < deadline:
                time.sleep(_PAUSE_S)
            try:
                yield
            finally:
                with contextlib.suppress(OSError):
                    fcntl.flock(self._alarm_file, fcntl.LOCK_UN)

    def _try_lock(self) -> bool:
        try:
            fcntl.flock(self._alarm_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:  # a file system without locks
            return True
        return True

    def leave(self, state: int) -> None:
        """Set this rank's final state; the last rank deletes the folder, unless the job failed."""
        self.buffer.words[Header.STATE] = state
        verdict = self.verdict()
        if verdict is not None and not verdict.is_interruption:
            return
        with contextlib.suppress(OSError):  # the folder has been deleted
            buffers = [
                buffer
                for path in trace_files(self.folder)
                if (buffer := open_buffer(path)) is not None and is_near(buffer)
            ]
            if len(buffers) >= ranks_here(self.size) and all(
                buffer.words[Header.STATE] != RankState.RUNNING for buffer in buffers
            ):
                remove_folder(self.folder)


def ranks_here(size: int) -> int:
    """Return how many ranks of a job of this size are on this host.

    According to the launcher; all if it does not say.
    """
    told = os.environ.get("LOCAL_WORLD_SIZE", "")
    return whole_number(told) or size


def may_span_hosts(env: Mapping[str, str], size: int) -> bool:
    """Return whether ranks of a job of this size may be on other hosts."""
    return env.get("LOCAL_WORLD_SIZE") != str(size)


def open_buffer(path: Path) -> TraceBuffer | None:
    """Map the trace buffer in this file; None if there is none."""
    try:
        buffer = TraceBuffer(map_file(path, BUFFER_BYTES))
    except (OSError, ValueError):
        return None
    return buffer if buffer.words[Header.MAGIC] == MAGIC else None


def open_header(path: Path) -> TraceBuffer | None:
    """Map the header alone of the trace buffer in this file.

    Also one that another version of the library has made; None if there is none.

    Its words up to `Header.PID_SPACE` have the same places in all versions.
    """
    try:
        header = TraceBuffer(map_file(path, HEADER_BYTES))
    except (OSError, ValueError):
        return None
    return header if header.words[Header.MAGIC] >> SIZE_BITS == MAGIC >> SIZE_BITS else None


def read_verdict(folder: Path) -> Verdict | None:
    """Return the verdict that a job has left; None if it has left none.

    Raises: OSError, ValueError if the file is damaged.
    """
    try:
        return Verdict.from_json(read_file(folder / "verdict.json", _MOST_VERDICT).decode())
    except FileNotFoundError:
        return None


def is_local(buffer: TraceBuffer) -> bool:
    """Return whether the buffer's process can be looked up from here."""
    return buffer.words[Header.PID_SPACE] == pid_space()


def is_near(buffer: TraceBuffer) -> bool:
    """Return whether the buffer is its rank's own, and not a copy of a buffer on another host."""
    return buffer.words[Header.PID_SPACE] != 0


def pid_space() -> int:
    """Return an identifier of the set of processes that this one can look up by process id."""
    try:
        namespace = os.stat("/proc/self/ns/pid").st_ino  # the same on all hosts, outside containers
    except OSError:
        namespace = 0
    return stable_hash(f"{boot_id()}/{namespace}") | 1


@cache
def boot_id() -> str:
    """Return a text that all processes of this host share, in any container, and no other host."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def _has_own_proc() -> bool:
    """Return whether /proc, if there is one, shows the processes of this namespace.

    One of a parent has other numbers for them.
    """
    try:
        return os.readlink("/proc/self") == str(os.getpid())
    except OSError:
        return True


def process_state(pid: int) -> tuple[str, int] | None:
    """Return (state, start time) of a process as Linux shows them.

    "R", "S", "T" stopped, "Z" dead ...; None when there is none.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None if os.path.isdir("/proc/self") or not _exists(pid) else ("?", 0)
    return fields[0], int(fields[19])


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def born(pid: int) -> int:
    state = process_state(pid)
    return 0 if state is None else state[1]


def is_dead(buffer: TraceBuffer) -> bool:
    """Return whether the process of a buffer on this host is gone."""
    if not is_local(buffer) or not _has_own_proc():
        return False
    state = process_state(buffer.words[Header.PID])
    return state is None or state[0] in "ZX" or state[1] != buffer.words[Header.BORN]


def is_stopped(buffer: TraceBuffer) -> bool:
    """Return whether the process of a buffer on this host was stopped by a signal."""
    state = process_state(buffer.words[Header.PID]) if is_local(buffer) else None
    return state is not None and state[0] in "Tt"
