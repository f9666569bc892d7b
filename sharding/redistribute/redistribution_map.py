"""A redistribution as a linear map, for transforms of `torch.func`."""

from __future__ import annotations

from torch import Tensor

from ..autograd.transforms import Linear, batched_layout
from ..layout.layout import Layout
from .executor import executor


class LinearRedistribution(Linear):
    """A redistribution from `src` to `dst` as a linear map.

    Args:
        src, dst: the layouts before and after.
        src_grad, dst_grad: the layouts of the gradients of both ends; by default the duals.
    """

    def __init__(
        self,
        src: Layout,
        dst: Layout,
        src_grad: Layout | None = None,
        dst_grad: Layout | None = None,
    ) -> None:
        self.src, self.dst = src, dst
        self.src_grad, self.dst_grad = src_grad or src.dual, dst_grad or dst.dual

    @property
    def transpose(self) -> LinearRedistribution:
        return LinearRedistribution(self.dst_grad, self.src_grad, self.dst, self.src)

    def batched(self, count: int) -> LinearRedistribution:
        return LinearRedistribution(
            *(
                batched_layout(end, count)
                for end in (self.src, self.dst, self.src_grad, self.dst_grad)
            )
        )

    def __call__(self, x: Tensor) -> Tensor:
        src, dst = self.src.replace(dtype=x.dtype), self.dst.replace(dtype=x.dtype)
        return x if src is dst else executor(src, dst)(x)
