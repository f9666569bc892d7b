"""Boxes of a tensor <-> one flat buffer, in torch operations.

    pack:    x ---> [ box 0, row-major | box 1, row-major | ... ]
    unpack:  x <--- [ box 0, row-major | box 1, row-major | ... ]

The boxes are decided once (`compile_pack`, `compile_unpack`) and the result is called many times. Compiling writes the
boxes as the fewest strided views of the tensor that it finds, each of which is one `copy_`:

1. neighbours whose concatenation is itself a box become that box (chunks of dim 0, or of a dim with nothing outside);
2. equal boxes at a constant step become one view with an extra leading dim, and equal runs of those likewise, so
   W equal boxes along a dim are `(A, W, run) -> (W, A, run)`: one copy, not W.

A pack that is one view which happens to be contiguous is returned as that view: nothing is copied or launched.

With `offsets` the boxes lie anywhere in the flat buffer, so that several tensors can share one (a bucket), here one that
goes to two peers:

    a ---> [ a's box 0 |         | a's box 1 |         ]     pack_a = compile_pack(a.shape, boxes, offsets=[0, 6])
    b ---> [           | b's 0   |           | b's 1   ]     pack_b = compile_pack(b.shape, boxes, offsets=[4, 10])
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, pairwise
from operator import itemgetter
from typing import NamedTuple

from torch import Tensor

from .box import Box, box_origin, box_shape, box_size, check_boxes, row_major_strides

Delta = tuple[int, ...]
_Placed = tuple[int, int, Box]  # where in the flat buffer it starts and stops, the box


@dataclass(frozen=True, slots=True)
class Run:
    """Equal boxes at constant steps: the box at digits (i, j, ...) is the first one moved by i * step0 + j * step1 ...

    Attributes:
        first: the first box.
        start: where it begins in the flat buffer.
        levels: (how many, step per dim, step in the flat buffer), outermost first; none for a lone box.
    """

    first: Box
    start: int
    levels: tuple[tuple[int, Delta, int], ...] = ()

    @property
    def size(self) -> int:
        return math.prod(count for count, _, _ in self.levels) * box_size(self.first)

    def __repr__(self) -> str:
        counts = "".join(f"{count} x " for count, _, _ in self.levels)
        return f"{counts}{list(box_shape(self.first))} at {list(box_origin(self.first))}"


class View(NamedTuple):
    """One `copy_`: the same elements as a strided view of the tensor and of the flat buffer."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    flat_strides: tuple[int, ...]
    flat_offset: int


def _joined(a: Box, b: Box) -> Box | None:
    """The box that is a's elements followed by b's, both row-major; None where there is no such box."""
    for dim, ((a_start, a_stop), (b_start, b_stop)) in enumerate(zip(a, b, strict=True)):
        if (a_start, a_stop) != (b_start, b_stop):
            fits = a_stop == b_start and a[dim + 1 :] == b[dim + 1 :]
            return (*a[:dim], (a_start, b_stop), *a[dim + 1 :]) if fits else None
        if a_stop - a_start != 1:
            return None
    return None


def _join_neighbours(boxes: Iterable[_Placed]) -> list[Run]:
    """The same elements in the same places of the buffer, in fewer boxes."""
    done: list[_Placed] = []
    for start, stop, box in boxes:
        while done and done[-1][1] == start and (joined := _joined(done[-1][2], box)) is not None:
            start, box = done.pop()[0], joined
        done.append((start, stop, box))
    return [Run(box, start) for start, _, box in done]


def _step(a: Run, b: Run) -> tuple[Delta, int] | None:
    """How far b lies from a, where they differ by nothing else and torch can express it (no negative stride)."""
    if a.levels != b.levels or box_shape(a.first) != box_shape(b.first):
        return None
    step = tuple([y - x for x, y in zip(box_origin(a.first), box_origin(b.first), strict=True)])
    return (step, b.start - a.start) if min(step, default=0) >= 0 else None


