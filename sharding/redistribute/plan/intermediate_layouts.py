"""Layouts between two others, and which collective leads from one layout to the next."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from itertools import takewhile

from ...layout.layout import Layout
from ...layout.spec import Cut, P

# -- layouts ---------------------------------------------------------------------------------------


def without_trivial_axes(layout: Layout) -> Layout:
    """Return the layout with the same boxes that does not mention axes of one rank."""
    size = layout.mesh.size
    if not any(size(a) == 1 for a in layout.spec.axes):
        return layout
    cuts = [
        [Cut(tuple(a for a in cut.axes if size(a) > 1), cut.sizes) for cut in dim]
        for dim in layout.spec.cuts
    ]
    pending = {a: k for a, k in layout.spec.unreduced if size(a) > 1}
    return layout.temporary(P.of_cuts([[cut for cut in dim if cut.axes] for dim in cuts], pending))


def with_pending(layout: Layout, changes: Mapping[str, str | None]) -> Layout:
    """Return the layout with the pending kind of some axes changed, or removed where it is None."""
    pending = {**layout.pending, **changes}
    return layout.temporary(
        layout.spec.with_unreduced({a: k for a, k in pending.items() if k is not None})
    )


def append_axes(layout: Layout, goal: Layout, allowed: Collection[str]) -> Layout:
    """Return the layout with dims cut further, as the goal does.

    Each dim as long as its next cut is by allowed axes.
    """
    if not allowed:
        return layout
    cuts = list(layout.spec.cuts)
    for dim, goal_cuts in enumerate(goal.spec.cuts):
        done = len(cuts[dim])
        if goal_cuts[:done] == cuts[dim]:
            cuts[dim] += tuple(
                takewhile(lambda cut: all(a in allowed for a in cut.axes), goal_cuts[done:])
            )
    if cuts == list(layout.spec.cuts):
        return layout
    return _with_cuts(layout, cuts, layout.pending)


def _with_cuts(layout: Layout, cuts: Sequence[Sequence[Cut]], pending: Mapping[str, str]) -> Layout:
    """Return the layout with other cuts, pending as given on the axes that these do not use."""
    split = {axis for dim in cuts for cut in dim for axis in cut.axes}
    return layout.temporary(P.of_cuts(cuts, {a: k for a, k in pending.items() if a not in split}))


def sliced_towards(layout: Layout, target: Layout) -> Layout:
    """Return the layout with replicated axes split as in the target, where slicing does it."""
    return append_axes(layout, target, layout.replicated_axes)


def split_further(
    layout: Layout, axes: Collection[str], avoid: Collection[int] = ()
) -> Layout | None:
    """Return the layout with one dim cut by these axes as well, into equal parts.

    The dim is none of `avoid`. None if no dim divides.
    """
    for dim, size in enumerate(layout.shape):
        cuts = (*layout.spec.cuts[dim], *[Cut((a,)) for a in axes])
        if dim not in avoid and size and _divides(layout, cuts, size):
            return _with_cuts(
                layout,
                [*layout.spec.cuts[:dim], cuts, *layout.spec.cuts[dim + 1 :]],
                layout.pending,
            )
    return None


def without_cuts(layout: Layout, axes: Collection[str], pending: Mapping[str, str]) -> Layout:
    """Return the layout with every dim cut only up to the first of these axes.

    `pending` is by axes that split nothing.
    """
    cuts = [
        list(takewhile(lambda cut: not any(a in axes for a in cut.axes), dim))
        for dim in layout.spec.cuts
    ]
    return _with_cuts(layout, cuts, pending)


def before_padding(cur: Layout, goal: Layout) -> Layout:
    """Return the layout from which a pad leads to the goal.

    The goal with the axes that become pending split or replicated.

    Such an axis stays split (innermost) if it is split now and padding the shard with the neutral
    element is all that is needed; otherwise it is replicated.
    """
    cuts = [list(dim) for dim in goal.spec.cuts]
    for axis, kind in goal.spec.unreduced:
        if axis in cur.dim_of and kind in ("sum", "product"):
            dim = cur.dim_of[axis]
            (cut,) = (cut for cut in cur.spec.cuts[dim] if axis in cut.axes)
            if cut.sizes is None or (len(cut.axes) == 1 and not cuts[dim]):
                cuts[dim].append(cut)
    return cur.temporary(P.of_cuts(cuts, cur.pending))


# -- what leads from one to the next ---------------------------------------------------------------


def moving_axes(cur: Layout, target: Layout) -> tuple[str, ...]:
    """Return the axes along which a rank may have to receive.

    Those that split a dim now, beyond the cuts that both layouts have in common.

    Along every other axis a rank finds all that it needs at its own coordinate.
    """
    moving = set()
    for have, want in zip(cur.spec.cuts, target.spec.cuts, strict=True):
        common = 0
        while common < min(len(have), len(want)) and have[common] == want[common]:
            common += 1
        moving.update(axis for cut in have[common:] for axis in cut.axes)
    return tuple(a for a in cur.mesh.axis_names if a in moving)


def is_gather(cur: Layout, target: Layout) -> bool:
    """Return whether ranks end with all that their group holds, in equal parts: an all_gather."""
    for have, want, size in zip(cur.spec.cuts, target.spec.cuts, cur.shape, strict=True):
        if have != want and (have[: len(want)] != want or not _divides(cur, have, size)):
            return False
    return True


def is_scatter(cur: Layout, target: Layout) -> bool:
    """Return whether every rank of a reduction ends with an equal part: a reduce_scatter."""
    return is_gather(
        with_pending(target, dict.fromkeys(target.pending)),
        with_pending(cur, dict.fromkeys(cur.pending)),
    )


def is_permutation(cur: Layout, target: Layout, axes: Collection[str]) -> bool:
    """Return whether both cut the tensor by the same grid of equal boxes.

    It is one only if `axes` hold each box once before and after.
    """
    if not all(axis in target.dim_of for axis in axes):
        return False
    for have, want, length in zip(cur.spec.cuts, target.spec.cuts, cur.shape, strict=True):
        if have != want and not (
            _divides(cur, have, length)
            and _divides(cur, want, length)
            and _number_of_parts(cur, have) == _number_of_parts(cur, want)
        ):
            return False
    return set(target.dim_of) == set(cur.dim_of)


def _divides(layout: Layout, cuts: tuple[Cut, ...], length: int) -> bool:
    """Return whether these cuts give equal parts."""
    return (
        not any(cut.sizes is not None for cut in cuts)
        and length % _number_of_parts(layout, cuts) == 0
    )


def _number_of_parts(layout: Layout, cuts: tuple[Cut, ...]) -> int:
    return math.prod(layout.mesh.size(a) for cut in cuts for a in cut.axes)
