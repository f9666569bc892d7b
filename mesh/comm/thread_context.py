"""What the calling thread is in the middle of: all state that the library keeps for each thread.

    thread_context.recorder          None, or what records a graph in this thread
    with thread_context.setting(batch=batch):      a block sets a field, and sets it back at its end
        ...

    state = thread_context.function_state()        forward
    with thread_context.running_as(state):         recomputation: f runs in the state of its forward
        f()

Threads are simulated ranks, the device threads of autograd, and those of the program. Each starts
from the defaults below. The current mesh is not among them: it is in a context variable
(`mesh/current_mesh.py`), so that simulated ranks take it over from their caller. What a rank is in
the middle of, in whichever thread, such as `accumulate_grads()`, belongs to its `World`. What its
collectives are part of is in a `CommContext` of the world.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ContextDecorator, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from .transforms import transforms_active

if TYPE_CHECKING:
    from .world import World


class GraphRecorder(Protocol):
    """Runs functions that are not torch operators, and records them.

    Attributes:
        draws: which random numbers have been drawn; its `relative` says whether their positions
            follow from that at the start.
    """

    draws: Any

    def collective(self, group: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call the method `name` of the group, record the call, and return its result."""

    def draw(
        self, part: Callable[..., Any], seed: int, stream: int, parameters: Sequence[Any]
    ) -> Any:
        """Return the random tensor `part(seed, stream, *parameters)`, and record the draw.

        A later call draws the one at its own position.
        """

    def node_of(self, x: Any) -> Any:
        """Return what stands for a tensor in the graph; None if the recording never met it."""

    def note_equal(self, x: Any, ranks: Any) -> None:
        """Record that a plain tensor has the same values on all of these ranks."""

    def effect(self, function: Callable[..., None], values: Sequence[Any]) -> None:
        """Call a function of plain tensors, numbers and constants, and record the call."""

    def opaque(
        self,
        function: Callable[..., Any],
        inputs: Sequence[Any],
        name: str,
        group: Any,
        like: Callable[[], Any],
    ) -> Any:
        """Return `function(*inputs)` of plain tensors, with its gradient history.

        Record that later calls call it as it is, with values that may decide sizes inside.

        The shape of the result depends on those of the inputs only. The ranks of the group call it
        together. `like()` returns an empty tensor like the result, without communication.
        """

    def refuse(self, problem: str, advice: str) -> None:
        """Note, or raise, what the program does next and the graph cannot repeat.

        The text has the line of the program.
        """


class Replacement(Protocol):
    """A function of torch's that is replaced while any thread needs it."""

    def install(self) -> None:
        """Begin to need it, in one thread more."""

    def uninstall(self) -> None:
        """End what one `install` began."""


class FunctionState(NamedTuple):
    """The fields of `ThreadContext` on which the results of a function depend.

    Recomputation runs it with those of its forward.
    """

    world: World | None
    implicit_replication: bool
    plain_attention: Replacement | None
    parts: Replacement | None
    graphs_before: int | None
    sequence_order: str | None


class Setting(ContextDecorator):
    """A block in which fields of the thread's context have other values.

    It is entered with each operator on a new shape, so it is no generator.
    """

    __slots__ = ("_before", "_context", "_fields")

    def __init__(self, context: ThreadContext, fields: dict[str, Any]) -> None:
        self._context = context
        self._fields = fields

    def __enter__(self) -> None:
        context = self._context
        self._before = {name: getattr(context, name) for name in self._fields}
        context.__dict__.update(self._fields)

    def __exit__(self, *_: object) -> None:
        self._context.__dict__.update(self._before)

    def _recreate_cm(self) -> Setting:
        """Return the block of one call of a decorated function, which may call itself."""
        return Setting(self._context, self._fields)


