"""Data for the tests of collectives, shared by the simulated world and real processes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.bool,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]


def rank_values(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return small numbers that differ between ranks, and whose sums and products over five ranks
    are exact.
    """
    numel = torch.Size(shape).numel()
    values = (torch.arange(numel) * 7 + rank * 3) % 3
    if dtype.is_complex:
        return torch.complex(values.double(), (values - rank % 2).double()).to(dtype).reshape(shape)
    return values.to(dtype).reshape(shape)


def as_bytes(x: Tensor) -> Tensor:
    return x.contiguous().reshape(-1).view(torch.uint8)


def _through_double(
    function: Callable[[Tensor, Tensor], Tensor],
) -> Callable[[Tensor, Tensor], Tensor]:
    def combine(a: Tensor, b: Tensor) -> Tensor:
        wide = torch.complex128 if a.is_complex() else torch.float64
        return function(a.to(wide), b.to(wide)).to(a.dtype)

    return combine


REDUCE = {
    "sum": _through_double(torch.add),
    "product": _through_double(torch.mul),
    "max": _through_double(torch.maximum),
    "min": _through_double(torch.minimum),
}
