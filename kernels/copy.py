"""Boxes of a tensor <-> one flat buffer.

    pack:    x ---> [ box 0, row-major | box 1, row-major | ... ]
    unpack:  x <--- [ box 0, row-major | box 1, row-major | ... ]

`compile_pack` and `compile_unpack` take the boxes once, and their results are called many times.
They describe the boxes by as few strided views of the tensor as they find (`box_runs.py`), each of
which is one `copy_`:

1. neighbours whose concatenation is itself a box become that box (chunks of dim 0, or of a dim
   whose outer dims have size 1);
2. equal boxes at a constant step become one view with an extra leading dim, and equal runs of those
   likewise, so W equal boxes along a dim are `(A, W, run) -> (W, A, run)`: one copy, not W.

A pack that is one contiguous view is returned as that view, without a copy. On a GPU everything
else is one launch for all tensors of a bucket (`strided_triton.py`), which also casts and scales.

With `offsets` the boxes can be anywhere in the flat buffer, so that several tensors can share one
(a bucket), here one for two peers:

    a ---> [ a's box 0 |       | a's box 1 |       ]   compile_pack(a.shape, boxes, offsets=[0, 6])
    b ---> [           | b's 0 |           | b's 1 ]   compile_pack(b.shape, boxes, offsets=[4, 10])
"""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from .backend import wants_kernels
from .box import Box, row_major_strides
from .box_runs import BoxRange, box_ranges, check_disjoint, fold, has_gaps, view_of
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

# kernels take the factor as float32
_SCALED = frozenset({torch.float16, torch.bfloat16, torch.float32})


class _BoxCopy:
    """The runs of the boxes of a `Pack` or `Unpack`, and their views in a tensor of given strides.

    Attributes:
        shape: of the tensor that holds the boxes.
        size: elements in the flat buffer, up to the end of the last box.
        copies: number of `copy_` calls if no view can be returned.
        zero_copy: whether the flat buffer is a range of a contiguous tensor of `shape`.
    """

    __slots__ = (
        "_anywhere",
        "_has_gaps",
        "_is_whole",
        "_views",
        "copies",
        "runs",
        "shape",
        "size",
        "zero_copy",
    )

    def __init__(self, shape: Sequence[int], placed: Sequence[BoxRange], anywhere: bool):
        self.shape = tuple(shape)
        self.runs = fold(placed)
        self.size = max([stop for _, stop, _ in placed], default=0)
        self.copies = len(self.runs)
        self._anywhere = anywhere
        self._has_gaps = anywhere and has_gaps(placed)
        self._is_whole = sum([stop - start for start, stop, _ in placed]) == math.prod(self.shape)
        self._views: dict[tuple[int, ...], tuple[View, ...]] = {}
        views = self._views_for(row_major_strides(self.shape))
        self.zero_copy = not views or (
            len(views) == 1 and views[0].strides == views[0].flat_strides == (1,)
        )

    def _views_for(self, strides: tuple[int, ...]) -> tuple[View, ...]:
        return self._views.setdefault(strides, tuple([view_of(run, strides) for run in self.runs]))

    def views(self, x: Tensor) -> tuple[View, ...]:
        """Return the views for a tensor of x's strides, cached by strides."""
        if x.shape != self.shape:
            raise ValueError(
                f"{self!r} was given a tensor of shape {tuple(x.shape)}, not {self.shape}"
            )
        strides = x.stride()
        return self._views.get(strides) or self._views_for(strides)

    def check_flat(self, flat: Tensor) -> None:
        if flat.ndim != 1 or flat.numel() != self.size or not flat.is_contiguous():
            if (
                self._anywhere
                and flat.ndim == 1
                and flat.numel() >= self.size
                and flat.is_contiguous()
            ):
                return
            least = "at least " if self._anywhere else ""
            raise ValueError(
                f"{self!r} needs a contiguous buffer of shape ({least}{self.size},), not one of "
                f"shape {tuple(flat.shape)} and strides {flat.stride()}"
            )

    def __repr__(self) -> str:
        how = "a view where contiguous" if self.zero_copy else ", ".join(map(repr, self.runs))
        return f"{type(self).__name__}({list(self.shape)} <-> [{self.size}]: {how})"


