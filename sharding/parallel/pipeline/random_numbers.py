"""Random numbers of a step that depend neither on the split nor on the schedule.

    forward of microbatch m    seed (step, m) | unit 0 | seed (step, m, 0) | unit 1 | seed ... loss

Each stage seeds after the units of earlier stages as if it had run them. So dropout is the same
with two stages and with sixteen, while the same modules are units. Generators are seeded between
units only, so recomputation, which restores their state, draws the same numbers again. Each step
takes one number from torch's generator and one from that of ShardedTensors, on every rank of the
pipeline; ranks that are seeded alike stay alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ....mesh.comm.current_world import current_world
from ....mesh.comm.thread_context import thread_context
from ...tensor.random import RandomStream, TorchGenerators, hash_numbers

_BEFORE_UNITS, _BEFORE_LOSS = -1, -2
_UNSET_SEEDS = (
    "a stage draws random ShardedTensors, and a graph of the stage would not set the seeds between "
    "its units"
)
_COMPILES_UNITS = "The units of the stage are compiled one by one."


class StepRandom:
    """The random numbers of one step.

    Args:
        device: of the model; its generator is seeded beside the CPU's.
    """

    def __init__(self, device: torch.device) -> None:
        self._generators = TorchGenerators(device)
        self._stream = current_world().state(RandomStream)
        self._seed = int(torch.empty((), dtype=torch.int64).random_())
        self._sharded_seed = hash_numbers(self._stream.seed, self._stream.drawn)
        self._stream.drawn += 1
        self._microbatch = 0

    @contextmanager
    def microbatch(self, number: int) -> Iterator[None]:
        """Seed for the forward of a stage for a microbatch; afterwards all is as before."""
        stream = self._stream
        sharded = stream.seed, stream.drawn
        self._microbatch = number
        with self._generators.restored():
            self._seed_for(_BEFORE_UNITS)
            try:
                yield
            finally:
                stream.seed, stream.drawn = sharded

    def after_unit(self, number: int) -> None:
        """Seed for what follows a call of a unit, by the number of the call."""
        if thread_context.recorder is not None and self._stream.drawn:
            thread_context.recorder.refuse(_UNSET_SEEDS, _COMPILES_UNITS)
        self._seed_for(number)

    def before_loss(self) -> None:
        """Seed for the loss of the microbatch, wherever the last stage has left the generators."""
        self._seed_for(_BEFORE_LOSS)

    def _seed_for(self, number: int) -> None:
        self._generators.seed(hash_numbers(self._seed, self._microbatch, number))
        self._stream.seed = hash_numbers(self._sharded_seed, self._microbatch, number)
        self._stream.drawn = 0


@contextmanager
def restored_in_recordings() -> Iterator[None]:
    """Restore the generators at the end of the block if `sm.jit` records it.

    Seeds that nothing draws from then leave no trace in the graph. A number that is drawn after
    `after_unit` is refused by the recording, one for a ShardedTensor here.
    """
    recorder = thread_context.recorder
    if recorder is None:
        yield
        return
    stream = current_world().state(RandomStream)
    sharded = stream.seed, stream.drawn
    state = torch.default_generator.get_state()
    device_state = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    try:
        yield
        if stream.drawn and stream.seed != sharded[0]:  # after the last unit
            recorder.refuse(_UNSET_SEEDS, _COMPILES_UNITS)
    finally:
        stream.seed, stream.drawn = sharded
        torch.default_generator.set_state(state)
        if device_state is not None:
            torch.cuda.set_rng_state(device_state)
