"""Named axes inside a mapped function: which mesh they belong to, and who is who along them.

    mesh (dp=2, tp=2)      shard_map(f, axis_names={"tp"})     inside f: "tp" is bound, "dp" is not
        [0 1]
        [2 3]              on rank 2:  axes "tp" = ranks (2, 3), this one has index 0
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...mesh.comm.current_world import current_world
from ...mesh.comm.group import Group
from ...mesh.comm.transforms import outside_of_transforms
from ...mesh.device_mesh import DeviceMesh
from ..tensor.autograd import engine_hooks

if TYPE_CHECKING:
    from .captures import Captures
    from .types.type_checker import Following

AxisName = str | Sequence[str]
Groups = Sequence[Sequence[int]] | None


class UnboundAxisError(ValueError):
    """A collective names an axis that no mapped function around it has made manual."""


class Axes:
    """One manual axis, or several flattened major to minor in the order in which they are named.

    Attributes:
        names: the axes.
        mesh: the mesh of these axes alone, in this order, over the ranks that differ from this one only along them.
        size: number of ranks.
        index: this rank's place.
        order: by place, the rank's index in the group; None where the two are the same.
        ops: what collectives over these axes have made ready.
    """

    def __init__(self, mesh: DeviceMesh, names: tuple[str, ...]) -> None:
        self.names, self.mesh = names, mesh[names]
        ranks = [int(r) for r in self.mesh.ranks.flatten()]
        self.group: Group = self.mesh.group(self.mesh.axis_names)
        order = [self.group.ranks.index(r) for r in ranks]
        self.order = None if order == sorted(order) else tuple(order)
        self.size, self.index = len(ranks), ranks.index(mesh.world.rank)
        self.ops: dict[Any, Any] = {}

    @cached_property
    def index_tensor(self) -> Tensor:
        with outside_of_transforms(), torch.inference_mode(False):
            return torch.tensor(self.index, device=self.mesh.device)

    def kept(self, make: Any, *key: Any) -> Any:
        """What `make(axes, *key)` makes, made once."""
        found = self.ops.get((make, *key))
        if found is None:
            found = self.ops[make, *key] = make(self, *key)
        return found

    def place_in_group(self, place: int) -> int:
        """The group index of the rank at a place along the axes."""
        return place if self.order is None else self.order[place]

    def __str__(self) -> str:
        return repr(self.names[0] if len(self.names) == 1 else self.names)


class GroupedAxes(Axes):
    """This rank's group of the ranks along some axes; its mesh has one axis. `names` are those that the groups are places along.

    Attributes:
        sizes: of all groups.
    """

    def __init__(self, axes: Axes, groups: tuple[tuple[int, ...], ...]) -> None:
        mine = next(group for group in groups if axes.index in group)
        name, ranks = "_".join(axes.mesh.axis_names), axes.mesh.ranks.flatten()[list(mine)]
        super().__init__(DeviceMesh(axes.mesh.device_type, ranks, axis_names=(name,)), (name,))
        self.names, self.sizes = axes.names, tuple(map(len, groups))


class Mapping:
    """The axes that are manual in a mapped function.

    Attributes:
        root: the mesh on which all of them are axes; that of the outermost mapped function where it contains the inner one's.
        names: the manual axes, outer functions' first.
        checker: follows the types of values, while that is on.
        captures: what the function closes over, while that is on.
        seeds, cursor, recording: what is known of the calls of `grad` and `typeof` inside, which of them comes next, and whether they are
            new.
    """

    def __init__(self, root: DeviceMesh, names: tuple[str, ...]) -> None:
        self.root, self.names = root, names
        self.checker: Following | None = None
        self.captures: Captures | None = None
        self.seeds: list[Any] = []
        self.cursor, self.recording = 0, False
        self._axes: dict[Any, Axes] = {}
        _live.setdefault(root.world, weakref.WeakSet()).add(self)

    def axes(self, name: AxisName) -> Axes:
        """The axes of this name or these names.

        Raises: UnboundAxisError where one is not manual here; ValueError for one named twice or none; TypeError for what is no name.
        """
        key = name if type(name) is str else self._key(name)
        found = self._axes.get(key)
        if found is None:
            found = self._axes[key] = Axes(self.root, self._checked(key))
        return found

    def grouped(self, name: AxisName, groups: Sequence[Sequence[int]]) -> GroupedAxes:
        """This rank's group of the ranks along the axes.

        Raises: as `axes`; ValueError for groups that do not hold each place once.
        """
        axes = self.axes(name)
        given = tuple(tuple(map(int, group)) for group in groups)
        if sorted(place for group in given for place in group) != list(range(axes.size)) or not all(given):
            shown = list(map(list, given))
            raise ValueError(f"axis_index_groups={shown} over {axes}: each of the places 0 to {axes.size - 1} must be in one group, once")
        key = axes.names, given
        found = self._axes.get(key)
        if found is None:
            found = self._axes[key] = GroupedAxes(axes, given)
        return found  # type: ignore[return-value]

    def _key(self, name: Any) -> Any:
        if isinstance(name, str) or (isinstance(name, Sequence) and all(isinstance(one, str) for one in name)):
            return name if isinstance(name, str) else tuple(name)
        raise TypeError(
            f"axis_name={name!r}: a collective takes the name of a mesh axis, or a tuple of names, and the manual axes here are "
            f"{list(self.names)}; over a dim of the part itself reduce with x.sum(dim)"
        )

    def _checked(self, name: Any) -> tuple[str, ...]:
        names = (name,) if isinstance(name, str) else name
        for one in names:
            if one not in self.names:
                raise _unbound(one, f"the manual axes here are {list(self.names)}")
        if not names or len(set(names)) < len(names):
            raise ValueError(f"axis_name={name!r}: name one axis or more, each once, of {list(self.names)}")
        return names

    def inside(self, mesh: DeviceMesh, names: tuple[str, ...]) -> Mapping:
        """The mapping of a function that is mapped over `mesh` inside this one.

        Raises: ValueError where it would make an axis manual that is.
        """
        again = sorted(set(names) & set(self.names))
        if again:
            raise ValueError(
                f"shard_map over {list(names)} inside a mapped function in which {again[0]!r} is manual already: map over the other axes, "
                "with axis_names on the outer function"
            )
        part = set(mesh.axis_names) <= set(self.root.axis_names) and self.root[mesh.axis_names] is mesh
        return Mapping(self.root, (*self.names, *names)) if part else Mapping(mesh, names)

    def size(self, names: Sequence[str]) -> int:
        """Number of ranks along these axes."""
        return math.prod(self.root.size(name) for name in names)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Inside, this mapping is the current one."""
        before, _thread.mapping = _thread.mapping, self
        try:
            yield
        finally:
            _thread.mapping = before


