"""DeviceMesh: an N-D grid of the ranks of a world, with named axes and a group for each axis."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from math import prod
from typing import Any, Self

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh as TorchMesh

from . import current_mesh, errors
from .abstract_mesh import (
    AbstractMesh,
    Axes,
    MeshOrigin,
    axes_text,
    checked_names,
    checked_shape,
    join_names,
    unravel,
)
from .comm.current_world import current_world
from .comm.group import Group
from .comm.group_backend import DEFAULT, FAKE, GroupBackend, as_group_backend, backends_of_axes
from .comm.thread_context import thread_context
from .comm.world import World
from .launch.environment import hint_if_unconnected
from .launch.process_groups import local_device, start_processes
from .monitor.startup import same_mesh
from .monitor.torch_calls import hooks
from .processes.process import ProcessGroup, ProcessWorld
from .topology import Topology


class DeviceMesh(AbstractMesh):
    """DeviceMesh(device_type, ranks): the ranks of a world in an N-D grid with named axes.

    The ranks may be any of the world's, in any order. On a rank that is not among them `coordinate`
    is None. In one world the same device type, ranks and names give the same object, so meshes can
    be compared by identity. It lives as long as something refers to it, such as a tensor or a part
    of the mesh, or as long as its world if its topology was set.

    Attributes:
        axis_names, shape, ndim, ranks: as in `AbstractMesh`.
        device_type: "cpu", "cuda", ...
        device: the device of this rank's part of a tensor.
        world: the world that the ranks belong to.
        coordinate: this rank's index along each axis, or None.
        backends: for each axis, the backend of its process groups: see `backend_override` of
            `init_device_mesh`.

    Raises: MeshError when a rank appears twice or does not exist, names do not fit, or the world's
        backend does not support the device type.

    Communication: none; process groups are made by their first collective. In a torchrun job
        without a default process group, that group is started first.

        DeviceMesh("cpu", [[0, 1], [2, 3]], axis_names=("dp", "tp"))
    """

    device_type: str
    device: torch.device
    world: World
    coordinate: tuple[int, ...] | None
    backends: tuple[GroupBackend, ...]
    _flattened_backends: dict[str, GroupBackend]
    _groups: dict[Any, Group]
    _torch: Any

    def __new__(
        cls,
        device_type: str,
        mesh: Any,
        *,
        mesh_dim_names: Sequence[str] | None = None,
        axis_names: Sequence[str] | None = None,
        backend_override: Any = None,
    ) -> DeviceMesh:
        ranks = _checked_ranks(mesh)
        names = checked_names(_one_of(mesh_dim_names, axis_names), ranks.shape)
        backends = backends_of_axes(backend_override, names)
        world = thread_context.world or start_processes(device_type)
        return _cached_mesh(world, device_type, ranks, names, backends)

    def __init__(
        self,
        device_type: str,
        mesh: Any,
        *,
        mesh_dim_names: Sequence[str] | None = None,
        axis_names: Sequence[str] | None = None,
        backend_override: Any = None,
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
        """Return the mesh of these axes, in this order.

        Over the ranks with the same index as this rank on the other axes.

            mesh (dp=2, tp=2)  [0 1]   on rank 2:  mesh["tp"] = [2 3]   mesh["tp", "dp"] = [0 2]
                               [2 3]               mesh["dp"] = [0 2]                      [1 3]

        On a rank outside the mesh, return the slice at index 0 of the other axes, whose coordinate
        is None too.

        Raises: MeshError for an unknown axis or one named twice.

        Communication: none.
        """
        return super().__getitem__(axes)

    def _make_part(self, made_of: dict[str, tuple[str, ...]]) -> DeviceMesh:
        ranks = self._part_ranks(join_names(made_of.values())).reshape(
            [self.size(axes) for axes in made_of.values()]
        )
        return _cached_mesh(
            self.world,
            self.device_type,
            ranks,
            tuple(made_of),
            tuple(map(self._backend_of, made_of)),
        )

    def _make_reshaped(
        self,
        shape: tuple[int, ...],
        names: tuple[str, ...],
        backends: tuple[GroupBackend, ...] | None = None,
    ) -> DeviceMesh:
        backends = tuple(map(self._backend_of, names)) if backends is None else backends
        return _cached_mesh(
            self.world, self.device_type, self.ranks.reshape(shape), names, backends
        )

    def _backend_of(self, axis: str) -> GroupBackend:
        """Return the backend of an axis, of a name given by `flatten`, or the default one."""
        if axis in self._index:
            return self.backends[self._index[axis]]
        return self._flattened_backends.get(axis, self._default_backend)

    @property
    def _default_backend(self) -> GroupBackend:
        """The backend of groups over several axes."""
        return GroupBackend(communicator=self.communicator) if self.communicator else DEFAULT

    @property
    def communicator(self) -> str:
        """The name of this mesh's own process groups, see `duplicate`; "" if it shares those."""
        return self.backends[0].communicator

    def duplicate(self, communicator: str) -> DeviceMesh:
        """Return the same mesh with process groups of its own, for a thread that communicates too.

        Meshes share the process group of a set of ranks, and the collectives of a group must be
        called in one order on all ranks, which two threads do not keep. (MPI calls this a duplicate
        of a communicator; in torch every mesh has groups of its own.) The parts of the duplicate
        have its groups, too. Tensors move to it with `device_put`, in the same layout without
        communication.

            background = mesh.duplicate("checkpoint")       # on every rank, in the main thread
            copy = sm.device_put(x.detach(), background, x.spec)
            Thread(target=lambda: copy.redistribute(P())).start()

        Args:
            communicator: a name, the same on all ranks. The same name gives the same mesh.

        Raises: MeshError for an empty name, and on a duplicate.

        Communication: the first call waits for all ranks of the mesh: it makes the groups of each
            axis and of all axes together. (Groups of some of three or more axes are made by their
            first collective, which should be in the main thread, too.) Simulated ranks have one
            thread each, and share groups.
        """
        if not isinstance(communicator, str) or not communicator:
            raise errors.MeshError(
                f"duplicate({communicator!r}): give a name for the groups, such as 'checkpoint'."
            )
        if self.communicator:
            raise errors.MeshError(
                f"duplicate({communicator!r}): {self!r} is a duplicate already; call it on the "
                "mesh that this is one of."
            )
        mesh = self._with_communicator(communicator)
        if mesh.coordinate is not None and isinstance(self.world, ProcessWorld):
            for axes in (*mesh.axis_names, mesh.axis_names):
                group = mesh.group(axes)
                if isinstance(group, ProcessGroup) and group.size > 1:
                    _ = group.handle  # made by the first access
        return mesh

    def _with_communicator(self, communicator: str) -> DeviceMesh:
        backends = tuple(backend._replace(communicator=communicator) for backend in self.backends)
        mesh = _cached_mesh(self.world, self.device_type, self.ranks, self.axis_names, backends)
        if mesh._origin is None and not mesh._unflattened_from and self is not mesh:
            mesh._unflattened_from.append(
                MeshOrigin(self, {name: (name,) for name in self.axis_names})
            )
            self._parts[mesh, "duplicate"] = mesh
            mesh._forget_plans()
        return mesh

    def _part_ranks(self, names: tuple[str, ...]) -> np.ndarray:
        return self._cut(self.ranks, names)

    def _coordinate_or_zeros(self) -> tuple[int, ...]:
        return self.coordinate or (0,) * self.ndim

    def _leave(self, world: World) -> None:
        """Forget all groups; new ones are asked of this world: the session has closed."""
        self.world, self._groups, self._torch = world, {}, None

    def _keep_alive(self) -> None:
        self.world.configured_meshes.add(self)

    def _default_topology(self) -> Topology:
        node_size = self.world.node_size if isinstance(self.world, ProcessWorld) else None
        return Topology.default(self.device_type, node_size)

    def group(self, axes: Axes | None = None) -> Group:
        """Return the group of ranks that differ from this rank only along these axes.

        All axes by default; the same object each time.

        Its ranks are ascending, whatever the order of the axes.

        Raises: MeshError for an unknown axis, one named twice, or on a rank outside the mesh.

        Communication: none (the group's first collective makes the process group).
        """
        key = self.axis_names if axes is None else axes
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = self._find_group(key)
        return group

    def axes_over(self, ranks: tuple[int, ...]) -> tuple[str, ...] | None:
        """Return the axes whose `group` consists of these ranks.

        None if `group` was not called for them.
        """
        key = next((axes for axes, group in self._groups.items() if group.ranks == ranks), None)
        return None if key is None else self._checked_axes(key)

    def _find_group(self, axes: Axes) -> Group:
        names = self._checked_axes(axes)
        self._member(f"group({axes!r})")
        axis_tuple = (axes,) if isinstance(axes, str) else tuple(axes)
        backend = self._backend_of(axis_tuple[0]) if len(axis_tuple) == 1 else self._default_backend
        fake = [
            name
            for name in axis_tuple
            if self._backend_of(name).name == FAKE and self.size(name) > 1
        ]
        if fake:
            raise errors.MeshError(
                f"group({axes!r}): axis {fake[0]!r} of {self!r} has the backend 'fake', which "
                "moves no data; use a mesh whose axis over these ranks has a real backend "
                "(backend_override=)."
            )
        backend = self._default_backend if backend.name == FAKE else backend
        return self.world.group(sorted(self._part_ranks(names).flatten().tolist()), backend)

    def __enter__(self) -> DeviceMesh:
        """Use this mesh where none is given, inside `with mesh:`: in factories and `from_local`.

        `set_mesh(mesh)` does the same from the call on.

        Raises: MeshError when the mesh is one of another world.
        """
        current_mesh.enter(self)
        return self

    def __exit__(self, *_: object) -> None:
        current_mesh.leave()

    def unflatten(
        self,
        axis: str | int,
        sizes: Sequence[int],
        names: Sequence[str],
        *,
        backend_override: Any = None,
    ) -> DeviceMesh:
        """Return the mesh with one axis split into several, the inverse of `flatten`.

        The axis is a name or a position; the new ones are major to minor.

            world [0 1 2 3]    world.unflatten("world", (2, 2), ("dp", "tp"))    [0 1]
                                                                                 [2 3]

        Args:
            axis, sizes, names: as `AbstractMesh.unflatten`.
            backend_override: as in `init_device_mesh`, for the new axes.

        Raises: MeshError as `AbstractMesh.unflatten`, and for a wrong backend.

        Communication: none; axes over the same ranks have the same group, in all views of the mesh.
        """
        shape, made_of = self._split_axis(axis, sizes, names)
        backends_of_new = backends_of_axes(backend_override, tuple(names))
        new = {
            name: one._replace(communicator=self.communicator)
            for name, one in zip(names, backends_of_new, strict=True)
        }
        backends = tuple(new[name] if name in new else self._backend_of(name) for name in made_of)
        return self._make_unflattened(shape, made_of, backends=backends)

    @staticmethod
    def concatenate(meshes: Sequence[DeviceMesh]) -> DeviceMesh:
        """Return the mesh of the axes of several meshes, in this order.

        Each is a slice, or a slice of an unflattened view, of one mesh.

            a = world.unflatten(0, (2, 2), ("fsdp", "x"))["fsdp"]      on rank 0 of 4:  [0 2]
            b = world.unflatten(0, (2, 2), ("y", "tp"))["tp"]                           [0 1]
            concatenate([a, b])                                         (fsdp=2, tp=2)  [0 1]
                                                                                        [2 3]

        Raises: MeshError when the meshes do not come from one mesh, or ranks or names of one are in
            another.

        Communication: none; the groups of the axes are used again.
        """
        meshes = [as_device_mesh(mesh) for mesh in meshes]
        if not meshes:
            raise errors.MeshRuntimeError("concatenate([]): give at least one mesh.")
        sizes = [size for mesh in meshes for size in mesh.axis_sizes]
        names = checked_names(join_names(mesh.axis_names for mesh in meshes), sizes)
        common = [
            root
            for root in meshes[0]._ancestors()
            if all(any(root is x for x in mesh._ancestors()) for mesh in meshes)
        ]
        for root in common:
            if set(names) <= set(root.axis_names) and all(
                root[mesh.axis_names] is mesh for mesh in meshes
            ):
                return root[names]
        if not common:
            raise errors.MeshRuntimeError(
                f"concatenate({meshes}): these meshes do not come from one mesh; slice one mesh, "
                "or unflattened views of one."
            )
        return _slice_of_common_view(common[-1], meshes)

    # torch's names.

    def _flatten(
        self, mesh_dim_name: str | None = None, backend_override: Any = None
    ) -> DeviceMesh:
        """Return the mesh with all axes as one: `flatten` under torch's name, with a backend."""
        name = "_".join(self.axis_names) if mesh_dim_name is None else mesh_dim_name
        if backend_override is not None and (name,) != self.axis_names:
            backend = as_group_backend(backend_override)
            self._name_flattened(name, self.axis_names)
            for mesh in (self, *self._ancestors()):
                if name in mesh._flattened:
                    mesh._flattened_backends.setdefault(name, backend)  # type: ignore[attr-defined]
                    mesh._keep_alive()
        return self.flatten(name=name)

    def _unflatten(
        self,
        dim: int | str,
        mesh_sizes: Sequence[int],
        mesh_dim_names: Sequence[str],
        backend_override: Any = None,
    ) -> DeviceMesh:
        """Return the mesh with one axis split into several.

        `unflatten` under torch's name, with backends for the new axes.
        """
        return self.unflatten(dim, mesh_sizes, mesh_dim_names, backend_override=backend_override)

    _concatenate = concatenate

    def _get_root_mesh(self) -> DeviceMesh:
        """Return `root`, under torch's name."""
        return self.root  # type: ignore[return-value]

    def get_group(
        self, axis: str | int | None = None, *, mesh_dim: str | int | None = None
    ) -> dist.ProcessGroup:
        """Return torch's process group over an axis (optional on a 1-D mesh), for its own calls.

        Torch calls the axis `mesh_dim`.

        Raises: MeshError for an unknown axis, on a rank outside the mesh, or in a simulated or null
        world.

        Communication: the first call waits for all ranks of the group.
        """
        name = self._one_axis(mesh_dim if axis is None else axis, "get_group")
        if self._backend_of(name).name == FAKE and isinstance(self.world, ProcessWorld):
            self._member(f"get_group({axis!r})")
            ranks = sorted(self._part_ranks(self._checked_axes(name)).flatten().tolist())
            group = self.world.group(ranks, self._backend_of(name))
        else:
            group = self.group(name)
        if not isinstance(group, ProcessGroup):
            raise errors.MeshError(
                f"get_group({axis!r}): {self.world!r} has no torch process groups; use "
                f"mesh.group({axis!r}) instead."
            )
        return group.handle

    def get_all_groups(self) -> list[dist.ProcessGroup]:
        """Return torch's process group of each axis.

        Communication: the first call waits for all ranks of each group.
        """
        return [self.get_group(name) for name in self.axis_names]

    @property
    def __class__(self) -> type:  # type: ignore[override]
        """Both kinds of DeviceMesh: torch's functional collectives check for one of torch's."""
        return _TorchDeviceMesh

    @property
    def _dim_group_names(self) -> Sequence[str]:
        """The name of torch's process group of each axis, for torch's functional collectives."""
        return _GroupNames(self)

    def get_rank(self) -> int:
        """Return this process's global rank."""
        return self.world.rank

    def get_coordinate(self) -> list[int] | None:
        """Return this rank's index along each axis as a list, None outside of the mesh."""
        return None if self.coordinate is None else list(self.coordinate)

    def get_local_rank(
        self, axis: str | int | None = None, *, mesh_dim: str | int | None = None
    ) -> int:
        """Return this rank's index along an axis (optional on a 1-D mesh), torch's `mesh_dim`.

        Raises: MeshError for an unknown axis or on a rank outside the mesh.
        """
        name = self._one_axis(mesh_dim if axis is None else axis, "get_local_rank")
        return self._member("get_local_rank")[self.axis_index(name)]

    def index_along(self, axes: Sequence[str], rank: int | None = None) -> int:
        """Return the index of a rank, by default this one, along axes together, major to minor.

        Raises: MeshError outside the mesh.
        """
        coordinate = self.coordinate_of(self.world.rank if rank is None else rank)
        if coordinate is None:
            raise errors.MeshError(
                f"rank {self.world.rank} is outside {self!r}, and has no index along {tuple(axes)}"
            )
        index = 0
        for axis in axes:
            index = index * self.size(axis) + coordinate[self.axis_index(axis)]
        return index

    def _one_axis(self, axis: str | int | None, what: str) -> str:
        if axis is None and self.ndim > 1:
            raise errors.MeshRuntimeError(
                f"{what}(): {self!r} has {self.ndim} axes; name one of {list(self.axis_names)}."
            )
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
        """Return a mesh over existing process groups.

        One for a 1-D mesh, or one per axis with the array of ranks as `mesh`.

        Raises: MeshError when an axis of `mesh` does not have the ranks of its group, or in a
        simulated or null world.

        Communication: none; the mesh uses the given groups.
        """
        world = _process_world("from_group")
        handles = [group] if isinstance(group, dist.ProcessGroup) else list(group)
        groups = [world.group_from(handle) for handle in handles]
        if mesh is None and len(groups) != 1:
            raise errors.MeshError(
                f"from_group with {len(groups)} groups: give mesh=, the array of ranks, as well."
            )
        device_mesh = DeviceMesh(
            device_type,
            groups[0].ranks if mesh is None else mesh,
            mesh_dim_names=mesh_dim_names,
            axis_names=axis_names,
        )
        if len(groups) != device_mesh.ndim:
            raise errors.MeshError(
                f"from_group: {len(groups)} groups for the {device_mesh.ndim} axes of "
                f"{device_mesh!r}."
            )
        for name, axis_group in zip(device_mesh.axis_names, groups, strict=True):
            if device_mesh.coordinate is not None and device_mesh.group(name) is not axis_group:
                raise errors.MeshError(
                    f"from_group: axis {name!r} of {device_mesh!r} has the ranks "
                    f"{device_mesh.group(name).ranks} on this rank, but the group given for it has "
                    f"ranks {axis_group.ranks}."
                )
        return device_mesh

    @staticmethod
    def from_torch(mesh: Any) -> DeviceMesh:
        """Return the same mesh as a torch DeviceMesh of its process groups; always the same object.

        The root of a slice is converted with it, so that slices of one mesh of torch are slices of
        one mesh here. Every function that takes a mesh also takes one of torch's, and converts it
        with this.

        Raises: MeshError in a simulated or null world.

        Communication: none.
        """
        world = _process_world("from_torch")
        converted = world.from_torch.get(mesh)
        if converted is None:
            backends: list[str | None] = [None] * mesh.ndim
            if mesh.get_coordinate() is not None:
                for axis, group in enumerate(mesh.get_all_groups()):
                    if dist.get_backend(group) == FAKE:
                        backends[axis] = FAKE
                    else:
                        world.group_from(group)
            converted = world.from_torch[mesh] = _from_torch(mesh, backends)
        return converted

    def to_torch(self) -> Any:
        """Return a torch DeviceMesh over the same process groups; the same object each time.

        Raises: MeshError on a rank outside the mesh, or in a simulated or null world.

        Communication: the first call makes the process groups of the axes.
        """
        if self._torch is None:
            self._member("to_torch")
            groups: Any = self.get_all_groups() if self.ndim > 1 else self.get_group()
            self._torch = TorchMesh.from_group(
                groups, self.device_type, mesh=self.mesh, mesh_dim_names=self.axis_names
            )
        return self._torch

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        same = super().__eq__(other)
        if same is NotImplemented or not same:
            return same
        return (self.device_type, self.backends) == (other.device_type, other.backends)  # type: ignore[attr-defined]

    __hash__ = AbstractMesh.__hash__

    def __reduce__(self) -> tuple[Any, ...]:
        # options of torch cannot be pickled
        names = tuple(backend.name for backend in self.backends)
        others = (names, self.communicator) if self.communicator else (names,) if any(names) else ()
        return unpickle_mesh, (self.device_type, self.ranks.tolist(), self.axis_names, *others)

    def __repr__(self) -> str:
        own = f", communicator={self.communicator!r}" if self.communicator else ""
        return f"DeviceMesh({self.device_type}, {axes_text(self.shape, self.axis_names)}{own})"


