"""The leaves to load: those of `like`, and those that the checkpoint has for stateful objects."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ...mesh.comm.world import World
from ...mesh.text import shortened
from ..layout.layout import Layout
from ..layout.spec import Sharding
from ..tensor.sharded_tensor import ShardedTensor
from .placing import own_name
from .state import optimizer_layouts, parameters_of
from .storage.manifest import Stored
from .tree import (
    Leaf,
    Path,
    PerRank,
    StoredDict,
    Structure,
    child_of,
    children,
    from_structure,
    is_module,
    is_stateful,
    leaves,
    name_of,
    rebuilt,
)


@dataclass(frozen=True, eq=False)
class WholeTensor(Leaf):
    """A whole tensor on every rank.

    Attributes:
        like: a tensor with the required shape and dtype; None for those that are stored.
        device: its device.
    """

    like: Tensor | None
    device: torch.device


@dataclass(frozen=True, eq=False)
class StoredValue(Leaf):
    """A value that is no tensor, by its stored name; `fallback` if `optional` and not stored."""

    name: str
    fallback: Any = None
    optional: bool = False


Want = Layout | WholeTensor | StoredValue
_MOST_DIMS = 64  # that are shown
_COMPARED = 2000  # names that are compared with one that is missing
_LONGEST_NAME = 200  # characters of a name that are compared


def wanted_tree(like: Any, stored: Stored, world: World) -> Any:
    """Return the tree of `like` with a `Want` for each leaf.

    Raises:
        ValueError, TypeError: a leaf is not stored, with another shape or dtype, or not as a
            tensor.
    """
    tree = _opened(like, stored.structure, (), stored, world)
    for path, want in leaves(tree):
        _check(name_of(path), want, stored)
    return tree


def _opened(like: Any, structure: Structure, path: Path, stored: Stored, world: World) -> Any:
    if is_stateful(like):
        own = like.state_dict()
        return _opened(
            own if is_module(like) else StoredDict(own, _layouts_of(like)),
            structure,
            path,
            stored,
            world,
        )
    if isinstance(like, StoredDict):
        return _as_stored(like, structure, path, stored, world)
    inner = children(like)
    if inner is None:
        return _want(like, path, stored, world)
    return rebuilt(
        like,
        [
            _opened(item, child_of(structure, key), (*path, key), stored, world)
            for key, item in inner
        ],
    )


def _want(like: Any, path: Path, stored: Stored, world: World) -> Want:
    if isinstance(like, Sharding):
        entry = stored.entries.get(name_of(path))
        if entry is None or entry.shape is None or entry.dtype is None:
            return StoredValue(name_of(path))
        like = Layout.of(like.mesh, like.spec, entry.shape, entry.dtype)
    if isinstance(like, Layout | ShardedTensor):
        layout = like if isinstance(like, Layout) else like._layout
        if layout.spec.unreduced:
            raise ValueError(
                f"load: {name_of(path)!r} is {layout} in like=, but stored values are not pending; "
                "leave out unreduced="
            )
        return layout
    if isinstance(like, Tensor):
        return WholeTensor(like, like.device)
    if isinstance(like, PerRank):
        return StoredValue(own_name(name_of(path), world.rank), like.value, optional=True)
    return StoredValue(name_of(path))


def _as_stored(
    like: StoredDict, structure: Structure, path: Path, stored: Stored, world: World
) -> Any:
    """Return the leaves that the checkpoint has below this path; known tensors keep their layouts,
    values per rank stay so.
    """
    known: dict[str, Any] = {name_of((*path, *inner)): leaf for inner, leaf in leaves(dict(like))}

    def leaf(name: str, inner: Path) -> Want:
        own, entry = known.get(name), stored.entries.get(name)
        if entry is None:  # no leaf of this name is stored, but one of each rank
            return StoredValue(
                own_name(name, world.rank),
                own.value if isinstance(own, PerRank) else None,
                optional=True,
            )
        if entry.shape is None:
            return StoredValue(name)
        known_layout = (
            own._layout if isinstance(own, ShardedTensor) and own.shape == entry.shape else None
        )
        layout = known_layout or like.layout_of(inner, entry.shape)
        return _plain_like(own) if layout is None else layout.replace(dtype=entry.dtype)

    return dict(like) if structure is None else from_structure(structure, leaf)


def _plain_like(own: Any) -> WholeTensor:
    """Return a whole tensor of any shape, on the device of the object's own tensor."""
    return WholeTensor(None, own.device if isinstance(own, Tensor) else torch.device("cpu"))


def _layouts_of(owner: Any) -> Any:
    return (
        optimizer_layouts(dict(enumerate(parameters_of(owner))))
        if isinstance(owner, Optimizer)
        else lambda path, shape: None
    )


# --------------------------------------------------------------------------------------------------


def _check(name: str, want: Any, stored: Stored) -> None:
    if isinstance(want, StoredValue):
        entry = stored.entries.get(want.name)
        if entry is None and not want.optional:
            raise ValueError(_missing(name, stored))
        if entry is not None and entry.shape is not None:
            is_one = shortened(f"{entry.dtype}{list(entry.shape[:_MOST_DIMS])}")
            raise ValueError(
                f"load: {name!r} in {stored.folder} is a tensor, {is_one}; pass a Layout or a "
                "tensor in like="
            )
        return
    if not isinstance(want, Layout | WholeTensor):
        raise ValueError(_missing(name, stored))  # an empty container that is not stored
    entry = stored.entries.get(name)
    if entry is None:
        raise ValueError(_missing(name, stored))
    like = want if isinstance(want, Layout) else want.like
    if like is not None and (entry.shape, entry.dtype) != (like.shape, like.dtype):
        has = (
            "a value that is not a tensor"
            if entry.shape is None
            else shortened(f"{entry.dtype}{list(entry.shape[:_MOST_DIMS])}")
        )
        raise ValueError(
            f"load: {name!r} is {like.dtype}{list(like.shape)} in like=, but {stored.folder} has "
            f"{has}; use the stored shape and dtype in like=, and convert the result"
        )


def _missing(name: str, stored: Stored) -> str:
    known = list(
        islice((other for other in stored.entries if len(other) <= _LONGEST_NAME), _COMPARED)
    )
    near = difflib.get_close_matches(name[:_LONGEST_NAME], known, 3, 0.5)
    has = (
        f"it has {', '.join(map(repr, near))}"
        if near
        else f"it has {len(stored.entries)} leaves, such as {sorted(known)[:3]}"
    )
    return f"load: {stored.folder} has no {shortened(name)!r}; {has}; use the names that were saved"
