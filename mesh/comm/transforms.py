"""Detect transforms of `torch.func`, and make plain tensors while one is running.

Inside `torch.func.grad` and `jvp` every new tensor is wrapped by the transform, and its memory must
not be read.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

# Whether the tensor is wrapped by a torch.func transform that is running.
is_transformed: Callable[[torch.Tensor], bool] = getattr(
    getattr(torch._C, "_functorch", None), "is_functorch_wrapped_tensor", lambda x: False
)

# Whether any transform of torch.func is running in this thread.
transforms_active: Callable[[], bool] = getattr(
    torch._C, "_are_functorch_transforms_active", lambda: False
)


def outside_of_transforms() -> AbstractContextManager[Any]:
    """Return a context that suspends transforms: tensors made inside are plain, and outlive it."""
    return temporarily_clear_interpreter_stack() if transforms_active() else nullcontext()
