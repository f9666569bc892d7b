"""Plans: the steps that take a tensor from one layout to another, worked out before anything moves.

`plan(src, dst)` is a pure function of two layouts: no process group, no tensor, and the same answer on every rank.
A plan is a tuple of `Step`s; each step goes from one layout to the next by one collective over one group, or by a
local operation. `execute.compile_plan` turns a plan into calls for one rank; `explain` prints it.

The planner works in four moves, each of which may be empty:

1. slice what is replicated and will be split anyway, so that whatever follows is smaller;
2. reduce pending axes: a reduce_scatter where the axis goes on to split a dim, one all_reduce for all others;
3. move boxes: a local slice, an all_gather where the geometry is exactly that, else one **exchange**, an all_to_all
   with exact splits, in which every rank receives each element that it lacks once;
4. make pending what must be pending, by padding with the neutral element.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile

from ..kernels.box import box_size, intersect
from .layout import Layout, told_apart
from .spec import EACH, P

LOCAL_OPS = frozenset({"slice", "pad", "scale"})


@dataclass(frozen=True, eq=False)
class Step:
    """One collective over one group, or one local operation.

    Attributes:
        op: "slice", "pad", "scale" (local); "all_gather", "reduce_scatter", "all_reduce", "exchange" (collectives).
        axes: the mesh axes that the group spans; `()` for a local operation.
        src: the layout before.
        dst: the layout after.
        kind: how values combine, for reductions; the neutral element's kind, for "pad".
    """

    op: str
    axes: tuple[str, ...]
    src: Layout
    dst: Layout
    kind: str = "sum"

    @property
    def is_local(self) -> bool:
        """Whether the step moves nothing between ranks."""
        return self.op in LOCAL_OPS

    @cached_property
    def group_size(self) -> int:
        """Ranks that take part in the collective."""
        return self.src.mesh.size(self.axes) if self.axes else 1

    def bytes_received(self, coordinate: tuple[int, ...]) -> int:
        """Bytes that the rank at `coordinate` receives from others in this step."""
        if self.is_local:
            return 0
        n, itemsize = self.group_size, self.src.dtype.itemsize
        mine = box_size(self.dst.box_at(coordinate)) * itemsize
        if self.op == "all_reduce":
            return 2 * (n - 1) * mine // n
        if self.op == "reduce_scatter":
            return (n - 1) * mine
        own = intersect(self.src.box_at(coordinate), self.dst.box_at(coordinate))
        return mine - (box_size(own) if own is not None else 0) * itemsize

    def __repr__(self) -> str:
        where = f" over {', '.join(self.axes)}" if self.axes else ""
        return f"{self.op}{where}: {self.src.spec} -> {self.dst.spec}"


@dataclass(frozen=True, eq=False)
class Plan:
    """The steps from `src` to `dst`; empty when nothing has to be done."""

    src: Layout
    dst: Layout
    steps: tuple[Step, ...]

    @property
    def launches(self) -> int:
        """Number of collectives."""
        return sum(not step.is_local for step in self.steps)

    def bytes_received(self, coordinate: tuple[int, ...]) -> int:
        """Bytes that the rank at `coordinate` receives over the whole plan."""
        return sum(step.bytes_received(coordinate) for step in self.steps)

    @cached_property
    def max_bytes_received(self) -> int:
        """Bytes received by the busiest rank."""
        return max((self.bytes_received(c) for c, _ in self.src.boxes()), default=0)

    def __repr__(self) -> str:
        return f"Plan({'; '.join(map(repr, self.steps))})" if self.steps else f"Plan({self.src.spec}: nothing to do)"


def plan(src: Layout, dst: Layout) -> Plan:
    """The steps that take a tensor from layout `src` to layout `dst`.

    Raises:
        ValueError: the layouts are of different meshes, shapes or dtypes.

    Communication: none; nothing is run.

    Example:
        >>> mesh = AbstractMesh((4,), ("x",))
        >>> plan(Layout.of(mesh, P("x"), (8, 8)), Layout.of(mesh, P(None, "x"), (8, 8)))
        Plan(exchange over x: P('x', None) -> P(None, 'x'))
    """
    _check_compatible(src, dst)
    dst = Layout.of(src.mesh, dst.spec, dst.shape, dst.dtype)  # an equal mesh may be another object
    return Plan(src, dst, tuple(_steps(src, dst)))


def _check_compatible(src: Layout, dst: Layout) -> None:
    for what in ("mesh", "shape", "dtype"):
        ours, theirs = getattr(src, what), getattr(dst, what)
        if ours != theirs:
            ours, theirs = told_apart(ours, theirs) if what == "mesh" else (ours, theirs)
            raise ValueError(f"cannot redistribute {src} to {dst}: {what} {ours} is not {theirs}")
    own = [axis for axis, kind in src.spec.unreduced if kind == EACH and dst.pending.get(axis) != EACH]
    if own:
        raise ValueError(
            f"cannot redistribute {src}: on axis {own[0]!r} every rank holds the gradient of its own part of a pending tensor, "
            "and these do not make up one value; look at x.to_local()"
        )


def _steps(src: Layout, dst: Layout) -> Iterator[Step]:
    cur, goal = without_trivial_axes(src), without_trivial_axes(dst)
    for stage in (_scale_steps, _reduce_steps, _move_steps, _pending_steps):
        for step in stage(cur, goal):
            yield step
            cur = step.dst


def without_trivial_axes(layout: Layout) -> Layout:
    """The same boxes, without mentioning axes of one rank."""
    size = layout.mesh.size
    dims = [tuple(a for a in axes if size(a) > 1) for axes in layout.spec.dims]
    return layout.replace(P(*dims, unreduced={a: k for a, k in layout.spec.unreduced if size(a) > 1}))


# -- averages are sums of scaled values -------------------------------------------------------------------------------


def _scale_steps(cur: Layout, goal: Layout) -> Iterator[Step]:
    """An average that is not wanted as one becomes a sum, by a local division."""
    averaged = tuple(a for a, kind in cur.spec.unreduced if kind == "avg" and goal.pending.get(a) != "avg")
    if averaged:
        yield Step("scale", averaged, cur, cur.replace(_with_pending(cur, dict.fromkeys(averaged, "sum"))))


# -- reductions -------------------------------------------------------------------------------------------------------


def _reduce_steps(cur: Layout, goal: Layout) -> Iterator[Step]:
    """Slice early; one reduce_scatter over the axes that go on to split dims of the goal; one all_reduce over the rest."""
    todo = [a for a, kind in cur.spec.unreduced if goal.pending.get(a) != kind]
    while todo:
        sliced = _slice_towards(cur, goal)
        if sliced is not cur:
            yield Step("slice", (), cur, sliced)
        scattered = _append_axes(sliced, goal, todo)
        axes = tuple(a for a in todo if a in scattered.dim_of)
        op, cur = ("reduce_scatter", scattered) if axes else ("all_reduce", _reduced(sliced, todo))
        axes = axes or tuple(todo)
        yield Step(op, axes, sliced, cur, sliced.pending[axes[0]])
        todo = [a for a in todo if a not in axes]


def _append_axes(layout: Layout, goal: Layout, allowed: Collection[str]) -> Layout:
    """The layout with dims split further, towards the goal, as long as the next axis of a dim is an allowed one."""
    dims = list(layout.spec.dims)
    for dim, axes in enumerate(goal.spec.dims):
        done = len(dims[dim])
        if axes[:done] == dims[dim]:
            dims[dim] += tuple(takewhile(allowed.__contains__, axes[done:]))
    split = {axis for axes in dims for axis in axes}
    return layout.replace(P(*dims, unreduced={a: k for a, k in layout.spec.unreduced if a not in split}))


def _reduced(layout: Layout, axes: Collection[str]) -> Layout:
    """The layout with nothing pending over these axes."""
    return layout.replace(_with_pending(layout, dict.fromkeys(axes)))


def _with_pending(layout: Layout, changes: dict[str, str | None]) -> P:
    """The spec with the pending kind of some axes changed, or removed where it is None."""
    pending = {**layout.pending, **changes}
    return P(*layout.spec.dims, unreduced={a: k for a, k in pending.items() if k is not None})


# -- moving boxes -----------------------------------------------------------------------------------------------------


def _move_steps(cur: Layout, goal: Layout) -> Iterator[Step]:
    """Take the split dims where the goal wants them; pending axes only pass along."""
    target = _before_padding(cur, goal)
    sliced = _slice_towards(cur, target)
    if sliced is not cur:
        yield Step("slice", (), cur, sliced)
        cur = sliced
    if cur is target:
        return
    axes = _exchange_axes(cur, target)
    if not axes:
        yield Step("slice", (), cur, target)
    elif _is_gather(cur, target):
        yield Step("all_gather", axes, cur, target)
    else:
        yield Step("exchange", axes, cur, target)


def _before_padding(cur: Layout, goal: Layout) -> Layout:
    """The goal, except that an axis about to be made pending stays split (minor) where it is split now, if padding its
    shard with the neutral element is all that it takes; else it is replicated."""
    dims = [list(axes) for axes in goal.spec.dims]
    for axis, kind in goal.spec.unreduced:
        if axis in cur.dim_of and kind in ("sum", "product"):
            dims[cur.dim_of[axis]].append(axis)
    return cur.replace(P(*map(tuple, dims), unreduced=cur.pending))


def _slice_towards(cur: Layout, target: Layout) -> Layout:
    """Split replicated axes where that is a local slice on the way to the target."""
    return _append_axes(cur, target, cur.replicated_axes)


def _exchange_axes(cur: Layout, target: Layout) -> tuple[str, ...]:
    """Axes along which a rank may have to fetch: those that split a dim now, beyond what the target has in common.

    Along every other axis a rank's own coordinate holds what it needs.
    """
    found = set()
    for have, want in zip(cur.spec.dims, target.spec.dims, strict=True):
        common = _common_prefix(have, want)
        found.update(have[common:])
    return tuple(a for a in cur.mesh.axis_names if a in found)


def _common_prefix(a: tuple[str, ...], b: tuple[str, ...]) -> int:
    length = 0
    while length < min(len(a), len(b)) and a[length] == b[length]:
        length += 1
    return length


def _is_gather(cur: Layout, target: Layout) -> bool:
    """Whether every rank ends with the whole of what its group holds, in equal parts: exactly an all_gather."""
    pairs = list(zip(cur.spec.dims, target.spec.dims, cur.shape, strict=True))
    nested = all(have[: len(want)] == want for have, want, _ in pairs)
    return nested and all(size % math.prod(map(cur.mesh.size, have)) == 0 for have, want, size in pairs if have != want)


# -- making values pending --------------------------------------------------------------------------------------------


def _pending_steps(cur: Layout, goal: Layout) -> Iterator[Step]:
    if cur is not goal:
        kinds = {k for a, k in goal.spec.unreduced if cur.pending.get(a) != k}
        yield Step("pad", (), cur, goal, kinds.pop() if len(kinds) == 1 else "sum")
