"""Commands with a limit: run, watch, stop, and say in one line what became of them."""

from __future__ import annotations

import json
import os
import queue
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

_ROOT = Path(__file__).parents[2]
_TO_END_S = 15.0  # after an interrupt, in which pytest prints its summary
_START_S = 120.0  # until the process of the probes has imported torch
_SUMMARY = re.compile(r"=* ?((?:\d+ \w+(?:, )?)+ in [\d.]+s.*?) ?=*$")
_MOST_FAILURES = 30


@dataclass(frozen=True)
class Step:
    """A command of the page.

    Attributes:
        limit: seconds after which it is stopped.
        table: a Markdown file that it writes.
        missing: why it cannot be run; "" if it can.
    """

    name: str
    command: Sequence[str]
    limit: float
    table: Path | None = None
    missing: str = ""
    env: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        hidden = {"--markdown", str(self.table)}
        return shlex.join(
            [
                "python" if word == sys.executable else word
                for word in self.command
                if word not in hidden
            ]
        )


@dataclass(frozen=True)
class Outcome:
    """What became of a step or a probe.

    Attributes:
        status: "ok", "failed", "stopped" at its limit, "skipped", "not run" (a probe without its
            device).
        found: in one line.
        failures: lines of pytest that name failed tests.
    """

    name: str
    status: str
    found: str
    seconds: float = 0.0
    failures: tuple[str, ...] = ()

    @property
    def is_bad(self) -> bool:
        return self.status in ("failed", "stopped")


class Process:
    """A child process in a session of its own, whose lines are shown and kept."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], shown: bool = True) -> None:
        self.lines: list[str] = []
        self.new_lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()  # None at the end
        self._process = subprocess.Popen(
            list(command),
            cwd=_ROOT,
            env=os.environ | dict(env),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, args=(shown,), daemon=True)
        self._reader.start()

    def _read(self, shown: bool) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as output:
            for line in output:
                if shown:
                    print(line, end="", flush=True)
                self.lines.append(line.rstrip())
                self.new_lines.put(line)
        self.new_lines.put(None)

    def wait(self, limit: float) -> int | None:
        """Return the exit status; None if it had to be stopped."""
        try:
            status = self._process.wait(limit)
            self._reader.join(1.0)  # a grandchild may hold the pipe
        except subprocess.TimeoutExpired:
            self.stop(signal.SIGINT)
            return None
        return status

    def stop(self, first: signal.Signals = signal.SIGKILL) -> None:
        """Send the signal to the process, and after a while kill it and its children."""
        for sent in (first, signal.SIGKILL):
            try:
                os.killpg(self._process.pid, sent)
                self._process.wait(_TO_END_S)
            except ProcessLookupError:
                return
            except subprocess.TimeoutExpired:
                continue
        self._reader.join(1.0)


def run(step: Step, left: float) -> Outcome:
    """Run a step for at most its limit and the seconds that are left of all."""
    if step.missing:
        return Outcome(step.name, "skipped", step.missing)
    limit = min(step.limit, left)
    if limit <= 0:
        return Outcome(step.name, "skipped", "no time was left")
    print(f"\n=== {step.name}: {step}", flush=True)
    start = time.monotonic()
    process = Process(step.command, step.env)
    status = process.wait(limit)
    seconds = time.monotonic() - start
    summary, failures = pytest_lines(process.lines)
    if status is None:
        return Outcome(
            step.name,
            "stopped",
            f"not done within {limit:.0f} s{summary and f': {summary}'}",
            seconds,
            failures,
        )
    if status:
        last = next((line for line in reversed(process.lines) if line.strip()), "no output")
        return Outcome(
            step.name, "failed", f"exit status {status}: {summary or last[:200]}", seconds, failures
        )
    return Outcome(step.name, "ok", summary, seconds, failures)


def pytest_lines(lines: Sequence[str]) -> tuple[str, tuple[str, ...]]:
    """Return pytest's last line and its lines for failed tests; empty for another program."""
    summary = next((match[1] for line in reversed(lines) if (match := _SUMMARY.match(line))), "")
    failures = [line[:200] for line in lines if line.startswith(("FAILED ", "ERROR "))]
    more = [f"and {len(failures) - _MOST_FAILURES} more"] if len(failures) > _MOST_FAILURES else []
    return summary, (*failures[:_MOST_FAILURES], *more)


def run_probes(command: Sequence[str], limits: Mapping[str, float], left: float) -> list[Outcome]:
    """Ask the probes, in one process until one fails, hangs or ends it, then in another.

    Args:
        command: takes the names of probes as further arguments, and prints lines as `probes.main`
            does.
        limits: seconds, by the probe's name.
        left: seconds for all.
    """
    outcomes: list[Outcome] = []
    end, names = time.monotonic() + left, list(limits)
    while len(outcomes) < len(names):
        rest = names[len(outcomes) :]
        if time.monotonic() >= end:
            outcomes += [Outcome(name, "skipped", "no time was left") for name in rest]
            break
        process = Process([*command, *rest], {}, shown=False)
        answered = _answers(process, limits, rest, end)
        process.stop()
        for outcome in answered:
            print(f"{outcome.status:<8} {outcome.name}: {outcome.found}", flush=True)
        outcomes += answered
    return outcomes


def _answers(
    process: Process, limits: Mapping[str, float], names: Sequence[str], end: float
) -> list[Outcome]:
    """Return the outcomes of one process; the last one may be that of a probe which has
    ended it.
    """
    outcomes: list[Outcome] = []
    asked, start = "", time.monotonic()
    while len(outcomes) < len(names):
        limit = limits[asked] if asked else _START_S
        try:
            line = process.new_lines.get(
                timeout=max(0.0, min(start + limit, end) - time.monotonic())
            )
        except queue.Empty:
            return [
                *outcomes,
                Outcome(
                    asked or names[len(outcomes)],
                    "stopped",
                    f"hangs: no answer within {time.monotonic() - start:.0f} s",
                ),
            ]
        if line is None:
            if asked or not outcomes:  # else the probe before has failed, and the process ended
                said = next(
                    (
                        text
                        for text in reversed(process.lines)
                        if text.strip() and not text.startswith("{")
                    ),
                    "no output",
                )
                return [
                    *outcomes,
                    Outcome(
                        asked or names[len(outcomes)], "failed", f"the process ended: {said[:200]}"
                    ),
                ]
            return outcomes
        try:
            told = json.loads(line)
        except ValueError:
            continue
        if not isinstance(told, dict) or "probe" not in told:
            continue
        if "status" in told:
            outcomes.append(
                Outcome(told["probe"], told["status"], told["found"], time.monotonic() - start)
            )
            asked = ""
        else:
            asked = told["probe"]
        start = time.monotonic()
    return outcomes
