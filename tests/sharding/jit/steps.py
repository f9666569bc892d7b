"""Training steps, eagerly and under `sm.jit`, for the tests here; functions of processes must be
importable.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardmesh as sm
from shardmesh import P
from tests.device import DEVICE
from tests.sharding.parallel.compositions import (
    Composition,
    adamw,
    batch,
    loss_of,
    parallelized,
    whole,
)

STEPS = 5


def composed(
    case: Composition, backend: str | None, clip: bool = True, **options: Any
) -> tuple[Tensor, list[Tensor], int]:
    """Train the model of a composition, under `sm.jit` if a backend is given.

    Returns: losses and norms, the parameters, and how many calls ran a graph.
    """
    mesh = sm.init_device_mesh(DEVICE, case.shape, axis_names=case.names)
    model = parallelized(case, mesh, **options)
    optimizer = adamw(model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))

    def step(inputs: Any, targets: Any) -> tuple[Any, Any]:
        loss = loss_of(model(inputs), targets)
        loss.backward()
        norm = sm.training.clip_grad_norm_(model.parameters(), 0.5) if clip else loss
        optimizer.step()
        optimizer.zero_grad()
        return loss, norm

    return trained(step, backend, model, schedule, lambda i: batch(case, mesh, i))


def trained(
    step: Callable[..., Any],
    backend: str | None,
    model: nn.Module,
    schedule: Any,
    batch_of: Callable[[int], Any],
    steps: int = STEPS,
) -> tuple[Tensor, list[Tensor], int]:
    """Run some steps, under `sm.jit` if a backend is given; see `composed`."""
    f = step if backend is None else sm.jit(step, backend=backend)
    results = []
    for i in range(steps):
        results.append(torch.stack([whole(x).double() for x in f(*batch_of(i))]))
        schedule.step()
    return torch.stack(results), [whole(p) for p in model.parameters()], runs(f)


def runs(f: Any) -> int:
    """Return how many calls of a jitted function ran a graph."""
    entries = [
        entry
        for state in getattr(f, "_states", {}).values()
        for recordings in state.entries.values()
        for entry in recordings
    ]
    return sum(entry.calls for entry in entries)


def mlp(
    mesh: sm.DeviceMesh | None, d: int = 8, f: int = 16, dropout: float = 0.0, plan: Any = None
) -> nn.Sequential:
    """Return a small MLP, tensor-parallel over "tp" if there is a mesh."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(d, f), nn.GELU(), nn.Dropout(dropout), nn.Linear(f, d))
    if mesh is not None:
        sm.parallel.parallelize(
            model, mesh, plan or {"0.*": P("tp"), "3.weight": P(None, "tp")}, src_data_rank=None
        )
    return model


def pair(mesh: sm.DeviceMesh | None, step: int, b: int = 5, d: int = 8) -> tuple[Any, Any]:
    """Return inputs and targets [b, d] of a step."""
    generator = torch.Generator().manual_seed(step)
    both = [torch.randn(b, d, generator=generator) for _ in range(2)]
    x, y = (x if mesh is None else sm.device_put(x, mesh, P(), src_data_rank=None) for x in both)
    return x, y


def training_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[Any, Any], Any]:
    """Return a step of training an MLP, which returns its loss."""

    def step(x: Any, y: Any) -> Any:
        loss = mean_square(model, x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def mean_square(model: nn.Module, x: Any, y: Any) -> Any:
    """Return the loss of an MLP."""
    return F.mse_loss(model(x), y)
