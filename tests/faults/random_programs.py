"""Random programs as source text that all ranks run, with one divergence on one rank.

    def program(mesh, rank, odd):
        a = sm.device_put(value(1), mesh, P("x"), src_data_rank=None)
        ...
        for turn in range(3):
            if odd and turn == 1:
                pass                                  <- the divergence: here, a step left out
            else:
                a = a.redistribute(P(None, "x"))
            a = torch.tanh(a @ b * 0.1)
        return whole(a, b, c, v, p), t, u

The text is compiled, so its lines are those of a user's program. With no odd rank it is a healthy program, in which ranks do differ
where they may: they make tensors of their own, from threads too, on lines of their own, and look at those that they share.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import CodeType
from typing import Any

from shardmesh.mesh.device_mesh import DeviceMesh, init_device_mesh
from tests.faults.random_lines import HEADER, Line, Lines

MESHES: tuple[dict[str, int], ...] = ({"x": 4}, {"x": 2, "y": 2})
MORE_MESHES = (*MESHES, {"x": 2, "y": 1, "z": 2}, {"x": 3}, {"x": 8})
SIZES = (8, 8, 6, 5)
KINDS = ("skip", "repeat", "swap", "wrong argument", "exception", "exit", "return", "late")
PROCESS_KINDS = (*KINDS, "die", "kill", "stop", "freeze")
# What the odd rank runs before, or in place of, a line; a rank that is "late" comes before others take it for stalled.
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
_GOES_ON = ("stop", "freeze")  # where the program does


@dataclass(frozen=True)
class Block:
    """Lines in a row; in a loop, if there is more than one turn."""

    turns: int
    lines: tuple[Line, ...]


@dataclass(frozen=True)
class Divergence:
    """What the odd rank does.

    Attributes:
        kind: one of `PROCESS_KINDS`.
        rank: the odd rank.
        first: the line where it does it, counted from the program's first, and `last` the one after those it concerns.
        turn: in which turn of the loop around them; None outside loops.
        instead: what it runs in place of these lines.
    """

    kind: str
    rank: int
    first: int
    last: int
    turn: int | None
    instead: tuple[str, ...]

    def __str__(self) -> str:
        turn = "" if self.turn is None else f" in turn {self.turn}"
        return f"{self.kind} on rank {self.rank} at line {self.first}{turn}: {'; '.join(self.instead)}"


@dataclass(frozen=True)
class Program:
    """A random program.

    Attributes:
        mesh: axes and sizes.
        n: rows and columns of its matrices; parts of some are uneven or empty.
        blocks: its lines, in order.
        divergence: what the odd rank does; None for a healthy program.
    """

    seed: int
    mesh: Mapping[str, int]
    n: int
    blocks: tuple[Block, ...]
    divergence: Divergence | None = None

    @property
    def size(self) -> int:
        """How many ranks it has."""
        return math.prod(self.mesh.values())

    @property
    def odd(self) -> int | None:
        return None if self.divergence is None else self.divergence.rank

    @property
    def text(self) -> str:
        return HEADER + "".join(f"    {line}\n" for line in self._body()) + "    return whole(a, b, c, v, p), t, u\n"

    def code(self) -> CodeType:
        return compile(self.text, f"random_{self.seed}.py", "exec")

    def _body(self) -> Iterator[str]:
        first = 0
        for block in self.blocks:
            if block.turns > 1:
                yield f"for turn in range({block.turns}):"
            indent = "    " * (block.turns > 1)
            yield from (indent + line for line in self._lines(first, block.lines))
            first += len(block.lines)

    def _lines(self, first: int, lines: tuple[Line, ...]) -> Iterator[str]:
        odd = self.divergence
        for number, line in enumerate(lines, first):
            if odd is None or not odd.first <= number < odd.last:
                yield from line.text.splitlines()
            elif number == odd.first:
                yield "if odd:" if odd.turn is None else f"if odd and turn == {odd.turn}:"
                yield from (f"    {text}" for text in odd.instead)
                yield "else:"
                yield from (f"    {text}" for other in lines[number - first : odd.last - first] for text in other.text.splitlines())


def healthy_program(
    seed: int, meshes: tuple[dict[str, int], ...] = MESHES, length: int = 16, turns: tuple[int, int] = (2, 4), raw: bool = False
) -> Program:
    """A program in which nothing is wrong.

    Args:
        length: lines and loops after the first ones, which make its tensors.
        turns: the least and the most of a loop.
        raw: whether it also calls torch.distributed itself; on all ranks, so the mesh must have them all.
    """
    draw = random.Random(seed)
    mesh = draw.choice(meshes)
    lines = Lines(draw, tuple(mesh), min(mesh.values()), raw)
    blocks, straight = [], lines.first()
    for _ in range(length):
        if draw.random() < 0.15:
            blocks += [Block(1, tuple(straight)), Block(draw.randint(*turns), tuple(lines.several(draw.randint(1, 3))))]
            straight = []
        straight += lines.several(1)
    return Program(seed, mesh, draw.choice(SIZES), (*blocks, Block(1, tuple(straight))))


def faulty_program(
    seed: int, meshes: tuple[dict[str, int], ...] = MESHES, kinds: tuple[str, ...] = KINDS, length: int = 16, raw: bool = False
) -> Program:
    """A random program with a random divergence."""
    healthy, draw = healthy_program(seed, meshes, length, raw=raw), random.Random(-1 - seed)
    kind, rank = draw.choice(kinds), draw.randrange(healthy.size)
    first, lines, turns = draw.choice([place for place in _places(healthy) if _fits(kind, place[1])])
    concerned = lines[: 2 if kind == "swap" else 1]
    turn = draw.randrange(turns) if turns > 1 else None
    odd = Divergence(kind, rank, first, first + len(concerned), turn, _instead(kind, concerned, draw))
    return replace(healthy, divergence=odd)


def _places(program: Program) -> list[tuple[int, tuple[Line, ...], int]]:
    """(number of a line, it and the lines after it in its block, turns of the block)."""
    found, first = [], 0
    for block in program.blocks:
        found += [(first + i, block.lines[i:], block.turns) for i in range(len(block.lines))]
        first += len(block.lines)
    return found


def _fits(kind: str, lines: tuple[Line, ...]) -> bool:
    if lines[0].is_own or (kind == "wrong argument" and not lines[0].wrong):
        return False
    return kind != "swap" or (len(lines) > 1 and not lines[1].is_own and lines[0].text != lines[1].text)


def _instead(kind: str, concerned: tuple[Line, ...], draw: random.Random) -> tuple[str, ...]:
    text = concerned[0].text
    if kind == "repeat":
        return text, text
    if kind == "swap":
        return concerned[1].text, text
    if kind == "wrong argument":
        return (draw.choice(concerned[0].wrong),)
    if kind == "late":
        return "time.sleep(LATE_S)", text
    return (*_INSTEAD[kind], text) if kind in _GOES_ON else _INSTEAD[kind]


def mesh_of(program: Program) -> DeviceMesh:
    """The program's mesh, in the world that this thread runs in."""
    return init_device_mesh("cpu", tuple(program.mesh.values()), axis_names=tuple(program.mesh))


def run(program: Program, mesh: Any, rank: int, is_odd: bool, **names: Any) -> Any:
    """One rank's results: (the whole of each sharded tensor, its plain tensors)."""
    namespace: dict[str, Any] = {"N": program.n, "LATE_S": 0.001, **names}
    exec(program.code(), namespace)
    return namespace["program"](mesh, rank, is_odd)
