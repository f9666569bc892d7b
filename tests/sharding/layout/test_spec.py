"""Specs and placements: two spellings of the same information."""

from __future__ import annotations

import copy
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardmesh as sm
from shardmesh import P, Partial, Replicate, Shard
from shardmesh.sharding.layout.spec import (
    KINDS,
    RaggedPlacements,
    as_spec,
    placements_to_spec,
    spec_to_placements,
)
from tests.sharding.strategies import specs

AXES = ("a", "b", "c")

KINDS_THAT_MIX = ("sum", "avg")


@given(st.data(), st.integers(1, 3), st.integers(0, 3))
def test_spec_to_placements_and_back(data, axes, ndim):
    names = AXES[:axes]
    spec = data.draw(specs(names, ndim, KINDS))
    placements = spec_to_placements(spec, names)
    assert len(placements) == axes
    assert placements_to_spec(placements, names, ndim) == spec
    assert as_spec(list(placements), names, ndim) == as_spec(spec, names, ndim) == spec


@st.composite
def placement_lists(draw, ndim):
    """Draw one placement per axis, with explicit orders if several axes shard a dim."""
    kind = draw(st.sampled_from(KINDS))
    simple = [Replicate(), Partial(kind), *[Shard(d) for d in range(-ndim, ndim)]]
    return [draw(st.sampled_from(simple)) for _ in range(draw(st.integers(1, 3)))]


@given(st.data(), st.integers(0, 3))
def test_placements_to_spec_and_back(data, ndim):
    """Back come the same placements, with dims counted from 0."""
    placements = data.draw(placement_lists(ndim))
    names = AXES[: len(placements)]
    again = spec_to_placements(placements_to_spec(placements, names, ndim), names)
    assert again == tuple(Shard(p.dim % ndim) if isinstance(p, Shard) else p for p in placements)


@given(st.data(), st.integers(1, 3), st.integers(0, 3))
def test_reprs_evaluate_to_equal_objects(data, axes, ndim):
    names = AXES[:axes]
    spec = data.draw(specs(names, ndim, KINDS))
    assert eval(repr(spec), {"P": P}) == spec
    for placement in spec_to_placements(spec, names):
        assert eval(repr(placement), vars(sm)) == placement


@given(st.data(), st.integers(1, 3), st.integers(0, 3))
def test_specs_compare_by_value(data, axes, ndim):
    spec = data.draw(specs(AXES[:axes], ndim, KINDS))
    for same in (
        pickle.loads(pickle.dumps(spec)),
        copy.deepcopy(spec),
        P(*spec.dims, unreduced=dict(spec.unreduced)),
    ):
        assert same == spec
        assert hash(same) == hash(spec)
    with pytest.raises(AttributeError):
        spec.dims = ()


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        (P(), "P()"),
        (P("dp", ("tp", "cp"), None), "P('dp', ('tp', 'cp'), None)"),
        (P(["dp"]), "P('dp')"),
        (P(None, "tp", unreduced={"dp"}), "P(None, 'tp', unreduced={'dp'})"),
        (P(unreduced="dp"), "P(unreduced={'dp'})"),
        (P(unreduced={"b": "sum", "a": "avg"}), "P(unreduced={'a': 'avg', 'b': 'sum'})"),
    ],
)
def test_repr(spec, text):
    assert repr(spec) == text


def test_the_order_of_axes_shows_in_placements_only_where_it_is_not_mesh_order():
    names = ("dp", "tp")
    assert spec_to_placements(P(("dp", "tp")), names) == (Shard(0), Shard(0))
    assert spec_to_placements(P(("tp", "dp")), names) == (Shard(0, order=1), Shard(0, order=0))
    assert repr(Shard(0, order=1)) == "Shard(0, order=1)"
    assert placements_to_spec([Shard(0, order=0), Shard(0, order=1)], names, 1) == P(("dp", "tp"))


def test_torch_placements_are_accepted():
    torch_tensor = pytest.importorskip("torch.distributed.tensor")
    theirs = [torch_tensor.Shard(-1), torch_tensor.Replicate(), torch_tensor.Partial("max")]
    assert as_spec(theirs, AXES, 2) == P(None, "a", unreduced={"c": "max"})


def test_torch_strided_shards_raise():
    placements = pytest.importorskip("torch.distributed.tensor.placement_types")
    with pytest.raises(TypeError, match="_StridedShard"):
        as_spec([placements._StridedShard(0, split_factor=2), Shard(0)], ("a", "b"), 2)


def test_placement_questions():
    assert Shard(1).is_shard()
    assert Shard(1).is_shard(1)
    assert not Shard(1).is_shard(0)
    assert not Shard(1).is_replicate()
    assert Replicate().is_replicate()
    assert not Replicate().is_partial()
    assert Partial("max").is_partial()
    assert Partial("max").is_partial("max")
    assert not Partial("max").is_partial("sum")


