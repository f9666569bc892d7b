"""Files in the safetensors format: read by slices, written from one rank, compatible with the
safetensors library.
"""

from __future__ import annotations

import errno
import json
import os

import pytest
import torch
from torch import nn

import shardmesh as sm
from shardmesh import Layout, P
from shardmesh.sharding.checkpoint.agreement import CheckpointError
from shardmesh.sharding.checkpoint.safetensors import load_safetensors, save_safetensors
from tests.sharding.checkpoint.trees import DTYPES, bits, values_of
from tests.sharding.ranks import collectives, launched, on_mesh, place, same_error

WHOLE = {
    f"t{i}": values_of(i, shape, dtype)
    for i, dtype in enumerate(DTYPES)
    for shape in [[(5, 3), (7,), (), (0, 2)][i % 4]]
}


def write(path, tensors, shift=0):
    """Write a file by hand as the format is specified, optionally with unaligned data."""
    header, data = {"__metadata__": {"format": "pt"}}, b""
    names = {torch.float32: "F32", torch.int64: "I64", torch.bool: "BOOL", torch.float64: "F64"}
    for name, x in tensors.items():
        header[name] = {
            "dtype": names[x.dtype],
            "shape": list(x.shape),
            "data_offsets": [len(data), len(data) + x.nbytes],
        }
        data += bits(x).numpy().tobytes()
    text = json.dumps(header).encode() + b" " * shift
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


@pytest.mark.parametrize("spec", [P(), P("a"), P(None, "a")])
def test_round_trip(spec, tmp_path):
    path = tmp_path / "x.safetensors"

    def program(mesh):
        layouts = {
            name: Layout.of(mesh, spec if x.ndim == 2 else P(), x.shape, x.dtype)
            for name, x in WHOLE.items()
        }
        save_safetensors(
            {
                "m": {
                    name: place(mesh, x).redistribute(layouts[name].spec)
                    for name, x in WHOLE.items()
                }
            },
            path,
            rank=1,
        )
        with collectives() as records:
            found = load_safetensors(path, {"m": layouts})["m"]
        assert launched(records) == ["all_gather_object"] * 3
        for name, x in found.items():
            assert sm.typeof(x) is layouts[name]
            assert torch.equal(bits(x.full_tensor()), bits(WHOLE[name]))

    on_mesh((3,), program)


def test_compatible_with_the_safetensors_library(tmp_path):
    library = pytest.importorskip("safetensors.torch")
    ours, theirs = tmp_path / "ours.safetensors", tmp_path / "theirs.safetensors"
    library.save_file(WHOLE, theirs)

    def program(mesh):
        save_safetensors({name: place(mesh, x) for name, x in WHOLE.items()}, ours)
        return load_safetensors(theirs, {name: torch.empty_like(x) for name, x in WHOLE.items()})

    for found in (*on_mesh((2,), program), library.load_file(ours)):
        assert all(torch.equal(bits(found[name]), bits(x)) for name, x in WHOLE.items())


@pytest.mark.parametrize("shift", range(8))
def test_unaligned_data(shift, tmp_path):
    tensors = {
        "flags": torch.tensor([True, False, True]),
        "x": torch.arange(12.0).reshape(4, 3),
        "n": torch.arange(4),
    }
    write(tmp_path / "x.safetensors", tensors, shift)

    def program(mesh):
        found = load_safetensors(
            tmp_path / "x.safetensors",
            {**{n: Layout.of(mesh, P("a"), t.shape, t.dtype) for n, t in tensors.items()}},
        )
        assert all(torch.equal(found[name].full_tensor(), x) for name, x in tensors.items())

    on_mesh((2,), program)


