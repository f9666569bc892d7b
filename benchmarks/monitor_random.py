"""Random programs under the watch: thousands with one odd rank, and a million collectives of correct ones.

    python benchmarks/watch_random.py                               all of it, about an hour
    python benchmarks/watch_random.py --simulated 100 --processes 0 --calls 0
    python benchmarks/watch_random.py --raw                         programs that also call torch.distributed themselves
    python benchmarks/watch_random.py --json figures.json --markdown tables.md

The programs are those of tests/faults/random_programs.py. In one rank of each faulty one something goes wrong once: it skips,
repeats or swaps lines, passes a wrong argument, raises, ends, dies, freezes, or is late (which is no error). What became of it:

    named       an error on all other ranks, which blames the odd rank and nobody else
    tie         an error that blames nobody, where two ranks differ and nobody can tell who is right
    nothing     no error and the right results: what the rank did differently changed nothing
    local       other results on the odd rank, which no collective moved: there was nothing to see
    unseen      other data in collectives that the program itself calls on plain tensors, of which nobody knows how they were made
    wrong       anything else: other results in silence, an innocent rank blamed, nobody blamed by a majority, a rank that hangs

Correct programs are run for the false alarms: ranks make tensors of their own in them, on lines of their own and from threads.
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

from tests.faults.random_jobs import healthy_job, job
from tests.faults.random_outcome import RIGHT, outcome, simulated
from tests.faults.random_programs import KINDS, MORE_MESHES, PROCESS_KINDS, faulty_program, healthy_program
from tests.faults.random_table import AT_A_TIME
from tests.faults.runner import Runner

COLUMNS = ("what the odd rank does", "programs", *RIGHT, "wrong")
TURNS = (4, 24)  # of loops in correct programs


@dataclass
class Tally:
    """What became of programs, by kind of divergence.

    Attributes:
        wrong: a line for each that should not be.
    """

    counts: dict[str, Counter[str]]
    wrong: list[str] = field(default_factory=list)

    def add(self, kind: str, what: str, said: str) -> None:
        self.counts[kind][what] += 1
        if what not in RIGHT:
            self.wrong.append(f"{said.splitlines()[0] if said else ''} [{what}]")
            print(f"WRONG: {what}: {said}", flush=True)

    def rows(self) -> list[list[str]]:
        total = sum(self.counts.values(), Counter())
        return [_row(kind, counts) for kind, counts in (*self.counts.items(), ("all", total)) if counts.total()]


def _row(kind: str, counts: Counter[str]) -> list[str]:
    wrong = sum(count for what, count in counts.items() if what not in RIGHT)
    return [kind, str(counts.total()), *(str(counts[what]) for what in RIGHT), str(wrong)]


def faulty_simulated(count: int, first: int, raw: bool) -> Tally:
    tally = Tally({kind: Counter() for kind in KINDS})
    for seed in range(first, first + count):
        program = faulty_program(seed, MORE_MESHES, raw=raw)
        what, error = outcome(program)
        assert program.divergence
        tally.add(program.divergence.kind, what, f"seed {seed}: {program.divergence}: {error}")
        _tell(seed - first, count, "simulated")
    return tally


def faulty_processes(count: int, first: int, at_once: int, raw: bool) -> Tally:
    tally = Tally({kind: Counter() for kind in PROCESS_KINDS})
    names = [f"{'raw ' * raw}{PROCESS_KINDS[n % len(PROCESS_KINDS)]} {first + n}" for n in range(count)]
    with Runner("tests.faults.random_table") as runner, ThreadPoolExecutor(at_once) as pool:
        found = pool.map(lambda name: job(runner, name), names)
        for n, (name, (what, said)) in enumerate(zip(names, found, strict=True)):
            tally.add(name.rpartition(" ")[0].removeprefix("raw "), what, f"{name}: {said}")
            _tell(n, count, "on processes")
    return tally


@dataclass
class Healthy:
    """Correct programs: collectives, counted once for each rank that calls them, and the alarms that were false."""

    programs: int = 0
    calls: int = 0
    alarms: list[str] = field(default_factory=list)


def healthy(run: Callable[[int], int], calls: int, seeds: Iterator[int], at_a_time: int = 1) -> Healthy:
    found = Healthy()
    while found.calls < calls:
        seed = next(seeds)
        found.programs += at_a_time
        try:
            found.calls += run(seed)
        except Exception as error:
            found.alarms.append(f"seed {seed}: {error}")
            print(f"FALSE ALARM: seed {seed}: {error}", flush=True)
        _tell(found.calls, calls, "correct calls")
    return found


_told: dict[str, float] = {}


def _tell(done: int, count: int, what: str) -> None:
    """How far it is, every half minute."""
    now = time.monotonic()
    if now - _told.setdefault(what, now) > 30:
        _told[what] = now
        print(f"  {done} of {count} {what}", file=sys.stderr, flush=True)


def healthy_simulated(calls: int, first: int, raw: bool) -> Healthy:
    seeds = iter(range(first, sys.maxsize))
    return healthy(lambda seed: simulated(healthy_program(seed, MORE_MESHES, turns=TURNS, raw=raw))[1], calls, seeds)


def healthy_processes(calls: int, first: int, raw: bool) -> Healthy:
    """Many programs in each job of four processes, one after the other."""
    with Runner("tests.faults.random_table") as runner:
        return healthy(lambda seed: healthy_job(runner, seed, raw), calls, iter(range(first, sys.maxsize)), AT_A_TIME)


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parsed(arguments)
    tables: list[tuple[str, Sequence[str], list[list[str]]]] = []
    wrong: list[str] = []
    if options.simulated:
        tally = faulty_simulated(options.simulated, options.seed, options.raw)
        tables.append(("Simulated worlds of 3, 4 and 8 ranks, one of them odd", COLUMNS, tally.rows()))
        wrong += tally.wrong
    if options.processes:
        tally = faulty_processes(options.processes, options.seed, options.at_once, options.raw)
        tables.append(("Four gloo processes, one of them odd", COLUMNS, tally.rows()))
        wrong += tally.wrong
    worlds: dict[str, Healthy] = {}
    if options.calls:
        worlds["simulated"] = healthy_simulated(options.calls, options.seed, options.raw)
    if options.process_calls:
        worlds["four gloo processes"] = healthy_processes(options.process_calls, options.seed, options.raw)
    if worlds:
        rows = [[name, str(h.programs), f"{h.calls:,}", str(len(h.alarms))] for name, h in worlds.items()]
        tables.append(("Correct programs", ("world", "programs", "collectives called", "false alarms"), rows))
        wrong += [alarm for found in worlds.values() for alarm in found.alarms]
    _write(options, tables, wrong)


def _write(options: argparse.Namespace, tables: Sequence[tuple[str, Sequence[str], list[list[str]]]], wrong: list[str]) -> None:
    env = environment()
    for title, columns, rows in tables:
        show(title, columns, rows)
    print(environment_line(env))
    found = {title: [dict(zip(columns, row, strict=True)) for row in rows] for title, columns, rows in tables}
    write_json(options.json, {"environment": env, **found})
    text = [f"## {title}\n\n{markdown(columns, rows)}" for title, columns, rows in tables]
    write_markdown(options.markdown, "\n\n".join([*text, *(f"- {line}" for line in wrong), environment_line(env)]))


def _parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--simulated", type=int, default=1000, help="faulty programs in simulated worlds")
    parser.add_argument("--processes", type=int, default=200, help="faulty programs on processes")
    parser.add_argument("--calls", type=int, default=1_000_000, help="collectives of correct programs in simulated worlds")
    parser.add_argument("--process-calls", type=int, default=200_000, help="the same on processes")
    parser.add_argument("--at-once", type=int, default=4, help="jobs at a time; most wait most of the time")
    parser.add_argument("--raw", action="store_true", help="the programs also call torch.distributed themselves")
    parser.add_argument("--seed", type=int, default=100_000, help="the first; tests have those from 0 on")
    parser.add_argument("--json", help="write the figures here")
    parser.add_argument("--markdown", help="write the tables here")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
