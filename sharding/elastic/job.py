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
import math
import os
import signal
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist

from ...mesh.comm.agreement import facts_of, gather_facts
from ...mesh.comm.current_world import current_world
from ...mesh.comm.group import CollectiveRecord, Group
from ...mesh.device_mesh import DeviceMesh
from ...mesh.elastic import protocol
from ...mesh.elastic.joining import enter, is_joining
from ...mesh.elastic.membership import Change, ElasticJobError, LeftOutError, Membership
from ...mesh.elastic.messages import Announcement
from ...mesh.elastic.protocol import Decision, Phase, Version, Write
from ...mesh.elastic.rank_stores import StoreGoneError
from ...mesh.errors import LaunchEnvironmentError
from ...mesh.launch import preemption
from ...mesh.launch.environment import launch_environment
from ...mesh.monitor import termination
from ...mesh.text import ranks_text
from ..checkpoint.agreement import CheckpointError
from ..checkpoint.load import load
from ..checkpoint.load import wanted_from as wanted_in
from ..checkpoint.save import save
from ..checkpoint.state import RandomState
from ..checkpoint.storage.folder import latest
from ..checkpoint.tree import without_stateful
from ..optim.matrix_optimizer import MatrixOptimizer
from .handover import hand_over
from .pipelines import load_named, named, own_states, pipelines_of, whole_tree
from .recovery import StateLostError, recover, wanted_from
from .redundancy import Redundancy, StateCopy
from .snapshot import (
    Snapshot,
    missing_parts,
    optimizers_of,
    parameters_of,
    whole_copy,
)
from .spares import (
    has_outside,
    told_by_mesh,
    wanted_outside,
    with_empty_parts,
    without_parts,
)

_log = logging.getLogger(__name__)

Build = Callable[[DeviceMesh], Any]
MakeMesh = Callable[[int], DeviceMesh]
_SHOWN = 8  # parts in an error
_ENDED = 128 + signal.SIGTERM  # the exit status if all ranks were told to go
_COMMUNICATING = (MatrixOptimizer, torch.optim.LBFGS)  # in their step, or in its closure


@dataclass(frozen=True)
class ElasticEvent:
    """A change of the ranks of a job, or a step that was given up.

    Attributes:
        step: the number of committed steps from which the job went on.
        epoch: the number of the membership that began, from 1.
        lost: the ranks that are lost or have left, by their numbers at the start of the job.
        ranks: those that went on.
        reason: what happened, as the monitor says.
        seconds: from the interruption of this rank until all had the state.
        joined: the ranks that have joined; they have the next numbers.
    """

    step: int
    epoch: int
    lost: tuple[int, ...]
    ranks: tuple[int, ...]
    reason: str
    seconds: float
    joined: tuple[int, ...] = ()


class Attempt:
    """One attempt at a step.

    Attributes:
        loss: set by the program before the end of the block; recorded once the step is committed.
    """

    def __init__(self) -> None:
        self.loss: Any = None


class _Copies(NamedTuple):
    """The copies of an epoch.

    Attributes:
        redundancy: which has them.
        members: of the epoch.
    """

    redundancy: Redundancy
    members: tuple[int, ...]


class _CopiedVersion(NamedTuple):
    """A version of `Redundancy`, the newer the greater.

    Attributes:
        epoch: of the mesh on which it was made.
        step: of the version.
        ranks: those of that mesh, by their numbers at the start of the job: each has a part of it.
    """

    epoch: int
    step: int
    ranks: tuple[int, ...]


