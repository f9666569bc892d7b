"""What only ranks hold that leave, handed over to those that stay, before they go.

    FSDP over 3 ranks    rank 0 [0:2]    rank 1 [2:4]    rank 2 [4:6], which leaves
    after                rank 0 [0:2]    rank 1 [2:4]
                         and a copy of 4:6

The ranks that stay recover from it as from the copies of `Redundancy`: on the next mesh each has
its parts of 4:6.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...kernels.box import Box, box_shape, box_size
from ...mesh.comm.recording.recorder import CommTag
from ...mesh.device_mesh import DeviceMesh
from ..checkpoint.tree import leaves, map_leaves, name_of
from ..layout.layout import Layout
from ..redistribute.plan.cross_mesh import box_on
from ..tensor.sharded_tensor import ShardedTensor
from .redundancy import Placement, StateCopy, aligned, extent, reduced, view

_TAG = CommTag("elastic: parts of ranks that leave")


def place_parts(
    layouts: Mapping[str, Layout], leaving: Collection[int], ranks: Sequence[int]
) -> Placement:
    """Return which rank that leaves sends which boxes to which one that stays.

    These are the boxes that no rank has that stays. Each goes from the one of its ranks that sends
    the fewest bytes so far to the one that receives the fewest, which need not be on the tensor's
    own mesh: all of that may leave.

    Args:
        layouts: of the tensors, by name.
        leaving: ranks of their world.
        ranks: all ranks that hold state, those of the tensors' meshes among them.
    """
    placement = Placement({}, {})
    load = dict.fromkeys(ranks, 0)
    stayers = [rank for rank in ranks if rank not in leaving]
    if not stayers:
        return placement
    for name, layout in layouts.items():
        holders: dict[Box, list[int]] = {}
        for rank in layout.mesh.ranks.ravel().tolist():
            holders.setdefault(box_on(layout, rank), []).append(rank)
        for box, its_ranks in holders.items():
            if not box_size(box) or not set(leaving).issuperset(its_ranks):
                continue
            sender = min(its_ranks, key=load.__getitem__)
            receiver = min(stayers, key=load.__getitem__)
            size = box_size(box) * layout.dtype.itemsize
            load[sender] += size
            load[receiver] += size
            placement.sent.setdefault((sender, receiver), []).append((name, box, size))
            placement.holders.setdefault(name, {})[box] = (receiver,)
    return placement


def hand_over(tree: Any, step: int, mesh: DeviceMesh, leaving: Collection[int]) -> StateCopy:
    """hand_over(tree, step, mesh, leaving) -> the version with copies of what leaves.

    Args:
        tree: of leaves; on every rank of the mesh.
        step: its version.
        mesh: of all ranks that hold state.
        leaving: some of them.

    Communication: the reduction of pending values; one all_to_all, none if nothing has to move.
    """
    tree = map_leaves(tree, lambda _, leaf: reduced(leaf))
    tensors = {
        name_of(path): leaf for path, leaf in leaves(tree) if isinstance(leaf, ShardedTensor)
    }
    layouts = {name: leaf._layout for name, leaf in tensors.items()}
    placement = place_parts(layouts, leaving, mesh.ranks.ravel().tolist())
    if not placement.sent:
        return StateCopy(step, tree, {}, {}, 0)
    group = mesh.group(mesh.axis_names)
    rank = mesh.world.rank
    in_splits = [extent(placement, rank, other) for other in group.ranks]
    out_splits = [extent(placement, other, rank) for other in group.ranks]
    sent = torch.empty(sum(in_splits), dtype=torch.uint8, device=mesh.device)
    start = 0
    for receiver in group.ranks:
        for name, box, size in placement.sent.get((rank, receiver), ()):
            part = tensors[name]._local.detach()
            view(sent, start, part.dtype, box_shape(box)).copy_(part.reshape(box_shape(box)))
            start += aligned(size)
    arrived = torch.empty(sum(out_splits), dtype=torch.uint8, device=mesh.device)
    group.all_to_all(arrived, sent, out_splits, in_splits, tag=_TAG)
    received: dict[tuple[str, Box], Tensor] = {}
    start = 0
    for sender in group.ranks:
        for name, box, size in placement.sent.get((sender, rank), ()):
            received[name, box] = view(arrived, start, layouts[name].dtype, box_shape(box))
            start += aligned(size)
    return StateCopy(step, tree, placement.holders, received, arrived.nbytes)
