"""This rank's part of a sharded tensor, with its gradient history.

Autograd runs on local tensors. A custom function (`torch.autograd.Function`) sees the wrappers and
leaves its node there; the history is transferred when the result is first used with gradients.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..sharded_tensor import ShardedTensor

_no_torch_function = torch._C.DisableTorchFunctionSubclass
_wrapper_grad_fn = Tensor.grad_fn.__get__  # type: ignore[attr-defined]
_number_of_result = Tensor.output_nr.__get__  # type: ignore[attr-defined]


def check_gradient_known(x: Any) -> None:
    """Give the wrapper's gradient history, if any, to the local tensor (`ops/custom_function.py`).

    Raises:
        RuntimeError: a history that cannot be transferred; the gradient would be lost silently.
    """
    with _no_torch_function():
        node = _wrapper_grad_fn(x)
        number = _number_of_result(x)
    if node is not None:
        x._take_over_history(node, number)


def known_local(x: Any) -> Tensor:
    """Return the local tensor with the sharded one's history; see `check_gradient_known`."""
    if not x._local.requires_grad:
        check_gradient_known(x)
    return x._local


def part_of(x: Tensor) -> Tensor:
    """Return this rank's part of a tensor, with its gradient history; a plain one unchanged."""
    return known_local(x) if isinstance(x, ShardedTensor) else x
