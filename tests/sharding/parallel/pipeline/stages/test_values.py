"""Values that units take and return: their leaves have the same places whatever is None."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.utils import _pytree as pytree

import shardmesh as sm
from shardmesh.parallel import pipeline
from shardmesh.sharding.parallel.pipeline.stages.values import leaves_of


@dataclass
class Extras:
    mask: Tensor | None
    positions: Tensor


@dataclass
class RegisteredExtras:
    mask: Tensor | None
    positions: Tensor


@dataclass(slots=True)
class SlottedExtras:
    mask: Tensor | None
    positions: Tensor


pytree.register_dataclass(RegisteredExtras)
KINDS = (Extras, RegisteredExtras, SlottedExtras)


def test_leaves_have_the_same_places_whatever_is_none() -> None:
    x = torch.zeros(2)
    for kind in KINDS:
        assert leaves_of([kind(x, x), x]) == [x, x, x]
        without = leaves_of([kind(None, x), x])
        assert without[0] is None
        assert without[1] is x


class First(nn.Module):
    """Passes on the positions of its argument."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor, extras: RegisteredExtras) -> tuple[Tensor, Tensor]:
        masked = x if extras.mask is None else x * extras.mask
        return self.linear(masked), extras.positions


class Model(nn.Module):
    """Passes no mask where it masks nothing, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.first = First()
        self.second = nn.Linear(3, 3)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        is_needed = isinstance(mask, FakeTensor) or not bool(mask.all())
        extras = RegisteredExtras(mask if is_needed else None, x.cumsum(0))
        y, positions = self.first(x, extras)
        return self.second(y + positions)


def test_a_field_that_is_none_in_some_microbatches() -> None:
    def program() -> tuple[float, float]:
        torch.manual_seed(0)
        model = Model().double()
        x = torch.randn(4, 3, dtype=torch.float64)
        mask = torch.ones(4, 3, dtype=torch.float64)
        mask[0] = 0  # in the first of two microbatches
        halves = [model(*both) for both in zip(x.split(2), mask.split(2), strict=True)]
        expected = F.mse_loss(torch.cat(halves), x)
        mesh = sm.init_device_mesh("cpu", (2,), axis_names=("pp",))
        pipe = pipeline(model, mesh, split=["second"], microbatches=2)
        return pipe.step(x, x, loss_fn=F.mse_loss, mask=mask).item(), expected.item()

    for loss, expected in sm.simulate(2)(program)():
        assert abs(loss - expected) < 1e-12
