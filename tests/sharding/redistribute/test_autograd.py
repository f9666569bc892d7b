"""Redistribution between any two layouts, forward and backward, compared with full tensors."""

from __future__ import annotations

import torch
from hypothesis import given, settings

import shardmesh as sm
from shardmesh.sharding.redistribute.autograd import redistribute_local
from shardmesh.sharding.redistribute.plan.traffic import plan_bytes_received
from tests.device import DEVICE
from tests.sharding import reference
from tests.sharding.strategies import AXES, mesh_shapes, moves, shapes, specs
from tests.tiers import examples

KINDS = ("sum", "avg", "max", "min", "product")


def on_mesh(mesh_shape, program):
    """Run `program(mesh)` on every rank of a simulated mesh."""

    def rank():
        return program(sm.init_device_mesh(DEVICE, mesh_shape, axis_names=AXES[: len(mesh_shape)]))

    total = 1
    for n in mesh_shape:
        total *= n
    return sm.simulate(total)(rank)()


def layout_of(mesh, spec, shape):
    return sm.Layout.of(mesh, spec, shape, torch.float64)


def check_value(local, layout, expected):
    """Check the expected global value of the tensor, reduced to replicated, on every rank."""
    whole = redistribute_local(local, layout, layout.replicated)
    torch.testing.assert_close(whole, expected, rtol=1e-12, atol=1e-12)


@given(moves(KINDS))
@settings(max_examples=examples(400), deadline=None)
def test_any_to_any_keeps_the_value(move):
    mesh_shape, shape, before, after = move

    def program(mesh):
        src, dst = layout_of(mesh, before, shape), layout_of(mesh, after, shape)
        parts = reference.contributions(mesh, src.spec, shape)
        moved = redistribute_local(reference.local_part(parts, src), src, dst)
        assert moved.shape == dst.local_shape
        expected = reference.value(parts, src.spec)
        if not dst.pending:
            box = tuple(slice(a, b) for a, b in dst.box)
            torch.testing.assert_close(moved, expected[box], rtol=1e-12, atol=1e-12)
        check_value(moved, dst, expected)

    on_mesh(mesh_shape, program)


@given(moves())
@settings(max_examples=examples(300), deadline=None)
def test_gradient_is_the_dual_redistribution(move):
    """With loss = sum(weight * value), the gradient of every contribution is the weight."""
    mesh_shape, shape, before, after = move
    weight = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def program(mesh):
        src, dst = layout_of(mesh, before, shape), layout_of(mesh, after, shape)
        local = reference.local_part(
            reference.contributions(mesh, src.spec, shape), src
        ).requires_grad_()
        moved = redistribute_local(local, src, dst)
        whole = layout_of(mesh, sm.P(), shape)
        seed = redistribute_local(weight, whole, dst.dual)
        (grad,) = torch.autograd.grad(moved, local, seed)
        assert grad.shape == local.shape
        check_value(grad, src.dual, weight)

    on_mesh(mesh_shape, program)


@given(moves(KINDS))
@settings(max_examples=examples(300), deadline=None)
def test_gradient_of_every_kind_equals_autograd_on_the_stack(move):
    """The gradient of a rank's contribution is what autograd gives for combining the stacked
    contributions.
    """
    mesh_shape, shape, before, after = move
    weight = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def program(mesh):
        src = layout_of(mesh, before, shape)
        dst = layout_of(mesh, after, shape)
        parts = reference.contributions(mesh, src.spec, shape).requires_grad_()
        local = reference.local_part(parts.detach(), src).requires_grad_()
        result = redistribute_local(redistribute_local(local, src, dst), dst, dst.replicated)
        seed = redistribute_local(weight, dst.replicated, dst.replicated.dual)
        (grad,) = torch.autograd.grad(result, local, seed)
        (stacked,) = torch.autograd.grad(reference.value(parts, src.spec), parts, weight)
        box = tuple(slice(a, b) for a, b in src.box)
        mine = stacked[reference.my_contribution(mesh, src.spec)][box]
        summed = src.replace(
            sm.P(*src.spec.dims, unreduced=dict.fromkeys(src.replicated_axes, "sum"))
        )
        reduced = src.replace(sm.P(*src.spec.dims))
        total = redistribute_local(grad, summed, reduced) if src.replicated_axes else grad
        torch.testing.assert_close(total, mine, rtol=1e-9, atol=1e-9)

    on_mesh(mesh_shape, program)


@given(moves())
@settings(max_examples=examples(60), deadline=None)
def test_twice_differentiable(move):
    """d/dx of sum(grad of sum(y**3)) equals that of the full tensor."""
    mesh_shape, shape, before, after = move

    def program(mesh):
        src, dst = layout_of(mesh, before, shape), layout_of(mesh, after, shape)
        x = sm.ShardedTensor._make(
            reference.local_part(
                reference.contributions(mesh, src.spec, shape), src
            ).requires_grad_(),
            src,
        )
        expected = reference.value(
            reference.contributions(mesh, src.spec, shape), src.spec
        ).requires_grad_()
        loss = (x.redistribute(dst.spec) ** 3).sum()
        (first,) = torch.autograd.grad(loss, x, create_graph=True)
        (second,) = torch.autograd.grad((first * first).sum(), x)
        (whole_first,) = torch.autograd.grad((expected**3).sum(), expected, create_graph=True)
        (whole_second,) = torch.autograd.grad((whole_first * whole_first).sum(), expected)
        torch.testing.assert_close(
            first.full_tensor().detach(), whole_first.detach(), rtol=1e-9, atol=1e-9
        )
        torch.testing.assert_close(second.full_tensor(), whole_second, rtol=1e-9, atol=1e-9)

    on_mesh(mesh_shape, program)


