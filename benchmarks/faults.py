"""What becomes of faulty programs: torch.distributed as it is, with TORCH_DISTRIBUTED_DEBUG=DETAIL, and under the watch.

    python benchmarks/faults.py                            all programs, every way: about 25 minutes
    python benchmarks/faults.py --only is_killed           one program; may be given several times
    python benchmarks/faults.py --ours                     without torch's runs: a few minutes
    python benchmarks/faults.py --json figures.json --markdown docs/faults.md

The programs are those of tests/faults/: each runs on four gloo processes, forked from one that has imported everything. For
torch they run with `torch.distributed.tensor` in the place of `shardmesh`, and with a timeout of 5 s for all groups in the place
of 30 minutes. What they return is compared with what they return without the fault, each way.

The latency is the time from the moment when the odd rank turns off the path (it notes the time just before) to the error on
each other rank. Ours runs one job at a time, so that four processes have the machine for themselves.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # the programs are tests

from fault_words import ABORT, CLOSED, HANG, NOTHING, WRONG, Ours, Seen, ours, percentile, seen
from report import environment, environment_line, markdown, show, write_json, write_markdown

from tests.faults.fault import STALL_S, Fault
from tests.faults.programs import FAULTS
from tests.faults.runner import Outcome, Runner

TORCH_LIMIT_S = 20.0
AT_ONCE = 4  # of torch's jobs, which mostly wait for their timeout
PASSES = 3
COLUMNS = ("fault", "torch", "torch, DETAIL", "shardmesh", "ms, median", "ms, slowest")
PARTS = {
    "wrong_calls": "A rank calls a different collective",
    "wrong_order": "A rank calls collectives in another order, or over another axis",
    "training": "Training",
    "endings": "A rank dies, ends or is interrupted",
    "stalls": "A rank does not arrive",
    "meshes": "A rank creates a different mesh",
    "torch_calls": "A rank calls torch.distributed differently",
    "torch_messages": "Torch's groups, messages, object and functional collectives",
    "torch_training": "DDP and FSDP2",
    "torch_endings": "A rank raises, dies, ends or hangs while others are in torch.distributed calls",
}
# Kinds of verdict -> how long after the fault all ranks are to know, in seconds.
TARGETS = {"mismatch": 0.1, "mesh": 0.1, "deadlock": None, "left": 0.3, "lost": 0.3, "raised": 0.3, "stall": STALL_S + 1}


@dataclass(frozen=True)
class Row:
    """One fault and what becomes of it; `alarm` is whether ours complains without the fault, too."""

    fault: Fault
    torch: Seen | None
    detail: Seen | None
    ours: Ours
    alarm: bool


def measured(runner: Runner, fault: Fault, passes: int, torch: bool) -> Row:
    """Runs a fault every way."""
    healthy = runner.run(fault, healthy=True)
    found = ours(fault, [runner.run(fault) for _ in range(passes)], [rank.value for rank in healthy.ranks])
    theirs = _of_torch(runner, fault) if torch and fault.twin else (None, None)
    return Row(fault, *theirs, found, not is_well(healthy))


def _of_torch(runner: Runner, fault: Fault) -> tuple[Seen, Seen]:
    ways = [("torch", True), ("torch", False), ("detail", False)]
    with ThreadPoolExecutor(len(ways)) as pool:
        healthy, default, detail = pool.map(
            lambda way: runner.run(fault, way[0], healthy=way[1], limit_s=TORCH_LIMIT_S), ways
        )
    expected = [rank.value for rank in healthy.ranks]
    return seen(fault, default, expected), seen(fault, detail, expected)


def is_well(outcome: Outcome) -> bool:
    """Whether every rank came to its end."""
    return all(rank.done and rank.status == 0 for rank in outcome.ranks)


# -- the tables --------------------------------------------------------------------------------------------------------


def table_row(row: Row) -> list[str]:
    """As text."""
    times = row.ours.latencies_s
    ms = [f"{t * 1000:.0f}" for t in (percentile(times, 50), max(times))] if times else ["-", "-"]
    torch = [found.text if found else "-" for found in (row.torch, row.detail)]
    return [row.fault.text, *torch, row.ours.text, *ms]


def parts(rows: Sequence[Row]) -> Iterator[tuple[str, list[Row]]]:
    """The rows by module of programs."""
    for module, title in PARTS.items():
        members = [row for row in rows if row.fault.program.__module__.endswith(f".{module}")]
        if members:
            yield title, members


def summary(rows: Sequence[Row]) -> tuple[Sequence[str], list[list[str]]]:
    """In how many faults what happens; of torch in those that mean something there."""
    found: dict[str, list[Seen] | list[Ours]] = {
        "torch": [row.torch for row in rows if row.torch],
        "torch, DETAIL": [row.detail for row in rows if row.detail],
        "shardmesh": [row.ours for row in rows],
    }
    lines = [["faults", *(str(len(column)) for column in found.values())]]
    for word in (NOTHING, WRONG, HANG, CLOSED, ABORT):
        lines.append([word, *(str(sum(word in one.words for one in column)) for column in found.values())])
    lines.append(["the outlier is named", *(str(sum(one.named for one in column)) for column in found.values())])
    lines.append(["its line is named", *(str(sum(one.line for one in column)) for column in found.values())])
    return ("", *found), lines


def latencies(rows: Sequence[Row]) -> tuple[Sequence[str], list[list[str]]]:
    """Times by kind of verdict."""
    by_kind: dict[str, list[float]] = {}
    for row in rows:
        by_kind.setdefault(row.fault.kinds[0], []).extend(row.ours.latencies_s)
    lines = []
    for kind, times in by_kind.items():
        target = TARGETS[kind]
        told = [f"{percentile(times, p) * 1000:.0f}" for p in (50, 99, 100)] if times else ["-"] * 3
        lines.append([kind, str(len(times)), *told, "-" if target is None else f"{target * 1000:.0f}"])
    return ("kind", "errors", "p50 ms", "p99 ms", "slowest ms", "target, p99"), lines


HEAD = """# Outcomes of faulty programs

