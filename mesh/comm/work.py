"""Work: a collective that was started with `async_op=True` and may still be under way."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable


class Work(ABC):
    """A started collective. Its buffers belong to it until `wait` returns: write to none, read no result."""

    __slots__ = ()

    @abstractmethod
    def wait(self) -> None:
        """Returns when the result may be used (on CUDA: by the current stream). Later calls return at once.

        Raises: what went wrong in the collective, in each call.
        """

    @abstractmethod
    def is_completed(self) -> bool:
        """Whether `wait` would return without waiting for others. It must be called all the same: some backends (gloo's
        point-to-point calls) say no until then."""


class _Done(Work):
    __slots__ = ()

    def wait(self) -> None:
        pass

    def is_completed(self) -> bool:
        return True

    def __repr__(self) -> str:
        return "DONE"


DONE = _Done()


class _Then(Work):
    """A collective, and what is left to do with its result."""

    __slots__ = ("_then", "_work")

    def __init__(self, work: Work, then: Callable[[], None]) -> None:
        self._work = work
        self._then: Callable[[], None] | None = then

    def wait(self) -> None:
        self._work.wait()
        if self._then is not None:
            then, self._then = self._then, None
            then()

    def is_completed(self) -> bool:
        return self._work.is_completed()


def and_then(work: Work | None, then: Callable[[], None]) -> Work | None:
    """Does `then` when the work is done: now if it is, else in `wait`."""
    if work is None or work is DONE:
        then()
        return work
    return _Then(work, then)
