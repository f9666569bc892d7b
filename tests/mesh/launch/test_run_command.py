"""`shardmesh run`: what it takes out of a command line, and what it passes on; progress bars.

tests/examples/test_finetune_hf.py runs a program with it.
"""

from __future__ import annotations

import io
import os
import sys
import threading
from typing import Any

import pytest

import shardmesh as sm
from shardmesh.__main__ import main
from shardmesh.mesh.launch import progress_bar, run_command
from shardmesh.mesh.launch.local_processes import LaunchError


@pytest.fixture
def program(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    return "train.py"


@pytest.fixture
def launched(monkeypatch) -> list[Any]:
    """Return the calls of `launch`, which starts nothing."""
    calls: list[Any] = []

    def launch(fn: Any, ranks: int, args: Any, *, env: Any) -> None:
        calls.append((ranks, *args, env))

    monkeypatch.setattr(run_command, "launch", launch)
    return calls


@pytest.mark.parametrize(
    ("line", "ranks", "arguments"),
    [
        (["train.py", "--mesh", "dp=2,tp=2", "--lr", "1"], 4, ["--lr", "1"]),
        (["train.py", "--lr", "1", "--mesh=dp=2,tp=2"], 4, ["--lr", "1"]),
        (["--mesh", "dp=2,tp=2", "train.py", "-x", "-h"], 4, ["-x", "-h"]),
        (["train.py", "--mesh", "dp=2,tp=2", "--", "--mesh", "a=1"], 4, ["--mesh", "a=1"]),
    ],
)
def test_the_mesh_is_taken_out(line, ranks, arguments, program, launched):
    assert main(["run", *line]) == 0
    expected = (ranks, program, arguments, False, {"SHARDMESH_MESH": "dp=2,tp=2"})
    assert launched == [expected]


def test_a_module(launched):
    assert main(["run", "-m", "pkg.train", "--mesh", "dp=2", "-v"]) == 0
    assert launched == [(2, "pkg.train", ["-v"], True, {"SHARDMESH_MESH": "dp=2"})]


def test_options_of_torchrun_pass_through_unread(program, launched, monkeypatch):
    commands: list[Any] = []
    monkeypatch.setattr(os, "execv", lambda path, command: commands.append(command) or 0)
    monkeypatch.setenv("SHARDMESH_MESH", "")
    options = ["--nnodes", "2", "--rdzv-endpoint=host:29500", "--no-such-option"]
    main(["run", *options, program, "--mesh", "dp=16,tp=8", "--lr", "1"])
    assert launched == []
    assert commands[0][1:] == ["-m", "torch.distributed.run", *options, program, "--lr", "1"]
    assert os.environ["SHARDMESH_MESH"] == "dp=16,tp=8"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (["train.py"], "write --mesh with the axes"),
        (["train.py", "--mesh"], "--mesh has no value"),
        (["train.py", "--mesh", "4"], "'4' is not a mesh"),
        (["train.py", "--mesh", "dp=2,tp=0"], "'dp=2,tp=0' is not a mesh"),
        (["train.py", "--mesh", "a=2,a=2"], "twice"),
        (["other.py", "--mesh", "dp=2"], "there is no file 'other.py'"),
        (["--mesh", "dp=2"], "write the program to run"),
        (["-m", "--mesh", "dp=2"], "write the program to run"),
        (["train.py", "--mesh", "dp=128,tp=8"], "1024 processes are more than a command starts"),
    ],
)
def test_wrong_lines_end_in_one_line(line, message, program, launched, capsys, monkeypatch):
    monkeypatch.setattr(run_command, "usable_cores", lambda: 8)
    assert main(["run", *line]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1
    assert launched == []


@pytest.mark.parametrize(
    ("cause", "status", "said"),
    [
        (SystemExit("no such folder"), 1, "no such folder\n"),
        (SystemExit(3), 3, ""),
        (None, 1, "python -m shardmesh run: rank 1 of 2 raised\n"),
    ],
)
def test_how_it_ends_when_a_rank_fails(cause, status, said, program, monkeypatch, capsys):
    def launch(*args: Any, **kwargs: Any) -> None:
        raise LaunchError("rank 1 of 2 raised", 1) from cause

    monkeypatch.setattr(run_command, "launch", launch)
    assert main(["run", program, "--mesh", "dp=2"]) == status
    assert capsys.readouterr().err == said


# -- the mesh --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "names", "expected"),
    [
        ("fsdp=2,tp=2", ("fsdp", "tp"), (("fsdp", 2), ("tp", 2))),
        ("tp=2,fsdp=2", ("fsdp", "tp"), (("tp", 2), ("fsdp", 2))),
        ("tp=4", ("fsdp", "tp"), (("tp", 4), ("fsdp", 1))),
        ("a=4", None, (("a", 4),)),
    ],
)
def test_mesh_from_env(text, names, expected, monkeypatch):
    monkeypatch.setenv("SHARDMESH_MESH", text)
    found = sm.simulate(4)(lambda: sm.mesh_from_env(names, device_type="cpu").shape_tuple)()
    assert found == [expected] * 4


