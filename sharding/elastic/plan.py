"""Where each rank gets its new parts from: pure functions of boxes, the same on every rank.

w [0:4]   rank 0 wants 0:3     it has 0:2, rank 1 has 2:4            transfer 2:3 from rank 1
          rank 1 wants 3:4     it has that
w [4:8]   nobody has it        rank 3 has a copy                     transfer from the copy
                               nobody has a copy                     lost: a checkpoint has it
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels.box import Box, box_size, full_box, intersect
from ...mesh.text import ranks_text, table_lines
from ..checkpoint.storage.folder import Checkpoint
from ..layout.layout import Layout
from ..redistribute.plan.cross_mesh import box_on, nodes_of
from ..redistribute.plan.routes import Transfer, direct
from ..tensor.sharded_tensor import ShardedTensor

_SHOWN = 8  # tensors and boxes in a text


@dataclass(frozen=True, eq=False)
class Source:
    """One box of a tensor on each rank, and what is sent of it.

    Ranks are indices into `RecoveryPlan.alive`.

    Attributes:
        have: the box of each rank; an empty one for none.
        transfers: which rank sends which part of its box to which.
    """

    have: tuple[Box, ...]
    transfers: tuple[Transfer, ...]


@dataclass(frozen=True, eq=False)
class TensorRecovery:
    """How one tensor gets to its new layout. Ranks are indices into `RecoveryPlan.alive`.

    Attributes:
        shape, dtype: of the whole tensor.
        parts: what ranks have of the tensor, and send.
        copies: the same of copies of parts that are lost; several where a rank has several.
        want: the box of each rank after.
        lost: boxes that no rank has, and no copy.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: Source
    copies: tuple[Source, ...]
    want: tuple[Box, ...]
    lost: tuple[Box, ...]

    def lost_boxes(self, index: int) -> list[Box]:
        """Return what a rank wants of the boxes that are lost."""
        common = [intersect(self.want[index], box) for box in self.lost]
        return [box for box in common if box is not None]


@dataclass(frozen=True, eq=False)
class RecoveryPlan:
    """Where each rank gets its new parts from; `print(plan)` shows it.

    Attributes:
        alive: the ranks that are left, by their numbers in the old world.
        ranks: the same ranks by their numbers in the current world.
        missing: ranks of the old meshes that are not left.
        tensors: by name.
        checkpoint: has the boxes that are lost; None if none was found.
        newest: the newest checkpoint in the folder, of whatever step; None if there is none.
    """

    alive: tuple[int, ...]
    ranks: tuple[int, ...]
    missing: tuple[int, ...]
    tensors: dict[str, TensorRecovery]
    checkpoint: Checkpoint | None = None
    newest: Checkpoint | None = None

    @property
    def lost(self) -> dict[str, tuple[Box, ...]]:
        """The boxes that no rank has, by name, of the tensors that have any."""
        return {name: tensor.lost for name, tensor in self.tensors.items() if tensor.lost}

    def bytes_sent(self) -> dict[tuple[int, int], int]:
        """Return how many bytes a rank sends to another, by (sender, receiver), in old numbers."""
        sent: dict[tuple[int, int], int] = {}
        for tensor in self.tensors.values():
            for source in (tensor.parts, *tensor.copies):
                for sender, receiver, box in source.transfers:
                    pair = self.alive[sender], self.alive[receiver]
                    sent[pair] = sent.get(pair, 0) + box_size(box) * tensor.dtype.itemsize
        return sent

    def bytes_read(self) -> dict[int, int]:
        """Return how many bytes of lost boxes ranks take from the checkpoint, by old number.

        Ranks that take none are not in it.
        """
        read: dict[int, int] = {}
        if self.checkpoint is None:
            return read
        for tensor in self.tensors.values():
            for index, rank in enumerate(self.alive):
                count = sum(map(box_size, tensor.lost_boxes(index))) * tensor.dtype.itemsize
                if count:
                    read[rank] = read.get(rank, 0) + count
        return read

    def __str__(self) -> str:
        sent, read = self.bytes_sent(), self.bytes_read()
        after = [0] * len(self.alive)
        for tensor in self.tensors.values():
            for index, box in enumerate(tensor.want):
                after[index] += box_size(box) * tensor.dtype.itemsize
        rows = [("rank", "is now", "bytes", "receives", "sends", "from")]
        for index, rank in enumerate(self.alive):
            sources = {pair[0]: count for pair, count in sent.items() if pair[1] == rank}
            sends = sum(count for pair, count in sent.items() if pair[0] == rank)
            shown = [f"{source}: {count:,}" for source, count in sorted(sources.items())]
            if rank in read:
                shown.append(f"checkpoint: {read[rank]:,}")
            received = sum(sources.values())
            numbers = (f"{after[index]:,}", f"{received:,}", f"{sends:,}")
            rows.append((str(rank), str(self.ranks[index]), *numbers, ", ".join(shown)))
        missing = f"; {ranks_text(self.missing)} lost" if self.missing else ""
        head = f"recovery of {len(self.tensors)} tensors from {len(self.alive)} ranks{missing}"
        return "\n".join([head, *table_lines(rows, right=range(5)), *lost_lines(self)])


