"""`sm.tune` and its command: what is chosen, what is printed, and what raises."""

from __future__ import annotations

import importlib
import json
import re
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import shardmesh as sm
from shardmesh.__main__ import main
from shardmesh.mesh.topology import Link, Topology
from shardmesh.sharding.parallel.pipeline.make_schedule import make_schedule
from shardmesh.sharding.tune import step_time
from shardmesh.sharding.tune.command import _fields, _load
from shardmesh.sharding.tune.counts import OperatorCounts
from shardmesh.sharding.tune.description import Description
from shardmesh.sharding.tune.devices import device_of
from shardmesh.sharding.tune.form import Form, Group
from shardmesh.sharding.tune.plans import own_plan
from shardmesh.sharding.tune.prices import Prices
from shardmesh.sharding.tune.search import is_neighbour
from shardmesh.sharding.tune.step_time import StepTime, StepTimes
from tests.sharding.tune import tiny
from tests.sharding.tune.tiny import transformers

tune_module = importlib.import_module("shardmesh.sharding.tune.tune")  # sm.tune is the function
tune = partial(sm.tune, check=0)  # programs are evaluated in test_program_costs.py


@pytest.fixture(scope="module")
def llama():
    return tiny.model()


@pytest.fixture(scope="module")
def tuning(llama):
    return sm.tune(llama, tiny.ids(16), devices=8, node=4, fix={"tp": 2}, check=1)


def test_the_best_form_is_valid_and_the_fastest(tuning):
    times = [candidate.time.total for candidate in tuning.candidates]
    assert times == sorted(times)
    for candidate in tuning.candidates:
        assert candidate.form.devices == 8
        assert candidate.form.tp == 2
        assert candidate.memory.total <= tuning.usable
        rows = candidate.form.dp * candidate.form.fsdp
        assert rows * candidate.form.rows * candidate.form.microbatches == 16


def test_reasons_name_values_that_lost(tuning):
    best = tuning.best.form
    names = {reason.partition("=")[0] for reason in tuning.reasons}
    assert {"recompute", "pp"} <= names
    assert not any(reason.startswith(f"recompute={best.recompute}:") for reason in tuning.reasons)


def test_a_plan_is_proposed_for_a_model_without_one():
    config = transformers.GPT2Config(
        n_layer=4, n_embd=64, n_head=4, vocab_size=128, bos_token_id=0, eos_token_id=0
    )
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    options = {"devices": 4, "fix": {"tp": 2, "pp": 1}}
    tuning = tune(model, tiny.ids(8, 64), **options)
    assert "tp: by the plan of sm.propose_plan" in str(tuning)
    assert '"transformer.h.*.attn.c_attn": colwise()' in tuning.program
    by_hand = tune(model, tiny.ids(8, 64), **options, plan=tuning.model.plan)
    assert by_hand.best.time == tuning.best.time
    assert "propose_plan" not in str(by_hand)
    whole = tune(model, tiny.ids(8, 64), devices=4, fix={"tp": 1})
    assert whole.model.plan == {}


