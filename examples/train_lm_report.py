"""What `train_lm.py` shows and writes: a progress bar, tables, metrics, a plot."""

from __future__ import annotations

import importlib.util
import itertools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np


@dataclass
class Row:
    """One printed step."""

    step: int
    loss: float
    valid_loss: float
    tokens_per_s: float


@dataclass
class Run:
    """What a training run leaves behind.

    Attributes:
        name: the mesh, or "one process".
        parameters: their number, of the whole model.
        rows: the printed steps.
        collectives: what one step communicates on rank 0: collective -> (calls, bytes received).
        seconds: duration of the training.
        sample: text that the trained model wrote.
    """

    name: str
    parameters: int
    rows: list[Row] = field(default_factory=list)
    collectives: dict[str, tuple[int, int]] = field(default_factory=dict)
    seconds: float = 0.0
    sample: str = ""


# -- while a run goes on -----------------------------------------------------------------------------------------------


@contextmanager
def progress_bar(name: str, steps: int, quiet: bool) -> Iterator[Callable[[], None]]:
    """Yields a function to call after each step. Drawn only on a terminal, with rich where that is installed."""
    if quiet or not sys.stdout.isatty():
        yield lambda: None
    elif importlib.util.find_spec("rich"):
        from rich.progress import Progress

        with Progress(transient=True) as bar:
            task = bar.add_task(name, total=steps)
            yield lambda: bar.advance(task)
    else:
        count = itertools.count(1)
        yield lambda: print(f"{name}: step {next(count)} of {steps}", end="\r", flush=True)


def header() -> str:
    return "  step      loss  validation    tokens/s"


def line(row: Row) -> str:
    return f"{row.step:6}  {row.loss:8.4f}  {row.valid_loss:10.4f}  {row.tokens_per_s:10,.0f}"


def ending(run: Run) -> str:
    """Time, communication, and the sample."""
    lines = [f"{run.name}: {run.seconds:.1f} s"]
    for name, (calls, received) in sorted(run.collectives.items()):
        lines.append(f"  each step {calls:4} x {name:14}  {received:12,} bytes received by rank 0")
    return "\n".join([*lines, f"\n--- a piece of validation text | continued by {run.name}\n{run.sample}\n---"])


# -- when all runs are done --------------------------------------------------------------------------------------------


def compare(run: Run, reference: Run, tolerance: float) -> float:
    """Print two runs' losses side by side; returns the largest relative difference, NaN if there is a NaN."""
    print(f"\n=== {run.name} against {reference.name}\n\n  step  {'loss':^21}  {'validation loss':^21}  difference")
    largest = 0.0
    for a, b in zip(run.rows, reference.rows, strict=True):
        pairs = np.array([(a.loss, b.loss), (a.valid_loss, b.valid_loss)])
        difference = float(np.max(abs(pairs[:, 0] - pairs[:, 1]) / abs(pairs[:, 1])))
        print(f"{a.step:6}  " + "  ".join(f"{x:10.6f} {y:10.6f}" for x, y in pairs) + f"  {difference:10.1e}")
        largest = float(np.maximum(largest, difference))
    print(f"\nlargest relative difference {largest:.1e}, allowed {tolerance:.0e}")
    return largest


def save_metrics(path: Path, options: dict[str, Any], runs: Sequence[Run], difference: float | None) -> None:
    metrics = {"options": options, "runs": [asdict(run) for run in runs], "largest_relative_difference": difference}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(metrics, indent=2, default=str) + "\n")
    print(f"metrics: {path}")


def save_plot(path: Path, runs: Sequence[Run]) -> None:
    """Losses over steps, where matplotlib is installed."""
    if not importlib.util.find_spec("matplotlib"):
        return
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for run, style in zip(runs, ("-", "o"), strict=False):
        steps, losses, valid_losses = zip(*((row.step, row.loss, row.valid_loss) for row in run.rows), strict=True)
        axes.plot(steps, losses, f"C0{style}", mfc="none", label=f"{run.name}: training")
        axes.plot(steps, valid_losses, f"C1{style}", mfc="none", label=f"{run.name}: validation")
    axes.set(xlabel="step", ylabel="loss, nats per byte")
    axes.legend()
    figure.savefig(path, dpi=120)
    print(f"plot:    {path}")
