"""Describe the boxes of a copy as few strided views.

Join neighbours, fold equal boxes at a constant step into one run.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from operator import itemgetter

from .box import Box, box_origin, box_shape, box_size, check_boxes, row_major_strides
from .strided_views import View, merge_views

Delta = tuple[int, ...]
BoxRange = tuple[int, int, Box]  # where in the flat buffer it starts and stops, the box


@dataclass(frozen=True, slots=True)
class Run:
    """Equal boxes at constant steps.

    The box at digits (i, j, ...) is the first one moved by i * step0 + j * step1 ...

    Attributes:
        first: the first box.
        start: where it begins in the flat buffer.
        levels: (count, step per dim, step in the flat buffer), outermost first; () for a single
            box.
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


def _concatenation(a: Box, b: Box) -> Box | None:
    """Return the box with a's elements followed by b's, both row-major; None if there is none."""
    for dim, ((a_start, a_stop), (b_start, b_stop)) in enumerate(zip(a, b, strict=True)):
        if (a_start, a_stop) != (b_start, b_stop):
            fits = a_stop == b_start and a[dim + 1 :] == b[dim + 1 :]
            return (*a[:dim], (a_start, b_stop), *a[dim + 1 :]) if fits else None
        if a_stop - a_start != 1:
            return None
    return None


def _join_neighbours(boxes: Iterable[BoxRange]) -> list[Run]:
    """Return the same elements at the same places of the buffer, in fewer boxes."""
    done: list[BoxRange] = []
    for start, stop, box in boxes:
        while (
            done
            and done[-1][1] == start
            and (joined := _concatenation(done[-1][2], box)) is not None
        ):
            start, box = done.pop()[0], joined
        done.append((start, stop, box))
    return [Run(box, start) for start, _, box in done]


def _step(a: Run, b: Run) -> tuple[Delta, int] | None:
    """Return the distance from a to b if otherwise equal and a stride of torch's, not negative."""
    if a.levels != b.levels or box_shape(a.first) != box_shape(b.first):
        return None
    step = tuple([y - x for x, y in zip(box_origin(a.first), box_origin(b.first), strict=True)])
    return (step, b.start - a.start) if min(step, default=0) >= 0 else None


def _fold_once(runs: Sequence[Run]) -> list[Run]:
    """Merge neighbours at a constant step into one run with one more level."""
    folded, i = [], 0
    while i < len(runs):
        count, step = 1, None
        while i + count < len(runs):
            next_step = _step(runs[i + count - 1], runs[i + count])
            if next_step is None or (step is not None and next_step != step):
                break
            step, count = next_step, count + 1
        first = runs[i]
        folded.append(
            first if step is None else replace(first, levels=((count, *step), *first.levels))
        )
        i += count
    return folded


def fold(boxes: Iterable[BoxRange]) -> tuple[Run, ...]:
    """Return the boxes, ascending in the buffer, as few runs."""
    runs = _join_neighbours(boxes)
    while len(folded := _fold_once(runs)) < len(runs):
        runs = folded
    return tuple(runs)


def box_ranges(
    shape: Sequence[int], boxes: Sequence[Box], offsets: Sequence[int] | None
) -> list[BoxRange]:
    """Return the boxes that are not empty, ascending in the buffer."""
    check_boxes(shape, boxes)
    sizes = [box_size(box) for box in boxes]
    if offsets is None:
        offsets = list(accumulate(sizes, initial=0))
    elif len(offsets) != len(boxes) or min(offsets, default=0) < 0:
        raise ValueError(
            f"{len(boxes)} boxes with the offsets {list(offsets)}: give one per box, each >= 0, in "
            "elements of the flat buffer"
        )
    placed = [
        (start, start + size, box)
        for start, size, box in zip(offsets, sizes, boxes, strict=False)
        if size
    ]
    return sorted(placed, key=itemgetter(0))


def _dot(index: Sequence[int], strides: Sequence[int]) -> int:
    return sum(i * s for i, s in zip(index, strides, strict=True))


def view_of(run: Run, strides: Sequence[int]) -> View:
    """Return the run's elements as a view of a tensor of these strides, and of the flat buffer."""
    shape = box_shape(run.first)
    sizes, steps, flat_steps = merge_views(
        (*(count for count, _, _ in run.levels), *shape),
        (*(_dot(step, strides) for _, step, _ in run.levels), *strides),
        (*(step for _, _, step in run.levels), *row_major_strides(shape)),
    )
    return View(sizes, steps, _dot(box_origin(run.first), strides), flat_steps, run.start)


def has_gaps(placed: Sequence[BoxRange]) -> bool:
    """Return whether boxes (ascending) do not fill the buffer from 0 on without gaps."""
    stops = [0, *(stop for _, stop, _ in placed)]
    return any(start != stop for (start, _, _), stop in zip(placed, stops, strict=False))


def check_disjoint(placed: Sequence[BoxRange]) -> None:
    for (start, stop, box), (next_start, _, next_box) in pairwise(placed):
        if stop > next_start:
            raise ValueError(
                f"box {box} takes {start}:{stop} of the flat buffer, and box {next_box} starts at "
                f"{next_start}: give offsets that keep them apart"
            )
