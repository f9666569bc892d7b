"""Agreement of ranks: either local work succeeded on all ranks, or all raise the same error."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import TypeVar

from ...mesh.comm.group import Group
from ...mesh.comm.null import NullWorld
from ...mesh.comm.world import World
from ...mesh.errors import WatchError

T = TypeVar("T")
_SHOWN = 3


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or read; every rank raises it, with the same text."""


def all_ranks(world: World) -> Group:
    """Return the group of all ranks of a world.

    Raises:
        ValueError: the world has no data.
    """
    if isinstance(world, NullWorld):
        raise ValueError("checkpoints need data, but null_world has none; save and load in processes or in sm.simulate")
    return world.group(range(world.size))


def run_on_all_ranks(group: Group, work: Callable[[], T]) -> list[T]:
    """Run `work()` on every rank; return the results of all ranks.

    Raises:
        CheckpointError: `work` raised on some rank; the same text on every rank.
        WatchError: unchanged, on the ranks where it is raised.

    Communication: one all_gather of small objects.
    """
    mine, failure = None, None
    try:
        mine = work()
    except WatchError:
        raise
    except Exception as error:
        failure = error
    gathered = group.all_gather_object((mine, None if failure is None else _error_text(failure)))
    problems = {rank: text for rank, (_, text) in zip(group.ranks, gathered, strict=True) if text is not None}
    if problems:
        raise CheckpointError(_merge_texts(problems, group.size)) from failure
    return [value for value, _ in gathered]


def agree(group: Group, what: str, lines: Mapping[str, str]) -> None:
    """Check that all ranks have the same lines, by name, in the same order.

    Raises:
        CheckpointError: on every rank: the first name that differs, on which ranks, and how.

    Communication: one all_gather of 32 bytes from each rank; after a difference one more, of the lines.
    """
    digest = hashlib.sha256("\n".join(f"{name}\t{line}" for name, line in lines.items()).encode()).digest()
    if len(set(group.all_gather_object(digest))) > 1:
        raise CheckpointError(f"{what}: {_difference(group, group.all_gather_object(list(lines.items())))}")


def _difference(group: Group, gathered: list[list[tuple[str, str]]]) -> str:
    first = gathered[0]
    for rank, lines in zip(group.ranks, gathered, strict=True):
        for one, other in zip(first, lines, strict=False):
            if one != other:
                has, other_has = f"rank {group.ranks[0]} has {one[0]!r}: {one[1]}", f"rank {rank} has {other[0]!r}: {other[1]}"
                return f"{has}, but {other_has}; give the same on every rank"
        if len(lines) != len(first):
            longer, more = (group.ranks[0], first) if len(first) > len(lines) else (rank, lines)
            return f"only rank {longer} has {more[min(len(first), len(lines))][0]!r}; give the same tree on every rank"
    return "ranks differ"


def _error_text(error: Exception) -> str:
    return str(error) if isinstance(error, CheckpointError | ValueError | TypeError) else f"{type(error).__name__}: {error}"


def _merge_texts(problems: dict[int, str], size: int) -> str:
    """Return each text once, with its ranks unless all ranks have it."""
    said: dict[str, list[int]] = {}
    for rank, text in problems.items():
        said.setdefault(text, []).append(rank)
    if len(said) == 1 and len(problems) == size:
        return next(iter(said))
    texts = [f"on rank {', '.join(map(str, ranks[:8]))}: {text}" for text, ranks in list(said.items())[:_SHOWN]]
    return "; ".join(texts) + (f"; and {len(said) - _SHOWN} more" if len(said) > _SHOWN else "")
