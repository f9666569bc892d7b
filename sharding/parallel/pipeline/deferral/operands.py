"""Which argument of which function of torch's is the input, the weight and the bias of an operator.

A function returns None for a call that is not deferred, such as one with further options.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .operators import (
    ADDMM,
    BATCHES_TIMES_WEIGHT,
    LINEAR,
    ROWS_TIMES_WEIGHT,
    WEIGHT_TIMES_COLUMNS,
    Operator,
    embedding,
    grouped_mm,
)

IsWeight = Callable[[Any], bool]


class Operands(NamedTuple):
    """An operator and its operands.

    Attributes:
        autocast: whether autocast casts the operands.
    """

    operator: Operator
    x: Tensor
    weight: Tensor
    bias: Tensor | None = None
    autocast: bool = True


def _linear(
    is_weight: IsWeight, input: Tensor, weight: Tensor, bias: Tensor | None = None
) -> Operands | None:
    if input.ndim < 2 or weight.ndim != 2 or not is_weight(weight):
        return None
    return Operands(LINEAR, input, weight, bias)


def _matmul(is_weight: IsWeight, input: Any, other: Any, **options: Any) -> Operands | None:
    if options or not isinstance(input, Tensor) or not isinstance(other, Tensor):
        return None
    if input.ndim < 2:
        return None
    if other.ndim == 2 and is_weight(other):
        return Operands(ROWS_TIMES_WEIGHT, input, other)
    if input.ndim == other.ndim == 2 and is_weight(input):
        return Operands(WEIGHT_TIMES_COLUMNS, other, input)
    return None


def _mm(
    is_weight: IsWeight, input: Tensor, mat2: Tensor, *options: Any, **more_options: Any
) -> Operands | None:
    return None if options or more_options else _matmul(is_weight, input, mat2)


def _addmm(
    is_weight: IsWeight,
    input: Tensor,
    mat1: Tensor,
    mat2: Tensor,
    *options: Any,
    beta: Any = 1,
    alpha: Any = 1,
    **more_options: Any,
) -> Operands | None:
    if options or more_options or beta != 1 or alpha != 1 or not is_weight(mat2):
        return None
    return Operands(ADDMM, mat1, mat2, input)


def _bmm(
    is_weight: IsWeight, input: Tensor, mat2: Tensor, *options: Any, **more_options: Any
) -> Operands | None:
    if options or more_options or not is_weight(mat2):
        return None
    return Operands(BATCHES_TIMES_WEIGHT, input, mat2)


def _grouped_mm(
    is_weight: IsWeight,
    mat_a: Tensor,
    mat_b: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Operands | None:
    is_rows_times_weights = offs is not None and mat_a.ndim == 2 and mat_b.ndim == 3
    if not is_rows_times_weights or bias is not None or out_dtype is not None:
        return None
    if not is_weight(mat_b):
        return None
    return Operands(grouped_mm(offs), mat_a, mat_b, autocast=False)  # type: ignore[arg-type]


def _embedding(
    is_weight: IsWeight,
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Operands | None:
    if max_norm is not None or sparse or not is_weight(weight):
        return None
    return Operands(embedding(padding_idx, scale_grad_by_freq), input, weight, autocast=False)


def _torch_embedding(
    is_weight: IsWeight,
    weight: Tensor,
    indices: Tensor,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Operands | None:
    padding = None if padding_idx < 0 else padding_idx
    return _embedding(is_weight, indices, weight, padding, None, 2.0, scale_grad_by_freq, sparse)


OPERANDS: dict[Any, Callable[..., Operands | None]] = {
    F.linear: _linear,
    torch.matmul: _matmul,
    Tensor.matmul: _matmul,
    Tensor.__matmul__: _matmul,
    torch.mm: _mm,
    Tensor.mm: _mm,
    torch.addmm: _addmm,
    Tensor.addmm: _addmm,
    torch.bmm: _bmm,
    Tensor.bmm: _bmm,
    F.embedding: _embedding,
    torch.embedding: _torch_embedding,
} | {
    function: _grouped_mm
    for function in (getattr(F, "grouped_mm", None), getattr(torch, "_grouped_mm", None))
    if function is not None
}
