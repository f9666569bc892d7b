"""A simulated world that behaves like NCCL, on the CPU: it shows hazards of streams without a GPU.

    group.all_gather(out, x, async_op=True)    returns at once; out holds poison until the
                                               collective has run
    out.add(1)                                 StreamHazard: reads memory of a collective that was
                                               not waited for
    work.wait()                                returns at once, too: it only orders what comes after
    out.add(1)                                 here the host waits for the other ranks, as for
                                               `.item()` on a GPU

As with NCCL, a collective may read its input and write its result at any time from its call to the
first operator after `wait` that needs the result; those of a group run in the order of the calls,
and a message when both ranks have called it; a work keeps its buffers alive; and hosts run ahead of
each other, except at a barrier. Unlike NCCL, a wrong program fails and says where:

* An operator uses memory that a collective writes, or writes memory that it reads, before `wait`.
  So does another collective.
* Memory is written without an operator, or freed (its storage resized), before `wait`.
* A work is never waited for, unless the program catches an exception by `pytest.raises`.
* Ranks call different collectives, or wait for each other: the error of the simulated world, where
  a result is needed.

New memory is filled with poison, as memory that was freed may hold anything.

`nccl_world()` makes `simulate` run in this world, and so does `pytest --world nccl` for all tests.
With `ahead=False` (`--world nccl-waits`) `wait` blocks until the result is there, as gloo's does,
and operators are not looked at. This is for programs that compile, whose kernels are no operators,
for `torch.tensor([x])`, which reads x without one, and for tests that expect an error from the call
itself. Early reads then find poison.

`tests/mesh/comm/nccl_like.py` stands for a process group of torch; this for the `Group` of
shardmesh.
"""

from __future__ import annotations

import copy
import functools
import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
from torch import Tensor

from shardmesh.mesh.comm import call_site
from shardmesh.mesh.comm.group import Group
from shardmesh.mesh.comm.thread_context import thread_context
from shardmesh.mesh.comm.work import Work
from shardmesh.mesh.simulated import rendezvous, simulate
from shardmesh.mesh.simulated.arrival import Arrival
from shardmesh.mesh.simulated.diagnosis import BlockedRank, no_rank_can_go_on
from shardmesh.mesh.simulated.rendezvous import Move, Rendezvous
from shardmesh.mesh.simulated.scheduler import Scheduler
from shardmesh.mesh.simulated.simulate import SimulatedGroup, SimulatedWorld
from shardmesh.mesh.simulated.threads import RankEnded
from tests.mesh.simulated.late_memory import (
    TOOL,
    Buffer,
    Memory,
    OperatorWatch,
    StreamHazard,
    called_at,
    host_reads_wait,
    own_operators,
)

_run = simulate._run


