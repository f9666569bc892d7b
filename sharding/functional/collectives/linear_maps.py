"""Linear maps over the parts of all ranks: the values of collectives and of their gradients.

The transpose of each is again one of them, so they can be differentiated any number of times:

    Reduce      [a] [b]  ->  [a+b] [a+b]          transpose: Reduce
    Gather      [a] [b]  ->  [a b] [a b]          transpose: Scatter (of a pending gradient)
    Scatter     [a b] [c d]  ->  [a+c] [b+d]      transpose: Gather
    AllToAll    [a b] [c d]  ->  [a c] [b d]      transpose: AllToAll with the dims swapped
    AllToAllRows  the same of rows, one for each rank
    Permute     [a] [b]  ->  [0] [a]              transpose: Permute with the pairs swapped
    Broadcast   [a] [b]  ->  [a] [a]              transpose: ReduceTo (zeros but on the source)
    KeepFirst   [a] [a]  ->  [a] [0]              transpose: KeepFirst

All count dims from the front, so that a batch dim of `torch.func.vmap` may follow at the end.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ....mesh.comm.pending import Pending
from ....mesh.comm.transforms import outside_of_transforms
from ....mesh.comm.work import DONE
from ....mesh.simulated.simulate import SimulatedWorld
from ...autograd import engine_hooks
from ...autograd.named_axes import Axes
from ...autograd.transforms import Linear, under_transforms
from ...layout.bounded_cache import HEAVY_LIMIT, keep
from ...layout.layout import Layout, chunk
from ...layout.spec import P
from ...redistribute.executor import Executor, executor


class LinearMap(Linear):
    """A linear map over the ranks of some axes.

    Attributes:
        axes: the axes.
    """

    def __init__(self, axes: Axes) -> None:
        self.axes = axes

    def batched(self, count: int) -> LinearMap:
        return self  # a batch dim at the end needs no change

    @abstractmethod
    def start(self, x: Tensor) -> Pending[Tensor]:
        """Launch the map; the result is a new tensor."""

    def __call__(self, x: Tensor) -> Tensor:
        return self.start(x).wait()


class ReduceMap(LinearMap):
    """Sum; the result is on every rank."""

    @property
    def transpose(self) -> LinearMap:
        return self

    def __call__(self, x: Tensor) -> Tensor:
        out = x.clone(memory_format=torch.contiguous_format)
        self.axes.group.all_reduce(out)
        return out

    def start(self, x: Tensor) -> Pending[Tensor]:
        out = x.clone(memory_format=torch.contiguous_format)
        return Pending.after(self.axes.group.all_reduce(out, async_op=True), lambda: out)


class RedistributionMap(LinearMap):
    """A linear map that is a redistribution on the mesh of the axes."""

    def __init__(self, axes: Axes) -> None:
        super().__init__(axes)
        self._executors: dict[Any, Executor] = {}

    @abstractmethod
    def layouts(self, shape: Sequence[int], dtype: torch.dtype) -> tuple[Layout, Layout]:
        """Return the layouts before and after, for a part of this shape."""

    def _executor(self, x: Tensor) -> Executor:
        key = (x.shape, x.dtype)
        cached = self._executors.get(key)
        if cached is None:
            cached = keep(
                self._executors, key, executor(*self.layouts(x.shape, x.dtype)), HEAVY_LIMIT
            )
        return cached

    def __call__(self, x: Tensor) -> Tensor:
        out = self._executor(x)(x)
        return out.clone() if self.axes.size == 1 else out

    def start(self, x: Tensor) -> Pending[Tensor]:
        copies = self.axes.size == 1
        parts = self._executor(x).start([x])
        return parts.then(lambda parts: parts[0].clone() if copies else parts[0])


class _AlongDim(RedistributionMap):
    """A map between parts of these lengths along a dim and all of it."""

    def __init__(self, axes: Axes, dim: int, lengths: tuple[int, ...]) -> None:
        super().__init__(axes)
        self.dim, self.lengths = dim, lengths
        # equal parts, contiguous in the order of the group: nothing needs packing
        self._contiguous = dim == 0 and axes.order is None and len(set(lengths)) == 1


class GatherMap(_AlongDim):
    """Concatenate every rank's part along a dim, on every rank; parts have these lengths."""

    def __call__(self, x: Tensor) -> Tensor:
        if not self._contiguous:
            return super().__call__(x)
        out = x.new_empty((self.axes.size * x.shape[0], *x.shape[1:]))
        self.axes.group.all_gather(out, x.contiguous())
        return out

    @cached_property
    def transpose(self) -> LinearMap:  # type: ignore[override]
        return ScatterMap(self.axes, self.dim, self.lengths)

    def layouts(self, shape: Sequence[int], dtype: torch.dtype) -> tuple[Layout, Layout]:
        split = split_layout(self.axes, self.dim, self.lengths, shape, dtype)
        return split, split.replicated


