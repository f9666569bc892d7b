"""Expert parallelism in `tune`: what is counted, chosen and printed, next to the program's steps.

Rows are dealt out to experts in turn where bytes and memory are compared, so that all ranks have
as many, which `imbalance=1` stands for. The instruments are `comm_report` and `PeakMemory`, the
library's counts of collectives and of live tensors, on rank 0.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any

import pytest
import torch

import shardmesh as sm
from shardmesh import P
from shardmesh.__main__ import main
from shardmesh.mesh.comm.null import null_world
from shardmesh.mesh.comm.report import CommReport
from shardmesh.parallel import register_moe
from shardmesh.sharding.abstract.peak_memory import PeakMemory
from shardmesh.sharding.parallel.experts import token_dispatch
from shardmesh.sharding.tune.description import Description
from shardmesh.sharding.tune.devices import device_of
from shardmesh.sharding.tune.form import Form, why_not
from shardmesh.sharding.tune.memory import memory_of
from shardmesh.sharding.tune.plans import IN_SEQUENCE
from shardmesh.sharding.tune.prices import Prices
from shardmesh.sharding.tune.program import (
    accelerate_text,
    hugging_face_build,
    program_text,
    titan_text,
)
from shardmesh.sharding.tune.program_costs import check, evaluate
from shardmesh.sharding.tune.search import forms
from shardmesh.sharding.tune.step_time import StepTimes
from tests.sharding.tune import tiny
from tests.tiers import slow

tune = partial(sm.tune, check=0)  # programs are evaluated in test_program_costs.py

EXPERTS, CHOICES = 4, 2
WIDTH, HIDDEN = tiny.WIDTH, tiny.HIDDEN
SIZES = {"hidden_size": 64, "intermediate_size": 192, "vocab_size": 512}  # of what is compared
ROWS, POSITIONS = 16, 64
COMMON: dict[str, Any] = {
    "hidden_size": WIDTH,
    "intermediate_size": HIDDEN,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": tiny.VOCABULARY,
    "max_position_embeddings": 64,
    "num_experts_per_tok": CHOICES,
}
BYTES, MEMORY = 0.005, 0.002


def config_of(name: str, **options: Any) -> Any:
    import transformers

    sizes = COMMON | options
    if name == "larger":
        sizes |= SIZES
    if name in ("mixtral", "larger"):
        return transformers.MixtralConfig(**sizes, num_local_experts=EXPERTS)
    if name == "gpt-oss":
        return transformers.GptOssConfig(
            **sizes, num_local_experts=EXPERTS, head_dim=8, sliding_window=8
        )
    if name == "qwen2":
        return transformers.Qwen2MoeConfig(
            **sizes,
            num_experts=EXPERTS,
            moe_intermediate_size=HIDDEN,
            shared_expert_intermediate_size=HIDDEN,
        )
    return transformers.DeepseekV3Config(
        **sizes,
        n_routed_experts=EXPERTS,
        moe_intermediate_size=HIDDEN,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        q_lora_rank=8,
        kv_lora_rank=8,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=8,
    )


def model_of(config: Any) -> Any:
    import transformers

    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config)


@cache
def described(name: str = "mixtral") -> Description:
    if name == "larger":
        return Description(model_of(config_of(name)), tiny.ids(ROWS, POSITIONS), imbalance=1)
    return Description(model_of(config_of(name)), tiny.ids(), imbalance=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mixtures")
    for name in ("mixtral", "qwen2", "gpt-oss", "deepseek", "larger"):
        (path / name).mkdir()
        (path / name / "config.json").write_text(json.dumps(config_of(name).to_dict()))
    return path


# -- what is counted -------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "share"), [("mixtral", 1), ("qwen2", 1), ("deepseek", 2 / 3)])
def test_experts_of_a_block(name, share):
    """Parameters, rows that are sent, and products; the first block of DeepSeek has no experts."""
    model = described(name)
    block = model.costs(1).block
    assert model.experts == EXPERTS
    assert block.experts == pytest.approx(share * EXPERTS * 3 * WIDTH * HIDDEN)
    rows = tiny.POSITIONS * CHOICES
    assert block.dispatched == pytest.approx(share * rows * WIDTH * 2)
    for phase, times in ((block.forward, 2), (block.backward, 4)):
        flops = sum(n * x.flops for x, n in phase.kernels.items() if x.of_experts)
        assert flops == pytest.approx(share * times * rows * 3 * WIDTH * HIDDEN)


def test_the_busiest_rank_decides():
    """Twice the rows: products, memory and bytes of experts, and nothing else."""
    model = model_of(config_of("mixtral"))
    form = Form(ep=4, rows=2)
    even, busy = (Description(model, tiny.ids(), imbalance=imbalance) for imbalance in (1.0, 2.0))
    device = device_of("h100")
    prices = Prices(device, device.topology(8), 8)
    moved = [StepTimes(x, prices).of(form).moved for x in (even, busy)]
    assert moved[0]["fsdp"] == moved[1]["fsdp"]
    assert moved[1]["ep"] == pytest.approx(1.5 * moved[0]["ep"], rel=0.01)
    memory = [memory_of(form, x, 0).total for x in (even, busy)]
    saved = 2 * 3 * even.costs(1).block.saved_by_experts
    assert memory[1] - memory[0] == pytest.approx(saved, rel=0.35)
    with pytest.raises(ValueError, match=r"imbalance=0\.5"):
        tune(model, tiny.ids(), devices=4, imbalance=0.5)


@pytest.mark.parametrize(
    ("form", "message"),
    [
        (Form(ep=3), "ep=3 does not divide 4 experts"),
        (Form(ep=4, tp=2), "ep=4 tp=2: 8 ranks do not divide 4 experts"),
        (
            Form(ep=2, tp=2, sequence_parallel=True, regather=True),
            "ep=2: regather does not take the gather of experts' results",
        ),
        (
            Form(fsdp=2, ep=2, tp=2, zero=2),
            "ep=2 tp=2 fsdp=2 zero=2: 2 does not divide the 1 experts of a rank",
        ),
        (
            Form(fsdp=2, cp=2, ep=2, zero=1),
            "ep=2 fsdp=2 cp=2 zero=1: 4 does not divide the 2 experts of a rank",
        ),
        (
            Form(ep=2, recompute="selective"),
            "ep=2: selective recomputation does not take the exchange of rows",
        ),
        (
            Form(fsdp=4, ep=2, zero=1),
            "ep=2 fsdp=4 zero=1: 4 does not divide the 2 experts of a rank",
        ),
        (
            Form(fsdp=4, cp=2, zero=1),
            "zero=1: stacks of experts are split between experts, and 8 ranks do not divide 4",
        ),
    ],
    ids=str,
)
def test_forms_that_a_mixture_does_not_take(form, message):
    assert why_not(form, described()) == message


def test_experts_that_are_called_by_keyword():
    """Rows that travel are not counted, so that ep would be free."""
    model = model_of(config_of("mixtral"))
    for layer in model.model.layers:
        layer.mlp.experts = ByKeyword(layer.mlp.experts)
    described = Description(model, tiny.ids(), imbalance=1)
    assert described.experts == EXPERTS
    message = "ep=2: experts are called by keyword, and rows are counted by position"
    assert why_not(Form(ep=2, rows=4), described) == message


@pytest.mark.parametrize(
    ("name", "norms"),
    [
        ("mixtral", ("model.layers.*.post_attention_layernorm",)),
        ("qwen2", ("model.layers.*.post_attention_layernorm",)),  # tp does not split shared experts
        ("deepseek", ()),  # but here; and a block has none
    ],
)
def test_norms_whose_results_stay_split(name, norms):
    """Mixtures take a part of the sequence, and nothing of them travels over tp alone."""
    model = described(name)
    assert model.norms_of_mixtures == norms
    plan = model.plan_of(True, ("ep", "tp"))
    assert [path for path, style in plan.items() if style == IN_SEQUENCE] == list(norms)
    whole, split = model.costs(2, True), model.costs(2, True, dispatches=True)
    if norms:  # attention's, and nothing else
        assert split.block.forward.communication.keys() == {"all_gather", "reduce_scatter"}
        assert [n for n, _ in split.block.forward.communication.values()] == [1, 1]
    assert split.block.experts == whole.block.experts == model.costs(1).block.experts / 2
    assert split.block.dispatched == model.costs(1).block.dispatched / 2


def test_entries_of_a_plan_for_experts():
    """They give way to the split over ep and tp; one that is for other layers, too, stays."""
    plan = {
        "model.layers.*.mlp.experts.*": "packed_colwise",
        "model.layers.*.mlp.experts": "moe_tp_experts",
        "*_proj": "colwise",
    }
    model = Description(model_of(config_of("mixtral")), tiny.ids(), plan=plan)
    assert model.plan_of(False) == plan
    split = model.plan_of(False, ("ep", "tp"))
    assert split == {"*_proj": "colwise"} | dict.fromkeys(model.expert_weights, P(("ep", "tp")))
    alone = model.plan_of(False, ("ep",), has_tp=False)
    assert alone == dict.fromkeys(model.expert_weights, P("ep"))


def test_experts_that_blocks_call_themselves():
    """Of a block no part of a sequence is computed by itself."""
    model = model_of(config_of("mixtral"))
    for layer in model.model.layers:
        layer.experts, layer.mlp.experts = layer.mlp.experts, None
        layer.mlp.forward = partial(_call_experts, layer)
    described = Description(model, tiny.ids(), imbalance=1)
    message = "cp=2: blocks call experts themselves, for which they would gather sequences"
    assert why_not(Form(cp=2, rows=8), described) == message


def _call_experts(layer: Any, x: torch.Tensor) -> torch.Tensor:
    rows = x.view(-1, x.shape[-1])
    _, weights, chosen = layer.mlp.gate(rows)
    return layer.experts(rows, chosen, weights).view(x.shape)


class ByKeyword(torch.nn.Module):
    """Calls experts with names of arguments."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, rows: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> Any:
        return self.inner(hidden_states=rows, top_k_index=chosen, top_k_weights=weights)


