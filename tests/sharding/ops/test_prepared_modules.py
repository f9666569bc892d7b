"""A parallel module in torch's DistributedDataParallel."""

from __future__ import annotations

import pytest
import torch

import shardmesh as sm
from shardmesh.parallel import colwise, data_parallel, distribute_module, fully_shard, parallelize
from tests.pool import Pool


def _wrapped_in_ddp() -> None:
    mesh = sm.init_device_mesh("cpu", (4,), axis_names=("dp",))
    for made in (
        fully_shard(torch.nn.Linear(2, 2), mesh),
        data_parallel(torch.nn.Linear(2, 2), mesh),
        parallelize(torch.nn.Linear(2, 2), mesh, {"": colwise()}),
        distribute_module(torch.nn.Linear(2, 2), mesh),
    ):
        with pytest.raises(
            RuntimeError,
            match=(
                "is parallel already, by shardmesh: call it as it is, without "
                "DistributedDataParallel"
            ),
        ):
            torch.nn.parallel.DistributedDataParallel(made)


def test_torch_ddp_raises(world4: Pool) -> None:
    world4(_wrapped_in_ddp)
