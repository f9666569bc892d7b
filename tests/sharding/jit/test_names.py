"""Names by which a function under `sm.jit` reaches attributes of the program's own objects: those
that it cannot, may change.
"""

from __future__ import annotations

import contextvars
import functools
import operator
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardmesh as sm
from tests.sharding.jit import steps


class Counting:
    """A trainer whose methods `step`, `append` and `linear` count in `n`."""

    def __init__(self) -> None:
        self.n = 0
        self.model = nn.Sequential(nn.Linear(3, 3))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)
        self.parts = [self.model]
        self.update: Callable[[Tensor], Tensor] = self.loss

    def step(self, x: Tensor) -> Tensor:
        self.n += 1
        return self.update(x)

    def append(self, x: Tensor) -> Tensor:
        self.n += 1
        return self.update(x)

    linear = append

    def loss(self, x: Tensor) -> Tensor:
        return self.model(x).square().mean()

    def after(self, loss: Tensor) -> Tensor:
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def make(self) -> Callable[[Tensor], Tensor]:
        """Return a function to compile."""
        raise NotImplementedError


class OfOptimizer(Counting):
    def make(self) -> Callable[[Tensor], Tensor]:
        return self.body

    def body(self, x: Tensor) -> Tensor:
        return self.after(self.loss(x))


class OfFunctionsAndLists(Counting):
    def make(self) -> Callable[[Tensor], Tensor]:
        return self.body

    def body(self, x: Tensor) -> Tensor:
        found: list[Tensor] = []
        self.parts.append(nn.Identity())
        self.parts.pop()
        found += [nn.functional.linear(x, self.model[0].weight)]
        return found[0].sum() + self.after(self.loss(x))


class InClosure(Counting):
    def make(self) -> Callable[[Tensor], Tensor]:
        optimizer = self.optimizer

        def body(x: Tensor) -> Tensor:
            loss = self.loss(x)
            loss.backward()
            optimizer.step()
            self.optimizer.zero_grad()
            return loss.detach()

        return body


@pytest.mark.parametrize("kind", [OfOptimizer, OfFunctionsAndLists, InClosure])
@pytest.mark.parametrize("call", ["step", "append", "linear", "update"])
def test_methods_of_the_program_with_names_of_methods_of_torch(
    kind: type[Counting], call: str
) -> None:
    def main(eager: bool) -> tuple[list[Tensor], int, int]:
        torch.manual_seed(0)
        trainer = kind()
        body = trainer.make()
        update: Any = body if eager else sm.jit(body, backend="eager")
        trainer.update = update
        losses = [getattr(trainer, call)(torch.ones(2, 3)) for _ in range(6)]
        return losses, trainer.n, 0 if eager else len(update.recorded)

    losses, n, graphs = main(eager=False)
    expected, counted, _ = main(eager=True)
    assert torch.equal(torch.stack(losses), torch.stack(expected))
    assert n == counted
    assert graphs <= 2


class Scale:
    """A factor, which a method of the program with a name of torch's reads."""

    def __init__(self) -> None:
        self.factor, self.other = 1.0, 0

    def step(self, x: Tensor) -> Tensor:
        return x * int(self.factor)

    @property
    def data(self) -> int:
        return int(self.factor)


