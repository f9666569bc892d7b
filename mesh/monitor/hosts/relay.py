"""Carry trace buffers, verdicts and requests for stacks between a job's hosts, by its store.

    host-a   buffers of 0, 1   --- publish --->   store   --- fetch --->    copies of 0, 1    host-b
             copies of 2, 3    <--- fetch ----            <--- publish ---  buffers of 2, 3

One rank of each host publishes for it, the lowest that is alive, over a separate connection: a
request to an unreachable store is never answered. Copies are read like the buffers of this host, so
that everything else works between hosts as it does within one, a tenth of a second or two later. A
host that is silent, or that cannot reach the store, is marked in the copies; that is an error on
every rank as soon as a rank waits for one of its ranks.

In the store, under "shardmesh/relay/JOB":

    place/RANK           which host a rank is on
    head/RANK            the state of the host whose lowest rank this is
    page/RANK/START      a part of a trace buffer

Each host reads what all others write, so from 8 hosts on they exchange less often.

Two threads of a rank work here. The relay's own talks to the store (`_run`); what it has fetched
lies in the copies, which are all that the rest of the monitor sees. The watchdog's calls `look`,
which never waits: it marks silent hosts, and compares collectives with the copies.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.distributed import PrefixStore, TCPStore

from ...comm.recording.recorder import Neighbour, Recorder, unlike
from ...comm.recording.trace_buffer import (
    BUFFER_BYTES,
    MAY_GO_ON,
    SLOT_LINEAGE,
    SLOT_WORDS,
    Header,
    RankState,
    TraceBuffer,
    slots_of,
)
from ...settings import _seconds
from ...text import ranks_text, shortened
from ..diagnosis import diagnose
from ..job import Job
from ..recording.files import folder_prefix
from ..recording.job_directory import (
    JobDirectory,
    boot_id,
    is_dead,
    is_local,
    is_stopped,
    may_span_hosts,
)
from ..store_values import (
    StoreValueError,
    bad_value,
    checked,
    checked_list,
    has_fields,
    json_object,
    json_value,
    message,
    number,
    parsed,
    whole,
)
from ..verdict import Verdict
from .mirror import BufferCopy, BufferSource, checked_header, is_part, make_copy

_LOST_S = 10.0  # a host that is silent for so long counts as lost
_DOUBT_S = 1.0  # after which it is looked for in other ways, if there are any
_TICK_S = 0.1  # between two exchanges; 0.02 while a rank of this host waits
_EAGER_S = 0.02
_FEW_HOSTS = 8
_MOST_HEAD = 1 << 18  # bytes of a host's state, for each of its ranks
_FRESH_NS = 1_000_000_000  # a rank whose heartbeat is older does not publish for its host
_FAREWELL_S = 1.0  # for the others to read the last state of a host
_LONGEST_STEP_S = 0.5  # between two looks of a process that runs
_LONGEST_LOOK_S = 1.0  # that a host which does not answer makes a look elsewhere take
# of the fingerprints of a group: the oldest may be overwritten while they are copied
_ABOUT_TO_GO = 8


@dataclass
class Host:
    """Another host, as of its last state.

    Attributes:
        head: the key of its state in the store.
        beat: changes with each state that it publishes.
        heard: when it last did, on the clock of exchanges.
        is_notified: whether it has received a verdict.
        asked: requests for stacks by rank: the count of requests in the rank's buffer, and the
            host's number of the request.
    """

    name: str
    ranks: tuple[int, ...]
    beat: int = 0
    heard: float = 0.0
    is_notified: bool = False
    copies: dict[int, BufferCopy] = field(default_factory=dict)
    asked: dict[int, tuple[int, int]] = field(default_factory=dict)

    @property
    def head(self) -> str:
        return f"head/{self.ranks[0]}"

    @property
    def text(self) -> str:
        return f"{self.name} ({ranks_text(self.ranks)})"


def start_relay(job: Job, store: Any) -> Relay | None:
    """Start the relay of this rank; None if there is one host, or no store that hosts share.

    Args:
        store: of the default group.

    Raises: LaunchEnvironmentError where SHARDMESH_HOST_LOST_S is not a positive number.
    """
    inner = store
    while isinstance(inner, PrefixStore):
        inner = inner.underlying_store
    if not isinstance(inner, TCPStore) or not may_span_hosts(os.environ, job.directory.size):
        return None
    name = job.directory.folder.name.removeprefix(folder_prefix())
    relay = Relay(
        job,
        PrefixStore(f"shardmesh/relay/{name}", store),
        f"{inner.host}:{inner.port}",
        shares_store=True,
    )
    relay.start()
    return relay


def host_lost_s() -> float:
    """Return the seconds after which a silent host counts as lost.

    Raises: LaunchEnvironmentError where SHARDMESH_HOST_LOST_S is not a positive number.
    """
    return _seconds(os.environ, "SHARDMESH_HOST_LOST_S", _LOST_S)


class OwnClock:
    """Seconds in which this process ran, by which it measures the silence of others.

    It stops while the process is stopped, which says nothing about others.

    Attributes:
        seconds: since the clock was made.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._looked_at = time.monotonic()

    def advance(self, longest_s: float = _LONGEST_STEP_S) -> None:
        """Count the time since the last look.

        Args:
            longest_s: how much of it counts at most: what this process may have done since.
        """
        now = time.monotonic()
        self.seconds += min(now - self._looked_at, longest_s)
        self._looked_at = now


