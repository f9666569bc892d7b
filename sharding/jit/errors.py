"""The error of programs that cannot be one graph."""

from __future__ import annotations

from ...mesh.comm.call_site import user_line


class JitError(RuntimeError):
    """A function under `sm.jit` does something that a graph cannot repeat.

    The message names the line and what to write.
    """


class Break(str):
    """Why a function has no graph: what it does that a graph cannot repeat, and at which line."""

    __slots__ = ()


def at_line(problem: str, advice: str) -> JitError:
    """Return the error of a problem at the program's current line."""
    file, line = user_line()
    return JitError(f"{file}:{line}: {problem}. {advice}")


def value_read(what: str) -> JitError:
    """Return the error of a program that uses the value of a tensor in Python."""
    return at_line(
        f"{what} reads a value inside sm.jit, where a later call runs the graph and not this line",
        "Return the tensor and read it outside, or write torch.where for a choice between values; "
        "a number that must be known in Python can be a static argument (static_argnames)",
    )
