"""torch's own schedules, made without processes, from stages that have only their numbers."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from torch import nn
from torch.distributed.pipelining import schedules


def torch_schedule(name: str, ranks: int, microbatches: int, stages_per_rank: int) -> Any:
    """Return a schedule object of torch; `pipeline_order` has the rows of all ranks."""
    stages = [
        SimpleNamespace(
            num_stages=ranks * stages_per_rank,
            group_size=ranks,
            group_rank=0,
            is_first=number == 0,
            is_last=number == ranks * stages_per_rank - 1,
            stage_index=number * ranks,
            submod=nn.Identity(),
            has_backward=True,
        )
        for number in range(stages_per_rank)
    ]
    kind = schedules.get_schedule_class(name)
    if issubclass(kind, schedules.PipelineScheduleSingle):
        return kind(stages[0], microbatches)
    return kind(stages, microbatches)


def torch_rows(name: str, ranks: int, microbatches: int, stages_per_rank: int) -> list[list[str]]:
    """Return the rows of one of torch's schedules as texts, without idle slots."""
    schedule = torch_schedule(name, ranks, microbatches, stages_per_rank)
    if isinstance(schedule, schedules.PipelineScheduleSingle):
        order = schedule._get_pipeline_order()
    else:
        order = schedule.pipeline_order
    assert order is not None
    return [texts(order[rank]) for rank in range(ranks)]


def texts(row: Sequence[Any]) -> list[str]:
    """Return the texts of torch's actions that compute."""
    return [str(action) for action in row if action is not None and action.is_compute_op]
