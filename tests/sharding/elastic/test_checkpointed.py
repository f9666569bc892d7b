"""What no rank holds comes from the checkpoint of the same step, and from no other."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import shardmesh as sm
from shardmesh import Layout, P
from shardmesh.mesh.comm.current_world import current_world
from shardmesh.sharding.checkpoint.storage import pieces
from shardmesh.sharding.elastic.recovery import StateLostError, plan_recovery, recover
from tests.device import DEVICE
from tests.sharding.elastic.states import (
    assert_equals,
    bits_of,
    ddp,
    fsdp,
    mesh_over,
    on_ranks,
    part_at_box,
    split_tensors,
    train,
    whole_values,
)
from tests.sharding.ranks import place
from tests.tiers import slow


@pytest.mark.parametrize("lost", [(2,), slow((0,)), slow((1, 2)), slow((0, 1, 3))])
def test_fsdp(tmp_path: Path, lost: Sequence[int]):
    """Parameters, buffers and optimizer state, of ranks without replicas."""
    alive = [rank for rank in range(4) if rank not in lost]

    def program() -> None:
        state = fsdp(mesh_over(range(4), (4,), "s"))
        train(state)
        expected = whole_values(state)
        sm.checkpoint.save(state, tmp_path, step=2)
        if current_world().rank in lost:
            return
        torch.manual_seed(1)
        like = fsdp(mesh_over(alive, (len(alive),), "s"))
        with pytest.raises(StateLostError, match="load the newest checkpoint"):
            recover(state, like, alive)
        recover(state, like, alive, checkpoint=tmp_path, step=2)
        assert_equals(like, expected)
        train(like, 1)

    on_ranks(4, program)


def recover_from(folder: str) -> bool:
    state = split_tensors(mesh_over(range(4), (4,), "s"))
    expected = whole_values(state)
    sm.checkpoint.save(state, folder, step=2)
    if current_world().rank == 2:
        return False
    like = split_tensors(mesh_over([0, 1, 3], (3,), "s"))
    result = recover(state, like, [0, 1, 3], checkpoint=folder, step=2)
    assert_equals(result, expected)
    return True


def test_on_processes(world4, tmp_path: Path):
    """Over gloo each rank reads what it needs; rank 2 takes no part."""
    assert world4(recover_from, str(tmp_path)) == [True, True, False, True]


def test_each_piece_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Two parts that are lost are in one piece, which two ranks need."""
    reads: list[str] = []
    read_tensor = pieces.read_tensor

    def counted(stored: Any, piece: Any, *rest: Any) -> Any:
        reads.append(piece.name)
        return read_tensor(stored, piece, *rest)

    monkeypatch.setattr(pieces, "read_tensor", counted)
    wholes = {
        "x": torch.arange(24.0, device=DEVICE).reshape(12, 2),
        "unused": torch.ones(3, device=DEVICE),
        "0-d": torch.tensor(7, device=DEVICE),
    }

    def program() -> Any:
        old = mesh_over(range(6), (6,), "s")
        whole = {name: place(old, x) for name, x in wholes.items()}
        sm.checkpoint.save(whole, tmp_path, step=5)
        # a tensor without dims that only rank 3 has, as of a stage of a pipeline
        of_one = sm.DeviceMesh(DEVICE, torch.tensor([3], device="cpu"), axis_names=("p",))
        zero_d = Layout.of(of_one, P(), (), torch.int64)
        state = {
            "x": whole["x"].redistribute(P("s")),
            "unused": whole["unused"],
            "0-d": _part_of(wholes["0-d"], zero_d),
        }
        if current_world().rank in (1, 3):
            return None
        alive = [0, 2, 4, 5]
        new = mesh_over(alive, (2, 2), "rs")
        like = {
            "x": Layout.of(new, P("s"), (12, 2)),
            "unused": Layout.of(new, P(), (3,)),
            "0-d": Layout.of(new, P(), (), torch.int64),
        }
        plan = plan_recovery(state, like, alive, checkpoint=tmp_path, step=5)
        result = recover(state, like, alive, checkpoint=tmp_path, step=5)
        for name, x in result.items():
            assert bits_of(x.to_local()) == bits_of(part_at_box(wholes[name], x._layout))
        return str(plan)

    texts = on_ranks(6, program)
    assert sorted(reads) == ["0-d", "x"]
    assert texts[0].splitlines() == [
        "recovery of 3 tensors from 4 ranks; ranks 1, 3 lost",
        "rank  is now  bytes  receives  sends  from",
        "   0       0     68        16     16  2: 16, checkpoint: 24",
        "   2       2     68        32     32  4: 16, 5: 16, checkpoint: 24",
        "   4       4     68        32     32  0: 16, 2: 16, checkpoint: 24",
        "   5       5     68        16     16  4: 16, checkpoint: 24",
        "from step 5: x[(2:4, 0:2), (6:8, 0:2)]",
        "from step 5: 0-d[0:1]",
    ]


