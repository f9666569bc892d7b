"""`make_schedule`: a schedule of the literature by its name."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from .actions import Rows
from .makers import (
    dualpipe_v,
    gpipe,
    interleaved,
    looped_bfs,
    one_f_one_b,
    v_half,
    v_min,
    zb_h1,
    zb_v,
)
from .schedule import Schedule

Maker: TypeAlias = Callable[[int, int], Rows]

# name: stages of each rank, and the function
_FIXED: dict[str, tuple[int, Maker]] = {
    "gpipe": (1, gpipe),
    "1f1b": (1, one_f_one_b),
    "zb_v": (2, zb_v),
    "v_half": (2, v_half),
    "v_min": (2, v_min),
    "dualpipe_v": (2, dualpipe_v),
}
# name: stages of each rank by default, and the function of a number of them
_ANY_STAGES: dict[str, tuple[int, Callable[..., Rows]]] = {
    "interleaved": (2, interleaved),
    "looped_bfs": (2, looped_bfs),
    "zb_h1": (1, zb_h1),
}
# torch.distributed.pipelining's name: ours, and the least number of stages per rank that it means
_TORCH_NAMES = {
    "GPipe": ("gpipe", 1),
    "1F1B": ("1f1b", 1),
    "Interleaved1F1B": ("interleaved", 2),
    "LoopedBFS": ("looped_bfs", 2),
    "InterleavedZeroBubble": ("zb_h1", 2),
    "ZBVZeroBubble": ("zb_v", 2),
    "DualPipeV": ("dualpipe_v", 2),
}
SCHEDULE_NAMES = (
    "gpipe",
    "1f1b",
    "interleaved",
    "looped_bfs",
    "zb_h1",
    "zb_v",
    "v_half",
    "v_min",
    "dualpipe_v",
)


def make_schedule(
    name: str, ranks: int, microbatches: int, *, stages_per_rank: int | None = None
) -> Schedule:
    """make_schedule(name, ranks, microbatches) -> Schedule: a pipeline schedule by its name.

    | name | stages per rank | bubble at F = I = W = 1 of a stage, and its domain |
    |---|---|---|
    | "gpipe" | 1 | 3(p - 1) |
    | "1f1b" | 1 | 3(p - 1) |
    | "interleaved" | v, by default 2 | 3(p - 1) of smaller stages; m a multiple of p |
    | "looped_bfs" | v, by default 2 | 3(p - 1) of smaller stages; m >= p |
    | "zb_h1" | v, by default 1 | p - 1; m >= p, and a multiple of p if v > 1 |
    | "zb_v" | 2 | p - 1 for m >= p; 0 by span for m >= 2p - 1 |
    | "v_half" | 2 | 3p - 4 or 3p - 5; m >= p |
    | "v_min" | 2 | 4p - 5; m >= p |
    | "dualpipe_v" | 2 | 2(p - 1) without gain from overlap; m >= 2p |

    The formulas for any costs and for live activations, with their sources, are in
    `sharding/parallel/pipeline/makers.py`. Names of torch.distributed.pipelining, such as
    "Schedule1F1B" or "ZBVZeroBubble", are accepted; case does not matter.

    Args:
        name: one of these names.
        ranks: p, the number of ranks along the pipeline's axis.
        microbatches: m, the number of microbatches in a step.
        stages_per_rank: v, for schedules that take any number of stages.

    Raises:
        ValueError: an unknown name, or numbers that the schedule does not take; the text says
            which it takes.

    Communication: none.

    Example:
        >>> print(make_schedule("1f1b", 3, 4))
        1f1b: 3 ranks, 3 stages, 4 microbatches
        makespan 18, bubble 6 (33.3%), 6 by span; live microbatches: 3, 2, 1
        rank 0  F0 F1 F2 .  .  .  .  B0--- F3 B1--- .  B2--- .  B3---
        rank 1  .  F0 F1 .  .  B0--- F2 B1--- F3 B2--- .  B3--- .  .
        rank 2  .  .  F0 B0--- F1 B1--- F2 B2--- F3 B3--- .  .  .  .
    """
    known, stages_of_name = _resolve(name)
    for argument, value in (
        ("ranks", ranks),
        ("microbatches", microbatches),
        ("stages_per_rank", 1 if stages_per_rank is None else stages_per_rank),
    ):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{argument}={value!r}: a schedule takes a whole number from 1")
    if known in _ANY_STAGES:
        default, make = _ANY_STAGES[known]
        return Schedule(
            make(ranks, microbatches, stages_per_rank or max(default, stages_of_name)), name=known
        )
    stages, make = _FIXED[known]
    if stages_per_rank not in (None, stages):
        raise ValueError(
            f"stages_per_rank={stages_per_rank}: {known} has {stages} on each rank; "
            f"{', '.join(_ANY_STAGES)} take any number"
        )
    return Schedule(make(ranks, microbatches), name=known)


def stages_per_rank_of(name: str, ranks: int, stages: int | None) -> int | None:
    """Return `stages_per_rank` for a number of stages, if the schedule takes any number of them.

    Args:
        stages: None if it is not known.

    Raises:
        ValueError: an unknown name; stages that the ranks cannot share evenly.
    """
    known, _ = _resolve(name)
    if stages is None or known not in _ANY_STAGES:
        return None
    if stages % ranks:
        raise ValueError(f"{known}: {stages} stages cannot be shared evenly by {ranks} ranks")
    return stages // ranks


def _resolve(name: str) -> tuple[str, int]:
    """Return our name for a schedule, and how many stages per rank the name stands for."""
    text = name.lower() if isinstance(name, str) else ""
    if text in SCHEDULE_NAMES:
        return text, 1
    for torch_name, meaning in _TORCH_NAMES.items():
        if text.removeprefix("schedule") == torch_name.lower():
            return meaning
    raise ValueError(
        f"unknown schedule {name!r}: the names are {', '.join(SCHEDULE_NAMES)}, and torch's "
        f"{', '.join(_TORCH_NAMES)}"
    )
