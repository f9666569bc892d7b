"""Numbers that optimizers and averages hold, as inputs of a graph.

    learning rates         inputs
    weight decay, betas    constants; after one has changed, such as by a schedule, an input

What Python code finds out about an input, as `if weight_decay != 0:` does, is a condition: a call
for which it does not hold records again.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from .errors import JitError
from .scalars import RATE, TracedFloat
from .state.snapshot import Snapshot

if TYPE_CHECKING:
    from .graph_builder import GraphBuilder


class Hyperparameter(NamedTuple):
    """A number, or a tuple of numbers, in a dict.

    Attributes:
        holder: a parameter group of an optimizer, or the attributes of an object.
    """

    holder: dict[Any, Any]
    key: str

    @property
    def place(self) -> tuple[int, str]:
        """What identifies it."""
        return id(self.holder), self.key

    def now(self, i: int | None = None, *_: Any) -> float:
        """Return its value, or that of one number of a tuple."""
        return self.holder[self.key] if i is None else self.holder[self.key][i]

    def inputs_of(self, builder: GraphBuilder) -> Any:
        """Return inputs of the recording in place of its value."""
        value = self.holder[self.key]
        if isinstance(value, tuple):
            return tuple(
                self._number(builder, i, f"{self.key}[{i}]", x) for i, x in enumerate(value)
            )
        return self._number(builder, None, self.key, value)

    def _number(self, builder: GraphBuilder, i: int | None, name: str, value: float) -> TracedFloat:
        now, key = functools.partial(self.now, i), ("entry", id(self.holder), name)
        return builder.number(key, float(value), name, now, now)


class Hyperparameters:
    """Which hyperparameters are inputs of the next recording of one function."""

    def __init__(self) -> None:
        self._before: dict[tuple[int, str], Any] = {}
        self._changed: set[tuple[int, str]] = set()

    def inputs(self, snapshot: Snapshot) -> list[Hyperparameter]:
        """Return learning rates, and what has changed since an earlier recording."""
        inputs = []
        for holder, key in snapshot.numbers:
            one, value = Hyperparameter(holder, key), holder[key]
            if self._before.setdefault(one.place, value) != value:
                self._changed.add(one.place)
            if key == RATE or (one.place in self._changed and type(value) is not int):
                inputs.append(one)
        return inputs


@contextmanager
def tracing(builder: GraphBuilder, hyperparameters: list[Hyperparameter]) -> Iterator[None]:
    """Inside, hyperparameters are inputs of the graph, which must not set them."""
    before = []
    for one in hyperparameters:
        number = one.inputs_of(builder)
        before.append((one, one.holder[one.key], number))
        one.holder[one.key] = number
    was_set = []
    try:
        yield
    finally:
        for (holder, key), value, number in before:
            if holder.get(key) is not number:
                was_set.append(key)
            now = holder.get(key)
            if now is number:
                holder[key] = value
            elif isinstance(now, TracedFloat):
                holder[key] = value if builder.fullgraph else now.node.hint
    if was_set:
        what = "a learning rate" if RATE in was_set else was_set[0]
        builder.refuse(
            JitError(
                f"a function under sm.jit has set {what}, which a graph would not do; set it "
                "outside, as scheduler.step() does"
            )
        )
