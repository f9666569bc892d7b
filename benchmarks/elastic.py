"""Cost of an elastic job: a step with the vote and without, and the time that a fault costs.

    python benchmarks/elastic.py                 2 and 4 gloo processes, a model of 1 M parameters
    python benchmarks/elastic.py --quick         2 processes, a tiny model, few rounds
    python benchmarks/elastic.py --faults 5      the time that each of 5 faults costs, 4 processes
    python benchmarks/elastic.py --json figures.json

*Without faults* the same model on the same mesh takes steps in a plain loop and in
`ElasticJob.attempt`, in blocks in turn, of which every other round is in the opposite order. An
attempt adds one small collective over all ranks before the optimizer writes, the vote, and after it
the copies of what forward writes. A block's time is that of its slowest rank, its CPU time the mean
of the ranks', all of their threads included. What an attempt adds is the median of the differences
of the two blocks of a round, with their quartiles. Where there are more processes than cores, a
rank that waits for a vote waits for others that take turns.

*With faults* the last rank kills itself in the forward of a step, every `EVERY` steps, and the time
is taken to the end of the next step that any rank ends, and of the next one that is new. An elastic
job goes on without the rank, which is started again and joins; torchrun restarts all processes,
which load the newest checkpoint, of every `SAVE_EVERY` steps. The useful steps of an hour follow
from the medians, for a fault every so many steps of a second.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
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
EVERY, SAVE_EVERY = 20, 10  # steps between faults, and between checkpoints
PACE_S = 0.5  # of a step, about the time of one at scale; processes that start need some steps
STEPS_BETWEEN = (100, 1000, 10000)  # for which the useful steps of an hour are shown


class Case(NamedTuple):
    """What is timed."""

    ranks: int
    width: int
    layers: int
    rows: int
    rounds: int


FULL, QUICK = [Case(2, 512, 4, 1280, 40), Case(4, 512, 4, 1280, 40)], [Case(2, 32, 2, 16, 3)]
FAULTY, QUICK_FAULTY = Case(4, 512, 4, 512, 0), Case(2, 32, 2, 16, 0)


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


class Block(NamedTuple):
    """What a step of a block takes.

    Attributes:
        seconds: of its slowest rank.
        cpu_seconds: of CPU time, the mean of the ranks.
    """

    seconds: float
    cpu_seconds: float


def measure(case: Case) -> dict[str, list[Block]]:
    """Return each block by what is called in it."""
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
        "a barrier": group.barrier,
    }
    blocks: dict[str, list[Block]] = {name: [] for name in calls}
    for number in range(case.rounds + 1):
        names = list(calls) if number % 2 else list(calls)[::-1]
        for name in names:
            group.barrier()
            since, cpu_since = time.perf_counter(), time.process_time()
            for _ in range(BLOCK):
                calls[name]()
            seconds, cpu_seconds = time.perf_counter() - since, time.process_time() - cpu_since
            slowest = torch.tensor([seconds / BLOCK], dtype=torch.float64)
            together = torch.tensor([cpu_seconds / BLOCK], dtype=torch.float64)
            group.all_reduce(slowest, "max")
            group.all_reduce(together)
            if number:  # the first one is warm-up
                blocks[name].append(Block(slowest.item(), together.item() / case.ranks))
    job.finish()
    return blocks


def show_cost(case: Case, blocks: dict[str, list[Block]]) -> None:
    rows: list[tuple[str, ...]] = []
    for name, of_call in blocks.items():
        medians = [1e3 * statistics.median(values) for values in zip(*of_call, strict=True)]
        rows.append((name, *(f"{value:.2f}" for value in medians), ""))
    added = [
        [1e3 * (with_vote - without) for with_vote, without in zip(elastic, plain, strict=True)]
        for elastic, plain in zip(
            zip(*blocks["elastic"], strict=True), zip(*blocks["plain"], strict=True), strict=True
        )
    ]
    plain_ms = 1e3 * statistics.median(block.seconds for block in blocks["plain"])
    first, median, third = statistics.quantiles(added[0], n=4)
    rows.append(
        (
            "elastic - plain",
            f"{median:.2f} ({first:.2f} to {third:.2f})",
            f"{statistics.median(added[1]):.2f}",
            f"{median / plain_ms:.2%}",
        )
    )
    columns = ("", "ms", "CPU ms of a rank", "of plain")
    show(f"a step on {case.ranks} ranks, {os.cpu_count()} cores", columns, rows)


# -- faults ----------------------------------------------------------------------------------------


class Journal:
    """Lines of a file that all processes of a host append to: ["step" or "fault", number, time]."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, what: str, number: int) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps([what, number, time.monotonic()]) + "\n")

    def read(self) -> list[tuple[str, int, float]]:
        if not self._path.exists():
            return []
        return [tuple(json.loads(line)) for line in self._path.read_text().splitlines()]

    def is_due(self, step: int) -> bool:
        """Return whether a rank is to fail in this step, and has not yet."""
        faults = {number for what, number, _ in self.read() if what == "fault"}
        return step > 0 and step % EVERY == 0 and step not in faults


