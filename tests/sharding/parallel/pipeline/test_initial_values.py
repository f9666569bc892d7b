"""Models on "meta": a pipeline gives them the initial values that they have without one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardmesh as sm
from shardmesh.parallel import colwise, fully_shard, materialize, pipeline, rowwise
from tests.tiers import slow

VOCABULARY, WIDTH = 11, 6


class Block(nn.Module):
    """A residual block with a parameter and a buffer of its own."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.gain = nn.Parameter(torch.empty(WIDTH))
        self.register_buffer("count", torch.zeros(()))

    def reset_parameters(self) -> None:
        nn.init.normal_(self.gain, 1.0, 0.1)
        self.count.fill_(3.0)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gain * self.down(F.gelu(self.up(x)))


class Model(nn.Module):
    """Ids to logits, with a parameter and a buffer outside of units."""

    scale: Tensor

    def __init__(self, tied: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH, padding_idx=0)
        self.shift = nn.Parameter(torch.empty(WIDTH))
        self.blocks = nn.ModuleList([Block() for _ in range(4)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.register_buffer("scale", torch.empty(1))
        if tied:
            self.head.weight = self.embedding.weight

    def reset_parameters(self) -> None:
        nn.init.uniform_(self.shift)
        self.scale.fill_(2.0)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids) + self.shift
        for block in self.blocks:
            x = block(x)
        return (self.head(self.norm(x)) / self.scale).transpose(1, 2)


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


def whole(x: Any) -> Tensor:
    return x.full_tensor() if isinstance(x, sm.ShardedTensor) else x.detach().clone()


def values(module: Any) -> dict[str, Tensor]:
    """Return the state of a module, or what this rank has of that of a pipeline."""
    state = module.state_dict()
    return {name: whole(x) for name, x in state.items() if is_on(x)}


def is_on(x: Any) -> bool:
    return not isinstance(x, sm.ShardedTensor) or x.mesh.coordinate is not None


def without_pipeline(make: Callable[[], nn.Module], init: Any = None) -> dict[str, Tensor]:
    def program() -> dict[str, Tensor]:
        sm.random.manual_seed(5)
        mesh = sm.init_device_mesh("cpu", (1,), axis_names=("fsdp",))
        return values(materialize(fully_shard(on_meta(make), mesh), init))

    return sm.simulate(1)(program)()[0]


# axes after "pp", ranks along "pp", schedule, boundaries
SETUPS: list[tuple[tuple[str, ...], int, str, list[str]]] = [
    ((), 1, "1f1b", []),
    ((), 2, "1f1b", ["blocks.1"]),
    ((), 2, "zb_v", ["blocks.0", "blocks.1", "blocks.3"]),
    (("fsdp",), 2, "interleaved", ["blocks.1", "blocks.2", "norm"]),
    (("fsdp",), 2, "zb_v", ["blocks.1", "blocks.2", "blocks.3"]),
    (("fsdp", "tp"), 2, "1f1b", ["blocks.3"]),
    (("tp",), 4, "1f1b", ["blocks.0", "blocks.2", "head"]),
]


def staged(
    make: Callable[[], nn.Module],
    axes: tuple[str, ...],
    ranks: int,
    schedule: str,
    split: list[str],
    **options: Any,
) -> Any:
    mesh = sm.init_device_mesh("cpu", (ranks, *[2 for _ in axes]), axis_names=("pp", *axes))
    pipe = pipeline(on_meta(make), mesh, split=split, schedule=schedule, microbatches=4, **options)
    if "tp" in axes:
        pipe.parallelize({"*.up": colwise(), "*.down": rowwise()}, mesh["tp"])
    if "fsdp" in axes:
        pipe.fully_shard(mesh["fsdp"], units=Block)
    return pipe


@pytest.mark.one_in(3)
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("axes", "ranks", "schedule", "split"), SETUPS)
def test_values_are_those_without_a_pipeline(axes, ranks, schedule, split, tied):
    def make() -> Model:
        return Model(tied)

    expected = without_pipeline(make)
    assert expected["blocks.3.up.weight"].std() > 0.1
    assert (expected["embedding.weight"][0] == 0).all() != tied  # the head's values, if tied

    def program() -> Any:
        sm.random.manual_seed(5)
        pipe = staged(make, axes, ranks, schedule, split)
        with sm.debug.comm_report() as report:
            pipe.materialize()
        assert not report.by_op or ranks < len(pipe.schedule.placement)  # copies on one rank
        own = {name: whole(x) for name, x in pipe.named_parameters()}
        tensors = {id(x): x for x in (*pipe.model.parameters(), *pipe.parameters())}
        held = sum(getattr(x, "_local", x).numel() for x in tensors.values() if not x.is_meta)
        ids = torch.arange(8).reshape(4, 2)
        loss = pipe.step(ids, ids, loss_fn=F.cross_entropy).item()
        copies = [
            whole(x)
            for stage in pipe.stages.values()
            for name, x in stage.named_parameters()
            if stage.model_names[name] == "embedding.weight"
        ]
        return own, values(pipe), held, loss, copies, sm.random.get_rng_state()

    results = sm.simulate(ranks * 2 ** len(axes))(program)()
    total = sum(x.numel() for x in expected.values())
    losses = {loss for *_, loss, _, _ in results}
    assert max(losses) - min(losses) < 1e-6
    for own, everything, held, _, copies, state in results:
        assert len(everything) < len(expected) or ranks == 1
        for name, x in (*own.items(), *everything.items()):
            assert torch.equal(x, expected[name]), name
        assert ranks == 1 or held < total
        assert all(torch.equal(x, expected["embedding.weight"]) for x in copies)
        assert torch.equal(state, results[0][-1])


