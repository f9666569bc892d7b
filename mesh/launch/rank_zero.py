"""Work for one rank: `rank_zero`, `main_process_first`, and a warning where a collective among them would wait for ever.

    rank_zero              rank 0   fn() .......... goes on
                           rank 1   goes on

    main_process_first     rank 0   block .. meet   goes on
                           rank 1            meet   block ..  goes on

Inside such a region a collective with a rank that is not in it can never end. The region listens to this rank's collectives while
it lasts, so that a program without regions pays nothing.
"""

from __future__ import annotations

import functools
import os
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, ParamSpec, TypeVar, overload

import torch.distributed as dist

from .. import errors
from ..comm.call_site import user_call, user_line
from ..comm.current_world import current_world
from ..comm.group import CollectiveRecord, Group
from ..comm.process import ProcessWorld
from ..comm.report import axes_of
from ..comm.world import World
from ..monitor.monitor import watch_of
from ..monitor.verdict import Seen, Verdict, ranks_text
from ..simulated.simulate import SimulatedWorld
from .process_groups import launch_environment

Args = ParamSpec("Args")
T = TypeVar("T")


@overload
def rank_zero(fn: Callable[Args, T], *, local: bool = False) -> Callable[Args, T | None]: ...
@overload
def rank_zero(fn: None = None, *, local: bool = False) -> Callable[[Callable[Args, T]], Callable[Args, T | None]]: ...
def rank_zero(fn: Callable[..., Any] | None = None, *, local: bool = False) -> Callable[..., Any]:
    """rank_zero(fn)(*args) -> fn(*args) on rank 0, None on the others, which do not wait.

    Also as a decorator: `@sm.rank_zero`, or `@sm.rank_zero(local=True)`. Before the processes have met, the rank is the one that
    torchrun or `launch` has set. A collective with other ranks inside fn would wait for ever: there is a warning, once for
    each line.

    Args:
        local: on one rank of each host, the one with LOCAL_RANK 0. Simulated ranks share one host.

    Raises: LaunchEnvironmentError when local is true and the launcher has not told which ranks share this host.
    Communication: none.

    >>> import shardmesh as sm
    >>> @sm.rank_zero
    ... def log(loss):
    ...     print(loss)
    >>> sm.simulate(4)(lambda: log(0.5))()
    [rank 0] 0.5
    [None, None, None, None]
    """
    if fn is None:
        return functools.partial(rank_zero, local=local)
    name = f"rank_zero({getattr(fn, '__qualname__', repr(fn))})"

    @functools.wraps(fn)
    def on_rank_zero(*args: Any, **kwargs: Any) -> Any:
        rank, peers = _me_among(local)
        if rank != peers[0]:
            return None
        with _region(current_world(), name, peers[1:]):
            return fn(*args, **kwargs)

    return on_rank_zero


@contextmanager
def main_process_first(local: bool = False) -> Iterator[None]:
    """with main_process_first(): rank 0 runs the block first, then all others do: it downloads, they find it done.

    What rank 0 raises, the others raise too, as `PeerError`, instead of running the block. However long rank 0 takes, it is no
    stall. A collective inside the block would wait for ever: there is a warning, once for each line.

    Args:
        local: on each host by itself, the rank with LOCAL_RANK 0 first. Simulated ranks share one host.

    Raises:
        PeerError: on the others, when the first rank raised.
        LaunchEnvironmentError: the processes have not met yet, or local is true and the launcher has not told which ranks share
            this host.
    Communication: all_gather_object, of a few bytes, over all ranks (of the host).

    >>> import shardmesh as sm
    >>> def fn():
    ...     with sm.main_process_first():
    ...         print("download")
    >>> sm.simulate(2)(fn)()
    [rank 0] download
    [rank 1] download
    [None, None]
    """
    rank, peers = _me_among(local)
    world = current_world()
    _check_met(world)
    group, place = world.group(peers), "{}:{}".format(*user_line())
    name = f"main_process_first() at {place}"
    if rank == peers[0]:
        with _telling(group, place), _paused(world), _region(world, name, peers[1:]):
            yield
    else:
        _wait_for_first(group)
        with _region(world, name, peers[:1]):
            yield


