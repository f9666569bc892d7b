"""simulate: run N ranks as threads of this process, one at a time, with real data and no launcher.

A rank runs until it blocks in a collective, then the next one that can run continues
(`scheduler.py`). The last rank to arrive at a collective moves the data of all of them
(`rendezvous.py`). So a run is deterministic, needs no locking, and cannot hang: if no rank can run
and some wait, every rank raises an error that lists which ranks wait for which, and at which line.
"""

from __future__ import annotations

import contextvars
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from .. import errors
from ..abstract_mesh import MOST_RANKS
from ..comm.call_site import _INNER
from ..comm.current_world import current_world
from ..comm.dispatch_modes import not_recomputed
from ..comm.group import Group, Observer
from ..comm.recording.trace_buffer import Header
from ..comm.thread_context import thread_context
from ..comm.work import DONE, Work
from ..comm.world import World
from ..settings import settings
from . import rendezvous
from .arrival import Arrival
from .output import RankOutput, callers_stdout, check_prints, outputs
from .rendezvous import Move, like
from .scheduler import Scheduler
from .threads import RankEnded, acquire, release

_settings = settings()
# The operating system may deliver a signal to any thread, which does not wake Python's main thread,
# the one that must handle it.
_POLL_S = 0.2  # between looks of the main thread for a signal
# for the ranks to unwind after Ctrl-C; one that sleeps or computes longer is left running
_UNWIND_S = 1.0


class SimulatedWorld(World):
    """The world of one rank of `simulate`."""

    def __init__(
        self, rank: int, size: int, scheduler: Scheduler, observers: list[Observer]
    ) -> None:
        super().__init__(rank, size, observers)
        self.scheduler = scheduler

    def _make_group(self, ranks: tuple[int, ...]) -> Group:
        return SimulatedGroup(self, ranks)