def test_an_initialiser_of_the_program():
    def init(module: nn.Module) -> None:
        for x in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            x.uniform_()

    expected = without_pipeline(Model, init)

    def program() -> dict[str, Tensor]:
        sm.random.manual_seed(5)
        pipe = staged(Model, ("fsdp",), 2, "1f1b", ["blocks.2"])
        pipe.materialize(init)
        return {name: whole(x) for name, x in pipe.named_parameters()}

    for own in sm.simulate(4)(program)():
        assert all(torch.equal(x, expected[name]) for name, x in own.items())


def test_an_initialiser_that_draws_again_what_is_out_of_bounds():
    """How often depends on values, which other stages do not have."""

    def init(module: nn.Module) -> None:
        for x in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            nn.init.trunc_normal_(x, std=2.0)

    expected = without_pipeline(Model, init)
    assert max(float(x.abs().max()) for x in expected.values()) <= 2

    def program() -> tuple[dict[str, Tensor], Tensor]:
        sm.random.manual_seed(5)
        pipe = staged(Model, ("fsdp",), 2, "1f1b", ["blocks.2"])
        pipe.materialize(init)
        own = {name: whole(x) for name, x in pipe.named_parameters()}
        return own, sm.random.get_rng_state()

    results = sm.simulate(4)(program)()
    for own, state in results:
        assert all(torch.equal(x, expected[name]) for name, x in own.items())
        assert torch.equal(state, results[0][1])


def test_tensors_that_have_values_keep_them():
    """Here those of one block; its initialisers do not run, and draw no numbers."""

    def make() -> Model:
        model = Model()
        with torch.device("cpu"):
            model.blocks[1] = Block()
            for x in model.blocks[1].parameters():
                nn.init.constant_(x, 0.25)
        return model

    expected = without_pipeline(make)
    assert (expected["blocks.1.up.weight"] == 0.25).all()

    def program(split: list[str]) -> dict[str, Tensor]:
        sm.random.manual_seed(5)
        pipe = staged(make, (), 2, "1f1b", split)
        pipe.materialize()
        return {name: whole(x) for name, x in pipe.named_parameters()}

    for split in (["blocks.1"], ["blocks.2"]):
        for own in sm.simulate(2)(program)(split):
            assert all(torch.equal(x, expected[name]) for name, x in own.items())


class NoReset(nn.Module):
    """Has a parameter, and no initialiser."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.empty(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gain


class ForgetsBias(nn.Linear):
    """Does not initialise its bias."""

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)


@pytest.mark.parametrize(
    ("make", "text"),
    [(NoReset, "of 1 (NoReset)"), (lambda: ForgetsBias(WIDTH, WIDTH), "no initialiser writes 1.b")],
)
def test_errors_are_the_same_on_all_ranks(make, text):
    def program() -> str:
        mesh = sm.init_device_mesh("cpu", (3,), axis_names=("pp",))
        model = on_meta(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), make(), nn.Tanh(), Block()))
        pipe = pipeline(model, mesh, split=["1", "3"])
        with pytest.raises(ValueError, match="meta") as raised:
            pipe.materialize()
        return str(raised.value)

    texts = sm.simulate(3)(program)()
    assert len(set(texts)) == 1
    assert text in texts[0]


_SIZES: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
_GPT2 = {"vocab_size": 32, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 8}
_T5 = {"vocab_size": 32, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_heads": 2, "num_layers": 1}
_MOE = {**_SIZES, "moe_intermediate_size": 8, "num_experts": 4, "num_experts_per_tok": 2}


@pytest.mark.parametrize(
    ("kind", "config", "sizes", "split"),
    [
        ("GPT2LMHeadModel", "GPT2Config", _GPT2, "transformer.h.1"),  # tied
        slow("LlamaForCausalLM", "LlamaConfig", _SIZES, "model.layers.1"),
        slow("Qwen2MoeForCausalLM", "Qwen2MoeConfig", _MOE, "model.layers.1"),
        slow("T5ForConditionalGeneration", "T5Config", _T5, "decoder.block.0"),
    ],
)
def test_models_of_transformers(kind, config, sizes, split):
    transformers = pytest.importorskip("transformers")

    def make() -> nn.Module:
        return getattr(transformers, kind)(getattr(transformers, config)(**sizes))

    expected = without_pipeline(make)

    def program() -> Any:
        sm.random.manual_seed(5)
        mesh = sm.init_device_mesh("cpu", (2, 2), axis_names=("pp", "fsdp"))
        pipe = pipeline(on_meta(make), mesh, split=[split])
        pipe.fully_shard(mesh["fsdp"])
        pipe.materialize()
        buffers = {
            name: whole(x) for stage in pipe.stages.values() for name, x in stage.named_buffers()
        }
        return {name: whole(x) for name, x in pipe.named_parameters()}, buffers

    for own, buffers in sm.simulate(4)(program)():
        assert all(torch.equal(x, expected[name]) for name, x in own.items())
        assert all(torch.isfinite(x).all() for x in buffers.values())
