"""The most memory that a step needs at each of its moments, told apart by the model's blocks.

    forward    block 0    block 1    block -1    loss
    backward   block -1   block 1    block 0     embedding    optimizer

A moment lasts from one event to the next. A block is called by its index from the start or, near
the end, from there (-1 is the last), so models with fewer and more blocks have moments in common.
What is alive at one of them grows by the same bytes with each block. Which of them needs most may
change with the number of blocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Literal

from torch import nn

from ..abstract.peak_memory import PeakMemory
from ..trees import tensors_in

Place = tuple[int, int]  # the stage of a block, and its index there from the start or the end
Event = Literal["step", "forward", "after forward", "backward", "after backward", "returned"]
# what began it, of which block, and how often this event had been before
Moment = tuple[Event, Place | None, int]

STEP: Moment = ("step", None, 0)  # until the first block


class MomentsOfMemory:
    """MomentsOfMemory(memory).watch(blocks, places): note when events of blocks are.

    Args:
        memory: that counts the step. What happens before it has counted an operator is not noted.
    """

    def __init__(self, memory: PeakMemory) -> None:
        self._memory = memory
        self._begins: list[tuple[int, Event, Place | None]] = []

    def note(self, event: Event, place: Place | None = None) -> None:
        """Note that a moment begins."""
        if self._memory.operators:
            self._begins.append((self._memory.operators, event, place))

    def watch(self, blocks: Iterable[nn.Module], places: Iterable[Place | None]) -> None:
        """Note when these blocks, and copies that are made of them, begin and end.

        Moments of blocks without a place are numbered together, as those of no block are.
        """
        for block, place in zip(blocks, places, strict=True):
            _watch(block, partial(self.note, place=place))

    def peaks(self) -> dict[Moment, float]:
        """Return the most bytes that are alive at each moment."""
        history = self._memory.history
        counts: Counter[tuple[Event, Place | None]] = Counter()
        peaks: dict[Moment, float] = {}
        begins = [(0, "step", None), *self._begins]
        ends = [begin for begin, *_ in begins[1:]] + [len(history)]
        for (begin, event, place), end in zip(begins, ends, strict=True):
            moment: Moment = (event, place, counts[event, place])
            counts[event, place] += 1
            if begin < end:
                peaks[moment] = float(max(history[begin:end]))
        return peaks


def _watch(block: nn.Module, note: Callable[[Event], None]) -> None:
    """Call a function at the events of a block.

    The hooks are functions, not methods, so that copies of the block have the same ones.
    """

    def at_gradient(tree: Any, event: Event) -> None:
        for x in tensors_in((tree,)):
            if x.requires_grad:
                x.register_hook(lambda grad: note(event))
                return

    def before_forward(module: nn.Module, args: Any, kwargs: Any) -> None:
        note("forward")
        at_gradient((args, kwargs), "after backward")

    def after_forward(module: nn.Module, args: Any, output: Any) -> None:
        note("after forward")
        at_gradient(output, "backward")

    block.register_forward_pre_hook(before_forward, with_kwargs=True)
    block.register_forward_hook(after_forward)
