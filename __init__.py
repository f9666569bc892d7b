"""Sharded tensors on N-D device meshes, with a JAX-style functional API.

    import shardmesh as sm
    from shardmesh import P, Replicate, Shard

    mesh = sm.init_device_mesh("cuda", (2, 8), axis_names=("dp", "tp"))
    x = sm.distribute_tensor(t, mesh, [Shard(0), Replicate()])     # or sm.device_put(t, mesh, P("dp"))
    y = x.redistribute(P(None, ("dp", "tp")))

Everything public is here; the folders `mesh`, `sharding` and `kernels` hold how it is done.
"""

import gc
from importlib import import_module
from typing import TYPE_CHECKING, Any

# Imports make next to no garbage, and one full collection of the objects that torch has made takes longer than the imports below.
_collects = gc.isenabled()
gc.disable()

from .mesh import (
    AbstractMesh,
    DeviceMesh,
    Link,
    Topology,
    Work,
    calibrate,
    init_device_mesh,
    make_mesh,
    process_count,
    process_index,
    simulate,
)
from .mesh.comm.null import null_world
from .mesh.comm.report import CommBudgetError, CommReport, comm_budget, comm_report
from .mesh.context import get_mesh, set_mesh
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
from .mesh.launch.preemption import reached_preemption
from .mesh.launch.rank_zero import main_process_first, rank_zero
from .mesh.launch.session import session
from .mesh.monitor.settings import guard, watchdog
from .mesh.version import __version__ as __version__
from .sharding.functional.collectives.apply import done, start
from .sharding.functional.collectives.casts import axis_index, axis_size, pcast, pvary
from .sharding.functional.collectives.collectives import (
    all_gather,
    all_to_all,
    pbroadcast,
    pmax,
    pmean,
    pmin,
    ppermute,
    pshuffle,
    psum,
    psum_scatter,
    pswapaxes,
)
from .sharding.functional.keys import fold_in, random_key, seeded
from .sharding.functional.named_axes import UnboundAxisError
from .sharding.functional.shard_map import shard_map
from .sharding.functional.typeof import typeof
from .sharding.functional.types.types import ShardingTypeError
from .sharding.layout.layout import Layout
from .sharding.layout.named_sharding import NamedSharding
from .sharding.layout.spec import P, Partial, PartitionSpec, Placement, Replicate, Shard
from .sharding.ops.implicit_comm import implicit
from .sharding.ops.out_sharding import call
from .sharding.ops.plain_operands import implicit_replication
from .sharding.redistribute.plan import plan
from .sharding.tensor.autograd.leaf_grads import accumulate_grads
from .sharding.tensor.constraint import with_sharding_constraint
from .sharding.tensor.convert import distribute_tensor, from_local, to_local
from .sharding.tensor.device_put import device_put
from .sharding.tensor.factories import arange, empty, full, ones, rand, randint, randn, randperm, zeros
from .sharding.tensor.process_data import (
    AddressableShard,
    make_array_from_callback,
    make_array_from_process_local_data,
    make_array_from_single_device_arrays,
)
from .sharding.tensor.random import check_rng_state, fork_rng, get_rng_state, manual_seed, replay_random, set_rng_state
from .sharding.tensor.redistribute import Resharding, redistribute, redistribute_many, reshard
from .sharding.tensor.sharded_tensor import ShardedTensor

if _collects:
    gc.enable()

