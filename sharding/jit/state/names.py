"""The names by which code may reach attributes of the program's own objects.

    self.optimizer.step()       `optimizer`, of objects of the class of self; not `step`, which is
                                an attribute of one of torch's optimizers
    model.train()               `train`, of modules: a module calls it on the modules inside
    getattr(self, "rate")       `rate`, of objects of the class of self
    helper(x).step              `step`, of any object: what helper returns is not known
    helper(x).step()            `step`, of any object that has something there that can be called

So a trainer with a method `train` of its own, which counts steps and keeps losses, is not taken for
the module whose `train` the code calls.
"""

from __future__ import annotations

import dis
import sys
import sysconfig
import types
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

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
_BY_STRING = ("getattr", "hasattr", "setattr", "delattr")


class Use(NamedTuple):
    """Code uses a name.

    Attributes:
        name: the name.
        path: of an attribute, how the code reaches its object, as ("self", "optimizer"); None if
            that is not known.
        is_called: whether it is an attribute that the code only calls.
        is_string: whether the name is a string, as in `getattr(self, "rate")`.
    """

    name: str
    path: tuple[str, ...] | None = None
    is_called: bool = False
    is_string: bool = False


class Called:
    """The scope of names of attributes that code calls, of objects that are not known."""


# A name, and the class whose instances may have it as an attribute; None for any object, `Called`
# for any that can be called there.
Name = tuple[str, "type | None"]


@lru_cache(4096)
def is_installed(file: str) -> bool:
    """Return whether a source file is installed: torch's, a package's, or of this library."""
    if file.startswith(_TYPED):
        return False
    return file.startswith(_INSTALLED) or "/site-packages/" in file or "/dist-packages/" in file


@lru_cache(4096)
def is_program(module: str | None) -> bool:
    """Return whether a module is part of the program: not installed."""
    file = getattr(sys.modules.get(module or ""), "__file__", None)
    return module == "__main__" or (file is not None and not is_installed(file))


def names_of(
    f: types.FunctionType,
    arguments: Mapping[str, Sequence[Any]],
    assigned: Collection[str] = (),
) -> set[Name]:
    """Return the names and the strings in a function's code by which it may reach attributes.

    Each comes with the class of the objects that it may be an attribute of. Names that are
    attributes only of objects that are not the program's are left out.

    Args:
        arguments: for parameters whose values are known, all values that they may have.
        assigned: attributes whose values change while the function runs.
    """
    code = f.__code__
    strings = {x for part in codes(code) for x in _strings(part.co_consts)}
    names: set[Name] = {(x, None) for x in strings - _used_as_names(code)}
    if any(map(_computes_names, codes(code))):
        names |= {(x, None) for x in ANY_ATTRIBUTE}
    for name, path, is_called, _ in _uses(code):
        is_known = path is not None and set(path[1:]).isdisjoint(assigned)
        scopes = _scopes(_objects(f, arguments, path)) if is_known and path else {None}
        if None in scopes:
            scopes = {Called if is_called else None}
        names |= {(name, scope) for scope in scopes}
    return names


def overrides_called(kind: type, names: frozenset[str]) -> frozenset[str]:
    """Return the attributes of the program's classes that methods of installed bases read.

    A trainer of a package calls `self.compute_loss`, which the program's subclass defines.

    Args:
        names: attributes that are read of instances.
    """
    own: set[str] = set()
    inherited: dict[str, types.CodeType] = {}
    for base in reversed(kind.__mro__):
        if is_program(getattr(base, "__module__", None)):
            own.update(vars(base))
        else:
            functions = {name: getattr(f, "fget", f) for name, f in vars(base).items()}
            inherited |= {
                name: f.__code__ for name, f in functions.items() if hasattr(f, "__code__")
            }
    called: set[str] = set()
    work = [*names, "forward", "__call__"] if own else []
    while work:
        code = inherited.pop(work.pop(), None)
        if code is not None:
            read = {name for part in codes(code) for name in part.co_names}
            called |= read & own
            work += read
    return frozenset(called)


@lru_cache(4096)
def assignments_of(code: types.CodeType) -> frozenset[str]:
    """Return the attributes that the code, and that of the functions inside it, assigns."""
    names: set[str] = set()
    for part in codes(code):
        names.update(i.argval for i in dis.get_instructions(part) if i.opname == "STORE_ATTR")
        if "setattr" in part.co_names:
            names.update(_strings(part.co_consts))
    return frozenset(names)


