"""Members agree on who joins, though not all of them have heard of it: one process, with stores."""

from __future__ import annotations

import contextlib
import math
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import TCPStore

from shardmesh.mesh.comm.recording.trace_buffer import Header
from shardmesh.mesh.elastic import joining, membership, protocol, rank_stores
from shardmesh.mesh.elastic.joining import newcomers
from shardmesh.mesh.elastic.membership import (
    Change,
    ElasticJobError,
    LeftOutError,
    Membership,
    node_size,
)
from shardmesh.mesh.elastic.messages import Announcement, Failure
from shardmesh.mesh.elastic.presence import Presence
from shardmesh.mesh.elastic.rank_stores import (
    Connection,
    StoreAddress,
    StoreGoneError,
    serve_store,
)
from shardmesh.mesh.errors import LaunchEnvironmentError
from shardmesh.mesh.monitor.recording.job_directory import born
from shardmesh.mesh.monitor.startup.rank_info import own_rank_info
from shardmesh.mesh.monitor.store_keys import StoreKeys
from shardmesh.mesh.processes.process import ProcessWorld
from shardmesh.mesh.settings import settings
from tests.forked import free_port
from tests.mesh.elastic.test_messages import WELCOME

OWN = own_rank_info(0, {}, 0, {})
OTHER = replace(OWN, pid=os.getppid(), born=born(os.getppid()))  # a process that lives
JOINER = Announcement("0123456789abcdef", OTHER, StoreAddress("127.0.0.1", 9))
FAR = JOINER._replace(info=replace(OTHER, machine="elsewhere"))


def member_of(rank: int, members: tuple[int, ...], address: StoreAddress) -> Membership:
    """Return a member whose groups and monitor nobody has started."""
    one = Membership.__new__(Membership)
    one.member = protocol.first_member(rank, members, members[0])
    one.min_ranks, one.size, one._backend = 1, len(members), "gloo"
    one.failures, one.verdict, one.is_finished = (), "", False
    one._electorate = members
    one._prefix, one._connection, one._awaited = "job", None, {}
    one._infos = dict.fromkeys(members, OWN)
    one._addresses = dict.fromkeys(members, address)
    one._presence = Presence(rank, one._infos, one._addresses)
    one._missing_parts = lambda *_: ()
    one._monitor, one._suspended, one._worlds_before = None, [], []
    one._failure, one._told = None, None
    one._failed, one._failed_ranks = Counter(), Counter()
    one._own_token, one._candidates, one._joining, one._taken = "0" * 16, {}, {}, set()
    return one


@pytest.fixture
def pair() -> Iterator[tuple[list[Membership], TCPStore]]:
    store, address = serve_store()
    members = [member_of(rank, (0, 1), address) for rank in (0, 1)]
    yield members, store
    for one in members:
        one.close()


def agree(members: list[Membership]) -> None:
    threads = [threading.Thread(target=one.agree, daemon=True) for one in members]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
        assert not thread.is_alive()


def test_the_decision_tells_who_joins(pair: tuple[list[Membership], TCPStore]):
    members, _store = pair
    members[0].pause(Change((), {2: JOINER}))
    members[1].member = protocol.interrupt(members[1].member)  # it has not heard of it
    agree(members)
    for one in members:
        assert one.member.members == (0, 1, 2)
        assert (one._infos[2], one._addresses[2]) == (JOINER.info, JOINER.address)
        assert one._presence.is_near(2)
        assert one._taken == {JOINER.token}
        assert one.verdict == "rank 2 joined"


