"""N ranks as threads of this process, one running at a time: the same program, real numbers, no launcher.

A baton goes round (`baton.py`). A rank runs until it blocks in a collective, then the next rank that can run goes on. The last
rank to arrive at a collective moves the data of all of them (`meeting.py`). So a run is deterministic, needs no locking, and
cannot hang: when no rank can run and some wait, that is an error which says who waits for whom, and at which line.
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
from ..comm.call_site import _INNER
from ..comm.current_world import current_world
from ..comm.group import Group, Observer
from ..comm.work import DONE, Work
from ..comm.world import World, activate, active_world
from ..monitor.settings import settings
from . import rendezvous
from .output import RankOutput, callers_stdout, check_prints, outputs
from .rendezvous import Call, Move, like
from .scheduler import Baton
from .threads import RankEnded, dismiss, hire

_settings = settings()
# The system may give a signal to any thread, and Python's main thread, which has to handle it, goes on waiting for a lock.
_TO_LOOK = 0.2  # seconds after which it looks
_TO_UNWIND = 1.0  # seconds that ranks have after Ctrl-C; one that sleeps or computes longer is left behind


class SimulatedWorld(World):
    """The world of one rank of `simulate`."""

    def __init__(self, rank: int, size: int, baton: Baton, observers: list[Observer]) -> None:
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

    def _meet(self, call: Call, move: Move) -> Any:
        if _settings.mode != "off":
            note = self.world.comm_context.tag
            call = replace(call, note="" if note is None else note.text, lineage=self.world.comm_context.lineage, page=self.world.page)
        return self._baton.meet(self.ranks, self.world.rank, call, move)

    def _move(self, call: Call, move: Move, async_op: bool) -> Work | None:
        self._meet(call, move)
        return DONE if async_op else None

    def _all_gather(self, out: Tensor, x: Tensor, async_op: bool) -> Work | None:
        return self._move(Call("all_gather", like(x), (out, x)), rendezvous.move_all_gather, async_op)

    def _reduce_scatter(self, out: Tensor, x: Tensor, op: str, async_op: bool) -> Work | None:
        return self._move(Call("reduce_scatter", (op, *like(x)), (out, x)), rendezvous.move_reduce_scatter, async_op)

    def _all_reduce(self, x: Tensor, op: str, async_op: bool) -> Work | None:
        return self._move(Call("all_reduce", (op, *like(x)), (x,)), rendezvous.move_all_reduce, async_op)

    def _all_to_all(
        self, out: Tensor, x: Tensor, out_splits: Sequence[int] | None, in_splits: Sequence[int] | None, async_op: bool
    ) -> Work | None:
        even = [x.numel() // self.size] * self.size
        call = Call("all_to_all", (x.dtype,), (out, x, out_splits or even, in_splits or even))
        return self._move(call, rendezvous.move_all_to_all, async_op)

    def _broadcast(self, x: Tensor, src: int, async_op: bool) -> Work | None:
        return self._move(Call("broadcast", (*like(x), f"src={src}"), (x, src)), rendezvous.move_broadcast, async_op)

    def _permute(self, out: Tensor, x: Tensor, dst: int | None, src: int | None, async_op: bool) -> Work | None:
        return self._move(Call("permute", (x.dtype,), (out, x, dst, src)), rendezvous.move_permute, async_op)

    def _barrier(self) -> None:
        self._meet(Call("barrier", (), ()), rendezvous.move_nothing)

    def _all_gather_bytes(self, data: bytes) -> list[bytes]:
        return self._meet(Call("all_gather_object", (), (data,)), rendezvous.move_bytes)


def simulate(n: int, prints: str = "all") -> Callable[[Callable[..., Any]], Callable[..., list[Any]]]:
    """simulate(n)(fn)(*args, **kwargs) -> [result of rank 0, ..., result of rank n-1].

    Runs fn on n ranks of this process, with real data and real collectives, forward and backward. All ranks see the
    same argument objects, the grad mode, autocast and context variables of the caller, and each its own copy of torch's
    CPU random state. Ranks run one at a time and switch only inside collectives, so results are deterministic.

        simulate(2)(fn)(x):   rank 0  fn(x) ---- all_reduce .... fn(x) ends -> results[0]
                              rank 1  ......... fn(x) all_reduce fn(x) ends -> results[1]

    Args:
        n: the number of ranks.
        prints: what becomes of what ranks print: "all" passes it on line by line, `[rank 3] ` in front; "first" passes on what
            rank 0 prints, as it is; "plain" leaves everything as it is. A single rank prints as it always does.

    Raises: MeshError when n < 1 or prints is none of these. What a rank raises ends all ranks and is raised here, with a note
        naming the rank; CollectiveMismatchError when ranks of a group call different collectives; DeadlockError when
        ranks wait for others that finished or wait elsewhere: both show the line of each rank.
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
    check_prints(prints)

    def decorate(fn: Callable[..., Any]) -> Callable[..., list[Any]]:
        @functools.wraps(fn)
        def run(*args: Any, **kwargs: Any) -> list[Any]:
            results, failure = _run(n, prints, functools.partial(fn, *args, **kwargs))
            if failure is None:
                return results
            try:
                raise failure.with_traceback(_readable(failure))
            finally:
                del failure  # it holds this frame, which must not hold it

        return run

    return decorate


