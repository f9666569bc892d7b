"""Mixtures of experts are one operator in a graph: steps have the bits, the collectives and the
memory of eager mode, whichever experts the tokens choose.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardmesh as sm
from shardmesh import P
from shardmesh.parallel import Experts, moe, top_k_routing
from shardmesh.sharding.abstract.peak_memory import PeakMemory
from shardmesh.sharding.jit.errors import JitError
from tests.device import DEVICE
from tests.pool import Pool
from tests.sharding.ranks import every_rank
from tests.tiers import slow

D, COUNT, K, CLASSES, STEPS = 6, 5, 2, 3, 5
# experts that the tokens of a step prefer
PREFERRED = [(), (0, 1), (3, 4), (), (1, 2)]
SIZES = {4: (5, 0, 2, 3), 2: (7, 3)}  # of the batch, by the number of ranks; the second has none


class Expert(nn.Module):
    """Maps rows [n d] to [n d]; how depends on whether there are any, as far as autograd sees."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(D, 8), nn.Linear(8, D, bias=False)

    def forward(self, rows: Tensor) -> Tensor:
        if not len(rows):
            return self.down(self.up(rows))
        return self.down(F.silu(self.up(rows)))


class Block(nn.Module):
    """Attention over no one, and experts."""

    def __init__(self, mesh: Any, capacity: float | None, recompute: bool = False) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(D), nn.Linear(D, COUNT)
        ones = [Expert() for _ in range(COUNT)]
        self.experts = Experts(ones, mesh, axis="ep", capacity=capacity)
        self.recompute = recompute

    def forward(self, x: Any, pull: Any) -> Any:
        if self.recompute:
            return checkpoint(self._forward, x, pull, use_reentrant=False)
        return self._forward(x, pull)

    def _forward(self, x: Any, pull: Any) -> Any:
        h = self.norm(x)
        return x + self.experts(h, top_k_routing(self.router(h) + pull, K))


class Model(nn.Module):
    """A small transformer without attention."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Linear(D, D), nn.ModuleList(blocks)
        self.head = nn.Linear(D, CLASSES)

    def forward(self, x: Any, pull: Any) -> Any:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x, pull)
        return self.head(x)


def model_of(mesh: Any, form: str, capacity: float | None, recompute: bool = False) -> nn.Module:
    torch.manual_seed(0)
    model = Model(*[Block(mesh, capacity, recompute) for _ in range(2)])
    if form == "fsdp":
        for block in model.blocks:
            sm.parallel.fully_shard(block, mesh, axes="dp")
        return sm.parallel.fully_shard(model, mesh, axes="dp")
    return sm.parallel.parallelize(model, mesh, {})


def batch(mesh: Any, i: int, is_plain: bool = False) -> tuple[Any, Any, Any]:
    """Return rows [n d] and classes [n] of a step, and what the routers prefer in it [e]."""
    generator = torch.Generator().manual_seed(i)
    x = torch.randn(10, D, generator=generator)
    y = torch.randint(CLASSES, (10,), generator=generator)
    pull = torch.zeros(COUNT)
    pull[list(PREFERRED[i])] = 100.0
    x, y, pull = x.to(DEVICE), y.to(DEVICE), pull.to(DEVICE)
    if is_plain:  # each rank has other rows
        return x[: 3 + mesh.world.rank] + mesh.world.rank, y[: 3 + mesh.world.rank], pull
    split = P("ep", sizes={"ep": SIZES[4]}) if mesh.size() == mesh.size("ep") else P(("dp", "ep"))
    place = [sm.distribute_tensor(t, mesh, split, src_data_rank=None) for t in (x, y)]
    return *place, sm.distribute_tensor(pull, mesh, P(), src_data_rank=None)


def whole(x: Any) -> Tensor:
    return x.detach().full_tensor() if isinstance(x, sm.ShardedTensor) else x.detach()


def trained(
    form: str,
    capacity: float | None,
    backend: str | None,
    is_plain: bool = False,
    recompute: bool = False,
) -> tuple[list[Tensor], list[Any], int]:
    """Train for some steps, under `sm.jit` if a backend is given.

    Returns: losses, gradients and parameters; for each step how many collectives were launched, and
        with how many bytes, by kind and by axes; the peak of memory in the last step.
    """
    shape = {"ep": (1, 4), "fsdp": (2, 2)}[form]
    mesh = sm.init_device_mesh(DEVICE, shape, axis_names=("dp", "ep"))
    model = model_of(mesh, form, capacity, recompute)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def step(x: Any, y: Any, pull: Any) -> Any:
        loss = F.cross_entropy(model(x, pull), y)
        loss.backward()
        gradients = [p.grad.clone() for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        return loss, gradients

    f = step
    if backend is not None:
        f = sm.jit(step, backend=backend, fullgraph=True, compiler_options=False)
    values, launches, peak = [], [], 0
    for i in range(STEPS):
        inputs = batch(mesh, i, is_plain)
        with sm.debug.comm_report() as report, PeakMemory(DEVICE) as memory:
            loss, gradients = f(*inputs)
        values += map(whole, [loss, *gradients])
        del loss, gradients
        launches.append((report.by_op, report.by_axis))
        peak = memory.peak
    if f is not step:
        assert len(f.recorded) == 1
        assert not f.parts
    return [*values, *map(whole, model.parameters())], launches, peak


CASES = [("ep", False), ("fsdp", False), ("fsdp", True)]


@pytest.mark.one_in(2, each=["case"])
@pytest.mark.parametrize("capacity", [None, 0.8])
@pytest.mark.parametrize("case", CASES)
def test_steps_have_the_bits_and_the_collectives_of_eager(
    case: tuple[str, bool], capacity: float | None
) -> None:
    form, is_plain = case
    run = sm.simulate(4)(trained)
    for eager, jitted in zip(
        run(form, capacity, None, is_plain), run(form, capacity, "eager", is_plain), strict=True
    ):
        assert all(map(torch.equal, eager[0], jitted[0]))
        assert eager[1] == jitted[1]


def test_processes_have_the_bits_and_the_memory_of_eager(world4: Pool) -> None:
    for form in ("ep", "fsdp"):
        for eager, jitted in zip(
            world4(trained, form, None, None), world4(trained, form, None, "eager"), strict=True
        ):
            assert all(map(torch.equal, eager[0], jitted[0]))
            assert eager[1] == jitted[1]
            print(eager[2], jitted[2])
