"""Specs: which mesh axes split which tensor dims.

The same information has two spellings, and both convert into each other without loss:

* `P("dp", ("tp", "cp"), None, unreduced={"ep"})`: per tensor dim the axes that split it, major to minor, and the axes
  over which a reduction is still pending (JAX's spelling).
* `[Shard(0), Replicate(), Partial()]`: per mesh axis what happens on it (torch's spelling).

A dim is cut into equal parts, unless `sizes` say how long each part is: `P("dp", sizes={"dp": (3, 0, 5)})`, or
`[Shard(0, sizes=(3, 0, 5))]`. Such a spec, and its layout, is called ragged.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import index
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

    As in JAX, specs are equal if they are written with the same entries: `P("dp") != P("dp", None)`, though they lay out a matrix alike.
    `NamedSharding.is_equivalent_to` tells whether two do, and `==` of layouts, which have an entry for each dim.

    Attributes:
        dims: per tensor dim the axes that split it, major to minor; `()` for a dim that is whole. Dims beyond the last
            entry are whole.
        unreduced: `(axis, kind)` pairs, sorted by axis, on which a reduction is pending; kind is one of `KINDS`.
        sizes: `(axes, lengths)` pairs, sorted, for dims cut into parts of given lengths: one for each rank of the axis,
            in order, zero allowed; of several axes, which must be the first ones that split their dim, one for each
            combination, major to minor. Further axes of the dim cut each part as `torch.chunk` does. Written as a
            mapping, `sizes={"dp": (3, 0, 5)}` or `sizes={("dp", "tp"): (1, 2, 0, 5)}`.

    Raises:
        TypeError: an entry is not made of axis names, or `sizes` is not a mapping to integers.
        ValueError: an axis is used twice, an unknown or mixed pending kind, sizes that are negative or not those of the
            first axes of a dim.

    Example:
        >>> P("dp", ("tp", "cp"), None)
        P('dp', ('tp', 'cp'), None)
        >>> P(None, "tp", unreduced={"dp"})
        P(None, 'tp', unreduced={'dp'})
        >>> P(unreduced={"dp": "max"})
        P(unreduced={'dp': 'max'})
        >>> P("dp", None, sizes={"dp": (3, 0, 5)})
        P('dp', None, sizes={'dp': (3, 0, 5)})
    """

    dims: tuple[tuple[str, ...], ...]
    unreduced: tuple[tuple[str, str], ...]
    sizes: tuple[tuple[tuple[str, ...], tuple[int, ...]], ...]

    def __init__(
        self,
        *dims: str | Sequence[str] | None,
        unreduced: str | Iterable[str] | Mapping[str, str] = (),
        sizes: Mapping[str, Sequence[int]] | Mapping[tuple[str, ...], Sequence[int]] | None = None,
    ) -> None:
        object.__setattr__(self, "dims", tuple(_axes_of(entry) for entry in dims))
        object.__setattr__(self, "unreduced", _pending_of(unreduced))
        object.__setattr__(self, "sizes", _sizes_of(sizes) if sizes else ())
        _check_axes_once(self)
        if sizes:
            _check_outermost(self)

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
        whole = [None] * (ndim - len(self.dims))
        return P(*self.dims, *whole, unreduced=dict(self.unreduced), sizes=dict(self.sizes))

    @cached_property
    def cuts(self) -> tuple[tuple[Cut, ...], ...]:
        """Per dim how its interval is cut, one cut inside the other, outermost first."""
        return tuple(tuple(self._cuts_of(axes)) for axes in self.dims)

    def _cuts_of(self, axes: tuple[str, ...]) -> Iterator[Cut]:
        group, sizes = next((pair for pair in self.sizes if pair[0] == axes[: len(pair[0])]), ((), ()))
        if group:
            yield Cut(group, sizes)
        for axis in axes[len(group) :]:
            yield Cut((axis,))

    @classmethod
    def of_cuts(cls, cuts: Iterable[Iterable[Cut]], unreduced: Mapping[str, str]) -> Self:
        """The spec whose dims are cut so: `P.of_cuts(spec.cuts, dict(spec.unreduced)) == spec`."""
        dims = [tuple(dim) for dim in cuts]
        sizes = {cut.axes: cut.sizes for dim in dims for cut in dim if cut.sizes is not None}
        return cls(*[tuple(axis for cut in dim for axis in cut.axes) for dim in dims], unreduced=unreduced, sizes=sizes)

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
        if self.sizes:
            entries.append(f"sizes={{{', '.join(f'{_show_entry(axes)}: {sizes}' for axes, sizes in self.sizes)}}}")
        return f"P({', '.join(entries)})"

    @cached_property
    def _hash(self) -> int:
        return hash((self.dims, self.unreduced, self.sizes))

    def __hash__(self) -> int:
        return self._hash  # sizes may be many, and every look-up of a layout needs it

    def __reduce__(self) -> tuple[Any, ...]:
        return make_spec, (self.dims, self.unreduced, self.sizes)


