"""Collectives against their plain definitions (`oracle.py`) where JAX has nothing to compare with:
parts that differ in length, empty parts, rows sent by count, extremes with ties.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.sharding.functional.flat import (
    FlatCase,
    Program,
    Shape,
    all_ranks,
    by_place,
    check_case,
    wanted,
)
from tests.sharding.functional.oracle import Oracle
from tests.sharding.functional.table import AxisName, size

# -- parts of different lengths --------------------------------------------------------------------

UNEVEN: list[tuple[Shape, AxisName]] = [
    ((4,), "a"),
    ((2, 3), "b"),
    ((2, 3), "a"),
    ((2, 3), ("a", "b")),
    ((2, 3), ("b", "a")),
]
uneven = pytest.mark.parametrize(("mesh", "axis"), UNEVEN, ids=str)


def lengths(n: int, kind: str) -> list[int]:
    """Return lengths of n parts: decreasing, with empty ones, all but one empty, or all empty."""
    return {
        "falling": [n - i for i in range(n)],
        "some empty": [(3 * i + 1) % 4 if i % 2 else 0 for i in range(n)],
        "one": [0] * (n - 1) + [3],
        "all empty": [0] * n,
    }[kind]


kinds = pytest.mark.parametrize("kind", ["falling", "some empty", "one", "all empty"])


@pytest.mark.one_in(5)
@uneven
@pytest.mark.parametrize("total", [7, 5, 1, 0])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_psum_scatter(mesh, axis, total, dim):
    """Cut as `torch.chunk` cuts: the last parts are shorter, or empty."""
    shape = (total, 2) if dim == 0 else (2, total)
    check_case(
        FlatCase(
            mesh,
            lambda c, x: c.psum_scatter(x, axis, scatter_dimension=dim, tiled=True),
            (all_ranks(mesh, shape),),
        )
    )


@pytest.mark.one_in(5)
@uneven
@kinds
@pytest.mark.parametrize("dim", [0, 1, -2])
def test_all_gather(mesh, axis, kind, dim):
    sizes = lengths(size(mesh, axis), kind)
    x = by_place(mesh, axis, lambda place: (2, sizes[place]) if dim == 1 else (sizes[place], 2))
    check_case(
        FlatCase(mesh, lambda c, x: c.all_gather(x, axis, axis=dim, tiled=True, sizes=sizes), (x,))
    )


@pytest.mark.parametrize("axis", [("a", "b"), ("b", "a")])
@kinds
def test_all_gather_replicated(axis, kind):
    sizes = lengths(6, kind)
    x = by_place((2, 3), axis, lambda place: (sizes[place], 2))
    check_case(
        FlatCase(
            (2, 3),
            lambda c, x: c.all_gather(x, axis, tiled=True, sizes=sizes),
            (x,),
            replicated=True,
        )
    )


@pytest.mark.one_in(4)
@uneven
@kinds
@pytest.mark.parametrize("total", [7, 1])
def test_all_to_all(mesh, axis, kind, total):
    """One dim is cut unevenly, along the other parts differ in length."""
    sizes = lengths(size(mesh, axis), kind)
    x = by_place(mesh, axis, lambda place: (total, 2, sizes[place]))
    check_case(
        FlatCase(mesh, lambda c, x: c.all_to_all(x, axis, 0, 2, tiled=True, sizes=sizes), (x,))
    )


@uneven
def test_scattered_and_gathered(mesh, axis):
    n = size(mesh, axis)
    sizes = [len(part) for part in torch.arange(n + 2).chunk(n)] + [0] * n

    def there_and_back(c: Any, x: Any) -> Any:
        return c.all_gather(
            c.psum_scatter(x * x, axis, tiled=True), axis, tiled=True, sizes=sizes[:n]
        )

    check_case(FlatCase(mesh, there_and_back, (all_ranks(mesh, (n + 2, 1)),)))


@uneven
@pytest.mark.parametrize("slices", [1, 2])
def test_ragged_all_to_all(mesh, axis, slices):
    """JAX's CPU backend lacks it: slices of rows of any length, some of none, into an output that
    keeps the rest.
    """
    check_case(FlatCase(mesh, ragged_program(axis), ragged_inputs(mesh, axis, slices)))


def test_ragged_all_to_all_example():
    """The example of JAX's documentation."""
    tensors = [
        [[1.0, 2, 2], [3, 4, 0]],
        [[0.0] * 4, [0.0] * 4],
        [[0, 1], [0, 1]],
        [[1, 2], [1, 1]],
        [[0, 0], [1, 2]],
        [[1, 1], [2, 1]],
    ]
    inputs = tuple(
        [torch.tensor(part, dtype=torch.float64 if i < 2 else None) for part in x]
        for i, x in enumerate(tensors)
    )
    case = FlatCase((2,), ragged_program("a"), inputs)
    ((result,), (expected,)) = wanted(case)[1], [[[1, 3, 0, 0], [2, 2, 4, 0]]]
    assert [part.tolist() for part in result.values] == expected
    check_case(case)


