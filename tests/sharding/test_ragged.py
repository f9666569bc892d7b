"""Ragged layouts: parts of given sizes, as specs, placements and boxes, and tensors in these
layouts.
"""

from __future__ import annotations

import copy
import io
import math
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import shardmesh as sm
from shardmesh import Layout, P, Partial, Replicate, Shard
from shardmesh.kernels.box import box_shape, box_size, slices
from shardmesh.mesh.comm.current_world import current_world
from shardmesh.sharding.layout.spec import (
    KINDS,
    Cut,
    as_spec,
    placements_to_spec,
    spec_to_placements,
)
from shardmesh.sharding.redistribute.plan import without_trivial_axes
from tests.device import DEVICE
from tests.sharding import reference
from tests.sharding.ranks import collectives, every_rank, launched, on_mesh, same_error, save_part
from tests.sharding.strategies import AXES, mesh_shapes, ragged_moves, ragged_specs, shapes
from tests.tiers import examples

ROWS = P("a", sizes={"a": (3, 0, 5)})
X = torch.arange(24.0, dtype=torch.float64).view(8, 3)


@st.composite
def meshes(draw):
    mesh_shape = draw(mesh_shapes)
    return sm.AbstractMesh(mesh_shape, AXES[: len(mesh_shape)])


@st.composite
def layouts(draw, kinds=("sum",)):
    mesh, shape = draw(meshes()), draw(shapes())
    return Layout.of(mesh, draw(ragged_specs(mesh, shape, kinds)), shape, torch.float64)


# -- specs and placements --------------------------------------------------------------------------


@given(st.data(), meshes(), shapes())
def test_spec_to_placements_and_back(data, mesh, shape):
    spec = data.draw(ragged_specs(mesh, shape, KINDS))
    placements = spec_to_placements(spec, mesh.axis_names)
    assert placements_to_spec(placements, mesh.axis_names, len(shape)) == spec
    assert as_spec(list(placements), mesh.axis_names, len(shape)) == spec
    assert Layout.of(mesh, placements, shape) is Layout.of(mesh, spec, shape)


@given(st.data(), meshes(), shapes())
def test_specs_compare_by_value(data, mesh, shape):
    spec = data.draw(ragged_specs(mesh, shape, KINDS))
    for same in (pickle.loads(pickle.dumps(spec)), copy.deepcopy(spec), eval(repr(spec), {"P": P})):
        assert same == spec
        assert hash(same) == hash(spec)
    for placement in spec_to_placements(spec, mesh.axis_names):
        assert eval(repr(placement), vars(sm)) == placement


@given(st.data(), meshes(), shapes())
def test_cuts_determine_a_spec(data, mesh, shape):
    spec = data.draw(ragged_specs(mesh, shape, KINDS))
    assert P.of_cuts(spec.cuts, dict(spec.unreduced)) == spec
    assert all(len(cut.axes) == 1 for dim in spec.cuts for cut in dim if cut.sizes is None)
    assert tuple(tuple(axis for cut in dim for axis in cut.axes) for dim in spec.cuts) == spec.dims
    assert spec.with_unreduced({}).cuts == spec.cuts
    assert spec.with_unreduced({}).unreduced == ()


def test_spellings():
    joint = P(("b", "a"), None, sizes={("b", "a"): [1, 2, 0, 5]}, unreduced={"c"})
    assert joint.cuts == ((Cut(("b", "a"), (1, 2, 0, 5)),), ())
    assert repr(joint) == "P(('b', 'a'), None, unreduced={'c'}, sizes={('b', 'a'): (1, 2, 0, 5)})"
    assert spec_to_placements(joint, AXES[:3]) == (
        Shard(0, order=1, sizes=(1, 2, 0, 5)),
        Shard(0, order=0, sizes=(1, 2, 0, 5)),
        Partial(),
    )
    assert repr(Shard(0, 1, (1, 2))) == "Shard(0, order=1, sizes=(1, 2))"
    inner = P(("a", "b"), sizes={"a": (3, 5)})
    assert inner.cuts == ((Cut(("a",), (3, 5)), Cut(("b",))),)
    assert spec_to_placements(inner, ("a", "b")) == (Shard(0, sizes=(3, 5)), Shard(0))
    assert P("a") != ROWS
    assert Shard(0) != Shard(0, sizes=(1, 2))


