"""`batch_report`: the effective batch size, and the learning rate after a change of ranks."""

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
    """The number of samples per update; prints as a table.

    Attributes:
        per_rank: samples per rank and microbatch.
        ranks: the number of ranks with different samples.
        accumulation: microbatches per update.
        lr: its learning rate; None if not given.
        before: the report of the earlier run.
    """

    per_rank: int
    ranks: int
    accumulation: int = 1
    lr: float | None = None
    before: BatchReport | None = None

    @property
    def effective(self) -> int:
        """Samples per update."""
        return self.per_rank * self.ranks * self.accumulation

    @property
    def ratio(self) -> float:
        """The effective batch relative to that of the earlier run; 1 if there is none."""
        return 1.0 if self.before is None else self.effective / self.before.effective

    @property
    def linear_lr(self) -> float | None:
        """The earlier learning rate times `ratio`, as for SGD.

        Goyal et al. 2017, arXiv:1706.02677.
        """
        return self._scaled_lr(self.ratio)

    @property
    def sqrt_lr(self) -> float | None:
        """The earlier learning rate times the square root of `ratio`, as for Adam.

        Malladi et al. 2022, arXiv:2205.10287.
        """
        return self._scaled_lr(math.sqrt(self.ratio))

    @property
    def same_accumulation(self) -> int | None:
        """The number of microbatches that gives the earlier effective batch, or None."""
        if self.before is None:
            return self.accumulation
        micro_batches, rest = divmod(self.before.effective, self.per_rank * self.ranks)
        return None if rest or not micro_batches else micro_batches

    def state_dict(self) -> dict[str, Any]:
        """Return the numbers for a checkpoint, for `batch_report(before=...)`; without `before`."""
        return {name: value for name, value in asdict(self).items() if name != "before"}

    def __str__(self) -> str:
        names = ("per_rank", "ranks", "accumulation", "effective", "lr")
        rows = [("", "before", "now")]
        for name in names:
            before = "" if self.before is None else _text(getattr(self.before, name))
            rows.append((name, before, _text(getattr(self, name))))
        if self.before is not None:
            rows.append(("for the same batch: accumulation", "", _text(self.same_accumulation)))
            if self.before.lr is not None:
                rows += [
                    ("lr, scaled linearly", "", _text(self.linear_lr)),
                    ("lr, by the square root", "", _text(self.sqrt_lr)),
                ]
        return "\n".join(table_lines(rows, right=(1, 2)))

    def _scaled_lr(self, factor: float) -> float | None:
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
    """batch_report(per_rank, mesh, axes) -> the samples per update, and scaled learning rates.

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
        per_rank: samples per rank and microbatch.
        mesh: the mesh, by default that of `with mesh:` or `set_mesh`.
        axes: the axes along which ranks have different samples; optional if the mesh has one axis.
        accumulation: microbatches per update.
        lr: the learning rate, for a later report to scale.
        before: the report of the resumed run, or its `state_dict()`.

    Raises:
        ValueError: on every rank, a number of samples or microbatches below 1.
        MeshError: on every rank, unknown axes, or none if the mesh has several.

    Communication: none.

    Example:
        >>> before = checkpoint["batch"]
        >>> report = sm.training.batch_report(8, mesh, "dp", accumulation=2, before=before)
        >>> print(report)
    """
    if per_rank < 1 or accumulation < 1:
        raise ValueError(
            f"batch_report(per_rank={per_rank}, accumulation={accumulation}): both must be at "
            "least 1"
        )
    mesh = given_or_current(mesh)
    ranks = mesh.size(data_axes("batch_report", mesh, axes))
    earlier = BatchReport(**before) if isinstance(before, Mapping) else before
    return BatchReport(per_rank, ranks, accumulation, lr, earlier)


def _text(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
