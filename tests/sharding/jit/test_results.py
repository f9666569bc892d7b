"""Functions under `sm.jit` that return instances of Python classes, made in each call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardmesh as sm
from shardmesh.sharding.jit.errors import JitError
from tests.sharding.jit.steps import runs


class Layer:
    """Keys of one layer."""

    def __init__(self, keys: Tensor | None = None) -> None:
        self.keys, self.length, self.dtype = keys, 0, torch.float32

    def update(self, x: Tensor) -> Tensor:
        self.keys = x if self.keys is None else torch.cat([self.keys, x])
        self.length += len(x)
        return self.keys


class Cache:
    """The layers, their class, and the owner's configuration."""

    def __init__(self, config: Any) -> None:
        self.layers, self.kind, self.config = [Layer(), Layer()], Layer, config


class Config:
    """Is older than the calls."""

    scale = 2.0


class Model(nn.Module):
    """Returns a cache and a number."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.config = nn.Linear(4, 4), Config()

    def forward(self, x: Tensor) -> dict[str, Any]:
        cache = Cache(self.config)
        for layer in cache.layers:
            x = layer.update(self.layer(x) * self.config.scale)
        return {"loss": x.sum(), "cache": cache}


def test_a_module_that_returns_a_cache() -> None:
    model = Model()
    jitted = sm.jit(model, backend="eager", fullgraph=True)
    caches = []
    for i in range(3):
        x = torch.full((3, 4), float(i))
        results = [f(x) for f in (jitted, model)]
        for result in results:
            model.zero_grad()
            result["loss"].backward()
            result["grad"] = model.layer.weight.grad
        one, other = results
        assert torch.equal(one["grad"], other["grad"])
        for layer, expected in zip(one["cache"].layers, other["cache"].layers, strict=True):
            assert torch.equal(layer.keys, expected.keys)
            assert (type(layer), layer.length, layer.dtype) == (Layer, 3, torch.float32)
        assert one["cache"].config is model.config
        assert one["cache"].kind is Layer
        caches.append(one["cache"])
    assert len(set(map(id, caches))) == 3
    assert len(jitted.recorded) == 1
    caches[2].layers[0].update(torch.ones(1, 4))  # it is a cache as any other
    assert caches[2].layers[0].length == 4
    assert caches[1].layers[0].length == 3


def test_a_function_that_returns_an_instance() -> None:
    f = sm.jit(lambda x: (Layer(x * 2), 3), backend="eager", fullgraph=True)
    for i in range(3):
        layer, number = f(torch.full((2,), float(i)))
        assert layer.keys.tolist() == [2.0 * i] * 2
        assert (layer.length, number) == (0, 3)
    assert runs(f) == 2


def _twice(x: Tensor) -> list[Layer]:
    layer = Layer(x * 2)
    return [layer, layer]


@pytest.mark.parametrize(
    ("f", "kind"),
    [
        (_twice, "Layer"),
        (lambda x: nn.Linear(2, 2), "Linear"),
        (lambda x: {x.sum()}, "set"),
        (lambda x: lambda: x, "function"),
    ],
)
def test_what_is_refused(f: Any, kind: str) -> None:
    with pytest.raises(JitError, match=f"returned a {kind} that it has made"):
        for _ in range(3):
            sm.jit(f, backend="eager", fullgraph=True)(torch.ones(2))
