"""Random numbers that do not depend on the mesh.

Each number is a function of the seed, of the number of random tensors drawn before, and of the
element's global position. So a program draws the same global tensors on any mesh, with any
sharding, on CPU or GPU, on one rank or a thousand, and replicas are equal. `torch.manual_seed` has
no effect on them.
"""

from __future__ import annotations

import hashlib
import struct
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...kernels import random as philox
from ...kernels.random import distributions
from ...mesh.comm.agreement import same_on_all
from ...mesh.comm.current_world import current_world
from ...mesh.comm.recording.trace_buffer import Header
from ...mesh.comm.thread_context import thread_context
from ...mesh.comm.world import World
from ..autograd.engine_hooks import current_backward
from ..autograd.transforms import check_same_randomness
from ..layout.layout import Layout

_MASK = (1 << 64) - 1
# separates consecutive streams; the increment of SplitMix64 (Steele et al. 2014)
_GOLDEN = 0x9E3779B97F4A7C15


class RandomStream:
    """Seed and position of one rank's stream of random tensors.

    The same on every rank of a program.

    Attributes:
        seed: 64-bit seed.
        drawn: number of random tensors drawn since the seed was set.
        replaying: whether a checkpointed part of the program is being recomputed.
    """

    def __init__(self, world: World) -> None:
        self._world = weakref.ref(world)
        self.seed, self.drawn, self.replaying = 0, 0, False

    def next(self) -> tuple[int, int]:
        check_same_randomness()
        if torch.is_grad_enabled() and current_backward() >= 0 and not self.replaying:
            raise RuntimeError(
                "random numbers for a ShardedTensor inside torch.utils.checkpoint: recomputed in "
                "backward, they would differ from those of forward; write checkpoint(..., "
                "use_reentrant=False, context_fn=sm.random.replay_random)"
            )
        self.drawn += 1
        thread_context.last_draw = self.seed, self.drawn
        world = self._world()
        if world is not None:  # published for diagnosis on other ranks
            world.trace_buffer.words[Header.SEED], world.trace_buffer.words[Header.DRAWN] = (
                thread_context.last_draw
            )
        return thread_context.last_draw


class TorchGenerators:
    """The generators of torch for the CPU and for a device, seeded and restored together."""

    def __init__(self, device: torch.device) -> None:
        has_generator = device.type not in ("cpu", "meta")  # of its own
        self._device_module = torch.get_device_module(device) if has_generator else None

    def seed(self, seed: int) -> None:
        torch.default_generator.manual_seed(seed)
        if self._device_module is not None:
            self._device_module.manual_seed(seed)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Restore their states at the end of the block."""
        state, device_state = torch.default_generator.get_state(), None
        if self._device_module is not None:
            device_state = self._device_module.get_rng_state()
        try:
            yield
        finally:
            torch.default_generator.set_state(state)
            if self._device_module is not None:
                self._device_module.set_rng_state(device_state)


def hash_numbers(*numbers: int) -> int:
    """Return a 63-bit hash of numbers."""
    packed = struct.pack(f"<{len(numbers)}Q", *(number & _MASK for number in numbers))
    digest = hashlib.blake2b(packed, digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def manual_seed(seed: int) -> None:
    """Seed the random numbers of `ShardedTensor`s. Call it on every rank with the same seed.

    Communication: none.
    """
    state = current_world().state(RandomStream)
    state.seed, state.drawn = seed & _MASK, 0
    _notify_recorder()


def get_rng_state() -> Tensor:
    """Return seed and position of the random `ShardedTensor`s as 16 bytes, for a checkpoint.

    Communication: none.

    Example:
        >>> state = sm.random.get_rng_state()
        >>> x = sm.rand(4, device_mesh=mesh)
        >>> sm.random.set_rng_state(state)  # from here on, the same numbers again
    """
    state = current_world().state(RandomStream)
    return torch.tensor([state.seed, state.drawn], dtype=torch.uint64).view(torch.uint8)


def set_rng_state(state: Tensor) -> None:
    """Continue random `ShardedTensor`s from the state of `get_rng_state`. Call it on every rank.

    Raises:
        ValueError: not 16 bytes.

    Communication: none.
    """
    if state.dtype != torch.uint8 or state.shape != (16,):
        raise ValueError(
            "a random state must be 16 bytes (uint8), as sm.random.get_rng_state returns, got "
            f"{state.dtype}{list(state.shape)}; pass a state of torch's own generator to "
            "torch.set_rng_state"
        )
    own = current_world().state(RandomStream)
    own.seed, own.drawn = state.cpu().clone().view(torch.uint64).tolist()
    _notify_recorder()


def _notify_recorder() -> None:
    """Notify a recorder that positions no longer follow from that at the start of the recording."""
    if thread_context.recorder is not None:
        thread_context.recorder.draws.relative = False


@contextmanager
def fork_rng() -> Iterator[None]:
    """Restore the random state at the end of the block, whatever was drawn and seeded inside.

    Communication: none.
    """
    state = current_world().state(RandomStream)
    recorder = thread_context.recorder
    before, relative = (state.seed, state.drawn), recorder is None or recorder.draws.relative
    try:
        yield
    finally:
        state.seed, state.drawn = before
        if recorder is not None:
            recorder.draws.relative = relative


def check_rng_state(mesh: Any) -> None:
    """Check that all ranks of a mesh have the same seed and the same number of draws.

    Raises:
        RuntimeError: they differ; the same text on every rank.

    Communication: one all_gather of small objects over the mesh.
    """
    if mesh.coordinate is None:
        return

    def error(states: dict[int, tuple[int, int]]) -> RuntimeError:
        by_rank = ", ".join(f"rank {r}: seed {seed}, {n} drawn" for r, (seed, n) in states.items())
        return RuntimeError(
            f"the ranks of {mesh} would draw different random numbers ({by_rank}); call "
            "sm.random.manual_seed with the same seed on every rank, and draw the same tensors on "
            "every rank"
        )

    state = mesh.world.state(RandomStream)
    same_on_all(mesh.group(mesh.axis_names), (state.seed, state.drawn), error)


def replay_random() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Make `torch.utils.checkpoint` draw the same random `ShardedTensor`s when it recomputes.

    Communication: none.

    Example:
        >>> y = checkpoint(block, x, use_reentrant=False, context_fn=sm.random.replay_random)
    """
    return nullcontext(), _Replay(current_world().state(RandomStream))


