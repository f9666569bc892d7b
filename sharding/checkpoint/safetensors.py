"""Files in the safetensors format, read by slices: a rank reads its boxes and nothing else.

    length of the header, 8 bytes | {"w": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, ...} | tensors, row-major

The format is that of https://github.com/huggingface/safetensors; the library is not needed.
"""

from __future__ import annotations

import json
import math
import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...kernels.box import full_box, slices
from ...mesh.group import World, current_world
from ..layout import Layout
from ..tensor import ShardedTensor
from .agree import CheckpointError, agree, everyone, everywhere
from .files import Sink, sync_folder
from .full import whole_on
from .load import given, line_of
from .reading import box_of
from .stored import Entry, Stored
from .tree import leaves, mapped, name_of, opened
from .wanted import Plain, Value, wanted

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2, "C64": torch.complex64, "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_LONGEST_HEADER = 100_000_000  # bytes; the limit of the safetensors library


class _Place(NamedTuple):
    """Where a tensor's bytes are: in which file, from where."""

    path: Path
    start: int


# -- read --------------------------------------------------------------------------------------------------------------


def load_safetensors(path: str | os.PathLike[str], like: Any) -> Any:
    """load_safetensors(path, like) -> a tree like `like`, of which each rank has read its own boxes. Every rank calls it.

    Args:
        path: a file, or a folder: then all `*.safetensors` in it, as the parts of one model.
        like: as for `load`; a leaf's name in the files is its path, joined by dots. A module says itself what it needs, and gets it.

    Raises:
        ValueError: a tensor that is not there, with near names, or with another shape or dtype; a leaf that is no tensor.
        CheckpointError: a file is missing, or not in the format; names it. On every rank, the same text.

    Communication: two all_gathers of small objects over all ranks.

    Example:
        >>> sm.load_safetensors("llama/", like=model)
        >>> w = sm.load_safetensors("w.safetensors", {"w": Layout.of(mesh, P("tp"), (8, 4))})["w"]
    """
    world = current_world()
    group = everyone(world)
    found: list[tuple[Stored, dict[str, _Place]]] = []
    everywhere(group, lambda: found.append(_headers(Path(path))))
    ((stored, places),) = found
    tree = wanted(like, stored, world)
    wants = {name_of(path): want for path, want in leaves(tree)}
    agree(group, "load_safetensors", {name: line_of(want) for name, want in wants.items()})
    return given(like, mapped(tree, lambda path, want: _read(name_of(path), want, stored, places, world)))


def _headers(path: Path) -> tuple[Stored, dict[str, _Place]]:
    """What is in the files.

    Raises:
        CheckpointError: one is missing or damaged.
    """
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files:
        raise CheckpointError(f"{path} has no *.safetensors files")
    entries: dict[str, Entry] = {}
    places: dict[str, _Place] = {}
    for file in files:
        header, data = _header(file)
        for name, told in header.items():
            if name != "__metadata__":
                entries[name], places[name] = _entry(file, name, told, data), _Place(file, data + told["data_offsets"][0])
    return Stored(path, entries, {"dict": [[name, name] for name in entries]}, {}, None), places


def _header(file: Path) -> tuple[dict[str, Any], int]:
    """The header, and where the data begin."""
    try:
        with file.open("rb") as opened_file:
            length = int.from_bytes(opened_file.read(8), "little")
            if length > _LONGEST_HEADER:
                raise ValueError(f"a header of {length} bytes")
            return json.loads(opened_file.read(length)), 8 + length
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise CheckpointError(f"{file} is damaged, or not in the safetensors format: {error}") from error


def _entry(file: Path, name: str, told: Any, data: int) -> Entry:
    try:
        dtype, shape, (start, stop) = _DTYPES[told["dtype"]], torch.Size(told["shape"]), told["data_offsets"]
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{file} describes {name!r} as {told!r}, which is not in the safetensors format") from error
    size = file.stat().st_size
    if stop - start != math.prod(shape) * dtype.itemsize or start < 0 or data + stop > size:
        raise CheckpointError(
            f"{file} is damaged: {name!r}, {dtype}{list(shape)}, is to be in bytes {data + start}:{data + stop} of the file's {size}"
        )
    return Entry(shape, dtype)


