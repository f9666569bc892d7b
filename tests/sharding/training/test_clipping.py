"""Norms and clipping of gradients in any layout, compared with one process, and their
communication.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import shardmesh as sm
from shardmesh import P
from shardmesh.sharding.training.clipping import clip_grad_norm_, clip_grad_value_, get_total_norm
from shardmesh.sharding.training.norms import tensor_norms
from tests.device import DEVICE
from tests.sharding.ranks import AXES, collectives, every_rank, launched, on_mesh, same_error
from tests.sharding.strategies import ragged_specs

ORDERS = [2.0, 1.0, 3.5, math.inf]


def drawn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(
        shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    ).to(DEVICE, dtype)


def put(x, mesh, spec):
    return sm.distribute_tensor(x, mesh, spec, src_data_rank=None)


def with_grad(value, grad):
    p = nn.Parameter(value)
    p.grad = grad
    return p


def sharded(mesh, grads, specs):
    """Return parameters of zeros with these gradients; plain tensors if the spec is None."""
    placed = [
        g if spec is None else put(g, mesh, spec) for g, spec in zip(grads, specs, strict=True)
    ]
    return [with_grad(torch.zeros_like(g), g.clone()) for g in placed]


def whole(x):
    return x.full_tensor() if isinstance(x, sm.ShardedTensor) else x


GRADS = [(5, 3), (3,), (4, 2), (1,), (6, 2)]
SPECS = [P("a", "b"), P(), P(("b", "a"), sizes={("b", "a"): (0, 3, 0, 1)}), None, P(None, "a")]


@pytest.mark.parametrize("order", ORDERS)
def test_equals_one_process_and_is_one_collective(order):
    grads = [drawn(*shape, seed=i) for i, shape in enumerate(GRADS)]
    plain = [with_grad(torch.zeros_like(g), g.clone()) for g in grads]
    expected = nn.utils.clip_grad_norm_(plain, 1.5, order)

    def program(mesh):
        params = sharded(mesh, grads, SPECS)
        with sm.debug.comm_budget(launches=1) as used:
            total = clip_grad_norm_(params, 1.5, order)
        assert type(total) is torch.Tensor
        assert total.dtype == torch.float32
        nbytes = 16 if order == math.inf else 8
        assert (used.launches, used.bytes_received, list(used.by_axis)) == (
            1,
            2 * 3 * nbytes // 4,
            ["a,b"],
        )
        for p, q in zip(params, plain, strict=True):
            torch.testing.assert_close(whole(p.grad), q.grad, rtol=1e-6, atol=1e-7)
        return total

    totals = on_mesh((2, 2), program)
    torch.testing.assert_close(totals[0], expected, rtol=1e-6, atol=0)
    assert all(torch.equal(total, totals[0]) for total in totals)


@settings(max_examples=15)
@given(st.data())
def test_any_layouts(data):
    mesh = sm.AbstractMesh((2, 3), AXES[:2])
    shapes = [(5, 4), (7,), (0, 3), (6, 2)]
    specs = [data.draw(ragged_specs(mesh, shape, kinds=())) for shape in shapes]
    order = data.draw(st.sampled_from(ORDERS))
    grads = [drawn(*shape, seed=i, dtype=torch.float64) for i, shape in enumerate(shapes)]
    expected = torch.linalg.vector_norm(torch.cat([g.reshape(-1) for g in grads]), order)

    def program(mesh):
        params = sharded(mesh, grads, specs)
        with collectives() as records:
            total = clip_grad_norm_(params, 0.5, order)
            by_path = tensor_norms({str(i): p for i, p in enumerate(params)}, "grad", order)
        assert len(records) <= 2
        torch.testing.assert_close(total, expected, rtol=1e-12, atol=0)
        together = torch.linalg.vector_norm(
            torch.tensor(list(by_path.values()), dtype=torch.float64, device=DEVICE), order
        )
        assert together.item() == pytest.approx(0.5, rel=1e-5)

    on_mesh((2, 3), program)


def test_unused_axes_do_not_communicate():
    def program(mesh):
        params = sharded(mesh, [drawn(4, 2), drawn(3)], [P("b"), P()])
        with sm.debug.comm_report() as used:
            clip_grad_norm_(params, 1.0)
        with sm.debug.comm_budget(launches=0):
            get_total_norm([drawn(4), put(drawn(3), mesh, P())])
            clip_grad_norm_(sharded(mesh, [drawn(4, 2), drawn(3)], [P(), None]), 1.0)
        return used.by_axis

    assert on_mesh((2, 2), program) == [{"b": (1, 8)}] * 4


def test_fewer_collectives_than_torch_by_dispatch():
    """torch's own function on the same parameters costs more."""
    grads = [drawn(*shape, seed=i) for i, shape in enumerate(GRADS)]

    def program(mesh):
        counts = []
        for clip in (clip_grad_norm_, nn.utils.clip_grad_norm_):
            params = sharded(mesh, grads, [P("a", "b"), P(), P("b"), P("a"), P(None, "a")])
            with collectives() as records:
                total = clip(params, 1.0)
            counts.append(len(records))
        return (*counts, float(total))

    ours, theirs, _ = on_mesh((2, 2), program)[0]
    assert ours == 1
    assert theirs >= 3


