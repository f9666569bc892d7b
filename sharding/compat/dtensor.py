"""`torch.distributed.tensor` names whose counterparts differ here in name or signature.

docs/from_dtensor.md lists them all.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, Self

from ...mesh.comm.current_world import current_world
from ...mesh.comm.group import CollectiveRecord, Observer
from ..debug.visualize import visualize
from ..layout.spec import Shard
from ..tensor.sharded_tensor import ShardedTensor

DTensor = ShardedTensor


class _StridedShardType(type):
    def __instancecheck__(cls, placement: Any) -> bool:
        return isinstance(placement, Shard) and placement.order not in (None, 0)


class _StridedShard(metaclass=_StridedShardType):
    """For isinstance: a `Shard` whose axis splits a dim after a later axis of the mesh has.

    Raises:
        TypeError: if it is called; `Shard(dim, order=...)` makes such a placement.

    Example:
        >>> isinstance(Shard(0, order=1), _StridedShard), isinstance(Shard(0), _StridedShard)
        (True, False)
    """

    def __init__(self, dim: int, split_factor: int) -> None:
        raise TypeError(
            f"_StridedShard({dim}, {split_factor}): write Shard({dim}, order=n), where n is the "
            f"axis's position among those that split dim {dim}, 0 the most major"
        )


# torch's names of collectives -> ours, where they differ. The last are c10d's, which FSDP2 calls.
_OWN_NAMES = {
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
    "shard_dim_alltoall": "all_to_all",
    "_allgather_base_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "allreduce_": "all_reduce",
    "alltoall_base_": "all_to_all",
    "broadcast_": "broadcast",
}


class CommCounts(Counter[str]):
    """Launches by collective.

    "all_gather", "reduce_scatter", "all_reduce", "all_to_all", "permute", "broadcast" ...

    torch's operators work as keys too: `counts[torch.ops.c10d_functional.all_gather_into_tensor]`,
    and `counts[torch.ops.c10d._allgather_base_]`.
    """

    def __missing__(self, key: Any) -> int:
        name = ".".join(str(key).split(".")[1:2]) or str(key)
        return self.get(_OWN_NAMES.get(name, name), 0)


class CommDebugMode:
    """with CommDebugMode() as mode: count the collectives of this rank inside the block.

    Entering it resets the counts.

    `comm_budget` counts bytes as well, and reports them by line.

    Example:
        >>> with CommDebugMode() as mode:
        ...     y = x.redistribute([Replicate()])
        >>> mode.get_total_counts(), mode.get_comm_counts()
    """

    def __init__(self) -> None:
        self.comm_counts = CommCounts()
        self._observers: list[Observer] = []

    def get_total_counts(self) -> int:
        """Return the number of collectives that were launched."""
        return sum(self.comm_counts.values())

    def get_comm_counts(self) -> CommCounts:
        """Return the number of collectives of each kind."""
        return self.comm_counts

    def _count(self, record: CollectiveRecord) -> None:
        self.comm_counts[record.op] += 1

    def __enter__(self) -> Self:
        self.comm_counts.clear()
        self._observers = current_world().observers
        self._observers.append(self._count)
        return self

    def __exit__(self, *_: object) -> None:
        self._observers.remove(self._count)

    def __repr__(self) -> str:
        return f"CommDebugMode({dict(self.comm_counts)})"


def visualize_sharding(x: ShardedTensor, header: str = "", use_rich: bool = False) -> None:
    """Print which ranks hold which part of a tensor, on its mesh's first rank, unless empty.

    Args:
        x: a tensor of any number of dims; see `visualize`.
        header: a line to print first.
        use_rich: accepted for compatibility with torch; the output is text either way.

    Communication: none.
    """
    if x.numel() and x.mesh.coordinate == (0,) * x.mesh.ndim:
        print(*([header] if header else []), visualize(x), sep="\n")
