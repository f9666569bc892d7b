"""Detect two threads in collectives of one group at the same time.

Other ranks' threads may run them in another order.
"""

from __future__ import annotations

import threading
from types import CodeType

from ...errors import CollectiveError
from ..call_site import frames_of_thread, is_inner, user_line
from .recorder import RecordedGroup


def check_left(group: RecordedGroup, other: int, op: str, calls: frozenset[CodeType]) -> None:
    """Check that another thread is no longer inside a collective of this group.

    Args:
        other: the thread that called the last one and, as far as is known, has not returned from
            it.
        op: what this thread is about to call.
        calls: the code of the methods that call collectives.

    Raises: CollectiveError naming both threads, what they call and where.
    """
    frames = frames_of_thread(other)
    inside = next((frame for frame in frames if frame.f_code in calls), None)
    if inside is None:  # its call raised, or the thread has ended
        return
    frame = next((frame for frame in frames if not is_inner(frame.f_code)), inside)
    file, line = user_line()
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    raise CollectiveError(
        f"two threads are in collectives of the group of ranks {group.ranks} at the same time: "
        f"{names.get(other, other)!r} in {inside.f_code.co_name} at "
        f"{frame.f_code.co_filename}:{frame.f_lineno}, and {threading.current_thread().name!r} in "
        f"{op} at {file}:{line}. Ranks may pair them in another order. Let one thread wait for the "
        "other."
    )
