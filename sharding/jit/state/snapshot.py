"""What Python state a function can reach, as it was when its graph was made.

A graph is right only while everything that the function read in Python is as it was. So before a
recording, everything reachable is noted: from the arguments, closures, globals that the code names,
`self`, modules, optimizers, lists, dicts and instances (of the program's own classes, the
attributes that its code names). A later call compares. Dicts have versions, so a call looks only at
those that were written. After the recording the state is compared once more: a graph would not
repeat the changes that the function itself made.

Functions and classes of torch, the standard library and installed packages are taken as constant;
so is the inside of this library's own objects (meshes, layouts, units), of which the graph records
the effects. Instances of classes of installed packages are inspected.
"""

from __future__ import annotations

import functools
import io
import random
import sysconfig
import types
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from enum import Enum
from operator import attrgetter, is_
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._C._dynamo.guards import dict_version  # type: ignore[import-not-found]

from ....mesh.comm.call_site import _OURS, _TORCH
from ....mesh.device_mesh import DeviceMesh
from ...layout.layout import Layout
from ...layout.spec import Placement
from ...tensor.sharded_tensor import ShardedTensor
from .iterators import iterator_state
from .names import codes, names_of

_PLAIN = (
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
_paths = sysconfig.get_paths()
_INSTALLED = (
    _TORCH,
    *_OURS,
    *{_paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")},
    "<",
)
_PACKAGE = __name__.partition(".")[0]
_LOOKED_INTO = tuple(
    f"{_PACKAGE}.sharding.{part}"
    for part in ("functional.shard_map", "training", "optim", "jit.jit")
)
_OPAQUE = (
    "torch._",
    "torch.autograd",
    "torch.distributed",
    "torch.cuda",
    "torch.utils",
    "threading",
    "logging",
    "weakref",
    "_io",
    _PACKAGE,
)
_OF_MODULES = frozenset(torch.nn.Module().__dict__)
_OF_SCHEDULERS = {"get_last_lr", "get_lr", "last_epoch", "_last_lr", "_step_count", "state_dict"}
_MAKING = {
    "__init__",
    "__new__",
    "__post_init__",
    "__repr__",
    "__str__",
}  # methods that a program calls where it names the class
_SMALL = 1 << 16  # bytes of a numpy array that is compared by value, larger ones by a checksum


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

    def change(self, dynamic: set[tuple[int, Any]]) -> str | None:
        """Describe the changes, None if there are none; entries in `dynamic` may have any
        numbers.
        """
        now, held = self.read(), self.held
        if len(now) != len(held):
            return f"{self.path} had {len(held) // 2} entries and has {len(now) // 2}"
        for i in range(0, len(held), 2):
            if not _same(now[i], held[i]):
                return f"{self.path} had the entry {_shown(held[i])} and has {_shown(now[i])}"
            if not _same(now[i + 1], held[i + 1]):
                if (id(self.source), held[i]) in dynamic and _is_alike(now[i + 1], held[i + 1]):
                    continue
                return (
                    f"{self.path}{_key_text(held[i])} was {_shown(held[i + 1])} and is "
                    f"{_shown(now[i + 1])}"
                )
        return None


class Snapshot:
    """Everything that some objects can reach.

    Attributes:
        holders: the dicts, lists, cells and the like.
        tensors: plain tensors, and their paths.
        sharded: sharded tensors, and their paths.
        numbers: hyperparameters, as dicts and keys.
        meshes: the meshes.
        iterators: iterators, their paths, and where they were.
    """

    def __init__(self, roots: list[tuple[str, Any]]) -> None:
        self._names: set[str] = set()  # by which the program's code may reach its own objects
        before = -1
        while len(self._names) > before:
            before = len(self._names)
            self._walk(roots)
            self._names |= self._used_names()

    def _walk(self, roots: list[tuple[str, Any]]) -> None:
        self.holders: list[Holder] = []
        self.tensors: list[tuple[Tensor, str]] = []
        self.sharded: list[tuple[ShardedTensor, str]] = []
        self.numbers: list[tuple[dict[Any, Any], str]] = []
        self.meshes: list[DeviceMesh] = []
        self.iterators: list[tuple[str, Any, Any]] = []
        self._functions: list[types.FunctionType] = []
        self._instances: list[Any] = []
        self._seen: dict[int, Any] = {}
        self._todo: deque[tuple[str, Any]] = deque(roots)
        while self._todo:
            path, x = self._todo.popleft()
            if not isinstance(x, _PLAIN) and id(x) not in self._seen:
                self._seen[id(x)] = x
                self._visit(path, x)

    def change(self, dynamic: set[tuple[int, Any]]) -> str | None:
        """Return the first thing that has changed since, as text; None if nothing has."""
        advanced = next(
            (path for path, x, before in self.iterators if iterator_state(x) != before), None
        )
        if advanced is not None:
            return (
                f"{advanced} is an iterator and was advanced: call next() outside and pass what it "
                "returns"
            )
        return next(
            (change for holder in self.holders if (change := holder.change(dynamic)) is not None),
            None,
        )

    def knows(self, x: Any) -> bool:
        """Return whether an object can be reached."""
        return id(x) in self._seen

    def _used_names(self) -> set[str]:
        selves: dict[types.CodeType, list[Any]] = {}
        for x in self._instances:
            methods = [
                getattr(f, "fget", f) for base in type(x).__mro__ for f in vars(base).values()
            ]
            for code in {f.__code__ for f in methods if isinstance(f, types.FunctionType)}:
                selves.setdefault(code, []).append(x)
        return {
            name
            for f in self._functions
            for name in names_of(f, selves.get(f.__code__, ()), _is_program)
        }

    # -- the walk ----------------------------------------------------------------------------------

    def _hold(self, path: str, read: Callable[[], list[Any]], source: Any = None) -> None:
        holder = Holder(path, read, source)
        self.holders.append(holder)
        for i in range(0, len(holder.held), 2):
            self._todo.append((path + _key_text(holder.held[i]), holder.held[i + 1]))

    def _visit(self, path: str, x: Any) -> None:
        if isinstance(x, Tensor):
            self._visit_tensor(path, x)
        elif isinstance(x, dict):
            self._hold(path, functools.partial(_items, x), x)
        elif isinstance(x, (list, tuple, deque)):
            self._hold(path, lambda: [part for i, value in enumerate(x) for part in (i, value)], x)
        elif isinstance(x, (set, frozenset)):
            self._hold(path, lambda: ["", frozenset(x)] if isinstance(x, set) else [], x)
        elif isinstance(x, types.FunctionType):
            self._visit_function(path, x)
        elif isinstance(x, types.MethodType):
            self._todo += [(path.rpartition(".")[0] or "self", x.__self__), (path, x.__func__)]
        elif isinstance(x, functools.partial):
            self._todo += [
                (path, x.func),
                (f"{path}.args", x.args),
                (f"{path}.keywords", x.keywords),
            ]
        elif isinstance(x, np.ndarray):
            self._hold(
                path,
                lambda: [
                    "",
                    x.tobytes() if x.nbytes < _SMALL else zlib.crc32(np.ascontiguousarray(x).data),
                ],
            )
        elif isinstance(x, (random.Random, np.random.Generator, np.random.RandomState)):
            self._hold(path, functools.partial(_state_of_generator, x))
        elif isinstance(x, Iterator) and not isinstance(x, io.IOBase):
            self.iterators.append((path, x, iterator_state(x)))
        elif isinstance(x, type):
            self._visit_class(path, x)
        elif not isinstance(x, (types.ModuleType, types.BuiltinFunctionType)):
            self._visit_instance(path, x)

    def _visit_tensor(self, path: str, x: Tensor) -> None:
        if isinstance(x, ShardedTensor):
            self.sharded.append((x, path))
        else:
            self.tensors.append((x, path))

    def _visit_instance(self, path: str, x: Any) -> None:
        holders: list[dict[str, Any]] = []
        if isinstance(x, torch.optim.Optimizer):
            holders = x.param_groups
        elif getattr(type(x), "_numbers_are_inputs", False):
            holders = [vars(x)]
        self.numbers += [
            (values, key)
            for values in holders
            for key, value in values.items()
            if _is_number(value)
        ]
        if isinstance(x, DeviceMesh):
            self.meshes.append(x)
        kind = type(x)
        if isinstance(x, torch.optim.lr_scheduler.LRScheduler) and not self._names & _OF_SCHEDULERS:
            return  # it acts through learning rates, which are inputs
        if hasattr(kind, "__wrapped_function__"):
            self._todo.append((path, getattr(x, "__wrapped_function__")))  # noqa: B009
            return
        module = kind.__module__ or ""
        is_known = isinstance(
            x, (torch.nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)
        )
        if not is_known and (
            module == "builtins"
            or (module.startswith(_OPAQUE) and not module.startswith(_LOOKED_INTO))
        ):
            return
        values = getattr(x, "__dict__", None)
        if any(_is_program(base.__module__) for base in kind.__mro__):
            self._instances.append(x)
        if (
            isinstance(values, dict)
            and _is_program(module)
            and not isinstance(x, torch.optim.Optimizer)
        ):
            names = (
                self._names
                if "__dict__" not in self._names and "vars" not in self._names
                else set(values)
            )
            self._hold(
                path,
                functools.partial(_named_items, values, frozenset(names) | _OF_MODULES),
                values,
            )
        elif isinstance(values, dict):
            self._hold(path, functools.partial(_items, values), values)
        slots = [name for base in kind.__mro__ for name in _slots(base)]
        if slots:
            self._hold(
                path,
                lambda: [
                    part for name in slots if hasattr(x, name) for part in (name, getattr(x, name))
                ],
            )
        self._todo.append((kind.__name__, kind))

    def _visit_class(self, path: str, kind: type) -> None:
        """Look at the methods and plain attributes of the program's own classes."""
        for base in kind.__mro__:
            if _is_program(getattr(base, "__module__", None)):
                self._hold(
                    base.__name__, functools.partial(_class_items, base, frozenset(self._names))
                )

    def _visit_function(self, path: str, f: types.FunctionType) -> None:
        file = f.__code__.co_filename
        if file.startswith(_TORCH):
            return
        inside = f"{f.__qualname__}()"
        for name, cell in zip(f.__code__.co_freevars, f.__closure__ or (), strict=True):
            self._hold(f"{inside} closure", functools.partial(_cell_items, name, cell))
        if is_installed(file):
            return
        self._hold(
            f"{inside} defaults",
            lambda: ["", f.__defaults__, "kw", f.__kwdefaults__, "code", f.__code__],
        )
        if f.__dict__:
            self._hold(f"{inside} attributes", functools.partial(_items, f.__dict__), f.__dict__)
        self._functions.append(f)
        names = sorted({name for code in codes(f.__code__) for name in code.co_names})
        used = [name for name in names if name in f.__globals__]
        if used:
            self._hold(
                f"globals of {f.__module__}", functools.partial(_global_items, f.__globals__, used)
            )
        for name in used:
            module = f.__globals__[name]
            if isinstance(module, types.ModuleType) and _is_program(module.__name__):
                self._hold(
                    name,
                    functools.partial(
                        _global_items, vars(module), [n for n in names if n in vars(module)]
                    ),
                )


class Guard:
    """Whether a snapshot still holds, in little time.

    Attributes:
        storages: the memory of all tensors that can be reached.
        versions: how often each of them had been written.
    """

    def __init__(self, snapshot: Snapshot, dynamic: set[tuple[int, Any]]) -> None:
        self._snapshot, self._dynamic = snapshot, dynamic
        empty = {h for h in snapshot.holders if h.source is not None and not h.source}
        self._empty: list[Any] = [h.source for h in empty]
        self._dicts = [h for h in snapshot.holders if isinstance(h.source, dict) and h not in empty]
        self._sources: list[Any] = [h.source for h in self._dicts]
        self._others = [
            (h, h.read, h.held[1::2])
            for h in snapshot.holders
            if not isinstance(h.source, dict) and h not in empty and h.held
        ]
        self._versions = list(map(dict_version, self._sources))
        self._leaves = [x for x, _ in snapshot.sharded]
        self._layouts: list[Layout] = [x._layout for x in self._leaves]
        self._kept = [x._local for x in self._leaves]
        self._needs = [x.requires_grad for x, _ in snapshot.tensors] + [
            x.requires_grad for x in self._kept
        ]
        self._checked = [x for x, _ in snapshot.tensors] + self._kept
        self.versions = self._versions_now()
        self.storages = {x.untyped_storage()._cdata for x in self._checked if x.numel()}

    def _versions_now(self) -> list[int]:
        return [-1 if x.is_inference() else x._version for x in self._checked] + [
            x._data_accesses for x in self._leaves
        ]

    def was_written(self) -> bool:
        """Return whether a tensor was written since the snapshot."""
        return self._versions_now() != self.versions

    def change(self) -> str | None:
        """Describe the changes since the snapshot, None if there are none."""
        if any(self._empty):
            return self._snapshot.change(self._dynamic) or "a list was filled and emptied"
        versions = list(map(dict_version, self._sources))
        if versions != self._versions:
            for holder, now, before in zip(self._dicts, versions, self._versions, strict=True):
                if now != before and (change := holder.change(self._dynamic)) is not None:
                    return change
            self._versions = versions
        for holder, read, held in self._others:
            values = read()[1::2]
            if (len(values) != len(held) or not all(map(is_, values, held))) and (
                change := holder.change(set())
            ) is not None:
                return change
        return self._change_of_tensors()

    def _change_of_tensors(self) -> str | None:
        if not all(map(is_, map(_local_of, self._leaves), self._kept)) or not all(
            map(is_, map(_layout_of, self._leaves), self._layouts)
        ):
            known = zip(self._snapshot.sharded, self._kept, self._layouts, strict=True)
            path = next(
                path
                for (x, path), part, layout in known
                if x._local is not part or x._layout is not layout
            )
            return f"the local part or the layout of {path} was replaced"
        needs = list(map(_requires_grad, self._checked))
        if needs != self._needs:
            i = list(map(is_, needs, self._needs)).index(False)
            paths = [path for _, path in (*self._snapshot.tensors, *self._snapshot.sharded)]
            return f"{paths[i]}.requires_grad was {self._needs[i]} and is {needs[i]}"
        return None

    @property
    def names(self) -> dict[int, str]:
        """The names of plain tensors, and of the local parts of sharded ones, by their ids."""
        found = {id(x): path for x, path in self._snapshot.tensors}
        return found | {
            id(part): path
            for part, (_, path) in zip(self._kept, self._snapshot.sharded, strict=True)
        }


# --------------------------------------------------------------------------------------------------

_local_of, _layout_of, _requires_grad = (
    attrgetter("_local"),
    attrgetter("_layout"),
    attrgetter("requires_grad"),
)


def _items(x: dict[Any, Any]) -> list[Any]:
    return [part for item in x.items() for part in item]


def _cell_items(name: str, cell: Any) -> list[Any]:
    try:
        return [name, cell.cell_contents]
    except ValueError:  # empty
        return []


def _global_items(values: dict[str, Any], names: list[str]) -> list[Any]:
    return [part for name in names if name in values for part in (name, values[name])]


def _named_items(x: dict[Any, Any], names: frozenset[str]) -> list[Any]:
    return [part for item in x.items() if item[0] in names for part in item]


def _class_items(kind: type, names: frozenset[str]) -> list[Any]:
    wanted = (*_PLAIN, types.FunctionType, list, dict, tuple, set)
    found = {
        name: x.fget if isinstance(x, property) else getattr(x, "__func__", x)
        for name, x in vars(kind).items()
    }
    implicit = {name for name in found if name == "forward" or name[:2] == name[-2:] == "__"}
    implicit -= set() if kind.__name__ in names else _MAKING
    named = {name: x for name, x in found.items() if name in names or name in implicit}
    return [
        part
        for name, x in named.items()
        if isinstance(x, wanted) and not name.startswith("__abc")
        for part in (name, x)
    ]


def _state_of_generator(x: Any) -> list[Any]:
    if isinstance(x, random.Random):
        return ["", x.getstate()]
    return [
        "",
        repr(
            x.bit_generator.state
            if isinstance(x, np.random.Generator)
            else x.get_state(legacy=False)
        ),
    ]


def _slots(kind: type) -> list[str]:
    names = vars(kind).get("__slots__", ())
    return [
        name
        for name in ((names,) if isinstance(names, str) else names)
        if name not in ("__weakref__", "__dict__")
    ]


@functools.lru_cache(4096)
def is_installed(file: str) -> bool:
    """Return whether a source file belongs to torch, this library, the standard library or an
    installed package.
    """
    return file.startswith(_INSTALLED) or "/site-packages/" in file or "/dist-packages/" in file


@functools.lru_cache(4096)
def _is_program(module: str | None) -> bool:
    """Return whether a module is part of the program: not installed."""
    import sys

    file = getattr(sys.modules.get(module or ""), "__file__", None)
    return module == "__main__" or (file is not None and not is_installed(file))


def _is_number(x: Any) -> bool:
    return type(x) in (int, float) or (
        type(x) is tuple and len(x) > 0 and all(type(part) is float for part in x)
    )


def _is_alike(x: Any, y: Any) -> bool:
    """Return whether both are numbers, or both tuples of as many."""
    return type(x) in (int, float) or (
        type(x) is tuple and type(y) is tuple and len(x) == len(y) and all(map(_is_number, x))
    )


def _same(x: Any, y: Any) -> bool:
    if x is y:
        return True
    if type(x) is not type(y):
        return False
    if isinstance(x, _PLAIN):
        return bool(x == y) or bool(x != x and y != y)
    if isinstance(x, (tuple, frozenset)):
        return len(x) == len(y) and (all(map(_same, x, y)) if isinstance(x, tuple) else x == y)
    if isinstance(x, functools.partial):
        return x.func is y.func and _same(x.args, y.args) and x.keywords == y.keywords
    return isinstance(x, types.MethodType) and x.__func__ is y.__func__ and x.__self__ is y.__self__


def _key_text(key: Any) -> str:
    if isinstance(key, str):
        return f".{key}" if key.isidentifier() else f"[{key!r}]" if key else ""
    return f"[{key}]" if isinstance(key, int) else f"[a {type(key).__name__}]"


def _shown(x: Any) -> str:
    return repr(x)[:80] if isinstance(x, _PLAIN) else f"a {type(x).__name__}"