class Pack(_BoxCopy):
    """Writes boxes of a tensor to their places in a flat buffer; made by `compile_pack`."""

    __slots__ = ()

    def __init__(self, shape: Sequence[int], boxes: Sequence[Box], offsets: Sequence[int] | None):
        placed = box_ranges(shape, boxes, offsets)
        if offsets is not None:
            check_disjoint(placed)
        super().__init__(shape, placed, offsets is not None)
        self.zero_copy = self.zero_copy and not self._has_gaps

    def __call__(
        self, x: Tensor, out: Tensor | None = None, *, scale: float | None = None
    ) -> Tensor:
        """`pack(x, out=None, scale=None) -> flat`: write the boxes of x one after the other.

        To `out` (cast to its dtype) if given, else a new tensor or a view of x.

        Elements of `out` between and after the boxes are not written. `scale` is a factor, in
        float32 for 16-bit floats.
        """
        if x.is_conj() or x.is_neg():
            x = x.resolve_conj().resolve_neg()
        views = self.views(x)
        if out is None:
            if self._has_gaps:
                raise ValueError(
                    f"{self!r} leaves gaps in its buffer: pass the buffer to write to as out="
                )
            if (
                len(views) == 1
                and scale is None
                and (views[0].strides == (1,) or not wants_kernels(x.device))
            ):
                sizes, strides, offset, _, _ = views[0]
                part = x.as_strided(sizes, strides, x.storage_offset() + offset).contiguous()
                return part if len(sizes) == 1 else part.view(-1)
            out = x.new_empty(self.size)
        else:
            self.check_flat(out)
        if scale is None and not wants_kernels(x.device):
            _pack_views(x, views, out)
        else:
            _copy([x], [views], out, to_flat=True, scale=scale)
        return out


class Unpack(_BoxCopy):
    """Writes the boxes in a flat buffer to their places in a tensor; made by `compile_unpack`."""

    __slots__ = ()

    def __init__(self, shape: Sequence[int], boxes: Sequence[Box], offsets: Sequence[int] | None):
        super().__init__(shape, box_ranges(shape, boxes, offsets), offsets is not None)

    def __call__(
        self, flat: Tensor, out: Tensor | None = None, *, scale: float | None = None
    ) -> Tensor:
        """`unpack(flat, out=None, scale=None) -> x`: read the boxes of x from a buffer.

        Into `out` (any strides, cast to its dtype) if given; else a new tensor, zero outside of
        the boxes, or a view of `flat` if that has the whole tensor in order. `scale` is a factor,
        in float32 for 16-bit floats.
        """
        self.check_flat(flat)
        if out is None:
            if self.gives_view and scale is None:
                return self._part_of(flat)
            out = self.new(flat)
        if scale is None and not wants_kernels(flat.device):
            _unpack_views(out, self.views(out), flat)
        else:
            _copy([out], [self.views(out)], flat, to_flat=False, scale=scale)
        return out

    @property
    def gives_view(self) -> bool:
        """Whether the result can be a view of the flat buffer."""
        return self.zero_copy and self._is_whole

    def new(self, flat: Tensor) -> Tensor:
        """Return a tensor to unpack to, zero outside of the boxes."""
        return flat.new_empty(self.shape) if self._is_whole else flat.new_zeros(self.shape)

    def _part_of(self, flat: Tensor) -> Tensor:
        """Return the range of `flat` that is the whole tensor, as a view."""
        if flat.numel() != self.size or self._has_gaps:
            start = self.runs[0].start if self.runs else 0
            flat = flat[start : start + math.prod(self.shape)]
        return flat.view(self.shape)


def pack_many(
    packs: Sequence[Pack], tensors: Sequence[Tensor], out: Tensor, scale: float | None = None
) -> Tensor:
    """`pack_many(packs, tensors, out) -> out`: write every tensor's boxes to their places.

    They are cast to out's dtype; one launch on a GPU.
    """
    tensors = [x.resolve_conj().resolve_neg() if x.is_conj() or x.is_neg() else x for x in tensors]
    for pack_one in packs:
        pack_one.check_flat(out)
    _copy(
        tensors,
        [p.views(x) for p, x in zip(packs, tensors, strict=True)],
        out,
        to_flat=True,
        scale=scale,
    )
    return out


