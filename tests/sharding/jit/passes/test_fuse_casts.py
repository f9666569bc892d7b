"""Casts and scales next to collectives: fewer bytes, operators and elements, the same bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import shardmesh as sm
from tests.device import DEVICE
from tests.sharding.jit.passes.counts import TP_SP, compared, on
from tests.sharding.jit.passes.programs import OFF

HALF = torch.bfloat16


def gathered(group: Any, x: Tensor) -> Tensor:
    whole = x.new_empty(group.size, x.numel())
    group.all_gather(whole, x)
    return whole


def unpacked(group: Any, x: Tensor) -> Tensor:
    whole = gathered(group, x)
    return whole.new_empty(x.numel(), group.size).copy_(whole.t())


def operators(f: Callable[..., list[Tensor]], **options: Any) -> list[str]:
    """The operators of a graph on two ranks, without views."""

    def main() -> list[str]:
        mesh = sm.init_device_mesh(DEVICE, (2,), axis_names=("a",))
        jitted = sm.jit(
            lambda x: f(mesh.group(), x),
            backend="eager",
            compiler_options=OFF | {"fuse_casts": True} | options,
        )
        jitted(torch.arange(12.0))
        nodes = [node for node in jitted.recorded[0].graph.nodes if node.op == "call_function"]
        names = [str(node.target).partition(".")[2].partition(".")[0] for node in nodes]
        return [
            name
            for name in names
            if name not in ("view", "slice", "t", "select", "as_strided", "_unsafe_view", "unbind")
        ]

    return sm.simulate(2)(main)()[0]


@pytest.mark.parametrize("gather", [gathered, unpacked])
def test_a_cast_runs_before_a_gather(gather: Any) -> None:
    def f(group: Any, x: Tensor) -> list[Tensor]:
        whole = gather(group, x / 7)
        return [whole.to(HALF) @ torch.ones(whole.shape[1], 2, dtype=HALF), whole.to(HALF) * 3]

    before, after = on(2, f, "fuse_casts")
    assert before.launches == after.launches
    assert before.bytes == 2 * after.bytes
    assert after.peak < before.peak
    assert operators(f).count("_to_copy") == 1


def test_a_use_of_the_whole_keeps_the_dtype() -> None:
    def f(group: Any, x: Tensor) -> list[Tensor]:
        whole = gathered(group, x / 7)
        return [whole.to(HALF) * 3, whole.sum()]

    before, after = on(2, f, "fuse_casts")
    assert before.bytes == after.bytes


def test_a_use_without_a_tensor_keeps_the_dtype() -> None:
    """Such as an operator that returns a list or writes to one."""

    def f(group: Any, x: Tensor) -> list[Tensor]:
        first, second = torch.var_mean(gathered(group, x / 7), dim=1)
        return [first * 2, second * 2]

    before, after = on(2, f, "fuse_casts")
    assert before.bytes == after.bytes


@pytest.mark.parametrize("written", ["whole", "part"])
def test_a_write_in_place_keeps_the_order(written: str) -> None:
    def f(group: Any, x: Tensor) -> list[Tensor]:
        whole = gathered(group, x / 7)
        first = whole.to(HALF)
        (whole if written == "whole" else first)[0].add_(1)
        return [first * 3, whole.to(HALF) * 2]

    on(2, f, "fuse_casts")


def test_a_cast_that_widens_runs_after_a_gather() -> None:
    def f(group: Any, x: Tensor) -> list[Tensor]:
        whole = gathered(group, (x / 7).to(HALF).float())
        return [whole.cumsum(0), (torch.ones(200) * whole.sum() * 2).sum()]

    before, after = on(2, f, "fuse_casts")
    assert before.bytes == 2 * after.bytes
    assert after.peak <= before.peak


def test_a_cast_that_was_written_is_gathered_as_it_is() -> None:
    def f(group: Any, x: Tensor) -> list[Tensor]:
        wide = (x / 7).to(HALF).float()
        wide[1].add_(1e-6)
        return [gathered(group, wide).cumsum(0), (torch.ones(200) * x.sum() * 2).sum()]

    before, after = on(2, f, "fuse_casts")
    assert before.bytes == after.bytes


def test_a_scale_runs_on_the_part_and_not_on_the_whole() -> None:
    def f(group: Any, x: Tensor) -> list[Tensor]:
        return [(gathered(group, x + 1) / 3).cumsum(0)]

    on(2, f, "fuse_casts")
    assert operators(f) == ["add", "div", "all_gather", "wait", "cumsum"]


def test_a_scale_stays_behind_a_sum() -> None:
    """Before it the numbers would overflow, or not."""

    def f(group: Any, x: Tensor) -> list[Tensor]:
        out = x * 3e37
        group.all_reduce(out)
        return [out * 0.5]

    on(2, f, "fuse_casts")
    assert operators(f) == ["mul", "all_reduce", "wait", "mul"]


def test_a_mean_of_which_a_rank_uses_its_part_is_a_reduce_scatter() -> None:
    def f(group: Any, x: Tensor) -> list[Tensor]:
        out = x.view(4, 3) + 1
        group.all_reduce(out)
        return [(out / group.size).to(HALF)[group.rank * 2 : group.rank * 2 + 2] * 2]

    before, after = on(2, f, "fuse_casts", reduce_scatter=True)
    assert before.bytes == 2 * after.bytes
    assert operators(f, reduce_scatter=True) == [
        "add",
        "reduce_scatter",
        "wait",
        "div",
        "_to_copy",
        "mul",
    ]


def test_copies_into_a_buffer_that_is_sent_cast() -> None:
    def f(group: Any, x: Tensor) -> list[Tensor]:
        buffer = x.new_empty(2, 12, dtype=HALF)
        buffer[0].copy_((x / 7).to(HALF))
        buffer[1].copy_((x / 3).to(HALF))
        out = torch.empty_like(buffer)
        group.all_to_all(out, buffer)
        return [out * 2]

    before, after = on(2, f, "fuse_casts")
    assert before.bytes == after.bytes
    assert operators(f).count("_to_copy") == 0


@pytest.mark.parametrize("other", ["use", "function"])
def test_ranks_that_do_not_cast_alike_send_what_they_had(other: str) -> None:
    def main() -> list[Tensor]:
        mesh = sm.init_device_mesh(DEVICE, (2,), axis_names=("a",))

        def f(x: Tensor) -> Tensor:
            whole = gathered(
                mesh.group(), x + 1 if mesh.world.rank == 0 else (x + 1).to(HALF).float()
            )
            if mesh.world.rank == 0:
                return whole * 3
            return whole.to(HALF).float() if other == "use" else whole * 5

        jitted = sm.jit(f, backend="eager")
        return [
            torch.stack([jitted(torch.arange(12.0) / 7 + i), f(torch.arange(12.0) / 7 + i)])
            for i in range(3)
        ]

    for found in sm.simulate(2)(main)():
        assert all(torch.equal(*pair) for pair in found)


def test_autocast_with_sequence_parallelism() -> None:
    before, after = compared(TP_SP, "fuse_casts", autocast=True)
    assert after.launches == before.launches
    assert after.bytes < before.bytes
    assert after.peak < before.peak
