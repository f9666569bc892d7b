"""calibrate: measure communication on a mesh, to price plans with the numbers of this machine."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from ..kernels.symmetric import all_gather
from . import errors
from .abstract_mesh import AbstractMesh
from .comm.agreement import same_on_all
from .comm.group import Group
from .comm.symmetric_memory import peers_of
from .device_mesh import DeviceMesh
from .topology import OPS, Link, Topology

# Bytes that each rank receives in a timed collective. The smallest measures the latency; at the
# largest the time per byte is constant: NCCL reaches its full bandwidth at some tens of MB, gloo
# between processes below one.
_SMALLEST = 1 << 10
_LARGEST = {"cpu": 4 << 20, "cuda": 64 << 20}
_FEWEST_SAMPLES, _MOST_SAMPLES = 3, 30
# Back-to-back calls per sample: several on an accelerator, so that synchronizing with the device is
# a small part of the time.
_CALLS = {"cpu": 1, "cuda": 10}


@dataclass(frozen=True, slots=True)
class _Probe:
    """An op to time, and the bytes that it moves into this rank over a link.

    run is None if this rank has no peers there.
    """

    link: str
    op: str
    moved: int
    run: Callable[[], Any] | None


def calibrate(mesh: AbstractMesh, *, seconds: float = 1.0) -> Topology:
    """calibrate(mesh) -> Topology: time collectives and copies, and set `mesh.topology` to it.

    Measures latency and bandwidth inside nodes, and between them if the mesh has several; which
    ranks share a node is taken from the present `mesh.topology`. What cannot be measured (the
    network in one node) keeps its value. If the ranks of a node can read each other's memory,
    kernels that do so are timed, too, and plans may use them from then on. All ranks get the same
    topology. It is cached: a second call returns it at once, until `mesh.topology` is set.

    On a mesh of one rank, a "meta" mesh, and a rank outside the mesh (which does not take part) it
    returns `mesh.topology`. In simulated and null worlds the numbers are valid but meaningless.

    Args:
        mesh: a mesh of devices; every rank of it must call this.
        seconds: about how long to measure, not counting the start of process groups; a slow link
            may take longer.

    Raises: MeshError on an AbstractMesh, when seconds is not positive, or when ranks have different
    topologies.

    Communication: all_gather, reduce_scatter, all_reduce and all_to_all inside nodes and between
        them, counted by `comm_budget` like any others.

        calibrate(mesh)   # nodes of 8 ranks: local 14 us + 380 GB/s, network 28 us + 47 GB/s, ...
    """
    mesh = _checked_mesh(mesh, seconds)
    if (
        mesh.coordinate is None
        or mesh.size() == 1
        or mesh.device.type == "meta"
        or mesh._is_calibrated
    ):
        return mesh.topology
    known = same_on_all(mesh.group(), mesh.topology, partial(_differing_topologies, mesh))
    probes = list(_probes(mesh, known))
    moved = _largest(mesh, [probe.moved for probe in probes])
    _times(mesh, probes, 1)  # makes the process groups and touches the buffers
    start = time.perf_counter()
    _times(mesh, probes, 1)
    (round_s,) = _largest(mesh, [time.perf_counter() - start])
    samples = max(_FEWEST_SAMPLES, min(_MOST_SAMPLES, int(seconds / round_s)))
    mesh.topology = _fit(known, probes, moved, _times(mesh, probes, samples))
    mesh._is_calibrated = True
    return mesh.topology


def _checked_mesh(mesh: AbstractMesh, seconds: float) -> DeviceMesh:
    if not isinstance(mesh, DeviceMesh):
        raise errors.MeshError(
            f"calibrate({mesh!r}): there are no devices to measure. Set mesh.topology to a "
            f"Topology instead, "
            'for example Topology.default("cuda", node_size=8).'
        )
    if not isfinite(seconds) or seconds <= 0:
        raise errors.MeshError(
            f"calibrate(seconds={seconds!r}): must be a positive number, such as 1.0."
        )
    return mesh


def _differing_topologies(mesh: DeviceMesh, topologies: dict[int, Topology]) -> errors.MeshError:
    first, first_topology = next(iter(topologies.items()))
    rank = next(rank for rank, topology in topologies.items() if topology != first_topology)
    return errors.MeshError(
        f"calibrate({mesh!r}): rank {first} has the topology ({first_topology}) but rank {rank} "
        f"has ({topologies[rank]}). Set mesh.topology to the same on all ranks first."
    )


def _largest(mesh: DeviceMesh, values: Sequence[float]) -> list[float]:
    """Return the elementwise maximum over all ranks: the slowest rank decides."""
    maxima = torch.tensor(values, dtype=torch.float64, device=mesh.device)
    mesh.group().all_reduce(maxima, "max")
    return maxima.tolist()


def _probes(mesh: DeviceMesh, topology: Topology) -> Iterator[_Probe]:
    """Yield the probes, the same on all ranks except for sizes."""
    largest = _LARGEST.get(mesh.device.type, _LARGEST["cpu"])
    for link, group in zip(("local", "network"), _link_groups(mesh, topology), strict=True):
        for op in OPS:
            for moved in (_SMALLEST, largest):
                yield _collective(link, op, group, moved, mesh.device)
        if link == "local":
            for moved in (_SMALLEST, largest):
                yield _symmetric_probe(group, moved, mesh.device)
    source = torch.zeros(largest, dtype=torch.uint8, device=mesh.device)
    target = torch.empty_like(source)
    yield _Probe("memory", "copy", largest, lambda: target.copy_(source))


def _link_groups(mesh: DeviceMesh, topology: Topology) -> tuple[Group, Group]:
    """Return the groups of this rank's node, and of the ranks with its index in other nodes."""
    nodes: dict[int, list[int]] = defaultdict(list)
    for rank, node in sorted(zip(mesh.ranks.flat, topology.node_ids(mesh).flat, strict=True)):
        nodes[int(node)].append(int(rank))
    own_node = next(ranks for ranks in nodes.values() if mesh.world.rank in ranks)
    index = own_node.index(mesh.world.rank)
    across = [ranks[index] for ranks in nodes.values() if index < len(ranks)]
    return mesh.world.group(own_node), mesh.world.group(across)


