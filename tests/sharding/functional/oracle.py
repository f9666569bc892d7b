"""Definitions of the collectives, each in a line or two on the list of parts along the axis.

    parts[i]     the part of the rank at index i along the axis
    result[i]    its result

Derivatives are those of the definition, by torch.autograd. `Oracle` runs the programs of `table.py`
by these definitions for all ranks at once: a value of a program is an `Everyone`, the list of its
values on all ranks.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from tests.sharding.functional.table import loss, weights

Parts = list[Tensor]


# -- definitions -----------------------------------------------------------------------------------


def psum(parts: Parts) -> Parts:
    """Return the sum on each rank. Booleans are counted."""
    return [reduce(torch.add, [p.long() if p.dtype == torch.bool else p for p in parts])] * len(
        parts
    )


def pmean(parts: Parts) -> Parts:
    return [total / len(parts) for total in psum(parts)]


def pmax(parts: Parts) -> Parts:
    """Return the maximum. Its gradient is divided equally among the ranks that hold it, as in
    `amax`.
    """
    return [torch.stack(parts).amax(0)] * len(parts)


def pmin(parts: Parts) -> Parts:
    return [torch.stack(parts).amin(0)] * len(parts)


def psum_scatter(parts: Parts, scatter_dimension: int = 0, tiled: bool = False) -> Parts:
    """Return each rank's slice of the sum along the dim, which is removed, or its chunk."""
    return cut(psum(parts)[0], scatter_dimension, len(parts), tiled)


def all_gather(parts: Parts, axis: int = 0, tiled: bool = False) -> Parts:
    """Return all parts, stacked along a new dim or concatenated along an existing one."""
    return [(torch.cat if tiled else torch.stack)(parts, axis)] * len(parts)


def all_to_all(parts: Parts, split_axis: int, concat_axis: int, tiled: bool = False) -> Parts:
    """Split each part; send piece j to index j, which concatenates the received pieces."""
    pieces = [cut(part, split_axis, len(parts), tiled) for part in parts]
    return [
        (torch.cat if tiled else torch.stack)(list(column), concat_axis)
        for column in zip(*pieces, strict=True)
    ]


def pswapaxes(parts: Parts, axis: int) -> Parts:
    return all_to_all(parts, axis, axis)


def ppermute(parts: Parts, perm: Sequence[tuple[int, int]]) -> Parts:
    """Send each source's part to its destination; zeros where nothing is received."""
    source = {destination: source for source, destination in perm}
    return [
        parts[source[i]] if i in source else part * torch.zeros_like(part)
        for i, part in enumerate(parts)
    ]


def pshuffle(parts: Parts, perm: Sequence[int]) -> Parts:
    return [parts[source] for source in perm]


def pbroadcast(parts: Parts, source: int) -> Parts:
    return [parts[source]] * len(parts)


def ragged_all_to_all(
    operand: Parts,
    output: Parts,
    input_offsets: Parts,
    send_sizes: Parts,
    output_offsets: Parts,
    recv_sizes: Parts,
) -> Parts:
    """Send the j-th group of row slices to index j; the sender gives their offsets in the
    receiver's output.
    """
    results, places = [x.clone() for x in output], range(len(operand))
    for source, place, (at, sent, to) in itertools.product(
        places, places, [(input_offsets, send_sizes, output_offsets)]
    ):
        slices = len(at[source]) // len(operand)
        for i in range(place * slices, (place + 1) * slices):
            a, n, b = int(at[source][i]), int(sent[source][i]), int(to[source][i])
            results[place][b : b + n] = operand[source][a : a + n]
    return results


def cut(whole: Tensor, dim: int, n: int, tiled: bool) -> Parts:
    """Return n parts: slices of a dim of size n, which is removed, or chunks as in `torch.chunk`,
    with empty ones at the end.
    """
    if not tiled:
        return list(whole.unbind(dim))
    lengths = (
        [len(chunk) for chunk in torch.arange(whole.shape[dim]).chunk(n)]
        if whole.shape[dim]
        else []
    )
    return list(whole.split([*lengths, *[0] * (n - len(lengths))], dim))


# -- programs --------------------------------------------------------------------------------------


class Everyone:
    """A value of a program on every rank. Operators and methods are those of the tensors, rank by
    rank.
    """

    def __init__(self, values: Sequence[Tensor]) -> None:
        self.values = list(values)

    def __getattr__(self, name: str) -> Callable[..., Everyone]:
        return lambda *args: _each(lambda x, *rest: getattr(x, name)(*rest), self, *args)

    def __getitem__(self, index: Any) -> Everyone:
        return _each(lambda x: x[index], self)

    def __add__(self, other: Any) -> Everyone:
        return _each(torch.add, self, other)

    def __sub__(self, other: Any) -> Everyone:
        return _each(torch.sub, self, other)

    def __mul__(self, other: Any) -> Everyone:
        return _each(torch.mul, self, other)

    def __truediv__(self, other: Any) -> Everyone:
        return _each(torch.div, self, other)

    def __matmul__(self, other: Any) -> Everyone:
        return _each(torch.matmul, self, other)


def _each(function: Callable[..., Tensor], *args: Any) -> Everyone:
    n = next(len(a.values) for a in args if isinstance(a, Everyone))
    return Everyone(
        [function(*(a.values[i] if isinstance(a, Everyone) else a for a in args)) for i in range(n)]
    )


