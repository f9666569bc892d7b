"""Training programs in which one rank diverges in a step."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, nn

import shardmesh as sm
from tests.faults.at import At
from tests.faults.fault import fault

BATCHES = torch.linspace(-1, 1, 8 * 8 * 3).reshape(3, 8, 8)


class Model(nn.Module):
    """Three layers, of which one may be left out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.middle, self.last = nn.Linear(8, 6), nn.Linear(6, 6), nn.Linear(6, 4)

    def forward(self, x: Any, skip: bool = False) -> Any:
        x = self.first(x).tanh()
        return self.last(x if skip else self.middle(x))


def replicated(at: At) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model whose parameters every rank holds."""
    model = at.d.distribute_module(Model(), at.mesh)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def sharded(at: At) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model whose parameters are split over the ranks."""

    def split(_: str, module: nn.Module, mesh: Any) -> None:
        for name, parameter in list(module.named_parameters(recurse=False)):
            module.register_parameter(name, nn.Parameter(at.put(parameter.detach(), at.d.Shard(0))))

    model = at.d.distribute_module(Model(), at.mesh, split)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def batches(at: At) -> list[Any]:
    """Batches, split over the ranks."""
    return [at.put(batch, at.d.Shard(0)) for batch in BATCHES]


# -- batches -----------------------------------------------------------------------------------------------------------


@fault("mismatch", field=("operation", "shape", "layout"), says="all_reduce")
def has_fewer_batches(at: At) -> Any:
    """A rank has fewer batches, and starts the evaluation"""
    model, optimizer = replicated(at)
    for n, x in enumerate(batches(at)):
        if n == 2 and at.odd():
            break
        loss = model(x).square().mean().full_tensor()  # <- rest
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model(batches(at)[0]).full_tensor().sum().item()  # <- odd


@fault("left", ends=0, says="all_reduce")
def runs_out_of_batches(at: At) -> Any:
    """A rank has fewer batches, and ends"""
    model, optimizer = replicated(at)
    loss = torch.zeros(())
    for n, x in enumerate(batches(at)):
        if n == 2 and at.odd():
            break
        loss = model(x).square().mean().full_tensor()  # <- rest
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


@fault("left", 1, says="all_reduce", ends="RankLostError")
def has_one_batch_more(at: At) -> Any:
    """A rank has one batch more than the others, which end"""
    model, optimizer = replicated(at)
    loss = torch.zeros(())
    for n, x in enumerate(2 * batches(at)):
        if n == 4 or (n == 3 and not at.odd()):
            break
        loss = model(x).square().mean().full_tensor()  # <- odd
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


@fault("mismatch", 3, field=("operation", "shape", "layout", "lineage"), says="all_reduce")
def skips_a_bad_batch(at: At) -> Any:
    """A rank skips a batch that it cannot read"""
    model, optimizer = replicated(at)
    total = 0.0
    for n, x in enumerate(batches(at)):
        loss = model(x).square().mean()
        try:
            if n == 1 and at.odd():
                raise ValueError("corrupt record")
            loss.full_tensor().backward()  # <- rest
        except ValueError:
            continue
        optimizer.step()
        optimizer.zero_grad()
        total += loss.full_tensor().item()
    return total + model(batches(at)[0]).full_tensor().sum().item()


# -- the step ----------------------------------------------------------------------------------------------------------


@fault("mismatch", field=("shape", "layout", "lineage"), says="all_reduce", twin=False)
def accumulates_gradients_alone(at: At) -> Any:
    """A rank alone accumulates gradients over two batches"""
    model, optimizer = replicated(at)
    with sm.accumulate_grads() if at.odd() else contextlib.nullcontext():
        for x in batches(at)[:2]:
            loss = model(x).square().mean().full_tensor()  # <- odd
            loss.backward()  # <- rest
    optimizer.step()
    return loss.item()


@fault("mismatch", 1, field=("shape", "layout", "lineage", "operation"), says="all_reduce")
def leaves_a_layer_out(at: At) -> Any:
    """A parameter is unused on one rank"""
    model, optimizer = replicated(at)
    x = batches(at)[0]
    loss = model(x, skip=at.odd()).square().mean().full_tensor()  # <- odd # <- rest
    loss.backward()  # <- odd # <- rest
    optimizer.step()
    return model(x).square().mean().full_tensor().item()


