"""Whether torch's work on the CPU is done, asked so that torch's own threads can finish it.

    gloo's thread    Work.finish: has the work's lock, runs the profiler's callback, which waits for
                     the interpreter's lock
    this thread      Work.isCompleted: has the interpreter's lock, waits for the work's:
                     neither goes on

The callback needs the interpreter where the collective was started under
`torch.autograd.graph.saved_tensors_hooks`, as in a backward of FSDP, while a profiler was on (torch
2.13). A wait releases the interpreter's lock, so a short one asks in place of `is_completed()`.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.autograd import profiler

_SHORT = timedelta(milliseconds=1)
_IS_PENDING = "Operation timed out!"  # c10d::Work::wait, when the time is over
_Work: Any = getattr(dist, "Work", None)
_wait: Any = getattr(_Work, "wait", None)  # before `torch_calls` wraps it


def is_pending(error: RuntimeError, work: Any) -> bool:
    """Return whether a timed wait raised this error because the time was over; otherwise the work
    has failed, or has just ended.
    """
    return _IS_PENDING in str(error) or not work.is_completed()


def is_done(work: Any) -> bool:
    """Return whether a collective of gloo has ended or failed; waits up to 1 ms."""
    if type(work) is not _Work:  # a stand-in
        return work.is_completed()
    try:
        _wait(work, _SHORT)
    except RuntimeError as error:
        return not is_pending(error, work)
    return True


def is_done_now(work: Any) -> bool:
    """Return whether a work has ended, in little time; under a profiler always False."""
    return not profiler._is_profiler_enabled and work.is_completed()
