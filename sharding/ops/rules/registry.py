"""The operator table: function -> rule, decomposition or handler.

Most rules are rows of tables, see `rules`. What does not fit into a row is a function: a `rule`,
whose pattern takes some lines to write; a `decomposition`, another way to compute the operator; or
a `handler`, for what is no operator on values.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, partial, update_wrapper
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
import torch.nn.functional as F

from .notation import Rule, einrule

RuleMaker = Callable[..., "Rule | None"]
DecompositionMaker = Callable[..., "Callable[..., Any] | None"]
Maker = TypeVar("Maker", bound=RuleMaker)
Function = TypeVar("Function", bound=Callable[..., Any])
Operators = list[Callable[..., Any]]

RULES: dict[Callable[..., Any], RuleMaker] = {}
HANDLERS: dict[Callable[..., Any], Callable[..., Any]] = {}
DECOMPOSITIONS: dict[Callable[..., Any], DecompositionMaker] = {}
RESULT_IS_VIEW: set[Callable[..., Any]] = set()
RANDOM: set[Callable[..., Any]] = set()  # without a rule; they draw from torch's own generator

_OWNERS: dict[str, Any] = {
    "torch": torch,
    "Tensor": torch.Tensor,
    "F": F,
    "special": torch.special,
    "linalg": torch.linalg,
}
_MORE_OWNERS: dict[str, Any] = _OWNERS | {"fft": torch.fft}


def functions(*names: str) -> Iterator[Callable[..., Any]]:
    """Yield torch's functions of these names: `norm` in all places, `linalg.norm` in one."""
    for name in names:
        place, _, own_name = name.rpartition(".")
        for owner in [_MORE_OWNERS[place]] if place else _OWNERS.values():
            func = getattr(owner, own_name, None)
            if callable(func):
                yield func


def unique(names: Iterable[str], also: Iterable[Callable[..., Any]] = ()) -> Operators:
    """Return the functions of these names and the further ones, each once: torch repeats many."""
    return list(dict.fromkeys((*functions(*names), *also)))


def _put(table: dict[Callable[..., Any], Any], funcs: Operators, entry: Any) -> None:
    """Add an entry for each of these operators.

    Raises:
        ValueError: one has an entry; which of the two is used would depend on the order of imports.
    """
    for func in funcs:
        if func in table:
            name = getattr(func, "__qualname__", repr(func))
            raise ValueError(
                f"{name} is registered twice: by {_whose(table[func])} and by {_whose(entry)}; "
                "remove one"
            )
        table[func] = entry


def _whose(entry: Any) -> str:
    entry = getattr(entry, "func", entry)  # of a partial
    return f"{entry.__module__}.{entry.__qualname__}"


def _variants(
    function: Any, funcs: Operators, with_func: bool
) -> Iterator[tuple[Any, Operators, Any]]:
    """Yield (function, operators that it serves, None); with `with_func` one for each operator.

    That is (the function with the operator as first argument, [operator], operator).
    """
    if not with_func:
        yield function, funcs, None
        return
    for func in funcs:
        variant: Any = partial(function, func)
        variant.__module__ = function.__module__
        yield variant, [func], func


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


class Arguments(SimpleNamespace):
    """The arguments of a call by the names of the parameters, with defaults and meta tensors.

    Attributes:
        func: the operator that is called, where it is registered `with_func`.
    """

    __slots__ = ("func",)


@cache
def _signature(function: Callable[..., Any], skip: int = 0) -> inspect.Signature:
    signature = inspect.signature(function)
    return signature.replace(parameters=list(signature.parameters.values())[skip:])


Bound = Callable[[Any, dict[str, Any]], Arguments]


# -- rules -----------------------------------------------------------------------------------------


