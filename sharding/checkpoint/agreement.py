"""Agreement of ranks: either local work succeeded on all ranks, or all raise the same error."""

from __future__ import annotations

import errno
import hashlib
import reprlib
import sys
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

from ...mesh.comm.group import Group
from ...mesh.comm.null import NullWorld
from ...mesh.comm.world import World
from ...mesh.errors import WatchError

T = TypeVar("T")
_SHOWN = 3
# Characters of a description: what a file has must not come back as the text of an error.
_BRIEF = 200
_LONGEST_TEXT = 2000  # characters of what one rank reports to the others
_NO_MEMORY = (
    "can't allocate memory",
    "not enough memory",
    "Cannot allocate memory",
    "out of memory",
)
_short = reprlib.Repr()
_short.maxstring = _short.maxother = _short.maxlong = 80


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or read; every rank raises it, with the same text."""


def brief(value: Any) -> str:
    """Return a text or error as it is, others by `repr`: one line of at most 200 characters."""
    if isinstance(value, BaseException):
        value = getattr(value, "strerror", None) or str(value) or type(value).__name__
    text = value if isinstance(value, str) else _short.repr(value)
    text = " ".join(text[: 4 * _BRIEF].split())
    text = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
    return text if len(text) <= _BRIEF else text[: _BRIEF - 3] + "..."


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that there was no memory, on the host or the device."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _NO_MEMORY)


def interrupt_of(error: BaseException, before: BaseException | None) -> BaseException | None:
    """Return the first error that is no `Exception`, or says "no memory", which `error` replaced.

    Args:
        before: the error that was being handled when the work began; it is not of this work.
    """
    seen: set[int] = set()
    at = error.__cause__ or error.__context__
    while at is not None and at is not before and id(at) not in seen:
        if not isinstance(at, Exception) or isinstance(at, MemoryError):
            return at
        seen.add(id(at))
        at = at.__cause__ or at.__context__
    return None


def attempt(work: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """Return (result, None), or (None, error) if there was no memory for it: other ranks, which
    had, must hear of it.

    Raises:
        Exception: any other error, which is the same on every rank.
    """
    try:
        return work(), None
    except Exception as error:
        if is_out_of_memory(error):
            return None, error
        raise


def all_ranks(world: World) -> Group:
    """Return the group of all ranks of a world.

    Raises:
        ValueError: the world has no data.
    """
    if isinstance(world, NullWorld):
        raise ValueError(
            "checkpoints need data, but null_world has none; save and load in processes or in "
            "sm.simulate"
        )
    return world.group(range(world.size))


def run_on_all_ranks(group: Group, work: Callable[[], T]) -> list[T]:
    """Run `work()` on every rank; return the results of all ranks.

    Raises:
        CheckpointError: `work` raised on some rank; the same text on every rank.
        WatchError, KeyboardInterrupt, SystemExit: unchanged, on the ranks where it is raised.

    Communication: one all_gather of small objects.
    """
    mine, failure, before = None, None, sys.exc_info()[1]
    try:
        mine = work()
    except WatchError:
        raise
    except Exception as error:
        interrupt = interrupt_of(error, before)
        if interrupt is not None and not isinstance(interrupt, Exception):
            raise interrupt from None
        failure = interrupt or error
    gathered = group.all_gather_object((mine, None if failure is None else _error_text(failure)))
    problems = {
        rank: text
        for rank, (_, text) in zip(group.ranks, gathered, strict=True)
        if text is not None
    }
    if problems:
        raise CheckpointError(_merge_texts(problems, group.size)) from failure
    return [value for value, _ in gathered]


def agree(
    group: Group, what: str, lines: Mapping[str, str], failure: Exception | None = None
) -> None:
    """Check that all ranks have the same lines, by name, in the same order.

    Args:
        failure: an error of this rank before it had its lines, for the others.

    Raises:
        CheckpointError: on every rank: the first name that differs, on which ranks, and how; or the
            failures.

    Communication: one all_gather of 32 bytes from each rank; after a difference one more, of the
    lines.
    """
    digest = hashlib.sha256(
        "\n".join(f"{name}\t{line}" for name, line in lines.items()).encode()
    ).digest()
    gathered = group.all_gather_object(
        digest if failure is None else f"{what}: {_error_text(failure)}"
    )
    problems = {
        rank: text
        for rank, text in zip(group.ranks, gathered, strict=True)
        if isinstance(text, str)
    }
    if problems:
        raise CheckpointError(_merge_texts(problems, group.size)) from failure
    if len(set(gathered)) > 1:
        raise CheckpointError(
            f"{what}: {_difference(group, group.all_gather_object(list(lines.items())))}"
        )


def _difference(group: Group, gathered: list[list[tuple[str, str]]]) -> str:
    first = gathered[0]
    for rank, lines in zip(group.ranks, gathered, strict=True):
        for one, other in zip(first, lines, strict=False):
            if one != other:
                has, other_has = (
                    f"rank {group.ranks[0]} has {one[0]!r}: {one[1]}",
                    f"rank {rank} has {other[0]!r}: {other[1]}",
                )
                return f"{has}, but {other_has}; give the same on every rank"
        if len(lines) != len(first):
            longer, more = (group.ranks[0], first) if len(first) > len(lines) else (rank, lines)
            return (
                f"only rank {longer} has {more[min(len(first), len(lines))][0]!r}; give the same "
                "tree on every rank"
            )
    return "ranks differ"


def _error_text(error: Exception) -> str:
    if is_out_of_memory(error):
        told = brief(error)
        return "out of memory" + ("" if told == type(error).__name__ else f" ({told})")
    if isinstance(error, CheckpointError | ValueError | TypeError):
        text = str(error)
        return text if len(text) <= _LONGEST_TEXT else text[: _LONGEST_TEXT - 3] + "..."
    where = (
        f": {error.filename}" if isinstance(error, OSError) and error.filename is not None else ""
    )
    return f"{type(error).__name__}: {brief(error)}{where}"


def _merge_texts(problems: dict[int, str], size: int) -> str:
    """Return each text once, with its ranks unless all ranks have it."""
    said: dict[str, list[int]] = {}
    for rank, text in problems.items():
        said.setdefault(text, []).append(rank)
    if len(said) == 1 and len(problems) == size:
        return next(iter(said))
    texts = [
        f"on rank {', '.join(map(str, ranks[:8]))}: {text}"
        for text, ranks in list(said.items())[:_SHOWN]
    ]
    return "; ".join(texts) + (f"; and {len(said) - _SHOWN} more" if len(said) > _SHOWN else "")
