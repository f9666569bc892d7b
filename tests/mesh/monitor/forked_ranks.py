"""Programs of ranks in jobs of `forked.py`."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

import shardmesh as sm
from shardmesh.mesh.errors import WatchError
from shardmesh.mesh.launch import progress, rendezvous
from shardmesh.mesh.monitor import agreement

_NEW_MOUNTS = 0x20000  # CLONE_NEWNS of linux/sched.h


def rank() -> int:
    return int(os.environ["RANK"])


def make_mesh() -> sm.DeviceMesh:
    return sm.init_device_mesh("cpu", (2, 2), axis_names=("dp", "tp"))


def train(mesh: sm.DeviceMesh, steps: int = 3) -> float:
    """Run collectives over each axis and over all ranks."""
    x = torch.tensor([1.0 + mesh.get_rank()])
    for _ in range(steps):
        x = torch.tensor([1.0 + mesh.get_rank()])
        for axes in ("tp", "dp", None):
            mesh.group(axes).all_reduce(x)
    return x.item()


def trained(mesh: sm.DeviceMesh) -> None:
    print(
        "result", train(mesh), "monitor", "off" if mesh.world.monitor is None else "on", flush=True
    )


# -- files that cannot be made, or vanish ----------------------------------------------------------


def no_room(ranks: list[int]) -> None:
    """Train while the folder is full for these ranks."""

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if rank() in ranks:
        os.posix_fallocate = full
    trained(make_mesh())


def other_folders(ranks: list[int]) -> None:
    """Train while these ranks see another file system at the folder's path, as in separate
    containers.
    """
    before = agreement.Agreement.folder

    def folder(self: Any, needed: int) -> Any:
        return before(self, needed) / str(rank())

    if rank() in ranks:
        agreement.Agreement.folder = folder
    trained(make_mesh())


def simply_trains() -> None:
    trained(make_mesh())


def fills_up() -> None:
    """Fill up the folder after the job has started."""
    mesh = make_mesh()
    mesh.group().barrier()  # by now all have their files
    monitor = mesh.world.monitor
    if rank() == 1 and monitor is not None:
        with (
            (monitor.directory.folder / "other").open("wb", buffering=0) as file,
            contextlib.suppress(OSError),
        ):
            while True:
                file.write(bytes(1 << 16))
    mesh.group().barrier()
    for n in range(40):  # groups, calls and texts that were not there before
        mesh.group().all_reduce(torch.ones(n))
    trained(mesh)
    if rank() == 2:
        raise ValueError("no more data")
    train(mesh)


def in_containers() -> None:
    """Train with a separate /dev/shm of 64 MB on each rank."""
    ctypes.CDLL(None).unshare(_NEW_MOUNTS)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "none", "/dev/shm"], check=True)
    trained(make_mesh())


def raises_without_a_watch() -> None:
    """Raise on rank 1 while the others compute for longer than the time limit after a verdict."""
    no_room([2])
    if rank() == 1:
        raise ValueError("no more data")
    time.sleep(2.5)
    print("went on", flush=True)


def vanishes(when: str) -> None:
    """Delete the folder on rank 1: before all have seen each other's trace buffers, later, or
    repeatedly.
    """
    if when == "always":
        if rank() == 1:
            threading.Thread(
                target=_delete_always, args=(os.environ["SHARDMESH_WATCH_DIR"],), daemon=True
            ).start()
        mesh = make_mesh()
        print("result", train(mesh), flush=True)
        mesh.group().barrier()
        return
    mesh = make_mesh()
    if when == "late":
        train(mesh)
    _tell(f"made{rank()}")
    monitor = mesh.world.monitor
    if rank() == 1 and monitor is not None:
        for other in (0, 2, 3):
            _await(f"made{other}")
        shutil.rmtree(monitor.directory.folder)
        _tell("gone")
    _await("gone")
    trained(mesh)
    if when == "late" and rank() == 2:
        raise ValueError("no more data")
    train(mesh)


def _tell(what: str) -> None:
    """Signal through a file next to the monitor's, so that ranks can wait for each other without a
    collective.
    """
    Path(os.environ["SHARDMESH_WATCH_DIR"]).with_name(what).touch()


def _await(what: str) -> None:
    while not Path(os.environ["SHARDMESH_WATCH_DIR"]).with_name(what).exists():
        time.sleep(0.01)


def _delete_always(parent: str) -> None:
    while True:
        for path in Path(parent).glob("*"):
            shutil.rmtree(path, ignore_errors=True)


def forks(how: str) -> None:
    """Fork on a rank after the job has started, as data loaders do; the child's end does not affect
    the job.
    """
    mesh = make_mesh()
    train(mesh)
    child = os.fork() if how != "loader" else -1
    if child == 0 and how == "raises":
        raise ValueError("of the child")
    if child == 0 and how == "exits":
        sys.exit(3)
    if child == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "loader":
        data = torch.utils.data.TensorDataset(torch.arange(8))
        rows = torch.utils.data.DataLoader(
            data, batch_size=2, num_workers=1, multiprocessing_context="fork"
        )
        print("rows", sum(int(batch.sum()) for (batch,) in rows), flush=True)
    else:
        os.waitpid(child, 0)
    trained(mesh)


def two_jobs(ports: list[str]) -> None:
    """Form two jobs of four from eight processes; raise on rank 2 of the second job."""
    job = rank() // 4
    os.environ.update(
        RANK=str(rank() % 4), WORLD_SIZE="4", LOCAL_WORLD_SIZE="4", MASTER_PORT=ports[job]
    )
    mesh = make_mesh()
    train(mesh)
    if job == 1 and rank() == 2:
        raise ValueError("no more data")
    if job == 1:
        train(mesh, 1000)
    time.sleep(0.5)
    trained(mesh)


def changes_folder() -> None:
    if rank() == 2:
        os.chdir("/")
    trained(make_mesh())


# -- the end ---------------------------------------------------------------------------------------


def swallows(how: str) -> None:
    """Raise on rank 2; the others catch the error repeatedly, in collectives or elsewhere."""
    mesh = make_mesh()
    train(mesh)
    if rank() == 2:
        raise ValueError("no more data")
    while True:
        try:
            train(mesh) if how == "communicates" else time.sleep(0.1)
        except WatchError:
            print("caught", flush=True)
            time.sleep(0.05)


def goes_on_alone() -> None:
    """Raise on rank 2; the others leave the job and continue with other work, for longer than the
    job's time limit.
    """
    mesh = make_mesh()
    train(mesh)
    if rank() == 2:
        raise ValueError("no more data")
    try:
        train(mesh, 1000)
    except WatchError:
        dist.destroy_process_group()
        time.sleep(6)
        print("went on", flush=True)


def waits_at_exit(how: str) -> None:
    """Exit on all ranks while a collective is pending that rank 2 never calls."""
    mesh = make_mesh()
    train(mesh)
    sm.monitor.watchdog(timeout=3.0)  # only now: on a busy machine ranks start far apart
    if rank() == 2:
        time.sleep(60)
    if how == "thread":
        threading.Thread(target=time.sleep, args=(60,)).start()
    if how == "asynchronous":
        globals()["kept"] = mesh.group().all_reduce(torch.ones(4), async_op=True), mesh
    if how == "raw":
        globals()["kept"] = dist.all_reduce(torch.ones(4), async_op=True), dist.group.WORLD
    try:
        train(mesh)
    finally:
        if how == "destroyed":
            dist.all_reduce(torch.ones(4), async_op=True)
            dist.destroy_process_group()
        if how == "destroyed and a thread":
            dist.destroy_process_group()
            threading.Thread(target=time.sleep, args=(60,)).start()


def hangs_at_exit() -> None:
    """End rank 2's program while one of its threads still runs."""
    mesh = make_mesh()
    train(mesh)
    sm.monitor.watchdog(timeout=3.0)  # only now: on a busy machine ranks start far apart
    if rank() == 2:
        threading.Thread(target=time.sleep, args=(60,)).start()
    else:
        train(mesh)


