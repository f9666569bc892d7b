"""Agree on whether the job is monitored: a rank that others cannot see turns it off for all.

    rank 2   No space left on device    -> the store: "without"      trains without the monitor
    rank 0   waits for rank 2's buffer  <- the store, after 0.05 s   does so too, as do 1 and 3

In the store, under "shardmesh/monitor/JOB":
    folder/HOST   the folder that the first rank of a host has chosen
    place/RANK    which files a rank has
    without       why the job is not monitored; the first reason stands, and its rank prints it

A store that cannot be reached never answers, and the main thread may be blocked in it on its own
connection. So waiting ranks ask on a separate thread, and a rank that gives up does so over a
separate connection.
"""

from __future__ import annotations

import contextlib
import random
import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..text import printable, ranks_text, shortened
from .recording.files import parent_folder, parent_folders
from .recording.job_directory import JobDirectory, boot_id
from .startup.rank_info import machine
from .store_keys import StoreKeys
from .store_values import StoreValueError, message

_PAUSE_S = 0.1  # seconds between two questions to the store, in a job of up to _FEW ranks
_FEW = 100
_IDLE_S = 10.0  # after so many seconds without questions the connection is closed
_ASKED = 4  # missing ranks that are asked for each time


class Agreement:
    """One rank's part in the agreement.

    Args:
        store: of the default group.
        job: its name.
        stale: the key that says that the name is an earlier attempt's.
    """

    def __init__(self, store: Any, job: str, stale: str, rank: int, size: int) -> None:
        self._keys = StoreKeys(store, f"shardmesh/monitor/{job}")
        self._store, self._stale = store, stale
        self._rank, self._pause = rank, _PAUSE_S * max(1.0, size / _FEW)
        self._unseen: list[int] = []
        self._asked = threading.Event()
        self._thread: threading.Thread | None = None
        self._over = threading.Event()

    def folder(self, needed: int) -> Path:
        """Return the parent of the job's folder on this host.

        Args:
            needed: bytes for the files of all ranks of this host.

        Raises: OSError when another process has named a folder that is none of those this rank
        would choose.
        """
        chosen = str(parent_folder(needed))
        named = self._keys.claim(f"folder/{machine()}", chosen, message)
        known = {str(folder): folder for folder in (Path(chosen), *parent_folders())}
        if named not in known:
            raise OSError(
                f"another process has named {shortened(named)!r} as the folder of this host's "
                f"ranks, and this rank uses one of {', '.join(known)}: set SHARDMESH_WATCH_DIR to "
                "one folder on all ranks of a host, see docs/trust.md"
            )
        return known[named]

    def join(self, directory: JobDirectory) -> None:
        """Publish where this rank's files are. Communication: one message to the store."""
        self._keys.set(f"place/{self._rank}", _place(directory))

    def decline(self, reason: str) -> None:
        """Turn the monitor off on all ranks, unless another rank already has.

        Communication: one message to the store.
        """
        own = f"rank {self._rank}: {reason}"
        with contextlib.suppress(RuntimeError):
            if self._keys.clone().claim("without", own, str) != own:
                return
        warn(own)

    def give_up(self, directory: JobDirectory, reason: str) -> None:
        """Let all ranks go on without the monitor, unless there is a verdict.

        Those of this host at once, others through the store.
        """
        if directory.give_up():
            self.decline(reason)

    # -- ranks that wait ---------------------------------------------------------------------------

    def check_visible(self, directory: JobDirectory, ranks: Iterable[int], has_relay: bool) -> None:
        """Check in the background that the other ranks can be seen, and else turn the monitor off.

        The store is asked about those of these ranks that have not been seen. Returns at once.

        Args:
            has_relay: whether ranks of other hosts may become visible later.
        """
        self._unseen = [rank for rank in ranks if directory.buffer_of(rank) is None]
        if not self._unseen or self._over.is_set():
            return
        self._asked.set()
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._run,
                args=(directory, has_relay),
                name="shardmesh-agreement",
                daemon=True,
            )
            self._thread.start()

    def stop(self) -> None:
        self._over.set()
        self._asked.set()

    def _run(self, directory: JobDirectory, has_relay: bool) -> None:
        try:
            store = self._store.clone()
            while self._asked.wait(_IDLE_S) and not self._over.is_set():
                self._asked.clear()
                reason = self._reason(directory, has_relay, store)
                if reason:
                    self.give_up(directory, reason)
                    return
                self._over.wait(self._pause)
        except RuntimeError:  # the store has ended with the job
            self._over.set()
        finally:
            self._thread = None

    def _reason(self, directory: JobDirectory, has_relay: bool, store: Any) -> str:
        """Return why the ranks must go on without the monitor; "" if all is well."""
        keys = self._keys.over(store)
        if keys.has("without"):
            return _reason_text(keys)
        if store.check([self._stale]):
            return "the store has what an earlier attempt of the job left there"
        asked = random.sample(self._unseen, min(_ASKED, len(self._unseen)))
        hidden = sorted(rank for rank in asked if _is_hidden(directory, has_relay, keys, rank))
        return (
            f"{ranks_text(hidden)} and rank {self._rank} do not see each other's files in "
            f"{directory.folder}"
            if hidden
            else ""
        )


def _is_hidden(directory: JobDirectory, has_relay: bool, keys: StoreKeys, rank: int) -> bool:
    """Return whether a rank has files that this rank cannot see."""
    if not keys.has(f"place/{rank}"):
        return False
    try:
        is_near = keys.read(f"place/{rank}", message) == _place(directory)
    except StoreValueError:
        is_near = False
    return directory.buffer_of(rank) is None and (is_near or not has_relay)


def _reason_text(keys: StoreKeys) -> str:
    """Return why another rank has turned the monitor off.

    If the value that says so is damaged, return what is wrong with it.
    """
    try:
        return printable(keys.read("without", message))
    except StoreValueError as error:
        return str(error)


def warn(reason: str) -> None:
    """Print that the job is not monitored, and why."""
    print(f"shardmesh: this job is not monitored: {reason}", file=sys.stderr, flush=True)


def _place(directory: JobDirectory) -> str:
    return f"{boot_id()}/{directory.file_id}"
