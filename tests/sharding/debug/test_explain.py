"""explain: steps, bytes, bounds, without processes."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given, settings

import shardmesh as sm
from tests.sharding.strategies import AXES, moves
from tests.tiers import examples


def _layout(spec, shape=(8, 8), mesh=((2, 2), ("dp", "tp")), dtype=torch.float32):
    return sm.Layout.of(sm.AbstractMesh(*mesh), spec, shape, dtype)


@pytest.mark.parametrize(
    ("src", "dst", "ops"),
    [
        (sm.P("dp"), sm.P(), ["all_gather"]),
        (sm.P("dp", "tp"), sm.P(), ["all_gather"]),
        (sm.P(("dp", "tp")), sm.P("dp"), ["all_gather"]),
        (sm.P(), sm.P("dp", "tp"), ["slice"]),
        (sm.P("dp"), sm.P(None, "dp"), ["all_to_all_v"]),
        (sm.P("dp", "tp"), sm.P("tp", "dp"), ["permute"]),
        (sm.P("dp"), sm.P(None, "tp"), ["slice", "all_gather"]),
        (sm.P(unreduced={"dp"}), sm.P(), ["all_reduce"]),
        (sm.P(unreduced={"dp", "tp"}), sm.P(), ["all_reduce"]),
        (sm.P(unreduced={"dp"}), sm.P("dp"), ["reduce_scatter"]),
        (sm.P(unreduced={"dp"}), sm.P("tp"), ["slice", "all_reduce"]),
        (sm.P(unreduced={"dp", "tp"}), sm.P("dp", "tp"), ["reduce_scatter"]),
        (sm.P(unreduced={"dp", "tp"}), sm.P(("tp", "dp")), ["reduce_scatter"]),
        (sm.P(unreduced={"tp"}), sm.P("dp", "tp"), ["slice", "reduce_scatter"]),
        (sm.P(unreduced={"dp": "avg"}), sm.P("dp"), ["scale", "reduce_scatter"]),
        (sm.P(), sm.P(unreduced={"dp"}), ["pad"]),
        (sm.P("dp"), sm.P(unreduced={"dp"}), ["pad"]),
        (sm.P("dp"), sm.P("dp", None), []),
    ],
)
def test_steps(src, dst, ops):
    assert [step.op for step in sm.debug.explain(_layout(src), dst).steps] == ops


def test_uneven_gather_is_an_exchange_of_exactly_the_missing_rows():
    explained = sm.debug.explain(_layout(sm.P(("dp", "tp")), shape=(5, 3)), sm.P())
    assert [step.op for step in explained.steps] == ["all_to_all_v"]
    assert explained.bytes_received == explained.lower_bound == 4 * 3 * 4


def test_small_tensors_minimize_launches_and_large_ones_bytes():
    small, large = (
        sm.debug.explain(_layout(sm.P(unreduced={"dp", "tp"}), (n, n)), sm.P("dp"))
        for n in (8, 4096)
    )
    assert small.launches == 1
    assert [step.op for step in large.steps] == ["reduce_scatter", "all_reduce"]


@given(moves(kinds=()))
@settings(max_examples=examples(200))
def test_one_collective_moves_exactly_what_is_missing(move):
    """Without pending values every redistribution meets the lower bound, in at most one launch."""
    mesh_shape, shape, before, after = move
    mesh = (mesh_shape, AXES[: len(mesh_shape)])
    explained = sm.debug.explain(_layout(before, shape, mesh), _layout(after, shape, mesh))
    assert explained.bytes_received == explained.lower_bound
    assert explained.launches <= 1


def test_dict_and_text():
    explained = sm.debug.explain(_layout(sm.P("dp")), sm.P(None, "dp"))
    data = explained.as_dict()
    assert data["launches"] == 1
    assert data["bytes_received"] == data["lower_bound"] == 4 * 4 * 4
    assert "all_to_all_v" in str(explained)
    assert str(sm.debug.explain(_layout(sm.P("dp")), sm.P("dp"))).endswith("nothing to do")


@given(moves())
def test_the_dict_is_plain_data(move):
    mesh_shape, shape, before, after = move
    mesh = (mesh_shape, AXES[: len(mesh_shape)])
    explained = sm.debug.explain(_layout(before, shape, mesh), _layout(after, shape, mesh))
    data = explained.as_dict()
    assert json.loads(json.dumps(data)) == {
        **data,
        "steps": [{**step, "axes": list(step["axes"])} for step in data["steps"]],
    }
    assert data["launches"] == sum(step["launches"] for step in data["steps"])
    assert data["seconds"] == pytest.approx(sum(step["seconds"] for step in data["steps"]))
    assert [step["op"] for step in data["steps"]] == [step.op for step in explained.steps]


def test_table_of_one_node_does_not_mention_nodes():
    shown = str(sm.debug.explain(_layout(sm.P("dp")), sm.P()))
    assert "node" not in shown


def test_table_shows_bytes_into_a_node():
    topology = sm.topology.Topology.default("cuda", crossing=("dp",))
    explained = sm.debug.explain(_layout(sm.P("dp"), (64, 64)), sm.P(None, "dp"), topology=topology)
    header, row = str(explained).splitlines()[2:4]
    assert "into node" in header
    assert f"{explained.bytes_into_node:,}" in row
    assert str(explained).splitlines()[-1] == "into a node 8,192 bytes, lower bound 4,096 (2.00x)"


def test_a_reduction_has_no_bound():
    explained = sm.debug.explain(_layout(sm.P(unreduced={"dp"})), sm.P())
    assert explained.lower_bound is explained.node_lower_bound is explained.ratio is None
    assert str(explained).endswith(f"into a rank {explained.bytes_received} bytes")


def test_a_limit_shows_as_rounds():
    layout = _layout(sm.P("dp"), (64, 64))
    explained = sm.debug.explain(layout, sm.P(None, "dp"), max_bytes=20_000)
    rounds = explained.launches
    assert rounds > 1
    assert explained.peak_bytes <= 20_000
    assert f"all_to_all_v x{rounds}" in str(explained)
    with pytest.raises(
        ValueError, match=r"max_bytes=16,384: a rank holds at least .* pass max_bytes="
    ):
        sm.debug.explain(layout, sm.P(None, "dp"), max_bytes=16_384)


def test_incompatible_layouts_raise():
    with pytest.raises(ValueError, match="shape"):
        sm.debug.explain(_layout(sm.P("dp")), _layout(sm.P("dp"), shape=(8, 9)))
    with pytest.raises(ValueError, match="mesh"):
        sm.debug.explain(_layout(sm.P("dp")), _layout(sm.P("dp"), mesh=((4, 1), ("dp", "tp"))))
    with pytest.raises(ValueError, match="names axis 'pp'"):
        sm.debug.explain(_layout(sm.P("dp")), sm.P("pp"))


def test_planning_for_a_mesh_without_devices():
    layout = _layout(sm.P("dp", "tp"), (4096, 4096), ((64, 8), ("dp", "tp")), torch.bfloat16)
    explained = sm.debug.explain(layout, sm.P(None, "tp"))
    assert [step.op for step in explained.steps] == ["all_gather"]
    assert explained.bytes_received == 63 * 64 * 512 * 2
