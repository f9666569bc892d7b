"""New sharded tensors: zeros, ones, full, empty, rand, randn, randint, randperm, arange."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...mesh.comm.thread_context import thread_context
from ...mesh.device_mesh import DeviceMesh, is_mesh
from ..layout.layout import Layout
from ..layout.spec import SpecLike
from ..lineage import with_drawn
from . import random
from .mesh_arguments import is_placement, mesh_and_spec
from .sharded_tensor import ShardedTensor

_WHERE = """
    Args:
        size: the global shape, as numbers or one sequence.
        device_mesh: the mesh; by default that of `with mesh:` or `set_mesh`, and then a `P` may
            take its place.
        placements: a `P` or one placement per axis; `None` for replicated.
        dtype: element type; torch's default dtype if left out.
        layout: `torch.strided`, the only supported memory layout.
        requires_grad: whether autograd computes a gradient for the result.

    Raises:
        ValueError: placements that do not fit the mesh or the shape, or that are pending.

    Communication: none.
"""


def zeros(
    *size: Any,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: DeviceMesh | None = None,
    placements: SpecLike = None,
) -> ShardedTensor:
    """Return a sharded tensor of zeros.

    `sm.zeros(4, 8, device_mesh=mesh, placements=[Shard(0)])` or `sm.zeros((4, 8), mesh, spec)`.
    """
    return _constant(0, size, device_mesh, placements, dtype, layout, requires_grad)


def ones(
    *size: Any,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: DeviceMesh | None = None,
    placements: SpecLike = None,
) -> ShardedTensor:
    """Return a sharded tensor of ones."""
    return _constant(1, size, device_mesh, placements, dtype, layout, requires_grad)


def full(
    size: Sequence[int],
    fill_value: float,
    device_mesh: DeviceMesh | SpecLike = None,
    placements: SpecLike = None,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
) -> ShardedTensor:
    """Return a sharded tensor filled with one value, whose type gives the dtype as in torch."""
    dtype = dtype or torch.full((), fill_value).dtype
    return _constant(
        fill_value, (tuple(size),), device_mesh, placements, dtype, layout, requires_grad
    )


def empty(
    *size: Any,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: DeviceMesh | None = None,
    placements: SpecLike = None,
) -> ShardedTensor:
    """Return a sharded tensor with uninitialized values."""
    return _new(
        lambda at: torch.empty(at.local_shape, dtype=at.dtype, device=_mesh(at).device),
        size,
        device_mesh,
        placements,
        dtype,
        layout,
        requires_grad,
    )


def rand(
    *size: Any,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: DeviceMesh | None = None,
    placements: SpecLike = None,
) -> ShardedTensor:
    """Return random numbers in [0, 1), one global tensor on any mesh. Seeded by `manual_seed`."""
    return _new(random.uniform, size, device_mesh, placements, dtype, layout, requires_grad)


def randn(
    *size: Any,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    device_mesh: DeviceMesh | None = None,
    placements: SpecLike = None,
) -> ShardedTensor:
    """Return a tensor of Gaussian numbers, the same on any mesh. Seeded by `manual_seed`."""
    return _new(random.normal, size, device_mesh, placements, dtype, layout, requires_grad)


def randint(
    low: int,
    high: Any,
    size: Any = None,
    device_mesh: Any = None,
    placements: Any = None,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
) -> ShardedTensor:
    """Return a sharded tensor of random integers in [low, high).

    It is the same global tensor on any mesh. Seeded by `manual_seed`.

    `sm.randint(low, high, size, mesh, spec)`, or `sm.randint(high, size, mesh, spec)` with a lower
    bound of 0.
    """
    if not isinstance(high, int):
        if is_mesh(size) or is_placement(size):
            device_mesh, placements = size, placements if device_mesh is None else device_mesh
        low, high, size = 0, low, high
    return _new(
        lambda at: random.integers(at, low, high),
        (tuple(size),),
        device_mesh,
        placements,
        dtype or torch.int64,
        layout,
        requires_grad,
    )


def randperm(
    n: int,
    device_mesh: DeviceMesh | SpecLike = None,
    placements: SpecLike = None,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
) -> ShardedTensor:
    """Return the numbers 0 ... n - 1 in random order, alike on any mesh. Seeded by `manual_seed`.

    Every rank sorts all n numbers, whatever part of them it holds.
    """
    return _new(random.permutation, (n,), device_mesh, placements, dtype or torch.int64, layout)


def arange(
    start: float,
    end: float | None = None,
    step: float = 1,
    *,
    device_mesh: DeviceMesh | None = None,
    placements: SpecLike = None,
    dtype: torch.dtype | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
) -> ShardedTensor:
    """Return a 1-D sharded tensor of numbers from `start` to `end` by `step`, as `torch.arange`."""
    low, high = (0, start) if end is None else (start, end)
    dtype = torch.arange(low, high, step, dtype=dtype, device="meta").dtype
    count = max(math.ceil((high - low) / step), 0)

    def values(at: Layout) -> Tensor:
        (first, last), device = at.box[0], _mesh(at).device
        index = torch.arange(
            first,
            last,
            device=device,
            dtype=torch.float64 if dtype.is_floating_point else torch.int64,
        )
        return (low + index * step).to(dtype)

    return _new(values, (count,), device_mesh, placements, dtype, layout, requires_grad)


for _function in (zeros, ones, full, empty, rand, randn, randint, randperm):
    _function.__doc__ = f"{_function.__doc__}\n{_WHERE}"


def _mesh(layout: Layout) -> Any:
    return layout.mesh


def _constant(
    value: float,
    size: Sequence[Any],
    mesh: Any,
    placements: SpecLike,
    dtype: torch.dtype | None,
    layout: torch.layout,
    requires_grad: bool,
) -> ShardedTensor:
    return _new(
        lambda at: torch.full(at.local_shape, value, dtype=at.dtype, device=_mesh(at).device),
        size,
        mesh,
        placements,
        dtype,
        layout,
        requires_grad,
    )


def _new(
    values: Callable[[Layout], Tensor],
    size: Sequence[Any],
    mesh: Any,
    placements: SpecLike,
    dtype: torch.dtype | None,
    memory_layout: torch.layout = torch.strided,
    requires_grad: bool = False,
) -> ShardedTensor:
    size, mesh, placements = _positional(size, mesh, placements)
    if memory_layout is not torch.strided:
        raise ValueError(
            f"layout={memory_layout} is not supported: the parts of a sharded tensor are strided; "
            "leave layout out"
        )
    layout = Layout.of(mesh, placements, size, dtype or torch.get_default_dtype())
    if layout.pending:
        raise ValueError(
            f"a new tensor cannot be pending, got {layout.spec}; leave those axes replicated"
        )
    before = thread_context.last_draw
    out = ShardedTensor._make_guarded(values(layout), layout)
    out._lineage = with_drawn(out._lineage, before)
    return out.requires_grad_() if requires_grad else out


def _positional(
    size: Sequence[Any], mesh: Any, placements: SpecLike
) -> tuple[tuple[int, ...], DeviceMesh, SpecLike]:
    """Parse the arguments of `zeros`, in the form of torch, DTensor or JAX.

    `zeros(4, 8, device_mesh=m, placements=p)`, `zeros((4, 8), m, p)` and, with m set, `zeros((4,
    8), p)`.
    """
    at = next((i for i, item in enumerate(size) if is_mesh(item) or is_placement(item)), len(size))
    dims, where = size[:at], size[at:]
    if where:
        mesh, placements = _mesh_and_placements(
            [
                *([] if mesh is None else [mesh]),
                *where,
                *([] if placements is None else [placements]),
            ]
        )
    shape = dims[0] if len(dims) == 1 and not isinstance(dims[0], int) else dims
    return (tuple(shape), *mesh_and_spec(mesh, placements))


def _mesh_and_placements(args: Sequence[Any]) -> Sequence[Any]:
    """Return the mesh, or the placements in its place, and the placements.

    Raises:
        TypeError: more than two arguments.
    """
    if len(args) > 2:
        raise TypeError(
            "after the shape a factory takes a mesh and a P or list of placements, each once; got "
            f"{list(args)}"
        )
    return args if len(args) == 2 else (args[0], None)
