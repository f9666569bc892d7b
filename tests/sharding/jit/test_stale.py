"""What a function under `sm.jit` captures, changed between two calls: later calls see the change,
or are an error. Never the old value.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardmesh as sm
from shardmesh import P
from tests.device import DEVICE
from tests.recorded_operators import RecordedOperators
from tests.sharding.jit.steps import mlp, pair, runs
from tests.sharding.parallel.compositions import whole

Jit = Callable[..., Any]
FLAG = False
TABLE = {"scale": 2.0}


class ScenarioTrainer:
    """A model on two ranks, its optimizer, and a step that a scenario changes the
    surroundings of.
    """

    def __init__(
        self,
        jit: Jit,
        *,
        dropout: float = 0.0,
        extra: Any = None,
        optimizer: Any = torch.optim.AdamW,
    ) -> None:
        self.mesh = sm.init_device_mesh(DEVICE, (2,), axis_names=("tp",))
        self.model: Any = mlp(self.mesh, dropout=dropout)
        if extra is not None:
            self.model.append(extra)
        self.optimizer = optimizer(self.model.parameters(), lr=0.1)
        self.run = jit(self._step)
        self.results: list[Tensor] = []

    def _step(self, x: Any, y: Any) -> Any:
        loss = F.mse_loss(self.model(x), y)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def steps(self, n: int = 3, **shape: int) -> None:
        for _ in range(n):
            self.results.append(whole(self.run(*pair(self.mesh, len(self.results), **shape))))

    def end(self) -> list[Tensor]:
        return [*self.results, *map(whole, self.model.parameters())]


def set_lr(t: ScenarioTrainer) -> None:
    t.optimizer.param_groups[0]["lr"] = 0.01


def schedule(t: ScenarioTrainer) -> None:
    schedule = torch.optim.lr_scheduler.StepLR(t.optimizer, 1, 0.5)
    for _ in range(3):
        t.steps(1)
        schedule.step()


def set_weight_decay(t: ScenarioTrainer) -> None:
    t.optimizer.param_groups[0]["weight_decay"] = 0.5


def replace_parameter(t: ScenarioTrainer) -> None:
    t.model[3].bias = nn.Parameter(t.model[3].bias.detach() * 2 + 1)
    t.optimizer = torch.optim.AdamW(t.model.parameters(), lr=0.1)


def replace_module(t: ScenarioTrainer) -> None:
    t.model[1] = nn.ReLU()


def evaluate(t: ScenarioTrainer) -> None:
    t.model.eval()


def freeze(t: ScenarioTrainer) -> None:
    t.model[0].weight.requires_grad_(False)


def write_in_place(t: ScenarioTrainer) -> None:
    with torch.no_grad():
        t.model[0].weight.mul_(0.5)


def swap_data(t: ScenarioTrainer) -> None:
    t.model[0].weight.data = t.model[0].weight.data.clone() * 3


def keep_gradients(t: ScenarioTrainer) -> None:
    for p in t.model.parameters():
        p.grad = torch.ones_like(p)


def add_hook(t: ScenarioTrainer) -> None:
    t.model[1].register_forward_hook(lambda module, args, output: output * 3)


def append_module(t: ScenarioTrainer) -> None:
    t.model.append(nn.Tanh())


def load_optimizer(t: ScenarioTrainer) -> None:
    state = copy.deepcopy(t.optimizer.state_dict())
    for values in state["state"].values():
        values["exp_avg"].mul_(10)
    t.optimizer.load_state_dict(state)


def load_model(t: ScenarioTrainer) -> None:
    t.model.load_state_dict({name: x * 2 for name, x in t.model.state_dict().items()})


def add_group(t: ScenarioTrainer) -> None:
    extra = nn.Parameter(torch.ones(8))
    t.model.register_parameter("scale", extra)
    t.model[3].register_forward_hook(
        lambda module, args, output: output * sm.device_put(extra, t.mesh, P(), src_data_rank=None)
    )
    t.optimizer.add_param_group({"params": [extra], "lr": 0.3})


def seed(t: ScenarioTrainer) -> None:
    sm.random.manual_seed(7)


def draw(t: ScenarioTrainer) -> None:
    sm.rand(3, device_mesh=t.mesh)


def convert(t: ScenarioTrainer) -> None:
    t.model.double().float()


CHANGES = [
    set_lr,
    schedule,
    set_weight_decay,
    replace_parameter,
    replace_module,
    evaluate,
    freeze,
    write_in_place,
    swap_data,
    keep_gradients,
    add_hook,
    append_module,
    load_optimizer,
    load_model,
    add_group,
    seed,
    draw,
    convert,
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_changed_training_state_is_seen(change: Callable[[ScenarioTrainer], None]) -> None:
    def main(jit: Jit) -> Any:
        sm.random.manual_seed(3)
        trainer = ScenarioTrainer(jit, dropout=0.3)
        trainer.steps(4)
        before = runs(trainer.run)
        change(trainer)
        trainer.steps(3)
        return trainer.end(), before

    check(main)


@pytest.mark.parametrize("shape", [{"b": 3}, {"b": 0}, {"b": 1}])
def test_another_shape_is_another_graph(shape: dict[str, int]) -> None:
    def main(jit: Jit) -> Any:
        trainer = ScenarioTrainer(jit)
        trainer.steps(4)
        trainer.steps(2, **shape)
        trainer.steps(2)
        return trainer.end(), runs(trainer.run)

    check(main)


def check(main: Callable[[Jit], Any]) -> None:
    """Compare with eager, bit for bit, and that a graph ran before the change."""
    eager = sm.simulate(2)(main)(lambda f: f)
    jitted = sm.simulate(2)(main)(lambda f: sm.jit(f, backend="eager"))
    for (expected, _), (found, graphs) in zip(eager, jitted, strict=True):
        assert graphs > 0
        assert len(expected) == len(found)
        for one, other in zip(expected, found, strict=True):
            torch.testing.assert_close(other, one, rtol=0, atol=0, equal_nan=True)


# -- plain tensors, one process --------------------------------------------------------------------


def both(program: Callable[[Jit], Any]) -> None:
    """Compare a program with eager."""
    torch.manual_seed(0)
    expected = program(lambda f: f)
    torch.manual_seed(0)
    found = program(lambda f: sm.jit(f, backend="eager"))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_a_closure_variable_that_is_bound_again() -> None:
    def program(jit: Jit) -> list[Tensor]:
        scale, weight, modules = 2, torch.ones(3), [nn.ReLU(), nn.Tanh()]

        @jit
        def f(x: Tensor) -> Tensor:
            for module in modules:
                x = module(x)
            return x * scale + weight

        found = [f(torch.arange(3.0)) for _ in range(3)]
        scale = 5
        found.append(f(torch.arange(3.0)))
        weight = torch.zeros(3)
        found.append(f(torch.arange(3.0)))
        weight.add_(1)
        found.append(f(torch.arange(3.0)))
        modules.append(nn.Sigmoid())
        found.append(f(torch.arange(3.0)))
        modules[0] = nn.Tanh()
        return [*found, f(torch.arange(3.0))]

    both(program)


@pytest.mark.parametrize("kind", [list, set, deque, lambda names: dict.fromkeys(names, 1)])
def test_a_container_that_is_replaced_by_an_equal_one(kind: Any) -> None:
    """As in `set_adapter` of peft, which assigns a new list of names in every call."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.active = kind(["a"])

        def forward(self, x: Tensor) -> Tensor:
            return x * 2 if "a" in self.active else x * 3

    model = Model()
    recorded: list[int] = []

    def program(jit: Jit) -> list[Tensor]:
        f = jit(lambda x: model(x))
        found = []

        def call() -> None:
            found.append(f(torch.arange(3.0)))
            recorded.append(len(getattr(f, "recorded", ())))

        for names in ("a", "a", "a", "b", "b", "a"):
            model.active = kind([names])
            call()
        model.active.clear()  # the newest, which the first recording has not seen
        call()
        return found

    both(program)
    assert recorded[-7:] == [1, 1, 1, 2, 2, 2, 3]


