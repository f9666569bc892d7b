"""Sums over gloo ranks: parts are sent to the ranks that need them and added there in rank
order.
"""

from __future__ import annotations

import pytest
import torch

from shardmesh.mesh import current_world
from tests.recorded_operators import RecordedOperators

ROWS = 37  # torch.sum adds the first 32 in another order than the rest


def contribution(rank, size, dtype):
    """Return values of such different magnitudes that the order of addition matters."""
    values = torch.rand(
        size, ROWS, generator=torch.Generator().manual_seed(rank), dtype=torch.float64
    ) * 10.0 ** (3 * (rank % 3))
    return values.to(dtype)


def summed(size, dtype, async_op):
    group = current_world().group(range(size))
    x, out = contribution(group.rank, size, dtype), torch.full((ROWS,), -1, dtype=dtype)
    with RecordedOperators("c10d") as called:
        work = group.reduce_scatter(out, x, "sum", async_op=async_op)
        if work is not None:
            work.wait()
            work.wait()  # which changes nothing
    return out, x, called.names


def expected(rank, size, dtype):
    """Sum in rank order; torch accumulates 16-bit numbers in 32 bits."""
    wide = torch.float32 if dtype.itemsize < 4 and dtype.is_floating_point else dtype
    total = torch.zeros(ROWS, dtype=wide)
    for other in range(size):
        total = total + contribution(other, size, dtype)[rank].to(wide)
    return total.to(dtype)


def check_sums(world, size):
    for dtype in (
        torch.float32,
        torch.float64,
        torch.bfloat16,
        torch.float16,
        torch.int64,
        torch.uint8,
    ):
        for async_op in (False, True):
            for rank, (out, x, names) in enumerate(world(summed, size, dtype, async_op)):
                assert torch.equal(out, expected(rank, size, dtype)), dtype
                assert torch.equal(x, contribution(rank, size, dtype)), (
                    "what is sent stays as it was"
                )
                assert names == ["alltoall_base_"]


def test_sums_are_bitwise_equal_without_gloo_reduce_scatter(world4):
    check_sums(world4, 4)


@pytest.mark.slow
def test_sums_of_eight_ranks(world8):
    check_sums(world8, 8)


def of_nothing_and_in_inference_mode():
    group = current_world().group(range(4))
    group.reduce_scatter(torch.empty(0), torch.empty(0), "sum")
    with torch.inference_mode():
        out = torch.zeros(2)
        work = group.reduce_scatter(out, torch.ones(8), "sum", async_op=True)
    work.wait()
    leaf = torch.zeros(2, requires_grad=True)
    group.reduce_scatter(leaf.detach(), torch.ones(8), "sum")
    return out.tolist(), leaf.tolist()


def test_empty_inference_mode_and_leaf_outputs(world4):
    assert world4(of_nothing_and_in_inference_mode) == [([4.0, 4.0], [4.0, 4.0])] * 4


def largest():
    group = current_world().group(range(4))
    out = torch.zeros(1)
    with RecordedOperators("c10d") as called:
        group.reduce_scatter(out, torch.arange(4.0) * (group.rank + 1), "max")
    return out.item(), called.names


def test_other_reductions_use_gloo(world4):
    for rank, (value, names) in enumerate(world4(largest)):
        assert value == 4 * rank
        assert "alltoall_base_" not in names
