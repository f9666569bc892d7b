"""Collectives of simulated ranks that run late, on a stream of their own, as NCCL's do: a missing
wait gives other results.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch

from shardmesh.mesh.comm.work import DONE, Work
from shardmesh.mesh.simulated import simulate


class _DelayedWork(Work):
    """A collective on the side stream; `wait` makes the current stream wait for it. Keeps its
    buffers until then.
    """

    def __init__(self, buffers: Any, event: Any) -> None:
        self._buffers, self._event = buffers, event

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self._event)
        self._buffers = None

    def is_completed(self) -> bool:
        return self._event.query()


@contextmanager
def delayed_collectives(cycles: int) -> Iterator[list[int]]:
    """Run asynchronous collectives of simulated ranks on a side stream, each behind a sleep; yield
    how many there were, in a list.

    On the CPU they run as they are.
    """
    group, count = simulate.SimulatedGroup, [0]
    original = group._move
    side = torch.cuda.Stream() if torch.cuda.is_available() else cast(Any, None)

    def move_late(self: Any, call: Any, move: Any, async_op: bool) -> Work | None:
        if not async_op or side is None or not _is_on_cuda(call.buffers):
            return original(self, call, move, async_op)

        def late(arrivals: Any) -> Any:
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                torch.cuda._sleep(cycles)
                return move(arrivals)

        self._run(call, late)
        count[0] += 1
        return _DelayedWork(call.buffers, side.record_event()) if call.buffers else DONE

    group._move = move_late
    try:
        yield count
    finally:
        group._move = original


def _is_on_cuda(buffers: Any) -> bool:
    return any(isinstance(x, torch.Tensor) and x.is_cuda for x in buffers)
