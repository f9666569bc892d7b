"""Topology: which ranks share a node, and the cost of moving bytes in and between nodes."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any, Protocol

import numpy as np

from . import errors
from .text import whole_number

OPS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")


class MeshOfRanks(Protocol):
    """What a topology reads of an `AbstractMesh`, and caches there."""

    axis_names: tuple[str, ...]
    shape: Any
    ndim: int
    ranks: np.ndarray
    _node_ids: dict[Any, np.ndarray]
    _crossing_axes: dict[Any, tuple[str, ...]]

    def size(self, axis: str, /) -> int: ...

    def _inherited_node_ids(self, topology: Topology) -> np.ndarray | None: ...


@dataclass(frozen=True, slots=True)
class Link:
    """Link(latency, bandwidth): the cost of one kind of connection between ranks.

    A collective in which no rank sends or receives more than b bytes takes about
    `latency + b / bandwidth` seconds.

    Attributes:
        latency: seconds per collective, regardless of its size.
        bandwidth: bytes per second into one rank, and at the same time out of it.

    Raises: MeshError when a number is not positive and finite.
    """

    latency: float
    bandwidth: float

    def __post_init__(self) -> None:
        _check_positive("Link", latency=self.latency, bandwidth=self.bandwidth)

    def __str__(self) -> str:
        return f"{seconds_text(self.latency)} + {_rate(self.bandwidth)}"


@dataclass(frozen=True)
class Topology:
    """Topology(local, network, memory): the cost of a plan's steps, and which ranks share a node.

    Nodes are given in one of two ways: `node_size=8` if the global ranks 0-7, 8-15, ... share a
    node each; `crossing=("dp",)` if ranks with the same index along "dp" do. With neither, all
    ranks share one node.

        mesh (dp=2, tp=4)   [0 1 2 3]   nodes, with crossing=("dp",) or node_size=4:   [0 0 0 0]
                            [4 5 6 7]                                                  [1 1 1 1]

    Immutable and hashable: topologies with the same numbers are equal.

    Attributes:
        local: between the ranks of one node.
        network: between nodes.
        memory: bytes per second that a rank copies inside its own memory (a byte read and written
            counts once).
        node_size: number of consecutive global ranks that share a node; None if `crossing` is given
            or all ranks share one.
        crossing: the axes whose ranks are in different nodes; empty if `node_size` is given or
            there is one node.
        factors: (op, factor) pairs (or a mapping) for `factor`.
        symmetric: the cost of a collective done inside a node by kernels that read the memory of
            the peers; None if there is no such memory or it was not measured (`calibrate` does). If
            set, plans use these kernels where they are faster.
        rails: number of network links over which one ring collective leaves a node at a time; None:
            one per rank, as NCCL does with a network card per GPU. Gloo's rings have one.

    Raises: MeshError when a number is not positive, node_size and crossing are both given, or an op
    is unknown.

    >>> from shardmesh.mesh import AbstractMesh, Link, Topology
    >>> two_nodes = Topology(Link(1e-5, 4e11), Link(3e-5, 5e10), memory=1e12, node_size=4)
    >>> two_nodes.node_ids(AbstractMesh((2, 4), ("dp", "tp"))).tolist()
    [[0, 0, 0, 0], [1, 1, 1, 1]]
    >>> two_nodes.crossing_axes(AbstractMesh((2, 4), ("dp", "tp")))
    ('dp',)
    """

    local: Link
    network: Link
    memory: float
    node_size: int | None = None
    crossing: tuple[str, ...] = ()
    factors: tuple[tuple[str, float], ...] | Mapping[str, float] = ()
    rails: int | None = None
    symmetric: Link | None = None

    def __post_init__(self) -> None:
        _check_positive("Topology", memory=self.memory)
        object.__setattr__(self, "crossing", _names(self.crossing))
        object.__setattr__(self, "factors", _pairs(self.factors))
        if self.node_size is not None and (
            not isinstance(self.node_size, int) or self.node_size < 1
        ):
            raise errors.MeshError(
                f"Topology(node_size={self.node_size!r}): must be the number of consecutive ranks "
                "that share a node, at least 1, or None if all do."
            )
        if self.node_size is not None and self.crossing:
            raise errors.MeshError(
                f"Topology(node_size={self.node_size}, crossing={self.crossing}): both define "
                "which ranks share a node; give one of them."
            )

    def factor(self, op: str) -> float:
        """Return the factor on the time of a collective's bytes, to `bandwidth`; 1.0 if unknown."""
        return dict(self.factors).get(op, 1.0)

    def node_ids(self, mesh: MeshOfRanks) -> np.ndarray:
        """Return the node of each rank of the mesh.

        int64 in the shape of the mesh, read-only, cached.

        Ranks with the same number share a node; the numbers need not be consecutive. A part of a
        mesh (`mesh["tp"]`, `mesh.flatten()`) that inherits its topology has the nodes that its
        ranks have in the whole mesh.

        Raises: MeshError when a crossing axis is not an axis of the mesh.
        """
        ids = mesh._node_ids.get(self)
        if ids is None:
            ids = np.ascontiguousarray(self._find_node_ids(mesh))
            ids.setflags(write=False)
            mesh._node_ids[self] = ids
        return ids

    def _find_node_ids(self, mesh: MeshOfRanks) -> np.ndarray:
        inherited = mesh._inherited_node_ids(self)
        if inherited is not None:
            return inherited
        if self.node_size is not None:
            return mesh.ranks // self.node_size
        sizes = [mesh.size(name) if name in self.crossing else 1 for name in mesh.axis_names]
        self.check_axes(mesh)
        return np.broadcast_to(np.arange(np.prod(sizes), dtype=np.int64).reshape(sizes), mesh.shape)

    def crossing_axes(self, mesh: MeshOfRanks) -> tuple[str, ...]:
        """Return the axes along which some neighbours are in different nodes.

        In the order of the mesh; cached.

        Raises: MeshError when a crossing axis is not an axis of the mesh.
        """
        crossing = mesh._crossing_axes.get(self)
        if crossing is None:
            ids = self.node_ids(mesh)
            differs = [bool(np.any(np.diff(ids, axis=axis))) for axis in range(mesh.ndim)]
            crossing = tuple(
                name for name, crosses in zip(mesh.axis_names, differs, strict=True) if crosses
            )
            mesh._crossing_axes[self] = crossing
        return crossing

    def nodes(self, mesh: MeshOfRanks) -> int:
        """Return the number of nodes of the mesh's ranks. Raises: MeshError as `node_ids`."""
        return len(np.unique(self.node_ids(mesh)))

    def check_axes(self, mesh: MeshOfRanks) -> None:
        """Raise MeshError when a crossing axis is not an axis of the mesh."""
        unknown = [name for name in self.crossing if name not in mesh.axis_names]
        if unknown:
            raise errors.MeshError(
                f"a topology whose crossing axes are {self.crossing} does not fit {mesh!r}: "
                f"{unknown[0]!r} is not one of its axes {list(mesh.axis_names)}. Give crossing= "
                "with some of these names, or node_size=."
            )

    def part(self, made_of: Mapping[str, Sequence[str]]) -> Topology:
        """Return the topology of a part whose axes are made of these axes of the mesh.

        An axis crosses if any of those does.
        """
        names: list[str] = []
        for axis in self.crossing:
            names += [name for name, axes in made_of.items() if axis in axes]
        part_crossing = tuple(dict.fromkeys(names))
        return self if part_crossing == self.crossing else replace(self, crossing=part_crossing)

    @staticmethod
    def default(
        device_type: str, node_size: int | None = None, crossing: Iterable[str] = ()
    ) -> Topology:
        """Return data sheet values for "cuda", measured ones for "cpu" (and any other device).

        `calibrate(mesh)` measures those of this machine.
        """
        local, network, memory = _CUDA if device_type == "cuda" else _CPU
        rails = None if device_type == "cuda" else 1
        return Topology(local, network, memory, node_size, _names(crossing), rails=rails)

    def __str__(self) -> str:
        nodes = f"nodes of {self.node_size} ranks" if self.node_size is not None else "one node"
        if self.crossing:
            nodes = f"nodes along {', '.join(self.crossing)}"
        factors = "".join(f", {op} x{factor:.3g}" for op, factor in dict(self.factors).items())
        shared = "" if self.symmetric is None else f", shared memory {self.symmetric}"
        return (
            f"{nodes}: local {self.local}, network {self.network}, memory "
            f"{_rate(self.memory)}{factors}{shared}"
        )


