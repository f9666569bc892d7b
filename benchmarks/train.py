"""Training steps of shardmesh compared with torch's FSDP2, DDP, ZeroRedundancyOptimizer and
DTensor's tensor and sequence parallelism.

    python benchmarks/train.py                       4 gloo processes, a few minutes
    python benchmarks/train.py --only FSDP           one pair; may be given several times
    python benchmarks/train.py --fused               AdamW with fused=True everywhere
    python benchmarks/train.py --quick               2 processes, a tiny model, 2 rounds
    python benchmarks/train.py --json figures.json --markdown tables.md

The model is a language model in plain PyTorch with AdamW (train_model.py); the batch has 2
sequences per rank. All implementations train it in the same processes, and their steps are
interleaved in random order (see measure.py); a round's time is that of its slowest rank. Before
that, each runs the same first steps; the benchmark fails unless its losses equal those of one
process to 1e-4.

Times are medians; ratios of times are medians of the rounds' ratios. "CPU" is the CPU time of all
threads of a process, averaged over ranks; other load on the machine does not add to it. Calls,
bytes received and memory are maxima over ranks, counted by train_counts.py. "at rest" is the memory
held between steps. "compiled" runs each block under torch.compile (Inductor); its calls, bytes and
memory are those of an eager step.

All use `torch.optim.AdamW(model.parameters())`, and its default is part of the measurement: on the
CPU torch uses the loop for plain parameters and DTensors, and its fused kernel for `ShardedTensor`s
(sharding/ops/rules/optim/implementation.py). With `--fused` all use `fused=True`, so that only the
difference of the layers remains.
"""

from __future__ import annotations

import argparse
import atexit
import logging
import os
import statistics
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from measure import Times
from rank_times import Cost, TimedCase, merge_ranks, time_interleaved
from report import environment, environment_line, markdown, show, write_json, write_markdown
from train_counts import CountC10d, Memory
from train_implementations import MAKERS, PAIRS, Pair, Setup, Training, alone, loss_of_batch
from train_model import Size

import shardmesh as sm

TOLERANCE = 1e-4  # of losses, relative
# with compared losses; memory is measured in the third, collectives in the fourth, only the last is
# compiled
FIRST_STEPS = 5


@dataclass(frozen=True)
class TrainConfig:
    """What to measure, for how many rounds, and whether with AdamW's fused kernel."""

    ranks: int
    size: Size
    rounds: int
    fused: bool = False


FULL = TrainConfig(4, Size(layers=4, d=256, heads=4, f=688, s=128, b=8), rounds=15)
QUICK = TrainConfig(2, Size(layers=2, d=16, heads=2, f=32, s=8, b=4, vocabulary=32), rounds=2)


@dataclass(frozen=True)
class Usage:
    """Communication and memory of a step of one implementation on a rank.

    Attributes:
        calls: number of collectives.
        received: bytes received by them.
        peak: largest number of bytes held by tensors during a step.
        rest: bytes held between steps.
        losses: losses of the first steps.
    """

    calls: int
    received: int
    peak: int
    rest: int
    losses: tuple[float, ...]


# -- in every process ------------------------------------------------------------------------------


def measure_rank(
    names: Sequence[str], config: TrainConfig
) -> tuple[dict[str, Usage], TimedCase, list[float]]:
    """Return the usage and the times of the implementations, and the losses of one process."""
    # After DTensor, gloo's threads sometimes abort a process at interpreter shutdown.
    atexit.register(os._exit, 0)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.getLogger("torch").setLevel(logging.ERROR)
    setup = Setup(config.size, config.ranks, config.fused)
    expected = losses_alone(setup)
    losses = {name: first_steps(partial(MAKERS[name], setup)) for name in names}
    check_losses({name: use for name, (_, use) in losses.items()}, expected)
    steps = {name: training.step for name, (training, _) in losses.items()}
    costs = time_interleaved(steps, lambda _: None, config.rounds, 1, dist.barrier)
    return (
        {name: use for name, (_, use) in losses.items()},
        TimedCase("train", "a training step", 0, costs),
        expected,
    )


def losses_alone(setup: Setup) -> list[float]:
    """Return the losses of one process, computed on rank 0."""
    losses = torch.zeros(FIRST_STEPS, dtype=torch.float64)
    if setup.line.get_rank() == 0:
        training = alone(setup)
        losses = torch.tensor(
            [training.step().item() for _ in range(FIRST_STEPS)], dtype=torch.float64
        )
    dist.broadcast(losses, 0)
    return losses.tolist()


def first_steps(make: Callable[[], Training]) -> tuple[Training, Usage]:
    """Run the first steps of an implementation; return it with its usage."""
    memory, losses = Memory(), []
    with memory:
        training = make()
        losses += [training.step() for _ in range(FIRST_STEPS - 3)]
        losses.append(memory.measured(training.step))
    dist.barrier()
    with CountC10d() as counted:
        losses.append(training.step())
    # Dynamo compiles nothing under a dispatch mode, as in the steps before.
    losses.append(training.step())
    use = Usage(
        counted.calls, counted.received, memory.peak, memory.rest, tuple(map(loss_of_batch, losses))
    )
    return training, use


