"""N ranks as threads of this process, one running at a time: the same program, real numbers, no launcher.

A baton goes round. A rank runs until it blocks in a collective, then the next rank that can run goes on. The last rank
to arrive at a collective moves the data of all of them. So a run is deterministic, needs no locking, and cannot hang:
when no rank can run and some wait, that is an error which says who waits for whom.
"""

from __future__ import annotations

import contextvars
import ctypes
import functools
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from . import errors
from .group import Group, Observer, World, activate, current_world
from .work import DONE, Work

_FOLD = {"sum": torch.add, "product": torch.mul, "max": torch.maximum, "min": torch.minimum}


@dataclass(frozen=True, slots=True)
class _Call:
    """A rank's arrival at a collective: what must agree between ranks, and the buffers."""

    op: str
    agree: tuple[Any, ...]
    buffers: tuple[Any, ...]

    def __str__(self) -> str:
        words = [str(a).removeprefix("torch.") for a in self.agree]
        if self.op == "all_to_all":
            words += [f"out_splits={list(self.buffers[2])}", f"in_splits={list(self.buffers[3])}"]
        if self.op == "permute":
            words += [f"dst={self.buffers[2]}", f"src={self.buffers[3]}"]
        return f"{self.op}({', '.join(words)})"


class _RankEnded(BaseException):
    """Unwinds a rank because the run is over. Not an Exception, so that no handler of the program keeps it."""


class _Meeting:
    """The ranks of one group on their way through one collective."""

    __slots__ = ("calls", "error", "result")

    def __init__(self) -> None:
        self.calls: dict[int, _Call] = {}
        self.result: Any = None
        self.error: Exception | None = None


class _Baton:
    """Lets one rank run at a time. Only the holder touches the state, so nothing here is locked but the waiting."""

    def __init__(self, gates: list[threading.Lock]) -> None:
        self.size = size = len(gates)
        self.gates = gates
        self.done = threading.Lock()
        self.done.acquire()
        self.ready: deque[int] = deque(range(size))
        self.waiting: dict[int, tuple[tuple[int, ...], _Meeting]] = {}
        self.meetings: dict[tuple[int, ...], _Meeting] = {}
        self.finished: set[int] = set()
        self.failure: BaseException | None = None
        self.running = -1
        state = torch.default_generator.get_state()
        self.generators = [state] * size

    def take(self, rank: int) -> None:
        """Goes on when it is this rank's turn, with its own state of torch's CPU generator, as a process has."""
        self.running = rank
        if self.failure is not None:
            raise _RankEnded
        torch.default_generator.set_state(self.generators[rank])

    def give(self, rank: int) -> None:
        """Hands the baton to the next rank that can run, or ends the run."""
        self.generators[rank] = torch.default_generator.get_state()
        self.give_away()

    def give_away(self) -> None:
        if not self.ready and self.waiting:
            self._break_deadlock()
        if self.ready:
            self.gates[self.ready.popleft()].release()
        else:
            self.done.release()

    def meet(self, ranks: tuple[int, ...], rank: int, call: _Call, move: Callable[[list[_Call]], Any]) -> Any:
        """Waits for the other ranks of the group; the last one moves the data. Returns what `move` returned."""
        if self.failure is not None:
            raise _RankEnded
        meeting = self.meetings.get(ranks)
        if meeting is None:
            meeting = self.meetings[ranks] = _Meeting()
        meeting.calls[rank] = call
        if len(meeting.calls) < len(ranks):
            self.waiting[rank] = (ranks, meeting)
            self.give(rank)
            self.gates[rank].acquire()
            self.take(rank)
        else:
            self._complete(ranks, rank, meeting, move)
        if meeting.error is not None:
            raise meeting.error
        return meeting.result

    def _complete(
        self, ranks: tuple[int, ...], rank: int, meeting: _Meeting, move: Callable[[list[_Call]], Any]
    ) -> None:
        calls = [meeting.calls[r] for r in ranks]
        try:
            _check_agreement(ranks, calls)
            # Inference mode may write to both kinds of tensors; outside it, inference tensors refuse.
            with torch.inference_mode():
                meeting.result = move(calls)
        except Exception as error:
            meeting.error = error
        self._wake(meeting, [r for r in ranks if r != rank])
        del self.meetings[ranks]

    def _wake(self, meeting: _Meeting, ranks: Sequence[int]) -> None:
        for r in ranks:
            del self.waiting[r]
        self.ready.extend(ranks)

    def _break_deadlock(self) -> None:
        error = errors.DeadlockError(self._describe_deadlock())
        for ranks, meeting in list(self.meetings.items()):
            meeting.error = error
            self._wake(meeting, list(meeting.calls))
            del self.meetings[ranks]

    def _describe_deadlock(self) -> str:
        lines = ["no simulated rank can go on:"]
        for r, (ranks, meeting) in sorted(self.waiting.items()):
            missing = [m for m in ranks if m not in meeting.calls]
            lines.append(f"  rank {r} waits in {meeting.calls[r]} over ranks {ranks} for ranks {missing}")
        if self.finished:
            lines.append(f"  ranks {sorted(self.finished)} have finished")
        return "\n".join([*lines, "Every rank of a group must call the same collectives in the same order."])

    def finish(self, rank: int) -> None:
        self.finished.add(rank)
        self.give(rank)

    def fail(self, rank: int, error: BaseException) -> None:
        """Ends the run: every rank that waits or has not started is woken to unwind."""
        if self.failure is None:
            self.failure = error
            if rank >= 0:
                error.add_note(f"raised on rank {rank} of simulate({self.size})")
            self.ready.extend(r for r in self.waiting)
            self.waiting.clear()
            self.meetings.clear()


