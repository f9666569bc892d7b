"""Wrap torch.distributed to record and compare the program's calls like the library's.

    dist.all_reduce(x)   FSDP2     Python calls a method of ProcessGroup      wrapped here
    object collectives   batch_isend_irecv
    DDP's reducer                  C++ calls it, of the group it was given    see cpp_calls.py
    functional collectives
    work.wait()                    Python calls the method of Work            wrapped here

Everything that torch.distributed does in Python goes through some twenty methods of one class:
`dist.all_reduce(x, group=g)` is `g.allreduce([x], options)`. They are wrapped from the first mesh
over all ranks on, which is at the same place in the program of all ranks, so that calls have the
same numbers, until the monitor ends. The library's own groups and groups of one rank are passed
through.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from ...comm.recording.recorder import _COUNT, _LAST_RECORD
from ...comm.recording.trace_buffer import RECORD_END, RECORD_WORDS, RECORDS, RING, Header
from ...comm.thread_context import thread_context
from ...errors import CollectiveError
from ...settings import monotonic_ns, settings
from ..monitor import Monitor
from ..termination import is_broken_connection
from ..timeouts import torch_groups
from ..waiting import is_done_now
from . import cpp_calls
from .entries import ENTER, Enter
from .new_groups import CreationRecorders, waiting_for_members
from .point_to_point import MessageRecorder
from .recorder import _LAST, TorchGroup, TorchRecorder

OWN_PREFIX = "shardmesh_"  # prefix of the names of the library's groups
_OFTEN = 1023  # a mask: forget dropped works every 1,024 calls
_settings = settings()
_ref = weakref.ref
_IN_TIME = timedelta(milliseconds=200)  # for torch to report who is missing, after the time is over

_installed: _Installed | None = None
# id of a work -> (sequence number; a reference to the work; recorder; number of the record), until
# somebody waits for it
_pending: dict[int, tuple[int, Callable[[], Any], TorchRecorder, int]] = {}
_has_shared = False  # whether `as_ours` has been called


def monitor_calls(monitor: Monitor | None) -> None:
    """Monitor the program's calls on torch's groups from now on, until the monitor ends.

    No-op if the settings turn it off.
    """
    if (
        monitor is None
        or not _settings.torch_calls
        or _settings.mode == "off"
        or not dist.is_available()
    ):
        return
    if _installed is None or _installed.monitor is not monitor:
        stop()
        _install(monitor)


def stop(monitor: Monitor | None = None) -> None:
    """Restore torch's methods: those wrapped for this monitor, or for any."""
    global _installed
    if _installed is not None and (monitor is None or _installed.monitor is monitor):
        _installed.undo()
        _installed = None
        _pending.clear()


def refuse_calls() -> None:
    """Make calls on the groups that exist raise: this process is a forked child of a rank.

    Groups that it starts itself are its own. No-op if calls are not monitored.
    """
    global _installed
    if _installed is None:
        return
    rank = _installed.monitor.directory.rank
    groups = {id(handle) for handle in torch_groups()}
    stop()
    for name in (*ENTER, "send", "recv", "recv_anysource", "monitored_barrier"):
        original = getattr(dist.ProcessGroup, name, None)
        if original is not None:
            setattr(dist.ProcessGroup, name, _refuse_in_child(original, name, rank, groups))


def _refuse_in_child(
    original: Callable[..., Any], name: str, rank: int, groups: set[int]
) -> Callable[..., Any]:
    """Return a method of ProcessGroup that raises on the rank's groups.

    `keep_groups` keeps them, so that their ids stay theirs.
    """
    parent = os.getppid()

    def call(group: Any, *args: Any, **kwargs: Any) -> Any:
        if id(group) not in groups:
            return original(group, *args, **kwargs)
        raise CollectiveError(
            f"{name} in process {os.getpid()}, which rank {rank} (process {parent}) has forked: "
            "the child has none of the threads that communicate, so the collective would hang. "
            "Call it in the rank itself; a child that must communicate needs to be started by the "
            '"spawn" method of multiprocessing, with a process group of its own.'
        )

    return call


