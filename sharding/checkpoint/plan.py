"""What to save, which rank writes it, and what to load.

A save: each box of each leaf is written by one of the ranks that hold it, evenly; the same plan on
all ranks.

    x @ P("tp", None)      rank 0 [0:4]  rank 1 [4:8]      rank 0 writes 0:4, rank 3 writes 4:8;
    on (dp=2, tp=2)        rank 2 [0:4]  rank 3 [4:8]      ranks 1 and 2 write the next tensor

A load: the leaves of `like`, and those that the checkpoint has for stateful objects.
"""

from __future__ import annotations

import difflib
import io
import math
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...kernels.box import Box, box_shape, box_size, full_box
from ...mesh.comm.world import World
from ...mesh.text import shortened
from ..layout.layout import Layout
from ..layout.spec import Sharding
from ..tensor.redistribute import redistribute
from ..tensor.sharded_tensor import ShardedTensor
from .agreement import is_out_of_memory
from .staging import on_host, small_on_host
from .state import optimizer_layouts, parameters_of
from .storage.files import serialize
from .storage.index import Damage
from .storage.manifest import Stored, check_structure
from .tree import (
    Leaf,
    PartialModel,
    Path,
    PerRank,
    StoredDict,
    Structure,
    child_of,
    children,
    from_structure,
    is_stateful,
    leaves,
    name_of,
    rebuild_container,
    structure_of,
    without_stateful,
)

# the maximum size of a piece, so that a rank that needs some rows reads little more
PIECE_BYTES = 64 << 20
_MOST_DIMS = 64  # that are shown
_COMPARED = 2000  # names that are compared with one that is missing
_LONGEST_NAME = 200  # characters of a name that are compared


# -- the state to save -----------------------------------------------------------------------------


class SaveState(NamedTuple):
    """A tree to save.

    Attributes:
        leaves: by name; no tensor has pending values.
        lines: for each leaf, a text that must be the same on all ranks.
    """

    leaves: dict[str, Any]
    structure: Structure
    lines: dict[str, str]


def state_of(tree: Any, world: World) -> SaveState:
    """Return the leaves of a tree.

    Raises:
        TypeError, ValueError: a leaf that cannot be saved, or two leaves with the same name.
    """
    tree = without_stateful(tree)
    if isinstance(tree, str | os.PathLike):
        raise TypeError(
            f"save(tree, dir): the first argument is a {type(tree).__name__}; write save(tree, "
            f"{os.fspath(tree)!r})"
        )
    if children(tree) is None:
        raise TypeError(
            f"save: a {type(tree).__name__} has no named leaves; save a dict, such as {{'x': it}}"
        )
    by_name: dict[str, Any] = {}
    paths: dict[str, Path] = {}
    for path, leaf in leaves(tree):
        name = name_of(path)
        if name in by_name:
            both = f"{list(paths[name])} and {list(path)}"
            raise ValueError(
                f"save: two leaves have the name {name!r}, {both}: names are paths joined by dots; "
                "rename one"
            )
        by_name[name], paths[name] = leaf, path
    lines = {name: _line(name, leaf, world) for name, leaf in small_on_host(by_name, world).items()}
    structure = structure_of(tree)
    try:
        check_structure(structure)
    except Damage as error:
        raise ValueError(f"save: {error}, which could not be loaded") from error
    return SaveState(by_name, structure, lines)


def _line(name: str, leaf: Any, world: World) -> str:
    """Return a leaf as text, for comparison: a sharded tensor by layout, replicas by value.

    Raises:
        TypeError, ValueError: it cannot be saved.
    """
    if isinstance(leaf, ShardedTensor):
        if leaf.mesh.world is not world:
            raise ValueError(f"save: {name!r} is {leaf._layout} on a mesh of another world")
        return f"{leaf._layout} of ranks {leaf.mesh.ranks.tolist()}"
    if isinstance(leaf, PerRank):
        _check_value(name, leaf.value)
        return "PerRank"
    if isinstance(leaf, Tensor):
        _check_plain(name, leaf)
        values = on_host(leaf.detach()).reshape(-1)
        return (
            f"{leaf.dtype}{list(leaf.shape)}, CRC-32 "
            f"{zlib.crc32(values.view(torch.uint8).numpy().data) if values.numel() else 0:08x}"
        )
    _check_value(name, leaf)
    return repr(leaf)


