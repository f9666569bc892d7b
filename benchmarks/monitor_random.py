"""Random programs under the monitor: thousands with one outlier, and a million collectives of
correct ones.

    python benchmarks/monitor_random.py                          everything, about an hour
    python benchmarks/monitor_random.py --simulated 100 --processes 0 --calls 0
    python benchmarks/monitor_random.py --raw                    that call torch.distributed as well
    python benchmarks/monitor_random.py --json figures.json --markdown tables.md

The programs are those of tests/faults/random_programs.py. In each faulty one, one rank diverges
once: it skips, repeats or swaps lines, passes a wrong argument, raises, exits, dies, freezes, or is
late (which is no error). The outcomes are:

    named       all other ranks raise an error that names the outlier and no other rank
    tie         an error that names no rank, since two ranks differ and there is no majority
    nothing     no error and correct results: the divergence had no effect
    local       different results on the outlier, but all collectives moved the same data: it was
                not observable
    unseen      different data only in collectives that the program calls on plain tensors, which
                have no lineage
    wrong       anything else: silently different results, a correct rank named, no rank named
                despite a majority, a hang

Correct programs test for false alarms: their ranks create additional tensors, on different lines
and in threads.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from report import environment, environment_line, markdown, show, write_json, write_markdown

sys.path.insert(0, str(Path(__file__).parents[1]))  # the programs are tests

from tests.faults.random_jobs import run_faulty, run_healthy
from tests.faults.random_outcome import RIGHT, outcome, run_simulated
from tests.faults.random_programs import (
    KINDS,
    MORE_MESHES,
    PROCESS_KINDS,
    faulty_program,
    healthy_program,
)
from tests.faults.random_table import ITERATIONS, PROGRAMS_PER_JOB
from tests.faults.runner import Runner

COLUMNS = ("divergence", "programs", *RIGHT, "wrong")


@dataclass
class OutcomeCounts:
    """Outcomes of programs, by kind of divergence.

    Attributes:
        counts: number of programs by kind and outcome.
        wrong: a line for each wrong outcome.
    """

    counts: dict[str, Counter[str]]
    wrong: list[str] = field(default_factory=list)

    def add(self, kind: str, what: str, report: str) -> None:
        self.counts[kind][what] += 1
        if what not in RIGHT:
            self.wrong.append(f"{report.splitlines()[0] if report else ''} [{what}]")
            print(f"WRONG: {what}: {report}", flush=True)

    def rows(self) -> list[list[str]]:
        total = sum(self.counts.values(), Counter())
        return [
            _row(kind, counts)
            for kind, counts in (*self.counts.items(), ("all", total))
            if counts.total()
        ]


def _row(kind: str, counts: Counter[str]) -> list[str]:
    wrong = sum(count for what, count in counts.items() if what not in RIGHT)
    return [kind, str(counts.total()), *(str(counts[what]) for what in RIGHT), str(wrong)]


def faulty_simulated(count: int, first: int, raw: bool) -> OutcomeCounts:
    counts = OutcomeCounts({kind: Counter() for kind in KINDS})
    for seed in range(first, first + count):
        program = faulty_program(seed, MORE_MESHES, raw=raw)
        what, error = outcome(program)
        assert program.divergence
        counts.add(program.divergence.kind, what, f"seed {seed}: {program.divergence}: {error}")
        _print_progress(seed - first, count, "simulated")
    return counts


def faulty_processes(count: int, first: int, at_once: int, raw: bool) -> OutcomeCounts:
    counts = OutcomeCounts({kind: Counter() for kind in PROCESS_KINDS})
    names = [
        f"{'raw ' * raw}{PROCESS_KINDS[n % len(PROCESS_KINDS)]} {first + n}" for n in range(count)
    ]
    with Runner("tests.faults.random_table") as runner, ThreadPoolExecutor(at_once) as pool:
        outcomes = pool.map(lambda name: run_faulty(runner, name), names)
        for n, (name, (what, report)) in enumerate(zip(names, outcomes, strict=True)):
            counts.add(name.rpartition(" ")[0].removeprefix("raw "), what, f"{name}: {report}")
            _print_progress(n, count, "on processes")
    return counts


@dataclass
class HealthyCounts:
    """Correct programs: collectives, counted once per calling rank, and false alarms."""

    programs: int = 0
    calls: int = 0
    alarms: list[str] = field(default_factory=list)


def count_healthy(
    run: Callable[[int], int], calls: int, seeds: Iterator[int], per_run: int = 1
) -> HealthyCounts:
    counts = HealthyCounts()
    while counts.calls < calls:
        seed = next(seeds)
        counts.programs += per_run
        try:
            counts.calls += run(seed)
        except Exception as error:
            counts.alarms.append(f"seed {seed}: {error}")
            print(f"FALSE ALARM: seed {seed}: {error}", flush=True)
        _print_progress(counts.calls, calls, "correct calls")
    return counts


_last_printed: dict[str, float] = {}


def _print_progress(done: int, count: int, what: str) -> None:
    """Print the progress every half minute."""
    now = time.monotonic()
    if now - _last_printed.setdefault(what, now) > 30:
        _last_printed[what] = now
        print(f"  {done} of {count} {what}", file=sys.stderr, flush=True)


def healthy_simulated(calls: int, first: int, raw: bool) -> HealthyCounts:
    seeds = iter(range(first, sys.maxsize))
    return count_healthy(
        lambda seed: run_simulated(
            healthy_program(seed, MORE_MESHES, iterations=ITERATIONS, raw=raw)
        )[1],
        calls,
        seeds,
    )


def healthy_processes(calls: int, first: int, raw: bool) -> HealthyCounts:
    """Run jobs of four processes, each with many programs in a row."""
    with Runner("tests.faults.random_table") as runner:
        return count_healthy(
            lambda seed: run_healthy(runner, seed, raw),
            calls,
            iter(range(first, sys.maxsize)),
            PROGRAMS_PER_JOB,
        )


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parsed(arguments)
    tables: list[tuple[str, Sequence[str], list[list[str]]]] = []
    wrong: list[str] = []
    if options.simulated:
        counts = faulty_simulated(options.simulated, options.seed, options.raw)
        tables.append(("Simulated worlds of 3, 4 and 8 ranks, one outlier", COLUMNS, counts.rows()))
        wrong += counts.wrong
    if options.processes:
        counts = faulty_processes(options.processes, options.seed, options.at_once, options.raw)
        tables.append(("Four gloo processes, one outlier", COLUMNS, counts.rows()))
        wrong += counts.wrong
    worlds: dict[str, HealthyCounts] = {}
    if options.calls:
        worlds["simulated"] = healthy_simulated(options.calls, options.seed, options.raw)
    if options.process_calls:
        worlds["four gloo processes"] = healthy_processes(
            options.process_calls, options.seed, options.raw
        )
    if worlds:
        rows = [
            [name, str(h.programs), f"{h.calls:,}", str(len(h.alarms))]
            for name, h in worlds.items()
        ]
        tables.append(
            ("Correct programs", ("world", "programs", "collectives called", "false alarms"), rows)
        )
        wrong += [alarm for found in worlds.values() for alarm in found.alarms]
    _write(options, tables, wrong)


def _write(
    options: argparse.Namespace,
    tables: Sequence[tuple[str, Sequence[str], list[list[str]]]],
    wrong: list[str],
) -> None:
    env = environment()
    for title, columns, rows in tables:
        show(title, columns, rows)
    print(environment_line(env))
    figures = {
        title: [dict(zip(columns, row, strict=True)) for row in rows]
        for title, columns, rows in tables
    }
    write_json(options.json, {"environment": env, **figures})
    text = [f"## {title}\n\n{markdown(columns, rows)}" for title, columns, rows in tables]
    write_markdown(
        options.markdown,
        "\n\n".join([*text, *(f"- {line}" for line in wrong), environment_line(env)]),
    )


def _parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--simulated", type=int, default=1000, help="number of faulty programs in simulated worlds"
    )
    parser.add_argument(
        "--processes", type=int, default=200, help="number of faulty programs on processes"
    )
    parser.add_argument(
        "--calls",
        type=int,
        default=1_000_000,
        help="number of collectives of correct programs in simulated worlds",
    )
    parser.add_argument("--process-calls", type=int, default=200_000, help="the same on processes")
    parser.add_argument(
        "--at-once",
        type=int,
        default=4,
        help="number of concurrent jobs; most of them wait most of the time",
    )
    parser.add_argument(
        "--raw", action="store_true", help="the programs also call torch.distributed directly"
    )
    parser.add_argument(
        "--seed", type=int, default=100_000, help="first seed; tests use seeds from 0"
    )
    parser.add_argument("--json", help="write the figures here")
    parser.add_argument("--markdown", help="write the tables here")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
