"""distribute_module and shard_parameter."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import shardmesh as sm
from shardmesh.parallel import distribute_module, shard_parameter
from tests.device import DEVICE


def _mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def _tensor_parallel(name, module, mesh):
    if name == "0":
        shard_parameter(module, "weight", mesh, sm.P("tp"))
        shard_parameter(module, "bias", mesh, sm.P("tp"))
    if name == "2":
        shard_parameter(module, "weight", mesh, sm.P(None, "tp"))


def test_tensor_parallel_mlp_equals_plain():
    x = torch.randn(5, 6)
    plain = _mlp()
    plain(x).square().sum().backward()

    def rank():
        mesh = sm.init_device_mesh(DEVICE, (2, 2), axis_names=("dp", "tp"))
        model = distribute_module(_mlp(), mesh, _tensor_parallel)
        out = model(sm.device_put(x, mesh, sm.P("dp")))
        assert out.spec == sm.P("dp", None, unreduced={"tp"})
        out.square().sum().backward()
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert ours.grad.spec == ours.spec
            torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)
        return out.full_tensor().detach()

    for out in sm.simulate(4)(rank)():
        torch.testing.assert_close(out, plain(x).detach())


def test_input_and_output_functions():
    def rank():
        mesh = sm.init_device_mesh(DEVICE, (2,), axis_names=("dp",))
        model = distribute_module(
            nn.Linear(3, 3),
            mesh,
            input_fn=lambda module, inputs, mesh: (sm.device_put(inputs[0], mesh, sm.P("dp")),),
            output_fn=lambda module, output, mesh: output.full_tensor(),
        )
        return model(torch.ones(4, 3))

    for out in sm.simulate(2)(rank)():
        assert type(out) is torch.Tensor
        assert out.shape == (4, 3)


def test_buffers_and_frozen_parameters():
    def rank():
        mesh = sm.init_device_mesh(DEVICE, (2,), axis_names=("dp",))
        module = nn.BatchNorm1d(4)
        module.weight.requires_grad_(False)
        distribute_module(module, mesh)
        assert isinstance(module.running_mean, sm.ShardedTensor)
        assert not module.weight.requires_grad
        assert isinstance(module.weight, nn.Parameter)
        assert module.bias.requires_grad

    sm.simulate(2)(rank)()


def test_unknown_parameter_lists_the_known_ones():
    mesh = sm.simulate(1)(lambda: sm.init_device_mesh(DEVICE, (1,)))()[0]
    with pytest.raises(
        AttributeError, match=r"no parameter or buffer 'wieght'; it has \['weight', 'bias'\]"
    ):
        shard_parameter(nn.Linear(2, 2), "wieght", mesh)


def _language_model():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 6, bias=False))
    model[1].weight = model[0].weight
    return model


@pytest.mark.parametrize(
    "where", [{}, {"0": sm.P("tp")}, {"1": sm.P(None, "tp")}, {"0": sm.P("tp"), "1": sm.P("tp")}]
)
def test_tied_parameters_stay_tied(where):
    """Whichever name partition_fn shards, or none; the gradient is that of both uses."""
    tokens = torch.tensor([0, 1, 5, 1])
    plain = _language_model()
    plain(tokens).square().sum().backward()

    def rank():
        mesh = sm.init_device_mesh(DEVICE, (2,), axis_names=("tp",))

        def place(name, module, mesh):
            if name in where:
                shard_parameter(module, "weight", mesh, where[name])

        model = distribute_module(_language_model(), mesh, place)
        assert model[0].weight is model[1].weight
        assert isinstance(model[0].weight, nn.Parameter)
        assert model[0].weight.spec == next(iter(where.values()), sm.P(None, None)).padded(2)
        assert len(list(model.parameters())) == 1
        model(sm.device_put(tokens, mesh)).square().sum().backward()
        torch.testing.assert_close(model[0].weight.grad.full_tensor(), plain[0].weight.grad)

    sm.simulate(2)(rank)()


def test_conflicting_layouts_of_tied_parameters_raise():
    def rank():
        mesh = sm.init_device_mesh(DEVICE, (2,), axis_names=("tp",))
        specs = {"0": sm.P("tp"), "1": sm.P(None, "tp")}

        def place(name, module, mesh):
            if name in specs:
                shard_parameter(module, "weight", mesh, specs[name])

        with pytest.raises(
            ValueError,
            match=r"\['weight', 'weight'\] share was sharded as .*P\('tp', None\).* and ",
        ):
            distribute_module(_language_model(), mesh, place)

    sm.simulate(2)(rank)()
