"""Steps and requests: ranks that are in different ones, and ranks that wait for the next one."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import shardmesh as sm
from shardmesh.mesh.comm.recording.recorder import step_bits
from shardmesh.mesh.comm.recording.trace_buffer import Header
from shardmesh.mesh.errors import CollectiveMismatchError
from shardmesh.mesh.monitor.diagnosis.members import agree, read_members
from tests.forked import Ended, Forked
from tests.mesh.monitor import step_ranks as programs
from tests.mesh.monitor.driven_ranks import DrivenRank, driven_ranks
from tests.tiers import slow

# -- simulated ranks -------------------------------------------------------------------------------


def all_reduces(steps: list[int | None], late: bool = False, **options: Any) -> None:
    """Mark a step of its own on each rank, None for none, and call the same collective."""
    mesh = sm.init_device_mesh("cpu", (len(steps),), axis_names=("tp",))
    step = steps[mesh.get_rank()]
    if step is not None:
        sm.monitor.mark_step(step, **options)
    mesh.group("tp").all_reduce(torch.ones(4))


def test_ranks_in_different_steps() -> None:
    with pytest.raises(
        CollectiveMismatchError, match="ranks call collectives of different steps"
    ) as caught:
        sm.simulate(4)(all_reduces)([7, 7, 8, None])
    assert caught.value.ranks == (2,)
    assert caught.value.verdict.field == "step"
    assert "ranks [0, 1] call all_reduce(sum, float32, 4 elements) in step 7" in str(caught.value)
    assert "ranks [2] call all_reduce(sum, float32, 4 elements) in step 8" in str(caught.value)


@pytest.mark.parametrize("steps", [[7, None, 7], [None, 3, None], [0, 0, 0]])
def test_rank_without_a_step_may_be_in_any(steps: list[int | None]) -> None:
    sm.simulate(3)(all_reduces)(steps)


def test_steps_that_are_not_to_be_compared() -> None:
    sm.simulate(3)(all_reduces)([1, 2, 3], compare=False)


# -- what is recorded ------------------------------------------------------------------------------


@pytest.fixture
def four(tmp_path: Path) -> list[DrivenRank]:
    return driven_ranks(tmp_path, 4)


def mark(rank: DrivenRank, step: int) -> None:
    rank.buffer.words[Header.STEP] = step
    rank.world.comm_context.origin = None, step_bits(step)


def last_agree(ranks: list[DrivenRank]) -> bool:
    recorder = ranks[0].recorder()
    return agree(read_members(ranks[0].monitor.directory, recorder, recorder.called - 1))


@pytest.mark.parametrize("step", [0, 1, 40_000, 1 << 40])
def test_steps_of_members(four: list[DrivenRank], step: int) -> None:
    for rank, own in zip(four, (step, step + 1, None, step), strict=True):
        if own is not None:
            mark(rank, own)
        rank.call()
    found = read_members(four[0].monitor.directory, four[0].recorder(), 0)
    assert [m.step for m in found] == [step, step + 1, None, step]
    verdict = four[0].diagnosed()
    assert verdict is not None
    assert (verdict.field, verdict.ranks) == ("step", (1,))
    lines = [line for line in verdict.text.splitlines() if line.startswith("  rank")]
    assert [
        f"in step {own} " in f"{line} " for own, line in zip((step + 1, step), lines, strict=False)
    ] == [True, True]
    assert "goes on to the next step" in " ".join(verdict.text.split())


def test_host_that_has_run_ahead(four: list[DrivenRank]) -> None:
    """Its last mark is not that of the collective."""
    for rank in four:
        mark(rank, 5 if rank.rank else 4)
        rank.call()
        rank.buffer.words[Header.STEP] = 900
    assert [m.step for m in read_members(four[0].monitor.directory, four[0].recorder(), 0)] == [
        4,
        5,
        5,
        5,
    ]


def test_other_call_without_a_step(four: list[DrivenRank]) -> None:
    """What differs is the operation, and the values are compared as well."""
    for rank in four:
        if rank.rank:
            mark(rank, 5)
        rank.call("all_gather" if rank.rank == 0 else "all_reduce")
    assert not last_agree(four)
    verdict = four[1].diagnosed()
    assert verdict is not None
    assert (verdict.field, verdict.ranks) == ("operation", (0,))
    for rank in four:
        rank.call(lineage=1 << 48 | 2 << 32 | 3 << 16 if rank.rank else 4 << 48 | 5 << 32 | 6 << 16)
    assert not last_agree(four)


def test_mark_of_another_thread(four: list[DrivenRank]) -> None:
    """A thread that saves a checkpoint in the background is in no step."""
    mark(four[0], 5)
    thread = threading.Thread(target=four[0].call)
    thread.start()
    thread.join()
    for rank in four[1:]:
        mark(rank, 6)
        rank.call()
    assert last_agree(four)


def test_steps_cost_no_text(four: list[DrivenRank]) -> None:
    """The same call in another step is not another one: texts never run out."""
    four[0].call()
    used = four[0].buffer.words[Header.TEXT_END]
    for step in range(1000):
        mark(four[0], step)
        four[0].call()
    assert four[0].buffer.words[Header.TEXT_END] == used


# -- processes -------------------------------------------------------------------------------------


def outputs(ended: list[Ended], status: int | None = 0) -> list[str]:
    """Return what the ranks have printed; None: they have failed, if only when gloo's threads
    ended.
    """
    statuses = [rank.status for rank in ended]
    printed = "\n".join(rank.output for rank in ended)
    if status is None:
        assert all(statuses), printed
    else:
        assert statuses == [status] * len(ended), printed
    return [" ".join(rank.output.split()) for rank in ended]


def test_request_that_fails_on_one_rank(forked: Forked) -> None:
    for output in outputs(forked(programs.serves_requests, 2, 2), status=None):
        assert "answered 0" in output
        assert "answered 1" not in output
        assert (
            "called different collectives, with equal votes, as number 5 of tp (ranks 0, 1): the "
            "step differs" in output
        )
        assert "rank 0: all_reduce(sum, float32, 4 elements) for" in output
        assert "in step 1 at " in output
        assert "in step 2 at " in output
        assert "step_ranks.py:36" in output


def test_outlier_of_three(forked: Forked) -> None:
    for output in outputs(forked(programs.serves_requests, 3, 3), status=1):
        assert "rank 1 called another collective than ranks 0, 2 as number 5 of tp" in output


def test_calls_of_torch(forked: Forked) -> None:
    for output in outputs(forked(programs.calls_torch, 3, 3), status=None):
        assert (
            "rank 1 called another collective than ranks 0, 2 as number 3 of torch's default group"
            in output
        )
        assert "the step differs" in output
        assert "rank 1: all_reduce(sum, float32, 4 elements) in step 3 at " in output


def test_messages_of_other_steps(forked: Forked) -> None:
    assert all("received" in output for output in outputs(forked(programs.sends_ahead, 2, 2)))


@pytest.mark.parametrize("how", [slow("returns"), "raises"])
def test_idle_rank_is_not_late(forked: Forked, how: str) -> None:
    """Neither the monitor's timeout nor that of the program's process groups ends the wait, which
    is longer than both.
    """
    for output in outputs(forked(programs.waits_for_work, 3, 3, how)):
        assert "request [0.0, 0.0] request [1.0, 1.0]" in output
        assert "have waited" not in output


def test_rank_that_is_late_after_it_was_idle(forked: Forked) -> None:
    for rank in forked(programs.waits_for_work, 2, 2, "then stalls"):
        assert "request [1.0, 1.0]" in rank.output
        assert "StallError" in rank.output


def test_rank_that_dies_while_another_is_idle(forked: Forked) -> None:
    idle, _ = forked(programs.dies_while_another_is_idle, 2, 2)
    assert "rank 1 died" in idle.output
