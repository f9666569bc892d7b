"""Pending: a value that is still computed or received.

Everything that `async_op=True` returns is one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Generic, TypeVar

from .work import DONE, Work

T = TypeVar("T")
U = TypeVar("U")


class Pending(Generic[T]):
    """A value to come; `wait()` returns it.

    Args:
        finish: waits for the works and returns the value; called once.
        works: what it waits for; `DONE` if the value is there.
    """

    __slots__ = ("__weakref__", "_finish", "_value", "_works")
    _value: T

    def __init__(self, finish: Callable[[], T], *works: Work | Pending[Any]) -> None:
        self._finish: Callable[[], T] | None = finish
        self._works = works

    @staticmethod
    def after(work: Work | None, finish: Callable[[], T]) -> Pending[T]:
        """Return the value that `finish()` returns once the work has completed."""
        if work is None:
            return Pending(finish, DONE)
        return Pending(partial(_wait_and_finish, work, finish), work)

    def wait(self) -> T:
        """Return the value; the same object at every call.

        Raises: the error of what it waits for; a later call tries again.
        """
        if self._finish is not None:
            self._value = self._finish()
            self._finish = None
            self._works = ()
        return self._value

    def is_completed(self) -> bool:
        """Return whether `wait` would return at once, False if that is unknown.

        `wait` must be called in any case, see `Work.is_completed`.
        """
        if self._finish is None:
            return True
        return bool(self._works) and all(work.is_completed() for work in self._works)

    def then(self, function: Callable[[T], U]) -> Pending[U]:
        """Return what `function` makes of the value, once, when the result is waited for."""
        return Pending(lambda: function(self.wait()), self)


def _wait_and_finish(work: Work, finish: Callable[[], T]) -> T:
    work.wait()
    return finish()
