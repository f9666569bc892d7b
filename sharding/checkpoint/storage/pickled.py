"""Read the pickle of an index as data: no class is imported, made or called, no attribute set.

    torch.Size((4, 2))      PickledObject("torch.Size", args=((4, 2),))
    MetadataIndex("w")      PickledObject("torch...MetadataIndex", state=Pairs([("fqn", "w")]))
    {"w": 1}                Pairs([("w", 1)])

Time and memory are proportional to the length of the pickle.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from ....mesh.text import shortened


class PickleError(pickle.UnpicklingError):
    """The bytes are not a pickle that may be in an index."""


class Pairs(list[tuple[Any, Any]]):
    """The items of a dict, in order; a key may be there twice."""


class Name(str):
    """The name of a class or function, with its module."""

    __slots__ = ()


@dataclass(eq=False, slots=True)
class PickledObject:
    """An object: the name of its class or function, its arguments, and its state."""

    name: str
    args: tuple[Any, ...]
    state: Any = None


def loads(data: bytes, known: Mapping[str, Collection[str]]) -> Any:
    """Return the value of a pickle.

    Args:
        known: by module, the names that it may refer to.

    Raises:
        PickleError: it is damaged, or refers to another name.
    """
    try:
        return _run(data, known)
    except PickleError:
        raise
    except (IndexError, struct.error, KeyError, ValueError, TypeError, AttributeError) as error:
        raise PickleError(f"it is not a pickle, or not whole: {shortened(error)}") from error


def _run(data: bytes, known: Mapping[str, Collection[str]]) -> Any:
    stack: list[Any] = []
    marked: list[list[Any]] = []  # the stacks below each mark
    memo: dict[int, Any] = {}
    at = 0
    while True:
        op = data[at]
        at += 1
        if op == 0x94:  # MEMOIZE
            memo[len(memo)] = stack[-1]
        elif op == 0x8C:  # SHORT_BINUNICODE
            stop = at + 1 + data[at]
            stack.append(_text(data, at + 1, stop))
            at = stop
        elif op == 0x68:  # BINGET
            stack.append(memo[data[at]])
            at += 1
        elif op == 0x6A:  # LONG_BINGET
            stack.append(memo[_number(data, at, 4)])
            at += 4
        elif op == 0x71:  # BINPUT
            memo[data[at]] = stack[-1]
            at += 1
        elif op == 0x72:  # LONG_BINPUT
            memo[_number(data, at, 4)] = stack[-1]
            at += 4
        elif op == 0x4B:  # BININT1
            stack.append(data[at])
            at += 1
        elif op == 0x4D:  # BININT2
            stack.append(_number(data, at, 2))
            at += 2
        elif op == 0x4A:  # BININT
            stack.append(struct.unpack_from("<i", data, at)[0])
            at += 4
        elif op == 0x8A:  # LONG1
            stop = at + 1 + data[at]
            stack.append(int.from_bytes(_bytes(data, at + 1, stop), "little", signed=True))
            at = stop
        elif op == 0x28:  # MARK
            marked.append(stack)
            stack = []
        elif op == 0x29:  # EMPTY_TUPLE
            stack.append(())
        elif op == 0x85:  # TUPLE1
            stack[-1] = (stack[-1],)
        elif op == 0x86:  # TUPLE2
            stack[-2:] = [(stack[-2], stack[-1])]
        elif op == 0x87:  # TUPLE3
            stack[-3:] = [(stack[-3], stack[-2], stack[-1])]
        elif op == 0x74:  # TUPLE
            items, stack = stack, marked.pop()
            stack.append(tuple(items))
        elif op == 0x5D:  # EMPTY_LIST
            stack.append([])
        elif op == 0x61:  # APPEND
            item = stack.pop()
            _expect(stack[-1], list).append(item)
        elif op == 0x65:  # APPENDS
            items, stack = stack, marked.pop()
            _expect(stack[-1], list).extend(items)
        elif op == 0x7D:  # EMPTY_DICT
            stack.append(Pairs())
        elif op == 0x73:  # SETITEM
            value, key = stack.pop(), stack.pop()
            _expect(stack[-1], Pairs).append((key, value))
        elif op == 0x75:  # SETITEMS
            items, stack = stack, marked.pop()
            _expect(stack[-1], Pairs).extend(zip(items[::2], items[1::2], strict=True))
        elif op == 0x81 or op == 0x52:  # NEWOBJ, REDUCE
            args = _expect(stack.pop(), tuple)
            name = _expect(stack.pop(), Name)
            is_dict = name == "collections.OrderedDict" and not args
            stack.append(Pairs() if is_dict else PickledObject(name, args))
        elif op == 0x62:  # BUILD
            state = stack.pop()
            record = _expect(stack[-1], PickledObject)
            if record.state is not None:
                raise PickleError("it sets the state of an object twice")
            record.state = state
        elif op == 0x93:  # STACK_GLOBAL
            name, module = _expect(stack.pop(), str), _expect(stack.pop(), str)
            stack.append(_known_name(module, name, known))
        elif op == 0x63:  # GLOBAL
            middle = data.index(b"\n", at)
            stop = data.index(b"\n", middle + 1)
            name = _known_name(_text(data, at, middle), _text(data, middle + 1, stop), known)
            stack.append(name)
            at = stop + 1
        elif op == 0x58:  # BINUNICODE
            stop = at + 4 + _number(data, at, 4)
            stack.append(_text(data, at + 4, stop))
            at = stop
        elif op == 0x8D:  # BINUNICODE8
            stop = at + 8 + _number(data, at, 8)
            stack.append(_text(data, at + 8, stop))
            at = stop
        elif op == 0x4E:  # NONE
            stack.append(None)
        elif op == 0x88:  # NEWTRUE
            stack.append(True)
        elif op == 0x89:  # NEWFALSE
            stack.append(False)
        elif op == 0x47:  # BINFLOAT
            stack.append(struct.unpack_from(">d", data, at)[0])
            at += 8
        elif op == 0x80:  # PROTO
            at += 1
        elif op == 0x95:  # FRAME
            at += 8
        elif op == 0x2E:  # STOP
            (value,) = stack
            if marked or at != len(data):
                raise PickleError("there is something after its end")
            return value
        else:
            raise PickleError(
                f"it has the instruction 0x{op:02x} at byte {at - 1}, which an index may not"
            )


def _expect(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise PickleError(f"it has a {type(value).__name__} in the place of a {kind.__name__}")
    return value


def _known_name(module: str, name: str, known: Mapping[str, Collection[str]]) -> Name:
    if name not in known.get(module, ()):
        path = shortened(f"{module}.{name}")
        raise PickleError(f"it refers to {path}, which an index of a checkpoint may not")
    return Name(f"{module}.{name}")


def _number(data: bytes, at: int, length: int) -> int:
    return int.from_bytes(_bytes(data, at, at + length), "little")


def _bytes(data: bytes, start: int, stop: int) -> bytes:
    if stop > len(data):
        raise PickleError(f"it ends within a value, at byte {len(data)}")
    return data[start:stop]


def _text(data: bytes, start: int, stop: int) -> str:
    return str(_bytes(data, start, stop), "utf-8")
