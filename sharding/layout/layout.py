"""`Layout`: mesh, spec, global shape and dtype of a sharded tensor, and the box of each rank.

    (5, 8) @ P("dp", "tp") on (dp=2, tp=4)    dim 0 is cut into 3 | 2, dim 1 into 2 | 2 | 2 | 2
                                              box_at((1, 0)) is ((3, 5), (0, 2))

`Layout.of` brings the spec to its normal form (`_normal_cuts`), so that equal layouts have equal
specs, and looks it up among the layouts of the mesh (`MeshLayouts`), so that they are one object.
"""

from __future__ import annotations

import math
import threading
import zlib
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch

from ...kernels.box import Box, box_size
from ...mesh.abstract_mesh import ELSEWHERE, AbstractMesh, unravel
from ...mesh.comm.dispatch_modes import outside_of_program_modes
from ...mesh.comm.thread_context import thread_context
from ...mesh.comm.transforms import outside_of_transforms
from .bounded_cache import LayoutCache, keep
from .spec import (
    EACH,
    Cut,
    P,
    Placement,
    RaggedPlacements,
    Sharding,
    as_spec,
    spec_to_placements,
)

_DTYPE_NAMES = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "bool",
    torch.complex64: "c64",
    torch.complex128: "c128",
}


# recent layouts of a mesh, one entry for each spelling; with its operators' strategies one weighs
# about 10 KiB
_LIMIT = 2048
_lock = threading.Lock()  # held where a mesh gets its `MeshLayouts`


