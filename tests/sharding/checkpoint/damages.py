"""Damaged and dishonest checkpoints and safetensors files: a table of them by name, and what
hypothesis puts in any place of an honest one.

index: negative offset              the index of torch.distributed.checkpoint, no manifest
sealed index: negative offset       the same, and a manifest whose checksums fit
manifest: a file is None            with a checksum of itself that fits
header: a name twice                of a safetensors file
"""

from __future__ import annotations

import io
import json
import os
import pickle
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import metadata as dcp

STEP = "step-00000001"
DATA = "__0_0.distcp"
Damage = Callable[[Path], None]  # of the folder of a step, or of a safetensors file
DEEP = 200_000

# -- what may stand in any place -------------------------------------------------------------------

HOSTILE: list[Any] = [
    None,
    True,
    -1,
    0,
    1,
    2**31,
    2**63 - 1,
    2**63,
    2**70,
    -(2**70),
    1.5,
    float("inf"),
    "",
    ".",
    "..",
    "../secret",
    "/etc/passwd",
    "a/b",
    "a\\b",
    "a\0b",
    "\x1b[2J",
    "w" * 100_000,
    "\u202e",
    [],
    {},
    [[]],
    [None],
    {"a": 1},
    [1, 2, 3, 4, 5],
    ["x"],
    "0",
    "8",
    [2**62, 2**62],
]

NO_NAMES = (
    "../secret",
    "/etc/passwd",
    "",
    ".",
    "..",
    "a/b",
    "a\0b",
    "a\\b",
    "x" * 300,
    None,
    5,
    ["x"],
)


def seal(folder: Path, change: Callable[[dict[str, Any]], Any] | None = None) -> None:
    """Write the manifest again, changed, with checksums that fit: of the index, and of itself."""
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    index = (folder / ".metadata").read_bytes()
    manifest["files"][".metadata"] = {
        "size": len(index),
        "pieces": [[0, len(index), zlib.crc32(index)]],
    }
    changed = change(manifest) if change is not None else None
    manifest = manifest if changed is None else changed
    if isinstance(manifest, dict):
        text = json.dumps({key: value for key, value in manifest.items() if key != "crc32"})
        manifest["crc32"] = zlib.crc32(text.encode())
    path.write_text(json.dumps(manifest))


# -- the index -------------------------------------------------------------------------------------


def index_of(folder: Path) -> Any:
    return pickle.loads((folder / ".metadata").read_bytes())


def _index(change: Callable[[Any], Any]) -> Damage:
    def damage(folder: Path) -> None:
        index = index_of(folder)
        changed = change(index)
        (folder / ".metadata").write_bytes(pickle.dumps(index if changed is None else changed))

    return damage


def _bytes(name: str, change: Callable[[bytes], bytes]) -> Damage:
    return lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes())) and None  # type: ignore[func-returns-value]


def _stored(index: Any, name: str = "w") -> Any:
    return next(info for key, info in index.storage_data.items() if key.fqn == name)


def _store(**settings: Any) -> Damage:
    def change(index: Any) -> None:
        for key, value in settings.items():
            setattr(_stored(index), key, value)

    return _index(change)


def _chunks(change: Callable[[list[Any]], Any]) -> Damage:
    def damage(index: Any) -> None:
        entry = index.state_dict_metadata["w"]
        entry.chunks = change(entry.chunks)

    return _index(damage)


def _boxes(*boxes: tuple[list[int], list[int]]) -> Damage:
    """Give `w` other boxes, each with bytes of its own and long enough."""

    def damage(folder: Path) -> None:
        index = index_of(folder)
        entry = index.state_dict_metadata["w"]
        entry.chunks = [
            dcp.ChunkStorageMetadata(torch.Size(origin), torch.Size(sizes))
            for origin, sizes in boxes
        ]
        kind = type(_stored(index))
        index.storage_data = {
            key: info for key, info in index.storage_data.items() if key.fqn != "w"
        }
        data = b""
        for origin, sizes in boxes:
            file = io.BytesIO()
            torch.save(torch.full(sizes, 5.0), file)
            index.storage_data[dcp.MetadataIndex("w", torch.Size(origin))] = kind(
                "x", len(data), len(file.getvalue())
            )
            data += file.getvalue()
        (folder / "x").write_bytes(data)
        (folder / ".metadata").write_bytes(pickle.dumps(index))

    return damage


