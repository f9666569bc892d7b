"""Check what an index of torch.distributed.checkpoint says: each tensor's boxes, and their places.

    Metadata    state_dict_metadata   "w": shape, dtype, chunks at their offsets inside of the shape
                storage_data          ("w", offset): file, offset, length: no two share bytes
                planner_data          "w": its path in the tree

An index may come from anyone, so nothing in it is believed. What a tensor's boxes leave out or have
twice is an error once it is loaded (`check_tiling`); part of a checkpoint can be loaded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise, product
from typing import Any

import torch

from ....kernels.box import Box, box_size, intersect
from ....mesh.text import shortened
from . import pickled
from .pickled import Name, Pairs, PickledObject

LARGEST = 2**63 - 1
DEEPEST = 200  # levels of a tree
_MOST_DIMS = 64
_CORNERS = 1 << 22  # corners of boxes that are compared for one tensor
# items that an index may have for each of its bytes: a list that stands in many places counts each
# time
_PER_BYTE = 16

_METADATA = "torch.distributed.checkpoint.metadata"
_DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
_PATHS = {"Path", "PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"}
_CLASSES = {
    "Metadata",
    "TensorStorageMetadata",
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "MetadataIndex",
    "TensorProperties",
    "StorageMeta",
    "_MEM_FORMAT_ENCODING",
}
# The only names that an index may refer to.
_KNOWN = {
    _METADATA: _CLASSES,
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size", *(name.removeprefix("torch.") for name in _DTYPES)},
    "pathlib": _PATHS,
    "pathlib._local": _PATHS,  # Python 3.13
    "collections": {"OrderedDict"},
}


class Damage(ValueError):
    """What is wrong with a file; the one who reads it adds its name."""


class IndexedLeaf:
    """A leaf of an index: shape, dtype (None for values), pieces as (box, file, offset, length)."""

    def __init__(self, shape: torch.Size | None, dtype: torch.dtype | None) -> None:
        self.shape, self.dtype = shape, dtype
        self.pieces: list[tuple[Box | None, str, int, int]] = []


def read_entries(index: bytes) -> tuple[dict[str, IndexedLeaf], dict[str, tuple[Any, ...]]]:
    """Return the leaves of an index by name, and their paths in the tree, {} if it has none.

    Raises:
        Damage, pickle.UnpicklingError: it cannot be one.
    """
    fields = _fields(pickled.loads(index, _KNOWN), "Metadata")
    budget = _Budget(_PER_BYTE * len(index))
    described = _mapping(fields.get("state_dict_metadata"), "state_dict_metadata")
    leaves: dict[str, IndexedLeaf] = {}
    boxes: dict[str, dict[tuple[int, ...], Box]] = {}
    for name, record in described.items():
        leaves[name], boxes[name] = _leaf_and_boxes(name, record, budget)
    for key, record in _pairs(fields.get("storage_data"), "storage_data"):
        _add_piece(leaves, boxes, key, record, budget)
    _check_ranges(leaves)
    return leaves, _paths(fields.get("planner_data"), budget)


class _Budget:
    """The number of items that are still to come in an honest index."""

    def __init__(self, items: int) -> None:
        self.items = items

    def spend(self, items: int) -> None:
        self.items -= items
        if self.items < 0:
            raise Damage(
                "it has the same lists in so many places that its size does not account for them"
            )


def _leaf_and_boxes(
    name: str, record: Any, budget: _Budget
) -> tuple[IndexedLeaf, dict[tuple[int, ...], Box]]:
    """Return a leaf without its pieces, and its boxes by their origin."""
    check_name(name)
    if _is(record, "BytesStorageMetadata"):
        return IndexedLeaf(None, None), {}
    fields = _fields(record, "TensorStorageMetadata")
    shape = _size(fields.get("size"), budget)
    dtype = _dtype(fields.get("properties"))
    _total(name, shape, dtype)
    boxes: dict[tuple[int, ...], Box] = {}
    for chunk in _expect(fields.get("chunks"), list, f"the chunks of {name!r}"):
        parts = _fields(chunk, "ChunkStorageMetadata")
        origin, sizes = _size(parts.get("offsets"), budget), _size(parts.get("sizes"), budget)
        if not len(origin) == len(sizes) == len(shape):
            raise Damage(
                f"{_quote(name)} has {len(shape)} dims, but a box of {len(origin)} and {len(sizes)}"
            )
        box = tuple((start, start + size) for start, size in zip(origin, sizes, strict=True))
        if any(stop > size for (_, stop), size in zip(box, shape, strict=True)):
            raise Damage(
                f"{_quote(name)} has the shape {shortened(list(shape))}, but a box "
                f"{shortened(box)} outside of it"
            )
        if origin in boxes and box_size(box) and box_size(boxes[origin]):
            raise Damage(f"{_quote(name)} has two boxes at {shortened(origin)}")
        if origin not in boxes or box_size(box):
            boxes[origin] = box
    return IndexedLeaf(torch.Size(shape), dtype), boxes


def _add_piece(
    leaves: Mapping[str, IndexedLeaf],
    boxes: Mapping[str, dict[tuple[int, ...], Box]],
    key: Any,
    record: Any,
    budget: _Budget,
) -> None:
    index, info = _fields(key, "MetadataIndex"), _fields(record, "_StorageInfo")
    name = index.get("fqn")
    if type(name) is not str or name not in leaves:
        raise Damage(f"it has the bytes of {_quote(name)}, which it does not describe")
    if info.get("transform_descriptors"):
        raise Damage(
            f"{_quote(name)} is stored transformed ({shortened(info['transform_descriptors'])}): "
            "load it with torch's own tools"
        )
    leaf, box = leaves[name], None
    if leaf.shape is not None:
        origin = _size(index.get("offset"), budget)
        if origin not in boxes[name]:
            raise Damage(
                f"{_quote(name)} has bytes of a box at {shortened(origin)}, which it does not "
                f"describe"
            )
        box = boxes[name].pop(origin)
    elif leaf.pieces:
        raise Damage(f"{_quote(name)} is a value and has bytes in two places")
    file = check_file_name(info.get("relative_path"))
    offset = whole_number(info.get("offset"), "an offset")
    length = whole_number(info.get("length"), "a length")
    if not length or offset + length > LARGEST:
        raise Damage(f"{_quote(name)} is at {shortened(offset)} with {shortened(length)} bytes")
    if box is not None and leaf.dtype is not None and box_size(box) * leaf.dtype.itemsize > length:
        raise Damage(
            f"{_quote(name)} has {length} bytes for the box {shortened(box)} of {leaf.dtype}, "
            "which needs more"
        )
    leaf.pieces.append((box, file, offset, length))


def _check_ranges(leaves: Mapping[str, IndexedLeaf]) -> None:
    """Check that no two pieces share bytes of a file."""
    ranges = sorted(
        (file, offset, offset + length, name)
        for name, leaf in leaves.items()
        for _, file, offset, length in leaf.pieces
    )
    for (file, start, stop, name), (other_file, other_start, _, other) in pairwise(ranges):
        if file == other_file and (other_start < stop or start == other_start):
            raise Damage(
                f"{_quote(name)} and {_quote(other)} share bytes of {file}, at {other_start}"
            )


def _paths(planned: Any, budget: _Budget) -> dict[str, tuple[Any, ...]]:
    if planned is None:
        return {}
    paths = _mapping(planned, "planner_data")
    for name, path in paths.items():
        check_name(name)
        if (
            type(path) is not tuple
            or not 0 < len(path) <= DEEPEST
            or not all(type(key) in (str, int) for key in path)
        ):
            raise Damage(f"the path of {_quote(name)} is {shortened(path)}, which is none")
        budget.spend(len(path))
        for key in path:
            check_name(str(key))
    return paths


def check_tiling(name: str, shape: Sequence[int], boxes: Sequence[Box]) -> None:
    """Check that boxes inside of a shape have each element exactly once.

    The corners of a box, with alternating signs, are the finite differences of its indicator
    function. So the sum over all boxes is that of the whole tensor if and only if the boxes tile
    it: exact in any number of dims, and linear in the number of boxes.

    Raises:
        Damage: they overlap, or leave some out.
    """
    if 0 in shape:
        return
    split = [dim for dim, size in enumerate(shape) if any(box[dim] != (0, size) for box in boxes)]
    if len(boxes) << len(split) > _CORNERS:
        _check_pairs(name, boxes)
        return
    corners: Counter[tuple[int, ...]] = Counter()
    for box in [*boxes, None]:
        sign = 1 if box is not None else -1  # the whole tensor last, to be subtracted
        edges = [(0, shape[dim]) if box is None else box[dim] for dim in split]
        for corner in product((0, 1), repeat=len(split)):
            place = tuple(edge[end] for edge, end in zip(edges, corner, strict=True))
            corners[place] += -sign if sum(corner) % 2 else sign
    if any(corners.values()):
        raise Damage(f"the boxes of {_quote(name)} overlap, or leave elements out")


def _check_pairs(name: str, boxes: Sequence[Box]) -> None:
    """Check boxes in pairs, where splits along many dims give them too many corners."""
    if len(boxes) ** 2 > _CORNERS:
        raise Damage(f"{_quote(name)} has {len(boxes)} boxes, split along too many dims")
    for number, box in enumerate(boxes):
        if any(intersect(box, other) is not None for other in boxes[:number]):
            raise Damage(f"the boxes of {_quote(name)} overlap")


# -- values ----------------------------------------------------------------------------------------


def whole_number(value: Any, what: str) -> int:
    """Return a value that is an integer from 0 to 2**63 - 1.

    Raises:
        Damage: it is not.
    """
    if type(value) is not int or not 0 <= value <= LARGEST:
        raise Damage(f"{what} is {shortened(value)}, not an integer from 0 to 2**63 - 1")
    return value


def check_name(name: Any) -> str:
    """Return the name of a leaf.

    Raises:
        Damage: it is not a text that can be printed and sent.
    """
    if type(name) is not str or any("\ud800" <= c <= "\udfff" for c in name):
        raise Damage(f"a leaf has the name {_quote(name)}, which is none")
    return name


def check_file_name(file: Any) -> str:
    """Return the name of a file in the folder of the index.

    Raises:
        Damage: it is not a plain name: a path, "..", or with characters that no name has.
    """
    is_plain = type(file) is str and file.isprintable() and not {"/", "\\"} & {*file}
    if not is_plain or file in ("", ".", "..") or len(file) > 255:
        raise Damage(f"it names the file {_quote(file)}, which is not a plain name in the folder")
    return file


def _quote(value: Any) -> str:
    return shortened(repr(value[:200])) if type(value) is str else shortened(value)


def _total(name: str, shape: Sequence[int], dtype: torch.dtype) -> None:
    elements = 1
    for size in shape:
        elements = min(elements * size, LARGEST) if elements else 0
    if 0 not in shape and elements * dtype.itemsize >= LARGEST:
        raise Damage(f"{_quote(name)} has the shape {shortened(list(shape))}, which no tensor has")


def _size(value: Any, budget: _Budget) -> tuple[int, ...]:
    """Return a `torch.Size` as a tuple."""
    if not (
        type(value) is PickledObject
        and value.name == "torch.Size"
        and len(value.args) == 1
        and value.state is None
    ):
        raise Damage(f"it has {shortened(_kind(value))} in the place of a torch.Size")
    sizes = _expect(value.args[0], tuple, "a size")
    if len(sizes) > _MOST_DIMS:
        raise Damage(f"a tensor has {len(sizes)} dims, more than {_MOST_DIMS}")
    budget.spend(1 + len(sizes))
    return tuple(whole_number(size, "a size or an offset") for size in sizes)


def _dtype(record: Any) -> torch.dtype:
    if not _is(record, "TensorProperties"):
        raise Damage(f"it has {shortened(_kind(record))} in the place of TensorProperties")
    state = record.state
    name = (
        state[0]
        if type(state) is tuple and state
        else dict(_fields(record, "TensorProperties")).get("dtype")
    )
    if type(name) is not Name or name not in _DTYPES:
        raise Damage(f"it has {shortened(_kind(name))} in the place of a dtype")
    return _DTYPES[name]


def _is(value: Any, name: str) -> bool:
    return type(value) is PickledObject and value.name.rpartition(".")[2] == name


def _fields(record: Any, name: str) -> dict[str, Any]:
    """Return the state of an object of this class."""
    if not _is(record, name):
        raise Damage(f"it has {shortened(_kind(record))} in the place of {name}")
    return _mapping(record.state, f"the state of a {name}")


def _mapping(value: Any, what: str) -> dict[str, Any]:
    mapping: dict[str, Any] = {}
    for key, item in _pairs(value, what):
        if type(key) is not str:
            raise Damage(f"{what} has {shortened(_kind(key))} in the place of a name")
        if key in mapping:
            raise Damage(f"{what} has {_quote(key)} twice")
        mapping[key] = item
    return mapping


def _pairs(value: Any, what: str) -> Iterator[tuple[Any, Any]]:
    return iter(_expect(value, Pairs, what))


def _expect(value: Any, kind: type, what: str) -> Any:
    if type(value) is not kind:
        raise Damage(
            f"{shortened(what)} is {shortened(_kind(value))}, not a "
            f"{kind.__name__.replace('Pairs', 'dict')}"
        )
    return value


def _kind(value: Any) -> str:
    """Return what a value is, for errors: the name of a pickled class, or the value's type."""
    if type(value) is PickledObject:
        return value.name
    return value if type(value) is Name else f"a {type(value).__name__}"
