"""`P`, the partition spec: the mesh axes that split each dim, and those of a pending reduction."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import index
from typing import Any, ClassVar, NamedTuple, Self

KINDS = ("sum", "avg", "max", "min", "product")
# in gradients only: every rank holds a separate value, which is never combined with the others
EACH = "each"


class _Unconstrained(tuple):
    """The entry of a dim that keeps its axes; equal to itself only, not to a dim that is whole."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return self is other

    def __ne__(self, other: object) -> bool:
        return self is not other

    def __hash__(self) -> int:
        return id(_Unconstrained)

    def __repr__(self) -> str:
        return "UNCONSTRAINED"

    def __reduce__(self) -> str:
        return "UNCONSTRAINED"


UNCONSTRAINED = _Unconstrained()


class Cut(NamedTuple):
    """One cut of an interval into parts: as by `torch.chunk`, or into parts of given sizes.

    Attributes:
        axes: the mesh axes whose ranks hold the parts, major to minor; one, unless `sizes` are for
            several jointly.
        sizes: the length of each part, in order; None for equal parts, the last ones short or
            empty.
    """

    axes: tuple[str, ...]
    sizes: tuple[int, ...] | None = None


@dataclass(frozen=True, init=False, repr=False)
class P:
    """A partition spec: for each tensor dim, the mesh axes that split it.

    As in JAX, specs are equal if they are written with the same entries:
    `P("dp") != P("dp", None)`, though they shard a matrix the same way. Compare with
    `NamedSharding.is_equivalent_to`, or compare layouts, which have an entry for each dim.

    A spec is a sequence of its entries, each None, an axis name or a tuple of names: `len(spec)`,
    `spec[0]`, `spec[1:]` (a tuple), `P(*spec)`, `spec + P("tp")`. Unlike a tuple it is always true.
    `P.UNCONSTRAINED`, which `with_sharding_constraint` accepts, is the entry of a dim that keeps
    its axes.

    Attributes:
        dims: per tensor dim the axes that split it, major to minor; `()` for a dim that is not
            split. Dims beyond the last entry are not split.
        unreduced: `(axis, kind)` pairs, sorted by axis, on which a reduction is pending; kind is
            one of `KINDS`.
        sizes: `(axes, lengths)` pairs, sorted, for dims cut into parts of given lengths: one for
            each rank of the axis, in order, zero allowed; for several axes, which must be the first
            ones that split their dim, one for each combination, major to minor. Further axes of the
            dim cut each part as `torch.chunk` does. Written as a mapping, `sizes={"dp": (3, 0, 5)}`
            or `sizes={("dp", "tp"): (1, 2, 0, 5)}`.

    Raises:
        TypeError: an entry is not made of axis names, or `sizes` is not a mapping to integers.
        ValueError: an axis is used twice, an unknown or mixed pending kind, sizes that are negative
            or not those of the first axes of a dim.

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

    UNCONSTRAINED: ClassVar[Any] = UNCONSTRAINED

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
        """Return the same spec with exactly `ndim` entries.

        Raises:
            ValueError: the spec has more entries than that.
        """
        if len(self.dims) > ndim:
            raise ValueError(
                f"{self} has {len(self.dims)} entries but the tensor has {ndim} dims; drop the "
                "extra entries"
            )
        if len(self.dims) == ndim:
            return self
        whole = [None] * (ndim - len(self.dims))
        return P(*self.dims, *whole, unreduced=dict(self.unreduced), sizes=dict(self.sizes))

    @cached_property
    def cuts(self) -> tuple[tuple[Cut, ...], ...]:
        """Per dim the cuts of its interval, one inside the other, outermost first."""
        per_dim = []
        for axes in self.dims:
            sized, sizes = next(
                (pair for pair in self.sizes if pair[0] == axes[: len(pair[0])]), ((), ())
            )
            chunked = [Cut((axis,)) for axis in axes[len(sized) :]]
            per_dim.append((Cut(sized, sizes), *chunked) if sized else tuple(chunked))
        return tuple(per_dim)

    @classmethod
    def of_cuts(cls, cuts: Iterable[Iterable[Cut]], unreduced: Mapping[str, str]) -> Self:
        """Return the spec with these cuts: `P.of_cuts(spec.cuts, dict(spec.unreduced)) == spec`."""
        dims = [tuple(dim) for dim in cuts]
        sizes = {cut.axes: cut.sizes for dim in dims for cut in dim if cut.sizes is not None}
        return cls(
            *[tuple(axis for cut in dim for axis in cut.axes) for dim in dims],
            unreduced=unreduced,
            sizes=sizes,
        )

    def with_unreduced(self, unreduced: Mapping[str, str]) -> Self:
        """Return the spec with the same cuts and other pending axes."""
        return type(self).of_cuts(self.cuts, unreduced)

    # -- a sequence of entries ---------------------------------------------------------------------

    @cached_property
    def partitions(self) -> tuple[Any, ...]:
        """The entries: per dim None, an axis name, or a tuple of names."""
        return tuple(
            entry if entry is UNCONSTRAINED or len(entry) > 1 else entry[0] if entry else None
            for entry in self.dims
        )

    def __len__(self) -> int:
        return len(self.dims)

    def __bool__(self) -> bool:
        return True  # P(unreduced="dp") has no entries but is not the same as no spec

    def __iter__(self) -> Iterator[Any]:
        return iter(self.partitions)

    def __reversed__(self) -> Iterator[Any]:
        return reversed(self.partitions)

    def __contains__(self, entry: object) -> bool:
        return entry in self.partitions

    def __getitem__(self, index: Any) -> Any:
        """Return the entry of a dim, or a tuple of entries.

        Raises:
            IndexError: the spec has no such entry.
        """
        return self.partitions[index]

    def index(self, entry: Any, *bounds: int) -> int:
        """Return the first dim with this entry. Raises: ValueError if none has it."""
        return self.partitions.index(entry, *bounds)

    def count(self, entry: Any) -> int:
        """Return how many dims have this entry."""
        return self.partitions.count(entry)

    def __add__(self, other: Any) -> P:
        """Concatenate the entries; two specs also combine their pending axes and sizes."""
        if isinstance(other, P):
            return P(
                *self.dims,
                *other.dims,
                unreduced=dict(self.unreduced + other.unreduced),
                sizes=dict(self.sizes + other.sizes),
            )
        if isinstance(other, (tuple, list)):
            return P(*self.dims, *other, unreduced=dict(self.unreduced), sizes=dict(self.sizes))
        return NotImplemented

    def __radd__(self, other: Any) -> P:
        if isinstance(other, (tuple, list)):
            return P(*other, *self.dims, unreduced=dict(self.unreduced), sizes=dict(self.sizes))
        return NotImplemented

    @property
    def axes(self) -> tuple[str, ...]:
        """Every axis the spec names."""
        return tuple(a for dim in self.dims for a in dim) + tuple(a for a, _ in self.unreduced)

    def __repr__(self) -> str:
        entries = [_show_entry(dim) for dim in self.dims]
        if self.unreduced:
            plain = all(kind == "sum" for _, kind in self.unreduced)
            shown = ", ".join(
                repr(a) if plain else f"{a!r}: {kind!r}" for a, kind in self.unreduced
            )
            entries.append(f"unreduced={{{shown}}}")
        if self.sizes:
            shown = ", ".join(f"{_show_entry(axes)}: {sizes}" for axes, sizes in self.sizes)
            entries.append(f"sizes={{{shown}}}")
        return f"P({', '.join(entries)})"

    @cached_property
    def _hash(self) -> int:
        return hash((self.dims, self.unreduced, self.sizes))

    def __hash__(self) -> int:
        # computed once: there may be many sizes, and every look-up of a layout hashes its spec
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        return make_spec, (self.dims, self.unreduced, self.sizes)


def make_spec(
    dims: tuple[tuple[str, ...], ...],
    unreduced: tuple[tuple[str, str], ...],
    sizes: tuple[tuple[tuple[str, ...], tuple[int, ...]], ...],
) -> P:
    """Return a `P` from its attributes.

    A function by a global name, so that `torch.load` can be told to trust it.
    """
    return P(*dims, unreduced=dict(unreduced), sizes=dict(sizes))


PartitionSpec = P


# --------------------------------------------------------------------------------------------------


def _axes_of(entry: Any) -> tuple[str, ...]:
    if entry is None:
        return ()
    if entry is UNCONSTRAINED:
        return UNCONSTRAINED
    axes = None
    if isinstance(entry, str):
        axes = (entry,)
    elif isinstance(entry, (tuple, list)):
        axes = tuple(entry)
    if axes is None or not all(isinstance(a, str) for a in axes):
        raise TypeError(
            f"an entry of P(...) must be None, an axis name or a tuple of axis names, got {entry!r}"
        )
    return axes


def _pending_of(unreduced: Any) -> tuple[tuple[str, str], ...]:
    if isinstance(unreduced, str):
        unreduced = (unreduced,)
    pairs = (
        unreduced.items()
        if isinstance(unreduced, Mapping)
        else [(axis, "sum") for axis in unreduced]
    )
    for _, kind in pairs:
        check_kind(kind)
    return tuple(sorted(pairs))


def _sizes_of(sizes: Any) -> tuple[tuple[tuple[str, ...], tuple[int, ...]], ...]:
    if not isinstance(sizes, Mapping):
        raise TypeError(
            "sizes must map an axis, or a tuple of axes, to the length of each part, as in "
            f"{{'dp': (3, 0, 5)}}, got {sizes!r}"
        )
    return tuple(
        sorted(
            (_axes_of(axes), lengths_of(lengths, f"sizes of {axes!r}"))
            for axes, lengths in sizes.items()
        )
    )


def lengths_of(sizes: Any, name: str) -> tuple[int, ...]:
    """Return sizes as integers; `name` is what errors call them."""
    try:
        lengths = tuple(map(index, sizes))
    except TypeError:
        raise TypeError(
            f"{name}: expected the length of each part, as in (3, 0, 5), got {sizes!r}"
        ) from None
    if any(n < 0 for n in lengths):
        raise ValueError(
            f"{name}: a part cannot have {min(lengths)} elements, as in {lengths}; write 0 for an "
            "empty part"
        )
    return lengths


def _check_outermost(spec: P) -> None:
    """Raise ValueError unless sizes are of the first axes of a dim: cuts inside parts are even."""
    for axes, sizes in spec.sizes:
        if not axes or not any(axes == dim[: len(axes)] for dim in spec.dims):
            raise ValueError(
                f"{spec} gives sizes {sizes} for {_show_entry(axes)}, which must be the axis or "
                "the first axes that split a dim: further axes cut each part evenly; to choose the "
                "length of every part, give sizes for all axes of the dim jointly, as in P(('dp', "
                "'tp'), sizes={('dp', 'tp'): (1, 2, 0, 5)})"
            )
    sized = [axis for axes, _ in spec.sizes for axis in axes]
    twice = sorted({axis for axis in sized if sized.count(axis) > 1})
    if twice:
        raise ValueError(f"{spec} gives sizes for axis {twice[0]!r} twice; keep one of them")


def check_kind(kind: str) -> None:
    """Raise ValueError for an unknown kind of pending reduction."""
    if kind not in KINDS and kind != EACH:
        raise ValueError(
            f"unknown pending kind {kind!r}; write one of {', '.join(map(repr, KINDS))}"
        )


def _check_axes_once(spec: P) -> None:
    axes = spec.axes
    twice = sorted({a for a in axes if axes.count(a) > 1})
    if twice:
        raise ValueError(
            f"{spec} uses axis {twice[0]!r} more than once; an axis can split one dim or be "
            "pending, not both"
        )
    kinds = {kind for _, kind in spec.unreduced} - {EACH}
    if len(kinds) > 1 and not kinds <= {"sum", "avg"}:
        raise ValueError(
            f"{spec} mixes pending kinds {sorted(kinds)}, which do not commute, so its value is "
            "undefined; reduce one of the axes first"
        )


def _show_entry(axes: tuple[str, ...]) -> str:
    if axes is UNCONSTRAINED:
        return "UNCONSTRAINED"
    return "None" if not axes else repr(axes[0]) if len(axes) == 1 else repr(axes)
