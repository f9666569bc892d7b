"""parallelize: a language model by plan only, compared with one process; its communication, and
what it leaves unchanged.
"""

from __future__ import annotations

import copy
from collections import Counter

import pytest
import torch
from torch import nn

import shardmesh as sm
from shardmesh import P
from shardmesh.sharding.parallel.tensor.plan import parallelize
from shardmesh.sharding.parallel.tensor.styles import (
    colwise,
    prepare_inputs,
    prepare_outputs,
    rowwise,
    shard_params,
)
from tests.device import DEVICE
from tests.sharding.parallel.models import Config, gpt, loss_of, tokens
from tests.sharding.parallel.plans import SPLIT, check_equal, expected, megatron, on_axes, step_on
from tests.sharding.ranks import collectives, launched, on_mesh

# Over 4 ranks: 3 3 3 1 heads, 63 63 63 61 features.
UNEVEN = {"heads": 10, "head_dim": 4, "d": 40, "f": 250, "vocabulary": 30}


CONFIGS = {
    "even": Config(),
    "uneven": Config(layers=1, **UNEVEN),
    "uneven, biases": Config(layers=1, bias=True, **UNEVEN),
    "grouped heads": Config(layers=1, heads=8, kv_heads=2, d=32),
    "uneven grouped heads": Config(layers=1, heads=6, kv_heads=3, d=24),
    "fewer heads than ranks": Config(layers=1, heads=3, kv_heads=1, d=12, f=6),
    "tied": Config(layers=1, tied=True),
}


@pytest.mark.one_in(5)
@pytest.mark.parametrize("stream", [P(), SPLIT], ids=["tp", "tp+sp"])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_step_equals_one_process(name, stream):
    config, s = CONFIGS[name], 7 if "uneven" in name else 8
    reference = expected(config, s=s)

    def program(mesh):
        model = parallelize(gpt(config), mesh, megatron(config, stream), src_data_rank=None)
        check_equal(step_on(mesh, model, s=s), model, reference)

    on_axes((4,), ("tp",), program)


@pytest.mark.parametrize(
    ("shape", "names"),
    [((2, 2), ("fsdp", "tp")), ((2, 1, 2), ("dp", "fsdp", "tp")), ((2, 2), ("tp", "dp"))],
)
def test_with_a_sharded_batch(shape, names):
    """Styles do not affect other axes: parameters are replicated along them, and activations stay
    sharded.
    """
    config = Config(layers=1, **UNEVEN)
    reference = expected(config, b=5, s=7)

    def program(mesh):
        model = parallelize(gpt(config), mesh, megatron(config, SPLIT), src_data_rank=None)
        assert model.layers[0].mlp.up_proj.weight.spec == P("tp", None)
        assert model.layers[0].mlp.down_proj.weight.spec == P(None, "tp")
        assert model.norm.weight.spec == P(None)
        check_equal(step_on(mesh, model, b=5, s=7), model, reference)

    on_axes(shape, names, program)


def test_parameter_may_be_sharded_further_over_the_data_axes():
    """As FSDP stores them: rows or columns of each tp part, sharded over other axes, also unevenly,
    as contiguous boxes.
    """
    config = Config(layers=1)
    reference = expected(config)

    def program(mesh):
        model = parallelize(gpt(config), mesh, megatron(config, SPLIT), src_data_rank=None)
        for name, p in list(model.named_parameters()):
            rows = ("tp", "fsdp") if "tp" in p.spec.dims[0] else "fsdp"
            cut = P(rows, *p.spec.dims[1:]) if p.ndim > 1 else P("fsdp", sizes={"fsdp": (16, 0)})
            owner, leaf = model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]
            sm.parallel.shard_parameter(owner, leaf, mesh, cut)
        check_equal(step_on(mesh, model), model, reference)

    on_axes((2, 2), ("fsdp", "tp"), program)


