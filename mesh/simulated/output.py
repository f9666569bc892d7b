"""What simulated ranks print: line by line, with the rank in front.

    rank 0   print("loss", end=" ")  ...  print(0.5)   ->   [rank 0] loss 0.5
    rank 1   print("loss", end=" ")  ...  print(0.5)   ->   [rank 1] loss 0.5

While ranks run, `sys.stdout` belongs to the one that runs, as in a process of its own: it is exchanged together with the baton.
So a rank may also redirect its own, and what leaves a rank goes where the caller's prints would have gone.

The last rank to arrive at a collective goes on first. What it prints is held until the lower ranks of the collective have run to
their next one, so that lines printed by all ranks come in the order of ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from .. import errors

PRINTS = ("all", "first", "plain")


class RankOutput:
    """The `sys.stdout` of one rank: passes whole lines on, in one piece.

    In all else (encoding, isatty, fileno ...) it is the stream that it writes to. What ends in a carriage return is drawn over
    by what follows, as on a terminal, so a progress bar leaves one line.
    """

    def __init__(self, stream: Any, prefix: str) -> None:
        self.stream = stream
        self.held: list[str] | None = None
        self._prefix = prefix
        self._line = ""

    def write(self, text: str) -> int:
        *lines, rest = (self._line + text).split("\n")
        self._line = _last_drawn(rest)
        if lines:
            whole = "".join(f"{self._prefix}{_drawn(line)}\n" for line in lines)
            self.stream.write(whole) if self.held is None else self.held.append(whole)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        self.write("".join(lines))

    def flush(self) -> None:
        """Flushes the lines that are whole: half a line would be torn apart by the next rank."""
        self.stream.flush()

    def end_line(self) -> None:
        """Passes on what stands in the last line, if anything does."""
        if self._line:
            self.write("\n")

    def fileno(self) -> int:
        """Return the stream's descriptor, and hold nothing: who asks for it (`input`, a debugger, a child process) writes past us."""
        self.release()
        return self.stream.fileno()

    def release(self) -> None:
        """Pass on what was held, and hold no more."""
        held, self.held = self.held, None
        if held:
            self.stream.write("".join(held))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


class RankOrder:
    """Holds what a rank prints while lower ranks of its last collective have not gone on yet.

    Args:
        outputs: the `sys.stdout` of each rank; only a `RankOutput` is ever held.
    """

    def __init__(self, outputs: Iterable[Any]) -> None:
        self._outputs = list(outputs)
        self._before: dict[int, set[int]] = {}  # by rank that is held: the lower ranks that have still to run

    def ahead(self, rank: int, others: Iterable[int]) -> None:
        """The rank goes on from a collective before these."""
        output, lower = self._outputs[rank], {other for other in others if other < rank}
        if lower and isinstance(output, RankOutput):
            self._before.setdefault(rank, set()).update(lower)
            output.held = output.held or []

    def has_run(self, rank: int) -> None:
        """The rank has come to its next collective, or to its end."""
        for held, lower in list(self._before.items()):
            lower.discard(rank)
            if not lower:
                del self._before[held]
                self._outputs[held].release()

    def end(self) -> None:
        """Pass on all that is held."""
        for rank in sorted(self._before):
            self._outputs[rank].release()
        self._before.clear()


class Silence(RankOutput):
    """The `sys.stdout` of a rank whose prints are left off."""

    def __init__(self, stream: Any) -> None:
        super().__init__(stream, "")

    def write(self, text: str) -> int:
        return len(text)


def check_prints(prints: object) -> None:
    if prints not in PRINTS:
        raise errors.MeshError(
            f"simulate(..., prints={prints!r}): write 'all' (every rank prints, its lines begin with [rank 0]), 'first' (rank 0 "
            "prints, the others are silent) or 'plain' (every rank prints, nothing is added)."
        )


def outputs(n: int, prints: str, stream: Any) -> list[Any]:
    """The `sys.stdout` of each rank, given the caller's (None in a program without one)."""
    if n == 1 or prints == "plain" or stream is None:
        return [stream] * n
    if prints == "first":
        return [stream] + [Silence(stream)] * (n - 1)
    return [RankOutput(stream, f"[rank {rank}] ") for rank in range(n)]


def callers_stdout(caller_is_rank: bool) -> Any:
    """What the caller of `simulate` prints to: not that of a rank of another thread's run, unless the caller is one."""
    stream = sys.stdout
    while not caller_is_rank and isinstance(stream, RankOutput):
        stream = stream.stream
    return stream


def _drawn(line: str) -> str:
    return _last_drawn(line).rstrip("\r")


def _last_drawn(line: str) -> str:
    """What a terminal shows of a line that returned to its beginning; a return at the end still waits for its text."""
    body = line.rstrip("\r")
    return body.rpartition("\r")[2] + line[len(body) :]
