"""DeviceMesh: an N-D grid of the ranks of a world, with named axes and a communication group per axis."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cached_property
from math import prod
from typing import Any, Self

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh as TorchMesh

from . import current_mesh, errors
from .abstract_mesh import AbstractMesh, Axes, axes_text, checked_names, checked_shape, joined, unravel
from .comm.current_world import current_world
from .comm.group import Group
from .comm.process import ProcessGroup, ProcessWorld
from .comm.world import World, active_world
from .launch.environment import unconnected
from .launch.process_groups import local_device, start_processes
from .monitor.startup import same_mesh
from .monitor.torch_calls import hooks
from .topology import Topology, torchrun_node_size


class DeviceMesh(AbstractMesh):
    """DeviceMesh(device_type, ranks): the ranks of a world in an N-D grid with named axes.

    The ranks may be any of the world's, in any order. On a rank that is not among them `coordinate` is None. In one
    world the same device type, ranks and names give the same object, so meshes can be compared by identity.

    Attributes:
        axis_names, shape, ndim, ranks: as in `AbstractMesh`.
        device_type: "cpu", "cuda", ...
        device: the device of this rank's part of a tensor.
        world: the world that the ranks belong to.
        coordinate: this rank's index along each axis, or None.

    Raises: MeshError when a rank appears twice or does not exist, names do not fit, or the world's backend does not support the
        device type.
    Communication: none; process groups are made by their first collective. In a torchrun job without a default process
        group, that group is started first.

        DeviceMesh("cpu", [[0, 1], [2, 3]], axis_names=("dp", "tp"))
    """

    device_type: str
    device: torch.device
    world: World
    coordinate: tuple[int, ...] | None
    _groups: dict[Any, Group]
    _torch: Any

    def __new__(
        cls,
        device_type: str,
        mesh: Any,
        *,
        mesh_dim_names: Sequence[str] | None = None,
        axis_names: Sequence[str] | None = None,
    ) -> DeviceMesh:
        ranks = _checked_ranks(mesh)
        names = checked_names(_one_of(mesh_dim_names, axis_names), ranks.shape)
        world = active_world() or start_processes(device_type)
        return _interned(world, device_type, ranks, names)

    def __init__(
        self,
        device_type: str,
        mesh: Any,
        *,
        mesh_dim_names: Sequence[str] | None = None,
        axis_names: Sequence[str] | None = None,
    ) -> None:
        # Done by __new__, which may return a mesh that exists already.
        pass

    @cached_property
    def _coordinates(self) -> dict[int, tuple[int, ...]]:
        return {int(rank): coordinate for coordinate, rank in np.ndenumerate(self.ranks)}

    @property
    def mesh(self) -> Tensor:
        """The ranks as an int32 CPU tensor of the mesh's shape, as in torch."""
        return torch.from_numpy(self.ranks.astype(np.int32))

    def coordinate_of(self, rank: int) -> tuple[int, ...] | None:
        """Return the index of a rank along each axis; None when the rank is not in the mesh."""
        return self._coordinates.get(rank)

    def __getitem__(self, axes: Axes) -> Self:
        """Return the mesh of these axes, in this order, over the ranks with the same index as this rank on the other axes.

            mesh (dp=2, tp=2)   [0 1]     on rank 2:  mesh["tp"] = [2 3]   mesh["dp"] = [0 2]   mesh["tp", "dp"] = [0 2]
                                [2 3]                                                                              [1 3]

        On a rank outside the mesh, return the slice at index 0 of the other axes, whose coordinate is None too.

        Raises: MeshError for an unknown axis or one named twice.
        Communication: none.
        """
        return super().__getitem__(axes)

    def _make_part(self, made_of: dict[str, tuple[str, ...]]) -> DeviceMesh:
        ranks = self._part_ranks(joined(made_of.values())).reshape([self.size(axes) for axes in made_of.values()])
        return _interned(self.world, self.device_type, ranks, tuple(made_of))

    def _part_ranks(self, names: tuple[str, ...]) -> np.ndarray:
        return self._cut(self.ranks, names)

    def _coordinate_or_zeros(self) -> tuple[int, ...]:
        return self.coordinate or (0,) * self.ndim

    def _default_topology(self) -> Topology:
        node_size = torchrun_node_size(self.world.size) if isinstance(self.world, ProcessWorld) else None
        return Topology.default(self.device_type, node_size)

    def group(self, axes: Axes | None = None) -> Group:
        """Return the group of ranks that differ from this rank only along these axes (all by default); the same object each time.

        Its ranks are ascending, whatever the order of the axes.

        Raises: MeshError for an unknown axis, one named twice, or on a rank outside the mesh.
        Communication: none (the group's first collective makes the process group).
        """
        key = self.axis_names if axes is None else axes
        found = self._groups.get(key)
        if found is None:
            found = self._groups[key] = self._find_group(key)
        return found

    def axes_over(self, ranks: tuple[int, ...]) -> tuple[str, ...] | None:
        """Return the axes whose `group` consists of these ranks, if `group` was called for them, else None."""
        found = next((axes for axes, group in self._groups.items() if group.ranks == ranks), None)
        return None if found is None else self._checked_axes(found)

    def _find_group(self, axes: Axes) -> Group:
        names = self._checked_axes(axes)
        self._member(f"group({axes!r})")
        return self.world.group(sorted(self._part_ranks(names).flatten().tolist()))

    def __enter__(self) -> DeviceMesh:
        """Use this mesh where none is given, inside `with mesh:`: in factories, `distribute_tensor`, `from_local`.

        `set_mesh(mesh)` does the same from the call on.

        Raises: MeshError when the mesh is one of another world.
        """
        current_mesh.enter(self)
        return self

    def __exit__(self, *_: object) -> None:
        current_mesh.leave()

    def _flatten(self, mesh_dim_name: str | None = None) -> DeviceMesh:
        """Return the mesh with all axes as one: `flatten` under torch's name."""
        return self.flatten(name=mesh_dim_name)

    def get_group(self, axis: str | int | None = None, *, mesh_dim: str | int | None = None) -> dist.ProcessGroup:
        """Return torch's process group over one axis (optional on a 1-D mesh), for calls of torch.distributed.

        Torch calls the axis `mesh_dim`.

        Raises: MeshError for an unknown axis, on a rank outside the mesh, or in a simulated or null world.
        Communication: the first call waits for all ranks of the group.
        """
        axis = mesh_dim if axis is None else axis
        group = self.group(self._one_axis(axis, "get_group"))
        if not isinstance(group, ProcessGroup):
            raise errors.MeshError(
                f"get_group({axis!r}): {self.world!r} has no torch process groups; use mesh.group({axis!r}) instead."
            )
        return group.handle

    def get_all_groups(self) -> list[dist.ProcessGroup]:
        """Return torch's process group of each axis. Communication: the first call waits for all ranks of each group."""
        return [self.get_group(name) for name in self.axis_names]

    @property
    def __class__(self) -> type:  # type: ignore[override]
        """A subclass of both DeviceMesh classes: torch's functional collectives check `isinstance(mesh, torch...DeviceMesh)`."""
        return _TorchDeviceMesh

    @property
    def _dim_group_names(self) -> Sequence[str]:
        """The name of torch's process group of each axis, read by torch's functional collectives."""
        return _GroupNames(self)

    def get_rank(self) -> int:
        """Return this process's global rank."""
        return self.world.rank

    def get_coordinate(self) -> list[int] | None:
        """Return this rank's index along each axis as a list, or None outside the mesh, as in torch."""
        return None if self.coordinate is None else list(self.coordinate)

    def get_local_rank(self, axis: str | int | None = None, *, mesh_dim: str | int | None = None) -> int:
        """Return this rank's index along an axis (optional on a 1-D mesh), which torch calls `mesh_dim`.

        Raises: MeshError for an unknown axis or on a rank outside the mesh.
        """
        name = self._one_axis(mesh_dim if axis is None else axis, "get_local_rank")
        return self._member("get_local_rank")[self.axis_index(name)]

    def index_along(self, axes: Sequence[str], rank: int | None = None) -> int:
        """Return the index of a rank, by default this one, along several axes together, major to minor.

        Raises: MeshError outside the mesh.
        """
        coordinate = self.coordinate_of(self.world.rank if rank is None else rank)
        if coordinate is None:
            raise errors.MeshError(f"rank {self.world.rank} is outside {self!r}, and has no index along {tuple(axes)}")
        index = 0
        for axis in axes:
            index = index * self.size(axis) + coordinate[self.axis_index(axis)]
        return index

    def _one_axis(self, axis: str | int | None, what: str) -> str:
        if axis is None and self.ndim > 1:
            raise errors.MeshRuntimeError(f"{what}(): {self!r} has {self.ndim} axes; name one of {list(self.axis_names)}.")
        if isinstance(axis, str):
            return axis
        return self.axis_names[self._position(axis or 0)]

    def _member(self, what: str) -> tuple[int, ...]:
        if self.coordinate is None:
            raise errors.outside_mesh(what, repr(self), self.world.rank)
        return self.coordinate

    @staticmethod
    def from_group(
        group: dist.ProcessGroup | Sequence[dist.ProcessGroup],
        device_type: str,
        mesh: Any = None,
        *,
        mesh_dim_names: Sequence[str] | None = None,
        axis_names: Sequence[str] | None = None,
    ) -> DeviceMesh:
        """Return a mesh over existing process groups: one for a 1-D mesh, or one per axis with the array of ranks as `mesh`.

        Raises: MeshError when an axis of `mesh` does not have the ranks of its group, or in a simulated or null world.
        Communication: none; the mesh uses the given groups.
        """
        world = _process_world("from_group")
        handles = [group] if isinstance(group, dist.ProcessGroup) else list(group)
        groups = [world.group_from(handle) for handle in handles]
        if mesh is None and len(groups) != 1:
            raise errors.MeshError(f"from_group with {len(groups)} groups: give mesh=, the array of ranks, as well.")
        made = DeviceMesh(
            device_type,
            groups[0].ranks if mesh is None else mesh,
            mesh_dim_names=mesh_dim_names,
            axis_names=axis_names,
        )
        if len(groups) != made.ndim:
            raise errors.MeshError(f"from_group: {len(groups)} groups for the {made.ndim} axes of {made!r}.")
        for name, given in zip(made.axis_names, groups, strict=True):
            if made.coordinate is not None and made.group(name) is not given:
                raise errors.MeshError(
                    f"from_group: axis {name!r} of {made!r} has the ranks {made.group(name).ranks} on this rank, "
                    f"but the group given for it has ranks {given.ranks}."
                )
        return made

    @staticmethod
    def from_torch(mesh: Any) -> DeviceMesh:
        """Return the same mesh as a torch DeviceMesh, using its process groups; the same object each time.

        Every function that takes a mesh also takes one of torch's, and converts it with this.

        Raises: MeshError in a simulated or null world.
        Communication: none.
        """
        world = _process_world("from_torch")
        made = world.from_torch.get(mesh)
        if made is None:
            if mesh.get_coordinate() is not None:
                for axis in range(mesh.ndim):
                    world.group_from(mesh.get_group(axis))
            made = world.from_torch[mesh] = DeviceMesh(mesh.device_type, mesh.mesh, mesh_dim_names=mesh.mesh_dim_names)
        return made

    def to_torch(self) -> Any:
        """Return a torch DeviceMesh over the same process groups; the same object each time.

        Raises: MeshError on a rank outside the mesh, or in a simulated or null world.
        Communication: the first call makes the process groups of the axes.
        """
        if self._torch is None:
            self._member("to_torch")
            groups: Any = self.get_all_groups() if self.ndim > 1 else self.get_group()
            self._torch = TorchMesh.from_group(groups, self.device_type, mesh=self.mesh, mesh_dim_names=self.axis_names)
        return self._torch

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        same = super().__eq__(other)
        return same if same is NotImplemented else same and self.device_type == other.device_type  # type: ignore

    __hash__ = AbstractMesh.__hash__

    def __reduce__(self) -> tuple[Any, ...]:
        return unpickle_mesh, (self.device_type, self.ranks.tolist(), self.axis_names)

    def __repr__(self) -> str:
        return f"DeviceMesh({self.device_type}, {axes_text(self.shape, self.axis_names)})"