@pytest.mark.parametrize(
    "decorated",
    [torch.no_grad(), torch.inference_mode(), torch.enable_grad(), torch.autocast("cpu")],
    ids=lambda x: type(x).__name__,
)
def test_what_a_function_with_a_decorator_of_torch_reaches(decorated: Any) -> None:
    def program(jit: Jit) -> list[Tensor]:
        model = nn.Sequential(nn.ReLU(), nn.Dropout(0.5))
        names = {"a": 1}

        @jit
        @decorated
        def f(x: Tensor) -> Tensor:
            return model(x) * (3 if "a" in names else 5)

        found = [f(torch.ones(3)) for _ in range(3)]
        model.eval()
        found += [f(torch.ones(3)) for _ in range(3)]
        names.pop("a")
        found.append(f(torch.ones(3)))
        model[0] = nn.Tanh()
        return [*found, f(torch.ones(3))]

    both(program)


def test_a_hook_that_is_set_again() -> None:
    """As that of `generate` is, in every call; another hook is seen."""
    recorded: list[int] = []

    def twice(module: nn.Module, args: Any, result: Tensor) -> Tensor:
        return result * 2

    def program(jit: Jit) -> list[Tensor]:
        model = nn.Tanh()
        f = jit(lambda x: model(x))
        found = []
        for _ in range(4):
            handle = model.register_forward_hook(twice)
            found.append(f(torch.arange(3.0)))
            handle.remove()
        recorded.append(len(getattr(f, "recorded", ())))
        model.register_forward_hook(lambda module, args, result: result * 5)
        return [*found, f(torch.arange(3.0))]

    both(program)
    assert recorded == [0, 1]


