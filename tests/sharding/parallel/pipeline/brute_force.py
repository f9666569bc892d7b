"""Tables of a pipeline, run step by step as ranks and their channels would.

Data is only names. Nothing of the library is used but the classes of actions, so that it can be
compared.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

from shardmesh.sharding.parallel.pipeline.actions import Action, Communication, Overlap

Table = Sequence[Sequence[Action | Overlap | Communication]]


def parts(item: Action | Overlap) -> list[Action]:
    return [item] if isinstance(item, Action) else [item.forward, item.backward]


def homes(table: Table) -> dict[int, int] | None:
    """Return the rank that has the parameters of each stage; None if two ranks would need them."""
    home: dict[int, int] = {}
    for rank, row in enumerate(table):
        for item in row:
            if isinstance(item, Communication):
                continue
            for action in parts(item):
                if home.setdefault(action.stage, rank) != rank:
                    return None
    return home


class Data:
    """What exists on one rank, or everywhere if all ranks share it.

    Outputs are (stage, "F", microbatch), gradients of a stage's inputs (stage, "I", microbatch).
    """

    def __init__(self, last_stage: int) -> None:
        self.last_stage = last_stage
        self.values: set[tuple[int, str, int]] = set()
        self.saved: set[tuple[int, int]] = set()  # activations for the backward
        self.deferred: set[tuple[int, int]] = set()  # inputs and output gradients for the weights
        self.weights: set[tuple[int, int]] = set()  # weight gradients that are done

    def can_run(self, action: Action) -> bool:
        stage, kind, microbatch = action
        if kind == "F":
            return stage == 0 or (stage - 1, "F", microbatch) in self.values
        if kind == "W":
            return (stage, microbatch) in self.deferred
        if stage < self.last_stage and (stage + 1, "I", microbatch) not in self.values:
            return False
        return (stage, microbatch) in self.saved

    def run(self, action: Action) -> bool:
        """Compute; False if it was computed before."""
        stage, kind, microbatch = action
        place = (stage, microbatch)
        if kind == "F":
            if (stage, "F", microbatch) in self.values:
                return False
            self.values.add((stage, "F", microbatch))
            self.saved.add(place)
            return True
        if kind == "W":
            self.deferred.remove(place)
        else:
            self.saved.remove(place)
            self.values.add((stage, "I", microbatch))
            if kind == "I":
                self.deferred.add(place)
                return True
        self.weights.add(place)
        return True


def is_complete(stages: int, microbatches: int, weights: set[tuple[int, int]]) -> bool:
    return len(weights) == stages * microbatches


def sizes(table: Table) -> tuple[int, int]:
    actions = []
    for row in table:
        for item in row:
            if not isinstance(item, Communication):
                actions += parts(item)
    stages = 1 + max(action.stage for action in actions)
    return stages, 1 + max(action.microbatch for action in actions)


def runs_with_shared_memory(table: Table) -> bool:
    """Return whether all ranks reach the end if every result is everywhere at once.

    So it is with unlimited buffers, and receives that are called as early as possible.
    """
    if homes(table) is None or not all(table):
        return False
    stages, microbatches = sizes(table)
    data = Data(stages - 1)
    positions = [0] * len(table)
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(table):
            if positions[rank] == len(row):
                continue
            actions = parts(row[positions[rank]])
            if all(data.can_run(action) for action in actions):
                first_time = [data.run(action) for action in actions]
                if not all(first_time):
                    return False
                positions[rank] += 1
                moved = True
    at_end = all(position == len(row) for position, row in zip(positions, table, strict=True))
    return at_end and is_complete(stages, microbatches, data.weights)


def runs_with_channels(table: Table, capacity: float) -> bool:
    """Return whether all ranks reach the end if channels buffer `capacity` messages.

    A channel is one direction between two ranks. The capacity is 0 if a send blocks until its
    receive is called, or `math.inf`. Messages are received in the order in which they were sent.
    """
    home = homes(table)
    if home is None or not all(table):
        return False
    stages, microbatches = sizes(table)
    data = [Data(stages - 1) for _ in table]
    channels: dict[tuple[int, int], deque] = {}
    positions = [0] * len(table)

    def item_at(rank):
        return table[rank][positions[rank]] if positions[rank] < len(table[rank]) else None

    def peer_of(item):
        return home.get(item.stage + (1 if item.kind in ("SEND_F", "RECV_B") else -1))

    def value_of(item):
        stage = item.stage + {"SEND_F": 0, "SEND_B": 0, "RECV_F": -1, "RECV_B": 1}[item.kind]
        return (stage, "F" if item.kind.endswith("F") else "I", item.microbatch)

    moved = True
    while moved:
        moved = False
        for rank in range(len(table)):
            item = item_at(rank)
            if item is None:
                continue
            if not isinstance(item, Communication):
                actions = parts(item)
                if not all(data[rank].can_run(action) for action in actions):
                    return False  # nothing arrives while a rank computes
                first_time = [data[rank].run(action) for action in actions]
                if not all(first_time):
                    return False
            elif item.kind.startswith("SEND"):
                peer = peer_of(item)
                if value_of(item) not in data[rank].values or home[item.stage] != rank:
                    return False
                if peer is None or peer == rank:
                    return False
                channel = channels.setdefault((rank, peer), deque())
                if capacity == 0:
                    # the receive is next on the other rank, and is for a message of this one
                    other = item_at(peer)
                    waits = isinstance(other, Communication) and other.kind.startswith("RECV")
                    if not waits or peer_of(other) != rank or channel:
                        continue
                elif len(channel) >= capacity:
                    continue
                channel.append(value_of(item))
            else:
                peer = peer_of(item)
                channel = channels.get((peer, rank))
                if peer is None or peer == rank or home[item.stage] != rank:
                    return False
                if not channel:
                    continue
                value = channel.popleft()
                if value != value_of(item) or value in data[rank].values:
                    return False
                data[rank].values.add(value)
            positions[rank] += 1
            moved = True
    at_end = all(position == len(row) for position, row in zip(positions, table, strict=True))
    weights = set().union(*[one.weights for one in data])
    empty = not any(channels.values())
    return at_end and empty and is_complete(stages, microbatches, weights)


CAPACITIES = (0, 1, 2, math.inf)
