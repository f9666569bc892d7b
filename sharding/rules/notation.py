"""Rules: what an operator does to the dims of its operands, in einops notation.

A rule such as `"... m k, ... k n -> ... m n"` names the factors of every dim. From it the engine reads how the operator
may be split:

* a factor may be split over a mesh axis in every operand and result that has it; operands without it stay whole;
* a factor that no result has is reduced: splitting it leaves the result pending (`combine` says with which kind);
* a `[bracketed]` factor must be whole on every rank;
* `(b s)` is a dim made of several factors, major to minor, as a reshape makes them;
* `1` is a dim of size one, `...` any number of leading dims, aligned from the right and broadcast as PyTorch does.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

Dim = tuple[str, ...]  # the factors of one dim, major to minor; () for a dim that is never split

_ANY: Dim = ("...",)
_TOKEN = re.compile(r"\.\.\.|1|\[?\w+\]?|\([\w ]+\)")


class NoMatch(Exception):
    """Operands do not have the dims that a pattern speaks of."""


@dataclass(frozen=True)
class Rule:
    """One operator call, as factors.

    Attributes:
        operands: the tensors that `inputs` speaks of (meta tensors of the global shape), in the order of `inputs`.
        inputs: per operand, per dim, its factors.
        outputs: per result tensor, per dim, its factors.
        sizes: size of each factor.
        whole: factors that must not be split.
        combine: pending kind of a result when a factor that it lacks is split.
        linear: groups of operands; the operator is linear in each group jointly (the other operands held fixed), so
            that it may be applied to pending sums.
        additive: operands that are added to the result (a bias): they become pending where the result does.
        transparent: the operator only moves values, so that values pending with any kind pass through.
        pointwise: the result has the broadcast shape of the operands, and a dtype that depends on nothing but their dtypes
            and the static arguments.
        local: function to call on the local tensors in place of the operator, with the operator's arguments.
        bind: makes that function once it is known how everything lies: `(layouts of the operands, in the order of
            `operands`; layouts of the results) -> function`. For sizes and offsets that differ from rank to rank.
        result: the operator's result on meta tensors, where it cannot simply be run on them.
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
    """Match operands to a pattern; operands that are None are left out together with their part of the pattern.

    A dim of size one whose factor is larger in another operand is broadcast and never split.

    Args:
        pattern: the rule, as this module's docstring says.
        operands: one for each part of the pattern's left side.
        sizes: of the parts of composite dims.
        linear, additive: as in `Rule`, counting the operands of the pattern.
        options: other fields of `Rule`.

    Raises:
        NoMatch: the operands have not the dims of the pattern.

    Example:
        >>> x, w = torch.empty(8, 4, device="meta"), torch.empty(6, 4, device="meta")
        >>> rule = einrule("... k, n k -> ... n", x, w)
        >>> rule.inputs, rule.outputs
        (((('_0',), ('k',)), (('n',), ('k',))), ((('_0',), ('n',)),))
    """
    left, right = _parse(pattern)
    if len(left) != len(operands):
        raise NoMatch(f"{pattern!r} is for {len(left)} operands, not {len(operands)}")
    given = [i for i, x in enumerate(operands) if x is not None]
    tensors = tuple(x for x in operands if x is not None)
    tokens = [_expand_ellipsis(left[i], t.ndim) for i, t in zip(given, tensors, strict=True)]
    longest = max((len(t) - len(left[i]) + 1 for i, t in zip(given, tokens, strict=True) if _ANY in left[i]), default=0)
    outputs = [_expand_ellipsis(names, len(names) - 1 + longest) for names in right]
    known = _factor_sizes(pattern, tokens, tensors, sizes or {})
    position = {old: new for new, old in enumerate(given)}
    return Rule(
        operands=tensors,
        inputs=tuple(_dims(names, t.shape, known) for names, t in zip(tokens, tensors, strict=True)),
        outputs=tuple(_dims(names, None, known) for names in outputs),
        sizes=known,
        whole=frozenset(n[1:-1] for dims in (*tokens, *outputs) for names in dims for n in names if n[0] == "["),
        linear=tuple(tuple(position[i] for i in group if i in position) for group in linear if group[0] in position),
        additive=frozenset(position[i] for i in additive if i in position),
        **options,
    )


def _factor_sizes(
    pattern: str, tokens: Sequence[tuple[Dim, ...]], tensors: Sequence[torch.Tensor], given: Mapping[str, int]
) -> dict[str, int]:
    """The size of every factor: that of the dims that have it, where they are not broadcast."""
    sizes = dict(given)
    for names, tensor in zip(tokens, tensors, strict=True):
        if len(names) != tensor.ndim:
            raise NoMatch(f"{pattern!r} does not fit a tensor of {tensor.ndim} dims")
        for name, size in zip(names, tensor.shape, strict=True):
            if len(name) == 1 and sizes.get(name[0].strip("[]"), 1) == 1:
                sizes[name[0].strip("[]")] = size
    return sizes


@lru_cache(maxsize=1024)
def _parse(pattern: str) -> tuple[tuple[tuple[Dim, ...], ...], tuple[tuple[Dim, ...], ...]]:
    left, _, right = pattern.partition("->")
    return tuple(_side(part) for part in left.split(",")), tuple(_side(part) for part in right.split(","))


def _side(text: str) -> tuple[Dim, ...]:
    return tuple(tuple(token.strip("()").split()) for token in _TOKEN.findall(text))


def _expand_ellipsis(names: tuple[Dim, ...], ndim: int) -> tuple[Dim, ...]:
    """Replace `...` by factors numbered from the right, so that shorter operands line up as in broadcasting."""
    if _ANY not in names:
        return names
    at, extra = names.index(_ANY), ndim - len(names) + 1
    return (*names[:at], *[(f"_{i}",) for i in reversed(range(extra))], *names[at + 1 :])


def _dims(names: tuple[Dim, ...], shape: Sequence[int] | None, sizes: dict[str, int]) -> tuple[Dim, ...]:
    """Factors per dim, without brackets; `()` for dims that are broadcast or of size one by name."""
    dims = []
    for i, name in enumerate(names):
        plain = tuple(n.strip("[]") for n in name)
        broadcast = shape is not None and len(plain) == 1 and shape[i] == 1 and sizes.get(plain[0], 1) != 1
        dims.append(() if plain == ("1",) or broadcast else plain)
    return tuple(dims)
