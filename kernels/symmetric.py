"""Collectives by ranks that can read each other's memory: no library call, straight into the final layout.

    all_gather, all_to_all, reduce_scatter      pack -> own memory, meet, read the boxes of `out` from the peers, meet
    one_shot_all_reduce                         x -> own memory, meet, every rank adds up everything it reads
    two_shot_all_reduce                         x -> own memory, meet, every rank adds up its share, meet, all read all

Bytes that cross a link, for each rank of W and N bytes: one shot (W - 1) N, two shots 2 (W - 1) / W N, as a ring; what is
pulled crosses once. Local passes over memory: all_reduce reads x and writes out (and its copy in the shared memory) in one
launch, with the epilogue, where a collective of NCCL is followed by a kernel for the residual sum and the norm, and one that
quantises; a pull reads each packed element once and writes it to its place, where NCCL needs a second buffer and an unpacking
pass.
Against NCCL: one shot should win where latency counts (below some 256 KB inside a node), two shots up to some MB, pulls where an
unpacking pass is saved. That is by count of bytes and meetings: none of it has run on a GPU yet; `sm.calibrate` measures it.

Contributions are added in the order of the group, 16-bit floats in float32, and rounded once: what is pulled to the dtype of
`out`, an all-reduce to that of x, so that one shot has the bits of two and an epilogue computes what the next operations would.
All ranks hold the same bits.

Who reads what is settled by meetings. At a meeting each rank tells every peer that it has come, and waits until every peer
has told it; what was written before a meeting is seen by every peer after it. Each program of a launch meets only the same
program of the peers, so the programs of a rank may run in any order, but all of a launch have to fit on the device at once
with those of a peer: there are at most MAX_PROGRAMS of 512 threads. Every rank of the group calls the same operations in the
same order on one stream (or on streams that wait for each other).

Memory may be written again without waiting for its readers:
- All-reduces. The regions are divided among programs, each in two halves that a program takes in turn, one for each round
  (a round ends with what the program reads from its peers). Before it writes the half of round k again, in round k + 2, it
  has met all peers in round k + 1, to which a peer's program comes only after its reads of round k.
- Pulls. The staging area is written by packing before the first meeting and read before the second; a rank leaves
  the second one, and can pack again, when all have come to it, hence have read.
The two lie apart, so operations may follow each other in any order. Epochs (how often a program has met) live in device
memory: a launch has the same arguments every time, and may be captured in a CUDA graph.

A peer that does not come within `spins` looks is noted in `error`; the program that waited for it does no more, in this launch
or later ones, and leaves what it wrote alone: a rank that comes late gets the right result, or an error, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor

from .box import Box, box_origin, box_shape, box_size, full_box, row_major_strides, slices
from .copy import Pack, compile_pack, pack_many, scaled, widened
from .quantize import BLOCK, DTYPES, compile_quantize, record_bytes
from .strided import COMPUTED, SPAN, UNIT, Placed, Table, View, alignment, make_tables, merge_views

MAX_RANKS = 128
MAX_PROGRAMS = 64  # fewer than any device of this kind has multiprocessors (A100 108, H100 132, MI300 304)
PAD_BYTES = 4 * MAX_PROGRAMS * MAX_RANKS
LONGEST_ROW = 1 << 14  # elements, for a norm: 32 for each of 512 threads

Place = tuple[int, int]  # a rank of the group, element offset in its staging area


class SymmetricMemoryError(RuntimeError):
    """A rank of the group did not come to a meeting."""


@dataclass
class Peers:
    """The memory that the ranks of a group share, as one of them sees it.

    Attributes:
        rank: this rank's number in the group.
        size: of the group.
        buffer: this rank's shared memory, uint8, of the same length on every rank, at a multiple of 16.
        buffers: int64 [size] on the device: the address of every rank's buffer, in this rank's address space.
        pads: int64 [size] on the device: the address of every rank's signal pad, `PAD_BYTES` of zeros at first.
        epochs: int32 [MAX_PROGRAMS] on the device, zeros at first; this rank's alone.
        error: int32 [size], zeros at first: 1 for each rank that did not come. In pinned host memory where the device is an
            accelerator, so that the host may look without waiting.
        spins: how often to look for a peer before it counts as missing; a look takes about a microsecond on a GPU.
    """

    rank: int
    size: int
    buffer: Tensor
    buffers: Tensor
    pads: Tensor
    epochs: Tensor
    error: Tensor
    spins: int
    staged: Tensor = field(init=False, repr=False)

    def __post_init__(self) -> None:
        _check_peers(self)
        self.staged = self.buffers + self.region_bytes * 2 * MAX_PROGRAMS

    @property
    def region_bytes(self) -> int:
        """What one program of an all-reduce may write in a round; all regions take a quarter of the buffer."""
        return self.buffer.numel() // (8 * MAX_PROGRAMS) // 128 * 128

    def staging(self, dtype: torch.dtype) -> Tensor:
        """`staging(dtype) -> flat`: where this rank packs what its peers will pull."""
        area = self.buffer[self.region_bytes * 2 * MAX_PROGRAMS :]
        return area[: area.numel() // dtype.itemsize * dtype.itemsize].view(dtype)


def _check_peers(p: Peers) -> None:
    if not (0 <= p.rank < p.size <= MAX_RANKS):
        raise ValueError(f"rank {p.rank} of a group of {p.size}: a group shares memory up to {MAX_RANKS} ranks")
    wanted = {
        "buffers": (torch.int64, p.size),
        "pads": (torch.int64, p.size),
        "epochs": (torch.int32, MAX_PROGRAMS),
        "error": (torch.int32, p.size),
    }
    for name, (dtype, length) in wanted.items():
        given: Tensor = getattr(p, name)
        if given.dtype != dtype or given.shape != (length,):
            raise ValueError(f"{name} is {given.dtype} of shape {tuple(given.shape)}: give {dtype} of shape ({length},)")
    if p.buffer.dtype != torch.uint8 or p.buffer.ndim != 1 or alignment([p.buffer]) < UNIT:
        raise ValueError(f"buffer is {p.buffer.dtype} of {p.buffer.ndim} dims: give uint8 of 1 dim at a multiple of {UNIT} bytes")


def check(peers: Peers) -> None:
    """`check(peers)`: no rank was missing so far, as far as the device has told. Every operation begins with it.

    Raises:
        SymmetricMemoryError: names the ranks of the group that did not come to a meeting.
    """
    if peers.error.any():  # on the host: waits for nothing
        late = peers.error.nonzero().flatten().tolist()
        names = f"rank {late[0]}" if len(late) == 1 else f"ranks {', '.join(map(str, late))}"
        raise SymmetricMemoryError(
            f"{names} of the group of {peers.size} did not arrive: rank {peers.rank} looked {peers.spins} times at a meeting. "
            "Either that rank ended or hangs, or it calls other operations than this one; what this operation and those after "
            "it wrote here is undefined, and the group's shared memory cannot be used again: make it anew."
        )


def _done(peers: Peers) -> None:
    """Where a launch is done when it returns, its error is known."""
    if peers.buffer.device.type == "cpu":
        check(peers)


# -- all_reduce --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AsRecord:
    """The result, in x's dtype, leaves as codes and scales: the record of the whole tensor, as `quantize.py` has it.

    Attributes:
        transport: "int8" or "fp8".
        block: elements that share a scale, a power of two from 16 to 1024; of rows that are normed, each has whole blocks.
    """

    transport: str
    block: int = BLOCK

    def __post_init__(self) -> None:
        compile_quantize((), [], self.transport, block=self.block)  # which knows what there is


@dataclass(frozen=True)
class AddNorm:
    """What follows a sum in a transformer: `added = x + residual; out = added / rms(added) * weight`, for each row.

    Computed in float32 from x and `added` as they are rounded to their dtypes, so it differs from the separate operations
    by no more than the order in which a row's squares are added.

    Attributes:
        residual: of x's shape.
        weight: one factor for each column; at most `LONGEST_ROW`.
        eps: added to the mean of squares.
        added: where the new residual is written; may be `residual`.
        record: how `out` leaves, where not as numbers.
    """

    residual: Tensor
    weight: Tensor
    eps: float
    added: Tensor
    record: AsRecord | None = None


Epilogue = AddNorm | AsRecord


def record_of(epilogue: Epilogue | None) -> AsRecord | None:
    """The format in which the result leaves; None for numbers."""
    return epilogue.record if isinstance(epilogue, AddNorm) else epilogue


def one_shot_all_reduce(peers: Peers, x: Tensor, out: Tensor, epilogue: Epilogue | None = None) -> Tensor:
    """`one_shot_all_reduce(peers, x, out, epilogue=None) -> out`: the sum of all ranks' x, in one launch and one meeting.

    Args:
        x: contiguous, of the same shape and dtype on every rank.
        out: contiguous, of x's shape; the sum is rounded to x's dtype and cast to out's. May be x. For a record uint8
            [record_bytes(x.numel(), block)], at a multiple of 16 bytes.
        epilogue: what to do with the sum; out is then its result.

    Raises:
        SymmetricMemoryError: a rank is missing.
        ValueError: tensors that do not fit together, or rows for which the shared memory is too small.
    """
    return _all_reduce(peers, x, out, epilogue, two_shot=False)


def two_shot_all_reduce(peers: Peers, x: Tensor, out: Tensor, epilogue: Epilogue | None = None) -> Tensor:
    """`two_shot_all_reduce(peers, x, out, epilogue=None) -> out`: the same bits as `one_shot_all_reduce`, with two meetings.

    Every rank adds up a share of the pieces (of the rows, for an epilogue) and all read the results.
    """
    return _all_reduce(peers, x, out, epilogue, two_shot=True)


def _all_reduce(peers: Peers, x: Tensor, out: Tensor, epilogue: Epilogue | None, two_shot: bool) -> Tensor:
    from .symmetric_triton import launch_all_reduce  # imports triton

    check(peers)
    _check_all_reduce(x, out, epilogue)
    launch_all_reduce(peers, x, out, epilogue, two_shot)
    _done(peers)
    return out


def _check_all_reduce(x: Tensor, out: Tensor, epilogue: Epilogue | None) -> None:
    record = record_of(epilogue)
    tensors = {"x": x, "out": out} if record is None else {"x": x}
    if isinstance(epilogue, AddNorm):
        tensors |= {"residual": epilogue.residual, "added": epilogue.added}
        columns = x.shape[-1] if x.ndim else 0
        if epilogue.weight.shape != (columns,) or not 0 < columns <= LONGEST_ROW or not epilogue.weight.is_contiguous():
            raise ValueError(
                f"a weight of shape {tuple(epilogue.weight.shape)} for rows of {columns}: give a contiguous one with a factor for each "
                f"column, of 1 to {LONGEST_ROW} columns"
            )
    for name, tensor in tensors.items():
        if tensor.shape != x.shape or not tensor.is_contiguous() or tensor.dtype not in COMPUTED:
            raise ValueError(
                f"{name} is {tensor.dtype} of shape {tuple(tensor.shape)} and strides {tensor.stride()}: an all-reduce of "
                f"{tuple(x.shape)} needs it contiguous, of that shape, and of one of {sorted(map(str, COMPUTED))}"
            )
    if record is not None:
        _check_record(x, out, record, x.shape[-1] if isinstance(epilogue, AddNorm) else 0)


def _check_record(x: Tensor, out: Tensor, record: AsRecord, columns: int) -> None:
    size = record_bytes(x.numel(), record.block)
    if x.dtype not in DTYPES:
        raise ValueError(f"{record} of {x.dtype}: float16, bfloat16 and float32 are quantised; reduce others without it")
    if out.dtype != torch.uint8 or out.shape != (size,) or not out.is_contiguous() or alignment([out]) < UNIT:
        raise ValueError(
            f"out is {out.dtype} of shape {tuple(out.shape)} and strides {out.stride()}: {record} of {tuple(x.shape)} needs it "
            f"contiguous, uint8 of shape ({size},), and at a multiple of {UNIT} bytes"
        )
    if columns % record.block:
        raise ValueError(f"rows of {columns} in {record}: a block would lie in two rows; choose a block that divides them")


# -- pull --------------------------------------------------------------------------------------------------------------


class Pull:
    """Boxes of a tensor read from the peers' staging areas: what `compile_pull` returns.

    Attributes:
        shape: of the tensor.
        sources: box -> where the contributions to it begin: (rank, element offset).
        kind: how contributions are combined.
    """

    __slots__ = ("_tables", "kind", "shape", "sources")

    def __init__(self, shape: Sequence[int], sources: Mapping[Box, Sequence[Place]], kind: str) -> None:
        self.shape, self.sources, self.kind = tuple(shape), dict(sources), kind
        self._tables: dict[tuple, list[Table]] = {}

    def tables(self, out: Tensor, dtype: torch.dtype, scale: float | None, rank: int, size: int) -> list[Table]:
        """The launches that fill `out` (made once for each kind of it)."""
        aligned = alignment([out])
        key = (out.stride(), out.dtype, dtype, aligned, scale is None, rank, size)
        if key not in self._tables:
            raw = dtype == out.dtype and scale is None
            placed = self._placed(out.stride(), rank, size)
            self._tables[key] = make_tables(placed, False, (dtype.itemsize, out.dtype.itemsize), aligned, raw)
        return self._tables[key]

    def _placed(self, strides: Sequence[int], rank: int, size: int) -> list[Placed]:
        """Copies from the next rank first: at any time each is read by one other, not all of them the same one."""
        in_turn = sorted(self.sources.items(), key=lambda item: (item[1][0][0] - rank) % size)
        return [_placed(strides, box, places) for box, places in in_turn]


def compile_pull(shape: Sequence[int], sources: Mapping[Box, Sequence[Place]], kind: str = "sum") -> Pull:
    """`compile_pull(shape, {box: [(rank, offset), ...]}, kind) -> Pull`: what to read from whom, decided once.

    Args:
        shape: of the result.
        sources: for each box of the result, where the contributions to it begin, each row-major: a rank of the group and
            an element offset in its staging area. One is copied, several are combined in the order given. Boxes that
            are left out are left as they are.
        kind: "sum", "max", "min" or "product".
    """
    return Pull(shape, sources, kind)


def exchange(
    peers: Peers, packs: Sequence[Pack], tensors: Sequence[Tensor], pulls: Sequence[Pull], outs: Sequence[Tensor],
    dtype: torch.dtype, scale: float | None = None,
) -> None:  # fmt: skip
    """`exchange(peers, packs, tensors, pulls, outs, dtype)`: packs the tensors into the staging area, then `pull_many`.

    Nothing is packed over what a late peer may still read: the group's errors are looked at first.
    """
    check(peers)
    for pull, out in zip(pulls, outs, strict=True):
        _check_out(pull, out, dtype, scale)
    pack_many(packs, tensors, peers.staging(dtype))
    pull_many(peers, pulls, outs, dtype, scale)


def pull_many(
    peers: Peers, pulls: Sequence[Pull], outs: Sequence[Tensor], dtype: torch.dtype, scale: float | None = None
) -> None:
    """`pull_many(peers, pulls, outs, dtype)`: every rank calls it when its part is packed; fills `outs`, of any strides.

    Args:
        dtype: of what lies in the staging areas. 16-bit floats are combined and scaled in float32, and rounded once.
        scale: what results are multiplied by.

    Raises:
        SymmetricMemoryError: a rank is missing.
        ValueError: an `out` has another shape than its pull, or a dtype that cannot be computed with.
    """
    from .strided_triton import run  # imports triton
    from .symmetric_triton import launch_meeting

    check(peers)
    for pull, out in zip(pulls, outs, strict=True):
        _check_out(pull, out, dtype, scale)
    launch_meeting(peers)
    for pull, out in zip(pulls, outs, strict=True):
        for table in pull.tables(out, dtype, scale, peers.rank, peers.size):
            run(table, peers.staging(dtype), out, peers.staged, pull.kind, scale, (True, False))
    launch_meeting(peers)
    _done(peers)


def _check_out(pull: Pull, out: Tensor, dtype: torch.dtype, scale: float | None) -> None:
    if out.shape != pull.shape:
        raise ValueError(f"a pull of shape {pull.shape} was given a tensor of shape {tuple(out.shape)}")
    computes = out.dtype != dtype or scale is not None or any(len(places) > 1 for places in pull.sources.values())
    if computes and not {out.dtype, dtype} <= COMPUTED:
        raise ValueError(f"{dtype} cannot be combined, scaled or cast to {out.dtype} on the way: only copied")
    if scale is not None and torch.float64 in (dtype, out.dtype):
        raise ValueError("float64 cannot be scaled on the way: kernels take the factor as float32; scale before or after")
    if dtype.itemsize > 8:
        raise ValueError(f"{dtype} is not read from peers: give it as torch.view_as_real, with one more dim")


def _placed(strides: Sequence[int], box: Box, places: Sequence[Place]) -> Placed:
    shape = box_shape(box)
    origin = sum(o * s for o, s in zip(box_origin(box), strides, strict=True))
    sizes, steps, flat_steps = merge_views(shape, strides, row_major_strides(shape))
    if len(places) == 1:
        ((rank, offset),) = places
        return Placed(rank, View(sizes, steps, origin, flat_steps, offset))
    starts = tuple([rank * SPAN + offset for rank, offset in places])
    return Placed(0, View(sizes, steps, origin, flat_steps, starts[0]), starts)


# -- collectives -------------------------------------------------------------------------------------------------------


def all_gather(peers: Peers, x: Tensor, out: Tensor, dim: int) -> Tensor:
    """`all_gather(peers, x, out, dim) -> out`: rank r's x is chunk r of out, which is cut along `dim` as `torch.chunk` does."""
    return _exchanged(peers, _gather(tuple(out.shape), dim, peers.rank, peers.size), x, out)


