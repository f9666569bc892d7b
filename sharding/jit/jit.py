"""`jit`: the decorator, signatures, and calls of recorded programs."""

from __future__ import annotations

import functools
import inspect
import itertools
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._dynamo.guards import TensorGuards  # type: ignore[import-not-found]

from ...mesh.comm.current_world import current_world
from ...mesh.comm.thread_context import thread_context
from ...mesh.comm.world import World
from ..autograd import engine_hooks
from ..functional.signature import flatten_tree, unflatten_tree
from ..functional.trees import pytree
from ..ops.torch_compile import keep_compiler_out, not_compiled
from ..tensor.autograd.leaf_grads import is_accumulating
from ..tensor.device_put import device_put
from ..tensor.sharded_tensor import DonatedTensor, ShardedTensor
from .backends.segments import Backend, find_backend
from .collectives import forget_lineages
from .draws import advance
from .errors import JitError
from .hyperparameters import Hyperparameters
from .inspection.lowered import CompiledGraph, Lowered, lower
from .passes.agreement import announce, most_of
from .passes.alias import written_inputs
from .passes.options import PassOptions
from .passes.pipeline import run as run_passes
from .program import Runner, run_plainly
from .recording import Recording, record, seal, without_history
from .selection import FULL, MOST, RECORD, Prologue, Recordings, Selected
from .state.differences import Reasons, changed_gradient, changed_tensor, facts_of, texts_of
from .state.guard import Guard
from .state.holders import PLAIN
from .state.slots import empty_slots, signature
from .state.snapshot import Snapshot

_log = logging.getLogger(__name__)
_ATTEMPTS = 3  # calls whose recordings are dropped before that is an error
_KEPT = 16  # recordings of one signature, the newest ones
_SIGNATURES = 128  # whose recordings a function keeps in one world; each refers to its meshes
_ALL_NONE = frozenset({type(None)})


class Static(NamedTuple):
    """A static argument: a constant of the graph."""

    value: Any


