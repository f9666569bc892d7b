"""Output of simulated ranks: whole lines, prefixed with the rank, written where the caller's output
goes; `sys.stdout` is restored.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import signal
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest

from shardmesh.mesh import MeshError, current_world, simulate


def barrier() -> None:
    current_world().group(range(current_world().size)).barrier()


def printed(fn: object, n: int = 2, prints: str = "all") -> str:
    """Return everything that a run prints, as seen by a caller that redirected stdout."""
    with contextlib.redirect_stdout(io.StringIO()) as stream:
        simulate(n, prints)(fn)()  # type: ignore[arg-type]
    return stream.getvalue()


def rank() -> int:
    return current_world().rank


def test_lines_name_their_rank(capsys: pytest.CaptureFixture[str]) -> None:
    simulate(3)(lambda: print("hello", rank()))()
    assert capsys.readouterr().out == "[rank 0] hello 0\n[rank 1] hello 1\n[rank 2] hello 2\n"


def test_lines_do_not_interleave() -> None:
    def fn() -> None:
        print("one", end=" ")
        barrier()
        print("line", flush=True)
        barrier()
        sys.stdout.writelines(["a", "b\n", "c\nd"])

    # Rank 1 arrives last at the first barrier and goes on; rank 0 arrives last at the second.
    text = printed(fn).splitlines()
    assert text[:2] == ["[rank 0] one line", "[rank 1] one line"]
    assert text[2:] == [f"[rank {r}] {what}" for r in range(2) for what in ("ab", "c", "d")]


@pytest.mark.parametrize("n", [2, 3, 5])
def test_lines_are_in_rank_order(n: int) -> None:
    def fn() -> None:
        for step in range(4):
            print(step)
            if step < 3:
                barrier()

    assert printed(fn, n).splitlines() == [
        f"[rank {r}] {step}" for step in range(4) for r in range(n)
    ]


def test_fileno_flushes_held_output(tmp_path: Path) -> None:
    """`input`, debuggers and child processes call fileno."""

    def fn() -> None:
        barrier()
        print("before", rank())
        if rank() == 1:
            os.write(sys.stdout.fileno(), b"past\n")

    with open(tmp_path / "out", "w", buffering=1) as stream, contextlib.redirect_stdout(stream):
        simulate(2)(fn)()
    assert (tmp_path / "out").read_text() == "[rank 1] before 1\npast\n[rank 0] before 0\n"


def test_held_output_is_not_lost() -> None:
    """Rank 2 runs first, prints, and fails before ranks 0 and 1 have run, or prints and ends."""

    def fails() -> None:
        barrier()
        print("after", rank())
        raise ValueError("stop")

    with (
        contextlib.redirect_stdout(io.StringIO()) as stream,
        pytest.raises(ValueError, match="stop"),
    ):
        simulate(3)(fails)()
    assert stream.getvalue() == "[rank 2] after 2\n"

    def groups() -> None:
        pairs = current_world().group([0, 1] if rank() < 2 else [2, 3])
        pairs.barrier()
        print("pair")
        pairs.barrier()
        print("again")
        barrier()
        print("all")

    text = printed(groups, 4).splitlines()
    assert sorted(text) == sorted(
        f"[rank {r}] {what}" for r in range(4) for what in ("pair", "again", "all")
    )
    assert text[-4:] == [f"[rank {r}] all" for r in range(4)]
    assert all(
        [line for line in text if f"rank {r}" in line]
        == [f"[rank {r}] {w}" for w in ("pair", "again", "all")]
        for r in range(4)
    )


def test_several_lines_of_one_print_and_empty_ones() -> None:
    assert printed(lambda: print("a\n\nb")) == "".join(
        f"[rank {r}] a\n[rank {r}] \n[rank {r}] b\n" for r in range(2)
    )


def test_unfinished_line_is_ended_with_its_rank() -> None:
    assert printed(lambda: print(rank(), end="")) == "[rank 0] 0\n[rank 1] 1\n"
    assert printed(lambda: None) == ""


@pytest.mark.parametrize("form", ["\r{}%", "{}%\r"])
def test_a_progress_bar_leaves_one_line(form: str) -> None:
    def fn() -> None:
        for done in (0, 50, 100):
            print(form.format(done), end="", flush=True)
            barrier()
        print()

    assert sorted(printed(fn).splitlines()) == ["[rank 0] 100%", "[rank 1] 100%"]


def test_carriage_returns_before_newlines() -> None:
    assert (
        printed(lambda: print("a\r\nb", end="\r\n"))
        == "[rank 0] a\n[rank 0] b\n[rank 1] a\n[rank 1] b\n"
    )


def test_first_prints_rank_0_unchanged() -> None:
    def fn() -> None:
        print("\rhalf", end="")
        barrier()
        print("of", rank(), file=sys.stdout)

    assert printed(fn, 3, "first") == "\rhalfof 0\n"


def test_plain_adds_no_prefix() -> None:
    assert printed(lambda: print("a", end=""), 3, "plain") == "aaa"


@pytest.mark.parametrize("prints", ["all", "first", "plain"])
def test_single_rank_prints_unchanged(prints: str) -> None:
    assert printed(lambda: print("a", end=""), 1, prints) == "a"


@pytest.mark.parametrize("prints", ["none", None, 3, [0]])
def test_unknown_choices_raise(prints: object) -> None:
    with pytest.raises(MeshError, match="prints must be 'all'"):
        simulate(2, prints=prints)  # type: ignore[arg-type]


def test_nested_runs_name_both_ranks() -> None:
    def outer() -> None:
        simulate(2)(lambda: print("inner"))()
        print("after")

    lines = ["[rank 0] inner", "[rank 1] inner", "after"]
    assert printed(outer).splitlines() == [f"[rank {r}] {line}" for r in range(2) for line in lines]


def test_ranks_may_redirect_their_stdout() -> None:
    def fn() -> str:
        with contextlib.redirect_stdout(io.StringIO()) as mine:
            print("kept by", rank())
            barrier()
            print("and", rank())
        print("shown by", rank())
        return mine.getvalue()

    with contextlib.redirect_stdout(io.StringIO()) as stream:
        assert simulate(2)(fn)() == [f"kept by {r}\nand {r}\n" for r in range(2)]
    assert sorted(stream.getvalue().splitlines()) == ["[rank 0] shown by 0", "[rank 1] shown by 1"]


def test_stream_delegates_to_the_callers() -> None:
    with contextlib.redirect_stdout(io.TextIOWrapper(io.BytesIO(), encoding="latin-1")) as stream:
        assert (
            simulate(2)(lambda: (sys.stdout.encoding, sys.stdout.isatty()))()
            == [("latin-1", False)] * 2
        )
        stream.flush()


def test_no_stdout_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    assert simulate(2)(lambda: print("nowhere"))() == [None, None]
    assert sys.stdout is None


def test_writing_non_text_raises() -> None:
    with pytest.raises(TypeError):
        simulate(2)(lambda: sys.stdout.write(3))()  # type: ignore[arg-type]


def test_error_of_the_stream_ends_the_run() -> None:
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError("disk full")

    for end in ("", "\n"):  # at the end of the rank, and in the print
        with (
            contextlib.redirect_stdout(Full()),
            pytest.raises(OSError, match="disk full") as caught,
        ):
            simulate(2)(lambda: print("a", end=end))()  # noqa: B023
        assert caught.value.__notes__ == ["raised on rank 0 of simulate(2)"]


def test_stdout_is_restored_after_success_and_failure() -> None:
    def fn() -> None:
        sys.stdout = io.StringIO()
        barrier()
        if rank() == 1:
            raise ValueError("mine")

    before = sys.stdout
    simulate(2)(lambda: None)()
    assert sys.stdout is before
    with pytest.raises(ValueError, match="mine"):
        simulate(2)(fn)()
    assert sys.stdout is before


def test_prints_while_unwinding_keep_their_rank() -> None:
    def fn() -> None:
        try:
            if rank() == 1:
                raise ValueError("mine")
            barrier()
        finally:
            print("cleaned up", end="")

    with (
        contextlib.redirect_stdout(io.StringIO()) as stream,
        pytest.raises(ValueError, match="mine"),
    ):
        simulate(3)(fn)()
    found = sorted(stream.getvalue().splitlines())
    assert found == ["[rank 0] cleaned up", "[rank 1] cleaned up"]  # rank 2 had not begun


def interrupt_soon() -> None:
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()


@pytest.mark.parametrize("nested", [False, True])
def test_stdout_is_restored_after_ctrl_c(nested: bool) -> None:
    cleaned = []

    def busy() -> None:
        if rank() == 0:
            barrier()
        interrupt_soon()
        try:
            while True:
                time.sleep(0.01)
        finally:
            cleaned.append(rank())

    def fn() -> None:
        if nested:
            simulate(2)(busy)()
        else:
            busy()

    before = sys.stdout
    with pytest.raises(KeyboardInterrupt):
        simulate(2)(fn)()
    assert sys.stdout is before
    assert cleaned == [1]  # it has unwound before the caller goes on
    assert printed(lambda: print("on")) == "[rank 0] on\n[rank 1] on\n"


def test_uninterruptible_rank_is_abandoned() -> None:
    go, gone = threading.Event(), threading.Event()

    def fn() -> None:
        interrupt_soon()
        try:
            go.wait()  # Python does not interrupt the wait of a thread
        finally:
            print("too late")
            gone.set()

    before = sys.stdout
    with pytest.raises(KeyboardInterrupt):
        simulate(2)(fn)()
    assert sys.stdout is before
    go.set()
    assert gone.wait(5)
    assert simulate(2)(rank)() == [0, 1]
    assert sys.stdout is before


def test_concurrent_runs_restore_stdout() -> None:
    before, meet = sys.stdout, threading.Barrier(2)

    def fn() -> None:
        if rank() == 0:
            meet.wait()  # both runs are under way
        barrier()

    threads = [threading.Thread(target=simulate(2)(fn)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sys.stdout is before


def test_logging_and_warnings_are_unchanged(caplog: pytest.LogCaptureFixture) -> None:
    with (
        contextlib.redirect_stderr(io.StringIO()) as stream,
        warnings.catch_warnings(record=True) as seen,
    ):
        warnings.simplefilter("always")

        def fn() -> None:
            logging.getLogger("someone").warning("from %d", rank())
            warnings.warn(f"by {rank()}", UserWarning, stacklevel=1)
            print("error", file=sys.stderr)

        assert printed(fn) == ""
    assert caplog.messages == ["from 0", "from 1"]
    assert [str(w.message) for w in seen] == ["by 0", "by 1"]
    assert stream.getvalue() == "error\nerror\n"


def test_stream_kept_after_the_run_still_works() -> None:
    with contextlib.redirect_stdout(io.StringIO()) as stream:
        handler = logging.StreamHandler(simulate(2)(lambda: sys.stdout)()[1])
        handler.emit(logging.makeLogRecord({"msg": "later"}))
    assert stream.getvalue() == "[rank 1] later\n"


class _ClosedPipe(io.StringIO):
    """Accepts some lines, then raises."""

    def __init__(self, lines: int) -> None:
        super().__init__()
        self.left = lines

    def write(self, text: str) -> int:
        if self.left < text.count("\n"):
            raise BrokenPipeError("the reader has gone")
        self.left -= text.count("\n")
        return super().write(text)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("lines", range(13))
def test_a_closed_pipe_ends_the_run(lines: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is raised in a rank's print, or when the output of a finished rank is written."""

    def fn() -> None:
        world = current_world()
        for _ in range(3):
            world.group(range(world.size)).barrier()
            print("a line")

    monkeypatch.setattr(sys, "stdout", _ClosedPipe(lines))
    if lines == 12:
        simulate(4)(fn)()
    else:
        with pytest.raises(BrokenPipeError, match="the reader has gone"):
            simulate(4)(fn)()
