"""Work: a collective that was started with `async_op=True` and may not have completed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable


class Work(ABC):
    """A started collective. Until `wait` returns, do not write its buffers or read its results."""

    __slots__ = ()

    @abstractmethod
    def wait(self) -> None:
        """Wait until the result may be used (on CUDA: by the stream). Later calls return at once.

        Raises: the error of the collective if it failed, in each call.
        """

    @abstractmethod
    def is_completed(self) -> bool:
        """Return whether `wait` would return at once.

        `wait` must be called in any case: some backends (gloo's point-to-point calls) return False
        until then.
        """


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
    """A collective, and a function to call when it has completed."""

    __slots__ = ("_then", "_work")

    def __init__(self, work: Work, then: Callable[[], object]) -> None:
        self._work = work
        self._then: Callable[[], object] | None = then

    def wait(self) -> None:
        self._work.wait()
        if self._then is not None:
            then, self._then = self._then, None
            then()

    def is_completed(self) -> bool:
        return self._work.is_completed()


def and_then(work: Work | None, then: Callable[[], object]) -> Work | None:
    """Call `then` when the work has completed: now if it has, else in `wait`."""
    if work is None or work is DONE:
        then()
        return work
    return _Then(work, then)
