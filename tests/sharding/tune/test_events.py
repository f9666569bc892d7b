"""The order of events that `tune` predicts is that of the ranks that run the printed program."""

from __future__ import annotations

from pathlib import Path

import pytest

import shardmesh as sm
from benchmarks.tune_events import (
    FORMS,
    MIXTURES,
    Recorder,
    compare,
    description,
    programs,
)
from shardmesh.sharding.tune.description import Description
from shardmesh.sharding.tune.events import Event, StepEvents, step_events
from shardmesh.sharding.tune.form import Form
from tests.sharding.tune import tiny
from tests.tiers import slow


@pytest.fixture(scope="module")
def llama() -> Description:
    return description()


@pytest.fixture(scope="module")
def mixtral() -> Description:
    return description(has_experts=True)


def recorded(form: Form, folder: Path, *, has_experts: bool = False) -> list[list[str]]:
    (text,) = programs([form], folder, has_experts=has_experts)
    return sm.simulate(form.devices)(lambda: Recorder(form).run(text))()


@pytest.mark.parametrize("form", [*FORMS[:4], *map(slow, FORMS[4:])], ids=str)
def test_the_order_is_that_of_the_program(form, llama, tmp_path):
    assert compare(form, llama, recorded(form, tmp_path)).startswith("exact")


@pytest.mark.parametrize("form", [MIXTURES[0], *map(slow, MIXTURES[1:])], ids=str)
def test_the_order_is_that_of_the_program_of_a_mixture(form, mixtral, tmp_path):
    result = compare(form, mixtral, recorded(form, tmp_path, has_experts=True))
    assert result.startswith("exact")


def test_there_are_thirty_forms():
    assert len({*FORMS, *MIXTURES}) >= 30


def test_a_difference_is_found(llama):
    form = Form(fsdp=4, rows=4)
    events = step_events(form, llama)
    lines = [f"{event.op} {event.axis}" if event.op else event.of for event in events][:-1]
    assert compare(form, llama, [lines] * 4) == f"exact, {len(lines)} events"
    swapped = [*lines[:3], lines[4], lines[3], *lines[5:]]
    assert compare(form, llama, [lines, lines, swapped, lines]) == (
        "rank 2, event 3: predicted block 0, recorded all_gather fsdp"
    )
    fewer = compare(form, llama, [lines[:-1]] * 4)
    assert fewer.endswith("predicted reduce_scatter fsdp, recorded nothing")


def test_events_of_a_tuning():
    options = {"devices": 4, "check": 0, "fix": {"pp": 2, "fsdp": 2, "schedule": "1f1b"}}
    tuning = sm.tune(tiny.model(), tiny.ids(), **options)
    form = tuning.best.form
    events = tuning.events(rank=1)
    assert isinstance(events, StepEvents)
    assert events == step_events(form, tuning.model, 1)
    messages = [event for event in events if event.axis == "pp"]
    assert messages[0] == Event(
        "forward", 1, 0, "receive", "pp", "activations of stage 0, microbatch 0"
    )
    assert len(messages) == 2 * form.microbatches
    assert str(events).startswith(
        "forward of stage 1, microbatch 0\n    receive over pp: activations of stage 0"
    )
    assert str(events).endswith("end of step\n    optimizer")
    other = tuning.events(Form(fsdp=4, rows=2))
    assert {event.stage for event in other} == {0}


def test_what_repeats_is_printed_once(llama):
    """All microbatches of one rank, and those of a pipeline between its first and its last."""
    text = str(step_events(Form(fsdp=2, rows=2, microbatches=4), llama))
    first = "4 times, each time one microbatch further\n    forward of microbatch 0\n        "
    assert text.startswith(f"{first}all_gather over fsdp: parameters outside of blocks")
    assert text.count("forward of microbatch") == text.count("backward of microbatch") == 1
    text = str(step_events(Form(pp=2, rows=2, microbatches=8), llama))
    assert text.startswith("forward of microbatch 0\n")
    assert "\n7 times, each time one microbatch further\n    forward of microbatch 1\n" in text
    assert "\n    backward of microbatch 0\n        receive over pp: gradients of stage 1" in text
    assert "\nbackward of microbatch 7\n" in text
    one = str(step_events(Form(fsdp=2, rows=8), llama))
    assert "times, each" not in one


def test_microbatches_that_are_not_equal_are_printed_one_by_one():
    """One has an event more; and one is skipped."""

    def event(microbatch: int, of: str = "block 0") -> Event:
        return Event("forward", 0, microbatch, "", "", of)

    events = StepEvents([event(0), event(1), event(1, "block 1"), event(2), event(4), event(6)])
    assert str(events).split("\n") == [
        *("forward of microbatch 0", "    block 0"),
        *("forward of microbatch 1", "    block 0", "    block 1"),
        "3 times, each time 2 microbatches further",
        *("    forward of microbatch 2", "        block 0"),
    ]


@pytest.mark.parametrize(
    ("form", "message"),
    [
        (Form(fsdp=4, rows=4, compiled=True), "compiled blocks have their gradients"),
        (
            Form(tp=2, sequence_parallel=True, rows=16, regather=True),
            "the program saves what it gathers",
        ),
        (Form(fsdp=3, rows=4), "3 data ranks with 1 x 4 rows"),
        (Form(fsdp=4, rows=4, gather="step"), "gather=step needs a pipeline, and fsdp, cp or ep"),
        (Form(pp=2, rows=8, microbatches=2, gather="step"), "gather=step needs a pipeline, and"),
        (Form(fsdp=4, rows=4, stages=2), "stages=2 needs a pipeline, and schedule=interleaved"),
        (Form(pp=2, rows=8, microbatches=2, stages=2), "schedule=interleaved or zb_h1"),
    ],
    ids=str,
)
def test_forms_without_an_order(form, message, llama):
    with pytest.raises(ValueError, match=message):
        step_events(form, llama)


def test_a_bucket_of_many_blocks_is_named_by_its_first_and_last(llama):
    sums = [event.of for event in step_events(Form(dp=4, rows=4), llama) if event.op]
    assert sums == ["gradients of block 3, ..., of block 0", "gradients outside of blocks"]


def test_ranks(llama):
    with pytest.raises(ValueError, match=r"rank=2\): a rank of the pipeline, from 0 to 1"):
        step_events(Form(pp=2, rows=4, microbatches=4), llama, 2)


def test_experts_that_are_computed_again(mixtral):
    with pytest.raises(ValueError, match="gathers its experts is not predicted"):
        step_events(Form(fsdp=2, ep=2, rows=4, recompute="full"), mixtral)
