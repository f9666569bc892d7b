"""Objects that hold references, and how their contents are read and compared."""

from __future__ import annotations

import functools
import random
import types
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from typing import Any

import numpy as np
import torch

from ...layout.spec import Placement

PLAIN = (
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    torch.dtype,
    torch.device,
    torch.Size,
    Enum,
    range,
    slice,
    Placement,
    np.generic,
)
# Methods that a program calls where it names the class.
_MAKING = {"__init__", "__new__", "__post_init__", "__repr__", "__str__"}
_SMALL = 1 << 16  # bytes of a numpy array that is compared by value, larger ones by a checksum
# What is not read of a class: what the interpreter has put there.
_OF_INTERPRETER = (
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
    types.WrapperDescriptorType,
    types.MethodDescriptorType,
    types.ClassMethodDescriptorType,
    types.BuiltinFunctionType,
)


class Holder:
    """One dict, list, cell or other object that holds references, and its contents at the time.

    Attributes:
        path: its name, for messages.
        read: returns the items it holds now, as alternating keys and values.
        held: the items it held.
        source: the dict, list or set.
    """

    __slots__ = ("held", "path", "read", "source")

    def __init__(self, path: str, read: Callable[[], list[Any]], source: Any) -> None:
        self.path, self.read, self.source = path, read, source
        self.held = read()

    def change(
        self, dynamic: set[tuple[int, Any]], is_copy: Callable[[Holder, Any, Any, Any], bool]
    ) -> str | None:
        """Describe the changes, None if there are none.

        Args:
            dynamic: entries that may have any numbers.
            is_copy: of this, a key, its value then and its value now: whether the value is another
                container with the same contents.
        """
        now, held = self.read(), self.held
        if len(now) != len(held):
            return f"{self.path} had {len(held) // 2} entries and has {len(now) // 2}"
        for i in range(0, len(held), 2):
            if not _same(now[i], held[i]):
                return f"{self.path} had the entry {_text_of(held[i])} and has {_text_of(now[i])}"
            if not _same(now[i + 1], held[i + 1]):
                if (id(self.source), held[i]) in dynamic and _is_alike(now[i + 1], held[i + 1]):
                    continue
                if is_copy(self, held[i], held[i + 1], now[i + 1]):
                    continue
                return (
                    f"{self.path}{key_text(held[i])} was {_text_of(held[i + 1])} and is "
                    f"{_text_of(now[i + 1])}"
                )
        return None


# -- contents: alternating keys and values ---------------------------------------------------------


def items(x: Mapping[Any, Any]) -> list[Any]:
    return [part for item in x.items() for part in item]


def value_items(read: Callable[[], Any]) -> list[Any]:
    """Return the value of something that has one, such as a weak reference."""
    return ["", read()]


def sequence_items(x: Iterable[Any]) -> list[Any]:
    return [part for i, value in enumerate(x) for part in (i, value)]


# The containers that a program may change.
MUTABLE = frozenset({dict, list, deque, set})


def container_items(x: Any) -> list[Any]:
    """Return the contents of a dict, list, tuple, deque or set, or of a subclass of one."""
    if isinstance(x, dict):
        return items(x)
    return ["", frozenset(x)] if isinstance(x, set) else sequence_items(x)


def cell_items(name: str, cell: Any) -> list[Any]:
    try:
        return [name, cell.cell_contents]
    except ValueError:  # empty
        return []


def global_items(values: dict[str, Any], names: list[str]) -> list[Any]:
    return [part for name in names if name in values for part in (name, values[name])]


def named_items(
    x: dict[Any, Any], names: frozenset[str], called: frozenset[str] = frozenset()
) -> list[Any]:
    """Return the items of a dict with these names.

    Args:
        called: names of items that are left out unless they can be called, or None.
    """
    return [
        part
        for item in x.items()
        if item[0] in names or (item[0] in called and (item[1] is None or callable(item[1])))
        for part in item
    ]


def marks_of(x: torch.Tensor) -> list[Any]:
    """Return the plain attributes that a program has given a tensor."""
    return [
        part
        for name, value in vars(x).items()
        if not name.startswith("_") and isinstance(value, PLAIN)
        for part in (name, value)
    ]


def class_items(kind: type, names: frozenset[str]) -> list[Any]:
    members = {
        name: x.fget if isinstance(x, property) else getattr(x, "__func__", x)
        for name, x in vars(kind).items()
    }
    implicit = {name for name in members if name == "forward" or name[:2] == name[-2:] == "__"}
    implicit -= set() if kind.__name__ in names else _MAKING
    return [
        part
        for name, x in members.items()
        if (name in names or name in implicit) and not isinstance(x, _OF_INTERPRETER)
        if not name.startswith(("__abc", "_abc"))
        for part in (name, x)
    ]


def generator_items(x: Any) -> list[Any]:
    if isinstance(x, random.Random):
        return ["", x.getstate()]
    is_new = isinstance(x, np.random.Generator)
    return ["", repr(x.bit_generator.state if is_new else x.get_state(legacy=False))]


def array_items(x: np.ndarray) -> list[Any]:
    return ["", x.tobytes() if x.nbytes < _SMALL else zlib.crc32(np.ascontiguousarray(x).data)]


def slot_names(kind: type) -> list[str]:
    names = vars(kind).get("__slots__", ())
    return [
        name
        for name in ((names,) if isinstance(names, str) else names)
        if name not in ("__weakref__", "__dict__")
    ]


# -- values ----------------------------------------------------------------------------------------


def is_number(x: Any) -> bool:
    return type(x) in (int, float) or (
        type(x) is tuple and len(x) > 0 and all(type(part) is float for part in x)
    )


def _is_alike(x: Any, y: Any) -> bool:
    """Return whether both are numbers, or both tuples of as many."""
    return type(x) in (int, float) or (
        type(x) is tuple and type(y) is tuple and len(x) == len(y) and all(map(is_number, x))
    )


def are_plain(held: Sequence[Any]) -> bool:
    """Return whether all values among alternating keys and values are plain."""
    return all(isinstance(x, (*PLAIN, frozenset)) for x in held[1::2])


def _same(x: Any, y: Any) -> bool:
    if x is y:
        return True
    if type(x) is not type(y):
        return False
    if isinstance(x, PLAIN):
        return bool(x == y) or bool(x != x and y != y)
    if isinstance(x, (tuple, frozenset)):
        return len(x) == len(y) and (all(map(_same, x, y)) if isinstance(x, tuple) else x == y)
    if isinstance(x, functools.partial):
        return x.func is y.func and _same(x.args, y.args) and x.keywords == y.keywords
    return isinstance(x, types.MethodType) and x.__func__ is y.__func__ and x.__self__ is y.__self__


def key_text(key: Any) -> str:
    if isinstance(key, str):
        return f".{key}" if key.isidentifier() else f"[{key!r}]" if key else ""
    return f"[{key}]" if isinstance(key, int) else f"[a {type(key).__name__}]"


def _text_of(x: Any) -> str:
    return repr(x)[:80] if isinstance(x, PLAIN) else f"a {type(x).__name__}"
