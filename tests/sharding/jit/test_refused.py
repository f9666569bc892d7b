"""What a graph could not repeat is an error that names the line; nothing is silently wrong."""

from __future__ import annotations

import itertools
import random
import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import shardmesh as sm
from shardmesh import P
from shardmesh.sharding.jit.errors import JitError
from tests.device import DEVICE

X = torch.arange(3.0)


def item_of_int(x: Tensor) -> Tensor:
    return x * int(x.argmax())


def branch(x: Tensor) -> Tensor:
    return x if x.sum() > 0 else -x


def printed(x: Tensor) -> Tensor:
    print(x)
    return x


def formatted(x: Tensor) -> Tensor:
    return torch.tensor(float(f"{x.sum().item():.3f}"))


def as_list(x: Tensor) -> Tensor:
    return x * x.tolist()[0]


def as_array(x: Tensor) -> Tensor:
    return x + torch.from_numpy(x.numpy() * 2)


def as_float(x: Tensor) -> Tensor:
    return x * float(x.sum())


def compared(x: Tensor) -> Tensor:
    return x * 2 if x.sum().item() > 1 else x


READS = [item_of_int, branch, printed, formatted, as_list, as_array, as_float, compared]


@pytest.mark.parametrize("f", READS, ids=lambda f: f.__name__)
def test_reading_a_value(f: Any) -> None:
    line = f.__code__.co_firstlineno + 1
    with pytest.raises(JitError, match=rf"{re.escape(__file__)}:{line}: .*inside sm.jit"):
        sm.jit(f, backend="eager", fullgraph=True)(X.clone())


@pytest.mark.parametrize("f", [item_of_int, branch, as_list, as_float], ids=lambda f: f.__name__)
def test_reading_a_value_of_a_sharded_tensor(f: Any) -> None:
    def main() -> None:
        mesh = sm.init_device_mesh(DEVICE, (2,), axis_names=("x",))
        with pytest.raises(
            JitError, match=rf"{re.escape(__file__)}:{f.__code__.co_firstlineno + 1}: "
        ):
            sm.jit(f, backend="eager", fullgraph=True)(sm.device_put(X, mesh, P("x")))

    sm.simulate(2)(main)()


def test_a_number_of_a_tensor_that_stays_a_number() -> None:
    f = sm.jit(
        lambda x: (x * x.sum().item() ** 2, x.mean().item() + 1), backend="eager", fullgraph=True
    )
    for scale in (1.0, 1.0, 2.0, -3.0):
        x = X * scale
        found, number = f(x)
        torch.testing.assert_close(found, x * x.sum().item() ** 2, rtol=0, atol=0)
        assert number == x.mean().item() + 1
        assert type(number) is float


@pytest.mark.parametrize("draw", [np.random.rand, random.random], ids=["numpy", "python"])
def test_random_numbers_of_python(draw: Any) -> None:
    with pytest.raises(JitError, match=r"random numbers of Python or NumPy"):
        sm.jit(lambda x: x * torch.tensor(draw()), backend="eager", fullgraph=True)(X)


@pytest.mark.parametrize("draw", [np.random.rand, random.random], ids=["numpy", "python"])
@pytest.mark.parametrize("before", [True, False])
def test_random_numbers_of_python_in_a_simulated_world(draw: Any, before: bool) -> None:
    """Ranks share the generators; what another rank draws meanwhile is not this one's."""

    def main(draws: bool) -> Any:
        mesh = sm.init_device_mesh(DEVICE, (2,), axis_names=("a",))
        x = sm.ones(4, device_mesh=mesh, placements=P("a"))

        @sm.jit(backend="eager", fullgraph=True, compiler_options=False)
        def f(x: Any) -> Any:
            first = draw() if draws and before else 1.0
            y = x.redistribute(P()) * first
            return y * draw() if draws and not before else y

        g = f if mesh.world.rank == 0 else f.__wrapped__
        found = []
        for _ in range(3):
            found.append(g(x).full_tensor()[0].item())
            if mesh.world.rank:
                draw()
        return found

    with pytest.raises(JitError, match="random numbers of Python or NumPy"):
        sm.simulate(2)(main)(True)
    assert sm.simulate(2)(main)(False) == [[1.0] * 3] * 2


