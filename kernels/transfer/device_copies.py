"""Small tables of the host on a device.

Copied once, without the host waiting for the device, and safe under CUDA graph capture.

    outside of a capture    host -> pinned memory ~> device, on the current stream; another stream
                            waits for the copy's event once
    inside, copied before   the copy, which is then kept: a graph has no way to tell when it is gone
    inside, not yet copied  reserved pinned memory ~> memory of the graph: the copy becomes a node
                            of the graph, and is repeated by every replay, so that no one reads
                            memory that is first written by a replay

Memory cannot be pinned during a capture, so a reserve of it is pinned by the first copy outside of
one.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

# pinned memory for some ten thousand launches in graphs, less if they have many tensors
RESERVED_BYTES = 1 << 20
ALIGNED = 64  # bytes


class DeviceCopies:
    """A constant tensor of int64 on the host, and its copies on devices.

    >>> table = DeviceCopies([3, 1, 2])
    >>> table.on(torch.device("cpu")) is table.host
    True
    """

    __slots__ = ("_copies", "host")

    def __init__(self, values: Sequence[Any]) -> None:
        # on the CPU whatever torch's default device is
        self.host = torch.tensor(values, dtype=torch.int64, device="cpu")
        self._copies: dict[torch.device, Tensor | _StreamCopy] = {}

    def on(self, device: torch.device) -> Tensor:
        """Return the tensor on a device, for launches on the current stream.

        Raises:
            RuntimeError: under CUDA graph capture, if the reserve of pinned memory is too small.
        """
        if device.type == "cuda":
            return self._on_cuda(device)
        copy = self._copies.get(device)
        if not isinstance(copy, Tensor):
            copy = self._copies[device] = self.host.to(device)
        return copy

    def _on_cuda(self, device: torch.device) -> Tensor:
        capturing = torch.cuda.is_current_stream_capturing()
        copy: Any = self._copies.get(device)
        if copy is None:
            if capturing:
                return _reserve.take(self.host).to(device, non_blocking=True)
            _reserve.refill()
            copy = self._copies[device] = _StreamCopy(
                self.host.pin_memory().to(device, non_blocking=True), device
            )
        if capturing:
            _reserve.of_graphs[id(copy.tensor)] = copy.tensor
        else:
            copy.order(device)
        return copy.tensor


class _StreamCopy:
    """A copy that one stream enqueued, and the streams whose later work runs after it."""

    __slots__ = ("_event", "_streams", "tensor")

    def __init__(self, tensor: Tensor, device: torch.device) -> None:
        self.tensor, self._event = tensor, torch.cuda.current_stream(device).record_event()
        self._streams = {_stream_of(device)}

    def order(self, device: torch.device) -> None:
        """Make the current stream run after the copy."""
        if (number := _stream_of(device)) not in self._streams:
            stream = torch.cuda.current_stream(device)
            stream.wait_event(self._event)
            self.tensor.record_stream(stream)
            self._streams.add(number)


def _stream_of(device: torch.device) -> int:
    """Return the number of the current stream, without its object, which takes a microsecond."""
    return torch._C._cuda_getCurrentRawStream(device.index)


class _Reserve:
    """Pinned memory for graphs.

    Attributes:
        of_graphs: what graphs read when they are replayed, for ever.
    """

    def __init__(self) -> None:
        self.of_graphs: dict[int, Tensor] = {}
        self._free: Tensor | None = None
        self._lock = threading.Lock()

    def refill(self) -> None:
        """Pin memory, outside of a capture."""
        if self._free is None or self._free.numel() < RESERVED_BYTES // 2:
            with self._lock, torch.inference_mode(False):
                self._free = torch.empty(
                    RESERVED_BYTES, dtype=torch.uint8, device="cpu", pin_memory=True
                )

    def take(self, host: Tensor) -> Tensor:
        """Return a pinned copy of a tensor, which is kept for ever."""
        size = -(-host.nbytes // ALIGNED) * ALIGNED
        with self._lock:
            free = 0 if self._free is None else self._free.numel()
            if self._free is None or size > free:
                raise RuntimeError(
                    f"a kernel launched while a CUDA graph is captured needs {size} bytes of "
                    f"pinned memory for its table, and {free} were set aside before: run the step "
                    "once before capturing it, so that its tables are on the device"
                )
            piece, self._free = self._free[: host.nbytes], self._free[size:]
        pinned = piece.view(host.dtype).view(host.shape).copy_(host)
        self.of_graphs[id(pinned)] = pinned
        return pinned


_reserve = _Reserve()
