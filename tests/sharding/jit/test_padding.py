"""Models of transformers, whose code reads the padding mask, on batches with and without padding in
turn.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import shardmesh as sm
from shardmesh import P
from shardmesh.mesh.comm.current_world import current_world
from shardmesh.parallel import colwise, rowwise
from tests.device import DEVICE
from tests.sharding.jit.steps import runs
from tests.sharding.parallel.compositions import whole
from tests.tiers import slow

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
}
BERT = {f"*.{name}": colwise() for name in ("query", "key", "value", "intermediate.dense")}
BERT |= {"bert.encoder.layer.*.output.dense": rowwise()}
STEPS = 6


def model_of(name: str) -> Any:
    torch.manual_seed(0)
    if name == "llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    config = transformers.BertConfig(
        **SIZES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    )
    return transformers.BertForMaskedLM(config)


def layer_of(model: Any) -> type:
    return type(model.model.layers[0] if hasattr(model, "model") else model.bert.encoder.layer[0])


def parallel(model: Any, shape: tuple[int, ...], how: str) -> sm.DeviceMesh:
    names = {"fsdp": ("dp",), "tp": ("tp",), "fsdp+tp": ("dp", "tp")}[how]
    mesh = sm.init_device_mesh(DEVICE, shape, axis_names=names)
    if "tp" in how:
        plan = "auto" if hasattr(model, "model") else BERT
        sm.parallel.parallelize(model, mesh, plan, src_data_rank=None)
    if "fsdp" in how:
        sm.parallel.fully_shard(model, mesh, axes="dp", units=layer_of(model), src_data_rank=None)
    return mesh


def batch_of(i: int, padded: bool, rows: int = 4) -> dict[str, Tensor]:
    ids = torch.randint(1, 32, (rows, 6), generator=torch.Generator().manual_seed(i))
    mask = torch.ones_like(ids)
    if padded:
        mask[0, 4:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids}


def trained(
    name: str, shape: tuple[int, ...], how: str, data: str, jitted: bool
) -> tuple[list[float], list[Tensor], int, int]:
    """Train on batches of which every other is padded; of plain rows each rank's in other steps."""
    model = model_of(name)
    mesh = parallel(model, shape, how)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch: dict[str, Any]) -> Any:
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    f = sm.jit(step, backend="eager") if jitted else step
    losses = []
    rank = current_world().rank
    for i in range(STEPS):
        if data == "plain":
            padded = i % (rank + 2) == 0
            batch: dict[str, Any] = batch_of(10 * i + rank, padded, 2)
        else:
            spec = P("dp") if "dp" in mesh.axis_names else P()
            whole_batch = batch_of(i, i % 2 == 1)
            batch = {
                key: sm.device_put(x, mesh, spec, src_data_rank=None)
                for key, x in whole_batch.items()
            }
        losses.append(whole(f(batch)).item())
    recorded = len(f.recorded) if jitted else 0
    return losses, [whole(p) for p in model.parameters()], recorded, runs(f)


CASES = [
    ("llama", (2,), "fsdp", "plain"),
    slow(("llama", (2, 2), "fsdp+tp", "sharded")),
    slow(("bert", (2,), "fsdp", "sharded")),
    ("bert", (2,), "tp", "sharded"),
    slow(("llama", (2,), "fsdp", "sharded")),
    slow(("llama", (2,), "tp", "sharded")),
    slow(("bert", (2,), "fsdp", "plain")),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_batches_with_and_without_padding(case: Any) -> None:
    run = sm.simulate(math.prod(case[1]))(trained)
    for found, expected in zip(run(*case, True), run(*case, False), strict=True):
        assert found[0] == expected[0]
        assert all(map(torch.equal, found[1], expected[1]))
        assert found[2] == 2
        assert found[3] >= 2


@pytest.mark.parametrize("data", ["plain", "sharded"])
def test_a_model_on_batches_with_and_without_padding(
    data: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The loss and `backward` are outside of the model's graphs. A rank's own mask selects one; for
    a sharded mask the ranks would have to exchange something, and the model runs in parts.
    """

    def main(jitted: bool) -> Any:
        model = model_of("llama")
        model.config.use_cache = False
        mesh = sm.init_device_mesh(DEVICE, (2,), axis_names=("dp",))
        sm.parallel.data_parallel(model, mesh, src_data_rank=None)
        called = sm.jit(model, backend="eager") if jitted else model
        losses = []
        for i in range(STEPS):
            rank = current_world().rank
            batch: dict[str, Any] = batch_of(10 * i + rank, i % (rank + 2) == 1, 2)
            if data == "sharded":
                batch = {
                    key: sm.device_put(x, mesh, P("dp"), src_data_rank=None)
                    for key, x in batch_of(i, i % 2 == 1).items()
                }
            loss = called(**batch).loss
            loss.backward()
            losses.append(whole(loss.detach()).item())
        names = [x.name for x in called._parts[current_world()].joined.values()] if jitted else []
        return losses, [p.grad for p in model.parameters()], names

    eager, results = (sm.simulate(2)(main)(jitted) for jitted in (False, True))
    for found, expected in zip(results, eager, strict=True):
        assert found[0] == expected[0]
        assert all(map(torch.equal, map(whole, found[1]), map(whole, expected[1])))
        whole_model = ["LlamaForCausalLM"]
        assert found[2] == (whole_model if data == "plain" else ["LlamaDecoderLayer"])
    assert ("a value is read" in caplog.text) == (data == "sharded")
