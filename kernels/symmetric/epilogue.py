"""Epilogues of an all-reduce: functions of the sum, computed in the same launch."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..quantize import compile_quantize
from ..quantize_format import BLOCK

LONGEST_ROW = 1 << 14  # elements, for a norm: 32 for each of 512 threads


@dataclass(frozen=True)
class AsRecord:
    """Write the result, in x's dtype, as codes and scales.

    One record of the whole tensor, in the format of `quantize.py`.

    Attributes:
        transport: "int8" or "fp8".
        block: elements that share a scale, a power of two from 16 to 1024; with AddNorm it divides
            the row length.
    """

    transport: str
    block: int = BLOCK

    def __post_init__(self) -> None:
        compile_quantize((), [], self.transport, block=self.block)  # checks the format


@dataclass(frozen=True)
class AddNorm:
    """Residual sum and RMSNorm after a sum.

    `added = x + residual; out = added / rms(added) * weight`, for each row.

    Computed in float32 from x and `added` rounded to their dtypes, so it differs from the separate
    operations only in the order in which a row's squares are added.

    Attributes:
        residual: of x's shape.
        weight: one factor per column; at most `LONGEST_ROW`.
        eps: added to the mean of squares.
        added: receives the new residual; may be `residual`.
        record: the format of `out`; None for numbers.
    """

    residual: Tensor
    weight: Tensor
    eps: float
    added: Tensor
    record: AsRecord | None = None


Epilogue = AddNorm | AsRecord


def record_of(epilogue: Epilogue | None) -> AsRecord | None:
    """Return the format of the result; None for numbers."""
    return epilogue.record if isinstance(epilogue, AddNorm) else epilogue
