"""Collectives that run again instead of keeping what they gathered: memory falls, bytes rise, bits
stay.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import shardmesh as sm
from tests.sharding.jit.passes.counts import FSDP, TP_SP, compared, on, step_of
from tests.sharding.jit.passes.programs import OFF
from tests.sharding.parallel.compositions import UNEVEN, Composition


def saved(
    group: Any, x: Tensor, between: Any = lambda x, whole: None, dtype: torch.dtype | None = None
) -> list[Tensor]:
    """A gathered tensor that is used before and after the largest one."""
    whole = x.new_empty(group.size * x.numel())
    group.all_gather(whole, x)
    first = whole.sum()
    between(x, whole)
    large = torch.ones(60) * first
    large = (large * 2).sum()
    return [large + whole.to(dtype or whole.dtype).cumsum(0)[-1]]


def test_a_kept_result_is_gathered_again() -> None:
    before, after = on(2, saved, "regather")
    assert (before.launches, after.launches) == (1, 2)
    assert after.bytes == 2 * before.bytes
    assert after.peak == before.peak - 24 * 4  # the operand is an argument


def test_what_fits_into_memory_is_kept() -> None:
    before, after = on(2, saved, "regather", max_live_bytes=1 << 20)
    assert before.launches == after.launches == 1


@pytest.mark.parametrize("written", ["operand", "result"])
def test_a_write_between_keeps_the_result(written: str) -> None:
    def between(x: Tensor, whole: Tensor) -> None:
        (x if written == "operand" else whole)[2:4].add_(1)

    before, after = on(2, lambda group, x: saved(group, x, between), "regather")
    assert before.launches == after.launches == 1
    assert after.peak == before.peak


def test_copies_of_a_gathered_buffer_are_made_again() -> None:
    def f(group: Any, x: Tensor) -> list[Tensor]:
        whole = x.new_empty(group.size, x.numel())
        group.all_gather(whole, x)
        unpacked = whole.new_empty(x.numel(), group.size)
        unpacked.copy_(whole.t())
        half = unpacked.to(torch.bfloat16)
        total = unpacked.sum() + half.sum()
        large = (torch.ones(60) * total * 2).sum()
        return [large + unpacked[3:] * 2, half.t().contiguous() * 2]

    before, after = on(2, f, "regather")
    assert (before.launches, after.launches) == (1, 2)
    assert after.peak < before.peak


def test_a_result_that_is_returned_is_kept() -> None:
    def f(group: Any, x: Tensor) -> list[Tensor]:
        whole = x.new_empty(group.size * x.numel())
        group.all_gather(whole, x)
        return [whole, (torch.ones(60) * whole.sum() * 2).sum()]

    before, after = on(2, f, "regather")
    assert before.launches == after.launches == 1


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("case", "layer"),
    [(TP_SP, {}), (FSDP, {"reshard_after_forward": False})],
    ids=["activations of TP and SP", "parameters of FSDP"],
)
def test_models(case: Composition, layer: dict[str, Any]) -> None:
    before, after = compared(case, "regather", **layer)
    assert after.peak < before.peak
    assert after.launches > before.launches
    roomy, _ = sm.simulate(2)(step_of)(
        case, OFF | {"regather": True, "max_live_bytes": before.peak}, **layer
    )
    assert (roomy.launches, roomy.bytes, roomy.peak) == (before.launches, before.bytes, before.peak)


@pytest.mark.slow
def test_ranks_with_parts_of_other_sizes_gather_the_same_ones_again() -> None:
    case = Composition("fsdp", "sp", "global", UNEVEN, (2, 2))
    simulated = sm.simulate(math.prod(case.shape))
    options = {"reshard_after_forward": False}
    pairs = zip(
        simulated(step_of)(case, OFF, **options),
        simulated(step_of)(case, OFF | {"regather": True}, **options),
        strict=True,
    )
    for before, after in pairs:
        assert all(torch.equal(a, b) for a, b in zip(before.values, after.values, strict=True))
        assert after.peak <= before.peak
        assert after.launches > before.launches
