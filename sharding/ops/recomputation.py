"""Recomputation in backward (`torch.utils.checkpoint`) runs in the state of its forward, whichever thread runs it and in whatever block.

    with mesh:                                      current mesh, implicit_replication(), null_world, context_parallel()
        y = checkpoint(f, x, use_reentrant=False)   f runs; the state is captured
    y.sum().backward()                              f runs again, on CUDA in autograd's device thread; the state is restored around it

torch restores random numbers, autocast and the default device itself. Both forms of checkpoint keep the function that they run again when
they start; it is replaced there by one that restores. This reaches every caller of torch's, such as `CheckpointWrapper` and `sm.remat`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch.utils import checkpoint as torch_checkpoint

from ...mesh.comm.first_use import first_block, first_leaf
from ...mesh.comm.world import activate, active_world
from ...mesh.current_mesh import mesh_context
from .plain_operands import thread_state

# (read, write) of state that belongs to higher layers, such as the block of `context_parallel`; `write` sets what `read` returned.
_registered_state: list[tuple[Callable[[], Any], Callable[[Any], None]]] = []


def register_state(read: Callable[[], Any], write: Callable[[Any], None]) -> None:
    """Register state on which results depend, so that recomputation runs with the value of its forward."""
    _registered_state.append((read, write))


def in_present_state(f: Callable[..., Any]) -> Callable[..., Any]:
    """Return `f` that runs in the state of this thread as it is now: its simulated or null world, current mesh, implicit replication,
    and all that `register_state` names.

    The state of the thread that calls it is restored afterwards, also after an exception.
    """
    state = active_world(), mesh_context.get(), thread_state.implicit_replication
    registered = [read() for read, _ in _registered_state]

    def run(*args: Any, **kwargs: Any) -> Any:
        with _restored(*state, registered):
            return f(*args, **kwargs)

    return run


@contextmanager
def _restored(
    world: Any, meshes: Any, implicit_replication: bool, registered: Sequence[Any]
) -> Iterator[None]:
    world_before, replication_before = activate(world), thread_state.implicit_replication
    token, thread_state.implicit_replication = mesh_context.set(meshes), implicit_replication
    registered_before = [read() for read, _ in _registered_state]
    _write_registered(registered)
    try:
        yield
    finally:
        _write_registered(registered_before)
        mesh_context.reset(token)
        thread_state.implicit_replication = replication_before
        activate(world_before)


def _write_registered(values: Sequence[Any]) -> None:
    for (_, write), value in zip(_registered_state, values, strict=True):
        write(value)


# -- both forms of checkpoint ------------------------------------------------------------------------------------------

# Installed before the first block that a function may see, and before the first sharded leaf.

_torchs_frame = torch_checkpoint._CheckpointFrame.__init__
_torchs_forward = torch_checkpoint.CheckpointFunction.forward


def _frame(self: Any, recompute_fn: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    _torchs_frame(self, in_present_state(recompute_fn), *args, **kwargs)


def _forward(ctx: Any, run_function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return _torchs_forward(ctx, in_present_state(run_function), *args, **kwargs)


def _install() -> None:
    if torch_checkpoint._CheckpointFrame.__init__ is _torchs_frame:
        torch_checkpoint._CheckpointFrame.__init__ = functools.wraps(_torchs_frame)(_frame)
        torch_checkpoint.CheckpointFunction.forward = staticmethod(functools.wraps(_torchs_forward)(_forward))


first_block.before(_install)
first_leaf.before(_install)
