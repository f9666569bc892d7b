"""What a mesh is made of: links, their speeds, and their measurement."""

from shardmesh.mesh import Link, Topology, calibrate

__all__ = [
    "Link",
    "Topology",
    "calibrate",
]
