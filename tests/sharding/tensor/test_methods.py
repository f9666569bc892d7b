"""The methods that `methods.py` binds to `ShardedTensor`."""

from __future__ import annotations

import sys

import pytest
import torch

import shardmesh as sm
from shardmesh import P
from shardmesh.sharding.tensor import methods, redistribute
from shardmesh.sharding.tensor.sharded_tensor import ShardedTensor
from tests.sharding.ranks import every_rank

BOUND = [
    "addressable_data", "addressable_shards", "backward", "from_local", "full_tensor", "global_shards", "grad", "grad_fn", "is_leaf",
    "item", "numpy", "redistribute", "register_hook", "register_post_accumulate_grad_hook", "requires_grad", "requires_grad_",
    "to_local", "tolist",
]  # fmt: skip


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
    with pytest.raises(TypeError, match="redistribute takes a ShardedTensor, got Tensor; place a plain tensor with distribute_tensor"):
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
    assert frames == ["redistribute", "_unshared"]
