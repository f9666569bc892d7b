"""Named axes inside a mapped function: their mesh, and this rank's place along them.

mesh (dp=2, tp=2)      shard_map(f, axis_names={"tp"})     inside f: "tp" is bound, "dp" is not
    [0 1]
    [2 3]              on rank 2:  axes "tp" = ranks (2, 3), this one has index 0
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from ...mesh.comm.current_world import current_world
from ...mesh.comm.first_use import first_block
from ...mesh.comm.group import Group
from ...mesh.comm.thread_context import thread_context
from ...mesh.comm.transforms import outside_of_transforms
from ...mesh.comm.world import World
from ...mesh.device_mesh import DeviceMesh
from . import engine_hooks

AxisName = str | Sequence[str]
Groups = Sequence[Sequence[int]] | None


class UnboundAxisError(ValueError):
    """A collective names an axis that is not manual in any mapped function around it."""


class Axes:
    """One manual axis, or several flattened major to minor in the given order.

    Attributes:
        names: the axes.
        mesh: the mesh of these axes alone, in this order, over the ranks that differ from this one
            only along them.
        size: number of ranks.
        index: this rank's place.
        order: by place, the rank's index in the group; None if the two are the same.
        ops: a cache of what collectives over these axes need.
    """

    def __init__(self, mesh: DeviceMesh, names: tuple[str, ...]) -> None:
        self.names, self.mesh = names, mesh[names]
        ranks = [int(r) for r in self.mesh.ranks.flatten()]
        self.group: Group = self.mesh.group(self.mesh.axis_names)
        order = [self.group.ranks.index(r) for r in ranks]
        self.order = None if order == sorted(order) else tuple(order)
        self.size = len(ranks)
        self.index = ranks.index(mesh.world.rank)
        self.ops: dict[Any, Any] = {}

    @cached_property
    def index_tensor(self) -> Tensor:
        with outside_of_transforms(), torch.inference_mode(False):
            return torch.tensor(self.index, device=self.mesh.device)

    def cached(self, make: Any, *key: Any) -> Any:
        """Return `make(axes, *key)`, made once."""
        op = self.ops.get((make, *key))
        if op is None:
            op = self.ops[make, *key] = make(self, *key)
        return op

    def place_in_group(self, place: int) -> int:
        """Return the group index of the rank at a place along the axes."""
        return place if self.order is None else self.order[place]

    def __str__(self) -> str:
        return repr(self.names[0] if len(self.names) == 1 else self.names)


class GroupedAxes(Axes):
    """This rank's group of the ranks along some axes, as one axis of a separate mesh.

    `names` are those of the grouped axes.

    Attributes:
        sizes: the sizes of all groups.
    """

    def __init__(self, axes: Axes, groups: tuple[tuple[int, ...], ...]) -> None:
        own_group = next(group for group in groups if axes.index in group)
        name = "_".join(axes.mesh.axis_names)
        ranks = axes.mesh.ranks.flatten()[list(own_group)]
        super().__init__(DeviceMesh(axes.mesh.device_type, ranks, axis_names=(name,)), (name,))
        self.names = axes.names
        self.sizes = tuple(map(len, groups))


class CapturedTensors(Protocol):
    """The tensors that a mapped function closes over, for what runs inside: `Captures`.

    Attributes:
        constants: plain tensors without gradient that the function uses.
    """

    constants: list[weakref.ref[Tensor]]

    def local(self, x: Any) -> Any:
        """Return the local part of a tensor that is captured; anything else itself."""

    def is_captured(self, x: Tensor) -> bool:
        """Return whether the function closes over a plain tensor that requires grad."""
        ...

    def is_foreign(self, x: Any) -> bool:
        """Return whether a sharded tensor is not a tensor of the mapped function."""
        ...

    def check_inside(self, x: Any, what: str) -> None:
        """Raise ShardingTypeError if `what` may not be called on a captured tensor."""

    def with_local_parts(
        self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[Sequence[Any], dict[str, Any]] | None:
        """Return an operator's arguments with local parts for captured tensors; None if none is."""

    def replaying(self) -> AbstractContextManager[Any]:
        """Return a context in which a recomputation gets the local parts again."""
        ...


