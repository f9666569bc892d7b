"""Triton kernels on memory that several ranks read: barriers and all-reduces.

Pulls are `strided_triton.move_rows`.

    barrier       signal every peer's same program, wait for its signal
    all_reduce    x -> own region; barrier; sum over the peers' regions -> (own region; barrier;
                  peers' regions ->) epilogue -> out, as numbers or, a half to a quarter of the
                  bytes, as the codes and scales of `quantize.py`

For bytes moved and when it is fast see the package's docstring. Peers' memory is read in units of
16 bytes per lane, for any length of x: regions have room for whole pieces, so only accesses of x
and `out` need a mask.
"""

# The language of kernels is not quite Python:
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launcher import NO_FUSION, KernelLauncher
from ..number_triton import cast, widened
from ..quantize_format import LARGEST
from ..quantize_triton import encoded, units_of
from ..strided_triton import AT_ONCE
from ..strided_views import UNIT, next_power_of_two
from .epilogue import AddNorm, AsRecord, Epilogue, record_of
from .peers import MAX_PROGRAMS, MAX_RANKS, Peers

THREADS = 512
# By default the compiler may limit itself to 64 registers, too few for the loads in flight.
OPTIONS: dict[str, Any] = (
    {"num_warps": THREADS // 64}
    if torch.version.hip
    else {"num_warps": THREADS // 32, "maxnreg": 128}
)
PROGRAMS = tl.constexpr(MAX_PROGRAMS)
SLOTS = tl.constexpr(MAX_RANKS)
EPOCHS = tl.constexpr(1 << 30)


@triton.jit
def signal_and_wait(pads, error, me, epoch, spins, SIZE: tl.constexpr, PEERS: tl.constexpr):
    """Signal the same program of every rank that this one has reached `epoch`, and wait.

    It waits until each has reached it.

    What any thread wrote before is visible to every thread of the peers after: the debug barriers
    extend one thread's release and acquire, in the scope of the system, to the program. Epochs are
    counted modulo EPOCHS; their difference shows which is behind.
    """
    peer = tl.arange(0, PEERS)
    known = peer < SIZE
    epoch = epoch % EPOCHS
    slot = tl.program_id(0) * SLOTS
    peer_pads = tl.load(pads + peer, mask=known, other=0).to(tl.pointer_type(tl.int32)) + slot + me
    own_pads = tl.load(pads + me).to(tl.pointer_type(tl.int32)) + slot + peer
    tl.debug_barrier()
    tl.atomic_xchg(peer_pads, epoch, mask=known, sem="release", scope="sys")
    late = known
    missing, polls = SIZE, 0
    while (missing > 0) & (polls < spins):
        reached = tl.atomic_add(own_pads, 0, mask=known, sem="acquire", scope="sys")
        late = known & (((reached - epoch) & (EPOCHS - 1)) >= EPOCHS // 2)
        missing = tl.sum(late.to(tl.int32))
        polls += 1
    tl.debug_barrier()
    tl.store(error + peer, 1, mask=late)
    return missing == 0


@triton.jit
def advanced(epoch, arrived):
    """Return the epoch two barriers later; after a failure the next odd number, which stays."""
    return tl.where(arrived, (epoch + 2) % EPOCHS, epoch | 1)


@triton.jit
def barrier(pads, epochs, error, rank, spins, SIZE: tl.constexpr, PEERS: tl.constexpr):
    epoch = tl.load(epochs)
    if (epoch & 1) == 0:
        arrived = signal_and_wait(pads, error, rank, epoch + 1, spins, SIZE, PEERS)
        tl.store(epochs, advanced(epoch, arrived))


@triton.jit
def region_of(buffers, peer, start, like):
    """Return the start of a region of a peer, as a pointer of the type of `like`."""
    return (
        tl.multiple_of(tl.load(buffers + peer).to(tl.pointer_type(like.dtype.element_ty)), 16)
        + start
    )


@triton.jit
def summed(buffers, start, lane, held, like, size, SIZE: tl.constexpr, AT_ONCE: tl.constexpr):
    """Return the sum of a piece over all ranks, in their order.

    Rounded to the dtype of x, so that two shots equal one.

    `size` is SIZE at run time: the compiler does not unroll a loop over it, which for many ranks
    would need too many registers.
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
    """Write the residual sum of a row and return its norm, in float32."""
    value = widened(value) + widened(tl.load(residual + at + lane, mask=inside))
    value = cast(value, added.dtype.element_ty)
    tl.store(added + at + lane, value, mask=inside)
    value = tl.where(inside, widened(value), 0.0)
    root = tl.rsqrt(tl.div_rn(tl.sum(value * value), PIECE * 1.0) + eps)
    return value * root * widened(tl.load(weight + lane, mask=inside))


@triton.jit
def store_record(
    record,
    value,
    at,
    n,
    LANES: tl.constexpr,
    PIECE: tl.constexpr,
    BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,
    LARGEST: tl.constexpr,
):
    """Write a piece as codes and scales into the record of all n elements.

    `value` is 0 after the last of them.

    The program of the last piece pads the scales to a multiple of 16 bytes.
    """
    code, scale = encoded(
        tl.reshape(widened(value), (LANES // BLOCK, BLOCK // VECTOR, VECTOR)), LARGEST
    )
    first, local = at // BLOCK, tl.arange(0, LANES // BLOCK)
    left = tl.cdiv(n - at, BLOCK)  # blocks from here on
    inside = (local < PIECE // BLOCK) & (local < left)
    tl.store(
        record + at + (local[:, None, None] * BLOCK + units_of(BLOCK, 1, VECTOR)),
        code,
        mask=inside[:, None, None],
    )
    scales = (record + (first + left) * BLOCK).to(tl.pointer_type(tl.float32)) + first
    tl.store(scales + local, scale, mask=inside)
    behind = left + tl.arange(0, 4)
    tl.store(
        scales + behind,
        0.0,
        mask=(first + behind < tl.cdiv(first + left, 4) * 4) & (n - at <= PIECE),
    )


@triton.jit
def finished(
    value,
    out,
    residual,
    added,
    weight,
    at,
    lane,
    n,
    eps,
    LANES: tl.constexpr,
    PIECE: tl.constexpr,
    NORM: tl.constexpr,
    LARGEST: tl.constexpr,
    BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """Apply the epilogue to a piece: residual sum and norm of a row; cast, or write a record."""
    inside = (lane < PIECE) & (lane < n - at)
    result = normed(value, residual, added, weight, at, lane, inside, eps, PIECE) if NORM else value
    if BLOCK:
        result = tl.where(inside, cast(result, value.dtype), 0.0)
        store_record(out, result, at, n, LANES, PIECE, BLOCK, VECTOR, LARGEST)
    else:
        tl.store(out + at + lane, cast(result, out.dtype.element_ty), mask=inside)


@triton.jit
def all_reduce(
    x,
    out,
    residual,
    added,
    weight,
    buffers,
    pads,
    epochs,
    error,
    n,
    out_n,
    rank,
    size,
    spins,
    region,
    room,
    eps,
    SIZE: tl.constexpr,
    PEERS: tl.constexpr,
    LANES: tl.constexpr,
    PIECE: tl.constexpr,
    STRIDE: tl.constexpr,
    AT_ONCE: tl.constexpr,
    TWO_SHOT: tl.constexpr,
    NORM: tl.constexpr,
    LARGEST: tl.constexpr,
    BLOCK: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """Reduce the pieces p, p + programs, ... in program p.

    In each round as many as its region has room for.

    The second grid axis is for ranks that one launch simulates; their tensors are consecutive.
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
            tl.store(
                own + i * STRIDE + lane,
                tl.load(x + at + lane, mask=(lane < PIECE) & (lane < n - at)),
                mask=held,
            )
        arrived = signal_and_wait(pads, error, me, epoch + 1, spins, SIZE, PEERS)
        if TWO_SHOT:  # noqa: SIM102 - a constant, and what is not
            if arrived:
                # no other rank reads these before the barrier
                for i in range((me + SIZE - program % SIZE) % SIZE, count, SIZE):
                    value = summed(buffers, start + i * STRIDE, lane, held, x, size, SIZE, AT_ONCE)
                    tl.store(own + i * STRIDE + lane, value, mask=held)
                arrived = signal_and_wait(pads, error, me, epoch + 2, spins, SIZE, PEERS)
        if arrived:
            for i in range(0, count):
                at = (first + i * programs).to(tl.int64) * PIECE
                if TWO_SHOT:
                    value = tl.load(
                        region_of(buffers, (i + program) % SIZE, start + i * STRIDE, x) + lane,
                        mask=held,
                    )
                else:
                    value = summed(buffers, start + i * STRIDE, lane, held, x, size, SIZE, AT_ONCE)
                finished(
                    value, out, residual, added, weight, at, lane, n, eps,
                    LANES, PIECE, NORM, LARGEST, BLOCK, VECTOR,
                )  # fmt: skip
        epoch = advanced(epoch, arrived)
        first += room * programs
    tl.store(epochs, epoch)


# -- launches --------------------------------------------------------------------------------------


def launch_barrier(peers: Peers) -> None:
    """`launch_barrier(peers)`: make later launches run after every peer has reached this point."""
    _barrier_launcher(peers.size)(peers.pads, peers.epochs, peers.error, peers.rank, peers.spins)


@cache
def _barrier_launcher(size: int) -> KernelLauncher:
    return KernelLauncher(barrier, (1,), {**_group(size), "num_warps": 1})


def launch_all_reduce(
    peers: Peers, x: Tensor, out: Tensor, epilogue: Epilogue | None, two_shot: bool, ranks: int = 1
) -> None:
    """`launch_all_reduce(peers, x, out, epilogue, two_shot)`: launch an all-reduce into `out`.

    Args:
        ranks: number of ranks that this launch simulates; `peers` is then the first of
            `simulated_peers`, and tensors are the contiguous stacks of all ranks' tensors (except
            the weight).
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
            f"rows of {piece} {x.dtype} need a shared buffer of "
            f"{stride * x.itemsize * 8 * MAX_PROGRAMS} bytes, and this one has "
            f"{peers.buffer.numel()}: make it larger, or reduce without this epilogue"
        )
    e = norm or AddNorm(out, out, 0.0, out)
    grid = min(MAX_PROGRAMS, -(-n // piece)), ranks
    launcher = _all_reduce_launcher(
        grid, peers.size, piece, stride, x.itemsize, two_shot, norm is not None, record_of(epilogue)
    )
    launcher(
        x,
        out,
        e.residual,
        e.added,
        e.weight,
        peers.buffers,
        peers.pads,
        peers.epochs,
        peers.error,
        n,
        out.numel() // ranks,
        peers.rank,
        peers.size,
        peers.spins,
        peers.region_bytes // x.itemsize,
        room,
        e.eps,
    )


@lru_cache(maxsize=1024)
def _all_reduce_launcher(
    grid: tuple[int, int],
    size: int,
    piece: int,
    stride: int,
    itemsize: int,
    two_shot: bool,
    has_norm: bool,
    record: AsRecord | None,
) -> KernelLauncher:
    lanes = next_power_of_two(stride)
    # As many parts of a piece as fit into a thread's 128 registers, next to the sum and the
    # epilogue.
    each = max(1, lanes // THREADS)
    at_once = max(1, min(AT_ONCE.value, 4 * (112 - 2 * each) // (each * itemsize)))
    constants: dict[str, Any] = {
        "LANES": lanes,
        "PIECE": piece,
        "STRIDE": stride,
        "AT_ONCE": at_once,
        "TWO_SHOT": two_shot,
        "NORM": has_norm,
        **_format(record, itemsize),
        **_group(size),
        **OPTIONS,
        **NO_FUSION,
    }
    return KernelLauncher(all_reduce, grid, constants)


def _format(record: AsRecord | None, itemsize: int) -> dict[str, Any]:
    """Return the constants of the record format, for 16 bytes per thread; zeros without one."""
    if record is None:
        return {"LARGEST": 0, "BLOCK": 0, "VECTOR": 0}
    return {"LARGEST": LARGEST[record.transport], "BLOCK": record.block, "VECTOR": UNIT // itemsize}


def _group(size: int) -> dict[str, Any]:
    return {"SIZE": size, "PEERS": next_power_of_two(size)}