def train(mesh_shape, names) -> list[float]:
    """Return the losses of five AdamW steps, by plan on a mesh, or in one process if the mesh is
    None.
    """
    config = Config(layers=1, **UNEVEN)
    model = gpt(config).to(DEVICE)
    if mesh_shape is not None:
        mesh = sm.init_device_mesh(DEVICE, mesh_shape, axis_names=names)
        parallelize(model, mesh, megatron(config, SPLIT))
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=0.01), []
    for _ in range(5):
        optimizer.zero_grad()
        if mesh_shape is None:
            inputs_bs, targets_bs = tokens(4, 7, config.vocabulary)
            loss = loss_of(model(inputs_bs), targets_bs)
            loss.backward()
        else:
            loss = step_on(mesh, model, s=7)
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_training_on_processes_equals_one(world4):
    alone = train(None, ())
    for shape, names in [((4,), ("tp",)), ((2, 2), ("fsdp", "tp"))]:
        for losses in world4(train, shape, names):
            torch.testing.assert_close(losses, alone, rtol=1e-10, atol=0)


# -- what it communicates --------------------------------------------------------------------------


def test_calls_and_bytes_of_sequence_parallelism():
    """Per layer an all_gather before attention and one before the MLP, a reduce_scatter behind
    each; backward the mirror image. The embedding ends with a reduce_scatter, the head begins with
    an all_gather. Nothing else is of the size of activations.
    """
    config, b, s, n = Config(layers=3), 4, 8, 4

    def program(mesh):
        model = parallelize(gpt(config), mesh, megatron(config, SPLIT), src_data_rank=None)
        with collectives() as records:
            step_on(mesh, model, b, s)
        return records

    moves = 2 * config.layers + 1
    activation = b * s * config.d * 8 * (n - 1) // n  # bytes that a rank receives
    for records in on_axes((n,), ("tp",), program):
        large = [r for r in records if r.op != "all_reduce"]
        assert Counter(launched(large)) == {"all_gather": 2 * moves, "reduce_scatter": 2 * moves}
        assert {r.bytes_received for r in large} == {activation}


