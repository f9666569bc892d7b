"""Tables on a CUDA device, with a stand-in for streams, events and memory: what waits for what,
from where it is copied, what is kept.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shardmesh.kernels.transfer import device_copies
from shardmesh.kernels.transfer.device_copies import DeviceCopies

CUDA = torch.device("cuda", 0)


class Memory:
    """A tensor on the host, pinned or not, or on the device."""

    def __init__(self, gpu, where, size):
        self.gpu = gpu
        self.where = where
        self.nbytes = size
        self.dtype = torch.int64
        self.shape = (size // 8,)

    def pin_memory(self):
        assert not self.gpu.capturing, "memory cannot be pinned while a stream is captured"
        return Memory(self.gpu, "pinned", self.nbytes)

    def to(self, device, non_blocking=False):
        assert (self.where, non_blocking) == ("pinned", True), "the host waits for the device"
        self.gpu.log.append(("copy", self.gpu.stream, "captured" if self.gpu.capturing else "now"))
        return Memory(self.gpu, "device", self.nbytes)

    def record_stream(self, stream):
        self.gpu.log.append(("used by", stream.number))

    def numel(self):
        return self.nbytes

    def __getitem__(self, part):
        return Memory(self.gpu, self.where, len(range(self.nbytes)[part]))

    def view(self, _):
        return self

    def copy_(self, _):
        return self


@pytest.fixture
def gpu(monkeypatch):
    gpu = SimpleNamespace(stream=1, capturing=False, log=[])

    def stream(device):
        number = gpu.stream
        return SimpleNamespace(
            number=number,
            record_event=lambda: number,
            wait_event=lambda event: gpu.log.append(("wait", number, "for", event)),
        )

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: gpu.capturing)
    monkeypatch.setattr(torch.cuda, "current_stream", stream)
    monkeypatch.setattr(device_copies, "_stream_of", lambda device: gpu.stream)
    monkeypatch.setattr(device_copies, "_reserve", device_copies._Reserve())
    plain = torch.empty
    pinned = lambda size, pin_memory=False, **kwargs: (  # noqa: E731
        Memory(gpu, "pinned", size).pin_memory() if pin_memory else plain(size, **kwargs)
    )
    monkeypatch.setattr(torch, "empty", pinned)
    return gpu


def table(gpu, entries=3):
    made: Any = DeviceCopies([0] * entries)
    made.host = Memory(gpu, "host", 8 * entries)
    return made


def test_copied_once_without_waiting(gpu):
    made = table(gpu)
    assert made.on(CUDA) is made.on(CUDA)
    assert gpu.log == [("copy", 1, "now")]


def test_another_stream_waits_for_the_copy_once(gpu):
    made = table(gpu)
    first = made.on(CUDA)
    gpu.stream = 2
    assert made.on(CUDA) is made.on(CUDA) is first
    assert gpu.log == [("copy", 1, "now"), ("wait", 2, "for", 1), ("used by", 2)]


def test_what_was_copied_before_a_capture_is_kept(gpu):
    made = table(gpu)
    first = made.on(CUDA)
    gpu.stream, gpu.capturing = 2, True
    assert made.on(CUDA) is made.on(CUDA) is first
    assert gpu.log == [("copy", 1, "now")]  # an event from outside cannot be waited for
    assert list(device_copies._reserve.of_graphs.values()) == [first]


def test_a_copy_in_a_capture_is_of_the_graph_alone(gpu):
    """What a replay writes must not be found by launches outside, before the first replay."""
    table(gpu).on(CUDA)
    made = table(gpu)
    gpu.capturing = True
    captured = made.on(CUDA)
    assert [pinned.where for pinned in device_copies._reserve.of_graphs.values()] == ["pinned"]
    gpu.capturing = False
    assert made.on(CUDA) is not captured
    assert gpu.log[1:] == [("copy", 1, "captured"), ("copy", 1, "now")]


def test_too_little_reserved_memory(gpu):
    gpu.capturing = True
    with pytest.raises(
        RuntimeError,
        match=(
            r"64 bytes of pinned memory for its table, and 0 were set aside before: run the step "
            r"once"
        ),
    ):
        table(gpu).on(CUDA)
    gpu.capturing = False
    table(gpu).on(CUDA)
    gpu.capturing = True
    with pytest.raises(RuntimeError, match="and 1048576 were set aside"):
        table(gpu, 1 << 18).on(CUDA)
    table(gpu, 1 << 17).on(CUDA)
    with pytest.raises(RuntimeError, match="and 0 were set aside"):
        table(gpu).on(CUDA)
    gpu.capturing = False
    table(gpu).on(CUDA)  # pins more
    gpu.capturing = True
    table(gpu).on(CUDA)


def test_made_on_the_host_whatever_the_default_device():
    with torch.device("meta"):
        assert DeviceCopies([1, 2]).on(torch.device("cpu")).tolist() == [1, 2]
