"""The kernels' machine code: wide accesses to memory, no spilled registers, registers that leave
room for other programs.

Everything that a call launches is compiled for sm_90 and gfx942 (`compiled.py`); nothing runs.
"""

import re

import pytest

from tests.kernels.compiled import (
    ALIGNED,
    ALL_REDUCES,
    BUCKETS,
    CALLS,
    CASTS,
    DEQUANTIZE,
    DRAWS,
    EVEN_TILES,
    PULLS,
    QUANTIZE,
    RECORDS,
    SUMS,
    TILES,
    UNEVEN,
    WIDE,
    Assembly,
    assemblies,
)
from tests.tiers import slow

pytestmark = pytest.mark.xdist_group("assembly")  # one worker of `pytest -n` compiles

# Bits at a time in which what a table holds is loaded; the cache has it.
TABLES = {"sm_90": {64}, "gfx942": {32, 64}}
COPIES = {**ALIGNED, **BUCKETS, **WIDE}
# of 65,536 for all threads: with 80, six programs of 128 threads are on a multiprocessor at a time
MOST_REGISTERS = {
    **dict.fromkeys(CALLS, 128),
    **dict.fromkeys({**COPIES, **CASTS, **DRAWS}, 80),
    **dict.fromkeys(SUMS, 104),
    # 512 threads, of which an Nvidia GPU takes 128 and one of AMD 256 at most.
    **dict.fromkeys(RECORDS, 160),
}


@pytest.fixture(params=["sm_90", slow("gfx942")])
def target(request: pytest.FixtureRequest) -> str:
    if assemblies(request.param) is None:
        pytest.skip(f"this Triton does not compile for {request.param}")
    return request.param


def launched(target: str, name: str) -> list[Assembly]:
    """Return the launches of the call."""
    return (assemblies(target) or {})[name]


def only(target: str, name: str) -> Assembly:
    """Return the only launch of the call."""
    (launch,) = launched(target, name)
    return launch


# -- registers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CALLS)
def test_register_usage(target, name):
    assert launched(target, name)
    for launch in launched(target, name):
        assert launch.local == 0
        assert launch.registers <= MOST_REGISTERS[name]


# -- accesses to memory ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", {**COPIES, **CASTS, **SUMS})
def test_accesses_are_16_bytes_wide(target, name):
    launch = only(target, name)
    assert set(launch.stores) == {128}
    assert set(launch.loads) - TABLES[target] == {128}


@pytest.mark.parametrize("name", COPIES)
def test_copies_load_as_wide_as_they_store(target, name):
    launch = only(target, name)
    assert launch.loads[128] >= launch.stores[128]


@pytest.mark.parametrize("name", UNEVEN)
def test_uneven_rows_have_enough_loads_in_flight(target, name):
    launch = only(target, name)
    assert sum(bits * count for bits, count in launch.stores.items()) >= 256  # of each thread


def test_uneven_rows_of_2_bytes_are_moved_8_bytes_at_a_time(target):
    """All but the elements before the first whole word of a run and after the last."""
    launch = only(target, "uneven torch.bfloat16")
    assert launch.loads[64] >= 2 * launch.stores[64] >= 8
    assert launch.loads[16] <= 2
    assert launch.stores[16] <= 2


@pytest.mark.parametrize("name", EVEN_TILES)
def test_tiles_read_and_write_16_bytes(target, name):
    launch = only(target, name)
    assert set(launch.stores) == {128}
    # Of which 8 lie together where they are read.
    assert 128 in launch.loads or name == "runs of 1 byte"
    assert set(launch.loads) <= TABLES[target] | {64, 128}


@pytest.mark.parametrize("name", QUANTIZE)
def test_quantization_reads_16_bytes_and_writes_as_many_codes(target, name):
    launch = only(target, name)
    assert set(launch.loads) - TABLES[target] == {128}
    assert set(launch.stores) == {64, 32}  # codes of 8 elements, and scales


@pytest.mark.parametrize("name", DEQUANTIZE)
def test_dequantization_writes_16_bytes(target, name):
    launch = only(target, name)
    assert set(launch.stores) == {128}
    assert set(launch.loads) <= TABLES[target] | {32, 64, 128}


