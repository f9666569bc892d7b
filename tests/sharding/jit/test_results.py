"""Functions under `sm.jit` that return instances of Python classes, made in each call."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardmesh as sm
from shardmesh.sharding.jit.errors import JitError
from shardmesh.sharding.jit.recording import without_history
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


class Layers:
    """Instances and tensors in a list, which may also be in another place."""

    def __init__(self, layers: list[Any]) -> None:
        self.layers, self.others = layers, [*layers]


def _state() -> Callable[[], Layer]:
    """Return a function that returns an object which `sm.jit` cannot reach."""
    names: dict[str, Any] = {"state": Layer()}
    exec(compile("def f(): return state", "/nowhere/site-packages/states.py", "exec"), names)
    return names["f"]


STATE = _state()


def test_an_object_that_is_older_than_the_call() -> None:
    """It is returned itself, with what it has then."""
    f = sm.jit(lambda x: (x * 2, STATE()), backend="eager")
    for i in range(4):
        STATE().length = i
        _, state = f(torch.ones(2))
        assert state is STATE()
        assert state.length == i
    assert not f.recorded


def _one_list_twice(x: Tensor) -> Layers:
    result = Layers([x * 2])
    result.others = result.layers
    return result


def test_a_backward_outside_through_an_instance() -> None:
    """The first call has the right gradients, and later ones are two graphs."""
    torch.manual_seed(0)
    linear = nn.Linear(4, 4)

    def loss_of(x: Tensor, scale: float) -> Layer:
        return Layer((linear(x) * scale).sum())

    f = sm.jit(loss_of, backend="eager", fullgraph=True)
    for scale in (0.5, 0.25, 0.125):
        gradients = []
        for g in (f, loss_of):
            linear.zero_grad()
            loss = g(torch.ones(2, 4), scale).keys
            assert loss is not None
            loss.backward()
            gradients.append(linear.weight.grad)
        assert torch.equal(*gradients)
    assert len(f.recorded) == 2


def test_attributes_are_numbers_and_have_no_history_where_the_step_calls_backward() -> None:
    linear = nn.Linear(4, 4)

    def step(x: Tensor, scale: float) -> Layer:
        loss = linear(x).sum() * scale
        loss.backward()
        layer = Layer(loss)
        layer.length = scale * 2
        return layer

    f = sm.jit(step, backend="eager", fullgraph=True)
    for scale in (0.5, 0.25):
        layer = f(torch.ones(2, 4), scale)
        assert type(layer.length) is float
        assert layer.length == scale * 2
        with pytest.raises(RuntimeError, match="by a graph that has no backward"):
            layer.keys.backward()


@pytest.mark.parametrize("is_module", [False, True])
def test_a_recorded_call_returns_the_instance_itself(is_module: bool) -> None:
    originals = []

    class Noted(Layer):
        def __init__(self, keys: Tensor) -> None:
            super().__init__(keys)
            originals.append(weakref.ref(self))

    class Noting(nn.Module):
        def forward(self, x: Tensor) -> Noted:
            return Noted(x * 2)

    f = sm.jit(Noting() if is_module else lambda x: Noted(x * 2), backend="eager")
    result = f(torch.ones(2))
    assert originals[0]() is result


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
        (_one_list_twice, "Layers"),
        (lambda x: (x * 2, STATE()), "Layer"),  # of an installed package, which may change it
        (lambda x: Layers([x * 2, STATE()]), "Layer"),
    ],
)
def test_what_is_refused(f: Any, kind: str) -> None:
    with pytest.raises(JitError, match=f"returned a {kind}, which sm.jit cannot make again"):
        for _ in range(3):
            sm.jit(f, backend="eager", fullgraph=True)(torch.ones(2))


def test_an_eager_result_takes_a_snapshot_only_for_instances_with_a_history() -> None:
    def look() -> Any:
        raise AssertionError("a snapshot takes long")

    x = torch.ones(2, requires_grad=True)
    plain = {"x": x, "layers": [Layer(x)], "config": Config()}
    assert without_history(plain, look) is plain
    shown = without_history({"y": [x * 2], "n": 3}, look)
    assert shown["n"] == 3
    with pytest.raises(RuntimeError, match="by a graph that has no backward"):
        shown["y"][0].sum().backward()
    with pytest.raises(AssertionError, match="takes long"):
        without_history({"layers": [Layer(x * 2)]}, look)
