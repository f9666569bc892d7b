"""The programs that `tune` prints run: ranks are simulated, and losses are those of one rank."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

import shardmesh as sm
from shardmesh.sharding.tune.form import Form, why_not
from shardmesh.sharding.tune.program import (
    accelerate_text,
    hugging_face_build,
    program_text,
    titan_text,
)
from tests.sharding.tune import tiny
from tests.tiers import slow

FORMS = {
    "fsdp, tp, sp": Form(
        fsdp=2, tp=2, sequence_parallel=True, rows=2, microbatches=2, recompute="full"
    ),
    "pp, cp": Form(pp=2, cp=2, schedule="interleaved", stages=2, rows=4, microbatches=2),
    "hsdp": Form(dp=2, fsdp=2, rows=1, microbatches=2),
    "ddp, tp": Form(dp=2, tp=2, rows=4),
    "tp": Form(tp=2, rows=8),
    "cp, tp, sp": Form(cp=2, tp=2, sequence_parallel=True, rows=8),
    "pp, fsdp, tp, sp": Form(
        pp=2, fsdp=2, tp=2, sequence_parallel=True, schedule="zb_h1", rows=2, microbatches=2
    ),
    "pp, fsdp, gather once": Form(pp=2, fsdp=2, rows=2, microbatches=2, gather="step"),
    "pp": Form(pp=2, rows=2, microbatches=4),
    "fsdp, recompute selectively": Form(fsdp=2, rows=4, recompute="selective"),
    "fsdp, tp, sp, recompute selectively": Form(
        fsdp=2, tp=2, sequence_parallel=True, rows=4, recompute="selective"
    ),
    "fsdp, cp, balanced": Form(fsdp=2, cp=2, balanced=True, rows=4),
    "zero 1": Form(fsdp=2, rows=2, microbatches=2, zero=1),
    "zero 2, tp": Form(fsdp=2, tp=2, rows=2, microbatches=2, zero=2),
    "pp, recompute selectively": Form(pp=2, rows=2, microbatches=4, recompute="selective"),
}


# Rows of the vocabulary and features that two ranks do not divide.
UNEVEN = (("vocab_size", 65), ("intermediate_size", 51))


@cache
def losses(form: Form, folder: str, sizes: tuple[tuple[str, int], ...] = ()) -> list[float]:
    """Run the program of a form in float32, and return its losses."""
    described = tiny.description(**dict(sizes))
    assert why_not(form, described) is None
    text = program_text(form, described, hugging_face_build(folder), node=8)
    names: dict[str, Any] = {"__name__": "train"}
    exec(compile(text.replace("torch.bfloat16", "torch.float32"), "train.py", "exec"), names)

    def run() -> list[float]:
        sm.random.manual_seed(0)
        values = names["main"](device="cpu", steps=2)
        return [float(x.full_tensor() if isinstance(x, sm.ShardedTensor) else x) for x in values]

    results = sm.simulate(form.devices)(run)()
    assert all(result == pytest.approx(results[0], rel=1e-6) for result in results)
    return results[0]


def folder_of(tmp_path_factory: pytest.TempPathFactory, **sizes: int) -> str:
    path = tmp_path_factory.mktemp("llama")
    (path / "config.json").write_text(json.dumps(tiny.config(**sizes).to_dict()))
    return str(path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return folder_of(tmp_path_factory)


@pytest.mark.parametrize(
    "name", [*list(FORMS)[:2], *(slow(name) for name in list(FORMS)[2:])], ids=str
)
def test_losses_are_those_of_one_rank(name, folder):
    expected = losses(Form(rows=tiny.ROWS), folder)
    assert losses(FORMS[name], folder) == pytest.approx(expected, rel=1e-5)
    assert expected[1] != expected[0]


@pytest.mark.parametrize("name", ["tp", slow("fsdp, tp, sp"), slow("pp, fsdp, tp, sp")])
def test_sizes_that_tp_does_not_divide(name, tmp_path_factory):
    folder = folder_of(tmp_path_factory, **dict(UNEVEN))
    expected = losses(Form(rows=tiny.ROWS), folder, UNEVEN)
    assert losses(FORMS[name], folder, UNEVEN) == pytest.approx(expected, rel=1e-5)


def test_settings_of_accelerate():
    accelerate = pytest.importorskip("accelerate")
    made = eval(
        accelerate_text(Form(dp=2, fsdp=4, tp=2)),
        {"ParallelismConfig": accelerate.utils.ParallelismConfig},
    )
    assert (made.dp_replicate_size, made.dp_shard_size, made.tp_size, made.cp_size) == (2, 4, 2, 1)
    assert "no pipeline" in accelerate_text(Form(pp=2))
    assert "FSDP alone (zero=1)" in accelerate_text(Form(fsdp=4, zero=1))


def test_flags_of_torchtitan():
    form = Form(pp=3, fsdp=2, rows=2, microbatches=2, schedule="interleaved", stages=2)
    model = tiny.description()
    assert model.layers == 4  # with embedding and head six, one for each stage
    flags = titan_text(form, model).split(" ")
    assert "cannot cut 4 layers into 4 stages" in titan_text(replace(form, pp=2), model)
    assert "two stages on a rank" in titan_text(Form(pp=2, schedule="zb_h1"), model)
    values = dict(zip(flags[::2], flags[1::2], strict=True))
    assert values["--parallelism.pipeline_parallel_schedule"] == "Interleaved1F1B"
    assert values["--parallelism.data_parallel_shard_degree"] == "2"
    assert values["--training.local_batch_size"] == "4"
    assert values["--parallelism.pipeline_parallel_layers_per_stage"] == "1"
    selective = titan_text(replace(form, recompute="selective"), model)
    assert "--activation_checkpoint.selective_ac_option op" in selective
    compiled = titan_text(replace(form, compiled=True), model)
    assert compiled == f"{titan_text(form, model)} --compile.enable"
    assert "shards parameters" in titan_text(Form(fsdp=2, rows=4, zero=2), model)
    regather = Form(tp=2, sequence_parallel=True, rows=8, regather=True)
    assert titan_text(regather, model).startswith("# torchtitan saves what it gathers")
