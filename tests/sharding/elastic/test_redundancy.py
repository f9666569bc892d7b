"""State without replicas survives a rank and a host by copies on another host."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import shardmesh as sm
from shardmesh import Layout, P
from shardmesh.mesh.comm.current_world import current_world
from shardmesh.mesh.comm.work import Work
from shardmesh.sharding.checkpoint.agreement import CheckpointError
from shardmesh.sharding.elastic.recovery import StateLostError, plan_recovery, recover
from shardmesh.sharding.elastic.redundancy import Redundancy, place_copies
from tests.sharding.checkpoint.trees import DTYPES, shape_of, spec_of, values_of
from tests.sharding.elastic.states import (
    Build,
    assert_equals,
    ddp,
    fsdp,
    mesh_over,
    on_ranks,
    part_at_box,
    split_tensors,
    train,
    whole_values,
)
from tests.sharding.ranks import collectives, place
from tests.tiers import examples, slow


def on_hosts(mesh: sm.DeviceMesh, node_size: int) -> sm.DeviceMesh:
    mesh.topology = replace(mesh.topology, node_size=node_size)
    return mesh


def lose(
    build: Build, size: int, node_size: int, lost: Sequence[int], shape: Sequence[int], names: str
) -> None:
    """Refresh at steps 2 and 3, train on to step 5, and recover step 3 without some ranks."""

    def program() -> None:
        mesh = on_hosts(mesh_over(range(size), shape, names), node_size)
        state = build(mesh)
        redundancy = Redundancy(mesh)
        train(state, 2)
        redundancy.refresh(state, 2)
        train(state, 1)
        expected = whole_values(state)
        redundancy.refresh(state, 3)
        train(state, 2)
        if current_world().rank in lost:
            return
        alive = [rank for rank in range(size) if rank not in lost]
        torch.manual_seed(1)
        like = build(mesh_over(alive, (len(alive),), names[-1]))
        step = redundancy.newest_step(current_world().group(alive))
        assert step == 3
        recover(redundancy.version(step), like, alive)
        assert_equals(like, expected)
        train(like, 1)

    on_ranks(size, program)


@pytest.mark.parametrize("lost", [(1,), slow((0,)), slow((2,)), slow((0, 1)), (2, 3)])
def test_fsdp_over_four_ranks_survives_a_rank_and_a_host(lost: Sequence[int]):
    lose(fsdp, 4, 2, lost, (4,), "s")


@pytest.mark.slow
@pytest.mark.parametrize("lost", [(0,), (5,), (0, 1), (2, 3), (4, 5), (6, 7), (0, 1, 4, 5)])
def test_fsdp_over_eight_ranks_survives_hosts_that_are_not_neighbors(lost: Sequence[int]):
    lose(fsdp, 8, 2, lost, (8,), "s")


def test_hsdp_inside_of_a_host():
    """Replicas are on the host of their originals: of two one sends."""
    lose(fsdp, 4, 2, (0, 1), (2, 2), "sr")


def test_one_host():
    lose(fsdp, 3, 3, (1,), (3,), "s")


def test_two_neighboring_hosts_are_too_many():
    def program() -> Any:
        mesh = on_hosts(mesh_over(range(6), (6,), "s"), 2)
        state = {"x": place(mesh, torch.arange(12.0)).redistribute(P("s"))}
        redundancy = Redundancy(mesh)
        redundancy.refresh(state, 1)
        if current_world().rank < 4:
            return None
        like = {"x": Layout.of(mesh_over([4, 5], (2,), "s"), P("s"), (12,))}
        with pytest.raises(StateLostError) as error:
            recover(redundancy.version(redundancy.steps[0]), like, [4, 5])
        return error.value.lost

    # ranks 4 and 5 have copies of 2 and 3; those of 0 and 1 were on 2 and 3
    assert on_ranks(6, program)[4] == {"x": (((0, 2),), ((2, 4),))}


def recover_two_of_four() -> bool:
    mesh = on_hosts(mesh_over(range(4), (4,), "s"), 2)
    state = split_tensors(mesh)
    redundancy = Redundancy(mesh)
    redundancy.refresh(state, 0)
    expected = whole_values(state)
    redundancy.refresh(state, 1)
    for x in state.values():
        x.to_local().zero_()  # the program goes on while copies are sent
    if current_world().rank < 2:
        return False
    while redundancy.steps != (1, 0):  # they arrive without being waited for
        time.sleep(0.01)
    like = split_tensors(mesh_over([2, 3], (2,), "s"))
    step = redundancy.newest_step(current_world().group([2, 3]))
    assert step == 1
    result = recover(redundancy.version(step), like, [2, 3])
    assert_equals(result, expected)
    return True


def test_on_processes(world4):
    """Over gloo, as if the host of ranks 0 and 1 were lost: they take no part."""
    assert world4(recover_two_of_four) == [False, False, True, True]


# -- the steps after a recovery --------------------------------------------------------------------


class Training:
    """A model with dropout and an average on a part of the samples, with steps of 6 samples."""

    def __init__(self, mesh: sm.DeviceMesh) -> None:
        self.mesh = mesh
        model = nn.Sequential(nn.Linear(3, 5), nn.Dropout(0.3), nn.Linear(5, 1)).double()
        self.model = sm.parallel.fully_shard(model, mesh, src_data_rank=None)
        samples = torch.arange(60, dtype=torch.float64, device="cpu").reshape(20, 3) / 60
        sampler = sm.training.DistributedSampler(samples, mesh=mesh)  # type: ignore[arg-type]
        self.steps = sm.training.GlobalBatchSampler(sampler, 6, micro_batch=2)
        self.loader = DataLoader(samples, batch_sampler=self.steps)  # type: ignore[arg-type]
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.state: dict[str, Any] = {
            "model": self.model,
            "optimizer": optimizer,
            "average": sm.training.EMA(self.model, 0.5),
            "data": self.steps,
            "random": sm.checkpoint.RandomState(),
        }

    def take_steps(self, count: int) -> list[float]:
        losses: list[float] = []
        sharded = sm.training.batches(self.loader, self.mesh, P(self.mesh.axis_names))
        for micro_batches in islice(self.steps.grouped(sharded), count):
            rows = sum(len(x) for x in micro_batches)
            loss = torch.zeros((), dtype=torch.float64)
            with sm.accumulate_grads():
                for x in micro_batches:
                    part = self.model(x).square().mean() * (len(x) / rows)
                    part.backward()
                    loss += part.detach().full_tensor()
            self.state["optimizer"].step()
            self.state["optimizer"].zero_grad()
            self.state["average"].update()
            losses.append(loss.item())
        return losses


def test_steps_since_are_computed_again_with_the_same_numbers(tmp_path: Path):
    """A refresh after step 1, a loss after step 2; the rest of the epoch on two ranks equals that
    from a checkpoint of step 1.
    """

    def before() -> Any:
        sm.random.manual_seed(3)
        torch.manual_seed(0)
        mesh = mesh_over(range(3), (3,), "s")
        training = Training(mesh)
        training.take_steps(1)
        redundancy = Redundancy(mesh)
        redundancy.refresh(training.state, 1)
        sm.checkpoint.save(training.state, tmp_path, step=1)
        training.take_steps(1)
        return redundancy.version(redundancy.steps[0])

    held = on_ranks(3, before)

    def after(is_recovery: bool) -> Any:
        torch.manual_seed(1)
        training = Training(mesh_over(range(2), (2,), "s"))
        if is_recovery:
            recover(held[1 + current_world().rank], training.state, [1, 2])
        else:
            sm.checkpoint.load(tmp_path, training.state, step=1)
        return training.take_steps(10), whole_values(training.state)

    (losses, tensors), _ = on_ranks(2, lambda: after(True))
    (expected, expected_tensors), _ = on_ranks(2, lambda: after(False))
    assert len(losses) == 3
    assert losses == expected
    assert tensors.keys() == expected_tensors.keys()
    random_states = {name for name in tensors if name.startswith("random.")}
    for name in tensors.keys() - random_states:
        assert torch.equal(tensors[name], expected_tensors[name]), name


# -- what is copied, and what it costs -------------------------------------------------------------


def test_bytes_and_memory():
    """FSDP over 4 ranks: a rank sends its quarter, and holds two quarters for each version."""

    def program() -> Any:
        mesh = on_hosts(mesh_over(range(4), (4,), "s"), 2)
        x = place(mesh, torch.arange(64.0)).redistribute(P("s"))
        y = place(mesh, torch.arange(256, dtype=torch.float64)).redistribute(P("s"))
        state = {"x": x, "y": y, "step": 1, "plain": torch.ones(16, device=mesh.device)}
        redundancy = Redundancy(mesh)
        parts = 16 * 4 + 64 * 8
        version = 2 * parts + 16 * 4  # and the plain tensor, which all ranks have
        assert redundancy.nbytes == 0
        with collectives() as records:
            redundancy.refresh(state, 1)
        sent = [record.bytes_sent for record in records if record.op == "all_to_all"]
        assert sent == [parts]
        assert redundancy.nbytes == version
        redundancy.refresh(state, 2)
        assert redundancy.nbytes == 2 * version
        redundancy.refresh(state, 3)
        assert redundancy.nbytes == 2 * version
        assert redundancy.steps == (3, 2)
        redundancy.finish()
        assert redundancy.nbytes == version
        assert redundancy.steps == (3,)
        return str(redundancy)

    assert on_ranks(4, program)[0].splitlines() == [
        "copies of parts of 2 tensors",
        "rank  host  sends  to  holds",
        "   0     0    576  2     576",
        "   1     0    576  3     576",
        "   2     1    576  0     576",
        "   3     1    576  1     576",
    ]


def test_replicas_on_other_hosts_are_not_copied():
    """HSDP over two hosts and DDP: nothing is sent."""

    def program() -> Any:
        mesh = on_hosts(mesh_over(range(4), (2, 2), "rs"), 2)
        redundancy = Redundancy(mesh)
        with collectives() as records:
            redundancy.refresh(fsdp(mesh), 1)
            redundancy.refresh(ddp(mesh), 2)
        return [record.op for record in records]

    assert "all_to_all" not in on_ranks(4, program)[0]


def test_placement_on_uneven_hosts():
    """A box goes from the less loaded of its holders to its place on the next host."""
    mesh = sm.AbstractMesh((5,), ("s",))
    layouts = {
        "split": Layout.of(mesh, P("s"), (10,)),
        "whole": Layout.of(mesh, P(), (10,)),
    }
    placement = place_copies(layouts, {0: 7, 1: 7, 2: 3, 3: 9, 4: 9})
    assert {pair: [box for _, box, _ in parts] for pair, parts in placement.sent.items()} == {
        (0, 2): [((0, 2),)],
        (1, 2): [((2, 4),)],
        (2, 3): [((4, 6),)],
        (3, 0): [((6, 8),)],
        (4, 1): [((8, 10),)],
    }
    assert placement.held_by(2) == 16
    replicated = sm.AbstractMesh((2, 2), ("s", "r"))
    two = {name: Layout.of(replicated, P("s"), (4,)) for name in "ab"}
    sent = place_copies(two, {0: 0, 1: 0, 2: 1, 3: 1}).sent
    assert sorted(sent) == [(0, 2), (1, 3), (2, 0), (3, 1)]


@pytest.mark.parametrize("seed", range(examples(40)))
def test_any_layouts_survive_any_host(seed: int):
    rng = random.Random(seed)
    size, node_size = rng.choice([(4, 2), (4, 1), (5, 2), (6, 3), (6, 4)])
    tensors = [(shape_of(rng), rng.choice(DTYPES)) for _ in range(5)]
    hosts = range(-(-size // node_size))

    def program() -> None:
        own = random.Random(seed)
        rank = current_world().rank
        mesh = on_hosts(mesh_over(range(size), (size,), "a"), node_size)
        if size in (4, 6):
            mesh = on_hosts(mesh_over(range(size), (2, size // 2), "ab"), node_size)
        state: dict[str, Any] = {}
        wholes: dict[str, torch.Tensor] = {}
        for i, (shape, dtype) in enumerate(tensors):
            whole = values_of(seed + i, shape, dtype).to(mesh.device)
            layout = Layout.of(mesh, spec_of(own, mesh, shape), shape, dtype)
            part = part_at_box(whole, layout).clone()
            state[str(i)] = sm.ShardedTensor._make_guarded(part, layout)
            wholes[str(i)] = whole
        redundancy = Redundancy(mesh)
        redundancy.refresh(state, 1)
        redundancy.finish()
        for leaf in state.values():
            leaf._local.zero_()  # the program goes on
        for host in hosts:
            alive = [r for r in range(size) if r // node_size != host]
            if rank not in alive:
                continue
            own = random.Random(seed + host)
            new = mesh_over(alive, (len(alive),), "n")
            like = {
                name: Layout.of(new, spec_of(own, new, whole.shape), whole.shape, whole.dtype)
                for name, whole in wholes.items()
            }
            version = redundancy.version(1)
            assert not plan_recovery(version, like, alive).lost
            assert_equals(recover(version, like, alive), wholes)

    on_ranks(size, program)


# -- a refresh that is cut off ---------------------------------------------------------------------


class CutOff(Work):
    """A collective of which a rank has not got its part when a loss ends it."""

    def wait(self) -> None:
        raise RuntimeError("connection closed by peer")

    def is_completed(self) -> bool:
        return True


def test_a_refresh_that_is_cut_off_leaves_the_older_version(monkeypatch: pytest.MonkeyPatch):
    """Rank 0 has the copies of step 2, rank 1 has not; rank 2 is lost."""

    def program() -> None:
        rank = current_world().rank
        mesh = mesh_over(range(3), (3,), "s")
        state = fsdp(mesh)
        redundancy = Redundancy(mesh)
        train(state, 1)
        expected = whole_values(state)
        redundancy.refresh(state, 1)
        train(state, 1)
        redundancy.refresh(state, 2)
        assert redundancy._arriving is not None
        if rank == 1:
            redundancy._arriving = redundancy._arriving._replace(work=CutOff())
        train(state, 1)
        if rank == 2:
            return
        assert redundancy.steps == ((2, 1) if rank == 0 else (1,))
        step = redundancy.newest_step(current_world().group([0, 1]))
        assert step == 1
        like = fsdp(mesh_over([0, 1], (2,), "s"))
        recover(redundancy.version(step), like, [0, 1])
        assert_equals(like, expected)

    on_ranks(3, program)


def test_an_older_version_is_freed_when_all_ranks_have_the_next():
    """A rank whose copies have arrived waits for the others before it frees anything."""

    def program() -> Any:
        mesh = mesh_over(range(2), (2,), "s")
        state = {"x": place(mesh, torch.ones(4)).redistribute(P("s"))}
        redundancy = Redundancy(mesh)
        redundancy.refresh(state, 1)
        redundancy.refresh(state, 2)
        if current_world().rank == 1:
            assert redundancy._arriving is not None
            redundancy._arriving = redundancy._arriving._replace(work=CutOff())
        # rank 0 waits until it is interrupted, here by the end of rank 1
        with pytest.raises(RuntimeError, match=r"closed by peer|ranks \[1\] have finished"):
            redundancy.refresh(state, 3)
        return redundancy.steps

    assert on_ranks(2, program) == [(2, 1), (1,)]


# -- errors ----------------------------------------------------------------------------------------


def test_errors():
    def program() -> None:
        mesh = mesh_over(range(2), (2,), "s")
        pending = sm.ShardedTensor.from_local(
            torch.ones(2), mesh, P(None, unreduced={"s"}), shape=(2,)
        )
        redundancy = Redundancy(mesh)
        with pytest.raises(ValueError, match=r"Redundancy.refresh: 'x' is .* which is pending"):
            redundancy.refresh({"x": pending}, 1)
        with pytest.raises(CheckpointError, match="rank 0 has '': step=0, but rank 1 has"):
            redundancy.refresh({}, current_world().rank)
        with pytest.raises(ValueError, match=r"version\(3\): this rank has versions \[\]"):
            redundancy.version(3)
        assert redundancy.newest_step(current_world().group([0, 1])) is None
        redundancy.refresh({}, 4)
        with pytest.raises(ValueError, match="after a refresh of step 4: steps ascend"):
            redundancy.refresh({}, 4)

    on_ranks(2, program)


def test_a_mesh_of_some_ranks_is_refused():
    def program() -> None:
        mesh = mesh_over(range(2), (2,), "s")
        one = mesh_over([0], (1,), "s")
        if current_world().rank == 0:
            x = place(mesh, torch.ones(2))
            with pytest.raises(ValueError, match=r"on ranks \[1\] that are not of"):
                Redundancy(one).refresh({"x": x}, 1)

    on_ranks(2, program)
