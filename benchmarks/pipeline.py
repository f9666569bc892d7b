"""Pipelines of shardmesh compared with torch.distributed.pipelining, schedule by schedule.

    python benchmarks/pipeline.py                    4 gloo processes, a few minutes
    python benchmarks/pipeline.py --only 1f1b        one schedule; may be given several times
    python benchmarks/pipeline.py --bubble           stages that sleep, against the schedule's chart
    python benchmarks/pipeline.py --quick            2 processes, a tiny model, 2 rounds
    python benchmarks/pipeline.py --json figures.json --markdown tables.md

Both train the same stages of a language model in plain PyTorch with AdamW, by the same schedule, in
the same processes; their steps are interleaved in random order (see measure.py), and a round's time
is that of its slowest rank. torch's schedules of several stages run with `defer_pp_recv` off and
on. The losses of the first steps must equal those of one process to 1e-4: otherwise the benchmark
fails, or says so in the table where it is torch's that differ.

Peak memory is the largest size of live storages during a step, the maximum over ranks (see
train_counts.py). Processes that share cores do not show a bubble: a rank that waits leaves its core
to another one. So with `--bubble` stages sleep for a fixed time instead of computing, and the time
of a step is compared with the makespan that the schedule promises.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from measure import Times
from rank_times import TimedCase, merge_ranks, time_interleaved
from report import environment, environment_line, markdown, show, write_json, write_markdown
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class
from train_counts import Memory
from train_model import Block, Size, batch, rotary_table

import shardmesh as sm

TOLERANCE = 1e-4  # of losses, relative
WRONG = -1  # in place of the peak memory: the losses are not those of one process
FIRST_STEPS = 4  # with compared losses; memory is measured in the last one
# ours: torch's, stages per rank
SCHEDULES = {
    "gpipe": ("GPipe", 1),
    "1f1b": ("1F1B", 1),
    "interleaved": ("Interleaved1F1B", 2),
    "zb_h1": ("InterleavedZeroBubble", 2),
    "zb_v": ("ZBVZeroBubble", 2),
    "dualpipe_v": ("DualPipeV", 2),
}


@dataclass(frozen=True)
class PipelineConfig:
    """What to measure, and for how many rounds."""

    ranks: int
    size: Size
    microbatches: int
    rounds: int


FULL = PipelineConfig(4, Size(layers=8, d=256, heads=4, f=688, s=128, b=8), 8, rounds=15)
QUICK = PipelineConfig(2, Size(layers=4, d=16, heads=2, f=32, s=8, b=8, vocabulary=32), 4, rounds=2)


# -- the model, as a list of stages ----------------------------------------------------------------


class Layer(nn.Module):
    """A block with its own table of rotary angles, so that stages pass one tensor."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.block = Block(size)
        self.register_buffer("rotary_se", rotary_table(size), persistent=False)

    def forward(self, x_bsd: Tensor) -> Tensor:
        return self.block(x_bsd, self.rotary_se)