def unpack_many(
    unpacks: Sequence[Unpack],
    flat: Tensor,
    outs: Sequence[Tensor] | None = None,
    scale: float | None = None,
) -> list[Tensor]:
    """`unpack_many(unpacks, flat, outs=None) -> tensors`: read all of them from one buffer.

    One launch on a GPU.

    Without `outs` the results are new tensors, or views of `flat` for tensors that it has in order.
    """
    if len(unpacks) == 1:
        return [unpacks[0](flat, None if outs is None else outs[0], scale=scale)]
    for unpack_one in unpacks:
        unpack_one.check_flat(flat)
    if outs is not None:
        done, copied = list(outs), list(range(len(unpacks)))
    else:
        copied = [i for i, u in enumerate(unpacks) if scale is not None or not u.gives_view]
        done = [u.new(flat) if i in set(copied) else u(flat) for i, u in enumerate(unpacks)]
    chosen = [done[i] for i in copied]
    _copy(chosen, [unpacks[i].views(done[i]) for i in copied], flat, to_flat=False, scale=scale)
    return done


def _copy(
    tensors: Sequence[Tensor],
    views: Sequence[Sequence[View]],
    flat: Tensor,
    *,
    to_flat: bool,
    scale: float | None,
) -> None:
    """Copy between views of tensors and views of a flat buffer, in either direction."""
    if tensors and wants_kernels(flat.device) and _is_for_kernels(tensors, flat, scale):
        for same in _of_one_dtype(tensors):
            _launch([tensors[i] for i in same], [views[i] for i in same], flat, to_flat, scale)
        return
    for x, parts in zip(tensors, views, strict=True):
        if scale is not None:
            _copy_scaled(x, parts, flat, to_flat, scale)
        elif to_flat:
            _pack_views(x, parts, flat)
        else:
            _unpack_views(x, parts, flat)


def _pack_views(x: Tensor, views: Sequence[View], flat: Tensor) -> None:
    start, flat_start = x.storage_offset(), flat.storage_offset()
    for sizes, strides, offset, flat_strides, flat_offset in views:
        part = flat.as_strided(sizes, flat_strides, flat_start + flat_offset)
        part.copy_(x.as_strided(sizes, strides, start + offset))


def _unpack_views(x: Tensor, views: Sequence[View], flat: Tensor) -> None:
    start, flat_start = x.storage_offset(), flat.storage_offset()
    for sizes, strides, offset, flat_strides, flat_offset in views:
        part = x.as_strided(sizes, strides, start + offset)
        part.copy_(flat.as_strided(sizes, flat_strides, flat_start + flat_offset))


def _copy_scaled(
    x: Tensor, views: Sequence[View], flat: Tensor, to_flat: bool, scale: float
) -> None:
    start, flat_start = x.storage_offset(), flat.storage_offset()
    for sizes, strides, offset, flat_strides, flat_offset in views:
        view = x.as_strided(sizes, strides, start + offset)
        flat_view = flat.as_strided(sizes, flat_strides, flat_start + flat_offset)
        source, target = (view, flat_view) if to_flat else (flat_view, view)
        target.copy_(scaled(source, scale))