def make_spec(
    dims: tuple[tuple[str, ...], ...],
    unreduced: tuple[tuple[str, str], ...],
    sizes: tuple[tuple[tuple[str, ...], tuple[int, ...]], ...],
) -> P:
    """A `P` from its attributes, by a name that `torch.load` can be told to trust."""
    return P(*dims, unreduced=dict(unreduced), sizes=dict(sizes))


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
    """The axis splits tensor dim `dim`, as `torch.chunk` does or into parts of the given lengths.

    Attributes:
        dim: the tensor dim; negative counts from the end.
        order: where several axes split the same dim, this axis's position among them, 0 the most major. `None`: the
            axes split the dim in mesh order.
        sizes: the length of each part in elements, zero allowed; one for each rank of the axis, in order. `None`: equal
            parts, the last ones short or empty. Where several axes split the dim, only the first ones may have sizes;
            those that have them have the same ones and cut the dim jointly: one length for each combination of their
            ranks, major to minor.

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
                f"Shard takes the number of a tensor dim, got {self.dim!r}; to name mesh axes write P({self.dim!r})"
            )
        if self.sizes is not None:
            object.__setattr__(self, "sizes", _lengths(self.sizes, f"Shard({self.dim}, sizes=...)"))

    def __repr__(self) -> str:
        options = [f"{name}={value}" for name in ("order", "sizes") if (value := getattr(self, name)) is not None]
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
    return placements_to_spec([own_placement(p) for p in where], axis_names, ndim)


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
    by_axis = dict(zip(axis_names, placements, strict=True))
    dims = [tuple(axis for _, axis in sorted(entries)) for entries in per_dim]
    unreduced = {a: p.reduce_op for a, p in by_axis.items() if isinstance(p, Partial)}
    return P(*dims, unreduced=unreduced, sizes=_placed_sizes(dims, by_axis))


def _placed_sizes(dims: Sequence[tuple[str, ...]], placements: Mapping[str, Any]) -> dict[tuple[str, ...], Any]:
    """The sizes of the axes that have them, which cut their dim jointly."""
    sizes = {}
    for dim, axes in enumerate(dims):
        sized = tuple(axis for axis in axes if placements[axis].sizes is not None)
        given = [placements[axis].sizes for axis in sized]
        if len(set(given)) > 1:
            raise ValueError(
                f"the axes {sized} that split dim {dim} have sizes {given}; axes that have sizes cut the dim jointly: give "
                "each of them the same ones, one length for each combination of their ranks, or sizes to the first only"
            )
        if sized:
            sizes[sized] = given[0]
    return sizes


def spec_to_placements(spec: P, axis_names: Sequence[str]) -> tuple[Placement, ...]:
    """One placement per mesh axis that says the same as `spec`."""
    placements: dict[str, Placement] = {axis: Partial(kind) for axis, kind in spec.unreduced}
    mesh_order = {axis: i for i, axis in enumerate(axis_names)}
    sizes = {axis: sizes for axes, sizes in spec.sizes for axis in axes}
    for dim, axes in enumerate(spec.dims):
        in_order = list(axes) == sorted(axes, key=mesh_order.__getitem__)
        for order, axis in enumerate(axes):
            placements[axis] = Shard(dim, None if in_order else order, sizes.get(axis))
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


def _sizes_of(sizes: Any) -> tuple[tuple[tuple[str, ...], tuple[int, ...]], ...]:
    if not isinstance(sizes, Mapping):
        raise TypeError(
            f"sizes= maps an axis, or a tuple of axes, to the length of each part, as in {{'dp': (3, 0, 5)}}; got {sizes!r}"
        )
    return tuple(sorted((_axes_of(axes), _lengths(given, f"sizes of {axes!r}")) for axes, given in sizes.items()))


def _lengths(sizes: Any, what: str) -> tuple[int, ...]:
    try:
        lengths = tuple(map(index, sizes))
    except TypeError:
        raise TypeError(f"{what}: expected the length of each part, as in (3, 0, 5), got {sizes!r}") from None
    if any(n < 0 for n in lengths):
        raise ValueError(f"{what}: a part cannot have {min(lengths)} elements, as in {lengths}; empty parts have 0")
    return lengths


def _check_outermost(spec: P) -> None:
    """Sizes are those of the first axes of a dim, once: cuts inside a part are equal ones."""
    for axes, sizes in spec.sizes:
        if not axes or not any(axes == dim[: len(axes)] for dim in spec.dims):
            raise ValueError(
                f"{spec} gives sizes {sizes} for {_show_entry(axes)}, which must be the axis or the first axes that split a dim: "
                "further axes cut each part evenly; to say the length of every part, give sizes for all axes of the dim "
                "jointly, as in P(('dp', 'tp'), sizes={('dp', 'tp'): (1, 2, 0, 5)})"
            )
    sized = [axis for axes, _ in spec.sizes for axis in axes]
    twice = sorted({axis for axis in sized if sized.count(axis) > 1})
    if twice:
        raise ValueError(f"{spec} gives sizes for axis {twice[0]!r} twice; keep one of them")


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


def own_placement(placement: Any) -> Placement:
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
