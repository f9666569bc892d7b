"""Communication that nobody asked for by name: allowed, warned of, or forbidden.

An operator whose operands do not lie as it needs them redistributes them. That is right, and it may be a surprise:

    with sm.implicit("forbid"):
        y = x @ w          # ImplicitCommError: names the operator, the layouts, the bytes, the line, and what to write
        w = w.redistribute(P())
        y = x @ w          # asked for: fine

What a program asks for is never implicit: `redistribute`, `full_tensor`, `item`, `distribute_tensor`, and backward, whose
communication follows from forward's. An observer of the world's collectives watches, and the stack tells it which operator
runs: while everything is allowed nothing watches, and no operator is slower.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any

from ...mesh.comm.call_site import DESCRIBERS, OperatorCall, user_call
from ...mesh.comm.current_world import current_world
from ...mesh.comm.group import CollectiveRecord, Observer
from ...mesh.comm.report import describe
from ...mesh.comm.world import World
from ...mesh.errors import ImplicitCommError
from ..tensor import sharded_tensor
from ..tensor.autograd import backward, leaf_grads
from ..tensor.sharded_tensor import ShardedTensor
from . import dispatch
from .rules.registry import HANDLERS
from .strategy import Decision, name_of

MODES = ("allow", "warn", "forbid")
# modules of functions that read values or ask for gradients
_ASKED_IN = frozenset({backward.__name__, leaf_grads.__name__, sharded_tensor.__name__})


class implicit:
    """implicit("allow" | "warn" | "forbid"): what happens when an operator communicates without being asked to.

    Works from the call on, for this process (this rank of a simulated world); as `with implicit(...):` until the end of the
    block. In the beginning everything is allowed. "warn" warns once for each operator and line.

    Raises:
        ValueError: for another word.
        ImplicitCommError: later, under "forbid", on every rank that the collective runs on, before it moves anything.

    Communication: none.

    Example:
        >>> with sm.implicit("forbid"):
        ...     y = x.relu()
    """

    def __init__(self, mode: str) -> None:
        if mode not in MODES:
            raise ValueError(f"implicit({mode!r}): write one of {', '.join(map(repr, MODES))}")
        self.mode = mode
        self._world = current_world()
        self._before = _replace_watch(self._world, None if mode == "allow" else _Watch(mode))

    def __enter__(self) -> implicit:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None) -> None:
        _replace_watch(self._world, self._before)

    def __repr__(self) -> str:
        return f"implicit({self.mode!r})"


class _Watch:
    """The observer that knows the mode in force."""

    def __init__(self, mode: str) -> None:
        self.mode = mode
        self.warned: set[tuple[str, str]] = set()

    def __call__(self, record: CollectiveRecord) -> None:
        call = user_call()
        if call.operator is None:
            return
        text = f"{describe(call, record)}: implicit communication"
        if self.mode == "forbid":
            raise ImplicitCommError(
                f"{call.place}: {text}, which implicit('forbid') refuses. Nothing has moved. {call.operator.advice}, or allow it "
                "with `with sm.implicit('allow'):` around the line."
            )
        if (call.name, call.place) not in self.warned:
            self.warned.add((call.name, call.place))
            warnings.warn_explicit(f"{text}. {call.operator.advice}.", UserWarning, call.file, call.line)


def _replace_watch(world: World, watch: Observer | None) -> Observer | None:
    """Make this the one watch of the world; the one before."""
    before = next((observer for observer in world.observers if isinstance(observer, _Watch)), None)
    if before is not None:
        world.observers.remove(before)
    if watch is not None:
        world.observers.insert(0, watch)
    return before


# -- what an operator's frame tells ------------------------------------------------------------------------------------


def _describe(frame: dict[str, Any]) -> OperatorCall | str:
    """The operator that `torch_function` runs; its name alone where the program asks for values or gradients."""
    func = frame["func"]
    if getattr(HANDLERS.get(func), "__module__", None) in _ASKED_IN:
        return name_of(func)
    operands = list(_sharded((*frame["args"], *(frame["kwargs"] or {}).values())))
    layouts = ", ".join(str(x._layout) for x in operands)
    return OperatorCall(name_of(func), layouts, _advice(operands, frame.get("decision")))


def _sharded(items: Sequence[Any]) -> Iterator[ShardedTensor]:
    for item in items:
        if isinstance(item, ShardedTensor):
            yield item
        elif isinstance(item, (list, tuple)):
            yield from _sharded(item)


def _advice(operands: Sequence[ShardedTensor], decision: Decision | None) -> str:
    """What to write before the operator, so that it finds its operands as it needs them."""
    if decision is None or decision.form is not None or not decision.moves:
        return "Redistribute its operands first, so that the dims it works along are whole"
    moved = [
        f"{_which(i, len(operands))}.redistribute({target.spec})"
        for i, (x, target) in enumerate(zip(operands, decision.targets, strict=True))
        if target is not x._layout
    ]
    return f"Write {' and '.join(moved)} before it"


def _which(number: int, count: int) -> str:
    return "x" if count == 1 else f"operand_{number}"


DESCRIBERS[dispatch.torch_function.__code__] = _describe  # so that reports and budgets know operators by their frames
