"""Find the backend that a name stands for."""

from __future__ import annotations

import functools
import shutil
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from ..program import Program, Runner, compile_eagerly
from .segments import compile_segments

Backend = Callable[[Program, Sequence[Any]], Runner]


def find_backend(given: str | Callable[..., Any] | None) -> Backend:
    """Return the backend of this name; by default Inductor, or "eager" without a C++ compiler."""
    if given is None:
        given = "inductor" if _has_compiler() else "eager"
    if given == "eager":
        return lambda program, inputs: compile_eagerly(program.graph)
    return functools.partial(compile_segments, given)


@functools.cache
def _has_compiler() -> bool:
    if any(map(shutil.which, ("g++", "clang++", "c++"))):
        return True
    warnings.warn("sm.jit: no C++ compiler was found, so graphs run as Python; install g++, or pass backend='eager'", stacklevel=4)
    return False
