"""Random programs of units and of operators between them, cut anywhere: as the whole model."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.sharding.parallel.pipeline.stages.chained import assert_equal, run, stages_of, whole

D = 4


class Unit(nn.Module):
    """A unit that takes one or two tensors and returns one of several structures."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.linear = nn.Linear(D, D, dtype=torch.float64)
        self.dropout = nn.Dropout(0.25)
        self.register_buffer("scale", torch.full((D,), 0.5, dtype=torch.float64))

    def forward(self, x: Tensor, other: Tensor | None = None) -> Any:
        y = self.dropout(self.linear(x).tanh()) * self.scale
        if self.kind == "norm":
            return y if other is None else y + other.mean(0, keepdim=True)
        if self.kind == "pair":
            return y, {"argument": x, "twice": [y, 2 * y], "number": 3, "nothing": None}
        if self.kind == "views":
            both = torch.cat([y, y.sin()], -1)
            return both.chunk(2, -1)
        return (y, other) if other is not None else (y,)


class Program(nn.Module):
    """A forward that follows a random list of instructions."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        rng = random.Random(seed)
        self.units = nn.ModuleList(
            [Unit(rng.choice(["norm", "pair", "views", "tuple"])) for _ in range(rng.randint(3, 6))]
        )
        self.dropout = nn.Dropout(0.5)
        self.bias = nn.Parameter(torch.randn(D, dtype=torch.float64))
        calls = list(range(len(self.units)))
        if rng.random() < 0.4:
            calls.insert(rng.randint(1, len(calls)), rng.choice(calls[:-1]))  # called twice
        self.program: list[tuple[str, list[float]]] = []
        for number in calls:
            for _ in range(rng.randint(0, 3)):
                kind = rng.choice(
                    "add mul add_ relu_ view_mul_ sin dropout bias mask linear".split()
                )
                self.program.append((kind, [rng.random() for _ in range(2)]))
            self.program.append((f"unit {number}", [rng.random() for _ in range(2)]))
        self.results = [rng.random() for _ in range(rng.randint(1, 3))]

    def forward(self, x: Tensor, *, mask: Tensor) -> dict[str, Any]:
        values = [x]
        newest = x

        def pick(position: float) -> Tensor:
            return values[int(position * len(values))]

        for kind, (first, second) in self.program:
            a, b = pick(first), pick(second)
            if kind.startswith("unit"):
                unit = self.units[int(kind.split()[1])]
                result = unit(newest) if second < 0.5 else unit(newest, a)
                tensors = [y for y in torch.utils._pytree.tree_leaves(result) if y is not None]
                values += [y for y in tensors if isinstance(y, Tensor)]
                newest = tensors[0]
                continue
            if kind == "add":
                newest = a + b
            elif kind == "mul":
                newest = newest * a
            elif kind == "sin":
                newest = (newest + a).sin()
            elif kind == "dropout":
                newest = self.dropout(newest)
            elif kind == "bias":
                newest = newest + self.bias
            elif kind == "mask":
                newest = newest.masked_fill(mask, 0.0)
            elif kind == "linear":
                newest = nn.functional.linear(newest, self.units[0].linear.weight)
            else:  # in place
                newest = newest if newest is not x else newest.clone()
                if kind == "add_":
                    newest.add_(a.detach(), alpha=0.5)
                elif kind == "relu_":
                    newest = newest.clone() if newest.is_leaf else newest
                    newest.relu_()
                else:
                    newest[:, :2].mul_(0.5)
            values.append(newest)
        return {"results": [pick(position) for position in self.results], "last": newest}


def loss_of(result: dict[str, Any]) -> Tensor:
    return result["last"].square().sum() + sum(x.sin().sum() for x in result["results"])


def inputs(batch: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    generator = torch.Generator().manual_seed(batch)
    x = torch.randn(batch, D, dtype=torch.float64, generator=generator)
    return (x,), {"mask": torch.arange(D) % 2 == 0}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("seed", range(40))
def test_a_random_program_in_random_stages_is_the_whole_one(seed: int) -> None:
    torch.manual_seed(seed)
    model = Program(seed)
    rng = random.Random(seed)
    paths = [f"units.{i}" for i in range(len(model.units))]
    order = [kind.split()[1] for kind, _ in model.program if kind.startswith("unit")]
    first_calls = [f"units.{i}" for i in dict.fromkeys(order)]
    assert set(first_calls) == set(paths)
    stages = rng.choice([2, 3, len(paths)])
    split = sorted(rng.sample(first_calls[1:], stages - 1), key=first_calls.index)
    own = [[stage] for stage in range(stages)]
    if rng.random() < 0.5:  # a V
        own = [[*{stage, stages - 1 - stage}] for stage in range((stages + 1) // 2)]
    microbatches = [inputs(3), inputs(1)]
    torch.manual_seed(1)
    try:
        expected = whole(copy.deepcopy(model), microbatches, loss_of)
    except RuntimeError as error:  # the program overwrites what its backward needs
        assert "inplace" in str(error) or "in-place" in str(error)
        model.program = [("sin" if kind.endswith("_") else kind, at) for kind, at in model.program]
        torch.manual_seed(1)
        expected = whole(copy.deepcopy(model), microbatches, loss_of)
    ranks = stages_of(lambda: copy.deepcopy(model), split, stages, own, example=microbatches[0])
    torch.manual_seed(1)
    assert_equal(run(ranks, microbatches, loss_of), expected, exact=False)
