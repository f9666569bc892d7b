"""`async_save` on a stand-in for a GPU whose copies to pinned memory arrive late: values, and what
the host waits for.
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch

import shardmesh as sm
from shardmesh import P
from shardmesh.mesh.comm.current_world import current_world
from shardmesh.sharding.checkpoint import staging
from tests.stand_in import device
from tests.stand_in.child import call
from tests.stand_in.host_syncs import HostSyncs


def saved_twice() -> dict[str, Any]:
    """Save a tree twice, change it at once; return what was saved, and what the host waited for
    before that.
    """

    def rank() -> Any:
        mesh = sm.init_device_mesh(device.NAME, (2,), axis_names=("dp",))
        ones = [torch.ones(5, 3 + i, device=device.NAME) for i in range(4)]
        tree: dict[str, Any] = {
            f"w{i}": sm.distribute_tensor(x, mesh, P("dp")) for i, x in enumerate(ones)
        }
        tree["half"] = sm.distribute_tensor(
            torch.ones(4, 4, dtype=torch.bfloat16, device=device.NAME).T, mesh, P(None, "dp")
        )
        tree["none"] = sm.distribute_tensor(
            torch.ones(1, 2, dtype=torch.int64, device=device.NAME), mesh, P("dp")
        )
        tree["plain"], tree["host"] = torch.tensor([7, 7], device=device.NAME), torch.tensor([3.0])
        with tempfile.TemporaryDirectory() as one:
            (folder,) = mesh.group().all_gather_object(one)[:1]
            waits, places = [], []
            for step in range(2):
                with HostSyncs() as mode:
                    saving = sm.checkpoint.async_save(tree, folder, step=step)
                    waits.append(list(mode.syncs))
                    for x in tree.values():
                        x.zero_().add_(step + 2)
                    saving.wait()
                places.append(current_world().state(staging._StagingMemory).buffer.data_ptr())
            found = []
            for step in range(2):
                like = {name: torch.empty_like(x) for name, x in tree.items()}
                loaded = sm.checkpoint.load(folder, like, step=step)
                found.append({name: sorted(set(_whole(x))) for name, x in loaded.items()})
            mesh.group().barrier()
        return {"values": found, "waits": waits, "is_kept": places[0] == places[1]}

    return sm.simulate(2)(rank)()[0]


def _whole(x: Any) -> list[float]:
    whole = x.full_tensor() if isinstance(x, sm.ShardedTensor) else x
    return whole.cpu().double().flatten().tolist()


def test_the_host_does_not_wait_for_copies() -> None:
    """But for values that are the same on all ranks, which are compared; the copies are those of
    before, in memory that is used again.
    """
    found = call(saved_twice)
    names = ["half", "none", *(f"w{i}" for i in range(4))]
    first = {name: [1.0] for name in names} | {"plain": [7.0], "host": [3.0]}
    assert found["values"] == [first, {name: [2.0] for name in first}]
    for waits in found["waits"]:
        assert [wait.partition(" at ")[0] for wait in waits] == ["Event.synchronize"]
    assert found["is_kept"]
