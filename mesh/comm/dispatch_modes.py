"""Run the library's own operators outside of dispatch modes that are for the program's operators.

Selective recomputation (`torch.utils.checkpoint.create_selective_checkpoint_contexts`) saves the
results of a program's operators by their number, in a `TorchDispatchMode`, and expects the same
operators in the same order when it recomputes. What the library does may differ between the two:
parameters are gathered once for both, and a strategy is chosen on tensors on "meta" when an
operator is first called. A mode that counts (`FlopCounterMode`) must not count those either. Fake
tensors and the library's own modes stay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from typing import Any, TypeVar

import torch
from torch.utils import checkpoint
from torch.utils._python_dispatch import _pop_mode, _push_mode

_PACKAGE = __name__.partition(".")[0] + "."
count_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
_RECOMPUTES = tuple(
    kind
    for name in ("_CachingTorchDispatchMode", "_CachedTorchDispatchMode")
    if isinstance(kind := getattr(checkpoint, name, None), type)
)
Function = TypeVar("Function", bound=Callable[..., Any])


def outside_of_recomputation() -> AbstractContextManager[None]:
    """Return a context manager that suspends the modes of selective recomputation.

    For communication and what belongs to it.
    """
    if not count_modes():
        return nullcontext()
    return _suspend_modes(lambda mode: isinstance(mode, _RECOMPUTES))


def outside_of_program_modes() -> AbstractContextManager[None]:
    """Return a context manager that suspends all dispatch modes of the program.

    For operators that compute nothing of it.
    """
    return _suspend_modes(_is_of_program) if count_modes() else nullcontext()


def not_recomputed(function: Function) -> Function:
    """Make a function run `outside_of_recomputation`; 0.1 microseconds without dispatch modes."""

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not count_modes():
            return function(*args, **kwargs)
        with outside_of_recomputation():
            return function(*args, **kwargs)

    return run  # type: ignore[return-value]


def _is_of_program(mode: Any) -> bool:
    """Return whether a mode is neither torch's own (fake tensors, tracing) nor this library's."""
    return getattr(mode, "_mode_key", None) is None and not f"{type(mode).__module__}.".startswith(
        _PACKAGE
    )


@contextmanager
def _suspend_modes(suspends: Callable[[Any], bool]) -> Iterator[None]:
    """Suspend some of the active modes, and keep the order of the others."""
    modes = [torch._C._get_dispatch_stack_at(i) for i in range(count_modes())]
    first = next((i for i, mode in enumerate(modes) if suspends(mode)), len(modes))
    above = modes[first:]  # without torch's own modes, which are always the first ones
    remaining = [mode for mode in above if not suspends(mode)]
    for _ in above:
        _pop_mode()
    for mode in remaining:
        _push_mode(mode)
    try:
        yield
    finally:
        for _ in remaining:
            _pop_mode()
        for mode in above:
            _push_mode(mode)
