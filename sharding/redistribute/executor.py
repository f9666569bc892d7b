"""Running a plan: each step becomes one call on this rank's local tensor, decided once and kept.

`compile_plan(plan)` looks up this rank's boxes, the groups and the packing of every step, and returns what takes a
local tensor to a local tensor. Nothing but the data is left to do when it is called.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain
from typing import TypeAlias

import torch
from torch import Tensor
from torch.autograd import profiler

from ...kernels.box import Box, box_origin, box_shape, box_size, intersect, shift, slices
from ...mesh.comm.group import Group
from ...mesh.comm.symmetric_memory import STAGING_BYTES
from ...mesh.device_mesh import DeviceMesh
from ...mesh.monitor.ledger.profiler import named
from ...mesh.monitor.recording.recorder import CommTag
from ...mesh.topology import Link
from ..layout.layout import Layout, chunk
from .packed_collectives import (
    AllGather,
    AllReduce,
    Collective,
    Exchange,
    ExchangeReduce,
    Gathered,
    Into,
    InTurn,
    Permute,
    ReduceScatter,
    Share,
    keeping,
    sharing,
    with_own,
)
from .plan import Plan, Step
from .plan.memory import part_bytes
from .plan.routes import Peers, routes
from .quantized import QuantizedAllGather, QuantizedExchange
from .symmetric_memory import Staged, SymmetricAllReduce, SymmetricPull

Run = Callable[[Tensor], Tensor]
Coordinate: TypeAlias = tuple[int, ...]

_NEUTRAL = {"sum": 0, "product": 1}


class Runner:
    """A plan made ready on this rank: `runner(local)` is this rank's part after it.

    The part may have another dtype than the plan: local steps work in it, and the first collective casts as it packs.

    Attributes:
        steps: the plan's steps that this rank takes part in; none for a rank outside the mesh.
        calls: for each of them a function of the local tensor, or a collective.
    """

    __slots__ = ("_comm_context", "_dtype", "_note", "_only", "_runs", "_without_values", "calls", "steps")

    def __init__(self, plan: Plan) -> None:
        self.steps = plan.steps if device_mesh(plan.src).coordinate is not None else ()
        self.calls = _compiled(self.steps)
        self._runs: list[Run] = []
        fresh = False  # whether the tensor is no longer the caller's, so that it may be overwritten
        for step, call in zip(self.steps, self.calls, strict=True):
            in_place = fresh and step.op == "all_reduce"
            run = call if not isinstance(call, Collective) else call.run_own if in_place else call.run
            self._runs.append(run)
            fresh = fresh or step.op not in ("slice", "pad")
        self._only = self._runs[0] if len(self._runs) == 1 else None
        self._dtype = plan.dst.dtype
        self._without_values = plan.dst if device_mesh(plan.src).device_type != "meta" else None  # what parts on "meta" become
        self._comm_context, self._note = device_mesh(plan.src).world.comm_context, CommTag(f"{plan.src} -> {plan.dst.spec}")

    def __call__(self, local: Tensor) -> Tensor:
        if local.is_meta and self._without_values is not None:  # nothing to move
            return local.new_empty(self._without_values.local_shape, dtype=self._dtype)
        if profiler._is_profiler_enabled:
            with named(self._note):
                return self._noted(local)
        return self._noted(local)

    def _noted(self, local: Tensor) -> Tensor:
        context = self._comm_context
        context.tag = self._note
        try:
            return self._run(local)
        finally:
            context.tag = None

    def _run(self, local: Tensor) -> Tensor:
        if self._only is not None:
            local = self._only(local)
        else:
            for run in self._runs:
                local = run(local)
        return local if local.dtype is self._dtype else local.to(self._dtype)

    def start(
        self, tensors: list[Tensor], *, own: bool = False, out: Tensor | None = None, note: CommTag | None = None
    ) -> Callable[[], Tensor]:
        """Everything but waiting for the last collective; call what comes back for the result.

        Collectives are launched now, in the plan's order, so that ranks that wait in different orders do not meet the
        wrong ones.

        Args:
            tensors: a list of this rank's part, which is emptied.
            own: the part may be overwritten, and the result may share its memory.
            out: where to put the result.
            note: what it belongs to, where the caller knows that better than by the layouts.
        """
        note = self._comm_context.tag = note or self._note
        try:
            with named(note):
                return self._start(tensors, own, out)
        finally:
            self._comm_context.tag = None

    def _start(self, tensors: list[Tensor], own: bool, out: Tensor | None) -> Callable[[], Tensor]:
        last = max((i for i, call in enumerate(self.calls) if isinstance(call, Collective)), default=-1)
        for run, call in zip(self._runs[: max(last, 0)], self.calls, strict=False):
            tensors[0] = call.run_own(tensors[0]) if own and isinstance(call, Collective) else run(tensors[0])
        final, after = self.calls[last] if last >= 0 else None, self._runs[last + 1 :]
        if not isinstance(final, Collective):
            return partial(_chained, after, lambda: tensors.pop().to(self._dtype), out)
        own = own or self._runs[last] == final.run_own
        pending = final.begin(tensors, own=own, outs=[out] if out is not None and not after else None)
        return partial(_chained, after, lambda: pending.wait()[0], out)


def _compiled(steps: Sequence[Step]) -> list[Run | Collective]:
    """The division of an average is done in the packing of the reduction that follows, where that gives the same bits."""
    calls: list[Run | Collective] = []
    for before, step in zip((None, *steps), steps, strict=False):
        if step.is_local:
            calls.append(compile_local(step))
        elif before is not None and _is_exact_scale(before) and _scales(step):
            calls[-1] = _unchanged
            calls.append(compile_collective([step], 1 / before.group_size))
        else:
            calls.append(compile_collective([step]))
    return calls


def _is_exact_scale(step: Step) -> bool:
    """Whether the step divides, and to divide is to multiply by the inverse."""
    return step.op == "scale" and step.src.dtype.is_floating_point and step.group_size & (step.group_size - 1) == 0


def _scales(step: Step) -> bool:
    return step.op in ("reduce_scatter", "exchange_reduce") and step.rounds == 1 and step.transport is None and step.symmetric is None


def _unchanged(local: Tensor) -> Tensor:
    return local


def compile_plan(plan: Plan) -> Runner:
    """The plan as a function of this rank's local tensor.

    A rank outside the mesh returns its (empty) local tensor unchanged.
    """
    return Runner(plan)


def _chained(runs: Iterable[Run], first: Callable[[], Tensor], out: Tensor | None) -> Tensor:
    local = first()
    for run in runs:
        local = run(local)
    return local if out is None or local is out else out.copy_(local.view_as(out))


def device_mesh(layout: Layout) -> DeviceMesh:
    if not isinstance(layout.mesh, DeviceMesh):
        raise TypeError(f"{layout} lies on an abstract mesh, which can be planned for but holds no data")
    return layout.mesh


def _coordinate(mesh: DeviceMesh) -> Coordinate:
    if mesh.coordinate is None:
        raise ValueError(f"rank {mesh.world.rank} is not in {mesh} and takes no part in its collectives")
    return mesh.coordinate


# -- local steps -------------------------------------------------------------------------------------------------------


def _compile_slice(step: Step, mesh: DeviceMesh, coordinate: Coordinate) -> Run:
    before, after = step.src.box_at(coordinate), step.dst.box_at(coordinate)
    index = slices(after, box_origin(before))
    return lambda local: local[index]


def _compile_pad(step: Step, mesh: DeviceMesh, coordinate: Coordinate) -> Run:
    """Place the shard among neutral elements; of replicas, only the one at coordinate 0 keeps its values."""
    if step.kind not in _NEUTRAL:
        return lambda local: local  # every rank holding the value is what pending max, min and avg mean
    src, dst = step.src, step.dst
    shape, box = box_shape(dst.box_at(coordinate)), slices(src.box_at(coordinate), box_origin(dst.box_at(coordinate)))
    fresh = [a for a, kind in dst.spec.unreduced if src.pending.get(a) != kind and kind in _NEUTRAL]
    keeps = all(coordinate[mesh.axis_index(a)] == 0 for a in fresh if a not in src.dim_of)
    neutral = _NEUTRAL[step.kind]

    def run(local: Tensor) -> Tensor:
        out = local.new_full(shape, neutral)
        if keeps:
            out[box] = local
        return out

    return run


def _compile_scale(step: Step, mesh: DeviceMesh, coordinate: Coordinate) -> Run:
    count = step.group_size
    return lambda local: local / count


_LOCAL = {"slice": _compile_slice, "pad": _compile_pad, "scale": _compile_scale}


def compile_local(step: Step) -> Run:
    """A step that moves nothing between ranks, as a function of this rank's tensor."""
    mesh = device_mesh(step.src)
    return _LOCAL[step.op](step, mesh, _coordinate(mesh))


