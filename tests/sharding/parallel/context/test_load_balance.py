"""Sequence order over ranks: visible blocks under a causal mask, and balanced sequences."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import shardmesh as sm
from shardmesh import P
from shardmesh.sharding.parallel.context.load_balance import (
    balance_sequence,
    balanced_runs,
    balanced_sizes,
    causal_blocks,
    contiguous,
    unbalance_sequence,
)
from tests.sharding.ranks import collectives, launched, on_mesh, place, same_error

SIZES = st.lists(st.integers(0, 5), min_size=1, max_size=4)


def _positions(runs):
    return [i for start, stop in runs for i in range(start, stop)]


@given(SIZES, st.lists(st.integers(0, 3), min_size=1, max_size=4), st.booleans(), st.data())
def test_blocks_are_the_causal_mask(sizes, others, zigzag, data):
    """Every visible pair is in exactly one block, and no other pair is in any; diagonal blocks are
    squares of the same positions.
    """
    of_q = list(balanced_runs(sum(sizes), len(sizes))) if zigzag else contiguous(sizes)
    of_k = contiguous(others) if data.draw(st.booleans()) else of_q
    queries, keys = data.draw(st.sampled_from(of_q)), data.draw(st.sampled_from(of_k))
    q, k = _positions(queries), _positions(keys)
    seen = torch.zeros(len(q), len(k), dtype=torch.int64)
    for block in causal_blocks(tuple(queries), tuple(keys)):
        rows, cols = slice(block.q_start, block.q_stop), slice(block.k_start, block.k_stop)
        shape = seen[rows, cols]
        assert shape.numel()
        if block.diagonal:
            assert q[rows] == k[cols]
        seen[rows, cols] += torch.ones_like(shape).tril() if block.diagonal else 1
    assert seen.tolist() == [[int(j <= i) for j in k] for i in q]


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_balanced_parts_have_the_same_work(ranks):
    """2n + 1 pairs of pieces on every rank; equally many pairs of positions if pieces have equal
    lengths.
    """
    w = 3
    length, work = 2 * ranks * w, []
    everyone = [i for runs in balanced_runs(length, ranks) for i in _positions(runs)]
    assert sorted(everyone) == list(range(length))
    for mine in balanced_runs(length, ranks):
        blocks = [
            block
            for theirs in balanced_runs(length, ranks)
            for block in causal_blocks(mine, theirs)
        ]
        work.append(sum((b.q_stop - b.q_start) * (b.k_stop - b.k_start) for b in blocks))
    assert work == [(2 * ranks + 1) * w * w] * ranks


@given(st.integers(0, 40), st.integers(1, 6))
def test_balanced_parts_have_similar_lengths(length, ranks):
    sizes = balanced_sizes(length, ranks)
    assert sum(sizes) == length
    assert max(sizes) - min(sizes) <= 1


CASES = [
    ((4,), P(None, "a"), "a"),
    ((4,), P(None, "a", sizes={"a": (5, 0, 6, 2)}), "a"),
    ((2, 2), P("b", "a"), "a"),
    ((2, 2), P("b"), "a"),
    ((2, 2), P(None, ("b", "a")), ("b", "a")),
    ((1,), P(), "a"),
]


@pytest.mark.parametrize(("shape", "spec", "axis"), CASES, ids=str)
def test_balance_and_unbalance(shape, spec, axis):
    whole = torch.randn(3, 13, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    ranks = sm.AbstractMesh(shape, ("a", "b")[: len(shape)]).size(axis)
    order = torch.tensor([i for runs in balanced_runs(13, ranks) for i in _positions(runs)])
    pull = torch.arange(whole.numel(), dtype=torch.float64).view_as(whole)

    def program(mesh):
        x = sm.distribute_tensor(whole, mesh, spec, src_data_rank=None).requires_grad_()
        with collectives() as records:
            y = balance_sequence(x, 1, axis)
        assert launched(records) == (
            ["all_to_all"] if mesh.size() > 1 and spec.padded(3).dims[1] else []
        )
        assert sm.typeof(y).spec.dims[1] == ((axis,) if isinstance(axis, str) else axis)
        assert torch.equal(y.full_tensor(), whole[:, order])
        z = unbalance_sequence(y, -2, axis)
        assert torch.equal(z.full_tensor(), whole)
        (y * place(mesh, pull)).sum().backward()
        assert torch.equal(x.grad.full_tensor()[:, order], pull)

    on_mesh(shape, program)


def test_positions_need_no_communication():
    def program(mesh):
        with collectives() as records:
            positions = balance_sequence(sm.arange(10, device_mesh=mesh), 0, "a")
        assert records == []
        return positions.to_local().tolist()

    assert on_mesh((2,), program) == [[0, 1, 2, 8, 9], [3, 4, 5, 6, 7]]


SPLIT = torch.ones(4, 4)
ERRORS = [
    (lambda mesh: balance_sequence(SPLIT, 0, "a"), TypeError, "expected a ShardedTensor"),
    (lambda mesh: balance_sequence(place(mesh, SPLIT), 1, "cp"), ValueError, "axis='cp'"),
    (lambda mesh: balance_sequence(place(mesh, SPLIT), 2, "a"), ValueError, "dim=2"),
    (
        lambda mesh: balance_sequence(place(mesh, SPLIT, sm.Shard(0), sm.Replicate()), 1, "a"),
        ValueError,
        "axis 'a' cannot split dim 1",
    ),
    (
        lambda mesh: unbalance_sequence(place(mesh, SPLIT, sm.Shard(0), sm.Shard(0)), 0, "a"),
        ValueError,
        "over ('a',) alone",
    ),
]


@pytest.mark.parametrize(("call", "kind", "words"), ERRORS)
def test_unsupported_sequences_raise(call, kind, words):
    assert words in same_error((2, 2), call, kind)
