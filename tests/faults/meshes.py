"""Programs in which a rank creates a different mesh."""

from __future__ import annotations

from typing import Any

import torch

from tests.faults.at import At
from tests.faults.fault import fault
from tests.faults.wrong_calls import SQUARE

NO_MESH: dict[str, int] = {}


@fault("mesh", mesh=NO_MESH, says=("dp=2, tp=2", "dp=4, tp=1"))
def makes_another_shape(at: At) -> Any:
    """A rank creates a mesh of another shape"""
    shape = (4, 1) if at.odd() else (2, 2)
    at.mesh = at.d.init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))  # <- odd # <- rest
    return at.put(SQUARE, at.d.Shard(0), at.d.Replicate()).sum().full_tensor().item()


@fault("mesh", 1, mesh=NO_MESH, says=("tp=2, dp=2", "dp=2, tp=2"))
def names_axes_differently(at: At) -> Any:
    """A rank gives the axes other names"""
    names = ("tp", "dp") if at.odd() else ("dp", "tp")
    at.mesh = at.d.init_device_mesh("cpu", (2, 2), mesh_dim_names=names)  # <- odd # <- rest
    x = torch.full((4,), float(at.rank))
    at.group("dp").all_reduce(x)
    return x.tolist()


@fault(("mesh", "mismatch"), 3, mesh=NO_MESH, says="rank 3")
def orders_ranks_differently(at: At) -> Any:
    """A rank puts the ranks in another order"""
    ranks = [1, 0, 2, 3] if at.odd() else [0, 1, 2, 3]
    at.mesh = at.d.DeviceMesh("cpu", torch.tensor(ranks), mesh_dim_names=("x",))  # <- odd # <- rest
    return at.put(SQUARE, at.d.Shard(0)).full_tensor()[0, 0].item()  # <- odd # <- rest


@fault("mesh", mesh=NO_MESH, says="pp")
def makes_a_mesh_more(at: At) -> Any:
    """A rank creates one more mesh than the others"""
    if at.odd():
        at.d.init_device_mesh("cpu", (4, 1), mesh_dim_names=("pp", "x"))  # <- odd
    at.mesh = at.d.init_device_mesh("cpu", (4,), mesh_dim_names=("x",))  # <- rest
    return at.put(SQUARE, at.d.Shard(0)).full_tensor()[0, 0].item()
