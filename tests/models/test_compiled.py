"""Hugging Face blocks under `torch.compile` with several forms of parallelism, compared with one
process.
"""

from __future__ import annotations

import pytest
import torch

import shardmesh as sm
from tests.models.tiny import IDS, mesh_for, model, rows, same, shard, train


def _blocks(made):
    return [inner for inner in made.modules() if type(inner).__name__ in made._no_split_modules]


def _trained(name, form, order, checkpointing, sharded):
    mesh, made, sizes = mesh_for(form), model(name), []

    def backend(graph, inputs):
        sizes.append(len(graph.graph.nodes))
        return graph.forward

    def compile_blocks(model):
        for block in _blocks(model):
            block.compile(backend=backend)
        return model

    if checkpointing:
        made.gradient_checkpointing_enable()
    if order == "before":
        made = compile_blocks(made)
    made = shard(name, made, mesh, form)
    if order == "after":
        made = compile_blocks(made)
    return train(made, rows(mesh, sharded)), sizes


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.one_in(5, each=["name", "inputs"])
@pytest.mark.parametrize(
    ("name", "form", "checkpointing", "inputs", "order"),
    [
        ("llama", "fsdp", False, "plain", "before"),
        ("llama", "fsdp", False, "plain", "after"),
        ("llama", "fsdp", True, "plain", "after"),
        ("llama", "fsdp", False, "sharded", "before"),
        ("llama", "tp", False, "sharded", "after"),
        ("llama", "fsdp+tp", False, "plain", "before"),
        ("gpt2", "fsdp", False, "plain", "after"),
    ],
)
@pytest.mark.one_in(4)
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable.*:FutureWarning")
def test_compiled_blocks(name, form, checkpointing, inputs, order):
    expected = train(model(name), IDS)
    tolerance = 1e-6 if name == "llama" and "tp" in form else 1e-10
    longest = 0
    for found, sizes in sm.simulate(4)(_trained)(
        name, form, order, checkpointing, inputs == "sharded"
    ):
        same(found, expected, tolerance, skip_loss=inputs == "plain" and "fsdp" in form)
        longest = max([longest, *sizes])
    if form == "fsdp" and inputs == "plain" and not checkpointing:
        assert longest >= 30, "a block is one graph"
