"""How much memory a program's tensors take on this rank, followed from the operators that make and free them.

    x = torch.zeros(8)      born: 32 bytes        live 32    peak 32
    y = x.exp()             born: 32 bytes        live 64    peak 64
    z = y[:4]               a view: nothing new   live 64
    y.add_(1)               in place: nothing     live 64
    del x, y                x is freed; y's memory is held by z
                                                  live 32    peak 64

What autograd saves and the buffers of collectives are tensors like others and count. What an operator's kernel allocates
for itself, and what an allocator loses to fragments, do not show here.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Collection, Iterator, Sequence
from types import FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ..layout.layout import Layout
from ..ops import nonmember
from ..ops.plain_operands import tensors_in
from ..ops.strategy import choose_strategy
from ..tensor.sharded_tensor import ShardedTensor

# Where the library works on meta tensors of global shapes, which stand for tensors and are none of the program's.
_ON_STAND_INS = frozenset({choose_strategy.__code__, vars(Layout)["meta"].func.__code__})
_DETACH = torch.ops.aten.detach.default  # all that is ever done to the wrapper of a ShardedTensor
_CONSTANTS = frozenset({torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default})


class PeakMemory(TorchDispatchMode):
    """with PeakMemory(device_type) as memory: counts the bytes of this thread's tensors on devices of that type.

    A tensor that was made before counts from the first operator that takes it, and as if it had been there all along.

    Attributes:
        live: bytes of the tensors that are alive.
        peak: the most that `live` has been.
    """

    def __init__(self, device_type: str) -> None:
        super().__init__()
        self.live, self.peak = 0, 0
        self._device_type = device_type
        self._bytes: dict[int, int] = {}  # storage -> its bytes; none for a stand-in
        self._stand_ins: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = {storage._cdata: storage for storage in self._storages((args, kwargs))}
        for key, storage in given.items():
            if key not in self._bytes and func is not _DETACH:
                self._add(storage, made_before=func not in _CONSTANTS)
        made = func(*args, **kwargs)
        for storage in self._storages(made):
            if storage._cdata in self._bytes:
                self._resized(storage)
            elif storage._cdata not in given:
                self._add(storage, stand_in=self._is_stand_in(given))
        return made

    def of(self, tree: Any) -> int:
        """Bytes of the tensors in a tree of tuples, lists and dictionaries; memory that several share counts once."""
        return sum({storage._cdata: storage.nbytes() for storage in self._storages(tree)}.values())

    def _storages(self, tree: Any) -> Iterator[Any]:
        """The memory of every tensor that counts, several times where it is shared."""
        for x in (t._local if isinstance(t, ShardedTensor) else t for t in tensors_in((tree,))):
            if x.device.type == self._device_type and x.layout is torch.strided:
                yield x.untyped_storage()

    def _add(self, storage: Any, *, made_before: bool = False, stand_in: bool = False) -> None:
        key, count = storage._cdata, 0 if stand_in else storage.nbytes()
        self._bytes[key] = count
        if stand_in:
            self._stand_ins.add(key)
        weakref.finalize(storage, self._freed, key).atexit = False
        self._grow(count, made_before)

    def _grow(self, count: int, made_before: bool = False) -> None:
        self.live += count
        self.peak = self.peak + count if made_before else max(self.peak, self.live)

    def _resized(self, storage: Any) -> None:
        key = storage._cdata
        if key not in self._stand_ins and storage.nbytes() != self._bytes[key]:
            self._grow(storage.nbytes() - self._bytes[key])
            self._bytes[key] = storage.nbytes()

    def _freed(self, key: int) -> None:
        self.live -= self._bytes.pop(key)
        self._stand_ins.discard(key)

    def _is_stand_in(self, given: Collection[int]) -> bool:
        """Whether what an operator makes of these is a stand-in: it is made of stand-ins alone, or where they are made."""
        if self._device_type != "meta":
            return False
        if given and self._stand_ins.issuperset(given):
            return True
        return any(f.f_code in _ON_STAND_INS or f.f_code.co_filename == nonmember.__file__ for f in _frames())


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back