def all_to_all(peers: Peers, x: Tensor, out: Tensor, src: int, dst: int) -> Tensor:
    """`all_to_all(peers, x, out, src, dst) -> out`: of a tensor cut along `src`, x is a chunk; of the same cut along `dst`, out."""
    whole = [*x.shape]
    whole[src] = out.shape[src]
    return _exchanged(peers, _turn(tuple(whole), src, dst, peers.rank, peers.size), x, out)


def reduce_scatter(peers: Peers, x: Tensor, out: Tensor, dim: int, scale: float | None = None) -> Tensor:
    """`reduce_scatter(peers, x, out, dim) -> out`: this rank's chunk, along `dim`, of the sum of all x; cast to out's dtype."""
    return _exchanged(peers, _scatter(tuple(x.shape), dim, peers.rank, peers.size), x, out, scale)


def _exchanged(peers: Peers, ways: tuple[Pack, Pull], x: Tensor, out: Tensor, scale: float | None = None) -> Tensor:
    pack, pull = ways
    exchange(peers, [pack], [x], [pull], [out], x.dtype, scale)
    return out


@lru_cache(maxsize=1024)
def _gather(whole: tuple[int, ...], dim: int, rank: int, size: int) -> tuple[Pack, Pull]:
    chunks = _chunks(whole, dim, size)
    mine = box_shape(chunks[rank])
    return _packed(mine, [full_box(mine)]), Pull(whole, {box: [(r, 0)] for r, box in enumerate(chunks)}, "sum")