class ScatterMap(_AlongDim):
    """Sum, and split the result along a dim."""

    def __call__(self, x: Tensor) -> Tensor:
        if not self._contiguous:
            return super().__call__(x)
        out = x.new_empty((self.lengths[0], *x.shape[1:]))
        self.axes.group.reduce_scatter(out, x.contiguous())
        return out

    @cached_property
    def transpose(self) -> LinearMap:  # type: ignore[override]
        return GatherMap(self.axes, self.dim, self.lengths)

    def layouts(self, shape: Sequence[int], dtype: torch.dtype) -> tuple[Layout, Layout]:
        split = split_layout(self.axes, self.dim, self.lengths, shape, dtype)
        return split.replace(P(unreduced=self.axes.mesh.axis_names)), split


class AllToAllMap(RedistributionMap):
    """Split along one dim before, along another one after.

    Attributes:
        before: the dim that is split before, and the lengths of its parts.
        after: the dim that is split after, and the lengths of its parts.
    """

    def __init__(
        self, axes: Axes, before: tuple[int, tuple[int, ...]], after: tuple[int, tuple[int, ...]]
    ) -> None:
        super().__init__(axes)
        self.before, self.after = before, after

    @cached_property
    def transpose(self) -> LinearMap:  # type: ignore[override]
        return AllToAllMap(self.axes, self.after, self.before)

    def layouts(self, shape: Sequence[int], dtype: torch.dtype) -> tuple[Layout, Layout]:
        whole = list(shape)
        whole[self.before[0]], whole[self.after[0]] = sum(self.before[1]), sum(self.after[1])
        one, other = (
            split_layout(self.axes, *side, whole, dtype) for side in (self.before, self.after)
        )
        return one, other


class PermuteMap(LinearMap):
    """Send parts from rank to rank; a rank that receives nothing has zeros.

    Attributes:
        pairs: (source, destination) places along the axes, each at most once on either side.
    """

    def __init__(self, axes: Axes, pairs: tuple[tuple[int, int], ...]) -> None:
        super().__init__(axes)
        self.pairs = pairs
        dst = dict(pairs).get(axes.index)
        src = {d: s for s, d in pairs}.get(axes.index)
        self._dst = None if dst is None else axes.place_in_group(dst)
        self._src = None if src is None else axes.place_in_group(src)

    @cached_property
    def transpose(self) -> LinearMap:  # type: ignore[override]
        return PermuteMap(self.axes, tuple((d, s) for s, d in self.pairs))

    def start(self, x: Tensor) -> Pending[Tensor]:
        operand = x.contiguous()
        out = torch.zeros_like(operand) if self._src is None else torch.empty_like(operand)
        work = self.axes.group.permute(out, operand, dst=self._dst, src=self._src, async_op=True)
        return Pending.after(work, lambda: out)


class BroadcastMap(LinearMap):
    """Copy one rank's part to every rank.

    Attributes:
        source: its place along the axes.
    """

    def __init__(self, axes: Axes, source: int) -> None:
        super().__init__(axes)
        self.source = source

    @cached_property
    def transpose(self) -> LinearMap:  # type: ignore[override]
        return ReduceToMap(self.axes, self.source)

    def start(self, x: Tensor) -> Pending[Tensor]:
        out = x.clone(memory_format=torch.contiguous_format)
        source = self.axes.place_in_group(self.source)
        return Pending.after(self.axes.group.broadcast(out, source, async_op=True), lambda: out)


class ReduceToMap(LinearMap):
    """Sum; the result is on one rank, and the others have zeros."""

    def __init__(self, axes: Axes, place: int) -> None:
        super().__init__(axes)
        self.place = place

    @cached_property
    def transpose(self) -> LinearMap:  # type: ignore[override]
        return BroadcastMap(self.axes, self.place)

    def start(self, x: Tensor) -> Pending[Tensor]:
        out = x.clone(memory_format=torch.contiguous_format)
        has_sum = self.axes.index == self.place
        work = self.axes.group.all_reduce(out, async_op=True)
        return Pending.after(work, lambda: out if has_sum else out.zero_())


