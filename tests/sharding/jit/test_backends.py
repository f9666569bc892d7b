"""Backends of `sm.jit`: segments around what runs in Python, names and functions, what cannot be
compiled.
"""

from __future__ import annotations

import itertools
import math
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

import shardmesh as sm
from shardmesh import P
from shardmesh.sharding.jit.backends.segments import Segment
from shardmesh.sharding.jit.collectives import ORDERED
from shardmesh.sharding.jit.draws import Draw
from shardmesh.sharding.jit.errors import JitError
from tests.device import DEVICE
from tests.sharding.jit.steps import composed, mean_square, mlp, pair
from tests.sharding.jit.test_steps import assert_same
from tests.sharding.parallel.compositions import EVEN, UNEVEN, Composition, whole
from tests.tiers import slow

CASES = [
    slow(Composition("ddp", "", "plain", EVEN, (2,))),
    Composition("zero1", "", "global", UNEVEN, (3,)),
    slow(Composition("fsdp", "sp", "global", UNEVEN, (2, 2))),
    slow(Composition("hsdp", "tp", "plain", EVEN, (1, 2, 2))),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_backend_of_torch_compile(case: Composition) -> None:
    simulated = sm.simulate(math.prod(case.shape))
    for expected, found in zip(
        simulated(composed)(case, None), simulated(composed)(case, "aot_eager"), strict=True
    ):
        assert_same(found, expected, 1e-9)


def counting(sizes: list[int]) -> Any:
    def backend(module: fx.GraphModule, inputs: list[Tensor]) -> Any:
        sizes.append(sum(node.op == "call_function" for node in module.graph.nodes))
        return module

    return backend


def test_a_function_as_backend_gets_segments_with_collectives_in_them() -> None:
    def main() -> Any:
        mesh = sm.init_device_mesh(DEVICE, (2,), axis_names=("tp",))
        model, sizes = mlp(mesh, dropout=0.3), []

        @sm.jit(backend=counting(sizes))
        def step(x: Any, y: Any) -> Any:
            loss = mean_square(model, x, y)
            loss.backward()
            model.zero_grad()
            return loss

        sm.random.manual_seed(0)
        for i in range(3):
            step(*pair(mesh, i))
        return len(sizes), sizes[0] > 10

    # The draw comes first, then all in one segment.
    assert sm.simulate(2)(main)() == [(1, True)] * 2


def test_draws_stay_outside_of_what_a_backend_may_replay() -> None:
    """So that CUDA graphs of segments do not repeat random numbers."""

    def main() -> Any:
        mesh = sm.init_device_mesh(DEVICE, (2,), axis_names=("tp",))
        x, targets = sm.ones(64, device_mesh=mesh, placements=P("tp")), []

        def backend(module: fx.GraphModule, inputs: Any) -> Any:
            targets.extend(node.target for node in module.graph.nodes)
            return module

        step = sm.jit(lambda x: F.dropout(x * 2 + 1, 0.5).square() + x, backend=backend)
        found = [step(x).full_tensor() for _ in range(3)]
        different = not any(torch.equal(a, b) for a, b in itertools.combinations(found, 2))
        return different, len(targets) > 0, any(isinstance(target, Draw) for target in targets)

    assert sm.simulate(2)(main)() == [(True, True, False)] * 2


def test_what_a_backend_cannot_compile_runs_as_python_with_a_warning() -> None:
    def broken(module: fx.GraphModule, inputs: list[Tensor]) -> Any:
        raise NotImplementedError("no such thing")

    f = sm.jit(lambda x: (x.sin() * 2 + x.cos()).sum(), backend=broken)
    x = torch.arange(3.0)
    f(x)
    with pytest.warns(
        UserWarning,
        match=(
            "runs as Python, since the backend cannot compile it: NotImplementedError: no such "
            "thing"
        ),
    ):
        assert torch.equal(f(x), f(x))


def test_writes_and_views_across_segments() -> None:
    """A view of an argument is written in one segment, seen in another, and a number is read
    between them.
    """

    def f(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        rows = x[1:]
        rows.add_(y).mul_(2).sub_(1)
        factor = x.sum().item()
        z = (x * factor).relu() + rows[0]
        x[0].copy_(z[1]).neg_().add_(3)
        return z, rows, x.t()

    for backend in ("eager", "aot_eager"):
        g = sm.jit(f, backend=backend)
        for step in range(4):
            generator = torch.Generator().manual_seed(step)
            x, y = torch.randn(3, 3, generator=generator), torch.randn(3, generator=generator)
            mine, theirs = x.clone(), x.clone()
            found, expected = g(mine, y), f(theirs, y)
            torch.testing.assert_close(found, expected)
            torch.testing.assert_close(mine, theirs)
            assert found[1].untyped_storage()._cdata == mine.untyped_storage()._cdata
            found[1].zero_()
            assert mine[1:].abs().sum() == 0


def test_collectives_keep_their_order() -> None:
    """Also where one is not used, and in a graph that is compiled as a whole."""

    def main(backend: Any) -> Any:
        mesh = sm.init_device_mesh(DEVICE, (2,), axis_names=("x",))

        def f(a: Any, b: Any) -> Any:
            late, early = b.redistribute(P()), a.redistribute(P())
            return early.exp() + 1, late.sin() * 2

        run, a, b = (
            sm.jit(f, backend=backend, compiler_options=False),
            *(sm.ones(n, device_mesh=mesh, placements=P("x")) for n in (4, 6)),
        )
        seen: list[list[int]] = []
        for _ in range(3):
            records: list[Any] = []
            mesh.world.observers.append(records.append)
            found = run(a, b)
            mesh.world.observers.remove(records.append)
            seen.append([record.bytes_received for record in records])
        return seen, [whole(y).tolist() for y in found]

    for backend in ("eager", "aot_eager"):
        for seen, _ in sm.simulate(2)(main)(backend):
            assert seen == [[12, 8]] * 3


def test_an_unknown_backend() -> None:
    f = sm.jit(lambda x: (x + 1) * 2 - 3, backend="no such backend")
    f(torch.ones(2))
    with pytest.raises((JitError, ValueError, RuntimeError), match="no such backend"):
        f(torch.ones(2))


def test_a_small_graph_has_no_segments() -> None:
    f = sm.jit(lambda x: x + 1, backend=counting([]))
    for _ in range(3):
        f(torch.ones(2))
    assert not any(isinstance(node.target, Segment) for node in f.recorded[0].graph.nodes)


def test_options_of_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are set while Inductor compiles, and only then."""
    from torch._inductor import compile_fx, config

    seen = []

    def compiled(module: fx.GraphModule, inputs: list[Tensor]) -> Any:
        seen.append((config.cpp_wrapper, config.epilogue_fusion, config.fallback_random))
        return lambda given: module(*given)

    monkeypatch.setattr(compile_fx, "compile_fx", compiled)
    f = sm.jit(
        lambda x: (x.sin() + 1).cos() * 2,
        backend="inductor",
        compiler_options={"cpp_wrapper": True, "epilogue_fusion": False},
    )
    x = torch.arange(3.0)
    assert torch.equal(f(x), f(x))
    assert seen == [(True, False, True)]
    assert (config.cpp_wrapper, config.epilogue_fusion) == (False, True)


def test_inputs_of_a_segment_are_freed_inside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the generated code empties out of its list of inputs is held by nothing else, if nothing
    uses it later.
    """
    from torch._inductor import compile_fx

    freed = []

    def compiled(module: fx.GraphModule, _: list[Tensor]) -> Any:
        def run(given: list[Tensor]) -> Any:
            inputs, references = list(given), [weakref.ref(x) for x in given]
            given.clear()
            results = module(*inputs)
            del inputs
            freed.append([x() is None for x in references])
            return results

        return run

    monkeypatch.setattr(compile_fx, "compile_fx", compiled)

    def f(x: Tensor) -> Tensor:
        noise, kept = torch.rand(3), torch.rand(3)  # drawn outside of a segment
        return (x.sin() + noise + kept).cos() * 2 + torch.bernoulli(kept)

    step, x = sm.jit(f, backend="inductor"), torch.arange(3.0)
    for _ in range(3):
        step(x)
    assert freed == [[False, True, False]] * 2


@pytest.mark.slow
def test_cpp_wrapper() -> None:
    def main() -> Any:
        mesh = sm.init_device_mesh(DEVICE, (2,), axis_names=("x",))
        f = sm.jit(
            lambda x: (x.sin() * 2).redistribute(P()).cos() + 1,
            backend="inductor",
            compiler_options={"cpp_wrapper": True},
        )
        x = sm.ones(4, 6, device_mesh=mesh, placements=P("x"))
        return [f(x).to_local() for _ in range(3)]

    for found in sm.simulate(2)(main)():
        torch.testing.assert_close(found[1:], found[:1] * 2)


@pytest.mark.parametrize(
    ("options", "backend", "error", "text"),
    [
        (
            {"cpp_wraper": True},
            None,
            ValueError,
            "has no 'cpp_wraper'; it has dead_collectives, .*, and the names in torch._inductor",
        ),
        (
            {"cpp_wrapper": 1},
            None,
            TypeError,
            r"compiler_options\['cpp_wrapper'\] must be bool, as in torch._inductor.config, got 1",
        ),
        (
            {"cpp_wrapper": True},
            "eager",
            ValueError,
            "has 'cpp_wrapper', an option of Inductor, but the backend is 'eager'",
        ),
    ],
)
def test_wrong_options_of_inductor(
    options: dict[str, Any], backend: str | None, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        sm.jit(lambda x: x, backend=backend, compiler_options=options)


def test_cudagraphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="cudagraphs=True needs a CUDA device"):
        sm.jit(lambda x: x, cudagraphs=True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(
        ValueError,
        match=r"has 'triton\.cudagraphs', an option of Inductor, but the backend is 'eager'",
    ):
        sm.jit(lambda x: x, backend="eager", cudagraphs=True)
    assert torch.Tag.cudagraph_unsafe in ORDERED.tags
