"""Sharded tensors on N-D device meshes, with a JAX-style functional API.

    import shardmesh as sm
    from shardmesh import P, Replicate, Shard

    mesh = sm.init_device_mesh("cuda", (2, 8), axis_names=("dp", "tp"))
    x = sm.distribute_tensor(t, mesh, [Shard(0), Replicate()])  # or sm.device_put(t, mesh, P("dp"))
    y = x.redistribute(P(None, ("dp", "tp")))

Meshes, layouts, tensors, mapped functions and gradients are here. The rest is in namespaces, loaded
when they are first used:

    sm.parallel     models over ranks: FSDP, tensor, sequence, context and expert parallelism
    sm.optim        optimizers of whole matrices
    sm.training     gradient clipping, averages, batches, gradient scaling
    sm.checkpoint   checkpoints, state dicts, safetensors
    sm.elastic      jobs that lose ranks and go on
    sm.random       seeds, states, keys
    sm.debug        explain, visualize, count communication, compare replicas
    sm.monitor      checks of collectives, watchdog, ledger, stragglers
    sm.ops          rules and layouts of operators
    sm.errors       error classes
    sm.topology     links and their speeds
    sm.tuning       forms of parallelism, devices, results of tune
    sm.multihost    values of hosts, by JAX's names
    sm.compat       the names of torch.distributed.tensor

`shardmesh.mesh`, `shardmesh.sharding` and `shardmesh.kernels` hold how it is done.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from shardmesh.mesh import (
    AbstractMesh,
    DeviceMesh,
    init_device_mesh,
    make_mesh,
    process_count,
    process_index,
    simulate,
)
from shardmesh.mesh.context import get_mesh, set_mesh
from shardmesh.mesh.launch.session import session
from shardmesh.mesh.version import __version__ as __version__
from shardmesh.sharding.functional.collectives.apply import async_start
from shardmesh.sharding.functional.collectives.casts import axis_index, axis_size, pcast, pvary
from shardmesh.sharding.functional.collectives.collectives import (
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
from shardmesh.sharding.functional.shard_map import shard_map
from shardmesh.sharding.functional.typeof import typeof
from shardmesh.sharding.layout.layout import Layout
from shardmesh.sharding.layout.named_sharding import NamedSharding
from shardmesh.sharding.layout.spec import P, Partial, PartitionSpec, Placement, Replicate, Shard
from shardmesh.sharding.ops.torch_compile import mark_entry
from shardmesh.sharding.tensor.autograd.leaf_grads import accumulate_grads
from shardmesh.sharding.tensor.constraint import with_sharding_constraint
from shardmesh.sharding.tensor.convert import distribute_tensor, from_local, to_local
from shardmesh.sharding.tensor.device_put import device_put
from shardmesh.sharding.tensor.factories import (
    arange,
    empty,
    full,
    ones,
    rand,
    randint,
    randn,
    randperm,
    zeros,
)
from shardmesh.sharding.tensor.process_data import (
    make_array_from_callback,
    make_array_from_process_local_data,
    make_array_from_single_device_arrays,
)
from shardmesh.sharding.tensor.redistribute import redistribute, redistribute_many, reshard
from shardmesh.sharding.tensor.sharded_tensor import ShardedTensor

if TYPE_CHECKING:
    import shardmesh.checkpoint as checkpoint
    import shardmesh.compat as compat
    import shardmesh.debug as debug
    import shardmesh.elastic as elastic
    import shardmesh.errors as errors
    import shardmesh.monitor as monitor
    import shardmesh.multihost as multihost
    import shardmesh.ops as ops
    import shardmesh.optim as optim
    import shardmesh.parallel as parallel
    import shardmesh.random as random
    import shardmesh.topology as topology
    import shardmesh.training as training
    import shardmesh.tuning as tuning
    from shardmesh.mesh.launch.local_processes import launch
    from shardmesh.mesh.mesh_from_env import mesh_from_env
    from shardmesh.sharding.functional.collectives.ragged import ragged_all_to_all
    from shardmesh.sharding.functional.control import cond, fori_loop, scan, switch, while_loop
    from shardmesh.sharding.functional.transforms.custom_vjp import custom_vjp
    from shardmesh.sharding.functional.transforms.forward import jvp, linearize
    from shardmesh.sharding.functional.transforms.gradients import (
        grad,
        remat,
        stop_gradient,
        value_and_grad,
        vjp,
    )
    from shardmesh.sharding.functional.transforms.jacobians import hessian, jacfwd, jacrev
    from shardmesh.sharding.functional.transforms.vmap import vmap
    from shardmesh.sharding.jit.jit import jit
    from shardmesh.sharding.tune.propose import propose_plan
    from shardmesh.sharding.tune.tune import tune

_NAMESPACES = (
    "parallel",
    "optim",
    "training",
    "checkpoint",
    "elastic",
    "random",
    "debug",
    "monitor",
    "ops",
    "errors",
    "topology",
    "tuning",
    "multihost",
    "compat",
)

# Modules of the core that are loaded when one of their names is first used.
_LAZY = {
    ".mesh.launch.local_processes": "launch",
    ".mesh.mesh_from_env": "mesh_from_env",
    ".sharding.functional.collectives.ragged": "ragged_all_to_all",
    ".sharding.functional.control": "cond fori_loop scan switch while_loop",
    ".sharding.functional.transforms.custom_vjp": "custom_vjp",
    ".sharding.functional.transforms.forward": "jvp linearize",
    ".sharding.functional.transforms.gradients": "grad remat stop_gradient value_and_grad vjp",
    ".sharding.functional.transforms.jacobians": "hessian jacfwd jacrev",
    ".sharding.functional.transforms.vmap": "vmap",
    ".sharding.jit.jit": "jit",
    ".sharding.tune.propose": "propose_plan",
    ".sharding.tune.tune": "tune",
}
_MODULE_OF = {name: module for module, names in _LAZY.items() for name in names.split()}


if not TYPE_CHECKING:  # type checkers would take any name for known

    def __getattr__(name: str) -> Any:
        if name in _NAMESPACES:
            return import_module(f".{name}", __name__)
        if name in _MODULE_OF:
            value = globals()[name] = getattr(import_module(_MODULE_OF[name], __name__), name)
            return mark_entry(value, calls_program=True)
        namespaces = (
            ()
            if name.startswith("_")
            else (n for n in _NAMESPACES if name in import_module(f".{n}", __name__).__all__)
        )
        hint = next((f"; did you mean {__name__}.{n}.{name}?" for n in namespaces), "")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_NAMESPACES, *__all__})


__all__ = [
    "AbstractMesh",
    "DeviceMesh",
    "Layout",
    "NamedSharding",
    "P",
    "Partial",
    "PartitionSpec",
    "Placement",
    "Replicate",
    "Shard",
    "ShardedTensor",
    "accumulate_grads",
    "all_gather",
    "all_to_all",
    "arange",
    "async_start",
    "axis_index",
    "axis_size",
    "cond",
    "custom_vjp",
    "device_put",
    "distribute_tensor",
    "empty",
    "fori_loop",
    "from_local",
    "full",
    "get_mesh",
    "grad",
    "hessian",
    "init_device_mesh",
    "jacfwd",
    "jacrev",
    "jit",
    "jvp",
    "launch",
    "linearize",
    "make_array_from_callback",
    "make_array_from_process_local_data",
    "make_array_from_single_device_arrays",
    "make_mesh",
    "mesh_from_env",
    "ones",
    "pbroadcast",
    "pcast",
    "pmax",
    "pmean",
    "pmin",
    "ppermute",
    "process_count",
    "process_index",
    "propose_plan",
    "pshuffle",
    "psum",
    "psum_scatter",
    "pswapaxes",
    "pvary",
    "ragged_all_to_all",
    "rand",
    "randint",
    "randn",
    "randperm",
    "redistribute",
    "redistribute_many",
    "remat",
    "reshard",
    "scan",
    "session",
    "set_mesh",
    "shard_map",
    "simulate",
    "stop_gradient",
    "switch",
    "to_local",
    "tune",
    "typeof",
    "value_and_grad",
    "vjp",
    "vmap",
    "while_loop",
    "with_sharding_constraint",
    "zeros",
]

for _name in set(__all__) & set(globals()):
    mark_entry(globals()[_name])
