"""A table of small programs for every collective, which run unchanged under JAX and under this
library.

A program gets the library as `c` (`jax.lax` or `shardmesh`, with the same names and arguments) and
this rank's tensors:

    MappedCase("psum on 2x4 over b", (2, 4), lambda c, x: c.psum(x, "b"), (each((2, 4), 3, 2),))

The results of all ranks are stacked and compared, with first and second derivatives. This file
imports neither torch nor JAX, since the JAX side runs in a separate process.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

AXES: tuple[str, ...] = ("a", "b")
AxisName = str | tuple[str, ...]

# Every family of cases runs on the first, a few cases on the others too.
WHOLE: tuple[tuple[tuple[int, ...], AxisName], ...] = (
    ((8,), "a"),
    ((2, 4), "b"),
    ((2, 4), ("b", "a")),
)
BRIEF: tuple[tuple[tuple[int, ...], AxisName], ...] = (
    ((8,), ("a",)),
    ((2, 4), "a"),
    ((2, 4), ("a", "b")),
    ((4, 2), ("b", "a")),
    ((2, 2), ("a", "b")),
)
# Every dim on these: axes of sizes that differ, and a reordered pair of axes.
EVERY_DIM: tuple[tuple[tuple[int, ...], AxisName], ...] = (((2, 4), "b"), ((2, 4), ("b", "a")))


@dataclass(frozen=True)
class Input:
    """An input tensor.

    Attributes:
        shape: the global shape.
        spec: per dim the axis or axes that split it, as in `P(*spec)`.
        dtype: numpy's name, or "bfloat16".
    """

    shape: tuple[int, ...]
    spec: tuple[Any, ...] = ()
    dtype: str = "float64"

    def values(self, seed: int) -> np.ndarray:
        """Return float64 numbers of few bits: sums and products of a few of them are exact in any
        order.
        """
        numbers = np.random.default_rng(seed).integers(-8, 9, self.shape)
        if self.dtype in ("bool", "uint8"):
            return (numbers > 0).astype("float64")
        return numbers.astype("float64") / (4 if self.dtype.startswith("float") else 1)

    @property
    def differentiable(self) -> bool:
        return "float" in self.dtype


@dataclass(frozen=True)
class MappedCase:
    """One program on one mesh.

    Attributes:
        name: the test id.
        mesh: its shape; the axes are a, b.
        program: `(c, *tensors) -> pytree of tensors`.
        inputs: what goes in.
        out: the spec of all results; left out, each rank's result is looked at.
        grad: derivatives are compared, too.
        second: and second derivatives.
        dtypes: why our result's dtype is another one than JAX's.
        differs: why we do something else than JAX: what the plain definition in `oracle.py` says.
        refused: where we differ because JAX refuses on the CPU, a piece of its message.
    """

    name: str
    mesh: tuple[int, ...]
    program: Callable[..., Any]
    inputs: tuple[Input, ...]
    out: tuple[Any, ...] | None = None
    grad: bool = True
    second: bool = False
    dtypes: str = ""
    differs: str = ""
    refused: str = ""

    @property
    def axes(self) -> tuple[str, ...]:
        return AXES[: len(self.mesh)]

    @property
    def differentiable(self) -> tuple[int, ...]:
        """Indices of the inputs by which it is differentiated."""
        return tuple(i for i, x in enumerate(self.inputs) if x.differentiable) if self.grad else ()


def weights(shape: Sequence[int], seed: int) -> np.ndarray:
    """Return the factors of a result in a loss: numbers of few bits that differ between
    elements.
    """
    return ((np.arange(math.prod(shape)) * 5 + seed) % 7 - 3).reshape(tuple(shape)) / 4


def loss(y: Any, w: Any) -> Any:
    """Return a scalar of a result, with second derivatives that are not zero."""
    return (y * w + y * y * y / 4).sum()


def each(mesh: Sequence[int], first: int, *local: int, dtype: str = "float64") -> Input:
    """Return a different tensor of this local shape on every rank."""
    return Input((first * math.prod(mesh), *local), (AXES[: len(mesh)],), dtype)


def same(*shape: int, dtype: str = "float64") -> Input:
    """Return the same tensor on every rank."""
    return Input(shape, (), dtype)


def size(mesh: Sequence[int], axis: AxisName) -> int:
    """Return the number of ranks along the axis."""
    return math.prod(mesh[AXES.index(name)] for name in axis)


def _name(what: str, mesh: Sequence[int], axis: AxisName) -> str:
    return (
        f"{what} on {'x'.join(map(str, mesh))} over "
        f"{axis if isinstance(axis, str) else '(' + ','.join(axis) + ')'}"
    )


def case_of(
    what: str,
    mesh: tuple[int, ...],
    axis: AxisName,
    program: Callable[..., Any],
    *inputs: Input,
    **more: Any,
) -> MappedCase:
    """Return a case whose name has the mesh and the axes."""
    return MappedCase(_name(what, mesh, axis), mesh, program, inputs, **more)


# -- one collective --------------------------------------------------------------------------------


def reductions(mesh: tuple[int, ...], axis: AxisName) -> Iterator[MappedCase]:
    x = each(mesh, 3, 2)
    yield case_of("psum", mesh, axis, lambda c, x: c.psum(x, axis), x, second=True)
    yield case_of("pmean", mesh, axis, lambda c, x: c.pmean(x, axis), x, second=True)
    yield case_of("pmax", mesh, axis, lambda c, x: c.pmax(x, axis), x, grad=False)
    yield case_of("pmin", mesh, axis, lambda c, x: c.pmin(x, axis), x, grad=False)
    yield case_of(
        "psum of a replicated value",
        mesh,
        axis,
        lambda c, x: c.psum(x, axis),
        same(3, 2),
        second=True,
    )
    yield case_of("pmean of a replicated value", mesh, axis, lambda c, x: c.pmean(x, axis), same(2))
    yield case_of("psum of scalars", mesh, axis, lambda c, x: c.psum(x[0], axis), each(mesh, 1))


def replicated_results(mesh: tuple[int, ...], axis: AxisName) -> Iterator[MappedCase]:
    """Yield cases whose results are replicated along the axis and returned with a spec
    without it.
    """
    rest = tuple(name for name in AXES[: len(mesh)] if name not in axis)
    x, out = each(mesh, 2, 3), (rest or None,)
    gathered = lambda c, x: c.all_gather(x, axis, tiled=True, to="replicated")  # noqa: E731
    yield case_of(
        "psum, replicated", mesh, axis, lambda c, x: c.psum(x, axis), x, out=out, second=True
    )
    yield case_of(
        "pmax, replicated", mesh, axis, lambda c, x: c.pmax(x, axis), x, out=out, grad=False
    )
    yield case_of("all_gather, replicated", mesh, axis, gathered, x, out=out, second=True)


def moves(mesh: tuple[int, ...], axis: AxisName) -> Iterator[MappedCase]:
    n, x = size(mesh, axis), each(mesh, 2, 3)
    over = lambda what, program, *inputs: case_of(what, mesh, axis, program, *inputs, second=True)  # noqa: E731
    yield over("psum_scatter", lambda c, x: c.psum_scatter(x, axis), each(mesh, n, 2))
    yield over(
        "psum_scatter tiled", lambda c, x: c.psum_scatter(x, axis, tiled=True), each(mesh, 2 * n, 2)
    )
    yield over("all_gather", lambda c, x: c.all_gather(x, axis), x)
    yield over("all_gather tiled", lambda c, x: c.all_gather(x, axis, tiled=True), x)
    yield over("all_gather of scalars", lambda c, x: c.all_gather(x[0], axis), each(mesh, 1))
    yield over("all_gather to sharded", lambda c, x: c.all_gather(x, axis, to="sharded"), x)
    yield over("all_to_all", lambda c, x: c.all_to_all(x, axis, 0, 0), each(mesh, n, 3))
    yield over(
        "all_to_all tiled",
        lambda c, x: c.all_to_all(x, axis, 1, 0, tiled=True),
        each(mesh, 3, 2 * n),
    )


def dims(mesh: tuple[int, ...], axis: AxisName) -> Iterator[MappedCase]:
    n, x = size(mesh, axis), each(mesh, 2, 3)
    for dim, local in enumerate([(n, 2, 3), (2, n, 3), (2, 3, n)]):
        program = lambda c, x, dim=dim: c.psum_scatter(x, axis, scatter_dimension=dim)  # noqa: E731
        yield case_of(f"psum_scatter dim {dim}", mesh, axis, program, each(mesh, *local))
    tiled = lambda c, x: c.psum_scatter(x, axis, scatter_dimension=1, tiled=True)  # noqa: E731
    yield case_of("psum_scatter tiled dim 1", mesh, axis, tiled, each(mesh, 1, 2 * n))
    for dim in (1, 2, -1, -3):
        program = lambda c, x, dim=dim: c.all_gather(x, axis, axis=dim)  # noqa: E731
        yield case_of(f"all_gather axis {dim}", mesh, axis, program, x)
    for dim in (1, -1, -2):
        program = lambda c, x, dim=dim: c.all_gather(x, axis, axis=dim, tiled=True)  # noqa: E731
        yield case_of(f"all_gather tiled axis {dim}", mesh, axis, program, x)


def exchanged_dims(mesh: tuple[int, ...], axis: AxisName) -> Iterator[MappedCase]:
    n = size(mesh, axis)
    for split, concat in itertools.product(range(3), repeat=2):
        program = lambda c, x, s=split, t=concat: c.all_to_all(x, axis, s, t)  # noqa: E731
        local = [2, 3, 1]
        local[split] = n
        yield case_of(
            f"all_to_all {split} {concat}",
            mesh,
            axis,
            program,
            each(mesh, *local),
            grad=split == concat,
        )
    for split, concat in itertools.product(range(2), repeat=2):
        program = lambda c, x, s=split, t=concat: c.all_to_all(x, axis, s, t, tiled=True)  # noqa: E731
        local = [3, 2]
        local[split] = 2 * n
        yield case_of(f"all_to_all tiled {split} {concat}", mesh, axis, program, each(mesh, *local))


def permutations(n: int) -> dict[str, list[tuple[int, int]]]:
    """Return permutations by name, as pairs (source, destination) of n indices."""
    return {
        "round": [(i, (i + 1) % n) for i in range(n)],
        "round back": [((i + 1) % n, i) for i in range(n)],
        "mirrored": [(i, n - 1 - i) for i in range(n)],
        "one pair": [(n - 1, 0)],
        "no wrap": [(i, i + 1) for i in range(n - 1)],
        "nobody": [],
        "to itself": [(i, i) for i in range(n)],
        "first to itself, last two swap": [(0, 0), (n - 1, n - 2), (n - 2, n - 1)]
        if n > 2
        else [(0, 0)],
    }


def in_mesh_order(axis: AxisName) -> bool:
    return isinstance(axis, str) or list(axis) == sorted(axis)


def permutes(mesh: tuple[int, ...], axis: AxisName) -> Iterator[MappedCase]:
    """Yield cases with axes in mesh order; `DIFFERENCES` has the others."""
    if not in_mesh_order(axis):
        return
    x = each(mesh, 2, 3)
    for what, perm in permutations(size(mesh, axis)).items():
        yield case_of(
            f"ppermute {what}", mesh, axis, lambda c, x, perm=perm: c.ppermute(x, axis, perm), x
        )
    for what in ("round", "mirrored"):
        sources = [
            source
            for source, _ in sorted(permutations(size(mesh, axis))[what], key=lambda pair: pair[1])
        ]
        yield case_of(
            f"pshuffle {what}", mesh, axis, lambda c, x, p=sources: c.pshuffle(x, axis, p), x
        )


def places(mesh: tuple[int, ...], axis: AxisName) -> Iterator[MappedCase]:
    why = "JAX's indices are int32, torch's int64"
    yield case_of("axis_index", mesh, axis, lambda c: c.axis_index(axis), dtypes=why)
    yield case_of(
        "axis_index in arithmetic", mesh, axis, lambda c, x: x * c.axis_index(axis), each(mesh, 2)
    )
    yield case_of(
        "axis_index times a replicated value",
        mesh,
        axis,
        lambda c, x: x * c.axis_index(axis),
        same(2),
    )
    yield case_of("axis_size", mesh, axis, lambda c, x: x * c.axis_size(axis), each(mesh, 2))
    yield case_of("psum of a number", mesh, axis, lambda c, x: x * c.psum(2, axis), each(mesh, 2))
    yield case_of(
        "pcast",
        mesh,
        axis,
        lambda c, x: c.pcast(x, axis, to="varying") * c.axis_index(axis),
        same(2, 3),
    )


# -- several of them -------------------------------------------------------------------------------


def nested(mesh: tuple[int, ...], axis: AxisName) -> Iterator[MappedCase]:
    n, x = size(mesh, axis), each(mesh, 2, 3)
    over = lambda what, program, *inputs: case_of(what, mesh, axis, program, *inputs, second=True)  # noqa: E731
    yield over("psum of all_gather", lambda c, x: c.psum(c.all_gather(x, axis), axis), x)
    yield over("psum of psum", lambda c, x: c.psum(c.psum(x, axis), axis), x)
    yield over("psum of psum times x", lambda c, x: c.psum(c.psum(x, axis) * x, axis), x)
    yield over("mean taken off", lambda c, x: x - c.pmean(x, axis), x)
    yield over(
        "product with a replicated value", lambda c, x, w: c.psum(x @ w, axis), x, same(3, 2)
    )
    yield over(
        "product, scattered",
        lambda c, x, w: c.psum_scatter(x @ w, axis, tiled=True),
        each(mesh, n, 3),
        same(3, 2),
    )
    yield over("there and back", _there_and_back(axis), each(mesh, n, 2))
    yield over(
        "gathered and scattered", lambda c, x: c.psum_scatter(c.all_gather(x, axis) * x, axis), x
    )
    yield over("used twice", lambda c, x: c.psum(x * x, axis) * x + c.psum(x, axis), x)
    if in_mesh_order(axis):
        shift = permutations(n)["round"]
        yield over("halo", lambda c, x: x * c.ppermute(x, axis, shift) - x, x)


def _there_and_back(axis: AxisName) -> Callable[..., Any]:
    def program(c: Any, x: Any) -> Any:
        return c.all_to_all(c.all_to_all(x, axis, 0, 1, tiled=True) * 2, axis, 1, 0, tiled=True)

    return program


def trees(mesh: tuple[int, ...], axis: AxisName) -> Iterator[MappedCase]:
    x, y, z = each(mesh, 2, 3), each(mesh, 4), each(mesh, 1, 2, dtype="float32")
    n = size(mesh, axis)
    for what in ("psum", "pmean", "all_gather", "psum_scatter"):
        inputs = (
            (each(mesh, n, 3), each(mesh, n), each(mesh, n, 2, dtype="float32"))
            if "scatter" in what
            else (x, y, z)
        )
        program = lambda c, x, y, z, what=what: getattr(c, what)({"x": x, "yz": (y, [z])}, axis)  # noqa: E731
        yield case_of(f"{what} of a pytree", mesh, axis, program, *inputs)


def two_axes() -> Iterator[MappedCase]:
    """Yield cases with two collectives over different axes."""
    mesh, both = (2, 4), ("a", "b")
    x = each(mesh, 4, 2)
    programs: dict[str, Callable[..., Any]] = {
        "psum over b, then a": lambda c, x: c.psum(c.psum(x, "b"), "a"),
        "psum over b, all_gather over a": lambda c, x: c.all_gather(c.psum(x, "b"), "a"),
        "all_gather over b, psum over a": lambda c, x: c.psum(
            c.all_gather(x, "b", tiled=True), "a"
        ),
        "all_gather over b, then a": lambda c, x: c.all_gather(
            c.all_gather(x, "b", tiled=True), "a", tiled=True
        ),
        "psum_scatter over a, all_gather over b": lambda c, x: c.all_gather(
            c.psum_scatter(x, "a", tiled=True), "b"
        ),
        "psum_scatter over b, then a": lambda c, x: c.psum_scatter(
            c.psum_scatter(x, "b", tiled=True), "a", scatter_dimension=1
        ),
        "all_to_all over a, psum over b": lambda c, x: c.psum(
            c.all_to_all(x, "a", 1, 0, tiled=True), "b"
        ),
        "ppermute over a, then b": lambda c, x: c.ppermute(
            c.ppermute(x, "a", [(0, 1)]), "b", [(0, 3), (3, 1)]
        ),
        "psum over both of a product": lambda c, x: c.psum(c.psum(x, "a") * c.psum(x, "b"), both),
    }
    for what, program in programs.items():
        yield MappedCase(what, mesh, program, (x,), second=True)


def matmuls() -> Iterator[MappedCase]:
    mesh = (2, 4)
    w = Input((4, 8), (None, "b"))
    yield MappedCase(
        "matmul, x over a, w over b", mesh, lambda c, x, w: x @ w, (Input((6, 4), ("a",)), w)
    )
    yield MappedCase(
        "matmul, inner dim over b",
        mesh,
        lambda c, x, w: c.psum(x @ w, "b"),
        (Input((6, 8), ("a", "b")), Input((8, 3), ("b",))),
    )
    yield MappedCase(
        "matmul, inner dim over b, laid out over a",
        mesh,
        lambda c, x, w: c.psum(x @ w, "b"),
        (Input((6, 8), ("a", "b")), Input((8, 3), ("b",))),
        out=("a",),
    )


def dtypes() -> Iterator[MappedCase]:
    mesh, axis = (2, 4), "b"
    for dtype in ("float32", "bfloat16", "float16", "int64", "int32", "int8", "uint8", "bool"):
        yield from _of_dtype(mesh, axis, dtype)


def _of_dtype(mesh: tuple[int, ...], axis: str, dtype: str) -> Iterator[MappedCase]:
    x, whole = each(mesh, 4, 2, dtype=dtype), "float" not in dtype
    why = {
        "pmean": "JAX divides int64 in float64, torch in its default dtype"
        if dtype == "int64"
        else "",
        "psum": "JAX counts truth values in int32, torch in int64" if dtype == "bool" else "",
    }
    programs: dict[str, Callable[..., Any]] = {
        "psum": lambda c, x: c.psum(x, axis),
        "pmean": lambda c, x: c.pmean(x, axis),
        "psum_scatter": lambda c, x: c.psum_scatter(x, axis),
        "all_gather": lambda c, x: c.all_gather(x, axis),
        "all_to_all": lambda c, x: c.all_to_all(x, axis, 0, 1, tiled=True),
        "ppermute": lambda c, x: c.ppermute(x, axis, [(0, 1), (2, 2)]),
        "pmax": lambda c, x: c.pmax(x, axis),
        "pmin": lambda c, x: c.pmin(x, axis),
    }
    for what, program in programs.items():
        if (what, dtype) == ("psum_scatter", "bool"):
            continue
        differentiable = not whole and what not in ("pmax", "pmin")
        yield case_of(
            f"{what} of {dtype}",
            mesh,
            axis,
            program,
            x,
            grad=differentiable,
            dtypes=why.get(what, ""),
        )


# -- the whole -------------------------------------------------------------------------------------


def brief(mesh: tuple[int, ...], axis: AxisName) -> Iterator[MappedCase]:
    n, x = size(mesh, axis), each(mesh, 2, 3)
    over = lambda what, program, *inputs: case_of(what, mesh, axis, program, *inputs)  # noqa: E731
    yield from replicated_results(mesh, axis)
    yield over("psum", lambda c, x: c.psum(x, axis), x)
    yield over(
        "psum_scatter tiled", lambda c, x: c.psum_scatter(x, axis, tiled=True), each(mesh, 2 * n, 2)
    )
    yield over("all_gather", lambda c, x: c.all_gather(x, axis), x)
    yield over("all_to_all", lambda c, x: c.all_to_all(x, axis, 0, 0), each(mesh, n, 3))
    yield over(
        "all_to_all tiled",
        lambda c, x: c.all_to_all(x, axis, 1, 0, tiled=True),
        each(mesh, 3, 2 * n),
    )
    yield over("axis_index in arithmetic", lambda c, x: x * c.axis_index(axis), each(mesh, 2))
    if in_mesh_order(axis):
        yield over("ppermute", lambda c, x: c.ppermute(x, axis, permutations(n)["round"]), x)


FAMILIES = (
    *(
        (family, WHOLE)
        for family in (reductions, replicated_results, moves, permutes, places, nested, trees)
    ),
    *((family, EVERY_DIM) for family in (dims, exchanged_dims)),
    (brief, BRIEF),
)


def in_groups() -> Iterator[MappedCase]:
    """Yield cases of collectives inside index groups, and `pswapaxes`; `differences.py` has JAX's
    sums in groups.
    """
    for mesh, axis, groups in (
        ((8,), "a", [[0, 3], [5, 1], [2, 4], [7, 6]]),
        ((2, 4), "b", [[0, 2], [3, 1]]),
        ((2, 4), ("b", "a"), [[0, 1, 2, 3], [7, 6, 5, 4]]),
    ):
        n = len(groups[0])
        programs: dict[str, tuple[Callable[..., Any], tuple[int, ...]]] = {
            "all_gather": (
                lambda c, x, g, axis=axis: c.all_gather(x, axis, axis_index_groups=g),
                (3,),
            ),
            "all_gather tiled": (
                lambda c, x, g, axis=axis: c.all_gather(
                    x, axis, axis_index_groups=g, axis=1, tiled=True
                ),
                (2, 3),
            ),
            "all_to_all": (
                lambda c, x, g, axis=axis: c.all_to_all(x, axis, 0, 1, axis_index_groups=g),
                (n, 3),
            ),
            "all_to_all tiled": (
                lambda c, x, g, axis=axis: c.all_to_all(
                    x, axis, 1, 0, axis_index_groups=g, tiled=True
                ),
                (2, 2 * n),
            ),
            "psum_scatter": (
                lambda c, x, g, axis=axis: c.psum_scatter(x, axis, axis_index_groups=g),
                (n, 3),
            ),
            "psum_scatter tiled": (
                lambda c, x, g, axis=axis: c.psum_scatter(x, axis, axis_index_groups=g, tiled=True),
                (2 * n, 3),
            ),
            "pswapaxes": (
                lambda c, x, g, axis=axis: c.pswapaxes(x, axis, 1, axis_index_groups=g),
                (3, n),
            ),
        }
        for what, (program, local) in programs.items():
            # In groups the gradient of all_to_all has another shape than its operand: JAX's error.
            grad = what != "all_to_all"
            yield case_of(
                f"{what} in groups",
                mesh,
                axis,
                lambda c, x, p=program, g=groups: p(c, x, g),
                each(mesh, *local),
                grad=grad,
                second=grad,
            )
        for what in ("pmax", "pmin"):
            yield case_of(
                f"{what} in groups",
                mesh,
                axis,
                lambda c, x, w=what, a=axis, g=groups: getattr(c, w)(x, a, axis_index_groups=g),
                each(mesh, 2, 3),
                grad=False,
            )
        whole = size(mesh, axis)
        yield case_of(
            "pswapaxes",
            mesh,
            axis,
            lambda c, x, a=axis: c.pswapaxes(x, a, 0),
            each(mesh, whole, 3),
            second=True,
        )


CASES: dict[str, MappedCase] = {
    case.name: case
    for case in itertools.chain(
        (case for family, on in FAMILIES for mesh, axis in on for case in family(mesh, axis)),
        two_axes(),
        matmuls(),
        dtypes(),
        in_groups(),
    )
}