def _run(n: int, prints: str, fn: Callable[[], Any]) -> tuple[list[Any], BaseException | None]:
    """The results, and what ended the run if it did not end well. Generator, output and world are the caller's again."""
    caller = active_world()
    before = callers_stdout(isinstance(caller, SimulatedWorld))
    workers, results = hire(n), [None] * n
    baton = Baton(workers, outputs(n, prints, before))
    observers, modes = current_world().observers, _Modes()
    for rank, worker in enumerate(workers):
        world = SimulatedWorld(rank, n, baton, list(observers))
        worker.name = f"rank {rank} of simulate({n})"
        context: Any = contextvars.copy_context()
        worker.job = functools.partial(context.run, _run_rank, world, fn, results, modes)
    with _inside(caller, baton):
        try:
            _wait_for(baton)
            torch.default_generator.set_state(baton.generators[0])
        finally:
            sys.stdout = before
            baton.order.end()
            dismiss(workers, failed=baton.failure is not None)
    return results, baton.failure


@contextmanager
def _inside(caller: World | None, baton: Baton) -> Iterator[None]:
    """While a simulated rank simulates, its own baton knows, so that Ctrl-C finds the thread that runs."""
    if isinstance(caller, SimulatedWorld):
        caller.baton.inner = baton
    try:
        yield
    finally:
        if isinstance(caller, SimulatedWorld):
            caller.baton.inner = None


def _wait_for(baton: Baton) -> None:
    """Until all ranks have ended. After Ctrl-C they unwind; one that takes too long over it goes on without us."""
    try:
        baton.give_away()
        while not baton.done.acquire(timeout=_TO_LOOK):
            pass
    except BaseException as interrupt:
        baton.interrupt(interrupt)
        try:
            baton.done.acquire(timeout=_TO_UNWIND)
        finally:
            baton.abandon()


def _run_rank(world: SimulatedWorld, fn: Callable[[], Any], results: list[Any], modes: _Modes) -> None:
    baton, rank = world.baton, world.rank
    output = baton.outputs[rank]

    def program() -> None:
        baton.take(rank)
        with modes.applied():
            results[rank] = fn()

    activate(world)
    _run_guarded(baton, rank, program)
    if isinstance(output, RankOutput):
        _run_guarded(baton, rank, output.end_line)
    activate(None)
    baton.finish(rank)


def _run_guarded(baton: Baton, rank: int, part: Callable[[], Any]) -> None:
    """Whatever happens in a rank, the baton goes on."""
    try:
        part()
    except RankEnded:
        pass
    except BaseException as error:
        baton.fail(_from_user(error), f"raised on rank {rank} of simulate({baton.size})")


def _from_user(error: BaseException) -> BaseException:
    """The error with a traceback that begins in the program, not in this file."""
    found = error.__traceback__
    while found is not None and found.tb_frame.f_code.co_filename == __file__:
        found = found.tb_next
    return error.with_traceback(found)


def _readable(error: BaseException) -> TracebackType | None:
    """The traceback of an error; of one that names the ranks' lines itself, without what lies inside the library."""
    last = found = error.__traceback__
    if isinstance(error, errors.CollectiveMismatchError | errors.DeadlockError):
        while found is not None:
            last = last if found.tb_frame.f_code.co_filename.startswith(_INNER) else found
            found = found.tb_next
        if last is not None:
            last.tb_next = None
    return error.__traceback__


class _Modes:
    """The caller's torch modes that live in the thread."""

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
    def applied(self) -> Iterator[None]:
        with ExitStack() as stack:
            # Backward runs in the calling thread on every device: a device thread shared by ranks could not wait.
            stack.enter_context(torch.autograd.set_multithreading_enabled(False))
            if self.inference:
                stack.enter_context(torch.inference_mode())
            stack.enter_context(torch.set_grad_enabled(self.grad))
            if self.device.type != "cpu":
                stack.enter_context(self.device)
            for device, dtype in self.autocast:
                stack.enter_context(torch.autocast(device, dtype))
            yield
