"""The functions of the operator table, and sample calls for each of them.

The key of a sample is the function's name (shared with its in-place and operator forms) or, if
functions of the same name take different arguments, its owner and name, as in `linalg.diagonal`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardmesh.sharding.ops.rules.registry import DECOMPOSITIONS, HANDLERS, RULES

OWNERS = {
    "torch": torch,
    "Tensor": torch.Tensor,
    "F": F,
    "special": torch.special,
    "linalg": torch.linalg,
    "fft": torch.fft,
}


@dataclass(frozen=True)
class Call:
    """One call: the function's arguments."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)


def call(*args: Any, **kwargs: Any) -> Call:
    return Call(args, kwargs)


SAMPLES: dict[str, list[Call]] = {}


def samples(names: str, *calls: Call) -> None:
    """Register samples of each of these functions."""
    for name in names.split():
        SAMPLES.setdefault(name, []).extend(calls)


@functools.cache
def registered() -> list[tuple[str, Callable[..., Any]]]:
    """Return every function in the table with its owner and name, once for each owner that
    has it.
    """
    return list(_registered())


def _registered() -> Iterator[tuple[str, Callable[..., Any]]]:
    seen = set()
    for func in [*RULES, *DECOMPOSITIONS, *HANDLERS]:
        for label in labels(func):
            if label not in seen:
                seen.add(label)
                yield label, func


def labels(func: Callable[..., Any]) -> list[str]:
    """Return `owner.name` for every place where this function is defined."""
    names = [
        f"{owner}.{name}"
        for owner, module in OWNERS.items()
        for name in _NAMES[owner]
        if getattr(module, name, None) is func
        or (owner == "Tensor" and getattr(module, name, None) == func)
    ]
    return names or [getattr(func, "__qualname__", repr(func))]


_NAMES = {owner: dir(module) for owner, module in OWNERS.items()}


def samples_of(label: str) -> list[Call]:
    """Return the sample calls of the function at `owner.name`."""
    name = label.rpartition(".")[2]
    for key in (label, name, _plain(name)):
        if key in SAMPLES:
            return SAMPLES[key]
    return []


def _plain(name: str) -> str:
    """Return the name of the plain operator: `add` for `add_`, `__add__` and `__iadd__`."""
    if name.startswith("__"):
        core = name.strip("_")
        return _OPERATORS.get(core, core)
    return name.rstrip("_")


_OPERATORS = {
    "iadd": "add",
    "radd": "add",
    "isub": "sub",
    "rsub": "rsub",
    "imul": "mul",
    "rmul": "mul",
    "itruediv": "div",
    "truediv": "div",
    "idiv": "div",
    "rtruediv": "reciprocal_of",
    "rdiv": "reciprocal_of",
    "rpow": "power_of",
    "ipow": "pow",
    "invert": "logical_not",
    "imod": "remainder",
    "mod": "remainder",
    "rmod": "remainder",
    "ifloordiv": "floor_divide",
    "floordiv": "floor_divide",
    "rfloordiv": "floor_divide",
}


# -- values ----------------------------------------------------------------------------------------


def f(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    """Return floating values, no two alike, none near zero."""
    generator = torch.Generator().manual_seed(seed + 31 * len(shape) + sum(shape))
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    return (x + 0.3 * x.sign()).to(dtype)


def pos(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    """Return values in (0.3, 4)."""
    return f(*shape, dtype=dtype, seed=seed).abs().clamp_max(4)


def unit(*shape: int, seed: int = 0) -> Tensor:
    """Return values in (0.1, 0.9)."""
    return 0.1 + 0.8 * torch.rand(
        shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )


def i(*shape: int, low: int = 0, high: int = 8, seed: int = 0) -> Tensor:
    """Return integers in [low, high)."""
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))


def b(*shape: int, seed: int = 0) -> Tensor:
    """Return truth values."""
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) > 0.4


def c(*shape: int, seed: int = 0) -> Tensor:
    """Return complex values."""
    return torch.complex(f(*shape, seed=seed), f(*shape, seed=seed + 1))