@fault("mismatch", 3, field=("shape", "layout", "lineage", "operation"), says="all_reduce")
def freezes_a_layer(at: At) -> Any:
    """A parameter is frozen on one rank"""
    model, optimizer = replicated(at)
    if at.odd():
        model.middle.weight.requires_grad_(False)
    x = batches(at)[0]
    loss = model(x).square().mean().full_tensor()
    loss.backward()  # <- odd # <- rest
    optimizer.step()
    return model(x).square().mean().full_tensor().item()


@fault("mismatch", field="lineage", says="all_reduce")
def skips_the_optimizer_step(at: At) -> Any:
    """A rank skips optimizer.step()"""
    model, optimizer = replicated(at)
    total = 0.0
    for x in batches(at):
        loss = model(x).square().mean().full_tensor()  # <- odd # <- rest
        loss.backward()
        if not at.odd():
            optimizer.step()
        optimizer.zero_grad()
        total += loss.item()
    return total


@fault("mismatch", field=("operation", "shape", "layout"), says="all_reduce")
def evaluates_instead(at: At) -> Any:
    """A rank is in evaluation mode: no backward"""
    model, optimizer = replicated(at)
    x = batches(at)[0]
    with torch.no_grad() if at.odd() else contextlib.nullcontext():
        loss = model(x).square().mean().full_tensor()
    if loss.requires_grad:
        loss.backward()  # <- rest
    optimizer.step()
    return model(x).full_tensor().sum().item()  # <- odd


@fault("mismatch", 0, field="operation", says=("all_reduce", "all_to_all"))
def logs_the_gradient_norm_alone(at: At) -> Any:
    """Rank 0 logs the gradients' norm"""
    model, _ = sharded(at)
    x = batches(at)[0]
    model(x).square().mean().backward()
    if at.odd():
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # <- odd
        print(float(norm))  # <- odd
    return (x @ model.first.weight.T).sum().to_local().item()  # <- rest


@fault("mismatch", 0, field=("shape", "lineage", "operation"), says="all_gather")
def evaluates_alone(at: At) -> Any:
    """Rank 0 evaluates a model whose weights are sharded"""
    model, optimizer = sharded(at)
    x, y, _ = batches(at)
    model(x).square().mean().backward()
    optimizer.step()
    if at.odd():
        with torch.no_grad():
            print(model.last.weight.full_tensor())  # <- odd
    return (y @ model.first.weight.T).sum().to_local().item()  # <- rest


# -- errors ------------------------------------------------------------------------------------------------------------


@fault("raised", says=("ValueError", "no such expert"), ends="ValueError")
def raises_in_forward(at: At) -> Any:
    """A rank raises in forward"""
    model, _ = replicated(at)
    x = model.first(batches(at)[0])
    if at.odd():
        raise ValueError("no such expert")  # <- odd
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
def raises_in_backward(at: At) -> Any:
    """A rank raises in backward"""
    model, optimizer = replicated(at)
    loss = model(batches(at)[0]).square().mean().full_tensor()
    if at.odd():
        loss = Fails.apply(loss)
    loss.backward()  # <- odd
    optimizer.step()
    return model(batches(at)[0]).sum().full_tensor().item()


@fault("raised", 3, says=("OSError", "shard-0007 is truncated"), ends="OSError")
def raises_in_the_loader(at: At) -> Any:
    """A rank's data loader raises"""

    def load() -> Any:
        for n, x in enumerate(batches(at)):
            if n == 1 and at.odd():
                raise OSError("shard-0007 is truncated")  # <- odd
            yield x

    model, _ = replicated(at)
    return [model(x).sum().full_tensor().item() for x in load()]


@fault("raised", says=("RuntimeError", "cannot log"), ends="RuntimeError")
def raises_in_a_gradient_hook(at: At) -> Any:
    """A rank raises in a hook, while gradients are being reduced"""
    model, optimizer = replicated(at)

    def log(_: Any) -> None:
        if at.odd():
            raise RuntimeError("cannot log")  # <- odd

    model.middle.weight.register_post_accumulate_grad_hook(log)
    model(batches(at)[0]).square().mean().full_tensor().backward()
    optimizer.step()
    return model(batches(at)[0]).sum().full_tensor().item()


@fault("raised", 0, says=("OutOfMemoryError", "tried to allocate"), ends="OutOfMemoryError")
def runs_out_of_memory(at: At) -> Any:
    """A rank runs out of memory between two collectives"""
    model, _ = sharded(at)
    x = batches(at)[0]
    loss = model(x).square().mean()
    if at.odd():
        raise torch.OutOfMemoryError("tried to allocate 20.00 GiB")  # <- odd
    loss.backward()
    return model.last.weight.grad.to_local().sum().item()