@lru_cache(maxsize=1024)
def _turn(whole: tuple[int, ...], src: int, dst: int, rank: int, size: int) -> tuple[Pack, Pull]:
    if (src - dst) % len(whole) == 0:
        raise ValueError(f"all_to_all from dim {src} to dim {dst} of {len(whole)}: the dims must differ")
    given = [box_shape(box) for box in _chunks(whole, src, size)]
    wanted = box_shape(_chunks(whole, dst, size)[rank])
    sources = {
        box: [(r, _start(given[r], dst, rank, size))] for r, box in enumerate(_chunks(wanted, src, size)) if box_size(box)
    }
    return _packed(given[rank], _chunks(given[rank], dst, size)), Pull(wanted, sources, "sum")


@lru_cache(maxsize=1024)
def _scatter(whole: tuple[int, ...], dim: int, rank: int, size: int) -> tuple[Pack, Pull]:
    chunks = _chunks(whole, dim, size)
    mine, start = box_shape(chunks[rank]), _start(whole, dim, rank, size)
    return _packed(whole, chunks), Pull(mine, {full_box(mine): [(r, start) for r in range(size)]}, "sum")


def _chunks(shape: Sequence[int], dim: int, parts: int) -> list[Box]:
    """The boxes of `torch.chunk`, with empty ones at the end."""
    if not -len(shape) <= dim < len(shape):
        raise IndexError(f"dim {dim} of a tensor of shape {tuple(shape)}: it has {len(shape)} dims")
    dim %= len(shape)
    step = -(-shape[dim] // parts)
    cuts = [(min(i * step, shape[dim]), min((i + 1) * step, shape[dim])) for i in range(parts)]
    box = full_box(shape)
    return [(*box[:dim], cut, *box[dim + 1 :]) for cut in cuts]


def _packed(shape: Sequence[int], boxes: Sequence[Box]) -> Pack:
    """One after the other, at the start of a buffer that may be longer."""
    return compile_pack(shape, boxes, list(accumulate(map(box_size, boxes[:-1]), initial=0)))


def _start(shape: Sequence[int], dim: int, number: int, parts: int) -> int:
    """Where chunk `number` of the tensor begins as `_packed` lays chunks out."""
    return sum(map(box_size, _chunks(shape, dim, parts)[:number]))


# -- the definition, on the tensors of all ranks -----------------------------------------------------------------------


def reference_sum(xs: Sequence[Tensor]) -> Tensor:
    """`reference_sum(xs) -> sum`: in the order given, not rounded: float32 for 16-bit floats."""
    total = widened(xs[0])
    for x in xs[1:]:
        total = total + widened(x)
    return total


def reference_all_reduce(xs: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """`reference_all_reduce(xs, dtype) -> out`: what both all-reduces write on every rank, in out's dtype."""
    return reference_sum(xs).to(xs[0].dtype).to(dtype)


def reference_add_norm(x: Tensor, epilogue: AddNorm, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`reference_add_norm(x, epilogue, dtype) -> (added, out)`: what the epilogue makes of a sum."""
    added = (widened(x) + widened(epilogue.residual)).to(epilogue.added.dtype)
    wide = widened(added)
    root = torch.rsqrt(wide.square().mean(-1, keepdim=True) + epilogue.eps)
    return added, (wide * root * widened(epilogue.weight)).to(dtype)


def reference_pull(staged: Sequence[Tensor], pull: Pull, out: Tensor, scale: float | None = None) -> Tensor:
    """`reference_pull(staged, pull, out) -> out`: from the staging areas of all ranks; sums, as they are used here."""
    for box, places in pull.sources.items():
        parts = [staged[rank][offset:][: box_size(box)].view(box_shape(box)) for rank, offset in places]
        combined = reference_sum(parts) if len(parts) > 1 else parts[0]
        out[slices(box)] = combined if scale is None else scaled(combined, scale)
    return out


# -- several ranks on one device ---------------------------------------------------------------------------------------


def simulated_peers(size: int, nbytes: int, device: torch.device | str, spins: int = 1 << 20) -> list[Peers]:
    """`simulated_peers(size, nbytes, device) -> one Peers for each rank`, all in this process, on one device.

    For tests and measurements on one accelerator: each rank's operations on a stream of its own, or all-reduces of all ranks
    in one launch (`symmetric_triton.launch_all_reduce(..., ranks=size)`). All programs of all ranks must fit on it together.
    """
    memory = torch.zeros(size, nbytes + PAD_BYTES, dtype=torch.uint8, device=device)  # which each rank's buffer keeps
    epochs = torch.zeros(size, MAX_PROGRAMS, dtype=torch.int32, device=device)
    error = torch.zeros(size, size, dtype=torch.int32, pin_memory=memory.is_cuda)
    buffers = torch.tensor([x.data_ptr() for x in memory], device=device)
    return [Peers(r, size, memory[r, :nbytes], buffers, buffers + nbytes, epochs[r], error[r], spins) for r in range(size)]
