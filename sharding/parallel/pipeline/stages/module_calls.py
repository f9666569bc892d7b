"""Interception of module calls, around all that a call does: hooks, recomputation, gathering.

A module whose calls are intercepted gets a subclass of its own class, with the same name, so that
`isinstance` and `type(module).__name__` are as before. `nn.Module.__call__` looks its methods up in
the instance, where `fully_shard` and `module.compile()` put theirs; a `__call__` of the class is
outside of both, and outside of a class that recomputes in its own `__call__`, as the layers of
transformers do.

Who is shown the calls is in the thread's context. Elsewhere, such as in the backward pass, which
may recompute a unit in another thread, calls are those of the module itself.
"""

from __future__ import annotations

import copyreg
import weakref
from collections.abc import Callable
from typing import Any, Protocol

from torch import nn

from .....mesh.comm.thread_context import thread_context
from ....ops.torch_compile import keep_compiler_out, not_compiled


class CallObserver(Protocol):
    """What calls of intercepted modules are shown to, as `thread_context.module_calls`."""

    def call(
        self,
        module: nn.Module,
        original: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Return the result of a call; `original(*args, **kwargs)` is the module's own."""


class _Intercepted:
    """The base class that shows a module's calls."""

    @not_compiled("a stage of a pipeline intercepts calls of units here", calls_program=True)
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        keep_compiler_out()
        observer: CallObserver | None = thread_context.module_calls
        original: Callable[..., Any] = super().__call__  # type: ignore[misc]
        if observer is None:
            return original(*args, **kwargs)
        return observer.call(self, original, args, kwargs)  # type: ignore[arg-type]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Return the state for a copy or pickle, which is a module of the original class."""
        construct, arguments, *rest = super().__reduce_ex__(protocol)  # type: ignore[misc]
        # pickle takes this function for the class of the object only
        if construct is copyreg.__newobj__:  # type: ignore[attr-defined]
            construct = _new
        own, original = type(self), original_class(self)
        return construct, tuple([original if x is own else x for x in arguments]), *rest


def _new(cls: type, *args: Any) -> Any:
    return cls.__new__(cls, *args)


_classes: weakref.WeakValueDictionary[type, type] = weakref.WeakValueDictionary()


def intercept_calls(module: nn.Module) -> None:
    """Show the calls of a module to the observer of the calling thread, from now on."""
    own = type(module)
    if issubclass(own, _Intercepted):
        return
    cls = _classes.get(own)
    if cls is None:
        names = {"__module__": own.__module__, "__qualname__": own.__qualname__}
        cls = _classes[own] = type(own.__name__, (_Intercepted, own), names)
    module.__class__ = cls


def original_class(module: object) -> type:
    """Return the class of a module, without what intercepts its calls."""
    cls = type(module)
    return cls.__mro__[cls.__mro__.index(_Intercepted) + 1] if _Intercepted in cls.__mro__ else cls
