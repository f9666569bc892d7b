"""`load`: load a checkpoint of any mesh onto any mesh."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ...kernels.box import Box
from ...mesh.comm.current_world import current_world
from ...mesh.comm.group import Group
from ...mesh.comm.world import World
from ...mesh.processes.process import ProcessGroup, ProcessWorld
from ..layout.layout import Layout
from ..tensor.sharded_tensor import ShardedTensor
from .agreement import CheckpointError, agree, all_ranks, run_on_all_ranks, unless_out_of_memory
from .plan import StoredValue, WholeTensor, own_name, wanted_tree
from .storage import folder as folders
from .storage.manifest import Stored, check_whole, parse, read_index
from .storage.pieces import value_of
from .storage.reading import (
    LoadedParts,
    PieceRead,
    box_of,
    plan_box_reads,
    plan_reads,
    read,
)
from .tree import (
    StoredDict,
    children,
    is_stateful,
    items_of,
    leaves,
    map_leaves,
    name_of,
    rebuild_container,
)


def load(dir: str | os.PathLike[str], like: Any, *, step: int | None = None) -> Any:
    """load(dir, like) -> a tree like `like` with the stored values. Every rank calls it.

        stored on (2,)   w [0:4] [4:8]    like on (3,)    rank 0   w [0:3]        from the piece 0:4
                                                          rank 1   w [3:6]        from both
                                                          rank 2   w [6:8]        from the piece 4:8

    Each piece of a file is read once per node, by a rank that needs part of it, which sends the
    other ranks of the node their parts; over gloo each rank reads all that it needs, from the page
    cache of the node. The CRC-32 of a piece is checked before it is used. Objects in `like` are not
    changed until everything has been read and checked.

    Args:
        dir: the folder of checkpoints, or that of one checkpoint; also one of
            torch.distributed.checkpoint, from DTensors or others.
        like: a tree with some or all leaves of the saved one, which are matched by their paths:
            `Layout`s and `ShardedTensor`s: loaded in this layout, whatever mesh the tensor was
            saved from; `NamedSharding`s: the same, with the shape and dtype that are stored;
            plain tensors: whole, on their devices, on every rank;
            `PerRank(value)`: the value that this rank saved; `value` on ranks beyond the saving
            world; anything else, also None: the value stored under this name;
            objects with `state_dict()` and `load_state_dict()`: they load their state and are in
            the result. A module determines its leaves itself; for other objects, and the optimizer
            in `state_dict(model, optimizer)`, the checkpoint does.
        step: the step of the checkpoint; by default the newest complete one, with a warning if a
            newer one has lost its manifest.

    Raises:
        FileNotFoundError: no complete checkpoint, or none of this step.
        ValueError: a leaf that is not stored (lists similar names), or has another shape or dtype.
        CheckpointError: a file is missing, short or damaged (names file and leaf); ranks have
            different trees. On every rank, the same text.

    Communication: three all_gathers of small objects and a broadcast of the index over all ranks;
        on each node, for every 256 MiB of which ranks need the same, an all_gather of small objects
        and an all_to_all (not over gloo).

    Example:
        >>> like = sm.checkpoint.state_dict(model, optimizer)
        >>> state = sm.checkpoint.load("checkpoints", like=like)
        >>> sm.checkpoint.load_state_dict(model, state, optimizer)
        >>> layout = Layout.of(mesh, P("tp"), (8, 4))
        >>> w = sm.checkpoint.load("checkpoints", {"model": {"w": layout}})["model"]["w"]
    """
    world = current_world()
    group = all_ranks(world)
    contents = read_contents(group, Path(dir), step)
    prepared, failure = unless_out_of_memory(lambda: _prepare(contents, like, world))
    stored, tree, wants = prepared or (None, None, {})
    lines = {
        "": f"dir={os.fspath(dir)!r}, step={step}",
        **{name: line_of(want) for name, want in wants.items()},
    }
    agree(group, "load", lines, failure)
    assert stored is not None  # noqa: S101
    loaded = _read_parts(world, group, stored, wants)
    return load_stateful(
        like, map_leaves(tree, lambda path, want: _result(stored, loaded, name_of(path), want))
    )


def wanted_from(dir: str | os.PathLike[str], like: Any, step: int) -> Any:
    """Return the tree of `like` with a `Want` for each leaf, as `load` reads it from a checkpoint.

    None for None, on ranks that have no objects.

    Communication: that of reading the index: an all_gather of small objects and a broadcast.
    """
    world = current_world()
    contents = read_contents(all_ranks(world), Path(dir), step)
    return None if like is None else wanted_tree(like, contents.parsed(), world)


def _prepare(contents: Contents, like: Any, world: World) -> tuple[Stored, Any, dict[str, Any]]:
    """Return what is stored, the tree of wanted leaves, and these by name."""
    stored = contents.parsed()
    tree = wanted_tree(like, stored, world)
    wants = {name_of(path): want for path, want in leaves(tree)}
    for name, want in wants.items():
        if not isinstance(want, StoredValue):
            check_whole(stored, name)
    return stored, tree, wants


def _read_parts(
    world: World, group: Group, stored: Stored, wants: Mapping[str, Any]
) -> LoadedParts:
    """Read this rank's parts of all wanted leaves.

    Raises:
        CheckpointError: some rank of some node could not read; on every rank, the same text.
    """
    node = _sharing(world, range(world.size))
    tensors = {
        name: want if isinstance(want, Layout) else None
        for name, want in wants.items()
        if not isinstance(want, StoredValue)
    }
    plan = plan_reads(stored, tensors, _values(stored, wants, node), node)
    allocate = partial(_allocate, stored, wants, world.rank)
    return _read_plan(world, group, stored, node, plan, allocate)


def read_boxes(
    world: World,
    group: Group,
    stored: Stored,
    wanted: Mapping[str, Mapping[int, Sequence[Box]]],
    memory: LoadedParts,
) -> None:
    """Read some boxes of stored tensors; every rank of the group calls it.

    Args:
        group: the ranks that read.
        wanted: the boxes that each rank of the group needs, by tensor and rank; the same on every
            rank. Other elements of a piece, between two boxes that a rank needs, are read as well.
        memory: this rank's boxes of the tensors, to which what is read is written.

    Raises:
        CheckpointError: some rank could not read; on every rank, the same text.

    Communication: as `load`, without that of the index.
    """
    node = _sharing(world, group.ranks)
    plan = plan_box_reads(stored, wanted, node)
    _read_plan(world, group, stored, node, plan, lambda: memory)


def _read_plan(
    world: World,
    group: Group,
    stored: Stored,
    node: Sequence[int],
    plan: Sequence[PieceRead],
    allocate: Callable[[], LoadedParts],
) -> LoadedParts:
    """Read this rank's pieces with the others of its node.

    Raises:
        CheckpointError: some rank of the group could not read; on every rank, the same text.
    """
    # each rank starts at another piece, so that together they read an uncached file only once
    if len(node) == 1:
        first = len(plan) * world.rank // world.size
        plan = [*plan[first:], *plan[:first]]
    parts: list[LoadedParts] = []

    def work() -> None:
        parts.append(
            read(stored, plan, world.group(node), world.rank, allocate, _device(world.group(node)))
        )

    run_on_all_ranks(group, work)
    return parts[0]


class _Index(NamedTuple):
    """The checkpoint that rank 0 has chosen, or why there is none.

    Its path and step, and the lengths of its manifest and index.
    """

    path: str = ""
    step: int | None = None
    manifest: int | None = None
    index: int = 0
    problem: str = ""


class Contents(NamedTuple):
    """The path and step of a checkpoint, and the bytes of its manifest and its index."""

    path: Path
    step: int | None
    manifest: bytes | None
    index: bytes

    def parsed(self) -> Stored:
        """Return what is stored.

        Raises:
            CheckpointError: the manifest or the index is damaged.
        """
        stored = parse(self.path, self.manifest, self.index)
        if None not in (self.step, stored.step) and self.step != stored.step:
            raise CheckpointError(
                f"{self.path} is of step {stored.step} by its manifest, not {self.step}: its "
                "folder was renamed"
            )
        return stored


def read_contents(group: Group, dir: Path, step: int | None) -> Contents:
    """Return the contents of the checkpoint; rank 0 reads the index and broadcasts it.

    Raises:
        FileNotFoundError, CheckpointError: on every rank.
    """
    text = b""

    def find() -> _Index | None:
        nonlocal text
        if group.rank != 0:
            return None
        path, named = _locate(dir, step)
        if path is None:
            return _Index(problem=_no_checkpoint(dir, step))
        if step is None:
            _warn_of_newer(dir, named)
        manifest, index = read_index(path)
        text = (manifest or b"") + index
        return _Index(str(path), named, None if manifest is None else len(manifest), len(index))

    index = run_on_all_ranks(group, find)[0] or _Index()
    if not index.path:
        raise FileNotFoundError(index.problem)
    text = _broadcast(group, text, (index.manifest or 0) + index.index)
    manifest = None if index.manifest is None else text[: index.manifest]
    return Contents(Path(index.path), index.step, manifest, text[index.manifest or 0 :])


def _broadcast(group: Group, text: bytes, length: int) -> bytes:
    """Return the text of rank 0 on every rank."""
    if not length:
        return b""
    data = torch.frombuffer(bytearray(text or bytes(length)), dtype=torch.uint8).to(_device(group))
    group.broadcast(data, 0)
    return bytes(data.cpu().numpy())


def _locate(dir: Path, step: int | None) -> tuple[Path | None, int | None]:
    """Return the checkpoint's folder and the step in its name.

    If `dir` is a checkpoint itself, its name does not matter.
    """
    if step is None and os.path.lexists(dir / folders.METADATA):
        return dir, None
    checkpoints = folders.complete(dir)
    step = max(checkpoints, default=None) if step is None else step
    return (
        (None, None) if step is None or step not in checkpoints else (checkpoints[step].path, step)
    )


def _warn_of_newer(dir: Path, step: int | None) -> None:
    """Warn of a newer step that is skipped."""
    newer = folders.without_manifest(dir)
    if step is not None and newer and max(newer) > step:
        path = newer[max(newer)]
        text = (
            f"load: {path} has no {folders.MANIFEST} and is skipped; step {step}, the newest "
            "complete one, is loaded"
        )
        warnings.warn(text, stacklevel=6)  # at the line that calls load


def _no_checkpoint(dir: Path, step: int | None) -> str:
    if dir.is_file():
        return (
            f"load: {dir} is a file; pass the folder that was passed to sm.checkpoint.save. Use "
            "sm.checkpoint.load_safetensors for a *.safetensors file, and torch.load on one rank "
            "with sm.checkpoint.load_full_state_dict for a file of torch.save"
        )
    have = sorted(folders.complete(dir))
    which = "complete checkpoint" if step is None else f"complete checkpoint of step {step}"
    return f"load: {dir} has no {which}" + (
        f"; it has steps {have[-8:]}"
        if have
        else "; is it the folder that was passed to sm.checkpoint.save?"
    )


def line_of(want: Any) -> str:
    """Return a wanted leaf as text, which ranks compare."""
    if isinstance(want, Layout):
        return f"{want} of ranks {want.mesh.ranks.tolist()}"
    return "a value" if isinstance(want, StoredValue) else "a whole tensor"


def _allocate(stored: Stored, wants: Mapping[str, Any], rank: int) -> LoadedParts:
    """Allocate memory for this rank's parts."""
    boxes, tensors = {}, {}
    for name, want in wants.items():
        entry = stored.entries.get(name)
        if isinstance(want, Layout):
            mesh: Any = want.mesh
            boxes[name] = box_of(want, rank) or ()
            tensors[name] = torch.empty(want.local_shape, dtype=want.dtype, device=mesh.device)
        elif isinstance(want, WholeTensor) and entry is not None and entry.shape is not None:
            boxes[name] = tuple((0, size) for size in entry.shape)
            tensors[name] = torch.empty(entry.shape, dtype=entry.dtype, device=want.device)
    return LoadedParts(boxes, tensors)


