"""Random numbers that do not depend on the mesh.

Each number is a function of the seed, of how many random tensors were drawn before, and of the element's global position.
So a program draws the same global tensors on any mesh, with any sharding, on CPU or GPU, on one rank or a thousand, and
replicas hold equal values. `torch.manual_seed` has no effect on them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from ..kernels import random as philox
from ..mesh.group import World, current_world
from .engine_hooks import current_backward
from .layout import Layout

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15  # spreads neighbouring streams; the increment of SplitMix64 (Steele et al. 2014)


class _State:
    """Seed and position of one rank's stream of random tensors; the same on every rank of a program.

    Attributes:
        seed: 64-bit seed.
        drawn: random tensors drawn since it was set.
        replaying: whether a checkpointed part of the program is being recomputed.
    """

    def __init__(self) -> None:
        self.seed, self.drawn, self.replaying = 0, 0, False

    def next(self) -> tuple[int, int]:
        if torch.is_grad_enabled() and current_backward() >= 0 and not self.replaying:
            raise RuntimeError(
                "random numbers for a ShardedTensor inside torch.utils.checkpoint: recomputed in backward, they would not be the "
                "numbers of forward; write checkpoint(..., use_reentrant=False, context_fn=sm.replay_random)"
            )
        self.drawn += 1
        return self.seed, self.drawn


_states: weakref.WeakKeyDictionary[World, _State] = weakref.WeakKeyDictionary()


def _state(world: World) -> _State:
    found = _states.get(world)
    if found is None:
        found = _states[world] = _State()
    return found


def manual_seed(seed: int) -> None:
    """Start the random numbers of `ShardedTensor`s anew from this seed. Call it on every rank with the same seed.

    Communication: none.
    """
    state = _state(current_world())
    state.seed, state.drawn = seed & _MASK, 0


def replay_random() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Have `torch.utils.checkpoint` draw the same random numbers of `ShardedTensor`s when it recomputes.

    Communication: none.

    Example:
        >>> y = checkpoint(block, x, use_reentrant=False, context_fn=sm.replay_random)
    """
    return nullcontext(), _Replay(_state(current_world()))


class _Replay(AbstractContextManager[None]):
    """Inside, numbers are drawn again from where the stream was when this was made; may be entered again and again."""

    def __init__(self, state: _State) -> None:
        self.state, self.start = state, state.drawn
        self.before: list[tuple[int, bool]] = []

    def __enter__(self) -> None:
        self.before.append((self.state.drawn, self.state.replaying))
        self.state.drawn, self.state.replaying = self.start, True

    def __exit__(self, *_: Any) -> None:
        self.state.drawn, self.state.replaying = self.before.pop()


def uniform(layout: Layout, low: float = 0.0, high: float = 1.0) -> Tensor:
    """This rank's part of a tensor of numbers in [low, high)."""
    return _draw(philox.uniform, layout, low, high)


def normal(layout: Layout, mean: float = 0.0, std: float = 1.0) -> Tensor:
    """This rank's part of a tensor of Gaussian numbers."""
    return _draw(philox.normal, layout, mean, std)


def integers(layout: Layout, low: int, high: int) -> Tensor:
    """This rank's part of a tensor of integers in [low, high)."""
    return _draw(philox.integers, layout, low, high, integral=True)


def bernoulli(layout: Layout, p: float) -> Tensor:
    """This rank's part of a bool tensor that is True with probability p."""
    mesh: Any = layout.mesh
    seed, stream = _state(mesh.world).next()
    if mesh.coordinate is None:
        return torch.empty(0, dtype=torch.bool, device=mesh.device)
    return philox.bernoulli_mask(layout.shape, layout.box, seed, stream, p, mesh.device)


def seeded(mesh: Any, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function that draws from torch's own generator, with that generator in the same state on every rank.

    The generator is afterwards as it was before.
    """
    seed, stream = _state(mesh.world).next()
    with torch.random.fork_rng([mesh.device.index or 0] if mesh.device_type == "cuda" else []):
        torch.manual_seed((seed + stream * _GOLDEN) % (1 << 63))
        return func(*args, **kwargs)


def _draw(numbers: Any, layout: Layout, *parameters: Any, integral: bool = False) -> Tensor:
    mesh: Any = layout.mesh
    seed, stream = _state(mesh.world).next()
    if mesh.coordinate is None:
        return torch.empty(0, dtype=layout.dtype, device=mesh.device)
    if integral:
        return numbers(layout.shape, layout.box, seed, stream, *parameters, layout.dtype, mesh.device)
    return numbers(layout.shape, layout.box, seed, stream, layout.dtype, mesh.device, *parameters)