class KeepFirstMap(LinearMap):
    """Keep the first rank's part, zeros elsewhere.

    A replicated value as a pending sum, without communication.
    """

    @property
    def transpose(self) -> LinearMap:
        return self

    def start(self, x: Tensor) -> Pending[Tensor]:
        out = x.clone() if self.axes.index == 0 else torch.zeros_like(x)
        return Pending(lambda: out, DONE)


class AllToAllRowsMap(LinearMap):
    """Send row i of every rank to rank i; there are as many rows as ranks.

    [a b] [c d]  ->  [a c] [b d]
    """

    def __init__(self, axes: Axes) -> None:
        super().__init__(axes)
        self._by_group = self._by_place = None
        if axes.order is not None:
            with outside_of_transforms():
                orders: Any = ([axes.order.index(i) for i in range(axes.size)], axes.order)
                self._by_group, self._by_place = (
                    torch.tensor(order, device=axes.mesh.device) for order in orders
                )

    @property
    def transpose(self) -> LinearMap:
        return self

    def start(self, x: Tensor) -> Pending[Tensor]:
        rows = (
            x.contiguous()
            if self._by_group is None
            else x.index_select(0, self._by_group.to(x.device))
        )
        out = torch.empty_like(rows)
        by_place = self._by_place
        work = self.axes.group.all_to_all(out, rows, async_op=True)
        return Pending.after(
            work,
            lambda: out if by_place is None else out.index_select(0, by_place.to(out.device)),
        )

    def __call__(self, x: Tensor) -> Tensor:
        if self._by_group is not None:
            return self.start(x).wait()
        rows = x.contiguous()
        out = torch.empty_like(rows)
        self.axes.group.all_to_all(out, rows)
        return out


# -- lengths ---------------------------------------------------------------------------------------


def split_layout(
    axes: Axes, dim: int, lengths: Sequence[int], shape: Sequence[int], dtype: torch.dtype
) -> Layout:
    """Return the layout of a tensor split along `dim` into parts of these lengths.

    It is split over the axes; `shape` is that of any part.
    """
    whole = list(shape)
    whole[dim] = sum(lengths)
    names = axes.mesh.axis_names
    return Layout.of(
        axes.mesh, P(*[None] * dim, names, sizes={names: tuple(lengths)}), whole, dtype
    )


def even_lengths(total: int, parts: int) -> tuple[int, ...]:
    """Return the lengths of the parts that `torch.chunk` makes, empty ones included."""
    return tuple(stop - start for start, stop in (chunk(0, total, parts, i) for i in range(parts)))


# -- autograd --------------------------------------------------------------------------------------


class _ApplyLinearMap(torch.autograd.Function):
    """A linear map with its gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        op: LinearMap,
        grad_dtype: torch.dtype | None,
        ready: Pending[Tensor] | None,
    ) -> Tensor:
        ctx.op, ctx.grad_dtype = op, grad_dtype
        return op(x) if ready is None else ready.wait()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad = engine_hooks.with_memory(grads[0])
        if ctx.grad_dtype is None or ctx.grad_dtype is grad.dtype:
            return apply(grad, ctx.op.transpose), None, None, None
        return apply(grad.to(ctx.grad_dtype), ctx.op.transpose).to(grad.dtype), None, None, None


def apply(
    x: Tensor,
    op: LinearMap,
    grad_dtype: torch.dtype | None = None,
    ready: Pending[Tensor] | None = None,
) -> Tensor:
    """Apply the linear map, differentiable any number of times.

    Args:
        grad_dtype: the dtype of the gradient during communication; default its own.
        ready: the result, if the map was launched already.

    Raises: RuntimeError in torch's forward mode on simulated ranks.
    """
    if engine_hooks.transforming():
        check_forward_mode(op.axes)
        return under_transforms(x, op, grad_dtype)
    if x.requires_grad and torch.is_grad_enabled():
        return _ApplyLinearMap.apply(x, op, grad_dtype, ready)  # type: ignore[return-value]
    return op(x) if ready is None else ready.wait()


def check_forward_mode(axes: Axes) -> None:
    """Raise RuntimeError in torch's forward mode on simulated ranks."""
    if (
        engine_hooks.in_foreign_forward_mode()
        and axes.size > 1
        and isinstance(axes.mesh.world, SimulatedWorld)
    ):
        raise RuntimeError(
            "a collective inside torch.func.jvp (or jacfwd, hessian, torch.autograd.forward_ad) on "
            "simulated ranks: torch has one forward mode per process, and the first rank to leave "
            "it would end it for all; use sm.jvp, sm.jacfwd, sm.hessian"
        )
