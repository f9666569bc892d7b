"""Safetensors files: each rank reads its boxes only.

    length of the header, 8 bytes | {"w": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0,
    24]}, ...} | tensors, row-major

The format is that of https://github.com/huggingface/safetensors, whose library checks each header.
A large model has several files and an index, `model.safetensors.index.json`, which names the file
of each tensor. A tied weight is stored once.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...kernels.box import full_box, slices
from ...mesh.comm.current_world import current_world
from ...mesh.comm.world import World
from ...mesh.text import shortened
from ..layout.layout import Layout
from ..tensor.sharded_tensor import ShardedTensor
from .agreement import CheckpointError, agree, all_ranks, is_out_of_memory, run_on_all_ranks
from .full_state import whole_on
from .load import line_of, load_stateful
from .plan import StoredValue, WholeTensor, wanted_tree
from .storage.files import (
    Sink,
    locked_folder,
    open_regular,
    read_regular,
    remove_left_over,
    removed_on_error,
    sync_folder,
    temporary_path,
    write_whole,
)
from .storage.index import check_file_name
from .storage.manifest import Stored, StoredLeaf, dict_of_pairs
from .storage.reading import box_of
from .tree import leaves, map_leaves, name_of, ties, without_stateful

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_INDEX = ".index.json"  # the suffix of an index file, after the name of a single file
_UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
}
_LONGEST_HEADER = 100_000_000  # bytes; the limit of the safetensors library


class _FileOffset(NamedTuple):
    """The file of a tensor, its bytes, and the offset of the first.

    The bytes are memory-mapped once, so that all tensors are one writer's.
    """

    path: Path
    mapped: Tensor
    start: int


# -- read ------------------------------------------------------------------------------------------


def load_safetensors(path: str | os.PathLike[str], like: Any) -> Any:
    """load_safetensors(path, like) -> a tree like `like`, each rank's boxes. Every rank calls it.

    Args:
        path: a file, an index (`model.safetensors.index.json`), or a folder: then the files of its
            index, or all `*.safetensors` in it if there is no index, as the parts of one model.
        like: as for `load`; a leaf's name in the files is its path, joined by dots. A module
            determines its leaves and loads them. Of tied weights, and of a tensor that is several
            leaves, as in the `state_dict` of a tied model, the files need only one.

    Raises:
        ValueError: a tensor that is missing (lists similar names), or has another shape or dtype; a
            leaf that is not a tensor.
        CheckpointError: a file is missing, or not in the format; a tensor is in two files, or not
            in the file of the index. The text names the file, the same on every rank.

    Communication: three all_gathers of small objects over all ranks.

    Example:
        >>> sm.checkpoint.load_safetensors("llama/", like=model)
        >>> layout = Layout.of(mesh, P("tp"), (8, 4))
        >>> w = sm.checkpoint.load_safetensors("w.safetensors", {"w": layout})["w"]
    """
    world = current_world()
    group = all_ranks(world)
    headers: list[tuple[Stored, dict[str, _FileOffset]]] = []
    run_on_all_ranks(
        group, lambda: headers.append(_headers(Path(path), ties(like, of_leaves=True)))
    )
    ((stored, places),) = headers
    tree = wanted_tree(like, stored, world)
    wants = {name_of(path): want for path, want in leaves(tree)}
    for name, want in wants.items():
        if isinstance(want, StoredValue):
            raise ValueError(
                f"load_safetensors: {name!r} in like= is not a tensor, and these files have only "
                "tensors; leave it out"
            )
    agree(group, "load_safetensors", {name: line_of(want) for name, want in wants.items()})
    loaded: list[Any] = []
    run_on_all_ranks(
        group,
        lambda: loaded.append(
            map_leaves(tree, lambda path, want: _read(name_of(path), want, stored, places, world))
        ),
    )
    return load_stateful(like, loaded[0])


def mapped_tensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors of safetensors files by name, whole, mapped into memory.

    Raises:
        CheckpointError: a file is missing or damaged.
    """
    stored, places = _headers(path, {})
    return {
        name: _mapped_tensor(places[name], entry.shape or torch.Size(), entry.dtype or torch.uint8)
        for name, entry in stored.entries.items()
    }


