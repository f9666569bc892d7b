"""Handle SIGTERM and SIGHUP: end a rank in order.

If the program calls `reached_preemption`, SIGTERM ends all ranks at the same step.

How ranks agree on a step without synchronizing in every step:

    rank 0   ..10 ..11 ..12 |               12
    rank 1   ..10 ..11 |  SIGTERM           11     ->   one more than the largest: 13
    rank 2   ..10 ..11 |                    11
                       from here on no rank begins another step until all have published the last
                       one they began

No rank can have begun step 13, so all of them stop there. A thread publishes the step, since a rank
may be in the middle of one, waiting in a collective. This is the protocol of JAX's
`multihost_utils.reached_preemption_sync_point`; step numbers may have gaps.
"""

from __future__ import annotations

import contextlib
import logging
import operator
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from queue import Empty, SimpleQueue
from types import FrameType
from typing import Any

from torch.distributed import distributed_c10d

from ..comm.current_world import current_world
from ..comm.world import World
from ..monitor.monitor import Monitor, monitor_of
from ..monitor.store_keys import StoreKeys
from ..monitor.store_values import signed_number
from ..processes.process import ProcessWorld
from ..simulated.simulate import SimulatedWorld
from ..text import ranks_text

_NOTICE_POLL_S = 1.0  # between checks for a notice of another rank
_STEP_POLL_S = 0.02  # between checks for the steps of the other ranks, after a notice
_STEP_TIMEOUT_S = 120.0  # for ranks that have never called reached_preemption
_FAILURE_S = 0.2  # after a notice, how long to look for a rank that has died
_READ_TIMEOUT_S = 5.0  # until all ranks have read the step
_NOTICE_FILE = "SHARDMESH_PREEMPTION_FILE"
_ENDING = (signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else ()))

_log = logging.getLogger(__name__)


def reached_preemption(step: int) -> bool:
    """reached_preemption(step) -> whether all ranks should save their work now and exit.

    They should if one of them is being preempted.

    Call it on every rank, once per step, between steps. From the first call on, SIGTERM does not
    end this process but counts as a notice, as does the existence of the file named by
    SHARDMESH_PREEMPTION_FILE. After any rank has received a notice, all ranks get True in the same
    step and in all later ones. Without a notice a call takes ten microseconds, and a thread checks
    once a second for a notice of another rank; after one each rank waits once, for up to a second,
    until all have published their step.

    Args:
        step: the same numbers on all ranks, increasing over the whole run; gaps are allowed.

    Raises:
        ValueError: the step is smaller than that of the call before.
        RuntimeError: there is a notice, but some ranks have not called this within two minutes.
        WatchError: there is a notice, but the job failed before the ranks could agree.

    Communication: none but through the job's store.

    >>> import shardmesh as sm
    >>> for step in range(3):
    ...     if sm.training.reached_preemption(step):
    ...         break  # save and leave
    """
    world = current_world()
    agreement = _agreements.get(_key(world))
    if agreement is None:
        agreement = _agreements[_key(world)] = _agreement(world)
    return agreement.begin_step(world.rank, operator.index(step))


# -- agreements ------------------------------------------------------------------------------------


class _LocalAgreement:
    """The agreement of ranks in one process, which share their steps."""

    def __init__(self) -> None:
        self.steps: dict[int, int] = {}
        self.agreed: int | None = None

    def begin_step(self, rank: int, step: int) -> bool:
        """Record a rank's step, and return whether it is the agreed one, or a later one."""
        _check_order(step, self.steps.get(rank))
        if self.agreed is None and has_notice():
            self.agreed = max(self.steps.values(), default=step - 1) + 1
        self.steps[rank] = step
        return self.agreed is not None and step >= self.agreed


