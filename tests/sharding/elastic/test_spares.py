"""Ranks that had no part of a state take over its structure, on whatever meshes it is."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import shardmesh as sm
from shardmesh import P
from shardmesh.mesh.comm.agreement import facts_of
from shardmesh.mesh.comm.current_world import current_world
from shardmesh.sharding.checkpoint.state import RandomState
from shardmesh.sharding.checkpoint.tree import leaves, name_of
from shardmesh.sharding.elastic.recovery import recover, wanted_from
from shardmesh.sharding.elastic.snapshot import snapshot
from shardmesh.sharding.elastic.spares import wanted_outside, with_empty_parts, without_parts
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


def fsdp_state(ranks: Sequence[int], seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    mesh = mesh_over(ranks, (len(ranks),), "s")
    model = sm.parallel.fully_shard(nn.Linear(5, 7), mesh, src_data_rank=None)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}


@pytest.mark.parametrize("after", [[1, 2, 3], [0, 2]])
def test_ranks_outside_of_the_new_mesh_build_nothing(after: list[int]):
    """They have no optimizer whose state could be laid out, and a part of the old state or none."""

    def program() -> Any:
        rank = current_world().rank
        state: Any = None
        sent: Any = None
        if rank < 3:
            live = fsdp_state([0, 1, 2], 0)
            live["model"](torch.ones(2, 5)).sum().backward()
            live["optimizer"].step()
            state = snapshot(live)
            sent = without_parts(state, 4)
        sent = facts_of(current_world().group(range(4)), 0, sent)
        state = with_empty_parts(sent, {}, current_world()) if state is None else state
        mesh = mesh_over(after, (len(after),), "s")
        like: Any = fsdp_state(after, 1) if rank in after else None
        into = wanted_outside(mesh, like, partial(wanted_from, state))
        result = recover(state, into, range(4))
        assert rank not in after or result["model"] is like["model"]
        return [
            {
                name_of(path): leaf.full_tensor()
                for path, leaf in leaves(snapshot(tree))
                if isinstance(leaf, sm.ShardedTensor) and rank in leaf.mesh.ranks
            }
            for tree in (state, result)
        ]

    results = sm.simulate(4)(program)()
    expected = results[0][0]
    assert len(expected) == 6
    for rank in after:
        recovered = results[rank][1]
        assert recovered.keys() == expected.keys()
        for name, value in recovered.items():
            assert torch.equal(value, expected[name]), name
