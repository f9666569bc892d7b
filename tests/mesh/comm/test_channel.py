"""Messages between two ranks: in order, of any dtype, while neither rank waits for the other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import shardmesh as sm
from shardmesh.mesh.comm.channel import connected_channels
from shardmesh.mesh.comm.recording.recorder import CommTag

TAG = CommTag("test of messages")
DTYPES = [torch.float32, torch.bfloat16, torch.bool, torch.complex64, torch.int16]


def values() -> list[Tensor]:
    tensors = [torch.arange(6).view(2, 3).to(dtype) for dtype in DTYPES]
    negated = torch._neg_view(torch.arange(3.0))  # as the imaginary part of a conjugate is
    return [*tensors, torch.empty(0), negated]


def exchange(mode: str = "on") -> bool:
    """Send all values at once and in both directions, and receive them afterwards."""
    sm.monitor.collective_check(mode)
    try:
        return _exchange()
    finally:
        sm.monitor.collective_check("on")


def _exchange() -> bool:
    mesh = sm.init_device_mesh("cpu", (4,), axis_names=("ranks",))
    rank = mesh.get_rank()
    peer = rank ^ 1
    channels = connected_channels(mesh.world, [(0, 1), (1, 0), (2, 3), (3, 2)], mesh.device)
    sent = [channels[rank, peer].send(x, TAG) for x in values()]
    received = [torch.empty_like(x) for x in values()]
    works = [channels[peer, rank].receive(x, TAG) for x in received]
    for work in (*works, *sent):
        work.wait()
        work.wait()  # later waits return at once
    pairs = zip(received, values(), strict=True)
    return all(work.is_completed() for work in sent) and all(torch.equal(*pair) for pair in pairs)


def test_messages_of_simulated_ranks() -> None:
    assert all(sm.simulate(4)(exchange)())


@pytest.mark.parametrize("mode", ["on", "strict", "full"])
def test_messages_of_processes(mode: str, world4: Any) -> None:
    assert all(world4(exchange, mode))