def _size(*size: int) -> Damage:
    return _index(lambda index: setattr(index.state_dict_metadata["w"], "size", torch.Size(size)))


class _Refers:
    def __init__(self, function: Any, *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> Any:
        return self.call


def _reused(index: Any) -> None:
    """One list of chunks in many places."""
    entry = index.state_dict_metadata["w"]
    entry.chunks = entry.chunks * 2000
    index.state_dict_metadata = {"w": entry, **{f"w{i}": entry for i in range(2000)}}


def _twice(index: Any) -> bytes:
    """A name of a dict twice, by hand: pickle has no way to say it."""
    data = pickle.dumps(index, protocol=4)
    key = b"\x8c\x07version"
    return data.replace(key, b"\x8c\x07versio2", 1)


OVER = b"\x80\x04cpathlib\nPosixPath\n(N}\x8c\x04_str\x8c\x06/tmp/xstb."
INDEX: dict[str, Damage] = {
    "empty": _bytes(".metadata", lambda _: b""),
    "one byte": _bytes(".metadata", lambda data: data[:1]),
    "half": _bytes(".metadata", lambda data: data[: len(data) // 2]),
    "without its end": _bytes(".metadata", lambda data: data[:-1]),
    "more after its end": _bytes(".metadata", lambda data: data + b"."),
    "zeros": _bytes(".metadata", lambda data: bytes(len(data))),
    "text": _bytes(".metadata", lambda _: b"not a pickle"),
    "None": _index(lambda _: _Refers(torch.Size, ())),
    "is None": _bytes(".metadata", lambda _: pickle.dumps(None)),
    "a list": _bytes(".metadata", lambda _: pickle.dumps([1])),
    "a dict": _bytes(".metadata", lambda _: pickle.dumps({"state_dict_metadata": {}})),
    "deep lists": _bytes(
        ".metadata", lambda _: b"\x80\x04" + b"]" * DEEP + b"a" * (DEEP - 1) + b"."
    ),
    "deep tuples": _bytes(".metadata", lambda _: b"\x80\x04)" + b"\x85" * DEEP + b"."),
    "a deep key": _bytes(".metadata", lambda _: b"\x80\x04})" + b"\x85" * DEEP + b"Ns."),
    "marks": _bytes(".metadata", lambda _: b"\x80\x04" + b"(" * DEEP),
    "pops": _bytes(".metadata", lambda _: b"\x80\x04ttttt."),
    "memo of 2**31": _bytes(".metadata", lambda _: b"\x80\x04Nr\xff\xff\xff\x7f."),
    "text of 2**60": _bytes(
        ".metadata", lambda _: b"\x80\x04\x8d" + struct.pack("<Q", 1 << 60) + b"x."
    ),
    "bytes of 2**40": _bytes(
        ".metadata", lambda _: b"\x80\x05\x96" + struct.pack("<Q", 1 << 40) + b"x."
    ),
    "protocol 0": _bytes(
        ".metadata", lambda _: b"cpathlib\nPosixPath\n(N(dS'_str'\nS'/tmp/x'\nstb."
    ),
    "builds a class": _bytes(".metadata", lambda _: OVER),
    "builds a function": _bytes(
        ".metadata", lambda _: b"\x80\x04ctorch.serialization\n_get_layout\n}\x8c\x08__code__Nsb."
    ),
    "builds twice": _bytes(".metadata", lambda _: b"\x80\x04ctorch\nSize\n)\x81}b}b."),
    "calls os.system": _index(lambda _: _Refers(os.system, "touch ran")),
    "calls exec": _index(lambda index: setattr(index, "planner_data", _Refers(exec, "1"))),
    "names open": _bytes(".metadata", lambda _: b"\x80\x04cbuiltins\nopen\n."),
    "dotted name": _bytes(
        ".metadata", lambda _: b"\x80\x04\x8c\x07pathlib\x8c\x0fPosixPath.unlink\x93."
    ),
    "extension": _bytes(".metadata", lambda _: b"\x80\x02\x82\x01."),
    "persistent id": _bytes(".metadata", lambda _: b"\x80\x02NQ."),
    "no state": _bytes(
        ".metadata", lambda _: b"\x80\x04ctorch.distributed.checkpoint.metadata\nMetadata\n)\x81."
    ),
    "a name of no text": _bytes(
        ".metadata", lambda data: data.replace(b"\x8c\x01w", b"\x8c\x01\xff", 1)
    ),
    "another field": _index(_twice),
    "reused lists": _index(_reused),
    "state_dict_metadata None": _index(lambda index: setattr(index, "state_dict_metadata", None)),
    "storage_data None": _index(lambda index: setattr(index, "storage_data", None)),
    "storage_data empty": _index(lambda index: setattr(index, "storage_data", {})),
    "storage_data a list": _index(lambda index: setattr(index, "storage_data", [])),
    "planner_data a list": _index(lambda index: setattr(index, "planner_data", [1])),
    "an empty path": _index(lambda index: index.planner_data.update(w=())),
    "a path of None": _index(lambda index: index.planner_data.update(w=(None,))),
    "a long path": _index(lambda index: index.planner_data.update(w=("x",) * DEEP)),
    "a path through a leaf": _index(lambda index: index.planner_data.update(ghost=("w", "ghost"))),
    "an entry None": _index(lambda index: index.state_dict_metadata.update(w=None)),
    "an entry a value": _index(
        lambda index: index.state_dict_metadata.update(w=dcp.BytesStorageMetadata())
    ),
    "an unknown name": _index(lambda index: index.state_dict_metadata.pop("w") and None),
    "a number as name": _index(
        lambda index: index.state_dict_metadata.update({5: index.state_dict_metadata["w"]})
    ),
    "an info None": _index(
        lambda index: index.storage_data.update(dict.fromkeys(index.storage_data))
    ),
    "offset negative": _store(offset=-5),
    "offset None": _store(offset=None),
    "offset True": _store(offset=True),
    "offset a float": _store(offset=0.0),
    "offset text": _store(offset="0"),
    "offset 2**70": _store(offset=2**70),
    "offset 2**63 - 1": _store(offset=2**63 - 1),
    "offset past the end": _store(offset=10**9),
    "length negative": _store(length=-1),
    "length 0": _store(length=0),
    "length None": _store(length=None),
    "length 2**70": _store(length=2**70),
    "length 8e9": _store(length=8 * 10**9),
    "length 1": _store(length=1),
    "a value of length 0": _index(lambda index: setattr(_stored(index, "step"), "length", 0)),
    "transformed": _store(transform_descriptors=["zstd"]),
    **{
        f"file {file!r:.20}": _store(relative_path=file)
        for file in (*NO_NAMES, b"x", "gone", "\x1b[2J", "a\nb")
    },
    "boxes overlap": _boxes(([0, 0], [5, 6]), ([4, 0], [4, 6])),
    "boxes overlap and leave out": _boxes(([0, 0], [4, 6]), ([2, 0], [4, 6])),
    "boxes outside": _boxes(([100, 0], [4, 6]), ([104, 0], [4, 6])),
    "boxes leave out": _boxes(([0, 0], [4, 6])),
    "a box twice": _boxes(([0, 0], [8, 6]), ([0, 0], [8, 6])),
    "boxes of other dims": _boxes(([0], [48])),
    "boxes that cross": _boxes(
        ([0, 0], [4, 4]), ([2, 2], [4, 4]), ([4, 0], [4, 2]), ([0, 4], [2, 2]), ([6, 2], [2, 4])
    ),
    "a negative box": _chunks(
        lambda chunks: [dcp.ChunkStorageMetadata(torch.Size([-4, 0]), c.sizes) for c in chunks]
    ),
    "a box of negative size": _chunks(
        lambda chunks: [dcp.ChunkStorageMetadata(c.offsets, torch.Size([-4, 6])) for c in chunks]
    ),
    "a box far away": _chunks(
        lambda chunks: [dcp.ChunkStorageMetadata(torch.Size([10**12, 0]), c.sizes) for c in chunks]
    ),
    "a box of 2**62": _chunks(
        lambda chunks: [
            dcp.ChunkStorageMetadata(c.offsets, torch.Size([2**62, 2**62])) for c in chunks
        ]
    ),
    "a box of lists": _chunks(
        lambda chunks: [dcp.ChunkStorageMetadata([0, 0], [8, 6]) for _ in chunks]
    ),  # type: ignore[arg-type]
    "no chunks": _chunks(lambda _: []),
    "chunks None": _chunks(lambda _: None),
    "a chunk None": _chunks(lambda _: [None]),
    "shape 10**18": _size(10**9, 10**9),
    "shape 2**64": _size(2**32, 2**32),
    "shape negative": _size(-8, -6),
    "shape of 1 dim": _size(48),
    "shape of 100 dims": _size(*[1] * 100),
    "shape smaller": _size(4, 6),
    "shape None": _index(lambda index: setattr(index.state_dict_metadata["w"], "size", None)),
    "shape a list": _index(lambda index: setattr(index.state_dict_metadata["w"], "size", [8, 6])),
    "dtype None": _index(
        lambda index: setattr(index.state_dict_metadata["w"].properties, "dtype", None)
    ),
    "dtype complex128": _index(
        lambda index: setattr(index.state_dict_metadata["w"].properties, "dtype", torch.complex128)
    ),
    "properties None": _index(
        lambda index: setattr(index.state_dict_metadata["w"], "properties", None)
    ),
}

# -- the manifest ----------------------------------------------------------------------------------


def _manifest(change: Callable[[dict[str, Any]], Any]) -> Damage:
    return lambda folder: seal(folder, change)


def _piece(number: int, value: Any) -> Damage:
    def change(manifest: dict[str, Any]) -> None:
        manifest["files"][DATA]["pieces"][0][number] = value

    return _manifest(change)


def _tree(tree: Any) -> Damage:
    return _manifest(lambda manifest: manifest.update(tree=tree))


def _nested(levels: int) -> Any:
    tree: Any = "w"
    for _ in range(levels):
        tree = {"list": [tree]}
    return tree


MANIFEST: dict[str, Damage] = {
    "empty": _bytes("manifest.json", lambda _: b""),
    "half": _bytes("manifest.json", lambda data: data[: len(data) // 2]),
    "deep": _bytes("manifest.json", lambda _: b"[" * DEEP + b"]" * DEEP),
    "NaN": _bytes("manifest.json", lambda data: data.replace(b'"step": 1', b'"step": NaN')),
    "not text": _bytes("manifest.json", lambda _: b"\xff\xfe"),
    "a number of 10,000 digits": _bytes(
        "manifest.json", lambda _: b'{"crc32": ' + b"9" * 10_000 + b"}"
    ),
    "null": _bytes("manifest.json", lambda _: b"null"),
    "a list": _manifest(lambda _: []),
    "an empty dict": _manifest(lambda _: {}),
    "a key twice": _bytes(
        "manifest.json", lambda data: data.replace(b'"step"', b'"step": 5, "step"')
    ),
    "another format": _manifest(lambda manifest: manifest.update(format="x" * 10**6)),
    "no format": _manifest(lambda manifest: manifest.pop("format") and None),
    "no files": _manifest(lambda manifest: manifest.pop("files") and None),
    "files None": _manifest(lambda manifest: manifest.update(files=None)),
    "files a list": _manifest(lambda manifest: manifest.update(files=[])),
    "no data file": _manifest(lambda manifest: manifest["files"].pop(DATA) and None),
    "no index": _manifest(lambda manifest: manifest["files"].pop(".metadata") and None),
    "a file outside": _manifest(
        lambda manifest: manifest["files"].update({"../x": {"size": 0, "pieces": []}})
    ),
    "a file None": _manifest(lambda manifest: manifest["files"].update({DATA: None})),
    "no pieces": _manifest(
        lambda manifest: manifest["files"].update({DATA: {"size": 9, "pieces": []}})
    ),
    "pieces None": _manifest(
        lambda manifest: manifest["files"].update({DATA: {"size": 9, "pieces": None}})
    ),
    "size -1": _manifest(lambda manifest: manifest["files"][DATA].update(size=-1)),
    "size None": _manifest(lambda manifest: manifest["files"][DATA].update(size=None)),
    "size 2**70": _manifest(lambda manifest: manifest["files"][DATA].update(size=2**70)),
    "piece None": _manifest(lambda manifest: manifest["files"][DATA].update(pieces=[None])),
    "offset -1": _piece(0, -1),
    "offset 2**70": _piece(0, 2**70),
    "length text": _piece(1, "9"),
    "length 2**62": _piece(1, 2**62),
    "crc None": _piece(2, None),
    "crc True": _piece(2, True),
    "crc 2**40": _piece(2, 2**40),
    "crc of something else": _piece(2, 7),
    "step -1": _manifest(lambda manifest: manifest.update(step=-1)),
    "step True": _manifest(lambda manifest: manifest.update(step=True)),
    "step text": _manifest(lambda manifest: manifest.update(step="1")),
    "step None": _manifest(lambda manifest: manifest.update(step=None)),
    "another step": _manifest(lambda manifest: manifest.update(step=2)),
    "tree a number": _tree(5),
    "tree a list": _tree([]),
    "tree of two kinds": _tree({"dict": [], "list": []}),
    "tree of no kind": _tree({"set": []}),
    "tree dict of None": _tree({"dict": None}),
    "tree dict of a pair": _tree({"dict": ["w"]}),
    "tree a key None": _tree({"dict": [[None, "w"]]}),
    "tree a key twice": _tree({"dict": [["w", "w"], ["w", "w"]]}),
    "tree a surrogate": _tree({"dict": [["\ud800", "w"]]}),
    "tree of 400 levels": _tree(_nested(400)),
    "tree of 201 levels": _tree(_nested(201)),
}

# -- other files -----------------------------------------------------------------------------------


def _replaced(name: str, how: Callable[[Path], Any]) -> Damage:
    def damage(folder: Path) -> None:
        (folder / name).unlink()
        how(folder / name)

    return damage


def _bomb(folder: Path) -> None:
    """A compressed file of torch.save, without a manifest that tells."""
    index = index_of(folder)
    info = _stored(index, "step")
    plain, packed = io.BytesIO(), io.BytesIO()
    torch.save(torch.zeros(1 << 24), plain)
    with (
        zipfile.ZipFile(plain) as source,
        zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as target,
    ):
        for record in source.infolist():
            target.writestr(record.filename, source.read(record))
    (folder / "bomb").write_bytes(packed.getvalue())
    info.relative_path, info.offset, info.length = "bomb", 0, len(packed.getvalue())
    (folder / ".metadata").write_bytes(pickle.dumps(index))


FILES: dict[str, Damage] = {
    "data truncated": _bytes(DATA, lambda data: data[: len(data) // 2]),
    "data empty": _bytes(DATA, lambda _: b""),
    "data zeros": _bytes(DATA, lambda data: bytes(len(data))),
    "data a pickle": _bytes(
        DATA, lambda data: (pickle.dumps(_Refers(os.system, "touch ran")) * 500)[: len(data)]
    ),
    "data missing": lambda folder: (folder / DATA).unlink(),
    "data a folder": _replaced(DATA, Path.mkdir),
    "data a FIFO": _replaced(DATA, os.mkfifo),
    "data a device": _replaced(DATA, lambda path: path.symlink_to("/dev/zero")),
    "data a link to itself": _replaced(DATA, lambda path: path.symlink_to(path.name)),
    "index a folder": _replaced(".metadata", Path.mkdir),
    "index a FIFO": _replaced(".metadata", os.mkfifo),
    "index a device": _replaced(".metadata", lambda path: path.symlink_to("/dev/zero")),
    "index missing": lambda folder: (folder / ".metadata").unlink(),
}
BOMBS: dict[str, Damage] = {"a compressed value": _bomb}

# -- safetensors -----------------------------------------------------------------------------------

W, B = torch.arange(48.0).reshape(8, 6), torch.arange(3)
HEADER: dict[str, Any] = {
    "w": {"dtype": "F32", "shape": [8, 6], "data_offsets": [0, 192]},
    "b": {"dtype": "I64", "shape": [3], "data_offsets": [192, 216]},
}
TENSORS = W.numpy().tobytes() + B.numpy().tobytes()


def safetensors_file(header: Any, data: bytes = TENSORS, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def _w(**changes: Any) -> bytes:
    return safetensors_file({**HEADER, "w": {**HEADER["w"], **changes}})


_ONE = b'"w":{"dtype":"F32","shape":[8,6],"data_offsets":[0,192]}'
_OTHER = b'"b":{"dtype":"I64","shape":[3],"data_offsets":[192,216]}'
HEADERS: dict[str, bytes] = {
    "no file": b"",
    "seven bytes": b"1234567",
    "no header": safetensors_file(b""),
    "length 2**63": safetensors_file(HEADER, length=1 << 63),
    "length 10 GB": safetensors_file(HEADER, length=10**10),
    "length of the file": safetensors_file(HEADER, length=len(safetensors_file(HEADER))),
    "not JSON": safetensors_file(b"{" * 50),
    "deep": safetensors_file(b"[" * DEEP + b"]" * DEEP),
    "deep in a field": safetensors_file(b'{"w":' + b"[" * DEEP + b"]" * DEEP + b"}"),
    "a list": safetensors_file([]),
    "not text": safetensors_file(b"\xff\xfe{}"),
    "None": safetensors_file(b"null"),
    "an entry None": safetensors_file({**HEADER, "w": None}),
    "an entry a list": safetensors_file({**HEADER, "w": [1]}),
    "no offsets": safetensors_file({**HEADER, "w": {"dtype": "F32", "shape": [8, 6]}}),
    "no dtype": safetensors_file({**HEADER, "w": {"shape": [8, 6], "data_offsets": [0, 192]}}),
    "a name twice": safetensors_file(b"{" + _ONE + b"," + _OTHER + b"," + _ONE + b"}"),
    "a field twice": safetensors_file(
        b"{" + _ONE.replace(b'"shape"', b'"shape":[8,6],"shape"') + b"," + _OTHER + b"}"
    ),
    "a hole": safetensors_file(
        {**HEADER, "b": {"dtype": "I64", "shape": [3], "data_offsets": [200, 224]}},
        TENSORS + bytes(8),
    ),
    "a hole before": safetensors_file({"w": {**HEADER["w"], "data_offsets": [24, 216]}}),
    "bytes after the end": safetensors_file(HEADER, TENSORS + bytes(64)),
    "overlap": safetensors_file(
        {**HEADER, "b": {"dtype": "I64", "shape": [3], "data_offsets": [168, 192]}}, TENSORS[:192]
    ),
    "the same bytes": safetensors_file({"w": HEADER["w"], "b": HEADER["w"]}, TENSORS[:192]),
    "truncated": safetensors_file(HEADER, TENSORS[:100]),
    "no data": safetensors_file(HEADER, b""),
    "offsets negative": _w(data_offsets=[-192, 0]),
    "offsets reversed": _w(data_offsets=[192, 0]),
    "offsets floats": _w(data_offsets=[0.0, 192.0]),
    "offsets text": _w(data_offsets=["0", "192"]),
    "offsets 2**70": _w(data_offsets=[0, 2**70]),
    "offsets past the end": _w(data_offsets=[10**6, 10**6 + 192]),
    "one offset": _w(data_offsets=[0]),
    "offsets None": _w(data_offsets=None),
    "offsets True": _w(data_offsets=[False, True]),
    "shape negative": _w(shape=[-8, -6]),
    "shape 10**18": _w(shape=[10**9, 10**9]),
    "shape 2**64": _w(shape=[2**32, 2**32]),
    "shape text": _w(shape="86"),
    "shape None": _w(shape=None),
    "shape of floats": _w(shape=[8.0, 6.0]),
    "shape larger": _w(shape=[8, 7]),
    "dtype unknown": _w(dtype="F31"),
    "dtype a number": _w(dtype=5),
    "dtype F64": _w(dtype="F64"),
    "metadata a list": safetensors_file({**HEADER, "__metadata__": [1]}),
    "metadata nested": safetensors_file({**HEADER, "__metadata__": {"a": {"b": 1}}}),
    "a long entry": safetensors_file(
        {**HEADER, "w": {"dtype": "F31" * 100_000, "shape": [8, 6], "data_offsets": [0, 192]}}
    ),
}
_MAP = {"w": "model.safetensors", "b": "model.safetensors"}
INDICES: dict[str, Any] = {
    "empty": b"",
    "not JSON": b"{",
    "deep": b"[" * DEEP + b"]" * DEEP,
    "no map": {},
    "map a list": {"weight_map": []},
    "map None": {"weight_map": None},
    "a name twice": b'{"weight_map": {"w": "model.safetensors", "w": "model.safetensors"}}',
    **{
        f"file {file!r:.20}": {"weight_map": {**_MAP, "w": file}}
        for file in (*NO_NAMES, "../secret.safetensors", "gone.safetensors")
    },
    "a tensor that is not there": {"weight_map": {**_MAP, "ghost": "model.safetensors"}},
}

COUNT = 2 * len(INDEX) + len(MANIFEST) + len(FILES) + len(BOMBS) + len(HEADERS) + len(INDICES)
