"""Running a test program on every rank of a simulated mesh, and recording its communication."""

from __future__ import annotations

import importlib
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

import shardmesh as sm
from shardmesh.mesh.comm.current_world import current_world
from shardmesh.mesh.comm.group import CollectiveRecord
from tests.device import DEVICE, on_device

AXES = ("a", "b", "c", "d")


def on_mesh(mesh_shape: Sequence[int], program: Callable[[sm.DeviceMesh], Any]) -> list[Any]:
    """Run `program(mesh)` on every rank of a simulated mesh with axes a, b, c, d; return each
    rank's result.
    """

    def rank() -> Any:
        with on_device():
            return program(
                sm.init_device_mesh(DEVICE, mesh_shape, axis_names=AXES[: len(mesh_shape)])
            )

    return sm.simulate(math.prod(mesh_shape))(rank)()


def every_rank(*mesh_shape: int) -> Callable[[Callable[[sm.DeviceMesh], Any]], Callable[[], None]]:
    """Make `test(mesh)` a test that runs on every rank of a simulated mesh of this shape.

    What it ran, for other worlds: `test.program` and `test.mesh_shape`.
    """

    def decorate(program: Callable[[sm.DeviceMesh], Any]) -> Callable[[], None]:
        def test() -> None:
            on_mesh(mesh_shape, program)

        test.__name__, test.__doc__ = program.__name__, program.__doc__
        test.program, test.mesh_shape = program, mesh_shape  # type: ignore[attr-defined]
        return test

    return decorate


def place(
    mesh: sm.DeviceMesh, tensor: torch.Tensor, *placements: sm.Placement, grad: bool = False
) -> sm.ShardedTensor:
    """Distribute `tensor`, which is the same on every rank, without communication; replicated
    without placements.
    """
    x = sm.distribute_tensor(tensor, mesh, list(placements) or None, src_data_rank=None)
    return x.requires_grad_() if grad else x


def save_part(x: Any, file: Any) -> None:
    """Save this rank's part by `torch.save`, without the warning that it is only a part."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.save writes only this rank's part")
        torch.save(x, file)


@contextmanager
def collectives() -> Iterator[list[CollectiveRecord]]:
    """Record the collectives of this rank inside the block."""
    records: list[CollectiveRecord] = []
    observers = current_world().observers
    observers.append(records.append)
    try:
        yield records
    finally:
        observers.remove(records.append)


def launched(records: Sequence[CollectiveRecord]) -> list[str]:
    """Return the names of the collectives."""
    return [record.op for record in records]


def same_error(
    mesh_shape: Sequence[int],
    program: Callable[[sm.DeviceMesh], Any],
    kind: type[BaseException],
    *,
    silent: bool = True,
) -> str:
    """Return the text of the error of this kind that `program` raises, the same on every rank,
    before any collective.
    """

    def rank(mesh: sm.DeviceMesh) -> str:
        with collectives() as records:
            try:
                program(mesh)
            except kind as error:
                text = str(error)
            else:
                raise AssertionError(f"no {kind.__name__} on rank {mesh.world.rank}")
        if silent and records:
            raise AssertionError(f"{launched(records)} before the error {text}")
        return text

    texts = on_mesh(mesh_shape, rank)
    assert len(set(texts)) == 1, texts
    return texts[0]


def run_programs(module: str, names: Sequence[str]) -> int:
    """Run these programs of a test module on a real rank, each on a mesh of the first ranks; return
    how many this rank took part in.
    """
    taken = 0
    for name in names:
        test = getattr(importlib.import_module(module), name)
        ranks = np.arange(math.prod(test.mesh_shape)).reshape(test.mesh_shape)
        mesh = sm.DeviceMesh(DEVICE, ranks, axis_names=AXES[: ranks.ndim])
        if mesh.coordinate is not None:
            try:
                test.program(mesh)
            except BaseException as error:
                error.add_note(f"in {module}.{name}")
                raise
            taken += 1
    return taken
