"""One job at a time saves into a folder: a file in it names the process that does.

    checkpoints/
      .owner-00000007.json     host, process, start time and job of its rank 0; the highest number counts

A lease is taken by creating the file of the next number, which a filesystem lets one process do; so two that find a dead owner at
the same moment cannot both follow it. On one machine an owner is alive as long as its process is. On another machine that
cannot be looked up: there an owner touches its file while it saves, and what counts is whether the file changes while it is watched, never
what two clocks say. An owner of another machine that is not saving is replaced; it raises when it saves again.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import re
import threading
import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from ....mesh.monitor.startup.rank_info import RankInfo, own_rank_info
from ..agreement import CheckpointError

_NAME = re.compile(r"\.owner-(\d+)\.json")
_WAIT_S = 60.0  # for an owner to end: launchers give a job that they end 30 s
_STALE_S = 40.0  # an owner on another machine that has not touched its file for so long is dead
_BEAT_S = 5.0
_POLL_S = 0.1

_held: dict[Path, Lease] = {}  # of this process
_lock = threading.Lock()


@dataclass(frozen=True)
class Owner:
    """Who may save into a folder.

    Attributes:
        card: its process, host and job.
        token: of this lease alone.
        since: the time of its own clock, to be read by people.
    """

    card: RankInfo
    token: str
    since: str

    def __str__(self) -> str:
        job = f" of job {self.card.job}" if self.card.job else ""
        return f"{self.card.place}{job}, since {self.since}"


class Lease:
    """The right to save into a folder, held by rank 0 of a job.

    Attributes:
        folder: which.
        owner: this process.
        kept: whether it is held between saves, until the process ends.
        saving: whether a save is under way.
    """

    def __init__(self, folder: Path, owner: Owner, kept: bool) -> None:
        self.folder, self.owner, self.kept, self.saving = folder, owner, kept, False
        self._number, self._pid = 0, os.getpid()
        self._ended = threading.Event()

    def begin(self) -> None:
        """A save begins: from now on the file is touched."""
        self.saving, self._ended = True, threading.Event()
        threading.Thread(target=self._beat, args=(self._ended,), name="shardmesh-lease", daemon=True).start()

    def end(self) -> None:
        """The save is over."""
        self.saving = False
        self._ended.set()
        if not self.kept:
            self.release()

    def release(self) -> None:
        """Let other jobs save."""
        with _lock:
            if _held.get(self.folder) is self:
                del _held[self.folder]
        if self._pid == os.getpid():  # not in a fork
            with contextlib.suppress(OSError):
                _file(self.folder, self._number).unlink()

    def is_there(self) -> bool:
        """Whether the folder still names this lease."""
        owner = _read(self.folder, self._number)
        return owner is not None and owner.token == self.owner.token

    def claim(self, last: int) -> bool:
        """Follow the owner of number `last`; False where another process was faster."""
        self._number = last + 1
        path = _file(self.folder, self._number)
        beside = path.with_name(f"{path.name}.{self.owner.token}")
        beside.write_text(json.dumps(asdict(self.owner)))
        try:
            _create(beside, path)
        except FileExistsError:
            return False
        finally:
            beside.unlink(missing_ok=True)
        if set(_numbers(self.folder)) - {last, self._number}:  # somebody began from 1, when `last` was released
            path.unlink(missing_ok=True)
            return False
        for left in self.folder.glob(".owner-*"):
            if left != path:
                left.unlink(missing_ok=True)
        return True

    def _beat(self, ended: threading.Event) -> None:
        while not ended.wait(_BEAT_S):
            with contextlib.suppress(OSError):
                os.utime(_file(self.folder, self._number))


def take(folder: Path, kept: bool) -> Lease:
    """Return the lease of a folder, with a save begun; wait up to a minute for an owner that is about to end.

    Args:
        folder: it exists.
        kept: see `Lease`.

    Raises:
        CheckpointError: another job that is alive has the folder, or has taken it from this one; names it.
    """
    folder = folder.resolve()
    with _lock:
        mine = _held.get(folder)
    if mine is None or mine._pid != os.getpid() or mine.saving or not _still(mine):
        mine = _wait_for(Lease(folder, _self(), kept))
        with _lock:
            _held[folder] = mine
    mine.begin()
    return mine


def _still(lease: Lease) -> bool:
    """Whether a lease of this process holds; not where its file is gone and nobody else's is there.

    Raises:
        CheckpointError: another job has taken the folder.
    """
    if lease.is_there():
        return True
    _, owner = _newest(lease.folder)
    if owner is not None and not owner.card.is_gone() and not owner.card.is_same_process(lease.owner.card):
        raise CheckpointError(_lost(lease.folder, owner))
    return False


def _wait_for(mine: Lease) -> Lease:
    deadline, watch = time.monotonic() + _WAIT_S, _Watch(mine)
    while True:
        number, owner = _newest(mine.folder)
        if watch.is_free(number, owner) and mine.claim(number):
            return mine
        if time.monotonic() > deadline:
            raise CheckpointError(_in_use(mine, owner))
        time.sleep(_POLL_S * (0.5 + os.urandom(1)[0] / 256))  # not all at the same moment


class _Watch:
    """What can be seen of a folder's owner while a job waits for it."""

    def __init__(self, mine: Lease) -> None:
        self._mine = mine
        self._seen: tuple[int, int] | None = None
        self._since = time.monotonic()

    def is_free(self, number: int, owner: Owner | None) -> bool:
        """Whether the owner is gone, or on another machine and not known to be alive."""
        card = self._mine.owner.card
        if not number:
            return True
        if owner is not None and owner.card.is_same_process(card):
            return not _is_saving(self._mine.folder, owner)
        if owner is not None and owner.card.machine == card.machine:
            return owner.card.is_gone()
        first, before = self._seen is None, self._seen
        self._seen = number, _touched(self._mine.folder, number)
        if self._seen != before:
            self._since = time.monotonic()
        idle = owner is not None and not any(self._mine.folder.glob("step-*.tmp-*"))
        return (first and idle) or time.monotonic() > self._since + _STALE_S