def _headers(path: Path, tied: Mapping[str, str]) -> tuple[Stored, dict[str, _FileOffset]]:
    """Return the contents of the files; `tied` are names that may be stored under another one.

    Raises:
        CheckpointError: one is missing or damaged, or they contradict each other.
    """
    entries: dict[str, StoredLeaf] = {}
    places: dict[str, _FileOffset] = {}
    aliases: dict[str, str] = {}
    files, indexed = _files(path)
    for file in files:
        header, data, mapped_file = _header(file)
        aliases |= _aliases(header.pop("__metadata__", None))
        for name, description in header.items():
            if name in places:
                raise CheckpointError(
                    f"{shortened(name)!r} is in {places[name].path} and in {file}; pass one file "
                    "or the index"
                )
            start = data + description["data_offsets"][0]
            entries[name], places[name] = (
                _entry(file, name, description),
                _FileOffset(file, mapped_file, start),
            )
    for name, file in indexed.items():
        if name not in places or places[name].path != file:
            raise CheckpointError(
                f"{file} has no {shortened(name)!r}, although the index of {path} lists it there; "
                "write the model again"
            )
    for group in [*_groups(aliases), *_groups(tied)]:
        for stored_name in [name for name in group if name in entries][:1]:
            for name in group:
                entries.setdefault(name, entries[stored_name])
                places.setdefault(name, places[stored_name])
    return Stored(path, entries, {"dict": [[name, name] for name in entries]}, {}, None), places


def _files(path: Path) -> tuple[list[Path], dict[str, Path]]:
    """Return the files of a path, and the file of each tensor if there is an index."""
    if path.is_dir():
        indices = sorted(path.glob(f"*.safetensors{_INDEX}"))
    else:
        indices = [path] if path.name.endswith(_INDEX) else []
    if len(indices) > 1:
        raise CheckpointError(
            f"{path} has {len(indices)} indices, {[index.name for index in indices][:3]}; give the "
            "path of one"
        )
    if indices:
        weight_map = _weight_map(indices[0])
        named = {name: indices[0].parent / file for name, file in weight_map.items()}
        return sorted(set(named.values())), named
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files:
        raise CheckpointError(f"{path} has no *.safetensors files")
    return files, {}


