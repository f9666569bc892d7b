"""Layouts: boxes, duals, identity."""

from __future__ import annotations

import copy
import gc
import math
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import shardmesh as sm
from shardmesh import Layout, P
from shardmesh.sharding.layout import layout as layout_module
from shardmesh.sharding.layout.layout import MeshLayouts
from shardmesh.sharding.layout.spec import KINDS
from tests.device import DEVICE
from tests.sharding.ranks import on_mesh
from tests.sharding.strategies import AXES, mesh_shapes, shapes, specs


@st.composite
def layouts(draw, kinds=("sum",)):
    mesh_shape, shape = draw(mesh_shapes), draw(shapes())
    names = AXES[: len(mesh_shape)]
    return Layout.of(
        sm.AbstractMesh(mesh_shape, names),
        draw(specs(names, len(shape), kinds)),
        shape,
        torch.float64,
    )


def chunk_by_torch(layout, coordinate):
    """Return the flat indices of the elements that nested `torch.chunk` leaves at `coordinate`."""
    part = torch.arange(math.prod(layout.shape)).view(layout.shape)
    for dim, axes in enumerate(layout.spec.dims):
        for axis in axes:
            pieces = part.chunk(layout.mesh.size(axis), dim)
            index = coordinate[layout.mesh.axis_index(axis)]
            part = pieces[index] if index < len(pieces) else part.narrow(dim, 0, 0)
    return part


@given(layouts())
def test_boxes_are_nested_chunks(layout):
    whole = torch.arange(math.prod(layout.shape)).view(layout.shape)
    for coordinate, box in layout.boxes():
        expected = chunk_by_torch(layout, coordinate)
        assert tuple(stop - start for start, stop in box) == expected.shape
        assert torch.equal(whole[tuple(slice(*interval) for interval in box)], expected)


@given(layouts())
def test_boxes_tile_the_tensor(layout):
    """Each element is held by exactly as many ranks as the axes that split nothing say."""
    held = torch.zeros(layout.shape, dtype=torch.int64)
    for _, box in layout.boxes():
        held[tuple(slice(*interval) for interval in box)] += 1
    assert bool(
        (
            held
            == layout.mesh.size() // math.prod(layout.mesh.size(axis) for axis in layout.dim_of)
        ).all()
    )


@given(layouts(KINDS))
def test_the_largest_box_is_that_of_coordinate_0(layout):
    sizes = [math.prod(stop - start for start, stop in box) for _, box in layout.boxes()]
    assert layout.largest_local_numel == max(sizes)


@given(layouts(KINDS))
def test_is_empty(layout):
    assert layout.has_empty_part == any(
        math.prod(stop - start for start, stop in box) == 0 for _, box in layout.boxes()
    )


def without_trivial_axes(layout):
    kept = {axis: kind for axis, kind in layout.spec.unreduced if layout.mesh.size(axis) > 1}
    return layout.replace(P(*layout.spec.dims, unreduced=kept))


@given(layouts())
def test_dual_is_an_involution(layout):
    """Up to axes of one rank, on which pending and replicated are the same."""
    assert layout.dual.dual is without_trivial_axes(layout)
    assert layout.dual.dim_of == layout.dim_of
    assert set(layout.dual.pending) == set(layout.replicated_axes)


@given(layouts(("max", "min", "product", "avg")))
def test_gradient_of_other_pending_kinds_is_per_rank(layout):
    """No sum may run over an axis on which every rank's value has its own gradient."""
    assert {layout.dual.pending[axis] for axis in layout.pending} <= {"each"}
    assert layout.dual.dual.dim_of == layout.dim_of
    assert not set(layout.dual.replicated_axes) - {
        a for a in layout.replicated_axes if a not in layout.dual.pending
    }


@given(layouts(KINDS))
def test_equal_layouts_are_one_object(layout):
    again = Layout.of(layout.mesh, layout.placements, list(layout.shape), layout.dtype)
    assert again is layout
    assert copy.deepcopy(layout) is copy.copy(layout) is layout
    assert len({layout, again}) == 1
    assert layout.replace() is layout
    assert layout.replace(dtype=torch.float32) is not layout
    assert layout.replace(dtype=torch.float32).replace(dtype=torch.float64) is layout


@given(layouts(KINDS))
def test_pickling(layout):
    """Loaded with an equal mesh it is an equal layout; with an interned mesh it is the same
    object.
    """
    loaded = pickle.loads(pickle.dumps(layout))
    assert (loaded.mesh, loaded.spec, loaded.shape, loaded.dtype) == (
        layout.mesh,
        layout.spec,
        layout.shape,
        layout.dtype,
    )


