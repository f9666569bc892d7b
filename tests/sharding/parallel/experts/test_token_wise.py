"""Modules that flatten sequences to tokens, where sequences are split over ranks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardmesh as sm
from shardmesh import P
from shardmesh.parallel import parallelize, token_wise

WIDTH = 6


class Flattening(nn.Module):
    """Flattens sequences, as mixtures of transformers do; returns scores of tokens, too."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 10), nn.Linear(10, WIDTH)
        self.tokens: list[Any] = []

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        flat = x.view(-1, x.shape[-1])
        self.tokens.append(flat)
        hidden = torch.relu(self.up(flat))
        return self.down(hidden).reshape(x.shape), hidden.sum(-1)


def module() -> Flattening:
    torch.manual_seed(0)
    return Flattening()


def batch(rows: int, positions: int) -> Tensor:
    return torch.randn(rows, positions, WIDTH, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("spec", "rows", "positions"),
    [
        (P("dp", "cp"), 4, 8),
        (P("dp", "cp"), 5, 8),  # ranks with different numbers of rows
        (P(None, "cp"), 3, 4),
        (P(None, ("cp", "dp")), 3, 8),
        (P("cp", "dp"), 4, 2),
    ],
    ids=str,
)
def test_ranks_compute_their_own_tokens(spec, rows, positions):
    """Results and gradients are those of one rank, and no activations move."""
    one = module()
    plain = batch(rows, positions).requires_grad_()
    expected, scores = one(plain)
    (expected.square().sum() + scores.sum()).backward()

    def program() -> None:
        mesh = sm.init_device_mesh("cpu", (2, 2), axis_names=("dp", "cp"))
        own = token_wise(parallelize(module(), mesh, {}))
        x = sm.device_put(batch(rows, positions), mesh, spec).requires_grad_()
        with sm.debug.comm_report() as report:
            out, other = own(x)
        assert report.bytes_received == 0, report
        assert own.tokens[0]._local.numel() == x._local.numel()
        assert out.spec == x.spec
        torch.testing.assert_close(out.full_tensor(), expected)
        in_order = other.full_tensor().sort().values
        torch.testing.assert_close(in_order, scores.sort().values)
        (out.square().sum() + other.sum()).backward()
        torch.testing.assert_close(x.grad.full_tensor(), plain.grad)
        for name, parameter in own.named_parameters():
            whole = one.get_parameter(name).grad
            torch.testing.assert_close(parameter.grad.full_tensor(), whole)

    sm.simulate(4)(program)()


@pytest.mark.parametrize(
    ("rows", "positions"),
    [(4, 7), (4, 1), (1, 8)],
    ids=["uneven", "a rank without positions", "a rank without rows"],
)
def test_parts_that_are_gathered(rows, positions):
    expected = module()(batch(rows, positions))[0]

    def program() -> None:
        mesh = sm.init_device_mesh("cpu", (2, 2), axis_names=("dp", "cp"))
        own = token_wise(parallelize(module(), mesh, {}))
        x = sm.device_put(batch(rows, positions), mesh, P("dp", "cp"))
        torch.testing.assert_close(own(x)[0].full_tensor(), expected)

    sm.simulate(4)(program)()


def test_plain_and_whole_arguments_and_keywords():
    x = batch(4, 8)
    expected = module()(x)[0]
    own = token_wise(module())
    torch.testing.assert_close(own(x)[0], expected)
    torch.testing.assert_close(own(x=x)[0], expected)

    def program() -> None:
        mesh = sm.init_device_mesh("cpu", (2,), axis_names=("cp",))
        own = token_wise(parallelize(module(), mesh, {}))
        for spec in (P(), P("cp"), P(None, "cp")):
            out = own(x=sm.device_put(x, mesh, spec))[0]
            torch.testing.assert_close(out.full_tensor(), expected)

    sm.simulate(2)(program)()


def test_a_failed_call_leaves_nothing_behind():
    x = batch(4, 8)
    expected = module()(x)[0]

    def program() -> None:
        mesh = sm.init_device_mesh("cpu", (2,), axis_names=("cp",))
        own = copy.deepcopy(token_wise(parallelize(module(), mesh, {})))
        split = sm.device_put(x, mesh, P(None, "cp"))
        up, own.up = own.up, nn.Identity()
        with pytest.raises(Exception, match=r".*"):
            own(split)
        own.up = up
        whole = own(sm.device_put(x, mesh, P()))[0]
        torch.testing.assert_close(whole.full_tensor(), expected)
        torch.testing.assert_close(own(split)[0].full_tensor(), expected)

    sm.simulate(2)(program)()