class AxisEnv:
    """The manual axes of a mapped function (JAX: axis environment).

    Attributes:
        root: the mesh of all manual axes; that of the outermost mapped function if it contains the
            inner one's.
        names: the manual axes, outer functions' first.
        captures: the tensors that the function closes over, in a tracked call.
    """

    def __init__(self, root: DeviceMesh, names: tuple[str, ...]) -> None:
        first_block.begin()
        self.root, self.names = root, names
        self.captures: CapturedTensors | None = None
        self._axes: dict[Any, Axes] = {}
        root.world.state(_LiveEnvs).envs.add(self)

    def axes(self, name: AxisName) -> Axes:
        """Return the axes of this name or these names.

        Raises: UnboundAxisError for one that is not manual here; ValueError for one named twice or
        none; TypeError for other objects.
        """
        key = name if type(name) is str else self._key(name)
        axes = self._axes.get(key)
        if axes is None:
            axes = self._axes[key] = Axes(self.root, self._checked_names(key))
        return axes

    def grouped(self, name: AxisName, groups: Sequence[Sequence[int]]) -> GroupedAxes:
        """Return this rank's group of the ranks along the axes.

        Raises: as `axes`; ValueError for groups that do not contain each place once.
        """
        axes = self.axes(name)
        place_groups = tuple(tuple(map(int, group)) for group in groups)
        if sorted(place for group in place_groups for place in group) != list(
            range(axes.size)
        ) or not all(place_groups):
            shown = list(map(list, place_groups))
            raise ValueError(
                f"axis_index_groups={shown} over {axes}: each of the places 0 to {axes.size - 1} "
                "must be in one group, once"
            )
        key = axes.names, place_groups
        grouped_axes = self._axes.get(key)
        if grouped_axes is None:
            grouped_axes = self._axes[key] = GroupedAxes(axes, place_groups)
        return grouped_axes  # type: ignore[return-value]

    def _key(self, name: Any) -> Any:
        if isinstance(name, str) or (
            isinstance(name, Sequence) and all(isinstance(one, str) for one in name)
        ):
            return name if isinstance(name, str) else tuple(name)
        raise TypeError(
            f"axis_name={name!r}: a collective takes the name of a mesh axis, or a tuple of names, "
            f"and the manual axes here are {list(self.names)}; to reduce over a dim of the local "
            "tensor use x.sum(dim)"
        )

    def _checked_names(self, name: Any) -> tuple[str, ...]:
        names = (name,) if isinstance(name, str) else name
        for one in names:
            if one not in self.names:
                raise _unbound(one, f"the manual axes here are {list(self.names)}")
        if not names or len(set(names)) < len(names):
            raise ValueError(
                f"axis_name={name!r}: name one or more of the axes {list(self.names)}, each once"
            )
        return names

    def inside(self, mesh: DeviceMesh, names: tuple[str, ...]) -> Self:
        """Return the environment of a function that is mapped over `mesh` inside this one.

        Raises: ValueError if one of its axes is manual already.
        """
        again = sorted(set(names) & set(self.names))
        if again:
            raise ValueError(
                f"shard_map over {list(names)} inside a mapped function in which {again[0]!r} is "
                "manual already: map over the other axes, with axis_names on the outer function"
            )
        part = (
            set(mesh.axis_names) <= set(self.root.axis_names) and self.root[mesh.axis_names] is mesh
        )
        return type(self)(self.root, (*self.names, *names)) if part else type(self)(mesh, names)

    def size(self, names: Sequence[str]) -> int:
        """Return the number of ranks along these axes."""
        return math.prod(self.root.size(name) for name in names)

    @contextmanager
    def as_current(self) -> Iterator[None]:
        """Make this environment the current one in the block."""
        with thread_context.setting(axis_env=self):
            yield


class _LiveEnvs:
    """The environments of one world that something refers to."""

    def __init__(self, _: World) -> None:
        self.envs: weakref.WeakSet[AxisEnv] = weakref.WeakSet()


def swap(env: AxisEnv | None) -> AxisEnv | None:
    """Make this the current environment and return the one before: a fast path."""
    before = thread_context.axis_env
    thread_context.axis_env = env
    return before


def current_axis_env() -> AxisEnv | None:
    """Return the environment of the innermost mapped function in this thread."""
    return thread_context.axis_env


def current_captures() -> CapturedTensors | None:
    """Return the captured tensors of the mapped function in this thread, in a tracked call."""
    env = thread_context.axis_env
    return None if env is None else env.captures


def bound_axes(name: AxisName) -> Axes:
    """Return the axes that a collective names.

    Raises: UnboundAxisError outside of a mapped function, or if it does not bind this name.
    """
    env = thread_context.axis_env
    return (env or _env_of_replay(name)).axes(name)


def bound_groups(name: AxisName, groups: Sequence[Sequence[int]]) -> GroupedAxes:
    """Return this rank's group of the ranks along the axes that a collective names.

    Raises: as `bound_axes`; ValueError for groups that do not contain each place along the axes
    once.
    """
    return (thread_context.axis_env or _env_of_replay(name)).grouped(name, groups)


def _env_of_replay(name: AxisName) -> AxisEnv:
    """Return the environment of a piece of a mapped function that backward recomputes.

    The piece is one of `torch.utils.checkpoint`; its environment is the one that has these axes, if
    they are of one mesh.

    Raises: UnboundAxisError if it is not known.
    """
    names = {name} if isinstance(name, str) or not isinstance(name, Sequence) else set(name)
    envs = [env for env in list(current_world().state(_LiveEnvs).envs) if names <= set(env.names)]
    if engine_hooks.current_backward() < 0 or not envs:
        raise _unbound(name, "no mapped function is running")
    if len({id(env.root) for env in envs}) > 1:
        raise _unbound(
            name,
            "several meshes have it, and torch.utils.checkpoint does not say which is meant; use "
            "sm.remat",
        )
    return envs[0]


def _unbound(name: Any, why: str) -> UnboundAxisError:
    return UnboundAxisError(
        f"unbound axis name {name!r}: {why}. Axis names are bound inside a function that shard_map "
        "maps over them: shard_map(f, mesh=mesh, in_specs=..., out_specs=..., "
        f"axis_names={{{name!r}}})"
    )
