"""What a change of the number of ranks does to the batch, and what learning rate goes with it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ...mesh.context import given_or_current
from ...mesh.device_mesh import DeviceMesh
from ...mesh.text import table_lines
from .sampler import data_axes


@dataclass(frozen=True)
class BatchReport:
    """How many samples an update is made of; prints as a table.

    Attributes:
        per_rank: samples that a rank has at a time.
        ranks: how many ranks have different samples.
        accumulation: micro-batches for an update.
        lr: the learning rate that goes with it; None where none was said.
        before: the same, of the run that is compared with.
    """

    per_rank: int
    ranks: int
    accumulation: int = 1
    lr: float | None = None
    before: BatchReport | None = None

    @property
    def effective(self) -> int:
        """Samples for an update."""
        return self.per_rank * self.ranks * self.accumulation

    @property
    def ratio(self) -> float:
        """The effective batch relative to the one before; 1 where there was none."""
        return 1.0 if self.before is None else self.effective / self.before.effective

    @property
    def linear_lr(self) -> float | None:
        """The learning rate before times `ratio`, as for SGD: Goyal et al. 2017, arXiv:1706.02677."""
        return self._scaled(self.ratio)

    @property
    def sqrt_lr(self) -> float | None:
        """The learning rate before times the square root of `ratio`, as for Adam: Malladi et al. 2022, arXiv:2205.10287."""
        return self._scaled(math.sqrt(self.ratio))

    @property
    def same_accumulation(self) -> int | None:
        """How many micro-batches make the effective batch the same as before; None where no number does."""
        if self.before is None:
            return self.accumulation
        found, rest = divmod(self.before.effective, self.per_rank * self.ranks)
        return None if rest or not found else found

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint: numbers only, without what was before. `batch_report(before=...)` takes it."""
        return {name: value for name, value in asdict(self).items() if name != "before"}

    def __str__(self) -> str:
        names = ("per_rank", "ranks", "accumulation", "effective", "lr")
        rows = [("", "before", "now"), *(_row(name, self.before, self) for name in names)]
        if self.before is not None:
            rows.append(("for the same batch: accumulation", "", _text(self.same_accumulation)))
            if self.before.lr is not None:
                rows += [("lr, scaled linearly", "", _text(self.linear_lr)), ("lr, by the square root", "", _text(self.sqrt_lr))]
        return "\n".join(table_lines(rows, right=(1, 2)))

    def _scaled(self, factor: float) -> float | None:
        known = self.lr if self.before is None else self.before.lr
        return None if known is None else known * factor


def batch_report(
    per_rank: int,
    mesh: DeviceMesh | None = None,
    axes: str | Sequence[str] | None = None,
    accumulation: int = 1,
    *,
    lr: float | None = None,
    before: BatchReport | Mapping[str, Any] | None = None,
) -> BatchReport:
    """batch_report(per_rank, mesh, axes) -> how many samples an update has, and what lr goes with that when it has changed.

                                          before        now
        per_rank                               8          8
        ranks                                 16          4
        accumulation                           1          2
        effective                            128         64
        lr                                0.0003          -
        for the same batch: accumulation                  4
        lr, scaled linearly                         0.00015
        lr, by the square root                    0.0002121

    Args:
        per_rank: samples that a rank has at a time.
        mesh: the mesh, by default that of `with mesh:` or `set_mesh`.
        axes: along which ranks have different samples; may be left out where the mesh has one axis.
        accumulation: micro-batches for an update.
        lr: the learning rate that goes with it, for a later report to scale.
        before: the report of the run that is gone on with, or its `state_dict()`.

    Raises:
        ValueError: on every rank, a number of samples or micro-batches below 1.
        MeshError: on every rank, unknown axes, or none where the mesh has several.

    Communication: none.

    Example:
        >>> report = sm.batch_report(8, mesh, "dp", accumulation=2, before=checkpoint["batch"])
        >>> print(report)
    """
    if per_rank < 1 or accumulation < 1:
        raise ValueError(f"batch_report(per_rank={per_rank}, accumulation={accumulation}): both are at least 1")
    mesh = given_or_current(mesh)
    ranks = mesh.size(data_axes("batch_report", mesh, axes))
    earlier = BatchReport(**before) if isinstance(before, Mapping) else before
    return BatchReport(per_rank, ranks, accumulation, lr, earlier)


def _row(name: str, before: BatchReport | None, now: BatchReport) -> tuple[str, str, str]:
    return name, "" if before is None else _text(getattr(before, name)), _text(getattr(now, name))


def _text(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
