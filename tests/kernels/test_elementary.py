"""log and cos/sin compared with numpy's extended precision."""

import numpy as np
import pytest
import torch

from shardmesh.kernels.random.elementary import cos_sin_turns, log

PI = np.longdouble("3.14159265358979323846264338327950288")


def fractions(bits):
    """Return fractions m / 2**bits with 0 < m < 2**bits: random ones, the ends and the neighbours
    of every eighth.
    """
    eighths = (np.arange(1, 8)[:, None] * 2 ** (bits - 3) + np.arange(-2, 3)).ravel()
    ends = np.concatenate([np.arange(1, 100), 2**bits - np.arange(1, 100)])
    m = np.concatenate([np.random.default_rng(0).integers(1, 2**bits, 100_000), eighths, ends])
    return torch.from_numpy(m.astype(np.float64) * 2.0**-bits)


@pytest.mark.parametrize("bits", [32, 53])
def test_log_is_within_one_ulp(bits):
    x = fractions(bits)
    exact = np.log(x.numpy().astype(np.longdouble))
    ulps = np.abs(log(x).numpy() - exact) / np.spacing(np.abs(exact).astype(np.float64))
    assert ulps.max() < 1


def test_log_of_one_is_zero():
    assert log(torch.ones(3, dtype=torch.float64)).tolist() == [0, 0, 0]


@pytest.mark.parametrize("bits", [32, 53])
def test_cos_and_sin_of_turns(bits):
    x = fractions(bits)
    angle = 2 * PI * x.numpy().astype(np.longdouble)
    cos, sin = cos_sin_turns(x)
    assert np.abs(cos.numpy() - np.cos(angle)).max() < 2.0**-52
    assert np.abs(sin.numpy() - np.sin(angle)).max() < 2.0**-52


def test_quarter_turns_are_exact():
    cos, sin = cos_sin_turns(torch.tensor([0, 0.25, 0.5, 0.75], dtype=torch.float64))
    assert cos.tolist() == [1, 0, -1, 0]
    assert sin.tolist() == [0, 1, 0, -1]


def test_results_do_not_depend_on_the_position():
    x = fractions(53)[:1000]
    whole = (log(x), *cos_sin_turns(x))
    for start, step in ((1, 1), (3, 7), (501, 2)):
        part = x[start::step]
        for a, b in zip(whole, (log(part), *cos_sin_turns(part)), strict=True):
            assert torch.equal(a[start::step], b)
