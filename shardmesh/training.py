"""What a training loop needs: data, clipping, averages, gradient scaling, metrics, preemption."""

from shardmesh.mesh.launch.preemption import reached_preemption
from shardmesh.mesh.launch.progress_bar import progress
from shardmesh.mesh.launch.rank_zero import main_process_first, rank_zero
from shardmesh.sharding.training.average import EMA
from shardmesh.sharding.training.batch_norm import convert_sync_batchnorm
from shardmesh.sharding.training.batch_report import BatchReport, batch_report
from shardmesh.sharding.training.batches import Batches, batches
from shardmesh.sharding.training.buckets import pad_to_buckets
from shardmesh.sharding.training.chat import DEFAULT_CHAT_TEMPLATE, read_records, tokenize
from shardmesh.sharding.training.clipping import clip_grad_norm_, clip_grad_value_, get_total_norm
from shardmesh.sharding.training.evaluation import evaluate_loss
from shardmesh.sharding.training.global_batches import GlobalBatchSampler
from shardmesh.sharding.training.metrics import JsonLines, Metrics, TensorBoard
from shardmesh.sharding.training.norms import tensor_norms
from shardmesh.sharding.training.packing import PackedRows, document_mask, pack
from shardmesh.sharding.training.sampler import DistributedSampler
from shardmesh.sharding.training.scaler import GradScaler
from shardmesh.sharding.training.stream import DistributedStream

__all__ = [
    "DEFAULT_CHAT_TEMPLATE",
    "EMA",
    "BatchReport",
    "Batches",
    "DistributedSampler",
    "DistributedStream",
    "GlobalBatchSampler",
    "GradScaler",
    "JsonLines",
    "Metrics",
    "PackedRows",
    "TensorBoard",
    "batch_report",
    "batches",
    "clip_grad_norm_",
    "clip_grad_value_",
    "convert_sync_batchnorm",
    "document_mask",
    "evaluate_loss",
    "get_total_norm",
    "main_process_first",
    "pack",
    "pad_to_buckets",
    "progress",
    "rank_zero",
    "reached_preemption",
    "read_records",
    "tensor_norms",
    "tokenize",
]
