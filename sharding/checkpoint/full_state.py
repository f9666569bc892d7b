"""Full state dicts on one rank: gather whole tensors there, or scatter them, one at a time."""

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
from .agreement import agree, all_ranks, run_on_all_ranks
from .plan import StoredValue, WholeTensor, wanted_tree
from .state import load_state_dict, state_dict
from .storage.manifest import Stored, StoredLeaf
from .tree import PerRank, leaves, map_leaves, name_of, structure_of, ties, without_stateful


def full_state_dict(state: Any, rank: int = 0) -> Any:
    """full_state_dict(module or tree) -> on `rank` the same tree with whole tensors.

    They are in host memory; the other ranks get {}.

        rank 0   [a]        [a b]
        rank 1   [b]   ->   {}

    Args:
        state: a module, for its `state_dict()`, or a tree as for `save`, such as
            `state_dict(model, optimizer)`. Tied weights of a module are one tensor in the result,
            as in its `state_dict()`.
        rank: the rank that receives it.

    Raises:
        ValueError: there is no such rank.

    Communication: for each `ShardedTensor` the reduction of pending values, and one all_to_all in
    which each box goes to `rank` once.

    Example:
        >>> whole = sm.checkpoint.full_state_dict(model)
        >>> if mesh.get_rank() == 0:
        ...     torch.save(whole, "model.pt")
    """
    world = current_world()
    _check_rank("full_state_dict", rank, world)
    tied = ties(state)
    first: dict[str, Any] = {}

    def gather(path: tuple[Any, ...], leaf: Any) -> Any:
        name = tied.get(name_of(path), name_of(path))
        if name not in first:
            first[name] = whole_on(leaf, rank, world)
        return first[name]

    whole = map_leaves(without_stateful(state), gather)
    return whole if world.rank == rank else {}


def whole_on(leaf: Any, rank: int, world: World) -> Any:
    """Return a leaf whole, on the host of `rank`; on other ranks None for a tensor."""
    if isinstance(leaf, ShardedTensor):
        gathered = redistribute(leaf.detach(), _mesh_of(rank, leaf.mesh.device_type), P())
        return gathered._local.cpu() if world.rank == rank else None
    if isinstance(leaf, Tensor):
        return leaf.detach().to("cpu", copy=True) if world.rank == rank else None
    return leaf.value if isinstance(leaf, PerRank) else leaf


def load_full_state_dict(
    module: nn.Module, state: Any, rank: int = 0, *, optimizer: Optimizer | None = None
) -> None:
    """load_full_state_dict(module, state): load the whole tensors of `rank` into a module.

    Every rank receives its boxes.

        rank 0   [a b]        [a]
        rank 1   None    ->   [b]

    Args:
        state: on `rank`, the result of `full_state_dict(module)`; with an optimizer, that of
            `full_state_dict(state_dict(module, optimizer))`. Ignored on other ranks.
        rank: the rank that has it.

    Raises:
        ValueError: names, shapes or dtypes differ from the module's; there is no such rank. On
            every rank, before anything is changed.
        CheckpointError: `state` has other leaves than tensors and plain values; ranks have
            different modules.

    Communication: two all_gathers of small objects over all ranks, then for each `ShardedTensor`
        one all_to_all in which each box leaves `rank`, and the redistribution to its layout; for
        each plain tensor a broadcast.

    Example:
        >>> state = torch.load("model.pt") if mesh.get_rank() == 0 else None
        >>> sm.checkpoint.load_full_state_dict(model, state)
    """
    world = current_world()
    _check_rank("load_full_state_dict", rank, world)
    if world.rank == rank and optimizer is None:
        state = {"model": state}
    group = all_ranks(world)
    description = run_on_all_ranks(group, lambda: _describe(state) if world.rank == rank else None)[
        rank
    ]
    assert description is not None  # noqa: S101
    described, values = description
    like = wanted_tree(state_dict(module, optimizer), described, world)
    _check_known(described, {name_of(path) for path, _ in leaves(like)})
    facts = {
        name_of(path): str(want) if isinstance(want, Layout) else type(want).__name__
        for path, want in leaves(like)
    }
    agree(group, "load_full_state_dict", facts)
    whole = {name_of(path): leaf for path, leaf in leaves(state)} if world.rank == rank else {}
    sent = map_leaves(
        like,
        lambda path, want: _receive(name_of(path), want, described, values, whole, rank, world),
    )
    load_state_dict(module, sent, optimizer)


def _describe(state: Any) -> tuple[Stored, dict[str, Any]]:
    """Return what all ranks need of the state: shapes and dtypes by name, and values."""
    by_name = {name_of(path): leaf for path, leaf in leaves(state)}
    tensors = {name: leaf for name, leaf in by_name.items() if isinstance(leaf, Tensor)}
    sharded = [name for name, leaf in tensors.items() if isinstance(leaf, ShardedTensor)]
    if sharded:
        raise ValueError(
            f"load_full_state_dict: {sharded[0]!r} is a ShardedTensor; give whole tensors, or use "
            "sm.checkpoint.load_state_dict"
        )
    values = {name: leaf for name, leaf in by_name.items() if name not in tensors}
    entries = {
        name: StoredLeaf(leaf.shape, leaf.dtype)
        if isinstance(leaf, Tensor)
        else StoredLeaf(None, None)
        for name, leaf in by_name.items()
    }
    return Stored(Path("the state that was given"), entries, structure_of(state), {}, None), values


def _check_known(described: Stored, names: set[str]) -> None:
    unknown = [name for name in described.entries if name not in names]
    if unknown:
        known = sorted(names)[:3]
        raise ValueError(
            f"load_full_state_dict: the state has {unknown[:3]} that the module does not have; it "
            f"has {known} ..."
        )


def _receive(
    name: str,
    want: Any,
    described: Stored,
    values: Mapping[str, Any],
    whole: Mapping[str, Any],
    rank: int,
    world: World,
) -> Any:
    """Return a leaf on this rank: a tensor sent by `rank`, or a value that every rank has."""
    if isinstance(want, StoredValue):
        return values[name]
    entry = described.entries[name]
    if isinstance(want, Layout):
        return _scatter(whole.get(name), want, rank, world)
    device = want.device if isinstance(want, WholeTensor) else torch.device("cpu")
    x = (
        whole[name].detach().to(device).contiguous()
        if name in whole
        else torch.empty(entry.shape or (), dtype=entry.dtype, device=device)
    )
    all_ranks(world).broadcast(x, rank)
    return x


def _scatter(whole: Tensor | None, layout: Layout, rank: int, world: World) -> ShardedTensor:
    target: Any = layout.mesh
    source = Layout.of(_mesh_of(rank, target.device_type), P(), layout.shape, layout.dtype)
    local = (
        torch.empty(0, dtype=layout.dtype, device=target.device)
        if whole is None
        else whole.detach().to(target.device).contiguous()
    )
    return redistribute(ShardedTensor._make_guarded(local, source), target, layout.spec)


def _mesh_of(rank: int, device_type: str) -> DeviceMesh:
    """Return the mesh of one rank."""
    return DeviceMesh(device_type, [rank], axis_names=("whole",))


def _check_rank(name: str, rank: int, world: World) -> None:
    if not isinstance(rank, int) or not 0 <= rank < world.size:
        raise ValueError(
            f"{name}: rank must be an integer from 0 to {world.size - 1}, got {rank!r}"
        )
