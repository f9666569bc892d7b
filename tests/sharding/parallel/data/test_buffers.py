"""Buffers: on the mesh of the activations during forward, and unchanged otherwise."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import shardmesh as sm
from shardmesh import P
from shardmesh.parallel import colwise, fully_shard, parallelize, rowwise
from tests.device import DEVICE
from tests.sharding.parallel.data.training import gradients, same
from tests.sharding.ranks import on_mesh

ROWS = 4


class _ScaledByBuffer(nn.Module):
    """Reads one buffer, writes one in place and replaces one."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        self.register_buffer("scale", torch.arange(8.0))
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("last", torch.zeros(8))

    def forward(self, x):
        hidden = self.up(x) * self.scale
        self.calls += 1
        self.last = self.last + self.scale
        return self.down(hidden)


def _model():
    torch.manual_seed(0)
    return _ScaledByBuffer().double().to(DEVICE)


def _rows():
    return torch.linspace(-1, 1, ROWS * 4, dtype=torch.float64, device=DEVICE).view(ROWS, 4)


def _expected():
    made = _model()
    made(_rows()).square().mean().backward()
    return gradients(made)


@pytest.mark.parametrize("plan_on", ["whole mesh", "its axis"])
@pytest.mark.parametrize("inputs", ["plain", "sharded"])
@pytest.mark.parametrize("split", [False, True])
def test_buffers_of_a_model_with_tensor_parallelism(plan_on, inputs, split):
    def program(mesh):
        made, plan = _model(), {"up": colwise(axis="b"), "down": rowwise(axis="b")}
        if split:
            plan["scale"] = P("b")
        parallelize(made, mesh if plan_on == "whole mesh" else mesh["b"], plan)
        at_rest = {name: x._layout for name, x in made.named_buffers()}
        fully_shard(made, mesh, axes="a")
        x = (
            _rows().chunk(2)[mesh.coordinate[0]]
            if inputs == "plain"
            else sm.device_put(_rows(), mesh, P("a"))
        )
        for _ in range(2):
            made.zero_grad()
            made(x).square().mean().backward()
            same(gradients(made), expected)
        # Which the module has replaced by a split one.
        for name in at_rest.keys() - ({"last"} if split else set()):
            assert made.get_buffer(name)._layout is at_rest[name], name
        assert made.calls.item() == 2
        torch.testing.assert_close(
            made.last.full_tensor(), 2 * torch.arange(8.0, dtype=torch.float64, device=DEVICE)
        )

    expected = _expected()
    on_mesh((2, 2), program)


def test_sharded_buffers_are_plain_during_forward_if_no_parameter_is_sharded():
    def program(mesh):
        made = parallelize(_model(), mesh, {})
        fully_shard(made, mesh, axes=mesh.axis_names)
        y = made(_rows().chunk(4)[mesh.get_rank()])
        assert type(y) is torch.Tensor
        assert type(made.scale) is type(made.last) is sm.ShardedTensor
        y.square().mean().backward()
        same(gradients(made), expected)

    expected = _expected()
    on_mesh((2, 2), program)
