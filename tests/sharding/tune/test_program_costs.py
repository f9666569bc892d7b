"""What `tune` says of a form next to its printed program on "meta": memory, bytes and launches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import shardmesh as sm
from shardmesh.sharding.tune import program_costs, tune
from shardmesh.sharding.tune.description import Description
from shardmesh.sharding.tune.devices import device_of
from shardmesh.sharding.tune.form import Form
from shardmesh.sharding.tune.memory import memory_of, peak_memory
from shardmesh.sharding.tune.moments import STEP
from shardmesh.sharding.tune.prices import Prices
from shardmesh.sharding.tune.program_costs import (
    NotEvaluatedError,
    ProgramCosts,
    check,
    evaluate,
    why_not_evaluated,
)
from shardmesh.sharding.tune.step_time import StepTimes
from tests.sharding.tune import tiny
from tests.sharding.tune.tiny import transformers
from tests.tiers import slow

ROWS, POSITIONS = 8, 64
SIZES = {"hidden_size": 64, "intermediate_size": 192, "vocab_size": 512}
# Bytes: rows of a unit start at multiples of some elements, and the gradients of norms under tensor
# parallelism do not depend on rows.
BYTES, MEMORY = 0.02, 0.05
MEMORY_OF_INTERLEAVED = 0.07  # and of zb_h1

TP_LAUNCHES = 0.15  # sums of the gradients of norms, of each unit or of several together

FORMS = [
    Form(fsdp=4, rows=2),
    Form(fsdp=2, tp=2, sequence_parallel=True, rows=4),
    Form(dp=2, rows=2, microbatches=2),
    Form(fsdp=2, cp=2, rows=4),
    Form(fsdp=2, rows=1, microbatches=4),
    Form(fsdp=4, rows=2, zero=1),
    Form(dp=2, fsdp=2, rows=2),
    Form(fsdp=4, rows=2, recompute="selective"),
    Form(dp=2, rows=2, microbatches=2, recompute="full"),
    Form(fsdp=2, rows=2, microbatches=2, recompute="full"),
    Form(fsdp=2, cp=2, rows=4, recompute="full"),
]
FAST = [
    *FORMS[:2],
    Form(fsdp=2, tp=2, sequence_parallel=True, rows=4, recompute="selective"),
    Form(fsdp=4, rows=2, recompute="full"),
]


@pytest.fixture(scope="module")
def described() -> Description:
    return Description(tiny.model(num_hidden_layers=4, **SIZES), tiny.ids(ROWS, POSITIONS))


def times_of(model: Description) -> StepTimes:
    device = device_of("h100")
    return StepTimes(model, Prices(device, device.topology(8), 8))


@pytest.mark.parametrize(
    "form",
    [
        Form(dp=2, rows=1, microbatches=2, param_dtype="float32"),
        Form(dp=2, rows=1, microbatches=4, recompute="full"),
    ],
    ids=str,
)
def test_dp_sums_the_gradients_of_several_microbatches_in_one_buffer(form):
    """Few rows and wide layers: nothing else of the step takes as much memory."""
    model = Description(tiny.model(**SIZES, num_hidden_layers=6), tiny.ids(ROWS, 8))
    (program,) = evaluate(form, model).values()
    computed = memory_of(form, model, 0)
    assert computed.gathered == computed.gradients == computed.parameters
    assert computed.total == pytest.approx(program.peak, rel=0.01)
    assert program.launches["dp"] == 1


@pytest.mark.parametrize("form", [*FAST, *map(slow, FORMS[2:])], ids=str)
def test_formulas(described, form):
    time = times_of(described).of(form, rank=0)
    program = evaluate(form, described)[0]
    for axis, received in time.moved.items():
        assert received == pytest.approx(program.received[axis], rel=BYTES)
    for axis, count in time.launches.items():
        error = TP_LAUNCHES if axis == "tp" else 0.0
        assert count == pytest.approx(program.launches[axis], rel=error, abs=0)
    memory = memory_of(form, described, 0)
    assert memory.total == pytest.approx(program.peak, rel=MEMORY)


@pytest.mark.parametrize("dropout", ["attn_pdrop", "resid_pdrop"])
def test_memory_of_dropout(dropout):
    """Attention with dropout has operators and saves scores, as on ranks."""
    others = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0)
    config = transformers.GPT2Config(
        n_layer=2, n_embd=64, n_head=4, vocab_size=512, bos_token_id=0, eos_token_id=0
    )
    config.update(others | {dropout: 0.1})
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    model = Description(model, tiny.ids(ROWS, 2 * POSITIONS))
    form = Form(fsdp=2, rows=4)
    memory = memory_of(form, model, 0).total
    assert memory == pytest.approx(evaluate(form, model)[0].peak, rel=MEMORY)


def test_more_blocks_follow_on_a_line(monkeypatch):
    """Ten blocks by four and six, next to ten."""
    model = Description(tiny.model(num_hidden_layers=10, **SIZES), tiny.ids(ROWS, POSITIONS))
    form = Form(fsdp=2, rows=4)
    short = evaluate(form, model)[0]
    monkeypatch.setattr(program_costs, "_MOST_BLOCKS", 10)
    whole = evaluate(form, model)[0]
    assert short.received == whole.received
    assert short.launches == whole.launches
    assert short.peak == pytest.approx(whole.peak, rel=0.001)


def test_memory_of_functions_of_the_model():
    """The GELU of BLOOM is a torch.autograd.Function; what it returns counts by rank."""
    config = transformers.BloomConfig(hidden_size=64, n_layer=2, n_head=4, vocab_size=512)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    model = Description(model, tiny.ids(2 * ROWS, POSITIONS))
    form = Form(fsdp=8, rows=2)
    memory = memory_of(form, model, 0).total
    assert memory == pytest.approx(evaluate(form, model)[0].peak, rel=MEMORY)


@pytest.mark.parametrize(
    ("form", "why"),
    [
        (Form(rows=8, compiled=True), "compiled blocks run on devices alone"),
        (
            Form(tp=2, sequence_parallel=True, rows=8, regather=True),
            "the program saves what it gathers",
        ),
    ],
    ids=str,
)
def test_what_is_not_evaluated(described, form, why):
    with pytest.raises(NotEvaluatedError, match=why):
        evaluate(form, described)
    assert check(form, described, times_of(described)).why_not.startswith(why)


PIPELINES = [
    Form(pp=2, fsdp=2, rows=2, microbatches=2),
    Form(pp=2, rows=2, microbatches=4, schedule="gpipe"),
    Form(pp=4, rows=2, microbatches=4),
    Form(pp=2, fsdp=2, rows=1, microbatches=4, recompute="full"),
    Form(pp=2, rows=2, microbatches=4, schedule="zb_h1"),
    Form(pp=2, fsdp=2, rows=1, microbatches=4, schedule="interleaved", stages=2),
    Form(pp=2, fsdp=2, rows=1, microbatches=4, gather="step"),
]


@pytest.mark.parametrize("form", [*PIPELINES[:2], *map(slow, PIPELINES[2:])], ids=str)
def test_formulas_of_pipelines(described, form, monkeypatch):
    """Of the first rank and the last, and of the one that needs most."""
    monkeypatch.setattr(program_costs, "_NEARLY", 0)
    times = times_of(described)
    programs = evaluate(form, described)
    assert {0, peak_memory(form, described)[0], form.pp - 1} == programs.keys()
    for rank, program in programs.items():
        time = times.of(form, rank=rank)
        for axis, received in time.moved.items():
            assert received == pytest.approx(program.received[axis], rel=BYTES)
        assert time.launches == {axis: program.launches[axis] for axis in time.launches}
        error = MEMORY if form.schedule in ("1f1b", "gpipe") else MEMORY_OF_INTERLEAVED
        assert memory_of(form, described, rank).total == pytest.approx(program.peak, rel=error)


def test_a_pipeline_is_checked_for_the_rank_that_needs_most(described):
    """With gpipe the last rank holds what the losses of all microbatches save."""
    form = Form(pp=2, rows=2, microbatches=4, schedule="gpipe")
    programs = evaluate(form, described)
    checked = check(form, described, times_of(described))
    assert list(programs) == [0, 1]
    assert checked.rank == 1
    assert checked.peak == programs[1].peak > programs[0].peak
    assert checked.memory_error == pytest.approx(0, abs=MEMORY)


@pytest.mark.parametrize(
    "form",
    [
        Form(pp=2, rows=2, microbatches=4),
        slow(Form(pp=2, rows=1, microbatches=8, schedule="interleaved", stages=2)),
    ],
    ids=str,
)
def test_more_blocks_and_microbatches_of_a_pipeline_follow_on_a_line(form, monkeypatch):
    model = Description(tiny.model(num_hidden_layers=10, **SIZES), tiny.ids(ROWS, POSITIONS))
    monkeypatch.setattr(program_costs, "_MOST_BLOCKS", 3)
    short = evaluate(form, model)
    monkeypatch.setattr(program_costs, "_MOST_BLOCKS", 10)
    monkeypatch.setattr(program_costs, "_few_microbatches", lambda form: (8, 8))
    whole = evaluate(form, model)
    for rank, costs in whole.items():
        assert short[rank].received == costs.received
        assert short[rank].launches == costs.launches
        # of interleaved stages later rounds hold a little more than the second
        assert short[rank].peak == pytest.approx(costs.peak, rel=0.02)


@pytest.mark.parametrize("kinds", [2, 3])
@pytest.mark.parametrize("blocks", [11, 12, 16])
def test_blocks_of_several_kinds_follow_on_a_line(monkeypatch, kinds, blocks):
    model = Description(Residual(blocks, kinds=kinds), rows())
    form = Form(fsdp=2, rows=4)
    short = evaluate(form, model)[0]
    monkeypatch.setattr(program_costs, "_MOST_BLOCKS", blocks)
    whole = evaluate(form, model)[0]
    assert short.received == whole.received
    assert short.launches == whole.launches
    assert short.peak == pytest.approx(whole.peak, rel=0.001)


def test_stages_with_blocks_of_several_kinds_follow_on_a_line(monkeypatch):
    model = Description(Residual(24, kinds=2), rows())
    form = Form(pp=2, rows=2, microbatches=4)
    short = evaluate(form, model)
    monkeypatch.setattr(program_costs, "_MOST_BLOCKS", 12)
    for rank, whole in evaluate(form, model).items():
        assert short[rank].received == whole.received
        assert short[rank].peak == pytest.approx(whole.peak, rel=0.01)


def test_stages_whose_blocks_are_in_another_order_are_not_evaluated():
    model = Description(Residual(22, kinds=2), rows())
    form = Form(pp=2, rows=2, microbatches=4)
    why = "stages have blocks of several kinds, each in another order"
    assert why_not_evaluated(form, model) == why


def moments_of(form: Form, model: Description, most_blocks: int) -> tuple[Any, Any]:
    """Return the costs that follow on a line, and those of the whole model."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(program_costs, "_MOST_BLOCKS", 3)
        short = evaluate(form, model)
        patch.setattr(program_costs, "_MOST_BLOCKS", most_blocks)
        return short, evaluate(form, model)


