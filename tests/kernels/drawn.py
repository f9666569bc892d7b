"""Hypothesis strategies for the tests of kernels: tensors, memory layouts and boxes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from shardmesh.kernels.box import Box, box_size, full_box
from tests.kernels.device import DEVICE

DTYPES = [
    *(torch.bool, torch.uint8, torch.int16, torch.int32, torch.int64),
    *(
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
    ),
    *(torch.complex64, torch.complex128),
]
LAYOUTS = ("contiguous", "transposed", "strided", "inside another")
MAX_ELEMENTS = 3000  # Triton's interpreter is slow

dtypes = st.sampled_from(DTYPES)
layouts = st.sampled_from(LAYOUTS)
shifts = st.sampled_from([0, 1, 2, 4, 8])  # offset of a tensor from an aligned address, in elements
sizes = st.one_of(st.sampled_from([1, 2, 3, 4, 8, 16]), st.integers(0, 40))
shapes = (
    st.lists(sizes, max_size=5).map(tuple).filter(lambda shape: math.prod(shape) <= MAX_ELEMENTS)
)


def chunks(size: int, parts: int) -> list[tuple[int, int]]:
    """Return the intervals of torch.chunk, with empty ones at the end."""
    step = -(-size // parts)
    return [(min(i * step, size), min((i + 1) * step, size)) for i in range(parts)]


@st.composite
def grids(draw: Any, shape: Sequence[int]) -> list[Box]:
    """Draw boxes that tile the tensor: up to two dims split over 1 to 8 ranks, in any order; some
    uneven or empty.
    """
    boxes = [full_box(shape)]
    for dim in draw(st.permutations(range(len(shape))))[:2]:
        cuts = chunks(shape[dim], draw(st.integers(1, 8)))
        boxes = [(*box[:dim], cut, *box[dim + 1 :]) for box in boxes for cut in cuts]
    return boxes


@st.composite
def offsets(draw: Any, boxes: Sequence[Box]) -> list[int] | None:
    """Draw offsets of the boxes in a buffer: contiguous (None), padded to equal lengths, or with
    gaps.
    """
    kind = draw(st.sampled_from(["exact", "padded", "gaps"]))
    if kind == "exact":
        return None
    if kind == "padded":
        longest = max(map(box_size, boxes))
        return [i * longest for i in range(len(boxes))]
    starts, end = [], draw(st.integers(0, 3))
    for box in boxes:
        starts.append(end)
        end += box_size(box) + draw(st.sampled_from([0, 1, 2, 8]))
    return starts


def random_bytes(numel: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    raw = torch.randint(
        0, 256, (numel * dtype.itemsize,), dtype=torch.uint8, generator=torch.manual_seed(seed)
    )
    return (raw & 1 if dtype == torch.bool else raw).view(dtype)


def numbers(numel: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Return numbers of many magnitudes, within the range of every floating-point dtype."""
    generator = torch.manual_seed(seed)
    x = torch.randn(numel, generator=generator, dtype=torch.float64) * 4.0 ** torch.randint(
        -4, 4, (numel,), generator=generator
    )
    return x.to(dtype)


def flat(values: Tensor, shift: int = 0) -> Tensor:
    """Return the values on the device, `shift` elements after an aligned address."""
    memory = torch.zeros(values.numel() + shift, dtype=values.dtype, device=DEVICE)
    return memory[shift:].copy_(values)


def laid_out(values: Tensor, shape: Sequence[int], layout: str, shift: int = 0) -> Tensor:
    """Return the values as a tensor of this shape and memory layout."""
    return empty(shape, values.dtype, layout, shift).copy_(values.view(shape))


def empty(shape: Sequence[int], dtype: torch.dtype, layout: str, shift: int = 0) -> Tensor:
    """Return zeros in this memory layout."""
    if layout == "transposed":
        return _shifted(shape[::-1], dtype, shift).permute(tuple(range(len(shape)))[::-1])
    if layout == "strided":
        return _shifted([2 * size for size in shape], dtype, shift)[
            tuple(slice(1, None, 2) for _ in shape)
        ]
    if layout == "inside another":
        return _shifted([size + 2 for size in shape], dtype, shift)[
            tuple(slice(1, size + 1) for size in shape)
        ]
    return _shifted(shape, dtype, shift)


def _shifted(shape: Sequence[int], dtype: torch.dtype, shift: int) -> Tensor:
    return torch.zeros(math.prod(shape) + shift, dtype=dtype, device=DEVICE)[shift:].view(
        tuple(shape)
    )


def same_bytes(a: Tensor, b: Tensor) -> None:
    assert a.dtype == b.dtype
    assert a.shape == b.shape
    assert torch.equal(_bytes(a), _bytes(b))


def same_numbers(a: Tensor, b: Tensor) -> None:
    """Assert equal bits, except that all NaNs are equal and both zeros are equal."""
    assert a.dtype == b.dtype
    assert a.shape == b.shape
    assert torch.equal(a.isnan(), b.isnan())
    assert torch.equal(a.masked_fill(a.isnan(), 0), b.masked_fill(b.isnan(), 0))


def _bytes(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device).copy_(x).view(-1).view(torch.uint8)
