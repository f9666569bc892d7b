"""Reading boxes: each piece of a file is read once per node.

By a rank that needs it and sends the other ranks their parts.

    stored  rows 0:4 in __0_0, 4:8 in __1_0            rank 0   reads 0:4   -- rows 0:4 -->   rank 2
    wanted  ranks 0 and 2 rows 0:4, 1 and 3 rows 4:8   rank 3   reads 4:8   -- rows 4:8 -->   rank 1

Reading proceeds in rounds of a bounded number of bytes. All ranks compute the same plan; a rank
that cannot read reports it before the others wait for data. A rank that shares with no other (over
gloo) reads all that it needs in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from ....kernels.box import Box, box_origin, box_shape, box_size, full_box, intersect, slices
from ....mesh.comm.group import Group
from ...layout.layout import Layout
from ..agreement import run_on_all_ranks
from . import pieces
from .manifest import Stored, StoredPiece

ROUND_BYTES = 256 << 20  # bytes that a node reads between exchanges

Parts = dict[int, Box | None]  # rank -> which box of a piece it needs; None for all of a value


@dataclass(frozen=True)
class PieceRead:
    """A piece, the rank that reads it, and the parts that ranks need."""

    piece: StoredPiece
    dtype: torch.dtype | None
    parts: Parts
    reader: int

    def nbytes(self, rank: int) -> int:
        """Return the number of bytes that a rank needs."""
        if rank not in self.parts:
            return 0
        box = self.parts[rank]
        return (
            self.piece.length
            if box is None or self.dtype is None
            else box_size(box) * self.dtype.itemsize
        )


@dataclass
class LoadedParts:
    """This rank's loaded parts: boxes of tensors, and values as bytes."""

    boxes: dict[str, Box]
    tensors: dict[str, Tensor]
    values: dict[str, bytes] = field(default_factory=dict)

    def memory_of(self, reading: PieceRead, rank: int) -> Tensor | None:
        """Return the memory for a piece needed whole here, if it is contiguous and on the host."""
        box = reading.parts.get(rank)
        name = reading.piece.name
        if box is None or box != reading.piece.box:
            return None
        place = self.tensors[name][slices(box, box_origin(self.boxes[name]))]
        return place if place.device.type == "cpu" and place.is_contiguous() else None

    def put(self, reading: PieceRead, rank: int, data: Tensor) -> None:
        """Store a part: a box of a tensor, or the bytes of a value."""
        box, name = reading.parts[rank], reading.piece.name
        if box is None:
            self.values[name] = bytes(data.numpy())
        else:
            self.tensors[name][slices(box, box_origin(self.boxes[name]))].copy_(data)


def box_of(layout: Layout, rank: int) -> Box | None:
    """Return the box of a rank, None outside the mesh."""
    mesh: Any = layout.mesh
    coordinate = mesh.coordinate_of(rank)
    return None if coordinate is None else layout.box_at(coordinate)


def plan_reads(
    stored: Stored,
    layouts: Mapping[str, Layout | None],
    values: Mapping[str, Sequence[int]],
    ranks: Sequence[int],
) -> list[PieceRead]:
    """Return the plan of reads.

    Of tensors by layout (None: whole on each rank), and of `values` with the ranks that need them.
    """
    load = dict.fromkeys(ranks, 0)
    boxes = {}
    reads = []
    for name, layout in layouts.items():
        entry = stored.entries[name]
        key = layout or entry.shape
        if key not in boxes:
            boxes[key] = {
                rank: full_box(entry.shape or ()) if layout is None else box_of(layout, rank)
                for rank in ranks
            }
        for piece in entry.pieces:
            reads += _piece_reads(piece, entry.dtype, _overlaps(piece, boxes[key]), load)
    for name, needing in values.items():
        for piece in stored.entries[name].pieces:
            reads += _piece_reads(
                piece, None, {rank: None for rank in needing if rank in load}, load
            )
    return reads


def plan_box_reads(
    stored: Stored, wanted: Mapping[str, Mapping[int, Sequence[Box]]], ranks: Sequence[int]
) -> list[PieceRead]:
    """Return the plan of reads of some boxes of tensors.

    A rank that needs several boxes of one piece takes the smallest box around them.

    Args:
        wanted: the boxes that each rank needs, by tensor and rank.
        ranks: those that share what they read.
    """
    load = dict.fromkeys(ranks, 0)
    reads: list[PieceRead] = []
    for name, boxes_by_rank in wanted.items():
        entry = stored.entries[name]
        for piece in entry.pieces:
            parts: Parts = {}
            for rank in ranks:
                common = [intersect(piece.box or (), box) for box in boxes_by_rank.get(rank, ())]
                overlapping = [box for box in common if box is not None]
                if overlapping:
                    parts[rank] = _box_around(overlapping)
            reads += _piece_reads(piece, entry.dtype, parts, load)
    return reads


def _box_around(boxes: Sequence[Box]) -> Box:
    """Return the smallest box that has all boxes in it."""
    by_dim = zip(*boxes, strict=True)
    return tuple((min(dim)[0], max(stop for _, stop in dim)) for dim in by_dim)


