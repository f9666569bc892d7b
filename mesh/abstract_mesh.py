"""AbstractMesh: a grid of ranks with named axes, for planning, counting and drawing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import Any, NamedTuple, Protocol, Self

import numpy as np

from . import errors
from .mesh_shape import MeshShape
from .text import shortened, whole_number
from .topology import Topology

Axes = str | tuple[str, ...]
MOST_RANKS = 1 << 20  # of a mesh: a size that was meant for something else would take all memory


class MeshCache(Protocol):
    """What a package that builds on meshes keeps with one of them, see `AbstractMesh.cache`."""

    def forget_plans(self) -> None:
        """Drop what depends on the topology of the mesh, which has changed."""


# in the memo of a deepcopy: what returns the counterpart of a mesh or a layout on another mesh
ELSEWHERE = "ELSEWHERE"


class AbstractMesh:
    """AbstractMesh(shape, names): names and sizes of a mesh over the ranks 0 to n-1, no processes.

    Immutable; equal meshes compare equal and hash alike.

    Attributes:
        axis_names: one name per axis, major to minor (`mesh_dim_names` is the same).
        shape: one size per axis: a tuple that is also a mapping, `mesh.shape["tp"]`.
        axis_sizes: the same as a plain tuple.
        ndim: number of axes.
        ranks: the ranks in the shape of the mesh, int64, read-only.
        cache: data that the package that builds on meshes keeps with this one; None until that
            package sets it.

    Raises: MeshError when a size is not a positive integer, names are missing or appear twice.

    >>> from shardmesh.mesh import AbstractMesh
    >>> mesh = AbstractMesh((4096, 8), ("dp", "tp"))
    >>> mesh.size(), mesh.size("tp"), mesh.coordinate_of(11)
    (32768, 8, (1, 3))
    """

    axis_names: tuple[str, ...]
    shape: MeshShape
    axis_sizes: tuple[int, ...]
    ndim: int
    ranks: np.ndarray
    cache: MeshCache | None

    def __init__(self, shape: Sequence[int], axis_names: Sequence[str] | None = None) -> None:
        shape = checked_shape(shape)
        self._set(
            np.arange(prod(shape), dtype=np.int64).reshape(shape), checked_names(axis_names, shape)
        )

    def _set(self, ranks: np.ndarray, names: tuple[str, ...]) -> None:
        ranks.setflags(write=False)
        self.ranks = ranks
        self.axis_sizes = ranks.shape
        self.shape = MeshShape(ranks.shape, names)
        self.ndim = ranks.ndim
        self.axis_names = names
        self._index = {name: i for i, name in enumerate(names)}
        self.cache = None
        self._parts: dict[Any, Any] = {}
        self._flattened: dict[str, tuple[str, ...]] = {}
        # meshes that this is a part of; its axes in theirs
        self._wholes: list[tuple[AbstractMesh, dict[str, tuple[str, ...]]]] = []
        self._origin: MeshOrigin | None = None
        # meshes of the same ranks in the same order, with fewer axes
        self._unflattened_from: list[MeshOrigin] = []
        self._own_topology: Topology | None = None
        self._is_calibrated = False
        self._topology: Topology | None = None
        self._node_ids: dict[Topology, np.ndarray] = {}
        self._crossing_axes: dict[Topology, tuple[str, ...]] = {}
        self._hash = hash(
            (type(self), ranks.shape, names, ranks.tobytes() if ranks.size <= 4096 else None)
        )

    @property
    def mesh_dim_names(self) -> tuple[str, ...]:
        """The axis names, as torch calls them."""
        return self.axis_names

    @property
    def devices(self) -> np.ndarray:
        """The ranks in the shape of the mesh.

        JAX has device objects here; a rank has one device, so the rank number identifies it.
        """
        return self.ranks

    device_ids = devices

    @property
    def shape_tuple(self) -> tuple[tuple[str, int], ...]:
        """Pairs of name and size."""
        return tuple(self.shape.items())

    @property
    def empty(self) -> bool:
        """False: a mesh has at least one rank."""
        return False

    @property
    def topology(self) -> Topology:
        """The cost of communication and the node of each rank, which the planner prices plans with.

        Unless it is set, a part of a mesh (`mesh["tp"]`, `mesh.flatten()`) has the topology of the
        whole, and any other mesh has `Topology.default` for its device type ("cuda" without
        devices), with the nodes that torchrun sets for processes (LOCAL_WORLD_SIZE, if all nodes
        have as many ranks), else with one node.

        Set it to a `Topology`, or to None for the default; cached plans are dropped. All users of a
        mesh share its topology, so set it before sharding, and to the same value on all ranks: each
        rank makes its own plans, and ranks with different plans deadlock.

        Raises: TypeError if it is not a topology; MeshError when a crossing axis is not an axis of
        the mesh.

        Communication: none (`calibrate` measures).

        >>> mesh = AbstractMesh((4, 8), ("dp", "tp"))
        >>> mesh.topology = Topology.default("cuda", crossing=("dp",))
        >>> mesh.topology.nodes(mesh), mesh["tp"].topology.nodes(mesh["tp"])
        (4, 1)
        """
        if self._topology is None:
            self._topology = (
                self._own_topology or self._inherited_topology() or self._default_topology()
            )
        return self._topology

    @topology.setter
    def topology(self, topology: Topology | None) -> None:
        if topology is not None:
            if not isinstance(topology, Topology):
                raise TypeError(
                    f"mesh.topology = {topology!r}: it must be a Topology, such as "
                    'Topology.default("cuda", node_size=8), or None for the default.'
                )
            topology.check_axes(self)
        self._own_topology = topology
        self._is_calibrated = False
        self._keep_alive()
        self._forget_plans()

    def _keep_alive(self) -> None:
        """Keep this mesh as long as its world: the program has changed it and may ask for it."""

    def _default_topology(self) -> Topology:
        return Topology.default("cuda")

    def _inherited_topology(self) -> Topology | None:
        above = self._inherits_from()
        return None if above is None else above.mesh.topology.part(above.made_of)

    def _inherited_node_ids(self, topology: Topology) -> np.ndarray | None:
        """Return the nodes of a part by the whole mesh, None if its topology is not from there."""
        above = self._inherits_from()
        if above is None or self._own_topology is not None or topology != self.topology:
            return None
        ids = above.mesh.topology.node_ids(above.mesh)
        if self._origin is not None:
            ids = above.mesh._cut(ids, join_names(above.made_of.values()))
        return ids.reshape(self.shape)

    def _forget_plans(self) -> None:
        """Drop cached values that depend on the topology, here and in the parts that inherit it."""
        self._topology = None
        self._node_ids.clear()
        self._crossing_axes.clear()
        if self.cache is not None:
            self.cache.forget_plans()
        for part in self._parts.values():
            above = part._inherits_from()
            if above is not None and above.mesh is self and part._own_topology is None:
                part._forget_plans()

    def axis_index(self, name: str) -> int:
        """Return the position of the axis. Raises: MeshError for an unknown name."""
        try:
            return self._index[name]
        except (KeyError, TypeError):
            raise errors.unknown_axis(name, self.axis_names) from None

    def size(
        self, axis: str | int | tuple[str, ...] | None = None, *, mesh_dim: int | None = None
    ) -> int:
        """Return the number of ranks along an axis, along several together, or in the mesh.

        An axis is a name or a position; torch calls it `mesh_dim`.

        Raises: MeshError for an unknown axis or one named twice.
        """
        if axis is None:
            return self.ranks.size if mesh_dim is None else self.size(mesh_dim)
        if isinstance(axis, int):
            return self.axis_sizes[self._position(axis)]
        return prod(self.axis_sizes[self._index[name]] for name in self._checked_axes(axis))

    def coordinate_of(self, rank: int) -> tuple[int, ...] | None:
        """Return the index of a rank along each axis; None when the rank is not in the mesh."""
        if not 0 <= rank < self.ranks.size:
            return None
        return unravel(rank, self.axis_sizes)

    def __getitem__(self, axes: Axes) -> Self:
        """Return the mesh of only these axes, in this order; a name given by `flatten` is one axis.

        Raises: MeshError for an unknown axis or one named twice.
        """
        self._checked_axes(axes)
        return self._part({name: self._flattened.get(name, (name,)) for name in _as_tuple(axes)})

    def flatten(self, axes: Axes | None = None, name: str | None = None) -> Self:
        """Return a mesh with the axes as one.

        All axes by default, major to minor in the order of `axes`. The new one is named like
        "dp_tp" unless a name is passed.

        The name can be used afterwards on this mesh, as in `mesh["dp_tp"]` or
        `mesh["pp", "dp_tp"]`, and on the meshes that this one is a part of.

        Raises: MeshError for an unknown axis, one named twice, or a name that is used already.
        """
        names = self._checked_axes(self.axis_names if axes is None else axes)
        name = "_".join(names) if name is None else name
        self._name_flattened(name, names)
        return self._part({name: names})

    def _name_flattened(self, name: str, names: tuple[str, ...]) -> None:
        """Define the name for these axes, here and in every mesh that this one is a part of."""
        axes_of_mesh: dict[int, tuple[AbstractMesh, tuple[str, ...]]] = {}
        todo: list[tuple[AbstractMesh, tuple[str, ...]]] = [(self, names)]
        while todo:
            mesh, axes = todo.pop()
            if id(mesh) in axes_of_mesh:
                continue
            axes_of_mesh[id(mesh)] = mesh, axes
            taken = (name,) if name in mesh._index else mesh._flattened.get(name, axes)
            if taken != axes:
                raise errors.MeshError(
                    f"flatten({names}): the name {name!r} is already used for {taken} of {mesh!r}; "
                    "give another name=."
                )
            todo += [
                (whole, join_names(made_of[axis] for axis in axes))
                for whole, made_of in mesh._wholes
            ]
        for mesh, axes in axes_of_mesh.values():
            if name not in mesh._index:
                mesh._flattened[name] = axes

    def _part(self, made_of: dict[str, tuple[str, ...]]) -> Self:
        """Return the part with these axes, each made of axes of this mesh; cached."""
        if (
            all(axes == (name,) for name, axes in made_of.items())
            and tuple(made_of) == self.axis_names
        ):
            return self
        key = tuple(made_of.items())
        if key not in self._parts:
            part = self._parts[key] = self._make_part(made_of)
            if part is not self:
                part._wholes.append((self, made_of))
            if part._origin is None and not self._descends_from(part):
                part._origin = MeshOrigin(self, made_of)
                part._forget_plans()
        return self._parts[key]

    def _inherits_from(self) -> MeshOrigin | None:
        """Return the mesh that this one has its topology and its root from, None if from none."""
        if self._origin is not None:
            return self._origin
        return self._unflattened_from[0] if self._unflattened_from else None

    def _ancestors(self) -> list[AbstractMesh]:
        """Return this mesh and all that it is a part of or was unflattened from, nearest first."""
        meshes: list[AbstractMesh] = [self]
        for mesh in meshes:
            for above, _ in (*mesh._wholes, *mesh._unflattened_from):
                if all(above is not known for known in meshes):
                    meshes.append(above)
        return meshes

    @property
    def root(self) -> AbstractMesh:
        """The mesh that this one was first derived from, itself if from none.

        By slicing, `flatten`, `unflatten` or `concatenate`.

        Equal device meshes of a world are one object, so a mesh that is made again by another way
        keeps its root.

        >>> mesh = AbstractMesh((2, 8), ("dp", "tp"))
        >>> mesh["tp"].root is mesh, mesh.root is mesh
        (True, True)
        """
        above = self._inherits_from()
        return self if above is None else above.mesh.root

    def unflatten(self, axis: str | int, sizes: Sequence[int], names: Sequence[str]) -> Self:
        """Return the mesh with one axis split into several, the inverse of `flatten`.

        The axis is a name or a position; the new ones are major to minor.

        Axes of size 1 may be added anywhere. Slices of several unflattened views of one mesh can be
        put together by `DeviceMesh.concatenate`.

        Raises: MeshError for an unknown axis, sizes whose product is not that of the axis, another
            number of names than sizes, or a name that another axis has.

        Communication: none.

        >>> mesh = AbstractMesh((16,), ("world",))
        >>> mesh.unflatten("world", (2, 8), ("dp", "tp"))
        AbstractMesh(dp=2, tp=8)
        """
        return self._make_unflattened(*self._split_axis(axis, sizes, names))

    def _split_axis(
        self, axis: str | int, sizes: Sequence[int], names: Sequence[str]
    ) -> tuple[tuple[int, ...], dict[str, tuple[str, ...]]]:
        """Return the shape after `unflatten`, and of which axis each new axis is a part."""
        position = self.axis_index(axis) if isinstance(axis, str) else self._position(axis)
        sizes = checked_shape(sizes)
        parts = checked_names(names, sizes)
        old = self.axis_names[position]
        if prod(sizes) != self.axis_sizes[position]:
            raise errors.MeshError(
                f"unflatten({axis!r}, {sizes}): the product of the sizes is {prod(sizes)}, but "
                f"axis {old!r} of {self!r} has {self.axis_sizes[position]} ranks; write sizes "
                "whose product is that."
            )
        shape = (*self.axis_sizes[:position], *sizes, *self.axis_sizes[position + 1 :])
        all_names = checked_names(
            (*self.axis_names[:position], *parts, *self.axis_names[position + 1 :]), shape
        )
        return shape, {name: (old,) if name in parts else (name,) for name in all_names}

    def _make_unflattened(
        self, shape: tuple[int, ...], made_of: dict[str, tuple[str, ...]], **options: Any
    ) -> Any:
        """Return the mesh of these ranks in this shape, whose axes are parts of this one's."""
        mesh = self._make_reshaped(shape, tuple(made_of), **options)
        if (
            mesh is not self
            and not self._descends_from(mesh)
            and all(above is not self for above, _ in mesh._unflattened_from)
        ):
            mesh._unflattened_from.append(MeshOrigin(self, made_of))
            self._parts[mesh, "unflattened"] = mesh
            mesh._forget_plans()
        return mesh

    def _make_reshaped(self, shape: tuple[int, ...], names: tuple[str, ...]) -> Any:
        return AbstractMesh(shape, names)

    def _descends_from(self, mesh: AbstractMesh) -> bool:
        """Return whether this is `mesh` or a part of it.

        Equal device meshes are one object, so a part of a part may be its whole.
        """
        above = self._inherits_from()
        return self is mesh or (above is not None and above.mesh._descends_from(mesh))

    def _make_part(self, made_of: dict[str, tuple[str, ...]]) -> Any:
        return AbstractMesh(tuple(self.size(axes) for axes in made_of.values()), tuple(made_of))

    def _cut(self, values: np.ndarray, names: tuple[str, ...]) -> np.ndarray:
        """Return the values of the part of these axes that this rank belongs to.

        `values` has one per rank of this mesh.
        """
        positions = [self._index[name] for name in names]
        coordinate = self._coordinate_or_zeros()
        index = tuple(slice(None) if i in positions else coordinate[i] for i in range(self.ndim))
        # The kept axes are in mesh order now; argsort of argsort finds each named axis among them.
        return values[index].transpose(np.argsort(np.argsort(positions)))

    def _coordinate_or_zeros(self) -> tuple[int, ...]:
        return (0,) * self.ndim

    def _position(self, axis: int) -> int:
        if not -self.ndim <= axis < self.ndim:
            raise errors.AxisIndexError(
                f"axis {axis} is out of range: {self!r} has {self.ndim} axes, 0 to {self.ndim - 1}."
            )
        return axis % self.ndim

    def _checked_axes(self, axes: Axes) -> tuple[str, ...]:
        if not isinstance(axes, str | tuple | list):
            raise errors.MeshError(
                f"axes {axes!r}: must be a name or a tuple of names of {list(self.axis_names)}."
            )
        names = join_names(
            self._flattened.get(name) or (self.axis_names[self.axis_index(name)],)
            for name in _as_tuple(axes)
        )
        if not names:
            raise errors.MeshError(f"no axis given: give at least one of {list(self.axis_names)}.")
        if len(set(names)) != len(names):
            raise errors.repeated_axis(names)
        return names

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if type(other) is not type(self):
            return NotImplemented
        return self.axis_names == other.axis_names and np.array_equal(self.ranks, other.ranks)

    def __hash__(self) -> int:
        return self._hash

    def __copy__(self) -> AbstractMesh:
        return self

    def __deepcopy__(self, memo: dict[Any, Any]) -> AbstractMesh:
        return memo[ELSEWHERE](self) if ELSEWHERE in memo else self

    def __reduce__(self) -> tuple[Any, ...]:
        return AbstractMesh, (self.axis_sizes, self.axis_names)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({axes_text(self.shape, self.axis_names)})"


