"""Mixtures of experts are one operator in a graph: steps have the bits, the collectives and the
memory of eager mode, whichever experts the tokens choose.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
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
    x, y = (sm.distribute_tensor(t, mesh, split, src_data_rank=None) for t in (x, y))
    return x, y, sm.distribute_tensor(pull, mesh, P(), src_data_rank=None)


def whole(x: Any) -> Tensor:
    return x.detach().full_tensor() if isinstance(x, sm.ShardedTensor) else x.detach()


def gradients_of(module: nn.Module, *inputs: Any) -> list[Any]:
    tensors: list[Any] = [*module.parameters(), *inputs]
    return [x.grad.clone() for x in tensors]


def trained(
    form: str,
    capacity: float | None,
    backend: str | None,
    is_plain: bool = False,
    recompute: bool = False,
    passes: Any = False,
    has_peak: bool = False,
) -> tuple[list[Tensor], list[Any], int]:
    """Train for some steps, under `sm.jit` if a backend is given.

    Returns: losses, gradients and parameters; for each step how many collectives were launched, and
        with how many bytes, by kind and by axes; with `has_peak` the peak of memory in the last.
    """
    shape = {"ep": (1, 4), "fsdp": (2, 2)}[form]
    mesh = sm.init_device_mesh(DEVICE, shape, axis_names=("dp", "ep"))
    model = model_of(mesh, form, capacity, recompute)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def step(x: Any, y: Any, pull: Any) -> Any:
        loss = F.cross_entropy(model(x, pull), y)
        loss.backward()
        gradients = gradients_of(model)
        optimizer.step()
        optimizer.zero_grad()
        return loss, gradients

    f = step
    if backend is not None:
        f = sm.jit(step, backend=backend, fullgraph=True, compiler_options=passes)
    values, launches, peak = [], [], 0
    for i in range(STEPS):
        inputs = batch(mesh, i, is_plain)
        memory = PeakMemory(DEVICE)
        with sm.debug.comm_report() as report, memory if has_peak else nullcontext():
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
    assert_same(
        run(form, capacity, None, is_plain=is_plain),
        run(form, capacity, "eager", is_plain=is_plain),
    )


def assert_same(eager: list[Any], jitted: list[Any]) -> None:
    for expected, found in zip(eager, jitted, strict=True):
        assert all(map(torch.equal, found[0], expected[0]))
        assert found[1] == expected[1]


def test_processes_have_the_bits_and_the_memory_of_eager(world4: Pool) -> None:
    eager, jitted = (
        world4(trained, "fsdp", None, backend, has_peak=True) for backend in (None, "eager")
    )
    assert_same(eager, jitted)
    for (*_, expected), (*_, found) in zip(eager, jitted, strict=True):
        assert found <= 1.1 * expected  # how long a collective is in flight varies


@pytest.mark.parametrize("form", ["ep", slow("fsdp")])
def test_a_block_that_is_recomputed(form: str) -> None:
    """Under `fully_shard` the recomputation is inside of a unit, which gathers for it."""
    run = sm.simulate(4)(trained)
    eager = run(form, None, None, recompute=True)
    assert_same(eager, run(form, None, "eager", recompute=True))
    for (values, *_), (expected, *_) in zip(eager, run(form, None, None), strict=True):
        assert all(map(torch.equal, values, expected))


@pytest.mark.slow  # Inductor compiles
def test_inductor() -> None:
    run = sm.simulate(4)(trained)
    for eager, jitted in zip(
        run("fsdp", 0.8, None), run("fsdp", 0.8, "inductor", passes=None), strict=True
    ):
        torch.testing.assert_close(jitted[0], eager[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("options", [None, slow({"overlap": True, "regather": True})])
def test_passes(options: Any) -> None:
    run = sm.simulate(4)(trained)
    for eager, jitted in zip(
        run("fsdp", None, None), run("fsdp", None, "eager", passes=options), strict=True
    ):
        assert all(map(torch.equal, jitted[0], eager[0]))


# -- one layer -------------------------------------------------------------------------------------


def layer_of(mesh: Any, **options: Any) -> Experts:
    torch.manual_seed(0)
    make = options.pop("make", Expert)
    return Experts([make() for _ in range(COUNT)], mesh, axis="a", **options)


def routed(mesh: Any, i: int) -> tuple[Any, Any]:
    """Return rows [n d] and the experts' logits [n e] of a call."""
    generator = torch.Generator().manual_seed(i)
    parts = [torch.randn(6, n, generator=generator).to(DEVICE) for n in (D, COUNT)]
    return tuple(sm.distribute_tensor(x, mesh, P("a"), src_data_rank=None) for x in parts)  # type: ignore[return-value]


def compared(mesh: Any, make: Callable[[], nn.Module], use: Callable[[Any, int], list[Any]]) -> Any:
    """Check that a module under `sm.jit` does what it does in eager mode; return it."""
    eager: Any = make()
    jitted: Any = sm.jit(make(), backend="eager", fullgraph=True)
    for i in range(4):
        torch.manual_seed(i)
        expected = use(eager, i)
        torch.manual_seed(i)
        assert all(map(torch.equal, map(whole, use(jitted, i)), map(whole, expected)))
        eager.zero_grad()
        jitted.zero_grad()
    assert len(jitted.recorded) >= 1
    return jitted


class Routed(nn.Module):
    """Experts of given logits."""

    def __init__(self, experts: Experts) -> None:
        super().__init__()
        self.experts = experts

    def forward(self, x: Any, logits: Any) -> Any:
        return self.experts(x, top_k_routing(logits, K))


