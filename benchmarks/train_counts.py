"""What a training step of `train.py` moves and holds, counted in one way for all contestants.

Collectives are counted where everybody's arrive: at torch's dispatcher, as `c10d` operators. Bytes received are (n-1) parts for an
all_gather or reduce_scatter, 2(n-1)/n of the buffer for an all_reduce, what comes from others for an all_to_all, and the buffer for a
broadcast, except at its root.

Memory is what torch's CPU allocator has handed out: `torch.profiler` sees each of its blocks come and go. So parameters, gradients,
optimizer state, gathered buffers, activations and temporaries inside operators count, and what gloo holds does not.
"""

from __future__ import annotations

import gc
import json
import tempfile
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

_NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor")
_MOVES_NOTHING = ("wait_tensor", "_wrap_tensor_autograd", "barrier", "monitored_barrier_")
_MARK = "the step that is measured"


class CountedCollectives(TorchDispatchMode):
    """Counts the collectives inside, and the bytes that they bring to this rank.

    Attributes:
        by_name: operator -> how many.
    """

    def __init__(self) -> None:
        super().__init__()
        self.received = 0
        self.by_name: dict[str, int] = {}

    @property
    def calls(self) -> int:
        return sum(self.by_name.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if func.namespace in _NAMESPACES and name not in _MOVES_NOTHING:
            self.by_name[name] = self.by_name.get(name, 0) + 1
            self.received += received(name, args)
        return func(*args, **(kwargs or {}))


def received(name: str, args: Any) -> int:
    """Bytes that a collective brings to this rank.

    Raises:
        NotImplementedError: one that has not been needed so far.
    """
    group = next(found for x in reversed(args) if (found := _group(x)) is not None)
    n, first = group.size(), _bytes(args[0])
    if name in ("_allgather_base_", "allgather_", "allgather_into_tensor_coalesced_"):  # what comes in
        return first * (n - 1) // n
    if name in ("_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_"):
        return first * (n - 1)
    if name in ("allreduce_", "allreduce_coalesced_", "all_reduce", "all_reduce_"):
        return 2 * (n - 1) * first // n
    if name == "broadcast_":
        return 0 if group.rank() == args[2] else first
    if name == "alltoall_base_":
        return first - _own_share(args[0], args[3], group)
    if name == "all_gather_into_tensor":  # a functional one: what goes in
        return first * (n - 1)
    if name == "reduce_scatter_tensor":
        return first * (n - 1) // n
    raise NotImplementedError(f"how many bytes does {name} receive?")


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
    return dist.ProcessGroup.unbox(x) if isinstance(x, torch.ScriptObject) and "ProcessGroup" in str(x._type()) else None


# -- memory ------------------------------------------------------------------------------------------------------------


class Memory:
    """What the allocator has handed out since `watched` began.

    Attributes:
        peak: the most at any time inside `measured`, in bytes.
        rest: how much it was when that began.
    """

    peak = rest = 0

    @contextmanager
    def watched(self) -> Iterable[None]:  # type: ignore[misc]
        gc.collect()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as found:
            yield
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            found.export_chrome_trace(str(path))
            self.rest, self.peak = _rest_and_peak(json.loads(path.read_text())["traceEvents"])

    def measured(self, call: Callable[[], Any]) -> Any:
        """Make the call whose peak is wanted."""
        gc.collect()
        with record_function(_MARK):
            return call()


def _rest_and_peak(events: list[dict[str, Any]]) -> tuple[int, int]:
    """Bytes handed out when the marked call began, and the most while it ran."""
    mark = next(event for event in events if event.get("name") == _MARK)
    start, stop = mark["ts"], mark["ts"] + mark["dur"]
    changes = sorted((event["ts"], event["args"]["Bytes"]) for event in events if event.get("name") == "[memory]")
    now = rest = peak = 0
    for when, change in changes:
        now += change
        if when < start:
            rest = peak = now
        elif when <= stop:
            peak = max(peak, now)
    return rest, peak