def test_a_container_of_containers_that_is_replaced() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.active = [["a"]]

        def forward(self, x: Tensor) -> Tensor:
            return x * len(self.active[0])

    def program(jit: Jit) -> list[Tensor]:
        model = Model()
        f = jit(lambda x: model(x))
        found = [f(torch.arange(3.0)) for _ in range(2)]
        model.active = [["a"]]
        found.append(f(torch.arange(3.0)))
        model.active[0].append("b")
        return [*found, f(torch.arange(3.0))]

    both(program)


def test_a_global() -> None:
    def program(jit: Jit) -> list[Tensor]:
        global FLAG

        @jit
        def f(x: Tensor) -> Tensor:
            return helper(x) * TABLE["scale"]

        found = []
        for flag, scale in ((False, 2.0), (False, 2.0), (True, 2.0), (True, 2.0), (False, 3.0)):
            FLAG, TABLE["scale"] = flag, scale
            found.append(f(torch.arange(3.0)))
        TABLE["scale"] = 2.0
        return found

    both(program)


def helper(x: Tensor) -> Tensor:
    return -x if FLAG else x


def test_autocast_and_grad_mode() -> None:
    def program(jit: Jit) -> list[Tensor]:
        model = nn.Linear(3, 3)

        @jit
        def f(x: Tensor) -> Tensor:
            return model(x).float() if torch.is_grad_enabled() else model(x) * 2

        found = []
        for _ in range(3):
            found.append(f(torch.ones(2, 3)).detach())
            with torch.autocast("cpu", torch.bfloat16):
                found.append(f(torch.ones(2, 3)).detach())
            with torch.no_grad():
                found.append(f(torch.ones(2, 3)))
        return found

    both(program)


def test_buffers_of_batch_norm_and_an_average() -> None:
    def program(jit: Jit) -> Any:
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
        average = [p.detach().clone() for p in model.parameters()]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

        @jit
        def step(x: Tensor) -> Tensor:
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            with torch.no_grad():
                torch._foreach_lerp_(average, list(model.parameters()), 0.1)
            return loss.detach()

        losses = [step(torch.randn(5, 3)) for _ in range(6)]
        return losses, average, [x.clone() for x in (*model.parameters(), *model.buffers())]

    both(program)


def test_gradients_accumulate_and_are_cleared() -> None:
    def program(jit: Jit) -> list[Tensor]:
        model = nn.Linear(3, 2)
        backward = jit(lambda x: model(x).square().sum().backward())
        found = []
        for step in range(8):
            backward(torch.ones(1, 3) * step)
            found.append(model.weight.grad.clone())  # type: ignore[union-attr]
            if step in (2, 3, 6):
                model.zero_grad(set_to_none=step != 3)
        return found

    both(program)


