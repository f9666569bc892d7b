"""What a step costs in time: launches, bytes on the slower link, and copies in memory.

    seconds = launches x latency + max(bytes / local, network bytes / network) x factor + copied bytes / memory

Bytes are those of the busiest rank, the larger of what it sends and what it receives. The numbers are the topology's.
"""

from __future__ import annotations

from ....mesh.topology import Link, Topology
from .memory import arrives_in_place, part_bytes
from .steps import Step
from .traffic import Traffic, traffic

_MEASURED_AS = {"exchange": "all_to_all", "permute": "all_to_all", "two_phase": "all_to_all", "exchange_reduce": "all_to_all"}


def seconds(step: Step, topology: Topology) -> float:
    """Estimated time of a step, of its slowest rank."""
    moved = traffic(step, topology)
    if step.symmetric is not None:
        return _symmetric_seconds(step, moved, step.symmetric, topology)
    copies = _copied(step, moved) / topology.memory
    if step.is_local:
        return copies
    inside = max(moved.received, moved.sent) / topology.local.bandwidth
    across = moved.network / topology.network.bandwidth
    factor = topology.factor(_MEASURED_AS.get(step.op, step.op))
    return _latency(step, topology, bool(moved.network)) + max(inside, across) * factor + copies


def _symmetric_seconds(step: Step, moved: Traffic, link: Link, topology: Topology) -> float:
    """By kernels that read the peers' memory: one launch, and no buffers to unpack from."""
    size = part_bytes(step.src)
    if step.op == "all_reduce":
        one, two = _shots(size, step.group_size, link)
        return min(one, two) + size / topology.memory
    return link.latency + moved.received / link.bandwidth + size / topology.memory


def _shots(size: int, ranks: int, link: Link) -> tuple[float, float]:
    """An all-reduce in which every rank adds up everything, and one in which each adds up its share and all read those."""
    crossing = (ranks - 1) * size / link.bandwidth
    return link.latency + crossing, 2 * link.latency + 2 * crossing / ranks


def takes_two_shots(size: int, ranks: int, link: Link) -> bool:
    """Whether an all-reduce of so many bytes is faster in two shots."""
    one, two = _shots(size, ranks, link)
    return two < one


def _latency(step: Step, topology: Topology, crosses: bool) -> float:
    if step.op == "two_phase":
        return step.rounds * (topology.network.latency + topology.local.latency)
    return step.rounds * (topology.network if crosses else topology.local).latency


def memory_bytes(step: Step, topology: Topology) -> int:
    """Bytes that a rank reads and writes in its own memory around the collective: to pack and unpack, cast or quantise, and
    add up; 0 where all is sent from where it lies and arrives where it belongs. What the collective itself does is not in it."""
    moved = traffic(step, topology)
    if step.symmetric is not None or (step.op == "all_reduce" and step.transport is None):
        return 2 * part_bytes(step.src)  # the copy that it works on, or that the peers read
    if step.op == "exchange_reduce" and step.transport is None:  # with the own contribution
        return 2 * _packed(step, moved) + moved.received + 2 * part_bytes(step.dst)
    return 2 * _copied(step, moved)


def _copied(step: Step, moved: Traffic) -> int:
    """Bytes that a rank copies, each read and written."""
    op, before, after = step.op, part_bytes(step.src), part_bytes(step.dst)
    if step.transport is not None:  # floats to codes, codes to floats
        return (before + moved.sent + moved.received + after) // 2
    if op in ("slice", "all_reduce"):  # (the copy that an all_reduce works on counts as no time)
        return 0
    if step.is_local:
        return after
    packed = _packed(step, moved)
    if op == "reduce_scatter":
        return packed
    if op == "exchange_reduce":  # every contribution is read once to be summed
        return packed + moved.received + after
    placed = after if op == "all_gather" else moved.received
    return packed + (0 if arrives_in_place(step.src, step.dst, step.axes) else placed)


def _packed(step: Step, moved: Traffic) -> int:
    """Bytes that are packed: none where they lie in order already."""
    before = part_bytes(step.src)
    packed = 0 if step.op == "all_gather" else before if step.op == "reduce_scatter" else moved.sent
    return 0 if packed <= before and arrives_in_place(step.dst, step.src, step.axes) else packed
