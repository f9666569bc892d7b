"""explain: steps, bytes, bounds, without processes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings

import shardmesh as sm
from tests.sharding.strategies import AXES, moves


def _layout(spec, shape=(8, 8), mesh=((2, 2), ("dp", "tp")), dtype=torch.float32):
    return sm.Layout.of(sm.AbstractMesh(*mesh), spec, shape, dtype)


@pytest.mark.parametrize(
    ("src", "dst", "ops"),
    [
        (sm.P("dp"), sm.P(), ["all_gather"]),
        (sm.P("dp", "tp"), sm.P(), ["all_gather"]),
        (sm.P(("dp", "tp")), sm.P("dp"), ["all_gather"]),
        (sm.P(), sm.P("dp", "tp"), ["slice"]),
        (sm.P("dp"), sm.P(None, "dp"), ["exchange"]),
        (sm.P("dp", "tp"), sm.P("tp", "dp"), ["permute"]),
        (sm.P("dp"), sm.P(None, "tp"), ["slice", "all_gather"]),
        (sm.P(unreduced={"dp"}), sm.P(), ["all_reduce"]),
        (sm.P(unreduced={"dp", "tp"}), sm.P(), ["all_reduce"]),
        (sm.P(unreduced={"dp"}), sm.P("dp"), ["reduce_scatter"]),
        (sm.P(unreduced={"dp"}), sm.P("tp"), ["slice", "all_reduce"]),
        (sm.P(unreduced={"dp", "tp"}), sm.P("dp", "tp"), ["reduce_scatter"]),
        (sm.P(unreduced={"dp", "tp"}), sm.P(("tp", "dp")), ["reduce_scatter"]),
        (sm.P(unreduced={"dp", "tp"}), sm.P("dp"), ["reduce_scatter", "all_reduce"]),
        (sm.P(unreduced={"tp"}), sm.P("dp", "tp"), ["slice", "reduce_scatter"]),
        (sm.P(unreduced={"dp": "avg"}), sm.P("dp"), ["scale", "reduce_scatter"]),
        (sm.P(), sm.P(unreduced={"dp"}), ["pad"]),
        (sm.P("dp"), sm.P(unreduced={"dp"}), ["pad"]),
        (sm.P("dp"), sm.P("dp", None), []),
    ],
)
def test_steps(src, dst, ops):
    assert [step.op for step in sm.explain(_layout(src), dst).steps] == ops


def test_uneven_gather_is_an_exchange_of_exactly_the_missing_rows():
    explained = sm.explain(_layout(sm.P(("dp", "tp")), shape=(5, 3)), sm.P())
    assert [step.op for step in explained.steps] == ["exchange"]
    assert explained.bytes_received == explained.lower_bound == 4 * 3 * 4


@given(moves(kinds=()))
@settings(max_examples=200)
def test_one_collective_moves_exactly_what_is_missing(move):
    """Without pending values every redistribution meets the lower bound, in at most one launch."""
    mesh_shape, shape, before, after = move
    mesh = (mesh_shape, AXES[: len(mesh_shape)])
    explained = sm.explain(_layout(before, shape, mesh), _layout(after, shape, mesh))
    assert explained.bytes_received == explained.lower_bound
    assert explained.launches <= 1


def test_dict_and_text():
    explained = sm.explain(_layout(sm.P("dp")), sm.P(None, "dp"))
    data = explained.as_dict()
    assert data["launches"] == 1
    assert data["bytes_received"] == data["lower_bound"] == 4 * 4 * 4
    assert "exchange" in str(explained)
    assert str(sm.explain(_layout(sm.P("dp")), sm.P("dp"))).endswith("nothing to do")


def test_layouts_that_do_not_fit():
    with pytest.raises(ValueError, match="shape"):
        sm.explain(_layout(sm.P("dp")), _layout(sm.P("dp"), shape=(8, 9)))
    with pytest.raises(ValueError, match="mesh"):
        sm.explain(_layout(sm.P("dp")), _layout(sm.P("dp"), mesh=((4, 1), ("dp", "tp"))))
    with pytest.raises(ValueError, match="names axis 'pp'"):
        sm.explain(_layout(sm.P("dp")), sm.P("pp"))


def test_planning_for_a_mesh_without_devices():
    layout = _layout(sm.P("dp", "tp"), (4096, 4096), ((64, 8), ("dp", "tp")), torch.bfloat16)
    explained = sm.explain(layout, sm.P(None, "tp"))
    assert [step.op for step in explained.steps] == ["all_gather"]
    assert explained.bytes_received == 63 * 64 * 512 * 2
