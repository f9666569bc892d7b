"""What a graph calls besides operators: reads of values, checks, and messages between ranks in
Python.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...mesh.comm.agreement import gather_facts
from .collectives import group_of
from .errors import JitError, value_read


def item(x: Tensor) -> Any:
    """Return the value of a tensor with one element."""
    return x.item()


def expect(x: Tensor, value: Any, place: str) -> None:
    """Raise unless a tensor has the value that it had when the graph was made, on which the
    library's Python code depended.
    """
    found = x.item()
    if found != value and not (found != found and value != value):
        raise value_read(
            f"{place}: the value was {value} when the graph was made and is {found} now; the "
            "library"
        )


def barrier(group: str) -> None:
    """Wait for all ranks of a group."""
    group_of(group).barrier()


class Exchange:
    """Exchanges a Python object between ranks again, as the library does for shapes that may change
    on other ranks.
    """

    def __init__(self, group: str, mine: Any, expected: list[Any], place: str) -> None:
        self.group, self.mine, self.expected, self.place = group, mine, expected, place
        self.__name__ = "exchange"

    def __call__(self) -> None:
        found = list(gather_facts(group_of(self.group), self.mine).values())
        if found != self.expected:
            raise JitError(
                f"{self.place}: the ranks had {self.expected} when the graph was made and have "
                f"{found} now; call the function eagerly"
            )
