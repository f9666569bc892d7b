"""Programs that use the library and train with torch's DDP or FSDP2; one rank diverges in a
step.
"""

from __future__ import annotations

import os
import time
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.faults.fault import fault
from tests.faults.rank_context import RankContext
from tests.faults.training import BATCHES, ThreeLayers
from tests.faults.wrong_calls import SQUARE


def ddp(**options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model under DDP."""
    model = DistributedDataParallel(ThreeLayers(), **options)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def fsdp() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model under FSDP2, layer by layer."""
    model, mesh = ThreeLayers(), init_device_mesh("cpu", (4,))
    for layer in (model.first, model.middle, model.last, model):
        fully_shard(layer, mesh=mesh)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def step(
    model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, **options: Any
) -> None:
    """Run one training step."""
    model(x, **options).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


# -- DDP -------------------------------------------------------------------------------------------


@fault("mismatch", 2, field="operation", says=("all_reduce", "barrier"))
def ddp_has_fewer_batches(ctx: RankContext) -> Any:
    """DDP: a rank has fewer batches and continues with a barrier"""
    model, optimizer = ddp()
    for n, x in enumerate(BATCHES):
        if not (n == 2 and ctx.is_outlier()):
            model(x).square().sum().backward()  # <- others
            optimizer.step()
            optimizer.zero_grad()
    dist.barrier()  # <- outlier
    return 0


@fault("deadlock", 1, says=("all_reduce", "all_gather"))
def ddp_evaluates_early(ctx: RankContext) -> Any:
    """DDP: a rank evaluates with the library while the others train"""
    model, optimizer = ddp()
    x = ctx.put(SQUARE, ctx.d.Shard(0))
    for n, batch in enumerate(BATCHES):
        if n == 2 and ctx.is_outlier():
            x.full_tensor()  # <- outlier
        model(batch).square().sum().backward()  # <- others
        optimizer.step()
        optimizer.zero_grad()
    x.full_tensor()
    return 0


@fault("left", 3, ends=0, says="all_reduce")
def ddp_ends_early(ctx: RankContext) -> Any:
    """DDP: a rank has fewer batches and ends"""
    model, optimizer = ddp()
    for n, x in enumerate(BATCHES):
        if n == 2 and ctx.is_outlier():
            break
        model(x).square().sum().backward()  # <- outlier # <- others
        optimizer.step()
        optimizer.zero_grad()
    return 0


@fault("mismatch", 2, says="broadcast")
def ddp_models_differ(ctx: RankContext) -> Any:
    """DDP: a rank skips a backward and broadcasts"""
    model, optimizer = ddp()
    step(model, optimizer, BATCHES[0])
    t = torch.ones(4)
    if not ctx.is_outlier():
        model(BATCHES[1]).square().sum().backward()  # <- others
    dist.broadcast(t, src=0)  # <- outlier
    return 0


@fault("mismatch", 0, field=("operation", "shape"), says="all_reduce")
def ddp_logs_on_rank_0(ctx: RankContext) -> Any:
    """DDP: only rank 0 reduces its loss"""
    model, _ = ddp()
    for x in BATCHES:
        loss = model(x).square().sum()
        if ctx.is_outlier():
            dist.all_reduce(loss.detach())  # <- outlier
        loss.backward()  # <- others
    return 0


@fault("raised", 2, ends="ValueError", says="a bad batch")
def ddp_raises_in_forward(ctx: RankContext) -> Any:
    """DDP: a rank raises between two steps"""
    model, optimizer = ddp()
    for n, x in enumerate(BATCHES):
        if n == 1 and ctx.is_outlier():
            raise ValueError("a bad batch")  # <- outlier
        step(model, optimizer, x)
    return 0


@fault("stall", 1, ends="busy", says=("all_reduce", "busy"))
def ddp_rank_hangs(ctx: RankContext) -> Any:
    """DDP: a rank's loader hangs"""
    model, optimizer = ddp()
    for n, x in enumerate(BATCHES):
        if n == 1 and ctx.is_outlier():
            time.sleep(60)  # <- outlier
        model(x).square().sum().backward()  # <- others
        optimizer.step()
        optimizer.zero_grad()
    return 0


@fault("lost", 3, ends=-9, says="all_reduce")
def ddp_rank_dies(ctx: RankContext) -> Any:
    """DDP: a rank is killed between two steps"""
    model, optimizer = ddp()
    for n, x in enumerate(BATCHES):
        if n == 1 and ctx.is_outlier():
            os.kill(os.getpid(), 9)
        model(x).square().sum().backward()  # <- outlier # <- others
        optimizer.step()
        optimizer.zero_grad()
    return 0


# -- FSDP2 -----------------------------------------------------------------------------------------


@fault("mismatch", 1, field=("operation", "shape", "dtype"), says="all_gather")
def fsdp_skips_a_layer(ctx: RankContext) -> Any:
    """FSDP2: a rank skips a layer"""
    mesh = init_device_mesh("cpu", (4,))
    layers = [fully_shard(nn.Linear(8, width), mesh=mesh) for width in (8, 8, 4)]
    for n, x in enumerate(BATCHES):
        hidden = x
        for layer in [layers[0], layers[2]] if n == 1 and ctx.is_outlier() else layers:
            hidden = layer(hidden)  # <- outlier # <- others
        hidden.sum().backward()
    return 0


@fault("mismatch", 2, field=("operation", "shape"), says="all_gather")
def fsdp_skips_backward(ctx: RankContext) -> Any:
    """FSDP2: a rank skips a backward pass"""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, optimizer = fsdp()
        for n, x in enumerate(BATCHES):
            loss = model(x).square().sum()
            if not (n == 1 and ctx.is_outlier()):
                loss.backward()  # <- others
                optimizer.step()
            optimizer.zero_grad()
    return 0


@fault(("mismatch", "deadlock"), 3, says=("all_gather", "barrier"))
def fsdp_has_fewer_batches(ctx: RankContext) -> Any:
    """FSDP2: a rank has fewer batches and continues with a barrier"""
    model, optimizer = fsdp()
    for n, x in enumerate(BATCHES):
        if not (n == 2 and ctx.is_outlier()):
            step(model, optimizer, x)
    dist.barrier()  # <- outlier
    return 0


@fault(("mismatch", "deadlock"), 0, says="all_gather")
def fsdp_rank_0_evaluates(ctx: RankContext) -> Any:
    """FSDP2: only rank 0 evaluates the model"""
    model, optimizer = fsdp()
    for n, x in enumerate(BATCHES):
        if n == 1 and ctx.is_outlier():
            with torch.no_grad():
                model(x)
        model(x).square().sum().backward()  # <- others
        optimizer.step()
        optimizer.zero_grad()
    return 0


@fault("raised", 1, ends="ValueError", says="a bad batch")
def fsdp_raises(ctx: RankContext) -> Any:
    """FSDP2: a rank raises between two steps"""
    model, optimizer = fsdp()
    for n, x in enumerate(BATCHES):
        if n == 1 and ctx.is_outlier():
            raise ValueError("a bad batch")  # <- outlier
        step(model, optimizer, x)
    return 0
