"""Operators that rearrange elements: reshape, transpose, expand, split, stack."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ....layout.layout import Layout
from ..notation import Dim, Rule, along_dims, dim_names, einrule
from ..registry import decomposition, decomposition_maker, rule

# -- reshape ---------------------------------------------------------------------------------------


def factor_shapes(
    before: Sequence[int], after: Sequence[int]
) -> tuple[list[Dim], list[Dim], dict[str, int], set[str]]:
    """Factor two shapes of equal size into common factors: (8, 3) and (2, 4, 3) into `(a b) c` and
    `a b c`.

    Returns:
        the dims before, the dims after, the size of each factor, and the factors that must be whole
        because the shapes cut across each other there (as 6x4 and 4x6 do).
    """
    if math.prod(before) == 0:
        return _factor_empty(before, after)
    left: list[Dim] = [() for _ in before]
    right: list[Dim] = [() for _ in after]
    sizes: dict[str, int] = {}
    whole: set[str] = set()
    for dims, others in groups(before, after):
        cuts = sorted(set(_cuts(before, dims)) | set(_cuts(after, others)))
        if all(b % a == 0 for a, b in pairwise(cuts)):
            total, names = cuts[-1], {}
            for low, high in pairwise(cuts):
                name = f"f{len(sizes)}"
                sizes[name], names[low] = high // low, name
            _assign(left, before, dims, names, total)
            _assign(right, after, others, names, total)
        else:
            for found, shape, group in ((left, before, dims), (right, after, others)):
                for d in group:
                    name = f"f{len(sizes)}"
                    found[d], sizes[name] = (name,), shape[d]
                    whole.add(name)
    for d, other in _single_pairs(before, after):
        name = f"f{len(sizes)}"
        left[d] = right[other] = (name,)
        sizes[name] = 1
    return left, right, sizes, whole


def _single_pairs(before: Sequence[int], after: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the pairs of dims of size 1 with the same number of elements before them in both
    shapes.
    """
    remaining: dict[int, list[int]] = {}
    for d, n in enumerate(after):
        if n == 1:
            remaining.setdefault(math.prod(after[:d]), []).append(d)
    for d, n in enumerate(before):
        if n == 1 and remaining.get(math.prod(before[:d])):
            yield d, remaining[math.prod(before[:d])].pop(0)


def _factor_empty(
    before: Sequence[int], after: Sequence[int]
) -> tuple[list[Dim], list[Dim], dict[str, int], set[str]]:
    """Factor shapes without elements, of which only equal leading dims correspond."""
    same = 0
    while same < min(len(before), len(after)) and before[same] == after[same]:
        same += 1
    sizes = {f"f{d}": before[d] for d in range(same)}
    dims: list[Dim] = [(f"f{d}",) for d in range(same)]
    return [*dims, *[()] * (len(before) - same)], [*dims, *[()] * (len(after) - same)], sizes, set()


