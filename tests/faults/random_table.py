"""Random programs for processes, with names such as "wrong argument 17": a kind of divergence and a
seed.

"healthy 3" is several correct programs in a row, which return the number of collectives that the
rank called. "raw skip 2", "raw healthy 3": the program also calls torch.distributed directly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shardmesh.mesh.comm.recording.trace_buffer import Header
from tests.faults.fault import STALL_S, Fault, FaultsByName
from tests.faults.random_programs import (
    MESHES,
    RandomProgram,
    faulty_program,
    healthy_program,
    mesh_of,
    run,
)
from tests.faults.rank_context import RankContext

FREEZE_S = 1.75 * STALL_S
LATE_S = 0.5
PROGRAMS_PER_JOB = 20  # correct programs
ITERATIONS = (4, 24)  # of their loops


def program_of(name: str) -> RandomProgram:
    kind, raw, seed = _parsed(name)
    return faulty_program(seed, MESHES, (kind,), length=10, raw=raw)


def _parsed(name: str) -> tuple[str, bool, int]:
    """Return the kind of divergence or "healthy", whether the program calls torch.distributed
    directly, and the seed.
    """
    kind, _, seed = name.rpartition(" ")
    return kind.removeprefix("raw "), kind.startswith("raw "), int(seed)


def fault_of(name: str) -> Fault:
    """Return the program as a `Fault`; it returns [each sharded tensor, each plain tensor] as lists
    of numbers.
    """
    kind, raw, seed = _parsed(name)
    if kind == "healthy":
        return Fault(_healthy(seed, raw))
    random_program = program_of(name)
    assert random_program.outlier is not None

    def program(ctx: RankContext) -> Any:
        return as_lists(
            run(
                random_program,
                ctx.mesh,
                ctx.rank,
                ctx.is_outlier(),
                FREEZE_S=FREEZE_S,
                LATE_S=LATE_S,
            )
        )

    program.__name__ = name
    # "stall" sets the short timeout.
    kinds = ("stall",) if kind in ("stop", "freeze", "late") else ("mismatch",)
    return Fault(
        program,
        kinds,
        (random_program.outlier,),
        (random_program.outlier,),
        mesh=random_program.mesh,
    )


def _healthy(first: int, raw: bool) -> Callable[[RankContext], int]:
    def program(ctx: RankContext) -> int:
        for seed in range(first * PROGRAMS_PER_JOB, (first + 1) * PROGRAMS_PER_JOB):
            healthy = healthy_program(seed, MESHES, iterations=ITERATIONS, raw=raw)
            run(healthy, mesh_of(healthy), ctx.rank, False)
        return ctx.mesh.world.trace_buffer.words[Header.RECORDS]

    program.__name__ = f"healthy {first}"
    return program


def as_lists(result: Any) -> Any:
    if isinstance(result, torch.Tensor):
        return result.tolist()
    return [as_lists(x) for x in result] if isinstance(result, list | tuple) else result


FAULTS = FaultsByName(fault_of)
