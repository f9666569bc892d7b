"""The index of a checkpoint in torch.distributed.checkpoint's format, and the manifest with checksums."""

from __future__ import annotations

import functools
import io
import json
import pickle
import platform
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ....kernels.box import Box, box_origin, box_shape, box_size
from ..agreement import CheckpointError
from ..tree import Structure, structure_from
from .folder import MANIFEST, METADATA

_FORMAT = "shardmesh checkpoint 1"


@dataclass(frozen=True)
class StoredPiece:
    """A range of bytes in a file: a box of a tensor, or another value, as written by `torch.save`.

    Attributes:
        box: of the global tensor; None for a value.
        crc: CRC-32 of the bytes; None if the checkpoint has none.
    """

    name: str
    box: Box | None
    file: str
    offset: int
    length: int
    crc: int | None


@dataclass(frozen=True)
class StoredLeaf:
    """A leaf: shape, dtype and pieces of a tensor, or the one piece of another value."""

    shape: torch.Size | None
    dtype: torch.dtype | None
    pieces: list[StoredPiece] = field(default_factory=list)


@dataclass(frozen=True)
class Stored:
    """A checkpoint's leaves by name, their structure and the sizes of its files; `step` is None if torch wrote it."""

    folder: Path
    entries: dict[str, StoredLeaf]
    structure: Structure
    sizes: dict[str, int]
    step: int | None


# -- write -------------------------------------------------------------------------------------------------------------


def index_of(entries: Mapping[str, StoredLeaf], folder: Path, paths: Mapping[str, tuple[Any, ...]]) -> bytes:
    """Return the file `.metadata` of torch.distributed.checkpoint: the boxes of each tensor and their files."""
    from torch.distributed.checkpoint import metadata as dcp  # here because importing it takes long
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    def described(entry: StoredLeaf) -> Any:
        if entry.shape is None or entry.dtype is None:
            return dcp.BytesStorageMetadata()
        boxes = [piece.box for piece in entry.pieces if piece.box is not None]
        chunks = [dcp.ChunkStorageMetadata(torch.Size(box_origin(box)), torch.Size(box_shape(box))) for box in boxes]
        return dcp.TensorStorageMetadata(dcp.TensorProperties(dtype=entry.dtype), entry.shape, chunks)

    where = {
        dcp.MetadataIndex(piece.name, None if piece.box is None else box_origin(piece.box)): _StorageInfo(
            piece.file, piece.offset, piece.length
        )
        for entry in entries.values()
        for piece in entry.pieces
    }
    meta = dcp.StorageMeta(checkpoint_id=str(folder))
    described_all = {name: described(entry) for name, entry in entries.items()}
    return pickle.dumps(dcp.Metadata(described_all, dict(paths), where, meta, version="1.0.0"))


def manifest_of(step: int, world: int, structure: Structure, files: Mapping[str, tuple[int, list[tuple[int, int, int]]]]) -> bytes:
    """Return the manifest: the size of each file and `(offset, length, CRC-32)` of its pieces, with a checksum of itself."""
    manifest = {
        "format": _FORMAT,
        "step": step,
        "world": world,
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "checksum": "crc32",
        "files": {file: {"size": size, "pieces": pieces} for file, (size, pieces) in files.items()},
        "tree": structure,
    }
    return json.dumps({"crc32": _crc_of(manifest), **manifest}).encode()


def _crc_of(manifest: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps({key: value for key, value in manifest.items() if key != "crc32"}).encode())


# -- read --------------------------------------------------------------------------------------------------------------


def read_index(folder: Path) -> tuple[bytes | None, bytes]:
    """Return the bytes of the manifest, None if torch wrote the checkpoint, and of the index."""
    manifest, index = folder / MANIFEST, folder / METADATA
    if not index.is_file():
        raise CheckpointError(f"{index} is missing: {folder} is not a complete checkpoint; load another step, or restore the file")
    return (manifest.read_bytes() if manifest.is_file() else None), index.read_bytes()


