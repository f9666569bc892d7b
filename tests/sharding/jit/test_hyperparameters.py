"""Hyperparameters that change from step to step are inputs of a graph, bit for bit as in eager
steps; so is the decay of an `EMA`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardmesh as sm
from tests.device import DEVICE
from tests.sharding.jit.steps import mean_square, mlp, pair, training_step
from tests.sharding.parallel.compositions import whole

Set = Callable[[Any, int], None]


def group(**schedules: Callable[[int], Any]) -> Set:
    """Return a function that sets hyperparameters of an optimizer for a step."""

    def at(optimizer: Any, step: int) -> None:
        for one in optimizer.param_groups:
            one.update({name: value(step) for name, value in schedules.items()})

    return at


CASES: dict[str, tuple[Callable[..., Any], Set]] = {
    "AdamW": (torch.optim.AdamW, group(weight_decay=lambda i: 0.1 * 0.9**i)),
    "AdamW foreach": (
        lambda p, **k: torch.optim.AdamW(p, foreach=True, **k),
        group(weight_decay=lambda i: 0.1 + i, eps=lambda i: 1e-8 * 2**i),
    ),
    "AdamW fused": (
        lambda p, **k: torch.optim.AdamW(p, fused=True, **k),
        group(betas=lambda i: (0.9 - 0.01 * i, 0.99), weight_decay=lambda i: 0.1 / (1 + i)),
    ),
    "Adam, weight decay": (
        lambda p, **k: torch.optim.Adam(p, foreach=False, weight_decay=0.5, **k),
        group(weight_decay=lambda i: 0.5 / (1 + i)),
    ),
    "SGD": (
        lambda p, **k: torch.optim.SGD(p, momentum=0.9, **k),
        group(momentum=lambda i: 0.9 - 0.05 * i, dampening=lambda i: 0.1 * i),
    ),
    "SGD fused": (
        lambda p, **k: torch.optim.SGD(p, momentum=0.1, fused=True, weight_decay=0.1, **k),
        group(lr=lambda i: 0.1 / (1 + i), weight_decay=lambda i: 0.1),
    ),
    "SGD fused, equal": (
        lambda p, **k: torch.optim.SGD(p, momentum=0.5, fused=True, weight_decay=0.1, **k),
        group(
            lr=lambda i: 0.1 / (1 + i // 2),
            weight_decay=lambda i: 0.1 / (1 + i // 3),
            momentum=lambda i: 0.1 * (1 + i % 2),
        ),
    ),
    "RMSprop": (
        torch.optim.RMSprop,
        group(alpha=lambda i: 0.9 - 0.1 * i, weight_decay=lambda i: 0.1 * i),
    ),
    "NAdam": (torch.optim.NAdam, group(weight_decay=lambda i: 0.1 * i)),
    "Adagrad": (torch.optim.Adagrad, group(lr_decay=lambda i: 0.1 * i)),
    "Muon": (
        lambda p, **k: sm.optim.Muon(p, ns_dtype=torch.float32, **k),
        group(momentum=lambda i: 0.95 - 0.1 * i),
    ),
}


@pytest.mark.one_in(5)
@pytest.mark.parametrize("case", CASES)
def test_schedules_of_hyperparameters(case: str) -> None:
    make, at = CASES[case]

    def main(jit: bool) -> Any:
        mesh = sm.init_device_mesh(DEVICE, (2,), axis_names=("tp",))
        model = mlp(mesh)
        optimizer = make(model.parameters(), lr=0.1)

        step = training_step(model, optimizer)
        f = sm.jit(step, backend="eager") if jit else step
        losses = []
        for i in range(7):
            at(optimizer, i)
            losses.append(whole(f(*pair(mesh, i))))
        return [*losses, *map(whole, model.parameters())], recordings(f) if jit else 0

    check(main, at_most=4)


def recordings(f: Any) -> int:
    return len(f.recorded)


def check(main: Callable[[bool], Any], at_most: int) -> None:
    for (expected, _), (found, count) in zip(
        sm.simulate(2)(main)(False), sm.simulate(2)(main)(True), strict=True
    ):
        assert 0 < count <= at_most
        for one, other in zip(expected, found, strict=True):
            torch.testing.assert_close(other, one, rtol=0, atol=0)


def test_a_schedule_of_torch_that_changes_momentum() -> None:
    def main(jit: bool) -> Any:
        mesh = sm.init_device_mesh(DEVICE, (2,), axis_names=("tp",))
        model = mlp(mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20)

        step = training_step(model, optimizer)
        f = sm.jit(step, backend="eager") if jit else step
        losses = []
        for i in range(12):
            losses.append(whole(f(*pair(mesh, i))))
            schedule.step()
        return [*losses, *map(whole, model.parameters())], recordings(f) if jit else 0

    check(main, at_most=2)


def run(
    f: Any, weight: Tensor, optimizer: Any, values: list[float], key: str = "weight_decay"
) -> list[float]:
    found = []
    for value in values:
        optimizer.param_groups[0][key] = value
        found.append(f(weight).item())
    return found


@pytest.mark.parametrize(
    ("code", "values", "count"),
    [
        # A comparison: once for each answer.
        (lambda w, d: w * 2 if d > 0.25 else w * d, [0.5, 0.4, 0.3, 0.2, 0.1, 0.5], 3),
        (lambda w, d: w * d if d else w, [0.5, 0.4, 0.3, 0.0, 0.2, 0.0], 3),
        (lambda w, d: w * float(d), [0.5, 0.4, 0.4, 0.3, 0.5], 3),  # read: once for each value
        (lambda w, d: w * (1 - d * 2) ** 2, [0.5, 0.4, 0.3, 0.2], 2),
        (lambda w, d: w * max(1 - d, 0.55), [0.5, 0.4, 0.42, 0.46], 3),
    ],
)
def test_what_python_code_asks_of_a_hyperparameter(
    code: Any, values: list[float], count: int
) -> None:
    weight = nn.Parameter(torch.tensor(3.0))
    optimizer = torch.optim.SGD([weight], lr=0.1, weight_decay=values[0])

    def f(w: Tensor) -> Tensor:
        return code(w, optimizer.param_groups[0]["weight_decay"]).detach()

    jitted = sm.jit(f, backend="eager")
    assert run(jitted, weight, optimizer, values) == run(f, weight, optimizer, values)
    assert len(jitted.recorded) == count


def test_a_rate_may_be_compared_but_not_read() -> None:
    weight = nn.Parameter(torch.tensor(3.0))
    optimizer = torch.optim.SGD([weight], lr=0.1)

    def f(w: Tensor) -> Tensor:
        return (w * 2 if optimizer.param_groups[0]["lr"] > 0.25 else w).detach()

    jitted, values = sm.jit(f, backend="eager"), [0.1, 0.2, 0.3, 0.4, 0.2]
    assert run(jitted, weight, optimizer, values, "lr") == run(f, weight, optimizer, values, "lr")
    assert len(jitted.recorded) == 2
    with pytest.raises(
        sm.errors.JitError, match=r"test_hyperparameters.py:\d+: __float__ of a number that changes"
    ):
        sm.jit(
            lambda w: w * float(optimizer.param_groups[0]["lr"]), backend="eager", fullgraph=True
        )(weight)


def test_setting_a_hyperparameter_inside() -> None:
    weight = nn.Parameter(torch.tensor(3.0))
    optimizer = torch.optim.SGD([weight], lr=0.1, weight_decay=0.1)

    @sm.jit(backend="eager", fullgraph=True)
    def f(w: Tensor) -> Tensor:
        optimizer.param_groups[0]["weight_decay"] *= 0.5
        return w * 2

    with pytest.raises(sm.errors.JitError, match="has set weight_decay"):
        for _ in range(3):
            f(weight)


@pytest.mark.parametrize("warm_up", [False, True])
def test_an_average_inside_the_step(warm_up: bool) -> None:
    def main(jit: bool) -> Any:
        mesh = sm.init_device_mesh(DEVICE, (2,), axis_names=("fsdp",))
        model = sm.parallel.fully_shard(mlp(None), mesh, src_data_rank=None)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        average = sm.training.EMA(model, 0.9)

        update = training_step(model, optimizer)

        def step(x: Any, y: Any) -> Any:
            loss = update(x, y)
            average.update()
            return loss

        f = sm.jit(step, backend="eager") if jit else step
        losses = []
        for i in range(6):
            if warm_up:
                average.decay = (1 + i) / (10 + i)
            losses.append(whole(f(*pair(None, i))))
            if i == 3:
                with average.swapped():
                    losses.append(whole(mean_square(model, *pair(None, 0)).detach()))
        assert average.updates == average.state_dict()["updates"] == 6
        return [*losses, *map(whole, average.average.values())], recordings(f) if jit else 0

    check(main, at_most=2)


class Remembering(torch.optim.SGD):
    """Keeps what it has computed of its rate in its state, as `LBFGS` keeps its last step."""

    def step(self, closure: Any = None) -> Any:
        (group,) = self.param_groups
        for p in group["params"]:
            state = self.state[p]
            if "last" in state:
                rate, (half,) = state["last"]
                p.data.sub_(p.grad * rate + p.grad * half)
            state["last"] = group["lr"], (group["lr"] / 2,)


def limited(parameters: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(parameters, lr, max_iter=3)


@pytest.mark.parametrize("kind", [Remembering, limited])
def test_an_optimizer_that_keeps_a_rate_in_its_state(kind: Any) -> None:
    """A call that makes no graph leaves numbers there."""

    def train(jit: Any) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
        optimizer = kind(model.parameters(), lr=0.5)

        def step(x: Tensor) -> Tensor:
            def closure() -> Tensor:
                optimizer.zero_grad()
                loss = model(x).square().mean()
                loss.backward()
                return loss

            closure()
            optimizer.step(closure)
            return model.weight.detach().clone()

        f = jit(step)
        generator = torch.Generator().manual_seed(1)
        return [f(torch.randn(6, 4, generator=generator)) for _ in range(5)]

    expected = train(lambda f: f)
    assert all(map(torch.equal, train(lambda f: sm.jit(f, backend="eager")), expected))
