"""Parts of a state that no rank has any more, from a checkpoint of the same step.

w on (s=3)   rank 0 [0:3]   rank 1 [3:6]   rank 2 [6:8]     rank 1 is lost; so is 3:6
w on (s=2)   rank 0 [0:4]   rank 2 [4:8]
             3:4 read       4:6 read                        from the piece of the checkpoint
                                                            that has 3:6
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from ...kernels.box import Box
from ...mesh.comm.group import Group
from ...mesh.comm.world import World
from ..checkpoint.load import read_boxes, read_contents
from ..checkpoint.storage import folder as folders
from ..checkpoint.storage.folder import Checkpoint
from ..checkpoint.storage.manifest import Stored, check_whole
from ..checkpoint.storage.reading import LoadedParts
from .plan import RecoveryPlan


class RecoveryCheckpoints(NamedTuple):
    """The complete checkpoints in a folder that matter for a recovery.

    Attributes:
        of_step: that of the step which is recovered; None if there is none.
        newest: None if there is none at all.
    """

    of_step: Checkpoint | None
    newest: Checkpoint | None


def find_checkpoints(dir: str | os.PathLike[str], step: int | None) -> RecoveryCheckpoints:
    """Return the complete checkpoint of a step, and the newest one. Communication: none."""
    complete = folders.complete(Path(dir))
    newest = complete[max(complete)] if complete else None
    return RecoveryCheckpoints(None if step is None else complete.get(step), newest)


def stored_parts(group: Group, dir: str | os.PathLike[str], plan: RecoveryPlan) -> Stored:
    """Return the index of the plan's checkpoint, which all ranks have then.

    Raises:
        CheckpointError: it cannot be read, or is damaged; on every rank, the same text.
        ValueError: it does not have a tensor that is lost, of this shape and dtype.

    Communication: an all_gather of small objects and a broadcast.
    """
    checkpoint = plan.checkpoint
    assert checkpoint is not None  # noqa: S101
    stored = read_contents(group, Path(dir), checkpoint.step).parsed()
    for name in plan.lost:
        tensor = plan.tensors[name]
        entry = stored.entries.get(name)
        if entry is None or entry.shape != tensor.shape or entry.dtype != tensor.dtype:
            has = "no such tensor" if entry is None else f"{entry.dtype}{list(entry.shape or ())}"
            raise ValueError(
                f"recover: {name!r}, of which parts are lost, is {tensor.dtype}"
                f"{list(tensor.shape)} in the state, and {checkpoint.path} has {has}; save "
                "checkpoints with the tree that is recovered, under the same names"
            )
        check_whole(stored, name)
    return stored


def read_lost(
    world: World,
    group: Group,
    stored: Stored,
    plan: RecoveryPlan,
    parts: Mapping[str, Tensor],
) -> None:
    """Write what is lost of this rank's new parts, from a checkpoint.

    Args:
        parts: this rank's new parts by name, in the shape of their boxes, contiguous.

    Raises:
        CheckpointError: a file is missing, short or damaged; on every rank, the same text.

    Communication: as `read_boxes`.
    """
    wanted: dict[str, dict[int, list[Box]]] = {}
    memory = LoadedParts({}, {})
    for name in plan.lost:
        tensor = plan.tensors[name]
        boxes = [tensor.lost_boxes(index) for index in range(len(plan.ranks))]
        own = tensor.want[group.rank]
        part = parts[name]
        if not tensor.shape:  # a box of a plan has a dim
            boxes = [[()] * len(of_rank) for of_rank in boxes]
            own = ()
            part = part.reshape(()) if part.numel() else part
        wanted[name] = dict(zip(plan.ranks, boxes, strict=True))
        memory.boxes[name] = own
        memory.tensors[name] = part
    read_boxes(world, group, stored, wanted, memory)
