"""Run the programs of forms on this machine's devices, and time their steps."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from ...mesh.launch.local_processes import LaunchError, launch
from ...mesh.text import shortened

_TIMEOUT_S = 600.0  # of a form, with the start of its processes
_OUT_OF_MEMORY = ("OutOfMemoryError", "out of memory", "not enough memory", "can't allocate memory")


@dataclass(frozen=True)
class Measured:
    """How a program ran.

    Attributes:
        seconds: of a step, the median of the slowest rank; None if it did not run.
        peak: the most bytes that a rank's tensors took at one time; None on CPUs.
        error: why it did not run, in one line.
    """

    seconds: float | None
    peak: float | None = None
    error: str = ""


Launch = Callable[[Callable[..., Any], int, Sequence[Any]], list[Any]]


def measure_program(
    text: str, devices: int, *, device: str, steps: int, launcher: Launch | None = None
) -> Measured:
    """Run a printed program in one process for each device of this machine.

    Args:
        text: the program, one of `program_text`.
        devices: the number of processes.
        device: "cuda", or "cpu" for processes that communicate by gloo.
        steps: how many steps are timed, after one that is not.
        launcher: in place of `launch`, for tests.

    Returns:
        Its time and memory; if it ran out of memory, or raised, why.

    Raises:
        ValueError: this machine has fewer devices.
    """
    present = torch.cuda.device_count() if device == "cuda" else devices
    if present < devices:
        raise ValueError(
            f"measure: the forms are for {devices} devices, and this machine has {present}; tune "
            'for those, or measure on device="cpu"'
        )
    run = launcher or _launch
    try:
        ranks = run(time_steps, devices, (text, device, steps, os.getcwd()))
    except LaunchError as error:
        return Measured(None, error=_reason(error))
    peaks = [peak for _, peak in ranks if peak is not None]
    return Measured(max(seconds for seconds, _ in ranks), max(peaks, default=None))


def _launch(function: Callable[..., Any], count: int, args: Sequence[Any]) -> list[Any]:
    return launch(function, count, args, timeout=_TIMEOUT_S)


def _reason(error: LaunchError) -> str:
    """Return why the ranks ended. Linux kills a process if the machine has no memory left."""
    text = f"{error} {error.traceback}"
    if error.signal == signal.SIGKILL or any(words in text for words in _OUT_OF_MEMORY):
        return "out of memory"
    last = error.traceback.strip().splitlines()[-1:] or [str(error)]
    return f"rank {error.rank} failed: {shortened(last[0])}"


def time_steps(text: str, device: str, steps: int, folder: str) -> tuple[float, float | None]:
    """Run a program as one rank; return the median seconds of a step, and the peak of memory."""
    if folder not in sys.path:
        sys.path.insert(0, folder)  # where the program's modules are
    names: dict[str, Any] = {"__name__": "train"}
    exec(compile(text, "train.py", "exec"), names)
    rows_of = names["rows_of"]
    starts: list[float] = []

    def now() -> float:
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def timed(step: int, mesh: Any) -> Any:
        starts.append(now())
        return rows_of(step, mesh)

    names["rows_of"] = timed
    names["main"](device=device, steps=steps + 1)
    ends = [*starts[2:], now()]
    seconds = [end - start for start, end in zip(starts[1:], ends, strict=True)]
    peak = float(torch.cuda.max_memory_allocated()) if device == "cuda" else None
    return median(seconds), peak
