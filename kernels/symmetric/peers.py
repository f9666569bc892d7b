"""Peers: the memory that the ranks of a group share, as one of them addresses it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..strided import alignment
from ..strided_views import UNIT

MAX_RANKS = 128
MAX_PROGRAMS = (
    64  # fewer than any device of this kind has multiprocessors (A100 108, H100 132, MI300 304)
)
PAD_BYTES = 4 * MAX_PROGRAMS * MAX_RANKS


class SymmetricMemoryError(RuntimeError):
    """A rank of the group did not reach a barrier."""


@dataclass
class Peers:
    """The memory that the ranks of a group share, as one of them addresses it.

    Attributes:
        rank: this rank's index in the group.
        size: of the group.
        buffer: this rank's shared memory, uint8, of the same length on every rank, at a multiple of
            16.
        buffers: int64 [size] on the device: the address of every rank's buffer, in this rank's
            address space.
        pads: int64 [size] on the device: the address of every rank's signal pad, `PAD_BYTES` of
            zeros at first.
        epochs: int32 [MAX_PROGRAMS] on the device, zeros at first; only this rank uses it.
        error: int32 [size], zeros at first: 1 for each rank that did not arrive. In pinned host
            memory if the device is an accelerator, so that the host can read it without
            synchronizing.
        spins: polls for a peer before it counts as missing; a poll takes about a microsecond on a
            GPU.
    """

    rank: int
    size: int
    buffer: Tensor
    buffers: Tensor
    pads: Tensor
    epochs: Tensor
    error: Tensor
    spins: int
    staged: Tensor = field(init=False, repr=False)
    _staging: dict[torch.dtype, Tensor] = field(init=False, repr=False, default_factory=dict)
    _flags: memoryview = field(init=False, repr=False)

    def __post_init__(self) -> None:
        _check_peers(self)
        self._flags = self.error.numpy().data  # read in a tenth of the time of a tensor
        self.staged = self.buffers + self.region_bytes * 2 * MAX_PROGRAMS

    @property
    def region_bytes(self) -> int:
        """Bytes that one program of an all-reduce may write in a round.

        All regions together are a quarter of the buffer.
        """
        return self.buffer.numel() // (8 * MAX_PROGRAMS) // 128 * 128

    def staging(self, dtype: torch.dtype) -> Tensor:
        """`staging(dtype) -> flat`: where this rank packs data for its peers to pull."""
        flat = self._staging.get(dtype)
        if flat is None:
            area = self.buffer[self.region_bytes * 2 * MAX_PROGRAMS :]
            with torch.inference_mode(False):
                flat = self._staging[dtype] = area[
                    : area.numel() // dtype.itemsize * dtype.itemsize
                ].view(dtype)
        return flat


def _check_peers(p: Peers) -> None:
    if not (0 <= p.rank < p.size <= MAX_RANKS):
        raise ValueError(
            f"rank {p.rank} of a group of {p.size}: a group of at most {MAX_RANKS} ranks can share "
            "memory"
        )
    expected = {
        "buffers": (torch.int64, p.size),
        "pads": (torch.int64, p.size),
        "epochs": (torch.int32, MAX_PROGRAMS),
        "error": (torch.int32, p.size),
    }
    for name, (dtype, length) in expected.items():
        tensor: Tensor = getattr(p, name)
        if tensor.dtype != dtype or tensor.shape != (length,):
            raise ValueError(
                f"{name} is {tensor.dtype} of shape {tuple(tensor.shape)}: give {dtype} of shape "
                f"({length},)"
            )
    if p.buffer.dtype != torch.uint8 or p.buffer.ndim != 1 or alignment([p.buffer]) < UNIT:
        raise ValueError(
            f"buffer is {p.buffer.dtype} of {p.buffer.ndim} dims: give uint8 of 1 dim at a "
            f"multiple of {UNIT} bytes"
        )


def check(peers: Peers) -> None:
    """`check(peers)`: raise if the device has reported a missing rank.

    Every operation begins with it.

    Raises:
        SymmetricMemoryError: names the ranks of the group that did not reach a barrier.
    """
    if peers._flags.tobytes().strip(b"\0"):  # host memory: no synchronization
        late = peers.error.nonzero().flatten().tolist()
        names = f"rank {late[0]}" if len(late) == 1 else f"ranks {', '.join(map(str, late))}"
        raise SymmetricMemoryError(
            f"{names} of the group of {peers.size} did not arrive: rank {peers.rank} polled "
            f"{peers.spins} times at a barrier. Either that rank ended or hangs, or it calls other "
            "operations than this one. The results of this operation and later ones are undefined "
            "here, and the group's shared memory cannot be used again: allocate it again."
        )


def check_if_done(peers: Peers) -> None:
    """Call `check` on the CPU, where a launch has completed when it returns."""
    if peers.buffer.device.type == "cpu":
        check(peers)


def simulated_peers(
    size: int, nbytes: int, device: torch.device | str, spins: int = 1 << 20
) -> list[Peers]:
    """`simulated_peers(size, nbytes, device) -> one Peers per rank`.

    All in this process, on one device.

    For tests and measurements on one accelerator: each rank's operations on a separate stream, or
    all-reduces of all ranks in one launch (`symmetric_triton.launch_all_reduce(..., ranks=size)`).
    All programs of all ranks must fit on it together.
    """
    # each rank's buffer keeps this memory alive
    memory = torch.zeros(size, nbytes + PAD_BYTES, dtype=torch.uint8, device=device)
    epochs = torch.zeros(size, MAX_PROGRAMS, dtype=torch.int32, device=device)
    error = torch.zeros(size, size, dtype=torch.int32, device="cpu", pin_memory=memory.is_cuda)
    buffers = torch.tensor([x.data_ptr() for x in memory], device=device)
    return [
        Peers(r, size, memory[r, :nbytes], buffers, buffers + nbytes, epochs[r], error[r], spins)
        for r in range(size)
    ]
