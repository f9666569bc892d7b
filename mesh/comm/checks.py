"""Checks of a collective's arguments, made on each rank before anything is sent."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import errors
from .recording.recorder import RecordedGroup
from .transforms import is_transformed

REDUCTIONS = frozenset({"sum", "max", "min", "product"})


def check_pair(op: str, out: Tensor, x: Tensor) -> None:
    """Raise CollectiveError unless both buffers are contiguous, of one dtype and on one device."""
    if out.dtype != x.dtype or out.device != x.device:
        raise errors.CollectiveError(
            f"{op}: out is {out.dtype} on {out.device} but x is {x.dtype} on {x.device}; both need "
            "the same dtype and device."
        )
    check_contiguous(op, x)
    check_contiguous(op, out)


def check_contiguous(op: str, x: Tensor) -> None:
    """Raise CollectiveError unless x is contiguous and outside of torch.func transforms."""
    if is_transformed(x):
        raise errors.CollectiveError(
            f"{op} of a tensor inside a transform (sm.vmap, sm.jvp, sm.grad, torch.func): the code "
            "that calls it has no rule for that. Move the call out of the transform, or use the "
            "collectives of shard_map (psum, all_gather, ...), which have such rules."
        )
    if not x.is_contiguous():
        raise errors.CollectiveError(
            f"{op}: a buffer of shape {tuple(x.shape)} has strides {x.stride()}, so it is not "
            "contiguous; pass x.contiguous()."
        )


def check_reduction(op: str, dtype: torch.dtype) -> None:
    """Raise CollectiveError for an unknown reduction, or one that the dtype does not have."""
    if op not in REDUCTIONS:
        raise errors.wrong_reduction(op, REDUCTIONS)
    if dtype.is_complex and op in ("max", "min"):
        raise errors.CollectiveError(
            f"{op} of {dtype}: complex numbers have no order; reduce x.abs()."
        )


def check_send_to_self(
    group: RecordedGroup, out: Tensor, x: Tensor, dst: int | None, src: int | None
) -> None:
    """Raise CollectiveError unless a `permute` of a rank to itself does so consistently.

    It both sends to and receives from its own rank, with buffers of one size.
    """
    if dst != src:
        raise wrong_indices(group, dst, src)
    if out.numel() != x.numel():
        raise wrong_sizes(
            "permute", group, "out.numel() == x.numel() where a rank sends to itself", out, x
        )


def wrong_indices(group: RecordedGroup, dst: int | None, src: int | None) -> errors.CollectiveError:
    return errors.CollectiveError(
        f"permute with dst={dst}, src={src} on rank {group.rank} of the group {group.ranks}: each "
        f"must be None or an index in the group from 0 to {group.size - 1}, and if one of them is "
        "this rank, both must be."
    )


def wrong_sizes(
    op: str, group: RecordedGroup, rule: str, out: Tensor, x: Tensor
) -> errors.CollectiveError:
    return errors.CollectiveError(
        f"{op} over {group.size} ranks needs {rule}, but out has shape {tuple(out.shape)} "
        f"({out.numel()} elements) and x has shape {tuple(x.shape)} ({x.numel()} elements)."
    )


def check_splits(
    group: RecordedGroup,
    out: Tensor,
    x: Tensor,
    out_splits: Sequence[int],
    in_splits: Sequence[int],
) -> None:
    """Raise CollectiveError unless both splits have an entry per rank and fill their buffers."""
    if len(out_splits) != group.size or len(in_splits) != group.size:
        rule = "one entry per rank"
    elif sum(out_splits) != out.numel() or sum(in_splits) != x.numel():
        rule = "splits that add up to the buffers"
    else:
        return
    raise errors.CollectiveError(
        f"all_to_all over {group.size} ranks needs {rule}, but out_splits={list(out_splits)} for "
        f"an out of {out.numel()} elements and in_splits={list(in_splits)} for an x of {x.numel()} "
        "elements."
    )
