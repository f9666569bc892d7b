"""Show redistributions, with their layouts, in torch.profiler."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from torch.autograd import profiler

if TYPE_CHECKING:
    from ...comm.recording.recorder import CommTag

_NOTHING = nullcontext()  # may be entered many times


def profiler_range(tag: CommTag) -> AbstractContextManager[object]:
    """Show what happens inside as `shardmesh::redistribute f32[8, 4] @ P('dp') -> P()`; does
    nothing while no profiler runs.
    """
    if not profiler._is_profiler_enabled:
        return _NOTHING
    return profiler.record_function(f"shardmesh::redistribute {tag.text}")
