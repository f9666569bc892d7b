"""The two CSV formats in which torch.distributed.pipelining writes and reads schedules.

A line for each rank, a cell for each action. "compute_only" has the actions, and empty cells where
a rank is idle. "compute_comms" has sends and receives as well, and what FSDP does for a whole
stage: `2UNSHARD` gathers its parameters, `2RESHARD` frees them, `2REDUCE_GRAD` scales and reduces
its gradients. (torch 2.13, torch/distributed/pipelining/schedules.py: `_Action`,
`_PipelineScheduleRuntime._load_csv` and `_dump_csv`.)
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable

from .actions import Communication, Rows, actions_in, actions_of, parse_cell
from .communication import Instruction, check_communication, with_communication

_FULLY_SHARDED = re.compile(r"[0-9]{1,9}(UNSHARD|RESHARD|REDUCE_GRAD)")


def read_rows(lines: Iterable[str], ignore_communication: bool) -> Rows:
    """Return the rows of a table in either format, without idle slots and communication.

    Raises:
        ValueError: a cell is none of the texts above; or the file has communication that is not to
            be ignored, and it does not fit the actions or deadlocks (`check_communication`).
    """
    instructions: list[list[Instruction]] = []
    for number, line in enumerate(csv.reader(lines)):
        row: list[Instruction] = []
        for position, text in enumerate(line):
            if _FULLY_SHARDED.fullmatch(text.strip()):
                continue
            try:
                item = parse_cell(text)
            except ValueError as error:
                raise ValueError(f"line {number + 1}, cell {position + 1}: {error}") from None
            if item is not None:
                row.append(item)
        instructions.append(row)
    rows: Rows = tuple(
        tuple(item for item in row if not isinstance(item, Communication)) for row in instructions
    )
    if sum(map(len, rows)) < sum(map(len, instructions)) and not ignore_communication:
        check_communication(instructions)
    return rows


def table_of_actions(rows: Rows) -> list[list[str]]:
    """Return the cells of the format "compute_only"; idle slots are not written."""
    return [list(map(str, row)) for row in rows]


def table_with_communication(rows: Rows) -> list[list[str]]:
    """Return the cells of the format "compute_comms".

    All stages of a rank are gathered before its first action and freed after its last one, and the
    gradients of a stage are reduced after its last backward. Stages without FSDP ignore this, but
    for the scaling of gradients.

    Raises:
        ValueError: the table is no valid schedule.
    """
    table = []
    for row in with_communication(rows):
        actions = actions_in(item for item in row if not isinstance(item, Communication))
        stages = sorted({action.stage for action in actions})
        last = {action.stage: action for action in actions if action.kind in "BW"}
        cells = [f"{stage}UNSHARD" for stage in stages]
        for item in row:
            cells.append(str(item))
            if isinstance(item, Communication):
                continue
            for action in actions_of(item):
                if last[action.stage] == action:
                    cells.append(f"{action.stage}REDUCE_GRAD")
        table.append(cells + [f"{stage}RESHARD" for stage in stages])
    return table