class Relay:
    """Publish for this host when this rank has to, and compare with neighbours elsewhere.

    Attributes:
        lost_after_s: how long a host is silent before it counts as lost.
    """

    def __init__(self, job: Job, store: Any, address: str, shares_store: bool = False) -> None:
        self._job = job
        self._directory = job.directory
        self._address = address
        self._store: Any = store
        # until the thread has made a connection of its own, which takes long where names are not
        # resolved
        self._shares_store = shares_store
        self.lost_after_s = host_lost_s()
        self._name = socket.gethostname()
        self._own_ranks: tuple[int, ...] = ()
        self._others: list[Host] = []
        self._sources: dict[int, BufferSource] = {}
        # `_exchange_clock` goes with exchanges: hosts are silent by it. `_look_clock` goes with the
        # watchdog's looks: the store is, since it read `_answered_at`.
        self._exchange_clock, self._look_clock = OwnClock(), OwnClock()
        self._answered_at = 0.0
        # (group, collective) -> when a difference was first seen, in ns
        self._suspicion: dict[tuple[int, int], int] = {}
        # (group, neighbour) -> how many collectives have been compared with its copy
        self._compared: dict[tuple[int, int], int] = {}
        self._over = threading.Event()
        self._says_farewell, self._speaks_on = True, False
        self._thread = threading.Thread(target=self._run, name="shardmesh-relay", daemon=True)

    @property
    def has_others(self) -> bool:
        """Whether there are other hosts, as far as this rank knows."""
        return bool(self._others)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Stop, after publishing the last state of this host if no other rank of it can."""
        self._over.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(1.5 * _FAREWELL_S)

    def speak_on(self) -> None:
        """Publish for this host from here on though its ranks have stopped watching each other.

        A rank that raised does so, too: it may be the only one that knows the verdict.
        """
        self._speaks_on = True

    def leave(self) -> None:
        """Stop at once: nobody waits for what this host would say last."""
        self._says_farewell = False
        self._over.set()

    # -- the thread of the store -------------------------------------------------------------------

    def _connect(self) -> None:
        self._store = self._store.clone()
        self._shares_store = False

    def _run(self) -> None:
        while self._shares_store and not self._over.is_set():
            self._try_to(self._connect)
        while not self._own_ranks and not self._over.is_set():
            self._try_to(self._find_hosts)
        while self._others and not self._over.wait(self._pause()):
            if self._is_speaker():
                self._try_to(self._exchange)
            else:
                self._answered_at = self._look_clock.seconds
        is_last = self._job.standing() is not None or not self._living()
        if self._others and self._says_farewell and is_last:
            self._try_to(self._publish_last)
        self._store = None  # it may keep a server alive

    def _try_to(self, act: Callable[[], None]) -> None:
        """Act; after a broken connection pause and connect again, after a bad value give up."""
        try:
            act()
        except StoreValueError as error:
            self._over.set()
            self._job.give_up(str(error))
        except (RuntimeError, OSError):  # the connection broke, or the folder is gone
            self._sources.clear()  # which parts have arrived is not known
            self._job.look_elsewhere()
            if not self._over.wait(_TICK_S):
                with contextlib.suppress(RuntimeError):
                    self._store = self._store.clone()

    def _find_hosts(self) -> None:
        """Wait until all ranks have published which host they are on."""
        size, rank = self._directory.size, self._directory.rank
        self._store.set(f"place/{rank}", json.dumps([_host_key(self._directory), self._name]))
        keys = [f"place/{r}" for r in range(size)]
        while not self._store.check(keys):
            if self._over.wait(_EAGER_S):
                return
        ranks_of: dict[str, list[int]] = {}
        for r, place in enumerate(self._store.multi_get(keys)):
            ranks_of.setdefault(parsed(self._key(f"place/{r}"), place, message), []).append(r)
        hosts = [
            Host(parsed(self._key(f"place/{ranks[0]}"), place.encode(), _name_of), tuple(ranks))
            for place, ranks in ranks_of.items()
        ]
        own_ranks = next(h.ranks for h in hosts if rank in h.ranks)
        self._others = [h for h in hosts if h.ranks != own_ranks]
        self._own_ranks = own_ranks

    def _pause(self) -> float:
        """Return the seconds until the next exchange, fewer while a rank of this host waits."""
        waits = any(0 < buffer.words[Header.BLOCKED] < MAY_GO_ON for buffer in self._buffers())
        return (_EAGER_S if waits else _TICK_S) * max(1.0, len(self._others) / _FEW_HOSTS)

    def _buffers(self) -> list[TraceBuffer]:
        return [
            buffer
            for rank in self._own_ranks
            if (buffer := self._directory.buffer_of(rank)) is not None
        ]

    def _living(self) -> list[int]:
        """Return the ranks of this host that could publish for it."""
        oldest = time.monotonic_ns() - _FRESH_NS
        buffers = [
            buffer for buffer in self._buffers() if buffer.words[Header.STATE] == RankState.RUNNING
        ]
        own = self._directory.buffer
        return [
            buffer.words[Header.RANK]
            for buffer in buffers
            if buffer is own or buffer.words[Header.HEARTBEAT] > oldest
        ]

    def _is_speaker(self) -> bool:
        """Return whether this rank publishes for its host: the lowest that can does."""
        ranks = self._running() if self._speaks_on else self._living()
        return self._directory.rank == min(ranks, default=-1)

    def _running(self) -> list[int]:
        """Return the ranks of this host whose processes run, and this one.

        Heartbeats end when the job has failed and the program goes on.
        """
        own = self._directory.buffer
        return [
            buffer.words[Header.RANK]
            for buffer in self._buffers()
            if buffer is own
            or (is_local(buffer) and not is_dead(buffer) and not is_stopped(buffer))
        ]

    def _exchange(self) -> None:
        """Publish the state of this host, and fetch those of the others."""
        self._publish()
        for host in self._others:
            self._fetch(host)
        self._exchange_clock.advance()
        self._answered_at = self._look_clock.seconds
        if any(now_silent > _DOUBT_S for now_silent in map(self._silence, self._others)):
            self._job.look_elsewhere()
            self._exchange_clock.advance(_LONGEST_LOOK_S)

    def _silence(self, host: Host) -> float:
        return self._exchange_clock.seconds - host.heard

    def _publish_last(self) -> None:
        """Publish the last state of a host.

        If the job has failed its store may end with it, so not before the others know why.
        """
        self._publish()
        deadline = time.monotonic() + _FAREWELL_S
        while (
            self._job.standing() is not None
            and self._hosts_to_notify()
            and time.monotonic() < deadline
        ):
            time.sleep(_EAGER_S)
            self._exchange()

    def _hosts_to_notify(self) -> list[Host]:
        """Return reachable hosts that have not confirmed the verdict."""
        buffers = {host.head: self._directory.buffer_of(host.ranks[0]) for host in self._others}
        states = {
            head: RankState.RUNNING if buffer is None else buffer.words[Header.STATE]
            for head, buffer in buffers.items()
        }
        return [
            host
            for host in self._others
            if not host.is_notified and states[host.head] != RankState.LOST
        ]

    def _publish(self) -> None:
        """Write the changed parts of this host's trace buffers, and its state, to the store."""
        entries: dict[str, Any] = {}
        state: dict[str, Any] = {
            "beat": time.monotonic_ns(),
            "pages": {},
            "wanted": self._stack_requests(),
            "answers": self._answered_requests(),
        }
        for buffer in self._buffers():
            rank = buffer.words[Header.RANK]
            source = self._sources.setdefault(rank, BufferSource(buffer))
            entries |= {
                f"page/{rank}/{start}": data for start, data in source.changed_parts().items()
            }
            state["pages"][rank] = list(source.versions.items())
        verdict = self._job.standing()
        state["verdict"] = None if verdict is None else verdict.to_json()
        entries[f"head/{self._own_ranks[0]}"] = json.dumps(state).encode()
        self._store.multi_set(list(entries), list(entries.values()))

    def _fetch(self, host: Host) -> None:
        """Read a host's state, if it has published a new one, and the parts that have changed."""
        if not host.beat and not self._store.check([host.head]):
            return
        (data,) = self._store.multi_get([host.head])
        state = self._state(host, data)
        if state["beat"] == host.beat:
            return
        parts: dict[str, bytes] = {}
        while missing := [key for key in self._missing_parts(host, state) if key not in parts]:
            # Read together with the head: if that has changed, so may have parts that were not
            # asked for.
            data, *values = self._store.multi_get([host.head, *missing])
            parts |= dict(zip(missing, values, strict=True))
            newer = self._state(host, data)
            if newer["beat"] != state["beat"]:
                state = newer
                parts = {}
        self._take(host, state, parts)

    def _key(self, name: str) -> str:
        """Return the name of a key, for errors."""
        return f"shardmesh/relay/*/{name}"

    def _state(self, host: Host, data: bytes) -> dict[str, Any]:
        """Return the state that a host has published. Raises: StoreValueError."""
        return parsed(
            self._key(host.head),
            data,
            lambda text: _checked_state(json_object(text), host.ranks),
            _MOST_HEAD * len(host.ranks),
        )

    def _missing_parts(self, host: Host, state: Any) -> list[str]:
        """Return the keys of the parts of this state that the copies do not have.

        Raises:
            StoreValueError: the store has no such parts.
        """
        keys: list[str] = []
        for rank, versions in _versions(state):
            starts = self._copy(host, rank).missing(versions)
            keys += [f"page/{rank}/{start}" for start in starts]
        # to ask for a part that is not there waits without end
        if keys and not self._store.check(keys):
            raise bad_value(self._key(host.head), "its state", "it names parts that are not there")
        return keys

    def _copy(self, host: Host, rank: int) -> BufferCopy:
        """Return the copy of a rank's trace buffer, made when it is first asked for."""
        copy = host.copies.get(rank)
        if copy is None:
            try:
                copy = host.copies[rank] = make_copy(self._directory.path(rank))
            except OSError as error:
                self._job.give_up(f"no copies of the files of other hosts can be made: {error}")
                raise
        return copy

    def _check_part(self, key: str, data: bytes, rank: int, start: int) -> None:
        """Raise StoreValueError for bytes that do not fit their place in a rank's trace buffer."""
        try:
            if not is_part(start, len(data)):
                raise ValueError("no trace buffer has such a part")
            if not start:
                checked_header(data, rank, self._directory.size)
        except ValueError as error:
            raise bad_value(self._key(key), data, str(error)) from None

    def _take(self, host: Host, state: Any, parts: Mapping[str, bytes]) -> None:
        """Write the published data of a host into the copies, and act on its requests and verdict.

        Raises:
            StoreValueError: a part does not fit its place.
        """
        for key, data in parts.items():
            _, rank, start = key.split("/")
            self._check_part(key, data, int(rank), int(start))
        host.beat = state["beat"]
        host.heard = self._exchange_clock.seconds
        for rank, versions in _versions(state):
            prefix = f"page/{rank}/"
            self._copy(host, rank).write(
                {
                    int(key[len(prefix) :]): data
                    for key, data in parts.items()
                    if key.startswith(prefix)
                },
                versions,
            )
        self._ask(host, state["wanted"])
        for rank, count in state["answers"].get(str(self._own_ranks[0]), {}).items():
            if int(rank) in host.copies:
                host.copies[int(rank)].buffer.words[Header.STACK_GIVEN] = count
        host.is_notified = state["verdict"] is not None
        if host.is_notified and self._job.standing() is None:
            self._job.fail(state["verdict"])

    # -- questions for stacks ----------------------------------------------------------------------

    def _stack_requests(self) -> dict[int, int]:
        """Return which stacks ranks of this host ask for from other hosts' ranks."""
        words = {
            rank: copy.buffer.words for host in self._others for rank, copy in host.copies.items()
        }
        return {
            rank: w[Header.STACK_WANTED]
            for rank, w in words.items()
            if w[Header.STACK_WANTED] != w[Header.STACK_GIVEN]
        }

    def _ask(self, host: Host, requests: Mapping[str, int]) -> None:
        """Pass another host's requests for stacks on to the ranks of this one."""
        for rank in set(map(int, requests)) & set(self._own_ranks):
            buffer = self._directory.buffer_of(rank)
            request = requests[str(rank)]
            if buffer is not None and host.asked.get(rank, (0, 0))[1] != request:
                buffer.words[Header.STACK_WANTED] += 1
                host.asked[rank] = buffer.words[Header.STACK_WANTED], request

    def _answered_requests(self) -> dict[int, dict[int, int]]:
        """Return by host and rank which requests have been answered."""
        words = {buffer.words[Header.RANK]: buffer.words for buffer in self._buffers()}
        return {
            host.ranks[0]: {
                rank: number
                for rank, (at, number) in host.asked.items()
                if words[rank][Header.STACK_GIVEN] >= at
            }
            for host in self._others
        }

    # -- silence and differences, called by the watchdog -------------------------------------------

    def look(self) -> None:
        """Mark silent hosts, and compare this rank's collectives with copies of neighbours'."""
        self._look_clock.advance()
        if self._others and self._is_speaker():
            self._note_silence()
        for recorder in self._job.recorders:
            if not self._job.alarm[0]:
                self._compare(recorder)

    def _note_silence(self) -> None:
        """Mark hosts as lost that are silent, or all if the store does not answer this one."""
        unanswered = self._look_clock.seconds - self._answered_at
        store = f"the store at {self._address}"
        for host in self._others:
            silent = self._silence(host)
            if unanswered > self.lost_after_s:
                self._lose(
                    host,
                    f"{self._name} has no answer from {store} since {unanswered:.1f} s, and so "
                    f"knows nothing of {host.text}",
                )
            elif silent > self.lost_after_s:
                self._lose(
                    host,
                    f"{host.text} is down, frozen or cut off: silent since {silent:.1f} s, while "
                    f"{store} answers {self._name}",
                )

    def lose(self, ranks: Collection[int], reason: str) -> None:
        """Mark ranks of other hosts as lost."""
        for host in self._others:
            self._mark([self._copy(host, rank) for rank in host.ranks if rank in ranks], reason)

    def _lose(self, host: Host, reason: str) -> None:
        """Mark all ranks of a host as lost, at once, so that an error names them all."""
        self._mark([self._copy(host, rank) for rank in host.ranks], reason)

    def _mark(self, copies: Sequence[BufferCopy], reason: str) -> None:
        running = [copy for copy in copies if copy.buffer.words[Header.STATE] == RankState.RUNNING]
        for copy in running:
            copy.set_reason(reason)
        for copy in running:
            copy.mark_lost()

    def _compare(self, recorder: Recorder) -> None:
        """Compare a group's collectives with copies of neighbours on other hosts.

        Main threads compare when they call, with copies that are older than the call.
        """
        for neighbour in recorder.others:
            words = neighbour.words
            if words[Header.PID_SPACE] or recorder.row is None:
                continue
            key = recorder.key, id(words)
            both = min(recorder.called, words[neighbour.called_at])
            sequence = _first_difference(recorder, neighbour, self._compared.get(key, 0), both)
            if sequence is None:
                self._compared[key] = both
                continue
            since = self._suspicion.setdefault((recorder.key, sequence), time.monotonic_ns())
            verdict = diagnose.diagnose(self._job, recorder, sequence, since)
            if verdict is not None:
                self._job.fail(verdict)


