"""Open the job's store at MASTER_ADDR and MASTER_PORT, with errors that explain.

As torch's env:// start-up does.

Under torchrun and `launch` the launcher serves it, and every rank is a client; else rank 0 serves
it. It stays open as long as the process lives, so that a default group that is started again gets
the same store, not one that is about to close.
"""

from __future__ import annotations

import os
import queue
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import NamedTuple

import torch.distributed as dist
from torch.distributed import Store, TCPStore
from torch.distributed.constants import default_pg_timeout

from .. import errors
from ..network import addresses, is_loopback, is_own, listener, within
from ..text import whole_number
from .progress import Progress

_ANSWER_S = 10.0  # for a store to answer; a server of another kind never does
# the same for one on this host, which may have to look up the names of many peers first
_SLOW_ANSWER_S = 60.0
# after which a server that takes connections and does not answer is no store, if names are looked
# up in time
_SILENT_S = 20.0
_SLOW_LOOKUP_S = 1.0
_TO_RESOLVE_S = 2.0  # for the name of MASTER_ADDR, before there is a line about it
_LOOK_S = 0.5  # between looks at the clock
_BACKLOG = 2048
# for a server that holds the port that this rank wants to serve: it may have begun just before
_OTHERS_ANSWER_S = 2.0
_PROBE_S = 2.0
_PAUSE_S = 0.2  # between look-ups of a name

_open: dict[Address, Store] = {}


class Address(NamedTuple):
    """Address of the store, and whether the launcher serves it."""

    host: str
    port: int
    is_launchers: bool

    def __str__(self) -> str:
        return f"MASTER_ADDR={self.host}, MASTER_PORT={self.port}"


def address_of(env: Mapping[str, str]) -> Address:
    return Address(
        env["MASTER_ADDR"],
        whole_number(env["MASTER_PORT"]) or 0,
        env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def open_store(address: Address, rank: int, size: int, progress: Progress) -> tuple[Store, bool]:
    """Return the store, and whether this rank serves it.

    Raises: LaunchEnvironmentError when it cannot be reached in time, or something else has its
    port.
    """
    serves = rank == 0 and not address.is_launchers
    if address not in _open:
        _open[address] = (
            _serve_store(address) if serves else _reach_store(address, rank, size, progress)
        )
    return _open[address], serves


def is_open(address: Address) -> bool:
    return address in _open


def drop(address: Address) -> None:
    """Forget a store that no longer answers."""
    _open.pop(address, None)


def _serve_store(address: Address) -> Store:
    """Return the store, served by this process.

    If another shardmesh job listens at the port, return its store: it tells the two apart.
    """
    ip_addresses = resolved(address.host, _TO_RESOLVE_S)
    if not ip_addresses:
        raise _does_not_lead_here(address, f"{address.host!r} does not resolve")
    try:
        return _create_store(
            address,
            True,
            _SLOW_ANSWER_S if any(map(is_own, ip_addresses)) else _ANSWER_S,
            loopback_socket(ip_addresses, address.port),
        )
    except (dist.DistNetworkError, OSError) as error:
        text = str(error)
        if "EADDRINUSE" not in text and "address already in use" not in text.lower():
            raise _does_not_lead_here(address, text.splitlines()[0]) from error
        other = _store_of_another(address)
        if other is None:
            raise _port_in_use(address) from error
        return other


def resolved(host: str, seconds: float) -> tuple[str, ...]:
    """Return the addresses of a host.

    The tuple is empty if it does not resolve within these seconds. A name that is new is asked for
    again.
    """
    deadline = time.monotonic() + seconds
    while not (ip_addresses := addresses(host)) and time.monotonic() < deadline:
        time.sleep(_PAUSE_S)
    return ip_addresses


def loopback_socket(ip_addresses: Sequence[str], port: int) -> socket.socket | None:
    """Return a listening socket for a job whose ranks are all on this host, else None.

    MASTER_ADDR is a loopback address there.

    A store listens on all interfaces otherwise. Here nobody on another host reaches it, and torch,
    which looks up the name of each peer, finds that of 127.0.0.1 without asking a name server.

    Raises: OSError when the port is in use.
    """
    if not ip_addresses or not all(map(is_loopback, ip_addresses)):
        return None
    return loopback_listener(
        next((one for one in ip_addresses if ":" not in one), ip_addresses[0]), port
    )


def loopback_listener(host: str, port: int) -> socket.socket:
    """Return a socket that listens at an address of this host. Raises: OSError if it is in use."""
    listening = socket.socket(
        socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM
    )
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        listening.listen(_BACKLOG)
    except OSError:
        listening.close()
        raise
    return listening


def _reach_store(address: Address, rank: int, size: int, progress: Progress) -> Store:
    """Return the store, which another process serves.

    One connection, over which torch's store waits until somebody listens.

    The server looks up the name of each peer, one after the other, and a resolver that does not
    answer takes seconds for each. So a second connection, which tells why there is no answer, is
    only made when a line about it is due.
    """
    server = "the launcher's store" if address.is_launchers else f"rank 0 of {size}"
    is_first = True
    while not addresses(address.host):
        problem = f"{address.host!r} does not resolve"
        if progress.is_over():
            raise _unreachable(address, rank, problem, progress)
        if is_first or progress.is_due():
            progress.report(f"{server} at {address}", problem)
        is_first = False
        time.sleep(_PAUSE_S)
    box = _connect(address, False, progress.left + _ANSWER_S)
    next_look = progress.waited + _ANSWER_S
    silent_since = None
    while True:
        try:
            return _store_of_answer(box.get(timeout=min(_LOOK_S, max(0.1, progress.left))))
        except dist.DistNetworkError as error:
            if problem := _problem(address):
                raise _unreachable(address, rank, problem, progress) from error
            raise _no_store(address) from error
        except queue.Empty:
            pass
        is_over = progress.is_over()
        is_due = progress.is_due()
        now = progress.waited
        if not is_over and not is_due and now < next_look:
            continue
        next_look = now + _SILENT_S
        if problem := _problem(address) or _slow_resolver(address):
            silent_since = None
        else:
            problem = "it does not answer"
            silent_since = now if silent_since is None else silent_since
            if is_over or now - silent_since >= _SILENT_S:
                raise _no_store(address)
        if is_due:
            progress.report(f"{server} at {address}", problem)
        if is_over:
            raise _unreachable(address, rank, problem, progress)


def _problem(address: Address) -> str:
    """Return why no connection can be made there; "" if one can."""
    try:
        socket.create_connection((address.host, address.port), _PROBE_S).close()
    except OSError as error:
        return str(error)
    return ""


def _slow_resolver(address: Address) -> str:
    """Return that name servers do not answer, if the look-up of the store's host is slow, or ""."""

    def look_up() -> bool:
        peer = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0][4]
        socket.getnameinfo(peer, 0)
        return True

    if within(_SLOW_LOOKUP_S, look_up, False):
        return ""
    return (
        f"the resolver does not answer within {_SLOW_LOOKUP_S:.0f} s, and torch's store looks up "
        "the name of every connection: put the job's hosts into /etc/hosts, or mend "
        "/etc/resolv.conf"
    )