class _TorchDeviceMesh(DeviceMesh, TorchMesh):  # type: ignore[misc]
    """The `__class__` of a DeviceMesh, whose `type` is DeviceMesh: without torch's attributes."""


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
    backend_override: Mapping[Any, Any] | None = None,
) -> DeviceMesh:
    """init_device_mesh(device_type, shape) -> DeviceMesh over all ranks of the world, row-major.

    In processes of a job (torchrun, `launch`; srun and mpirun with MASTER_ADDR and MASTER_PORT set)
    it starts the default process group if there is none, and binds this process to its device: see
    docs/launching.md. In a plain `python` process the world is this one rank. Inside `simulate` and
    `null_world` it makes a mesh of that world.

    Args:
        device_type: "cpu", "cuda", ...: the device of the tensors' parts.
        mesh_shape: one size per axis; their product is the number of ranks.
        axis_names: one name per axis (`mesh_dim_names` is the same), "axis_0", "axis_1", ... by
            default.
        backend: of the default process group, if it is started here; by default gloo for "cpu",
            NCCL for "cuda".
        backend_override: axis, by name or position, -> the backend of its process groups, such as
            "gloo", torch's options of a backend, or a pair of both. An axis with the backend "fake"
            has groups that move no data: shardmesh refuses collectives over several of its ranks.
            Simulated and null worlds have no backends, except "fake".

    Raises: MeshError when the shape does not fit the world, names do not fit the shape, or for a
        wrong backend_override; LaunchEnvironmentError when environment variables are missing or
        wrong, the port is in use, the device does not exist, or the ranks differ in their setup;
        MeshMismatchError when other ranks made another mesh.

    Communication: starting the default group waits for all ranks. Every rank must make the same
        meshes in the same order; each new one sends two messages to the default group's store,
        without waiting for other ranks.

        mesh = init_device_mesh("cpu", (2, 4), axis_names=("dp", "tp"))
    """
    shape = checked_shape(mesh_shape)
    names = checked_names(_one_of(mesh_dim_names, axis_names), shape)
    backends = backends_of_axes(backend_override, names)
    world = thread_context.world or start_processes(device_type, backend)
    if prod(shape) != world.size:
        hint = hint_if_unconnected(os.environ) if world.size == 1 else ""
        raise errors.shape_does_not_fit_world(
            f"({axes_text(shape, names)})", prod(shape), world.size, hint
        )
    mesh = _cached_mesh(
        world, device_type, np.arange(world.size, dtype=np.int64).reshape(shape), names, backends
    )
    if isinstance(world, ProcessWorld):
        same_mesh.compare(world, mesh, device_type, [backend.name for backend in mesh.backends])
    return mesh


