"""Communication and memory of a training step of `train.py`, counted the same way for all
implementations.

Collectives of all implementations reach torch's dispatcher as `c10d` operators, and are counted
there. Bytes received are (n-1) parts for an all_gather or reduce_scatter, 2(n-1)/n of the buffer
for an all_reduce, the parts from other ranks for an all_to_all, and the buffer for a broadcast,
except at its root.

Memory is the total size of live storages between two operators: parameters, gradients, optimizer
state, gathered buffers and activations count; temporaries inside an operator and gloo's buffers do
not.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

_NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor")
_MOVES_NOTHING = ("wait_tensor", "_wrap_tensor_autograd", "barrier", "monitored_barrier_")


class CountC10d(TorchDispatchMode):
    """Count collectives, and the bytes that this rank receives from them.

    Attributes:
        received: total bytes received.
        by_name: number of calls by operator.
    """

    def __init__(self) -> None:
        super().__init__()
        self.received = 0
        self.by_name: dict[str, int] = {}

    @property
    def calls(self) -> int:
        return sum(self.by_name.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(cls, DTensor) for cls in types):
            return NotImplemented  # the operators on local tensors arrive here next
        name = func.overloadpacket.__name__
        if func.namespace in _NAMESPACES and name not in _MOVES_NOTHING:
            self.by_name[name] = self.by_name.get(name, 0) + 1
            self.received += received(name, args)
        return func(*args, **(kwargs or {}))


def received(name: str, args: Any) -> int:
    """Return the bytes that this rank receives from a collective.

    Raises:
        NotImplementedError: for a collective without a rule.
    """
    group = next(member_group for x in reversed(args) if (member_group := _group(x)) is not None)
    n, first = group.size(), _bytes(args[0])
    # The first argument is the output.
    if name in ("_allgather_base_", "allgather_", "allgather_into_tensor_coalesced_"):
        return first * (n - 1) // n
    if name in ("_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_"):
        return first * (n - 1)
    if name in ("allreduce_", "allreduce_coalesced_", "all_reduce", "all_reduce_"):
        return 2 * (n - 1) * first // n
    if name == "broadcast_":
        return 0 if group.rank() == args[2] else first
    if name == "alltoall_base_":
        return first - _own_share(args[0], args[3], group)
    if name == "all_gather_into_tensor":  # functional: the first argument is the input
        return first * (n - 1)
    if name == "reduce_scatter_tensor":
        return first * (n - 1) // n
    raise NotImplementedError(f"no rule for the bytes received by {name}")


def _own_share(out: Tensor, splits: list[int], group: dist.ProcessGroup) -> int:
    rows = splits[group.rank()] if splits else out.shape[0] // group.size()
    return rows * out.nbytes // max(1, out.shape[0])


def _bytes(tree: Any) -> int:
    return sum(x.nbytes for x in pytree.tree_leaves(tree) if isinstance(x, Tensor))


def _group(x: Any) -> dist.ProcessGroup | None:
    if isinstance(x, str):
        try:
            return torch._C._distributed_c10d._resolve_process_group(x)  # type: ignore[attr-defined]
        except RuntimeError:
            return None  # the name of an operation
    return (
        dist.ProcessGroup.unbox(x)
        if isinstance(x, torch.ScriptObject) and "ProcessGroup" in str(x._type())
        else None
    )


# -- memory ----------------------------------------------------------------------------------------


class Memory(TorchDispatchMode):
    """Track the storages of all tensors returned by operators, until they are freed.

    Attributes:
        peak: largest total size during `measured`, in bytes.
        rest: total size at its start.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = self.rest = 0
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._measuring = False

    def measured(self, call: Callable[[], Any]) -> Any:
        """Run a call and record its peak."""
        gc.collect()
        self.peak = self.rest = self._now()
        self._measuring = True
        try:
            return call()
        finally:
            self._measuring = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(cls, DTensor) for cls in types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        for x in pytree.tree_leaves(out):
            if isinstance(x, Tensor) and x.device.type == "cpu":
                self._track(x.untyped_storage())
        if self._measuring:
            self.peak = max(self.peak, self._now())
        return out

    def _track(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._storages:
            self._storages[key] = weakref.ref(storage, lambda _: self._storages.pop(key, None))

    def _now(self) -> int:
        storages = (ref() for ref in list(self._storages.values()))
        return sum(storage.nbytes() for storage in storages if storage is not None)
