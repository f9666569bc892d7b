"""Data, tensor, sequence, context and expert parallelism of models.

    from shardmesh.parallel import colwise, fully_shard, parallelize, rowwise

    parallelize(model, mesh, {"*.up": colwise(), "*.down": rowwise()})
    for block in model.blocks:
        fully_shard(block, mesh, axes="dp")
    fully_shard(model, mesh, axes="dp")

See docs/parallel.md.
"""

from shardmesh.sharding.parallel.batch_counts import check_lengths
from shardmesh.sharding.parallel.context.attention import (
    context_parallel,
    context_parallel_attention,
)
from shardmesh.sharding.parallel.context.load_balance import balance_sequence, unbalance_sequence
from shardmesh.sharding.parallel.data.fully_shard import data_parallel, fully_shard
from shardmesh.sharding.parallel.data.materialize import materialize
from shardmesh.sharding.parallel.data.precision import CPUOffloadPolicy, MixedPrecisionPolicy
from shardmesh.sharding.parallel.experts.experts import Experts
from shardmesh.sharding.parallel.experts.moe import moe
from shardmesh.sharding.parallel.experts.router import Routing, load_balance_loss, top_k_routing
from shardmesh.sharding.parallel.experts.token_wise import token_wise
from shardmesh.sharding.parallel.experts.transformers_experts import register_moe
from shardmesh.sharding.parallel.module import distribute_module, shard_parameter
from shardmesh.sharding.parallel.pipeline.make_schedule import make_schedule
from shardmesh.sharding.parallel.pipeline.pipeline import Pipeline, pipeline
from shardmesh.sharding.parallel.pipeline.schedule import Schedule
from shardmesh.sharding.parallel.tensor.plan import parallelize
from shardmesh.sharding.parallel.tensor.styles import (
    Style,
    colwise,
    prepare_inputs,
    prepare_outputs,
    rowwise,
    sequence_parallel,
    shard_params,
)
from shardmesh.sharding.parallel.uneven_inputs import uneven_inputs

__all__ = [
    "CPUOffloadPolicy",
    "Experts",
    "MixedPrecisionPolicy",
    "Pipeline",
    "Routing",
    "Schedule",
    "Style",
    "balance_sequence",
    "check_lengths",
    "colwise",
    "context_parallel",
    "context_parallel_attention",
    "data_parallel",
    "distribute_module",
    "fully_shard",
    "load_balance_loss",
    "make_schedule",
    "materialize",
    "moe",
    "parallelize",
    "pipeline",
    "prepare_inputs",
    "prepare_outputs",
    "register_moe",
    "rowwise",
    "sequence_parallel",
    "shard_parameter",
    "shard_params",
    "token_wise",
    "top_k_routing",
    "unbalance_sequence",
    "uneven_inputs",
]