def globals_of(code: types.CodeType) -> set[str]:
    """Return the names that the code, and that of the functions inside it, uses as globals."""
    return {
        i.argval
        for part in codes(code)
        for i in dis.get_instructions(part)
        if i.opname.endswith(("_GLOBAL", "_NAME"))
    }


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
    """Return whether the code calls `getattr` with a name that is no constant of it.

    It is told by the instructions up to the next call.
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
    uses: set[Use] = set()
    for part in codes(code):
        attributes = set(_attributes(part))
        if part is not code:
            attributes = {one._replace(path=None) for one in attributes}
        names = {one.name for one in attributes}
        uses |= attributes | {Use(name) for name in part.co_names if name not in names}
    return tuple(uses)


@lru_cache(4096)
def _used_as_names(code: types.CodeType) -> set[str]:
    """Return the strings that the code uses only as names of attributes of known objects.

    As in `getattr(self.optimizer, "train")`; none if the code has functions inside.
    """
    if len(list(codes(code))) > 1:
        return set()
    loads = Counter(
        i.argval
        for i in dis.get_instructions(code)
        if i.opname in ("LOAD_CONST", "RETURN_CONST") and isinstance(i.argval, str)
    )
    loads.update(x for one in code.co_consts if isinstance(one, tuple) for x in _strings(one))
    names = Counter(one.name for one in _attributes(code) if one.is_string)
    return {name for name, count in names.items() if loads[name] == count}


def _attributes(code: types.CodeType) -> Iterator[Use]:
    """Yield each use of an attribute."""
    path: tuple[str, ...] | None = None  # of the object on top of the stack
    is_named = False  # whether that is the first argument of `getattr`
    stored = {
        i.argval
        for i in dis.get_instructions(code)
        if i.opname.startswith(("STORE_FAST", "STORE_DEREF", "STORE_GLOBAL"))
    }
    stored = {name for x in stored for name in (x if isinstance(x, tuple) else (x,))}
    last = ""  # the global that the instruction before has loaded
    for i in dis.get_instructions(code):
        if i.is_jump_target:  # what is on the stack may come from elsewhere
            path = None
        if i.opname in _ATTRIBUTES:
            yield Use(i.argval, path, is_called=_loads_method(i))
            is_read = i.opname in ("LOAD_ATTR", "LOAD_METHOD")
            path = (*path, i.argval) if is_read and path is not None else None
        elif i.opname.startswith(("LOAD_FAST", "LOAD_DEREF", "LOAD_GLOBAL")):
            name = i.argval[-1] if isinstance(i.argval, tuple) else i.argval
            path = None if name in stored else (name,)
            is_named = last in _BY_STRING and not isinstance(i.argval, tuple)
        elif i.opname not in ("PUSH_NULL", "EXTENDED_ARG", "CACHE"):
            is_name = is_named and i.opname == "LOAD_CONST" and isinstance(i.argval, str)
            if is_name and path is not None:
                yield Use(i.argval, path, is_string=True)
            path = None
        if i.opname not in ("PUSH_NULL", "EXTENDED_ARG", "CACHE"):
            last = i.argval if i.opname == "LOAD_GLOBAL" else ""


def _loads_method(i: dis.Instruction) -> bool:
    """Return whether an instruction loads an attribute in order to call it."""
    if i.opname == "LOAD_METHOD":  # before Python 3.12
        return True
    return i.opname == "LOAD_ATTR" and sys.version_info >= (3, 12) and bool((i.arg or 0) & 1)


def _objects(
    f: types.FunctionType, arguments: Mapping[str, Sequence[Any]], path: Sequence[str]
) -> list[Any]:
    """Return the objects that a function may reach under a path."""
    first, *rest = path
    code = f.__code__
    if first in arguments:
        roots = list(arguments[first])
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


def _scopes(objects: Sequence[Any]) -> set[type | None]:
    """Return the classes whose instances may have an attribute that is read of these objects.

    {None} stands for all objects; none are returned if the objects are not the program's.
    """
    scopes = set(map(_scope, objects)) or {None}
    return {None} if None in scopes else scopes - {object}


def _scope(x: Any) -> type | None:
    """Return the class whose instances may have an attribute that is read of this object.

    None stands for all objects; `object` says that this one is not the program's.
    """
    kind = type(x)
    is_own = any(is_program(base.__module__) for base in kind.__mro__)
    forwards = any(
        name in vars(base)
        for base in kind.__mro__
        if base not in (torch.nn.Module, object)
        for name in ("__getattr__", "__getattribute__")
    )
    if isinstance(x, torch.nn.Module):  # its methods call those of the modules inside
        return None if is_own and forwards else torch.nn.Module
    if isinstance(x, (type, types.ModuleType, types.FunctionType)):
        is_foreign = isinstance(x, types.ModuleType) and not is_program(x.__name__)
        return object if is_foreign else None
    if is_own:
        return None if forwards else kind
    return object if isinstance(x, _FOREIGN) else None
