"""A plan's steps compiled for this rank: functions of its tensor, or a `Collective` each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import TypeAlias

import torch
from torch import Tensor

from ...kernels.box import Box, box_origin, box_shape, box_size, intersect, shift, slices
from ...mesh.comm.group import Group
from ...mesh.comm.recording.recorder import CommTag
from ...mesh.comm.symmetric_memory import STAGING_BYTES
from ...mesh.device_mesh import DeviceMesh
from ...mesh.topology import Link
from ..layout.layout import Layout, chunk
from .all_to_all import (
    AllToAllReduce,
    AllToAllV,
    CollectivePermute,
    CollectiveSequence,
    FillResult,
    TensorShare,
    all_to_all_in_node,
    keep_local,
    sent_to_self,
)
from .packed_collectives import AllGather, AllReduce, Collective, ReduceScatter, TensorParts
from .plan import Step
from .plan.memory import part_bytes
from .plan.routes import RankBoxes, routes
from .quantized import QuantizedAllGather, QuantizedAllToAll
from .symmetric_memory import StagedTensor, SymmetricAllReduce, SymmetricPull

LocalRun: TypeAlias = Callable[[Tensor], Tensor]
Coordinate: TypeAlias = tuple[int, ...]

_NEUTRAL = {"sum": 0, "product": 1}


def device_mesh(layout: Layout) -> DeviceMesh:
    """Return the mesh of a layout. Raises: TypeError for an abstract mesh."""
    if not isinstance(layout.mesh, DeviceMesh):
        raise TypeError(
            f"{layout} is on an abstract mesh, which can be planned for but holds no data; make a "
            "DeviceMesh"
        )
    return layout.mesh


def _coordinate(mesh: DeviceMesh) -> Coordinate:
    if mesh.coordinate is None:
        raise ValueError(
            f"rank {mesh.world.rank} is not in {mesh} and takes no part in its collectives"
        )
    return mesh.coordinate


# -- local steps -----------------------------------------------------------------------------------


def compile_local(step: Step) -> LocalRun:
    """Return a step without communication as a function of this rank's tensor."""
    mesh = device_mesh(step.src)
    coordinate = _coordinate(mesh)
    if step.op == "scale":
        count = step.group_size
        return lambda local: local / count
    before, after = step.src.box_at(coordinate), step.dst.box_at(coordinate)
    if step.op == "slice":
        index = slices(after, box_origin(before))
        return lambda local: local[index]
    return _compile_pad(step, mesh, coordinate, before, after)


def _compile_pad(
    step: Step, mesh: DeviceMesh, coordinate: Coordinate, before: Box, after: Box
) -> LocalRun:
    """Return a function that fills up the shard with neutral elements.

    Of replicas, only the one at coordinate 0 keeps its values.
    """
    if step.kind not in _NEUTRAL:
        return lambda local: local  # pending max, min and avg mean that every rank holds a value
    src, dst = step.src, step.dst
    shape = box_shape(after)
    box = slices(before, box_origin(after))
    new = [a for a, kind in dst.spec.unreduced if src.pending.get(a) != kind and kind in _NEUTRAL]
    keeps = all(coordinate[mesh.axis_index(a)] == 0 for a in new if a not in src.dim_of)
    neutral = _NEUTRAL[step.kind]

    def run(local: Tensor) -> Tensor:
        out = local.new_full(shape, neutral)
        if keeps:
            out[box] = local
        return out

    return run


# -- collectives -----------------------------------------------------------------------------------


def compile_collective(steps: Sequence[Step], scale: float | None = None) -> Collective:
    """Return the collective of one step, or of several that share one (see `bucket_key`).

    Args:
        scale: a factor that a reduction applies as it packs (see `can_scale`).
    """
    if steps[0].rounds > 1 or steps[0].op == "hierarchical_all_to_all_v":
        return _sequence(steps)
    if steps[0].transport is not None:
        return _quantized_collective(steps, steps[0].transport)
    if (
        steps[0].symmetric is not None
        and sum(part_bytes(step.src) for step in steps) <= STAGING_BYTES
    ):
        return _symmetric(steps, steps[0].symmetric)
    # one in a bucket with others is an all_to_all_v
    is_permute = steps[0].op == "permute" and len(steps) == 1
    make: Callable[..., Collective] = _permute if is_permute else _COLLECTIVES[steps[0].op]
    return make(steps) if scale is None else make(steps, scale)


def can_scale(step: Step) -> bool:
    """Return whether the step's collective can apply a factor as it packs."""
    return (
        step.op in ("reduce_scatter", "all_to_all_reduce")
        and step.rounds == 1
        and step.transport is None
        and step.symmetric is None
    )