if TYPE_CHECKING:
    from .mesh.launch.local_processes import launch
    from .mesh.monitor.breakpoint import breakpoint
    from .mesh.monitor.ledger.ledger import Ledger, ledger, mark_step
    from .mesh.monitor.ledger.stragglers import StragglerReport, straggler_report
    from .sharding.checkpoint.agreement import CheckpointError
    from .sharding.checkpoint.full_state import full_state_dict, load_full_state_dict
    from .sharding.checkpoint.load import load
    from .sharding.checkpoint.random_state import RandomState
    from .sharding.checkpoint.safetensors import load_safetensors, save_safetensors
    from .sharding.checkpoint.save import AsyncSave, async_save, save
    from .sharding.checkpoint.state import load_state_dict, state_dict
    from .sharding.checkpoint.storage.folder import Checkpoint, latest
    from .sharding.checkpoint.tree import PerRank
    from .sharding.compat.dtensor import CommDebugMode, DTensor, visualize_sharding
    from .sharding.compat.local_map import local_map
    from .sharding.debug.eval_shape import Evaluated, eval_shape
    from .sharding.debug.explain import explain
    from .sharding.debug.inspection import inspect
    from .sharding.debug.nan_check import BadValueError, debug_nans
    from .sharding.debug.replicas.check import ReplicaCheck, assert_replicated, check_replicas
    from .sharding.debug.replicas.compare import ReplicaError
    from .sharding.debug.visualize import visualize
    from .sharding.functional.collectives.ragged import ragged_all_to_all
    from .sharding.functional.control import cond, fori_loop, scan, switch, while_loop
    from .sharding.functional.transforms.custom_vjp import custom_vjp
    from .sharding.functional.transforms.forward import jvp, linearize
    from .sharding.functional.transforms.gradients import checkpoint, grad, remat, stop_gradient, value_and_grad, vjp
    from .sharding.functional.transforms.jacobians import hessian, jacfwd, jacrev
    from .sharding.functional.transforms.vmap import vmap
    from .sharding.jit.jit import jit
    from .sharding.ops.rules.check import check_rule
    from .sharding.ops.rules.register_rule import register_rule
    from .sharding.ops.rules.register_sharding import register_sharding
    from .sharding.optim.muon import Muon
    from .sharding.optim.shampoo import Shampoo
    from .sharding.parallel.batch_counts import check_lengths
    from .sharding.parallel.context.attention import context_parallel, context_parallel_attention
    from .sharding.parallel.context.load_balance import balance_sequence, unbalance_sequence
    from .sharding.parallel.data.fully_shard import data_parallel, fully_shard
    from .sharding.parallel.data.materialize import materialize
    from .sharding.parallel.data.precision import CPUOffloadPolicy, MixedPrecisionPolicy
    from .sharding.parallel.experts.experts import Experts
    from .sharding.parallel.experts.moe import moe
    from .sharding.parallel.experts.router import Routing, load_balance_loss, top_k_routing
    from .sharding.parallel.module import distribute_module, shard_parameter
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
    from .sharding.parallel.uneven_inputs import join
    from .sharding.tensor import multihost
    from .sharding.training.average import EMA
    from .sharding.training.batch_norm import convert_sync_batchnorm
    from .sharding.training.batch_report import BatchReport, batch_report
    from .sharding.training.batches import Batches, batches
    from .sharding.training.clipping import clip_grad_norm_, clip_grad_value_, get_total_norm
    from .sharding.training.norms import norms
    from .sharding.training.sampler import DistributedSampler
    from .sharding.training.scaler import GradScaler

