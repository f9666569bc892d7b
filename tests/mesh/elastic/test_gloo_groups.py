"""A group of gloo is freed though a collective in it never ended."""

from __future__ import annotations

import gc
import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardmesh.mesh.monitor import timeouts
from shardmesh.mesh.processes.torch_groups.gloo_groups import shut_down
from shardmesh.mesh.processes.torch_groups.new_group import new_group
from tests.forked import Forked

if not os.path.exists("/proc/self/fdinfo"):
    pytest.skip("the sockets of a group are known on Linux alone", allow_module_level=True)


def held() -> tuple[int, int]:
    """Return how many threads and file descriptors this process has."""
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def leave_a_collective() -> dict[str, Any]:
    """Rank 0 waits in a collective that rank 1 never calls; both leave the group."""
    dist.init_process_group("gloo")
    dist.barrier()
    before = held()
    group: Any = new_group([0, 1], "", timeouts.ON_HOST)
    dist.all_reduce(torch.ones(1), group=group)
    during = held()
    work: Any = None
    if dist.get_rank() == 0:
        work = dist.all_reduce(torch.ones(4), group=group, async_op=True)
    timeouts.keep_groups()
    dist.destroy_process_group(group)
    dist.barrier()
    closed = shut_down(group), shut_down(group)
    error = ""
    try:
        if work is not None:
            work.wait()
    except RuntimeError as failed:
        error = str(failed)
    del work
    timeouts.free_group(group)
    del group
    gc.collect()
    deadline = time.monotonic() + 20.0
    while any(now > then for now, then in zip(held(), before, strict=True)):
        if time.monotonic() > deadline:
            break
        time.sleep(0.05)
    return {"counts": [before, during, held()], "error": error, "closed": closed}


def test_a_group_is_freed_in_whose_collective_a_rank_waits(forked: Forked):
    ended = forked(leave_a_collective, 2)
    for one in ended:
        assert one.value is not None, one.output
        assert one.value["closed"] == [True, False]
        before, during, after = one.value["counts"]
        assert all(more > less for more, less in zip(during, before, strict=True))
        assert all(now <= then for now, then in zip(after, before, strict=True))
    assert "Connection closed" in ended[0].value["error"]
