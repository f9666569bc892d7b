"""Layouts: mesh + spec + global shape + dtype, and the box of the tensor that each rank holds."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import torch

from ..kernels.box import Box
from ..mesh.abstract_mesh import AbstractMesh
from .spec import EACH, P, Placement, as_spec, spec_to_placements

_DTYPE_NAMES = {
    torch.float64: "f64", torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16", torch.int64: "i64",
    torch.int32: "i32", torch.int16: "i16", torch.int8: "i8", torch.uint8: "u8", torch.bool: "bool",
    torch.complex64: "c64", torch.complex128: "c128",
}  # fmt: skip


class Layout:
    """All that is needed to say which box of a global tensor each rank holds.

    Immutable and interned on its mesh: equal layouts are the same object, so comparing and hashing them costs nothing.
    Make one with `Layout.of`.

    Attributes:
        mesh: the `DeviceMesh` (or `AbstractMesh`, for planning without devices).
        spec: a `P` with one entry per tensor dim.
        shape: the global shape.
        dtype: the element type.

    Example:
        >>> mesh = AbstractMesh((2, 4), ("dp", "tp"))
        >>> Layout.of(mesh, P("dp", "tp"), (5, 8)).box_at((1, 0))
        ((3, 5), (0, 2))
    """

    mesh: AbstractMesh
    spec: P
    shape: torch.Size
    dtype: torch.dtype

    def __init__(self, mesh: AbstractMesh, spec: P, shape: torch.Size, dtype: torch.dtype) -> None:
        self.mesh, self.spec, self.shape, self.dtype = mesh, spec, shape, dtype
        self.runners: dict[Layout, Any] = {}  # destination -> compiled redistribution, filled by `redistribute`
        self.decisions: dict[Any, Any] = {}  # operator and arguments -> how to run it, filled by `dispatch`

    @staticmethod
    def of(mesh: AbstractMesh, where: Any, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Layout:
        """The layout of a `dtype` tensor of global `shape`, laid out on `mesh` as `where` (a `P` or placements) says.

        Raises:
            ValueError: the spec does not fit the mesh or the shape, or asks for the average of integers.

        Communication: none.
        """
        where = tuple(where) if type(where) is list else where
        shape = shape if type(shape) is torch.Size else torch.Size(shape)
        key = (where, shape, dtype)
        layouts = mesh._layouts
        try:
            layout = layouts.get(key)  # under whatever spelling it was asked for before
        except TypeError:  # one that cannot be hashed
            return _interned(mesh, as_spec(where, mesh.axis_names, len(shape)), shape, dtype)
        if layout is None:
            layout = layouts[key] = _interned(mesh, as_spec(where, mesh.axis_names, len(shape)), shape, dtype)
        return layout

    def replace(
        self, spec: Any = None, *, shape: Sequence[int] | None = None, dtype: torch.dtype | None = None
    ) -> Layout:
        """This layout with some parts changed; `spec` is a `P` or placements."""
        if spec is None and shape is None and (dtype is None or dtype is self.dtype):
            return self
        return Layout.of(
            self.mesh,
            self.spec if spec is None else spec,
            self.shape if shape is None else shape,
            self.dtype if dtype is None else dtype,
        )

    # -- what the spec says -------------------------------------------------------------------------------------------

    @cached_property
    def placements(self) -> tuple[Placement, ...]:
        """The spec as torch spells it: one placement per mesh axis."""
        return spec_to_placements(self.spec, self.mesh.axis_names)

    @cached_property
    def pending(self) -> dict[str, str]:
        """Axis -> kind, for the axes with a pending reduction."""
        return dict(self.spec.unreduced)

    @cached_property
    def only_sums(self) -> bool:
        """Whether nothing is pending but sums."""
        return all(kind == "sum" for _, kind in self.spec.unreduced)

    @cached_property
    def dim_of(self) -> dict[str, int]:
        """Axis -> the dim it splits."""
        return {axis: dim for dim, axes in enumerate(self.spec.dims) for axis in axes}

    @cached_property
    def replicated_axes(self) -> tuple[str, ...]:
        """The axes of more than one rank on which every rank holds the same values."""
        named = set(self.spec.axes)
        return tuple(a for a in self.mesh.axis_names if a not in named and self.mesh.size(a) > 1)

    @cached_property
    def is_fully_replicated(self) -> bool:
        """Whether every rank holds the whole tensor."""
        return all(self.mesh.size(axis) == 1 for axis in self.spec.axes)

    @cached_property
    def replicated(self) -> Layout:
        """The same tensor with every rank holding all of it."""
        return self.replace(P())

    @cached_property
    def dual(self) -> Layout:
        """The layout in which this tensor's gradient flows: pending(sum) <-> replicated, sharded <-> itself.

        Along an axis that is pending with another kind than sum, every rank's own value has its own gradient.
        """
        pending = {a: EACH for a, kind in self.spec.unreduced if kind != "sum"}
        pending.update(dict.fromkeys(self.replicated_axes, "sum"))
        return self.replace(P(*self.spec.dims, unreduced=pending))

    @cached_property
    def grad(self) -> Layout:
        """The layout in which this tensor's gradient is kept: that of the tensor, with every sum reduced."""
        return self.replace(P(*self.spec.dims, unreduced={a: EACH for a, kind in self.spec.unreduced if kind != "sum"}))

    # -- boxes --------------------------------------------------------------------------------------------------------

    def box_at(self, coordinate: Sequence[int]) -> Box:
        """The half-open interval per dim held by the rank at `coordinate` of the mesh."""
        mesh, box = self.mesh, []
        for size, axes in zip(self.shape, self.spec.dims, strict=True):
            start, stop = 0, size
            for axis in axes:
                start, stop = chunk(start, stop, mesh.size(axis), coordinate[mesh.axis_index(axis)])
            box.append((start, stop))
        return tuple(box)

    def boxes(self) -> Iterator[tuple[tuple[int, ...], Box]]:
        """`(coordinate, box)` of every rank, in mesh order."""
        for flat in range(math.prod(self.mesh.shape)):
            coordinate = _unravel(flat, self.mesh.shape)
            yield coordinate, self.box_at(coordinate)

    @cached_property
    def box(self) -> Box:
        """This rank's box; empty for a rank outside the mesh."""
        coordinate = getattr(self.mesh, "coordinate", None)
        return ((0, 0),) * max(1, len(self.shape)) if coordinate is None else self.box_at(coordinate)

    @cached_property
    def local_shape(self) -> torch.Size:
        """Shape of this rank's box; `(0,)` for a rank outside the mesh."""
        if getattr(self.mesh, "coordinate", None) is None:
            return torch.Size((0,))
        return torch.Size(stop - start for start, stop in self.box)

    @cached_property
    def largest_local_numel(self) -> int:
        """Elements of the largest box: what the rank at coordinate 0 holds."""
        return math.prod(stop - start for start, stop in self.box_at((0,) * len(self.mesh.shape)))

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * self.dtype.itemsize

    @cached_property
    def meta(self) -> torch.Tensor:
        """A meta tensor of the global shape: the storage of every `ShardedTensor` of this layout."""
        with torch.inference_mode(False):  # it outlives the mode
            return torch.empty(self.shape, dtype=self.dtype, device="meta")

    def __str__(self) -> str:
        """The same text on every rank, for errors."""
        sizes = ", ".join(f"{name}={size}" for name, size in zip(self.mesh.axis_names, self.mesh.shape, strict=True))
        return f"{dtype_name(self.dtype)}{list(self.shape)} @ {self.spec} on ({sizes})"

    def __repr__(self) -> str:
        inside = getattr(self.mesh, "coordinate", None) is not None
        return f"{self}, local {list(self.local_shape)}" if inside else str(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return make_layout, (self.mesh, self.spec, tuple(self.shape), self.dtype)

    def __copy__(self) -> Layout:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Layout:
        return self


def make_layout(mesh: AbstractMesh, spec: P, shape: Sequence[int], dtype: torch.dtype) -> Layout:
    """`Layout.of` by a name that `torch.load` can be told to trust."""
    return Layout.of(mesh, spec, shape, dtype)


def chunk(start: int, stop: int, parts: int, index: int) -> tuple[int, int]:
    """The `index`-th of `parts` pieces of `[start, stop)`, cut as `torch.chunk` cuts: equal pieces, the last ones short
    or empty."""
    step = -(-(stop - start) // parts)
    low = min(start + index * step, stop)
    return low, min(low + step, stop)


def told_apart(one: AbstractMesh, other: AbstractMesh) -> tuple[str, str]:
    """The names of two meshes for an error, with their ranks where the names alone are the same."""
    if repr(one) != repr(other):
        return repr(one), repr(other)
    return f"{one} of ranks {one.ranks.tolist()}", f"{other} of ranks {other.ranks.tolist()}"


def dtype_name(dtype: torch.dtype) -> str:
    """Short name of a dtype: `f32`, `bf16`, `i64`."""
    return _DTYPE_NAMES.get(dtype, str(dtype).removeprefix("torch."))


def _interned(mesh: AbstractMesh, spec: P, shape: torch.Size, dtype: torch.dtype) -> Layout:
    key = (spec, shape, dtype)
    layout = mesh._layouts.get(key)
    if layout is None:
        _check_average(spec, dtype)
        layout = mesh._layouts[key] = Layout(mesh, spec, shape, dtype)
    return layout


def _unravel(flat: int, shape: Sequence[int]) -> tuple[int, ...]:
    coordinate = []
    for size in reversed(shape):
        flat, index = divmod(flat, size)
        coordinate.append(index)
    return tuple(reversed(coordinate))


def _check_average(spec: P, dtype: torch.dtype) -> None:
    averaged = [axis for axis, kind in spec.unreduced if kind == "avg"]
    if averaged and not (dtype.is_floating_point or dtype.is_complex):
        raise ValueError(
            f"{spec} leaves an average pending over {averaged[0]!r} for a tensor of {dtype_name(dtype)}, and the average of "
            "integers is not an integer; use Partial('sum'), or convert the tensor to a floating dtype first"
        )