class _TorchDeviceMesh(DeviceMesh, TorchMesh):  # type: ignore[misc]
    """The `__class__` of a DeviceMesh, whose `type` is DeviceMesh: it has no attributes of torch's class."""


class _GroupNames(Sequence[str]):
    """The names of the process groups of a mesh; each group is made when its name is first read."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh

    def __len__(self) -> int:
        return self._mesh.ndim

    def __getitem__(self, axis: Any) -> Any:
        return self._mesh.get_group(axis).group_name


def init_device_mesh(
    device_type: str,
    mesh_shape: Sequence[int],
    *,
    mesh_dim_names: Sequence[str] | None = None,
    axis_names: Sequence[str] | None = None,
    backend: str | None = None,
) -> DeviceMesh:
    """init_device_mesh(device_type, shape) -> DeviceMesh over all ranks of the world, in row-major order.

    In processes of a job (torchrun, `launch`; srun and mpirun with MASTER_ADDR and MASTER_PORT set) it starts the default
    process group if there is none, and binds this process to its device: see docs/launching.md. In a plain `python` process the
    world is this one rank. Inside `simulate` and `null_world` it makes a mesh of that world.

    Args:
        device_type: "cpu", "cuda", ...: the device of the tensors' parts.
        mesh_shape: one size per axis; their product is the number of ranks.
        axis_names: one name per axis (`mesh_dim_names` is the same), "axis_0", "axis_1", ... by default.
        backend: of the default process group, if it is started here; by default gloo for "cpu", NCCL for "cuda".

    Raises: MeshError when the shape does not fit the world or names do not fit the shape; LaunchEnvironmentError when
        environment variables are missing or wrong, the port is in use, the device does not exist, or the ranks
        differ in their setup; MeshMismatchError when other ranks made another mesh.
    Communication: starting the default group waits for all ranks. Every rank must make the same meshes in the same order;
        each new one sends two messages to the default group's store, without waiting for other ranks.

        mesh = init_device_mesh("cpu", (2, 4), axis_names=("dp", "tp"))
    """
    shape = checked_shape(mesh_shape)
    names = checked_names(_one_of(mesh_dim_names, axis_names), shape)
    world = active_world() or start_processes(device_type, backend)
    if prod(shape) != world.size:
        hint = unconnected(os.environ) if world.size == 1 else ""
        raise errors.shape_does_not_fit_world(f"({axes_text(shape, names)})", prod(shape), world.size, hint)
    mesh = _interned(world, device_type, np.arange(world.size, dtype=np.int64).reshape(shape), names)
    if isinstance(world, ProcessWorld):
        same_mesh.compare(mesh)
    return mesh


def as_device_mesh(mesh: Any) -> Any:
    """Return the mesh, converted if it is one of torch's own; other objects are returned unchanged."""
    return DeviceMesh.from_torch(mesh) if isinstance(mesh, TorchMesh) and not isinstance(mesh, DeviceMesh) else mesh


