"""Outcomes of faulty programs with torch.distributed, with TORCH_DISTRIBUTED_DEBUG=DETAIL, and with
shardmesh's monitor.

    python benchmarks/faults.py                            all, three ways: about 25 minutes
    python benchmarks/faults.py --only is_killed           one program; may be given several times
    python benchmarks/faults.py --ours                     shardmesh only: a few minutes
    python benchmarks/faults.py --ours --part torch_alone  those of tests/faults/torch_alone.py
    python benchmarks/faults.py --json figures.json --markdown docs/faults.md

The programs are those of tests/faults/: each runs on four gloo processes, forked from one that has
imported everything. With torch they use `torch.distributed.tensor` instead of `shardmesh`, and a
timeout of 5 s for all groups instead of 30 minutes. Results are compared with those of the same
program without the fault.

The latency is the time from when the outlier diverges (it records the time just before) to the
error on each other rank. Ours runs one job at a time, so that no other job competes with its four
processes.
"""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # the programs are tests

from fault_outcomes import (
    ABORT,
    CLOSED,
    HANG,
    NOTHING,
    WRONG,
    MonitoredOutcome,
    TorchOutcome,
    monitored_outcome,
    percentile,
    torch_outcome,
)
from report import environment, environment_line, markdown, show, write_json, write_markdown

from tests.faults.fault import STALL_S, Fault
from tests.faults.programs import FAULTS
from tests.faults.runner import Outcome, Runner

TORCH_LIMIT_S = 20.0
AT_ONCE = 4  # concurrent jobs of torch, which mostly wait for their timeout
PASSES = 3
COLUMNS = ("fault", "torch", "torch, DETAIL", "shardmesh", "ms, median", "ms, slowest")
PARTS = {
    "wrong_calls": "A rank calls a different collective",
    "wrong_order": "A rank calls collectives in another order, or over another axis",
    "training": "Training",
    "endings": "A rank dies, ends or is interrupted",
    "stalls": "A rank does not arrive",
    "meshes": "A rank creates a different mesh",
}
# Of programs that also call torch.distributed only the numbers are listed: by module, and by the
# sections of its source that begin with this text.
TORCH_PARTS = {
    ("torch_calls", "a call more"): "a missing or an extra call",
    ("torch_calls", ".item()"): (
        "`.item()`, `.full_tensor()` on one rank while the others are in `dist.barrier` or another "
        "call"
    ),
    ("torch_calls", "another order"): "a different order",
    ("torch_calls", "something else"): (
        "a different operation, reduction, root, shape, dtype or splits"
    ),
    ("torch_messages", "another group"): "a different group of torch's",
    ("torch_messages", "messages"): "messages: `send`, `recv`, `isend`",
    ("torch_messages", "objects"): "object and functional collectives",
    ("torch_functional", ""): (
        "functional collectives as operators, from DTensor, in compiled graphs"
    ),
    ("torch_alone", ""): (
        "programs that make no mesh: messages, groups that some ranks make or wait for in a "
        "circle, a rank that is killed, a forked child"
    ),
    ("torch_training", "DDP"): "DDP",
    ("torch_training", "FSDP2"): "FSDP2",
    ("torch_endings", ""): "a rank raises, dies, ends or hangs",
}
# Target latency by kind of verdict, in seconds.
TARGETS = {
    "mismatch": 0.1,
    "mesh": 0.1,
    "deadlock": None,
    "left": 0.3,
    "lost": 0.3,
    "raised": 0.3,
    "stall": STALL_S + 1,
}


@dataclass(frozen=True)
class FaultRow:
    """The outcomes of one fault; `alarm` is whether ours raises without the fault too."""

    fault: Fault
    torch: TorchOutcome | None
    detail: TorchOutcome | None
    ours: MonitoredOutcome
    alarm: bool


def measured(runner: Runner, fault: Fault, passes: int, torch: bool) -> FaultRow:
    """Run a fault all three ways."""
    healthy = runner.run(fault, healthy=True)
    outcome = monitored_outcome(
        fault, [runner.run(fault) for _ in range(passes)], [rank.value for rank in healthy.ranks]
    )
    theirs = _of_torch(runner, fault) if torch and fault.in_torch else (None, None)
    return FaultRow(fault, *theirs, outcome, not is_well(healthy))


def _of_torch(runner: Runner, fault: Fault) -> tuple[TorchOutcome, TorchOutcome]:
    runs = [("torch", True), ("torch", False), ("detail", False)]
    with ThreadPoolExecutor(len(runs)) as pool:
        healthy, default, detail = pool.map(
            lambda run: runner.run(fault, run[0], healthy=run[1], limit_s=TORCH_LIMIT_S), runs
        )
    expected = [rank.value for rank in healthy.ranks]
    return torch_outcome(fault, default, expected), torch_outcome(fault, detail, expected)


