"""What a call on torch's process group says, as far as all ranks of the group must say the same: operation, reduction or root, dtype, elements.

What may differ between ranks is left out: who scatters and who is scattered to, how much goes where in an all_to_all, what a rank that is not
the root passes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist


# (op, how, dtype, size, sent, received) as `Seat.enter` takes them, and of an all_to_all how many elements go to each rank, and come from it;
# a plain tuple, which is made in a third of the time of one with names
Called = tuple[str, str, Any, int, int, int, tuple[Sequence[int], Sequence[int]] | None]
Describe = Callable[..., Called]
_KINDS: Any = dist.ReduceOp.RedOpType.__members__ if dist.is_available() else {}
_REDUCTIONS = {int(kind): name.lower() for name, kind in _KINDS.items()}


def _reduction(options: Any) -> str:
    """The hash of a ReduceOp is its number: to compare it, or to ask for its name, takes four times as long."""
    try:
        return _REDUCTIONS.get(hash(options.reduceOp), "?")
    except AttributeError:  # a ReduceOp itself
        return _REDUCTIONS.get(hash(options), "?")


def all_reduce(n: int, tensors: Any, options: Any = dist.ReduceOp.SUM) -> Called:
    x = tensors[0] if type(tensors) is list else tensors
    moved = 2 * (n - 1) * x.nbytes // n
    return "all_reduce", _reduction(options), x.dtype, x.numel(), moved, moved, None


def all_reduce_coalesced(n: int, tensors: Any, options: Any) -> Called:
    moved = 2 * (n - 1) * _bytes(tensors) // n
    return "all_reduce_coalesced", _reduction(options), tensors[0].dtype, _elements(tensors), moved, moved, None


def broadcast(n: int, tensors: Any, options: Any) -> Called:
    x = tensors[0] if isinstance(tensors, list) else tensors
    root = options if isinstance(options, int) else options.rootRank
    return "broadcast", f"src={root}", x.dtype, x.numel(), x.nbytes, x.nbytes, None


def reduce(n: int, tensors: Any, options: Any, op: Any = dist.ReduceOp.SUM) -> Called:
    x = tensors[0] if isinstance(tensors, list) else tensors
    root, how = (options, _reduction(op)) if isinstance(options, int) else (options.rootRank, _reduction(options))
    return "reduce", f"{how}, dst={root}", x.dtype, x.numel(), x.nbytes, x.nbytes, None


def all_gather(n: int, outs: Any, ins: Any, options: Any = None) -> Called:
    """Ranks may have parts of different sizes, where the backend takes them."""
    x, parts = (ins[0], outs[0]) if isinstance(ins, list) else (ins, outs)
    is_even = all(part.numel() == x.numel() for part in parts)
    return "all_gather", "", x.dtype, x.numel() if is_even else -1, (n - 1) * x.nbytes, (n - 1) * x.nbytes, None


def all_gather_flat(n: int, out: Any, x: Any, options: Any = None) -> Called:
    return "all_gather", "", x.dtype, x.numel(), (n - 1) * x.nbytes, (n - 1) * x.nbytes, None


def all_gather_coalesced(n: int, outs: Any, ins: Any, options: Any = None) -> Called:
    moved = (n - 1) * _bytes(ins)
    return "all_gather_coalesced", "", ins[0].dtype, _elements(ins), moved, moved, None


def gather(n: int, outs: Any, ins: Any, options: Any) -> Called:
    x, root = (ins[0], options.rootRank) if isinstance(ins, list) else (ins, options)
    return "gather", f"dst={root}", x.dtype, x.numel(), x.nbytes, x.nbytes, None


def scatter(n: int, outs: Any, ins: Any, options: Any) -> Called:
    x, root = (outs[0], options.rootRank) if isinstance(outs, list) else (outs, options)
    return "scatter", f"src={root}", x.dtype, x.numel(), x.nbytes, x.nbytes, None


def reduce_scatter(n: int, outs: Any, ins: Any, options: Any = dist.ReduceOp.SUM) -> Called:
    """Ranks may get parts of different sizes, where the backend gives them."""
    x, parts = (outs[0], ins[0]) if isinstance(outs, list) else (outs, ins)
    size = x.numel() if all(part.numel() == x.numel() for part in parts) else sum(part.numel() for part in parts)
    return "reduce_scatter", _reduction(options), x.dtype, size, (n - 1) * x.nbytes, (n - 1) * x.nbytes, None


def reduce_scatter_flat(n: int, out: Any, x: Any, options: Any = dist.ReduceOp.SUM) -> Called:
    return "reduce_scatter", _reduction(options), out.dtype, out.numel(), (n - 1) * out.nbytes, (n - 1) * out.nbytes, None


def reduce_scatter_coalesced(n: int, outs: Any, ins: Any, options: Any = dist.ReduceOp.SUM) -> Called:
    moved = (n - 1) * _bytes(outs)
    return "reduce_scatter_coalesced", _reduction(options), outs[0].dtype, _elements(outs), moved, moved, None


def all_to_all_flat(n: int, out: Any, x: Any, out_splits: Any = None, in_splits: Any = None, options: Any = None) -> Called:
    """Splits count rows, as torch's do."""
    rows = x.shape[0] if x.dim() else 0, out.shape[0] if out.dim() else 0
    sent, expected = ([*given] if given else [count // n] * n for given, count in zip((in_splits, out_splits), rows, strict=True))
    return "all_to_all", "", x.dtype, -1, x.nbytes, out.nbytes, (sent, expected)


def all_to_all(n: int, outs: Any, ins: Any, options: Any = None) -> Called:
    splits = [x.numel() for x in ins], [x.numel() for x in outs]
    return "all_to_all", "", ins[0].dtype, -1, _bytes(ins), _bytes(outs), splits


def barrier(n: int, *args: Any, **kwargs: Any) -> Called:
    return "barrier", "", "", -1, 0, 0, None


def monitored_barrier(n: int, *args: Any, **kwargs: Any) -> Called:
    return "monitored_barrier", "", "", -1, 0, 0, None


# name of a method of torch's ProcessGroup -> what a call of it says
DESCRIBE: dict[str, Describe] = {
    "allreduce": all_reduce,
    "allreduce_coalesced": all_reduce_coalesced,
    "broadcast": broadcast,
    "reduce": reduce,
    "allgather": all_gather,
    "_allgather_base": all_gather_flat,
    "all_gather_single": all_gather_flat,
    "allgather_coalesced": all_gather_coalesced,
    "allgather_into_tensor_coalesced": all_gather_coalesced,
    "all_gather_single_coalesced": all_gather_coalesced,
    "gather": gather,
    "scatter": scatter,
    "reduce_scatter": reduce_scatter,
    "_reduce_scatter_base": reduce_scatter_flat,
    "reduce_scatter_single": reduce_scatter_flat,
    "reduce_scatter_tensor_coalesced": reduce_scatter_coalesced,
    "reduce_scatter_single_coalesced": reduce_scatter_coalesced,
    "alltoall_base": all_to_all_flat,
    "all_to_all_single": all_to_all_flat,
    "alltoall": all_to_all,
    "barrier": barrier,
}


def _bytes(tensors: Sequence[Any]) -> int:
    return sum(x.nbytes for x in tensors)


def _elements(tensors: Sequence[Any]) -> int:
    return sum(x.numel() for x in tensors)
