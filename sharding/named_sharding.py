"""`NamedSharding`: a mesh and a spec, without a shape."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..mesh.abstract_mesh import AbstractMesh
from .layout import Layout
from .spec import P, Placement, spec_to_placements


@dataclass(frozen=True, repr=False)
class NamedSharding:
    """A mesh and a spec, as `jax.sharding.NamedSharding`.

    Attributes:
        mesh: the mesh.
        spec: per dim the mesh axes that split it, and the axes with a pending reduction.
    """

    mesh: AbstractMesh
    spec: P

    @property
    def placements(self) -> tuple[Placement, ...]:
        """One placement per mesh axis."""
        return spec_to_placements(self.spec, self.mesh.axis_names)

    @property
    def is_fully_replicated(self) -> bool:
        """Whether every rank holds the whole tensor."""
        return all(self.mesh.size(axis) == 1 for axis in self.spec.axes)

    def shard_shape(self, global_shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the largest part of a tensor of `global_shape`.

        Raises:
            ValueError: the spec does not fit the shape.
        """
        return Layout.of(self.mesh, self.spec, global_shape).largest_local_shape

    def __repr__(self) -> str:
        return f"NamedSharding({self.mesh}, {self.spec})"