def _versions(state: Any) -> list[tuple[int, dict[int, int]]]:
    """Return for each rank of a published state the versions of its parts, by start."""
    return [(int(rank), dict(versions)) for rank, versions in state["pages"].items()]


def _name_of(place: str) -> str:
    """Return the name of a host from what its ranks have published. Raises: ValueError."""
    _, name = checked_list(json_value(place), str)
    return shortened(name)


def _checked_state(state: dict[str, Any], ranks: Sequence[int]) -> dict[str, Any]:
    """Return the state of a host, with its verdict parsed. Raises: ValueError."""
    has_fields(state, ("beat", "pages", "wanted", "answers", "verdict"))
    whole(state["beat"])
    for rank, versions in checked(state["pages"], dict).items():
        if number(rank) not in ranks:
            raise ValueError(f"rank {shortened(rank, 20)} is not on that host")
        for pair in checked_list(versions, list):
            start, _ = (whole(value) for value in pair)
            if start >= BUFFER_BYTES:
                raise ValueError(f"a trace buffer has no byte {start}")
    for asked in (state["wanted"], *checked(state["answers"], dict).values()):
        for rank, count in checked(asked, dict).items():
            number(rank)
            whole(count)
    list(map(number, state["answers"]))
    if state["verdict"] is not None:
        state["verdict"] = Verdict.from_json(checked(state["verdict"], str))
    return state


