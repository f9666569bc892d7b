"""The plan between two layouts, compiled for this rank; and as a linear map, for transforms of `torch.func`."""

from __future__ import annotations

import torch
from torch import Tensor

from ..layout.bounded_cache import keep
from ..layout.layout import Layout
from ..tensor.transforms import Linear, batched_layout
from .executor import Runner, compile_plan
from .plan import plan


def runner(
    src: Layout,
    dst: Layout,
    max_bytes: int | None = None,
    accumulate_dtype: torch.dtype | None = None,
    transport: str | None = None,
) -> Runner:
    """The compiled plan from `src` to `dst` for this rank, cached on the source layout."""
    plain = max_bytes is None and accumulate_dtype is None and transport is None
    key = dst if plain else (dst, max_bytes, accumulate_dtype, transport)
    found = src.runners.get(key)
    if found is None:
        way = plan(src, dst, max_bytes=max_bytes, accumulate_dtype=accumulate_dtype, transport=transport)
        found = keep(src.runners, key, compile_plan(way))
    return found


class Moved(Linear):
    """A linear redistribution.

    Args:
        src, dst: the layouts before and after.
        src_grad, dst_grad: the layouts in which the gradients of both ends flow; by default the duals.
    """

    def __init__(self, src: Layout, dst: Layout, src_grad: Layout | None = None, dst_grad: Layout | None = None) -> None:
        self.src, self.dst = src, dst
        self.src_grad, self.dst_grad = src_grad or src.dual, dst_grad or dst.dual

    @property
    def transpose(self) -> Moved:
        return Moved(self.dst_grad, self.src_grad, self.dst, self.src)

    def batched(self, count: int) -> Moved:
        return Moved(*(batched_layout(end, count) for end in (self.src, self.dst, self.src_grad, self.dst_grad)))

    def __call__(self, x: Tensor) -> Tensor:
        src, dst = self.src.replace(dtype=x.dtype), self.dst.replace(dtype=x.dtype)
        return x if src is dst else runner(src, dst)(x)
