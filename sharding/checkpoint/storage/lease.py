"""The lease of a folder: one job at a time saves into it; a file in it has the owner's process.

    checkpoints/
      .owner-00000007.json     host, process, start and job of its rank 0; the highest number counts

A lease is taken by creating the file of the next number, which only one process can do; so two jobs
that find a dead owner at the same time cannot both replace it. On the same machine an owner is
alive while its process is. On another machine that cannot be looked up: an owner touches its file
while it saves, and a waiting job checks whether the file changes, without comparing clocks. An
owner on another machine that is not saving is replaced; it raises when it saves again.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import re
import stat
import threading
import time
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path

from ....mesh.monitor.startup.rank_info import RankInfo, own_rank_info
from ....mesh.text import shortened
from ..agreement import CheckpointError
from .files import open_regular, read_regular

_NAME = re.compile(r"\.owner-([0-9]{8,18})\.json")
_LONGEST = 1 << 16  # bytes of an owner's file
_WAIT_S = 60.0  # how long to wait for an owner to end: launchers give a job 30 s to terminate
_STALE_S = 40.0  # an owner on another machine that has not touched its file for this long is dead
_BEAT_S = 5.0
_POLL_S = 0.1

_held: dict[Path, Lease] = {}  # of this process
_lock = threading.Lock()


@dataclass(frozen=True)
class Owner:
    """The process that may save into a folder.

    Attributes:
        card: the process, host and job.
        token: unique to this lease.
        since: the time by its own clock, for messages.
    """

    card: RankInfo
    token: str
    since: str

    def __str__(self) -> str:
        job = f" of job {self.card.job}" if self.card.job else ""
        return shortened(f"{self.card.place}{job}, since {self.since}")


class Lease:
    """The right to save into a folder, held by rank 0 of a job.

    Attributes:
        folder: the folder.
        owner: this process.
        keep: whether to keep it between saves, until the process ends.
        saving: whether a save is in progress.
    """

    def __init__(self, folder: Path, owner: Owner, keep: bool) -> None:
        self.folder, self.owner, self.keep, self.saving = folder, owner, keep, False
        self._number = 0
        self._pid = os.getpid()
        self._ended = threading.Event()

    def begin(self) -> None:
        """Begin a save: touch the file regularly from now on."""
        self.saving = True
        self._ended = threading.Event()
        threading.Thread(
            target=self._beat, args=(self._ended,), name="shardmesh-lease", daemon=True
        ).start()

    def end(self) -> None:
        """End the save."""
        self.saving = False
        self._ended.set()
        if not self.keep:
            self.release()

    def release(self) -> None:
        """Release the lease, so that other jobs can save."""
        with _lock:
            if _held.get(self.folder) is self:
                del _held[self.folder]
        if self._pid == os.getpid():  # not in a fork
            with contextlib.suppress(OSError):
                _file(self.folder, self._number).unlink()

    def is_there(self) -> bool:
        """Return whether the folder still has this lease."""
        owner = _read(self.folder, self._number)
        return owner is not None and owner.token == self.owner.token

    def claim(self, last: int) -> bool:
        """Replace the owner of number `last`; return False if another process was faster."""
        self._number = last + 1
        path = _file(self.folder, self._number)
        temporary = path.with_name(f"{path.name}.{self.owner.token}")
        with temporary.open("x") as file:
            file.write(json.dumps(asdict(self.owner)))
        try:
            _create(temporary, path)
        except FileExistsError:
            return False
        finally:
            temporary.unlink(missing_ok=True)
        owners = {number for number, is_file in _numbers(self.folder).items() if is_file}
        # another process started again from 1 after `last` was released
        if owners - {last, self._number}:
            path.unlink(missing_ok=True)
            return False
        for left in self.folder.glob(".owner-*"):
            if left != path:
                with contextlib.suppress(OSError):  # what is not a file is no owner, and may stay
                    left.unlink()
        return True

    def _beat(self, ended: threading.Event) -> None:
        while not ended.wait(_BEAT_S):
            with contextlib.suppress(OSError):
                os.utime(_file(self.folder, self._number))


def take_lease(folder: Path, keep: bool) -> Lease:
    """Take the lease of a folder and begin a save; wait up to a minute for the current owner.

    Args:
        folder: an existing folder.
        keep: see `Lease`.

    Raises:
        CheckpointError: another job that is alive has the folder, or has taken it from this one;
            the text has the job.
    """
    folder = folder.resolve()
    with _lock:
        lease = _held.get(folder)
    if lease is None or lease._pid != os.getpid() or lease.saving or not _is_valid(lease):
        lease = _wait_for(Lease(folder, _self(), keep))
        with _lock:
            _held[folder] = lease
    lease.begin()
    return lease


def _is_valid(lease: Lease) -> bool:
    """Return whether a lease of this process is still valid.

    False if its file was removed and there is no other owner.

    Raises:
        CheckpointError: another job has taken the folder.
    """
    if lease.is_there():
        return True
    _, owner = _newest(lease.folder)
    if (
        owner is not None
        and not owner.card.is_gone()
        and not owner.card.is_same_process(lease.owner.card)
    ):
        raise CheckpointError(_lost_text(lease.folder, owner))
    return False


def _wait_for(lease: Lease) -> Lease:
    deadline = time.monotonic() + _WAIT_S
    observer = _OwnerObserver(lease)
    while True:
        number, owner = _newest(lease.folder)
        if observer.is_free(number, owner) and lease.claim(number):
            return lease
        if time.monotonic() > deadline:
            raise CheckpointError(_in_use_text(lease, owner))
        time.sleep(_POLL_S * (0.5 + os.urandom(1)[0] / 256))  # jitter


class _OwnerObserver:
    """Observes a folder's owner while a job waits for it."""

    def __init__(self, lease: Lease) -> None:
        self._lease = lease
        self._seen: tuple[int, int] | None = None
        self._since = time.monotonic()

    def is_free(self, number: int, owner: Owner | None) -> bool:
        """Return whether the owner has ended, or is elsewhere and not known to be alive."""
        card = self._lease.owner.card
        if not number:
            return True
        has_file = owner is not None or _numbers(self._lease.folder).get(number, False)
        if not has_file:
            return True
        if owner is not None and owner.card.is_same_process(card):
            return not _is_saving(self._lease.folder, owner)
        if owner is not None and owner.card.machine == card.machine:
            return owner.card.is_gone()
        first, before = self._seen is None, self._seen
        self._seen = number, _touch_time(self._lease.folder, number)
        if self._seen != before:
            self._since = time.monotonic()
        idle = owner is not None and not any(self._lease.folder.glob("step-*.tmp-*"))
        return (first and idle) or time.monotonic() > self._since + _STALE_S


