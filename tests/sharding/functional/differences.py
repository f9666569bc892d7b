"""Differences from JAX: programs as in `table.py`; `MappedCase.differs` is the reason.

`test_against_jax` checks that JAX differs or raises, and that our results equal the definition in
`oracle.py`. Otherwise only dtypes differ (`MappedCase.dtypes`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from tests.sharding.functional.table import MappedCase, case_of, each, permutations


def in_another_order() -> Iterator[MappedCase]:
    mesh, axis = (2, 4), ("b", "a")
    why = (
        "JAX's ppermute and pshuffle count places in mesh order, whatever the order of the names; "
        "its axis_index and other collectives, and all of ours, in the order of the names"
    )
    for what, perm in permutations(8).items():
        if what in ("round", "round back", "no wrap"):
            yield case_of(
                f"ppermute {what}",
                mesh,
                axis,
                lambda c, x, perm=perm: c.ppermute(x, axis, perm),
                each(mesh, 2),
                differs=why,
            )
    sources = [3, 0, 1, 2, 7, 4, 5, 6]
    yield case_of(
        "pshuffle",
        mesh,
        axis,
        lambda c, x: c.pshuffle(x, axis, sources),
        each(mesh, 2),
        differs=why,
    )


def sums_in_groups() -> Iterator[MappedCase]:
    why = (
        "JAX sums in groups with check_vma=False only; here what a group makes varies, and is "
        "checked like anything else"
    )
    for mesh, axis, groups in (
        ((8,), "a", [[0, 3, 5, 1], [2], [4], [7, 6]]),
        ((2, 4), ("b", "a"), [[0, 1, 2, 3], [7, 6, 5, 4]]),
    ):
        for what in ("psum", "pmean"):
            yield case_of(
                f"{what} in groups",
                mesh,
                axis,
                lambda c, x, w=what, a=axis, g=groups: getattr(c, w)(x, a, axis_index_groups=g),
                each(mesh, 2, 3),
                second=True,
                differs=why,
                refused="NotImplementedError",
            )


def negative_dims() -> Iterator[MappedCase]:
    mesh, axis = (2, 4), "b"
    why = "JAX counts dims from the end in all_gather only"
    programs: dict[str, tuple[Callable[..., Any], tuple[int, ...]]] = {
        "psum_scatter": (lambda c, x: c.psum_scatter(x, axis, scatter_dimension=-1), (3, 4)),
        "psum_scatter tiled": (
            lambda c, x: c.psum_scatter(x, axis, scatter_dimension=-2, tiled=True),
            (8, 3),
        ),
    }
    for what, (program, local) in programs.items():
        yield case_of(
            f"{what}, negative dim",
            mesh,
            axis,
            program,
            each(mesh, *local),
            differs=why,
            refused="is non-negative",
        )
    exchanged: dict[str, tuple[Callable[..., Any], tuple[int, ...]]] = {
        "all_to_all": (lambda c, x: c.all_to_all(x, axis, -1, 0), (3, 4)),
        "all_to_all tiled": (lambda c, x: c.all_to_all(x, axis, -1, -2, tiled=True), (3, 8)),
    }
    for what, (program, local) in exchanged.items():
        refused = "split dimension" if "tiled" in what else "(1, 4)"
        yield case_of(
            f"{what}, negative dim",
            mesh,
            axis,
            program,
            each(mesh, *local),
            differs=why,
            refused=refused,
        )


def uneven() -> Iterator[MappedCase]:
    mesh, axis = (2, 4), ("b", "a")
    why = (
        "JAX takes multiples of the axis only; we cut as torch.chunk cuts (what does not stack is "
        "in `test_against_oracle`)"
    )
    sizes = (2, 2, 2, 2, 2, 2, 2, 1)
    gathered = lambda c, x: c.all_gather(  # noqa: E731
        c.psum_scatter(x, axis, tiled=True), axis, tiled=True, sizes=sizes
    )
    yield case_of(
        "psum_scatter of 15",
        mesh,
        axis,
        gathered,
        each(mesh, 15),
        differs=why,
        refused="must be divisible",
    )
    scatter = lambda c, x: c.all_to_all(x, axis, 0, 1, tiled=True)  # noqa: E731
    back = lambda c, x: c.all_to_all(scatter(c, x), axis, 1, 0, tiled=True, sizes=sizes)  # noqa: E731
    yield case_of(
        "all_to_all of 15", mesh, axis, back, each(mesh, 15, 2), differs=why, refused="divisible"
    )


def more_gradients() -> Iterator[MappedCase]:
    mesh, axis = (2, 4), ("b", "a")
    wrong = (
        "JAX's derivative of all_to_all that is not tiled has the wrong shape where the dims differ"
    )
    for split, concat in [(0, 1), (1, 0), (2, 0), (0, 2)]:
        program = lambda c, x, s=split, t=concat: c.all_to_all(x, axis, s, t)  # noqa: E731
        local = [2, 3, 1]
        local[split] = 8
        what = f"all_to_all {split} {concat}, gradient"
        yield case_of(
            what,
            mesh,
            axis,
            program,
            each(mesh, *local),
            second=True,
            differs=wrong,
            refused="Expected cotangent type",
        )
    none, x = "JAX's pmax and pmin have no derivatives", each(mesh, 5)
    yield case_of(
        "pmax, gradient",
        mesh,
        axis,
        lambda c, x: c.pmax(x, axis),
        x,
        second=True,
        differs=none,
        refused="pmax",
    )
    yield case_of(
        "pmin, gradient",
        mesh,
        axis,
        lambda c, x: c.pmin(x, axis),
        x,
        second=True,
        differs=none,
        refused="pmin",
    )


def types() -> Iterator[MappedCase]:
    mesh, axis = (2, 4), "b"
    x = each(mesh, 2, 3)
    default = (
        "an all_gather's result is the same on every rank: we say so by default, JAX where asked "
        "to (`to=`)"
    )
    gathered = lambda c, x: c.all_gather(x, axis, tiled=True)  # noqa: E731
    yield case_of(
        "all_gather by default",
        mesh,
        axis,
        gathered,
        x,
        out=("a",),
        differs=default,
        refused="require replication",
    )
    mixed = (
        "JAX takes a sum over axes along which the value varies, or does not, but not over one of "
        "each"
    )
    mean = lambda c, x: c.pmean(c.psum(x, "a"), ("a", "b"))  # noqa: E731
    yield case_of(
        "pmean over both of psum over a",
        mesh,
        ("a", "b"),
        mean,
        x,
        differs=mixed,
        refused="varying",
    )
    twice = lambda c, x: c.pcast(x, axis, to="varying") * c.axis_index(axis)  # noqa: E731
    yield case_of(
        "pcast of what varies already",
        mesh,
        axis,
        twice,
        x,
        differs="nothing is wrong with it",
        refused="pcast",
    )


def lacking() -> Iterator[MappedCase]:
    mesh, why = (2, 4), "JAX does not have it on the CPU"
    for axis in ("b", ("b", "a")):
        program = lambda c, x, axis=axis: c.pbroadcast(x, axis, 3)  # noqa: E731
        yield case_of(
            "pbroadcast",
            mesh,
            axis,
            program,
            each(mesh, 2),
            grad=False,
            differs=why,
            refused="platform cpu",
        )
    truth = each(mesh, 4, 2, dtype="bool")
    counted = lambda c, x: c.psum_scatter(x, "b")  # noqa: E731
    count = "JAX counts truth values in psum only"
    yield case_of(
        "psum_scatter of bool",
        mesh,
        "b",
        counted,
        truth,
        differs=count,
        refused="add does not accept dtype bool",
    )


def extremes_of_nan() -> Iterator[MappedCase]:
    """Yield cases with NaN on some ranks."""
    mesh, axis = (2, 4), "b"
    why = "an extreme of NaN is NaN, as in torch.maximum; JAX's on the CPU passes over it"
    largest = lambda c, x: c.pmax(x / (x * x), axis)  # noqa: E731
    smallest = lambda c, x: c.pmin(x / (x * x), axis)  # noqa: E731
    yield case_of("pmax of NaN", mesh, axis, largest, each(mesh, 16), grad=False, differs=why)
    yield case_of("pmin of NaN", mesh, axis, smallest, each(mesh, 16), grad=False, differs=why)


FAMILIES = (
    in_another_order,
    sums_in_groups,
    negative_dims,
    uneven,
    more_gradients,
    types,
    lacking,
    extremes_of_nan,
)

DIFFERENCES: dict[str, MappedCase] = {
    f"{case.name} (differs)": case for family in FAMILIES for case in family()
}
