"""Recomputation in backward runs in the state of its forward: current mesh, implicit replication,
world.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

import shardmesh as sm
from shardmesh import P
from shardmesh.mesh.comm.current_world import current_world
from shardmesh.mesh.comm.thread_context import thread_context
from tests.sharding.ranks import every_rank, on_mesh, place


def in_device_thread(run: Callable[[], Any]) -> None:
    """As autograd runs nodes of a GPU: in a thread that has none of the caller's state."""
    errors: list[BaseException] = []

    def guarded() -> None:
        try:
            run()
        except BaseException as error:  # raised in the caller
            errors.append(error)

    thread = threading.Thread(target=guarded)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


RUN: dict[str, Callable[[Callable[[], Any]], Any]] = {
    "here": lambda run: run(),
    "device thread": in_device_thread,
}


def _recomputed(f: Any, *args: Any) -> Any:
    return checkpoint(f, *args, use_reentrant=False)


@pytest.mark.parametrize("run", RUN.values(), ids=RUN)
def test_a_block_makes_a_tensor_on_the_current_mesh(run: Callable[..., Any]) -> None:
    def program(mesh: sm.DeviceMesh) -> None:
        x = place(mesh, torch.arange(4.0), sm.Shard(0), grad=True)
        with mesh:
            y = _recomputed(lambda x: (x * sm.full((4,), 2.0, P("a"))).sin(), x).sum()
        assert sm.get_mesh() is None
        run(y.backward)
        assert sm.get_mesh() is None
        torch.testing.assert_close(x.grad.full_tensor(), 2 * (2 * torch.arange(4.0)).cos())  # type: ignore[union-attr]

    on_mesh((2,), program)


@pytest.mark.parametrize("run", RUN.values(), ids=RUN)
def test_plain_operands_are_replicated_as_in_forward(run: Callable[..., Any]) -> None:
    def program(mesh: sm.DeviceMesh) -> None:
        x = place(mesh, torch.arange(4.0), sm.Shard(0), grad=True)
        with sm.ops.implicit_replication():
            y = _recomputed(lambda x: (x * torch.full((4,), 2.0)).sin(), x).sum()
        run(y.backward)
        assert not thread_context.implicit_replication
        torch.testing.assert_close(x.grad.full_tensor(), 2 * (2 * torch.arange(4.0)).cos())  # type: ignore[union-attr]

    on_mesh((2,), program)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("run", RUN.values(), ids=RUN)
def test_state_that_a_function_sees(run: Callable[..., Any], reentrant: bool) -> None:
    """With both forms of checkpoint; what the caller of backward has set does not count, and is
    there again afterwards.
    """

    def program(mesh: sm.DeviceMesh) -> None:
        seen: list[Any] = []
        other = sm.DeviceMesh(mesh.device_type, mesh.ranks, axis_names=("other",))

        def f(x: torch.Tensor) -> torch.Tensor:
            seen.append((sm.get_mesh(), thread_context.implicit_replication, current_world()))
            return x.sin()

        x = torch.ones(3, requires_grad=True)
        with mesh, sm.ops.implicit_replication():
            y = checkpoint(f, x, use_reentrant=reentrant).sum()
        with other:
            run(y.backward)
            assert sm.get_mesh() is other
        assert seen == [(mesh, True, mesh.world)] * 2

    on_mesh((2,), program)


@every_rank(2)
def test_nested_and_wrapped(mesh: sm.DeviceMesh) -> None:
    seen: list[Any] = []

    class Block(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(sm.get_mesh())
            return _recomputed(lambda y: seen.append(sm.get_mesh()) or y.sin(), x.cos())

    with mesh:
        y = checkpoint_wrapper(Block())(torch.ones(3, requires_grad=True)).sum()
    in_device_thread(y.backward)
    assert len(seen) > 3
    assert set(seen) == {mesh}


@every_rank(2)
def test_an_exception_in_recomputation_leaves_no_state(mesh: sm.DeviceMesh) -> None:
    fails: list[bool] = []

    def f(x: torch.Tensor) -> torch.Tensor:
        if fails:
            raise ZeroDivisionError
        return x.sin()

    with mesh, sm.ops.implicit_replication():
        y = _recomputed(f, torch.ones(3, requires_grad=True)).sum()
    fails.append(True)
    with pytest.raises(ZeroDivisionError):
        y.backward()
    assert sm.get_mesh() is None
    assert not thread_context.implicit_replication
    assert current_world() is mesh.world
