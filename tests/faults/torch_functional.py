"""Programs that call torch's functional collectives: by their functions, their operators, from
DTensor and in compiled graphs.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from tests.faults.fault import fault, healthy
from tests.faults.rank_context import RankContext

_OPS = torch.ops._c10d_functional


def _name() -> str:
    return dist.distributed_c10d._get_default_group().group_name


def _compiled(function: Any) -> Any:
    return torch.compile(function, backend="aot_eager", fullgraph=True)


@fault("mismatch", 2, field="dtype", says=("int32", "float32"))
def torch_operator_dtype_differs(ctx: RankContext) -> Any:
    """A rank's tensor in the operator all_reduce is int32"""
    t = torch.ones(4, dtype=torch.int32 if ctx.is_outlier() else torch.float32)
    return _OPS.wait_tensor(_OPS.all_reduce(t, "sum", _name())).tolist()  # <- outlier # <- others


@fault("mismatch", 3, field="reduction", says=("max", "sum"))
def torch_operator_reduction_differs(ctx: RankContext) -> Any:
    """A rank takes the maximum in the operator all_reduce_"""
    t = torch.ones(4)
    operation = "max" if ctx.is_outlier() else "sum"
    reduced = _OPS.all_reduce_(t, operation, _name())  # <- outlier # <- others
    return _OPS.wait_tensor(reduced).tolist()


@fault("mismatch", 0, field="shape", says="all_gather")
def torch_operator_gathers_into_another_shape(ctx: RankContext) -> Any:
    """A rank gathers more in the operator all_gather_into_tensor_out"""
    t = torch.ones(6 if ctx.is_outlier() else 4)
    out = torch.zeros(4 * t.numel())
    gathered = _OPS.all_gather_into_tensor_out(t, 4, _name(), out=out)  # <- outlier # <- others
    return _OPS.wait_tensor(gathered).dim()


@fault("mismatch", 1, field="operation", says=("reduce_scatter", "all_reduce"))
def torch_operator_differs(ctx: RankContext) -> Any:
    """A rank scatters where others reduce, by operators"""
    t = torch.ones(8)
    if ctx.is_outlier():
        scattered = _OPS.reduce_scatter_tensor(t, "sum", 4, _name())  # <- outlier
        return _OPS.wait_tensor(scattered).dim()
    return _OPS.wait_tensor(_OPS.all_reduce(t, "sum", _name())).dim()  # <- others


@fault("mismatch", 2, field="splits", says="all_to_all")
def torch_operator_splits_differ(ctx: RankContext) -> Any:
    """A rank sends more in the operator all_to_all_single than the receiver expects"""
    sent = [3, 1, 3, 3] if ctx.is_outlier() else [1, 1, 1, 1]
    t = torch.ones(sum(sent))
    received = _OPS.all_to_all_single(t, [1] * 4, sent, _name())  # <- outlier # <- others
    return _OPS.wait_tensor(received).dim()


@fault("mismatch", 3, field="dtype", says=("int32", "float32"))
def torch_compiled_dtype_differs(ctx: RankContext) -> Any:
    """A rank's tensor in a compiled all_reduce is int32"""
    t = torch.ones(4, dtype=torch.int32 if ctx.is_outlier() else torch.float32)
    group = dist.group.WORLD
    reduce = functional.all_reduce
    compiled = _compiled(lambda x: reduce(x * 2, "sum", group) + 1)  # <- outlier # <- others
    return compiled(t).tolist()


@fault("mismatch", 0, field="operation", says=("all_gather", "all_reduce"))
def torch_compiled_operation_differs(ctx: RankContext) -> Any:
    """A rank gathers in a compiled graph where others reduce"""
    t, group = torch.ones(4), dist.group.WORLD
    gather = functional.all_gather_tensor
    if ctx.is_outlier():
        compiled = _compiled(lambda x: gather(x, 0, group) + 1)  # <- outlier
        return compiled(t).dim()
    return _compiled(lambda x: functional.all_reduce(x, "sum", group) + 1)(t).dim()  # <- others


@fault("mismatch", 1, field="dtype", says=("bfloat16", "float32"))
def torch_dtensor_dtype_differs(ctx: RankContext) -> Any:
    """A rank's DTensor is bfloat16"""
    mesh = init_device_mesh("cpu", (4,))
    t = torch.ones(4, dtype=torch.bfloat16 if ctx.is_outlier() else torch.float32)
    x = DTensor.from_local(t, mesh, [Partial()])
    return x.redistribute(mesh, [Replicate()]).to_local().tolist()  # <- outlier # <- others


@fault("mismatch", 2, field="operation", says=("reduce_scatter", "all_reduce"))
def torch_dtensor_placement_differs(ctx: RankContext) -> Any:
    """A rank redistributes its DTensor to Shard(0) where others replicate"""
    mesh = init_device_mesh("cpu", (4,))
    x = DTensor.from_local(torch.ones(4), mesh, [Partial()])
    placement = Shard(0) if ctx.is_outlier() else Replicate()
    x.redistribute(mesh, [placement]).to_local()  # <- outlier # <- others
    return 0


@healthy()
def torch_functional_collectives_of_all_kinds(ctx: RankContext) -> Any:
    """Functions, operators, DTensors, compiled graphs and gradients"""
    t, name, group = torch.arange(4.0), _name(), dist.group.WORLD
    wait = _OPS.wait_tensor
    out = torch.empty(16)
    results = [
        functional.all_reduce(t, "sum", group) + 0,
        wait(_OPS.all_gather_into_tensor(t, 4, name)),
        wait(_OPS.all_gather_into_tensor_out(t, 4, name, out=out)),
        wait(_OPS.broadcast(t + ctx.rank, 2, name)),
        wait(_OPS.all_to_all_single(t, [1] * 4, [1] * 4, name)),
        *map(wait, _OPS.all_reduce_coalesced([t, t], "sum", name)),
        *map(wait, _OPS.reduce_scatter_tensor_coalesced([t, t], "sum", 4, name)),
        _compiled(lambda x: functional.all_reduce(x, "sum", group) + 1)(t),
    ]
    mesh = init_device_mesh("cpu", (4,))
    results.append(
        DTensor.from_local(t, mesh, [Partial()]).redistribute(mesh, [Shard(0)]).to_local()
    )
    with_gradient = t.clone().requires_grad_()
    (functional.all_reduce(with_gradient, "sum", group) * 2).sum().backward()
    results.append(with_gradient.grad)
    return [result.tolist() for result in results]
