"""`propose_plan`: next to plans written by hand, and the models that it lays out next to plain."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardmesh as sm
from shardmesh import P
from shardmesh.parallel import colwise, parallelize, rowwise, sequence_parallel
from shardmesh.sharding.tune import propose
from shardmesh.sharding.tune.counts import CountedWithoutValues, OperatorCounts
from shardmesh.sharding.tune.description import call
from shardmesh.sharding.tune.plans import own_plan, sequence_plan, styles_of
from shardmesh.sharding.tune.repeated import BlockList, block_lists

tf = pytest.importorskip("transformers")

VOCABULARY, ROWS, POSITIONS = 64, 4, 8
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
CAUSAL: dict[str, Any] = SIZES | {"vocab_size": VOCABULARY, "num_key_value_heads": 2}


def _ids() -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(1, VOCABULARY, (ROWS, POSITIONS), generator=generator)


def _pixels() -> torch.Tensor:
    return torch.randn(ROWS, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def _gpt2() -> nn.Module:
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    return tf.GPT2LMHeadModel(tf.GPT2Config(vocab_size=VOCABULARY, **sizes, **ends))


def _bert() -> nn.Module:
    config = tf.BertConfig(vocab_size=VOCABULARY, **SIZES, max_position_embeddings=32)
    return tf.BertForMaskedLM(config)


def _t5() -> nn.Module:
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    ends = {"pad_token_id": 0, "decoder_start_token_id": 0, "eos_token_id": 1}
    return tf.T5ForConditionalGeneration(tf.T5Config(vocab_size=VOCABULARY, **sizes, **ends))


def _vit() -> nn.Module:
    config = tf.ViTConfig(**SIZES, image_size=8, patch_size=4, num_labels=5)
    return tf.ViTForImageClassification(config)


def _mixtral() -> nn.Module:
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    return tf.MixtralForCausalLM(tf.MixtralConfig(**CAUSAL, **experts))


@dataclass(frozen=True)
class Case:
    """A model, its batch, and a plan written by hand."""

    build: Callable[[], nn.Module]
    plan: Mapping[str, Any] | None = None  # None for the model's own
    batch: Callable[[], Any] = _ids


def _attention(*inputs: str, out: str, up: str, down: str) -> dict[str, Any]:
    split = {f"*.{name}": colwise() for name in (*inputs, up)}
    return {**split, f"*.{out}": rowwise(), f"*.{down}": rowwise()}


CASES = {
    "llama": Case(lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**CAUSAL))),
    "gpt2": Case(_gpt2, _attention("c_attn", out="attn.c_proj", up="c_fc", down="mlp.c_proj")),
    "bert": Case(
        _bert,
        {
            **dict.fromkeys(("*.query", "*.key", "*.value", "*.intermediate.dense"), colwise()),
            "*.output.dense": rowwise(),
        },
    ),
    "t5": Case(
        _t5,
        {
            **_attention("q", "k", "v", out="o", up="wi", down="wo"),
            "*.relative_attention_bias": colwise(),
        },
        lambda: {"input_ids": _ids(), "decoder_input_ids": _ids()},
    ),
    "vit": Case(
        _vit, _attention("q_proj", "k_proj", "v_proj", out="o_proj", up="fc1", down="fc2"), _pixels
    ),
    "mixtral": Case(_mixtral),
}


BY_SIZE = [
    pytest.param(*case, marks=[] if case in (("llama", 2), ("gpt2", 2)) else pytest.mark.slow)
    for case in product(CASES, (2, 4))
]


def _loss(output: Any, batch: Any) -> Any:
    logits = output.logits
    if logits.ndim == 3:
        ids = batch["input_ids"] if isinstance(batch, dict) else batch
        return F.cross_entropy(logits.flatten(0, 1), ids.flatten())
    return logits.square().mean()


def _model(name: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return CASES[name].build().to(dtype).eval()


def _mapped(batch: Any, function: Callable[[torch.Tensor], Any]) -> Any:
    if isinstance(batch, dict):
        return {key: function(x) for key, x in batch.items()}
    return function(batch)


def _received(model: nn.Module, batch: Any, plan: Any, size: int) -> int:
    """Return the bytes of a step of the parallelized model on rank 0."""
    mesh = sm.AbstractMesh((size,), ("tp",))

    def step(module: nn.Module, inputs: Any) -> None:
        parallelize(module, plan=plan, src_data_rank=None)
        with CountedWithoutValues(OperatorCounts([])):
            _loss(call(module, inputs), inputs).backward()

    layouts = _mapped(batch, lambda x: sm.Layout.of(mesh, P(), x.shape, x.dtype))
    return sm.debug.eval_shape(step, model, layouts, mesh=mesh).report.bytes_received


def _whole_share(model: nn.Module, plan: Any) -> float:
    """Return the share of the elements of matrices that a plan leaves whole."""
    mesh = sm.AbstractMesh((2,), ("tp",))

    def specs(module: nn.Module) -> int:
        parallelize(module, plan=plan, src_data_rank=None)
        matrices = [x for x in module.parameters() if x.ndim > 1]
        return sum(x.numel() for x in matrices if not sm.typeof(x).spec.axes)

    count = sm.debug.eval_shape(specs, model, mesh=mesh).result
    return count / sum(x.numel() for x in model.parameters())


def _held(model: nn.Module, plan: Any, size: int) -> int:
    """Return the elements of the parallelized model's parameters on rank 0."""

    def count(module: nn.Module) -> int:
        parallelize(module, plan=plan, src_data_rank=None)
        parameters: list[Any] = [*module.parameters()]
        return sum(x.to_local().numel() for x in parameters)

    return sm.debug.eval_shape(count, model, mesh=sm.AbstractMesh((size,), ("tp",))).result


