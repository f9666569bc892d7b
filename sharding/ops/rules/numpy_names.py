"""NumPy's names of keyword arguments, which torch's functions in C++ accept too:
`x.cumsum(axis=0)`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

_TORCH_NAMES = {"axis": "dim", "keepdims": "keepdim"}


def has_numpy_names(func: Callable[..., Any], kwargs: dict[str, Any]) -> bool:
    """Return whether a keyword argument has NumPy's name; functions in Python have no
    second names.
    """
    return not inspect.isfunction(func) and any(name in kwargs for name in _TORCH_NAMES)


def with_torch_names(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments by torch's names; torch itself refuses one that is given by
    both.
    """
    return {_TORCH_NAMES.get(name, name): item for name, item in kwargs.items()}