def _check_plain(name: str, leaf: Tensor) -> None:
    if (
        type(leaf) not in (Tensor, nn.Parameter)
        or leaf.layout is not torch.strided
        or leaf.is_meta
        or leaf.is_quantized
    ):
        kind = f"{type(leaf).__name__} ({leaf.layout}, on {leaf.device})"
        raise TypeError(
            f"save: {name!r} is a {kind}; only ShardedTensors and dense tensors with values can be "
            "saved"
        )


def _check_value(name: str, value: Any) -> None:
    """Raise a TypeError unless the value can be loaded without running code from the file."""
    if isinstance(value, np.ndarray | np.generic):
        raise TypeError(
            f"save: {name!r} is a numpy {type(value).__name__}; save torch.as_tensor(it), or "
            "it.item()"
        )
    try:
        torch.load(io.BytesIO(serialize(value)), weights_only=True)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise TypeError(
            f"save: {name!r} is a {type(value).__name__}, which cannot be loaded safely; save "
            "tensors, numbers, strings, None, lists, tuples and dicts of these, or an object with "
            "state_dict() and load_state_dict()"
        ) from error


def reduce_pending(state: SaveState) -> SaveState:
    """Return the state with pending values reduced."""
    leaves = dict(state.leaves)
    for name, leaf in state.leaves.items():
        if isinstance(leaf, ShardedTensor):
            leaves[name] = without_pending(leaf)
    return state._replace(leaves=leaves)


def without_pending(leaf: ShardedTensor) -> ShardedTensor:
    """Return a tensor with its pending values reduced; itself if it has none."""
    if not leaf.spec.unreduced:
        return leaf
    return redistribute(leaf.detach(), leaf.spec.with_unreduced({}))


# -- the ranks that write it -----------------------------------------------------------------------


@dataclass(frozen=True)
class WriteItem:
    """A piece and its writer.

    Attributes:
        name: of its leaf.
        box: its box of the global tensor; None for a value that is not a tensor.
        rank: the rank that writes it.
        shape, dtype: those of the whole tensor; None for a value.
    """

    name: str
    box: Box | None
    rank: int
    shape: torch.Size | None = None
    dtype: torch.dtype | None = None


def make_write_plan(leaves: Mapping[str, Any], world: World) -> list[WriteItem]:
    """Return all pieces, in the order of the leaves; the same list on every rank."""
    items: list[WriteItem] = []
    load, boxes = [0] * world.size, {}
    for name, leaf in leaves.items():
        if isinstance(leaf, PerRank):
            items += [WriteItem(own_name(name, rank), None, rank) for rank in range(world.size)]
        elif isinstance(leaf, Tensor):
            items += _write_items(name, leaf, _holders_by_box(leaf, world, boxes), load)
        else:
            items.append(WriteItem(name, None, 0))
    return items


def own_name(name: str, rank: int) -> str:
    """Return the name under which a rank's own value is stored."""
    return f"{name}.rank{rank}"


def _holders_by_box(
    leaf: Tensor, world: World, known: dict[Layout, Any]
) -> dict[Box, Sequence[int]]:
    """Return each non-empty box with the ranks that hold it; plain tensors are on all ranks."""
    if not isinstance(leaf, ShardedTensor):
        return {full_box(leaf.shape): range(world.size)} if leaf.numel() else {}
    if leaf._layout not in known:
        known[leaf._layout] = holders_of(leaf._layout)
    return known[leaf._layout]


def holders_of(layout: Layout) -> dict[Box, list[int]]:
    """Return each non-empty box of a layout with the ranks that hold it, in mesh order."""
    holders: dict[Box, list[int]] = {}
    for coordinate, box in layout.boxes():
        if box_size(box):
            holders.setdefault(box, []).append(int(layout.mesh.ranks[coordinate]))
    return holders


