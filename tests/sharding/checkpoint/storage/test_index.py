"""The index as data: the same content as pickle's, exact tilings, and instructions that only pickle
would follow.
"""

from __future__ import annotations

import pickle
import random

import pytest
import torch
from torch.distributed.checkpoint import metadata as dcp

from shardmesh.kernels.box import box_origin, box_shape, box_size, full_box, overlap
from shardmesh.sharding.checkpoint.storage import pickled
from shardmesh.sharding.checkpoint.storage.index import _KNOWN, Damage, check_tiling, read_entries
from shardmesh.sharding.checkpoint.storage.manifest import StoredLeaf, StoredPiece, index_of


def cut(rng, box, times):
    """Cut a box into pieces at random."""
    boxes = [box]
    for _ in range(times):
        one = boxes.pop(rng.randrange(len(boxes)))
        dim = rng.randrange(len(one))
        start, stop = one[dim]
        at = rng.randint(start, stop)
        boxes += [
            (*one[:dim], (start, at), *one[dim + 1 :]),
            (*one[:dim], (at, stop), *one[dim + 1 :]),
        ]
    return boxes


def tiles(shape, boxes):
    """Return whether boxes tile a shape, by counting the elements of each pair."""
    pairs = (overlap(a, b) for i, a in enumerate(boxes) for b in boxes[:i])
    return sum(map(box_size, boxes)) == box_size(full_box(shape)) and not any(pairs)


@pytest.mark.parametrize("seed", range(60))
def test_tilings(seed):
    rng = random.Random(seed)
    shape = [
        rng.choice([0, 1, 2, 5, 9]) if seed % 5 == 0 else rng.randint(1, 9)
        for _ in range(rng.randint(1, 5))
    ]
    boxes = cut(rng, full_box(shape), rng.randint(0, 12))
    check_tiling("x", shape, boxes)
    if 0 in shape:
        return
    solid = [box for box in boxes if box_size(box)]
    wrong = [solid[1:], [*boxes, solid[0]], [*solid[1:], rng.choice(solid)]]
    for boxes in wrong:
        if tiles(shape, boxes):
            continue
        with pytest.raises(Damage, match="overlap"):
            check_tiling("x", shape, boxes)


def test_tilings_of_many_dims():
    """Where a box has too many corners, boxes are compared in pairs."""
    shape = [2] * 30
    halves = [((0, 1), *[(0, 2)] * 29), ((1, 2), *[(0, 2)] * 29)]
    check_tiling("x", shape, halves)
    boxes = cut(random.Random(0), full_box(shape), 200)
    check_tiling("x", shape, boxes)
    with pytest.raises(Damage, match="overlap"):
        check_tiling("x", shape, [*boxes, next(box for box in boxes if box_size(box))])


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_the_content_is_that_of_pickle(protocol):
    entries = {}
    for number, dtype in enumerate(
        [torch.float32, torch.bfloat16, torch.bool, torch.complex64, torch.int64]
    ):
        leaf = entries[f"layers.{number}"] = StoredLeaf(torch.Size((8, 300)), dtype)
        for rank in range(4):
            box = ((2 * rank, 2 * rank + 2), (0, 300))
            leaf.pieces.append(
                StoredPiece(
                    f"layers.{number}", box, f"__{rank}_0.distcp", number * 70_000, 65_000, None
                )
            )
    entries["n"] = StoredLeaf(None, None, [StoredPiece("n", None, "__0_0.distcp", 2**40, 9, None)])
    index = pickle.loads(
        index_of(entries, "/x", {name: tuple(name.split(".")) for name in entries})
    )
    leaves, paths = read_entries(pickle.dumps(index, protocol))
    assert paths == index.planner_data
    for name, entry in index.state_dict_metadata.items():
        if isinstance(entry, dcp.BytesStorageMetadata):
            assert leaves[name].shape is leaves[name].dtype is None
        else:
            assert (leaves[name].shape, leaves[name].dtype) == (entry.size, entry.properties.dtype)
            boxes = [box for box, *_ in leaves[name].pieces]
            assert [(box_origin(box), box_shape(box)) for box in boxes] == [
                (c.offsets, c.sizes) for c in entry.chunks
            ]
    expected = [
        (key.fqn, info.relative_path, info.offset, info.length)
        for key, info in index.storage_data.items()
    ]
    assert sorted(
        (name, *piece[1:]) for name, leaf in leaves.items() for piece in leaf.pieces
    ) == sorted(expected)


@pytest.mark.parametrize(
    "value",
    [
        0,
        255,
        256,
        65536,
        -1,
        2**31,
        -(2**70),
        None,
        True,
        1.5,
        "é",
        "x" * 300,
        [],
        [1, [2]],
        (1, (2, 3), ()),
        ("a",) * 5,
    ],
)
def test_plain_values(value):
    for protocol in (2, 4):
        assert pickled.loads(pickle.dumps(value, protocol), {}) == value


def test_nothing_is_called():
    with pytest.raises(pickled.PickleError, match=r"refers to builtins.print"):
        pickled.loads(pickle.dumps(print), _KNOWN)
    size = pickled.loads(pickle.dumps(torch.Size([1, 2])), _KNOWN)
    assert (type(size), size.name, size.args) == (pickled.PickledObject, "torch.Size", ((1, 2),))
