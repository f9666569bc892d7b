"""Interception of module calls, around all hooks and outside of what `torch.compile` compiles.

    module(x)
    └─ nn.Module.__call__
        └─ module._call_impl        an instance attribute: the unit gathers its parameters
            └─ nn.Module.__call__   again, with the attribute removed; compiled if
                                    `module.compile()` was called
                └─ hooks, forward

While a unit runs, its calls are not intercepted, so that a compiler sees plain modules with plain
parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from types import MethodType
from typing import Any

from torch import nn

from ....mesh.comm.call_site import argument_of_caller
from ...ops.torch_compile import COMPILED, ModuleCompiler, keep_compiler_out, not_compiled

_REASON = "fully_shard and data_parallel gather a unit's parameters here, outside of any graph"
_CALL, _COMPILE = "_call_impl", "compile"  # names of nn.Module


class CallInterception:
    """Intercepts calls of a unit's modules that own parameters.

    Args:
        modules: the modules.
        call: `(module, args, kwargs)` is called instead; a fourth argument is what to call in place
            of the module.
    """

    def __init__(self, modules: Iterable[nn.Module], call: Callable[..., Any]) -> None:
        self._modules = tuple(modules)
        self._calls = [partial(_run_intercepted, call, module) for module in self._modules]
        self._compilers = [ModuleCompiler(x, x.__dict__.get(COMPILED)) for x in self._modules]
        self.start()

    def start(self) -> None:
        """Intercept calls from now on."""
        for module, call, compiler in zip(self._modules, self._calls, self._compilers, strict=True):
            attributes = module.__dict__
            attributes[_CALL], attributes[_COMPILE] = call, compiler
            attributes.pop(COMPILED, None)

    def stop(self) -> None:
        """Stop intercepting; restore what `module.compile()` set."""
        for module, compiler in zip(self._modules, self._compilers, strict=True):
            attributes = module.__dict__
            del attributes[_CALL], attributes[_COMPILE]
            if compiler.call is not None:
                attributes[COMPILED] = compiler.call


@not_compiled(_REASON, calls_program=True)
def _run_intercepted(call: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    keep_compiler_out()
    _check_caller(module, argument_of_caller(nn.Module.__call__, "self"))
    return call(module, args, kwargs)


class _ForwardMethod:
    """A method of a unit's module whose calls gather the parameters, as those of the module do.

    Args:
        module: the module.
        name: of the method.
    """

    def __init__(self, module: nn.Module, name: str) -> None:
        self._module, self._name = module, name
        self._instead = module.__dict__.get(name)  # that of the class is looked up at each call

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        return self._instead or MethodType(getattr(type(self._module), self._name), self._module)

    @not_compiled(_REASON, calls_program=True)
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        keep_compiler_out()
        method, intercepted = self.__wrapped__, self._module.__dict__.get(_CALL)
        if intercepted is None:  # a call of the unit is running
            return method(*args, **kwargs)
        call, module = intercepted.args
        return call(module, args, kwargs, lambda _, *args, **kwargs: method(*args, **kwargs))


def intercept_method(module: nn.Module, name: str) -> None:
    """Gather the parameters of a module's unit for calls of this method as well."""
    if not isinstance(module.__dict__.get(name), _ForwardMethod):
        module.__dict__[name] = _ForwardMethod(module, name)


def _check_caller(module: nn.Module, caller: nn.Module | None) -> None:
    """Raise if another module calls, with a copy of this module's attributes.

    An attribute of an instance is not told whose call it is; the frame of `nn.Module.__call__` is.

    Raises:
        RuntimeError: on every rank, before any communication.
    """
    if caller is not None and caller is not module:
        raise RuntimeError(
            f"{type(caller).__name__} is a copy of the attributes of {type(module).__name__}, as "
            "copy.copy, higher.innerloop_ctx and learn2learn make one; its call would be one of "
            "the module itself, with that module's parameters, since fully_shard and data_parallel "
            "gather these in each call. For an inner loop, use torch.func.functional_call(model, "
            "values, inputs); for a model of its own, copy.deepcopy(model)"
        )
