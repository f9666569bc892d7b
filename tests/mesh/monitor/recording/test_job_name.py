"""The name of a job: equal on all its ranks and different in each attempt, whatever earlier
attempts left in the store.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from torch.distributed import HashStore

from shardmesh.mesh.monitor.startup import job_name
from shardmesh.mesh.monitor.startup.rank_info import RankInfo, machine, own_rank_info

NOBODY = 2**22 + 5  # no process has that number


@pytest.fixture(autouse=True)
def _first_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_name, "_joined", job_name.Counter())
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "1")


def info(rank: int, pid: int, here: bool = True) -> RankInfo:
    return RankInfo(rank, "host", pid, machine() if here else "another", 1, 0, "", {})


def names(store: Any, infos: Sequence[RankInfo], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names found by these processes, one after the other."""
    found = []
    for one in infos:
        monkeypatch.setattr(job_name, "own_rank_info", lambda *_, one=one: one)
        monkeypatch.setattr(job_name, "_joined", job_name.Counter())
        name = job_name.find_name(store, one.rank)
        assert name is not None
        found.append(name[0])
    return found


@pytest.fixture
def alive(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Numbers of processes that live."""
    living: set[int] = set()
    monkeypatch.setattr(
        RankInfo, "is_gone", lambda self: self.machine == machine() and self.pid not in living
    )
    return living


def test_all_ranks_find_the_same_name(monkeypatch: pytest.MonkeyPatch, alive: set[int]) -> None:
    alive |= {10, 11, 12}
    assert len(set(names(HashStore(), [info(r, 10 + r) for r in range(3)], monkeypatch))) == 1


@pytest.mark.parametrize("came", [{0, 1, 2}, {0}, {2}, {0, 1}, set()])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_next_attempt_finds_another_name(
    monkeypatch: pytest.MonkeyPatch, alive: set[int], came: set[int], order: Sequence[int]
) -> None:
    """Also if some ranks of the first attempt never arrived."""
    store = HashStore()
    alive |= {10, 11, 12}
    first = names(store, [info(r, 10 + r) for r in came], monkeypatch)
    alive -= {10, 11, 12}
    alive |= {20, 21, 22}
    again = names(store, [info(r, 20 + r) for r in order], monkeypatch)
    assert len(set(again)) == 1
    assert not set(first) & set(again)


def test_ranks_of_another_host_are_identified_by_their_rank_info(
    monkeypatch: pytest.MonkeyPatch, alive: set[int]
) -> None:
    store = HashStore()
    alive |= {20, 21}
    first = names(store, [info(0, 10, here=False), info(1, 11, here=False)], monkeypatch)
    again = names(store, [info(0, 20, here=False), info(1, 21, here=False)], monkeypatch)
    assert again[0] == again[1] != first[0]


def test_successive_default_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    store = HashStore()
    found = [job_name.find_name(store, 0) for _ in range(3)]
    first = found[0]
    assert first is not None
    assert found == [(first[0] + end, first[1]) for end in ("", "-2", "-3")]


def test_earlier_ranks_learn_that_the_name_is_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank on a host without files of the first attempt cannot know."""
    store = HashStore()
    found = job_name.find_name(store, 0)
    assert found is not None
    assert not store.check([found[1]])
    other = replace(own_rank_info(1, {}, 0, os.environ), pid=NOBODY)
    store.set("shardmesh/job/0/rank1", other.to_json())
    again = job_name.find_name(store, 1)
    assert again is not None
    assert again[0] != found[0]
    assert store.check([found[1]])


def test_store_that_keeps_nothing() -> None:
    class Fake:
        def compare_set(self, *_: Any) -> bytes:
            raise RuntimeError("not supported")

    assert job_name.find_name(Fake(), 0) is None
