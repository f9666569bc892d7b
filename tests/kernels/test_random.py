"""Philox against its published vectors, boxes against slices of the whole, and the
distributions.
"""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardmesh.kernels.box import full_box, slices
from shardmesh.kernels.random import (
    bernoulli_mask,
    box_index,
    distributions,
    draw,
    integers,
    normal,
    philox,
    philox4x32,
    philox_uint32,
    uniform,
)
from shardmesh.kernels.random.elementary import exp

ONES = 0xFFFFFFFF
KNOWN_ANSWERS = [  # Random123, tests/kat_vectors: philox4x32 10
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES,) * 4, (ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]
DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
        ],
    ),
]
SEED, STREAM = 0x1234_5678_9ABC_DEF0, 0xFEDC_BA98_7654_3210
DRAWS = {
    "uniform f32": lambda shape, box, device="cpu": uniform(
        shape, box, SEED, STREAM, torch.float32, device
    ),
    "uniform f64": lambda shape, box, device="cpu": uniform(
        shape, box, SEED, STREAM, torch.float64, device, -3, 5
    ),
    "uniform f16": lambda shape, box, device="cpu": uniform(
        shape, box, SEED, STREAM, torch.float16, device, 1, 2
    ),
    "uniform bf16": lambda shape, box, device="cpu": uniform(
        shape, box, SEED, STREAM, torch.bfloat16, device
    ),
    "uniform c64": lambda shape, box, device="cpu": uniform(
        shape, box, SEED, STREAM, torch.complex64, device
    ),
    "normal f32": lambda shape, box, device="cpu": normal(
        shape, box, SEED, STREAM, torch.float32, device
    ),
    "normal f64": lambda shape, box, device="cpu": normal(
        shape, box, SEED, STREAM, torch.float64, device, 2, 0.1
    ),
    "normal bf16": lambda shape, box, device="cpu": normal(
        shape, box, SEED, STREAM, torch.bfloat16, device
    ),
    "normal c128": lambda shape, box, device="cpu": normal(
        shape, box, SEED, STREAM, torch.complex128, device
    ),
    "bernoulli": lambda shape, box, device="cpu": bernoulli_mask(
        shape, box, SEED, STREAM, 0.3, device
    ),
    "integers i64": lambda shape, box, device="cpu": integers(
        shape, box, SEED, STREAM, -(2**40), 2**50, torch.int64, device
    ),
    "exponential f32": lambda shape, box, device="cpu": distributions.exponential(
        shape, box, SEED, STREAM, torch.float32, device, 0.5
    ),
    "exponential f64": lambda shape, box, device="cpu": distributions.exponential(
        shape, box, SEED, STREAM, torch.float64, device, 2.0
    ),
    "gumbel f64": lambda shape, box, device="cpu": distributions.gumbel(
        shape, box, SEED, STREAM, torch.float64, device
    ),
    "cauchy f64": lambda shape, box, device="cpu": distributions.cauchy(
        shape, box, SEED, STREAM, torch.float64, device, 1.0, 2.0
    ),
    "log-normal f64": lambda shape, box, device="cpu": distributions.log_normal(
        shape, box, SEED, STREAM, torch.float64, device, 1.0, 2.0
    ),
    "geometric i64": lambda shape, box, device="cpu": distributions.geometric(
        shape, box, SEED, STREAM, torch.int64, device, 1e-3
    ),
    "integers u8": lambda shape, box, device="cpu": integers(
        shape, box, SEED, STREAM, 3, 256, torch.uint8, device
    ),
}


def counted(shape, box, device, mean):
    """Return parameters that grow with the position from 0 to twice the mean, and numbers drawn
    with them.
    """
    rate = box_index(shape, box, device).to(torch.float64) * (2 * mean / max(1, math.prod(shape)))
    return rate, lambda part: distributions.unit(shape, box, SEED, 1, part, device)


def binomial(shape, box, device="cpu"):
    p, units = counted(shape, box, device, 0.5)
    return distributions.binomial(torch.full_like(p, 100), p, units)