@pytest.mark.parametrize(
    ("make", "kind", "words"),
    [
        (lambda: P("a", sizes={"b": (1, 2)}), ValueError, ["'b'", "first axes that split a dim"]),
        (
            lambda: P(("a", "b"), sizes={"b": (1, 2)}),
            ValueError,
            ["'b'", "jointly", "sizes={('dp', 'tp')"],
        ),
        (
            lambda: P(("a", "b"), sizes={("b", "a"): (1, 2)}),
            ValueError,
            ["('b', 'a')", "first axes"],
        ),
        (lambda: P("a", sizes={(): (1,)}), ValueError, ["None", "first axes"]),
        (
            lambda: P(("a", "b"), sizes={"a": (1,), ("a", "b"): (1,)}),
            ValueError,
            ["'a' twice", "keep one"],
        ),
        (
            lambda: P("a", sizes={"a": (1, -2)}),
            ValueError,
            ["-2", "(1, -2)", "write 0 for an empty part"],
        ),
        (lambda: P("a", sizes={"a": 3}), TypeError, ["sizes of 'a'", "(3, 0, 5)", "got 3"]),
        (lambda: P("a", sizes={"a": (1.5,)}), TypeError, ["(1.5,)"]),
        (lambda: P("a", sizes=(3, 5)), TypeError, ["{'dp': (3, 0, 5)}", "got (3, 5)"]),
        (lambda: Shard(0, sizes=(-1, 2)), ValueError, ["Shard(0, sizes=...)", "-1"]),
        (lambda: Shard(0, sizes=2), TypeError, ["Shard(0, sizes=...)", "got 2"]),
        (
            lambda: placements_to_spec(
                [Shard(0, sizes=(1, 2)), Shard(0, sizes=(3,))], ("a", "b"), 1
            ),
            ValueError,
            ["('a', 'b')", "dim 0", "[(1, 2), (3,)]", "jointly"],
        ),
        (
            lambda: placements_to_spec([Shard(0), Shard(0, sizes=(3, 5))], ("a", "b"), 1),
            ValueError,
            ["'b'", "first axes that split a dim"],
        ),
    ],
)
def test_spec_errors(make, kind, words):
    with pytest.raises(kind) as caught:
        make()
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("where", "words"),
    [
        (P("a", sizes={"a": (3, 5)}), ["2 sizes for dim 0", "(a=3)", "3 parts", "write 3 sizes"]),
        (P(("a", "b"), sizes={("a", "b"): (3, 5)}), ["2 sizes", "(a=3, b=2)", "write 6 sizes"]),
        (
            [Shard(0, sizes=(3, 0, 6)), Replicate()],
            ["(3, 0, 6)", "9 elements in total", "has 8", "add up to 8"],
        ),
        (P(None, "a", sizes={"a": (3, 0, 5)}), ["dim 1", "[8, 3]", "has 3"]),
    ],
)
def test_sizes_that_do_not_match_mesh_or_shape_raise(where, words):
    text = same_error(
        (3, 2), lambda mesh: sm.distribute_tensor(torch.zeros(8, 3), mesh, where), ValueError
    )
    for word in words:
        assert word in text


def test_from_local_with_too_few_sizes():
    text = same_error(
        (3,),
        lambda mesh: sm.from_local(torch.zeros(3), mesh, P("a", sizes={"a": (3, 5)})),
        ValueError,
    )
    assert "write 3 sizes" in text


# -- boxes -----------------------------------------------------------------------------------------


def cut_by_torch(layout, coordinate):
    """Return the part that `torch.split` by the sizes and nested `torch.chunk` leave at
    `coordinate`.
    """
    mesh, part = layout.mesh, torch.arange(math.prod(layout.shape)).view(layout.shape)
    for dim, cuts in enumerate(layout.spec.cuts):
        for axes, sizes in cuts:
            index = 0
            for axis in axes:
                index = index * mesh.size(axis) + coordinate[mesh.axis_index(axis)]
            pieces = (
                part.split(sizes, dim) if sizes is not None else part.chunk(mesh.size(axes), dim)
            )
            part = pieces[index] if index < len(pieces) else part.narrow(dim, 0, 0)
    return part


@given(layouts())
def test_boxes_are_the_parts(layout):
    whole = torch.arange(math.prod(layout.shape)).view(layout.shape)
    for coordinate, box in layout.boxes():
        assert torch.equal(whole[slices(box)], cut_by_torch(layout, coordinate))
        assert box_shape(box) == cut_by_torch(layout, coordinate).shape


@given(layouts())
def test_boxes_tile_the_tensor(layout):
    held = torch.zeros(layout.shape, dtype=torch.int64)
    for _, box in layout.boxes():
        held[slices(box)] += 1
    assert bool(
        (
            held
            == layout.mesh.size() // math.prod(layout.mesh.size(axis) for axis in layout.dim_of)
        ).all()
    )


