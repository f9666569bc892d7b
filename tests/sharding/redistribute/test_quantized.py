"""redistribute(transport=): values are sent in 8 bits, within the documented bound, and equal on
all replicas.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import shardmesh as sm
from shardmesh import P
from shardmesh.kernels.quantize import record_bytes
from tests.device import DEVICE
from tests.sharding.ranks import AXES, collectives, every_rank, launched, on_mesh, same_error
from tests.sharding.strategies import mesh_shapes, shapes, specs
from tests.tiers import examples

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
EPS = {torch.float32: 2.0**-22, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10}


def numbers(shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def per_step(transport, x, largest):
    """Return the documented maximum error of one quantization of x in a block with maximum
    `largest`.
    """
    return largest / 252 if transport == "int8" else torch.maximum(x / 16, largest / 425_984)


def differs(transport, parts, moved, dtype):
    """Return the error bound of the result: each contribution is quantized once, and the sum again
    in each later step.
    """
    largest = sum(p.abs().max() if p.numel() else p.new_zeros(()) for p in parts)
    size = sum(p.abs() for p in parts)
    bound = moved * per_step(transport, size, largest) * (1 + 1 / 8) ** moved
    return bound + (1 + moved) * EPS[dtype] * (size + largest)


@st.composite
def moves(draw):
    mesh_shape = draw(mesh_shapes)
    axes = AXES[: len(mesh_shape)]
    shape = draw(shapes())
    src, dst = (draw(specs(axes, len(shape), ("sum",))) for _ in range(2))
    return (
        mesh_shape,
        shape,
        src,
        dst,
        draw(st.sampled_from(["int8", "fp8"])),
        draw(st.sampled_from(DTYPES)),
        draw(st.booleans()),
    )


@given(moves())
@settings(max_examples=examples(250))
def test_any_move(case):
    mesh_shape, shape, src, dst, transport, dtype, small = case

    def program(mesh):
        layout = sm.Layout.of(mesh, src, shape, dtype)
        axes = [mesh.axis_index(axis) for axis in layout.pending]
        sizes = [mesh.shape[axis] for axis in axes]
        shares = [numbers(shape, dtype, seed) for seed in range(math.prod(sizes))]
        mine = (
            int(np.ravel_multi_index([mesh.coordinate[axis] for axis in axes], sizes))
            if axes
            else 0
        )
        local = shares[mine][tuple(slice(*interval) for interval in layout.box)].clone()
        x = sm.ShardedTensor.from_local(local, mesh, src, shape=shape)
        limit = (
            {"max_bytes": sm.debug.explain(layout, dst).peak_bytes}
            if small and not dst.unreduced
            else {}
        )
        plan = sm.debug.explain(layout, dst, transport=transport)
        with collectives() as records:
            y = x.redistribute(dst, transport=transport)
        assert sm.typeof(y).spec == sm.typeof(x.redistribute(dst)).spec
        assert all(r.dtype == torch.uint8 for r in records)
        moved = sum(not step.is_local for step in plan.steps)
        if limit:
            try:
                y = x.redistribute(dst, transport=transport, **limit)
            except ValueError:
                limit.clear()
            moved += bool(limit)
        whole = y.full_tensor().float()
        expected = sum(s.float() for s in shares)
        allowed = differs(transport, [s.float() for s in shares], moved, dtype)
        assert (whole - expected).abs().le(allowed.abs() + 1e-30).all(), (whole - expected, allowed)
        return y._local, sm.typeof(y).box, bool(dst.unreduced)

    found = on_mesh(mesh_shape, program)
    if not found[0][2]:  # replicas hold the same bits
        for part, box, _ in found:
            assert all(
                torch.equal(part, other) for other, elsewhere, _ in found if elsewhere == box
            )


@every_rank(4)
def test_bytes(mesh):
    """1.03 bytes an element, and no more than the records of the boxes."""
    x = sm.distribute_tensor(numbers((64, 512)), mesh, P("a"), src_data_rank=None)
    for dst, boxes in ((P(), 3 * [16 * 512]), (P(None, "a"), 3 * [16 * 128])):
        explained = sm.debug.explain(sm.typeof(x), dst, transport="int8")
        with collectives() as records:
            x.redistribute(dst, transport="int8")
        received = sum(r.bytes_received for r in records)
        assert received == sum(map(record_bytes, boxes)) == explained.bytes_received
        assert received <= 1.04 * sum(boxes)
    pending = sm.ShardedTensor.from_local(numbers((64, 512)), mesh, P(unreduced={"a"}))
    with collectives() as records:
        pending.redistribute(P("a"), transport="fp8")
    assert launched(records) == ["all_to_all"]
    assert records[0].bytes_received == 3 * record_bytes(16 * 512)


@every_rank(2, 2)
def test_non_finite_values_are_preserved(mesh):
    t = torch.tensor([1.0, float("inf"), -float("inf"), float("nan"), 0.0, 3e38, 1e-38, -2.0])
    x = sm.distribute_tensor(t, mesh, P("a"), src_data_rank=None)
    for transport in ("int8", "fp8"):
        whole = x.redistribute(P(), transport=transport).full_tensor()
        assert torch.equal(whole.isnan(), t.isnan())
        assert torch.equal(whole.isinf(), t.isinf())
        assert torch.equal(whole[t.isinf()], t[t.isinf()])


@every_rank(2, 2)
def test_with_the_other_options(mesh):
    t = numbers((32, 48))
    x = sm.distribute_tensor(t, mesh, P("a", "b"), src_data_rank=None)
    plain = x.redistribute(P(None, "a"), transport="int8")
    into = sm.empty((32, 48), device_mesh=mesh, placements=P(None, "a"))
    for y in (
        x.redistribute(P(None, "a"), transport="int8", async_op=True).wait(),
        x.redistribute(P(None, "a"), transport="int8", out=into),
        (x + 0).redistribute(P(None, "a"), transport="int8", donate=True),
    ):
        assert torch.equal(y._local, plain._local)
    half = x.redistribute(P(None, "a"), transport="int8", forward_dtype=torch.bfloat16)
    assert half.dtype == torch.bfloat16
    assert (
        half.full_tensor().float() - t
    ).abs().max() <= t.abs().max() / 252 + 2 * 2.0**-8 * t.abs().max()
    double = sm.distribute_tensor(t.double(), mesh, P("a", "b"), src_data_rank=None)
    assert torch.equal(
        double.redistribute(P(None, "a"), transport="int8", forward_dtype=torch.float32)._local,
        plain._local,
    )


@every_rank(2, 2)
def test_gradients_are_not_quantized(mesh):
    x = sm.distribute_tensor(
        numbers((8, 6)), mesh, P("a", "b"), src_data_rank=None
    ).requires_grad_()
    weights = numbers((8, 6), seed=1)
    y = x.redistribute(P(None, "a"), transport="int8")
    with collectives() as records:
        (y * sm.distribute_tensor(weights, mesh, P(None, "a"), src_data_rank=None)).sum().backward()
    assert all(r.dtype != torch.uint8 for r in records)
    assert torch.equal(x.grad.full_tensor(), weights)
    mean = sm.ShardedTensor.from_local(
        numbers((8, 6)), mesh, P(unreduced={"a": "avg"})
    ).requires_grad_()
    with collectives() as records:
        mean.redistribute(P("a"), transport="fp8")
    assert {r.dtype for r in records} == {torch.uint8}


def dtype_program():
    mesh = sm.init_device_mesh(DEVICE, (2, 2), axis_names=("a", "b"))
    for dtype in DTYPES:
        t = numbers((37, 50), dtype)
        for src in (P("a", "b"), P(("b", "a")), P(unreduced={"a"})):
            x = sm.distribute_tensor(t, mesh, src, src_data_rank=None)
            for transport in ("int8", "fp8"):
                y = x.redistribute(P(None, "b"), transport=transport)
                largest = t.float().abs().max()
                assert (y.full_tensor().float() - t.float()).abs().max() <= largest / (
                    252 if transport == "int8" else 16
                ) + 0.02
    return True


def test_between_processes(world4):
    assert all(world4(dtype_program))


def place_double(mesh):
    return sm.zeros((4,), dtype=torch.float64, device_mesh=mesh, placements=P("a"))


@pytest.mark.parametrize(
    ("program", "said"),
    [
        (
            lambda mesh: sm.zeros((4,), device_mesh=mesh, placements=P("a")).redistribute(
                P(), transport="int4"
            ),
            "'int8' or 'fp8'",
        ),
        (lambda mesh: place_double(mesh).redistribute(P(), transport="int8"), "cast first"),
        (
            lambda mesh: sm.ShardedTensor.from_local(
                torch.ones(4), mesh, P(unreduced={"a": "max"})
            ).redistribute(P(), transport="fp8"),
            "combined by max",
        ),
    ],
)
def test_unsupported_dtypes_raise(program, said):
    assert said in same_error((2,), program, ValueError)
