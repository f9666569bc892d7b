"""Combine contributions in a flat buffer into the boxes of a tensor.

    flat  [ a0 a1 | . . | b0 b1 | c0 c1 ]   box ((0, 2),) from 0, 4, 6
    x     [ a0+b0+c0  a1+b1+c1 ]

This is the local half of a reduction by all_to_all: every rank receives all contributions to its
elements and combines them in the order of the group, so that all ranks with an element have the
same bits (the order of torch's `sum` depends on the position in a tensor). 16-bit floats are
combined in float32 and rounded once. torch operations make one pass per sum and another per box
that is not the whole tensor; on a GPU one launch for all tensors of a bucket reads each
contribution once and writes each result once (`strided_triton.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from .backend import wants_kernels
from .box import Box, box_origin, box_shape, box_size, full_box, row_major_strides, slices
from .copy import widened
from .strided import (
    COMPUTED,
    PlacedView,
    Table,
    View,
    alignment,
    cached_tables,
    make_tables,
    merge_views,
)

# box of the tensor -> the starts of its contributions in the buffer
Stacks = Mapping[Box, Sequence[int]]

_COMBINE = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum, "product": torch.mul}


class Combine:
    """`combine(flat, out=None) -> x`: made by `compile_combine`.

    Attributes:
        shape: of the tensor.
        kind: how contributions are combined.
        stacks: box -> the starts of its contributions.
    """

    __slots__ = ("_is_whole", "kind", "placed", "shape", "stacks")

    def __init__(self, shape: Sequence[int], stacks: Stacks, kind: str) -> None:
        self.shape, self.stacks, self.kind = tuple(shape), dict(stacks), kind
        self._is_whole = list(self.stacks) == [full_box(self.shape)]
        self.placed = [
            _views_of_starts(self.shape, box, starts) for box, starts in self.stacks.items()
        ]

    def __call__(self, flat: Tensor, out: Tensor | None = None) -> Tensor:
        """`combine(flat, out=None) -> x`: reduce the boxes of x in a buffer.

        In `out` (contiguous, cast to its dtype) if given; else it may be a view of `flat`.
        """
        return combine_many([self], flat, None if out is None else [out])[0]

    @property
    def gives_view(self) -> bool:
        """Whether the result is a view of the buffer: one contribution, to the whole tensor."""
        return self._is_whole and len(next(iter(self.stacks.values()))) == 1

    def in_torch(self, flat: Tensor, out: Tensor | None) -> Tensor:
        """Combine with torch operations: the definition."""
        if out is None and self._is_whole:
            ((box, starts),) = self.stacks.items()
            return _combine_box(self.kind, flat, box, starts).to(flat.dtype)
        out = flat.new_empty(self.shape) if out is None else out
        for box, starts in self.stacks.items():
            out[slices(box)] = _combine_box(self.kind, flat, box, starts)
        return out


def compile_combine(shape: Sequence[int], stacks: Stacks, kind: str = "sum") -> Combine:
    """`compile_combine(shape, {box: starts}, kind) -> combine`: compile how to combine.

    The result is a `Callable[[flat, out=None], Tensor]`.

    Args:
        shape: of the result.
        stacks: for each box of the result, the starts in the flat buffer of the contributions to
            it, each row-major. Elements in no box are not written in `out`, and undefined without
            it.
        kind: "sum", "max", "min" or "product".

    >>> add = compile_combine((2,), {((0, 2),): [0, 2, 4]})
    >>> add(torch.tensor([1.0, 2.0, 10.0, 20.0, 100.0, 200.0])).tolist()
    [111.0, 222.0]
    """
    return Combine(shape, stacks, kind)


def combine_many(
    combines: Sequence[Combine], flat: Tensor, outs: Sequence[Tensor] | None = None
) -> list[Tensor]:
    """`combine_many(combines, flat, outs=None) -> tensors`: run all of them on one buffer.

    They are of one kind; one launch on a GPU.
    """
    if not (wants_kernels(flat.device) and flat.dtype in COMPUTED):
        return [c.in_torch(flat, None if outs is None else outs[i]) for i, c in enumerate(combines)]
    if outs is None:
        views = [c.gives_view for c in combines]
        done = [
            c.in_torch(flat, None) if view else flat.new_empty(c.shape)
            for c, view in zip(combines, views, strict=True)
        ]
    else:
        views, done = [False] * len(outs), list(outs)
    launched = [i for i, view in enumerate(views) if not view]
    if launched:
        _launch([combines[i] for i in launched], flat, [done[i] for i in launched])
    return done


def _launch(combines: Sequence[Combine], flat: Tensor, outs: Sequence[Tensor]) -> None:
    from .strided_triton import launch  # imports triton

    itemsizes, aligned = (flat.itemsize, outs[0].itemsize), alignment((flat, *outs))

    def make() -> list[Table]:
        placed = [p._replace(tensor=i) for i, c in enumerate(combines) for p in c.placed]
        return make_tables(placed, False, itemsizes, aligned, raw=False)

    for table in cached_tables(combines, (itemsizes, aligned), make):
        launch(table, flat, outs[0] if len(outs) == 1 else list(outs), combines[0].kind)


def _views_of_starts(shape: Sequence[int], box: Box, starts: Sequence[int]) -> PlacedView:
    sizes, strides = box_shape(box), row_major_strides(shape)
    origin = sum(o * s for o, s in zip(box_origin(box), strides, strict=True))
    sizes, strides, flat_strides = merge_views(sizes, strides, row_major_strides(sizes))
    return PlacedView(0, View(sizes, strides, origin, flat_strides, starts[0]), tuple(starts))


def _combine_box(kind: str, flat: Tensor, box: Box, starts: Sequence[int]) -> Tensor:
    """Return the contributions to a box, combined in order; 16-bit floats in float32, unrounded."""
    shape, size, combine = box_shape(box), box_size(box), _COMBINE[kind]
    first, *others = [flat[start:][:size].view(shape) for start in starts]
    if not others:
        return first
    total = combine(widened(first), others[0])
    for part in others[1:]:
        combine(total, part, out=total)
    return total
