"""Stages that are run one after the other in one process, to compare with the whole model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardmesh.sharding.parallel.pipeline.stages.staged_model import StagedModel

Inputs = tuple[tuple[Any, ...], dict[str, Any]]


def stages_of(
    make: Callable[[], nn.Module],
    split: Any,
    stages: int,
    own: Sequence[Sequence[int]] | None = None,
    **options: Any,
) -> list[StagedModel]:
    """Return for each rank the model of that rank; by default each rank has one stage."""
    own = own or [[stage] for stage in range(stages)]
    return [StagedModel(make(), split, stages, stages_of_rank, **options) for stages_of_rank in own]


def run(
    ranks: Sequence[StagedModel],
    microbatches: Sequence[Inputs],
    loss_of: Callable[[Any], Tensor],
) -> tuple[list[Any], dict[str, Tensor]]:
    """Run all microbatches forward and backward; return results and gradients by the model's names.

    Gradients of tied parameters are summed over the stages.
    """
    modules = {i: stage for rank in ranks for i, stage in rank.stages.items()}
    owner = {i: rank for rank in ranks for i in rank.stages}
    results: list[Any] = []
    for args, kwargs in microbatches:
        carried: tuple[Tensor, ...] = ()
        inputs: list[tuple[Tensor, ...]] = []
        outputs: list[Any] = []
        for i in range(len(modules)):
            metas = owner[i].boundary(owner[i].signature(args, kwargs), i)
            assert len(metas) == len(carried)
            received: list[Tensor] = []
            for x, meta in zip(carried, metas, strict=True):
                assert (x.shape, x.dtype, x.device) == (meta.shape, meta.dtype, meta.device)
                assert x.requires_grad == meta.requires_grad
                received.append(x.detach().clone().requires_grad_(meta.requires_grad))
            inputs.append(tuple(received))
            carried = modules[i](inputs[-1], args, kwargs)
            outputs.append(carried)
        results.append(outputs[-1])
        loss = loss_of(outputs[-1])
        if not loss.requires_grad:
            continue
        loss.backward()
        for i in reversed(range(1, len(modules))):
            pairs = [
                (x, y.grad)
                for x, y in zip(outputs[i - 1], inputs[i], strict=True)
                if y.grad is not None
            ]
            if pairs:
                torch.autograd.backward([x for x, _ in pairs], [grad for _, grad in pairs])
    grads: dict[str, Tensor] = {}
    for i in reversed(range(len(modules))):
        stage = modules[i]
        for name, x in stage.named_parameters():
            if x.grad is not None:
                model_name = stage.model_names[name]
                before = grads.get(model_name)
                grads[model_name] = x.grad if before is None else before + x.grad
    return results, grads


def whole(
    model: nn.Module, microbatches: Sequence[Inputs], loss_of: Callable[[Any], Tensor]
) -> tuple[list[Any], dict[str, Tensor]]:
    """Run the whole model; return results and gradients."""
    results: list[Any] = []
    for args, kwargs in microbatches:
        results.append(model(*args, **kwargs))
        loss = loss_of(results[-1])
        if loss.requires_grad:
            loss.backward()
    return results, {name: x.grad for name, x in model.named_parameters() if x.grad is not None}


def assert_equal(actual: Any, expected: Any, exact: bool = True) -> None:
    """Assert that results and gradients are equal, to the bit or up to rounding."""
    (results, grads), (whole_results, whole_grads) = actual, expected
    tolerance = {"rtol": 0, "atol": 0} if exact else {"rtol": 1e-9, "atol": 1e-12}
    assert grads.keys() == whole_grads.keys()
    for name, grad in whole_grads.items():
        torch.testing.assert_close(
            grads[name], grad, msg=lambda m, n=name: f"{n}: {m}", **tolerance
        )
    torch.testing.assert_close(_plain(results), _plain(whole_results), rtol=0, atol=0)


def _plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_plain(x) for x in value]
    if isinstance(value, dict):
        return {name: _plain(x) for name, x in value.items()}
    return _plain(vars(value)) if hasattr(value, "__dataclass_fields__") else value
