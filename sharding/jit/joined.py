"""A function whose result is differentiated outside: two programs joined by a node of autograd.

    first call     f runs on stand-ins for its inputs, which have gradient histories of their own:
                   the forward is recorded
    backward       the gradients of the stand-ins are computed: the backward is recorded
    later calls    forward program -> results, and what backward needs -> backward program

                   inputs ──► [ forward program ] ──► results
                                     │ saved
                   grads  ◄── [ backward program ] ◄── gradients of the results

Inputs are the arguments, and the parameters and buffers of the modules that f calls, which are read
anew in every call: under `fully_shard` each call has other tensors. Gradients of parameters leave
through the node, so that autograd adds them to `.grad`, and calls hooks, as in eager code. With
gradients come and go their origins (`grad_origin.py`), so that a program has the collectives of
eager code, as has what follows it.

The programs have the collectives of the function in the function's order: no pass changes them, so
each rank may record in a call of its own. What an installed package reads of a tensor selects the
recording, if it takes no collective (`selection.py`).
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from ...mesh.comm.current_world import current_world
from ...mesh.comm.first_use import first_block
from ...mesh.comm.thread_context import thread_context
from ...mesh.comm.world import World
from ..autograd import engine_hooks
from ..autograd.grad_origin import Origin, note_origin, noted_origin
from ..functional.transforms.parts import with_part
from ..layout.layout import Layout
from ..ops.recomputation import next_graph_number
from ..redistribute.linear import redistribute_linear
from ..tensor.saved_wrapper import wrapper_to_save
from ..tensor.sharded_tensor import ShardedTensor, local_of
from ..trees import flatten, unflatten
from .backends.segments import Backend
from .draws import Draw
from .entry import Entry, key_of, value_of
from .errors import JitError
from .history import History, WithoutTraced, join
from .passes.dead_code import clean
from .passes.hoist_reads import hoist_reads, is_movable
from .program import Program, Runner, is_pure, run_plainly
from .recorder import GraphRecorder
from .recording import Recording, finish, flat_result, run_recorded, settle
from .results import Returned, unflatten_result
from .scalars import TracedFloat
from .selection import Recordings
from .state.guard import Guard
from .state.slots import GradSlot, slots_of
from .state.snapshot import Snapshot

_RECORDINGS = 8  # of one function; further calls run eagerly
_WRITES_TO_LEAF = "a leaf Variable that requires grad is being used in an in-place operation"
_ATTEMPTS = 3  # recordings in a row that were dropped
_NO_BACKWARD = "no backward ran through its results"


class JoinedFunction:
    """A function that runs as a forward and a backward program.

    Args:
        f: the function.
        modules: those whose parameters and buffers it uses.
        backend: returns what compiles the programs.
        name: of the function, for people.
        fullgraph: whether what a graph cannot repeat is an error.
        root: the object whose state the function depends on; the function itself by default.
        check_state: whether calls compare that state.

    Attributes:
        modules: all modules whose parameters and buffers it uses.
        entries: for each signature the recordings, the newest last.
        broken: why it has no graph; None as long as it may have one.
        limit: why calls without a recording are not recorded; None as long as they are.
        is_eager: whether `broken` is what `why_eager` of a call has returned.
    """

    def __init__(
        self,
        f: Callable[..., Any],
        modules: Sequence[nn.Module],
        backend: Callable[[], Backend],
        name: str,
        fullgraph: bool = False,
        root: Any = None,
        check_state: bool = True,
    ) -> None:
        first_block.begin()  # recomputations know which graphs their forwards could run
        self._f, self._backend, self.name, self._fullgraph = f, backend, name, fullgraph
        self._root, self.check_state = (f if root is None else root), check_state
        self.modules = list(dict.fromkeys(x for module in modules for x in module.modules()))
        self.entries: dict[Any, Recordings] = {}
        self.broken: str | None = None
        self.limit: str | None = None
        self.is_eager = False
        self._broken_at = 0  # the number of graphs then
        self._pending: weakref.ref[_RecordedCall] | None = None
        self._dropped = 0
        self._has_no_backward = False  # an error of the next call that would be recorded

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.is_over:
            return self._f(*args, **kwargs)
        with thread_context.setting(in_joined_function=True):
            return self._call(args, kwargs)

    def call(self, args: Sequence[Any], why_eager: Callable[[], str | None]) -> Any:
        """Call the function.

        Args:
            why_eager: returns why a call that has no recording, and all later ones, are eager; None
                if they are not.
        """
        with thread_context.setting(in_joined_function=True):
            return self._call(tuple(args), {}, why_eager)

    @property
    def is_over(self) -> bool:
        """Whether calls have no graph, and in a recomputation, whether its forward had none."""
        before = thread_context.graphs_before
        return self.broken is not None and (before is None or before > self._broken_at)

    def _call(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        why_eager: Callable[[], str | None] | None = None,
    ) -> Any:
        world = current_world()
        if (
            self.is_over
            or thread_context.needs_each_operator
            or self._is_recomputed_outside_of_unit()
        ):
            return self._f(*args, **kwargs)
        leaves, tree = flatten((args, kwargs))
        count = len(leaves)
        leaves = [*leaves, *(holder[name] for holder, name in self._state())]
        key = tree, key_of(leaves)
        entries = self.entries.get(key)
        entries = Recordings() if entries is None else entries
        selected = entries.select(leaves)
        if selected.entry is not None:
            return selected.entry.run([*leaves, *selected.carried], world, self._backend())
        if thread_context.graphs_before is not None:
            return self._f(*args, **kwargs)  # a recomputation; its forward was eager, too
        if self._pending is not None and self._pending() is not None:
            return self._f(*args, **kwargs)  # a recording waits for its backward
        if len(self.recordings) >= _RECORDINGS:
            self.limit = (
                f"{self.name} was recorded {_RECORDINGS} times: its arguments or its state change"
            )
            if self.modules:  # one inside may have a state that does not change
                self.give_up(self.limit)
            return self._f(*args, **kwargs)
        if self._has_no_backward:
            self._has_no_backward, self._dropped = False, 0
            raise JitError(
                f"{_NO_BACKWARD} in {_ATTEMPTS} calls of {self.name}; turn gradients off around "
                "such calls, with torch.no_grad()"
            )
        reason = why_eager() if why_eager is not None else None
        if reason is not None:
            self.give_up(reason)
            self.is_eager = True
        if self.is_over:
            return self._f(*args, **kwargs)
        self.entries[key] = entries
        is_function = why_eager is not None
        return self._record(leaves, count, tree, entries, world, is_function)

    @property
    def recordings(self) -> list[JoinedEntry]:
        """The recordings of all signatures."""
        return [entry for entries in self.entries.values() for entry in entries]

    def _is_recomputed_outside_of_unit(self) -> bool:
        """Return whether `torch.utils.checkpoint` is around the call, inside of the modules' unit.

        It computes again after the call of the unit, with other parameters.
        """
        hooks = engine_hooks.saved_tensor_hooks()
        if hooks is None or getattr(hooks[0], "__module__", "") != "torch.utils.checkpoint":
            return False
        return any(getattr(module, "_shardmesh_unit", None) is not None for module in self.modules)

    def _state(self) -> list[tuple[dict[str, Any], str]]:
        """Return where the modules hold their parameters and buffers."""
        return [
            (holder, name)
            for module in self.modules
            for holder in (module._parameters, module._buffers)
            for name, value in holder.items()
            if value is not None
        ]

    def _record(
        self,
        leaves: Sequence[Any],
        count: int,
        tree: Any,
        entries: Recordings,
        world: World,
        is_function: bool,
    ) -> Any:
        """Call the function and record it; its backward is recorded when that runs."""
        stand_ins = _stand_ins(leaves)
        own = [id(d) for module in self.modules for d in (module._parameters, module._buffers)]
        values = [(f"args[{i}]", x) for i, x in enumerate(leaves) if not isinstance(x, Tensor)]
        look = functools.partial(Snapshot, [("f", self._root), *values], own)
        snapshot = look()

        def call(inputs: Sequence[Any]) -> Any:
            args, kwargs = unflatten(tree, list(inputs[:count]))
            return self._f(*args, **kwargs)

        history = _history_outside(snapshot)
        if history is not None:
            self.refuse(
                f"{history}, which {self.name} reaches, has a gradient history of its own, in "
                "which its arguments may be; pass it as an argument, or detach it"
            )
            return call(leaves)
        guard = Guard(snapshot, set())
        recorder = GraphRecorder(world, fullgraph=self._fullgraph)

        saved = _SavedTensors(recorder)
        try:
            with _swap_values(self._state(), stand_ins[count:]), saved.noting():
                result = run_recorded(call, stand_ins, snapshot, [], recorder)
        except RuntimeError as error:
            if not str(error).startswith(_WRITES_TO_LEAF):
                raise
            settle(snapshot)
            self._refuse_write(recorder, snapshot, error)
            return call(leaves)
        if recorder.builder.refusal is not None:
            settle(snapshot)
        self._check_history_outside(snapshot, leaves, stand_ins, is_function)
        replaced = [x for x, other in zip(stand_ins, leaves, strict=True) if x is not other]
        if any(slot.get(()) is not None for x in replaced for slot in _slots_of_stand_in(x)):
            raise JitError(
                f"{self.name} calls backward() itself, and sm.jit of a module or of a function "
                "whose result is differentiated outside would lose the gradients of its inputs and "
                "parameters; use torch.autograd.grad, or call backward() outside of it"
            )
        is_repeatable = all(map(is_pure, recorder.builder.operators))
        recorded = _RecordedCall(
            self, recorder, leaves, stand_ins, result, saved, look, snapshot, guard, entries
        )
        recorded.views = _views_among(recorded.flat, leaves[:count], stand_ins[:count])
        if recorded.views:
            self.refuse(
                f"{self.name} returns a view of an argument that requires grad, and a write to it "
                "would not reach the history of the argument"
            )
            if is_repeatable and snapshot.change(set()) is None:
                return call(leaves)
            recorded.is_recorded = True  # there is nothing to record of its backward
        change = snapshot.change(set()) if recorder.builder.refusal is None else None
        if change is not None:
            self.drop(f"{self.name} changes Python state in every call: {change}")
            recorded.is_recorded = True  # there is nothing to record of its backward
        return recorded.results()

    def _check_history_outside(
        self,
        snapshot: Snapshot,
        leaves: Sequence[Any],
        stand_ins: Sequence[Any],
        is_function: bool,
    ) -> None:
        """Check that nothing with a gradient history is left outside but for the results.

        That history ends at the stand-ins, so a gradient from outside would be lost there.

        Args:
            is_function: whether Python state counts as well. Modules may fill caches.

        Raises: JitError; the function cannot be called again, since it has had an effect.
        """
        known = set(map(id, leaves))
        tensors = [x for x, y in zip(leaves, stand_ins, strict=True) if x is y]
        held = (holder[name] for holder, name in self._state())
        tensors += [x for x in held if id(x) not in known]
        path = _history_outside(snapshot)
        if any(isinstance(x, Tensor) and local_of(x).grad_fn is not None for x in tensors):
            path = path or "an argument or a buffer"
        if path is None and is_function and snapshot.change(set()) is not None:
            path = _history_outside(snapshot.again())
        if path is not None:
            reason = (
                f"{self.name} leaves a value with a gradient history in {path}, and a gradient "
                "from there would not reach its inputs; return it, or leave one that is detached"
            )
            self.give_up(reason)
            raise JitError(reason)

    def _refuse_write(
        self, recorder: GraphRecorder, snapshot: Snapshot, error: RuntimeError
    ) -> None:
        """Give up on a function that writes in place to an argument with a gradient history.

        Torch takes the stand-in of such an argument for a leaf.

        Raises: JitError with `fullgraph`, or if the function cannot be called again, since it has
            had an effect.
        """
        reason = (
            f"{self.name} writes in place to an argument that requires grad, so the history of "
            "the caller's tensor would change; write to a copy of it"
        )
        self.give_up(reason)
        is_repeatable = all(map(is_pure, recorder.builder.operators))
        if self._fullgraph or not is_repeatable or snapshot.change(set()) is not None:
            raise JitError(reason) from error

    def give_up(self, reason: str) -> None:
        """Run the function eagerly from now on."""
        if self.broken is None:
            self.broken, self._broken_at = reason, next_graph_number()

    def refuse(self, reason: str) -> None:
        """Give up on the function. Raises: JitError with `fullgraph`."""
        if self._fullgraph:
            raise JitError(reason)
        self.give_up(reason)

    def drop(self, reason: str) -> None:
        """Note that a recording was of no use; after some of them the function runs eagerly.

        Raises: JitError then, with `fullgraph`.
        """
        self._dropped += 1
        if self._dropped >= _ATTEMPTS:
            self.refuse(reason)

    def drop_without_backward(self) -> None:
        """Note that nobody has differentiated the results of a call that was recorded.

        With `fullgraph` the next call that would be recorded raises: this runs where an exception
        reaches nobody.
        """
        self._dropped += 1
        if self._dropped >= _ATTEMPTS and self._fullgraph:
            self._has_no_backward = True
        elif self._dropped >= _ATTEMPTS:
            self.give_up(_NO_BACKWARD)


class _RecordedCall:
    """The call that is recorded: its results have the history of eager code.

    Args:
        function: the function.
        recorder: has recorded its forward.
        leaves, stand_ins: the inputs, and what the function had in their place.
        result: what it returned.
        saved: what autograd has saved.
        look: returns a snapshot of what the function reaches.
        snapshot, guard: that of before the call.
        entries: where the recording goes.
    """

    def __init__(
        self,
        function: JoinedFunction,
        recorder: GraphRecorder,
        leaves: Sequence[Any],
        stand_ins: Sequence[Any],
        result: Any,
        saved: _SavedTensors,
        look: Callable[[], Snapshot],
        snapshot: Snapshot,
        guard: Guard,
        entries: Recordings,
    ) -> None:
        self.function, self.recorder, self.entries = function, recorder, entries
        self.leaves, self.stand_ins = leaves, stand_ins
        self._check: weakref.finalize[Any, Any] | None = None
        self._entry: JoinedEntry | None = None
        self.flat, self.tree, self._instances = flat_result(result, snapshot, recorder)
        self._saved, self._look = saved, look
        self.snapshot, self.guard = snapshot, guard
        pairs = zip(map(local_of, leaves), map(local_of, stand_ins), strict=True)
        # a tensor that is held in several places is one input
        unique = {id(x): (x, y) for x, y in pairs if x is not y}
        inner = [y for _, y in unique.values()]
        # by reference: tensors in closures, and attributes of modules that are no parameters
        own = {id(y) for y in inner}
        captured = [one.ref() for one in recorder.builder.captured]
        self.others = [
            x for x in captured if x is not None and x.requires_grad and id(x) not in own
        ]
        self.leaf_inputs = [x for x, _ in unique.values()]
        self.inputs = [*self.leaf_inputs, *self.others]
        self._inner = [*inner, *self.others]
        self._history = History([], self._inner)
        self.end_of_forward = recorder.builder.call(_end_of_forward, ())
        self.slots: list[int] = []
        self.views: set[int] = set()  # results that are views of arguments
        self.is_recorded, self.draws = False, recorder.draws.end()

    def results(self) -> Any:
        """Return the results; those with a history are joined to the inputs of the function."""
        function, builder = self.function, self.recorder.builder
        flat = [x.node.hint if isinstance(x, TracedFloat) else x for x in self.flat]
        back = {id(y): x for x, y in zip(self.leaves, self.stand_ins, strict=True)}
        flat = [back.get(id(x), x) for x in flat]
        self.differentiable = [
            i
            for i, x in enumerate(flat)
            if isinstance(x, Tensor)
            and local_of(x).requires_grad
            and id(x) not in {id(y) for y in self.leaves}
        ]
        if builder.refusal is not None:
            function.give_up(str(builder.refusal))
        if self.differentiable:
            outputs = [local_of(flat[i]) for i in self.differentiable]
            self.outputs = outputs
            self._history = History(outputs, self._inner)
            self.slots = self._history.slots
            inputs = [self.inputs[i] for i in self.slots]
            detached = [
                _unwritable_view(x) if i in self.views else x.detach()
                for i, x in zip(self.differentiable, outputs, strict=True)
            ]
            joined = join(self.backward, (), detached, inputs)
            for i, x in zip(self.differentiable, joined, strict=True):
                flat[i] = with_part(flat[i], x)
            if builder.refusal is None and not self.is_recorded:
                function._pending = weakref.ref(self)
                self._check = weakref.finalize(
                    self, _check_recorded, weakref.ref(function), self.entries, len(self.entries)
                )
                self._check.atexit = False
        elif builder.refusal is None and not self.is_recorded:
            self.finish([], [])
        returned = Returned(flat, self.tree, self._instances)
        self._instances = []  # they refer to this by their histories
        return returned.build()

    # -- backward ----------------------------------------------------------------------------------

    def backward(self, saved: Sequence[Any], grads: Sequence[Tensor | None]) -> list[Any]:
        """Return the gradients of the inputs by slot; record them the first time."""
        grads = _seeds(grads, [_Kind.of(x) for x in self.outputs])
        outputs = [x for x, g in zip(self.outputs, grads, strict=True) if g is not None]
        seeds = [g for g in grads if g is not None]
        builder = self.recorder.builder
        if self.is_recorded or builder.refusal is not None:
            self._check_gradients(grads)
            with WithoutTraced():
                return self._history.gradients(outputs, seeds)
        self.is_recorded = True
        grads = _distinct(grads)
        seeds = [g for g in grads if g is not None]
        for i, g in enumerate(grads):
            if g is not None:
                builder.know(g, builder.placeholder(f"gradient_{i}"))
                noted = noted_origin(g)
                if noted is not None:
                    _, origin = noted
                    builder.know(origin.tensor, builder.placeholder(f"origin_{i}"))
        before = self._look()  # hooks of backward may change Python state
        self._saved.load()
        try:
            with torch.autograd.set_multithreading_enabled(False), self.recorder:
                self.recorder.draws.torch.pass_by(builder.graph)
                gradients = self._history.gradients(outputs, seeds)
                self.recorder.follow_generators()
        finally:
            self._saved.unload()
        change = before.change(set())
        if builder.refusal is not None:
            self.function.give_up(str(builder.refusal))
        elif change is not None:
            self.function.give_up(f"the backward of {self.function.name} changes state: {change}")
        else:
            self.finish(grads, gradients)
        return gradients

    def _check_gradients(self, grads: Sequence[Tensor | None]) -> None:
        """Give up on the function if a result gets a gradient that had none in the recording."""
        entry = self._entry
        if entry is None or entry not in self.entries:
            return
        if any(g is not None and not had for g, had in zip(grads, entry.had_grads, strict=True)):
            self.entries.remove(entry)
            self.function.refuse(
                f"backward runs more than once through {self.function.name}, for other results"
            )

    def finish(self, grads: Sequence[Tensor | None], gradients: Sequence[Tensor | None]) -> None:
        """Make the programs."""
        function = self.function
        function._pending = None
        if self._check is not None:
            self._check.detach()
        try:
            entry = _entry(self, grads, gradients)
        except _ReadInside as error:
            function.refuse(str(error))
        except JitError as error:
            function.drop(str(error))
        else:
            self._entry = entry
            self.entries.append(entry)
            function._dropped = 0


def _check_recorded(function: Any, entries: list[Any], count: int) -> None:
    alive = function()
    if alive is not None and len(entries) == count:
        alive.drop_without_backward()


def _entry(
    call: _RecordedCall, grads: Sequence[Tensor | None], gradients: Sequence[Tensor | None]
) -> JoinedEntry:
    """Return the recording of a call."""
    builder, leaves = call.recorder.builder, call.stand_ins
    nodes = list(builder.graph.nodes)
    middle = nodes.index(call.end_of_forward)
    of_backward = nodes[middle + 1 :]
    of_forward = set(nodes[:middle])
    seeds = {f"{what}_{i}" for i in range(len(grads)) for what in ("gradient", "origin")}
    needed: dict[fx.Node, None] = {}
    if any(isinstance(node.target, Draw) for node in of_backward):
        raise JitError("its backward draws random numbers")
    _check_reads([node for node in of_backward if is_movable(node)])
    for node in of_backward:
        needed |= {x: None for x in node.all_input_nodes if x in of_forward}
    of_gradients = []
    for g in gradients:
        node = None if g is None else builder.node_of(g)
        if g is not None and node is None:
            raise JitError("a gradient was made without an operator of torch")
        of_gradients.append(node)
    origins = []
    for i, g in enumerate(gradients):
        noted = None if g is None else noted_origin(g)
        node = None if noted is None else builder.node_of(noted[1].tensor)
        if node is not None:
            origins.append((i, _OriginKind.of(gradients[i])))
            of_gradients.append(node)
    needed |= {node: None for node in of_gradients if node in of_forward}
    graph, copies = fx.Graph(), {}
    saved = [x for x in needed if not (x.op == "placeholder" and x.target in seeds)]
    for x in [*saved, *(n for n in nodes if n.op == "placeholder" and n.target in seeds)]:
        copies[x] = graph.placeholder(x.name)
        copies[x].meta = dict(x.meta)
    for node in of_backward:
        copies[node] = graph.node_copy(node, copies.__getitem__)
        copies[node].meta = dict(node.meta)
    graph.output(tuple(None if node is None else copies[node] for node in of_gradients))
    clean(graph)
    for node in reversed(of_backward):
        builder.graph.erase_node(node)
    builder.graph.erase_node(call.end_of_forward)
    for node in nodes:
        if node.op == "placeholder" and node.target in seeds:
            builder.graph.erase_node(node)
    recording = finish(
        call.recorder, leaves, call.snapshot, call.flat, call.tree, call.draws, saved
    )
    if recording.derived:
        raise JitError(
            f"{call.function.name} uses a tensor that the library has made from parameters, as "
            "where modules in a unit of fully_shard are recomputed inside of its call: then name "
            "the recomputed block as the unit, fully_shard(model, mesh, units=[Block])"
        )
    reads = [node for node in recording.program.graph.nodes if is_movable(node)]
    program = hoist_reads(recording.program, (), agreed=False, collectives=False)
    _check_reads([node for node in reads if node in program.graph.nodes])
    numbers = {
        copies[node]: int(node.target.rpartition("_")[2])
        for node in nodes
        if node.op == "placeholder" and node.target in seeds
    }
    seeds_of = _seeds_of_outputs(graph, len(gradients), numbers)
    recording = recording._replace(program=program)
    return JoinedEntry(call, recording, graph, saved, grads, origins, seeds_of)


def _seeds_of_outputs(
    graph: fx.Graph, count: int, numbers: dict[fx.Node, int]
) -> list[frozenset[int]] | None:
    """Return which gradients of results the first outputs of a backward depend on.

    None if operators of it write to tensors or communicate: then all of them count.

    Args:
        numbers: for the inputs that are such gradients or their origins the number of the result.
    """
    of: dict[fx.Node, frozenset[int]] = {}
    for node in graph.nodes:
        if node in numbers:
            of[node] = frozenset({numbers[node]})
        elif node.op == "call_function" and not is_pure(node):
            return None
        else:
            of[node] = frozenset[int]().union(*(of[x] for x in node.all_input_nodes))
    (output,) = (node for node in graph.nodes if node.op == "output")
    values = output.args[0][:count]
    return [frozenset() if x is None else of[x] for x in values]


class _ReadInside(JitError):
    """A value is read in the middle of a program, on which the rest depends."""


def _check_reads(inside: Sequence[fx.Node]) -> None:
    """Raise a `_ReadInside` if there are values that an installed package reads inside a graph."""
    for read in inside:
        _, _, place, *why = (*read.args,)
        reason = f": {why[0]}" if why else ""
        raise _ReadInside(f"{place}: a value is read, on which the rest depends{reason}")


class JoinedEntry(Entry):
    """A recorded call of one signature: its forward program, and that of backward.

    Attributes:
        backward_program: None where no result has a history.
        had_grads: which of the results with a history had a gradient in the recording.
        inputs: the leaves that the node of autograd joins to the results.
    """

    def __init__(
        self,
        call: _RecordedCall,
        recording: Recording,
        graph: fx.Graph,
        saved: Sequence[fx.Node],
        grads: Sequence[Tensor | None],
        origins: list[tuple[int, _OriginKind]],
        seeds_of: Sequence[frozenset[int]] | None,
    ) -> None:
        super().__init__(recording, call.guard, call.leaves, [], None, call.function.check_state)
        recording.program.name = call.function.name
        self.backward_program: Any = None
        self.backward_runner: Runner | None = None
        first = {id(local_of(x)): i for i, x in reversed(list(enumerate(call.leaves)))}
        self.inputs = [first[id(x)] for x in call.leaf_inputs]
        self._others = call.others
        self._slots = call.slots
        self._with_history = call.differentiable if grads else []
        self.had_grads = [g is not None for g in grads]
        self._kinds = [_Kind.of(x) for x in call.outputs] if grads else []
        self._origins = list(map(_OriginKind.of, grads))
        self._origins_of_gradients = origins
        self._seeds_of = seeds_of
        if grads:
            names = [node.name for node in saved]
            for i, (had, kind) in enumerate(zip(self.had_grads, self._origins, strict=True)):
                names += [f"gradient {i}"] if had else []
                names += [f"origin of gradient {i}"] if kind is not None else []
            self.backward_program = Program(
                graph,
                [],
                names,
                recording.program.draws._replace(offset=0, seed=None),
                recording.program.rank,
                name=f"backward of {call.function.name}",
            )
        self._number_of_saved = len(saved)

    def run(self, leaves: Sequence[Any], world: World, backend: Backend) -> Any:
        """Call the forward program; join its results to the inputs.

        Args:
            leaves: the inputs, then what the prologue has returned.
        """
        outputs = self._outputs(leaves, world, backend)
        results = [value_of(result, outputs, leaves) for result in self.recording.results]
        if self.backward_program is not None:
            backward = functools.partial(self.backward, backend)
            saved = outputs[len(outputs) - self._number_of_saved :]
            local_results = [local_of(results[i]) for i in self._with_history]
            inputs = [*(local_of(leaves[i]) for i in self.inputs), *self._others]
            inputs = [inputs[i] for i in self._slots]
            joined = join(backward, saved, local_results, inputs)
            for i, x in zip(self._with_history, joined, strict=True):
                results[i] = with_part(results[i], x)
        return unflatten_result(self.recording.tree, results)

    def backward(self, backend: Backend, saved: Sequence[Any], grads: Sequence[Any]) -> list[Any]:
        """Call the backward program."""
        for i, (g, had) in enumerate(zip(grads, self.had_grads, strict=True)):
            if g is not None and not had:
                raise JitError(
                    f"result {i} of {self.recording.program.name} under sm.jit got a gradient, and "
                    "had none when its backward was recorded; call the module itself for this loss"
                )
        inputs = list(saved)
        seeds = zip(
            _seeds(grads, self._kinds), self._kinds, self.had_grads, self._origins, strict=True
        )
        for g, kind, had, origin in seeds:
            if had:
                g = kind.zeros() if g is None else g
                inputs.append(g)
                inputs += [] if origin is None else [origin.tensor_of(g)]
        if self.backward_runner is None:
            self.backward_runner = backend(self.backward_program, inputs)
        outputs = list(run_plainly(self.backward_runner, inputs))
        count = len(outputs) - len(self._origins_of_gradients)
        gradients = outputs[:count]
        for (i, kind), x in zip(self._origins_of_gradients, outputs[count:], strict=True):
            gradients[i] = kind.with_origin(gradients[i], x)
        if self._seeds_of is not None:
            present = {i for i, g in enumerate(grads) if g is not None}
            for i, of in enumerate(self._seeds_of):
                if of and of.isdisjoint(present):
                    gradients[i] = None
        return gradients


class _OriginKind(NamedTuple):
    """The layouts of a gradient with an origin, and of that.

    Attributes:
        layout: of the gradient.
        of_origin, grad_layout: as in `Origin`.
        kind: of the origin's tensor.
    """

    layout: Layout
    of_origin: Layout
    grad_layout: Layout | None
    kind: _Kind

    @classmethod
    def of(cls, g: Tensor | None) -> _OriginKind | None:
        noted = None if g is None else noted_origin(g)
        if noted is None:
            return None
        layout, (x, of_origin, grad_layout) = noted
        return cls(layout, of_origin, grad_layout, _Kind.of(x))

    def tensor_of(self, g: Tensor) -> Tensor:
        """Return the tensor of a gradient's origin.

        A gradient without such an origin, as that of another loss than was recorded, is
        redistributed.
        """
        noted = noted_origin(g)
        if noted is not None and self == type(self).of(g):
            return noted[1].tensor
        return _dense_like(redistribute_linear(g, self.layout, self.of_origin), self.kind)

    def with_origin(self, g: Tensor, x: Tensor) -> Tensor:
        """Return a gradient whose origin is this tensor."""
        return note_origin(g, self.layout, Origin(x, self.of_origin, self.grad_layout))


class _Kind(NamedTuple):
    """How a result is laid out in memory: by its own strides, or densely if elements share it."""

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, x: Tensor) -> _Kind:
        strides = torch.empty_like(x, device="meta").stride()  # those of x if it is dense
        return cls(x.shape, strides, x.dtype, x.device)

    def zeros(self) -> Tensor:
        x = torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=self.device)
        return x.zero_()


def _seeds(grads: Sequence[Tensor | None], outputs: Sequence[_Kind]) -> list[Tensor | None]:
    """Return the gradients of results in the results' own strides.

    Backward then does not depend on how the program has laid them out.
    """
    return [
        None if g is None else _as_strided_like(g, kind)
        for g, kind in zip(grads, outputs, strict=True)
    ]


def _distinct(grads: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Return the gradients of results, none of which is that of another one as well.

    Autograd sends the same tensor to both terms of a sum.
    """
    seen: set[int] = set()
    distinct = []
    for g in grads:
        noted = None if g is None else noted_origin(g)
        same = {id(g)} if noted is None else {id(g), id(noted[1].tensor)}
        if g is not None and not same.isdisjoint(seen):
            g = g.detach()
            if noted is not None:
                layout, origin = noted
                g = note_origin(g, layout, origin._replace(tensor=origin.tensor.detach()))
        seen |= same if g is not None else set()
        distinct.append(g)
    return distinct


