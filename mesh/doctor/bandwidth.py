"""Measure collectives on a mesh: are their results right, and how fast are they on each axis?"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ..comm.agreement import gather_facts
from ..comm.group import Group
from ..device_mesh import DeviceMesh, init_device_mesh
from ..monitor import timeouts
from .facts import Facts

OPS = ("all_reduce", "all_to_all")
_SMALL = 1 << 10  # bytes of a buffer so small that only the latency counts
# Sizes at which the time per byte is constant: NCCL reaches its full bandwidth at some tens of MB,
# gloo between processes below one.
_LARGE = {"cpu": 4 << 20, "cuda": 64 << 20}
_MOST_CALLS = 1000
_LATENCY_SHARE = 0.25  # share of the time that is spent on an operation
_CLOCK_ROUNDS = 5


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """One collective along one axis.

    Attributes:
        axis, ranks: the axis and its size; all its groups run at the same time.
        op: "all_reduce" or "all_to_all".
        bytes: that a rank receives in a call, counted as in `CollectiveRecord`.
        seconds: of a call, on the slowest rank.
        latency: seconds of a call with hardly any bytes.
        correct: whether the result was right on all ranks.
    """

    axis: str
    ranks: int
    op: str
    bytes: int
    seconds: float
    latency: float
    correct: bool

    @property
    def gigabytes_per_second(self) -> float:
        return self.bytes / self.seconds / 1e9


@dataclass(frozen=True, slots=True)
class Measured:
    """What the ranks of a mesh measured together, the same on all.

    Attributes:
        bandwidth: of each axis of more than one rank, and operation.
        clocks: how many seconds each rank's clock is ahead of that of rank 0.
        everyone: the facts that each rank gave, in their order.
        group: the backends and timeouts of the default process group; "" if unknown.
    """

    bandwidth: tuple[Bandwidth, ...]
    clocks: tuple[float, ...]
    everyone: tuple[Facts | None, ...]
    group: str = ""


def measure(
    device_type: str,
    sizes: Sequence[int],
    names: Sequence[str],
    seconds: float,
    facts: Facts | None = None,
) -> Measured:
    """measure("cpu", (2, 2), ("dp", "tp"), 2.0) -> Measured, on all ranks of a mesh of the job.

    Args:
        device_type, sizes, names: of the mesh.
        seconds: for each axis, apart from making its groups.
        facts: of this rank, which the others are sent.

    Communication: two all_reduces and two all_to_alls per axis, many times; some gathers.
    """
    mesh = init_device_mesh(device_type, tuple(sizes), axis_names=tuple(names))
    everyone = mesh.group()
    axes = [name for name, size in zip(names, mesh.shape, strict=True) if size > 1]
    rows = [row for axis in axes for row in _rows(mesh, axis, seconds / len(OPS))]
    group = "" if dist.group.WORLD is None else timeouts.backends_text(dist.group.WORLD)
    return Measured(
        tuple(rows), _clocks(everyone), tuple(gather_facts(everyone, facts).values()), group
    )


def _rows(mesh: DeviceMesh, axis: str, seconds: float) -> Iterator[Bandwidth]:
    group = mesh.group(axis)
    large = _LARGE.get(mesh.device_type, _LARGE["cpu"])
    for op in OPS:
        wrong = not _is_right(op, group, mesh.device)
        correct = _largest(mesh, float(wrong)) == 0.0  # on every rank
        latency = _seconds_per_call(
            mesh, _call(op, group, _SMALL, mesh.device), seconds * _LATENCY_SHARE
        )
        taken = _seconds_per_call(
            mesh, _call(op, group, large, mesh.device), seconds * (1 - _LATENCY_SHARE)
        )
        passes = 2 if op == "all_reduce" else 1
        moved = passes * (group.size - 1) * 4 * _part(large, group)
        yield Bandwidth(axis, group.size, op, moved, taken, latency, correct)


def _call(op: str, group: Group, size: int, device: torch.device) -> Callable[[], Any]:
    part = _part(size, group)
    x = torch.zeros(group.size * part, device=device)
    if op == "all_reduce":
        return lambda: group.all_reduce(x)
    out = torch.empty_like(x)
    splits = [part] * group.size
    return lambda: group.all_to_all(out, x, splits, splits)


def _part(size: int, group: Group) -> int:
    """Return how many float32 of a buffer of so many bytes belong to each rank."""
    return max(1, size // (4 * group.size))


def _is_right(op: str, group: Group, device: torch.device) -> bool:
    """Return whether a collective is correct: rank r contributes r + 1."""
    contribution = torch.full((group.size,), group.rank + 1.0, device=device)
    all_of_them = torch.arange(1.0, group.size + 1, device=device)
    if op == "all_reduce":
        group.all_reduce(contribution)
        return bool((contribution == all_of_them.sum()).all())
    out = torch.empty_like(contribution)
    splits = [1] * group.size
    group.all_to_all(out, contribution, splits, splits)
    return torch.equal(out, all_of_them)


def _seconds_per_call(mesh: DeviceMesh, run: Callable[[], Any], seconds: float) -> float:
    """Return seconds per call on the slowest rank.

    All ranks make the same number of calls, one after another, as a program does.
    """
    _seconds(mesh, run, 1)  # connects, and touches the buffers
    once = _seconds(mesh, run, 1)
    calls = max(1, min(_MOST_CALLS, int(seconds / max(once, 1e-6))))
    return _seconds(mesh, run, calls) / calls


def _seconds(mesh: DeviceMesh, run: Callable[[], Any], calls: int) -> float:
    mesh.group().barrier()
    start = time.perf_counter()
    for _ in range(calls):
        run()
    if mesh.device_type != "cpu":
        torch.get_device_module(mesh.device_type).synchronize()
    return _largest(mesh, time.perf_counter() - start)


def _largest(mesh: DeviceMesh, value: float) -> float:
    maximum = torch.tensor([value], dtype=torch.float64, device=mesh.device)
    mesh.group().all_reduce(maximum, "max")
    return maximum.item()


def _clocks(group: Group) -> tuple[float, ...]:
    """Return how far each clock is ahead of rank 0's, in seconds.

    The least of several rounds, since a barrier ends at different times.
    """
    rounds = []
    for _ in range(_CLOCK_ROUNDS):
        group.barrier()
        clocks = list(gather_facts(group, time.time()).values())
        rounds.append([clock - clocks[0] for clock in clocks])
    return tuple(min(looks, key=abs) for looks in zip(*rounds, strict=True))
