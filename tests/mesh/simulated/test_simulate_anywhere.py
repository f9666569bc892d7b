"""A simulated world in a plain script, stopped by Ctrl-C, and in a notebook."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = """
import sys
import torch
import shardmesh as sm

def main():
    mesh = sm.init_device_mesh("cpu", (2, 2), axis_names=("a", "b"))
    x = sm.device_put(torch.arange(8.0).reshape(4, 2), mesh, sm.P("a", "b"))
    print("local", x.to_local().tolist())
    return x.sum().item()

print(sm.simulate(4)(main)())
print(sys.stdout is sys.__stdout__)
"""

BUSY = """
import time
import shardmesh as sm
from shardmesh.mesh import current_world

def main():
    if current_world().rank == 0:
        current_world().group([0, 1]).barrier()
    try:
        print("ready", flush=True)
        while True:
            time.sleep(0.01)
    finally:
        print("unwound")

try:
    sm.simulate(2)(main)()
except KeyboardInterrupt:
    print("stopped")
print(sm.simulate(2)(lambda: current_world().rank)())
"""


def start(path: Path, text: str) -> subprocess.Popen[str]:
    path.write_text(text)
    return subprocess.Popen(
        [sys.executable, str(path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_a_plain_script(tmp_path: Path) -> None:
    out, err = start(tmp_path / "plain.py", SCRIPT).communicate(timeout=100)
    assert err == ""
    parts = [[0.0], [2.0]], [[1.0], [3.0]], [[4.0], [6.0]], [[5.0], [7.0]]
    assert sorted(out.splitlines()[:4]) == [
        f"[rank {r}] local {part}" for r, part in enumerate(parts)
    ]
    assert out.splitlines()[4:] == ["[28.0, 28.0, 28.0, 28.0]", "True"]


def test_failing_script_shows_rank_and_line(tmp_path: Path) -> None:
    script = SCRIPT.replace(
        "return x.sum().item()", "return x.sum().item() if mesh.get_rank() else None"
    )
    process = start(tmp_path / "fails.py", script)
    out, err = process.communicate(timeout=100)
    assert process.returncode == 1
    assert len(out.splitlines()) == 4
    assert "waits in all_reduce(sum, float32, 1 elements) for " in err
    assert f"over ranks (0, 1, 2, 3) for ranks [0] at {tmp_path}" in " ".join(err.split())
    assert "/fails.py:10\n" in err
    assert "/group.py" not in err


def test_ctrl_c_in_a_script(tmp_path: Path) -> None:
    process = start(tmp_path / "busy.py", BUSY)
    assert process.stdout is not None
    assert process.stdout.readline() == "[rank 1] ready\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=100)
    assert (out, err) == ("[rank 1] unwound\nstopped\n[0, 1]\n", "")
    assert process.returncode == 0


@pytest.mark.slow
def test_ctrl_c_delivered_to_another_thread(tmp_path: Path) -> None:
    to_itself = (
        "import signal, threading\n        signal.pthread_kill(threading.get_ident(), "
        "signal.SIGINT)"
    )
    script = BUSY.replace('print("ready", flush=True)', to_itself)
    assert script != BUSY
    out, err = start(tmp_path / "busy.py", script).communicate(timeout=100)
    assert (out, err) == ("[rank 1] unwound\nstopped\n[0, 1]\n", "")


@pytest.mark.slow
def test_prompts_show_at_once_on_a_terminal(tmp_path: Path) -> None:
    """So that `input` and `breakpoint` can be used in a rank."""
    pty = pytest.importorskip("pty")
    (tmp_path / "asks.py").write_text(
        "import shardmesh as sm\nprint(sm.simulate(2)(lambda: input('name? '))())"
    )
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, str(tmp_path / "asks.py")],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        close_fds=True,
    )
    os.close(theirs)
    for name in ("ann", "bob"):
        read_until(ours, "name? ")
        os.write(ours, f"{name}\n".encode())
    read_until(ours, "['ann', 'bob']")
    assert process.wait(timeout=100) == 0
    os.close(ours)


def read_until(terminal: int, expected: str) -> None:
    """Read the output of a terminal."""
    seen = ""
    while expected not in seen:
        assert select.select([terminal], [], [], 60)[0], f"no {expected!r} after {seen!r}"
        seen += os.read(terminal, 1000).decode()


CELLS = [
    """
import torch
import shardmesh as sm

def main(word):
    mesh = sm.init_device_mesh("cpu", (3,), axis_names=("a",))
    print(word, end=" ")
    total = sm.device_put(torch.ones(3), mesh, sm.P("a")).sum().item()
    print("from", mesh.get_rank())
    return total

sm.simulate(3)(main)("hello")
""",
    "sm.simulate(3)(main)('again')",  # the threads are those of the cell before
    "sm.simulate(3, prints='first')(main)('once')",
    """
try:
    sm.simulate(2)(main)("wrong size")
except ValueError as error:
    print(error.__notes__)
""",
]


@pytest.fixture
def cells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The outputs of each cell of a notebook."""
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    for name in ("JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "IPYTHONDIR"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS])
    nbclient.NotebookClient(notebook, timeout=100, kernel_name="python3").execute(
        env=dict(os.environ)
    )
    return [cell.outputs for cell in notebook.cells]


def lines(outputs: Any) -> list[str]:
    printed = [o["text"] for o in outputs if o["output_type"] == "stream" and o["name"] == "stdout"]
    return sorted("".join(printed).splitlines())


def test_prints_appear_in_the_running_cell(cells: list[Any]) -> None:
    assert lines(cells[0]) == [f"[rank {r}] hello from {r}" for r in range(3)]
    assert lines(cells[1]) == [f"[rank {r}] again from {r}" for r in range(3)]
    assert lines(cells[2]) == ["once from 0"]
    assert lines(cells[3]) == ["['raised on rank 0 of simulate(2)']"]
    assert [o["data"]["text/plain"] for o in cells[0] if "data" in o] == ["[3.0, 3.0, 3.0]"]