def test_a_model_without_experts():
    assert why_not(Form(ep=2, rows=4), tiny.description()) == "ep=2: the model has no experts"


# -- what is chosen and printed --------------------------------------------------------------------


def test_tune_says_what_ep_costs(folder, capsys):
    """Sixteen devices in nodes of eight: the forms with ep, and the one that crosses nodes."""
    path = str(folder / "mixtral")
    options = ["--devices", "8", "--node", "2", "--batch", "16", "--seq", "16", "--fix", "pp=1"]
    options += ["--check", "0"]
    assert main(["tune", path, *options, "--fix", "ep=2", "--imbalance", "1.3", "--json"]) == 0
    best = json.loads(capsys.readouterr().out)["candidates"][0]
    assert best["form"]["ep"] == 2
    assert best["received_by_axis"]["ep"] > 0
    assert best["seconds_by_part"]["ep"] > 0
    tuning = tune(model_of(config_of("mixtral")), tiny.ids(16), devices=8, node=2, fix={"pp": 1})
    reasons = [reason for reason in tuning.reasons if reason.startswith("ep=")]
    assert any("ep crosses nodes" in reason for reason in reasons), tuning.reasons
    assert any(candidate.form.ep == 1 for candidate in tuning.candidates)


def test_settings_of_other_libraries():
    form = Form(fsdp=2, ep=4, rows=1)
    assert "no expert parallelism (ep=4)" in accelerate_text(form)
    flags = titan_text(form, described())
    assert "--parallelism.data_parallel_shard_degree 8 " in flags
    assert "--parallelism.expert_parallel_degree 4 " in flags
    both = titan_text(Form(fsdp=2, ep=2, tp=2, rows=1), described())
    assert "--parallelism.data_parallel_shard_degree 4 " in both
    assert "--parallelism.expert_parallel_degree 4 " in both
    assert "--parallelism.expert_tensor_parallel_degree 1 " in both
    assert "experts over all of cp (cp=2)" in titan_text(Form(cp=2, ep=2, rows=1), described())


