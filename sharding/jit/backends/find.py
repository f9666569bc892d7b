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


def find_backend(
    given: str | Callable[..., Any] | None, options: Sequence[tuple[str, Any]] = ()
) -> Backend:
    """Return the backend of this name; by default Inductor, or "eager" without a C++ compiler.

    Args:
        options: names in `torch._inductor.config` and their values.

    Raises: ValueError for such options with another backend.
    """
    if given is None:
        given = "inductor" if _has_compiler() else "eager"
    if options and given != "inductor":
        raise ValueError(
            f"sm.jit: compiler_options has {options[0][0]!r}, an option of Inductor, but the "
            f"backend is {given!r}"
        )
    if given == "eager":
        return lambda program, inputs: compile_eagerly(program.graph)
    return functools.partial(compile_segments, given, dict(options))


@functools.cache
def _has_compiler() -> bool:
    if any(map(shutil.which, ("g++", "clang++", "c++"))):
        return True
    warnings.warn(
        "sm.jit: no C++ compiler was found, so graphs run as Python; install g++, or pass "
        "backend='eager'",
        stacklevel=4,
    )
    return False
