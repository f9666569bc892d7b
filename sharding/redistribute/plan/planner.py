"""`plan`: the cheapest of the candidates that fits into the memory allowed.

`tests/sharding/redistribute/plan/test_optimal.py` searches all sequences of steps on small meshes.
Plans that reduce nothing cost as little as the cheapest sequence. Plans of reductions cost at most
1.5 times as much on one node and twice as much over nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
from ...layout.layout import Layout, distinct_mesh_names
from ...layout.spec import EACH
from .candidates import Steps, candidates
from .cost import seconds
from .intermediate_layouts import without_trivial_axes
from .memory import held_bytes, part_bytes, peak_bytes
from .steps import Plan, Step

_WORTH_A_LAUNCH = 1.25  # how many times cheaper a plan with more launches must be


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
        max_bytes: the most bytes that a rank may hold at one time: its part before, its part after
            and buffers. Collectives are run as all_to_all_v in rounds until they fit.
        accumulate_dtype: torch.float32 to add up 16-bit floats in fp32. They are reduced by
            all_to_all_reduce then, in which they are sent in 16 bits; a ring adds up in the dtype
            that is sent, and rounds at every rank.
        transport: "int8" or "fp8" to quantize the data sent, see `kernels.quantize`; reductions
            become all_to_all_reduce.

    Raises:
        ValueError: the layouts have different meshes, shapes or dtypes; no plan fits into
            `max_bytes` (the message gives the smallest peak); an unknown `accumulate_dtype` or
            `transport`; a transport for anything but 16- and 32-bit floats, or for pending values
            that are combined other than by adding.

    Communication: none; nothing is run.

    Example:
        >>> mesh = AbstractMesh((4,), ("x",))
        >>> plan(Layout.of(mesh, P("x"), (8, 8)), Layout.of(mesh, P(None, "x"), (8, 8)))
        Plan(all_to_all_v over x: P('x', None) -> P(None, 'x'))
    """
    _check_compatible(src, dst)
    topology = src.mesh.topology if topology is None else topology
    dst = Layout.of(src.mesh, dst.spec, dst.shape, dst.dtype)  # an equal mesh may be another object
    sequences = list(candidates(without_trivial_axes(src), without_trivial_axes(dst), topology))
    if accumulate_dtype is not None:
        sequences = [_accumulating_steps(steps, accumulate_dtype) for steps in sequences]
    if transport is not None:
        check_transport(transport, src, dst)
        sequences = [_quantized_steps(steps, transport) for steps in sequences]
    if max_bytes is not None:
        sequences = _fitting_sequences(sequences, src, dst, max_bytes)
    if topology.symmetric is not None:
        sequences = [
            tuple(_symmetric_if_faster(step, topology) for step in steps) for steps in sequences
        ]
    return Plan(src, dst, _cheapest(sequences, topology, src.mesh), topology)


def _check_compatible(src: Layout, dst: Layout) -> None:
    for name in ("mesh", "shape", "dtype"):
        src_value, dst_value = getattr(src, name), getattr(dst, name)
        if src_value != dst_value:
            src_value, dst_value = (
                distinct_mesh_names(src_value, dst_value)
                if name == "mesh"
                else (src_value, dst_value)
            )
            raise ValueError(
                f"cannot redistribute {src} to {dst}: the {name} must be the same, got {src_value} "
                f"and {dst_value}"
            )
    separate = [
        axis for axis, kind in src.spec.unreduced if kind == EACH and dst.pending.get(axis) != EACH
    ]
    if separate:
        raise ValueError(
            f"cannot redistribute {src}: on axis {separate[0]!r} every rank holds the gradient of "
            "its own part of a pending tensor, and these cannot be combined into one value; read "
            "them one by one with x.to_local()"
        )


def _cheapest(sequences: Sequence[Steps], topology: Topology, mesh: AbstractMesh) -> Steps:
    """Return the cheapest sequence; on one node, one of fewer launches unless it costs much more.

    Estimates include no cost of a launch beyond its latency (above all, waiting for the slowest
    rank), so a further launch must save many bytes.
    """
    if len(sequences) == 1:
        return sequences[0]
    price = _cached_seconds(topology)
    priced = [(sum(map(price, steps)), steps) for steps in sequences]
    least, best = min(priced, key=itemgetter(0))
    if topology.crossing_axes(mesh):
        return best
    near = [
        steps
        for cost, steps in sorted(priced, key=itemgetter(0))
        if cost <= _WORTH_A_LAUNCH * least
    ]
    return min(near, key=lambda steps: sum(step.launches for step in steps))


def _cached_seconds(topology: Topology) -> Callable[[Step], float]:
    """Return `seconds` with a cache: candidates have many steps in common."""
    known: dict[object, float] = {}

    def price(step: Step) -> float:
        key = (
            step.op,
            step.axes,
            step.src,
            step.dst,
            step.rounds,
            step.variant,
            step.topology is None,
        )
        if key not in known:
            known[key] = seconds(step, topology)
        return known[key]

    return price


# -- dtypes on the way -----------------------------------------------------------------------------


