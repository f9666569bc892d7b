"""`run`: a training loop that goes on when ranks are lost."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ...mesh.device_mesh import DeviceMesh
from .job import Build, ElasticEvent, ElasticJob, MakeMesh

Step = Callable[[Any, Any, DeviceMesh], Any]
Data = Callable[[int, DeviceMesh], Any]


@dataclass
class ElasticRun:
    """What `run` returns.

    Attributes:
        state: the tree that `build` has returned, after the last step.
        mesh: the mesh of the last step.
        first_step: that of the checkpoint with which this run began, else 0.
        losses: one for each step from there.
        events: one for each time that the ranks were interrupted.
    """

    state: Any
    mesh: DeviceMesh
    first_step: int = 0
    losses: list[float] = field(default_factory=list)
    events: list[ElasticEvent] = field(default_factory=list)


def run(
    build: Build,
    step: Step,
    data: Data,
    *,
    make_mesh: MakeMesh,
    steps: int,
    min_ranks: int = 1,
    spares: int = 0,
    redundancy: int = 0,
    refresh_every: int = 1,
    checkpoint: str | os.PathLike[str] | None = None,
    save_every: int | None = None,
    keep: int | None = None,
) -> ElasticRun:
    """run(build, step, data, make_mesh=make_mesh, steps=1000) -> losses, events and the last state.

    Take `steps` steps. When a rank dies, hangs or cannot be reached, the others leave the step,
    agree on who is left, make process groups and mesh anew without restarting their processes, take
    over the last committed version of the state from each other, and go on (docs/elastic.md). A
    step that raises is taken again once. A rank that SIGTERM tells to go hands over what only it
    holds at the end of its step, and raises SystemExit. Processes that join the job become
    ranks at the end of a step: `sm.launch(..., elastic=True, restarts=1)` starts them.

    Args:
        build: (mesh) -> state: see `ElasticJob`.
        step: (state, batch, mesh) -> loss: forward, backward and `optimizer.step()`. See
            `ElasticJob.attempt` for what it may do after that.
        data: (index, mesh) -> this rank's part of the batch of step `index`, the same each time.
        make_mesh: (number of ranks) -> mesh.
        steps: how many.
        min_ranks: with fewer left the job ends.
        spares: how many ranks wait until they take the place of lost ones: see `ElasticJob`.
        redundancy: 1 for copies of each rank's parts on another host: see `ElasticJob`.
        refresh_every: after how many steps these are made.
        checkpoint: the folder of checkpoints: see `ElasticJob`.
        save_every: save one after so many steps; None for none.
        keep: how many to keep, as for `sm.checkpoint.save`; all by default.

    Raises: as `ElasticJob` and `ElasticJob.attempt`.

    Communication: in each step an all_to_all of 4 bytes to each other rank; a barrier at the end.

    Example:
        >>> run = sm.elastic.run(build, step, data, make_mesh=make_mesh, steps=1000)
        >>> run.losses, run.events
    """
    if save_every is not None and (checkpoint is None or save_every < 1):
        raise ValueError(
            f"run(save_every={save_every}): write a positive number of steps, and checkpoint=folder"
        )
    job = ElasticJob(
        build,
        make_mesh=make_mesh,
        min_ranks=min_ranks,
        spares=spares,
        redundancy=redundancy,
        refresh_every=refresh_every,
        checkpoint=checkpoint,
    )
    try:
        while not job.has_left and (job.step < steps or not job.finish()):
            before = job.step
            with job.attempt() as attempt:
                if not job.is_spare:
                    batch = data(job.step, job.mesh)
                    attempt.loss = step(job.state, batch, job.mesh)
            is_due = save_every is not None and job.step > before and job.step % save_every == 0
            if is_due and not job.has_left:
                job.save(keep=keep)
    finally:
        job.close()
    return ElasticRun(job.state, job.mesh, job.first_step, job.losses, job.events)
