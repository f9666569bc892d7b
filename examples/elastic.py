r"""Training that goes on when a rank is killed, on the others, from the state that they hold.

    step 29    rank 0 [w 0:2, 0:2 of AdamW's]   rank 1 [2:4]       mesh (replicas=2, shards=2)
               rank 2 [0:2]                     rank 3 [2:4]
    step 30    rank 2 is killed in its forward: the others leave the step and agree on who is left
               rank 0 [0:4]    rank 1 [0:4]     rank 3 [0:4]       mesh (replicas=3, shards=1)
    step 30    is taken again
    step 55    a process in the place of rank 2 has been started, and joins as rank 4
               rank 0 [0:2]   rank 1 [2:4]   rank 3 [0:2]   rank 4 [2:4]

A small model learns to predict the bytes of this file. Each rank has its rows of the batch.

    python examples/elastic.py              four local processes
    python examples/elastic.py --kill       the same, and one of them is killed halfway
    python examples/elastic.py --kill --restart    and started again, while the others go on
"""

from __future__ import annotations

import argparse
import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardmesh as sm
from shardmesh import P

CONTEXT, WIDTH, ROWS = 16, 64, 96
KILLED = 2
PACE_S = 0.3  # of a step after the loss, if a process is to come that has to import torch first


class Options(NamedTuple):
    """What the command line says."""

    ranks: int
    steps: int
    kill: bool
    restart: bool


def make_mesh(ranks: int) -> sm.DeviceMesh:
    """Return a mesh of replicas of two shards, or of one where the number of ranks is odd."""
    shards = 2 if ranks % 2 == 0 else 1
    return sm.init_device_mesh("cpu", (ranks // shards, shards), axis_names=("replicas", "shards"))


def build(mesh: sm.DeviceMesh) -> dict[str, Any]:
    """Return model and optimizer on a mesh, from scratch."""
    torch.manual_seed(0)
    layers = (
        nn.Embedding(256, WIDTH),
        nn.Flatten(),
        nn.Linear(CONTEXT * WIDTH, 4 * WIDTH),
        nn.GELU(),
        nn.Linear(4 * WIDTH, 256),
    )
    model = sm.parallel.fully_shard(nn.Sequential(*layers), mesh)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=3e-3)}


def data(text: Tensor, index: int, mesh: sm.DeviceMesh) -> tuple[Any, Any]:
    """Return the contexts and the next bytes of step `index`, the same whenever it is asked."""
    generator = torch.Generator().manual_seed(index)
    at = torch.randint(len(text) - CONTEXT, (ROWS,), generator=generator)
    contexts = text[at[:, None] + torch.arange(CONTEXT)]
    rows = P(tuple(mesh.axis_names))
    inputs = sm.distribute_tensor(contexts, mesh, rows, src_data_rank=None)
    return inputs, sm.distribute_tensor(text[at + CONTEXT], mesh, rows, src_data_rank=None)


def step(
    fatal: int,
    pace_s: float,
    number: list[int],
    state: dict[str, Any],
    batch: tuple[Any, Any],
    mesh: Any,
) -> float:
    """Take one optimizer step; in the attempt of this number the process is killed.

    While a rank is missing, a step takes `pace_s` and more.
    """
    number[0] += 1
    if mesh.ranks.size < number[1]:
        time.sleep(pace_s)
    inputs, targets = batch
    loss = F.cross_entropy(state["model"](inputs), targets)
    if number[0] == fatal:
        print(f"rank {os.environ['RANK']} is killed in the forward of step {fatal - 1}", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    state["optimizer"].zero_grad()
    loss.backward()
    value = loss.item()
    state["optimizer"].step()
    return value


def main(options: Options) -> list[float]:
    """Train on this rank, and return the losses."""
    text = torch.tensor(list(Path(__file__).read_bytes()))
    is_new = "SHARDMESH_ELASTIC_JOIN" in os.environ
    is_killed = options.kill and int(os.environ["RANK"]) == KILLED and not is_new
    fatal = options.steps // 2 + 1 if is_killed else 0
    pace_s = PACE_S if options.restart else 0.0
    run = sm.elastic.run(
        build,
        partial(step, fatal, pace_s, [0, options.ranks]),
        partial(data, text),
        make_mesh=make_mesh,
        steps=options.steps,
    )
    if run.mesh.get_rank() == 0:
        report(run, options.steps)
    return run.losses


def report(run: Any, steps: int) -> None:
    """Print the losses, and what has happened before which step."""
    events = {event.step: event for event in run.events}
    print("step  loss")
    for number in range(steps):
        if number in events:
            event = events[number]
            print(
                f"      lost {event.lost}, joined {event.joined}, on with {event.ranks} after "
                f"{event.seconds:.2f} s: {event.reason}"
            )
        if number % max(1, steps // 10) == 0 or number == steps - 1:
            print(f"{number:4}  {run.losses[number]:.4f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Training that goes on without a killed rank")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--kill", action="store_true", help=f"kill rank {KILLED} halfway")
    parser.add_argument("--restart", action="store_true", help="start it again")
    chosen = Options(**vars(parser.parse_args()))
    restarts = int(chosen.restart)
    sm.launch(main, chosen.ranks, (chosen,), elastic=True, restarts=restarts)
