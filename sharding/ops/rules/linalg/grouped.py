"""Products of groups of rows with a matrix for each group.

`torch.nn.functional.grouped_mm`, the experts of a mixture.

Offsets say where each group ends along one dim, `j` here. A part of that dim has a part of each
group, and its offsets are those of the whole, counted from its start and cut to its length. A part
of the matrices multiplies its own groups' rows and leaves zeros for the others, so that the results
add up:

    groups of 7 rows end at [2 3 7]
    rows over 2 ranks         rank 0, rows 0:4    [2 3 4]       rank 1, rows 4:7    [0 0 3]
    matrices over 2 ranks     rank 0, a b         rows 0:3      rank 1, c           rows 3:7
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ....layout.layout import Layout
from ..decomposition_utils import splitting_axes
from ..elementwise.pointwise import is_operand
from ..notation import Rule, einrule
from ..registry import rule

# By the numbers of dims of both operands: the dims of operands, offsets and result, and the dim
# along which each operand has its groups side by side.
_PATTERNS = {
    (2, 3): ("j k, g k n, [o] -> j n", (-2, None)),
    (3, 2): ("g m k, k j, [o] -> m j", (None, -1)),
    (2, 2): ("m j, j n, [o] -> o m n", (-1, -2)),
    (3, 3): ("g m k, g k n, [o] -> g m n", (None, None)),
}
_ALIGNMENT = 16  # bytes, of rows in the kernels


@rule("grouped_mm", "_grouped_mm")
def _grouped_mm(
    mat_a: Tensor,
    mat_b: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Rule | None:
    entry = _PATTERNS.get((mat_a.ndim, mat_b.ndim))
    if (
        entry is None
        or bias is not None
        or not (is_operand(mat_a) and is_operand(mat_b))
        or (offs is not None and not is_operand(offs))
    ):
        return None
    pattern, along = entry
    return einrule(
        pattern,
        mat_a,
        mat_b,
        offs,
        linear=((0,), (1,)),
        local=_multiply,
        bind=partial(_bind, along),
    )


def _bind(along: Sequence[int | None], targets: Sequence[Layout], _: Any) -> Callable[..., Tensor]:
    """Return the product of this rank's parts, with the part of the offsets that they need."""
    dims = [
        len(layout.shape) + dim
        for layout, dim in zip(targets, along, strict=False)
        if dim is not None
    ]
    if not dims:
        return _multiply
    jagged = 0 if along[0] is not None else 1
    rows = targets[jagged].box[dims[0]] if splitting_axes(targets[jagged], dims[0]) else None
    matrices = targets[1 - jagged]
    groups = matrices.box[0] if None in along and splitting_axes(matrices, 0) else None
    if rows is None and groups is None:
        return _multiply
    return partial(_multiply_parts, rows, groups, jagged)


def _multiply_parts(
    rows: tuple[int, int] | None,
    groups: tuple[int, int] | None,
    jagged: int,
    mat_a: Tensor,
    mat_b: Tensor,
    offs: Tensor,
    bias: None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Compute `grouped_mm` of these intervals of rows (or columns) and groups, else zeros."""
    if rows is not None:
        offs = (offs - rows[0]).clamp(0, rows[1] - rows[0])
    if groups is None:
        return _multiply(mat_a, mat_b, offs, out_dtype=out_dtype)
    # The first of these groups takes the rows before it, too: as zeros, which leave nothing in its
    # gradient.
    first, last = groups
    rows_of_all = torch.arange(mat_b.shape[1] if jagged else mat_a.shape[0], device=offs.device)
    ends = torch.cat([offs.new_zeros(1), offs])
    others = ~((rows_of_all >= ends[first]) & (rows_of_all < ends[last]))
    if jagged:
        mat_b = mat_b.masked_fill(others, 0)
    else:
        others = others[:, None]
        mat_a = mat_a.masked_fill(others, 0)
    return _multiply(mat_a, mat_b, offs[first:last], out_dtype=out_dtype).masked_fill(others, 0)


def _multiply(
    mat_a: Tensor,
    mat_b: Tensor,
    offs: Tensor | None = None,
    bias: None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Call torch's own function, on operands padded to the alignment that its kernels need."""
    if mat_a.is_meta:
        return _multiply_on_meta(mat_a, mat_b, offs, out_dtype)
    if _is_aligned(mat_a) and _is_aligned(mat_b):
        return torch._grouped_mm(mat_a, mat_b, offs=offs, out_dtype=out_dtype)
    unit = _ALIGNMENT // mat_a.element_size()
    inner, columns = (max(1, -(-x.shape[-1] // unit)) * unit - x.shape[-1] for x in (mat_a, mat_b))
    left, right = F.pad(mat_a, (0, inner)), F.pad(mat_b, (0, columns, 0, inner))
    return torch._grouped_mm(left.contiguous(), right.contiguous(), offs=offs, out_dtype=out_dtype)[
        ..., : mat_b.shape[-1]
    ]


def _is_aligned(x: Tensor) -> bool:
    (size, length), (row, column) = x.shape[-2:], x.stride()[-2:]
    apart, least = (row, length) if column == 1 else (column, size)
    return (
        1 in (row, column)
        and apart >= max(least, 1)
        and apart * x.element_size() % _ALIGNMENT == 0
        and x.data_ptr() % _ALIGNMENT == 0
    )


def _multiply_on_meta(
    mat_a: Tensor, mat_b: Tensor, offs: Tensor | None, out_dtype: torch.dtype | None
) -> Tensor:
    """Compute a product of the same shape: the kernel on "meta" accepts what one device does."""
    if mat_a.ndim == mat_b.ndim:
        product = mat_a @ mat_b
        product = product if offs is None else product.expand(offs.shape[0], -1, -1).clone()
    else:
        product = (mat_a if mat_a.ndim == 2 else mat_a[:1].sum(0)) @ (
            mat_b if mat_b.ndim == 2 else mat_b[:1].sum(0)
        )
    return product.to(out_dtype or product.dtype)
