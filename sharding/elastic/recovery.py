"""`recover`: the state of a job that has lost ranks, from the parts that the others hold.

It is moved to the layouts of a new mesh:

    w on (dp=2, tp=2)      rank 0 [0:4]   rank 1 [4:8]     rank 1 is lost
                           rank 2 [0:4]   rank 3 [4:8]
    w on (dp=3)            rank 0 [0:3]   rank 2 [3:6]   rank 3 [6:8]
                                          |              has it
                                          3:4 has it, 4:6 from rank 3

State is what checkpoints see as state: the leaves of a tree, in which modules, optimizers and
everything else with `state_dict` stand for theirs. Where a checkpoint has files, this has the parts
of the ranks that are left.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...kernels.box import Box, box_origin, box_shape, box_size, full_box, intersect, slices
from ...mesh.comm.current_world import current_world
from ...mesh.comm.group import Group
from ...mesh.comm.world import World
from ...mesh.text import rank_ranges, ranks_text, table_lines
from ..checkpoint.agreement import agree
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
from ..redistribute.plan.cross_mesh import box_on, nodes_of
from ..redistribute.plan.routes import Transfer, direct
from ..tensor.sharded_tensor import ShardedTensor

_BUCKET_BYTES = 256 << 20  # that a rank sends or receives in one collective
_SHOWN = 8  # tensors and boxes in a text


class StateLostError(RuntimeError):
    """Lost ranks held elements of which no other rank has a copy; load a checkpoint instead.

    The text is the same on every rank.

    Attributes:
        lost: the boxes of the global tensors that are lost, by name.
    """

    def __init__(self, text: str, lost: Mapping[str, Sequence[Box]]) -> None:
        super().__init__(text)
        self.lost = lost


@dataclass(frozen=True, eq=False)
class TensorRecovery:
    """How one tensor gets to its new layout. Ranks are indices into `RecoveryPlan.alive`.

    Attributes:
        dtype: its dtype.
        have: the box of each rank before.
        want: the box of each rank after.
        transfers: which rank sends which box to which.
        lost: boxes that no rank has.
    """

    dtype: torch.dtype
    have: tuple[Box, ...]
    want: tuple[Box, ...]
    transfers: tuple[Transfer, ...]
    lost: tuple[Box, ...]


@dataclass(frozen=True, eq=False)
class RecoveryPlan:
    """Where each rank gets its new parts from; `print(plan)` shows it.

    Attributes:
        alive: the ranks that are left, by their numbers in the old world.
        ranks: the same ranks by their numbers in the current world.
        missing: ranks of the old meshes that are not left.
        tensors: by name.
    """

    alive: tuple[int, ...]
    ranks: tuple[int, ...]
    missing: tuple[int, ...]
    tensors: dict[str, TensorRecovery]

    @property
    def lost(self) -> dict[str, tuple[Box, ...]]:
        """The boxes that no rank has, by name, of the tensors that have any."""
        return {name: tensor.lost for name, tensor in self.tensors.items() if tensor.lost}

    def bytes_sent(self) -> dict[tuple[int, int], int]:
        """Return how many bytes a rank sends to another, by (sender, receiver), in old numbers."""
        sent: dict[tuple[int, int], int] = {}
        for tensor in self.tensors.values():
            for sender, receiver, box in tensor.transfers:
                pair = self.alive[sender], self.alive[receiver]
                sent[pair] = sent.get(pair, 0) + box_size(box) * tensor.dtype.itemsize
        return sent

    def __str__(self) -> str:
        sent = self.bytes_sent()
        after = [0] * len(self.alive)
        for tensor in self.tensors.values():
            for i, box in enumerate(tensor.want):
                after[i] += box_size(box) * tensor.dtype.itemsize
        missing = f"; {ranks_text(self.missing)} lost" if self.missing else ""
        rows = [("rank", "is now", "bytes", "receives", "sends", "from")]
        for i, rank in enumerate(self.alive):
            sources = {pair[0]: count for pair, count in sent.items() if pair[1] == rank}
            sends = sum(count for pair, count in sent.items() if pair[0] == rank)
            shown = ", ".join(f"{source}: {count:,}" for source, count in sorted(sources.items()))
            received = sum(sources.values())
            numbers = (f"{after[i]:,}", f"{received:,}", f"{sends:,}")
            rows.append((str(rank), str(self.ranks[i]), *numbers, shown))
        head = f"recovery of {len(self.tensors)} tensors from {len(self.alive)} ranks{missing}"
        return "\n".join([head, *table_lines(rows, right=range(5)), *_lost_lines(self)])


def _lost_lines(plan: RecoveryPlan) -> list[str]:
    """Return what is lost, a line for each tensor."""
    lines: list[str] = []
    for name, boxes in list(plan.lost.items())[:_SHOWN]:
        text = ", ".join(_box_text(box) for box in boxes[:_SHOWN])
        more = f" and {len(boxes) - _SHOWN} more parts" if len(boxes) > _SHOWN else ""
        lines.append(f"lost: {name}[{text}]{more}")
    if len(plan.lost) > _SHOWN:
        lines.append(f"lost: parts of {len(plan.lost) - _SHOWN} more tensors")
    return lines


def _box_text(box: Box) -> str:
    intervals = ", ".join(f"{start}:{stop}" for start, stop in box)
    return f"({intervals})" if len(box) > 1 else intervals


# -- the plan --------------------------------------------------------------------------------------


class _Old(NamedTuple):
    """The state before: leaves by name, and what the loading of checkpoints needs to know of it."""

    leaves: dict[str, Any]
    stored: Stored


def plan_recovery(state: Any, like: Any, alive: Sequence[int]) -> RecoveryPlan:
    """plan_recovery(state, like, alive) -> where each element of `like` comes from; what is lost.

    The arguments and errors are those of `recover`. Every pair of a rank and a box of a tensor is
    compared, as by `plan_cross_mesh`.

    Communication: none.

    Example:
        >>> print(plan_recovery({"model": model}, {"model": new_model}, alive=[0, 1, 3]))
    """
    world = current_world()
    old = _old_state(state, world)
    wants = dict(_named(wanted_tree(like, old.stored, world)))
    return _plan(old, wants, tuple(alive), world)


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
            entries[name] = StoredLeaf(leaf.shape, leaf.dtype)
        else:
            entries[name] = StoredLeaf(None, None)
        if isinstance(leaf, ShardedTensor) and leaf.spec.unreduced:
            raise ValueError(
                f"recover: {name!r} is {leaf._layout}, which is pending: ranks that are lost held "
                "a share of each element; reduce it before it becomes state"
            )
    where = Path("the state of the ranks that are left")
    return _Old(by_name, Stored(where, entries, structure_of(tree), {}, None))


def _refuse_partial_models(tree: Any, path: tuple[Any, ...]) -> None:
    if isinstance(tree, PartialModel) and not isinstance(tree, torch.nn.Module):
        raise ValueError(
            f"recover: {name_of(path)!r} is a pipeline, whose state the ranks gather from each "
            "other; load a checkpoint of it instead"
        )
    if not is_stateful(tree):
        for key, child in children(tree) or ():
            _refuse_partial_models(child, (*path, key))


def _plan(
    old: _Old, wants: Mapping[str, Any], alive: tuple[int, ...], world: World
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
        tensors[name] = _plan_tensor(old.leaves[name], want, alive, ranks, load)
    return RecoveryPlan(alive, ranks, tuple(sorted(missing)), tensors)


def _check_ranks(alive: Sequence[int], ranks: Sequence[int], world: World) -> None:
    if len(set(alive)) < len(alive) or len(alive) != len(ranks):
        raise ValueError(
            f"recover: alive={list(alive)} must name each rank that is left once, by its number in "
            f"the old world, in the order of the {world.size} ranks of this one"
        )
    if world.rank not in ranks:
        raise ValueError(
            f"recover: rank {world.rank} is not in alive={list(alive)}, and must not call this"
        )


def _plan_tensor(
    leaf: Tensor, want: Any, alive: Sequence[int], ranks: Sequence[int], load: list[int]
) -> TensorRecovery:
    whole = full_box(leaf.shape) or ((0, 1),)
    nodes = [0] * len(alive)
    have, held_before = [whole] * len(alive), {whole}
    if isinstance(leaf, ShardedTensor):
        layout = leaf._layout
        have = [box_on(layout, rank) for rank in alive]
        held_before = {box_on(layout, rank) for rank in layout.mesh.ranks.ravel().tolist()}
        nodes = nodes_of(layout, alive, layout.mesh.topology)
    wanted = [whole] * len(alive)
    if isinstance(want, Layout):
        wanted = [box_on(want, rank) for rank in ranks]
    transfers = direct(have, wanted, nodes, load, leaf.dtype.itemsize)
    lost = sorted(box for box in held_before - set(have) if box_size(box))
    return TensorRecovery(leaf.dtype, tuple(have), tuple(wanted), tuple(transfers), tuple(lost))


# -- the exchange ----------------------------------------------------------------------------------


def recover(state: Any, like: Any, alive: Sequence[int]) -> Any:
    """recover(state, like, alive) -> a tree like `like` with the values of `state`.

    Every rank that is left calls it. Each rank receives each element that it lacks once, from the
    ranks that hold it, which share the sending evenly. Nothing of `state` is changed, and objects
    in `like` only when all has arrived, so that an exchange in which a further rank is lost can be
    repeated from `state`. Elements are copied bit for bit.

    Args:
        state: the tree of the ranks' state, on the old mesh: modules, optimizers and other objects
            with `state_dict`, tensors, numbers; as for `sm.checkpoint.save`. All ranks hold the
            same version of it (docs/elastic.md).
        like: a tree with the same names on the new mesh, made from scratch; as for
            `sm.checkpoint.load`. An optimizer before its first step takes over the state that there
            is, also none. Values of `PerRank`, such as torch's random state, stay each rank's own.
        alive: the ranks that are left, by their numbers on the old mesh. If the new mesh is of the
            same world, ranks keep their numbers, and only these call; if it is of another one, rank
            i was rank `alive[i]`. Ranks outside the new mesh only send.

    Raises:
        StateLostError: no rank has some elements; it names tensors and boxes. On every rank, before
            anything moves.
        ValueError: as `sm.checkpoint.load` for names, shapes and dtypes; pending values, pipelines.
        CheckpointError: ranks have different trees. On every rank, the same text.

    Communication: one all_gather of 32 bytes from each rank; for each dtype and every 256 MiB an
        all_to_all over the ranks that are left, none if no rank lacks anything.

    Memory: the new parts, next to `state` and `like`, until they are loaded; buffers of 256 MiB.

    Example:
        >>> like = build(mesh_of_three)
        >>> recover(state, like, alive=[0, 1, 3])
        >>> state = like
    """
    world = current_world()
    old = _old_state(state, world)
    tree = wanted_tree(like, old.stored, world)
    wants = dict(_named(tree))
    plan = _plan(old, wants, tuple(alive), world)
    if plan.lost:
        lines = "\n".join(_lost_lines(plan))
        lost_ranks = rank_ranges(plan.missing)
        raise StateLostError(
            f"recover: {len(plan.lost)} of {len(plan.tensors)} tensors have elements that only "
            f"ranks held which are lost ({lost_ranks}); load the newest checkpoint, or replicate "
            f"the state along another axis\n{lines}",
            plan.lost,
        )
    group = world.group(plan.ranks)
    compared = {"": f"alive={list(plan.alive)}"}
    for name, want in wants.items():
        compared[name] = _line(old.leaves.get(name), want)
    agree(group, "recover", compared)
    parts = _exchange(group, plan, old, wants)

    def result(path: tuple[Any, ...], want: Any) -> Any:
        name = name_of(path)
        if isinstance(want, Layout):
            return ShardedTensor._make_guarded(parts[name].reshape(want.local_shape), want)
        return parts[name] if name in parts else _value(old, name, want)

    return load_stateful(like, map_leaves(tree, result))


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
    group: Group, plan: RecoveryPlan, old: _Old, wants: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Return this rank's new parts of all tensors, in the shape of their boxes."""
    own = group.rank
    parts: dict[str, Tensor] = {}
    for names in _buckets(plan):
        moving: list[str] = []
        shares: list[TensorShare] = []
        tensors: list[Tensor] = []
        for name in names:
            tensor = plan.tensors[name]
            local = _local_part(old.leaves[name], wants[name]).reshape(box_shape(tensor.have[own]))
            if not tensor.transfers:
                parts[name] = _own_part(local, tensor, own)
                continue
            moving.append(name)
            shares.append(_share(tensor, own))
            tensors.append(local)
        if moving:
            exchange = AllToAllV(group, plan.tensors[moving[0]].dtype, shares)
            moved: Any = exchange.start(tensors)
            parts.update(zip(moving, moved, strict=True))
    shapes = {name: leaf.shape for name, leaf in old.leaves.items() if isinstance(leaf, Tensor)}
    return {
        name: part if isinstance(wants[name], Layout) else part.reshape(shapes[name])
        for name, part in parts.items()
    }