def parse(folder: Path, manifest: bytes | None, index: bytes) -> Stored:
    """Parse the manifest and the index.

    Raises:
        CheckpointError: one of them is damaged; names it.
    """
    parsed = {"files": {}, "step": None} if manifest is None else _parse_manifest(folder / MANIFEST, manifest)
    files = parsed["files"]
    crcs = {(file, offset): crc for file, known in files.items() for offset, _, crc in known["pieces"]}
    if manifest is not None and (METADATA, 0) not in crcs:
        raise CheckpointError(f"{folder / MANIFEST} does not list {METADATA}: it is damaged")
    if manifest is not None and zlib.crc32(index) != crcs[METADATA, 0]:
        raise CheckpointError(f"{folder / METADATA} is damaged: its CRC-32 is not that of the manifest; load another step")
    metadata = _unpickled(folder / METADATA, index)
    structure = parsed.get("tree") or structure_from(metadata.planner_data or {name: (name,) for name in metadata.state_dict_metadata})
    sizes = {file: known["size"] for file, known in files.items()}
    return Stored(folder, _entries(metadata, crcs), structure, sizes, parsed["step"])


def _parse_manifest(path: Path, manifest: bytes) -> Any:
    try:
        parsed = json.loads(manifest)
        intact = parsed["crc32"] == _crc_of(parsed)
    except (ValueError, KeyError, TypeError):
        intact = False
    if not intact:
        raise CheckpointError(f"{path} is damaged: its own CRC-32 does not fit; load another step")
    if parsed["format"] != _FORMAT:
        raise CheckpointError(f"{path} has the format {parsed['format']!r}, but this version of shardmesh reads {_FORMAT!r}")
    return parsed


def _entries(metadata: Any, crcs: Mapping[tuple[str, int], int]) -> dict[str, StoredLeaf]:
    entries = {}
    for name, kind in metadata.state_dict_metadata.items():
        shape, properties = getattr(kind, "size", None), getattr(kind, "properties", None)
        entries[name] = StoredLeaf(shape, None if properties is None else properties.dtype)
    chunks = {
        (name, tuple(chunk.offsets)): chunk.sizes
        for name, kind in metadata.state_dict_metadata.items()
        for chunk in getattr(kind, "chunks", ())
    }
    for index, info in metadata.storage_data.items():
        if getattr(info, "transform_descriptors", None):
            raise CheckpointError(f"{index.fqn!r} is stored transformed ({info.transform_descriptors}): load it with torch's own tools")
        box = None
        if entries[index.fqn].shape is not None:
            box = tuple((start, start + size) for start, size in zip(index.offset, chunks[index.fqn, tuple(index.offset)], strict=True))
        crc = crcs.get((info.relative_path, info.offset))
        entries[index.fqn].pieces.append(StoredPiece(index.fqn, box, info.relative_path, info.offset, info.length, crc))
    return entries


def check_whole(stored: Stored, name: str) -> None:
    """Check that a tensor has all its pieces.

    Raises:
        CheckpointError: a piece is missing.
    """
    entry = stored.entries[name]
    if entry.shape is None:
        return
    have, need = sum(box_size(piece.box or ()) for piece in entry.pieces), entry.shape.numel()
    if have != need:
        raise CheckpointError(f"{name!r} in {stored.folder} has {have} of its {need} elements: part of the checkpoint was never written")


# The only classes and functions that a pickled index may refer to.
_DTYPES = {str(value).removeprefix("torch.") for value in vars(torch).values() if isinstance(value, torch.dtype)}
_PATHS = {"Path", "PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"}
_CLASSES = {"Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "MetadataIndex", "TensorProperties"}
_KNOWN = {
    "torch.distributed.checkpoint.metadata": _CLASSES | {"StorageMeta", "_MEM_FORMAT_ENCODING"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size", *_DTYPES},
    "pathlib": _PATHS,
    "pathlib._local": _PATHS,  # Python 3.13
    "collections": {"OrderedDict"},
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in _KNOWN.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it refers to {module}.{name}, which an index of a checkpoint may not")


def _unpickled(path: Path, index: bytes) -> Any:
    import_format()
    try:
        return _Unpickler(io.BytesIO(index)).load()
    except Exception as error:
        raise CheckpointError(f"{path} cannot be read ({error}): it is damaged, or not an index of torch.distributed.checkpoint") from error


@functools.cache
def import_format() -> None:
    """Import torch's classes for the index."""
    import torch.distributed.checkpoint.filesystem  # noqa: F401
