"""Data parallelism with context and expert parallelism: losses of one process, calls and bytes in
closed form.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardmesh as sm
from shardmesh import P
from shardmesh.parallel import Experts, context_parallel, data_parallel, fully_shard, top_k_routing
from tests.device import DEVICE
from tests.sharding.parallel.compositions import (
    EVEN,
    STEPS,
    Composition,
    adamw,
    split,
    stepped,
    used,
)
from tests.sharding.parallel.costs import StepCosts, of_data, plus
from tests.sharding.parallel.models import Config, gpt, tokens
from tests.sharding.parallel.plans import on_axes

B, S, SMALL = 4, 8, 31  # samples, positions, and a vocabulary and a length that 2 does not divide


def close(found, expected):
    torch.testing.assert_close(torch.stack(found).mean(0), expected, rtol=1e-12, atol=0)


def losses_of(model, loss):
    optimizer = adamw(model)
    return torch.stack([stepped(optimizer, loss(model, step)) for step in range(STEPS)])


# -- context parallelism ---------------------------------------------------------------------------


def _loss(logits_bsv, targets_bs):
    """Return the mean loss over all tokens; b and s stay two dims, since both are sharded."""
    return F.cross_entropy(logits_bsv.transpose(1, 2), targets_bs)


def _split_by_sequence(model, mesh, step, config, s):
    placed = [
        sm.device_put(x, mesh, P("fsdp", "cp"), src_data_rank=None)
        for x in tokens(B, s, config.vocabulary, seed=step % 3)
    ]
    return _loss(model(placed[0]), placed[1])


@pytest.mark.one_in(5)
@pytest.mark.parametrize(
    ("method", "axes", "config", "s"),
    [
        ("ring", ("fsdp",), EVEN, S),
        ("ring", ("fsdp", "cp"), Config(vocabulary=SMALL, d=10, heads=3, f=15), S - 1),
        ("all_to_all", ("fsdp",), Config(vocabulary=SMALL, heads=3, bias=True), S - 1),
    ],
)
def test_fsdp_and_context_parallelism(method, axes, config, s):
    """The sequence axis may shard parameters too, or replicate them."""

    def program(mesh):
        model = split(gpt(config).to(DEVICE), mesh, "fsdp", axes)
        with context_parallel("cp", method=method):
            return losses_of(
                model, lambda model, step: _split_by_sequence(model, mesh, step, config, s)
            )

    def alone(model, step):
        inputs, targets = tokens(B, s, config.vocabulary, seed=step % 3)
        return _loss(model(inputs), targets)

    close(on_axes((2, 2), ("fsdp", "cp"), program), losses_of(gpt(config).to(DEVICE), alone))


# Bytes of a rank's part of q, k, v or the output.
PART = B // 2 * EVEN.heads * S // 2 * EVEN.head_dim * 8
ATTENTION = {  # forward and backward of a layer on 2 ranks of "cp"
    # Keys and values come; in backward again, and their gradients.
    "ring": {"permute": (3, 3 * 2 * PART)},
    # Half of q, k and v comes, half of the output, and of their gradients.
    "all_to_all": {"all_to_all": (4, 2 * 4 * PART // 2)},
}
COUNT_OF_TARGETS = {"all_reduce": (1, 2 * 3 * 8 // 4)}


@pytest.mark.parametrize("method", ATTENTION)
def test_calls_and_bytes_of_context_parallelism(method):
    """Parameters are replicated over "cp": data parallelism is HSDP with "cp" in place of "dp"."""

    def program(mesh):
        model = split(gpt(EVEN).to(DEVICE), mesh, "fsdp", ("fsdp",))
        with context_parallel("cp", method=method):
            found = used(lambda: _split_by_sequence(model, mesh, 0, EVEN, S).backward())
        return found, dict(zip(("fsdp", "dp"), mesh.coordinate, strict=True))

    for found, coordinate in on_axes((2, 2), ("fsdp", "cp"), program):
        data = of_data(StepCosts(Composition("hsdp", "", "plain", EVEN, (2, 2)), coordinate))
        assert found == plus(data, *[ATTENTION[method]] * EVEN.layers, COUNT_OF_TARGETS)


# -- expert parallelism ----------------------------------------------------------------------------


class Mixture(nn.Module):
    """x + experts(x), between an embedding and a head; `mesh` is None for one process, where all
    experts are local.
    """

    def __init__(self, d: int = 6, f: int = 7, count: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, d, dtype=torch.float64)
        self.router = nn.Linear(d, count, bias=False, dtype=torch.float64)
        self.experts: nn.Module = nn.ModuleList(
            nn.Sequential(
                nn.Linear(d, f, dtype=torch.float64),
                nn.Tanh(),
                nn.Linear(f, d, bias=False, dtype=torch.float64),
            )
            for _ in range(count)
        )
        self.head = nn.Linear(d, 11, dtype=torch.float64)

    def forward(self, tokens_t):
        x_td = self.embed(tokens_t)
        routing = top_k_routing(self.router(x_td), 2)
        return self.head(x_td + self._mixed(x_td, routing))

    def _mixed(self, x_td, routing):
        if isinstance(self.experts, Experts):
            return self.experts(x_td, routing)
        made_ted = torch.stack([expert(x_td) for expert in self.experts], 1)
        chosen = made_ted.gather(
            1, routing.experts[..., None].expand(*routing.experts.shape, x_td.shape[-1])
        )
        return (chosen * routing.weights[..., None]).sum(1)


def _mixture():
    model, generator = Mixture(), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64, device="cpu"))
    return model.to(DEVICE)


def _numbers(step, count):
    drawn = torch.randint(
        0, 11, (2, count), generator=torch.Generator().manual_seed(step % 3), device="cpu"
    ).to(DEVICE)
    return drawn[0], drawn[1]


EXPERTS = {"whole mesh": lambda mesh: mesh, "part of it": lambda mesh: mesh["ep"]}


def _placed(mesh, inputs, step, count):
    pair = _numbers(step, count)
    if inputs == "plain":
        return [x.chunk(4)[mesh.get_rank()] for x in pair]
    return [sm.device_put(x, mesh, P(("dp", "ep")), src_data_rank=None) for x in pair]


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("form", "inputs", "where"),
    [
        ("fsdp", "global", "whole mesh"),
        ("fsdp", "plain", "whole mesh"),
        ("zero1", "plain", "part of it"),
        ("ddp", "plain", "whole mesh"),
    ],
)
def test_data_and_expert_parallelism(form, inputs, where):
    """3 experts over 2 ranks. The batch is sharded over the expert axis too; the router and the
    rest over "dp" only.
    """
    count = 13 if inputs == "global" else 12

    def program(mesh):
        model = _mixture()
        model.experts = Experts(list(model.experts), EXPERTS[where](mesh))

        def loss(model, step):
            numbers, targets = _placed(mesh, inputs, step, count)
            return F.cross_entropy(model(numbers), targets)

        return losses_of(_split_mixture(model, mesh, form), loss)

    def alone(model, step):
        inputs, targets = _numbers(step, count)
        return F.cross_entropy(model(inputs), targets)

    close(on_axes((2, 2), ("dp", "ep"), program), losses_of(_mixture(), alone))


def _split_mixture(model, mesh, form):
    if form == "fsdp":
        return fully_shard(model, mesh, axes="dp", units=Experts, src_data_rank=None)
    return data_parallel(
        model, mesh, optimizer="dp" if form == "zero1" else (), units=Experts, src_data_rank=None
    )


ROW = 6 * 8  # bytes of a token on its way


def _rows(model, numbers):
    """Return the number of rows by source rank and destination rank of "ep"."""
    experts = top_k_routing(model.router(model.embed(numbers)), 2).experts
    mine = (experts < 2).sum().item()  # of 3 experts the first rank has 2
    return [mine, experts.numel() - mine]


def test_calls_and_bytes_of_expert_parallelism():
    """Tokens are sent to the experts of the other rank and results back; in backward the gradients
    of both.
    """
    alone = _mixture()

    def program(mesh):
        model = _mixture()
        model.experts = Experts(list(model.experts), mesh)
        _split_mixture(model, mesh, "fsdp")
        numbers, targets = _placed(mesh, "global", 0, 12)
        found = used(lambda: F.cross_entropy(model(numbers), targets).backward())
        return found, mesh.coordinate

    for found, (dp, ep) in on_axes((2, 2), ("dp", "ep"), program):
        here, there = (_rows(alone, _numbers(0, 12)[0].chunk(4)[2 * dp + i]) for i in (ep, 1 - ep))
        assert found["all_to_all"] == (4, 2 * (here[1 - ep] + there[ep]) * ROW)
        calls = {op: count for op, (count, _) in found.items()}
        # Parameters of two units, of the experts twice, and counts; gradients; those of the outer
        # unit over "ep", and the loss's count.
        assert calls == {"all_gather": 3 + 1, "all_to_all": 4, "reduce_scatter": 2, "all_reduce": 2}