BY_ELEMENT = {
    "poisson of 0 to 10": lambda shape, box, device="cpu": distributions.poisson(
        *counted(shape, box, device, 5.0)
    ),
    "poisson of 0 to 1000": lambda shape, box, device="cpu": distributions.poisson(
        *counted(shape, box, device, 500.0)
    ),
    "bernoulli by element": lambda shape, box, device="cpu": distributions.bernoulli(
        *counted(shape, box, device, 0.5)
    ),
    "binomial": binomial,
}
EVERY = {**DRAWS, **BY_ELEMENT}


def whole(draw, n, *args, stream=0, seed=0, device="cpu"):
    """Return n numbers of one draw as a numpy array."""
    return draw((n,), ((0, n),), seed, stream, *args, device).numpy()


def ks_distance(sample, cdf):
    """Return the Kolmogorov-Smirnov distance: the largest difference between sample and true
    distribution.
    """
    x, n = np.sort(sample), len(sample)
    theory = cdf(x)
    return max(
        np.abs(theory - np.arange(n) / n).max(), np.abs(theory - np.arange(1, n + 1) / n).max()
    )


def ks_limit(n):
    """Return the distance that a correct sample exceeds for one seed in a million: 2 exp(-2 x**2) =
    1e-6.
    """
    return 2.69 / math.sqrt(n)


def normal_cdf(x):
    return 0.5 * (1 + torch.erf(torch.from_numpy(x.astype(np.float64)) / math.sqrt(2)).numpy())


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN_ANSWERS)
@pytest.mark.parametrize("device", DEVICES)
def test_known_answers(counter, key, words, device):
    assert philox4x32(counter, key) == words
    tensors = [torch.tensor([word], device=device) for word in counter]
    assert [int(word) for word in philox4x32(tensors, key)] == list(words)


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN_ANSWERS)
def test_an_index_is_a_word_of_a_block(counter, key, words):
    block = counter[0] | counter[1] << 32
    if block < 2**61:
        index = torch.arange(4) + 4 * block
        stream, seed = counter[2] | counter[3] << 32, key[0] | key[1] << 32
        assert philox_uint32(seed, stream, index).tolist() == list(words)


@given(st.integers(0, 2**61 - 1), st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))
def test_tensors_and_ints_agree(block, stream, seed):
    words = philox4x32(
        (block & ONES, block >> 32, stream & ONES, stream >> 32), (seed & ONES, seed >> 32)
    )
    assert philox_uint32(seed, stream, torch.arange(4) + 4 * block).tolist() == list(words)


def test_seeds_and_streams_are_taken_modulo_two_to_the_64():
    index = torch.arange(8)
    assert torch.equal(philox_uint32(-1, -2, index), philox_uint32(2**64 - 1, 2**64 - 2, index))


def test_words_are_the_blocks_in_order_whatever_the_shape_of_the_index():
    index = torch.arange(24).view(2, 3, 4)
    words = philox_uint32(5, 6, index)
    assert words.shape == (2, 3, 4)
    assert torch.equal(words.flatten(), philox_uint32(5, 6, torch.arange(24)))
    assert words.min() >= 0
    assert words.max() < 2**32
    assert words.unique().numel() == 24


shapes = st.lists(st.integers(0, 9), max_size=4).map(tuple)


def box_in(shape):
    ends = [st.tuples(st.integers(0, size), st.integers(0, size)) for size in shape]
    return st.tuples(*ends).map(
        lambda box: tuple((min(interval), max(interval)) for interval in box)
    )


@given(st.data(), shapes)
def test_box_index_is_a_slice_of_all_positions(data, shape):
    box = data.draw(box_in(shape))
    positions = torch.arange(math.prod(shape)).view(shape)
    assert torch.equal(box_index(shape, box), positions[slices(box)])


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", EVERY)
@given(data=st.data())
def test_a_box_is_a_slice_of_the_whole(name, data):
    draw, shape = EVERY[name], data.draw(shapes)
    box = data.draw(box_in(shape))
    assert torch.equal(draw(shape, box), draw(shape, full_box(shape))[slices(box)])


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", EVERY)
def test_results_do_not_depend_on_tiles(name, monkeypatch):
    shape, box = (5, 7, 30), ((1, 4), (2, 6), (3, 28))
    at_once = EVERY[name](shape, box)
    for blocks in (1, 6, 16, 50):
        monkeypatch.setattr(draw, "BLOCKS_AT_ONCE_CPU", blocks)
        assert torch.equal(EVERY[name](shape, box), at_once)


