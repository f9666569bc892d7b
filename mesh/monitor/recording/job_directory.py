"""The pages of all ranks of a job on this host, in one folder, and the verdict that ends the job.

    /dev/shm/shardmesh-1000-5f3a.../     named by the job and the user
        rank0.page  rank1.page ...       written by their ranks; what other hosts' ranks do is copied here by `relay.py`
        alarm                            whether there is a verdict, and its text
        verdict.json                     the same, for whoever reads the folder later
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import shutil
import socket
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from ..verdict import Verdict
from .files import folder_prefix, make_file, map_file, parent_folder
from .trace_buffer import MAGIC, PAGE_BYTES, H, Page, State, stable_hash

ALARM_BYTES = 1 << 18
_LONGEST_TEXT = 16_000
_VERDICT = 16  # where the verdict starts in the alarm file, after its length
_TO_LOCK_S = 1.0  # a process that is stopped while it has the lock must not stop the others
_PAUSE_S = 0.001


class Alarm:
    """The first word of the alarm file."""

    NONE, VERDICT, UNWATCHED = range(3)


class Board:
    """What the ranks of one job on this host show each other.

    Everything that a running job needs is mapped memory of files that were allocated before: it works on when the folder is deleted or
    its file system is full.

    Attributes:
        folder: where the files are.
        page: this rank's.
        alarm: words; the first is one of `Alarm`.
    """

    def __init__(self, job: str, rank: int, size: int, parent: Path | None = None) -> None:
        """Raises: OSError where no file can be made."""
        self.rank, self.size = rank, size
        self.folder = (parent_folder() if parent is None else parent) / f"{folder_prefix()}{job}"
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._alarm_file = os.open(make_file(self.folder / "alarm", ALARM_BYTES), os.O_RDWR)
        weakref.finalize(self, os.close, self._alarm_file)
        self._alarm = memoryview(mmap.mmap(self._alarm_file, ALARM_BYTES))
        self.alarm: Any = self._alarm.cast("Q")
        self._posting = threading.Lock()
        self.page = self._make_page()
        self._pages: dict[int, Page] = {rank: self.page}

    def _make_page(self) -> Page:
        path = self.path(self.rank)
        temporary = path.with_suffix(f".{os.getpid()}")
        try:
            page = Page(map_file(make_file(temporary, PAGE_BYTES), PAGE_BYTES))
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
        words = page.words
        page.begin(self.rank, self.size)
        words[H.PID], words[H.BORN], words[H.PID_SPACE] = os.getpid(), born(os.getpid()), pid_space()
        words[H.CLOCK] = time.time_ns() - time.monotonic_ns()
        words[H.HEARTBEAT] = time.monotonic_ns()
        words[H.HOST] = page.text(socket.gethostname())
        temporary.replace(path)  # others see it whole or not at all
        return page

    def path(self, rank: int) -> Path:
        return self.folder / f"rank{rank}.page"

    @property
    def place(self) -> str:
        """The same on two ranks exactly if they have the same files, whatever the names of their folders."""
        found = os.fstat(self._alarm_file)
        return f"{found.st_dev}:{found.st_ino}"

    def of(self, rank: int) -> Page | None:
        """The page of a rank; None as long as there is none."""
        found = self._pages.get(rank)
        if found is None:
            found = open_page(self.path(rank))
            if found is not None:
                self._pages[rank] = found
        return found

    def post(self, verdict: Verdict) -> Verdict:
        """Make this the verdict of the job, unless there is one; return the one that stands."""
        with self._locked():
            if self.alarm[0] == Alarm.NONE:
                self._write(verdict)
                self.alarm[0] = Alarm.VERDICT
                self._save(verdict)
        return self.verdict() or verdict

    def _write(self, verdict: Verdict) -> None:
        encoded = verdict.to_json().encode()
        if len(encoded) > ALARM_BYTES - _VERDICT:
            encoded = replace(verdict, seen=(), text=verdict.text[:_LONGEST_TEXT]).to_json().encode()
        self._alarm[_VERDICT : _VERDICT + len(encoded)] = encoded
        self.alarm[1] = len(encoded)

    def _save(self, verdict: Verdict) -> None:
        """For whoever reads the folder later; without room for it, or the folder, the ranks know it all the same."""
        unfinished = self.folder / f"verdict.{os.getpid()}"
        try:
            unfinished.write_text(verdict.to_json())
            unfinished.replace(self.folder / "verdict.json")
        except OSError:
            with contextlib.suppress(OSError):
                unfinished.unlink()

    def verdict(self) -> Verdict | None:
        if self.alarm[0] != Alarm.VERDICT:
            return None
        return Verdict.from_json(bytes(self._alarm[_VERDICT : _VERDICT + self.alarm[1]]).decode())

    def give_up(self) -> bool:
        """The ranks of this host go on without a watch. Return whether this call is what decided so; False after a verdict."""
        with self._locked():
            is_first = self.alarm[0] == Alarm.NONE
            if is_first:
                self.alarm[0] = Alarm.UNWATCHED
        return is_first

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """A lock of the job's processes on this host; that of one that dies is free again."""
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
        """This rank is done with the job; the last one on this host deletes the folder, if all went well."""
        self.page.words[H.STATE] = state
        if self.alarm[0] == Alarm.VERDICT:
            return
        with contextlib.suppress(OSError):  # the folder is gone already
            pages = [page for path in self.folder.glob("rank*.page") if (page := open_page(path)) is not None and is_near(page)]
            if len(pages) >= ranks_here(self.size) and all(page.words[H.STATE] != State.RUNNING for page in pages):
                shutil.rmtree(self.folder, ignore_errors=True)


