"""Collectives over shared memory, on processes that share CPU memory, compared with their
definition on all ranks' tensors.
"""

from __future__ import annotations

import ctypes
import random
import time
from dataclasses import dataclass, fields
from typing import Any

import pytest
import torch
from torch import Tensor

from shardmesh.kernels import symmetric
from shardmesh.kernels.box import Box, box_size, full_box
from shardmesh.kernels.quantize import compile_quantize, record_bytes
from shardmesh.kernels.symmetric import (
    PAD_BYTES,
    AddNorm,
    AsRecord,
    Epilogue,
    Peers,
    SymmetricMemoryError,
)
from tests.kernels.shared_memory import WORKERS, SharedMemoryRanks, set_pause
from tests.tiers import slow

pytestmark = pytest.mark.xdist_group("shared memory")  # one worker of `pytest -n` has the processes

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
PIECE = 1 << 13  # bytes that a program adds up at a time


@pytest.fixture(scope="module", autouse=True)
def _workers():
    yield
    WORKERS.close()


def values(seed: int, shape: Any, dtype: torch.dtype) -> Tensor:
    """Return numbers whose sum depends on the order of addition, zeros of both signs and
    infinities.
    """
    made = torch.Generator().manual_seed(seed)
    if not dtype.is_floating_point:
        return torch.randint(0, 100, shape, generator=made).to(dtype)
    x = torch.randn(shape, generator=made) * torch.randint(1, 1000, shape, generator=made)
    flat = x.view(-1)
    flat[::7] = 0.0
    flat[::14] = -0.0
    flat[3::97] = torch.inf
    return x.to(dtype)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(raw(a), raw(b))


def raw(x: Tensor) -> Tensor:
    return x.contiguous().view(-1).view(torch.uint8)


def all_reduce(
    peers: Peers, two_shot: bool, x: Tensor, out: Tensor, epilogue: Epilogue | None = None
) -> Tensor:
    run = symmetric.two_shot_all_reduce if two_shot else symmetric.one_shot_all_reduce
    return run(peers, x, out, epilogue)


def use_programs(count: int) -> None:
    """Limit the grid to this many programs for the rest of the process, to test several rounds with
    little work.
    """
    from shardmesh.kernels.symmetric import symmetric_triton

    symmetric_triton.MAX_PROGRAMS = count


# -- all_reduce ------------------------------------------------------------------------------------

CASES = [
    (torch.float32, (1,), torch.float32),
    (torch.float32, (2, 1500), torch.float32),
    (torch.bfloat16, (3, 3001), torch.bfloat16),
    (torch.bfloat16, (130,), torch.float32),
    (torch.float16, (5, 7), torch.float16),
    (torch.float32, (40,), torch.bfloat16),
    (torch.int32, (9,), torch.int32),
]


def check_all_reduces(peers: Peers, programs: int) -> list[str]:
    use_programs(programs)
    wrong = []
    for seed, (dtype, shape, out_dtype) in enumerate(CASES):
        xs = [values(100 * seed + r, shape, dtype) for r in range(peers.size)]
        wanted = symmetric.reference_all_reduce(xs, out_dtype)
        for two_shot in (False, True):
            x = xs[peers.rank].clone()
            # In place, too.
            out = x if out_dtype == dtype and seed % 2 else torch.empty(shape, dtype=out_dtype)
            if not same_bits(all_reduce(peers, two_shot, x, out), wanted):
                wrong.append(f"{dtype} {shape} {out_dtype} two_shot={two_shot}")
    return wrong


@pytest.mark.parametrize("size", [slow(1), slow(2), 3, slow(4), slow(8)])
def test_all_ranks_get_the_same_bits(size):
    """Equal to the definition, so one-shot and two-shot are equal too."""
    with SharedMemoryRanks(size) as ranks:
        assert ranks(check_all_reduces, 2) == [[]] * size