@given(layouts())
def test_the_largest_box(layout):
    assert layout.largest_local_numel == max(box_size(box) for _, box in layout.boxes())


def test_the_largest_box_of_a_large_mesh():
    """Computed per dim: a hundred thousand boxes are not listed."""
    mesh = sm.AbstractMesh((4096, 32), ("dp", "tp"))
    layout = Layout.of(
        mesh, P("dp", "tp", sizes={"dp": [1] * 4095 + [5]}), (4100, 65), torch.float32
    )
    assert layout.largest_local_numel == 5 * 3
    assert layout.box_at((4095, 31)) == ((4095, 4100), (65, 65))


@given(layouts(KINDS))
def test_dual_and_grad_have_the_same_sizes(layout):
    for other in (layout.dual, layout.grad, layout.replace(dtype=torch.float32)):
        assert other.spec.cuts == layout.spec.cuts
        assert list(other.boxes()) == list(layout.boxes())
    assert (
        without_trivial_axes(layout.dual.dual).spec.cuts == without_trivial_axes(layout).spec.cuts
    )
    assert list(without_trivial_axes(layout).boxes()) == list(layout.boxes())


@given(layouts(KINDS))
def test_layouts_survive_pickling(layout):
    again = pickle.loads(pickle.dumps(layout))
    assert again.spec == layout.spec
    assert list(again.boxes()) == list(layout.boxes())


# -- equal boxes, equal layouts --------------------------------------------------------------------


@given(st.data(), meshes(), shapes())
def test_equal_boxes_are_one_layout(data, mesh, shape):
    """However they are spelled, as long as the same axes shard each dim in the same order."""
    layout = Layout.of(mesh, data.draw(ragged_specs(mesh, shape)), shape)
    spelled = {}
    for dim, axes in enumerate(layout.spec.dims):
        joint = (
            axes[: data.draw(st.integers(len(layout.spec.cuts[dim][0].axes), len(axes)))]
            if axes
            else ()
        )
        if joint:
            spelled[joint] = joint_lengths(layout, dim, joint)
    other = P(*layout.spec.dims, unreduced=layout.pending, sizes=spelled)
    assert Layout.of(mesh, other, shape) is layout


def joint_lengths(layout, dim, axes):
    """Return the lengths of the parts of a dim along its first axes, computed from boxes."""
    places = [layout.mesh.axis_index(axis) for axis in axes]
    found = {}
    for coordinate, box in layout.boxes():
        low, high = found.get(tuple(coordinate[i] for i in places), (math.inf, 0))
        found[tuple(coordinate[i] for i in places)] = min(low, box[dim][0]), max(high, box[dim][1])
    return tuple(high - low for _, (low, high) in sorted(found.items()))


@pytest.mark.parametrize(
    ("sizes", "normal"),
    [
        ({"a": (4, 4)}, {}),
        ({"a": (3, 5)}, {"a": (3, 5)}),
        ({("a", "b"): (2, 2, 2, 2)}, {}),
        ({("a", "b"): (2, 1, 3, 2)}, {"a": (3, 5)}),
        ({("a", "b"): (1, 2, 3, 2)}, {("a", "b"): (1, 2, 3, 2)}),
        ({("a", "b", "one"): (1, 2, 3, 2)}, {("a", "b"): (1, 2, 3, 2)}),
    ],
)
def test_redundant_sizes_are_dropped(sizes, normal):
    mesh = sm.AbstractMesh((2, 2, 1), ("a", "b", "one"))
    spec = P(("a", "b", "one"), sizes=sizes)
    assert Layout.of(mesh, spec, (8,)).spec == P(("a", "b", "one"), sizes=normal)
    assert Layout.of(mesh, P("one", sizes={"one": (8,)}), (8,)) is Layout.of(mesh, P("one"), (8,))


def test_sizes_are_printed():
    layout = Layout.of(sm.AbstractMesh((3,), ("a",)), [Shard(0, sizes=(3, 0, 5))], (8, 2))
    assert str(layout) == "f32[8, 2] @ P('a', None, sizes={'a': (3, 0, 5)}) on (a=3)"
    assert sm.debug.visualize(layout).splitlines()[2:] == [
        "rows 0:3         0",
        "rows 3:8         2",
    ]
    assert layout.placements == (Shard(0, sizes=(3, 0, 5)),)


# -- tensors in and out ----------------------------------------------------------------------------


