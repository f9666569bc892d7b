"""The places along the axis of a pipeline, and the ranks at each of them.

    mesh (pp=2, tp=2)                            place 0: ranks 0 1    place 1: ranks 2 3
    mesh (pp=6), stage_meshes of 2 and 4 ranks   place 0: ranks 0 1    place 1: ranks 2 3 4 5

A place runs one row of the schedule, on all of its ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ....mesh.comm.group import Group
from ....mesh.device_mesh import DeviceMesh


@dataclass(frozen=True, eq=False)
class Places:
    """The ranks of a pipeline by place.

    Attributes:
        ranks: the global ranks of each place, in the order of its mesh.
        own: the place of this rank.
        rank: this one, a global rank.
        group: ranks of all places, this one among them, which tell each other facts and sum up
            values: those at this rank's position, or all ranks if places have different numbers.
    """

    ranks: tuple[tuple[int, ...], ...]
    own: int
    rank: int
    group: Group

    @property
    def count(self) -> int:
        return len(self.ranks)

    @property
    def represents(self) -> bool:
        """Whether this rank is the one of its place that counts in a sum over `group`."""
        return self.rank == min(set(self.ranks[self.own]) & set(self.group.ranks))

    def of(self, rank: int) -> int:
        """Return the place of a global rank."""
        return next(place for place, ranks in enumerate(self.ranks) if rank in ranks)

    def counterpart(self, place: int) -> int:
        """Return the rank with this rank's position at another place of as many ranks."""
        return self.ranks[place][self.ranks[self.own].index(self.rank)]


def places_along(mesh: DeviceMesh, axis: str) -> Places:
    """Return the places of a mesh along one of its axes. Communication: none."""
    slices = np.moveaxis(mesh.ranks, mesh.axis_index(axis), 0).reshape(mesh.size(axis), -1)
    ranks = tuple(tuple(place) for place in slices.tolist())
    return Places(ranks, mesh.get_local_rank(axis), mesh.get_rank(), mesh.group(axis))


def places_of(meshes: Sequence[DeviceMesh], group: Group) -> Places:
    """Return the places that have these meshes.

    Args:
        meshes: of disjoint ranks.
        group: of all of their ranks.
    """
    ranks = tuple(tuple(mesh.ranks.flatten().tolist()) for mesh in meshes)
    own = next(place for place, of_place in enumerate(ranks) if group.world.rank in of_place)
    return Places(ranks, own, group.world.rank, group)
