"""Lineage: a hash of how a sharded tensor was computed.

By it ranks detect that they communicate different values of one shape.

    x = sm.from_local(...)      where the program made it, and how many it made before
    y = x @ w                   the operator, the lineages of x and w
    z = dropout(y)              also the seed and the number of the random tensor that was drawn
    y.full_tensor()             each rank publishes the lineage of y with its collective

A lineage is four hashes in one integer, which differ in how they identify a tensor that enters the
program:

    line      by the line that created it, and how many tensors that line created before
    order     by how many tensors of its layout entered before
    since     by how many tensors of its layout entered since this rank's last collective
    layout    by its layout alone

Ranks of a correct program may differ in one or two of the first three: the tensor is made on
different lines, or one rank makes an additional tensor. Only if all three differ, the values do. A
rank may do both, and then all three differ for a value computed from both tensors; if it seems that
a rank did both (see `recorder.differ`), the operators or layouts must differ as well. Operators mix
all four in one multiplication.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

from ..mesh.comm.call_site import user_lines
from ..mesh.comm.comm_context import LossOfSomeRanks
from ..mesh.comm.recording.trace_buffer import Header
from ..mesh.comm.thread_context import thread_context
from ..mesh.settings import settings
from .layout.layout import Layout
from .layout.mesh_answers import cached_on_mesh

# of the FNV hash; odd, so that nothing is lost, and small enough not to reach the next hash
_FACTOR = 0x01000193
_LINES = 3
_HASHES, _ONE = 4, (1 << 32) - 1
_KEPT = (1 << 16) - 1  # of each hash, the bits recorded with a collective
_settings = settings()


def _concatenate(*hashes: int) -> int:
    joined = 0
    for one in hashes:
        joined = joined << 64 | one
    return joined


_PIECE = _concatenate(*[0x9E3779B1] * _HASHES)  # odd, and large enough to change the upper bits
_ALL = _concatenate(*[_ONE] * _HASHES)


def seed_of(name: str) -> int:
    """Return the hash that an operator of this name adds to lineages."""
    return _concatenate(*[zlib.crc32(name.encode())] * _HASHES)


def seed_with_ints(seed: int, numbers: Iterable[int]) -> int:
    """Return the seed of an operator mixed with ints among its arguments."""
    for number in numbers:
        seed = (seed * _FACTOR + number * _PIECE) & _ALL
    return seed


def mixed(seed: int, operands: Iterable[Any]) -> int:
    """Return the lineage of a result from the operator's seed and its operands' lineages."""
    for x in operands:
        # multiplying the operand as well makes the order of operators count
        seed = (seed + x._lineage) * _FACTOR & _ALL
    return seed


def mixed_of_meshes(tensors: Sequence[Any]) -> int:
    """Return the lineage of tensors that are communicated together, on any meshes.

    0 if their meshes are of different ranks, such as mesh["dp"] and mesh["tp"]: ranks that share
    one of them have another tensor on the other, of another lineage.
    """
    meshes = dict.fromkeys(x._layout.mesh for x in tensors)
    if len(meshes) > 1 and len({_ranks(mesh) for mesh in meshes}) > 1:
        return 0
    return mixed(0, tensors)


def piece_of(lineage: int, i: int) -> int:
    """Return the lineage of the i-th result of an operator that has several."""
    return (lineage + i * _PIECE) & _ALL


def step_lineages(seed: int, params: Sequence[Any], grads: Sequence[Any]) -> list[int]:
    """Return `mixed(seed, (param, grad))` for many, 0 for plain tensors."""
    return [
        (((seed + x._lineage) * _FACTOR & _ALL) + grad._lineage) * _FACTOR & _ALL
        if hasattr(x, "_lineage")
        else 0
        for x, grad in zip(params, grads, strict=True)
    ]


def set_pieces(tensors: Iterable[Any], lineages: Iterable[int], i: int) -> None:
    """Give sharded tensors among these `piece_of` their lineages."""
    offset = i * _PIECE
    for x, lineage in zip(tensors, lineages, strict=True):
        if hasattr(x, "_lineage"):
            x._lineage = (lineage + offset) & _ALL


def with_drawn(lineage: int, before: tuple[int, int] | None) -> int:
    """Return a result's lineage, mixed with random numbers drawn since `last_draw` was `before`."""
    last = thread_context.last_draw
    return (
        lineage
        if last is None or last is before
        else (lineage * _FACTOR + _seed_of_numbers(last)) & _ALL
    )


@functools.lru_cache(64)
def _seed_of_numbers(numbers: tuple[int, int]) -> int:
    return seed_of("random {} {}".format(*numbers))