class Optimizer(torch.optim.SGD):
    """An optimizer of the program."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        with torch.no_grad():
            for p in self.param_groups[0]["params"]:
                p.sub_(p.grad, alpha=int(self.factor))


def by_attribute(scale: Scale, optimizer: Any, x: Tensor) -> Tensor:
    return scale.step(x)


def by_choice(scale: Scale, optimizer: Any, x: Tensor) -> Tensor:
    return (optimizer if x is None else scale).step(x)


def by_variable(scale: Scale, optimizer: Any, x: Tensor) -> Tensor:
    one = optimizer
    one = scale
    return one.step(x)


def by_function(scale: Scale, optimizer: Any, x: Tensor) -> Tensor:
    return (lambda: scale)().step(x)


def by_string(scale: Scale, optimizer: Any, x: Tensor) -> Tensor:
    return getattr(scale, "step")(x)  # noqa: B009


def by_property(scale: Scale, optimizer: Any, x: Tensor) -> Tensor:
    return x * scale.data


def by_comprehension(scale: Scale, optimizer: Any, x: Tensor) -> Tensor:
    return next(one.step(x) for one in (scale,))


def by_subclass(scale: Scale, optimizer: Any, x: Tensor) -> Tensor:
    w = optimizer.param_groups[0]["params"][0]
    (w * x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return w.detach().clone()


WAYS: list[Callable[..., Tensor]] = [
    by_attribute,
    by_choice,
    by_variable,
    by_function,
    by_string,
    by_property,
    by_comprehension,
    by_subclass,
]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("closure", [False, True])
def test_attributes_that_the_function_reaches_are_compared(
    way: Callable[..., Tensor], closure: bool
) -> None:
    def main(eager: bool) -> list[Tensor]:
        scale, optimizer = Scale(), Optimizer([nn.Parameter(torch.ones(3))], lr=0.1)
        optimizer.factor = 1
        body = (lambda x: way(scale, optimizer, x)) if closure else way
        f: Any = body if eager else sm.jit(body, backend="eager")
        found = []
        for i in range(6):
            scale.factor = optimizer.factor = 1 + i // 3
            found.append(
                f(torch.arange(3.0)) if closure else f(scale, optimizer, torch.arange(3.0))
            )
        return found

    assert torch.equal(torch.stack(main(eager=False)), torch.stack(main(eager=True)))


# -- ways to what changes --------------------------------------------------------------------------


class Box:
    def __init__(self, value: Any) -> None:
        self.value = value


def by_partial_method() -> Any:
    box = [2]

    class Model:
        def scaled(self, number: int, x: Tensor) -> Tensor:
            return x * number * box[0]

        twice = functools.partialmethod(scaled, 2)

    model = Model()
    return lambda x: model.twice(x), lambda: box.__setitem__(0, 5)


def by_cached_property() -> Any:
    class Model:
        @functools.cached_property
        def box(self) -> Box:
            return Box(2)

    model = Model()
    return lambda x: x * model.box.value, lambda: setattr(model.box, "value", 5)


def by_computed_names() -> Any:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale_0, self.scale_1 = 2, 3

        def forward(self, x: Tensor) -> Tensor:
            for i in range(2):
                x = x * getattr(self, f"scale_{i}")
            return x

    model = Model()
    return model.forward, lambda: setattr(model, "scale_1", 5)


def by_names_in_a_tuple() -> Any:
    box = Box(2)

    def f(x: Tensor) -> Tensor:
        for name in ("value",):
            x = x * getattr(box, name)
        return x

    return f, lambda: setattr(box, "value", 5)


def by_an_attrgetter() -> Any:
    box, get = Box(2), operator.attrgetter("value")
    return lambda x: x * get(box), lambda: setattr(box, "value", 5)


def by_a_view_of_a_dict() -> Any:
    values = {"a": 2}
    view = types.MappingProxyType(values)
    return lambda x: x * view["a"], lambda: values.__setitem__("a", 5)


def by_a_weak_reference() -> Any:
    box = Box(2)
    reference = weakref.ref(box)
    return lambda x: x * reference().value, lambda: setattr(box, "value", 5)  # type: ignore[union-attr]


def by_a_context_variable() -> Any:
    variable = contextvars.ContextVar("variable", default=2)
    return lambda x: x * variable.get(), lambda: variable.set(5)


def by_a_metaclass() -> Any:
    class Meta(type):
        scale = 2

        def of_class(cls) -> int:
            return cls.scale

    class Model(metaclass=Meta):
        pass

    return lambda x: x * Model.of_class(), lambda: setattr(Meta, "scale", 5)


def by_a_descriptor() -> Any:
    class Field:
        def __get__(self, owner: Any, kind: Any) -> int:
            return owner.__dict__["_scale"]

    class Model:
        scale = Field()

        def __init__(self) -> None:
            self._scale = 2

    model = Model()
    return lambda x: x * model.scale, lambda: setattr(model, "_scale", 5)


def by_globals() -> Any:
    globals()["SCALE"] = 2
    return lambda x: x * globals()["SCALE"], lambda: globals().__setitem__("SCALE", 5)


def by_getattr_of_a_module() -> Any:
    steps.SCALE = 2  # type: ignore[attr-defined]
    return lambda x: x * getattr(steps, "SCALE"), lambda: setattr(steps, "SCALE", 5)  # noqa: B009


def by_an_import_inside() -> Any:
    steps.SCALE = 2  # type: ignore[attr-defined]

    def f(x: Tensor) -> Tensor:
        import tests.sharding.jit.steps as inner

        return x * inner.SCALE  # type: ignore[attr-defined]

    return f, lambda: setattr(steps, "SCALE", 5)


def by_a_subclass_of_dict() -> Any:
    class Config(dict):  # type: ignore[type-arg]
        pass

    config = Config()
    config.scale = 2  # type: ignore[attr-defined]
    return lambda x: x * config.scale, lambda: setattr(config, "scale", 5)  # type: ignore[attr-defined]


def by_a_mark_of_a_parameter() -> Any:
    weight: Any = nn.Parameter(torch.ones(3))
    weight.is_shared = False
    return (
        lambda x: x * (5 if weight.is_shared else 2),
        lambda: setattr(weight, "is_shared", True),
    )


def by_a_hook_of_all_modules() -> Any:
    model = nn.Identity()

    def change() -> None:
        def hook(module: nn.Module, args: Any, result: Tensor) -> Tensor:
            return result * 5

        HANDLES.append(nn.modules.module.register_module_forward_hook(hook))

    return lambda x: model(x), change


def by_a_method_that_torch_calls_on_modules_inside() -> Any:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rate = self.scale = 2

        def train(self, mode: bool = True) -> Any:
            self.scale = self.rate
            return super().train(mode)

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale

    model = nn.Sequential(Block())

    def f(x: Tensor) -> Tensor:
        model.train()
        return model(x)

    return f, lambda: setattr(model[0], "rate", 5)


def by_a_string_and_self() -> Any:
    class Model:
        def __init__(self) -> None:
            self.box = Box(2)

        def scaled(self, x: Tensor) -> Tensor:
            return x * getattr(self.box, "value")  # noqa: B009

    model = Model()
    return model.scaled, lambda: setattr(model.box, "value", 5)


def by_a_string_that_is_passed_on() -> Any:
    box = Box(2)

    def get(name: str) -> Any:
        return getattr(box, name)

    def f(x: Tensor) -> Tensor:
        return x * get("value") * (1 if hasattr(box, "value") else 0)

    return f, lambda: setattr(box, "value", 5)


def by_an_attribute_that_is_passed_on() -> Any:
    class Proxy:
        def __init__(self, box: Box) -> None:
            self.box = box

        def __getattr__(self, name: str) -> Any:
            return getattr(self.box, name)

    box = Box(2)
    proxy = Proxy(box)
    return lambda x: x * proxy.value, lambda: setattr(box, "value", 5)


def by_a_call_of_itself() -> Any:
    box, optimizer = Box(2), torch.optim.SGD([nn.Parameter(torch.ones(1))])
    box.value, box.step = 2, lambda: box.value  # type: ignore[attr-defined]

    def f(x: Tensor, one: Any = optimizer) -> Any:
        return one.step() if one is not optimizer else x * f(x, box)

    return f, lambda: setattr(box, "value", 5)


def by_an_attribute_that_is_assigned_inside() -> Any:
    class Twice:
        def go(self, x: Tensor) -> Tensor:
            return x * 2

    class Scaled:
        def __init__(self) -> None:
            self.scale = 2

        def go(self, x: Tensor) -> Tensor:
            return x * self.scale

    model = Box(Twice())
    twice, scaled = model.value, Scaled()

    def f(x: Tensor) -> Tensor:
        model.value = scaled
        x = model.value.go(x)
        model.value = twice
        return model.value.go(x)

    return f, lambda: setattr(scaled, "scale", 5)


HANDLES: list[Any] = []
WAYS = [
    by_partial_method,
    by_cached_property,
    by_computed_names,
    by_names_in_a_tuple,
    by_an_attrgetter,
    by_a_view_of_a_dict,
    by_a_weak_reference,
    by_a_context_variable,
    by_a_metaclass,
    by_a_descriptor,
    by_globals,
    by_getattr_of_a_module,
    by_an_import_inside,
    by_a_subclass_of_dict,
    by_a_mark_of_a_parameter,
    by_a_hook_of_all_modules,
    by_a_method_that_torch_calls_on_modules_inside,
    by_a_string_and_self,
    by_a_string_that_is_passed_on,
    by_an_attribute_that_is_passed_on,
    by_a_call_of_itself,
    by_an_attribute_that_is_assigned_inside,
]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_a_change_is_seen(way: Callable[[], Any]) -> None:
    f, change = way()
    compiled = sm.jit(f, backend="eager", fullgraph=True)
    x = torch.arange(3.0)
    try:
        before = [compiled(x) for _ in range(3)]
        assert len(compiled.recorded) == 1
        change()
        after = compiled(x)
        assert torch.equal(after, f(x))
        assert not torch.equal(after, before[-1])
    finally:
        while HANDLES:
            HANDLES.pop().remove()