# ----------------------------------------------------------------------------------------------------- who waits for whom


def _me_among(local: bool) -> tuple[int, Sequence[int]]:
    """This rank, and the ranks among which the first one is meant: those of the job, or of this host."""
    world = current_world()
    rank, size = world.rank, world.size
    if not isinstance(world, ProcessWorld):
        return rank, range(size)
    if not (dist.is_available() and dist.is_initialized()):
        rank, size = launch_environment() or (0, 1)
    return rank, _of_this_host(rank) if local and size > 1 else range(size)


def _of_this_host(rank: int) -> range:
    """Launchers number the ranks of a host one after another."""
    found = [os.environ.get(name, "") for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE")]
    if not all(text.isdecimal() for text in found):
        raise errors.LaunchEnvironmentError(
            f"local=True, but LOCAL_RANK={found[0]!r} and LOCAL_WORLD_SIZE={found[1]!r} do not tell which ranks share this host. Start "
            "the program with torchrun, or set both in every process."
        )
    first = rank - int(found[0])
    return range(first, first + int(found[1]))


def _check_met(world: World) -> None:
    place = launch_environment() if isinstance(world, ProcessWorld) and world.size == 1 else None
    if place is not None and place[1] > 1:
        raise errors.LaunchEnvironmentError(
            f"main_process_first() before the {place[1]} processes of this job have met: nobody could wait for rank 0. Call "
            "init_device_mesh or torch.distributed.init_process_group first."
        )


def _wait_for_first(group: Group) -> None:
    raised: Verdict | None = group.all_gather_object(None)[0]
    if raised is not None:
        raise raised.error()


@contextmanager
def _telling(group: Group, place: str) -> Iterator[None]:
    """Lets the others go on, or tells them why not."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, errors.WatchError) and not isinstance(group.world, SimulatedWorld):  # which tells all by itself
            group.all_gather_object(_raised(group.ranks[0], place, error))
        raise
    group.all_gather_object(None)


def _raised(rank: int, place: str, error: Exception) -> Verdict:
    kind = type(error).__name__
    said = f"rank {rank} raised {kind} in main_process_first at {place}, so the others do not run it"
    lines = [f"{said}: {error}", *(f"  | {line}" for line in "".join(traceback.format_exception(error)).splitlines())]
    return Verdict("raised", (rank,), kind, (Seen(rank, "main_process_first", place),), "\n".join(lines))


def _paused(world: World) -> Any:
    watch = watch_of(world)
    return nullcontext() if watch is None else watch.paused()


# ------------------------------------------------------------------------------------------------------------- regions

_warned: set[tuple[str, int]] = set()


class _Region:
    """A part of the program that some ranks do not run, or not now."""

    def __init__(self, world: World, name: str, absent: Sequence[int]) -> None:
        self._world, self._name, self._absent = world, name, frozenset(absent)

    def observe(self, record: CollectiveRecord) -> None:
        """Warns of a collective with ranks that do not come to it."""
        absent = sorted(self._absent.intersection(record.ranks))
        if not absent or current_world() is not self._world:  # a world of its own inside: all of its ranks are here
            return
        call = user_call()
        if (call.file, call.line) not in _warned:
            _warned.add((call.file, call.line))
            warnings.warn_explicit(self._text(record, call.name, absent), UserWarning, call.file, call.line)

    def _text(self, record: CollectiveRecord, name: str, absent: Sequence[int]) -> str:
        by = "" if name == record.op else f" by {name}"
        return (
            f"{record.op} over {axes_of(self._world, record.ranks)}{by} inside {self._name}: {ranks_text(absent)} will not call it "
            f"while this rank is there, so it waits for ever. Do it before or after, on {ranks_text(record.ranks)} together."
        )


@contextmanager
def _region(world: World, name: str, absent: Sequence[int]) -> Iterator[None]:
    """Inside, collectives with ranks that are absent are warned of."""
    listener = _Region(world, name, absent).observe
    world.observers.append(listener)
    try:
        yield
    finally:
        world.observers.remove(listener)
