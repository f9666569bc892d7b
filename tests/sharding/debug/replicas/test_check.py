"""assert_replicated and check_replicas: copies that differ in one bit are found, with leaf, ranks
and index; equal ones never are.
"""

from __future__ import annotations

import pickle
import random
import re

import pytest
import torch
from torch import nn

import shardmesh as sm
from shardmesh import P, Partial, Replicate, Shard
from shardmesh.sharding.replicas.bit_hash import _mixed_words, bit_hash, flat_of
from shardmesh.sharding.replicas.check import assert_replicated, check_replicas
from shardmesh.sharding.replicas.compare import ReplicaError
from tests.device import DEVICE
from tests.sharding.ranks import (
    collectives,
    every_rank,
    launched,
    on_mesh,
    place,
    run_programs,
    same_error,
)

DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float64,
    torch.int64,
    torch.int8,
    torch.bool,
    torch.complex64,
    torch.float8_e4m3fn,
)
MESHES = ((2,), (3,), (2, 2), (3, 2), (2, 1, 3))


def random_leaf(rng: random.Random, mesh: sm.DeviceMesh):
    """Return a tensor of random dtype, shape and layout; the same on every rank for the same state
    of rng.
    """
    shape = [rng.choice((0, 1, 2, 3, 7)) for _ in range(rng.randrange(4))]
    if rng.random() < 0.2:
        shape = [rng.randrange(300, 3000)]
    dtype = rng.choice(DTYPES)
    whole = torch.randint(
        0, 2, shape, generator=torch.Generator().manual_seed(rng.randrange(1 << 30))
    ).to(dtype)
    if rng.random() < 0.25:
        return whole
    free, where = list(range(len(shape))), []
    for _ in mesh.axis_names:
        where.append(Shard(rng.choice(free)) if free and rng.random() < 0.5 else Replicate())
    return (
        place(mesh, whole, *where)
        if dtype is not torch.float8_e4m3fn
        else place(mesh, whole.to(torch.int8), *where)
    )


def local(leaf: torch.Tensor) -> torch.Tensor:
    return leaf._local if isinstance(leaf, sm.ShardedTensor) else leaf


def holders(leaf, mesh: sm.DeviceMesh, rank: int) -> list[int]:
    """Return the ranks that hold the same box as this one, computed from boxes rather than axes."""
    if not isinstance(leaf, sm.ShardedTensor):
        return mesh.ranks.reshape(-1).tolist()
    boxes = {int(mesh.ranks[at]): box for at, box in sm.typeof(leaf).boxes()}
    return [r for r, box in boxes.items() if box == boxes[rank]]


