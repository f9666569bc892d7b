"""The names by which code may reach attributes of the program's own objects, and which code is the
program's own.

    self.optimizer.step()       `optimizer`, of self; not `step`, which is an attribute of one of
                                torch's optimizers
    helper(x).step()            `step`: what helper returns is not known

So a class with a method `step` of its own, which reads what changes from call to call, is not taken
for one whose `step` the code calls.
"""

from __future__ import annotations

import dis
import sys
import sysconfig
import types
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch

from ....mesh.comm.call_site import _OURS, _TORCH

_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR", "DELETE_ATTR")
_FOREIGN = (
    torch.nn.Module,
    torch.optim.Optimizer,
    torch.Tensor,
    types.ModuleType,
    dict,
    list,
    tuple,
    set,
    str,
)
_paths = sysconfig.get_paths()
_INSTALLED = (
    _TORCH,
    *_OURS,
    *{_paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")},
    "<",
)
_TYPED = ("<stdin>", "<console>", "<python-input", "<ipython-input", "<doctest")  # by the user
_UNKNOWN = object()
# In the code of a function that reads attributes whose names it computes: all of them count.
ANY_ATTRIBUTE = frozenset({"__dict__", "vars"})
# A name, and if it is an attribute's, how the code reaches its object: ("self", "optimizer").
Use = tuple[str, "tuple[str, ...] | None"]


@lru_cache(4096)
def is_installed(file: str) -> bool:
    """Return whether a source file belongs to torch, this library, the standard library or an
    installed package.
    """
    if file.startswith(_TYPED):
        return False
    return file.startswith(_INSTALLED) or "/site-packages/" in file or "/dist-packages/" in file


@lru_cache(4096)
def is_program(module: str | None) -> bool:
    """Return whether a module is part of the program: not installed."""
    file = getattr(sys.modules.get(module or ""), "__file__", None)
    return module == "__main__" or (file is not None and not is_installed(file))


def names_of(f: types.FunctionType, selves: Sequence[Any]) -> set[str]:
    """Return the names and the strings in a function's code, without those of attributes of objects
    that are not the program's.

    Args:
        selves: what the function's first argument may be; empty if that is not known.
    """
    code = f.__code__
    names = {x for part in codes(code) for x in _strings(part.co_consts)}
    if any(map(_computes_names, codes(code))):
        names |= ANY_ATTRIBUTE
    for name, path in _uses(code):
        if path is None or name in names or not _are_foreign(_objects(f, selves, path)):
            names.add(name)
    return names


def codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield a code object and those of the functions inside it."""
    yield code
    for part in code.co_consts:
        if isinstance(part, types.CodeType):
            yield from codes(part)


def _strings(constants: Iterable[Any]) -> Iterator[str]:
    """Yield the strings among constants, also of `for name in ("a", "b")`."""
    for x in constants:
        if isinstance(x, str):
            yield x
        elif isinstance(x, (tuple, frozenset)):
            yield from _strings(x)


@lru_cache(4096)
def _computes_names(code: types.CodeType) -> bool:
    """Return whether the code calls `getattr` with a name that is no constant of it, as far as the
    instructions up to the next call say.
    """
    is_inside = has_constant = False
    for i in dis.get_instructions(code):
        if i.opname == "LOAD_GLOBAL" and i.argval == "getattr":
            is_inside, has_constant = True, False
        elif not is_inside:
            continue
        elif i.opname == "LOAD_CONST" and isinstance(i.argval, str):
            has_constant = True
        elif i.opname.startswith(("FORMAT_", "BUILD_STRING", "BINARY_OP")):
            return True
        elif i.opname.startswith("CALL"):
            if not has_constant:
                return True
            is_inside = False
    return False


@lru_cache(4096)
def _uses(code: types.CodeType) -> tuple[Use, ...]:
    """Return how the code uses names."""
    inner = [part for part in codes(code) if part is not code]
    uses: set[Use] = {(name, None) for part in inner for name in part.co_names}
    path: tuple[str, ...] | None = None  # of the object on top of the stack
    stored = {
        i.argval
        for i in dis.get_instructions(code)
        if i.opname.startswith(("STORE_FAST", "STORE_DEREF", "STORE_GLOBAL"))
    }
    stored = {name for x in stored for name in (x if isinstance(x, tuple) else (x,))}
    for i in dis.get_instructions(code):
        if i.is_jump_target:  # what is on the stack may come from elsewhere
            path = None
        if i.opname in _ATTRIBUTES:
            uses.add((i.argval, path))
            is_read = i.opname in ("LOAD_ATTR", "LOAD_METHOD")
            path = (*path, i.argval) if is_read and path is not None else None
        elif i.opname.startswith(("LOAD_FAST", "LOAD_DEREF", "LOAD_GLOBAL")):
            name = i.argval[-1] if isinstance(i.argval, tuple) else i.argval
            path = None if name in stored else (name,)
        elif i.opname not in ("PUSH_NULL", "EXTENDED_ARG", "CACHE"):
            path = None
    attributes = {name for name, _ in uses}
    return (*uses, *((name, None) for name in code.co_names if name not in attributes))


def _objects(f: types.FunctionType, selves: Sequence[Any], path: Sequence[str]) -> list[Any]:
    """Return the objects that a function may reach under a path."""
    first, *rest = path
    code = f.__code__
    if code.co_argcount and first == code.co_varnames[0]:
        roots = list(selves)
    elif first in code.co_freevars:
        roots = [_content((f.__closure__ or ())[code.co_freevars.index(first)])]
    elif first in code.co_varnames or first in code.co_cellvars:
        roots = []
    else:
        roots = [f.__globals__.get(first, _UNKNOWN)]
    for name in rest:
        roots = [_attribute(x, name) for x in roots]
    return roots


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return _UNKNOWN


def _attribute(x: Any, name: str) -> Any:
    """Return an attribute of an object, as far as it is known without running code."""
    values = getattr(x, "__dict__", {})
    if name in vars(type(x)) or not isinstance(values, dict):  # a property, say
        return _UNKNOWN
    places = [values]
    if isinstance(x, torch.nn.Module):
        places += [values[part] for part in ("_modules", "_parameters", "_buffers")]
    return next((place[name] for place in places if name in place), _UNKNOWN)


def _are_foreign(objects: list[Any]) -> bool:
    """Return whether objects are known and none is of a class of the program, or one of its
    modules.
    """
    kinds = [base for x in objects for base in type(x).__mro__]
    return (
        bool(objects)
        and all(isinstance(x, _FOREIGN) for x in objects)
        and not any(is_program(kind.__module__) for kind in kinds)
        and not any(isinstance(x, types.ModuleType) and is_program(x.__name__) for x in objects)
    )