def _create_store(
    address: Address, serves: bool, limit: float, listening: socket.socket | None = None
) -> Store:
    """Create torch's store.

    Raises: DistNetworkError; LaunchEnvironmentError when there is no answer.
    """
    try:
        return _store_of_answer(_connect(address, serves, limit, listening).get(timeout=2 * limit))
    except queue.Empty:
        raise _no_store(address) from None


def _store_of_answer(answer: Store | Exception) -> Store:
    if isinstance(answer, Exception):
        raise answer
    answer.set_timeout(default_pg_timeout)
    return answer


def _connect(
    address: Address, serves: bool, limit: float, listening: socket.socket | None = None
) -> queue.SimpleQueue[Store | Exception]:
    """Create torch's store in a thread.

    torch waits without end for an answer from a server that is no store.
    """
    box: queue.SimpleQueue[Store | Exception] = queue.SimpleQueue()
    file = None if listening is None else listening.detach()
    threading.Thread(
        target=_make,
        args=(box, address, serves, limit, file),
        name="shardmesh-connect",
        daemon=True,
    ).start()
    return box


def _make(
    box: queue.SimpleQueue[Store | Exception],
    address: Address,
    serves: bool,
    limit: float,
    file: int | None,
) -> None:
    try:
        box.put(
            TCPStore(
                address.host,
                address.port,
                is_master=serves,
                timeout=timedelta(seconds=limit),
                wait_for_workers=False,
                multi_tenant=True,
                use_libuv=file is not None or os.environ.get("USE_LIBUV", "1") == "1",
                master_listen_fd=file,
            )
        )
    except Exception as error:
        box.put(error)


def _store_of_another(address: Address) -> Store | None:
    """Return the store of another shardmesh job at this port, if it is one."""
    try:
        store = _create_store(address, False, _OTHERS_ANSWER_S)
        deadline = time.monotonic() + _OTHERS_ANSWER_S
        while not store.check(["shardmesh/start/job"]):
            if time.monotonic() > deadline:
                return None
            time.sleep(_PAUSE_S)
        return store
    except (dist.DistError, errors.LaunchEnvironmentError):
        return None


def _port_in_use(address: Address) -> errors.LaunchEnvironmentError:
    by = listener(address.port)
    return errors.LaunchEnvironmentError(
        f"rank 0 cannot listen at {address}: the port is in "
        f"use{f' by {by}' if by else ', perhaps by a job that is still running'}. Set MASTER_PORT "
        "to a free one in every process (torchrun --master-port, or --standalone to choose one)."
    )


def _does_not_lead_here(address: Address, why: str) -> errors.LaunchEnvironmentError:
    return errors.LaunchEnvironmentError(
        f"rank 0 serves the store, but cannot reach itself at {address}: {why}. Set MASTER_ADDR to "
        "the address of the host of rank 0, in every process; rank 0 runs on "
        f"{socket.gethostname()}."
    )


def _no_store(address: Address) -> errors.LaunchEnvironmentError:
    by = listener(address.port)
    return errors.LaunchEnvironmentError(
        f"the server at {address} is not a torch.distributed "
        f"store{f': it is {by}, if that is this host' if by else ''}. Set MASTER_PORT to a free "
        "port of the host of rank 0, the same in every process."
    )


def _unreachable(
    address: Address, rank: int, problem: str, progress: Progress
) -> errors.LaunchEnvironmentError:
    server = "the launcher's store" if address.is_launchers else "rank 0"
    return errors.LaunchEnvironmentError(
        f"rank {rank} cannot reach {server} at {address} within {progress.timeout:.0f} s: "
        f"{problem}. Check that {'the launcher' if address.is_launchers else 'rank 0'} runs there "
        "and that the address and port are the same in every process."
    )