def test_none_is_replicated():
    assert as_spec(None, ("a", "b"), 2) == P(None, None)


@pytest.mark.parametrize(
    ("make", "kind", "words"),
    [
        (lambda: P("x", "x"), ValueError, ["P('x', 'x')", "'x' more than once"]),
        (lambda: P("x", unreduced={"x"}), ValueError, ["'x' more than once"]),
        (lambda: P(("x", "y", "x")), ValueError, ["'x' more than once"]),
        (lambda: P(3), TypeError, ["axis name", "3"]),
        (lambda: P(("x", 3)), TypeError, ["axis name", "('x', 3)"]),
        (lambda: P(unreduced={"x": "mean"}), ValueError, ["'mean'", "'avg'"]),
        (
            lambda: P(unreduced={"x": "max", "y": "sum"}),
            ValueError,
            ["['max', 'sum']", "reduce one of the axes first"],
        ),
        (lambda: P(unreduced={"x": "max", "y": "min"}), ValueError, ["['max', 'min']"]),
        (lambda: Shard("a"), TypeError, ["dim", "P('a')"]),
        (lambda: Partial("mean"), ValueError, ["'mean'", "'avg'"]),
        (lambda: as_spec(P("z"), AXES, 2), ValueError, ["'z'", "('a', 'b', 'c')"]),
        (lambda: as_spec(P(None, "a", None), AXES, 2), ValueError, ["3 entries", "2 dims"]),
        (
            lambda: as_spec([Shard(0)], AXES, 2),
            ValueError,
            ["1 placements", "3 axes", "('a', 'b', 'c')", "one placement per"],
        ),
        (lambda: as_spec([Shard(0)] * 4, AXES, 2), ValueError, ["4 placements", "3 axes"]),
        (
            lambda: as_spec([Shard(2), Replicate(), Replicate()], AXES, 2),
            ValueError,
            ["Shard(2)", "2 dims"],
        ),
        (
            lambda: as_spec([Shard(-3), Replicate(), Replicate()], AXES, 2),
            ValueError,
            ["Shard(-3)", "2 dims"],
        ),
        (
            lambda: as_spec([Shard(0), Replicate(), Replicate()], AXES, 0),
            ValueError,
            ["Shard(0)", "0 dims"],
        ),
        (lambda: as_spec("a", AXES, 2), TypeError, ["'a'", "P('a')"]),
        (lambda: as_spec(Shard(0), AXES, 2), TypeError, ["Shard(0)", "[Shard(0)]"]),
        (
            lambda: as_spec([Shard(0), "a", None], AXES, 2),
            TypeError,
            ["'a'", "Shard, Replicate or Partial"],
        ),
        (
            lambda: as_spec([Shard, Replicate(), Replicate()], AXES, 2),
            TypeError,
            ["Shard, Replicate or Partial"],
        ),
        (
            lambda: as_spec([Shard(0, order=0), Shard(0, order=0), Replicate()], AXES, 2),
            ValueError,
            ["dim 0", "[0, 0]", "0..1"],
        ),
        (
            lambda: as_spec([Shard(1, order=0), Shard(-1), Replicate()], AXES, 2),
            ValueError,
            ["dim 1", "none of them"],
        ),
        (
            lambda: as_spec([Shard(0, order=1), Replicate(), Replicate()], AXES, 2),
            ValueError,
            ["dim 0", "[1]"],
        ),
        (
            lambda: as_spec([Partial("max"), Partial(), Replicate()], AXES, 2),
            ValueError,
            ["['max', 'sum']"],
        ),
    ],
)
def test_invalid_specs_raise(make, kind, words):
    with pytest.raises(kind) as caught:
        make()
    for word in words:
        assert word in str(caught.value)


def test_placements_with_sizes_are_equal_to_those_without():
    """Programs for FSDP2 ask for `placements == (Shard(0),)`; sizes count where both have them."""
    sized, plain = Shard(0, sizes=(1, 3)), Shard(0)
    placements = RaggedPlacements((sized, Replicate()))
    assert placements == (plain, Replicate())
    assert (plain, Replicate()) == placements
    assert placements == (sized, Replicate())
    assert placements != (Shard(0, sizes=(3, 1)), Replicate())
    assert placements != (Shard(1), Replicate())
    assert placements != (plain,)
    assert hash(placements) == hash((sized, Replicate()))


def test_layouts_tell_sizes_apart():
    """The placements that a layout is asked for by are no key that is equal to another layout's."""
    mesh = sm.AbstractMesh((2,), ("dp",))
    ragged = sm.Layout.of(mesh, [Shard(0, sizes=(1, 3))], (4,))
    equal = sm.Layout.of(mesh, [Shard(0)], (4,))
    assert sm.Layout.of(mesh, ragged.placements, (4,)) is ragged
    assert sm.Layout.of(mesh, equal.placements, (4,)) is equal