def _is_saving(folder: Path, owner: Owner) -> bool:
    """Return whether this process is saving under the lease of this owner."""
    with _lock:
        return folder in _held and _held[folder].owner.token == owner.token and _held[folder].saving


def _self() -> Owner:
    env = os.environ
    card = own_rank_info(
        int(env.get("RANK", "0")),
        {},
        0,
        {"TORCHELASTIC_RUN_ID": env.get("SLURM_JOB_ID", ""), **env},
    )
    return Owner(card, os.urandom(4).hex(), datetime.now(UTC).isoformat(timespec="seconds"))


def _file(folder: Path, number: int) -> Path:
    return folder / f".owner-{number:08d}.json"


def _numbers(folder: Path) -> dict[int, bool]:
    """Return the numbers of owners, and whether each is a file.

    A folder or a link of that name only takes the number.
    """
    numbers = {}
    for name in os.listdir(folder):
        match = _NAME.fullmatch(name)
        if match and _file(folder, int(match[1])).name == name:
            with contextlib.suppress(FileNotFoundError):
                numbers[int(match[1])] = stat.S_ISREG(os.lstat(folder / name).st_mode)
    return numbers


def _newest(folder: Path) -> tuple[int, Owner | None]:
    """Return the highest number, 0 if there is none, and its owner, None if it cannot be read."""
    number = max(_numbers(folder), default=0)
    return number, _read(folder, number) if number else None


def _read(folder: Path, number: int) -> Owner | None:
    try:
        stored = json.loads(read_regular(_file(folder, number), _LONGEST))
        card = RankInfo(**stored["card"])
        token = stored["token"]
        since = stored["since"]
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None
    is_typed = all(
        type(getattr(card, f.name)).__name__ == str(f.type).partition("[")[0] for f in fields(card)
    )
    if (
        not is_typed
        or type(token) is not str
        or type(since) is not str
        or not 0 < card.pid < 1 << 31
    ):
        return None
    return Owner(card, token, since)


def _touch_time(folder: Path, number: int) -> int:
    """Return when the file was touched, by the clock of the writer."""
    try:
        with open_regular(_file(folder, number)) as file:  # open it, so that NFS asks the server
            return os.fstat(file.fileno()).st_mtime_ns
    except OSError:
        return 0


def _create(temporary: Path, path: Path) -> None:
    """Give the file this name atomically, with its content.

    Raises:
        FileExistsError: the name exists.
    """
    try:
        os.link(temporary, path)
    except (FileExistsError, FileNotFoundError) as error:  # not found: a new owner has removed it
        raise FileExistsError(path) from error
    except OSError:  # a filesystem without hard links
        with path.open("x") as file:
            file.write(temporary.read_text())


def _in_use_text(lease: Lease, owner: Owner | None) -> str:
    same = owner is not None and owner.card.is_same_process(lease.owner.card)
    who = (
        "another save of this process"
        if same
        else f"another job ({owner or 'its file cannot be read'})"
    )
    return (
        f"save: {who} saves into {lease.folder} and did not end within {_WAIT_S:.0f} s; one job at "
        "a time can save into a folder: end the other job, or use another folder"
    )


def _lost_text(folder: Path, owner: Owner) -> str:
    return (
        f"save: another job ({owner}) has taken {folder} from this one; one job at a time can save "
        "into a folder: end one of them, or use another folder"
    )


@atexit.register
def _release_all() -> None:
    for lease in list(_held.values()):
        lease.release()
