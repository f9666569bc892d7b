"""Open the job's store at MASTER_ADDR and MASTER_PORT as torch's env:// start-up does, with errors that explain what is wrong.

Under torchrun and `launch` the launcher serves it, and every rank is a client; else rank 0 serves it. It stays open as long as the
process lives, so that a default group that is started again gets the same store, not one that is about to close.
"""

from __future__ import annotations

import os
import queue
import socket
import threading
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import NamedTuple

import torch.distributed as dist
from torch.distributed import Store, TCPStore
from torch.distributed.constants import default_pg_timeout

from ... import errors
from ..doctor.network import listener
from .progress import Progress

_ANSWER_S = 10.0  # for a store to answer; a server of another kind never does
_OTHERS_ANSWER_S = 0.5  # for a server that holds the port that this rank wants to serve
_PROBE_S = 2.0
_FIRST_PAUSE_S, _PAUSE_S = 1e-2, 0.5  # between attempts to connect

_open: dict[Address, Store] = {}


class Address(NamedTuple):
    """Address of the store, and whether the launcher serves it."""

    host: str
    port: int
    is_launchers: bool

    def __str__(self) -> str:
        return f"MASTER_ADDR={self.host}, MASTER_PORT={self.port}"


def address_of(env: Mapping[str, str]) -> Address:
    return Address(env["MASTER_ADDR"], int(env["MASTER_PORT"]), env.get("TORCHELASTIC_USE_AGENT_STORE") == "True")


def opened(address: Address, rank: int, size: int, progress: Progress) -> tuple[Store, bool]:
    """Return the store, and whether this rank serves it.

    Raises: LaunchEnvironmentError when it cannot be reached in time, or something else has its port.
    """
    serves = rank == 0 and not address.is_launchers
    if address not in _open:
        _open[address] = _served(address) if serves else _reached(address, rank, size, progress)
    return _open[address], serves


def is_open(address: Address) -> bool:
    return address in _open


def drop(address: Address) -> None:
    """Forget a store that no longer answers."""
    _open.pop(address, None)


def _served(address: Address) -> Store:
    """Return the store, served by this process. If another shardmesh job listens at the port, return its store: it tells the two apart."""
    try:
        return _made(address, True, _ANSWER_S)
    except dist.DistNetworkError as error:
        if not _says_in_use(error):
            raise _does_not_lead_here(address, error) from error
        other = _store_of_another(address)
        if other is None:
            raise _port_in_use(address) from error
        return other


def _reached(address: Address, rank: int, size: int, progress: Progress) -> Store:
    pause = _FIRST_PAUSE_S
    while problem := _problem(address):
        if progress.is_over():
            raise _unreachable(address, rank, problem, progress)
        if progress.is_due():
            server = "the launcher's store" if address.is_launchers else f"rank 0 of {size}"
            progress.report(f"{server} at {address}", problem)
        time.sleep(pause)
        pause = min(1.5 * pause, _PAUSE_S)
    try:
        return _made(address, False, _ANSWER_S)
    except dist.DistNetworkError as error:
        raise _no_store(address) from error


def _problem(address: Address) -> str:
    """Return why no connection can be made there; "" if one can."""
    try:
        socket.create_connection((address.host, address.port), _PROBE_S).close()
    except OSError as error:
        return str(error)
    return ""


def _made(address: Address, serves: bool, limit: float) -> Store:
    """Create torch's store, in a thread, since torch waits without end for an answer from a server that is no store.

    Raises: DistNetworkError; LaunchEnvironmentError when there is no answer.
    """
    box: queue.SimpleQueue[Store | Exception] = queue.SimpleQueue()
    threading.Thread(target=_make, args=(box, address, serves, limit), name="shardmesh-connect", daemon=True).start()
    try:
        found = box.get(timeout=2 * limit)
    except queue.Empty:
        raise _no_store(address) from None
    if isinstance(found, Exception):
        raise found
    found.set_timeout(default_pg_timeout)
    return found


def _make(box: queue.SimpleQueue[Store | Exception], address: Address, serves: bool, limit: float) -> None:
    try:
        box.put(
            TCPStore(
                address.host,
                address.port,
                is_master=serves,
                timeout=timedelta(seconds=limit),
                wait_for_workers=False,
                multi_tenant=True,
                use_libuv=os.environ.get("USE_LIBUV", "1") == "1",
            )
        )
    except Exception as error:
        box.put(error)


def _store_of_another(address: Address) -> Store | None:
    """Return the store of another shardmesh job at this port, if it is one."""
    try:
        found = _made(address, False, _OTHERS_ANSWER_S)
        return found if found.check(["shardmesh/start/job"]) else None
    except (dist.DistError, errors.LaunchEnvironmentError):
        return None


def _says_in_use(error: Exception) -> bool:
    return "EADDRINUSE" in str(error) or "address already in use" in str(error).lower()


def _port_in_use(address: Address) -> errors.LaunchEnvironmentError:
    by = listener(address.port)
    return errors.LaunchEnvironmentError(
        f"rank 0 cannot listen at {address}: the port is in use{f' by {by}' if by else ', perhaps by a job that is still running'}. "
        "Set MASTER_PORT to a free one in every process (torchrun --master-port, or --standalone to choose one)."
    )


def _does_not_lead_here(address: Address, error: Exception) -> errors.LaunchEnvironmentError:
    return errors.LaunchEnvironmentError(
        f"rank 0 serves the store, but cannot reach itself at {address}: {str(error).splitlines()[0]}. Set MASTER_ADDR to the "
        f"address of the host of rank 0, in every process; rank 0 runs on {socket.gethostname()}."
    )


def _no_store(address: Address) -> errors.LaunchEnvironmentError:
    by = listener(address.port)
    return errors.LaunchEnvironmentError(
        f"the server at {address} is not a torch.distributed store{f': it is {by}, if that is this host' if by else ''}. Set "
        "MASTER_PORT to a free port of the host of rank 0, the same in every process."
    )


def _unreachable(address: Address, rank: int, problem: str, progress: Progress) -> errors.LaunchEnvironmentError:
    server = "the launcher's store" if address.is_launchers else "rank 0"
    return errors.LaunchEnvironmentError(
        f"rank {rank} cannot reach {server} at {address} within {progress.timeout:.0f} s: {problem}. Check that "
        f"{'the launcher' if address.is_launchers else 'rank 0'} runs there and that the address and port are the same in every process."
    )
