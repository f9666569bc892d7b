"""Ranks that had no part of a state take over its structure, on whatever meshes it is."""

from __future__ import annotations

from typing import Any

import torch

import shardmesh as sm
from shardmesh import P
from shardmesh.mesh.comm.current_world import current_world
from shardmesh.sharding.checkpoint.state import RandomState
from shardmesh.sharding.elastic.recovery import recover
from shardmesh.sharding.elastic.snapshot import snapshot
from shardmesh.sharding.elastic.spares import with_empty_parts, without_parts
from tests.sharding.elastic.states import mesh_over

X, Y = torch.arange(24.0).reshape(6, 4), torch.arange(5.0)


def state_on(whole: sm.DeviceMesh, part: sm.DeviceMesh, scale: float) -> dict[str, Any]:
    x, y = (
        sm.distribute_tensor(value * scale, mesh, P("s"), src_data_rank=None)
        for value, mesh in ((X, whole), (Y, part))
    )
    return {"x": x, "y": [y], "lr": 0.1 * scale, "random": RandomState()}


def test_state_on_parts_of_the_mesh():
    """Rank 4 joins four others; `y` is on two of them, and on three of the five."""

    def before() -> Any:
        return snapshot(state_on(mesh_over(range(4), (4,), "s"), mesh_over([1, 2], (2,), "s"), 1.0))

    held = sm.simulate(4)(before)()
    sent = without_parts(held[0], 4)
    assert len(sent.meshes) == 2

    def after() -> Any:
        rank = current_world().rank
        like = state_on(mesh_over(range(5), (5,), "s"), mesh_over([0, 3, 4], (3,), "s"), 0.0)
        state = with_empty_parts(sent, snapshot(like)) if rank == 4 else held[rank]
        result = recover(state, like, range(5))
        y = result["y"][0]
        return result["x"].full_tensor(), y.full_tensor() if rank in (0, 3, 4) else Y, result["lr"]

    for x, y, lr in sm.simulate(5)(after)():
        assert torch.equal(x, X)
        assert torch.equal(y, Y)
        assert lr == 0.1
