"""The result of a check."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warning", "fault"]


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check.

    Attributes:
        status: "fault": jobs fail, hang or are wrong; "warning": some do, or are slow.
        facts: what is so, with the numbers.
        fix: a command or setting; "" if all is well.
    """

    status: Status
    facts: str
    fix: str = ""


def ok(facts: str) -> Finding:
    return Finding("ok", facts)


def warning(facts: str, fix: str) -> Finding:
    return Finding("warning", facts, fix)


def fault(facts: str, fix: str) -> Finding:
    return Finding("fault", facts, fix)


def size_text(size: float) -> str:
    """size_text(64 * 2**20) -> "64 MiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.3g} TiB"
