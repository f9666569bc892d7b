"""Redistribution from one mesh to another, forward and backward, compared with full tensors."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import shardmesh as sm
from shardmesh import Layout, P
from shardmesh.mesh.topology import Topology
from shardmesh.sharding.layout.spec import KINDS
from shardmesh.sharding.redistribute.autograd import redistribute_local
from shardmesh.sharding.redistribute.cross_mesh import redistribute_cross_mesh
from shardmesh.sharding.redistribute.plan.cross_mesh import plan_cross_mesh
from tests.device import DEVICE
from tests.sharding import reference
from tests.sharding.ranks import collectives, launched, same_error
from tests.sharding.strategies import ragged_specs, shapes
from tests.tiers import examples

WORLD = 8
MESH_SHAPES = [(1,), (2,), (3,), (8,), (2, 2), (1, 3), (3, 2), (4, 2), (2, 2, 2)]


@st.composite
def some_ranks(draw, names):
    """Draw the ranks of a mesh in a world of 8, in any order, and its axis names."""
    shape = draw(st.sampled_from(MESH_SHAPES))
    ranks = draw(st.permutations(range(WORLD)))[: math.prod(shape)]
    return torch.tensor(ranks).reshape(shape).tolist(), names[: len(shape)]


@st.composite
def crossings(draw, kinds=KINDS, dst_kinds=None):
    """Draw two meshes of ranks, a tensor shape and a spec on each."""
    shape, sides = draw(shapes()), []
    for names, allowed in (
        ("abc", kinds),
        (draw(st.sampled_from(["abc", "xyz"])), kinds if dst_kinds is None else dst_kinds),
    ):
        ranks, names = draw(some_ranks(tuple(names)))
        abstract = sm.AbstractMesh(torch.tensor(ranks).shape, names)
        sides.append((ranks, names, draw(ragged_specs(abstract, shape, allowed))))
    return shape, *sides


def layouts(crossing):
    """Return the two layouts in the current world."""
    shape, *sides = crossing
    meshes = [sm.DeviceMesh(DEVICE, ranks, axis_names=names) for ranks, names, _ in sides]
    return [
        Layout.of(mesh, spec, shape, torch.float64)
        for mesh, (*_, spec) in zip(meshes, sides, strict=True)
    ]


def inside(layout):
    return layout.mesh.coordinate is not None


def part_of(parts, layout):
    return (
        reference.local_part(parts, layout)
        if inside(layout)
        else torch.empty(0, dtype=torch.float64)
    )


def everywhere(program):
    return sm.simulate(WORLD)(program)()


@given(crossings())
@settings(max_examples=examples(120), deadline=None)
def test_any_mesh_to_any_mesh_keeps_the_value(crossing):
    def program():
        src, dst = layouts(crossing)
        parts = reference.contributions(src.mesh, src.spec, src.shape)
        moved = redistribute_cross_mesh(part_of(parts, src), src, dst)
        assert moved.shape == dst.local_shape
        expected = reference.value(parts, src.spec)
        if inside(dst):
            if not dst.pending:
                reference.equal(moved, expected[tuple(slice(a, b) for a, b in dst.box)])
            reference.equal(redistribute_local(moved, dst, dst.replicated), expected)

    everywhere(program)


@given(crossings())
@settings(max_examples=examples(100), deadline=None)
def test_bytes_are_those_of_the_plan_and_of_the_bound(crossing):
    def program():
        src, dst = layouts(crossing)
        if src.mesh is dst.mesh:
            return  # that is a plan of one mesh
        local = part_of(reference.contributions(src.mesh, src.spec, src.shape), src)
        with collectives() as records:
            redistribute_cross_mesh(local, src, dst)
        plan, rank = plan_cross_mesh(src, dst), src.mesh.world.rank
        received = sum(record.bytes_received for record in records)
        assert received == plan.bytes_received(rank)
        assert plan.pad.launches == 0
        takes_part = bool(plan.transfers) and rank in plan.ranks
        assert len(records) == inside(src) * plan.reduce.launches + takes_part
        if not any(src.mesh.size(a) > 1 for a in src.pending) and not any(
            dst.mesh.size(a) > 1 for a in dst.pending
        ):
            assert received == plan.rank_bound(rank)

    everywhere(program)


@given(crossings())
@settings(max_examples=examples(100), deadline=None)
def test_gradient_equals_autograd_on_the_stack(crossing):
    """The gradient of a rank's contribution is what autograd gives for combining the stacked
    contributions.
    """

    def program():
        src, dst = layouts(crossing)
        weight = torch.randn(
            src.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
        )
        parts = reference.contributions(src.mesh, src.spec, src.shape).requires_grad_()
        local = part_of(parts.detach(), src).requires_grad_()
        result = redistribute_local(redistribute_cross_mesh(local, src, dst), dst, dst.replicated)
        seed = (
            redistribute_local(weight, dst.replicated, dst.replicated.dual)
            if inside(dst)
            else weight.new_empty(0)
        )
        (grad,) = torch.autograd.grad(result, local, seed)
        assert grad.shape == src.local_shape
        if not inside(src):
            return
        (stacked,) = torch.autograd.grad(reference.value(parts, src.spec), parts, weight)
        mine = stacked[reference.my_contribution(src.mesh, src.spec)][
            tuple(slice(a, b) for a, b in src.box)
        ]
        summed = src.replace(src.spec.with_unreduced(dict.fromkeys(src.replicated_axes, "sum")))
        total = redistribute_local(grad, summed, src.replace(src.spec.with_unreduced({})))
        torch.testing.assert_close(total, mine, rtol=1e-9, atol=1e-9)

    everywhere(program)


def whole_sum(local, layout):
    """Return this rank's share of the sum of a tensor's elements."""
    copies = layout.mesh.size(layout.replicated_axes) if layout.replicated_axes else 1
    return local.sum() / copies


@given(crossings(("sum",), ()))
@settings(max_examples=examples(40), deadline=None)
def test_twice_differentiable(crossing):
    """d/dx of sum((d/dx sum(x**3))**2) equals that of the full tensor."""

    def program():
        src, dst = layouts(crossing)
        parts = reference.contributions(src.mesh, src.spec, src.shape)
        x = part_of(parts, src).requires_grad_()
        loss = whole_sum(redistribute_cross_mesh(x, src, dst) ** 3, dst)
        (first,) = torch.autograd.grad(loss, x, create_graph=True)
        first = redistribute_local(first, src.dual, src.grad)
        (second,) = torch.autograd.grad(whole_sum(first**2, src.grad), x)
        if inside(src):
            whole = reference.value(parts, src.spec)
            expected = 2 * (3 * whole**2) * (6 * whole)
            reached = redistribute_local(second, src.dual, src.dual.replicated)
            torch.testing.assert_close(reached, expected, rtol=1e-9, atol=1e-9)

    everywhere(program)


# -- the plan --------------------------------------------------------------------------------------


def abstract(sizes, where, shape=(8, 8)):
    names = ("a", "b", "c")[: len(sizes)]
    return Layout.of(sm.AbstractMesh(sizes, names), where, shape, torch.float64)


def test_a_plan_needs_no_devices():
    plan = plan_cross_mesh(abstract((2,), P("a")), abstract((2, 2), P("a", "b")))
    assert plan.ranks == (0, 1, 2, 3)
    assert plan.launches == 1
    assert [plan.bytes_received(rank) for rank in range(5)] == [0, 16 * 8, 16 * 8, 16 * 8, 0]
    assert [plan.rank_bound(rank) for rank in range(5)] == [
        plan.bytes_received(rank) for rank in range(5)
    ]


@pytest.mark.parametrize(
    ("src", "dst", "text"),
    [
        (
            ((2,), P("a")),
            ((2, 2), P("a", "b")),
            "all_to_all_v among 4 ranks: P('a', None) -> P('a', 'b')",
        ),
        (((4,), P("a")), ((2, 2), P(("a", "b"))), "nothing to move"),
        (((4,), P()), ((2, 2), P("a")), "nothing to move"),
        (
            ((4,), P(unreduced={"a"})),
            ((2, 2), P()),
            "all_reduce over a: P(None, None, unreduced={'a'}) -> P(None, None)",
        ),
        (
            ((4,), P(unreduced={"a"})),
            ((2, 2), P("a", "b")),
            "reduce_scatter over a: P(None, None, unreduced={'a'}) -> P('a', None); all_to_all_v "
            "among 4 ranks: P('a', None) -> P('a', 'b')",
        ),
        (
            ((2,), P("a")),
            ((4,), P(unreduced={"a"})),
            "all_to_all_v among 4 ranks: P('a', None) -> P('a', None); pad: P('a', None) -> "
            "P(None, None, unreduced={'a'})",
        ),
        (
            ((2,), P()),
            ((4,), P(unreduced={"a": "max"})),
            "all_to_all_v among 4 ranks: P(None, None) -> P(None, None); pad: P(None, None) -> "
            "P(None, None, unreduced={'a': 'max'})",
        ),
    ],
)
def test_choice_of_the_cross_mesh_plan(src, dst, text):
    assert repr(plan_cross_mesh(abstract(*src), abstract(*dst))) == f"CrossMeshPlan({text})"


def test_replicas_share_the_sending():
    """Four ranks hold everything; each sends a part of what four others lack."""
    plan = plan_cross_mesh(abstract((4,), P()), abstract((8,), P()))
    assert sorted((t.sender, t.receiver) for t in plan.transfers) == [
        (0, 4),
        (1, 5),
        (2, 6),
        (3, 7),
    ]


def test_the_nearest_holder_sends():
    """Ranks 0 1 | 2 3 share nodes; 1 and 3 lack what 0 and 2 hold."""
    topology = Topology.default("cpu", node_size=2)

    def program():
        src = Layout.of(sm.DeviceMesh(DEVICE, [2, 0], axis_names=("a",)), P(), (8,))
        dst = Layout.of(sm.DeviceMesh(DEVICE, [3, 1], axis_names=("a",)), P(), (8,))
        return [(t.sender, t.receiver) for t in plan_cross_mesh(src, dst, topology).transfers]

    assert sm.simulate(4)(program)() == [[(0, 1), (2, 3)]] * 4


# -- some programs ---------------------------------------------------------------------------------


def on(ranks, where, shape=(6, 4)):
    mesh = sm.DeviceMesh(DEVICE, ranks, axis_names=("x", "y")[: torch.tensor(ranks).ndim])
    return Layout.of(mesh, where, shape, torch.float64)


def _through_three_meshes():
    """Double x on ranks 0 1, square it on 3 2, and on 2 0 1 (replicated) add what came directly
    from the first mesh.
    """
    first, second, third = on([0, 1], P("x")), on([3, 2], P(None, "x")), on([2, 0, 1], P())
    whole = torch.arange(24, dtype=torch.float64).reshape(6, 4)
    x = part_of(whole[None], first).requires_grad_()
    straight = redistribute_cross_mesh(x, first, third)
    y = redistribute_cross_mesh(2 * x, first, second) ** 2
    z = redistribute_cross_mesh(y, second, third) + straight
    if inside(third):
        assert torch.equal(z, 4 * whole**2 + whole)
    (grad,) = torch.autograd.grad(whole_sum(z, third), x)
    assert torch.equal(grad, part_of((8 * whole + 1)[None], first))
    return tuple(grad.shape)


def _to_other_arrangements():
    whole = torch.arange(24, dtype=torch.float64).reshape(6, 4)
    for ranks, where in [
        ([3, 1, 0, 2], P("x")),
        ([[2, 0], [1, 3]], P("y", "x")),
        ([[3, 2]], P(None, ("y", "x"))),
        ([1], P()),
    ]:
        src, dst = on([[0, 1], [2, 3]], P("x", "y")), on(ranks, where)
        x = part_of(whole[None], src).requires_grad_()
        y = redistribute_cross_mesh(x, src, dst)
        assert torch.equal(y, part_of(whole[None], dst))
        y.backward(part_of(whole[None] * 3, dst))
        assert torch.equal(x.grad, part_of(whole[None] * 3, src))


@pytest.mark.parametrize("program", [_through_three_meshes, _to_other_arrangements])
def test_on_real_ranks(world4, program):
    assert world4(program) == sm.simulate(4)(program)()


def test_communication_dtype_of_the_gradient():
    def program():
        src, dst = on([0, 1], P("x")), on([2, 3], P("x"))
        x = part_of(torch.ones(1, 6, 4, dtype=torch.float64), src).requires_grad_()
        with collectives() as records:
            redistribute_cross_mesh(x, src, dst, backward_dtype=torch.bfloat16).sum().backward()
        assert x.grad.dtype == torch.float64
        return [record.dtype for record in records]

    assert sm.simulate(4)(program)() == [[torch.float64, torch.bfloat16]] * 4


def test_ranks_in_neither_mesh_take_no_part():
    def program():
        src, dst = on([0, 1], P("x")), on([2, 1], P())
        x = part_of(torch.ones(1, 6, 4, dtype=torch.float64), src).requires_grad_()
        with collectives() as records:
            y = redistribute_cross_mesh(x, src, dst)
            y.sum().backward()
        return tuple(y.shape), tuple(x.grad.shape), launched(records)

    results = sm.simulate(4)(program)()
    assert results[3] == ((0,), (0,), [])
    # the sum over both replicas of the gradient is pending where they lie, and is reduced there
    # first
    assert results[0] == ((0,), (3, 4), ["all_to_all", "all_to_all"])
    assert results[1] == ((6, 4), (3, 4), ["all_to_all", "reduce_scatter", "all_to_all"])


def test_result_is_a_view_if_nothing_moves():
    def program():
        src, dst = on([0, 1], P()), on([[1, 0]], P(None, "y"))
        x = part_of(torch.ones(1, 6, 4, dtype=torch.float64), src)
        with collectives() as records:
            y = redistribute_cross_mesh(x, src, dst)
        assert records == []
        assert y.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()

    sm.simulate(2)(program)()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            {"shape": (6, 5)},
            "the shape must be the same, got torch.Size([6, 4]) and torch.Size([6, 5]); pass a "
            "layout of the tensor's own shape",
        ),
        (
            {"dtype": torch.float32},
            "the dtype must be the same, got torch.float64 and torch.float32; write x.to(dtype) "
            "first",
        ),
    ],
)
def test_incompatible_layouts_raise(change, text):
    def program(_):
        src, dst = on([0, 1], P("x")), on([2, 1], P("x")).replace(**change)
        redistribute_cross_mesh(part_of(torch.ones(1, 6, 4, dtype=torch.float64), src), src, dst)

    assert text in same_error((4,), program, ValueError)


@pytest.mark.parametrize("parts", [("whole", "x"), ("x", "whole"), ("x", "y")])
def test_slices_of_one_mesh_on_other_ranks_are_other_meshes(parts):
    def program(_):
        whole = sm.DeviceMesh(DEVICE, [[0, 1], [2, 3]], axis_names=("x", "y"))
        src, dst = (
            Layout.of(whole if part == "whole" else whole[part], P(), (4,)) for part in parts
        )
        redistribute_cross_mesh(torch.ones(4), src, dst)

    text = same_error((4,), program, ValueError)
    assert "parts of one mesh" in text
    assert "DeviceMesh(cpu, x=2" in text


def test_other_orders_of_the_axes_of_one_mesh():
    def program():
        whole = sm.DeviceMesh(DEVICE, [[[0, 1], [2, 3]]], axis_names=("z", "x", "y"))
        src, dst = (Layout.of(part, P("x"), (6,)) for part in (whole["x", "y"], whole["y", "x"]))
        x = torch.arange(6.0)
        assert torch.equal(
            redistribute_cross_mesh(x[src.box[0][0] : src.box[0][1]], src, dst),
            x[dst.box[0][0] : dst.box[0][1]],
        )
        flat = Layout.of(whole.flatten(("y", "x")), P("y_x"), (6,))
        assert torch.equal(
            redistribute_cross_mesh(x, src.replicated, flat), x[flat.box[0][0] : flat.box[0][1]]
        )

    sm.simulate(4)(program)()


def test_an_abstract_mesh_holds_no_data():
    def program(_):
        src = on([0, 1], P("x"))
        dst = Layout.of(sm.AbstractMesh((4,), ("x",)), P("x"), src.shape, src.dtype)
        redistribute_cross_mesh(part_of(torch.ones(1, 6, 4, dtype=torch.float64), src), src, dst)

    assert "abstract mesh" in same_error((4,), program, TypeError)
