"""Operators that join tensors: `cat`, the stacks, `pad`, `slice_scatter` and those made of them.

Along a split dim the result is cut evenly, and every operand is cut at the same boundaries of the
result. One exchange moves all operands there, only what changes ranks; then each rank joins its
parts.

    x, y over 2 ranks    [0 1 | 2]  [3 4 | 5 6]
    moved                [0 1 2 | ]  [3 | 4 5 6]
    cat                  [0 1 2 3 | 4 5 6]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ....layout.layout import Layout
from ....redistribute.autograd import redistribute_local, redistribute_locals
from ....redistribute.interval_exchange import Interval, IntervalExchange
from ..decomposition_utils import (
    evenly_split,
    from_parts,
    interval_of,
    is_split,
    layout_of,
    reduce_pending,
    sequential,
    splitting_axes,
    without_pending,
)
from ..notation import Rule, einrule
from ..propagation import joined_pending
from ..registry import decomposition, decomposition_maker
from .slicing import Piece
from .view import with_whole_dims

Decomposition = Callable[..., Any]


# -- cat -------------------------------------------------------------------------------------------


def _cat_rule(a: Any) -> Rule:
    ndim = max(t.ndim for t in a.tensors)
    dim = a.dim % ndim if ndim else 0
    sides = [  # torch accepts empty 1-d tensors in any cat
        " ".join(f"[c{i}]" if d == dim else f"d{d}" for d in range(ndim))
        if t.ndim == ndim
        else f"[e{i}]"
        for i, t in enumerate(a.tensors)
    ]
    right = " ".join("1" if d == dim else f"d{d}" for d in range(ndim))
    linear = (tuple(range(len(a.tensors))),)
    return einrule(f"{', '.join(sides)} -> {right}", *a.tensors, linear=linear, transparent=True)


@decomposition_maker("cat", "concat", "concatenate", rule=_cat_rule)
def _cat(tensors: Sequence[Tensor], dim: int = 0, **kwargs: Any) -> Decomposition | None:
    result = torch.cat(tensors, dim)  # type: ignore[arg-type]
    dim %= result.ndim
    layouts = [layout_of(t) for t in tensors]
    largest = max(layouts, key=lambda layout: (layout.nbytes, layout.is_fully_replicated))
    if any(t.ndim != result.ndim for t in tensors) or not splitting_axes(largest, dim):
        return None
    target = evenly_split(largest, dim, result.shape[dim]).replace(dtype=result.dtype)
    target = target.replace(target.spec.with_unreduced(_common_pending(layouts)))
    bounds = accumulate([layout.shape[dim] for layout in layouts], initial=0)
    targets = [
        interval_of(target, dim, a, b).replace(dtype=x.dtype)
        for (a, b), x in zip(pairwise(bounds), layouts, strict=True)
    ]
    pairs = list(zip(layouts, targets, strict=True))

    return lambda tensors, *_, **__: from_parts(
        target,
        lambda *parts: torch.cat(redistribute_locals(parts, pairs), dim).to(result.dtype),
        *tensors,
    )


def _common_pending(layouts: Sequence[Layout]) -> dict[str, str]:
    """Return the kinds with which the result is pending: those of all, if they are alike."""
    if len({layout.dtype for layout in layouts}) > 1:
        return {}
    alike = len({layout.spec.unreduced for layout in layouts}) == 1
    free = all(axis not in layout.dim_of for axis in joined_pending(layouts) for layout in layouts)
    return layouts[0].pending if alike else joined_pending(layouts) if free else {}


def at_least(x: Any, ndim: int) -> Any:
    """Return the tensor with at least so many dims, new ones where `atleast_3d` puts them."""
    if x.ndim >= ndim:
        return x
    if x.ndim == 0:
        return x.reshape([1] * ndim)
    return x.unsqueeze(-1) if x.ndim == 2 else x[None, :, None] if ndim == 3 else x[None]


def _as_list(tensors: Sequence[Any]) -> Sequence[Any]:
    return tensors[0] if len(tensors) == 1 and isinstance(tensors[0], (list, tuple)) else tensors


@decomposition(
    "atleast_1d",
    "atleast_2d",
    "atleast_3d",
    also=(torch._VF.atleast_1d, torch._VF.atleast_2d, torch._VF.atleast_3d),  # type: ignore[attr-defined]
    with_func=True,
)
def _atleast(func: Any, *tensors: Any) -> Any:
    several, ndim = _as_list(tensors), int(func.__name__[len("atleast_")])
    results = tuple(at_least(x, ndim) for x in several)
    return results if several is not tensors or len(results) != 1 else results[0]


decomposition("vstack", "row_stack")(lambda tensors: torch.cat([at_least(x, 2) for x in tensors]))
decomposition("dstack")(lambda tensors: torch.cat([at_least(x, 3) for x in tensors], 2))
decomposition("hstack")(
    lambda tensors: torch.cat([at_least(x, 1) for x in tensors], 0 if tensors[0].ndim < 2 else 1)
)
decomposition("column_stack")(
    lambda tensors: torch.cat([x.reshape(-1, 1) if x.ndim < 2 else x for x in tensors], 1)
)


@decomposition("block_diag", check=torch.block_diag)
def _block_diag(*tensors: Any) -> Any:
    """Pad each block with zeros to the whole width, and concatenate the rows."""
    blocks = [at_least(x, 2) for x in tensors]
    ends = list(accumulate(x.shape[1] for x in blocks))
    return torch.cat(
        [F.pad(x, (end - x.shape[1], ends[-1] - end)) for x, end in zip(blocks, ends, strict=True)]
    )


# -- pad -------------------------------------------------------------------------------------------


def _sides(ndim: int, pad: Sequence[int]) -> dict[int, tuple[int, int]]:
    """Return the lengths before and after each padded dim."""
    return {
        ndim - 1 - i: (pad[2 * i], pad[2 * i + 1])
        for i in range(len(pad) // 2)
        if pad[2 * i] or pad[2 * i + 1]
    }


def _pad_rule(a: Any) -> Rule:
    """Return the rule: padded dims must not be split; padding with zeros is linear."""
    with_zeros = with_whole_dims(a.input, list(_sides(a.input.ndim, a.pad)), local=_pad_local)
    if a.mode == "constant" and not a.value:
        return with_zeros
    return replace(with_zeros, linear=(), transparent=False)


def _pad_local(
    local: Tensor, pad: Sequence[int], mode: str = "constant", value: float | None = None
) -> Tensor:
    """Pad this rank's part; an empty one has no elements to reflect or repeat."""
    return F.pad(
        local, pad, mode if local.numel() else "constant", value if mode == "constant" else None
    )


