"""Bucketing of small units' gradients, as in DDP: fewer and larger all_reduces.

    backward    unit 3: 3 MB, launched    units 2, 1, 0: 9 MB, together    the outermost unit: alone

The first all_reduce of a backward is launched at 1 MiB, so that communication starts early; later
ones at 25 MiB or at the end. The buckets depend on the order and layouts of units only, so they are
the same on all ranks. In the next backward the gradients of a bucket are written next to each other
in one buffer, so that nothing is packed. The outermost unit is reduced alone: it has the first and
the last gradients of backward, so a common buffer would be allocated from the start, when
activations are in memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .....mesh.comm.recording.recorder import CommTag
from ....layout.layout import Layout
from ....layout.mesh_answers import cached_on_mesh
from ....lineage import comm_context, mixed, seed_of
from ....tensor.autograd import leaf_grads
from ....tensor.sharded_tensor import ShardedTensor
from .grad_places import ContiguousGrads
from .grad_reduction import reduction_tag

FIRST_BUCKET_BYTES, BUCKET_BYTES = 1 << 20, 25 << 20  # as in torch's DDP
_REDUCING = seed_of("sum gradients of a unit")
Sources = tuple[ContiguousGrads, ...]


class UnitGrads(NamedTuple):
    """The gradients of a unit, to be reduced in a bucket.

    Attributes:
        unit: the unit's name.
        missing: the paths of trained parameters without a gradient.
        donate: whether the reduction may reuse the gradients' memory.
        source: what allocated their buffer; None if they are not all in one buffer.
        alone: whether to reduce them without those of other units.
    """

    unit: str
    leaves: Sequence[ShardedTensor]
    grads: Sequence[Tensor]
    missing: Sequence[str]
    donate: bool
    source: ContiguousGrads | None
    alone: bool


class GradBucketer:
    """The gradients that wait for their all_reduce in the running backward."""

    def __init__(self) -> None:
        self._waiting: list[UnitGrads] = []
        self._key: Any = None
        self._size, self._threshold = 0, FIRST_BUCKET_BYTES
        self._buckets: dict[ContiguousGrads, Sources] = {}  # of the last backward
        self._buffers: dict[Sources, dict[ContiguousGrads, Tensor]] = {}  # not in use yet

    def add(self, part: UnitGrads) -> None:
        """Reduce these gradients, now or with others. Communication: an all_reduce, or none yet."""
        key = None if part.alone else _kind(part)
        if key != self._key:
            self.launch()
        self._key = key
        if not self._waiting:
            leaf_grads.before_flush(part.leaves[0].mesh.world, self.end)
        self._waiting.append(part)
        self._size += mean_local_bytes(tuple([x._layout for x in part.leaves]))
        if key is None or self._size >= self._threshold:
            self.launch()

    def launch(self) -> None:
        """Reduce the waiting gradients. Communication: an all_reduce per dtype and set of axes."""
        parts, self._waiting, self._size = self._waiting, [], 0
        if not parts:
            return
        self._threshold = BUCKET_BYTES
        sources = tuple([part.source for part in parts if part.source is not None])
        self._buckets.update(dict.fromkeys(sources, sources if len(sources) == len(parts) else ()))
        leaves = [x for part in parts for x in part.leaves]
        tag = CommTag.of(
            "; ".join(
                reduction_tag(part.unit, len(part.leaves), part.missing).text for part in parts
            )
        )
        with comm_context(leaves[0].mesh.world, mixed(_REDUCING, leaves)):
            leaf_grads.start(
                leaves,
                [x for part in parts for x in part.grads],
                tag,
                donate=all(part.donate for part in parts),
            )

    def end(self) -> None:
        """Reduce the rest at the end of backward. Communication: as `launch`."""
        self.launch()
        self.drop()

    def drop(self) -> None:
        """Drop the waiting gradients: backward has ended or failed."""
        self._waiting, self._size, self._threshold, self._key = [], 0, FIRST_BUCKET_BYTES, None
        self._buffers.clear()

    def buffer(self, source: ContiguousGrads) -> Tensor:
        """Allocate a unit's gradients next to those of the units expected in its bucket."""
        bucket = self._buckets.get(source, ())
        if len(bucket) < 2:
            return source.empty(source.length)
        if bucket not in self._buffers:
            whole = source.empty(sum(other.length for other in bucket))
            parts = torch.unsafe_split_with_sizes(whole, [other.length for other in bucket])
            self._buffers[bucket] = dict(zip(bucket, parts, strict=True))
        part = self._buffers[bucket].pop(source, None)
        return source.empty(source.length) if part is None else part


def _kind(part: UnitGrads) -> Any:
    """Return what gradients of one all_reduce have in common; None if these cannot be in one."""
    kinds = {
        (x._layout.mesh, x._layout.replicated_axes, grad.dtype)
        for x, grad in zip(part.leaves, part.grads, strict=True)
    }
    return kinds.pop() if len(kinds) == 1 else None


@cached_on_mesh(lambda layouts: layouts[0].mesh, 256)
def mean_local_bytes(layouts: tuple[Layout, ...]) -> int:
    """Return the bytes of local parts, averaged over ranks: the same number on all ranks."""
    return sum(
        math.prod(x.shape)
        * x.dtype.itemsize
        // math.prod(x.mesh.size(axis) for axis in x.spec.axes)
        for x in layouts
    )