def common_mesh(meshes: Sequence[DeviceMesh]) -> DeviceMesh | None:
    """Return the mesh with the axes of all of these, if they are slices of one mesh of this world, else None."""
    names = tuple(dict.fromkeys(name for mesh in meshes for name in mesh.axis_names))
    for whole in list(meshes[0].world.meshes.values()):
        if set(names) <= set(whole.axis_names) and all(whole[mesh.axis_names] == mesh for mesh in meshes):
            return whole[tuple(name for name in whole.axis_names if name in names)]
    return None


def is_mesh(x: Any) -> bool:
    """Return whether `x` is a device mesh of shardmesh or torch."""
    return isinstance(x, (DeviceMesh, TorchMesh))


def _interned(world: World, device_type: str, ranks: np.ndarray, names: tuple[str, ...]) -> DeviceMesh:
    key = (device_type, ranks.shape, names, ranks.tobytes())
    mesh = world.meshes.get(key)
    if mesh is None:
        mesh = world.meshes[key] = _make(world, device_type, ranks, names)
    if ranks.size == world.size and isinstance(world, ProcessWorld):
        hooks.monitor_calls(world.monitor)
    return mesh


def _make(world: World, device_type: str, ranks: np.ndarray, names: tuple[str, ...]) -> DeviceMesh:
    flat = ranks.reshape(-1).tolist()
    members = set(flat)
    if min(members) < 0 or max(members) >= world.size:
        raise errors.ranks_outside_world((r for r in members if not 0 <= r < world.size), world.size)
    if len(members) != len(flat):
        raise errors.repeated_ranks(flat)
    mesh = object.__new__(DeviceMesh)
    mesh._set(np.ascontiguousarray(ranks), names)
    mesh.device_type, mesh.world, mesh.device = device_type, world, local_device(device_type)
    mesh._groups, mesh._torch = {}, None
    mesh.coordinate = unravel(flat.index(world.rank), ranks.shape) if world.rank in members else None
    return mesh


