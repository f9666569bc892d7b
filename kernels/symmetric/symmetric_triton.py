"""Kernels on memory that several ranks read: meetings and all-reduces. (Pulls are `strided_triton.move_rows`.)

    meeting       tell every peer's same program, wait for it
    all_reduce    x -> own region; meet; sum over the peers' regions -> (own region; meet; peers' regions ->) epilogue -> out,
                  as numbers or, a half to a quarter of the bytes, as the codes and scales of `quantize.py`

Bytes moved and when it wins: `symmetric.py`. Peers' memory is read in units of 16 bytes for each lane, whatever the length of
x: regions have room for whole pieces, so that only x and `out` need a mask that knows it.
"""

# The language of kernels is not quite Python:
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..number_triton import cast, widened
from ..quantize_format import LARGEST
from ..quantize_triton import encoded, units_of
from ..strided_triton import AT_ONCE, NO_FUSION
from ..strided_views import UNIT, next_power_of_two
from .epilogue import AddNorm, Epilogue, record_of
from .peers import MAX_PROGRAMS, MAX_RANKS, Peers

THREADS = 512
# What the compiler takes by itself may be 64 registers, and then not all fit.
OPTIONS: dict[str, Any] = {"num_warps": THREADS // 64} if torch.version.hip else {"num_warps": THREADS // 32, "maxnreg": 128}
PROGRAMS = tl.constexpr(MAX_PROGRAMS)
SLOTS = tl.constexpr(MAX_RANKS)
EPOCHS = tl.constexpr(1 << 30)


@triton.jit
def meet(pads, error, me, epoch, spins, SIZE: tl.constexpr, PEERS: tl.constexpr):
    """Tells the same program of every rank that this one has come to `epoch`, and waits for each to come to it, too.

    What any thread wrote before is seen by every thread of the peers after: the barriers make one thread's release and
    acquire, in the scope of the system, count for the program. Epochs are counted modulo EPOCHS, and their distance tells
    which is behind.
    """
    peer = tl.arange(0, PEERS)
    known = peer < SIZE
    epoch = epoch % EPOCHS
    slot = tl.program_id(0) * SLOTS
    theirs = tl.load(pads + peer, mask=known, other=0).to(tl.pointer_type(tl.int32)) + slot + me
    mine = tl.load(pads + me).to(tl.pointer_type(tl.int32)) + slot + peer
    tl.debug_barrier()
    tl.atomic_xchg(theirs, epoch, mask=known, sem="release", scope="sys")
    late = known
    missing, looks = SIZE, 0
    while (missing > 0) & (looks < spins):
        told = tl.atomic_add(mine, 0, mask=known, sem="acquire", scope="sys")
        late = known & (((told - epoch) & (EPOCHS - 1)) >= EPOCHS // 2)
        missing = tl.sum(late.to(tl.int32))
        looks += 1
    tl.debug_barrier()
    tl.store(error + peer, 1, mask=late)
    return missing == 0


@triton.jit
def advanced(epoch, arrived):
    """Two meetings further, or one, to an odd number, which stands for "failed" and stays."""
    return tl.where(arrived, (epoch + 2) % EPOCHS, epoch | 1)


@triton.jit
def meeting(pads, epochs, error, rank, spins, SIZE: tl.constexpr, PEERS: tl.constexpr):
    epoch = tl.load(epochs)
    if (epoch & 1) == 0:
        arrived = meet(pads, error, rank, epoch + 1, spins, SIZE, PEERS)
        tl.store(epochs, advanced(epoch, arrived))


@triton.jit
def region_of(buffers, peer, start, like):
    """Where a region of a peer begins, as a pointer like the given one."""
    return tl.multiple_of(tl.load(buffers + peer).to(tl.pointer_type(like.dtype.element_ty)), 16) + start


@triton.jit
def summed(buffers, start, lane, held, like, size, SIZE: tl.constexpr, AT_ONCE: tl.constexpr):
    """The sum of a piece over all ranks, in their order; rounded to the dtype of x, so that two shots are as one.

    `size` is SIZE: a number that the compiler does not know keeps it from loading all at once where that is too much.
    """
    total = widened(tl.load(region_of(buffers, 0, start, like) + lane, mask=held))
    if SIZE <= AT_ONCE:
        for peer in tl.static_range(1, SIZE):
            total += widened(tl.load(region_of(buffers, peer, start, like) + lane, mask=held))
    else:
        for peer in tl.range(1, size, loop_unroll_factor=AT_ONCE):
            total += widened(tl.load(region_of(buffers, peer, start, like) + lane, mask=held))
    return cast(total, like.dtype.element_ty)


@triton.jit
def normed(value, residual, added, weight, at, lane, inside, eps, PIECE: tl.constexpr):
    """Residual sum, which is written, and norm of a row; in float32."""
    value = widened(value) + widened(tl.load(residual + at + lane, mask=inside))
    value = cast(value, added.dtype.element_ty)
    tl.store(added + at + lane, value, mask=inside)
    value = tl.where(inside, widened(value), 0.0)
    root = tl.rsqrt(tl.div_rn(tl.sum(value * value), PIECE * 1.0) + eps)
    return value * root * widened(tl.load(weight + lane, mask=inside))


@triton.jit
def store_record(
    record, value, at, n, LANES: tl.constexpr, PIECE: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr,
    LARGEST: tl.constexpr,
):  # fmt: skip
    """A piece as codes and scales, in their places of the record of all n elements; `value` is 0 behind the last of them.

    The scales are filled up to a multiple of 16 bytes by the program that has the last piece.
    """
    code, scale = encoded(tl.reshape(widened(value), (LANES // BLOCK, BLOCK // VECTOR, VECTOR)), LARGEST)
    first, local = at // BLOCK, tl.arange(0, LANES // BLOCK)
    left = tl.cdiv(n - at, BLOCK)  # blocks from here on
    inside = (local < PIECE // BLOCK) & (local < left)
    tl.store(record + at + (local[:, None, None] * BLOCK + units_of(BLOCK, 1, VECTOR)), code, mask=inside[:, None, None])
    scales = (record + (first + left) * BLOCK).to(tl.pointer_type(tl.float32)) + first
    tl.store(scales + local, scale, mask=inside)
    behind = left + tl.arange(0, 4)
    tl.store(scales + behind, 0.0, mask=(first + behind < tl.cdiv(first + left, 4) * 4) & (n - at <= PIECE))


@triton.jit
def finished(
    value, out, residual, added, weight, at, lane, n, eps,
    LANES: tl.constexpr, PIECE: tl.constexpr, NORM: tl.constexpr, LARGEST: tl.constexpr, BLOCK: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """The epilogue on one piece: residual sum and norm of a row; cast, or record of the result in x's dtype."""
    inside = (lane < PIECE) & (lane < n - at)
    result = normed(value, residual, added, weight, at, lane, inside, eps, PIECE) if NORM else value
    if BLOCK:
        result = tl.where(inside, cast(result, value.dtype), 0.0)
        store_record(out, result, at, n, LANES, PIECE, BLOCK, VECTOR, LARGEST)
    else:
        tl.store(out + at + lane, cast(result, out.dtype.element_ty), mask=inside)


@triton.jit
def all_reduce(
    x, out, residual, added, weight, buffers, pads, epochs, error, n, out_n, rank, size, spins, region, room, eps,
    SIZE: tl.constexpr, PEERS: tl.constexpr, LANES: tl.constexpr, PIECE: tl.constexpr, STRIDE: tl.constexpr,
    AT_ONCE: tl.constexpr, TWO_SHOT: tl.constexpr, NORM: tl.constexpr, LARGEST: tl.constexpr, BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,
):  # fmt: skip
    """Program p works on the pieces p, p + programs, ...: as many in a round as its region has room for.

    The second grid axis is for ranks that one launch simulates, whose tensors lie one after the other.
    """
    program, programs, simulated = tl.program_id(0), tl.num_programs(0), tl.program_id(1)
    me, shift = rank + simulated, simulated.to(tl.int64) * n
    x, residual, added = x + shift, residual + shift, added + shift
    out += simulated.to(tl.int64) * out_n
    epochs, error = epochs + simulated * PROGRAMS + program, error + simulated * SIZE
    lane = tl.arange(0, LANES)
    held = lane < STRIDE
    pieces = tl.cdiv(n, PIECE)
    epoch = tl.load(epochs)
    first = program
    while (first < pieces) & ((epoch & 1) == 0):
        start = (program * 2 + ((epoch >> 1) & 1)).to(tl.int64) * region
        count = tl.minimum(room, tl.cdiv(pieces - first, programs))
        own = region_of(buffers, me, start, x)
        for i in range(0, count):
            at = (first + i * programs).to(tl.int64) * PIECE
            tl.store(own + i * STRIDE + lane, tl.load(x + at + lane, mask=(lane < PIECE) & (lane < n - at)), mask=held)
        arrived = meet(pads, error, me, epoch + 1, spins, SIZE, PEERS)
        if TWO_SHOT:  # noqa: SIM102 - a constant, and what is not
            if arrived:
                for i in range((me + SIZE - program % SIZE) % SIZE, count, SIZE):  # read by nobody else before the meeting
                    value = summed(buffers, start + i * STRIDE, lane, held, x, size, SIZE, AT_ONCE)
                    tl.store(own + i * STRIDE + lane, value, mask=held)
                arrived = meet(pads, error, me, epoch + 2, spins, SIZE, PEERS)
        if arrived:
            for i in range(0, count):
                at = (first + i * programs).to(tl.int64) * PIECE
                if TWO_SHOT:
                    value = tl.load(region_of(buffers, (i + program) % SIZE, start + i * STRIDE, x) + lane, mask=held)
                else:
                    value = summed(buffers, start + i * STRIDE, lane, held, x, size, SIZE, AT_ONCE)
                finished(
                    value, out, residual, added, weight, at, lane, n, eps,
                    LANES, PIECE, NORM, LARGEST, BLOCK, VECTOR,
                )  # fmt: skip
        epoch = advanced(epoch, arrived)
        first += room * programs
    tl.store(epochs, epoch)


# -- launches ----------------------------------------------------------------------------------------------------------


def launch_meeting(peers: Peers) -> None:
    """`launch_meeting(peers)`: what is launched later runs after every peer has come here."""
    meeting[1,](peers.pads, peers.epochs, peers.error, peers.rank, peers.spins, **_group(peers), num_warps=1)


def launch_all_reduce(
    peers: Peers, x: Tensor, out: Tensor, epilogue: Epilogue | None, two_shot: bool, ranks: int = 1
) -> None:
    """`launch_all_reduce(peers, x, out, epilogue, two_shot)`.

    Args:
        ranks: how many this launch is for, `peers` being the first of `symmetric.simulated_peers`; tensors are then the
            contiguous stack of all ranks' tensors (except the weight).
    """
    n = x.numel() // ranks
    if not n:
        return
    norm = epilogue if isinstance(epilogue, AddNorm) else None
    piece = x.shape[-1] if norm else THREADS * UNIT // x.itemsize
    stride = -(-piece // UNIT) * UNIT
    room = peers.region_bytes // (stride * x.itemsize)
    if not room:
        raise ValueError(
            f"rows of {piece} {x.dtype} need a shared buffer of {stride * x.itemsize * 8 * MAX_PROGRAMS} bytes, "
            f"and this one has {peers.buffer.numel()}: make it larger, or reduce without this epilogue"
        )
    e = norm or AddNorm(out, out, 0.0, out)
    lanes = next_power_of_two(stride)
    constants: dict[str, Any] = {
        "LANES": lanes, "PIECE": piece, "STRIDE": stride, "AT_ONCE": _at_once(lanes, x.itemsize),
        "TWO_SHOT": two_shot, "NORM": norm is not None, **_format(epilogue, x.itemsize),
        **_group(peers), **OPTIONS, **NO_FUSION,
    }  # fmt: skip
    all_reduce[min(MAX_PROGRAMS, -(-n // piece)), ranks](
        x, out, e.residual, e.added, e.weight, peers.buffers, peers.pads, peers.epochs, peers.error,
        n, out.numel() // ranks, peers.rank, peers.size, peers.spins, peers.region_bytes // x.itemsize, room, e.eps, **constants,
    )  # fmt: skip


def _format(epilogue: Epilogue | None, itemsize: int) -> dict[str, Any]:
    """Of the record as which the result leaves, with 16 bytes of it for a thread at a time; zeros where there is none."""
    record = record_of(epilogue)
    if record is None:
        return {"LARGEST": 0, "BLOCK": 0, "VECTOR": 0}
    return {"LARGEST": LARGEST[record.transport], "BLOCK": record.block, "VECTOR": UNIT // itemsize}


def _at_once(lanes: int, itemsize: int) -> int:
    """Parts of a piece that fit into a thread's 128 registers together, beside the piece's sum and its epilogue."""
    each = max(1, lanes // THREADS)
    return max(1, min(AT_ONCE.value, 4 * (112 - 2 * each) // (each * itemsize)))


def _group(peers: Peers) -> dict[str, Any]:
    return {"SIZE": peers.size, "PEERS": next_power_of_two(peers.size)}