def as_device_mesh(mesh: Any) -> Any:
    """Return the mesh, converted if it is one of torch's; other objects are returned as is."""
    return (
        DeviceMesh.from_torch(mesh)
        if isinstance(mesh, TorchMesh) and not isinstance(mesh, DeviceMesh)
        else mesh
    )


def common_mesh(meshes: Sequence[DeviceMesh]) -> DeviceMesh | None:
    """Return the mesh with the axes of all of these, major to minor, or None.

    None unless they come from one mesh of this world.
    """
    names = tuple(dict.fromkeys(name for mesh in meshes for name in mesh.axis_names))
    # First those that the meshes are parts of, which are the same on every rank: others may have
    # been collected on some.
    wholes: list[Any] = [above for mesh in meshes for above in reversed(mesh._ancestors())]
    for whole in (*wholes, *meshes[0].world.meshes.values()):
        if set(names) <= set(whole.axis_names) and all(
            whole[mesh.axis_names] == mesh for mesh in meshes
        ):
            return whole[tuple(name for name in whole.axis_names if name in names)]
    singles = {name: mesh[name] for mesh in meshes for name in mesh.axis_names}
    if any(singles[name] is not mesh[name] for mesh in meshes for name in mesh.axis_names):
        return None
    try:
        whole = DeviceMesh.concatenate(list(singles.values()))
    except errors.MeshError:
        return None
    return whole[tuple(_major_to_minor(whole))]


