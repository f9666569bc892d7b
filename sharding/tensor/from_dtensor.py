"""Convert torch's own `DTensor`s: the local part and the placements stay the same."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from math import prod
from typing import Any

from ...mesh.device_mesh import as_device_mesh
from ..layout.spec import Placement, Shard, as_placement
from .sharded_tensor import ShardedTensor


def is_dtensor(x: Any) -> bool:
    """Return True if `x` is a DTensor of torch's; does not import its module."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


def from_dtensor(x: Any) -> ShardedTensor:
    """Convert a DTensor of torch's, on the same mesh and with the same placements; differentiable.

    A leaf that requires grad gets its gradient through the conversion.

    Raises:
        TypeError: placements that have no counterpart here.
        ValueError: a part of another size than that of torch.chunk, on the ranks that hold one.

    Communication: none. Backward: none for split values; one all_reduce for replicated ones.
    """
    mesh = as_device_mesh(x.device_mesh)
    part: Any = x.to_local()
    # one of torch's collectives may still be in flight
    part = part.wait() if hasattr(part, "wait") else part
    return ShardedTensor.from_local(
        part, mesh, _own_placements(x.placements, mesh.shape), shape=x.shape
    )


def _own_placements(placements: Sequence[Any], sizes: Sequence[int]) -> list[Placement]:
    """Return the placements as ours.

    A _StridedShard splits after the later axes of its dim, which make `split_factor` parts.
    """
    out: list[Placement] = []
    for i, placement in enumerate(placements):
        if type(placement).__name__ != "_StridedShard":
            out.append(as_placement(placement))
            continue
        later = [
            j
            for j in range(i + 1, len(placements))
            if getattr(placements[j], "dim", None) == placement.dim
        ]
        if prod(sizes[j] for j in later) != placement.split_factor:
            raise TypeError(
                f"a DTensor with placements {tuple(placements)}: redistribute it to Shard and "
                "Replicate first"
            )
        out.append(Shard(placement.dim))
    return _in_order(out, placements)


def _in_order(own: list[Placement], placements: Sequence[Any]) -> list[Placement]:
    """Return the placements with the order in which axes split a dim, if one is strided.

    Strided ones come last.
    """
    strided = [type(p).__name__ == "_StridedShard" for p in placements]
    for dim in {
        p.dim for p, late in zip(own, strided, strict=True) if late and isinstance(p, Shard)
    }:
        axes = [i for i, p in enumerate(own) if isinstance(p, Shard) and p.dim == dim]
        for order, i in enumerate(
            sorted(axes, key=lambda i: (strided[i], -i if strided[i] else i))
        ):
            own[i] = Shard(dim, order=order)
    return own