def _fold_once(runs: Sequence[Run]) -> list[Run]:
    """Neighbours at a constant step become one run with one more level."""
    folded, i = [], 0
    while i < len(runs):
        count, step = 1, None
        while i + count < len(runs):
            next_step = _step(runs[i + count - 1], runs[i + count])
            if next_step is None or (step is not None and next_step != step):
                break
            step, count = next_step, count + 1
        first = runs[i]
        folded.append(first if step is None else replace(first, levels=((count, *step), *first.levels)))
        i += count
    return folded


def _fold(boxes: Iterable[_Placed]) -> tuple[Run, ...]:
    """The boxes, ascending in the buffer, as few runs."""
    runs = _join_neighbours(boxes)
    while len(folded := _fold_once(runs)) < len(runs):
        runs = folded
    return tuple(runs)


def _placed(shape: Sequence[int], boxes: Sequence[Box], offsets: Sequence[int] | None) -> list[_Placed]:
    """The boxes that are not empty, ascending in the buffer."""
    check_boxes(shape, boxes)
    sizes = [box_size(box) for box in boxes]
    if offsets is None:
        offsets = list(accumulate(sizes, initial=0))
    elif len(offsets) != len(boxes) or min(offsets, default=0) < 0:
        raise ValueError(
            f"{len(boxes)} boxes with the offsets {list(offsets)}: give one for each box, 0 or more, in elements of the "
            "flat buffer"
        )
    placed = [(start, start + size, box) for start, size, box in zip(offsets, sizes, boxes, strict=False) if size]
    return sorted(placed, key=itemgetter(0))


def _dot(index: Sequence[int], strides: Sequence[int]) -> int:
    return sum(i * s for i, s in zip(index, strides, strict=True))


def _view(run: Run, strides: Sequence[int]) -> View:
    """The run's elements in a tensor of these strides, and in the flat buffer."""
    shape = box_shape(run.first)
    sizes, steps, flat_steps = _merge_dims(
        (*(count for count, _, _ in run.levels), *shape),
        (*(_dot(step, strides) for _, step, _ in run.levels), *strides),
        (*(step for _, _, step in run.levels), *row_major_strides(shape)),
    )
    return View(sizes, steps, _dot(box_origin(run.first), strides), flat_steps, run.start)


def _merge_dims(sizes: Sequence[int], strides: Sequence[int], flat_strides: Sequence[int]) -> tuple[Delta, ...]:
    """The same elements on both sides in the fewest dims (but one), as `box.merge_dims` does for one side."""
    merged: list[tuple[int, int, int]] = []
    for size, stride, flat_stride in zip(sizes, strides, flat_strides, strict=True):
        if size == 1:
            continue
        if merged and merged[-1][1:] == (size * stride, size * flat_stride):
            size *= merged.pop()[0]
        merged.append((size, stride, flat_stride))
    return tuple(zip(*(merged or [(1, 1, 1)]), strict=True))


