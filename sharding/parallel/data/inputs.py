"""On which mesh a unit computes: that of its inputs."""

from __future__ import annotations

import math
from typing import Any

from torch.utils import _pytree as pytree

from ....mesh.device_mesh import DeviceMesh
from ...layout import told_apart
from ...tensor import ShardedTensor


def mesh_of_inputs(inputs: Any, whole: DeviceMesh, unit: str) -> DeviceMesh | None:
    """The mesh of the first sharded tensor among the inputs; None if all are plain.

    Args:
        inputs: a pytree.
        whole: the mesh with every axis.
        unit: whose inputs they are, for messages.

    Raises:
        ValueError: it is another mesh.
    """
    mesh = next((x.mesh for x in pytree.tree_leaves(inputs) if isinstance(x, ShardedTensor)), None)
    if mesh is None or mesh is whole or (set(mesh.axis_names) <= set(whole.axis_names) and whole[mesh.axis_names] == mesh):
        return mesh
    here, there = told_apart(mesh, whole)
    raise ValueError(
        f"an input of {unit} lies on {here}, and its parameters on {there}; redistribute the input to that mesh, or a part of it"
    )


def gradient_scale(whole: DeviceMesh, on: DeviceMesh | None) -> float:
    """Gradients are summed over the axes of the mesh that activations lie on, and averaged over all others."""
    return 1 / math.prod(whole.size(axis) for axis in whole.axis_names if on is None or axis not in on.axis_names)
