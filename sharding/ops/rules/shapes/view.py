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
from ..registry import decomposition, decomposition_maker, rule, rules

# Results are views of the operand.
rules(
    {
        "reshape flatten ravel unflatten squeeze unsqueeze(input, *args, **kwargs)": lambda a: (
            reshape_rule(a.input, a.func(a.input, *a.args, **a.kwargs).shape)
        )
    },
    with_func=True,
    view=True,
)
rules(
    {
        "resolve_conj resolve_neg(input)": "... -> ...",
        "transpose swapaxes swapdims(input, *args, **kwargs)": lambda a: _swap(
            a.input, *a.args, *a.kwargs.values()
        ),
        "t adjoint(input)": lambda a: _last_two(a.input),
        "Tensor.permute(input, *dims)": lambda a: permutation_rule(a.input, dims_of_call(a.dims)),
        "torch.permute(input, dims)": lambda a: permutation_rule(a.input, a.dims),
        "movedim moveaxis(input, source, destination)": lambda a: _movedim(
            a.input, a.source, a.destination
        ),
        "expand(input, *sizes, size=(), implicit=False)": lambda a: _broadcast_to(
            a.input, dims_of_call(a.sizes) if a.sizes else a.size
        ),
        "broadcast_to(input, size)": lambda a: _broadcast_to(a.input, a.size),
        "split chunk tensor_split split_with_sizes(input, sections=None, dim=0, **_)": lambda a: (
            with_whole_dims(a.input, [a.dim])
        ),
    },
    view=True,
    linear=((0,),),
    transparent=True,
)
rules(
    {"view_as_real(input)": "... -> ... 1", "view_as_complex(input)": "... [pair] -> ..."},
    view=True,
    linear=((0,),),
)
decomposition("view_as", "reshape_as")(lambda input, other: input.reshape(other.shape))
decomposition("expand_as")(lambda input, other: input.expand(other.shape))

# -- reshape ---------------------------------------------------------------------------------------


def factor_shapes(
    before: Sequence[int], after: Sequence[int]
) -> tuple[list[Dim], list[Dim], dict[str, int], set[str]]:
    """Factor two shapes of equal size into common factors.

    (8, 3) and (2, 4, 3) into `(a b) c` and `a b c`.

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
            for side, shape, group in ((left, before, dims), (right, after, others)):
                for d in group:
                    name = f"f{len(sizes)}"
                    side[d], sizes[name] = (name,), shape[d]
                    whole.add(name)
    for d, other in _single_pairs(before, after):
        name = f"f{len(sizes)}"
        left[d] = right[other] = (name,)
        sizes[name] = 1
    return left, right, sizes, whole


def _single_pairs(before: Sequence[int], after: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the pairs of dims of size 1 with as many elements before them in both shapes."""
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
    """Return the smallest runs of dims with as many elements in both shapes, but of size 1."""
    runs: list[tuple[list[int], list[int]]] = []
    dims = [d for d, n in enumerate(before) if n != 1]
    others = [d for d, n in enumerate(after) if n != 1]
    while dims:
        left, right = [dims.pop(0)], [others.pop(0)]
        while (a := math.prod(before[d] for d in left)) != (
            b := math.prod(after[d] for d in right)
        ):
            left.append(dims.pop(0)) if a < b else right.append(others.pop(0))
        runs.append((left, right))
    return runs


def _cuts(shape: Sequence[int], dims: Sequence[int]) -> list[int]:
    """Return 1 and the products of the dims' sizes from the last dim on."""
    cuts = [1]
    for d in reversed(dims):
        cuts.append(cuts[-1] * shape[d])
    return cuts


def _assign(
    side: list[Dim], shape: Sequence[int], dims: Sequence[int], names: dict[int, str], total: int
) -> None:
    """Give each dim the factors between its own cuts, major to minor."""
    low = 1
    for d in reversed(dims):
        high = low * shape[d]
        side[d] = tuple(names[cut] for cut in sorted(names, reverse=True) if low <= cut < high)
        low = high


def reshape_rule(input: Tensor, shape: Sequence[int], local: Any = torch.Tensor.reshape) -> Rule:
    """Return the rule of an operator that keeps the elements in row-major order."""
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
    # torch takes twice as long over a Size as over integers
    shape = tuple(results[0].local_shape) or ((),)
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


