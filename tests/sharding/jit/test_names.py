"""Names by which a function under `sm.jit` reaches attributes of the program's own objects: those
that it cannot, may change.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardmesh as sm


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
