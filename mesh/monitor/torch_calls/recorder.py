"""A seat in one of torch's process groups, for the collectives that the program calls there itself.

Nothing waits here before torch has started what was called, not even the first call of a group: programs may start something asynchronous
in one group while another group's calls are still to come, and rank 0 may have scattered long before the others ask for their parts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from ..diagnosis import diagnose, verdict_text
from ..diagnosis.history import TORCHS_DEFAULT
from ..recording.recorder import SLOTS, Seat
from ..recording.trace_buffer import stable_hash
from ..settings import monotonic_ns

if TYPE_CHECKING:
    from ..monitor import Watch
    from ..recording.job_directory import Board
    from ..verdict import Verdict

_CPU = torch.device("cpu")
_SOON = timedelta(seconds=1)  # for torch to say by itself what its time has run out for
_LAST = SLOTS - 1
_NONE: tuple[int, Callable[[], Any] | None, Any, int] = (-1, None, None, 0)
_NOT_COME = "_shardmesh_not_come"  # an attribute of errors: the seat, and the number of the call


class TorchSeat(Seat):
    """One rank's seat in one of torch's groups.

    Attributes:
        size: of the group.
        label: what the group is called in messages.
        on_cpu: whether its calls can be waited for in slices: gloo's, which the host waits for.
        timeout_ns: torch's own, of the group.
        under_way: (sequence number; torch's work, by a reference, or None while it is waited for; seat; number of the record) of the
            last calls.
    """

    __slots__ = ("label", "on_cpu", "size", "timeout_ns", "under_way")
    assembles = False

    def __init__(self, handle: Any, ranks: tuple[int, ...], watch: Watch) -> None:
        super().__init__(_stand_in(ranks, watch), watch.page, watch)
        self.size = len(ranks)
        name = distributed_c10d._world.pg_names.get(handle, "")
        self.key = stable_hash(f"torch {name} {ranks}")
        self.label = TORCHS_DEFAULT if handle is dist.group.WORLD else f"torch's group {name}"
        self.on_cpu = all(handle._get_backend(device).name() == "gloo" for device in handle._device_types)
        self.timeout_ns = _timeout_ns(handle)
        self.under_way = [_NONE] * SLOTS

    # -- a call --------------------------------------------------------------------------------------------------------

    def begin(self, sequence: int) -> None:
        """The call is under way until `end`, whatever its work says."""
        self.under_way[sequence & _LAST] = sequence, None, self, 0

    def end(self, sequence: int, number: int) -> None:
        self.under_way[sequence & _LAST] = _NONE
        self.leave(number)

    def is_open(self, sequence: int) -> bool:
        """Whether this rank's part in the call is not over: one that has broadcast need not wait for those who receive."""
        latest, work, _, number = self.under_way[sequence & _LAST]
        if latest != sequence:
            return False
        if work is None:
            return True
        found = work()
        if found is not None and not found.is_completed():
            return True
        self.end(sequence, number)
        return False

    def wait(self, sequence: int, work: Any, timeout: timedelta | None, plainly: Callable[..., Any]) -> Any:
        """Waits for torch's work, looking up now and then.

        Args:
            plainly: torch's own way to wait.

        Raises: WatchError for what it sees; torch's error where nothing explains it.
        """
        watch = self.watch
        if watch is None or not self.on_cpu:
            return plainly(work) if timeout is None else plainly(work, timeout)
        if timeout is not None:
            watch.wait_until(self, sequence, work.is_completed, timeout.total_seconds() * 1e9)
            return plainly(work, _SOON)
        watch.wait(self, sequence, work)
        return True

    def wait_for_all(self, sequence: int, timeout: timedelta) -> bool:
        """Waits for all ranks to come to the call; whether they have, in this time. Raises: WatchError."""
        watch = self.watch
        return watch is None or watch.wait_until(
            self, sequence, lambda: diagnose.have_all_come(diagnose.members(watch, self, sequence)), timeout.total_seconds() * 1e9
        )

    def explain(self, sequence: int, error: RuntimeError) -> None:
        """Raises: WatchError where another rank is the reason for an error of torch's."""
        if self.watch is not None and self.on_cpu:
            self.mark(error, sequence)
            self.watch.explain(self, sequence, error)

    def mark(self, error: BaseException, sequence: int) -> None:
        """Notes on an error of torch's whether others had not come, as where torch's own time has run out."""
        if self.watch is not None and any(m.came is False for m in diagnose.members(self.watch, self, sequence)):
            error.__dict__[_NOT_COME] = self, sequence

    # -- the row -------------------------------------------------------------------------------------------------------

    def meet_neighbours(self, board: Board) -> None:
        """Also compares: of those who came before, nothing was known yet when this call was."""
        super().meet_neighbours(board)
        watch = self.watch
        if watch is not None and not diagnose.agree(diagnose.members(watch, self, self.called - 1)):
            watch.look(self)

    def _name(self) -> str:
        return self.label


def out_of_time(watch: Watch, error: BaseException | None) -> Verdict | None:
    """Who has not come, where torch's own time for a call has run out, and this error says so, or one of its causes."""
    while error is not None and _NOT_COME not in error.__dict__:
        error = error.__cause__ or error.__context__
    if error is None:
        return None
    seat, sequence = error.__dict__[_NOT_COME]
    found = diagnose.members(watch, seat, sequence)
    record = next((m.record for m in found if m.rank == watch.board.rank), None)
    if record is None or diagnose.have_all_come(found):
        return None
    return verdict_text.stall(watch, seat, sequence, found, monotonic_ns() - record.start)


def _stand_in(ranks: Sequence[int], watch: Watch) -> Any:
    """What a seat wants to know of a group and its world."""
    world = SimpleNamespace(rank=watch.board.rank, epoch=0, comm_context=SimpleNamespace(tag=None, lineage=0))
    return SimpleNamespace(ranks=tuple(ranks), rank=tuple(ranks).index(world.rank), size=len(ranks), world=world)


def _timeout_ns(handle: Any) -> int:
    try:
        return int(handle._get_backend(_CPU).options._timeout.total_seconds() * 1e9)
    except (RuntimeError, AttributeError):
        return int(dist.distributed_c10d.default_pg_timeout.total_seconds() * 1e9)