def test_mesh_from_env_without_the_variable(monkeypatch):
    monkeypatch.delenv("SHARDMESH_MESH", raising=False)
    (mesh,) = sm.simulate(1)(lambda: sm.mesh_from_env(("fsdp", "tp"), device_type="cpu"))()
    assert mesh.shape_tuple == (("fsdp", 1), ("tp", 1))
    with pytest.raises(sm.errors.LaunchEnvironmentError, match="SHARDMESH_MESH is not set"):
        sm.mesh_from_env()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dp=4", "the program has no axis dp; use fsdp, tp"),
        ("fsdp", "is not a mesh"),
        ("fsdp=2", "needs 2 ranks"),
    ],
)
def test_a_mesh_that_does_not_fit(text, message, monkeypatch):
    monkeypatch.setenv("SHARDMESH_MESH", text)

    def program() -> str:
        with pytest.raises((ValueError, RuntimeError), match=message) as raised:
            sm.mesh_from_env(("fsdp", "tp"), device_type="cpu")
        return str(raised.value)

    assert len(set(sm.simulate(4)(program)())) == 1


# -- progress --------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def __init__(self, is_terminal: bool) -> None:
        super().__init__()
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal


@pytest.mark.parametrize(("is_terminal", "seconds"), [(True, 1.0), (True, 0.01), (False, 1.0)])
def test_a_bar_appears_after_two_seconds_on_a_terminal(is_terminal, seconds, monkeypatch):
    now = [0.0]
    terminal = Terminal(is_terminal)
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(progress_bar.time, "monotonic", lambda: now[0])
    items = []
    for item in sm.training.progress(iter(range(8)), "rows", total=8):
        items.append(item)
        now[0] += seconds
    drawn = terminal.getvalue().split("\r\x1b[K")
    assert items == list(range(8))
    if is_terminal and seconds == 1.0:
        assert drawn[1] == "rows  [######                  ]  2/8  25%  1.0/s  0:06 left"
        assert len(drawn) == 9
        assert drawn[-1] == ""  # erased
    else:
        assert terminal.getvalue() == ""


def test_only_rank_0_draws(monkeypatch):
    now = [0.0]
    terminal = Terminal(True)
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(progress_bar.time, "monotonic", lambda: now[0])

    def program() -> None:
        for _ in sm.training.progress(range(3)):
            now[0] += 5.0

    sm.simulate(3)(program)()
    assert terminal.getvalue().count("3/3") == 1


@pytest.mark.parametrize("has_total", [True, False])
def test_a_bar_of_bytes_is_drawn_while_one_call_runs(has_total, monkeypatch):
    terminal, drawn_text = Terminal(True), threading.Event()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(terminal, "flush", drawn_text.set)
    monkeypatch.setattr(progress_bar, "_AFTER_S", 0.01)
    measured = (4_000_000_000, lambda: 1_000_000_000) if has_total else ()
    with progress_bar.byte_progress("writing", *measured):
        assert drawn_text.wait(60)
    drawn = terminal.getvalue().split("\r\x1b[K")
    start = (
        "writing  [######                  ]  1.0/4.0 GB  25%  " if has_total else "writing  0:0"
    )
    assert drawn[1].startswith(start)
    assert drawn[-1] == ""  # erased


@pytest.mark.parametrize(
    ("done", "text"),
    [
        (0, "copy  [                        ]  0.0/4.0 GB  0%  0 MB/s"),
        (10**9, "copy  [######                  ]  1.0/4.0 GB  25%  500 MB/s  0:06 left"),
        (4 * 10**9, "copy  [########################]  4.0/4.0 GB  100%  2.0 GB/s  0:00 left"),
    ],
)
def test_texts_of_bars_of_bytes(done, text):
    assert progress_bar._byte_text("copy", done, 4 * 10**9, 2.0) == text


def test_no_bar_of_bytes_in_a_pipe(monkeypatch):
    pipe = Terminal(False)
    monkeypatch.setattr(sys, "stderr", pipe)
    monkeypatch.setattr(progress_bar, "_AFTER_S", 0.0)
    before = threading.active_count()
    with progress_bar.byte_progress("reading"):
        assert threading.active_count() == before
    assert pipe.getvalue() == ""


@pytest.mark.parametrize("name", ["shardmesh", "python -m shardmesh"])
def test_help_has_the_name_that_the_command_was_called_by(name, monkeypatch, capsys):
    path = "/bin/shardmesh" if name == "shardmesh" else "/lib/shardmesh/__main__.py"
    monkeypatch.setattr("sys.argv", [path])
    assert main([]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"usage: {name} [-h]")
    assert f"  {name} tune llama/config.json" in text