def as_ours(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function of torch's for the library, recorded already, on a group that it shares."""
    global _has_shared
    _has_shared = thread_context.own_torch_call = True
    try:
        return call(*args, **kwargs)
    finally:
        thread_context.own_torch_call = False


class _Installed:
    """What is wrapped, and the recorders.

    Attributes:
        recorders: id of one of torch's groups -> (a weak reference to the group; its recorder, None
            if it is not monitored).
    """

    def __init__(self, monitor: Monitor) -> None:
        self.monitor = monitor
        self.recorders: dict[int, tuple[Callable[[], Any], TorchRecorder | None]] = {}
        self._channels: dict[tuple[int, int, int, int], MessageRecorder] = {}
        self._undo: list[tuple[Any, str, Any, Any]] = []
        self._lock = threading.Lock()

    def put(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Replace an attribute by `make(attribute)`; no-op where torch has no such attribute."""
        if name in vars(owner):
            replacement = make(getattr(owner, name))
            # the attribute itself: a method of C++ is not a function that binds
            self._undo.append((owner, name, vars(owner)[name], replacement))
            setattr(owner, name, replacement)

    def undo(self) -> None:
        """Restore what `put` has replaced, the last first."""
        for owner, name, before, replacement in reversed(self._undo):
            if vars(owner).get(name) is replacement:  # else another library has wrapped it since
                setattr(owner, name, before)
        cpp_calls.forget()

    def new_recorder(self, handle: Any) -> TorchRecorder | None:
        """Return the recorder of a group that is called for the first time.

        None for the library's own groups, groups of one rank and those without this rank.
        """
        with self._lock:
            ranks = tuple(distributed_c10d._world.pg_group_ranks.get(handle, ()))
            name = distributed_c10d._world.pg_names.get(handle, OWN_PREFIX)
            is_known = (
                len(ranks) > 1
                and self.monitor.directory.rank in ranks
                and not name.startswith(OWN_PREFIX)
            )
            recorder = None
            if is_known:
                group = TorchGroup.of(handle, ranks, self.monitor)
                recorder = TorchRecorder(handle, group, self.monitor)
                self.monitor.recorders.append(recorder)
            self.recorders[id(handle)] = _ref(handle), recorder
            return recorder

    def channel(
        self, handle: Any, recorder: TorchRecorder, is_sending: bool, peer: int, tag: int
    ) -> MessageRecorder:
        """Return the recorder of the messages with this tag to or from one rank of the group."""
        own_rank, peer_rank = recorder.group.global_rank, recorder.group.ranks[peer]
        src, dst = (own_rank, peer_rank) if is_sending else (peer_rank, own_rank)
        key = id(recorder), src, dst, tag
        channel = self._channels.get(key)
        if channel is None:
            with self._lock:
                channel = self._channels[key] = MessageRecorder(
                    handle, recorder.group.description(), src, dst, tag, self.monitor
                )
                self.monitor.recorders.append(channel)
        return channel


def _install(monitor: Monitor) -> None:
    global _installed
    installed = _installed = _Installed(monitor)
    monitor.at_stop.append(partial(stop, monitor))
    for name, enter in ENTER.items():
        installed.put(
            dist.ProcessGroup,
            name,
            lambda original, enter=enter: _collective(original, enter, installed),
        )
    installed.put(dist.ProcessGroup, "monitored_barrier", _monitored_barrier)
    installed.put(dist.ProcessGroup, "send", lambda original: _message(original, "send"))
    installed.put(dist.ProcessGroup, "recv", lambda original: _message(original, "recv"))
    installed.put(dist.ProcessGroup, "recv_anysource", _from_anywhere)
    installed.put(
        distributed_c10d,
        "_new_group_with_tag",
        lambda original: waiting_for_members(original, CreationRecorders(monitor)),
    )
    installed.put(dist.Work, "wait", _wait)
    installed.put(dist.Work, "get_future", _get_future)
    cpp_calls.install(installed.put, _recorder_of)


def _recorder_of(handle: Any) -> TorchRecorder | None:
    """Return the recorder of a group; None if its calls are not monitored."""
    installed = _installed
    if installed is None or _settings.mode == "off":
        return None
    known = installed.recorders.get(id(handle))
    recorder = (
        known[1] if known is not None and known[0]() is handle else installed.new_recorder(handle)
    )
    return (
        recorder
        if recorder is None or not (_has_shared and thread_context.own_torch_call)
        else None
    )


def _collective(
    original: Callable[..., Any], enter: Enter, installed: _Installed
) -> Callable[..., Any]:
    """Record a collective, compare it, and note that its work is under way."""
    recorders = installed.recorders
    monitor_settings = _settings

    def call(group: Any, *args: Any, **kwargs: Any) -> Any:
        known = recorders.get(id(group))
        recorder = (
            known[1] if known is not None and known[0]() is group else installed.new_recorder(group)
        )
        if (
            recorder is None
            or monitor_settings.mode == "off"
            or (_has_shared and thread_context.own_torch_call)
        ):
            return original(group, *args, **kwargs)
        sequence = recorder.called
        number = enter(recorder, *args, **kwargs)
        try:  # same as `_start_work`, inlined: a call takes 0.2 us
            work = original(group, *args, **kwargs)
        except BaseException as error:
            _record_refused(recorder, sequence, number, error)
            raise
        if work is None:
            recorder.end(sequence, number)
            return None
        recorder.under_way[sequence & _LAST] = _pending[id(work)] = (
            sequence,
            _ref(work),
            recorder,
            number,
        )
        if not sequence & _OFTEN:
            _forget_dropped()
        return work

    return call


def _start_work(
    recorder: TorchRecorder,
    sequence: int,
    number: int,
    original: Any,
    group: Any,
    args: Any,
    kwargs: Any,
) -> Any:
    """Start torch's work and record that it is under way."""
    try:
        work = original(group, *args, **kwargs)
    except BaseException as error:
        _record_refused(recorder, sequence, number, error)
        raise
    if work is None:
        recorder.end(sequence, number)
        return work
    recorder.under_way[sequence & _LAST] = _pending[id(work)] = (
        sequence,
        _ref(work),
        recorder,
        number,
    )
    return work


def _record_refused(
    recorder: TorchRecorder, sequence: int, number: int, error: BaseException
) -> None:
    """Record a call that torch did not start.

    It is counted, since other ranks may still make the call that was refused here.

    Raises: WatchError where another rank is the reason.
    """
    if isinstance(error, RuntimeError) and is_broken_connection(error):
        recorder.explain(sequence, error)
    recorder.end(sequence, number)


def _forget_dropped() -> None:
    """Remove works that the program has dropped without waiting for them."""
    for key, (_, reference, *_) in list(_pending.items()):
        if reference() is None:
            _pending.pop(key, None)


def _wait(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wait for a work as the monitor does: checking the other ranks, and naming what is wrong."""
    pop = _pending.pop

    def wait(work: Any, timeout: timedelta | None = None) -> Any:
        entry = pop(id(work), None)
        if entry is None or entry[1]() is not work:
            return original(work) if timeout is None else original(work, timeout)
        sequence, _, recorder, number = entry
        if not timeout and is_done_now(work):
            try:
                original(work)
            except RuntimeError as error:
                recorder.explain(sequence, error)
                raise
            words = recorder.words
            if words[_COUNT] - number < RECORDS:  # as in `leave`
                words[RING + (number & _LAST_RECORD) * RECORD_WORDS + RECORD_END] = monotonic_ns()
            return True
        recorder.begin(sequence)
        try:
            return recorder.wait(sequence, work, timeout or None, original)
        except RuntimeError as error:
            recorder.mark(error, sequence)
            raise
        finally:
            recorder.end(sequence, number)

    return wait


def _get_future(original: Callable[..., Any]) -> Callable[..., Any]:
    """Keep a work under way whose future is taken: the program may then drop the work itself."""

    def get_future(work: Any) -> Any:
        entry = _pending.pop(id(work), None)
        if entry is not None and entry[1]() is work:
            sequence, _, recorder, number = entry
            recorder.under_way[sequence & _LAST] = _pending[id(work)] = (
                sequence,
                (lambda: work),
                recorder,
                number,
            )
        return original(work)

    return get_future


def _monitored_barrier(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wait until all ranks arrive, or for the timeout, before the barrier that blocks in C++."""

    def monitored_barrier(group: Any, timeout: Any = None, wait_all_ranks: bool = False) -> Any:
        recorder = _recorder_of(group)
        if recorder is None:
            return original(group, timeout, wait_all_ranks)
        sequence = recorder.called
        number = recorder.enter("monitored_barrier", "", "", -1, 0, 0)
        recorder.begin(sequence)
        try:
            limit = timeout if timeout else timedelta(microseconds=recorder.timeout_ns / 1000)
            return original(
                group,
                timeout if recorder.wait_for_all(sequence, limit) else _IN_TIME,
                wait_all_ranks,
            )
        except RuntimeError as error:
            recorder.mark(error, sequence)
            raise
        finally:
            recorder.end(sequence, number)

    return monitored_barrier


def _message(original: Callable[..., Any], op: str) -> Callable[..., Any]:
    """Record a message to or from one rank, and compare it with what the other rank calls."""

    def call(group: Any, tensors: Any, peer: int, tag: int = 0) -> Any:
        recorder = _recorder_of(group)
        installed = _installed
        if recorder is None or installed is None or not 0 <= peer < recorder.size:
            return original(group, tensors, peer, tag)
        channel = installed.channel(group, recorder, op == "send", peer, tag)
        x = tensors[0]
        sent, received = (x.nbytes, 0) if op == "send" else (0, x.nbytes)
        sequence = channel.called
        number = channel.enter(
            op,
            f"{'to' if op == 'send' else 'from'} rank {channel.peer}",
            x.dtype,
            x.numel(),
            sent,
            received,
        )
        channel.compare(sequence)
        return _start_work(channel, sequence, number, original, group, (tensors, peer, tag), {})

    return call


def _from_anywhere(original: Callable[..., Any]) -> Callable[..., Any]:
    """Note that this rank receives from anyone: its messages cannot be matched any more."""

    def recv_anysource(group: Any, *args: Any, **kwargs: Any) -> Any:
        installed = _installed
        if installed is not None:
            installed.monitor.buffer.words[Header.UNMATCHED] = 1
        return original(group, *args, **kwargs)

    return recv_anysource
