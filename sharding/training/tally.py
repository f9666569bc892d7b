"""Reduction of per-tensor numbers, such as norms, over all ranks and layouts in one collective.

    on (dp=2, tp=2)        which ranks count it
    w  P("dp", "tp")       every rank, its own part
    b  P("dp")             one of the two ranks with the same part
    g  P()                 one of the four ranks, another one for the next such tensor

Each element counts once, so the sum over ranks is that over tensors. Axes that split no tensor are
not reduced over: along those, every rank has all parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...mesh.abstract_mesh import join_names
from ...mesh.comm.group import Group
from ...mesh.comm.recording.recorder import CommTag
from ...mesh.device_mesh import DeviceMesh
from ..layout.bounded_cache import LayoutCache
from ..layout.layout import Layout
from ..lineage import comm_context, mixed, seed_of
from ..tensor.sharded_tensor import ShardedTensor

_TALLY = seed_of("tally")


@dataclass(frozen=True, slots=True)
class Tally:
    """What this rank contributes, and with whom it reduces.

    Attributes:
        group: the ranks that together have all parts; None if this rank has all, or nothing.
        counted: the indices of the tensors whose parts this rank counts.
        device: the device of the sums.
        known: whether this rank gets the result; False on a rank outside all meshes.
    """

    group: Group | None
    counted: tuple[int, ...]
    device: torch.device
    known: bool = True

    def reduce(self, values: Tensor, op: str, tensors: Sequence[Tensor]) -> Tensor:
        """Reduce values over the ranks, in place; NaN on a rank outside all meshes.

        Communication: at most one all_reduce.
        """
        if self.group is None:
            return values if self.known else values.fill_(torch.nan)
        world = self.group.world
        sharded = [x for x in tensors if isinstance(x, ShardedTensor) and not _is_slice(x.mesh)]
        with comm_context(world, mixed(_TALLY, sharded)):
            self.group.all_reduce(values, op, tag=CommTag.of(f"{op} over {len(tensors)} tensors"))
        return values


_tallies: LayoutCache[tuple[Layout | None, ...], Tally] = LayoutCache()


def tally_of(tensors: Sequence[Tensor]) -> Tally:
    """Return the tally of these tensors; plain ones count as replicated. Communication: none."""
    layouts = tuple([x._layout if isinstance(x, ShardedTensor) else None for x in tensors])
    first = next((layout for layout in layouts if layout is not None), None)
    if first is None:
        return Tally(
            None, tuple(range(len(tensors))), tensors[0].device if tensors else torch.device("cpu")
        )
    return _tallies.get(first, layouts) or _tallies.keep(first, layouts, _tally(layouts, first))


def _tally(layouts: Sequence[Layout | None], first: Layout) -> Tally:
    splits = [None if layout is None else _root_and_axes(layout) for layout in layouts]
    roots = list(dict.fromkeys(root for root, _ in filter(None, splits)))
    if len(roots) == 1:
        return _on_one(roots[0], splits)
    ranks: Any = sorted({rank for root in roots for rank in root.ranks.flat})
    world, device = roots[0].world, roots[0].device
    if world.rank not in ranks:
        return Tally(None, (), device, known=False)
    # the first rank of this mesh counts plain tensors
    home = next(root for root in roots if ranks[0] in root.ranks)
    roots_and_axes = [(home, ()) if split is None else split for split in splits]
    counted = [
        i
        for i, (root, split) in enumerate(roots_and_axes)
        if _counts(root, split, root.axis_names, i * (splits[i] is not None))
    ]
    return Tally(world.group(ranks), tuple(counted), device)


def _on_one(mesh: DeviceMesh, splits: Sequence[tuple[DeviceMesh, tuple[str, ...]] | None]) -> Tally:
    """Return the tally of tensors that are all on one mesh or slices of it."""
    if mesh.coordinate is None:
        return Tally(None, (), mesh.device, known=False)
    axes = [() if split is None else split[1] for split in splits]
    along = tuple(axis for axis in mesh.axis_names if any(axis in split for split in axes))
    if not along:
        return Tally(None, tuple(range(len(axes))), mesh.device)
    counted = [i for i, split in enumerate(axes) if _counts(mesh, split, along, i)]
    return Tally(mesh.group(along), tuple(counted), mesh.device)


def _counts(mesh: DeviceMesh, split: Sequence[str], along: Sequence[str], turn: int) -> bool:
    """Return whether this rank is the replica along these axes that counts the tensor."""
    if mesh.coordinate is None:
        return False
    place, copies = 0, 1
    for axis in along:
        if axis not in split:
            place = place * mesh.size(axis) + mesh.coordinate[mesh.axis_index(axis)]
            copies *= mesh.size(axis)
    return place == turn % copies


def _is_slice(mesh: DeviceMesh) -> bool:
    """Return whether this is a slice of a mesh, on which lineages differ between ranks."""
    return mesh._origin is not None


def _root_and_axes(layout: Layout) -> tuple[DeviceMesh, tuple[str, ...]]:
    """Return the root of the tensor's mesh, and its longer axes that split the tensor."""
    mesh: Any = layout.mesh
    axes = tuple(axis for axis in layout.spec.axes if mesh.size(axis) > 1)
    while mesh._origin is not None:
        mesh, made_of = mesh._origin
        axes = join_names(made_of[axis] for axis in axes)
    return mesh, axes
