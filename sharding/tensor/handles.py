"""Handles of tensors that are still communicated, which wait when they are used: torch's `async_op`
returns tensors that do so.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from torch.utils import _pytree as pytree


class TensorHandle(ABC):
    """A tensor to come. `wait()` returns it; operators, torch's functions and attributes of the
    handle wait for it, too.

    It is no tensor itself: `isinstance(handle, Tensor)` is False.
    """

    @abstractmethod
    def wait(self) -> Any:
        """Return the tensor, the same at every call."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.wait(), name)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = pytree.tree_map_only(
            TensorHandle, lambda handle: handle.wait(), (args, kwargs or {})
        )
        return func(*args, **kwargs)


def _define(name: str) -> None:
    """Give the handle an operator of tensors, which Python looks up in the class."""

    def operator(self: TensorHandle, *args: Any) -> Any:
        return getattr(self.wait(), name)(*map(settled, args))

    operator.__name__ = name
    setattr(TensorHandle, name, operator)


for _name in (
    "add",
    "sub",
    "mul",
    "truediv",
    "matmul",
    "pow",
    "mod",
    "neg",
    "lt",
    "le",
    "gt",
    "ge",
):
    _define(f"__{_name}__")
for _name in (
    "radd",
    "rsub",
    "rmul",
    "rtruediv",
    "rmatmul",
    "rpow",
    "getitem",
    "len",
    "bool",
    "float",
    "int",
):
    _define(f"__{_name}__")


def settled(value: Any) -> Any:
    """Return the value, or tuple, list or dict of values, with handles replaced by tensors."""
    if isinstance(value, TensorHandle):
        return value.wait()
    if type(value) in (tuple, list) and any(isinstance(x, TensorHandle) for x in value):
        return type(value)(map(settled, value))
    if type(value) is dict and any(isinstance(x, TensorHandle) for x in value.values()):
        return {key: settled(x) for key, x in value.items()}
    return value