def bucket_key(step: Step) -> object:
    """Return a key that is equal for steps over one group whose tensors can share a collective."""
    if step.rounds > 1 or step.op == "hierarchical_all_to_all_v":
        return step
    op = "all_to_all_v" if step.op == "permute" else step.op
    return (
        op,
        step.kind,
        step.src.dtype,
        step.transport,
        step.symmetric,
        device_mesh(step.src).device,
    )


def _all_reduce(steps: Sequence[Step]) -> Collective:
    shapes = [box_shape(step.dst.box) for step in steps]
    return AllReduce(_group(steps[0]), steps[0].kind, _dtype(steps), shapes)


def _all_gather(steps: Sequence[Step]) -> Collective:
    return AllGather(
        _group(steps[0]), _dtype(steps), [_tensor_parts(step, step.src, step.dst) for step in steps]
    )


def _reduce_scatter(steps: Sequence[Step], scale: float | None = None) -> Collective:
    tensors = [_tensor_parts(step, step.dst, step.src) for step in steps]
    return ReduceScatter(_group(steps[0]), steps[0].kind, _dtype(steps), tensors, scale)


def _tensor_parts(step: Step, parts: Layout, whole: Layout) -> TensorParts:
    boxes = [shift(parts.box_at(c), box_origin(whole.box)) for c in _peers(step)]
    return TensorParts(box_shape(whole.box), boxes, box_shape(parts.box))


def _all_to_all_v(steps: Sequence[Step]) -> Collective:
    return AllToAllV(_group(steps[0]), _dtype(steps), [_shares(step)[0] for step in steps])


def _all_to_all_reduce(steps: Sequence[Step], scale: float | None = None) -> Collective:
    group = _group(steps[0])
    shares = [sent_to_self(_shares(step)[0], group.rank) for step in steps]
    return AllToAllReduce(group, steps[0].kind, _dtype(steps), shares, scale)


def _permute(steps: Sequence[Step]) -> Collective:
    group, (share,) = _group(steps[0]), _shares(steps[0])
    (dst,) = [p for p, boxes in enumerate(share.sends) if boxes] or [group.rank]
    (src,) = [p for p, boxes in enumerate(share.recvs) if boxes] or [group.rank]
    return CollectivePermute(group, _dtype(steps), dst, src, box_shape(share.want))


_COLLECTIVES: dict[str, Callable[..., Collective]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all_v": _all_to_all_v,
    "all_to_all_reduce": _all_to_all_reduce,
    "permute": _all_to_all_v,
}


def _quantized_collective(steps: Sequence[Step], transport: str) -> Collective:
    group = _group(steps[0])
    if steps[0].op == "all_gather":
        return QuantizedAllGather(
            group,
            _dtype(steps),
            transport,
            [_tensor_parts(step, step.src, step.dst) for step in steps],
        )
    return QuantizedAllToAll(
        group,
        _dtype(steps),
        transport,
        [sent_to_self(_shares(step)[0], group.rank) for step in steps],
    )


def _symmetric(steps: Sequence[Step], link: Link) -> Collective:
    group = _group(steps[0])
    device = device_mesh(steps[0].src).device
    first = steps[0]
    if first.op == "all_reduce":
        return SymmetricAllReduce(
            group, device, link, _dtype(steps), [box_shape(step.dst.box) for step in steps]
        )
    return SymmetricPull(
        group,
        device,
        first.op,
        first.kind,
        _dtype(steps),
        [_staged_tensor(step, group) for step in steps],
    )


def _staged_tensor(step: Step, group: Group) -> StagedTensor:
    """Return the boxes that every rank of the group stages, and those that this one reads."""
    have, want, peers = step.src.box, step.dst.box, _peers(step)
    if step.op == "all_gather":
        parts = [[step.src.box_at(c)] for c in peers]
        return StagedTensor(have, want, parts, parts, (group.size - 1) * box_size(have))
    if step.op == "reduce_scatter":
        parts = [step.dst.box_at(c) for c in peers]
        return StagedTensor(
            have,
            want,
            [parts] * group.size,
            [[want]] * group.size,
            (group.size - 1) * box_size(want),
        )
    shares = [sent_to_self(_shares(step, c)[0], i) for i, c in enumerate(peers)]
    staged = [list(dict.fromkeys(chain.from_iterable(share.sends))) for share in shares]
    peer_boxes = [boxes for i, boxes in enumerate(shares[group.rank].sends) if i != group.rank]
    sent = sum(map(box_size, chain.from_iterable(peer_boxes)))
    return StagedTensor(have, want, staged, shares[group.rank].recvs, sent)


