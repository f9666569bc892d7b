"""Floats that change from call to call, in every place where torch and Python take one: the bits of
eager code, in the graph or after a break.
"""

from __future__ import annotations

import copy
import math
import numbers
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree

import shardmesh as sm
from shardmesh import P
from tests.device import DEVICE
from tests.sharding.jit.test_programs import assert_same

X = torch.linspace(-2, 2, 12).reshape(3, 4)
Y = torch.linspace(1, 3, 12).reshape(3, 4)
CLASSES = torch.tensor([0, 3, 1])
# The value of the recording decides which branches C++ code takes: 0 and 1 above all.
VALUES = [(0.5, 0.5, 0.25, 0.9, 0.1), (0.0, 0.5, 0.25, 0.0), (1.0, 1.0, 0.5, 0.25)]


def attention(x: Tensor, y: Tensor, **options: Any) -> Tensor:
    return F.scaled_dot_product_attention(x[None, None], y[None, None], y[None, None], **options)


def batch_norm(x: Tensor, eps: float) -> Tensor:
    return F.batch_norm(x, torch.zeros(4), torch.ones(4), training=False, eps=eps)


Function = Callable[[Tensor, Tensor, float], Any]
# An operator takes it as a C++ double: autograd may save it, and several operators compute with it.
DOUBLES: dict[str, Function] = {
    "huber": lambda x, y, a: F.huber_loss(x, y, delta=a or 0.5),
    "cdist": lambda x, y, a: torch.cdist(x, y, p=a * 4),
    "logit": lambda x, y, a: torch.logit(y / 4, a),
    "interpolate": lambda x, y, a: F.interpolate(x[None], scale_factor=a if a > 0.2 else 0.3),
    "pinv": lambda x, y, a: torch.linalg.pinv(x, rtol=a),
    "attention": lambda x, y, a: attention(x, y, scale=a),
    "attention of matmuls": lambda x, y, a: F.scaled_dot_product_attention(x, y, y, scale=a),
    "dropout of attention": lambda x, y, a: attention(x, y, dropout_p=a),
    "dropout": lambda x, y, a: F.dropout(x, a),
    "label smoothing": lambda x, y, a: F.cross_entropy(x, CLASSES, label_smoothing=a),
    "layer norm": lambda x, y, a: F.layer_norm(x, (4,), eps=a),
    "batch norm": lambda x, y, a: batch_norm(x, a),
    "quantile": lambda x, y, a: x.quantile(a),
    "isclose": lambda x, y, a: torch.isclose(x, y, rtol=a, atol=a),
    "pad": lambda x, y, a: F.pad(x, (1, 1), value=a),
    "uniform": lambda x, y, a: torch.empty(3, 4).uniform_(0, a + 0.1),
    "normal": lambda x, y, a: torch.empty(3, 4).normal_(a, a),
    "bernoulli": lambda x, y, a: torch.empty(3, 4).bernoulli_(a),
}
SCALARS: dict[str, Function] = {
    "power of it": lambda x, y, a: a**x,
    "float_power": lambda x, y, a: torch.float_power(a, y),
    "add": lambda x, y, a: x.add(y, alpha=a),
    "baddbmm": lambda x, y, a: torch.baddbmm(X[None, :, :3], x[None], y.mT[None], beta=a, alpha=a),
    "index_add": lambda x, y, a: x.index_add(0, CLASSES.clamp(max=2), y, alpha=a),
    "foreach": lambda x, y, a: torch._foreach_add([x, y], [y, x], alpha=a),
    "std": lambda x, y, a: x.std(0, correction=a),
    "leaky_relu": lambda x, y, a: F.leaky_relu(x, a),
    "softplus": lambda x, y, a: F.softplus(x, beta=a + 0.1, threshold=a),
    "where": lambda x, y, a: torch.where(x > a, x, a),
    "lerp": lambda x, y, a: x.lerp(y, a),
    "full": lambda x, y, a: torch.full((3, 4), a) + x,
    "tensor": lambda x, y, a: torch.tensor([a, 2.0])[0] * x,
}
PYTHON: dict[str, Function] = {
    "isinstance": lambda x, y, a: x * 2 if isinstance(a, float) else x,
    "number": lambda x, y, a: x * 2 if isinstance(a, numbers.Number) else x,
    "distribution": lambda x, y, a: torch.distributions.Normal(x, a + 1.5).log_prob(y),
    "key": lambda x, y, a: x * {0.5: 1.0}.get(a, 3.0),
    "set": lambda x, y, a: x * len({a, 0.5, 0.25}),
    "is_integer": lambda x, y, a: x * (2 if a.is_integer() else 3),
    "divmod": lambda x, y, a: x * sum(divmod(a, 0.3)) + sum(divmod(1.0, a + 0.2)),
    "numpy": lambda x, y, a: x * torch.from_numpy(np.full(4, a)),
    "copy": lambda x, y, a: x * copy.deepcopy({"a": a})["a"] + copy.copy(a),
    "pickle": lambda x, y, a: x * pickle.loads(pickle.dumps(a)),
    "exp": lambda x, y, a: x * math.exp(a),
    "result": lambda x, y, a: (x, a, a * 2),
}


