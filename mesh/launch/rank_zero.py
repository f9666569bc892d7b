"""rank_zero and main_process_first: run code on one rank, or on one rank before the others.

    rank_zero              rank 0   fn() .......... continues
                           rank 1   continues

    main_process_first     rank 0   block .. sync   continues
                           rank 1            sync   block ..  continues

A collective inside such a region, with a rank that is not in it, would hang. So a region observes
this rank's collectives and warns; outside of regions this costs nothing.
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
from ..comm.agreement import facts_of
from ..comm.call_site import user_call, user_line
from ..comm.current_world import current_world
from ..comm.group import CollectiveRecord, Group
from ..comm.world import World
from ..monitor.monitor import monitor_of
from ..monitor.verdict import Observation, Verdict
from ..processes.process import ProcessWorld
from ..simulated.simulate import SimulatedWorld
from ..text import ranks_text, whole_number
from .environment import complete_environment, launch_environment

Args = ParamSpec("Args")
T = TypeVar("T")


@overload
def rank_zero(fn: Callable[Args, T], *, local: bool = False) -> Callable[Args, T | None]: ...
@overload
def rank_zero(
    fn: None = None, *, local: bool = False
) -> Callable[[Callable[Args, T]], Callable[Args, T | None]]: ...
def rank_zero(fn: Callable[..., Any] | None = None, *, local: bool = False) -> Callable[..., Any]:
    """rank_zero(fn)(*args) -> fn(*args) on rank 0, None on the others, which do not wait.

    Also a decorator: `@rank_zero`, or `@rank_zero(local=True)`. Before the default process group is
    started, the rank is the one that torchrun or `launch` has set. A collective with other ranks
    inside fn would hang, so it causes a warning, once per line.

    Args:
        local: run on one rank of each host, the one with LOCAL_RANK 0. Simulated ranks share one
            host.

    Raises: LaunchEnvironmentError when local is true and the launcher has not set which ranks share
    this host.

    Communication: none.

    >>> import shardmesh as sm
    >>> @sm.training.rank_zero
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
        rank, peers = _rank_and_peers(local)
        if rank != peers[0]:
            return None
        with _region(current_world(), name, peers[1:]):
            return fn(*args, **kwargs)

    return on_rank_zero


@contextmanager
def main_process_first(local: bool = False) -> Iterator[None]:
    """with main_process_first(): run the block on rank 0, then on all other ranks.

    For example, rank 0 downloads, others use the cache.

    If rank 0 raises, the other ranks raise `PeerError` instead of running the block. However long
    rank 0 takes, it is not reported as a stall. A collective inside the block would hang, so it
    causes a warning, once per line.

    Args:
        local: on each host, run the rank with LOCAL_RANK 0 first. Simulated ranks share one host.

    Raises:
        PeerError: on the other ranks, when the first rank raised.
        LaunchEnvironmentError: the default process group is not started, or local is true and the
            launcher has not set which ranks share this host.

    Communication: all_gather_object, of a few bytes, over all ranks (of the host).

    >>> import shardmesh as sm
    >>> def fn():
    ...     with sm.training.main_process_first():
    ...         print("download")
    >>> sm.simulate(2)(fn)()
    [rank 0] download
    [rank 1] download
    [None, None]
    """
    rank, peers = _rank_and_peers(local)
    world = current_world()
    launched = launch_environment() if isinstance(world, ProcessWorld) and world.size == 1 else None
    if launched is not None and launched[1] > 1:
        raise errors.LaunchEnvironmentError(
            f"main_process_first() before the default process group of the {launched[1]} processes "
            "is started, so no rank could wait for rank 0. Call init_device_mesh or "
            "torch.distributed.init_process_group first."
        )
    group = world.group(peers)
    line = "{}:{}".format(*user_line())
    name = f"main_process_first() at {line}"
    if rank == peers[0]:
        with _sending_outcome(group, line), _pause_monitor(world), _region(world, name, peers[1:]):
            yield
    else:
        raised: Verdict | None = facts_of(group, peers[0])
        if raised is not None:
            raise raised.error()
        with _region(world, name, peers[:1]):
            yield