class _Replay(AbstractContextManager[None]):
    """Draw numbers again from the seed and the position at construction; reentrant."""

    def __init__(self, state: RandomStream) -> None:
        self.state = state
        self.start = state.seed, state.drawn
        self.before: list[tuple[int, int, bool]] = []

    def __enter__(self) -> None:
        state = self.state
        self.before.append((state.seed, state.drawn, state.replaying))
        state.seed, state.drawn = self.start
        state.replaying = True

    def __exit__(self, *_: Any) -> None:
        self.state.seed, self.state.drawn, self.state.replaying = self.before.pop()


def uniform(layout: Layout, low: float = 0.0, high: float = 1.0) -> Tensor:
    """Return this rank's part of a tensor of numbers in [low, high)."""
    return draw(philox.uniform, layout, low, high)


def normal(layout: Layout, mean: float = 0.0, std: float = 1.0) -> Tensor:
    """Return this rank's part of Gaussian numbers; complex ones have total variance std**2."""
    if layout.dtype.is_complex and mean:
        return draw(philox.normal, layout, 0.0, std).add_(mean)
    return draw(philox.normal, layout, mean, std)


def integers(layout: Layout, low: int, high: int) -> Tensor:
    """Return this rank's part of a tensor of integers in [low, high)."""
    return draw(_integers, layout, low, high)


def _integers(
    shape: Any,
    box: Any,
    seed: int,
    stream: int,
    dtype: torch.dtype,
    device: Any,
    low: int,
    high: int,
) -> Tensor:
    return philox.integers(shape, box, seed, stream, low, high, dtype, device)


def bernoulli(layout: Layout, p: float) -> Tensor:
    """Return this rank's part of a bool tensor that is True with probability p."""
    return draw(_bernoulli, layout, p)


def _bernoulli(
    shape: Any, box: Any, seed: int, stream: int, dtype: torch.dtype, device: Any, p: float
) -> Tensor:
    return philox.bernoulli_mask(shape, box, seed, stream, p, device)


def permutation(layout: Layout) -> Tensor:
    """Return this rank's part of a random 0 ... n - 1: every rank sorts n random 64-bit keys."""
    return draw(_permutation, layout)


def _permutation(
    shape: Any, box: Any, seed: int, stream: int, dtype: torch.dtype, device: Any
) -> Tensor:
    ((start, stop),) = box
    keys = philox.integers(
        shape, ((0, *shape),), seed, stream, -(1 << 63), 1 << 63, torch.int64, device
    )
    return keys.argsort(stable=True)[start:stop].to(dtype)


def draw(distribution: Callable[..., Tensor], layout: Layout, *parameters: Any) -> Tensor:
    """Return this rank's part of the next random tensor.

    `distribution` is one of `kernels.random` or `kernels.random.distributions`.

    Ranks outside the mesh draw too, an empty part, so that the position is the same on all ranks.
    """
    mesh: Any = layout.mesh
    seed, stream = mesh.world.state(RandomStream).next()
    if mesh.coordinate is None:
        return torch.empty(0, dtype=layout.dtype, device=mesh.device)
    if thread_context.recorder is not None:
        return thread_context.recorder.draw(
            _part_of(distribution, layout), seed, stream, parameters
        )
    return distribution(
        layout.shape, layout.box, seed, stream, layout.dtype, mesh.device, *parameters
    )


def _part_of(distribution: Callable[..., Tensor], layout: Layout) -> Callable[..., Tensor]:
    """Return the part of a random tensor as a function of seed, position and parameters."""
    mesh: Any = layout.mesh
    shape, box, dtype, device = layout.shape, layout.box, layout.dtype, mesh.device
    return lambda seed, stream, *parameters: distribution(
        shape, box, seed, stream, dtype, device, *parameters
    )


def units(layout: Layout) -> distributions.Units:
    """Return the next random tensor as an unlimited sequence of uniform numbers in (0, 1).

    One sequence for each element of this rank's part.
    """
    mesh: Any = layout.mesh
    seed, stream = mesh.world.state(RandomStream).next()
    unit = partial(distributions.unit, layout.shape, layout.box)
    recorder = thread_context.recorder
    if recorder is None:
        return lambda part: unit(seed, stream, part, mesh.device)
    return lambda part: recorder.draw(unit, seed, stream, (part, mesh.device))


def call_seeded(mesh: Any, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function that draws from torch's own generator, seeded equally on every rank.

    The generator is restored afterwards.
    """
    seed, stream = mesh.world.state(RandomStream).next()
    with torch.random.fork_rng([mesh.device.index or 0] if mesh.device_type == "cuda" else []):
        torch.manual_seed((seed + stream * _GOLDEN) % (1 << 63))
        return func(*args, **kwargs)