@pytest.mark.parametrize("name", EVERY)
def test_numpy_and_torch_agree(name, monkeypatch):
    shape, box = (5, 7, 30), ((1, 4), (2, 6), (3, 28))
    by_numpy = EVERY[name](shape, box)
    monkeypatch.setattr(philox, "BLOCKS_IN_NUMPY", -1)
    assert torch.equal(EVERY[name](shape, box), by_numpy)


@pytest.mark.one_in(11)
@pytest.mark.parametrize("name", EVERY)
def test_results_do_not_depend_on_threads(name):
    shape = (300, 501)
    box = ((0, 300), (1, 501))
    threads = torch.get_num_threads()
    one = EVERY[name](shape, box)
    try:
        torch.set_num_threads(2 if threads == 1 else 1)
        assert torch.equal(EVERY[name](shape, box), one)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", EVERY)
def test_cuda_is_bit_equal(name):
    shape, box = (300, 1000), ((7, 290), (13, 999))
    assert torch.equal(EVERY[name](shape, box, "cuda").cpu(), EVERY[name](shape, box))


def test_a_far_corner_of_a_huge_tensor_costs_only_itself():
    shape = (2**20, 2**20, 2**20)
    box = ((2**20 - 2, 2**20), (2**19, 2**19 + 3), (2**20 - 5, 2**20))
    words = philox_uint32(1, 2, box_index(shape, box))
    drawn = uniform(shape, box, 1, 2, torch.float32, "cpu")
    assert torch.equal(drawn, (words >> 8).float() * 2**-24)


def test_the_definition_of_each_draw():
    n = 64
    words = philox_uint32(3, 4, torch.arange(2 * n))
    pairs = words.view(n, 2).tolist()
    longs = [low | high << 32 for low, high in pairs]
    assert (
        whole(uniform, n, torch.float32, seed=3, stream=4).tolist()
        == ((words[:n] >> 8) * 2.0**-24).tolist()
    )
    assert whole(uniform, n, torch.float64, seed=3, stream=4).tolist() == [
        (long >> 11) * 2.0**-53 for long in longs
    ]
    mask = bernoulli_mask((n,), ((0, n),), 3, 4, 0.25, "cpu")
    assert torch.equal(mask, words[:n] < 2**30)
    for low, high in ((0, 10), (-(2**63), 2**63), (-7, 2**45)):
        wanted = [low + (long * (high - low) >> 64) for long in longs]
        assert integers((n,), ((0, n),), 3, 4, low, high, torch.int64, "cpu").tolist() == wanted
    unsigned = integers((n,), ((0, n),), 3, 4, 2**63, 2**64, torch.uint64, "cpu").numpy().tolist()
    assert unsigned == [2**63 + (long >> 1) for long in longs]


@pytest.mark.parametrize(("dtype", "bits"), [(torch.float32, 32), (torch.float64, 53)])
def test_the_definition_of_normal(dtype, bits):
    words = philox_uint32(3, 4, torch.arange(256)).tolist()
    if dtype == torch.float64:
        words = [
            (low | high << 32) >> 11 for low, high in zip(words[::2], words[1::2], strict=True)
        ]
    wanted = []
    for m, n in zip(words[::2], words[1::2], strict=True):
        radius, angle = math.sqrt(-2 * math.log((m + 1) * 2.0**-bits)), 2 * math.pi * n * 2.0**-bits
        wanted += [radius * math.cos(angle), radius * math.sin(angle)]
    drawn = whole(normal, len(wanted), dtype, seed=3, stream=4)
    np.testing.assert_allclose(drawn, wanted, rtol=torch.finfo(dtype).eps, atol=1e-14)


@pytest.mark.parametrize(("dtype", "bits"), [(torch.float32, 32), (torch.float64, 53)])
def test_the_rarest_words_give_finite_normals(dtype, bits, monkeypatch):
    for word, radius in ((0, math.sqrt(2 * bits * math.log(2))), (ONES, 0)):
        words = torch.full((1, 1, 4), word)
        monkeypatch.setattr(draw, "philox_blocks", lambda seed, stream, block, words=words: words)
        assert normal((1,), ((0, 1),), 0, 0, dtype, "cpu").item() == pytest.approx(radius, rel=1e-6)


