"""Why a function is recorded again: said in words, each reason once, and a warning after eight
recordings.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardmesh as sm
from shardmesh import P
from tests.device import DEVICE
from tests.sharding.jit.steps import mean_square, mlp, pair

X = torch.ones(4, 3)


def f(x: Any, y: Any = None, *rest: Any, n: int = 1, **more: Any) -> Any:
    return x * n


def reasons_of(
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]], **options: Any
) -> list[str | None]:
    g = sm.jit(f, backend="eager", **options)
    for args, kwargs in calls:
        g(*args, **kwargs)
    return [graph.reason for graph in g.recorded]


SIGNATURES: dict[str, tuple[tuple[Any, dict[str, Any]], tuple[Any, dict[str, Any]], str]] = {
    "shape": (((X,), {}), ((X[:2],), {}), "the shape of x is [2, 3] and was [4, 3]"),
    "two shapes": (
        ((X, X + 1), {}),
        ((X[:2], X[1:] + 1), {}),
        "the shape of x is [2, 3] and was [4, 3]; the shape of y is [3, 3] and was [4, 3]",
    ),
    "strides": (
        ((X,), {}),
        ((torch.ones(3, 4).t(),), {}),
        "the stride of x is [1, 4] and was [3, 1]",
    ),
    "dtype": (((X,), {}), ((X.double(),), {}), "the dtype of x is float64 and was float32"),
    "requires_grad": (
        ((X,), {}),
        ((X.clone().requires_grad_(),), {}),
        "x.requires_grad is on and was off",
    ),
    "in a tree": (
        ((X, {"a": [X + 1]}), {}),
        ((X, {"a": [X.int()]}), {}),
        "the dtype of y['a'][0] is int32 and was float32",
    ),
    "int": (((X,), {"n": 2}), ((X,), {"n": 3}), "the value of n is 3 and was 2"),
    "more arguments": (((X, 1, 2), {}), ((X, 1, 3), {}), "the value of args[2] is 3 and was 2"),
    "keyword": (((X,), {"k": "a"}), ((X,), {"k": "b"}), "the value of k is 'b' and was 'a'"),
    "type": (((X, 1), {}), ((X, X), {}), "the type of y is a tensor and was int"),
    "object": (
        ((X, nn.ReLU()), {}),
        ((X, nn.ReLU()), {}),
        "the object y is another ReLU than before",
    ),
    "structure": (
        ((X,), {}),
        ((X, X.clone()), {"n": 3}),
        "the structure of the arguments is x, y, n and was x",
    ),
    "shared memory": (
        ((X, X), {}),
        ((X.clone(), X.clone()), {}),
        "which arguments share memory, and how far apart they begin, has changed",
    ),
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_what_differs_between_signatures(name: str) -> None:
    first, second, text = SIGNATURES[name]
    assert reasons_of([first, second, first, second]) == [None, text]


def test_a_static_argument_and_modes() -> None:
    found = reasons_of([((X,), {"n": 2}), ((X,), {"n": 3})], static_argnames="n")
    assert found == [None, "n is 3 and was 2"]
    g = sm.jit(f, backend="eager")
    g(X)
    with torch.no_grad():
        g(X)
        with torch.autocast("cpu"):
            g(X)
    texts = ["grad mode is off and was on", "autocast is bfloat16 and was off"]
    assert [graph.reason for graph in g.recorded] == [None, *texts]


def test_the_nearest_signature_counts() -> None:
    calls: list[Any] = [((X, 1), {}), ((X.double(), 2), {}), ((X, 2), {})]
    assert reasons_of(calls)[2] == "the dtype of x is float32 and was float64"
    assert reasons_of([*calls, ((X, 3), {})])[3] == "the value of y is 3 and was 2"


def test_layouts() -> None:
    def main() -> Any:
        mesh = sm.init_device_mesh(DEVICE, (2,), axis_names=("tp",))
        g = sm.jit(lambda x: x * 2, backend="eager")
        for x in (
            sm.ones(4, 6, device_mesh=mesh),
            sm.ones(4, 6, device_mesh=mesh, placements=P("tp")),
            sm.ones(5, 6, device_mesh=mesh),
        ):
            g(x)
        return [graph.reason for graph in g.recorded]

    texts = [
        "the spec of x is P('tp', None) and was P(None, None)",
        "the shape of x is [5, 6] and was [4, 6]",
    ]
    assert sm.simulate(2)(main)() == [[None, *texts]] * 2


class Model(nn.Module):
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("mean", torch.zeros(3))
        self.depth = 2

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight + self.mean) * self.depth


def _depth(model: Any) -> None:
    model.depth = 3


def _frozen(model: Any) -> None:
    model.weight.requires_grad_(False)


def _gradient(model: Any) -> None:
    model.weight.grad = torch.ones(3)


def _memory(model: Any) -> None:
    model.mean.set_(torch.ones(3))


def _shape(model: Any) -> None:
    model.mean.data = torch.ones(1)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (_depth, "self.depth was 2 and is 3"),
        (_frozen, "self._parameters.weight.requires_grad is off and was on"),
        (_gradient, "self._parameters.weight.grad was None and is set"),
        (_memory, "the memory of self._buffers.mean was replaced"),
        (_shape, "the shape of self._buffers.mean is [1] and was [3]"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_what_differs_in_what_a_function_reaches(change: Callable[[Any], None], text: str) -> None:
    model = Model()
    g = sm.jit(model.forward, backend="eager")
    g(X)
    change(model)
    for _ in range(2):
        g(X)
    assert [graph.reason for graph in g.recorded] == [None, text]


def test_a_part_that_was_replaced() -> None:
    def main() -> Any:
        mesh = sm.init_device_mesh(DEVICE, (2,), axis_names=("tp",))
        w = sm.ones(4, device_mesh=mesh, placements=P("tp"))
        g = sm.jit(lambda x: x + w, backend="eager")
        for value in (1, 2):
            found = g(sm.ones(4, device_mesh=mesh, placements=P("tp")))
            w._local = torch.full((2,), float(value))
        g(sm.ones(4, device_mesh=mesh, placements=P("tp")))
        return [graph.reason for graph in g.recorded], found.full_tensor().tolist()

    name = "test_a_part_that_was_replaced.<locals>.main.<locals>.<lambda>() closure.w"
    reason = f"the local part or the layout of {name} was replaced"
    assert sm.simulate(2)(main)() == [([None, reason, reason], [2.0] * 4)] * 2


def test_a_step_names_the_gradient() -> None:
    def main() -> Any:
        mesh = sm.init_device_mesh(DEVICE, (2,), axis_names=("tp",))
        model = mlp(mesh)

        def backward(x: Any, y: Any) -> None:
            mean_square(model, x, y).backward()

        g = sm.jit(backward, backend="eager")
        for i in range(3):
            g(*pair(mesh, i))
        return [graph.reason for graph in g.recorded]

    for first, second in sm.simulate(2)(main)():
        assert first is None
        assert second is not None
        assert second.endswith(".grad (unreduced) was None and is set") or second.endswith(
            ".grad was None and is set"
        )


def test_each_reason_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="shardmesh"):
        reasons_of(
            [((torch.ones(n),), {}) for n in range(5)]
            + [((torch.ones(4),), {"n": 2}), ((torch.ones(4),), {"n": 3})]
        )
    assert [record.getMessage() for record in caplog.records] == [
        "jit(f) is recorded again: the shape of x is [1] and was [0]",
        "jit(f) is recorded again: the structure of the arguments is x, n and was x",
        "jit(f) is recorded again: the value of n is 3 and was 2",
    ]


def test_eight_recordings_warn_once_with_what_differs() -> None:
    g = sm.jit(f, backend="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for n in range(5):
            g(torch.ones(n), n=2)
        g(torch.ones(4), n=4)
        g(torch.ones(4), n=5)
    text = (
        r"^jit\(f\) was recorded 8 times, each time eagerly: the shape of x is \[4\] and was \[3\] "
        r"\(4 times\); "
        r"the value of n is 6 and was 5 \(3 times\). Pad tensors to a few shapes. "
        "Pass a number that changes as a float or a tensor, of which a graph takes any value.$"
    )
    with pytest.warns(UserWarning, match=text) as caught:
        g(torch.ones(4), n=6)
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for n in range(7, 20):
            g(torch.ones(4), n=n)