def _major_to_minor(mesh: DeviceMesh) -> list[str]:
    """Return the axes by the distance of neighbours in the root of the mesh, the largest first."""
    position = {int(rank): i for i, rank in enumerate(mesh.root.ranks.flat)}
    first = mesh.ranks[(0,) * mesh.ndim]
    distance = {}
    for i, name in enumerate(mesh.axis_names):
        line = mesh.ranks[(0,) * i + (slice(None),) + (0,) * (mesh.ndim - i - 1)]
        distance[name] = max(abs(position[int(rank)] - position[int(first)]) for rank in line)
    return sorted(mesh.axis_names, key=lambda name: -distance[name])


# -- meshes made of others -------------------------------------------------------------------------


def _slice_of_common_view(root: Any, meshes: Sequence[DeviceMesh]) -> DeviceMesh:
    """Return the mesh with the axes of all these meshes, a slice of a view of the root.

    The view is worked out from the positions of the ranks in the root: an axis of n ranks with a
    distance of s between neighbours is one of its axes, and axes "_0", "_1", ... are in between.

    Raises: MeshError when no view has all the axes, as then ranks of one axis are among those of
        another.
    """
    position = {int(rank): i for i, rank in enumerate(root.ranks.flat)}
    steps: list[tuple[int, int, str]] = []  # (distance, ranks, name) of each axis of the view
    made_of: dict[str, tuple[str, ...]] = {}
    backends: dict[str, GroupBackend] = {}
    for mesh in meshes:
        place = mesh._coordinate_or_zeros()
        for i, name in enumerate(mesh.axis_names):
            line = mesh.ranks[(*place[:i], slice(None), *place[i + 1 :])]
            factors = _factors([position[int(rank)] for rank in line])
            own = [name] if len(factors) == 1 else [f"{name}_{j}" for j in range(len(factors))]
            steps += [
                (distance, size, factor)
                for (distance, size), factor in zip(factors, own, strict=True)
            ]
            made_of[name] = tuple(own)
            backends[name] = mesh._backend_of(name)
    shape: list[int] = []
    names: list[str] = []
    span = root.ranks.size
    for distance, size, name in sorted(steps, key=lambda step: (step[1] == 1, -step[0])):
        between, rest = divmod(span, distance * size)
        if rest:
            raise errors.MeshRuntimeError(
                f"concatenate({list(meshes)}): ranks of {name!r} are among those of another axis; "
                "concatenate axes of which each pair of ranks shares at most one."
            )
        shape += [between] * (between > 1) + [size]
        names += [f"_{len(names)}"] * (between > 1) + [name]
        span = distance
    if span > 1:
        shape = [*shape, span]
        names = [*names, f"_{len(names)}"]
    all_backends = tuple(backends.get(name, root._default_backend) for name in names)
    view = root._make_unflattened(tuple(shape), dict.fromkeys(names, ()), backends=all_backends)
    for name, own in made_of.items():
        if own != (name,):
            view._flattened_backends.setdefault(name, backends[name])
            view.flatten(own, name)
    return view._part({name: made_of[name] for mesh in meshes for name in mesh.axis_names})