class MeshOrigin(NamedTuple):
    """A mesh that another was derived from.

    Attributes:
        mesh: the whole of a part, or the mesh that was unflattened.
        made_of: for each axis of the derived mesh, the axes of `mesh` that it is made of, or the
            one that it is a part of.
    """

    mesh: AbstractMesh
    made_of: dict[str, tuple[str, ...]]


def join_names(parts: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    """Return the names of all parts, in order."""
    return tuple(name for part in parts for name in part)


def _as_tuple(axes: Axes) -> tuple[str, ...]:
    return (axes,) if isinstance(axes, str) else tuple(axes)


def unravel(index: int, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the coordinate of a flat index (np.unravel_index takes ten times as long)."""
    coordinate = []
    for size in reversed(shape):
        index, i = divmod(index, size)
        coordinate.append(i)
    return tuple(reversed(coordinate))


def axes_text(shape: Sequence[int], names: Sequence[str]) -> str:
    """Return a text such as dp=2, tp=8."""
    return ", ".join(f"{name}={size}" for name, size in zip(names, shape, strict=True))


def parse_mesh(text: str) -> AbstractMesh:
    """parse_mesh("dp=2,tp=4") -> AbstractMesh((2, 4), ("dp", "tp")). Raises: ValueError."""
    axes = [part.partition("=") for part in text.split(",")]
    if not all(name.strip() and (whole_number(size.strip()) or 0) > 0 for name, _, size in axes):
        raise ValueError(
            f"{shortened(text)!r} is not a mesh; write its axes with positive sizes, major to "
            "minor, as in dp=2,tp=4"
        )
    return AbstractMesh([int(size) for _, _, size in axes], [name.strip() for name, _, _ in axes])


def checked_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape as a tuple of ints, before anything of its size is allocated.

    Raises: MeshError when it is not one of positive integers, or has more ranks than any job.
    """
    try:
        sizes = tuple(int(s) for s in shape)
    except (TypeError, ValueError, OverflowError):
        raise errors.bad_shape(shape) from None
    if (
        not sizes
        or min(sizes) < 1
        or any(s != original for s, original in zip(sizes, shape, strict=True))
    ):
        raise errors.bad_shape(shape)
    if prod(sizes) > MOST_RANKS:
        digits = [
            str(size)
            if size < 1 << 64
            else f"{size:.0e}"
            if size < 1 << 1000
            else "more than 2**1000"
            for size in sizes
        ]
        text = shortened(" x ".join(digits), 80)
        raise errors.MeshError(
            f"a mesh of {text} ranks: write sizes whose product is at most {MOST_RANKS}."
        )
    return sizes


def checked_names(names: Sequence[str] | None, shape: Sequence[int]) -> tuple[str, ...]:
    """Return one name per axis; for None "axis_0", "axis_1", ...

    Raises: MeshError when they do not fit the shape.
    """
    if names is None:
        return tuple(f"axis_{i}" for i in range(len(shape)))
    axis_names = (names,) if isinstance(names, str) else tuple(names)
    if len(axis_names) != len(shape) or not all(isinstance(n, str) and n for n in axis_names):
        raise errors.names_do_not_fit(names, shape)
    if len(set(axis_names)) != len(axis_names):
        raise errors.repeated_axis(axis_names)
    return axis_names
