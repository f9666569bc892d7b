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
from .sharding.compat import CommDebugMode, DTensor, visualize_sharding
from .sharding.dispatch import implicit_replication
from .sharding.explain import explain
from .sharding.factories import arange, empty, full, ones, rand, randint, randn, randperm, zeros
from .sharding.gradients import accumulate_grads
from .sharding.layout import Layout
from .sharding.local_map import local_map
from .sharding.module import distribute_module, shard_parameter
from .sharding.plan import plan
from .sharding.policy import implicit
from .sharding.random import check_rng_state, fork_rng, get_rng_state, manual_seed, replay_random, set_rng_state
from .sharding.reshard import Resharding, redistribute, redistribute_many, reshard
from .sharding.rules.acceptable import register_sharding
from .sharding.rules.check import check_rule
from .sharding.rules.custom import register_rule
from .sharding.show import visualize
from .sharding.spec import P, Partial, PartitionSpec, Placement, Replicate, Shard
from .sharding.tensor import ShardedTensor

__version__ = "0.1.0"

__all__ = [
    "AbstractMesh",
    "CommBudgetError",
    "CommDebugMode",
    "CommReport",
    "DTensor",
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
    "check_rng_state",
    "check_rule",
    "comm_budget",
    "comm_report",
    "device_put",
    "distribute_module",
    "distribute_tensor",
    "empty",
    "explain",
    "fork_rng",
    "from_local",
    "full",
    "get_rng_state",
    "implicit",
    "implicit_replication",
    "init_device_mesh",
    "launch",
    "local_map",
    "manual_seed",
    "null_world",
    "ones",
    "plan",
    "rand",
    "randint",
    "randn",
    "randperm",
    "redistribute",
    "redistribute_many",
    "register_rule",
    "register_sharding",
    "replay_random",
    "reshard",
    "set_rng_state",
    "shard_parameter",
    "simulate",
    "to_local",
    "visualize",
    "visualize_sharding",
    "zeros",
]