def _factors(positions: Sequence[int]) -> list[tuple[int, int]]:
    """Return (distance, count) of the regular steps that make up these positions.

    Major to minor; one of a single rank is (1, 1).

    >>> _factors([0, 2, 4, 6]), _factors([0, 1, 8, 9])
    ([(2, 4)], [(8, 2), (1, 2)])

    Raises: MeshError when the positions are not regular.
    """
    if len(positions) == 1:
        return [(1, 1)]
    factors: list[tuple[int, int]] = []
    rest = list(positions)
    while len(rest) > 1:
        distance = rest[1] - rest[0]
        count = next(
            (i for i in range(2, len(rest)) if rest[i] - rest[i - 1] != distance), len(rest)
        )
        lines = [rest[i : i + count] for i in range(0, len(rest), count)]
        if distance < 1 or any(
            [x - line[0] for x in line] != [distance * i for i in range(count)] for line in lines
        ):
            raise errors.MeshRuntimeError(
                f"concatenate: the ranks at {list(positions)} of the root mesh are not at regular "
                "distances in its order; slice the mesh that has all axes instead."
            )
        factors.append((distance, count))
        rest = [line[0] for line in lines]
    return factors[::-1]


def _from_torch(mesh: Any, backends: Sequence[str | None]) -> DeviceMesh:
    """Return the mesh of torch as one of ours, a part of its root if it is a slice of another."""
    root = mesh._get_root_mesh()
    names = mesh.mesh_dim_names
    if root is mesh:
        return DeviceMesh(
            mesh.device_type, mesh.mesh, mesh_dim_names=names, backend_override=backends
        )
    whole = DeviceMesh.from_torch(root)
    for name in names or ():
        flat = root._flatten_mapping.get(name)
        if name not in whole._index and name not in whole._flattened and flat is not None:
            axes = _axes_with(whole, flat)
            if axes is not None:
                whole.flatten(axes, name)
    known = {*whole._index, *whole._flattened}
    if names and set(names) <= known:
        part = whole[tuple(names)]
        if mesh.get_coordinate() is None or np.array_equal(part.ranks, mesh.mesh.numpy()):
            return part
    part = DeviceMesh(mesh.device_type, mesh.mesh, mesh_dim_names=names, backend_override=backends)
    try:
        return part if part is whole else _slice_of_common_view(whole, [part])
    except errors.MeshError:  # not a slice of a view of the root, as for axes in another order
        return part