def _first_difference(
    recorder: Recorder, neighbour: Neighbour, first: int, both: int
) -> int | None:
    """Return the first collective from `first` on in which a neighbour differs; None if in none.

    Args:
        both: how many collectives both have called. Of these, those that both still have count.
    """
    own_words, other_words = recorder.words, neighbour.words
    own_row = recorder.row or 0
    last_slot = slots_of(recorder.number) - 1
    oldest = max(recorder.called - last_slot, both - neighbour.last_slot) - 1 + _ABOUT_TO_GO
    for sequence in range(max(first, oldest), both):
        own_slot = own_row + (sequence & last_slot) * SLOT_WORDS
        other_slot = neighbour.row + (sequence & neighbour.last_slot) * SLOT_WORDS
        own_word, other_word = own_words[own_slot], other_words[other_slot]
        if not own_word or not other_word or own_word >> 48 != other_word >> 48:
            continue
        own_lineage = own_words[own_slot + SLOT_LINEAGE]
        if own_word != other_word or unlike(own_lineage, other_words[other_slot + SLOT_LINEAGE]):
            return sequence
    return None


def _host_key(directory: JobDirectory) -> str:
    """Return a text that is equal for two ranks exactly if they see the same folder."""
    return f"{boot_id()}/{directory.file_id}"
