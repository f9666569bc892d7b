"""The operator table: function -> rule, decomposition or handler."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial, update_wrapper
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
import torch.nn.functional as F

from .notation import Rule

RuleMaker = Callable[..., "Rule | None"]
DecompositionMaker = Callable[..., "Callable[..., Any] | None"]
Maker = TypeVar("Maker", bound=RuleMaker)
Function = TypeVar("Function", bound=Callable[..., Any])

RULES: dict[Callable[..., Any], RuleMaker] = {}
HANDLERS: dict[Callable[..., Any], Callable[..., Any]] = {}
DECOMPOSITIONS: dict[Callable[..., Any], DecompositionMaker] = {}
RESULT_IS_VIEW: set[Callable[..., Any]] = set()
RANDOM: set[Callable[..., Any]] = (
    set()
)  # functions without a rule that draw from torch's own generator

_OWNERS = (torch, torch.Tensor, F, torch.special, torch.linalg)


def functions(*names: str) -> Iterator[Callable[..., Any]]:
    """Yield the functions and methods of torch with these names."""
    for name in names:
        for owner in _OWNERS:
            func = getattr(owner, name, None)
            if callable(func):
                yield func


def unique(names: Iterable[str], also: Iterable[Callable[..., Any]]) -> list[Callable[..., Any]]:
    """Return the functions of these names and the further ones, each once: torch has many of them
    in two places.
    """
    return list(dict.fromkeys((*functions(*names), *also)))


def _put(table: dict[Callable[..., Any], Any], func: Callable[..., Any], entry: Any) -> None:
    """Add an entry.

    Raises:
        ValueError: the function has one; which of the two is used would depend on the order of
            imports.
    """
    if func in table:
        name = getattr(func, "__qualname__", repr(func))
        raise ValueError(
            f"{name} is registered twice: by {_whose(table[func])} and by {_whose(entry)}; remove "
            "one"
        )
    table[func] = entry


def _whose(entry: Any) -> str:
    entry = getattr(entry, "func", entry)  # of a partial
    return f"{entry.__module__}.{entry.__qualname__}"


# A strategy is cached for calls that differ only in floats (a slope, a probability, the order of a
# norm), or in ints where torch takes a number (`free_ints`). So nothing that makes a rule or a
# decomposition may depend on the value of such a number, but for its sign, or keep it. Exceptions:
# operators with a result shape that depends on a float.
LOOKS_AT_FLOATS = frozenset(
    functions(
        "interpolate",
        "upsample",
        "fractional_max_pool2d",
        "fractional_max_pool3d",
        "fractional_max_pool2d_with_indices",
        "fractional_max_pool3d_with_indices",
    )
)


def rule(
    *names: str, also: tuple[Callable[..., Any], ...] = (), view: bool = False
) -> Callable[[Maker], Maker]:
    """Register a function that makes rules for every torch function of these names.

    It is called with the operator's own arguments, tensors replaced by meta tensors of the global
    shape, and returns the `Rule` for them, or None if it has none (the operator then runs on
    gathered inputs).

    Args:
        names: names under `torch`, `torch.Tensor`, `torch.nn.functional`, `torch.special` or
            `torch.linalg`.
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


class Arguments(SimpleNamespace):
    """The arguments of one call by the parameter names of a decomposition, defaults filled in;
    tensors are meta tensors.
    """


@cache
def _signature(function: Callable[..., Any], skip: int) -> inspect.Signature:
    signature = inspect.signature(function)
    return signature.replace(parameters=list(signature.parameters.values())[skip:])


