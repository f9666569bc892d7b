"""Compare the schedules of collectives of all ranks.

line        all_reduce sum float32 x 12 over 0,1
schedule    the lines of a graph in the order of its starts
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from ....mesh.comm.agreement import gather_facts
from ....mesh.comm.recording.recorder import CommTag
from ....mesh.comm.world import World
from ....mesh.errors import WatchError
from ..collectives import OPERATORS
from ..errors import Break, JitError

_FREE = ("all_to_all", "permute")  # each rank may send and receive other sizes


class Line(NamedTuple):
    """One collective of a schedule.

    Attributes:
        what: its kind, dtype and size, and what a pass has moved from behind it before it or the
            other way.
        ranks: its group.
        numbers: which of the group's collectives in the program it stands for. Two of one size are
            not the same.
    """

    what: str
    ranks: tuple[int, ...]
    numbers: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.what} over ranks {', '.join(map(str, self.ranks))}"


Schedule = list[Line]


class Agreed(NamedTuple):
    """What all ranks do with their recordings.

    Attributes:
        stage: the index of the last pass whose schedules fit each other; None if not all meshes are
            known and there is nothing to compare; or why a rank has no graph.
        is_own: whether the recording of a rank depends on values that others may not have read.
        is_alike: whether each rank's schedule is that of its recordings of other values, so that
            any two fit each other.
    """

    stage: int | str | None
    is_own: bool = False
    is_alike: bool = True


class _Facts(NamedTuple):
    """What a rank tells the others about its recording.

    Attributes:
        stages: hashes of its schedules, or why it has no graph.
        is_own: whether it has read values of its own.
        others: hashes of its recordings of other values.
    """

    stages: list[str] | str
    is_own: bool
    others: frozenset[str]


def number_collectives(graph: fx.Graph) -> None:
    """Number the collectives of a recorded graph within each group; passes keep the numbers."""
    counts: dict[Any, int] = {}
    for node in graph.nodes:
        if node.target in OPERATORS:
            group = node.args[-2]
            counts[group] = counts.get(group, 0) + 1
            node.meta["numbers"] = (counts[group],)


def schedule_of(graph: fx.Graph) -> Schedule:
    """Return the collectives of a graph, in the order in which they start."""
    return list(_lines(graph))


def _lines(graph: fx.Graph) -> Iterator[Line]:
    for node in graph.nodes:
        if node.target in OPERATORS:
            name, x = OPERATORS[node.target], node.args[0]  # type: ignore[index]
            shape, _, dtype, _ = x.meta["val"]  # type: ignore[union-attr]
            how = "" if name in (*_FREE, "all_gather") else f" {node.args[1]}"
            size = "" if name in _FREE else f" x {math.prod(shape)}"
            ranks = tuple(map(int, str(node.args[-2]).split(",")))
            what = (
                f"{name}{how} {str(dtype).removeprefix('torch.')}{size}{node.meta.get('moved', '')}"
            )
            yield Line(what, ranks, node.meta.get("numbers", ()))
        elif (group := _group_of_other(node)) is not None:
            yield Line(
                getattr(node.target, "__name__", "exchange"), tuple(map(int, group.split(",")))
            )


def _group_of_other(node: fx.Node) -> str | None:
    """Return the group of a barrier or of an exchange of objects, None for other nodes."""
    if node.op != "call_function" or isinstance(node.target, torch._ops.OpOverload):
        return None
    group = getattr(node.target, "group", None)
    if getattr(node.target, "__name__", "") == "barrier":
        group = node.args[0]
    return group if isinstance(group, str) else None


def hash_of(schedule: Schedule) -> str:
    """Return a hash that is the same on ranks whose groups have the same place.

    The groups are at other ranks: the ranks of a group count from its first one.
    """
    relative = [
        (line.what, line.numbers, tuple(rank - line.ranks[0] for rank in line.ranks))
        for line in schedule
    ]
    return hashlib.blake2b(repr(relative).encode(), digest_size=8).hexdigest()


def announce(
    world: World, meshes: Sequence[Sequence[int]], name: str, reason: str, may_differ: bool
) -> tuple[list[tuple[int, ...]], bool]:
    """Meet all ranks before a recording.

    A rank that records while others run a graph is then named in the first collective.

    Args:
        reason: why this rank records; empty if it is its first recording.
        may_differ: whether arguments of this rank may have other shapes on other ranks.

    Returns: the ranks that record together, as one set or none; and whether arguments of one of
        them may differ. Of meshes that overlap in a chain, such as ranks 0, 1 and ranks 1, 2, these
        are the ranks of all.
    Raises: CollectiveMismatchError, or DeadlockError where the graph of the others has no
    collectives, on all ranks.
    """
    tag = CommTag.of(f"recording {name} under sm.jit")
    rounds = rounds_of(world.rank, meshes)
    overlap = len(rounds) > 1
    try:
        for ranks in rounds:
            facts = gather_facts(world.group(ranks), (may_differ, overlap), tag=tag).values()
            may_differ = any(one for one, _ in facts)
            overlap = any(one for _, one in facts) or overlap
        if overlap:
            known = _gather_chain(world, rounds, may_differ, tag)
            may_differ = any(one for _, one in known.values())
            rounds = [tuple(sorted(known))]
    except WatchError as error:
        why = f" since {reason}" if reason else ""
        error.add_note(
            f"rank {world.rank} records {name} under sm.jit{why}, and all ranks must record in the "
            "same call, since passes change what they send. Let arguments and state change on all "
            f"ranks at once, or call {name}.__wrapped__ on all ranks for such a call."
        )
        raise
    return rounds, may_differ


def _gather_chain(
    world: World, rounds: list[tuple[int, ...]], facts: Any, tag: CommTag
) -> dict[int, tuple[list[tuple[int, ...]], Any]]:
    """Return the rounds and the facts of all ranks of overlapping meshes, on each of them.

    A rank knows others by its own rounds only: what is known goes on from round to round.
    """
    known = {world.rank: (rounds, facts)}
    count = 0
    while count < sweeps_of({rank: one for rank, (one, _) in known.items()}):
        for ranks in rounds:
            for others in gather_facts(world.group(ranks), known, tag=tag).values():
                known |= others
        count += 1
    return known


def sweeps_of(rounds: dict[int, list[tuple[int, ...]]]) -> float:
    """Return how often ranks go through their rounds until each knows of all others.

    Args:
        rounds: those of all ranks; infinitely often if a rank is missing, of which nothing is known
            yet.
    """
    sets = sorted({ranks for one in rounds.values() for ranks in one}, key=_place_of)
    everyone = {rank for ranks in sets for rank in ranks}
    if not everyone <= rounds.keys():
        return math.inf
    known = {rank: {rank} for rank in everyone}
    count = 0
    while any(ranks != everyone for ranks in known.values()):
        for ranks in sets:
            together = set[int]().union(*(known[rank] for rank in ranks))
            known |= dict.fromkeys(ranks, together)
        count += 1
    return count


def agree(
    world: World,
    meshes: Sequence[Sequence[int]],
    schedules: list[Schedule] | str,
    is_own: bool = False,
    others: Sequence[Schedule] = (),
) -> Agreed:
    """Return up to which pass all ranks have schedules that fit each other.

    Args:
        meshes: ranks of meshes; the ranks of those that this rank is in take part.
        schedules: the schedule as recorded and after each pass; or why this rank has no graph.
        is_own: whether this rank has read values that others may not have.
        others: schedules of this rank's recordings of other values.

    Raises: JitError if the recorded schedules of one group differ; the same on all ranks.
    """
    rounds = rounds_of(world.rank, meshes)
    if isinstance(schedules, str):
        stages: Any = schedules
    elif all(any(set(line.ranks) <= set(ranks) for ranks in rounds) for line in schedules[0]):
        stages = [hash_of(schedule) for schedule in schedules]
    else:
        stages = []  # collectives with ranks of which nothing is known: as recorded
    facts = _Facts(stages, is_own, frozenset(map(hash_of, others)))
    known = _gather(world, rounds, facts)
    stage = _last_fitting(world, rounds, schedules, {r: one.stages for r, one in known.items()})
    own = any(one.is_own for one in known.values())
    alike = not isinstance(stage, int) or all(
        one.others <= {one.stages[stage]} for one in known.values()
    )
    return Agreed(stage, own, alike)


def _last_fitting(
    world: World,
    rounds: list[tuple[int, ...]],
    schedules: list[Schedule] | str,
    known: dict[int, Any],
) -> int | str | None:
    """Return the stage of `Agreed`.

    Args:
        known: the hashes of the schedules of each rank, or why it has none.
    """
    if not rounds and not isinstance(schedules, str):
        return None if schedules[0] else len(schedules) - 1
    failed = {rank: why for rank, why in sorted(known.items()) if isinstance(why, str)}
    if failed:
        if isinstance(schedules, Break):
            return schedules
        rank = next((r for r, why in failed.items() if isinstance(why, Break)), min(failed))
        why = failed[rank]
        if isinstance(schedules, str) and not isinstance(why, Break):
            return schedules
        return type(why)(f"rank {rank} has no graph: {why}")
    if not all(known.values()):
        return None
    if all(hashes == known[world.rank] for hashes in known.values()):
        return len(schedules) - 1
    everyone = _gather(world, rounds, schedules)
    _check_recorded({rank: stages[0] for rank, stages in everyone.items()})
    count = min(map(len, everyone.values()))
    fitting = 0
    for i in range(count):
        if fits({rank: stages[i] for rank, stages in everyone.items()}):
            fitting = i
        else:
            break
    return fitting


def agree_on_names(
    world: World, meshes: list[Sequence[int]], names: frozenset[Any]
) -> frozenset[Any]:
    """Return the names of those collectives that all ranks of their groups have named.

    A collective is named by its group and its numbers there.
    """
    known = _gather(world, rounds_of(world.rank, meshes), names)
    return frozenset(
        name
        for name in names
        if all(name in known.get(int(rank), ()) for rank in name[0].split(","))
    )


def most_of(
    world: World,
    meshes: Sequence[Sequence[int]],
    name: str,
    need: int,
    number: int,
) -> tuple[int, bool]:
    """Return the largest of the ranks' needs, and whether all have the same number.

    Args:
        meshes: the ranks that record together, as `announce` returns them.
        need: one of `selection.py`.
        number: that of the recordings of the call's signature.

    Communication: one all_reduce of three numbers in host memory over each mesh: an accelerator
    goes on with what is queued.
    """
    rounds = rounds_of(world.rank, meshes)
    if not rounds:
        return need, True
    x = torch.tensor([need, number, -number], device="cpu")
    for ranks in rounds:
        tag = CommTag.of(f"choosing the recording of {name} under sm.jit")
        world.group(ranks).all_reduce(x, "max", tag=tag)
    need, most, least = x.tolist()
    return need, most == -least


def rounds_of(rank: int, meshes: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """Return the largest sets of ranks that this rank is in.

    Their order is one that no two ranks see differently.
    """
    sets = {frozenset(ranks) for ranks in meshes if rank in ranks and len(ranks) > 1}
    largest = [members for members in sets if not any(members < other for other in sets)]
    return sorted((tuple(sorted(members)) for members in largest), key=_place_of)


def _place_of(ranks: tuple[int, ...]) -> Any:
    """Return the place of a round among others, the same on all ranks."""
    return [r - ranks[0] for r in ranks], ranks


def _gather(world: World, rounds: list[tuple[int, ...]], facts: Any) -> dict[int, Any]:
    known = {world.rank: facts}
    for ranks in rounds:
        for others in gather_facts(world.group(ranks), known).values():
            known |= others
    return known


def _check_recorded(schedules: dict[int, Schedule]) -> None:
    """Raise if two ranks have recorded different collectives of one group."""
    for ranks in sorted({line.ranks for schedule in schedules.values() for line in schedule}):
        members = [rank for rank in ranks if rank in schedules]
        parts = {
            rank: [line for line in schedules[rank] if line.ranks == ranks] for rank in members
        }
        for rank in members[1:]:
            first, other = parts[members[0]], parts[rank]
            if first != other:
                i = next(
                    (i for i, (a, b) in enumerate(zip(first, other, strict=False)) if a != b),
                    min(len(first), len(other)),
                )
                a, b = (str(lines[i]) if i < len(lines) else "nothing" for lines in (first, other))
                raise JitError(
                    "ranks have recorded different collectives under sm.jit; the first difference "
                    f"is number {i} of the group of ranks {', '.join(map(str, ranks))}: rank "
                    f"{members[0]} has {a}, rank {rank} has {b}"
                )


def fits(schedules: dict[int, Schedule]) -> bool:
    """Return whether the schedules run to their ends.

    Each rank is taken to start a collective when the one before has completed.
    """
    place = dict.fromkeys(schedules, 0)
    work = list(schedules)
    while work:
        rank = work.pop()
        if place[rank] == len(schedules[rank]):
            continue
        line = schedules[rank][place[rank]]
        if all(
            r in place and place[r] < len(schedules[r]) and schedules[r][place[r]] == line
            for r in line.ranks
        ):
            for r in line.ranks:
                place[r] += 1
            work += line.ranks
    return all(place[rank] == len(schedule) for rank, schedule in schedules.items())