class _BoxCopy:
    """What `Pack` and `Unpack` share: the runs of the boxes, and their views in a tensor of given strides.

    Attributes:
        shape: of the tensor that holds the boxes.
        size: elements in the flat buffer, up to the end of the last box.
        copies: how many `copy_` calls it takes when nothing can be had as a view.
        zero_copy: the boxes in the flat buffer are a range of a contiguous tensor of `shape`.
    """

    __slots__ = ("_anywhere", "_has_gaps", "_is_whole", "_views", "copies", "runs", "shape", "size", "zero_copy")

    def __init__(self, shape: Sequence[int], placed: Sequence[_Placed], anywhere: bool):
        self.shape = tuple(shape)
        self.runs = _fold(placed)
        self.size = max([stop for _, stop, _ in placed], default=0)
        self.copies = len(self.runs)
        self._anywhere = anywhere
        self._has_gaps = anywhere and _has_gaps(placed)
        self._is_whole = sum([stop - start for start, stop, _ in placed]) == math.prod(self.shape)
        self._views: dict[tuple[int, ...], tuple[View, ...]] = {}
        views = self._views_for(row_major_strides(self.shape))
        self.zero_copy = not views or (len(views) == 1 and views[0].strides == views[0].flat_strides == (1,))

    def _views_for(self, strides: tuple[int, ...]) -> tuple[View, ...]:
        return self._views.setdefault(strides, tuple([_view(run, strides) for run in self.runs]))

    def views(self, x: Tensor) -> tuple[View, ...]:
        """The views for a tensor of x's strides (made once for each)."""
        if x.shape != self.shape:
            raise ValueError(f"{self!r} was given a tensor of shape {tuple(x.shape)}, not {self.shape}")
        strides = x.stride()
        return self._views.get(strides) or self._views_for(strides)

    def check_flat(self, flat: Tensor) -> None:
        if flat.ndim != 1 or flat.numel() != self.size or not flat.is_contiguous():
            if self._anywhere and flat.ndim == 1 and flat.numel() >= self.size and flat.is_contiguous():
                return
            least = "at least " if self._anywhere else ""
            raise ValueError(
                f"{self!r} needs a contiguous buffer of shape ({least}{self.size},), "
                f"not one of shape {tuple(flat.shape)} and strides {flat.stride()}"
            )

    def __repr__(self) -> str:
        how = "a view where contiguous" if self.zero_copy else ", ".join(map(repr, self.runs))
        return f"{type(self).__name__}({list(self.shape)} <-> [{self.size}]: {how})"


def _has_gaps(placed: Sequence[_Placed]) -> bool:
    """Whether boxes (ascending) are not exactly one after the other from 0 on."""
    stops = [0, *(stop for _, stop, _ in placed)]
    return any(start != stop for (start, _, _), stop in zip(placed, stops, strict=False))


class Pack(_BoxCopy):
    """Boxes of a tensor written to their places in a flat buffer: what `compile_pack` returns."""

    __slots__ = ()

    def __init__(self, shape: Sequence[int], boxes: Sequence[Box], offsets: Sequence[int] | None):
        placed = _placed(shape, boxes, offsets)
        if offsets is not None:
            _check_apart(placed)
        super().__init__(shape, placed, offsets is not None)
        self.zero_copy = self.zero_copy and not self._has_gaps

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """`pack(x, out=None) -> flat`: in `out` (cast to its dtype) where given, else new or a view of x.

        What lies in `out` between and behind the boxes stays as it is.
        """
        if x.is_conj() or x.is_neg():
            x = x.resolve_conj().resolve_neg()
        views = self.views(x)
        start = x.storage_offset()
        if out is None:
            if self._has_gaps:
                raise ValueError(f"{self!r} leaves gaps in its buffer: give it the buffer to write to, as out=")
            if len(views) == 1:
                sizes, strides, offset, _, _ = views[0]
                part = x.as_strided(sizes, strides, start + offset).contiguous()
                return part if len(sizes) == 1 else part.view(-1)
            out = x.new_empty(self.size)
        else:
            self.check_flat(out)
        flat_start = out.storage_offset()
        for sizes, strides, offset, flat_strides, flat_offset in views:
            part = out.as_strided(sizes, flat_strides, flat_start + flat_offset)
            part.copy_(x.as_strided(sizes, strides, start + offset))
        return out