class Entry:
    """A recorded call of one signature, and the state that must not have changed since.

    Attributes:
        recording: the program and its inputs and outputs.
        prologue: computes the values that select it.
        reason: why it was recorded although there were others; None for the first one.
        runner: its compiled graph; None before the first call.
        calls: how often that has run.
    """

    def __init__(
        self,
        recording: Recording,
        guard: Guard,
        leaves: Sequence[Any],
        signatures: list[Any],
        reason: str | None,
    ) -> None:
        self.recording, self.reason, self.calls = recording, reason, 0
        self.prologue = Prologue(recording.program.reads)
        self.runner: Runner | None = None
        self.guard, self._signatures = guard, signatures
        self._overlap = self._overlaps(leaves)
        self._kept = [x for x, _ in recording.kept]
        self._addresses = [address for _, address in recording.kept]
        self._same_tensors = _tensor_guards(self._kept)
        self._facts = [facts_of(x) for x in self._kept]
        self._written = written_inputs(recording.program.graph)
        self._gate: list[Tensor] | None = None
        self._fixed = empty_slots(recording.slots, signatures)

    def _overlaps(self, leaves: Sequence[Any]) -> list[Any]:
        """Return for each tensor among the arguments its id if it shares memory with state that the
        function reaches, else None.
        """
        storages = self.guard.storages
        return [id(x) if x.untyped_storage()._cdata in storages else None for x in _parts(leaves)]

    def _same_gradients(self, leaves: Sequence[Any]) -> bool:
        """Return True if every gradient slot holds the same kind of value as when recorded. Fast
        path: all were None.
        """
        if self._fixed is not None:
            return all(
                _ALL_NONE.issuperset(map(type, map(get, owners))) for get, owners in self._fixed
            )
        return [signature(slot.get(leaves)) for slot in self.recording.slots] == self._signatures

    def change(self, leaves: Sequence[Any]) -> str | None:
        """Return why the recording does not hold for this call, None if it does."""
        change = self.guard.change()
        for condition in self.recording.conditions:
            change = change or condition.change()
        if change is not None:
            return change
        if not self._same_gradients(leaves):
            slots = self.recording.slots
            return changed_gradient(
                slots, self._signatures, [signature(slot.get(leaves)) for slot in slots]
            )
        addresses = list(map(Tensor.data_ptr, self._kept))
        is_same = self._same_tensors(*self._kept) and addresses == self._addresses
        # None if only a dispatch mode is active that was not.
        if not is_same and (change := self._changed_tensor()) is not None:
            return change
        if self.recording.derived and self.guard.was_written():
            return "what the library had made from parameters is outdated"
        if self._overlaps(leaves) != self._overlap:
            return "an argument shares memory with other state of the function than before"
        return None

    def _changed_tensor(self) -> str | None:
        """Return which tensor that is taken by reference has changed, None if none has."""
        for x, facts, address in zip(self._kept, self._facts, self._addresses, strict=True):
            if facts_of(x) != facts or x.data_ptr() != address:
                name = self.guard.names.get(id(x), "a tensor of the library")
                return changed_tensor(name, facts, x)
        return None

    def forget_lineages(self) -> None:
        """Let the graph run while other ranks run those of other values."""
        if forget_lineages(self.recording.program.graph):
            self.runner = None

    def _differentiable(self, leaves: Sequence[Any]) -> list[Tensor]:
        """Return the leaves of autograd that results depend on; those that are no arguments behind
        one tensor, made once.
        """
        if self._gate is None:
            needed = [x for x in self._kept if x.requires_grad and x.is_leaf]
            self._gate = [seal(needed[0], *needed[1:])] if needed else []
        return [*self._gate, *(x for x in _parts(leaves) if x.requires_grad)]

    def __call__(
        self, leaves: Sequence[Any], carried: Sequence[Any], world: World, backend: Backend
    ) -> Any:
        """Run the graph.

        Args:
            carried: what the prologue has returned.
        """
        recording = self.recording
        values = [*leaves, *carried] if carried else leaves
        inputs = [source(values) for source in recording.program.sources]
        if self.runner is None:
            self.runner = backend(recording.program, inputs)
        outputs = run_plainly(self.runner, inputs)
        self.calls += 1
        torch.autograd.graph.increment_version([inputs[i] for i in self._written])
        advance(world, recording.program.draws)
        for slot, number, layout, lineage in recording.effects:
            gradient = None if number is None else _wrapped(outputs[number], layout, lineage)
            setattr(slot.owner(leaves), slot.name, gradient)
        results = []
        for number, layout, lineage, sealed, same in recording.results:
            value = same(leaves) if number is None else _wrapped(outputs[number], layout, lineage)  # type: ignore[misc]
            results.append(seal(value, *self._differentiable(leaves)) if sealed else value)
        return unflatten_tree(recording.tree, results)


