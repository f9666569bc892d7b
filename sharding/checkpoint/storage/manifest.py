"""A checkpoint's index in torch.distributed.checkpoint's format, and its manifest of checksums."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import pickle
import platform
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ....kernels.box import Box, box_origin, box_shape, box_size
from ....mesh.text import shortened
from ..agreement import CheckpointError
from ..tree import Structure, structure_from
from .files import read_regular
from .folder import MANIFEST, METADATA
from .index import (
    DEEPEST,
    Damage,
    IndexedLeaf,
    check_file_name,
    check_name,
    check_tiling,
    read_entries,
    whole_number,
)

_FORMAT = "shardmesh checkpoint 1"
_LONGEST = 2 << 30  # bytes of an index or a manifest


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
    """A leaf: shape, dtype and pieces of a tensor, or the one piece of another value.

    `is_sharded`: whether it is known to be of a `ShardedTensor`.
    """

    shape: torch.Size | None
    dtype: torch.dtype | None
    pieces: list[StoredPiece] = field(default_factory=list)
    is_sharded: bool = False


class StoredFile(NamedTuple):
    """A file: its bytes, and the (offset, length, CRC-32) of each piece in it."""

    size: int
    pieces: list[tuple[int, int, int]]


@dataclass(frozen=True)
class Stored:
    """A checkpoint's leaves by name, structure and sizes of files; `step` is None from torch."""

    folder: Path
    entries: dict[str, StoredLeaf]
    structure: Structure
    sizes: dict[str, int]
    step: int | None


# -- write -----------------------------------------------------------------------------------------


def index_of(
    entries: Mapping[str, StoredLeaf], folder: Path, paths: Mapping[str, tuple[Any, ...]]
) -> bytes:
    """Return torch's file `.metadata`: the boxes of each tensor and their files."""
    from torch.distributed.checkpoint import metadata as dcp  # here because importing it takes long
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    def metadata_of(entry: StoredLeaf) -> Any:
        if entry.shape is None or entry.dtype is None:
            return dcp.BytesStorageMetadata()
        boxes = [piece.box for piece in entry.pieces if piece.box is not None]
        chunks = [
            dcp.ChunkStorageMetadata(torch.Size(box_origin(box)), torch.Size(box_shape(box)))
            for box in boxes
        ]
        return dcp.TensorStorageMetadata(
            dcp.TensorProperties(dtype=entry.dtype), entry.shape, chunks
        )

    where: dict[Any, Any] = {}
    for entry in entries.values():
        for piece in entry.pieces:
            key = dcp.MetadataIndex(
                piece.name, None if piece.box is None else box_origin(piece.box)
            )
            where[key] = _StorageInfo(piece.file, piece.offset, piece.length)
    meta = dcp.StorageMeta(checkpoint_id=str(folder))
    by_name = {name: metadata_of(entry) for name, entry in entries.items()}
    return pickle.dumps(dcp.Metadata(by_name, dict(paths), where, meta, version="1.0.0"))


def manifest_of(
    step: int,
    world: int,
    structure: Structure,
    files: Mapping[str, StoredFile],
    sharded: Sequence[str],
) -> bytes:
    """Return the manifest: size and pieces of each file, with a checksum of itself.

    And which leaves are `ShardedTensor`s: optimizers compute with parameters and their states,
    which must be on one mesh.
    """
    manifest = {
        "format": _FORMAT,
        "step": step,
        "world": world,
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "checksum": "crc32",
        "files": {name: {"size": file.size, "pieces": file.pieces} for name, file in files.items()},
        "tree": structure,
        "sharded": list(sharded),
    }
    return json.dumps({"crc32": _crc_of(manifest), **manifest}).encode()


def _crc_of(manifest: Mapping[str, Any]) -> int:
    return zlib.crc32(
        json.dumps({key: value for key, value in manifest.items() if key != "crc32"}).encode()
    )


# -- read ------------------------------------------------------------------------------------------


def read_index(folder: Path) -> tuple[bytes | None, bytes]:
    """Return the bytes of the manifest, None if torch wrote the checkpoint, and of the index.

    Raises:
        CheckpointError: the index is missing, or one of them cannot be read; names it.
    """
    manifest, index = folder / MANIFEST, folder / METADATA
    if not os.path.lexists(index):
        raise CheckpointError(
            f"{index} is missing: {folder} is not a complete checkpoint; load another step, or "
            "restore the file"
        )
    return (_bytes_of(manifest) if os.path.lexists(manifest) else None), _bytes_of(index)


def _bytes_of(path: Path) -> bytes:
    try:
        return read_regular(path, _LONGEST)
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read ({shortened(error)}); load another step, or restore the file"
        ) from error


def parse(folder: Path, manifest: bytes | None, index: bytes) -> Stored:
    """Parse the manifest and the index, and check everything in them.

    Raises:
        CheckpointError: one of them is damaged; names it.
    """
    described = None
    if manifest is not None:
        with _names(folder / MANIFEST, "damaged"):
            described = _parse_manifest(folder / MANIFEST, manifest)
        if zlib.crc32(index) != described.crcs[METADATA, 0][1]:
            raise CheckpointError(
                f"{folder / METADATA} is damaged: its CRC-32 is not that of the manifest; load "
                "another step"
            )
    with _names(folder / METADATA, "damaged, or not an index of torch.distributed.checkpoint"):
        indexed, paths = read_entries(index)
        entries = {name: _stored_leaf(name, leaf, described) for name, leaf in indexed.items()}
        structure = structure_from(paths or {name: (name,) for name in entries})
        if described is not None and described.structure is not None:
            structure = described.structure
    if described is None:
        return Stored(folder, entries, structure, {}, None)
    return Stored(folder, entries, structure, described.sizes, described.step)


