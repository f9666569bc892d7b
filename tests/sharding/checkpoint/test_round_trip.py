"""Checkpoints are loaded onto other meshes bit for bit; bytes read and sent."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any

import pytest
import torch

import shardmesh as sm
from shardmesh import Layout, P
from shardmesh.sharding.checkpoint import plan
from shardmesh.sharding.checkpoint.agreement import CheckpointError
from shardmesh.sharding.checkpoint.load import load
from shardmesh.sharding.checkpoint.save import save
from shardmesh.sharding.checkpoint.state import RandomState
from shardmesh.sharding.checkpoint.storage import pieces, reading
from shardmesh.sharding.checkpoint.tree import PerRank
from tests.device import DEVICE
from tests.sharding.checkpoint.trees import pair
from tests.sharding.ranks import collectives, launched, on_mesh, place, same_error

X = torch.arange(48.0).reshape(8, 6)


@pytest.mark.one_in(5)
@pytest.mark.parametrize(
    "seeds", [range(first, first + 20) for first in range(0, 100, 20)], ids=str
)
def test_random_pairs_of_meshes(seeds, tmp_path):
    """All 2,000 are run by benchmarks/checkpoint_faults.py."""
    assert sum(pair(seed, tmp_path / str(seed)) for seed in seeds) > len(seeds)


@dataclasses.dataclass
class Position:
    epoch: int
    weights: Any


def test_every_kind_of_leaf(tmp_path):
    def tree(mesh, scale):
        x = place(mesh, X * scale)
        return {
            "model": {
                "w": x.redistribute(P("a")),
                "list": [x, {"deep": x.redistribute(P(None, "a"))}],
            },
            "plain": (X * scale).t(),
            "0-d": place(mesh, torch.tensor(2.5 * scale)),
            "empty": place(mesh, torch.empty(0, 3)).redistribute(P("a")),
            "numbers": [1 * scale, 2.5, True, None, "text", (1, 2)],
            "position": Position(3 * scale, x),
            7: {"key": "integer"},
            "own": PerRank({"rank": mesh.get_rank() * scale}),
        }

    def program(mesh):
        save(tree(mesh, 2), tmp_path)
        found = load(tmp_path, tree(mesh, 0))
        assert torch.equal(found["model"]["w"].full_tensor(), 2 * X)
        assert torch.equal(found["model"]["list"][0].full_tensor(), 2 * X)
        assert found["model"]["list"][1]["deep"].spec == P(None, "a")
        assert torch.equal(found["plain"], 2 * X.t())
        assert found["0-d"].item() == 5
        assert found["empty"].shape == (0, 3)
        assert found["numbers"] == [2, 2.5, True, None, "text", (1, 2)]
        assert (type(found["position"]), found["position"].epoch) == (Position, 6)
        assert torch.equal(found["position"].weights.full_tensor(), 2 * X)
        assert found[7] == {"key": "integer"}
        return found["own"]["rank"]

    assert on_mesh((3,), program) == [0, 2, 4]


def test_like_is_not_modified(tmp_path):
    def program(mesh):
        x = place(mesh, X)
        save({"x": x}, tmp_path)
        like = {"x": place(mesh, -X)}
        load(tmp_path, like)
        assert torch.equal(like["x"].full_tensor(), -X)

    on_mesh((2,), program)


def test_pending_values_are_reduced(tmp_path):
    def program(mesh):
        save({"x": sm.from_local(X.clone(), mesh, P(unreduced={"a"}))}, tmp_path)
        return load(tmp_path, {"x": torch.empty_like(X)})["x"]

    assert all(torch.equal(x, 2 * X) for x in on_mesh((2,), program))


def test_views_are_saved_without_their_base(tmp_path):
    def program(mesh):
        base = torch.zeros(1000, 6)
        save(
            {"x": sm.from_local(base[3:7], mesh, P("a"), shape=(8, 6)), "plain": base.t()[:, 5:9]},
            tmp_path,
        )

    on_mesh((2,), program)
    assert sum(path.stat().st_size for path in tmp_path.rglob("*.distcp")) < 8000


def test_ranks_outside_the_mesh(tmp_path):
    def program():
        inside = sm.DeviceMesh(DEVICE, [2, 0], axis_names=("a",))
        other = sm.DeviceMesh(DEVICE, [1], axis_names=("b",))
        x = sm.distribute_tensor(X, inside, P("a"), src_data_rank=None)
        save({"x": x}, tmp_path)
        y = load(tmp_path, {"x": Layout.of(other, P(), X.shape)})["x"]
        return None if other.coordinate is None else y.to_local()

    results = sm.simulate(3)(program)()
    assert torch.equal(results[1], X)
    assert results[0] is results[2] is None


def test_random_state_continues(tmp_path):
    def saving(mesh):
        sm.random.manual_seed(5)
        torch.manual_seed(mesh.get_rank())
        save({"random": RandomState()}, tmp_path)
        return (
            torch.rand(2),
            sm.rand(4, device_mesh=mesh).full_tensor(),
            random.random() if mesh.get_rank() == 1 else None,
        )

    def loading(mesh):
        load(tmp_path, {"random": RandomState()})
        return torch.rand(2), sm.rand(4, device_mesh=mesh).full_tensor(), None

    before, after = on_mesh((2,), saving), on_mesh((3,), loading)
    for one, other in zip(before, after, strict=False):
        assert torch.equal(one[0], other[0])
        assert torch.equal(one[1], other[1])
    assert not torch.equal(before[0][0], before[1][0])


# -- how much --------------------------------------------------------------------------------------


def test_each_byte_is_written_once_and_evenly(tmp_path):
    """Replicas share the writing: 8 equal tensors on 4 ranks are two for each."""

    def program(mesh):
        save({str(i): place(mesh, X) for i in range(8)}, tmp_path)

    on_mesh((2, 2), program)
    sizes = [path.stat().st_size for path in tmp_path.rglob("*.distcp")]
    assert len(sizes) == 4
    assert max(sizes) - min(sizes) < 16
    assert sum(sizes) < 8 * (X.nbytes + 1600)  # torch.save wraps each piece in so much


@pytest.mark.parametrize(
    ("spec", "kept"),
    [
        (P(), X.nbytes),
        (P("a"), X.nbytes),
        (P(None, ("b", "a")), X.nbytes // 3),
        (P("b", "a"), X.nbytes // 2),
    ],
)
def test_each_byte_is_read_once(spec, kept, tmp_path, monkeypatch):
    """A node reads each piece once, whatever is replicated; readers keep their own parts and send
    the rest.
    """
    read = []
    whole = pieces.read_tensor
    monkeypatch.setattr(
        pieces,
        "read_tensor",
        lambda stored, piece, *args: (read.append(piece), whole(stored, piece, *args))[1],
    )

    def program(mesh):
        save({"x": place(mesh, X).redistribute(P("a"))}, tmp_path)
        with collectives() as records:
            y = load(tmp_path, {"x": Layout.of(mesh, spec, X.shape)})["x"]
        assert torch.equal(y.full_tensor(), X)
        return (
            [r.bytes_received for r in records if r.op == "all_to_all"],
            launched(records),
            y._local.nbytes,
        )

    results = on_mesh((2, 2), program)
    assert len(read) == len(set(read)) == 2
    moved = sum(sum(received) for received, _, _ in results)
    assert moved == sum(held for _, _, held in results) - kept
    assert {tuple(launches) for _, launches, _ in results} == {
        (
            "all_gather_object",
            "broadcast",
            "all_gather_object",
            "all_gather_object",
            "all_to_all",
            "all_gather_object",
        )
    }


def test_nothing_is_sent_if_ranks_need_different_pieces(tmp_path):
    def program(mesh):
        x = place(mesh, X).redistribute(P("a"))
        with collectives() as records:
            save({"x": x}, tmp_path)
        assert launched(records) == ["all_gather_object"] * 4
        with collectives() as records:
            load(tmp_path, {"x": x})
        return launched(records)

    assert (
        on_mesh((4,), program)
        == [["all_gather_object", "broadcast", "all_gather_object", "all_gather_object"]] * 4
    )


def test_tensors_are_read_in_place(tmp_path, monkeypatch):
    """Directly into the loaded tensor's memory if a piece is contiguous there, otherwise into a
    buffer.
    """
    into, whole = [], pieces.read_tensor

    def read(stored, piece, dtype, memory=None):
        x = whole(stored, piece, dtype, memory)
        into.append(memory is not None and x is memory)
        return x

    monkeypatch.setattr(pieces, "read_tensor", read)

    def program(mesh):
        save({"x": place(mesh, X).redistribute(P("a")), "flat": X}, tmp_path)
        for spec in (P("a"), P(None, "a")):
            found = load(tmp_path, {"x": Layout.of(mesh, spec, X.shape)})
            assert torch.equal(found["x"].full_tensor(), X)

    on_mesh((2,), program)
    assert sorted(into) == [False, False, True, True]


def _replicated(folder):
    mesh = sm.init_device_mesh("cpu", (4,), axis_names=("a",))
    x = place(mesh, X)
    save({"x": x.redistribute(P("a")), "step": 3}, folder)
    read, whole = [], pieces.read_tensor
    pieces.read_tensor = lambda stored, piece, *args: (
        read.append(piece.file),
        whole(stored, piece, *args),
    )[1]
    try:
        with collectives() as records:
            found = load(folder, {"x": x, "step": 0})
    finally:
        pieces.read_tensor = whole
    assert torch.equal(found["x"].to_local(), X)
    assert found["step"] == 3
    return read, launched(records)


def test_over_sockets_each_rank_reads_for_itself(world4, tmp_path):
    """Nothing is sent, and the ranks begin with different files."""
    results = world4(_replicated, tmp_path)
    assert {tuple(sorted(read)) for read, _ in results} == {
        tuple(f"__{rank}_0.distcp" for rank in range(4))
    }
    assert len({read[0] for read, _ in results}) == 4
    assert [launches for _, launches in results] == [
        ["all_gather_object", "broadcast", "all_gather_object", "all_gather_object"]
    ] * 4


def test_long_tensors_are_stored_and_read_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(plan, "PIECE_BYTES", 50)
    monkeypatch.setattr(reading, "ROUND_BYTES", 3000)
    read = []
    whole = pieces.read_tensor
    monkeypatch.setattr(
        pieces,
        "read_tensor",
        lambda stored, piece, *args: (read.append(piece), whole(stored, piece, *args))[1],
    )

    def program(mesh):
        save(
            {"x": place(mesh, X), "flat": place(mesh, torch.arange(40)).redistribute(P("a"))},
            tmp_path,
        )
        found = load(
            tmp_path, {"x": torch.empty_like(X), "flat": Layout.of(mesh, P(), (40,), torch.int64)}
        )
        assert torch.equal(found["x"], X)
        assert torch.equal(found["flat"].full_tensor(), torch.arange(40))

    on_mesh((2,), program)
    assert len(read) == len(set(read)) == 4 + 2 * 4  # of 2 rows; of 6 elements of each rank's 20


# -- errors ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("like", "words"),
    [
        ({"model": {"wieght": X}}, ["no 'model.wieght'", "'model.weight'"]),
        (
            {"model": {"weight": X[:4]}},
            ["'model.weight'", "torch.float32[4, 6]", "torch.float32[8, 6]"],
        ),
        ({"model": {"weight": X.double()}}, ["torch.float64[8, 6]", "torch.float32[8, 6]"]),
        ({"model": {"weight": None}}, ["is a tensor", "pass a Layout"]),
        ({"step": X}, ["'step'", "not a tensor"]),
        ({"missing": None}, ["no 'missing'"]),
    ],
)
def test_entries_missing_from_the_checkpoint(like, words, tmp_path):
    on_mesh((2,), lambda mesh: save({"model": {"weight": place(mesh, X)}, "step": 3}, tmp_path))
    text = same_error((2,), lambda mesh: load(tmp_path, like), ValueError, silent=False)
    for word in words:
        assert word in text


def test_a_like_with_pending_values(tmp_path):
    on_mesh((2,), lambda mesh: save({"x": place(mesh, X)}, tmp_path))
    text = same_error(
        (2,),
        lambda mesh: load(tmp_path, {"x": Layout.of(mesh, P(unreduced={"a"}), X.shape)}),
        ValueError,
        silent=False,
    )
    assert "pending" in text


@pytest.mark.parametrize(
    ("leaf", "words"),
    [
        (lambda: 0, ["'bad'", "loaded safely"]),
        (X.numpy(), ["numpy ndarray", "torch.as_tensor"]),
        (torch.empty(2, device="meta"), ["meta"]),
        (X.to_sparse(), ["sparse"]),
    ],
)
def test_unsupported_leaves_raise(leaf, words, tmp_path):
    text = same_error((2,), lambda mesh: save({"bad": leaf}, tmp_path), TypeError)
    for word in words:
        assert word in text
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("tree", [X, 3, [1, 2], None])
def test_invalid_names_raise(tree, tmp_path):
    assert "save a dict" in same_error((2,), lambda mesh: save(tree, tmp_path), TypeError)


@pytest.mark.parametrize("path", [str, Path])
def test_swapped_arguments_raise(path, tmp_path):
    dir = path(tmp_path / "run")
    text = same_error((2,), lambda mesh: save(dir, {"x": X}), TypeError)
    assert text == (
        f"save(tree, dir): the first argument is a {type(dir).__name__}; write save(tree, "
        f"{str(dir)!r})"
    )


def test_clashing_names_raise(tmp_path):
    text = same_error((2,), lambda mesh: save({"a": {"b": 1}, "a.b": 2}, tmp_path), ValueError)
    assert "two leaves have the name 'a.b'" in text


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        (lambda mesh: {"x": mesh.get_rank()}, ["rank 0 has 'x': 0, but rank 1 has 'x': 1"]),
        (
            lambda mesh: {"x": X + (mesh.get_rank() == 2)},
            ["rank 0 has 'x'", "but rank 2", "CRC-32"],
        ),
        (
            lambda mesh: {"x": 1, **({"y": 2} if mesh.get_rank() == 1 else {})},
            ["only rank 1 has 'y'"],
        ),
        (
            lambda mesh: {
                "x": sm.distribute_tensor(
                    X, mesh, P("a" if mesh.get_rank() else None), src_data_rank=None
                )
            },
            ["P('a', None)"],
        ),
    ],
)
def test_different_trees_raise(tree, words, tmp_path):
    text = same_error((3,), lambda mesh: save(tree(mesh), tmp_path), CheckpointError, silent=False)
    for word in words:
        assert word in text
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("options", [{"step": -1}, {"step": 1.5}, {"keep": 0}, {"keep": True}])
def test_invalid_options_raise(options, tmp_path):
    assert str(next(iter(options.values()))) in same_error(
        (2,), lambda mesh: save({}, tmp_path, **options), ValueError
    )


@pytest.mark.parametrize("damaged", ["__0_0.distcp", "__1_0.distcp", "__2_0.distcp"])
def test_a_rank_that_cannot_read(damaged, tmp_path, monkeypatch):
    """In several rounds, some read locally: the other ranks do not wait for it, and raise its
    error.
    """
    monkeypatch.setattr(reading, "ROUND_BYTES", 1)

    def tree(mesh):
        whole, split = place(mesh, X), place(mesh, X).redistribute(P("a"))
        return {"a": split, "b": whole, "c": split, "d": X, "e": split}

    on_mesh((3,), lambda mesh: save(tree(mesh), tmp_path))
    (path,) = tmp_path.rglob(damaged)
    path.write_bytes(path.read_bytes()[:-700])
    assert str(path) in same_error(
        (3,), lambda mesh: load(tmp_path, tree(mesh)), CheckpointError, silent=False
    )


def test_loading_different_trees_per_rank(tmp_path):
    on_mesh((2,), lambda mesh: save({"x": place(mesh, X)}, tmp_path))

    def program(mesh):
        load(tmp_path, {"x": Layout.of(mesh, P("a") if mesh.get_rank() else P(), X.shape)})

    assert "rank 1 has 'x'" in same_error((2,), program, CheckpointError, silent=False)


def test_null_world(tmp_path):
    with sm.debug.null_world(4):
        mesh = sm.init_device_mesh("cpu", (4,), axis_names=("a",))
        with pytest.raises(ValueError, match="null_world has none"):
            save({"x": sm.zeros(4, device_mesh=mesh)}, tmp_path)
        with pytest.raises(ValueError, match="null_world has none"):
            load(tmp_path, {})
