"""Whole tensors on one rank, and from there to where they belong: tensor by tensor, box by box, and never whole anywhere else."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...mesh.comm.current_world import current_world
from ...mesh.comm.world import World
from ...mesh.device_mesh import DeviceMesh
from ..layout.layout import Layout
from ..layout.spec import P
from ..tensor.redistribute import redistribute
from ..tensor.sharded_tensor import ShardedTensor
from .agreement import agree, everyone, everywhere
from .state import load_state_dict, state_dict
from .storage.manifest import Entry, Stored
from .ties import ties
from .tree import PerRank, leaves, mapped, name_of, opened, structure_of
from .wanted import Plain, Value, wanted


def full_state_dict(state: Any, rank: int = 0) -> Any:
    """full_state_dict(module or tree) -> on `rank` the same tree with whole tensors in host memory, {} on the others.

        rank 0   [a]        [a b]
        rank 1   [b]   ->   {}

    Args:
        state: a module, which stands for its `state_dict()`, or a tree as `save` takes it, such as `state_dict(model, optimizer)`.
            Tied weights of a module are one tensor in the result, as in its `state_dict()`.
        rank: which rank gets it.

    Raises:
        ValueError: there is no such rank.

    Communication: for each `ShardedTensor` the reduction of what is pending, and one all_to_all in which each box goes to `rank` once.

    Example:
        >>> whole = sm.full_state_dict(model)
        >>> if mesh.get_rank() == 0:
        ...     torch.save(whole, "model.pt")
    """
    world = current_world()
    _check_rank("full_state_dict", rank, world)
    tied = ties(state)
    first: dict[str, Any] = {}

    def gathered(path: tuple[Any, ...], leaf: Any) -> Any:
        name = tied.get(name_of(path), name_of(path))
        if name not in first:
            first[name] = whole_on(leaf, rank, world)
        return first[name]

    whole = mapped(opened(state), gathered)
    return whole if world.rank == rank else {}


def whole_on(leaf: Any, rank: int, world: World) -> Any:
    """A leaf as `rank` has it whole, on the host; None on the others, for a tensor."""
    if isinstance(leaf, ShardedTensor):
        gathered = redistribute(leaf.detach(), _mesh_of(rank, leaf.mesh.device_type), P())
        return gathered._local.cpu() if world.rank == rank else None
    if isinstance(leaf, Tensor):
        return leaf.detach().to("cpu", copy=True) if world.rank == rank else None
    return leaf.value if isinstance(leaf, PerRank) else leaf


def load_full_state_dict(module: nn.Module, state: Any, rank: int = 0, *, optimizer: Optimizer | None = None) -> None:
    """load_full_state_dict(module, state): every rank gets its boxes of the whole tensors that `rank` has.

        rank 0   [a b]        [a]
        rank 1   None    ->   [b]

    Args:
        state: on `rank`, what `full_state_dict(module)` gave; with an optimizer, what `full_state_dict(state_dict(module, optimizer))`
            gave. Not looked at on other ranks.
        rank: which rank has it.

    Raises:
        ValueError: names, shapes or dtypes are not the module's; there is no such rank. On every rank, before anything is changed.
        CheckpointError: `state` has something else than tensors and plain values; ranks have different modules.

    Communication: two all_gathers of small objects over all ranks, then for each `ShardedTensor` one all_to_all in which each box leaves
        `rank`, and the redistribution to its layout; for each plain tensor a broadcast.

    Example:
        >>> state = torch.load("model.pt") if mesh.get_rank() == 0 else None
        >>> sm.load_full_state_dict(model, state)
    """
    world = current_world()
    _check_rank("load_full_state_dict", rank, world)
    if world.rank == rank and optimizer is None:
        state = {"model": state}
    group = everyone(world)
    told = everywhere(group, lambda: _described(state) if world.rank == rank else None)[rank]
    assert told is not None  # noqa: S101
    described, values = told
    like = wanted(state_dict(module, optimizer), described, world)
    _check_known(described, {name_of(path) for path, _ in leaves(like)})
    agree(group, "load_full_state_dict", {name_of(path): _line(want) for path, want in leaves(like)})
    whole = {name_of(path): leaf for path, leaf in leaves(state)} if world.rank == rank else {}
    sent = mapped(like, lambda path, want: _sent(name_of(path), want, described, values, whole, rank, world))
    load_state_dict(module, sent, optimizer)


def _described(state: Any) -> tuple[Stored, dict[str, Any]]:
    """What the ranks must know of the state of one: shapes and dtypes by name, and values."""
    found = {name_of(path): leaf for path, leaf in leaves(state)}
    tensors = {name: leaf for name, leaf in found.items() if isinstance(leaf, Tensor)}
    odd = [name for name, leaf in tensors.items() if isinstance(leaf, ShardedTensor)]
    if odd:
        raise ValueError(f"load_full_state_dict: {odd[0]!r} is a ShardedTensor; give whole tensors, or use sm.load_state_dict")
    values = {name: leaf for name, leaf in found.items() if name not in tensors}
    entries = {name: Entry(leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else Entry(None, None) for name, leaf in found.items()}
    return Stored(Path("the state that was given"), entries, structure_of(state), {}, None), values


def _check_known(described: Stored, names: set[str]) -> None:
    unknown = [name for name in described.entries if name not in names]
    if unknown:
        known = sorted(names)[:3]
        raise ValueError(f"load_full_state_dict: the state has {unknown[:3]} that the module does not have; it has {known} ...")


def _line(want: Any) -> str:
    return str(want) if isinstance(want, Layout) else type(want).__name__


def _sent(
    name: str, want: Any, described: Stored, values: Mapping[str, Any], whole: Mapping[str, Any], rank: int, world: World
) -> Any:
    """A leaf where it belongs: a tensor from `rank`, a value from what every rank was told."""
    if isinstance(want, Value):
        return values[name]
    entry = described.entries[name]
    if isinstance(want, Layout):
        return _scattered(whole.get(name), want, rank, world)
    device = want.device if isinstance(want, Plain) else torch.device("cpu")
    x = whole[name].detach().to(device).contiguous() if name in whole else torch.empty(entry.shape or (), dtype=entry.dtype, device=device)
    everyone(world).broadcast(x, rank)
    return x


def _scattered(whole: Tensor | None, layout: Layout, rank: int, world: World) -> ShardedTensor:
    target: Any = layout.mesh
    source = Layout.of(_mesh_of(rank, target.device_type), P(), layout.shape, layout.dtype)
    local = torch.empty(0, dtype=layout.dtype, device=target.device) if whole is None else whole.detach().to(target.device).contiguous()
    return redistribute(ShardedTensor._make_guarded(local, source), target, layout.spec)


def _mesh_of(rank: int, device_type: str) -> DeviceMesh:
    """The mesh of one rank."""
    return DeviceMesh(device_type, [rank], axis_names=("whole",))


def _check_rank(what: str, rank: int, world: World) -> None:
    if not isinstance(rank, int) or not 0 <= rank < world.size:
        raise ValueError(f"{what}: rank={rank!r}: the world has {world.size} ranks; give one from 0 to {world.size - 1}")
