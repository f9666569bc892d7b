"""Programs of transforms and control flow, written once for JAX and for this library; run under JAX
in a separate process: `python -m tests.sharding.functional.jax_transforms`.
"""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

SHAPE, AXES = (2, 2), ("dp", "tp")
RING = [(0, 1), (1, 0)]
TRANSFORMS = (
    "vmap",
    "grad",
    "value_and_grad",
    "vjp",
    "jvp",
    "linearize",
    "jacfwd",
    "jacrev",
    "hessian",
)
FLOW = (
    "cond",
    "switch",
    "while_loop",
    "fori_loop",
    "scan",
    "psum",
    "pmean",
    "all_gather",
    "psum_scatter",
    "all_to_all",
    "ppermute",
)
NUMBERS = ("sin", "cos", "tanh", "exp", "stack", "where")


def inputs() -> dict[str, np.ndarray]:
    """Return the arguments of all programs."""
    rng = np.random.default_rng(0)
    shapes = {"x": (4, 6), "xs": (4, 4, 6), "v": (4, 6), "w": (6, 4), "u": (6, 4), "y": (4, 4)}
    return {name: rng.normal(size=shape) for name, shape in shapes.items()}


def loss(t: Any) -> Callable[..., Any]:
    return t.map(lambda x, w: t.psum(t.sin(x @ w).sum(), "tp"), (t.P("tp"), t.P()), t.P())


def rows(t: Any) -> Callable[..., Any]:
    return t.map(lambda x, w: t.psum(t.tanh(x @ w).sum(0), "tp"), (t.P("tp"), t.P()), t.P())


def exchanged(t: Any) -> Callable[..., Any]:
    def body(x: Any, w: Any) -> Any:
        y = t.all_to_all(x @ w, "tp", 1, 0, tiled=True)
        return t.ppermute(t.sin(y), "tp", RING) * t.psum_scatter(
            t.exp(w[:2] * 0.1), "tp", tiled=True
        ).sum() + t.pmean(x.sum(), "tp")

    return t.map(body, (t.P("tp"), t.P()), t.P(None, "tp"))


def pair(d: Any, y: Any) -> Any:
    return {"p": d["x"] @ y, "q": (y, d["x"].sum())}


def steps(t: Any, c: Any, rows: Any) -> Any:
    """Compute a recurrence with a collective in each step."""
    return t.scan(lambda c, row: (t.tanh(c + t.psum(row, "tp")), c.sum()), c, rows)


def recurrent(t: Any) -> Callable[..., Any]:
    return t.map(lambda x: steps(t, t.psum(x[0], "tp"), x), (t.P("tp"),), (t.P(), t.P()))


def chosen(t: Any, x: Any) -> Any:
    halved = t.while_loop(lambda r: (r * r).sum() > 1, lambda r: r / 2, x)
    taken = t.cond(x.sum() > 0, lambda x: t.sin(x), lambda x: t.cos(x), x)
    return halved, taken, t.fori_loop(0, 3, lambda i, r: t.sin(r) + i, x)


def switched(t: Any, x: Any) -> Any:
    index = t.where(x.sum() > 1, 2, t.where(x.sum() > -1, 1, -7))
    return t.switch(index, [lambda x: x, lambda x: x * 2, lambda x: x * x], x)


