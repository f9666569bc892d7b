"""Rendezvous at the job's store and check that all ranks agree, before any process group is made.

    rank 2 ---> the store at MASTER_ADDR, MASTER_PORT    opened here, as env:// start-up would
                  job         name of the job that arrived first
                  0/rank2     rank info of the process that is rank 2
                  0/came      2 0 3 1                     ranks that have arrived; once all have,
                  0/ready     3 1 0 2                     each adds itself to "ready", and the last
                                                          one to do so compares the rank infos
                  0/verdict   "go", or what is wrong      the first one stands: all ranks take it
                  1/...                                   the next default group of the same job

A rank is "ready" only while its process lives, so that entries which an earlier attempt of a
restarted job left in the launcher's store never count as arrived. A rank that finds an earlier
entry with its own number ends that round with "again".
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import time
from collections.abc import Iterator, Mapping
from types import TracebackType

import torch.distributed as dist
from torch.distributed import PrefixStore, Store

from .. import errors
from ..monitor.startup.rank_info import RankInfo, disagreement, own_rank_info, shared_device
from ..monitor.store_keys import StoreKeys
from ..monitor.store_values import StoreValueError, message
from ..text import printable, ranks_text, whole_number
from . import job_store
from .environment import complete_environment
from .job_store import Address
from .progress import Progress

TIMEOUT_S = 600.0  # for the last rank to arrive
_TO_TELL_S = 2.0  # how long a rank that cannot start tries to tell the others
_TO_TELL_LATE_S = 8.0  # the same for one that raises long before the others expect it
_RANK_PROCESS = "_SHARDMESH_RANK_PROCESS"  # a variable
# How long ranks that differ wait for the rest, so that votes can decide which are the outliers.
_TO_COME_S = 0.8
# How long the rank that serves the store stays, so that the others can read what is wrong.
_TO_READ_S = 1.0
_GO, _AGAIN = "go", "again"
# Between reads of the store, in a job of up to _FEW ranks. With more ranks each reads less often,
# so that one store can serve them all.
_FIRST_PAUSE_S, _PAUSE_S = 1e-3, 1e-2
_FEW = 100

_starts = itertools.count()


def rendezvous(
    rank: int, size: int, alike: Mapping[str, str], timeout: float = TIMEOUT_S, *, device: str = ""
) -> Store:
    """rendezvous(rank, size, alike) -> the store for a new default group of `size` ranks.

    They are all there and agree.

    Two processes with one RANK, another WORLD_SIZE, version or setting on some rank, and a rank of
    another job end it on all ranks with the same text, within about a second of their arrival. Jobs
    are told apart by TORCHELASTIC_RUN_ID, which torchrun and `launch` set; a second job with
    variables set by hand looks like a second process for each of its ranks, and is reported so.
    Where torchrun may restart processes (--max-restarts), a second process on another host is taken
    for the first one's successor.

    Args:
        alike: what must be the same on every rank, by name: see `rank_info.what_must_agree`.
        timeout: seconds for all ranks to arrive.
        device: of this rank, if no other rank may use it.

    Raises: LaunchEnvironmentError for all of that, and with the ranks that are missing when the
    time is over.

    Communication: a few messages to the store; waits for all ranks. Takes milliseconds once the
    last one is there.
    """
    progress, address = Progress(rank, timeout), job_store.address_of(os.environ)
    while True:
        info = own_rank_info(rank, alike, next(_starts), os.environ, device)
        store, serves = job_store.open_store(address, rank, size, progress)
        try:
            number = StoreRendezvous(store, info, progress, address, serves).run()
        except dist.DistError as error:  # the rank that serves it has ended, or makes a new one
            job_store.drop(address)
            if progress.is_over():
                raise errors.LaunchEnvironmentError(
                    f"rank {rank} lost the store at {address}: {error}"
                ) from error
            time.sleep(_PAUSE_S)
        else:
            return PrefixStore(f"shardmesh/epoch{number}", store)


def notify_of_early_errors() -> None:
    """Notify the other ranks if this one raises before its first mesh.

    If no launcher ends them: they would wait for it.
    """
    env = complete_environment(os.environ)
    numbers = [env.get(name, "") for name in ("RANK", "WORLD_SIZE", "MASTER_PORT")]
    if (
        None in map(whole_number, numbers)
        or numbers[1] == "1"
        or not env.get("MASTER_ADDR")
        or job_store.address_of(env).is_launchers
    ):
        return
    before, rank_process = sys.excepthook, os.getpid()
    # A child inherits the RANK, but is not that rank.
    if os.environ.setdefault(_RANK_PROCESS, str(rank_process)) != str(rank_process):
        return

    def tell(kind: type[BaseException], error: BaseException, where: TracebackType | None) -> None:
        before(kind, error, where)
        if os.getpid() == rank_process and not next(_starts) and not dist.is_initialized():
            notify_ranks(
                errors.LaunchEnvironmentError(
                    f"it raised {kind.__name__} before it made a mesh: {error}"
                ),
                _TO_TELL_LATE_S,
            )

    sys.excepthook = tell


def notify_ranks(
    error: errors.LaunchEnvironmentError, seconds: float = _TO_TELL_S
) -> errors.LaunchEnvironmentError:
    """Notify the ranks that can be reached in time that this one cannot start.

    Return the error that all ranks raise.
    """
    env = complete_environment(os.environ)
    rank, port = (whole_number(env.get(name, "")) for name in ("RANK", "MASTER_PORT"))
    if rank is None or port is None or not 0 < port < 1 << 16 or not env.get("MASTER_ADDR"):
        return error
    progress, address = Progress(rank, seconds), job_store.address_of(env)
    info = own_rank_info(rank, {"WORLD_SIZE": env.get("WORLD_SIZE", "?")}, next(_starts), env)
    try:
        store, serves = job_store.open_store(address, rank, 0, progress)
        StoreRendezvous(
            store,
            info,
            progress,
            address,
            serves,
            f"rank {rank} ({info.place}) cannot start: {error}",
        ).run()
    except errors.LaunchEnvironmentError as job_error:
        return job_error if job_store.is_open(address) else error
    except dist.DistError:
        pass
    return error


class StoreRendezvous:
    """One rank's part in the agreement of all ranks.

    With a `fault` the rank cannot take part, and tells the others why.
    """

    def __init__(
        self,
        store: Store,
        info: RankInfo,
        progress: Progress,
        address: Address,
        serves: bool,
        fault: str = "",
    ) -> None:
        self.store = StoreKeys(store, "shardmesh/start")
        self.info = info
        self.progress = progress
        self.address = address
        self.serves = serves
        self.fault = fault
        self.size = whole_number(info.size) or 0

    def run(self) -> int:
        """Return the number of the round in which all ranks agreed.

        Raises: LaunchEnvironmentError, with the text that all ranks raise.
        """
        self._check_job()
        for number in itertools.count():
            keys = self.store.below(str(number), "*")
            try:
                if not self._claim(keys):
                    continue
                verdict = _write_verdict(keys, self.fault) if self.fault else self._take_part(keys)
            except StoreValueError as error:  # the others raise the same
                with contextlib.suppress(StoreValueError, dist.DistError):
                    if (stands := _write_verdict(keys, str(error))) not in (_GO, _AGAIN):
                        self._leave(keys)
                        raise errors.LaunchEnvironmentError(stands) from error
                raise
            if verdict == _GO and not self.fault:
                return number
            if verdict != _AGAIN:
                self._leave(keys)
                raise errors.LaunchEnvironmentError(self.fault if verdict == _GO else verdict)
        raise AssertionError("unreachable")

    # -- who is who --------------------------------------------------------------------------------

    def _check_job(self) -> None:
        """Raise a LaunchEnvironmentError if the store belongs to another job, which continues."""
        first = _claim_key(self.store, "job", self.info)
        if self.info.job and first.job and first.job != self.info.job:
            self.store.append(
                "strays",
                f"rank {self.info.rank} of job {self.info.job!r} ({self.info.place}) "
                "came here by mistake; ",
            )
            raise errors.LaunchEnvironmentError(
                f"the store at {self.address} belongs to job {first.job!r} (rank {first.rank}, "
                f"{first.place}, came first), and rank {self.info.rank} ({self.info.place}) is one "
                f"of job {self.info.job!r}: give each job its own MASTER_ADDR or MASTER_PORT "
                "(torchrun --standalone, or --rdzv-endpoint, chooses a free one)."
            )

    def _claim(self, keys: StoreKeys) -> bool:
        """Claim this rank for this process.

        Return whether it can take part in this round, or must in the next.

        Raises: LaunchEnvironmentError when another process is the same rank, or this one arrives
        too late.
        """
        holder = _claim_key(keys, f"rank{self.info.rank}", self.info)
        verdict = _read(keys, "verdict")
        if verdict == _AGAIN:
            return False
        if holder == self.info:
            return self._is_in_time(keys, verdict)
        if not self._may_follow(holder):
            raise errors.LaunchEnvironmentError(self._duplicate(keys, holder, verdict))
        if not verdict:
            _write_verdict(keys, _AGAIN)
        return False

    def _is_in_time(self, keys: StoreKeys, verdict: str) -> bool:
        if not verdict:
            return True
        if _is_restartable():
            return False
        if verdict != _GO:
            raise errors.LaunchEnvironmentError(verdict)
        first = _claim_key(keys, "first", self.info)
        raise errors.LaunchEnvironmentError(
            self.fault
            or f"rank {self.info.rank} ({self.info.place}) came to {self.address} with "
            f"WORLD_SIZE={self.info.size}, but a job of "
            f"{first.size} ranks (rank {first.rank}: {first.place}) has started there without it. "
            "Give every process of one job the same WORLD_SIZE, and each job its own MASTER_PORT."
        )

    def _may_follow(self, holder: RankInfo) -> bool:
        """Return whether this process may take the place of the one that was this rank before.

        It is the same, has ended, or is one that torchrun has replaced.
        """
        elsewhere = holder.machine != self.info.machine
        return (
            holder.is_same_process(self.info)
            or holder.is_gone()
            or (elsewhere and _is_restartable())
        )

    def _duplicate(self, keys: StoreKeys, holder: RankInfo, verdict: str) -> str:
        one, other = sorted((holder, self.info), key=lambda info: (info.host, info.pid))
        text = (
            f"two processes are RANK={self.info.rank} at {self.address}: {one.place}, and "
            f"{other.place}. Give every process of a job its own RANK, from 0 to WORLD_SIZE - 1, "
            "and each job its own MASTER_PORT. A process that a rank starts inherits its RANK: "
            "unset it there, if that one is not to take part."
        )
        stands = verdict or _write_verdict(keys, text)
        if stands == _GO:
            return f"{text} The job has started already, with {holder.place}."
        self._leave(keys)
        return stands

    # -- the rounds --------------------------------------------------------------------------------

    def _take_part(self, keys: StoreKeys) -> str:
        """Take part in this round; return the verdict on all ranks."""
        first = _claim_key(keys, "first", self.info)
        if self._sign(keys, "came") == self.size:
            keys.set(f"all{self.size}")
        largest = max(self.size, whole_number(first.size) or 0)
        return self._wait(keys, f"all{largest}" if first.alike != self.info.alike else "")

    def _wait(self, keys: StoreKeys, differing: str) -> str:
        """Wait for the verdict on all ranks, and return it.

        Args:
            differing: the key that is set once all have arrived, on a rank that differs from the
                first one.
        """
        pauses, is_ready, since = self._pauses(), False, time.monotonic()
        while not (verdict := _read(keys, "verdict")):
            if not is_ready and keys.has(f"all{self.size}"):
                is_ready, pauses = True, self._pauses()
                if self._sign(keys, "ready") == self.size:
                    _write_verdict(keys, self._differences(keys) or _GO)
            votes_are_in = differing and (
                time.monotonic() - since > _TO_COME_S or keys.has(differing)
            )
            if votes_are_in and (difference := self._differences(keys)):
                _write_verdict(keys, difference)
            self._report_progress(keys)
            time.sleep(next(pauses))
        return verdict

    def _pauses(self) -> Iterator[float]:
        """Yield seconds between reads of the store, short at first."""
        crowd = max(1.0, self.size / _FEW)
        pause = _FIRST_PAUSE_S
        while True:
            yield pause * crowd
            pause = min(1.5 * pause, _PAUSE_S)

    def _sign(self, keys: StoreKeys, list_name: str) -> int:
        """Add this rank to a list of ranks; return how many are on it."""
        keys.sign(list_name, self.info.rank)
        return keys.add(f"{list_name}/number", 1)

    def _differences(self, keys: StoreKeys) -> str:
        """Return what differs between the ranks that have arrived; "" if nothing does."""
        names = [f"rank{rank}" for rank in keys.signed("came")]
        if names and not keys.has(*names):
            raise keys.bad_value("came", _read(keys, "came"), "it names ranks that have not come")
        infos = keys.read_all(names, RankInfo.from_json)
        return disagreement(infos, self._missing(keys, "came")) or shared_device(infos)

    def _report_progress(self, keys: StoreKeys) -> None:
        if self.progress.is_over():
            _write_verdict(keys, self._too_late(keys))
        elif self.progress.is_due():
            self.progress.report(
                f"{ranks_text(self._ranks_not_ready(keys))} of {self.size}",
                _read(self.store, "strays"),
            )

    def _ranks_not_ready(self, keys: StoreKeys) -> list[int]:
        """Return the ranks that have not arrived; once all have, those that are not ready."""
        return self._missing(keys, "ready" if keys.has(f"all{self.size}") else "came")

    def _missing(self, keys: StoreKeys, list_name: str) -> list[int]:
        return sorted(set(range(self.size)) - keys.signed(list_name))

    def _too_late(self, keys: StoreKeys) -> str:
        missing = self._ranks_not_ready(keys)
        return (
            f"{ranks_text(missing)} of {self.size} did not come to {self.address} within "
            f"{self.progress.timeout:.0f} s. Look at what {'it' if len(missing) == 1 else 'they'} "
            "printed, and whether the launcher on every host was given the same address and the "
            "same number of ranks."
        )

    def _leave(self, keys: StoreKeys) -> None:
        """Confirm that this rank has read the verdict.

        The rank that serves the store waits for the others.
        """
        keys.add("left", 1)
        deadline = time.monotonic() + _TO_READ_S
        while (
            self.serves and keys.add("left", 0) < max(self.size, 2) and time.monotonic() < deadline
        ):
            time.sleep(_PAUSE_S)


def _is_restartable() -> bool:
    """Return whether torchrun may have replaced processes of this job.

    Then entries of earlier ones are not a mistake.
    """
    return os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"


def _read(keys: StoreKeys, name: str) -> str:
    return printable(keys.read(name, message)) if keys.has(name) else ""


def _write_verdict(keys: StoreKeys, verdict: str) -> str:
    """Write the verdict, unless there is one; return the one that stands."""
    return printable(keys.claim("verdict", verdict, message))


def _claim_key(keys: StoreKeys, name: str, info: RankInfo) -> RankInfo:
    """Write this rank's info under a key, unless there is one; return the one that stands."""
    return keys.claim(name, info.to_json(), RankInfo.from_json)
