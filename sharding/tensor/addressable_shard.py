"""`AddressableShard`: the part of a tensor that a rank holds, by JAX's name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..layout.layout import dtype_name

Index = tuple[slice, ...]


@dataclass(frozen=True, eq=False)
class AddressableShard:
    """The part of a tensor that a rank holds.

    Attributes:
        index: the slice per dim of the part in the global tensor: `whole[shard.index]` is the part.
        data: the part, in the tensor's own memory, outside the graph. Of a pending tensor, this
            rank's contribution. None for other ranks' parts in `global_shards`.
        device: the device of the part.
        replica_id: this rank's index among the ranks with the same part; the parts with replica_id
            0 make up the tensor. Contributions to a pending tensor are not replicas of each other.
        rank: the rank, in the world.
    """

    index: Index
    data: Any
    device: torch.device
    replica_id: int
    rank: int

    def __repr__(self) -> str:
        data = (
            "not here"
            if self.data is None
            else f"{dtype_name(self.data.dtype)}{list(self.data.shape)} on {self.device}"
        )
        index = ", ".join(f"{s.start}:{s.stop}" for s in self.index)
        return (
            f"AddressableShard([{index}], {data}, replica_id={self.replica_id}, rank={self.rank})"
        )
