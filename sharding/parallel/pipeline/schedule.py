"""`Schedule`: a table that says what each rank of a pipeline does, in which order."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

from ....mesh.figure import MOST_BARS, Pictured
from .actions import (
    Action,
    Cell,
    Communication,
    Overlap,
    Rows,
    actions_in,
    parse_cell,
    stages_of,
)
from .communication import check_communication, with_communication
from .simulation import Cost, Costs, GatherPer, GradientCheck, simulate
from .timeline import Timeline
from .torch_csv import read_rows, table_of_actions, table_with_communication

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, init=False)
class Schedule(Pictured):
    """Schedule(rows) -> Schedule: what each rank of a pipeline does, in which order.

    Row r is what rank r runs, from left to right: forward (F), backward (B), or the two parts of a
    backward, for inputs (I) and for weights (W), of a stage and a microbatch. A slot is a place in
    a row. When an action runs follows from the order and from the results that it uses, so idle
    slots are not stored, nor are sends and receives. `print` draws the chart at equal costs of F, I
    and W. `make_schedule` makes the schedules of the literature.

    Args:
        rows: for each rank its actions, as texts such as "0F0", an overlapped pair as
            "(0F1;3B0)OVERLAP_F_B"; empty texts and None are left out.
        name: for the chart; it makes no difference to equality.

    Attributes:
        rows: the table, as tuples of actions.
        name: the name.

    Raises:
        ValueError: a text is no action, or there is none at all.

    Communication: none, as for all methods.

    Example:
        >>> schedule = Schedule([["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]])
        >>> print(schedule)
        schedule: 2 ranks, 2 stages, 2 microbatches
        makespan 9, bubble 3 (33.3%), 3 by span; live microbatches: 2, 1
        rank 0  F0 F1 .  .  B0--- .  B1---
        rank 1  .  F0 B0--- F1 B1--- .  .
    """

    rows: Rows
    name: str = field(default="schedule", compare=False)

    def __init__(
        self, rows: Iterable[Iterable[str | Cell | None]], *, name: str = "schedule"
    ) -> None:
        table: list[tuple[Cell, ...]] = []
        for rank, row in enumerate(rows):
            cells = [_cell(cell, rank, slot) for slot, cell in enumerate(row)]
            table.append(tuple(cell for cell in cells if cell is not None))
        if not any(table):
            raise ValueError("the schedule has no actions: give a row for each rank")
        object.__setattr__(self, "rows", tuple(table))
        object.__setattr__(self, "name", name)

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return len(self.rows)

    @property
    def stages(self) -> int:
        """The number of stages."""
        return 1 + max(action.stage for row in self.rows for action in actions_in(row))

    @property
    def microbatches(self) -> int:
        """The number of microbatches."""
        return 1 + max(action.microbatch for row in self.rows for action in actions_in(row))

    @property
    def placement(self) -> tuple[int, ...]:
        """The rank of each stage, such as (0, 1, 1, 0) in a V.

        Raises:
            ValueError: a stage is on no rank.
        """
        rank_of = stages_of(self.rows)
        if len(rank_of) < self.stages:
            missing = next(stage for stage in range(self.stages) if stage not in rank_of)
            raise ValueError(
                f"stage {missing} of {self.stages} is on no rank: number stages from 0"
            )
        return tuple(rank_of[stage] for stage in range(self.stages))

    def check(self, *, max_live_microbatches: float | None = None) -> Timeline:
        """Prove that the schedule does the whole work once and runs to the end.

        Every stage is on one rank and runs each microbatch forward and backward once; operands are
        computed before they are used; sends and receives are matched and cannot deadlock, whatever
        a backend buffers, also if a send blocks until its receive is called.

        Args:
            max_live_microbatches: a limit to the activations that a rank holds, in microbatches:
                1 is what a microbatch needs in all stages of the rank.

        Returns:
            `simulate()`, at equal costs: bubble and live activations.

        Raises:
            ValueError: the first violation, with ranks and slots.

        Example:
            >>> Schedule([["0F0", "0B0", "0F0"]]).check()
            Traceback (most recent call last):
            ValueError: rank 0: 0F0 is in slots 0 and 2
        """
        check_communication(with_communication(self.rows))
        timeline = self.simulate()
        if max_live_microbatches is not None:
            for rank, live in enumerate(timeline.live_microbatches):
                if live > max_live_microbatches:
                    raise ValueError(
                        f"rank {rank} holds the activations of {live:g} microbatches at one time, "
                        f"more than {max_live_microbatches:g}"
                    )
        return timeline

    def simulate(
        self,
        *,
        forward: Cost = 1,
        backward_input: Cost = 1,
        backward_weight: Cost = 1,
        backward: Cost | None = None,
        overlap: float = 1,
        latency: float = 0,
        optimizer: float = 0,
        gather: Cost = 0,
        reduce: Cost = 0,
        gather_per: GatherPer = "microbatch",
        steps: int = 1,
        gradient_check: GradientCheck = "after",
    ) -> Timeline:
        """Return when each action starts and ends, given what it costs, in any unit of time.

        Args:
            forward: cost of a forward of one stage for one microbatch; or one value per stage.
            backward_input: of a backward for inputs; or one value per stage.
            backward_weight: of a backward for weights; or one value per stage.
            backward: of a whole backward; by default the sum of its two parts.
            overlap: cost of a forward and a backward that are executed together, as a fraction of
                the sum of both.
            latency: from the end of an action to the arrival of its result on another rank.
            optimizer: cost of the optimizer's step, on each rank.
            gather: of gathering the parameters of a stage, if `fully_shard` shards them; or one
                value per stage. As far as no computation hides it.
            reduce: of reducing the gradients of a stage, likewise.
            gather_per: how often this is done, as `gather` of `pipeline`: before each forward and
                backward, and after each backward for weights; or once a "step", before the first
                forward of a stage and after its last backward.
            steps: number of training steps, one after the other.
            gradient_check: when gradients are clipped by their norm or checked for infinities,
                which takes a sum over all stages. "before": before the optimizer's step, which
                then starts on all ranks, one `latency` after the last one has its gradients. This
                ends the zero bubble. "after": each rank steps when it has its own gradients, and a
                step that turns out wrong is rolled back while the next one runs (Qi et al. 2023,
                arXiv 2401.10241, section 4); also right for no check at all.

        Raises:
            ValueError: the schedule is not valid (see `check`), or a cost is negative.

        Example:
            >>> Schedule([["0F0", "0B0"], ["1F0", "1B0"]]).simulate(latency=0.5).makespan
            7.0
        """
        costs = Costs(
            forward=forward,
            backward_input=backward_input,
            backward_weight=backward_weight,
            backward=backward,
            overlap=overlap,
            latency=latency,
            optimizer=optimizer,
            gather=gather,
            reduce=reduce,
        )
        return simulate(self.rows, costs, steps, gradient_check, gather_per)

    def picture(self, path: str | PathLike[str] | None = None) -> Figure:
        """Return the chart at equal costs as a `matplotlib.figure.Figure`; see `Timeline.picture`.

        Args:
            path: a file to write as well: .png, .svg, .pdf or another format of matplotlib.

        Raises:
            ImportError: matplotlib is not installed.
            ValueError: the schedule is not valid, or a file format that matplotlib does not know.
        """
        return self.simulate().picture(path, title=self._heading())

    def to_csv(self, path: str | PathLike[str], *, communication: bool = False) -> None:
        """Write the table as torch.distributed.pipelining reads it.

        Args:
            path: the file.
            communication: write the format "compute_comms", with sends and receives in the order in
                which each rank may call them without deadlock; by default "compute_only".

        Raises:
            ValueError: communication is asked for and the schedule is not valid.
        """
        rows = table_with_communication(self.rows) if communication else table_of_actions(self.rows)
        with open(path, "w", newline="") as file:
            csv.writer(file).writerows(rows)

    @staticmethod
    def from_csv(
        path: str | PathLike[str], *, name: str | None = None, ignore_communication: bool = False
    ) -> Schedule:
        """Read a table in either format of torch.distributed.pipelining.

        Sends and receives of the file are checked: they must be matched, fit the actions, and not
        deadlock without buffers. They are no part of the result.

        Args:
            path: the file.
            name: the name; by default that of the file.
            ignore_communication: leave sends and receives out unchecked, such as those that torch
                wrote with `defer_pp_recv=True`, which rely on sends that do not block.

        Raises:
            ValueError: a cell is no action, or the communication is wrong; the text is the first
                violation.
        """
        with open(path, newline="") as file:
            rows = read_rows(file, ignore_communication)
        return Schedule(rows, name=Path(path).stem if name is None else name)

    def _notebook_text(self) -> str | None:
        """Return no text, since the picture has the same rows."""
        return "" if sum(map(len, self.rows)) <= MOST_BARS else None

    def __str__(self) -> str:
        try:
            timeline = self.simulate()
        except ValueError as error:
            rows = [f"rank {rank}  {' '.join(map(str, row))}" for rank, row in enumerate(self.rows)]
            return "\n".join([self._heading(), *rows, f"not valid: {error}"])
        return f"{self._heading()}\n{timeline}"

    def __repr__(self) -> str:
        return f"Schedule({self._heading()})"

    def _heading(self) -> str:
        return (
            f"{self.name}: {self.ranks} ranks, {self.stages} stages, "
            f"{self.microbatches} microbatches"
        )


def _cell(cell: str | Cell | None, rank: int, slot: int) -> Cell | None:
    if cell is None or isinstance(cell, Action | Overlap):
        return cell
    where = f"rank {rank}, slot {slot}"
    if not isinstance(cell, str):
        raise TypeError(f"{where}: {cell!r} is no action; write a text such as '0F0'")
    try:
        item = parse_cell(cell)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    if isinstance(item, Communication):
        raise ValueError(
            f"{where}: {cell} is communication, which is no part of a schedule; read tables with "
            "it by Schedule.from_csv"
        )
    return item
