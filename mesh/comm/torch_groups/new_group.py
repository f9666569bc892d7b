"""Make a process group of torch on its own ranks only, with no part for the others."""

from __future__ import annotations

import hashlib
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial

import torch.distributed as dist
from torch.distributed import distributed_c10d

_times_made: Counter[tuple[str, tuple[int, ...]]] = Counter()  # by job, so that a failure in one does not affect the next
_lock = threading.Lock()


def new_group(ranks: Sequence[int], job: str, timeout: timedelta | None) -> dist.ProcessGroup:
    """Return a new process group with the backends of the default one; called by these ranks only.

    Args:
        job: a name of the default group.
        timeout: None for torch's own.

    Communication: waits for all of these ranks.
    """
    with _lock, _names_from_ranks(job), _no_bound_device():
        made: dist.ProcessGroup = dist.new_group(list(ranks), use_local_synchronization=True, timeout=timeout)  # type: ignore[assignment]
    return made


@contextmanager
def _no_bound_device() -> Iterator[None]:
    """Make torch create a communicator of its own for a new group.

    If the default group has a bound device (`init_process_group(device_id=)`), torch splits its communicator instead (2.13:
    distributed_c10d._get_split_source), which all ranks of the default group must call.
    """
    default = dist.group.WORLD
    bound = getattr(default, "bound_device_id", None)
    if default is None or bound is None:
        yield
        return
    default.bound_device_id = None
    try:
        yield
    finally:
        default.bound_device_id = bound


@contextmanager
def _names_from_ranks(job: str) -> Iterator[None]:
    """Make torch give a new group the same name on all of its ranks.

    Torch names a group made with `use_local_synchronization` after its ranks and the number of groups that this rank has
    made so far (2.13: distributed_c10d._hash_ranks_to_str). Ranks that differ in that number, as on meshes over parts
    of the world, would wait for each other under different names and hang. Here the name uses the number of groups made of
    these same ranks, on which they agree.
    """
    if not hasattr(distributed_c10d, "_hash_ranks_to_str"):
        yield
        return
    original = distributed_c10d._hash_ranks_to_str
    distributed_c10d._hash_ranks_to_str = partial(_group_name, job)
    try:
        yield
    finally:
        distributed_c10d._hash_ranks_to_str = original


def _group_name(job: str, ranks: Sequence[int]) -> str:
    key = job, tuple(ranks)
    _times_made[key] += 1
    digest = hashlib.sha1(repr(key).encode(), usedforsecurity=False).hexdigest()
    return f"shardmesh_{digest}_{_times_made[key]}"