@pytest.mark.parametrize(
    ("form", "blocks"),
    [
        (Form(fsdp=4, rows=2, zero=1, microbatches=2), 16),
        (Form(fsdp=4, rows=1, recompute="full"), 16),
        slow(Form(pp=2, rows=1, microbatches=4), 24),
        slow(Form(pp=2, rows=1, microbatches=4, schedule="zb_h1"), 24),
        slow(Form(pp=2, rows=1, microbatches=4, schedule="interleaved", stages=2), 24),
    ],
    ids=str,
)
def test_the_moment_that_needs_most_changes_with_the_number_of_blocks(form, blocks):
    """A large vocabulary: four blocks need most at the loss, all of them in a block."""
    sizes = SIZES | {"vocab_size": 16384, "intermediate_size": 512}
    model = Description(tiny.model(num_hidden_layers=blocks, **sizes), tiny.ids(ROWS, POSITIONS))
    short, whole = moments_of(form, model, blocks)
    for rank, costs in whole.items():
        assert short[rank].received == pytest.approx(costs.received)
        assert short[rank].peak == pytest.approx(costs.peak, rel=0.01)


def test_the_loss_is_the_callers(monkeypatch):
    """One that saves more takes more memory; it gets the output and a batch of the same form."""
    given: list[Any] = []

    def loss(output: torch.Tensor, batch: Any) -> torch.Tensor:
        given.append(batch)
        return (output.exp() * output.sin()).sum()

    form, batch = Form(fsdp=2, rows=4), {"x": rows()}
    own = evaluate(form, Description(Residual(), batch, loss=loss))[0]
    assert all(list(one) == ["x"] for one in given)
    assert own.peak > evaluate(form, Description(Residual(), batch))[0].peak


