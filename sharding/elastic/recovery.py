"""`recover`: the state of a job that has lost ranks, on a new mesh, from what the others hold.

    w on (dp=2, tp=2)      rank 0 [0:4]   rank 1 [4:8]     rank 1 is lost
                           rank 2 [0:4]   rank 3 [4:8]
    w on (dp=3)            rank 0 [0:3]   rank 2 [3:6]   rank 3 [6:8]
                                          |              has it
                                          3:4 has it, 4:6 from rank 3

State is what checkpoints see as state: the leaves of a tree, in which modules, optimizers and
everything else with `state_dict` stand for theirs. Where a checkpoint has files, this has the parts
of the ranks that are left, copies of the parts of others (redundancy.py), and for boxes that nobody
has a checkpoint of the same step (checkpointed.py).
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...kernels.box import Box, box_origin, box_shape, box_size, intersect, slices
from ...mesh.comm.current_world import current_world
from ...mesh.comm.group import Group
from ...mesh.comm.world import World
from ...mesh.text import ranks_text
from ..checkpoint.agreement import agree, run_on_all_ranks
from ..checkpoint.load import line_of, load_stateful
from ..checkpoint.plan import StoredValue, own_name, wanted_tree
from ..checkpoint.storage.manifest import Stored, StoredLeaf
from ..checkpoint.tree import (
    PartialModel,
    PerRank,
    children,
    is_stateful,
    leaves,
    map_leaves,
    name_of,
    structure_of,
    without_stateful,
)
from ..layout.layout import Layout
from ..redistribute.all_to_all import AllToAllV, TensorShare
from ..tensor.sharded_tensor import ShardedTensor
from .checkpointed import find_checkpoints, read_lost, stored_parts
from .plan import (
    RecoveryPlan,
    Source,
    TensorRecovery,
    lost_lines,
    plan_tensor,
    refuse_pending,
)
from .redundancy import StateCopy

_BUCKET_BYTES = 256 << 20  # that a rank sends or receives in one collective


class StateLostError(RuntimeError):
    """Ranks that are lost held elements of which no other rank has a copy.

    The text is the same on every rank. Load a checkpoint instead.

    Attributes:
        lost: the boxes of the global tensors that are lost, by name.
    """

    def __init__(self, text: str, lost: Mapping[str, Sequence[Box]]) -> None:
        super().__init__(text)
        self.lost = lost


# -- the plan --------------------------------------------------------------------------------------


class _Old(NamedTuple):
    """The state before: leaves by name, and what the loading of checkpoints needs to know of it."""

    leaves: dict[str, Any]
    stored: Stored


class _Recovery(NamedTuple):
    """A recovery that is planned.

    Attributes:
        old: the state before.
        tree: the wanted leaves.
        wants: the same by name.
        plan: where each of them comes from.
        step: the version of the state; None if it does not matter.
    """

    old: _Old
    tree: Any
    wants: dict[str, Any]
    plan: RecoveryPlan
    step: int | None


def plan_recovery(
    state: Any,
    like: Any,
    alive: Sequence[int],
    *,
    checkpoint: str | os.PathLike[str] | None = None,
    step: int | None = None,
) -> RecoveryPlan:
    """plan_recovery(state, like, alive) -> where each element of `like` comes from; what is lost.

    The arguments and errors are those of `recover`.
    Every pair of a rank and a box of a tensor is compared, as by `plan_cross_mesh`. The folder of
    checkpoints is looked into, but none is read.

    Communication: none.

    Example:
        >>> print(plan_recovery({"model": model}, {"model": new_model}, alive=[0, 1, 3]))
    """
    recovery = _prepare(state, like, alive, checkpoint, step)
    if not recovery.plan.lost or checkpoint is None:
        return recovery.plan
    checkpoints = find_checkpoints(checkpoint, recovery.step)
    return replace(recovery.plan, checkpoint=checkpoints.of_step, newest=checkpoints.newest)


def _prepare(
    state: Any,
    like: Any,
    alive: Sequence[int],
    checkpoint: str | os.PathLike[str] | None,
    step: int | None,
) -> _Recovery:
    """Return the plan of a recovery, without looking for a checkpoint. Communication: none."""
    copies: Mapping[str, Mapping[Box, Sequence[int]]] = {}
    if isinstance(state, StateCopy):
        state, copies, step = state.state, state.holders, state.step
    if checkpoint is not None and type(step) is not int:
        raise ValueError(
            f"recover: checkpoint={os.fspath(checkpoint)!r} needs step=, the number under which a "
            f"checkpoint of this version of the state is saved, got {step!r}"
        )
    world = current_world()
    old = _old_state(state, world)
    tree = wanted_tree(like, old.stored, world)
    wants = dict(_named(tree))
    plan = _plan(old, wants, tuple(alive), world, copies)
    return _Recovery(old, tree, wants, plan, step)


def wanted_from(state: Any, like: Any) -> Any:
    """Return the tree of `like` with what is wanted for each leaf, as `recover` takes it.

    None for None. Communication: none.
    """
    if like is None:
        return None
    world = current_world()
    tree = state.state if isinstance(state, StateCopy) else state
    return wanted_tree(like, _old_state(tree, world).stored, world)


def _named(tree: Any) -> list[tuple[str, Any]]:
    return [(name_of(path), leaf) for path, leaf in leaves(tree)]


def _old_state(state: Any, world: World) -> _Old:
    """Return the leaves of the old state. Those of other ranks are the same, but for parts.

    Raises:
        ValueError: a pipeline, whose state no rank has without the others; pending values.
    """
    _refuse_partial_models(state, ())
    tree = without_stateful(state)
    by_name = dict(_named(tree))
    entries: dict[str, StoredLeaf] = {}
    for name, leaf in by_name.items():
        if isinstance(leaf, PerRank):
            entries[own_name(name, world.rank)] = StoredLeaf(None, None)
        elif isinstance(leaf, Tensor):
            is_sharded = isinstance(leaf, ShardedTensor)
            entries[name] = StoredLeaf(leaf.shape, leaf.dtype, is_sharded=is_sharded)
        else:
            entries[name] = StoredLeaf(None, None)
        if isinstance(leaf, ShardedTensor):
            refuse_pending("recover", name, leaf)
    where = Path("the state of the ranks that are left")
    return _Old(by_name, Stored(where, entries, structure_of(tree), {}, None))


def _refuse_partial_models(tree: Any, path: tuple[Any, ...]) -> None:
    if isinstance(tree, PartialModel) and not isinstance(tree, torch.nn.Module):
        raise ValueError(
            f"recover: {name_of(path)!r} is a pipeline, whose ranks ask each other for its state; "
            "pass what sm.checkpoint.state_dict(pipe, optimizer) returned after the last step, "
            "while all ranks were there"
        )
    if not is_stateful(tree):
        for key, child in children(tree) or ():
            _refuse_partial_models(child, (*path, key))


def _plan(
    old: _Old,
    wants: Mapping[str, Any],
    alive: tuple[int, ...],
    world: World,
    copies: Mapping[str, Mapping[Box, Sequence[int]]],
) -> RecoveryPlan:
    layouts = [leaf._layout for leaf in old.leaves.values() if isinstance(leaf, ShardedTensor)]
    meshes = {id(layout.mesh): layout.mesh for layout in layouts}
    is_same_world = all(getattr(mesh, "world", None) is world for mesh in meshes.values())
    if is_same_world and meshes:
        alive = ranks = tuple(sorted(alive))  # the order of their group
    else:
        ranks = tuple(range(world.size))
    _check_ranks(alive, ranks, world)
    missing: set[int] = set()
    for mesh in meshes.values():
        missing |= set(mesh.ranks.ravel().tolist()) - set(alive)
    load = [0] * len(alive)
    tensors: dict[str, TensorRecovery] = {}
    for name, want in wants.items():
        if isinstance(want, StoredValue):
            continue
        target = want if isinstance(want, Layout) else None
        copied = copies.get(name, {})
        tensors[name] = plan_tensor(old.leaves[name], target, alive, ranks, load, copied)
    return RecoveryPlan(alive, ranks, tuple(sorted(missing)), tensors)


def _check_ranks(alive: Sequence[int], ranks: Sequence[int], world: World) -> None:
    if len(set(alive)) < len(alive):
        raise ValueError(f"recover: alive={list(alive)} must list the surviving ranks, once each")
    if len(alive) != len(ranks):
        raise ValueError(
            f"recover: alive={list(alive)} must list the surviving ranks by their old numbers, one "
            f"for each of the {world.size} ranks of this world, in their order"
        )
    if world.rank not in ranks:
        raise ValueError(
            f"recover: rank {world.rank} is not in alive={list(alive)}, and must not call this"
        )


# -- the exchange ----------------------------------------------------------------------------------


def recover(
    state: Any,
    like: Any,
    alive: Sequence[int],
    *,
    checkpoint: str | os.PathLike[str] | None = None,
    step: int | None = None,
) -> Any:
    """recover(state, like, alive) -> a tree like `like` with the values of `state`.

    Every rank that is left calls it. Each rank receives each element that it lacks once, from the
    ranks that hold it, which share the sending evenly. Boxes that no rank holds come from a
    checkpoint of the same step, if there is one: each rank reads the pieces of the files that have
    some of its own. Nothing of `state` is changed, and objects in `like` only when all has arrived,
    so that an exchange in which a further rank is lost can be repeated from `state`. Elements are
    copied bit for bit.

    Args:
        state: the tree of the ranks' state, on the old mesh: modules, optimizers and other objects
            with `state_dict`, tensors, numbers; as for `sm.checkpoint.save`. All ranks hold the
            same version of it (docs/elastic.md). Or a version with copies of other ranks' parts, by
            `Redundancy.version`. For a pipeline the tree by `sm.checkpoint.state_dict`, made while
            all ranks were there.
        like: a tree with the same names on the new mesh, made from scratch; as for
            `sm.checkpoint.load`. An optimizer before its first step takes over the state that there
            is, also none. Values of `PerRank`, such as torch's random state, stay each rank's own.
        alive: the ranks that are left, by their numbers on the old mesh. If the new mesh is of the
            same world, ranks keep their numbers, and only these call; if it is of another one, rank
            i was rank `alive[i]`. Ranks outside the new mesh only send.
        checkpoint: the folder of checkpoints of this job, which have the tree under the same names.
        step: the number under which a checkpoint of this version of the state is saved; that of
            the version, if `state` is one by `Redundancy`.

    Raises:
        StateLostError: no rank has some elements, and there is no checkpoint of this step; it names
            tensors and boxes, and the step of the newest checkpoint. On every rank, before anything
            moves.
        ValueError: as `sm.checkpoint.load` for names, shapes and dtypes; pending values, pipelines.
        CheckpointError: ranks have different trees; the checkpoint cannot be read. On every rank,
            the same text.

    Communication: one all_gather of 32 bytes from each rank; for each dtype and every 256 MiB an
        all_to_all over the ranks that are left, none if no rank lacks anything. With a checkpoint
        three all_gathers of small objects and a broadcast of its index, and that of reading it (see
        `sm.checkpoint.load`).

    Memory: the new parts, next to `state` and `like`, until they are loaded; buffers of 256 MiB.

    Example:
        >>> like = build(mesh_of_three)
        >>> recover(state, like, alive=[0, 1, 3], checkpoint="checkpoints", step=step)
        >>> state = like
    """
    recovery = _prepare(state, like, alive, checkpoint, step)
    old, wants, plan, step = recovery.old, recovery.wants, recovery.plan, recovery.step
    if plan.lost and checkpoint is None:
        raise _state_lost(
            plan, "load the newest checkpoint, or replicate the state along another axis"
        )
    world = current_world()
    group = world.group(plan.ranks)
    where = None if checkpoint is None else os.fspath(checkpoint)
    compared = {"": f"alive={list(plan.alive)}, checkpoint={where!r}, step={step}"}
    for name, want in wants.items():
        compared[name] = _line(old.leaves.get(name), want)
    agree(group, "recover", compared)
    stored: Stored | None = None
    if plan.lost and checkpoint is not None:
        plan = _with_checkpoint(group, plan, checkpoint, step)
        stored = stored_parts(group, checkpoint, plan)
    copied = state.received if isinstance(state, StateCopy) else {}
    parts = _exchange(group, plan, old, wants, copied)
    if stored is not None:
        read_lost(world, group, stored, plan, parts)

    def result(path: tuple[Any, ...], want: Any) -> Any:
        name = name_of(path)
        if isinstance(want, Layout):
            return ShardedTensor._make_guarded(parts[name].reshape(want.local_shape), want)
        if name in parts:
            return parts[name].reshape(plan.tensors[name].shape)
        return _value(old, name, want)

    return load_stateful(like, map_leaves(recovery.tree, result))


def _with_checkpoint(
    group: Group, plan: RecoveryPlan, dir: str | os.PathLike[str], step: int | None
) -> RecoveryPlan:
    """Return the plan with the checkpoint that has what is lost; the first rank looks for it.

    Raises:
        StateLostError: there is none of this step; on every rank.
    """
    checkpoints = run_on_all_ranks(
        group, lambda: find_checkpoints(dir, step) if group.rank == 0 else None
    )[0]
    assert checkpoints is not None  # noqa: S101
    plan = replace(plan, checkpoint=checkpoints.of_step, newest=checkpoints.newest)
    if plan.checkpoint is None:
        newest = "has no checkpoint"
        if plan.newest is not None:
            newest = f"has none of step {step}; the newest is of step {plan.newest.step}"
        raise _state_lost(plan, f"{os.fspath(dir)} {newest}: go back to a checkpoint as a whole")
    return plan


def _state_lost(plan: RecoveryPlan, remedy: str) -> StateLostError:
    lines = "\n".join(lost_lines(plan))
    return StateLostError(
        f"recover: {len(plan.lost)} of {len(plan.tensors)} tensors have elements that only lost "
        f"ranks held ({ranks_text(plan.missing)}); {remedy}\n{lines}",
        plan.lost,
    )


def _line(leaf: Any, want: Any) -> str:
    """Return as text what ranks must have in common of a leaf."""
    if isinstance(leaf, ShardedTensor):
        return f"{leaf._layout} of ranks {leaf.mesh.ranks.tolist()} -> {line_of(want)}"
    return line_of(want)


def _value(old: _Old, name: str, want: StoredValue) -> Any:
    """Return a copy of this rank's own value, or what `like` has for ranks without one."""
    if want.name not in old.stored.entries:
        return want.fallback
    leaf = old.leaves[name]
    return copy.deepcopy(leaf.value if isinstance(leaf, PerRank) else leaf)


