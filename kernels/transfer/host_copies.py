"""Copies between a device and the host's memory that the host does not wait for.

    device   compute  copy  compute ...      through pinned memory, in the order of the stream
    host     continue ........  wait         where values are needed, for an event after the copy

A tensor on the CPU or on "meta" is not copied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor


@cache
def is_asynchronous(device_type: str) -> bool:
    """Return whether devices of this type have streams.

    They copy from and to pinned memory while the host continues.
    """
    if device_type in ("cpu", "meta"):
        return False
    module = torch.get_device_module(device_type)
    return hasattr(module, "current_stream") and module.is_available()


def record_event(device: torch.device) -> Any:
    """Return an event after all work so far of the current stream of a device."""
    module = torch.get_device_module(device.type)
    event = module.Event()
    event.record(module.current_stream(device))
    return event


def start_to_host(x: Tensor) -> Callable[[], Tensor]:
    """start_to_host(x) -> a function that waits for the copy and returns it.

    Only for what the stream did before, not for later work.

    >>> start_to_host(torch.arange(3))().tolist()
    [0, 1, 2]
    """
    if x.device.type == "cpu" or not is_asynchronous(x.device.type):
        return x.cpu
    out = torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=True)
    out.copy_(x, non_blocking=True)
    event = record_event(x.device)

    def wait() -> Tensor:
        event.synchronize()
        return out

    return wait


def send(x: Tensor, device: torch.device) -> Tensor:
    """send(x on the host, device) -> x there.

    `x.to` would wait for all work of the stream, or for the copy of pageable memory.
    """
    if x.device.type != "cpu" or not is_asynchronous(device.type):
        return x.to(device)
    return (x if x.is_pinned() else x.pin_memory()).to(device, non_blocking=True)


def to_device(values: Sequence[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    """to_device([1, 2], torch.int64, device) -> tensor([1, 2]) there.

    `torch.tensor(..., device=)` would wait for all work of the stream.

    >>> to_device([1, 2], torch.int64, torch.device("cpu"))
    tensor([1, 2])
    """
    if not is_asynchronous(device.type):
        return torch.tensor(values, dtype=dtype, device=device)
    return torch.tensor(values, dtype=dtype, device="cpu", pin_memory=True).to(
        device, non_blocking=True
    )


class CopyStream:
    """A stream of a device that copies to pinned memory next to the computation.

    `event` tells when.

    compute   backward 2      backward 1
    copies              grads 2         grads 1   event
    """

    def __init__(self, device: torch.device) -> None:
        self._module = torch.get_device_module(device.type)
        self._device, self._stream = device, self._module.Stream(device)
        # tensors that are being copied, with an event after each: their memory must stay
        self._sources: list[tuple[Any, Tensor]] = []

    def to_host(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Copy x as it will be after the work that the current stream has so far.

        Return the copy, whose values come later.
        """
        out = (
            torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=True)
            if out is None
            else out
        )
        self._stream.wait_stream(self._module.current_stream(self._device))
        with self._module.stream(self._stream):
            out.copy_(x, non_blocking=True)
        self._sources = [(event, source) for event, source in self._sources if not event.query()]
        self._sources.append((self.event(), x))
        return out

    def event(self) -> Any:
        """Return an event after all copies so far."""
        return self._stream.record_event()

    def synchronize(self) -> None:
        """Let the host wait for all copies so far."""
        if self._sources:
            self._sources.pop()[0].synchronize()
            self._sources.clear()
