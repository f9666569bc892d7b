"""The shapes of all ranks' parts, exchanged in one small all_gather."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from ...mesh.abstract_mesh import AbstractMesh
from ...mesh.comm.agreement import gather_facts
from ...mesh.comm.group import Group
from ...mesh.comm.recording.recorder import CommTag
from ...mesh.device_mesh import DeviceMesh
from ..layout.layout import dtype_name

PartShape = tuple[Any, ...]  # dtype and shape: ("float32", 2, 3)
Coordinate = tuple[int, ...]


def part_shapes(
    group: Group, part: Tensor, *facts: Any, tag: CommTag | None = None
) -> dict[int, PartShape]:
    """part_shapes(group, part) -> {rank: (dtype, *shape) of its part}, on every rank.

    Args:
        facts: of this rank, which precede dtype and shape.

    Communication: a small all_gather.
    """
    return gather_facts(group, (*facts, dtype_name(part.dtype), *part.shape), tag=tag)


def by_coordinate(mesh: DeviceMesh, parts: Mapping[int, Any]) -> dict[Coordinate, Any]:
    """Return what is known by rank, by coordinate on the mesh."""
    return {mesh.coordinate_of(rank): part for rank, part in parts.items()}  # type: ignore[misc]


def parts_text(parts: Mapping[int, PartShape]) -> str:
    """parts_text({0: ("float32", 2, 3)}) -> "rank 0: float32[2, 3]"."""
    return ", ".join(f"rank {rank}: {dtype}{shape}" for rank, (dtype, *shape) in parts.items())


def are_of_one_kind(parts: Mapping[Any, PartShape]) -> bool:
    """Return whether all parts have the same dtype and number of dims."""
    return len({(dtype, len(shape)) for dtype, *shape in parts.values()}) == 1


def joined_parts(
    mesh: AbstractMesh,
    dims: Sequence[tuple[str, ...]],
    shapes: Mapping[Coordinate, Sequence[int]],
) -> tuple[dict[tuple[str, ...], tuple[int, ...]], list[int]]:
    """Return the sizes of the parts along the axes of each dim, and the shape of the tensor.

    Where ranks contradict each other, those of the first coordinate.
    """
    sizes, whole = {}, []
    for dim, axes in enumerate(dims):
        places = [mesh.axis_index(axis) for axis in axes]
        lengths = {
            tuple(coordinate[i] for i in places): shape[dim]
            for coordinate, shape in sorted(shapes.items(), reverse=True)
        }
        if axes:
            sizes[axes] = tuple(n for _, n in sorted(lengths.items()))
        whole.append(sum(lengths.values()))
    return sizes, whole


def lengths_along(mesh: DeviceMesh, axes: tuple[str, ...], length: int) -> tuple[int, ...]:
    """lengths_along(mesh, axes, length) -> the length of every rank, by index along the axes.

    Communication: a small all_gather over the axes.
    """
    lengths = gather_facts(mesh.group(axes), length)
    return tuple(lengths[rank] for rank in sorted(lengths, key=lambda r: mesh.index_along(axes, r)))
