"""Masks of attention through a pipeline: flex attention's block masks, and tensors of 4 dims."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import flex_attention as flex

import shardmesh as sm
from shardmesh import P
from shardmesh.parallel import pipeline
from shardmesh.sharding.ops.block_masks import closed_over
from shardmesh.sharding.parallel.pipeline.stages.recording import Operator, record
from shardmesh.sharding.parallel.pipeline.stages.skeleton import on_meta
from tests.sharding.ranks import same_error
from tests.tiers import slow

pytestmark = pytest.mark.filterwarnings("ignore:.*flex_attention called without torch.compile.*")

ROWS, LENGTH, WIDTH, HEADS, VOCABULARY = 8, 16, 16, 2, 20
Mask = Any

_random = torch.Generator().manual_seed(1)
IDS, TARGETS = (torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=_random) for _ in range(2))
DOCUMENTS = torch.randint(0, 2, (ROWS, LENGTH), generator=_random).cumsum(1)


def dense(query: Tensor, key: Tensor, value: Tensor, block_mask: Mask) -> Tensor:
    """Compute attention of a block mask with ordinary operators."""
    scores = query @ key.transpose(-2, -1) * query.shape[-1] ** -0.5
    positions = torch.meshgrid(*map(torch.arange, scores.shape), indexing="ij")
    scores = scores.masked_fill(~block_mask.mask_mod(*positions), -torch.inf)
    return scores.softmax(-1) @ value


class Block(nn.Module):
    def __init__(self, attend: Callable[..., Any]) -> None:
        super().__init__()
        self.attend = attend
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Mask) -> Tensor:
        heads = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, WIDTH // HEADS))
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        attended = self.attend(query, key, value, block_mask=mask)
        return x + self.out(attended.transpose(1, 2).flatten(2))


class Model(nn.Module):
    """Attention by a block mask; without one, by a mask that it makes of its embeddings."""

    def __init__(self, attend: Callable[..., Any]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block(attend) for _ in range(4)])
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor, block_mask: Mask = None) -> Tensor:
        x = self.embedding(ids)
        if block_mask is None:
            block_mask = mask_of((x.detach().mean(-1) > 0).long())
        for block in self.blocks:
            x = block(x, block_mask)
        return self.head(x).transpose(1, 2)


def make_model(attend: Callable[..., Any]) -> Model:
    torch.manual_seed(0)
    return Model(attend).double()


def mask_of(documents: Tensor | None) -> Mask:
    """Return a causal mask, of documents that do not see each other."""

    def visible(b: Any, h: Any, q: Any, kv: Any) -> Any:
        if documents is None:
            return q >= kv
        return (q >= kv) & (documents[b, q] == documents[b, kv])

    batch = None if documents is None else len(documents)
    return flex.create_block_mask(visible, batch, None, LENGTH, LENGTH, "cpu", BLOCK_SIZE=8)


MASKS: dict[str, Callable[[], tuple[Any, Mask]]] = {  # for the pipeline, and for one process
    "the same for all rows": lambda: (mask_of(None), mask_of(None)),
    "of the batch": lambda: (mask_of(DOCUMENTS), mask_of(DOCUMENTS)),
    "a list": lambda: ([mask_of(part) for part in DOCUMENTS.split([3, 5])], mask_of(DOCUMENTS)),
    "made of a unit's output": lambda: (None, None),
}


def one_process(mask: Mask) -> tuple[float, dict[str, Tensor]]:
    model = make_model(dense)
    loss = F.cross_entropy(model(IDS, mask), TARGETS)
    loss.backward()
    return float(loss.detach()), {
        n: x.grad for n, x in model.named_parameters() if x.grad is not None
    }


def assert_one_process(results: list[tuple[float, dict[str, Tensor]]], mask: Mask) -> None:
    expected, grads = one_process(mask)
    seen: set[str] = set()
    for loss, own_grads in results:
        assert loss == pytest.approx(expected, abs=1e-12)
        for name, grad in own_grads.items():
            torch.testing.assert_close(grad, grads[name], rtol=0, atol=1e-12)
        seen |= own_grads.keys()
    assert seen == grads.keys()


def whole(x: Any) -> Tensor:
    return x.full_tensor() if isinstance(x, sm.ShardedTensor) else x


@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        ("the same for all rows", "1f1b"),
        slow("the same for all rows", "zb_h1"),
        slow("of the batch", "1f1b"),
        ("of the batch", "zb_h1"),
        ("a list", "1f1b"),
        ("made of a unit's output", "1f1b"),
        slow("made of a unit's output", "zb_h1"),
    ],
)
def test_equals_one_process(name: str, schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU torch's function refuses gradients, though what it calls there has them.

    It runs as Python, as in worlds with a dispatch mode; compiled below.
    """
    monkeypatch.setattr(flex, "_validate_device", lambda *_: None)

    def program() -> tuple[float, dict[str, Tensor]]:
        mesh = sm.init_device_mesh("cpu", (2,), axis_names=("pp",))
        model = make_model(flex.flex_attention)
        pipe = pipeline(model, mesh, split=["blocks.2"], schedule=schedule, microbatches=2)
        cut = [3, 5] if name == "a list" else [4, 4]
        ids, targets = list(IDS.split(cut)), list(TARGETS.split(cut))
        if name != "a list":
            ids, targets = IDS, TARGETS
        loss = torch.zeros(())
        for _ in range(2):  # each with a mask of its own
            for x in pipe.parameters():
                x.grad = None
            mask = MASKS[name]()[0]
            loss = pipe.step(ids, targets, loss_fn=F.cross_entropy, block_mask=mask)
        # the forward has been recorded for shapes, not for masks
        assert len(pipe._staged._dependencies) == len(set(cut))
        return loss.item(), {n: x.grad for n, x in pipe.named_parameters() if x.grad is not None}

    with torch.compiler.set_stance("force_eager"):
        results = sm.simulate(2)(program)()
    assert_one_process(results, MASKS[name]()[1])