def test_several_meshes_of_all_ranks():
    grads = [drawn(5, 3, seed=1), drawn(4, seed=2), drawn(3, seed=3)]
    expected = torch.linalg.vector_norm(torch.cat([g.reshape(-1) for g in grads]))

    def program():
        one = sm.init_device_mesh(DEVICE, (4,), axis_names=("a",))
        two = sm.init_device_mesh(DEVICE, (2, 2), axis_names=("ep", "tp"))
        params = [*sharded(one, grads[:1], [P("a")]), *sharded(two, grads[1:], [P("tp"), P()])]
        with sm.debug.comm_budget(launches=1):
            return clip_grad_norm_(params, 1.0)

    for total in sm.simulate(4)(program)():
        torch.testing.assert_close(total, expected, rtol=1e-6, atol=0)


def test_stages_on_separate_meshes():
    """Each rank is on one mesh, and outside the other."""
    grads = [drawn(5, 3, seed=1), drawn(4, seed=2), drawn(3, seed=3)]
    expected = torch.linalg.vector_norm(torch.cat([g.reshape(-1) for g in grads]))

    def program():
        stages = [sm.DeviceMesh(DEVICE, ranks, axis_names=("x",)) for ranks in ([0, 1], [2, 3])]
        params = [
            *sharded(stages[0], grads[:1], [P("x")]),
            *sharded(stages[1], grads[1:], [P("x"), P()]),
        ]
        with sm.debug.comm_budget(launches=1):
            total = clip_grad_norm_(params, 1.0)
        for p, g in zip(params, grads, strict=True):
            if p.mesh.coordinate is not None:
                torch.testing.assert_close(
                    p.grad.full_tensor(), g / (expected + 1e-6), rtol=1e-5, atol=1e-6
                )
        return total

    for total in sm.simulate(4)(program)():
        torch.testing.assert_close(total, expected, rtol=1e-6, atol=0)


def test_slices_of_one_mesh():
    """Parameters on mesh["tp"] and on mesh["dp"], as torch's users have them: each is one
    parameter, however many ranks hold it.
    """
    grads = [drawn(5, 3, seed=1), drawn(4, seed=2), drawn(3, seed=3)]
    expected = torch.linalg.vector_norm(torch.cat([g.reshape(-1) for g in grads]))

    def program(mesh):
        parts = [(mesh["a"], P("a")), (mesh["b"], P("b")), (mesh, P())]
        params = [
            with_grad(torch.zeros_like(x), x)
            for g, (m, s) in zip(grads, parts, strict=True)
            for x in [put(g, m, s)]
        ]
        with sm.debug.comm_budget(launches=1):
            return clip_grad_norm_(params, 1.0)

    for total in on_mesh((2, 2), program):
        torch.testing.assert_close(total, expected, rtol=1e-6, atol=0)


def test_rank_outside_the_mesh():
    def program():
        mesh = sm.DeviceMesh(DEVICE, [0, 1], axis_names=("x",))
        return clip_grad_norm_(
            sharded(mesh, [torch.ones(4)], [P("x")]), 1.0, error_if_nonfinite=True
        ).item()

    one, two, outside = sm.simulate(3)(program)()
    assert (one, two) == (2.0, 2.0)
    assert math.isnan(outside)


@pytest.mark.parametrize("order", [2.0, math.inf])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_gradients(bad, order):
    """One element on one rank raises the same error on every rank."""
    grad = torch.ones(4)
    grad[2] = bad

    def program(mesh):
        params = sharded(mesh, [grad], [P("a")])
        before = params[0].grad._local.clone()
        try:
            clip_grad_norm_(params, 1.0, order, error_if_nonfinite=True)
        finally:
            torch.testing.assert_close(params[0].grad._local, before, equal_nan=True)

    text = same_error((2, 2), program, RuntimeError, silent=False)
    assert str(bad) in text
    assert "skip this step" in text
    totals = on_mesh(
        (2, 2), lambda mesh: clip_grad_norm_(sharded(mesh, [grad], [P("a")]), 1.0, order).item()
    )
    assert all(math.isnan(t) if math.isnan(bad) else t == bad for t in totals)


