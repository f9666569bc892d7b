"""Reading one piece of a file, directly into the tensor's memory if possible; CRC-32s are checked.

torch.save's container   | data.pkl, byteorder, ... | elements, in memory order | version, ... |
                           head, to a buffer          to the loaded tensor        tail, to a buffer
"""

from __future__ import annotations

import io
import os
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ....kernels.box import box_shape, box_size
from ....mesh.text import shortened
from ..agreement import CheckpointError, is_out_of_memory
from . import files
from .manifest import Stored, StoredPiece

_HEAD_BYTES = 4096  # more than what torch.save writes before the elements
_RECORD = b"PK\x03\x04"  # the signature of a record in the container
_RECORD_BYTES = 30  # before its name


def check_files(stored: Stored, pieces: Iterable[StoredPiece]) -> None:
    """Check that the files have the bytes of these pieces, before there is memory for them.

    Raises:
        CheckpointError: a file is missing or short; the text has the file and the leaf.
    """
    sizes: dict[str, int] = {}
    for piece in pieces:
        if piece.file not in sizes:
            try:
                with files.open_regular(stored.folder / piece.file) as file:
                    sizes[piece.file] = os.fstat(file.fileno()).st_size
            except OSError as error:
                raise CheckpointError(_unreadable(stored, piece, error)) from error
        if piece.offset + piece.length > sizes[piece.file]:
            raise CheckpointError(_short(stored, piece, sizes[piece.file]))


def read_tensor(
    stored: Stored, piece: StoredPiece, dtype: torch.dtype, into: Tensor | None = None
) -> Tensor:
    """Return a piece of a tensor as a host tensor: `into`, if given and contiguous.

    Raises:
        CheckpointError: the file is missing, short or damaged; the text has the file and the leaf.
    """
    head = _read(stored, piece, 0, min(_HEAD_BYTES, piece.length))
    box = piece.box or ()
    # without a CRC another program wrote it, maybe in another form
    start = None if piece.crc is None else _start_of_elements(head)
    if start is None or start + box_size(box) * dtype.itemsize > piece.length:
        return _as_torch_loads(stored, piece, dtype)
    x = torch.empty(box_shape(box), dtype=dtype) if into is None else into
    elements = memoryview(x.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
    tail = memoryview(bytearray(piece.length - start - len(elements)))
    _read_into(stored, piece, start, elements, tail)
    _check_crc(stored, piece, head[:start], elements, tail)
    return x


def read_value(stored: Stored, piece: StoredPiece) -> bytes:
    """Return the bytes of a piece.

    Raises:
        CheckpointError: as `read_tensor`.
    """
    data = _read(stored, piece, 0, piece.length)
    _check_crc(stored, piece, data)
    return data


def value_of(stored: Stored, name: str, data: bytes) -> Any:
    """Return a value that is not a tensor, from its bytes.

    Raises:
        CheckpointError: it cannot be loaded without running code from the file.
    """
    return _load_or_raise(stored, stored.entries[name].pieces[0], partial(_load_pickle, data))


def _start_of_elements(head: bytes) -> int | None:
    """Return where the elements of a contiguous tensor begin in a file of `torch.save`, or None."""
    name = head.find(b"/data/0")
    record = head.rfind(_RECORD, 0, max(name, 0))
    # the byte order is the content of the record "byteorder"
    if record < 0 or sys.byteorder.encode() not in head[:record]:
        return None
    # the lengths of the record's name and of its padding
    lengths = head[record + _RECORD_BYTES - 4 : record + _RECORD_BYTES]
    return (
        record
        + _RECORD_BYTES
        + int.from_bytes(lengths[:2], "little")
        + int.from_bytes(lengths[2:], "little")
    )


def _as_torch_loads(stored: Stored, piece: StoredPiece, dtype: torch.dtype) -> Tensor:
    """Return a piece as loaded by `torch.load`."""
    x = _load_or_raise(
        stored, piece, partial(_load_pickle, read_value(stored, piece), map_location="cpu")
    )
    is_dense = isinstance(x, Tensor) and x.layout is torch.strided and x.device.type == "cpu"
    if not is_dense or x.dtype != dtype or tuple(x.shape) != box_shape(piece.box or ()):
        has = (
            f"{type(x).__name__} {shortened(list(x.shape)) if isinstance(x, Tensor) else ''}"
        ).strip()
        raise CheckpointError(
            _damage_text(stored, piece, f"it has {has} instead of {shortened(piece.box)}")
        )
    return x


def _load_pickle(data: bytes, **settings: Any) -> Any:
    """Return what `torch.save` wrote, without running code from it.

    Raises:
        ValueError: it is no such file, or needs more memory than it has bytes: `torch.save` does
            not compress.
    """
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        records = archive.infolist()
    if any(record.compress_type != zipfile.ZIP_STORED for record in records) or sum(
        r.file_size for r in records
    ) > len(data):
        raise ValueError("it is compressed, which torch.save never does")
    return torch.load(io.BytesIO(data), weights_only=True, **settings)


def _read(stored: Stored, piece: StoredPiece, start: int, length: int) -> bytes:
    data = bytearray(length)
    _read_into(stored, piece, start, memoryview(data))
    return bytes(data)


def _read_into(stored: Stored, piece: StoredPiece, start: int, *views: memoryview) -> None:
    """Fill the views, one after the other, with the bytes of a piece from `start`."""
    path = stored.folder / piece.file
    try:
        got = files.read_into(path, piece.offset + start, views)
    except OSError as error:
        raise CheckpointError(_unreadable(stored, piece, error)) from error
    if got < sum(map(len, views)):
        raise CheckpointError(_short(stored, piece, path.stat().st_size))


def _unreadable(stored: Stored, piece: StoredPiece, error: OSError) -> str:
    path = stored.folder / piece.file
    return (
        f"{path}, which has part of {shortened(piece.name)!r}, cannot be read "
        f"({shortened(error)}); load another step"
    )


def _short(stored: Stored, piece: StoredPiece, has: int) -> str:
    size = stored.sizes.get(piece.file)
    if size is None:
        size = f"at least {piece.offset + piece.length}"
    return _damage_text(stored, piece, f"it has {has} bytes of {size}")


def _check_crc(stored: Stored, piece: StoredPiece, *parts: bytes | memoryview) -> None:
    """Raise CheckpointError unless the parts together have the piece's CRC-32, if it has one."""
    crc = 0
    for part in parts if piece.crc is not None else ():
        crc = zlib.crc32(part, crc)
    if piece.crc not in (None, crc):
        where = f"{piece.offset}:{piece.offset + piece.length}"
        raise CheckpointError(
            _damage_text(
                stored, piece, f"the CRC-32 of bytes {where} is {crc:08x}, not {piece.crc:08x}"
            )
        )


def _damage_text(stored: Stored, piece: StoredPiece, how: str) -> str:
    return (
        f"{stored.folder / piece.file}, which has part of {shortened(piece.name)!r}, is damaged: "
        f"{how}; load another step"
    )


def _load_or_raise(stored: Stored, piece: StoredPiece, load: Callable[[], Any]) -> Any:
    try:
        return load()
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise CheckpointError(
            _damage_text(stored, piece, f"torch.load says {shortened(error)}")
        ) from error
