"""Forms of data parallelism with tensor and sequence parallelism: losses of one process, calls and bytes as on paper."""

from __future__ import annotations

import pytest
import torch

from tests.sharding.parallel.compositions import EVEN, UNEVEN, Case, by_one_process, made, on, step_of, train, used
from tests.sharding.parallel.costs import Paper, expected, of_data

# Each form with each kind of tensor parallelism, with sharded and plain inputs, with even and uneven sizes.
CASES = [
    Case("ddp", "", "plain", UNEVEN, (4,)),
    Case("ddp", "", "global", UNEVEN, (2, 1, 2)),
    Case("ddp", "tp", "global", EVEN, (4,)),
    Case("ddp", "sp", "global", UNEVEN, (4,)),
    Case("ddp", "sp", "plain", EVEN, (2, 2)),
    Case("zero1", "", "global", EVEN, (4,)),
    Case("zero1", "", "plain", UNEVEN, (2, 2)),
    Case("zero1", "tp", "plain", EVEN, (2, 1, 2)),
    Case("zero1", "sp", "global", UNEVEN, (2, 2)),
    Case("zero2", "", "plain", EVEN, (2, 1, 2)),
    Case("zero2", "tp", "global", UNEVEN, (2, 2)),
    Case("zero2", "sp", "plain", EVEN, (2, 2)),
    Case("fsdp", "", "global", UNEVEN, (4,)),
    Case("fsdp", "", "plain", EVEN, (2, 2)),
    Case("fsdp", "tp", "plain", EVEN, (2, 2)),
    Case("fsdp", "tp", "global", UNEVEN, (2, 1, 2)),
    Case("fsdp", "sp", "global", EVEN, (2, 2)),
    Case("fsdp", "sp", "plain", EVEN, (2, 1, 2)),
    Case("hsdp", "", "plain", UNEVEN, (2, 2)),
    Case("hsdp", "tp", "plain", EVEN, (2, 1, 2)),
    Case("hsdp", "sp", "global", UNEVEN, (2, 2, 2)),
    Case("hybrid", "", "global", UNEVEN, (2, 2)),
    Case("hybrid", "tp", "global", EVEN, (2, 2, 2)),
    Case("hybrid", "sp", "plain", EVEN, (2, 1, 2)),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_twenty_steps_are_those_of_one_process(case):
    found = on(case, lambda mesh: train(case, mesh, made(case, mesh)))
    torch.testing.assert_close(torch.stack(found).mean(0), by_one_process(case), rtol=1e-12, atol=0)


def _second_step(case, mesh):
    """What a step communicates when all that is kept is there; and the rank's place."""
    model = made(case, mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        found = used(lambda step=step: step_of(case, model, mesh, step))
        optimizer.step()
        optimizer.zero_grad()
    return found, dict(zip(mesh.axis_names, mesh.coordinate, strict=True))


@pytest.mark.parametrize("case", [case for case in CASES if case.inputs == "global"], ids=str)
def test_calls_and_bytes_of_a_step(case):
    for found, coordinate in on(case, lambda mesh: _second_step(case, mesh)):
        assert found == expected(Paper(case, coordinate)), coordinate


@pytest.mark.parametrize("case", [case for case in CASES if case.inputs == "plain" and not case.tp], ids=str)
def test_calls_and_bytes_of_a_step_with_plain_inputs(case):
    """Nothing but data parallelism's."""
    for found, coordinate in on(case, lambda mesh: _second_step(case, mesh)):
        assert found == of_data(Paper(case, coordinate)), coordinate
