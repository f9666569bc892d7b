"""Each figure of docs/comparison.md names a script that is there."""

from __future__ import annotations

import re

from tests.docs.pages import DOCS


def test_each_measurement_names_its_script() -> None:
    _, measurements = (DOCS / "comparison.md").read_text().split("## Measurements")
    rows = [line for line in measurements.splitlines() if re.match(r"\|.*\d", line)]
    assert len(rows) >= 10
    for row in rows:
        script = re.search(r"`(benchmarks/\w+\.py)` \|$", row)
        assert script is not None, row
        assert (DOCS.parent / script[1]).exists(), row
