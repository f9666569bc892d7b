"""Dtypes of a form: its programs run, and memory, bytes and times follow from the dtypes."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

import shardmesh as sm
from shardmesh.sharding.tune.description import Description
from shardmesh.sharding.tune.devices import Device, device_of
from shardmesh.sharding.tune.form import Form, why_not
from shardmesh.sharding.tune.memory import memory_of
from shardmesh.sharding.tune.prices import Prices
from shardmesh.sharding.tune.program import (
    accelerate_text,
    hugging_face_build,
    program_text,
    titan_text,
)
from shardmesh.sharding.tune.program_costs import check
from shardmesh.sharding.tune.step_time import StepTimes
from tests.sharding.tune import tiny
from tests.sharding.tune.test_memory import BYTES, MEMORY, POSITIONS, ROWS, SIZES, run
from tests.tiers import slow

PRECISIONS: dict[str, dict[str, Any]] = {
    "float32": {"param_dtype": "float32"},
    "bfloat16": {"reduce_dtype": "bfloat16", "dtype": "bfloat16"},
    "sums in bfloat16": {"reduce_dtype": "bfloat16"},
    "kept in bfloat16": {"dtype": "bfloat16"},
}
H100 = device_of("h100")


@pytest.fixture(scope="module")
def described() -> Description:
    return Description(tiny.model(**SIZES), tiny.ids(ROWS, POSITIONS))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("llama")
    (path / "config.json").write_text(json.dumps(tiny.config(**SIZES).to_dict()))
    return str(path)


COMPARED = [
    (Form(fsdp=2, tp=2, sequence_parallel=True, rows=4, microbatches=2), "float32"),
    (Form(fsdp=4, rows=4), "bfloat16"),
    *(slow((Form(fsdp=4, rows=4), name)) for name in PRECISIONS if name != "bfloat16"),
    *(slow((Form(dp=4, rows=4), name)) for name in PRECISIONS),
    *(slow((Form(fsdp=2, cp=2, rows=8), name)) for name in PRECISIONS),
    *(slow((Form(dp=2, fsdp=2, rows=2, microbatches=2), name)) for name in PRECISIONS),
    slow((Form(fsdp=4, rows=2, microbatches=2, zero=1), "bfloat16")),
]


@pytest.mark.parametrize("case", COMPARED, ids=str)
def test_memory_and_bytes_of_the_program(case, described, folder):
    form = replace(case[0], **PRECISIONS[case[1]])
    assert why_not(form, described) is None
    peak, report = run(form, described, folder)
    assert memory_of(form, described, 0).total == pytest.approx(peak, rel=MEMORY)
    time = StepTimes(described, Prices(H100, H100.topology(8), 8)).of(form, rank=0)
    assert sum(time.moved.values()) == pytest.approx(report.bytes_received, rel=BYTES)


@pytest.mark.parametrize("name", ["bfloat16", *map(slow, ["float32", "sums in bfloat16"])])
def test_the_evaluated_program(name, described):
    form = Form(fsdp=4, rows=2, microbatches=2, **PRECISIONS[name])
    times = StepTimes(described, Prices(H100, H100.topology(8), 8))
    checked = check(form, described, times)
    assert checked.why_not == ""
    assert checked.memory_error == pytest.approx(0, abs=MEMORY)
    assert checked.bytes_error == pytest.approx(0, abs=BYTES)


@cache
def losses(form: Form, folder: str) -> list[float]:
    """Run the program of a form as it is, and return its losses."""
    described = tiny.description()
    text = program_text(form, described, hugging_face_build(folder), node=8)
    names: dict[str, Any] = {"__name__": "train"}
    exec(compile(text, "train.py", "exec"), names)

    def step() -> list[float]:
        sm.random.manual_seed(0)
        values = names["main"](device="cpu", steps=3)
        return [float(x.full_tensor() if isinstance(x, sm.ShardedTensor) else x) for x in values]

    results = sm.simulate(form.devices)(step)()
    assert all(result == pytest.approx(results[0], rel=1e-6) for result in results)
    return results[0]


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("tiny")
    (path / "config.json").write_text(json.dumps(tiny.config().to_dict()))
    return str(path)


RUN = [
    (Form(fsdp=2, rows=2, microbatches=2), "bfloat16", 1e-2),
    (Form(fsdp=2, tp=2, sequence_parallel=True, rows=4), "float32", 1e-5),
    *(
        slow((form, name, 1e-5 if name == "float32" else 1e-2))
        for form in (
            Form(fsdp=2, rows=4),
            Form(dp=2, rows=4),
            Form(pp=2, rows=2, microbatches=4),
            Form(fsdp=2, rows=4, zero=2),
        )
        for name in PRECISIONS
    ),
]


@pytest.mark.parametrize("case", RUN, ids=str)
def test_losses_are_those_of_one_rank(case, tiny_folder):
    """In bfloat16 as far as its eight bits tell; in float32 as far as those of float32 do."""
    form, name, tolerance = case
    options = PRECISIONS[name]
    expected = losses(Form(rows=tiny.ROWS, **options), tiny_folder)
    result = losses(replace(form, **options), tiny_folder)
    assert result == pytest.approx(expected, rel=tolerance)
    assert expected[2] != expected[0]


def test_parameters_that_are_kept_in_bfloat16_are_alone(tiny_folder):
    """The frequencies of rotary embeddings, which are buffers, stay in float32."""
    form = Form(fsdp=2, rows=4, **PRECISIONS["bfloat16"])
    text = program_text(form, tiny.description(), hugging_face_build(tiny_folder), node=8)
    names: dict[str, Any] = {"__name__": "train"}
    exec(compile(text, "train.py", "exec"), names)
    build, models = names["build"], {}

    def kept() -> Any:
        return models.setdefault(sm.process_index(), build())

    names["build"] = kept
    sm.simulate(2)(lambda: names["main"](device="cpu", steps=1))()
    model = models[0]
    assert {x.dtype for x in model.parameters()} == {torch.bfloat16}
    assert {x.grad.dtype for x in model.parameters() if x.grad is not None} <= {torch.bfloat16}
    assert {x.dtype for x in model.buffers() if x.is_floating_point()} == {torch.float32}


def test_times_follow_the_dtype(described):
    times = StepTimes(described, Prices(H100, H100.topology(8), 8))
    mixed, single, pure = (
        times.of(Form(fsdp=4, rows=4, **options))
        for options in ({}, PRECISIONS["float32"], PRECISIONS["bfloat16"])
    )
    assert single.attention == pytest.approx(mixed.attention * 989 / 67)
    # 2 bytes of what is gathered and 4 of what is reduced; in float32 4 and 4, in bfloat16 2 and 2
    gathered = single.moved["fsdp"] - mixed.moved["fsdp"]
    reduced = 2 * (mixed.moved["fsdp"] - pure.moved["fsdp"])
    assert gathered > 0
    assert reduced > 0
    assert mixed.moved["fsdp"] == pytest.approx(gathered + reduced)
    assert pure.optimizer == pytest.approx(mixed.optimizer / 2)
    assert H100.peak("float32") == 67e12
    assert replace(H100, float32=0.0).peak("float32") == pytest.approx(H100.flops / 15)


def test_sums_in_bfloat16_take_hosts_longer(described):
    """By the dtype in which each of them sums: activations, shards' gradients, replicas'."""
    slow_sums = replace(H100, sums={"all_reduce": 3.0, "reduce_scatter": 3.0})

    def seconds(device: Device, form: Form) -> float:
        return StepTimes(described, Prices(device, device.topology(8), 8)).of(form).total

    for form, slower in (
        (Form(tp=4, rows=16), True),
        (Form(tp=4, rows=16, param_dtype="float32"), False),
        (Form(fsdp=4, rows=4), False),
        (Form(fsdp=4, rows=4, reduce_dtype="bfloat16"), True),
        (Form(dp=4, rows=2, microbatches=2), False),
        (Form(dp=4, rows=2, microbatches=2, dtype="bfloat16"), True),
    ):
        assert (seconds(slow_sums, form) > seconds(H100, form)) is slower, form


def test_dtypes_are_given_and_not_searched():
    options: dict[str, Any] = {"devices": 4, "check": 0, "top": 50}
    default = sm.tune(tiny.model(), tiny.ids(), **options)
    assert {candidate.form.precision for candidate in default.candidates} == {""}
    fix = PRECISIONS["bfloat16"]
    pure = sm.tune(tiny.model(), tiny.ids(), **options, fix=fix)
    assert {candidate.form.precision for candidate in pure.candidates} == {"bfloat16"}
    assert "reduce_dtype=torch.bfloat16)" in pure.program
    near = sm.tune(tiny.model(), tiny.ids(), **options, near=pure.best.form)
    assert {candidate.form.precision for candidate in near.candidates} == {"bfloat16"}


def test_settings_of_other_libraries(described):
    single, pure, sums, kept = (Form(fsdp=4, rows=4, **options) for options in PRECISIONS.values())
    assert accelerate_text(single).endswith(
        '# Accelerator(mixed_precision="no"), the model in float32'
    )
    assert accelerate_text(pure).endswith("the model in bfloat16")
    assert accelerate_text(sums).endswith(
        "MixedPrecisionPolicy of its plugin: reduce_dtype=bfloat16"
    )
    assert "--training.mixed_precision_param float32" in titan_text(single, described)
    assert "--training.dtype bfloat16" in titan_text(kept, described)
    for form in (pure, sums):
        assert titan_text(form, described) == (
            "# torchtitan sums gradients in float32 alone (reduce_dtype)"
        )


@pytest.mark.parametrize(
    ("fix", "message"),
    [
        (
            {"param_dtype": "float8_e4m3fn"},
            'does not scale .* in float8; write "bfloat16" or "float32"',
        ),
        ({"dtype": "float16"}, 'dtype=\'float16\': write "bfloat16" or "float32"'),
        ({"dtype": torch.bfloat16}, 'dtype=torch.bfloat16: write "bfloat16" or "float32"'),
        (
            {"param_dtype": "float32", "dtype": "bfloat16"},
            "parameters are used as they are kept, or lower",
        ),
    ],
    ids=str,
)
def test_dtypes_that_are_not_run(fix, message):
    with pytest.raises(ValueError, match=message):
        sm.tune(tiny.model(), tiny.ids(), devices=4, check=0, fix=fix)
