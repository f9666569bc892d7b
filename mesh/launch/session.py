"""session: close the process groups of a program at the end of a block, also after an error.

with sm.session():    rank 0   mesh, training ...... sync   close groups of some ranks, then the
                                                            default group
    mesh = ...        rank 1   mesh, training .. sync       the same, in the same order
    train(mesh)
                      rank 0   mesh, training ..  PeerError: rank 1 raised    close without waiting
                      rank 1   mesh, raises       reports it to the others    close without waiting
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any, NoReturn, Protocol

import torch.distributed as dist
from torch.distributed import distributed_c10d

from .. import errors
from ..comm.call_site import user_line
from ..comm.current_world import current_world
from ..comm.group import Group
from ..comm.group_backend import DEFAULT, GroupBackend
from ..comm.world import World
from ..monitor.monitor import monitor_of
from ..monitor.termination import ignoring_ctrl_c
from ..monitor.timeouts import keep_groups, torch_groups
from ..monitor.torch_calls import hooks
from ..processes.process import ProcessGroup
from ..settings import settings, watchdog
from .preemption import ending_in_order, forget


def session(timeout: float | None = None, stall_warn: float | None = None) -> Session:
    """with session(): close the process groups at the end, however it comes: no rank hangs.

    At the end all ranks wait for each other; then each closes the groups that were made inside, in
    the same order, and the default process group, if it was started inside. After an error it
    reports the error to the other ranks, which raise `PeerError`, and does not wait. SIGTERM and
    SIGHUP, which otherwise kill at once, raise SystemExit(143) and SystemExit(129) inside, as
    Ctrl-C raises KeyboardInterrupt. Meshes and tensors that outlive the session raise an error when
    they communicate; make a new mesh, in a new session or without one.

    Args:
        timeout: seconds that a rank may keep others waiting before that is an error, as in
            `watchdog`; inside only.
        stall_warn: seconds before that is a warning.

    Raises:
        ValueError: times that are not positive.
        WatchError: at the end, when the job has failed.

    Communication: a barrier over all ranks, at the end of a block without an error.

    >>> import shardmesh as sm
    >>> with sm.session(timeout=600):
    ...     mesh = sm.init_device_mesh("cpu", (1,))
    >>> mesh.group()  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    shardmesh.mesh.errors.MeshError: DeviceMesh(cpu, axis_0=1) belongs to the session that was
    opened at ...
    """
    return Session(timeout, stall_warn)


class Session:
    """The context manager of `session`.

    Attributes:
        place: file:line where it was opened; "" before.
        is_closed: whether it has ended.
    """

    def __init__(self, timeout: float | None, stall_warn: float | None) -> None:
        self._times = timeout, stall_warn
        self._stack = ExitStack()
        self.place, self.is_closed = "", False

    def __repr__(self) -> str:
        return (
            f"Session({'closed, ' if self.is_closed else ''}opened at "
            f"{self.place or 'no line yet'})"
        )

    def __enter__(self) -> Session:
        if self.place:
            raise RuntimeError(
                f"{self!r} cannot be entered again: write `with session():` to open a new one."
            )
        with ExitStack() as stack:
            stack.enter_context(_stalls(*self._times))
            stack.enter_context(ending_in_order())
            self._stack = stack.pop_all()
        self.place = "{}:{}".format(*user_line())
        world = current_world()
        self._before = _Snapshot(world)
        hooks.monitor_calls(monitor_of(world))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        with self._stack:
            if error is None or (isinstance(error, SystemExit) and error.code in (None, 0)):
                self._end_together()
            else:
                self._break_off(error)

    def _end_together(self) -> None:
        world = current_world()
        try:
            world.group(range(world.size)).barrier()
        except BaseException as error:
            self._break_off(error)
            raise
        self._close(world, waiting=True)

    def _break_off(self, error: BaseException) -> None:
        with ignoring_ctrl_c(error):
            self._abandon(error)

    def _abandon(self, error: BaseException) -> None:
        world = current_world()
        monitor = monitor_of(world)
        if monitor is not None:
            monitor.raised(error)
            monitor.notified = True
        self._close(world, waiting=False)
        if monitor is not None and not dist.is_initialized():
            monitor.depart()  # no rank waits for this one's started collectives any more

    def _close(self, world: World, waiting: bool) -> None:
        self.is_closed = True
        forget(world)
        groups = self._before.groups_since(world)
        meshes = self._before.meshes_since(world)
        ends_job = self._before.is_job_since()
        monitor = monitor_of(world)
        if ends_job and monitor is not None:
            monitor.close()
        if waiting:
            self._before.destroy_since(groups)
        if ends_job:
            dist.destroy_process_group() if waiting else abandon_groups()
        self._retire(world, groups, meshes)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream.flush()

    def _retire(self, world: World, groups: Sequence[Group], meshes: Sequence[WorldMesh]) -> None:
        """Make groups and meshes of the session raise when they communicate, and forget them.

        New ones are made then.
        """
        for key in [key for key, mesh in world.meshes.items() if _is_in(mesh, meshes)]:
            del world.meshes[key]
        world.configured_meshes.difference_update(meshes)
        world._groups = {
            key: group for key, group in world._groups.items() if not _is_in(group, groups)
        }
        world.epoch += 1
        for group in groups:
            group.close(self._why(f"the group of ranks {group.ranks}"))
        for mesh in meshes:
            mesh._leave(ClosedWorld(world, self._why(repr(mesh))))

    def _why(self, what: str) -> str:
        return (
            f"{what} belongs to the session that was opened at {self.place} and is closed: make a "
            "new mesh and move the tensors to it."
        )


class WorldMesh(Protocol):
    """What a session needs of a mesh of its world: a `DeviceMesh`."""

    def _leave(self, world: World) -> None:
        """Forget all groups; new ones are asked of this world, which refuses."""


class ClosedWorld(World):
    """The world of a mesh whose session is closed; asking for a group raises MeshError."""

    def __init__(self, world: World, why: str) -> None:
        super().__init__(world.rank, world.size)
        self._why = why

    def group(self, ranks: Sequence[int], backend: GroupBackend = DEFAULT) -> Group:
        return self._make_group(tuple(ranks))

    def _make_group(self, ranks: tuple[int, ...]) -> NoReturn:
        raise errors.MeshError(self._why)


@contextmanager
def _stalls(timeout: float | None, warn: float | None) -> Iterator[None]:
    """Set the times of `watchdog` inside the block."""
    current = settings()
    before = current.warn, current.timeout
    watchdog(warn, timeout)
    try:
        yield
    finally:
        watchdog(*before)


class _Snapshot:
    """The groups and meshes that exist at the start of a session, to find those made since."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._groups, self._meshes = list(world._groups.values()), list(world.meshes.values())
        self._torch = [weakref.ref(handle) for handle in torch_groups()]

    def groups_since(self, world: World) -> list[Group]:
        """Return the groups made since: subgroups by their ranks, then those of all ranks."""
        known = self._groups if world is self._world else []
        new_groups = {
            id(group): group for group in world._groups.values() if not _is_in(group, known)
        }
        return sorted(
            new_groups.values(), key=lambda group: (group.size == world.size, group.ranks)
        )

    def meshes_since(self, world: World) -> list[WorldMesh]:
        known = self._meshes if world is self._world else []
        return [mesh for mesh in world.meshes.values() if not _is_in(mesh, known)]

    def is_job_since(self) -> bool:
        """Return whether the default process group was started since."""
        return dist.is_available() and dist.is_initialized() and self._is_since(dist.group.WORLD)

    def destroy_since(self, groups: Sequence[Group]) -> None:
        """Destroy torch's groups of these that were made since, except the default group."""
        for group in groups:
            handle = (
                group._channel and group._channel() if isinstance(group, ProcessGroup) else None
            )
            if handle is not None and handle is not dist.group.WORLD and self._is_since(handle):
                dist.destroy_process_group(handle)

    def _is_since(self, handle: Any) -> bool:
        return all(known() is not handle for known in self._torch)


def _is_in(one: object, many: Sequence[object]) -> bool:
    """Return whether `many` has this very object; equal meshes of two worlds are two objects."""
    return any(one is other for other in many)


def abandon_groups() -> None:
    """End the default group and all others without waiting for their collectives.

    Destroying a gloo group waits for its threads, which wait for ranks that may never answer. So
    gloo's groups are kept until the process exits; they cost a few sleeping threads. Other backends
    can abort their collectives.
    """
    keep_groups()
    if "nccl" in dist.get_backend_config():
        distributed_c10d._abort_process_group()
    else:
        dist.destroy_process_group()
