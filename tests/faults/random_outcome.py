"""The outcome of a random program with one outlier.

    named       an error, of the odd rank and nobody else
    tie         an error that blames nobody, where votes of two cannot tell
    unnamed     an error that blames nobody, though there is a majority
    innocent    an error that blames another rank
    nothing     no error, and results as if nothing had happened: what the rank did differently changed nothing
    local       no error and other results, but no collective moved what the odd rank did differently: nothing could be seen
    unseen      no error and other results, but what collectives moved was other data in the program's own ones alone, on plain tensors:
                nobody knows how those were made, and they differ between the ranks of correct programs, too
    silent      no error and other results
"""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

import torch

from shardmesh.mesh import current_world, simulate
from shardmesh.mesh.errors import WatchError
from shardmesh.mesh.monitor.recording.trace_buffer import Header
from tests.faults.random_programs import Program, mesh_of, run

RIGHT = ("named", "tie", "nothing", "local", "unseen")


class Moved(NamedTuple):
    """What a rank put into a collective.

    Attributes:
        is_plain: whether the program called it itself, on a plain tensor.
    """

    ranks: tuple[int, ...]
    rank: int
    is_plain: bool
    data: Any


def simulated(program: Program, *, odd: bool = True, moved: list[Moved] | None = None) -> tuple[list[Any], int]:
    """(each rank's results, how many collectives all ranks called) in a simulated world; `moved` takes what went into them."""
    called: list[int] = []

    def one_rank() -> Any:
        world: Any = current_world()
        if moved is not None and world.rank == 0:
            world.scheduler.run_collective = _noting(world.scheduler.run_collective, moved)
        result = run(program, mesh_of(program), world.rank, odd and program.odd == world.rank)
        called.append(world.trace_buffer.words[Header.RECORDS])
        return result

    return simulate(program.size, prints="plain")(one_rank)(), sum(called)


def _noting(meet: Callable[..., Any], moved: list[Moved]) -> Callable[..., Any]:
    def noted(ranks: tuple[int, ...], rank: int, call: Any, move: Any) -> Any:
        moved.append(Moved(ranks, rank, _is_of_program(), _input(call, ranks.index(rank))))
        return meet(ranks, rank, call, move)

    return noted


def _input(call: Any, place: int) -> Any:
    if call.op == "barrier" or (call.op == "broadcast" and call.buffers[1] != place):
        return None
    if call.op == "all_gather_object":
        return pickle.loads(call.buffers[0])  # the bytes depend on which of its parts are the same object
    found = call.buffers[0 if call.op in ("all_reduce", "broadcast") else 1]
    return found.clone() if isinstance(found, torch.Tensor) else found


def _is_of_program() -> bool:
    return not any("/sharding/" in frame.f_code.co_filename for frame, _ in traceback.walk_stack(None))


def outcome(program: Program) -> tuple[str, BaseException | None]:
    """What becomes of a program in a simulated world, and the error."""
    try:
        found, _ = simulated(program)
    except (Exception, SystemExit) as error:
        return judged_error(program, error), error
    return judged_results(program, found, simulated(program, odd=False)[0]), None


def judged_error(program: Program, error: BaseException) -> str:
    if isinstance(error, WatchError):
        return judged_verdict(program, error.verdict.kind, error.ranks, len(error.verdict.seen))
    notes = getattr(error, "__notes__", [])  # simulate raises what a rank raised, and says which
    return "named" if any(f"raised on rank {program.odd} of" in note for note in notes) else "innocent"


def judged_verdict(program: Program, kind: str, blamed: Sequence[int], voters: int) -> str:
    """Args: voters: how many ranks the verdict tells of. In a mismatch they are of one group, else maybe of several groups of two."""
    if blamed:
        return "named" if tuple(blamed) == (program.odd,) else "innocent"
    has_majority = voters > 2 and (kind == "mismatch" or len(program.mesh) == 1)
    return "unnamed" if has_majority else "tie"


def judged_results(program: Program, found: Sequence[Any], right: Sequence[Any]) -> str:
    if all(map(same, found, right)):
        return "nothing"
    with_odd: list[Moved] = []
    without: list[Moved] = []
    simulated(program, moved=with_odd)
    simulated(program, odd=False, moved=without)
    other = [one for one, right in zip_longest(_in_order(with_odd), _in_order(without)) if not same(one, right)]
    if not other:
        return "local"
    return "unseen" if all(one is not None and one.is_plain for one in other) else "silent"


def _in_order(moved: list[Moved]) -> list[Moved]:
    """By group and rank, since groups take turns as they like."""
    return sorted(moved, key=lambda one: (one.ranks, one.rank))


def same(one: Any, other: Any) -> bool:
    """Whether results are equal bit for bit; nan is nan."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one.nan_to_num(), other.nan_to_num())
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other
