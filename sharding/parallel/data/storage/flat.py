"""Parameters in one flat buffer.

They are gathered together, and their gradients reduced together, without packing.

    rank 0   shard [piece]  \\  gather   whole [pieces * piece] = | w_1 | w_2 | ...  views, in use
    rank 1   shard [piece]  /            gradients in the same places -- reduce --> shard of them

The shard and the whole are one 1-d tensor in two layouts, so `plan` chooses the collectives. The
parameters that the optimizer sees are views of the shard: rows of each, in ragged layouts. See
`flat_layout.py`.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from functools import cached_property
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .....mesh.comm.pending import Pending
from .....mesh.comm.recording.recorder import CommTag
from .....mesh.device_mesh import DeviceMesh
from ....layout.layout import Layout
from ....layout.spec import Cut, P
from ....redistribute.executor import executor
from ..address import address_of
from ..grads.grad_places import GradBuffer, is_view_at
from .flat_layout import FlatLayout, make_flat_layout

# Of a buffer's elements: if more are padding, tensors are split along another dim.
_PADDING = 1 / 16

# Shape, strides and the element at which it begins.
_View = tuple[tuple[int, ...], tuple[int, ...], int]


class FlatBucket:
    """Parameters of one dtype in one flat buffer.

    Attributes:
        bases: their layouts in use: not split over `axes`.
        dims: the dim of each that `axes` split; its rows below are the parts of index 1 along that
            dim. Where none is given it is 0, or 1 for the largest stacks of matrices if much of the
            buffer would be padding else: eight experts have no sixteen equal parts.
        layouts: their sharded layouts: `axes` split that dim, minor to the axes that split it in
            use.
    """

    def __init__(
        self,
        mesh: DeviceMesh,
        axes: tuple[str, ...],
        bases: Sequence[Layout],
        transport: str | None = None,
        dims: Sequence[int | None] | None = None,
    ) -> None:
        self.mesh, self.axes, self.bases, self._transport = mesh, axes, tuple(bases), transport
        # The largest part, so that buffers have the same size on all ranks.
        shapes = [base.largest_local_shape for base in bases]
        self.dims, self.layout = _dims_and_layout(shapes, dims, mesh.size(axes))
        # with the split dim first, as it is stored
        self._largest = [
            _dim_first(shape, dim) for shape, dim in zip(shapes, self.dims, strict=True)
        ]
        self.layouts = [self._sharded_layout(i, base) for i, base in enumerate(bases)]
        self._others = tuple(axis for axis in mesh.axis_names if axis not in axes)
        self._flats: dict[Any, Layout] = {}
        self._strides = [
            _strides_of_stored(shape, dim)
            for shape, dim in zip(self._largest, self.dims, strict=True)
        ]

    # -- positions of parameters -------------------------------------------------------------------

    def _sharded_layout(self, i: int, base: Layout) -> Layout:
        """Return the layout of a parameter whose rows are cut into pieces as well."""
        cuts, dim = list(base.spec.cuts), self.dims[i]
        sizes = []
        for count in _rows_by_part(base, dim):
            for part in range(self.layout.parts):
                start, stop = self.layout.rows_of(i, part, count)
                sizes.append(stop - start)
        outer = tuple(axis for one in cuts[dim] for axis in one.axes)
        cuts[dim] = (Cut((*outer, *self.axes), tuple(sizes)),)
        return base.replace(P.of_cuts(cuts, base.pending))

    @cached_property
    def _part(self) -> int:
        """The index of this rank's piece."""
        return self.mesh.index_along(self.axes)

    def shards_in(self, shard: Tensor) -> list[Tensor]:
        """Return this rank's rows of each parameter, as views of its piece."""
        return _views(shard, self._in_shard)

    def rows_of(self, i: int, value: Tensor) -> Tensor:
        """Return the rows of a parameter's value that are in this rank's piece, as a view."""
        start, stop = self.layout.rows_of(i, self._part, self._counts[i])
        return value.narrow(self.dims[i], start, stop - start)

    def piece_of(self, whole: Tensor) -> Tensor:
        """Return this rank's piece of the whole buffer, as a view of it."""
        return whole.narrow(0, self._part * self.layout.piece, self.layout.piece)

    @property
    def is_lossy(self) -> bool:
        """Whether values are rounded on the way from shards to the whole buffer."""
        return self._transport is not None

    def wholes_in(self, whole: Tensor) -> list[Tensor]:
        """Return each parameter, as views of the whole buffer."""
        return _views(whole, self._in_whole)

    @cached_property
    def _in_shard(self) -> list[_View]:
        counts, first = self._counts, self._part * self.layout.piece
        return [
            self._view(i, *self.layout.rows_of(i, self._part, count), first)
            for i, count in enumerate(counts)
        ]

    @cached_property
    def _in_whole(self) -> list[_View]:
        return [self._view(i, 0, count, 0) for i, count in enumerate(self._counts)]

    @cached_property
    def _counts(self) -> list[int]:
        """The rows of each parameter that this rank uses."""
        return [base.local_shape[dim] for base, dim in zip(self.bases, self.dims, strict=True)]

    def _view(self, i: int, start: int, stop: int, first: int) -> _View:
        """Return the view of a parameter's rows in a buffer that begins at element `first`."""
        strides, dim, shape = self._strides[i], self.dims[i], list(self.bases[i].local_shape)
        shape[dim] = stop - start
        return tuple(shape), strides, self.layout.offsets[i] + start * strides[dim] - first

    def param_at(self, offset: int) -> int:
        """Return the index of the parameter at an offset of the whole buffer."""
        return bisect_right(self.layout.offsets, offset) - 1

    # -- communication -----------------------------------------------------------------------------

    def _flat(
        self, dtype: torch.dtype, over: tuple[str, ...], pending: tuple[str, ...] = ()
    ) -> Layout:
        """Return the layout of the buffer, split over some of the axes."""
        layout = self._flats.get((dtype, over, pending))
        if layout is None:
            copies = math.prod(self.mesh.size(axis) for axis in self._others)
            spec = P((*self._others, *over) or None, unreduced=set(pending))
            layout = Layout.of(self.mesh, spec, (copies * self.layout.length,), dtype)
            self._flats[dtype, over, pending] = layout
        return layout

    def start_gather(
        self, x: Tensor, before: tuple[str, ...], after: tuple[str, ...], tag: CommTag
    ) -> Pending[Tensor]:
        """Launch the all_gather between two splits of a buffer.

        From one over the axes `before` to one over `after`.

        Communication: one all_gather.
        """
        src, dst = self._flat(x.dtype, before), self._flat(x.dtype, after)
        pending = executor(src, dst, transport=self._transport).start([x], tag=tag)
        return pending.then(itemgetter(0))

    def empty_gradients(self, dtype: torch.dtype) -> Tensor:
        """Allocate an uninitialised buffer for gradients, with zeros between them."""
        whole = torch.empty(self.layout.length, dtype=dtype, device=self.mesh.device)
        for start, stop in self._gaps:
            whole[start:stop].zero_()
        return whole

    @cached_property
    def _gaps(self) -> list[tuple[int, int]]:
        """The ranges between parameters; the whole buffer if one is not contiguous in it."""
        gaps, end = [], 0
        for (shape, strides, start), dim in zip(self._in_whole, self.dims, strict=True):
            if math.prod(shape) and strides != _strides_of_stored(_dim_first(shape, dim), dim):
                return [(0, self.layout.length)]
            gaps.append((end, start))
            end = start + math.prod(shape)
        gaps.append((end, self.layout.length))
        return [(start, stop) for start, stop in gaps if start < stop]

    def new_grad_buffer(self, dtype: torch.dtype) -> GradBuffer:
        """Allocate a buffer for gradients, with a view for each."""
        whole = self.empty_gradients(dtype)
        return GradBuffer(whole, self.wholes_in(whole))

    def fill_grad_buffer(
        self, grads: Sequence[Tensor | None], dtype: torch.dtype, filled: GradBuffer | None = None
    ) -> Tensor:
        """Copy gradients that are not in `filled` yet into a buffer; zeros where there is none."""
        whole, views = self.new_grad_buffer(dtype) if filled is None else filled
        copies, absent = [], []
        for view, grad in zip(views, grads, strict=True):
            if grad is None:
                absent.append(view)
            elif not is_view_at(grad, view):
                shares_memory = address_of(grad) == address_of(view)  # such as a transposed view
                copies.append((view, grad.clone() if shares_memory else grad))
        if absent:
            torch._foreach_zero_(absent)
        if copies:
            torch._foreach_copy_([view for view, _ in copies], [grad for _, grad in copies])
        return whole

    def start_reduce(self, whole: Tensor, tag: CommTag) -> Pending[Tensor]:
        """Launch the reduction of gradient buffers over the axes, to this rank's piece.

        Communication: one reduce_scatter over the axes.
        """
        src = self._flat(whole.dtype, (), pending=self.axes)
        dst = self._flat(whole.dtype, self.axes)
        pending = executor(src, dst, transport=self._transport).start([whole], tag=tag)
        return pending.then(itemgetter(0))


