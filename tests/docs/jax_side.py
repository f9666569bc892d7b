"""JAX's results for docs/from_jax.md, in a separate process:
`python -m tests.docs.jax_side < expressions.json`.

It writes the value of each expression, and the public names of the modules in the page's tables.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

MULTIHOST_HELPERS = ("_impl", "_abstract_eval", "_batcher")


def answers(expressions: dict[str, str], names: dict[str, Any]) -> dict[str, Any]:
    """Return the value of each expression with these names, in JSON's types."""
    results = {}
    for row, text in expressions.items():
        try:
            results[row] = json.loads(json.dumps(eval(text, dict(names)), default=str))
        except Exception as error:
            results[row] = f"{type(error).__name__}: {error}"
    return results


def error_of(f: Callable[[], Any]) -> str:
    """Return the class name of the error that a call raises."""
    try:
        f()
    except Exception as error:
        return type(error).__name__
    return "none"


def public_names() -> dict[str, list[str]]:
    """Return the public names of the modules of the page."""
    import jax
    from jax.experimental import multihost_utils

    def public(module: Any) -> list[str]:
        return [name for name in dir(module) if not name.startswith("_")]

    def own(module: Any, home: str) -> list[str]:
        return [
            name
            for name in public(module)
            if getattr(getattr(module, name), "__module__", "") == home
        ]

    hosts = [
        name
        for name in own(multihost_utils, multihost_utils.__name__)
        if not name.endswith(MULTIHOST_HELPERS)
    ]
    return {
        "jax.sharding": public(jax.sharding),
        "Collectives: jax.lax": own(jax.lax, "jax._src.lax.parallel"),
        "jax.experimental.multihost_utils": [
            name for name in hosts if name not in ("gtl_abstract_eval", "ltg_abstract_eval")
        ],
        "jax.Array": [
            n
            for n in public(jax.Array)
            if any(word in n for word in ("shard", "addressable", "replicated", "committed"))
        ],
    }


def names() -> dict[str, Any]:
    """Return the names that the expressions may use, from JAX."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    X = jnp.arange(8.0)

    def tolist(tree: Any) -> Any:
        return jax.tree.map(lambda leaf: np.asarray(leaf).tolist(), tree)

    def put(x: Any, spec: Any) -> Any:
        return jax.device_put(x, jax.NamedSharding(mesh, spec))

    def run(f: Any, in_specs: Any, out_specs: Any, **more: Any) -> Any:
        mapped = jax.jit(
            jax.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, **more)
        )
        return tolist(mapped(X))

    return {
        **vars(jax.lax),
        **vars(jax),
        "mesh": mesh,
        "X": X,
        "tolist": tolist,
        "put": put,
        "run": run,
        "error_of": error_of,
        "NamedSharding": jax.NamedSharding,
        "AbstractMesh": jax.sharding.AbstractMesh,
        "shown": lambda x: str(jax.typeof(x)).replace("float", "f"),
        "jit_or_not": jax.jit,
        "seen": [],
        "whole_arrays": True,
    }


def main() -> None:
    """Read expressions by row; write JAX's results and names."""
    os.environ |= {
        "JAX_PLATFORMS": "cpu",
        "JAX_ENABLE_X64": "1",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
    }
    expressions = json.load(sys.stdin)
    json.dump({"answers": answers(expressions, names()), "names": public_names()}, sys.stdout)


if __name__ == "__main__":
    main()