def ranks_here(size: int) -> int:
    """Return how many ranks of a job of this size are on this host, as the launcher says; all where none says it."""
    told = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(told) if told.isdecimal() else size


def open_page(path: Path) -> Page | None:
    """The page in this file, mapped; None where there is none."""
    try:
        page = Page(map_file(path, PAGE_BYTES))
    except (OSError, ValueError):
        return None
    return page if page.words[H.MAGIC] == MAGIC else None


def read_verdict(folder: Path) -> Verdict | None:
    try:
        return Verdict.from_json((folder / "verdict.json").read_text())
    except (OSError, ValueError):
        return None


def is_local(page: Page) -> bool:
    """Whether the page's process can be looked up from here."""
    return page.words[H.PID_SPACE] == pid_space()


def is_near(page: Page) -> bool:
    """Whether the page is its rank's own, and not a copy of what a rank of another host said some time ago."""
    return page.words[H.PID_SPACE] != 0


def pid_space() -> int:
    """Return a number of the set of processes that this one can look up by their process numbers."""
    try:
        namespace = os.stat("/proc/self/ns/pid").st_ino  # the same on all hosts, outside containers
    except OSError:
        namespace = 0
    return stable_hash(f"{boot_id()}/{namespace}") | 1


@cache
def boot_id() -> str:
    """Return a text that is the same for all processes of this host, in whatever container, and of no other host."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def process_state(pid: int) -> tuple[str, int] | None:
    """(state, start time) of a process as Linux shows them: "R", "S", "T" stopped, "Z" dead ...; None when there is none."""
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
    found = process_state(pid)
    return 0 if found is None else found[1]


def is_dead(page: Page) -> bool:
    """Whether the process of a page of this host is gone."""
    if not is_local(page):
        return False
    found = process_state(page.words[H.PID])
    return found is None or found[0] in "ZX" or found[1] != page.words[H.BORN]


def is_stopped(page: Page) -> bool:
    """Whether the process of a page of this host was stopped by a signal."""
    found = process_state(page.words[H.PID]) if is_local(page) else None
    return found is not None and found[0] in "Tt"