def _as_strided_like(g: Tensor, kind: _Kind) -> Tensor:
    """Return a gradient in these strides, and its origin densely."""
    x, noted = _dense_like(g, kind), noted_origin(g)
    if noted is None:
        return x
    layout, origin = noted
    tensor = _dense_like(origin.tensor, _Kind.of(origin.tensor))
    return note_origin(x, layout, origin._replace(tensor=tensor))


def _dense_like(x: Tensor, kind: _Kind) -> Tensor:
    if x.stride() == kind.strides and x.dtype is kind.dtype:
        return x
    return torch.empty_strided(x.shape, kind.strides, dtype=kind.dtype, device=x.device).copy_(x)


# -- the recorded call -----------------------------------------------------------------------------


def _end_of_forward() -> None:
    """Separate forward from backward, as the target of a node."""


def _history_outside(snapshot: Snapshot) -> str | None:
    """Return the path of a tensor with a gradient history, None if there is none.

    A gradient of the function's results, which is computed in a graph that ends at the stand-ins,
    would go on through that history.
    """
    tensors = (*snapshot.tensors, *snapshot.sharded)
    return next((path for x, path in tensors if local_of(x).grad_fn is not None), None)


def _views_among(
    results: Sequence[Any], arguments: Sequence[Any], stand_ins: Sequence[Any]
) -> set[int]:
    """Return which results with a history have the memory of stand-ins for arguments."""
    replaced = [y for x, y in zip(arguments, stand_ins, strict=True) if x is not y]
    memory = {local_of(y).untyped_storage()._cdata for y in replaced}
    same = set(map(id, replaced))
    return {
        i
        for i, x in enumerate(results)
        if isinstance(x, Tensor) and id(x) not in same and local_of(x).requires_grad
        if local_of(x).untyped_storage()._cdata in memory
    }


