"""The command `python -m shardmesh ledger`: show what a job's ranks on this host have called."""

from __future__ import annotations

import argparse
import json
import struct
from pathlib import Path
from typing import Any

from ...text import printable, shortened
from ..recording.files import (
    folder_prefix,
    is_being_deleted,
    job_folders,
    parent_folder,
    parent_folders,
    trace_files,
)
from .ledger import Ledger
from .stragglers import StragglerReport

# What reading a trace buffer raises whose bytes are not those of a rank.
_DAMAGE = (
    ValueError,
    TypeError,
    LookupError,
    ArithmeticError,
    AttributeError,
    OSError,
    struct.error,
)
EXAMPLE = """\
  python -m shardmesh ledger
  python -m shardmesh ledger --last 5 --trace trace.json --flight-recorder dumps \
&& torchfrtrace dumps
"""


def add_to(commands: Any) -> None:
    """Add the command to an argparse parser's subparsers; its `run` takes the parsed arguments."""
    parser = commands.add_parser(
        "ledger",
        help="what the ranks of a job call, or have called before they crashed",
        description="Shows the ranks of a job on this host: what became of each, the collectives "
        "that it called last, the one that it waits in, and why the job could not go on. The job "
        "may be running or have crashed; it notices nothing.",
        epilog=f"examples:\n{EXAMPLE}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "folder",
        metavar="FOLDER",
        nargs="?",
        type=Path,
        help="the job's folder (the newest one on this host)",
    )
    add(
        "--last",
        metavar="N",
        type=int,
        default=20,
        help="how many collectives of each rank to show (20)",
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print the same as JSON")
    form.add_argument(
        "--stragglers", action="store_true", help="show who waited for whom in each step, instead"
    )
    add(
        "--trace",
        metavar="FILE",
        type=Path,
        help="write all ranks' collectives for ui.perfetto.dev",
    )
    add(
        "--flight-recorder",
        metavar="FOLDER",
        type=Path,
        help="write them as torch's Flight Recorder does, for torchfrtrace",
    )
    parser.set_defaults(run=lambda arguments: _run(parser, arguments))


def _run(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    folder = arguments.folder or newest_job()
    if folder is None:
        parser.error(
            f"no folder {parent_folder() / folder_prefix()}* of a job on this host; "
            "pass the folder if it is elsewhere"
        )
    try:
        ledger = Ledger.read(folder)
        if arguments.json:
            report = json.dumps(_as_dict(folder, ledger, arguments.last), indent=2)
        elif arguments.stragglers:
            report = str(StragglerReport.of(ledger))
        else:
            report = ledger.report(arguments.last)
    except FileNotFoundError as error:
        parser.error(str(error))
    except _DAMAGE as error:
        parser.error(
            f"the trace buffers in {shortened(str(folder))} are damaged "
            f"({type(error).__name__}: {shortened(str(error))})"
        )
    print(report if arguments.json else f"{printable(str(folder))}\n\n{report}")
    try:
        if arguments.trace is not None:
            ledger.save_trace(arguments.trace)
        if arguments.flight_recorder is not None:
            ledger.save_flight_recorder(arguments.flight_recorder)
    except OSError as error:
        parser.error(
            f"{shortened(str(error.filename or ''))} cannot be written: {error.strerror or error}"
        )
    except _DAMAGE as error:
        parser.error(
            f"the trace buffers in {shortened(str(folder))} are damaged "
            f"({type(error).__name__}: {shortened(str(error))})"
        )
    if ledger.damage:
        parser.exit(1, f"{parser.prog}: error: {ledger.damage}\n")
    return 0


def _as_dict(folder: Path, ledger: Ledger, last: int) -> dict[str, Any]:
    """Return the report as plain data."""
    ranks = [
        {
            "rank": rank.rank,
            "host": rank.host,
            "pid": rank.pid,
            "state": rank.state,
            "blocked": None if rank.blocked is None else rank.blocked._asdict(),
            "collectives": [entry._asdict() for entry in rank.entries[-last:]],
        }
        for rank in ledger.ranks.values()
    ]
    verdict = ledger.verdict
    why = None if verdict is None else {"kind": verdict.kind, "text": verdict.text}
    return {"folder": str(folder), "ranks": ranks, "verdict": why}


def newest_job() -> Path | None:
    """Return the folder of the user's job that began, or ended, last."""
    folders = [one for parent in parent_folders() for one in job_folders(parent)]
    jobs = [one for one in folders if not is_being_deleted(one[1]) and trace_files(one[1])]
    return max(jobs)[1] if jobs else None
