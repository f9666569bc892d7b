"""The page that `make gpu-test` writes: device, versions, probes, tests, kernels, training
steps.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

from shardmesh.mesh.doctor.checks import findings
from shardmesh.mesh.doctor.facts import Facts
from tests.gpu.steps import Outcome, Step

_ROOT = Path(__file__).parents[2]
sys.path.append(str(_ROOT / "benchmarks"))
import report  # noqa: E402  # pyright: ignore[reportMissingImports]

_DRIVER = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]


def document(
    facts: Facts,
    probes: Sequence[Outcome],
    steps: Sequence[tuple[Step, Outcome]],
    minutes: float,
    command: str,
) -> str:
    """Return the page of what is known so far.

    Args:
        minutes: since the start.
        command: that made the page.
    """
    bad = [one.name for one in (*probes, *(outcome for _, outcome in steps)) if one.is_bad]
    parts = [
        f"# One GPU, {date.today().isoformat()}",
        f"`{command}`, {minutes:.1f} minutes. "
        + (f"Failed or stopped: {', '.join(bad)}." if bad else "Nothing failed."),
        report.markdown(("", "found"), versions(facts), numbers=False),
    ]
    if probes:
        rows = [(one.name, one.status, _cell(one.found)) for one in probes]
        parts += ["## Probes", report.markdown(("probe", "verdict", "found"), rows, numbers=False)]
    if steps:
        rows = [
            (one.name, one.status, f"{one.seconds:.0f}", _cell(one.found), f"`{step}`")
            for step, one in steps
        ]
        parts += [
            "## Steps",
            report.markdown(("step", "result", "seconds", "found", "command"), rows, numbers=False),
        ]
    for step, outcome in steps:
        if outcome.failures:
            parts += [
                f"### Failed: {step.name}",
                "\n".join(f"- `{line}`" for line in outcome.failures),
            ]
        if step.table is not None and step.table.exists():
            parts += [
                f"## {step.name[:1].upper()}{step.name[1:]}",
                _without_title(step.table.read_text()),
            ]
    return "\n\n".join([*parts, report.environment_line(report.environment())]) + "\n"


def versions(facts: Facts) -> list[tuple[str, str]]:
    """Return rows of names and versions, and what the doctor finds wrong."""
    have, devices = facts.software, facts.devices
    names = ", ".join(f"{one.name}, {one.memory / 2**30:.0f} GiB" for one in devices.usable)
    rows = {
        "device": names or f"none{devices.error and f': {devices.error}'}",
        "driver": _said(_DRIVER) or "none",
        "torch": f"{have.torch}, built for {devices.build or 'the CPU'}",
        "NCCL": devices.nccl or "none",
        "triton": have.triton or "none",
        "Python": have.python,
        "shardmesh": (
            f"{have.shardmesh}, commit "
            f"{_said(['git', 'rev-parse', '--short', 'HEAD']) or 'unknown'}"
        ),
    }
    checked = {name: findings(facts)[name] for name in ("devices", "torch", "triton")}
    wrong = [
        ("doctor", _cell(f"{name}: {one.facts}"))
        for name, one in checked.items()
        if one.status != "ok"
    ]
    return [*rows.items(), *wrong]


def _said(command: Sequence[str]) -> str:
    """Return the first line that a command prints; "" if there is none."""
    try:
        done: Any = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return next(iter(done.stdout.splitlines()), "") if done.returncode == 0 else ""


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _without_title(text: str) -> str:
    first, _, rest = text.strip().partition("\n")
    return rest.strip() if first.startswith("# ") else text.strip()
