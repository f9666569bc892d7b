"""The walk over everything that a function can reach."""

from __future__ import annotations

import array
import contextvars
import ctypes
import functools
import io
import operator
import random
import sys
import types
import weakref
from collections import deque
from collections.abc import (
    Callable,
    ItemsView,
    Iterator,
    KeysView,
    Mapping,
    Sequence,
    ValuesView,
)
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ....mesh.comm.call_site import _TORCH
from ....mesh.device_mesh import DeviceMesh
from ...tensor.sharded_tensor import ShardedTensor
from .holders import (
    MUTABLE,
    PLAIN,
    Holder,
    are_plain,
    array_items,
    cell_items,
    class_items,
    container_items,
    generator_items,
    global_items,
    is_number,
    items,
    key_text,
    marks_of,
    named_items,
    sequence_items,
    slot_names,
    value_items,
)
from .iterators import iterator_state
from .names import (
    ANY_ATTRIBUTE,
    Called,
    Name,
    assignments_of,
    codes,
    globals_of,
    is_installed,
    is_program,
    names_of,
    overrides_called,
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


# Those of all modules.
_GLOBAL_HOOKS = [
    (name, hooks)
    for name, hooks in vars(torch.nn.modules.module).items()
    if name.startswith("_global_") and isinstance(hooks, dict)
]


class Snapshot:
    """Everything that some objects can reach.

    Args:
        roots: the objects, and their paths.
        left_out: ids of objects that are not looked into.
        called: the function that is called, or a method.
        arguments: its arguments, by the names of its parameters.

    Attributes:
        holders: the dicts, lists, cells and the like.
        tensors: plain tensors, and their paths.
        sharded: sharded tensors, and their paths.
        numbers: hyperparameters, as dicts and keys.
        meshes: the meshes.
        modules: the modules.
        functions: the program's functions.
        iterators: iterators, their paths, and where they were.
    """

    def __init__(
        self,
        roots: list[tuple[str, Any]],
        left_out: Sequence[int] = (),
        called: Callable[..., Any] | None = None,
        arguments: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self._roots, self._left_out = roots, left_out
        self._called, self._arguments = called, arguments
        # Containers that have replaced others, by the object that holds them and the key.
        self._copies: dict[tuple[int, Any], Holder] = {}
        # By which the program's code may reach its own objects.
        self._names: frozenset[Name] = frozenset()
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
        self.modules: list[torch.nn.Module] = []
        self.iterators: list[tuple[str, Any, Any]] = []
        self._containers: dict[int, Holder] = {}
        self.functions: list[types.FunctionType] = []
        self._instances: list[Any] = []
        self._getters: list[operator.attrgetter[Any] | operator.methodcaller] = []
        self._ways_to_called = 0
        self._names_of_kinds: dict[type | None, frozenset[str]] = {}
        self._seen: dict[int, Any] = dict.fromkeys(self._left_out)
        self._todo: deque[tuple[str, Any]] = deque([*roots, *_GLOBAL_HOOKS])
        while self._todo:
            path, x = self._todo.popleft()
            self._ways_to_called += x is getattr(self._called, "__func__", self._called)
            if not isinstance(x, PLAIN) and id(x) not in self._seen:
                self._seen[id(x)] = x
                self._visit(path, x)

    def again(self) -> Snapshot:
        """Return what the same objects can reach now."""
        return Snapshot(self._roots, self._left_out, self._called, self._arguments)

    def change(self, dynamic: set[tuple[int, Any]]) -> str | None:
        """Return the first thing that has changed since, as text; None if nothing has."""
        for path, x, before in self.iterators:
            if iterator_state(x) != before:
                return (
                    f"{path} is an iterator and was advanced: call next() outside and pass what it "
                    "returns"
                )
        changes = (self.change_of(holder, dynamic) for holder in self.holders)
        return next((change for change in changes if change is not None), self.change_of_copies())

    def change_of(self, holder: Holder, dynamic: set[tuple[int, Any]]) -> str | None:
        """Describe what has changed in one holder, None if nothing has."""
        return holder.change(dynamic, self._is_copy)

    @property
    def has_copies(self) -> bool:
        """Whether containers have replaced others."""
        return bool(self._copies)

    def change_of_copies(self) -> str | None:
        """Describe what has changed in containers that have replaced others, None if nothing."""
        changes = (self.change_of(holder, set()) for holder in self._copies.values())
        return next((change for change in changes if change is not None), None)

    def _is_copy(self, holder: Holder, key: Any, before: Any, now: Any) -> bool:
        """Return whether a container was replaced by one with the plain values that it held.

        Then that one is watched: `self.names = ["a"]` may be assigned in every call.
        """
        old = self._containers.get(id(before))
        is_container = type(now) in MUTABLE and type(before) is type(now)
        if old is None or not is_container or not are_plain(old.held):
            return False
        copy = Holder(old.path, functools.partial(container_items, now), now)
        copy.held = old.held
        if copy.change(set(), self._is_copy) is not None:
            return False
        self._copies[id(holder), key] = copy
        return True

    def knows(self, x: Any) -> bool:
        """Return whether an object can be reached."""
        return id(x) in self._seen

    def _used_names(self) -> set[Name]:
        selves: dict[types.CodeType, list[Any]] = {}
        for x in self._instances:
            methods = [
                getattr(f, "fget", f) for base in type(x).__mro__ for f in vars(base).values()
            ]
            for code in {f.__code__ for f in methods if isinstance(f, types.FunctionType)}:
                selves.setdefault(code, []).append(x)
        assigned = frozenset[str]().union(*(assignments_of(f.__code__) for f in self.functions))
        names: set[Name] = set()
        for f in self.functions:
            values = self._values_of_parameters(f, selves.get(f.__code__, ()))
            names |= names_of(f, values, assigned)
        paths = [path for getter in self._getters for path in _paths_of(getter)]
        return names | {(name, None) for path in paths for name in path.split(".")}

    def _values_of_parameters(
        self, f: types.FunctionType, selves: Sequence[Any]
    ) -> dict[str, Sequence[Any]]:
        """Return the values that parameters of a function may have, of those that are known.

        Args:
            selves: the instances of which it is a method.
        """
        values: dict[str, Sequence[Any]] = {}
        # reached in another way, it may be called with other arguments
        if f is getattr(self._called, "__func__", self._called) and self._ways_to_called == 1:
            values = {name: [x] for name, x in self._arguments.items()}
        if f.__code__.co_argcount and selves:
            values[f.__code__.co_varnames[0]] = selves
        return values

    def _names_for(self, kind: type | None) -> frozenset[str]:
        """Return the names that code may read of instances of a class; of any object for None."""
        names = self._names_of_kinds.get(kind)
        if names is None:
            names = frozenset(
                name
                for name, scope in self._names
                if scope is None or (kind is not None and scope in kind.__mro__)
            )
            if kind is not None:
                called = {name for name, scope in self._names if scope is Called}
                names |= overrides_called(kind, names | called)
            self._names_of_kinds[kind] = names
        return names

    @property
    def _called_names(self) -> frozenset[str]:
        """The names of attributes that code reads or calls, of objects that are not known."""
        return self._names_for(Called)

    # -- the walk ----------------------------------------------------------------------------------

    def _hold(self, path: str, read: Callable[[], list[Any]], source: Any = None) -> None:
        holder = Holder(path, read, source)
        self.holders.append(holder)
        if source is not None:
            self._containers[id(source)] = holder
        for i in range(0, len(holder.held), 2):
            key, value = holder.held[i], holder.held[i + 1]
            self._todo += (path + key_text(key), value), (f"{path} key", key)

    def _visit(self, path: str, x: Any) -> None:
        if isinstance(x, Tensor):
            self._visit_tensor(path, x)
        elif isinstance(x, (dict, list, tuple, deque, set)):
            self._visit_container(path, x)
        elif isinstance(x, types.FunctionType):
            self._visit_function(path, x)
        elif isinstance(x, types.MethodType):
            self._todo += [(path.rpartition(".")[0] or "self", x.__self__), (path, x.__func__)]
        elif isinstance(x, functools.partial):
            parts = (path, x.func), (f"{path}.args", x.args), (f"{path}.keywords", x.keywords)
            self._todo += parts
        elif isinstance(x, types.ModuleType):
            if is_program(x.__name__):
                names = sorted((self._names_for(None) | self._called_names) & vars(x).keys())
                self._hold(path, functools.partial(global_items, vars(x), names))
        elif isinstance(x, types.MappingProxyType):
            self._hold(path, functools.partial(items, x))
        elif isinstance(x, (KeysView, ValuesView, ItemsView)):
            self._hold(path, functools.partial(sequence_items, x))
        elif isinstance(x, frozenset):
            self._todo += [(f"{path} element", element) for element in x]
        elif isinstance(x, weakref.ref):
            self._hold(path, functools.partial(value_items, x))
        elif isinstance(x, contextvars.ContextVar):
            self._hold(path, functools.partial(value_items, functools.partial(x.get, None)))
        elif isinstance(x, np.ndarray):
            self._hold(path, functools.partial(array_items, x))
        elif isinstance(x, (bytearray, array.array, memoryview, ctypes._SimpleCData)):
            self._hold(path, functools.partial(value_items, functools.partial(bytes, x)))
        elif isinstance(x, (random.Random, np.random.Generator, np.random.RandomState)):
            self._hold(path, functools.partial(generator_items, x))
        elif isinstance(x, (operator.attrgetter, operator.methodcaller)):
            self._getters.append(x)
        elif isinstance(x, Iterator) and not isinstance(x, io.IOBase):
            self.iterators.append((path, x, iterator_state(x)))
        elif isinstance(x, type):
            self._visit_class(path, x)
        elif not isinstance(x, types.BuiltinFunctionType):
            self._visit_instance(path, x)

    def _visit_tensor(self, path: str, x: Tensor) -> None:
        if isinstance(x, ShardedTensor):
            self.sharded.append((x, path))
        else:
            self.tensors.append((x, path))
        if vars(x):  # `weight.is_expert = True`
            self._hold(path, functools.partial(marks_of, x))
        hooks: list[Any] = [x._after_grad_hooks] if isinstance(x, ShardedTensor) else []
        local: Any = x._local if isinstance(x, ShardedTensor) else x
        for values in (local._backward_hooks, local._post_accumulate_grad_hooks, *hooks):
            if values is not None:
                self._hold(f"a hook of {path}", functools.partial(sequence_items, values.values()))

    def _visit_container(self, path: str, x: Any) -> None:
        if isinstance(x, dict) and "_hooks" in path.rpartition(".")[2]:
            # by place: a hook that is removed and set again has another key, that of its handle
            self._hold(path, functools.partial(sequence_items, x.values()), x)
        else:
            self._hold(path, functools.partial(container_items, x), x)
        if isinstance(x, set):
            self._todo += [(f"{path} element", element) for element in x]
        if type(x).__module__ not in ("builtins", "collections"):
            self._visit_instance(path, x)

    def _visit_instance(self, path: str, x: Any) -> None:
        self._note_numbers(x)
        if isinstance(x, DeviceMesh):
            self.meshes.append(x)
        if isinstance(x, torch.nn.Module):
            self.modules.append(x)
        kind = type(x)
        names = self._names_for(kind)
        called = self._called_names
        is_scheduler = isinstance(x, torch.optim.lr_scheduler.LRScheduler)
        if is_scheduler and not (names | called) & _OF_SCHEDULERS:
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
        if any(is_program(base.__module__) for base in kind.__mro__):
            self._instances.append(x)
        if isinstance(values, dict):
            read = functools.partial(items, values)
            is_own = is_program(module) and not isinstance(x, torch.optim.Optimizer)
            if is_own and not names & ANY_ATTRIBUTE:
                read = functools.partial(named_items, values, names | _OF_MODULES, called)
            elif is_own:
                read = functools.partial(named_items, values, frozenset(values) | _OF_MODULES)
            self._hold(path, read, values)
        slots = [name for base in kind.__mro__ for name in slot_names(base)]
        if slots:
            self._hold(
                path, lambda: [y for n in slots if hasattr(x, n) for y in (n, getattr(x, n))]
            )
        self._todo.append((kind.__name__, kind))

    def _note_numbers(self, x: Any) -> None:
        """Note the hyperparameters of an optimizer or an average."""
        groups: list[dict[str, Any]] = []
        if isinstance(x, torch.optim.Optimizer):
            groups = x.param_groups
        elif getattr(type(x), "_numbers_are_inputs", False):
            groups = [vars(x)]
        self.numbers += [
            (group, key) for group in groups for key, value in group.items() if is_number(value)
        ]

    def _visit_class(self, path: str, kind: type) -> None:
        """Look at the methods and plain attributes of the program's own classes."""
        names = self._names_for(kind) | self._called_names
        for base in kind.__mro__:
            if is_program(getattr(base, "__module__", None)):
                self._hold(base.__name__, functools.partial(class_items, base, names))
        if is_program(type(kind).__module__):
            self._todo.append((type(kind).__name__, type(kind)))

    def _visit_function(self, path: str, f: types.FunctionType) -> None:
        file = f.__code__.co_filename
        if file.startswith(_TORCH):
            if hasattr(f, "__wrapped__"):  # decorated, as with torch.no_grad()
                self._todo.append((path, f.__wrapped__))
            return
        inside = f"{f.__qualname__}()"
        for name, cell in zip(f.__code__.co_freevars, f.__closure__ or (), strict=True):
            self._hold(f"{inside} closure", functools.partial(cell_items, name, cell))
        if is_installed(file):
            return
        self._hold(
            f"{inside} defaults",
            lambda: ["", f.__defaults__, "kw", f.__kwdefaults__, "code", f.__code__],
        )
        if f.__dict__:
            self._hold(f"{inside} attributes", functools.partial(items, f.__dict__), f.__dict__)
        self.functions.append(f)
        names = sorted({name for code in codes(f.__code__) for name in code.co_names})
        known = globals_of(f.__code__)
        if "globals" in names:  # globals()["scale"]
            known |= {name for name, _ in names_of(f, {})}
        used = sorted(known & f.__globals__.keys())
        if used:
            read = functools.partial(global_items, f.__globals__, used)
            self._hold(f"globals of {f.__module__}", read)
        package = f.__globals__.get("__package__")
        for name in names:  # imported inside the function
            for module in (name, f"{package}.{name}"):
                if module in sys.modules:
                    self._todo.append((name, sys.modules[module]))


def _paths_of(getter: operator.attrgetter[Any] | operator.methodcaller) -> Sequence[str]:
    """Return the paths of attributes that a getter reads, the name of the method that it calls."""
    kind, args = getter.__reduce__()  # type: ignore[misc]
    if isinstance(getter, operator.attrgetter):
        return args
    return (kind.args if isinstance(kind, functools.partial) else args)[:1]
