"""Allocating symmetric memory, with stand-ins for torch's allocator, pinned memory and a default
device.
"""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed._symmetric_memory as torchs
from torch.overrides import TorchFunctionMode

from shardmesh.kernels.symmetric import PAD_BYTES, simulated_peers
from shardmesh.mesh.comm import symmetric_memory

CPU = torch.device("cpu")


class PinnedMemory(TorchFunctionMode):
    """Stands for pinned memory of a machine with a GPU: tensors of other devices than the CPU
    cannot be pinned, as in torch.
    """

    def __init__(self) -> None:
        super().__init__()
        self.pinned = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.pop("pin_memory", False):
            if torch.device(kwargs.get("device") or CPU).type != "cpu":
                raise RuntimeError("Only dense CPU tensors can be pinned")
            self.pinned += 1
        return func(*args, **kwargs)


class Alone:
    """A group of one rank."""

    rank, size, ranks, handle, world = 0, 1, (0,), "group", SimpleNamespace(rank=0)

    def barrier(self, tag: Any = None) -> None: ...

    def all_reduce(self, x: torch.Tensor, op: str, tag: Any = None) -> None: ...


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(symmetric_memory, "BUFFER_BYTES", 1 << 10)
    monkeypatch.setattr(torchs, "empty", torch.empty)
    monkeypatch.setattr(
        torchs,
        "rendezvous",
        lambda memory, handle: SimpleNamespace(buffer_ptrs=[memory.data_ptr()]),
    )
    monkeypatch.setitem(symmetric_memory.PROVIDERS, "cpu", symmetric_memory._of_torch)


@pytest.mark.usefixtures("allocator")
def test_a_default_device_does_not_hide_it() -> None:
    group: Any = Alone()
    with PinnedMemory() as mode, torch.device("meta"):  # as under torch.set_default_device
        found = symmetric_memory._allocate_on_all(group, CPU, None)
        simulated = simulated_peers(2, 1 << 10, CPU)
    assert mode.pinned == 1
    assert found is not None
    assert (found.error.device, found.epochs.device, found.buffer.numel() + PAD_BYTES) == (
        CPU,
        CPU,
        (1 << 10) + PAD_BYTES,
    )
    assert all(peers.error.device == CPU for peers in simulated)


def test_what_prevents_it_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any) -> Any:
        raise RuntimeError("no peer-to-peer access")

    monkeypatch.setitem(symmetric_memory.PROVIDERS, "cpu", refuse)
    group: Any = Alone()
    with caplog.at_level(logging.WARNING, symmetric_memory.__name__):
        assert symmetric_memory._allocate_on_all(group, CPU, None) is None
    assert caplog.messages == [
        "rank 0: no symmetric memory among ranks (0,) on cpu: no peer-to-peer access"
    ]