def groups(before: Sequence[int], after: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Return the smallest runs of dims of both shapes with the same number of elements, without
    dims of size 1.
    """
    found: list[tuple[list[int], list[int]]] = []
    dims = [d for d, n in enumerate(before) if n != 1]
    others = [d for d, n in enumerate(after) if n != 1]
    while dims:
        mine, theirs = [dims.pop(0)], [others.pop(0)]
        while (a := math.prod(before[d] for d in mine)) != (
            b := math.prod(after[d] for d in theirs)
        ):
            mine.append(dims.pop(0)) if a < b else theirs.append(others.pop(0))
        found.append((mine, theirs))
    return found


def _cuts(shape: Sequence[int], dims: Sequence[int]) -> list[int]:
    """Return 1 and the products of the dims' sizes from the last dim on."""
    cuts = [1]
    for d in reversed(dims):
        cuts.append(cuts[-1] * shape[d])
    return cuts


def _assign(
    found: list[Dim], shape: Sequence[int], dims: Sequence[int], names: dict[int, str], total: int
) -> None:
    """Give each dim the factors between its own cuts, major to minor."""
    low = 1
    for d in reversed(dims):
        high = low * shape[d]
        found[d] = tuple(names[cut] for cut in sorted(names, reverse=True) if low <= cut < high)
        low = high


def reshape_rule(input: Tensor, shape: Sequence[int], local: Any = torch.Tensor.reshape) -> Rule:
    """Return the rule of an operator that keeps the elements in row-major order under another
    shape.
    """
    before, after, sizes, whole = factor_shapes(input.shape, shape)
    return Rule(
        operands=(input,),
        inputs=(tuple(before),),
        outputs=(tuple(after),),
        sizes=sizes,
        whole=frozenset(whole),
        linear=((0,),),
        transparent=True,
        bind=partial(_to_local_shape, local),
    )


def _to_local_shape(
    func: Callable[..., Tensor], _: Sequence[Layout], results: Sequence[Layout]
) -> Callable[..., Tensor]:
    """Return the function with this rank's shape of the result in place of the global one."""
    shape = tuple(results[0].local_shape) or (
        (),
    )  # torch takes twice as long over a Size as over integers
    return lambda local, *_, **__: func(local, *shape)


@rule("view", view=True)
def _view(
    input: Tensor, *shape: Any, size: Any = None, dtype: torch.dtype | None = None
) -> Rule | None:
    if shape and isinstance(shape[0], torch.dtype):
        shape, dtype = (), shape[0]
    if dtype is not None:
        return einrule("... -> ...", input) if dtype.itemsize == input.dtype.itemsize else None
    return reshape_rule(input, input.reshape(*shape or (size,)).shape, local=torch.Tensor.view)


@rule("reshape", view=True)
def _reshape(input: Tensor, *shape: Any, **kwargs: Any) -> Rule:
    return reshape_rule(input, torch.Tensor.reshape(input, *shape, **kwargs).shape)


@decomposition("view_as", "reshape_as")
def _reshape_as(input: Any, other: Any) -> Any:
    return input.reshape(other.shape)


@rule("flatten", "ravel", view=True)
def _flatten(input: Tensor, *args: Any, **kwargs: Any) -> Rule:
    return reshape_rule(input, torch.flatten(input, *args, **kwargs).shape)


@rule("unflatten", view=True)
def _unflatten(input: Tensor, dim: int, sizes: Sequence[int]) -> Rule:
    return reshape_rule(input, torch.unflatten(input, dim, sizes).shape)


@rule("squeeze", view=True)
def _squeeze(input: Tensor, *args: Any, **kwargs: Any) -> Rule:
    return reshape_rule(input, Tensor.squeeze(input, *args, **kwargs).shape)


@rule("unsqueeze", view=True)
def _unsqueeze(input: Tensor, dim: int) -> Rule:
    return reshape_rule(input, torch.unsqueeze(input, dim).shape)


@rule("resolve_conj", "resolve_neg", view=True)
def _resolve(input: Tensor) -> Rule:
    return einrule("... -> ...", input, linear=((0,),), transparent=True)


@rule("view_as_real", view=True)
def _view_as_real(input: Tensor) -> Rule:
    return einrule("... -> ... 1", input, linear=((0,),))


@rule("view_as_complex", view=True)
def _view_as_complex(input: Tensor) -> Rule:
    return einrule("... [pair] -> ...", input, linear=((0,),))


# -- transpose -------------------------------------------------------------------------------------


def permuted(input: Tensor, order: Sequence[int]) -> Rule:
    """Return the rule of an operator whose result has the input's dim order[i] as dim i."""
    right = " ".join(f"d{i % input.ndim}" for i in order)
    return einrule(f"{dim_names(input.ndim)} -> {right}", input, linear=((0,),), transparent=True)


def _swapped(input: Tensor, dim0: int, dim1: int) -> Rule:
    order = list(range(input.ndim))
    if order:
        order[dim0], order[dim1] = order[dim1], order[dim0]
    return permuted(input, order)


@rule("transpose", "swapaxes", "swapdims", view=True)
def _transpose(input: Tensor, *args: int, **kwargs: int) -> Rule:
    return _swapped(input, *args, *kwargs.values())


@rule("t", "adjoint", also=(torch.Tensor.mT.__get__, torch.Tensor.mH.__get__), view=True)  # type: ignore[attr-defined]
def _last_two(input: Tensor) -> Rule:
    return _swapped(input, -2, -1) if input.ndim > 1 else permuted(input, range(input.ndim))


@rule(also=(torch.Tensor.T.__get__, torch.Tensor.H.__get__), view=True)  # type: ignore[attr-defined]
def _reversed(input: Tensor) -> Rule:
    return permuted(input, list(reversed(range(input.ndim))))


@rule(also=(torch.Tensor.permute,), view=True)
def _permute_method(input: Tensor, *dims: Any) -> Rule:
    return permuted(input, listed(dims))


@rule(also=(torch.permute,), view=True)
def _permute(input: Tensor, dims: Sequence[int]) -> Rule:
    return permuted(input, dims)


@rule("movedim", "moveaxis", view=True)
def _movedim(input: Tensor, source: int | Sequence[int], destination: int | Sequence[int]) -> Rule:
    if not input.ndim:
        return permuted(input, [])
    sources = [s % input.ndim for s in ([source] if isinstance(source, int) else source)]
    targets = [
        d % input.ndim for d in ([destination] if isinstance(destination, int) else destination)
    ]
    rest = iter(d for d in range(input.ndim) if d not in sources)
    moved = dict(zip(targets, sources, strict=True))
    return permuted(input, [moved[i] if i in moved else next(rest) for i in range(input.ndim)])


# -- expand ----------------------------------------------------------------------------------------


def listed(dims: Sequence[Any]) -> Sequence[int]:
    """Return the dims of a call that takes them as `f(2, 0, 1)` or as `f((2, 0, 1))`."""
    return dims[0] if len(dims) == 1 and not isinstance(dims[0], int) else dims


@rule("expand", view=True)
def _expand(input: Tensor, *sizes: int, size: Sequence[int] = (), implicit: bool = False) -> Rule:
    return _broadcast_to(input, listed(sizes) if sizes else size)


@rule("broadcast_to", view=True)
def _broadcast_to(input: Tensor, size: Sequence[int]) -> Rule:
    shape = input.expand(size).shape
    new = len(shape) - input.ndim
    kept = [input.shape[i] == shape[new + i] for i in range(input.ndim)]
    left = " ".join(f"d{i}" if keep else f"[d{i}]" for i, keep in enumerate(kept))
    right = ["1"] * new + [f"d{i}" if keep else "1" for i, keep in enumerate(kept)]
    bind = partial(_to_local_shape, torch.Tensor.expand)
    return einrule(
        f"{left} -> {' '.join(right)}", input, linear=((0,),), transparent=True, bind=bind
    )


@decomposition("expand_as")
def _expand_as(input: Any, other: Any) -> Any:
    return input.expand(other.shape)


@decomposition_maker(also=(torch.broadcast_tensors, torch._VF.broadcast_tensors))  # type: ignore[attr-defined]
def _broadcast_tensors(*tensors: Any) -> Callable[..., Any]:
    """Broadcast tensors that are given as several arguments or as a list."""
    shapes = [x.shape for x in (tensors if isinstance(tensors[0], Tensor) else tensors[0])]
    made, shape = type(torch.broadcast_tensors(*tensors)), torch.broadcast_shapes(*shapes)
    return lambda *tensors: made(
        x.expand(shape) for x in (tensors if isinstance(tensors[0], Tensor) else tensors[0])
    )


# -- split and stack -------------------------------------------------------------------------------


def with_whole_dims(
    input: Tensor, dims: Sequence[int], *, drop: bool = False, **options: Any
) -> Rule:
    """Return the rule of an operator that moves elements, needs `dims` whole, and changes their
    size or drops them.
    """
    chosen = {d % input.ndim for d in dims} if input.ndim else ()
    return along_dims(
        input, chosen, "" if drop else "1", linear=((0,),), transparent=True, **options
    )


@rule("split", "chunk", "tensor_split", "split_with_sizes", view=True)
def _split(input: Tensor, sections: Any = None, dim: int = 0, **kwargs: Any) -> Rule:
    return with_whole_dims(input, [dim])


@rule("stack")
def _stack(tensors: Sequence[Tensor], dim: int = 0) -> Rule:
    ndim = tensors[0].ndim
    names = [f"d{d}" for d in range(ndim)]
    dim %= ndim + 1
    left = ", ".join([" ".join(names)] * len(tensors))
    right = " ".join([*names[:dim], "1", *names[dim:]])
    return einrule(
        f"{left} -> {right}", *tensors, linear=(tuple(range(len(tensors))),), transparent=True
    )
