"""Operators that put tensors next to each other: `cat`, the stacks, `pad`, `slice_scatter` and what is made of them.

Along a split dim the result is cut evenly, and every operand is cut where that cuts its place in the result. One exchange
takes all operands there, of what changes ranks only; then each rank joins its parts.

    x, y over 2 ranks    [0 1 | 2]  [3 4 | 5 6]
    moved                [0 1 2 | ]  [3 | 4 5 6]
    cat                  [0 1 2 3 | 4 5 6]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ....layout.layout import Layout
from ....redistribute.autograd import redistribute_local, redistribute_locals
from ....redistribute.interval_exchange import Fetch, Interval
from ..decomposition_utils import evenly, from_parts, in_turn, interval_of, layout_of, settled, splits, splitting_axes
from ..registry import form
from .slicing import Piece

Form = Callable[..., Any]


def _unreduced(layout: Layout, pending: dict[str, str]) -> Layout:
    return layout.replace(layout.spec.with_unreduced(pending))


# -- cat --------------------------------------------------------------------------------------------------------------


@form("cat", "concat", "concatenate")
def _cat(tensors: Sequence[Tensor], dim: int = 0, **kwargs: Any) -> Form | None:
    result = torch.cat(tensors, kwargs.get("axis", dim))  # type: ignore[arg-type]
    dim = kwargs.get("axis", dim) % result.ndim
    layouts = [layout_of(t) for t in tensors]
    largest = max(layouts, key=lambda layout: (layout.nbytes, layout.is_fully_replicated))
    if any(t.ndim != result.ndim for t in tensors) or not splitting_axes(largest, dim):
        return None
    target = _unreduced(evenly(largest, dim, result.shape[dim]), _common_pending(layouts)).replace(dtype=result.dtype)
    bounds = accumulate([layout.shape[dim] for layout in layouts], initial=0)
    targets = [interval_of(target, dim, a, b).replace(dtype=x.dtype) for (a, b), x in zip(pairwise(bounds), layouts, strict=True)]
    pairs = list(zip(layouts, targets, strict=True))
    joined = partial(_joined, pairs, dim, result.dtype)
    return lambda tensors, *_, **__: from_parts(target, joined, *tensors)


def _common_pending(layouts: Sequence[Layout]) -> dict[str, str]:
    """What all operands are pending with: putting them together commutes with the reduction."""
    alike = len({(layout.spec.unreduced, layout.dtype) for layout in layouts}) == 1
    return layouts[0].pending if alike else {}


def _joined(pairs: Sequence[tuple[Layout, Layout]], dim: int, dtype: torch.dtype, *locals_: Tensor) -> Tensor:
    return torch.cat(redistribute_locals(locals_, pairs), dim).to(dtype)


def at_least(x: Any, ndim: int) -> Any:
    """The tensor with as many dims, new ones where `atleast_2d` and `atleast_3d` put them."""
    if x.ndim >= ndim:
        return x
    if x.ndim == 0:
        return x.reshape([1] * ndim)
    return x.unsqueeze(-1) if x.ndim == 2 else x[None, :, None] if ndim == 3 else x[None]


def _listed(tensors: Sequence[Any]) -> Sequence[Any]:
    return tensors[0] if len(tensors) == 1 and isinstance(tensors[0], (list, tuple)) else tensors


def _atleast(ndim: int, *tensors: Any) -> Any:
    given = _listed(tensors)
    made = tuple(at_least(x, ndim) for x in given)
    return made if given is not tensors or len(made) != 1 else made[0]


for _ndim in (1, 2, 3):
    form(f"atleast_{_ndim}d", also=(getattr(torch._VF, f"atleast_{_ndim}d"),))(lambda *tensors, ndim=_ndim: partial(_atleast, ndim))


@form("hstack")
def _hstack(tensors: Sequence[Tensor]) -> Form:
    dim = 0 if tensors[0].ndim < 2 else 1
    return lambda tensors: torch.cat([at_least(x, 1) for x in tensors], dim)


@form("vstack", "row_stack")
def _vstack(tensors: Sequence[Tensor]) -> Form:
    return lambda tensors: torch.cat([at_least(x, 2) for x in tensors])


@form("dstack")
def _dstack(tensors: Sequence[Tensor]) -> Form:
    return lambda tensors: torch.cat([at_least(x, 3) for x in tensors], 2)


@form("column_stack")
def _column_stack(tensors: Sequence[Tensor]) -> Form:
    return lambda tensors: torch.cat([x.reshape(-1, 1) if x.ndim < 2 else x for x in tensors], 1)


@form("block_diag")
def _block_diag(*tensors: Tensor) -> Form:
    """Rows of blocks, each padded with zeros to the whole width."""
    torch.block_diag(*tensors)

    def run(*tensors: Any) -> Any:
        blocks = [at_least(x, 2) for x in tensors]
        ends = list(accumulate(x.shape[1] for x in blocks))
        return torch.cat([F.pad(x, (end - x.shape[1], ends[-1] - end)) for x, end in zip(blocks, ends, strict=True)])

    return run


# -- pad --------------------------------------------------------------------------------------------------------------


@form("pad")
def _pad(input: Tensor, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> Form | None:
    F.pad(input, pad, mode, value if mode == "constant" else None)
    sides = {input.ndim - 1 - i: (pad[2 * i], pad[2 * i + 1]) for i in range(len(pad) // 2) if pad[2 * i] or pad[2 * i + 1]}
    if not splits(input, sides):
        return None
    if mode == "constant":
        return _constant_pad(layout_of(input), sides, value)
    split = {d: lengths for d, lengths in sides.items() if splits(input, [d])}
    if mode == "circular":
        _check_wraps_once(input, split)
    rest = [0 if input.ndim - 1 - i // 2 in split else n for i, n in enumerate(pad)]
    return _mirrored_pad(layout_of(input), split, mode, rest)


def _check_wraps_once(input: Tensor, sides: dict[int, tuple[int, int]]) -> None:
    """Raise a ValueError for a border longer than what negative lengths leave of its dim; torch checks positive ones alone."""
    for d, (before, after) in sides.items():
        kept = input.shape[d] + min(before, 0) + min(after, 0)
        if max(before, after) > kept:
            raise ValueError(
                f"pad: mode='circular' with {(before, after)} cuts dim {d} of {input.shape[d]} to {kept}, too few for a border of "
                f"{max(before, after)}; cut with narrow first and pad the result in several steps"
            )


def _constant_pad(layout: Layout, sides: dict[int, tuple[int, int]], value: float | None) -> Form:
    """Negative lengths first cut the parts; then they go where the padded result has them."""
    source = _unreduced(layout, {}) if value else layout
    piece = Piece(source, {d: range(layout.shape[d])[max(0, -a) : layout.shape[d] - max(0, -b)] for d, (a, b) in sides.items()})
    target = source
    lengths = {d: (max(a, 0), max(b, 0)) for d, (a, b) in sides.items()}
    for d, (a, b) in lengths.items():
        target = evenly(target, d, a + piece.cut.shape[d] + b)
    middle = target
    for d, (a, _) in lengths.items():
        middle = interval_of(middle, d, a, a + piece.cut.shape[d])
    around = _around(middle, target, lengths)

    def local_pad(local: Tensor, value: Any) -> Tensor:
        return F.pad(redistribute_local(piece.part(local), piece.cut, middle), around, "constant", value)

    def run(input: Any, pad: Any, mode: str = "constant", value: Any = None) -> Any:
        return from_parts(target, partial(local_pad, value=value), settled(input) if value else input)

    return run


def _around(middle: Layout, target: Layout, lengths: dict[int, tuple[int, int]]) -> list[int]:
    """What this rank's part lacks on both sides of each dim, last dim first."""
    around = []
    for d in reversed(range(len(target.shape))):
        start, stop = target.box[d]
        before = min(max(0, lengths.get(d, (0, 0))[0] - start), stop - start)
        held = middle.box[d][1] - middle.box[d][0]
        around += [before, stop - start - held - before]
    return around


