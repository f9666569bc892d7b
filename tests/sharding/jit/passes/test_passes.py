"""Effect of each pass: collectives, bytes and memory of a graph before and after, on the models of
these tests.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import shardmesh as sm
from shardmesh.mesh.comm.group import CollectiveRecord
from tests.device import DEVICE
from tests.sharding.jit.passes.counts import (
    FSDP,
    HSDP,
    TP_SP,
    compared,
    is_agreement,
    on,
    reduced,
    step_of,
)
from tests.sharding.jit.passes.programs import ALL, OFF
from tests.sharding.parallel.compositions import EVEN, UNEVEN, Composition

# -- dead and common -------------------------------------------------------------------------------


def test_a_reduction_that_nobody_reads_is_dropped() -> None:
    before, after = on(
        2, lambda group, x: [x * 2, _drop(reduced(group, x))][:1], "dead_collectives"
    )
    assert (before.launches, after.launches) == (1, 0)


def _drop(x: Tensor) -> None:
    x.mul_(2)


def test_a_dead_result_that_is_written_to_an_argument_is_needed() -> None:
    def f(group: Any, x: Tensor) -> list[Tensor]:
        x[:3] = reduced(group, x)[:3]
        return [x + 0]

    before, after = on(2, f, "dead_collectives")
    assert before.launches == after.launches == 1


def test_a_permute_that_nobody_reads_is_waited_for() -> None:
    """It stays, since it also sends; until it has been waited for, its buffers are in use."""
    ended: list[str] = []

    def note(record: CollectiveRecord) -> None:
        if not is_agreement(record):
            ended.append(record.op)

    def f(group: Any, x: Tensor) -> list[Tensor]:
        reduced(group, x)
        group.permute(torch.empty_like(x), x, dst=1 - group.rank, src=1 - group.rank)
        return [x * 2]

    def main() -> None:
        mesh = sm.init_device_mesh(DEVICE, (2,), axis_names=("a",))
        step = sm.jit(
            lambda x: f(mesh.group(), x),
            backend="eager",
            compiler_options=OFF | {"dead_collectives": True},
        )
        step(torch.ones(2))
        mesh.world.observers.append(lambda record: lambda: note(record))
        step(torch.ones(2))

    sm.simulate(2)(main)()
    assert ended == ["permute", "permute"]


def test_equal_collectives_run_once() -> None:
    before, after = on(
        2,
        lambda group, x: [reduced(group, x) * 2, reduced(group, x) + 1, reduced(group, x * 2) + 1],
        "common_collectives",
    )
    assert (before.launches, after.launches) == (3, 2)
    assert after.peak <= before.peak


@pytest.mark.parametrize("write", ["operand", "result"])
def test_a_write_between_or_to_a_result_keeps_both(write: str) -> None:
    def f(group: Any, x: Tensor) -> list[Tensor]:
        first = reduced(group, x)
        (x if write == "operand" else first).view(3, 4)[1].add_(1)
        return [first * 2, reduced(group, x) * 3]

    before, after = on(2, f, "common_collectives")
    assert before.launches == after.launches == 2


def test_two_results_that_are_returned_are_two_tensors() -> None:
    before, after = on(
        2, lambda group, x: [reduced(group, x), reduced(group, x)], "common_collectives"
    )
    assert before.launches == after.launches == 2


def test_a_gathered_parameter_is_not_kept_if_that_takes_more_memory() -> None:
    def f(group: Any, x: Tensor) -> list[Tensor]:
        def gathered() -> Tensor:
            out = x.new_empty(group.size * x.numel())
            group.all_gather(out, x)
            return out.sum()

        first = gathered()
        large = torch.ones(20) * first
        large = (large * 2).sum()
        return [large + gathered()]

    before, after = on(2, f, "common_collectives")
    assert (before.launches, after.launches) == (2, 2)
    assert on(2, f, "common_collectives", max_live_bytes=1 << 12)[1].launches == 1


def test_common_collectives_of_hsdp() -> None:
    before, after = compared(HSDP, "common_collectives")
    assert after.launches < before.launches
    assert after.bytes < before.bytes
    assert after.peak <= before.peak


# -- schedule --------------------------------------------------------------------------------------


@pytest.mark.one_in(5)
@pytest.mark.parametrize("case", [FSDP, HSDP, TP_SP], ids=str)
def test_overlap_moves_no_more_bytes_and_takes_no_more_memory(case: Composition) -> None:
    before, after = compared(case, "overlap")
    assert (after.launches, after.bytes) == (before.launches, before.bytes)
    assert after.peak <= before.peak


def targets(options: Any) -> list[str]:
    """Return the order of starts, waits and products of two consecutive gathers."""
    mesh = sm.init_device_mesh(DEVICE, (2,), axis_names=("a",))
    group = mesh.group()

    def f(x: Tensor, parameters: list[Tensor]) -> Tensor:
        for p in parameters:
            whole = p.new_empty(16)
            group.all_gather(whole, p)
            x = whole.view(4, 4) @ x
        parameters[0].add_(1)
        return x + 0

    jitted = sm.jit(f, backend="eager", compiler_options=options)
    for _ in range(2):
        jitted(torch.ones(4, 4), [torch.ones(8), torch.ones(8), torch.ones(8)])
    short = {
        "shardmesh.all_gather.default": "start",
        "shardmesh.wait.default": "wait",
        "aten.mm.default": "mm",
    }
    return [
        short[str(node.target)]
        for node in jitted.recorded[0].graph.nodes
        if str(node.target) in short
    ]


def test_parameters_are_gathered_ahead_within_the_bound() -> None:
    once = ["start", "wait", "mm"]
    assert sm.simulate(2)(targets)(OFF)[0] == once * 3
    one = sm.simulate(2)(targets)(OFF | {"overlap": True, "max_live_bytes": 64})[0]
    assert one == ["start", "start", "wait", "mm", "start", "wait", "mm", "wait", "mm"]
    everything = sm.simulate(2)(targets)(OFF | {"overlap": True, "max_live_bytes": 1 << 20})[0]
    assert everything == ["start"] * 3 + ["wait", "mm"] * 3


# -- packing ---------------------------------------------------------------------------------------


def test_independent_reductions_are_one() -> None:
    def f(group: Any, x: Tensor) -> list[Tensor]:
        return [reduced(group, x), reduced(group, x.sum()), reduced(group, x[2:5] * 2)]

    before, after = on(2, f, "bucket_bytes", 1 << 10, max_live_bytes=1 << 12)
    assert (before.launches, after.launches) == (3, 1)
    assert before.bytes == after.bytes


def test_dependent_ones_are_not_packed_nor_those_above_the_limit() -> None:
    assert (
        on(
            2,
            lambda group, x: [reduced(group, reduced(group, x) * 2)],
            "bucket_bytes",
            1 << 10,
            max_live_bytes=1 << 12,
        )[1].launches
        == 2
    )
    assert (
        on(2, lambda group, x: [reduced(group, x), reduced(group, x + 1)], "bucket_bytes", 60)[
            1
        ].launches
        == 2
    )


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter"])
def test_gathers_and_scatters_are_one(kind: str) -> None:
    def f(group: Any, x: Tensor) -> list[Tensor]:
        results = []
        for part in (x, x[:4] * 2):
            out = part.new_empty(part.numel() * 2 if kind == "all_gather" else part.numel() // 2)
            getattr(group, kind)(out, part)
            results.append(out * 1)
        return results

    before, after = on(2, f, "bucket_bytes", 1 << 10, max_live_bytes=1 << 12)
    assert (before.launches, after.launches) == (2, 1)
    assert before.bytes == after.bytes


@pytest.mark.one_in(5)
@pytest.mark.parametrize(
    ("case", "least"),
    [(TP_SP, 2), (Composition("ddp", "tp", "global", EVEN, (2, 2)), 2), (HSDP, 2)],
    ids=str,
)
def test_bucketing_of_models(case: Composition, least: int) -> None:
    before, after = compared(case, "bucket_bytes", 1 << 20)
    assert after.launches <= before.launches - least
    assert after.bytes == before.bytes
    assert after.peak <= 1.01 * before.peak


def test_norms_of_many_tensors() -> None:
    def f(group: Any, x: Tensor) -> list[Tensor]:
        return [reduced(group, (x * i).square().sum()).sqrt() for i in range(20)]

    before, after = on(2, f, "bucket_bytes", 1 << 10, max_live_bytes=1 << 12)
    assert (before.launches, after.launches) == (20, 1)


# -- reduce_scatter --------------------------------------------------------------------------------


def test_a_reduction_that_is_sliced_is_a_reduce_scatter() -> None:
    def sliced(group: Any, x: Tensor) -> list[Tensor]:
        n = 4 // group.size
        return [reduced(group, x.view(4, 3))[group.rank * n : (group.rank + 1) * n] * 2]

    before, after = on(2, sliced, "reduce_scatter")
    assert after.bytes * 2 == before.bytes
    assert after.peak <= before.peak


def test_another_slice_stays() -> None:
    before, after = on(2, lambda group, x: [reduced(group, x)[:6] * 2], "reduce_scatter")
    assert before.bytes == after.bytes


@pytest.mark.slow
def test_all_passes_on_uneven_parts() -> None:
    case = Composition("fsdp", "sp", "global", UNEVEN, (2, 2))
    for one, other in zip(
        sm.simulate(4)(step_of)(case, OFF),
        sm.simulate(4)(step_of)(case, ALL | {"regather": False}),
        strict=True,
    ):
        assert all(torch.equal(a, b) for a, b in zip(one.values, other.values, strict=True))
        assert other.launches < one.launches
        assert other.bytes <= one.bytes
