"""Random programs as source text that all ranks run, with one divergence on one rank.

    def program(mesh, rank, is_outlier):
        a = sm.device_put(value(1), mesh, P("x"), src_data_rank=None)
        ...
        for step in range(3):
            if is_outlier and step == 1:
                pass                                  <- the divergence: here, a skipped line
            else:
                a = a.redistribute(P(None, "x"))
            a = torch.tanh(a @ b * 0.1)
        return whole(a, b, c, v, p), t, u

The text is compiled, so its lines are like those of a user's program. Without an outlier it is a
healthy program, in which ranks differ where they may: they create additional tensors, also in
threads and on different lines, and inspect shared ones.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import CodeType
from typing import Any

from shardmesh.mesh.device_mesh import DeviceMesh, init_device_mesh
from tests.faults.random_lines import HEADER, Line, LineGenerator

MESHES: tuple[dict[str, int], ...] = ({"x": 4}, {"x": 2, "y": 2})
MORE_MESHES = (*MESHES, {"x": 2, "y": 1, "z": 2}, {"x": 3}, {"x": 8})
SIZES = (8, 8, 6, 5)
KINDS = ("skip", "repeat", "swap", "wrong argument", "exception", "exit", "return", "late")
PROCESS_KINDS = (*KINDS, "die", "kill", "stop", "freeze")
# What the outlier runs before, or instead of, a line. A "late" rank arrives before the timeout.
_INSTEAD = {
    "skip": ("pass",),
    "exception": ("raise ValueError('no such file')",),
    "exit": ("sys.exit(0)",),
    "return": ("return None",),
    "die": ("os._exit(3)",),
    "kill": ("os.kill(os.getpid(), signal.SIGKILL)",),
    "stop": ("os.kill(os.getpid(), signal.SIGSTOP)",),
    "freeze": ("time.sleep(FREEZE_S)",),
}
_CONTINUES = ("stop", "freeze")  # the program runs the line afterwards


@dataclass(frozen=True)
class CodeBlock:
    """Consecutive lines; in a loop, if there is more than one iteration."""

    iterations: int
    lines: tuple[Line, ...]


@dataclass(frozen=True)
class Divergence:
    """How the outlier differs from the other ranks.

    Attributes:
        kind: one of `PROCESS_KINDS`.
        rank: the outlier.
        first: number of the first affected line in the program.
        last: number of the line after the affected ones.
        step: iteration of the enclosing loop; None outside loops.
        instead: lines that it runs instead.
    """

    kind: str
    rank: int
    first: int
    last: int
    step: int | None
    instead: tuple[str, ...]

    def __str__(self) -> str:
        step = "" if self.step is None else f" in iteration {self.step}"
        return (
            f"{self.kind} on rank {self.rank} at line {self.first}{step}: {'; '.join(self.instead)}"
        )


@dataclass(frozen=True)
class RandomProgram:
    """A random program.

    Attributes:
        seed: the seed that it was drawn with.
        mesh: axes and sizes.
        n: rows and columns of its matrices; parts of some are uneven or empty.
        blocks: its lines, in order.
        divergence: how the outlier differs; None for a healthy program.
    """

    seed: int
    mesh: Mapping[str, int]
    n: int
    blocks: tuple[CodeBlock, ...]
    divergence: Divergence | None = None

    @property
    def size(self) -> int:
        """Number of ranks."""
        return math.prod(self.mesh.values())

    @property
    def outlier(self) -> int | None:
        return None if self.divergence is None else self.divergence.rank

    @property
    def text(self) -> str:
        return (
            HEADER
            + "".join(f"    {line}\n" for line in self._body())
            + "    return whole(a, b, c, v, p), t, u\n"
        )

    def code(self) -> CodeType:
        return compile(self.text, f"random_{self.seed}.py", "exec")

    def _body(self) -> Iterator[str]:
        first = 0
        for block in self.blocks:
            if block.iterations > 1:
                yield f"for step in range({block.iterations}):"
            indent = "    " * (block.iterations > 1)
            yield from (indent + line for line in self._lines(first, block.lines))
            first += len(block.lines)

    def _lines(self, first: int, lines: tuple[Line, ...]) -> Iterator[str]:
        divergence = self.divergence
        for number, line in enumerate(lines, first):
            if divergence is None or not divergence.first <= number < divergence.last:
                yield from line.text.splitlines()
            elif number == divergence.first:
                yield (
                    "if is_outlier:"
                    if divergence.step is None
                    else f"if is_outlier and step == {divergence.step}:"
                )
                yield from (f"    {text}" for text in divergence.instead)
                yield "else:"
                yield from (
                    f"    {text}"
                    for other in lines[number - first : divergence.last - first]
                    for text in other.text.splitlines()
                )


def healthy_program(
    seed: int,
    meshes: tuple[dict[str, int], ...] = MESHES,
    length: int = 16,
    iterations: tuple[int, int] = (2, 4),
    raw: bool = False,
) -> RandomProgram:
    """Return a random correct program.

    Args:
        seed: seed of the random generator.
        meshes: meshes to choose from.
        length: number of lines and loops after the lines that create its tensors.
        iterations: minimum and maximum for a loop.
        raw: whether it also calls torch.distributed directly; on all ranks, so the mesh must have
            all ranks of the world.
    """
    draw = random.Random(seed)
    mesh = draw.choice(meshes)
    lines = LineGenerator(draw, tuple(mesh), min(mesh.values()), raw)
    blocks, straight = [], lines.first()
    for _ in range(length):
        if draw.random() < 0.15:
            blocks += [
                CodeBlock(1, tuple(straight)),
                CodeBlock(draw.randint(*iterations), tuple(lines.several(draw.randint(1, 3)))),
            ]
            straight = []
        straight += lines.several(1)
    return RandomProgram(seed, mesh, draw.choice(SIZES), (*blocks, CodeBlock(1, tuple(straight))))


def faulty_program(
    seed: int,
    meshes: tuple[dict[str, int], ...] = MESHES,
    kinds: tuple[str, ...] = KINDS,
    length: int = 16,
    raw: bool = False,
) -> RandomProgram:
    """Return a random program with a random divergence."""
    healthy, draw = healthy_program(seed, meshes, length, raw=raw), random.Random(-1 - seed)
    kind, rank = draw.choice(kinds), draw.randrange(healthy.size)
    first, lines, iterations = draw.choice(
        [place for place in _places(healthy) if _fits(kind, place[1])]
    )
    affected = lines[: 2 if kind == "swap" else 1]
    step = draw.randrange(iterations) if iterations > 1 else None
    divergence = Divergence(
        kind, rank, first, first + len(affected), step, _instead(kind, affected, draw)
    )
    return replace(healthy, divergence=divergence)


def _places(program: RandomProgram) -> list[tuple[int, tuple[Line, ...], int]]:
    """Return (number of a line, it and the lines after it in its block, iterations of the block)
    for all lines.
    """
    places, first = [], 0
    for block in program.blocks:
        places += [(first + i, block.lines[i:], block.iterations) for i in range(len(block.lines))]
        first += len(block.lines)
    return places


def _fits(kind: str, lines: tuple[Line, ...]) -> bool:
    if lines[0].is_local or (kind == "wrong argument" and not lines[0].wrong):
        return False
    return kind != "swap" or (
        len(lines) > 1 and not lines[1].is_local and lines[0].text != lines[1].text
    )


def _instead(kind: str, affected: tuple[Line, ...], draw: random.Random) -> tuple[str, ...]:
    text = affected[0].text
    if kind == "repeat":
        return text, text
    if kind == "swap":
        return affected[1].text, text
    if kind == "wrong argument":
        return (draw.choice(affected[0].wrong),)
    if kind == "late":
        return "time.sleep(LATE_S)", text
    return (*_INSTEAD[kind], text) if kind in _CONTINUES else _INSTEAD[kind]


def mesh_of(program: RandomProgram) -> DeviceMesh:
    """Return the program's mesh in the current world."""
    return init_device_mesh("cpu", tuple(program.mesh.values()), axis_names=tuple(program.mesh))


def run(program: RandomProgram, mesh: Any, rank: int, is_outlier: bool, **names: Any) -> Any:
    """Run a program on one rank; return (each sharded tensor in full, its plain tensors)."""
    namespace: dict[str, Any] = {"N": program.n, "LATE_S": 0.001, **names}
    exec(program.code(), namespace)
    return namespace["program"](mesh, rank, is_outlier)
