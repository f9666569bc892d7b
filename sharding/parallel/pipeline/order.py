"""The order in which the cells of a schedule can run, or the cycle of ranks that wait.

Every rank runs its row from left to right. A cell starts when the results that it uses exist,
wherever they are computed. Receives are posted in advance and sends do not block, so nothing else
delays a cell; `communication` shows that a backend without any buffering can do this.
"""

from __future__ import annotations

from .actions import Action, Rows, actions_in, actions_of


def execution_order(rows: Rows) -> list[tuple[int, int]]:
    """Return all cells as (rank, slot), each after the cells whose results it uses.

    Raises:
        ValueError: ranks wait for each other; the text names a cycle of them.

    The table has every result that an action uses (`proof` checks this before).
    """
    last_stage = max((action.stage for row in rows for action in actions_in(row)), default=0)
    slots = [0] * len(rows)
    results: set[Action] = set()
    waiting: dict[Action, list[int]] = {}  # result: ranks whose next cell uses it
    order: list[tuple[int, int]] = []
    runnable = list(range(len(rows)))
    while runnable:
        rank = runnable.pop()
        while slots[rank] < len(rows[rank]):
            actions = actions_of(rows[rank][slots[rank]])
            missing = _missing_operands(actions, last_stage, results)
            if missing:
                waiting.setdefault(missing[0], []).append(rank)
                break
            order.append((rank, slots[rank]))
            slots[rank] += 1
            for action in actions:
                results.add(action.result)
                runnable += waiting.pop(action.result, [])
    if len(order) < sum(map(len, rows)):
        raise ValueError(_deadlock_text(rows, slots, last_stage, results))
    return order


def _missing_operands(
    actions: tuple[Action, ...], last_stage: int, results: set[Action]
) -> list[Action]:
    missing: list[Action] = []
    for action in actions:
        missing += [operand for operand in action.operands(last_stage) if operand not in results]
    return missing


def _deadlock_text(rows: Rows, slots: list[int], last_stage: int, results: set[Action]) -> str:
    """Return the cells that wait for each other, from a table that has all results."""
    places: dict[Action, tuple[int, int]] = {}
    for rank, row in enumerate(rows):
        for slot, cell in enumerate(row):
            for action in actions_of(cell):
                if action.kind != "W":
                    places[action.result] = (rank, slot)
    rank = next(rank for rank, row in enumerate(rows) if slots[rank] < len(row))
    waits: dict[int, str] = {}
    while rank not in waits:
        cell = rows[rank][slots[rank]]
        missing = _missing_operands(actions_of(cell), last_stage, results)
        owner, slot = places[missing[0]]
        waits[rank] = (
            f"rank {rank} waits in slot {slots[rank]} ({cell}) for slot {slot} "
            f"({rows[owner][slot]}) of rank {owner}"
        )
        rank = owner
    ranks = list(waits)
    cycle = ranks[ranks.index(rank) :]
    return "the schedule deadlocks: " + "; ".join(waits[rank] for rank in cycle)
