"""What threads of a process see of its job's verdict."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from shardmesh.mesh.monitor.job import Job

VERDICT: Any = SimpleNamespace(kind="lost")


class Watched(Job):
    """A job that another thread looks at whenever an attribute has been set."""

    def __init__(self) -> None:
        self.seen: list[int] = []
        self.failed_at = 0
        self._verdict = None
        self.alarm = [1]  # type: ignore[assignment]
        self.directory = SimpleNamespace(  # type: ignore[assignment]
            verdict=lambda: VERDICT, post=lambda verdict: verdict
        )

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        if getattr(self, "_verdict", None) is not None:
            self.seen.append(self.failed_at)


@pytest.mark.parametrize("learn", [Job.standing, lambda job: job.fail(VERDICT)])
def test_the_time_of_a_verdict_is_there_when_the_verdict_is(learn: Callable[[Job], Any]):
    """A watchdog that takes it for zero ends a healthy process at once."""
    job = Watched()
    assert learn(job) is VERDICT
    assert job.seen
    assert all(job.seen)
