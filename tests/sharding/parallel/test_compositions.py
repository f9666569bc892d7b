"""Data parallelism with tensor and sequence parallelism: losses of one process, calls and bytes in
closed form.
"""

from __future__ import annotations

import pytest
import torch

import shardmesh as sm
from tests.device import DEVICE
from tests.sharding.parallel.compositions import (
    EVEN,
    STEPS,
    UNEVEN,
    Composition,
    by_one_process,
    on,
    parallelized,
    train,
)
from tests.sharding.parallel.costs import StepCosts, expected, expected_of_plain
from tests.sharding.parallel.models import Config

# Each form with each kind of tensor parallelism, with sharded and plain inputs, with even and
# uneven sizes.
CASES = [
    Composition("ddp", "", "plain", UNEVEN, (4,)),
    Composition("ddp", "", "global", UNEVEN, (2, 1, 2)),
    Composition("ddp", "tp", "global", EVEN, (4,)),
    Composition("ddp", "sp", "global", UNEVEN, (4,)),
    Composition("ddp", "sp", "plain", EVEN, (2, 2)),
    Composition("zero1", "", "plain", UNEVEN, (2, 2)),
    Composition("zero1", "tp", "plain", EVEN, (2, 1, 2)),
    Composition("zero1", "sp", "global", UNEVEN, (2, 2)),
    Composition("zero2", "", "plain", EVEN, (2, 1, 2)),
    Composition("zero2", "tp", "global", UNEVEN, (2, 2)),
    Composition("zero2", "sp", "plain", Config(f=15, bias=True), (2, 2)),
    Composition("fsdp", "", "global", UNEVEN, (4,)),
    Composition("fsdp", "tp", "plain", Config(vocabulary=31, f=15), (2, 2)),
    Composition("fsdp", "tp", "global", UNEVEN, (2, 1, 2)),
    Composition("fsdp", "sp", "global", EVEN, (2, 2)),
    Composition("fsdp", "sp", "plain", EVEN, (2, 1, 2)),
    Composition("hsdp", "", "plain", UNEVEN, (2, 2)),
    Composition("hsdp", "tp", "plain", EVEN, (2, 1, 2)),
    Composition("hsdp", "sp", "global", UNEVEN, (2, 2, 2)),
    Composition("hybrid", "", "global", UNEVEN, (2, 2)),
    Composition("hybrid", "tp", "global", EVEN, (2, 1, 2)),
    Composition("hybrid", "sp", "plain", EVEN, (2, 1, 2)),
]


@pytest.mark.one_in(14, each=["case.inputs"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_twenty_steps(case):
    found = on(case, lambda mesh: train(case, mesh, parallelized(case, mesh)))
    torch.testing.assert_close(
        torch.stack([losses for losses, *_ in found]).mean(0),
        by_one_process(case),
        rtol=1e-12,
        atol=0,
    )
    for _, used, coordinate in found:
        costs = StepCosts(case, coordinate)
        steps = [
            expected(costs) if case.inputs == "global" else expected_of_plain(costs, first=i == 0)
            for i in range(STEPS)
        ]
        assert used == steps, coordinate


def _losses(case):
    mesh = sm.init_device_mesh(DEVICE, case.shape, axis_names=case.names)
    return train(case, mesh, parallelized(case, mesh))[0]


@pytest.mark.slow
def test_twenty_steps_on_processes(world4):
    case = Composition("fsdp", "sp", "global", UNEVEN, (2, 2))
    found = world4(_losses, case)
    torch.testing.assert_close(torch.stack(found).mean(0), by_one_process(case), rtol=1e-12, atol=0)
