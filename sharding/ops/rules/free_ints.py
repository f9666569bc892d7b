"""Ints that decide neither the shape nor the layout of a result, so that calls share a strategy.

Strategies are cached by the values of ints, most of which are dims and sizes. A program may pass
another int at each call, a step counter or a position, and where it decides nothing, the calls have
one strategy:

    x * 3, x * 4             torch takes the int as a number
    x[:, 3], x[:, 4]         where dim 1 is not split; else another rank may have the element
    x[:, 0:8], x[:, 8:16]    likewise; x[:, 0:4] has another shape
    x[3] = y, x[4] = y       however x is split: every rank writes what it has of the elements

Which arguments torch takes as numbers is read off its own schemas (`Scalar` and `float`, not
`int`). A strategy may depend on the sign of such an int, since x + 0 is linear in x and an integer
tensor has no negative powers, as it may depend on whether a float is zero.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch

from ...layout.layout import Layout
from ...tensor.sharded_tensor import ShardedTensor
from .registry import functions


class AnyInt(Enum):
    """Stands for an int in the arguments of calls that share a strategy."""

    NEGATIVE = auto()
    ZERO = auto()
    POSITIVE = auto()
    INDEX = auto()


@dataclass(frozen=True, slots=True)
class SharedSlice:
    """Stands for a slice: how many elements it takes of a dim, and in which steps."""

    length: int
    step: int


class Numbers(NamedTuple):
    """Which arguments of a function are numbers.

    Attributes:
        positions: among the positional arguments.
        names: among the keyword arguments.
    """

    positions: frozenset[int]
    names: frozenset[str]


Arguments = tuple[Sequence[Any], dict[str, Any]]

# Ints that torch does not take as numbers, and that no rule of the operator looks at.
_MORE_NUMBERS = {"tril": "diagonal", "triu": "diagonal", "polygamma": "n", "round": "decimals"}
_ALIASES = {"multiply": "mul", "divide": "div", "true_divide": "div", "subtract": "sub"}
_OPERATOR_NAMES = (
    "add sub mul div truediv floordiv mod pow and or xor lshift rshift eq ne lt le gt ge"
)
_OPERATORS = frozenset(
    f"__{prefix}{name}__" for name in _OPERATOR_NAMES.split() for prefix in ("", "r", "i")
)


def shared_arguments(
    func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> Arguments | None:
    """Return the arguments with `AnyInt` and `SharedSlice` for what decides nothing.

    None if everything decides.

    Calls of the function for which this is equal, with tensors of equal layouts, have one strategy.

    Example:
        >>> shared_arguments(torch.mul, (torch.ones(2), 7), {})[0][1]
        <AnyInt.POSITIVE: 3>
    """
    share = _INDEXING.get(func)
    if share is not None:
        return share(args, kwargs)
    numbers = numbers_of(func)
    if not numbers.positions and not numbers.names:
        return None
    shared, named, changed = list(args), kwargs, False
    for position in numbers.positions:
        if position < len(args) and type(args[position]) is int:
            shared[position], changed = _any_number(args[position]), True
    for name in numbers.names if kwargs else ():
        if type(kwargs.get(name)) is int:
            named, changed = {**named, name: _any_number(kwargs[name])}, True
    return (shared, named) if changed else None


def _any_number(item: Any) -> Any:
    if type(item) is not int:
        return item
    return AnyInt.POSITIVE if item > 0 else AnyInt.NEGATIVE if item else AnyInt.ZERO


# -- numbers ---------------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def numbers_of(func: Callable[..., Any]) -> Numbers:
    """Return which arguments of a function torch takes as numbers, in every overload that has them.

    Example:
        >>> sorted(numbers_of(torch.addmm).names), sorted(numbers_of(torch.scatter).positions)
        (['alpha', 'beta'], [3])
    """
    name = getattr(func, "__name__", "")
    if name in _OPERATORS:
        return Numbers(frozenset((0, 1)), frozenset())
    name = name.strip("_")  # `mul_`; `F.threshold` is named `_threshold`
    packet = getattr(torch.ops.aten, _ALIASES.get(name, name), None) if name else None
    kinds: dict[str | int, set[bool]] = {}
    for schema in _tensor_schemas(packet) if packet is not None else ():
        for position, argument in enumerate(schema.arguments):
            type_name = str(argument.type).removeprefix("Optional[").removesuffix("]")
            if type_name == "Tensor":
                is_number = set()
            else:
                declared = argument.name == _MORE_NUMBERS.get(name)
                is_number = {declared or type_name in ("number", "float")}
            keys = (argument.name,) if argument.kwarg_only else (argument.name, position)
            for key in keys:
                kinds.setdefault(key, set()).update(is_number)
    free = {key for key, numbers in kinds.items() if numbers == {True}}
    names = frozenset(key for key in free if isinstance(key, str))
    order = _own_order(func)
    if order is not None:
        return Numbers(
            frozenset(i for i, parameter in enumerate(order) if parameter in names), names
        )
    return Numbers(frozenset(key for key in free if isinstance(key, int)), names)


def _own_order(func: Callable[..., Any]) -> list[str] | None:
    """Return the parameters of a function written in Python, whose order may be its own."""
    if not inspect.isfunction(func):
        return None
    try:
        parameters = inspect.signature(func).parameters.values()
    except ValueError:  # one of C++ in a function that passes all on
        return None
    return (
        None
        if any(p.kind is p.VAR_POSITIONAL for p in parameters)
        else [p.name for p in parameters]
    )


def _tensor_schemas(packet: Any) -> Iterator[Any]:
    """Yield the schemas of an operator that take a tensor; others are of numbers and lists."""
    for overload in packet.overloads():
        schema = getattr(packet, overload)._schema
        if any(str(argument.type) == "Tensor" for argument in schema.arguments):
            yield schema


# -- indices ---------------------------------------------------------------------------------------


def _is_split(layout: Layout, dim: int) -> bool:
    return any(layout.mesh.size(axis) > 1 for axis in layout.spec.dims[dim])


def _shared_entry(entry: Any, size: int, split: bool) -> Any:
    """Return an entry of an index without what decides nothing on a dim of this size."""
    if split:
        return entry
    if type(entry) is int:
        return AnyInt.INDEX if -size <= entry < size else entry
    if type(entry) is slice and all(
        bound is None or type(bound) is int for bound in (entry.start, entry.stop, entry.step)
    ):
        if entry.step is not None and entry.step <= 0:
            return entry
        first, last, step = entry.indices(size)
        return entry if last - first == size else SharedSlice(len(range(first, last, step)), step)
    return entry


def _shared_entries(layout: Layout, index: Any, writes: bool) -> tuple[Any, ...] | None:
    """Return an index with an entry for each dim, shared where it may be.

    None for one with tensors.

    Args:
        writes: ints decide nothing on split dims either.
    """
    entries = list(index) if type(index) is tuple else [index]
    if not all(
        entry is None or entry is Ellipsis or type(entry) in (int, slice) for entry in entries
    ):
        return None
    missing = len(layout.shape) - sum(
        entry is not None and entry is not Ellipsis for entry in entries
    )
    at = next((i for i, entry in enumerate(entries) if entry is Ellipsis), len(entries))
    whole = [*entries[:at], *[slice(None)] * missing, *entries[at + 1 :]]
    if missing < 0 or Ellipsis in whole[at:]:
        return None
    shared, dim = [], 0
    for entry in whole:
        if entry is None:
            shared.append(entry)
            continue
        split = _is_split(layout, dim)
        if split and not writes and entry != slice(None):
            return None  # the dims are cut together, in a plan that has all bounds
        shared.append(
            _shared_entry(entry, layout.shape[dim], split and not (writes and type(entry) is int))
        )
        dim += 1
    return tuple(shared)


def _share_getitem(args: Sequence[Any], kwargs: dict[str, Any]) -> Arguments | None:
    input, index = args
    entries = _shared_entries(input._layout, index, False) if type(input) is ShardedTensor else None
    return None if entries is None else ((input, entries), kwargs)


def _share_setitem(args: Sequence[Any], kwargs: dict[str, Any]) -> Arguments | None:
    input, index, value = args
    if type(input) is not ShardedTensor:
        return None
    entries = _shared_entries(input._layout, index, True)
    return (input, index if entries is None else entries, _any_number(value)), kwargs


def _share_along_dim(
    name: str, length: str | None, args: Sequence[Any], kwargs: dict[str, Any]
) -> Arguments | None:
    """Return the arguments of `select` or `narrow` without the index on a dim that is not split.

    Args:
        name: of the parameter that is the index.
        length: of the parameter that is how many elements are taken, if there is one.
    """
    names = ["self", "dim", name] if length is None else ["self", "dim", name, length]
    bound = dict(zip(names, args, strict=False)) | {
        ("self" if key == "input" else key): item for key, item in kwargs.items()
    }
    input = bound.get("self")
    if set(bound) != set(names) or type(input) is not ShardedTensor or not input.ndim:
        return None
    dim, index, count = bound["dim"], bound[name], 1 if length is None else bound[length]
    if (
        any(type(item) is not int for item in (dim, index, count))
        or not -input.ndim <= dim < input.ndim
    ):
        return None
    size = input.shape[dim]
    if (
        _is_split(input._layout, dim % input.ndim)
        or not 0 <= (index + size if index < 0 else index) <= size - count
    ):
        return None
    return [AnyInt.INDEX if key == name else item for key, item in bound.items()], {}


_INDEXING: dict[Callable[..., Any], Callable[[Sequence[Any], dict[str, Any]], Arguments | None]] = {
    torch.Tensor.__getitem__: _share_getitem,
    torch.Tensor.__setitem__: _share_setitem,
    **dict.fromkeys(functions("select"), partial(_share_along_dim, "index", None)),
    **dict.fromkeys(
        functions("narrow", "narrow_copy"), partial(_share_along_dim, "start", "length")
    ),
}
