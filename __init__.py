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
from .mesh.current import get_mesh, set_mesh
from .mesh.errors import (
    CollectiveMismatchError,
    DeadlockError,
    ImplicitCommError,
    MeshMismatchError,
    PeerError,
    RankLostError,
    StallError,
    WatchError,
)
from .mesh.launch import launch
from .mesh.null import null_world
from .mesh.watch.breakpoint import breakpoint
from .mesh.watch.ledger import Ledger, ledger, mark_step
from .mesh.watch.preemption import reached_preemption
from .mesh.watch.rank_zero import main_process_first, rank_zero
from .mesh.watch.session import session
from .mesh.watch.settings import guard, watchdog
from .mesh.watch.stragglers import StragglerReport, straggler_report
from .sharding.arrays import (
    AddressableShard,
    make_array_from_callback,
    make_array_from_process_local_data,
    make_array_from_single_device_arrays,
)
from .sharding.bad_values import BadValueError, debug_nans
from .sharding.boundary import distribute_tensor, from_local, to_local
from .sharding.call import call
from .sharding.checkpoint.agree import CheckpointError
from .sharding.checkpoint.folder import Checkpoint, latest
from .sharding.checkpoint.full import full_state_dict, load_full_state_dict
from .sharding.checkpoint.load import load
from .sharding.checkpoint.random_state import RandomState
from .sharding.checkpoint.safetensors import load_safetensors, save_safetensors
from .sharding.checkpoint.save import AsyncSave, async_save, save
from .sharding.checkpoint.state import load_state_dict, state_dict
from .sharding.checkpoint.tree import PerRank
from .sharding.compare import ReplicaError
from .sharding.compat import CommDebugMode, DTensor, visualize_sharding
from .sharding.constraint import with_sharding_constraint
from .sharding.device_put import device_put
from .sharding.eval_shape import Evaluated, eval_shape
from .sharding.explain import explain
from .sharding.factories import arange, empty, full, ones, rand, randint, randn, randperm, zeros
from .sharding.functional.collectives import (
    all_gather,
    all_to_all,
    axis_index,
    axis_size,
    pbroadcast,
    pcast,
    pmax,
    pmean,
    pmin,
    ppermute,
    pshuffle,
    psum,
    psum_scatter,
)
from .sharding.functional.control import cond, fori_loop, scan, switch, while_loop
from .sharding.functional.forward import jvp, linearize
from .sharding.functional.gradients import checkpoint, grad, stop_gradient, value_and_grad, vjp
from .sharding.functional.jacobians import hessian, jacfwd, jacrev
from .sharding.functional.keys import fold_in, random_key, seeded
from .sharding.functional.leaf import done, start
from .sharding.functional.mapping import UnboundAxisError
from .sharding.functional.ragged import ragged_all_to_all
from .sharding.functional.shard_map import shard_map
from .sharding.functional.types import ShardingTypeError
from .sharding.functional.vmap import vmap
from .sharding.gradients import accumulate_grads
from .sharding.inspection import inspect
from .sharding.join import join
from .sharding.layout import Layout
from .sharding.lengths import check_lengths
from .sharding.local_map import local_map
from .sharding.module import distribute_module, shard_parameter
from .sharding.named_sharding import NamedSharding
from .sharding.optimizers.muon import Muon
from .sharding.optimizers.shampoo import Shampoo
from .sharding.parallel.context.attention import context_parallel, context_parallel_attention
from .sharding.parallel.context.order import balance_sequence, unbalance_sequence
from .sharding.parallel.data.fully_shard import data_parallel, fully_shard
from .sharding.parallel.data.materialize import materialize
from .sharding.parallel.data.precision import CPUOffloadPolicy, MixedPrecisionPolicy
from .sharding.parallel.experts.choices import Routing, load_balance_loss, top_k_routing
from .sharding.parallel.experts.experts import Experts
from .sharding.parallel.experts.mixture import moe
from .sharding.parallel.tensor.plan import parallelize, parallelize_module
from .sharding.parallel.tensor.styles import Style, colwise, inputs, outputs, rowwise, sequence, shard
from .sharding.parallel.tensor.torch_styles import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)
from .sharding.plain_operands import implicit_replication
from .sharding.plan import plan
from .sharding.policy import implicit
from .sharding.random import check_rng_state, fork_rng, get_rng_state, manual_seed, replay_random, set_rng_state
from .sharding.replicas import ReplicaCheck, assert_replicated, check_replicas
from .sharding.reshard import Resharding, redistribute, redistribute_many, reshard
from .sharding.rules.acceptable import register_sharding
from .sharding.rules.check import check_rule
from .sharding.rules.custom import register_rule
from .sharding.show import visualize
from .sharding.spec import P, Partial, PartitionSpec, Placement, Replicate, Shard
from .sharding.tensor import ShardedTensor, typeof
from .sharding.training.average import EMA
from .sharding.training.batch_norm import convert_sync_batchnorm
from .sharding.training.batch_report import BatchReport, batch_report
from .sharding.training.batches import Batches, batches
from .sharding.training.clipping import clip_grad_norm_, clip_grad_value_, get_total_norm
from .sharding.training.norms import norms
from .sharding.training.sampler import DistributedSampler
from .sharding.training.scaler import GradScaler