def test_random_numbers_of_the_caller_stay(described):
    before = torch.random.get_rng_state()
    evaluate(Form(pp=2, rows=4, microbatches=2), described)
    assert torch.equal(torch.random.get_rng_state(), before)


class Residual(nn.Module):
    """Blocks of Linear; odd ones have a bias if there are two kinds."""

    def __init__(self, blocks: int = 4, kinds: int = 1) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Linear(32, 32, bias=i % kinds == 0, device="meta") for i in range(blocks)
        )

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        for block in self.blocks:
            x = x + torch.relu(block(x)) * (1 if mask is None else mask)
        return x


def rows(width: int = 32) -> torch.Tensor:
    return torch.empty(8, 16, width, device="meta")


@pytest.mark.parametrize(
    ("model", "batch", "loss", "why"),
    [
        (Residual(9, kinds=2), rows(), None, None),
        (Residual(), rows(), lambda output, _: output.sum(), None),
        (Residual(), (rows(), rows(1)), None, "the program has a batch of its own"),
        (Residual(), {"x": rows(), "mask": rows(1)}, None, "the program has a batch of its own"),
        (Residual(), {"x": rows()}, None, None),
    ],
    ids=["kinds", "loss", "tuple", "dict", "dict of one"],
)
def test_models_that_are_not_evaluated(model, batch, loss, why):
    described, form = Description(model, batch, loss=loss), Form(fsdp=2, rows=4)
    reason = why_not_evaluated(form, described)
    assert reason == why if why is None else reason.startswith(why)


