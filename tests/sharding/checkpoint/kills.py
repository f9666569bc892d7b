"""Saves in which ranks are killed, with names such as "save one 0 17 before": which ranks, at which
write, before or halfway.

    save|replace|async  a new step, the existing step saved again, or a new step by async_save
    one|all             the rank alone, or all four
    0                   the rank whose calls are counted
    17 before|half      at its 17th call that changes the disk; half: after half of the data
    0.013 after         13 ms after the start of the save

Each writes to a folder of its name in the folder given by the environment variable
CHECKPOINT_KILLS.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import shardmesh as sm
from shardmesh import P
from shardmesh.sharding.checkpoint.load import load
from shardmesh.sharding.checkpoint.save import async_save, save
from tests.faults.fault import Fault, FaultsByName
from tests.faults.rank_context import RankContext

VARIABLE = "CHECKPOINT_KILLS"
CALLS = ("mkdir", "open", "write", "fsync", "rename", "unlink", "rmdir")
LARGE = 1 << 18  # elements, for saves that are killed after a time


def tree(mesh: sm.DeviceMesh, step: int, size: int) -> dict[str, Any]:
    x = torch.arange(float(size)).reshape(-1, 8) + step
    return {
        "x": sm.distribute_tensor(x, mesh, P("x"), src_data_rank=None),
        "y": sm.distribute_tensor(-x, mesh, P(None, "x"), src_data_rank=None),
        "step": step,
    }


def fault_of(name: str) -> Fault:
    kind, who, rank, when, how = name.split()

    def program(ctx: RankContext) -> Any:
        folder = Path(os.environ[VARIABLE], name.replace(" ", "-"))
        size = LARGE if how == "after" else 64
        save(tree(ctx.mesh, 1, size), folder, step=1)
        pids = ctx.mesh.group("x").all_gather_object(os.getpid())
        doomed = pids if who == "all" else [os.getpid()]
        second = tree(ctx.mesh, 2, size)
        with killed(doomed, when, how) if ctx.rank == int(rank) else nothing() as count:
            step = 1 if kind == "replace" else 2
            async_save(second, folder, step=step).wait() if kind == "async" else save(
                second, folder, step=step
            )
        return count[0]

    program.__name__ = name
    return Fault(program)


@contextmanager
def nothing() -> Iterator[list[int]]:
    yield [0]


@contextmanager
def killed(pids: list[int], when: str, how: str) -> Iterator[list[int]]:
    """Kill these processes at the call or time inside the block; yield a counter of the calls."""
    count, originals = [0], {name: getattr(os, name) for name in CALLS}

    def die() -> None:
        for pid in sorted(pids, key=lambda pid: pid == os.getpid()):
            os.kill(pid, signal.SIGKILL)

    def counted(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if name != "open" or args[1] & os.O_CREAT:
                if how != "after" and count[0] == int(when):
                    if how == "half" and name == "write":
                        originals["write"](args[0], bytes(args[1])[: len(args[1]) // 2])
                    die()
                count[0] += 1
            return originals[name](*args, **kwargs)

        return call

    if how == "after":
        timer = threading.Timer(float(when), die)
        timer.daemon = True
        timer.start()
    try:
        for name in CALLS:
            setattr(os, name, counted(name))
        yield count
    finally:
        for name, original in originals.items():
            setattr(os, name, original)


FAULTS = FaultsByName(fault_of)


def loaded_step(base: Path, name: str) -> int:
    """Return the step that is loaded after a kill, checking that it is exactly one save's and that
    another save works.

    Raises:
        AssertionError: a mixture of saves, or an unusable folder.
    """
    folder = base / name.replace(" ", "-")

    def program() -> int:
        mesh = sm.init_device_mesh("cpu", (3,), axis_names=("x",))
        size = LARGE if name.endswith("after") else 64
        loaded = load(folder, tree(mesh, 0, size))
        expected = tree(mesh, loaded["step"], size)
        assert loaded["step"] in (1, 2)
        assert all(torch.equal(loaded[key]._local, expected[key]._local) for key in ("x", "y"))
        save(expected, folder, step=3, keep=1)
        return loaded["step"]

    step = sm.simulate(3)(program)()[0]
    assert [path.name for path in folder.iterdir()] == ["step-00000003"]
    return step