class Layout:
    """Which box of a global tensor each rank holds. Make one with `Layout.of`.

    Immutable, and interned for its mesh: equal layouts are the same object, so comparing and
    hashing them is fast. The last two thousand of a mesh are kept, with the plans and operator
    strategies made for them; others live as long as a tensor has them.

    Attributes:
        mesh: the `DeviceMesh` (or `AbstractMesh`, for planning without devices).
        spec: a `P` with one entry per tensor dim. It has sizes only for parts that are not equal.
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
        # operator and arguments -> its strategy; filled by `ops/dispatch.py`, which reads it in
        # every call of an operator
        self.strategies: dict[tuple[Any, ...], Any] = {}
        self.caches: dict[LayoutCache[Any, Any], dict[Any, Any]] = {}

    @staticmethod
    def of(
        mesh: AbstractMesh, where: Any, shape: Sequence[int], dtype: torch.dtype = torch.float32
    ) -> Layout:
        """Return the layout of a tensor of global `shape` and `dtype` on `mesh`.

        Args:
            where: a `P`, placements, or a sharding on this mesh.

        Raises:
            ValueError: a sharding on another mesh; the spec does not fit the mesh or the shape, or
                asks for the average of integers; the number of sizes is not that of the ranks of
                their axes, or they do not add up to the dim.

        Communication: none.
        """
        where = tuple(where) if type(where) in (list, RaggedPlacements) else where
        key = (where, tuple(shape) if type(shape) is list else shape, dtype)
        try:
            # by the spelling in which it was asked for before
            layout = mesh.cache.recent.get(key)  # type: ignore[union-attr]
        except AttributeError:  # the first one of the mesh
            layout = None
        except TypeError:  # not hashable
            return _intern(
                mesh, as_spec(where, mesh.axis_names, len(shape)), torch.Size(shape), dtype
            )
        if layout is None:
            if isinstance(where, Sharding) and where.mesh is not mesh and where.mesh != mesh:
                one, other = distinct_mesh_names(where.mesh, mesh)
                raise ValueError(
                    f"the sharding {where.spec} is on {one}, and the tensor is on {other}; give a "
                    "sharding on that mesh"
                )
            layout = _intern(
                mesh, as_spec(where, mesh.axis_names, len(shape)), torch.Size(shape), dtype
            )
            keep(MeshLayouts.of(mesh).recent, key, layout, _LIMIT)
        return layout

    def replace(
        self,
        spec: Any = None,
        *,
        shape: Sequence[int] | None = None,
        dtype: torch.dtype | None = None,
    ) -> Layout:
        """Return this layout with some parts changed; `spec` is a `P` or placements."""
        if spec is None and shape is None and (dtype is None or dtype is self.dtype):
            return self
        return Layout.of(
            self.mesh,
            self.spec if spec is None else spec,
            self.shape if shape is None else shape,
            self.dtype if dtype is None else dtype,
        )

    def temporary(self, spec: P) -> Layout:
        """Return this layout with another spec, without adding it to the recent ones of the mesh.

        For the many that a planner tries.
        """
        recent = self.mesh.cache.recent  # type: ignore[union-attr]
        return recent.get((spec, self.shape, self.dtype)) or _intern(
            self.mesh, spec, self.shape, self.dtype, is_cached=False
        )

    # -- properties of the spec --------------------------------------------------------------------

    @cached_property
    def placements(self) -> tuple[Placement, ...]:
        """The spec in torch's notation: one placement per mesh axis."""
        return spec_to_placements(self.spec, self.mesh.axis_names)

    @cached_property
    def pending(self) -> dict[str, str]:
        """Axis -> kind, for the axes with a pending reduction."""
        return dict(self.spec.unreduced)

    @cached_property
    def only_sums(self) -> bool:
        """Whether every pending reduction is a sum."""
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
        """The layout in which every rank holds the whole tensor."""
        return self.replace(P())

    @cached_property
    def dual(self) -> Layout:
        """The layout of this tensor's gradient: pending(sum) <-> replicated, sharded <-> itself.

        Along an axis that is pending with another kind than sum, the value of every rank has a
        separate gradient.
        """
        pending = {a: EACH for a, kind in self.spec.unreduced if kind != "sum"}
        pending.update(dict.fromkeys(self.replicated_axes, "sum"))
        return self.replace(self.spec.with_unreduced(pending))

    @cached_property
    def grad(self) -> Layout:
        """The layout of `.grad`: that of the tensor, with every sum reduced."""
        return self.replace(
            self.spec.with_unreduced({a: EACH for a, kind in self.spec.unreduced if kind != "sum"})
        )

    # -- boxes -------------------------------------------------------------------------------------

    def box_at(self, coordinate: Sequence[int]) -> Box:
        """Return the half-open interval per dim held by the rank at `coordinate` of the mesh."""
        box = []
        for size, cuts in zip(self.shape, self._dim_cuts, strict=True):
            start, stop = (0, size) if cuts.sized is None else cuts.sized.part_at(coordinate)
            for axis, parts in cuts.chunked:
                start, stop = chunk(start, stop, parts, coordinate[axis])
            box.append((start, stop))
        return tuple(box)

    @cached_property
    def _dim_cuts(self) -> tuple[_DimCuts, ...]:
        """How each dim is cut."""
        per_dim = []
        for cuts in self.spec.cuts:
            axes = [
                tuple((self.mesh.axis_index(axis), self.mesh.size(axis)) for axis in cut.axes)
                for cut in cuts
            ]
            sizes = cuts[0].sizes if cuts else None
            sized: _SizedCut | None = None
            if sizes is not None:
                sized = _SizedCut(axes.pop(0), tuple(accumulate(sizes, initial=0)))
            # each of the other cuts is by one axis
            per_dim.append(_DimCuts(sized, tuple([axis for (axis,) in axes])))
        return tuple(per_dim)

    def boxes(self) -> Iterator[tuple[tuple[int, ...], Box]]:
        """Yield `(coordinate, box)` of every rank, in mesh order."""
        for flat in range(math.prod(self.mesh.axis_sizes)):
            coordinate = unravel(flat, self.mesh.axis_sizes)
            yield coordinate, self.box_at(coordinate)

    @cached_property
    def box(self) -> Box:
        """This rank's box; empty for a rank outside the mesh."""
        coordinate = getattr(self.mesh, "coordinate", None)
        return (
            ((0, 0),) * max(1, len(self.shape)) if coordinate is None else self.box_at(coordinate)
        )

    @cached_property
    def local_shape(self) -> torch.Size:
        """Shape of this rank's box; `(0,)` for a rank outside the mesh."""
        if getattr(self.mesh, "coordinate", None) is None:
            return torch.Size((0,))
        return torch.Size(stop - start for start, stop in self.box)

    @cached_property
    def largest_local_numel(self) -> int:
        """Elements of the largest box."""
        return math.prod(self.largest_local_shape)

    @cached_property
    def largest_local_shape(self) -> tuple[int, ...]:
        """Per dim the length of the longest part: the first one, if the interval is cut evenly."""
        lengths = []
        for size, cuts in zip(self.shape, self._dim_cuts, strict=True):
            length = size if cuts.sized is None else cuts.sized.longest
            for _, parts in cuts.chunked:
                length = -(-length // parts)
            lengths.append(length)
        return tuple(lengths)

    @cached_property
    def has_empty_part(self) -> bool:
        """Whether the box of some rank has no elements."""
        if self.spec.sizes or any(len(axes) > 1 for axes in self.spec.dims):
            return any(box_size(box) == 0 for _, box in self.boxes())
        # no part is smaller than the last
        return box_size(self.box_at([n - 1 for n in self.mesh.shape])) == 0

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * self.dtype.itemsize

    @cached_property
    def meta(self) -> torch.Tensor:
        """A meta tensor of the global shape, the storage of this layout's `ShardedTensor`s."""
        # It is used after the transform or mode has ended.
        with (
            outside_of_transforms(),
            outside_of_program_modes(),
            torch.inference_mode(False),
            thread_context.setting(on_stand_ins=True),
        ):
            return torch.empty(self.shape, dtype=self.dtype, device="meta")

    def __str__(self) -> str:
        """Return a text that is the same on every rank, for errors."""
        sizes = ", ".join(
            f"{name}={size}"
            for name, size in zip(self.mesh.axis_names, self.mesh.shape, strict=True)
        )
        return f"{dtype_name(self.dtype)}{list(self.shape)} @ {self.spec} on ({sizes})"

    @cached_property
    def fingerprint(self) -> int:
        """A hash of the layout, the same on every rank of its mesh."""
        return zlib.crc32(f"{self} {self.mesh.ranks.tobytes()}".encode())

    def __repr__(self) -> str:
        inside = getattr(self.mesh, "coordinate", None) is not None
        return f"{self}, local {list(self.local_shape)}" if inside else str(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return make_layout, (self.mesh, self.spec, tuple(self.shape), self.dtype)

    def __copy__(self) -> Layout:
        return self

    def __deepcopy__(self, memo: dict[Any, Any]) -> Layout:
        return memo[ELSEWHERE](self) if ELSEWHERE in memo else self


class _SizedCut(NamedTuple):
    """A dim cut into parts of given sizes.

    Attributes:
        axes: `(index, size)` of the mesh axes whose ranks hold the parts, major to minor.
        bounds: where each part starts, and where the last one stops.
    """

    axes: tuple[tuple[int, int], ...]
    bounds: tuple[int, ...]

    def part_at(self, coordinate: Sequence[int]) -> tuple[int, int]:
        """Return the interval of the rank at a coordinate of the mesh."""
        part = 0
        for axis, size in self.axes:
            part = part * size + coordinate[axis]
        return self.bounds[part], self.bounds[part + 1]

    @property
    def longest(self) -> int:
        """Length of the longest part."""
        return max(stop - start for start, stop in pairwise(self.bounds))


class _DimCuts(NamedTuple):
    """How a dim is cut: into parts of given sizes, each of which is then chunked by further axes.

    Attributes:
        sized: the first cut; None if no sizes are given.
        chunked: `(index, size)` of the other mesh axes, major to minor.
    """

    sized: _SizedCut | None
    chunked: tuple[tuple[int, int], ...]


def make_layout(mesh: AbstractMesh, spec: P, shape: Sequence[int], dtype: torch.dtype) -> Layout:
    """Call `Layout.of`: a function with a global name, which `torch.load` can be told to trust."""
    return Layout.of(mesh, spec, shape, dtype)


def chunk(start: int, stop: int, parts: int, index: int) -> tuple[int, int]:
    """Return the `index`-th of `parts` pieces of `[start, stop)`, cut as by `torch.chunk`.

    They are equal, but the last ones may be short or empty.
    """
    step = -(-(stop - start) // parts)
    low = min(start + index * step, stop)
    return low, min(low + step, stop)


def distinct_mesh_names(one: AbstractMesh, other: AbstractMesh) -> tuple[str, str]:
    """Return the names of two meshes for an error, with ranks if the names are the same."""
    if repr(one) != repr(other):
        return repr(one), repr(other)
    return f"{one} of ranks {one.ranks.tolist()}", f"{other} of ranks {other.ranks.tolist()}"


def dtype_name(dtype: torch.dtype) -> str:
    """Return the short name of a dtype: `f32`, `bf16`, `i64`."""
    return _DTYPE_NAMES.get(dtype, str(dtype).removeprefix("torch."))


# -- the layouts of a mesh -------------------------------------------------------------------------


class MeshLayouts:
    """The layouts of one mesh, and data computed once for all of them.

    Attributes:
        recent: the last two thousand, by the spelling in which they were asked for and by their
            normal one.
        alive: all that something refers to, by spec, shape and dtype.
        answers: function -> its answers by arguments, see `cached_on_mesh`.
        functions: mapped functions of the program -> what their calls on this mesh have in common.
        unmoved: operators that need no communication for any shape -> their results, filled by
            `ops/rules/propagation.py`.
    """

    __slots__ = ("alive", "answers", "functions", "recent", "unmoved")

    def __init__(self) -> None:
        self.recent: dict[Any, Layout] = {}
        self.alive: WeakValueDictionary[Any, Layout] = WeakValueDictionary()
        self.answers: dict[Any, dict[Any, Any]] = {}
        self.functions: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
        self.unmoved: dict[Any, Any] = {}

    @staticmethod
    def of(mesh: AbstractMesh) -> MeshLayouts:
        """Return the layouts of a mesh, the same object at every call and in every thread."""
        layouts: Any = mesh.cache
        if layouts is None:
            with _lock:
                layouts = mesh.cache = mesh.cache or MeshLayouts()
        return layouts

    def forget_plans(self) -> None:
        """Drop what was computed from layouts and the mesh's topology, above all compiled plans."""
        for layout in (*self.recent.values(), *self.alive.values()):
            layout.caches.clear()


def _intern(
    mesh: AbstractMesh, spec: P, shape: torch.Size, dtype: torch.dtype, is_cached: bool = True
) -> Layout:
    """Return the layout of the mesh with this spec, made if there is none.

    Args:
        is_cached: whether to add it to the recent ones.

    Raises:
        ValueError: see `Layout.of`.
    """
    if spec.sizes:
        cuts = [
            _normal_cuts(mesh, spec, dim, shape) if spec.cuts[dim] else ()
            for dim in range(len(shape))
        ]
        spec = P.of_cuts(cuts, dict(spec.unreduced))
    key = (spec, shape, dtype)
    layouts = MeshLayouts.of(mesh)
    layout = layouts.recent.get(key) or layouts.alive.get(key)
    if layout is None:
        _check_average(spec, dtype)
        layout = layouts.alive[key] = Layout(mesh, spec, shape, dtype)
    return keep(layouts.recent, key, layout, _LIMIT) if is_cached else layout


# -- sizes -----------------------------------------------------------------------------------------


def _normal_cuts(mesh: AbstractMesh, spec: P, dim: int, shape: torch.Size) -> list[Cut]:
    """Return one dim's cuts with sizes for as few axes as possible: equal layouts, equal specs.

    Raises:
        ValueError: sizes that do not fit the mesh or the shape.
    """
    (axes, sizes), *rest = spec.cuts[dim]
    if sizes is None:
        return [Cut(axes), *rest]
    _check_sizes(mesh, spec, dim, shape)
    for count in range(len(axes) + 1):
        inner = [mesh.size(axis) for axis in axes[count:]]
        inner_parts = math.prod(inner)
        merged = tuple(sum(sizes[i : i + inner_parts]) for i in range(0, len(sizes), inner_parts))
        if _chunk_lengths(merged, inner) == sizes:
            break
    outer = [Cut(axes[:count], merged)] if count else []
    return [*outer, *[Cut((axis,)) for axis in axes[count:]], *rest]


def _chunk_lengths(lengths: tuple[int, ...], parts: Sequence[int]) -> tuple[int, ...]:
    """Return the lengths of the parts when each interval is chunked by one axis after the other."""
    for n in parts:
        lengths = tuple(
            stop - start
            for length in lengths
            for start, stop in (chunk(0, length, n, i) for i in range(n))
        )
    return lengths


def _check_sizes(mesh: AbstractMesh, spec: P, dim: int, shape: torch.Size) -> None:
    axes, sizes = spec.cuts[dim][0]
    size_count, part_count = len(sizes or ()), mesh.size(axes)
    where = ", ".join(f"{axis}={mesh.size(axis)}" for axis in axes)
    if size_count != part_count:
        raise ValueError(
            f"{spec} gives {size_count} sizes for dim {dim}, but ({where}) cuts it into "
            f"{part_count} parts; write {part_count} sizes, one for each rank of the axis (of "
            "several axes, for each combination of their ranks), 0 for an empty part"
        )
    if sum(sizes or ()) != shape[dim]:
        raise ValueError(
            f"{spec} cuts dim {dim} over ({where}) into parts of {sizes}, {sum(sizes or ())} "
            f"elements in total, but dim {dim} of {list(shape)} has {shape[dim]}; write sizes that "
            f"add up to {shape[dim]}"
        )


def _check_average(spec: P, dtype: torch.dtype) -> None:
    averaged = [axis for axis, kind in spec.unreduced if kind == "avg"]
    if averaged and not (dtype.is_floating_point or dtype.is_complex):
        raise ValueError(
            f"{spec} has an average pending over {averaged[0]!r} for a tensor of "
            f"{dtype_name(dtype)}, but the average of integers is not an integer; use "
            "Partial('sum'), or convert the tensor to a floating dtype first"
        )
