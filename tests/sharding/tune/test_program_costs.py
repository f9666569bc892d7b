"""What `tune` says of a form next to its printed program on "meta": memory, bytes and launches."""

from __future__ import annotations

from dataclasses import replace

import pytest

import shardmesh as sm
from shardmesh.sharding.tune import program_costs, tune
from shardmesh.sharding.tune.description import Description
from shardmesh.sharding.tune.devices import device_of
from shardmesh.sharding.tune.form import Form
from shardmesh.sharding.tune.memory import memory_of
from shardmesh.sharding.tune.prices import Prices
from shardmesh.sharding.tune.program_costs import ProgramCosts, check, evaluate, why_not_evaluated
from shardmesh.sharding.tune.step_time import StepTimes
from tests.sharding.tune import tiny
from tests.tiers import slow

ROWS, POSITIONS = 8, 64
SIZES = {"hidden_size": 64, "intermediate_size": 192, "vocab_size": 512}
# Bytes: rows of a unit start at multiples of some elements, and the gradients of norms under tensor
# parallelism do not depend on rows.
BYTES, MEMORY = 0.02, 0.05

FORMS = [
    Form(fsdp=4, rows=2),
    Form(dp=2, rows=2, microbatches=2),
    Form(fsdp=2, cp=2, rows=4),
    Form(fsdp=2, rows=1, microbatches=4),
    Form(fsdp=4, rows=2, zero=1),
    Form(dp=2, fsdp=2, rows=2),
]


@pytest.fixture(scope="module")
def described() -> Description:
    return Description(tiny.model(num_hidden_layers=4, **SIZES), tiny.ids(ROWS, POSITIONS))


def times_of(model: Description) -> StepTimes:
    device = device_of("h100")
    return StepTimes(model, Prices(device, device.topology(8), 8))


@pytest.mark.parametrize("form", [*FORMS[:1], *map(slow, FORMS[1:])], ids=str)
def test_formulas(described, form):
    time = times_of(described).of(form, rank=0)
    program = evaluate(form, described)
    assert sum(time.moved.values()) == pytest.approx(sum(program.received.values()), rel=BYTES)
    for axis, count in time.launches.items():
        if axis != "tp":  # sums of the gradients of norms, of each unit or of several together
            assert program.launches[axis] == count
    memory = memory_of(form, described, 0)
    assert memory.total == pytest.approx(program.peak, rel=MEMORY)


def test_more_blocks_follow_on_a_line(monkeypatch):
    """Ten blocks by four and six, next to ten."""
    model = Description(tiny.model(num_hidden_layers=10, **SIZES), tiny.ids(ROWS, POSITIONS))
    form = Form(fsdp=2, rows=4)
    short = evaluate(form, model)
    monkeypatch.setattr(program_costs, "_MOST_BLOCKS", 10)
    whole = evaluate(form, model)
    assert short.received == whole.received
    assert short.launches == whole.launches
    assert short.peak == pytest.approx(whole.peak, rel=0.001)


@pytest.mark.parametrize(
    ("form", "why"),
    [
        (Form(pp=2, rows=8), "the other stages of a pipeline would count"),
        (Form(rows=8, recompute="full"), "attention that backward computes again"),
        (Form(ep=2, rows=4), "how many rows go to a rank's experts depends on values"),
        (Form(rows=8, compiled=True), "compiled blocks run on devices alone"),
        (
            Form(tp=2, sequence_parallel=True, rows=8, regather=True),
            "the program saves what it gathers",
        ),
    ],
    ids=str,
)
def test_what_is_not_evaluated(described, form, why):
    assert (why_not_evaluated(form, described) or "").startswith(why)
    with pytest.raises(ValueError, match=why):
        evaluate(form, described)
    assert check(form, described, times_of(described)).why_not.startswith(why)


def test_errors_are_relative_to_the_program(described, monkeypatch):
    form = Form(fsdp=4, rows=2)
    memory, moved = memory_of(form, described, 0).total, times_of(described).of(form, rank=0).moved
    program = ProgramCosts(memory / 1.1, {"fsdp": sum(moved.values()) / 0.8}, {})
    monkeypatch.setattr(program_costs, "evaluate", lambda form, model: program)
    checked = check(form, described, times_of(described))
    assert (checked.peak, checked.received) == (program.peak, program.received)
    assert checked.memory_error == pytest.approx(0.1)
    assert checked.bytes_error == pytest.approx(-0.2)


def test_a_program_that_does_not_fit_is_left_out(monkeypatch):
    """The table says by how much the others differ, and the reasons what it needs."""
    options = {"devices": 4, "fix": {"pp": 1, "tp": 1}}
    model, batch = tiny.model(), tiny.ids()
    first, second, *_ = sm.tune(model, batch, **options, check=0).candidates
    assert first.checked is None

    def checked(form: Form, *_: object, **__: object) -> program_costs.Check:
        return program_costs.Check(1e12 if form == first.form else 1.0, {}, 0.02, -0.01)

    monkeypatch.setattr(tune.program_costs, "check", checked)
    tuning = sm.tune(model, batch, **options, check=1)
    assert tuning.best.form == second.form
    assert tuning.reasons[0] == f"{first.form}: its program needs 1000.0 GB of 78.6 GB"
    assert "+2.0% memory, -1.0% bytes" in str(tuning)
    assert tuning.as_dict()["candidates"][0]["checked"]["memory_error"] == 0.02
    why = replace(tuning.best, checked=program_costs.Check(why_not="no values"))
    shown = str(replace(tuning, candidates=(why, *tuning.candidates[1:])))
    assert f"not run: {second.form}: no values" in shown
    with pytest.raises(ValueError, match=r"check=-1\): a whole number from 0"):
        sm.tune(model, batch, **options, check=-1)