def _group(step: Step) -> Group:
    return device_mesh(step.src).group(step.axes)


def _dtype(steps: Sequence[Step]) -> torch.dtype:
    return steps[0].src.dtype


def _peers(step: Step) -> list[Coordinate]:
    """Return the coordinates of the group's ranks, in group order (ascending global rank)."""
    coordinates = [device_mesh(step.src).coordinate_of(rank) for rank in _group(step).ranks]
    return [c for c in coordinates if c is not None]


def _shares(step: Step, coordinate: Coordinate | None = None) -> list[TensorShare]:
    """Return the boxes that a rank sends, receives and keeps in each all_to_all of the step.

    The rank is one of the group, by default this one.
    """
    mesh = device_mesh(step.src)
    group = _group(step)
    me = _coordinate(mesh) if coordinate is None else coordinate
    have, want = step.src.box_at(me), step.dst.box_at(me)
    return [
        TensorShare(
            have,
            want,
            _by_peer(r.sends, mesh, group),
            _by_peer(r.recvs, mesh, group),
            intersect(have, want),
        )
        for r in routes(step, me)
    ]


def _by_peer(peers: RankBoxes, mesh: DeviceMesh, group: Group) -> list[list[Box]]:
    """Return the boxes by the other rank's index in the group."""
    index = {rank: i for i, rank in enumerate(group.ranks)}
    by_index: list[list[Box]] = [[] for _ in group.ranks]
    for coordinate, box in peers:
        by_index[index[int(mesh.ranks[coordinate])]].append(box)
    return by_index


# -- several collectives for one step --------------------------------------------------------------


def _sequence(steps: Sequence[Step]) -> Collective:
    """Return a step that is run in rounds, or between and then inside nodes."""
    (step,) = steps
    group, dtype, (first, *later) = _group(step), _dtype(steps), _shares(step)
    if step.op == "all_to_all_reduce" or step.transport is not None:
        whole = sent_to_self(first, group.rank)
        rounds = [_round(whole, i, step.rounds) for i in range(step.rounds)]
        if step.transport is not None:
            collectives: list[Collective] = [
                QuantizedAllToAll(group, dtype, step.transport, [share]) for share in rounds
            ]
        else:
            collectives = [AllToAllReduce(group, step.kind, dtype, [share]) for share in rounds]
        return CollectiveSequence(
            dtype, box_shape(first.want), [_fill(collective) for collective in collectives]
        )
    fills: list[FillResult] = [keep_local(first)]
    fills += [
        _fill(AllToAllV(group, dtype, [_round(first, i, step.rounds)])) for i in range(step.rounds)
    ]
    for share in later:
        node, inside = _inside_node(step, group, share)
        fills += [
            all_to_all_in_node(node, _round(inside, i, step.rounds)) for i in range(step.rounds)
        ]
    return CollectiveSequence(dtype, box_shape(first.want), fills)


def _fill(collective: Collective) -> FillResult:
    def run(x: Tensor, out: Tensor, tag: CommTag | None) -> None:
        collective.start([x], outs=[out], tag=tag)

    return run


def _round(share: TensorShare, index: int, rounds: int) -> TensorShare:
    """Return the `index`-th of so many pieces of every box."""
    sends, recvs = (
        [_pieces(boxes, index, rounds) for boxes in peers] for peers in (share.sends, share.recvs)
    )
    return TensorShare(share.have, share.want, sends, recvs, None)


def _pieces(boxes: Sequence[Box], index: int, rounds: int) -> list[Box]:
    pieces = []
    for box in boxes:
        dim = max(range(len(box)), key=lambda d: box[d][1] - box[d][0], default=None)
        if dim is None:
            pieces += [box] * (index == 0)
            continue
        piece = (*box[:dim], chunk(*box[dim], rounds, index), *box[dim + 1 :])
        pieces += [piece] * (box_size(piece) > 0)
    return pieces


def _inside_node(step: Step, group: Group, share: TensorShare) -> tuple[Group, TensorShare]:
    """Return the ranks of the group in this rank's node, and the transfers between them."""
    mesh = device_mesh(step.src)
    nodes = (step.topology or mesh.topology).node_ids(mesh)
    node_indices = [i for i, c in enumerate(_peers(step)) if nodes[c] == nodes[_coordinate(mesh)]]
    sends, recvs = ([peers[i] for i in node_indices] for peers in (share.sends, share.recvs))
    return mesh.world.group([group.ranks[i] for i in node_indices]), TensorShare(
        share.have, share.want, sends, recvs, None
    )