def test_results_of_compiled_flex_attention() -> None:
    compiled = torch.compile(flex.flex_attention, backend="eager", fullgraph=True)
    mask = mask_of(DOCUMENTS)
    with torch.no_grad():
        expected = make_model(dense)(IDS, mask)

    def program() -> list[Tensor] | None:
        mesh = sm.init_device_mesh("cpu", (2,), axis_names=("pp",))
        pipe = pipeline(make_model(compiled), mesh, split=["blocks.2"], microbatches=4)
        return pipe.forward(IDS, block_mask=mask)

    results = sm.simulate(2)(program)()[-1]
    assert results is not None
    torch.testing.assert_close(torch.cat(results), expected, rtol=0, atol=1e-12)


def test_rows_of_data_ranks_with_meshes_of_their_own() -> None:
    sizes = [{"dp": 1, "tp": 2}, {"dp": 2, "tp": 1}]
    mask = mask_of(DOCUMENTS)

    def program() -> tuple[float, dict[str, Tensor]]:
        mesh = sm.init_device_mesh("cpu", (2, 2), axis_names=("pp", "ranks"))
        pipe = pipeline(
            make_model(dense), mesh, split=["blocks.2"], microbatches=2, stage_meshes=sizes
        )
        pipe.fully_shard(pipe.stage_mesh["dp"])
        loss = pipe.step(IDS, TARGETS, loss_fn=F.cross_entropy, block_mask=mask)
        return loss.item(), {name: whole(x.grad) for name, x in pipe.named_parameters()}

    assert_one_process(sm.simulate(4)(program)(), mask)


@pytest.mark.parametrize("mask", [mask_of(DOCUMENTS[:3]), torch.ones(3, 1)])
def test_a_mask_of_another_batch(mask: Mask) -> None:
    def program(mesh: sm.DeviceMesh) -> None:
        pipe = pipeline(make_model(dense), mesh, axis="a", split=["blocks.2"], microbatches=2)
        pipe.step(IDS, TARGETS, loss_fn=F.cross_entropy, block_mask=mask)

    text = same_error((2,), program, ValueError)
    assert "block_mask has 3 rows, and the batch 8: give a list with one value for each" in text


def test_floating_point_operations() -> None:
    """By them "even" and "auto" divide a model."""
    mask = mask_of(DOCUMENTS)

    def flops(attend: Callable[..., Any]) -> int:
        skeleton = on_meta(make_model(attend))
        arguments = (IDS,), {"block_mask": mask}
        with torch.no_grad():  # on a CPU torch's function refuses gradients
            recording = record(skeleton, *arguments, lambda _: None, lambda _: False, True)
        return sum(event.flops for event in recording.events if isinstance(event, Operator))

    assert flops(flex.flex_attention) == flops(dense)


