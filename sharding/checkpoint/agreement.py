"""Agreement of ranks: either local work succeeded on all ranks, or all raise the same error."""

from __future__ import annotations

import errno
import hashlib
from collections.abc import Callable, Mapping
from typing import TypeVar

import torch

from ...mesh.comm.agreement import gather_facts, raise_failures, run_on_all
from ...mesh.comm.group import Group
from ...mesh.comm.null import NullWorld
from ...mesh.comm.world import World
from ...mesh.text import shortened

T = TypeVar("T")
_LONGEST_TEXT = 2000  # characters of what one rank reports to the others
_NO_MEMORY = (
    "can't allocate memory",
    "not enough memory",
    "Cannot allocate memory",
    "out of memory",
)


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or read; every rank raises it, with the same text."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that there was no memory, on the host or the device."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _NO_MEMORY)


def unless_out_of_memory(work: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """Return (result, None), or (None, error) if there was no memory for it.

    Other ranks, which had, must hear of it.

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
    return list(run_on_all(group, work, CheckpointError, _error_text).values())


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
    told = gather_facts(group, digest if failure is None else f"{what}: {_error_text(failure)}")
    texts = {rank: text if isinstance(text, str) else None for rank, text in told.items()}
    raise_failures(texts, CheckpointError, failure)
    if len(set(told.values())) > 1:
        everyone = gather_facts(group, list(lines.items()))
        raise CheckpointError(f"{what}: {_difference(everyone)}")


def _difference(everyone: dict[int, list[tuple[str, str]]]) -> str:
    (first_rank, first), *others = everyone.items()
    for rank, lines in others:
        for one, other in zip(first, lines, strict=False):
            if one != other:
                return (
                    f"rank {first_rank} has {one[0]!r}: {one[1]}, but rank {rank} has "
                    f"{other[0]!r}: {other[1]}; give the same on every rank"
                )
        if len(lines) != len(first):
            longer, more = (first_rank, first) if len(first) > len(lines) else (rank, lines)
            return (
                f"only rank {longer} has {more[min(len(first), len(lines))][0]!r}; give the same "
                "tree on every rank"
            )
    return "ranks differ"


def _error_text(error: Exception) -> str:
    if is_out_of_memory(error):
        told = shortened(error)
        return "out of memory" + ("" if told == type(error).__name__ else f" ({told})")
    if isinstance(error, CheckpointError | ValueError | TypeError):
        text = str(error)
        return text if len(text) <= _LONGEST_TEXT else text[: _LONGEST_TEXT - 3] + "..."
    where = (
        f": {error.filename}" if isinstance(error, OSError) and error.filename is not None else ""
    )
    return f"{type(error).__name__}: {shortened(error)}{where}"
