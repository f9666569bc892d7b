"""Writing at indices: `scatter`, `index_add`, `index_copy`, `index_fill`, `index_reduce`, `put`.

The written tensor is not moved. Along a split dim every rank writes the elements whose indices are
in its part; the others go into one extra element at its end, which is cut off:

    index_add of [5 6 7 8] at [4 0 2 4] to zeros over 3 ranks
    rank 0  [6 0 7 | 13]      rank 1  [0 13 | 13]      rank 2  [0 | 26]        before the cut
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ....layout.layout import Layout
from ..decomposition_utils import splitting_axes
from ..elementwise.pointwise import is_operand, with_in_place
from ..notation import Rule, dim_names, einrule, whole_dims
from ..registry import rule
from .local_indices import Part, pad_by_one

Trims = Sequence[tuple[int, int, int]]  # dims, and from where to where this rank writes along them


# -- through one dim -------------------------------------------------------------------------------


@rule(*with_in_place("scatter scatter_add scatter_reduce"), with_func=True)
def _scatter(
    func: Any,
    input: Tensor,
    dim: int,
    index: Tensor,
    src: Any = None,
    *args: Any,
    value: Any = None,
    **kwargs: Any,
) -> Rule | None:
    """Return the rule: index and source describe written elements; they may be the shorter ones."""
    if not is_operand(index) or not input.ndim or (is_operand(src) and not src.ndim):
        return None
    dim %= input.ndim
    name = func.__name__.rstrip("_")
    others = [index, src] if is_operand(src) else [index]
    short = [
        d
        for d in range(input.ndim)
        if d != dim and any(x.shape[d] != input.shape[d] for x in others)
    ]
    adds = name == "scatter_add" and src.shape[dim] == index.shape[dim]
    letters = "ii" if adds else "is"
    names = [_names(input, short, dim, letter, not adds) for letter in letters[: len(others)]]
    left = dim_names(input.ndim)
    reduce = kwargs.get("reduce", args[0] if args else None)
    linear = _linear(name, reduce, src if value is None else value, 2)
    pattern, additive = f"{', '.join([left, *names])} -> {left}", (0,) * adds
    bind = partial(_bind, func, dim, short)
    return einrule(pattern, input, *others, linear=linear, additive=additive, bind=bind)


def _names(input: Tensor, short: Sequence[int], dim: int, letter: str, whole: bool) -> str:
    along = f"[{letter}]" if whole else letter
    return " ".join(
        along if d == dim else f"[{letter}{d}]" if d in short else f"d{d}"
        for d in range(input.ndim)
    )


def _linear(name: str, reduce: str | None, source: Any, number: int) -> tuple[tuple[int, ...], ...]:
    """Return the operands that an operator is linear in: where it adds, or assigns (zero)."""
    if reduce not in (None, "add", "sum", "mean") or (name == "index_reduce"):
        return ()
    if is_operand(source):
        return ((0, number),) if source.ndim else ()
    return ((0,),) if type(source) in (int, float) and source == 0 else ()


@rule(*with_in_place("index_add index_copy index_fill index_reduce"), with_func=True)
def _rule_of_slices(
    func: Any,
    input: Tensor,
    dim: int,
    index: Tensor,
    source: Any = None,
    *args: Any,
    **kwargs: Any,
) -> Rule | None:
    """Return the rule: the index selects slices along a dim that are written; without dims, one."""
    source, name = kwargs.get("value", source), func.__name__.rstrip("_")
    if not is_operand(index) or index.ndim > 1 or not input.ndim:
        return None
    fits = name == "index_fill" or source.ndim == input.ndim
    if not fits and (source.ndim or name != "index_copy"):
        return None
    dim %= input.ndim
    left = dim_names(input.ndim)
    number = "1" if index.ndim == 0 else "i" if name == "index_add" else "[i]"
    sides = [left, number if index.ndim else ""]
    if is_operand(source):
        sides.append(" ".join(number if d == dim else f"d{d}" for d in range(source.ndim)))
    operands = [input, index, source] if is_operand(source) else [input, index]
    options = {"linear": _linear(name, None, source, 2), "additive": (0,) * (name == "index_add")}
    bind = partial(_bind, func, dim, ())
    return einrule(f"{', '.join(sides)} -> {left}", *operands, bind=bind, **options)


def _bind(
    func: Any, dim: int, short: Sequence[int], targets: Sequence[Layout], _: Any
) -> Callable[..., Tensor]:
    layout, name = targets[0], func.__name__.rstrip("_")
    trims = [(d, *layout.box[d]) for d in short if splitting_axes(layout, d)]
    if not splitting_axes(layout, dim):
        return partial(_on_part, func, False, trims) if trims else func
    fill = 1 if name in ("scatter_reduce", "index_reduce") else None
    part = Part(layout, dim, wraps=name == "index_fill")
    write = partial(_with_one_more, getattr(torch.Tensor, name), part, fill, dim)
    return partial(_on_part, write, name != func.__name__, trims)


def _on_part(
    func: Callable[..., Tensor],
    copies: bool,
    trims: Trims,
    input: Tensor,
    dim: int,
    index: Tensor,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    """Run the operator on this rank's part, with the part of index and source of the same box."""
    named = {name: _trim(a, trims) for name, a in kwargs.items()}
    result = func(input, dim, _trim(index, trims), *[_trim(a, trims) for a in args], **named)
    return input.copy_(result) if copies else result