def _unwritable_view(x: Tensor) -> Tensor:
    """Return a tensor with the same values and no history; writing to it in place raises.

    Torch refuses writes to what a custom function returns and is a view.
    """
    with torch.no_grad():
        y = x.detach()
        return y.view_as(y)


def _stand_ins(leaves: Sequence[Any]) -> list[Any]:
    """Return in place of each tensor that requires grad one with the same values and no history.

    Also where grad mode is off: the function may turn it on.
    """
    if torch.is_inference_mode_enabled():
        return list(leaves)
    by_id: dict[int, Any] = {}
    for x in leaves:
        if isinstance(x, Tensor) and local_of(x).requires_grad and id(x) not in by_id:
            by_id[id(x)] = _stand_in(x)
    return [by_id.get(id(x), x) for x in leaves]


def _stand_in(x: Tensor) -> Tensor:
    local = local_of(x).detach().requires_grad_()
    if not isinstance(x, ShardedTensor):
        if isinstance(x, nn.Parameter):
            local = nn.Parameter(local.detach())
        vars(local).update(vars(x))
        return local
    return with_part(x, local)


def _slots_of_stand_in(x: Tensor) -> list[GradSlot]:
    return slots_of(x, lambda leaves: x, "", fixed=True)


@contextmanager
def _swap_values(
    places: Sequence[tuple[dict[str, Any], str]], values: Sequence[Any]
) -> Iterator[None]:
    """Hold other values in these places of modules in the block; what the block has set stays."""
    before = [holder[name] for holder, name in places]
    for (holder, name), value in zip(places, values, strict=True):
        holder[name] = value
    try:
        yield
    finally:
        for (holder, name), old, value in zip(places, before, values, strict=True):
            if holder.get(name) is value:
                holder[name] = old