def test_a_plan_without_blocks_counts_as_none():
    """That of gpt-oss has its embedding and its head alone."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "head_dim": 8, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4}
    config = transformers.GptOssConfig(num_hidden_layers=2, **sizes, **heads)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    assert model.tp_plan
    assert own_plan(model) == {}


def test_heads_that_no_tp_divides():
    """The number of heads is the reason, not that there is no plan."""
    config = transformers.GPT2Config(
        n_layer=2, n_embd=74, n_head=37, vocab_size=64, bos_token_id=0, eos_token_id=0
    )
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    with pytest.raises(ValueError, match="tp=2 does not divide 37 attention heads"):
        tune(model, tiny.ids(), devices=2, fix={"tp": 2})


def test_a_model_of_which_no_plan_is_found(monkeypatch):
    """Its blocks have no weight that can be split."""

    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.scale

    class Scales(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Scale() for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x)
            return x

    model = Scales().to("meta")
    batch = torch.empty(8, 4, 8, device="meta")
    assert tune(model, batch, devices=2).best.form.tp == 1
    with pytest.raises(ValueError, match=r"no plan of tensor parallelism, nor is one proposed$"):
        tune(model, batch, devices=2, fix={"tp": 2})

    def propose_plan(*_: Any, **__: Any) -> None:
        raise ValueError("propose_plan: the reason")

    monkeypatch.setattr(tune_module, "propose_plan", propose_plan)
    with pytest.raises(ValueError, match=r"nor is one proposed \(propose_plan: the reason\)$"):
        tune(model, batch, devices=2, fix={"tp": 2})


def test_a_reason_names_its_value_once(llama):
    reasons = tune(llama, tiny.ids(16, 64), devices=8, fix={"pp": 1}).reasons
    assert "tp=4 does not divide 2 key/value heads" in reasons
    assert not any(reason.startswith("tp=4: tp=4") for reason in reasons)
    # without a pipeline there is none of its choices
    assert not any(reason.startswith(("schedule=", "gather=")) for reason in reasons)


def test_the_table_has_every_part(tuning):
    text = str(tuning)
    for part in (
        "8 devices h100, nodes of 4",
        "time: matmul",
        "memory",
        "why not:",
        "(table)",
        " bytes",
    ):
        assert part in text


def test_program_is_python(tuning):
    compile(tuning.program, "train.py", "exec")
    assert f'"tp": {tuning.best.form.tp}' in tuning.program


def test_json(tuning):
    parsed = json.loads(tuning.json())
    assert parsed["candidates"][0]["form"]["tp"] == 2
    parts = parsed["candidates"][0]["seconds_by_part"]
    assert sum(parts.values()) == pytest.approx(parsed["candidates"][0]["seconds"])


def test_links_of_the_caller_price_communication(llama):
    slow = Topology(Link(1e-3, 1e6), Link(1e-3, 1e6), 1e12, node_size=2)
    fix = {"tp": 2, "fsdp": 2, "pp": 1, "rows": 8, "recompute": "none"}
    by_data_sheet = tune(llama, tiny.ids(16), devices=4, node=2, fix=fix)
    chosen = tune(llama, tiny.ids(16), slow, devices=4, fix=fix)
    assert chosen.best.form == by_data_sheet.best.form
    assert chosen.priced_by(chosen.best.form) == {"fsdp": "topology", "tp": "topology"}
    launches = 2 * 4 * tiny.LAYERS  # two gathers and two reductions in each direction of a block
    assert chosen.best.time.tp >= launches * 1e-3 + chosen.best.time.moved["tp"] / 1e6
    assert chosen.best.time.matmul == by_data_sheet.best.time.matmul


def test_memory_decides(llama):
    """With room for one block's activations only, blocks are recomputed."""
    fix = {"pp": 1, "dp": 1, "cp": 1, "tp": 1, "rows": 8}
    batch = tiny.ids(16, 64)
    roomy = tune(llama, batch, devices=2, fix=fix)
    assert roomy.best.form.recompute == "none"
    needs = {
        recompute: tune(llama, batch, devices=2, fix=fix | {"recompute": recompute}).best.memory
        for recompute in ("none", "selective", "full")
    }
    assert needs["none"].total > needs["selective"].total > needs["full"].total
    room = (needs["none"].total + needs["selective"].total) / 2
    chosen = tune(llama, batch, devices=2, fix=fix, memory=(room + 2e9) / 0.95)
    assert chosen.best.form.recompute == "selective"
    room = (needs["selective"].total + needs["full"].total) / 2
    chosen = tune(llama, batch, devices=2, fix=fix, memory=(room + 2e9) / 0.95)
    assert chosen.best.form.recompute == "full"
    assert any(
        reason.startswith("recompute=selective: needs") and "activations" in reason
        for reason in chosen.reasons
    )


def test_neighbours():
    near = Form(fsdp=4, tp=2, rows=2)
    assert is_neighbour(near, near)
    assert is_neighbour(Form(fsdp=8, rows=2), near)
    assert is_neighbour(replace(near, recompute="full"), near)
    assert not is_neighbour(Form(fsdp=2, tp=4, rows=1, recompute="full"), near)
    assert not is_neighbour(Form(fsdp=1, tp=8, rows=2), near)


def test_neighbours_are_compiled_and_regather_as_the_form_is(llama):
    near = Form(
        fsdp=2, tp=2, sequence_parallel=True, rows=2, microbatches=4, compiled=True, regather=True
    )
    tuning = tune(llama, tiny.ids(16), devices=4, near=near)
    forms = [candidate.form for candidate in tuning.candidates]
    assert near in forms
    assert all(form.compiled for form in forms)
    eager = tune(llama, tiny.ids(16), devices=4, near=near, fix={"compiled": False})
    assert [x.form for x in eager.candidates if x.form.compiled] == [near]