class LateRendezvous(Rendezvous):
    """One collective of a group; several may be under way.

    Attributes:
        places: by rank, where it was called.
        done: whether it has run, or failed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.places: dict[int, str] = {}
        self.done = False


class LateScheduler(Scheduler):
    """A rank arrives at a collective without waiting, and waits for it later.

    Attributes:
        memory: by rank, its collectives under way.
        streams: by group, the collectives at which some ranks have arrived, in order; messages have
            a stream for each direction, by (group, sender).
    """

    def __init__(self, workers: Sequence[Any], outputs: list[Any]) -> None:
        super().__init__(workers, outputs)
        self.memory = [Memory(rank) for rank in range(self.size)]
        self.streams: dict[tuple[tuple[int, ...], int | None], list[LateRendezvous]] = {}

    def run_collective(
        self,
        ranks: tuple[int, ...],
        rank: int,
        call: Arrival,
        move: Move,
        sender: int | None = None,
    ) -> LateRendezvous:
        """Arrive at the rank's next collective of this group; return it.

        Args:
            sender: of a message.
        """
        if self.failure is not None:
            raise RankEnded
        stream = self.streams.setdefault((ranks, sender), [])
        meeting = next((one for one in stream if rank not in one.calls), None)
        if meeting is None:
            meeting = LateRendezvous()
            stream.append(meeting)
        meeting.calls[rank], meeting.places[rank] = call, called_at()
        if len(meeting.calls) == len(ranks):
            meeting.complete(ranks, move, meeting.places.get)
            stream.remove(meeting)
            self._wake(meeting)
        return meeting

    def wait_for(self, ranks: tuple[int, ...], rank: int, meeting: LateRendezvous) -> Any:
        """Block this rank until the collective has run; return its result.

        Raises: its error, if ranks called different collectives or none can go on.
        """
        if self.failure is not None:
            raise RankEnded
        self.order.has_run(rank)
        if not meeting.done:
            self.waiting[rank] = ranks, meeting
            self.suspend(rank)
            self.workers[rank].gate.acquire()
            self.resume(rank)
        if meeting.error is not None:
            raise copy.copy(meeting.error)
        return meeting.result

    def _wake(self, meeting: LateRendezvous) -> None:
        meeting.done = True
        woken = [rank for rank, (_, other) in self.waiting.items() if other is meeting]
        for rank in woken:
            del self.waiting[rank]
        self.ready.extend(woken)

    def _break_deadlock(self) -> None:
        blocked: list[tuple[int, tuple[tuple[int, ...], Any]]] = sorted(self.waiting.items())
        waits = [
            BlockedRank(
                rank,
                meeting.calls[rank],
                ranks,
                [r for r in ranks if r not in meeting.calls],
                meeting.places[rank],
            )
            for rank, (ranks, meeting) in blocked
        ]
        error = no_rank_can_go_on(waits, sorted(self.finished))
        for _, (_, meeting) in blocked:
            meeting.error = error
            self._wake(meeting)


class LateGroup(SimulatedGroup):
    """A group whose collectives complete later than they are called."""

    __slots__ = ()

    _scheduler: LateScheduler

    @property
    def memory(self) -> Memory:
        return self._scheduler.memory[self.world.rank]

    def _move(self, call: Arrival, move: Move, async_op: bool) -> Work | None:
        work = LateWork(self, call, move)
        return work if async_op else work.wait()

    def arrive(self, call: Arrival, move: Move, sender: int | None) -> LateRendezvous:
        call = self._with_record(call)
        return self._scheduler.run_collective(self.ranks, self.world.rank, call, move, sender)

    def _send(self, x: Tensor, dst: int) -> Work:
        call = Arrival("permute", (x.dtype,), (None, x, dst, None))
        return LateWork(self, call, rendezvous.move_permute, sender=self.rank)

    def _receive(self, out: Tensor, src: int) -> Work:
        call = Arrival("permute", (out.dtype,), (out, None, None, src))
        return LateWork(self, call, rendezvous.move_permute, sender=src)

    def host_wait(self, meeting: LateRendezvous) -> Any:
        return self._scheduler.wait_for(self.ranks, self.world.rank, meeting)

    def _barrier(self) -> None:
        self.host_wait(self._run(Arrival("barrier", (), ()), rendezvous.move_nothing))

    def _all_gather_bytes(self, data: bytes) -> list[bytes]:
        return self.host_wait(
            self._run(Arrival("all_gather_object", (), (data,)), rendezvous.move_bytes)
        )


class LateWork(Work):
    """A collective that has been called. It works on copies; `deliver` writes the result."""

    def __init__(
        self, group: LateGroup, call: Arrival, move: Move, sender: int | None = None
    ) -> None:
        self.group, self.call, self.place = group, call, called_at()
        self.waited, self.error = False, None
        written, read = _roles(call, group.rank)
        # By number of a buffer: whether it is written.
        used = {i: i == written for i in (read, written) if i is not None}
        group.memory.touch(str(call), [(call.buffers[i], writes) for i, writes in used.items()])
        with own_operators():
            buffers = {i: Buffer(call.buffers[i], writes) for i, writes in used.items()}
            self.out = None if written is None else buffers[written]
            if self.out is not None:
                self.out.poison()
            for buffer in buffers.values():
                buffer.expect()
        copies = tuple(buffers[i].before if i in buffers else x for i, x in enumerate(call.buffers))
        self.buffers = list(buffers.values())
        self.meeting = group.arrive(replace(call, buffers=copies), move, sender)
        group.memory.under_way.append(self)

    def __str__(self) -> str:
        return f"{self.call} over ranks {self.group.ranks}, called {self.place}"

    def wait(self) -> None:
        if self.error is not None:
            raise self.error
        if self.waited:
            return
        self.waited, memory = True, self.group.memory
        memory.under_way.remove(self)
        with own_operators():
            for buffer in self.buffers:
                if (what := buffer.change()) is not None:
                    kind = "result" if buffer.is_written else "input"
                    self.error = StreamHazard(
                        f"rank {memory.rank}: the {kind} of {self} was {what} before wait(), "
                        f"{called_at()}."
                    )
                    raise self.error
        memory.ordered.append(self)
        if not memory.runs_ahead:
            self.deliver()

    def deliver(self) -> None:
        """Wait for the other ranks, and write the result."""
        self.group.memory.ordered.remove(self)
        try:
            self.group.host_wait(self.meeting)
        except Exception as error:
            self.error = error
            raise
        if self.out is not None and not self.out.is_freed:
            with own_operators():
                self.out.flat.copy_(self.out.before)
        self.buffers = []

    def is_completed(self) -> bool:
        return self.meeting.done


def _roles(call: Arrival, rank: int) -> tuple[int | None, int | None]:
    """Return the numbers of the buffers that a collective writes and reads on this rank of the
    group.
    """
    if call.op == "all_reduce":
        return 0, 0
    if call.op == "broadcast":
        return (None, 0) if call.buffers[1] == rank else (0, None)
    if call.op == "permute":
        _, _, dst, src = call.buffers
        return None if src is None else 0, None if dst is None else 1
    return 0, 1


@contextmanager
def nccl_world(ahead: bool = True) -> Iterator[None]:
    """Make `simulate` run in a world that behaves like NCCL.

    Args:
        ahead: whether hosts run on until an operator needs a result; else `wait` and calls without
            `async_op` wait for it.
    """
    if not ahead:
        rules = importlib.import_module("torch._dynamo.trace_rules")
        # Dynamo runs them as Python, as it does the library.
        for name in (__name__, Memory.__module__):
            rules.add(name)

    def run_late(n: int, prints: str, fn: Callable[[], Any]) -> Any:
        return _run(n, prints, functools.partial(_run_rank, fn, ahead))

    with (
        patch.object(simulate, "_run", run_late),
        patch.object(simulate, "Scheduler", LateScheduler),
        patch.object(SimulatedWorld, "_make_group", _make_group),
        patch.object(pytest.RaisesExc, "__exit__", _noting_exceptions(pytest.RaisesExc.__exit__)),
        # In messages the program's line is the one above the tool's.
        patch.object(call_site, "_INNER", (*call_site._INNER, *TOOL)),
        host_reads_wait(_memory) if ahead else nullcontext(),
    ):
        yield


def _noting_exceptions(method: Callable[..., bool]) -> Callable[..., bool]:
    def exit_block(raises: Any, kind: Any, *error: Any) -> bool:
        memory = _memory()
        if memory is not None and kind is not None:
            memory.has_failed = True
        return method(raises, kind, *error)

    return exit_block


def _make_group(world: SimulatedWorld, ranks: tuple[int, ...]) -> Group:
    return LateGroup(world, ranks)


def _memory() -> Memory | None:
    world = thread_context.world
    return (
        world.scheduler.memory[world.rank]
        if isinstance(world, SimulatedWorld) and isinstance(world.scheduler, LateScheduler)
        else None
    )


def _run_rank(fn: Callable[[], Any], ahead: bool) -> Any:
    memory = _memory()
    assert memory is not None
    if ahead:
        memory.watch = OperatorWatch(memory)
    with memory.watch or nullcontext():
        result = fn()
    memory.finish()
    return result
