"""Record random numbers of sharded tensors in a graph.

A draw is a node that takes the position in the stream from the call that runs it.

recording    position 40 when it began    draws 41, 42    nodes Draw(+1), Draw(+2)
later call   position 57                  draws 58, 59    leaves it at 59, as eager code would
"""

from __future__ import annotations

import ctypes
import random
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, fx

from ...mesh.comm.current_world import current_world
from ...mesh.comm.world import World
from ...mesh.simulated.simulate import SimulatedWorld
from ..tensor.random import RandomStream
from .errors import JitError, at_line

SEEDED = "random numbers of torch's generator after it was seeded inside sm.jit"


class Position(NamedTuple):
    """The place in the stream at which a random tensor is drawn.

    It is `offset` after the start of the call, or absolute if a seed is given.
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
        self.torch = TorchGenerators()

    def position(self, seed: int, stream: int) -> Position:
        """Return the position of a tensor drawn now."""
        return Position(None, stream - self._start) if self.relative else Position(seed, stream)

    def end(self) -> Position:
        """Return where the call leaves the stream."""
        return self.position(self._state.seed, self._state.drawn)

    def was_seeded(self) -> bool:
        """Return whether torch's generator was seeded since the start with another seed.

        Unlike `TorchGenerators.follow` it tells so where draws are not followed one by one.
        """
        return torch.default_generator.initial_seed() != self._seed_of_torch


def seed_error() -> JitError:
    """Return the error for numbers of a generator of torch whose state the function has set."""
    return at_line(
        SEEDED,
        "Call torch.manual_seed outside of the function, or draw ShardedTensors, whose "
        "numbers depend on sm.random.manual_seed",
    )


def save_state(device: str) -> Tensor:
    """Return the state of torch's generator of a device, as the target of a node."""
    return _generator(device).get_state()


def restore_state(device: str, state: Tensor) -> None:
    """Set the state of torch's generator of a device, as the target of a node."""
    _generator(device).set_state(state)


def _generator(device: str) -> torch.Generator:
    if device == "cpu":
        return torch.default_generator
    return torch.cuda.default_generators[torch.cuda.current_device()]


class TorchGenerators:
    """Record where a function goes back to an earlier state of torch's generators.

    `torch.utils.checkpoint` does so to draw the numbers of forward again.

        forward       saved = save_state(); dropout
        backward      now = save_state(); restore_state(saved); dropout; restore_state(now)

    The states are compared where something draws. One that the recording has passed before becomes
    a node there, and is restored by another.
    """

    def __init__(self) -> None:
        self._is_shared = isinstance(current_world(), SimulatedWorld)
        self._places: dict[tuple[str, bytes], _Place] = {}
        self._last: dict[str, bytes] = {}

    def pass_by(self, graph: fx.Graph) -> None:
        """Note the states now, to which the recording may go back."""
        self._note(graph, _states())

    def _note(self, graph: fx.Graph, states: list[tuple[str, bytes]]) -> None:
        node = next(iter(reversed(graph.nodes)))
        for device, state in states:
            self._last[device] = state
            self._places.setdefault((device, state), _Place(node))

    def follow(self, graph: fx.Graph) -> bool:
        """Record that the function has gone back to earlier states, if it has.

        Returns: False if it has set a state that is not known, True otherwise.
        """
        states = _states()
        for device, state in states:
            if self._last.get(device, state) != state:
                place = self._places.get((device, state))
                if place is None:
                    return False
                graph.call_function(restore_state, (device, place.node_that_saves(graph, device)))
        self._note(graph, states)
        return True

    def pause(self, graph: fx.Graph) -> None:
        """Compare before other ranks of a simulated world, which share the generators, may run."""
        if self._is_shared:
            self.follow(graph)

    def resume(self, graph: fx.Graph) -> None:
        """Go on after other ranks may have run."""
        if self._is_shared:
            self.pass_by(graph)


class _Place:
    """Where a recording was in a state: after a node."""

    def __init__(self, node: fx.Node) -> None:
        self._node = node
        self._saved: fx.Node | None = None

    def node_that_saves(self, graph: fx.Graph, device: str) -> fx.Node:
        """Return the node that saves the state there."""
        if self._saved is None:
            with graph.inserting_after(self._node):
                self._saved = graph.call_function(save_state, (device,))
        return self._saved


def _states() -> list[tuple[str, bytes]]:
    """Return the state of each generator, as bytes."""
    devices = ["cpu", *(["cuda"] if torch.cuda.is_initialized() else [])]
    states = [(device, save_state(device)) for device in devices]
    # not by numpy(), which is refused in a recording
    return [(device, ctypes.string_at(x.data_ptr(), x.nbytes)) for device, x in states]


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
    if end.seed is not None:
        state = world.state(RandomStream)
        state.seed, state.drawn = end.seed, end.offset
    elif end.offset:
        world.state(RandomStream).drawn += end.offset
