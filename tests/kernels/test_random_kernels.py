"""Random numbers drawn by the kernel are bitwise equal to their definition in torch, in one
launch.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from shardmesh.kernels import random
from shardmesh.kernels.backend import using_kernels
from shardmesh.kernels.box import Box, box_size
from shardmesh.kernels.random import distributions, philox
from shardmesh.kernels.random.elementary import over, sqrt
from tests.kernels.device import DEVICE
from tests.kernels.test_random import BY_ELEMENT
from tests.tiers import examples

random_triton = pytest.importorskip("shardmesh.kernels.random.random_triton", exc_type=ImportError)

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
COMPLEX = (torch.complex64, torch.complex128)
WHOLE = (
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint32,
    torch.uint64,
)

Shape = tuple[int, ...]
Draw = Callable[..., torch.Tensor]  # (shape, box, seed, stream, device=) -> the part


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.cpu().contiguous().view(-1).view(torch.uint8) if x.numel() else x.cpu()


@contextmanager
def launches() -> Iterator[list[None]]:
    """Yield a list with one entry per launch inside the block."""
    found: list[None] = []

    def hook(*args: object, **named: object) -> None:
        found.append(None)

    random_triton.draw.add_pre_run_hook(hook)
    try:
        yield found
    finally:
        random_triton.draw.pre_run_hooks.remove(hook)


def check(draw: Draw, shape: Shape, box: Box, seed: int = 7, stream: int = 8) -> None:
    with using_kernels(False):
        wanted = draw(shape, box, seed, stream, device="cpu")
    with using_kernels(), launches() as launched:
        found = draw(shape, box, seed, stream, device=DEVICE)
    assert len(launched) == (1 if wanted.numel() else 0)
    assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
    assert torch.equal(bits(found), bits(wanted))


# -- any draw, anywhere ----------------------------------------------------------------------------

# 16-bit numbers overflow, and vanish.
positive = st.floats(1e-3, 1e3) | st.sampled_from([1.0, 1e-30, 1e30])
centers = st.integers(-(10**5), 10**5).map(lambda n: n / 1000) | st.just(0.0)
floats = st.sampled_from(FLOATS)


@st.composite
def uniforms(draw: st.DrawFn) -> Draw:
    low, high = sorted(draw(st.tuples(centers, centers)))
    return partial(
        random.uniform, dtype=draw(st.sampled_from((*FLOATS, *COMPLEX))), low=low, high=high
    )


@st.composite
def integers(draw: st.DrawFn) -> Draw:
    dtype = draw(st.sampled_from((*WHOLE, *FLOATS, torch.bool)))
    least, greatest = random.limits(dtype)
    low = draw(st.integers(least, greatest) | st.just(least))
    high = draw(st.integers(low, greatest) | st.just(greatest)) + 1
    return partial(random.integers, dtype=dtype, low=low, high=high)


def drawn(law: Draw, **parameters: st.SearchStrategy) -> st.SearchStrategy:
    return st.builds(partial, st.just(law), **parameters)


draws = st.one_of(
    uniforms(),
    drawn(random.normal, dtype=floats, mean=centers, std=positive | st.just(0.0)),
    drawn(random.normal, dtype=st.sampled_from(COMPLEX), std=positive),
    drawn(random.bernoulli_mask, p=st.floats(0, 1) | st.sampled_from([0.0, 1.0])),
    integers(),
    drawn(distributions.unit, part=st.integers(0, 100)),
    drawn(distributions.exponential, dtype=floats, rate=positive),
    drawn(distributions.gumbel, dtype=floats),
    drawn(distributions.cauchy, dtype=floats, median=centers, sigma=positive),
    drawn(distributions.log_normal, dtype=floats, mean=centers, std=positive),
    drawn(
        distributions.geometric,
        dtype=st.sampled_from((*WHOLE, *FLOATS)),
        p=st.floats(1e-4, 0.9999) | st.just(1e-18),
    ),
)
words = (
    st.integers(0, 2**64 - 1)
    | st.sampled_from([0, 2**32 - 1, 2**63, 2**64 - 1])
    | st.integers(2**64, 2**70)
)


@st.composite
def places(draw: st.DrawFn) -> tuple[Shape, Box]:
    """Draw a small box of 0 to 4 dims, possibly empty, of a tensor whose positions may take more
    than 32 bits.
    """
    shape, box = [], []
    for _ in range(draw(st.integers(0, 4))):
        start = draw(st.integers(0, 5) | st.just(0) | st.integers(2**12, 2**13))
        size = draw(st.integers(0, 12))
        shape.append(start + size + draw(st.integers(0, 5) | st.just(0)))
        box.append((start, start + size))
    return tuple(shape), tuple(box)


@settings(max_examples=examples(150))
@given(draws, places(), words, words)
def test_equal_to_the_definition(draw, place, seed, stream):
    check(draw, *place, seed, stream)


# -- every way of dividing the work ----------------------------------------------------------------

EVERY = {
    "uniform": partial(random.uniform, dtype=torch.float32),
    "normal 64": partial(random.normal, dtype=torch.float64),
    "bernoulli": partial(random.bernoulli_mask, p=0.3),
    "normal 16": partial(random.normal, dtype=torch.bfloat16, mean=2, std=0.1),
}
FAR = 1 << 20
PLACES = {
    "several programs": ((4099,), ((0, 4099),)),
    "begins inside a block": ((5000,), ((3, 2102),)),
    "rows of whole blocks": ((40, 64), ((3, 40), (16, 48))),
    "rows that begin inside a block": ((40, 64), ((3, 40), (17, 48))),
    "rows that begin at any word": ((40, 67), ((3, 40), (16, 48))),
    "far away": ((FAR, FAR, FAR), ((FAR - 3, FAR), (FAR // 2, FAR // 2 + 5), (FAR - 7, FAR))),
    "many dims": ((7, 5, 3, 2, 9, 3), ((1, 6), (0, 3), (1, 3), (0, 1), (2, 9), (1, 2))),
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("place", PLACES)
def test_every_kind_of_rows(name, place):
    check(EVERY[name], *PLACES[place])


@pytest.mark.parametrize("place", PLACES)
def test_more_blocks_than_32_bits_can_number(place, monkeypatch):
    monkeypatch.setattr(random_triton, "MAX_LANES", 1)
    random_triton._prepare_launch.cache_clear()
    check(EVERY["uniform"], *PLACES[place])
    random_triton._prepare_launch.cache_clear()


@pytest.mark.parametrize(
    "place", ["several programs", "begins inside a block", "rows that begin at any word"]
)
@pytest.mark.parametrize("per_block", [2, 4])
def test_nothing_else_is_written(place, per_block):
    shape, box = PLACES[place]
    end = 100 + box_size(box)
    space = torch.full((end + 2000,), 2.0, device=DEVICE)
    distribution = philox.Distribution("uniform", per_block, torch.clone, (1.0, 0.0, 0.0, 1.0))
    random_triton.launch(space[100:end], philox.rows_of(shape, box), 0, 1, distribution)
    assert space[100:end].max() <= 1
    assert (space[:100] == 2).all()
    assert (space[end:] == 2).all()


@pytest.mark.parametrize("name", BY_ELEMENT)
def test_draws_with_parameters_of_each_element(name):
    shape, box = (30, 20), ((5, 17), (3, 9))
    with using_kernels(False):
        wanted = BY_ELEMENT[name](shape, box, "cpu")
    with using_kernels(), launches() as launched:
        found = BY_ELEMENT[name](shape, box, DEVICE)
    assert launched
    assert torch.equal(bits(found), bits(wanted))


# -- what makes the bits those of every device -----------------------------------------------------


def test_roots_are_correctly_rounded():
    x = torch.rand(10_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 40
    for some in (x, x[1::3], x[0]):
        assert sqrt(some).flatten().tolist() == [math.sqrt(v) for v in some.flatten().tolist()]


def test_quotients_are_correctly_rounded():
    x = torch.rand(1000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert over(x.to(DEVICE), -0.7).tolist() == [v / -0.7 for v in x.tolist()]


def test_a_draw_is_refused_while_a_graph_is_captured(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    draw = lambda device, stop=4: random.uniform((4,), ((0, stop),), 1, 2, torch.float32, device)  # noqa: E731
    for stop in (4, 0):  # a rank without elements, too
        with (
            FakeTensorMode(),
            pytest.raises(RuntimeError, match="every replay would draw the same ones"),
        ):
            draw("cuda:0", stop)
    assert draw("cpu").shape == (4,)
