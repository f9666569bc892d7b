"""State that a function reaches in less usual ways, changed between calls: later calls see it."""

from __future__ import annotations

import collections
import ctypes
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardmesh as sm
from shardmesh import P
from tests.device import DEVICE
from tests.sharding.jit.steps import runs
from tests.sharding.jit.test_programs import assert_same

X = torch.linspace(-1, 1, 6).reshape(2, 3)
Step = Callable[[Tensor], Tensor]
Case = tuple[Step, Callable[[int], Any]]


class Scale:
    """A number, read by a method."""

    def __init__(self) -> None:
        self.value = 1.0

    def get(self) -> float:
        return self.value

    def set(self, i: int) -> None:
        self.value = float(i)


def element_of_a_set() -> Case:
    scale = Scale()
    scales = {scale}
    return lambda x: x * next(iter(scales)).value, scale.set


def element_of_a_frozenset() -> Case:
    scale = Scale()
    scales = frozenset([scale])
    return lambda x: x * next(iter(scales)).value, scale.set


def key_of_a_dict() -> Case:
    scale = Scale()
    scales = {scale: 1}
    return lambda x: x * next(iter(scales)).value, scale.set


def values_of_a_dict() -> Case:
    scales = {"a": 1.0}
    view = scales.values()
    return lambda x: x * sum(view), lambda i: scales.update(a=float(i))


def items_of_an_ordered_dict() -> Case:
    scales = collections.OrderedDict(a=1.0)
    view = scales.items()
    return lambda x: x * next(iter(view))[1], lambda i: scales.update(a=float(i))


def methodcaller() -> Case:
    scale, get = Scale(), operator.methodcaller("get")
    return lambda x: x * get(scale), scale.set


PACKAGE = """
class Trainer:
    def run(self, x):
        return self._run(x)

    def _run(self, x):
        return self.loss(x)

    def loss(self, x):
        return x * 2

    def report(self):
        return self.count
"""


def override_called_by_an_installed_base() -> Case:
    installed: dict[str, Any] = {"__name__": "a_package"}
    exec(compile(PACKAGE, "/nowhere/site-packages/a_package.py", "exec"), installed)

    class Own(installed["Trainer"]):
        def __init__(self) -> None:
            self.scale = 1.0

        def loss(self, x: Tensor) -> Tensor:
            return super().loss(x) * self.scale

    trainer: Any = Own()
    return lambda x: trainer.run(x), lambda i: setattr(trainer, "scale", float(i))


def number_of_ctypes() -> Case:
    scale = ctypes.c_double(1.0)
    return lambda x: x * scale.value, lambda i: setattr(scale, "value", float(i))


def gradient_of(w: Tensor) -> Step:
    def step(x: Tensor) -> Tensor:
        (x * w).sum().backward()
        gradient, w.grad = w.grad, None
        assert gradient is not None
        return gradient

    return step


def leaf() -> Tensor:
    return nn.Parameter(torch.ones(3))


def state_of_a_hook() -> Case:
    w, scale = leaf(), Scale()
    w.register_hook(lambda grad: grad * scale.value)
    return gradient_of(w), scale.set


def hook_that_is_added() -> Case:
    w = leaf()
    return gradient_of(w), lambda i: w.register_hook(lambda grad: grad * i)


def hook_that_is_removed() -> Case:
    w = leaf()
    handle = w.register_hook(lambda grad: grad * 3)
    return gradient_of(w), lambda i: handle.remove()


def double(p: Tensor) -> None:
    p.grad = p.grad * 2  # type: ignore[operator]


def hook_after_accumulation() -> Case:
    w = leaf()
    return gradient_of(w), lambda i: w.register_post_accumulate_grad_hook(double)


def on_mesh() -> Tensor:
    mesh = sm.init_device_mesh(DEVICE, (2,), axis_names=("a",))
    return sm.device_put(torch.ones(3), mesh, P(), src_data_rank=None).requires_grad_()


def sharded(w: Any) -> Step:
    step = gradient_of(w)
    return lambda x: step(sm.device_put(x, w.mesh, P("a"), src_data_rank=None))