def test_a_folder_into_a_module(tmp_path):
    """As Hugging Face writes a model: several files, with the module's names."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
    state = dict(plain.state_dict())
    write(tmp_path / "model-00001-of-00002.safetensors", {"0.weight": state.pop("0.weight")})
    write(tmp_path / "model-00002-of-00002.safetensors", state)

    def program(mesh):
        model = sm.parallel.distribute_module(nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2)), mesh)
        model[0].weight = nn.Parameter(sm.zeros(6, 4, device_mesh=mesh, placements=P("a")))
        assert load_safetensors(tmp_path, model) is model
        return {name: p.detach().full_tensor() for name, p in model.named_parameters()}

    for found in on_mesh((2,), program):
        for name, value in plain.named_parameters():
            assert torch.equal(found[name], value)


# 48, 24, 32 and 0 bytes
SHARDED = {
    "a": torch.arange(12.0).reshape(4, 3),
    "n": torch.arange(3),
    "b": torch.ones(2, 2).double(),
    "none": torch.zeros(0, 2),
}


def _save(folder, **settings):
    on_mesh(
        (2,),
        lambda mesh: save_safetensors(
            {name: place(mesh, x) for name, x in SHARDED.items()}, folder, **settings
        ),
    )


def _check(path):
    like = {name: torch.empty_like(x) for name, x in SHARDED.items()}
    for found in on_mesh((2,), lambda mesh: load_safetensors(path, like)):
        assert all(torch.equal(found[name], x) for name, x in SHARDED.items())


@pytest.mark.parametrize(
    ("size", "count"), [(1, 4), (48, 3), ("56B", 2), ("0.072KB", 2), ("1GiB", 1), (None, 1)]
)
def test_max_shard_size(size, count, tmp_path):
    _save(tmp_path, max_shard_size=size)
    parts = [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    expected = ["model.safetensors"] if count == 1 else [*parts, "model.safetensors.index.json"]
    assert sorted(path.name for path in tmp_path.iterdir()) == expected
    _check(tmp_path)
    if count > 1:
        index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
        assert index["metadata"] == {"total_size": 104}
        assert set(index["weight_map"].values()) == set(parts)
        _check(tmp_path / "model.safetensors.index.json")


def test_files_of_an_earlier_save_are_removed(tmp_path):
    """In any order of one file and several, exactly one model is left."""
    (tmp_path / "adapter.safetensors.txt").write_text("kept")
    for size in (48, None, 56, 48):
        _save(tmp_path / "model.safetensors", max_shard_size=size)
        _check(tmp_path)
    assert len(list(tmp_path.iterdir())) == 3 + 1 + 1


def test_index_lists_the_files_of_the_model(tmp_path):
    _save(tmp_path, max_shard_size=48)
    write(tmp_path / "consolidated.safetensors", {"a": torch.zeros(4, 3)})
    _check(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    text = same_error(
        (2,),
        lambda mesh: load_safetensors(tmp_path, {"a": torch.empty(4, 3)}),
        CheckpointError,
        silent=False,
    )
    assert "consolidated.safetensors" in text
    assert "model-00001-of-00003.safetensors" in text


@pytest.mark.parametrize(
    ("index", "words"),
    [
        ('{"weight_map": {"a": "model-00002-of-00003.safetensors"}}', "has no 'a'"),
        ('{"weight_map": {"a": "gone.safetensors"}}', "gone.safetensors cannot be read"),
        ('{"weight_map": {"a": "../model.safetensors"}}', "cannot be read as the index"),
        ('{"weight_map": 3}', "cannot be read as the index"),
        ("[", "cannot be read as the index"),
    ],
)
def test_a_wrong_index(index, words, tmp_path):
    _save(tmp_path, max_shard_size=48)
    (tmp_path / "model.safetensors.index.json").write_text(index)
    assert words in same_error(
        (2,),
        lambda mesh: load_safetensors(tmp_path, {"a": torch.empty(4, 3)}),
        CheckpointError,
        silent=False,
    )


@pytest.mark.parametrize("size", [0, -1, "five", "5XB", True])
def test_invalid_max_shard_size_raises(size, tmp_path):
    assert "max_shard_size" in same_error(
        (2,), lambda mesh: save_safetensors(SHARDED, tmp_path, max_shard_size=size), ValueError
    )


@pytest.mark.parametrize(
    ("like", "words"),
    [
        ({"y": torch.empty(4, 3)}, ["no 'y'", "'x'"]),
        ({"x": torch.empty(3, 4)}, ["[3, 4]", "[4, 3]"]),
        ({"x": torch.empty(4, 3).double()}, ["torch.float64", "torch.float32"]),
        ({"x": 3}, ["'x'", "is a tensor"]),
    ],
)
def test_missing_tensors_raise(like, words, tmp_path):
    write(tmp_path / "x.safetensors", {"x": torch.zeros(4, 3)})
    text = same_error(
        (2,),
        lambda mesh: load_safetensors(tmp_path / "x.safetensors", like),
        ValueError,
        silent=False,
    )
    for word in words:
        assert word in text


@pytest.mark.parametrize(
    "damage",
    [
        lambda good: good[:5],
        lambda good: good[:-1],
        lambda good: b"\xff" * 8 + good[8:],
        lambda good: b"",
    ],
)
def test_a_damaged_file(damage, tmp_path):
    path = tmp_path / "x.safetensors"
    write(path, {"x": torch.zeros(4, 3)})
    path.write_bytes(damage(path.read_bytes()))
    assert str(path) in same_error(
        (2,),
        lambda mesh: load_safetensors(path, {"x": torch.empty(4, 3)}),
        CheckpointError,
        silent=False,
    )


def test_missing_file_raises(tmp_path):
    for path in (tmp_path, tmp_path / "x.safetensors"):
        assert str(path) in same_error(
            (2,), lambda mesh, path=path: load_safetensors(path, {}), CheckpointError, silent=False
        )


@pytest.mark.parametrize("leaf", [3, torch.zeros(2, dtype=torch.complex128)])
def test_unsupported_dtypes_raise(leaf, tmp_path):
    assert "'a.b'" in same_error(
        (2,), lambda mesh: save_safetensors({"a": {"b": leaf}}, tmp_path / "x"), ValueError
    )


@pytest.mark.parametrize("size", [None, 3_000_000])
def test_a_full_disk(size, tmp_path, monkeypatch):
    """The existing file stays, and the ranks that only send do not hang."""
    path = tmp_path / "x.safetensors"
    write(path, {"x": torch.zeros(4, 3)})
    before = path.read_bytes()

    def no_room(fd, data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", no_room)

    def program(mesh):
        save_safetensors(
            {str(i): place(mesh, torch.zeros(600_000)).redistribute(P("a")) for i in range(3)},
            path,
            max_shard_size=size,
        )

    text = same_error((2,), program, CheckpointError, silent=False)
    assert "No space left on device" in text
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