def with_a_bit_flipped(x: torch.Tensor, rng: random.Random) -> tuple[torch.Tensor, list[int]]:
    """Return a copy with one bit of one element flipped, and the index of the element."""
    flat = flat_of(x).clone()
    at, width = rng.randrange(flat.numel()), flat.element_size()
    bit = 0 if x.dtype is torch.bool else rng.randrange(8 * width)
    flat.view(torch.uint8)[at * width + bit // 8] ^= 1 << bit % 8 if bit % 8 < 7 else -128 & 0xFF
    return flat.view(x.shape), [
        int(i) for i in torch.unravel_index(torch.tensor(at), x.shape)
    ] if x.ndim else []


def corrupted(leaf, changed: torch.Tensor):
    return (
        sm.ShardedTensor._make(changed, leaf._layout)
        if isinstance(leaf, sm.ShardedTensor)
        else changed
    )


@pytest.mark.one_in(5)
@pytest.mark.parametrize("seed", range(10))
def test_one_flipped_bit_is_found_and_named(seed):
    def program(mesh):
        rng = random.Random(seed)
        tree = {f"leaf{i}": random_leaf(rng, mesh) for i in range(rng.randrange(1, 8))}
        tree |= {
            "whole": place(mesh, torch.arange(700)),
            "numbers": [1, 2.5, float("nan"), "text", None],
        }
        for _ in range(12):
            assert_replicated(tree)
            name = rng.choice([n for n in tree if n != "numbers"])
            outlier = rng.choice(mesh.ranks.reshape(-1).tolist())
            leaf, own, choice = tree[name], mesh.world.rank == outlier, random.Random(rng.random())
            together = holders(leaf, mesh, outlier)
            (size,) = {
                n
                for n in mesh.group().all_gather_object(local(leaf).numel() if own else None)
                if n is not None
            }
            if len(together) < 2 or size == 0:
                continue
            changed, index = with_a_bit_flipped(local(leaf), choice) if own else (None, None)
            index = mesh.group().all_gather_object(index)[mesh.group().ranks.index(outlier)]
            with pytest.raises(ReplicaError) as caught:
                assert_replicated(tree | {name: corrupted(leaf, changed)} if own else tree)
            start = [0] * len(index)
            if isinstance(leaf, sm.ShardedTensor):
                start = [low for low, _ in sm.typeof(leaf).box_at(mesh.coordinate_of(outlier))]
            assert caught.value.path == f"['{name}']"
            assert caught.value.ranks == ((outlier,) if len(together) > 2 else ())
            assert list(caught.value.index) == [
                i + low for i, low in zip(index, start, strict=True)
            ]
            assert str(outlier) in str(caught.value)
            texts = mesh.group().all_gather_object(str(caught.value))
            assert len(set(texts)) == 1
            found.append(name)

    found: list[str] = []
    on_mesh(MESHES[seed % len(MESHES)], program)
    assert found


# -- what the error says ---------------------------------------------------------------------------


def test_outlier_is_named_with_index_and_values():
    def program(mesh):
        x = place(mesh, torch.zeros(4, 6), Shard(1), Replicate())
        x._local[2, 1] = 1.5 * (mesh.world.rank == 4)
        assert_replicated({"w": x})

    text = same_error((2, 3), program, ReplicaError, silent=False)
    assert text == (
        "assert_replicated: ['w'], f32[4, 6] @ P(None, 'a') on (a=2, b=3), is not the same on "
        "ranks that should hold the same of it: rank 4 differs from ranks 3, 5. Between ranks 3 "
        "and 4 the first difference is at index [2, 4]: 0.0 and 1.5."
    )


CASES = {
    "a tie": (
        lambda r: torch.ones(3) * (r // 2),
        r"ranks 0, 1 against ranks 2, 3, a tie\. .*index \[0\]: 0.0 and 1.0",
        (),
    ),
    "a difference everywhere": (
        lambda r: torch.tensor(r),
        r"no two of ranks 0, 1, 2, 3 agree\. .*index \[\]: 0 and 1",
        (),
    ),
    "two odd ranks": (
        lambda r: torch.tensor([0, max(0, r - 1)]),
        r"ranks 2, 3 differ from ranks 0, 1\..*\[1\]: 0 and 1",
        (2, 3),
    ),
    "the sign of zero": (
        lambda r: torch.tensor(-0.0 if r == 2 else 0.0),
        r"rank 2 differs.*index \[\]: 0.0 and -0.0",
        (2,),
    ),
    "bits of NaN": (
        lambda r: torch.tensor([0x7FC00000 + (r == 0)], dtype=torch.int32).view(torch.float32),
        r"rank 0 differs.*nan of bits 0x7fc00000 and 0x7fc00001",
        (0,),
    ),
    "shapes": (
        lambda r: torch.ones(2, 3 + (r == 1)),
        r"rank 1 differs.*Rank 0 holds f32\[2, 3\] and rank 1 f32\[2, 4\]",
        (1,),
    ),
    "dtypes": (
        lambda r: torch.ones(2).to(torch.float64 if r == 3 else torch.float32),
        r"f32\[2\] and rank 3 f64\[2\]",
        (3,),
    ),
    "numbers": (
        lambda r: {"lr": 0.1 + (r == 3)},
        r"\['lr'\], float,.*rank 3 differs.*Rank 0 holds 0.1 and rank 3 1.1",
        (3,),
    ),
    "text": (
        lambda r: ["a", "b" if r else "c"],
        r"\[1\], str,.*rank 0 differs.*Rank 1 holds 'b' and rank 0 'c'",
        (0,),
    ),
    "kinds": (
        lambda r: [1.0 if r == 2 else 1],
        r"different trees: \[0\] is int on ranks 0, 1, 3; float on rank 2",
        (2,),
    ),
    "names": (
        lambda r: {"a": 1} | ({"b": 2} if r == 1 else {}),
        r"\['b'\] is not there on ranks 0, 2, 3; int on rank 1",
        (1,),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_kind_of_difference_is_named(case):
    make, text, ranks = CASES[case]

    def program(mesh):
        try:
            assert_replicated(make(mesh.world.rank))
        except ReplicaError as error:
            assert pickle.loads(pickle.dumps(error)).ranks == error.ranks == ranks
            raise

    assert re.search(text, same_error((4,), program, ReplicaError, silent=False))


def test_layouts_that_differ():
    def program(mesh):
        spec = P("a") if mesh.world.rank == 1 else P()
        assert_replicated({"x": sm.zeros((6,), mesh, spec)})

    text = same_error((3,), program, ReplicaError, silent=False)
    assert (
        "['x'] is f32[6] @ P(None) on (a=3) on ranks 0, 2; f32[6] @ P('a') on (a=3) on rank 1"
        in text
    )


def test_meshes_of_other_ranks_differ():
    def program(mesh):
        ranks = [0, 1, 2] if mesh.world.rank != 1 else [0, 1, 3]
        assert_replicated(sm.zeros((6,), sm.DeviceMesh(DEVICE, ranks), P()), mesh)

    text = same_error((4,), program, ReplicaError, silent=False)
    assert "by rank 0 on ranks 0, 1, 2 and by rank 1 on ranks 0, 1, 3" in text


def test_unsupported_values_raise():
    assert "['f'] is a builtin_function_or_method" in same_error(
        (2,), lambda mesh: assert_replicated({"f": len}), TypeError, silent=False
    )


# -- what is a copy --------------------------------------------------------------------------------


@every_rank(2, 2)
def test_expected_differences_are_ignored(mesh):
    """Shards, contributions to a sum, and tensors on meshes that other ranks have no part in."""
    rank = mesh.world.rank
    pending = sm.ShardedTensor.from_local(
        torch.full((2,), float(rank)), mesh, [Partial(), Partial()]
    )
    half = sm.ShardedTensor.from_local(
        torch.full((2,), float(rank // 2)), mesh, [Shard(0), Replicate()]
    )
    row = sm.full((3,), rank // 2, mesh["b"], P())
    assert_replicated([pending, half, row, torch.arange(3), None])
    assert_replicated([row, rank // 2])
    assert_replicated([torch.full((2,), rank // 2)], mesh["b"])
    with mesh["b"]:
        assert_replicated([torch.full((2,), rank // 2)])
    with pytest.raises(ReplicaError, match="against"):
        assert_replicated([torch.full((2,), rank // 2)])


@every_rank(2, 2)
def test_equal_copies_take_one_small_collective(mesh):
    tree = {
        f"w{i}": place(mesh, torch.full((4, 4), i), Shard(i % 2), Replicate()) for i in range(50)
    }
    with collectives() as records:
        assert_replicated(tree)
    assert launched(records) == ["all_gather_object"]
    assert records[0].bytes_sent < 3 * 300


@every_rank(3)
def test_rank_outside_the_mesh_does_not_compare(mesh):
    """The mesh is given, or that of all tensors."""
    inner, is_outside = sm.DeviceMesh(DEVICE, [0, 2]), mesh.world.rank == 1
    with collectives() as records:
        assert_replicated(torch.tensor(is_outside), inner)
        assert_replicated(
            [
                sm.zeros((4,), inner, P()),
                sm.zeros((4,), sm.DeviceMesh(DEVICE, [2]), P()),
                is_outside,
            ]
        )
    assert len(records) == (0 if is_outside else 2)


def test_null_world():
    with sm.debug.null_world(64):
        mesh = sm.init_device_mesh("meta", (8, 8), axis_names=("a", "b"))
        assert_replicated([sm.empty((16,), mesh, P("a")), 1])


def trained(mesh):
    """Return a module with buffers and its optimizer, after a step."""
    torch.manual_seed(0)
    model = sm.parallel.distribute_module(
        nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), mesh, src_data_rank=None
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return model, optimizer


def step(model, optimizer, mesh):
    model(sm.device_put(torch.arange(32.0).view(8, 4), mesh, P("a"))).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@every_rank(2, 2)
def test_training_is_checked_every_so_often(mesh):
    model, optimizer = trained(mesh)
    check = check_replicas(model, optimizer, every=3)
    for _ in range(4):
        step(model, optimizer, mesh)
        check()
    assert (check.step, check.last_equal) == (4, 3)
    if mesh.world.rank == 2:
        optimizer.state[model[0].weight]["exp_avg"]._local[1, 2] += 1
    check()
    with pytest.raises(
        ReplicaError,
        match=(
            r"exp_avg of 0\.weight.*index \[1, 2\].* Found at step 6; they were the same at step 3"
        ),
    ):
        check()


@every_rank(3)
def test_settings_are_named_before_the_weights(mesh):
    model, optimizer = trained(mesh)
    optimizer.param_groups[0]["lr"] += mesh.world.rank == 1
    check = check_replicas(model, optimizer, every=1)
    step(model, optimizer, mesh)
    with pytest.raises(
        ReplicaError,
        match=r"param_groups\[0\]\['lr'\], float,.*rank 1 differs.*not compared before",
    ):
        check()


@every_rank(2)
def test_plain_parameters_are_the_same_on_all_ranks(mesh):
    torch.manual_seed(mesh.world.rank)
    with pytest.raises(ReplicaError, match=r"\[1\]\.bias, tensor,"):
        assert_replicated([1, nn.Linear(3, 3)])


def test_every_is_a_number_of_steps():
    with pytest.raises(ValueError, match=r"every must be a positive integer.*every=0"):
        check_replicas(nn.Linear(1, 1), every=0)


# -- the hash --------------------------------------------------------------------------------------


def test_hash_depends_on_each_bit_and_its_position():
    """Pairs of flipped signs, swapped elements and shifts, too, which plain sums do not
    tell apart.
    """
    x = torch.randn(64, generator=torch.Generator().manual_seed(0))
    seen = {
        int(bit_hash(x)),
        int(bit_hash(x.flip(0))),
        int(bit_hash(x.roll(1))),
        int(bit_hash(x[:-1])),
        int(bit_hash(-x)),
    }
    for i in range(64):
        for j in range(i):
            y = x.clone()
            y[[i, j]] *= -1
            z = x.clone()
            z[[i, j]] = x[[j, i]]
            seen |= {int(bit_hash(y)), int(bit_hash(z))}
    assert len(seen) == 5 + 2 * 64 * 63 // 2


def unmixed(word: int, place: int) -> int:
    """Return the word that `_mixed_words` maps to this one."""
    whole = 1 << 64
    word ^= word >> 29 ^ word >> 58
    word = word * pow(0x94D049BB133111EB, -1, whole) % whole
    word ^= word >> 32
    word = word * pow(0xBF58476D1CE4E5B9, -1, whole) % whole
    return word ^ place * 0x9E3779B97F4A7C15 % whole


def test_mixing_is_a_bijection_per_word():
    """A single word that differs always changes the hash."""
    words = torch.randint(-(1 << 62), 1 << 62, (1000,)) * 2 + 1
    for place_, (word, found) in enumerate(
        zip(words.tolist(), _mixed_words(words.view(torch.uint8), 0).tolist(), strict=True)
    ):
        assert unmixed(found % (1 << 64), place_) == word % (1 << 64)


def test_hash_does_not_depend_on_strides():
    x = torch.arange(24, dtype=torch.int16).view(4, 6)
    for same in (
        x.t().contiguous().t(),
        torch.arange(-1, 24, dtype=torch.int16)[1:],
        x.to_sparse(),
        x.clone(),
    ):
        assert int(bit_hash(same)) == int(bit_hash(x))
    assert int(bit_hash(x.t())) != int(bit_hash(x))
    z = torch.randn(5, dtype=torch.complex64)
    assert int(bit_hash(z.conj())) == int(bit_hash(z.conj().resolve_conj())) != int(bit_hash(z))
    assert int(bit_hash(torch.empty(0, 3))) == 0


@pytest.mark.parametrize("chunk", [8, 64])
def test_hash_of_parts_combines(monkeypatch, chunk):
    x = torch.randn(1001)
    whole = int(bit_hash(x))
    monkeypatch.setattr("shardmesh.sharding.replicas.bit_hash._AT_A_TIME", chunk)
    assert int(bit_hash(x)) == whole


# -- on processes ----------------------------------------------------------------------------------


def test_on_processes(world4):
    names = [
        "test_expected_differences_are_ignored",
        "test_equal_copies_take_one_small_collective",
        "test_training_is_checked_every_so_often",
        "test_settings_are_named_before_the_weights",
    ]
    assert world4(run_programs, "tests.sharding.debug.replicas.test_check", names)[0] == len(names)
