"""Which sequences of steps are considered for a plan.

A plan has four stages, each of which may be empty:

1. averages become sums, by a local division;
2. pending axes are reduced; replicated axes are sliced first, so that less is reduced;
3. boxes move: a local slice, an all_gather where the geometry is exactly that, otherwise an
   all_to_all_v;
4. axes that must be pending are made so, by padding with the neutral element.

Stages 2 and 3 have a few alternatives each, all in closed form; a candidate is one combination of
them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from ....mesh.topology import Topology
from ...layout.layout import Layout
from .intermediate_layouts import (
    append_axes,
    before_padding,
    is_gather,
    is_permutation,
    is_scatter,
    moving_axes,
    sliced_towards,
    split_further,
    with_pending,
    without_cuts,
)
from .routes import MAX_CELLS, count_cells, is_node_replicated, members
from .steps import Step
from .traffic import traffic

Steps = tuple[Step, ...]
# how many times fewer bytes a reduction must move if idle replicas take a share and a gather
# follows
_WORTH_SHARING = 1.5
# Ranks along the moving axes, up to which hierarchical routes are computed by arithmetic.
_MAX_OUTSIDE = 1024
# Ranks of a group, up to which it is searched rank by rank for idle replicas or nodes.
_MAX_MEMBERS = 128


def candidates(src: Layout, goal: Layout, topology: Topology) -> Iterator[Steps]:
    """Yield sequences of steps from `src` to `goal`, the simplest first: it wins among equals."""
    averaged = tuple(
        a for a, kind in src.spec.unreduced if kind == "avg" and goal.pending.get(a) != "avg"
    )
    scaled = (
        (Step("scale", averaged, src, with_pending(src, dict.fromkeys(averaged, "sum"))),)
        if averaged
        else ()
    )
    start = scaled[-1].dst if scaled else src
    for reduced in _reductions(start, goal, topology):
        at = reduced[-1].dst if reduced else start
        for moved in _moves(at, goal, topology):
            yield (*scaled, *reduced, *moved, *_pad_steps(moved[-1].dst if moved else at, goal))


def _pad_steps(cur: Layout, goal: Layout) -> Steps:
    if cur is goal:
        return ()
    kinds = {k for a, k in goal.spec.unreduced if cur.pending.get(a) != k}
    return (Step("pad", (), cur, goal, kinds.pop() if len(kinds) == 1 else "sum"),)


# -- reductions ------------------------------------------------------------------------------------


def _reductions(cur: Layout, goal: Layout, topology: Topology) -> Iterator[Steps]:
    """Yield ways to reduce values that must not stay pending; parts may be left to gather."""
    todo = tuple(a for a, kind in cur.spec.unreduced if goal.pending.get(a) != kind)
    if not todo:
        yield ()
        return
    for first in _before_reduction(cur, goal, todo, topology):
        for steps in _reduction_steps(first[-1].dst if first else cur, goal, todo, topology):
            yield (*first, *steps)
    yield from _reduced_by_all_to_all(cur, goal, todo)


def _before_reduction(
    cur: Layout, goal: Layout, todo: tuple[str, ...], topology: Topology
) -> Iterator[Steps]:
    """Yield what may be done before a reduction to reduce less, or less across nodes."""
    sliced = sliced_towards(cur, goal)
    yield _slice(cur, sliced)
    idle = tuple(a for a in sliced.replicated_axes if a not in goal.dim_of)
    shared = split_further(sliced, idle, _dims_to_cut(sliced, goal, todo)) if idle else None
    crosses = bool(set(todo) & set(topology.crossing_axes(cur.mesh)))
    if shared is not None and (
        crosses or _is_worth_sharing(cur.mesh.size(todo), cur.mesh.size(idle))
    ):
        yield _slice(cur, shared)  # idle replicas take a share of the work
    if crosses:  # boxes move inside the nodes, so that only parts move between nodes
        ready = without_cuts(goal, todo, sliced.pending)
        axes = moving_axes(sliced, ready)
        if axes and not set(axes) & set(topology.crossing_axes(cur.mesh)):
            for step in _moving_steps(sliced, ready, axes, topology):
                yield (*_slice(cur, sliced), step)


def _is_worth_sharing(n: int, replicas: int) -> bool:
    """Return whether r idle replicas should take a share each.

    In a reduce_scatter of N bytes over n ranks each rank receives (n-1)/n N. With shares it is
    (n-1)/(nr) N, and (r-1)/(nr) N for the gather that follows.
    """
    return replicas * (n - 1) > _WORTH_SHARING * (n + replicas - 2)


def _slice(cur: Layout, sliced: Layout) -> Steps:
    return (Step("slice", (), cur, sliced),) if sliced is not cur else ()


def _dims_to_cut(cur: Layout, goal: Layout, axes: Collection[str]) -> set[int]:
    """Return the dims that the axes split after a reduction over them."""
    shards = append_axes(cur, goal, axes)
    return {
        dim
        for dim, (a, b) in enumerate(zip(cur.spec.cuts, shards.spec.cuts, strict=True))
        if a != b
    }


def _reduction_steps(
    cur: Layout, goal: Layout, todo: tuple[str, ...], topology: Topology
) -> Iterator[Steps]:
    """Yield reductions over the axes `todo`: in two steps or one, to whole values or to parts.

    One all_reduce; or a reduction to the shards of the goal over the axes that split it, and then
    the others; or to parts that are gathered afterwards. Over nodes also: first inside them, so
    that only parts move between nodes.
    """
    if not todo:
        yield ()
        return
    kind = cur.pending[todo[0]]
    crossing = topology.crossing_axes(cur.mesh)
    shards = append_axes(cur, goal, todo)
    axes = tuple(a for a in todo if a in shards.dim_of)
    rest = tuple(a for a in todo if a not in axes)
    if axes:
        for step in _scatters(cur, shards, axes, topology):
            for steps in _reduction_steps(shards, goal, rest, topology):
                yield (step, *steps)
    yield (Step("all_reduce", todo, cur, with_pending(cur, dict.fromkeys(todo)), kind),)
    parts = split_further(shards, rest) if rest else None
    if parts is not None and is_scatter(cur, parts):
        yield (Step("reduce_scatter", todo, cur, parts, kind),)
    inside = tuple(a for a in todo if a not in crossing)
    if 0 < len(inside) < len(todo):
        across = tuple(a for a in todo if a in crossing)
        goal_shards = append_axes(cur, goal, inside)
        ends_in_goal = all(a in goal_shards.dim_of for a in inside) and is_scatter(cur, goal_shards)
        for near in (
            split_further(cur, inside, _dims_to_cut(cur, goal, todo)),
            goal_shards if ends_in_goal else None,
        ):
            if near is not None:
                for steps in _reduction_steps(near, goal, across, topology):
                    yield (Step("reduce_scatter", inside, cur, near, kind), *steps)


def _scatters(
    cur: Layout, shards: Layout, axes: tuple[str, ...], topology: Topology
) -> Iterator[Step]:
    fits = is_scatter(cur, shards)
    if fits:
        yield Step("reduce_scatter", axes, cur, shards, cur.pending[axes[0]])
    if not fits or _may_beat(topology, "reduce_scatter", cur, axes):
        yield Step("all_to_all_reduce", axes, cur, shards, cur.pending[axes[0]])


def _may_beat(topology: Topology, op: str, cur: Layout, axes: Sequence[str]) -> bool:
    """Return whether an all_to_all_v can be cheaper than the collective `op` that it equals."""
    crosses = set(axes) & set(topology.crossing_axes(cur.mesh))
    return bool(crosses) or topology.factor("all_to_all") < topology.factor(op)


def _reduced_by_all_to_all(cur: Layout, goal: Layout, todo: tuple[str, ...]) -> Iterator[Steps]:
    """Yield an all_to_all_reduce: ranks receive all contributions to the box that they hold."""
    sliced = sliced_towards(cur, goal)
    reduced = with_pending(sliced, dict.fromkeys(todo))
    target = before_padding(reduced, goal)
    if target is append_axes(sliced, goal, todo) or target is reduced:
        return  # what `_scatters` does, or an all_reduce
    moving = moving_axes(reduced, target)
    axes = tuple(a for a in cur.mesh.axis_names if a in todo or a in moving)
    yield (
        *_slice(cur, sliced),
        Step("all_to_all_reduce", axes, sliced, target, cur.pending[todo[0]]),
    )


# -- moving boxes ----------------------------------------------------------------------------------


def _moves(cur: Layout, goal: Layout, topology: Topology) -> Iterator[Steps]:
    """Yield ways to split dims as the goal does; axes that stay pending are unchanged."""
    target = before_padding(cur, goal)
    sliced = sliced_towards(cur, target)
    first = _slice(cur, sliced)
    axes = moving_axes(sliced, target)
    if sliced is target:
        yield first
        return
    if not axes:
        yield (*first, Step("slice", (), sliced, target))
        return
    steps = list(_moving_steps(sliced, target, axes, topology))
    for step in steps:
        yield (*first, step)
    if topology.crossing_axes(cur.mesh) or not all(_is_balanced(step, topology) for step in steps):
        for step in routed_steps(cur, target, topology):
            yield (step,)


def _is_balanced(step: Step, topology: Topology) -> bool:
    """Return whether no rank sends more than another must receive: idle replicas save nothing."""
    if step.op == "permute" or not step.src.replicated_axes:
        return True
    moved = traffic(step, topology)
    return moved.sent <= moved.received


def _moving_steps(
    cur: Layout, target: Layout, axes: tuple[str, ...], topology: Topology
) -> Iterator[Step]:
    """Yield the collectives over the axes along which something must move."""
    if is_gather(cur, target):
        yield Step("all_gather", axes, cur, target)
        if _may_beat(topology, "all_gather", cur, axes):
            yield Step("all_to_all_v", axes, cur, target)
    elif is_permutation(cur, target, axes):
        yield Step("permute", axes, cur, target)
    else:
        yield Step("all_to_all_v", axes, cur, target)


def routed_steps(cur: Layout, target: Layout, topology: Topology) -> Iterator[Step]:
    """Yield steps whose senders are searched rank by rank.

    all_to_all_v to which all replicas contribute, and hierarchical ones.
    """
    crossing = topology.crossing_axes(cur.mesh)
    moving = moving_axes(cur, target)
    replicas = cur.replicated_axes
    if cur.mesh.size((*moving, *replicas)) > _MAX_MEMBERS:
        replicas = tuple(a for a in replicas if a not in crossing)  # those of the rank's own node
    axes = tuple(a for a in cur.mesh.axis_names if a in moving or a in replicas)
    hierarchical = Step("hierarchical_all_to_all_v", axes, cur, target, topology=topology)
    if (
        set(moving) & set(crossing)
        and cur.mesh.size(moving) <= _MAX_OUTSIDE
        and is_node_replicated(hierarchical)
    ):
        yield hierarchical
    elif cur.mesh.size(axes) <= _MAX_MEMBERS:
        if set(axes) & set(crossing) and _can_be_hierarchical(hierarchical, topology):
            yield hierarchical
        if replicas:
            yield Step("all_to_all_v", axes, cur, target, topology=topology)


def _can_be_hierarchical(step: Step, topology: Topology) -> bool:
    """Return whether ranks of the group share a node, and the boxes have few enough cells."""
    group = members(step, (0,) * step.src.mesh.ndim)
    nodes = topology.node_ids(step.src.mesh)
    share_nodes = len({int(nodes[c]) for c in group}) < len(group)
    return (
        share_nodes
        and count_cells([step.src.box_at(c) for c in group], [step.dst.box_at(c) for c in group])
        <= MAX_CELLS
    )