class JitFunction:
    """A function that runs as one graph: the result of `jit`."""

    def __init__(self, f: Callable[..., Any], options: dict[str, Any]) -> None:
        functools.update_wrapper(self, f)
        self._f = f
        self._name = getattr(f, "__qualname__", type(f).__name__).rpartition("<locals>.")[2]
        self._strict = options["strict"]
        self._static = _positions(f, options["static_argnums"], options["static_argnames"])
        self._donated = _positions(f, options["donate_argnums"], ())[0]
        self._options = PassOptions.of(options["compiler_options"])
        self._backend = options["backend"]
        self._compile: Backend | None = None
        if options["cudagraphs"]:
            if not torch.cuda.is_available():
                raise ValueError(
                    "sm.jit: cudagraphs=True needs a CUDA device, and torch.cuda.is_available() is "
                    "False"
                )
            inductor = (*self._options.inductor, ("triton.cudagraphs", True))
            self._options = replace(self._options, inductor=inductor)
        if self._options.inductor:
            self._compile = find_backend(self._backend, self._options.inductor)
        self._in, self._out = options["in_shardings"], options["out_shardings"]
        self._entries: weakref.WeakKeyDictionary[World, dict[Any, Recordings]] = (
            weakref.WeakKeyDictionary()
        )
        self._attempts: weakref.WeakKeyDictionary[World, dict[Any, int]] = (
            weakref.WeakKeyDictionary()
        )
        self._reasons = Reasons(f)
        self._hyperparameters = Hyperparameters()

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    def __repr__(self) -> str:
        return f"jit({getattr(self._f, '__qualname__', self._f)})"

    @not_compiled("it calls a function of the program outside of any graph", calls_program=True)
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        keep_compiler_out()
        args = args if self._in is None else _placed(args, self._in)
        leaves, tree = self._flatten(args, kwargs)
        world = current_world()
        if _is_inside(leaves, world):
            return self._call(tree, leaves)
        key = tree, _modes(), tuple([_key(x) for x in leaves]), _same_memory(leaves)
        by_key = self._entries.get(world)
        if by_key is None:
            by_key = self._entries[world] = {}
            world.dependents.add(self)
        try:
            # The least recently used signature comes first, and is dropped first: recording takes
            # seconds.
            entries = by_key.pop(key, None)
            by_key[key] = entries = Recordings() if entries is None else entries
        except TypeError as error:
            raise TypeError(f"{self!r}: static arguments must be hashable, {error}") from None
        if len(by_key) > _SIGNATURES:
            del by_key[next(iter(by_key))]
        selected = entries.select(leaves)
        need = selected.need
        if entries.is_own:
            need = most_of(world, entries.meshes, self._name, need, entries.device)
        if need == FULL:
            result = self._beyond_limit(leaves, tree, entries, world)
        elif need == RECORD:
            result = self._record(leaves, tree, key, entries, selected, world)
        else:
            result = selected.entry(leaves, selected.carried, world, self.backend)
        if self._donated:
            _donate([args[i] for i in self._donated if i < len(args)], result)
        return result

    def forget_world(self, world: World) -> None:
        """Drop the graphs of a world that has ended, which refer to it."""
        self._entries.pop(world, None)
        self._attempts.pop(world, None)

    def lower(self, *args: Any, **kwargs: Any) -> Lowered:
        """Record the function on "meta", as this rank, and return the graph for inspection. Nothing
        runs, and no argument changes.

        The graph is as recorded; `.compile()` of the result has the passes applied. On an
        `AbstractMesh` it is that of rank 0.

        Args:
            args, kwargs: as those of a call, or a `Layout`, also on an `AbstractMesh`, in place of
                a tensor.

        Communication: none.
        """
        return lower(self, self._f, args, kwargs, self._options)

    @property
    def recorded(self) -> list[CompiledGraph]:
        """The graphs that this rank's calls have made, with the passes applied."""
        world = current_world()
        entries = itertools.chain.from_iterable(self._entries.get(world, {}).values())
        return [
            CompiledGraph(entry.recording.program, world, {}, None, self, entry)
            for entry in entries
        ]

    @property
    def __wrapped_function__(self) -> Callable[..., Any]:
        """The objects that a snapshot covers."""
        return self._f

    @property
    def backend(self) -> Backend:
        """What compiles the graphs."""
        if self._compile is None:
            self._compile = find_backend(self._backend, self._options.inductor)
        return self._compile

    def _flatten(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[list[Any], Any]:
        numbers, names = self._static
        if not numbers and not names:
            return flatten_tree((args, kwargs))
        args = tuple([Static(x) if i in numbers else x for i, x in enumerate(args)])
        kwargs = {name: Static(x) if name in names else x for name, x in kwargs.items()}
        return pytree.tree_flatten((args, kwargs), is_leaf=lambda x: type(x) is Static)

    def _call(self, tree: Any, leaves: Sequence[Any]) -> Any:
        args, kwargs = unflatten_tree(tree, [x.value if type(x) is Static else x for x in leaves])
        result = self._f(*args, **kwargs)
        return result if self._out is None else _placed(result, self._out)

    def _record(
        self,
        leaves: Sequence[Any],
        tree: Any,
        key: Any,
        entries: Recordings,
        selected: Selected,
        world: World,
    ) -> Any:
        """Run and record a call.

        Args:
            selected: what holds for it: no recording, or one, where another rank has none.
        """
        why = selected.why or (
            "" if selected.entry is None else "another rank has read a new value"
        )
        others = [entry.recording.program for entry in entries if entry.change(leaves) is None]
        options = PassOptions.of(False) if entries.is_alone else self._options
        reached = [
            (f"args[{i}]", x.value if type(x) is Static else x)
            for i, x in enumerate(leaves)
            if not isinstance(x, Tensor)
        ]
        snapshot = Snapshot([("f", self._f), *reached])
        inputs = self._hyperparameters.inputs(snapshot)
        guard = Guard(snapshot, {one.place for one in inputs})
        attempts = self._attempts.setdefault(world, {})
        count = attempts.get(key, 0) + 1
        keys = [other for other, known in self._entries[world].items() if known and other != key]
        reasons = self._reasons.find(why, key, keys)
        meshes = _meshes(snapshot, leaves)
        ranks = [mesh.ranks.flatten().tolist() for mesh in meshes]
        if options.any:
            announce(world, ranks, self._name, texts_of(reasons))
        f = functools.partial(self._call, tree)
        with _same_lineages(guard.sharded):
            result, recording, before = record(f, leaves, snapshot, inputs, world, count == 1)
        recorded = recording if isinstance(recording, str) else recording.program
        program = run_passes(recorded, options, world, ranks, others)
        if isinstance(program, str):  # why there is none
            attempts[key] = count
            if count >= _ATTEMPTS:
                raise JitError(
                    f"{self!r} changes Python state in every call, which a graph would not do: "
                    f"{program}. Do it outside of the function, or keep the value in a tensor and "
                    "change that in place"
                )
            return result
        attempts.pop(key, None)
        program.name = self._name
        recording = recording._replace(program=program)  # type: ignore[union-attr]
        if program.is_alone:
            entries.clear()
        elif selected.entry is not None:
            entries.remove(selected.entry)
        entries.is_alone = entries.is_alone or program.is_alone
        entries.is_own = options.any and not entries.is_alone and (entries.is_own or program.is_own)
        if meshes:
            entries.meshes, entries.device = ranks, meshes[0].device
        for read in program.reads if program.is_own else ():
            forget_lineages(read.graph)
        entries.append(Entry(recording, guard, leaves, before, texts_of(reasons) or None))
        for entry in entries if program.is_own else ():
            entry.forget_lineages()
        if not world.rank:
            self._reasons.note(self, reasons)
        del entries[:-_KEPT]
        return result

    def _beyond_limit(
        self, leaves: Sequence[Any], tree: Any, entries: Recordings, world: World
    ) -> Any:
        """Run a call of values that are not recorded, since there are many of other values."""
        places = {read.place for entry in entries for read in entry.recording.program.reads}
        text = (
            f"{self!r} is recorded for at most {MOST} combinations of the values read at "
            f"{', '.join(sorted(places))}"
        )
        if self._strict:
            raise JitError(f"{text}, and this call has another; strict=False runs it eagerly")
        if not entries.is_full and not world.rank:
            _log.warning("%s; calls with others run eagerly", text)
        entries.is_full = True
        with _same_lineages(entries[-1].guard.sharded):
            return without_history(self._call(tree, leaves))


def jit(
    f: Callable[..., Any] | None = None,
    *,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    donate_argnums: int | Sequence[int] = (),
    in_shardings: Any = None,
    out_shardings: Any = None,
    backend: str | Callable[..., Any] | None = None,
    compiler_options: Mapping[str, Any] | bool | None = None,
    cudagraphs: bool = False,
    strict: bool = False,
) -> Any:
    """Return a function that runs `f` as one graph: forward, backward, collectives and optimizer
    together.

    The first call with a signature runs `f` eagerly and records it; later calls run the graph.
    Modules, optimizers and tensors that `f` reaches through arguments, closures, globals or `self`
    are inputs by reference, and are written back. What the graph could not repeat is an error. See
    `docs/jit.md`.

    Args:
        f: a function of trees of tensors, `ShardedTensor`s, modules, optimizers and numbers. Floats
            are inputs, other numbers static.
        static_argnums, static_argnames: arguments that are constants; another value is another
            signature. They must be hashable.
        donate_argnums: arguments whose `ShardedTensor`s the caller gives away: using them
            afterwards raises.
        in_shardings, out_shardings: a `NamedSharding`, or a tree of them and None that is a prefix
            of the arguments or of the result; arguments with other layouts are redistributed.
        backend: "inductor", "eager" (generated Python), or any backend of `torch.compile`. By
            default Inductor if there is a C++ compiler, else "eager", with a warning.
        compiler_options: which passes change the graph's collectives: a dict of the attributes of
            `PassOptions`, such as `{"overlap": True, "bucket_bytes": 0}`; False for none. Other
            names are options of `torch._inductor.config`, such as `{"cpp_wrapper": True}`. With
            passes all ranks of a mesh must record in the same call.
        cudagraphs: whether Inductor captures the operators between collectives in CUDA graphs;
            needs a CUDA device.
        strict: whether a call raises whose values, of tensors that installed packages read, have no
            recording when there are many; otherwise it runs eagerly.

    Returns:
        The function. Its results have no gradient history: `backward` through them raises.

    Raises:
        JitError: in a call, if `f` reads the value of a tensor, changes Python state in every call,
            or does anything else that a graph cannot repeat; it names the line.

    Communication: that of `f`; when a graph is made, an `all_gather_object` of a hash over each
    mesh; in each call an all_reduce of a number, if installed packages have read values that may
    differ between ranks.

    Example:
        >>> @sm.jit
        ... def step(model, optimizer, x, y):
        ...     loss = F.cross_entropy(model(x), y)
        ...     loss.backward()
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        ...     return loss
    """
    options = {
        "static_argnums": static_argnums,
        "static_argnames": static_argnames,
        "donate_argnums": donate_argnums,
        "in_shardings": in_shardings,
        "out_shardings": out_shardings,
        "backend": backend,
        "compiler_options": compiler_options,
        "cudagraphs": cudagraphs,
        "strict": strict,
    }
    if f is None:
        return functools.partial(jit, **options)
    if not callable(f):
        raise TypeError(
            f"sm.jit takes a function, got {type(f).__name__}; write sm.jit(f, ...) or @sm.jit(...)"
        )
    return JitFunction(f, options)


# -- signatures ------------------------------------------------------------------------------------


def _meshes(snapshot: Snapshot, leaves: Sequence[Any]) -> list[Any]:
    """Return the meshes that a function reaches."""
    tensors = (*leaves, *(x for x, _ in snapshot.sharded))
    meshes = [x._layout.mesh for x in tensors if isinstance(x, ShardedTensor)]
    return list(dict.fromkeys([*meshes, *snapshot.meshes]))


def _positions(
    f: Callable[..., Any], numbers: int | Sequence[int], names: str | Sequence[str]
) -> tuple[frozenset[int], frozenset[str]]:
    """Return the positions and the names of arguments that are given by either."""
    positions = [numbers] if isinstance(numbers, int) else list(numbers)
    named = [names] if isinstance(names, str) else list(names)
    if not positions and not named:
        return frozenset(), frozenset()
    order = list(inspect.signature(f).parameters)
    if unknown := [name for name in named if name not in order]:
        raise ValueError(
            f"sm.jit: {unknown[0]!r} in static_argnames is no parameter of {f}; it has {order}"
        )
    places = {i if i >= 0 else len(order) + i for i in positions} | {
        order.index(name) for name in named
    }
    return frozenset(places), frozenset([*named, *(order[i] for i in places if i < len(order))])


def _key(x: Any) -> Any:
    """Return what of a leaf belongs to the signature."""
    if isinstance(x, ShardedTensor):
        return x._layout, x._local.stride(), x._local.requires_grad
    if isinstance(x, Tensor):
        return x.shape, x.stride(), x.dtype, x.device, x.requires_grad
    if type(x) is float:
        return float
    if type(x) is Static:
        return x
    return (type(x), x) if isinstance(x, PLAIN) and type(x) is not slice else (type(x), id(x))


def _parts(leaves: Sequence[Any]) -> list[Tensor]:
    """Return the tensors among leaves, the local parts of sharded ones."""
    return [
        x._local if isinstance(x, ShardedTensor) else x for x in leaves if isinstance(x, Tensor)
    ]


def _same_memory(leaves: Sequence[Any]) -> Any:
    """Return for each tensor which one before it shares its memory, and how far apart they are;
    None if none does.
    """
    parts = _parts(leaves)
    if len(parts) < 2:
        return None
    storages = [x.untyped_storage()._cdata if x.numel() else -1 - i for i, x in enumerate(parts)]
    if len(set(storages)) == len(storages):
        return None
    first = [parts[storages.index(one)] for one in storages]
    return tuple(
        (storages.index(one), x.storage_offset() - y.storage_offset())
        for one, x, y in zip(storages, parts, first, strict=True)
    )


def _modes() -> Any:
    """Return the modes of torch that decide which operators run."""
    autocast = (torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu"),)
    if torch.cuda.is_initialized():
        autocast += (torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda"),)
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        autocast,
    )


def _is_inside(leaves: Sequence[Any], world: World) -> bool:
    """Return whether the call is part of something that needs its operators one by one: another
    recording, a transform, a mapped function, a backward pass, `accumulate_grads`, or a computation
    whose gradient flows through an argument.
    """
    if thread_context.needs_each_operator or is_accumulating(world):
        return True
    flows = any(x.requires_grad and not x.is_leaf for x in _parts(leaves))
    return flows or engine_hooks.current_backward() != -1


def _tensor_guards(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """Return a function that tells whether tensors still have their shapes, strides, dtypes and
    `requires_grad`.
    """
    if not tensors:
        return lambda: True
    shapes: Any = [list(x.shape) for x in tensors]
    strides: Any = [list(x.stride()) for x in tensors]
    return TensorGuards(*tensors, dynamic_dims_sizes=shapes, dynamic_dims_strides=strides).check


# -- running ---------------------------------------------------------------------------------------


@contextmanager
def _same_lineages(tensors: Sequence[ShardedTensor]) -> Iterator[None]:
    """Leave the lineages of tensors as a graph does that writes to them: another rank may run
    one.
    """
    lineages = [x._lineage for x in tensors]
    yield
    for x, lineage in zip(tensors, lineages, strict=True):
        x._lineage = lineage


def _wrapped(x: Any, layout: Any, lineage: int) -> Any:
    return x if layout is None else ShardedTensor._make_guarded(x, layout, lineage)


def _placed(tree: Any, shardings: Any) -> Any:
    """Return a tree with its tensors laid out as a prefix tree of shardings says."""
    if shardings is None:
        return tree
    if isinstance(shardings, (list, tuple)):
        if not isinstance(tree, (list, tuple)) or len(tree) != len(shardings):
            raise ValueError(
                f"sm.jit: {len(shardings)} shardings for "
                f"{len(tree) if isinstance(tree, (list, tuple)) else 1} values"
            )
        return type(tree)([_placed(x, one) for x, one in zip(tree, shardings, strict=True)])
    if isinstance(shardings, dict):
        return {name: _placed(x, shardings.get(name)) for name, x in tree.items()}
    return device_put(tree, shardings)


def _donate(args: list[Any], result: Any) -> None:
    returned = {id(x) for x in pytree.tree_leaves(result)}
    for x in pytree.tree_leaves(args):
        if type(x) is ShardedTensor and id(x) not in returned:
            DonatedTensor.take(x)
