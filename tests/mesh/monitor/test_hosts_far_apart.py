"""Hosts that are hundreds of collectives apart, as those of GPUs may be: the same verdicts as where
each host waits.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shardmesh.mesh import errors
from shardmesh.mesh.comm.recording.trace_buffer import LONG_ROWS, SLOTS
from shardmesh.mesh.monitor.diagnosis.members import read_members
from shardmesh.mesh.monitor.hosts.mirror import BufferSource, make_copy
from shardmesh.mesh.settings import settings
from tests.mesh.monitor.driven_ranks import DrivenRank, driven_ranks

AHEAD, WRONG = 300, 57


@pytest.fixture
def four(tmp_path: Path) -> list[DrivenRank]:
    return driven_ranks(tmp_path, 4)


def lineage_of(sequence: int) -> int:
    return (sequence + 1) * (1 << 48 | 1 << 32 | 1 << 16)


def recorded_call(rank: DrivenRank, lineage: int = 0) -> None:
    """Call a collective with this rank's monitor, which compares."""
    recorder = next(iter(rank.monitor.recorders), None) or rank.monitor.add_recorder(
        rank.world.group(rank.everyone)
    )
    rank.world.comm_context.lineage = lineage
    recorder.enter("all_reduce", "sum", torch.float32, 4, 16, 16)


@pytest.mark.parametrize("groups", [0, LONG_ROWS])
@pytest.mark.parametrize("kind", ["differs", "skips"])
def test_a_rank_that_is_far_behind_finds_the_difference(
    kind: str, groups: int, four: list[DrivenRank]
) -> None:
    ahead = AHEAD if not groups else SLOTS - 1  # groups beyond the first ones have shorter rows
    for number in range(groups):
        four[1].call(ranks=(1, 2), size=number + 1)
        four[1].buffer.add_group(number + 1, "another\t1")
    for sequence in range(WRONG + ahead):
        for rank in four[1:]:
            is_wrong = rank.rank == 2 and (
                sequence == WRONG if kind == "differs" else sequence >= WRONG
            )
            how = "max" if is_wrong and kind == "differs" else "sum"
            rank.call(
                how=how,
                lineage=lineage_of(sequence + 1 if is_wrong and kind == "skips" else sequence),
            )
    with pytest.raises(
        errors.CollectiveMismatchError,
        match=f"rank 2 called another collective than .* as number {WRONG} of",
    ) as caught:
        for sequence in range(WRONG + ahead):
            recorded_call(four[0], lineage_of(sequence))
    assert four[0].monitor.recorders[0].called == WRONG + 1, "not later"
    assert (caught.value.ranks, caught.value.verdict.field) == (
        (2,),
        "reduction" if kind == "differs" else "lineage",
    )


def run_ahead(four: list[DrivenRank]) -> None:
    """Let rank 2 stop after some collectives that the others have called long ago."""
    for rank in four[1:]:
        for _ in range(WRONG if rank.rank == 2 else WRONG + AHEAD):
            rank.call()
    for _ in range(WRONG + AHEAD):
        recorded_call(four[0])


def test_a_rank_that_dies_is_missed_where_the_devices_wait(four: list[DrivenRank]) -> None:
    run_ahead(four)
    four[2].die()
    for _ in range(2):
        four[0].monitor.watchdog._tick()
    verdict = four[0].monitor.standing()
    assert verdict is not None
    assert (verdict.kind, verdict.ranks) == ("lost", (2,))
    assert f"rank 2 died, while ranks 0, 1, 3 wait in number {WRONG} of" in verdict.text


def test_a_rank_that_hangs_is_missed_where_the_devices_wait(
    four: list[DrivenRank], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_ahead(four)
    monkeypatch.setattr(settings(), "warn", 1e-9)
    for _ in range(3):
        four[0].monitor.watchdog._tick()
    assert f"for rank 2 in number {WRONG} of" in capsys.readouterr().err
    monkeypatch.setattr(settings(), "timeout", 1e-9)
    four[0].monitor.watchdog._tick()
    verdict = four[0].monitor.standing()
    assert verdict is not None
    assert (verdict.kind, verdict.ranks) == ("stall", (2,))
    assert f"for rank 2 in number {WRONG} of" in verdict.text


def test_a_copy_of_a_rank_that_ran_far_ahead_is_behind_in_no_collective(
    four: list[DrivenRank], tmp_path: Path
) -> None:
    """Between two exchanges a rank may call more than are sent: what it called then is unknown, but
    not missing.
    """
    four[0].call()
    source, copy = BufferSource(four[1].buffer), make_copy(tmp_path / "copy.trace")
    for count in (100, 900):
        for _ in range(count):
            four[0].call()
            four[1].call()
        copy.write(source.changed_parts(), source.versions)
    directory = four[0].monitor.directory
    directory._buffers[1] = copy.buffer
    came = [
        read_members(four[0].monitor.directory, four[0].recorder(), sequence)[1].came
        for sequence in range(1001)
    ]
    assert False not in came[:1000]
    assert (came[1000], came[999], came[500]) == (False, True, None)
