"""End the processes of a failed job, all within seconds; the verdict is printed last.

    verdict   +0.5 s   a program that is computing is interrupted by a signal, and raises there
              +5 s     one that does not react is ended
              +10 s    one that raised the error and lives on, in the same job, is ended
                       (SHARDMESH_EXIT_S=10)
    at exit            torch's groups are kept: destroying one waits for its threads, which wait for
                       ranks that never answer

Programs that host others are left alone: nothing is ended while a test runner, a notebook or a
debugger runs the program, or after it has destroyed the default group and continues with something
else.
"""

from __future__ import annotations

import contextlib
import faulthandler
import math
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import FrameType

import torch.distributed as dist

from ..comm.call_site import frames_of_thread
from ..comm.recording.trace_buffer import IDLE, Header, RankState, TraceBuffer
from ..settings import monotonic_ns, settings
from .job import Job
from .recording.job_directory import is_dead, is_local, process_state

_ALARM = 11  # which real-time signal: one that nothing else is likely to use
_TO_PRINT_S = 2.0  # a full pipe must not keep a process from exiting
_SHARE = 0.8  # share of its time to exit that a process has before another one kills it
_SPARE_S = 3.0
_PAUSE_S = 0.05
# packages of programs that run other programs
_HOSTS = {"_pytest", "unittest", "IPython", "ipykernel", "pdb", "bdb", "debugpy", "pydevd", "code"}
# methods of other code in which the main thread is not interrupted
_SETUP = {"__enter__", "__exit__", "__aenter__", "__aexit__", "__del__"}
_IMPORT = "<frozen importlib"
_BROKEN = re.compile(
    r"gloo/transport|Connection (closed|reset|refused)|Broken pipe|ncclRemoteError|NCCL "
    r"error|recvValue failed"
)

# exit statuses that shells report for a process ended by one of these signals -> the signal
SIGNAL_OF_EXIT = {
    128 + number: number.name
    for number in (signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM))
}

alarm_signal: int | None = None
_deadline_of: Job | None = None
_setting_deadline = threading.RLock()  # a handler of a signal may set it, too
_is_interruptible = True
_block_of: FrameType | None = None  # the frame of the innermost `interruptible` block


# -- before the end --------------------------------------------------------------------------------


def is_broken_connection(error: BaseException) -> bool:
    """Return whether the error says only that another rank is gone."""
    return isinstance(error, dist.DistError) or (
        isinstance(error, (RuntimeError, OSError)) and bool(_BROKEN.search(str(error)))
    )


def interruption(error: BaseException) -> str | None:
    """Return how a person or a scheduler ended the program, a key of `INTERRUPTIONS`, or None."""
    if isinstance(error, KeyboardInterrupt):
        return "KeyboardInterrupt"
    return (
        SIGNAL_OF_EXIT.get(error.code)
        if isinstance(error, SystemExit) and isinstance(error.code, int)
        else None
    )


@contextlib.contextmanager
def ignoring_ctrl_c(error: BaseException | None) -> Iterator[None]:
    """Ignore further Ctrl-C inside the block, after this one.

    The terminal interrupts a worker of torchrun, and then torchrun does.
    """
    handler = signal.getsignal(signal.SIGINT)
    is_ours = (
        isinstance(error, KeyboardInterrupt)
        and threading.current_thread() is threading.main_thread()
    )
    if not is_ours or handler is None:
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


def take_alarm_signal(handler: Callable[..., None]) -> None:
    """Install a signal by which the watchdog interrupts the main thread when the job has failed."""
    global alarm_signal
    first_signal = getattr(signal, "SIGRTMIN", None)
    if first_signal is None or threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(first_signal + _ALARM) is signal.SIG_DFL:
        signal.signal(first_signal + _ALARM, handler)
        alarm_signal = first_signal + _ALARM


def is_interruptible() -> bool:
    """Return whether the alarm signal raises the verdict in the main thread now."""
    return _is_interruptible


def set_interruptible(is_on: bool) -> None:
    """Set `is_interruptible` until the end of the `interruptible` block around it, if any."""
    global _is_interruptible
    _is_interruptible = is_on


def is_in_setup(frame: FrameType | None) -> bool:
    """Return whether a frame is part of what an error must not cut off.

    That is entering or leaving a `with` block, a destructor, or an import. An error that is raised
    there may leave what the block protects half done, and one in a destructor is printed and
    forgotten. A module whose import is cut off is imported again, but those that it has imported
    are not, and their package lacks them. An `interruptible` block that is a `with` statement of
    such code itself is interrupted; one that a generator enters for its caller, as
    `ElasticJob.attempt` does, is not, since its frame is not below that of the caller's block.
    """
    while frame is not None and frame is not _block_of:
        code = frame.f_code
        if code.co_name in _SETUP or code.co_filename.startswith(_IMPORT):
            return True
        frame = frame.f_back
    return False


@contextlib.contextmanager
def interruptible(is_on: bool) -> Iterator[None]:
    """Set whether a verdict interrupts the main thread inside the block while it computes.

    Waits for other ranks raise the verdict all the same. The watchdog sends its signal again and
    again, so what was held comes later.
    """
    global _is_interruptible, _block_of
    before = _is_interruptible, _block_of
    _is_interruptible, _block_of = is_on, sys._getframe(2)  # that of the `with` statement
    try:
        yield
    finally:
        _is_interruptible, _block_of = before


