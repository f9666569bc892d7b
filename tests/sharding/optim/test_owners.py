"""Owners of matrices: their assignment, and the cost of moving there and back."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import shardmesh as sm
from shardmesh import P
from shardmesh.sharding.optim.owners import MatrixUnit, assign, layout_at, matrix_units, owners_of
from tests.device import DEVICE
from tests.sharding.ranks import AXES, on_mesh
from tests.sharding.strategies import ragged_specs

SHAPES = [(5, 3), (4, 4), (0, 2), (7, 2), (1, 6)]


def work(rows, columns):
    return rows * columns


@settings(max_examples=30)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=12), st.integers(1, 5))
def test_owners_have_balanced_work(works, ranks):
    """Within Graham's bound: the average and one unit more at most."""
    units = [MatrixUnit(i, ((0, 4), (0, 4)), w) for i, w in enumerate(works)]
    owner = assign(units, [[None] * ranks for _ in works])
    loads = [
        sum(w for w, o in zip(works, owner, strict=True) if o == rank) for rank in range(ranks)
    ]
    assert max(loads) <= sum(works) / ranks + max(works) * (1 - 1 / ranks) + 1e-9


def test_whole_matrices_stay_on_their_rank():
    whole, none = ((0, 4), (0, 4)), None
    units = [MatrixUnit(i, whole, 1) for i in range(4)]
    held = [[none, whole, none], [none, whole, none], [whole, none, whole], [none, none, none]]
    assert assign(units, held)[:2] == (1, 1)
    assert assign(units, held)[2] in (0, 2)
    assert assign(units, held)[3] in (0, 2)


@settings(max_examples=20)
@given(st.data())
def test_round_trip_from_any_layouts(data):
    """Each owner gets the whole matrix and returns its result; at most one collective each way,
    each element once.
    """
    mesh_shape = data.draw(st.sampled_from([(4,), (2, 2), (3, 2)]))
    abstract = sm.AbstractMesh(mesh_shape, AXES[: len(mesh_shape)])
    specs = [data.draw(ragged_specs(abstract, shape, kinds=())) for shape in SHAPES]
    plain = [
        torch.arange(math.prod(shape), dtype=torch.float64, device=DEVICE).view(shape)
        for shape in SHAPES
    ]
    units = matrix_units(SHAPES, [False] * len(SHAPES), work)

    def program(mesh):
        placed = [
            sm.distribute_tensor(x, mesh, spec, src_data_rank=None)
            for x, spec in zip(plain, specs, strict=True)
        ]
        owners = owners_of(tuple(sm.typeof(x) for x in placed), units, torch.float64)
        with sm.debug.comm_budget(launches=1) as there:
            wholes = owners.gather([x._local for x in placed])
        lacking = 0
        for i in owners.own_units:
            assert torch.equal(wholes[i], plain[units[i].tensor])
            lacking += wholes[i].numel() - placed[units[i].tensor]._local.numel()
            wholes[i] = wholes[i] * 2 + 1
        parts = [torch.full_like(x._local, -1) for x in placed]
        with sm.debug.comm_budget(launches=1) as back:
            owners.scatter(wholes, parts)
        for part, x in zip(parts, placed, strict=True):
            assert torch.equal(part, x._local * 2 + 1)
        mine = {units[i].tensor for i in owners.own_units}
        back_lacking = sum(x._local.numel() for i, x in enumerate(placed) if i not in mine)
        assert (there.bytes_received, back.bytes_received) == (8 * lacking, 8 * back_lacking)
        return owners.owner, there.launches, back.launches

    assert len(set(on_mesh(mesh_shape, program))) == 1


def test_matrices_already_at_their_owner_are_not_moved():
    def program(mesh):
        specs = [
            P("a", sizes={"a": tuple(6 * (r == owner) for r in range(4))}) for owner in (2, 0, 0)
        ]
        placed = [sm.zeros((6, 2), mesh, spec) for spec in specs]
        owners = owners_of(
            tuple(sm.typeof(x) for x in placed),
            matrix_units([(6, 2)] * 3, [False] * 3, work),
            torch.float32,
        )
        with sm.debug.comm_budget(launches=0):
            wholes = owners.gather([x._local for x in placed])
            owners.scatter(wholes, [x._local for x in placed])
        return owners.owner

    assert on_mesh((4,), program) == [(2, 0, 0)] * 4


def test_the_layout_at_an_owner():
    def program(mesh):
        layout = layout_at(mesh, 2, (5, 3), torch.float32)
        return layout.local_shape, sm.zeros((5, 3), mesh, layout.spec)._local.shape

    assert on_mesh((2, 2), program) == [((0, 3),) * 2, ((0, 3),) * 2, ((5, 3),) * 2, ((0, 3),) * 2]


def test_the_layout_at_an_owner_on_a_mesh_of_ranks_in_another_order():
    def program():
        mesh = sm.DeviceMesh(DEVICE, [[3, 1], [0, 2]], axis_names=("a", "b"))
        return layout_at(mesh, 1, (5, 3), torch.float32).local_shape[0]

    assert sm.simulate(4)(program)() == [0, 5, 0, 0]


def test_blocks_of_a_matrix_have_separate_owners():
    x = torch.arange(42.0, device=DEVICE).view(6, 7)
    units = tuple(
        MatrixUnit(0, ((a, b), (c, d)), 1) for a, b in ((0, 4), (4, 6)) for c, d in ((0, 3), (3, 7))
    )

    def program(mesh):
        placed = sm.distribute_tensor(x, mesh, P("a", sizes={"a": (1, 0, 5)}), src_data_rank=None)
        owners = owners_of((sm.typeof(placed),), units, torch.float32)
        blocks = owners.gather([placed._local])
        for i in owners.own_units:
            (a, b), (c, d) = units[i].box
            assert torch.equal(blocks[i], x[a:b, c:d])
        part = torch.zeros_like(placed._local)
        owners.scatter([-block for block in blocks], [part])
        assert torch.equal(part, -placed._local)
        return set(owners.owner)

    assert on_mesh((3,), program)[0] >= {0, 1}
