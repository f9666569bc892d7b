"""A training step by layers: ours beside torch's FSDP2, DDP, ZeroRedundancyOptimizer and DTensor's tensor and sequence parallelism.

    python benchmarks/train.py                       4 gloo processes, a few minutes
    python benchmarks/train.py --only FSDP           one pair; may be given several times
    python benchmarks/train.py --fused               all step with AdamW's fused kernel
    python benchmarks/train.py --quick               2 processes, a tiny model, 2 rounds
    python benchmarks/train.py --json figures.json --markdown tables.md

The model is one language model in plain PyTorch with AdamW (train_model.py), the batch 2 sequences per rank. All contestants train it in
the same processes and take turns step by step in random order (see measure.py); a round's time is that of its slowest rank. Before
that each makes the same first steps, and its losses must be those of one process to 1e-4, or the benchmark fails.

Times are medians, ratios of times medians of the rounds' ratios. "CPU" is what all threads of a process computed, the mean of the ranks:
it is no longer for what others did on the machine meanwhile. Calls, bytes received and memory are the most of any rank; how they are
counted, see train_counts.py. "at rest" is what is held between steps. "compiled" is with each block under torch.compile (Inductor); calls,
bytes and memory are those of a step that is not compiled.

All make `torch.optim.AdamW(model.parameters())`. What that does by default is part of what is measured: on the CPU torch takes the loop for
plain parameters and DTensors, and its fused kernel for `ShardedTensor`s (sharding/ops/rules/optim/implementation.py). With `--fused` all
are made with `fused=True`, so that what is left is the difference of the layers.
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
from report import environment, environment_line, markdown, show, write_json, write_markdown
from train_contestants import MAKERS, PAIRS, Pair, Setup, Training, alone, loss_of_batch
from train_counts import CountedCollectives, Memory
from train_model import Size
from watch import Case, Cost, of_all_ranks, take_turns

import shardmesh as sm

TOLERANCE = 1e-4  # of losses, relative
FIRST_STEPS = 5  # whose losses are compared: the third is measured for memory, the fourth counted, and only the last compiled


@dataclass(frozen=True)
class Effort:
    """How long to measure, and on what; whether with AdamW's fused kernel."""

    ranks: int
    size: Size
    rounds: int
    fused: bool = False


FULL = Effort(4, Size(layers=4, d=256, heads=4, f=688, s=128, b=8), rounds=15)
QUICK = Effort(2, Size(layers=2, d=16, heads=2, f=32, s=8, b=4, vocabulary=32), rounds=2)


@dataclass(frozen=True)
class Use:
    """What a step of one contestant moves and holds on a rank.

    Attributes:
        calls: collectives.
        received: bytes that they bring.
        peak: the most bytes of tensors at any time of a step.
        rest: those between steps.
        losses: of the first steps.
    """

    calls: int
    received: int
    peak: int
    rest: int
    losses: tuple[float, ...]


# -- in every process --------------------------------------------------------------------------------------------------


def measure_rank(names: Sequence[str], effort: Effort) -> tuple[dict[str, Use], Case, list[float]]:
    """Uses and times of the contestants, and the losses of one process."""
    atexit.register(os._exit, 0)  # after DTensor, gloo's threads now and then abort a process that takes its interpreter down
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.getLogger("torch").setLevel(logging.ERROR)
    setup = Setup(effort.size, effort.ranks, effort.fused)
    expected = losses_alone(setup)
    found = {name: first_steps(partial(MAKERS[name], setup)) for name in names}
    check_losses({name: use for name, (_, use) in found.items()}, expected)
    steps = {name: training.step for name, (training, _) in found.items()}
    costs = take_turns(steps, lambda _: None, effort.rounds, 1, dist.barrier)
    return {name: use for name, (_, use) in found.items()}, Case("train", "a training step", 0, costs), expected


def losses_alone(setup: Setup) -> list[float]:
    """Of one process, that of rank 0."""
    found = torch.zeros(FIRST_STEPS, dtype=torch.float64)
    if setup.line.get_rank() == 0:
        training = alone(setup)
        found = torch.tensor([training.step().item() for _ in range(FIRST_STEPS)], dtype=torch.float64)
    dist.broadcast(found, 0)
    return found.tolist()


def first_steps(make: Callable[[], Training]) -> tuple[Training, Use]:
    """A contestant that has made its first steps."""
    memory, losses = Memory(), []
    with memory:
        training = make()
        losses += [training.step() for _ in range(FIRST_STEPS - 3)]
        losses.append(memory.measured(training.step))
    dist.barrier()
    with CountedCollectives() as counted:
        losses.append(training.step())
    losses.append(training.step())  # under a dispatch mode, as those before, Dynamo compiles nothing
    use = Use(counted.calls, counted.received, memory.peak, memory.rest, tuple(map(loss_of_batch, losses)))
    return training, use


