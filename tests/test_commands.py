"""Command lines that make no sense: each ends with a status that is not 0 and one line on stderr,
soon, in little memory.
"""

# ruff: noqa: RUF001

from __future__ import annotations

import resource
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import shardmesh as sm
from shardmesh.__main__ import main
from shardmesh.mesh.abstract_mesh import MOST_RANKS
from shardmesh.mesh.doctor import command as doctor
from shardmesh.mesh.errors import MeshError
from shardmesh.mesh.monitor.recording.job_directory import JobDirectory

PLAN = {"--mesh": "a=2,b=2", "--shape": "8,8", "FROM": "P('a')", "TO": "P()"}
MESHES = [
    "",
    "a",
    "a=",
    "=2",
    "a=x",
    "a=-1",
    "a=0",
    "a=1.5",
    "a=2,a=2",
    "a=2,",
    ",",
    "a=1000000000",
    "a=1048577",
    "a=1024,b=1025",
    "a=" + "9" * 18,
    "a=" + "9" * 19,
    "a=" + "9" * 5000,
    "a=２",
    "a=٢",
    "a=²",
    "a=1_0",
    "a=+2",
    "a=0x2",
    "a=2;b=2",
    "a:2",
    "a==2",
    "\x1b[2J",
    "a=\x1b",
    "\0",
    "a=" * 1000,
    ",".join(f"a{i}=2" for i in range(21)),
    "a=2,b=99999999999",
    "é=٣",
]
SHAPES = [
    "x",
    "-1",
    "8,",
    ",8",
    "8,,8",
    "8.0",
    "1e3",
    "８",
    "٨",
    "²",
    "1_0",
    str(10**30),
    "9" * 18 + "," + "9" * 18,
    "9" * 5000,
    str(2**62 + 1),
    str(2**63),
    "4294967296,4294967296",
    "(8,8)",
    "[8]",
    "8 8",
    "\x1b[2J",
    "8,8\0",
    "None",
    "8,True",
    "+8",
    "inf",
    "nan",
]
SPECS = [
    "",
    " ",
    "P",
    "P(",
    "P()()",
    "P('a'",
    "P(a)",
    "P('c')",
    "P('a','a')",
    "P('a','b',None,None)",
    "P(1)",
    "P(1.5)",
    "P(None, None, 'a')",
    "P(**{})",
    "P(*[])",
    "P(x=1)",
    "P(unreduced='c')",
    "P(unreduced={'a': 'no'})",
    "P(unreduced=5)",
    "P(sizes=1)",
    "P(sizes={'a': 1})",
    "P(sizes={'a': (1, 2)})",
    "P('a', sizes={'a': (1,)})",
    "P('a', sizes={'a': (10**30, 1)})",
    "P('a', sizes={'a': (-1, 9)})",
    "P('a', sizes={'a': ('x', 'y')})",
    "P('a', sizes={'a': (1.5, 6.5)})",
    "P('a', sizes={'a': (99999999999999999999999, 1)})",
    "P({})",
    "P([{}])",
    "P(b'a')",
    "P(True)",
    "[Shard(0)]",
    "[Shard(5), Replicate()]",
    "[Shard(-9), Replicate()]",
    "[Shard('a'), Replicate()]",
    "[Shard(), Replicate()]",
    "[Shard(10**9)]",
    "[Shard(99999999999999999999), Replicate()]",
    "[Partial('x'), Replicate()]",
    "[Partial(5), Replicate()]",
    "[1, 2]",
    "[P()]",
    "(Shard(0),)",
    "[]",
    "()",
    "{}",
    "lambda: 0",
    "__import__('os').system('true')",
    "P(__import__('os'))",
    "P(open('/etc/passwd'))",
    "1",
    "'a'",
    "(" * 500,
    "[" * 5000,
    "-" * 5000 + "1",
    "P(" + "(" * 300 + ")" * 300 + ")",
    "\x1b[2J",
    "\0",
    "P('\x1b[2J')",
    "P('" + "a" * 100_000 + "')",
    "9" * 5000,
    "P(" + "9" * 5000 + ")",
    "P('\ud800')",
    "P（）",
    "P(f'{1}')",
    "P('a' 'b')",
    "await P()",
    "P() if 1 else P()",
    "P().x",
    "P[0]",
    "x := 1",
    "*P()",
    "P(...)",
    "P(set())",
    "P({'a'})",
    "P(frozenset())",
]
OTHERS: list[list[str]] = [
    ["no"],
    ["plan"],
    ["plan", "--help-me"],
    ["ledger", "--no"],
    ["doctor", "x"],
    ["--mesh", "a=2"],
    ["pl\x1b[2Jan"],
    ["plan", "a"],
    *(["ledger", "--last", value] for value in ("x", "1.5", "", "1e3", "9" * 5000)),
    *(
        ["ledger", folder]
        for folder in (
            "/nonexistent",
            "/dev/null",
            "/etc/passwd",
            "",
            "a\0b",
            "\x1b[2J",
            "x" * 5000,
            "/proc/self/mem",
            "/dev",
        )
    ),
    *(["doctor", "--nprocs", value] for value in ("x", "", "1.5", "9" * 5000)),
]