def torchrun_node_size(world_size: int, env: Mapping[str, str] | None = None) -> int | None:
    """Return the number of consecutive ranks that share a node, from torchrun's variables.

    None for one node or uneven nodes.

    LOCAL_WORLD_SIZE is the size of this rank's own node. Whether all nodes have this size follows
    only from GROUP_WORLD_SIZE, the number of nodes, so if that is set their product must be the
    world size.
    """
    env = os.environ if env is None else env
    text = env.get("LOCAL_WORLD_SIZE", "")
    size = whole_number(text) or 0
    if not 0 < size < world_size or world_size % size:
        return None
    return (
        size
        if env.get("GROUP_WORLD_SIZE", str(world_size // size)) == str(world_size // size)
        else None
    )


def _check_positive(what: str, **numbers: Any) -> None:
    for name, value in numbers.items():
        if not isinstance(value, int | float) or not isfinite(value) or value <= 0:
            raise errors.MeshError(f"{what}({name}={value!r}): must be a positive, finite number.")


def _names(axes: Iterable[str]) -> tuple[str, ...]:
    return (axes,) if isinstance(axes, str) else tuple(axes)


def _pairs(
    factors: Mapping[str, float] | Iterable[tuple[str, float]],
) -> tuple[tuple[str, float], ...]:
    factor_of_op = dict(factors)
    for op, factor in factor_of_op.items():
        if op not in OPS:
            raise errors.MeshError(
                f"Topology(factors={factor_of_op}): {op!r} is not one of {list(OPS)}."
            )
        _check_positive("Topology", **{f"factors of {op}": factor})
    return tuple(sorted(factor_of_op.items()))


def seconds_text(value: float) -> str:
    """Return a time with a suitable unit: 1.25e-05 -> "12.5 us"."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value / 1e-6:.3g} us"


def _rate(value: float) -> str:
    for unit, size in (("TB/s", 1e12), ("GB/s", 1e9), ("MB/s", 1e6), ("kB/s", 1e3)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.3g} B/s"


# GPUs of the DGX H100 kind. NVLink 4: 900 GB/s to and from each GPU together (NVIDIA H100 data
# sheet), so half each way.
_NVLINK_BANDWIDTH = 450e9
# One 400 Gb/s InfiniBand NDR port per GPU (DGX H100 data sheet: eight ConnectX-7 ports of 400
# Gb/s).
_INFINIBAND_BANDWIDTH = 400e9 / 8
# HBM3 of the H100 SXM: 3.35 TB/s (data sheet); a copy reads and writes each byte.
_HBM_COPY_BANDWIDTH = 3.35e12 / 2
# NCCL's own model of a ring with its low-latency protocol (src/graph/tuning.cc): 6.6 us, and 0.6 us
# per step over NVLink: an all_gather of 8 GPUs takes 6.6 + 7 * 0.6.
_NVLINK_LATENCY = 11e-6
# The same over two such nodes: 6.6 us, 14 steps that cost at least the 1 us of posting to the
# network, one of 2.7 us.
_INFINIBAND_LATENCY = 23e-6

# Measured with calibrate(): gloo, two processes on two cores of a server, 400-600 us and 0.48-0.66
# GB/s.
_GLOO_LATENCY, _GLOO_BANDWIDTH = 4e-4, 5e8
# The same call: a copy of 4 MiB by both at once, 5.1-5.8 GB/s.
_CPU_COPY_BANDWIDTH = 5e9
# 10 Gb/s Ethernet shared by the eight ranks of a node; gloo's own latency is larger than that of
# the network.
_ETHERNET_BANDWIDTH = 10e9 / 8 / 8

_CUDA = (
    Link(_NVLINK_LATENCY, _NVLINK_BANDWIDTH),
    Link(_INFINIBAND_LATENCY, _INFINIBAND_BANDWIDTH),
    _HBM_COPY_BANDWIDTH,
)
_CPU = (
    Link(_GLOO_LATENCY, _GLOO_BANDWIDTH),
    Link(_GLOO_LATENCY, _ETHERNET_BANDWIDTH),
    _CPU_COPY_BANDWIDTH,
)
