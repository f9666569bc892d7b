"""Run the Python debugger on one rank while the others wait.

rank 0   ... (Pdb) p x  n  n  c ........ gather   continues
rank 1   .................. waits ...... gather   continues, or PeerError: rank 0 quit the debugger
"""

from __future__ import annotations

import bdb
import contextlib
import os
import pdb
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import FrameType
from typing import Any, TextIO

from .. import errors
from ..comm.agreement import facts_of
from ..comm.current_world import current_world
from ..comm.world import World
from ..monitor.monitor import monitor_of
from ..monitor.verdict import Observation, Verdict
from ..simulated.output import callers_stdout
from ..simulated.simulate import SimulatedWorld

_TERMINAL = "/dev/tty"


def breakpoint(rank: int = 0) -> None:
    """breakpoint(rank): start the Python debugger on this rank, at the line of the call.

    The other ranks wait until it continues.

    Call it on every rank. The time in the debugger never counts as a stall: stepping with `n` or
    `s` lets the others go on too, and as long as there is a prompt no rank is reported as late. `q`
    ends all ranks. Where stdin is /dev/null, as in processes of `launch`, the debugger reads from
    the terminal. It leaves Ctrl-C alone.

    Args:
        rank: the global rank that the debugger runs on.

    Raises:
        MeshError: there is no such rank.
        bdb.BdbQuit: on this rank, when the debugger quits.
        PeerError: on the others, when it quits.
        RuntimeError: on all ranks, when the rank has no terminal to read from.

    Communication: all_gather_object, of a few bytes, over all ranks.

    >>> import shardmesh as sm
    >>> sm.monitor.breakpoint(rank=2)  # doctest: +SKIP
    > train.py(12)<module>()
    (Pdb) p loss
    """
    world = current_world()
    if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < world.size:
        raise errors.MeshError(
            f"breakpoint(rank={rank!r}): the world has {world.size} ranks, numbered 0 to "
            f"{world.size - 1}."
        )
    frame = sys._getframe(1)
    if world.rank != rank:
        _wait(world, rank)
        return
    place = f"{frame.f_code.co_filename}:{frame.f_lineno}"
    with contextlib.ExitStack() as stack:
        debugger = _open_debugger(world, place, stack)
        debugger.interaction(frame, None)
        said = _quit_verdict(rank, place) if debugger.quitting else None
        if said is None or not isinstance(world, SimulatedWorld):  # which ends all ranks by itself
            _tell(world, said)
        if said is not None:
            raise bdb.BdbQuit(f"rank {rank} quit the debugger at {place}")
        if debugger.goes_on:
            debugger.files = stack.pop_all()
    debugger.resume(frame)  # must come last: from here on it stops at whatever is called


def _wait(world: World, rank: int) -> None:
    said: Verdict | str | None = facts_of(world.group(range(world.size)), rank)
    if isinstance(said, Verdict):
        raise said.error()
    if said is not None:
        raise RuntimeError(said)


def _tell(world: World, said: Verdict | str | None) -> None:
    """Let the others go on, or tell them why not."""
    facts_of(world.group(range(world.size)), world.rank, said)


def _quit_verdict(rank: int, place: str) -> Verdict:
    text = f"rank {rank} quit the debugger at {place}"
    return Verdict(
        "raised", (rank,), "BdbQuit", (Observation(rank, "quit the debugger", place),), text
    )


class _Debugger(pdb.Pdb):
    """Pdb that stops at a given frame at once. While it prompts, no rank detects stalls.

    Attributes:
        files: its inputs, closed when the debugger is no longer used.
    """

    def __init__(self, world: World, place: str, stdin: TextIO, stdout: TextIO) -> None:
        super().__init__(stdin=stdin, stdout=stdout, nosigint=True)
        self._world, self._place = world, place
        self.files: Any = None
        self.reset()
        if world.size > 1:
            self.prompt = f"(Pdb, rank {world.rank} of {world.size}) "

    def interaction(self, frame: FrameType | None, tb_or_exc: Any) -> None:
        with _asking(self._world, self._place):
            super().interaction(frame, tb_or_exc)

    @property
    def goes_on(self) -> bool:
        """Whether it will stop again: at the next line, or at a breakpoint."""
        return not self._continues or bool(self.breaks)

    @property
    def _continues(self) -> bool:
        return self.stoplineno == -1

    def resume(self, frame: FrameType) -> None:
        """Continue as the last command said: `n`, `s`, `c` ..."""
        if not self.goes_on:
            return
        continues = self._continues
        stop = (self.stopframe, self.returnframe, self.stoplineno)
        self.set_trace(frame)  # which means `s`
        self.stopframe, self.returnframe, self.stoplineno = (
            (self.botframe, None, -1) if continues else stop
        )


@contextmanager
def _asking(world: World, place: str) -> Iterator[None]:
    monitor = monitor_of(world)
    with nullcontext() if monitor is None else monitor.paused(f"in the debugger, from {place}"):
        yield


def _open_debugger(world: World, place: str, stack: contextlib.ExitStack) -> _Debugger:
    """Return a debugger on stdin or the terminal.

    Raises: RuntimeError, on all ranks, when there is nothing to read commands from.
    """
    if _can_ask(sys.stdin):
        return _Debugger(world, place, sys.stdin, callers_stdout(caller_is_rank=False))
    try:
        reading = open(_TERMINAL)  # noqa: SIM115 - the stack closes it
        writing = open(_TERMINAL, "w")  # noqa: SIM115 - and this one
    except OSError as error:
        text = (
            f"breakpoint(rank={world.rank}) at {place}: there is nothing to read commands from, "
            f"since stdin is closed or /dev/null and the process has no terminal ({error}). Start "
            "the program in a terminal, or with its commands piped in."
        )
        _tell(world, text)
        raise RuntimeError(text) from None
    return _Debugger(world, place, stack.enter_context(reading), stack.enter_context(writing))


def _can_ask(stream: TextIO | None) -> bool:
    """Return whether commands can be read from this stream: any but /dev/null."""
    if stream is None or stream.closed:
        return False
    try:
        stat_result = os.fstat(stream.fileno())
    except (OSError, ValueError, AttributeError):  # not a file: a notebook's, a test's
        return True
    return (
        not stat.S_ISCHR(stat_result.st_mode) or stat_result.st_rdev != os.stat(os.devnull).st_rdev
    )