def test_state_that_changes_in_every_call() -> None:
    class CountsCalls(nn.Module):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return x * self.calls

    f = sm.jit(CountsCalls(), backend="eager", fullgraph=True)
    assert torch.equal(f(X), X)
    assert torch.equal(f(X), X * 2)
    with pytest.raises(JitError, match=r"calls.* was 2 and is 3"):
        f(X)


def test_results_collected_in_a_list() -> None:
    kept: list[Tensor] = []

    @sm.jit(backend="eager", fullgraph=True)
    def f(x: Tensor) -> Tensor:
        kept.append(x + 1)
        return x

    assert f(X) is f(X) is X
    with pytest.raises(JitError, match=r"kept had 2 entries and has 3"):
        f(X)


def forever() -> Any:
    while True:
        yield torch.ones(3)


SOURCES = {
    "list": iter,
    "enumerate": enumerate,
    "generator": lambda data: (x for x in data),
    "map": lambda data: map(abs, data),
    "zip": lambda data: zip(data, data, strict=True),
    "endless generator": lambda data: forever(),
    "count": lambda data: itertools.count(),
    "DataLoader": lambda data: iter(torch.utils.data.DataLoader(data)),
    "dict": lambda data: iter(dict.fromkeys(range(9))),
}


@pytest.mark.parametrize("source", SOURCES)
def test_an_iterator(source: str) -> None:
    batches = SOURCES[source]([torch.ones(3) * i for i in range(9)])
    f = sm.jit(lambda x: (next(batches), x + 1)[1], backend="eager", fullgraph=True)
    with pytest.raises(
        JitError, match=r"batches is an iterator and was advanced: call next\(\) outside"
    ):
        for _ in range(3):
            f(X)


def test_an_iterator_that_is_only_reached() -> None:
    class HoldsIterator:
        def __init__(self) -> None:
            self.batches, self.scale = forever(), torch.ones(3)

        def step(self, x: Tensor) -> Tensor:
            return x * self.scale + len([self.batches])

    trainer = HoldsIterator()
    f = sm.jit(trainer.step, backend="eager", fullgraph=True)
    found = [f(next(trainer.batches)) for _ in range(4)]
    assert all(torch.equal(x, torch.ones(3) * 2) for x in found)
    assert len(f.recorded) == 1


@pytest.mark.parametrize(
    "kind",
    [random.Random, np.random.default_rng, np.random.RandomState],
    ids=lambda kind: kind.__name__,
)
def test_a_generator_of_random_numbers(kind: Any) -> None:
    generator = kind(3)
    f = sm.jit(lambda x: x * generator.random(), backend="eager", fullgraph=True)
    with pytest.raises(JitError, match="changes Python state"):
        for _ in range(3):
            f(X)


DYNAMIC = {
    "mask": lambda x: x[x > 0],
    "masked_select": lambda x: x.masked_select(x > 0),
    "nonzero": lambda x: x.nonzero(),
    "unique": lambda x: x.round().unique(),
    "bincount": lambda x: x.round().long().clamp_min(0).bincount(),
    "bincount longer": lambda x: (x.round().long().clamp_min(0) + 5).bincount(minlength=3),
    "repeat_interleave": lambda x: x.repeat_interleave(x.round().long().clamp_min(0)),
}


@pytest.mark.filterwarnings("ignore:repeat_interleave has no sharding rule")
@pytest.mark.parametrize("f", DYNAMIC.values(), ids=DYNAMIC)
def test_a_shape_that_depends_on_values(f: Any) -> None:
    with pytest.raises(
        JitError,
        match=(
            r"test_refused.py:\d+: (the shape of the result of \w+ depends on values|.* reads a "
            r"value)"
        ),
    ):
        sm.jit(f, backend="eager", fullgraph=True)(X)

    def sharded() -> str:
        x = sm.device_put(X, sm.init_device_mesh("cpu", (2,), axis_names=("a",)), sm.P("a"))
        with pytest.raises(JitError) as refused:
            sm.jit(f, backend="eager", fullgraph=True)(x)
        return str(refused.value)

    assert len(set(sm.simulate(2)(sharded)())) == 1


SHARDED = {
    "the shape of the result of nonzero depends on values, of bool": lambda x: (x > 0).nonzero(),
    "a selection by a mask depends on values, of bool": lambda x: x[x > 0],
    "the shape of the result of unique depends on values, of f32": lambda x: x.unique(),
    "of bincount depends on values, of i64.* minlength=2 must": lambda x: x.long().bincount(
        minlength=2
    ),
    "histc without limits reads .* of f32.* Pass min= and max=": lambda x: x.histc(4),
}