class Oracle:
    """The collectives by name, for the programs of the table, on a mesh of this shape with axes a,
    b, ...

    Attributes:
        mesh: the shape.
    """

    def __init__(self, mesh: Sequence[int]) -> None:
        self.mesh = tuple(mesh)

    def groups(self, axis_name: str | Sequence[str]) -> list[list[int]]:
        """Return ranks that differ only along these axes, in the order of the names, major to
        minor.
        """
        ranks = torch.arange(math.prod(self.mesh)).reshape(self.mesh)
        axes = ["abcd".index(name) for name in axis_name]
        return (
            ranks.movedim(axes, list(range(len(axes))))
            .reshape(self.axis_size(axis_name), -1)
            .T.tolist()
        )

    def axis_size(self, axis_name: str | Sequence[str]) -> int:
        return math.prod(self.mesh["abcd".index(name)] for name in axis_name)

    def axis_index(self, axis_name: str | Sequence[str]) -> Everyone:
        place = {rank: i for group in self.groups(axis_name) for i, rank in enumerate(group)}
        return Everyone([torch.tensor(place[rank]) for rank in range(math.prod(self.mesh))])

    def pcast(self, x: Any, axis_name: str | Sequence[str], *, to: str) -> Any:
        """Cast to another type; a pending sum has the values at the first index."""
        return self.along(axis_name, _keep_first, x) if to == "pending" else x

    def along(
        self, axis_name: str | Sequence[str], definition: Callable[..., Parts], *xs: Any
    ) -> Any:
        """Apply the definition to every group of ranks, and to every leaf of a pytree."""
        return tree_map(lambda *leaves: self._along(axis_name, definition, *leaves), *xs)

    def _along(
        self, axis_name: str | Sequence[str], definition: Callable[..., Parts], *xs: Any
    ) -> Everyone:
        results: dict[int, Tensor] = {}
        xs = tuple(
            x if isinstance(x, Everyone) else Everyone([torch.tensor(x)] * math.prod(self.mesh))
            for x in xs
        )
        for group in self.groups(axis_name):
            parts = definition(*([x.values[rank] for rank in group] for x in xs))
            results |= dict(zip(group, parts, strict=True))
        return Everyone([results[rank] for rank in sorted(results)])

    def __getattr__(self, name: str) -> Callable[..., Any]:
        definition = globals()[name]

        def collective(
            x: Any,
            axis_name: Any,
            *args: Any,
            to: str = "",
            sizes: Any = None,
            axis_index_groups: Any = None,
            **options: Any,
        ) -> Any:
            def inside(parts: Parts) -> Parts:
                results: dict[int, Tensor] = {}
                for group in axis_index_groups or [range(len(parts))]:
                    results |= dict(
                        zip(
                            group,
                            definition([parts[i] for i in group], *args, **options),
                            strict=True,
                        )
                    )
                return [results[i] for i in range(len(parts))]

            return self.along(axis_name, inside, x)

        return collective

    def ragged_all_to_all(self, *xs: Everyone, axis_name: str | Sequence[str]) -> Everyone:
        return self._along(axis_name, ragged_all_to_all, *xs)


def _keep_first(parts: Parts) -> Parts:
    return [parts[0], *(torch.zeros_like(part) for part in parts[1:])]


# -- global tensors --------------------------------------------------------------------------------


def spread(whole: Tensor, spec: Sequence[Any], oracle: Oracle) -> Everyone:
    """Return every rank's part of a tensor with an even `spec`."""
    parts = [whole] * math.prod(oracle.mesh)
    for dim, axes in enumerate(spec):
        if axes:
            places, n = oracle.axis_index(axes).values, oracle.axis_size(axes)
            parts = [
                part.chunk(n, dim)[int(place)] for part, place in zip(parts, places, strict=True)
            ]
    return Everyone(parts)


def put_together(x: Everyone, spec: Sequence[Any] | None, oracle: Oracle) -> Tensor:
    """Return the global tensor of a result that `spec` shards along dim 0 or not at all; without a
    spec, the stacked parts.
    """
    if spec is None:
        return torch.stack(x.values)
    if not spec[0]:
        return x.values[0]
    return torch.cat([x.values[rank] for rank in oracle.groups(spec[0])[0]])


def evaluate(
    mesh: Sequence[int],
    program: Callable[..., Any],
    inputs: Sequence[Tensor],
    specs: Sequence[Any],
    out: Sequence[Any] | None,
) -> list[Tensor]:
    """Return the program's results by definition, leaf by leaf."""
    oracle = Oracle(mesh)
    result = program(
        oracle, *(spread(x, spec, oracle) for x, spec in zip(inputs, specs, strict=True))
    )
    return [put_together(leaf, out, oracle) for leaf in tree_leaves(result)]


def derivatives(
    results: Sequence[Tensor], by: Sequence[Tensor], second: bool
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the gradients of the common losses, and those of the gradients' weighted sum."""
    total: Any = sum(
        loss(y.double(), torch.from_numpy(weights(y.shape, k)).to(y.device))
        for k, y in enumerate(results)
    )
    grads = list(torch.autograd.grad(total, by, create_graph=second))
    if not second:
        return grads, []
    again: Any = sum(
        (g.double() * torch.from_numpy(weights(g.shape, k)).to(g.device)).sum()
        for k, g in enumerate(grads)
    )
    again += sum((x * 0).sum() for x in by)  # a gradient that nothing has gone into is a constant
    return grads, list(torch.autograd.grad(again, by))