def _collective(link: str, op: str, group: Group, moved: int, device: torch.device) -> _Probe:
    """Return the probe of a collective that brings each rank about `moved` bytes."""
    n = group.size
    if n == 1:
        return _Probe(link, op, 0, None)
    passes = 2 if op == "all_reduce" else 1
    part = max(1, moved // (4 * passes * (n - 1)))
    small, large = (torch.zeros(size, device=device) for size in (part, n * part))
    return _Probe(link, op, 4 * passes * (n - 1) * part, _call(op, group, small, large))


def _symmetric_probe(group: Group, moved: int, device: torch.device) -> _Probe:
    """Return the probe of an all_gather by kernels that read the peers' memory.

    None if there is no such memory.
    """
    peers = peers_of(group, device)
    if peers is None:
        return _Probe("symmetric", "all_gather", 0, None)
    part = max(4, min(moved // (4 * (group.size - 1)), peers.staging(torch.float32).numel()))
    small = torch.zeros(part, device=device)
    large = torch.zeros(group.size * part, device=device)
    return _Probe(
        "symmetric",
        "all_gather",
        4 * (group.size - 1) * part,
        lambda: all_gather(peers, small, large, 0),
    )


def _call(op: str, group: Group, small: Tensor, large: Tensor) -> Callable[[], Any]:
    if op == "all_gather":
        return lambda: group.all_gather(large, small)
    if op == "reduce_scatter":
        return lambda: group.reduce_scatter(small, large)
    if op == "all_reduce":
        return lambda: group.all_reduce(large)
    target = torch.empty_like(large)
    splits = [small.numel()] * group.size
    return lambda: group.all_to_all(target, large, splits, splits)


def _times(mesh: DeviceMesh, probes: Sequence[_Probe], count: int) -> list[float]:
    """Return seconds per call of each probe, equal on all ranks: its median on the slowest.

    The probes take turns, so that other load on the machine slows all of them equally. A barrier
    before each sample excludes the wait for ranks that are still in the one before.
    """
    everyone = mesh.group()
    samples: list[list[float]] = [[] for _ in probes]
    for _ in range(count):
        for probe, probe_samples in zip(probes, samples, strict=True):
            everyone.barrier()
            probe_samples.append(0.0 if probe.run is None else _sample(probe.run, mesh.device))
    return _largest(mesh, [statistics.median(probe_samples) for probe_samples in samples])


def _sample(run: Callable[[], Any], device: torch.device) -> float:
    calls = _CALLS.get(device.type, _CALLS["cuda"])
    _synchronize(device)
    start = time.perf_counter()
    for _ in range(calls):
        run()
    _synchronize(device)
    return (time.perf_counter() - start) / calls


def _synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.get_device_module(device.type).synchronize()


def _fit(
    known: Topology, probes: Sequence[_Probe], moved: Sequence[float], times: Sequence[float]
) -> Topology:
    """Return the topology with these times; the same on all ranks, as moved and times are."""
    points: dict[str, dict[str, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    for probe, size, seconds in zip(probes, moved, times, strict=True):
        if size:
            points[probe.link][probe.op].append((size, max(seconds, 1e-9)))
    ((size, seconds),) = points.pop("memory")["copy"]
    shared = points.pop("symmetric", {}).get("all_gather")
    links: dict[str, Link | None] = {"symmetric": None}
    if shared is not None:
        latency = min(shared)[1]
        links["symmetric"] = Link(latency, 1 / _seconds_per_byte(*max(shared), latency))
    ratios = defaultdict(list)
    for name, ops in points.items():
        latency = statistics.median(min(samples)[1] for samples in ops.values())
        per_byte = {op: _seconds_per_byte(*max(samples), latency) for op, samples in ops.items()}
        typical = statistics.median(per_byte.values())
        links[name] = Link(latency, 1 / typical)
        for op in OPS:
            ratios[op].append(per_byte[op] / typical)
    factors = {op: statistics.geometric_mean(op_ratios) for op, op_ratios in ratios.items()}
    return replace(known, memory=size / seconds, factors=tuple(factors.items()), **links)


def _seconds_per_byte(size: float, seconds: float, latency: float) -> float:
    """Return the time per byte.

    At the largest size the bytes take most of the time; count at least half, as the latency is
    noisy.
    """
    return max(seconds - latency, seconds / 2) / size