def rules(
    table: Mapping[str, str | Callable[[Any], str | Rule | None]],
    *,
    with_func: bool = False,
    view: bool = False,
    **options: Any,
) -> None:
    """Register a table of rules, with a row for each operator or for several that are called alike.

    Args:
        table: names of operators and their parameters -> the rule. A pattern describes the first
            parameters, one for each of its parts. A function of the call's `Arguments` returns such
            a pattern, a `Rule`, or None where there is none.
        with_func: the arguments have the operator itself, as `func`.
        view: the results share memory with the first operand.
        options: other fields of `Rule`, for the rules of patterns.

    Example:
        >>> rules({"mm(input, mat2)": "m k, k n -> m n", "outer ger(input, vec2)": "m, n -> m n"})
    """
    for row, pattern in table.items():
        names, _, parameters = row.removesuffix(")").partition("(")
        bind = eval(f"lambda {parameters}: locals()")  # as `collections.namedtuple` does
        for _, funcs, func in _variants(bind, unique(names.split()), with_func):
            maker = _row_maker(bind, func, pattern, options)
            maker.__qualname__ = row
            _put(RULES, funcs, maker)
            if view:
                RESULT_IS_VIEW.update(funcs)


def _row_maker(bind: Any, func: Any, pattern: Any, options: dict[str, Any]) -> RuleMaker:
    def make(*args: Any, **kwargs: Any) -> Rule | None:
        arguments = bind(*args, **kwargs)
        rule: Any = pattern
        if not isinstance(pattern, str):
            named = Arguments(**arguments)
            named.func = func
            rule = pattern(named)
            if not isinstance(rule, str):
                return rule
        count = rule.partition("->")[0].count(",") + 1
        return einrule(rule, *list(arguments.values())[:count], **options)

    make.__signature__ = _signature(bind)  # type: ignore[attr-defined]
    return make


def rule(
    *names: str,
    also: tuple[Callable[..., Any], ...] = (),
    with_func: bool = False,
    view: bool = False,
) -> Callable[[Maker], Maker]:
    """Register a function that makes rules for every torch function of these names.

    It is called with the operator's own arguments, tensors replaced by meta tensors of the global
    shape, and returns the `Rule` for them, or None if it has none (the operator then runs on
    gathered inputs).

    Args:
        names: names under `torch`, `torch.Tensor`, `torch.nn.functional`, `torch.special` or
            `torch.linalg`; `F.fold`, `Tensor.flip`, ... are of one place.
        also: further functions.
        with_func: the operator itself is passed ahead of its arguments.
        view: the result shares memory with the operand.
    """

    def register(maker: Maker) -> Maker:
        for variant, funcs, _ in _variants(maker, unique(names, also), with_func):
            _put(RULES, funcs, variant)
            if view:
                RESULT_IS_VIEW.update(funcs)
        return maker

    return register


# -- decompositions --------------------------------------------------------------------------------


def decomposition(
    *names: str,
    also: tuple[Callable[..., Any], ...] = (),
    with_func: bool = False,
    check: Callable[..., Any] | bool = False,
    when: Callable[[Any], Any] | None = None,
    prepare: Callable[[Any], Any] | None = None,
    rule: Callable[[Any], Rule | None] | None = None,
) -> Callable[[Function], Function]:
    """Register another way to compute an operator where its rule would gather a split dim.

    The decorated function is called in place of the operator, with the operator's own arguments,
    `ShardedTensor`s included. A softmax over a split dim, for instance, is two small reductions.
    Its signature is the only one: `when`, `prepare` and `rule` get the arguments of a call by its
    parameter names, as `Arguments`. They are called once for each new combination of layouts and
    static arguments, with meta tensors (`layout_of` tells how they are sharded), so they cost
    nothing when the operator runs. They must not depend on a float, see `LOOKS_AT_FLOATS`.

    Args:
        names, also: as in `rule`.
        with_func: the operator itself is passed ahead of everything else.
        check: a function of torch that raises for arguments that torch refuses, called with the
            call's own arguments; True for the operator itself, `with_func`.
        when: whether the decomposition applies; if not, the call is left to the rule.
        prepare: in place of `when`: what to compute in advance. It is passed to the function ahead
            of the operator's own arguments. None if the decomposition does not apply.
        rule: the operator's rule for the calls that are left to it, or None if it has none.
    """

    def maker_of(run: Any, func: Any, bound: Bound) -> DecompositionMaker:
        def make(*args: Any, **kwargs: Any) -> Callable[..., Any] | None:
            chosen = run
            if prepare is not None:
                prepared = prepare(bound(args, kwargs))
                if prepared is None:
                    return None
                chosen = partial(run, prepared)
            elif when is not None and not when(bound(args, kwargs)):
                return None
            if check:
                with torch.no_grad():
                    (func if check is True else check)(*args, **kwargs)
            return chosen

        return make

    return _registering(maker_of, names, also, with_func, int(prepare is not None), rule, False)


