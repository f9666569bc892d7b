"""Make a process group of torch on its own ranks only, with no part for the others."""

from __future__ import annotations

import hashlib
import importlib
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

# by job, so that a failure in one does not affect the next
_times_made: Counter[tuple[str, tuple[int, ...]]] = Counter()
_lock = threading.Lock()


def new_group(
    ranks: Sequence[int],
    job: str,
    timeout: timedelta | None,
    backends: str | None = None,
    options: Any = None,
) -> dist.ProcessGroup:
    """Return a new process group; called by these ranks only.

    NCCL runs on streams of high priority, so that it overlaps with computation.

    Args:
        job: a name of the default group.
        timeout: None for torch's own.
        backends: such as "cuda:nccl"; None for those of the default group.
        options: of the backend; their timeout replaces `timeout`.

    Communication: waits for all of these ranks.
    """
    if backends == "fake":  # torch registers this backend when its module is imported
        importlib.import_module("torch.testing._internal.distributed.fake_pg")
    if options is None:
        options = _options(backends or dist.get_backend_config(), timeout)
    else:
        timeout = options._timeout
    with _lock, _names_from_ranks(job), _no_bound_device():
        group: dist.ProcessGroup = dist.new_group(  # type: ignore[assignment]
            list(ranks),
            backend=backends,
            use_local_synchronization=True,
            timeout=timeout,
            pg_options=options,
        )
    return group


def _options(backends: str, timeout: timedelta | None) -> Any:
    """Return torch's options of NCCL, None for groups without it.

    torch warns if their timeout is another than the group's.
    """
    if "nccl" not in [part.rpartition(":")[2] for part in backends.split(",")]:
        return None
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    name: Any = dist.Backend(backends)
    options._timeout = timeout or distributed_c10d._get_default_timeout(name)
    return options


def without_host(backends: str) -> str | None:
    """Return the backends without gloo for the CPU; None unless they are gloo there only.

    >>> without_host("cpu:gloo,cuda:nccl"), without_host("gloo"), without_host("cuda:nccl")
    ('cuda:nccl', None, None)
    """
    parts = backends.split(",")
    others = [part for part in parts if part != "cpu:gloo"]
    return (
        ",".join(others)
        if len(others) < len(parts)
        and others
        and not any(part.endswith(":gloo") for part in others)
        else None
    )


def has_host(backends: str) -> bool:
    """Return whether these backends include one for the CPU.

    >>> has_host("cuda:nccl"), has_host("nccl"), has_host("gloo")
    (False, False, True)
    """
    return "cpu" in _by_device(backends)


def is_default_backend(name: str) -> bool:
    """Return whether the default group has this backend, for the same devices."""
    return dist.is_initialized() and _by_device(name) == _by_device(dist.get_backend_config())


def _by_device(backends: str) -> dict[str, Any]:
    name: Any = dist.Backend(backends)
    return distributed_c10d.BackendConfig(name).get_device_backend_map()


def add_host(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """Add gloo for tensors on the CPU to a process group without it.

    As torch does for "cpu:gloo" (2.13: _new_process_group_helper).

    Gloo connects each rank with each other at once. Most groups of a job on GPUs never need it.

    Communication: waits for all ranks of the group.
    """
    store = distributed_c10d._world.pg_map[group][1]
    gloo = dist.ProcessGroupGloo(
        dist.PrefixStore("cpu/", store), group.rank(), group.size(), timeout
    )
    gloo.options.global_ranks_in_group = dist.get_process_group_ranks(group)
    gloo.options.group_name = group.group_name
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
    configs = distributed_c10d._world.pg_backend_config
    configs[group] = f"cpu:gloo,{configs[group]}"


@contextmanager
def _no_bound_device() -> Iterator[None]:
    """Make torch create a communicator of its own for a new group.

    If the default group has a bound device (`init_process_group(device_id=)`), torch splits its
    communicator instead (2.13: distributed_c10d._get_split_source), which all ranks of the default
    group must call.
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

    Torch names a group made with `use_local_synchronization` after its ranks and the number of
    groups that this rank has made so far (2.13: distributed_c10d._hash_ranks_to_str). Ranks that
    differ in that number, as on meshes over parts of the world, would wait for each other under
    different names and hang. Here the name uses the number of groups made of these same ranks, on
    which they agree.
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
