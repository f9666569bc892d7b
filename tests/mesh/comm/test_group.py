"""Every collective compared with its one-line definition, in the simulated world, over ranks,
dtypes and sizes.
"""

from __future__ import annotations

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shardmesh.mesh import (
    CollectiveError,
    CollectiveRecord,
    Group,
    MeshError,
    current_world,
    simulate,
)
from shardmesh.mesh.comm.checks import REDUCTIONS
from tests.mesh.comm.collectives import DTYPES, REDUCE, as_bytes, rank_values
from tests.tiers import examples

SIZES = st.integers(1, 5)
NUMELS = st.sampled_from([0, 1, 3, 8])
SHAPES = st.sampled_from([(), (0,), (0, 3), (1,), (5,), (2, 3)])


def everyone() -> Group:
    return current_world().group(range(current_world().size))


@settings(max_examples=examples(60))
@given(n=SIZES, shape=SHAPES, dtype=st.sampled_from(DTYPES))
def test_all_gather_is_concatenation(n: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    def fn() -> Tensor:
        group = everyone()
        x = rank_values(group.rank, shape, dtype)
        out = torch.empty((n, *shape), dtype=dtype)
        group.all_gather(out, x)
        return out

    expected = as_bytes(torch.stack([rank_values(r, shape, dtype) for r in range(n)]))
    for out in simulate(n)(fn)():
        assert torch.equal(as_bytes(out), expected)


@settings(max_examples=examples(100))
@given(n=SIZES, numel=NUMELS, dtype=st.sampled_from(DTYPES), op=st.sampled_from(sorted(REDUCTIONS)))
def test_reductions(n: int, numel: int, dtype: torch.dtype, op: str) -> None:
    def fn() -> tuple[Tensor, Tensor]:
        group = everyone()
        x = rank_values(group.rank, (n * numel,), dtype)
        part = torch.empty(numel, dtype=dtype)
        group.reduce_scatter(part, x, op)
        group.all_reduce(x, op)
        return x, part

    if dtype.is_complex and op in ("max", "min"):
        with pytest.raises(CollectiveError, match="no order"):
            simulate(n)(fn)()
        return
    total = functools.reduce(REDUCE[op], [rank_values(r, (n * numel,), dtype) for r in range(n)])
    for r, (x, part) in enumerate(simulate(n)(fn)()):
        assert torch.equal(as_bytes(x), as_bytes(total))
        assert torch.equal(as_bytes(part), as_bytes(total[r * numel : (r + 1) * numel]))


@settings(max_examples=examples(60))
@given(data=st.data(), n=SIZES, dtype=st.sampled_from(DTYPES))
def test_all_to_all_transposes_parts(data: st.DataObject, n: int, dtype: torch.dtype) -> None:
    row = st.lists(st.integers(0, 3), min_size=n, max_size=n)
    splits = data.draw(st.lists(row, min_size=n, max_size=n))

    def fn() -> Tensor:
        group = everyone()
        x = rank_values(group.rank, (sum(splits[group.rank]),), dtype)
        out_splits = [splits[r][group.rank] for r in range(n)]
        out = torch.empty(sum(out_splits), dtype=dtype)
        group.all_to_all(out, x, out_splits, splits[group.rank])
        return out

    parts = [rank_values(r, (sum(splits[r]),), dtype).split(splits[r]) for r in range(n)]
    for r, out in enumerate(simulate(n)(fn)()):
        assert torch.equal(as_bytes(out), as_bytes(torch.cat([p[r] for p in parts])))


@settings(max_examples=examples(40))
@given(data=st.data(), n=SIZES, shape=SHAPES, dtype=st.sampled_from(DTYPES))
def test_broadcast(data: st.DataObject, n: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    src = data.draw(st.integers(0, n - 1))

    def fn() -> Tensor:
        x = rank_values(everyone().rank, shape, dtype)
        everyone().broadcast(x, src)
        return x

    for x in simulate(n)(fn)():
        assert torch.equal(as_bytes(x), as_bytes(rank_values(src, shape, dtype)))


def test_gather_objects_copies() -> None:
    def fn() -> list[dict[str, int]]:
        mine = {"rank": current_world().rank}
        found = everyone().all_gather_object(mine)
        mine["rank"] = -1
        return found

    assert simulate(3)(fn)() == [[{"rank": 0}, {"rank": 1}, {"rank": 2}]] * 3


def test_out_may_overlap_x() -> None:
    def fn() -> Tensor:
        group = everyone()
        out = torch.arange(8.0) * (1 + group.rank)
        group.all_gather(out, out[4 * group.rank :][:4])
        return out

    for out in simulate(2)(fn)():
        assert out.tolist() == [0, 1, 2, 3, 8, 10, 12, 14]


def test_sum_of_256_true_values_is_true() -> None:
    def fn() -> bool:
        x = torch.tensor(True)
        everyone().all_reduce(x)
        return bool(x)

    assert all(simulate(256)(fn)())


def test_lazily_conjugated_tensors_are_sent_conjugated() -> None:
    def fn() -> Tensor:
        x = torch.tensor([1 + 2j]).conj()
        out = torch.empty(2, dtype=torch.complex64)
        everyone().all_gather(out, x)
        everyone().all_reduce(x)
        return torch.cat([out, x])

    assert simulate(2)(fn)()[1].tolist() == [1 - 2j, 1 - 2j, 2 - 4j]


def test_same_ranks_in_any_order_give_the_same_group() -> None:
    def fn() -> bool:
        world = current_world()
        return world.group([2, 0, 1]) is world.group((0, 1, 2)) and world.group(
            [1, 2, 0]
        ).ranks == (0, 1, 2)

    assert all(simulate(3)(fn)())


# What each rank sends to each; what it receives is the column.
SENT = [[0, 3, 1, 0], [1, 1, 0, 2], [3, 0, 1, 0], [0, 0, 2, 2]]
SPLITS = [([row[r] for row in SENT], SENT[r]) for r in range(4)]


def record(call: str) -> list[CollectiveRecord]:
    """Return what rank 1 of 4 records for a call on the group g, with x of 4 and big of 16
    elements.
    """

    def fn() -> list[CollectiveRecord]:
        seen: list[CollectiveRecord] = []
        current_world().observers.append(seen.append)
        x, big = torch.zeros(4, dtype=torch.int16), torch.zeros(16, dtype=torch.int16)
        exec(call, {"g": everyone(), "x": x, "big": big, "SPLITS": SPLITS})
        return seen

    return simulate(4)(fn)()[1]


@pytest.mark.parametrize(
    ("call", "sent", "received"),
    [
        ("g.all_gather(big, x)", 24, 24),
        ("g.reduce_scatter(x, big)", 24, 24),
        ("g.all_reduce(big)", 48, 48),
        ("g.broadcast(x, 1)", 24, 0),
        ("g.broadcast(x, 0)", 0, 8),
        ("g.barrier()", 0, 0),
        ("g.all_to_all(x, x.clone(), *SPLITS[g.rank])", 6, 6),
    ],
)
def test_records_count_bytes_per_rank(call: str, sent: int, received: int) -> None:
    (found,) = record(call)
    assert (found.bytes_sent, found.bytes_received, found.ranks) == (sent, received, (0, 1, 2, 3))
    assert found.op == call.split("g.")[1].split("(")[0]


def test_group_of_one_copies_and_records_nothing() -> None:
    def fn() -> tuple[list[CollectiveRecord], Tensor]:
        seen: list[CollectiveRecord] = []
        current_world().observers.append(seen.append)
        group = current_world().group([current_world().rank])
        x, out = torch.arange(3.0), torch.zeros(3)
        group.all_gather(out, x)
        group.all_reduce(x)
        group.reduce_scatter(x, out)
        group.all_to_all(x, out, [3], [3])
        group.broadcast(x, 0)
        group.barrier()
        assert group.all_gather_object("a") == ["a"]
        return seen, out

    seen, out = simulate(2)(fn)()[1]
    assert seen == []
    assert out.tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda g: g.all_gather(torch.zeros(3), torch.zeros(2)),
            r"out\.numel\(\) == size .*\(3,\).*\(2,\)",
        ),
        (
            lambda g: g.all_gather(torch.zeros(4), torch.zeros(2).int()),
            "float32 .* but x is torch.int32",
        ),
        (lambda g: g.all_gather(torch.zeros(2, 2).T, torch.zeros(2)), "contiguous"),
        (
            lambda g: g.reduce_scatter(torch.zeros(2), torch.zeros(3)),
            r"x\.numel\(\) == size \* out\.numel\(\)",
        ),
        (
            lambda g: g.reduce_scatter(torch.zeros(2), torch.zeros(4), "avg"),
            "unknown reduction 'avg'.*'max', 'min'",
        ),
        (lambda g: g.all_reduce(torch.zeros(2), "mean"), "unknown reduction"),
        (lambda g: g.all_reduce(torch.zeros(4, 4)[:, 0]), r"\(4,\) has strides \(4,\)"),
        (lambda g: g.all_reduce(torch.zeros(2, dtype=torch.complex64), "max"), "no order"),
        (
            lambda g: g.all_to_all(torch.zeros(2), torch.zeros(2), [2], [1, 1]),
            r"one entry per rank.*out_splits=\[2\]",
        ),
        (lambda g: g.all_to_all(torch.zeros(2), torch.zeros(2), [1, 1], [1, 2]), "add up"),
        (lambda g: g.broadcast(torch.zeros(2), 2), "src=2.*from 0 to 1"),
    ],
)
def test_invalid_arguments_raise(call: object, message: str) -> None:
    with pytest.raises(CollectiveError, match=message):
        simulate(2)(lambda: call(everyone()))()  # type: ignore[operator]


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ([0, 0], r"\[0\] appear more than once"),
        ([0, 7], r"\[7\] do not exist: the world has 2"),
        ([1], "0 is not in"),
    ],
)
def test_invalid_groups_raise(ranks: list[int], message: str) -> None:
    with pytest.raises(MeshError, match=message):
        simulate(2)(lambda: current_world().group(ranks) if current_world().rank == 0 else None)()
