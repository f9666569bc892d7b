"""Specs: which mesh axes split which tensor dims.

The same information has two spellings, and both convert into each other without loss:

* `P("dp", ("tp", "cp"), None, unreduced={"ep"})`: per tensor dim the axes that split it, major to minor, and the axes
  over which a reduction is still pending (JAX's spelling).
* `[Shard(0), Replicate(), Partial()]`: per mesh axis what happens on it (torch's spelling).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Self, TypeAlias

KINDS = ("sum", "avg", "max", "min", "product")
EACH = "each"  # in gradients only: every rank holds a value of its own, and nothing will combine them


class Cut(NamedTuple):
    """One cut of an interval into parts: as `torch.chunk` cuts, or into parts of given sizes.

    Attributes:
        axes: the mesh axes whose ranks hold the parts, major to minor; one, unless `sizes` are given for several jointly.
        sizes: the length of each part, in order; None for equal parts, the last ones short or empty.
    """

    axes: tuple[str, ...]
    sizes: tuple[int, ...] | None = None


@dataclass(frozen=True, init=False, repr=False)
class P:
    """A partition spec: for each tensor dim, the mesh axes that split it.

    Attributes:
        dims: per tensor dim the axes that split it, major to minor; `()` for a dim that is whole. Dims beyond the last
            entry are whole.
        unreduced: `(axis, kind)` pairs, sorted by axis, on which a reduction is pending; kind is one of `KINDS`.

    Example:
        >>> P("dp", ("tp", "cp"), None)
        P('dp', ('tp', 'cp'), None)
        >>> P(None, "tp", unreduced={"dp"})
        P(None, 'tp', unreduced={'dp'})
        >>> P(unreduced={"dp": "max"})
        P(unreduced={'dp': 'max'})
    """

    dims: tuple[tuple[str, ...], ...]
    unreduced: tuple[tuple[str, str], ...]

    def __init__(
        self,
        *dims: str | Sequence[str] | None,
        unreduced: str | Iterable[str] | Mapping[str, str] = (),
    ) -> None:
        object.__setattr__(self, "dims", tuple(_axes_of(entry) for entry in dims))
        object.__setattr__(self, "unreduced", _pending_of(unreduced))
        _check_axes_once(self)

    def padded(self, ndim: int) -> P:
        """The same spec with exactly `ndim` entries.

        Raises:
            ValueError: when the spec names more dims than the tensor has.
        """
        if len(self.dims) > ndim:
            raise ValueError(
                f"{self} has {len(self.dims)} entries but the tensor has {ndim} dims; drop the extra entries"
            )
        if len(self.dims) == ndim:
            return self
        return P(*self.dims, *[None] * (ndim - len(self.dims)), unreduced=dict(self.unreduced))

    @cached_property
    def cuts(self) -> tuple[tuple[Cut, ...], ...]:
        """Per dim how its interval is cut, one cut inside the other, outermost first."""
        return tuple(tuple(Cut((axis,)) for axis in axes) for axes in self.dims)

    @classmethod
    def of_cuts(cls, cuts: Iterable[Iterable[Cut]], unreduced: Mapping[str, str]) -> Self:
        """The spec whose dims are cut so: `P.of_cuts(spec.cuts, dict(spec.unreduced)) == spec`."""
        return cls(*[tuple(axis for cut in dim for axis in cut.axes) for dim in cuts], unreduced=unreduced)

    def with_unreduced(self, unreduced: Mapping[str, str]) -> Self:
        """The same cuts with other pending axes."""
        return type(self).of_cuts(self.cuts, unreduced)

    @property
    def axes(self) -> tuple[str, ...]:
        """Every axis the spec names."""
        return tuple(a for dim in self.dims for a in dim) + tuple(a for a, _ in self.unreduced)

    def __repr__(self) -> str:
        entries = [_show_entry(dim) for dim in self.dims]
        if self.unreduced:
            plain = all(kind == "sum" for _, kind in self.unreduced)
            shown = ", ".join(repr(a) if plain else f"{a!r}: {kind!r}" for a, kind in self.unreduced)
            entries.append(f"unreduced={{{shown}}}")
        return f"P({', '.join(entries)})"

    def __reduce__(self) -> tuple[Any, ...]:
        return make_spec, (self.dims, self.unreduced)


def make_spec(dims: tuple[tuple[str, ...], ...], unreduced: tuple[tuple[str, str], ...]) -> P:
    return P(*dims, unreduced=dict(unreduced))


PartitionSpec = P


@dataclass(frozen=True)
class Placement:
    """What happens to a tensor on one mesh axis: `Shard`, `Replicate` or `Partial`."""

    def is_shard(self, dim: int | None = None) -> bool:
        """Whether this is a `Shard` (of dim `dim`, where it is given)."""
        return isinstance(self, Shard) and dim in (None, self.dim)

    def is_replicate(self) -> bool:
        """Whether this is `Replicate`."""
        return isinstance(self, Replicate)

    def is_partial(self, reduce_op: str | None = None) -> bool:
        """Whether this is a `Partial` (of that kind, where it is given)."""
        return isinstance(self, Partial) and reduce_op in (None, self.reduce_op)


@dataclass(frozen=True, repr=False)
class Shard(Placement):
    """The axis splits tensor dim `dim` as `torch.chunk` does.

    Attributes:
        dim: the tensor dim; negative counts from the end.
        order: where several axes split the same dim, this axis's position among them, 0 the most major. `None`: the
            axes split the dim in mesh order.
    """

    dim: int
    order: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.dim, int):
            raise TypeError(
                f"Shard takes the number of a tensor dim, got {self.dim!r}; to name mesh axes write P({self.dim!r})"
            )

    def __repr__(self) -> str:
        return f"Shard({self.dim})" if self.order is None else f"Shard({self.dim}, order={self.order})"


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
        _check_kind(self.reduce_op)

    def __repr__(self) -> str:
        return "Partial()" if self.reduce_op == "sum" else f"Partial({self.reduce_op!r})"


SpecLike: TypeAlias = "P | Sequence[Placement] | None"


def as_spec(where: Any, axis_names: Sequence[str], ndim: int) -> P:
    """Turn a spec or a list of placements into a `P` with `ndim` entries.

    Args:
        where: a `P`, one placement per mesh axis (torch's own placement objects are understood), or `None` for
            replicated on every axis.
        axis_names: the mesh's axis names, in mesh order.
        ndim: number of dims of the tensor.

    Raises:
        TypeError: `where` is neither.
        ValueError: unknown axis, axis used twice, wrong number of placements, dim out of range.

    Communication: none.
    """
    if where is None:
        return P(*[None] * ndim)
    if isinstance(where, P):
        _check_known(where, axis_names)
        return where.padded(ndim)
    if isinstance(where, str) or not isinstance(where, Sequence):
        instead = f"P({where!r})" if isinstance(where, str) else f"[{where!r}]"
        raise TypeError(f"expected P(...) or a list with one placement per mesh axis, got {where!r}; write {instead}")
    return placements_to_spec([_own_placement(p) for p in where], axis_names, ndim)


def placements_to_spec(placements: Sequence[Placement], axis_names: Sequence[str], ndim: int) -> P:
    """The `P` that says the same as one placement per mesh axis."""
    if len(placements) != len(axis_names):
        raise ValueError(
            f"{len(placements)} placements {list(placements)} for a mesh with {len(axis_names)} axes "
            f"{tuple(axis_names)}; give one placement per axis, or a P(...) naming axes"
        )
    per_dim: list[list[tuple[int, str]]] = [[] for _ in range(ndim)]
    for position, (axis, placement) in enumerate(zip(axis_names, placements, strict=True)):
        if isinstance(placement, Shard):
            order = placement.order
            per_dim[_dim_index(placement, ndim)].append((position if order is None else order, axis))
    _check_orders(placements, per_dim)
    unreduced = {a: p.reduce_op for a, p in zip(axis_names, placements, strict=True) if isinstance(p, Partial)}
    return P(*[tuple(axis for _, axis in sorted(entries)) for entries in per_dim], unreduced=unreduced)


def spec_to_placements(spec: P, axis_names: Sequence[str]) -> tuple[Placement, ...]:
    """One placement per mesh axis that says the same as `spec`."""
    placements: dict[str, Placement] = {axis: Partial(kind) for axis, kind in spec.unreduced}
    mesh_order = {axis: i for i, axis in enumerate(axis_names)}
    for dim, axes in enumerate(spec.dims):
        in_order = list(axes) == sorted(axes, key=mesh_order.__getitem__)
        for order, axis in enumerate(axes):
            placements[axis] = Shard(dim, None if in_order else order)
    return tuple(placements.get(axis, Replicate()) for axis in axis_names)


# ---------------------------------------------------------------------------------------------------------------------


def _axes_of(entry: Any) -> tuple[str, ...]:
    if entry is None:
        return ()
    axes = (entry,) if isinstance(entry, str) else tuple(entry) if isinstance(entry, (tuple, list)) else None
    if axes is None or not all(isinstance(a, str) for a in axes):
        raise TypeError(f"an entry of P(...) is None, an axis name or a tuple of axis names, got {entry!r}")
    return axes


def _pending_of(unreduced: Any) -> tuple[tuple[str, str], ...]:
    if isinstance(unreduced, str):
        unreduced = (unreduced,)
    pairs = unreduced.items() if isinstance(unreduced, Mapping) else [(axis, "sum") for axis in unreduced]
    for _, kind in pairs:
        _check_kind(kind)
    return tuple(sorted(pairs))


def _check_kind(kind: str) -> None:
    if kind not in KINDS and kind != EACH:
        raise ValueError(f"unknown pending kind {kind!r}; one of {', '.join(map(repr, KINDS))}")


def _check_axes_once(spec: P) -> None:
    axes = spec.axes
    twice = sorted({a for a in axes if axes.count(a) > 1})
    if twice:
        raise ValueError(
            f"{spec} uses axis {twice[0]!r} more than once; an axis splits one dim, or is pending, not both"
        )
    kinds = {kind for _, kind in spec.unreduced} - {EACH}
    if len(kinds) > 1 and not kinds <= {"sum", "avg"}:
        raise ValueError(
            f"{spec} mixes pending kinds {sorted(kinds)}, which do not commute, so its value is undefined; "
            "reduce one of the axes first"
        )


def _check_known(spec: P, axis_names: Sequence[str]) -> None:
    unknown = [a for a in spec.axes if a not in axis_names]
    if unknown:
        raise ValueError(f"{spec} names axis {unknown[0]!r}, but the mesh has axes {tuple(axis_names)}")


def _check_orders(placements: Sequence[Placement], per_dim: list[list[tuple[int, str]]]) -> None:
    """Axes that split one dim either all leave `order` out or number themselves 0, 1, 2, ..."""
    for dim, entries in enumerate(per_dim):
        shards = [p for p in placements if isinstance(p, Shard) and p.dim in (dim, dim - len(per_dim))]
        given = [p.order for p in shards if p.order is not None]
        if given and sorted(given) != list(range(len(entries))):
            raise ValueError(
                f"the axes that split dim {dim} have orders {[p.order for p in shards]}; "
                f"give each of the {len(entries)} its own position 0..{len(entries) - 1}, or none of them"
            )


def _dim_index(placement: Shard, ndim: int) -> int:
    if not -ndim <= placement.dim < ndim:
        raise ValueError(f"{placement} is out of range for a tensor with {ndim} dims")
    return placement.dim % ndim


def _own_placement(placement: Any) -> Placement:
    """Ours as it is; torch's own placement objects translated."""
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


def _show_entry(axes: tuple[str, ...]) -> str:
    return "None" if not axes else repr(axes[0]) if len(axes) == 1 else repr(axes)
