"""The stores of an elastic job: each rank serves one, at an address that all know from the start.

    rank 0   serves, port 41001   <--- reports, decisions, rendezvous of the groups of an epoch
    rank 1   serves, port 41002   <--- the same, once rank 0 has ended
    rank 2   serves, port 41003

A store ends with the process that serves it, and one whose process is stopped never answers. So
questions are asked in a thread of their own, and left alone when the host has ended.
"""

from __future__ import annotations

import atexit
import os
import queue
import socket
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist
from torch.distributed import TCPStore

from ..launch.job_store import loopback_listener, resolved
from ..monitor.store_keys import StoreKeys
from ..monitor.store_values import checked, has_fields, json_object, whole
from ..network import is_loopback
from ..settings import settings, wait_before_exit

T = TypeVar("T")

_LOOPBACK = "127.0.0.1"
_TO_RESOLVE_S = 2.0
_ANSWER_S = 5.0  # of a store that is there; then it is asked again
_LOOK_S = 0.02  # between looks at whether the host has ended, while a question is under way
_PAUSE_S = 0.05  # between tries to connect to a store that may not be there yet
# That a process waits at its end for a call of a store, at most: torch tries again for so long.
_TO_END_S = 15.0


class StoreAddress(NamedTuple):
    """Where a rank serves its store."""

    host: str
    port: int

    @staticmethod
    def from_json(text: str) -> StoreAddress:
        """Return the address in a text. Raises: ValueError."""
        fields = has_fields(json_object(text), StoreAddress._fields)
        return StoreAddress(checked(fields["host"], str), whole(fields["port"], (1 << 16) - 1))


class StoreGoneError(RuntimeError):
    """A question was not answered: the store's host has ended, or the connection broke."""


def serve_store(may_span_hosts: bool = False) -> tuple[TCPStore, StoreAddress]:
    """Serve a store from this process, and return it with its address.

    It listens at the loopback interface alone if the job is on one host, or MASTER_ADDR is an
    address of that interface, which only ranks of one host share.

    Args:
        may_span_hosts: whether ranks may be on other hosts.
    """
    master = os.environ.get("MASTER_ADDR", _LOOPBACK)
    address = next(iter(resolved(master, _TO_RESOLVE_S)), _LOOPBACK)
    if not may_span_hosts or (master in ("localhost", address) and is_loopback(address)):
        host, listening = _LOOPBACK, loopback_listener(_LOOPBACK, 0)
    else:
        host = _address_towards(address)
        listening = _listener_for_all(host)
    port = listening.getsockname()[1]
    store = TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=_ANSWER_S),
        master_listen_fd=listening.detach(),
    )
    return store, StoreAddress(host, port)


def _listener_for_all(host: str) -> socket.socket:
    """Return a socket that listens on all interfaces, also those of IPv4 where that is possible."""
    if ":" in host or (is_loopback(host) and socket.has_dualstack_ipv6()):
        return loopback_listener("::", 0)
    return loopback_listener("0.0.0.0", 0)


def seen_from_here(address: StoreAddress) -> StoreAddress:
    """Return the address of a rank's store as this host reaches it.

    The host at MASTER_ADDR may know its own name as one of the loopback interface (`127.0.1.1` in
    its /etc/hosts), which is its address there alone.
    """
    if not is_loopback(address.host):
        return address
    master = resolved(os.environ.get("MASTER_ADDR", _LOOPBACK), _TO_RESOLVE_S)
    return address._replace(host=next(iter(master), address.host))


def _address_towards(address: str) -> str:
    """Return the address of this host from which it reaches another one; nothing is sent."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))
        return probe.getsockname()[0]


class Connection:
    """A connection to the store of a rank, in a thread of its own.

    Args:
        address: of the store.
        prefix: of all keys.
        patience_s: seconds in which the store may begin to listen; by default it must be there.
    """

    def __init__(self, address: StoreAddress, prefix: str, patience_s: float = 0.0) -> None:
        self._address, self._prefix = address, prefix
        self._patience_s = patience_s
        self._is_closed = threading.Event()
        self._questions: queue.SimpleQueue[Callable[[StoreKeys], Any] | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[tuple[Any, Exception | None]] = queue.SimpleQueue()
        self._store: Any = None
        self._thread = threading.Thread(
            target=self._run, name="shardmesh-elastic-store", daemon=True
        )
        self._thread.start()
        _connections.add(self)
        atexit.unregister(_end_threads)
        atexit.register(_end_threads)

    def ask(self, question: Callable[[StoreKeys], T], is_over: Callable[[], bool]) -> T:
        """Return `question(keys of the store)`.

        Args:
            is_over: called while there is no answer; whether to give up.

        Raises:
            StoreGoneError: the store did not answer; the connection is of no use any more.
        """
        self._questions.put(question)
        while True:
            try:
                answer, error = self._answers.get(timeout=_LOOK_S)
            except queue.Empty:
                if is_over():
                    self.close()
                    raise StoreGoneError(f"the store at {self._address} has ended") from None
                continue
            if error is None:
                return answer
            if isinstance(error, dist.DistError):
                raise StoreGoneError(f"the store at {self._address}: {error}") from error
            raise error

    def clone(self, is_over: Callable[[], bool]) -> TCPStore:
        """Return another connection to the store. Raises: StoreGoneError."""
        return self.ask(lambda _: self._store.clone(), is_over)

    def close(self) -> None:
        """Let the thread end, after a question that is under way."""
        self._is_closed.set()
        self._questions.put(None)

    def abandon(self) -> None:
        """Do not wait for the thread at the end of the process: the host is cut off.

        A call of its store returns after minutes, if ever.
        """
        self.close()
        _connections.discard(self)

    def _check_listening(self) -> None:
        """Raise DistNetworkError if nobody listens there: torch would try again for seconds."""
        deadline = time.monotonic() + self._patience_s
        while True:
            try:
                socket.create_connection(self._address, _ANSWER_S).close()
                return
            except OSError as error:
                if time.monotonic() >= deadline or self._is_closed.wait(_PAUSE_S):
                    raise dist.DistNetworkError(str(error)) from error

    def _run(self) -> None:
        while (question := self._questions.get()) is not None:
            try:
                if self._store is None:
                    self._check_listening()
                    self._store = TCPStore(
                        *self._address,
                        is_master=False,
                        wait_for_workers=False,
                        timeout=timedelta(seconds=_ANSWER_S),
                    )
                self._answers.put((question(StoreKeys(self._store, self._prefix)), None))
            except Exception as error:
                self._answers.put((None, error))
                if isinstance(error, dist.DistError):
                    return


_connections: weakref.WeakSet[Connection] = weakref.WeakSet()


def _end_threads() -> None:
    """Wait for threads that are in a call of torch.

    One that returns from it while the interpreter ends would abort the process.
    """
    deadline = time.monotonic() + wait_before_exit(_TO_END_S, settings().exit_s)
    for connection in list(_connections):
        connection.close()
        connection._thread.join(max(0.0, deadline - time.monotonic()))