@pytest.mark.parametrize(
    ("head", "count"), [(colwise(out=P()), 1), (colwise(), 6)], ids=["whole logits", "split logits"]
)
def test_all_reduces_of_a_step(head, count):
    """With AdamW and 4 layers: the gradients of all 9 norms are reduced once, together, and that is
    all. A loss over split classes adds 5, of a number for each token. (DTensor takes 57: it leaves
    each norm's gradient pending, and AdamW reduces it three times.)
    """
    config, b, s, n = Config(layers=4), 4, 8, 4

    def program(mesh):
        model = parallelize(
            gpt(config), mesh, megatron(config, SPLIT) | {"lm_head": head}, src_data_rank=None
        )
        optimizer = torch.optim.AdamW(model.parameters())
        with collectives() as records:
            step_on(mesh, model, b, s)
            optimizer.step()
        return [r for r in records if r.op == "all_reduce"]

    norms = 9 * config.d * 8 * 2 * (n - 1) // n  # bytes that a rank receives
    for reduced in on_axes((n,), ("tp",), program):
        assert len(reduced) == count
        assert reduced[-1].bytes_received == norms
        assert all(r.bytes_received <= (b * s * 8 + 8) * 2 * (n - 1) // n for r in reduced[:-1])


def test_vocabulary_parallel_embedding_and_loss_do_not_move_logits():
    """Tables and logits stay sharded by vocabulary: communication does not grow with it."""

    def program(mesh, vocabulary):
        config = Config(layers=0, vocabulary=vocabulary)
        model = parallelize(
            gpt(config), mesh, {"embed_tokens": rowwise(), "lm_head": colwise()}, src_data_rank=None
        )
        with sm.debug.comm_budget() as used:
            step_on(mesh, model)
        assert model.lm_head.weight.grad.spec == P("tp", None)
        return used.bytes_received

    small, large = (on_axes((4,), ("tp",), lambda mesh, v=v: program(mesh, v)) for v in (32, 1024))
    assert small == large
    assert large[0] < 4 * 8 * 1024 * 8 // 4  # less than a rank's part of the logits alone


def test_inputs_of_a_module_are_redistributed_together():
    class Sum(nn.Module):
        def forward(self, x, y, *, scale):
            return (x + y) * scale

    def program(mesh):
        plan = {"": [prepare_inputs(P(), P(), scale=P()), prepare_outputs(P("tp"))]}
        model = parallelize(Sum(), mesh, plan)
        x, y = (
            sm.device_put(torch.arange(8.0) + i, mesh, P("tp"), src_data_rank=None)
            for i in range(2)
        )
        with collectives() as records:
            out = model(
                x,
                y=y,
                scale=sm.device_put(torch.full((8,), 2.0), mesh, P("tp"), src_data_rank=None),
            )
        assert launched(records) == ["all_gather"]
        assert out.spec == P("tp")
        assert torch.equal(out.full_tensor(), (2 * torch.arange(8.0) + 1) * 2)

    on_axes((2,), ("tp",), program)


def test_forward_that_creates_plain_tensors():
    """Such as positions and masks, which are equal on every rank."""

    class Positions(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = nn.Linear(4, 6, bias=False).double()

        def forward(self, x):
            seen = torch.ones(x.shape[0], x.shape[0], dtype=torch.bool).tril()
            return self.up(x + torch.arange(x.shape[0])[:, None]) * seen.sum(1, keepdim=True)

    def program(mesh):
        model, x = Positions(), torch.ones(3, 4, dtype=torch.float64)
        with torch.no_grad():
            model.up.weight.fill_(2.0)
        expected = model(x)
        parallelize(model, mesh, {"up": colwise()}, src_data_rank=None)
        placed = sm.device_put(x, mesh, src_data_rank=None)
        out = model(placed)
        assert out.spec == P(None, "tp")
        assert torch.equal(out.full_tensor(), expected)

    on_axes((2,), ("tp",), program)


def test_from_the_source_rank_only():
    """With src_data_rank=0, the default, values on other ranks are ignored."""

    def program(mesh):
        torch_model = nn.Linear(4, 6)
        with torch.no_grad():
            torch_model.weight.fill_(mesh.world.rank + 1.0)
        model = parallelize(torch_model, mesh, {"": colwise()})
        return model.weight.full_tensor().detach()

    for weight in on_axes((2,), ("tp",), program):
        assert torch.equal(weight, torch.ones(6, 4))


# -- what it leaves --------------------------------------------------------------------------------


def test_unnamed_parameters_are_replicated():
    def program(mesh):
        model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 4))
        model[2].weight.requires_grad_(False)
        parallelize(model, mesh, {"0": colwise()})
        assert all(isinstance(x, sm.ShardedTensor) for x in [*model.parameters(), *model.buffers()])
        assert model[1].running_mean.is_fully_replicated
        assert isinstance(model[0].weight, nn.Parameter)
        assert not model[2].weight.requires_grad

    on_axes((2,), ("tp",), program)


def test_parameters_by_pattern():
    """A spec shards one parameter of any module; a placement refers to the axis."""

    class Packed(nn.Module):
        def __init__(self):
            super().__init__()
            self.w_qkv, self.w_out, self.scale = (nn.Parameter(torch.ones(6, 6)) for _ in range(3))

        def forward(self, x):
            return nn.functional.linear(
                nn.functional.linear(x, self.w_qkv) * self.scale[0], self.w_out
            )

    def program(mesh):
        model = nn.Sequential(Packed(), Packed())
        parallelize(
            model,
            mesh,
            {
                "*.w_qkv": P("tp", None),
                "*.w_out": shard_params(sm.Shard(1)),
                "": prepare_outputs(P()),
            },
        )
        assert model[1].w_qkv.spec == P("tp", None)
        assert model[1].w_out.spec == P(None, "tp")
        assert model[1].scale.spec == P(None, None)
        out = model(sm.device_put(torch.ones(2, 6), mesh))
        assert out.is_fully_replicated
        assert torch.equal(out.full_tensor(), torch.full((2, 6), 36.0**2))

    on_axes((2,), ("tp",), program)