def is_well(outcome: Outcome) -> bool:
    """Return whether every rank ended normally."""
    return all(rank.done and rank.status == 0 for rank in outcome.ranks)


# -- the tables ------------------------------------------------------------------------------------


def table_row(row: FaultRow) -> list[str]:
    """Return a row as text."""
    times = row.ours.latencies_s
    ms = [f"{t * 1000:.0f}" for t in (percentile(times, 50), max(times))] if times else ["-", "-"]
    torch = [outcome.text if outcome else "-" for outcome in (row.torch, row.detail)]
    return [row.fault.text, *torch, row.ours.text, *ms]


def parts(rows: Sequence[FaultRow]) -> Iterator[tuple[str, list[FaultRow]]]:
    """Yield the rows by module of programs."""
    for module, title in PARTS.items():
        members = [row for row in rows if row.fault.program.__module__.endswith(f".{module}")]
        if members:
            yield title, members


def torch_counts(rows: Sequence[FaultRow]) -> tuple[Sequence[str], list[list[str]]]:
    """Count the programs that also call torch.distributed, those whose outlier is named, and those
    that show the calls of groups of equal size; the rest are missed.
    """
    counts = {part: [0, 0, 0] for part in TORCH_PARTS}
    for row in rows:
        part = _torch_part(row.fault)
        if part is not None:
            shown = not row.ours.wrong and not row.ours.named
            for i, holds in enumerate((True, row.ours.named, shown)):
                counts[part][i] += holds
    lines = [
        [TORCH_PARTS[part], *map(str, numbers)] for part, numbers in counts.items() if numbers[0]
    ]
    total = [str(sum(column)) for column in zip(*counts.values(), strict=True)]
    return ("", "programs", "named", "shown"), [*lines, ["all programs of this section", *total]]


def _torch_part(fault: Fault) -> tuple[str, str] | None:
    """Return the key in `TORCH_PARTS` of a program, by the last comment with a title before it."""
    module = fault.program.__module__.rpartition(".")[2]
    source = Path(inspect.getsourcefile(fault.program) or "").read_text().splitlines()
    first = inspect.getsourcelines(fault.program)[1]
    titles = [line[5:] for line in source[:first] if line.startswith("# -- ")]
    for part in TORCH_PARTS:
        if part[0] == module and (not part[1] or (titles and titles[-1].startswith(part[1]))):
            return part
    return None


def summary(rows: Sequence[FaultRow]) -> tuple[Sequence[str], list[list[str]]]:
    """Count the outcomes over faults; for torch, over those that run there."""
    by_library: dict[str, list[TorchOutcome] | list[MonitoredOutcome]] = {
        "torch": [row.torch for row in rows if row.torch],
        "torch, DETAIL": [row.detail for row in rows if row.detail],
        "shardmesh": [row.ours for row in rows],
    }
    lines = [["faults", *(str(len(column)) for column in by_library.values())]]
    for kind in (NOTHING, WRONG, HANG, CLOSED, ABORT):
        lines.append(
            [
                kind,
                *(str(sum(kind in one.kinds for one in column)) for column in by_library.values()),
            ]
        )
    lines.append(
        [
            "the outlier is named",
            *(str(sum(one.named for one in column)) for column in by_library.values()),
        ]
    )
    lines.append(
        [
            "its line is named",
            *(str(sum(one.line for one in column)) for column in by_library.values()),
        ]
    )
    return ("", *by_library), lines


def latencies(rows: Sequence[FaultRow]) -> tuple[Sequence[str], list[list[str]]]:
    """Return the table of latencies by kind of verdict."""
    by_kind: dict[str, list[float]] = {}
    for row in rows:
        by_kind.setdefault(row.fault.kinds[0], []).extend(row.ours.latencies_s)
    lines = []
    for kind, times in by_kind.items():
        target = TARGETS[kind]
        ms = [f"{percentile(times, p) * 1000:.0f}" for p in (50, 99, 100)] if times else ["-"] * 3
        lines.append(
            [kind, str(len(times)), *ms, "-" if target is None else f"{target * 1000:.0f}"]
        )
    return ("kind", "errors", "p50 ms", "p99 ms", "slowest ms", "target, p99"), lines


