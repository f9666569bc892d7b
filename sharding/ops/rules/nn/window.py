"""Windows that slide along split dims.

Each rank fetches only the elements that its own part of the result is computed from.

x over 2 ranks, windows of 3   [0 1 2 3 | 4 5 6 7]
fetched                        [0 1 2 3 4] on rank 0, [3 4 5 6 7] on rank 1: a halo of one element
result                         [0 1 2 3 | 4 5 6 7], padded with one element at either end
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils import _pytree as pytree

from ....autograd.engine_hooks import transforming
from ....layout.layout import Layout
from ....layout.shard_holders import intervals
from ....layout.spec import Cut, P
from ....redistribute.interval_exchange import Interval, IntervalExchange, Wanted
from ....trees import tensors_in
from ..decomposition_utils import (
    all_from_parts,
    layout_of,
    with_elements,
    with_part_sizes,
)
from ..notation import Rule
from ..propagation import assign

Parts = Callable[..., Any]  # from this rank's parts of the operands to its parts of the results


def names_by_dims(*names: str) -> list[str]:
    """Return `max_pool1d`, `max_pool2d` and `max_pool3d` for `max_pool{}d`."""
    return [name.format(n) for name in names for n in (1, 2, 3)]


def space_dims(func: Any) -> int:
    """Return the number of dims of space, which is the digit in the name of the operator."""
    return int(next(filter(str.isdigit, func.__name__)))


def per_dim(value: Any, n: int) -> tuple[int, ...]:
    """Return an argument such as `stride` per dim; it may be one number for all dims."""
    values = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    return values * n if len(values) == 1 else values


class Window(NamedTuple):
    """A window that slides along one dim.

    Attributes:
        length: elements of the dim.
        size, stride, dilation: of the window.
        before: padding before the first element.
    """

    length: int
    size: int
    stride: int = 1
    dilation: int = 1
    before: int = 0

    def span(self, start: int, stop: int) -> Interval:
        """Return the positions that results [start, stop) are computed from, with padding."""
        first = start * self.stride - self.before
        return first, first + (stop - start - 1) * self.stride + self.dilation * (self.size - 1) + 1

    def elements(self, start: int, stop: int) -> Interval:
        """Return those of `span` that are elements."""
        if start == stop:
            return 0, 0
        low, high = (min(max(at, 0), self.length) for at in self.span(start, stop))
        return low, high

    def padding(self, start: int, stop: int) -> Interval:
        """Return how many of `span` are padding, before and after the elements."""
        (first, end), (low, high) = self.span(start, stop), self.elements(start, stop)
        missing = end - first - (high - low)
        before = min(max(0, low - first), missing)  # all of them, if none is an element
        return before, missing - before


class Halo:
    """`halo(local)`: the elements that this rank's part of the result is computed from.

    Args:
        src: the layout of the operand.
        dst: the layout of the result, which has the same dims.
        elements: dim -> `(start, stop)` of a part of the result -> the interval of the operand that
            it is computed from.

    Communication: for each split dim one all_to_all, where a rank needs elements of another one;
    the same backward.
    """

    def __init__(
        self, src: Layout, dst: Layout, elements: Mapping[int, Callable[[int, int], Interval]]
    ) -> None:
        self.fetches = []
        for dim, interval in elements.items():
            if src.spec.dims[dim]:
                self.fetches.append(IntervalExchange(src, dst, dim, _one(interval)))
                fetched = [interval(part.start, part.stop) for part in intervals(dst, dim)]
                src = with_part_sizes(src, dim, [stop - start for start, stop in fetched])
        self.shape = src.local_shape

    def __call__(self, local: Tensor) -> Tensor:
        for fetch in self.fetches:
            local = fetch(local)
        return local


def _one(interval: Callable[[int, int], Interval]) -> Wanted:
    return lambda start, stop: [interval(start, stop)]


# -- decompositions over split dims ----------------------------------------------------------------


def on_parts(
    rule: Rule, result: Any, dims: Sequence[int], bind: Callable[..., Parts]
) -> Callable[..., Any]:
    """Return a function that redistributes the operands of a rule and runs a function of the parts.

    Args:
        rule: the rule; `dims` of the result may differ in size from their factors.
        result: the operator's result or results on meta tensors.
        dims: those dims; each result is split evenly along them.
        bind: `(layouts of the operands, layouts of the results) -> function of the parts`.

    Returns:
        a function of the operands in the order of the rule.
    """
    chosen = assign(rule, [layout_of(x) for x in rule.operands])
    results = [result] if isinstance(result, Tensor) else list(result)
    specs = chosen.outputs * len(results) if len(chosen.outputs) == 1 else chosen.outputs
    mesh: Any = chosen.targets[0].mesh
    pairs = zip(specs, results, strict=True)
    layouts = [Layout.of(mesh, _cut_evenly(spec, dims), r.shape, r.dtype) for spec, r in pairs]
    local = bind(chosen.targets, layouts) if mesh.coordinate is not None else None

    def run(*operands: Any) -> Any:
        moved = [
            x.redistribute(target.spec) for x, target in zip(operands, chosen.targets, strict=True)
        ]
        outs = all_from_parts(layouts, lambda *parts: _several(local(*parts)), *moved)  # type: ignore[misc]
        return outs[0] if isinstance(result, Tensor) else type(result)(outs)

    return run


def _several(parts: Any) -> Sequence[Tensor]:
    return [parts] if isinstance(parts, Tensor) else parts


def _cut_evenly(spec: P, dims: Sequence[int]) -> P:
    cuts = [
        tuple(Cut((a,)) for cut in old for a in cut.axes) if d in dims else old
        for d, old in enumerate(spec.cuts)
    ]
    return P.of_cuts(cuts, dict(spec.unreduced))


# -- parts without elements ------------------------------------------------------------------------


def unless_empty(
    func: Parts, linear: bool = False
) -> Callable[[Sequence[Layout], Sequence[Layout]], Parts]:
    """Return a `bind` of a rule: torch's own function, or for an empty part its empty results.

    Args:
        linear: the gradient does not depend on the operand. In torch those of pooling and
            convolution do, with a derivative of zero.
    """

    def bind(targets: Sequence[Layout], results: Sequence[Layout]) -> Parts:
        if all(0 not in layout.local_shape for layout in results):
            return func
        return lambda *args, **kwargs: _empty_results(results, linear, [*args, *kwargs.values()])

    return bind


def with_a_row(func: Parts) -> Callable[[Sequence[Layout], Sequence[Layout]], Parts]:
    """Return a `bind` of a rule: torch's own function, for an empty part on a zero per empty dim.

    Unlike `unless_empty`, this saves for backward what other ranks save: for an operator made of
    several, which saves some of its operands.
    """

    def bind(targets: Sequence[Layout], results: Sequence[Layout]) -> Parts:
        if not is_empty(*results):
            return func

        def local(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = pytree.tree_map_only(Tensor, with_elements, (args, kwargs))
            out = func(*args, **kwargs)
            parts = [out] if isinstance(out, Tensor) else out
            cut = [
                x[tuple(map(slice, layout.local_shape))]
                for x, layout in zip(parts, results, strict=True)
            ]
            return cut[0] if isinstance(out, Tensor) else tuple(cut)

        return local

    return bind


def _empty_results(layouts: Sequence[Layout], linear: bool, values: Sequence[Any]) -> Any:
    tensors = list(tensors_in(values))
    empty = [tensors[0].new_zeros(x.local_shape, dtype=x.dtype) for x in layouts]
    results = tuple(with_graph_of(part, *tensors, linear=linear) for part in empty)
    return results[0] if len(results) == 1 else results


def with_graph_of(out: Tensor, *tensors: Tensor, linear: bool = False) -> Tensor:
    """Return `out` with these tensors added to its autograd graph, as on other ranks.

    Unless the operator is linear, they must be in the graph of the gradient too, and saved for
    backward, frozen ones as well: what autograd unpacks makes a unit gather its parameters. So
    products of empty parts of them are added.
    """
    values = [x for x in tensors if x.is_floating_point() or x.is_complex()]
    in_graph = [x for x in values if x.requires_grad or (transforming() and x.is_floating_point())]
    if not in_graph or not (out.dtype.is_floating_point or out.dtype.is_complex):
        return out
    nothing: Any = sum(_nothing_of(x) for x in in_graph)
    if linear:
        return out + nothing.sum().to(out.dtype)
    products: Any = sum((nothing * _nothing_of(x)).sum() for x in values)
    return out + products.to(out.dtype)


def _nothing_of(x: Tensor) -> Tensor:
    """Return no elements of a tensor, a view: autograd saves the tensor's memory with it."""
    return (x.narrow(0, 0, 0) if x.ndim else x.reshape(1)[:0]).reshape(0)


def is_empty(*layouts: Layout) -> bool:
    """Return whether this rank's part of any of them has no elements."""
    return any(math.prod(layout.local_shape) == 0 for layout in layouts)
