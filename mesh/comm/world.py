"""World: one rank's view of all ranks, which gives out the groups that they communicate in."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary, WeakSet, WeakValueDictionary

from .. import errors
from .comm_context import CommContext
from .group_backend import DEFAULT, GroupBackend
from .recording.recorder import CallMonitor
from .recording.trace_buffer import TraceBuffer

if TYPE_CHECKING:
    from .group import Group, Observer

State = TypeVar("State")


class World(ABC):
    """One rank's view of a program's ranks: processes, simulated ones, or none (`null_world`).

    Attributes:
        rank: global rank of the caller.
        size: number of ranks.
        observers: called with a `CollectiveRecord` before each collective of this rank. An observer
            may raise to prevent it, or return a function that is called when it has completed.
        meshes: the meshes of this world; equal meshes are one object, for as long as something
            refers to it.
        configured_meshes: those that the program has changed, which live as long as the world: a
            mesh that is made again must not be without the change on the ranks that have collected
            it, and with it on others.
        dependents: what keeps data of this world; its `forget_world(world)` is called when the
            world has ended.
        current_meshes: those that are current somewhere, by what `current_mesh.py` refers to them
            with.
        trace_buffer: this rank's part of the ledger.
        monitor: what monitors the ranks; None in simulated and null worlds, and for a process
            alone.
        epoch: number of sessions closed so far. Groups made in different epochs are different, even
            of the same ranks.
        comm_context: what the next collectives of this thread are part of.
        attention: the block of `sm.parallel.context_parallel` that this rank is in; None outside.
            By rank and not by thread: a part of the forward may run in another thread.
    """

    def __init__(self, rank: int, size: int, observers: list[Observer] | None = None) -> None:
        self.rank = rank
        self.size = size
        self.observers: list[Observer] = [] if observers is None else observers
        self.meshes: WeakValueDictionary[Any, Any] = WeakValueDictionary()
        self.configured_meshes: set[Any] = set()
        self.dependents: WeakSet[Any] = WeakSet()
        self.current_meshes: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
        self.monitor: CallMonitor | None = None
        self.comm_context = CommContext()
        self.epoch = 0
        self.attention: Any = None
        self._trace_buffer: TraceBuffer | None = None
        # by ranks; with another backend than the default one, by (ranks, backend)
        self._groups: dict[Any, Group] = {}
        self._states: dict[Any, Any] = {}

    @property
    def trace_buffer(self) -> TraceBuffer:
        if self.monitor is not None:
            return self.monitor.buffer
        if self._trace_buffer is None:
            self._trace_buffer = TraceBuffer.private(self.rank, self.size)
        return self._trace_buffer

    def axes_of(self, ranks: tuple[int, ...]) -> str:
        """Return the mesh axes that a group of ranks runs over, "dp" or "dp,tp".

        The ranks if it is not the group of any axes.
        """
        for mesh in list(self.meshes.values()):
            axes = mesh.axes_over(ranks)
            if axes is not None:
                return ",".join(axes)
        return f"ranks {','.join(map(str, ranks))}"

    def state(self, kind: Callable[[World], State]) -> State:
        """Return the state that a part of the library has in this world.

        The one object of this class, made as `kind(world)` when it is first asked for.
        """
        state = self._states.get(kind)
        if state is None:
            state = self._states.setdefault(kind, kind(self))
        return state

    def end(self) -> None:
        """Let those that keep data of this world forget it: no program will run in it again."""
        for dependent in list(self.dependents):
            dependent.forget_world(self)

    def retire_monitor(self) -> None:
        """Continue without a monitor; the ledger is kept."""
        self._trace_buffer, self.monitor = self.trace_buffer, None

    @contextmanager
    def attending(self, attention: Any) -> Iterator[None]:
        """Set `attention` for the block."""
        before, self.attention = self.attention, attention
        try:
            yield
        finally:
            self.attention = before

    def __repr__(self) -> str:
        return f"{type(self).__name__}(rank={self.rank}, size={self.size})"

    def group(self, ranks: Sequence[int], backend: GroupBackend = DEFAULT) -> Group:
        """Return the group of these global ranks, in any order; one object per ranks and backend.

        Raises: MeshError when a rank appears twice or does not exist, or this rank is not among
        them.

        Communication: none (a process group is made by its first collective).
        """
        key = tuple(ranks)
        group = self._groups.get(key) if backend is DEFAULT else None
        if group is None:
            ordered = self._sorted_ranks(key)
            group = self._backend_group(ordered, backend)
            if backend is DEFAULT:
                self._groups[key] = group
        return group

    def _backend_group(self, ranks: tuple[int, ...], backend: GroupBackend) -> Group:
        """Return the group of these ascending ranks. Only processes have backends."""
        group = self._groups.get(ranks)
        if group is None:
            group = self._groups[ranks] = self._make_group(ranks)
        return group

    def _sorted_ranks(self, ranks: tuple[int, ...]) -> tuple[int, ...]:
        ordered = tuple(sorted(int(r) for r in ranks))
        if len(set(ordered)) != len(ordered):
            raise errors.repeated_ranks(ordered)
        if not ordered or ordered[0] < 0 or ordered[-1] >= self.size:
            raise errors.ranks_outside_world(
                [r for r in ordered if not 0 <= r < self.size], self.size
            )
        if self.rank not in ordered:
            raise errors.not_a_member(self.rank, ordered)
        return ordered

    @abstractmethod
    def _make_group(self, ranks: tuple[int, ...]) -> Group: ...
