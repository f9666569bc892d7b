"""Resharding: a tensor that is still communicated, and that waits when it is used.

As the tensors do that torch's `async_op` returns.
"""

from __future__ import annotations

from typing import Any

from torch.utils import _pytree as pytree

from ...mesh.comm.pending import Pending


class Resharding(Pending[Any]):
    """The handle of `redistribute(..., async_op=True)`.

    `wait()` returns the tensor (or the list of them). Operators, torch's functions and attributes
    of the handle wait for it, too.

    It is no tensor itself: `isinstance(handle, Tensor)` is False.
    """

    def __repr__(self) -> str:
        return f"Resharding({'in flight' if self._finish is not None else self._value!r})"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.wait(), name)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = pytree.tree_map_only(Resharding, Resharding.wait, (args, kwargs or {}))
        return func(*args, **kwargs)


def _define(name: str) -> None:
    """Give the handle an operator of tensors, which Python looks up in the class."""

    def operator(self: Resharding, *args: Any) -> Any:
        return getattr(self.wait(), name)(*map(settled, args))

    operator.__name__ = name
    setattr(Resharding, name, operator)


_BINARY = ("add", "sub", "mul", "truediv", "matmul", "pow")
_REFLECTED = tuple(f"r{name}" for name in _BINARY)
_OTHER = ("mod", "neg", "lt", "le", "gt", "ge", "getitem", "len", "bool", "float", "int")
for _name in (*_BINARY, *_REFLECTED, *_OTHER):
    _define(f"__{_name}__")


def settled(value: Any) -> Any:
    """Return the value with handles replaced by their tensors.

    Also in a tuple, list or dict of values.
    """
    if isinstance(value, Resharding):
        return value.wait()
    if type(value) in (tuple, list) and any(isinstance(x, Resharding) for x in value):
        return type(value)(map(settled, value))
    if type(value) is dict and any(isinstance(x, Resharding) for x in value.values()):
        return {key: settled(x) for key, x in value.items()}
    return value
