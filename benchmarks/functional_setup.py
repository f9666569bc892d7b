"""Setup of `functional.py`: one process group, a mesh of each implementation over it, and sharded
tensors on each mesh.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import torch.distributed as dist
import torch.distributed.tensor as dt
from dispatch import WORLD
from measure import Call
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh as init_torch_mesh

import shardmesh as sm
from shardmesh import P

AXIS = "x"
IN_A_ROW = 50


class Setup:
    """The process group, and a mesh of each implementation over it."""

    def __init__(self) -> None:
        from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend

        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD)
        self.theirs = init_torch_mesh("cpu", (WORLD,), mesh_dim_names=(AXIS,))
        self.ours = sm.init_device_mesh("cpu", (WORLD,), axis_names=(AXIS,))
        self.group = self.theirs.get_group()

    @cached_property
    def spmd(self) -> Any:
        """The package spmd_types; None if it is not installed."""
        if find_spec("spmd_types") is None:
            return None
        import_module("spmd_types.checker")
        return import_module("spmd_types")

    @property
    def spmd_version(self) -> str:
        """Version of spmd_types, for the line below the tables."""
        return "not installed" if self.spmd is None else version("spmd-types")

    @contextmanager
    def checked(self) -> Iterator[None]:
        """Enable the type checker of spmd_types."""
        with self.spmd.set_current_mesh(self.theirs), self.spmd.checker.typecheck():
            yield

    def our(self, local: Tensor, dim: int | None) -> Any:
        """Return a `ShardedTensor` leaf with this local part: sharded along `dim`, or replicated if
        `dim` is None.
        """
        shape = [n * WORLD if i == dim else n for i, n in enumerate(local.shape)]
        whole = sm.from_local(local.detach().clone(), self.ours, our_spec(dim), shape=shape)
        return whole.requires_grad_(local.requires_grad)

    def their(self, local: Tensor, dim: int | None) -> Any:
        """Return the same as a `DTensor`."""
        whole = dt.DTensor.from_local(local.detach().clone(), self.theirs, their_placements(dim))
        return whole.requires_grad_(local.requires_grad)


def our_spec(dim: int | None) -> P:
    """Return the spec of a tensor sharded along `dim`, or replicated."""
    return P() if dim is None else P(*[None] * dim, AXIS)


def their_placements(dim: int | None) -> list[Any]:
    """Return the same as DTensor placements."""
    return [dt.Replicate() if dim is None else dt.Shard(dim)]


def in_a_row(call: Call, context: Callable[[], AbstractContextManager[Any]] = nullcontext) -> Call:
    """Return a function that makes a call `IN_A_ROW` times inside a context."""

    def calls() -> None:
        with context():
            for _ in range(IN_A_ROW):
                call()

    return calls
