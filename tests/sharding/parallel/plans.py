"""A plan for the language model of `models.py`, and its step on a mesh compared with one
process.
"""

from __future__ import annotations

import math

import torch

import shardmesh as sm
from shardmesh import P
from shardmesh.sharding.parallel.tensor.styles import (
    colwise,
    rowwise,
    sequence_parallel,
    shard_params,
)
from tests.device import DEVICE, on_device
from tests.sharding.parallel.models import gpt, loss_of, tokens


def megatron(config, stream):
    """Return a plan with heads and features sharded over tp; activations between layers have the
    layout `stream`.
    """
    norm = sequence_parallel(1, out=P()) if stream.dims else shard_params({"weight": P()})
    return {
        "embed_tokens": rowwise(out=stream),
        "*norm": norm,
        "*.q_proj": colwise(units=config.heads),
        "*.[kv]_proj": colwise(units=config.kv_heads or config.heads),
        "*.o_proj": rowwise(out=stream, units=config.heads),
        "*.gate_proj": colwise(),
        "*.up_proj": colwise(),
        "*.down_proj": rowwise(out=stream),
        "lm_head": colwise(),
    }


SPLIT = P(None, "tp", None)


def step_on(mesh, model, b=4, s=8):
    """Run forward and backward of a batch sharded over all axes but tp; return the loss."""
    vocabulary = model.embed_tokens.weight.shape[0]
    data = tuple(axis for axis in mesh.axis_names if axis != "tp")
    placed = [sm.device_put(x, mesh, P(data), src_data_rank=None) for x in tokens(b, s, vocabulary)]
    loss = loss_of(model(placed[0]), placed[1])
    loss.backward()
    return loss


def expected(config, b=4, s=8):
    model = gpt(config).to(DEVICE)
    inputs_bs, targets_bs = tokens(b, s, config.vocabulary)
    loss = loss_of(model(inputs_bs), targets_bs)
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


def check_equal(loss, model, reference):
    torch.testing.assert_close(loss.full_tensor().detach(), reference[0], rtol=1e-12, atol=0)
    assert set(dict(model.named_parameters())) == set(reference[1])
    for name, parameter in model.named_parameters():
        assert sm.typeof(parameter.grad) is sm.typeof(parameter)
        torch.testing.assert_close(
            parameter.grad.full_tensor(), reference[1][name], rtol=1e-12, atol=1e-12
        )


def on_axes(shape, names, program):
    def rank():
        with on_device():
            return program(sm.init_device_mesh(DEVICE, shape, axis_names=names))

    return sm.simulate(math.prod(shape))(rank)()