@pytest.mark.parametrize("text", SHARDED)
def test_the_error_names_the_operator_and_its_layout(text: str) -> None:
    def main() -> str:
        x = sm.device_put(X, sm.init_device_mesh(DEVICE, (2,), axis_names=("a",)), sm.P("a"))
        with pytest.raises(JitError, match=rf"test_refused.py:\d+: .*{text}") as refused:
            sm.jit(SHARDED[text], backend="eager", fullgraph=True)(x)
        return str(refused.value)

    assert len(set(sm.simulate(2)(main)())) == 1


def test_bincount_of_no_more_values_than_its_minlength() -> None:
    def main() -> None:
        mesh = sm.init_device_mesh(DEVICE, (2,), axis_names=("a",))
        count = sm.jit(lambda x: x.bincount(minlength=5), backend="eager", fullgraph=True)
        for numbers in ([0, 4, 4], [1, 1, 0], [2, 2, 2]):
            x = torch.tensor(numbers)
            found = count(sm.device_put(x, mesh, P("a")))
            assert torch.equal(found.full_tensor().cpu(), x.bincount(minlength=5))
        assert len(count.recorded) == 1
        with pytest.raises(JitError, match=r"the value was True .* and is False now"):
            count(sm.device_put(torch.tensor([0, 5, 1]), mesh, P("a")))

    sm.simulate(2)(main)()


def test_checks_of_torch_run_in_every_call() -> None:
    def f(x: Tensor) -> Tensor:
        torch._assert_async((x > -1).all(), "x must be more than -1")
        return x * 2

    checked = sm.jit(f, backend="eager", fullgraph=True)
    for _ in range(2):
        assert torch.equal(checked(X), X * 2)
    with pytest.raises(RuntimeError, match="more than -1"):
        checked(-X)


def test_shapes_that_do_not() -> None:
    def f(x: Tensor) -> Tensor:
        counts = x.abs().long().bincount(minlength=30)
        repeated = x.repeat_interleave(torch.tensor([2, 0, 1]), output_size=3)
        return (
            x[torch.tensor([0, 2])].sum()
            + counts[:3]
            + repeated
            + x.clone().masked_fill_(x > 0, 1.0)
        )

    compiled = sm.jit(f, backend="eager", fullgraph=True)
    for x in (X, X.flip(0), -X):
        assert torch.equal(compiled(x), f(x))


def test_a_static_argument_that_cannot_be_hashed() -> None:
    """Also where another argument has a gradient history, and after a call that was recorded."""
    f = sm.jit(lambda x, sizes: x.sum(), static_argnums=1, backend="eager", fullgraph=True)
    f(X.clone().requires_grad_(), (1,)).backward()
    for x in (X, X.clone().requires_grad_(), X.clone().requires_grad_() * 2):
        for call in (lambda: f(x, [1]), lambda: f(x, sizes=([],))):  # noqa: B023
            with pytest.raises(TypeError, match=r"static argument sizes is a (list|tuple) that"):
                call()


def test_static_arguments_that_are_equal_and_of_other_classes() -> None:
    f = sm.jit(lambda x, n: x * n, static_argnums=1, backend="eager")
    for _ in range(2):
        for n in (1, 1.0, True):
            assert f(torch.ones(2, dtype=torch.int64), n).dtype is (torch.ones(1).long() * n).dtype
    assert len(f.recorded) == 3


