"""The table's programs under JAX, on simulated CPU devices, in a separate process:
`python -m tests.sharding.functional.jax_oracle`.

The process is separate because JAX reads its flags at startup, and starts threads that forked test
processes must not inherit. It runs the table and writes one answer after the other, while the tests
wait for their answers:

    tests   case 0  case 1  case 2  ..      each waits for the answer to its case
              ^       ^
    JAX     case 0  case 1  case 2  case 3 ..
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import Any

import numpy as np

from tests.sharding.functional.differences import DIFFERENCES
from tests.sharding.functional.table import CASES, MappedCase, loss, weights

ROOT = Path(__file__).parents[3]
TOGETHER = 12  # cases compiled as one program
# Small programs: compile fast.
FLAGS = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"


@dataclass
class Answer:
    """The result of a case.

    Attributes:
        values: the results, leaf by leaf, as float64.
        dtypes: their original dtypes.
        grads: gradients of the loss with respect to each differentiable input.
        second: gradients of the weighted sum of those, with respect to each.
        refused: the message, if JAX raises.
    """

    values: list[np.ndarray] = field(default_factory=list)
    dtypes: list[str] = field(default_factory=list)
    grads: list[np.ndarray] = field(default_factory=list)
    second: list[np.ndarray] = field(default_factory=list)
    refused: str = ""


class Jax:
    """The JAX process and its answers: `with Jax([name]) as jax: jax.answer(name)`.

    Args:
        names: names of the cases to run, such as "psum on 8 over a".
    """

    def __init__(self, names: Sequence[str]) -> None:
        command = [sys.executable, "-m", "tests.sharding.functional.jax_oracle"]
        self._process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self._process.stdin
        pickle.dump(set(names), self._process.stdin)
        self._process.stdin.flush()
        self._answers: dict[str, Answer] = {}

    def __enter__(self) -> Jax:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.kill()
        self._process.communicate()

    def answer(self, name: str) -> Answer:
        """Wait for the answer to a case."""
        while name not in self._answers:
            self._read()
        return self._answers[name]

    def _read(self) -> None:
        try:
            name, answer = pickle.load(self._process.stdout)  # type: ignore[arg-type]
        except EOFError as error:
            raise RuntimeError(
                f"the JAX process ended, exit status {self._process.wait()}: see its messages"
            ) from error
        self._answers[name] = Answer(**answer)


# -- inside the process ----------------------------------------------------------------------------


def _lax() -> SimpleNamespace:
    """Return `jax.lax` with our names for the types of an all_gather, ignoring `sizes`."""
    from jax import lax

    types = {"replicated": "invarying", "sharded": "varying"}

    def all_gather(
        x: Any, axis_name: Any, *, to: str = "varying", sizes: Any = None, **more: Any
    ) -> Any:
        return lax.all_gather(x, axis_name, to=types.get(to, to), **more)

    def all_to_all(x: Any, axis_name: Any, *dims: int, sizes: Any = None, **more: Any) -> Any:
        return lax.all_to_all(x, axis_name, *dims, **more)

    return SimpleNamespace(**{**vars(lax), "all_gather": all_gather, "all_to_all": all_to_all})


def _mapped(case: MappedCase) -> Callable[..., list[Any]]:
    """Return the program over global arrays; it returns a list of leaves."""
    import jax

    devices = jax.devices()[: int(np.prod(case.mesh))]
    mesh = jax.make_mesh(
        case.mesh,
        case.axes,
        axis_types=(jax.sharding.AxisType.Auto,) * len(case.axes),
        devices=devices,
    )

    def run(*local: Any) -> list[Any]:
        leaves = jax.tree.leaves(case.program(_lax(), *local))
        return leaves if case.out is not None else [leaf[None] for leaf in leaves]

    return jax.shard_map(
        run,
        mesh=mesh,
        in_specs=tuple(jax.P(*x.spec) for x in case.inputs),
        out_specs=jax.P(*([case.axes] if case.out is None else case.out)),
    )


def _derivatives(case: MappedCase) -> Callable[..., tuple[list[Any], Any, Any]]:
    """Return a function from inputs to results, gradients, and gradients of the gradients' weighted
    sum.
    """
    import jax

    function, by = _mapped(case), case.differentiable

    def summed(*xs: Any) -> tuple[Any, list[Any]]:
        out = function(*xs)
        return sum(loss(y.astype("float64"), weights(y.shape, k)) for k, y in enumerate(out)), out

    def gradients(*xs: Any) -> tuple[Any, tuple[list[Any], Any]]:
        grads, out = jax.grad(summed, by, has_aux=True)(*xs)
        return sum(
            (g.astype("float64") * weights(g.shape, k)).sum() for k, g in enumerate(grads)
        ), (out, grads)

    def run(*xs: Any) -> tuple[list[Any], Any, Any]:
        if not by:
            return function(*xs), (), ()
        if not case.second:
            return *gradients(*xs)[1], ()
        second, (out, grads) = jax.grad(gradients, by, has_aux=True)(*xs)
        return out, grads, second

    return run


def _answer(out: Sequence[Any], grads: Sequence[Any], second: Sequence[Any]) -> Answer:
    values, first, again = (
        [np.asarray(x).astype("float64") for x in xs] for xs in (out, grads, second)
    )
    return Answer(values, [str(x.dtype) for x in out], first, again)


def _inputs(case: MappedCase) -> list[Any]:
    import jax.numpy as jnp

    return [jnp.asarray(x.values(seed)).astype(x.dtype) for seed, x in enumerate(case.inputs)]


def _together(cases: dict[str, MappedCase]) -> dict[str, Answer]:
    import jax

    def run(inputs: list[list[Any]]) -> list[Any]:
        return [_derivatives(case)(*xs) for case, xs in zip(cases.values(), inputs, strict=True)]

    results = jax.jit(run)([_inputs(case) for case in cases.values()])
    return {name: _answer(*result) for name, result in zip(cases, results, strict=True)}


def _asked(cases: dict[str, MappedCase]) -> dict[str, Answer]:
    """Return the answers to these cases; if JAX rejects one of them, compute each separately."""
    try:
        return _together(cases)
    except Exception as error:
        if len(cases) == 1:
            return {name: Answer(refused=str(error) or type(error).__name__) for name in cases}
    return {n: answer for name, case in cases.items() for n, answer in _asked({name: case}).items()}


def _answers(asked: set[str]) -> Iterator[tuple[str, Answer]]:
    names = [name for name in CASES if name in asked]
    for at in range(0, len(names), TOGETHER):
        yield from _asked({name: CASES[name] for name in names[at : at + TOGETHER]}).items()
    for name in [name for name in DIFFERENCES if name in asked]:
        yield from _asked({name: DIFFERENCES[name]}).items()


def main() -> None:
    """Read the cases to compute, and write the answers in the order of the table."""
    os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_ENABLE_X64": "1", "XLA_FLAGS": FLAGS}
    for name, answer in _answers(pickle.load(sys.stdin.buffer)):
        pickle.dump((name, vars(answer)), sys.stdout.buffer)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