# -- collectives -------------------------------------------------------------------------------------------------------


def compile_collective(steps: Sequence[Step], scale: float | None = None) -> Collective:
    """The collective of one step, or of several that can share one: see `bucket_key`. A reduction may scale what it packs."""
    if steps[0].rounds > 1 or steps[0].op == "two_phase":
        return _in_turn(steps)
    if steps[0].transport is not None:
        return _quantized(steps, steps[0].transport)
    if steps[0].symmetric is not None and sum(part_bytes(step.src) for step in steps) <= STAGING_BYTES:
        return _symmetric(steps, steps[0].symmetric)
    make = _COLLECTIVES[_bucket_op(steps)]
    return make(steps) if scale is None else make(steps, scale)


def bucket_key(step: Step) -> object:
    """Equal for steps over one group whose tensors can travel together in one collective."""
    if step.rounds > 1 or step.op == "two_phase":
        return step
    op = "exchange" if step.op == "permute" else step.op
    return op, step.kind, step.src.dtype, step.transport, step.symmetric, device_mesh(step.src).device


def _bucket_op(steps: Sequence[Step]) -> str:
    """A permutation travels with others as an exchange."""
    return "exchange" if len(steps) > 1 and steps[0].op == "permute" else steps[0].op


def _all_reduce(steps: Sequence[Step]) -> Collective:
    shapes = [box_shape(step.dst.box) for step in steps]
    return AllReduce(_group(steps[0]), steps[0].kind, _dtype(steps), shapes)


