"""Boxes of a tensor <-> one flat buffer, in torch operations.

    pack:    x ---> [ box 0, row-major | box 1, row-major | ... ]
    unpack:  x <--- [ box 0, row-major | box 1, row-major | ... ]

The boxes are decided once (`compile_pack`, `compile_unpack`) and the result is called many times. Compiling writes the
boxes as the fewest strided views of the tensor that it finds, each of which is one `copy_`:

1. neighbours whose concatenation is itself a box become that box (chunks of dim 0, or of a dim with nothing outside);
2. equal boxes at a constant step become one view with an extra leading dim, and equal runs of those likewise, so
   W equal boxes along a dim are `(A, W, run) -> (W, A, run)`: one copy, not W.

A pack that is one view which happens to be contiguous is returned as that view: nothing is copied or launched.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from torch import Tensor

from .box import Box, box_origin, box_shape, box_size, check_boxes, merge_dims, row_major_strides

Delta = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Run:
    """Equal boxes at constant steps: the box at digits (i, j, ...) is the first one moved by i * step0 + j * step1 ...

    Attributes:
        first: the first box.
        levels: (how many, step per dim), outermost first; none for a lone box.
    """

    first: Box
    levels: tuple[tuple[int, Delta], ...] = ()

    @property
    def size(self) -> int:
        return math.prod(count for count, _ in self.levels) * box_size(self.first)

    def __repr__(self) -> str:
        counts = "".join(f"{count} x " for count, _ in self.levels)
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


def _join_neighbours(boxes: Iterable[Box]) -> list[Box]:
    """The same elements in the same order, in fewer boxes; empty boxes are dropped."""
    done: list[Box] = []
    for box in boxes:
        if box_size(box) == 0:
            continue
        while done and (joined := _joined(done[-1], box)) is not None:
            done.pop()
            box = joined
        done.append(box)
    return done


def _step(a: Run, b: Run) -> Delta | None:
    """How far b lies from a, where they differ by nothing else and torch can express it (no negative stride)."""
    if a.levels != b.levels or box_shape(a.first) != box_shape(b.first):
        return None
    step = tuple([y - x for x, y in zip(box_origin(a.first), box_origin(b.first), strict=True)])
    return step if min(step, default=0) >= 0 else None


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
        folded.append(first if step is None else replace(first, levels=((count, step), *first.levels)))
        i += count
    return folded


def _fold(boxes: Iterable[Box]) -> tuple[Run, ...]:
    """The boxes, in their order, as few runs."""
    runs = [Run(box) for box in _join_neighbours(boxes)]
    while len(folded := _fold_once(runs)) < len(runs):
        runs = folded
    return tuple(runs)


def _dot(index: Sequence[int], strides: Sequence[int]) -> int:
    return sum(i * s for i, s in zip(index, strides, strict=True))


def _view(run: Run, strides: Sequence[int], flat_offset: int) -> View:
    """The run's elements in a tensor of these strides, and in the flat buffer from `flat_offset` on."""
    sizes, steps = merge_dims(
        (*(count for count, _ in run.levels), *box_shape(run.first)),
        (*(_dot(step, strides) for _, step in run.levels), *strides),
    )
    return View(sizes, steps, _dot(box_origin(run.first), strides), row_major_strides(sizes), flat_offset)


class _BoxCopy:
    """What `Pack` and `Unpack` share: the runs of the boxes, and their views in a tensor of given strides.

    Attributes:
        shape: of the tensor that holds the boxes.
        size: elements in the flat buffer.
        copies: how many `copy_` calls it takes when nothing can be had as a view.
        zero_copy: the flat buffer is a range of a contiguous tensor of `shape`.
    """

    __slots__ = ("_views", "copies", "runs", "shape", "size", "zero_copy")

    def __init__(self, shape: Sequence[int], boxes: Sequence[Box]):
        check_boxes(shape, boxes)
        self.shape = tuple(shape)
        self.runs = _fold(boxes)
        self.size = sum(run.size for run in self.runs)
        self.copies = len(self.runs)
        self._views: dict[tuple[int, ...], tuple[View, ...]] = {}
        views = self._views_for(row_major_strides(self.shape))
        self.zero_copy = not views or (len(views) == 1 and views[0].strides == (1,))

    def _views_for(self, strides: tuple[int, ...]) -> tuple[View, ...]:
        views, offset = [], 0
        for run in self.runs:
            views.append(_view(run, strides, offset))
            offset += run.size
        return self._views.setdefault(strides, tuple(views))

    def views(self, x: Tensor) -> tuple[View, ...]:
        """The views for a tensor of x's strides (made once for each)."""
        if x.shape != self.shape:
            raise ValueError(f"{self!r} was given a tensor of shape {tuple(x.shape)}, not {self.shape}")
        strides = x.stride()
        return self._views.get(strides) or self._views_for(strides)

    def check_flat(self, flat: Tensor) -> None:
        if flat.ndim != 1 or flat.numel() != self.size or not flat.is_contiguous():
            raise ValueError(
                f"{self!r} needs a contiguous buffer of shape ({self.size},), "
                f"not one of shape {tuple(flat.shape)} and strides {flat.stride()}"
            )

    def __repr__(self) -> str:
        how = "a view where contiguous" if self.zero_copy else ", ".join(map(repr, self.runs))
        return f"{type(self).__name__}({list(self.shape)} <-> [{self.size}]: {how})"