class _StoreAgreement:
    """One rank's side of the agreement of several processes, through a store.

    Args:
        keys: of the agreement.
        has_notice: returns whether this rank has received a notice.
        check: raises if the job has failed.

    Attributes:
        agreed: the step in which all ranks stop.
        error: why they could not agree.
    """

    def __init__(
        self,
        keys: StoreKeys,
        rank: int,
        size: int,
        has_notice: Callable[[], bool],
        check: Callable[[], None],
    ) -> None:
        self._keys, self._rank, self._size = keys, rank, size
        self._has_notice, self._check = has_notice, check
        self._step: int | None = None
        # Held by the thread while ranks agree, so that no step begins here.
        self._lock = threading.Lock()
        self._over = False
        self._wake: SimpleQueue[None] = SimpleQueue()
        self.agreed: int | None = None
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="shardmesh-preemption", daemon=True)
        self._thread.start()

    def begin_step(self, rank: int, step: int) -> bool:
        """Record this rank's step, and return whether it is the agreed one, or a later one."""
        with self._lock:
            _check_order(step, self._step)
            if self.error is not None:
                raise self.error
            self._step = step
            return self.agreed is not None and step >= self.agreed

    def wake(self) -> None:
        """Make the thread check for a notice at once. May be called in a signal handler."""
        self._wake.put(None)

    def stop(self) -> None:
        """Stop the thread, and return when it no longer uses the store."""
        self._over = True
        self.wake()
        self._thread.join(5.0)

    def _run(self) -> None:
        try:
            noticed = self._wait_for_notice()
        except Exception as error:
            # the process of the store has ended, as it may at the end of a job
            _log.info(
                "rank %d no longer checks for a preemption notice of other ranks: %s",
                self._rank,
                error,
            )
            return
        if noticed:
            self._agree()

    def _wait_for_notice(self) -> bool:
        """Wait for a notice to any rank; return False if `stop` was called first."""
        while not self._over:
            if self._has_notice():
                if self._finds_failure():
                    return False
                _log.warning(
                    "rank %d is being preempted (%s): all ranks will stop in the same step",
                    self._rank,
                    _notice,
                )
                self._keys.set("notice", str(self._rank))
                return True
            if self._keys.has("notice"):
                return True
            with contextlib.suppress(Empty):
                self._wake.get(timeout=_NOTICE_POLL_S)
        return False

    def _finds_failure(self) -> bool:
        """Return whether the job has failed.

        A launcher that finds a dead rank sends SIGTERM to the others, which is no preemption. That
        a rank has died may be seen a little later than the signal. `begin_step` raises the reason.
        """
        deadline = time.monotonic() + _FAILURE_S
        while not self._over and time.monotonic() < deadline:
            try:
                self._check()
            except Exception as error:
                self.error = error
                return True
            time.sleep(_STEP_POLL_S)
        return False

    def _agree(self) -> None:
        # The other ranks wait for this rank's first step.
        while self._step is None and not self._over:
            time.sleep(_STEP_POLL_S)
        with self._lock:
            try:
                self._keys.set(f"step{self._rank}", str(self._step))
                if not self._wait_for_all("step", _STEP_TIMEOUT_S):
                    return
                self.agreed = max(self._step_of(rank) for rank in range(self._size)) + 1
            except Exception as error:
                self.error = error
                return
            # The process of the store must not exit before all ranks have read the step.
            with contextlib.suppress(Exception):
                self._keys.set(f"read{self._rank}", "")
                self._wait_for_all("read", _READ_TIMEOUT_S)

    def _step_of(self, rank: int) -> int:
        return self._keys.read(f"step{rank}", signed_number)

    def _wait_for_all(self, what: str, timeout: float) -> bool:
        """Wait until all ranks have set this key; return False if `stop` was called first."""
        deadline = time.monotonic() + timeout
        while not self._over:
            missing = [rank for rank in range(self._size) if not self._keys.has(f"{what}{rank}")]
            if not missing:
                return True
            self._check()
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"reached_preemption: there is a preemption notice, but {ranks_text(missing)} "
                    f"have not called it in {_STEP_TIMEOUT_S:.0f} s, so the ranks cannot agree on "
                    "a step. Call it on every rank, once in each step."
                )
            time.sleep(_STEP_POLL_S)
        return False


def _check_order(step: int, before: int | None) -> None:
    if before is not None and step < before:
        raise ValueError(
            f"reached_preemption({step}) after reached_preemption({before}): step must not "
            "decrease over the whole run; pass, for example, epoch * steps_per_epoch + step."
        )


_agreements: weakref.WeakKeyDictionary[Any, _LocalAgreement | _StoreAgreement] = (
    weakref.WeakKeyDictionary()
)


def _key(world: World) -> Any:
    """Return an object that the ranks of a world in one process share."""
    return world.scheduler if isinstance(world, SimulatedWorld) else world