@pytest.mark.one_in(2, each=["name", "has_gradient"])
@pytest.mark.parametrize("has_gradient", [False, True], ids=["values", "gradients"])
@pytest.mark.parametrize("name", [*DOUBLES, *SCALARS, *PYTHON])
def test_a_float_that_changes(name: str, has_gradient: bool) -> None:
    f = {**DOUBLES, **SCALARS, **PYTHON}[name]

    def step(x: Tensor, y: Tensor, a: float) -> Any:
        if not has_gradient:
            return f(x, y, a)
        x, y = (t.detach().requires_grad_() for t in (x, y))
        result = f(x, y, a)
        tensors = [t for t in pytree.tree_leaves(result) if isinstance(t, Tensor)]
        losses = [t.double().square().sum() for t in tensors if t.requires_grad]
        gradients = torch.autograd.grad(losses, [x, y], allow_unused=True) if losses else ()
        return [t.detach() for t in tensors], gradients

    for values in VALUES:
        assert_same(calls(sm.jit(step, backend="eager"), values), calls(step, values))


def calls(f: Callable[..., Any], values: Sequence[float]) -> list[Any]:
    torch.manual_seed(0)
    return [f(X.clone(), Y.clone(), value) for value in values]


def test_numbers_that_are_arguments_of_nodes() -> None:
    """What can be in the graph is there: a new value is no new recording."""
    f = sm.jit(
        lambda x, a: (x.uniform_(0, a), F.huber_loss(x, x * 2, delta=a), x.lerp(x * 3, a), x * a),
        backend="eager",
        fullgraph=True,
    )
    for value in (0.5, 0.5, 0.25, 0.9):
        f(X.clone(), value)
    assert len(f.recorded) == 1


@pytest.mark.parametrize("values", VALUES, ids=str)
def test_of_sharded_tensors(values: Sequence[float]) -> None:
    def step(x: Any, a: float) -> Any:
        x = x.detach().requires_grad_()
        loss = F.huber_loss(x, x.detach() * 2 + 1, delta=a or 0.5) + F.dropout(x, a).sum()
        loss.backward()
        drawn = torch.zeros_like(x).uniform_(0, a + 1), x.detach().clone().bernoulli_(a)
        return loss.detach(), x.grad, drawn, x.detach().lerp(x.detach() * 2, a), x.detach() > a

    def main(jitted: bool) -> Any:
        sm.random.manual_seed(0)
        mesh = sm.init_device_mesh(DEVICE, (2,), axis_names=("a",))
        f = sm.jit(step, backend="eager") if jitted else step
        results = [f(sm.device_put(X, mesh, P("a")), value) for value in values]
        return pytree.tree_map(lambda x: x.full_tensor(), results)

    assert_same(sm.simulate(2)(main)(True), sm.simulate(2)(main)(False))


def test_strategies_do_not_hold_the_numbers_of_a_recording() -> None:
    mesh = sm.AbstractMesh((1,), ("a",))
    x = sm.Layout.of(mesh, P("a"), (4,))
    graph = sm.jit(lambda x, a: x * a + a, backend="eager", fullgraph=True).lower(x, 0.5)
    assert "mul" in str(graph)
    assert not any(isinstance(part, torch.SymFloat) for key in x.strategies for part in key)


@pytest.mark.parametrize("reads", [False, True], ids=["graph", "break"])
@pytest.mark.parametrize("passed", [False, True], ids=["item", "argument"])
def test_numbers_that_autograd_saves_for_a_backward_outside(reads: bool, passed: bool) -> None:
    """The first call has the history of eager code, also where a recording is dropped."""
    weight = torch.nn.Parameter(torch.linspace(1, 2, 4))

    def f(x: Tensor, a: float) -> Tensor:
        y = x * weight
        y = y * (a if passed else y.detach().abs().mean().item())
        return (y / 2 if reads and y.sum() > -99 else y).square().mean()

    def use(f: Callable[..., Tensor]) -> list[Tensor]:
        found = []
        for i in range(4):
            weight.grad = None
            loss = f(X + i, 0.5 + i)
            loss.backward()
            found += [loss.detach(), weight.grad]
        return found

    assert_same(use(sm.jit(f, backend="eager")), use(f))
