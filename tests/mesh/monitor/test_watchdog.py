"""The watchdog's thread outlives errors of its own."""

from __future__ import annotations

import sys
import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest

from shardmesh.mesh.monitor.watchdog import Watchdog


class _Failing(Watchdog):
    """A watchdog whose first ticks raise."""

    def __init__(self, errors: list[Exception]) -> None:
        super().__init__(
            cast(Any, SimpleNamespace(directory=SimpleNamespace(rank=3))), lambda: None
        )
        self.errors, self.went_on = errors, threading.Event()

    def _tick(self) -> None:
        if self.errors:
            raise self.errors.pop(0)
        self.went_on.set()


def test_continues_after_an_unexpected_error(capfd: pytest.CaptureFixture[str]) -> None:
    watchdog = _Failing([OSError("no room"), OSError("no room"), KeyError("rank")])
    watchdog.start()
    assert watchdog.went_on.wait(60)
    watchdog.stop()
    printed = capfd.readouterr().err
    assert printed.count("rank 3: an error in the watchdog thread, which continues:") == 2
    assert printed.count("OSError: no room") == printed.count("KeyError: 'rank'") == 1
    assert "in _tick" in printed


def test_continues_if_stderr_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    with open("/dev/null", "w") as closed:
        monkeypatch.setattr(sys, "stderr", closed)
    watchdog = _Failing([OSError("no room")])
    watchdog.start()
    assert watchdog.went_on.wait(60)
    watchdog.stop()


def test_ends_when_the_world_has_gone() -> None:
    watchdog = _Failing([ReferenceError()])
    watchdog.start()
    watchdog._thread.join(60)
    assert not watchdog._thread.is_alive()
    assert not watchdog.went_on.is_set()


def test_prints_nothing_once_it_is_stopped(capfd: pytest.CaptureFixture[str]) -> None:
    watchdog = _Failing([])
    inside, stopped = threading.Event(), threading.Event()

    def closed() -> None:
        inside.set()
        stopped.wait(60)
        raise ValueError("closed")

    watchdog._tick = closed
    watchdog.start()
    assert inside.wait(60)
    watchdog._over.set()
    stopped.set()
    watchdog._thread.join(60)
    assert not watchdog._thread.is_alive()
    assert "closed" not in capfd.readouterr().err