def headless() -> tuple[nn.Module, Any]:
    with torch.device("meta"):
        return transformers.LlamaModel(tiny.config()), tiny.ids()


def mixture_of_its_own() -> tuple[nn.Module, Any]:
    config = transformers.MixtralConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
    )
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
        for layer in model.model.layers:  # a weight that the interface for experts does not have
            layer.mlp.experts.scale = nn.Parameter(torch.ones(4, 1, 1))
    return model, tiny.ids()


def with_a_mask() -> tuple[nn.Module, Any]:
    return Residual(), (rows(), rows(1))


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (headless, ""),  # of what it returns, the program takes the first tensor
        (with_a_mask, "the program has a batch of its own, of one tensor"),
        (mixture_of_its_own, "which rows an expert computes depends on values"),
    ],
)
def test_models_that_the_program_does_not_run(make, why):
    """The default evaluates programs; what it cannot evaluate is said, and nothing raises."""
    fix = {"pp": 1, "tp": 1, "ep": 1, "fsdp": 2, "rows": 4, "recompute": "none", "zero": 3}
    tuning = sm.tune(*make(), devices=2, fix=fix)
    assert tuning.best.checked is not None
    assert tuning.best.checked.why_not == why
    assert (f"not run: {tuning.best.form}: {why}" in str(tuning)) == bool(why)