def _propose(name: str, size: int) -> tuple[nn.Module, Any, Any, Any]:
    """Return the model, its batch, the plan by hand and the proposed plan.

    The proposed plan may leave as many elements whole as the plan by hand does.
    """
    case = CASES[name]
    # torch knows the shapes of grouped products in bfloat16 only
    dtype = torch.bfloat16 if name == "mixtral" else torch.float64
    model = _model(name, dtype)
    batch = _mapped(case.batch(), lambda x: x.to(dtype) if x.is_floating_point() else x)
    by_hand = styles_of(own_plan(model)) if case.plan is None else case.plan
    whole = max(0.05, _whole_share(model, by_hand))
    return model, batch, by_hand, sm.propose_plan(model, batch, size, loss=_loss, whole=whole)


@pytest.mark.parametrize(("name", "size"), BY_SIZE)
def test_no_more_bytes_than_by_hand(name, size):
    model, batch, by_hand, plan = _propose(name, size)
    assert plan.bytes_received == _received(model, batch, plan, size)
    assert plan.bytes_received <= _received(model, batch, by_hand, size)
    assert plan.elements < 0.65 * plan.of
    assert plan.of == sum(x.numel() for x in model.parameters())


@pytest.mark.parametrize(("name", "size"), BY_SIZE)
def test_results_are_those_of_one_rank(name, size):
    *_, plan = _propose(name, size)
    dtype = torch.float32 if name == "mixtral" else torch.float64
    batch = _mapped(CASES[name].batch(), lambda x: x.to(dtype) if x.is_floating_point() else x)

    def step(module: nn.Module, inputs: Any) -> dict[str, Any]:
        value = _loss(call(module, inputs), inputs)
        value.backward()
        grads = {path: x.grad for path, x in module.named_parameters() if x.grad is not None}
        return {**grads, "loss": value.detach()}

    def run() -> dict[str, torch.Tensor]:
        module = _model(name, dtype)
        mesh = sm.init_device_mesh("cpu", (size,), axis_names=("tp",))
        parallelize(module, mesh, plan)
        results = step(module, _mapped(batch, lambda x: sm.device_put(x, mesh, P())))
        return {path: x.full_tensor() for path, x in results.items()}

    expected = step(_model(name, dtype), batch)
    for result in sm.simulate(size)(run)():
        torch.testing.assert_close(result, expected)


