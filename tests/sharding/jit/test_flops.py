"""Flops of graphs: those of attention are those of the same attention made of matrix products."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import shardmesh as sm


def flops(f: Any, *args: Tensor) -> int:
    jitted = sm.jit(f, backend="eager", fullgraph=True)
    jitted(*args)
    return jitted.recorded[-1].cost_analysis().flops


def attention(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """Return attention by products; of causal attention row by row, with the keys that it needs."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    if not causal:
        return (q @ k.mT).softmax(-1) @ v
    rows = [
        (q[:, :, i : i + 1] @ k[:, :, : i + 1].mT).softmax(-1) @ v[:, :, : i + 1]
        for i in range(q.shape[2])
    ]
    return torch.cat(rows, 2)


CASES = [(4, 4, False), (4, 4, True), (4, 2, False), (4, 1, True)]


@pytest.mark.parametrize(("heads", "of_keys", "causal"), CASES)
def test_attention(heads: int, of_keys: int, causal: bool) -> None:
    q = torch.randn(2, heads, 6, 8)
    k, v = torch.randn(2, of_keys, 6, 8), torch.randn(2, of_keys, 6, 8)

    def fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True, scale=1.0)

    torch.testing.assert_close(fused(q, k, v), attention(q, k, v, causal), rtol=1e-4, atol=1e-5)
    count = flops(fused, q, k, v)
    assert count == flops(lambda q, k, v: attention(q, k, v, causal), q, k, v) > 0


def test_attention_with_other_lengths() -> None:
    q, k, v = torch.randn(2, 4, 5, 8), torch.randn(2, 4, 9, 8), torch.randn(2, 4, 9, 8)
    count = flops(F.scaled_dot_product_attention, q, k, v)
    assert count == flops(lambda q, k, v: attention(q, k, v, False), q, k, v)


def test_backward_of_attention_is_five_products_for_two() -> None:
    q, k, v = (torch.randn(2, 4, 6, 8, requires_grad=True) for _ in range(3))

    def step(q: Tensor, k: Tensor, v: Tensor) -> Any:
        out = F.scaled_dot_product_attention(q, k, v)
        return torch.autograd.grad(out.sum(), (q, k, v))

    forward = flops(F.scaled_dot_product_attention, *(x.detach() for x in (q, k, v)))
    assert flops(step, q, k, v) * 2 == forward * (2 + 5)


@pytest.mark.parametrize("weights", ["stacked", "rows"])
def test_grouped_products(weights: str) -> None:
    """Of rows in groups with a weight each, and of the gradient of those weights."""
    offsets = torch.tensor([8, 8, 24, 32], dtype=torch.int32)
    x, w = torch.randn(32, 16).bfloat16(), torch.randn(4, 16, 24).bfloat16()
    y = torch.randn(32, 24).bfloat16()

    def grouped(x: Tensor, w: Tensor, y: Tensor, offsets: Tensor) -> Tensor:
        if weights == "stacked":
            return F.grouped_mm(x, w, offs=offsets)
        return F.grouped_mm(x.mT, y, offs=offsets)

    assert flops(grouped, x, w, y, offsets) == 2 * 32 * 16 * 24


def test_what_has_no_formula_is_listed() -> None:
    f = sm.jit(lambda x: torch.fft.fft(x).abs() + x.exp(), backend="eager")
    f(torch.randn(8))
    cost = f.recorded[-1].cost_analysis()
    assert cost.flops == 0
    assert cost.not_counted == ("_fft_r2c",)
