"""One save, step by step: what a rank writes, and how rank 0 makes a checkpoint of what all have written."""

from __future__ import annotations

import io
import json
import threading
import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...kernels.box import Box, box_origin, slices
from ..tensor.sharded_tensor import ShardedTensor
from .agreement import CheckpointError
from .placing import Placed
from .storage import folder as folders
from .storage.files import Sink, write_whole
from .storage.lease import Lease
from .storage.manifest import Entry, Piece, index_of, manifest_of
from .tree import Path as TreePath
from .tree import Structure

_POLL_S = 0.01
_AFTER_END_S = 30.0  # how long the thread of an asynchronous save waits for other ranks when the program has ended


@dataclass(frozen=True)
class Saving:
    """A save of which all ranks know the same.

    Attributes:
        rank, world: this rank, and how many there are.
        step: of the checkpoint.
        keep: how many complete checkpoints to keep; None for all.
        unfinished: the folder that is written to.
        nonce: in its name.
        plan: every piece and who writes it.
        leaves: this rank's leaves by name; copies on the host, if this goes on beside the program.
        structure, paths: of the tree.
        stopped: set when rank 0 need not wait for others any more.
        lease: on rank 0, of the folder of checkpoints.
    """

    rank: int
    world: int
    step: int
    keep: int | None
    unfinished: Path
    nonce: str
    plan: list[Placed]
    leaves: Mapping[str, Any]
    structure: Structure
    paths: Mapping[str, TreePath]
    stopped: threading.Event
    lease: Lease | None

    def write(self) -> None:
        """This rank's pieces are on the disk, and then what they are."""
        mine = [(number, piece) for number, piece in enumerate(self.plan) if piece.rank == self.rank]
        path = self.unfinished / _file(self.rank)
        try:
            written = []
            if mine:
                with Sink(path) as sink:
                    written = [[number, *_written(sink, self._data(piece))] for number, piece in mine]
                    sink.sync()
            path = self.unfinished / _part(self.rank)
            write_whole(path, json.dumps(written).encode())
        except OSError as error:
            raise CheckpointError(self._failed(path, error)) from error

    def _data(self, piece: Placed) -> Tensor | bytes:
        leaf = self.leaves[piece.name]
        return serialised(leaf) if piece.box is None else on_host(part_of(leaf, piece.box))

    def commit(self) -> tuple[folders.Checkpoint, list[Path]]:
        """On rank 0, when all have written: the index, the manifest, the name.

        Returns:
            The checkpoint, and the folders without a name that are to be removed now: what it replaces, and what is older than `keep`.
        """
        path = self.unfinished
        try:
            parts = {rank: json.loads(self._arrived(rank)) for rank in range(self.world)}
            entries, files = self._listed(parts)
            path = self.unfinished / folders.METADATA
            index = index_of(entries, self.unfinished.parent / folders.name(self.step), self.paths)
            write_whole(path, index)
            files[folders.METADATA] = len(index), [(0, len(index), zlib.crc32(index))]
            for rank in range(self.world):
                (self.unfinished / _part(rank)).unlink()
            path = self.unfinished / folders.MANIFEST
            write_whole(path, manifest_of(self.step, self.world, self.structure, files))
            path = self.unfinished.parent
            retired = folders.take_name(self.unfinished, self.step, self.nonce)
            if self.keep is not None:
                retired += folders.too_old(path, self.keep, self.step)
        except OSError as error:
            raise CheckpointError(self._failed(path, error)) from error
        finally:
            self.end()
        return folders.Checkpoint(self.step, path / folders.name(self.step)), retired

    def _arrived(self, rank: int) -> bytes:
        """What a rank says that it has written; waits for it."""
        path, ended = self.unfinished / _part(rank), None
        while not path.exists():
            if not self.unfinished.is_dir():
                raise CheckpointError(f"the checkpoint of step {self.step} was not made: somebody has removed {self.unfinished}")
            if not threading.main_thread().is_alive():
                ended = ended or time.monotonic()
            if self.stopped.wait(_POLL_S) or (ended and time.monotonic() > ended + _AFTER_END_S):
                raise CheckpointError(f"the checkpoint of step {self.step} is not complete: rank {rank} has not written its part")
        return path.read_bytes()

    def _listed(self, parts: Mapping[int, list[list[int]]]) -> tuple[dict[str, Entry], dict[str, tuple[int, list[tuple[int, int, int]]]]]:
        """The leaves as they lie in files, and the files."""
        where = {number: (rank, *rest) for rank, written in parts.items() for number, *rest in written}
        entries: dict[str, Entry] = {}
        files: dict[str, tuple[int, list[tuple[int, int, int]]]] = {}
        for number, piece in enumerate(self.plan):
            entry = entries.setdefault(piece.name, Entry(piece.shape, piece.dtype))
            if number in where:
                rank, offset, length, crc = where[number]
                entry.pieces.append(Piece(piece.name, piece.box, _file(rank), offset, length, crc))
                _, pieces = files.get(_file(rank), (0, []))
                pieces.append((offset, length, crc))
                files[_file(rank)] = offset + length, pieces  # a rank writes its pieces in the order of the plan
        return entries, files

    def _failed(self, path: Path, error: OSError) -> str:
        return (
            f"the checkpoint of step {self.step} was not made: rank {self.rank} could not write {path} ({error.strerror or error}); "
            "complete checkpoints are as they were"
        )

    def clear(self) -> None:
        """On rank 0: what was written of a save that failed goes."""
        if self.rank == 0 and self.unfinished.exists():
            folders.remove(self.unfinished)
        self.end()

    def end(self) -> None:
        """Nothing more is written; again, it does nothing."""
        if self.lease is not None and self.lease.saving:
            self.lease.end()


def _written(sink: Sink, data: Tensor | bytes) -> tuple[int, int, int]:
    """Writes a piece: (offset, length, CRC-32)."""
    start = sink.piece()
    if isinstance(data, bytes):
        sink.write(data)
    else:
        sink.save(data)
    return start, sink.position - start, sink.crc


def _file(rank: int) -> str:
    return f"__{rank}_0.distcp"


def _part(rank: int) -> str:
    return f"__{rank}.written.json"


def part_of(leaf: Tensor, box: Box) -> Tensor:
    """A box of the global tensor, cut out of what this rank holds."""
    if isinstance(leaf, ShardedTensor):
        return leaf._local.detach()[slices(box, box_origin(leaf._layout.box))]
    return leaf.detach()[slices(box)]


def on_host(x: Tensor, copy: bool = False) -> Tensor:
    """The values in host memory, contiguous, with nothing else in their storage: `torch.save` writes storages."""
    x = x.resolve_conj().resolve_neg().to("cpu", copy=copy).contiguous()
    return x if x.untyped_storage().nbytes() == x.nbytes else x.clone()


def serialised(value: Any) -> bytes:
    """A value that is no tensor, as torch.distributed.checkpoint stores it."""
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()
