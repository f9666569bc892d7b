"""Recorded exceptions from limits: compare them with what is measured, and write them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

RENEW = "python tests/structure/measure.py --write"
LINE = "# -- today's exceptions, "  # begins the line above the recorded values


def check_counts(
    measured: Mapping[str, int], recorded: Mapping[str, int], where: Callable[[str], str], slack: int = 0
) -> None:
    """Raise unless both are equal.

    Args:
        measured: by name, how far each offender is; what is within the goal is left out.
        recorded: the same, as it was.
        where: a sentence about an offender, to show where it is too much.
        slack: how much less than recorded a value may be, as long as it is outside the goal.

    Raises:
        AssertionError: a measured value is larger than the recorded one, or smaller by more than the slack.
    """
    worse = [name for name in measured if measured[name] > recorded.get(name, 0)]
    if worse:
        raise AssertionError("\n".join(where(name) for name in worse))
    better = [name for name, was in recorded.items() if measured.get(name, -slack) < was - slack]
    if better:
        lines = "\n".join(
            f"{name}: recorded {recorded[name]}, now {measured.get(name, 'within the goal')}" for name in better
        )
        raise AssertionError(f"better than recorded; lower the limits with `{RENEW}`:\n{lines}")


def check_groups(
    measured: Collection[tuple[str, ...]], recorded: Collection[tuple[str, ...]], where: Callable[[str], str]
) -> None:
    """Raise unless both are the same groups of names. A group that is a part of a recorded one is better, any other worse.

    Args:
        measured: the groups there are.
        recorded: the groups there were.
        where: a sentence about a name that is in no recorded group, or one of a group that two have become.
    """
    for group in measured:
        nearest = max(recorded, key=lambda known: len({*known} & {*group}), default=())
        if added := sorted({*group} - {*nearest}):
            raise AssertionError("\n".join(where(name) for name in added))
    if gone := [known for known in recorded if known not in measured]:
        lines = "\n".join(", ".join(known) for known in gone)
        raise AssertionError(f"no longer there in full; lower the limits with `{RENEW}`:\n{lines}")


def render(exceptions: Mapping[str, object]) -> str:
    """Return the exceptions as lines of Python: each name of `limits.py` with its value."""
    kinds = {int: "int", dict: "dict[str, int]", list: "list[tuple[str, ...]]"}
    return "\n".join(f"{name}: {kinds[type(value)]} = {_literal(value)}\n" for name, value in exceptions.items())


def write(limits: Path, exceptions: Mapping[str, object]) -> None:
    """Replace the exceptions in `limits.py`: all below the line that says so."""
    text = limits.read_text(encoding="utf-8")
    head, line, rest = text.partition(LINE)
    if not line:
        raise ValueError(f"{limits} has no line that begins with {LINE!r}")
    limits.write_text(f"{head}{line}{rest.partition(chr(10))[0]}\n{render(exceptions)}", encoding="utf-8")


def _literal(value: object) -> str:
    if isinstance(value, list):  # of tuples
        groups = [
            "    (\n" + "".join(f"        {json.dumps(name)},\n" for name in group) + "    ),\n" for group in value
        ]
        return "[\n" + "".join(groups) + "]" if groups else "[]"
    text = json.dumps(value, indent=4, ensure_ascii=False)
    return re.sub(r"(?<=[\d\"])\n", ",\n", text)  # a comma at the end of the last entry, too
