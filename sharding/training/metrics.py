"""`Metrics`: the numbers of a step, written on rank 0 to a file, TensorBoard or any callable."""

from __future__ import annotations

import importlib.util
import itertools
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ...mesh.comm.current_world import current_world
from ...mesh.figure import SERIES, drawn

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Writer = Callable[[int, Mapping[str, float]], object]


class Metrics:
    """Metrics(*writers): a callable that takes a step and its numbers, and writes them on rank 0.

        every rank   metrics(step, {"loss": loss})      rank 0   writer(step, {"loss": 2.31})

    Args:
        writers: `JsonLines`, `TensorBoard`, or any function of a step and a dict of floats, such as
            `lambda step, values: wandb.log(values, step=step)`. One with a method `close` is closed
            by `close`.

    Communication: none for numbers and plain tensors; for a `ShardedTensor` that of `item()`, which
        is why every rank calls it.

    Example:
        >>> metrics = sm.training.Metrics(sm.training.JsonLines("metrics.jsonl"))
        >>> for step in range(steps):
        ...     metrics(step, {"loss": train_step(), "lr": scheduler.get_last_lr()[0]})
        >>> metrics.close()
    """

    def __init__(self, *writers: Writer) -> None:
        self._writers = writers

    def __call__(self, step: int, scalars: Mapping[str, Any]) -> None:
        """Write the numbers of a step: numbers, or tensors with one element.

        Raises: ValueError on every rank, for a tensor with another number of elements.
        """
        for name, value in scalars.items():
            if isinstance(value, Tensor) and value.numel() != 1:
                raise ValueError(
                    f"Metrics: {name!r} of step {step} is a tensor of shape {list(value.shape)}; "
                    "pass a number, or a tensor with one element"
                )
        values = {
            name: float(value.item() if isinstance(value, Tensor) else value)
            for name, value in scalars.items()
        }
        if current_world().rank == 0:
            for writer in self._writers:
                writer(step, values)

    def close(self) -> None:
        """Close the writers."""
        for writer in self._writers:
            close = getattr(writer, "close", None)
            if close is not None:
                close()


class JsonLines:
    """JsonLines(path): a writer of a file with an object on each line, {"step": 3, "loss": 2.31}.

    If the file has lines of the first step or later ones, as after a restart from a checkpoint,
    these are removed: a step of the run is in it once. What is not finite is null.

    Args:
        path: the file; its folder is made if it is missing.

    Communication: none.

    Example:
        >>> write = sm.training.JsonLines("out/metrics.jsonl")
        >>> write(3, {"loss": 2.31})
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        self._has_begun = False

    def __call__(self, step: int, scalars: Mapping[str, float]) -> None:
        if not self._has_begun:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            if self._path.exists():
                _remove_steps(self._path, step)
            self._has_begun = True
        values = {name: x if math.isfinite(x) else None for name, x in scalars.items()}
        with open(self._path, "a") as file:
            file.write(json.dumps({"step": step, **values}) + "\n")

    @staticmethod
    def read(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
        """Return the lines of a file as dicts; a last line that was not finished is left out."""
        rows = []
        for line in Path(path).read_text().splitlines(keepends=True):
            if line.endswith("\n"):
                rows.append(json.loads(line))
        return rows

    @staticmethod
    def picture(
        path: str | os.PathLike[str],
        target: str | os.PathLike[str] | None = None,
        names: Sequence[str] = ("loss",),
    ) -> Figure:
        """Draw the curves of some numbers of a file over its steps, by matplotlib.

        A number that not every step has, such as an evaluation, has a mark at each of its steps.

        Args:
            path: the file.
            target: where to write the picture, in a format that its suffix says.
            names: the numbers, such as ("loss", "evaluation").

        Raises:
            ValueError: no line has one of the names.
            ImportError: matplotlib is not installed.
        """
        rows = JsonLines.read(path)
        curves = {
            name: [(row["step"], row[name]) for row in rows if row.get(name) is not None]
            for name in names
        }
        for name, points in curves.items():
            if not points:
                raise ValueError(f"JsonLines.picture: no line of {path} has a number {name!r}")

        def draw(figure_class: type[Figure]) -> Figure:
            figure = figure_class(figsize=(7, 4), layout="constrained")
            axes = figure.subplots()
            for color, (name, points) in zip(itertools.cycle(SERIES), curves.items(), strict=False):
                style = "-" if len(points) == len(rows) else "o--"
                axes.plot(*zip(*points, strict=True), style, color=color, label=name)
            axes.set(xlabel="step")
            axes.grid(alpha=0.3)
            axes.legend()
            return figure

        return drawn(draw, target)


class TensorBoard:
    """TensorBoard(folder): a writer of event files, by torch.utils.tensorboard.

    Args:
        folder: where `tensorboard --logdir` looks.

    Raises: ImportError on every rank, if tensorboard is not installed.

    Communication: none.

    Example:
        >>> metrics = sm.training.Metrics(sm.training.TensorBoard("out/tensorboard"))
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        if importlib.util.find_spec("tensorboard") is None:
            raise ImportError(
                "TensorBoard(...): tensorboard is not installed; pip install tensorboard, or write "
                "a file with JsonLines"
            )
        self._folder = os.fspath(folder)
        self._writer: Any = None

    def __call__(self, step: int, scalars: Mapping[str, float]) -> None:
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            # of a run that was resumed, later steps of the run before are hidden
            self._writer = SummaryWriter(self._folder, purge_step=step)
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def _remove_steps(path: Path, first: int) -> None:
    """Remove the lines of step `first` and later ones, and a line that was not finished."""
    rows = JsonLines.read(path)
    before = [row for row in rows if row["step"] < first]
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text("".join(json.dumps(row) + "\n" for row in before))
    os.replace(temporary, path)
