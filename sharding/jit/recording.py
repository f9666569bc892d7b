"""Run a function once and record it as a `Program`.

What the function did besides running operators decides whether the program can replace it:

    gradients set or cleared              written back by the program (`state/slots.py`)
    state that it changed in Python       the recording is dropped; the next call records again, the
                                          third time it is an error
    tensors without another reference     made by something that the recorder cannot see: an error
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from ...mesh.comm.world import World
from ..layout.layout import Layout
from ..tensor.sharded_tensor import ShardedTensor, local_of
from ..trees import flatten, unflatten
from .draws import Position
from .errors import Break, JitError
from .graph_builder import Captured
from .history import with_known_numbers
from .hyperparameters import Hyperparameter, tracing
from .passes.dead_code import clean
from .program import Program
from .recorder import GraphRecorder
from .results import Returned, flatten_result, is_instance, tensors_in
from .scalars import Condition, TracedFloat
from .state.holders import PLAIN
from .state.iterators import counting_resumptions
from .state.slots import GradSlot, signature, slots_of
from .state.snapshot import Snapshot

_NO_GRADIENT = (
    "this tensor was computed inside sm.jit, by a graph that has no backward: call backward() "
    "inside the function, compute the gradient there with sm.grad, or call backward() after the "
    "first call, from which on the function has two graphs. Where several calls come before a "
    "backward, as in an episode, put sm.jit around the module: sm.jit(policy)"
)
Leaves = Sequence[Any]


class Effect(NamedTuple):
    """A slot that the function gave another value: the output with this number, or None."""

    slot: GradSlot
    number: int | None
    layout: Layout | None
    lineage: int


class Result(NamedTuple):
    """A leaf of the result of a call.

    It is an output, sharded if it has a layout; a leaf of the arguments; or any other object,
    unchanged.

    Attributes:
        sealed: whether it had a gradient history.
    """

    number: int | None = None
    layout: Layout | None = None
    lineage: int = 0
    sealed: bool = False
    same: Callable[[Leaves], Any] | None = None


class Recording(NamedTuple):
    """A program and how to call it.

    Attributes:
        slots: the slots of all leaves.
        effects, results, tree: what to do with the outputs.
        by_reference: tensors by reference and where their memory is.
        derived: whether one of these is a cache of the library, such as gathered parameters, which
            was made from others.
        conditions: what must hold of hyperparameters.
        is_open: whether results have a gradient history that a backward outside may use: none ran
            in the function.
    """

    program: Program
    slots: list[GradSlot]
    effects: list[Effect]
    results: list[Result]
    tree: Any
    by_reference: list[tuple[Tensor, int]]
    derived: bool
    conditions: list[Condition]
    is_open: bool = False


def record(
    f: Callable[[Leaves], Any],
    leaves: Leaves,
    snapshot: Snapshot,
    hyperparameters: list[Hyperparameter],
    world: World,
    first: bool,
    abstract: bool = False,
    fullgraph: bool = True,
) -> tuple[Returned, Recording | str, list[Any]]:
    """Call `f(leaves)` and record it.

    Args:
        hyperparameters: those that are inputs.
        first: whether no recording of this signature was dropped yet. Then one in which ranks
            exchange Python objects is dropped, since most such exchanges are made once.
        abstract: whether tensors are on "meta" and the program is only inspected.
        fullgraph: whether to raise for what a graph cannot do; else `f` runs on to its end.

    Returns: its result; the recording, or why there is none, a `Break` if `f` did what a graph
        cannot; the signatures of the slots before.
    Raises: JitError with `fullgraph`; what `f` raises.
    """
    slots = list(_slots(leaves, snapshot))
    before = [slot.get(leaves) for slot in slots]
    signatures = [signature(value) for value in before]
    tensors = [x for x, _ in (*snapshot.tensors, *snapshot.sharded)]
    tensors += [x for x in leaves if isinstance(x, Tensor)]
    needs_grad = [x.requires_grad for x in tensors]
    recorder = GraphRecorder(world, abstract, fullgraph)
    result = run_recorded(f, leaves, snapshot, hyperparameters, recorder)
    builder = recorder.builder
    returned = flat_result(result, snapshot, recorder)
    flat, tree, _ = returned
    if builder.has_numbers and not abstract:
        returned = returned._replace(leaves=with_known_numbers(flat))
    if builder.refusal is not None:
        settle(snapshot)
        return returned.map(_without_traced), Break(builder.refusal), signatures
    last = _Finish(recorder, leaves, snapshot, slots, before)
    is_open = not (recorder.ran_backward or abstract) and any(
        isinstance(x, Tensor) and not x.is_leaf for x in flat
    )
    shown = returned.map(_without_traced if is_open else _as_of_graph)
    change = None
    if first and recorder.exchanges:
        change = "the ranks exchanged what they know once"
    elif not abstract:
        change = snapshot.change({one.place for one in hyperparameters}) or last.describe_moved()
    if change is None and needs_grad != [x.requires_grad for x in tensors]:
        change = "requires_grad of a tensor has changed"
    if change is not None:
        settle(snapshot)
        return shown, change, signatures
    try:
        recording = last.recording(flat, tree, recorder.draws.end())
        return shown, recording._replace(is_open=is_open), signatures
    except JitError as error:
        builder.refuse(error)
        return shown, Break(error), signatures


def flat_result(result: Any, snapshot: Snapshot, recorder: GraphRecorder) -> Returned:
    """Return the result of a recorded call, with its leaves and its structure."""
    has_computed = recorder.builder.has_computed
    return flatten_result(result, snapshot.knows, lambda x: has_computed(local_of(x)))


def run_recorded(
    f: Callable[[Leaves], Any],
    leaves: Leaves,
    snapshot: Snapshot,
    hyperparameters: list[Hyperparameter],
    recorder: GraphRecorder,
) -> Any:
    """Return `f(leaves)`, recorded."""
    builder = recorder.builder
    inputs = [
        builder.number(("argument", i), x, f"args[{i}]", functools.partial(_argument, i))
        if type(x) is float
        else x
        for i, x in enumerate(leaves)
    ]
    builder.reachable.update(map(id, _locals(snapshot)))
    for x in leaves:
        if isinstance(x, Tensor):
            builder.add_argument(local_of(x))
    torch.clear_autocast_cache()  # casts of weights before, which later calls make anew
    try:
        with (
            tracing(builder, hyperparameters),
            # Backward runs in this thread on every device: others would not know the recorder.
            torch.autograd.set_multithreading_enabled(False),
            recorder,
            counting_resumptions([x for _, x, _ in snapshot.iterators]),
        ):
            recorder.draws.torch.pass_by(builder.graph)
            result = f(inputs)
            recorder.follow_generators()
    finally:
        torch.clear_autocast_cache()
    if recorder.draws.host.drew():
        builder.refuse(
            JitError(
                "a function under sm.jit drew random numbers of Python or NumPy, which would be "
                "the same in every later call; draw them outside and pass them, or draw tensors"
            )
        )
    return result


def settle(snapshot: Snapshot) -> None:
    """Replace the numbers of a dropped recording that the function has stored by their values.

    They are also replaced in what the function has made: an optimizer may keep its learning rate in
    its state.
    """
    for holder in snapshot.again().holders:
        stored = holder.source
        if isinstance(stored, (dict, list)):
            pairs = stored.items() if isinstance(stored, dict) else enumerate(stored)
            for key, value in list(pairs):
                settled = _settle_value(value)
                if settled is not value:
                    stored[key] = settled


def _settle_value(value: Any) -> Any:
    """Return a value with numbers in place of traced ones."""
    if isinstance(value, TracedFloat):
        return value.node.hint
    if type(value) is tuple and any(isinstance(x, (TracedFloat, tuple)) for x in value):
        parts = tuple(map(_settle_value, value))
        return value if all(map(operator.is_, parts, value)) else parts
    return value


def _slots(leaves: Leaves, snapshot: Snapshot) -> Iterator[GradSlot]:
    """Yield the slots of all leaves of autograd that can be reached."""
    seen: set[int] = set()
    for i, x in enumerate(leaves):
        if isinstance(x, Tensor) and x.requires_grad and id(x) not in seen:
            seen.add(id(x))
            yield from slots_of(x, functools.partial(_argument, i), f"args[{i}]", False)
    for x, path in (*snapshot.sharded, *snapshot.tensors):
        if x.requires_grad and id(x) not in seen and local_of(x).is_leaf:
            seen.add(id(x))
            yield from slots_of(x, functools.partial(_constant, x), path, True)


def _argument(i: int, leaves: Leaves) -> Any:
    return leaves[i]


def _part_of_argument(i: int, leaves: Leaves) -> Tensor:
    return leaves[i]._local


def _constant(x: Any, leaves: Leaves) -> Any:
    return x


def _slot_value(slot: GradSlot, leaves: Leaves) -> Any:
    return local_of(slot.get(leaves))


def _without_traced(x: Any) -> Any:
    """Return a number in place of a traced one."""
    return x.node.hint if isinstance(x, TracedFloat) else x


def _as_of_graph(x: Any) -> Any:
    """Return a result as later calls return it.

    It is a number for a traced one, and has no gradient history.
    """
    if isinstance(x, TracedFloat):
        return x.node.hint
    return seal(x) if _has_history(x) else x


def without_history(result: Any, look: Callable[[], Snapshot]) -> Any:
    """Return the result of a call that is not recorded as others return it.

    Args:
        look: returns a snapshot, which tells the instances that the call has made from others.
    """
    if not any(map(_has_history, tensors_in(result))):
        return result
    flat, tree = flatten(result)
    if not any(map(is_instance, flat)):
        return unflatten(tree, list(map(_as_of_graph, flat)))
    snapshot = functools.cache(look)
    returned = flatten_result(result, lambda x: snapshot().knows(x), _has_history)
    return returned.map(_as_of_graph).build()


def _has_history(x: Any) -> bool:
    return isinstance(x, Tensor) and not x.is_leaf


def seal(x: Tensor, *inputs: Tensor) -> Tensor:
    """Return a result that requires grad, through which backward raises.

    That holds for backward to the result itself or to these inputs, so no gradient is silently
    missing.
    """
    if isinstance(x, ShardedTensor):
        sealed = ShardedTensor._make(seal(x._local, *inputs), x._layout)
        sealed._lineage = x._lineage
        return sealed
    x = x if x.requires_grad else x.detach().requires_grad_()
    with torch.enable_grad():
        sealed = torch._C._functions.DelayedError(_NO_GRADIENT, 1 + len(inputs))(x, *inputs)  # type: ignore[attr-defined]
    return sealed if isinstance(sealed, Tensor) else sealed[0]


def _locals(snapshot: Snapshot) -> list[Tensor]:
    return [*(x for x, _ in snapshot.tensors), *(x._local for x, _ in snapshot.sharded)]


def _layout_of(x: Tensor) -> tuple[Layout | None, int]:
    """Return the layout and the lineage of a tensor, which every call gives its result."""
    return (x._layout, x._lineage) if isinstance(x, ShardedTensor) else (None, 0)


def _note_memory(node: fx.Node, x: Tensor | None) -> None:
    """Record where an input's memory is, so that passes know which inputs share it.

    Of "meta" tensors it is where the memory would be, far apart.
    """
    if x is not None:
        storage = x.untyped_storage()
        node.meta["memory"] = (
            storage._cdata << 48 if x.is_meta else storage.data_ptr(),
            storage.nbytes(),
        )


def finish(
    recorder: GraphRecorder,
    leaves: Leaves,
    snapshot: Snapshot,
    flat: list[Any],
    tree: Any,
    draws: Position,
    more: Sequence[fx.Node] = (),
) -> Recording:
    """Return the recording of a function whose gradients leave through its results.

    Args:
        flat, tree: its result.
        draws: where it left the stream of random numbers.
        more: nodes that are outputs as well, after those of the results.

    Raises: JitError for what a graph cannot do.
    """
    return _Finish(recorder, leaves, snapshot, [], []).recording(flat, tree, draws, more)


class _Finish:
    """Make a recording from what a recorder has recorded."""

    def __init__(
        self,
        recorder: GraphRecorder,
        leaves: Leaves,
        snapshot: Snapshot,
        slots: list[GradSlot],
        before: list[Any],
    ) -> None:
        self.recorder, self.leaves, self.snapshot = recorder, leaves, snapshot
        self.slots, self.before = slots, before
        self.outputs: list[fx.Node] = []
        self.by_reference: list[tuple[Tensor, int]] = []
        self.derived = False
        self._sources: dict[int, tuple[str, Callable[[Leaves], Any]]] = {}
        for slot, value in zip(slots, before, strict=True):
            if value is not None:
                source = functools.partial(_slot_value, slot)
                self._sources[id(local_of(value))] = slot.path, source
        for i, x in enumerate(leaves):
            if isinstance(x, Tensor):
                argument = _part_of_argument if isinstance(x, ShardedTensor) else _argument
                source = functools.partial(argument, i)
                self._sources[id(local_of(x))] = f"args[{i}]", source
        self._storages = {x.untyped_storage()._cdata for x in _locals(snapshot)}
        self._paths = {id(x._local): path for x, path in snapshot.sharded} | {
            id(x): path for x, path in snapshot.tensors
        }

    def describe_moved(self) -> str | None:
        """Return which captured tensor has other memory than when it was first used.

        The result is None if none has.
        """
        for captured in self.recorder.builder.captured:
            x = captured.ref()
            if x is not None and x.data_ptr() != captured.address:
                return (
                    f"the memory of {self._paths.get(id(x), 'a tensor')} was replaced (`.data =`), "
                    f"first used at {captured.place}"
                )
        return None

    def recording(
        self, flat: list[Any], tree: Any, draws: Position, more: Sequence[fx.Node] = ()
    ) -> Recording:
        pairs = zip(self.slots, self.before, strict=True)
        effects = [effect for slot, old in pairs if (effect := self._effect(slot, old)) is not None]
        results = [self._result(x) for x in flat]
        self.outputs += more
        recorder = self.recorder
        graph = recorder.builder.finish(self.outputs)
        clean(graph)
        used = self._inputs()
        names, sources = [], []
        for node in [node for node in graph.nodes if node.op == "placeholder"]:
            if node in used:
                names.append(used[node][0])
                sources.append(used[node][1])
            else:
                graph.erase_node(node)
        program = Program(graph, sources, names, draws, recorder.world.rank)
        return Recording(
            program,
            self.slots,
            effects,
            results,
            tree,
            self.by_reference,
            self.derived,
            recorder.builder.conditions,
        )

    def _effect(self, slot: GradSlot, old: Any) -> Effect | None:
        now = slot.get(self.leaves)
        if now is old:
            return None
        if now is None:
            return Effect(slot, None, None, 0)
        return Effect(slot, self._output(now, slot.path), *_layout_of(now))

    def _output(self, x: Tensor, what: str) -> int:
        node = self.recorder.node_of(local_of(x))
        if node is None:
            raise JitError(
                f"{what} is a tensor that sm.jit has not seen being made; compute it with "
                "operators of torch"
            )
        self.outputs.append(node)
        return len(self.outputs) - 1

    def _result(self, x: Any) -> Result:
        if isinstance(x, TracedFloat):
            self.outputs.append(x.node.node)
            return Result(len(self.outputs) - 1)
        if isinstance(x, Tensor):
            same = next((i for i, leaf in enumerate(self.leaves) if leaf is x), None)
            if same is not None:
                return Result(same=functools.partial(_argument, same))
            if self.snapshot.knows(x):
                return Result(same=functools.partial(_constant, x))
            return Result(self._output(x, "a result"), *_layout_of(x), not x.is_leaf)
        if isinstance(x, (type, *PLAIN)) or self.snapshot.knows(x):
            return Result(same=functools.partial(_constant, x))
        raise JitError(
            f"a function under sm.jit returned a {type(x).__name__}, which sm.jit cannot make "
            "again; return tensors, numbers, and trees and instances of Python classes that "
            "consist of them"
        )

    def _inputs(self) -> dict[fx.Node, tuple[str, Callable[[Leaves], Any]]]:
        """Return the name and the source of each placeholder that is used."""
        builder = self.recorder.builder
        inputs: dict[fx.Node, tuple[str, Callable[[Leaves], Any]]] = {}
        for captured in builder.captured:
            if captured.node.users:
                inputs[captured.node] = self._source(captured)
                _note_memory(captured.node, captured.ref())
        for i, (node, x) in enumerate(builder.constants):
            if node.users:
                inputs[node] = f"constant {i}", functools.partial(_constant, x)
                _note_memory(node, x)
        for node, path, source in builder.numbers.values():
            if node.users:
                inputs[node] = path, source
        return inputs

    def _source(self, captured: Captured) -> tuple[str, Callable[[Leaves], Any]]:
        x = captured.ref()
        is_known = id(x) in self._sources or id(x) in self._paths
        if x is None or (x.grad_fn is not None and not is_known):
            raise JitError(
                f"{captured.place}: a tensor is used here that was made without an operator of "
                "torch (from numpy, a buffer, compiled code or another library), so later calls "
                "could not make it again. Pass it to the function as an argument"
            )
        if id(x) in self._sources:
            return self._sources[id(x)]
        self.by_reference.append((x, x.data_ptr()))
        is_own = id(x) in self._paths or x.untyped_storage()._cdata in self._storages
        if x.is_floating_point() and not is_own:
            self.derived = True
        return self._paths.get(id(x), "a tensor of the library"), functools.partial(_constant, x)
