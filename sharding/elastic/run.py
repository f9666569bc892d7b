"""`run`: a training loop that goes on when ranks are lost."""

from __future__ import annotations

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
        losses: one for each step.
        events: one for each time that the ranks were interrupted.
    """

    state: Any
    mesh: DeviceMesh
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
) -> ElasticRun:
    """run(build, step, data, make_mesh=make_mesh, steps=1000) -> losses, events and the last state.

    Take `steps` steps. When a rank dies, hangs or cannot be reached, the others leave the step,
    agree on who is left, make process groups and mesh anew without restarting their processes, take
    over the last committed version of the state from each other, and go on (docs/elastic.md). A
    step that raises is taken again once.

    Args:
        build: (mesh) -> state: see `ElasticJob`.
        step: (state, batch, mesh) -> loss: forward, backward and `optimizer.step()`. See
            `ElasticJob.attempt` for what it may do after that.
        data: (index, mesh) -> this rank's part of the batch of step `index`, the same each time.
        make_mesh: (number of ranks) -> mesh.
        steps: how many.
        min_ranks: with fewer left the job ends.

    Raises: as `ElasticJob` and `ElasticJob.attempt`.

    Communication: in each step a barrier over all ranks; one at the end.

    Example:
        >>> run = sm.elastic.run(build, step, data, make_mesh=make_mesh, steps=1000)
        >>> run.losses, run.events
    """
    job = ElasticJob(build, make_mesh=make_mesh, min_ranks=min_ranks)
    try:
        while job.step < steps:
            with job.attempt() as attempt:
                batch = data(job.step, job.mesh)
                attempt.loss = step(job.state, batch, job.mesh)
        job.finish()
    finally:
        job.close()
    return ElasticRun(job.state, job.mesh, job.losses, job.events)
