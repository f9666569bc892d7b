"""Stages on meshes of different shapes, and which rows go from rank to rank between them.

    stage 0   dp=1, tp=4    ranks 0 1 2 3    each has all rows of a microbatch
    stage 1   dp=2, tp=2    ranks 4 5        the first half
                            ranks 6 7        the second half

    activations   0 -> 4  rows 0:2    1 -> 5  rows 0:2    2 -> 6  rows 2:4    3 -> 7  rows 2:4
    gradients     4 -> 0  rows 0:2    6 -> 0  rows 2:4    ...        each rank of stage 0 gets both

Stages may have different numbers of ranks. A value between stages has its rows split over the data
axes of a stage's mesh, and is the same along the other axes. So has its gradient: the way back is
the plan from the second layout to the first. Plans are those of cross-mesh redistribution. They are
computed once, for as many rows as can be split on both sides, and hold for any multiple of that.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from torch import Tensor

from ....kernels.box import Box
from ....mesh.device_mesh import DeviceMesh
from ...layout.layout import Layout
from ...layout.spec import P
from ...redistribute.plan.cross_mesh import box_on, plan_cross_mesh
from .places import Places, places_along, places_of


@dataclass(frozen=True)
class RowRange:
    """A part of the rows, in units of 1/`of` of all rows that the rank on this side has."""

    start: int
    stop: int
    of: int

    def take(self, x: Tensor, dim: int) -> Tensor:
        """Return these rows of this rank's part of a value."""
        if self.stop - self.start == self.of:
            return x
        size = x.shape[dim] // self.of
        return x.narrow(dim, self.start * size, (self.stop - self.start) * size)


@dataclass(frozen=True)
class Route:
    """What a rank of one stage exchanges with one of another, seen from one of both.

    Attributes:
        peer: the other rank.
        row_range: of values whose rows are split; None if there are none.
        whole: whether values without rows go this way.
    """

    peer: int
    row_range: RowRange | None
    whole: bool


WHOLE = RowRange(0, 1, 1)


class ValueSharding(Protocol):
    """What a check needs to know of the sharding of a value."""

    @property
    def axes(self) -> tuple[str, ...]: ...


class ValueKind(Protocol):
    """What a check needs to know of a value."""

    @property
    def batch_dim(self) -> int | None: ...
    @property
    def requires_grad(self) -> bool: ...
    @property
    def sharding(self) -> ValueSharding | None: ...