def _write_items(
    name: str, leaf: Tensor, held: Mapping[Box, Sequence[int]], load: list[int]
) -> Iterator[WriteItem]:
    """Yield the pieces of each box; the holder with the fewest bytes so far writes it."""
    if not held:
        # nothing to write, but the index must have the tensor
        yield WriteItem(name, (), -1, leaf.shape, leaf.dtype)
    for box, ranks in held.items():
        for piece in _split_box(box, leaf.dtype.itemsize):
            rank = min(ranks, key=load.__getitem__)
            load[rank] += box_size(piece) * leaf.dtype.itemsize
            yield WriteItem(name, piece, rank, leaf.shape, leaf.dtype)


def _split_box(box: Box, itemsize: int) -> Iterator[Box]:
    """Yield a box in pieces of about `PIECE_BYTES`, split along its first dim."""
    nbytes = box_size(box) * itemsize
    if not box or nbytes <= PIECE_BYTES:
        yield box
        return
    (start, stop), *rest = box
    rows = max(1, PIECE_BYTES // (math.prod(box_shape(tuple(rest))) * itemsize))
    for low in range(start, stop, rows):
        yield ((low, min(low + rows, stop)), *rest)


# -- the leaves to load ----------------------------------------------------------------------------


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


@dataclass(frozen=True, eq=False)
class WantedTree(Leaf):
    """The result of `wanted_tree` on another rank, in the place of a tree of objects.

    Attributes:
        tree: with a `Want` for each leaf.
    """

    tree: Any


def wanted_tree(like: Any, stored: Stored, world: World) -> Any:
    """Return the tree of `like` with a `Want` for each leaf.

    Raises:
        ValueError, TypeError: a leaf is not stored, with another shape or dtype, or not as a
            tensor.
    """
    if isinstance(like, WantedTree):
        return like.tree
    tree = _want_tree(like, stored.structure, (), stored, world)
    for path, want in leaves(tree):
        _check(name_of(path), want, stored)
    return tree


def _want_tree(like: Any, structure: Structure, path: Path, stored: Stored, world: World) -> Any:
    """Return the tree of `like` at `path` with a `Want` for each leaf.

    Args:
        structure: that of what is stored at the path.
    """
    if is_stateful(like):
        own = like.state_dict()
        determines_own_leaves = isinstance(like, (nn.Module, PartialModel))
        return _want_tree(
            own if determines_own_leaves else StoredDict(own, _layouts_of(like)),
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
    return rebuild_container(
        like,
        [
            _want_tree(item, child_of(structure, key), (*path, key), stored, world)
            for key, item in inner
        ],
    )


def _want(like: Any, path: Path, stored: Stored, world: World) -> Want:
    """Return what to load for one leaf of `like`.

    Raises:
        ValueError: a layout with pending values.
    """
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
    """Return the leaves that are stored below this path: layouts and ranks' values as in `like`."""
    likes: dict[str, Any] = {name_of((*path, *inner)): leaf for inner, leaf in leaves(dict(like))}

    def leaf(name: str, inner: Path) -> Want:
        own, entry = likes.get(name), stored.entries.get(name)
        if entry is None:  # no leaf of this name is stored, but one of each rank
            return StoredValue(
                own_name(name, world.rank),
                own.value if isinstance(own, PerRank) else None,
                optional=True,
            )
        if entry.shape is None:
            return StoredValue(name)
        if isinstance(own, ShardedTensor) and own.shape == entry.shape:
            layout: Layout | None = own._layout
        else:
            layout = like.layout_of(inner, entry.shape, entry.is_sharded)
        if layout is None:  # a plain tensor of any shape, on the device of the object's own
            return WholeTensor(None, own.device if isinstance(own, Tensor) else torch.device("cpu"))
        return layout.replace(dtype=entry.dtype)

    return dict(like) if structure is None else from_structure(structure, leaf)


def _layouts_of(owner: Any) -> Any:
    return (
        optimizer_layouts(dict(enumerate(parameters_of(owner))))
        if isinstance(owner, Optimizer)
        else lambda path, shape, is_sharded=False: None
    )


def _check(name: str, want: Any, stored: Stored) -> None:
    """Raise ValueError unless what is wanted is stored, with the shape and dtype of `like`."""
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
    """Return the error text for a leaf that is not stored, with the names most like its own."""
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
