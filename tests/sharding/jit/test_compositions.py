"""`sm.jit` with the other transforms: each composition equals eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import shardmesh as sm
from shardmesh import P
from tests.device import DEVICE
from tests.sharding.jit.steps import mean_square, mlp, pair, runs
from tests.sharding.parallel.compositions import (
    UNEVEN,
    Composition,
    batch,
    loss_of,
    parallelized,
    whole,
)
from tests.tiers import slow

Jit = Callable[..., Any]


def gradient(jit: Jit, mesh: sm.DeviceMesh) -> Any:
    return jit(sm.grad(lambda w, x: F.linear(x, w).square().sum()))


def value_and_gradient(jit: Jit, mesh: sm.DeviceMesh) -> Any:
    return jit(sm.value_and_grad(lambda w, x: F.linear(x, w).square().sum(), argnums=(0, 1)))


def gradient_of_jit(jit: Jit, mesh: sm.DeviceMesh) -> Any:
    return sm.grad(jit(lambda w, x: F.linear(x, w).square().sum()))


def pullback(jit: Jit, mesh: sm.DeviceMesh) -> Any:
    def f(w: Any, x: Any) -> Any:
        out, pull = sm.vjp(F.linear, x, w)
        return pull(out)

    return jit(f)


def recomputed(jit: Jit, mesh: sm.DeviceMesh) -> Any:
    inner = sm.remat(lambda w, x: F.dropout(F.linear(x, w), 0.5).square())
    return jit(sm.value_and_grad(lambda w, x: inner(w, x).sum()))


def mapped(jit: Jit, mesh: sm.DeviceMesh) -> Any:
    def body(w: Tensor, x: Tensor) -> Tensor:
        return sm.psum((x @ w.T).square().sum(), "x")

    f = sm.shard_map(body, mesh=mesh, in_specs=(P("x"), P()), out_specs=P())
    return jit(sm.value_and_grad(f))


def inside_mapped(jit: Jit, mesh: sm.DeviceMesh) -> Any:
    inner = jit(lambda w, x: (x @ w.T).square().sum())
    return sm.shard_map(
        lambda w, x: sm.psum(inner(w, x), "x"), mesh=mesh, in_specs=(P("x"), P()), out_specs=P()
    )


def nested(jit: Jit, mesh: sm.DeviceMesh) -> Any:
    inner = jit(lambda w, x: F.linear(x, w).relu())
    return jit(lambda w, x: inner(w, x) + inner(w, x * 2))


def autocast(jit: Jit, mesh: sm.DeviceMesh) -> Any:
    def f(w: Any, x: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return F.linear(x, w).float() * 2

    return jit(f)


def accumulated(jit: Jit, mesh: sm.DeviceMesh) -> Any:
    def f(w: Any, x: Any) -> Any:
        with sm.accumulate_grads():
            for _ in range(2):
                F.linear(x, w).square().sum().backward()
        found, w.grad = w.grad, None
        return found

    run = jit(f)
    return lambda w, x: run(w.detach().requires_grad_(), x)


def redistributed(jit: Jit, mesh: sm.DeviceMesh) -> Any:
    return jit(
        lambda w, x: (
            w.redistribute(P(None, "x")),
            w.redistribute(P()),
            sm.with_sharding_constraint(F.linear(x, w), P("x")),
        )
    )


def asynchronous(jit: Jit, mesh: sm.DeviceMesh) -> Any:
    def f(w: Any, x: Any) -> Any:
        started = w.redistribute(P(), async_op=True)
        y = x.exp()
        return started.wait() + y.sum()

    return jit(f)


def random(jit: Jit, mesh: sm.DeviceMesh) -> Any:
    def f(w: Any, x: Any) -> Any:
        made = sm.randn(3, 5, device_mesh=mesh, placements=P("x"))
        return made, F.dropout(w, 0.3), torch.rand_like(x), w.clone().normal_()

    return jit(f)


PROGRAMS = [
    gradient,
    value_and_gradient,
    gradient_of_jit,
    pullback,
    recomputed,
    mapped,
    inside_mapped,
    nested,
    autocast,
    accumulated,
    redistributed,
    asynchronous,
    random,
]


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_equals_eager(program: Callable[..., Any], ranks: int) -> None:
    def main(jit: Jit) -> Any:
        sm.random.manual_seed(1)
        mesh = sm.init_device_mesh(DEVICE, (ranks,), axis_names=("x",))
        f = program(jit, mesh)
        rows = 6 if "mapped" in program.__name__ else 5  # uneven, where a mapped function allows it
        found = []
        for step in range(4):
            generator = torch.Generator().manual_seed(step)
            w = sm.device_put(
                torch.randn(rows, 4, generator=generator), mesh, P("x"), src_data_rank=None
            )
            x = sm.device_put(torch.randn(3, 4, generator=generator), mesh, P(), src_data_rank=None)
            found += [whole(y) for y in pytree.tree_leaves(f(w, x))]
        return found, sm.random.get_rng_state()

    eager = sm.simulate(ranks)(main)(lambda f: f)
    for expected, found in zip(
        eager, sm.simulate(ranks)(main)(lambda f: sm.jit(f, backend="eager")), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_arguments_of_jit() -> None:
    def main() -> Any:
        mesh = sm.init_device_mesh(DEVICE, (2,), axis_names=("x",))
        split, whole_ = sm.NamedSharding(mesh, P("x")), sm.NamedSharding(mesh, P())
        f = sm.jit(
            lambda a, b: a + b, in_shardings=(split, whole_), out_shardings=whole_, backend="eager"
        )
        g = sm.jit(lambda x, n: x * n if n > 2 else x + 0, static_argnames="n", backend="eager")
        h = sm.jit(lambda x: x + 1, donate_argnums=0, backend="eager")
        found = []
        for _ in range(3):
            x = sm.ones(4, device_mesh=mesh)
            found += [f(torch.ones(4), x), g(x, 3.0), g(x, n=1.0), h(x)]
            with pytest.raises(RuntimeError, match="donated"):
                x.sum()
        return [y.full_tensor()[0].item() for y in found], found[0].spec == P(None)

    assert sm.simulate(2)(main)() == [([2.0, 3.0, 1.0, 2.0] * 3, True)] * 2


def test_a_donated_argument_that_is_returned_in_an_instance() -> None:
    class Holder:
        def __init__(self, x: Any, y: Any) -> None:
            self.values = [x, y]

    def main() -> Any:
        mesh = sm.init_device_mesh(DEVICE, (2,), axis_names=("x",))
        f = sm.jit(lambda x: Holder(x, x * 2), donate_argnums=0, backend="eager", fullgraph=True)
        sums = []
        for i in range(3):
            x = sm.ones(4, device_mesh=mesh) + i
            values = f(x).values
            assert values[0] is x
            sums += [y.sum().item() for y in values]
        return sums

    assert sm.simulate(2)(main)() == [[4.0, 8.0, 8.0, 16.0, 12.0, 24.0]] * 2


def test_methods_and_decorators() -> None:
    class JittedMethod(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

        @sm.jit(backend="eager")
        def scaled(self, x: Tensor, by: float = 1.0) -> Tensor:
            return self.weight * x * by

    one, other = JittedMethod(), JittedMethod()
    with torch.no_grad():
        other.weight.fill_(3)
    for by in (1.0, 2.0, 4.0):
        assert one.scaled(torch.ones(2), by=by).tolist() == [by] * 2
        assert other.scaled(torch.ones(2), by=by).tolist() == [3 * by] * 2
    assert JittedMethod.scaled.__name__ == "scaled"


def test_reports_and_budgets_count_a_graph() -> None:
    def main() -> Any:
        mesh = sm.init_device_mesh(DEVICE, (2,), axis_names=("tp",))
        model = mlp(mesh)

        @sm.jit(backend="eager", compiler_options=False)
        def step(x: Any, y: Any) -> Any:
            loss = mean_square(model, x, y)
            loss.backward()
            model.zero_grad()
            return loss

        used = []
        for i in range(3):
            with sm.debug.comm_report() as report:
                step(*pair(mesh, i))
            used.append((report.by_op, report.by_axis, report.by_operator))
        with pytest.raises(sm.errors.CommBudgetError), sm.debug.comm_budget(bytes=8):
            step(*pair(mesh, 0))
        cost = step.recorded[-1].cost_analysis()
        return used, runs(step), cost.bytes_received, report.by_axis

    for used, ran, bytes_received, by_axis in sm.simulate(2)(main)():
        assert used[0] == used[1] == used[2]
        assert ran == 3 - 1
        assert {axis: received for axis, (_, received) in by_axis.items()} == bytes_received


def test_lower_on_an_abstract_mesh() -> None:
    mesh = sm.AbstractMesh((4, 8), ("dp", "tp"))
    f = sm.jit(lambda x, u, w: F.linear(F.silu(F.linear(x, u)), w).square().sum())
    layouts = [((16, 64), P("dp")), ((256, 64), P("tp")), ((64, 256), P(None, "tp"))]
    lowered = f.lower(*(sm.Layout.of(mesh, spec, shape) for shape, spec in layouts))
    cost = lowered.cost_analysis()
    assert cost.bytes_received == {"tp": 2 * 7 * 4 * 64 * 4 // 8}
    assert cost.launches == {"tp": 1}
    assert cost.flops == 2 * 2 * 4 * 64 * 32
    memory = lowered.memory_analysis()
    assert memory.inputs == 4 * (4 * 64 + 32 * 64 + 64 * 32)
    assert 0 < memory.peak <= 4 * (4 * 32 + 3 * 4 * 64)
    text = lowered.as_text()
    assert "over tp, receives 1,792 bytes" in text
    assert "f32[16, 64] @ P('dp', None)" in text
    compiled = lowered.compile()
    passes = (
        "dead_collectives 0, common_collectives 0, fuse_casts 0, reduce_scatter 0, bucket_bytes 0"
    )
    assert compiled.as_text() == f"# nodes changed by passes: {passes}\n{text}"
    assert compiled.cost_analysis() == cost


def test_lower_before_and_after_the_passes() -> None:
    def f(x: Any, y: Any, z: Any) -> Any:
        first = x.redistribute(P())
        y.add_(1)  # memory of its own, also on "meta"
        return first + x.redistribute(P()), y.redistribute(P()), z.redistribute(P())

    def main(options: Any) -> Any:
        mesh = sm.init_device_mesh(DEVICE, (4,), axis_names=("dp",))
        args = [sm.ones(8, device_mesh=mesh, placements=P("dp")) for _ in range(3)]
        g = sm.jit(f, backend="eager", compiler_options=options)
        lowered = g.lower(*args)
        compiled = lowered.compile()
        before = lowered.as_text()
        compiled(*args)
        (ran,) = g.recorded
        assert lowered.as_text() == before
        assert before.count("shardmesh.all_gather") == lowered.cost_analysis().launches["dp"] == 4
        assert compiled.cost_analysis() == ran.cost_analysis()
        assert compiled.memory_analysis() == ran.memory_analysis()
        assert compiled.cost_analysis().launches["dp"] == compiled.as_text().count(
            "shardmesh.all_gather"
        )
        return (
            compiled.passes,
            ran.passes,
            compiled.as_text().splitlines()[0],
            ran.cost_analysis().launches["dp"],
        )

    passes = {
        "dead_collectives": 0,
        "common_collectives": 1,
        "fuse_casts": 0,
        "reduce_scatter": 0,
        "bucket_bytes": 0,
    }
    first = (
        "# nodes changed by passes: dead_collectives 0, common_collectives 1, fuse_casts 0, "
        "reduce_scatter 0, bucket_bytes 0"
    )
    assert sm.simulate(4)(main)(None) == [(passes, passes, first, 3)] * 4
    assert sm.simulate(4)(main)(False) == [({}, {}, "# no passes", 4)] * 4


def test_lower_changes_nothing() -> None:
    def main() -> Any:
        mesh = sm.init_device_mesh(DEVICE, (2,), axis_names=("tp",))
        model = mlp(mesh)
        optimizer = torch.optim.AdamW(model.parameters())

        @sm.jit
        def step(x: Any, y: Any) -> Any:
            loss = mean_square(model, x, y)
            loss.backward()
            optimizer.step()
            return loss

        before = [whole(p) for p in model.parameters()]
        with sm.debug.comm_report() as report:
            lowered = step.lower(*pair(mesh, 0))
        after = [whole(p) for p in model.parameters()]
        assert all(map(torch.equal, before, after))
        return (
            report.launches,
            len(optimizer.state),
            [p.grad for p in model.parameters()],
            lowered.cost_analysis().launches,
        )

    assert sm.simulate(2)(main)() == [(0, 0, [None] * 4, {"tp": 2})] * 2


@pytest.mark.parametrize("form", ["fsdp", *map(slow, ("ddp", "zero1", "hsdp"))])
def test_lower_a_step_of_a_sharded_model(form: str) -> None:
    """On every rank the collectives of the graph that is recorded; the model is trained as
    before.
    """
    case = Composition(form, "sp" if form == "zero1" else "", "global", UNEVEN, (2, 2))

    def main(is_lowered: bool) -> Any:
        mesh = sm.init_device_mesh(DEVICE, case.shape, axis_names=case.names)
        model = parallelized(case, mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        @sm.jit(backend="eager", compiler_options=False)
        def step(inputs: Any, targets: Any) -> Any:
            loss = loss_of(model(inputs), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        losses = []
        for i in range(4):
            if is_lowered and i in (0, 3):
                cost = step.lower(*batch(case, mesh, i)).cost_analysis()
            losses.append(whole(step(*batch(case, mesh, i))))
            if is_lowered and i == 3:
                found = step.recorded[-1].cost_analysis()
                assert (cost.bytes_received, cost.launches) == (
                    found.bytes_received,
                    found.launches,
                )
                assert cost.launches
        return losses

    for expected, found in zip(
        sm.simulate(4)(main)(False), sm.simulate(4)(main)(True), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
