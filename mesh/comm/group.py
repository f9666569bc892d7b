"""Group: the collectives of shardmesh, on flat buffers.

Three worlds implement it: processes (`process.py`), threads of one process
(`simulated/simulate.py`), and `null_world`, which only counts bytes (`null.py`). This file has the
common parts: check the arguments, notify observers, record the call, and reduce dtypes that
backends lack.
"""

from __future__ import annotations

import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from threading import get_ident
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .. import errors
from ..settings import settings
from . import dtype_encoding
from .checks import (
    check_contiguous,
    check_pair,
    check_reduction,
    check_send_to_self,
    check_splits,
    wrong_indices,
    wrong_sizes,
)
from .dispatch_modes import outside_of_program_modes
from .recording.buffer_check import Guarded
from .recording.recorder import CommTag, RecordedGroup, Recorder, route_of
from .recording.thread_check import check_left
from .thread_context import thread_context
from .transforms import outside_of_transforms
from .work import DONE, Work, and_then

if TYPE_CHECKING:
    from .world import World

_settings = settings()


@dataclass(frozen=True, slots=True)
class CollectiveRecord:
    """How much one collective sends and receives on this rank.

    Attributes:
        op: name of the `Group` method.
        ranks: global ranks of the group.
        bytes_sent: bytes sent to other ranks.
        bytes_received: bytes received from other ranks: (n-1) parts for all_gather and
            reduce_scatter, 2(n-1)/n of the buffer for all_reduce (a reduce_scatter and an
            all_gather), the actual bytes for all_to_all and permute, the buffer for a broadcast on
            all ranks but the source.
        dtype: dtype of the caller's buffer.
    """

    op: str
    ranks: tuple[int, ...]
    bytes_sent: int
    bytes_received: int
    dtype: torch.dtype


Observer = Callable[[CollectiveRecord], "Callable[[], None] | None"]


# (recorder, number of the record, what the observers have returned for the completion)
_Begun = tuple[Recorder | None, int, "Callable[[], None] | None"]