def _axes_with(whole: DeviceMesh, flat: Any) -> tuple[str, ...] | None:
    """Return adjacent axes whose ranks are those of torch's flattened mesh, None without any."""
    if flat.get_coordinate() is None:
        return None
    ranks = flat.mesh.flatten().tolist()
    for start in range(whole.ndim):
        for stop in range(start + 1, whole.ndim + 1):
            axes = whole.axis_names[start:stop]
            if whole._part_ranks(axes).flatten().tolist() == ranks:
                return axes
    return None


def is_mesh(x: Any) -> bool:
    """Return whether `x` is a device mesh of shardmesh or torch."""
    return isinstance(x, (DeviceMesh, TorchMesh))


def _cached_mesh(
    world: World,
    device_type: str,
    ranks: np.ndarray,
    names: tuple[str, ...],
    backends: tuple[GroupBackend, ...],
) -> DeviceMesh:
    key = (device_type, ranks.shape, names, ranks.tobytes(), backends)
    mesh = world.meshes.get(key)
    if mesh is None:
        mesh = world.meshes[key] = _make(world, device_type, ranks, names, backends)
    is_current = world is not thread_context.world  # not one of earlier groups
    if ranks.size == world.size and isinstance(world, ProcessWorld) and is_current:
        hooks.monitor_calls(world.monitor)
    return mesh