def _weight_map(index: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(
            read_regular(index, _LONGEST_HEADER), object_pairs_hook=dict_of_pairs
        )["weight_map"]
        for file in weight_map.values():
            check_file_name(file)
        return weight_map
    except OSError as error:
        problem = shortened(error)
    except (ValueError, RecursionError) as error:
        problem = shortened(error)
    except (KeyError, TypeError, AttributeError) as error:
        problem = shortened(repr(error))
    raise CheckpointError(
        f"{index} cannot be read as the index of a model ({problem}); it must have a weight_map "
        "from names to files"
    )


def _aliases(metadata: Any) -> dict[str, str]:
    """Return the tied names in a file's metadata.

    `safetensors.torch.save_model` too writes there the name that is stored.
    """
    return (
        {name: stored_name for name, stored_name in metadata.items() if name != "format"}
        if isinstance(metadata, dict)
        else {}
    )


def _groups(aliases: Mapping[str, str]) -> list[list[str]]:
    """Return the names that stand for one tensor, group by group."""
    groups: dict[str, list[str]] = {}
    for name, stored_name in aliases.items():
        groups.setdefault(stored_name, [stored_name]).append(name)
    return list(groups.values())


def _header(file: Path) -> tuple[dict[str, Any], int, Tensor]:
    """Return the header, the offset of the data, and the bytes of the file.

    It is opened once: a writer may replace it meanwhile.

    The safetensors library checks it: names, dtypes, shapes, and that the tensors fill the file
    without holes or overlaps.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with open_regular(file) as opened_file:
            size = os.fstat(opened_file.fileno()).st_size
            length = int.from_bytes(opened_file.read(8), "little")
            if not 2 <= length <= min(_LONGEST_HEADER, size - 8):
                raise ValueError(f"a header of {length} bytes in a file of {size}")
            text = opened_file.read(length)
            # On Linux a path of the open file itself, also when another one takes its place.
            opened_path = Path(f"/proc/self/fd/{opened_file.fileno()}")
            same = opened_path if opened_path.exists() else file
            with safe_open(same, framework="numpy"):
                pass
            mapped_file = torch.from_file(str(same), shared=False, size=size, dtype=torch.uint8)
        header = json.loads(text, object_pairs_hook=dict_of_pairs)
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read ({shortened(error)})") from error
    except (ValueError, RecursionError, SafetensorError) as error:
        raise CheckpointError(
            f"{file} is damaged, or not in the safetensors format: {shortened(error)}"
        ) from error
    return header, 8 + length, mapped_file


def _entry(file: Path, name: str, description: Any) -> StoredLeaf:
    """Return a tensor of a header that the library has checked."""
    dtype = _DTYPES.get(description["dtype"])
    if dtype is None:
        has = shortened(description["dtype"])
        raise CheckpointError(
            f"{file} has {shortened(name)!r} of the dtype {has!r}, which this version of shardmesh "
            "does not read"
        )
    return StoredLeaf(torch.Size(description["shape"]), dtype)


def _read(
    name: str, want: Any, stored: Stored, places: Mapping[str, _FileOffset], world: World
) -> Any:
    entry = stored.entries[name]
    shape, dtype = entry.shape or torch.Size(), entry.dtype or torch.uint8
    box = box_of(want, world.rank) if isinstance(want, Layout) else full_box(shape)
    if box is None:
        part = torch.empty(0, dtype=dtype)
    else:
        part = _mapped_tensor(places[name], shape, dtype)[slices(box)].clone(
            memory_format=torch.contiguous_format
        )
    if isinstance(want, Layout):
        mesh: Any = want.mesh
        return ShardedTensor._make_guarded(part.to(mesh.device), want)
    return part.to(want.device if isinstance(want, WholeTensor) else "cpu")


def _mapped_tensor(place: _FileOffset, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Return a memory-mapped tensor of a file; only used parts are read."""
    nbytes = shape.numel() * dtype.itemsize
    if not nbytes:
        return torch.empty(shape, dtype=dtype)
    raw = place.mapped[place.start : place.start + nbytes]
    return (raw if place.start % dtype.itemsize == 0 else raw.clone()).view(dtype).reshape(shape)


# -- write -----------------------------------------------------------------------------------------


def save_safetensors(
    tree: Any,
    path: str | os.PathLike[str],
    rank: int = 0,
    *,
    max_shard_size: int | str | None = None,
) -> None:
    """save_safetensors(tree, path): write whole tensors to one file on `rank`.

    It gathers one tensor at a time.

    Args:
        tree: a module, or a tree of `ShardedTensor`s and plain tensors; names are paths, joined by
            dots. Pending values are reduced. Tied weights of a module are written once, under the
            first name.
        path: the file; or an existing folder, for `model.safetensors` in it.
        rank: the rank that writes. It holds one whole tensor at a time, the others none.
        max_shard_size: the maximum file size, in bytes or as "5GB". A larger model has files
            `model-00001-of-00002.safetensors` etc., and `model.safetensors.index.json`, as in
            HuggingFace; a tensor is never split. None for one file.

    Raises:
        ValueError: a leaf that is not a tensor, or of a dtype that the format does not have; an
            invalid size.
        CheckpointError: a file could not be written; existing files are unchanged. On every rank,
            the same text.

    Communication: for each `ShardedTensor` as `full_state_dict`, then one all_gather of small
    objects over all ranks.

    Example:
        >>> sm.checkpoint.save_safetensors(model, "model.safetensors")
        >>> sm.checkpoint.save_safetensors(model, "llama", max_shard_size="5GB")
    """
    world = current_world()
    path = Path(path)
    state = without_stateful(tree)
    tied = {**ties(state, of_leaves=True), **ties(tree)}
    tensors = {name: leaf for name, leaf in _named_tensors(state) if name not in tied}
    shards = _shards(tensors, _bytes_of(max_shard_size))
    parts = [
        chain([_header_of(shard, tied)], (_bytes_on(leaf, rank, world) for leaf in shard.values()))
        for shard in shards
    ]

    def write() -> None:
        if world.rank == rank:
            _write(path / "model.safetensors" if path.is_dir() else path, shards, parts)
        else:
            deque(chain.from_iterable(parts), 0)

    run_on_all_ranks(all_ranks(world), write)


def _named_tensors(tree: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a tree by name.

    Raises:
        ValueError: a leaf that cannot be written.
    """
    for path, leaf in leaves(tree):
        name = name_of(path)
        if not isinstance(leaf, Tensor):
            raise ValueError(
                f"save_safetensors: {name!r} is a {type(leaf).__name__}; the format has only "
                "tensors: leave it out"
            )
        if leaf.dtype not in _NAMES:
            raise ValueError(
                f"save_safetensors: {name!r} is {leaf.dtype}, which the format does not have; "
                "convert it first"
            )
        yield name, leaf


def _bytes_of(size: int | str | None) -> float:
    """Return a size as a number: 5_000_000_000 of "5GB"."""
    if size is None:
        return math.inf
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?((?:[KMG]I?)?B)?", str(size).upper())
    if match is None or isinstance(size, bool) or not float(match[1]):
        raise ValueError(
            f"save_safetensors: max_shard_size={size!r} is not a size; pass bytes, or such as "
            f'"500MB", "5GB", "5GiB"'
        )
    return float(match[1]) * _UNITS[match[2] or ""]


def _shards(tensors: Mapping[str, Tensor], limit: float) -> list[dict[str, Tensor]]:
    """Return the tensors file by file, in order.

    In each file the largest elements come first, so that each tensor is aligned.
    """
    shards: list[dict[str, Tensor]] = [{}]
    room = limit
    for name, leaf in tensors.items():
        size = leaf.numel() * leaf.dtype.itemsize
        if size > room and shards[-1]:
            shards.append({})
            room = limit
        shards[-1][name] = leaf
        room -= size
    return [
        dict(sorted(shard.items(), key=lambda item: -item[1].dtype.itemsize)) for shard in shards
    ]


def _header_of(tensors: Mapping[str, Tensor], tied: Mapping[str, str]) -> bytes:
    """Return the header with its length, padded so that the data begin at a multiple of 8 bytes."""
    aliases = {name: stored_name for name, stored_name in tied.items() if stored_name in tensors}
    # transformers asks for this format
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **aliases}}
    at = 0
    for name, leaf in tensors.items():
        stop = at + leaf.numel() * leaf.dtype.itemsize
        header[name] = {
            "dtype": _NAMES[leaf.dtype],
            "shape": list(leaf.shape),
            "data_offsets": [at, stop],
        }
        at = stop
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _bytes_on(leaf: Tensor, rank: int, world: World) -> Any:
    """Return a whole tensor's bytes on `rank`, nothing on the others, which must call it too."""
    whole = whole_on(leaf, rank, world)
    return (
        b""
        if whole is None or not whole.numel()
        else whole.contiguous().reshape(-1).view(torch.uint8).numpy()
    )


def _write(
    path: Path, shards: Sequence[Mapping[str, Tensor]], parts: Sequence[Iterator[Any]]
) -> None:
    """Write every file under a temporary name, then rename them; write the index last."""
    files = [path]
    if (count := len(shards)) != 1:
        names = [f"{path.stem}-{i + 1:05d}-of-{count:05d}{path.suffix}" for i in range(count)]
        files = [path.with_name(name) for name in names]
    temporary = [temporary_path(file) for file in files]
    index = path.with_name(path.name + _INDEX)
    created: list[Path] = []
    try:
        # open, and so locked, until all are renamed
        with removed_on_error(created), contextlib.ExitStack() as sinks:
            for file in [*files, index]:
                remove_left_over(file)
            for file, data in zip(temporary, parts, strict=True):
                sink = sinks.enter_context(Sink(file))
                created.append(file)
                for part in data:
                    sink.write(part)
                sink.sync()
            with locked_folder(path.parent):
                index.unlink(missing_ok=True)
                for unfinished, file in zip(temporary, files, strict=True):
                    os.rename(unfinished, file)
                _remove_others(path, files)
                if len(files) > 1:
                    write_whole(index, _index_of(shards, files))
                sync_folder(path.parent)
    except (OSError, MemoryError, RuntimeError) as error:
        if not isinstance(error, OSError) and not is_out_of_memory(error):
            raise
        deque(chain.from_iterable(parts), 0)  # the other ranks continue to send
        why = (
            shortened(error) if isinstance(error, OSError) else f"out of memory: {shortened(error)}"
        )
        raise CheckpointError(
            f"{path} could not be written ({why}); an existing file is unchanged"
        ) from error


def _remove_others(path: Path, files: Sequence[Path]) -> None:
    """Remove the files of an earlier save of this path with another number of files."""
    shard = re.compile(re.escape(path.stem) + r"-\d{5}-of-\d{5}" + re.escape(path.suffix))
    for file in sorted(path.parent.iterdir()):
        if file not in files and (file.name == path.name or shard.fullmatch(file.name)):
            file.unlink()


def _index_of(shards: Sequence[Mapping[str, Tensor]], files: Sequence[Path]) -> bytes:
    size = sum(leaf.numel() * leaf.dtype.itemsize for shard in shards for leaf in shard.values())
    weight_map = {
        name: file.name for shard, file in zip(shards, files, strict=True) for name in shard
    }
    return json.dumps(
        {"metadata": {"total_size": size}, "weight_map": weight_map}, indent=2
    ).encode()
