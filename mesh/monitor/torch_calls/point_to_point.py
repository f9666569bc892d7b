"""Messages between two ranks that the program sends by torch itself: `dist.send(x, 1)`, `dist.recv(x, 0)`, `batch_isend_irecv`.

Torch delivers the messages of one sender, receiver and tag in their order, so each such channel counts for itself: number 3 of the
sender is number 3 of the receiver. A receiver that takes messages from any rank breaks that, and so it shows that it does; nothing is
compared with it.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from ..diagnosis import diagnose, verdict_text
from ..recording.job_directory import is_near
from ..recording.recorder import CommTag, Seat, _Call
from ..recording.trace_buffer import H, stable_hash
from .recorder import _SOON, TorchSeat

if TYPE_CHECKING:
    from ..monitor import Watch

_MOST_CHANNELS = 128  # so many have a place in the page, where the library's groups need some, too
_ALIKE = 3  # the fingerprint of all messages: a receiver may give a larger buffer, of another dtype


class MessageSeat(TorchSeat):
    """One rank's end of a channel.

    Attributes:
        src, dst: global ranks.
    """

    __slots__ = ("dst", "src")
    is_channel = True

    def __init__(self, handle: Any, label: str, src: int, dst: int, tag: int, watch: Watch) -> None:
        super().__init__(handle, tuple(sorted((src, dst))), watch)
        self.src, self.dst = src, dst
        self.key = stable_hash(f"{self.key} {src} {dst} {tag}")
        self.label = f"messages from rank {src} to rank {dst} in {label}"

    @property
    def peer(self) -> int:
        return self.src if self.world.rank == self.dst else self.dst

    def is_open(self, sequence: int) -> bool:
        return super().is_open(sequence) and not self._is_unmatched()

    def meet_neighbours(self, board: Any) -> None:
        Seat.meet_neighbours(self, board)

    def wait(self, sequence: int, work: Any, timeout: timedelta | None, plainly: Callable[..., Any]) -> Any:
        """As in a collective, but gloo can only wait for messages without looking up, so first the other rank must have come."""
        watch = self.watch
        if watch is None or not self.on_cpu or self.row is None:
            return plainly(work) if timeout is None else plainly(work, timeout)
        limit = self.timeout_ns if timeout is None else timeout.total_seconds() * 1e9
        if not watch.wait_until(self, sequence, lambda: self._has_come(watch, sequence), limit):
            return plainly(work, _SOON)
        self.compare(sequence)
        if timeout is not None:
            return plainly(work, timeout)
        watch.wait_to_the_end(self, sequence, work)
        return True

    def _has_come(self, watch: Watch, sequence: int) -> bool:
        found = diagnose.member(watch.board, self.key, self.peer, sequence)
        return found.came is not False or self._is_unmatched() or (found.page is not None and not is_near(found.page))

    def _is_unmatched(self) -> bool:
        """Whether the numbers of sender and receiver need not be the same."""
        pages = [] if self.watch is None else [self.watch.board.of(rank) for rank in (self.src, self.dst)]
        return any(page is not None and page.words[H.UNMATCHED] for page in pages)

    def compare(self, sequence: int) -> None:
        """As far as both have come. Raises: WatchError where more is sent than there is room for, of which gloo dies."""
        watch = self.watch
        if watch is None or self._is_unmatched():
            return
        found = diagnose.members(watch, self, sequence)
        said = {m.rank: m.record for m in found if m.came}
        sent, expected = said.get(self.src), said.get(self.dst)
        if sent is not None and expected is not None and sent.sent > expected.received:
            raise watch.failed(verdict_text.too_large(self, sequence, found))

    def _new_call(self, op: str, how: str, dtype: Any, size: int, note: CommTag | None) -> _Call:
        call = super()._new_call(op, how, dtype, size, note)
        call.fingerprint = _ALIKE
        return call

    def _find_row(self) -> int | None:
        words = self.page.words
        number = None
        if words[H.CHANNELS] < _MOST_CHANNELS:
            words[H.CHANNELS] += 1
            number = super()._find_row()
        if number is None:
            words[H.UNMATCHED] = 1
        return number
