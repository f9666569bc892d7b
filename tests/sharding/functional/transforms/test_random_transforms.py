"""Random functions under random transforms, on random layouts: what `torch.func` gives for one
process.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch.utils import _pytree as pytree

import shardmesh as sm
from shardmesh import P
from tests.sharding.functional.helpers import put, values
from tests.sharding.ranks import AXES, on_mesh

OURS = SimpleNamespace(
    **{
        name: getattr(sm, name)
        for name in ("vmap", "jvp", "vjp", "grad", "jacfwd", "jacrev", "hessian", "linearize")
    }
)
Function = Callable[[Any, Any], Any]

# Functions of x: [n, k] and w: [k, m].
FUNCTIONS: dict[str, Function] = {
    "tanh": lambda x, w: (x @ w).tanh().sum(0),
    "softmax": lambda x, w: (x @ w).softmax(0),
    "log_softmax": lambda x, w: F.log_softmax(x @ w, -1),
    "logsumexp": lambda x, w: (x @ w).logsumexp(0),
    "cumsum": lambda x, w: (x @ w).cumsum(0).sin(),
    "amax": lambda x, w: (x @ w).amax(0) * x.sum(),
    "max": lambda x, w: (x @ w).max(0).values.exp(),
    "roll": lambda x, w: x.roll(1, 0) @ w,
    "diff": lambda x, w: (x @ w).square().diff(1, 0),
    "mean and var": lambda x, w: (x @ w).mean(0) + x.var() + w.std(),
    # Torch 2.13 has a wrong grad of the jvp of layer_norm.
    "rms_norm": lambda x, w: F.rms_norm(x @ w, (w.shape[1],)),
    "norm": lambda x, w: x.norm(dim=1) + w.norm(),
    "slice": lambda x, w: x[1:] @ w.t()[1:].t(),
    "transpose": lambda x, w: (w.t() @ x.t()).sigmoid(),
    "flatten": lambda x, w: (x @ w).flatten().exp(),
    "where": lambda x, w: torch.where(x > 0, x, x.sin()) @ w,
    "cat": lambda x, w: torch.cat([x @ w, w * 2]).sum(1),
    "prod": lambda x, w: (x @ w).prod(0),
    "einsum": lambda x, w: torch.einsum("nk,km->mn", x, w).relu(),
    "scalar": lambda x, w: (x @ w).square().sum(),
    "several": lambda x, w: {"y": (x @ w).cos(), "n": (x.sum(0), w.sum())},
}


def scalar(f: Function) -> Function:
    """Return a nonlinear scalar of the result of f."""

    def loss(x: Any, w: Any) -> Any:
        return sum(y.sin().sum() for y in pytree.tree_leaves(f(x, w)))

    return loss


def linear(t: Any, f: Function, x: Any, w: Any, v: Any) -> Any:
    out, apply = t.linearize(lambda x: f(x, w), x)
    return out, apply(v)


def by_vjp(t: Any, f: Function, x: Any, w: Any) -> Any:
    out, back = t.vjp(f, x, w)
    return out, back(pytree.tree_map(lambda y: y.cos(), out))


# Of xs, vs: [batch, n, k], w: [k, m]; `t` is this library or torch.func.
TRANSFORMS: dict[str, Callable[..., Any]] = {
    "vmap": lambda t, f, xs, vs, w: t.vmap(f, (0, None))(xs, w),
    "vmap of dim 1": lambda t, f, xs, vs, w: t.vmap(lambda x, w: scalar(f)(x, w), (1, None))(xs, w),
    "vmap of vmap": lambda t, f, xs, vs, w: t.vmap(
        t.vmap(lambda r, w: f(r[None], w), (0, None)), (0, None)
    )(xs, w),
    "jvp": lambda t, f, xs, vs, w: t.jvp(f, (xs[0], w), (vs[0], w.sin())),
    "jvp of jvp": lambda t, f, xs, vs, w: t.jvp(
        lambda x: t.jvp(lambda x: f(x, w), (x,), (x.sin(),))[1], (xs[0],), (vs[0],)
    ),
    "vjp": lambda t, f, xs, vs, w: by_vjp(t, f, xs[0], w),
    "vmap of jvp": lambda t, f, xs, vs, w: t.vmap(
        lambda x, v: t.jvp(lambda x: f(x, w), (x,), (v,))
    )(xs, vs),
    "vmap of grad": lambda t, f, xs, vs, w: t.vmap(t.grad(scalar(f), (0, 1)), (0, None))(xs, w),
    "vmap of vjp": lambda t, f, xs, vs, w: t.vmap(lambda x: by_vjp(t, f, x, w))(xs),
    "grad of vmap": lambda t, f, xs, vs, w: t.grad(
        lambda x, w: t.vmap(scalar(f), (0, None))(x, w).square().sum(), (0, 1)
    )(xs, w),
    "grad of grad": lambda t, f, xs, vs, w: t.grad(
        lambda x, w: t.grad(scalar(f))(x, w).sin().sum(), (0, 1)
    )(xs[0], w),
    "jvp of grad": lambda t, f, xs, vs, w: t.jvp(
        lambda x: t.grad(scalar(f), (0, 1))(x, w), (xs[0],), (vs[0],)
    ),
    "grad of jvp": lambda t, f, xs, vs, w: t.grad(
        lambda x, w: t.jvp(scalar(f), (x, w), (vs[0], w))[1], (0, 1)
    )(xs[0], w),
    "jvp of vmap": lambda t, f, xs, vs, w: t.jvp(
        lambda x: t.vmap(f, (0, None))(x, w), (xs,), (vs,)
    ),
    "jacfwd": lambda t, f, xs, vs, w: t.jacfwd(f, (0, 1))(xs[0], w),
    "jacrev": lambda t, f, xs, vs, w: t.jacrev(f, (0, 1))(xs[0], w),
    "vmap of jacrev": lambda t, f, xs, vs, w: t.vmap(t.jacrev(f), (0, None))(xs, w),
    "hessian": lambda t, f, xs, vs, w: t.hessian(scalar(f), (0, 1))(xs[0], w),
    "linearize": lambda t, f, xs, vs, w: linear(t, f, xs[0], w, vs[0]),
}
NEEDS_CLOSURE = ("vmap of jvp", "vmap of vjp")  # w is no argument: then the batch may not be split

MESHES = ((2,), (1,), (3,), (2, 2), (1, 2))


def spec(rng: random.Random, ndim: int, axes: tuple[str, ...], whole: int = 0) -> P:
    """Return a random layout: each axis shards one dim or none, except the first dims."""
    dims: list[tuple[str, ...]] = [() for _ in range(ndim)]
    for axis in axes:
        at = rng.randrange(whole, ndim + 1)
        if at < ndim:
            dims[at] = (*dims[at], axis)
    return P(*dims)


def compared(found: Any, wanted: Any) -> None:
    ours, tree = pytree.tree_flatten(found)
    plain, plain_tree = pytree.tree_flatten(wanted)
    assert tree == plain_tree
    for x, y in zip(ours, plain, strict=True):
        x = x.full_tensor() if isinstance(x, sm.ShardedTensor) else x
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-9, equal_nan=True)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_transform_of_operators(transform):
    rng, run = random.Random(transform), TRANSFORMS[transform]
    for name, f in FUNCTIONS.items():
        shape = rng.choice(MESHES)
        batch = rng.choice((1, 2, 3, 5))
        n = rng.choice((2, 3, 5))
        k = rng.choice((2, 3))
        m = rng.choice((2, 3))
        xs, vs, w = values(batch, n, k), values(batch, n, k, seed=1), values(k, m, seed=2)
        axes = AXES[: len(shape)]
        in_batch = transform not in NEEDS_CLOSURE
        of_xs = spec(rng, 3, axes) if in_batch else spec(rng, 3, axes, whole=1)
        of_vs = of_xs if rng.random() < 0.5 or not in_batch else spec(rng, 3, axes)
        of_w = spec(rng, 2, axes)
        wanted = run(torch.func, f, xs, vs, w)

        def program(
            mesh, f=f, xs=xs, vs=vs, w=w, of_xs=of_xs, of_vs=of_vs, of_w=of_w, wanted=wanted
        ):
            compared(
                run(OURS, f, put(mesh, xs, of_xs), put(mesh, vs, of_vs), put(mesh, w, of_w)), wanted
            )

        try:
            on_mesh(shape, program)
        except Exception as error:
            told = f"xs {list(xs.shape)} {of_xs}, vs {of_vs}, w {list(w.shape)} {of_w}"
            raise AssertionError(f"{transform} of {name} on {shape}, {told}") from error


# -- mapped functions ------------------------------------------------------------------------------


class Mapped(NamedTuple):
    """A mapped function over axis "a" of x: [n, k] and w: [k, m], n and k multiples of its size.

    Attributes:
        body: of parts.
        in_specs, out_specs: how they lie.
        plain: what it is for one process, from the global tensors and the size of the axis.
    """

    body: Callable[..., Any]
    in_specs: tuple[P, P]
    out_specs: Any
    plain: Callable[..., Any]


ROWS = P("a"), P()
MAPPED: dict[str, Mapped] = {
    "psum": Mapped(
        lambda x, w: sm.psum((x @ w).sin().sum(0), "a"),
        ROWS,
        P(),
        lambda x, w, n: (x @ w).sin().sum(0),
    ),
    "columns": Mapped(
        lambda x, w: sm.psum(x @ w, "a").tanh(),
        (P(None, "a"), P("a")),
        P(),
        lambda x, w, n: (x @ w).tanh(),
    ),
    "local": Mapped(
        lambda x, w: (x @ w).softmax(-1), ROWS, P("a"), lambda x, w, n: (x @ w).softmax(-1)
    ),
    "all_gather": Mapped(
        lambda x, w: sm.all_gather(x.cos(), "a", tiled=True).sum(0) * (x @ w).sum(),
        ROWS,
        P(unreduced="a"),
        lambda x, w, n: x.cos().sum(0) * (x @ w).sum(),
    ),
    "stacked": Mapped(
        lambda x, w: sm.all_gather(x, "a", axis=1, to="sharded").sum(1) @ w * x.sum(),
        ROWS,
        P("a"),
        lambda x, w, n: torch.cat([sum(x.chunk(n)) @ w * h.sum() for h in x.chunk(n)]),
    ),
    "psum_scatter": Mapped(
        lambda x, w: sm.psum_scatter((x.t() @ x).exp(), "a", tiled=True) @ w,
        ROWS,
        P("a"),
        lambda x, w, n: sum((h.t() @ h).exp() for h in x.chunk(n)) @ w,
    ),
    "all_to_all": Mapped(
        lambda x, w: sm.all_to_all(x.sin(), "a", 1, 0, tiled=True).sum(0),
        ROWS,
        P("a"),
        lambda x, w, n: x.sin().sum(0) + 0 * w.sum(),
    ),
    "ppermute": Mapped(
        lambda x, w: (
            (sm.ppermute(x, "a", [(i, i + 1) for i in range(sm.axis_size("a") - 1)]) * x) @ w
        ),
        ROWS,
        P("a"),
        lambda x, w, n: torch.cat([torch.zeros_like(x.chunk(n)[0]), *x.chunk(n)[:-1]]) * x @ w,
    ),
    "pmax": Mapped(
        lambda x, w: sm.pmax(x @ w, "a").square(),
        ROWS,
        P(),
        lambda x, w, n: torch.stack((x @ w).chunk(n)).amax(0).square(),
    ),
    "pmean": Mapped(
        lambda x, w: {"y": sm.pmean(x.exp(), "a") @ w},
        ROWS,
        P(),
        lambda x, w, n: {"y": sum(x.exp().chunk(n)) / n @ w},
    ),
    "pbroadcast": Mapped(
        lambda x, w: sm.pbroadcast(x @ w, "a", 0).cos(),
        ROWS,
        P(),
        lambda x, w, n: (x @ w).chunk(n)[0].cos(),
    ),
    "axis_index": Mapped(
        lambda x, w: (x @ w) * (sm.axis_index("a") + 1),
        ROWS,
        P("a"),
        lambda x, w, n: torch.cat([(h @ w) * (i + 1) for i, h in enumerate(x.chunk(n))]),
    ),
    "grad inside": Mapped(
        lambda x, w: sm.grad(lambda w: sm.psum((x @ w).sin().sum(), "a"))(w),
        ROWS,
        P(),
        lambda x, w, n: x.t() @ (x @ w).cos(),
    ),
    "jvp inside": Mapped(
        lambda x, w: sm.jvp(lambda x: sm.psum((x @ w).sin().sum(0), "a"), (x,), (x.cos(),))[1],
        ROWS,
        P(),
        lambda x, w, n: ((x @ w).cos() * (x.cos() @ w)).sum(0),
    ),
    "vmap inside": Mapped(
        lambda x, w: sm.vmap(lambda c: sm.psum((x @ c).square(), "a"), 1, 1)(w),
        ROWS,
        P(),
        lambda x, w, n: sum((x @ w).square().chunk(n)),
    ),
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    "transform", [name for name in TRANSFORMS if name not in ("vmap of vmap", "vmap of dim 1")]
)
def test_transform_of_mapped_functions(transform):
    rng, run = random.Random(transform), TRANSFORMS[transform]
    for name, case in MAPPED.items():
        shape = rng.choice(((2,), (1,), (2, 2)))
        size, batch = shape[0], rng.choice((1, 3))
        n, k, m = size * rng.choice((1, 2)), size * rng.choice((1, 2)), 2
        xs, vs, w = values(batch, n, k), values(batch, n, k, seed=1), values(k, m, seed=2)
        split = len(shape) == 2 and transform not in NEEDS_CLOSURE
        of_xs = P(rng.choice((None, "b")) if split else None, rng.choice((None, "a")))
        of_w = rng.choice((P(), P("a"), P(None, "b") if len(shape) == 2 else P()))
        wanted = run(torch.func, partial(case.plain, n=size), xs, vs, w)

        def program(mesh, case=case, xs=xs, vs=vs, w=w, of_xs=of_xs, of_w=of_w, wanted=wanted):
            mapped = sm.shard_map(
                case.body, mesh=mesh, in_specs=case.in_specs, out_specs=case.out_specs
            )
            for _ in range(2):  # tracked, then trusted
                compared(
                    run(
                        OURS, mapped, put(mesh, xs, of_xs), put(mesh, vs, of_xs), put(mesh, w, of_w)
                    ),
                    wanted,
                )

        try:
            on_mesh(shape, program)
        except Exception as error:
            raise AssertionError(
                f"{transform} of {name} on {shape}, xs {list(xs.shape)} {of_xs}, w {list(w.shape)} "
                f"{of_w}"
            ) from error