This page lists programs of four processes in which one or two ranks diverge from the others, and what happens then. Each program runs in
three ways: with torch.distributed in its default settings (DTensor and collectives over gloo, the timeout reduced from 30 minutes to 5 s);
the same with `TORCH_DISTRIBUTED_DEBUG=DETAIL`; and with shardmesh in its default settings. The programs are the tests of
[tests/faults](../tests/faults).

In the columns of torch, all outcomes on any rank are listed:

* *Nothing*: all ranks finish with the same results as without the fault.
* *Wrong result*: a rank finishes without an error, with a different result.
* *Hang*: the job waits until torch's timeout.
* *Connection closed*: an error about the socket to a rank that has ended, usually on ranks that did nothing wrong.
* *Abort*: gloo ends the process with a signal.
* *Names the rank*: a message lists the outlier as missing, or shows its call and that of another rank without saying which is wrong.

The column of shardmesh shows the error that every surviving rank raises, the rank that it names, and the difference. Its text also has the
operation and the line in the program, for the outlier and for the other ranks. *Equal votes*: ranks disagree in two groups of equal size;
both are shown and no rank is named.

Milliseconds are measured from the moment when the outlier diverges to the error, over all other ranks and all runs. The timeout for stalls
was {stall:.0f} s (the default is 5 minutes).
"""


def document(rows: Sequence[Row], alarms: Sequence[str], tried: int, command: str) -> str:
    """docs/faults.md."""
    text = [HEAD.format(stall=STALL_S)]
    for title, members in parts(rows):
        text += [f"## {title}\n", markdown(COLUMNS, [table_row(row) for row in members]), ""]
    text += ["## In numbers\n", markdown(*summary(rows)), ""]
    text += ["Time from the fault to the error:\n", markdown(*latencies(rows)), ""]
    healthy = "those of `tests/faults/healthy.py`, and the ones above without their fault"
    said = f"False alarms: {len(alarms)} in {tried} healthy programs ({healthy}). {', '.join(alarms)}"
    text += [said.rstrip() + "\n", f"`{command}`, {environment_line(environment())}."]
    return "\n".join(text)


def main() -> None:
    given = arguments()
    chosen = [fault for fault in FAULTS.values() if not given.only or fault.name in given.only]
    rows, alarms = [], []
    with Runner() as runner:
        for fault in chosen:
            if fault.kinds:
                rows.append(measured(runner, fault, given.passes, not given.ours))
                tell(rows[-1])
            if rows[-1].alarm if fault.kinds else not is_well(runner.run(fault)):
                alarms.append(fault.name)
    for title, members in parts(rows):
        show(title, COLUMNS, [table_row(row) for row in members])
    show("In numbers", *summary(rows))
    show("Time from the fault to the error", *latencies(rows))
    print(f"false alarms: {len(alarms)} in {len(chosen)} {', '.join(alarms)}")
    found = {"environment": environment(), "rows": [figures(row) for row in rows], "false_alarms": alarms}
    write_json(given.json, found)
    write_markdown(given.markdown, document(rows, alarms, len(chosen), "python benchmarks/faults.py"))


def tell(row: Row) -> None:
    """Prints a row as soon as it is there, and what is not as it should be."""
    print(" | ".join(table_row(row)), flush=True)
    for problem in row.ours.wrong:
        print("    " + problem[:500].replace("\n", "\n    "), flush=True)


def figures(row: Row) -> Mapping[str, Any]:
    """For the JSON file."""
    times = [round(t, 4) for t in row.ours.latencies_s]
    theirs = {"torch": row.torch, "detail": row.detail}
    torch = {name: found and {"words": found.words, "named": found.named} for name, found in theirs.items()}
    return {"fault": row.fault.name, **torch, "ours": row.ours.text, "latencies_s": times, "wrong": row.ours.wrong}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=list(FAULTS), metavar="NAME", help="one program")
    parser.add_argument("--ours", action="store_true", help="without torch's runs")
    parser.add_argument("--passes", type=int, default=PASSES, help="how often ours runs each program")
    parser.add_argument("--json", help="write all figures here")
    parser.add_argument("--markdown", help="write the document here")
    return parser.parse_args()


if __name__ == "__main__":
    main()
