"""Means, deviations, norms and covariances: directly on the parts where the dim is whole, else a
few numbers travel.
"""

from __future__ import annotations

import math

import pytest
import torch

from shardmesh import P
from tests.sharding.ops.rules.table import f
from tests.sharding.ranks import collectives, launched, on_mesh, place

X = f(64, 4)
REDUCE = {
    "mean": torch.mean,
    "nanmean": torch.nanmean,
    "var": lambda x, dim: torch.var(x, dim),
    "std": lambda x, dim: torch.std(x, dim, correction=0),
    "var_mean": lambda x, dim: torch.var_mean(x, dim)[0],
    "vector_norm": lambda x, dim: torch.linalg.vector_norm(x, 2, dim),
    "norm": lambda x, dim: torch.norm(x, 3, dim),
    "linalg.norm": lambda x, dim: torch.linalg.norm(x, math.inf, dim),
    "quantile": lambda x, dim: torch.quantile(x, 0.5, dim),
}
# Numbers that are reduced over the ranks, for each column. One all_reduce over 4 ranks brings 1.5
# of their bytes.
NUMBERS = {
    "mean": 1,
    "nanmean": 2,
    "var": 2,
    "std": 2,
    "var_mean": 2,
    "vector_norm": 1,
    "norm": 1,
    "linalg.norm": 1,
}


@pytest.mark.parametrize("name", REDUCE)
def test_unsharded_dim_is_one_local_call(name):
    def program(mesh):
        for spec in (P("a"), P()):
            x = place(mesh, X).redistribute(spec)
            x._layout.strategies.clear()
            with collectives() as records:
                REDUCE[name](x, 1)
            assert not records
            for strategy in x._layout.strategies.values():
                assert strategy.decomposition is None
                assert strategy.wrap is not None or name == "var_mean"

    on_mesh((4,), program)


@pytest.mark.parametrize("name", NUMBERS)
def test_sharded_dim_communicates_a_few_numbers(name):
    def program(mesh):
        x = place(mesh, X).redistribute(P("a"))
        with collectives() as records:
            found = REDUCE[name](x, 0).redistribute(P())
        torch.testing.assert_close(found.full_tensor(), REDUCE[name](X, 0), rtol=1e-12, atol=0)
        return launched(records), sum(r.bytes_received for r in records)

    names, received = on_mesh((4,), program)[0]
    assert names == ["all_reduce"] * NUMBERS[name]
    counted = 4 * 8  # nanmean counts in integers, of 8 bytes as well
    assert received == 1.5 * counted * NUMBERS[name]


def test_covariances_of_sharded_observations():
    """The means, then the matrix."""

    def program(mesh):
        x = place(mesh, X.T).redistribute(P(None, "a"))
        with collectives() as records:
            found = torch.cov(x)
        torch.testing.assert_close(found.full_tensor(), torch.cov(X.T))
        return launched(records), sum(r.bytes_received for r in records)

    assert on_mesh((4,), program)[0] == (["all_reduce", "all_reduce"], 1.5 * (4 * 8 + 16 * 8))


@pytest.mark.parametrize("order", [1, -1, math.inf, -math.inf, "fro", 2, "nuc"])
def test_norms_of_sharded_matrices(order):
    def program(mesh):
        x = place(mesh, X).redistribute(P("a"))
        with collectives() as records:
            found = torch.linalg.matrix_norm(x, order).redistribute(P())
        torch.testing.assert_close(found.full_tensor(), torch.linalg.matrix_norm(X, order))
        return sum(r.bytes_received for r in records)

    received = on_mesh((4,), program)[0]
    assert received == (
        3 * 16 * 4 * 8 if order in (2, "nuc") else 1.5 * 4 * 8 if order in (1, -1) else 1.5 * 8
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_accumulates_in_float32(dtype):
    """4096 ones and a few more: a sum in half precision would not go beyond 2048, or 256."""
    ones = torch.ones(4096, 2, dtype=dtype)

    def program(mesh):
        x = place(mesh, ones).redistribute(P("a"))
        assert x.mean().item() == 1
        assert x.mean(0).dtype is dtype
        assert x.var().item() == 0
        assert torch.linalg.vector_norm(x[:, 0]).item() == 64
        assert (x * 2).std(0).tolist() == [0, 0]

    on_mesh((4,), program)


def _calls(is_real):
    yield from (
        lambda x: x.mean(0),
        lambda x: x.var(0),
        lambda x: torch.linalg.norm(x),
        lambda x: x.norm(dim=0),
        torch.cov,
        lambda x: x.std(),
        lambda x: torch.dist(x, x),
        lambda x: torch.linalg.matrix_norm(x, 1),
        lambda x: x.std(1),
    )
    if is_real:
        yield from (
            lambda x: x.nanmean(0),
            lambda x: x.mean(0, dtype=torch.float64),
            torch.corrcoef,
            lambda x: torch.linalg.vector_norm(x, dtype=torch.float64),
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_results_have_torchs_dtypes(dtype):
    """However they are computed."""
    whole = f(8, 4).to(dtype)

    def program(mesh):
        x = place(mesh, whole).redistribute(P("a"))
        for call in _calls(not dtype.is_complex):
            got, want = call(x), call(whole)
            assert (got.dtype, got.shape) == (want.dtype, want.shape)

    on_mesh((2,), program)
