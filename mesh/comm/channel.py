"""Channel: messages from one rank to another, in order, beside all other communication.

Collectives of a group wait for each other: on an accelerator they share a stream. So each direction
between two ranks has a process group of its own, and a receive that is posted early delays nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from .group import Group
from .group_backend import GroupBackend
from .recording.recorder import CommTag
from .work import Work
from .world import World

_CONNECT = CommTag("connect two ranks")


class Channel:
    """The messages from the rank `source` to the rank `destination`, on one of both.

    Args:
        world: this rank's world.
        source, destination: global ranks.

    Communication: none; see `connect`.
    """

    def __init__(self, world: World, source: int, destination: int) -> None:
        self.source = source
        self.destination = destination
        backend = GroupBackend(communicator=f"messages from {source} to {destination}")
        self._group: Group = world.group((source, destination), backend)
        self._is_source = world.rank == source

    def __repr__(self) -> str:
        return f"Channel({self.source} -> {self.destination})"

    def connect(self, device: torch.device) -> None:
        """Make the connection, which would otherwise make the first message wait for both ranks.

        Communication: one message of a byte; both ranks wait for it.
        """
        byte = torch.zeros(1, dtype=torch.uint8, device=device)
        peer = 1 - self._group.rank
        self._group.permute(
            torch.empty_like(byte),
            byte,
            dst=peer if self._is_source else None,
            src=None if self._is_source else peer,
            tag=_CONNECT,
        )

    def send(self, x: Tensor, tag: CommTag) -> Work:
        """Start to send a contiguous tensor, on the source; see `Group.send`."""
        return self._group.send(x, 1 - self._group.rank, tag=tag)

    def receive(self, out: Tensor, tag: CommTag) -> Work:
        """Post a receive, on the destination; see `Group.receive`."""
        return self._group.receive(out, 1 - self._group.rank, tag=tag)


def connected_channels(
    world: World, pairs: Iterable[tuple[int, int]], device: torch.device
) -> dict[tuple[int, int], Channel]:
    """Return the channels of this rank among (source, destination) pairs, connected.

    Args:
        pairs: the same on all ranks that are in any of them.
        device: of the tensors that are sent.

    Communication: one message of a byte for each channel.
    """
    channels: dict[tuple[int, int], Channel] = {}
    # One order for all ranks: whoever waits, waits for a rank that is in an earlier pair.
    for source, destination in sorted(set(pairs)):
        if world.rank in (source, destination):
            channel = Channel(world, source, destination)
            channel.connect(device)
            channels[source, destination] = channel
    return channels
