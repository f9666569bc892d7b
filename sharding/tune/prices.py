"""How long a collective takes: by a calibrated topology, a table of measurements, or a formula.

    calibrated   `sm.topology.calibrate` has measured this machine
    table        measured latency and bandwidth for so many ranks of a node of this device
    data sheet   latency + max(bytes / local, network bytes / network), of the device's data sheet
    topology     the same, of a topology that the caller gives

Over more than two nodes a ring adds a hop for each node more, which a calibrated topology has not
measured either.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ...mesh.topology import Topology
from .devices import Device
from .form import Group

# A step of a ring over the network in NCCL's model (src/graph/tuning.cc), as in mesh/topology.py.
_HOP = 2.7e-6


@dataclass(frozen=True)
class Prices:
    """Prices(device, topology, node): seconds of computation and of communication.

    Attributes:
        device: the rates of computation.
        topology: links.
        node: devices of a node.
    """

    device: Device
    topology: Topology
    node: int

    @cached_property
    def _is_own_topology(self) -> bool:
        return self.topology == self.device.topology(self.node)

    def source(self, group: Group, op: str) -> str:
        """Return what prices a collective of a group; see `seconds`."""
        if self.topology.factors:
            return "calibrated"
        if not self._is_own_topology:
            return "topology"
        return "data sheet" if self._table(group, op) is None else "table"

    def waited_for(self, op: str, received: float, group: Group, launches: float = 1) -> float:
        """Return the time of collectives that computation waits for; see `seconds`."""
        arrival = self.device.arrival.get(group.size, 0.0)
        return self.seconds(op, received, group, launches) + launches * arrival

    def seconds(self, op: str, received: float, group: Group, launches: float = 1) -> float:
        """Return the time of collectives that bring each rank so many bytes in all.

        Args:
            op: "all_gather", "reduce_scatter", "all_reduce", "all_to_all" or "permute".
            received: bytes that each rank receives, in a ring.
            group: the ranks.
            launches: how many collectives.
        """
        n = group.size
        if n == 1 or not launches:
            return 0.0
        row = self._table(group, op)
        if row is not None:
            latency, bandwidth = row
            passes = 2 if op == "all_reduce" else 1
            return launches * latency + received * n / (n - 1) / passes / bandwidth
        link = self.topology.network if group.crosses else self.topology.local
        latency = link.latency
        network = 0.0
        if group.crosses:
            nodes = n // group.in_node
            steps = 2 if op == "all_reduce" else 1
            if op != "permute":
                latency += steps * max(0, nodes - 2) * _HOP
            rails = group.in_node
            if self.topology.rails is not None:
                rails = min(rails, self.topology.rails)
            # What the node lacks enters it once, over the rails of the group's ranks. Of a ring of
            # permutes all enters over the port of the rank at the node's edge.
            if op == "permute":
                network = received
            else:
                network = received * (n - group.in_node) / (n - 1) / rails
            if op == "all_to_all":  # each rank lacks something else
                network *= group.in_node
            network /= self.topology.network.bandwidth
        moving = max(received / self.topology.local.bandwidth, network)
        factor = self.topology.factor("all_to_all" if op == "permute" else op)
        return launches * latency + moving * factor

    def _table(self, group: Group, op: str) -> tuple[float, float] | None:
        """Return latency and bandwidth of a table for a collective inside of a node."""
        if group.crosses or not self._is_own_topology:
            return None
        return self.device.collectives.get(op, {}).get(group.size)
