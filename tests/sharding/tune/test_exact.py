"""The formulas of `tune` next to `eval_shape` of the step: bytes by axis, and peak memory."""

from __future__ import annotations

import pytest

from shardmesh.sharding.tune.description import Description
from shardmesh.sharding.tune.devices import device_of
from shardmesh.sharding.tune.exact import evaluate
from shardmesh.sharding.tune.form import Form
from shardmesh.sharding.tune.memory import peak_memory
from shardmesh.sharding.tune.prices import Prices
from shardmesh.sharding.tune.step_time import StepTimes
from tests.sharding.tune import tiny
from tests.tiers import slow

ROWS, POSITIONS = 8, 64
# Bytes: rows of a unit start at multiples of some elements, and the gradients of norms under tensor
# parallelism do not depend on rows. Memory: the formulas take the larger of two moments.
BYTES, MEMORY = 0.01, 0.25

FORMS = [
    Form(fsdp=4, rows=2),
    Form(fsdp=2, cp=2, rows=4),
    Form(dp=2, fsdp=2, rows=2),
    Form(fsdp=2, tp=2, sequence_parallel=True, rows=4),
    Form(fsdp=2, tp=2, rows=4),
    Form(dp=2, rows=2, microbatches=2),
    Form(fsdp=2, rows=2, microbatches=2),
]


@pytest.fixture(scope="module")
def described() -> Description:
    sizes = {"hidden_size": 64, "intermediate_size": 192, "vocab_size": 512}
    model = tiny.model(num_hidden_layers=2, **sizes)
    return Description(model, tiny.ids(ROWS, POSITIONS))


@pytest.mark.parametrize("form", [*FORMS[:2], *map(slow, FORMS[2:])], ids=str)
def test_formulas(described, form):
    exact = evaluate(form, described)
    device = device_of("h100")
    moved = StepTimes(described, Prices(device, device.topology(8), 8)).of(form).moved
    received: dict[str, float] = {}
    for axis, size in exact.received.items():
        name = "fsdp" if axis in ("fsdp", "fsdp,cp") else axis
        received[name] = received.get(name, 0) + size
    for axis, size in moved.items():
        assert size == pytest.approx(received[axis], rel=BYTES), axis
    _, memory = peak_memory(form, described)
    assert memory.total == pytest.approx(exact.peak, rel=MEMORY)


def test_what_is_not_evaluated(described):
    with pytest.raises(ValueError, match="pipelines, recomputation and ep are not evaluated"):
        evaluate(Form(pp=2, rows=8), described)
