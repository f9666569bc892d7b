"""`ElasticJob`: a training loop that goes on when ranks are lost; `run` is the loop itself.

attempt    forward, backward     reads the committed version
           optimizer.step()      first a vote: all members have their gradients; then it writes
           the rest              scheduler, averages; nothing that communicates
the end    committed: counted, its loss recorded, what the next forward writes is copied

a failure, anywhere in it        the members agree, build the state on a new mesh, take over the
                                 committed version from each other, and take the step again
"""

from __future__ import annotations

import logging
import os
import time
import traceback
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ...mesh.comm.agreement import facts_of
from ...mesh.comm.current_world import current_world
from ...mesh.comm.group import CollectiveRecord
from ...mesh.device_mesh import DeviceMesh
from ...mesh.elastic import protocol
from ...mesh.elastic.membership import ElasticJobError, Membership
from ...mesh.elastic.protocol import Copy, Decision, Phase, Write
from ...mesh.elastic.rank_stores import StoreGoneError
from ...mesh.launch.environment import launch_environment
from ...mesh.monitor import termination
from ...mesh.text import ranks_text
from ..checkpoint.agreement import CheckpointError
from ..checkpoint.load import load
from ..checkpoint.save import save
from ..checkpoint.state import RandomState
from ..checkpoint.storage.folder import latest
from ..optim.matrix_optimizer import MatrixOptimizer
from .recovery import StateLostError, recover
from .snapshot import (
    Snapshot,
    missing_parts,
    optimizers_of,
    parameters_of,
    refuse_pipelines,
    whole_copy,
)
from .spares import with_empty_parts, without_parts

_log = logging.getLogger(__name__)

Build = Callable[[DeviceMesh], Any]
MakeMesh = Callable[[int], DeviceMesh]
_SHOWN = 8  # parts in an error
_COMMUNICATING = (MatrixOptimizer, torch.optim.LBFGS)  # in their step, or in its closure


@dataclass(frozen=True)
class ElasticEvent:
    """A change of the ranks of a job, or a step that was given up.

    Attributes:
        step: the number of committed steps from which the job went on.
        epoch: the number of the membership that began, from 1.
        lost: the ranks that are lost, by their numbers at the start of the job.
        ranks: those that went on.
        reason: what happened, as the monitor says.
        seconds: from the interruption of this rank until all had the state.
    """

    step: int
    epoch: int
    lost: tuple[int, ...]
    ranks: tuple[int, ...]
    reason: str
    seconds: float


class Attempt:
    """One attempt at a step.

    Attributes:
        loss: set by the program before the end of the block; recorded once the step is committed.
    """

    def __init__(self) -> None:
        self.loss: Any = None


class _StepGivenUpError(Exception):
    """The vote of a step has failed, and the members have agreed to take the step again."""


