"""Strategies are shared by calls that differ only in floats: no rule or decomposition may depend on
one, or keep one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import pytest
import torch

import shardmesh as sm
from shardmesh.sharding.ops.rules.check import _Sample, combinations, place
from shardmesh.sharding.ops.rules.registry import DECOMPOSITIONS, RULES, writes_first_operand
from tests.sharding.ops.rules.table import OWNERS, Call, registered, samples_of
from tests.sharding.ops.rules.test_table import FILLED
from tests.sharding.ranks import on_mesh


def _changed(tree: Any) -> Any:
    """Return the arguments with every such number halved, infinite ones negated, and zero
    unchanged.
    """
    if isinstance(tree, (list, tuple)):
        return type(tree)(map(_changed, tree))
    if isinstance(tree, dict):
        return {name: _changed(item) for name, item in tree.items()}
    if type(tree) is not float:
        return tree
    return -tree if math.isinf(tree) else tree / 2


def _cases() -> Iterator[Any]:
    """Yield one call of every function in the table with such a number in a sample."""
    assert FILLED
    seen = set()
    for label, func in registered():
        makers = (RULES.get(func), DECOMPOSITIONS.get(func))
        if (
            label.partition(".")[0] not in OWNERS
            or writes_first_operand(func)
            or makers == (None, None)
            or makers in seen
        ):
            continue
        calls = [
            c
            for c in samples_of(label)
            if repr(_changed([c.args, c.kwargs])) != repr([c.args, c.kwargs])
        ]
        if calls:
            seen.add(makers)
            yield pytest.param(func, calls[-1], id=label)


def _exists(sample: Callable[[], _Sample]) -> _Sample | None:
    try:
        return sample()
    except RuntimeError:  # torch refuses the changed number
        return None


@pytest.mark.one_in(5)
@pytest.mark.filterwarnings("ignore:.*no sharding rule")
@pytest.mark.parametrize(("func", "call"), list(_cases()))
def test_successive_float_arguments(func: Callable[..., Any], call: Call) -> None:
    made = [lambda: _Sample.of(func, _changed(list(call.args)), _changed(call.kwargs), ("sum",))]
    made.append(lambda: _Sample.of(func, call.args, call.kwargs, ("sum",)))
    both = [sample for sample in map(_exists, made) if sample is not None]
    if len(both) < 2:
        pytest.skip("torch takes no other number here")

    def program(mesh: sm.DeviceMesh) -> None:
        for specs in islice(combinations(both[0], mesh, None), 6):
            for sample in both:
                tensors = [
                    place(x, mesh, spec, seed)
                    for seed, (x, spec) in enumerate(zip(sample.values, specs, strict=True))
                ]
                for got, want in zip(sample.call(tensors), sample.results, strict=True):
                    if isinstance(want, torch.Tensor):
                        torch.testing.assert_close(
                            got.full_tensor(), want, rtol=1e-2, atol=1e-2, equal_nan=True
                        )

    on_mesh((2,), program)