def _exchange(
    group: Group,
    plan: RecoveryPlan,
    old: _Old,
    wants: Mapping[str, Any],
    copied: Mapping[tuple[str, Box], Tensor],
) -> dict[str, Tensor]:
    """Return this rank's new parts of all tensors, contiguous, in the shape of their boxes.

    What is lost of them has no values yet.

    Args:
        copied: this rank's copies of parts of other ranks, by name and box.
    """
    own = group.rank
    parts: dict[str, Tensor] = {}
    own_parts = {name: tensor.parts for name, tensor in plan.tensors.items()}
    for names in _buckets(plan, own_parts):
        moving = [name for name in names if own_parts[name].transfers]
        held = {
            name: _local_part(old.leaves[name], own_parts[name].have[own], wants[name])
            for name in names
        }
        for name in names:
            if name not in moving:
                parts[name] = _own_part(held[name], plan.tensors[name], own)
        moved = _move(group, plan, own_parts, moving, [held[name] for name in moving])
        parts.update(zip(moving, moved, strict=True))
    most = max((len(tensor.copies) for tensor in plan.tensors.values()), default=0)
    for i in range(most):
        sources = {
            name: tensor.copies[i]
            for name, tensor in plan.tensors.items()
            if i < len(tensor.copies)
        }
        for names in _buckets(plan, sources):
            held = {
                name: _copied_part(copied, name, sources[name].have[own], parts[name])
                for name in names
            }
            outs = [parts[name] for name in names]
            _move(group, plan, sources, names, list(held.values()), outs)
    return parts