class Head(nn.Module):
    """Logits, with classes in dim 1 as `F.cross_entropy` wants them."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(size.d, eps=1e-6)
        self.linear = nn.Linear(size.d, size.vocabulary, bias=False)

    def forward(self, x_bsd: Tensor) -> Tensor:
        return self.linear(self.norm(x_bsd)).transpose(1, 2)


def make_stages(size: Size, stages: int) -> list[nn.Sequential]:
    """Create the model with the same values in every process, cut into stages."""
    torch.manual_seed(0)
    layers = [Layer(size) for _ in range(size.layers)]
    per_stage = size.layers // stages
    parts = [nn.Sequential(*layers[s * per_stage : (s + 1) * per_stage]) for s in range(stages)]
    parts[0].insert(0, nn.Embedding(size.vocabulary, size.d))
    parts[-1].append(Head(size))
    return parts


# -- implementations -------------------------------------------------------------------------------

Step = Callable[[int], float]


def alone(config: PipelineConfig) -> Step:
    """Return the step of one process: the loss of the batch of a number."""
    model = nn.Sequential(*make_stages(config.size, 1))
    optimizer = torch.optim.AdamW(model.parameters())

    def step(number: int) -> float:
        inputs, targets = batch(config.size, number)
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def ours(config: PipelineConfig, name: str) -> Step:
    """Return the step of shardmesh's pipeline."""
    mesh = sm.init_device_mesh("cpu", (config.ranks,), axis_names=("pp",))
    parts = make_stages(config.size, config.ranks * SCHEDULES[name][1])
    pipe = sm.parallel.pipeline(parts, mesh, schedule=name, microbatches=config.microbatches)
    optimizer = torch.optim.AdamW(pipe.parameters())

    def step(number: int) -> float:
        inputs, targets = batch(config.size, number)
        loss = pipe.step(inputs, targets, loss_fn=F.cross_entropy)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def torchs(config: PipelineConfig, name: str, defer: bool | None) -> Step:
    """Return the step of torch's pipeline; `defer` is `defer_pp_recv` of multi-stage schedules."""
    torch_name, per_rank = SCHEDULES[name]
    rank, stages = dist.get_rank(), config.ranks * per_rank
    parts = make_stages(config.size, stages)
    placement = sm.parallel.make_schedule(
        name, config.ranks, config.microbatches, stages_per_rank=per_rank
    ).placement
    own = [
        PipelineStage(part, index, stages, torch.device("cpu"))
        for index, part in enumerate(parts)
        if placement[index] == rank
    ]
    schedule_class = get_schedule_class(torch_name)
    kind: Any = schedule_class
    if issubclass(schedule_class, PipelineScheduleMulti):
        schedule = kind(own, config.microbatches, loss_fn=F.cross_entropy, defer_pp_recv=defer)
    else:
        schedule = kind(own[0], config.microbatches, loss_fn=F.cross_entropy)
    optimizer = torch.optim.AdamW([x for stage in own for x in stage.submod.parameters()])
    is_first, is_last = (
        0 in [s.stage_index for s in own],
        stages - 1 in [s.stage_index for s in own],
    )

    def step(number: int) -> float:
        inputs, targets = batch(config.size, number)
        losses: list[Tensor] = []
        schedule.step(
            *([inputs] if is_first else []),
            target=targets if is_last else None,
            losses=losses if is_last else None,
            return_outputs=False,
        )
        optimizer.step()
        optimizer.zero_grad()
        # as ours, every rank gets the loss
        loss = torch.stack(losses).mean().detach() if is_last else torch.zeros(())
        dist.all_reduce(loss)
        return loss.item()

    return step


def implementations(name: str) -> dict[str, Callable[[PipelineConfig], Step]]:
    """Return what is compared for a schedule, by name."""
    makers: dict[str, Callable[[PipelineConfig], Step]] = {
        "shardmesh": lambda config: ours(config, name)
    }
    if SCHEDULES[name][1] == 1:
        makers["torch"] = lambda config: torchs(config, name, None)
    else:
        makers["torch"] = lambda config: torchs(config, name, False)
        makers["torch, defer_pp_recv"] = lambda config: torchs(config, name, True)
    return makers


# -- measurement on a rank -------------------------------------------------------------------------


def measure_rank(names: Sequence[str], config: PipelineConfig) -> list[tuple[TimedCase, Any]]:
    """Measure the schedules on this rank: times, and peak memory by implementation."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.getLogger("torch").setLevel(logging.ERROR)
    sm.init_device_mesh("cpu", (config.ranks,), axis_names=("pp",))  # starts torch's default group
    expected = _broadcast_losses(config)
    measured = []
    for name in names:
        steps: dict[str, Callable[[], float]] = {}
        peaks: dict[str, int] = {}
        for who, make in implementations(name).items():
            memory = Memory()
            with memory:
                step = make(config)
                losses = [step(number) for number in range(FIRST_STEPS - 1)]
                losses.append(memory.measured(lambda step=step: step(FIRST_STEPS - 1)))
            dist.barrier()
            if not _are_right(losses, expected):
                if who == "shardmesh":
                    raise RuntimeError(f"{name} has the losses {losses}, one process {expected}")
                peaks[who] = WRONG
                continue
            steps[who] = lambda step=step: step(0)
            peaks[who] = memory.peak
        costs = time_interleaved(steps, lambda _: None, config.rounds, 1, dist.barrier)
        measured.append((TimedCase("pipeline", name, 0, costs), peaks))
    return measured


def _broadcast_losses(config: PipelineConfig) -> list[float]:
    losses = torch.zeros(FIRST_STEPS, dtype=torch.float64)
    if dist.get_rank() == 0:
        step = alone(config)
        losses = torch.tensor([step(n) for n in range(FIRST_STEPS)], dtype=torch.float64)
    dist.broadcast(losses, 0)
    return losses.tolist()


def _are_right(losses: Sequence[float], expected: Sequence[float]) -> bool:
    """Compare losses. All ranks have the same ones."""
    pairs = zip(losses, expected, strict=True)
    return all(abs(loss / right - 1) <= TOLERANCE for loss, right in pairs)


# -- bubbles ---------------------------------------------------------------------------------------


class Sleep(torch.autograd.Function):
    """The identity; forward and backward sleep."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        time.sleep(2 * ctx.seconds)
        return grads[0], None


