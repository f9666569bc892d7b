"""Every error class of the library; those of the monitor derive from `WatchError`."""

from shardmesh.mesh.comm.report import CommBudgetError
from shardmesh.mesh.errors import (
    CollectiveError,
    CollectiveMismatchError,
    DeadlockError,
    ImplicitCommError,
    LaunchEnvironmentError,
    MeshError,
    MeshMismatchError,
    PeerError,
    RankLostError,
    StallError,
    WatchError,
)
from shardmesh.mesh.launch.local_processes import LaunchError, LaunchTimeoutError
from shardmesh.sharding.autograd.named_axes import UnboundAxisError
from shardmesh.sharding.checkpoint.agreement import CheckpointError
from shardmesh.sharding.debug.nan_check import BadValueError
from shardmesh.sharding.elastic.recovery import StateLostError
from shardmesh.sharding.functional.types.type_checker import CapturedTensorError
from shardmesh.sharding.functional.types.types import ShardingTypeError
from shardmesh.sharding.jit.errors import JitError
from shardmesh.sharding.replicas.compare import ReplicaError

__all__ = [
    "BadValueError",
    "CapturedTensorError",
    "CheckpointError",
    "CollectiveError",
    "CollectiveMismatchError",
    "CommBudgetError",
    "DeadlockError",
    "ImplicitCommError",
    "JitError",
    "LaunchEnvironmentError",
    "LaunchError",
    "LaunchTimeoutError",
    "MeshError",
    "MeshMismatchError",
    "PeerError",
    "RankLostError",
    "ReplicaError",
    "ShardingTypeError",
    "StallError",
    "StateLostError",
    "UnboundAxisError",
    "WatchError",
]