def test_a_mask_function_with_a_name_that_has_no_value() -> None:
    def make(documents: Tensor | None) -> Callable[..., Tensor]:
        if documents is not None:
            rows = documents.long()

        def visible(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            return q >= kv if documents is None else rows[b, q] == rows[b, kv]

        return visible

    assert closed_over(make(None)) == [None]
    assert [type(x) for x in closed_over(make(DOCUMENTS))] == [Tensor, Tensor]


# -- next to sharded inputs ------------------------------------------------------------------------


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return self.second(self.first(x).tanh() * scale)


@pytest.mark.parametrize("spec", [None, P(), P("dp"), P("tp"), P(("dp", "tp"))])
def test_rows_next_to_sharded_inputs_are_those_of_the_inputs(spec: P | None) -> None:
    """Microbatches of a sharded tensor are parts of each rank's rows."""
    torch.manual_seed(0)
    x, scale = torch.randn(16, 4).double(), torch.rand(16, 1).double()
    make = lambda: (torch.manual_seed(0), Scaled().double())[1]  # noqa: E731
    expected = F.mse_loss(make()(x, scale), x).item()

    def program() -> float:
        mesh = sm.init_device_mesh("cpu", (2, 2, 2), axis_names=("pp", "dp", "tp"))
        inner = mesh["dp", "tp"]
        pipe = pipeline(make(), mesh, split=["second"], microbatches=2)
        pipe.parallelize({}, inner)
        sharded = sm.device_put(x, inner, P("dp"))
        own = scale if spec is None else sm.device_put(scale, inner, spec)
        return pipe.step(sharded, sharded, loss_fn=F.mse_loss, scale=own).item()

    assert sm.simulate(8)(program)() == pytest.approx([expected] * 8, abs=1e-12)


@pytest.mark.parametrize("spec", [P("b"), P("b", sizes={"b": (2, 6)})])
def test_sharded_inputs_that_cannot_be_split_evenly(spec: P) -> None:
    def program(mesh: sm.DeviceMesh) -> None:
        pipe = pipeline(Scaled(), mesh, axis="a", split=["second"], microbatches=2)
        rows = 10 if spec == P("b") else 8
        x, scale = (sm.device_put(torch.zeros(rows, n), mesh["b"], spec) for n in (4, 1))
        pipe.step(x, x, loss_fn=F.mse_loss, scale=scale)

    text = same_error((2, 2), program, ValueError, silent=False)  # device_put communicates
    assert "rows over 2 ranks, which are not split evenly into 2 microbatches" in text


# -- transformers ----------------------------------------------------------------------------------


def visible_keys() -> Tensor:
    """Return a causal mask of 4 dims that hides padding; each row sees itself."""
    tokens = torch.ones(4, LENGTH, dtype=torch.bool)
    tokens[0, :2] = tokens[3, :5] = False
    causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    return causal & tokens[:, None, None] | torch.eye(LENGTH, dtype=torch.bool)


def llama(attention: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=WIDTH,
            intermediate_size=24,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            attn_implementation=attention,
        )
        return transformers.LlamaForCausalLM(config).double()


def forward_of_llama(attention: str, mask: Mask) -> Tensor:
    """Return logits of two stages."""

    def program() -> list[Any] | None:
        mesh = sm.init_device_mesh("cpu", (2,), axis_names=("pp",))
        pipe = pipeline(llama(attention), mesh, split=["model.layers.2"], microbatches=2)
        return pipe.forward(IDS[:4], attention_mask=mask, use_cache=False)

    results = sm.simulate(2)(program)()[-1]
    assert results is not None
    return torch.cat([result.logits for result in results])


@pytest.mark.parametrize("attention", ["sdpa", "eager", "flex_attention"])
@pytest.mark.parametrize("rows", [4, 1])
def test_masks_of_transformers(attention: str, rows: int) -> None:
    """Compiled code runs as Python here: its compilation for a CPU takes half a minute."""
    keys = visible_keys()[-rows:]
    mask: Mask = keys
    if attention == "flex_attention":
        batch = None if rows == 1 else rows
        mask = flex.create_block_mask(
            lambda b, h, q, kv: keys[b % rows, 0, q, kv], batch, None, LENGTH, LENGTH, "cpu"
        )
    elif attention == "eager":
        mask = torch.zeros(keys.shape, dtype=torch.double).masked_fill(~keys, -torch.inf)
    with torch.compiler.set_stance("force_eager"):
        with torch.no_grad():
            model = llama("eager" if attention == "eager" else "sdpa")
            whole_mask = mask if attention == "eager" else keys
            expected = model(IDS[:4], attention_mask=whole_mask, use_cache=False).logits
        logits = forward_of_llama(attention, mask)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-12)


def test_flex_attention_of_transformers_reads_values_of_a_mask_of_two_dims() -> None:
    def program(mesh: sm.DeviceMesh) -> None:
        model = llama("flex_attention")
        pipe = pipeline(model, mesh, axis="a", split=["model.layers.2"], microbatches=2)
        mask = torch.ones_like(IDS)
        pipe.forward(IDS, attention_mask=mask, use_cache=False)

    text = same_error((2,), program, RuntimeError, silent=False)  # the calls are compared first
    assert "this line reads values of a tensor" in text
    assert "masking_utils.py" in text
