"""The private entries of torch's autograd that the library needs, in one place.

torch's own DDP and FSDP use the first two.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import Variable, forward_ad


def current_backward() -> int:
    """A number that tells backward passes apart; -1 outside of one."""
    return torch._C._current_graph_task_id()


def at_end_of_backward(call: Callable[[], None]) -> None:
    """Call this when the running backward pass has computed every gradient."""
    Variable._execution_engine.queue_callback(call)  # type: ignore[attr-defined]


def accumulates(node: Any) -> bool:
    """Return whether the running backward pass adds to `.grad` of the leaf whose node this is; one of `torch.autograd.grad` does not."""
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # it cannot tell for what `torch.autograd.grad` was asked for
        return False


def turn_to_at_once(node: Any) -> None:
    """Have backward run this node of an `autograd.Function` as soon as its gradient is whole, before any other, as it does with leaves.

    By default it turns to what was made last in forward. A torch without this entry keeps to that: later, and with the same result.
    """
    if hasattr(node, "_set_sequence_nr"):
        node._set_sequence_nr(_LEAF)


_LEAF = (1 << 64) - 1  # which autograd gives to leaves


def saved_tensor_hooks() -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """The hooks through which autograd saves tensors here, if there are any.

    Raises:
        NotImplementedError: this torch does not say.
    """
    find = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)  # type: ignore[attr-defined]
    if find is None:
        raise NotImplementedError(f"torch {torch.__version__} does not tell which saved_tensors_hooks are active; use 2.11 or later")
    return find(True)


def _perhaps(x: torch.Tensor) -> bool:
    return True


# Whether autograd knows of the tensor itself, whatever its `__torch_function__` says; "perhaps" where torch lacks it.
any_requires_grad: Callable[[torch.Tensor], bool] = getattr(torch._C, "_any_requires_grad", _perhaps)


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


def untransformed(x: torch.Tensor) -> torch.Tensor:
    """What a tensor of a torch.func transform wraps."""
    return torch._C._functorch.get_unwrapped(x)  # type: ignore[attr-defined]


def in_forward_mode() -> bool:
    """Whether tangents are carried along (`torch.autograd.forward_ad`, `torch.func.jvp`)."""
    return forward_ad._current_level >= 0


def with_memory(grad: torch.Tensor) -> torch.Tensor:
    """The gradient, with zeros in memory where torch has a tensor without memory stand for them (as the second derivative of
    `abs`)."""
    return grad.clone() if grad._is_zerotensor() else grad