def test_ranks_of_one_host_do_not_wait_for_ever_for_a_process_of_another_that_joins(
    pair: tuple[list[Membership], TCPStore], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    members, _store = pair
    for one in members:
        one.pause(Change((), {2: FAR}))
    agree(members)
    for one in members:
        assert one.member.members == (0, 1, 2)
        assert math.isfinite(one._presence.silent_s)
        assert math.isfinite(one._presence.late_s)


def test_who_joins_is_asked_again_if_the_leader_has_not_heard_of_it(
    pair: tuple[list[Membership], TCPStore],
):
    members, _store = pair
    members[0].member = protocol.interrupt(members[0].member)
    members[1].pause(Change((), {2: JOINER}))
    agree(members)
    for one in members:
        assert one.member.members == (0, 1)
        assert not one._taken
        assert not one._candidates


def test_a_rank_whose_number_another_process_has_does_not_go_on(
    pair: tuple[list[Membership], TCPStore],
):
    """As one that joined in an epoch which the others have not begun."""
    members, _store = pair
    members[0].pause(Change((), {2: JOINER}))
    members[1].member = protocol.interrupt(members[1].member)
    agree(members)
    late = member_of(2, (0, 1, 2), members[0]._addresses[0])
    late.member = protocol.interrupt(late.member)
    late._own_token = "f" * 16
    with pytest.raises(ElasticJobError, match="go on without it"):
        late.agree()
    late.close()


def test_a_rank_that_leaves_hears_at_its_own_store_that_others_have_met():
    """A third rank has ended where they meet, which one of the two has heard of before."""
    served = [serve_store(), serve_store()]
    leaver, stayer = (member_of(rank, (0, 1, 2), served[0][1]) for rank in (0, 1))
    for one in (leaver, stayer):
        one._addresses[1] = served[1][1]
        one._presence.hear([2])
    stayer.pause(Change((0,), {}))
    leaver.member = protocol.interrupt(leaver.member)
    with pytest.raises(LeftOutError, match="rank 0 counts as lost for others"):
        leaver.agree()
    stayer.agree()
    assert stayer.member.members == (1,)
    for one in (leaver, stayer):
        one.close()


@pytest.mark.parametrize("is_heard", [False, True])
@pytest.mark.parametrize(
    ("own", "error", "match"),
    [
        (Failure(1, 4, "a bad batch"), ElasticJobError, "^rank 1 failed 2 times, and must leave: "),
        (Failure(0, 4, "a bad batch"), LeftOutError, "as lost"),
        (None, LeftOutError, "as lost"),
    ],
    ids=["its own", "of another", "none"],
)
def test_a_rank_that_is_left_out_for_its_failures_says_so(
    pair: tuple[list[Membership], TCPStore],
    is_heard: bool,
    own: Failure | None,
    error: type[Exception],
    match: str,
):
    """The others may have agreed without it before it has read why."""
    (other, one), _store = pair
    one._failed_ranks[1] = 1
    one._failure = own
    for each in pair[0]:
        each.member = protocol.interrupt(each.member)
    if is_heard:
        one._presence.hear([1])
    else:
        other._presence.hear([1])
        other.agree()
        one._presence.ended.clear()
    with pytest.raises(error, match=match):
        one.agree()


def test_a_host_that_is_cut_off_is_not_waited_for_at_the_end(monkeypatch: pytest.MonkeyPatch):
    """A call of its store does not return; that of a process that has ended does."""
    monkeypatch.setattr(rank_stores, "_ANSWER_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as host:
        address = StoreAddress("127.0.0.1", host.getsockname()[1])
        for cut_off in (set[int](), {0}):
            one = member_of(1, (0, 1), address)
            presence = one._presence
            presence.cut_off, presence.ended = cut_off, {0} - cut_off
            with pytest.raises(StoreGoneError):
                one._ask(0, lambda keys: keys.has("report"))
            awaited = {connection._address for connection in rank_stores._connections}
            assert (address in awaited) == (not cut_off)
            rank_stores._connections.clear()


def test_a_connection_that_could_not_be_cloned_is_not_asked_again(
    pair: tuple[list[Membership], TCPStore],
):
    one = pair[0][0]

    def gone() -> None:
        with one._connected(0):
            raise StoreGoneError("it broke")

    assert not one._ask(0, lambda keys: keys.has("report"))
    before = one._connection
    with pytest.raises(StoreGoneError):
        gone()
    assert not one._ask(0, lambda keys: keys.has("report"))
    assert one._connection != before


@pytest.mark.parametrize("published", [0, 10])
def test_a_rank_that_nothing_ends_is_told(
    published: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """Its monitor has published so, whatever the setting says."""
    words = {Header.EXIT_S: published}
    monitor: Any = SimpleNamespace(
        buffer=SimpleNamespace(words=words), directory=SimpleNamespace(rank=3)
    )
    with caplog.at_level("WARNING"):
        membership._check_ends(monitor)
    assert ("rank 3 runs in a debugger, a notebook" in caplog.text) == (published == 0)
    monkeypatch.setattr(settings(), "exit_s", 0.0)
    with pytest.raises(LaunchEnvironmentError, match="SHARDMESH_EXIT_S=0"):
        membership._check_ends(monitor)


@pytest.mark.parametrize("has_store", [False, True])
def test_a_rank_that_is_and_stays_alone_needs_no_end(
    has_store: bool, monkeypatch: pytest.MonkeyPatch
):
    """With a store other processes may join it."""
    monkeypatch.setattr(settings(), "exit_s", 0.0)
    monkeypatch.setattr(membership, "default_store", lambda: object() if has_store else None)
    refused = pytest.raises(LaunchEnvironmentError, match="SHARDMESH_EXIT_S=0")
    with refused if has_store else contextlib.nullcontext():
        one = Membership(ProcessWorld(None, []), protocol.Write.LOCAL, lambda *_: ())
        one.close()


@pytest.mark.parametrize(
    ("exit_s", "seconds"), [(2.0, 1.6), (10.0, 8.0), (600.0, 8.0), (math.inf, 8.0), (0.0, 8.0)]
)
def test_groups_connect_before_watchdogs_end_their_ranks(exit_s: float, seconds: float):
    assert membership._connect_s(exit_s) == seconds


@pytest.mark.parametrize("silent_s", [1.0, 10.0, 60.0, math.inf])
def test_the_default_group_connects_before_other_hosts_give_its_ranks_up(silent_s: float):
    late_s = membership._patience(silent_s)[1]
    seconds = membership._start_s(late_s)
    assert 0 < seconds <= 30.0
    assert seconds < late_s


def test_a_rank_that_leaves_is_told_while_those_that_hang_are_ended(
    pair: tuple[list[Membership], TCPStore], monkeypatch: pytest.MonkeyPatch
):
    """It may be stopped itself, and then its store does not answer."""
    stayer = pair[0][1]
    calls: list[object] = []
    monkeypatch.setattr(stayer, "_suspend", lambda: calls.append("suspend"))
    monkeypatch.setattr(stayer, "_ask", lambda rank, _: calls.append(rank))
    stayer.pause(Change((0,), {}))
    assert calls == ["suspend", 0]
    assert stayer._presence.ended == {0}


def test_who_joins_has_a_number_that_no_member_knows(
    pair: tuple[list[Membership], TCPStore], monkeypatch: pytest.MonkeyPatch
):
    """One of them knows that of an epoch which no other one has begun."""
    told = {0: (False, [JOINER.to_json()], 1), 1: (True, [], 4)}
    monkeypatch.setattr(membership, "gather_facts", lambda *_: told)
    for one in pair[0]:
        one._world_members = (0, 1)
        one.world = SimpleNamespace(size=2, group=lambda _: None)  # type: ignore[assignment]
        monkeypatch.setattr(one, "_announced", list)
        assert one.who_changes(False) == Change((1,), {5: JOINER})


def test_a_process_is_taken_in_once():
    gone = JOINER._replace(token="1" * 16, info=replace(OTHER, born=OTHER.born + 1))
    assert newcomers([JOINER, JOINER, gone], (), [OWN]) == [JOINER]
    assert newcomers([JOINER], {JOINER.token}, [OWN]) == []
    assert newcomers([JOINER], (), [OWN, OTHER]) == []


def test_a_process_does_not_wait_for_a_job_that_listens_on_another_host_alone(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    far = FAR._replace(address=StoreAddress("127.0.0.1", free_port()))
    open_to_all = far._replace(address=StoreAddress("10.77.0.2", 9))
    joining._check_reachable({0: JOINER})
    joining._check_reachable({0: JOINER, 1: far})
    joining._check_reachable({0: open_to_all})
    with pytest.raises(LaunchEnvironmentError, match="on one other host, and reached from there"):
        joining._check_reachable({0: far, 1: far})
    # at the address of MASTER_ADDR, which that host knows as a loopback address
    _store, address = serve_store()
    joining._check_reachable({0: far, 1: far._replace(address=address)})


@pytest.mark.parametrize("begins", [False, True])
def test_a_process_that_joins_waits_for_the_first_store(
    begins: bool, monkeypatch: pytest.MonkeyPatch
):
    """It may be started before whoever serves it."""
    port = free_port()
    place = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(joining, "_TIMEOUT_S", 0.0)  # for the job to begin, once it is there
    if not begins:
        monkeypatch.setattr(joining, "_PATIENCE_S", 0.2)
    served: list[TCPStore] = []

    def serve() -> None:
        served.append(TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False))

    serving = threading.Timer(0.5, serve if begins else lambda: None)
    serving.start()
    match = "no elastic job has begun" if begins else "no job answers .*refused"
    with pytest.raises(LaunchEnvironmentError, match=match):
        joining.enter()
    serving.join()


def test_a_process_that_joins_is_reached_by_those_of_other_hosts_that_join_later(
    monkeypatch: pytest.MonkeyPatch,
):
    served: list[bool] = []
    monkeypatch.setattr(
        joining, "serve_store", lambda may_span_hosts: served.append(may_span_hosts)
    )
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    joining._serve({0: JOINER}, 2)
    joining._serve({0: JOINER, 1: FAR}, 2)
    joining._serve({0: JOINER}, 3)
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    joining._serve({0: JOINER}, 2)
    assert served == [False, True, True, True]


def test_a_process_announces_itself_to_ranks_behind_those_that_have_ended(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    store, address = serve_store()
    ended = StoreAddress("127.0.0.1", free_port())
    members = {rank: FAR._replace(address=ended) for rank in range(2 * joining._STORES)}
    members[len(members)] = FAR._replace(address=address)
    connected: list[StoreAddress] = []

    def connection(at: StoreAddress, prefix: str) -> Connection:
        connected.append(at)
        return Connection(at, prefix)

    monkeypatch.setattr(joining, "_members", lambda *_: members)
    monkeypatch.setattr(joining, "Connection", connection)
    keys = StoreKeys(store, f"{joining.KEYS}/job")
    keys.set(f"welcome/{JOINER.token}", WELCOME.to_json())
    registry: Any = None
    welcome = joining._wait_for_welcome(registry, "job", JOINER, time.monotonic() + 60.0)
    assert welcome == WELCOME
    assert connected == [address]
    assert joining.announced(store, "job") == [JOINER]


def test_the_address_of_a_store_that_its_host_knows_as_loopback(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MASTER_ADDR", "10.77.0.1")
    far = FAR.info
    loopback, other = StoreAddress("127.0.1.1", 9), StoreAddress("10.77.0.2", 9)
    assert joining.address_from_here(OTHER, loopback) == loopback
    assert joining.address_from_here(far, loopback) == StoreAddress("10.77.0.1", 9)
    assert joining.address_from_here(far, other) == other


@pytest.mark.parametrize(
    ("hosts", "size"),
    [
        ("aaaa", None),
        ("aabb", 2),
        ("aab", None),  # the environment of the last rank says nodes of one rank each
        ("abbcc", None),
        ("abbccc", None),  # and that of the middle ones says two
        ("abab", None),
        ("abc", 1),
    ],
)
def test_ranks_on_uneven_hosts_know_of_no_node_size(hosts: str, size: int | None):
    assert node_size(hosts) == size


@pytest.mark.parametrize(
    ("names", "hosts"),
    [
        ("aaa", None),
        ("aabb", None),  # the topology knows them
        ("aab", {0: 0, 1: 0, 2: 1}),
        ("abab", {0: 0, 1: 1, 2: 0, 3: 1}),
    ],
)
def test_hosts_that_no_topology_knows_are_those_of_the_processes(
    names: str, hosts: dict[int, int] | None
):
    """Ranks of the world are numbered anew; members have the numbers of the start."""
    members = tuple(range(2, 2 + len(names)))
    one = member_of(2, members, JOINER.address)
    one._world_members = members
    one._infos = {
        member: replace(OWN, machine=name) for member, name in zip(members, names, strict=True)
    }
    assert one.hosts() == hosts