def test_the_definition_of_the_other_distributions():
    words = philox_uint32(3, 4, torch.arange(128)).tolist()
    longs = [low | high << 32 for low, high in zip(words[::2], words[1::2], strict=True)]
    u = [(long >> 11 | 1) * 2.0**-53 for long in longs]
    wanted = {
        distributions.unit: (lambda u: u, (0,)),
        distributions.exponential: (lambda u: -math.log(u) / 2.5, (2.5,)),
        distributions.gumbel: (lambda u: -math.log(-math.log(u)), ()),
        distributions.cauchy: (lambda u: 1 + 2 * math.tan(math.pi * (u - 0.5)), (1.0, 2.0)),
        distributions.geometric: (lambda u: 1 + math.floor(math.log(u) / math.log(0.75)), (0.25,)),
    }
    for law, (formula, parameters) in wanted.items():
        dtypes = () if law is distributions.unit else (torch.float64,)
        arguments = (
            (*parameters, "cpu") if law is distributions.unit else (*dtypes, "cpu", *parameters)
        )
        drawn = law((64,), ((0, 64),), 3, 4, *arguments)
        np.testing.assert_allclose(drawn, [formula(x) for x in u], rtol=1e-12, atol=1e-12)
    z = whole(normal, 64, torch.float64, seed=3, stream=4)
    drawn = distributions.log_normal((64,), ((0, 64),), 3, 4, torch.float64, "cpu", 0.5, 2)
    np.testing.assert_allclose(drawn, np.exp(z * 2 + 0.5), rtol=1e-14)


def test_extreme_words_give_finite_numbers(monkeypatch):
    for word in (0, ONES):
        monkeypatch.setattr(
            draw,
            "philox_blocks",
            lambda seed, stream, block, word=word: torch.full((1, 1, 4), word),
        )
        box = ((0, 1),)
        for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
            assert 0 < distributions.exponential((1,), box, 0, 0, dtype, "cpu", 1.0).item() < 40
            assert math.isfinite(distributions.gumbel((1,), box, 0, 0, dtype, "cpu").item())
        assert math.isfinite(
            distributions.cauchy((1,), box, 0, 0, torch.float64, "cpu", 0, 1).item()
        )
        assert 1 <= distributions.geometric((1,), box, 0, 0, torch.uint8, "cpu", 1e-9).item() <= 255
        assert 0 < distributions.unit((1,), box, 0, 0, 5, "cpu").item() < 1


def test_substreams_differ():
    box = ((0, 1000),)
    parts = [distributions.unit((1000,), box, 0, 1, part, "cpu") for part in range(3)]
    assert torch.cat(parts).unique().numel() == 3000
    assert torch.equal(parts[2], distributions.unit((1000,), box, 0, 1 + (2 << 40), 0, "cpu"))


def test_exp_and_log_factorial():
    x = torch.linspace(-700, 709, 100_001, dtype=torch.float64)
    np.testing.assert_allclose(exp(x), np.exp(x.numpy()), rtol=2.3e-16 * 2)
    assert exp(torch.tensor([0.0, -1e4, 1e4], dtype=torch.float64)).tolist() == [1, 0, math.inf]
    k = torch.arange(2000, dtype=torch.float64)
    np.testing.assert_allclose(
        distributions.log_factorial(k),
        [math.lgamma(i + 1) for i in range(2000)],
        rtol=3e-15,
        atol=1e-15,
    )


@pytest.mark.parametrize(
    ("n", "p", "result"), [(0, 0.5, 0), (7, 0, 0), (7, 1, 7), (10**6, 1, 10**6), (-3, 0.5, 0)]
)
def test_binomials_with_certain_outcomes(n, p, result):
    n, p = (torch.full((50,), float(v), dtype=torch.float64) for v in (n, p))
    assert set(
        distributions.binomial(
            n, p, lambda part: distributions.unit((50,), ((0, 50),), 0, 1, part, "cpu")
        ).tolist()
    ) == {result}