def fail_if_due(journal: Journal, step: int, mesh: sm.DeviceMesh, ranks: int) -> None:
    """Kill this process if it is the last rank of a mesh of all ranks, and a fault is due."""
    is_last = mesh.get_rank() == ranks - 1 == mesh.ranks.size - 1
    if is_last and journal.is_due(step):
        journal.write("fault", step)
        os.kill(os.getpid(), signal.SIGKILL)


def faulty_step(
    journal: Journal, case: Case, index: int, state: dict[str, Any], mesh: sm.DeviceMesh
) -> float:
    time.sleep(PACE_S)
    fail_if_due(journal, index, mesh, case.ranks)
    generator = torch.Generator().manual_seed(index)
    rows = torch.randn(12 * case.rows, case.width, generator=generator)  # of 3 and of 4 ranks
    return train_step(state, sm.distribute_tensor(rows, mesh, P("dp"), src_data_rank=None))


def make_mesh(n: int) -> sm.DeviceMesh:
    return sm.init_device_mesh("cpu", (n,), axis_names=("dp",))


def train_elastic(path: Path, case: Case, steps: int) -> None:
    """Train as an elastic job."""
    journal = Journal(path)
    job = sm.elastic.ElasticJob(partial(build, case), make_mesh=make_mesh)
    while job.step < steps or not job.finish():
        before = job.step
        with job.attempt() as attempt:
            attempt.loss = faulty_step(journal, case, job.step, job.state, job.mesh)
        if job.step > before and job.mesh.get_rank() == 0:
            journal.write("step", job.step)


def train_restarted(path: Path, case: Case, steps: int) -> None:
    """Train under torchrun, from the newest checkpoint."""
    journal, folder = Journal(path), path.with_suffix(".checkpoints")
    mesh = make_mesh(case.ranks)
    state = build(case, mesh)
    step = 0
    newest = sm.checkpoint.latest(folder)
    if newest is not None:
        step = newest.step
        sm.checkpoint.load(folder, state, step=step)
    while step < steps:
        faulty_step(journal, case, step, state, mesh)
        step += 1
        if mesh.get_rank() == 0:
            journal.write("step", step)
        if step % SAVE_EVERY == 0:
            sm.checkpoint.save(state, folder, step=step, keep=1)


def times_after_faults(journal: Journal) -> tuple[list[float], list[float]]:
    """Return seconds from each fault to the end of the next step, and of the next one that is new.

    The pace of a step is not part of them.
    """
    lines = journal.read()
    any_step: list[float] = []
    new_step: list[float] = []
    for what, number, at in lines:
        if what == "fault":
            ends = [(step, end) for kind, step, end in lines if kind == "step" and end > at]
            any_step.append(min(end for _, end in ends) - at - PACE_S)
            new_step.append(min(end for step, end in ends if step > number) - at - PACE_S)
    return any_step, new_step


def measure_faults(faults: int, case: Case) -> dict[str, tuple[list[float], list[float]]]:
    """Return seconds after each fault, of an elastic job and under torchrun."""
    steps = EVERY * (faults + 1)
    times: dict[str, tuple[list[float], list[float]]] = {}
    with tempfile.TemporaryDirectory() as name:
        elastic, restarted = Path(name, "elastic"), Path(name, "restarted")
        args = elastic, case, steps
        sm.launch(train_elastic, case.ranks, args, elastic=True, restarts=faults)
        times["elastic"] = times_after_faults(Journal(elastic))
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        options = [f"--nproc-per-node={case.ranks}", f"--max-restarts={faults}"]
        program = [__file__, "--worker", str(restarted), "--faults", str(faults)]
        if case == QUICK_FAULTY:
            program.append("--quick")
        subprocess.run([*torchrun, *options, *program], check=True)
        times["torchrun, checkpoints"] = times_after_faults(Journal(restarted))
    return times


def show_faults(times: dict[str, tuple[list[float], list[float]]]) -> None:
    rows: list[tuple[str, ...]] = []
    for name, (any_step, new_step) in times.items():
        seconds = statistics.median(any_step), statistics.median(new_step)
        useful = [f"{3600 * n / (n + seconds[1]):,.0f}" for n in STEPS_BETWEEN]
        rows.append((name, *(f"{value:.2f}" for value in seconds), *useful))
    hourly = [f"steps/h, 1 of {n:,}" for n in STEPS_BETWEEN]
    show("after a fault", ("", "next step, s", "next new step, s", *hourly), rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a tiny model, few rounds")
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--faults", type=int, default=0, help="measure so many faults instead")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    faulty = QUICK_FAULTY if options.quick else FAULTY
    if options.worker is not None:
        train_restarted(options.worker, faulty, EVERY * (options.faults + 1))
        return
    if options.faults:
        faults = measure_faults(options.faults, faulty)
        print(environment_line(environment()))
        show_faults(faults)
        if options.json:
            options.json.write_text(json.dumps(faults))
        return
    cases = QUICK if options.quick else FULL
    blocks = {case.ranks: sm.launch(measure, case.ranks, (case,))[0] for case in cases}
    print(environment_line(environment()))
    for case in cases:
        show_cost(case, blocks[case.ranks])
    if options.json:
        options.json.write_text(json.dumps(blocks))


if __name__ == "__main__":
    main()
