"""Sharded tensors on N-D device meshes, with a JAX-style functional API.

    import shardmesh as sm
    from shardmesh import P, Replicate, Shard

    mesh = sm.init_device_mesh("cuda", (2, 8), axis_names=("dp", "tp"))
    x = sm.distribute_tensor(t, mesh, [Shard(0), Replicate()])     # or sm.device_put(t, mesh, P("dp"))
    y = x.redistribute(P(None, ("dp", "tp")))

Everything public is here; the folders `mesh`, `sharding` and `kernels` hold how it is done.
"""

from .mesh import AbstractMesh, DeviceMesh, Link, Topology, Work, calibrate, init_device_mesh, simulate
from .mesh.counter import CommBudgetError, CommReport, comm_budget, comm_report
from .mesh.errors import ImplicitCommError
from .mesh.launch import launch
from .mesh.null import null_world
from .sharding.boundary import device_put, distribute_tensor, from_local, to_local
from .sharding.dispatch import implicit_replication
from .sharding.explain import explain
from .sharding.factories import arange, empty, full, ones, rand, randn, zeros
from .sharding.gradients import accumulate_grads
from .sharding.layout import Layout
from .sharding.module import distribute_module, shard_parameter
from .sharding.plan import plan
from .sharding.policy import implicit
from .sharding.random import manual_seed, replay_random
from .sharding.reshard import Resharding, redistribute, redistribute_many, reshard
from .sharding.rules.check import check_rule
from .sharding.rules.custom import register_rule
from .sharding.show import visualize
from .sharding.spec import P, Partial, PartitionSpec, Placement, Replicate, Shard
from .sharding.tensor import ShardedTensor

__version__ = "0.1.0"

__all__ = [
    "AbstractMesh",
    "CommBudgetError",
    "CommReport",
    "DeviceMesh",
    "ImplicitCommError",
    "Layout",
    "Link",
    "P",
    "Partial",
    "PartitionSpec",
    "Placement",
    "Replicate",
    "Resharding",
    "Shard",
    "ShardedTensor",
    "Topology",
    "Work",
    "accumulate_grads",
    "arange",
    "calibrate",
    "check_rule",
    "comm_budget",
    "comm_report",
    "device_put",
    "distribute_module",
    "distribute_tensor",
    "empty",
    "explain",
    "from_local",
    "full",
    "implicit",
    "implicit_replication",
    "init_device_mesh",
    "launch",
    "manual_seed",
    "null_world",
    "ones",
    "plan",
    "rand",
    "randn",
    "redistribute",
    "redistribute_many",
    "register_rule",
    "replay_random",
    "reshard",
    "shard_parameter",
    "simulate",
    "to_local",
    "visualize",
    "zeros",
]
