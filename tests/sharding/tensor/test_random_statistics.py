"""Distributions of draws on a mesh, with fixed seeds. Bounds are what one right seed in a million
exceeds.
"""

from __future__ import annotations

import math
from itertools import permutations

import pytest
import torch
from torch.nn import functional as F

import shardmesh as sm
from shardmesh import P
from tests.sharding.ranks import on_mesh

N = 30_000
WEIGHTS = torch.tensor([1.0, 0, 6, 3], dtype=torch.float64)
SIGMAS = 5  # of a Gaussian: two in three million


def drawn(draw, *shape, spec=None, seed=1):
    """Return the full result of `draw` on zeros on three ranks."""

    def program(mesh):
        sm.random.manual_seed(seed)
        x = sm.zeros(
            *(shape or (N,)), device_mesh=mesh, placements=spec or P("a"), dtype=torch.float64
        )
        return draw(x).full_tensor().double()

    return on_mesh((3,), program)[0]


def normal_cdf(x):
    return torch.special.ndtr(x)


CUT_LOW, CUT_HIGH = normal_cdf(torch.tensor([-1.5, 1.0], dtype=torch.float64)).tolist()
CONTINUOUS = {
    "rand_like": (torch.rand_like, lambda x: x),
    "randn_like": (torch.randn_like, normal_cdf),
    "uniform_": (lambda x: x.uniform_(-1, 3), lambda x: (x + 1) / 4),
    "normal_": (lambda x: x.normal_(2, 3), lambda x: normal_cdf((x - 2) / 3)),
    "normal of tensors": (lambda x: torch.normal(x + 2, x + 3), lambda x: normal_cdf((x - 2) / 3)),
    "exponential_": (lambda x: x.exponential_(0.5), lambda x: -torch.expm1(-0.5 * x)),
    "cauchy_": (lambda x: x.cauchy_(1, 2), lambda x: 0.5 + ((x - 1) / 2).atan() / math.pi),
    "log_normal_": (lambda x: x.log_normal_(0.3, 0.7), lambda x: normal_cdf((x.log() - 0.3) / 0.7)),
    "trunc_normal_": (
        lambda x: torch.nn.init.trunc_normal_(x, 0.5, 1.0, -1.0, 1.5),
        lambda x: (normal_cdf(x - 0.5) - CUT_LOW) / (CUT_HIGH - CUT_LOW),
    ),
    "rrelu": (lambda x: -F.rrelu(x - 1, 0.2, 0.6, training=True), lambda x: (x - 0.2) / 0.4),
}


@pytest.mark.parametrize("name", CONTINUOUS)
def test_kolmogorov_smirnov(name):
    """2 exp(-2 d**2 n) bounds the chance of a gap d between the sample's distribution and the true
    one.
    """
    draw, cdf = CONTINUOUS[name]
    theory = cdf(drawn(draw).sort()[0])
    steps = torch.arange(N + 1, dtype=torch.float64) / N
    gap = max(float((theory - steps[:-1]).abs().max()), float((theory - steps[1:]).abs().max()))
    assert gap < math.sqrt(math.log(2 / 1e-6) / 2 / N)


def log_binomial(n, k):
    return math.lgamma(n + 1) - torch.lgamma(k + 1) - torch.lgamma(n - k + 1)


def poisson(rate):
    return lambda x: torch.poisson(x + rate), lambda k: (
        k * math.log(rate) - rate - torch.lgamma(k + 1)
    ).exp()


def binomial(n, p):
    return lambda x: torch.binomial(x + n, x + p), lambda k: (
        log_binomial(n, k) + k * math.log(p) + (n - k) * math.log1p(-p)
    ).exp()


DISCRETE = {
    "bernoulli_": (lambda x: x.bernoulli_(0.3), lambda k: torch.where(k == 1, 0.3, 0.7), 2),
    "bernoulli": (lambda x: torch.bernoulli(x + 0.3), lambda k: torch.where(k == 1, 0.3, 0.7), 2),
    "geometric_": (
        lambda x: x.geometric_(0.25),
        lambda k: torch.where(k > 0, 0.25 * 0.75 ** (k - 1), 0),
        60,
    ),
    "randint_like": (lambda x: torch.randint_like(x, 2, 9), lambda k: ((k >= 2) & (k < 9)) / 7, 9),
    "random_": (lambda x: x.random_(7), lambda k: torch.full_like(k, 1 / 7), 7),
    "poisson of 0.5": (*poisson(0.5), 12),
    "poisson of 8": (*poisson(8.0), 40),
    "poisson of 12": (*poisson(12.0), 60),
    "poisson of 200": (*poisson(200.0), 400),
    "binomial of few": (*binomial(10, 0.3), 11),
    "binomial of most": (*binomial(20, 0.9), 21),
    "binomial of half": (*binomial(60, 0.5), 61),
    "binomial of many": (*binomial(2000, 0.98), 2001),
    "dropout": (
        lambda x: F.dropout(x + 1, 0.25),
        lambda k: torch.where(k == 0, 0.25, torch.where(k == 1, 0.75, 0)),
        3,
    ),
    "multinomial": (
        lambda x: torch.multinomial(weights(x).expand(N, 4), 1),
        lambda k: WEIGHTS[k.long()] / 10,
        4,
    ),
    "multinomial replaced": (
        lambda x: torch.multinomial(weights(x), N, True),
        lambda k: WEIGHTS[k.long()] / 10,
        4,
    ),
}


