"""Collectives with async_op and point-to-point permute, compared with their blocking and one-line
forms.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shardmesh.mesh import (
    CollectiveError,
    CollectiveMismatchError,
    CollectiveRecord,
    Group,
    Work,
    comm_budget,
    current_world,
    null_world,
    simulate,
)
from shardmesh.mesh.processes import process
from tests.mesh.comm.collectives import DTYPES, as_bytes, rank_values
from tests.pool import Pool
from tests.tiers import examples


def everyone() -> Group:
    return current_world().group(range(current_world().size))


def results(async_op: bool) -> list[tuple[str, list[int]]]:
    """Return the result of every data collective on every dtype; async ones all start before the
    first wait, in another order.
    """
    group, started, found = everyone(), [], []
    n = group.size

    def start(name: str, out: Tensor, work: Work | None) -> None:
        assert (work is not None) == async_op
        started.append((f"{name} {out.dtype}", out, work))

    for dtype in DTYPES:
        x, big = rank_values(group.rank, (3,), dtype), torch.empty(n, 3, dtype=dtype)
        start("all_gather", big, group.all_gather(big, x, async_op=async_op))
        for op in ("sum", "product") if dtype.is_complex else ("sum", "product", "max", "min"):
            whole, part = rank_values(group.rank, (n, 3), dtype), torch.empty(3, dtype=dtype)
            start(
                f"reduce_scatter {op}",
                part,
                group.reduce_scatter(part, whole.clone(), op, async_op=async_op),
            )
            start(f"all_reduce {op}", whole, group.all_reduce(whole, op, async_op=async_op))
        splits = [(group.rank + r) % 3 for r in range(n)]
        out = torch.empty(sum(splits), dtype=dtype)
        start(
            "all_to_all",
            out,
            group.all_to_all(out, rank_values(n, (sum(splits),), dtype), splits, splits, async_op),
        )
        copy = x.clone()
        start("broadcast", copy, group.broadcast(copy, n - 1, async_op=async_op))
        back = torch.empty(3, dtype=dtype)
        ring = {"dst": (group.rank + 1) % n, "src": (group.rank - 1) % n}
        start("permute", back, group.permute(back, x, **ring, async_op=async_op))
    for name, out, work in reversed(started):
        if work is not None:
            work.wait()
            work.wait()
            assert work.is_completed()
        found.append((name, as_bytes(out).tolist()))
    return found


def test_async_equals_blocking() -> None:
    for n in (1, 3):
        assert simulate(n)(results)(True) == simulate(n)(results)(False)


def test_async_on_gloo(world4: Pool) -> None:
    assert world4(results, True) == simulate(4)(results)(False)


def test_observers_are_notified_at_the_call() -> None:
    def fn() -> tuple[int, int]:
        with comm_budget() as used:
            work = everyone().all_reduce(torch.ones(8), async_op=True)
            at_call = used.launches
            assert work is not None
            assert work.is_completed()
            work.wait()
        return at_call, used.launches

    assert simulate(2)(fn)() == [(1, 1)] * 2


def wrong_size() -> str:
    """Return the error of a receiver that expects less than is sent, and where it is raised."""
    group = everyone()
    try:
        work = group.all_gather(torch.empty(1), torch.empty(1), async_op=True)
        assert work is not None
        work.wait()
    except CollectiveError as error:
        return str(error)
    return "no error"


def test_errors_are_not_lost(world4: Pool) -> None:
    assert all("needs out.numel() == size * x.numel()" in text for text in world4(wrong_size))


@st.composite
def routes(draw: st.DrawFn) -> tuple[list[int | None], list[int]]:
    """Draw a partial permutation: the destination of each rank, if any, and the size sent."""
    n = draw(st.integers(1, 5))
    order = draw(st.permutations(range(n)))
    dst = [d if draw(st.booleans()) else None for d in order]
    return dst, draw(st.lists(st.integers(0, 4), min_size=n, max_size=n))


@settings(max_examples=examples(60))
@given(route=routes(), dtype=st.sampled_from(DTYPES), async_op=st.booleans())
def test_permute_follows_the_pairs(
    route: tuple[list[int | None], list[int]], dtype: torch.dtype, async_op: bool
) -> None:
    dst, sizes = route
    for found, expected in simulate(len(dst))(sent_along)(dst, sizes, dtype, async_op):
        assert found == expected


def sent_along(
    dst: list[int | None], sizes: list[int], dtype: torch.dtype, async_op: bool
) -> tuple[list, list]:
    """Return (received and counted, expected) on this rank."""
    group = everyone()
    src = dst.index(group.rank) if group.rank in dst else None
    x = rank_values(group.rank, (sizes[group.rank],), dtype)
    out = rank_values(99, (2,) if src is None else (sizes[src],), dtype)
    expected = out.clone() if src is None else rank_values(src, (sizes[src],), dtype)
    with comm_budget() as used:
        work = group.permute(out, x, dst=dst[group.rank], src=src, async_op=async_op)
    if work is not None:
        work.wait()
    itself = src == group.rank
    sent = 0 if dst[group.rank] is None or itself else x.nbytes
    received = 0 if src is None or itself else out.nbytes
    counts = [int(group.size > 1), sent, received]
    return (
        [as_bytes(out).tolist(), used.launches, used.bytes_sent, used.bytes_received],
        [as_bytes(expected).tolist(), *counts],
    )


GLOO_ROUTES = [
    ([1, 2, 3, 0], [2, 3, 0, 4]),  # a ring with an empty part
    ([1, 0, 2, None], [3, 3, 1, 2]),  # a swap, one to itself, one that does nothing
    ([None, None, None, 0], [1, 1, 1, 1]),
    ([None] * 4, [1] * 4),
]


def all_routes() -> list[tuple[list, list]]:
    dtypes = (torch.float32, torch.bfloat16, torch.bool, torch.complex64, torch.float8_e4m3fn)
    return [
        sent_along(*route, d, a) for route in GLOO_ROUTES for d in dtypes for a in (False, True)
    ]


def all_routes_through_host_memory() -> list[tuple[list, list]]:
    """Return the results of all routes through host memory, as gloo moves GPU tensors."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process, "_needs_host_memory", lambda handle, device: True)
        return all_routes()