def check_rounds(peers: Peers) -> list[bool]:
    use_programs(2)
    x = [values(r, (5 * PIECE // 4 + 3,), torch.float32) for r in range(peers.size)]
    wanted = symmetric.reference_all_reduce(x, torch.float32)
    return [
        same_bits(all_reduce(peers, two, x[peers.rank], torch.empty_like(wanted)), wanted)
        for two in (False, True)
    ]


@pytest.mark.parametrize("pieces", [1, 2])
def test_tensors_larger_than_the_memory(pieces):
    """6 pieces on 2 programs whose regions hold 1 or 2: three or two rounds."""
    with SharedMemoryRanks(3, nbytes=8 * symmetric.MAX_PROGRAMS * PIECE * pieces) as ranks:
        assert ranks(check_rounds) == [[True] * 2] * 3


# -- all_reduce, residual sum and norm -------------------------------------------------------------


@dataclass(frozen=True)
class Norm:
    rows: int
    columns: int
    dtype: torch.dtype
    residual: torch.dtype
    out: torch.dtype


NORMS = [
    Norm(7, 96, torch.bfloat16, torch.bfloat16, torch.bfloat16),
    Norm(2, 1001, torch.float32, torch.float32, torch.float32),
    Norm(3, 33, torch.float16, torch.float16, torch.float16),
    Norm(1, 64, torch.bfloat16, torch.float32, torch.bfloat16),
]


def finite(x: Tensor) -> Tensor:
    return torch.where(x.isfinite(), x, 0)


def normed(peers: Peers, n: Norm, seed: int, two_shot: bool) -> tuple[Tensor, Tensor]:
    use_programs(2)
    x = finite(values(seed + peers.rank, (n.rows, n.columns), n.dtype))
    added = values(seed - 1, (n.rows, n.columns), n.residual)
    weight = values(seed - 2, (n.columns,), n.out)
    added = finite(added)
    out = torch.empty(n.rows, n.columns, dtype=n.out)
    all_reduce(peers, two_shot, x, out, AddNorm(added, finite(weight), 1e-5, added))
    return added, out


def both_normed(peers: Peers) -> list[tuple[Tensor, Tensor]]:
    return [
        normed(peers, n, 1000 * i, two_shot)
        for i, n in enumerate(NORMS)
        for two_shot in (False, True)
    ]


def wanted_norm(n: Norm, seed: int, size: int) -> tuple[Tensor, Tensor]:
    """Compute the norm in float64, except for the roundings in the definition."""
    xs = [finite(values(seed + r, (n.rows, n.columns), n.dtype)) for r in range(size)]
    residual = finite(values(seed - 1, (n.rows, n.columns), n.residual))
    weight = finite(values(seed - 2, (n.columns,), n.out))
    added = (symmetric.reference_all_reduce(xs, torch.float32) + residual.float()).to(n.residual)
    wide = added.double()
    return added, wide * (wide.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight.double()


@pytest.mark.parametrize("size", [2, 3, slow(8)])
def test_residual_sum_and_norm(size):
    with SharedMemoryRanks(size) as ranks:
        found = ranks(both_normed)
    for i, n in enumerate(NORMS):
        added, out = wanted_norm(n, 1000 * i, size)
        every = [reply[2 * i + two] for reply in found for two in (0, 1)]
        assert all(same_bits(got_added, added) for got_added, _ in every)
        assert all(same_bits(got, every[0][1]) for _, got in every)
        torch.testing.assert_close(
            every[0][1].double(), out, rtol=2 * torch.finfo(n.out).eps, atol=1e-6
        )


def test_definition_of_the_norm_equals_torch():
    x, residual, weight = torch.randn(4, 64), torch.randn(4, 64), torch.randn(64)
    added, out = symmetric.reference_add_norm(
        x, AddNorm(residual, weight, 1e-5, residual), torch.float32
    )
    torch.testing.assert_close(out, torch.nn.functional.rms_norm(x + residual, (64,), weight, 1e-5))
    assert torch.equal(added, x + residual)


# -- all_reduce, as a record -----------------------------------------------------------------------

# blocks and scales that end anywhere in a piece; each after larger ones, which leave something in
# the memory
RECORDS = [
    ((3, 3001), torch.bfloat16, AsRecord("int8")),
    ((2, 2049), torch.float32, AsRecord("fp8", block=1024)),
    ((5, 128), torch.float16, AsRecord("fp8")),
    ((1,), torch.float32, AsRecord("int8", block=1024)),
    ((40,), torch.bfloat16, AsRecord("int8", block=16)),
    ((0,), torch.float32, AsRecord("fp8")),
]
NORMED_RECORDS = [
    ((5, 128), torch.bfloat16, AsRecord("fp8")),
    ((3, 384), torch.float32, AsRecord("int8")),
    ((2, 48), torch.float16, AsRecord("fp8", block=16)),
]


def record(x: Tensor, how: AsRecord) -> Tensor:
    """Return the specification: the record that a separate launch quantizes from x."""
    return compile_quantize(x.shape, [full_box(x.shape)], how.transport, block=how.block)(x)


def check_records(peers: Peers) -> list[str]:
    use_programs(2)
    wrong = []
    for seed, (shape, dtype, how) in enumerate(RECORDS):
        xs = [values(100 * seed + r, shape, dtype) for r in range(peers.size)]
        xs[0].view(-1)[5::89] = torch.nan
        wanted = record(symmetric.reference_all_reduce(xs, dtype), how)
        for two_shot in (False, True):
            out = torch.full((record_bytes(xs[0].numel(), how.block),), 0xAB, dtype=torch.uint8)
            if not same_bits(all_reduce(peers, two_shot, xs[peers.rank], out, how), wanted):
                wrong.append(f"{dtype} {shape} {how} two_shot={two_shot}")
    return wrong


def check_normed_records(peers: Peers) -> list[str]:
    """Return the cases whose records differ from the codes of the values that the same epilogue
    writes.
    """
    use_programs(2)
    wrong = []
    for seed, (shape, dtype, how) in enumerate(NORMED_RECORDS):
        x, residual = (finite(values(100 * seed + r, shape, dtype)) for r in (peers.rank, 98))
        weight = finite(values(100 * seed + 99, shape[1:], dtype))
        for two_shot in (False, True):
            numbers, added, also_added = torch.empty(3, *shape, dtype=dtype)
            out = torch.full((record_bytes(x.numel(), how.block),), 0xAB, dtype=torch.uint8)
            all_reduce(peers, two_shot, x, numbers, AddNorm(residual, weight, 1e-5, added))
            all_reduce(peers, two_shot, x, out, AddNorm(residual, weight, 1e-5, also_added, how))
            if not (same_bits(out, record(numbers, how)) and same_bits(added, also_added)):
                wrong.append(f"{dtype} {shape} {how} two_shot={two_shot}")
    return wrong


@pytest.mark.parametrize("size", [slow(1), slow(2), 3])
def test_quantized_sum_equals_quantizing_the_sum(size):
    """In one round and in several: regions hold one piece."""
    with SharedMemoryRanks(size, nbytes=8 * symmetric.MAX_PROGRAMS * PIECE) as ranks:
        assert ranks(check_records) == [[]] * size
        assert ranks(check_normed_records) == [[]] * size


# -- pull ------------------------------------------------------------------------------------------

# Uneven on 4 ranks, with one that has nothing of 9 rows on 8, and runs of every length.
WHOLE = (7, 6, 9)
MOVED = (torch.float32, torch.bfloat16, torch.int8, torch.bool, torch.complex64)


def chunk(x: Tensor, dim: int, r: int, size: int) -> Tensor:
    step = -(-x.shape[dim] // size)
    start = min(r * step, x.shape[dim])
    return x.narrow(dim, start, min(step, x.shape[dim] - start)).contiguous()


def check_moves(peers: Peers) -> list[str]:
    wrong = []
    for dim, dtype in [*((d, MOVED[d]) for d in range(3)), (-1, MOVED[3]), (1, MOVED[4])]:
        whole = values(dim, WHOLE, dtype)
        mine = chunk(whole, dim, peers.rank, peers.size)
        turned = torch.empty(WHOLE[::-1], dtype=dtype).permute(2, 1, 0)
        for out in [torch.empty(WHOLE, dtype=dtype), turned][: 2 if dim == 1 else 1]:
            if not same_bits(symmetric.all_gather(peers, mine, out, dim), whole):
                wrong.append(f"all_gather {dim} {dtype} {out.stride()}")
        dst = (dim + 1) % 3
        wanted = chunk(whole, dst, peers.rank, peers.size)
        if not same_bits(
            symmetric.all_to_all(peers, mine, torch.empty_like(wanted), dim, dst), wanted
        ):
            wrong.append(f"all_to_all {dim} {dst} {dtype}")
    return wrong


def check_reductions(peers: Peers) -> list[str]:
    wrong = []
    cases = [
        (0, torch.float32, None),
        (1, torch.bfloat16, 0.125),
        (2, torch.float16, None),
        (0, torch.int64, None),
    ]
    for dim, dtype, scale in cases:
        xs = [values(r, WHOLE, dtype) for r in range(peers.size)]
        for out_dtype in {dtype, torch.float32}:
            total = symmetric.reference_sum([chunk(x, dim, peers.rank, peers.size) for x in xs])
            wanted = (total if scale is None else total * scale).to(out_dtype)
            out = symmetric.reduce_scatter(
                peers, xs[peers.rank], torch.empty_like(wanted), dim, scale
            )
            if not same_bits(out, wanted):
                wrong.append(f"reduce_scatter {dim} {dtype} -> {out_dtype}")
    return wrong


@pytest.mark.parametrize("size", [1, slow(2), slow(3), 4, slow(8)])
def test_straight_into_the_final_layout(size):
    with SharedMemoryRanks(size, nbytes=1 << 16) as ranks:
        assert ranks(check_moves) == [[]] * size
        assert ranks(check_reductions) == [[]] * size


def cut(box: Box, at: random.Random) -> list[Box]:
    """Return the box split into pieces of any size."""
    dim = at.randrange(len(box))
    (start, stop) = box[dim]
    if box_size(box) < 20 or stop - start < 2:
        return [box]
    middle = at.randrange(start + 1, stop)
    parts = [(*box[:dim], ends, *box[dim + 1 :]) for ends in ((start, middle), (middle, stop))]
    return [piece for part in parts for piece in cut(part, at)]


def check_any_boxes(peers: Peers, seed: int) -> bool:
    """Check different boxes on each rank, from any peers and places; ranks agree only on the
    staging areas.
    """
    staged = [values(seed + r, (500,), torch.bfloat16) for r in range(peers.size)]
    peers.staging(torch.bfloat16)[:500] = staged[peers.rank]
    at = random.Random(1000 * seed + peers.rank)
    shape = (at.randint(1, 6), at.randint(1, 8), at.randint(1, 9))

    def places(box: Box) -> list[tuple[int, int]]:
        ranks = sorted(at.sample(range(peers.size), at.randint(1, peers.size)))
        return [(r, at.randint(0, 500 - box_size(box))) for r in ranks]

    pull = symmetric.compile_pull(shape, {box: places(box) for box in cut(full_box(shape), at)})
    scale, dtype = at.choice([None, 0.5]), at.choice([torch.bfloat16, torch.float32])
    out, wanted = torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)
    symmetric.pull_many(peers, [pull], [out], torch.bfloat16, scale)
    return same_bits(out, symmetric.reference_pull(staged, pull, wanted, scale))


def test_any_boxes_from_any_peers():
    with SharedMemoryRanks(4, nbytes=1 << 16) as ranks:
        for seed in range(8):
            assert ranks(check_any_boxes, seed) == [True] * 4


# -- call after call -------------------------------------------------------------------------------


def check_many_calls(peers: Peers, calls: int, seed: int) -> list[int]:
    """Check operations and sizes in turn, with a rank that is slow at critical points: after
    synchronizing and before reading.
    """
    use_programs(2)
    alike, own = random.Random(seed), random.Random(seed * 100 + peers.rank)
    set_pause(lambda: own.choice([0.0] * 9 + [0.02]))
    wrong = []
    for call in range(calls):
        length = alike.choice([3, 50, 64, 3000])
        xs = [values(call * 10 + r, (length,), torch.float32) for r in range(peers.size)]
        wanted = symmetric.reference_all_reduce(xs, torch.float32)
        mine = xs[peers.rank]
        how = alike.choice("112p")
        if how == "p":
            wanted = chunk(wanted, 0, peers.rank, peers.size)
            out = symmetric.reduce_scatter(peers, mine, torch.empty_like(wanted), 0)
        else:
            out = all_reduce(peers, how == "2", mine, torch.empty_like(wanted))
        if not same_bits(out, wanted):
            wrong.append(call)
    return wrong


@pytest.mark.parametrize("calls", [50, slow(200)])
def test_many_calls_with_slow_ranks(calls):
    with SharedMemoryRanks(3) as ranks:
        assert ranks(check_many_calls, calls, 5) == [[]] * 3


def start_at(peers: Peers, epoch: int) -> None:
    peers.epochs.fill_(epoch)
    slots = symmetric.PAD_BYTES // 4
    own = (ctypes.c_int32 * slots).from_address(int(peers.pads[peers.rank]))
    own[:] = [epoch] * slots


def test_epochs_may_overflow():
    from shardmesh.kernels.symmetric.symmetric_triton import EPOCHS

    with SharedMemoryRanks(2) as ranks:
        ranks(start_at, EPOCHS.value - 4)
        assert ranks(check_many_calls, 6, 1) == [[]] * 2


# -- a rank that does not come ---------------------------------------------------------------------


def small_sum(peers: Peers, two_shot: bool = False) -> list[float]:
    x = torch.full((4,), 10.0**peers.rank)
    return all_reduce(peers, two_shot, x, torch.empty(4)).tolist()


def small_gather(peers: Peers) -> list[float]:
    return symmetric.all_gather(peers, torch.ones(2), torch.empty(2 * peers.size), 0).tolist()


def impatient(size: int) -> SharedMemoryRanks:
    """Return ranks with a timeout of a second or two."""
    return SharedMemoryRanks(size, nbytes=1 << 22, spins=400, poll_s=4e-3)


@pytest.mark.parametrize(
    ("call", "args"), [slow(small_sum, (False,)), (small_sum, (True,)), (small_gather, ())]
)
def test_a_missing_rank_is_named_on_all_others(call, args):
    with impatient(4) as ranks:
        ranks(call, *args)
        for _ in range(2):  # the second time without waiting
            replies = ranks(call, *args, without=[2])
            for rank in (0, 1, 3):
                assert isinstance(replies[rank], SymmetricMemoryError)
                assert f"rank 2 of the group of 4 did not arrive: rank {rank} polled" in str(
                    replies[rank]
                )


def test_several_missing_ranks_are_named():
    with impatient(3) as ranks:
        (error, *_) = ranks(small_sum, without=[1, 2])
        assert "ranks 1, 2 of the group of 3 did not arrive" in str(error)


def late_sum(peers: Peers) -> Any:
    """Call all_reduce on rank 1 after rank 0 has timed out, which rank 0 writes to the end of its
    buffer.
    """
    given_up = ctypes.c_uint8.from_address(int(peers.buffers[0]) + peers.buffer.numel() - 1)
    if peers.rank == 0:
        try:
            return small_sum(peers)
        finally:
            given_up.value = 1
    while not given_up.value:
        time.sleep(0.01)
    first = small_sum(peers)
    try:
        return first, small_sum(peers)
    except SymmetricMemoryError as error:
        return first, str(error)


def test_late_rank_gets_the_correct_result_and_then_an_error():
    """A rank that gave up has not written to its memory."""
    with impatient(2) as ranks:
        punctual, (first, then) = ranks(late_sum)
        assert isinstance(punctual, SymmetricMemoryError)
        assert first == [11.0] * 4
        assert "rank 0 of the group of 2 did not arrive" in then


def launches_after_giving_up(peers: Peers, two_shot: bool) -> tuple[list[float], list[int], bool]:
    """Run launches after a timeout, as an accelerator does with work queued before the host
    noticed.
    """
    from shardmesh.kernels.symmetric.symmetric_triton import launch_all_reduce, launch_barrier

    with pytest.raises(SymmetricMemoryError):
        small_sum(peers, two_shot)
    peers.error.zero_()
    before, out = peers.buffer.clone(), torch.full((4,), 7.0)
    launch_all_reduce(peers, torch.ones(4), out, None, two_shot)
    launch_barrier(peers)
    return out.tolist(), peers.error.tolist(), torch.equal(peers.buffer, before)


@pytest.mark.parametrize("two_shot", [False, True])
def test_rank_that_gave_up_does_nothing_more(two_shot):
    """It writes nothing and waits for no rank: otherwise the error would be raised again."""
    with impatient(2) as ranks:
        assert ranks(launches_after_giving_up, two_shot, without=[1])[0] == (
            [7.0] * 4,
            [0, 0],
            True,
        )


# -- what is refused -------------------------------------------------------------------------------


@pytest.fixture
def alone() -> Peers:
    return symmetric.simulated_peers(1, 1 << 16, "cpu")[0]


def test_mismatched_tensors_raise(alone):
    x, weight = torch.ones(2, 3), torch.ones(3)
    for out in (torch.ones(3, 2), torch.ones(3, 2).T, torch.ones(2, 3, dtype=torch.int8)):
        with pytest.raises(ValueError, match="out is torch"):
            symmetric.one_shot_all_reduce(alone, x, out)
    with pytest.raises(ValueError, match=r"weight of shape \(2,\) for rows of 3"):
        symmetric.one_shot_all_reduce(alone, x, x, AddNorm(x, weight[:2], 1e-5, x))
    with pytest.raises(ValueError, match=r"residual is torch.float32 of shape \(3,\)"):
        symmetric.one_shot_all_reduce(alone, x, x, AddNorm(weight, weight, 1e-5, x))


def test_invalid_records_raise(alone):
    x, out = torch.ones(2, 24), torch.empty(record_bytes(48), dtype=torch.uint8)
    with pytest.raises(ValueError, match="unknown transport 'int4'"):
        AsRecord("int4")
    with pytest.raises(ValueError, match="blocks of 100 elements"):
        AsRecord("int8", block=100)
    longer = torch.empty(len(out) + 16, dtype=torch.uint8)
    for given in (
        torch.ones(2, 24),
        longer,
        longer[1:][: len(out)],
        longer.view(-1, 2)[:, 0][: len(out)],
    ):
        with pytest.raises(
            ValueError, match=r"of \(2, 24\) needs it contiguous, uint8 of shape \(144,\)"
        ):
            symmetric.one_shot_all_reduce(alone, x, given, AsRecord("int8"))
    with pytest.raises(ValueError, match=r"AsRecord.* of torch.int32: float16"):
        symmetric.two_shot_all_reduce(alone, x.int(), out, AsRecord("int8"))
    with pytest.raises(ValueError, match=r"rows of 24 in AsRecord.*: a block would span two rows"):
        symmetric.two_shot_all_reduce(alone, x, out, AddNorm(x, x[0], 1e-5, x, AsRecord("int8")))


def test_too_small_memory_raises(alone):
    x = torch.ones(2, 3000)
    with pytest.raises(ValueError, match="need a shared buffer of 6160384 bytes"):
        symmetric.one_shot_all_reduce(alone, x, x, AddNorm(x, x[0], 1e-5, x))
    with pytest.raises(ValueError, match="needs a contiguous buffer"):
        symmetric.all_gather(alone, torch.ones(1 << 16), torch.ones(1 << 16), 0)


def test_invalid_pulls_raise(alone):
    with pytest.raises(
        ValueError, match=r"a pull of shape \(4,\) was given a tensor of shape \(5,\)"
    ):
        symmetric.pull_many(
            alone, [symmetric.compile_pull((4,), {})], [torch.ones(5)], torch.float32
        )
    with pytest.raises(ValueError, match=r"torch.int8 cannot be combined, scaled or cast"):
        symmetric.all_gather(alone, torch.ones(2, dtype=torch.int8), torch.ones(2), 0)
    with pytest.raises(ValueError, match="float64 cannot be scaled"):
        symmetric.reduce_scatter(alone, *[torch.ones(2, dtype=torch.float64)] * 2, 0, 0.3)
    with pytest.raises(ValueError, match="complex128 cannot be pulled from peers"):
        symmetric.all_gather(alone, *[torch.ones(2, dtype=torch.complex128)] * 2, 0)
    with pytest.raises(ValueError, match="the dims must differ"):
        symmetric.all_to_all(alone, torch.ones(2, 2), torch.ones(2, 2), 1, -1)
    with pytest.raises(IndexError, match="dim 2 of a tensor"):
        symmetric.all_gather(alone, torch.ones(2, 2), torch.ones(2, 2), 2)


def test_invalid_memory_raises():
    peers = symmetric.simulated_peers(2, 1 << 12, "cpu")[0]
    given = {field.name: getattr(peers, field.name) for field in fields(peers) if field.init}
    assert Peers(**given).region_bytes == 0
    for change, text in [
        ({"rank": 2}, "rank 2 of a group of 2"),
        (
            {"error": torch.zeros(1, dtype=torch.int32)},
            r"error is torch.int32 of shape \(1,\): give torch.int32 of shape \(2,\)",
        ),
        ({"buffer": torch.zeros(64, dtype=torch.uint8)[1:]}, "buffer is torch.uint8"),
    ]:
        with pytest.raises(ValueError, match=text):
            Peers(**given | change)


# -- all ranks on one device -----------------------------------------------------------------------


def test_simulated_ranks_use_all_of_their_memory():
    memory = symmetric.simulated_peers(2, 1 << 12, "cpu")[1]
    storage = memory.buffer.untyped_storage()
    for addresses, nbytes in ((memory.buffers, 1 << 12), (memory.pads, PAD_BYTES)):
        assert storage.data_ptr() <= int(addresses.min())
        assert int(addresses.max()) + nbytes <= storage.data_ptr() + storage.nbytes()


def on_one_gpu(size: int, monkeypatch: pytest.MonkeyPatch, spins: int = 1 << 20) -> list[Peers]:
    """Return ranks whose programs, at most one per multiprocessor, run on the device
    concurrently.
    """
    from shardmesh.kernels.symmetric import symmetric_triton

    most = torch.cuda.get_device_properties(0).multi_processor_count // size
    monkeypatch.setattr(symmetric_triton, "MAX_PROGRAMS", min(most, symmetric.MAX_PROGRAMS))
    return symmetric.simulated_peers(size, 1 << 24, "cuda", spins)


@pytest.mark.gpu
@pytest.mark.parametrize("two_shot", [False, True])
@pytest.mark.parametrize("size", [2, 4, 8])
def test_one_launch_for_all_ranks(size, two_shot, monkeypatch):
    from shardmesh.kernels.symmetric.symmetric_triton import launch_all_reduce

    ranks = on_one_gpu(size, monkeypatch)
    for call, length in enumerate([1, 1000, 1 << 16, (1 << 20) + 3, 64] * 10):
        dtype = FLOATS[call % 3]
        xs = [values(call * 10 + r, (length,), dtype).cuda() for r in range(size)]
        out = torch.empty(size, length, dtype=dtype, device="cuda")
        launch_all_reduce(ranks[0], torch.stack(xs), out, None, two_shot, ranks=size)
        torch.cuda.synchronize()
        for peers in ranks:
            symmetric.check(peers)
            assert same_bits(out[peers.rank], symmetric.reference_all_reduce(xs, dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("transport", ["int8", "fp8"])
def test_records_of_all_ranks_in_one_launch(transport, monkeypatch):
    from shardmesh.kernels.symmetric.symmetric_triton import launch_all_reduce

    ranks = on_one_gpu(4, monkeypatch)
    for length in (1, 4097, 1 << 18):
        x = torch.stack([values(r, (length,), torch.bfloat16) for r in range(4)]).cuda()
        wanted = record(
            symmetric.reference_all_reduce(list(x), torch.bfloat16), AsRecord(transport)
        )
        for two_shot in (False, True):
            out = torch.empty(4, len(wanted), dtype=torch.uint8, device="cuda")
            launch_all_reduce(ranks[0], x, out, AsRecord(transport), two_shot, ranks=4)
            torch.cuda.synchronize()
            for peers in ranks:
                symmetric.check(peers)
                assert same_bits(out[peers.rank], wanted)


@pytest.mark.gpu
def test_norms_of_all_ranks_in_one_launch(monkeypatch):
    from shardmesh.kernels.symmetric.symmetric_triton import launch_all_reduce

    ranks = on_one_gpu(4, monkeypatch)
    x, residual = torch.randn(2, 4, 100, 4096, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(4096, device="cuda", dtype=torch.bfloat16)
    found = []
    for two_shot in (False, True):
        out, added = torch.empty_like(x), torch.empty_like(x)
        launch_all_reduce(
            ranks[0], x, out, AddNorm(residual, weight, 1e-5, added), two_shot, ranks=4
        )
        torch.cuda.synchronize()
        found.append((out, added))
    total = symmetric.reference_all_reduce(list(x), torch.bfloat16)
    for r, peers in enumerate(ranks):
        symmetric.check(peers)
        wanted = symmetric.reference_add_norm(
            total, AddNorm(residual[r], weight, 1e-5, residual[r]), torch.bfloat16
        )
        for out, added in found:
            assert same_bits(added[r], wanted[0])
            assert same_bits(out[r], found[0][0][r])
            torch.testing.assert_close(out[r], wanted[1])


@pytest.mark.gpu
def test_pulls_on_a_stream_for_each_rank(monkeypatch):
    xs = [values(r, (64, 96), torch.bfloat16).cuda() for r in range(4)]
    wanted = symmetric.reference_sum(xs).to(torch.bfloat16)
    streams = [torch.cuda.Stream() for _ in xs]
    outs = [torch.empty(64, 24, dtype=torch.bfloat16, device="cuda") for _ in xs]
    torch.cuda.synchronize()
    # First to have the kernels compiled and loaded, which may wait for those that run.
    for spins in (16, 1 << 20):
        ranks = on_one_gpu(4, monkeypatch, spins)
        for peers, stream, x, out in zip(ranks, streams, xs, outs, strict=True):
            with torch.cuda.stream(stream):
                symmetric.reduce_scatter(peers, x, out, 1)
        torch.cuda.synchronize()
    for peers, out in zip(ranks, outs, strict=True):
        symmetric.check(peers)
        assert same_bits(out, wanted[:, 24 * peers.rank :][:, :24])
