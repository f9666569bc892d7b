"""Random keys, as in JAX.

A value determines the random numbers, and its type says which ranks draw the same.

key = sm.random.key(0)                                       the same on every rank
with sm.random.seeded(key): mask = dropout(x)                        the same mask on every rank
own = sm.random.fold_in(key, sm.axis_index("dp"))                    another one on every rank of dp
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from ..tensor.random import fork_rng, manual_seed
from .mapped_env import current_mapped_env
from .types.type_checker import untracked
from .types.types import Type

_MASK = (1 << 64) - 1


@dataclass(frozen=True)
class Key:
    """A key for random numbers.

    Attributes:
        seed: 63 bits.
        varying: the manual axes along which ranks have different ones.
    """

    seed: int
    varying: frozenset[str] = frozenset()


def key(seed: int) -> Key:
    """key(seed) -> R: return a key, the same on every rank for the same seed.

    Communication: none.
    """
    return Key(_splitmix(seed & _MASK))


def fold_in(key: Key, data: int | Tensor) -> Key:
    """fold_in(key, data) -> a new key made from a key and a number.

    It varies over the axes over which they vary.

    Args:
        key: a key.
        data: an integer, or a 0-d integer tensor such as `axis_index(...)`.

    Communication: none.
    """
    varying, env = key.varying, current_mapped_env()
    if env is not None and env.checker is not None:
        tag = env.checker.join_all(
            iter((data,) if isinstance(data, Tensor) else ()), env.checker.control_tag
        )
        varying = varying | tag.type.varying
    with untracked():
        return Key(_splitmix(key.seed ^ _splitmix((int(data) + 1) & _MASK)), varying)


def _splitmix(x: int) -> int:
    """Return the finalizer of SplitMix64 (Steele, Lea, Flood 2014) of `x`, cut to 63 bits.

    Any generator accepts it as a seed.
    """
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return (x ^ (x >> 31)) >> 1


@contextmanager
def seeded(key: Key) -> Iterator[None]:
    """with seeded(key): draw random numbers from the key.

    Afterwards generators continue as if nothing had been drawn.

    Inside a mapped function the numbers are known to be the same on the ranks that have the same
    key. Random numbers of `ShardedTensor`s are drawn from it too.

    Communication: none.

    Example:
        >>> with sm.random.seeded(sm.random.fold_in(key, sm.axis_index("dp"))):
        ...     x = torch.nn.functional.dropout(x, 0.1)
    """
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices), fork_rng(), _random_type(Type.of(key.varying)):
        with untracked():
            torch.manual_seed(key.seed)
            manual_seed(key.seed)
        yield


@contextmanager
def _random_type(type_: Type) -> Iterator[None]:
    """Give the results of random operators in the block this type."""
    env = current_mapped_env()
    if env is None or env.checker is None:
        yield
        return
    checker = env.checker
    before, checker.random_type = checker.random_type, type_
    try:
        yield
    finally:
        checker.random_type = before
