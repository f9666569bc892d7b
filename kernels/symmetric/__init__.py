"""Collectives by kernels that read the memory of the other ranks, straight into the final layout.

    all_gather,             pack -> own memory, barrier, read the boxes of `out` from the peers,
    all_to_all,             barrier
    reduce_scatter
    one_shot_all_reduce     x -> own memory, barrier, every rank sums everything it reads
    two_shot_all_reduce     x -> own memory, barrier, every rank sums its share, barrier, all read
                            all

Bytes that cross a link, for each of W ranks with N bytes: one shot (W - 1) N, two shots 2 (W - 1) /
W N, as a ring; a pull moves each byte once. Local passes over memory: all_reduce reads x and writes
out (and its copy in the shared memory) in one launch, including the epilogue, where a collective of
NCCL is followed by a kernel for the residual sum and the norm, and one that quantizes; a pull reads
each packed element once and writes it to its place, where NCCL needs a second buffer and an
unpacking pass.
Against NCCL: one shot should win where latency dominates (below some 256 KB inside a node), two
shots up to some MB, pulls where an unpacking pass is saved. That follows from counting bytes and
barriers; none of it has run on a GPU yet. `sm.topology.calibrate` measures it.

Contributions are added in the order of the group, 16-bit floats in float32, and rounded once: a
pull to the dtype of `out`, an all-reduce to that of x, so that one shot has the bits of two and an
epilogue computes what the next operations would. All ranks get the same bits.

Barriers order the accesses. At a barrier each rank signals every peer, and waits until every peer
has signalled it; what was written before a barrier is visible to every peer after it. Each program
of a launch synchronises only with the same program of the peers, so the programs of a rank may run
in any order, but all of a launch must fit on the device at once with those of a peer: there are at
most MAX_PROGRAMS of 512 threads. Every rank of the group calls the same operations in the same
order on one stream (or on streams that wait for each other).

Memory can be written again without waiting for its readers:
- All-reduces. The regions are divided among programs, each in two halves that a program uses in
  turn, one for each round (a round ends with what the program reads from its peers). Before it
  writes the half of round k again, in round k + 2, it has passed the barrier of round k + 1, which
  a peer's program reaches only after its reads of round k.
- Pulls. The staging area is written by packing before the first barrier and read before the second;
  a rank leaves the second one, and can pack again, when all ranks have reached it, hence have read.
The two areas are separate, so operations may follow each other in any order. Epochs (the number of
barriers that a program has passed) are kept in device memory: a launch has the same arguments every
time, and may be captured in a CUDA graph.

A peer that does not arrive within `spins` polls is marked in `error`; the program that waited for
it does no more, in this launch or later ones, and does not overwrite its results: a rank that
arrives late gets the right result, or an error, too.
"""

from .all_reduce import one_shot_all_reduce, two_shot_all_reduce
from .collectives import all_gather, all_to_all, reduce_scatter
from .epilogue import LONGEST_ROW, AddNorm, AsRecord, Epilogue, record_of
from .peers import (
    MAX_PROGRAMS,
    MAX_RANKS,
    PAD_BYTES,
    Peers,
    SymmetricMemoryError,
    check,
    simulated_peers,
)
from .pull import Place, Pull, compile_pull, exchange, pull_many
from .reference import reference_add_norm, reference_all_reduce, reference_pull, reference_sum

__all__ = [
    "LONGEST_ROW",
    "MAX_PROGRAMS",
    "MAX_RANKS",
    "PAD_BYTES",
    "AddNorm",
    "AsRecord",
    "Epilogue",
    "Peers",
    "Place",
    "Pull",
    "SymmetricMemoryError",
    "all_gather",
    "all_to_all",
    "check",
    "compile_pull",
    "exchange",
    "one_shot_all_reduce",
    "pull_many",
    "record_of",
    "reduce_scatter",
    "reference_add_norm",
    "reference_all_reduce",
    "reference_pull",
    "reference_sum",
    "simulated_peers",
    "two_shot_all_reduce",
]