# --------------------------------------------------------------------------------------------------


def split_dims(shapes: Sequence[tuple[int, ...]], parts: int) -> tuple[int, ...]:
    """Return the dim along which each tensor of a buffer is split over so many ranks.

    See `FlatBucket.dims`.
    """
    return _dims_and_layout(shapes, None, parts)[0]


def piece_of_rows(shapes: Sequence[tuple[int, ...]], parts: int) -> int:
    """Return the elements of a rank's piece if each tensor is split along dim 0."""
    return _layout_of(shapes, [0] * len(shapes), parts).piece


def _dims_and_layout(
    shapes: Sequence[tuple[int, ...]], fixed: Sequence[int | None] | None, parts: int
) -> tuple[tuple[int, ...], FlatLayout]:
    """Return the dim along which each tensor is split, and the layout of the buffer.

    Dim 1 in place of dim 0 only for stacks of matrices whose dim is not fixed, and as long as there
    is too much padding, that with the longest rows first. Two may have to be split so together, so
    a first one that shortens nothing stays.
    """
    fixed = fixed or [None] * len(shapes)
    dims = [dim or 0 for dim in fixed]
    best = tuple(dims), _layout_of(shapes, dims, parts)
    movable = sorted(
        (
            i
            for i, shape in enumerate(shapes)
            if fixed[i] is None and len(shape) > 2 and shape[1] > shape[0]
        ),
        key=lambda i: math.prod(shapes[i][1:]),
        reverse=True,
    )
    enough = sum(map(math.prod, shapes)) / (1 - _PADDING)
    for i in movable:
        if best[1].length <= enough:
            break
        dims[i] = 1
        layout = _layout_of(shapes, dims, parts)
        if layout.length < best[1].length:
            best = tuple(dims), layout
    return best


