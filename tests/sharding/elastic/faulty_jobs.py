"""Jobs of processes in which ranks fail, and what comes of them.

What a job does is compared with jobs without faults, one for each mesh: each begins with what the
one before has saved, and has as many ranks as the mesh.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.forked import Ended, Forked, by_hand
from tests.sharding.elastic.faulty_ranks import STEPS, Fault, train, train_part

LIMIT_S = 200.0
STALL_S = "20"  # after which a rank that is stopped counts as hung: healthy ones may be slow here
SAVE_EVERY = 2  # as of `train`


@dataclass(frozen=True)
class Plan:
    """A job and its faults.

    Attributes:
        size: how many ranks begin it.
        form: of parallelism.
        faults: of these ranks.
        spares, redundancy: as of `run`.
        saves: whether it saves checkpoints.
        joins_after: the step after which a process joins; None if none does.
        faults_of_joining: of that process, whose number at the start is `size`.
    """

    size: int
    form: str
    faults: list[Fault] = field(default_factory=list)
    spares: int = 0
    redundancy: int = 0
    saves: bool = False
    joins_after: int | None = None
    faults_of_joining: list[Fault] = field(default_factory=list)

    def mesh_size(self, ranks: int) -> int:
        """Return how many of the members are in the mesh."""
        return min(ranks, max(self.size, ranks) - self.spares)

    def may_lose_state(self, failed: set[int]) -> bool:
        """Return whether these ranks may have held together what no other one had."""
        faults = self.faults
        is_together = len(faults) > 1 and faults[0][1] == faults[-1][1] and faults[-1][2] != "again"
        if self.form == "fsdp" and self.saves:
            return min(step for _, step, *_ in faults) < SAVE_EVERY
        if self.form == "fsdp":
            return is_together
        pairs: list[list[int]] = []  # that hold the same alone
        if self.size == 4 and self.form in ("hsdp", "tp", "two", "accumulated"):
            pairs = [[0, 2], [1, 3]]
        elif self.size == 4 and self.form == "pp":
            pairs = [[0, 1], [2, 3]]
        return is_together and sorted(failed) in pairs


# -- what came of it -------------------------------------------------------------------------------


def ends(form: str, fault: Fault, output: str) -> bool:
    """Return whether a fault has ended its rank, by what the rank has printed: one that raises
    while its optimizer writes without an undo copy can neither complete the step nor undo it.
    """
    _, step, place, kind = fault
    if kind == "await" or f"fault: {kind} in {place} of step {step}" not in output:
        return False
    return kind != "raise" or (form != "two" and place in ("write", "after"))


def run_plan(forked: Forked, job: Plan, folder: Path) -> list[Ended]:
    checkpoint = str(folder / "saved") if job.saves else ""
    more = checkpoint, job.spares, job.redundancy
    args = [(job.form, list(map(list, job.faults)), *more)] * job.size
    files = forked.new_folder("watch")
    env = by_hand(
        job.size,
        LOCAL_WORLD_SIZE=str(job.size),
        SHARDMESH_WATCH_DIR=str(files),
        SHARDMESH_STALL_TIMEOUT_S=STALL_S,
    )
    if job.joins_after is not None:
        args.append((job.form, list(map(list, job.faults_of_joining)), *more))
        env.append({**env[0], "SHARDMESH_ELASTIC_JOIN": "1"})
    return forked.run(train, args, env, forked.new_folder(), limit_s=LIMIT_S)


def segments_of(job: Plan, events: Sequence[Sequence[Any]]) -> list[tuple[int, int]]:
    """Return from which steps on which numbers of ranks are in the mesh.

    Steps that the job has gone back behind are not among them.
    """
    segments = [(0, job.mesh_size(job.size))]
    for step, _, ranks, _ in events:
        while segments and segments[-1][0] >= step:
            segments.pop()
        segments.append((step, job.mesh_size(len(ranks))))
    return segments


def replay_parts(
    forked: Forked, form: str, segments: Sequence[tuple[int, int]], folder: Path
) -> tuple[list[float], dict[str, str]]:
    """Return losses, and the hashes at the end, of jobs without faults on these meshes."""
    losses: list[float] = []
    hashes: dict[str, str] = {}
    ends_of = [step for step, _ in segments[1:]] + [STEPS]
    for (first, size), last in zip(segments, ends_of, strict=True):
        ended = forked(train_part, size, form, first, last, str(folder), limit_s=LIMIT_S)
        assert ended[0].value is not None, ended[0].output
        losses += ended[0].value["losses"]
        hashes = ended[0].value["hashes"]
    return losses, hashes


def check(job: Plan, ended: Sequence[Ended], forked: Forked, folder: Path) -> None:
    printed = "\n".join(f"--- rank {rank}\n{one.output}" for rank, one in enumerate(ended))
    faults = [*job.faults, *((job.size, *fault[1:]) for fault in job.faults_of_joining)]
    failed = {f[0] for f in faults if f[3] != "await"}
    if any("StateLostError" in one.output for one in ended):
        assert job.may_lose_state(failed), printed
        for rank, one in enumerate(ended):
            if rank not in failed:
                assert (one.status, "StateLostError: after step" in one.output) == (1, True), (
                    printed
                )
        return
    dead = {fault[0] for fault in faults if ends(job.form, fault, ended[fault[0]].output)}
    if job.joins_after is not None and 0 in dead and ended[-1].status == 1:
        # the store by which it joins has ended with rank 0, before it was a member
        assert "LaunchEnvironmentError: " in ended[-1].output, printed
        dead.add(job.size)
    for rank, one in enumerate(ended):
        assert (one.status == 0) == (rank not in dead), printed
    left = [rank for rank in range(len(ended)) if rank not in dead]
    values = [ended[rank].value for rank in left]
    events = values[0]["events"]
    assert (events[-1][2] if events else list(range(job.size))) == left, printed
    losses, hashes = replay_parts(forked, job.form, segments_of(job, events), folder)
    for value in values:
        own = value["events"]
        assert [event[:3] for event in own] == [event[:3] for event in events[-len(own) :]], printed
        if value["hashes"]:  # not a spare
            assert value["losses"] == losses, printed
            assert value["hashes"] == hashes, printed
