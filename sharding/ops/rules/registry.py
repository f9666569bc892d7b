"""The operator table: function -> rule, or function -> handler."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
import torch.nn.functional as F

from .notation import Rule

RuleMaker = Callable[..., "Rule | None"]
FormMaker = Callable[..., "Callable[..., Any] | None"]
Maker = TypeVar("Maker", bound=RuleMaker)
Form = TypeVar("Form", bound=FormMaker)

RULES: dict[Callable[..., Any], RuleMaker] = {}
HANDLERS: dict[Callable[..., Any], Callable[..., Any]] = {}
FORMS: dict[Callable[..., Any], FormMaker] = {}
RESULT_IS_VIEW: set[Callable[..., Any]] = set()
RANDOM: set[Callable[..., Any]] = set()  # functions without a rule that draw from torch's own generator

_OWNERS = (torch, torch.Tensor, F, torch.special, torch.linalg)


def functions(*names: str) -> Iterator[Callable[..., Any]]:
    """The functions and methods of torch that go by these names."""
    for name in names:
        for owner in _OWNERS:
            func = getattr(owner, name, None)
            if callable(func):
                yield func


def unique(names: Iterable[str], also: Iterable[Callable[..., Any]]) -> list[Callable[..., Any]]:
    """Return the functions that go by these names and the further ones, each once: torch has many of them in two places."""
    return list(dict.fromkeys((*functions(*names), *also)))


def _put(table: dict[Callable[..., Any], Any], func: Callable[..., Any], entry: Any) -> None:
    """Raises: ValueError for a second entry of a function: which of the two were used would depend on the order of imports."""
    if func in table:
        name = getattr(func, "__qualname__", repr(func))
        raise ValueError(f"{name} is registered twice: by {_whose(table[func])} and by {_whose(entry)}; remove one")
    table[func] = entry


def _whose(entry: Any) -> str:
    entry = getattr(entry, "func", entry)  # of a partial
    return f"{entry.__module__}.{entry.__qualname__}"


# Decisions are kept for calls that differ only in numbers with a fraction (a slope, a probability, the order of a norm), so
# that no maker of rules or forms may look at one, nor a form keep one. These are the exceptions: what they make has a shape
# that depends on such a number.
LOOKS_AT_FLOATS = frozenset(
    functions(
        "interpolate", "upsample", "fractional_max_pool2d", "fractional_max_pool3d", "fractional_max_pool2d_with_indices",
        "fractional_max_pool3d_with_indices",
    )
)  # fmt: skip


def rule(*names: str, also: tuple[Callable[..., Any], ...] = (), view: bool = False) -> Callable[[Maker], Maker]:
    """Register a maker of rules for every torch function of these names.

    The maker is called with the operator's own arguments, tensors replaced by meta tensors of the global shape, and
    returns the `Rule` for them, or None where it has none (the operator then runs on gathered inputs).

    Args:
        names: names under `torch`, `torch.Tensor`, `torch.nn.functional`, `torch.special` or `torch.linalg`.
        also: further functions.
        view: the result shares memory with the operand.
    """

    def register(maker: Maker) -> Maker:
        for func in unique(names, also):
            _put(RULES, func, maker)
            if view:
                RESULT_IS_VIEW.add(func)
        return maker

    return register


def form(*names: str, also: tuple[Callable[..., Any], ...] = ()) -> Callable[[Form], Form]:
    """Register a maker of forms: other ways to compute an operator where its operands lie in a way that the rule cannot use.

    The maker is called once for each new combination of layouts and static arguments, with the operator's own arguments,
    tensors replaced by meta tensors (`layout_of` tells how they lie). It returns the form, a function of the operator's
    arguments, `ShardedTensor`s included, that is called from then on; or None to leave the call to the rule. A softmax over
    a split dim, for instance, is two small reductions instead of a gathered dim. Forms are kept, so looking at the layouts
    costs nothing when the operator runs.
    """

    def register(maker: Form) -> Form:
        for func in unique(names, also):
            _put(FORMS, func, maker)
        return maker

    return register


def handler(
    *names: str, also: tuple[Callable[..., Any], ...] = ()
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function that is called with the operator's own arguments, `ShardedTensor`s included, on every call.

    For what is not an operator on values, and where values decide what to do. Operators that are made of others are
    forms. A handler may return NotImplemented to leave the call to the operator's form or rule.
    """

    def register(func: Callable[..., Any]) -> Callable[..., Any]:
        for original in unique(names, also):
            _put(HANDLERS, original, func)
        return func

    return register


def writes_first_operand(func: Callable[..., Any]) -> bool:
    """Whether an operator is in-place by torch's naming: `add_`, `__iadd__`."""
    name = getattr(func, "__name__", "")
    if name.startswith("__i") and name.endswith("__"):
        return name not in ("__invert__", "__int__", "__index__", "__iter__")
    if name == "__setitem__":
        return True
    return name.endswith("_") and not name.endswith("__") and not name.startswith("_foreach")
