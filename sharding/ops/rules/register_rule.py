"""Rules for operators that the table does not have."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor

from ...layout.spec import KINDS
from ...trees import tensors_in
from .elementwise.pointwise import is_operand
from .notation import Rule, einrule
from .registry import RULES


def register_rule(
    func: Callable[..., Any],
    pattern: str,
    *,
    linear: Sequence[Sequence[int]] = (),
    additive: Sequence[int] = (),
    combine: str = "sum",
) -> None:
    """register_rule(func, "... m k, ... k n -> ... m n"): register how an operator may be split.

    Call it on every rank.

    The names are factors. One that operands and result share may be split over any axis; one that
    the result lacks is reduced, and splitting it leaves the result pending; a `[bracketed]` one
    must be whole on every rank; `1` is a dim that is never split. Test the rule with `check_rule`.

    Args:
        func: a torch function or an operator of `torch.library` (`torch.ops.mine.op`, with a meta
            implementation), before it is first called on a `ShardedTensor`.
        pattern: one part for each tensor among the arguments, in order, and one for each result.
        linear: groups of operands in which the operator is linear, jointly: pending sums of those
            pass through.
        additive: operands that are added to the result, such as a bias.
        combine: how partial results combine where a reduced factor is split: "sum", "max", "min" or
            "product".

    Raises:
        ValueError: a pattern without "->", or an unknown way to combine.

    Communication: none.

    Example:
        >>> scaled_matmul = torch.ops.mine.scaled_matmul
        >>> sm.ops.register_rule(scaled_matmul, "m k, k n -> m n", linear=((0,), (1,)))
    """
    if "->" not in pattern:
        raise ValueError(
            "pattern must map the dims of operands to those of results, as in 'm k, k n -> m n', "
            f"got {pattern!r}"
        )
    if combine not in KINDS:
        raise ValueError(f"combine must be one of {', '.join(map(repr, KINDS))}, got {combine!r}")

    def maker(*args: Any, **kwargs: Any) -> Rule:
        operands = operands_in((*args, *kwargs.values()))
        return einrule(pattern, *operands, linear=linear, additive=additive, combine=combine)

    RULES[func] = maker


def operands_in(items: Iterable[Any]) -> Iterator[Tensor]:
    """Return the operands among the arguments of a rule maker, in order."""
    return filter(is_operand, tensors_in(items))