@dataclass(frozen=True, eq=False)
class StageMeshes:
    """The meshes of the stages of a pipeline, by place along its axis.

    Attributes:
        meshes: a mesh for each place.
        data_axes: the axes over which rows are split; a mesh may lack some.
        places: the ranks of the meshes.
    """

    meshes: tuple[DeviceMesh, ...]
    data_axes: tuple[str, ...]
    places: Places
    _routes: dict[tuple[int, int], tuple[tuple[int, int, Route, Route], ...]] = field(
        default_factory=dict
    )

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh of this rank's stages."""
        return self.meshes[self.places.own]

    @property
    def parts(self) -> int:
        """The least number that the rows of a microbatch must be a multiple of."""
        return math.lcm(*(self.data_size(place) for place in range(len(self.meshes))))

    def data_size(self, place: int) -> int:
        """Return how many ranks of a place have different rows."""
        mesh = self.meshes[place]
        return math.prod(mesh.size(name) for name in self.own_data_axes(place))

    def own_data_axes(self, place: int) -> tuple[str, ...]:
        """Return the data axes that the mesh of a place has."""
        return tuple(name for name in self.data_axes if name in self.meshes[place].axis_names)

    def own_rows(self) -> RowRange:
        """Return which rows of a microbatch this rank has."""
        (interval,) = box_on(self._layout(self.places.own, self.parts), self.places.rank)
        return RowRange(*interval, self.parts)

    def routes(self, source: int, destination: int) -> list[Route]:
        """Return what this rank sends from one place to another, or receives there.

        They are in the order of the peers. One of the places is this rank's own.
        """
        between = self._routes_between(source, destination)
        rank = self.places.rank
        if source == self.places.own:
            return [route for sender, _, route, _ in between if sender == rank]
        return [route for _, receiver, _, route in between if receiver == rank]

    def check_values(
        self, metas: Sequence[ValueKind], source: int, destination: int, stage: int
    ) -> None:
        """Check that values can go from one place to another and their gradients back.

        Raises:
            RuntimeError: a value is sharded over data axes, or over others than those of its
                stage's mesh; or it requires a gradient and has no rows, so that its gradient would
                be a sum over data ranks.
        """
        mesh = self.meshes[source]
        data_axes = [name for name in self.own_data_axes(source) if mesh.size(name) > 1]
        for number, meta in enumerate(metas):
            problem = None
            axes = () if meta.sharding is None else meta.sharding.axes
            if not set(axes) <= set(mesh.axis_names) - set(data_axes):
                problem = (
                    f"is a ShardedTensor on a mesh with the axes {axes}; let what is passed on be "
                    f"plain, or on axes of {mesh!r} other than data_axes={self.data_axes}"
                )
            elif (
                meta.batch_dim is None and meta.requires_grad and self._differ(source, destination)
            ):
                problem = (
                    "has no dim with the rows of the microbatch and requires a gradient; compute "
                    "it in the stage that uses it"
                )
            if problem is not None:
                raise RuntimeError(
                    f"pipeline: stages have meshes of different shapes (stage_meshes), and value "
                    f"{number} of those passed into stage {stage}, {meta}, {problem}"
                )

    def _differ(self, source: int, destination: int) -> bool:
        """Return whether ranks of one place have other rows than all ranks of the other one."""
        return self._ranks_by_rows(source).keys() != self._ranks_by_rows(destination).keys()

    def _ranks_by_rows(self, place: int) -> dict[Box, list[int]]:
        """Return the ranks of a place by the rows that they have, in the order of its mesh."""
        layout = self._layout(place, self.parts)
        ranks: dict[Box, list[int]] = {}
        for rank in self.places.ranks[place]:
            ranks.setdefault(box_on(layout, rank), []).append(rank)
        return ranks

    def _senders_of_whole(self, source: int, destination: int) -> dict[int, int]:
        """Return for each rank of a place the one from which it gets values without rows.

        That is one with the same rows, if there is any.
        """
        same_rows = self._ranks_by_rows(source)
        all_senders = self.places.ranks[source]
        receivers = self.places.ranks[destination]
        senders: dict[int, int] = {}
        for rows, ranks in self._ranks_by_rows(destination).items():
            for number, receiver in enumerate(ranks):
                if rows in same_rows:
                    candidates = same_rows[rows]
                    senders[receiver] = candidates[number % len(candidates)]
                else:
                    position = receivers.index(receiver)
                    senders[receiver] = all_senders[position * len(all_senders) // len(receivers)]
        return senders

    def _routes_between(
        self, source: int, destination: int
    ) -> tuple[tuple[int, int, Route, Route], ...]:
        """Return (sender, receiver, what it is to the sender, to the receiver)."""
        key = source, destination
        if key not in self._routes:
            self._routes[key] = tuple(self._make_routes(*key))
        return self._routes[key]

    def _make_routes(
        self, source: int, destination: int
    ) -> Iterator[tuple[int, int, Route, Route]]:
        src, dst = self._layout(source, self.parts), self._layout(destination, self.parts)
        rows: dict[tuple[int, int], tuple[int, int]] = {}
        plan = plan_cross_mesh(src, dst)
        for transfer in plan.transfers:
            pair = plan.ranks[transfer.sender], plan.ranks[transfer.receiver]
            (rows[pair],) = transfer.box
        senders = self._senders_of_whole(source, destination)
        whole = {(sender, receiver) for receiver, sender in senders.items()}
        for sender, receiver in sorted(whole | set(rows)):
            pair = sender, receiver
            is_whole = pair in whole
            sides: list[RowRange | None] = [None, None]
            if pair in rows:
                start, stop = rows[pair]
                for side, (layout, rank) in enumerate([(src, sender), (dst, receiver)]):
                    own_start, own_stop = box_on(layout, rank)[0]
                    sides[side] = RowRange(
                        start - own_start, stop - own_start, own_stop - own_start
                    )
            yield (
                sender,
                receiver,
                Route(receiver, sides[0], is_whole),
                Route(sender, sides[1], is_whole),
            )

    def _layout(self, place: int, rows: int) -> Layout:
        return Layout.of(self.meshes[place], P(self.own_data_axes(place)), (rows,))


def make_stage_meshes(
    mesh: DeviceMesh,
    axis: str,
    sizes: Sequence[Mapping[str, int]],
    data_axes: str | Sequence[str],
) -> StageMeshes:
    """Return the meshes of the stages.

    Args:
        mesh, axis: of the pipeline.
        sizes: for each place along the axis, the axes of its stages' mesh with their sizes. If the
            pipeline's mesh has no other axis, they divide its ranks in their order.
        data_axes: see `StageMeshes`.

    Raises:
        ValueError: another number of meshes than the axis has ranks, or of ranks in one; sizes that
            do not divide a mesh of one axis; a data axis that none has; the name of the pipeline's
            axis.
    """
    divided = _divided_ranks(mesh, axis, sizes)
    names = (data_axes,) if isinstance(data_axes, str) else tuple(data_axes)
    missing = [name for name in names if not any(name in shape for shape in sizes)]
    if missing:
        raise ValueError(
            f"pipeline: data_axes={names}: no mesh of stage_meshes has an axis {missing[0]!r}"
        )
    meshes = tuple(
        DeviceMesh(
            mesh.device_type,
            np.array(ranks).reshape(tuple(shape.values())),
            axis_names=tuple(shape),
        )
        for ranks, shape in zip(divided, sizes, strict=True)
    )
    if len(sizes) == mesh.size(axis):
        return StageMeshes(meshes, names, places_along(mesh, axis))
    return StageMeshes(meshes, names, places_of(meshes, mesh.group()))


def _divided_ranks(
    mesh: DeviceMesh, axis: str, sizes: Sequence[Mapping[str, int]]
) -> list[list[int]]:
    """Return the ranks of each place."""
    ranks = mesh.size(axis)
    counts = [math.prod(shape.values()) for shape in sizes]
    for place, shape in enumerate(sizes):
        if axis in shape:
            raise ValueError(
                f"pipeline: stage_meshes[{place}]={dict(shape)} has the pipeline's axis {axis!r}"
            )
    if mesh.ndim == 1 and len(sizes) != ranks:
        if sum(counts) != ranks or min(counts, default=0) < 1:
            raise ValueError(
                f"pipeline: stage_meshes={list(map(dict, sizes))} have {counts} ranks, and "
                f"{mesh!r} {ranks}: the sizes of meshes that divide these ranks"
            )
        ends = np.cumsum(counts)[:-1]
        return [part.tolist() for part in np.split(mesh.ranks, ends)]
    if len(sizes) != ranks:
        raise ValueError(
            f"pipeline: stage_meshes has {len(sizes)} meshes, and axis {axis!r} {ranks} ranks: "
            "give one for each rank along the axis; meshes with different numbers of ranks need a "
            "mesh with the pipeline's axis alone"
        )
    in_stage = mesh.ranks.size // ranks
    for place, shape in enumerate(sizes):
        if counts[place] != in_stage:
            raise ValueError(
                f"pipeline: stage_meshes[{place}]={dict(shape)}: the sizes of axes other than "
                f"{axis!r} that give the {in_stage} ranks of a stage; meshes with different "
                "numbers of ranks need a mesh with the pipeline's axis alone"
            )
    return np.moveaxis(mesh.ranks, mesh.axis_index(axis), 0).reshape(ranks, in_stage).tolist()
