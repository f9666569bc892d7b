"""The one interface through which ranks talk: collectives on flat buffers, and the world that hands out groups.

Three worlds implement it: processes (`process.py`), threads of one process (`simulate.py`), and none at all, which only
counts (`null.py`). What every collective has in common is here: the checks, the observers, the dtypes.
"""

from __future__ import annotations

import pickle
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from threading import get_ident
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import errors
from ..monitor.recording.buffer_check import Guarded
from ..monitor.recording.recorder import Note, Recorder, route_of
from ..monitor.recording.thread_check import check_left
from ..monitor.recording.trace_buffer import TraceBuffer
from ..monitor.settings import settings
from . import dtype_encoding
from .transforms import is_transformed, outside_of_transforms
from .work import DONE, Work, and_then

if TYPE_CHECKING:
    from ..monitor.monitor import Monitor

REDUCTIONS = frozenset({"sum", "max", "min", "product"})
_settings = settings()


@dataclass(frozen=True, slots=True)
class CollectiveRecord:
    """What one collective moves, seen from one rank.

    Attributes:
        op: name of the `Group` method.
        ranks: global ranks of the group.
        bytes_sent: bytes that leave this rank.
        bytes_received: bytes that arrive here: (n-1) parts for all_gather and reduce_scatter, 2(n-1)/n of the buffer
            for all_reduce (a reduce_scatter and an all_gather), what really comes from others for all_to_all and
            permute, the buffer for a broadcast on all ranks but the source.
        dtype: dtype of the caller's buffer.
    """

    op: str
    ranks: tuple[int, ...]
    bytes_sent: int
    bytes_received: int
    dtype: torch.dtype


Observer = Callable[[CollectiveRecord], "Callable[[], None] | None"]


# The seat and the number of the record in the ledger, and what observers want to be told when it is over.
_Begun = tuple[Recorder | None, int, "Callable[[], None] | None"]


