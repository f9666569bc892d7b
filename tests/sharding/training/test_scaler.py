"""Gradient scaling for fp16: all ranks skip the same steps, and continue with the same scale."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import shardmesh as sm
from shardmesh import P
from shardmesh.sharding.training.clipping import clip_grad_norm_
from shardmesh.sharding.training.scaler import GradScaler
from tests.device import DEVICE
from tests.sharding.ranks import AXES, collectives, on_mesh, same_error

SPECS = [P("a", "b"), P(), P("b")]
BAD_STEP = 2
HOW = [{"foreach": False}, {"foreach": True}, {"fused": True}]


def factors(step):
    """Return the factors of the gradients; one element is infinite in one step."""
    found = [
        torch.arange(1.0, 13).view(3, 4) * (step + 1),
        torch.ones(3) * step,
        torch.ones(2, 2, device=DEVICE),
    ]
    if step == BAD_STEP:
        found[0][2, 3] = math.inf
    return [f.to(DEVICE) for f in found]


def trained(params, place, scaler, how, clip):
    optimizer = torch.optim.AdamW(params, lr=0.1, **how)
    for step in range(4):
        loss = sum(
            (p * place(f, i)).sum()
            for i, (p, f) in enumerate(zip(params, factors(step), strict=True))
        )
        scaler.scale(loss).backward()
        if clip:
            scaler.unscale_(optimizer)
            clip(params, 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return scaler.get_scale()


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("how", HOW, ids=str)
def test_equals_torchs_on_one_process(how, clips):
    plain = [torch.zeros_like(f, requires_grad=True) for f in factors(0)]
    options = {"init_scale": 8.0, "growth_interval": 2}
    scale = trained(
        plain,
        lambda f, i: f,
        torch.amp.GradScaler(DEVICE, **options),
        how,
        clips and nn.utils.clip_grad_norm_,
    )

    def program(mesh):
        def put(x, i):
            return sm.distribute_tensor(x, mesh, SPECS[i], src_data_rank=None)

        params = [nn.Parameter(put(torch.zeros_like(f), i)) for i, f in enumerate(factors(0))]
        assert (
            trained(params, put, GradScaler(DEVICE, **options), how, clips and clip_grad_norm_)
            == scale
        )
        for p, q in zip(params, plain, strict=True):
            torch.testing.assert_close(p.detach().full_tensor(), q.detach(), rtol=1e-5, atol=1e-6)

    on_mesh((2, 2), program)


@pytest.mark.parametrize("how", HOW, ids=str)
def test_one_collective_for_all_meshes_and_dtypes(how):
    def program():
        meshes = [
            sm.init_device_mesh(DEVICE, shape, axis_names=AXES[: len(shape)])
            for shape in ((4,), (2, 2))
        ]
        params = []
        for mesh, dtype in zip(meshes, (torch.float32, torch.float64), strict=True):
            p = nn.Parameter(sm.zeros((4, 3), mesh, P("a"), dtype=dtype))
            p.grad = sm.ones((4, 3), mesh, P("a"), dtype=dtype)
            params.append(p)
        counts = []
        # torch's cannot fuse here.
        for scaler in [GradScaler(DEVICE)] + [torch.amp.GradScaler(DEVICE)] * ("fused" not in how):
            scaler.scale(torch.ones(1, device=DEVICE))
            optimizer = torch.optim.AdamW(params, lr=0.1, **how)
            with collectives() as records:
                scaler.step(optimizer)
            counts.append([record.op for record in records])
        return counts

    for ours, *theirs in sm.simulate(4)(program)():
        assert ours == ["all_reduce"]
        assert theirs in ([], [["all_reduce"] * 2])


def test_separate_stages_agree():
    """An infinity on the second stage: the first one, which is outside its mesh, skips the step,
    too.
    """

    def program():
        meshes = [sm.DeviceMesh(DEVICE, ranks, axis_names=("x",)) for ranks in ([0, 1], [2, 3])]
        params = [nn.Parameter(sm.zeros((4,), mesh, P("x"))) for mesh in meshes]
        for p, last in zip(params, (1.0, math.nan), strict=True):
            p.grad = sm.distribute_tensor(
                torch.tensor([1.0, 1.0, 1.0, last]), p.mesh, P("x"), src_data_rank=None
            )
        scaler, optimizer = GradScaler(DEVICE, init_scale=4.0), torch.optim.SGD(params, lr=1.0)
        scaler.scale(torch.ones(1, device=DEVICE))
        scaler.step(optimizer)
        scaler.update()
        return scaler.get_scale(), sum(float(p.detach()._local.abs().sum()) for p in params)

    assert sm.simulate(4)(program)() == [(2.0, 0.0)] * 4


def test_unsupported_gradients_raise():
    def unscale(params):
        scaler = GradScaler(DEVICE)
        scaler.scale(torch.ones(1, device=DEVICE))
        scaler.unscale_(torch.optim.SGD(params, lr=1.0))

    def half(mesh):
        p = nn.Parameter(sm.zeros((4,), mesh, P("a"), dtype=torch.float16))
        p.grad = torch.zeros_like(p.detach())
        unscale([p])

    assert "float16" in same_error((2,), half, ValueError)

    def pending(mesh):
        p = nn.Parameter(sm.zeros((4,), mesh, P()))
        with sm.accumulate_grads():
            (p * sm.ones((4,), mesh, P("a"))).sum().backward()
            unscale([p])

    text = same_error((2,), pending, ValueError)
    assert "the gradient of parameter 0 is f32[4]" in text
    assert "accumulate_grads() block" in text


def test_plain_parameters_and_a_scaler_that_is_off():
    p = torch.zeros(3, device=DEVICE, requires_grad=True)
    for enabled in (True, False):
        scaler, optimizer = GradScaler(DEVICE, enabled=enabled), torch.optim.SGD([p], lr=1.0)
        scaler.scale(p.sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert p.tolist() == [-2.0] * 3
