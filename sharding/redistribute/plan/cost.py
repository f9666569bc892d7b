"""How long a step takes, estimated from launches, bytes on the slower link, and copies in memory.

    seconds = launches x latency + max(bytes / local, network bytes / network) x factor + copied
    bytes / memory

Bytes are those of the busiest rank, the larger of the bytes sent and received. Latencies and
bandwidths are the topology's.
"""

from __future__ import annotations

from ....mesh.topology import Link, Topology
from .memory import is_contiguous_gather, part_bytes
from .steps import Step
from .traffic import Traffic, traffic

_CALIBRATED_AS = {
    "all_to_all_v": "all_to_all",
    "permute": "all_to_all",
    "hierarchical_all_to_all_v": "all_to_all",
    "all_to_all_reduce": "all_to_all",
}


def seconds(step: Step, topology: Topology) -> float:
    """Return the estimated time of a step on its slowest rank."""
    moved = traffic(step, topology)
    if step.symmetric is not None:
        return _symmetric_seconds(step, moved, step.symmetric, topology)
    copies = _copied_bytes(step, moved) / topology.memory
    if step.is_local:
        return copies
    if step.op == "hierarchical_all_to_all_v":
        latency = step.rounds * (topology.network.latency + topology.local.latency)
    else:
        latency = step.rounds * (topology.network if moved.network else topology.local).latency
    local = max(moved.received, moved.sent) / topology.local.bandwidth
    network = moved.network / topology.network.bandwidth
    return (
        latency
        + max(local, network) * topology.factor(_CALIBRATED_AS.get(step.op, step.op))
        + copies
    )


def _symmetric_seconds(step: Step, moved: Traffic, link: Link, topology: Topology) -> float:
    """Return the time by kernels that read peers' memory: one launch, no buffer to unpack."""
    size = part_bytes(step.src)
    if step.op == "all_reduce":
        return min(_shots(size, step.group_size, link)) + size / topology.memory
    return link.latency + moved.received / link.bandwidth + size / topology.memory


def _shots(size: int, ranks: int, link: Link) -> tuple[float, float]:
    """Return the times of a one-shot and a two-shot all_reduce.

    In one shot every rank adds up everything; two are a reduce_scatter, then an all_gather.
    """
    crossing = (ranks - 1) * size / link.bandwidth
    return link.latency + crossing, 2 * link.latency + 2 * crossing / ranks


def takes_two_shots(size: int, ranks: int, link: Link) -> bool:
    """Return whether an all_reduce of so many bytes is faster in two shots."""
    one, two = _shots(size, ranks, link)
    return two < one


def memory_bytes(step: Step, topology: Topology) -> int:
    """Return the bytes that a rank reads and writes in its memory around the collective.

    That is to pack, unpack, cast, quantize and add up: 0 if the collective reads its input and
    writes its result in place. What the collective itself reads and writes is not counted.
    """
    moved = traffic(step, topology)
    if step.symmetric is not None or (step.op == "all_reduce" and step.transport is None):
        return 2 * part_bytes(step.src)  # the copy that it works on, or that the peers read
    # what is packed includes the rank's own contribution
    if step.op == "all_to_all_reduce" and step.transport is None:
        return 2 * _packed_bytes(step, moved) + moved.received + 2 * part_bytes(step.dst)
    return 2 * _copied_bytes(step, moved)


def _copied_bytes(step: Step, moved: Traffic) -> int:
    """Return the bytes that a rank copies, each read and written."""
    op, before, after = step.op, part_bytes(step.src), part_bytes(step.dst)
    if step.transport is not None:  # floats to codes, codes to floats
        return (before + moved.sent + moved.received + after) // 2
    # the copy that an all_reduce works on is taken to cost no time
    if op in ("slice", "all_reduce"):
        return 0
    if step.is_local:
        return after
    packed = _packed_bytes(step, moved)
    if op == "reduce_scatter":
        return packed
    if op == "all_to_all_reduce":  # every contribution is read once to be added up
        return packed + moved.received + after
    unpacked = after if op == "all_gather" else moved.received
    return packed + (0 if is_contiguous_gather(step.src, step.dst) else unpacked)


def _packed_bytes(step: Step, moved: Traffic) -> int:
    """Return the bytes that are packed: 0 if the send buffer is the tensor itself."""
    before = part_bytes(step.src)
    packed = 0 if step.op == "all_gather" else before if step.op == "reduce_scatter" else moved.sent
    return 0 if packed <= before and is_contiguous_gather(step.dst, step.src) else packed