def check_losses(uses: dict[str, Usage], expected: Sequence[float]) -> None:
    """Raise RuntimeError if the losses of an implementation differ from those of one process."""
    for name, use in uses.items():
        if any(
            abs(loss / right - 1) > TOLERANCE
            for loss, right in zip(use.losses, expected, strict=True)
        ):
            raise RuntimeError(
                f"{name} has the losses {use.losses}, one process has {tuple(expected)}: they must "
                f"agree to {TOLERANCE}"
            )


# -- figures ---------------------------------------------------------------------------------------

COLUMNS = (
    "implementation",
    "step ms",
    "CPU ms of a rank",
    "peak MB",
    "at rest MB",
    "calls",
    "MB received",
)
PAIR_COLUMNS = ("ours / theirs", "step", "goal", "CPU", "peak memory", "calls", "bytes")


@dataclass(frozen=True)
class StepFigures:
    """The figures of one implementation."""

    name: str
    cost: Cost
    use: Usage

    def row(self) -> list[str]:
        times = (f"{times.median * 1e3:.1f}" for times in (self.cost.wall, self.cost.cpu))
        return [
            self.name,
            *times,
            *map(_mb, (self.use.peak, self.use.rest)),
            str(self.use.calls),
            _mb(self.use.received),
        ]

    def as_dict(self) -> dict[str, Any]:
        """Return the figures for the JSON file."""
        return {"implementation": self.name, **self.cost.as_dict(), **asdict(self.use)}


def _mb(count: int) -> str:
    return f"{count / 1e6:.2f}"


def pair_row(pair: Pair, figures: dict[str, StepFigures]) -> list[str]:
    """Return the ratios of ours to theirs."""
    ours, theirs = figures[pair.ours], figures[pair.theirs]
    times = ((ours.cost.wall, theirs.cost.wall), (ours.cost.cpu, theirs.cost.cpu))
    ratios = [_ratio(one, other) for one, other in times]
    ratios += [
        getattr(ours.use, what) / getattr(theirs.use, what)
        for what in ("peak", "calls", "received")
    ]
    step, *others = (f"{ratio:.2f}" for ratio in ratios)
    return [pair.name, step, "-" if pair.goal is None else f"{pair.goal:.2f}", *others]


def _ratio(ours: Times, theirs: Times) -> float:
    """Return the median of the rounds' ratios: other load during a round affects both."""
    return statistics.median(
        one / other for one, other in zip(ours.rounds, theirs.rounds, strict=True)
    )


def max_over_ranks(uses: Sequence[Usage]) -> Usage:
    """Return the maxima over ranks."""
    most = {
        what: max(getattr(use, what) for use in uses)
        for what in ("calls", "received", "peak", "rest")
    }
    return Usage(**most, losses=uses[0].losses)


# -- command line ----------------------------------------------------------------------------------


def run(pairs: Sequence[Pair], config: TrainConfig) -> dict[str, StepFigures]:
    """Return the figures of the implementations in these pairs."""
    names = [name for name in MAKERS if any(name in (pair.ours, pair.theirs) for pair in pairs)]
    uses, cases, _ = zip(
        *sm.launch(measure_rank, config.ranks, (names, config), env={"OMP_NUM_THREADS": "1"}),
        strict=True,
    )
    costs = merge_ranks(cases).costs
    return {
        name: StepFigures(name, costs[name], max_over_ranks([each[name] for each in uses]))
        for name in names
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the chosen pairs, print the tables and write the files asked for."""
    options = _options(arguments)
    config = replace(QUICK if options.quick else FULL, fused=options.fused)
    pairs = [pair for pair in PAIRS if not options.only or pair.name in options.only]
    figures = run(pairs, config)
    rows, ratios = (
        [one.row() for one in figures.values()],
        [pair_row(pair, figures) for pair in pairs],
    )
    show(
        f"a training step, {config.ranks} gloo processes{', fused AdamW' * config.fused}",
        COLUMNS,
        rows,
    )
    show("ours / theirs", PAIR_COLUMNS, ratios)
    env = environment()
    print(environment_line(env))
    write_json(
        options.json,
        {
            "environment": env,
            "config": asdict(config),
            "implementations": [one.as_dict() for one in figures.values()],
        },
    )
    tables = [markdown(COLUMNS, rows), markdown(PAIR_COLUMNS, ratios)]
    write_markdown(options.markdown, "\n\n".join([*tables, environment_line(env)]))


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only",
        choices=[pair.name for pair in PAIRS],
        action="append",
        help="a pair; may be given several times",
    )
    parser.add_argument("--fused", action="store_true", help="AdamW with fused=True everywhere")
    parser.add_argument("--quick", action="store_true", help="2 processes, a tiny model, 2 rounds")
    parser.add_argument("--json", metavar="PATH", help="write all figures here")
    parser.add_argument("--markdown", metavar="PATH", help="write the tables here")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
