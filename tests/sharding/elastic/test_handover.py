"""Ranks that leave send what only they hold, once, to the ranks that stay."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import shardmesh as sm
from shardmesh import P
from shardmesh.kernels.box import box_size
from shardmesh.mesh.abstract_mesh import AbstractMesh
from shardmesh.sharding.elastic.handover import hand_over, place_parts
from shardmesh.sharding.layout.layout import Layout


def test_each_box_that_nobody_else_has_goes_to_one_rank_that_stays():
    mesh = AbstractMesh((2, 3), ("r", "s"))
    layouts = {
        "replicated": Layout.of(mesh, P(), (4,)),
        "rows": Layout.of(mesh, P("s"), (7, 2)),  # two replicas of each third
        "both": Layout.of(mesh, P(("r", "s")), (5,)),  # the last rank has nothing
        "scalar": Layout.of(mesh, P(), ()),
    }
    placement = place_parts(layouts, [1, 4], range(6))
    sent = [(name, box) for parts in placement.sent.values() for name, box, _ in parts]
    assert sorted(sent) == [("both", ((1, 2),)), ("both", ((4, 5),)), ("rows", ((3, 6), (0, 2)))]
    for (sender, receiver), parts in placement.sent.items():
        assert sender in (1, 4)
        assert receiver not in (1, 4)
        assert all(size == 4 * box_size(box) for _, box, size in parts)
    assert place_parts(layouts, range(6), range(6)).sent == {}


@pytest.mark.parametrize("leaving", [[0], [1, 2], [3]])
def test_the_others_recover_from_copies_bit_for_bit(leaving: list[int]):
    @sm.simulate(4)
    def handing_over() -> Any:
        mesh = sm.init_device_mesh("cpu", (4,), axis_names=("s",))
        whole = torch.arange(21.0).reshape(7, 3)
        state = {
            "w": sm.distribute_tensor(whole, mesh, P("s"), src_data_rank=None),
            "small": sm.distribute_tensor(whole[:2].double(), mesh, P("s"), src_data_rank=None),
            "step": 5,
        }
        version = hand_over(state, 5, mesh, leaving)
        stayers = [rank for rank in range(4) if rank not in leaving]
        if mesh.get_rank() in leaving:
            return None
        after = sm.DeviceMesh("cpu", stayers, axis_names=("s",))
        like = {
            "w": sm.distribute_tensor(torch.zeros(7, 3), after, P("s"), src_data_rank=None),
            "small": sm.distribute_tensor(
                torch.zeros(2, 3).double(), after, P("s"), src_data_rank=None
            ),
            "step": 0,
        }
        result = sm.elastic.recover(version, like, stayers)
        return result["w"].full_tensor(), result["small"].full_tensor(), result["step"]

    whole = torch.arange(21.0).reshape(7, 3)
    for values in filter(None, handing_over()):
        assert torch.equal(values[0], whole)
        assert torch.equal(values[1], whole[:2].double())
        assert values[2] == 5


def test_a_tensor_whose_own_mesh_leaves_goes_to_other_ranks():
    @sm.simulate(4)
    def handing_over() -> Any:
        mesh = sm.init_device_mesh("cpu", (4,), axis_names=("s",))
        part = sm.DeviceMesh("cpu", [2, 3], axis_names=("s",))
        whole = torch.arange(10.0)
        state = {"w": sm.distribute_tensor(whole, part, P("s"), src_data_rank=None)}
        version = hand_over(state, 5, mesh, [2, 3])
        if mesh.get_rank() in (2, 3):
            return None
        after = sm.DeviceMesh("cpu", [0, 1], axis_names=("s",))
        like = {"w": sm.distribute_tensor(torch.zeros(10), after, P("s"), src_data_rank=None)}
        return sm.elastic.recover(version, like, [0, 1])["w"].full_tensor()

    for values in handing_over()[:2]:
        assert torch.equal(values, torch.arange(10.0))