def weights(x):
    return sm.device_put(WEIGHTS, x.mesh, P())


@pytest.mark.parametrize("name", DISCRETE)
def test_chi_square(name):
    """Test the values expected at least five times, and all others together."""
    draw, chance, numbers = DISCRETE[name]
    sample = drawn(draw).flatten()
    if name == "dropout":
        sample = (sample > 0).double()
    k = torch.arange(numbers, dtype=torch.float64)
    expected = N * chance(k)
    counts = torch.bincount(sample.long(), minlength=numbers).double()
    assert len(counts) == numbers
    usual = expected > 5
    assert abs(float(expected.sum()) - N) < 1
    counts, expected = ([*x[usual], x[~usual].sum()] for x in (counts, expected))
    square = sum(float((c - e) ** 2 / e) for c, e in zip(counts, expected, strict=True) if e > 5)
    freedom = sum(float(e) > 5 for e in expected) - 1
    assert square < freedom + 8 * math.sqrt(2 * freedom) + 8
    assert sum(float(c) for c, e in zip(counts, expected, strict=True) if e <= 5) < 25


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_uniform_numbers_are_never_one(dtype):
    def program(mesh):
        sm.random.manual_seed(2)
        x = sm.rand(400_000, device_mesh=mesh, placements=P("a"), dtype=dtype)
        return float(x.min()), float(x.max())

    low, high = on_mesh((2,), program)[0]
    assert 0 <= low < 1e-4
    assert 0.99 < high < 1


def test_normal_tails():
    """As many beyond 2, 3 and 4 standard deviations as there should be."""
    x = drawn(torch.randn_like, 300_000).abs()
    for far in (2.0, 3.0, 4.0):
        chance = 2 * float(normal_cdf(torch.tensor(-far, dtype=torch.float64)))
        found = float((x > far).double().mean())
        assert abs(found - chance) < SIGMAS * math.sqrt(chance / 300_000)


def correlation(a, b):
    """Return the correlation in standard errors."""
    a, b = a - a.mean(), b - b.mean()
    return abs(float((a * b).mean() / a.std() / b.std())) * math.sqrt(a.numel())


@pytest.mark.parametrize(
    "draw",
    [
        torch.rand_like,
        torch.randn_like,
        lambda x: x.exponential_().log(),
        lambda x: torch.poisson(x + 20),
    ],
)
def test_shards_calls_and_seeds_are_not_correlated(draw):
    shape = (30, 1000)
    calls = [
        drawn(lambda x, skip=skip: [draw(x.clone()) for _ in range(skip + 1)][-1], *shape)
        for skip in range(3)
    ]
    shards = calls[0].chunk(3)
    others = [
        *calls[1:],
        drawn(draw, *shape, seed=2),
        drawn(draw, *shape, seed=1 + 2**32),
        calls[0].roll(1, 1),
        calls[0].roll(1, 0),
    ]
    assert max(correlation(calls[0], other) for other in others) < SIGMAS
    assert max(correlation(a, b) for a, b in [shards[:2], shards[1:], shards[::2]]) < SIGMAS


def test_dropout_masks_of_neighbouring_calls_and_channels_are_independent():
    first, second = (
        drawn(lambda x, skip=skip: [F.dropout1d(x + 1, 0.5) for _ in range(skip)][-1], 100, 90, 2)[
            ..., 0
        ]
        for skip in (1, 2)
    )
    for other in (second, first.roll(1, 0), first.roll(1, 1)):
        assert correlation(first, other) < SIGMAS


def test_every_permutation_is_equally_likely():
    def program(mesh):
        sm.random.manual_seed(3)
        return [tuple(sm.randperm(4, mesh, P("a")).tolist()) for _ in range(1200)]

    orders, *_ = ranks = on_mesh((2,), program)
    assert all(rank == orders for rank in ranks)
    square = sum((orders.count(p) - 50) ** 2 / 50 for p in permutations(range(4)))
    assert square < 23 + SIGMAS * math.sqrt(2 * 23)
    assert set(orders) == set(permutations(range(4)))


def test_without_replacement_the_order_is_that_of_drawing_one_by_one():
    x = drawn(lambda x: torch.multinomial(weights(x).expand(N, 4), 2))
    chances = [0.1, 0, 0.6, 0.3]
    for a, b in permutations((0, 2, 3), 2):
        chance = chances[a] * chances[b] / (1 - chances[a])
        found = float(((x[:, 0] == a) & (x[:, 1] == b)).double().mean())
        assert abs(found - chance) < SIGMAS * math.sqrt(chance / N)


def test_hard_gumbel_softmax_draws_by_the_softmax():
    logits = torch.tensor([0.0, 1.0, -1.0], dtype=torch.float64)
    x = drawn(
        lambda x: F.gumbel_softmax(sm.device_put(logits, x.mesh, P()).expand(N, 3), 0.3, hard=True)
    )
    for found, chance in zip(x.mean(0), logits.softmax(0), strict=True):
        assert abs(float(found - chance)) < SIGMAS * math.sqrt(float(chance) / N)