def _part_of(whole: torch.Tensor, layout: Layout) -> sm.ShardedTensor:
    mesh: Any = layout.mesh
    local = whole if mesh.coordinate is not None else whole.new_empty(())
    return sm.ShardedTensor._make_guarded(local, layout)


def test_a_checkpoint_of_another_step_is_not_taken(tmp_path: Path):
    def program() -> Any:
        mesh = mesh_over(range(2), (2,), "s")
        state = {"x": place(mesh, torch.ones(4)).redistribute(P("s"))}
        missing = tmp_path / "missing"
        if current_world().rank == 0:
            like = {"x": Layout.of(mesh_over([0], (1,), "s"), P("s"), (4,))}
            with pytest.raises(StateLostError, match="missing has no checkpoint: go back"):
                recover(state, like, [0], checkpoint=missing, step=7)
        for step in (5, 6):
            sm.checkpoint.save(state, tmp_path, step=step)
        if current_world().rank == 1:
            return None
        with pytest.raises(StateLostError) as error:
            recover(state, like, [0], checkpoint=tmp_path, step=7)
        plan = plan_recovery(state, like, [0], checkpoint=tmp_path, step=7)
        assert plan.newest is not None
        assert plan.newest.step == 6
        assert plan.checkpoint is None
        return str(error.value), error.value.lost

    text, lost = on_ranks(2, program)[0]
    assert text.splitlines() == [
        "recover: 1 of 1 tensors have elements that only lost ranks held (rank 1); "
        f"{tmp_path} has none of step 7; the newest is of step 6: go back to a checkpoint as a "
        "whole",
        "lost: x[2:4]",
    ]
    assert lost == {"x": (((2, 4),),)}


def test_nothing_is_read_where_ranks_hold_all(tmp_path: Path):
    """There is no such folder."""

    def program() -> None:
        state = ddp(mesh_over(range(3), (3,), "d"))
        train(state)
        expected = whole_values(state)
        if current_world().rank == 0:
            return
        like = ddp(mesh_over([1, 2], (2,), "d"))
        recover(state, like, [1, 2], checkpoint=tmp_path / "none", step=1)
        assert_equals(like, expected)

    on_ranks(3, program)


def test_errors(tmp_path: Path):
    def program() -> None:
        mesh = mesh_over(range(2), (2,), "s")
        x = place(mesh, torch.ones(4)).redistribute(P("s"))
        sm.checkpoint.save({"y": x, "z": torch.ones(2, device=DEVICE)}, tmp_path, step=1)
        if current_world().rank == 1:
            return
        target = Layout.of(mesh_over([0], (1,), "s"), P("s"), (4,))
        with pytest.raises(ValueError, match="needs step=, the number under which"):
            recover({"x": x}, {"x": target}, [0], checkpoint=tmp_path)
        with pytest.raises(ValueError, match=r"'x', of which parts are lost, .* no such tensor"):
            recover({"x": x}, {"x": target}, [0], checkpoint=tmp_path, step=1)
        with pytest.raises(ValueError, match=r"torch.float32\[4\] in the state, and .*\[2\]"):
            recover({"z": x}, {"z": target}, [0], checkpoint=tmp_path, step=1)

    on_ranks(2, program)