class ThreadContext(threading.local):
    """The state of the calling thread.

    Fields of higher layers are typed `Any`; the functions named here return them with their types.

    Attributes:
        world: the simulated or null world that the thread runs in; None in that of processes, see
            `current_world`.
        implicit_replication: whether plain operands count as replicated, see
            `sm.ops.implicit_replication`.
        plain_attention: the block that runs torch's attention of plain tensors, see
            `compat.context_parallel`; None outside.
        parts: the graphs that calls of modules run, see `jit/parts.py`; None where all run eagerly.
        graphs_before: in a recomputation, the number of the first graph that its forward could not
            run yet (`ops/recomputation.py`); None outside.
        sequence_order: that of the sequences which `compat._context_parallel_shard` has split last;
            None if it has not been called.

        recorder: what records the graph that is being made; collectives and random numbers are
            shown to it.
        axis_env: the environment of the innermost mapped function (`current_axis_env`).
        batch: how the innermost `vmap` has split its examples (`current_batch`).
        level_count: number of levels of torch.func that the library has opened.
        vmap_randomness: the `randomness` of the `vmap`s among them.
        forward_mode_depth: number of `forward_mode` blocks around.
        grad_depth: number of functions around that are being differentiated.
        grad_is_nested: whether the results of `grad` are to be differentiated again.
        starts_async: whether collectives are to be left in flight: this is a call by `async_start`.
        schedule: that of the running `fully_shard` model (`Unit.call`).
        elementwise_step: which of torch's optimizer steps over lists runs, "foreach" or "fused";
            None for others.
        weights: those of the forward whose backward is to be split (`SplitBackward.recording`).
        in_joined_function: whether a function runs whose forward and backward are two graphs
            (`jit/joined.py`), also where it runs eagerly; a split backward does not look inside.
        runs_opaque: whether a graph runs a function as it is; modules in it use the parameters that
            it was passed.
        segment_calls: the collectives of the compiled segment that runs, as functions of x that
            return the result.
        last_draw: seed and number of the last random tensor that was drawn; a new tuple after each.
        on_stand_ins: whether the operators that run are the library's, on tensors without values
            that stand for sharded ones.
        outside_mesh: whether an operator runs on a rank outside of its tensors' mesh, on stand-ins
            as well.
        own_torch_call: whether a call of torch.distributed is the library's, which has recorded it.
        module_calls: what calls of a pipeline's units are shown to (`CallObserver`); None out of
            a stage's forward, and inside of a unit.
        local_map_tree: the tree of what the function of the last `local_map` returned, until its
            caller takes it.
    """

    world: World | None = None
    implicit_replication: bool = False
    plain_attention: Replacement | None = None
    parts: Replacement | None = None
    graphs_before: int | None = None
    sequence_order: str | None = None

    recorder: GraphRecorder | None = None
    axis_env: Any = None
    batch: Any = None
    level_count: int = 0
    vmap_randomness: tuple[str, ...] = ()
    forward_mode_depth: int = 0
    grad_depth: int = 0
    grad_is_nested: bool = False
    starts_async: bool = False
    schedule: Any = None
    elementwise_step: str | None = None
    weights: Any = None
    in_joined_function: bool = False
    runs_opaque: bool = False
    segment_calls: Sequence[Callable[[Any], Any]] = ()
    last_draw: tuple[int, int] | None = None
    on_stand_ins: bool = False
    outside_mesh: bool = False
    own_torch_call: bool = False
    module_calls: Any = None
    local_map_tree: Any = None

    @property
    def needs_each_operator(self) -> bool:
        """Whether the thread is inside of what needs operators one by one.

        A recording, a mapped function, one that is being differentiated, a transform.
        """
        is_inside = self.recorder is not None or self.axis_env is not None or self.grad_depth > 0
        return is_inside or transforms_active()

    def setting(self, **fields: Any) -> Setting:
        """Set fields for the block, or for the calls of a function, and set them back at its end.

        Raises:
            AttributeError: there is no such field.
        """
        return Setting(self, fields)

    def reset(self) -> None:
        """Set all fields to their defaults: a new rank runs in this thread."""
        self.__dict__.clear()

    def function_state(self) -> FunctionState:
        """Return the state in which a function runs now, for `running_as`."""
        return FunctionState(
            self.world,
            self.implicit_replication,
            self.plain_attention,
            self.parts,
            self.graphs_before,
            self.sequence_order,
        )

    @contextmanager
    def running_as(self, state: FunctionState) -> Iterator[None]:
        """Run the block in this state, maybe of another thread, and restore this thread's own."""
        before = self.function_state()
        self._set(state)
        try:
            yield
        finally:
            self._set(before)

    def _set(self, state: FunctionState) -> None:
        before = self.function_state()
        for replacement in (state.plain_attention, state.parts):
            if replacement is not None:
                replacement.install()
        self.__dict__.update(state._asdict())
        for replacement in (before.plain_attention, before.parts):
            if replacement is not None:
                replacement.uninstall()


thread_context = ThreadContext()
