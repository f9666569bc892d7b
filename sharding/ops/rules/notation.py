"""Rules: what an operator does to the dims of its operands, in einops notation.

A rule such as `"... m k, ... k n -> ... m n"` names the factors of every dim. It tells how the
operator may be split:

* a factor may be split over a mesh axis in every operand and result that has it; operands without
  it stay whole;
* a factor that no result has is reduced: splitting it leaves the result pending (`combine` says
  with which kind);
* a `[bracketed]` factor must be whole, that is not split, on every rank;
* `(b s)` is a dim made of several factors, major to minor, as a reshape makes them;
* `1` is a dim of size one, `...` any number of leading dims, aligned from the right and broadcast
  as PyTorch does.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch

Dim = tuple[str, ...]  # the factors of one dim, major to minor; () for a dim that is never split

_ANY: Dim = ("...",)
_TOKEN = re.compile(r"\.\.\.|1|\[?\w+\]?|\([\w ]+\)")


class NoMatch(Exception):
    """Operands do not have the dims that a pattern names."""


@dataclass(frozen=True)
class Rule:
    """One operator call, as factors.

    Attributes:
        operands: the tensors that `inputs` describes (meta tensors of the global shape), in the
            order of `inputs`.
        inputs: per operand, per dim, its factors.
        outputs: per result tensor, per dim, its factors.
        sizes: size of each factor.
        whole: factors that must not be split.
        combine: pending kind of a result when a factor that it lacks is split.
        linear: groups of operands; the operator is linear in each group jointly (the other operands
            held fixed), so that it may be applied to pending sums.
        additive: operands that are added to the result (a bias): they become pending where the
            result does.
        transparent: the operator only moves values, so that values pending with any kind pass
            through.
        pointwise: the result has the broadcast shape of the operands, and a dtype that depends on
            nothing but their dtypes and the static arguments.
        local: function to call on the local tensors in place of the operator, with the operator's
            arguments.
        bind: makes that function once all layouts are known:
            `(layouts of the operands, in the order of
            `operands`; layouts of the results) ->
            function`. For sizes and offsets that differ from rank to rank.
        result: the operator's result on meta tensors, where the operator cannot be run on them.
    """

    operands: tuple[torch.Tensor, ...]
    inputs: tuple[tuple[Dim, ...], ...]
    outputs: tuple[tuple[Dim, ...], ...]
    sizes: dict[str, int]
    whole: frozenset[str] = frozenset()
    combine: str = "sum"
    linear: tuple[tuple[int, ...], ...] = ()
    additive: frozenset[int] = frozenset()
    transparent: bool = False
    pointwise: bool = False
    local: Callable[..., Any] | None = None
    bind: Callable[[Sequence[Any], Sequence[Any]], Callable[..., Any]] | None = None
    result: Any = None


def einrule(
    pattern: str,
    *operands: torch.Tensor | None,
    sizes: Mapping[str, int] | None = None,
    linear: Sequence[Sequence[int]] = (),
    additive: Sequence[int] = (),
    **options: Any,
) -> Rule:
    """Return the rule that a pattern gives for these operands.

    Those that are None are left out with their part of the pattern.

    A dim of size one whose factor is larger in another operand is broadcast and never split.

    Args:
        pattern: the rule, as this module's docstring says.
        operands: one for each part of the pattern's left side.
        sizes: of the parts of composite dims.
        linear, additive: as in `Rule`, counting the operands of the pattern.
        options: other fields of `Rule`.

    Raises:
        NoMatch: the operands do not have the dims of the pattern.

    Example:
        >>> x, w = torch.empty(8, 4, device="meta"), torch.empty(6, 4, device="meta")
        >>> rule = einrule("... k, n k -> ... n", x, w)
        >>> rule.inputs, rule.outputs
        (((('_0',), ('k',)), (('n',), ('k',))), ((('_0',), ('n',)),))
    """
    present = [i for i, x in enumerate(operands) if x is not None]
    tensors = tuple([x for x in operands if x is not None])
    sides = _expand_ellipses(pattern, tuple([None if x is None else x.ndim for x in operands]))
    known = _factor_sizes(sides.inputs, tensors, sizes or {})
    position = {old: new for new, old in enumerate(present)}
    return Rule(
        operands=tensors,
        inputs=tuple(
            [
                _without_broadcast(dims, t.shape, known)
                for dims, t in zip(sides.inputs, tensors, strict=True)
            ]
        ),
        outputs=sides.outputs,
        sizes=known,
        whole=sides.whole,
        linear=tuple(
            [
                tuple([position[i] for i in group if i in position])
                for group in linear
                if group[0] in position
            ]
        ),
        additive=frozenset([position[i] for i in additive if i in position]),
        **options,
    )


def dim_names(count: int, whole: Iterable[int] = (), prefix: str = "d") -> str:
    """Return the pattern of a tensor of `count` dims, those in `whole` unsplit: `"d0 [d1] d2"`."""
    chosen = set(whole)
    return " ".join([f"[{prefix}{d}]" if d in chosen else f"{prefix}{d}" for d in range(count)])


def whole_dims(x: torch.Tensor, prefix: str = "d") -> str:
    """Return the pattern of a tensor of which no dim must be split: `"[d0] [d1]"`."""
    return dim_names(x.ndim, range(x.ndim), prefix)


def aligned_along(dim: int, name: str, result: str, *operands: torch.Tensor) -> str:
    """Return the pattern of operands that broadcast, and of an operator along `dim`.

    Args:
        name, result: that dim in the operands, and in the result.

    Example:
        >>> aligned_along(1, "[k]", "", torch.empty(5, 4, 3), torch.empty(4, 3))
        'd0 [k] d2, [k] d2 -> d0  d2'
    """
    names = [f"d{i}" for i in range(max(x.ndim for x in operands))]
    names[dim] = name
    left = ", ".join([" ".join(names[len(names) - x.ndim :]) for x in operands])
    names[dim] = result
    return f"{left} -> {' '.join(names)}"


def along_dims(
    input: torch.Tensor,
    dims: Iterable[int],
    result: str | None = None,
    *,
    whole: bool = True,
    results: int = 1,
    **options: Any,
) -> Rule:
    """Return the rule of an operator that works along some dims of one operand.

    Args:
        dims: those dims, counted from 0.
        result: for each, None if it keeps its size, "1" if its size changes, "" if it is dropped.
        whole: whether the dims must not be split.
        results: number of result tensors.
        options: other fields of `Rule`.
    """
    chosen = set(dims)
    left = dim_names(input.ndim, chosen if whole else ())
    right = left
    if result is not None:
        right = " ".join([result if d in chosen else f"d{d}" for d in range(input.ndim)])
    return einrule(f"{left} -> {', '.join([right] * results)}", input, **options)


def _factor_sizes(
    inputs: Sequence[tuple[Dim, ...]], tensors: Sequence[torch.Tensor], known: Mapping[str, int]
) -> dict[str, int]:
    """Return the size of every factor: that of the dims that have it and are not broadcast."""
    sizes = dict(known)
    for dims, tensor in zip(inputs, tensors, strict=True):
        for factors, size in zip(dims, tensor.shape, strict=True):
            if len(factors) == 1 and sizes.get(factors[0], 1) == 1:
                sizes[factors[0]] = size
    return sizes


def _without_broadcast(
    dims: tuple[Dim, ...], shape: Sequence[int], sizes: dict[str, int]
) -> tuple[Dim, ...]:
    """Return the dims of an operand, those of size one as () where their factor is larger."""
    if 1 not in shape:
        return dims
    return tuple(
        [
            () if n == 1 and len(f) == 1 and sizes.get(f[0], 1) != 1 else f
            for f, n in zip(dims, shape, strict=True)
        ]
    )


class _Sides(NamedTuple):
    """A pattern for operands of known numbers of dims.

    Attributes:
        inputs, outputs: per operand and result, per dim its factors; () for `1`.
        whole: the bracketed factors.
    """

    inputs: tuple[tuple[Dim, ...], ...]
    outputs: tuple[tuple[Dim, ...], ...]
    whole: frozenset[str]


@lru_cache(maxsize=4096)
def _expand_ellipses(pattern: str, ndims: tuple[int | None, ...]) -> _Sides:
    """Return the pattern with its ellipses written out, without operands that are not given."""
    left, right = _parse(pattern)
    if len(left) != len(ndims):
        raise NoMatch(f"{pattern!r} is for {len(left)} operands, not {len(ndims)}")
    present = [(names, n) for names, n in zip(left, ndims, strict=True) if n is not None]
    inputs = [_expand_ellipsis(names, n) for names, n in present]
    longest = max(
        (
            len(t) - len(names) + 1
            for t, (names, _) in zip(inputs, present, strict=True)
            if _ANY in names
        ),
        default=0,
    )
    outputs = [_expand_ellipsis(names, len(names) - 1 + longest) for names in right]
    for names, (_, n) in zip(inputs, present, strict=True):
        if len(names) != n:
            raise NoMatch(f"{pattern!r} does not fit a tensor of {n} dims")
    whole = frozenset(
        n[1:-1] for dims in (*inputs, *outputs) for names in dims for n in names if n[0] == "["
    )
    return _Sides(tuple(map(_plain, inputs)), tuple(map(_plain, outputs)), whole)


def _plain(names: tuple[Dim, ...]) -> tuple[Dim, ...]:
    """Return the factors per dim, without brackets; `()` for dims that are written `1`."""
    return tuple([() if dim == ("1",) else tuple([n.strip("[]") for n in dim]) for dim in names])


@lru_cache(maxsize=1024)
def _parse(pattern: str) -> tuple[tuple[tuple[Dim, ...], ...], tuple[tuple[Dim, ...], ...]]:
    left, _, right = pattern.partition("->")
    return tuple(_side(part) for part in left.split(",")), tuple(
        _side(part) for part in right.split(",")
    )


def _side(text: str) -> tuple[Dim, ...]:
    return tuple(tuple(token.strip("()").split()) for token in _TOKEN.findall(text))


def _expand_ellipsis(names: tuple[Dim, ...], ndim: int) -> tuple[Dim, ...]:
    """Replace `...` by factors numbered from the right, to line up as in broadcasting."""
    if _ANY not in names:
        return names
    at, extra = names.index(_ANY), ndim - len(names) + 1
    return (*names[:at], *[(f"_{i}",) for i in reversed(range(extra))], *names[at + 1 :])
