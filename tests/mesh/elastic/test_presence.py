"""Ranks of other hosts: what the port of their store says, and what that proves."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace

import pytest

from shardmesh.mesh.elastic import presence as presence_module
from shardmesh.mesh.elastic.presence import Answer, Presence, ask
from shardmesh.mesh.elastic.rank_stores import StoreAddress, seen_from_here, serve_store
from shardmesh.mesh.monitor.startup.rank_info import own_rank_info
from tests.forked import free_port

HOSTS = ["", "", "b", "b", "c"]  # of the ranks; "" is this one
SILENT_S, LATE_S = 4.0, 9.0


class Elsewhere:
    """Other hosts, and the time.

    Attributes:
        answers: what the host of a rank answers.
        asked: which ranks were asked.
        probe_s: seconds that a probe takes.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answers: dict[int, Answer] = {}
        self.asked: list[int] = []
        self.now = 1000.0
        self.probe_s = 0.0
        monkeypatch.setattr(presence_module, "ask", self.ask)
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        own = own_rank_info(0, {}, 0, {})
        infos = {r: replace(own, rank=r, machine=h or own.machine) for r, h in enumerate(HOSTS)}
        addresses = {rank: StoreAddress("10.0.0.1", rank) for rank in infos}
        self.presence = Presence(0, infos, addresses)
        self.presence.silent_s, self.presence.late_s = SILENT_S, LATE_S

    def ask(self, addresses: Mapping[int, StoreAddress]) -> dict[int, Answer]:
        self.asked += addresses
        self.now += self.probe_s
        return {rank: self.answers.get(rank, Answer.THERE) for rank in addresses}

    def look(self, ranks: list[int], seconds: float) -> None:
        """Look at ranks for some seconds, as a wait does."""
        for _ in range(round(seconds / 0.1)):
            self.now += 0.1
            self.presence.look(ranks)


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[Elsewhere]:
    with monkeypatch.context() as patch:
        yield Elsewhere(patch)


def test_a_host_refuses_connections_to_a_store_that_has_ended(monkeypatch: pytest.MonkeyPatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        there = StoreAddress("127.0.0.1", server.getsockname()[1])
        ended = StoreAddress("127.0.0.1", free_port())
        assert ask({0: there, 1: ended}) == {0: Answer.THERE, 1: Answer.ENDED}
    assert ask({0: there}) == {0: Answer.ENDED}
    monkeypatch.setattr(presence_module, "_PROBE_S", 0.1)
    nowhere = StoreAddress("255.255.255.255", 9)
    assert ask({0: nowhere}) == {0: Answer.NONE}


def test_a_process_that_was_heard_of_and_has_ended_has_not_gone_on(elsewhere: Elsewhere):
    presence = elsewhere.presence
    elsewhere.look([1, 2, 3], 3.0)
    assert set(elsewhere.asked) == {2, 3}
    assert len(elsewhere.asked) == 12  # each twice a second
    elsewhere.answers[3] = Answer.ENDED
    elsewhere.look([1, 2, 3], 1.0)
    assert (presence.ended, presence.cut_off) == ({3}, set())


def test_one_that_ends_long_after_may_have_gone_on_before(elsewhere: Elsewhere):
    """As others of a job see it whose host was stopped for an hour."""
    elsewhere.look([2], 1.0)
    elsewhere.now += 3600
    elsewhere.answers = dict.fromkeys([2, 3], Answer.ENDED)
    elsewhere.presence.suspect([2, 3])
    assert (elsewhere.presence.ended, elsewhere.presence.cut_off) == (set(), {2, 3})


def test_the_monitor_may_have_heard_of_it(elsewhere: Elsewhere):
    elsewhere.now += 3600
    elsewhere.answers = dict.fromkeys([2, 3], Answer.ENDED)
    elsewhere.presence.note_heard(3, elsewhere.now - 1.0)
    elsewhere.presence.suspect([2, 3])
    assert (elsewhere.presence.ended, elsewhere.presence.cut_off) == ({3}, {2})


def test_a_silent_host_is_cut_off_with_all_of_its_ranks(elsewhere: Elsewhere):
    elsewhere.answers[2] = Answer.NONE
    elsewhere.look([2], SILENT_S - 1)
    assert not elsewhere.presence.gone
    elsewhere.look([2], 2.0)
    assert elsewhere.presence.cut_off == {2, 3}


def test_the_time_of_a_probe_without_an_answer_counts(elsewhere: Elsewhere):
    elsewhere.answers[2] = Answer.NONE
    elsewhere.probe_s = 1.0
    start = elsewhere.now
    while not elsewhere.presence.gone:
        elsewhere.now += 0.1
        elsewhere.presence.look([2])
    assert elsewhere.now - start < SILENT_S + 2.5


def test_silence_begins_anew_after_an_answer(elsewhere: Elsewhere):
    for _ in range(3):
        elsewhere.answers[2] = Answer.NONE
        elsewhere.look([2], SILENT_S - 1)
        elsewhere.answers[2] = Answer.THERE
        elsewhere.look([2], 1.0)
    assert not elsewhere.presence.gone


def test_time_in_which_this_process_was_stopped_does_not_count(elsewhere: Elsewhere):
    elsewhere.answers[2] = Answer.NONE
    for _ in range(3):
        elsewhere.now += 100.0
        elsewhere.presence.look([2])
    assert not elsewhere.presence.gone


def test_the_monitor_alone_does_not_cut_off_a_rank_that_is_there(elsewhere: Elsewhere):
    """It hears of all ranks of a host by a store that may have ended with another one."""
    elsewhere.answers = {2: Answer.NONE}
    elsewhere.presence.suspect([2, 4])
    assert elsewhere.presence.cut_off == {2}


def test_a_rank_that_is_there_and_does_nothing_is_late(elsewhere: Elsewhere):
    presence = elsewhere.presence
    since = dict.fromkeys([1, 2], presence.clock)
    elsewhere.look([1, 2], LATE_S - 1)
    presence.give_up_late(since)
    assert not presence.gone
    elsewhere.look([1, 2], 2.0)
    presence.give_up_late(since)
    assert presence.cut_off == {2}  # what hangs on this host is ended


def test_what_others_have_seen_is_taken_over(elsewhere: Elsewhere):
    elsewhere.presence.hear([3, 4, 77])
    assert elsewhere.presence.ended == {3, 4}
    elsewhere.look([3, 4], 1.0)
    assert not elsewhere.asked


def test_a_store_is_at_an_address_that_other_hosts_reach(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    _server, address = serve_store(True)
    assert address.host == "127.0.0.1"
    monkeypatch.setattr("shardmesh.mesh.elastic.rank_stores.resolved", lambda *_: ("10.1.2.3",))
    assert seen_from_here(address) == StoreAddress("10.1.2.3", address.port)
    assert seen_from_here(StoreAddress("10.9.9.9", 5)) == StoreAddress("10.9.9.9", 5)
