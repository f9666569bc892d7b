"""Record messages between two ranks by torch: `dist.send`, `dist.recv`, `batch_isend_irecv`.

Torch delivers the messages of one sender, receiver and tag in order, so each such channel is
counted separately: number 3 of the sender is number 3 of the receiver. A receiver that takes
messages from any rank breaks that, and so publishes that it does; nothing is compared with it.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

from ...comm.comm_context import NO_CONTEXT
from ...comm.recording.recorder import CommTag, Recorder, _CachedCall
from ...comm.recording.trace_buffer import Header
from ..diagnosis import verdict_text
from ..diagnosis.members import member, read_members
from ..monitor import Monitor
from ..recording.job_directory import is_near
from .recorder import _SOON, TorchGroup, TorchRecorder, name_of

_MOST_CHANNELS = 128  # rows for channels in a trace buffer, which the library's groups need, too
# the fingerprint of all messages: the receiver may pass a larger tensor, of another dtype
_ALIKE = 3


class MessageRecorder(TorchRecorder):
    """One rank's end of a channel.

    Args:
        group: what the group is called in messages.

    Attributes:
        src, dst: global ranks.
    """

    __slots__ = ("dst", "src")
    is_channel = True

    def __init__(
        self, handle: Any, group: str, src: int, dst: int, tag: int, monitor: Monitor
    ) -> None:
        channel = TorchGroup(
            f"torch {name_of(handle)} {src} {dst} {tag}",
            f"messages from rank {src} to rank {dst} in {group}",
            tuple(sorted((src, dst))),
            monitor,
            NO_CONTEXT,  # a sender may be steps ahead
        )
        super().__init__(handle, channel, monitor)
        self.src, self.dst = src, dst

    @property
    def peer(self) -> int:
        return self.src if self.group.global_rank == self.dst else self.dst

    def is_open(self, sequence: int) -> bool:
        return super().is_open(sequence) and not self._is_unmatched()

    def find_neighbours(self, directory: Any) -> None:
        Recorder.find_neighbours(self, directory)

    def wait(
        self, sequence: int, work: Any, timeout: timedelta | None, plainly: Callable[..., Any]
    ) -> Any:
        """Wait as in a collective.

        Gloo can only wait for messages without interruption, so the other rank must have called
        first.
        """
        monitor = self.monitor
        if monitor is None or not self.on_cpu or self.row is None:
            return plainly(work) if timeout is None else plainly(work, timeout)
        limit = self.timeout_ns if timeout is None else timeout.total_seconds() * 1e9
        if not monitor.waiting.wait_until(
            self, sequence, lambda: self._has_come(monitor, sequence), limit
        ):
            return plainly(work, _SOON)
        self.compare(sequence)
        if timeout is not None:
            return plainly(work, timeout)
        monitor.waiting.wait_to_the_end(self, sequence, work)
        return True

    def _has_come(self, monitor: Monitor, sequence: int) -> bool:
        peer = member(monitor.directory, self.key, self.peer, sequence)
        return (
            peer.came is not False
            or self._is_unmatched()
            or (peer.buffer is not None and not is_near(peer.buffer))
        )

    def _is_unmatched(self) -> bool:
        """Return whether sender and receiver may number messages differently."""
        buffers = (
            []
            if self.monitor is None
            else [self.monitor.directory.buffer_of(rank) for rank in (self.src, self.dst)]
        )
        return any(buffer is not None and buffer.words[Header.UNMATCHED] for buffer in buffers)

    def compare(self, sequence: int) -> None:
        """Compare a message, if both ranks have called.

        Raises: WatchError where more is sent than fits, which would abort gloo.
        """
        monitor = self.monitor
        if monitor is None or self._is_unmatched():
            return
        members = read_members(monitor.directory, self, sequence)
        said = {m.rank: m.record for m in members if m.came}
        sent, expected = said.get(self.src), said.get(self.dst)
        if sent is not None and expected is not None and sent.sent > expected.received:
            raise monitor.failed(verdict_text.too_large(self, sequence, members))

    def _new_call(
        self, op: str, how: str, dtype: Any, size: int, tag: CommTag | None
    ) -> _CachedCall:
        call = super()._new_call(op, how, dtype, size, tag)
        call.fingerprint = _ALIKE
        return call

    def _find_row(self) -> int | None:
        words = self.buffer.words
        number = None
        if words[Header.CHANNELS] < _MOST_CHANNELS:
            words[Header.CHANNELS] += 1
            number = super()._find_row()
        if number is None:
            words[Header.UNMATCHED] = 1
        return number