def test_pickling_on_a_device_mesh_gives_the_same_object():
    def program(mesh):
        layout = Layout.of(mesh, P("a"), (5, 3))
        assert pickle.loads(pickle.dumps(layout)) is layout

    on_mesh((2,), program)


def test_size_one_axes_hold_everything():
    layout = Layout.of(sm.AbstractMesh((1, 2), ("a", "b")), P("a", unreduced={}), (4,))
    assert layout.is_fully_replicated
    assert layout.replicated_axes == ("b",)
    assert Layout.of(layout.mesh, P("b"), (4,)).is_fully_replicated is False


def test_the_trap_of_uneven_nested_shards():
    """(5, 3) under [Shard(0), Shard(0)] on (2, 2): 3 + 2 rows, then 2 + 1 and 1 + 1, as torch.chunk
    cuts.
    """
    layout = Layout.of(sm.AbstractMesh((2, 2), ("a", "b")), [sm.Shard(0), sm.Shard(0)], (5, 3))
    assert [box[0] for _, box in layout.boxes()] == [(0, 2), (2, 3), (3, 4), (4, 5)]
    whole = torch.arange(15).view(5, 3)

    def program(mesh):
        assert torch.equal(
            sm.distribute_tensor(whole, mesh, [sm.Shard(0), sm.Shard(0)]).full_tensor(), whole
        )

    on_mesh((2, 2), program)


def test_ranks_outside_the_mesh_hold_nothing():
    def program():
        mesh = sm.DeviceMesh(DEVICE, [1, 2], axis_names=("x",))
        return Layout.of(mesh, P("x"), (5, 3)).local_shape

    assert sm.simulate(4)(program)() == [(0,), (3, 3), (2, 3), (0,)]


@pytest.mark.parametrize(
    ("spec", "shape", "dtype", "text"),
    [
        (P("dp", "tp"), (4, 6), torch.float32, "f32[4, 6] @ P('dp', 'tp') on (dp=2, tp=3)"),
        (P(unreduced={"tp"}), (), torch.bfloat16, "bf16[] @ P(unreduced={'tp'}) on (dp=2, tp=3)"),
        (P(), (3,), torch.float8_e4m3fn, "float8_e4m3fn[3] @ P(None) on (dp=2, tp=3)"),
    ],
)
def test_repr(spec, shape, dtype, text):
    assert repr(Layout.of(sm.AbstractMesh((2, 3), ("dp", "tp")), spec, shape, dtype)) == text


def test_repr_shows_this_ranks_part_and_str_is_the_same_everywhere():
    def program(mesh):
        layout = Layout.of(mesh, P("a"), (3, 2))
        return repr(layout), str(layout)

    (repr0, str0), (repr1, str1) = on_mesh((2,), program)
    assert repr0 == "f32[3, 2] @ P('a', None) on (a=2), local [2, 2]"
    assert repr1 == "f32[3, 2] @ P('a', None) on (a=2), local [1, 2]"
    assert str0 == str1 == "f32[3, 2] @ P('a', None) on (a=2)"


@pytest.mark.parametrize(
    ("spec", "shape", "dtype", "words"),
    [
        (P("z"), (4,), torch.float32, ["'z'", "('a', 'b')"]),
        (P("a", "b"), (4,), torch.float32, ["2 entries", "1 dims"]),
        ([sm.Shard(0)], (4,), torch.float32, ["1 placements", "2 axes"]),
        (
            [sm.Partial("avg"), sm.Replicate()],
            (4,),
            torch.int64,
            ["average", "'a'", "i64", "Partial('sum')", "floating"],
        ),
        (P(unreduced={"b": "avg"}), (4,), torch.bool, ["average", "'b'", "bool"]),
    ],
)
def test_invalid_layouts_raise(spec, shape, dtype, words):
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the words are checked below
        Layout.of(sm.AbstractMesh((2, 3), ("a", "b")), spec, shape, dtype)
    for word in words:
        assert word in str(caught.value)


def test_cache_of_layouts_is_bounded(monkeypatch):
    """Older ones are kept only while referenced, and stay the same object."""
    monkeypatch.setattr(layout_module, "_LIMIT", 64)
    mesh = sm.AbstractMesh((2,), ("a",))
    held = Layout.of(mesh, P("a"), (1000,))
    for n in range(500):
        Layout.of(mesh, P("a"), (n,))
    gc.collect()
    layouts = MeshLayouts.of(mesh)
    assert len(layouts.recent) <= 64
    assert len(layouts.alive) <= 65
    assert Layout.of(mesh, P("a"), (1000,)) is held
    assert Layout.of(mesh, [sm.Shard(0)], [1000]) is held
