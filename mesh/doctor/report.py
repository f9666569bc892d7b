"""The doctor's report, as text and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..text import printable, table_lines
from ..topology import seconds_text
from .bandwidth import Bandwidth
from .findings import Finding

_VERSION = 1  # of the JSON; fields keep their name and meaning within a version
_SHOWN = {"ok": "ok", "warning": "warning", "fault": "FAULT"}


@dataclass(frozen=True)
class Report:
    """Report(subject, checks, bandwidth).

    Attributes:
        subject: what was examined, in words.
        checks: by name.
        bandwidth: of the axes that were measured.
    """

    subject: str
    checks: Mapping[str, Finding]
    bandwidth: Sequence[Bandwidth] = ()

    def count(self, status: str) -> int:
        return sum(finding.status == status for finding in self.checks.values())

    @property
    def exit_status(self) -> int:
        return 1 if self.count("fault") else 0

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain data, for JSON.

        {"version", "subject", "ok", "checks": [{"name", "status", "found", "fix"}], "bandwidth":
        [{"axis", "ranks", "op", "bytes", "seconds", "latency_s", "gigabytes_per_second"}]}
        """
        return {
            "version": _VERSION,
            "subject": self.subject,
            "ok": not self.exit_status,
            "checks": [
                {"name": n, "status": f.status, "found": f.facts, "fix": f.fix}
                for n, f in self.checks.items()
            ],
            "bandwidth": [_row(one) for one in self.bandwidth],
        }

    def to_json(self) -> str:
        return json.dumps(self.as_dict(), indent=2)

    def __str__(self) -> str:
        return "\n".join(
            (
                f"shardmesh doctor: {self.subject}",
                "",
                *self._checks(),
                *self._table(),
                "",
                self._summary(),
            )
        )

    def _checks(self) -> Iterator[str]:
        width = max(map(len, self.checks), default=0)
        for name, finding in self.checks.items():
            yield f"{_SHOWN[finding.status]:<8} {name:<{width}}  {printable(finding.facts)}"
            if finding.fix:
                yield f"{'':<8} {'':<{width}}  fix: {printable(finding.fix)}"

    def _table(self) -> list[str]:
        if not self.bandwidth:
            return []
        rows = [("axis", "ranks", "collective", "latency", "bandwidth into each rank")]
        rows += [
            (
                b.axis,
                str(b.ranks),
                b.op,
                seconds_text(b.latency),
                f"{b.gigabytes_per_second:.3g} GB/s",
            )
            for b in self.bandwidth
        ]
        return ["", *table_lines(rows, right=())]

    def _summary(self) -> str:
        faults, warnings = self.count("fault"), self.count("warning")
        return (
            f"{_count_text(faults, 'fault')}, {_count_text(warnings, 'warning')}, "
            f"{self.count('ok')} ok"
        )


def _row(one: Bandwidth) -> dict[str, Any]:
    return {
        "axis": one.axis,
        "ranks": one.ranks,
        "op": one.op,
        "bytes": one.bytes,
        "seconds": one.seconds,
        "latency_s": one.latency,
        "gigabytes_per_second": one.gigabytes_per_second,
    }


def _count_text(count: int, what: str) -> str:
    return f"{count or 'no'} {what}{'' if count == 1 else 's'}"