@contextlib.contextmanager
def _names(path: Path, what: str) -> Iterator[None]:
    """Raise a CheckpointError that names the file for any error in reading what it has."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:  # also RecursionError: what the file has decides which
        if isinstance(error, MemoryError):
            raise
        raise CheckpointError(
            f"{path} cannot be read: {shortened(error)}; it is {what}: load another step"
        ) from error


@dataclass(frozen=True)
class _Manifest:
    """A manifest: step, structure, file sizes, (length, CRC-32) of pieces by file and offset.

    `sharded`: the names of `ShardedTensor`s; none in manifests of earlier versions.
    """

    step: int
    structure: Structure
    sizes: dict[str, int]
    crcs: dict[tuple[str, int], tuple[int, int]]
    sharded: frozenset[str]


def _parse_manifest(path: Path, manifest: bytes) -> _Manifest:
    try:
        parsed = json.loads(manifest, parse_constant=_no_constant, object_pairs_hook=dict_of_pairs)
        intact = parsed["crc32"] == _crc_of(parsed)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        intact = False
    if not intact:
        raise CheckpointError(f"{path} is damaged: its own CRC-32 does not fit; load another step")
    if parsed.get("format") != _FORMAT:
        has = shortened(parsed.get("format"))
        raise CheckpointError(
            f"{path} has the format {has!r}, but this version of shardmesh reads {_FORMAT!r}"
        )
    sizes: dict[str, int] = {}
    crcs: dict[tuple[str, int], tuple[int, int]] = {}
    for file, known in parsed["files"].items():
        sizes[check_file_name(file)] = size = whole_number(known["size"], "a size")
        for offset, length, crc in known["pieces"]:
            at = file, whole_number(offset, "an offset")
            if (
                at in crcs
                or offset + whole_number(length, "a length") > size
                or whole_number(crc, "a CRC-32") >= 1 << 32
            ):
                raise Damage(
                    f"a piece of {file} is at {offset} with {length} bytes and the CRC-32 {crc}, "
                    f"but the file has {size} bytes"
                )
            crcs[at] = length, crc
    if (METADATA, 0) not in crcs:
        raise Damage(f"it does not list {METADATA}")
    check_structure(parsed.get("tree"))
    sharded = parsed.get("sharded", [])
    if type(sharded) is not list:
        raise Damage("the names of its sharded tensors are no list")
    for name in sharded:
        check_name(name)
    step = whole_number(parsed["step"], "the step")
    return _Manifest(step, parsed.get("tree"), sizes, crcs, frozenset(sharded))


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")


def dict_of_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object as a dict; for `object_pairs_hook`. Raises: ValueError: equal names."""
    mapping = dict(pairs)
    if len(mapping) != len(pairs):
        raise ValueError("a name stands twice")
    return mapping


def check_structure(structure: Any, depth: int = 0) -> None:
    """Check that data is the structure of a tree; None if the checkpoint has none.

    Raises:
        Damage: it is not, or it has more than 200 levels.
    """
    if depth > DEEPEST:
        raise Damage(f"the tree has more than {DEEPEST} levels")
    if type(structure) is str:
        check_name(structure)
    elif not (depth == 0 and structure is None):
        if type(structure) is not dict or len(structure) != 1:
            raise Damage(
                f"the tree has {shortened(structure)}, which is neither a leaf nor a container"
            )
        ((kind, items),) = structure.items()
        if kind not in ("dict", "list", "tuple") or type(items) is not list:
            raise Damage(f"the tree has {shortened(structure)}, which is not a container")
        keys = set()
        for item in items:
            if kind == "dict":
                key, item = item
                if type(key) not in (str, int) or key in keys:
                    raise Damage(
                        f"the tree has the key {shortened(key)}, which is none, or stands twice"
                    )
                check_name(str(key))
                keys.add(key)
            check_structure(item, depth + 1)


def _stored_leaf(name: str, leaf: IndexedLeaf, described: _Manifest | None) -> StoredLeaf:
    """Return a leaf of the index with the manifest's checksums; both must have the same pieces."""
    pieces = []
    for box, file, offset, length in leaf.pieces:
        crc = None
        if described is not None:
            listed, crc = described.crcs.get((file, offset), (None, None))
            if listed != length:
                raise Damage(
                    f"{shortened(name)} has {length} bytes in {file} at {offset}, which {MANIFEST} "
                    "does not list"
                )
        pieces.append(StoredPiece(name, box, file, offset, length, crc))
    if leaf.shape is None and not pieces:
        raise Damage(f"{shortened(name)} is a value without bytes")
    is_sharded = described is not None and name in described.sharded
    return StoredLeaf(leaf.shape, leaf.dtype, pieces, is_sharded)


def check_whole(stored: Stored, name: str) -> None:
    """Check that a tensor has all its elements, and each once.

    Raises:
        CheckpointError: a piece is missing, or two have the same elements.
    """
    entry = stored.entries[name]
    if entry.shape is None:
        return
    boxes = [piece.box or () for piece in entry.pieces]
    have, need = sum(map(box_size, boxes)), entry.shape.numel()
    if have < need:
        what = f"{shortened(name)!r} in {stored.folder} has {have} of its {need} elements"
        raise CheckpointError(f"{what}: part of the checkpoint was never written")
    with _names(stored.folder / METADATA, "damaged"):
        check_tiling(name, entry.shape, boxes)


@functools.cache
def import_format() -> None:
    """Import torch's classes for the index."""
    import torch.distributed.checkpoint.filesystem  # noqa: F401
