"""Every candidate that the planner considers gives correct values and moves the predicted bytes."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import shardmesh as sm
from shardmesh.mesh.topology import Topology
from shardmesh.sharding.redistribute.autograd import redistribute_local
from shardmesh.sharding.redistribute.executor import Executor
from shardmesh.sharding.redistribute.plan.bounds import is_reduction, node_bound, rank_bound
from shardmesh.sharding.redistribute.plan.candidates import candidates
from shardmesh.sharding.redistribute.plan.intermediate_layouts import without_trivial_axes
from shardmesh.sharding.redistribute.plan.planner import as_all_to_all
from shardmesh.sharding.redistribute.plan.steps import Plan, Step
from shardmesh.sharding.redistribute.plan.traffic import (
    bytes_sent,
    most_received,
    plan_bytes_received,
    traffic,
)
from tests.device import DEVICE
from tests.sharding import reference
from tests.sharding.ranks import AXES, collectives, on_mesh
from tests.sharding.strategies import moves, ragged_moves
from tests.tiers import examples

KINDS = ("sum", "max", "min", "product")


@st.composite
def topologies(draw: st.DrawFn, mesh_shape: tuple[int, ...]) -> Topology:
    """Draw a topology of one node, nodes of consecutive ranks, or nodes along some axes."""
    names = AXES[: len(mesh_shape)]
    if draw(st.booleans()):
        return Topology.default("cpu", node_size=draw(st.sampled_from([1, 2, 3, 4])))
    return Topology.default("cpu", crossing=draw(st.lists(st.sampled_from(names), unique=True)))


@st.composite
def nodes_and_moves(draw: st.DrawFn):
    move = draw(st.one_of(moves(KINDS), ragged_moves(KINDS)))
    return draw(topologies(move[0])), move


def all_candidates(mesh, move, topology, rounds=1):
    _, shape, before, after = move
    src = sm.Layout.of(mesh, before, shape, torch.float64)
    dst = sm.Layout.of(mesh, after, shape, torch.float64)
    found = list(candidates(without_trivial_axes(src), without_trivial_axes(dst), topology))
    found += [as_all_to_all(steps) for steps in found]
    return src, dst, [_in_rounds(steps, rounds) for steps in found]


def _in_rounds(steps, rounds):
    def cut(step: Step) -> Step:
        can = step.op in ("all_to_all_v", "all_to_all_reduce", "hierarchical_all_to_all_v")
        return Step(
            step.op, step.axes, step.src, step.dst, step.kind, rounds if can else 1, step.topology
        )

    return tuple(map(cut, steps))


@given(nodes_and_moves(), st.sampled_from([1, 1, 2, 5]))
@settings(max_examples=examples(400))
def test_every_candidate_is_correct_and_moves_the_predicted_bytes(case, rounds):
    topology, move = case

    def program(mesh):
        src, dst, found = all_candidates(mesh, move, topology, rounds)
        parts = reference.contributions(mesh, src.spec, move[1])
        local, expected = reference.local_part(parts, src), reference.value(parts, src.spec)
        for steps in found:
            way = Plan(src, dst, steps, topology)
            kept = local.clone()
            with collectives() as records:
                moved = Executor([way])(local)
            assert torch.equal(local, kept), "the source was written"
            assert sum(r.bytes_received for r in records) == plan_bytes_received(
                way, mesh.coordinate
            ), way
            assert sum(r.bytes_sent for r in records) == sum(
                bytes_sent(s, mesh.coordinate) for s in steps
            ), way
            assert len(records) <= way.launches
            assert moved.shape == dst.local_shape
            whole = redistribute_local(moved, dst, dst.replicated)
            torch.testing.assert_close(whole, expected, rtol=1e-11, atol=1e-11)

    on_mesh(move[0], program)


@given(nodes_and_moves(), st.randoms(use_true_random=False))
@settings(max_examples=examples(150))
def test_ranks_of_a_mesh_in_any_order(case, random):
    """Groups list ranks in ascending order, whatever their order in the mesh."""
    topology, move = case
    ranks = list(range(math.prod(move[0])))
    random.shuffle(ranks)

    def program(_):
        mesh = sm.DeviceMesh(
            DEVICE, torch.tensor(ranks).view(move[0]), axis_names=AXES[: len(move[0])]
        )
        src, dst, found = all_candidates(mesh, move, topology)
        parts = reference.contributions(mesh, src.spec, move[1])
        for steps in found:
            moved = Executor([Plan(src, dst, steps, topology)])(reference.local_part(parts, src))
            whole = redistribute_local(moved, dst, dst.replicated)
            torch.testing.assert_close(
                whole, reference.value(parts, src.spec), rtol=1e-11, atol=1e-11
            )

    on_mesh(move[0], program)


@given(nodes_and_moves())
@settings(max_examples=examples(400))
def test_without_pending_values_every_candidate_meets_the_rank_bound(case):
    topology, move = case
    src, dst, found = all_candidates(sm.AbstractMesh(move[0], AXES[: len(move[0])]), move, topology)
    if not is_reduction(src, dst) and not (set(dst.pending) - set(src.pending)):
        for steps in found:
            assert most_received(steps) == rank_bound(src, dst), steps


@given(nodes_and_moves())
@settings(max_examples=examples(400))
def test_hierarchical_steps_meet_the_node_bound(case):
    """Between nodes, each element that a node lacks is received exactly once."""
    topology, move = case
    src, dst, found = all_candidates(sm.AbstractMesh(move[0], AXES[: len(move[0])]), move, topology)
    if is_reduction(src, dst) or set(dst.pending) - set(src.pending):
        return
    for steps in found:
        entering = sum(traffic(step, topology).into_node for step in steps)
        if any(step.op == "hierarchical_all_to_all_v" for step in steps):
            assert entering == node_bound(src, dst, topology), steps
        assert entering >= node_bound(src, dst, topology)
