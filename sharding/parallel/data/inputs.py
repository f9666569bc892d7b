"""The mesh on which a unit computes: that of its inputs."""

from __future__ import annotations

import math
from typing import Any

from torch.utils import _pytree as pytree

from ....mesh.device_mesh import DeviceMesh
from ...layout.layout import distinct_mesh_names
from ...tensor.sharded_tensor import ShardedTensor


def mesh_of_inputs(inputs: Any, whole: DeviceMesh, unit: str) -> DeviceMesh | None:
    """Return the mesh of the first sharded tensor among the inputs, None if all are plain.

    Args:
        inputs: a pytree.
        whole: the mesh with all axes.
        unit: the name of the unit, for messages.

    Raises:
        ValueError: the inputs are on another mesh.
    """
    mesh = next((x.mesh for x in pytree.tree_leaves(inputs) if isinstance(x, ShardedTensor)), None)
    if mesh is None or mesh is whole or (set(mesh.axis_names) <= set(whole.axis_names) and whole[mesh.axis_names] == mesh):
        return mesh
    here, there = distinct_mesh_names(mesh, whole)
    raise ValueError(
        f"an input of {unit} is on {here}, but its parameters are on {there}; redistribute the input to that mesh, or a part of it"
    )


def mesh_of_parameter(own: DeviceMesh | None, whole: DeviceMesh, split: tuple[str, ...], tensor_axes: tuple[str, ...]) -> DeviceMesh | None:
    """Return the mesh on which a parameter is used when inputs are plain; None to use it as a plain tensor.

    Args:
        own: its mesh before data parallelism; None if it was a plain tensor.
        whole: the mesh with all axes.
        split: the data-parallel axes, which split it between uses.
        tensor_axes: the axes that split parameters in use.
    """
    if own is None:
        return None
    axes = tensor_axes if own is whole else tuple(axis for axis in own.axis_names if axis not in split)
    return whole[axes] if axes else None


def gradient_scale(whole: DeviceMesh, on: DeviceMesh | None) -> float:
    """Return the factor of gradients, which are summed over the axes of the activations' mesh and averaged over all others."""
    return 1 / math.prod(whole.size(axis) for axis in whole.axis_names if on is None or axis not in on.axis_names)
