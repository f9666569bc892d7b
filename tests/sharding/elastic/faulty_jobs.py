"""Jobs of processes in which ranks fail, and what comes of them.

What a job does is compared with jobs without faults, one for each mesh: each begins with what the
one before has saved, and has as many ranks as the mesh.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

import shardmesh as sm
from tests.forked import Ended, Forked, by_hand
from tests.sharding.elastic.faulty_ranks import LOST, STEPS, Fault, shape_for, train, train_from

LIMIT_S = 200.0
STALL_S = "15"  # after which a rank that is stopped counts as hung: healthy ones may be slow here
EXIT_S = "8"  # of which 0.8 pass until such a rank is ended
SAVE_EVERY = 2  # as of `train`

Segments = tuple[tuple[int, int], ...]  # (step, number of ranks from there on)


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
        holds: whether ranks that have finished wait for the others and are ended; the end of an
            interpreter takes as much time as all the rest.
    """

    size: int
    form: str
    faults: list[Fault] = field(default_factory=list)
    spares: int = 0
    redundancy: int = 0
    saves: bool = False
    joins_after: int | None = None
    faults_of_joining: list[Fault] = field(default_factory=list)
    holds: bool = False

    def mesh_size(self, ranks: int) -> int:
        """Return how many of the members are in the mesh."""
        return min(ranks, max(self.size, ranks) - self.spares)

    def loses_state(self, before: Sequence[int], left: Sequence[int]) -> bool:
        """Return whether the ranks that are left lack a part of the state, copies included.

        Args:
            before: the members, of whose mesh the state is.
            left: those that go on.
        """
        size = self.mesh_size(len(before))
        holders = holders_of_parts(self.form, size)
        if self.redundancy:  # on one host the next rank has a copy
            holders = [{*ranks, *((rank + 1) % size for rank in ranks)} for ranks in holders]
        numbers = {number for number in range(size) if before[number] in left}
        return any(ranks.isdisjoint(numbers) for ranks in holders)


def holders_of_parts(form: str, size: int) -> list[set[int]]:
    """Return which ranks of a mesh hold the same part of the state, for each part."""
    if form in ("ddp", "fsdp"):
        return [set(range(size))] if form == "ddp" else [{rank} for rank in range(size)]
    grid = np.arange(size).reshape(shape_for(form, size))
    return [set(ranks.tolist()) for ranks in (grid if form == "pp" else grid.T)]


# -- what came of it -------------------------------------------------------------------------------


def happened(job: Plan, ended: Sequence[Ended]) -> list[Fault]:
    """Return the faults that ranks have come to, as they have printed."""
    faults = [*job.faults, *((job.size, *fault[1:]) for fault in job.faults_of_joining)]
    return [
        (rank, step, place, kind)
        for rank, step, place, kind in faults
        if kind != "await" and f"fault: {kind} in {place} of step {step}" in ended[rank].output
    ]


def ended_by(job: Plan, ended: Sequence[Ended]) -> list[Fault]:
    """Return the faults that have ended their ranks.

    One that is stopped goes on where all other processes of its host have ended or are stopped:
    `Forked` resumes it. One that raises while its optimizer writes without an undo copy can neither
    complete the step nor undo it; nor can one that raises in the agreement after its vote.
    """
    return [
        (rank, step, place, kind)
        for rank, step, place, kind in happened(job, ended)
        if kind in ("kill", "exit")
        or (kind == "stop" and ended[rank].value is None)
        or (kind == "raise" and job.form != "two" and place in ("write", "after"))
        or (kind == "raise" and place == "agree" and "in _before_write" in ended[rank].output)
    ]


def text_of(faults: Sequence[Fault]) -> str:
    return ", ".join(
        f"{kind} in {place} of step {step} on rank {rank}" for rank, step, place, kind in faults
    )


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
        SHARDMESH_EXIT_S=EXIT_S,
    )
    if job.joins_after is not None:
        args.append((job.form, list(map(list, job.faults_of_joining)), *more))
        env.append({**env[0], "SHARDMESH_ELASTIC_JOIN": "1"})
    return forked.run(train, args, env, forked.new_folder(), limit_s=LIMIT_S, holds=job.holds)


