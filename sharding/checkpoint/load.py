"""Loading: from any mesh onto any mesh."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ...mesh.comm.current_world import current_world
from ...mesh.comm.group import Group
from ...mesh.comm.process import ProcessGroup, ProcessWorld
from ...mesh.comm.world import World
from ...mesh.topology import torchrun_node_size
from ..layout.layout import Layout
from ..tensor.sharded_tensor import ShardedTensor
from .agreement import CheckpointError, agree, everyone, everywhere
from .placing import own_name
from .storage import folder as folders
from .storage.manifest import Stored, check_whole, parse, read_index
from .storage.pieces import value_of
from .storage.reading import Loaded, box_of, read, readings
from .tree import Followed, children, is_stateful, items_of, leaves, mapped, name_of, rebuilt
from .wanted import Plain, Value, wanted


def load(dir: str | os.PathLike[str], like: Any, *, step: int | None = None) -> Any:
    """load(dir, like) -> a tree like `like`, with what is stored. Every rank of the world calls it.

        stored on (2,)   w [0:4] [4:8]      like on (3,)      rank 0   w [0:3]        from the piece 0:4
                                                              rank 1   w [3:6]        from both
                                                              rank 2   w [6:8]        from the piece 4:8

    Each piece of a file is read once per node, by a rank that needs part of it, which sends the others on the node what they need; over
    gloo each rank reads what it needs itself, from the page cache of the node. The CRC-32 of a piece is compared before it is used.
    Nothing of `like` is changed until everything has been read and found in order.

    Args:
        dir: the folder of checkpoints, or one checkpoint's own; also one that torch.distributed.checkpoint wrote, from DTensors or others.
        like: a tree with a part of what was saved, or all; leaves are named by their paths. It has
            `Layout`s and `ShardedTensor`s: what is loaded lies like them, whatever mesh it was saved from;
            `NamedSharding`s: the same, with the shape and dtype that are stored;
            plain tensors: whole, on their devices, on every rank;
            `PerRank(value)`: what this rank saved; `value` on a rank that the saving world did not have;
            anything else, None too: the value that is stored under this name;
            objects with `state_dict()` and `load_state_dict()`: they get what is stored, and are in the result themselves. A module says
            itself what it needs; of other objects, and of the optimizer in `state_dict(model, optimizer)`, the checkpoint does.
        step: of the checkpoint; the newest that is complete by default, with a warning where a newer one has lost its manifest.

    Raises:
        FileNotFoundError: no complete checkpoint, or none of this step.
        ValueError: a leaf that is not stored, with near names, or with another shape or dtype.
        CheckpointError: a file is missing, short or damaged (it is named, and the leaf); ranks have different trees. On every rank, the
            same text.

    Communication: three all_gathers of small objects and a broadcast of the index over all ranks; on each node, for every 256 MiB of
        which ranks need the same, an all_gather of small objects and an all_to_all (not over gloo).

    Example:
        >>> state = sm.load("checkpoints", like=sm.state_dict(model, optimizer))
        >>> sm.load_state_dict(model, state, optimizer)
        >>> w = sm.load("checkpoints", {"model": {"w": Layout.of(mesh, P("tp"), (8, 4))}})["model"]["w"]
    """
    world = current_world()
    group = everyone(world)
    stored = _stored(group, Path(dir), step)
    tree = wanted(like, stored, world)
    wants = {name_of(path): want for path, want in leaves(tree)}
    for name, want in wants.items():
        if not isinstance(want, Value):
            check_whole(stored, name)
    agree(group, "load", {"": f"dir={os.fspath(dir)!r}, step={step}", **{name: line_of(want) for name, want in wants.items()}})
    loaded = _arrived(world, group, stored, wants)
    return given(like, mapped(tree, lambda path, want: _result(stored, loaded, name_of(path), want)))


def _arrived(world: World, group: Group, stored: Stored, wants: Mapping[str, Any]) -> Loaded:
    """This rank's parts of all that is wanted.

    Raises:
        CheckpointError: some rank of some node could not read; on every rank, the same text.
    """
    loaded = _places(stored, wants, world.rank)
    node = _sharing(world)
    tensors = {name: want if isinstance(want, Layout) else None for name, want in wants.items() if not isinstance(want, Value)}
    plan = readings(stored, tensors, _values(stored, wants, node), node)
    if len(node) == 1:  # each rank begins elsewhere, so that together they read a file that is in no cache yet only once
        first = len(plan) * world.rank // world.size
        plan = plan[first:] + plan[:first]
    work = partial(read, stored, plan, world.group(node), world.rank, loaded, _device(world.group(node)))
    everywhere(group, work)
    return loaded


class _Index(NamedTuple):
    """Where rank 0 found a checkpoint, of which step by its name, the lengths of its manifest and index; or why there is none."""

    path: str = ""
    step: int | None = None
    manifest: int | None = None
    index: int = 0
    problem: str = ""


def _stored(group: Group, dir: Path, step: int | None) -> Stored:
    """What is in the checkpoint, as rank 0 reads it for all.

    Raises:
        FileNotFoundError, CheckpointError: on every rank.
    """
    text = b""

    def find() -> _Index | None:
        nonlocal text
        if group.rank != 0:
            return None
        path, named = _found(dir, step)
        if path is None:
            return _Index(problem=_no_checkpoint(dir, step))
        if step is None:
            _warn_of_newer(dir, named)
        manifest, index = read_index(path)
        text = (manifest or b"") + index
        return _Index(str(path), named, None if manifest is None else len(manifest), len(index))

    told = everywhere(group, find)[0] or _Index()
    if not told.path:
        raise FileNotFoundError(told.problem)
    text = _broadcast(group, text, (told.manifest or 0) + told.index)
    manifest = None if told.manifest is None else text[: told.manifest]
    stored = parse(Path(told.path), manifest, text[told.manifest or 0 :])
    if None not in (told.step, stored.step) and told.step != stored.step:
        raise CheckpointError(f"{told.path} is of step {stored.step} by its manifest, not {told.step}: its folder was renamed")
    return stored


def _broadcast(group: Group, text: bytes, length: int) -> bytes:
    """The text of rank 0, on every rank."""
    data = torch.frombuffer(bytearray(text or bytes(length)), dtype=torch.uint8).to(_device(group))
    group.broadcast(data, 0)
    return bytes(data.cpu().numpy())


def _found(dir: Path, step: int | None) -> tuple[Path | None, int | None]:
    """The checkpoint's folder, and the step in its name; a folder that is given itself may have any."""
    if step is None and (dir / folders.METADATA).is_file():
        return dir, None
    found = folders.complete(dir)
    step = max(found, default=None) if step is None else step
    return (None, None) if step is None or step not in found else (found[step].path, step)