def _move(
    group: Group,
    plan: RecoveryPlan,
    sources: Mapping[str, Source],
    names: Sequence[str],
    tensors: list[Tensor],
    outs: list[Tensor] | None = None,
) -> list[Tensor]:
    """Return this rank's new parts of some tensors of one dtype, with what the sources have.

    They are `outs`, if these are passed.
    """
    if not names:
        return []
    shares = [_share(sources[name], plan.tensors[name].want, group.rank) for name in names]
    exchange = AllToAllV(group, plan.tensors[names[0]].dtype, shares)
    moved: Any = exchange.start(tensors, outs=outs)
    return moved


def _buckets(plan: RecoveryPlan, sources: Mapping[str, Source]) -> list[list[str]]:
    """Return the names of tensors in buckets of one dtype; the same on every rank.

    No rank sends or receives much more than `_BUCKET_BYTES` of a bucket.
    """
    buckets: list[list[str]] = []
    by_dtype: dict[torch.dtype, list[str]] = {}
    for name in sources:
        by_dtype.setdefault(plan.tensors[name].dtype, []).append(name)
    for dtype, names in by_dtype.items():
        traffic: dict[tuple[str, int], int] = {}
        bucket: list[str] = []
        for name in names:
            bucket.append(name)
            for sender, receiver, box in sources[name].transfers:
                for key in (("sent", sender), ("received", receiver)):
                    traffic[key] = traffic.get(key, 0) + box_size(box) * dtype.itemsize
            if max(traffic.values(), default=0) > _BUCKET_BYTES:
                buckets.append(bucket)
                bucket, traffic = [], {}
        if bucket:
            buckets.append(bucket)
    return buckets