def decomposition_maker(
    *names: str,
    also: tuple[Callable[..., Any], ...] = (),
    with_func: bool = False,
    check: Callable[..., Any] | bool = False,
    rule: Callable[[Any], Rule | None] | None = None,
    view: bool = False,
) -> Callable[[Function], Function]:
    """Register a function that makes a decomposition, of which most can be computed in advance.

    It is called as `rule` is, with meta tensors, once for each new combination of layouts and
    static arguments. It returns the function to call in place of the operator, with the operator's
    own arguments, or None to leave the call to the rule.

    Args:
        names, also, with_func, check, rule: as in `decomposition`; here `check` is called first.
        view: the result shares memory with the operand.
    """

    def maker_of(function: Any, func: Any, bound: Bound) -> DecompositionMaker:
        def make(*args: Any, **kwargs: Any) -> Callable[..., Any] | None:
            if check:
                with torch.no_grad():
                    (func if check is True else check)(*args, **kwargs)
            return function(*args, **kwargs)

        return make

    return _registering(maker_of, names, also, with_func, 0, rule, view)


def _registering(
    maker_of: Callable[[Any, Any, Bound], DecompositionMaker],
    names: Iterable[str],
    also: Iterable[Callable[..., Any]],
    with_func: bool,
    skip: int,
    rule: Callable[[Any], Rule | None] | None,
    view: bool,
) -> Callable[[Function], Function]:
    """Return the decorator that registers the makers of a function's decompositions and rules.

    Args:
        maker_of: (function, operator `with_func`, what gives the `Arguments` of a call) -> maker.
        skip: how many arguments the function takes ahead of the operator's own.
    """

    def register(function: Function) -> Function:
        for variant, funcs, func in _variants(function, unique(names, also), with_func):
            bound = partial(_bind_call, variant, skip, func)
            entries: list[Any] = [(DECOMPOSITIONS, maker_of(variant, func, bound))]
            if rule is not None:
                entries.append((RULES, partial(_rule_of_call, rule, bound)))
            for table, maker in entries:
                update_wrapper(maker, function)
                maker.__signature__ = _signature(variant, skip)
                _put(table, funcs, maker)
            if view:
                RESULT_IS_VIEW.update(funcs)
        return function

    return register


def _rule_of_call(rule: Callable[[Any], Rule | None], bound: Any, *args: Any, **kw: Any) -> Any:
    return rule(bound(args, kw))


def _bind_call(
    function: Callable[..., Any], skip: int, func: Any, args: Any, kwargs: dict[str, Any]
) -> Arguments:
    bound = _signature(function, skip).bind(*args, **kwargs)
    bound.apply_defaults()
    arguments = Arguments(**bound.arguments)
    arguments.func = func
    return arguments


# -- handlers --------------------------------------------------------------------------------------


def handler(
    *names: str, also: tuple[Callable[..., Any], ...] = (), with_func: bool = False
) -> Callable[[Function], Function]:
    """Register a function that is called with the operator's own arguments, on every call.

    For functions that are not operators on values, or that decide by values; an operator made of
    others is a decomposition. A handler may return NotImplemented to leave the call to the
    operator's decomposition or rule.

    Args:
        names, also, with_func: as in `rule`.
    """

    def register(function: Function) -> Function:
        for variant, funcs, _ in _variants(function, unique(names, also), with_func):
            _put(HANDLERS, funcs, variant)
        return function

    return register


def writes_first_operand(func: Callable[..., Any]) -> bool:
    """Return whether an operator is in-place by torch's naming: `add_`, `__iadd__`."""
    name = getattr(func, "__name__", "")
    if name.startswith("__i") and name.endswith("__"):
        return name not in ("__invert__", "__int__", "__index__", "__iter__")
    if name == "__setitem__":
        return True
    return name.endswith("_") and not name.endswith("__") and not name.startswith("_foreach")