class Pack(_BoxCopy):
    """Boxes of a tensor, one after the other in a flat buffer: what `compile_pack` returns."""

    __slots__ = ()

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """`pack(x, out=None) -> flat`: in `out` (cast to its dtype) where given, else new or a view of x."""
        if x.is_conj() or x.is_neg():
            x = x.resolve_conj().resolve_neg()
        views = self.views(x)
        start = x.storage_offset()
        if out is None:
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

    def __call__(self, flat: Tensor, out: Tensor | None = None) -> Tensor:
        """`unpack(flat, out=None) -> x`: in `out` (any strides, cast to its dtype) where given.

        Else in a new tensor with zeros where no box lies, or a view of `flat` where that is the whole tensor in order.
        """
        self.check_flat(flat)
        if out is None:
            whole = self.size == math.prod(self.shape)
            if whole and self.zero_copy:
                return flat.view(self.shape)
            out = flat.new_empty(self.shape) if whole else flat.new_zeros(self.shape)
        start, flat_start = out.storage_offset(), flat.storage_offset()
        for sizes, strides, offset, flat_strides, flat_offset in self.views(out):
            part = out.as_strided(sizes, strides, start + offset)
            part.copy_(flat.as_strided(sizes, flat_strides, flat_start + flat_offset))
        return out


def compile_pack(shape: Sequence[int], boxes: Sequence[Box]) -> Pack:
    """`compile_pack(shape, boxes) -> Callable[[Tensor, out=None], flat]`: how to pack these boxes, decided once.

    Boxes may be empty, overlap or repeat. The result is contiguous and 1-D; it is a view of the input where that lies
    in one piece, so do not write to it.

    >>> columns = compile_pack((2, 4), [((0, 2), (0, 2)), ((0, 2), (2, 4))])
    >>> columns
    Pack([2, 4] <-> [8]: 2 x [2, 2] at [0, 0])
    >>> columns(torch.arange(8).view(2, 4)).tolist()
    [0, 1, 4, 5, 2, 3, 6, 7]

    Raises:
        ValueError: a box does not lie inside `shape`.
    """
    return Pack(shape, boxes)


def compile_unpack(shape: Sequence[int], boxes: Sequence[Box]) -> Unpack:
    """`compile_unpack(shape, boxes) -> Callable[[flat, out=None], Tensor]`: the reverse of `compile_pack`.

    Boxes may be empty but not overlap.

    Raises:
        ValueError: a box does not lie inside `shape`.
    """
    return Unpack(shape, boxes)


_cached_pack: Callable[..., Pack] = lru_cache(maxsize=1024)(compile_pack)
_cached_unpack: Callable[..., Unpack] = lru_cache(maxsize=1024)(compile_unpack)


def pack(x: Tensor, boxes: Sequence[Box], out: Tensor | None = None) -> Tensor:
    """`pack(x, boxes, out=None) -> flat`: the boxes of x, each row-major, one after the other. See `compile_pack`."""
    return _cached_pack(tuple(x.shape), tuple(boxes))(x, out)


def unpack(flat: Tensor, boxes: Sequence[Box], out: Tensor) -> Tensor:
    """`unpack(flat, boxes, out) -> out`: the boxes of `out` read from `flat`, as `pack` wrote them."""
    return _cached_unpack(tuple(out.shape), tuple(boxes))(flat, out)