@decomposition_maker("pad", rule=_pad_rule)
def _pad(
    input: Tensor, pad: Sequence[int], mode: str = "constant", value: float | None = None
) -> Decomposition | None:
    F.pad(input, pad, mode, value if mode == "constant" else None)
    sides = _sides(input.ndim, pad)
    if not is_split(input, sides):
        return None
    if mode == "constant":
        return _constant_pad(layout_of(input), sides, value)
    split = {d: lengths for d, lengths in sides.items() if is_split(input, [d])}
    if mode == "circular":
        _check_wraps_once(input, split)
    rest = [0 if input.ndim - 1 - i // 2 in split else n for i, n in enumerate(pad)]
    return _mirrored_pad(layout_of(input), split, mode, rest)


def _check_wraps_once(input: Tensor, sides: dict[int, tuple[int, int]]) -> None:
    """Raise a ValueError for a border longer than its dim after negative lengths cut it."""
    for d, (before, after) in sides.items():
        length = input.shape[d] + min(before, 0) + min(after, 0)
        if max(before, after) > length:
            raise ValueError(
                f"pad: mode='circular' with {(before, after)} cuts dim {d} of {input.shape[d]} to "
                f"{length}, too few for a border of {max(before, after)}; cut with narrow first "
                "and pad the result in several steps"
            )


def _constant_pad(
    layout: Layout, sides: dict[int, tuple[int, int]], value: float | None
) -> Decomposition:
    """Cut the parts by negative lengths, then move them to where the padded result has them."""
    source = without_pending(layout) if value else layout
    piece = Piece(
        source,
        {
            d: range(layout.shape[d])[max(0, -a) : layout.shape[d] - max(0, -b)]
            for d, (a, b) in sides.items()
        },
    )
    target = source
    lengths = {d: (max(a, 0), max(b, 0)) for d, (a, b) in sides.items()}
    for d, (a, b) in lengths.items():
        target = evenly_split(target, d, a + piece.cut.shape[d] + b)
    middle = target
    for d, (a, _) in lengths.items():
        middle = interval_of(middle, d, a, a + piece.cut.shape[d])
    around = _around(middle, target, lengths)

    def local_pad(local: Tensor, value: Any) -> Tensor:
        return F.pad(
            redistribute_local(piece.part(local), piece.cut, middle), around, "constant", value
        )

    def run(input: Any, pad: Any, mode: str = "constant", value: Any = None) -> Any:
        return from_parts(
            target, partial(local_pad, value=value), reduce_pending(input) if value else input
        )

    return run


def _around(middle: Layout, target: Layout, lengths: dict[int, tuple[int, int]]) -> list[int]:
    """Return the padding of this rank's part on both sides of each dim, last dim first."""
    around = []
    for d in reversed(range(len(target.shape))):
        start, stop = target.box[d]
        before = min(max(0, lengths.get(d, (0, 0))[0] - start), stop - start)
        held = middle.box[d][1] - middle.box[d][0]
        around += [before, stop - start - held - before]
    return around


def _source(mode: str, before: int, size: int, after: int, index: int) -> int:
    """Return the index that a padded dim repeats at `index`, after negative lengths cut it."""
    at = index - before
    if mode == "replicate":
        return min(max(at, 0), size - 1)
    if mode == "circular":
        first, stop = max(0, -before), size - max(0, -after)
        return first + (at - first) % (stop - first)
    return size - 1 - abs(size - 1 - abs(at))


def _mirrored_pad(
    layout: Layout, split: dict[int, tuple[int, int]], mode: str, rest: Sequence[int]
) -> Decomposition:
    """Pad split dims one after the other, each fetching its border; then the others together."""
    fetches = []
    for d, (before, after) in split.items():
        size = layout.shape[d]
        target = evenly_split(layout, d, before + size + after)
        fetches.append(
            IntervalExchange(layout, target, d, partial(_pad_sources, mode, before, size, after))
        )
        layout = target

    padded = sequential(layout, *fetches)
    return (lambda input, *_, **__: F.pad(padded(input), rest, mode)) if any(rest) else padded


def _pad_sources(
    mode: str, before: int, size: int, after: int, start: int, stop: int
) -> list[Interval]:
    """Return the source indices of the border one by one, and those between as one interval."""
    low, high = (min(max(n, start), stop) for n in (max(before, 0), before + size))
    left, right = (
        map(partial(_source, mode, before, size, after), range(*ends))
        for ends in ((start, low), (high, stop))
    )
    return [
        *((i, i + 1) for i in left),
        (low - before, high - before),
        *((i, i + 1) for i in right),
    ]


# -- writing into a copy ---------------------------------------------------------------------------


def _replace_indices(input: Any, src: Any, dim: int, chosen: range) -> Any:
    """Replace chosen indices of a dim by `src`, which is moved to the ranks that have them."""
    if input._layout.pending != src._layout.pending or input.dtype is not src.dtype:
        input, src = reduce_pending(input), reduce_pending(src)
    cut = Piece(input._layout, {dim: chosen})
    target = cut.cut.replace(dtype=src.dtype)

    def local_scatter(local: Tensor, part: Tensor) -> Tensor:
        index = cut.index[dim]
        return torch.slice_scatter(
            local,
            redistribute_local(part, src._layout, target),
            dim,
            index.start,
            index.stop,
            index.step or 1,
        )

    return from_parts(input._layout, local_scatter, input, src)


@decomposition("slice_scatter", check=torch.slice_scatter)
def _slice_scatter(
    input: Any, src: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> Any:
    dim %= input.ndim
    return _replace_indices(input, src, dim, range(input.shape[dim])[start:end:step])


@decomposition("select_scatter", check=torch.select_scatter)
def _select_scatter(input: Any, src: Any, dim: int, index: int) -> Any:
    dim %= input.ndim
    index %= input.shape[dim]
    return _replace_indices(input, src.unsqueeze(dim), dim, range(index, index + 1))


@decomposition("diagonal_scatter", check=torch.diagonal_scatter)
def _diagonal_scatter(input: Any, src: Any, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Any:
    """Write `src` down the rows, over all columns, where a mask of the diagonal is true."""
    above = max(0, -offset)
    padding = (above, input.shape[dim1] - src.shape[-1] - above)
    last = input.movedim((dim1, dim2), (-2, -1))
    mask = torch.ones_like(last, dtype=torch.bool).tril(offset).triu(offset)
    return torch.where(mask, F.pad(src, padding).unsqueeze(-1), last).movedim(
        (-2, -1), (dim1, dim2)
    )


# -- grids -----------------------------------------------------------------------------------------


@decomposition_maker("meshgrid", also=(torch._VF.meshgrid,))  # type: ignore[attr-defined]
def _meshgrid(*tensors: Any, indexing: str | None = None) -> Decomposition:
    container = type(torch.meshgrid(*tensors, indexing=indexing or "ij"))
    swapped = indexing == "xy" and len(_as_list(tensors)) > 1

    def run(*tensors: Any, indexing: str | None = None) -> Any:
        vectors = list(_as_list(tensors))
        order = [1, 0, *range(2, len(vectors))] if swapped else list(range(len(vectors)))
        shape = [vectors[i].numel() for i in order]
        sides = [
            x.reshape([-1 if order[d] == i else 1 for d in range(len(vectors))])
            for i, x in enumerate(vectors)
        ]
        return container(side.expand(shape) for side in sides)

    return run


@decomposition("cartesian_prod", check=torch.cartesian_prod)
def _cartesian_prod(*tensors: Any) -> Any:
    grids = [grid.flatten() for grid in torch.meshgrid(*tensors, indexing="ij")]
    return torch.stack(grids, 1) if len(grids) > 1 else grids[0]


@decomposition_maker("kron")
def _kron(input: Tensor, other: Tensor) -> Decomposition:
    """Multiply each element of one by each of the other, in separate dims that are then merged."""
    ndim, shape = max(input.ndim, other.ndim), torch.kron(input, other).shape
    outer, inner = ([1] * (ndim - x.ndim) + list(x.shape) for x in (input, other))

    def run(input: Any, other: Any) -> Any:
        one = input.reshape([n for size in outer for n in (size, 1)])
        return (one * other.reshape([n for size in inner for n in (1, size)])).reshape(shape)

    return run


@decomposition_maker("torch.vander")
def _vander(x: Tensor, N: int | None = None, increasing: bool = False) -> Decomposition | None:
    result = torch.vander(x, N, increasing)
    count = result.shape[-1]
    return partial(_powers, count, result.dtype, increasing) if count else None


@decomposition_maker("linalg.vander")
def _linalg_vander(x: Tensor, *, N: int | None = None) -> Decomposition:
    result = torch.linalg.vander(x, N=N)
    return partial(_powers, result.shape[-1], result.dtype, True)


def _powers(count: int, dtype: torch.dtype, rising: bool, x: Any, *_: Any, **__: Any) -> Any:
    """Return powers along a new last dim, as cumulative products."""
    products = x.unsqueeze(-1).expand(*x.shape, count - 1).cumprod(-1)
    powers = torch.cat([torch.ones_like(x, dtype=dtype).unsqueeze(-1), products], -1)
    return powers if rising else powers.flip(-1)