def _of_one_dtype(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Return the tensors' indices grouped by dtype: a launch has one."""
    by_dtype: dict[torch.dtype, list[int]] = {}
    for i, x in enumerate(tensors):
        by_dtype.setdefault(x.dtype, []).append(i)
    return list(by_dtype.values())


def scaled(x: Tensor, scale: float) -> Tensor:
    """Return x * scale; for 16-bit floats in float32, not rounded."""
    return widened(x) * scale


def widened(x: Tensor) -> Tensor:
    """Return 16-bit floats as float32, other tensors unchanged."""
    return x.float() if x.is_floating_point() and x.itemsize < 4 else x


def _is_for_kernels(tensors: Sequence[Tensor], flat: Tensor, scale: float | None) -> bool:
    """Return whether kernels support this copy.

    They copy every dtype, but cast, scale and sum only those in which they equal torch.
    """
    # a lazy conjugate or negative: its memory holds other numbers
    if any(x.is_conj() or x.is_neg() for x in (*tensors, flat)):
        return False
    dtypes = {flat.dtype, *(x.dtype for x in tensors)}
    if scale is None:
        return len(dtypes) == 1 or dtypes <= COMPUTED
    return dtypes <= _SCALED


def _launch(
    tensors: Sequence[Tensor],
    views: Sequence[Sequence[View]],
    flat: Tensor,
    to_flat: bool,
    scale: float | None,
) -> None:
    from .strided_triton import launch  # imports triton

    halved = tensors[0].dtype.itemsize == 16
    if halved:
        tensors, flat = [torch.view_as_real(x) for x in tensors], torch.view_as_real(flat).view(-1)
    itemsizes = (
        (tensors[0].itemsize, flat.itemsize) if to_flat else (flat.itemsize, tensors[0].itemsize)
    )
    raw = tensors[0].dtype == flat.dtype and scale is None
    aligned = alignment((*tensors, flat))

    def make() -> list[Table]:
        placed = [
            PlacedView(i, _halves(view) if halved else view)
            for i, parts in enumerate(views)
            for view in parts
        ]
        return make_tables(placed, to_flat, itemsizes, aligned, raw)

    ours = tensors[0] if len(tensors) == 1 else list(tensors)
    for table in cached_tables(views, (halved, to_flat, itemsizes, aligned, raw), make):
        launch(table, *((ours, flat) if to_flat else (flat, ours)), scale=scale)


def _halves(view: View) -> View:
    """Return the view of a complex128 tensor as one of float64, with one more dim of size 2."""
    double = [tuple([2 * s for s in strides]) for strides in (view.strides, view.flat_strides)]
    sizes, strides, flat_strides = merge_views((*view.sizes, 2), (*double[0], 1), (*double[1], 1))
    return View(sizes, strides, 2 * view.offset, flat_strides, 2 * view.flat_offset)


def compile_pack(
    shape: Sequence[int], boxes: Sequence[Box], offsets: Sequence[int] | None = None
) -> Pack:
    """`compile_pack(shape, boxes, offsets=None) -> pack`: compile how to pack.

    The result is a `Callable[[Tensor, out=None], flat]`.

    Boxes may be empty, overlap or repeat. The result is contiguous and 1-D; it may be a view of the
    input, so do not write to it.

    Args:
        shape: of the tensors that will be packed.
        boxes: what to pack.
        offsets: where each box starts in the flat buffer, in elements; consecutive by default. With
            offsets `out` may be longer than needed, and must be given if the boxes leave gaps.

    >>> columns = compile_pack((2, 4), [((0, 2), (0, 2)), ((0, 2), (2, 4))])
    >>> columns
    Pack([2, 4] <-> [8]: 2 x [2, 2] at [0, 0])
    >>> columns(torch.arange(8).view(2, 4)).tolist()
    [0, 1, 4, 5, 2, 3, 6, 7]

    Raises:
        ValueError: a box is not inside `shape`, offsets are negative, not one for each box, or make
            boxes overlap in the flat buffer.
    """
    return Pack(shape, boxes, offsets)


def compile_unpack(
    shape: Sequence[int], boxes: Sequence[Box], offsets: Sequence[int] | None = None
) -> Unpack:
    """`compile_unpack(shape, boxes, offsets=None) -> unpack`: compile the inverse of a pack.

    The result is a `Callable[[flat, out=None], Tensor]`.

    Boxes may be empty but not overlap (in the flat buffer they may: then some elements are read
    more than once). With offsets, `flat` may be longer than needed.

    Raises:
        ValueError: a box is not inside `shape`, offsets are negative or not one for each box.
    """
    return Unpack(shape, boxes, offsets)


_cached_pack: Callable[..., Pack] = lru_cache(maxsize=1024)(compile_pack)
_cached_unpack: Callable[..., Unpack] = lru_cache(maxsize=1024)(compile_unpack)


def pack(x: Tensor, boxes: Sequence[Box], out: Tensor | None = None) -> Tensor:
    """`pack(x, boxes, out=None) -> flat`: the boxes of x, row-major, one after the other."""
    return _cached_pack(tuple(x.shape), tuple(boxes))(x, out)


def unpack(flat: Tensor, boxes: Sequence[Box], out: Tensor) -> Tensor:
    """`unpack(flat, boxes, out) -> out`: the boxes of `out` from `flat`, as `pack` wrote them."""
    return _cached_unpack(tuple(out.shape), tuple(boxes))(flat, out)
