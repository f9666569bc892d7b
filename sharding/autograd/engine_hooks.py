"""All uses of private APIs of torch's autograd. torch's own DDP and FSDP use the first two."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch._functorch import eager_transforms
from torch.autograd import Variable, forward_ad

from ...mesh.comm.thread_context import thread_context
from ...mesh.comm.transforms import is_transformed, transforms_active


def current_backward() -> int:
    """Return the id of the running backward pass; -1 outside of one."""
    return torch._C._current_graph_task_id()


def keeps_graph() -> bool:
    """Return True if the running backward pass was called with `retain_graph=True`."""
    return torch._C._autograd._get_current_graph_task_keep_graph()  # type: ignore[attr-defined]


def at_end_of_backward(call: Callable[[], None]) -> None:
    """Register a callback for when the running backward pass has computed every gradient."""
    Variable._execution_engine.queue_callback(call)  # type: ignore[attr-defined]


def accumulates(node: Any) -> bool:
    """Return True if the running backward pass adds to `.grad` of the leaf with this node.

    One of `torch.autograd.grad` does not.
    """
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # raised in `torch.autograd.grad`
        return False


def run_as_soon_as_ready(node: Any) -> None:
    """Give this node of an `autograd.Function` the priority of leaves.

    Backward runs it before others once its gradient is complete.

    By default the node that was created last runs first. A torch without this API keeps that order,
    with the same result.
    """
    if hasattr(node, "_set_sequence_nr"):
        node._set_sequence_nr(_LEAF)


_LEAF = (1 << 64) - 1  # the sequence number of leaves


def saved_tensor_hooks() -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """Return the active `saved_tensors_hooks`, if there are any.

    Raises:
        NotImplementedError: this torch has no API for it.
    """
    find = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)  # type: ignore[attr-defined]
    if find is None:
        raise NotImplementedError(
            f"torch {torch.__version__} has no API for the active saved_tensors_hooks; use 2.11 or "
            "later"
        )
    return find(True)


class SavedTensor:
    """A tensor that is saved for backward at this point of the forward.

    As those of autograd's nodes, it goes through `saved_tensors_hooks`, and its values must not be
    written afterwards; a torch without an API for it does not check the latter. What
    `ctx.save_for_backward` saves is saved when a forward has returned, so that a recomputation,
    which ends with the last saved tensor, computes results that nothing uses.
    """

    def __init__(self, x: torch.Tensor) -> None:
        make = getattr(torch._C._autograd, "_make_saved_tensor", None)  # type: ignore[attr-defined]
        self._unpack: Callable[[], torch.Tensor] | None
        if make is not None:
            self._unpack = make(x, False).unpack
            return
        pack, unpack = saved_tensor_hooks() or (_same, _same)
        self._unpack = partial(unpack, pack(x.detach()))

    def take(self) -> torch.Tensor:
        """Return the tensor without its graph, and free it.

        Raises:
            RuntimeError: it is freed already, or has been written since it was saved.
        """
        unpack, self._unpack = self._unpack, None
        if unpack is None:
            raise RuntimeError("a saved tensor was taken twice, by a second backward")
        return unpack().detach()


def _same(x: torch.Tensor) -> torch.Tensor:
    return x


# Whether the tensor itself requires grad, without `__torch_function__`; assumed True if torch has
# no such function.
any_requires_grad: Callable[[torch.Tensor], bool] = getattr(
    torch._C, "_any_requires_grad", lambda x: True
)


def untransformed(x: torch.Tensor) -> torch.Tensor:
    """Return the tensor that a tensor of a torch.func transform wraps."""
    return torch._C._functorch.get_unwrapped(x)  # type: ignore[attr-defined]


def innermost(x: torch.Tensor) -> torch.Tensor:
    """Return the tensor inside all transforms of torch.func: the one that has memory."""
    while is_transformed(x):
        x = untransformed(x)
    return x


def is_batched(x: Any) -> bool:
    """Return True if `vmap` has batched this tensor, at any level of the active transforms."""
    while isinstance(x, torch.Tensor) and is_transformed(x):
        if torch._C._functorch.is_batchedtensor(x):  # type: ignore[attr-defined]
            return True
        x = untransformed(x)
    return False


def transform_depth() -> int:
    """Return the number of nested transforms of torch.func active in this thread."""
    return torch._C._functorch.maybe_current_level() or 0  # type: ignore[attr-defined]


_forward_lock = threading.Lock()
_forward_threads: list[int] = []  # threads in `forward_mode`, once for each block


def in_forward_mode() -> bool:
    """Return True if tangents are computed in this thread.

    By `sm.jvp`, `torch.func.jvp` or `torch.autograd.forward_ad`.
    """
    return forward_ad._current_level >= 0 and (
        thread_context.forward_mode_depth > 0 or not _forward_threads
    )


def in_foreign_forward_mode() -> bool:
    """Return True if torch's own forward mode, one per process, is active."""
    return forward_ad._current_level >= 0 and not _forward_threads


def with_tangents() -> AbstractContextManager[None]:
    """Compute tangents of outer forward modes inside the `jvp` of an `autograd.Function`.

    torch switches them off there.
    """
    return forward_ad._set_fwd_grad_enabled(True)  # type: ignore[return-value]


def transforming() -> bool:
    """Return True if a transform of torch.func or forward mode is active in this thread."""
    return transforms_active() or (forward_ad._current_level >= 0 and in_forward_mode())


@contextmanager
def forward_mode() -> Iterator[None]:
    """Make `torch.func.jvp` usable in several threads at once, such as simulated ranks.

    torch has one level of forward mode per process, and closing it drops all tangents. So the first
    thread opens it here and the last one closes it, and `torch.func.jvp` sees a nested level.
    """
    if in_foreign_forward_mode():
        yield
        return
    with _forward_lock:
        if not _forward_threads:
            forward_ad.enter_dual_level()
            eager_transforms.JVP_NESTING += 1
        _forward_threads.append(threading.get_ident())
    thread_context.forward_mode_depth += 1
    try:
        yield
    finally:
        thread_context.forward_mode_depth -= 1
        with _forward_lock:
            _forward_threads.pop()
            if not _forward_threads:
                eager_transforms.JVP_NESTING -= 1
                forward_ad.exit_dual_level()


def sequence_number() -> int:
    """Return the sequence number of this thread's next node; -1 if torch has no API for it."""
    find = getattr(torch._C._autograd, "_get_sequence_nr", None)  # type: ignore[attr-defined]
    return -1 if find is None else find()


def made_before(node: Any, number: int) -> bool:
    """Return True if a node of this thread is older than this sequence number.

    False if this torch has no API for it.
    """
    return hasattr(node, "_sequence_nr") and node._sequence_nr() < number


def with_memory(grad: torch.Tensor) -> torch.Tensor:
    """Return the gradient, with memory allocated for a zero tensor that has none.

    An example is the second derivative of `abs`.
    """
    return grad.clone() if grad._is_zerotensor() else grad
