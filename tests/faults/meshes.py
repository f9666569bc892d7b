"""Programs in which a rank creates a different mesh."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from tests.faults.fault import fault
from tests.faults.rank_context import RankContext
from tests.faults.wrong_calls import SQUARE

NO_MESH: dict[str, int] = {}


@fault("mesh", mesh=NO_MESH, says=("dp=2, tp=2", "dp=4, tp=1"))
def creates_another_mesh_shape(ctx: RankContext) -> Any:
    """A rank creates a mesh of another shape"""
    shape = (4, 1) if ctx.is_outlier() else (2, 2)
    names = ("dp", "tp")
    ctx.mesh = ctx.d.init_device_mesh("cpu", shape, mesh_dim_names=names)  # <- outlier # <- others
    total = ctx.put(SQUARE, ctx.d.Shard(0), ctx.d.Replicate()).sum().full_tensor().item()
    dist.barrier()  # two ranks may get so far before the outlier has made its mesh
    return total


@fault("mesh", 1, mesh=NO_MESH, says=("tp=2, dp=2", "dp=2, tp=2"))
def names_axes_differently(ctx: RankContext) -> Any:
    """A rank names the axes differently"""
    names = ("tp", "dp") if ctx.is_outlier() else ("dp", "tp")
    ctx.mesh = ctx.d.init_device_mesh("cpu", (2, 2), mesh_dim_names=names)  # <- outlier # <- others
    x = torch.full((4,), float(ctx.rank))
    ctx.group("dp").all_reduce(x)
    return x.tolist()


@fault(("mesh", "mismatch"), 3, mesh=NO_MESH, says="rank 3")
def orders_ranks_differently(ctx: RankContext) -> Any:
    """A rank orders the ranks differently"""
    ranks = torch.tensor([1, 0, 2, 3] if ctx.is_outlier() else [0, 1, 2, 3])
    ctx.mesh = ctx.d.DeviceMesh("cpu", ranks, mesh_dim_names=("x",))  # <- outlier # <- others
    return ctx.put(SQUARE, ctx.d.Shard(0)).full_tensor()[0, 0].item()  # <- outlier # <- others


@fault("mesh", mesh=NO_MESH, says="pp")
def creates_an_extra_mesh(ctx: RankContext) -> Any:
    """A rank creates one more mesh than the others"""
    if ctx.is_outlier():
        ctx.d.init_device_mesh("cpu", (4, 1), mesh_dim_names=("pp", "x"))  # <- outlier
    ctx.mesh = ctx.d.init_device_mesh("cpu", (4,), mesh_dim_names=("x",))  # <- others
    return ctx.put(SQUARE, ctx.d.Shard(0)).full_tensor()[0, 0].item()
