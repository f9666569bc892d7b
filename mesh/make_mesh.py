"""make_mesh, process_index and process_count: meshes and ranks under JAX's names."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
import torch

from . import errors
from .abstract_mesh import checked_names, checked_shape
from .comm.current_world import current_world
from .comm.thread_context import thread_context
from .device_mesh import DeviceMesh, init_device_mesh
from .launch.environment import launch_environment
from .launch.process_groups import start_processes
from .processes.process import ProcessWorld


def make_mesh(
    axis_shapes: Sequence[int],
    axis_names: Sequence[str],
    *,
    devices: Any = None,
    device_type: str | None = None,
) -> DeviceMesh:
    """make_mesh((2, 4), ("dp", "tp")) -> DeviceMesh: `init_device_mesh` with JAX's arguments.

    Args:
        axis_shapes: one size per axis.
        axis_names: one name per axis.
        devices: the ranks, as a list or an array such as `mesh.devices`; by default as many as the
            mesh has, from 0 on.
        device_type: "cpu", "cuda", ...; by default "cuda" if it is available.

    Raises: MeshError when the shape needs more ranks than there are, or another number than
        `devices` has; else as `init_device_mesh`.

    Communication: as `init_device_mesh`.

        mesh = make_mesh((2, 4), ("dp", "tp"))
    """
    shape = checked_shape(axis_shapes)
    names = checked_names(axis_names, shape)
    kind = device_type or ("cuda" if torch.cuda.is_available() else "cpu")
    world = thread_context.world or start_processes(kind)
    if devices is None and prod(shape) == world.size:
        return init_device_mesh(kind, shape, axis_names=names)
    ranks = np.arange(min(prod(shape), world.size)) if devices is None else np.asarray(devices)
    if ranks.size != prod(shape):
        raise errors.MeshError(
            f"make_mesh({shape}): the shape has {prod(shape)} ranks, but there are {ranks.size} "
            "devices; give a shape with that product."
        )
    return DeviceMesh(kind, ranks.reshape(shape), axis_names=names)


def process_index() -> int:
    """process_index() -> this rank's number in its world (also in `simulate`). No communication."""
    return _rank_and_size()[0]


def process_count() -> int:
    """process_count() -> the number of ranks of this rank's world. Communication: none."""
    return _rank_and_size()[1]


def _rank_and_size() -> tuple[int, int]:
    """Return (rank, size); before the default group is started, as the launcher has set them."""
    world = current_world()
    started = not isinstance(world, ProcessWorld) or world.size > 1
    return (world.rank, world.size) if started else launch_environment() or (world.rank, world.size)
