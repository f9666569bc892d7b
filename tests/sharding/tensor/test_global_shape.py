"""Ranks exchange the shapes of their parts once, and again when these change; undetected changes
raise, never give a wrong shape.
"""

from __future__ import annotations

import pytest
import torch

import shardmesh as sm
from shardmesh import P, Shard
from tests.sharding.ranks import collectives, every_rank, launched, on_mesh, same_error

EXCHANGE = ["all_gather_object"]


def shapes_of(mesh, lengths, spec=P("a"), **how):
    """Return the global shape in each call on one line, and whether ranks exchanged shapes
    for it.
    """
    found = []
    for each in lengths:
        with collectives() as records:
            x = sm.from_local(torch.ones(each[mesh.world.rank], 3), mesh, spec, **how)
        assert launched(records) in ([], EXCHANGE)
        found.append((x.shape[0], bool(records)))
    return found


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([(2, 2, 2)] * 3, [(6, True), (6, False), (6, False)]),
        (
            [(2, 2, 2), (3, 3, 3), (3, 3, 3), (2, 2, 2)],
            [(6, True), (9, True), (9, False), (6, True)],
        ),
        (
            [(2, 2, 1), (2, 2, 1), (2, 2, 0), (2, 2, 2), (2, 2, 2)],
            [(5, True), (5, True), (4, True), (6, True), (6, False)],
        ),
        ([(0, 0, 0), (0, 0, 0)], [(0, True), (0, False)]),
    ],
)
def test_equal_parts_are_exchanged_once_and_uneven_ones_always(lengths, expected):
    assert on_mesh((3,), lambda mesh: shapes_of(mesh, lengths)) == [expected] * 3


def test_shape_check_always_and_false():
    lengths = [(2, 2), (2, 2), (2, 1)]
    assert (
        on_mesh((2,), lambda mesh: shapes_of(mesh, lengths, shape_check="always"))
        == [[(4, True), (4, True), (3, True)]] * 2
    )
    assert (
        on_mesh((2,), lambda mesh: shapes_of(mesh, lengths[:2], shape_check=False))
        == [[(4, False), (4, False)]] * 2
    )


@every_rank(2, 2)
def test_shape_check_false_on_two_axes(mesh):
    assert sm.from_local(torch.ones(2, 3), mesh, P(("b", "a")), shape_check=False).shape == (8, 3)
    assert sm.from_local(torch.ones(2, 3), mesh, P("a", "b"), shape_check=False).shape == (4, 6)


@every_rank(2)
def test_another_line_dtype_size_or_placement_is_another_signature(mesh):
    def exchanged(x, spec):
        with collectives() as records:
            sm.from_local(x, mesh, spec)
        return launched(records) == EXCHANGE

    calls = [
        (torch.ones(2, 3), P("a")),
        (torch.ones(2, 3).double(), P("a")),
        (torch.ones(2, 4), P("a")),
        (torch.ones(2, 3), P(None, "a")),
    ]
    assert [[exchanged(*call) for call in calls] for _ in range(2)] == [[True] * 4, [False] * 4]
    assert exchanged(*calls[0])  # from this line


def test_given_sizes_need_no_second_exchange():
    """The global shape is known; a part that does not fit is told as where `shape` is given."""

    def program(mesh):
        spec = [Shard(0, sizes=(3, 1))]
        assert shapes_of(mesh, [(3, 1), (3, 1)], spec) == [(4, True), (4, False)]

    on_mesh((2,), program)


def test_parts_that_change_on_some_ranks_only_are_an_error():
    """For any next step of the ranks: a reduction, an exchange of shapes for another tensor, or
    exit.
    """

    def reduce(mesh):
        sm.from_local(torch.ones(1), mesh, P(unreduced={"a"})).item()

    def exchange(mesh):
        sm.from_local(torch.ones(4), mesh, P("a"))

    for then in (reduce, exchange):

        def program(mesh, then=then):
            try:
                shapes_of(mesh, [(2, 2, 2), (2, 2, 1)])
            finally:
                then(mesh)

        with pytest.raises(RuntimeError, match="shape_check"):
            on_mesh((3,), program)

    with pytest.raises(RuntimeError, match="shape_check"):
        on_mesh((3,), lambda mesh: shapes_of(mesh, [(2, 2, 2), (2, 2, 1)]))


def test_crossing_calls_raise_on_every_rank():
    def program(mesh):
        for lengths in [(2, 2, 2), (2, 2, 1)]:
            sm.from_local(torch.ones(lengths[mesh.world.rank]), mesh, P("a"))
        sm.from_local(torch.ones(1), mesh, P("a"))

    text = same_error((3,), program, RuntimeError, silent=False)
    assert (
        "different calls of from_local (rank 0: call 3, f32[1], rank 1: call 3, f32[1], rank 2: "
        "call 2, f32[1])" in text
    )


def test_invalid_shape_check_raises():
    text = same_error(
        (2,),
        lambda mesh: sm.from_local(torch.ones(1), mesh, P("a"), shape_check="once"),
        ValueError,
    )
    assert text == "from_local(shape_check='once'): write one of True, False, 'always'"


def in_processes() -> None:
    mesh = sm.init_device_mesh("cpu", (4,), axis_names=("a",))
    assert shapes_of(mesh, [(2, 2, 2, 2), (2, 2, 2, 2), (3, 3, 3, 3)]) == [
        (8, True),
        (8, False),
        (12, True),
    ]
    assert shapes_of(mesh, [(2, 2, 2, 1), (2, 2, 2, 1)]) == [(7, True), (7, True)]


def test_exchanges_between_processes(world4):
    world4(in_processes)
