"""A program's tensors' memory on this rank, counted at operators that allocate and free it.

    x = torch.zeros(8)      32 bytes allocated    live 32    peak 32
    y = x.exp()             32 bytes allocated    live 64    peak 64
    z = y[:4]               a view                live 64
    y.add_(1)               in place              live 64
    del x, y                x is freed; z still uses the memory of y
                                                  live 32    peak 64

Tensors that autograd saves and buffers of collectives are counted as well. Workspaces of kernels
and fragmentation of the allocator are not.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ...mesh.comm.thread_context import thread_context
from ..tensor.sharded_tensor import ShardedTensor
from ..trees import tensors_in

# what makes the wrapper of a ShardedTensor, which has no memory, calls it
_DETACH = torch.ops.aten.detach.default
_CONSTANTS = frozenset({torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default})


class PeakMemory(TorchDispatchMode):
    """with PeakMemory(device_type) as memory: count this thread's tensors on devices of that type.

    A tensor that was made before is found at the first operator that takes it, and counted as if it
    had been live from the start.

    Attributes:
        live: bytes of the tensors that are alive.
        peak: the most that `live` has been.
    """

    def __init__(self, device_type: str) -> None:
        super().__init__()
        self.live, self.peak = 0, 0
        self._history: list[int] = []
        self._made_before: list[
            tuple[int, int]
        ] = []  # operators that ran before it was taken, bytes
        self._device_type = device_type
        self._bytes: dict[int, int] = {}  # storage -> its bytes; 0 for a stand-in
        self._stand_ins: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(isinstance(x, ShardedTensor) for x in tensors_in((args,))):
            # of the wrapper: detach and views of the results of a torch.autograd.Function
            return func(*args, **kwargs)
        inputs = {storage._cdata: storage for storage in self._storages((args, kwargs))}
        for key, storage in inputs.items():
            if key not in self._bytes and func is not _DETACH:
                self._add(storage, made_before=func not in _CONSTANTS)
        result = func(*args, **kwargs)
        for storage in self._storages(result):
            if storage._cdata in self._bytes:
                self._on_resize(storage)
            elif storage._cdata not in inputs:
                self._add(storage, stand_in=self._is_stand_in(inputs))
        self._history.append(self.live)
        return result

    @property
    def operators(self) -> int:
        """How many operators have run."""
        return len(self._history)

    @property
    def history(self) -> list[int]:
        """`live` after each operator."""
        history = list(self._history)
        later = 0  # bytes of what was made before, and taken by a later operator for the first time
        end = len(history)
        for operators, count in reversed(self._made_before):
            for index in range(operators, end):
                history[index] += later
            later, end = later + count, operators
        for index in range(end):
            history[index] += later
        return history

    def restart(self) -> None:
        """Forget peak and history; what is alive counts on."""
        self.peak = self.live
        self._history.clear()
        self._made_before.clear()

    def of(self, tree: Any) -> int:
        """Return the bytes of a tree's tensors (tuple, list, dict); shared memory counts once."""
        return sum({storage._cdata: storage.nbytes() for storage in self._storages(tree)}.values())

    def _storages(self, tree: Any) -> Iterator[Any]:
        """Yield the storage of every tensor that is counted; a shared one several times."""
        for x in (t._local if isinstance(t, ShardedTensor) else t for t in tensors_in((tree,))):
            if x.device.type == self._device_type and x.layout is torch.strided:
                yield x.untyped_storage()

    def _add(self, storage: Any, *, made_before: bool = False, stand_in: bool = False) -> None:
        key = storage._cdata
        count = 0 if stand_in else storage.nbytes()
        self._bytes[key] = count
        if stand_in:
            self._stand_ins.add(key)
        weakref.finalize(storage, self._on_free, key).atexit = False
        self._grow(count, made_before)

    def _grow(self, count: int, made_before: bool = False) -> None:
        self.live += count
        if made_before:
            self.peak += count
            self._made_before.append((len(self._history), count))
        else:
            self.peak = max(self.peak, self.live)

    def _on_resize(self, storage: Any) -> None:
        key = storage._cdata
        if key not in self._stand_ins and storage.nbytes() != self._bytes[key]:
            self._grow(storage.nbytes() - self._bytes[key])
            self._bytes[key] = storage.nbytes()

    def _on_free(self, key: int) -> None:
        self.live -= self._bytes.pop(key)
        self._stand_ins.discard(key)

    def _is_stand_in(self, inputs: Collection[int]) -> bool:
        """Return whether the result of an operator is a stand-in.

        All its arguments are, or the code that makes them is running.
        """
        if self._device_type != "meta":
            return False
        if inputs and self._stand_ins.issuperset(inputs):
            return True
        return thread_context.on_stand_ins or thread_context.outside_mesh
