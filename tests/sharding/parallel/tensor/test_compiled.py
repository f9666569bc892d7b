"""`torch.compile` of models with tensor parallelism."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardmesh as sm
from shardmesh import P, ShardedTensor
from shardmesh.compat import ColwiseParallel, RowwiseParallel
from shardmesh.parallel import colwise, fully_shard, parallelize, rowwise
from tests.device import DEVICE
from tests.sharding.parallel.models import ResidualMLP
from tests.sharding.ranks import collectives, on_mesh


def model():
    torch.manual_seed(0)
    return nn.Sequential(ResidualMLP(5, 10), ResidualMLP(5, 10)).double()


def _torch_styles(made, mesh):
    plan = {
        f"{i}.{name}": style
        for i in range(2)
        for name, style in (("up", ColwiseParallel()), ("down", RowwiseParallel()))
    }
    return sm.compat.parallelize_module(made, mesh, plan)


def _by_pattern(made, mesh):
    return parallelize(made, mesh, {"*.norm.*": P(), "*.up": colwise(), "*.down": rowwise()})


def _in_place(made, backend):
    for block in made:
        block.compile(backend=backend)
    return made


def _wrapped(made, backend):
    for i, block in enumerate(made):
        made[i] = torch.compile(block, backend=backend)
    return made


def _leaves(made, backend):
    for block in made:
        block.up.compile(backend=backend)
        block.down = torch.compile(block.down, backend=backend)
    return made


HOW = {
    "block.compile()": _in_place,
    "torch.compile(block)": _wrapped,
    "leaves": _leaves,
    "torch.compile(model)": lambda made, backend: torch.compile(made, backend=backend),
}


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.one_in(7, each=["how", "styles"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize(
    ("how", "order"), [("block.compile()", "before"), *((how, "after") for how in HOW)]
)
@pytest.mark.parametrize("styles", [_torch_styles, _by_pattern])
def test_gradients_equal_one_process(styles, how, order, backend):
    """`torch.compile(module)` beforehand would be another module, whose paths do not match the
    plan.
    """

    def main(mesh):
        made, plain = model(), model()
        made = (
            styles(HOW[how](made, backend), mesh)
            if order == "before"
            else HOW[how](styles(made, mesh), backend)
        )
        x = torch.randn(4, 5, dtype=torch.float64)
        for _ in range(2):
            given = x if styles is _torch_styles else sm.device_put(x, mesh, P())
            made(given).square().mean().backward()
            plain(x).square().mean().backward()
            for (name, p), q in zip(made.named_parameters(), plain.parameters(), strict=True):
                grad = p.grad.full_tensor() if isinstance(p, ShardedTensor) else p.grad
                torch.testing.assert_close(grad, q.grad, rtol=1e-12, atol=1e-14, msg=name)

    on_mesh((2,), main)


_BREAK = (
    r"(parallelize redistributes a module|operators on ShardedTensors run)[^$]*sm\.jit\(block\)"
)


@pytest.mark.parametrize("styles", [_torch_styles, _by_pattern])
def test_fullgraph_names_the_graph_break(styles):
    def main(mesh):
        made = styles(model(), mesh)
        made[0].compile(backend="eager", fullgraph=True)
        x = torch.randn(4, 5, dtype=torch.float64)
        with pytest.raises(torch._dynamo.exc.Unsupported, match=_BREAK):
            made(x if styles is _torch_styles else sm.device_put(x, mesh, P()))

    on_mesh((2,), main)


class Recomputed(nn.Module):
    """A block whose activations are recomputed in backward."""

    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, x):
        return checkpoint(self.block, x, use_reentrant=False)


def _trained(wrap, styles, recompute, shape):
    """Compile block by block in torchtitan's order: layouts, recomputation, compilation, and
    `fully_shard` last. Return values, and the collectives of the last step.
    """
    mesh = sm.init_device_mesh(DEVICE, shape, axis_names=("dp", "a")[-len(shape) :])
    made = styles(model(), mesh if len(shape) == 1 else mesh["a"])
    for i, block in enumerate(made):
        made[i] = wrap(Recomputed(block) if recompute else block)
    if len(shape) == 2:
        fully_shard(made, mesh, axes="dp", units=[ResidualMLP])
    optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
    losses = []
    for i in range(4):
        torch.manual_seed(i)
        x = torch.randn(4, 5, dtype=torch.float64)
        with collectives() as records:
            given = x if styles is _torch_styles else sm.device_put(x, mesh, P())
            loss = made(given).square().mean()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    whole = [getattr(x, "full_tensor", lambda x=x: x)() for x in (*losses, *made.parameters())]
    graphs = [len(block.recorded) for block in made if hasattr(block, "recorded")]
    return whole, graphs, [(record.op, record.ranks, record.bytes_received) for record in records]


@pytest.mark.one_in(2, each=["recompute", "shape"])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("shape", [(2,), (2, 2)])
@pytest.mark.parametrize("styles", [_torch_styles, _by_pattern])
def test_sm_jit_in_place_of_fullgraph(styles, shape, recompute):
    """Graphs have the bits and the collectives of eager blocks."""
    run = sm.simulate(math.prod(shape))(_trained)
    jitted = run(lambda x: sm.jit(x, backend="eager", fullgraph=True), styles, recompute, shape)
    eager = run(lambda x: x, styles, recompute, shape)
    for (values, graphs, calls), (expected, _, expected_calls) in zip(jitted, eager, strict=True):
        assert all(map(torch.equal, values, expected))
        assert graphs == [1, 1]
        more = Counter(calls) - Counter(expected_calls)
        assert not Counter(expected_calls) - Counter(calls)
        # Eager recomputation stops before the last all_reduce of a block; a graph runs to its end.
        stops = recompute and len(shape) == 2
        assert {op for op, *_ in more} == ({"all_reduce"} if stops else set())