class SimulatedWorld(World):
    """The world of one rank of `simulate`."""

    def __init__(self, rank: int, size: int, baton: _Baton, observers: list[Observer]) -> None:
        super().__init__(rank, size, observers)
        self.baton = baton

    def _make_group(self, ranks: tuple[int, ...]) -> Group:
        return SimulatedGroup(self, ranks)


class SimulatedGroup(Group):
    """Group over threads of this process."""

    __slots__ = ("_baton",)

    def __init__(self, world: SimulatedWorld, ranks: tuple[int, ...]) -> None:
        super().__init__(world, ranks)
        self._baton = world.baton

    def _meet(self, call: _Call, move: Callable[[list[_Call]], Any]) -> Any:
        return self._baton.meet(self.ranks, self.world.rank, call, move)

    def _move(self, call: _Call, move: Callable[[list[_Call]], Any], async_op: bool) -> Work | None:
        self._meet(call, move)
        return DONE if async_op else None

    def _all_gather(self, out: Tensor, x: Tensor, async_op: bool) -> Work | None:
        return self._move(_Call("all_gather", _like(x), (out, x)), _move_all_gather, async_op)

    def _reduce_scatter(self, out: Tensor, x: Tensor, op: str, async_op: bool) -> Work | None:
        return self._move(_Call("reduce_scatter", (op, *_like(x)), (out, x)), _move_reduce_scatter, async_op)

    def _all_reduce(self, x: Tensor, op: str, async_op: bool) -> Work | None:
        return self._move(_Call("all_reduce", (op, *_like(x)), (x,)), _move_all_reduce, async_op)

    def _all_to_all(
        self, out: Tensor, x: Tensor, out_splits: Sequence[int], in_splits: Sequence[int], async_op: bool
    ) -> Work | None:
        call = _Call("all_to_all", (x.dtype,), (out, x, out_splits, in_splits))
        return self._move(call, _move_all_to_all, async_op)

    def _broadcast(self, x: Tensor, src: int, async_op: bool) -> Work | None:
        return self._move(_Call("broadcast", (*_like(x), f"src={src}"), (x, src)), _move_broadcast, async_op)

    def _permute(self, out: Tensor, x: Tensor, dst: int | None, src: int | None, async_op: bool) -> Work | None:
        return self._move(_Call("permute", (x.dtype,), (out, x, dst, src)), _move_permute, async_op)

    def _barrier(self) -> None:
        self._meet(_Call("barrier", (), ()), lambda calls: None)

    def _all_gather_bytes(self, data: bytes) -> list[bytes]:
        return self._meet(_Call("all_gather_object", (), (data,)), lambda calls: [c.buffers[0] for c in calls])


def _like(x: Tensor) -> tuple[torch.dtype, str]:
    return x.dtype, f"{x.numel()} elements"


def _check_agreement(ranks: tuple[int, ...], calls: list[_Call]) -> None:
    first = calls[0]
    if any(c.op != first.op or c.agree != first.agree for c in calls):
        raise _mismatch(ranks, calls, "ranks call different collectives")
    if first.op == "all_to_all":
        _check_splits(ranks, calls)
    if first.op == "permute":
        _check_pairs(ranks, calls)


