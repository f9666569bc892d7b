"""SIGTERM: it ends a rank in order, or, where a program asks `reached_preemption`, all ranks at the same step.

How ranks agree on a step without waiting for each other in every one:

    rank 0   ..10 ..11 ..12 |               12
    rank 1   ..10 ..11 |  SIGTERM           11     ->   one more than the largest: 13
    rank 2   ..10 ..11 |                    11
                       from here on no rank begins another step until all have told the last one they began

Nobody can have begun step 13, so all of them see it come. A thread does the telling, so that a rank which is in the middle of a
step (and whose collectives the others must still answer) need not come here for it. That is the protocol of JAX's
`multihost_utils.reached_preemption_sync_point`; steps need not be numbered without gaps.
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

from torch.distributed import PrefixStore, distributed_c10d

from ..comm.current_world import current_world
from ..comm.process import ProcessWorld
from ..comm.world import World
from ..monitor.monitor import Watch, watch_of
from ..monitor.verdict import ranks_text
from ..simulated.simulate import SimulatedWorld

_LOOK_S = 1.0  # between looks for a notice that another rank has got
_TELL_S = 0.02  # between looks for the steps of the others, once there is a notice
_PATIENCE_S = 120.0  # for a rank that has not called reached_preemption even once
_FAREWELL_S = 5.0  # until all ranks know the step
_NOTICE_FILE = "SHARDMESH_PREEMPTION_FILE"
EXIT_CODE = 128 + signal.SIGTERM  # what shells report of a process that SIGTERM has ended

_log = logging.getLogger(__name__)


def reached_preemption(step: int) -> bool:
    """reached_preemption(step) -> whether all ranks are to save their work now and leave, because one of them has to.

    Call it on every rank, once in each step, between steps. From the first call on SIGTERM does not end this process but is a
    notice, as is the file that SHARDMESH_PREEMPTION_FILE names, once it exists. Whichever rank gets one, all ranks get True in
    the same step and in all later ones. Until a notice comes a call costs ten microseconds, and a thread looks once a second
    whether another rank has got one; then each rank waits once, for up to a second, until all have told which step they are in.

    Args:
        step: the same numbers on all ranks, growing over the whole run; gaps are allowed.

    Raises:
        ValueError: the step is smaller than that of the call before.
        RuntimeError: there is a notice, but some ranks have not called this within two minutes.
        WatchError: there is a notice, and the job has failed before the ranks could agree.
    Communication: none; through the job's store.

    >>> import shardmesh as sm
    >>> for step in range(3):
    ...     if sm.reached_preemption(step):
    ...         break  # save and leave
    """
    world = current_world()
    found = _agreements.get(_key(world))
    if found is None:
        found = _agreements[_key(world)] = _agreement(world)
    return found.reached(world.rank, operator.index(step))


# --------------------------------------------------------------------------------------------------------- agreements


class _Here:
    """Ranks of one process agree: whoever sees the notice first sees the steps of all."""

    def __init__(self) -> None:
        self.steps: dict[int, int] = {}
        self.agreed: int | None = None

    def reached(self, rank: int, step: int) -> bool:
        _check_order(step, self.steps.get(rank))
        if self.agreed is None and _has_notice():
            self.agreed = max(self.steps.values(), default=step - 1) + 1
        self.steps[rank] = step
        return self.agreed is not None and step >= self.agreed


class _Across:
    """One rank's part in the agreement of processes, which talk through a store.

    Args:
        has_notice: whether this rank has to stop.
        check: raises when the job has failed.

    Attributes:
        agreed: the step in which all stop.
        error: why they cannot agree.
    """

    def __init__(self, store: Any, rank: int, size: int, has_notice: Callable[[], bool], check: Callable[[], None]) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._has_notice, self._check = has_notice, check
        self._step: int | None = None
        self._lock = threading.Lock()  # held by the thread while ranks agree: then no step begins here
        self._over = False
        self._wake: SimpleQueue[None] = SimpleQueue()
        self.agreed: int | None = None
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="shardmesh-preemption", daemon=True)
        self._thread.start()

    def reached(self, rank: int, step: int) -> bool:
        with self._lock:
            _check_order(step, self._step)
            if self.error is not None:
                raise self.error
            self._step = step
            return self.agreed is not None and step >= self.agreed

    def wake(self) -> None:
        """Lets the thread look for a notice at once. May be called in a signal handler."""
        self._wake.put(None)

    def stop(self) -> None:
        """Returns when the thread no longer uses the store."""
        self._over = True
        self.wake()
        self._thread.join(5.0)

    def _run(self) -> None:
        try:
            noticed = self._is_noticed()
        except Exception as error:  # the store's process has ended, as it may when the job is done
            _log.info("rank %d no longer looks for a notice to the others: %s", self._rank, error)
            return
        if noticed:
            self._agree()

    def _is_noticed(self) -> bool:
        """Waits for a notice; whether one came before the end."""
        while not self._over:
            if self._has_notice():
                _log.warning("rank %d has to stop (%s): all ranks will, in the same step", self._rank, _notice)
                self._store.set("notice", str(self._rank))
                return True
            if self._store.check(["notice"]):
                return True
            with contextlib.suppress(Empty):
                self._wake.get(timeout=_LOOK_S)
        return False

    def _agree(self) -> None:
        while self._step is None and not self._over:  # the others wait for our first step
            time.sleep(_TELL_S)
        with self._lock:
            try:
                self._store.set(f"step{self._rank}", str(self._step))
                if not self._await_all("step", _PATIENCE_S):
                    return
                self.agreed = max(int(self._store.get(f"step{rank}")) for rank in range(self._size)) + 1
            except Exception as error:
                self.error = error
                return
            with contextlib.suppress(Exception):  # nobody leaves, perhaps with the store, before all have read it
                self._store.set(f"read{self._rank}", "")
                self._await_all("read", _FAREWELL_S)

    def _await_all(self, what: str, patience: float) -> bool:
        """Whether all ranks have told it, before the end."""
        deadline = time.monotonic() + patience
        while not self._over:
            missing = [rank for rank in range(self._size) if not self._store.check([f"{what}{rank}"])]
            if not missing:
                return True
            self._check()
            if time.monotonic() > deadline:
                raise RuntimeError(_nobody_called(missing))
            time.sleep(_TELL_S)
        return False


def _nobody_called(missing: list[int]) -> str:
    return (
        f"reached_preemption: there is a notice, but {ranks_text(missing)} have not called it in {_PATIENCE_S:.0f} s, so no step can be "
        "agreed on. Call it on every rank, once in each step."
    )


def _check_order(step: int, before: int | None) -> None:
    if before is not None and step < before:
        raise ValueError(
            f"reached_preemption({step}) after reached_preemption({before}): pass a number that grows over the whole run, such as "
            "epoch * steps_per_epoch + step."
        )


_agreements: weakref.WeakKeyDictionary[Any, _Here | _Across] = weakref.WeakKeyDictionary()


def _key(world: World) -> Any:
    """What the ranks of a world in one process share."""
    return world.scheduler if isinstance(world, SimulatedWorld) else world


def _agreement(world: World) -> _Here | _Across:
    with contextlib.suppress(ValueError):  # outside the main thread only other ranks or the file can bring a notice
        _listen()
    if not isinstance(world, ProcessWorld) or world.size == 1:
        return _Here()
    watch = watch_of(world)
    # A connection of its own: the main thread may wait in the other one for ranks that wait for this one to agree.
    store: Any = PrefixStore(f"shardmesh/preemption/{world.job}/{world.epoch}", distributed_c10d._get_default_store())
    made = _Across(store.clone(), world.rank, world.size, _has_notice, partial(_check_job, watch))
    weakref.finalize(world, made.stop)
    return made


def _check_job(watch: Watch | None) -> None:
    found = None if watch is None else watch.standing()
    if found is not None:
        raise found.error()


def forget(world: World) -> None:
    """The ranks of this world part: there is nothing left to agree on."""
    found = _agreements.pop(_key(world), None)
    if isinstance(found, _Across):
        found.stop()


# ------------------------------------------------------------------------------------------------------------ notices

_notice = ""  # why this process has to stop
_asked = False  # whether SIGTERM is a notice
_before: Any = signal.SIG_DFL  # what SIGTERM did before


def _has_notice() -> bool:
    global _notice
    path = "" if _notice else os.environ.get(_NOTICE_FILE, "")
    if path and os.path.exists(path):
        _notice = f"{path} exists"
    return bool(_notice)


def _listen() -> None:
    """From now on SIGTERM is a notice. Raises: ValueError outside the main thread."""
    global _asked
    _install()
    _asked = True


@contextmanager
def ending_in_order() -> Iterator[None]:
    """Inside, SIGTERM raises SystemExit(143) in the main thread, as Ctrl-C raises KeyboardInterrupt; a second one kills.

    What the program itself does on SIGTERM is left alone.
    """
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return
    _install()
    try:
        yield
    finally:
        if not _asked:
            _reset()


def _install() -> None:
    global _before
    now = signal.getsignal(signal.SIGTERM)
    if now is not _on_sigterm:
        signal.signal(signal.SIGTERM, _on_sigterm)
        _before = now


def _reset() -> None:
    if signal.getsignal(signal.SIGTERM) is _on_sigterm:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _on_sigterm(number: int, frame: FrameType | None) -> None:
    global _notice
    if not _asked:
        _reset()
        _say(f"SIGTERM: ends with code {EXIT_CODE}")
        raise SystemExit(EXIT_CODE)
    _notice = "SIGTERM"
    for agreement in list(_agreements.values()):
        if isinstance(agreement, _Across):
            agreement.wake()
    if callable(_before):
        _before(number, frame)


def _say(text: str) -> None:
    """Not through sys.stderr, which may be in the middle of a write when a signal comes."""
    world = current_world()
    rank = f" rank {world.rank}:" if world.size > 1 else ""
    with contextlib.suppress(OSError):
        os.write(2, f"shardmesh:{rank} {text}\n".encode())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset)  # a DataLoader ends its workers by SIGTERM
