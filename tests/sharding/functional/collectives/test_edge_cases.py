"""Every collective on edge cases, against the plain definitions (`oracle.py`): axes of one rank,
three axes, views, scalars, pending values, other dtypes on the way; and what is refused.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import shardmesh as sm
from shardmesh import P
from tests.device import DEVICE
from tests.sharding.functional import oracle
from tests.sharding.functional.flat import AXES, FlatCase, Program, Shape, all_ranks, check_case
from tests.sharding.functional.mapped_cases import laid_out, weighing
from tests.sharding.functional.oracle import Everyone, Oracle
from tests.sharding.functional.table import AxisName, loss, permutations, size
from tests.sharding.ranks import same_error
from tests.sharding.reference import equal

# -- every collective on odd things ----------------------------------------------------------------


def every_collective(n: int, axis: AxisName) -> dict[str, Program]:
    """Return programs of one tensor with at least one dim, whose first has n elements."""
    sources = [*range(1, n), 0]
    return {
        "psum": lambda c, x: c.psum(x, axis),
        "pmean": lambda c, x: c.pmean(x, axis),
        "pmax": lambda c, x: c.pmax(x, axis),
        "pmin": lambda c, x: c.pmin(x, axis),
        "psum_scatter": lambda c, x: c.psum_scatter(x, axis),
        "psum_scatter tiled": lambda c, x: c.psum_scatter(x, axis, tiled=True),
        "all_gather": lambda c, x: c.all_gather(x, axis),
        "all_gather tiled": lambda c, x: c.all_gather(x, axis, tiled=True),
        "all_to_all": lambda c, x: c.all_to_all(x, axis, 0, 0),
        "all_to_all tiled": lambda c, x: c.all_to_all(x, axis, 0, 0, tiled=True),
        "ppermute": lambda c, x: c.ppermute(x, axis, permutations(n)["round"]),
        "ppermute to few": lambda c, x: c.ppermute(x, axis, permutations(n)["no wrap"]),
        "pshuffle": lambda c, x: c.pshuffle(x, axis, sources),
        "pbroadcast": lambda c, x: c.pbroadcast(x, axis, n - 1),
        "to pending and back": lambda c, x: (
            c.psum(c.pcast(c.psum(x, axis), axis, to="pending"), axis) * x
        ),
    }


NAMES = list(every_collective(2, "a"))
every = pytest.mark.parametrize("what", NAMES)


@pytest.mark.one_in(7)
@every
@pytest.mark.parametrize(
    ("mesh", "axis"),
    [((1,), "a"), ((1, 3), "a"), ((3, 1), ("b", "a")), ((1, 3), ("a", "b"))],
    ids=str,
)
def test_axes_of_one_rank(what, mesh, axis):
    n = size(mesh, axis)
    check_case(FlatCase(mesh, every_collective(n, axis)[what], (all_ranks(mesh, (n, 2)),)))


@pytest.mark.one_in(7)
@every
@pytest.mark.parametrize("axis", ["b", ("a", "c"), ("c", "a"), ("c", "a", "b")], ids=str)
def test_three_axes(what, axis):
    mesh = (2, 3, 2)
    n = size_of(mesh, axis)
    check_case(FlatCase(mesh, every_collective(n, axis)[what], (all_ranks(mesh, (n, 1)),)))


def size_of(mesh: Shape, axis: AxisName) -> int:
    return Oracle(mesh).axis_size(axis)


VIEWS: dict[str, tuple[Shape, Callable[[Any], Any]]] = {
    "transposed": ((2, 4), lambda x: x.transpose(0, 1)),
    "strided": ((8, 2), lambda x: x[::2]),
    "a column": ((4, 3, 2), lambda x: x[:, 1]),
    "expanded": ((4, 1), lambda x: x.expand(4, 3)),
    "with an empty dim": ((4, 0, 2), lambda x: x),
}


@pytest.mark.one_in(5)
@every
@pytest.mark.parametrize("view", VIEWS)
def test_views(what, view):
    """Tensors that are not contiguous, and one without elements."""
    shape, make = VIEWS[view]
    program = every_collective(4, "a")[what]
    check_case(
        FlatCase((4,), lambda c, x: program(c, make(x)), (all_ranks((4,), shape),)), check="always"
    )


@pytest.mark.parametrize(
    "what", ["psum", "pmean", "pmax", "pmin", "all_gather", "ppermute", "pshuffle", "pbroadcast"]
)
def test_scalars(what):
    program = every_collective(6, ("b", "a"))[what]
    check_case(FlatCase((2, 3), program, (all_ranks((2, 3), ()),)))


@pytest.mark.parametrize("source", range(6))
def test_pbroadcast(source):
    x = all_ranks((2, 3), (2, 2))
    check_case(FlatCase((2, 3), lambda c, x: c.pbroadcast(x, ("b", "a"), source), (x,)))
    check_case(
        FlatCase((2, 3), lambda c, x: c.pbroadcast(x, ("b", "a"), source), (x,), replicated=True)
    )


@pytest.mark.parametrize("perm", list(itertools.permutations(range(3))), ids=str)
def test_pshuffle_and_ppermute(perm):
    """Every permutation of an axis, and the same as pairs."""
    x = all_ranks((2, 3), (2,))
    pairs = [(source, i) for i, source in enumerate(perm)]
    check_case(
        FlatCase(
            (2, 3), lambda c, x: (c.pshuffle(x, "b", perm), c.ppermute(x, "b", pairs[1:])), (x,)
        )
    )


# -- pending values --------------------------------------------------------------------------------


def pending_programs(axis: AxisName) -> dict[str, tuple[Program, tuple[Any, ...]]]:
    """Return programs of a pending sum, and the specs of their results."""
    return {
        "psum": (lambda c, x: c.psum(x, axis), (None,)),
        "psum of twice": (lambda c, x: c.psum(x + x, axis), (None,)),
        "pmean": (lambda c, x: c.pmean(x, axis), (None,)),
        "psum_scatter": (lambda c, x: c.psum_scatter(x, axis, tiled=True), (axis,)),
        "psum of a view": (lambda c, x: c.psum(x.transpose(0, 1)[1:], axis), (None,)),
    }


@pytest.mark.parametrize(
    ("mesh", "axis"), [((4,), "a"), ((2, 3), ("a", "b")), ((2, 3), ("b", "a"))], ids=str
)
@pytest.mark.parametrize("what", list(pending_programs("a")))
def test_pending_inputs(mesh, axis, what):
    """The parts are contributions to a sum; its gradient is the same for each, and replicated."""
    program, out = pending_programs(axis)[what]
    parts, n = all_ranks(mesh, (6, 2)), math.prod(mesh)
    # Contributions with the same sum: all of it on rank 0.
    leaf = torch.stack(parts).sum(0).requires_grad_()
    by_definition = program(Oracle(mesh), Everyone([leaf, *[torch.zeros_like(leaf)] * (n - 1)]))
    value = oracle.put_together(by_definition, out, Oracle(mesh))
    ((grad,), (again,)) = oracle.derivatives([value], [leaf], second=True)

    def rank() -> list[torch.Tensor]:
        on = sm.init_device_mesh(DEVICE, mesh, axis_names=AXES[: len(mesh)])
        pending = P(unreduced=on.axis_names)
        x = sm.from_local(parts[on.world.rank], on, pending).requires_grad_()
        y = sm.shard_map(lambda x: program(sm, x), mesh=on, in_specs=pending, out_specs=P(*out))(x)
        total = loss(y, weighing(on, y, 0, y.spec))
        g: Any = torch.autograd.grad(total, x, create_graph=True)[0]
        assert g.is_fully_replicated
        h: Any = torch.autograd.grad((g * weighing(on, g, 0, P())).sum(), x)[0]
        return [t.full_tensor().detach() for t in (y, g, h)]

    for found in sm.simulate(n)(rank)():
        for one, other in zip(found, (value.detach(), grad.detach(), again), strict=True):
            equal(one, other)


@pytest.mark.parametrize(
    ("mesh", "axis"), [((4,), "a"), ((2, 3), "b"), ((2, 3), ("b", "a"))], ids=str
)
def test_pending_results(mesh, axis):
    """A varying value that leaves as a pending sum is what `psum` makes of it."""
    parts = all_ranks(mesh, (3, 2))
    rest = tuple(name for name in AXES[: len(mesh)] if name not in axis)

    def rank() -> list[torch.Tensor]:
        on = sm.init_device_mesh(DEVICE, mesh, axis_names=AXES[: len(mesh)])
        x: Any = laid_out(on, torch.cat(parts), P(on.axis_names)).requires_grad_()
        over = functools.partial(sm.shard_map, mesh=on, in_specs=P(on.axis_names))
        pending = over(lambda x: x * x, out_specs=P(rest or None, unreduced=tuple(axis)))(x)
        summed = over(lambda x: sm.psum(x * x, axis), out_specs=P(rest or None))(x)
        assert pending.spec.unreduced
        w = weighing(on, pending, 0, P(rest or None))
        results: list[Any] = [
            t for y in (pending, summed) for t in (y, *torch.autograd.grad((y * w).sum(), x))
        ]
        return [t.full_tensor().detach() for t in results]

    for value, grad, wanted_value, wanted_grad in sm.simulate(math.prod(mesh))(rank)():
        equal(value, wanted_value)
        equal(grad, wanted_grad)


# -- dtypes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", [name for name in NAMES if name != "to pending and back"])
def test_forward_dtype(what):
    """Numbers of few bits go through bfloat16 unchanged; the result has it, the gradient is the
    input's dtype again.
    """
    parts = [part.clamp(-1, 1) for part in all_ranks((4,), (4, 2))]

    def rank() -> tuple[torch.Tensor, torch.dtype]:
        mesh = sm.init_device_mesh(DEVICE, (4,), axis_names=("a",))
        x: Any = laid_out(mesh, torch.cat(parts), P("a")).requires_grad_()
        run = lambda x: with_dtypes(what)(sm, x)[None]  # noqa: E731
        y = sm.shard_map(run, mesh=mesh, in_specs=P("a"), out_specs=P("a"))(x)
        y.double().sum().backward()
        return y.full_tensor().detach(), x.grad.dtype

    (value,) = oracle.evaluate(
        (4,), every_collective(4, "a")[what], [torch.cat(parts)], [("a",)], None
    )
    for found, dtype in sm.simulate(4)(rank)():
        assert found.dtype == torch.bfloat16
        assert dtype == torch.float64
        equal(found.double(), value)


def with_dtypes(what: str) -> Program:
    """Return the program with a forward and a backward dtype in its collective."""

    class Lowered:
        def __getattr__(self, name: str) -> Callable[..., Any]:
            return lambda *args, **more: getattr(sm, name)(
                *args, forward_dtype=torch.bfloat16, backward_dtype=torch.float32, **more
            )

    return lambda c, x: every_collective(4, "a")[what](Lowered(), x)


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (lambda x: sm.ppermute(x, "a", [(0, 1), (0, 2)]), "none twice"),
        (lambda x: sm.ppermute(x, "a", [(0, 1), (2, 1)]), "none twice"),
        (lambda x: sm.ppermute(x, "a", [(0, 4)]), "from 0 to 3"),
        (lambda x: sm.pshuffle(x, "a", [0, 1, 2, 2]), "once"),
        (lambda x: sm.pbroadcast(x, "a", 4), "from 0 to 3"),
        (lambda x: sm.psum_scatter(x, "a"), "tiled=True"),
        (lambda x: sm.all_to_all(x, "a", 0, 0), "tiled=True"),
        (lambda x: sm.all_to_all(x, "a", 0, 0, tiled=True), "multiple"),
        (lambda x: sm.all_gather(x, "a", sizes=(3, 3, 3, 3)), "tiled=True"),
        (lambda x: sm.all_gather(x, "a", axis=3), "from -3 to 2"),
        (lambda x: sm.psum(x, "z"), "'z'"),
        (lambda x: sm.psum(x, ("a", "a")), "each once"),
    ],
)
def test_invalid_arguments_raise(program, words):
    """The same error on every rank, before anything moves."""

    def on(mesh: sm.DeviceMesh) -> None:
        x = laid_out(mesh, torch.ones(12, 2), P("a"))
        sm.shard_map(program, mesh=mesh, in_specs=P("a"), out_specs=P("a"))(x)

    assert words in same_error((4,), on, ValueError)