def _warn_of_newer(dir: Path, step: int | None) -> None:
    """Warn of a newer step that is passed over."""
    newer = folders.without_manifest(dir)
    if step is not None and newer and max(newer) > step:
        path = newer[max(newer)]
        text = f"load: {path} has no {folders.MANIFEST} and is passed over; step {step}, the newest complete one, is loaded"
        warnings.warn(text, stacklevel=6)  # at the line that calls load


def _no_checkpoint(dir: Path, step: int | None) -> str:
    if dir.is_file():
        return (
            f"load: {dir} is a file; give the folder that was given to sm.save. A *.safetensors file is read by sm.load_safetensors, "
            "a file of torch.save by torch.load on one rank and sm.load_full_state_dict"
        )
    have = sorted(folders.complete(dir))
    which = "complete checkpoint" if step is None else f"complete checkpoint of step {step}"
    return f"load: {dir} has no {which}" + (f"; it has steps {have[-8:]}" if have else "; is it the folder that was given to sm.save?")


def line_of(want: Any) -> str:
    """A wanted leaf as ranks compare it."""
    if isinstance(want, Layout):
        return f"{want} of ranks {want.mesh.ranks.tolist()}"
    return "a value" if isinstance(want, Value) else "a whole tensor"


def _places(stored: Stored, wants: Mapping[str, Any], rank: int) -> Loaded:
    """Memory for what this rank wants."""
    boxes, tensors = {}, {}
    for name, want in wants.items():
        entry = stored.entries.get(name)
        if isinstance(want, Layout):
            mesh: Any = want.mesh
            boxes[name] = box_of(want, rank) or ()
            tensors[name] = torch.empty(want.local_shape, dtype=want.dtype, device=mesh.device)
        elif isinstance(want, Plain) and entry is not None and entry.shape is not None:
            boxes[name] = tuple((0, size) for size in entry.shape)
            tensors[name] = torch.empty(entry.shape, dtype=entry.dtype, device=want.device)
    return Loaded(boxes, tensors)


def _values(stored: Stored, wants: Mapping[str, Any], node: Sequence[int]) -> dict[str, list[int]]:
    """Each value that is stored, with the ranks that need it: all, but each its own of what every rank has saved."""
    needed: dict[str, list[int]] = {}
    for name, want in wants.items():
        if isinstance(want, Value):
            own = {rank: own_name(name, rank) if want.optional else want.name for rank in node}
            for rank, stored_name in own.items():
                if stored_name in stored.entries:
                    needed.setdefault(stored_name, []).append(rank)
    return needed


def _sharing(world: World) -> range:
    """Return the ranks that send each other what they read: those of a node, where data goes over devices or between threads.

    Over sockets (gloo) it is this rank alone: it finds what others have read in the page cache of the host, which is faster.
    """
    node = _node(world)
    if isinstance(world, ProcessWorld) and _device(world.group(node)).type == "cpu":
        return range(world.rank, world.rank + 1)
    return node


def _node(world: World) -> range:
    """The ranks that share a node with this one; all, where nodes are not known."""
    size = torchrun_node_size(world.size) if isinstance(world, ProcessWorld) else None
    size = size or world.size
    first = world.rank // size * size
    return range(first, first + size)


def _device(group: Group) -> torch.device:
    """Where a group takes data that comes from the host."""
    return group._host_device() if isinstance(group, ProcessGroup) and group.size > 1 else torch.device("cpu")


def _result(stored: Stored, loaded: Loaded, name: str, want: Any) -> Any:
    if isinstance(want, Layout):
        return ShardedTensor._make_guarded(loaded.tensors[name], want)
    if isinstance(want, Plain):
        return loaded.tensors[name]
    return value_of(stored, want.name, loaded.values[want.name]) if want.name in loaded.values else want.fallback


def given(like: Any, loaded: Any) -> Any:
    """What was loaded, given to the objects that load themselves; they are in their places of the result."""
    if is_stateful(like):
        like.load_state_dict(loaded)
        return like
    inner = None if isinstance(like, Followed) else children(like)
    if inner is None:
        return loaded
    return rebuilt(like, [given(child, item) for (_, child), item in zip(inner, items_of(loaded), strict=True)])