def test_complex_numbers_are_adjacent_real_ones():
    drawn = uniform((3, 4), full_box((3, 4)), 1, 2, torch.complex64, "cpu")
    real = uniform((3, 4, 2), full_box((3, 4, 2)), 1, 2, torch.float32, "cpu")
    assert torch.equal(torch.view_as_real(drawn), real)
    z = normal((100_000,), ((0, 100_000),), 1, 2, torch.complex64, "cpu", 0, 3)
    assert z.abs().square().mean().item() == pytest.approx(9, rel=0.02)


N = 200_000


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("stream", [0, 1, 2**40])
def test_uniform_is_uniform(dtype, stream):
    x = whole(uniform, N, dtype, stream=stream).astype(np.float64)
    assert x.min() >= 0
    assert x.max() < 1
    assert ks_distance(x, lambda x: x) < ks_limit(N)
    assert x.mean() == pytest.approx(1 / 2, abs=4 * math.sqrt(1 / 12 / N))
    assert x.var() == pytest.approx(1 / 12, abs=4 * math.sqrt(1 / 180 / N))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("stream", [0, 1, 2**40])
def test_normal_is_normal(dtype, stream):
    x = whole(normal, N, dtype, stream=stream).astype(np.float64)
    assert ks_distance(x, normal_cdf) < ks_limit(N)
    assert ks_distance(x[::2], normal_cdf) < ks_limit(N / 2)
    assert ks_distance(x[1::2], normal_cdf) < ks_limit(N / 2)
    for power, moment, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert (x**power).mean() == pytest.approx(moment, abs=4 * math.sqrt(variance / N))
    assert 3.9 < np.abs(x).max() < 6.67


def test_mean_std_low_and_high():
    z = whole(normal, 1000, torch.float64)
    np.testing.assert_array_equal(
        normal((1000,), ((0, 1000),), 0, 0, torch.float64, "cpu", 5, 2).numpy(), z * 2 + 5
    )
    u = whole(uniform, 1000, torch.float64)
    drawn = uniform((1000,), ((0, 1000),), 0, 0, torch.float64, "cpu", -1, 3).numpy()
    np.testing.assert_array_equal(drawn, u * 4 - 1)


def correlation(a, b):
    return abs(np.corrcoef(a, b)[0, 1]) * math.sqrt(len(a))


def test_adjacent_streams_seeds_and_elements_are_not_correlated():
    x = whole(uniform, N, torch.float32)
    for other in (
        whole(uniform, N, torch.float32, stream=1),
        whole(uniform, N, torch.float32, stream=2**32),
        whole(uniform, N, torch.float32, seed=1),
        whole(uniform, N, torch.float32, seed=2**32),
        *(np.roll(x, shift) for shift in (1, 2, 3, 4, 5, 8)),
    ):
        assert correlation(x, other) < 4
    z = whole(normal, N, torch.float32)
    for shift in (1, 2, 3, 4):
        assert correlation(z, np.roll(z, shift)) < 4
        assert correlation(z**2, np.roll(z, shift) ** 2) < 4


def test_every_bit_of_the_words_is_fair():
    words = philox_uint32(7, 8, torch.arange(N)).numpy()
    for bit in range(32):
        assert abs((words >> bit & 1).mean() - 0.5) < 4 * 0.5 / math.sqrt(N)


@pytest.mark.parametrize("p", [0.0, 1e-3, 0.1, 0.5, 0.9, 1.0])
def test_bernoulli_has_its_probability(p):
    mask = bernoulli_mask((N,), ((0, N),), 0, 0, p, "cpu")
    assert mask.dtype == torch.bool
    assert mask.double().mean().item() == pytest.approx(p, abs=4 * math.sqrt(p * (1 - p) / N))


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0, 2), (-3, 4), (10, 110)])
def test_integers_are_evenly_likely(low, high):
    counts = np.bincount(whole(integers, N, low, high, torch.int64) - low, minlength=high - low)
    assert len(counts) == high - low
    expected = N / (high - low)
    chi_square = ((counts - expected) ** 2 / expected).sum()
    freedom = high - low - 1
    assert chi_square <= freedom + 4 * math.sqrt(2 * freedom)


