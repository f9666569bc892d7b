"""The programs of `table.py` through `shard_map` and by their definitions, and the comparison of
both with JAX's answers.

Numbers have few bits, so sums are exact in any order and results must be bitwise equal; half
precision, where gradients are rounded, has a tolerance of a few units in the last place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves, tree_map

import shardmesh as sm
from shardmesh import P
from tests.device import DEVICE
from tests.sharding.functional import oracle
from tests.sharding.functional.jax_oracle import Answer
from tests.sharding.functional.table import Input, MappedCase, loss, weights

# -- our side --------------------------------------------------------------------------------------


def tensor_of(x: Input, seed: int) -> torch.Tensor:
    return torch.from_numpy(x.values(seed)).to(DEVICE, getattr(torch, x.dtype))


def mapped(case: MappedCase, mesh: sm.DeviceMesh) -> Callable[..., Any]:
    """Return the program of the case on ShardedTensors."""

    def run(*local: torch.Tensor) -> Any:
        out = case.program(sm, *local)
        return out if case.out is not None else tree_map(lambda leaf: leaf[None], out)

    out_specs = P(case.axes) if case.out is None else P(*case.out)
    return sm.shard_map(
        run, mesh=mesh, in_specs=tuple(P(*x.spec) for x in case.inputs), out_specs=out_specs
    )


def ours(case: MappedCase) -> Answer:
    """Return the result of the case on this rank. Calls the function twice: types are tracked in
    the first call, trusted in the second.
    """
    mesh = sm.init_device_mesh(DEVICE, case.mesh, axis_names=case.axes)
    xs = [laid_out(mesh, tensor_of(x, seed), P(*x.spec)) for seed, x in enumerate(case.inputs)]
    by = [xs[i].requires_grad_() for i in case.differentiable]
    function = mapped(case, mesh)
    first, out = (tree_leaves(function(*xs)) for _ in range(2))
    for one, two in zip(first, out, strict=True):
        assert sm.typeof(one) is sm.typeof(two)
        torch.testing.assert_close(one.to_local(), two.to_local(), rtol=0, atol=0, equal_nan=True)
    values = [y.full_tensor() for y in out]
    grads, second = derivatives(case, mesh, out, by) if by else ([], [])
    return Answer(numpy_of(values), dtypes_of(values), grads, second)


def derivatives(
    case: MappedCase, mesh: sm.DeviceMesh, out: list[Any], by: list[Any]
) -> tuple[list[Any], list[Any]]:
    """Return derivatives of the same losses as in JAX."""
    total: Any = sum(loss(y.double(), weighing(mesh, y, k, y.spec)) for k, y in enumerate(out))
    grads: Any = torch.autograd.grad(total, by, create_graph=case.second)
    numbers = numpy_of([g.full_tensor() for g in grads])
    if not case.second:
        return numbers, []
    again: Any = sum(
        (g.double() * weighing(mesh, g, k, x.spec)).sum()
        for k, (g, x) in enumerate(zip(grads, by, strict=True))
    )
    second: Any = torch.autograd.grad(again, by)
    return numbers, numpy_of([g.full_tensor() for g in second])


def laid_out(mesh: sm.DeviceMesh, whole: torch.Tensor, spec: P) -> sm.ShardedTensor:
    """Distribute a tensor that every rank holds in full, without communication."""
    return sm.distribute_tensor(whole, mesh, spec, src_data_rank=None)


def weighing(mesh: sm.DeviceMesh, like: torch.Tensor, seed: int, spec: P) -> sm.ShardedTensor:
    """Return the weights of the losses, with the layouts of the weighted results."""
    return laid_out(mesh, torch.from_numpy(weights(like.shape, seed)), spec)


def numpy_of(xs: list[torch.Tensor]) -> list[np.ndarray]:
    return [x.detach().double().cpu().numpy() for x in xs]


def dtypes_of(xs: list[torch.Tensor]) -> list[str]:
    return [str(x.dtype).removeprefix("torch.") for x in xs]


# -- comparing -------------------------------------------------------------------------------------


def close(case: MappedCase, ours: list[np.ndarray], theirs: list[np.ndarray], what: str) -> None:
    """Assert equality, up to a few roundings where gradients are communicated in half precision."""
    assert len(ours) == len(theirs), what
    half = max(
        (
            torch.finfo(getattr(torch, x.dtype)).eps
            for x in case.inputs
            if "16" in x.dtype and "float" in x.dtype
        ),
        default=0,
    )
    for one, other in zip(ours, theirs, strict=True):
        slack = 4 * half * np.abs(other).max(initial=0) if half else 0
        np.testing.assert_allclose(one, other, rtol=0, atol=slack, err_msg=what, strict=True)


def same_answer(case: MappedCase, one: Answer, other: Answer) -> None:
    close(case, one.values, other.values, "values")
    close(case, one.grads, other.grads, "gradients")
    close(case, one.second, other.second, "second derivatives")


def defined(case: MappedCase) -> Answer:
    """Return the result of the case by the definitions in `oracle.py`."""
    xs = [tensor_of(x, seed) for seed, x in enumerate(case.inputs)]
    by = [xs[i].requires_grad_() for i in case.differentiable]
    values = oracle.evaluate(case.mesh, case.program, xs, [x.spec for x in case.inputs], case.out)
    grads, second = oracle.derivatives(values, by, case.second) if by else ([], [])
    return Answer(numpy_of(values), dtypes_of(values), numpy_of(grads), numpy_of(second))
