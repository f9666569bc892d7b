"""Transforms of `torch.func`: whether a tensor belongs to one, and how to make a tensor that belongs to none while one is being run.

Inside `torch.func.grad` and `jvp` every tensor that is made belongs to the transform, and has no memory that may be read.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack


def _no_transform(x: torch.Tensor) -> bool:
    return False


# Whether the tensor belongs to a torch.func transform that is being run.
is_transformed: Callable[[torch.Tensor], bool] = getattr(
    getattr(torch._C, "_functorch", None), "is_functorch_wrapped_tensor", _no_transform
)


def _no_transforms() -> bool:
    return False


# Whether any transform of torch.func is being run.
transforms_active: Callable[[], bool] = getattr(torch._C, "_are_functorch_transforms_active", _no_transforms)


def outside_of_transforms() -> AbstractContextManager[Any]:
    """Inside, no transform is at work: what is made there is a plain tensor, and may be kept."""
    return temporarily_clear_interpreter_stack() if transforms_active() else nullcontext()