def state_of_a_hook_of_a_sharded_tensor() -> Case:
    w, scale = on_mesh(), Scale()
    w.register_hook(lambda grad: grad * scale.value)
    return sharded(w), scale.set


def hook_of_a_sharded_tensor_that_is_added() -> Case:
    w = on_mesh()
    return sharded(w), lambda i: w.register_hook(lambda grad: grad * i)


def hook_after_a_reduction() -> Case:
    w = on_mesh()
    return sharded(w), lambda i: w.register_post_accumulate_grad_hook(double)


@pytest.mark.parametrize(
    "case",
    [
        element_of_a_set,
        element_of_a_frozenset,
        key_of_a_dict,
        values_of_a_dict,
        items_of_an_ordered_dict,
        methodcaller,
        override_called_by_an_installed_base,
        number_of_ctypes,
        state_of_a_hook,
        hook_that_is_added,
        hook_that_is_removed,
        hook_after_accumulation,
        state_of_a_hook_of_a_sharded_tensor,
        hook_of_a_sharded_tensor_that_is_added,
        hook_after_a_reduction,
    ],
    ids=lambda case: case.__name__,
)
def test_a_change_is_seen(case: Callable[[], Case]) -> None:
    def main(jitted: bool) -> list[Any]:
        step, change = case()
        f = sm.jit(step, backend="eager", fullgraph=True) if jitted else step
        results = []
        for i in range(9):
            if i > 3 and i % 2:
                change(i)
            results.append(f(X.clone()))
        assert not jitted or runs(f) >= 5
        return [getattr(x, "full_tensor", lambda x=x: x)() for x in results]

    assert_same(sm.simulate(2)(main)(True), sm.simulate(2)(main)(False))


def test_a_reported_hook() -> None:
    w = leaf()
    f = sm.jit(gradient_of(w), backend="eager")
    f(X)
    f(X)
    w.register_hook(lambda grad: grad)
    f(X)
    assert f.recorded[1].reason.endswith("w has hooks of its gradient and had none")


# -- what autograd and torch decide ----------------------------------------------------------------


def test_a_result_that_is_written_before_backward() -> None:
    """ReLU saves its result: autograd raises, also where the graph has saved it."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.ReLU())
    f = sm.jit(module, backend="eager")
    for i in range(6):
        y = f(X)
        if i % 3 == 2:
            y.add_(1)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                y.sum().backward()
        else:
            y.sum().backward()
    assert len(f.recorded) == 1


def test_a_weight_that_is_used_twice_under_autocast() -> None:
    """The cast weight is one tensor, whose gradient is summed in its dtype."""

    def main(jitted: bool) -> list[Tensor]:
        torch.manual_seed(0)
        layer = nn.Linear(3, 3)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)

        def step(x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                loss = layer(layer(x)).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        f = sm.jit(step, backend="eager", fullgraph=True) if jitted else step
        return [*(f(X) for _ in range(8)), *layer.parameters()]

    assert_same(main(True), main(False))


def test_an_lstm() -> None:
    """oneDNN's operator saves what backward needs only where gradients are enabled."""

    def main(jitted: bool) -> list[Tensor]:
        torch.manual_seed(0)
        layer = nn.LSTM(3, 4, batch_first=True)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)

        def step(x: Tensor) -> Tensor:
            loss = layer(x)[0].square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        f = sm.jit(step, backend="eager", fullgraph=True) if jitted else step
        return [*(f(X[None] * i) for i in range(5)), *layer.parameters()]

    assert_same(main(True), main(False))


def test_sparse_gradients_are_a_break() -> None:
    def main(jitted: bool) -> list[Tensor]:
        torch.manual_seed(0)
        layer = nn.Embedding(5, 3, sparse=True)
        optimizer = torch.optim.SparseAdam(layer.parameters())

        def step(ids: Tensor) -> Tensor:
            loss = layer(ids).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        f = sm.jit(step, backend="eager") if jitted else step
        return [*(f(torch.tensor([i % 5, 3])) for i in range(6)), *layer.parameters()]

    assert_same(main(True), main(False))