# -- transpose -------------------------------------------------------------------------------------


def permutation_rule(input: Tensor, order: Sequence[int]) -> Rule:
    """Return the rule of an operator whose result has the input's dim order[i] as dim i."""
    right = " ".join(f"d{i % input.ndim}" for i in order)
    return einrule(f"{dim_names(input.ndim)} -> {right}", input, linear=((0,),), transparent=True)


def _swap(input: Tensor, dim0: int, dim1: int) -> Rule:
    order = list(range(input.ndim))
    if order:
        order[dim0], order[dim1] = order[dim1], order[dim0]
    return permutation_rule(input, order)


def _last_two(input: Tensor) -> Rule:
    return _swap(input, -2, -1) if input.ndim > 1 else permutation_rule(input, range(input.ndim))


rule(also=(Tensor.mT.__get__, Tensor.mH.__get__), view=True)(_last_two)  # type: ignore[attr-defined]


@rule(also=(Tensor.T.__get__, Tensor.H.__get__), view=True)  # type: ignore[attr-defined]
def _reverse(input: Tensor) -> Rule:
    return permutation_rule(input, list(reversed(range(input.ndim))))


def _movedim(input: Tensor, source: int | Sequence[int], destination: int | Sequence[int]) -> Rule:
    if not input.ndim:
        return permutation_rule(input, [])
    sources, targets = (
        [d % input.ndim for d in ([dims] if isinstance(dims, int) else dims)]
        for dims in (source, destination)
    )
    rest = iter(d for d in range(input.ndim) if d not in sources)
    moved = dict(zip(targets, sources, strict=True))
    return permutation_rule(
        input, [moved[i] if i in moved else next(rest) for i in range(input.ndim)]
    )


# -- expand ----------------------------------------------------------------------------------------


def dims_of_call(dims: Sequence[Any]) -> Sequence[int]:
    """Return the dims of a call that takes them as `f(2, 0, 1)` or as `f((2, 0, 1))`."""
    return dims[0] if len(dims) == 1 and not isinstance(dims[0], int) else dims


def pattern_with_new_dims(ndim: int, same: Sequence[bool]) -> str:
    """Return the pattern of a tensor with new dims first, and whole other dims that change size."""
    new = len(same) - ndim
    left = " ".join(f"d{i}" if same[new + i] else f"[d{i}]" for i in range(ndim))
    right = " ".join(f"d{i}" if same[new + i] else "1" for i in range(ndim))
    return f"{left} -> {'1 ' * new}{right}"


def _broadcast_to(input: Tensor, size: Sequence[int]) -> Rule:
    shape = input.expand(size).shape
    new = len(shape) - input.ndim
    same = [d >= new and n == input.shape[d - new] for d, n in enumerate(shape)]
    bind = partial(_to_local_shape, Tensor.expand)
    return einrule(
        pattern_with_new_dims(input.ndim, same), input, linear=((0,),), transparent=True, bind=bind
    )


@decomposition_maker(also=(torch.broadcast_tensors, torch._VF.broadcast_tensors))  # type: ignore[attr-defined]
def _broadcast_tensors(*tensors: Any) -> Callable[..., Any]:
    """Broadcast tensors that are given as several arguments or as a list."""
    shapes = [x.shape for x in (tensors if isinstance(tensors[0], Tensor) else tensors[0])]
    container, shape = type(torch.broadcast_tensors(*tensors)), torch.broadcast_shapes(*shapes)
    return lambda *tensors: container(
        x.expand(shape) for x in (tensors if isinstance(tensors[0], Tensor) else tensors[0])
    )


# -- split and stack -------------------------------------------------------------------------------


def with_whole_dims(
    input: Tensor, dims: Sequence[int], *, drop: bool = False, **options: Any
) -> Rule:
    """Return the rule of an operator that moves elements, and changes the size of whole dims."""
    chosen = {d % input.ndim for d in dims} if input.ndim else ()
    return along_dims(
        input, chosen, "" if drop else "1", linear=((0,),), transparent=True, **options
    )


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
