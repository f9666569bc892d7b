"""The methods that `methods.py` binds to `ShardedTensor`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import shardmesh as sm
from shardmesh import P
from shardmesh.sharding.ops import methods
from shardmesh.sharding.tensor import redistribute
from shardmesh.sharding.tensor.sharded_tensor import ShardedTensor
from tests.sharding.ranks import every_rank

BOUND = [
    "addressable_data",
    "addressable_shards",
    "backward",
    "from_local",
    "full_tensor",
    "global_shards",
    "grad",
    "grad_fn",
    "is_leaf",
    "item",
    "numpy",
    "redistribute",
    "register_hook",
    "register_post_accumulate_grad_hook",
    "requires_grad",
    "requires_grad_",
    "to_local",
    "tolist",
]


@pytest.mark.parametrize("name", BOUND)
def test_bound_methods_override_those_of_torch_and_have_docstrings(name):
    assert name in vars(ShardedTensor)
    assert getattr(ShardedTensor, name).__doc__
    assert getattr(torch.Tensor, name, None) is not getattr(ShardedTensor, name)


def test_torch_calls_of_overridden_methods_reach_them():
    for name in ("item", "tolist", "requires_grad_"):
        assert vars(ShardedTensor)[name] is getattr(methods, name)


@every_rank(2)
def test_redistribute_of_a_plain_or_donated_tensor_raises(mesh):
    with pytest.raises(
        TypeError,
        match=(
            "redistribute takes a ShardedTensor, got Tensor; place a plain tensor with "
            "distribute_tensor"
        ),
    ):
        sm.redistribute(torch.ones(2), P())
    x = sm.ones(4, device_mesh=mesh, placements=P("a"))
    sm.redistribute(x, P(), donate=True)
    with pytest.raises(RuntimeError, match="this tensor was donated"):
        sm.redistribute(x, P())


@every_rank(2)
def test_cached_redistribute_is_one_frame_above_the_plan(mesh):
    x, frames = sm.ones(4, device_mesh=mesh, placements=P("a")), []
    x.redistribute(P())

    def count(frame, event, _):
        if event == "call" and frame.f_code.co_filename == redistribute.__file__:
            frames.append(frame.f_code.co_name)

    sys.setprofile(count)
    try:
        x.redistribute(P())
    finally:
        sys.setprofile(None)
    assert frames == ["redistribute", "_copy_if_shared"]


_ROOT = Path(sm.__file__).parent
_PARTS = tuple(str(_ROOT / part) + "/" for part in ("kernels", "mesh", "sharding"))
MOVES = [
    (P(), P("a")),
    (P("a"), P()),
    (P("a"), P(None, "a")),
    (P(unreduced={"a"}), P()),
    (P(unreduced={"a"}), P("a")),
]


def _frames_of_a_warm_redistribute(mesh):
    """Return the number of nested library frames when torch's collective is called, and its
    maximum, for each redistribution.
    """
    found = []
    for src, dst in MOVES:
        layout = sm.Layout.of(mesh, src, (8, 8))
        x = sm.from_local(torch.ones(layout.local_shape), mesh, src, shape=(8, 8))
        depths = [0]
        launched = []

        def count(frame, event, _, depths=depths, launched=launched):
            if event in ("call", "return") and frame.f_code.co_filename.startswith(_PARTS):
                depths.append(depths[-1] + (1 if event == "call" else -1))
            elif event == "call" and frame.f_code.co_filename == dist.distributed_c10d.__file__:
                launched.append(depths[-1])

        try:
            for is_warm in (False, False, True):
                sys.setprofile(count if is_warm else None)
                x.redistribute(dst)
        finally:
            sys.setprofile(None)
        found.append((launched[0] if launched else 0, max(depths)))
    return found


def _frames_on_processes():
    return _frames_of_a_warm_redistribute(sm.init_device_mesh("cpu", (4,), axis_names=("a",)))


def test_a_warm_redistribute_is_at_most_eight_functions_deep():
    with sm.debug.null_world(4):
        found = _frames_of_a_warm_redistribute(sm.init_device_mesh("cpu", (4,), axis_names=("a",)))
    assert all(deepest <= n for (_, deepest), n in zip(found, [4, 8, 8, 8, 8], strict=True)), found


def test_processes_launch_a_collective_seven_functions_deep(world4):
    for found in world4(_frames_on_processes):
        most = [0, 7, 7, 7, 9]  # the reduce_scatter of gloo is an all_to_all
        assert all(launched <= n for (launched, _), n in zip(found, most, strict=True)), found