def _all_gather(steps: Sequence[Step]) -> Collective:
    return AllGather(_group(steps[0]), _dtype(steps), [_gathered(step, step.src, step.dst) for step in steps])


def _reduce_scatter(steps: Sequence[Step], scale: float | None = None) -> Collective:
    tensors = [_gathered(step, step.dst, step.src) for step in steps]
    return ReduceScatter(_group(steps[0]), steps[0].kind, _dtype(steps), tensors, scale)


def _gathered(step: Step, parts: Layout, whole: Layout) -> Gathered:
    boxes = [shift(parts.box_at(c), box_origin(whole.box)) for c in _peers(step)]
    return Gathered(box_shape(whole.box), boxes, box_shape(parts.box))


def _exchange(steps: Sequence[Step]) -> Collective:
    return Exchange(_group(steps[0]), _dtype(steps), [_shares(step)[0] for step in steps])


def _exchange_reduce(steps: Sequence[Step], scale: float | None = None) -> Collective:
    group = _group(steps[0])
    shares = [with_own(_shares(step)[0], group.rank) for step in steps]
    return ExchangeReduce(group, steps[0].kind, _dtype(steps), shares, scale)


def _permute(steps: Sequence[Step]) -> Collective:
    group, (share,) = _group(steps[0]), _shares(steps[0])
    (dst,) = [p for p, boxes in enumerate(share.sends) if boxes] or [group.rank]
    (src,) = [p for p, boxes in enumerate(share.recvs) if boxes] or [group.rank]
    return Permute(group, _dtype(steps), dst, src, box_shape(share.want))


_COLLECTIVES: dict[str, Callable[..., Collective]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "exchange": _exchange,
    "exchange_reduce": _exchange_reduce,
    "permute": _permute,
}


def _quantized(steps: Sequence[Step], transport: str) -> Collective:
    group = _group(steps[0])
    if steps[0].op == "all_gather":
        return QuantizedAllGather(group, _dtype(steps), transport, [_gathered(step, step.src, step.dst) for step in steps])
    return QuantizedExchange(group, _dtype(steps), transport, [with_own(_shares(step)[0], group.rank) for step in steps])


def _symmetric(steps: Sequence[Step], link: Link) -> Collective:
    group, device, first = _group(steps[0]), device_mesh(steps[0].src).device, steps[0]
    if first.op == "all_reduce":
        return SymmetricAllReduce(group, device, link, _dtype(steps), [box_shape(step.dst.box) for step in steps])
    return SymmetricPull(group, device, first.op, first.kind, _dtype(steps), [_staged(step, group) for step in steps])


def _staged(step: Step, group: Group) -> Staged:
    """What every rank of the group gives, and what this one takes."""
    have, want, peers = step.src.box, step.dst.box, _peers(step)
    if step.op == "all_gather":
        parts = [[step.src.box_at(c)] for c in peers]
        return Staged(have, want, parts, parts, (group.size - 1) * box_size(have))
    if step.op == "reduce_scatter":
        parts = [step.dst.box_at(c) for c in peers]
        return Staged(have, want, [parts] * group.size, [[want]] * group.size, (group.size - 1) * box_size(want))
    shares = [with_own(_shares(step, c)[0], i) for i, c in enumerate(peers)]
    given = [list(dict.fromkeys(chain.from_iterable(share.sends))) for share in shares]
    sent = sum(box_size(box) for i, boxes in enumerate(shares[group.rank].sends) if i != group.rank for box in boxes)
    return Staged(have, want, given, shares[group.rank].recvs, sent)