def test_pending_gradients_raise():
    def program(mesh, use):
        w = nn.Parameter(put(torch.ones(4), mesh, P()))
        x = put(torch.ones(4), mesh, P("a"))
        with sm.accumulate_grads():
            (w * x).sum().backward()
            use([w])

    for use in (
        lambda ws: clip_grad_norm_(ws, 1.0),
        lambda ws: clip_grad_value_(ws, 1.0),
        lambda ws: tensor_norms([("w", ws[0])], "grad"),
    ):
        text = same_error((2,), lambda mesh, use=use: program(mesh, use), ValueError)
        assert "accumulate_grads() block" in text
        assert "('a',)" in text
        assert "w.grad" in text or "parameters[0].grad" in text


@pytest.mark.parametrize("order", [0, -1.0, -math.inf, math.nan])
def test_unsupported_orders_raise(order):
    assert repr(order) in same_error((2,), lambda mesh: clip_grad_norm_([], 1.0, order), ValueError)
    assert "positive" in same_error(
        (2,), lambda mesh: tensor_norms({"x": torch.ones(2)}, ord=order), ValueError
    )


@every_rank(2)
def test_dtypes_overflow_and_empty(mesh):
    """16-bit gradients have a norm in float32, large ones a finite norm, and no gradients the norm
    0.
    """
    half = sharded(mesh, [torch.full((1000,), 0.1, dtype=torch.bfloat16)], [P("a")])
    exact = half[0].grad.full_tensor().double().norm()
    assert clip_grad_norm_(half, 100.0).item() == pytest.approx(exact.item(), rel=1e-6)
    mixed = sharded(mesh, [torch.ones(3), torch.ones(2, dtype=torch.float64)], [P("a"), None])
    assert clip_grad_norm_(mixed, 1.0).dtype == torch.float64
    assert clip_grad_norm_(sharded(mesh, [torch.tensor([3 + 4j])], [P("a")]), 9.0).item() == 5.0
    frozen = nn.Parameter(put(torch.ones(4), mesh, P("a")))
    assert clip_grad_norm_([frozen], 1.0).item() == 0.0
    assert get_total_norm([]).item() == 0.0


@every_rank(2, 2)
def test_clip_grad_value(mesh):
    grads = [drawn(*shape, seed=i) for i, shape in enumerate(GRADS)]
    params = sharded(mesh, grads, SPECS)
    with sm.debug.comm_budget(launches=0):
        clip_grad_value_(params, 0.3)
    for p, g in zip(params, grads, strict=True):
        torch.testing.assert_close(whole(p.grad), g.clamp(-0.3, 0.3))


@every_rank(2, 2)
def test_norms_by_path(mesh):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 3))
    expected = {path: p.detach().norm().item() for path, p in module.named_parameters()}
    sm.parallel.distribute_module(
        module,
        mesh,
        lambda name, m, mesh: (
            name == "0" and sm.parallel.shard_parameter(m, "weight", mesh, P("a", "b"))
        ),
    )
    with sm.debug.comm_budget(launches=1) as used:
        found = tensor_norms(module)
    assert used.bytes_received == 2 * 3 * 8 * len(expected) // 4
    assert list(found) == list(expected)
    assert found == pytest.approx(expected, rel=1e-6)
    assert tensor_norms(module, of="grad") == {}
    module[0].weight.grad = torch.ones_like(module[0].weight.detach())
    assert tensor_norms(module, of="grad") == {"0.weight": pytest.approx(15**0.5)}
    counts = {"steps": put(torch.tensor([3, -4]), mesh, P("a"))}
    assert tensor_norms(counts, ord=1) == {"steps": 7.0}
    with pytest.raises(ValueError, match="gradient"):
        tensor_norms(module, of="gradient")


def _on_processes():
    mesh = sm.init_device_mesh(DEVICE, (2, 2), axis_names=("a", "b"))
    grads = [drawn(*shape, seed=i) for i, shape in enumerate(GRADS)]
    with collectives() as records:
        total = clip_grad_norm_(sharded(mesh, grads, SPECS), 1.0)
    assert launched(records)[-1:] == ["all_reduce"]
    nan = sharded(mesh, [torch.tensor([1.0, 2.0, math.nan, 0.0])], [P(("a", "b"))])
    return total.item(), clip_grad_norm_(nan, 1.0, math.inf).item()


def test_on_processes(world4):
    expected = (
        torch.cat([drawn(*shape, seed=i).reshape(-1) for i, shape in enumerate(GRADS)])
        .norm()
        .item()
    )
    for total, nan in world4(_on_processes):
        assert total == pytest.approx(expected, rel=1e-6)
        assert math.isnan(nan)
