"""Running a plan: each step becomes one call on this rank's local tensor, decided once and kept.

`compile_plan(plan)` looks up this rank's boxes, the group and the packing of every step, and returns a function from
local tensor to local tensor. Nothing but the data is left to do when it is called.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..kernels.box import Box, box_origin, box_shape, box_size, intersect, shift, slices
from ..kernels.copy import compile_pack, compile_unpack
from ..mesh.device_mesh import DeviceMesh
from .layout import Layout
from .plan import Plan, Step

Run = Callable[[Tensor], Tensor]

_NEUTRAL = {"sum": 0, "product": 1}
_COMBINE = {"sum": torch.sum, "max": torch.amax, "min": torch.amin, "product": torch.prod}


def compile_plan(plan: Plan) -> Run:
    """The plan as a function of this rank's local tensor.

    A rank outside the mesh returns its (empty) local tensor unchanged.
    """
    mesh = _device_mesh(plan.src)
    if mesh.coordinate is None:
        return lambda local: local
    runs = [_COMPILERS[step.op](step, mesh, mesh.coordinate) for step in plan.steps]
    if len(runs) == 1:
        return runs[0]

    def run(local: Tensor) -> Tensor:
        for run_step in runs:
            local = run_step(local)
        return local

    return run


def _device_mesh(layout: Layout) -> DeviceMesh:
    if not isinstance(layout.mesh, DeviceMesh):
        raise TypeError(f"{layout} lies on an abstract mesh, which can be planned for but holds no data")
    return layout.mesh


def _peer_coordinates(step: Step, mesh: DeviceMesh) -> list[tuple[int, ...]]:
    """Coordinates of the group's ranks, in group order (ascending global rank)."""
    found = [mesh.coordinate_of(rank) for rank in mesh.group(step.axes).ranks]
    return [c for c in found if c is not None]


# -- local steps ------------------------------------------------------------------------------------------------------


def _compile_slice(step: Step, mesh: DeviceMesh, coordinate: tuple[int, ...]) -> Run:
    before, after = step.src.box_at(coordinate), step.dst.box_at(coordinate)
    index = slices(after, box_origin(before))
    return lambda local: local[index]


def _compile_pad(step: Step, mesh: DeviceMesh, coordinate: tuple[int, ...]) -> Run:
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


def _compile_scale(step: Step, mesh: DeviceMesh, coordinate: tuple[int, ...]) -> Run:
    count = step.group_size
    return lambda local: local / count


# -- collectives ------------------------------------------------------------------------------------------------------


def _compile_all_reduce(step: Step, mesh: DeviceMesh, coordinate: tuple[int, ...]) -> Run:
    group, kind = mesh.group(step.axes), step.kind

    def run(local: Tensor) -> Tensor:
        out = local.clone(memory_format=torch.contiguous_format)
        group.all_reduce(out, kind)
        return out

    return run


def _compile_all_gather(step: Step, mesh: DeviceMesh, coordinate: tuple[int, ...]) -> Run:
    """The parts arrive one after the other; where that is the result in memory order, nothing is copied."""
    group, out_box = mesh.group(step.axes), step.dst.box_at(coordinate)
    boxes = [shift(step.src.box_at(c), box_origin(out_box)) for c in _peer_coordinates(step, mesh)]
    size, place = box_size(out_box), compile_unpack(box_shape(out_box), boxes)

    def run(local: Tensor) -> Tensor:
        flat = local.new_empty(size)
        group.all_gather(flat, local.contiguous())
        return place(flat)

    return run


def _compile_reduce_scatter(step: Step, mesh: DeviceMesh, coordinate: tuple[int, ...]) -> Run:
    group, kind, before = mesh.group(step.axes), step.kind, step.src.box_at(coordinate)
    boxes = [shift(step.dst.box_at(c), box_origin(before)) for c in _peer_coordinates(step, mesh)]
    sizes, shape = [box_size(box) for box in boxes], box_shape(step.dst.box_at(coordinate))
    pack = compile_pack(box_shape(before), boxes)
    if len(set(sizes)) > 1:
        return _uneven_reduce_scatter(group, pack, sizes, shape, kind)

    def run(local: Tensor) -> Tensor:
        out = local.new_empty(shape)
        group.reduce_scatter(out, pack(local), kind)
        return out

    return run


def _uneven_reduce_scatter(group, pack: Run, sizes: Sequence[int], shape: Sequence[int], kind: str) -> Run:
    """Send everybody its part, combine on arrival: the same bytes as a reduce_scatter, without padding."""
    combine, n, mine = _COMBINE[kind], group.size, math.prod(shape)

    def run(local: Tensor) -> Tensor:
        parts = local.new_empty((n, *shape))
        group.all_to_all(parts, pack(local), [mine] * n, sizes)
        return combine(parts, 0).to(local.dtype)

    return run


def _compile_exchange(step: Step, mesh: DeviceMesh, coordinate: tuple[int, ...]) -> Run:
    """One all_to_all with exact splits.

    What a rank holds already is copied past the buffers, unless a buffer with it in its place is the tensor itself:
    then everything goes through the buffers, and one of the two copies (pack, unpack) is none.
    """
    whole = _Exchange(step, mesh, _peer_coordinates(step, mesh))
    if whole.pack.zero_copy or whole.place.zero_copy:
        return whole.run
    others = _Exchange(step, mesh, [None if c == coordinate else c for c in _peer_coordinates(step, mesh)])
    keep_own = _compile_keep(step.src.box_at(coordinate), step.dst.box_at(coordinate))

    def run(local: Tensor) -> Tensor:
        out = local.new_empty(others.shape)
        keep_own(local, out)
        return others.run(local, out)

    return run


class _Exchange:
    """The all_to_all of a step with the given peers (by coordinate; None for one that is passed over)."""

    def __init__(self, step: Step, mesh: DeviceMesh, peers: Sequence[tuple[int, ...] | None]) -> None:
        self.group, src, dst = mesh.group(step.axes), step.src, step.dst
        have, want = src.box, dst.box
        sends = [None if c is None else intersect(have, dst.box_at(c)) for c in peers]
        recvs = [None if c is None else intersect(src.box_at(c), want) for c in peers]
        self.pack = compile_pack(box_shape(have), [shift(box, box_origin(have)) for box in sends if box])
        self.place = compile_unpack(box_shape(want), [shift(box, box_origin(want)) for box in recvs if box])
        self.in_splits = [box_size(box) if box else 0 for box in sends]
        self.out_splits = [box_size(box) if box else 0 for box in recvs]
        self.shape, self.total = box_shape(want), sum(self.out_splits)

    def run(self, local: Tensor, out: Tensor | None = None) -> Tensor:
        arrived = local.new_empty(self.total)
        self.group.all_to_all(arrived, self.pack(local), self.out_splits, self.in_splits)
        return self.place(arrived, out)


def _compile_keep(have: Box, want: Box) -> Callable[[Tensor, Tensor], None]:
    """Copy what the rank holds already into its place in the result."""
    own = intersect(have, want)
    if own is None:
        return lambda local, out: None
    before, after = slices(own, box_origin(have)), slices(own, box_origin(want))
    return lambda local, out: out.__setitem__(after, local[before])


_COMPILERS: dict[str, Callable[[Step, DeviceMesh, tuple[int, ...]], Run]] = {
    "slice": _compile_slice,
    "pad": _compile_pad,
    "scale": _compile_scale,
    "all_gather": _compile_all_gather,
    "reduce_scatter": _compile_reduce_scatter,
    "all_reduce": _compile_all_reduce,
    "exchange": _compile_exchange,
}