def _accumulating_steps(steps: Steps, dtype: torch.dtype) -> Steps:
    """Return the steps with 16-bit sums done by all_to_all_reduce, which adds up in fp32."""
    if dtype is not torch.float32:
        raise ValueError(
            f"accumulate_dtype must be torch.float32 or None, got {dtype}: only 16-bit floats are "
            "accumulated in another dtype"
        )
    if not steps or not (steps[0].src.dtype.is_floating_point and steps[0].src.dtype.itemsize == 2):
        return steps
    adding = {"reduce_scatter", "all_reduce"}
    return tuple(
        replace(s, op="all_to_all_reduce") if s.op in adding and s.kind == "sum" else s
        for s in steps
    )


_QUANTIZED_AS = {
    "reduce_scatter": "all_to_all_reduce",
    "all_reduce": "all_to_all_reduce",
    "hierarchical_all_to_all_v": "all_to_all_v",
}


def check_transport(transport: str, src: Layout, dst: Layout) -> None:
    """Raise ValueError if values cannot be quantized on the way from `src` to `dst`."""
    if transport not in FORMATS:
        raise ValueError(
            f"transport must be {' or '.join(map(repr, FORMATS))} or None, got {transport!r}"
        )
    if src.dtype not in QUANTIZED:
        raise ValueError(
            f"cannot redistribute {src} with transport={transport!r}: only 16- and 32-bit floats "
            "can be quantized; leave transport out, or cast first"
        )
    reduced = {kind for axis, kind in src.spec.unreduced if dst.pending.get(axis) != kind} - {
        "sum",
        "avg",
    }
    if reduced:
        raise ValueError(
            f"cannot redistribute {src} to {dst.spec} with transport={transport!r}: quantized "
            f"values can be added up, but not combined by {sorted(reduced)[0]}; reduce first "
            "without transport"
        )


def _quantized_steps(steps: Steps, transport: str) -> Steps:
    """Return the steps with quantized transfers.

    A ring would quantize again at every rank, a hierarchical step twice.
    """
    return tuple(
        s if s.is_local else replace(s, op=_QUANTIZED_AS.get(s.op, s.op), transport=transport)
        for s in steps
    )


# -- symmetric memory ------------------------------------------------------------------------------


def _symmetric_if_faster(step: Step, topology: Topology) -> Step:
    """Return the step run through symmetric memory if that is possible and costs less."""
    if not _can_be_symmetric(step, topology):
        return step
    symmetric = replace(step, symmetric=topology.symmetric)
    return symmetric if seconds(symmetric, topology) < seconds(step, topology) else step


def _can_be_symmetric(step: Step, topology: Topology) -> bool:
    if (
        step.is_local
        or step.op == "hierarchical_all_to_all_v"
        or step.rounds > 1
        or step.transport is not None
    ):
        return False
    if step.op == "all_reduce" and step.kind != "sum":
        return False
    if set(step.axes) & set(topology.crossing_axes(step.src.mesh)) or step.group_size > MAX_RANKS:
        return False
    if part_bytes(step.src) > STAGING_BYTES:
        return False
    return step.src.dtype in COMPUTED if step.reduced_axes else step.src.dtype.itemsize <= 8


# -- memory ----------------------------------------------------------------------------------------

_IN_ROUNDS = {
    "all_gather": "all_to_all_v",
    "reduce_scatter": "all_to_all_reduce",
    "permute": "all_to_all_v",
}


def _fitting_sequences(
    sequences: Sequence[Steps], src: Layout, dst: Layout, max_bytes: int
) -> list[Steps]:
    """Return the candidates that fit into `max_bytes`, with as few rounds as that takes."""
    if not isinstance(max_bytes, int) or isinstance(max_bytes, bool):
        raise TypeError(
            "max_bytes must be a number of bytes, such as 2**30, or None for no limit, got "
            f"{max_bytes!r}"
        )
    options = [*sequences, *[as_all_to_all(steps) for steps in sequences]]
    fitting = [
        fitted for steps in options if (fitted := _with_rounds(steps, src, max_bytes)) is not None
    ]
    if not fitting:
        most_rounds = [
            tuple(replace(step, rounds=_max_rounds(step)) for step in steps) for steps in options
        ]
        least = min(peak_bytes(steps, src) for steps in most_rounds)
        raise ValueError(
            f"cannot redistribute {src} to {dst.spec} with max_bytes={max_bytes:,}: a rank holds "
            f"at least {least:,} bytes at one time (its part before, its part after and the "
            f"smallest buffers); pass max_bytes={least} or more"
        )
    return fitting


def as_all_to_all(steps: Steps) -> Steps:
    """Return the steps with an all_to_all in place of collectives that need large buffers.

    It can be run in rounds.
    """
    return tuple(replace(step, op=_IN_ROUNDS.get(step.op, step.op)) for step in steps)


def _with_rounds(steps: Steps, src: Layout, max_bytes: int) -> Steps | None:
    """Return the steps with as few rounds as fit; None if no number of rounds does."""
    fitted: Steps = ()
    for step in steps:
        limit = _max_rounds(step)
        while held_bytes((*fitted, step), src)[-1] > max_bytes:
            if step.rounds >= limit:
                return None
            step = replace(step, rounds=min(2 * step.rounds, limit))
        fitted = (*fitted, step)
    return fitted


def _max_rounds(step: Step) -> int:
    """Return the number of rounds beyond which buffers get no smaller.

    One element of every box's longest dim at a time.
    """
    if step.op in ("all_to_all_v", "hierarchical_all_to_all_v", "all_to_all_reduce"):
        return max(1, *step.src.shape, 1)
    return 1
