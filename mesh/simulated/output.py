"""The output of simulated ranks: whole lines, prefixed by the rank, in the order of ranks.

    rank 0   print("loss", end=" ")  ...  print(0.5)   ->   [rank 0] loss 0.5
    rank 1   print("loss", end=" ")  ...  print(0.5)   ->   [rank 1] loss 0.5

Each rank has its own `sys.stdout`, which the scheduler installs while the rank runs, so a rank may
also redirect it. Its lines are written to the caller's `sys.stdout`.

The last rank to arrive at a collective continues first. Its output is held until the lower ranks of
the collective have reached their next one, so that lines printed by all ranks appear in the order
of ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from .. import errors

PRINTS = ("all", "first", "plain")


class RankOutput:
    """The `sys.stdout` of one rank: writes whole lines to a stream.

    All other attributes (encoding, isatty, fileno ...) are those of the stream. Text after a
    carriage return replaces the text before it, as on a terminal, so a progress bar leaves one
    line.
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
            drawn = (_last_drawn(line).rstrip("\r") for line in lines)
            whole = "".join(f"{self._prefix}{line}\n" for line in drawn)
            self.stream.write(whole) if self.held is None else self.held.append(whole)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        self.write("".join(lines))

    def flush(self) -> None:
        """Flush whole lines only: the next rank might print between the halves of a line."""
        self.stream.flush()

    def end_line(self) -> None:
        """Write the last line if it has not ended."""
        if self._line:
            self.write("\n")

    def fileno(self) -> int:
        """Return the stream's descriptor and release held lines.

        Its user (`input`, a debugger, a child process) writes directly.
        """
        self.release()
        return self.stream.fileno()

    def release(self) -> None:
        """Write the held lines, and hold no more."""
        held, self.held = self.held, None
        if held:
            self.stream.write("".join(held))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


class RankOrder:
    """Holds the output of a rank until the lower ranks of its last collective have run.

    Args:
        outputs: the `sys.stdout` of each rank; only a `RankOutput` is ever held.
    """

    def __init__(self, outputs: Iterable[Any]) -> None:
        self._outputs = list(outputs)
        # by held rank: the lower ranks that have not run yet
        self._before: dict[int, set[int]] = {}

    def runs_before(self, rank: int, others: Iterable[int]) -> None:
        """Hold the rank's output: it continues from a collective before these others."""
        output = self._outputs[rank]
        lower = {other for other in others if other < rank}
        if lower and isinstance(output, RankOutput):
            self._before.setdefault(rank, set()).update(lower)
            output.held = output.held or []

    def has_run(self, rank: int) -> None:
        """Release output that waited for this rank, now at its next collective or its end."""
        for held, lower in list(self._before.items()):
            lower.discard(rank)
            if not lower:
                del self._before[held]
                self._outputs[held].release()

    def end(self) -> None:
        """Write all held output."""
        for rank in sorted(self._before):
            self._outputs[rank].release()
        self._before.clear()


class _Silence(RankOutput):
    """The `sys.stdout` of a rank whose output is dropped."""

    def __init__(self, stream: Any) -> None:
        super().__init__(stream, "")

    def write(self, text: str) -> int:
        return len(text)


def check_prints(prints: object) -> None:
    if prints not in PRINTS:
        raise errors.MeshError(
            f"simulate(..., prints={prints!r}): prints must be 'all' (every rank prints, with "
            "[rank 0] etc. before each line), 'first' (only rank 0 prints) or 'plain' (every rank "
            "prints, nothing is added)."
        )


def outputs(n: int, prints: str, stream: Any) -> list[Any]:
    """Return the `sys.stdout` of each rank, given the caller's (None if the program has none)."""
    if n == 1 or prints == "plain" or stream is None:
        return [stream] * n
    if prints == "first":
        return [stream] + [_Silence(stream)] * (n - 1)
    return [RankOutput(stream, f"[rank {rank}] ") for rank in range(n)]


def callers_stdout(caller_is_rank: bool) -> Any:
    """Return the `sys.stdout` of the caller of `simulate`.

    It is not that of a simulated rank unless the caller is one.
    """
    stream = sys.stdout
    while not caller_is_rank and isinstance(stream, RankOutput):
        stream = stream.stream
    return stream


def _last_drawn(line: str) -> str:
    """Return a line as a terminal shows its carriage returns; one at the end is kept."""
    body = line.rstrip("\r")
    return body.rpartition("\r")[2] + line[len(body) :]
