"""Models that `tune` takes besides causal language models of transformers, and what they return."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import partial, reduce
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardmesh as sm
from shardmesh.sharding.tune.description import Description
from tests.sharding.tune.tiny import transformers

tune = partial(sm.tune, devices=4, check=0)
SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
}


def on_meta(make: Any) -> Any:
    with torch.device("meta"):
        return make()


def ids(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.int64, device="meta")


def bert() -> Any:
    config = transformers.BertConfig(vocab_size=64, **SIZES)
    return on_meta(lambda: transformers.BertForMaskedLM(config))


def vit() -> Any:
    config = transformers.ViTConfig(image_size=16, patch_size=4, num_labels=6, **SIZES)
    return on_meta(lambda: transformers.ViTForImageClassification(config))


class Mixer(nn.Module):
    """Images to classes, without a configuration."""

    class Block(nn.Module):
        def __init__(self, tokens: int, width: int) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(width)
            self.of_tokens, self.of_channels = nn.Linear(tokens, tokens), nn.Linear(width, width)

        def forward(self, x: Tensor) -> Tensor:
            x = x + F.gelu(self.of_tokens(self.norm(x).transpose(1, 2))).transpose(1, 2)
            return x + F.gelu(self.of_channels(x))

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 32, 4, 4)
        self.blocks = nn.ModuleList(Mixer.Block(16, 32) for _ in range(4))
        self.head = nn.Linear(32, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


class GPT(nn.Module):
    """Ids, and perhaps targets, to a tuple of logits and loss, without a configuration."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(64, 32), nn.Embedding(32, 32)
        self.h = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)) for _ in range(4)
        )
        self.head = nn.Linear(32, 64, bias=False)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        x = self.tokens(idx) + self.positions(torch.arange(idx.shape[1], device=idx.device))
        for layer in self.h:
            x = x + layer(x)
        logits = self.head(x)
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def losses(program: str, make: Any, devices: int, steps: int = 2) -> list[float]:
    """Run a program in float32, and return its losses."""
    names: dict[str, Any] = {"__name__": "train", "make": make}
    text = program.replace("torch.bfloat16", "torch.float32")
    exec(compile(text, "train.py", "exec"), names)

    def run() -> list[float]:
        sm.random.manual_seed(0)
        values = names["main"](device="cpu", steps=steps)
        return [float(x.full_tensor() if isinstance(x, sm.ShardedTensor) else x) for x in values]

    return sm.simulate(devices)(run)()[0]


@pytest.mark.parametrize(
    ("make", "batch", "fix"),
    [
        (bert, ids(8, 16), {"fsdp": 2, "tp": 2, "pp": 1}),
        (vit, torch.empty(8, 3, 16, 16, device="meta"), {"fsdp": 4, "pp": 1, "recompute": "full"}),
        (vit, torch.empty(8, 3, 16, 16, device="meta"), {"pp": 2, "fsdp": 2}),
        (Mixer, torch.empty(8, 3, 16, 16, device="meta"), {"pp": 2, "fsdp": 2}),
        (GPT, ids(8, 16), {"pp": 2, "tp": 2}),
        (GPT, ids(8, 16), {"dp": 2, "tp": 2}),  # positions are plain tensors
    ],
)
def test_programs_are_evaluated_and_run(make, batch, fix):
    build = "def build():\n    return make()"

    def model() -> Any:
        return on_meta(make)

    tuning = tune(model(), batch, fix=fix, build=build, check=1)
    checked = tuning.best.checked
    assert checked is not None
    assert not checked.why_not
    one = tune(model(), batch, devices=1, build=build)
    expected = losses(one.program, model, 1)
    assert losses(tuning.program, model, 4) == pytest.approx(expected, rel=1e-3)


def test_the_embeddings_of_bert_are_no_block():
    """Its _no_split_modules names them, too; programs make units of blocks alone."""
    described = Description(bert(), ids(8, 16))
    assert (described.blocks, described.layers) == ("bert.encoder.layer", 2)
    assert described.units == ("BertLayer",)
    assert 'units="BertLayer"' in tune(bert(), ids(8, 16)).program


def test_a_plan_is_proposed_for_a_batch_with_a_mask():
    """Whether the mask has padding is asked of a tensor that is on a mesh."""
    batch = {"input_ids": ids(8, 16), "attention_mask": ids(8, 16), "labels": ids(8, 16)}
    assert tune(bert(), batch, fix={"tp": 2, "pp": 1}).best.form.tp == 2


@pytest.mark.parametrize(
    ("make", "batch"),
    [
        (bert, {"input_ids": ids(8, 16), "labels": ids(8, 16)}),
        (GPT, (ids(8, 16), ids(8, 16))),
        (GPT, {"idx": ids(8, 16), "targets": ids(8, 16)}),
    ],
)
def test_the_loss_that_a_model_returns(make, batch):
    """It is the default, so it is not computed twice."""

    def own_loss(output: Any, batch: Any) -> Tensor:
        return output[1] if isinstance(output, tuple) else output.loss

    fix = {"pp": 1, "tp": 1}
    default = tune(on_meta(make), batch, fix=fix).best
    assert default.time == tune(on_meta(make), batch, fix=fix, loss=own_loss).best.time


def test_an_encoder_and_a_decoder():
    config = transformers.T5Config(
        vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=2, decoder_start_token_id=0
    )
    model = on_meta(lambda: transformers.T5ForConditionalGeneration(config))
    message = (
        "tune: T5ForConditionalGeneration has 2 lists of blocks, encoder.block (2) and "
        "decoder.block (2); tune takes models whose blocks repeat in one list"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        tune(model, {"input_ids": ids(8, 16), "labels": ids(8, 16)})


class Stack(nn.Module):
    """Linear layers as blocks, called in a way of its own, with an output of its own."""

    def __init__(self, run: Callable[[nn.ModuleList, Tensor], Any]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.run = run

    def forward(self, x: Tensor) -> Any:
        return self.run(self.layers, x)


def in_order(layers: Iterable[Any], x: Tensor) -> Tensor:
    return reduce(lambda x, layer: layer(x), layers, x)


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (
            lambda layers, x: reduce(lambda x, y: F.linear(x, y.weight), layers, x),
            "tune: forward of Stack does not call each block of layers; what",
        ),
        (
            lambda layers, x: in_order(layers[:-1], x) + x,
            "does not call each block of layers; what",
        ),
        (lambda layers, x: SimpleNamespace(hidden=in_order(layers, x)), "the model returns namesp"),
        (lambda layers, x: in_order(layers, x).argmax(-1), "pass loss=, a function of output and"),
    ],
    ids=["weights of blocks", "some blocks", "no tensor", "indices"],
)
def test_models_that_cannot_be_counted(run, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        tune(on_meta(lambda: Stack(run)), torch.empty(8, 8, device="meta"), fix={"tp": 1})


def test_results_besides_indices():
    """The loss is that of the first result in floating point."""

    def run(layers: nn.ModuleList, x: Tensor) -> Any:
        x = in_order(layers, x)
        return x.argmax(-1), x

    batch = torch.empty(8, 8, device="meta")
    costs = [
        Description(on_meta(lambda run=run: Stack(run)), batch).costs(1) for run in (run, in_order)
    ]
    assert costs[0].block == costs[1].block