def test_sizes_of_ep_that_are_searched():
    """Those that divide the experts together with tp, also next to cp."""
    fixed = {"pp": 1, "zero": 3, "recompute": "none", "cp": 2}
    searched = {(form.ep, form.tp) for form in forms(described(), 8, 8, fixed, None)}
    assert searched == {(1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (1, 4)}


def test_the_best_form_with_experts_over_two_axes():
    """What is printed splits experts, and nothing else, over both axes."""
    tuning = tune(model_of(config_of("mixtral")), tiny.ids(), devices=4, fix={"ep": 2, "tp": 2})
    assert tuning.best.form.expert_axes == ("ep", "tp")
    assert 'register_moe(("ep", "tp"))' in tuning.program
    lines = [line for line in tuning.program.split("\n") if ".experts" in line]
    assert len(lines) == 2
    assert all('P(("ep", "tp"))' in line for line in lines)
    assert [event.axis for event in tuning.events() if event.op == "all_to_all"] == ["ep,tp"] * 12


# -- the program -----------------------------------------------------------------------------------


def program(form: Form, name: str, folder: Path) -> dict[str, Any]:
    model = described(name)
    assert why_not(form, model) is None
    build = hugging_face_build(str(folder / name))
    text = program_text(form, model, build, node=8)
    names: dict[str, Any] = {"__name__": "train"}
    exec(compile(text, "train.py", "exec"), names)
    return names


@cache
def losses(form: Form, name: str, folder: Path) -> list[float]:
    """Run the program of a form in float32; return its losses, and the norms of gradients."""
    names = program(form, name, folder)
    names["torch"] = _Float32()

    def run() -> list[float]:
        sm.random.manual_seed(0)
        norms: list[Any] = []

        def clip(*args: Any) -> None:
            norms.append(sm.training.clip_grad_norm_(*args))

        own = {**names, "sm": _Clipping(clip)}
        main = FunctionType(names["main"].__code__, own, argdefs=names["main"].__defaults__)
        values = [*main(device="cpu", steps=2), *norms]
        return [float(x.full_tensor() if isinstance(x, sm.ShardedTensor) else x) for x in values]

    results = sm.simulate(form.devices)(run)()
    assert all(result == pytest.approx(results[0], rel=1e-6) for result in results)
    return results[0]


class _Clipping:
    """shardmesh, with another function that clips gradients."""

    def __init__(self, clip: Callable[..., None]) -> None:
        self.training = SimpleNamespace(clip_grad_norm_=clip)

    def __getattr__(self, name: str) -> Any:
        return getattr(sm, name)


class _Float32:
    """torch, in which bfloat16 is float32."""

    bfloat16 = torch.float32

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


FORMS = {
    "fsdp": ("mixtral", Form(fsdp=4, rows=2)),
    "fsdp, ep": ("mixtral", Form(fsdp=2, ep=2, rows=1, microbatches=2)),
    "ep": ("mixtral", Form(ep=2, rows=4)),
    "dp, ep, recompute": ("mixtral", Form(dp=2, ep=2, rows=2, recompute="full")),
    "pp, ep": ("mixtral", Form(pp=2, ep=2, rows=2, microbatches=2)),
    "pp, fsdp, ep": ("mixtral", Form(pp=2, fsdp=2, ep=2, rows=1, microbatches=2)),
    "pp, fsdp, ep, gather once": (
        "mixtral",
        Form(pp=2, fsdp=2, ep=2, rows=1, microbatches=2, gather="step", schedule="zb_h1"),
    ),
    "fsdp, ep, zero 1": ("mixtral", Form(fsdp=2, ep=2, rows=1, microbatches=2, zero=1)),
    "ep, zero 2": ("mixtral", Form(ep=2, rows=2, microbatches=2, zero=2)),
    "dp, fsdp": ("mixtral", Form(dp=2, fsdp=2, rows=1, microbatches=2)),
    "fsdp, cp": ("mixtral", Form(fsdp=2, cp=2, rows=4)),
    "fsdp, tp, sp": ("mixtral", Form(fsdp=2, tp=2, sequence_parallel=True, rows=4)),
    "pp, fsdp": ("mixtral", Form(pp=2, fsdp=2, rows=2, microbatches=2, schedule="zb_h1")),
    "fsdp, zero 1, gpt-oss": ("gpt-oss", Form(fsdp=4, rows=2, zero=1)),
    "fsdp, recompute, qwen2": ("qwen2", Form(fsdp=4, rows=2, recompute="selective")),
    "fsdp, compiled, deepseek": ("deepseek", Form(fsdp=4, rows=2, compiled=True)),
    "gpt-oss": ("gpt-oss", Form(fsdp=2, ep=2, rows=2)),
    "qwen2": ("qwen2", Form(ep=2, rows=4)),
    "deepseek": ("deepseek", Form(fsdp=2, ep=2, rows=2)),
    "ep, tp": ("mixtral", Form(ep=2, tp=2, rows=4)),
    "fsdp, ep, tp, sp": (
        "mixtral",
        Form(fsdp=2, ep=2, tp=2, sequence_parallel=True, rows=1, microbatches=2),
    ),
    "dp, ep, tp, recompute": ("mixtral", Form(dp=2, ep=2, tp=2, rows=2, recompute="full")),
    "ep, tp, sp, zero 1": (
        "mixtral",
        Form(ep=2, tp=2, sequence_parallel=True, rows=2, microbatches=2, zero=1),
    ),
    "pp, ep, tp, sp": (
        "mixtral",
        Form(pp=2, ep=2, tp=2, sequence_parallel=True, rows=2, microbatches=2),
    ),
    "ep, tp, qwen2": ("qwen2", Form(ep=2, tp=2, rows=4)),
    "fsdp, cp, ep": ("mixtral", Form(fsdp=2, cp=2, ep=2, rows=1, microbatches=2)),
    "dp, cp, ep, balanced": ("mixtral", Form(dp=2, cp=2, ep=2, rows=2, balanced=True)),
    "cp, ep, recompute": ("mixtral", Form(cp=2, ep=2, rows=4, recompute="full")),
    "cp, ep, tp, sp, qwen2": (
        "qwen2",
        Form(cp=2, ep=2, tp=2, sequence_parallel=True, rows=4),
    ),
    "cp, ep, zero 2": ("mixtral", Form(cp=2, ep=2, rows=4, zero=2)),
    "pp, cp, ep": ("mixtral", Form(pp=2, cp=2, ep=2, rows=2, microbatches=2)),
    "fsdp, ep, tp, sp, deepseek": (
        "deepseek",
        Form(fsdp=2, ep=2, tp=2, sequence_parallel=True, rows=2),
    ),
}


@pytest.mark.parametrize("case", [*list(FORMS)[:2], *(slow(case) for case in list(FORMS)[2:])])
def test_losses_and_gradients_are_those_of_one_rank(case, folder):
    name, form = FORMS[case]
    expected = losses(Form(rows=tiny.ROWS), name, folder)
    assert losses(form, name, folder) == pytest.approx(expected, rel=1e-5)
    assert expected[1] != expected[0]


def measured(form: Form, folder: Path) -> tuple[int, CommReport]:
    """Return the peak of the program's second step on rank 0, and what it receives.

    Other ranks send zeros, and as many rows as this one, whose tokens take experts in turn.
    """
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    names = program(form, "larger", folder)

    def in_turn(module: Any, rows: Any, experts: Any, weights: Any) -> Any:
        tokens = experts.shape[0]
        first = sm.arange(tokens, device_mesh=experts.mesh)[:, None]
        chosen = (first + torch.arange(CHOICES)) % EXPERTS
        return by_moe(module, rows, chosen.redistribute(experts.spec), weights)

    def own_counts(counts: torch.Tensor, mesh: Any, axes: tuple[str, ...]) -> torch.Tensor:
        gathered = all_counts(counts, mesh, axes)
        return counts.expand_as(gathered).clone()

    name = register_moe(form.expert_axes or None)
    by_moe = ALL_EXPERTS_FUNCTIONS[name]
    names["register_moe"] = lambda axis: "in turn"
    ALL_EXPERTS_FUNCTIONS.register("in turn", in_turn)
    all_counts = token_dispatch._all_counts
    memory, report = PeakMemory("cpu"), sm.debug.comm_report()
    reports: list[CommReport] = []
    rows_of = names["rows_of"]

    def begin(step: int, mesh: Any) -> Any:
        if step == 1:
            memory.peak = memory.live
            reports.append(report.__enter__())
        return rows_of(step, mesh)

    names["rows_of"] = begin
    with pytest.MonkeyPatch.context() as patch, null_world(form.devices, 0), memory:
        patch.setattr(token_dispatch, "_all_counts", own_counts)
        names["main"](device="cpu", steps=2)
        report.__exit__(None, None, None)
    return memory.peak, reports[0]


@pytest.mark.parametrize(
    "form",
    [
        Form(fsdp=2, ep=2, rows=4),
        Form(fsdp=2, ep=2, tp=2, sequence_parallel=True, rows=4),
        Form(fsdp=2, cp=2, ep=2, rows=4),
        *map(
            slow,
            [
                Form(ep=4, rows=4),
                Form(ep=2, rows=4, microbatches=2),
                Form(dp=2, ep=2, rows=4),
                Form(fsdp=4, ep=2, rows=2),
                Form(ep=2, tp=2, rows=8),
                Form(ep=2, tp=2, sequence_parallel=True, rows=8),
                Form(dp=2, ep=2, tp=2, rows=4),
                Form(fsdp=2, ep=2, tp=2, rows=2, microbatches=2),
                Form(ep=2, tp=2, sequence_parallel=True, rows=4, microbatches=2, zero=1),
                Form(cp=2, ep=2, rows=8),
                Form(cp=2, ep=2, tp=2, sequence_parallel=True, rows=8),
            ],
        ),
    ],
    ids=str,
)
def test_bytes_and_memory_of_the_program(form, folder):
    """Gradients of norms make the difference with tp, and keys and values of the ring with cp."""
    model = described("larger")
    device = device_of("h100")
    time = StepTimes(model, Prices(device, device.topology(8), 8)).of(form)
    memory = memory_of(form, model, 0)
    peak, report = measured(form, folder)
    has_tp, has_cp = form.tp > 1, form.cp > 1
    assert sum(time.moved.values()) == pytest.approx(
        report.bytes_received, rel=0.02 if has_tp else BYTES
    )
    if form.fsdp > 1:  # rows of experts alone travel over the axes
        assert time.moved["ep"] == report.by_axis[",".join(form.expert_axes)][1]
    assert memory.total == pytest.approx(peak, rel=0.02 if has_cp else MEMORY)
    evaluated = evaluate(form, model)[0]
    assert sum(evaluated.received.values()) == pytest.approx(report.bytes_received, rel=BYTES)
    assert evaluated.peak == pytest.approx(peak, rel=0.02 if has_cp else MEMORY)
    scalars = form.microbatches + 1  # losses, and the norm of gradients
    others = {"dp", "tp", "dp,tp"}  # gradients in buckets, and of norms by unit
    launches = sum(n for axis, (n, _) in report.by_axis.items() if axis not in others)
    predicted = sum(n for axis, n in time.launches.items() if axis not in others)
    assert predicted == launches - scalars


def test_rows_of_the_busiest_rank_are_evaluated():
    model = model_of(config_of("larger"))
    form = Form(ep=4, rows=4)
    even, busy = (
        evaluate(form, Description(model, tiny.ids(ROWS, POSITIONS), imbalance=imbalance))[0]
        for imbalance in (1.0, 2.0)
    )
    # of N rows of each rank: 3/4 N and their results come back; 3/2 N for its experts, and 1/2 N
    assert busy.received["ep"] == pytest.approx(4 / 3 * even.received["ep"], rel=0.01)
    assert busy.peak > even.peak


def test_the_memory_of_the_loss_does_not_depend_on_experts():
    """Whose gradients may take more than the loss does."""
    small, large = (
        Description(model_of(config_of("mixtral", intermediate_size=size)), tiny.ids())
        for size in (48, 4800)
    )
    assert small.costs(1).transient == large.costs(1).transient > 0


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("mixtral", Form(cp=2, rows=8)),
        slow("mixtral", Form(cp=2, ep=2, rows=4)),
        slow("qwen2", Form(pp=2, cp=2, ep=2, rows=2, microbatches=2)),
    ],
    ids=str,
)
def test_ranks_of_cp_compute_their_own_rows(name, form, folder):
    """No rank gathers sequences where a mixture flattens them."""
    names = program(form, name, folder)

    def run() -> sm.debug.CommReport:
        with sm.debug.comm_report() as report:
            names["main"](device="cpu", steps=1)
        return report

    for report in sm.simulate(form.devices)(run)():
        assert "permute" in report.by_op
        assert "view" not in report.by_operator, report