def segments_of(job: Plan, events: Sequence[Sequence[Any]]) -> Segments:
    """Return from which steps on which numbers of ranks are in the mesh.

    Steps that the job has gone back behind are not among them.
    """
    segments = [(0, job.mesh_size(job.size))]
    for step, _, ranks, _ in events:
        while segments and segments[-1][0] >= step:
            segments.pop()
        segments.append((step, job.mesh_size(len(ranks))))
    return tuple(segments)


class Replays:
    """Jobs without faults, one for each mesh, each from what the one before has saved.

    Each of them goes on to the last step and saves every step, so it is run once for all schedules
    that begin like it. Safe for several threads.

    Args:
        folder: for what they save.
    """

    def __init__(self, forked: Forked, folder: Path) -> None:
        self._forked, self._folder = forked, folder
        self._lock = Lock()
        self._results: dict[tuple[str, Segments], Future[dict[str, Any]]] = {}

    def run(self, form: str, segments: Segments) -> tuple[list[float], dict[str, str]]:
        """Return losses, and the hashes at the end, on the meshes of these segments."""
        losses: list[float] = []
        hashes: dict[str, str] = {}
        ends_of = [step for step, _ in segments[1:]] + [STEPS]
        for number, ((first, _), last) in enumerate(zip(segments, ends_of, strict=True), 1):
            result = self._result(form, segments[:number])
            losses += result["losses"][: last - first]
            hashes = result["hashes"]
        return losses, hashes

    def _result(self, form: str, segments: Segments) -> dict[str, Any]:
        """Return losses and hashes of the job of the last of these segments."""
        with self._lock:
            known = self._results.get((form, segments))
            result = self._results[form, segments] = known or Future()
        if known is None:
            try:
                result.set_result(self._run(form, segments))
            except BaseException as error:
                result.set_exception(error)
        return result.result()

    def _run(self, form: str, segments: Segments) -> dict[str, Any]:
        first, size = segments[-1]
        folders = [str(self._folder / name_of(form, part)) for part in (segments[:-1], segments)]
        args = [(form, first, *folders)] * size
        folder = self._forked.new_folder()
        watch = self._forked.new_folder("watch")
        env = by_hand(size, LOCAL_WORLD_SIZE=str(size), SHARDMESH_WATCH_DIR=str(watch))
        ended = self._forked.run(train_from, args, env, folder, limit_s=LIMIT_S, holds=True)
        assert ended[0].value is not None, ended[0].output
        return ended[0].value


def name_of(form: str, segments: Segments) -> str:
    return "-".join([form, *(f"{step}.{size}" for step, size in segments)])


def check(
    job: Plan,
    ended: Sequence[Ended],
    replays: Replays,
    saved: Path | None = None,
    cut_off: Collection[int] = (),
) -> None:
    """Compare what has come of a job with jobs without faults on the same meshes.

    Args:
        saved: the folder of its checkpoints, if it has one.
        cut_off: ranks that had to end since they did not reach the others.
    """
    printed = "\n".join(f"--- rank {rank}\n{one.output}" for rank, one in enumerate(ended))
    dead = {rank for rank, *_ in ended_by(job, ended)} | set(cut_off)
    if any(LOST in one.output for one in ended):
        told = {line for one in ended for line in one.output.splitlines() if LOST in line}
        (line,) = told
        before, left = json.loads(line.removeprefix(LOST))
        assert job.loses_state(before, left), printed
        assert saved is None or sm.checkpoint.latest(saved) is None, printed
        for rank, one in enumerate(ended):
            is_lost = one.status == 1 and "StateLostError: after step" in one.output
            assert is_lost or rank in dead, printed
        return
    if job.joins_after is not None and 0 in dead and ended[-1].status == 1:
        # the store by which it joins has ended with rank 0, before it was a member
        assert "LaunchEnvironmentError: " in ended[-1].output, printed
        dead.add(job.size)
    for rank, one in enumerate(ended):
        has_finished = one.value is not None and one.status == (None if job.holds else 0)
        assert has_finished == (rank not in dead), printed
    left = [rank for rank in range(len(ended)) if rank not in dead]
    values = [ended[rank].value for rank in left]
    events = values[0]["events"]
    assert (events[-1][2] if events else list(range(job.size))) == left, printed
    losses, hashes = replays.run(job.form, segments_of(job, events))
    for value in values:
        own = value["events"]
        assert [event[:3] for event in own] == [event[:3] for event in events[-len(own) :]], printed
        if value["hashes"]:  # not a spare
            assert value["losses"] == losses, printed
            assert value["hashes"] == hashes, printed
