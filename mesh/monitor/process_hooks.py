"""Start a process's monitor, with the hooks of the process: errors, a signal, the exit, forks.

uncaught error    the other ranks are told; then it is printed, and the verdict last
signal            the watchdog sends it when the job has failed: the main thread raises the verdict
exit              waits until others have seen the last collectives, ends ranks that cannot exit
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterable
from types import FrameType, TracebackType
from typing import Any

from ..comm.recording.trace_buffer import BUFFER_BYTES, Header, RankState, TraceBuffer
from ..comm.world import World
from ..errors import WatchError
from ..settings import settings
from . import exit_status, termination
from .agreement import Agreement, warn
from .monitor import Monitor
from .recording.cleanup import sweep
from .recording.files import remove_folder
from .recording.job_directory import ALARM_BYTES, Alarm, JobDirectory, ranks_here
from .timeouts import keep_groups
from .torch_calls import hooks
from .verdict import Verdict

monitors: weakref.WeakSet[Monitor] = weakref.WeakSet()
_hooks: list[Any] = []
_detaches_children = False


def start_monitor(world: World, job: str, agreement: Agreement | None = None) -> Monitor | None:
    """Start this process's monitor; None if its files cannot be made, which all ranks are told."""
    try:
        parent = (
            None
            if agreement is None
            else agreement.folder(ranks_here(world.size) * BUFFER_BYTES + ALARM_BYTES)
        )
        directory = JobDirectory(job, world.rank, world.size, parent)
        if agreement is not None:
            agreement.join(directory)
    except OSError as error:
        reason = f"its files cannot be made: {error}"
        warn(reason) if agreement is None else agreement.decline(reason)
        return None
    sweep(directory.folder.parent)
    _install()
    _detach_forked_children()
    monitor = Monitor(world, directory, agreement)
    monitors.add(monitor)
    monitor.watchdog.start()
    return monitor


def _detach_forked_children() -> None:
    """Detach every child that this process forks from now on.

    A child has the rank's memory and sockets, but none of the threads that communicate: a
    collective that it called would hang, or take what other ranks have sent to the rank. So the
    child records into memory of its own, and collectives on the rank's groups raise. It may start a
    default group of its own.
    """
    global _detaches_children
    if not _detaches_children and hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_be_no_rank)
        _detaches_children = True


def _be_no_rank() -> None:
    for monitor in list(monitors):
        monitor.detach()
    hooks.refuse_calls()
    monitors.clear()
    keep_groups()  # the child has none of the threads that torch would wait for at exit


def _install() -> None:
    """Install the hooks for uncaught errors and exit, and the signal handler, once."""
    if _hooks:
        return
    _hooks.append(sys.excepthook)
    termination.take_alarm_signal(_on_alarm)
    sys.excepthook = _on_uncaught
    record_thread_errors(
        lambda: [monitor.buffer for monitor in list(monitors) if monitor.pid == os.getpid()]
    )
    atexit.register(_on_exit)


def record_thread_errors(buffers: Callable[[], Iterable[TraceBuffer]]) -> None:
    """Write uncaught errors of threads to these trace buffers.

    They are shown with a stall, and often explain why the main thread waits.
    """
    before = threading.excepthook

    def hook(args: Any) -> None:
        if args.exc_type is not SystemExit:
            name = "a thread" if args.thread is None else f"thread {args.thread.name!r}"
            text = f"its {name} raised {args.exc_type.__name__}: {args.exc_value}".removesuffix(
                ": "
            )
            for buffer in buffers():
                buffer.words[Header.THREAD_ERROR] = buffer.text(text)
        before(args)

    threading.excepthook = hook


def forget_monitor(monitor: Monitor) -> None:
    """End the monitor of a job that the program has left, with its files on this host.

    What it said was the reason for leaving, and is not said again at exit. Ranks of other hosts
    know it.
    """
    if monitor.relay is not None:
        monitor.relay.leave()
        monitor.relay = None
    monitor.close()
    monitors.discard(monitor)
    with contextlib.suppress(OSError):  # another rank has removed it
        remove_folder(monitor.directory.folder)


def notify_peers(error: BaseException) -> None:
    """Notify the other ranks of this process's jobs that its program ends with an error."""
    for monitor in list(monitors):
        with contextlib.suppress(Exception):  # nothing may hide the error itself
            monitor.raised(error)


def _on_alarm(_number: int, frame: FrameType | None) -> None:
    if not termination.is_interruptible() or termination.is_in_setup(frame):
        return  # the watchdog sends the signal again
    for monitor in list(monitors):
        if monitor.pid == os.getpid() and not monitor.notified:
            monitor.check()


def _on_uncaught(
    kind: type[BaseException], error: BaseException, where: TracebackType | None
) -> None:
    if (
        isinstance(error, KeyboardInterrupt)
        and threading.current_thread() is threading.main_thread()
    ):
        # the process is about to end; torchrun interrupts it once more
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    notify_peers(error)
    interrupted = _interruption_behind(error)
    if interrupted is not None:
        rank, verdict = interrupted
        if rank in verdict.ranks:  # one line for the whole job
            print(f"shardmesh: {verdict.text}", file=sys.stderr, flush=True)
        return
    _hooks[0](kind, error, where)
    if isinstance(error, WatchError):
        return
    for monitor in list(monitors):  # nothing may hide the error itself
        with contextlib.suppress(Exception):
            verdict = monitor.standing()
            if verdict is not None and not (
                verdict.kind == "raised" and monitor.directory.rank in verdict.ranks
            ):
                print(
                    f"shardmesh: rank {monitor.directory.rank}: {verdict.text}",
                    file=sys.stderr,
                    flush=True,
                )


def _interruption_behind(error: BaseException) -> tuple[int, Verdict] | None:
    """Return (this process's rank, the verdict) if the job was ended from outside, else None.

    The uncaught error says only that.
    """
    if not isinstance(error, (KeyboardInterrupt, WatchError)):
        return None
    for monitor in list(monitors):
        with contextlib.suppress(Exception):  # nothing may hide the error itself
            verdict = monitor.standing()
            if verdict is not None and verdict.is_interruption and monitor.pid == os.getpid():
                return monitor.directory.rank, verdict
    return None


def _on_exit() -> None:
    own_monitors = [monitor for monitor in list(monitors) if monitor.pid == os.getpid()]
    for monitor in own_monitors:
        monitor.settle()
    if any(monitor.abandoned for monitor in own_monitors):
        keep_groups()
        exit_status.fail()
        if settings().exit_s:
            termination.end_after_exit_time()
        for monitor in own_monitors:
            if monitor.alarm[0] == Alarm.VERDICT:
                termination.end_others(monitor)
    for monitor in own_monitors:
        monitor.close(RankState.ENDED)
