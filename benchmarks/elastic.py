"""Cost of an elastic job without faults: what a step takes with the vote and without.

    python benchmarks/elastic.py                 4 gloo processes, a model of 1 M parameters
    python benchmarks/elastic.py --quick         2 processes, a tiny model, few rounds
    python benchmarks/elastic.py --json figures.json

The same model on the same mesh takes steps in a plain loop and in `ElasticJob.attempt`, in blocks
in turn. An attempt adds a barrier over all ranks before the optimizer writes, and after it the
copies of what forward writes. Medians of blocks; a block's time is that of its slowest rank.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from report import environment, environment_line, show
from torch import nn

import shardmesh as sm
from shardmesh import P

BLOCK = 5  # steps


class Case(NamedTuple):
    """What is timed."""

    ranks: int
    width: int
    layers: int
    rows: int
    blocks: int


FULL, QUICK = Case(4, 512, 4, 512, 20), Case(2, 32, 2, 16, 3)


def build(case: Case, mesh: sm.DeviceMesh) -> dict[str, Any]:
    torch.manual_seed(0)
    layers = [nn.Linear(case.width, case.width) for _ in range(case.layers)]
    model = sm.parallel.data_parallel(nn.Sequential(*layers), mesh)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}


def train_step(state: dict[str, Any], x: Any) -> float:
    loss = state["model"](x).square().mean()
    state["optimizer"].zero_grad()
    loss.backward()
    value = loss.item()
    state["optimizer"].step()
    return value


def measure(case: Case) -> dict[str, list[float]]:
    """Return seconds per step of each block on this rank, as the slowest rank has them."""
    job = sm.elastic.ElasticJob(
        partial(build, case),
        make_mesh=lambda n: sm.init_device_mesh("cpu", (n,), axis_names=("dp",)),
    )
    plain = build(case, job.mesh)
    group = job.mesh.group()
    x = sm.distribute_tensor(torch.randn(case.rows, case.width), job.mesh, P("dp"))

    def elastic() -> None:
        with job.attempt() as attempt:
            attempt.loss = train_step(job.state, x)

    calls: dict[str, Callable[[], Any]] = {
        "plain": lambda: train_step(plain, x),
        "elastic": elastic,
        "the vote": group.barrier,
    }
    times: dict[str, list[float]] = {name: [] for name in calls}
    for block in range(case.blocks + 1):
        for name, call in calls.items():
            group.barrier()
            since = time.perf_counter()
            for _ in range(BLOCK):
                call()
            taken = torch.tensor([(time.perf_counter() - since) / BLOCK], dtype=torch.float64)
            group.all_reduce(taken, "max")
            if block:  # the first one is warm-up
                times[name].append(taken.item())
    job.finish()
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a tiny model, few rounds")
    parser.add_argument("--json", type=Path, help="file for the figures")
    options = parser.parse_args()
    case = QUICK if options.quick else FULL
    times = sm.launch(measure, case.ranks, (case,))[0]
    medians = {name: statistics.median(values) for name, values in times.items()}
    rows = [
        (name, f"{1e3 * seconds:.2f}", f"{seconds / medians['plain']:.3f}")
        for name, seconds in medians.items()
    ]
    print(environment_line(environment()))
    show(f"a step on {case.ranks} ranks", ("", "ms", "of plain"), rows)
    if options.json:
        options.json.write_text(json.dumps(times))


if __name__ == "__main__":
    main()
