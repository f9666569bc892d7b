"""Results and communication of the examples: data parallel, halos, a Megatron block, ring
attention.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import data_parallel
import halo_conv
import megatron_block
import pytest
import ring_attention
import torch
import torch.nn.functional as F

import shardmesh as sm
from shardmesh import P


def simulated(ranks: int, fn: Any, *args: Any) -> list[Any]:
    return sm.simulate(ranks, prints="first")(fn)(*args)


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(
        *shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64
    )


# -- data parallel ---------------------------------------------------------------------------------


def traffic_of_a_step() -> tuple[dict[str, Any], int]:
    mesh = sm.init_device_mesh("cpu", (4,), axis_names=("dp",))
    params, x, y = data_parallel.problem(16)
    count = sum(p.numel() for p in params.values())
    params = {name: sm.device_put(p, mesh, P()) for name, p in params.items()}
    batch = [sm.device_put(each, mesh, P("dp")) for each in (x, y)]
    data_parallel.step(params, *batch)
    with sm.debug.comm_report() as report:
        data_parallel.step(params, *batch)
    return report.by_op, count


def test_data_parallel_reduces_all_gradients_at_once():
    (by_op, count) = simulated(4, traffic_of_a_step)[0]
    launches, received = by_op.pop("all_reduce")
    assert by_op == {}
    assert launches == 3  # the loss, its seed in backward, and all gradients together
    assert received == 4 * (count + 2) * 2 * 3 / 4


def test_data_parallel_learns():
    _, losses = data_parallel.train_single(*data_parallel.problem(64))
    assert losses[-1] < losses[0] / 4


# -- halo ------------------------------------------------------------------------------------------


def convolved(height: int, size: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    mesh = sm.init_device_mesh("cpu", (4,), axis_names=("sp",))
    image = sm.device_put(draw(1, 2, height, 5), mesh, halo_conv.ROWS)
    kernel = sm.device_put(draw(3, 2, size, 3), mesh, P())
    halo_conv.conv(image, kernel)
    with sm.debug.comm_report() as report:
        out, back = sm.vjp(halo_conv.conv, image, kernel)
    grad, _ = back(out)
    return out.full_tensor(), grad.full_tensor(), report.bytes_received


@pytest.mark.parametrize(("height", "size"), [(4, 3), (8, 5), (10, 3), (14, 5), (32, 5), (10, 1)])
def test_halo_conv_of_uneven_parts(height, size):
    image, kernel = draw(1, 2, height, 5).requires_grad_(), draw(3, 2, size, 3)
    expected = F.conv2d(image, kernel, padding=(size // 2, 1))
    (expected_grad,) = torch.autograd.grad(expected, image, expected.detach())
    results = simulated(4, convolved, height, size)
    for out, grad, _ in results:
        torch.testing.assert_close(out, expected.detach())
        torch.testing.assert_close(grad, expected_grad)
    halo = (size // 2) * 2 * 5 * 8  # rows, channels, columns, bytes
    # Whatever the height.
    assert [received for _, _, received in results] == [halo, 2 * halo, 2 * halo, halo]


@pytest.mark.parametrize(
    ("height", "size", "message"),
    [
        (3, 1, "leave 0 to the last one.*needs 1 of each.*until there are 4"),
        (9, 3, "leave 0 to the last one.*needs 1 of each.*until there are 12"),
        (13, 5, "leave 1 to the last one.*needs 2 of each.*until there are 16"),
        (4, 7, "leave 1 to the last one.*needs 3 of each.*until there are 12"),
        (16, 4, "no middle one: pad it to 5"),
    ],
)
def test_halo_conv_of_too_short_parts_raises(height, size, message):
    with pytest.raises(ValueError, match=message):
        simulated(4, convolved, height, size)


# -- ring attention --------------------------------------------------------------------------------


def attended(
    causal: bool, *shape: int
) -> tuple[list[torch.Tensor], dict[str, Any], dict[str, Any]]:
    mesh = sm.init_device_mesh("cpu", (3,), axis_names=("sp",))
    qkv = [
        sm.device_put(draw(*shape, i), mesh, ring_attention.SEQUENCE).requires_grad_()
        for i in (4, 4, 4)
    ]
    attention = partial(ring_attention.ring_attention, causal=causal)
    mapped = sm.shard_map(
        attention, in_specs=(ring_attention.SEQUENCE,) * 3, out_specs=ring_attention.SEQUENCE
    )
    mapped(*qkv)
    with sm.debug.comm_report() as forward:
        out = mapped(*qkv)
    with sm.debug.comm_report() as backward:
        out.square().sum().backward()
    grads: list[Any] = [x.grad for x in qkv]
    return [x.full_tensor().detach() for x in (out, *grads)], forward.by_op, backward.by_op


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", [(1, 1, 3), (2, 3, 12)])
def test_ring_attention_in_double_precision(shape, causal):
    q, k, v = plain = [draw(*shape, i).requires_grad_() for i in (4, 4, 4)]
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    grads = torch.autograd.grad(expected.square().sum(), plain)
    for found, forward, backward in simulated(3, attended, causal, *shape):
        for ours, other in zip(found, [expected, *grads], strict=True):
            torch.testing.assert_close(ours, other.detach(), rtol=1e-12, atol=1e-12)
        block = math.prod(shape) // 3 * 4 * 8
        assert forward == {"permute": (2 * 2, 2 * 2 * block)}  # k and v, two hops
        assert backward == forward


# -- transformer block -----------------------------------------------------------------------------


def traffic_of_the_block() -> tuple[Any, Any, Any]:
    mesh = sm.init_device_mesh("cpu", (2, 2), axis_names=("dp", "tp"))
    params, x, pull = megatron_block.problem()
    sharded = {
        name: sm.device_put(p, mesh, megatron_block.SPECS[name]) for name, p in params.items()
    }
    x, pull = (sm.device_put(each, mesh, megatron_block.STREAM) for each in (x, pull))
    block = megatron_block.sharded_block(mesh)
    block(sharded, x)
    with sm.debug.comm_report() as forward:
        _, back = sm.vjp(block, sharded, x)
    with sm.debug.comm_report() as backward:
        grads, _ = back(pull)
    return forward.by_axis, backward.by_axis, {name: g.spec for name, g in grads.items()}


def test_megatron_block_sums_once_at_the_end_of_each_half():
    forward, backward, specs = simulated(4, traffic_of_the_block)[0]
    assert {axis: launches for axis, (launches, _) in forward.items()} == {"tp": 2}
    assert backward["tp"][0] == 2 + 1  # and the gradient of x
    assert set(backward) - {"tp"}, "gradients are summed over dp"
    assert specs == {
        name: spec.padded(len(name.rpartition("_")[2]))
        for name, spec in megatron_block.SPECS.items()
    }
