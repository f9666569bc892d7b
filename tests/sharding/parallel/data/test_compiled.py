"""`torch.compile` of blocks, leaf modules and whole models under data parallelism."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import shardmesh as sm
from shardmesh import P
from shardmesh.parallel import data_parallel, fully_shard
from shardmesh.sharding.parallel.data.unit import units_in
from tests.sharding.parallel.models import ResidualMLP
from tests.sharding.ranks import on_mesh

FORMS = {
    "fsdp": lambda m, mesh: fully_shard(m, mesh, units=ResidualMLP),
    "each": lambda m, mesh: fully_shard(_each(m, mesh), mesh),
    "ddp": lambda m, mesh: data_parallel(m, mesh, units=ResidualMLP),
    "zero1": lambda m, mesh: data_parallel(m, mesh, optimizer="a", units=ResidualMLP),
}


class Tail(nn.Module):
    def __init__(self, width: int = 7) -> None:
        super().__init__()
        self.out = nn.Linear(width, 3)

    def forward(self, x):
        return self.out(x).square()


def _each(model, mesh):
    for block in model[:-1]:
        fully_shard(block, mesh)
    return model


def _in_place(model, backend, full):
    for block in model[:-1]:
        block.compile(backend=backend, fullgraph=full)
    return model


def _wrapped(model, backend, full):
    for i in range(len(model) - 1):
        model[i] = torch.compile(model[i], backend=backend, fullgraph=full)
    return model


def _leaves(model, backend, full):
    for block in model[:-1]:
        block.up.compile(backend=backend)
        block.down = torch.compile(block.down, backend=backend, fullgraph=full)
    return model


def _whole(model, backend, full):
    model.compile(backend=backend)
    return model


HOW = {
    "block.compile()": _in_place,
    "torch.compile(block)": _wrapped,
    "leaves": _leaves,
    "model.compile()": _whole,
}


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def model():
    torch.manual_seed(0)
    return nn.Sequential(*(ResidualMLP(7, 9) for _ in range(3)), Tail()).double()


def check_steps(made, mesh, rows, steps=3):
    """Train, and compare gradients with one process at every step."""
    plain, x = model(), torch.randn(8, 7, dtype=torch.float64)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (made, plain)]
    for _ in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        given = (
            x.chunk(mesh.size())[mesh.get_rank()]
            if rows == "plain"
            else sm.device_put(x, mesh, P("a"))
        )
        ours, theirs = made(given).mean(), plain(x).mean()
        ours.backward()
        theirs.backward()
        for (name, p), q in zip(made.named_parameters(), plain.parameters(), strict=True):
            assert p.grad is not None, name
            torch.testing.assert_close(
                p.grad.full_tensor(), q.grad, rtol=1e-12, atol=1e-14, msg=name
            )
        for optimizer in optimizers:
            optimizer.step()


def counting(sizes):
    def backend(graph, inputs):
        sizes.append(
            len([node for node in graph.graph.nodes if node.op in ("call_function", "call_method")])
        )
        return graph.forward

    return backend


@pytest.mark.one_in(7, each=["how", "order", "form"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("how", HOW)
def test_gradients_equal_one_process(how, order, form):
    def main(mesh):
        sizes = []
        steps = [lambda m: HOW[how](m, counting(sizes), False), lambda m: FORMS[form](m, mesh)]
        made = model()
        for step in steps if order == "before" else reversed(steps):
            made = step(made)
        check_steps(made, mesh, "plain")
        return sizes

    sizes = on_mesh((2,), main)
    if how != "leaves":
        assert max(map(max, sizes)) >= 5, "a block is one graph"


@pytest.mark.one_in(4)
@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("how", ["block.compile()", "torch.compile(block)"])
def test_blocks_are_full_graphs(how, order):
    """Parameters are gathered outside of the compiled graph."""

    def main(mesh):
        sizes = []
        made = model() if order == "after" else HOW[how](model(), counting(sizes), True)
        made = fully_shard(made, mesh, units=ResidualMLP)
        made = made if order == "before" else HOW[how](made, counting(sizes), True)
        check_steps(made, mesh, "plain", steps=1)
        first = len(sizes)
        check_steps_again(made, mesh)
        assert len(sizes) == first, "another step compiles nothing"
        return first

    assert max(on_mesh((2,), main)) > 0


@pytest.mark.parametrize("full", [False, True])
def test_layers_of_torch_compiled_before(full):
    """Dynamo skips frames of torch.nn unless the call of the wrapped module is inlined."""

    def main(mesh):
        sizes = []
        layers = [
            nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True) for _ in range(2)
        ]
        made = nn.Sequential(
            *(torch.compile(layer, backend=counting(sizes), fullgraph=full) for layer in layers)
        )
        fully_shard(made, mesh, units=nn.TransformerEncoderLayer)
        made(torch.randn(2, 5, 8)).sum().backward()
        return max(sizes, default=0)

    assert max(on_mesh((2,), main)) >= 10


def check_steps_again(made, mesh):
    x = torch.randn(8, 7, dtype=torch.float64).chunk(mesh.size())[mesh.get_rank()]
    for _ in range(2):
        made(x).mean().backward()


@pytest.mark.parametrize("how", ["block.compile()", "torch.compile(block)", "model.compile()"])
def test_sharded_rows_run_eagerly(how):
    def main(mesh):
        made = fully_shard(HOW[how](model(), "eager", False), mesh, units=ResidualMLP)
        check_steps(made, mesh, "sharded", steps=2)

    on_mesh((2,), main)


_GATHERED = r"fully_shard and data_parallel gather a unit's parameters here[^$]*sm\.jit\(step\)"


def test_fullgraph_of_the_whole_model_names_the_graph_break():
    def main(mesh):
        made = torch.compile(
            fully_shard(model(), mesh, units=ResidualMLP), backend="eager", fullgraph=True
        )
        with pytest.raises(torch._dynamo.exc.Unsupported, match=_GATHERED):
            made(torch.randn(2, 7, dtype=torch.float64))

    on_mesh((2,), main)


def test_gathered_parameters_are_not_kept_for_backward():
    """AOTAutograd saves what autograd would: references into the gathered buffers."""

    def main(mesh):
        made = _in_place(fully_shard(model(), mesh, units=ResidualMLP), "aot_eager", True)
        x = torch.randn(4, 7, dtype=torch.float64)
        for _ in range(2):
            loss = made(x).mean()
            inner = units_in(made)[1:]
            assert all(unit.saved for unit in inner[1:])
            assert not any(
                bucket.storage.is_gathered for unit in inner for bucket in unit.plan.buckets
            )
            loss.backward()

    on_mesh((2,), main)


def test_a_compiled_block_after_an_exception():
    def main(mesh):
        made = _in_place(fully_shard(model(), mesh, units=ResidualMLP), "eager", True)
        with pytest.raises(Exception, match=r"shape|size"):
            made(torch.randn(2, 5, dtype=torch.float64))
        check_steps(made, mesh, "plain", steps=2)

    on_mesh((2,), main)


def test_copies_of_compiled_models_are_not_compiled():
    def main(mesh):
        made = _in_place(fully_shard(model(), mesh, units=ResidualMLP), "eager", True)
        check_steps(copy.deepcopy(made), mesh, "plain", steps=2)
        check_steps(made, mesh, "plain", steps=2)

    on_mesh((2,), main)


def test_inductor():
    def main(mesh):
        made = _in_place(fully_shard(model(), mesh, units=ResidualMLP), "inductor", True)
        check_steps(made, mesh, "plain", steps=2)

    on_mesh((2,), main)


# -- models of Hugging Face ------------------------------------------------------------------------


def _hugging_face(kind):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    if kind == "GPT2":
        sizes = {
            "n_embd": 16,
            "n_layer": 2,
            "n_head": 4,
            "n_positions": 16,
            "attn_pdrop": 0,
            "embd_pdrop": 0,
            "resid_pdrop": 0,
        }
        sizes |= {"bos_token_id": 0, "eos_token_id": 0}
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=32, **sizes))
        return model, model.transformer.h
    sizes = {
        "vocab_size": 32,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    config = getattr(transformers, f"{kind}Config")(
        **sizes, num_key_value_heads=2, max_position_embeddings=16
    )
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    return model, model.model.layers


@pytest.mark.one_in(12)
@pytest.mark.parametrize(
    ("how", "checkpointed"),
    [
        ("block.compile()", False),
        ("block.compile()", True),
        ("torch.compile(block)", False),
        ("model.compile()", False),
    ],
)
@pytest.mark.parametrize("kind", ["Llama", "GPT2", "Qwen2"])
def test_layers_of_hugging_face(kind, how, checkpointed):
    """Each decoder layer is one graph, but for one that is recomputed in backward; gradients are
    those of one process.
    """

    def main(mesh):
        (made, layers), (plain, _) = _hugging_face(kind), _hugging_face(kind)
        if checkpointed:
            made.gradient_checkpointing_enable(
                gradient_checkpointing_kwargs={"use_reentrant": False}
            )
        fully_shard(made, mesh, units=type(layers[0]))
        full = not checkpointed
        for i, layer in enumerate(layers):
            if how == "block.compile()":
                layer.compile(backend="aot_eager", fullgraph=full)
            elif how == "torch.compile(block)":
                layers[i] = torch.compile(layer, backend="aot_eager", fullgraph=full)
        if how == "model.compile()":
            made.compile(backend="eager")
        ids = torch.randint(0, 32, (4, 7), generator=torch.Generator().manual_seed(1))
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (made, plain)]
        for _ in range(2):
            losses = []
            for model, optimizer, rows in zip(
                (made, plain), optimizers, (ids.chunk(2)[mesh.get_rank()], ids), strict=True
            ):
                optimizer.zero_grad()
                losses.append(model(input_ids=rows, labels=rows, use_cache=False).loss)
                losses[-1].backward()
            for (name, p), q in zip(made.named_parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(
                    p.grad.full_tensor(), q.grad, rtol=1e-4, atol=1e-5, msg=name
                )
            for optimizer in optimizers:
                optimizer.step()

    on_mesh((2,), main)