class _SavedTensors:
    """What autograd saves in a recorded forward, and which nodes that is.

    Hooks that were active before, such as those of `fully_shard` and `torch.utils.checkpoint`, get
    it as well. They run in the program's own backward pass, and nothing that they do is recorded.
    """

    def __init__(self, recorder: GraphRecorder) -> None:
        self._recorder = recorder
        self._tokens: list[_Token] = []
        hooks = engine_hooks.saved_tensor_hooks() if torch.is_grad_enabled() else None
        self._pack, self._unpack = hooks if hooks is not None else (None, None)

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Note what is saved in the block."""
        with torch.autograd.graph.saved_tensors_hooks(self._note, self._find):
            yield

    def load(self) -> None:
        """Call the hooks that were active before, ahead of the backward pass that is recorded."""
        if self._unpack is not None:
            for token in self._tokens:
                token.value = self._unpack(token.packed)

    def unload(self) -> None:
        """Drop what `load` has made."""
        for token in self._tokens:
            token.value = None

    def _note(self, x: Tensor) -> _Token:
        recorder = self._recorder
        if thread_context.recorder is not recorder:
            if self._pack is None:
                return _Token(x, None, x._version)
            return _Token(self._pack(x), None)
        node = None if isinstance(x, ShardedTensor) else recorder.builder.node_of(x)
        if self._pack is None:
            return _Token(x, node, x._version)
        with recorder.hidden():
            token = _Token(self._pack(x), node)
        self._tokens.append(token)
        return token

    def _find(self, token: _Token) -> Tensor:
        if self._unpack is None:
            x = token.packed
            if x._version != token.version:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an "
                    f"inplace operation: a tensor of shape {list(x.shape)} that was saved at "
                    f"version {token.version} is at version {x._version}"
                )
        else:
            x = self._unpack(token.packed) if token.value is None else token.value
        if token.node is not None:
            self._recorder.builder.know(x, token.node)
        return wrapper_to_save(x) if isinstance(x, ShardedTensor) else x


class _Token:
    """A tensor that autograd has saved.

    Attributes:
        packed: what the hooks for saved tensors have made of it.
        node: its node.
        version: how often the tensor had been written.
        value: between `load` and `unload`, what the hooks have returned for it.
    """

    __slots__ = ("node", "packed", "value", "version")

    def __init__(self, packed: Any, node: fx.Node | None, version: int = 0) -> None:
        self.packed, self.node, self.version = packed, node, version
        self.value: Tensor | None = None