@given(st.data(), meshes(), shapes())
@settings(max_examples=examples(40), deadline=None)
def test_distribute_and_from_local(data, mesh, shape):
    spec = data.draw(ragged_specs(mesh, shape))
    whole = torch.randn(shape, dtype=torch.float64)

    def program(mesh):
        x = sm.distribute_tensor(whole, mesh, spec)
        assert x.to_local().shape == sm.typeof(x).local_shape
        if not sm.typeof(x).pending:
            assert torch.equal(x.to_local(), whole[slices(sm.typeof(x).box)])
        again = sm.from_local(x.to_local(), mesh, spec)
        assert sm.typeof(again) is sm.typeof(x)
        assert sm.typeof(sm.from_local(x.to_local(), mesh, x.placements, shape=shape)) is sm.typeof(
            x
        )

    on_mesh(mesh.shape, program)


@given(ragged_moves())
@settings(max_examples=examples(60), deadline=None)
def test_redistribution_and_its_gradient(move):
    mesh_shape, shape, before, after = move
    whole, weight = torch.randn(2, *shape, dtype=torch.float64)

    def program(mesh):
        x = sm.distribute_tensor(whole, mesh, before, src_data_rank=None).requires_grad_()
        y = x.redistribute(after)
        assert sm.typeof(y) is sm.typeof(x).replace(after)
        reference.equal(y.full_tensor(), whole)
        (y * sm.distribute_tensor(weight, mesh, src_data_rank=None)).sum().backward()
        assert sm.typeof(x.grad) is sm.typeof(x).grad
        reference.equal(x.grad.full_tensor(), weight)

    on_mesh(mesh_shape, program)


@pytest.mark.parametrize(
    "spec", [ROWS, P("a", sizes={"a": (0, 8, 0)}), P(None, "a", sizes={"a": (0, 1, 2)})]
)
def test_new_tensors_are_the_same_as_on_any_layout(spec):
    def program(mesh):
        for make in (sm.zeros, sm.ones, sm.rand, sm.randn):
            made = []
            for where in (spec, P()):
                sm.random.manual_seed(5)
                made.append(make(8, 3, device_mesh=mesh, placements=where))
            assert sm.typeof(made[0]).spec == spec.padded(2)
            assert torch.equal(made[0].full_tensor(), made[1].full_tensor())
        assert (
            sm.empty(8, 3, device_mesh=mesh, placements=spec).to_local().shape
            == made[0].to_local().shape
        )
        for like in (torch.zeros_like, torch.rand_like):
            assert sm.typeof(like(made[0])) is sm.typeof(made[0])

    on_mesh((3,), program)


@every_rank(3)
def test_arange(mesh):
    x = sm.arange(8, device_mesh=mesh, placements=ROWS)
    assert torch.equal(x.to_local(), torch.arange(8)[slices(sm.typeof(x).box)])


@every_rank(3)
def test_one_rank_may_hold_all(mesh):
    x = sm.device_put(X, mesh, P("a", sizes={"a": (0, 8, 0)}))
    assert x.to_local().shape == ((8, 3) if mesh.world.rank == 1 else (0, 3))
    assert torch.equal(x.full_tensor(), X)


def test_rank_outside_the_mesh_gets_the_shape_from_the_sizes():
    def rank():
        mesh = sm.DeviceMesh(DEVICE, [0, 1], axis_names=("a",))
        x = sm.from_local(
            torch.ones((1, 7, 2)[current_world().rank], 3), mesh, P("a", sizes={"a": (1, 7)})
        )
        y = (x + sm.zeros(8, 3, device_mesh=mesh)).sum(1)
        return x.shape, y.spec, tuple(y.to_local().shape)

    kept = P("a", sizes={"a": (1, 7)})
    assert sm.simulate(3)(rank)() == [
        ((8, 3), kept, (1,)),
        ((8, 3), kept, (7,)),
        ((8, 3), kept, (0,)),
    ]


# -- parts that are not cut as torch.chunk cuts ----------------------------------------------------


@pytest.mark.parametrize(
    ("mesh_shape", "lengths", "spec", "instead"),
    [
        ((2,), (2, 3), P("a"), [Shard(0, sizes=(2, 3))]),
        ((3,), (0, 5, 0), P("a"), [Shard(0, sizes=(0, 5, 0))]),
        (
            (2, 2),
            (1, 3, 0, 1),
            P(("b", "a")),
            [Shard(0, 1, (1, 0, 3, 1)), Shard(0, 0, (1, 0, 3, 1))],
        ),
        ((2, 2), (2, 1, 4, 3), P(("a", "b")), [Shard(0, sizes=(3, 7)), Shard(0)]),
    ],
)
def test_from_local_error_suggests_sizes(mesh_shape, lengths, spec, instead):
    def program(mesh):
        sm.from_local(torch.zeros(lengths[mesh.world.rank], 2), mesh, spec)

    text = same_error(mesh_shape, program, ValueError, silent=False)
    assert f"write {instead}, or pass parts" in text

    def described(mesh):
        local = torch.full((lengths[mesh.world.rank], 2), float(mesh.world.rank))
        x = sm.from_local(local, mesh, instead)
        assert torch.equal(x.to_local(), local)
        assert x.shape == (sum(lengths), 2)

    on_mesh(mesh_shape, described)


