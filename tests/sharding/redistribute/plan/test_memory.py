"""Memory: allocations of a rank stay within the plan's prediction."""

from __future__ import annotations

import math
import weakref

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import shardmesh as sm
from shardmesh.sharding.redistribute.executor import Executor
from shardmesh.sharding.redistribute.plan.memory import held_bytes, peak_bytes
from shardmesh.sharding.redistribute.plan.steps import Plan
from tests.device import DEVICE
from tests.sharding.ranks import AXES
from tests.sharding.redistribute.plan.test_candidates import all_candidates, nodes_and_moves
from tests.tiers import examples


class Allocations(TorchDispatchMode):
    """Bytes of the storages that operators make inside the block: now, and at most."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.seen: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (list, tuple)) else [out]:
            if isinstance(x, torch.Tensor):
                self._note(x.untyped_storage())
        return out

    def known(self, x: torch.Tensor) -> None:
        self.seen.add(x.untyped_storage()._cdata)

    def _note(self, storage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self.seen:
            self.seen.add(key)
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._gone, key, size)

    def _gone(self, key: int, size: int) -> None:
        self.seen.discard(key)
        self.now -= size


def allocated(run, local: torch.Tensor) -> int:
    """Return the peak of allocated bytes during `run(local)`, including the tensor."""
    with Allocations() as counted:
        counted.known(local)
        moved = run(local)
        if moved.untyped_storage()._cdata == local.untyped_storage()._cdata:
            moved = moved.clone()  # as redistribute does
    return counted.peak + local.untyped_storage().nbytes()


@given(nodes_and_moves(), st.sampled_from([1, 1, 2, 4]), st.integers(0, 7))
@settings(max_examples=examples(400))
def test_peak_memory_is_within_the_prediction(case, rounds, rank):
    topology, move = case
    mesh_shape = move[0]
    with sm.debug.null_world(math.prod(mesh_shape), rank % math.prod(mesh_shape)):
        mesh = sm.init_device_mesh(DEVICE, mesh_shape, axis_names=AXES[: len(mesh_shape)])
        src, dst, candidates = all_candidates(mesh, move, topology, rounds)
        for steps in filter(None, candidates):
            local = torch.zeros(src.local_shape, dtype=src.dtype)
            runner = Executor([Plan(src, dst, steps, topology)])
            runner(local)  # what is made once is not counted
            assert allocated(runner, local) <= peak_bytes(steps, src), (
                steps,
                held_bytes(steps, src),
            )


def test_allocations_are_counted():
    """Checks the measurement: three tensors are allocated, two of them at a time."""

    def run(x):
        y = x + 1
        z = y + 1
        del y
        return z + 1

    assert allocated(run, torch.zeros(100, dtype=torch.float64)) == 3 * 800


def test_peak_is_both_parts_and_buffers():
    """Without a limit: nothing lies between source and destination that is larger than both."""
    mesh = sm.AbstractMesh((2, 2, 2), ("a", "b", "c"))
    for before in (
        sm.P("a"),
        sm.P(("a", "b", "c")),
        sm.P("a", "b", unreduced={"c"}),
        sm.P(unreduced={"a", "b"}),
    ):
        for after in (sm.P(), sm.P(("c", "b")), sm.P(None, "a"), sm.P("b", ("c", "a"))):
            src = sm.Layout.of(mesh, before, (64, 64))
            dst = src.replace(after)
            explained = sm.debug.explain(src, dst)
            largest = max(src.largest_local_numel, dst.largest_local_numel)
            for step in explained.steps:
                assert step.dst.largest_local_numel <= largest
