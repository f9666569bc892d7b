"""The server that forks the ranks of `forked`."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from tests.forked import Forked, _import

# Its exit status is lost where children are not waited for.
MODULE = """
import pathlib, subprocess, sys, pytest
status = subprocess.run([sys.executable, "-S", "-c", "raise SystemExit(3)"]).returncode
pathlib.Path(__file__).with_name("status").write_text(str(status))
pytest.skip("not here", allow_module_level=True)
"""


def import_as_the_server(folder: str) -> tuple[str, bool]:
    """Import a module that skips, while a process that has ended was not waited for."""
    sys.path.insert(0, folder)
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    _import("skips")
    with pytest.raises(ChildProcessError):
        os.waitpid(pid, 0)
    is_ignored = signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN
    return Path(folder, "status").read_text(), is_ignored


def test_a_module_that_skips_does_not_end_the_server(forked: Forked, tmp_path: Path):
    (tmp_path / "skips.py").write_text(MODULE)
    (ended,) = forked(import_as_the_server, 1, str(tmp_path))
    assert (ended.status, ended.value) == (0, ["3", True]), ended.output