def lost_lines(plan: RecoveryPlan) -> list[str]:
    """Return what no rank has, a line for each tensor."""
    where = "lost" if plan.checkpoint is None else f"from step {plan.checkpoint.step}"
    lines: list[str] = []
    for name, boxes in list(plan.lost.items())[:_SHOWN]:
        text = ", ".join(_box_text(box) for box in boxes[:_SHOWN])
        more = f" and {len(boxes) - _SHOWN} more parts" if len(boxes) > _SHOWN else ""
        lines.append(f"{where}: {name}[{text}]{more}")
    if len(plan.lost) > _SHOWN:
        lines.append(f"{where}: parts of {len(plan.lost) - _SHOWN} more tensors")
    return lines


def _box_text(box: Box) -> str:
    intervals = ", ".join(f"{start}:{stop}" for start, stop in box)
    return f"({intervals})" if len(box) > 1 else intervals


def refuse_pending(what: str, name: str, leaf: ShardedTensor) -> None:
    """Raise a ValueError for a tensor that no set of ranks holds without the others."""
    if leaf.spec.unreduced:
        raise ValueError(
            f"{what}: {name!r} is {leaf._layout}, which is pending: ranks that are lost held a "
            "share of each element; reduce it before it becomes state"
        )


# -- one tensor ------------------------------------------------------------------------------------


def plan_tensor(
    leaf: Tensor,
    want: Layout | None,
    alive: Sequence[int],
    ranks: Sequence[int],
    load: list[int],
    copies: Mapping[Box, Sequence[int]],
) -> TensorRecovery:
    """Return how a tensor gets from the layout of `leaf` on the ranks that are left to `want`.

    Args:
        want: the layout after; None: whole on every rank.
        alive, ranks: as in `RecoveryPlan`.
        load: how many bytes each rank sends already; those of this tensor are added.
        copies: which ranks have a copy of which box of the old layout, by old numbers.
    """
    whole = full_box(leaf.shape) or ((0, 1),)
    nodes = [0] * len(alive)
    have, held_before = [whole] * len(alive), {whole}
    if isinstance(leaf, ShardedTensor):
        layout = leaf._layout
        have = [box_on(layout, rank) for rank in alive]
        held_before = {box_on(layout, rank) for rank in layout.mesh.ranks.ravel().tolist()}
        nodes = nodes_of(layout, alive, layout.mesh.topology)
    wanted = [whole] * len(alive)
    if want is not None:
        wanted = [box_on(want, rank) for rank in ranks]
    itemsize = leaf.dtype.itemsize
    transfers = direct(have, wanted, nodes, load, itemsize)
    missing = sorted(box for box in held_before - set(have) if box_size(box))
    copied = _copied_boxes(missing, copies, alive)
    sources: list[Source] = []
    for boxes in _one_for_each_rank(copied, whole, len(alive)):
        sent = direct(boxes, wanted, nodes, load, itemsize)
        sources.append(Source(tuple(boxes), tuple(sent)))
    lost = tuple(box for box in missing if box not in copied)
    parts = Source(tuple(have), tuple(transfers))
    shape = tuple(leaf.shape)
    return TensorRecovery(shape, leaf.dtype, parts, tuple(sources), tuple(wanted), lost)


def _copied_boxes(
    missing: Sequence[Box], copies: Mapping[Box, Sequence[int]], alive: Sequence[int]
) -> dict[Box, int]:
    """Return the boxes of which a rank that is left has a copy, with the index of that rank."""
    copied: dict[Box, int] = {}
    for box in missing:
        holders = [alive.index(rank) for rank in copies.get(box, ()) if rank in alive]
        if holders:
            copied[box] = holders[0]
    return copied


def _one_for_each_rank(copied: Mapping[Box, int], whole: Box, count: int) -> list[list[Box]]:
    """Return lists with at most one box for each rank, which together have all boxes."""
    nothing = ((0, 0),) * len(whole)
    lists: list[list[Box]] = []
    for box, index in copied.items():
        boxes = next((boxes for boxes in lists if boxes[index] == nothing), None)
        if boxes is None:
            boxes = [nothing] * count
            lists.append(boxes)
        boxes[index] = box
    return lists