def cannot_end(how: str) -> None:
    """Stop rank 2, or compute on it without releasing the GIL; the others must be ended if they
    have threads.
    """
    mesh = make_mesh()
    train(mesh)
    sm.monitor.watchdog(timeout=1.0)  # only now: on a busy machine ranks start far apart
    if how == "stopped, and threads":
        threading.Thread(target=time.sleep, args=(60,)).start()
    if rank() == 2 and how.startswith("stopped"):
        os.kill(os.getpid(), signal.SIGSTOP)
    if rank() == 2 and how == "computes":
        sum(range(10**11))
    train(mesh)


def dies_in_a_raw_collective() -> None:
    """Kill rank 2 while the others are in a collective of torch, not of the library."""
    mesh = make_mesh()
    train(mesh)
    if rank() == 2:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(4))


def raises_before_its_mesh(outlier: int) -> None:
    # as the import does, in a process that has its RANK by then
    rendezvous.notify_of_early_errors()
    if rank() == outlier:
        if os.fork() == 0:
            raise ValueError("of the child")
        os.wait()
        raise ValueError("no such file: config.toml")
    make_mesh()


def never_comes(how: str) -> None:
    """Kill rank 2 before it creates a mesh, or never create one on it."""
    rendezvous.rendezvous.__defaults__ = (5.0,)
    progress.FIRST_SAID_S = 0.5
    if rank() == 2 and how == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if rank() == 2:
        time.sleep(8)
    make_mesh()


# -- torch's default group -------------------------------------------------------------------------


def calls_the_default_group_alone() -> None:
    """Call an all_reduce over torch's default group on rank 0 only."""
    mesh = make_mesh()
    x = sm.device_put(torch.arange(8.0), mesh, sm.P(("dp", "tp")))
    if rank() == 0:
        globals()["kept"] = dist.all_reduce(torch.full((2,), 100.0), async_op=True)
    print("result", x.redistribute(sm.P()).to_local().tolist(), train(mesh), flush=True)
    os._exit(0)


def restarted(port: int, env: dict[str, str]) -> None:
    """Run an attempt of a job whose store the launcher keeps; the program starts the
    default group.
    """
    os.environ.update(env)
    attempt = env["TORCHELASTIC_RESTART_COUNT"]
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    # Gloo alone would often connect to addresses of the first attempt.
    own = dist.PrefixStore(attempt, store)
    dist.init_process_group(
        "gloo", store=own, rank=rank(), world_size=int(os.environ["WORLD_SIZE"])
    )
    distributed_c10d._get_default_store = lambda: store
    mesh = make_mesh()
    train(mesh)
    if attempt == "0" and rank() == 2:
        raise ValueError("no more data")
    trained(mesh)