def _source(mode: str, before: int, size: int, after: int, index: int) -> int:
    """Return the index that a padded dim repeats at `index`. Negative lengths cut the dim first, which only "circular" shows."""
    at = index - before
    if mode == "replicate":
        return min(max(at, 0), size - 1)
    if mode == "circular":
        first, stop = max(0, -before), size - max(0, -after)
        return first + (at - first) % (stop - first)
    return size - 1 - abs(size - 1 - abs(at))


def _mirrored_pad(layout: Layout, split: dict[int, tuple[int, int]], mode: str, rest: Sequence[int]) -> Form:
    """Split dims one after the other, each fetching its border; then the others together."""
    fetches = []
    for d, (before, after) in split.items():
        size = layout.shape[d]
        target = evenly(layout, d, before + size + after)
        fetches.append(Fetch(layout, target, d, partial(_padded, mode, before, size, after)))
        layout = target

    padded = in_turn(layout, *fetches)
    return (lambda input, *_, **__: F.pad(padded(input), rest, mode)) if any(rest) else padded


def _padded(mode: str, before: int, size: int, after: int, start: int, stop: int) -> list[Interval]:
    """The places of the border one by one, and what is between as one interval."""
    low, high = (min(max(n, start), stop) for n in (max(before, 0), before + size))
    left, right = (map(partial(_source, mode, before, size, after), range(*ends)) for ends in ((start, low), (high, stop)))
    return [*((i, i + 1) for i in left), (low - before, high - before), *((i, i + 1) for i in right)]


# -- writing into a copy ----------------------------------------------------------------------------------------------


