"""Tensors of a pipeline's stages, as all ranks name and move them.

    stage 0 on ranks 0 1    embed.weight  P("fsdp") on (pp=1, fsdp=2) of ranks 0 1
    stage 1 on ranks 2 3    head.weight   P("fsdp") on (pp=1, fsdp=2) of ranks 2 3

A tensor of a stage is in the tree as a `ShardedTensor` on the ranks of that stage: the pipeline's
mesh with size 1 along its axis, or the stage's own mesh with such an axis. Ranks of other stages
are outside of that mesh and hold nothing. So the tree is what checkpoints, norms and redistribution
take on any meshes, and what ranks have to tell each other is only which tensors they have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ....kernels.box import slices
from ....mesh.abstract_mesh import join_names
from ....mesh.comm.agreement import run_on_all
from ....mesh.comm.group import Group
from ....mesh.comm.null import NullWorld
from ....mesh.device_mesh import DeviceMesh
from ...layout.layout import Layout
from ...layout.spec import P
from ...lineage import seed_of
from ...tensor.sharded_tensor import ShardedTensor, local_of
from .places import places_along
from .stage_meshes import StageMeshes

# of all tensors of the tree: how a tensor was made, only the ranks of its stage know
LINEAGE = seed_of("tensor of a stage")


@dataclass(frozen=True)
class TensorMeta:
    """What other ranks need to know of a tensor of a stage.

    Attributes:
        ranks, mesh_shape, axes: of its mesh.
        spec, shape, dtype: as in `Layout`.
    """

    ranks: tuple[int, ...]
    mesh_shape: tuple[int, ...]
    axes: tuple[str, ...]
    spec: P
    shape: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(layout: Layout) -> TensorMeta:
        mesh = layout.mesh
        return TensorMeta(
            tuple(mesh.ranks.flatten().tolist()),
            tuple(mesh.ranks.shape),
            tuple(mesh.axis_names),
            layout.spec,
            tuple(layout.shape),
            layout.dtype,
        )

    def layout(self, device_type: str) -> Layout:
        ranks = np.array(self.ranks).reshape(self.mesh_shape)
        mesh = DeviceMesh(device_type, ranks, axis_names=self.axes)
        return Layout.of(mesh, self.spec, self.shape, self.dtype)

    def has_layout_of(self, other: TensorMeta) -> bool:
        """Return whether ranks at the same place of both meshes have the same box."""
        own = self.mesh_shape, self.axes, self.spec, self.shape, self.dtype
        return own == (other.mesh_shape, other.axes, other.spec, other.shape, other.dtype)


@dataclass
class WholeTree:
    """A tree by name, of which each rank of a pipeline has some entries.

    Attributes:
        holders: for each name, what the ranks that have it say of it, by their place along the
            pipeline's axis, ascending: the entry with a `TensorMeta` for each tensor. A name with
            several holders is that of a tied parameter.
        foreign: the entries of other ranks, as tensors of which this rank holds nothing.
    """

    holders: dict[str, dict[int, Any]]
    foreign: dict[str, Any] = field(default_factory=dict)

    def first_holder(self, name: str) -> int:
        return next(iter(self.holders[name]))


def _outermost(mesh: DeviceMesh, axis: str) -> tuple[DeviceMesh, str]:
    """Return the mesh that another one is a part of, if it is one, and what an axis is there.

    Raises:
        ValueError: the axis is made of several.
    """
    while mesh._origin is not None:
        outer: Any = mesh._origin.mesh
        axes = mesh._origin.made_of[axis]
        if len(axes) != 1:
            raise ValueError(
                f"pipeline: axis {axis!r} of {mesh!r} is made of {axes} of {outer!r}; make the "
                "pipeline on a mesh that has it as one axis"
            )
        mesh, axis = outer, axes[0]
    return mesh, axis


class _Columns:
    """A mesh with the pipeline's axis alone, as a part of a larger mesh.

        (replica=2, pp=3)      0 1 2    pipeline of ranks 0 1 2, stage 1 on 1 2: a mesh (dp=2)
                               3 4 5    the stages of all pipelines: (replica=2, pp=1, dp=2)

    Args:
        mesh, axis: of the pipeline.
        stage_meshes: of the pipeline.

    Attributes:
        outermost: the larger mesh; the pipeline's if that is no part of another one.
        axes: what the pipeline's axis is made of there.
        own_index: of this rank's pipeline along the other axes.
        names: what its other axes are called in meshes of stages, which may have the same axes.
    """

    def __init__(self, mesh: DeviceMesh, axis: str, stage_meshes: StageMeshes) -> None:
        self._axis = axis
        self._position = {rank: number for number, rank in enumerate(mesh.ranks.flat)}
        outermost: Any = mesh
        axes: tuple[str, ...] = (axis,)
        while outermost._origin is not None:
            outermost, made_of = outermost._origin
            axes = join_names(made_of[name] for name in axes)
        self.outermost: DeviceMesh = outermost
        self.axes = axes
        others = [name for name in outermost.axis_names if name not in axes]
        order = [outermost.axis_index(name) for name in (*others, *axes)]
        sizes = [outermost.size(name) for name in others]
        # a row for each pipeline, a column for each of its ranks
        self._ranks = np.transpose(outermost.ranks, order).reshape(*sizes, -1)
        self.own_index = tuple(np.argwhere(self._ranks == mesh.ranks.flat[0])[0][:-1])
        taken = {axis, *join_names(stage.axis_names for stage in stage_meshes.meshes)}
        self.names: dict[str, str] = {}
        for name in others:
            new = name
            while new in taken:
                new = f"outer_{new}"
            taken.add(new)
            self.names[name] = new

    def widen(self, mesh: DeviceMesh) -> tuple[np.ndarray, tuple[str, ...]]:
        """Return ranks and axes of the meshes like this one in all pipelines together.

        The pipeline's axis has size 1.
        """
        positions = np.vectorize(self._position.__getitem__, otypes=[int])(mesh.ranks)
        ranks = np.expand_dims(self._ranks[..., positions], len(self.names))
        own_axes = [name for name in mesh.axis_names if name != self._axis]
        ranks = ranks.reshape(*ranks.shape[: len(self.names) + 1], *map(mesh.size, own_axes))
        return ranks, (*self.names.values(), self._axis, *own_axes)


class StageTensors:
    """The tensors of this rank's stages, as all ranks of the pipeline name and move them.

    Args:
        mesh, axis: of the pipeline.
        stage_meshes: if places have different numbers of ranks; None if they are slices of `mesh`.

    Attributes:
        mesh: the pipeline's, or the mesh that this is a part of.
        axis: the pipeline's; on `mesh`, if places are slices.
        group: that of the places.
        place: of this rank along the axis.
    """

    def __init__(
        self, mesh: DeviceMesh, axis: str, stage_meshes: StageMeshes | None = None
    ) -> None:
        self._stage_meshes = stage_meshes
        self._columns: _Columns | None = None
        if stage_meshes is None:
            mesh, axis = _outermost(mesh, axis)
            self._axes_of_pipeline: tuple[str, ...] = (axis,)  # on `mesh`
            self._places = places_along(mesh, axis)
        else:
            self._columns = _Columns(mesh, axis, stage_meshes)
            mesh = self._columns.outermost
            self._axes_of_pipeline = self._columns.axes
            self._places = stage_meshes.places
        self.mesh = mesh
        self.axis = axis
        self.group: Group = self._places.group
        self.place = self._places.own
        self._layouts: dict[Layout, Layout] = {}
        self._stage_mesh = self.mesh_of(self.place)
        self._stage_ranks = set(self._stage_mesh.ranks.flat)
        if stage_meshes is not None:
            self._stage_ranks = set(self._places.ranks[self.place])

    def _mesh_of(self, ranks: np.ndarray, names: Sequence[str]) -> DeviceMesh:
        return DeviceMesh(self.mesh.device_type, ranks, axis_names=tuple(names))

    def mesh_of(self, place: int) -> DeviceMesh:
        """Return the mesh of the stages at a place along the axis, on which that has size 1."""
        if self._stage_meshes is not None:
            return self._with_axis(self._stage_meshes.meshes[place])
        ranks = np.take(self.mesh.ranks, [place], self.mesh.axis_index(self.axis))
        return self._mesh_of(ranks, self.mesh.axis_names)

    # -- to the tree -------------------------------------------------------------------------------

    def layout_of(self, x: Tensor) -> Layout:
        """Return the layout of a tensor of this rank's stages in the tree.

        A plain tensor is the same on all ranks of its stage.

        Raises:
            ValueError: it is on ranks of several stages.
        """
        if not isinstance(x, ShardedTensor):
            return Layout.of(self._stage_mesh, P(), x.shape, x.dtype)
        layout = self._layouts.get(x._layout)
        if layout is None:
            layout = self._layouts[x._layout] = self._layout_of(x)
        return layout

    def _layout_of(self, x: ShardedTensor) -> Layout:
        mesh: Any = x.mesh
        spec = x.spec
        if self._is_stage(mesh):
            return Layout.of(self._with_axis(mesh), spec, x.shape, x.dtype)
        # replicated over the axes of the stage that its mesh lacks
        made_of = {name: (name,) for name in mesh.axis_names}
        while mesh._origin is not None and not self._is_stage(mesh):
            mesh, outer = mesh._origin
            made_of = {
                name: join_names(outer[axis] for axis in axes) for name, axes in made_of.items()
            }
        is_stage = self._is_stage(mesh)
        crosses_stages = not set(self._axes_of_pipeline).isdisjoint(join_names(made_of.values()))
        if crosses_stages or not (is_stage or mesh is self.mesh):
            raise ValueError(
                f"pipeline: {x._layout} is not on the ranks of one stage: apply parallelize and "
                f"fully_shard to each stage, on axes of {self.mesh!r} other than {self.axis!r}"
            )
        if self._columns is not None and not is_stage:
            new_names = self._columns.names
            made_of = {
                name: tuple(new_names.get(axis, axis) for axis in axes)
                for name, axes in made_of.items()
            }
        renamed = P(
            *[join_names(made_of[axis] for axis in axes) for axes in spec.dims],
            sizes={join_names(made_of[axis] for axis in axes): sizes for axes, sizes in spec.sizes},
            unreduced={made: kind for axis, kind in spec.unreduced for made in made_of[axis]},
        )
        mesh = self._with_axis(mesh) if is_stage else self._stage_mesh
        return Layout.of(mesh, renamed, x.shape, x.dtype)

    def _is_stage(self, mesh: DeviceMesh) -> bool:
        return set(mesh.ranks.flat) == self._stage_ranks

    def _with_axis(self, mesh: DeviceMesh) -> DeviceMesh:
        if self._columns is not None:
            return self._mesh_of(*self._columns.widen(mesh))
        if self.axis in mesh.axis_names:
            return mesh
        return self._mesh_of(mesh.ranks[None], (self.axis, *mesh.axis_names))

    def in_tree(self, x: Any) -> Any:
        """Return a tensor as it is in the tree, with the same memory; other values unchanged."""
        if not isinstance(x, Tensor):
            return x
        return ShardedTensor._make_guarded(local_of(x).detach(), self.layout_of(x), LINEAGE)

    def exchange(self, own: Mapping[str, Any]) -> WholeTree:
        """Return what all ranks have.

        Args:
            own: this rank's entries by name, trees of tensors and values.

        Raises:
            ValueError: on every rank, as `layout_of`.

        Communication: one all_gather of small objects over the axis.
        """
        told = run_on_all(self.group, lambda: self.describe(own), ValueError)
        world = self.group.world
        if isinstance(world, NullWorld):  # whose other ranks would have what this one has
            told = {world.rank: told[world.rank]}
        return self.merge(told)

    def describe(self, own: Mapping[str, Any]) -> dict[str, Any]:
        """Return what other ranks need to know of this rank's entries.

        Raises:
            ValueError: as `layout_of`.
        """
        return _map(lambda x: TensorMeta.of(self.layout_of(x)), dict(own))

    def merge(self, told: Mapping[int, Mapping[str, Any]]) -> WholeTree:
        """Return what all ranks have, from what some of them have told, by rank.

        Ranks of the same stage tell the same.
        """
        holders: dict[str, dict[int, Any]] = {}
        for rank in sorted(told, key=self._places.of):
            for name, entry in told[rank].items():
                holders.setdefault(name, {}).setdefault(self._places.of(rank), entry)
        return WholeTree(holders)

    def in_own_pipeline(self, meta: TensorMeta) -> TensorMeta:
        """Return what a tensor is on the ranks of this rank's pipeline alone.

        They are a part of the tensor's ranks where the pipeline is one of several on parts of a
        larger mesh, and its stages have different numbers of ranks.
        """
        if self._columns is None:
            return meta
        outer_axes = set(self._columns.names.values())
        if not outer_axes.isdisjoint(join_names(meta.spec.dims)):  # no pipeline has it whole
            return meta
        ranks = np.array(meta.ranks).reshape(meta.mesh_shape)
        own = ranks[self._columns.own_index]
        axes = meta.axes[len(outer_axes) :]
        return replace(meta, ranks=tuple(own.flatten().tolist()), mesh_shape=own.shape, axes=axes)

    def everywhere(self, x: Any) -> dict[int, Any]:
        """Return the description of a plain tensor, or another value, that every rank has."""
        places = range(self._places.count)
        if not isinstance(x, Tensor):
            return dict.fromkeys(places, x)
        described: dict[int, Any] = {}
        for place in places:
            layout = Layout.of(self.mesh_of(place), P(), x.shape, x.dtype)
            described[place] = TensorMeta.of(layout)
        return described

    def group_of(self, places: Iterable[int]) -> Group:
        """Return the group of the ranks with this rank's position at these places.

        The places have equally many ranks.
        """
        return self.mesh.world.group(sorted(map(self._places.counterpart, places)))

    def whole(self, own: Mapping[str, Any], tree: WholeTree) -> dict[str, Any]:
        """Return all entries: this rank's own, and those of which it holds nothing.

        A tied parameter is that of its first holder.
        """
        entries: dict[str, Any] = {}
        for name, holders in tree.holders.items():
            first = tree.first_holder(name)
            if first == self.place:
                entries[name] = _map(self.in_tree, own[name])
                continue
            if name not in tree.foreign:
                tree.foreign[name] = _map(self.elsewhere, holders[first], TensorMeta)
            entries[name] = tree.foreign[name]
        return entries

    def elsewhere(self, meta: TensorMeta) -> ShardedTensor:
        """Return a tensor of another rank's stage, of which this rank holds nothing."""
        layout = meta.layout(self.mesh.device_type)
        local = torch.empty(layout.local_shape, dtype=meta.dtype, device=self.mesh.device)
        return ShardedTensor._make_guarded(local, layout, LINEAGE)

    # -- from the tree -----------------------------------------------------------------------------

    def part(self, value: Tensor, layout: Layout) -> Tensor | None:
        """Return this rank's part of a value in a layout of a stage; None if it has none.

        Args:
            value: a plain tensor that every rank has whole, or one on any mesh.
            layout: its dtype does not matter.

        Communication: for a `ShardedTensor` in another layout, its redistribution, in which the
            ranks of both meshes take part.
        """
        is_own = layout.mesh.coordinate is not None  # type: ignore[attr-defined]
        if not isinstance(value, ShardedTensor):
            if not is_own:
                return None
            return value.detach()[slices(layout.box)].to(self.mesh.device)
        moved: Any = value.detach()
        if value.mesh is not layout.mesh or value.spec != layout.spec:
            if value.mesh.coordinate is None and not is_own:
                return None
            moved = moved.redistribute(layout.mesh, layout.spec)
        return moved._local if is_own else None

    def own_entries(
        self, whole: Mapping[str, Any], tree: WholeTree, own: Mapping[str, Tensor]
    ) -> dict[str, Any]:
        """Return what this rank needs of a tree by parameter, in the layouts of its parameters.

        Tensors of other shapes than the parameter's are whole and plain.

        Args:
            whole: trees by the name of a parameter, of the whole model.
            tree: of parameters.
            own: this rank's parameters.

        Communication: as `part`, tensor by tensor.
        """
        entries: dict[str, Any] = {}
        for name, entry in whole.items():
            for place, meta in tree.holders[name].items():
                layout = meta.layout(self.mesh.device_type)
                leaves, structure = pytree.tree_flatten(entry)
                is_own = place == self.place
                like = own.get(name) if is_own else None
                parts = [self._own_leaf(leaf, layout, like) for leaf in leaves]
                if is_own:
                    entries[name] = pytree.tree_unflatten(parts, structure)
        return entries

    def _own_leaf(self, leaf: Any, layout: Layout, like: Tensor | None) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if leaf.shape != layout.shape:
            part = self.part(leaf, Layout.of(layout.mesh, P(), leaf.shape, leaf.dtype))
            # as it was: optimizers keep their counts of steps on the host
            return part if part is None or isinstance(leaf, ShardedTensor) else part.to(leaf.device)
        part = self.part(leaf, layout)
        return None if part is None else as_stored(part, like)


def as_stored(part: Tensor, like: Tensor | None) -> Tensor:
    """Return a part as the stage has the tensor: with its layout, or plain."""
    if not isinstance(like, ShardedTensor):
        return part
    return ShardedTensor._make_guarded(part, like._layout.replace(dtype=part.dtype), LINEAGE)


def _map(function: Callable[[Any], Any], tree: Any, kind: type = Tensor) -> Any:
    return pytree.tree_map_only(kind, function, tree)
