"""Writes to buffers of pending collectives, two threads in one group, exceptions of other
threads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import shardmesh as sm
from shardmesh import P
from shardmesh.mesh import null_world
from shardmesh.mesh.comm.group import Group
from shardmesh.mesh.comm.recording.trace_buffer import TraceBuffer
from shardmesh.mesh.errors import CollectiveError
from shardmesh.mesh.monitor import process_hooks
from shardmesh.mesh.monitor.diagnosis import verdict_text
from shardmesh.mesh.settings import collective_check, settings
from tests.sharding.ranks import every_rank, on_mesh

Start = Callable[[Group, Tensor], Any]


@pytest.fixture
def full() -> Iterator[None]:
    """Let the monitor compare inputs with a copy."""
    before = settings().mode
    collective_check("full")
    yield
    collective_check(before)


STARTS: dict[str, Start] = {
    "all_gather": lambda g, x: g.all_gather(x.new_empty(g.size * x.numel()), x, async_op=True),
    "reduce_scatter": lambda g, x: g.reduce_scatter(
        x.new_empty(x.numel() // g.size), x, async_op=True
    ),
    "all_to_all": lambda g, x: g.all_to_all(torch.empty_like(x), x, async_op=True),
    "permute": lambda g, x: g.permute(
        torch.empty_like(x), x, dst=1 - g.rank, src=1 - g.rank, async_op=True
    ),
    "all_reduce": lambda g, x: g.all_reduce(x, async_op=True),
    "broadcast": lambda g, x: g.broadcast(x, 0, async_op=True),
}
INPUTS = {name: start for name, start in STARTS.items() if name not in ("all_reduce", "broadcast")}


def waited(start: Start, write: Callable[[Tensor], Any], x: Tensor | None = None) -> None:
    """Start a collective on two ranks, write to its buffer on rank 1, wait."""

    def program(mesh: sm.DeviceMesh) -> None:
        buffer = torch.ones(4) if x is None else x.clone()
        group = mesh.group("a")
        work = start(group, buffer)
        if group.rank == 1:
            write(buffer)
        work.wait()
        work.wait()

    on_mesh((2,), program)


@pytest.mark.parametrize("start", STARTS.values(), ids=STARTS)
@pytest.mark.parametrize(
    "write",
    [lambda x: x.add_(1), lambda x: x[1:].zero_(), lambda x: x.view(2, 2).copy_(torch.zeros(2, 2))],
)
def test_write_to_a_pending_buffer_raises(start: Start, write: Callable[[Tensor], Any]) -> None:
    with pytest.raises(
        CollectiveError, match="its buffer was written to while it was under way"
    ) as caught:
        waited(start, write)
    assert "test_buffer_check.py:" in str(caught.value)


@pytest.mark.parametrize("start", STARTS.values(), ids=STARTS)
def test_reading_a_pending_buffer_is_allowed(start: Start, full: None) -> None:
    waited(start, lambda x: (x + 1, x[1:].clone(), x.view(2, 2).T, x.detach()))


@pytest.mark.parametrize("start", INPUTS.values(), ids=INPUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.bfloat16, torch.complex64])
def test_write_that_bypasses_operators_is_found(
    start: Start, dtype: torch.dtype, full: None
) -> None:
    def write(x: Tensor) -> None:
        x.data[0] = 0

    if start is INPUTS["reduce_scatter"] and dtype is torch.bool:
        pytest.skip("a bool has no sum")
    with pytest.raises(CollectiveError, match="was written to"):
        waited(start, write, torch.ones(4, dtype=dtype))


def test_write_to_another_part_of_the_storage() -> None:
    """Buckets hold the buffers of several collectives in one storage."""

    def program(mesh: sm.DeviceMesh) -> None:
        memory = torch.ones(8)
        work = mesh.group("a").all_gather(torch.empty(8), memory[:4], async_op=True)
        memory[4:].zero_()
        work.wait()

    on_mesh((2,), program)


@every_rank(2)
def test_inference_tensors_and_empty_ones(mesh: sm.DeviceMesh) -> None:
    group = mesh.group("a")
    with torch.inference_mode():
        group.all_reduce(torch.ones(3), async_op=True).wait()
    group.all_gather(torch.empty(0), torch.empty(0), async_op=True).wait()


def test_an_asynchronous_redistribution() -> None:
    def program(mesh: sm.DeviceMesh) -> None:
        x = sm.ones(8, mesh, P("a"))
        future = x.redistribute(P(), async_op=True)
        x.mul_(2)
        future.wait()

    with pytest.raises(CollectiveError, match=r"all_gather.* for f32\[8\] @ P\('a'\)"):
        on_mesh((2,), program)


# -- threads ---------------------------------------------------------------------------------------


class _Blocking:
    """Blocks a collective until it is released."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, group: Group) -> None:
        self.inside, self.released = threading.Event(), threading.Event()
        monkeypatch.setattr(type(group), "_all_reduce", self._all_reduce)

    def _all_reduce(self, *_: Any) -> None:
        self.inside.set()
        assert self.released.wait(30)


