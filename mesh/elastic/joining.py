"""How a process becomes a member of an elastic job that runs.

    the process                                 the members
    reads in the job's first store who they are
    announces itself at their stores   --->     the rank that serves the agreement's store looks
                                                there once a second, and asks in the next vote
    waits                                       between two steps all hear of it, and agree
    reads the welcome                  <---     which has the decision that makes it a member

The members' part is in `membership.py`.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import time
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

from torch.distributed import PrefixStore, TCPStore

from ..errors import LaunchEnvironmentError
from ..launch.environment import launch_environment
from ..launch.job_store import address_of
from ..launch.local_processes import JOINS
from ..monitor.recording.job_directory import may_span_hosts
from ..monitor.startup.rank_info import RankInfo, machine, own_rank_info
from ..monitor.store_keys import StoreKeys
from ..monitor.store_values import checked, json_value
from ..network import is_loopback
from .messages import Announcement, Welcome
from .presence import Answer, ask
from .rank_stores import (
    Connection,
    StoreAddress,
    StoreGoneError,
    seen_from_here,
    serve_store,
)

KEYS = "shardmesh/elastic"
_TIMEOUT_S = 300.0  # for the job to begin, and for its members to reach the end of a step
_PATIENCE_S = 30.0  # for the job's first store to listen: whoever serves it may have just begun
_PAUSE_S = 0.05
_LOOK_S = 1.0  # between looks at who the members are
_STORES = 8  # at which a process announces itself: those of the lowest ranks
_AGAIN_S = 10.0  # until a store is tried again that has not answered: its host may have ended


class Entry(NamedTuple):
    """What a process has that has become a member.

    Attributes:
        job: the name of the job below `KEYS`.
        own: what it has announced.
        store: which it serves.
        welcome: the answer.
    """

    job: str
    own: Announcement
    store: TCPStore
    welcome: Welcome


def is_joining() -> bool:
    """Return whether this process joins a job that runs, as its environment says."""
    return os.environ.get(JOINS) == "1"


def register(store: Any, job: str, members: Mapping[int, Announcement]) -> None:
    """Write into the job's first store who the members are, for processes that join.

    Args:
        store: of the default group; the ranks' store is below its prefixes.
    """
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    keys = StoreKeys(store, KEYS)
    _append(keys, job, members)
    keys.set("job", job)


def _append(keys: StoreKeys, job: str, members: Mapping[int, Announcement]) -> None:
    lines = [f"[{rank}, {one.to_json()}]\n" for rank, one in members.items()]
    keys.append(f"members/{job}", "".join(lines))


def enter() -> Entry:
    """Announce this process to the members of the job, and wait until it is one of them.

    Raises:
        LaunchEnvironmentError: there is no such job at MASTER_ADDR and MASTER_PORT, it has ended,
            its ranks are on one other host and cannot be reached, or no step has ended for a long
            time.

    Communication: through the job's first store and those of its ranks.
    """
    place = launch_environment()
    if place is None:
        raise LaunchEnvironmentError(
            f"{JOINS}=1: set MASTER_ADDR and MASTER_PORT to those of the job that the process "
            "joins, and RANK and WORLD_SIZE as for one of its ranks"
        )
    info = own_rank_info(place[0], {}, 0, os.environ)
    first = address_of(os.environ)
    registry = Connection(StoreAddress(first.host, first.port), KEYS, _PATIENCE_S)
    deadline = time.monotonic() + _TIMEOUT_S
    try:
        job = _job(registry, deadline)
        members = _members(registry, job)
        _check_reachable(members)
        store, address = _serve(members, place[1])
        own = Announcement(secrets.token_hex(8), info, address)
        welcome = _wait_for_welcome(registry, job, own, deadline)
        registry.ask(lambda keys: _append(keys, job, {welcome.rank: own}), _never)
    except StoreGoneError as error:
        raise LaunchEnvironmentError(
            f"the job that this process joins has ended: {error}"
        ) from None
    finally:
        registry.close()
    os.environ.pop(JOINS)
    return Entry(job, own, store, welcome)


def _serve(members: Mapping[int, Announcement], size: int) -> tuple[TCPStore, StoreAddress]:
    """Serve a store that members on other hosts reach, and processes of these that join later.

    Args:
        size: of the job, as the environment of this process says.
    """
    is_far = any(one.info.machine != machine() for one in members.values())
    return serve_store(may_span_hosts=is_far or may_span_hosts(os.environ, size))


def _never() -> bool:
    return False


def _job(registry: Connection, deadline: float) -> str:
    """Return the name of the job, once it has begun."""
    try:
        registry.ask(lambda keys: keys.has("job"), _never)
    except StoreGoneError as error:
        raise LaunchEnvironmentError(
            f"no job answers that this process could join: {error}"
        ) from None
    while not registry.ask(lambda keys: keys.has("job"), _never):
        if time.monotonic() > deadline:
            raise LaunchEnvironmentError(
                f"no elastic job has begun within {_TIMEOUT_S:.0f} s, which this process could join"
            )
        time.sleep(_PAUSE_S)
    return registry.ask(lambda keys: keys.read("job", _job_name), _never)


def _wait_for_welcome(
    registry: Connection, job: str, own: Announcement, deadline: float
) -> Welcome:
    """Announce this process at the stores of the lowest ranks that live; return the answer."""
    line = f"{own.to_json()}\n"
    members: dict[int, Announcement] = {}
    stores: dict[int, Connection] = {}
    not_before: dict[int, float] = {}  # when a store is to be tried that has not answered
    next_look = 0.0
    try:
        while time.monotonic() < deadline:
            if time.monotonic() >= next_look:
                members = _members(registry, job)
                next_look = time.monotonic() + _LOOK_S
            living = sorted(rank for rank, one in members.items() if not one.info.is_gone())
            if not living:
                raise LaunchEnvironmentError("all ranks of the job that this one joins have ended")
            now = time.monotonic()
            due = [r for r in living if r not in stores and not_before.get(r, now) <= now]
            # the next ranks are due while those before them do not answer
            at = _addresses(members, due[: max(0, _STORES - len(stores))])
            answers = ask(at)  # at once: a connection waits for seconds for a store that has ended
            for rank, address in at.items():
                not_before[rank] = time.monotonic() + _AGAIN_S
                if answers[rank] is Answer.THERE:
                    stores[rank] = Connection(address, f"{KEYS}/{job}")
                    _ask(stores, members, rank, lambda keys: keys.append("joining", line))
            for rank in list(stores):
                welcome = _ask(stores, members, rank, lambda keys: _answer(keys, own.token))
                if welcome is not None:
                    return welcome
            time.sleep(_PAUSE_S)
    finally:
        for connection in stores.values():
            connection.close()
    raise LaunchEnvironmentError(
        f"the job has not taken this process as a member within {_TIMEOUT_S:.0f} s: it is taken at "
        "the end of a step"
    )


def _members(registry: Connection, job: str) -> dict[int, Announcement]:
    """Return who the ranks of the job are and have been."""
    return dict(registry.ask(lambda keys: keys.read_lines(f"members/{job}", _line), _never))


def _check_reachable(members: Mapping[int, Announcement]) -> None:
    """Raise LaunchEnvironmentError for a job on one other host whose stores listen there alone."""
    hosts = {one.info.machine for one in members.values()}
    are_local = all(is_loopback(one.address.host) for one in members.values())
    if len(hosts) != 1 or hosts == {machine()} or not are_local:
        return
    # a host that knows MASTER_ADDR as a loopback address may listen on all interfaces
    if Answer.THERE not in ask(_addresses(members, members)).values():
        raise LaunchEnvironmentError(
            f"{JOINS}=1: all ranks of the job are on one other host, and reached from there alone; "
            "start it so that its ranks may be on several hosts: with MASTER_ADDR as an address "
            "that these reach, and LOCAL_WORLD_SIZE, if it is set, below WORLD_SIZE"
        )


def address_from_here(info: RankInfo, address: StoreAddress) -> StoreAddress:
    """Return the address of a rank's store as this host reaches it."""
    return address if info.machine == machine() else seen_from_here(address)


