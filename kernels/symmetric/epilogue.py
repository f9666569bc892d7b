"""Epilogues of an all-reduce: what is computed from the sum in the same launch."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..quantize import compile_quantize
from ..quantize_format import BLOCK

LONGEST_ROW = 1 << 14  # elements, for a norm: 32 for each of 512 threads


@dataclass(frozen=True)
class AsRecord:
    """The result, in x's dtype, leaves as codes and scales: the record of the whole tensor, as `quantize.py` has it.

    Attributes:
        transport: "int8" or "fp8".
        block: elements that share a scale, a power of two from 16 to 1024; of rows that are normed, each has whole blocks.
    """

    transport: str
    block: int = BLOCK

    def __post_init__(self) -> None:
        compile_quantize((), [], self.transport, block=self.block)  # which knows what there is


@dataclass(frozen=True)
class AddNorm:
    """What follows a sum in a transformer: `added = x + residual; out = added / rms(added) * weight`, for each row.

    Computed in float32 from x and `added` as they are rounded to their dtypes, so it differs from the separate operations
    by no more than the order in which a row's squares are added.

    Attributes:
        residual: of x's shape.
        weight: one factor for each column; at most `LONGEST_ROW`.
        eps: added to the mean of squares.
        added: where the new residual is written; may be `residual`.
        record: how `out` leaves, where not as numbers.
    """

    residual: Tensor
    weight: Tensor
    eps: float
    added: Tensor
    record: AsRecord | None = None


Epilogue = AddNorm | AsRecord


def record_of(epilogue: Epilogue | None) -> AsRecord | None:
    """The format in which the result leaves; None for numbers."""
    return epilogue.record if isinstance(epilogue, AddNorm) else epilogue