def plan(**changes: str) -> list[str]:
    given = PLAN | {name.replace("__", "--"): value for name, value in changes.items()}
    return [
        "plan",
        f"--mesh={given['--mesh']}",
        f"--shape={given['--shape']}",
        "--",
        given["FROM"],
        given["TO"],
    ]


def options(*more: str) -> list[str]:
    command = plan()
    return [*command[:3], *more, *command[3:]]


LINES: list[list[str]] = [
    *(plan(__mesh=mesh) for mesh in MESHES),
    *(plan(__shape=shape) for shape in SHAPES),
    *(plan(FROM=spec) for spec in SPECS),
    *(plan(TO=spec) for spec in SPECS[::3]),
    *(
        options("--dtype", dtype)
        for dtype in (
            "x",
            "",
            "float33",
            "Tensor",
            "load",
            "os",
            "__class__",
            "\x1b[2J",
            "f32" * 5000,
        )
    ),
    *(options("--node-size", size) for size in ("x", "0", "-1", "1.5", "9" * 5000)),
    *(options("--crossing", axes) for axes in ("c", "a,c", "\x1b[2J")),
    *(options("--max-bytes", size) for size in ("x", "0", "-1", "1e9", "9" * 5000)),
    *(options("--device", device) for device in ("tpu", "", "cuda:0")),
    *(options("--transport", name) for name in ("x", "")),
    *(options("--picture", name) for name in ("/nonexistent/a.png", "a.exe", "")),
    *OTHERS,
]


def test_there_are_many() -> None:
    assert len(LINES) >= 200


@pytest.fixture(autouse=True)
def no_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDMESH_WATCH_DIR", str(tmp_path / "none"))
    monkeypatch.chdir(tmp_path)


def ended(line: Sequence[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Return the exit status and what was written to stderr."""
    try:
        status: Any = main(line)
    except SystemExit as error:
        status = error.code
    return status, capsys.readouterr().err


@pytest.mark.parametrize("line", LINES, ids=range(len(LINES)))
def test_a_wrong_command_line_is_one_line(
    line: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    before, since = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    status, said = ended(line, capsys)
    assert status != 0, line
    assert said.count("\n") == 1, said[:2000]
    assert said.rstrip("\n").isprintable()
    assert len(said) < 1200
    assert "Traceback" not in said
    assert time.monotonic() - since < 20
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300_000  # kB


@pytest.mark.parametrize("option", ["--trace", "--flight-recorder"])
@pytest.mark.parametrize("path", ["/nonexistent/x/y", "/proc/x", "/dev/null/x", "a\0b"])
def test_a_path_that_cannot_be_written_is_one_line(
    option: str,
    path: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    directory = JobDirectory("x", 0, 2, tmp_path)
    if path == "/nonexistent/x/y":
        path = str(directory.folder / "alarm" / "x")
    status, said = ended(["ledger", str(directory.folder), option, path], capsys)
    assert status == 2
    assert said.count("\n") == 1, said


@pytest.mark.parametrize("size", [MOST_RANKS + 1, 10**9, 10**18, 10**30, 10**5000], ids=range(5))
def test_sizes_are_checked_before_a_mesh_is_made(size: int) -> None:
    for make in (
        lambda: sm.AbstractMesh((size,), ("a",)),
        lambda: sm.AbstractMesh((1, size, 2)),
        lambda: sm.AbstractMesh((2,), ("a",)).unflatten("a", (size, 2), ("b", "c")),
        lambda: sm.init_device_mesh("cpu", (size,)),
        lambda: sm.make_mesh((size,), ("a",)),
    ):
        with pytest.raises(MeshError) as found:
            make()
        assert len(str(found.value)) < 400


@pytest.mark.parametrize("nprocs", [10**9, 100_000, 1, 0, -1])
def test_the_doctor_starts_no_thousands_of_processes(nprocs: int) -> None:
    here: Any = SimpleNamespace(
        devices=SimpleNamespace(usable=()),
        system=SimpleNamespace(cores=2),
        place=SimpleNamespace(size=1),
    )
    with pytest.raises(ValueError, match="nprocs"):
        doctor._mesh_of_host(None, nprocs, here)


@pytest.mark.parametrize("size", [10**9, 10**18])
def test_worlds_of_one_process_have_a_limit(size: int) -> None:
    with pytest.raises(MeshError):
        sm.simulate(size)(lambda: None)()
    with pytest.raises(MeshError), sm.debug.null_world(size):
        sm.init_device_mesh("cpu", (size,))