def check_losses(uses: dict[str, Use], expected: Sequence[float]) -> None:
    """Raises: RuntimeError for a contestant whose losses are not those of one process."""
    for name, use in uses.items():
        if any(abs(loss / right - 1) > TOLERANCE for loss, right in zip(use.losses, expected, strict=True)):
            raise RuntimeError(f"{name} has the losses {use.losses}, one process has {tuple(expected)}: they must agree to {TOLERANCE}")


# -- figures -----------------------------------------------------------------------------------------------------------

COLUMNS = ("contestant", "step ms", "CPU ms of a rank", "peak MB", "at rest MB", "calls", "MB received")
PAIR_COLUMNS = ("ours / theirs", "step", "goal", "CPU", "peak memory", "calls", "bytes")


@dataclass(frozen=True)
class Found:
    """What was found of one contestant."""

    name: str
    cost: Cost
    use: Use

    def row(self) -> list[str]:
        times = (f"{times.median * 1e3:.1f}" for times in (self.cost.wall, self.cost.cpu))
        return [self.name, *times, *map(_mb, (self.use.peak, self.use.rest)), str(self.use.calls), _mb(self.use.received)]

    def as_dict(self) -> dict[str, Any]:
        """For the JSON file."""
        return {"contestant": self.name, **self.cost.as_dict(), **asdict(self.use)}


def _mb(count: int) -> str:
    return f"{count / 1e6:.2f}"


def pair_row(pair: Pair, found: dict[str, Found]) -> list[str]:
    """Ours by theirs."""
    ours, theirs = found[pair.ours], found[pair.theirs]
    times = ((ours.cost.wall, theirs.cost.wall), (ours.cost.cpu, theirs.cost.cpu))
    ratios = [_ratio(one, other) for one, other in times]
    ratios += [getattr(ours.use, what) / getattr(theirs.use, what) for what in ("peak", "calls", "received")]
    step, *others = (f"{ratio:.2f}" for ratio in ratios)
    return [pair.name, step, "-" if pair.goal is None else f"{pair.goal:.2f}", *others]


def _ratio(ours: Times, theirs: Times) -> float:
    """The middle one of the rounds' ratios: what the machine did in a round, it did to both."""
    return statistics.median(one / other for one, other in zip(ours.rounds, theirs.rounds, strict=True))


def of_ranks(uses: Sequence[Use]) -> Use:
    """The most of any rank."""
    most = {what: max(getattr(use, what) for use in uses) for what in ("calls", "received", "peak", "rest")}
    return Use(**most, losses=uses[0].losses)


# -- the whole ---------------------------------------------------------------------------------------------------------


def run(pairs: Sequence[Pair], effort: Effort) -> dict[str, Found]:
    """The contestants of these pairs."""
    names = [name for name in MAKERS if any(name in (pair.ours, pair.theirs) for pair in pairs)]
    uses, cases, _ = zip(*sm.launch(measure_rank, effort.ranks, (names, effort), env={"OMP_NUM_THREADS": "1"}), strict=True)
    costs = of_all_ranks(cases).costs
    return {name: Found(name, costs[name], of_ranks([each[name] for each in uses])) for name in names}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the chosen pairs, print the tables and write the files asked for."""
    options = _options(arguments)
    effort = replace(QUICK if options.quick else FULL, fused=options.fused)
    pairs = [pair for pair in PAIRS if not options.only or pair.name in options.only]
    found = run(pairs, effort)
    rows, ratios = [one.row() for one in found.values()], [pair_row(pair, found) for pair in pairs]
    show(f"a training step, {effort.ranks} gloo processes{', fused AdamW' * effort.fused}", COLUMNS, rows)
    show("ours / theirs", PAIR_COLUMNS, ratios)
    env = environment()
    print(environment_line(env))
    write_json(options.json, {"environment": env, "effort": asdict(effort), "contestants": [one.as_dict() for one in found.values()]})
    tables = [markdown(COLUMNS, rows), markdown(PAIR_COLUMNS, ratios)]
    write_markdown(options.markdown, "\n\n".join([*tables, environment_line(env)]))


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=[pair.name for pair in PAIRS], action="append", help="a pair; may be given several times")
    parser.add_argument("--fused", action="store_true", help="all step with fused=True")
    parser.add_argument("--quick", action="store_true", help="2 processes, a tiny model, 2 rounds")
    parser.add_argument("--json", metavar="PATH", help="write all figures here")
    parser.add_argument("--markdown", metavar="PATH", help="write the tables here")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
