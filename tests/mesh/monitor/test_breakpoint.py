"""sm.monitor.breakpoint: a debugger with scripted commands on one rank, while the others wait."""

from __future__ import annotations

import bdb
import io
import os
import pty
import select
import signal
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch

from shardmesh.mesh import MeshError, current_world, simulate
from shardmesh.mesh.errors import PeerError
from shardmesh.mesh.launch.breakpoint import breakpoint
from shardmesh.mesh.settings import settings, watchdog
from tests.pool import Pool

LIMIT_S = 90.0


def sum_of_ranks() -> float:
    x = torch.tensor([float(current_world().rank)])
    current_world().group(range(current_world().size)).all_reduce(x)
    return x.item()


def program(rank: int) -> tuple[float, bool]:
    value = 10 + current_world().rank
    breakpoint(rank)
    value += 100  # "the next line"
    value *= 2
    return value + sum_of_ranks() / 1000, sys.gettrace() is None


def line_of(text: str) -> int:
    return next(
        n
        for n, line in enumerate(Path(__file__).read_text().splitlines(), 1)
        if line.strip().startswith(text)
    )


def answers(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    commands: str,
    rank: int = 1,
) -> list[str]:
    """Return the debugger's output for these commands on that rank of three, by line."""
    monkeypatch.setattr(sys, "stdin", io.StringIO(commands.replace(";", "\n")))
    values = [2 * (110 + r) + 0.003 for r in range(3)]
    assert [value for value, _ in simulate(3)(program)(rank)] == values
    return [
        line.removeprefix(f"(Pdb, rank {rank} of 3) ")
        for line in capsys.readouterr().out.splitlines()
    ]


def test_breakpoint_stops_at_the_line_of_the_call(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = answers(monkeypatch, capsys, "p value;c;")
    assert said[0] == f"> {__file__}({line_of('breakpoint(rank)')})program()"
    assert said[1] == "-> breakpoint(rank)"
    assert said[2] == "11"


@pytest.mark.parametrize(
    ("commands", "values"),
    [
        ("n;p value;n;p value;c;", ["11", "111"]),  # the first stop is before the next line
        ("s;n;p value;c;", ["111"]),
        ("b {line};c;p value;c;", ["111"]),
        ("value = 11;c;", []),
    ],
)
def test_debugger_steps_and_continues(
    commands, values, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = answers(monkeypatch, capsys, commands.format(line=line_of("value *= 2")))
    bdb.Breakpoint.clearBreakpoints()
    assert [line for line in said if line.isdigit()] == values


def test_continue_stops_tracing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("c\n"))
    assert all(untraced for _, untraced in simulate(2)(program)(0))


def test_next_run_is_not_traced(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Threads of simulated ranks are reused."""
    answers(monkeypatch, capsys, f"b {line_of('value *= 2')};c;c;")
    bdb.Breakpoint.clearBreakpoints()
    assert simulate(3)(sys.gettrace)() == [sys.gettrace()] * 3


def test_quitting_ends_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for commands in ("q\n", ""):  # the end of the input quits too
        monkeypatch.setattr(sys, "stdin", io.StringIO(commands))
        with pytest.raises(
            bdb.BdbQuit, match=r"rank 1 quit the debugger at .*test_breakpoint.py:\d+"
        ):
            simulate(3)(program)(1)


@pytest.mark.parametrize("rank", [3, -1, "0", True])
def test_nonexistent_rank_raises(rank) -> None:
    def fn() -> str:
        with pytest.raises(MeshError) as caught:
            breakpoint(rank)
        return str(caught.value)

    texts = simulate(3)(fn)()
    assert texts == [f"breakpoint(rank={rank!r}): the world has 3 ranks, numbered 0 to 2."] * 3


def test_stdin_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardmesh.mesh.launch.breakpoint._TERMINAL", "/no/such/terminal")
    with open(os.devnull) as nothing:
        monkeypatch.setattr(sys, "stdin", nothing)

        def fn() -> str:
            with pytest.raises(
                RuntimeError, match="there is nothing to read commands from"
            ) as caught:
                breakpoint(1)
            return str(caught.value)

        assert len(set(simulate(3)(fn)())) == 1


# ----------------------------------------------------------------------------------- real processes


def on_processes(commands: str) -> tuple[str, float]:
    """Return the outcome of this rank, and a sum over all ranks afterwards."""
    here, before = settings(), sys.stdin
    times = here.warn, here.timeout
    watchdog(warn=1.0, timeout=1.5)
    if current_world().rank == 2:
        sys.stdin = io.StringIO(commands)
    try:
        return str(program(2)[0]), sum_of_ranks()
    except (bdb.BdbQuit, PeerError) as error:
        return f"{type(error).__name__}: {error}", sum_of_ranks()
    finally:
        sys.stdin, here.warn, here.timeout = before, *times


def test_other_ranks_wait_indefinitely(world4: Pool) -> None:
    found = world4(on_processes, "import time\ntime.sleep(2.0)\nn\ntime.sleep(2.0)\nc\n")
    assert found == [(str(2 * (110 + r) + 0.006), 6.0) for r in range(4)]


def test_quitting_raises_on_other_ranks(world4: Pool) -> None:
    place = f"{__file__}:{line_of('breakpoint(rank)')}"
    cause = f"rank 2 quit the debugger at {place}"
    for rank, (said, total) in enumerate(world4(on_processes, "q\n")):
        assert said == f"{'BdbQuit' if rank == 2 else 'PeerError'}: {cause}"
        assert total == 6.0


@pytest.mark.slow
def test_launched_processes_read_from_the_terminal(tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    path.write_text(
        textwrap.dedent("""
            import shardmesh as sm
            from shardmesh.mesh.launch.breakpoint import breakpoint

            def work():
                secret = 40 + sm.init_device_mesh("cpu", (2,)).get_rank()
                breakpoint(1)
                return secret

            if __name__ == "__main__":
                print("results", sm.launch(work, 2))
        """)
    )
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, str(path)])
    try:
        converse(
            terminal,
            [
                ("(Pdb, rank 1 of 2)", "p secret + 1000\n"),
                ("1041", "c\n"),
                ("results [40, 41]", ""),
            ],
        )
    except BaseException:
        os.kill(pid, signal.SIGKILL)
        raise
    finally:
        status = os.waitpid(pid, 0)[1]
    assert status == 0


def is_readable(terminal: int, seconds: float) -> bool:
    """Return whether there is data or the end within this many seconds. (`select` is limited to
    file descriptors below 1024.)
    """
    waiting = select.poll()
    waiting.register(terminal, select.POLLIN)
    return bool(waiting.poll(1000 * seconds))


def converse(terminal: int, turns: list[tuple[str, str]]) -> None:
    """Wait for each text, then type its answer."""
    said, deadline = "", time.monotonic() + LIMIT_S
    for expected, answer in turns:
        while expected not in said:
            if not is_readable(terminal, max(0.0, deadline - time.monotonic())):
                pytest.fail(f"no {expected!r} in {said!r}")
            said += os.read(terminal, 4096).decode()
        os.write(terminal, answer.encode())