PROGRAMS: dict[str, Callable[..., Any]] = {
    "vmap of a mapped function": lambda t, a: t.vmap(rows(t), in_axes=(0, None))(a.xs, a.w),
    "the batch over another axis": lambda t, a: t.vmap(
        rows(t), in_axes=(0, None), spmd_axis_name="dp"
    )(a.xs, a.w),
    "in_axes and out_axes": lambda t, a: t.vmap(rows(t), (1, None), 1)(a.xs, a.w),
    "trees of axes": lambda t, a: t.vmap(pair, ({"x": 0}, None), {"p": 1, "q": (None, 0)})(
        {"x": a.xs}, a.w
    ),
    "vmap of vmap": lambda t, a: t.vmap(t.vmap(lambda r, w: t.sin(r @ w), (0, None)), (0, None))(
        a.xs, a.w
    ),
    "vmap of grad": lambda t, a: t.vmap(t.grad(loss(t), (0, 1)), in_axes=(0, None))(a.xs, a.w),
    "vmap of grad, split": lambda t, a: t.vmap(
        t.grad(loss(t), (0, 1)), in_axes=(0, None), spmd_axis_name="dp"
    )(a.xs, a.w),
    "grad of vmap": lambda t, a: t.grad(
        lambda xs, w: (t.vmap(rows(t), in_axes=(0, None))(xs, w) ** 2).sum(), (0, 1)
    )(a.xs, a.w),
    "jvp": lambda t, a: t.jvp(rows(t), (a.x, a.w), (a.v, a.u)),
    "jvp through exchanges": lambda t, a: t.jvp(exchanged(t), (a.x, a.w), (a.v, a.u)),
    "jvp of jvp": lambda t, a: t.jvp(
        lambda x: t.jvp(lambda x: exchanged(t)(x, a.w), (x,), (t.sin(x),))[1], (a.x,), (a.v,)
    ),
    "jvp of grad": lambda t, a: t.jvp(t.grad(loss(t), (0, 1)), (a.x, a.w), (a.v, a.u)),
    "grad of jvp": lambda t, a: t.grad(lambda x: t.jvp(lambda x: loss(t)(x, a.w), (x,), (a.v,))[1])(
        a.x
    ),
    "linearize": lambda t, a: (lambda out, f: (out, f(a.v, a.u)))(
        *t.linearize(exchanged(t), a.x, a.w)
    ),
    "vjp": lambda t, a: (lambda out, back: back(t.cos(out)))(*t.vjp(exchanged(t), a.x, a.w)),
    "jacfwd": lambda t, a: t.jacfwd(exchanged(t), (0, 1))(a.x, a.w),
    "jacrev": lambda t, a: t.jacrev(exchanged(t), (0, 1))(a.x, a.w),
    "hessian": lambda t, a: t.hessian(loss(t), (0, 1))(a.x, a.w),
    "vmap of jacrev": lambda t, a: t.vmap(t.jacrev(rows(t)), in_axes=(0, None))(a.xs, a.w),
    "scan inside": lambda t, a: recurrent(t)(a.x),
    "vmap of scan inside": lambda t, a: t.vmap(recurrent(t))(a.xs),
    "jvp of scan inside": lambda t, a: t.jvp(recurrent(t), (a.x,), (a.v,)),
    "grad of scan inside": lambda t, a: t.grad(lambda x: (recurrent(t)(x)[0] ** 2).sum())(a.x),
    "control flow": lambda t, a: [chosen(t, a.y[i]) for i in range(4)],
    "vmap of control flow": lambda t, a: t.vmap(lambda r: chosen(t, r))(a.y),
    "switch": lambda t, a: [switched(t, a.y[i]) for i in range(4)],
    "vmap of switch": lambda t, a: t.vmap(lambda r: switched(t, r))(a.y),
    "scan backwards": lambda t, a: t.scan(
        lambda c, r: (c * 0.5 + r, t.sin(c)), a.y[0], a.y, reverse=True
    ),
    "scan without xs": lambda t, a: t.scan(lambda c, _: (t.sin(c), c), a.y, None, length=3),
}


def main() -> None:
    """Write the results of all programs under JAX, leaf by leaf."""
    os.environ |= {
        "JAX_PLATFORMS": "cpu",
        "JAX_ENABLE_X64": "1",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
    }
    import jax
    import jax.numpy as jnp

    mesh = jax.make_mesh(SHAPE, AXES, axis_types=(jax.sharding.AxisType.Auto,) * 2)

    def mapped(f: Any, in_specs: Any, out_specs: Any) -> Any:
        return jax.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs)

    names = {name: getattr(jax, name) for name in TRANSFORMS} | {
        name: getattr(jax.lax, name) for name in FLOW
    }
    t = SimpleNamespace(
        **names, **{name: getattr(jnp, name) for name in NUMBERS}, map=mapped, P=jax.P
    )
    a = SimpleNamespace(**{name: jnp.asarray(x) for name, x in inputs().items()})
    results = {
        name: [np.asarray(x) for x in jax.tree.leaves(jax.jit(lambda p=p: p(t, a))())]
        for name, p in PROGRAMS.items()
    }
    pickle.dump(results, sys.stdout.buffer)


if __name__ == "__main__":
    main()