def root(layout: Layout) -> int:
    """Return the lineage of a tensor that enters the program here."""
    world: Any = getattr(layout.mesh, "world", None)
    if world is None or _settings.mode == "off":
        return 0
    # the lines that called it as well, since many programs make all tensors in one function
    line = " ".join(_line(*known) for known in user_lines(_LINES))
    stamp, collectives = layout.fingerprint, world.trace_buffer.words[Header.RECORDS]
    roots = world.comm_context.roots
    by_line, by_order = _count(roots, (line, stamp)), _count(roots, stamp)
    if by_line == 1:
        world.trace_buffer.note_line(zlib.crc32(repr((line, stamp)).encode()))
    return _concatenate(
        *(
            zlib.crc32(repr(known).encode())
            for known in (
                (line, stamp, by_line),
                (stamp, by_order),
                (stamp, collectives, _count_since(roots, ("since", stamp), collectives)),
                stamp,
            )
        )
    )


@functools.lru_cache(4096)
def _line(file: str, line: int) -> str:
    """Return the line with the bare file name, since hosts may have different folders."""
    return f"{file.rpartition('/')[2]}:{line}"


def _count(counts: dict[Any, Any], key: Any) -> int:
    count = counts[key] = counts.get(key, 0) + 1
    return count


def _count_since(counts: dict[Any, Any], key: Any, when: int) -> int:
    """Return how often this was called for `key` at time `when`."""
    before, count = counts.get(key, (when, 0))
    count = count + 1 if before == when else 1
    counts[key] = when, count
    return count


def packed(lineage: int) -> int:
    """Return the lineage that is published with a collective: the upper 16 bits of each hash."""
    return (
        lineage >> 208 << 48
        | (lineage >> 144 & _KEPT) << 32
        | (lineage >> 80 & _KEPT) << 16
        | (lineage >> 16 & _KEPT)
    )


def unpacked(lineage: int) -> int:
    """Return a packed lineage as one that can be mixed with others."""
    return _concatenate(*((lineage >> at & _KEPT) << 16 for at in (48, 32, 16, 0)))


class comm_context:
    """with comm_context(x.mesh.world, x._lineage): collectives inside are of this lineage."""

    __slots__ = ("_before", "_context", "_lineage")

    def __init__(self, world: Any, lineage: int) -> None:
        self._context = world.comm_context
        self._lineage = packed(lineage)

    def __enter__(self) -> None:
        context = self._context
        self._before, context.lineage = context.lineage, self._lineage

    def __exit__(self, *_: object) -> None:
        self._context.lineage = self._before


class loss_context(comm_context):
    """with loss_context(losses, lineage): backward from these values, of this lineage.

    Ranks outside of a loss' mesh do not have it. Where meshes are slices of one, as mesh["tp"],
    they have a loss of their own, of another lineage, and take part in collectives of the backward
    along other axes. So the lineage of such a loss counts only in collectives whose ranks all have
    it: `CommContext.lineage_on`.
    """

    __slots__ = ("_before_loss", "_loss")

    def __init__(self, losses: Sequence[Any], lineage: int) -> None:
        meshes = tuple(dict.fromkeys(x._layout.mesh for x in losses))
        world: Any = meshes[0].world
        super().__init__(world, lineage)
        self._loss = None
        if any(mesh.size() < world.size for mesh in meshes):
            ranks = frozenset.intersection(*map(_ranks, meshes))
            self._loss, self._lineage = LossOfSomeRanks(self._lineage, ranks), 0

    def __enter__(self) -> None:
        super().__enter__()
        self._before_loss, self._context.loss = self._context.loss, self._loss

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        self._context.loss = self._before_loss


def loss_lineage(*meshes: Any) -> int:
    """Return the lineage of the running backward in collectives of meshes, as it is published.

    0 if some ranks of the meshes do not have its loss.
    """
    context = meshes[0].world.comm_context
    if context.lineage or context.loss is None:  # that of a loss of all ranks, or of a value
        return context.lineage
    return context.lineage_on(frozenset().union(*map(_ranks, meshes)))


@cached_on_mesh(lambda mesh: mesh, 1)
def _ranks(mesh: Any) -> frozenset[int]:
    return frozenset(mesh.ranks.ravel().tolist())


class backward_comm_context(comm_context):
    """Communicate the gradient of a value inside the block.

    with backward_comm_context(context.lineage of forward, mesh): ...

    The gradient is that of the loss of the running backward; the meshes are those of the
    collectives.
    """

    __slots__ = ()

    def __init__(self, lineage: int, *meshes: Any) -> None:
        self._context, loss = meshes[0].world.comm_context, loss_lineage(*meshes)
        self._lineage = (
            packed((unpacked(lineage) * _FACTOR + unpacked(loss)) & _ALL) if loss else lineage
        )