def test_two_threads_in_one_group(monkeypatch: pytest.MonkeyPatch) -> None:
    with null_world(4):
        group = sm.init_device_mesh("cpu", (4,), axis_names=("a",)).group("a")
        blocking = _Blocking(monkeypatch, group)
        thread = threading.Thread(target=lambda: group.all_reduce(torch.ones(2)), name="loader")
        thread.start()
        assert blocking.inside.wait(30)
        with pytest.raises(CollectiveError) as caught:
            group.all_gather(torch.empty(8), torch.ones(2))
        blocking.released.set()
        thread.join()
        text = str(caught.value)
        assert (
            "two threads are in collectives of the group of ranks (0, 1, 2, 3) at the same time: "
            "'loader' in all_reduce at" in text
        )
        assert "'MainThread' in all_gather at" in text
        assert text.count("test_buffer_check.py:") == 2
        group.all_gather(torch.empty(8), torch.ones(2))


def test_threads_may_use_a_group_in_turn() -> None:
    with null_world(4):
        group = sm.init_device_mesh("cpu", (4,), axis_names=("a",)).group("a")
        for _ in range(2):
            thread = threading.Thread(target=lambda: group.all_reduce(torch.ones(2)))
            thread.start()
            thread.join()
            group.all_reduce(torch.ones(2))


def test_a_thread_whose_collective_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is in no collective any more, though it keeps running."""
    with null_world(4):
        group = sm.init_device_mesh("cpu", (4,), axis_names=("a",)).group("a")
        failed, over = threading.Event(), threading.Event()

        def fail() -> None:
            with pytest.raises(KeyError):
                group.all_reduce(torch.ones(2))
            failed.set()
            over.wait(30)

        with monkeypatch.context() as patched:
            patched.setattr(type(group), "_all_reduce", lambda *_: {}["nothing"])
            thread = threading.Thread(target=fail)
            thread.start()
            assert failed.wait(30)
        group.all_reduce(torch.ones(2))
        over.set()
        thread.join()


def test_exceptions_of_threads_are_shown_with_a_stall(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer, seen = TraceBuffer.private(0, 2), []
    monkeypatch.setattr(threading, "excepthook", seen.append)
    process_hooks.record_thread_errors(lambda: [buffer])

    def run(error: BaseException) -> None:
        thread = threading.Thread(target=_raised, args=(error,), name="loader")
        thread.start()
        thread.join()

    assert "raised" not in verdict_text.how_it_is(buffer)
    run(SystemExit(1))
    assert "raised" not in verdict_text.how_it_is(buffer)
    run(MemoryError("no room for the batch"))
    assert verdict_text.how_it_is(buffer).endswith(
        "; its thread 'loader' raised MemoryError: no room for the batch"
    )
    run(KeyError())
    assert verdict_text.how_it_is(buffer).endswith("; its thread 'loader' raised KeyError")
    assert len(seen) == 3


def _raised(error: BaseException) -> None:
    raise error