# Modules that are loaded when one of their names is first used.
_LAZY = {
    ".mesh.launch.local_processes": "launch",
    ".mesh.monitor.breakpoint": "breakpoint",
    ".mesh.monitor.ledger.ledger": "Ledger ledger mark_step",
    ".mesh.monitor.ledger.stragglers": "StragglerReport straggler_report",
    ".sharding.checkpoint.agreement": "CheckpointError",
    ".sharding.checkpoint.full_state": "full_state_dict load_full_state_dict",
    ".sharding.checkpoint.load": "load",
    ".sharding.checkpoint.random_state": "RandomState",
    ".sharding.checkpoint.safetensors": "load_safetensors save_safetensors",
    ".sharding.checkpoint.save": "AsyncSave async_save save",
    ".sharding.checkpoint.state": "load_state_dict state_dict",
    ".sharding.checkpoint.storage.folder": "Checkpoint latest",
    ".sharding.checkpoint.tree": "PerRank",
    ".sharding.compat.dtensor": "CommDebugMode DTensor visualize_sharding",
    ".sharding.compat.local_map": "local_map",
    ".sharding.debug.eval_shape": "Evaluated eval_shape",
    ".sharding.debug.explain": "explain",
    ".sharding.debug.inspection": "inspect",
    ".sharding.debug.nan_check": "BadValueError debug_nans",
    ".sharding.debug.replicas.check": "ReplicaCheck assert_replicated check_replicas",
    ".sharding.debug.replicas.compare": "ReplicaError",
    ".sharding.debug.visualize": "visualize",
    ".sharding.functional.collectives.ragged": "ragged_all_to_all",
    ".sharding.functional.control": "cond fori_loop scan switch while_loop",
    ".sharding.functional.transforms.custom_vjp": "custom_vjp",
    ".sharding.functional.transforms.forward": "jvp linearize",
    ".sharding.functional.transforms.gradients": "checkpoint grad remat stop_gradient value_and_grad vjp",
    ".sharding.functional.transforms.jacobians": "hessian jacfwd jacrev",
    ".sharding.functional.transforms.vmap": "vmap",
    ".sharding.ops.rules.check": "check_rule",
    ".sharding.ops.rules.register_rule": "register_rule",
    ".sharding.ops.rules.register_sharding": "register_sharding",
    ".sharding.jit.jit": "jit",
    ".sharding.optim.muon": "Muon",
    ".sharding.optim.shampoo": "Shampoo",
    ".sharding.parallel.batch_counts": "check_lengths",
    ".sharding.parallel.context.attention": "context_parallel context_parallel_attention",
    ".sharding.parallel.context.load_balance": "balance_sequence unbalance_sequence",
    ".sharding.parallel.data.fully_shard": "data_parallel fully_shard",
    ".sharding.parallel.data.materialize": "materialize",
    ".sharding.parallel.data.precision": "CPUOffloadPolicy MixedPrecisionPolicy",
    ".sharding.parallel.experts.experts": "Experts",
    ".sharding.parallel.experts.moe": "moe",
    ".sharding.parallel.experts.router": "Routing load_balance_loss top_k_routing",
    ".sharding.parallel.module": "distribute_module shard_parameter",
    ".sharding.parallel.tensor.plan": "parallelize parallelize_module",
    ".sharding.parallel.tensor.styles": "Style colwise inputs outputs rowwise sequence shard",
    ".sharding.parallel.tensor.torch_styles": (
        "ColwiseParallel PrepareModuleInput PrepareModuleInputOutput PrepareModuleOutput RowwiseParallel "
        "SequenceParallel"
    ),
    ".sharding.parallel.uneven_inputs": "join",
    ".sharding.training.average": "EMA",
    ".sharding.training.batch_norm": "convert_sync_batchnorm",
    ".sharding.training.batch_report": "BatchReport batch_report",
    ".sharding.training.batches": "Batches batches",
    ".sharding.training.clipping": "clip_grad_norm_ clip_grad_value_ get_total_norm",
    ".sharding.training.norms": "norms",
    ".sharding.training.sampler": "DistributedSampler",
    ".sharding.training.scaler": "GradScaler",
}
_MODULE_OF = {name: module for module, names in _LAZY.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name == "multihost":
        return import_module(".sharding.tensor.multihost", __name__)
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(_MODULE_OF[name], __name__), name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


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
    "custom_vjp",
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
    "jit",
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
    "make_mesh",
    "manual_seed",
    "mark_step",
    "materialize",
    "moe",
    "multihost",
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
    "process_count",
    "process_index",
    "pshuffle",
    "psum",
    "psum_scatter",
    "pswapaxes",
    "pvary",
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
    "remat",
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
