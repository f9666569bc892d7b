"""Recomputation in backward (`torch.utils.checkpoint`) runs in the state of its forward.

Whichever thread runs it, and in whatever block.

    with mesh:                                      the current mesh, implicit_replication(),
                                                    null_world, context_parallel()
        y = checkpoint(f, x, use_reentrant=False)   f runs; the state is captured
    y.sum().backward()                              f runs again, on CUDA in autograd's device
                                                    thread; the state is restored around it

torch restores random numbers, autocast and the default device itself. Both forms of checkpoint keep
the function that they run again when they start; it is replaced there by one that restores. This
reaches every caller of torch's, such as `CheckpointWrapper` and `sm.remat`.

A graph of `sm.jit` saves other tensors than eager code, and checkpoint compares them. So graphs are
numbered, and a recomputation runs those that there were in its forward.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

from torch.utils import checkpoint as torch_checkpoint

from ...mesh.comm.current_world import current_world
from ...mesh.comm.first_use import first_block, first_leaf
from ...mesh.comm.thread_context import thread_context
from ...mesh.current_mesh import mesh_context

_numbers = itertools.count()


def next_graph_number() -> int:
    """Return a number above those of all graphs, and of all forwards, so far."""
    return next(_numbers)


def in_present_state(f: Callable[..., Any]) -> Callable[..., Any]:
    """Return `f` that runs in the present state.

    The `FunctionState` of this thread, the current mesh, and the attention of its rank.

    The state of the thread that calls it is restored afterwards, also after an exception.
    """
    state = thread_context.function_state()
    if state.graphs_before is None:
        state = state._replace(graphs_before=next_graph_number())
    meshes = mesh_context.get()
    attention = current_world().attention

    def run(*args: Any, **kwargs: Any) -> Any:
        with thread_context.running_as(state), current_world().attending(attention):
            token = mesh_context.set(meshes)
            try:
                return f(*args, **kwargs)
            finally:
                mesh_context.reset(token)

    return run


# -- both forms of checkpoint ----------------------------------------------------------------------

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
        torch_checkpoint.CheckpointFunction.forward = staticmethod(
            functools.wraps(_torchs_forward)(_forward)
        )


first_block.before(_install)
first_leaf.before(_install)