@every_rank(2)
def test_a_module_whose_loss_is_outside(mesh: sm.DeviceMesh) -> None:
    def use(module: nn.Module, i: int) -> list[Any]:
        x, logits = (t.requires_grad_() for t in routed(mesh, i))
        y = module(x, logits) if i % 2 else checkpoint(module, x, logits, use_reentrant=False)
        loss = y.square().mean() + module(x, logits).mean()
        if i % 2:
            loss.backward(retain_graph=True)
        loss.backward()
        return [y, *gradients_of(module, x, logits)]

    compared(mesh, lambda: Routed(layer_of(mesh)), use)


@every_rank(2)
def test_a_hook_that_copies_what_is_saved_is_a_break(mesh: sm.DeviceMesh) -> None:
    module = Routed(layer_of(mesh))

    def step(x: Any, logits: Any) -> Any:
        module.zero_grad()
        with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda x: x):
            loss = module(x, logits).square().mean()
        loss.backward()
        return loss.detach(), gradients_of(module)

    with pytest.raises(JitError, match="a hook for saved tensors copies what moe saves, and"):
        sm.jit(step, backend="eager", fullgraph=True)(*routed(mesh, 0))
    parts = sm.jit(step, backend="eager")
    for i in range(4):
        (loss, found), (wanted, expected) = parts(*routed(mesh, i)), step(*routed(mesh, i))
        assert torch.equal(whole(loss), whole(wanted))
        assert all(map(torch.equal, map(whole, found), map(whole, expected)))


@every_rank(2)
def test_without_gradients(mesh: sm.DeviceMesh) -> None:
    def use(module: nn.Module, i: int) -> list[Any]:
        with torch.no_grad():
            return [module(*routed(mesh, i))]

    jitted = compared(mesh, lambda: Routed(layer_of(mesh)), use)
    assert "saved" not in str(jitted.recorded[0]).replace("(result, saved)", "")


class Noisy(Expert):
    """An expert with dropout."""

    def forward(self, rows: Tensor) -> Tensor:
        return F.dropout(super().forward(rows), 0.5)


@every_rank(1)
def test_dropout_and_autocast_inside(mesh: sm.DeviceMesh) -> None:
    def use(module: nn.Module, i: int) -> list[Any]:
        x, logits = (t.requires_grad_() for t in routed(mesh, i))
        with torch.autocast(torch.device(DEVICE).type, torch.bfloat16):
            y = module(x, logits)
        y.square().mean().backward()
        return [y, *gradients_of(module, x, logits)]

    compared(mesh, lambda: Routed(layer_of(mesh, make=Noisy)), use)


def test_lowering_lists_what_is_not_counted() -> None:
    def main() -> None:
        mesh = sm.init_device_mesh(DEVICE, (2,), axis_names=("a",))
        module = Routed(layer_of(mesh))

        def step(x: Any, logits: Any) -> Any:
            loss = module(x, logits).square().mean()
            loss.backward()
            module.zero_grad()
            return loss

        f = sm.jit(step, backend="eager")
        lowered = f.lower(*routed(mesh, 0))
        for i in range(2):
            f(*routed(mesh, i))
        for cost in (lowered.cost_analysis(), f.recorded[0].cost_analysis()):
            assert (cost.launches, cost.not_counted) == ({}, ("backward_of_moe", "moe"))
        assert " = moe(" in str(lowered)
        assert sm.debug.timeline(lowered)

    sm.simulate(2)(main)()


# -- what is no operator of its inputs alone -------------------------------------------------------


def scaled(mesh: Any, factor: Any) -> Callable[[Any, Any], Any]:
    """Return a step whose experts multiply by `factor(x)`, which is no parameter of theirs."""
    weights = sm.distribute_tensor(torch.ones(COUNT, D), mesh, P("a"), src_data_rank=None)
    params = {"w": weights.requires_grad_()}

    def step(x: Any, logits: Any) -> Any:
        more = factor(x)
        expert = lambda rows, p: rows * p["w"] * more  # noqa: E731
        y = moe(x, top_k_routing(logits, K), expert, params, axis="a")
        y.square().mean().backward()
        found, params["w"].grad = params["w"].grad, None
        return y.detach(), found

    return step


OTHERS = {
    "a tensor of shape .* that the function computes": lambda x: x.to_local().sum().detach(),
    "a gradient flows to tensors that are no inputs of it, of shapes": (
        lambda x, w=nn.Parameter(torch.tensor(2.0)): w  # noqa: B008
    ),
}


@pytest.mark.parametrize("text", OTHERS)
def test_an_expert_that_uses_other_tensors_is_a_break(
    text: str, caplog: pytest.LogCaptureFixture
) -> None:
    def main() -> None:
        mesh = sm.init_device_mesh(DEVICE, (2,), axis_names=("a",))
        step = scaled(mesh, OTHERS[text])
        with pytest.raises(JitError, match=rf"test_experts.py:\d+: moe runs as one .*{text}"):
            sm.jit(step, backend="eager", fullgraph=True)(*routed(mesh, 0))
        parts = sm.jit(step, backend="eager")
        for i in range(4):
            expected, found = step(*routed(mesh, i)), parts(*routed(mesh, i))
            assert all(map(torch.equal, map(whole, found), map(whole, expected)))

    with caplog.at_level(logging.WARNING, logger="shardmesh"):
        sm.simulate(2)(main)()


@every_rank(2)
def test_a_derivative_of_a_gradient_raises(mesh: sm.DeviceMesh) -> None:
    module = Routed(layer_of(mesh))

    def step(x: Any, logits: Any) -> Any:
        x = x.detach().requires_grad_()
        (g,) = torch.autograd.grad(module(x, logits).square().mean(), x, create_graph=True)
        g.square().sum().backward()
        return gradients_of(module)

    with pytest.raises(JitError, match=r"its gradient has no derivative there \(create_graph=True"):
        sm.jit(step, backend="eager")(*routed(mesh, 0))