class SleepingStage(nn.Module):
    """A stage whose forward takes a fixed time, and whose backward takes twice that."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        return Sleep.apply(x * self.weight, self.seconds)  # type: ignore[return-value]


def measure_bubbles(seconds: float, ranks: int, microbatches: int) -> dict[str, float]:
    """Return the time of a step with sleeping stages, in forwards, by schedule."""
    torch.set_num_threads(1)
    mesh = sm.init_device_mesh("cpu", (ranks,), axis_names=("pp",))
    inputs = torch.ones(microbatches, 4)
    measured: dict[str, float] = {}
    for name in ("gpipe", "1f1b", "interleaved"):
        schedule = sm.parallel.make_schedule(name, ranks, microbatches)
        parts = [SleepingStage(seconds) for _ in range(schedule.stages)]
        pipe = sm.parallel.pipeline(parts, mesh, schedule=schedule, microbatches=microbatches)
        rounds: list[float] = []
        for _ in range(4):
            dist.barrier()
            start = time.perf_counter()
            pipe.step(inputs, torch.zeros(microbatches, 4), loss_fn=F.mse_loss)
            rounds.append(time.perf_counter() - start)
        measured[name] = min(rounds[1:]) / seconds
    return measured


# -- figures ---------------------------------------------------------------------------------------

COLUMNS = ("schedule", "implementation", "step ms", "CPU ms of a rank", "peak MB")
RATIO_COLUMNS = ("schedule", "shardmesh against", "step", "CPU", "peak memory")
BUBBLE_COLUMNS = ("schedule", "makespan of the chart", "measured", "measured / chart")


def _ratio(one: Times, other: Times) -> float:
    """Return the median of the rounds' ratios: other load during a round affects both."""
    pairs = zip(one.rounds, other.rounds, strict=True)
    return statistics.median(left / right for left, right in pairs)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what is asked for, print the tables and write the files."""
    options = _options(arguments)
    config = QUICK if options.quick else FULL
    env = environment()
    if options.bubble:
        rows = bubble_rows(config)
        show("sleeping stages, in forwards", BUBBLE_COLUMNS, rows)
        print(environment_line(env))
        tables = markdown(BUBBLE_COLUMNS, rows)
        write_markdown(options.markdown, f"{tables}\n\n{environment_line(env)}")
        return
    names = [name for name in SCHEDULES if not options.only or name in options.only]
    by_rank = sm.launch(measure_rank, config.ranks, (names, config), env={"OMP_NUM_THREADS": "1"})
    rows, ratios, cases = [], [], []
    for index, name in enumerate(names):
        case = merge_ranks([rank[index][0] for rank in by_rank])
        cases.append(case)
        peaks = {who: max(rank[index][1][who] for rank in by_rank) for who in case.costs}
        for who, cost in case.costs.items():
            times = [f"{t.median * 1e3:.1f}" for t in (cost.wall, cost.cpu)]
            rows.append([name, who, *times, f"{peaks[who] / 1e6:.2f}"])
            if who != "shardmesh":
                own = case.costs["shardmesh"]
                figures = (
                    _ratio(own.wall, cost.wall),
                    _ratio(own.cpu, cost.cpu),
                    peaks["shardmesh"] / peaks[who],
                )
                ratios.append([name, who, *(f"{figure:.2f}" for figure in figures)])
        rows += [
            [name, who, "wrong losses", "-", "-"]
            for who in implementations(name)
            if any(rank[index][1][who] == WRONG for rank in by_rank)
        ]
    show(f"a training step, {config.ranks} gloo processes", COLUMNS, rows)
    show("shardmesh / torch", RATIO_COLUMNS, ratios)
    print(environment_line(env))
    write_json(options.json, {"environment": env, "cases": [case.as_dict() for case in cases]})
    tables = [markdown(COLUMNS, rows), markdown(RATIO_COLUMNS, ratios), environment_line(env)]
    write_markdown(options.markdown, "\n\n".join(tables))


def bubble_rows(config: PipelineConfig) -> list[list[str]]:
    """Measure sleeping stages; return the rows of the table."""
    by_rank = sm.launch(measure_bubbles, config.ranks, (0.05, config.ranks, config.microbatches))
    rows: list[list[str]] = []
    for name in by_rank[0]:
        schedule = sm.parallel.make_schedule(name, config.ranks, config.microbatches)
        makespan = schedule.simulate().makespan
        measured = max(rank[name] for rank in by_rank)
        rows.append([name, f"{makespan:g}", f"{measured:.2f}", f"{measured / makespan:.3f}"])
    return rows


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=SCHEDULES, action="append", help="a schedule")
    parser.add_argument("--bubble", action="store_true", help="stages that sleep")
    parser.add_argument("--quick", action="store_true", help="2 processes, a tiny model, 2 rounds")
    parser.add_argument("--json", metavar="PATH", help="write all figures here")
    parser.add_argument("--markdown", metavar="PATH", help="write the tables here")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