def _rank_and_peers(local: bool) -> tuple[int, Sequence[int]]:
    """Return this rank, and the ranks of the job or of this host."""
    world = current_world()
    rank, size = world.rank, world.size
    if not isinstance(world, ProcessWorld):
        return rank, range(size)
    if not (dist.is_available() and dist.is_initialized()):
        rank, size = launch_environment() or (0, 1)
    return rank, _ranks_of_this_host(rank) if local and size > 1 else range(size)


def _ranks_of_this_host(rank: int) -> range:
    """Return the ranks of this host, which launchers number consecutively."""
    env = complete_environment(os.environ)
    values = [env.get(name, "") for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE")]
    if None in map(whole_number, values):
        raise errors.LaunchEnvironmentError(
            f"local=True needs the ranks of this host, but LOCAL_RANK={values[0]!r} and "
            f"LOCAL_WORLD_SIZE={values[1]!r} are not both set. Start the program with torchrun, or "
            "set both in every process."
        )
    first = rank - int(values[0])
    return range(first, first + int(values[1]))


@contextmanager
def _sending_outcome(group: Group, line: str) -> Iterator[None]:
    """Send the other ranks None at the end of the block, or a verdict if it raises."""
    try:
        yield
    except Exception as error:
        # Both worlds report these errors to all ranks themselves.
        if not isinstance(error, errors.WatchError) and not isinstance(group.world, SimulatedWorld):
            facts_of(group, group.ranks[0], _verdict(group.ranks[0], line, error))
        raise
    facts_of(group, group.ranks[0])


def _verdict(rank: int, line: str, error: Exception) -> Verdict:
    kind = type(error).__name__
    summary = (
        f"rank {rank} raised {kind} in main_process_first at {line}, so the other ranks do not run "
        f"the block: {error}"
    )
    lines = [
        summary,
        *(f"  | {text}" for text in "".join(traceback.format_exception(error)).splitlines()),
    ]
    return Verdict(
        "raised", (rank,), kind, (Observation(rank, "main_process_first", line),), "\n".join(lines)
    )


def _pause_monitor(world: World) -> Any:
    monitor = monitor_of(world)
    return nullcontext() if monitor is None else monitor.paused()


# -- regions ---------------------------------------------------------------------------------------

_warned: set[tuple[str, int]] = set()


class _Region:
    """A block that some ranks do not run, or run later; observes the collectives inside."""

    def __init__(self, world: World, name: str, absent: Sequence[int]) -> None:
        self._world, self._name, self._absent = world, name, frozenset(absent)

    def observe(self, record: CollectiveRecord) -> None:
        """Warn of a collective with ranks that are not in the region."""
        absent = sorted(self._absent.intersection(record.ranks))
        # in another world, inside the region, no rank is absent
        if not absent or current_world() is not self._world:
            return
        call = user_call()
        if (call.file, call.line) not in _warned:
            _warned.add((call.file, call.line))
            warnings.warn_explicit(
                self._text(record, call.name, absent), UserWarning, call.file, call.line
            )

    def _text(self, record: CollectiveRecord, name: str, absent: Sequence[int]) -> str:
        by = "" if name == record.op else f" by {name}"
        return (
            f"{record.op} over {self._world.axes_of(record.ranks)}{by} inside {self._name}: "
            f"{ranks_text(absent)} will not call it while this rank is in the block, so it hangs. "
            f"Call it before or after the block, on {ranks_text(record.ranks)} together."
        )


@contextmanager
def _region(world: World, name: str, absent: Sequence[int]) -> Iterator[None]:
    """Warn of collectives with absent ranks, inside the block."""
    listener = _Region(world, name, absent).observe
    world.observers.append(listener)
    try:
        yield
    finally:
        world.observers.remove(listener)