class ElasticJob:
    """ElasticJob(build, make_mesh=make_mesh): state that survives the loss of ranks.

    `run` is a loop around it, and this is for a loop of your own:

        job = sm.elastic.ElasticJob(build, make_mesh=make_mesh)
        while job.step < 1000 or not job.finish():
            with job.attempt() as attempt:
                batch = data(job.step, job.mesh)
                attempt.loss = train_step(job.state, batch)

    All that communicates is inside the block of an attempt. When a rank is lost, or a step raises
    on some rank, the block ends without an error, `state` and `mesh` are new objects, and `step` is
    what it was before: the loop comes to the same step again. Ranks that are lost before the job
    begins, or in a part of the loop outside of the block, end the job.

    Args:
        build: makes what lives on a mesh, from scratch: a tree of modules, optimizers and other
            objects with `state_dict`, tensors, numbers. Called again after each loss.
        make_mesh: (n) -> the mesh of ranks 0 to n - 1, or of some of them: n is how many are there,
            less the spares. Where ranks are left out, write `DeviceMesh(device_type, ranks)`, since
            `init_device_mesh` takes all.
        min_ranks: with fewer left the job ends.
        spares: how many ranks wait outside of the mesh until they take the place of lost ones.
        checkpoint: the folder of the job's checkpoints, which `save` writes. If there is a complete
            one, the job begins with the newest; and it goes back to it when ranks are lost that
            held what no other one has.

    Attributes:
        state: the tree that `build` has returned, with the values of the last committed step.
        mesh: the current mesh.
        step: the number of committed steps.
        first_step: that of the beginning: 0, or that of the checkpoint.
        losses: one for each committed step since `first_step`; not a number where an attempt set
            none.
        events: one for each time that the members were interrupted.

    Raises:
        LaunchEnvironmentError: ranks that are simulated, or not monitored.
        ValueError: pipelines.

    Communication: a few messages to the job's store; that of loading a checkpoint.
    """

    def __init__(
        self,
        build: Build,
        *,
        make_mesh: MakeMesh,
        min_ranks: int = 1,
        spares: int = 0,
        checkpoint: str | os.PathLike[str] | None = None,
    ) -> None:
        size = _world_size()
        self._most_ranks = size - spares
        if self._most_ranks < max(1, min_ranks):
            raise ValueError(
                f"{size} ranks with spares={spares} and min_ranks={min_ranks}: start more, or keep "
                "fewer as spares"
            )
        self._build, self._make_mesh, self._checkpoint = build, make_mesh, checkpoint
        self.mesh = self._mesh_of(size)
        self.state: Any = build(self.mesh)
        refuse_pipelines(self.state)
        self.losses: list[float] = []
        self.events: list[ElasticEvent] = []
        self.is_finished = False
        write = _kind_of_write(optimizers_of(self.state))
        self._members = Membership(current_world(), write, self._missing_parts, min_ranks)
        self._versions: dict[Copy, Snapshot] = {}
        self._last: Snapshot | None = None  # of the current objects
        # by epoch: a snapshot, for the boxes in it, and its mesh
        self._layouts: dict[int, Snapshot] = {}
        self._meshes: dict[int, DeviceMesh] = {}
        self._attempt: Attempt | None = None
        self._writes_before = 0
        self._is_completing = False
        self.first_step = 0
        newest = self._newest_checkpoint()
        if newest is not None:
            self._load(newest)
            self.first_step = newest
            self._members.member = protocol.begin_at(self._members.member, newest)
        self._interrupted_at = 0.0
        self._hooks: list[Any] = []
        self._parameters: list[Any] = []
        self._members.world.observers.append(self._refuse_in_write)
        termination.set_interruptible(False)
        self._begin_epoch()

    def _mesh_of(self, size: int) -> DeviceMesh:
        """Return the mesh for a world of this size, and log which ranks are left out."""
        mesh = self._make_mesh(min(size, self._most_ranks))
        outside = sorted(set(range(size)) - set(mesh.ranks.ravel().tolist()))
        if outside and current_world().rank == 0:
            _log.info("%s: %s wait as spares", mesh, ranks_text(outside))
        return mesh

    @property
    def step(self) -> int:
        return self._members.member.step

    @property
    def is_spare(self) -> bool:
        """Whether this rank is outside of the mesh: its attempts do nothing but vote."""
        return self.mesh.coordinate is None

    @property
    def rank(self) -> int:
        """The number of this rank at the start of the job."""
        return self._members.member.rank

    def _begin_epoch(self) -> None:
        """Take over the members, and the optimizers of a new state."""
        self._member_ranks = self._members.member.members
        self._remove_hooks()
        for optimizer in optimizers_of(self.state):
            self._hooks.append(optimizer.register_step_pre_hook(self._before_write))
        # a walk through all modules takes longer than a look at each parameter
        self._parameters = [getattr(p, "_local", p) for p in parameters_of(self.state)]
        self._last = None
        self._remember(self._snapshot())

    def _remove_hooks(self) -> None:
        while self._hooks:
            self._hooks.pop().remove()

    def _remember(self, version: Snapshot) -> None:
        """Make a snapshot of the state the committed version, the only one."""
        member = self._members.member
        self._versions = {member.current: version}
        self._layouts = {member.epoch: version}
        self._meshes = {member.epoch: self.mesh}

    def _snapshot(self) -> Snapshot:
        self._last = Snapshot({"state": self.state, "random": RandomState()}, self._last)
        return self._last

    def _missing_parts(self, version: Copy, ranks: Collection[int]) -> tuple[int, ...]:
        """Return numbers for the parts of a version that no rank of these holds."""
        layouts = self._layouts.get(version.epoch)
        if layouts is None:  # of an epoch that this rank was interrupted in before it had built it
            return (0,)
        numbers = [version.members.index(rank) for rank in ranks]
        return tuple(range(len(missing_parts(layouts.tree(), numbers))))

    # -- checkpoints -------------------------------------------------------------------------------

    def save(self, *, keep: int | None = None) -> None:
        """Save the last committed step as a checkpoint, under its number.

        When a rank is lost meanwhile, the checkpoint is not complete, and nothing else is saved in
        its place.

        Args:
            keep: as for `sm.checkpoint.save`.

        Raises:
            ValueError: the job has no folder of checkpoints.
            CheckpointError: as `sm.checkpoint.save`. And as `attempt`.

        Communication: as `sm.checkpoint.save`.
        """
        folder = self._checkpoint
        if folder is None:
            raise ValueError("job.save(): write ElasticJob(..., checkpoint=folder) to save into it")
        tree = {"state": self.state, "random": RandomState()}
        try:
            with termination.interruptible(True):
                save(tree, folder, step=self.step, keep=keep)
        except (CheckpointError, OSError):
            raise
        except Exception as error:
            self._go_on(error)

    def _newest_checkpoint(self) -> int | None:
        """Return the step of the newest complete checkpoint, as the lowest rank sees it."""
        if self._checkpoint is None:
            return None
        newest = latest(self._checkpoint)
        world = current_world()
        step = None if newest is None else newest.step
        return facts_of(world.group(range(world.size)), 0, step)

    def _load(self, step: int) -> None:
        """Load a checkpoint into the state."""
        like = {"state": self.state, "random": RandomState()}
        self.state = load(self._checkpoint or "", like, step=step)["state"]

    # -- a step ------------------------------------------------------------------------------------

    @contextmanager
    def attempt(self) -> Iterator[Attempt]:
        """with job.attempt() as attempt: take one step.

        The block calls `step` of the optimizers in `state`. Before the first of them writes, all
        ranks vote. If they write without communicating (torch's own, one optimizer), nothing
        communicates from there to the end of the block: read losses and norms before. Otherwise
        (several optimizers, `sm.optim.Muon`, `Shampoo`, LBFGS) a copy of the state is kept while
        they write.

        Raises:
            ElasticJobError: the job cannot go on: too few ranks, a step that has failed twice for
                the same reason, or one that writes parameters without a vote. On every rank.
            StateLostError: the ranks that are lost held what no other one has. On every rank.
            RuntimeError: the block communicates while its optimizer writes.

        Communication: a barrier over all ranks, the vote; one more if the optimizers communicate.
        """
        attempt = self._attempt = Attempt()
        self._writes_before = self._count_writes()
        try:
            with termination.interruptible(True):
                yield attempt
            self._end_step(attempt)
        except _StepGivenUpError:
            self._go_on(None)
        except (ElasticJobError, StateLostError):
            raise
        except Exception as error:
            self._go_on(error)
        finally:
            self._attempt = None

    def _count_writes(self) -> int:
        """Return how often torch has counted a write into parameters of the state."""
        return sum(p._version for p in self._parameters)

    def _before_write(self, *_: Any) -> None:
        """Vote before the first optimizer of a step writes: its hook."""
        if self._attempt is None:
            raise RuntimeError(
                "optimizer.step() outside of `with job.attempt()`: the optimizers of an elastic "
                "job step inside, since all ranks vote before they write"
            )
        if self._is_completing or self._members.member.phase is not Phase.COMPUTE:
            return
        termination.set_interruptible(False)
        self._vote()
        if not self._is_completing and self._members.member.write is not Write.LOCAL:
            termination.set_interruptible(True)

    def _vote(self) -> None:
        """COMPUTE -> WRITE, or raise _StepGivenUpError.

        If a rank is lost while others wait for its vote, they may agree on the step that all of
        them can complete by themselves; then this returns, and the block goes on.
        """
        members = self._members
        promised = members.member.next
        try:
            members.vote()
        except Exception as error:
            decision = self._agree(error)
            if decision is None or decision.source != promised:
                raise _StepGivenUpError from error
            self._is_completing = True
            return
        member = members.member
        if member.write is Write.UNDO:
            tree = whole_copy(self._versions[member.current].tree())
            self._versions[member.current] = Snapshot.of_leaves(tree)
        members.member = protocol.enter_write(member)

    def _refuse_in_write(self, record: CollectiveRecord) -> None:
        """Raise for a collective of a step whose optimizer writes by itself: an observer."""
        member = self._members.member
        is_writing = member.phase is Phase.WRITE and member.write is Write.LOCAL
        if self._attempt is not None and (is_writing or self._is_completing):
            raise RuntimeError(
                f"a step communicates ({record.op} over ranks {record.ranks}) after it has begun "
                "to write: a rank that is lost there would cut it off halfway. Read losses and "
                "norms before optimizer.step(), and return a loss that is not pending, such as "
                "loss.item()"
            )

    def _end_step(self, attempt: Attempt) -> None:
        """WRITE -> COMPUTE of the next step."""
        members = self._members
        phase = members.member.phase
        if phase is Phase.RESTORE and not self._is_completing:
            raise _StepGivenUpError  # the program has caught it
        if phase is Phase.COMPUTE:  # no optimizer has stepped, as where a scaler skips a step
            if self._count_writes() != self._writes_before:
                raise ElasticJobError(
                    "the step has written parameters without a vote: their optimizer is not in the "
                    "state that build returns, or its step is inside of sm.jit; put it into the "
                    "state, and jit forward and backward alone"
                )
            self._vote()
        # before the step counts as written: a rank that cannot copy its state cannot provide it
        loss, version = _as_number(attempt.loss), self._snapshot()
        decision = members.member.decision
        if self._is_completing and decision is not None:
            self._versions, self._is_completing = {decision.source: version}, False
            self.losses.append(loss)
            self._go_on(None)
            return
        members.member = protocol.finish_write(members.member)
        self.losses.append(loss)
        if members.member.phase is Phase.COMMIT:
            self._versions[members.member.next] = version
            members.commit()
        self._remember(version)

    # -- a failure ---------------------------------------------------------------------------------

    def _agree(self, error: Exception) -> Decision | None:
        """Return what the members agree on after an error; None if all have finished."""
        self._interrupted_at = self._interrupted_at or time.monotonic()
        traceback.clear_frames(error.__traceback__)  # activations of the step, for one
        while True:
            self._members.interrupt(error)
            try:
                return self._members.agree()
            except StoreGoneError as again:
                error = again

    def _go_on(self, error: Exception | None) -> None:
        """Agree, and rebuild the state, until all members have it.

        Args:
            error: None if the members have agreed already.
        """
        before = self._member_ranks
        if self._is_completing and error is not None:
            raise error  # this rank cannot complete the step, as it has promised
        while True:
            try:
                if error is not None and self._agree(error) is None:
                    self.is_finished = True
                    return
                self._rebuild()
                break
            except (ElasticJobError, StateLostError):
                raise
            except Exception as again:
                if again is error:  # this rank cannot go on
                    raise
                error = again
        member = self._members.member
        lost = tuple(rank for rank in before if rank not in member.members)
        self.events.append(
            ElasticEvent(
                member.step,
                member.epoch,
                lost,
                member.members,
                self._members.verdict,
                time.monotonic() - self._interrupted_at,
            )
        )
        self._interrupted_at = 0.0

    def _rebuild(self) -> None:
        """RESTORE -> COMPUTE: make groups, mesh and state anew, and take over the values."""
        members = self._members
        member = members.member
        decision = member.decision
        if decision is None:
            raise RuntimeError("there is no decision to go on from")
        world = members.regroup()
        with termination.interruptible(True):
            mesh = self._mesh_of(world.size)
            state = self._build(mesh)
            like = {"state": state, "random": RandomState()}
            self._layouts[member.epoch] = Snapshot(like)
            self._meshes[member.epoch] = mesh
            self._tell_spares(decision)
            if decision.lost or not decision.is_held_by_all:
                recovered = self._recover_from_checkpoint(decision, like)
            else:
                alive = [decision.source.members.index(rank) for rank in member.members]
                recovered = recover(self._versions[decision.source].tree(), like, alive)
        current = members.member.current
        self._layouts[member.epoch] = self._versions[current] = Snapshot(recovered)
        members.confirm()
        self.mesh, self.state = mesh, recovered["state"]
        del self.losses[current.step - self.first_step :]
        self._begin_epoch()

    def _tell_spares(self, decision: Decision) -> None:
        """Let ranks that were outside of the mesh have the state but for parts, and the losses."""
        source = decision.source
        mesh = self._meshes[source.epoch]
        inside = {source.members[number] for number in mesh.ranks.ravel().tolist()}
        members = decision.members
        providers = [rank for rank in members if rank in inside]
        if not providers or inside.issuperset(members):
            return
        told: Any = None
        tree = self._versions[source].tree()
        if self.rank == providers[0]:
            told = without_parts(tree, mesh), self.losses
        group = current_world().group(range(len(members)))
        sent, losses = facts_of(group, members.index(providers[0]), told)
        if self.rank not in inside:
            self._versions[source] = Snapshot.of_leaves(with_empty_parts(sent, mesh, tree))
            self.losses = losses

    def _recover_from_checkpoint(self, decision: Decision, like: Any) -> Any:
        """Return `like` with the newest checkpoint: parts of the decided version are lost.

        Or some members do not have it, since they were interrupted while it was made. If the
        checkpoint is of the same step and all have it, only lost parts are read.
        """
        newest = self._newest_checkpoint()
        if newest is None or self._checkpoint is None:
            source = decision.source
            held = [source.members.index(rank) for rank in decision.providers]
            lost = missing_parts(self._layouts[source.epoch].tree(), held)
            more = f" and {len(lost) - _SHOWN} more" if len(lost) > _SHOWN else ""
            raise StateLostError(
                f"after step {source.step} only ranks that are lost held {len(lost)} parts of the "
                "state, and there is no checkpoint (checkpoint=); replicate it along another "
                f"axis of the mesh: {', '.join(lost[:_SHOWN])}{more}",
                {},
            )
        member = self._members.member
        if newest == decision.source.step and decision.is_held_by_all:
            alive = [decision.source.members.index(rank) for rank in member.members]
            tree = self._versions[decision.source].tree()
            return recover(tree, like, alive, checkpoint=self._checkpoint, step=newest)
        self._members.member = protocol.go_back(member, newest)
        return load(self._checkpoint, like, step=newest)

    # -- the end -----------------------------------------------------------------------------------

    def finish(self) -> bool:
        """Wait for all ranks at the end; then a rank that is lost is no loss of this job any more.

        Returns:
            Whether all have finished. If not, ranks were lost that held what no other one has, and
            the job has gone back to a checkpoint: take the steps again.

        Raises: as `attempt`; ranks may be lost in it.

        Communication: a barrier over all ranks.
        """
        step = self.step
        while not self.is_finished:
            try:
                self._members.finish()
                self.is_finished = True
            except Exception as error:
                self._go_on(error)
                if self.step < step:
                    return False
        self.close()
        return True

    def close(self) -> None:
        """End this rank's part in the job, without waiting for others."""
        termination.set_interruptible(True)
        self._remove_hooks()
        self._members.close()
        observers = self._members.world.observers
        if self._refuse_in_write in observers:
            observers.remove(self._refuse_in_write)


def _world_size() -> int:
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    place = launch_environment()
    return 1 if place is None else place[1]


def _kind_of_write(optimizers: list[torch.optim.Optimizer]) -> Write:
    communicates = any(isinstance(optimizer, _COMMUNICATING) for optimizer in optimizers)
    return Write.UNDO if communicates or len(optimizers) > 1 else Write.LOCAL


def _as_number(loss: Any) -> float:
    return float("nan") if loss is None else float(loss)
