"""Redistribution by DTensor's two planners, and the bytes that it moves.

Greedy is what `DTensor.redistribute` does: axis by axis. Min-cost is the cheapest sequence of such
steps by DTensor's cost model, found by Dijkstra's algorithm; in torch 2.13 only the private context
manager `torch.distributed.tensor._redistribute.use_min_cost_redistribution_plan()` selects it. The
cache of plans ignores the planner, so each planner gets a separate mesh: same process groups, other
axis names.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.tensor as dt
from measure import Call
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh as TorchMesh
from torch.distributed.tensor import placement_types
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._redistribute import redistribute_local_tensor
from torch.utils._python_dispatch import TorchDispatchMode

import shardmesh as sm

_MOVES_NOTHING = ("wait_tensor", "_wrap_tensor_autograd")


def renamed(mesh: sm.DeviceMesh, prefix: str) -> TorchMesh:
    """Return a torch mesh over the same process groups with other axis names."""
    groups: Any = mesh.get_all_groups() if mesh.ndim > 1 else mesh.get_group()
    names = tuple(f"{prefix}_{i}" for i in range(mesh.ndim))
    return TorchMesh.from_group(groups, "cpu", mesh=mesh.mesh, mesh_dim_names=names)


def redistribution(
    local: Tensor, mesh: TorchMesh, src: Sequence[Any], dst: Sequence[Any], shape: tuple[int, int]
) -> Call:
    """Return the call that redistributes. The first call fixes the planner: run it inside
    `use_min_cost_redistribution_plan`.

    `DTensor.redistribute` does not support `Partial` as the destination; the internal function that
    DTensor uses in backward does.
    """
    x = dt.DTensor.from_local(
        local, mesh, src, run_check=False, shape=torch.Size(shape), stride=(shape[1], 1)
    )
    return (
        _to_pending(x, dst)
        if any(p.is_partial() for p in dst)
        else lambda: x.redistribute(mesh, dst).to_local()
    )


def _to_pending(x: dt.DTensor, dst: Sequence[Any]) -> Call:
    after = DTensorSpec(x.device_mesh, tuple(dst), tensor_meta=x._spec.tensor_meta)
    return lambda: redistribute_local_tensor(x._local_tensor, x._spec, after)


class CountFunctional(TorchDispatchMode):
    """Count DTensor's functional collectives, and the bytes that this rank receives from them.

    Attributes:
        received: total bytes received.
        launches: number of collectives.
        saved_on_gpu: bytes that DTensor saves on a GPU, where it changes the sharded dim by an
            all_to_all.
    """

    def __init__(self) -> None:
        super().__init__()
        self.received = self.launches = self.saved_on_gpu = 0
        self._shard_dim_alltoall = placement_types.shard_dim_alltoall

    def __enter__(self) -> CountFunctional:
        placement_types.shard_dim_alltoall = self._all_to_all  # type: ignore[assignment]
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        placement_types.shard_dim_alltoall = self._shard_dim_alltoall
        super().__exit__(*error)

    def _all_to_all(
        self, x: Tensor, gather_dim: int, shard_dim: int, mesh: TorchMesh, mesh_dim: int
    ) -> Tensor:
        before, n = self.received, mesh.size(mesh_dim)
        out = self._shard_dim_alltoall(x, gather_dim, shard_dim, mesh, mesh_dim)
        self.saved_on_gpu += self.received - before - x.nbytes * (n - 1) // n
        return out

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if (
            func.namespace in ("_c10d_functional", "_dtensor", "c10d")
            and name not in _MOVES_NOTHING
        ):
            self.launches += 1
            self.received += _received(name, args, out)
        return out


def _received(name: str, args: Sequence[Any], out: Any) -> int:
    """Return the bytes that this rank receives from a functional collective.

    Raises:
        NotImplementedError: for a collective without a rule.
    """
    x = args[0]
    if name == "all_gather_into_tensor":
        return out.nbytes - x.nbytes
    if name == "reduce_scatter_tensor":
        return x.nbytes - out.nbytes
    if name == "all_reduce":
        n = _group_of(args[-1]).size()
        return 2 * (n - 1) * x.nbytes // n
    raise NotImplementedError(f"no rule for the bytes received by {name}")


def _group_of(group: Any) -> dist.ProcessGroup:
    if isinstance(group, str):
        from torch.distributed.distributed_c10d import _resolve_process_group

        return _resolve_process_group(group)  # type: ignore[arg-type]
    return group
