"""Plans: the steps of a redistribution, before they run."""

from __future__ import annotations

import gc
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import shardmesh as sm
from shardmesh import Layout, P
from shardmesh.kernels.box import box_size
from shardmesh.sharding.layout.layout import MeshLayouts
from shardmesh.sharding.layout.spec import KINDS
from shardmesh.sharding.redistribute.plan.traffic import plan_bytes_received
from tests.sharding.ranks import AXES, on_mesh
from tests.sharding.strategies import moves


def layout_pair(move, mesh=None):
    mesh_shape, shape, before, after = move
    mesh = mesh or sm.AbstractMesh(mesh_shape, AXES[: len(mesh_shape)])
    return Layout.of(mesh, before, shape, torch.float64), Layout.of(
        mesh, after, shape, torch.float64
    )


def as_text(plan):
    return [repr(step) for step in plan.steps]


@given(moves(KINDS))
def test_steps_lead_from_one_layout_to_the_other(move):
    src, dst = layout_pair(move)
    at, sizes = src, dst.mesh.size
    for step in sm.debug.plan(src, dst).steps:
        assert [box for _, box in step.src.boxes()] == [box for _, box in at.boxes()]
        assert set(step.axes) <= set(src.mesh.axis_names)
        assert step.is_local == (not step.axes) or step.op == "scale"
        at = step.dst
    assert [box for _, box in at.boxes()] == [box for _, box in dst.boxes()]
    assert {a: k for a, k in at.pending.items() if sizes(a) > 1} == {
        a: k for a, k in dst.pending.items() if sizes(a) > 1
    }


@given(moves(KINDS))
def test_bytes_are_bounded_by_gathering_everything(move):
    """A rank receives at most what it would if all contributions of all ranks came to it."""
    src, dst = layout_pair(move)
    everything = src.nbytes * math.prod(src.mesh.size(axis) for axis in src.pending)
    for coordinate, box in src.boxes():
        assert (
            plan_bytes_received(sm.debug.plan(src, dst), coordinate)
            <= everything - box_size(box) * src.dtype.itemsize
        )


@given(moves(()))
def test_moving_boxes_fetches_each_missing_element_once(move):
    """Without pending values, a rank receives exactly what it lacks."""
    src, dst = layout_pair(move)
    for coordinate, box in src.boxes():
        after = dst.box_at(coordinate)
        own = 1
        for (a, b), (c, d) in zip(box, after, strict=True):
            own *= max(0, min(b, d) - max(a, c))
        assert (
            plan_bytes_received(sm.debug.plan(src, dst), coordinate) == (box_size(after) - own) * 8
        )


@given(moves(KINDS))
def test_nothing_to_do_for_equal_layouts(move):
    src, _ = layout_pair(move)
    plan = sm.debug.plan(src, src)
    assert plan.steps == ()
    assert plan.launches == 0
    assert "nothing to do" in repr(plan)


@given(moves(KINDS))
def test_plan_is_a_pure_function_of_the_layouts(move):
    """Every rank of a real mesh and an abstract mesh give the same steps; nothing communicates."""
    topology = sm.topology.Topology.default("cpu")
    expected = as_text(sm.debug.plan(*layout_pair(move), topology))

    def program(mesh):
        assert as_text(sm.debug.plan(*layout_pair(move, mesh), topology)) == expected

    on_mesh(move[0], program)


@given(moves(KINDS), st.sampled_from(AXES))
def test_axes_of_one_rank_are_ignored(move, axis):
    """For any layout on an axis of size one, the steps equal those without the axis."""
    mesh_shape, shape, before, after = move
    wider = sm.AbstractMesh((1, *mesh_shape), ("one", *AXES[: len(mesh_shape)]))
    dims = [("one", *before.dims[0]), *before.dims[1:]] if shape else []
    src = Layout.of(wider, P(*dims, unreduced=dict(before.unreduced)), shape, torch.float64)
    dst = Layout.of(wider, after, shape, torch.float64)
    assert [step.op for step in sm.debug.plan(src, dst).steps] == [
        step.op for step in sm.debug.plan(*layout_pair(move)).steps
    ]


