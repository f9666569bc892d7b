"""Communication that no line of the program asks for by name: allowed, warned about, or forbidden.

An operator whose operands do not have the layouts it needs redistributes them. The result is right,
but the cost may be a surprise:

    with sm.ops.implicit_comm("forbid"):
        y = x @ w          # ImplicitCommError: names operator, layouts, bytes, line, what to write
        w = w.redistribute(P())
        y = x @ w          # explicit: allowed

Explicit communication is never implicit: `redistribute`, `full_tensor`, `item`,
`distribute_tensor`, and backward, whose communication follows from forward's. An observer of the
world's collectives asks the stack which operator runs (see `operator_calls.py`); while everything
is allowed there is no observer, and no operator is slower.
"""

from __future__ import annotations

import warnings
from types import TracebackType

from ...mesh.comm.call_site import user_call
from ...mesh.comm.current_world import current_world
from ...mesh.comm.group import CollectiveRecord, Observer
from ...mesh.comm.report import describe
from ...mesh.comm.world import World
from ...mesh.errors import ImplicitCommError

MODES = ("allow", "warn", "forbid")


class implicit_comm:
    """implicit_comm("allow" | "warn" | "forbid"): set what happens when operators communicate.

    The policy is for communication that the program did not ask for.

    Applies from the call on, to this process (this rank of a simulated world); as
    `with implicit_comm(...):` until the end of the block. The default is "allow". "warn" warns once
    for each operator and line.

    Raises:
        ValueError: for another word.
        ImplicitCommError: later, under "forbid", on every rank of the collective, before it moves
            anything.

    Communication: none.

    Example:
        >>> with sm.ops.implicit_comm("forbid"):
        ...     y = x.relu()
    """

    def __init__(self, mode: str) -> None:
        if mode not in MODES:
            raise ValueError(f"implicit_comm({mode!r}): write one of {', '.join(map(repr, MODES))}")
        self.mode = mode
        self._world = current_world()
        self._before = _replace_observer(
            self._world, None if mode == "allow" else _ImplicitCommObserver(mode)
        )

    def __enter__(self) -> implicit_comm:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        _replace_observer(self._world, self._before)

    def __repr__(self) -> str:
        return f"implicit_comm({self.mode!r})"


class _ImplicitCommObserver:
    """Warn or raise before a collective that an operator launches."""

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
                f"{call.place}: {text}, which implicit_comm('forbid') refuses. Nothing has moved. "
                f"{call.operator.advice}, or allow it with `with sm.ops.implicit_comm('allow'):` "
                "around the line."
            )
        if (call.name, call.place) not in self.warned:
            self.warned.add((call.name, call.place))
            warnings.warn_explicit(
                f"{text}. {call.operator.advice}.", UserWarning, call.file, call.line
            )


def _replace_observer(world: World, observer: Observer | None) -> Observer | None:
    """Make this the world's only observer of implicit communication; return the previous one."""
    before = next(
        (other for other in world.observers if isinstance(other, _ImplicitCommObserver)), None
    )
    if before is not None:
        world.observers.remove(before)
    if observer is not None:
        world.observers.insert(0, observer)
    return before
