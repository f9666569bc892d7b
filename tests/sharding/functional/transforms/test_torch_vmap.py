"""`torch.vmap` and `torch.func.grad` of functions of `ShardedTensor`s: values and gradients are
those of one process, and of `sm.vmap`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn, vmap
from torch.func import functional_call, grad, jacfwd, jacrev, jvp, vjp
from torch.utils._pytree import tree_leaves

import shardmesh as sm
from shardmesh import P
from tests.sharding.functional.helpers import put, values
from tests.sharding.ranks import every_rank, on_mesh

X, Y, W = values(4, 6, 3), values(4, 6, 3, seed=1), values(3, 5, seed=2)
TABLE = values(6, 3, seed=3)
IDS = torch.tensor([[0, 5, 1], [2, 2, 3], [4, 0, 1], [5, 5, 5]])
MODEL = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def _of_one_example(parameters, row):
    return functional_call(copy.deepcopy(MODEL), parameters, (row,)).square().sum()


def _per_example(x, *parameters):
    named = dict(zip(dict(MODEL.named_parameters()), parameters, strict=True))
    return vmap(grad(_of_one_example), in_dims=(None, 0))(named, x[:, 0])


def _activations(a, w):
    out = (
        F.silu(F.relu(a @ w)).sum()
        + F.gelu(a).sum()
        + F.softmax(a, -1)[0].sum()
        + a[1:, 0].exp().sum()
    )
    return out + F.log_softmax(a, -1).tanh().sum() + a.sigmoid().mean()


Case = tuple[Callable[..., Any], tuple[torch.Tensor, ...]]
CASES: dict[str, Case] = {
    "product": (lambda x, w: vmap(lambda r, w: (r @ w).sin(), in_dims=(0, None))(x, w), (X, W)),
    "no argument": (lambda x, w: vmap(lambda r: (r @ w).sin())(x), (X, W)),
    "computed from no argument": (lambda x, w: vmap(lambda r: (r @ (w * 2)).sin())(x), (X, W)),
    "result of an operator": (lambda x, w: vmap(lambda r: (r @ w).sin())(x * 2), (X, W)),
    "in_dims and out_dims": (
        lambda x: vmap(lambda r: r.cumsum(0) * r.sum(), in_dims=1, out_dims=1)(x),
        (X,),
    ),
    "last out_dims": (lambda x: vmap(lambda r: r.softmax(-1), in_dims=1, out_dims=2)(x), (X,)),
    "trees": (
        lambda x, y: vmap(lambda a, b: {"s": a + b, "d": a.mean()}, out_dims={"s": 1, "d": 0})(
            x, y
        ),
        (X, Y),
    ),
    "nested": (lambda x, y: vmap(vmap(torch.dot))(x, y), (X, Y)),
    "nested over different arguments": (
        lambda x, w: vmap(vmap(torch.dot, in_dims=(None, 1)), in_dims=(0, None))(x[0], w),
        (X, W),
    ),
    "chunks": (lambda x, w: vmap(lambda r: (r @ w).sin(), chunk_size=3)(x), (X, W)),
    "grad": (
        lambda x, w: vmap(grad(lambda r, w: (r @ w).sin().sum()), in_dims=(0, None))(x, w),
        (X, W),
    ),
    "grad of no example": (
        lambda x, w: vmap(grad(lambda w, r: (r @ w).sin().sum()), in_dims=(None, 0))(w, x),
        (X, W),
    ),
    "grad of two": (
        lambda x, y: vmap(grad(lambda a, b: torch.logsumexp(a @ b.t(), -1).sum(), argnums=(0, 1)))(
            x, y
        ),
        (X, Y),
    ),
    "grad of grad": (
        lambda x, w: vmap(grad(lambda r: grad(lambda r: (r @ w).sin().sum())(r).square().sum()))(x),
        (X, W),
    ),
    "grad of activations": (lambda x, w: vmap(grad(_activations), in_dims=(0, None))(x, w), (X, W)),
    "grad of an embedding": (
        lambda e, i: vmap(
            grad(lambda e, i: F.embedding(i, e, 5).square().sum()), in_dims=(None, 0)
        )(e, i),
        (TABLE, IDS),
    ),
    "grad of a module": (_per_example, (X, *(p.detach() for p in MODEL.parameters()))),
    "sm.grad": (lambda x, w: vmap(sm.grad(lambda r: (r @ w).sin().sum()))(x), (X, W)),
    "vjp": (lambda x, w: vmap(lambda r: vjp(lambda r: (r @ w).tanh(), r)[1](r @ w)[0])(x), (X, W)),
    "jacrev": (lambda x, w: vmap(jacrev(lambda r: (r @ w).tanh()))(x[:, 0]), (X, W)),
    "grad without vmap": (lambda x, w: grad(lambda x: (x @ w).sin().sum())(x), (X, W)),
    "embedding": (lambda i, e: vmap(F.embedding)(i, e), (IDS, X)),
    "embedding of one table": (
        lambda i, e: vmap(F.embedding, in_dims=(0, None))(i, e),
        (IDS, TABLE),
    ),
    "cross entropy": (lambda x, i: vmap(grad(F.cross_entropy))(x.transpose(1, 2), i), (X, IDS)),
    "attention": (
        lambda x, y: vmap(lambda a, b: F.scaled_dot_product_attention(a[None], b[None], b[None]))(
            x, y
        ),
        (X, Y),
    ),
    "layer norm": (lambda x: vmap(lambda r: F.layer_norm(r, [3]))(x), (X,)),
    "grad of a layer norm": (
        lambda x: vmap(grad(lambda r: F.layer_norm(r, [3]).pow(3).sum()))(x),
        (X,),
    ),
    "in place": (lambda x: vmap(lambda r: r.clone().mul_(2).add_(1))(x), (X,)),
    "indices": (lambda x: vmap(lambda r: r[1:, ::2].flip(0))(x), (X,)),
    "joined": (
        lambda x, y: vmap(lambda a, b: torch.cat([a, b]).t().reshape(-1)[2:9])(x, y),
        (X, Y),
    ),
    "masked": (
        lambda x, y: vmap(lambda a, b: torch.where(a > 0, a, b * 2).clamp(min=-0.5))(x, y),
        (X, Y),
    ),
}
SPECS = [
    (P("a"), P()),
    (P(), P("a")),
    (P("a"), P("a")),
    (P(None, "a"), P()),
    (P(None, None, "a"), P(None, "a")),
]


def _gradients(outs, inputs):
    """Return the gradients of a loss of these results."""
    loss = sum(out.sin().sum() for out in outs if out.requires_grad)
    wanted = [x for x in inputs if x.requires_grad]
    return [] if isinstance(loss, int) else torch.autograd.grad(loss, wanted, allow_unused=True)


@pytest.mark.one_in(4, each=["name", "specs", "ranks"])
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("specs", SPECS, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(name, specs, ranks):
    f, args = CASES[name]
    plain = [t.clone().requires_grad_(t.is_floating_point()) for t in args]
    wanted = tree_leaves(f(*plain))
    gradients = _gradients(wanted, plain)

    def program(mesh):
        given = []
        for t, spec in zip(args, [specs[0], *[specs[1]] * (len(args) - 1)], strict=True):
            given.append(put(mesh, t, P(*tuple(spec)[: t.ndim]), grad=t.is_floating_point()))
        outs = tree_leaves(f(*given))
        for out, other in zip(outs, wanted, strict=True):
            torch.testing.assert_close(out.full_tensor(), other, rtol=1e-9, atol=1e-12)
        for one, other in zip(_gradients(outs, given), gradients, strict=True):
            if other is None:
                assert one is None or not one.full_tensor().any()
            else:
                torch.testing.assert_close(one.full_tensor(), other, rtol=1e-9, atol=1e-12)

    on_mesh((ranks,), program)


@every_rank(2)
def test_as_sm_vmap(mesh):
    """Values and layouts, where the batch is split and where it is not."""
    for spec in (P("a"), P(None, "a"), P()):
        x, w = put(mesh, X, spec), put(mesh, W)
        f = lambda r, w: (r @ w).sin()  # noqa: E731
        one, other = torch.vmap(f, in_dims=(0, None))(x, w), sm.vmap(f, in_axes=(0, None))(x, w)
        # Torch merges the batch with the dim that is split.
        assert one.spec == other.spec or spec == P(None, "a")
        assert torch.equal(one.full_tensor(), other.full_tensor())


@every_rank(2)
def test_randomness(mesh):
    x = put(mesh, X, P("a"))
    with pytest.raises(RuntimeError, match="randomness error mode"):
        torch.vmap(F.dropout)(x)
    assert torch.equal(
        torch.vmap(lambda r: F.dropout(r, 0.0), randomness="same")(x).full_tensor(), X
    )
    assert torch.vmap(lambda r: F.dropout(r, 0.5), randomness="different")(x).shape == X.shape


@every_rank(2)
def test_what_is_refused(mesh):
    x = put(mesh, X, P("a"))
    for f in (lambda: jvp(torch.sin, (x,), (x,)), lambda: torch.vmap(jacfwd(torch.sin))(x)):
        with pytest.raises((RuntimeError, NotImplementedError), match=r"sm\.jvp"):
            f()
    whole = put(mesh, X)
    with pytest.raises(RuntimeError, match=r"no argument of it"):
        sm.vmap(lambda r: torch.vmap(torch.sin)(r))(whole)
    with pytest.raises(RuntimeError, match=r"sm\.vmap, sm\.grad"):
        torch.vmap(lambda r: r * x[0])(X)
