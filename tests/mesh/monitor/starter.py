"""Start ranks without a launcher, many times:
`Starter()([rank 0's environment, ...]) -> [outcome of each]`.

Importing torch takes seconds, so one process imports it and forks a child for each rank of each
start. The process has no threads and no tensors when it forks.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
LIMIT_S = 50.0
# How long ranks that differ wait for the others: on a busy machine they arrive far apart.
VOTE_S = 3.0


def is_readable(file: Any, seconds: float) -> bool:
    """Return whether there is data or the end within this many seconds. (`select` is limited to
    file descriptors below 1024.)
    """
    waiting = select.poll()
    waiting.register(file, select.POLLIN)
    return bool(waiting.poll(1000 * seconds))


@dataclass
class Rank:
    """One process that starts.

    Attributes:
        env: environment variables; RANK, WORLD_SIZE and so on.
        delay: seconds before it starts.
        torch: the version of torch that it reports.
        shapes: shapes of the meshes that it creates, in order.
        timeout: seconds that it waits for other ranks.
        again: whether it destroys its first default group and creates another.
        dies: seconds after which it is killed; 0 for never.
    """

    env: dict[str, str]
    delay: float = 0.0
    torch: str = ""
    shapes: list[list[int]] = field(default_factory=list)
    timeout: float = 40.0
    again: bool = False
    dies: float = 0.0


@dataclass
class StartOutcome:
    """The outcome of a rank: the text of its error, or "", its standard error, and its pid."""

    text: str
    said: str
    pid: int


def by_hand(size: int, port: int = 0, **common: str) -> list[dict[str, str]]:
    """Return the environment of each rank, as a user sets it by hand."""
    port = port or free_port()
    shared = {
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        **common,
    }
    return [{"RANK": str(rank), "LOCAL_RANK": str(rank), **shared} for rank in range(size)]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


class Starter:
    def __init__(self) -> None:
        kept = {
            k: v for k, v in os.environ.items() if not k.startswith(("SHARDMESH_", "TORCHELASTIC_"))
        }
        env = kept | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / '.venv' / 'src'}:{ROOT}"}
        self.process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=env,
            start_new_session=True,
        )

    def __call__(self, ranks: Sequence[Rank | dict[str, str]]) -> list[StartOutcome]:
        """Start these processes at once; return when all have an outcome."""
        assert self.process.stdin
        assert self.process.stdout
        given = [rank if isinstance(rank, Rank) else Rank(rank) for rank in ranks]
        self.process.stdin.write(json.dumps([vars(rank) for rank in given]) + "\n")
        self.process.stdin.flush()
        ready = is_readable(self.process.stdout, 2 * LIMIT_S)
        assert ready, "the ranks hang"
        return [StartOutcome(**found) for found in json.loads(self.process.stdout.readline())]

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


# ------------------------------------------------------------------------ in the process that forks


def serve() -> None:
    import torch  # noqa: F401

    from shardmesh.mesh.launch import process_groups  # noqa: F401

    for line in sys.stdin:
        children = [_fork(Rank(**given)) for given in json.loads(line)]
        print(json.dumps([_result(*child) for child in children]), flush=True)
        for pid, _ in children:  # after all results: a rank may serve the store of the others
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _fork(rank: Rank) -> tuple[int, int]:
    reader, writer = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writer)
        return pid, reader
    os.close(reader)
    result = _run(rank)
    os.write(writer, json.dumps(result).encode())
    os.close(writer)
    signal.pause()
    os._exit(0)


def _result(pid: int, reader: int) -> dict[str, Any]:
    text = b""
    while is_readable(reader, LIMIT_S) and (more := os.read(reader, 1 << 16)):
        text += more
    os.close(reader)
    found = json.loads(text) if text else {"text": "no outcome: it hangs or has died", "said": ""}
    return found | {"pid": pid}


def _run(rank: Rank) -> dict[str, Any]:
    said = io.StringIO()
    signal.setitimer(signal.ITIMER_REAL, rank.dies)
    time.sleep(rank.delay)
    text = ""
    with contextlib.redirect_stderr(said):
        try:
            _start(rank)
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
    return {"text": text, "said": said.getvalue()}


def _start(rank: Rank) -> None:
    import torch
    import torch.distributed as dist

    from shardmesh.mesh.launch import progress, rendezvous
    from shardmesh.mesh.monitor.startup import same_mesh

    os.environ.update(rank.env)
    torch.__version__ = rank.torch or torch.__version__
    rendezvous.rendezvous.__defaults__ = (rank.timeout,)
    rendezvous._TO_COME_S = same_mesh._TO_COME_S = VOTE_S
    progress.FIRST_SAID_S, progress.SAID_BY_OTHERS_S, progress.SAID_EVERY_S = 0.3, 0.4, 0.3
    size = int(rank.env["WORLD_SIZE"]) if rank.env["WORLD_SIZE"].isdecimal() else 1
    _make_meshes(rank.shapes or [[size]], size)
    if rank.again:
        dist.destroy_process_group()
        _make_meshes([[size]], size)


def _make_meshes(shapes: list[list[int]], size: int) -> None:
    import torch

    from shardmesh.mesh import init_device_mesh

    for shape in shapes:
        mesh = init_device_mesh("cpu", shape)
    x = torch.ones(1)
    mesh.group(mesh.axis_names).all_reduce(x)
    assert x.item() == size


if __name__ == "__main__":
    serve()