def _layout_of(shapes: Sequence[tuple[int, ...]], dims: Sequence[int], parts: int) -> FlatLayout:
    """Return the layout of a buffer of tensors that are stored with the split dim first."""
    stored = [_dim_first(shape, dim) for shape, dim in zip(shapes, dims, strict=True)]
    lengths, rows = (tuple(math.prod(s[i:]) for s in stored) for i in (0, 1))
    rows = tuple(row if length else 0 for length, row in zip(lengths, rows, strict=True))
    return make_flat_layout(lengths, rows, parts)


def _views(buffer: Tensor, places: Sequence[_View]) -> list[Tensor]:
    first = buffer.storage_offset()
    return [
        buffer.as_strided(shape, strides, first + start)
        if math.prod(shape)
        else buffer.new_empty(shape)
        for shape, strides, start in places
    ]


def _dim_first(shape: Sequence[int], dim: int) -> tuple[int, ...]:
    return (shape[dim], *shape[:dim], *shape[dim + 1 :])


def _strides_of_stored(stored: Sequence[int], dim: int) -> tuple[int, ...]:
    """Return the strides of a tensor whose memory has the shape `stored`, its dim `dim` first."""
    return torch.empty(stored, device="meta").movedim(0, dim).stride()


def _rows_by_part(base: Layout, dim: int) -> list[int]:
    """Return the number of rows of each part of a dim, in the order of the axes that split it."""
    axes = base.spec.dims[dim]
    sizes = [base.mesh.size(axis) for axis in axes]
    counts = []
    for places in np.ndindex(*sizes):
        coordinate = [0] * len(base.mesh.shape)
        for axis, place in zip(axes, places, strict=True):
            coordinate[base.mesh.axis_index(axis)] = place
        start, stop = base.box_at(coordinate)[dim]
        counts.append(stop - start)
    return counts