@pytest.mark.parametrize(
    ("before", "after", "ops"),
    [
        (P("a"), P(), ["all_gather"]),
        (P(), P("a"), ["slice"]),
        (P(), P("a", "b"), ["slice"]),
        (P("a"), P(None, "a"), ["all_to_all_v"]),
        (P("a"), P(None, "b"), ["slice", "all_gather"]),
        (P("a", "b"), P("b", "a"), ["all_to_all_v"]),
        (P(("a", "b")), P(("b", "a")), ["permute"]),
        (P(("a", "b")), P("a"), ["all_gather"]),
        (P(("a", "b")), P(), ["all_gather"]),
        (P(unreduced={"a"}), P(), ["all_reduce"]),
        (P(unreduced={"a", "b"}), P(), ["all_reduce"]),
        (P(unreduced={"a"}), P("a"), ["reduce_scatter"]),
        (P(unreduced={"a"}), P("b", "a"), ["slice", "reduce_scatter"]),
        (P(unreduced={"a"}), P("b"), ["slice", "all_reduce"]),
        (P(), P(unreduced={"a"}), ["pad"]),
        (P("a"), P(unreduced={"a"}), ["pad"]),
        (P(unreduced={"a": "avg"}), P(), ["scale", "all_reduce"]),
        (P(unreduced={"a": "max"}), P("a"), ["reduce_scatter"]),
        (P("a", unreduced={"b"}), P(None, "a", unreduced={"b"}), ["all_to_all_v"]),
    ],
)
def test_simple_redistributions_are_one_collective(before, after, ops):
    src, dst = layout_pair(((2, 4), (8, 8), before, after))
    assert [step.op for step in sm.debug.plan(src, dst).steps] == ops


def test_uneven_parts_are_gathered_by_an_exchange_without_padding():
    src, dst = layout_pair(((4,), (5, 3), P("a"), P()))
    plan = sm.debug.plan(src, dst)
    assert [step.op for step in plan.steps] == ["all_to_all_v"]
    assert [plan_bytes_received(plan, c) for c, _ in src.boxes()] == [9 * 8, 9 * 8, 12 * 8, 15 * 8]


def test_repr():
    src, dst = layout_pair(((2, 4), (8, 8), P(unreduced={"a"}), P("b", "a")))
    assert repr(sm.debug.plan(src, dst)) == (
        "Plan(slice: P(None, None, unreduced={'a'}) -> P('b', None, unreduced={'a'}); "
        "reduce_scatter over a: P('b', None, unreduced={'a'}) -> P('b', 'a'))"
    )


def test_a_mesh_of_a_hundred_thousand_ranks():
    mesh = sm.AbstractMesh((4096, 8, 4), ("dp", "tp", "pp"))
    shape = (65536, 8192)
    plan = sm.debug.plan(
        Layout.of(mesh, P("dp", "tp"), shape), Layout.of(mesh, P(("tp", "dp")), shape)
    )
    assert plan.launches == 1
    assert plan_bytes_received(plan, (5, 3, 1)) == 2 * 8192 * 4  # two rows, none of which it held


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"shape": (4, 5)}, "shape"),
        ({"dtype": torch.int64}, "dtype"),
        ({"mesh": sm.AbstractMesh((2,), ("z",))}, "mesh"),
    ],
)
def test_incompatible_layouts_raise(change, word):
    mesh = sm.AbstractMesh((2,), ("a",))
    given = {"mesh": mesh, "where": P(), "shape": (4, 4), "dtype": torch.float32}
    src, dst = Layout.of(**given), Layout.of(**{**given, **change})
    with pytest.raises(ValueError, match=f"the {word} must be the same, got .* and ") as caught:
        sm.debug.plan(src, dst)
    assert str(src) in str(caught.value)
    assert str(dst) in str(caught.value)


@pytest.mark.slow
def test_candidate_layouts_are_not_retained():
    mesh = sm.AbstractMesh((2, 2, 2), ("a", "b", "c"))
    pairs = [
        (P(unreduced={"a", "b"}), P("a")),
        (P("a", unreduced={"b"}), P(None, "b")),
        (P("a"), P(("b", "a"))),
    ]
    for rows in range(8, 808, 8):
        for before, after in pairs:
            sm.debug.plan(Layout.of(mesh, before, (rows, 8)), Layout.of(mesh, after, (rows, 8)))
    gc.collect()
    given = len(pairs) * 2 * 100
    layouts = MeshLayouts.of(mesh)
    assert len(layouts.recent) <= 2 * given  # each as spelled and as padded
    assert len(layouts.alive) <= given + 1000  # the last ones are held by bounded caches
