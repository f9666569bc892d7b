"""Output of the benchmarks: tables on the terminal, JSON and Markdown files."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch

Row = Sequence[str]
_WIDEST = 1000  # characters


def show(title: str, columns: Row, rows: Sequence[Row]) -> None:
    """Print a table, with rich if it is installed; the first column is text, the others are
    numbers.
    """
    try:
        from rich.console import Console
        from rich.markup import escape
        from rich.table import Table
    except ImportError:
        print(f"\n{title}\n\n{_plain(columns, rows)}", flush=True)
        return
    table = Table(title=title, title_justify="left", title_style="bold")
    for i, name in enumerate(columns):
        table.add_column(name, justify="right" if i else "left", no_wrap=True)
    for row in rows:
        table.add_row(*map(escape, row))
    console = Console()
    needed = console.measure(table, options=console.options.update(max_width=_WIDEST)).maximum
    # A narrow terminal wraps lines rather than dropping columns.
    console.width = max(console.width, needed)
    console.print(table, highlight=False)


def _plain(columns: Row, rows: Sequence[Row]) -> str:
    widths = [max(len(row[i]) for row in (columns, *rows)) for i in range(len(columns))]
    lines = []
    for row in (columns, ["-" * w for w in widths], *rows):
        cells = [
            text.ljust(w) if i == 0 else text.rjust(w)
            for i, (text, w) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def markdown(columns: Row, rows: Sequence[Row], numbers: bool = True) -> str:
    """Return the table as Markdown; all columns but the first are numbers, or text."""
    head = [
        "| " + " | ".join(columns) + " |",
        "|---" + ("|---:" if numbers else "|---") * (len(columns) - 1) + "|",
    ]
    return "\n".join(head + ["| " + " | ".join(row) + " |" for row in rows])


def environment() -> dict[str, Any]:
    """Return what the figures depend on: hardware, versions and load of the machine."""
    return {
        "date": date.today().isoformat(),
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def _cpu_model() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or platform.machine()
    models = [
        line.split(":", 1)[1].strip() for line in text.splitlines() if line.startswith("model name")
    ]
    return models[0] if models else platform.machine()


def environment_line(env: dict[str, Any]) -> str:
    """Return the environment as one line, for below a table."""
    return (
        f"{env['date']}, {env['cpu']} with {env['cores']} cores (load {env['load']} when it "
        f"ended), Python {env['python']}, torch {env['torch']}"
    )


def write_json(path: str | None, results: dict[str, Any]) -> None:
    """Write all figures as JSON, if a path is given."""
    if path is not None:
        Path(path).write_text(json.dumps(results, indent=1) + "\n")


def write_markdown(path: str | None, text: str) -> None:
    """Write the tables as a document, if a path is given."""
    if path is not None:
        Path(path).write_text(text.rstrip() + "\n")