class Group(ABC):
    """Some ranks of a world that exchange data, seen from one of them.

    Buffers are contiguous tensors of any shape and dtype, read and written flat, in the order of `ranks`. A call
    returns when its result may be used (on CUDA: by the current stream); with `async_op=True` it returns at once a
    `Work` whose `wait()` does that, and the buffers are left alone until then. Each call is noted down in the ledger and
    compared with the other ranks' (`monitor/recording/recorder.py`); observers hear of it. In simulated and null worlds the work is done
    when the call returns. A group of one rank moves and records nothing.

    Attributes:
        ranks: global ranks, ascending.
        rank: my index within `ranks`.
        size: number of ranks.
        world: the world that the group belongs to.
        shared: memory that the ranks share, by device type, see `symmetric.peers_of`.
        recorder: where this rank's collectives on the group are noted down; None before the first one.
        agreed: what its ranks have found out together and need not ask again, by whatever a caller knows it by; the same on all of them.
    """

    __slots__ = ("_observers", "agreed", "rank", "ranks", "recorder", "shared", "size", "world")

    def __init__(self, world: World, ranks: tuple[int, ...]) -> None:
        self.world = world
        self.ranks = ranks
        self.rank = ranks.index(world.rank)
        self.size = len(ranks)
        self._observers = world.observers
        self.shared: dict[str, Any] = {}
        self.recorder: Recorder | None = None
        self.agreed: dict[Any, Any] = {}

    def __repr__(self) -> str:
        return f"{type(self).__name__}(ranks={self.ranks}, rank={self.rank})"

    def all_gather(self, out: Tensor, x: Tensor, async_op: bool = False) -> Work | None:
        """all_gather(x: S) -> R: every rank receives every rank's x, in group order.

            rank 0   x = [a]        out = [a b]
            rank 1   x = [b]   ->   out = [a b]

        Communication: all_gather, (n-1) * x.nbytes in and out of each rank.
        Raises: CollectiveError when out.numel() != size * x.numel(), dtypes differ or a buffer is not contiguous.
        """
        if out.numel() != self.size * x.numel():
            raise _wrong_sizes("all_gather", self, "out.numel() == size * x.numel()", out, x)
        _check_pair("all_gather", out, x)
        if self.size == 1:
            _copy(out, x)
            return DONE if async_op else None
        moved = (self.size - 1) * x.nbytes
        begun = self._begin("all_gather", "", x.dtype, x.numel(), moved, moved)
        return _ended(self._all_gather(out, x, async_op), begun, x)

    def reduce_scatter(self, out: Tensor, x: Tensor, op: str = "sum", async_op: bool = False) -> Work | None:
        """reduce_scatter(x: U) -> S: part i of the reduced x goes to rank i.

            rank 0   x = [a b]        out = [a+c]
            rank 1   x = [c d]   ->   out = [b+d]

        Communication: reduce_scatter, (n-1) * out.nbytes in and out of each rank.
        Raises: CollectiveError when x.numel() != size * out.numel(), dtypes differ, a buffer is not contiguous, or the
            reduction is not one of "sum", "max", "min", "product" or has no meaning for the dtype.
        """
        if x.numel() != self.size * out.numel():
            raise _wrong_sizes("reduce_scatter", self, "x.numel() == size * out.numel()", out, x)
        _check_pair("reduce_scatter", out, x)
        _check_reduction(op, x.dtype)
        if self.size == 1:
            _copy(out, x)
            return DONE if async_op else None
        moved = (self.size - 1) * out.nbytes
        begun = self._begin("reduce_scatter", op, x.dtype, x.numel(), moved, moved)
        reduce_scatter = self._reduce_scatter if x.dtype in dtype_encoding.NATIVE else self._reduce_scatter_encoded
        return _ended(reduce_scatter(out, x, op, async_op), begun, x)

    def all_reduce(self, x: Tensor, op: str = "sum", async_op: bool = False) -> Work | None:
        """all_reduce(x: U) -> R: x becomes the reduction of every rank's x, in place.

            rank 0   x = [a b]        x = [a+c b+d]
            rank 1   x = [c d]   ->   x = [a+c b+d]

        Communication: all_reduce, 2(n-1)/n * x.nbytes in and out of each rank.
        Raises: CollectiveError when x is not contiguous, or the reduction is unknown or has no meaning for the dtype.
        """
        _check_contiguous("all_reduce", x)
        _check_reduction(op, x.dtype)
        if self.size == 1:
            return DONE if async_op else None
        moved = 2 * (self.size - 1) * x.nbytes // self.size
        begun = self._begin("all_reduce", op, x.dtype, x.numel(), moved, moved)
        all_reduce = self._all_reduce if x.dtype in dtype_encoding.NATIVE else self._all_reduce_encoded
        return _ended(all_reduce(x, op, async_op), begun, x, in_place=True)

    def all_to_all(
        self,
        out: Tensor,
        x: Tensor,
        out_splits: Sequence[int] | None = None,
        in_splits: Sequence[int] | None = None,
        async_op: bool = False,
    ) -> Work | None:
        """all_to_all(x: S) -> S': part i of x goes to rank i; what rank i sends here becomes part i of out.

            rank 0   x = [a|b]        out = [a|c]
            rank 1   x = [c|d]   ->   out = [b|d]

        Args:
            out_splits: elements that come from each rank; may be uneven and zero.
            in_splits: elements that go to each rank. Without both, parts are equal, on every rank: that is told backends
                apart, since reading lists takes them longer than all else.

        Communication: all_to_all, exactly the bytes that leave for and arrive from other ranks.
        Raises: CollectiveError when the splits do not have one entry per rank or do not add up to the buffers.
        """
        even = x.numel() // self.size
        if in_splits is not None and out_splits is not None:
            _check_splits(self, out, x, out_splits, in_splits)
        elif in_splits is not out_splits or out.numel() != x.numel() or even * self.size != x.numel():
            raise _wrong_sizes("all_to_all without splits", self, "out and x of size * n elements", out, x)
        _check_pair("all_to_all", out, x)
        if self.size == 1:
            _copy(out, x)
            return DONE if async_op else None
        sent = (x.numel() - (even if in_splits is None else in_splits[self.rank])) * x.element_size()
        received = (out.numel() - (even if out_splits is None else out_splits[self.rank])) * out.element_size()
        begun = self._begin("all_to_all", "", x.dtype, -1, sent, received)
        if in_splits is not None and begun is not None and begun[0] is not None:
            begun[0].show_splits(begun[1], in_splits, out_splits or ())
        return _ended(self._all_to_all(out, x, out_splits, in_splits, async_op), begun, x)

    def broadcast(self, x: Tensor, src: int, async_op: bool = False) -> Work | None:
        """broadcast(x) -> R: x becomes the x of the rank with index src in the group, in place.

            rank 0   x = [a]        x = [a]
            rank 1   x = [b]   ->   x = [a]      (src=0)

        Communication: broadcast, x.nbytes into each rank but the source, (n-1) * x.nbytes out of the source.
        Raises: CollectiveError when x is not contiguous or src is not an index of the group.
        """
        _check_contiguous("broadcast", x)
        if not 0 <= src < self.size:
            raise errors.CollectiveError(
                f"broadcast from src={src}: src is an index in the group {self.ranks}, from 0 to {self.size - 1}."
            )
        if self.size == 1:
            return DONE if async_op else None
        sent, received = ((self.size - 1) * x.nbytes, 0) if self.rank == src else (0, x.nbytes)
        begun = self._begin("broadcast", f"src={src}", x.dtype, x.numel(), sent, received)
        return _ended(self._broadcast(x, src, async_op), begun, x, in_place=True)

    def permute(
        self, out: Tensor, x: Tensor, *, dst: int | None, src: int | None, async_op: bool = False
    ) -> Work | None:
        """permute(x: S) -> S: x goes to the rank dst, and what the rank src sends here arrives in out.

            rank 0   x = [a]   dst=1, src=None        out untouched
            rank 1   x = [b]   dst=2, src=0      ->   out = [a]
            rank 2   x = [c]   dst=None, src=1        out = [b]

        Every rank of the group calls it, also one that neither sends nor receives. Sizes may differ from rank to rank,
        but not between a sender and its receiver; out must not overlap x.

        Args:
            dst: index in the group of the rank that gets x; None to send nothing.
            src: index in the group of the rank that sends to me; None to receive nothing and leave out as it is.
                Where both are this rank, x is copied to out.

        Communication: point to point, x.nbytes out if there is a dst, out.nbytes in if there is a src.
        Raises: CollectiveError when dst or src is not an index of the group, one of them is this rank and the other is
            not, dtypes differ or a buffer is not contiguous.
        """
        _check_pair("permute", out, x)
        if dst == self.rank or src == self.rank:
            _check_own(self, out, x, dst, src)
            _copy(out, x)
            dst = src = None
        elif not _are_places(self.size, dst, src):
            raise _wrong_places(self, dst, src)
        if self.size == 1:
            return DONE if async_op else None
        sent, received = 0 if dst is None else x.nbytes, 0 if src is None else out.nbytes
        begun = self._begin("permute", "", x.dtype, -1, sent, received, route_of(dst, src))
        return _ended(self._permute(out, x, dst, src, async_op), begun, x)

    def close(self, why: str) -> None:
        """From now on every collective of more than one rank raises MeshError(why)."""

        def refuse(_: CollectiveRecord) -> None:
            raise errors.MeshError(why)

        self._observers = [refuse]  # which are asked first

    def barrier(self) -> None:
        """Returns when every rank of the group has called it. Communication: one launch, counted as no bytes."""
        if self.size == 1:
            return
        begun = self._begin("barrier", "", torch.uint8, 0, 0, 0)
        self._barrier()
        _ended(None, begun)

    def all_gather_object(self, obj: Any) -> list[Any]:
        """Every rank's object, in group order, each a copy made by pickle. For small things.

        Communication: counted as an all_gather of the pickled bytes of this rank's object.
        """
        data = pickle.dumps(obj)
        moved = (self.size - 1) * len(data)
        if self.size == 1:
            return [pickle.loads(data)]
        begun = self._begin("all_gather_object", "", torch.uint8, -1, moved, moved)
        with outside_of_transforms():
            gathered = self._all_gather_bytes(data)
        _ended(None, begun)
        return [pickle.loads(d) for d in gathered]

    def direct(self, op: str, sent: int, received: int, dtype: torch.dtype, run: Callable[[], None]) -> None:
        """A collective that `run` does by itself, without the backend: it is observed like any other.

        Communication: what the arguments say, as in `CollectiveRecord`.
        """
        begun = self._begin(op, "", dtype, -1, sent, received)
        run()
        _ended(None, begun)

    def _begin(self, op: str, how: str, dtype: torch.dtype, size: int, sent: int, received: int, route: int = 0) -> _Begun | None:
        """Notes a collective down and tells the observers, before it moves anything; what `_ended` needs.

        Raises: WatchError when the job has failed, or another rank called something else; what an observer raises.
        """
        over = self._notify(op, sent, received, dtype) if self._observers else None
        if _settings.mode == "off":
            return None if over is None else (None, 0, over)
        recorder = self.recorder
        if recorder is None:
            recorder = self.recorder = self._add_recorder()
        thread = get_ident()
        if recorder.caller and recorder.caller != thread:
            check_left(self, recorder.caller, op, _CALLS)
        recorder.caller = thread
        return recorder, recorder.enter(op, how, dtype, size, sent, received, route), over

    def _add_recorder(self) -> Recorder:
        watch = self.world.monitor
        return Recorder(self, self.world.trace_buffer, None) if watch is None else watch.add_recorder(self)

    def _notify(self, op: str, sent: int, received: int, dtype: torch.dtype) -> Callable[[], None] | None:
        """Tells the observers; what they want to be told when it is over."""
        record = CollectiveRecord(op, self.ranks, sent, received, dtype)
        over = [called for observer in tuple(self._observers) if (called := observer(record)) is not None]
        return partial(_call_each, over) if over else None

    def _all_reduce_encoded(self, x: Tensor, op: str, async_op: bool) -> Work | None:
        if x.is_complex() and op == "product":
            return self._product(x, lambda product: _write(x, product), async_op)
        y, native_op = dtype_encoding.encode(x, op)
        return and_then(self._all_reduce(y, native_op, async_op), lambda: dtype_encoding.decode(y, x, op))

    def _reduce_scatter_encoded(self, out: Tensor, x: Tensor, op: str, async_op: bool) -> Work | None:
        if x.is_complex() and op == "product":
            mine = slice(self.rank * out.numel(), (self.rank + 1) * out.numel())
            return self._product(x, lambda product: _write(out, product[mine]), async_op)
        y, native_op = dtype_encoding.encode(x, op)
        part = y.new_empty(y.numel() // self.size)
        return and_then(self._reduce_scatter(part, y, native_op, async_op), lambda: dtype_encoding.decode(part, out, op))

    def _product(self, x: Tensor, use: Callable[[Tensor], None], async_op: bool) -> Work | None:
        """Uses the flat product of every rank's x, gathered first: no backend multiplies complex numbers."""
        everyone = x.detach().new_empty(self.size, x.numel())
        work = self._all_gather(everyone, x, async_op)
        return and_then(work, lambda: use(reduce(torch.mul, everyone)))

    # What a world provides. Buffers are checked; size > 1; the dtypes of reductions are native. A Work comes back exactly
    # when async_op is true.

    @abstractmethod
    def _all_gather(self, out: Tensor, x: Tensor, async_op: bool) -> Work | None: ...

    @abstractmethod
    def _reduce_scatter(self, out: Tensor, x: Tensor, op: str, async_op: bool) -> Work | None: ...

    @abstractmethod
    def _all_reduce(self, x: Tensor, op: str, async_op: bool) -> Work | None: ...

    @abstractmethod
    def _all_to_all(
        self, out: Tensor, x: Tensor, out_splits: Sequence[int] | None, in_splits: Sequence[int] | None, async_op: bool
    ) -> Work | None:
        """Splits are None on every rank, where parts are equal, or on none."""

    @abstractmethod
    def _broadcast(self, x: Tensor, src: int, async_op: bool) -> Work | None: ...

    @abstractmethod
    def _permute(self, out: Tensor, x: Tensor, dst: int | None, src: int | None, async_op: bool) -> Work | None:
        """Here dst and src are not this rank."""

    @abstractmethod
    def _barrier(self) -> None: ...

    @abstractmethod
    def _all_gather_bytes(self, data: bytes) -> list[bytes]: ...


class Carried(threading.local):
    """What the collectives that this thread calls belong to, as their callers know.

    Attributes:
        note: what is moved, from which layout to which; None where nobody says.
        lineage: how the value was made, see `sharding/ops/lineage.py`; 0 where nobody says.
        roots: how many values have entered the program in this thread, by what they are known.
    """

    note: Note | None = None
    lineage: int = 0

    def __init__(self) -> None:
        self.roots: dict[Any, Any] = {}


_CALLS = frozenset(
    method.__code__
    for method in (
        Group.all_gather, Group.reduce_scatter, Group.all_reduce, Group.all_to_all, Group.broadcast, Group.permute, Group.barrier,
        Group.all_gather_object, Group.direct,
    )
)  # fmt: skip


class World(ABC):
    """One rank's handle on where ranks run.

    Attributes:
        rank: global rank of the caller.
        size: number of ranks.
        observers: called with a `CollectiveRecord` before each collective of this rank; may raise to prevent it, or return
            a function to call when it is over.
        meshes: the meshes of this world, so that the same mesh is the same object.
        trace_buffer: this rank's part of the ledger.
        monitor: what looks after the ranks; None in simulated and null worlds, and for a process alone.
        epoch: how many sessions have ended in this world: groups of the same ranks made before and after are others.
        carried: what the next collectives of this thread belong to.
    """

    def __init__(self, rank: int, size: int, observers: list[Observer] | None = None) -> None:
        self.rank = rank
        self.size = size
        self.observers: list[Observer] = [] if observers is None else observers
        self.meshes: dict[Any, Any] = {}
        self.monitor: Monitor | None = None
        self.carried = Carried()
        self.epoch = 0
        self._trace_buffer: TraceBuffer | None = None
        self._groups: dict[tuple[int, ...], Group] = {}

    @property
    def trace_buffer(self) -> TraceBuffer:
        if self.monitor is not None:
            return self.monitor.buffer
        if self._trace_buffer is None:
            self._trace_buffer = TraceBuffer.private(self.rank, self.size)
        return self._trace_buffer

    def axes_of(self, ranks: tuple[int, ...]) -> str:
        """Return the mesh axes that a group of ranks runs over, "dp" or "dp,tp"; the ranks where they are not axes of a mesh."""
        for mesh in self.meshes.values():
            axes = mesh.axes_over(ranks)
            if axes is not None:
                return ",".join(axes)
        return f"ranks {','.join(map(str, ranks))}"

    def retire_monitor(self) -> None:
        """The ranks go on without a watch; the ledger goes on where it is."""
        self._trace_buffer, self.monitor = self.trace_buffer, None

    def __repr__(self) -> str:
        return f"{type(self).__name__}(rank={self.rank}, size={self.size})"

    def group(self, ranks: Sequence[int]) -> Group:
        """The group of these global ranks, in whatever order they are given; the same object for the same ranks.

        Raises: MeshError when a rank appears twice or does not exist, or this rank is not among them.
        Communication: none (a process group is made by its first collective).
        """
        key = tuple(ranks)
        found = self._groups.get(key)
        if found is None:
            ordered = self._checked(key)
            found = self._groups.get(ordered) or self._make_group(ordered)
            self._groups[key] = self._groups[ordered] = found
        return found

    def _checked(self, ranks: tuple[int, ...]) -> tuple[int, ...]:
        ordered = tuple(sorted(int(r) for r in ranks))
        if len(set(ordered)) != len(ordered):
            raise errors.repeated_ranks(ordered)
        if not ordered or ordered[0] < 0 or ordered[-1] >= self.size:
            raise errors.ranks_outside_world([r for r in ordered if not 0 <= r < self.size], self.size)
        if self.rank not in ordered:
            raise errors.not_a_member(self.rank, ordered)
        return ordered

    @abstractmethod
    def _make_group(self, ranks: tuple[int, ...]) -> Group: ...


_active = threading.local()


def active_world() -> World | None:
    """The simulated or null world that this thread runs in, if any."""
    return getattr(_active, "world", None)


def activate(world: World | None) -> World | None:
    """Makes `world` the one that this thread runs in and returns the one before."""
    before = active_world()
    _active.world = world
    return before


def current_world() -> World:
    """The world this thread runs in: the simulated or null one if one is active, else that of the processes.

    Communication: none; it starts nothing (see `init_device_mesh`).
    """
    world = active_world()
    if world is not None:
        return world
    from .process import process_world  # here because process.py builds on this file

    return process_world()


def _ended(work: Work | None, begun: _Begun | None, x: Tensor | None = None, in_place: bool = False) -> Work | None:
    """The end of what `_begin` began: now, or when the work is done. Until then nobody may write to the buffer x."""
    if begun is None:
        return work
    recorder = begun[0]
    if recorder is not None:
        recorder.caller = 0
        if work is not None and x is not None:
            return Guarded(work, x, in_place, recorder, begun[1], partial(_end, begun))
    if work is not None and work is not DONE:
        return and_then(work, partial(_end, begun))
    _end(begun)
    return work


def _end(begun: _Begun) -> None:
    recorder, number, over = begun
    if recorder is not None:
        recorder.leave(number)
    if over is not None:
        over()


def _call_each(functions: Sequence[Callable[[], None]]) -> None:
    for function in functions:
        function()


def _copy(out: Tensor, x: Tensor) -> None:
    if out.data_ptr() != x.data_ptr():
        _write(out, x)


def _write(out: Tensor, x: Tensor) -> None:
    out.detach().view(-1).copy_(x.detach().reshape(-1))


def _check_pair(op: str, out: Tensor, x: Tensor) -> None:
    if out.dtype != x.dtype or out.device != x.device:
        raise errors.CollectiveError(
            f"{op}: out is {out.dtype} on {out.device} but x is {x.dtype} on {x.device}: make both alike."
        )
    _check_contiguous(op, x)
    _check_contiguous(op, out)


def _check_contiguous(op: str, x: Tensor) -> None:
    if is_transformed(x):
        raise errors.CollectiveError(
            f"{op} of a tensor inside a transform (sm.vmap, sm.jvp, sm.grad, torch.func), and what calls it has no rule for that: take it "
            "out of the transform, or write it with the collectives of shard_map (psum, all_gather, ...), which have one."
        )
    if not x.is_contiguous():
        raise errors.CollectiveError(
            f"{op}: a buffer of shape {tuple(x.shape)} has strides {x.stride()}: pass it .contiguous()."
        )


def _check_reduction(op: str, dtype: torch.dtype) -> None:
    if op not in REDUCTIONS:
        raise errors.wrong_reduction(op, REDUCTIONS)
    if dtype.is_complex and op in ("max", "min"):
        raise errors.CollectiveError(f"{op} of {dtype}: complex numbers have no order; reduce x.abs().")


def _are_places(size: int, *places: int | None) -> bool:
    return all(place is None or 0 <= place < size for place in places)


def _check_own(group: Group, out: Tensor, x: Tensor, dst: int | None, src: int | None) -> None:
    if dst != src:
        raise _wrong_places(group, dst, src)
    if out.numel() != x.numel():
        raise _wrong_sizes("permute", group, "out.numel() == x.numel() where a rank sends to itself", out, x)


def _wrong_places(group: Group, dst: int | None, src: int | None) -> errors.CollectiveError:
    return errors.CollectiveError(
        f"permute with dst={dst}, src={src} on rank {group.rank} of the group {group.ranks}: both are indices in the "
        f"group from 0 to {group.size - 1}, or None, and either both or none of them is this rank."
    )


def _wrong_sizes(op: str, group: Group, rule: str, out: Tensor, x: Tensor) -> errors.CollectiveError:
    return errors.CollectiveError(
        f"{op} over {group.size} ranks needs {rule}, but out has shape {tuple(out.shape)} ({out.numel()} elements) "
        f"and x has shape {tuple(x.shape)} ({x.numel()} elements)."
    )


def _check_splits(group: Group, out: Tensor, x: Tensor, out_splits: Sequence[int], in_splits: Sequence[int]) -> None:
    if len(out_splits) != group.size or len(in_splits) != group.size:
        raise _wrong_splits(group, "one entry per rank", out, x, out_splits, in_splits)
    if sum(out_splits) != out.numel() or sum(in_splits) != x.numel():
        raise _wrong_splits(group, "splits that add up to the buffers", out, x, out_splits, in_splits)


def _wrong_splits(
    group: Group, rule: str, out: Tensor, x: Tensor, out_splits: Sequence[int], in_splits: Sequence[int]
) -> errors.CollectiveError:
    return errors.CollectiveError(
        f"all_to_all over {group.size} ranks needs {rule}, but out_splits={list(out_splits)} for an out of "
        f"{out.numel()} elements and in_splits={list(in_splits)} for an x of {x.numel()} elements."
    )