class _Holding(NamedTuple):
    """What a rank tells the others of what it holds, before the state is recovered.

    Attributes:
        is_inside: whether it was in the mesh of the decided version, and has it.
        is_whole: whether those that are left hold all parts of it.
        has_copies: whether the ranks that are left hold all parts if the copies that this rank was
            handed by leaving ranks are counted.
        copied: the versions of `Redundancy` that it has, and that are whole.
        knows_losses: whether it has those of the job: a spare, and one that has just joined, have
            not.
        has_layouts: whether it has the layouts of the decided version.
        has_pipelines: whether there are pipelines in what it has built.
    """

    is_inside: bool
    is_whole: bool
    has_copies: bool
    copied: tuple[_CopiedVersion, ...]
    knows_losses: bool
    has_layouts: bool
    has_pipelines: bool


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
            `init_device_mesh` takes all. Those do not call `build`.
        min_ranks: with fewer left the job ends.
        spares: how many ranks wait outside of the mesh until they take the place of lost ones.
        redundancy: 1: each rank has copies of the parts of a rank on another host (`Redundancy`),
            so that state without replicas survives a loss; 0: none.
        refresh_every: with redundancy, after how many steps copies are made; a loss of what has no
            replicas goes back to the last ones.
        checkpoint: the folder of the job's checkpoints, which `save` writes. If there is a complete
            one, the job begins with the newest; and it goes back to it when ranks are lost that
            held what no other one has.

    Attributes:
        state: the tree that `build` has returned, with the values of the last committed step; on a
            spare the tree of its leaves, of which it has no parts.
        mesh: the current mesh.
        step: the number of committed steps.
        first_step: that of the beginning: 0, or that of the checkpoint.
        losses: one for each committed step since `first_step`; not a number where an attempt set
            none.
        events: one for each time that the members were interrupted.
        has_left: whether this rank has left the job, by `leave`.

    Raises:
        LaunchEnvironmentError: ranks that are simulated, or not monitored; a process that joins a
            job which has ended.
        ValueError: an optimizer with parameters of a pipeline and others.

    Communication: a few messages to the job's store; that of loading a checkpoint; for each
        optimizer of a pipeline up to three all_gathers of small objects.
    """

    def __init__(
        self,
        build: Build,
        *,
        make_mesh: MakeMesh,
        min_ranks: int = 1,
        spares: int = 0,
        redundancy: int = 0,
        refresh_every: int = 1,
        checkpoint: str | os.PathLike[str] | None = None,
    ) -> None:
        if redundancy not in (0, 1) or refresh_every < 1:
            raise ValueError(
                "redundancy must be 0 or 1, and refresh_every at least 1; got "
                f"redundancy={redundancy}, refresh_every={refresh_every}"
            )
        self._build, self._make_mesh, self._checkpoint = build, make_mesh, checkpoint
        self._spares = spares
        self._refresh_every = refresh_every if redundancy else 0
        self.losses: list[float] = []
        self.events: list[ElasticEvent] = []
        self.is_finished = self.has_left = False
        self.first_step = 0
        self._versions: dict[Version, Snapshot] = {}
        self._last: Snapshot | None = None  # of the current objects
        # by epoch: a snapshot, for the boxes in it, and its mesh
        self._layouts: dict[int, Snapshot] = {}
        self._meshes: dict[int, DeviceMesh] = {}
        # of versions whose parts ranks have handed over that leave
        self._copies: dict[Version, StateCopy] = {}
        # by epoch: those of the current one, and of those before until all have confirmed it
        self._redundancies: dict[int, _Copies] = {}
        self._attempt: Attempt | None = None
        self._writes_before = 0
        self._is_completing = self._is_changing = self._is_told_to_go = False
        self._knows_losses = not is_joining()
        self._joining: Mapping[int, Announcement] = {}  # they become members before the next step
        self._interrupted_at = 0.0
        self._hooks: list[Any] = []
        self._parameters: list[Any] = []
        self._stack = ExitStack()
        self.mesh: DeviceMesh
        self.state: Any
        if is_joining():
            self._join(min_ranks)
        else:
            self._begin(min_ranks)

    def _begin(self, min_ranks: int) -> None:
        """Begin the job, with all ranks."""
        size = _world_size()
        if size - self._spares < max(1, min_ranks):
            raise ValueError(
                f"{size} ranks with spares={self._spares} and min_ranks={min_ranks}: start more, "
                "or keep fewer as spares"
            )
        self._most_ranks = size - self._spares
        self.mesh = self._mesh_of(size)
        self.state, write = self._first_state(self.mesh)
        self._members = Membership(current_world(), write, self._missing_parts, min_ranks)
        newest = self._newest_checkpoint()
        if newest is not None:
            like = {"state": self.state, "random": RandomState()}
            self.state = self._loaded(self.mesh, like, newest)["state"]
            self.first_step = newest
            self._members.member = protocol.begin_at(self._members.member, newest)
        with self._starting():
            version = Snapshot({"state": self.state, "random": RandomState()})
            self._keep_copies(self._first_copies(version, self.mesh))
            self._begin_epoch()

    def _first_state(self, mesh: DeviceMesh) -> tuple[Any, Write]:
        """Return the state from scratch, and how its optimizers write.

        On ranks outside of the mesh it is a tree of leaves.
        """
        state: Any = None
        fact: Any = None
        write = Write.LOCAL
        if mesh.coordinate is not None:
            state = self._build(mesh)
            write = _kind_of_write(optimizers_of(state))
            # raises for an optimizer with parameters of a pipeline and others: a loss is too late
            named(state)
        if has_outside(mesh):
            if mesh.coordinate is not None:
                tree = self._whole_on(mesh, Snapshot(state).tree())
                fact = without_parts(tree, mesh.world.size), write
            sent, write = told_by_mesh(mesh, fact)
            if mesh.coordinate is None:
                state = with_empty_parts(sent, {}, mesh.world)
        return state, write

    def _join(self, min_ranks: int) -> None:
        """Become a member of the job that runs, and take over its state."""
        entry = enter()
        self._members = Membership(
            current_world(), Write.LOCAL, self._missing_parts, min_ranks, entry
        )
        self._most_ranks = self._members.size - self._spares
        self._member_ranks = entry.welcome.decision.decision.source.members
        self._members.verdict = f"rank {self.rank} joined"
        self._interrupted_at = time.monotonic()
        with self._starting():
            self._go_on(None)
            if self.is_finished:
                raise LaunchEnvironmentError(
                    "the job has taken its last step before this process had its state"
                )

    @contextmanager
    def _starting(self) -> Iterator[None]:
        """Let losses interrupt attempts alone, and SIGTERM be a notice, until `close`.

        An error in the block closes the job, since its caller has none to close.
        """
        termination.set_interruptible(False)
        try:
            self._stack.enter_context(preemption.listening())
            yield
        except BaseException:
            self.close()
            raise

    def _mesh_of(self, size: int) -> DeviceMesh:
        """Return the mesh for a world of this size, and log which ranks are left out."""
        most = max(self._most_ranks, size - self._spares)  # the job may have grown
        mesh = self._make_mesh(min(size, most))
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
        """Take over the members and the optimizers of a new state; give up copies of others."""
        self._member_ranks = self._members.member.members
        self._knows_losses = not self.is_spare
        self._remove_hooks()
        for optimizer in optimizers_of(self.state):
            self._hooks.append(optimizer.register_step_pre_hook(self._before_write))
        # a walk through all modules takes longer than a look at each parameter
        self._parameters = [getattr(p, "_local", p) for p in parameters_of(self.state)]
        self._last = None
        version = self._snapshot()
        self._remember(version)
        epoch = self._members.member.epoch
        self._redundancies = {e: one for e, one in self._redundancies.items() if e == epoch}

    def _first_copies(self, version: Snapshot, mesh: DeviceMesh) -> Redundancy | None:
        """Return the copies of a state on a new mesh, once they have arrived on all ranks.

        Until all ranks have confirmed them, none gives up what it had before: otherwise a loss in
        between would find no copy.

        Communication: as `Redundancy.refresh` and `finish`.
        """
        if not self._refresh_every or mesh.coordinate is None:
            return None
        redundancy = Redundancy(mesh, hosts=self._members.hosts())
        redundancy.refresh(self._whole_on(mesh, version.tree()), self.step)
        redundancy.finish()
        return redundancy

    def _keep_copies(self, redundancy: Redundancy | None) -> None:
        """Add the copies of the epoch that begins to those of the epochs before."""
        if redundancy is not None:
            member = self._members.member
            self._redundancies[member.epoch] = _Copies(redundancy, member.members)

    def _remove_hooks(self) -> None:
        while self._hooks:
            self._hooks.pop().remove()

    def _remember(self, version: Snapshot) -> None:
        """Make a snapshot of the state the committed version, the only one."""
        member = self._members.member
        self._versions = {member.current: version}
        self._layouts = {member.epoch: version}
        self._meshes = {member.epoch: self.mesh}
        self._copies = {}

    def _snapshot(self) -> Snapshot:
        if self.is_spare:  # nothing writes what it has, a tree of leaves
            random = RandomState().state_dict()
            self._last = Snapshot.of_leaves({"state": self.state, "random": random})
            return self._last
        self._last = Snapshot({"state": self.state, "random": RandomState()}, self._last)
        return self._last

    def _missing_parts(self, version: Version, ranks: Collection[int]) -> tuple[int, ...]:
        """Return numbers for the parts of a version that no rank of these holds."""
        layouts = self._layouts.get(version.epoch)
        if layouts is None:  # of an epoch that this rank was interrupted in before it had built it
            return (0,)
        numbers = [version.members.index(rank) for rank in ranks]
        copies = self._copies[version].holders if version in self._copies else {}
        return tuple(range(len(missing_parts(layouts.tree(), numbers, copies))))

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
        try:
            with termination.interruptible(True):
                save(self._saved_tree(), folder, step=self.step, keep=keep)
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

    def _saved_tree(self) -> Any:
        """Return what a checkpoint has; on ranks outside of the mesh without parts."""
        tree = {"state": named(self.state), "random": RandomState()}
        if not has_outside(self.mesh):
            return tree
        size = self.mesh.world.size
        tree = without_stateful(tree)
        sent = told_by_mesh(self.mesh, None if self.is_spare else without_parts(tree, size))
        return with_empty_parts(sent, tree, self.mesh.world) if self.is_spare else tree

    def _loaded(self, mesh: DeviceMesh, like: Any, step: int) -> Any:
        """Return `like`, made on a mesh, with what a checkpoint has."""
        folder = self._checkpoint or ""
        into = wanted_outside(mesh, named(like), lambda tree: wanted_in(folder, tree, step))
        return load_named(like, load(folder, into, step=step))

    def _recovered(self, version: StateCopy, like: Any, numbers: Sequence[int], **kw: Any) -> Any:
        """Return `like`, made on the mesh of this epoch, with a version of the state.

        Args: as of `recover`.
        """
        mesh = self._meshes[self._members.member.epoch]
        into = wanted_outside(mesh, named(like), partial(wanted_from, version))
        return load_named(like, recover(version, into, numbers, **kw))

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
            RuntimeError: the block communicates while its optimizer writes; this rank has left.
            SystemExit: this rank was told to go by SIGTERM, and has left after the step, with code
                0 if the others go on; 143 if all ranks were.

        Communication: an all_to_all of 4 bytes to each other rank, the vote; a barrier if the
            optimizers communicate. With redundancy that of `Redundancy.refresh`.
        """
        if self.has_left:
            raise RuntimeError(
                "this rank has left the job: end the loop when `job.has_left` is set"
            )
        if self._joining:
            self._take_in()
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
            self._set_refusal(False)
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
        self._check_vote()
        if self._members.member.phase is not Phase.COMPUTE:  # all have voted
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
            self._is_changing = members.vote(self._is_leaving())
        except Exception as error:
            # others may count on it from its report on, so an error in the agreement ends this
            # rank; a spare has nothing to write
            can_complete = members.member.write is Write.LOCAL and not self.is_spare
            self._is_completing = can_complete
            decision = self._agree(error)
            if not can_complete or decision is None or decision.source != promised:
                self._is_completing = False
                raise _StepGivenUpError from error
            self._set_refusal(True)
            return
        member = members.member
        if member.write is Write.UNDO:
            tree = whole_copy(self._versions[member.current].tree())
            self._versions[member.current] = Snapshot.of_leaves(tree)
        members.member = protocol.enter_write(member)
        self._set_refusal(member.write is Write.LOCAL)

    def _check_vote(self) -> None:
        """Raise if the vote of this step has failed, and the program has caught its error.

        The state is that of the committed version, which other ranks may have from this one: the
        optimizers must not write into it.
        """
        phase = self._members.member.phase
        if phase in (Phase.COMPUTE, Phase.WRITE) or self._is_completing:
            return
        if phase is Phase.RESTORE:
            raise _StepGivenUpError
        raise ElasticJobError(
            "the vote of this step has failed with an error that the step has caught; let errors "
            "of optimizer.step() leave the block of the attempt"
        )

    def _set_refusal(self, is_on: bool) -> None:
        """Set whether collectives raise: those of a step whose optimizer writes by itself."""
        observers = self._members.world.observers
        if is_on != (_refuse in observers):
            observers.append(_refuse) if is_on else observers.remove(_refuse)

    def _end_step(self, attempt: Attempt) -> None:
        """WRITE -> COMPUTE of the next step."""
        members = self._members
        self._check_vote()
        # no optimizer has stepped, as where a scaler skips a step
        if members.member.phase is Phase.COMPUTE:
            if self._count_writes() != self._writes_before:
                raise ElasticJobError(
                    "the step has written parameters without a vote: their optimizer is not in the "
                    "state that build returns, or its step is inside of sm.jit; put it into the "
                    "state, and jit forward and backward alone"
                )
            self._vote()
        # before the step counts as written: a rank that cannot copy its state cannot provide it
        loss = math.nan if attempt.loss is None else float(attempt.loss)
        version = self._snapshot()
        self._set_refusal(False)
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
        copies = self._redundancies.get(members.member.epoch)
        if copies is not None and self.step % self._refresh_every == 0:
            copies.redundancy.refresh(self._whole_on(self.mesh, version.tree()), self.step)
        if self._is_changing:
            self._is_changing = False
            self._change_members()

    # -- ranks that leave and join -----------------------------------------------------------------

    def leave(self) -> None:
        """Let this rank go at the end of the next step.

        The others get what only it holds, and go on without it; no step is taken again. Then
        `has_left` is set, and the loop ends: `while not job.has_left and ...`. SIGTERM does the
        same, and raises SystemExit after that step. If fewer than `min_ranks` would be left, a
        checkpoint is saved, if there is a folder for it, and the job ends.

        Communication: none.
        """
        self._is_told_to_go = True

    def _is_leaving(self) -> bool:
        return self._is_told_to_go or preemption.has_notice()

    def _change_members(self) -> None:
        """Let members go that have asked for it, after a step; note which processes want to join.

        These are taken in at the beginning of the next attempt, where their own first one begins.
        """
        members = self._members
        epoch = members.member.epoch
        change = members.who_changes(self._is_leaving())
        self._joining = change.joining
        if not change.leaving:
            return
        stayers = [rank for rank in members.member.members if rank not in change.leaving]
        if len(stayers) < max(1, members.min_ranks):
            if self._checkpoint is not None:
                self.save()
            if members.member.epoch != epoch:  # others were lost: it is asked again
                return
            if self.rank not in change.leaving:
                raise ElasticJobError(
                    f"{ranks_text(change.leaving)} leave, and min_ranks={members.min_ranks}: "
                    f"{len(stayers)} ranks are left of {len(members.member.members)}"
                )
        else:
            leaving = [self._member_ranks.index(rank) for rank in change.leaving]
            if not self.is_spare:
                tree = self._versions[members.member.current].tree()
                tree = self._whole_on(self.mesh, tree)
                copies = hand_over(tree, self.step, self.mesh, leaving)
                self._copies = {members.member.current: copies}
            members.wait_for_all()
        self._regroup(Change(change.leaving, {}))

    def _take_in(self) -> None:
        """Make processes members that want to join.

        Members may be at different places between two attempts: all meet before they are
        interrupted, since those that are late for an agreement count as hung.
        """
        try:
            self._members.wait_for_all()
        except Exception as error:
            self._go_on(error)
        else:
            self._regroup(Change((), self._joining))

    def _regroup(self, change: Change) -> None:
        """Agree on the next members, and take over the state, though nothing has failed."""
        members = self._members
        self._interrupted_at = time.monotonic()
        members.pause(change)
        if self.rank in change.leaving:
            self._depart(is_last=set(change.leaving) >= set(members.member.members))
            return
        error: Exception | None = None
        try:
            members.agree()
        except StoreGoneError as again:
            error = again
        self._go_on(error)

    def _depart(self, is_last: bool) -> None:
        """End this rank's part in the job, after it has handed over what only it held.

        If the others go on, nothing has failed: torchrun, for one, would end them all.
        """
        self.has_left = self.is_finished = True
        self._members.leave()
        self.close()
        if not self._is_told_to_go:
            raise SystemExit(_ENDED if is_last else 0)

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

        Raises:
            Exception: the error where this rank cannot go on; any of the agreement itself.
        """
        before = self._member_ranks
        self._joining = {}  # they are asked again, since some members may not have heard of them
        if self._is_completing and error is not None:
            raise error  # this rank cannot complete the step, as it has promised
        while True:
            try:
                if error is not None and self._agree(error) is None:
                    self.is_finished = True
                    return
            except LeftOutError:
                if not self._is_leaving():
                    raise
                self._depart(is_last=False)  # a death has kept it from hearing that all have met
                return
            try:
                self._rebuild()
                break
            except (ElasticJobError, StateLostError):
                raise
            except Exception as again:
                error = again
        member = self._members.member
        lost = tuple(rank for rank in before if rank not in member.members)
        joined = tuple(rank for rank in member.members if rank not in before)
        self.events.append(
            ElasticEvent(
                member.step,
                member.epoch,
                lost,
                member.members,
                self._members.verdict,
                time.monotonic() - self._interrupted_at,
                joined,
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
            state = None if mesh.coordinate is None else self._build(mesh)
            like = {"state": state, "random": RandomState()}
            self._layouts[member.epoch] = Snapshot(like)
            self._meshes[member.epoch] = mesh
            recovered = self._recover(decision, like)
            version = Snapshot(recovered)
            redundancy = self._first_copies(version, mesh)
        current = members.member.current
        self._layouts[member.epoch] = self._versions[current] = version
        self._keep_copies(redundancy)
        members.confirm()
        self.mesh, self.state = mesh, recovered["state"]
        del self.losses[current.step - self.first_step :]
        self._begin_epoch()

    def _recover(self, decision: Decision, like: Any) -> Any:
        """Return `like` with the values of the decided version, or of one before if it is lost."""
        source = decision.source
        numbers = _numbers(source.members, self._members.member.members)
        version = self._held_version(source)
        has_layouts = source.epoch in self._layouts
        copied = self._copied_versions()
        holding = _Holding(
            False,
            False,
            False,
            copied,
            self._knows_losses,
            has_layouts,
            bool(pipelines_of(like["state"])),
        )
        if version is not None:
            holding = holding._replace(
                is_inside=True,
                is_whole=not missing_parts(version.state, numbers),
                has_copies=not missing_parts(version.state, numbers, version.holders),
            )
        told = gather_facts(_everybody(), holding)
        holders = [rank for rank, one in told.items() if one.is_inside]
        are_whole = all(told[rank].is_whole for rank in holders)
        have_copies = all(told[rank].has_copies for rank in holders)
        if decision.is_held_by_all and holders and (are_whole or have_copies):
            if version is not None and are_whole:
                version = self._version_alone(source)
            if any(one.has_pipelines for one in told.values()):
                version = self._with_all_stages(source, version)
            mesh = self._meshes.get(source.epoch)
            version = self._completed(holders, version, mesh, like)
            return self._recovered(version, like, numbers)
        return self._recover_earlier(decision, like, told, version)

    def _held_version(self, source: Version) -> StateCopy | None:
        """Return the decided version if this rank has parts of it, with its copies of others'."""
        mesh = self._meshes.get(source.epoch)
        if source not in self._versions or mesh is None or mesh.coordinate is None:
            return None
        if source in self._copies:
            return self._copies[source]
        return self._version_alone(source)

    def _version_alone(self, source: Version) -> StateCopy:
        """Return a version that this rank has, without copies of others'."""
        return StateCopy(source.step, self._versions[source].tree(), {}, {}, 0)

    def _with_all_stages(self, source: Version, version: StateCopy | None) -> StateCopy | None:
        """Return a version with what others have of pipelines: each rank has that of its stages.

        Args:
            version: None on ranks that have no part of it.

        Communication: one all_gather of small objects.
        """
        number = None if version is None else source.members.index(self.rank)
        tree = None if version is None else version.state
        tree = whole_tree(tree, _everybody(), number)
        return None if version is None else replace(version, state=tree)

    def _whole_on(self, mesh: DeviceMesh, tree: Any) -> Any:
        """Return the tree of a version with what all ranks of its mesh have of pipelines.

        Communication: one all_gather of small objects, if there are pipelines.
        """
        if not any(True for _ in own_states(tree)):
            return tree
        return whole_tree(tree, mesh.group(mesh.axis_names), mesh.get_rank())

    def _copied_versions(self) -> tuple[_CopiedVersion, ...]:
        """Return the versions of `Redundancy` that this rank has, and that are whole."""
        copied: list[_CopiedVersion] = []
        for epoch, (redundancy, members) in self._redundancies.items():
            numbers = _numbers(members, self._members.member.members)
            ranks = tuple(members[number] for number in redundancy.mesh.ranks.ravel().tolist())
            for step in redundancy.steps:
                version = redundancy.version(step)
                if not missing_parts(version.state, numbers, version.holders):
                    copied.append(_CopiedVersion(epoch, step, ranks))
        return tuple(copied)

    def _completed(
        self,
        holders: Sequence[int],
        version: StateCopy | None,
        mesh: DeviceMesh | None,
        like: Any,
    ) -> StateCopy:
        """Return a version; ranks that have nothing of it get its structure, and the losses.

        Args:
            holders: the ranks that have parts of it.
            version: None on the others.
            mesh: of the version.
        """
        world = current_world()
        if len(holders) < world.size:
            told: Any = None
            if world.rank == holders[0] and version is not None and mesh is not None:
                sent = without_parts(version.state, mesh.world.size)
                run = self.losses, self.first_step
                told = version.step, sent, version.holders, run
            told = facts_of(_everybody(), holders[0], told)
            if version is None:
                step, sent, copies, run = told
                self.losses, self.first_step = run
                self._knows_losses = True
                own = self._last or Snapshot(like)
                tree = with_empty_parts(sent, own.tree())
                version = StateCopy(step, tree, copies, {}, 0)
        if version is None:
            raise RuntimeError("no rank holds the version")
        return version

    def _recover_earlier(
        self,
        decision: Decision,
        like: Any,
        told: Mapping[int, _Holding],
        version: StateCopy | None,
    ) -> Any:
        """Return `like` with the newest version that is whole: parts of the decided one are lost.

        It is that of a checkpoint, or of copies by `Redundancy`. Or some members do not have the
        decided version, since they were interrupted while it was made. If a checkpoint is of the
        same step and all have the rest, only lost parts are read.
        """
        member, source = self._members.member, decision.source
        newest = self._newest_checkpoint()
        holders = [rank for rank, one in told.items() if one.is_inside]
        # not those of a stage that is lost
        has_all_names = not any(one.has_pipelines for one in told.values())
        if newest == source.step and decision.is_held_by_all and holders and has_all_names:
            numbers = _numbers(source.members, member.members)
            mesh = self._meshes.get(source.epoch)
            whole = self._completed(holders, version, mesh, like)
            return self._recovered(whole, like, numbers, checkpoint=self._checkpoint)
        common = _newest_common(told, member.members)
        if common is not None and (newest is None or common.step >= newest):
            holders = [rank for rank, one in told.items() if common in one.copied]
            copies = self._redundancies.get(common.epoch)
            copied = None if copies is None else copies.redundancy.version(common.step)
            mesh = None if copies is None else copies.redundancy.mesh
            copied = self._completed(holders, copied, mesh, like)
            before = facts_of(_everybody(), holders[0], None if copies is None else copies.members)
            self._members.member = protocol.go_back(member, common.step)
            numbers = _numbers(before, member.members)
            return self._recovered(copied, like, numbers)
        if newest is None or self._checkpoint is None:
            self._raise_lost(decision, told)
        self._members.member = protocol.go_back(member, newest)
        self._tell_losses(told, newest)
        return self._loaded(self._meshes[member.epoch], like, newest)

    def _tell_losses(self, told: Mapping[int, _Holding], step: int) -> None:
        """Tell ranks the losses that do not know them, where all get the state of a checkpoint."""
        knowing = [rank for rank, one in told.items() if one.knows_losses]
        if len(knowing) == len(told):
            return
        run = self.losses, self.first_step
        told_run = facts_of(_everybody(), knowing[0], run) if knowing else ([], step)
        if not self._knows_losses:
            self.losses, self.first_step = told_run
            self._knows_losses = True

    def _raise_lost(self, decision: Decision, told: Mapping[int, _Holding]) -> NoReturn:
        """Raise StateLostError, with the same text on every rank."""
        source = decision.source
        lost: list[str] = []
        count = 0
        if knowing := [rank for rank, one in told.items() if one.has_layouts]:
            layouts = self._layouts.get(source.epoch)
            if layouts is not None:
                held = [source.members.index(rank) for rank in decision.providers]
                lost = missing_parts(layouts.tree(), held)
            lost, count = facts_of(_everybody(), knowing[0], (lost[:_SHOWN], len(lost)))
        more = f" and {count - _SHOWN} more" if count > _SHOWN else ""
        text = (
            f"only ranks that are lost held {count} parts of the state, and there is no checkpoint "
            "(checkpoint=); replicate it along another axis of the mesh, or use redundancy=1: "
            f"{', '.join(lost)}{more}"
        )
        if not count:
            text = (
                f"{ranks_text(decision.providers) or 'no rank'} of those that are left had the "
                "state of this step, and there is no checkpoint (checkpoint=) that all could go "
                "back to"
            )
        raise StateLostError(f"after step {source.step} {text}", {})

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
        self._stack.close()
        self._members.close()
        self._set_refusal(False)


