"""What a step costs in time: launches, bytes on the slower link, and copies in memory.

    seconds = launches x latency + max(bytes / local, network bytes / network) x factor + copied bytes / memory

Bytes are those of the busiest rank, the larger of what it sends and what it receives. The numbers are the topology's.
"""

from __future__ import annotations

from ...mesh.topology import Topology
from .memory import arrives_in_place, part_bytes
from .steps import Step
from .traffic import Traffic, traffic

_MEASURED_AS = {"exchange": "all_to_all", "permute": "all_to_all", "two_phase": "all_to_all", "exchange_reduce": "all_to_all"}


def seconds(step: Step, topology: Topology) -> float:
    """Estimated time of a step, of its slowest rank."""
    moved = traffic(step, topology)
    copies = _copied(step, moved) / topology.memory
    if step.is_local:
        return copies
    inside = max(moved.received, moved.sent) / topology.local.bandwidth
    across = moved.network / topology.network.bandwidth
    factor = topology.factor(_MEASURED_AS.get(step.op, step.op))
    return _latency(step, topology, bool(moved.network)) + max(inside, across) * factor + copies


def _latency(step: Step, topology: Topology, crosses: bool) -> float:
    if step.op == "two_phase":
        return step.rounds * (topology.network.latency + topology.local.latency)
    return step.rounds * (topology.network if crosses else topology.local).latency


def _copied(step: Step, moved: Traffic) -> int:
    """Bytes that a rank copies in its own memory around the collective: packing and unpacking."""
    op, before, after = step.op, part_bytes(step.src), part_bytes(step.dst)
    if op in ("slice", "all_reduce"):  # (the copy that an all_reduce works on counts as no time)
        return 0
    if step.is_local:
        return after
    packed = 0 if op == "all_gather" else before if op == "reduce_scatter" else moved.sent
    if packed and packed <= before and arrives_in_place(step.dst, step.src, step.axes):
        packed = 0
    if op == "reduce_scatter":
        return packed
    if op == "exchange_reduce":  # every contribution is read once to be summed
        return packed + moved.received + after
    placed = after if op == "all_gather" else moved.received
    return packed + (0 if arrives_in_place(step.src, step.dst, step.axes) else placed)