def unpickle_mesh(device_type: str, ranks: list[Any], names: tuple[str, ...]) -> DeviceMesh:
    return DeviceMesh(device_type, ranks, axis_names=names)


def _checked_ranks(mesh: Any) -> np.ndarray:
    ranks = np.asarray(mesh.cpu() if isinstance(mesh, Tensor) else mesh)  # a tensor may be on the default device, such as a GPU
    if ranks.dtype.kind not in "iu" or ranks.ndim == 0 or ranks.size == 0:
        raise errors.MeshError(
            f"mesh {mesh!r}: must be an array of integer ranks with at least one axis and one rank, such as [[0, 1], [2, 3]]."
        )
    return ranks.astype(np.int64)


def _one_of(mesh_dim_names: Sequence[str] | None, axis_names: Sequence[str] | None) -> Sequence[str] | None:
    if mesh_dim_names is not None and axis_names is not None and tuple(mesh_dim_names) != tuple(axis_names):
        raise errors.MeshError(
            f"mesh_dim_names={mesh_dim_names!r} and axis_names={axis_names!r} differ, but both name the axes: give one of them."
        )
    return axis_names if mesh_dim_names is None else mesh_dim_names


def _process_world(what: str) -> ProcessWorld:
    world = current_world()
    if not isinstance(world, ProcessWorld):
        raise errors.MeshError(f"{what}: {world!r} has no torch process groups; call it outside of simulate and null_world.")
    return world
