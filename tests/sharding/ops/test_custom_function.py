"""Custom functions on ShardedTensors: forward and backward work on global tensors, as on one
process, to every order.
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

import shardmesh as sm
from shardmesh import P, Shard, ShardedTensor
from tests.sharding.autograd_functions import Double
from tests.sharding.ranks import collectives, every_rank, launched, on_mesh, place, same_error

X = torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
W = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


class Reverse(torch.autograd.Function):
    """Gradient reversal: forward returns its input."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return -grad


class Exp(torch.autograd.Function):
    """It saves its result."""

    @staticmethod
    def forward(ctx, x):
        y = x.exp()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0]


class Cube(torch.autograd.Function):
    """In the form with setup_context."""

    @staticmethod
    def forward(x):
        return x**3

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, grad):
        return 3 * grad * ctx.saved_tensors[0] ** 2


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b, scale):
        ctx.save_for_backward(a, b)
        ctx.scale = scale
        return a @ b * scale

    @staticmethod
    def backward(ctx, grad):
        a, b = ctx.saved_tensors
        return grad @ b.T * ctx.scale, a.T @ grad * ctx.scale, None


class Halves(torch.autograd.Function):
    """Two results, and a gradient that is None where it is not needed."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x)
        return x * 0.5, x.square().sum() * 0.5

    @staticmethod
    def backward(ctx, half, total):
        return half * 0.5 + total * ctx.saved_tensors[0], None


class Broadcast(torch.autograd.Function):
    """Its gradient has the shape of the result, which autograd adds up."""

    @staticmethod
    def forward(ctx, x, row):
        return x + row

    @staticmethod
    def backward(ctx, grad):
        return grad, grad


PROGRAMS = {
    "one": lambda x, w: Double.apply(x),
    "of a computed tensor": lambda x, w: Double.apply(x * 3),
    "beside others": lambda x, w: x * 3 + Double.apply(x),
    "of the right operand": lambda x, w: x @ Double.apply(x).T,
    "in a list": lambda x, w: torch.cat([x, Double.apply(x)]),
    "by keyword": lambda x, w: F.linear(x, weight=Double.apply(x)),
    "in a foreach list": lambda x, w: torch._foreach_mul([x, Double.apply(x)], 2.0)[1],
    "in place": lambda x, w: (x * 1).add_(Double.apply(x)),
    "of its input": lambda x, w: Reverse.apply(x),
    "of its result": lambda x, w: Exp.apply(x) * x,
    "with setup_context": lambda x, w: Cube.apply(x),
    "of two": lambda x, w: Product.apply(x, w, 2.0),
    "of one twice": lambda x, w: Product.apply(x, x.T, 0.5),
    "in a row": lambda x, w: Exp.apply(Cube.apply(Double.apply(x * 0.1))),
    "in a fork": lambda x, w: Product.apply(
        Cube.apply(y := Double.apply(x)), Exp.apply(y.T * 0.1), 1.0
    ),
    "several results": lambda x, w: torch.stack([y.sum() for y in Halves.apply(x, w)]),
    "one of several results": lambda x, w: Halves.apply(x, w)[1],
    "the other one": lambda x, w: Halves.apply(x, w)[0],
    "shapes that are broadcast": lambda x, w: Broadcast.apply(x, w[:, 0]),
    "then copy_": lambda x, w: (x * 1).copy_(Double.apply(x)),
}


def derivatives(program, x, w):
    """Return the derivatives of a loss, of its gradients, and of theirs."""
    found, total = [], program(x, w).sin().sum()
    for _ in range(3):
        if not total.requires_grad:
            break
        grads = torch.autograd.grad(
            total, [x, w], create_graph=True, allow_unused=True, materialize_grads=True
        )
        found += grads
        total = sum(g.square().sum() for g in grads)
    return [g.detach() for g in found]


SPECS = [
    (P("a"), P()),
    (P(), P(None, "b")),
    (P("b", "a"), P("a")),
    (P(("a", "b")), P("b", "a")),
    (P(), P()),
]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("specs", SPECS, ids=str)
@pytest.mark.parametrize("name", PROGRAMS)
def test_derivatives_equal_one_process(name, specs):
    expected = derivatives(PROGRAMS[name], X.clone().requires_grad_(), W.clone().requires_grad_())

    def program(mesh):
        leaves = [
            sm.device_put(x, mesh, spec, src_data_rank=None).requires_grad_()
            for x, spec in zip((X, W), specs, strict=True)
        ]
        return [g.full_tensor() for g in derivatives(PROGRAMS[name], *leaves)]

    for found in on_mesh((2, 2), program):
        assert len(found) >= len(expected) - 2, (
            "what is zero on one process may be known to be constant"
        )
        for mine, right in zip(found, expected, strict=False):
            torch.testing.assert_close(
                mine, right, rtol=1e-10, atol=1e-10 * (1 + right.abs().max().item())
            )


@pytest.mark.parametrize(
    "use",
    [
        lambda y: y.sum().backward(),
        lambda y: torch.autograd.backward([y.sum()]),
        lambda y: y.to_local(grad_placements=y.placements).sum().backward(),
        lambda y: y.full_tensor().sum().backward(),
        lambda y: y.redistribute(P()).sum().backward(),
        lambda y: y.backward(torch.ones_like(y)),
    ],
)
@pytest.mark.parametrize("spec", [P("a"), P(None, "a")], ids=str)
def test_uses_of_a_result(use, spec):
    def program(mesh):
        x = sm.device_put(X, mesh, spec, src_data_rank=None).requires_grad_()
        y = Double.apply(x)
        use(y)
        assert torch.equal(x.grad.full_tensor(), torch.full_like(X, 2))

    on_mesh((2,), program)


@every_rank(2)
def test_result_requires_grad(mesh):
    x = place(mesh, X, Shard(0), grad=True)
    y = Double.apply(x)
    assert y.requires_grad
    assert not y.is_leaf
    assert not y.detach().requires_grad
    assert "grad" in repr(y)


@every_rank(2)
def test_only_its_own_lines_communicate(mesh):
    x = place(mesh, X, Shard(0), grad=True)
    with collectives() as records:
        Exp.apply(x).sum().backward()
    assert launched(records) == []
    bias = sm.device_put(X[0], mesh, P()).requires_grad_()
    with collectives() as records:
        (x.detach() * Exp.apply(bias)).sum().backward()
    assert launched(records) == ["all_reduce"], "the gradient of the bias, once"


def test_in_a_training_loop():
    """A block with a custom activation, as in Bloom, under FSDP with sharded inputs and under
    checkpointing.
    """

    class CubeExpBlock(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4, dtype=torch.float64)

        def forward(self, x):
            return x + Exp.apply(Cube.apply(self.linear(x)) * 0.1)

    def gradients(model, x, recompute):
        y = x
        for block in model:
            y = (
                torch.utils.checkpoint.checkpoint(block, y, use_reentrant=False)
                if recompute
                else block(y)
            )
        y.square().mean().backward()
        return [
            p.grad.full_tensor() if isinstance(p.grad, ShardedTensor) else p.grad
            for p in model.parameters()
        ]

    def made():
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return nn.Sequential(*[CubeExpBlock() for _ in range(3)])

    def program(mesh, recompute):
        model = made()
        sm.parallel.fully_shard(model, mesh, units=CubeExpBlock)
        return gradients(model, sm.device_put(X[:4], mesh, P("a"), src_data_rank=None), recompute)

    expected = gradients(made(), X[:4], False)
    for recompute in (False, True):
        for found in on_mesh((2,), lambda mesh, recompute=recompute: program(mesh, recompute)):
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


@every_rank(2)
def test_without_gradients(mesh):
    x = place(mesh, X, Shard(0))
    assert torch.equal((Double.apply(x) + 1).full_tensor(), 2 * X + 1)
    leaf = place(mesh, X, Shard(0), grad=True)
    assert not (Double.apply(leaf).detach() * 2).requires_grad
    with torch.no_grad():
        assert torch.equal((Double.apply(leaf) + 1).full_tensor(), 2 * X + 1)


@every_rank(2)
def test_on_local_tensors(mesh):
    x = place(mesh, X, Shard(0), grad=True)
    y = ShardedTensor.from_local(Double.apply(x.to_local()), x.mesh, x.placements, shape=x.shape)
    (y * 3).sum().backward()
    assert torch.equal(x.grad.full_tensor(), torch.full_like(X, 6))


def test_ranks_outside_the_mesh():
    def program():
        mesh = sm.DeviceMesh("cpu", [0, 2], axis_names=("b",))
        x = sm.device_put(X, mesh, P("b"), src_data_rank=None).requires_grad_()
        (Exp.apply(x) * x).sum().backward()
        return x.grad.full_tensor() if mesh.coordinate is not None else None

    leaf = X.clone().requires_grad_()
    (leaf.exp() * leaf).sum().backward()
    found = sm.simulate(3)(program)()
    for rank in (0, 2):
        torch.testing.assert_close(found[rank], leaf.grad)


# -- what cannot be --------------------------------------------------------------------------------


def custom(backward, forward=lambda ctx, x: x.sum()):
    return type(
        "Bad",
        (torch.autograd.Function,),
        {"forward": staticmethod(forward), "backward": staticmethod(backward)},
    )


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (custom(lambda ctx, g: g), ["custom function", "f64[]", "f64[5, 4]"]),
        (
            custom(lambda ctx, g: torch.ones(5, 4)),
            ["Bad", "a Tensor as the gradient of argument 0"],
        ),
        (custom(lambda ctx, g: math.pi), ["Bad", "a float as the gradient of argument 0"]),
        (custom(once_differentiable(lambda ctx, g: g.expand(5, 4))), None),
    ],
)
def test_invalid_gradients_raise(bad, words):
    def program(mesh):
        x = sm.device_put(X, mesh, P("a"), src_data_rank=None).requires_grad_()
        (grad,) = torch.autograd.grad(bad.apply(x), x)
        assert words is None
        assert torch.equal(grad.full_tensor(), torch.ones_like(X))

    if words is None:
        on_mesh((2,), program)
    else:
        text = same_error((2,), program, RuntimeError)
        assert all(word in text for word in words), text