def _check_splits(ranks: tuple[int, ...], calls: list[_Call]) -> None:
    for i, sender in enumerate(calls):
        for j, receiver in enumerate(calls):
            sent, expected = sender.buffers[3][j], receiver.buffers[2][i]
            if sent != expected:
                what = f"rank {ranks[i]} sends {sent} elements to rank {ranks[j]}, which expects {expected}"
                raise _mismatch(ranks, calls, what)


def _check_pairs(ranks: tuple[int, ...], calls: list[_Call]) -> None:
    for i, call in enumerate(calls):
        _, x, dst, src = call.buffers
        if dst is not None:
            _check_sent(ranks, calls, i, dst, x.numel())
        if src is not None and calls[src].buffers[2] != i:
            other = _named(ranks, calls[src].buffers[2])
            raise _mismatch(ranks, calls, f"rank {ranks[i]} expects from rank {ranks[src]}, which sends to {other}")


def _check_sent(ranks: tuple[int, ...], calls: list[_Call], i: int, dst: int, sent: int) -> None:
    out, _, _, src = calls[dst].buffers
    if src != i:
        other = _named(ranks, src)
        raise _mismatch(ranks, calls, f"rank {ranks[i]} sends to rank {ranks[dst]}, which expects from {other}")
    if sent != out.numel():
        what = f"rank {ranks[i]} sends {sent} elements to rank {ranks[dst]}, which expects {out.numel()}"
        raise _mismatch(ranks, calls, what)


def _named(ranks: tuple[int, ...], place: int | None) -> str:
    return "none" if place is None else f"rank {ranks[place]}"


def _mismatch(ranks: tuple[int, ...], calls: list[_Call], what: str) -> errors.CollectiveMismatchError:
    who: dict[str, list[int]] = {}
    for r, c in zip(ranks, calls, strict=True):
        who.setdefault(str(c), []).append(r)
    lines = [f"  ranks {rs} call {text}" for text, rs in who.items()]
    return errors.CollectiveMismatchError("\n".join([f"{what} in the group of ranks {ranks}:", *lines]))


# Moving data: first all results, then all writes, because an out may overlap an x (as in an in-place all_gather).


def _move_all_gather(calls: list[_Call]) -> None:
    everything = torch.cat([c.buffers[1].reshape(-1) for c in calls])
    for c in calls:
        c.buffers[0].view(-1).copy_(everything)


def _fold(xs: list[Tensor], op: str) -> Tensor:
    return functools.reduce(_FOLD[op], xs)


def _move_reduce_scatter(calls: list[_Call]) -> None:
    total = _fold([c.buffers[1].reshape(-1) for c in calls], calls[0].agree[0])
    for c, part in zip(calls, total.chunk(len(calls)) if total.numel() else [total] * len(calls), strict=True):
        c.buffers[0].view(-1).copy_(part)


def _move_all_reduce(calls: list[_Call]) -> None:
    total = _fold([c.buffers[0].reshape(-1) for c in calls], calls[0].agree[0])
    for c in calls:
        c.buffers[0].view(-1).copy_(total)


def _move_all_to_all(calls: list[_Call]) -> None:
    parts = [c.buffers[1].reshape(-1).split(list(c.buffers[3])) for c in calls]
    arrived = [torch.cat(column) for column in zip(*parts, strict=True)]
    for c, flat in zip(calls, arrived, strict=True):
        c.buffers[0].view(-1).copy_(flat)


def _move_broadcast(calls: list[_Call]) -> None:
    src = calls[0].buffers[1]
    for i, c in enumerate(calls):
        if i != src:
            c.buffers[0].copy_(calls[src].buffers[0])


def _move_permute(calls: list[_Call]) -> None:
    arrived = [None if c.buffers[3] is None else calls[c.buffers[3]].buffers[1].reshape(-1).clone() for c in calls]
    for c, flat in zip(calls, arrived, strict=True):
        if flat is not None:
            c.buffers[0].view(-1).copy_(flat)


