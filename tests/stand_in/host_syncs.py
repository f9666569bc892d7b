"""A dispatch mode that records where the host waits for the device "standin"."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import shardmesh
from tests.stand_in import device

# Operators whose results' sizes, or errors, depend on values, so that CUDA's kernels read them on
# the host.
_READS = frozenset(
    "_local_scalar_dense equal nonzero masked_select _unique2 unique_dim unique_consecutive "
    "bincount histc _linalg_check_errors".split()
)
_HOME = str(Path(shardmesh.__file__).parents[1])
_PARTS = tuple(f"{_HOME}/{part}/" for part in ("mesh", "sharding", "kernels"))


class HostSyncs(TorchDispatchMode):
    """Record what makes the host wait for the device, in every thread that runs under the mode.

    A copy does so unless it is `non_blocking` and the memory on the host is pinned. Pinned memory
    has no values until the host has waited for an event after the copy. A tensor that one stream
    writes and another reads must be waited for in between.

    Attributes:
        syncs: what, and the line of shardmesh or torch that did it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.syncs: list[str] = []
        self.writers: dict[int, tuple[device.Stream, int]] = {}  # of storages, by their addresses

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        here = [
            x
            for x in pytree.tree_leaves((args, kwargs))
            if isinstance(x, Tensor) and _is_device(x.device)
        ]
        if here and self._reads(func, name, args, kwargs):
            self.on_wait(name)
        self._check_order(here)
        if name == "copy_" and args[0].device != args[1].device:
            return self._copy(
                args[0], args[1], args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
            )
        if (
            name == "_to_copy"
            and args[0].device.type != str(kwargs.get("device") or args[0].device).split(":")[0]
        ):
            return self._to_copy(func, args[0], kwargs)
        if name == "_foreach_copy_" and any(
            a.device != b.device for a, b in zip(*args[:2], strict=True)
        ):
            for a, b in zip(*args[:2], strict=True):
                a.copy_(b, *args[2:], **kwargs) if a.device == b.device else self._copy(
                    a, b, (*args[2:], *kwargs.values(), False)[0]
                )
            return args[0]
        out = func(*args, **kwargs)
        if name == "lift_fresh" and _is_device(out.device):
            self.on_wait("torch.tensor(device=)")
        stream = device.current_stream()
        number = stream.step()
        for x in pytree.tree_leaves(out):
            if (
                isinstance(x, Tensor)
                and _is_device(x.device)
                and (_writes(func) or all(x is not y for y in here))
            ):
                self.writers.setdefault(x.untyped_storage().data_ptr(), (stream, number))
                if _writes(func):
                    self.writers[x.untyped_storage().data_ptr()] = stream, number
        return out

    def _reads(self, func: Any, name: str, args: Any, kwargs: Any) -> bool:
        if name == "repeat_interleave":
            return kwargs.get("output_size") is None
        if name in ("index", "index_put", "index_put_"):
            return any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])
        return name in _READS

    def _check_order(self, tensors: list[Tensor]) -> None:
        seen = device.current_stream().seen
        for x in tensors:
            stream, number = self.writers.get(
                x.untyped_storage().data_ptr(), (device.current_stream(), 0)
            )
            if number > seen.get(stream, 0):
                self.on_wait("race between streams")

    def _copy(self, dst: Tensor, src: Tensor, non_blocking: bool) -> Tensor:
        host = src if _is_device(dst.device) else dst
        if not host.numel():
            return dst
        # Torch casts into pageable memory.
        if not (non_blocking and host.is_pinned() and src.dtype is dst.dtype):
            self.on_wait(
                f"{'pageable' if non_blocking else 'blocking'} copy to the "
                f"{'device' if host is src else 'host'}"
            )
        elif host is dst:
            # Of now: later writes come after the copy in the stream.
            values = src.cpu().to(dst.dtype)
            _spoil(dst)
            device.delay_copy(lambda: dst.copy_(values))
            return dst
        dst.copy_(src.to(dst.device))
        return dst

    def _to_copy(self, func: Any, x: Tensor, kwargs: Any) -> Tensor:
        options = {name: value for name, value in kwargs.items() if name != "non_blocking"}
        out = func(x, **options)
        non_blocking = kwargs.get("non_blocking", False)
        if non_blocking and _is_device(x.device):
            # As torch does on CUDA.
            out = torch.empty_strided(out.shape, out.stride(), dtype=out.dtype, pin_memory=True)
        return self._copy(out, x, non_blocking)

    def on_wait(self, what: str) -> None:
        self.syncs.append(f"{what} at {_line()}")


def _writes(func: Any) -> bool:
    return func._schema.is_mutable


def _spoil(x: Tensor) -> None:
    """Fill memory with what nobody wrote."""
    if x.is_floating_point():
        x.fill_(float("nan"))
    elif x.dtype is not torch.bool:
        x.fill_(-77)


def _is_device(where: torch.device) -> bool:
    return where.type == device.NAME


def _line() -> str:
    """Return the innermost line of shardmesh under way, else of any other file but torch's."""
    frame: Any = sys._getframe(1)
    fallback = ""
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_PARTS):
            return f"{file[len(_HOME) + 1 :]}:{frame.f_lineno}"
        if not fallback and "_python_dispatch" not in file and "stand_in/host_syncs" not in file:
            fallback = f"{'/'.join(Path(file).parts[-2:])}:{frame.f_lineno}"
        frame = frame.f_back
    return fallback


@contextmanager
def host_syncs() -> Iterator[list[str]]:
    """Record where the host waits for the device inside the block."""
    with HostSyncs() as mode:
        try:
            yield mode.syncs
        finally:
            device.run_copies()
