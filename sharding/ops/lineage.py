"""Lineage: a hash of how a sharded tensor was made, by which ranks notice that they move different values of one shape.

    x = sm.from_local(...)      where in the program it was made, and as which
    y = x @ w                   the operator, the lineages of x and w
    z = dropout(y)              and seed and number of the random tensor that it has drawn
    y.full_tensor()             each rank shows the lineage of y beside its collective

Three hashes side by side, which differ in what they know a tensor by that enters the program: the line and how many came from it
before; how many of its layout there were before; how many since this rank's last collective. Ranks of a correct program may differ in
one or another (they make it on different lines, or one makes a tensor more for itself): only where all differ, the values do.
Operators mix all three in one multiplication.
"""

from __future__ import annotations

import functools
import threading
import zlib
from collections.abc import Iterable, Iterator
from typing import Any

from ...mesh.comm.call_site import user_frame
from ...mesh.monitor.recording.trace_buffer import H
from ...mesh.monitor.settings import settings
from ..layout.layout import Layout

_FACTOR = 0x01000193  # of the FNV hash; odd, so that nothing is lost, and small enough not to reach the next hash
_CALLERS = 3
_ONE = (1 << 32) - 1
_PIECE = 0x9E3779B1 << 128 | 0x9E3779B1 << 64 | 0x9E3779B1  # odd, and large, so that it shows in the upper bits
_ALL = _ONE << 128 | _ONE << 64 | _ONE
_settings = settings()


def seed_of(name: str) -> int:
    """What an operator adds."""
    return _beside(*[zlib.crc32(name.encode())] * 3)


def _beside(a: int, b: int, c: int) -> int:
    return a << 128 | b << 64 | c


def mixed(seed: int, operands: Iterable[Any]) -> int:
    """The lineage of what an operator makes of these sharded tensors."""
    for x in operands:
        seed = (seed + x._lineage) * _FACTOR & _ALL  # the operand is multiplied, too, so that operators in another order differ
    return seed


def piece_of(lineage: int, i: int) -> int:
    """The lineage of the result with this number, where an operator has several."""
    return (lineage + i * _PIECE) & _ALL


class _Drawn(threading.local):
    """Seed and number of the last random tensor that this thread has drawn; another pair of objects after each."""

    last: tuple[int, int] | None = None


drawn = _Drawn()


def with_drawn(lineage: int, before: tuple[int, int] | None) -> int:
    """The lineage of what was made since `drawn.last` was `before`: with the random numbers in it, if any were drawn."""
    last = drawn.last
    return lineage if last is None or last is before else (lineage * _FACTOR + _seed_of_numbers(last)) & _ALL


@functools.lru_cache(64)
def _seed_of_numbers(numbers: tuple[int, int]) -> int:
    return seed_of("random {} {}".format(*numbers))


def root(layout: Layout) -> int:
    """The lineage of a tensor that enters the program here."""
    world: Any = getattr(layout.mesh, "world", None)
    if world is None or _settings.mode == "off":
        return 0
    line = " ".join(_lines())
    stamp, collectives = layout.fingerprint, world.page.words[H.RECORDS]
    roots = world.carried.roots
    by_line, by_order = _count(roots, (line, stamp)), _count(roots, stamp)
    return _beside(*(zlib.crc32(repr(known).encode()) for known in (
        (line, stamp, by_line), (stamp, by_order), (stamp, collectives, _count_since(roots, ("since", stamp), collectives))
    )))  # fmt: skip


def _lines() -> Iterator[str]:
    """Where in the program this is: the line, and those that called it, since many a program has one function that makes tensors."""
    frame: Any = user_frame()[0]
    for _ in range(_CALLERS):
        if frame is not None:
            yield _line(frame.f_code.co_filename, frame.f_lineno)
            frame = frame.f_back


@functools.lru_cache(4096)
def _line(file: str, line: int) -> str:
    """The name alone, since hosts may keep the program in different folders."""
    return f"{file.rpartition('/')[2]}:{line}"


def _count(counts: dict[Any, Any], key: Any) -> int:
    found = counts[key] = counts.get(key, 0) + 1
    return found


def _count_since(counts: dict[Any, Any], key: Any, when: int) -> int:
    """How often this was asked at this time."""
    before, count = counts.get(key, (when, 0))
    count = count + 1 if before == when else 1
    counts[key] = when, count
    return count


def packed(lineage: int) -> int:
    """As it stands beside a collective: the upper 21 bits of each hash, in 63 bits; see `seat.unlike`."""
    return lineage >> 139 << 42 | (lineage >> 75 & 0x1F_FFFF) << 21 | (lineage >> 11 & 0x1F_FFFF)


def unpacked(lineage: int) -> int:
    """What was packed, as a lineage to mix with others."""
    return _beside(lineage >> 42 << 11, (lineage >> 21 & 0x1F_FFFF) << 11, (lineage & 0x1F_FFFF) << 11)


class carrying_on:
    """with carrying_on(world, world.carried.lineage): what was carried before, as it stands beside collectives."""

    __slots__ = ("_before", "_carried", "_lineage")

    def __init__(self, world: Any, lineage: int) -> None:
        self._carried, self._lineage = world.carried, lineage

    def __enter__(self) -> None:
        self._before, self._carried.lineage = self._carried.lineage, self._lineage

    def __exit__(self, *_: object) -> None:
        self._carried.lineage = self._before


def carrying_back(world: Any, lineage: int) -> carrying_on:
    """with carrying_back(world, what was carried in forward): collectives inside move its gradient, of the loss that is carried now."""
    loss = world.carried.lineage
    return carrying_on(world, packed((unpacked(lineage) * _FACTOR + unpacked(loss)) & _ALL) if loss else lineage)


def carrying(world: Any, lineage: int) -> carrying_on:
    """with carrying(x.mesh.world, x._lineage): collectives inside move a value of this lineage."""
    return carrying_on(world, packed(lineage))
