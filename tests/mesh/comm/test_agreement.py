"""What the ranks of a group know together, and errors that all of them raise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import shardmesh as sm
from shardmesh.mesh.comm.agreement import facts_of, gather_facts, run_on_all, same_on_all
from shardmesh.mesh.comm.current_world import current_world
from shardmesh.mesh.comm.group import Group


def on_ranks(size: int, program: Callable[[Group, int], Any]) -> list[Any]:
    """Return the results of all ranks, or the texts of the errors that they raised."""

    def rank() -> Any:
        world = current_world()
        try:
            return program(world.group(range(world.size)), world.rank)
        except ValueError as error:
            return str(error)

    return sm.simulate(size)(rank)()


def test_facts_are_by_rank() -> None:
    facts = on_ranks(3, lambda group, rank: gather_facts(group, rank * 10))
    assert facts == [{0: 0, 1: 10, 2: 20}] * 3


def test_facts_of_one_rank() -> None:
    assert on_ranks(3, lambda group, rank: facts_of(group, 1, f"of {rank}")) == ["of 1"] * 3


def test_values_that_are_the_same() -> None:
    assert on_ranks(2, lambda group, rank: same_on_all(group, [1], _differing)) == [[1]] * 2
    assert on_ranks(2, lambda group, rank: same_on_all(group, rank, _differing)) == ["0, 1"] * 2


def _differing(values: dict[int, int]) -> ValueError:
    return ValueError(", ".join(map(str, values.values())))


@pytest.mark.parametrize(
    ("failing", "text"),
    [
        ({}, [{0: 0, 1: 1, 2: 2, 3: 3}] * 4),
        ({1: "no disk"}, ["on rank 1: no disk"] * 4),
        ({0: "no disk", 2: "no disk"}, ["on rank 0, 2: no disk"] * 4),
        (dict.fromkeys(range(4), "no disk"), ["no disk"] * 4),
        (
            {0: "a", 1: "b", 2: "c", 3: "d"},
            ["on rank 0: a; on rank 1: b; on rank 2: c; and 1 more"] * 4,
        ),
    ],
)
def test_an_error_of_some_ranks_is_one_of_all(failing: dict[int, str], text: list[Any]) -> None:
    def program(group: Group, rank: int) -> Any:
        def work() -> int:
            if rank in failing:
                raise OSError(failing[rank])
            return rank

        return run_on_all(group, work, ValueError)

    assert on_ranks(4, program) == text
