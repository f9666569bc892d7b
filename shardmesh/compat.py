"""The names of `torch.distributed.tensor` and FSDP2, for programs ported by changing imports.

    - from torch.distributed.tensor import DTensor, Shard, distribute_tensor
    + from shardmesh.compat import DTensor, Shard, distribute_tensor

docs/from_dtensor.md lists the differences.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from shardmesh.mesh import DeviceMesh, init_device_mesh
from shardmesh.sharding.compat.context_parallel import (
    context_parallel,
    context_parallel_unshard,
    set_rotate_method,
)
from shardmesh.sharding.compat.dtensor import (
    CommDebugMode,
    DTensor,
    _StridedShard,  # noqa: F401  private in torch, imported by torchtitan
    visualize_sharding,
)
from shardmesh.sharding.compat.fsdp import (
    DataParallelMeshDims,
    FSDPMeshInfo,
    HSDPMeshInfo,
    ShardPlacementResult,
    fully_shard,
    register_fsdp_forward_method,
    replicate,
    share_comm_ctx,
)
from shardmesh.sharding.compat.fsdp_module import FSDPModule, ReplicateModule, UnshardHandle
from shardmesh.sharding.compat.local_map import local_map
from shardmesh.sharding.compat.loss_parallel import loss_parallel
from shardmesh.sharding.layout.spec import Partial, Placement, Replicate, Shard
from shardmesh.sharding.ops.plain_operands import implicit_replication
from shardmesh.sharding.ops.rules.register_sharding import register_sharding
from shardmesh.sharding.parallel.data.precision import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
)
from shardmesh.sharding.parallel.module import distribute_module
from shardmesh.sharding.parallel.tensor.plan import parallelize_module
from shardmesh.sharding.parallel.tensor.torch_styles import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)
from shardmesh.sharding.tensor.convert import distribute_tensor
from shardmesh.sharding.tensor.factories import arange, empty, full, ones, rand, randn, zeros

if not TYPE_CHECKING:
    _OF_PLAN = (
        "_ContextParallel",
        "_HeadTailLoadBalancer",
        "_PTRRLoadBalancer",
        "_context_parallel_shard",
        "_disable_context_parallel_dispatcher",
        "_enable_context_parallel_dispatcher",
    )

    def __getattr__(name: str) -> Any:
        if name not in _OF_PLAN:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        # With flex attention.
        return getattr(import_module("shardmesh.sharding.compat.context_parallel_plan"), name)


__all__ = [
    "CPUOffloadPolicy",
    "ColwiseParallel",
    "CommDebugMode",
    "DTensor",
    "DataParallelMeshDims",
    "DeviceMesh",
    "FSDPMeshInfo",
    "FSDPModule",
    "HSDPMeshInfo",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "ParallelStyle",
    "Partial",
    "Placement",
    "PrepareModuleInput",
    "PrepareModuleInputOutput",
    "PrepareModuleOutput",
    "Replicate",
    "ReplicateModule",
    "RowwiseParallel",
    "SequenceParallel",
    "Shard",
    "ShardPlacementResult",
    "UnshardHandle",
    "arange",
    "context_parallel",
    "context_parallel_unshard",
    "distribute_module",
    "distribute_tensor",
    "empty",
    "full",
    "fully_shard",
    "implicit_replication",
    "init_device_mesh",
    "local_map",
    "loss_parallel",
    "ones",
    "parallelize_module",
    "rand",
    "randn",
    "register_fsdp_forward_method",
    "register_sharding",
    "replicate",
    "set_rotate_method",
    "share_comm_ctx",
    "visualize_sharding",
    "zeros",
]
