"""Random numbers of sharded tensors in a graph: a draw is a node that takes the position in the
stream from the call that runs it.

recording    position 40 when it began    draws 41, 42    nodes Draw(+1), Draw(+2)
later call   position 57                  draws 58, 59    leaves it at 59, as eager code would
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...mesh.comm.current_world import current_world
from ...mesh.comm.world import World
from ...mesh.simulated.simulate import SimulatedWorld
from ..tensor.random import RandomStream
from .errors import JitError, at_line


class Position(NamedTuple):
    """Where a random tensor is drawn: `offset` after the start of the call, or at an absolute place
    if a seed is given.
    """

    seed: int | None
    offset: int


class Draw:
    """Draws the part of a random tensor: the target of a node."""

    def __init__(self, part: Callable[..., Tensor], position: Position) -> None:
        self.part, self.position = part, position
        self.__name__ = "draw"

    def __call__(self, *parameters: Any) -> Tensor:
        seed, offset = self.position
        if seed is None:
            state = current_world().state(RandomStream)
            return self.part(state.seed, state.drawn + offset, *parameters)
        return self.part(seed, offset, *parameters)

    def __repr__(self) -> str:
        seed, offset = self.position
        return f"draw(+{offset})" if seed is None else f"draw(seed={seed}, {offset})"


class Draws:
    """The positions of one recording.

    Attributes:
        relative: whether positions follow from that at the start: no seed was set since.
        host: whether numbers of other generators were drawn.
    """

    def __init__(self, world: World) -> None:
        self._state = world.state(RandomStream)
        self._start = self._state.drawn
        self._seed_of_torch = torch.default_generator.initial_seed()
        self.relative, self.host = True, HostGenerators()

    def position(self, seed: int, stream: int) -> Position:
        """Return the position of a tensor drawn now."""
        return Position(None, stream - self._start) if self.relative else Position(seed, stream)

    def end(self) -> Position:
        """Return where the call leaves the stream."""
        return self.position(self._state.seed, self._state.drawn)

    def refusal(self) -> JitError | None:
        """Return an error if torch's generator was seeded inside the function: a graph would draw
        other numbers.
        """
        if torch.default_generator.initial_seed() == self._seed_of_torch:
            return None
        return at_line(
            "random numbers of torch's generator after it was seeded inside sm.jit",
            "Call torch.manual_seed outside of the function, or draw ShardedTensors, whose "
            "numbers depend on sm.random.manual_seed",
        )


class HostGenerators:
    """Whether a recording draws random numbers of Python or NumPy, which a graph would not.

    The ranks of a simulated world share these generators, and one of them runs until it blocks in a
    collective:

        recording  draws?  collective: others may draw  draws?  collective  draws?
                   ~~~~~~                               ~~~~~~              ~~~~~~ compared
    """

    def __init__(self) -> None:
        self._is_shared = isinstance(current_world(), SimulatedWorld)
        self._state, self._drew = _state_of_host(), False

    def pause(self) -> None:
        """Compare before other ranks may run."""
        if self._is_shared:
            self._drew = self.drew()

    def resume(self) -> None:
        """Go on after other ranks may have run."""
        if self._is_shared:
            self._state = _state_of_host()

    def drew(self) -> bool:
        """Return whether this recording has drawn."""
        return self._drew or self._state != _state_of_host()


def _state_of_host() -> Any:
    name, keys, place, *rest = np.random.get_state()
    return random.getstate(), name, zlib.crc32(keys.data), place, rest  # type: ignore[union-attr]


def advance(world: World, end: Position) -> None:
    """Leave the stream where a recorded call left it."""
    state = world.state(RandomStream)
    if end.seed is None:
        state.drawn += end.offset
    else:
        state.seed, state.drawn = end.seed, end.offset
