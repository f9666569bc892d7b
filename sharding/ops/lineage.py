"""Lineage: a hash of how a sharded tensor was made, by which ranks notice that they move different values of one shape.

    x = sm.from_local(...)      where in the program it was made, and as which
    y = x @ w                   the operator, the lineages of x and w
    z = dropout(y)              and seed and number of the random tensor that it has drawn
    y.full_tensor()             each rank shows the lineage of y beside its collective

A lineage is four hashes side by side, which differ in what identifies a tensor that enters the program:

    line      the line that made it, and how many tensors came from that line before
    order     how many tensors of its layout entered before
    since     how many tensors of its layout entered since this rank's last collective
    layout    its layout alone

Ranks of a correct program may differ in one of the first three: they make a tensor on different lines, or one rank makes another tensor
for itself. Values are taken for different only where all three differ. A rank may do both, and then all three differ for a value made
of both tensors; so where it seems that a rank did both (`recorder.differ`), the operators and layouts must differ as well. Operators mix
all four hashes in one multiplication.
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
_HASHES, _ONE = 4, (1 << 32) - 1
_KEPT = (1 << 16) - 1  # of each hash, what is recorded with a collective
_settings = settings()


def _beside(*hashes: int) -> int:
    found = 0
    for one in hashes:
        found = found << 64 | one
    return found


_PIECE = _beside(*[0x9E3779B1] * _HASHES)  # odd, and large, so that it shows in the upper bits
_ALL = _beside(*[_ONE] * _HASHES)


def seed_of(name: str) -> int:
    """What an operator adds."""
    return _beside(*[zlib.crc32(name.encode())] * _HASHES)


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
    stamp, collectives = layout.stamp, world.page.words[H.RECORDS]
    roots = world.carried.roots
    by_line, by_order = _count(roots, (line, stamp)), _count(roots, stamp)
    if by_line == 1:
        world.page.note_line(zlib.crc32(repr((line, stamp)).encode()))
    return _beside(*(zlib.crc32(repr(known).encode()) for known in (
        (line, stamp, by_line), (stamp, by_order), (stamp, collectives, _count_since(roots, ("since", stamp), collectives)), stamp
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
    """Return a lineage as it is recorded with a collective: the upper 16 bits of each hash, see `recorder.differ`."""
    return lineage >> 208 << 48 | (lineage >> 144 & _KEPT) << 32 | (lineage >> 80 & _KEPT) << 16 | (lineage >> 16 & _KEPT)


def unpacked(lineage: int) -> int:
    """What was packed, as a lineage to mix with others."""
    return _beside(*((lineage >> at & _KEPT) << 16 for at in (48, 32, 16, 0)))


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