class SimulatedGroup(Group):
    """Group over simulated ranks."""

    __slots__ = ("_scheduler",)

    def __init__(self, world: SimulatedWorld, ranks: tuple[int, ...]) -> None:
        super().__init__(world, ranks)
        self._scheduler = world.scheduler

    def _with_record(self, call: Arrival) -> Arrival:
        """Return the arrival with what this rank's record says of the call."""
        if self.recorder is None or _settings.mode == "off":
            return call
        tag = self.recorder.tag
        world = self.world
        origin = world.comm_context.origin
        has_marked_step = origin is not None and origin[1]
        return replace(
            call,
            tag="" if tag is None else tag.text,
            lineage=world.comm_context.lineage_on(self.ranks),
            trace_buffer=world.trace_buffer,
            step=world.trace_buffer.words[Header.STEP] if has_marked_step else None,
        )

    @not_recomputed  # the last rank to arrive moves the data of all
    def _run(self, call: Arrival, move: Move) -> Any:
        return self._scheduler.run_collective(
            self.ranks, self.world.rank, self._with_record(call), move
        )

    def _move(self, call: Arrival, move: Move, async_op: bool) -> Work | None:
        self._run(call, move)
        return DONE if async_op else None

    def _all_gather(self, out: Tensor, x: Tensor, async_op: bool) -> Work | None:
        return self._move(
            Arrival("all_gather", like(x), (out, x)), rendezvous.move_all_gather, async_op
        )

    def _reduce_scatter(self, out: Tensor, x: Tensor, op: str, async_op: bool) -> Work | None:
        return self._move(
            Arrival("reduce_scatter", (op, *like(x)), (out, x)),
            rendezvous.move_reduce_scatter,
            async_op,
        )

    def _all_reduce(self, x: Tensor, op: str, async_op: bool) -> Work | None:
        return self._move(
            Arrival("all_reduce", (op, *like(x)), (x,)), rendezvous.move_all_reduce, async_op
        )

    def _all_to_all(
        self,
        out: Tensor,
        x: Tensor,
        out_splits: Sequence[int] | None,
        in_splits: Sequence[int] | None,
        async_op: bool,
    ) -> Work | None:
        even = [x.numel() // self.size] * self.size
        call = Arrival("all_to_all", (x.dtype,), (out, x, out_splits or even, in_splits or even))
        return self._move(call, rendezvous.move_all_to_all, async_op)

    def _broadcast(self, x: Tensor, src: int, async_op: bool) -> Work | None:
        return self._move(
            Arrival("broadcast", (*like(x), f"src={src}"), (x, src)),
            rendezvous.move_broadcast,
            async_op,
        )

    def _permute(
        self, out: Tensor, x: Tensor, dst: int | None, src: int | None, async_op: bool
    ) -> Work | None:
        return self._move(
            Arrival("permute", (x.dtype,), (out, x, dst, src)), rendezvous.move_permute, async_op
        )

    def _send(self, x: Tensor, dst: int) -> Work | None:
        call = self._with_record(Arrival("permute", (x.dtype,), (None, x.clone(), dst, None)))
        self._scheduler.send(self.ranks, self.world.rank, call)
        return DONE

    def _receive(self, out: Tensor, src: int) -> Work | None:
        call = self._with_record(Arrival("permute", (out.dtype,), (out, None, None, src)))
        return self._scheduler.post_receive(self.ranks, self.world.rank, call)

    def _barrier(self) -> None:
        self._run(Arrival("barrier", (), ()), rendezvous.move_nothing)

    def _all_gather_bytes(self, data: bytes) -> list[bytes]:
        return self._run(Arrival("all_gather_object", (), (data,)), rendezvous.move_bytes)


def simulate(
    n: int, prints: str = "all"
) -> Callable[[Callable[..., Any]], Callable[..., list[Any]]]:
    """simulate(n)(fn)(*args, **kwargs) -> [result of rank 0, ..., result of rank n-1].

    Run fn on n ranks in threads of this process, with real data and real collectives, forward and
    backward. All ranks get the same argument objects and the caller's grad mode, autocast and
    context variables; each has its own copy of torch's CPU random state. Ranks run one at a time
    and switch only inside collectives, so results are deterministic.

        simulate(2)(fn)(x):   rank 0  fn(x) ---- all_reduce .... fn(x) ends -> results[0]
                              rank 1  ......... fn(x) all_reduce fn(x) ends -> results[1]

    Args:
        n: the number of ranks.
        prints: which output of the ranks is printed: "all" prints every rank's lines, prefixed with
            `[rank 3] `; "first" only those of rank 0, without a prefix; "plain" everything, without
            a prefix. A single rank has no prefix.

    Raises: MeshError when n < 1 or prints is not one of these. An error of one rank ends all ranks
        and is raised here, with a note naming the rank. CollectiveMismatchError when ranks of a
        group call different collectives; DeadlockError when ranks wait for others that finished or
        wait elsewhere; both show the line of each rank.

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
    if not isinstance(n, int) or not 1 <= n <= MOST_RANKS:
        raise errors.MeshError(
            f"simulate({n!r}): the number of ranks must be a positive integer, at most "
            f"{MOST_RANKS}."
        )
    check_prints(prints)

    def decorate(fn: Callable[..., Any]) -> Callable[..., list[Any]]:
        @functools.wraps(fn)
        def run(*args: Any, **kwargs: Any) -> list[Any]:
            results, failure = _run(n, prints, functools.partial(fn, *args, **kwargs))
            if failure is None:
                return results
            try:
                raise failure.with_traceback(_readable_traceback(failure))
            finally:
                del failure  # its traceback refers to this frame: avoid a reference cycle

        return run

    return decorate


def _run(n: int, prints: str, fn: Callable[[], Any]) -> tuple[list[Any], BaseException | None]:
    """Return the results, and the error if any. Restores the caller's generator and output."""
    caller = thread_context.world
    before = callers_stdout(isinstance(caller, SimulatedWorld))
    workers = acquire(n)
    results = [None] * n
    scheduler = Scheduler(workers, outputs(n, prints, before))
    observers = current_world().observers
    modes = _Modes()
    for rank, worker in enumerate(workers):
        world = SimulatedWorld(rank, n, scheduler, list(observers))
        worker.name = f"rank {rank} of simulate({n})"
        context: Any = contextvars.copy_context()
        worker.job = functools.partial(context.run, _run_rank, world, fn, results, modes)
    try:
        if isinstance(caller, SimulatedWorld):
            caller.scheduler.inner = scheduler  # so that Ctrl-C finds the thread that runs
        try:
            _wait_for(scheduler)
            torch.default_generator.set_state(scheduler.generators[0])
        finally:
            sys.stdout = before
            try:
                scheduler.order.end()
            finally:
                release(workers, failed=scheduler.failure is not None)
    finally:
        if isinstance(caller, SimulatedWorld):
            caller.scheduler.inner = None
    return results, scheduler.failure


def _wait_for(scheduler: Scheduler) -> None:
    """Wait until all ranks have ended; after Ctrl-C a rank that takes too long is left running."""
    try:
        scheduler.run_next()
        while not scheduler.done.acquire(timeout=_POLL_S):
            pass
    except BaseException as interrupt:
        scheduler.interrupt(interrupt)
        try:
            scheduler.done.acquire(timeout=_UNWIND_S)
        finally:
            scheduler.abandon()


def _run_rank(
    world: SimulatedWorld, fn: Callable[[], Any], results: list[Any], modes: _Modes
) -> None:
    scheduler = world.scheduler
    rank = world.rank
    output = scheduler.outputs[rank]

    def program() -> None:
        scheduler.resume(rank)
        with modes.apply():
            results[rank] = fn()

    thread_context.reset()  # the thread is reused
    thread_context.world = world
    _run_guarded(scheduler, rank, program)
    if isinstance(output, RankOutput):
        _run_guarded(scheduler, rank, output.end_line)
    thread_context.reset()
    world.end()
    scheduler.finish(rank)


def _run_guarded(scheduler: Scheduler, rank: int, part: Callable[[], Any]) -> None:
    """Run a part of a rank; an error in it ends the simulation and does not propagate."""
    try:
        part()
    except RankEnded:
        pass
    except BaseException as error:
        entry = error.__traceback__
        # begin the traceback in the program
        while entry is not None and entry.tb_frame.f_code.co_filename == __file__:
            entry = entry.tb_next
        scheduler.fail(
            error.with_traceback(entry), f"raised on rank {rank} of simulate({scheduler.size})"
        )


def _readable_traceback(error: BaseException) -> TracebackType | None:
    """Return the traceback of an error.

    If the error itself names the ranks' lines, without frames of the library.
    """
    last = entry = error.__traceback__
    if isinstance(error, errors.CollectiveMismatchError | errors.DeadlockError):
        while entry is not None:
            last = last if entry.tb_frame.f_code.co_filename.startswith(_INNER) else entry
            entry = entry.tb_next
        if last is not None:
            last.tb_next = None
    return error.__traceback__


class _Modes:
    """The caller's torch modes that are local to its thread."""

    def __init__(self) -> None:
        self.grad = torch.is_grad_enabled()
        self.inference = torch.is_inference_mode_enabled()
        self.device = torch.get_default_device()
        self.autocast = [
            (device, torch.get_autocast_dtype(device))
            for device in ("cpu", "cuda")
            if torch.is_autocast_enabled(device)
        ]

    @contextmanager
    def apply(self) -> Iterator[None]:
        with ExitStack() as stack:
            # Run backward in the calling thread on every device: a device thread shared by ranks
            # could not wait for one of them.
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            if self.inference:
                stack.enter_context(torch.inference_mode())
            stack.enter_context(torch.set_grad_enabled(self.grad))
            if self.device.type != "cpu":
                stack.enter_context(self.device)
            for device, dtype in self.autocast:
                stack.enter_context(torch.autocast(device, dtype))
            yield
