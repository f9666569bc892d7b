"""The sends and receives that follow from a schedule, and the proof that they cannot deadlock.

Communication is no part of a `Schedule`: what a stage computes is sent when it exists, and received
where the next stage is. Backends differ in how much a send may run ahead of its receive. Gloo
buffers small messages; NCCL buffers little or nothing, and executes the sends and receives of two
ranks in the order in which each of them has called them. So the order of calls matters, and
`with_communication` chooses one that is right for every backend: all ranks follow one sequence in
which a send and its receive are one event. A rank that waits for its partner then waits for
something earlier in the sequence, so there is no cycle, even if each send blocks until its receive
is called. The calls of two ranks have the same order on both.

`check_communication` proves the same of any table with sends and receives, such as one that was
read from a file.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias

from .actions import Action, Cell, Communication, Overlap, Rows, actions_of, stages_of
from .proof import prove
from .simulation import Costs, simulate

Instruction: TypeAlias = Cell | Communication
Instructions: TypeAlias = tuple[tuple[Instruction, ...], ...]


def with_communication(rows: Rows) -> Instructions:
    """Return each rank's row with its sends and receives, in the order in which it calls them.

    The sequence is that of the simulation at equal costs: a result is sent and received at the time
    at which its action ends, before any action that starts at this time.

    Raises:
        ValueError: the table is no valid schedule.
    """
    rank_of = stages_of(rows)
    timeline = simulate(rows, Costs())
    transfers_first, actions_second = 0, 1
    sequence: list[tuple[float, int, int, Cell]] = []
    for rank, row in enumerate(timeline.events):
        for event in row:
            if isinstance(event.cell, Action | Overlap):
                sequence.append((event.start, actions_second, rank, event.cell))
                sequence.append((event.end, transfers_first, rank, event.cell))
    instructions: list[list[Instruction]] = [[] for _ in rows]
    for _, kind, rank, cell in sorted(sequence, key=lambda entry: entry[:3]):
        if kind == actions_second:
            instructions[rank].append(cell)
            continue
        for action in actions_of(cell):
            for send, receive in _transfers_of(action, max(rank_of)):
                receiver = rank_of[receive.stage]
                if receiver != rank:
                    instructions[rank].append(send)
                    instructions[receiver].append(receive)
    return tuple(map(tuple, instructions))


def _transfers_of(action: Action, last_stage: int) -> Iterator[tuple[Communication, Communication]]:
    """Yield the send and the receive of an action's result, if another stage uses it."""
    stage, kind, microbatch = action.result
    if kind == "F" and stage < last_stage:
        yield (
            Communication(stage, "SEND_F", microbatch),
            Communication(stage + 1, "RECV_F", microbatch),
        )
    if kind == "I" and stage > 0:
        yield (
            Communication(stage, "SEND_B", microbatch),
            Communication(stage - 1, "RECV_B", microbatch),
        )


def check_communication(instructions: Sequence[Sequence[Instruction]]) -> None:
    """Prove that sends and receives move what is used, and that no buffering is too little.

    Between two ranks, in one direction, the k-th send must be that of the k-th receive, since
    backends match them by order alone. No send may need a buffer: if each one blocks until its
    receive is called, all ranks reach the end.

    Raises:
        ValueError: the table without its communication is no valid schedule, or a send or receive
            is missing, superfluous, too early, too late or in another order than its partner. The
            text is the first violation.
    """
    rows = tuple(
        tuple(item for item in row if not isinstance(item, Communication)) for row in instructions
    )
    prove(rows)
    rank_of = stages_of(rows)
    _check_matched(instructions, rows, rank_of)
    _check_channels(instructions, rank_of)
    _check_rows(instructions, rank_of)
    _check_rendezvous(instructions, rank_of)


