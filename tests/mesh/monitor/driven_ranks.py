"""Ranks of a job that a test drives in one process: each has a trace buffer that the others read.

ranks = driven_ranks(tmp_path, 4)
ranks[0].call("all_reduce")          rank 0 calls its collective number 0 of the group of all ranks
ranks[0].diagnosed()                 the verdict of its monitor, from the trace buffers
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from shardmesh.mesh.comm.null import NullWorld
from shardmesh.mesh.comm.recording.recorder import CommTag, Recorder
from shardmesh.mesh.comm.recording.trace_buffer import Header, RankState
from shardmesh.mesh.monitor.diagnosis import diagnose
from shardmesh.mesh.monitor.monitor import Monitor
from shardmesh.mesh.monitor.recording.job_directory import JobDirectory
from shardmesh.mesh.monitor.verdict import Verdict
from shardmesh.mesh.settings import monotonic_ns

JOB = "driven"


class DrivenRank:
    """One rank."""

    def __init__(self, rank: int, size: int) -> None:
        self.world = NullWorld(rank, size)
        self.monitor = Monitor(self.world, JobDirectory(JOB, rank, size))
        self.rank, self.buffer, self.everyone = rank, self.monitor.buffer, tuple(range(size))
        self._recorders: dict[tuple[int, ...], Recorder] = {}

    def recorder(self, ranks: tuple[int, ...] | None = None) -> Recorder:
        """Return the recorder of its collectives, which waits for no other rank."""
        ranks = self.everyone if ranks is None else ranks
        if ranks not in self._recorders:
            self._recorders[ranks] = Recorder(self.world.group(ranks), self.buffer, None)
        return self._recorders[ranks]

    def call(
        self,
        op: str = "all_reduce",
        how: str = "sum",
        dtype: torch.dtype = torch.float32,
        size: int = 4,
        *,
        ranks: tuple[int, ...] | None = None,
        lineage: int = 0,
        tag: str = "",
        route: int = 0,
        moved: int = 16,
    ) -> int:
        """Call a collective; return the number of its record."""
        self.world.comm_context.lineage = lineage
        return self.recorder(ranks).enter(
            op, how, dtype, size, moved, moved, CommTag.of(tag) if tag else None, route
        )

    def block(self, record: int, seconds: float = 10.0) -> None:
        """Mark its main thread as waiting in the collective of this record for this long."""
        words = self.buffer.words
        words[Header.BLOCKED_SINCE], words[Header.BLOCKED] = (
            monotonic_ns() - int(seconds * 1e9),
            record + 1,
        )

    def die(self) -> None:
        """Replace its process number by another than that of the trace buffer."""
        self.buffer.words[Header.BORN] += 1

    def end(self, state: int = RankState.ENDED) -> None:
        self.buffer.words[Header.STATE] = state

    def diagnosed(
        self, sequence: int = 0, ranks: tuple[int, ...] | None = None, waited: float = 0.0
    ) -> Verdict | None:
        """Return the verdict on a collective in which this rank has waited for this many
        seconds.
        """
        return diagnose.diagnose(
            self.monitor, self.recorder(ranks), sequence, monotonic_ns() - int(waited * 1e9)
        )


def driven_ranks(folder: Path, size: int) -> list[DrivenRank]:
    """Return the ranks of a job whose files are in this folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHARDMESH_WATCH_DIR", str(folder))
        return [DrivenRank(rank, size) for rank in range(size)]
