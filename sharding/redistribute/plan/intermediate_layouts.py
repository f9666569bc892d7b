"""Layouts on the way from one to another, and which collective the geometry between two of them is."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from itertools import takewhile

from ...layout.layout import Layout
from ...layout.spec import Cut, P


def without_trivial_axes(layout: Layout) -> Layout:
    """The same boxes, without mentioning axes of one rank."""
    size = layout.mesh.size
    if not any(size(a) == 1 for a in layout.spec.axes):
        return layout

    def kept(cut: Cut) -> Cut:
        return Cut(tuple(a for a in cut.axes if size(a) > 1), cut.sizes)

    cuts = [[kept(cut) for cut in dim if kept(cut).axes] for dim in layout.spec.cuts]
    return layout.passing(P.of_cuts(cuts, {a: k for a, k in layout.spec.unreduced if size(a) > 1}))


def with_pending(layout: Layout, changes: Mapping[str, str | None]) -> Layout:
    """The layout with the pending kind of some axes changed, or removed where it is None."""
    pending = {**layout.pending, **changes}
    return layout.passing(layout.spec.with_unreduced({a: k for a, k in pending.items() if k is not None}))


def append_axes(layout: Layout, goal: Layout, allowed: Collection[str]) -> Layout:
    """The layout with dims cut further, towards the goal, as long as the next cut of a dim is by allowed axes."""
    if not allowed:
        return layout
    cuts = list(layout.spec.cuts)
    for dim, wanted in enumerate(goal.spec.cuts):
        done = len(cuts[dim])
        if wanted[:done] == cuts[dim]:
            cuts[dim] += tuple(takewhile(lambda cut: all(a in allowed for a in cut.axes), wanted[done:]))
    if cuts == list(layout.spec.cuts):
        return layout
    return _recut(layout, cuts, layout.pending)


def _recut(layout: Layout, cuts: Sequence[Sequence[Cut]], pending: Mapping[str, str]) -> Layout:
    """The layout with other cuts, and pending as given on the axes that these do not take."""
    split = {axis for dim in cuts for cut in dim for axis in cut.axes}
    return layout.passing(P.of_cuts(cuts, {a: k for a, k in pending.items() if a not in split}))


def sliced_towards(layout: Layout, target: Layout) -> Layout:
    """Replicated axes split where that is a local slice on the way to the target."""
    return append_axes(layout, target, layout.replicated_axes)


def split_further(layout: Layout, axes: Collection[str], avoid: Collection[int] = ()) -> Layout | None:
    """The layout with one dim (not one to avoid) cut by these axes as well, into equal parts; None where none divides."""
    for dim, size in enumerate(layout.shape):
        cuts = (*layout.spec.cuts[dim], *[Cut((a,)) for a in axes])
        if dim not in avoid and size and _divides(layout, cuts, size):
            return _recut(layout, [*layout.spec.cuts[:dim], cuts, *layout.spec.cuts[dim + 1 :]], layout.pending)
    return None


def without_cuts(layout: Layout, axes: Collection[str], pending: Mapping[str, str]) -> Layout:
    """The layout with every dim cut only as far as without these axes, and pending as given where that is not split."""
    cuts = [list(takewhile(lambda cut: not any(a in axes for a in cut.axes), dim)) for dim in layout.spec.cuts]
    return _recut(layout, cuts, pending)


def before_padding(cur: Layout, goal: Layout) -> Layout:
    """The goal, except that an axis about to be made pending stays split (minor) where it is split now, if padding its
    shard with the neutral element is all that it takes; else it is replicated."""
    cuts = [list(dim) for dim in goal.spec.cuts]
    for axis, kind in goal.spec.unreduced:
        if axis in cur.dim_of and kind in ("sum", "product"):
            dim = cur.dim_of[axis]
            (cut,) = (cut for cut in cur.spec.cuts[dim] if axis in cut.axes)
            if cut.sizes is None or (len(cut.axes) == 1 and not cuts[dim]):
                cuts[dim].append(cut)
    return cur.passing(P.of_cuts(cuts, cur.pending))


def leaving_axes(cur: Layout, target: Layout) -> tuple[str, ...]:
    """Axes along which a rank may have to fetch: those that split a dim now, beyond what the target has in common.

    Along every other axis a rank's own coordinate holds what it needs.
    """
    found = set()
    for have, want in zip(cur.spec.cuts, target.spec.cuts, strict=True):
        found.update(axis for cut in have[_common_prefix(have, want) :] for axis in cut.axes)
    return tuple(a for a in cur.mesh.axis_names if a in found)


def _common_prefix(a: tuple[Cut, ...], b: tuple[Cut, ...]) -> int:
    length = 0
    while length < min(len(a), len(b)) and a[length] == b[length]:
        length += 1
    return length


def is_gather(cur: Layout, target: Layout) -> bool:
    """Whether every rank ends with the whole of what its group holds, in equal parts: exactly an all_gather."""
    for have, want, size in zip(cur.spec.cuts, target.spec.cuts, cur.shape, strict=True):
        if have != want and (have[: len(want)] != want or not _divides(cur, have, size)):
            return False
    return True


def is_scatter(cur: Layout, target: Layout) -> bool:
    """Whether every rank of a reduction ends with an equal part: what reduce_scatter needs."""
    return is_gather(with_pending(target, dict.fromkeys(target.pending)), with_pending(cur, dict.fromkeys(cur.pending)))


def is_permutation(cur: Layout, target: Layout, axes: Collection[str]) -> bool:
    """Whether both cut the tensor by the same grid of equal boxes and `axes` hold each box once before and after."""
    if not all(axis in target.dim_of for axis in axes):
        return False
    for have, want, length in zip(cur.spec.cuts, target.spec.cuts, cur.shape, strict=True):
        if have != want and not (
            _divides(cur, have, length)
            and _divides(cur, want, length)
            and _parts(cur, have) == _parts(cur, want)
        ):
            return False
    return set(target.dim_of) == set(cur.dim_of)


def _divides(layout: Layout, cuts: tuple[Cut, ...], length: int) -> bool:
    """Whether these cuts make equal parts."""
    if any(cut.sizes is not None for cut in cuts):
        return False
    return length % _parts(layout, cuts) == 0


def _parts(layout: Layout, cuts: tuple[Cut, ...]) -> int:
    """Into how many parts these cuts cut."""
    return math.prod(layout.mesh.size(a) for cut in cuts for a in cut.axes)
