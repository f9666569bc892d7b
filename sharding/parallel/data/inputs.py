"""The mesh on which a unit computes: that of its inputs."""

from __future__ import annotations

import math
from collections.abc import Sequence
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
    if mesh is None or is_slice(mesh, whole):
        return mesh
    own, other = distinct_mesh_names(mesh, whole)
    raise ValueError(
        f"an input of {unit} is on {own}, but its parameters are on {other}; redistribute the "
        "input to that mesh, or a part of it"
    )


def is_slice(mesh: DeviceMesh, whole: DeviceMesh) -> bool:
    """Return whether a mesh is another one, or a slice of it."""
    if mesh is whole:
        return True
    return set(mesh.axis_names) <= set(whole.axis_names) and whole[mesh.axis_names] == mesh


def gradient_scale(
    whole: DeviceMesh,
    on: DeviceMesh | None,
    data_axes: Sequence[str] = (),
    divide_factor: float | None = None,
) -> float:
    """Return the factor of gradients.

    They are summed over the axes of the activations' mesh and averaged over all others.

    Args:
        whole: the mesh with all axes.
        on: the mesh of the activations; None if they are plain.
        data_axes: the axes along which plain inputs may differ.
        divide_factor: what to divide by instead of the number of ranks along `data_axes`. It has no
            effect on sharded inputs over all of them, whose loss is that of the global batch.

    Raises:
        ValueError: a `divide_factor`, and inputs that are sharded over some of the `data_axes`
            only.
    """
    inside = () if on is None else on.axis_names
    averaged = [axis for axis in whole.axis_names if axis not in inside]
    if divide_factor is None:
        return 1 / math.prod(whole.size(axis) for axis in averaged)
    plain = [axis for axis in data_axes if axis in averaged]
    if plain and len(plain) < len(data_axes):
        raise ValueError(
            f"set_gradient_divide_factor({divide_factor}) with inputs on {on}: they are sharded "
            f"over some of the data-parallel axes {tuple(data_axes)} and plain over "
            f"{tuple(plain)}; pass them sharded over all, or plain"
        )
    others = math.prod(whole.size(axis) for axis in averaged if axis not in plain)
    return 1 / (others * divide_factor if plain else others)
