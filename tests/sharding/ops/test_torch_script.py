"""Functions of `torch.jit.script` on sharded tensors, as x-transformers and Megatron have them."""

from __future__ import annotations

import io
import warnings
from typing import Any, List, Optional, Tuple  # noqa: UP035

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardmesh as sm
from shardmesh import P
from tests.device import DEVICE
from tests.sharding.ranks import on_mesh, place, same_error

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit")


def softclamp(t: Tensor, value: float) -> Tensor:
    return (t / value).tanh() * value


def bias_dropout_add(x: Tensor, bias: Tensor, residual: Tensor, p: float, training: bool) -> Tensor:
    return residual + F.dropout(x + bias, p=p, training=training)


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.transpose(-1, -2) / q.size(-1) ** 0.5, -1) @ v


def summed(x: Tensor, count: int) -> Tensor:
    terms: List[Tensor] = []  # noqa: UP006
    for i in range(count):
        terms.append(x * i)
    return torch.stack(terms).sum(0)


def gated(x: Tensor, scale: Optional[Tensor] = None) -> Tuple[Tensor, Tensor]:  # noqa: UP006, UP045
    a, b = x.chunk(2, -1)
    if scale is not None:
        a = a * scale
    return a.sigmoid() * b, x.max(-1)[0]


def written(x: Tensor) -> Tensor:
    y = x.clone()
    y.add_(1)
    y[0] = 0
    return y


X = torch.linspace(-2, 2, 64, dtype=torch.float64).view(8, 8)
Q = torch.linspace(-1, 1, 64, dtype=torch.float64).view(4, 4, 4)
CASES: dict[str, tuple[Any, list[Tensor], list[Any]]] = {
    "softclamp": (softclamp, [X], [1.5]),
    "bias_dropout_add": (bias_dropout_add, [X, X[0].clone(), X * 2], [0.0, True]),
    "attention": (attention, [Q, Q + 1, Q * 2], []),
    "summed": (summed, [X], [3]),
    "gated": (gated, [X], []),
    "gated, scale": (gated, [X, X[:, :4].clone()], []),
    "written": (written, [X], []),
}


def scripted(function: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.script(function)


def squares(outputs: Any) -> Tensor:
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    return sum(out.square().sum() for out in outputs)  # type: ignore[return-value]


@pytest.mark.parametrize("spec", [P("a"), P(None, "a")], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_those_of_one_process(name: str, spec: P) -> None:
    """Also in later calls, for which TorchScript has compiled a graph with derivatives."""
    function, tensors, rest = CASES[name]
    script = scripted(function)

    def program(mesh: Any) -> None:
        for _ in range(3):
            plain = [x.clone().to(DEVICE).requires_grad_() for x in tensors]
            sharded = [
                sm.device_put(x.to(DEVICE), mesh, spec if x.ndim > 1 else P()).requires_grad_()
                for x in tensors
            ]
            expected, value = squares(script(*plain, *rest)), squares(script(*sharded, *rest))
            expected.backward()
            value.backward()
            torch.testing.assert_close(value.full_tensor(), expected)  # type: ignore[attr-defined]
            for x, y in zip(sharded, plain, strict=True):
                torch.testing.assert_close(x.grad.full_tensor(), y.grad)

    on_mesh((4,), program)


def reloaded(module: Any) -> Any:
    buffer = io.BytesIO()
    torch.jit.save(module, buffer)
    buffer.seek(0)
    return torch.jit.load(buffer)


@pytest.mark.parametrize("kind", ["module", "loaded module", "source"])
def test_script_without_its_python_function_is_refused(kind: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        module = torch.jit.script(nn.Sequential(nn.Linear(8, 8), nn.Tanh()).double().to(DEVICE))
        script = {
            "module": module,
            "loaded module": reloaded(module),
            "source": torch.jit.CompilationUnit("def twice(x):\n    return x * 2\n").twice,
        }[kind]

    def program(mesh: Any) -> None:
        script(place(mesh, X.to(DEVICE), sm.Shard(0), grad=True))

    assert "TorchScript" in same_error((2,), program, NotImplementedError)