def test_the_most_rows_of_a_microbatch(llama):
    options = {"devices": 2, "fix": {"pp": 1, "tp": 1, "recompute": "none"}, "top": 100}
    rows = {x.form.rows for x in tune(llama, tiny.ids(16), **options).candidates}
    fewer = tune(llama, tiny.ids(16), **options, max_microbatch=2)
    assert {x.form.rows for x in fewer.candidates} == {1, 2}
    assert max(rows) > 2


def test_zero_stages(llama):
    """With microbatches FSDP gathers most, and ZeRO-1 holds most."""
    fix = {"fsdp": 4, "tp": 1, "pp": 1, "cp": 1, "rows": 1, "recompute": "none"}
    best = {
        zero: tune(llama, tiny.ids(16), devices=4, fix={**fix, "zero": zero}).best
        for zero in (1, 2, 3)
    }
    moved = {zero: candidate.time.moved["fsdp"] for zero, candidate in best.items()}
    assert moved[1] < moved[2] < moved[3]
    assert best[1].memory.total > best[2].memory.total > best[3].memory.total
    with pytest.raises(ValueError, match="zero=1 needs fsdp or cp, and neither a pipeline nor dp"):
        tune(llama, tiny.ids(16), devices=4, fix={"zero": 1, "fsdp": 1, "cp": 1})


# -- prices ----------------------------------------------------------------------------------------


def test_groups_on_nodes():
    form = Form(pp=2, fsdp=4, cp=2, tp=4)
    assert form.group("tp", 8) == Group(4, 4)
    assert form.group("cp", 8) == Group(2, 2)
    assert form.group("fsdp", 8) == Group(4, 1)
    assert form.group("shards", 8) == Group(8, 2)
    assert form.group("pp", 8).crosses


def test_prices():
    h100 = device_of("h100")
    prices = Prices(h100, h100.topology(8), 8)
    inside, across = Group(8, 8), Group(16, 8)
    # 1 GB gathered by 8 ranks: the table's 394 GB/s of the whole tensor
    assert prices.seconds("all_gather", 7e9 / 8, inside) == pytest.approx(30e-6 + 1 / 394)
    assert prices.source(inside, "all_gather") == "table"
    # by two nodes: half of it enters each node, over eight ports of 50 GB/s
    entering = 0.5 / (8 * 50)
    local = 15 / 16 / 450
    received = 15e9 / 16
    assert prices.seconds("all_gather", received, across) == pytest.approx(
        23e-6 + max(entering, local)
    )
    assert prices.source(across, "all_gather") == "data sheet"
    calibrated = replace(h100.topology(8), factors={"all_gather": 2.0})
    prices = Prices(h100, calibrated, 8)
    assert prices.source(inside, "all_gather") == "calibrated"
    assert prices.seconds("all_gather", 45e9, inside) == pytest.approx(11e-6 + 0.2)


@pytest.fixture
def seconds_on(llama):
    """Return the time of a step on a device that differs from an H100 in some fields."""
    described = Description(llama, tiny.ids(16))
    h100 = device_of("h100")

    def seconds(form: Form, **fields: Any) -> StepTime:
        device = replace(h100, **fields)
        return StepTimes(described, Prices(device, h100.topology(8), 8)).of(form, simulate=True)

    return seconds


def test_launches_add_to_kernels_on_the_host(seconds_on):
    form = Form(fsdp=4, rows=4)
    beside, added = seconds_on(form), seconds_on(form, is_host=True)
    free = seconds_on(form, launch=0.0)
    assert beside.other < added.other  # kernels of a tiny model are shorter than a launch
    assert added.other == pytest.approx(beside.other + free.other)


def test_a_rank_that_waits_leaves_its_core_to_others(seconds_on):
    """On two cores for four ranks the bubble of a pipeline costs nothing."""
    form = Form(pp=4, rows=4, microbatches=4)
    alone, shared = seconds_on(form), seconds_on(form, sharing=2.0)
    assert alone.bubble > 0 > shared.bubble  # the busiest rank gets more than its share
    work = alone.total - alone.bubble - alone.optimizer
    assert work / 2 < shared.total - shared.optimizer < work
    ring = Form(cp=4, rows=16)  # the last rank has the most of a causal mask
    assert seconds_on(ring, sharing=2.0).attention < seconds_on(ring).attention
    balanced = replace(ring, balanced=True)
    assert seconds_on(balanced, sharing=2.0).attention == seconds_on(balanced).attention