@pytest.mark.parametrize(
    "form",
    [
        Form(fsdp=2, ep=2, rows=4, recompute="full"),
        *map(
            slow,
            [
                Form(ep=4, rows=4, recompute="full"),
                Form(fsdp=2, ep=4, rows=1, microbatches=2, recompute="full"),
                Form(fsdp=2, ep=2, tp=2, rows=4, recompute="full"),
                Form(ep=2, tp=2, sequence_parallel=True, rows=8, recompute="full"),
            ],
        ),
    ],
    ids=str,
)
def test_memory_with_recomputation(form, folder):
    """Up to 12 % more than the program's, as forwards of experts are freed one by one."""
    peak, _ = measured(form, folder)
    assert 1 <= memory_of(form, described("larger"), 0).total / peak < 1.12


@pytest.mark.parametrize("form", [Form(fsdp=4, rows=4), slow(Form(fsdp=2, cp=2, rows=8))], ids=str)
def test_memory_of_whole_experts(form, folder):
    """Stacks of experts that are split along dim 1 are held beside the buffer of their block."""
    peak, _ = measured(form, folder)
    assert memory_of(form, described("larger"), 0).total == pytest.approx(peak, rel=0.03)


@pytest.mark.parametrize(
    ("form", "error"),
    [
        (Form(fsdp=2, ep=2, rows=2, microbatches=2, zero=1), MEMORY),
        slow(Form(fsdp=2, ep=2, rows=4, zero=2), MEMORY),
        slow(Form(fsdp=4, rows=2, microbatches=2, zero=1), 0.03),
    ],
    ids=str,
)
def test_memory_of_pieces_with_whole_experts(form, error, folder):
    """A rank has the gate_up_proj of two experts, the other one their down_proj, half as long."""
    model = described("larger")
    assert model.padding(2, 2) == SIZES["hidden_size"] * SIZES["intermediate_size"]
    peak, _ = measured(form, folder)
    assert memory_of(form, model, 0).total == pytest.approx(peak, rel=error)


def test_whole_experts_receive_no_rows(folder):
    """The bytes of DDP are those of gradients and scalars, of which there are two.

    Evaluated without values the program receives the same.
    """
    form = Form(dp=4, rows=4)
    model = described("larger")
    device = device_of("h100")
    times = StepTimes(model, Prices(device, device.topology(8), 8))
    names = program(form, "larger", folder)
    with null_world(form.devices, 0), sm.debug.comm_report() as report:
        names["main"](device="cpu", steps=1)
    assert sum(times.of(form).moved.values()) == pytest.approx(report.bytes_received, rel=1e-5)
    evaluated = check(form, model, times)
    assert evaluated.why_not == ""
    assert sum(evaluated.received.values()) == report.bytes_received
    assert evaluated.memory_error == pytest.approx(0, abs=0.005)
