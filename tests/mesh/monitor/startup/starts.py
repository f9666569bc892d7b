"""Start ranks without a launcher, many times: `start(forked, [rank 0's environment, ...])`."""

from __future__ import annotations

import contextlib
import io
import signal
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from shardmesh.mesh import init_device_mesh
from shardmesh.mesh.launch import progress, rendezvous
from tests.forked import Forked

LIMIT_S = 50.0
# How long ranks that differ wait for the others: on a busy machine they arrive far apart.
VOTE_S = 3.0


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


def start(forked: Forked, ranks: Sequence[Rank | dict[str, str]]) -> list[StartOutcome]:
    """Start these processes at once; return when all have an outcome."""
    starting = [rank if isinstance(rank, Rank) else Rank(rank) for rank in ranks]
    ended = forked.run(
        run,
        [[asdict(rank)] for rank in starting],
        [rank.env for rank in starting],
        forked.new_folder(),
        limit_s=LIMIT_S,
        holds=True,
    )
    nothing = {"text": "no outcome: it hangs or has died", "said": ""}
    return [StartOutcome(**(rank.value or nothing), pid=rank.pid) for rank in ended]


def run(fields: dict[str, Any]) -> dict[str, str]:
    """Start as one rank; return the text of its error, and its standard error."""
    rank, said, text = Rank(**fields), io.StringIO(), ""
    signal.setitimer(signal.ITIMER_REAL, rank.dies)
    time.sleep(rank.delay)
    with contextlib.redirect_stderr(said):
        try:
            _start(rank)
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
    return {"text": text, "said": said.getvalue()}


def _start(rank: Rank) -> None:
    torch.__version__ = rank.torch or torch.__version__
    rendezvous.rendezvous.__defaults__ = (rank.timeout,)
    rendezvous._TO_COME_S = VOTE_S
    progress.FIRST_SAID_S, progress.SAID_BY_OTHERS_S, progress.SAID_EVERY_S = 0.3, 0.4, 0.3
    size = int(rank.env["WORLD_SIZE"]) if rank.env["WORLD_SIZE"].isdecimal() else 1
    _make_meshes(rank.shapes or [[size]], size)
    if rank.again:
        dist.destroy_process_group()
        _make_meshes([[size]], size)


def _make_meshes(shapes: list[list[int]], size: int) -> None:
    for shape in shapes:
        mesh = init_device_mesh("cpu", shape)
    x = torch.ones(1)
    mesh.group(mesh.axis_names).all_reduce(x)
    assert x.item() == size