def _values(stored: Stored, wants: Mapping[str, Any], node: Sequence[int]) -> dict[str, list[int]]:
    """Return each stored value with the ranks that need it: the whole node, or one if per rank."""
    needed: dict[str, list[int]] = {}
    for name, want in wants.items():
        if isinstance(want, StoredValue):
            own = {rank: own_name(name, rank) if want.optional else want.name for rank in node}
            for rank, stored_name in own.items():
                if stored_name in stored.entries:
                    needed.setdefault(stored_name, []).append(rank)
    return needed


def _sharing(world: World, ranks: Sequence[int]) -> list[int]:
    """Return those of the ranks that share the pieces they read.

    Those of a node, if data is sent over devices or between threads.

    Over sockets (gloo) only this rank: reading from the page cache of the host is faster.
    """
    node = [rank for rank in _node(world) if rank in ranks]
    if isinstance(world, ProcessWorld) and _device(world.group(node)).type == "cpu":
        return [world.rank]
    return node


def _node(world: World) -> range:
    """Return the ranks on this rank's node; all ranks if nodes are not known."""
    size = world.node_size if isinstance(world, ProcessWorld) else None
    size = size or world.size
    first = world.rank // size * size
    return range(first, first + size)


def _device(group: Group) -> torch.device:
    """Return the device from which a group sends host data."""
    return (
        group._host_device()
        if isinstance(group, ProcessGroup) and group.size > 1
        else torch.device("cpu")
    )


def _result(stored: Stored, loaded: LoadedParts, name: str, want: Any) -> Any:
    if isinstance(want, Layout):
        return ShardedTensor._make_guarded(loaded.tensors[name], want)
    if isinstance(want, WholeTensor):
        return loaded.tensors[name]
    return (
        value_of(stored, want.name, loaded.values[want.name])
        if want.name in loaded.values
        else want.fallback
    )


def load_stateful(like: Any, loaded: Any) -> Any:
    """Load the state of stateful objects in `like`; return the tree with these objects in it."""
    if is_stateful(like):
        like.load_state_dict(loaded)
        return like
    inner = None if isinstance(like, StoredDict) else children(like)
    if inner is None:
        return loaded
    return rebuild_container(
        like,
        [
            load_stateful(child, item)
            for (_, child), item in zip(inner, items_of(loaded), strict=True)
        ],
    )
