"""Record a call on a process group of torch: what its ranks must agree on, and the bytes.

What may differ between ranks is left out: the tensors of a scatter or gather, the splits of an
all_to_all, what a rank that is not the root passes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from .recorder import TorchRecorder

Enter = Callable[..., int]

_KINDS: Any = dist.ReduceOp.RedOpType.__members__ if dist.is_available() else {}
_REDUCTIONS = {int(kind): name.lower() for name, kind in _KINDS.items()}


def _reduction(options: Any) -> str:
    """Return the name of a reduction.

    The hash of a ReduceOp is its number: comparing it or asking its name takes four times as long.
    """
    try:
        return _REDUCTIONS.get(hash(options.reduceOp), "?")
    except AttributeError:  # a ReduceOp itself
        return _REDUCTIONS.get(hash(options), "?")


def all_reduce(recorder: TorchRecorder, tensors: Any, options: Any = dist.ReduceOp.SUM) -> int:
    x = tensors[0] if type(tensors) is list else tensors
    n = recorder.size
    moved = 2 * (n - 1) * x.nbytes // n
    return recorder.enter("all_reduce", _reduction(options), x.dtype, x.numel(), moved, moved)


def all_reduce_coalesced(recorder: TorchRecorder, tensors: Any, options: Any) -> int:
    moved = 2 * (recorder.size - 1) * _bytes(tensors) // recorder.size
    return recorder.enter(
        "all_reduce_coalesced",
        _reduction(options),
        tensors[0].dtype,
        _elements(tensors),
        moved,
        moved,
    )


def broadcast(recorder: TorchRecorder, tensors: Any, options: Any) -> int:
    x = tensors[0] if isinstance(tensors, list) else tensors
    root = options if isinstance(options, int) else options.rootRank
    return recorder.enter("broadcast", f"src={root}", x.dtype, x.numel(), x.nbytes, x.nbytes)


def reduce(recorder: TorchRecorder, tensors: Any, options: Any, op: Any = dist.ReduceOp.SUM) -> int:
    x = tensors[0] if isinstance(tensors, list) else tensors
    root, how = (
        (options, _reduction(op))
        if isinstance(options, int)
        else (options.rootRank, _reduction(options))
    )
    return recorder.enter("reduce", f"{how}, dst={root}", x.dtype, x.numel(), x.nbytes, x.nbytes)


def all_gather(recorder: TorchRecorder, outs: Any, ins: Any, options: Any = None) -> int:
    """Record an all_gather, of parts of different sizes where the backend allows that."""
    x, parts = (ins[0], outs[0]) if isinstance(ins, list) else (ins, outs)
    is_even = all(part.numel() == x.numel() for part in parts)
    moved = (recorder.size - 1) * x.nbytes
    return recorder.enter("all_gather", "", x.dtype, x.numel() if is_even else -1, moved, moved)


def all_gather_flat(recorder: TorchRecorder, out: Any, x: Any, options: Any = None) -> int:
    moved = (recorder.size - 1) * x.nbytes
    return recorder.enter("all_gather", "", x.dtype, x.numel(), moved, moved)


def all_gather_coalesced(recorder: TorchRecorder, outs: Any, ins: Any, options: Any = None) -> int:
    """Record an all_gather of several tensors.

    Of one, as the functional all_gather calls it, as that of the tensor.
    """
    if len(ins) == 1:
        return all_gather_flat(recorder, None, ins[0])
    moved = (recorder.size - 1) * _bytes(ins)
    return recorder.enter("all_gather_coalesced", "", ins[0].dtype, _elements(ins), moved, moved)


def gather(recorder: TorchRecorder, outs: Any, ins: Any, options: Any) -> int:
    x, root = (ins[0], options.rootRank) if isinstance(ins, list) else (ins, options)
    return recorder.enter("gather", f"dst={root}", x.dtype, x.numel(), x.nbytes, x.nbytes)


def scatter(recorder: TorchRecorder, outs: Any, ins: Any, options: Any) -> int:
    x, root = (outs[0], options.rootRank) if isinstance(outs, list) else (outs, options)
    return recorder.enter("scatter", f"src={root}", x.dtype, x.numel(), x.nbytes, x.nbytes)


def reduce_scatter(
    recorder: TorchRecorder, outs: Any, ins: Any, options: Any = dist.ReduceOp.SUM
) -> int:
    """Record a reduce_scatter, into parts of different sizes where the backend allows that."""
    x, parts = (outs[0], ins[0]) if isinstance(outs, list) else (outs, ins)
    size = (
        x.numel()
        if all(part.numel() == x.numel() for part in parts)
        else sum(part.numel() for part in parts)
    )
    moved = (recorder.size - 1) * x.nbytes
    return recorder.enter("reduce_scatter", _reduction(options), x.dtype, size, moved, moved)


def reduce_scatter_flat(
    recorder: TorchRecorder, out: Any, x: Any, options: Any = dist.ReduceOp.SUM
) -> int:
    moved = (recorder.size - 1) * out.nbytes
    return recorder.enter(
        "reduce_scatter", _reduction(options), out.dtype, out.numel(), moved, moved
    )


def reduce_scatter_coalesced(
    recorder: TorchRecorder, outs: Any, ins: Any, options: Any = dist.ReduceOp.SUM
) -> int:
    """Record a reduce_scatter of several tensors.

    Of one, as the functional reduce_scatter calls it, as that of the tensor.
    """
    if len(outs) == 1:
        return reduce_scatter_flat(recorder, outs[0], None, options)
    moved = (recorder.size - 1) * _bytes(outs)
    return recorder.enter(
        "reduce_scatter_coalesced",
        _reduction(options),
        outs[0].dtype,
        _elements(outs),
        moved,
        moved,
    )


def all_to_all_flat(
    recorder: TorchRecorder,
    out: Any,
    x: Any,
    out_splits: Any = None,
    in_splits: Any = None,
    options: Any = None,
) -> int:
    """Record an all_to_all of one tensor; splits count rows, as torch's do."""
    rows = x.shape[0] if x.dim() else 0, out.shape[0] if out.dim() else 0
    both = zip((in_splits, out_splits), rows, strict=True)
    sent, expected = (
        [*splits] if splits else [count // recorder.size] * recorder.size for splits, count in both
    )
    number = recorder.enter("all_to_all", "", x.dtype, -1, x.nbytes, out.nbytes)
    recorder.show_splits(number, sent, expected)
    return number


def all_to_all(recorder: TorchRecorder, outs: Any, ins: Any, options: Any = None) -> int:
    number = recorder.enter("all_to_all", "", ins[0].dtype, -1, _bytes(ins), _bytes(outs))
    recorder.show_splits(number, [x.numel() for x in ins], [x.numel() for x in outs])
    return number


def barrier(recorder: TorchRecorder, *args: Any, **kwargs: Any) -> int:
    return recorder.enter("barrier", "", "", -1, 0, 0)


# method of torch's ProcessGroup -> what records a call of it and returns the number of the record
ENTER: dict[str, Enter] = {
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