def _refuse(record: CollectiveRecord) -> None:
    """Raise for a collective: an observer, while an optimizer writes by itself."""
    raise RuntimeError(
        f"a step communicates ({record.op} over ranks {record.ranks}) after it has begun to write: "
        "a rank that is lost there would cut it off halfway. Read losses and norms before "
        "optimizer.step(), and return a loss that is not pending, such as loss.item()"
    )


def _world_size() -> int:
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    place = launch_environment()
    return 1 if place is None else place[1]


def _kind_of_write(optimizers: list[torch.optim.Optimizer]) -> Write:
    communicates = any(isinstance(optimizer, _COMMUNICATING) for optimizer in optimizers)
    return Write.UNDO if communicates or len(optimizers) > 1 else Write.LOCAL


def _newest_common(told: Mapping[int, _Holding], members: Sequence[int]) -> _CopiedVersion | None:
    """Return the newest copied version of which each member that had a part has it, or None.

    Args:
        told: by the number of the member among them.
        members: by their numbers at the start of the job.
    """
    holders: dict[_CopiedVersion, set[int]] = {}
    for number, one in told.items():
        for version in one.copied:
            holders.setdefault(version, set()).add(members[number])
    common = [
        version for version, ranks in holders.items() if ranks == set(version.ranks) & set(members)
    ]
    return max(common, default=None)


def _numbers(old: Sequence[int], members: Sequence[int]) -> list[int]:
    """Return the numbers of members in an earlier world; ranks that were not there get the next."""
    new = [rank for rank in members if rank not in old]
    return [old.index(rank) if rank in old else len(old) + new.index(rank) for rank in members]


def _everybody() -> Group:
    world = current_world()
    return world.group(range(world.size))