# -- a program that lives on -----------------------------------------------------------------------


def is_hosted() -> bool:
    """Return whether a test runner, a notebook or a debugger runs the main thread's program."""
    frames = frames_of_thread(threading.main_thread().ident)
    modules = (str(frame.f_globals.get("__name__", "")) for frame in frames)
    return any(name.partition(".")[0] in _HOSTS for name in modules) or hasattr(sys, "ps1")


def may_end(job: Job) -> bool:
    """Return whether the process exists only for the failed job, and may be ended."""
    if job.is_suspended or job.pid != os.getpid() or not settings().exit_s:
        return False
    if job.buffer.words[Header.PAUSED] % IDLE:
        return False
    # the program is over, but another thread of it is not
    if not threading.main_thread().is_alive():
        return True
    return job.is_of_this_job() and not is_hosted()


def end(job: Job, text: str) -> None:
    """Print a message and end this process whatever its main thread does.

    Processes of this host that cannot end by themselves are ended, too.
    """
    _end_at_the_latest(_TO_PRINT_S)
    print(f"shardmesh: {text}", file=sys.stderr, flush=True)
    _kill_late(job, [buffer for buffer in job.near_buffers() if _is_stuck(buffer)])
    _flush()
    os._exit(1)


def set_deadline(job: Job, is_on: bool) -> None:
    """Set whether the process ends some seconds after its time to exit.

    Even if its watchdog thread cannot run any more. A watchdog that is late does not set it after
    the program has gone on.
    """
    global _deadline_of
    with _setting_deadline:
        if is_on and _deadline_of is None and not job.is_suspended:
            _deadline_of = job
            end_after_exit_time()
        elif not is_on and _deadline_of is job:
            _deadline_of = None
            faulthandler.cancel_dump_traceback_later()


def longest_exit_s() -> float:
    """Return the seconds after which a process of a failed job has ended that does not go on."""
    return settings().exit_s + _SPARE_S if settings().exit_s else math.inf


def end_after_exit_time() -> None:
    """End the process some seconds after its time to exit is over."""
    _end_at_the_latest(settings().exit_s + _SPARE_S)


def _end_at_the_latest(seconds: float) -> None:
    """End the process later with all threads' stacks, from a thread without the interpreter."""
    with contextlib.suppress(OSError, RuntimeError, ValueError):  # stderr is closed
        faulthandler.dump_traceback_later(max(seconds, 0.1), exit=True, file=2)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()


def end_others(job: Job) -> None:
    """End ranks of this host that cannot do so themselves: stopped, or holding the interpreter.

    Without a launcher nothing else ends them. The lowest of the other ranks does it, once their
    time to exit is over.
    """
    job.buffer.words[Header.AWARE] = 1
    while stuck := [buffer for buffer in job.near_buffers() if _is_stuck(buffer)]:
        if job.directory.rank != _lowest_living(job, stuck):
            return
        _kill_late(job, stuck)
        time.sleep(_PAUSE_S)


def end_hung(job: Job) -> None:
    """End ranks of this host that are stopped or hold the interpreter, once their time is over.

    For a program that goes on after a verdict; of the others only the lowest rank does it.
    """
    if not job.failed_at:  # no verdict, so nobody is late
        return
    stuck = [buffer for buffer in job.near_buffers() if _is_stuck(buffer)]
    if stuck and job.directory.rank == _lowest_living(job, stuck):
        _kill_late(job, stuck)


def _lowest_living(job: Job, stuck: Sequence[TraceBuffer]) -> int:
    """Return the lowest rank of this host that lives and is not one of these."""
    living = [buffer for buffer in job.near_buffers() if is_local(buffer) and not is_dead(buffer)]
    buffers = [buffer for buffer in living if all(buffer is not one for one in stuck)]
    return min(buffer.words[Header.RANK] for buffer in buffers)


def _kill_late(job: Job, stuck: Sequence[TraceBuffer]) -> None:
    """Kill those of these ranks whose time to exit is over."""
    for buffer in stuck:
        if monotonic_ns() - job.failed_at > _SHARE * 1e9 * buffer.words[Header.EXIT_S]:
            print(
                f"shardmesh: rank {buffer.words[Header.RANK]} does not react and is killed",
                file=sys.stderr,
                flush=True,
            )
            with contextlib.suppress(OSError):
                os.kill(buffer.words[Header.PID], signal.SIGKILL)


def _is_stuck(buffer: TraceBuffer) -> bool:
    words = buffer.words
    is_over = words[Header.STATE] not in (RankState.RUNNING, RankState.RAISED)
    if is_over or not words[Header.EXIT_S] or words[Header.PAUSED] % IDLE or not is_local(buffer):
        return False
    state = process_state(words[Header.PID])
    # it has ended, or a debugger holds it
    if state is None or state[0] in "ZXt" or state[1] != words[Header.BORN]:
        return False
    return state[0] == "T" or not words[Header.AWARE]