def _make(
    world: World,
    device_type: str,
    ranks: np.ndarray,
    names: tuple[str, ...],
    backends: tuple[GroupBackend, ...],
) -> DeviceMesh:
    flat = ranks.reshape(-1).tolist()
    members = set(flat)
    if min(members) < 0 or max(members) >= world.size:
        raise errors.ranks_outside_world(
            (r for r in members if not 0 <= r < world.size), world.size
        )
    if len(members) != len(flat):
        raise errors.repeated_ranks(flat)
    mesh = object.__new__(DeviceMesh)
    mesh._set(np.ascontiguousarray(ranks), names)
    mesh.device_type, mesh.world, mesh.device = device_type, world, local_device(device_type)
    mesh.backends, mesh._flattened_backends = backends, {}
    mesh._groups, mesh._torch = {}, None
    mesh.coordinate = (
        unravel(flat.index(world.rank), ranks.shape) if world.rank in members else None
    )
    return mesh


def unpickle_mesh(
    device_type: str,
    ranks: list[Any],
    names: tuple[str, ...],
    backends: tuple[str | None, ...] | None = None,
    communicator: str = "",
) -> DeviceMesh:
    mesh = DeviceMesh(device_type, ranks, axis_names=names, backend_override=backends)
    return mesh._with_communicator(communicator) if communicator else mesh