def _addresses(
    members: Mapping[int, Announcement], ranks: Iterable[int]
) -> dict[int, StoreAddress]:
    """Return the addresses of the stores of ranks as this host reaches them."""
    return {rank: address_from_here(members[rank].info, members[rank].address) for rank in ranks}


def _ask(
    stores: dict[int, Connection], members: Mapping[int, Announcement], rank: int, question: Any
) -> Any:
    """Return the answer of a rank's store; None if it does not answer, which forgets it."""
    try:
        return stores[rank].ask(question, members[rank].info.is_gone)
    except StoreGoneError:
        del stores[rank]
        return None


def _answer(keys: StoreKeys, token: str) -> Welcome | None:
    if keys.has("finished"):
        raise LaunchEnvironmentError("the job that this process joins has taken its last step")
    name = f"welcome/{token}"
    return keys.read(name, Welcome.from_json) if keys.has(name) else None


def announced(store: Any, job: str) -> list[Announcement]:
    """Return the processes that have announced themselves at a rank's store.

    Args:
        store: which this rank serves.
    """
    keys = StoreKeys(store, f"{KEYS}/{job}")
    if not keys.has("joining"):
        return []
    return keys.read_lines("joining", Announcement.from_json)


def newcomers(
    announcements: Iterable[Announcement], taken: Collection[str], members: Iterable[RankInfo]
) -> list[Announcement]:
    """Return whom of these a job may take in, each process once.

    A process announces itself again at a store that has not answered for a while.

    Args:
        taken: tokens of processes that have been taken in.
        members: the processes of the members.
    """
    infos = list(members)
    by_token = {one.token: one for one in announcements}
    return [
        one
        for one in by_token.values()
        if one.token not in taken
        and not one.info.is_gone()
        and not any(one.info.is_same_process(info) for info in infos)
    ]


def _job_name(text: str) -> str:
    if not re.fullmatch("[0-9a-f]*(-[0-9]+)?/[0-9]+", text):
        raise ValueError("it is no name of a job")
    return text


def _line(text: str) -> tuple[int, Announcement]:
    rank, fields = checked(json_value(text), list)
    return checked(rank, int), Announcement.from_json(json.dumps(fields))