@pytest.mark.parametrize("name", DRAWS)
def test_draws_are_stored_together(target, name):
    (width,) = only(target, name).stores
    assert width >= (32 if name == "bernoulli" else 64)


@pytest.mark.parametrize("name", {**ALL_REDUCES, **RECORDS, **PULLS})
def test_memory_of_peers_is_read_16_bytes_at_a_time(target, name):
    for launch in launched(target, name):
        if launch.kernel != "barrier":
            assert 128 in launch.loads
            assert set(launch.loads) <= {32, 64, 128}  # narrow ones: tables, epochs
            # Epochs and flags; codes.
            assert set(launch.stores) <= {32, 128} | ({64} if name in RECORDS else set())


@pytest.mark.parametrize("name", RECORDS)
def test_codes_are_stored_8_at_a_time(target, name):
    launch = only(target, name)
    assert launch.stores[64] == launch.arguments["LANES"] // (512 * 8)


# -- arithmetic ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CALLS)
def test_every_rounding_equals_torch(target, name):
    for launch in launched(target, name):
        assert not launch.fuses or launch.kernel == "barrier"  # which has no arithmetic
        # Where the kernel itself asks for one, which rounds nothing.
        if target == "sm_90" and name not in {**QUANTIZE, **RECORDS}:
            assert launch.those(r"fma\..*") == []


@pytest.mark.parametrize("name", {**QUANTIZE, **DEQUANTIZE, **DRAWS})
def test_no_approximate_instructions(name):
    launch = only("sm_90", name)
    assert launch.those(r"\w+\.(approx|full)\..*") == []


# -- barriers --------------------------------------------------------------------------------------

# A barrier makes what all threads of a program did before it happen before what one of them does
# after it.
BARRIER = {"sm_90": r"bar\.sync|barrier\.sync.*", "gfx942": r"s_barrier"}
RELEASE = {"sm_90": r"atom\.(global\.)?sys\.(global\.)?release\..*", "gfx942": r"buffer_wbl2"}
ACQUIRE = {"sm_90": r"atom\.(global\.)?sys\.(global\.)?acquire\..*", "gfx942": r"buffer_inv"}


@pytest.mark.parametrize("name", {**ALL_REDUCES, **RECORDS, **PULLS})
def test_writes_before_a_barrier_are_visible_after_it(target, name):
    barriers = [launch for launch in launched(target, name) if launch.those(RELEASE[target])]
    assert len(barriers) == (2 if name in PULLS else 1)
    for launch in barriers:
        order = [
            kind_of(target, one)
            for one in launch.those("|".join([BARRIER[target], RELEASE[target], ACQUIRE[target]]))
        ]
        rounds = 2 if "two shots" in name else 1
        assert order.count("release") == rounds
        assert order.count("acquire") >= rounds
        # Which is one wave, and needs no barrier.
        if target == "sm_90" or launch.kernel != "barrier":
            assert all(order[i - 1] == "barrier" for i, one in enumerate(order) if one == "release")
            assert order[-1] == "barrier"


def kind_of(target: str, instruction: str) -> str:
    kinds = {"barrier": BARRIER, "release": RELEASE, "acquire": ACQUIRE}
    return next(
        kind for kind, patterns in kinds.items() if re.fullmatch(patterns[target], instruction)
    )


# -- the calls themselves --------------------------------------------------------------------------


def test_cases_launch_the_kernels_in_their_names(target):
    for name in WIDE:
        assert only(target, name).arguments["WIDE"]
    assert only(target, "pack of many").arguments["SRC_MANY"]
    assert only(target, "unpack of 200").arguments["DST_MANY"]
    assert only(target, "unpack of 200").arguments["ROWS"] >= 128
    assert {launched(target, name)[0].kernel for name in TILES} == {"move_tiles"}
    assert {only(target, name).kernel for name in {**COPIES, **CASTS, **SUMS, **UNEVEN}} == {
        "move_rows"
    }
