"""Hugging Face's Llama, GPT-2 and Mixtral, unmodified, with several forms of parallelism, compared
with one process.

Nothing says `implicit_replication`: masks and positions that the models make count as replicated.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

import shardmesh as sm
from tests.models.tiny import (
    IDS,
    MODELS,
    gpt2,
    loss_of,
    mesh_for,
    mixtral,
    model,
    qwen3_moe,
    rows,
    same,
    shard,
    train,
    whole,
)

EXACT = 1e-10
# Llama's norms and Mixtral's router round to float32 what tensor parallelism adds up in another
# order in float64.
TOLERANCES = {
    ("llama", "tp"): 1e-6,
    ("mixtral", "tp"): 1e-6,
    ("llama", "fsdp+tp"): 1e-6,
    ("mixtral", "fsdp+tp"): 1e-6,
}


@cache
def _expected(name):
    return train(model(name), IDS)


def _trained(name, form, sharded, checkpointing):
    mesh = mesh_for(form)
    made = model(name)
    if checkpointing:
        made.gradient_checkpointing_enable()
    return train(shard(name, made, mesh, form), rows(mesh, sharded))


@pytest.mark.one_in(5, each=["name", "form", "inputs"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    ("form", "inputs", "checkpointing"),
    [
        ("fsdp", "plain", False),
        ("fsdp", "sharded", True),
        ("tp", "sharded", False),
        ("tp", "plain", True),
        ("fsdp+tp", "sharded", False),
        ("fsdp+tp", "sharded", True),
        ("fsdp+tp", "plain", True),
    ],
)
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable.*:FutureWarning")
def test_training(name, form, inputs, checkpointing):
    expected = _expected(name)
    for found in sm.simulate(4)(_trained)(name, form, inputs == "sharded", checkpointing):
        same(
            found,
            expected,
            TOLERANCES.get((name, form), EXACT),
            skip_loss=inputs == "plain" and "fsdp" in form,
        )


@pytest.mark.slow  # four processes import transformers
def test_training_on_processes(world4):
    expected = _expected("llama")
    for found in world4(_trained, "llama", "fsdp+tp", True, False):
        same(found, expected, TOLERANCES["llama", "fsdp+tp"])


@pytest.mark.parametrize(
    ("name", "form"), [("llama", "fsdp+tp"), ("gpt2", "fsdp"), ("mixtral", "fsdp")]
)
def test_loss_of_the_model(name, form):
    """In float32, with partly padded labels and a padding mask."""
    labels, mask = IDS.clone(), torch.ones_like(IDS)
    labels[1, :3], mask[1, :3] = -100, 0

    def loss(made, ids, labels, mask):
        return made(input_ids=ids, labels=labels, attention_mask=mask, use_cache=False).loss

    def program():
        mesh = mesh_for(form)
        made = shard(name, model(name), mesh, form)
        placed = [sm.device_put(x, mesh, sm.P("fsdp")) for x in (IDS, labels, mask)]
        return train(made, placed, lambda m, batch: loss(m, *batch))

    expected = train(model(name), (IDS, labels, mask), lambda m, batch: loss(m, *batch))
    for found in sm.simulate(4)(program)():
        same(found, expected, 2e-6)


def test_dropout_is_equal_on_every_mesh():
    """Dropout masks use the library's random numbers, not plain tensors."""

    def program(form):
        mesh = mesh_for(form)
        torch.manual_seed(0)
        made = shard("gpt2", gpt2(resid_pdrop=0.5, embd_pdrop=0.5).double(), mesh, form)
        sm.random.manual_seed(1)
        return whole(loss_of(made, rows(mesh, True)))

    found = [loss for form in ("fsdp", "fsdp+tp") for loss in sm.simulate(4)(program)(form)]
    for loss in found[1:]:
        torch.testing.assert_close(loss, found[0], rtol=1e-10, atol=0)


def test_clipping_with_plain_inputs():
    """Gradients of parameters that tensor parallelism replicates are equal on all ranks."""

    def program():
        mesh = mesh_for("fsdp+tp")
        made = shard("llama", model("llama"), mesh, "fsdp+tp")
        loss_of(made, rows(mesh, False)).backward()
        return sm.training.clip_grad_norm_(made.parameters(), 1.0).item()

    made = model("llama")
    loss_of(made, IDS).backward()
    expected = torch.nn.utils.clip_grad_norm_(made.parameters(), 1.0).item()
    assert sm.simulate(4)(program)() == pytest.approx([expected] * 4, rel=1e-6)


@pytest.mark.parametrize("make", [mixtral, qwen3_moe])
@pytest.mark.filterwarnings("error:.*no sharding rule")
def test_experts_with_grouped_mm(make):
    """The models' own choice of kernel, which takes no float64; router losses count tokens over all
    ranks.
    """

    def made():
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            found = make(output_router_logits=True)
        found.config._experts_implementation = "grouped_mm"
        return found

    def program():
        mesh = mesh_for("fsdp")
        return train(shard("", made(), mesh, "fsdp"), rows(mesh, True), _loss_with_router)

    expected = train(made(), IDS, _loss_with_router)
    for found in sm.simulate(4)(program)():
        same(found, expected, 1e-5)


@pytest.mark.parametrize("padded", [False, True])
def test_load_balancing_loss_of_sharded_logits(padded):
    """transformers' own function: `histc` and `scatter_add_` into plain zeros; the padding mask is
    sharded like the tokens.
    """
    logits = torch.randn(16, 5, generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(8) < torch.tensor([[5], [8]])).long() if padded else None

    def loss_and_grad(x, mask):
        loss = load_balancing_loss_func((x, x * 2), 5, 2, mask)
        return loss, torch.autograd.grad(loss, x)[0]

    def program(spec):
        mesh = sm.init_device_mesh("cpu", (3,), axis_names=("dp",))
        x = sm.distribute_tensor(logits, mesh, spec, src_data_rank=None).requires_grad_()
        with sm.ops.implicit_replication():
            found = loss_and_grad(
                x,
                None
                if mask is None
                else sm.distribute_tensor(mask, mesh, spec, src_data_rank=None),
            )
        return [y.detach().full_tensor() for y in found]

    expected = [y.detach() for y in loss_and_grad(logits.clone().requires_grad_(), mask)]
    for spec in (sm.P("dp"), sm.P()):
        for found in sm.simulate(3)(program)(spec):
            torch.testing.assert_close(found, expected)


def _loss_with_router(made, ids):
    return made(input_ids=ids, labels=ids, use_cache=False).loss