def test_sequence_parallelism_moves_no_more_bytes_than_by_hand():
    model, ids = _model("llama"), _ids()
    plan = sm.propose_plan(model, ids, 2, loss=_loss, sequence_parallel=True)
    by_hand = sequence_plan(model, "model.layers", own_plan(model))
    assert by_hand is not None
    assert plan.bytes_received == _received(model, ids, plan, 2)
    assert plan.bytes_received <= _received(model, ids, styles_of(by_hand), 2)
    assert plan["model.layers.*.mlp.down_proj"] == rowwise(out=P(None, "tp"))
    assert plan["model.layers.*.input_layernorm"] == sequence_parallel(1, out=P())


class _Unknown(nn.Module):
    """Layers without a list, a parameter of its own, and a layer that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.twice = nn.Linear(8, 32), nn.Linear(32, 8), nn.Linear(8, 8)
        self.mix = nn.Parameter(torch.randn(8, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.down(torch.relu(self.up(x)))
        x = self.twice(torch.tanh(self.twice(x)))
        return torch.relu(x @ self.mix) @ self.mix.T


def test_a_module_of_ones_own():
    torch.manual_seed(0)
    model, x = _Unknown().double(), torch.randn(6, 8).double()
    plan = sm.propose_plan(model, x, 2)
    assert plan["up"] == colwise()
    assert plan["down"] == rowwise()
    assert plan["mix"] == P(None, "tp")
    model(x).mean().backward()

    def run() -> list[torch.Tensor]:
        torch.manual_seed(0)
        module = _Unknown().double()
        mesh = sm.init_device_mesh("cpu", (2,), axis_names=("tp",))
        parallelize(module, mesh, plan)
        module(sm.device_put(x, mesh, P())).mean().backward()
        grads: list[Any] = [parameter.grad for parameter in module.parameters()]
        return [grad.full_tensor() for grad in grads]

    expected = [parameter.grad for parameter in model.parameters()]
    for result in sm.simulate(2)(run)():
        torch.testing.assert_close(result, expected)


def test_the_table_and_the_program():
    plan = sm.propose_plan(_Unknown(), torch.empty(6, 8), 2)
    lines = str(plan).splitlines()
    assert lines[0].startswith("tp=2: a rank receives")
    assert any(line.split()[:2] == ["up", "colwise()"] for line in lines)
    names = {"colwise": colwise, "rowwise": rowwise, "P": P}
    assert eval(plan.program, names) == dict(plan)
    row = next(row for row in plan.layers if row.path == "up")
    assert "bytes" in row.reason


def test_another_axis():
    plan = sm.propose_plan(_Unknown(), torch.empty(6, 8), 2, axis="model")
    assert plan["up"] == colwise(axis="model")
    assert plan["mix"] == P(None, "model")


def test_a_frozen_model():
    """No gradient moves: not those of weights, and none between layers."""
    plan = sm.propose_plan(_Unknown().requires_grad_(False), torch.empty(6, 8), 2)
    assert plan["up"] == colwise()
    assert plan["down"] == rowwise()
    assert all(row.backward == 0 for row in plan.layers)
    assert plan.bytes_received == sum(row.forward for row in plan.layers)


class _Adapted(nn.Module):
    """A frozen layer with a low-rank adapter, and a frozen table of integers."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.down, self.up = nn.Linear(8, 8), nn.Linear(8, 2), nn.Linear(2, 8)
        self.base.requires_grad_(False)
        self.order = nn.Parameter(torch.arange(8), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x)[:, self.order] + self.up(self.down(x))


def test_frozen_weights_have_no_gradients():
    """A trained layer that stays whole costs the sum of its gradients, a frozen one nothing."""
    trained = _Adapted()
    trained.base.requires_grad_(True)
    assert "base" in sm.propose_plan(trained, torch.empty(6, 8), 2, whole=1.0)
    assert "base" not in sm.propose_plan(_Adapted(), torch.empty(6, 8), 2, whole=1.0)


