"""Functions with custom gradients, which run unchanged in JAX:
`python -m tests.sharding.functional.vjp_programs` prints JAX's results as JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

X, W = [0.5, -1.0, 2.0, 1.5], [1.5, -0.5]


def product(lib: Any) -> Any:
    """Sum the gradient of a replicated argument by hand, as in JAX."""

    @lib.custom_vjp
    def scaled(w: Any, x: Any) -> Any:
        return w * x

    scaled.defvjp(
        lambda w, x: (w * x, (w, x)), lambda kept, g: (lib.psum(g * kept[1], "a"), g * kept[0])
    )

    def total(w: Any, x: Any) -> Any:
        return lib.psum((scaled(w, x) ** 3).sum(), "a")

    mapped = lib.shard_map(total, (lib.P(), lib.P("a")), lib.P())
    return lib.grad(mapped, argnums=(0, 1))(lib.array(W), lib.array(X))


def exponential(lib: Any) -> Any:
    """Save a result for backward, so that second derivatives go through it."""

    @lib.custom_vjp
    def exp(x: Any) -> Any:
        return lib.exp(x)

    def forward(x: Any) -> Any:
        y = lib.exp(x)
        return y, y

    exp.defvjp(forward, lambda y, g: (g * y,))
    first = lib.grad(lambda x: (exp(x) * x).sum())
    second = lib.grad(lambda x: first(x).sum())
    return (
        first(lib.array(X)),
        second(lib.array(X)),
        lib.grad(lambda x: second(x).sum())(lib.array(X)),
    )


def wrong_on_purpose(lib: Any) -> Any:
    """Return a function with a rule that differs from the derivative; second derivatives follow the
    rule.
    """

    @lib.custom_vjp
    def cube(x: Any) -> Any:
        return x * x * x

    cube.defvjp(lambda x: (x * x * x, (x, x * x)), lambda kept, g: (7.0 * g * kept[0] + kept[1],))
    first = lib.grad(lambda x: cube(x).sum())
    return first(lib.array(X)), lib.grad(lambda x: (first(x) * first(x)).sum())(lib.array(X))


def without_gradient(lib: Any) -> Any:
    """Pass non-differentiated arguments by number and by name, a tree, and an argument without a
    gradient.
    """

    def powered(f: Any, p: Any, n: Any, q: Any) -> Any:
        return {"y": f(p["w"]) ** n * q, "n": n}

    rule = lib.custom_vjp(powered, nondiff_argnums=(0, 2))

    def backward(f: Any, n: Any, kept: Any, g: Any) -> Any:
        w, q = kept
        return {"w": g["y"] * 2.0 * n * f(w) ** (n - 1) * q}, None

    rule.defvjp(lambda f, p, n, q: (powered(f, p, n, q), (p["w"], q)), backward)
    return lib.grad(
        lambda w, q: rule(lambda x: 2.0 * x, {"w": w}, q=q, n=3)["y"].sum(), argnums=(0, 1)
    )(lib.array(X), lib.array(X))


def inside(lib: Any) -> Any:
    """Differentiate inside the mapped function."""

    @lib.custom_vjp
    def clipped(x: Any) -> Any:
        return x

    clipped.defvjp(lambda x: (x, None), lambda _, g: (lib.clip(g, -1.0, 1.0),))
    mapped = lib.shard_map(
        lambda x: lib.grad(lambda x: lib.psum((clipped(x) ** 3).sum(), "a"))(x),
        lib.P("a"),
        lib.P("a"),
    )
    return mapped(lib.array(X))


PROGRAMS: dict[str, Callable[[Any], Any]] = {
    f.__name__: f for f in (product, exponential, wrong_on_purpose, without_gradient, inside)
}


def answers_of_jax() -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.sharding.functional.vjp_programs"]
    return json.loads(
        subprocess.run(
            command, cwd=Path(__file__).parents[3], capture_output=True, check=True, text=True
        ).stdout
    )


def _jax() -> Any:
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
    import jax

    jax.config.update("jax_enable_x64", True)

    class Lib:
        custom_vjp, grad, P = jax.custom_vjp, staticmethod(jax.grad), jax.sharding.PartitionSpec
        psum = staticmethod(jax.lax.psum)
        exp = staticmethod(jax.numpy.exp)
        clip = staticmethod(jax.numpy.clip)
        array = staticmethod(jax.numpy.array)

        @staticmethod
        def shard_map(f: Any, in_specs: Any, out_specs: Any) -> Any:
            mesh = jax.make_mesh((2,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
            return jax.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs)

    return Lib


if __name__ == "__main__":
    import jax

    lib = _jax()
    print(
        json.dumps(
            {name: [x.tolist() for x in jax.tree.leaves(f(lib))] for name, f in PROGRAMS.items()}
        )
    )
