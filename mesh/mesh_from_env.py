"""mesh_from_env: the mesh that the program was started with, from the environment."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from . import errors
from .abstract_mesh import parse_mesh
from .device_mesh import DeviceMesh, init_device_mesh
from .launch.environment import MESH


def mesh_from_env(
    axis_names: Sequence[str] | None = None, *, device_type: str | None = None
) -> DeviceMesh:
    """mesh_from_env(("fsdp", "tp")) -> DeviceMesh of the axes and sizes in SHARDMESH_MESH.

    The variable has the axes, major to minor, as in "fsdp=2,tp=4". `shardmesh run program.py --mesh
    fsdp=2,tp=4` sets it; under other launchers, set it in every process. Nothing else reads it.

    Args:
        axis_names: the axes that the program uses. Those that the variable lacks have size 1, so
            that `python program.py`, without the variable, runs on a mesh of one rank. By default
            the axes of the variable.
        device_type: "cpu", "cuda", ...; by default "cuda" if it is available.

    Raises: LaunchEnvironmentError when the variable is no mesh, or is not set and no axes are
        passed; MeshError when it has an axis that the program does not use, or another number of
        ranks than the world; else as `init_device_mesh`.

    Communication: as `init_device_mesh`.

        mesh = mesh_from_env(("fsdp", "tp"))
    """
    text = os.environ.get(MESH, "")
    sizes: dict[str, int] = {}
    if text:
        try:
            sizes = dict(parse_mesh(text).shape)
        except ValueError as error:
            raise errors.LaunchEnvironmentError(f"{MESH}: {error}.") from None
    elif axis_names is None:
        raise errors.LaunchEnvironmentError(
            f"mesh_from_env(): {MESH} is not set. Start the program with shardmesh run "
            "program.py --mesh dp=4, or pass the names of its axes, for one process."
        )
    names = tuple(sizes) if axis_names is None else tuple(axis_names)
    unknown = [name for name in sizes if name not in names]
    if unknown:
        raise errors.MeshError(
            f"{MESH}={text}: the program has no axis {', '.join(unknown)}; use {', '.join(names)}."
        )
    sizes |= {name: 1 for name in names if name not in sizes}
    kind = device_type or ("cuda" if torch.cuda.is_available() else "cpu")
    return init_device_mesh(kind, tuple(sizes.values()), axis_names=tuple(sizes))
