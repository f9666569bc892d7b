"""`NamedSharding`: a mesh and a spec, without shape and dtype."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...mesh.abstract_mesh import AbstractMesh
from .layout import Layout
from .spec import P, Placement, Sharding, as_spec, spec_to_placements


@dataclass(frozen=True, repr=False)
class NamedSharding(Sharding):
    """A mesh and a spec, as `jax.sharding.NamedSharding`; accepted wherever a mesh and a spec are.

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

    def is_equivalent_to(self, other: NamedSharding, ndim: int) -> bool:
        """Return whether both lay out a tensor of `ndim` dims the same way.

        As in JAX, entries of None at the end and axes of one rank make no difference.

        Raises:
            ValueError: a spec has more entries than `ndim`, or names an axis that its mesh does not
                have.

        Example:
            >>> NamedSharding(mesh, P("dp")).is_equivalent_to(NamedSharding(mesh, P("dp", None)), 2)
            True
        """
        return self.mesh == other.mesh and self._normalized_spec(ndim) == other._normalized_spec(
            ndim
        )

    def _normalized_spec(self, ndim: int) -> P:
        """Return the spec with an entry for each dim, without the axes of one rank."""
        spec, size = as_spec(self.spec, self.mesh.axis_names, ndim), self.mesh.size
        dims = [tuple(axis for axis in axes if size(axis) > 1) for axes in spec.dims]
        pending = {axis: kind for axis, kind in spec.unreduced if size(axis) > 1}
        return P(
            *dims,
            unreduced=pending,
            sizes={axes: lengths for axes, lengths in spec.sizes if size(axes) > 1},
        )

    def shard_shape(self, global_shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the largest part of a tensor of `global_shape`.

        Raises:
            ValueError: the spec does not fit the shape.
        """
        return Layout.of(self.mesh, self.spec, global_shape).largest_local_shape

    def __repr__(self) -> str:
        return f"NamedSharding({self.mesh}, {self.spec})"
