"""The memory of collectives under way, and the operators of a rank that read or write it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from pathlib import Path
from types import FrameType
from typing import Any, Protocol
from unittest.mock import patch

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)

from shardmesh.mesh.comm import call_site
from shardmesh.mesh.comm.transforms import outside_of_transforms

# Operators that read no elements, besides views.
_SHAPES_ONLY = {
    f"{kind}{name}{end}"
    for name in ("empty", "zeros", "ones", "full", "rand", "randn", "randint")
    for kind, end in (("", "_like"), ("new_", ""), ("new_", "_strided"))
} | {"is_same_size", "set_", "resize_"}
_EMPTY = {
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "empty_permuted",
}
# Methods by which the host reads memory without an operator.
_HOST_READS = ("numpy", "tolist", "__array__", "__reduce_ex__", "__dlpack__")
TOOL = tuple(str(Path(__file__).parent / name) for name in ("late_memory.py", "nccl_world.py"))
_LIBRARY = tuple(path for path in call_site._OURS if not path.endswith("/mesh/"))


class StreamHazard(AssertionError):
    """What would be wrong or undefined on a GPU: memory used before a collective has been waited
    for.
    """


@contextmanager
def own_operators() -> Iterator[None]:
    """Let operators of the tool write any memory, unseen by transforms and by the program's
    modes.
    """
    with (
        outside_of_transforms(),
        _disable_current_modes(),
        torch._C.DisableTorchFunction(),
        torch.inference_mode(),
    ):
        yield


class Buffer:
    """A tensor that a collective reads or writes. Poison fills a written one.

    Attributes:
        before: a copy of the elements from before the call.
        is_written: whether the collective writes to it.
    """

    def __init__(self, x: Tensor, is_written: bool) -> None:
        self.flat, self.is_written = x.data.view(-1), is_written  # `.data` has a version of its own
        self.start, self.end = span_of(x)
        self._storage = self.flat.untyped_storage()
        self.before = self.flat.clone()
        self._expected: Tensor | None = None

    def poison(self) -> None:
        poison(self.flat)

    def expect(self) -> None:
        """Remember the elements, which must not change until `change`."""
        self._expected = _bytes(self.flat).clone()

    def change(self) -> str | None:
        """Return what happened to the memory that must not have."""
        if self.is_freed:
            return "freed"
        if self._expected is None or torch.equal(_bytes(self.flat), self._expected):
            return None
        return "written to"

    @property
    def is_freed(self) -> bool:
        return self.start != self.end and (
            self._storage.data_ptr() == 0 or self.flat.data_ptr() != self.start or self._is_cut
        )

    @property
    def _is_cut(self) -> bool:
        return self.end > self._storage.data_ptr() + self._storage.nbytes()


def span_of(x: Tensor) -> tuple[int, int]:
    """Return the addresses from the first element to the end of the last."""
    start = x.data_ptr()
    if not x.numel():
        return start, start
    return start, start + x.element_size() * (
        1 + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
    )


def poison(x: Tensor) -> None:
    """Fill with NaN, integers with a number far outside all sizes, booleans with True."""
    _bytes(x).fill_(
        1 if x.dtype == torch.bool else 0xFF if x.is_floating_point() or x.is_complex() else 0xA5
    )


def _bytes(x: Tensor) -> Tensor:
    return x.view(-1).view(torch.uint8)


class UnderWay(Protocol):
    """A collective that may not have run."""

    buffers: list[Buffer]

    def deliver(self) -> None: ...


class Memory:
    """Of one rank, the collectives under way: those not waited for, and those whose results the
    host has not needed yet.

    Attributes:
        watch: looks at the rank's operators; None to wait at once.
        has_failed: whether the program has caught an exception, which may have come between a call
            and its `wait`.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.under_way: list[UnderWay] = []
        self.ordered: list[UnderWay] = []
        self.watch: OperatorWatch | None = None
        self.has_failed = False

    @property
    def runs_ahead(self) -> bool:
        """Whether all operators of this thread are seen, so that results may come when the first
        one needs them.
        """
        return self.watch is not None and any(
            mode is self.watch for mode in _get_current_dispatch_mode_stack()
        )

    def touch(self, what: str, tensors: Iterable[tuple[Tensor, bool]]) -> None:
        """Wait for the collectives that these tensors (and whether they are written) come after.

        Raises: StreamHazard for memory of collectives that have not been waited for.
        """
        for x, writes in tensors:
            if x.numel():
                start, end = span_of(x)
                for work in self.under_way:
                    for buffer in work.buffers:
                        if (
                            start < buffer.end
                            and buffer.start < end
                            and (writes or buffer.is_written)
                        ):
                            kind = "result" if buffer.is_written else "input"
                            verb = "writes to" if writes else "reads"
                            raise StreamHazard(
                                f"rank {self.rank}: {what} {verb} the {kind} of {work} before "
                                f"wait(), {called_at()}."
                            )
                for work in list(self.ordered):
                    if any(
                        start < buffer.end and buffer.start < end and buffer.is_written
                        for buffer in work.buffers
                    ):
                        work.deliver()

    def finish(self) -> None:
        """Wait for all collectives, at the end of the rank's program.

        Raises: StreamHazard for works that were never waited for.
        """
        for work in [] if self.has_failed else self.under_way:
            raise StreamHazard(f"rank {self.rank}: nobody waited for {work}.")
        for work in list(self.ordered):
            work.deliver()


