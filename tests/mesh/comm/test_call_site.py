"""Reading frames of other threads while finalizers run."""

from __future__ import annotations

import ast
import gc
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import shardmesh
from shardmesh.mesh.comm import call_site
from shardmesh.mesh.comm.call_site import frame_of_thread, main_thread_stack


class _Cycle:
    """Cyclic garbage whose finalizer deadlocks if it runs while thread states are locked."""

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        thread = threading.Thread(target=int)
        thread.start()


@pytest.fixture
def eager_collector():
    before = gc.get_threshold()
    gc.set_threshold(1)
    yield
    gc.set_threshold(*before)


def test_no_collection_runs_while_frames_are_read(monkeypatch):
    seen: list[bool] = []
    real = sys._current_frames

    def frames():
        seen.append(gc.isenabled())
        return real()

    monkeypatch.setattr(sys, "_current_frames", frames)
    assert frame_of_thread(threading.get_ident()) is not None
    assert seen == [False]
    assert gc.isenabled()
    gc.disable()
    try:
        frame_of_thread(threading.get_ident())
        assert not gc.isenabled(), (
            "the collector was turned on for a program that had turned it off"
        )
    finally:
        gc.enable()


class _ReturningFrame:
    """A frame whose call returns once it has been walked: then `f_back` is None."""

    def __init__(self, frame: FrameType) -> None:
        self._frame, self._is_running = frame, True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._frame, name)

    @property
    def f_back(self) -> FrameType | None:
        was_running, self._is_running = self._is_running, False
        return self._frame.f_back if was_running else None


def test_a_call_may_return_while_its_stack_is_read(monkeypatch):
    frame = _ReturningFrame(sys._getframe())
    monkeypatch.setattr(call_site, "frame_of_thread", lambda ident: frame)
    lines = main_thread_stack().splitlines()
    assert "in test_a_call_may_return_while_its_stack_is_read" in lines[-2]
    assert len(lines) > 4  # also of what has called it


def test_finalizers_may_start_threads(eager_collector):
    for _ in range(300):
        _Cycle()
        assert frame_of_thread(threading.get_ident()) is not None


@pytest.mark.slow
def test_finalizers_that_take_locks_do_not_deadlock_the_interpreter():
    """Run in a separate process, since the deadlock could not be interrupted."""
    program = """
import gc, threading
from shardmesh.mesh.comm.call_site import frame_of_thread

lock, ident, stop = threading.RLock(), threading.get_ident(), threading.Event()

class Cycle:
    def __init__(self):
        self.me = self

    def __del__(self):
        with lock:
            frame_of_thread(ident)
        threading.Thread(target=int).start()

def work():
    while not stop.is_set():
        Cycle()
        with lock:
            frame_of_thread(ident)

threads = [threading.Thread(target=work) for _ in range(2)]
gc.set_threshold(1)
for thread in threads:
    thread.start()
for _ in range(10_000):
    Cycle()
    assert frame_of_thread(ident) is not None
stop.set()
"""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    found = subprocess.run(
        [sys.executable, "-c", program],
        env=env,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert (found.returncode, found.stderr) == (0, "")


def test_a_thread_that_ended_has_no_frame():
    thread = threading.Thread(target=int)
    thread.start()
    thread.join()
    assert frame_of_thread(thread.ident) is None
    assert frame_of_thread(None) is None


def test_frames_are_read_in_one_function():
    root = Path(shardmesh.__file__).parents[1]
    users = set()
    for folder in ("mesh", "sharding", "kernels"):
        for path in (root / folder).rglob("*.py"):
            names = {
                node.attr
                for node in ast.walk(ast.parse(path.read_text()))
                if isinstance(node, ast.Attribute)
            }
            users |= {str(path.relative_to(root))} if "_current_frames" in names else set()
    assert users == {"mesh/comm/call_site.py"}