@given(mesh_shapes, shapes())
@settings(max_examples=examples(50), deadline=None)
def test_distribute_then_full_tensor(mesh_shape, shape):
    whole = torch.randn(shape, dtype=torch.float64)

    def program(mesh):
        for placement in [sm.Replicate(), *[sm.Shard(d) for d in range(len(shape))]]:
            x = sm.distribute_tensor(whole, mesh, [placement] * mesh.ndim)
            assert torch.equal(x.full_tensor(), whole)

    on_mesh(mesh_shape, program)


@given(moves())
@settings(max_examples=examples(100), deadline=None)
def test_plan_is_pure_and_counts_exactly(move):
    """The plan of an abstract mesh predicts the bytes that each rank really receives."""
    mesh_shape, shape, before, after = move

    def program(mesh):
        src, dst = layout_of(mesh, before, shape), layout_of(mesh, after, shape)
        received = []
        mesh.world.observers.append(lambda record: received.append(record.bytes_received))
        local = reference.local_part(reference.contributions(mesh, src.spec, shape), src)
        redistribute_local(local, src, dst)
        abstract = sm.AbstractMesh(mesh_shape, mesh.axis_names)
        predicted = sm.debug.plan(
            sm.Layout.of(abstract, before, shape, torch.float64),
            sm.Layout.of(abstract, after, shape, torch.float64),
            mesh.topology,
        )
        assert sum(received) == plan_bytes_received(predicted, mesh.coordinate)
        assert len(received) == predicted.launches

    on_mesh(mesh_shape, program)


def test_every_order_of_axes():
    """P(('a', 'b')) and P(('b', 'a')) are different layouts; both convert to placements and
    back.
    """

    def program(mesh):
        x = torch.arange(10.0, dtype=torch.float64)
        for spec in (sm.P(("a", "b")), sm.P(("b", "a"))):
            y = sm.device_put(x, mesh, spec)
            assert sm.device_put(x, mesh, y.placements).spec == y.spec == spec
            assert torch.equal(y.full_tensor(), x)

    on_mesh((2, 2), program)


@given(mesh_shapes, specs(("a", "b"), 2))
@settings(max_examples=20, deadline=None)
def test_result_never_shares_memory(mesh_shape, spec):
    if len(mesh_shape) != 2:
        return

    def program(mesh):
        x = sm.distribute_tensor(torch.ones(4, 6), mesh)
        y = x.redistribute(spec)
        if y is not x:
            y._local.fill_(5)
            assert bool((x._local == 1).all())

    on_mesh(mesh_shape, program)


@given(moves())
@settings(max_examples=examples(100), deadline=None)
def test_the_result_may_be_written_in_place(move):
    """Also where collectives receive into a buffer of which the result is a view.

    A view of the operand, where nothing moves, may not.
    """
    mesh_shape, shape, before, after = move

    def program(mesh):
        src, dst = layout_of(mesh, before, shape), layout_of(mesh, after, shape)
        local = reference.local_part(
            reference.contributions(mesh, src.spec, shape), src
        ).requires_grad_()
        expected = redistribute_local(local * 1, src, dst)
        operand = local * 1
        written = redistribute_local(operand, src, dst)
        if written.untyped_storage()._cdata == operand.untyped_storage()._cdata:
            return
        written.mul_(3)
        torch.testing.assert_close(written, expected * 3, rtol=0, atol=0)
        seed = torch.ones_like(expected)
        (grad,) = torch.autograd.grad(written, local, seed)
        (of_expected,) = torch.autograd.grad(expected, local, seed * 3)
        torch.testing.assert_close(grad, of_expected, rtol=1e-12, atol=1e-12)

    on_mesh(mesh_shape, program)


def test_forward_and_backward_dtype():
    """Forward communicates in one dtype, the gradient in another, and the gradient has the dtype of
    the source.
    """

    def program(mesh):
        dtypes = []
        mesh.world.observers.append(lambda record: dtypes.append(record.dtype))
        local = torch.ones(2, 3, requires_grad=True)
        x = sm.ShardedTensor.from_local(local, mesh, [sm.Shard(0)], shape=(4, 3))
        y = x.redistribute(
            [sm.Replicate()], forward_dtype=torch.bfloat16, backward_dtype=torch.float64
        )
        assert y.dtype == torch.bfloat16
        assert y.shape == (4, 3)
        y.float().sum().backward()
        assert dtypes == [torch.bfloat16, torch.float64]
        assert local.grad is not None
        assert local.grad.dtype == torch.float32
        assert bool((local.grad == 1).all())

    on_mesh((2,), program)