def _group(step: Step) -> Group:
    return device_mesh(step.src).group(step.axes)


def _dtype(steps: Sequence[Step]) -> torch.dtype:
    return steps[0].src.dtype


def _peers(step: Step) -> list[Coordinate]:
    """Coordinates of the group's ranks, in group order (ascending global rank)."""
    found = [device_mesh(step.src).coordinate_of(rank) for rank in _group(step).ranks]
    return [c for c in found if c is not None]


def _shares(step: Step, coordinate: Coordinate | None = None) -> list[Share]:
    """What the step makes a rank of the group (by default this one) send and receive in each of its exchanges, and what stays
    there."""
    mesh, group = device_mesh(step.src), _group(step)
    me = _coordinate(mesh) if coordinate is None else coordinate
    have, want = step.src.box_at(me), step.dst.box_at(me)
    return [
        Share(have, want, _by_peer(r.sends, mesh, group), _by_peer(r.recvs, mesh, group), intersect(have, want))
        for r in routes(step, me)
    ]


def _by_peer(peers: Peers, mesh: DeviceMesh, group: Group) -> list[list[Box]]:
    """The boxes by the other's index in the group."""
    index = {rank: i for i, rank in enumerate(group.ranks)}
    found: list[list[Box]] = [[] for _ in group.ranks]
    for coordinate, box in peers:
        found[index[int(mesh.ranks[coordinate])]].append(box)
    return found


# -- several collectives for one step ----------------------------------------------------------------------------------


def _in_turn(steps: Sequence[Step]) -> Collective:
    """In rounds, or in two phases."""
    (step,) = steps
    group, dtype, (first, *later) = _group(step), _dtype(steps), _shares(step)
    if step.op == "exchange_reduce" or step.transport is not None:
        whole = with_own(first, group.rank)
        pieces = [[_round(whole, i, step.rounds)] for i in range(step.rounds)]
        return InTurn(dtype, box_shape(first.want), [_into(_through(step, group, piece)) for piece in pieces])
    turns: list[Into] = [keeping(first)]
    turns += [_into(Exchange(group, dtype, [_round(first, i, step.rounds)])) for i in range(step.rounds)]
    for share in later:
        node, inside = _inside_node(step, group, share)
        turns += [sharing(node, _round(inside, i, step.rounds)) for i in range(step.rounds)]
    return InTurn(dtype, box_shape(first.want), turns)


def _through(step: Step, group: Group, shares: Sequence[Share]) -> Collective:
    """An exchange in which the own boxes go through the buffers, too."""
    if step.transport is not None:
        return QuantizedExchange(group, step.src.dtype, step.transport, shares)
    return ExchangeReduce(group, step.kind, step.src.dtype, shares)


def _into(collective: Collective) -> Into:
    def run(x: Tensor, out: Tensor) -> None:
        collective.start([x], outs=[out])

    return run


def _round(share: Share, index: int, rounds: int) -> Share:
    """The `index`-th of so many pieces of every box."""
    sends, recvs = ([_piece(boxes, index, rounds) for boxes in peers] for peers in (share.sends, share.recvs))
    return Share(share.have, share.want, sends, recvs, None)


def _piece(boxes: Sequence[Box], index: int, rounds: int) -> list[Box]:
    found = []
    for box in boxes:
        dim = max(range(len(box)), key=lambda d: box[d][1] - box[d][0], default=None)
        if dim is None:
            found += [box] * (index == 0)
            continue
        piece = (*box[:dim], chunk(*box[dim], rounds, index), *box[dim + 1 :])
        found += [piece] * (box_size(piece) > 0)
    return found


def _inside_node(step: Step, group: Group, share: Share) -> tuple[Group, Share]:
    """The ranks of the group in this rank's node, and what is shared with them."""
    mesh = device_mesh(step.src)
    nodes = (step.topology or mesh.topology).node_ids(mesh)
    here = [i for i, c in enumerate(_peers(step)) if nodes[c] == nodes[_coordinate(mesh)]]
    sends, recvs = ([peers[i] for i in here] for peers in (share.sends, share.recvs))
    return mesh.world.group([group.ranks[i] for i in here]), Share(share.have, share.want, sends, recvs, None)
