"""Ledgers without processes: four ranks run one after the other, each in its own null world."""

from __future__ import annotations

from collections.abc import Callable

import torch

from shardmesh.mesh import init_device_mesh, null_world
from shardmesh.mesh.comm.recording.trace_buffer import RECORD_WORDS, RING, Header, TraceBuffer
from shardmesh.mesh.monitor.ledger.ledger import Ledger

SIZE = 4


def run(program: Callable[[int], None]) -> dict[int, TraceBuffer]:
    """Return the trace buffer of each rank after `program(rank)`."""
    buffers = {}
    for rank in range(SIZE):
        with null_world(SIZE, rank) as world:
            program(rank)
            buffers[rank] = world.trace_buffer
    return buffers


def ledger_of(program: Callable[[int], None]) -> Ledger:
    return Ledger(run(program))


def every_collective(_: int) -> None:
    """Run one of each collective, over (2, 2) ranks."""
    mesh = init_device_mesh("cpu", (2, 2), axis_names=("dp", "tp"))
    dp, tp, world = mesh.group("dp"), mesh.group("tp"), mesh.group()
    x = torch.ones(8)
    dp.all_reduce(x, "max")
    tp.all_gather(torch.empty(16), x)
    tp.reduce_scatter(torch.empty(4), x)
    world.all_to_all(torch.empty(8), x)
    world.broadcast(x.to(torch.bfloat16), 2)
    world.permute(torch.empty(8), x, dst=(world.rank + 1) % SIZE, src=(world.rank - 1) % SIZE)
    world.barrier()
    world.all_gather_object("x" * (world.rank + 1))


def set_times(buffer: TraceBuffer, number: int, start: int, end: int) -> None:
    """Set the start and end of a record, in ns since 1970."""
    buffer.words[Header.CLOCK] = 1
    at = RING + number * RECORD_WORDS
    buffer.words[at + 3], buffer.words[at + 4] = start - 1, end - 1 if end else 0
