"""The steps of a save: every rank writes its pieces, then rank 0 commits them as a checkpoint."""

from __future__ import annotations

import io
import json
import threading
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from ...kernels.box import Box, box_origin, slices
from ..tensor.sharded_tensor import ShardedTensor
from .agreement import CheckpointError, brief, is_out_of_memory
from .placing import WriteItem
from .storage import folder as folders
from .storage.files import Sink, torch_save, write_whole
from .storage.lease import Lease
from .storage.manifest import StoredLeaf, StoredPiece, index_of, manifest_of
from .tree import Path as TreePath
from .tree import Structure

_POLL_S = 0.01
_LOST_S = 0.25  # how often to ask whether the rank that is waited for has died
# how long the thread of an asynchronous save waits for other ranks after the program has ended
_AFTER_END_S = 30.0


@dataclass(frozen=True)
class SaveJob:
    """A save in progress; all ranks have the same plan.

    Attributes:
        rank, world: this rank, and the number of ranks.
        step: the step of the checkpoint.
        keep: the number of complete checkpoints to keep; None for all.
        unfinished: the folder to write to.
        nonce: in its name.
        plan: all pieces with their writers.
        leaves: this rank's leaves by name; copies on the host for an asynchronous save.
        structure, paths: of the tree.
        stopped: set when rank 0 must stop waiting for others.
        lease: on rank 0, the lease of the folder of checkpoints.
        ready: waits until the leaves have their values; None if they have.
        is_lost: whether the process of a rank is known to have died.
    """

    rank: int
    world: int
    step: int
    keep: int | None
    unfinished: Path
    nonce: str
    plan: list[WriteItem]
    leaves: Mapping[str, Any]
    structure: Structure
    paths: Mapping[str, TreePath]
    stopped: threading.Event
    lease: Lease | None
    ready: Callable[[], None] | None = None
    is_lost: Callable[[int], bool] = lambda rank: False

    def write(self) -> None:
        """Write and sync this rank's pieces, then their list."""
        if self.ready is not None:
            self.ready()
        mine = [
            (number, piece) for number, piece in enumerate(self.plan) if piece.rank == self.rank
        ]
        path = self.unfinished / _file(self.rank)
        try:
            written = []
            if mine:
                with Sink(path) as sink:
                    written = [
                        [number, *_write_piece(sink, self._data(piece))] for number, piece in mine
                    ]
                    sink.sync()
            path = self.unfinished / _part(self.rank)
            write_whole(path, json.dumps(written).encode())
        except OSError as error:
            raise CheckpointError(self._error_text(path, error)) from error
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            raise CheckpointError(
                f"the checkpoint of step {self.step} was not made: rank {self.rank} ran out of "
                f"memory ({brief(error)}); complete checkpoints are unchanged"
            ) from error

    def _data(self, piece: WriteItem) -> Tensor | bytes:
        leaf = self.leaves[piece.name]
        return serialize(leaf) if piece.box is None else on_host(part_of(leaf, piece.box))

    def commit(self) -> tuple[folders.Checkpoint, list[Path]]:
        """Commit on rank 0 after all ranks' writes: write index and manifest, rename the folder.

        Returns:
            The checkpoint, and the renamed folders to remove: the one it replaces, and those older
            than `keep`.
        """
        path = self.unfinished
        try:
            parts = {rank: json.loads(self._wait_for_rank(rank)) for rank in range(self.world)}
            entries, files = self._list_pieces(parts)
            path = self.unfinished / folders.METADATA
            index = index_of(entries, self.unfinished.parent / folders.name(self.step), self.paths)
            write_whole(path, index)
            files[folders.METADATA] = len(index), [(0, len(index), zlib.crc32(index))]
            for rank in range(self.world):
                (self.unfinished / _part(rank)).unlink()
            path = self.unfinished / folders.MANIFEST
            write_whole(path, manifest_of(self.step, self.world, self.structure, files))
            path = self.unfinished.parent
            retired = folders.commit_folder(self.unfinished, self.step, self.nonce)
            if self.keep is not None:
                retired += folders.retire_old(path, self.keep, self.step)
        except OSError as error:
            raise CheckpointError(self._error_text(path, error)) from error
        finally:
            self.end()
        return folders.Checkpoint(self.step, path / folders.name(self.step)), retired

    def _wait_for_rank(self, rank: int) -> bytes:
        """Wait for a rank's list of written pieces and return it."""
        path, ended, asked = self.unfinished / _part(rank), None, time.monotonic()
        while not path.exists():
            if not self.unfinished.is_dir():
                raise CheckpointError(
                    f"the checkpoint of step {self.step} was not made: {self.unfinished} was "
                    "removed"
                )
            if time.monotonic() > asked + _LOST_S:
                asked = time.monotonic()
                if self.is_lost(rank) and not path.exists():
                    raise CheckpointError(
                        f"the checkpoint of step {self.step} was not made: rank {rank} died before "
                        "it had written its part"
                    )
            if not threading.main_thread().is_alive():
                ended = ended or time.monotonic()
            if self.stopped.wait(_POLL_S) or (ended and time.monotonic() > ended + _AFTER_END_S):
                raise CheckpointError(
                    f"the checkpoint of step {self.step} is not complete: rank {rank} has not "
                    "written its part"
                )
        return path.read_bytes()

    def _list_pieces(
        self, parts: Mapping[int, list[list[int]]]
    ) -> tuple[dict[str, StoredLeaf], dict[str, tuple[int, list[tuple[int, int, int]]]]]:
        """Return the leaves with their pieces, and the files."""
        where = {
            number: (rank, *rest) for rank, written in parts.items() for number, *rest in written
        }
        entries: dict[str, StoredLeaf] = {}
        files: dict[str, tuple[int, list[tuple[int, int, int]]]] = {}
        for number, piece in enumerate(self.plan):
            entry = entries.setdefault(piece.name, StoredLeaf(piece.shape, piece.dtype))
            if number in where:
                rank, offset, length, crc = where[number]
                entry.pieces.append(
                    StoredPiece(piece.name, piece.box, _file(rank), offset, length, crc)
                )
                _, pieces = files.get(_file(rank), (0, []))
                pieces.append((offset, length, crc))
                files[_file(rank)] = (
                    offset + length,
                    pieces,
                )  # a rank writes its pieces in the order of the plan
        return entries, files

    def _error_text(self, path: Path, error: OSError) -> str:
        return (
            f"the checkpoint of step {self.step} was not made: rank {self.rank} could not write "
            f"{path} ({error.strerror or error}); complete checkpoints are unchanged"
        )

    def clear(self) -> None:
        """Remove, on rank 0, the files of a failed save."""
        if self.rank == 0 and self.unfinished.exists():
            folders.remove(self.unfinished)
        self.end()

    def end(self) -> None:
        """End the save; later calls do nothing."""
        if self.lease is not None and self.lease.saving:
            self.lease.end()


def _write_piece(sink: Sink, data: Tensor | bytes) -> tuple[int, int, int]:
    """Write a piece; return (offset, length, CRC-32)."""
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
    """Return a box of the global tensor, as a view of this rank's part."""
    if isinstance(leaf, ShardedTensor):
        return leaf._local.detach()[slices(box, box_origin(leaf._layout.box))]
    return leaf.detach()[slices(box)]


def on_host(x: Tensor, copy: bool = False) -> Tensor:
    """Return a contiguous host tensor with its own storage: `torch.save` writes whole storages."""
    x = x.resolve_conj().resolve_neg().to("cpu", copy=copy).contiguous()
    return x if x.untyped_storage().nbytes() == x.nbytes else x.clone()


def serialize(value: Any) -> bytes:
    """Return a value that is not a tensor, as torch.distributed.checkpoint stores it."""
    file = io.BytesIO()
    torch_save(value, file)
    return file.getvalue()