def _checked_ranks(mesh: Any) -> np.ndarray:
    # a tensor may be on the default device, such as a GPU
    ranks = np.asarray(mesh.cpu() if isinstance(mesh, Tensor) else mesh)
    if ranks.dtype.kind not in "iu" or ranks.ndim == 0 or ranks.size == 0:
        raise errors.MeshError(
            f"mesh {mesh!r}: must be an array of integer ranks with at least one axis and one "
            "rank, such as [[0, 1], [2, 3]]."
        )
    return ranks.astype(np.int64)


def _one_of(
    mesh_dim_names: Sequence[str] | None, axis_names: Sequence[str] | None
) -> Sequence[str] | None:
    if (
        mesh_dim_names is not None
        and axis_names is not None
        and tuple(mesh_dim_names) != tuple(axis_names)
    ):
        raise errors.MeshError(
            f"mesh_dim_names={mesh_dim_names!r} and axis_names={axis_names!r} differ, but both "
            "name the axes: give one of them."
        )
    return axis_names if mesh_dim_names is None else mesh_dim_names


def _process_world(what: str) -> ProcessWorld:
    world = current_world()
    if not isinstance(world, ProcessWorld):
        raise errors.MeshError(
            f"{what}: {world!r} has no torch process groups; call it outside of simulate and "
            "null_world."
        )
    return world
