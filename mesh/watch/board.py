"""The pages of all ranks of a job on this host, in one folder, and the verdict that ends the job.

    /dev/shm/shardmesh-1000-5f3a.../     named by the job and the user
        rank0.page  rank1.page ...       written by their ranks; what other hosts' ranks do is copied here by `relay.py`
        alarm                            one word: whether there is a verdict
        verdict.json                     the first one stands
"""

from __future__ import annotations

import contextlib
import mmap
import os
import shutil
import socket
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from .page import MAGIC, PAGE_BYTES, H, Page, State
from .verdict import Verdict

_KEPT = 10  # folders of dead jobs that are left for whoever wants to know what happened
_NEW_S = 60.0
_SHARED_MEMORY = Path("/dev/shm")


def parent_folder() -> Path:
    """Where folders of jobs lie: in memory if that can be written to."""
    chosen = os.environ.get("SHARDMESH_WATCH_DIR")
    if chosen:
        return Path(chosen)
    return _SHARED_MEMORY if os.access(_SHARED_MEMORY, os.W_OK) else Path(tempfile.gettempdir())


def folder_prefix() -> str:
    return f"shardmesh-{os.getuid() if hasattr(os, 'getuid') else 0}-"


class Board:
    """What the ranks of one job on this host show each other.

    Attributes:
        folder: where the files are.
        page: this rank's.
        alarm: one word, not 0 when there is a verdict.
    """

    def __init__(self, job: str, rank: int, size: int) -> None:
        """Raises: OSError where no file can be made."""
        self.rank, self.size = rank, size
        parent = parent_folder()
        sweep(parent)
        self.folder = parent / f"{folder_prefix()}{job}"
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.page = self._make_page()
        self.alarm: Any = memoryview(_mapped(_made(self.folder / "alarm", 8), 8)).cast("Q")
        self._pages: dict[int, Page] = {rank: self.page}

    def _make_page(self) -> Page:
        path = self.path(self.rank)
        temporary = _made(path.with_suffix(f".{os.getpid()}"), PAGE_BYTES)
        page = Page(_mapped(temporary, PAGE_BYTES))
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

    def of(self, rank: int) -> Page | None:
        """The page of a rank; None as long as there is none."""
        found = self._pages.get(rank)
        if found is None:
            found = open_page(self.path(rank))
            if found is not None:
                self._pages[rank] = found
        return found

    def post(self, verdict: Verdict) -> Verdict:
        """Makes this the verdict of the job, unless there is one; the one that stands."""
        mine = self.folder / f"verdict.{os.getpid()}.{threading.get_ident()}"
        try:
            mine.write_text(verdict.to_json())
            with contextlib.suppress(FileExistsError):
                os.link(mine, self.folder / "verdict.json")
            mine.unlink()
        except OSError:  # the folder has gone: nobody else is there any more
            return verdict
        self.alarm[0] = 1
        return self.verdict() or verdict

    def verdict(self) -> Verdict | None:
        return read_verdict(self.folder)

    def leave(self, state: int) -> None:
        """This rank is done with the job; the last one on this host takes the folder away, if all went well."""
        self.page.words[H.STATE] = state
        pages = [page for path in self.folder.glob("rank*.page") if (page := open_page(path)) is not None and is_near(page)]
        have_all_come = len(pages) >= int(os.environ.get("LOCAL_WORLD_SIZE", self.size))
        if not self.alarm[0] and have_all_come and all(page.words[H.STATE] != State.RUNNING for page in pages):
            shutil.rmtree(self.folder, ignore_errors=True)


def open_page(path: Path) -> Page | None:
    """The page in this file, mapped; None where there is none."""
    try:
        page = Page(_mapped(path, PAGE_BYTES))
    except (OSError, ValueError):
        return None
    return page if page.words[H.MAGIC] == MAGIC else None


def read_verdict(folder: Path) -> Verdict | None:
    try:
        return Verdict.from_json((folder / "verdict.json").read_text())
    except (OSError, ValueError):
        return None


def _made(path: Path, size: int) -> Path:
    with path.open("ab") as file:  # never shorter than it was: another rank may have it mapped
        if file.tell() < size:
            file.truncate(size)
    return path


def _mapped(path: Path, size: int) -> mmap.mmap:
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), size)


def is_local(page: Page) -> bool:
    """Whether the page's process can be looked up from here."""
    return page.words[H.PID_SPACE] == pid_space()


def is_near(page: Page) -> bool:
    """Whether the page is its rank's own, and not a copy of what a rank of another host said some time ago."""
    return page.words[H.PID_SPACE] != 0


def pid_space() -> int:
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 1


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


def sweep(parent: Path) -> None:
    """Takes away what jobs that are over have left, but for the newest ones."""
    try:
        folders = sorted(parent.glob(f"{folder_prefix()}*"), key=lambda f: f.stat().st_mtime, reverse=True)
    except OSError:  # another rank sweeps, too
        return
    for folder in folders[_KEPT:]:
        if _is_old(folder) and is_over(folder):
            shutil.rmtree(folder, ignore_errors=True)


def _is_old(folder: Path) -> bool:
    """Whether nobody is making its pages right now."""
    try:
        return time.time() - folder.stat().st_mtime > _NEW_S
    except OSError:  # gone already
        return False


def is_over(folder: Path) -> bool:
    """Whether no process of the job in this folder is left, as far as its pages can tell: those of another container cannot."""
    pages = [page for path in folder.glob("rank*.page") if (page := open_page(path)) is not None]
    ours = [page for page in pages if page.words[H.PID_SPACE]]  # not the copies of other hosts' pages
    return all(is_local(page) and (is_dead(page) or page.words[H.STATE] != State.RUNNING) for page in ours)
