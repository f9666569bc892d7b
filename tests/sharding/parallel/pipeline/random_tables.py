"""Random tables: valid schedules, with some changes that may or may not break them."""

from __future__ import annotations

import random
from collections.abc import Sequence

import shardmesh as sm
from shardmesh.sharding.parallel.pipeline.actions import (
    Action,
    Communication,
    Overlap,
    actions_of,
)

NAMES = ("gpipe", "1f1b", "interleaved", "looped_bfs", "zb_h1", "zb_v", "v_half", "v_min")


def random_schedule(rng: random.Random) -> sm.parallel.Schedule:
    """Return a valid schedule for two to four ranks, so small that thousands are quick."""
    ranks = rng.choice([2, 2, 2, 3, 4])
    if rng.random() < 0.1:
        return sm.parallel.make_schedule("dualpipe_v", 2, rng.choice([4, 5]))
    return sm.parallel.make_schedule(rng.choice(NAMES), ranks, rng.choice([1, 2, 2, ranks]))


def changed(rng: random.Random, table: Sequence[Sequence], changes: int) -> list[list]:
    """Return the table with some changes. Most are small, since large ones break every table."""
    rows = [list(row) for row in table]
    for _ in range(changes):
        rank = rng.randrange(len(rows))
        row = rows[rank]
        if len(row) < 2:
            continue
        at = rng.randrange(len(row) - 1)
        match rng.choice(["neighbours"] * 6 + ["move"] * 3 + ["any", "drop", "twice", "rank"]):
            case "neighbours":
                row[at], row[at + 1] = row[at + 1], row[at]
            case "move":
                item = row.pop(at)
                row.insert(min(len(row), max(0, at + rng.randint(-4, 4))), item)
            case "any":
                other = rng.randrange(len(row))
                row[at], row[other] = row[other], row[at]
            case "drop":
                row.pop(at)
            case "twice":
                row.insert(rng.randrange(len(row)), row[at])
            case "rank":
                other_row = rng.choice(rows)
                item = row.pop(at)
                other_row.insert(rng.randrange(len(other_row) + 1), item)
    return rows


def with_other_backwards(rng: random.Random, table: Sequence[Sequence]) -> list[list]:
    """Return the table with some whole backwards in two parts, and some parts in one piece."""
    rows = []
    for row in table:
        items = list(row)
        for item in row:
            if not isinstance(item, Action) or rng.random() < 0.7:
                continue
            if item.kind == "B":
                at = items.index(item)
                items[at] = item._replace(kind="I")
                items.insert(rng.randint(at + 1, len(items)), item._replace(kind="W"))
            elif item.kind == "W" and rng.random() < 0.5:
                items.remove(item)
                backward = item._replace(kind="I")
                items[items.index(backward)] = item._replace(kind="B")
        rows.append(items)
    return rows


def shuffled(rng: random.Random, table: Sequence[Sequence]) -> list[list]:
    """Return the table with every row in any order."""
    return [rng.sample(list(row), len(row)) for row in table]


def with_late_receives(rng: random.Random, table: Sequence[Sequence]) -> list[list]:
    """Return the table with each receive at some place before the action that uses its value."""
    rows = []
    for row in table:
        items = list(row)
        for item in row:
            if isinstance(item, Communication) and not item.is_send and rng.random() < 0.5:
                at = items.index(item)
                stop = at + 1
                while stop < len(items) and not uses(items[stop], item):
                    stop += 1
                items.insert(rng.randint(at, stop - 1), items.pop(at))
        rows.append(items)
    return rows


def uses(item: Action | Overlap | Communication, receive: Communication) -> bool:
    """Return whether an action uses the value of a receive."""
    if isinstance(item, Communication):
        return False
    return any(
        action.stage == receive.stage
        and action.microbatch == receive.microbatch
        and (action.kind == "F") == (receive.kind == "RECV_F")
        for action in actions_of(item)
    )