def test_a_gradient_scaler() -> None:
    def main(where: str) -> list[Tensor]:
        mesh = sm.init_device_mesh("cpu", (2,), axis_names=("fsdp",))
        torch.manual_seed(0)
        model = sm.parallel.fully_shard(nn.Linear(3, 3), mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        scaler = sm.training.GradScaler("cpu", init_scale=2.0**4)

        def finish() -> None:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

        def step(x: Tensor) -> None:
            scaler.scale(model(x).square().mean()).backward()
            if where == "inside":
                finish()

        f = step if where == "eager" else sm.jit(step, backend="eager", fullgraph=True)
        for i in range(5):
            f(X * (i + 1) if i != 3 else X * float("inf"))
            if where != "inside":
                finish()
        return [p.full_tensor().detach() for p in model.parameters()]  # type: ignore[attr-defined]

    for expected, found in zip(
        sm.simulate(2)(main)("eager"), sm.simulate(2)(main)("outside"), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    with pytest.raises(
        JitError, match=r"test_refused.py:\d+: GradScaler.step reads .* Keep scaler.step"
    ):
        sm.simulate(2)(main)("inside")


@pytest.mark.parametrize("kind", ["StepLR", "LambdaLR", "CosineAnnealingLR", "OneCycleLR"])
def test_a_scheduler_inside(kind: str) -> None:
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    options = {
        "StepLR": [1],
        "LambdaLR": [lambda step: 0.5**step],
        "CosineAnnealingLR": [9],
        "OneCycleLR": [2.0, 50],
    }
    schedule = getattr(torch.optim.lr_scheduler, kind)(optimizer, *options[kind])

    @sm.jit(backend="eager", fullgraph=True)
    def step(x: Tensor) -> None:
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()

    with pytest.raises(JitError, match=r"reads a value|set a learning rate|changes Python state"):
        for _ in range(3):
            step(X)


def test_the_rate_of_a_scheduler_is_read() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(3))], lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    f = sm.jit(lambda x: x * schedule.get_last_lr()[0], backend="eager", fullgraph=True)
    for i in range(4):
        assert torch.equal(f(X), X * 0.5**i)
        optimizer.step()
        schedule.step()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_code_compiled_by_torch_inside_is_right_or_refused(backend: str) -> None:
    block = torch.nn.Linear(3, 3)
    compiled = torch.compile(block, backend=backend)

    def step(x: Tensor) -> Tensor:
        return compiled(x).square().sum() * 2

    f = sm.jit(step, backend="eager", fullgraph=True)
    for scale in (1.0, 2.0, 3.0):
        try:
            found = f(X * scale)
        except JitError:
            continue
        torch.testing.assert_close(found.detach(), (block(X * scale).square().sum() * 2).detach())


def test_seeding_inside() -> None:
    @sm.jit(backend="eager", fullgraph=True)
    def f(x: Tensor) -> Tensor:
        torch.manual_seed(torch.initial_seed() + 1)
        return x + torch.rand(3)

    with pytest.raises(JitError, match="seeded inside"):
        f(X)


def test_backward_through_a_result() -> None:
    """Where backward has run in the function, or does not run after the first call."""
    w = torch.ones(3, requires_grad=True)

    def step(x: Tensor) -> Tensor:
        (x * w).sum().backward()
        w.grad = None
        return (x * w).sum()

    f = sm.jit(step, backend="eager", fullgraph=True)
    for _ in range(3):
        with pytest.raises(RuntimeError, match=r"call backward\(\) inside the function"):
            f(X).backward()
    g = sm.jit(lambda x: x * w, backend="eager", fullgraph=True)
    g(X)
    with pytest.raises(RuntimeError, match=r"call backward\(\) inside the function"):
        (g(X) + w).sum().backward()
    with pytest.raises(RuntimeError, match=r"call backward\(\) inside the function"):
        torch.autograd.grad(g(X).sum(), w, allow_unused=True)


def test_moving_a_parameter_inside() -> None:
    w = nn.Parameter(torch.ones(3))

    @sm.jit(backend="eager", fullgraph=True)
    def f(x: Tensor) -> Tensor:
        w.data = w.data * x
        return w.detach() + 0

    with pytest.raises(JitError, match=r"`.data =`"):
        for _ in range(3):
            f(X)


def test_what_is_no_function() -> None:
    with pytest.raises(TypeError, match="takes a function"):
        sm.jit(3)  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="'n' in static_argnames is no parameter"):
        sm.jit(lambda x: x, static_argnames="n")


def test_an_object_made_inside() -> None:
    with pytest.raises(JitError, match=r"returned a Linear, which sm.jit cannot make"):
        sm.jit(lambda x: nn.Linear(3, 3), backend="eager", fullgraph=True)(X)


def test_many_recordings_warn_once() -> None:
    f = sm.jit(lambda x: x + 1, backend="eager", fullgraph=True)
    for n in range(7):
        f(torch.ones(n))
    with pytest.warns(UserWarning, match="was recorded 8 times"):
        f(torch.ones(8))
