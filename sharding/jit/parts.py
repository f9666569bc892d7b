"""Run a function that is no graph as a whole in parts.

Calls of its modules are graphs, what is between them is eager.

    step                eager     reads a value: a break
    └─ model            eager     has the break in its forward
       ├─ embed         eager     one operator
       ├─ blocks[0]     graph     forward and backward joined (`joined.py`)
       ├─ (the break)   eager
       └─ blocks[1]     graph

The parts are chosen from above: the outermost modules first; one that breaks is replaced by the
modules inside of it. A part has the collectives of its module in the module's order, so ranks need
not agree on the choice, and nothing is in flight between parts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import MethodType

from torch import nn

from ...mesh.comm.thread_context import thread_context
from ..ops.torch_compile import compiled_call, set_compiled_call
from ..tensor.sharded_tensor import ShardedTensor
from .backends.segments import Backend
from .joined import JoinedEntry, JoinedFunction

_log = logging.getLogger(__name__)


class Parts:
    """The modules whose calls are graphs.

    Args:
        modules: those that the function reaches.
        backend: returns what compiles the graphs.
        is_shown: whether breaks are logged: on one rank.
        fullgraph: whether a break in a module is an error.
        check_state: whether calls compare the Python state that the modules reach.
        sharded: the ShardedTensors that the function reaches.

    Attributes:
        joined: the modules and the programs of their calls.
    """

    def __init__(
        self,
        modules: Iterable[nn.Module],
        backend: Callable[[], Backend],
        is_shown: bool,
        fullgraph: bool = False,
        check_state: bool = True,
        sharded: Sequence[ShardedTensor] = (),
    ) -> None:
        self._backend, self._is_shown, self._fullgraph = backend, is_shown, fullgraph
        self._check_state, self.sharded = check_state, sharded
        self.joined: dict[nn.Module, JoinedFunction] = {}
        # those that have a graph in recomputations of forwards before they broke
        self._broken: dict[nn.Module, JoinedFunction] = {}
        self._users, self._installed = 0, []
        for module in _outermost(modules):
            self._add([module] if _is_whole(module) else _inside(module))

    def _add(self, modules: Iterable[nn.Module]) -> None:
        for module in modules:
            call = MethodType(type(module)._call_impl, module)
            self.joined[module] = JoinedFunction(
                call,
                [module],
                self._backend,
                type(module).__name__,
                self._fullgraph,
                check_state=self._check_state,
            )

    def entries(self) -> list[JoinedEntry]:
        """Return the recordings of all modules."""
        return [entry for function in self.joined.values() for entry in function.recordings]

    @contextmanager
    def running(self) -> Iterator[None]:
        """In the block calls of the modules are graphs, and in recomputations of what it runs."""
        state = thread_context.function_state()._replace(parts=self)
        try:
            with thread_context.running_as(state):
                yield
        finally:
            self._split()

    def install(self) -> None:
        """Let calls of the modules be graphs, but for those that other code has replaced."""
        self._users += 1
        if self._users > 1:
            return
        functions = {**self._broken, **self.joined}
        self._installed = [module for module in functions if compiled_call(module) is None]
        for module in self._installed:
            set_compiled_call(module, functions[module])

    def uninstall(self) -> None:
        """End what one `install` began."""
        self._users -= 1
        if self._users == 0:
            for module in self._installed:
                set_compiled_call(module, None)

    def _split(self) -> None:
        """Replace modules that break by those inside of them, unless calls are running."""
        if self._users:
            return
        for module, function in list(self.joined.items()):
            if function.broken is not None:
                self._broken[module] = self.joined.pop(module)
                self._add(inner := list(_inside(module)))
                rest = f"its {len(inner)} inner modules are parts of their own" if inner else ""
                if self._is_shown:
                    log_break(function.name, function.broken, rest)


def log_break(name: str, reason: str, rest: str) -> None:
    """Log that a function or module is no graph as a whole."""
    _log.warning("sm.jit: %s runs eagerly%s: %s", name, f", {rest}" if rest else "", reason)


def _outermost(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the modules that are inside of no other."""
    unique = list(dict.fromkeys(modules))
    inner = {x for module in unique for x in module.modules() if x is not module}
    return [module for module in unique if module not in inner]


def _inside(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the largest modules inside of one whose calls can be graphs.

    Single layers are left out: they are a few operators.
    """
    for child in module.children():
        has_forward = type(child).forward is not nn.Module.forward
        is_called = has_forward and not getattr(child, "_shardmesh_uncalled", False)
        if is_called and _is_whole(child) and next(child.children(), None) is not None:
            yield child
        else:
            yield from _inside(child)


def _is_whole(module: nn.Module) -> bool:
    """Return whether a module's call gathers no parameters of modules inside of it.

    All of them are in one unit then, and so is the module.
    """
    units = {id(getattr(x, "_shardmesh_unit", None)) for x in module.modules()}
    return len(units) == 1
