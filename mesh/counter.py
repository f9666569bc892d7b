"""How much a piece of a program communicates, and a limit on it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from .errors import CommBudgetError
from .group import CollectiveRecord, current_world
from .source import user_line


@dataclass(slots=True)
class _Use:
    launches: int = 0
    sent: int = 0
    received: int = 0

    def add(self, record: CollectiveRecord) -> None:
        self.launches += 1
        self.sent += record.bytes_sent
        self.received += record.bytes_received


class CommBudget:
    """What the collectives inside a `comm_budget` moved so far, on this rank.

    Attributes:
        bytes_received, bytes_sent, launches: totals, as `CollectiveRecord` counts them.
        by_op: collective -> (launches, bytes received).
    """

    def __init__(self, max_bytes: int | None, max_launches: int | None) -> None:
        self.max_bytes = max_bytes
        self.max_launches = max_launches
        self._uses: dict[tuple[str, str], _Use] = {}

    @property
    def launches(self) -> int:
        return sum(use.launches for use in self._uses.values())

    @property
    def bytes_sent(self) -> int:
        return sum(use.sent for use in self._uses.values())

    @property
    def bytes_received(self) -> int:
        return sum(use.received for use in self._uses.values())

    @property
    def by_op(self) -> dict[str, tuple[int, int]]:
        found: dict[str, tuple[int, int]] = {}
        for (op, _), use in self._uses.items():
            launches, received = found.get(op, (0, 0))
            found[op] = (launches + use.launches, received + use.received)
        return found

    def observe(self, record: CollectiveRecord) -> None:
        """Counts one collective, before it moves anything. Raises: CommBudgetError when it would exceed a limit."""
        file, number = user_line()
        line = f"{file}:{number}"
        self._check(record, line, "bytes", self.bytes_received, record.bytes_received, self.max_bytes)
        self._check(record, line, "launches", self.launches, 1, self.max_launches)
        self._uses.setdefault((record.op, line), _Use()).add(record)

    def _check(self, record: CollectiveRecord, line: str, unit: str, used: int, more: int, limit: int | None) -> None:
        if limit is not None and used + more > limit:
            raise CommBudgetError(
                f"{line}: {record.op} over {len(record.ranks)} ranks (receiving {record.bytes_received} bytes of "
                f"{str(record.dtype).removeprefix('torch.')}) exceeds comm_budget({unit}={limit}), of which {used} are "
                f"used. It has moved nothing. Choose shardings that need less, or allow {unit}={used + more}."
            )

    def report(self) -> str:
        """A table: what was used by which collective at which line of the program."""
        rows = [("collective", "launches", "received", "sent", "line")]
        rows += [(op, str(u.launches), str(u.received), str(u.sent), line) for (op, line), u in self._uses.items()]
        rows.append(("total", str(self.launches), str(self.bytes_received), str(self.bytes_sent), ""))
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
        return "\n".join(_table_row(row, widths) for row in rows)

    def __repr__(self) -> str:
        return f"CommBudget(bytes_received={self.bytes_received}, launches={self.launches})"


def _table_row(row: tuple[str, ...], widths: list[int]) -> str:
    name, *numbers, line = row
    cells = [name.ljust(widths[0]), *(n.rjust(w) for n, w in zip(numbers, widths[1:], strict=True)), line]
    return "  ".join(cells).rstrip()


@contextmanager
def comm_budget(bytes: int | None = None, launches: int | None = None) -> Iterator[CommBudget]:
    """with comm_budget(bytes=..., launches=...) as used: counts this rank's collectives, refuses those beyond a limit.

    The object it yields says what was used so far, during the block and after it. Around a whole `simulate` call it
    counts all ranks together.

    Args:
        bytes: how many may be received; no limit by default.
        launches: how many collectives may be called; no limit by default.

    Raises: CommBudgetError inside the block, before the collective that would exceed a limit moves anything. Where
        ranks use different amounts (an uneven all_to_all), only those over the limit raise: leave some room.
    Communication: none.

    >>> import torch
    >>> from shardmesh.mesh import comm_budget, current_world, simulate
    >>> def fn():
    ...     with comm_budget(bytes=100) as used:
    ...         current_world().group([0, 1]).all_reduce(torch.ones(10))
    ...     return used.by_op
    >>> simulate(2)(fn)()
    [{'all_reduce': (1, 40)}, {'all_reduce': (1, 40)}]
    """
    budget = CommBudget(bytes, launches)
    observers = current_world().observers
    observers.append(budget.observe)
    try:
        yield budget
    finally:
        observers.remove(budget.observe)