def _is_saving(folder: Path, owner: Owner) -> bool:
    """Whether this process is saving by the lease that names this owner."""
    with _lock:
        return folder in _held and _held[folder].owner.token == owner.token and _held[folder].saving


def _self() -> Owner:
    env = os.environ
    card = own_rank_info(int(env.get("RANK", "0")), {}, 0, {"TORCHELASTIC_RUN_ID": env.get("SLURM_JOB_ID", ""), **env})
    return Owner(card, os.urandom(4).hex(), datetime.now(UTC).isoformat(timespec="seconds"))


def _file(folder: Path, number: int) -> Path:
    return folder / f".owner-{number:08d}.json"


def _numbers(folder: Path) -> list[int]:
    return [int(match[1]) for name in os.listdir(folder) if (match := _NAME.fullmatch(name))]


def _newest(folder: Path) -> tuple[int, Owner | None]:
    """The highest number, 0 where there is none, and its owner; None for one that cannot be read."""
    number = max(_numbers(folder), default=0)
    return number, _read(folder, number) if number else None


def _read(folder: Path, number: int) -> Owner | None:
    try:
        told = json.loads(_file(folder, number).read_text())
        return Owner(RankInfo(**told["card"]), told["token"], told["since"])
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _touched(folder: Path, number: int) -> int:
    """When the file was touched, by the clock of who did."""
    try:
        with _file(folder, number).open("rb") as file:  # opened, since NFS then asks the server
            return os.fstat(file.fileno()).st_mtime_ns
    except OSError:
        return 0


def _create(beside: Path, path: Path) -> None:
    """Give the file this name, with all its content at once.

    Raises:
        FileExistsError: there is one of this name.
    """
    try:
        os.link(beside, path)
    except (FileExistsError, FileNotFoundError) as error:  # not found: a new owner has removed it
        raise FileExistsError(path) from error
    except OSError:  # a filesystem without hard links
        with path.open("x") as file:
            file.write(beside.read_text())


def _in_use(mine: Lease, owner: Owner | None) -> str:
    same = owner is not None and owner.card.is_same_process(mine.owner.card)
    who = "another save of this process" if same else f"another job ({owner or 'its file cannot be read'})"
    return (
        f"save: {who} saves into {mine.folder}, and has not ended within {_WAIT_S:.0f} s; one job at a time saves into a folder: "
        "end the other one, or give this one a folder of its own"
    )


def _lost(folder: Path, owner: Owner) -> str:
    return (
        f"save: another job ({owner}) has taken {folder}, which this one had; one job at a time saves into a folder: "
        "end one of them, or give this one a folder of its own"
    )


@atexit.register
def _release_all() -> None:
    for lease in list(_held.values()):
        lease.release()
