"""The streams on which operations on shared memory run, with a stand-in for torch.cuda that records
who waits for what.
"""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shardmesh.mesh.comm import symmetric_memory
from shardmesh.mesh.topology import Link
from shardmesh.sharding.redistribute import symmetric_memory as steps
from shardmesh.sharding.redistribute.symmetric_memory import (
    StagedTensor,
    SymmetricAllReduce,
    SymmetricPull,
)

CUDA = torch.device("cuda", 0)
BOX = ((0, 4),)


class Cuda:
    """Streams with numbers. Events name what their stream last did.

    Attributes:
        log: (stream, what it does), in the order of the host.
        current: the number of the current stream.
    """

    def __init__(self) -> None:
        self.log: list[tuple[int, str]] = []
        self.current, self.count, self.capturing = 0, 0, False

    def do(self, what: str) -> None:
        self.log.append((self.current, what))

    def Stream(self, device: torch.device, priority: int) -> Any:
        self.count += 1
        return self.stream_object(self.count)

    def stream_object(self, number: int) -> Any:
        def record_event() -> Any:
            return SimpleNamespace(
                after=[what for at, what in self.log if at == number][-1], query=lambda: False
            )

        return SimpleNamespace(
            number=number, record_event=record_event,
            wait_event=lambda event: self.log.append((number, f"wait for {event.after}")),
            wait_stream=lambda other: self.log.append((number, f"wait for stream {other.number}")),
        )  # fmt: skip

    def current_stream(self, device: torch.device) -> Any:
        return self.stream_object(self.current)

    def is_current_stream_capturing(self) -> bool:
        return self.capturing

    @contextmanager
    def stream(self, stream: Any) -> Any:
        before, self.current = self.current, stream.number
        yield
        self.current = before


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    made, numbers = Cuda(), iter(range(100))
    monkeypatch.setattr(torch, "get_device_module", lambda _: made)
    monkeypatch.setattr(symmetric_memory, "needed_peers", lambda *_: None)
    monkeypatch.setattr(steps, "exchange", lambda *_: made.do(f"pull {next(numbers)}"))
    for name in ("one_shot_all_reduce", "two_shot_all_reduce"):
        monkeypatch.setattr(steps, name, lambda *_: made.do(f"add {next(numbers)}"))
    monkeypatch.setattr(
        torch.Tensor,
        "record_stream",
        lambda x, stream: made.log.append((stream.number, f"use {x.numel()}")),
    )
    return made


def collectives() -> tuple[SymmetricPull, SymmetricAllReduce]:
    """Return a gather of two parts of two elements, and an all_reduce of four, of the same
    group.
    """
    group: Any = SimpleNamespace(rank=0, size=2, shared={}, direct=lambda *args, tag: args[-1]())
    halves = [[((0, 2),)], [((2, 4),)]]
    pull = SymmetricPull(
        group,
        CUDA,
        "all_gather",
        "sum",
        torch.float32,
        [StagedTensor(((0, 2),), BOX, halves, halves, 2)],
    )
    return pull, SymmetricAllReduce(group, CUDA, Link(1e-6, 1e9), torch.float32, [(4,)])


def test_without_async_op_they_run_on_the_current_stream(cuda: Cuda) -> None:
    pull, add = collectives()
    (whole,) = pull.start([torch.zeros(2)])  # type: ignore[misc]
    assert whole.shape == (4,)
    add.start([torch.zeros(4)])
    assert cuda.log == [(0, "pull 0"), (0, "add 1")]


def test_with_async_op_they_run_next_to_the_current_stream(cuda: Cuda) -> None:
    pull, _ = collectives()
    pending: Any = pull.start([torch.zeros(2)], True)
    assert cuda.log == [(1, "wait for stream 0"), (1, "use 2"), (1, "use 4"), (1, "pull 0")]
    cuda.do("compute")
    assert not pending.is_completed()
    assert pending.wait()[0].shape == (4,)
    assert cuda.log[4:] == [(0, "compute"), (0, "wait for pull 0")]


def test_a_stream_that_waits_is_the_current_one_of_then(cuda: Cuda) -> None:
    pending: Any = collectives()[1].start([torch.zeros(4)], True, donate=True)
    cuda.current = 7
    pending.wait()
    assert cuda.log == [
        (1, "wait for stream 0"),
        (1, "use 4"),
        (1, "use 4"),
        (1, "add 0"),
        (7, "wait for add 0"),
    ]


def test_operations_on_one_memory_run_in_order_on_both_streams(cuda: Cuda) -> None:
    """They share the staging area and the barriers."""
    pull, add = collectives()
    first: Any = pull.start([torch.zeros(2)], True)
    add.start([torch.zeros(4)])
    second: Any = pull.start([torch.zeros(2)], True)
    first.wait()
    second.wait()
    assert [entry for entry in cuda.log if not entry[1].startswith("use")] == [
        (1, "wait for stream 0"), (1, "pull 0"),
        (0, "wait for pull 0"), (0, "add 1"),
        (1, "wait for stream 0"), (1, "pull 2"),
        (0, "wait for pull 0"), (0, "wait for pull 2"),
    ]  # fmt: skip


@pytest.mark.parametrize("inside", [True, False])
def test_a_graph_and_what_is_outside_do_not_wait_for_each_other(inside: bool, cuda: Cuda) -> None:
    """CUDA refuses that; the capture of a graph begins when the device is idle."""
    pull, add = collectives()
    cuda.capturing = not inside
    pull.start([torch.zeros(2)], True)
    cuda.capturing = inside
    add.start([torch.zeros(4)])
    assert (0, "add 1") in cuda.log
    assert (0, "wait for pull 0") not in cuda.log


def test_without_streams_nothing_is_left_to_wait_for(cuda: Cuda) -> None:
    group: Any = SimpleNamespace(rank=0, size=2, shared={}, direct=lambda *args, tag: args[-1]())
    pending: Any = SymmetricAllReduce(
        group, torch.device("cpu"), Link(1e-6, 1e9), torch.float32, [(4,)]
    ).start([torch.zeros(4)], True)
    assert pending.is_completed()
    assert cuda.log == [(0, "add 0")]