def test_errors_of_programs_are_said(described, monkeypatch):
    def evaluate(form: Form, model: Description) -> None:
        raise AttributeError("no logits")

    monkeypatch.setattr(program_costs, "evaluate", evaluate)
    checked = check(Form(fsdp=4, rows=2), described, times_of(described))
    assert checked.why_not == "AttributeError: no logits"


def test_errors_are_relative_to_the_program(described, monkeypatch):
    form = Form(fsdp=4, rows=2)
    memory, moved = memory_of(form, described, 0).total, times_of(described).of(form, rank=0).moved
    program = ProgramCosts({STEP: memory / 1.1}, {"fsdp": sum(moved.values()) / 0.8}, {})
    monkeypatch.setattr(program_costs, "evaluate", lambda form, model: {0: program})
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
    assert not any(f"({first.form})" in reason for reason in tuning.reasons)
    near = sm.tune(model, batch, **options, check=1, near=first.form)
    assert all(candidate.form != first.form for candidate in near.candidates)
    assert "+2.0% memory, -1.0% bytes" in str(tuning)
    assert tuning.as_dict()["candidates"][0]["checked"]["memory_error"] == 0.02
    why = replace(tuning.best, checked=program_costs.Check(why_not="no values"))
    shown = str(replace(tuning, candidates=(why, *tuning.candidates[1:])))
    assert f"not run: {second.form}: no values" in shown
    with pytest.raises(ValueError, match=r"check=-1\): a whole number from 0"):
        sm.tune(model, batch, **options, check=-1)


def test_the_families_of_what_is_left_out_have_their_next_best(monkeypatch):
    """A family's reason is of its fastest form whose program fits: never faster than the best."""
    options = {"devices": 4, "fix": {"pp": 1, "tp": 1, "zero": 3}}
    model, batch = tiny.model(), tiny.ids()
    best = sm.tune(model, batch, **options, check=0).best.form

    def checked(form: Form, *_: object) -> program_costs.Check:
        return program_costs.Check(1e12 if form.fsdp == best.fsdp and form.dp == best.dp else 1.0)

    monkeypatch.setattr(tune.program_costs, "check", checked)
    tuning = sm.tune(model, batch, **options, check=1)
    assert (tuning.best.form.dp, tuning.best.form.fsdp) != (best.dp, best.fsdp)
    slower = [reason for reason in tuning.reasons if " s, " in reason or " ms, " in reason]
    assert slower
    assert not any(": -" in reason for reason in slower)


@pytest.mark.parametrize("fits", [30, None], ids=["the 31st fits", "none fits"])
def test_forms_after_the_first_that_do_not_fit_are_evaluated(monkeypatch, fits):
    """In groups of those whose pipelines are simulated, until so many do not fit."""
    options = {"devices": 8, "fix": {"tp": 1}}
    model, batch = tiny.model(), tiny.ids(16)
    evaluated: list[Form] = []

    def checked(form: Form, *_: object) -> program_costs.Check:
        evaluated.append(form)
        return program_costs.Check(1.0 if len(evaluated) == (fits or 0) + 1 and fits else 1e12)

    fitting = sm.tune(model, batch, **options, check=0).fitting
    assert fitting > 48
    monkeypatch.setattr(tune.program_costs, "check", checked)
    if fits:
        tuning = sm.tune(model, batch, **options, check=1)
        assert tuning.best.form == evaluated[fits]
        assert tuning.fitting == fitting - fits
        return
    with pytest.raises(ValueError, match="none of 48 evaluated programs fits, and") as raised:
        sm.tune(model, batch, **options, check=1)
    assert f"{fitting - 48:,} more forms were not evaluated: the smallest (" in str(raised.value)
    assert len(evaluated) == 48


@pytest.mark.parametrize("option", [{"top": 0}, {"node": 0}, {"node": -3}], ids=str)
def test_counts(option):
    ((name, value),) = option.items()
    with pytest.raises(ValueError, match=rf"tune\({name}={value}\): a whole number from 1"):
        sm.tune(tiny.model(), tiny.ids(), devices=4, **option)