def _read(name: str, want: Any, stored: Stored, places: Mapping[str, _Place], world: World) -> Any:
    if isinstance(want, Value):
        raise ValueError(f"load_safetensors: {name!r} in like= is no tensor, and these files have nothing else; leave it out")
    entry = stored.entries[name]
    shape, dtype = entry.shape or torch.Size(), entry.dtype or torch.uint8
    box = box_of(want, world.rank) if isinstance(want, Layout) else full_box(shape)
    if box is None:
        part = torch.empty(0, dtype=dtype)
    else:
        part = _mapped(places[name], shape, dtype)[slices(box)].clone(memory_format=torch.contiguous_format)
    if isinstance(want, Layout):
        mesh: Any = want.mesh
        return ShardedTensor._make_guarded(part.to(mesh.device), want)
    return part.to(want.device if isinstance(want, Plain) else "cpu")


def _mapped(place: _Place, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """A tensor in a file, of which what is used will be read."""
    nbytes = shape.numel() * dtype.itemsize
    if not nbytes:
        return torch.empty(shape, dtype=dtype)
    file = torch.from_file(str(place.path), shared=False, size=place.start + nbytes, dtype=torch.uint8)
    raw = file[place.start :]
    return (raw if place.start % dtype.itemsize == 0 else raw.clone()).view(dtype).reshape(shape)


# -- write -------------------------------------------------------------------------------------------------------------


def save_safetensors(tree: Any, path: str | os.PathLike[str], rank: int = 0) -> None:
    """save_safetensors(tree, path): one file with whole tensors, written by `rank`, to which they come one after the other.

    Args:
        tree: a module, or a tree of `ShardedTensor`s and plain tensors; names are paths, joined by dots. What is pending is reduced.
        rank: which rank writes. It holds one whole tensor at a time, the others none.

    Raises:
        ValueError: a leaf that is no tensor, or of a dtype that the format does not have.
        CheckpointError: the file could not be written; a file that had the name is as it was. On every rank, the same text.

    Communication: for each `ShardedTensor` as `full_state_dict`, then one all_gather of small objects over all ranks.

    Example:
        >>> sm.save_safetensors(model, "model.safetensors")
    """
    world, path = current_world(), Path(path)
    tensors = _by_alignment({name_of(path): leaf for path, leaf in leaves(opened(tree))})
    parts = chain([_header_of(tensors)], (_bytes_on(leaf, rank, world) for _, leaf in tensors))

    def write() -> None:
        if world.rank == rank:
            _write(path, parts)
        else:
            deque(parts, 0)

    everywhere(everyone(world), write)


def _header_of(tensors: Sequence[tuple[str, Tensor]]) -> bytes:
    """The header and its length: padded, so that the data begin at a multiple of 8 bytes."""
    header, at = {}, 0
    for name, leaf in tensors:
        stop = at + leaf.numel() * leaf.dtype.itemsize
        header[name] = {"dtype": _NAMES[leaf.dtype], "shape": list(leaf.shape), "data_offsets": [at, stop]}
        at = stop
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _by_alignment(found: Mapping[str, Any]) -> list[tuple[str, Tensor]]:
    """The largest elements first, so that each tensor begins at a multiple of its own.

    Raises:
        ValueError: a leaf that cannot be written.
    """
    for name, leaf in found.items():
        if not isinstance(leaf, Tensor):
            raise ValueError(f"save_safetensors: {name!r} is a {type(leaf).__name__}; the format has tensors only: leave it out")
        if leaf.dtype not in _NAMES:
            raise ValueError(f"save_safetensors: {name!r} is {leaf.dtype}, which the format does not have; convert it first")
    return sorted(found.items(), key=lambda item: -item[1].dtype.itemsize)


def _bytes_on(leaf: Tensor, rank: int, world: World) -> Any:
    """A whole tensor's bytes on `rank`; nothing on the others, which take part."""
    whole = whole_on(leaf, rank, world)
    return b"" if whole is None or not whole.numel() else whole.contiguous().reshape(-1).view(torch.uint8).numpy()


def _write(path: Path, parts: Iterator[Any]) -> None:
    beside = path.with_name(path.name + ".unfinished")
    try:
        with Sink(beside) as sink:
            for part in parts:
                sink.write(part)
            sink.sync()
        os.rename(beside, path)
        sync_folder(path.parent)
    except OSError as error:
        deque(parts, 0)  # the other ranks go on sending
        beside.unlink(missing_ok=True)
        raise CheckpointError(f"{path} could not be written ({error.strerror or error}); a file that had the name is as it was") from error
