"""In-place writes to arguments of mapped functions: copies of an argument never differ
afterwards.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import shardmesh as sm
from shardmesh import P
from tests.sharding.functional.helpers import put, same, values
from tests.sharding.ranks import on_mesh, same_error

X = values(6, 4)


def doubled(x: Any) -> Any:
    x.mul_(2)
    return x.sum(0)[None]


def over(mesh: sm.DeviceMesh, spec: P, out: P, **more: Any) -> Any:
    return sm.shard_map(doubled, mesh=mesh, in_specs=spec, out_specs=out, **more)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("kind", ["plain", "replicated", "in the other dim"])
@pytest.mark.parametrize("check", [True, "always", "values"])
def test_a_write_to_a_part_of_a_replicated_argument_raises(
    kind: str, mode: Any, check: bool | str
) -> None:
    """The function would write to another part of the copy on every rank."""

    def program(mesh: sm.DeviceMesh) -> None:
        with mode():
            x = {
                "plain": X.clone,
                "replicated": lambda: put(mesh, X),
                "in the other dim": lambda: put(mesh, X, P(None, "b")),
            }[kind]()
            spec = P("a", "b") if kind == "in the other dim" else P("a")
            over(mesh, spec, spec, check=check)(x)

    text = same_error((2, 2), program, sm.errors.ShardingTypeError, silent=False)
    assert "argument 0 is the same on every rank" in text
    assert "was written to in place" in text
    assert "write to a clone of it, or pass a ShardedTensor with the spec P('a'" in text


def test_equal_writes_and_writes_to_split_arguments_are_allowed() -> None:
    def program(mesh: sm.DeviceMesh) -> None:
        x = put(mesh, X, P("a"))
        same(over(mesh, P("a"), P("a"))(x).sum(0), 2 * X.sum(0))
        same(x, 2 * X)
        plain = X.clone()
        over(mesh, P(), P())(plain)
        torch.testing.assert_close(plain, 2 * X)
        over(mesh, P("b"), P("b"))(plain)  # an axis of one rank cuts nothing
        torch.testing.assert_close(plain, 4 * X)
        cloned = sm.shard_map(
            lambda x: doubled(x.clone()), mesh=mesh, in_specs=P("a"), out_specs=P("a")
        )
        same(cloned(plain).sum(0), 8 * X.sum(0))
        torch.testing.assert_close(plain, 4 * X)

    on_mesh((2, 1), program)