def _buckets(plan: RecoveryPlan) -> list[list[str]]:
    """Return the names of tensors in buckets of one dtype; the same on every rank.

    Of no bucket a rank sends or receives much more than `_BUCKET_BYTES`.
    """
    buckets: list[list[str]] = []
    by_dtype: dict[torch.dtype, list[str]] = {}
    for name, tensor in plan.tensors.items():
        by_dtype.setdefault(tensor.dtype, []).append(name)
    for names in by_dtype.values():
        traffic: dict[tuple[str, int], int] = {}
        bucket: list[str] = []
        for name in names:
            bucket.append(name)
            tensor = plan.tensors[name]
            for sender, receiver, box in tensor.transfers:
                for key in (("sent", sender), ("received", receiver)):
                    count = box_size(box) * tensor.dtype.itemsize
                    traffic[key] = traffic.get(key, 0) + count
            if max(traffic.values(), default=0) > _BUCKET_BYTES:
                buckets.append(bucket)
                bucket, traffic = [], {}
        if bucket:
            buckets.append(bucket)
    return buckets


def _local_part(leaf: Tensor, want: Any) -> Tensor:
    """Return this rank's part of an old tensor, on the device of the new one."""
    local = leaf._local if isinstance(leaf, ShardedTensor) else leaf
    target: Any = want.mesh if isinstance(want, Layout) else want
    return local.detach().to(target.device)


def _own_part(local: Tensor, tensor: TensorRecovery, own: int) -> Tensor:
    """Return a copy of the part of a tensor of which no rank lacks anything.

    What is in `state` must not change with it.
    """
    have, want = tensor.have[own], tensor.want[own]
    kept = intersect(have, want)
    if kept is None:
        return local.new_empty(box_shape(want))
    return local[slices(kept, box_origin(have))].clone()


def _share(tensor: TensorRecovery, own: int) -> TensorShare:
    """Return the boxes that this rank sends, receives and keeps."""
    count = len(tensor.have)
    sends: list[list[Box]] = [[] for _ in range(count)]
    recvs: list[list[Box]] = [[] for _ in range(count)]
    for sender, receiver, box in tensor.transfers:
        if sender == own:
            sends[receiver].append(box)
        elif receiver == own:
            recvs[sender].append(box)
    have, want = tensor.have[own], tensor.want[own]
    return TensorShare(have, want, sends, recvs, intersect(have, want))