def test_what_the_host_takes_for_recomputation_messages_and_split_backwards(seconds_on):
    form = Form(fsdp=4, rows=4, recompute="selective")
    costs = Description(tiny.model(), tiny.ids(16)).costs(1)
    again = costs.block.again
    slow = seconds_on(form, is_host=True, again={"selective": 1.0, "full": 100.0})
    operators = tiny.LAYERS * sum(again.kernels.values())
    assert slow.matmul + slow.other == pytest.approx(operators, rel=1e-3)
    for schedule in ("1f1b", "zb_h1"):
        form = Form(pp=4, rows=4, microbatches=4, schedule=schedule)
        before = seconds_on(form, sharing=4.0, is_host=True)
        after = seconds_on(form, sharing=4.0, is_host=True, message=1.0)
        # One core for all: 4 microbatches, to and fro over 3 links with 2 ends, over 4 ranks.
        assert after.total - before.total == pytest.approx(4 * 2 * 3 * 2 / 4)
        split = seconds_on(form, sharing=4.0, is_host=True, split_backward=1.0)
        operators = sum(costs.block.backward.kernels.values())
        expected = 4 * tiny.LAYERS * operators / 4 if schedule == "zb_h1" else 0.0
        assert split.total - before.total == pytest.approx(expected)


def test_collectives_that_computation_waits_for(seconds_on):
    """Those of tp are; gathers of parameters run beside computation."""
    form = Form(tp=2, fsdp=2, rows=8)
    before, after = seconds_on(form), seconds_on(form, arrival={2: 1.0})
    assert after.tp - before.tp == pytest.approx(before.launches["tp"])
    assert after.fsdp == before.fsdp


def test_sums_in_bfloat16(seconds_on):
    form = Form(tp=2, dp=2, rows=8)
    slower = seconds_on(form, sums={"all_reduce": 3.0})
    assert slower.tp > seconds_on(form).tp
    assert slower.dp == seconds_on(form).dp  # gradients are summed in float32


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_bubbles_of_many_microbatches_follow_on_a_line(schedule, llama, monkeypatch):
    """Of 48 microbatches on two ranks 8 and 12 are simulated; the stages differ by the head."""
    device = device_of("h100")
    times = StepTimes(Description(llama, tiny.ids(48)), Prices(device, device.topology(8), 8))
    form = Form(pp=2, rows=1, microbatches=48, schedule=schedule)
    simulated: list[int] = []

    def counted(name: str, ranks: int, microbatches: int, **options: Any) -> Any:
        simulated.append(microbatches)
        return make_schedule(name, ranks, microbatches, **options)

    monkeypatch.setattr(step_time, "make_schedule", counted)
    line = times.of(form, simulate=True)
    assert simulated == [8, 12]
    monkeypatch.setattr(step_time, "_STEADY", (24, 48))
    whole = times.of(form, simulate=True)
    assert simulated == [8, 12, 48]
    assert line.bubble != times.of(form).bubble
    assert line.total == pytest.approx(whole.total, rel=0.001)


def test_bytes_of_the_optimizers_step():
    """AdamW on lists of tensors, counted in elements; the norm and clipping are 3."""
    from shardmesh.sharding.tune.step_time import _STEP

    x = torch.nn.Parameter(torch.ones(1000))
    x.grad = torch.ones(1000)
    optimizer = torch.optim.AdamW([x], foreach=True)
    optimizer.step()
    with OperatorCounts([]) as counts:
        optimizer.step()
    on_lists = [x for x in counts.tape.operations if x.kernel.moved >= 4000]
    moved = sum(sum(x.inputs.values()) + 4000 for x in on_lists)  # each writes one list
    assert moved / 4000 == _STEP - 3