def _scattered(input: Any, src: Any, dim: int, chosen: range) -> Any:
    """`input` with the chosen indices of a dim replaced by `src`, which goes where the input has them."""
    if input._layout.pending != src._layout.pending or input.dtype is not src.dtype:
        input, src = settled(input), settled(src)
    cut = Piece(input._layout, {dim: chosen})
    wanted = cut.cut.replace(dtype=src.dtype)

    def local_scatter(local: Tensor, part: Tensor) -> Tensor:
        index = cut.index[dim]
        return torch.slice_scatter(local, redistribute_local(part, src._layout, wanted), dim, index.start, index.stop, index.step or 1)

    return from_parts(input._layout, local_scatter, input, src)


@form("slice_scatter")
def _slice_scatter(input: Tensor, src: Tensor, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Form:
    torch.slice_scatter(input, src, dim, start, end, step)
    dim %= input.ndim
    chosen = range(input.shape[dim])[start:end:step]
    return lambda input, src, *_, **__: _scattered(input, src, dim, chosen)


@form("select_scatter")
def _select_scatter(input: Tensor, src: Tensor, dim: int, index: int) -> Form:
    torch.select_scatter(input, src, dim, index)
    dim %= input.ndim
    place = index % input.shape[dim]
    return lambda input, src, *_, **__: _scattered(input, src.unsqueeze(dim), dim, range(place, place + 1))


@form("diagonal_scatter")
def _diagonal_scatter(input: Tensor, src: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Form:
    """The diagonal, written down the rows and spread over the columns, where a mask of it is true."""
    torch.diagonal_scatter(input, src, offset, dim1, dim2)
    rows, above = input.shape[dim1], max(0, -offset)
    padding = (above, rows - src.shape[-1] - above)

    def run(input: Any, src: Any, *_: Any, **__: Any) -> Any:
        last = input.movedim((dim1, dim2), (-2, -1))
        mask = torch.ones_like(last, dtype=torch.bool).tril(offset).triu(offset)
        return torch.where(mask, F.pad(src, padding).unsqueeze(-1), last).movedim((-2, -1), (dim1, dim2))

    return run


# -- grids ------------------------------------------------------------------------------------------------------------


@form("meshgrid", also=(torch._VF.meshgrid,))  # type: ignore[attr-defined]
def _meshgrid(*tensors: Any, indexing: str | None = None) -> Form:
    container = type(torch.meshgrid(*tensors, indexing=indexing or "ij"))
    swapped = indexing == "xy" and len(_listed(tensors)) > 1

    def run(*tensors: Any, indexing: str | None = None) -> Any:
        given = list(_listed(tensors))
        order = [1, 0, *range(2, len(given))] if swapped else list(range(len(given)))
        shape = [given[i].numel() for i in order]
        sides = [x.reshape([-1 if order[d] == i else 1 for d in range(len(given))]) for i, x in enumerate(given)]
        return container(side.expand(shape) for side in sides)

    return run


@form("cartesian_prod")
def _cartesian_prod(*tensors: Any) -> Form:
    torch.cartesian_prod(*tensors)

    def run(*tensors: Any) -> Any:
        grids = [grid.flatten() for grid in torch.meshgrid(*tensors, indexing="ij")]
        return torch.stack(grids, 1) if len(grids) > 1 else grids[0]

    return run


@form("kron")
def _kron(input: Tensor, other: Tensor) -> Form:
    """Each element of one times each of the other, in dims of their own that are then merged."""
    ndim, shape = max(input.ndim, other.ndim), torch.kron(input, other).shape
    outer, inner = ([1] * (ndim - x.ndim) + list(x.shape) for x in (input, other))

    def run(input: Any, other: Any) -> Any:
        one = input.reshape([n for size in outer for n in (size, 1)])
        return (one * other.reshape([n for size in inner for n in (1, size)])).reshape(shape)

    return run


@form(also=(torch.vander,))
def _vander(x: Tensor, N: int | None = None, increasing: bool = False) -> Form | None:
    result = torch.vander(x, N, increasing)
    return partial(_powers, result.shape[-1], result.dtype, increasing) if result.shape[-1] else None


@form(also=(torch.linalg.vander,))
def _linalg_vander(x: Tensor, *, N: int | None = None) -> Form:
    result = torch.linalg.vander(x, N=N)
    return partial(_powers, result.shape[-1], result.dtype, True)


def _powers(count: int, dtype: torch.dtype, rising: bool, x: Any, *_: Any, **__: Any) -> Any:
    """Powers along a new last dim, as running products."""
    products = x.unsqueeze(-1).expand(*x.shape, count - 1).cumprod(-1)
    made = torch.cat([torch.ones_like(x, dtype=dtype).unsqueeze(-1), products], -1)
    return made if rising else made.flip(-1)