def _agreement(world: World) -> _LocalAgreement | _StoreAgreement:
    # Outside the main thread only other ranks or the file can give a notice.
    with contextlib.suppress(ValueError):
        listen()
    if not isinstance(world, ProcessWorld) or world.size == 1:
        return _LocalAgreement()
    monitor = monitor_of(world)
    # Use a separate connection: the main thread may block in the other one, waiting for ranks that
    # wait for this agreement.
    keys = StoreKeys(
        distributed_c10d._get_default_store().clone(),  # type: ignore[attr-defined]
        f"shardmesh/preemption/{world.job}/{world.epoch}",
        "shardmesh/preemption/*",
    )
    agreement = _StoreAgreement(
        keys, world.rank, world.size, has_notice, partial(_check_job, monitor)
    )
    weakref.finalize(world, agreement.stop)
    return agreement


def _check_job(monitor: Monitor | None) -> None:
    """Raise the verdict on the job, a WatchError: the one that stands, or on ranks that died."""
    verdict = None if monitor is None else monitor.standing() or monitor.verdict_on_lost()
    if verdict is not None:
        raise verdict.error()


def forget(world: World) -> None:
    """Drop the agreement of this world, at the end of a session."""
    agreement = _agreements.pop(_key(world), None)
    if isinstance(agreement, _StoreAgreement):
        agreement.stop()


# -- notices ---------------------------------------------------------------------------------------

_notice = ""  # the reason that this process has to stop, if it has
_is_listening = False  # whether SIGTERM counts as a notice
_before: Any = signal.SIG_DFL  # the handler of SIGTERM before ours


def has_notice() -> bool:
    """Return whether this process is told to go: by SIGTERM after `listen`, or by the file."""
    global _notice
    path = "" if _notice else os.environ.get(_NOTICE_FILE, "")
    if path and os.path.exists(path):
        _notice = f"{path} exists"
    return bool(_notice)


def listen() -> None:
    """Make SIGTERM count as a notice. Raises: ValueError outside the main thread."""
    global _is_listening
    _install(signal.SIGTERM)
    _is_listening = True


@contextmanager
def listening() -> Iterator[None]:
    """Make SIGTERM count as a notice in the block, if this is the main thread."""
    global _is_listening
    before = _is_listening, signal.getsignal(signal.SIGTERM)
    with contextlib.suppress(ValueError):
        listen()
    try:
        yield
    finally:
        if _is_listening and not before[0]:
            _is_listening = False
            if before[1] is not None:  # else it is no handler of Python
                signal.signal(signal.SIGTERM, before[1])


@contextmanager
def ending_in_order() -> Iterator[None]:
    """Make SIGTERM, SIGHUP raise SystemExit(143), SystemExit(129) in the main thread, in the block.

    So Ctrl-C raises KeyboardInterrupt. A second signal kills. A handler of the program is left in
    place, and so is `nohup`.
    """
    numbers = unhandled_signals()
    for number in numbers:
        _install(number)
    try:
        yield
    finally:
        for number in numbers:
            if number != signal.SIGTERM or not _is_listening:
                _reset(number)


def unhandled_signals() -> list[int]:
    """Return which of SIGTERM and SIGHUP the program leaves to Python's default.

    The list is empty outside the main thread, which alone handles them.
    """
    if threading.current_thread() is not threading.main_thread():
        return []
    return [number for number in _ENDING if signal.getsignal(number) == signal.SIG_DFL]


def _install(number: int) -> None:
    global _before
    now = signal.getsignal(number)
    if now is not _on_signal:
        signal.signal(number, _on_signal)
        if number == signal.SIGTERM:
            _before = now


def _reset(number: int) -> None:
    if signal.getsignal(number) is _on_signal:
        signal.signal(number, signal.SIG_DFL)


def _on_signal(number: int, frame: FrameType | None) -> None:
    global _notice
    if number != signal.SIGTERM or not _is_listening:
        _reset(number)
        world = current_world()
        rank = f" rank {world.rank}:" if world.size > 1 else ""
        # Not through sys.stderr, which may be in the middle of a write.
        with contextlib.suppress(OSError):
            name = signal.Signals(number).name
            os.write(2, f"shardmesh:{rank} {name}: ends with code {128 + number}\n".encode())
        raise SystemExit(128 + number)
    _notice = "SIGTERM"
    for agreement in list(_agreements.values()):
        if isinstance(agreement, _StoreAgreement):
            agreement.wake()
    if callable(_before):
        _before(number, frame)


def _be_no_rank() -> None:
    for number in _ENDING:
        _reset(number)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_be_no_rank)  # a DataLoader ends its workers by SIGTERM
