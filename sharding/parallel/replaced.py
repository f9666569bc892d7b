"""Parameters that sharded ones have replaced in their modules, and optimizers that still hold them."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

_REPLACED = "_shardmesh_replaced"  # under this name a parameter says that another one stands in its place
_registered: list[Any] = []


def mark_replaced(old: Tensor) -> None:
    """Mark a parameter as replaced: an optimizer that steps it afterwards raises, instead of training nothing."""
    setattr(old, _REPLACED, True)
    if not _registered:
        _registered.append(register_optimizer_step_pre_hook(_check_parameters))


def _check_parameters(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Raise for an optimizer with a parameter that was replaced.

    Raises:
        RuntimeError: on every rank that steps it, before anything moves.
    """
    for i, group in enumerate(optimizer.param_groups):
        for j, x in enumerate(group["params"]):
            if _REPLACED in x.__dict__:
                raise RuntimeError(
                    f"{type(optimizer).__name__}.step(): parameter {j} of group {i}, of shape {list(x.shape)}, is no longer in its "
                    "module: a sharded one has its place; make the optimizer after fully_shard, data_parallel, parallelize and "
                    "materialize, from model.parameters()"
                )
