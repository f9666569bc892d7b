"""`torch.autograd.gradcheck` and `gradgradcheck` with `ShardedTensor`s among inputs, outputs and
gradients of outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.autograd.gradcheck import GradcheckError

import shardmesh as sm
from shardmesh import P
from tests.sharding.functional.helpers import put, values
from tests.sharding.ranks import every_rank, on_mesh

X, W = values(3, 4), values(4, 2, seed=1)
SPECS = [P("a"), P(), P(None, "a")]

# Functions of (mesh, spec of x), and what they are functions of: x and w are sharded, p is plain.
CASES: dict[str, tuple[str, Callable[..., Callable[..., Any]]]] = {
    "elementwise": ("x", lambda mesh, spec: lambda x: x.sin()),
    "product": ("xw", lambda mesh, spec: lambda x, w: (x @ w).tanh()),
    "pending": ("xw", lambda mesh, spec: lambda x, w: (x @ w).sum(0)),
    "scalar": ("xw", lambda mesh, spec: lambda x, w: (x @ w).sin().sum()),
    "two results": ("xw", lambda mesh, spec: lambda x, w: ((x @ w).sin(), x.t() * 2)),
    "redistributed": (
        "x",
        lambda mesh, spec: lambda x: (x.redistribute(P(None, "a")) * 2).sin().redistribute(P("a")),
    ),
    "plain result": ("x", lambda mesh, spec: lambda x: x.sin().full_tensor()),
    "from_local": ("pw", lambda mesh, spec: lambda p, w: (sm.from_local(p, mesh, P()) @ w).sin()),
    "device_put": (
        "pw",
        lambda mesh, spec: lambda p, w: (sm.device_put(p, sm.NamedSharding(mesh, spec)) @ w).sin(),
    ),
}


def _inputs(mesh, names, spec):
    made = {"x": lambda: put(mesh, X, spec, grad=True), "w": lambda: put(mesh, W, spec, grad=True)}
    made["p"] = lambda: X.clone().requires_grad_()
    return tuple(made[name]() for name in names)


def _gradients_of(mesh, outs):
    for i, out in enumerate(outs if isinstance(outs, tuple) else (outs,)):
        plain = values(*out.shape, seed=i + 5)
        spec = P(*out.spec) if isinstance(out, sm.ShardedTensor) else None
        yield plain.requires_grad_() if spec is None else put(mesh, plain, spec, grad=True)


@pytest.mark.one_in(3, each=["name", "spec", "fast_mode"])
@pytest.mark.parametrize("fast_mode", [False, True], ids=["each element", "fast"])
@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_first_and_second_derivatives(name, spec, fast_mode):
    names, make = CASES[name]

    def program(mesh):
        f, inputs = make(mesh, spec), _inputs(mesh, names, spec)
        with sm.ops.implicit_replication():  # gradcheck's own tensors next to ours
            assert gradcheck(f, inputs, fast_mode=fast_mode)
            if name != "scalar":
                gradients = tuple(_gradients_of(mesh, f(*inputs)))
                assert gradgradcheck(f, inputs, gradients, fast_mode=fast_mode)

    on_mesh((2,), program)


@every_rank(2)
def test_plain_gradients_of_sharded_results(mesh):
    """Equal on every rank, a plain gradient is one value: so is its own gradient."""
    x, gradient = put(mesh, X, P("a"), grad=True), values(3, 4, seed=5).requires_grad_()
    (first,) = torch.autograd.grad(x.sin(), x, gradient, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), gradient)
    torch.testing.assert_close(second, X.cos())
    with sm.ops.implicit_replication():
        assert gradgradcheck(torch.sin, (x,), (gradient,))


class _Wrong(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0].cos() * 1.01


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_a_wrong_derivative_is_found(spec):
    def program(mesh):
        with pytest.raises(GradcheckError, match="Jacobian mismatch"):
            gradcheck(_Wrong.apply, (put(mesh, X, spec, grad=True),))

    on_mesh((2,), program)
