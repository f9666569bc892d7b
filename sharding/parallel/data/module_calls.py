"""Intercept calls of modules, around all of their hooks and outside of what `torch.compile` compiles.

    module(x)
    └─ nn.Module.__call__
        └─ module._call_impl        an attribute of the instance: the unit gathers its parameters
            └─ nn.Module.__call__   again, with the attribute taken away; compiled, if `module.compile()` was called
                └─ hooks, forward

While a unit runs, nothing is intercepted in it, so that a compiler finds plain modules with plain parameters.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn

from ...ops.torch_compile import not_compiled
from .schedule import unit_of

_CALL, _COMPILED, _COMPILE = "_call_impl", "_compiled_call_impl", "compile"  # names of nn.Module


class Interception:
    """Calls of some modules of a unit: those whose parameters it gathers.

    Attributes:
        modules: whose calls become calls of `Unit.call`.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self.modules = tuple(modules)
        self._compiled = [module.__dict__.get(_COMPILED) for module in self.modules]
        self.start()

    def start(self) -> None:
        """Intercept calls from now on."""
        for module in self.modules:
            attributes = module.__dict__
            attributes[_CALL], attributes[_COMPILE] = partial(_call_unit, module), partial(_compile, module)
            attributes.pop(_COMPILED, None)

    def stop(self) -> None:
        """Let calls through, as `module.compile()` has left them."""
        for module, compiled in zip(self.modules, self._compiled, strict=True):
            attributes = module.__dict__
            del attributes[_CALL], attributes[_COMPILE]
            if compiled is not None:
                attributes[_COMPILED] = compiled

    def __getstate__(self) -> dict[str, Any]:
        """Leave compiled code out of copies and files, as `nn.Module` does."""
        return {"modules": self.modules, "_compiled": [None] * len(self.modules)}

    def compile(self, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        """Compile what a module does once its parameters are there; arguments are those of `torch.compile`."""
        at = next(i for i, known in enumerate(self.modules) if known is module)
        self._compiled[at] = torch.compile(MethodType(type(module)._call_impl, module), *args, **kwargs)


@not_compiled("fully_shard and data_parallel gather a unit's parameters here, outside of any graph")
def _call_unit(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return unit_of(module).call(module, args, kwargs)  # type: ignore[union-attr]


def _compile(module: nn.Module, *args: Any, **kwargs: Any) -> None:
    unit_of(module).calls.compile(module, *args, **kwargs)  # type: ignore[union-attr]
