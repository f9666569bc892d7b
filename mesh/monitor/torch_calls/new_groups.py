"""Record where the program makes torch's groups: `dist.new_group`, torch's `init_device_mesh`.

Gloo connects the ranks of a new group inside of C++, where nothing can be checked or interrupted.
So a rank records that it makes a group, waits until all ranks of it have come, and calls torch
then. Ranks that are not in the group are not waited for: torch wants them to call as well, and goes
on without them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ...settings import settings
from ..monitor import Monitor
from .recorder import TorchGroup, TorchRecorder

_settings = settings()


class CreationRecorder(TorchRecorder):
    """What one rank records of the groups of torch that it makes of the same ranks."""

    __slots__ = ()

    def __init__(self, ranks: tuple[int, ...], monitor: Monitor) -> None:
        group = TorchGroup(
            f"torch new_group {ranks}",
            f"torch's groups of {len(ranks)} ranks",
            ranks,
            monitor,
            monitor.torch_context,
        )
        super().__init__(dist.group.WORLD, group, monitor)


class CreationRecorders:
    """The recorders of one monitor, by the ranks of the groups."""

    def __init__(self, monitor: Monitor) -> None:
        self._monitor = monitor
        self._by_ranks: dict[tuple[int, ...], CreationRecorder] = {}

    def of(self, ranks: Sequence[int] | None) -> CreationRecorder | None:
        """Return the recorder for a new group; None if making it waits for nobody, or fails."""
        directory = self._monitor.directory
        members = tuple(range(directory.size)) if ranks is None else tuple(sorted(ranks))
        if (
            directory.rank not in members
            or len(members) < 2
            or not 0 <= members[0] <= members[-1] < directory.size
        ):
            return None
        if members not in self._by_ranks:
            recorder = self._by_ranks[members] = CreationRecorder(members, self._monitor)
            self._monitor.recorders.append(recorder)
        return self._by_ranks[members]


def waiting_for_members(
    original: Callable[..., Any], recorders: CreationRecorders
) -> Callable[..., Any]:
    """Return torch's function that makes a group, as one that waits for all members to call it.

    Raises: WatchError where one of them never will.
    """

    def new_group_with_tag(ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
        # also the library's own groups, which wait by themselves
        is_local = kwargs.get("use_local_synchronization", False)
        is_lazy = os.environ.get("TORCH_GLOO_LAZY_INIT") == "1"
        recorder = None if is_local or is_lazy or _settings.mode == "off" else recorders.of(ranks)
        if recorder is None or not recorder.on_cpu:
            return original(ranks, *args, **kwargs)
        sequence = recorder.called
        number = recorder.enter("new_group", "", "", -1, 0, 0)
        recorder.begin(sequence)
        try:
            recorder.wait_for_all(sequence, timedelta(microseconds=recorder.timeout_ns / 1000))
            return original(ranks, *args, **kwargs)
        finally:
            recorder.end(sequence, number)

    return new_group_with_tag
