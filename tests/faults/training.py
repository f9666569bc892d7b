"""Training programs in which one rank diverges in a step."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, nn

import shardmesh as sm
from tests.faults.fault import fault
from tests.faults.rank_context import RankContext

BATCHES = torch.linspace(-1, 1, 8 * 8 * 3).reshape(3, 8, 8)


class ThreeLayers(nn.Module):
    """Three layers; the middle one can be skipped."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.middle, self.last = nn.Linear(8, 6), nn.Linear(6, 6), nn.Linear(6, 4)

    def forward(self, x: Any, skip: bool = False) -> Any:
        x = self.first(x).tanh()
        return self.last(x if skip else self.middle(x))


def replicated(ctx: RankContext) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model with replicated parameters."""
    model = ctx.d.distribute_module(ThreeLayers(), ctx.mesh)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def sharded(ctx: RankContext) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model with parameters sharded over the ranks."""

    def split(_: str, module: nn.Module, mesh: Any) -> None:
        for name, parameter in list(module.named_parameters(recurse=False)):
            module.register_parameter(
                name, nn.Parameter(ctx.put(parameter.detach(), ctx.d.Shard(0)))
            )

    model = ctx.d.distribute_module(ThreeLayers(), ctx.mesh, split)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def batches(ctx: RankContext) -> list[Any]:
    """Return batches sharded over the ranks."""
    return [ctx.put(batch, ctx.d.Shard(0)) for batch in BATCHES]


# -- batches ---------------------------------------------------------------------------------------


@fault("mismatch", field=("operation", "shape", "layout"), says="all_reduce")
def has_fewer_batches(ctx: RankContext) -> Any:
    """A rank has fewer batches, and starts the evaluation"""
    model, optimizer = replicated(ctx)
    for n, x in enumerate(batches(ctx)):
        if n == 2 and ctx.is_outlier():
            break
        loss = model(x).square().mean().full_tensor()  # <- others
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model(batches(ctx)[0]).full_tensor().sum().item()  # <- outlier


@fault("left", ends=0, says="all_reduce")
def runs_out_of_batches(ctx: RankContext) -> Any:
    """A rank has fewer batches, and ends"""
    model, optimizer = replicated(ctx)
    loss = torch.zeros(())
    for n, x in enumerate(batches(ctx)):
        if n == 2 and ctx.is_outlier():
            break
        loss = model(x).square().mean().full_tensor()  # <- others
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


@fault("left", 1, says="all_reduce", ends="RankLostError")
def has_an_extra_batch(ctx: RankContext) -> Any:
    """A rank has one batch more than the others, which end"""
    model, optimizer = replicated(ctx)
    loss = torch.zeros(())
    for n, x in enumerate(2 * batches(ctx)):
        if n == 4 or (n == 3 and not ctx.is_outlier()):
            break
        loss = model(x).square().mean().full_tensor()  # <- outlier
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


@fault("mismatch", 3, field=("operation", "shape", "layout", "lineage"), says="all_reduce")
def skips_a_bad_batch(ctx: RankContext) -> Any:
    """A rank skips a batch that it cannot read"""
    model, optimizer = replicated(ctx)
    total = 0.0
    for n, x in enumerate(batches(ctx)):
        loss = model(x).square().mean()
        try:
            if n == 1 and ctx.is_outlier():
                raise ValueError("corrupt record")
            loss.full_tensor().backward()  # <- others
        except ValueError:
            continue
        optimizer.step()
        optimizer.zero_grad()
        total += loss.full_tensor().item()
    return total + model(batches(ctx)[0]).full_tensor().sum().item()


# -- the step --------------------------------------------------------------------------------------


@fault("mismatch", field=("shape", "layout", "lineage"), says="all_reduce", in_torch=False)
def accumulates_gradients_alone(ctx: RankContext) -> Any:
    """Only one rank accumulates gradients over two batches"""
    model, optimizer = replicated(ctx)
    with sm.accumulate_grads() if ctx.is_outlier() else contextlib.nullcontext():
        for x in batches(ctx)[:2]:
            loss = model(x).square().mean().full_tensor()  # <- outlier
            loss.backward()  # <- others
    optimizer.step()
    return loss.item()


@fault("mismatch", 1, field=("shape", "layout", "lineage", "operation"), says="all_reduce")
def skips_a_layer(ctx: RankContext) -> Any:
    """A parameter is unused on one rank"""
    model, optimizer = replicated(ctx)
    x = batches(ctx)[0]
    loss = model(x, skip=ctx.is_outlier()).square().mean().full_tensor()  # <- outlier # <- others
    loss.backward()  # <- outlier # <- others
    optimizer.step()
    return model(x).square().mean().full_tensor().item()


@fault("mismatch", 3, field=("shape", "layout", "lineage", "operation"), says="all_reduce")
def freezes_a_layer(ctx: RankContext) -> Any:
    """A parameter is frozen on one rank"""
    model, optimizer = replicated(ctx)
    if ctx.is_outlier():
        model.middle.weight.requires_grad_(False)
    x = batches(ctx)[0]
    loss = model(x).square().mean().full_tensor()
    loss.backward()  # <- outlier # <- others
    optimizer.step()
    return model(x).square().mean().full_tensor().item()


