"""Find the line of the user's program that caused a collective, and the function that it called.

    train.py:12    y = F.linear(x, w)    the innermost frame that is neither shardmesh's nor torch's
    torch          linear
    shardmesh      torch_function        the outermost frame of shardmesh: what the line called
    shardmesh      ... all_gather        user_call() is called here

Everything is read from the stack when it is needed, so programs pay nothing for it otherwise. Other
modules do not walk frames, but for the few that `docs/architecture.md` lists, as it lists what
depends on the stack beyond messages.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
import typing_extensions  # torch needs it, too
from torch import nn

# Symbolic links are not resolved, as in the file names of frames.
_PACKAGE = Path(__file__).parent.parent.parent
_OURS = tuple(str(_PACKAGE / part) + "/" for part in ("mesh", "sharding", "kernels"))
_TORCH = str(Path(torch.__file__).parent) + "/"
_ENGINE = (_TORCH + "autograd/", _TORCH + "_tensor.py")
_COMPILED = (
    "<eval_with_key>",
    os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    or os.path.join(tempfile.gettempdir(), "torchinductor_"),
)
# the last two call functions of others
_INNER = (*_OURS, _TORCH, *_COMPILED, contextlib.__file__, typing_extensions.__file__)

_inner_files: dict[str, bool] = {}


def is_inner(code: CodeType) -> bool:
    """Return whether a frame with this code belongs to shardmesh or torch, not to the user."""
    is_inner_file = _inner_files.get(code.co_filename)
    if is_inner_file is None:
        is_inner_file = _inner_files[code.co_filename] = code.co_filename.startswith(_INNER)
    return is_inner_file


def user_frame(above: int = 1) -> tuple[FrameType, int]:
    """Return the innermost frame of the user's program, and how far up it is.

    The second is how many frames above the caller's the frame below it is.

    Args:
        above: frames to skip, starting with the caller's.
    """
    frame, depth = sys._getframe(above), above - 2
    while frame.f_back is not None and is_inner(frame.f_code):
        frame, depth = frame.f_back, depth + 1
    return frame, depth


# reentrant: a collection before `gc.disable` may run a finalizer that asks for frames itself
_frames_lock = threading.RLock()


def frame_of_thread(ident: int | None) -> FrameType | None:
    """Return the innermost frame of another thread, None if it has ended.

    Garbage collection is off meanwhile: `sys._current_frames` holds the interpreter's lock of
    thread states while it allocates, and a finalizer that starts a thread or lets another one run
    would wait for that lock for good (https://github.com/python/cpython/issues/106883).
    """
    with _frames_lock:
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            return sys._current_frames().get(ident or -1)
        finally:
            if was_enabled:
                gc.enable()


def main_thread_stack() -> str:
    """Return the main thread's stack; of the library only the innermost frame."""
    frame = frame_of_thread(threading.main_thread().ident)
    if frame is None:
        return ""
    # walked once: the thread runs meanwhile, and a frame that has returned has no `f_back`
    shown = [x for x in traceback.walk_stack(frame) if not is_inner(x[0].f_code) or x[0] is frame]
    return "".join(traceback.StackSummary.extract(iter(shown[::-1])).format())


def frames_of_thread(ident: int | None) -> Iterator[FrameType]:
    """Yield the frames of another thread, the innermost first; none if it has ended."""
    return _outward(frame_of_thread(ident))


def _outward(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def user_line() -> tuple[str, int]:
    """Return the file name and line number in the user's program."""
    frame, _ = user_frame()
    return frame.f_code.co_filename, frame.f_lineno


def user_lines(count: int) -> list[tuple[str, int]]:
    """Return `user_line` and those of the frames that called it, at most so many."""
    frames = islice(_outward(user_frame()[0]), count)
    return [(frame.f_code.co_filename, frame.f_lineno) for frame in frames]


def operator_line() -> tuple[str, int] | None:
    """Return the user's line that runs an operator, for a torch function mode that sees it.

    None if the library runs it, unless a mode of the library passes it on.
    """
    is_ours, frame = False, sys._getframe(2)
    while frame.f_back is not None:
        if frame.f_code.co_filename.startswith(_OURS):
            is_ours = frame.f_code.co_name != "__torch_function__"
        elif not frame.f_code.co_filename.startswith(_TORCH):
            break
        frame = frame.f_back
    return None if is_ours else (frame.f_code.co_filename, frame.f_lineno)


def call_path() -> int:
    """Return a hash of the lines on the stack.

    The same in this process whenever a call is reached through the same lines.
    """
    lines: list[Any] = []
    for frame in _outward(sys._getframe(1)):
        lines += frame.f_code.co_filename, frame.f_lineno
    return hash(tuple(lines))


# -- what torch and other libraries do not pass ----------------------------------------------------


def is_called_by(func: Any) -> bool:
    """Return True if the caller was called by `func`, or by a comprehension in it."""
    frames = islice(_outward(sys._getframe(2)), 2)
    return func is not None and any(frame.f_code is func.__code__ for frame in frames)


def argument_of_caller(func: Any, name: str) -> Any:
    """Return an argument of the call that called the caller, None if that is not one of `func`."""
    frame = sys._getframe(2)
    return _variables(frame, (name,))[0] if frame.f_code is func.__code__ else None


def arguments_of_calls(func: Any, *names: str) -> Iterator[tuple[Any, ...]]:
    """Yield these arguments of each running call of a Python function, the innermost first."""
    for frame in _outward(sys._getframe(1)):
        if frame.f_code is func.__code__:
            yield _variables(frame, names)


def owners_of_methods() -> Iterator[Any]:
    """Yield the `self` of each method that is running, the innermost first."""
    for frame in _outward(sys._getframe(1)):
        if frame.f_code.co_argcount and frame.f_code.co_varnames[0] == "self":
            yield from _variables(frame, ("self",))


def _variables(frame: FrameType, names: tuple[str, ...]) -> tuple[Any, ...]:
    variables = frame.f_locals
    values = tuple(variables.get(name) for name in names)
    # Before Python 3.13 a copy that stays with the frame, and would keep its tensors alive.
    if type(variables) is dict:
        variables.clear()
    return values


# -- the call that is running ----------------------------------------------------------------------


class OperatorCall(NamedTuple):
    """An operator on sharded tensors.

    Attributes:
        name: as in `linear`.
        operands: their layouts, as text.
        advice: what to write so that the operator needs no communication.
    """

    name: str
    operands: str
    advice: str


class UserCall(NamedTuple):
    """One call in the user's program.

    Attributes:
        name: of the function that the program called; "backward" for collectives of the autograd
            engine.
        file, line: where it was called.
        operator: the operator, if the call was one; None for explicit communication such as
            `redistribute`.
    """

    name: str
    file: str
    line: int
    operator: OperatorCall | None

    @property
    def place(self) -> str:
        return f"{self.file}:{self.line}"


# What a call of a module runs in torch, which then calls shardmesh.
_MODULE_CALLS = (nn.Module.__call__.__code__, nn.Module._call_impl.__code__)
# Functions of shardmesh that run any operator, and how to describe that operator from the locals of
# their frame.
DESCRIBERS: dict[CodeType, Callable[[dict[str, Any]], OperatorCall | str]] = {}


def user_call() -> UserCall:
    """Return the call in the user's program that the caller is part of."""
    frame: FrameType = sys._getframe(1)
    outermost: FrameType | None = None  # which the program has called
    ours: FrameType | None = None  # the outermost frame of shardmesh
    dispatched: FrameType | None = None  # the outermost frame that runs an operator
    in_backward = False
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_INNER):
        if frame.f_code.co_filename.startswith(_OURS):
            ours, in_backward = frame, False
            dispatched = frame if frame.f_code in DESCRIBERS else dispatched
        elif frame.f_code.co_filename.startswith(_ENGINE):
            in_backward = True
        outermost, frame = frame, frame.f_back
    place = frame.f_code.co_filename, frame.f_lineno
    description = (
        DESCRIBERS[dispatched.f_code](dispatched.f_locals) if dispatched is not None else None
    )
    if isinstance(description, OperatorCall):
        return UserCall(description.name, *place, description)
    if outermost is not None and outermost.f_code in _MODULE_CALLS:
        name = "forward"
    else:
        name = frame.f_code.co_name if ours is None else ours.f_code.co_name
    return UserCall("backward" if in_backward else description or name, *place, None)