def simulate(n: int) -> Callable[[Callable[..., Any]], Callable[..., list[Any]]]:
    """simulate(n)(fn)(*args, **kwargs) -> [result of rank 0, ..., result of rank n-1].

    Runs fn on n ranks of this process, with real data and real collectives, forward and backward. All ranks see the
    same argument objects, the grad mode, autocast and context variables of the caller, and each its own copy of torch's
    CPU random state. Ranks run one at a time and switch only inside collectives, so results are deterministic.

        simulate(2)(fn)(x):   rank 0  fn(x) ---- all_reduce .... fn(x) ends -> results[0]
                              rank 1  ......... fn(x) all_reduce fn(x) ends -> results[1]

    Raises: MeshError when n < 1. What a rank raises ends all ranks and is raised here, with a note naming the rank;
        CollectiveMismatchError when ranks of a group call different collectives; DeadlockError when ranks wait for
        others that finished or wait elsewhere.
    Communication: none; memory is copied between the ranks' tensors.

    >>> import torch
    >>> from shardmesh.mesh import current_world, simulate
    >>> def fn():
    ...     world = current_world()
    ...     x = torch.tensor([float(world.rank)])
    ...     world.group(range(world.size)).all_reduce(x)
    ...     return x.item()
    >>> simulate(4)(fn)()
    [6.0, 6.0, 6.0, 6.0]
    """
    if not isinstance(n, int) or n < 1:
        raise errors.MeshError(f"simulate({n!r}): write the number of ranks, a positive integer.")

    def decorate(fn: Callable[..., Any]) -> Callable[..., list[Any]]:
        @functools.wraps(fn)
        def run(*args: Any, **kwargs: Any) -> list[Any]:
            return _run(n, functools.partial(fn, *args, **kwargs))

        return run

    return decorate


class _Worker(threading.Thread):
    """A thread that runs one rank after another: making a thread takes longer than many a simulated program.

    It waits at its gate, which is the one where its rank waits for the baton.
    """

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.gate = threading.Lock()
        self.gate.acquire()
        self.job: Callable[[], None] = _nothing
        self.last = False
        self.start()

    def run(self) -> None:
        while not self.last:
            self.gate.acquire()
            # Taken first: when the last rank has passed the baton on, the next run may give this worker a job at once.
            job, self.job = self.job, _nothing
            job()
            del job  # an idle worker must not keep the arguments of its last rank alive


def _nothing() -> None:
    """What an idle worker has to do."""


_idle: list[_Worker] = []
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_idle.clear)  # threads do not survive a fork


def _run(n: int, fn: Callable[[], Any]) -> list[Any]:
    workers = [_idle.pop() if _idle else _Worker() for _ in range(n)]
    baton = _Baton([worker.gate for worker in workers])
    results: list[Any] = [None] * n
    observers, modes = current_world().observers, _Modes()
    for rank, worker in enumerate(workers):
        world = SimulatedWorld(rank, n, baton, list(observers))
        worker.name = f"rank {rank} of simulate({n})"
        context: Any = contextvars.copy_context()
        worker.job = functools.partial(context.run, _run_rank, world, fn, results, modes)
    try:
        baton.give_away()
        baton.done.acquire()
    except BaseException as interrupt:
        _interrupt(baton, workers, interrupt)
    _idle.extend(workers)
    torch.default_generator.set_state(baton.generators[0])
    if baton.failure is not None:
        raise baton.failure
    return results


def _run_rank(world: SimulatedWorld, fn: Callable[[], Any], results: list[Any], modes: _Modes) -> None:
    baton, rank = world.baton, world.rank
    activate(world)
    try:
        baton.take(rank)
        with modes.applied():
            results[rank] = fn()
    except _RankEnded:
        pass
    except BaseException as error:
        baton.fail(rank, error)
    activate(None)
    baton.finish(rank)


def _interrupt(baton: _Baton, workers: list[_Worker], interrupt: BaseException) -> NoReturn:
    """Ends all ranks after Ctrl-C in the caller: those that wait at once, the running one at its next bytecode."""
    baton.fail(-1, interrupt)
    for worker in workers:
        worker.last = True
    ident = workers[baton.running].ident
    if ident is not None:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), ctypes.py_object(_RankEnded))
    raise interrupt


class _Modes:
    """The caller's torch modes that live in the thread."""

    def __init__(self) -> None:
        self.grad = torch.is_grad_enabled()
        self.inference = torch.is_inference_mode_enabled()
        self.autocast = [
            (device, torch.get_autocast_dtype(device))
            for device in ("cpu", "cuda")
            if torch.is_autocast_enabled(device)
        ]

    @contextmanager
    def applied(self) -> Iterator[None]:
        with ExitStack() as stack:
            # Backward runs in the calling thread on every device: a device thread shared by ranks could not wait.
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            if self.inference:
                stack.enter_context(torch.inference_mode())
            stack.enter_context(torch.set_grad_enabled(self.grad))
            for device, dtype in self.autocast:
                stack.enter_context(torch.autocast(device, dtype))
            yield