@fault("mismatch", field="lineage", says="all_reduce")
def skips_the_optimizer_step(ctx: RankContext) -> Any:
    """A rank skips optimizer.step()"""
    model, optimizer = replicated(ctx)
    total = 0.0
    for x in batches(ctx):
        loss = model(x).square().mean().full_tensor()  # <- outlier # <- others
        loss.backward()
        if not ctx.is_outlier():
            optimizer.step()
        optimizer.zero_grad()
        total += loss.item()
    return total


@fault("mismatch", field=("operation", "shape", "layout"), says="all_reduce")
def evaluates_instead(ctx: RankContext) -> Any:
    """A rank is in evaluation mode: no backward"""
    model, optimizer = replicated(ctx)
    x = batches(ctx)[0]
    with torch.no_grad() if ctx.is_outlier() else contextlib.nullcontext():
        loss = model(x).square().mean().full_tensor()
    if loss.requires_grad:
        loss.backward()  # <- others
    optimizer.step()
    return model(x).full_tensor().sum().item()  # <- outlier


@fault("mismatch", 0, field="operation", says=("all_reduce", "all_to_all"))
def logs_the_gradient_norm_alone(ctx: RankContext) -> Any:
    """Rank 0 logs the gradients' norm"""
    model, _ = sharded(ctx)
    x = batches(ctx)[0]
    model(x).square().mean().backward()
    if ctx.is_outlier():
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # <- outlier
        print(float(norm))  # <- outlier
    return (x @ model.first.weight.T).sum().to_local().item()  # <- others


@fault("mismatch", 0, field=("shape", "lineage", "operation"), says="all_gather")
def evaluates_alone(ctx: RankContext) -> Any:
    """Rank 0 evaluates a model whose weights are sharded"""
    model, optimizer = sharded(ctx)
    x, y, _ = batches(ctx)
    model(x).square().mean().backward()
    optimizer.step()
    if ctx.is_outlier():
        with torch.no_grad():
            print(model.last.weight.full_tensor())  # <- outlier
    return (y @ model.first.weight.T).sum().to_local().item()  # <- others


# -- errors ----------------------------------------------------------------------------------------


@fault("raised", says=("ValueError", "no such expert"), ends="ValueError")
def raises_in_forward(ctx: RankContext) -> Any:
    """A rank raises in forward"""
    model, _ = replicated(ctx)
    x = model.first(batches(ctx)[0])
    if ctx.is_outlier():
        raise ValueError("no such expert")  # <- outlier
    return model.last(x.tanh()).sum().full_tensor().item()


class Fails(torch.autograd.Function):
    """The identity; its backward raises."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise ArithmeticError("gradient overflow")


@fault("raised", 1, says=("ArithmeticError", "gradient overflow"), ends="ArithmeticError")
def raises_in_backward(ctx: RankContext) -> Any:
    """A rank raises in backward"""
    model, optimizer = replicated(ctx)
    loss = model(batches(ctx)[0]).square().mean().full_tensor()
    if ctx.is_outlier():
        loss = Fails.apply(loss)
    loss.backward()  # <- outlier
    optimizer.step()
    return model(batches(ctx)[0]).sum().full_tensor().item()


@fault("raised", 3, says=("OSError", "shard-0007 is truncated"), ends="OSError")
def raises_in_the_loader(ctx: RankContext) -> Any:
    """A rank's data loader raises"""

    def load() -> Any:
        for n, x in enumerate(batches(ctx)):
            if n == 1 and ctx.is_outlier():
                raise OSError("shard-0007 is truncated")  # <- outlier
            yield x

    model, _ = replicated(ctx)
    return [model(x).sum().full_tensor().item() for x in load()]


@fault("raised", says=("RuntimeError", "cannot log"), ends="RuntimeError")
def raises_in_a_gradient_hook(ctx: RankContext) -> Any:
    """A rank raises in a hook, while gradients are being reduced"""
    model, optimizer = replicated(ctx)

    def log(_: Any) -> None:
        if ctx.is_outlier():
            raise RuntimeError("cannot log")  # <- outlier

    model.middle.weight.register_post_accumulate_grad_hook(log)
    model(batches(ctx)[0]).square().mean().full_tensor().backward()
    optimizer.step()
    return model(batches(ctx)[0]).sum().full_tensor().item()


@fault("raised", 0, says=("OutOfMemoryError", "tried to allocate"), ends="OutOfMemoryError")
def runs_out_of_memory(ctx: RankContext) -> Any:
    """A rank runs out of memory between two collectives"""
    model, _ = sharded(ctx)
    x = batches(ctx)[0]
    loss = model(x).square().mean()
    if ctx.is_outlier():
        raise torch.OutOfMemoryError("tried to allocate 20.00 GiB")  # <- outlier
    loss.backward()
    return model.last.weight.grad.to_local().sum().item()