class _Thread(threading.local):
    mapping: Mapping | None = None


_thread = _Thread()
_live: weakref.WeakKeyDictionary[Any, weakref.WeakSet[Mapping]] = weakref.WeakKeyDictionary()


def swap(mapping: Mapping | None) -> Mapping | None:
    """Make this the current mapping; the one before. For the shortest way in and out of a mapped function."""
    before = _thread.mapping
    _thread.mapping = mapping
    return before


def current_mapping() -> Mapping | None:
    """The mapping of the innermost mapped function that runs in this thread."""
    return _thread.mapping


def captures_here() -> Captures | None:
    """What the mapped function that runs in this thread closes over, while types are followed."""
    mapping = _thread.mapping
    return None if mapping is None else mapping.captures


def bound(name: AxisName) -> Axes:
    """The axes that a collective names.

    Raises: UnboundAxisError outside of a mapped function, or where it does not bind this name.
    """
    mapping = _thread.mapping
    return (mapping or _replayed(name)).axes(name)


def bound_groups(name: AxisName, groups: Sequence[Sequence[int]]) -> GroupedAxes:
    """This rank's group of the ranks along the axes that a collective names.

    Raises: as `bound`; ValueError for groups that do not hold each place along the axes once.
    """
    return (_thread.mapping or _replayed(name)).grouped(name, groups)


def _replayed(name: AxisName) -> Mapping:
    """The mapping of a piece of a mapped function that backward runs once more (`torch.utils.checkpoint`), which is the one
    that has these axes, where there is but one mesh that has.

    Raises: UnboundAxisError where it cannot be told.
    """
    names = {name} if isinstance(name, str) or not isinstance(name, Sequence) else set(name)
    found = [m for m in list(_live.get(current_world(), ())) if names <= set(m.names)]
    if engine_hooks.current_backward() < 0 or not found:
        raise _unbound(name, "no mapped function runs here")
    if len({id(m.root) for m in found}) > 1:
        raise _unbound(name, "several meshes have it, and torch.utils.checkpoint does not tell which was meant; use sm.checkpoint")
    return found[0]


def _unbound(name: Any, why: str) -> UnboundAxisError:
    return UnboundAxisError(
        f"unbound axis name {name!r}: {why}. Axis names mean something inside a function that shard_map maps over them: "
        f"shard_map(f, mesh=mesh, in_specs=..., out_specs=..., axis_names={{{name!r}}})"
    )