__version__ = "0.1.0"

__all__ = [
    "EMA",
    "AbstractMesh",
    "AddressableShard",
    "AsyncSave",
    "BadValueError",
    "BatchReport",
    "Batches",
    "CPUOffloadPolicy",
    "Checkpoint",
    "CheckpointError",
    "CollectiveMismatchError",
    "ColwiseParallel",
    "CommBudgetError",
    "CommDebugMode",
    "CommReport",
    "DTensor",
    "DeadlockError",
    "DeviceMesh",
    "DistributedSampler",
    "Evaluated",
    "Experts",
    "GradScaler",
    "ImplicitCommError",
    "Layout",
    "Ledger",
    "Link",
    "MeshMismatchError",
    "MixedPrecisionPolicy",
    "Muon",
    "NamedSharding",
    "P",
    "Partial",
    "PartitionSpec",
    "PeerError",
    "PerRank",
    "Placement",
    "PrepareModuleInput",
    "PrepareModuleInputOutput",
    "PrepareModuleOutput",
    "RandomState",
    "RankLostError",
    "ReplicaCheck",
    "ReplicaError",
    "Replicate",
    "Resharding",
    "Routing",
    "RowwiseParallel",
    "SequenceParallel",
    "Shampoo",
    "Shard",
    "ShardedTensor",
    "ShardingTypeError",
    "StallError",
    "StragglerReport",
    "Style",
    "Topology",
    "UnboundAxisError",
    "WatchError",
    "Work",
    "accumulate_grads",
    "all_gather",
    "all_to_all",
    "arange",
    "assert_replicated",
    "async_save",
    "axis_index",
    "axis_size",
    "balance_sequence",
    "batch_report",
    "batches",
    "breakpoint",
    "calibrate",
    "call",
    "check_lengths",
    "check_replicas",
    "check_rng_state",
    "check_rule",
    "checkpoint",
    "clip_grad_norm_",
    "clip_grad_value_",
    "colwise",
    "comm_budget",
    "comm_report",
    "cond",
    "context_parallel",
    "context_parallel_attention",
    "convert_sync_batchnorm",
    "data_parallel",
    "debug_nans",
    "device_put",
    "distribute_module",
    "distribute_tensor",
    "done",
    "empty",
    "eval_shape",
    "explain",
    "fold_in",
    "fori_loop",
    "fork_rng",
    "from_local",
    "full",
    "full_state_dict",
    "fully_shard",
    "get_mesh",
    "get_rng_state",
    "get_total_norm",
    "grad",
    "guard",
    "hessian",
    "implicit",
    "implicit_replication",
    "init_device_mesh",
    "inputs",
    "inspect",
    "jacfwd",
    "jacrev",
    "join",
    "jvp",
    "latest",
    "launch",
    "ledger",
    "linearize",
    "load",
    "load_balance_loss",
    "load_full_state_dict",
    "load_safetensors",
    "load_state_dict",
    "local_map",
    "main_process_first",
    "make_array_from_callback",
    "make_array_from_process_local_data",
    "make_array_from_single_device_arrays",
    "manual_seed",
    "mark_step",
    "materialize",
    "moe",
    "norms",
    "null_world",
    "ones",
    "outputs",
    "parallelize",
    "parallelize_module",
    "pbroadcast",
    "pcast",
    "plan",
    "pmax",
    "pmean",
    "pmin",
    "ppermute",
    "pshuffle",
    "psum",
    "psum_scatter",
    "ragged_all_to_all",
    "rand",
    "randint",
    "randn",
    "random_key",
    "randperm",
    "rank_zero",
    "reached_preemption",
    "redistribute",
    "redistribute_many",
    "register_rule",
    "register_sharding",
    "replay_random",
    "reshard",
    "rowwise",
    "save",
    "save_safetensors",
    "scan",
    "seeded",
    "sequence",
    "session",
    "set_mesh",
    "set_rng_state",
    "shard",
    "shard_map",
    "shard_parameter",
    "simulate",
    "start",
    "state_dict",
    "stop_gradient",
    "straggler_report",
    "switch",
    "to_local",
    "top_k_routing",
    "typeof",
    "unbalance_sequence",
    "value_and_grad",
    "visualize",
    "visualize_sharding",
    "vjp",
    "vmap",
    "watchdog",
    "while_loop",
    "with_sharding_constraint",
    "zeros",
]