class Unpack(_BoxCopy):
    """The boxes in a flat buffer put in their places in a tensor: what `compile_unpack` returns."""

    __slots__ = ()

    def __init__(self, shape: Sequence[int], boxes: Sequence[Box], offsets: Sequence[int] | None):
        super().__init__(shape, _placed(shape, boxes, offsets), offsets is not None)

    def __call__(self, flat: Tensor, out: Tensor | None = None) -> Tensor:
        """`unpack(flat, out=None) -> x`: in `out` (any strides, cast to its dtype) where given.

        Else in a new tensor with zeros where no box lies, or a view of `flat` where that is the whole tensor in order.
        """
        self.check_flat(flat)
        if out is None:
            if self.zero_copy and self._is_whole:
                return self._part_of(flat)
            out = flat.new_empty(self.shape) if self._is_whole else flat.new_zeros(self.shape)
        start, flat_start = out.storage_offset(), flat.storage_offset()
        for sizes, strides, offset, flat_strides, flat_offset in self.views(out):
            part = out.as_strided(sizes, strides, start + offset)
            part.copy_(flat.as_strided(sizes, flat_strides, flat_start + flat_offset))
        return out

    def _part_of(self, flat: Tensor) -> Tensor:
        """The range of `flat` that is the whole tensor."""
        if flat.numel() != self.size or self._has_gaps:
            start = self.runs[0].start if self.runs else 0
            flat = flat[start : start + math.prod(self.shape)]
        return flat.view(self.shape)


def _check_apart(placed: Sequence[_Placed]) -> None:
    for (start, stop, box), (next_start, _, next_box) in pairwise(placed):
        if stop > next_start:
            raise ValueError(
                f"box {box} takes {start}:{stop} of the flat buffer, and box {next_box} starts at {next_start}: "
                "give offsets that keep them apart"
            )


def compile_pack(shape: Sequence[int], boxes: Sequence[Box], offsets: Sequence[int] | None = None) -> Pack:
    """`compile_pack(shape, boxes, offsets=None) -> Callable[[Tensor, out=None], flat]`: how to pack, decided once.

    Boxes may be empty, overlap or repeat. The result is contiguous and 1-D; it is a view of the input where that lies
    in one piece, so do not write to it.

    Args:
        shape: of the tensors that will be packed.
        boxes: what to pack.
        offsets: where each box starts in the flat buffer, in elements; by default one after the other. With offsets,
            `out` may be longer than needed, and must be given where the boxes do not fill a buffer exactly.

    >>> columns = compile_pack((2, 4), [((0, 2), (0, 2)), ((0, 2), (2, 4))])
    >>> columns
    Pack([2, 4] <-> [8]: 2 x [2, 2] at [0, 0])
    >>> columns(torch.arange(8).view(2, 4)).tolist()
    [0, 1, 4, 5, 2, 3, 6, 7]

    Raises:
        ValueError: a box does not lie inside `shape`, offsets are negative, not one for each box, or make boxes overlap
            in the flat buffer.
    """
    return Pack(shape, boxes, offsets)


def compile_unpack(shape: Sequence[int], boxes: Sequence[Box], offsets: Sequence[int] | None = None) -> Unpack:
    """`compile_unpack(shape, boxes, offsets=None) -> Callable[[flat, out=None], Tensor]`: reverses `compile_pack`.

    Boxes may be empty but not overlap (in the flat buffer they may: then some elements are read more than once). With
    offsets, `flat` may be longer than needed.

    Raises:
        ValueError: a box does not lie inside `shape`, offsets are negative or not one for each box.
    """
    return Unpack(shape, boxes, offsets)


_cached_pack: Callable[..., Pack] = lru_cache(maxsize=1024)(compile_pack)
_cached_unpack: Callable[..., Unpack] = lru_cache(maxsize=1024)(compile_unpack)


def pack(x: Tensor, boxes: Sequence[Box], out: Tensor | None = None) -> Tensor:
    """`pack(x, boxes, out=None) -> flat`: the boxes of x, each row-major, one after the other. See `compile_pack`."""
    return _cached_pack(tuple(x.shape), tuple(boxes))(x, out)


def unpack(flat: Tensor, boxes: Sequence[Box], out: Tensor) -> Tensor:
    """`unpack(flat, boxes, out) -> out`: the boxes of `out` read from `flat`, as `pack` wrote them."""
    return _cached_unpack(tuple(out.shape), tuple(boxes))(flat, out)