HEAD = """# Outcomes of faulty programs

This page lists programs of four processes in which one or two ranks diverge from the others, and
what happens then. Each program runs in three ways: with torch.distributed in its default settings
(DTensor and collectives over gloo, the timeout reduced from 30 minutes to 5 s); the same with
`TORCH_DISTRIBUTED_DEBUG=DETAIL`; and with shardmesh in its default settings. The programs are the
tests of [tests/faults](../tests/faults).

In the columns of torch, all outcomes on any rank are listed:

* *Nothing*: all ranks finish with the same results as without the fault.
* *Wrong result*: a rank finishes without an error, with a different result.
* *Hang*: the job waits until torch's timeout.
* *Connection closed*: an error about the socket to a rank that has ended, usually on ranks that did
  nothing wrong.
* *Abort*: gloo ends the process with a signal.
* *Names the rank*: a message lists the outlier as missing, or shows its call and that of another
  rank without saying which is wrong.

The column of shardmesh shows the error that every surviving rank raises, the rank that it names,
and the difference. Its text also has the operation and the line in the program, for the outlier and
for the other ranks. *Equal votes*: ranks disagree in two groups of equal size; both are shown and
no rank is named.

Milliseconds are measured from the moment when the outlier diverges to the error, over all other
ranks and all runs. The timeout for stalls was {stall:.0f} s (the default is 5 minutes).
"""


def document(rows: Sequence[FaultRow], alarms: Sequence[str], tried: int, command: str) -> str:
    """Return the text of docs/faults.md."""
    text = [HEAD.format(stall=STALL_S)]
    for title, members in parts(rows):
        text += [f"## {title}\n", markdown(COLUMNS, [table_row(row) for row in members]), ""]
    text += ["## Programs that also call torch.distributed\n", markdown(*torch_counts(rows)), ""]
    rows = [row for row in rows if _torch_part(row.fault) is None]
    text += ["## In numbers\n", markdown(*summary(rows)), ""]
    text += ["Time from the fault to the error:\n", markdown(*latencies(rows)), ""]
    healthy = "those of `tests/faults/healthy.py`, and the ones above without their fault"
    line = (
        f"False alarms: {len(alarms)} in {tried} healthy programs ({healthy}). {', '.join(alarms)}"
    )
    text += [line.rstrip() + "\n", f"`{command}`, {environment_line(environment())}."]
    return "\n".join(text)


def main() -> None:
    options = arguments()
    chosen = [
        fault
        for fault in FAULTS.values()
        if fault.name in options.only
        or fault.program.__module__.rpartition(".")[2] in options.part
        or not (options.only or options.part)
    ]
    rows, alarms = [], []
    with Runner() as runner:
        for fault in chosen:
            if fault.kinds:
                rows.append(measured(runner, fault, options.passes, not options.ours))
                print_row(rows[-1])
            if rows[-1].alarm if fault.kinds else not is_well(runner.run(fault)):
                alarms.append(fault.name)
    for title, members in parts(rows):
        show(title, COLUMNS, [table_row(row) for row in members])
    show("Programs that also call torch.distributed", *torch_counts(rows))
    alone = [row for row in rows if _torch_part(row.fault) is None]
    show("In numbers, without these", *summary(alone))
    show("Time from the fault to the error", *latencies(rows))
    print(f"false alarms: {len(alarms)} in {len(chosen)} {', '.join(alarms)}")
    outcomes = {
        "environment": environment(),
        "rows": [figures(row) for row in rows],
        "false_alarms": alarms,
    }
    write_json(options.json, outcomes)
    write_markdown(
        options.markdown, document(rows, alarms, len(chosen), "python benchmarks/faults.py")
    )


def print_row(row: FaultRow) -> None:
    """Print a row, and deviations from the expected outcome."""
    print(" | ".join(table_row(row)), flush=True)
    for problem in row.ours.wrong:
        print("    " + problem[:500].replace("\n", "\n    "), flush=True)


def figures(row: FaultRow) -> Mapping[str, Any]:
    """Return the figures of a row for the JSON file."""
    times = [round(t, 4) for t in row.ours.latencies_s]
    theirs = {"torch": row.torch, "detail": row.detail}
    torch = {
        name: outcome and {"kinds": outcome.kinds, "named": outcome.named}
        for name, outcome in theirs.items()
    }
    return {
        "fault": row.fault.name,
        **torch,
        "ours": row.ours.text,
        "latencies_s": times,
        "wrong": row.ours.wrong,
    }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        choices=list(FAULTS),
        metavar="NAME",
        help="one program",
    )
    parser.add_argument(
        "--part", action="append", default=[], metavar="MODULE", help="those of a file"
    )
    parser.add_argument("--ours", action="store_true", help="shardmesh only")
    parser.add_argument(
        "--passes", type=int, default=PASSES, help="number of runs of each program with shardmesh"
    )
    parser.add_argument("--json", help="write all figures here")
    parser.add_argument("--markdown", help="write the document here")
    return parser.parse_args()


if __name__ == "__main__":
    main()