# -- errors ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "h1000"}, r"unknown device 'h1000': write one of a100, h100"),
        ({"devices": 0}, r"tune\(devices=0\): a whole number from 1"),
        ({"max_microbatch": 0}, r"tune\(max_microbatch=0\): a whole number from 1"),
        ({"fix": {"zp": 2}}, r"zp=2: a form has the fields pp, dp"),
        ({"memory": 2.1053e9}, r"does not fit on 8 devices h100: .* MB too few; most is .* Take"),
        ({"fix": {"tp": 8}}, r"h100 with tp=8: tp=8 does not divide 4 attention heads"),
        ({"fix": {"tp": 3}}, r"with tp=3: tp=3 does not divide 8 devices"),
        ({"fix": {"pp": 8}}, r"pp=8: 8 stages, and 4 blocks"),
        ({"near": Form(fsdp=8, tp=8)}, r"8 devices h100 near fsdp=8 tp=8 1 x 1: it has 64 devices"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_errors(llama, options, message):
    with pytest.raises(ValueError, match=message):
        tune(llama, tiny.ids(16, 64), **{"devices": 8} | options)


def test_command(tmp_path, capsys):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(tiny.config().to_dict()))
    options = ["--devices", "4", "--batch", "8", "--seq", "16", "--fix", "tp=2", "--fix", "pp=1"]
    options += ["--check", "0"]
    assert main(["tune", str(path), *options, "--json"]) == 0
    parsed = json.loads(capsys.readouterr().out)
    assert str(path) in parsed["program"]
    near = ["--from", "tp=2,rows=4", "--program", "torchtitan"]
    assert main(["tune", str(path), *options, *near]) == 0
    assert "--parallelism.tensor_parallel_degree 2" in capsys.readouterr().out


def test_positions_of_a_configuration_that_names_them_otherwise(tmp_path):
    config = tiny.transformers.MptConfig(
        vocab_size=64, d_model=32, n_heads=4, n_layers=2, max_seq_len=24
    )
    config.save_pretrained(tmp_path)
    _, batch, *_ = _load(str(tmp_path), None, None, 2)
    assert batch.shape == (2, 24)


class Plain(torch.nn.Module):
    """A model that is none of Hugging Face's."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x).relu()
        return x


def plain() -> tuple[torch.nn.Module, torch.Tensor]:
    with torch.device("meta"):
        return Plain(), torch.empty(4, 8)


def plain_with_loss() -> tuple[torch.nn.Module, torch.Tensor, Any]:
    def loss(output: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        return (output - batch).square().mean()

    return *plain(), loss


def nothing() -> None: ...


def test_a_plain_model(capsys):
    """The program of a function's model runs, with the mean of its output as loss."""
    target = "tests.sharding.tune.test_tune:plain"
    options = ["--devices", "2", "--fix", "pp=1", "--check", "0", "--program", "shardmesh"]
    assert main(["tune", target, *options]) == 0
    names: dict[str, Any] = {"__name__": "train"}
    exec(capsys.readouterr().out, names)

    def run() -> list[float]:
        sm.random.manual_seed(1)
        return [float(loss.full_tensor()) for loss in names["main"](device="cpu", steps=2)]

    first, second = sm.simulate(2)(run)()
    assert first == second
    assert all(loss > 0 for loss in first)