def ragged_program(axis: AxisName) -> Program:
    return lambda c, x, out, *where: c.ragged_all_to_all(x, out, *where, axis_name=axis)


def ragged_inputs(mesh: Shape, axis: AxisName, slices: int) -> tuple[list[torch.Tensor], ...]:
    """Return operand, output, input offsets, send sizes, output offsets and receive sizes of every
    rank, with gaps between slices.
    """
    n = size(mesh, axis)
    # [from, to, slice]
    sent = torch.randint(0, 3, (n, n, slices), generator=torch.Generator().manual_seed(slices))
    offsets = (sent + 1).reshape(n, -1).cumsum(1).reshape(sent.shape) - sent
    arriving = sent.transpose(0, 1)  # [to, from, slice]
    places = (arriving + 1).reshape(n, -1).cumsum(1).reshape(sent.shape) - arriving
    rows = int((sent + 1).sum((1, 2)).max()) + 1, int((arriving + 1).sum((1, 2)).max()) + 1
    where = (offsets, sent, places.transpose(0, 1), arriving)
    along = [int(place) for place in Oracle(mesh).axis_index(axis).values]
    data = [all_ranks(mesh, (length, 2), seed) for seed, length in enumerate(rows)]
    return (*data, *([table[place].reshape(-1) for place in along] for table in where))


# -- extremes --------------------------------------------------------------------------------------


@uneven
@pytest.mark.parametrize("what", ["pmax", "pmin"])
def test_extremes_share_the_gradient(mesh, axis, what):
    """Among 5 values ties are the rule: of two ranks, of all, of none."""
    check_case(FlatCase(mesh, lambda c, x: getattr(c, what)(x, axis), (with_ties(mesh),)))


@pytest.mark.parametrize("axis", [("a", "b"), ("b", "a")])
@pytest.mark.parametrize("what", ["pmax", "pmin"])
def test_replicated_extremes_share_the_gradient(axis, what):
    check_case(
        FlatCase(
            (2, 3), lambda c, x: getattr(c, what)(x, axis), (with_ties((2, 3)),), replicated=True
        )
    )


def with_ties(mesh: Shape) -> list[torch.Tensor]:
    """Return integers from -2 to 2, of which the last ones are the same on every rank."""
    level = torch.full((1, 3), 0.5, dtype=torch.float64)
    return [torch.cat([part.round(), level]) for part in all_ranks(mesh, (4, 3))]


@pytest.mark.parametrize("what", ["pmax", "pmin"])
def test_extreme_of_a_product(what):
    check_case(
        FlatCase(
            (2, 3), lambda c, x: getattr(c, what)(x * x, ("b", "a")) * x, (all_ranks((2, 3), (4,)),)
        ),
        check="always",
    )