@pytest.mark.parametrize("routes", [all_routes, all_routes_through_host_memory])
def test_permute_on_gloo(world4: Pool, routes: Callable[[], list[tuple[list, list]]]) -> None:
    for found in world4(routes):
        for arrived, expected in found:
            assert arrived == expected


@pytest.mark.parametrize(
    ("dst", "src", "sizes", "message"),
    [
        ([1, None], [None, None], (2, 2), "rank 0 sends to rank 1, which expects from none"),
        (
            [1, None, None],
            [None, 2, None],
            (2, 2),
            "rank 0 sends to rank 1, which expects from rank 2",
        ),
        ([None, None], [None, 0], (2, 2), "rank 1 expects from rank 0, which sends to none"),
        ([1, None], [None, 0], (2, 3), "rank 0 sends 2 elements to rank 1, which expects 3"),
    ],
)
def test_mismatch_names_the_rank(
    dst: list[int | None], src: list[int | None], sizes: tuple[int, int], message: str
) -> None:
    def fn() -> None:
        rank = current_world().rank
        everyone().permute(
            torch.zeros(sizes[1]), torch.zeros(sizes[0]), dst=dst[rank], src=src[rank]
        )

    with pytest.raises(CollectiveMismatchError, match=message):
        simulate(len(dst))(fn)()


@pytest.mark.parametrize(
    ("places", "message"),
    [
        ({"dst": 2, "src": None}, "dst=2, src=None on rank 0 .* from 0 to 1"),
        ({"dst": None, "src": -1}, "src=-1"),
        ({"dst": 0, "src": 1}, "if one of them is this rank, both must be"),
        ({"dst": None, "src": 0}, "if one of them is this rank, both must be"),
    ],
)
def test_invalid_pairs_raise(places: dict[str, int | None], message: str) -> None:
    with pytest.raises(CollectiveError, match=message), null_world(2):
        everyone().permute(torch.zeros(2), torch.zeros(2), **places)


def test_permute_to_itself_needs_equal_sizes() -> None:
    with pytest.raises(CollectiveError, match=r"\(3,\).*\(2,\)"), null_world(2):
        everyone().permute(torch.zeros(3), torch.zeros(2), dst=0, src=0)


def test_null_world_counts() -> None:
    with null_world(4):
        seen: list[CollectiveRecord] = []
        current_world().observers.append(seen.append)
        out, kept = torch.ones(3), torch.ones(3)
        works = [
            everyone().permute(out, torch.ones(2), dst=1, src=2, async_op=True),
            everyone().permute(kept, torch.ones(2), dst=1, src=None, async_op=True),
            everyone().all_gather(torch.ones(8), torch.ones(2), async_op=True),
        ]
        assert all(work is not None and work.is_completed() for work in works)
    assert [(r.op, r.bytes_sent, r.bytes_received) for r in seen] == [
        ("permute", 8, 12),
        ("permute", 8, 0),
        ("all_gather", 24, 24),
    ]
    assert out.tolist() == [0, 0, 0]
    assert kept.tolist() == [1, 1, 1]