class _Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class _Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList(_Inner() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.inner:
            x = block(x)
        return x


class _Nested(nn.Module):
    """Blocks with blocks inside, which the model names all."""

    _no_split_modules = ("_Outer", "_Inner")

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Outer() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_blocks_inside_of_blocks():
    plan = sm.propose_plan(_Nested(), torch.empty(6, 8), 2)
    up, down, bias = 32 * 8 + 32, 8 * 32, 8
    assert plan.of == 6 * (up + down + bias)
    assert plan.elements == 6 * (up // 2 + down // 2 + bias)
    assert plan.elements == _held(_Nested(), plan, 2)


def test_lists_of_blocks():
    """Of nested lists the outermost counts; blocks that are frozen are a kind of their own."""
    model = _Nested()
    model.layers[0].requires_grad_(False)
    assert block_lists(model) == [BlockList("layers", ((0,), (1, 2)))]


class _Sharing(nn.Module):
    """Blocks that have one of their layers in common."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Inner() for _ in range(3))
        for layer in self.layers:
            layer.up = self.layers[0].up

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_parameters_that_blocks_share_count_once():
    plan = sm.propose_plan(_Sharing(), torch.empty(6, 8), 2)
    up, down, bias = 32 * 8 + 32, 8 * 32, 8
    assert plan.of == up + 3 * (down + bias)
    assert plan.elements == up // 2 + 3 * (down // 2 + bias)
    assert plan.elements == _held(_Sharing(), plan, 2)


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.recurrent = nn.Embedding(16, 8), nn.LSTM(8, 8, batch_first=True)
        self.head = nn.Linear(8, 16)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.recurrent(self.table(ids))[0])


def test_no_finalist_can_run():
    """Parts of LSTM's weights are no parts of its result."""
    with pytest.raises(ValueError, match="_Recurrent runs on 2 ranks with none of the"):
        sm.propose_plan(_Recurrent(), torch.empty(4, 6, dtype=torch.int64), 2)


def test_a_finalist_that_cannot_run(monkeypatch):
    exact = propose._Proposal._exact
    tried: list[Any] = []

    def fails_once(self: Any, state: Any) -> Any:
        tried.append(state)
        if len(tried) == 1:
            raise RuntimeError("no such operator")
        return exact(self, state)

    monkeypatch.setattr(propose._Proposal, "_exact", fails_once)
    plan = sm.propose_plan(_Unknown(), torch.empty(6, 8), 2, whole=1.0)
    assert len(tried) > 1
    assert plan.elements == _held(_Unknown(), plan, 2)


def test_tune_takes_a_proposed_plan():
    model = _model("gpt2").to("meta")
    ids = torch.empty(4, POSITIONS, dtype=torch.int64, device="meta")
    plan = sm.propose_plan(model, ids, 2)
    tuning = sm.tune(model, ids, devices=2, fix={"tp": 2}, plan=plan)
    assert tuning.best.form.tp == 2
    assert '"transformer.h.*.mlp.c_fc": colwise()' in tuning.program


@pytest.mark.parametrize("size", [1, 0, 2.0, True])
def test_too_few_ranks(size):
    with pytest.raises(ValueError, match="a whole number of ranks from 2"):
        sm.propose_plan(_Unknown(), torch.empty(6, 8), size)


def test_a_model_that_reads_values():
    class Reads(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * self.weight.sum().item()

    with pytest.raises(ValueError, match="Reads cannot run without values, which tracing needs"):
        sm.propose_plan(Reads(4, 4), torch.empty(2, 4), 2)


def test_a_batch_without_tensors():
    with pytest.raises(ValueError, match="pass a tensor, or a tuple or dict"):
        sm.propose_plan(_Unknown(), "batch", 2)


def test_blocks_that_are_layers():
    """The path of such a layer is that of its block."""
    blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = blocks

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x).relu()
            return x

    plan = sm.propose_plan(Model(), torch.empty(4, 8), 2)
    assert set(plan) == {"blocks.0", "blocks.1", "blocks.2"}