def test_from_local_of_parts_that_no_sizes_describe():
    def program(mesh):
        sm.from_local(torch.zeros(2 + mesh.world.rank, 3 + mesh.world.rank), mesh, P("a"))

    assert "Shard(" not in same_error((2,), program, ValueError, silent=False)


@pytest.mark.parametrize("lengths", [(2, 2, 2), (3, 1, 4), (3, 0, 4)])
def test_from_local_of_parts_of_other_sizes_than_stated(lengths):
    """Also if the given sizes are those of equal parts."""
    for stated in ((3, 0, 5), (3, 3, 2)):

        def program(mesh, stated=stated):
            sm.from_local(torch.zeros(lengths[mesh.world.rank], 2), mesh, [Shard(0, sizes=stated)])

        text = same_error((3,), program, ValueError, silent=False)
        assert "add up to [8, 2]" in text
        assert str([[n, 2] for n in stated]) in text


# -- training --------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [{"foreach": False}, {"foreach": True}, {"fused": True}], ids=str)
def test_optimizers_equal_one_process(how):
    def trained(weight, bias):
        optimizer = torch.optim.AdamW([weight, bias], lr=0.1, **how)
        for step in range(3):
            (((weight - step) ** 2).sum(1) + bias).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return weight, bias

    plain = trained(nn.Parameter(X.clone()), nn.Parameter(X[:, 0].clone()))

    def program(mesh):
        places = (ROWS, P("a", sizes={"a": (0, 8, 0)}))
        parameters = [
            nn.Parameter(sm.device_put(x, mesh, spec))
            for x, spec in zip((X, X[:, 0]), places, strict=True)
        ]
        layouts = [sm.typeof(p) for p in parameters]
        for p, q, layout in zip(trained(*parameters), plain, layouts, strict=True):
            assert sm.typeof(p) is layout
            torch.testing.assert_close(p.detach().full_tensor(), q.detach())

    on_mesh((3,), program)


@pytest.mark.filterwarnings("ignore:torch.save writes only this rank's part")
@every_rank(3)
def test_state_dicts_copies_and_files(mesh):
    module = nn.Linear(3, 8, dtype=torch.float64)
    module.weight = nn.Parameter(sm.device_put(X, mesh, ROWS))
    state = module.state_dict()
    assert sm.typeof(state["weight"]) is sm.typeof(module.weight)
    module.load_state_dict({"weight": X + 1, "bias": module.bias.detach()})
    assert torch.equal(module.weight.detach().full_tensor(), X + 1)
    module.load_state_dict(
        {"weight": sm.device_put(X, mesh, P(None, "a")), "bias": module.bias.detach()}
    )
    assert module.weight.spec == ROWS.padded(2)
    for again in (copy.deepcopy(module.weight), saved_and_loaded(module.weight)):
        assert sm.typeof(again) is sm.typeof(module.weight)
        assert torch.equal(again.detach().full_tensor(), X)


def saved_and_loaded(x):
    file = io.BytesIO()
    save_part(x, file)
    file.seek(0)
    return torch.load(file)


@every_rank(3)
def test_gradients_arrive_in_the_layout_of_the_leaf(mesh):
    x = sm.device_put(X, mesh, ROWS).requires_grad_()
    with collectives() as records:
        (x * x).sum(1).exp().sum().backward()
    assert records == []
    assert sm.typeof(x.grad) is sm.typeof(x).grad
    plain = X.clone().requires_grad_()
    (plain * plain).sum(1).exp().sum().backward()
    torch.testing.assert_close(x.grad.full_tensor(), plain.grad)


@every_rank(3)
def test_a_gradient_given_in_another_layout_is_moved(mesh):
    x = sm.device_put(X, mesh, ROWS).requires_grad_()
    x.grad = sm.device_put(X, mesh, P("a"))
    assert x.grad.spec == ROWS.padded(2)
    assert torch.equal(x.grad.full_tensor(), X)


@every_rank(3)
def test_redistribution_to_the_same_layout_does_not_communicate(mesh):
    x = sm.device_put(X, mesh, ROWS)
    with collectives() as records:
        assert x.redistribute([Shard(0, sizes=(3, 0, 5))]) is x
    assert launched(records) == []
