"""Ranks agree on a schedule, or on what is different, and options are checked."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import shardmesh as sm
from shardmesh import P
from shardmesh.mesh.comm.current_world import current_world
from shardmesh.sharding.jit.errors import JitError
from shardmesh.sharding.jit.passes.agreement import Line, agree, fits, hash_of, sweeps_of
from tests.device import DEVICE
from tests.pool import Pool

A, B = Line("all_reduce sum float32 x 4", (0, 1)), Line("all_gather float32 x 8", (0, 1))


def of_ranks(*schedules: list[Any]) -> list[Any]:
    """Return the result of each rank of a simulated world with these schedules."""

    def main() -> Any:
        try:
            rank = current_world().rank
            return agree(current_world(), [range(len(schedules))], schedules[rank]).stage
        except JitError as error:
            return str(error)

    return sm.simulate(len(schedules))(main)()


def test_equal_schedules_take_all_passes() -> None:
    assert of_ranks([[A, B], [A], [A]], [[A, B], [A], [A]]) == [2, 2]


def test_a_pass_that_ranks_apply_differently_is_left_out() -> None:
    assert of_ranks([[A, B], [A, B], [A]], [[A, B], [A, B], [A, B]]) == [1, 1]
    assert of_ranks([[A, B], [B, A]], [[A, B], [A, B]]) == [0, 0]


def test_collectives_of_one_size_are_told_apart() -> None:
    first, second = (A._replace(numbers=(i,)) for i in (1, 2))
    assert of_ranks([[first, second], [first, second]], [[first, second], [second, first]]) == [
        0,
        0,
    ]


def test_a_difference_names_the_first_line_of_both_on_every_rank() -> None:
    found = of_ranks([[A, B]], [[A, A]])
    assert found[0] == found[1]
    assert "number 1 of the group of ranks 0, 1: rank 0 has all_gather float32 x 8" in found[0]
    assert "rank 1 has all_reduce sum float32 x 4" in found[0]
    assert "rank 1 has nothing" in of_ranks([[A, B]], [[A]])[0]


def test_recordings_of_other_values_are_compared() -> None:
    """Any two fit each other if each rank's are alike."""

    def main(others: list[Any], own: bool) -> Any:
        rank = current_world().rank
        return agree(current_world(), [range(2)], [[A, B], [A]], own and rank == 1, others[rank])

    alike, differing = [[[A]], []], [[[A]], [[A, B]]]
    assert sm.simulate(2)(main)(alike, True) == [(1, True, True)] * 2
    assert sm.simulate(2)(main)(differing, True) == [(1, True, False)] * 2
    assert sm.simulate(2)(main)(alike, False) == [(1, False, True)] * 2


def test_ranks_of_overlapping_meshes_know_when_they_know_all() -> None:
    rounds = {0: [(0, 1)], 1: [(0, 1), (1, 3)], 2: [(2, 3)], 3: [(2, 3), (1, 3)]}
    assert sweeps_of({0: [(0, 1)], 1: [(0, 1)]}) == 1
    assert sweeps_of(rounds) == 2
    for rank in rounds:
        assert sweeps_of({r: one for r, one in rounds.items() if r != rank}) == math.inf


def test_a_rank_without_a_graph() -> None:
    def main() -> Any:
        return agree(
            current_world(), [range(2)], "x was changed" if current_world().rank else [[A]]
        ).stage

    assert sm.simulate(2)(main)() == ["rank 1 has no graph: x was changed", "x was changed"]


def differing() -> str:
    """Run `agree` on four ranks, one of which has a different schedule."""
    world = current_world()
    lines = [
        Line("all_reduce sum float32 x 4", (0, 1, 2, 3)),
        Line("all_gather float32 x 8", (0, 1, 2, 3)),
    ]
    try:
        agree(world, [range(4)], [lines[::-1] if world.rank == 2 else lines])
    except JitError as error:
        return str(error)
    return "no error"


def test_processes(world4: Pool) -> None:
    found = world4(differing)
    assert len(set(found)) == 1
    assert "rank 0 has all_reduce" in found[0]
    assert "rank 2 has all_gather" in found[0]


def records_alone(kind: str, options: Any = None) -> tuple[str, list[str]]:
    """The error, and its notes, where one rank gets another number and the others run the graph
    that they have.
    """
    world = current_world()
    mesh = sm.init_device_mesh(DEVICE, (world.size,), axis_names=("dp",))
    w = sm.ones(8, device_mesh=mesh, placements=P("dp"))

    @sm.jit(backend="eager", compiler_options=options)
    def step(n: int) -> Any:
        if kind == "collectives":
            return w.redistribute(P()).sum().full_tensor() * n
        return w.to_local().sum() * n

    for _ in range(3):
        step(3)
    try:
        assert step(4 if world.rank == 1 else 3).item() > 0
        if kind == "none":
            mesh.group().barrier()
    except sm.errors.WatchError as error:
        return str(error), getattr(error, "__notes__", [])
    return "", []


@pytest.mark.parametrize("kind", ["collectives", "none"])
def test_a_rank_that_records_alone_says_so(kind: str) -> None:
    check_who_records(sm.simulate(3)(records_alone)(kind))
    # What is sent is what eager code sends.
    assert sm.simulate(3)(records_alone)(kind, False) == [("", [])] * 3


def check_who_records(found: list[tuple[str, list[str]]]) -> None:
    name = "step"
    for text, _ in found:
        assert f"all_gather_object() for recording {name} under sm.jit" in " ".join(text.split())
    start = (
        f"rank 1 records {name} under sm.jit since the value of n is 4 and was 3, and all "
        "ranks must record in the same call"
    )
    assert [[note for note in notes if note.startswith(start)] != [] for _, notes in found] == [
        rank == 1 for rank in range(len(found))
    ]


def test_an_order_in_which_ranks_wait_for_each_other_does_not_fit() -> None:
    x, y, z = (Line("all_reduce", ranks) for ranks in ((0, 1), (1, 2), (0, 2)))
    assert fits({0: [x, z], 1: [x, y], 2: [y, z]})
    assert not fits({0: [z, x], 1: [x, y], 2: [y, z]})
    assert hash_of([x]) == hash_of([y]) != hash_of([z])


def test_only_one_rank_reads_a_result() -> None:
    def main() -> list[Tensor]:
        mesh = sm.init_device_mesh(DEVICE, (2,), axis_names=("a",))

        def f(x: Tensor) -> Tensor:
            out = x.clone()
            mesh.group().all_reduce(out)
            return out if mesh.world.rank else x + 0

        jitted = sm.jit(f, backend="eager")
        return [jitted(torch.ones(3) * i) for i in range(3)]

    first, second = sm.simulate(2)(main)()
    assert [x.tolist() for x in first] == [[float(i)] * 3 for i in range(3)]
    assert [x.tolist() for x in second] == [[2.0 * i] * 3 for i in range(3)]


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"fusion": True}, ValueError, "has no 'fusion'; it has dead_collectives"),
        ({"bucket_bytes": -1}, ValueError, "an integer >= 0, got -1"),
        ({"overlap": 3}, TypeError, "must be True or False, got 3"),
        ("all", TypeError, "must be a dict of options or False"),
    ],
)
def test_options_are_checked(options: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text.replace("(", r"\(")):
        sm.jit(lambda x: x, compiler_options=options)
