"""The definitions of all-reduce, epilogue and pull in torch operations.

On the tensors of all ranks; tests compare with them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..box import box_shape, box_size, slices
from ..copy import scaled, widened
from .epilogue import AddNorm
from .pull import Pull


def reference_sum(xs: Sequence[Tensor]) -> Tensor:
    """`reference_sum(xs) -> sum`: in the order given, not rounded; float32 for 16-bit floats."""
    total = widened(xs[0])
    for x in xs[1:]:
        total = total + widened(x)
    return total


def reference_all_reduce(xs: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """`reference_all_reduce(xs, dtype) -> out`: the result of both all-reduces.

    On every rank, in out's dtype.
    """
    return reference_sum(xs).to(xs[0].dtype).to(dtype)


def reference_add_norm(x: Tensor, epilogue: AddNorm, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`reference_add_norm(x, epilogue, dtype) -> (added, out)`: the epilogue of a sum."""
    added = (widened(x) + widened(epilogue.residual)).to(epilogue.added.dtype)
    wide = widened(added)
    root = torch.rsqrt(wide.square().mean(-1, keepdim=True) + epilogue.eps)
    return added, (wide * root * widened(epilogue.weight)).to(dtype)


def reference_pull(
    staged: Sequence[Tensor], pull: Pull, out: Tensor, scale: float | None = None
) -> Tensor:
    """`reference_pull(staged, pull, out) -> out`: from the staging areas of all ranks.

    Only sums are supported.
    """
    for box, places in pull.sources.items():
        parts = [
            staged[rank][offset:][: box_size(box)].view(box_shape(box)) for rank, offset in places
        ]
        combined = reference_sum(parts) if len(parts) > 1 else parts[0]
        out[slices(box)] = combined if scale is None else scaled(combined, scale)
    return out
