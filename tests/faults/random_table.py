"""Random programs for processes, with names such as "wrong argument 17": a kind of divergence and a seed.

"healthy 3" is several correct programs in a row, which return how many collectives the rank has called. "raw skip 2", "raw healthy 3": the
program also calls torch.distributed itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from shardmesh.mesh.monitor.recording.trace_buffer import Header
from tests.faults.at import At
from tests.faults.fault import RANKS, Fault
from tests.faults.random_programs import MESHES, Program, faulty_program, healthy_program, mesh_of, run

FREEZE_S = 3.5  # longer than `fault.STALL_S`
LATE_S = 0.5
AT_A_TIME = 20  # correct programs in one job
TURNS = (4, 24)  # of their loops


def program_of(name: str) -> Program:
    kind, raw, seed = _parsed(name)
    return faulty_program(seed, MESHES, (kind,), length=10, raw=raw)


def _parsed(name: str) -> tuple[str, bool, int]:
    """The kind of divergence or "healthy", whether the program calls torch.distributed itself, and the seed."""
    kind, _, seed = name.rpartition(" ")
    return kind.removeprefix("raw "), kind.startswith("raw "), int(seed)


def fault_of(name: str) -> Fault:
    """The program as the runner takes it: it returns [each sharded tensor, each plain tensor] as lists of numbers."""
    kind, raw, seed = _parsed(name)
    if kind == "healthy":
        return Fault(_healthy(seed, raw), (), (), (), (), (), (), {"x": RANKS}, twin=False)
    found = program_of(name)
    assert found.odd is not None

    def program(at: At) -> Any:
        return as_lists(run(found, at.mesh, at.rank, at.odd(), FREEZE_S=FREEZE_S, LATE_S=LATE_S))

    program.__name__ = name
    kinds = ("stall",) if kind in ("stop", "freeze", "late") else ("mismatch",)  # whether a rank that waits is impatient
    return Fault(program, kinds, (found.odd,), (found.odd,), (), (), (), found.mesh, twin=False)


def _healthy(first: int, raw: bool) -> Callable[[At], int]:
    def program(at: At) -> int:
        for seed in range(first * AT_A_TIME, (first + 1) * AT_A_TIME):
            healthy = healthy_program(seed, MESHES, turns=TURNS, raw=raw)
            run(healthy, mesh_of(healthy), at.rank, False)
        return at.mesh.world.trace_buffer.words[Header.RECORDS]

    program.__name__ = f"healthy {first}"
    return program


def as_lists(result: Any) -> Any:
    if isinstance(result, torch.Tensor):
        return result.tolist()
    return [as_lists(x) for x in result] if isinstance(result, list | tuple) else result


class _Table(Mapping[str, Fault]):
    """Makes the fault of any name."""

    def __init__(self, make: Callable[[str], Fault]) -> None:
        self._make = make

    def __getitem__(self, name: str) -> Fault:
        return self._make(name)

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0


FAULTS: Mapping[str, Fault] = _Table(fault_of)
