"""The private entries of torch's autograd that the library needs, in one place.

torch's own DDP and FSDP use the first two.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch._functorch import eager_transforms
from torch.autograd import Variable, forward_ad

from ....mesh.comm.transforms import is_transformed, transforms_active


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


def untransformed(x: torch.Tensor) -> torch.Tensor:
    """What a tensor of a torch.func transform wraps."""
    return torch._C._functorch.get_unwrapped(x)  # type: ignore[attr-defined]


def innermost(x: torch.Tensor) -> torch.Tensor:
    """What all transforms of torch.func around it have left of a tensor: the one that has memory."""
    while is_transformed(x):
        x = untransformed(x)
    return x


def is_batched(x: Any) -> bool:
    """Whether `vmap` has batched this tensor, in any of the transforms that are being run."""
    while isinstance(x, torch.Tensor) and is_transformed(x):
        if torch._C._functorch.is_batchedtensor(x):  # type: ignore[attr-defined]
            return True
        x = untransformed(x)
    return False


def transform_depth() -> int:
    """How many transforms of torch.func are being run in this thread, one inside the other."""
    return torch._C._functorch.maybe_current_level() or 0  # type: ignore[attr-defined]


class _Thread(threading.local):
    forward = 0  # how many `forward_mode` blocks this thread is in


_thread = _Thread()
_forward_lock = threading.Lock()
_forward_threads: list[int] = []  # those in `forward_mode`, once for each block


def in_forward_mode() -> bool:
    """Whether tangents are carried along in this thread (`sm.jvp`, `torch.func.jvp`, `torch.autograd.forward_ad`)."""
    return forward_ad._current_level >= 0 and (_thread.forward > 0 or not _forward_threads)


def in_foreign_forward_mode() -> bool:
    """Whether tangents are carried along by torch's own forward mode, which a process has but once, whatever its threads."""
    return forward_ad._current_level >= 0 and not _forward_threads


def with_tangents() -> AbstractContextManager[None]:
    """In the `jvp` of an `autograd.Function`: what it computes carries the tangents of the forward modes around this one, which torch
    switches off there."""
    return forward_ad._set_fwd_grad_enabled(True)  # type: ignore[return-value]


def transforming() -> bool:
    """Whether a transform of torch.func is at work in this thread, or tangents are carried along."""
    return transforms_active() or (forward_ad._current_level >= 0 and in_forward_mode())


@contextmanager
def forward_mode() -> Iterator[None]:
    """Inside, `torch.func.jvp` works in several threads at once, as the ranks of a simulated world are.

    torch has one level of forward mode per process, and all tangents are gone when whoever opened it leaves. So it is opened here for
    the first thread that comes and closed after the last, and `torch.func.jvp` is told that it is open.
    """
    if in_foreign_forward_mode():
        yield
        return
    with _forward_lock:
        if not _forward_threads:
            forward_ad.enter_dual_level()
            eager_transforms.JVP_NESTING += 1
        _forward_threads.append(threading.get_ident())
    _thread.forward += 1
    try:
        yield
    finally:
        _thread.forward -= 1
        with _forward_lock:
            _forward_threads.pop()
            if not _forward_threads:
                eager_transforms.JVP_NESTING -= 1
                forward_ad.exit_dual_level()


def sequence_number() -> int:
    """The number that autograd gives to the next node made in this thread; -1 where this torch does not say."""
    find = getattr(torch._C._autograd, "_get_sequence_nr", None)  # type: ignore[attr-defined]
    return -1 if find is None else find()


def made_before(node: Any, number: int) -> bool:
    """Whether a node was made before `sequence_number` was this, in this thread; False where that cannot be told."""
    return hasattr(node, "_sequence_nr") and node._sequence_nr() < number


def with_memory(grad: torch.Tensor) -> torch.Tensor:
    """The gradient, with zeros in memory where torch has a tensor without memory stand for them (as the second derivative of
    `abs`)."""
    return grad.clone() if grad._is_zerotensor() else grad