def _check_matched(
    instructions: Sequence[Sequence[Instruction]], rows: Rows, rank_of: dict[int, int]
) -> None:
    """Check that each value that crosses ranks is sent and received once, and nothing else is."""
    needed: set[Communication] = set()
    for row in rows:
        for cell in row:
            for action in actions_of(cell):
                for send, receive in _transfers_of(action, max(rank_of)):
                    if rank_of[send.stage] != rank_of[receive.stage]:
                        needed |= {send, receive}
    seen: set[Communication] = set()
    for rank, row in enumerate(instructions):
        for item in row:
            if not isinstance(item, Communication):
                continue
            if item not in needed:
                raise ValueError(f"rank {rank}: nothing needs {item}")
            if rank_of[item.stage] != rank:
                raise ValueError(
                    f"rank {rank}: {item} belongs to rank {rank_of[item.stage]}, which has stage "
                    f"{item.stage}"
                )
            if item in seen:
                raise ValueError(f"rank {rank}: {item} is there twice")
            seen.add(item)
    if needed - seen:
        item = min(needed - seen)
        raise ValueError(f"rank {rank_of[item.stage]}: {item} is missing")


def _check_channels(instructions: Sequence[Sequence[Instruction]], rank_of: dict[int, int]) -> None:
    """Check that between two ranks, in one direction, receives have the order of sends."""
    sends: dict[tuple[int, int], list[Communication]] = {}
    receives: dict[tuple[int, int], list[Communication]] = {}
    for rank, row in enumerate(instructions):
        for item in row:
            if isinstance(item, Communication):
                peer = rank_of[item.peer_stage]
                if item.is_send:
                    sends.setdefault((rank, peer), []).append(item)
                else:
                    receives.setdefault((peer, rank), []).append(item)
    for (source, destination), sent in sorted(sends.items()):
        pairs = zip(sent, receives[source, destination], strict=True)
        for number, (send, receive) in enumerate(pairs):
            if send.value != receive.value:
                raise ValueError(
                    f"message {number} from rank {source} to rank {destination} is {send}, and is "
                    f"received as {receive}: receives must have the order of the sends"
                )


def _check_rows(instructions: Sequence[Sequence[Instruction]], rank_of: dict[int, int]) -> None:
    """Check that each rank has what it sends and what it uses when it gets there."""
    last_stage = max(rank_of)
    for rank, row in enumerate(instructions):
        available: set[Action] = set()
        for item in row:
            if isinstance(item, Communication):
                if item.is_send and item.value not in available:
                    raise ValueError(f"rank {rank}: {item} comes before {item.value} is computed")
                available.add(item.value)
                continue
            for action in actions_of(item):
                for operand in action.operands(last_stage):
                    if operand not in available:
                        raise ValueError(
                            f"rank {rank}: {item} comes before {operand} is computed or received"
                        )
            available |= {action.result for action in actions_of(item)}


def _check_rendezvous(
    instructions: Sequence[Sequence[Instruction]], rank_of: dict[int, int]
) -> None:
    """Check that all ranks reach the end if each send blocks until its receive is called.

    A send and its receive go ahead together once both ranks are there. Which of several possible
    ones goes first does not matter: it cannot block another one.
    """
    positions = [0] * len(instructions)

    def current(rank: int) -> Instruction | None:
        row = instructions[rank]
        return row[positions[rank]] if positions[rank] < len(row) else None

    movable = list(range(len(instructions)))
    while movable:
        rank = movable.pop()
        while (item := current(rank)) is not None:
            if isinstance(item, Communication):
                peer = rank_of[item.peer_stage]
                partner = current(peer)
                if (
                    not isinstance(partner, Communication)
                    or partner.value != item.value
                    or partner.is_send == item.is_send
                ):
                    break
                positions[peer] += 1
                movable.append(peer)
            positions[rank] += 1
    blocked = {rank: item for rank in range(len(instructions)) if (item := current(rank))}
    if blocked:
        waits = [
            f"rank {rank} blocks in {item} (instruction {positions[rank]}) until rank "
            f"{rank_of[item.peer_stage]} gets to its part"
            for rank, item in blocked.items()
            if isinstance(item, Communication)
        ]
        raise ValueError(
            f"without buffers the communication deadlocks: {'; '.join(waits)}. Call a receive "
            "before sends that its sender waits for"
        )