def _trim(x: Any, trims: Trims) -> Any:
    if isinstance(x, Tensor) and x.ndim:
        for d, start, stop in trims:
            low, high = min(start, x.shape[d]), min(stop, x.shape[d])
            x = x.narrow(d, low, high - low)
    return x


def _with_one_more(
    func: Callable[..., Tensor],
    part: Part,
    fill: float | None,
    dim: int,
    input: Tensor,
    _: int,
    index: Tensor,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    """Run the operator on the part with one extra element.

    A product of the elements there could be infinite, and its gradient NaN, so `fill` is written
    instead.
    """
    local, is_local = part.find(index, part.length)
    if fill is not None:
        args = tuple(_fill_nonlocal(a, is_local, dim, fill) for a in args)
        kwargs = {name: _fill_nonlocal(a, is_local, dim, fill) for name, a in kwargs.items()}
    return func(pad_by_one(input, dim), dim, local, *args, **kwargs).narrow(dim, 0, part.length)


def _fill_nonlocal(x: Any, is_local: Tensor, dim: int, fill: float) -> Any:
    if not isinstance(x, Tensor):
        return x
    if is_local.ndim == x.ndim:
        cut = tuple(slice(n) for n in is_local.shape)
        return torch.where(is_local, x[cut], fill)
    return torch.where(is_local.reshape([-1 if d == dim else 1 for d in range(x.ndim)]), x, fill)


# -- through all dims ------------------------------------------------------------------------------


@rule("put", "put_", with_func=True)
def _put(
    func: Any, input: Tensor, index: Tensor, source: Tensor, accumulate: bool = False
) -> Rule | None:
    """Return the rule: indices run through all dims, in row-major order."""
    if not (is_operand(index) and is_operand(source)):
        return None
    left = dim_names(input.ndim)
    at, values = whole_dims(index, "i"), whole_dims(source, "s")
    pattern, bind = f"{left}, {at}, {values} -> {left}", partial(_bind_put, func)
    return einrule(pattern, input, index, source, linear=((0, 2),), bind=bind)


def _bind_put(func: Any, targets: Sequence[Layout], _: Any) -> Callable[..., Tensor]:
    layout = targets[0]
    dims = range(len(layout.shape))
    if not any(splitting_axes(layout, d) for d in dims):
        return func
    return partial(_put_local, func.__name__ == "put_", Part(layout, *dims, wraps=True))


def _put_local(
    in_place: bool,
    part: Part,
    input: Tensor,
    index: Tensor,
    source: Tensor,
    accumulate: bool = False,
) -> Tensor:
    local, _ = part.find(index, part.length)
    flat = pad_by_one(input.reshape(-1), 0).put(local, source, accumulate)
    result = flat[: part.length].reshape(input.shape)
    return input.copy_(result) if in_place else result
