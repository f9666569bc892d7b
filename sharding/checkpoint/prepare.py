"""Preparation of a save: collect the leaves, check that they can be saved and are alike on all."""

from __future__ import annotations

import io
import os
import threading
import zlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ...mesh.comm.current_world import current_world
from ...mesh.comm.group import Group
from ...mesh.comm.world import World
from ...mesh.monitor.diagnosis.members import lost_ranks
from ...mesh.processes.process import ProcessWorld
from ..tensor.redistribute import redistribute
from ..tensor.sharded_tensor import ShardedTensor
from .agreement import agree, all_ranks, attempt, is_out_of_memory, run_on_all_ranks
from .placing import WriteItem, make_write_plan, own_name
from .saving import SaveJob, on_host, serialize
from .staging import copy_leaves, small_on_host
from .storage import folder as folders
from .storage.index import Damage
from .storage.lease import Lease, take_lease
from .storage.manifest import check_structure, import_format
from .tree import Path as TreePath
from .tree import PerRank, Structure, children, leaves, name_of, opened, structure_of, torch_paths


class SaveState(NamedTuple):
    """A tree to save.

    Attributes:
        leaves: by name; no tensor has pending values.
        lines: for each leaf, a text that must be the same on all ranks.
    """

    leaves: dict[str, Any]
    structure: Structure
    lines: dict[str, str]


def prepare_save(
    tree: Any, dir: str | os.PathLike[str], step: int | None, keep: int | None, copies: bool
) -> SaveJob:
    """Return a save that is ready to write, and its folder; with `copies`, of copied tensors.

    Raises:
        CheckpointError, TypeError, ValueError: see `save`.

    Communication: see `save`.
    """
    world = current_world()
    group = all_ranks(world)
    _check_numbers(step, keep)
    # the thread of an asynchronous save may outlive the program, and could not import it then
    import_format()
    collected, failure = attempt(lambda: state_of(tree, world))
    lines = {} if collected is None else collected.lines
    agree(
        group, "save", {"": f"dir={os.fspath(dir)!r}, step={step}, keep={keep}", **lines}, failure
    )
    assert collected is not None  # noqa: S101
    state = _reduce_pending(collected)
    plan = make_write_plan(state.leaves, world)
    held = _leaves_to_write(state, plan, world.rank)
    ready = None
    if copies:
        copied, failure = attempt(lambda: copy_leaves(held, world))
        held, ready = copied or ({}, None)
    paths = dict(torch_paths(state.structure))
    paths |= {piece.name: _own_path(piece.name, paths) for piece in plan if piece.name not in paths}
    unfinished, number, nonce, lease = _begin(
        group, Path(dir), step, isinstance(world, ProcessWorld), failure
    )
    return SaveJob(
        world.rank,
        world.size,
        number,
        keep,
        unfinished,
        nonce,
        plan,
        held,
        state.structure,
        paths,
        threading.Event(),
        lease,
        ready,
        partial(_is_lost, world),
    )


def _is_lost(world: World, rank: int) -> bool:
    """Return whether the process of a rank is known to have died and will write no more."""
    monitor = world.monitor if isinstance(world, ProcessWorld) else None
    return monitor is not None and any(
        member.rank == rank for member in lost_ranks(monitor.directory)
    )


def _leaves_to_write(state: SaveState, plan: Sequence[WriteItem], rank: int) -> dict[str, Any]:
    """Return the leaves of which this rank writes a piece."""
    own = {
        own_name(name, rank): leaf.value
        for name, leaf in state.leaves.items()
        if isinstance(leaf, PerRank)
    }
    names = {piece.name for piece in plan if piece.rank == rank}
    return {name: leaf for name, leaf in {**state.leaves, **own}.items() if name in names}


def _own_path(name: str, paths: dict[str, TreePath]) -> TreePath:
    """Return the path of one rank's value, next to the leaf's path."""
    leaf, _, own = name.rpartition(".")
    *above, last = paths[leaf]
    return (*above, f"{last}.{own}")


def _check_numbers(step: int | None, keep: int | None) -> None:
    if step is not None and (type(step) is not int or step < 0):
        raise ValueError(
            "save: step must be an integer >= 0, or None for the one after the newest, got "
            f"{step!r}"
        )
    if keep is not None and (type(keep) is not int or keep < 1):
        raise ValueError(
            "save: keep, the number of checkpoints to keep, must be an integer >= 1, or None for "
            f"all, got {keep!r}"
        )


def _begin(
    group: Group, dir: Path, step: int | None, keep_lease: bool, failure: Exception | None
) -> tuple[Path, int, str, Lease | None]:
    """Return the folder to write to, step, nonce, and on rank 0, which makes them, the lease.

    An earlier failure of a rank is raised on all.
    """
    lease: Lease | None = None
    unfinished: Path | None = None

    def begin() -> tuple[str, int] | None:
        nonlocal lease, unfinished
        if failure is not None:
            raise failure
        if group.rank != 0:
            return None
        dir.mkdir(parents=True, exist_ok=True)
        lease = take_lease(dir, keep_lease)
        folders.clean_up(dir)
        newest = folders.latest(dir)
        number = step if step is not None else 0 if newest is None else newest.step + 1
        nonce = os.urandom(4).hex()
        unfinished = dir / folders.name(number, f"tmp-{nonce}")
        unfinished.mkdir()
        return nonce, number

    try:
        (begun, *_) = run_on_all_ranks(group, begin)
        assert begun is not None  # noqa: S101
    except BaseException:
        if unfinished is not None:
            folders.remove(unfinished)
        if lease is not None:
            lease.end()
        raise
    nonce, number = begun
    return dir / folders.name(number, f"tmp-{nonce}"), number, nonce, lease


# --------------------------------------------------------------------------------------------------


def state_of(tree: Any, world: World) -> SaveState:
    """Return the leaves of a tree.

    Raises:
        TypeError, ValueError: a leaf that cannot be saved, or two leaves with the same name.
    """
    tree = opened(tree)
    if children(tree) is None:
        raise TypeError(
            f"save: a {type(tree).__name__} has no named leaves; save a dict, such as {{'x': it}}"
        )
    by_name: dict[str, Any] = {}
    paths: dict[str, TreePath] = {}
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


def _reduce_pending(state: SaveState) -> SaveState:
    """Return the state with pending values reduced."""
    return state._replace(
        leaves={
            name: _without_pending(leaf) if isinstance(leaf, ShardedTensor) else leaf
            for name, leaf in state.leaves.items()
        }
    )


def _without_pending(leaf: ShardedTensor) -> ShardedTensor:
    return (
        redistribute(leaf.detach(), leaf.spec.with_unreduced({})) if leaf.spec.unreduced else leaf
    )