def decomposition(
    *names: str,
    also: tuple[Callable[..., Any], ...] = (),
    check: Callable[..., Any] | None = None,
    when: Callable[[Any], Any] | None = None,
    prepare: Callable[[Any], Any] | None = None,
    rule: Callable[[Any], Rule | None] | None = None,
) -> Callable[[Function], Function]:
    """Register a decomposition: another way to compute an operator where its rule would gather a
    split dim.

    The decorated function is called in place of the operator, with the operator's own arguments,
    `ShardedTensor`s included. A softmax over a split dim, for instance, is two small reductions.
    Its signature is the only one: `when`, `prepare` and `rule` get the arguments of a call by its
    parameter names, as `Arguments`. They are called once for each new combination of layouts and
    static arguments, with meta tensors (`layout_of` tells how they are sharded), so they cost
    nothing when the operator runs. They must not depend on a float, see `LOOKS_AT_FLOATS`.

    Args:
        names: names under `torch`, `torch.Tensor`, `torch.nn.functional`, `torch.special` or
            `torch.linalg`.
        also: further functions.
        check: a function of torch that raises for arguments that torch refuses, called with the
            call's own arguments.
        when: whether the decomposition applies; if not, the call is left to the rule.
        prepare: in place of `when`: what to compute in advance. It is passed to the function as its
            first argument, ahead of the operator's own. None if the decomposition does not apply.
        rule: the operator's rule for the calls that are left to it, or None if it has none.
    """

    def register(function: Function) -> Function:
        skip = int(prepare is not None)

        def make(*args: Any, **kwargs: Any) -> Callable[..., Any] | None:
            found: Callable[..., Any] | None = function
            if prepare is not None:
                prepared = prepare(_bound(function, skip, args, kwargs))
                found = None if prepared is None else partial(function, prepared)
            elif when is not None and not when(_bound(function, skip, args, kwargs)):
                found = None
            if found is not None and check is not None:
                with torch.no_grad():
                    check(*args, **kwargs)
            return found

        _register(function, skip, unique(names, also), make, rule)
        return function

    return register


def decomposition_maker(
    *names: str,
    also: tuple[Callable[..., Any], ...] = (),
    check: Callable[..., Any] | None = None,
    rule: Callable[[Any], Rule | None] | None = None,
    view: bool = False,
) -> Callable[[Function], Function]:
    """Register a function that makes a decomposition, for those of which most can be computed in
    advance.

    It is called as `rule` is, with meta tensors, once for each new combination of layouts and
    static arguments. It returns the function to call in place of the operator, with the operator's
    own arguments, or None to leave the call to the rule.

    Args:
        names, also, check, rule: as in `decomposition`; here `check` is called first.
        view: the result shares memory with the operand.
    """

    def register(function: Function) -> Function:
        def make(*args: Any, **kwargs: Any) -> Callable[..., Any] | None:
            if check is not None:
                with torch.no_grad():
                    check(*args, **kwargs)
            return function(*args, **kwargs)

        funcs = unique(names, also)
        _register(function, 0, funcs, function if check is None else make, rule)
        if view:
            RESULT_IS_VIEW.update(funcs)
        return function

    return register


def _bound(function: Callable[..., Any], skip: int, args: Any, kwargs: dict[str, Any]) -> Arguments:
    bound = _signature(function, skip).bind(*args, **kwargs)
    bound.apply_defaults()
    return Arguments(**bound.arguments)


def _register(
    function: Callable[..., Any],
    skip: int,
    funcs: Iterable[Callable[..., Any]],
    make: DecompositionMaker,
    rule: Callable[[Any], Rule | None] | None,
) -> None:
    """Add a maker of decompositions to the table and, where a rule is given, a maker of rules with
    the same signature.
    """

    def make_rule(*args: Any, **kwargs: Any) -> Rule | None:
        return rule(_bound(function, skip, args, kwargs))  # type: ignore[misc]

    for maker in (make, make_rule):
        if maker is not function:
            update_wrapper(maker, function).__signature__ = _signature(function, skip)  # type: ignore[attr-defined]
    for func in funcs:
        _put(DECOMPOSITIONS, func, make)
        if rule is not None:
            _put(RULES, func, make_rule)


def handler(
    *names: str, also: tuple[Callable[..., Any], ...] = ()
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function that is called with the operator's own arguments, `ShardedTensor`s
    included, on every call.

    For functions that are not operators on values, or that decide by values; an operator made of
    others is a decomposition. A handler may return NotImplemented to leave the call to the
    operator's decomposition or rule.
    """

    def register(func: Callable[..., Any]) -> Callable[..., Any]:
        for original in unique(names, also):
            _put(HANDLERS, original, func)
        return func

    return register


def writes_first_operand(func: Callable[..., Any]) -> bool:
    """Return whether an operator is in-place by torch's naming: `add_`, `__iadd__`."""
    name = getattr(func, "__name__", "")
    if name.startswith("__i") and name.endswith("__"):
        return name not in ("__invert__", "__int__", "__index__", "__iter__")
    if name == "__setitem__":
        return True
    return name.endswith("_") and not name.endswith("__") and not name.startswith("_foreach")