def _local_part(leaf: Tensor, box: Box, want: Any) -> Tensor:
    """Return this rank's part of an old tensor, in its box's shape, on the new one's device."""
    local = leaf._local if isinstance(leaf, ShardedTensor) else leaf
    target: Any = want.mesh if isinstance(want, Layout) else want
    if not box_size(box):  # outside of the mesh a tensor without dims has memory for one element
        return local.new_empty(box_shape(box), device=target.device)
    return local.detach().to(target.device).reshape(box_shape(box))


def _copied_part(
    copied: Mapping[tuple[str, Box], Tensor], name: str, box: Box, like: Tensor
) -> Tensor:
    """Return this rank's copy of a box of another rank, on the device of the new part."""
    if not box_size(box):
        return like.new_empty(box_shape(box))
    return copied[name, box].to(like.device).reshape(box_shape(box))


def _own_part(local: Tensor, tensor: TensorRecovery, own: int) -> Tensor:
    """Return a copy of the part of a tensor that no rank sends; `state` must not change with it."""
    have, want = tensor.parts.have[own], tensor.want[own]
    part = local.new_empty(box_shape(want))
    kept = intersect(have, want)
    if kept is not None:
        part[slices(kept, box_origin(want))] = local[slices(kept, box_origin(have))]
    return part


def _share(source: Source, want: Sequence[Box], own: int) -> TensorShare:
    """Return the boxes that this rank sends, receives and keeps."""
    count = len(source.have)
    sends: list[list[Box]] = [[] for _ in range(count)]
    recvs: list[list[Box]] = [[] for _ in range(count)]
    for sender, receiver, box in source.transfers:
        if sender == own:
            sends[receiver].append(box)
        elif receiver == own:
            recvs[sender].append(box)
    have = source.have[own]
    return TensorShare(have, want[own], sends, recvs, intersect(have, want[own]))