class OperatorWatch(TorchDispatchMode):
    """Calls `Memory.touch` for the operators of a rank, and fills new memory with poison."""

    supports_higher_order_operators = True  # which read their arguments

    def __init__(self, memory: Memory) -> None:
        super().__init__()
        self.memory = memory

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(kind, FakeTensor) for kind in types):
            return func(*args, **kwargs)
        if any(issubclass(kind, Tensor) and not _is_plain(kind) for kind in types):
            return NotImplemented
        if isinstance(func, HigherOrderOperator):
            read = [x for leaf in pytree.tree_leaves((args, kwargs)) for x in _plain(leaf)]
            self.memory.touch(str(func), ((x, False) for x in read))
            return func(*args, **kwargs)
        uses = _uses_of(func)
        if uses is not None and (self.memory.under_way or self.memory.ordered):
            self.memory.touch(str(func), _touched(uses, args, kwargs))
        with torch._C.DisableTorchFunction():
            out = func(*args, **kwargs)
        # Torch does not count their writes here.
        if func._schema.name.startswith("aten::_foreach_") and not func._schema.returns:
            torch.autograd.graph.increment_version([x for x in args[0] if not x.is_inference()])
        if (
            func._schema.name.removeprefix("aten::") in _EMPTY
            and _plain(out)
            and out.is_contiguous()
            and not out.is_quantized
        ):
            with own_operators():
                poison(out.data)
        return out


def _is_plain(kind: type) -> bool:
    return kind is Tensor or kind is torch.nn.Parameter


@cache
def _uses_of(func: Any) -> tuple[tuple[str, bool], ...] | None:
    """Return the names of an operator's arguments and whether it writes them; None if it uses no
    elements.
    """
    schema = func._schema
    if schema.name.partition("::")[2] in _SHAPES_ONLY or _is_view(schema):
        return None
    return tuple(
        (a.name, a.alias_info is not None and a.alias_info.is_write) for a in schema.arguments
    )


def _is_view(schema: Any) -> bool:
    return any(
        returned.alias_info is not None and not returned.alias_info.is_write
        for returned in schema.returns
    )


def _touched(
    uses: tuple[tuple[str, bool], ...], args: Any, kwargs: Any
) -> Iterator[tuple[Tensor, bool]]:
    written = dict(uses)
    for value, (_, writes) in zip(args, uses, strict=False):
        yield from ((x, writes) for x in _plain(value))
    for name, value in kwargs.items():
        yield from ((x, written.get(name, False)) for x in _plain(value))


def _plain(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return (
            [value]
            if _is_plain(type(value))
            and value.device.type == "cpu"
            and value.layout == torch.strided
            else []
        )
    return [x for item in value for x in _plain(item)] if isinstance(value, list | tuple) else []


@contextmanager
def host_reads_wait(memory: Callable[[], Memory | None]) -> Iterator[None]:
    """Make the methods by which the host reads a tensor's memory wait, too."""

    def waits(method: Any) -> Any:
        @wraps(method)
        def read(x: Any, *args: Any, **kwargs: Any) -> Any:
            memory_of_rank = memory()
            if memory_of_rank is not None:
                memory_of_rank.touch(method.__name__, [(y, False) for y in _plain(x)])
            return method(x, *args, **kwargs)

        return read

    with patch.multiple(Tensor, **{name: waits(getattr(Tensor, name)) for name in _HOST_READS}):
        yield


def called_at() -> str:
    """Return the line of the program, and that of the library below it."""
    frame: FrameType | None = sys._getframe(1)
    inner = None
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(TOOL):
            if not call_site.is_inner(frame.f_code):
                break
            if inner is None and name.startswith(_LIBRARY):
                inner = f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    place = "" if frame is None else f"at {frame.f_code.co_filename}:{frame.f_lineno}"
    return place if inner is None else f"{place} (in {inner})"