def test_an_argument_that_is_also_captured() -> None:
    def program(jit: Jit) -> list[Tensor]:
        weight = torch.ones(3)

        @jit
        def f(x: Tensor) -> Tensor:
            x.add_(1)
            return weight * 10 + x

        return [
            f(x).clone() for x in (weight, weight, torch.zeros(3), weight[:], torch.ones(3), weight)
        ]

    both(program)


def test_arguments_that_share_memory() -> None:
    def program(jit: Jit) -> list[Tensor]:
        f = jit(lambda x, y: x.add_(1) + y)
        x, y = torch.ones(4), torch.zeros(4)
        return [
            f(*args).clone()
            for args in ((x, y), (x, x), (x[:2], x[2:]), (x[:2], x[:2]), (x, y), (x[:3], x[1:]))
        ]

    both(program)


def test_numbers() -> None:
    def program(jit: Jit) -> list[Tensor]:
        f = jit(lambda x, a, n: (x * a + a**2).repeat(n))
        return [
            f(torch.ones(2), a, n)
            for a, n in ((1.5, 1), (2.5, 1), (2.5, 2), (float("inf"), 1), (0.0, 1))
        ]

    both(program)


def test_an_instance_attribute() -> None:
    class ScaleByAttribute(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factor, self.steps = 2, [1]

        def forward(self, x: Tensor) -> Tensor:
            return x * self.factor + len(self.steps)

    def program(jit: Jit) -> list[Tensor]:
        module = ScaleByAttribute()
        f = jit(module)
        found = [f(torch.ones(2)), f(torch.ones(2))]
        module.factor = 3
        found += [f(torch.ones(2)), f(torch.ones(2))]
        module.steps.append(1)
        return [*found, f(torch.ones(2))]

    both(program)


def test_a_dispatch_mode_around_a_call_changes_nothing() -> None:
    """torch's guards of tensors tell it from none, as under a `FlopCounterMode`."""

    def rank() -> None:
        x, kept = torch.ones(3, device=DEVICE), torch.ones(3, device=DEVICE)
        f = sm.jit(lambda y: kept * y, backend="eager")
        for _ in range(3):
            f(x)
        ran = runs(f)
        with RecordedOperators("aten") as called:
            f(x)
        assert called.names == ["mul"]
        assert runs(f) == ran + 1

    sm.simulate(1)(rank)()


@pytest.mark.parametrize("check_state", [True, False])
def test_a_promise_that_state_stays(check_state: bool) -> None:
    """Without the check a changed closure, or mode of a module, is not noticed; values of tensors,
    learning rates, gradients and shapes are.
    """
    scale, layer, drop = 2.0, nn.Linear(3, 1, bias=False), nn.Dropout(1.0)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    nn.init.ones_(layer.weight)

    @sm.jit(backend="eager", check_state=check_state)
    def step(x: Tensor) -> Tensor:
        y = layer(drop(x) + x).sum() * scale
        y.backward()
        optimizer.step()
        return y.detach()

    x = torch.ones(1, 3)
    assert step(x).item() == 6
    assert step(x).item() == -6  # .grad is set now, and was None
    scale = 3.0
    nn.init.ones_(layer.weight)
    layer.weight.grad = None
    assert step(x).item() == (9 if check_state else 6)
    drop.eval()
    layer.weight.grad = None
    optimizer.param_groups[0]["lr"] = 0.5
    nn.init.ones_(layer.weight)
    assert step(x).item() == (18 if check_state else 6)
    assert layer.weight[0, 0].item() == 1 - 0.5 * (6 if check_state else 2)
    assert step(torch.ones(2, 3)).shape == ()


def test_a_promise_of_a_module() -> None:
    class Scaled(nn.Linear):
        scale = 1.0

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.scale

    found = []
    for check_state in (True, False):
        module = Scaled(2, 1)
        model = sm.jit(
            nn.Sequential(module, nn.Flatten()), backend="eager", check_state=check_state
        )
        first = [model(torch.ones(1, 2)) for _ in range(2)]
        for y in first:
            y.sum().backward()
        model(torch.ones(1, 2)).sum().backward()
        module.scale = 2.0
        found.append((model(torch.ones(1, 2)) / first[0]).item())
    assert found == [2.0, 1.0]