class Group(RecordedGroup, ABC):
    """The collectives among some ranks of a world, on one of these ranks.

    Buffers are contiguous tensors of any shape and dtype, read and written flat, in the order of
    `ranks`. A call returns when its result may be used (on CUDA: by the current stream); with
    `async_op=True` it returns at once a `Work` whose `wait()` does that, and the buffers must not
    be touched until then. Each call is recorded in the ledger, compared with the other ranks' calls
    (`comm/recording/recorder.py`) and passed to observers. A `tag=` says what the call is for,
    in records and messages, and must be the same on all ranks. In simulated and null worlds the
    work is done when the call returns. A group of one rank moves and records nothing.

    Attributes:
        ranks: global ranks, ascending.
        rank: index of this rank in `ranks`.
        size: number of ranks.
        world: the world that the group belongs to.
        shared: memory that the ranks share, by device type, see `symmetric_memory.peers_of`; and
            the stream of what reads it.
        recorder: records this rank's collectives on the group; None before the first one.
        agreed: facts that the ranks have exchanged and need not exchange again, the same on all of
            them; each caller has its own keys.
    """

    __slots__ = ("_observers", "agreed", "recorder", "shared", "world")

    def __init__(self, world: World, ranks: tuple[int, ...]) -> None:
        super().__init__(ranks, world.rank, world.comm_context)
        self.world = world
        self._observers = world.observers
        self.shared: dict[str, Any] = {}
        self.recorder: Recorder | None = None
        self.agreed: dict[Any, Any] = {}

    def __repr__(self) -> str:
        return f"{type(self).__name__}(ranks={self.ranks}, rank={self.rank})"

    def identity(self) -> str:
        return f"{self.ranks} {self.world.epoch}"

    def description(self) -> str:
        return self.world.axes_of(self.ranks)

    def all_gather(
        self, out: Tensor, x: Tensor, async_op: bool = False, *, tag: CommTag | None = None
    ) -> Work | None:
        """all_gather(x: S) -> R: every rank receives every rank's x, in group order.

            rank 0   x = [a]        out = [a b]
            rank 1   x = [b]   ->   out = [a b]

        Communication: all_gather, (n-1) * x.nbytes in and out of each rank.

        Raises: CollectiveError when out.numel() != size * x.numel(), dtypes differ or a buffer is
        not contiguous.
        """
        if thread_context.recorder is not None:
            return thread_context.recorder.collective(self, "all_gather", out, x, async_op, tag=tag)
        if out.numel() != self.size * x.numel():
            raise wrong_sizes("all_gather", self, "out.numel() == size * x.numel()", out, x)
        check_pair("all_gather", out, x)
        if self.size == 1:
            _copy(out, x)
            return DONE if async_op else None
        moved = (self.size - 1) * x.nbytes
        begun = self._begin("all_gather", "", x.dtype, x.numel(), moved, moved, tag)
        return _end_after(self._all_gather(out, x, async_op), begun, x)

    def reduce_scatter(
        self,
        out: Tensor,
        x: Tensor,
        op: str = "sum",
        async_op: bool = False,
        *,
        tag: CommTag | None = None,
    ) -> Work | None:
        """reduce_scatter(x: U) -> S: part i of the reduced x goes to rank i.

            rank 0   x = [a b]        out = [a+c]
            rank 1   x = [c d]   ->   out = [b+d]

        Communication: reduce_scatter, (n-1) * out.nbytes in and out of each rank.

        Raises: CollectiveError when x.numel() != size * out.numel(), dtypes differ, a buffer is not
        contiguous, or as `all_reduce`.
        """
        if thread_context.recorder is not None:
            return thread_context.recorder.collective(
                self, "reduce_scatter", out, x, op, async_op, tag=tag
            )
        if x.numel() != self.size * out.numel():
            raise wrong_sizes("reduce_scatter", self, "x.numel() == size * out.numel()", out, x)
        check_pair("reduce_scatter", out, x)
        check_reduction(op, x.dtype)
        if self.size == 1:
            _copy(out, x)
            return DONE if async_op else None
        moved = (self.size - 1) * out.nbytes
        begun = self._begin("reduce_scatter", op, x.dtype, x.numel(), moved, moved, tag)
        reduce_scatter = (
            self._reduce_scatter
            if x.dtype in dtype_encoding.NATIVE
            else self._reduce_scatter_encoded
        )
        return _end_after(reduce_scatter(out, x, op, async_op), begun, x)

    def all_reduce(
        self, x: Tensor, op: str = "sum", async_op: bool = False, *, tag: CommTag | None = None
    ) -> Work | None:
        """all_reduce(x: U) -> R: x becomes the reduction of every rank's x, in place.

            rank 0   x = [a b]        x = [a+c b+d]
            rank 1   x = [c d]   ->   x = [a+c b+d]

        Communication: all_reduce, 2(n-1)/n * x.nbytes in and out of each rank.

        Raises: CollectiveError when x is not contiguous, or the reduction is not sum, max, min or
        product, or is unknown for the dtype.
        """
        if thread_context.recorder is not None:
            return thread_context.recorder.collective(self, "all_reduce", x, op, async_op, tag=tag)
        check_contiguous("all_reduce", x)
        check_reduction(op, x.dtype)
        if self.size == 1:
            return DONE if async_op else None
        moved = 2 * (self.size - 1) * x.nbytes // self.size
        begun = self._begin("all_reduce", op, x.dtype, x.numel(), moved, moved, tag)
        all_reduce = (
            self._all_reduce if x.dtype in dtype_encoding.NATIVE else self._all_reduce_encoded
        )
        return _end_after(all_reduce(x, op, async_op), begun, x, in_place=True)

    def all_to_all(
        self,
        out: Tensor,
        x: Tensor,
        out_splits: Sequence[int] | None = None,
        in_splits: Sequence[int] | None = None,
        async_op: bool = False,
        *,
        tag: CommTag | None = None,
    ) -> Work | None:
        """all_to_all(x: S) -> S': part i of x goes to rank i; part i of out comes from rank i.

            rank 0   x = [a|b]        out = [a|c]
            rank 1   x = [c|d]   ->   out = [b|d]

        Args:
            out_splits: elements that come from each rank; may be uneven and zero.
            in_splits: elements that go to each rank. Give both or neither, alike on every rank;
                with neither all parts have the same size, which is faster, since backends take long
                to read lists. They are compared with those of the other ranks where there is no
                tag, which would describe them.

        Communication: all_to_all, exactly the bytes that leave for and arrive from other ranks.

        Raises: CollectiveError when the splits do not have one entry per rank or do not add up to
        the buffers.
        """
        if thread_context.recorder is not None:
            return thread_context.recorder.collective(
                self, "all_to_all", out, x, out_splits, in_splits, async_op, tag=tag
            )
        even = x.numel() // self.size
        if in_splits is not None and out_splits is not None:
            check_splits(self, out, x, out_splits, in_splits)
        elif (
            in_splits is not out_splits or out.numel() != x.numel() or even * self.size != x.numel()
        ):
            raise wrong_sizes(
                "all_to_all without splits", self, "out and x of size * n elements", out, x
            )
        check_pair("all_to_all", out, x)
        if self.size == 1:
            _copy(out, x)
            return DONE if async_op else None
        sent = (
            x.numel() - (even if in_splits is None else in_splits[self.rank])
        ) * x.element_size()
        received = (
            out.numel() - (even if out_splits is None else out_splits[self.rank])
        ) * out.element_size()
        begun = self._begin("all_to_all", "", x.dtype, -1, sent, received, tag)
        if tag is None and in_splits is not None and begun is not None and begun[0] is not None:
            begun[0].show_splits(begun[1], in_splits, out_splits or ())
        return _end_after(self._all_to_all(out, x, out_splits, in_splits, async_op), begun, x)

    def broadcast(
        self, x: Tensor, src: int, async_op: bool = False, *, tag: CommTag | None = None
    ) -> Work | None:
        """broadcast(x) -> R: x becomes the x of the rank with index src in the group, in place.

            rank 0   x = [a]        x = [a]
            rank 1   x = [b]   ->   x = [a]      (src=0)

        Communication: broadcast, x.nbytes into each rank but the source, (n-1) * x.nbytes out of
        the source.

        Raises: CollectiveError when x is not contiguous or src is not an index of the group.
        """
        if thread_context.recorder is not None:
            return thread_context.recorder.collective(self, "broadcast", x, src, async_op, tag=tag)
        check_contiguous("broadcast", x)
        if not 0 <= src < self.size:
            raise errors.CollectiveError(
                f"broadcast from src={src}: src is an index in the group {self.ranks}, from 0 to "
                f"{self.size - 1}."
            )
        if self.size == 1:
            return DONE if async_op else None
        sent, received = ((self.size - 1) * x.nbytes, 0) if self.rank == src else (0, x.nbytes)
        begun = self._begin("broadcast", f"src={src}", x.dtype, x.numel(), sent, received, tag)
        return _end_after(self._broadcast(x, src, async_op), begun, x, in_place=True)

    def permute(
        self,
        out: Tensor,
        x: Tensor,
        *,
        dst: int | None,
        src: int | None,
        async_op: bool = False,
        tag: CommTag | None = None,
    ) -> Work | None:
        """permute(x: S) -> S: send x to the rank dst, and receive in out what src sends here.

            rank 0   x = [a]   dst=1, src=None        out untouched
            rank 1   x = [b]   dst=2, src=0      ->   out = [a]
            rank 2   x = [c]   dst=None, src=1        out = [b]

        Every rank of the group must call it, even if it neither sends nor receives. Sizes may
        differ from rank to rank, but not between a sender and its receiver; out must not overlap x.

        Args:
            dst: index in the group of the rank that receives x; None to send nothing.
            src: index in the group of the rank that sends to this one; None to receive nothing and
                not change out. If both are this rank, x is copied to out.

        Communication: point to point, x.nbytes out if there is a dst, out.nbytes in if there is a
        src.

        Raises: CollectiveError when dst or src is not an index of the group, only one of them is
            this rank, dtypes differ or a buffer is not contiguous.
        """
        if thread_context.recorder is not None:
            return thread_context.recorder.collective(
                self, "permute", out, x, dst=dst, src=src, async_op=async_op, tag=tag
            )
        check_pair("permute", out, x)
        if dst == self.rank or src == self.rank:
            check_send_to_self(self, out, x, dst, src)
            _copy(out, x)
            dst = src = None
        elif not all(place is None or 0 <= place < self.size for place in (dst, src)):
            raise wrong_indices(self, dst, src)
        if self.size == 1:
            return DONE if async_op else None
        sent, received = 0 if dst is None else x.nbytes, 0 if src is None else out.nbytes
        begun = self._begin("permute", "", x.dtype, -1, sent, received, tag, route_of(dst, src))
        return _end_after(self._permute(out, x, dst, src, async_op), begun, x)

    def send(self, x: Tensor, dst: int, *, tag: CommTag | None = None) -> Work:
        """send(x, dst) -> Work: send x to the other rank of a group of two, which calls `receive`.

        Messages between the two ranks arrive in the order in which they are sent. The call returns
        at once; x must not be written before `wait()` has returned.

        Args:
            dst: index in the group of the rank that receives x.

        Communication: point to point, x.nbytes out.

        Raises: CollectiveError when the group has not two ranks, dst is not the other one or x is
            not contiguous.
        """
        check_pair("send", x, x)
        self._check_message("send", dst)
        route = route_of(dst, None)
        begun = self._begin("permute", "", x.dtype, -1, x.nbytes, 0, tag, route, is_message=True)
        return _end_after(self._send(x, dst), begun, x) or DONE

    def receive(self, out: Tensor, src: int, *, tag: CommTag | None = None) -> Work:
        """receive(out, src) -> Work: receive the next message of the other rank in `out`.

        The group has two ranks.

        Several receives may be posted before the messages are sent; they are served in the order of
        the calls. Read out after `wait()` has returned.

        Args:
            out: a tensor of the message's dtype and size.
            src: index in the group of the rank that sends.

        Communication: point to point, out.nbytes in.

        Raises: CollectiveError as `send`.
        """
        check_pair("receive", out, out)
        self._check_message("receive", src)
        route = route_of(None, src)
        begun = self._begin(
            "permute", "", out.dtype, -1, 0, out.nbytes, tag, route, is_message=True
        )
        return _end_after(self._receive(out, src), begun, out, in_place=True) or DONE

    def _check_message(self, op: str, peer: int) -> None:
        if self.size != 2 or peer != 1 - self.rank:
            raise errors.CollectiveError(
                f"{op}: rank {self.world.rank} named the rank at {peer} of the group "
                f"{self.ranks}; messages need a group of two ranks and go to the other one. Use "
                "`permute` in larger groups."
            )

    def close(self, why: str) -> None:
        """Make every later collective of more than one rank raise MeshError(why)."""

        def refuse(_: CollectiveRecord) -> None:
            raise errors.MeshError(why)

        self._observers = [refuse]  # called before anything else

    def barrier(self, *, tag: CommTag | None = None) -> None:
        """Wait until all ranks of the group call it. Communication: one launch of no bytes."""
        if thread_context.recorder is not None:
            return thread_context.recorder.collective(self, "barrier", tag=tag)
        if self.size == 1:
            return
        begun = self._begin("barrier", "", torch.uint8, 0, 0, 0, tag)
        self._barrier()
        _end_after(None, begun)

    def all_gather_object(self, obj: Any, *, tag: CommTag | None = None) -> list[Any]:
        """Return every rank's object, in group order, copied by pickle. For small objects.

        Communication: counted as an all_gather of the pickled bytes of this rank's object.
        """
        if thread_context.recorder is not None:
            return thread_context.recorder.collective(self, "all_gather_object", obj, tag=tag)
        data = pickle.dumps(obj)
        moved = (self.size - 1) * len(data)
        if self.size == 1:
            return [pickle.loads(data)]
        begun = self._begin("all_gather_object", "", torch.uint8, -1, moved, moved, tag)
        with outside_of_transforms(), outside_of_program_modes():
            gathered = self._all_gather_bytes(data)
        _end_after(None, begun)
        return [pickle.loads(d) for d in gathered]

    def direct(
        self,
        op: str,
        sent: int,
        received: int,
        dtype: torch.dtype,
        run: Callable[[], None],
        *,
        tag: CommTag | None = None,
    ) -> None:
        """Run a collective that `run` implements without the backend; recorded like any other.

        Communication: as given by the arguments, which are those of `CollectiveRecord`.
        """
        if thread_context.recorder is not None:
            return thread_context.recorder.collective(
                self, "direct", op, sent, received, dtype, run, tag=tag
            )
        begun = self._begin(op, "", dtype, -1, sent, received, tag)
        run()
        _end_after(None, begun)

    def _begin(
        self,
        op: str,
        how: str,
        dtype: torch.dtype,
        size: int,
        sent: int,
        received: int,
        tag: CommTag | None,
        route: int = 0,
        is_message: bool = False,
    ) -> _Begun | None:
        """Record a collective and notify the observers; the result is for `_end_after`.

        Raises: WatchError when the job has failed, or another rank called something else; what an
        observer raises.
        """
        on_completion = self._notify(op, sent, received, dtype) if self._observers else None
        if _settings.mode == "off":
            return None if on_completion is None else (None, 0, on_completion)
        recorder = self.recorder
        if recorder is None:
            recorder = self.recorder = self._new_recorder()
        thread = get_ident()
        if recorder.caller and recorder.caller != thread:
            check_left(self, recorder.caller, op, _CALLS)
        recorder.caller = thread
        number = recorder.enter(op, how, dtype, size, sent, received, tag, route, is_message)
        return recorder, number, on_completion

    def _new_recorder(self) -> Recorder:
        monitor = self.world.monitor
        return (
            Recorder(self, self.world.trace_buffer, None)
            if monitor is None
            else monitor.add_recorder(self)
        )

    def _notify(
        self, op: str, sent: int, received: int, dtype: torch.dtype
    ) -> Callable[[], None] | None:
        """Call the observers; return a function that calls what they returned."""
        record = CollectiveRecord(op, self.ranks, sent, received, dtype)
        on_completion = [
            called
            for observer in tuple(self._observers)
            if (called := observer(record)) is not None
        ]
        return partial(_call_each, on_completion) if on_completion else None

    # Reductions of dtypes that backends lack.

    def _all_reduce_encoded(self, x: Tensor, op: str, async_op: bool) -> Work | None:
        if x.is_complex() and op == "product":
            return self._product(x, lambda product: _write(x, product), async_op)
        y, native_op = dtype_encoding.encode(x, op)
        return and_then(
            self._all_reduce(y, native_op, async_op), lambda: dtype_encoding.decode(y, x, op)
        )

    def _reduce_scatter_encoded(
        self, out: Tensor, x: Tensor, op: str, async_op: bool
    ) -> Work | None:
        if x.is_complex() and op == "product":
            own_slice = slice(self.rank * out.numel(), (self.rank + 1) * out.numel())
            return self._product(x, lambda product: _write(out, product[own_slice]), async_op)
        y, native_op = dtype_encoding.encode(x, op)
        part = y.new_empty(y.numel() // self.size)
        return and_then(
            self._reduce_scatter(part, y, native_op, async_op),
            lambda: dtype_encoding.decode(part, out, op),
        )

    def _product(self, x: Tensor, use: Callable[[Tensor], None], async_op: bool) -> Work | None:
        """Gather every rank's x, pass the flat product to `use`: no backend multiplies complex."""
        everyone = x.detach().new_empty(self.size, x.numel())
        work = self._all_gather(everyone, x, async_op)
        return and_then(work, lambda: use(reduce(torch.mul, everyone)))

    # Each world implements these. The arguments are checked, the group has several ranks, and
    # reductions have native dtypes. They return a Work if async_op is true, else None.

    @abstractmethod
    def _all_gather(self, out: Tensor, x: Tensor, async_op: bool) -> Work | None: ...

    @abstractmethod
    def _reduce_scatter(self, out: Tensor, x: Tensor, op: str, async_op: bool) -> Work | None: ...

    @abstractmethod
    def _all_reduce(self, x: Tensor, op: str, async_op: bool) -> Work | None: ...

    @abstractmethod
    def _all_to_all(
        self,
        out: Tensor,
        x: Tensor,
        out_splits: Sequence[int] | None,
        in_splits: Sequence[int] | None,
        async_op: bool,
    ) -> Work | None:
        """Exchange parts of `x`; splits are None (parts of equal size) on every rank or on none."""

    @abstractmethod
    def _broadcast(self, x: Tensor, src: int, async_op: bool) -> Work | None: ...

    @abstractmethod
    def _permute(
        self, out: Tensor, x: Tensor, dst: int | None, src: int | None, async_op: bool
    ) -> Work | None:
        """Send `x` to dst and receive `out` from src; neither is this rank."""

    @abstractmethod
    def _send(self, x: Tensor, dst: int) -> Work | None: ...

    @abstractmethod
    def _receive(self, out: Tensor, src: int) -> Work | None: ...

    @abstractmethod
    def _barrier(self) -> None: ...

    @abstractmethod
    def _all_gather_bytes(self, data: bytes) -> list[bytes]: ...


_CALLS = frozenset(
    method.__code__
    for method in (
        Group.all_gather,
        Group.reduce_scatter,
        Group.all_reduce,
        Group.all_to_all,
        Group.broadcast,
        Group.permute,
        Group.send,
        Group.receive,
        Group.barrier,
        Group.all_gather_object,
        Group.direct,
    )
)


def _end_after(
    work: Work | None, begun: _Begun | None, x: Tensor | None = None, in_place: bool = False
) -> Work | None:
    """Mark the collective that `_begin` recorded as completed.

    Now, or when the work is done. Until then x must not be written.
    """
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
    recorder, number, on_completion = begun
    if recorder is not None:
        recorder.leave(number)
    if on_completion is not None:
        on_completion()


def _call_each(functions: Sequence[Callable[[], None]]) -> None:
    for function in functions:
        function()


def _copy(out: Tensor, x: Tensor) -> None:
    if out.data_ptr() != x.data_ptr():
        _write(out, x)


def _write(out: Tensor, x: Tensor) -> None:
    out.detach().view(-1).copy_(x.detach().reshape(-1))