def test_meta_parameters_stay_on_meta():
    def program(mesh):
        with torch.device("meta"):
            model = nn.Linear(4, 6)
        parallelize(model, mesh, {"": colwise()})
        assert model.weight.is_meta
        assert model.weight.to_local().shape == (3, 4)
        assert isinstance(model.weight, nn.Parameter)

    on_axes((2,), ("tp",), program)


def test_one_axis_after_another():
    """A second plan keeps the sharding of the first along its axis."""

    def program(mesh):
        model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
        parallelize(
            model, mesh, {"0": colwise(axis="tp"), "1": rowwise(axis="tp")}, src_data_rank=None
        )
        parallelize(model, mesh, {"1": colwise(axis="cp", out=P())}, src_data_rank=None)
        assert model[0].weight.spec == P("tp", None)
        assert model[1].weight.spec == P("cp", "tp")

    on_axes((2, 2), ("cp", "tp"), program)


def test_copies_and_state():
    """A deep copy has the hooks and works; a state dict does not contain them."""
    config = Config(layers=1)
    reference = expected(config)

    def program(mesh):
        model = parallelize(gpt(config), mesh, megatron(config, SPLIT), src_data_rank=None)
        twin = copy.deepcopy(model)
        check_equal(step_on(mesh, twin), twin, reference)
        assert model.norm.weight.grad is None
        assert set(twin.state_dict()) == set(gpt(config).state_dict())

    on_axes((2,), ("tp",), program)


def test_repr_shows_layouts_of_activations():
    def program(mesh):
        model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4, bias=False))
        parallelize(
            model,
            mesh,
            {"0": colwise(), "1": prepare_inputs(P(None, "tp")), "2": rowwise(out=P("tp"))},
        )
        return repr(model)

    assert on_axes((2,), ("tp",), program)[0] == (
        "Sequential(\n"
        "  (0): Linear(\n"
        "    in_features=4, out_features=6, bias=True\n"
        "    weight: f32[6, 4] @ P('tp', None) on (tp=2)\n"
        "    bias: f32[6] @ P('tp') on (tp=2)\n"
        "    input input: P() along tp\n"
        "  )\n"
        "  (1): ReLU(input input: P(None, 'tp') along tp)\n"
        "  (2): Linear(\n"
        "    in_features=6, out_features=4, bias=False\n"
        "    weight: f32[4, 6] @ P(None, 'tp') on (tp=2)\n"
        "    input input: Shard(-1) along tp\n"
        "    output: P('tp') along tp\n"
        "  )\n"
        ")"
    )


def test_a_plain_input_on_one_axis_is_a_part():
    """`in_` determines whether a plain tensor is the whole or this rank's part."""

    def program(mesh):
        weight, plain = torch.arange(24.0).reshape(4, 6), nn.Linear(6, 4, bias=False)
        with torch.no_grad():
            plain.weight.copy_(weight)
        model = parallelize(copy.deepcopy(plain), mesh, {"": rowwise()}, src_data_rank=None)
        x = torch.arange(12.0).reshape(2, 6)
        with collectives() as records:
            out = model(x.chunk(2, dim=1)[mesh.world.rank])
        assert launched(records) == ["all_reduce"]
        assert torch.equal(out.full_tensor(), x @ weight.t())
        for where, given in [(P(), x), (P("a"), x[mesh.world.rank : mesh.world.rank + 1])]:
            again = parallelize(
                copy.deepcopy(plain), mesh, {"": rowwise(in_=where)}, src_data_rank=None
            )
            assert torch.equal(again(given).full_tensor(), x @ weight.t())

    on_mesh((2,), program)