def test_a_function_with_a_loss(capsys):
    """It is counted; the program that is printed has a loss to replace."""
    options = ["--devices", "1", "--check", "0"]
    for name in ("plain", "plain_with_loss"):
        assert main(["tune", f"tests.sharding.tune.test_tune:{name}", *options, "--json"]) == 0
    first, second = map(json.loads, re.split(r"(?<=^})\n", capsys.readouterr().out, flags=re.M)[:2])
    others = [x["candidates"][0]["seconds_by_part"]["other"] for x in (first, second)]
    assert others[1] > others[0]
    names: dict[str, Any] = {"__name__": "train"}
    exec(second["program"], names)
    assert sm.simulate(1)(names["main"])("cpu", steps=1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing", "--devices", "2"], "'nothing' is neither a config.json"),
        (["no/config.json", "--devices", "2"], "no/config.json: no such file"),
        (["no_such_module:f", "--devices", "2"], "No module named 'no_such_module'"),
        (["math:floor", "--devices", "2", "--check", "x"], "--check 'x': write a whole number"),
        (["math:floor", "--devices", "x"], "--devices 'x': write a whole number from 1"),
        (["math:nothing", "--devices", "2"], "math has no function 'nothing'"),
        (["tests.sharding.tune.test_tune:nothing", "--devices", "2"], "returned NoneType"),
    ],
)
def test_errors_of_the_command(arguments, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["tune", *arguments])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("T5Config", "config.json: transformers has no causal language model of a T5Config; pass"),
        ("Gemma3Config", "Take its language model: the configuration config.get_text_config()"),
    ],
)
def test_configurations_that_are_no_language_models(kind, message, tmp_path, capsys):
    import transformers

    path = tmp_path / "config.json"
    path.write_text(json.dumps(getattr(transformers, kind)().to_dict()))
    with pytest.raises(SystemExit):
        main(["tune", str(path), "--devices", "2"])
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("fix", "message"),
    [
        ({"tp": "8"}, "tp='8': a whole number from 1"),
        ({"schedule": "half"}, "schedule='half': one of 1f1b, gpipe, interleaved, zb_h1"),
        ({"recompute": "half"}, "recompute='half': one of none, selective, full"),
    ],
)
def test_values_that_a_form_does_not_take(llama, fix, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        tune(llama, tiny.ids(16), devices=4, fix=fix)


@pytest.mark.parametrize(
    ("fix", "message"),
    [
        ({"tp": 3}, "with tp=3: tp=3 does not divide 4 devices"),
        (
            {"pp": 1, "rows": 5},
            "with pp=1, rows=5: rows=5 does not divide the 16 rows of the batch",
        ),
        ({"pp": 1, "schedule": "gpipe"}, "schedule=gpipe: pipelines are searched with schedule="),
        ({"stages": 3}, "with stages=3: pipelines are searched with schedule=gpipe, 1f1b, zb_h1"),
        ({"pp": 1, "gather": "step"}, "gather=step needs a pipeline, and fsdp, cp or ep"),
        ({"pp": 2, "dp": 2, "gather": "step"}, "gather=step needs a pipeline, and fsdp, cp or ep"),
    ],
)
def test_values_that_no_form_has(llama, fix, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        tune(llama, tiny.ids(16), devices=4, fix=fix)


@pytest.mark.parametrize(
    "text", ["sequence_parallel=True,tp=2", " tp = 2 , sequence_parallel=true"]
)
def test_fields_on_the_shell(text):
    assert _fields(text) == {"tp": 2, "sequence_parallel": True}


def test_a_field_without_a_name():
    with pytest.raises(ValueError, match=re.escape("'=3': write NAME=VALUE, such as tp=8")):
        _fields("=3")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fix": "tp=2"}, "tune(fix='tp=2'): a dict of fields of a form, such as {'tp': 8}"),
        ({"near": "tp=2"}, "tune(near='tp=2'): pass a Form, such as Form(fsdp=8)"),
        ({"near": Form(pp=0)}, "pp=0: a whole number from 1"),
        ({"memory": -1}, "tune(memory=-1): bytes of a device, such as 80e9"),
        ({"memory": "80GB"}, "tune(memory='80GB'): bytes of a device, such as 80e9"),
        ({"loss": lambda output, _: output.logits}, "the loss is a tensor [1, 16, 64]; return"),
    ],
)
def test_arguments_that_are_no_options(llama, options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        tune(llama, tiny.ids(16), devices=4, **options)


def test_something_that_is_no_module():
    with pytest.raises(ValueError, match=r"tune: the model is 'llama'; pass an nn\.Module"):
        tune("llama", tiny.ids(16), devices=4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"form": "fsdp=4"}, "events(form='fsdp=4'): pass a Form"),
        ({"form": Form(fsdp=4, rows=2, microbatches=2, dtype="half")}, "dtype='half': write"),
        ({"form": Form(fsdp=4, rows=2)}, "4 data ranks with 1 x 2 rows, and the batch has 16"),
        ({"form": Form(fsdp=3, rows=2)}, "3 data ranks with 1 x 2 rows, and the batch has 16"),
        ({"form": Form(fsdp=8, rows=2), "rank": 1}, "rank of the pipeline, 0 alone, as the form"),
        ({"rank": 1.5}, "events(rank=1.5): a rank of the pipeline"),
        (
            {"form": Form(pp=2, rows=16), "rank": 2},
            "events(rank=2): a rank of the pipeline, from 0",
        ),
        ({"form": Form(pp=2, rows=16), "rank": -1}, "events(rank=-1)"),
        ({"form": Form(pp=2, rows=16), "rank": True}, "events(rank=True)"),
    ],
)
def test_arguments_of_events(tuning, arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        tuning.events(**arguments)
    assert tuning.events(Form(fsdp=8, rows=2))  # of another number of devices


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"count": 0}, "measure(count=0): a whole number from 1"),
        ({"steps": "3"}, "measure(steps='3'): a whole number from 1"),
        ({"device": "gpu"}, 'measure(device=\'gpu\'): write "cuda" or "cpu"'),
    ],
)
def test_arguments_of_measure(llama, options, message):
    tuning = tune(llama, tiny.ids(16), devices=4, fix={"tp": 1, "pp": 1}, build="build = None")
    with pytest.raises(ValueError, match=re.escape(message)):
        tuning.measure(**options)
