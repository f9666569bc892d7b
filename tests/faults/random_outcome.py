"""The outcome of a random program with one outlier.

named       an error that names the outlier and no other rank
tie         an error that names no rank, since two ranks differ and there is no majority
unnamed     an error that names no rank, although there is a majority
wrong rank  an error that names another rank
nothing     no error and correct results: the divergence had no effect
local       no error and different results, but all collectives moved the same data: the divergence
            was not observable
unseen      no error and different results, but only collectives that the program calls on plain
            tensors moved different data: such tensors have no lineage, and differ between ranks in
            correct programs too
silent      no error and different results otherwise
"""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

import torch

from shardmesh.mesh import current_world, simulate
from shardmesh.mesh.comm.recording.trace_buffer import Header
from shardmesh.mesh.errors import WatchError
from tests.faults.random_programs import RandomProgram, mesh_of, run

RIGHT = ("named", "tie", "nothing", "local", "unseen")


class CollectiveInput(NamedTuple):
    """The data that a rank passed to a collective.

    Attributes:
        ranks: the ranks of the group.
        rank: this rank.
        is_plain: whether the program called the collective directly, on a plain tensor.
        data: a copy of the input.
    """

    ranks: tuple[int, ...]
    rank: int
    is_plain: bool
    data: Any


def run_simulated(
    program: RandomProgram, *, diverging: bool = True, inputs: list[CollectiveInput] | None = None
) -> tuple[list[Any], int]:
    """Run a program in a simulated world.

    Args:
        diverging: False runs it without its divergence.
        inputs: receives the inputs of all collectives.

    Returns:
        Each rank's results, and the number of collectives called by all ranks.
    """
    called: list[int] = []

    def one_rank() -> Any:
        world: Any = current_world()
        if inputs is not None and world.rank == 0:
            world.scheduler.run_collective = _recording(world.scheduler.run_collective, inputs)
        result = run(
            program, mesh_of(program), world.rank, diverging and program.outlier == world.rank
        )
        called.append(world.trace_buffer.words[Header.RECORDS])
        return result

    return simulate(program.size, prints="plain")(one_rank)(), sum(called)


def _recording(
    run_collective: Callable[..., Any], inputs: list[CollectiveInput]
) -> Callable[..., Any]:
    def recorded(ranks: tuple[int, ...], rank: int, call: Any, move: Any) -> Any:
        inputs.append(
            CollectiveInput(ranks, rank, _called_by_program(), _input(call, ranks.index(rank)))
        )
        return run_collective(ranks, rank, call, move)

    return recorded


def _input(call: Any, group_rank: int) -> Any:
    if call.op == "barrier" or (call.op == "broadcast" and call.buffers[1] != group_rank):
        return None
    if call.op == "all_gather_object":
        # The pickled bytes depend on which parts are the same object.
        return pickle.loads(call.buffers[0])
    buffer = call.buffers[0 if call.op in ("all_reduce", "broadcast") else 1]
    return buffer.clone() if isinstance(buffer, torch.Tensor) else buffer


def _called_by_program() -> bool:
    return not any(
        "/sharding/" in frame.f_code.co_filename for frame, _ in traceback.walk_stack(None)
    )


def outcome(program: RandomProgram) -> tuple[str, BaseException | None]:
    """Return the outcome of a program in a simulated world, and its error."""
    try:
        results, _ = run_simulated(program)
    except (Exception, SystemExit) as error:
        return classify_error(program, error), error
    return classify_results(program, results, run_simulated(program, diverging=False)[0]), None


def classify_error(program: RandomProgram, error: BaseException) -> str:
    if isinstance(error, WatchError):
        return classify_verdict(program, error.verdict.kind, error.ranks, len(error.verdict.seen))
    notes = getattr(error, "__notes__", [])  # simulate adds the rank to the error
    return (
        "named"
        if any(f"raised on rank {program.outlier} of" in note for note in notes)
        else "wrong rank"
    )


def classify_verdict(program: RandomProgram, kind: str, named: Sequence[int], voters: int) -> str:
    """Return the outcome for a verdict that names these ranks.

    Args:
        voters: number of ranks in the verdict. In a mismatch they are from one group, otherwise
            maybe from several groups of two.
    """
    if named:
        return "named" if tuple(named) == (program.outlier,) else "wrong rank"
    has_majority = voters > 2 and (kind == "mismatch" or len(program.mesh) == 1)
    return "unnamed" if has_majority else "tie"


def classify_results(program: RandomProgram, results: Sequence[Any], right: Sequence[Any]) -> str:
    if all(map(same, results, right)):
        return "nothing"
    diverging: list[CollectiveInput] = []
    correct: list[CollectiveInput] = []
    run_simulated(program, inputs=diverging)
    run_simulated(program, diverging=False, inputs=correct)
    different = [
        one
        for one, right in zip_longest(_in_order(diverging), _in_order(correct))
        if not same(one, right)
    ]
    if not different:
        return "local"
    return "unseen" if all(one is not None and one.is_plain for one in different) else "silent"


def _in_order(inputs: list[CollectiveInput]) -> list[CollectiveInput]:
    """Sort by group and rank, since the order between groups varies."""
    return sorted(inputs, key=lambda one: (one.ranks, one.rank))


def same(one: Any, other: Any) -> bool:
    """Return whether results are bitwise equal; NaNs are equal."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one.nan_to_num(), other.nan_to_num())
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other