@pytest.mark.parametrize("bits", [33, 48, 63, 64])
def test_wide_integers_use_their_whole_range(bits):
    low = -(2 ** (bits - 1))
    x = integers((N,), ((0, N),), 0, 0, low, -low, torch.int64, "cpu").double().numpy()
    assert ks_distance((x - low) / 2.0**bits, lambda x: x) < ks_limit(N)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("low", "high"), [(0, 1), (-1, 1), (-0.1, 0.1), (1, 1.02), (-1, 0), (1e-3, 2e-3), (-3, -1)]
)
def test_uniform_never_leaves_its_range(dtype, low, high):
    x = uniform((100_000,), ((0, 100_000),), 0, 0, dtype, "cpu", low, high).double()
    assert x.dtype == torch.float64
    assert x.min() >= low
    assert x.max() < high
    assert x.mean().item() == pytest.approx(
        (low + high) / 2, abs=(high - low) / 100 + torch.finfo(dtype).eps
    )


def test_range_of_one_number():
    assert uniform((3,), ((0, 3),), 0, 0, torch.float32, "cpu", 2, 2).tolist() == [2, 2, 2]
    assert uniform((3,), ((0, 3),), 0, 0, torch.float32, "cpu", 0, 0).tolist() == [0, 0, 0]


def test_16_bit_dtypes_are_rounded_float32():
    u, z = whole(uniform, 1000, torch.float32), whole(normal, 1000, torch.float32)
    for dtype in (torch.float16, torch.bfloat16):
        rounded = torch.from_numpy(u).to(dtype)
        drawn = uniform((1000,), ((0, 1000),), 0, 0, dtype, "cpu")
        assert torch.equal(drawn[rounded < 1], rounded[rounded < 1])
        assert torch.equal(
            normal((1000,), ((0, 1000),), 0, 0, dtype, "cpu"), torch.from_numpy(z).to(dtype)
        )


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.float32]
)
def test_integers_of_every_dtype(dtype):
    x = integers((1000,), ((0, 1000),), 0, 0, 0, 2, dtype, "cpu")
    assert x.dtype == dtype
    assert sorted(x.long().unique().tolist()) == [0, 1]


@pytest.mark.parametrize("name", DRAWS)
def test_empty_scalar_and_meta(name):
    assert DRAWS[name]((), ()).shape == ()
    assert DRAWS[name]((4, 5), ((2, 2), (0, 5))).shape == (0, 5)
    assert DRAWS[name]((0, 5), full_box((0, 5))).shape == (0, 5)
    assert DRAWS[name]((4, 5), ((1, 3), (0, 5)), "meta").is_meta


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: uniform((2,), ((0, 2),), 0, 0, torch.int32, "cpu"), "cannot draw torch.int32"),
        (
            lambda: uniform((2,), ((0, 2),), 0, 0, torch.float32, "cpu", 1, 0),
            "is reversed or wider",
        ),
        (lambda: uniform((2,), ((0, 2),), 0, 0, torch.float16, "cpu", 0, 1e6), "wider than 65504"),
        (
            lambda: uniform((2,), ((0, 2),), 0, 0, torch.float32, "cpu", 0, math.nan),
            "is reversed or wider",
        ),
        (lambda: uniform((2,), ((0, 3),), 0, 0, torch.float32, "cpu"), "spans 0:3 in dim 0"),
        (lambda: normal((2,), ((0, 2),), 0, 0, torch.bool, "cpu"), "cannot draw torch.bool"),
        (lambda: normal((2,), ((0, 2),), 0, 0, torch.float32, "cpu", 0, -1), "std is -1"),
        (lambda: normal((2,), ((0, 2),), 0, 0, torch.complex64, "cpu", 1), "mean is 1"),
        (lambda: bernoulli_mask((2,), ((0, 2),), 0, 0, 1.5, "cpu"), "p is 1.5"),
        (lambda: integers((2,), ((0, 2),), 0, 0, 3, 3, torch.int64, "cpu"), "empty"),
        (lambda: integers((2,), ((0, 2),), 0, 0, 0, 300, torch.uint8, "cpu"), r"holds \[0, 256\)"),
        (lambda: integers((2,), ((0, 2),), 0, 0, 0, 3, torch.complex64, "cpu"), "complex"),
    ],
)
def test_errors_suggest_a_replacement(call, says):
    with pytest.raises(ValueError, match=says):
        call()
