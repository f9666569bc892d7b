"""A box: one half-open interval per tensor dim, `((start, stop), ...)`; `()` of a 0-d tensor."""

import math
from collections.abc import Sequence

Box = tuple[tuple[int, int], ...]


def full_box(shape: Sequence[int]) -> Box:
    """`full_box(shape) -> Box`: the box of the whole tensor."""
    return tuple((0, size) for size in shape)


def box_shape(box: Box) -> tuple[int, ...]:
    """`box_shape(box) -> shape`: the size of the box in each dim."""
    return tuple([stop - start for start, stop in box])


def box_origin(box: Box) -> tuple[int, ...]:
    """`box_origin(box) -> index`: the index of the box's first element."""
    return tuple([start for start, _ in box])


def box_size(box: Box) -> int:
    """`box_size(box) -> int`: the number of elements in the box (1 for the 0-d box)."""
    return math.prod([stop - start for start, stop in box])


def intersect(a: Box, b: Box) -> Box | None:
    """`intersect(a, b) -> Box | None`: the elements in both boxes, None if there are none.

    The intersection of 0-d boxes is the 0-d box.
    """
    common = []
    for (a_start, a_stop), (b_start, b_stop) in zip(a, b, strict=True):
        start = a_start if a_start > b_start else b_start
        stop = a_stop if a_stop < b_stop else b_stop
        if start >= stop:
            return None
        common.append((start, stop))
    return tuple(common)


def overlap(a: Box, b: Box) -> int:
    """`overlap(a, b) -> int`: the number of elements in both boxes."""
    common = intersect(a, b)
    return 0 if common is None else box_size(common)


def shift(box: Box, origin: Sequence[int]) -> Box:
    """`shift(box, origin) -> Box`: the box in the coordinates of another tensor.

    Its first element is at `origin`.

    A rank that holds global rows 4:8 keeps global rows 5:7 at local rows 1:3:

    >>> shift(((5, 7), (0, 3)), (4, 0))
    ((1, 3), (0, 3))
    """
    return tuple([(start - o, stop - o) for (start, stop), o in zip(box, origin, strict=True)])


def slices(box: Box, origin: Sequence[int] | None = None) -> tuple[slice, ...]:
    """`slices(box, origin=None) -> index`: the index with which `x[slices(box)]` is the box of x.

    With `origin`, x is a part whose first element is there (see `shift`).
    """
    if origin is not None:
        box = shift(box, origin)
    return tuple([slice(start, stop) for start, stop in box])


def row_major_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """`row_major_strides(shape) -> strides`: of a contiguous tensor, in elements.

    >>> row_major_strides((2, 3, 4))
    (12, 4, 1)
    """
    strides, stride = [], 1
    for size in reversed(shape):
        strides.append(stride)
        stride *= size
    return tuple(reversed(strides))


def merge_dims(
    sizes: Sequence[int], strides: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """`merge_dims(sizes, strides) -> (sizes, strides)`: the same elements in the fewest dims.

    In the same order; at least one dim.

    >>> merge_dims((2, 1, 3, 4), (24, 24, 4, 1))
    ((2, 12), (24, 1))
    """
    merged: list[tuple[int, int]] = []
    for size, stride in zip(sizes, strides, strict=True):
        if size == 1:
            continue
        if merged and merged[-1][1] == size * stride:
            size *= merged.pop()[0]
        merged.append((size, stride))
    merged = merged or [(1, 1)]
    return tuple([size for size, _ in merged]), tuple([stride for _, stride in merged])


def check_boxes(shape: Sequence[int], boxes: Sequence[Box]) -> None:
    """`check_boxes(shape, boxes)`: raise unless every box is inside a tensor of `shape`.

    Raises:
        ValueError: a box has another number of dims than `shape`, a stop before its start, or
            exceeds `shape`.
    """
    for number, box in enumerate(boxes):
        if len(box) != len(shape):
            raise ValueError(
                f"box {number} {box} has {len(box)} dims, but the tensor's shape {tuple(shape)} "
                f"has {len(shape)}"
            )
        for dim, ((start, stop), size) in enumerate(zip(box, shape, strict=True)):
            if not 0 <= start <= stop <= size:
                raise ValueError(
                    f"box {number} {box} spans {start}:{stop} in dim {dim}, which is not inside "
                    f"0:{size} of the tensor of shape {tuple(shape)}"
                )
