"""Placements, and conversion between the two notations for a spec.

Both carry the same information and convert into each other without loss:

* `P("dp", ("tp", "cp"), None, unreduced={"ep"})`: per tensor dim the axes that split it, major to
  minor, and the axes over which a reduction is still pending (JAX's notation).
* `[Shard(0), Replicate(), Partial()]`: per mesh axis what happens on it (torch's notation).

A dim is cut into equal parts unless `sizes` gives the length of each:
`P("dp", sizes={"dp": (3, 0, 5)})`, or `[Shard(0, sizes=(3, 0, 5))]`. Such a spec, and its layout,
is called ragged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from .partition_spec import EACH as EACH
from .partition_spec import KINDS as KINDS
from .partition_spec import UNCONSTRAINED, P, check_kind, lengths_of
from .partition_spec import Cut as Cut
from .partition_spec import PartitionSpec as PartitionSpec
from .partition_spec import make_spec as make_spec


@dataclass(frozen=True)
class Placement:
    """What happens to a tensor on one mesh axis: `Shard`, `Replicate` or `Partial`."""

    def is_shard(self, dim: int | None = None) -> bool:
        """Return whether this is a `Shard` (of dim `dim`, if given)."""
        return isinstance(self, Shard) and dim in (None, self.dim)

    def is_replicate(self) -> bool:
        """Return whether this is `Replicate`."""
        return isinstance(self, Replicate)

    def is_partial(self, reduce_op: str | None = None) -> bool:
        """Return whether this is a `Partial` (of kind `reduce_op`, if given)."""
        return isinstance(self, Partial) and reduce_op in (None, self.reduce_op)


@dataclass(frozen=True, repr=False)
class Shard(Placement):
    """The axis splits tensor dim `dim`, as `torch.chunk` does or into parts of the given lengths.

    Attributes:
        dim: the tensor dim; negative counts from the end.
        order: if several axes split the same dim, this axis's position among them, 0 the most
            major. `None`: the axes split the dim in mesh order.
        sizes: the length of each part in elements, zero allowed; one for each rank of the axis, in
            order. `None`: equal parts, the last ones short or empty. If several axes split the dim,
            only the first ones may have sizes; those that have them have the same ones and cut the
            dim jointly: one length for each combination of their ranks, major to minor.

    Raises:
        TypeError: `dim` or a size is not an integer.
        ValueError: a negative size.

    Example:
        >>> spec = P("dp", sizes={"dp": (3, 0, 5)})
        >>> spec_to_placements(spec, ("dp",))
        (Shard(0, sizes=(3, 0, 5)),)
        >>> spec = P(("dp", "tp"), sizes={("dp", "tp"): (1, 2, 0, 5)})  # two ranks along each
        >>> spec_to_placements(spec, ("dp", "tp"))
        (Shard(0, sizes=(1, 2, 0, 5)), Shard(0, sizes=(1, 2, 0, 5)))
    """

    dim: int
    order: int | None = None
    sizes: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.dim, int):
            raise TypeError(
                f"Shard takes the index of a tensor dim, got {self.dim!r}; to name mesh axes write "
                f"P({self.dim!r})"
            )
        if self.sizes is not None:
            object.__setattr__(
                self, "sizes", lengths_of(self.sizes, f"Shard({self.dim}, sizes=...)")
            )

    def __repr__(self) -> str:
        options = [
            f"{name}={value}"
            for name in ("order", "sizes")
            if (value := getattr(self, name)) is not None
        ]
        return f"Shard({', '.join([str(self.dim), *options])})"


@dataclass(frozen=True, repr=False)
class Replicate(Placement):
    """Every rank of the axis holds the same values."""

    def __repr__(self) -> str:
        return "Replicate()"


@dataclass(frozen=True, repr=False)
class Partial(Placement):
    """The ranks of the axis hold values that must still be combined by `reduce_op`.

    Attributes:
        reduce_op: "sum", "avg", "max", "min" or "product".
    """

    reduce_op: str = "sum"

    def __post_init__(self) -> None:
        check_kind(self.reduce_op)

    def __repr__(self) -> str:
        return "Partial()" if self.reduce_op == "sum" else f"Partial({self.reduce_op!r})"


class RaggedPlacements(tuple[Placement, ...]):
    """Placements of which some have sizes; equal to others without sizes that split the same dims.

    So a program written for FSDP2 may compare the placements of a parameter, whose parts are not
    those of `torch.chunk`, with `(Shard(0),)`. Between two that have sizes, sizes count.
    Equality is for such comparisons only: hashes count sizes, so that sets and dicts, caches among
    them, tell equal ones apart, and a single placement is equal only to one of the same sizes.

    Example:
        >>> RaggedPlacements((Shard(0, sizes=(3, 5)),)) == (Shard(0),)
        True
    """

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, tuple) or len(other) != len(self):
            return False
        return all(map(_equal_but_for_sizes, self, other))

    def __ne__(self, other: object) -> bool:
        return not self == other

    # That of the tuple with sizes: no dictionary takes them for placements without.
    __hash__ = tuple.__hash__


def _equal_but_for_sizes(placement: Placement, other: Any) -> bool:
    if isinstance(placement, Shard) and isinstance(other, Shard) and other.sizes is None:
        placement = replace(placement, sizes=None)
    return placement == other


class Sharding:
    """A mesh and a spec; `NamedSharding` is the only subclass.

    Attributes:
        mesh: the mesh.
        spec: a `P`.
    """

    mesh: Any
    spec: P


SpecLike: TypeAlias = "P | Sequence[Placement] | Sharding | None"


def as_spec(where: Any, axis_names: Sequence[str], ndim: int) -> P:
    """Return a spec or a list of placements as a `P` with `ndim` entries.

    Args:
        where: a `P`, one placement per mesh axis (torch's own placement objects are accepted), a
            sharding, whose mesh the caller has checked, or `None` for replicated on every axis.
        axis_names: the mesh's axis names, in mesh order.
        ndim: number of dims of the tensor.

    Raises:
        TypeError: `where` is not one of these.
        ValueError: unknown axis, axis used twice, wrong number of placements, dim out of range.

    Communication: none.
    """
    if where is None:
        return P(*[None] * ndim)
    if isinstance(where, Sharding):
        where = where.spec
    if isinstance(where, P):
        _check_known(where, axis_names)
        return where.padded(ndim)
    if isinstance(where, str) or not isinstance(where, Sequence):
        instead = f"P({where!r})" if isinstance(where, str) else f"[{where!r}]"
        raise TypeError(
            f"expected P(...) or a list with one placement per mesh axis, got {where!r}; write "
            f"{instead}"
        )
    return placements_to_spec([as_placement(p) for p in where], axis_names, ndim)


def placements_to_spec(placements: Sequence[Placement], axis_names: Sequence[str], ndim: int) -> P:
    """Return placements, one per mesh axis, as a `P`."""
    if len(placements) != len(axis_names):
        raise ValueError(
            f"{len(placements)} placements {list(placements)} for a mesh with {len(axis_names)} "
            f"axes {tuple(axis_names)}; give one placement per axis, or a P(...) naming axes"
        )
    per_dim: list[list[tuple[int, str]]] = [[] for _ in range(ndim)]
    for position, (axis, placement) in enumerate(zip(axis_names, placements, strict=True)):
        if isinstance(placement, Shard):
            if not -ndim <= placement.dim < ndim:
                raise ValueError(f"{placement} is out of range for a tensor with {ndim} dims")
            order = position if placement.order is None else placement.order
            per_dim[placement.dim % ndim].append((order, axis))
    _check_orders(placements, per_dim)
    by_axis = dict(zip(axis_names, placements, strict=True))
    dims = [tuple(axis for _, axis in sorted(entries)) for entries in per_dim]
    unreduced = {a: p.reduce_op for a, p in by_axis.items() if isinstance(p, Partial)}
    return P(*dims, unreduced=unreduced, sizes=_joint_sizes(dims, by_axis))


def _joint_sizes(
    dims: Sequence[tuple[str, ...]], placements: Mapping[str, Any]
) -> dict[tuple[str, ...], Any]:
    """Return the sizes of the axes that have them; those of one dim cut it jointly."""
    sizes = {}
    for dim, axes in enumerate(dims):
        sized = tuple(axis for axis in axes if placements[axis].sizes is not None)
        axis_sizes = [placements[axis].sizes for axis in sized]
        if len(set(axis_sizes)) > 1:
            raise ValueError(
                f"the axes {sized} that split dim {dim} have sizes {axis_sizes}, but axes with "
                "sizes cut the dim jointly; give each of them the same sizes, one length for each "
                "combination of their ranks, or sizes to the first only"
            )
        if sized:
            sizes[sized] = axis_sizes[0]
    return sizes


def spec_to_placements(spec: P, axis_names: Sequence[str]) -> tuple[Placement, ...]:
    """Return a spec as placements, one per mesh axis."""
    placements: dict[str, Placement] = {axis: Partial(kind) for axis, kind in spec.unreduced}
    mesh_order = {axis: i for i, axis in enumerate(axis_names)}
    sizes = {axis: sizes for axes, sizes in spec.sizes for axis in axes}
    for dim, axes in enumerate(spec.dims):
        in_order = list(axes) == sorted(axes, key=mesh_order.__getitem__)
        for order, axis in enumerate(axes):
            placements[axis] = Shard(dim, None if in_order else order, sizes.get(axis))
    ordered = tuple(placements.get(axis, Replicate()) for axis in axis_names)
    return RaggedPlacements(ordered) if sizes else ordered


# --------------------------------------------------------------------------------------------------


def _check_known(spec: P, axis_names: Sequence[str]) -> None:
    if UNCONSTRAINED in spec.dims:
        raise ValueError(
            f"{spec} is UNCONSTRAINED on dim {spec.dims.index(UNCONSTRAINED)}, which only "
            "with_sharding_constraint accepts; write None or axis names"
        )
    unknown = [a for a in spec.axes if a not in axis_names]
    if unknown:
        raise ValueError(
            f"{spec} names axis {unknown[0]!r}, but the mesh has axes {tuple(axis_names)}"
        )


def _check_orders(placements: Sequence[Placement], per_dim: list[list[tuple[int, str]]]) -> None:
    """Raise ValueError unless the axes that split one dim have no `order`, or 0, 1, 2, ..."""
    for dim, entries in enumerate(per_dim):
        shards = [
            p for p in placements if isinstance(p, Shard) and p.dim in (dim, dim - len(per_dim))
        ]
        orders = [p.order for p in shards if p.order is not None]
        if orders and sorted(orders) != list(range(len(entries))):
            raise ValueError(
                f"the axes that split dim {dim} have orders {[p.order for p in shards]}; give each "
                f"of the {len(entries)} its own position 0..{len(entries) - 1}, or none of them"
            )


def as_placement(placement: Any) -> Placement:
    """Return a placement as one of ours; torch's own placement objects are converted."""
    if isinstance(placement, Placement):
        return placement
    name = type(placement).__name__
    if type(placement).__module__.startswith("torch.distributed"):
        if name == "Shard":
            return Shard(placement.dim)
        if name == "Replicate":
            return Replicate()
        if name == "Partial":
            return Partial(placement.reduce_op)
    raise TypeError(f"expected Shard, Replicate or Partial for each mesh axis, got {placement!r}")
