"""The planner: the ways from one layout to another that can be best, and the choice among them.

A plan goes through four stages, each of which may be empty:

1. averages become sums, by a local division;
2. pending axes are reduced; replicated axes are sliced before, so that less is reduced;
3. boxes move: a local slice, an all_gather where the geometry is exactly that, else an exchange;
4. what must be pending is made so, by padding with the neutral element.

For stages 2 and 3 there are a few ways each, all of closed form; `plan` prices their combinations and takes the
cheapest that fits into the memory allowed. `tests/sharding/redistribute/plan/test_optimal.py` searches all sequences of steps on
small meshes and finds none that is cheaper.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from operator import itemgetter

import torch

from ....kernels.quantize import DTYPES as QUANTIZED
from ....kernels.quantize import FORMATS
from ....kernels.strided import COMPUTED
from ....kernels.symmetric import MAX_RANKS
from ....mesh.abstract_mesh import AbstractMesh
from ....mesh.comm.symmetric_memory import STAGING_BYTES
from ....mesh.topology import Topology
from ...layout.layout import Layout, told_apart
from ...layout.spec import EACH
from .cost import seconds
from .intermediate_layouts import (
    append_axes,
    before_padding,
    is_gather,
    is_permutation,
    is_scatter,
    leaving_axes,
    sliced_towards,
    split_further,
    with_pending,
    without_cuts,
    without_trivial_axes,
)
from .memory import held_bytes, part_bytes, peak_bytes
from .routes import MAX_CELLS, cells, members, shares_evenly
from .steps import Plan, Step
from .traffic import traffic

Steps = tuple[Step, ...]
_WORTH_A_LAUNCH = 1.25  # how many times cheaper a plan with more launches must be
_WORTH_SHARING = 1.5  # how many times fewer bytes a reduction must be when idle replicas take a share and a gather follows
_MAX_OUTSIDE = 1024  # nodes that exchange in two phases by arithmetic
_MAX_MEMBERS = 128  # a group larger than this is not searched rank by rank for idle replicas or nodes


def plan(
    src: Layout,
    dst: Layout,
    topology: Topology | None = None,
    *,
    max_bytes: int | None = None,
    accumulate_dtype: torch.dtype | None = None,
    transport: str | None = None,
) -> Plan:
    """plan(src, dst) -> the steps that take a tensor from layout `src` to layout `dst`.

    Args:
        src: the layout before.
        dst: the layout after: same mesh, global shape and dtype.
        topology: links and nodes to plan for; by default those of the mesh.
        max_bytes: the most that a rank may hold at a time: what it has before, the result and buffers. Exchanges are
            done in rounds until they fit.
        accumulate_dtype: torch.float32 to have 16-bit floats added up in fp32: then they are reduced by exchanges, in
            which they travel in 16 bits. A ring adds up in the dtype that travels, rounding at every rank.
        transport: "int8" or "fp8" to quantise what travels, see `kernels.quantize`; reductions are done by exchanges.

    Raises:
        ValueError: the layouts are of different meshes, shapes or dtypes; no plan fits into `max_bytes` (the message
            says how much the smallest takes); another `accumulate_dtype` or `transport`; a transport of anything but 16-
            and 32-bit floats, or of pending values that are not to be added up.

    Communication: none; nothing is run.

    Example:
        >>> mesh = AbstractMesh((4,), ("x",))
        >>> plan(Layout.of(mesh, P("x"), (8, 8)), Layout.of(mesh, P(None, "x"), (8, 8)))
        Plan(exchange over x: P('x', None) -> P(None, 'x'))
    """
    _check_compatible(src, dst)
    topology = src.mesh.topology if topology is None else topology
    dst = Layout.of(src.mesh, dst.spec, dst.shape, dst.dtype)  # an equal mesh may be another object
    candidates = list(_candidates(without_trivial_axes(src), without_trivial_axes(dst), topology))
    if accumulate_dtype is not None:
        candidates = [_accumulating(steps, accumulate_dtype) for steps in candidates]
    if transport is not None:
        check_transport(transport, src, dst)
        candidates = [_quantized(steps, transport) for steps in candidates]
    if max_bytes is not None:
        candidates = _fitting(candidates, src, dst, max_bytes)
    if topology.symmetric is not None:
        candidates = [tuple(_faster(step, topology) for step in steps) for steps in candidates]
    return Plan(src, dst, _cheapest(candidates, topology, src.mesh), topology)


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


def _cheapest(candidates: Sequence[Steps], topology: Topology, mesh: AbstractMesh) -> Steps:
    """The cheapest; on one node, the cheapest with fewer launches unless those that it saves cost much.

    Estimates know nothing of what a launch costs beyond its latency (waiting for the slowest rank, above all), so bytes
    that a further launch saves must be many.
    """
    if len(candidates) == 1:
        return candidates[0]
    price = _remembered(topology)
    priced = [(sum(map(price, steps)), steps) for steps in candidates]
    least, best = min(priced, key=itemgetter(0))
    if topology.crossing_axes(mesh):
        return best
    near = [steps for cost, steps in sorted(priced, key=itemgetter(0)) if cost <= _WORTH_A_LAUNCH * least]
    return min(near, key=_launches)


def _remembered(topology: Topology) -> Callable[[Step], float]:
    """`seconds`, asked once for steps that are the same: candidates have many in common."""
    known: dict[object, float] = {}

    def price(step: Step) -> float:
        key = step.op, step.axes, step.src, step.dst, step.rounds, step.how, step.topology is None
        if key not in known:
            known[key] = seconds(step, topology)
        return known[key]

    return price


def _launches(steps: Steps) -> int:
    return sum(step.launches for step in steps)


def _accumulating(steps: Steps, dtype: torch.dtype) -> Steps:
    """The same with 16-bit floats reduced on arrival, which is done in fp32."""
    if dtype is not torch.float32:
        raise ValueError(f"accumulate_dtype={dtype}: sums of 16-bit floats can be accumulated in torch.float32; or leave it out")
    if not steps or not (steps[0].src.dtype.is_floating_point and steps[0].src.dtype.itemsize == 2):
        return steps
    adding = {"reduce_scatter", "all_reduce"}
    return tuple(replace(s, op="exchange_reduce") if s.op in adding and s.kind == "sum" else s for s in steps)


_QUANTIZED_AS = {"reduce_scatter": "exchange_reduce", "all_reduce": "exchange_reduce", "two_phase": "exchange"}


def check_transport(transport: str, src: Layout, dst: Layout) -> None:
    """Raises: ValueError where what goes from `src` to `dst` cannot be quantised."""
    if transport not in FORMATS:
        raise ValueError(f"transport={transport!r}: values can travel as {' or '.join(map(repr, FORMATS))}; or leave it out")
    if src.dtype not in QUANTIZED:
        raise ValueError(
            f"cannot redistribute {src} with transport={transport!r}: 16- and 32-bit floats can be quantised; leave it out, or cast first"
        )
    reduced = {kind for axis, kind in src.spec.unreduced if dst.pending.get(axis) != kind} - {"sum", "avg"}
    if reduced:
        raise ValueError(
            f"cannot redistribute {src} to {dst.spec} with transport={transport!r}: quantised values can be added up, but not combined "
            f"by {sorted(reduced)[0]}; reduce first without it"
        )


def _quantized(steps: Steps, transport: str) -> Steps:
    """The same with what moves quantised. A ring would quantise again at every rank, and so would a second phase."""
    return tuple(s if s.is_local else replace(s, op=_QUANTIZED_AS.get(s.op, s.op), transport=transport) for s in steps)


# -- candidates, stage by stage ----------------------------------------------------------------------------------------


def _candidates(src: Layout, goal: Layout, topology: Topology) -> Iterator[Steps]:
    """Sequences of steps, the simplest first: among equals, the first is taken."""
    scaled = _scaled(src, goal)
    start = scaled[-1].dst if scaled else src
    for reduced in _reductions(start, goal, topology):
        at = reduced[-1].dst if reduced else start
        for moved in _moves(at, goal, topology):
            end = moved[-1].dst if moved else at
            yield (*scaled, *reduced, *moved, *_made_pending(end, goal))


def _scaled(cur: Layout, goal: Layout) -> Steps:
    """An average that is not wanted as one becomes a sum."""
    averaged = tuple(a for a, kind in cur.spec.unreduced if kind == "avg" and goal.pending.get(a) != "avg")
    return (Step("scale", averaged, cur, with_pending(cur, dict.fromkeys(averaged, "sum"))),) if averaged else ()


def _made_pending(cur: Layout, goal: Layout) -> Steps:
    if cur is goal:
        return ()
    kinds = {k for a, k in goal.spec.unreduced if cur.pending.get(a) != k}
    return (Step("pad", (), cur, goal, kinds.pop() if len(kinds) == 1 else "sum"),)


# -- reductions --------------------------------------------------------------------------------------------------------


def _reductions(cur: Layout, goal: Layout, topology: Topology) -> Iterator[Steps]:
    """Ways to reduce what is pending and not wanted so; some leave parts split that are gathered afterwards."""
    todo = tuple(a for a, kind in cur.spec.unreduced if goal.pending.get(a) != kind)
    if not todo:
        yield ()
        return
    for first in _beginnings(cur, goal, todo, topology):
        for steps in _reduced(first[-1].dst if first else cur, goal, todo, topology):
            yield (*first, *steps)
    yield from _reduced_on_arrival(cur, goal, todo)


def _beginnings(cur: Layout, goal: Layout, todo: tuple[str, ...], topology: Topology) -> Iterator[Steps]:
    """What may be done before a reduction, so that less is reduced, or less across nodes."""
    sliced = sliced_towards(cur, goal)
    yield _slice(cur, sliced)
    idle = tuple(a for a in sliced.replicated_axes if a not in goal.dim_of)
    shared = split_further(sliced, idle, _dims_to_cut(sliced, goal, todo)) if idle else None
    crosses = bool(set(todo) & set(topology.crossing_axes(cur.mesh)))
    if shared is not None and (crosses or _is_worth_sharing(cur.mesh.size(todo), cur.mesh.size(idle))):
        yield _slice(cur, shared)  # idle replicas take a share of the work
    if crosses:  # boxes move inside the nodes, so that parts only go across
        ready = without_cuts(goal, todo, sliced.pending)
        axes = leaving_axes(sliced, ready)
        if axes and not set(axes) & set(topology.crossing_axes(cur.mesh)):
            for step in _transports(sliced, ready, axes, topology):
                yield (*_slice(cur, sliced), step)


def _is_worth_sharing(n: int, replicas: int) -> bool:
    """A reduce_scatter over n ranks of N bytes brings (n-1)/n N into each. Where r replicas do a share each and gather, it
    is (n-1)/(nr) N, and (r-1)/(nr) N for the gather."""
    return replicas * (n - 1) > _WORTH_SHARING * (n + replicas - 2)


def _slice(cur: Layout, sliced: Layout) -> Steps:
    return (Step("slice", (), cur, sliced),) if sliced is not cur else ()


def _dims_to_cut(cur: Layout, goal: Layout, axes: Collection[str]) -> set[int]:
    """The dims that a reduction over the axes goes on to split."""
    shards = append_axes(cur, goal, axes)
    return {dim for dim, (a, b) in enumerate(zip(cur.spec.cuts, shards.spec.cuts, strict=True)) if a != b}


def _reduced(cur: Layout, goal: Layout, todo: tuple[str, ...], topology: Topology) -> Iterator[Steps]:
    """One all_reduce; or a reduction to the shards of the goal over the axes that go on to split it, and then the
    others; or to parts that are gathered afterwards. Over nodes also: first inside them, so that parts only go across."""
    if not todo:
        yield ()
        return
    kind, crossing = cur.pending[todo[0]], topology.crossing_axes(cur.mesh)
    shards = append_axes(cur, goal, todo)
    axes = tuple(a for a in todo if a in shards.dim_of)
    if axes:
        for step in _scatters(cur, shards, axes, topology):
            for steps in _reduced(shards, goal, tuple(a for a in todo if a not in axes), topology):
                yield (step, *steps)
    yield (Step("all_reduce", todo, cur, with_pending(cur, dict.fromkeys(todo)), kind),)
    rest = tuple(a for a in todo if a not in axes)
    parts = split_further(shards, rest) if rest else None
    if parts is not None and is_scatter(cur, parts):
        yield (Step("reduce_scatter", todo, cur, parts, kind),)
    inside = tuple(a for a in todo if a not in crossing)
    if 0 < len(inside) < len(todo):
        across = tuple(a for a in todo if a in crossing)
        for near in (split_further(cur, inside, _dims_to_cut(cur, goal, todo)), _all_or_none(cur, goal, inside)):
            for steps in _reduced(near, goal, across, topology) if near is not None else ():
                yield Step("reduce_scatter", inside, cur, near, kind), *steps  # type: ignore[arg-type]


def _all_or_none(cur: Layout, goal: Layout, axes: tuple[str, ...]) -> Layout | None:
    """The shards of the goal over exactly these axes, in equal parts; None where there are none."""
    shards = append_axes(cur, goal, axes)
    return shards if all(a in shards.dim_of for a in axes) and is_scatter(cur, shards) else None


def _scatters(cur: Layout, shards: Layout, axes: tuple[str, ...], topology: Topology) -> Iterator[Step]:
    fits = is_scatter(cur, shards)
    if fits:
        yield Step("reduce_scatter", axes, cur, shards, cur.pending[axes[0]])
    if not fits or _may_beat(topology, "reduce_scatter", cur, axes):
        yield Step("exchange_reduce", axes, cur, shards, cur.pending[axes[0]])


def _may_beat(topology: Topology, op: str, cur: Layout, axes: Sequence[str]) -> bool:
    """Whether an exchange can be cheaper than a collective that does exactly the same."""
    crosses = set(axes) & set(topology.crossing_axes(cur.mesh))
    return bool(crosses) or topology.factor("all_to_all") < topology.factor(op)


def _reduced_on_arrival(cur: Layout, goal: Layout, todo: tuple[str, ...]) -> Iterator[Steps]:
    """One exchange in which every rank receives all contributions to the boxes that it will hold."""
    sliced = sliced_towards(cur, goal)
    reduced = with_pending(sliced, dict.fromkeys(todo))
    target = before_padding(reduced, goal)
    if target is append_axes(sliced, goal, todo) or target is reduced:
        return  # what the scatters do, or an all_reduce
    leaving = leaving_axes(reduced, target)
    axes = tuple(a for a in cur.mesh.axis_names if a in todo or a in leaving)
    yield (*_slice(cur, sliced), Step("exchange_reduce", axes, sliced, target, cur.pending[todo[0]]))


# -- moving boxes ------------------------------------------------------------------------------------------------------


def _moves(cur: Layout, goal: Layout, topology: Topology) -> Iterator[Steps]:
    """Ways to take the split dims where the goal wants them; pending axes only pass along."""
    target = before_padding(cur, goal)
    sliced = sliced_towards(cur, target)
    first = _slice(cur, sliced)
    axes = leaving_axes(sliced, target)
    if sliced is target:
        yield first
        return
    if not axes:
        yield (*first, Step("slice", (), sliced, target))
        return
    transports = list(_transports(sliced, target, axes, topology))
    for step in transports:
        yield (*first, step)
    if topology.crossing_axes(cur.mesh) or not all(_is_balanced(step, topology) for step in transports):
        for step in _by_replicas_and_nodes(cur, target, topology):
            yield (step,)


def _is_balanced(step: Step, topology: Topology) -> bool:
    """Whether nobody sends more than somebody must receive, so that idle replicas need not help."""
    if step.op == "permute" or not step.src.replicated_axes:
        return True
    moved = traffic(step, topology)
    return moved.sent <= moved.received


def _transports(cur: Layout, target: Layout, axes: tuple[str, ...], topology: Topology) -> Iterator[Step]:
    """The collectives over the axes along which something must move."""
    if is_gather(cur, target):
        yield Step("all_gather", axes, cur, target)
        if _may_beat(topology, "all_gather", cur, axes):
            yield Step("exchange", axes, cur, target)
    elif is_permutation(cur, target, axes):
        yield Step("permute", axes, cur, target)
    else:
        yield Step("exchange", axes, cur, target)


def _by_replicas_and_nodes(cur: Layout, target: Layout, topology: Topology) -> Iterator[Step]:
    """Exchanges whose senders are searched rank by rank: among replicas, all of which send, and by nodes."""
    crossing, leaving, replicas = topology.crossing_axes(cur.mesh), leaving_axes(cur, target), cur.replicated_axes
    if cur.mesh.size((*leaving, *replicas)) > _MAX_MEMBERS:
        replicas = tuple(a for a in replicas if a not in crossing)  # those of the own node
    everyone = tuple(a for a in cur.mesh.axis_names if a in leaving or a in replicas)
    in_two = Step("two_phase", everyone, cur, target, topology=topology)
    if set(leaving) & set(crossing) and cur.mesh.size(leaving) <= _MAX_OUTSIDE and shares_evenly(in_two):
        yield in_two
    elif cur.mesh.size(everyone) <= _MAX_MEMBERS:
        if set(everyone) & set(crossing) and _are_few_cells(in_two):
            yield in_two
        if replicas:
            yield Step("exchange", everyone, cur, target, topology=topology)


def _are_few_cells(step: Step) -> bool:
    """Whether two phases can be searched cell by cell, and there is anybody to share a node with."""
    people, nodes = members(step, (0,) * step.src.mesh.ndim), (step.topology or step.src.mesh.topology).node_ids(step.src.mesh)
    together = len({int(nodes[c]) for c in people}) < len(people)
    return together and cells([step.src.box_at(c) for c in people], [step.dst.box_at(c) for c in people]) <= MAX_CELLS


# -- symmetric memory --------------------------------------------------------------------------------------------------


def _faster(step: Step, topology: Topology) -> Step:
    """The step through memory that its ranks share, where that is possible and costs less."""
    if not _may_share(step, topology):
        return step
    shared = replace(step, symmetric=topology.symmetric)
    return shared if seconds(shared, topology) < seconds(step, topology) else step


def _may_share(step: Step, topology: Topology) -> bool:
    if step.is_local or step.op == "two_phase" or step.rounds > 1 or step.transport is not None:
        return False
    if step.op == "all_reduce" and step.kind != "sum":
        return False
    if set(step.axes) & set(topology.crossing_axes(step.src.mesh)) or step.group_size > MAX_RANKS:
        return False
    if part_bytes(step.src) > STAGING_BYTES:
        return False
    return step.src.dtype in COMPUTED if step.reduced_axes else step.src.dtype.itemsize <= 8


# -- memory ------------------------------------------------------------------------------------------------------------


def _fitting(candidates: Sequence[Steps], src: Layout, dst: Layout, max_bytes: int) -> list[Steps]:
    """The candidates that fit, exchanges in as few rounds (doubled until they fit) as that takes."""
    if not isinstance(max_bytes, int) or isinstance(max_bytes, bool):
        raise TypeError(f"max_bytes={max_bytes!r}: write a number of bytes, such as 2**30, or leave it out for no limit")
    options = [*candidates, *(_as_exchanges(steps) for steps in candidates)]
    found = [fitted for steps in options if (fitted := _in_rounds(steps, src, max_bytes)) is not None]
    if not found:
        least = min(peak_bytes(_most_rounds(steps), src) for steps in options)
        raise ValueError(
            f"cannot redistribute {src} to {dst.spec} with max_bytes={max_bytes:,}: a rank holds at least {least:,} bytes at a time "
            f"(its part before, its part after and the smallest buffers); pass max_bytes={least} or more"
        )
    return found


def _as_exchanges(steps: Steps) -> Steps:
    """The same with collectives that need large buffers replaced by exchanges, which can be done in rounds."""
    other = {"all_gather": "exchange", "reduce_scatter": "exchange_reduce", "permute": "exchange"}
    return tuple(replace(step, op=other.get(step.op, step.op)) for step in steps)


def _in_rounds(steps: Steps, src: Layout, max_bytes: int) -> Steps | None:
    """The steps with as few rounds as fit; None where no number of rounds does."""
    fitted: Steps = ()
    for step in steps:
        limit = _round_limit(step)
        while held_bytes((*fitted, step), src)[-1] > max_bytes:
            if step.rounds >= limit:
                return None
            step = replace(step, rounds=min(2 * step.rounds, limit))
        fitted = (*fitted, step)
    return fitted


def _most_rounds(steps: Steps) -> Steps:
    return tuple(replace(step, rounds=_round_limit(step)) for step in steps)


def _round_limit(step: Step) -> int:
    """Rounds after which buffers get no smaller: one element of every box's longest dim at a time."""
    if step.op in ("exchange", "two_phase", "exchange_reduce"):
        return max(1, *step.src.shape, 1)
    return 1
