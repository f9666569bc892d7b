"""The proof that a schedule does the whole work once, and that it runs to the end.

In the order in which violations are reported:

1. A stage is on one rank, every rank has one, and no action is there twice.
2. Every stage runs each microbatch forward once, and backward once: as a whole, or in two parts.
3. Operands are computed before they are used, in every row and across rows (`order`). Then the
   sends and receives that follow from the table are matched, and no buffering is too little for
   them (`communication`).
"""

from __future__ import annotations

from collections.abc import Iterable

from .actions import Action, Overlap, Rows, actions_in, actions_of
from .order import execution_order


def prove(rows: Rows) -> list[tuple[int, int]]:
    """Return the cells as (rank, slot) in an order in which they can run.

    Raises:
        ValueError: the table is no valid schedule; the text is the first violation.
    """
    _check_places(rows)
    _check_complete([action for row in rows for action in actions_in(row)])
    return execution_order(rows)


def _check_places(rows: Rows) -> None:
    rank_of: dict[int, int] = {}
    places: dict[Action, tuple[int, int]] = {}
    for rank, row in enumerate(rows):
        if not row:
            raise ValueError(f"rank {rank} has no action: leave it out of the schedule")
        for slot, cell in enumerate(row):
            if isinstance(cell, Overlap) and (
                cell.forward.kind != "F" or cell.backward.kind not in ("B", "I")
            ):
                raise ValueError(
                    f"rank {rank}, slot {slot}: {cell} is not a forward and a backward, in this "
                    "order"
                )
            for action in actions_of(cell):
                first_rank = rank_of.setdefault(action.stage, rank)
                if first_rank != rank:
                    raise ValueError(
                        f"rank {rank}, slot {slot}: {action} is of stage {action.stage}, which is "
                        f"on rank {first_rank}. A stage is on one rank."
                    )
                first = places.setdefault(action, (rank, slot))
                if first != (rank, slot):
                    raise ValueError(f"rank {rank}: {action} is in slots {first[1]} and {slot}")


def _check_complete(actions: Iterable[Action]) -> None:
    present = set(actions)
    stages = 1 + max(action.stage for action in present)
    microbatches = 1 + max(action.microbatch for action in present)
    for stage in range(stages):
        for microbatch in range(microbatches):
            if Action(stage, "F", microbatch) not in present:
                raise ValueError(
                    f"stage {stage} has no forward of microbatch {microbatch} "
                    f"({stage}F{microbatch}), of {stages} stages and {microbatches} microbatches"
                )
            whole = Action(stage, "B", microbatch)
            parts = [Action(stage, "I", microbatch), Action(stage, "W", microbatch)]
            in_parts = [part for part in parts if part in present]
            if whole in present and in_parts:
                raise ValueError(
                    f"stage {stage} has both {whole} and {in_parts[0]}: a backward is one action, "
                    "or two for inputs and weights"
                )
            if whole not in present and len(in_parts) < 2:
                lacks = f"{parts[0]} and {parts[1]}" if not in_parts else ""
                lacks = lacks or next(str(part) for part in parts if part not in present)
                raise ValueError(
                    f"stage {stage} has no whole backward of microbatch {microbatch}: {whole}, or "
                    f"{lacks}, is not in the schedule"
                )
