"""Dtypes of gathers, computation and reductions, compared with the same steps by hand."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

import shardmesh as sm
from shardmesh.parallel import MixedPrecisionPolicy, data_parallel, fully_shard
from tests.sharding.parallel.data.training import gradients, on_ranks, own_rows

N, X = 4, torch.linspace(-1, 1, 8 * 6).view(8, 6)
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def _model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 5))


def _by_hand(param_dtype, reduce_dtype):
    """Compute each rank's gradients in `param_dtype`, sum them in `reduce_dtype`, and return them
    in float32.
    """
    total = None
    for part in X.chunk(N):
        made = _model().to(param_dtype)
        made(part.to(param_dtype)).float().square().mean().backward()
        grads = {name: x.grad.to(reduce_dtype) for name, x in made.named_parameters()}
        total = grads if total is None else {name: total[name] + x for name, x in grads.items()}
    return {name: x.float() / N for name, x in total.items()}


def _close(actual, expected, tolerance):
    assert actual.keys() == expected.keys()
    for name, x in expected.items():
        assert actual[name].dtype is torch.float32
        torch.testing.assert_close(actual[name], x, rtol=tolerance, atol=tolerance)


def _found(policy, shard=fully_shard, **options):
    def program(mesh):
        made = shard(_model(), mesh, mp_policy=policy, **options)
        made(own_rows(mesh, X)).float().square().mean().backward()
        return gradients(made)

    return on_ranks((N,), program)


@pytest.mark.parametrize("reduce_dtype", [torch.float32, torch.float64])
def test_gathered_in_bfloat16_and_summed_in_float32(reduce_dtype):
    """The only rounding is that of each rank's computation in bfloat16."""
    expected = _by_hand(torch.bfloat16, torch.float64)
    for found in _found(
        MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    ):
        _close(found, expected, 1e-6)


def test_sums_in_bfloat16_are_rounded():
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    expected = _by_hand(torch.bfloat16, torch.float64)
    for found in _found(policy):
        _close(found, expected, 4e-3)
        assert any(
            not torch.allclose(found[name], x, rtol=1e-6, atol=1e-6) for name, x in expected.items()
        )


def test_zero1():
    expected = _by_hand(torch.bfloat16, torch.float64)
    for found in _found(BF16, data_parallel, optimizer="dp"):
        _close(found, expected, 1e-6)


def test_sums_in_float16_do_not_overflow():
    """Each rank's gradient is scaled before the sum: the sum of four times 40000 would overflow,
    the mean does not.
    """

    def program(mesh):
        made = fully_shard(
            nn.Linear(2, 2, bias=False),
            mesh,
            mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float16),
        )
        (made(torch.full((1, 2), 200.0)) * 200.0).sum().backward()
        return gradients(made)["weight"]

    for found in on_ranks((N,), program):
        torch.testing.assert_close(found, torch.full((2, 2), 40000.0))


class _Sees(nn.Module):
    """Returns its input and the dtype of its parameter."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(3))
        self.seen = []

    def forward(self, x, tokens, *, mask):
        self.seen = [x.dtype, tokens.dtype, mask["m"].dtype, self.w.dtype]
        return x * self.w.to(x.dtype), tokens


@pytest.mark.parametrize("cast", [True, False])
def test_inputs_and_outputs(cast):
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, output_dtype=torch.float64, cast_forward_inputs=cast
    )

    def program(mesh):
        made = fully_shard(_Sees(), mesh, mp_policy=policy)
        x, tokens = made(torch.ones(3), torch.arange(3), mask={"m": torch.ones(3)})
        entered = torch.bfloat16 if cast else torch.float32
        assert made.seen == [entered, torch.int64, entered, torch.bfloat16]
        assert (x.dtype, tokens.dtype) == (torch.float64, torch.int64)
        assert made.w.dtype is torch.float32

    on_ranks((2,), program)


@dataclasses.dataclass
class _Batch:
    """What a module takes and returns; torch's pytree does not know it."""

    x: torch.Tensor
    lengths: list[torch.Tensor]
    name: str = "batch"


def test_dataclasses_of_a_program():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, batch):
            assert (batch.x.dtype, batch.lengths[0].dtype) == (torch.bfloat16, torch.int64)
            return _Batch(self.linear(batch.x), batch.lengths, "result")

    def program(mesh):
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
        made = fully_shard(Model(), mesh, mp_policy=policy)
        result = made(_Batch(torch.ones(2, 4), [torch.ones(2, dtype=torch.int64)]))
        assert (result.x.dtype, result.name) == (torch.float32, "result")
        result.x.sum().backward()

    on_ranks((2,), program)


def test_training_in_bfloat16_is_close_to_float32():
    def train(made, x, steps=15):
        optimizer, losses = torch.optim.AdamW(made.parameters(), lr=1e-2), []
        for _ in range(steps):
            loss = (made(x).float() - 1).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return torch.tensor(losses)

    def program(mesh):
        return train(fully_shard(_model(), mesh, mp_policy=BF16), own_rows(mesh, X))

    found = torch.stack(on_ranks((N,), program)).mean(0)
    expected = train(_model(), X)
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
    assert found[-1] < 0.6 * found[0]


def test_quantized_transport():
    """8-bit gathers and sums are close, with a quarter of the bytes of float32 plus the scales."""

    def program(mesh):
        torch.manual_seed(0)
        made = fully_shard(nn.Linear(64, 64, bias=False), mesh, transport="int8")
        with sm.debug.comm_budget() as used:
            made(torch.ones(2, 64)).square().mean().backward()
        exact = nn.Linear(64, 64, bias=False)
        torch.manual_seed(0)
        exact.reset_parameters()
        exact(torch.ones(2, 64)).square().mean().backward()
        wrong = (
            made.weight.grad.full_tensor() - exact.weight.grad
        ).norm() / exact.weight.grad.norm()
        return sum(received for _, received in used.by_op.values()), wrong

    for received, error in on_ranks((N,), program):
        assert 0 < error < 0.05
        assert received < 0.35 * 2 * 64 * 64 * 4 * (N - 1) / N