def _overlaps(piece: StoredPiece, boxes: Mapping[int, Box | None]) -> Parts:
    common = (
        (rank, intersect(piece.box or (), box)) for rank, box in boxes.items() if box is not None
    )
    return {rank: box for rank, box in common if box is not None}


def _piece_reads(
    piece: StoredPiece, dtype: torch.dtype | None, parts: Parts, load: dict[int, int]
) -> list[PieceRead]:
    """Return the read of a piece by the rank that needs it and has the fewest bytes so far.

    The list is empty if no rank needs it.
    """
    if not parts:
        return []
    reader = min(parts, key=load.__getitem__)
    load[reader] += piece.length
    return [PieceRead(piece, dtype, parts, reader)]


# --------------------------------------------------------------------------------------------------


def read(
    stored: Stored,
    plan: Sequence[PieceRead],
    group: Group,
    rank: int,
    allocate: Callable[[], LoadedParts],
    device: torch.device,
) -> LoadedParts:
    """Read and exchange pieces on the ranks of a node; return this rank's parts.

    Args:
        allocate: allocates them, once the files are known to have as many bytes.

    Raises:
        CheckpointError: a file is missing, short or damaged; the text has the file and the leaf.

    Communication: for each round in which ranks need the same pieces, one all_gather of small
    objects and one all_to_all.
    """
    loaded = LoadedParts({}, {})
    failure = _failure(
        lambda: pieces.check_files(
            stored, (reading.piece for reading in plan if rank in reading.parts)
        )
    )
    if failure is None:
        try:
            loaded = allocate()
        except Exception as error:
            failure = error
    for these in _rounds(plan):
        sends: list[list[Tensor]] = [[] for _ in group.ranks]
        work = partial(_read_own, stored, these, group.ranks, rank, loaded, sends, failure)
        if any(len(reading.parts) > 1 for reading in these):
            run_on_all_ranks(group, work)
            _exchange(these, group, rank, loaded, sends, device)
        elif failure is None:  # raised in the next round with an exchange, or at the end
            failure = _failure(work)
    if failure is not None:
        raise failure
    return loaded


def _failure(work: Callable[[], None]) -> Exception | None:
    try:
        work()
    except Exception as error:
        return error


def _rounds(plan: Sequence[PieceRead]) -> Iterator[list[PieceRead]]:
    these, nbytes = [], 0
    for reading in plan:
        if these and nbytes + reading.piece.length > ROUND_BYTES:
            yield these
            these, nbytes = [], 0
        these.append(reading)
        nbytes += reading.piece.length
    if these:
        yield these


def _read_own(
    stored: Stored,
    these: Sequence[PieceRead],
    ranks: Sequence[int],
    rank: int,
    loaded: LoadedParts,
    sends: list[list[Tensor]],
    failure: Exception | None,
) -> None:
    """Read this rank's pieces: its part into memory, others to `sends`. Raise earlier failures."""
    if failure is not None:
        raise failure
    for reading in these:
        if reading.reader == rank:
            memory = loaded.memory_of(reading, rank)
            data = _data(stored, reading, memory)
            for place, other in enumerate(ranks):
                if other in reading.parts and not (other == rank and data is memory):
                    box, whole = reading.parts[other], reading.piece.box
                    part = data
                    if box is not None and whole is not None:
                        part = data[slices(box, box_origin(whole))]
                    if other == rank:
                        loaded.put(reading, rank, part)
                    else:
                        sends[place].append(part.contiguous().reshape(-1).view(torch.uint8))


def _data(stored: Stored, reading: PieceRead, into: Tensor | None) -> Tensor:
    """Return a piece as a tensor, `into` if possible; for a value, its bytes."""
    if reading.dtype is None:
        return torch.frombuffer(
            bytearray(pieces.read_value(stored, reading.piece)), dtype=torch.uint8
        )
    return pieces.read_tensor(stored, reading.piece, reading.dtype, into)


def _exchange(
    these: Sequence[PieceRead],
    group: Group,
    rank: int,
    loaded: LoadedParts,
    sends: Sequence[Sequence[Tensor]],
    device: torch.device,
) -> None:
    arriving = [
        [r for r in these if r.reader == other and other != rank and rank in r.parts]
        for other in group.ranks
    ]
    outgoing = torch.cat(
        [torch.empty(0, dtype=torch.uint8), *(part for parts in sends for part in parts)]
    ).to(device)
    splits = [sum(r.nbytes(rank) for r in reads) for reads in arriving]
    incoming = torch.empty(sum(splits), dtype=torch.uint8, device=device)
    group.all_to_all(
        incoming, outgoing, splits, [sum(part.numel() for part in parts) for parts in sends]
    )
    at = 0
    incoming = incoming.cpu()
    for reading in chain.from_iterable(arriving):
        stop = at + reading.nbytes(rank)
        loaded.put(reading, rank, _as_box(incoming[at:stop], reading, rank))
        at = stop


def _as_box(data: Tensor, reading: PieceRead, rank: int) -> Tensor:
    box = reading.parts[rank]
    if box is None or reading.dtype is None:
        return data
    # a copy, since a view must be aligned
    return data.clone().view(reading.dtype).reshape(box_shape(box))
