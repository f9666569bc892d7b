"""Parameters that sharded ones have replaced, and the error of optimizers that still have them."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

_REPLACED = "_shardmesh_replaced"  # the attribute that marks a replaced parameter
_registered: list[Any] = []


def mark_replaced(old: Tensor) -> None:
    """Mark a parameter as replaced, so that an optimizer that steps it raises an error."""
    setattr(old, _REPLACED, True)
    if not _registered:
        _registered.append(register_optimizer_step_pre_hook(_check_parameters))


def _check_parameters(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Raise if an optimizer has a replaced parameter.

    Raises:
        RuntimeError: on every rank that steps it, before any communication.
    """
    for i, group in enumerate(optimizer.param_groups):
        for j, x in enumerate(group["params"]):
            if _REPLACED in x.__dict__:
                raise RuntimeError(
                    f"{type(optimizer).__name__}.step(): parameter {j} of group {i}, of shape "
                    f"{list(x.shape)}, is no longer in its module: a sharded one has replaced it; "
                    "make the optimizer after fully_shard, data_parallel, parallelize and "
                    "materialize, from model.parameters()"
                )
