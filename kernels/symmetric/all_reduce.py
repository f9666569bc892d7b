"""All-reduces in one or two shots, by kernels that read the peers' memory."""

from __future__ import annotations

import torch
from torch import Tensor

from ..quantize_format import DTYPES, record_bytes
from ..strided import COMPUTED, alignment
from ..strided_views import UNIT
from .epilogue import LONGEST_ROW, AddNorm, AsRecord, Epilogue, record_of
from .peers import Peers, check, check_if_done


def one_shot_all_reduce(
    peers: Peers, x: Tensor, out: Tensor, epilogue: Epilogue | None = None
) -> Tensor:
    """`one_shot_all_reduce(peers, x, out, epilogue=None) -> out`: the sum of all ranks' x.

    In one launch with one barrier.

    Args:
        x: contiguous, of the same shape and dtype on every rank.
        out: contiguous, of x's shape; the sum is rounded to x's dtype and cast to out's. May be x.
            For a record uint8 [record_bytes(x.numel(), block)], at a multiple of 16 bytes.
        epilogue: computed from the sum; out is then its result.

    Raises:
        SymmetricMemoryError: a rank is missing.
        ValueError: shapes or dtypes that do not fit, or rows for which the shared memory is too
            small.
    """
    return _all_reduce(peers, x, out, epilogue, two_shot=False)


def two_shot_all_reduce(
    peers: Peers, x: Tensor, out: Tensor, epilogue: Epilogue | None = None
) -> Tensor:
    """`two_shot_all_reduce(peers, x, out, epilogue=None) -> out`: the sum of all ranks' x.

    The same bits as `one_shot_all_reduce`, with two barriers.

    Every rank sums a share of the pieces (of the rows, with an epilogue), then all read the
    results.
    """
    return _all_reduce(peers, x, out, epilogue, two_shot=True)


def _all_reduce(
    peers: Peers, x: Tensor, out: Tensor, epilogue: Epilogue | None, two_shot: bool
) -> Tensor:
    from .symmetric_triton import launch_all_reduce  # imports triton

    check(peers)
    _check_all_reduce(x, out, epilogue)
    launch_all_reduce(peers, x, out, epilogue, two_shot)
    check_if_done(peers)
    return out


def _check_all_reduce(x: Tensor, out: Tensor, epilogue: Epilogue | None) -> None:
    record = record_of(epilogue)
    tensors = {"x": x, "out": out} if record is None else {"x": x}
    if isinstance(epilogue, AddNorm):
        tensors |= {"residual": epilogue.residual, "added": epilogue.added}
        columns = x.shape[-1] if x.ndim else 0
        if (
            epilogue.weight.shape != (columns,)
            or not 0 < columns <= LONGEST_ROW
            or not epilogue.weight.is_contiguous()
        ):
            raise ValueError(
                f"a weight of shape {tuple(epilogue.weight.shape)} for rows of {columns}: give a "
                f"contiguous one with a factor for each column, of 1 to {LONGEST_ROW} columns"
            )
    for name, tensor in tensors.items():
        if tensor.shape != x.shape or not tensor.is_contiguous() or tensor.dtype not in COMPUTED:
            raise ValueError(
                f"{name} is {tensor.dtype} of shape {tuple(tensor.shape)} and strides "
                f"{tensor.stride()}: an all-reduce of {tuple(x.shape)} needs it contiguous, of "
                f"that shape, and of one of {sorted(map(str, COMPUTED))}"
            )
    if record is not None:
        _check_record(x, out, record, x.shape[-1] if isinstance(epilogue, AddNorm) else 0)


def _check_record(x: Tensor, out: Tensor, record: AsRecord, columns: int) -> None:
    size = record_bytes(x.numel(), record.block)
    if x.dtype not in DTYPES:
        raise ValueError(
            f"{record} of {x.dtype}: float16, bfloat16 and float32 are quantized; reduce others "
            "without it"
        )
    if (
        out.dtype != torch.uint8
        or out.shape != (size,)
        or not out.is_contiguous()
        or alignment([out]) < UNIT
    ):
        raise ValueError(
            f"out is {out.dtype} of shape {tuple(out.shape)} and strides {out.stride()}: {record} "
            f"of {tuple(x.shape)} needs it contiguous, uint8 of shape ({size},), and at a multiple "
            f"of {UNIT} bytes"
        )
    if columns % record.block:
        raise ValueError(
            f"rows of {columns} in {record}: a block would span two rows; choose a block that "
            "divides the row length"
        )
