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
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ...mesh.comm.current_world import current_world
from ...mesh.comm.thread_context import thread_context
from ...mesh.comm.world import World
from ..autograd import engine_hooks
from ..functional.transforms.parts import with_part
from ..layout.spec import Sharding
from ..ops.torch_compile import keep_compiler_out, not_compiled
from ..tensor.autograd.leaf_grads import is_accumulating
from ..tensor.device_put import device_put
from ..tensor.sharded_tensor import DonatedTensor, ShardedTensor, local_of
from ..trees import PrefixKind, flatten, map_prefix, unflatten
from .backends.segments import Backend, find_backend
from .collectives import forget_lineages
from .entry import Entry, Static, key_of, local_parts
from .errors import Break, JitError
from .hyperparameters import Hyperparameters
from .inspection.lowered import CompiledGraph, Lowered, lower
from .joined import JoinedFunction
from .parts import Parts, log_break
from .passes.agreement import announce, most_of
from .passes.hoist_reads import unmovable_read
from .passes.options import PassOptions
from .passes.pipeline import run as run_passes
from .recording import record, without_history
from .results import tensors_in
from .selection import FULL, MOST, RECORD, RUN, Peers, Recordings, Selected
from .state.differences import Reasons, leaf_names, texts_of
from .state.guard import Guard
from .state.snapshot import Snapshot
from .with_history import CallsWithHistory

_log = logging.getLogger(__name__)
_ATTEMPTS = 3  # calls in a row whose recordings are dropped before that is an error
_KEPT = 16  # recordings of one signature, the newest ones
_OF_FUNCTIONS = (  # options that are no options for modules
    "static_argnums",
    "static_argnames",
    "donate_argnums",
    "in_shardings",
    "out_shardings",
    "cudagraphs",
    "strict",
)
_SIGNATURES = 128  # whose recordings a function keeps in one world; each refers to its meshes


class _OfWorld:
    """What a function has in one world.

    Attributes:
        entries: the recordings of each signature, the least recently used first.
        attempts: for each signature how many recordings in a row were dropped.
        outside: signatures whose results a backward outside of the function has used, the least
            recently used first; functions of the arguments that are not static.
        with_history: what runs calls whose arguments have a gradient history.
        parts: the modules whose calls are graphs, if the function is none.
    """

    def __init__(self, with_history: CallsWithHistory) -> None:
        self.with_history = with_history
        self.entries: dict[Any, Recordings] = {}
        self.attempts: dict[Any, int] = {}
        self.outside: dict[Any, JoinedFunction] = {}
        self.parts: Parts | None = None
        self._peers: dict[Any, Peers] = {}

    @property
    def all_parts(self) -> list[Parts]:
        """The parts of calls with and without a gradient history."""
        return [*([] if self.parts is None else [self.parts]), *self.with_history.parts]

    def peers_of(self, leaves: Sequence[Any]) -> Peers:
        """Return the ranks that record together with this one where these are the arguments.

        Others may call the function with a module or with tensors on another mesh.
        """
        where = tuple(
            [
                weakref.ref(x._layout.mesh if isinstance(x, ShardedTensor) else x)
                for x in leaves
                if isinstance(x, (ShardedTensor, nn.Module))
            ]
        )
        return self._peers.setdefault(where, Peers())


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
        self._fullgraph: bool = options["fullgraph"]
        self._check_state: bool = options["check_state"]
        self._states: weakref.WeakKeyDictionary[World, _OfWorld] = weakref.WeakKeyDictionary()
        self._reasons = Reasons(f)
        self._hyperparameters = Hyperparameters()
        self._history_reasons: set[str] = set()  # those that were logged

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    def __repr__(self) -> str:
        return f"jit({getattr(self._f, '__qualname__', self._f)})"

    @not_compiled("it calls a function of the program outside of any graph", calls_program=True)
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        keep_compiler_out()
        if self._in is not None:
            args = _place(f"{self!r}: in_shardings", args, self._in)
        leaves, tree = self._flatten(args, kwargs)
        world = current_world()
        parts_of_leaves = local_parts(leaves)
        if _is_inside(world):
            return self._call(tree, leaves)
        state = self._states.get(world)
        if state is None:
            state = self._states[world] = self._new_state(world)
            world.dependents.add(self)
        if any(map(_has_history, parts_of_leaves)):
            return self._call_with_history(leaves, tree, state, world)
        key = (tree, *key_of(leaves, parts_of_leaves))
        if state.outside and key in state.outside:
            function = state.outside[key] = state.outside.pop(key)
            return function(*[x for x in leaves if type(x) is not Static])
        if engine_hooks.current_backward() != -1:  # a recomputation; its forward was eager, too
            return self._call(tree, leaves)
        # The least recently used signature comes first, and is dropped first: recording takes
        # seconds.
        by_key = state.entries
        entries = by_key.pop(key, None)
        by_key[key] = entries = Recordings() if entries is None else entries
        if len(by_key) > _SIGNATURES:
            del by_key[next(iter(by_key))]
        peers = entries.peers
        if peers is None:
            peers = entries.peers = state.peers_of(leaves)
        need, selected, is_mixed = self._select(leaves, entries, peers, world)
        parts = state.parts
        if is_mixed:
            result = self._run_mixed(leaves, tree, peers, world)
        elif need == FULL:
            result = self._beyond_limit(leaves, tree, entries, world)
        elif need == RECORD and parts is not None:
            with parts.running(), _same_lineages(parts.sharded):
                result = self._call(tree, leaves)
        elif need == RECORD:
            result = self._record(leaves, tree, key, entries, selected, peers, world)
        else:
            if state.attempts:
                state.attempts.pop(key, None)
            result = selected.entry(leaves, selected.carried, world, self.backend)
        if self._donated:
            _donate([args[i] for i in self._donated if i < len(args)], result)
        return result

    def forget_world(self, world: World) -> None:
        """Drop the graphs of a world that has ended, which refer to it."""
        self._states.pop(world, None)

    def lower(self, *args: Any, **kwargs: Any) -> Lowered:
        """Record the function on "meta", as this rank, and return the graph for inspection.

        Nothing runs, and no argument changes. The graph is as recorded; `.compile()` of the result
        has the passes applied. On an `AbstractMesh` it is that of rank 0.

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
        state = self._states.get(world)
        entries: list[Any] = []
        if state is not None:
            entries += itertools.chain.from_iterable(state.entries.values())
            for parts in state.all_parts:
                entries += parts.entries()
            for function in (*state.outside.values(), *state.with_history.functions):
                entries += function.recordings
        return [
            CompiledGraph(entry.recording.program, world, {}, None, self, entry)
            for entry in entries
        ]

    @property
    def parts(self) -> dict[nn.Module, str]:
        """The modules whose calls are graphs of their own, and their names.

        Empty where the whole function is one graph.
        """
        state = self._states.get(current_world())
        all_parts = [] if state is None else state.all_parts
        return {m: one.name for parts in all_parts for m, one in parts.joined.items()}

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
            return flatten((args, kwargs))
        args = tuple([self._static_of(i, x) if i in numbers else x for i, x in enumerate(args)])
        kwargs = {
            name: self._static_of(name, x) if name in names else x for name, x in kwargs.items()
        }
        return pytree.tree_flatten((args, kwargs), is_leaf=lambda x: type(x) is Static)

    def _static_of(self, place: int | str, x: Any) -> Static:
        """Return a static argument.

        Args:
            place: its position, or its name.

        Raises: TypeError if it cannot be hashed.
        """
        try:
            hash(x)
        except TypeError as error:
            if isinstance(place, int):
                parameters = list(inspect.signature(self._f).parameters)
                place = parameters[place] if place < len(parameters) else f"args[{place}]"
            raise TypeError(
                f"{self!r}: the static argument {place} is a {type(x).__name__} that cannot be "
                f"hashed ({error}); pass a tuple, a string or a number, or leave {place} out of "
                "the static arguments"
            ) from None
        return Static(x, type(x))

    def _call(self, tree: Any, leaves: Sequence[Any]) -> Any:
        args, kwargs = _unflatten_arguments(tree, leaves)
        return self._call_and_place(*args, **kwargs)

    def _arguments(self, tree: Any, leaves: Sequence[Any]) -> dict[str, Any]:
        """Return the arguments of a call by the names of the function's parameters."""
        args, kwargs = _unflatten_arguments(tree, leaves)
        try:
            signature = inspect.signature(self._f, follow_wrapped=False)
            bound = signature.bind(*args, **kwargs)
        except (TypeError, ValueError):  # the call raises, or a builtin has no signature
            return {}
        bound.apply_defaults()
        return bound.arguments

    def _call_and_place(self, *args: Any, **kwargs: Any) -> Any:
        result = self._f(*args, **kwargs)
        if self._out is None:
            return result
        return _place(f"{self!r}: out_shardings", result, self._out)

    def _select(
        self, leaves: Sequence[Any], entries: Recordings, peers: Peers, world: World
    ) -> tuple[int, Selected, bool]:
        """Return what all ranks do, the recording of this one, and whether the call is mixed.

        It is mixed where ranks have arguments of signatures that they have not recorded together.
        """
        none = Selected(None, (), "", 0)
        if not peers.agree:
            selected = entries.select(leaves)
        else:
            # Selecting one may take collectives, which ranks with other recordings do not have.
            is_later = entries.communicates
            selected = entries.before_reads(leaves) if is_later else entries.select(leaves)
            need, is_same = most_of(world, peers.meshes, self._name, selected.need, entries.number)
            peers.note_call(is_mixed=not is_same)
            if not is_same:
                return RUN, none, True
            if not is_later or need == RECORD:
                return need, selected, False
            selected = entries.select(leaves)
        need = selected.need
        if entries.is_own:
            need, _ = most_of(world, entries.meshes, self._name, need, 0)
        return need, selected, False

    def _run_mixed(self, leaves: Sequence[Any], tree: Any, peers: Peers, world: World) -> Any:
        """Run a call eagerly in which ranks have signatures that they have not recorded together.

        Graphs with passes have other collectives than eager code, and than each other.
        """
        if peers.mixed_calls == 1 and not world.rank:
            _log.warning(
                "sm.jit: %s has arguments of other shapes on other ranks; such calls run eagerly. "
                "sm.training.pad_to_buckets pads them to the same shapes on all ranks",
                self._name,
            )
        if peers.are_apart:
            self._part(peers, world)
            if not world.rank:
                _log.warning(
                    "sm.jit: %s had arguments of other shapes on other ranks in %d of %d calls; "
                    "each rank records by itself from now on, without passes",
                    self._name,
                    peers.mixed_calls,
                    peers.calls,
                )
        result = self._call(tree, leaves)
        return without_history(result, lambda: self._snapshot(leaves, tree))

    def _new_state(self, world: World) -> _OfWorld:
        def parts(modules: Sequence[nn.Module]) -> Parts:
            return Parts(
                modules, lambda: self.backend, not world.rank, check_state=self._check_state
            )

        with_history = CallsWithHistory(
            self._name, self._two_programs, parts, self._fullgraph, not world.rank
        )
        return _OfWorld(with_history)

    def _call_with_history(
        self, leaves: Sequence[Any], tree: Any, state: _OfWorld, world: World
    ) -> Any:
        """Run a call one of whose arguments has a gradient history."""
        look = functools.partial(self._snapshot, leaves, tree)
        runner = state.with_history.runner_of(tree, leaves, look)
        if isinstance(runner, JoinedFunction):
            why_eager = functools.partial(state.with_history.why_eager, runner, leaves, look)
            return runner.call([x for x in leaves if type(x) is not Static], why_eager)
        if isinstance(runner, Parts):
            with runner.running():
                return self._call(tree, leaves)
        if runner and not (world.rank or runner in self._history_reasons):
            self._note_history(leaves, tree, runner)
        return self._call(tree, leaves)

    def _note_history(self, leaves: Sequence[Any], tree: Any, why: str) -> None:
        """Log that a call runs eagerly, and which argument has a gradient history."""
        self._history_reasons.add(why)
        names = leaf_names(self._f, tree, len(leaves))
        name = next(
            name
            for name, x in zip(names, leaves, strict=True)
            if isinstance(x, Tensor) and _has_history(local_of(x))
        )
        reason = (
            f"{name} has a gradient history, as have outputs of a model, and {why}; detach it, or "
            "put sm.jit around the model and this function together, such as the whole step"
        )
        log_break(self._name, reason, "")

    def _snapshot(self, leaves: Sequence[Any], tree: Any) -> Snapshot:
        """Return what the function can reach in a call with these arguments."""
        reached = [
            (f"args[{i}]", x.value if type(x) is Static else x)
            for i, x in enumerate(leaves)
            if not isinstance(x, Tensor)
        ]
        arguments = self._arguments(tree, leaves)
        return Snapshot([("f", self._f), *reached], called=self._f, arguments=arguments)

    def _part(self, peers: Peers, world: World) -> None:
        """Let each rank record by itself, with the collectives of eager code."""
        peers.are_apart = True
        for entries in self._states[world].entries.values():
            if entries.peers is peers:
                entries.clear()
                entries.is_own = False  # nothing is exchanged from now on

    def _record(
        self,
        leaves: Sequence[Any],
        tree: Any,
        key: Any,
        entries: Recordings,
        selected: Selected,
        peers: Peers,
        world: World,
    ) -> Any:
        """Run and record a call.

        Args:
            selected: what holds for it: no recording, or one, where another rank has none.
            peers: the ranks that record it, too.
        """
        why = selected.why or ("" if selected.entry is None else "another rank records it")
        others = [entry.recording.program for entry in entries if entry.change(leaves) is None]
        options = PassOptions.of(False) if peers.are_apart else self._options
        snapshot = self._snapshot(leaves, tree)
        inputs = self._hyperparameters.inputs(snapshot)
        guard = Guard(snapshot, {one.place for one in inputs})
        state = self._states[world]
        attempts = state.attempts
        count = attempts.get(key, 0) + 1
        keys = [other for other, known in state.entries.items() if known and other != key]
        reasons = self._reasons.find(why, key, keys)
        meshes = _meshes(snapshot, leaves)
        ranks = [mesh.ranks.flatten().tolist() for mesh in meshes]
        if options.any:
            may_differ = any(
                isinstance(x, Tensor) and not isinstance(x, ShardedTensor) and x.ndim > 0
                for x in leaves
            )
            ranks, may_differ = announce(world, ranks, self._name, texts_of(reasons), may_differ)
            peers.may_differ = peers.may_differ or may_differ
        f = functools.partial(self._call, tree)
        with _same_lineages(guard.sharded):
            returned, recording, before = record(
                f, leaves, snapshot, inputs, world, count == 1, fullgraph=self._fullgraph
            )
        recorded = recording if isinstance(recording, str) else recording.program
        if not (self._fullgraph or isinstance(recorded, str)):
            why = unmovable_read(recorded)
            recorded = recorded if why is None else Break(why)
        if isinstance(recorded, str) and count >= _ATTEMPTS and not isinstance(recorded, Break):
            recorded = Break(
                f"{self!r} changes Python state in every call, which a graph would not do: "
                f"{recorded}. Do it outside of the function, or keep the value in a tensor and "
                "change that in place"
            )
        program = run_passes(recorded, options, world, ranks, others)
        if isinstance(program, str):  # why there is none
            attempts[key] = count
            if isinstance(program, Break):
                if self._fullgraph:
                    raise JitError(program)
                self._break(program, snapshot, world)
            return returned.build()
        attempts.pop(key, None)
        program.name = self._name
        recording = recording._replace(program=program)  # type: ignore[union-attr]
        if recording.is_open:
            join = functools.partial(self._join, key, snapshot, peers, world)
            returned = returned.map(lambda x: _call_in_backward(x, join))
        if program.is_alone:
            self._part(peers, world)
            entries.clear()
        elif selected.entry is not None:
            entries.remove(selected.entry)
        is_own = entries.is_own or program.is_own
        entries.is_own = is_own and options.any and not peers.are_apart
        if meshes:
            entries.meshes = ranks
        if meshes and options.any and not entries.number:
            peers.meshes = ranks
            peers.count += 1
            entries.number = peers.count
        for read in program.reads if program.is_own else ():
            forget_lineages(read.graph)
        entries.append(
            Entry(recording, guard, leaves, before, texts_of(reasons) or None, self._check_state)
        )
        for entry in entries if program.is_own else ():
            entry.forget_lineages()
        if not world.rank:
            self._reasons.note(self, reasons)
        del entries[:-_KEPT]
        return returned.build()

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
            result = self._call(tree, leaves)
            return without_history(result, lambda: self._snapshot(leaves, tree))

    def _join(self, key: Any, snapshot: Snapshot, peers: Peers, world: World) -> None:
        """Run calls of a signature as two programs from now on.

        The reason is that a backward outside of the function has used the results. If modules are
        units of `fully_shard` or `data_parallel`, which gather parameters and reduce gradients
        around their calls, the calls inside of units are the graphs.
        """
        state = self._states.get(world)
        if state is None:  # the world has ended
            return
        if peers.agree:  # the two programs of a signature are each rank's own
            self._part(peers, world)
        is_of_units = any(hasattr(module, "_shardmesh_unit") for module in snapshot.modules)
        if is_of_units and not self._fullgraph:
            state.entries.pop(key, None)
            if state.parts is None:
                state.parts = self._new_parts(snapshot, world)
            return
        if key in state.outside:
            return
        if len(state.outside) >= _SIGNATURES:
            # Its recording in `entries` has no backward: the signature begins anew.
            first = next(iter(state.outside))
            del state.outside[first]
            state.entries.pop(first, None)
        tree, _, leaf_keys, _ = key
        state.outside[key] = self._two_programs(tree, leaf_keys, snapshot.modules)

    def _two_programs(
        self, tree: Any, leaf_keys: Sequence[Any], modules: Sequence[nn.Module]
    ) -> JoinedFunction:
        """Return the function as two programs, of the arguments that are not static.

        Args:
            tree: the structure of the arguments.
            leaf_keys: for each leaf of the arguments a `Static`, or something else.
        """
        static = [x.value for x in leaf_keys if type(x) is Static]

        def call(*leaves: Any) -> Any:
            rest = iter(leaves)
            return self._call(tree, [x if type(x) is Static else next(rest) for x in leaf_keys])

        return JoinedFunction(
            call,
            modules,
            lambda: self.backend,
            self._name,
            self._fullgraph,
            functools.partial(self._f, *static) if static else self._f,
            self._check_state,
        )

    def _break(self, reason: str, snapshot: Snapshot, world: World) -> None:
        """Run the function in parts from now on."""
        self._states[world].parts = parts = self._new_parts(snapshot, world)
        if not world.rank:
            names = ", ".join(function.name for function in parts.joined.values())
            log_break(self._name, reason, f"with graphs of {names}" if names else "")

    def _new_parts(self, snapshot: Snapshot, world: World) -> Parts:
        return Parts(
            snapshot.modules,
            lambda: self.backend,
            not world.rank,
            check_state=self._check_state,
            sharded=[x for x, _ in snapshot.sharded],
        )


class JitModule(nn.Module):
    """A module whose calls are graphs, forward and backward: the result of `jit` of a module.

    Parameters, buffers and other attributes are those of the module, which `_orig_mod` is, as in
    what `torch.compile` returns.
    """

    def __init__(self, module: nn.Module, options: dict[str, Any]) -> None:
        super().__init__()
        defaults = (None, (), False)
        unknown = [x for x in _OF_FUNCTIONS if not any(options[x] is one for one in defaults)]
        if unknown:
            raise TypeError(f"sm.jit: {unknown[0]} is an option for functions, not for modules")
        self._orig_mod = module
        self.training = module.training
        inductor = PassOptions.of(options["compiler_options"]).inductor
        find = functools.cache(lambda: find_backend(options["backend"], inductor))
        self.__dict__["_options"] = options
        self.__dict__["_backend"] = find
        self.__dict__["_parts"] = weakref.WeakKeyDictionary()

    def __reduce__(self) -> Any:
        """Copies and files have the module, and no graphs."""
        return jit_module, (self._orig_mod, self._options)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        keep_compiler_out()
        world = current_world()
        if thread_context.needs_each_operator:
            return self._orig_mod(*args, **kwargs)
        parts = self._parts.get(world)
        if parts is None:
            parts = Parts(
                [self._orig_mod],
                self._backend,
                not world.rank,
                self._options["fullgraph"],
                self._options["check_state"],
            )
            self._parts[world] = parts
            world.dependents.add(self)
        with parts.running():
            return self._orig_mod(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("_orig_mod"), name)

    def train(self, mode: bool = True) -> JitModule:
        """Set the mode of the module, as `nn.Module.train`."""
        self.training = mode
        self._orig_mod.train(mode)
        return self

    def forget_world(self, world: World) -> None:
        """Drop the graphs of a world that has ended, which refer to it."""
        self._parts.pop(world, None)

    @property
    def recorded(self) -> list[CompiledGraph]:
        """The forward graphs that this rank's calls have made."""
        world = current_world()
        entries = self._parts[world].entries() if world in self._parts else []
        return [CompiledGraph(x.recording.program, world, {}, None, self, x) for x in entries]


def jit_module(module: nn.Module, options: dict[str, Any]) -> JitModule:
    """Return a module whose calls are graphs."""
    return _jit_class(type(module))(module, options)


@functools.lru_cache(256)
def _jit_class(kind: type[nn.Module]) -> type[JitModule]:
    """Return the class of compiled modules of a class, whose forward has the same signature.

    Trainers select columns of a data set, and labels, by the signature.
    """

    @functools.wraps(kind.forward)
    def forward(self: JitModule, *args: Any, **kwargs: Any) -> Any:
        return JitModule.forward(self, *args, **kwargs)

    members = {"forward": forward, "__module__": __name__, "__doc__": JitModule.__doc__}
    return type(JitModule.__name__, (JitModule,), members)


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
    fullgraph: bool = False,
    strict: bool = False,
    check_state: bool = True,
) -> Any:
    """Return a function that runs `f` as one graph: forward, backward, collectives and optimizer.

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
            passes all ranks of a mesh record in the same call.
        cudagraphs: whether Inductor captures the operators between collectives in CUDA graphs;
            needs a CUDA device. An option for functions, not for modules.
        fullgraph: whether what a graph cannot repeat is an error. Otherwise the function runs in
            parts from then on: its modules' calls are graphs, what is between them is eager.
        strict: whether a call raises whose values, of tensors that installed packages read, have no
            recording when there are many; otherwise it runs eagerly. An option for functions.
        check_state: whether each call compares the Python state that `f` can reach with that of the
            recording. False is a promise that nothing besides the arguments changes: a call after
            `model.eval()`, or after a closure variable was assigned, runs the old graph, silently.

    Returns:
        The function, or for a module one whose calls are graphs. Where no argument has a gradient
        history, `backward` through a function's result raises if `f` calls `backward` itself, or if
        nobody has called it through the result of the first call.

    Raises:
        JitError: in a call, if `f` reads the value of a tensor, changes Python state in every call,
            or does anything else that a graph cannot repeat; it names the line.

    Communication: that of `f`; when a graph is made, an `all_gather_object` of a hash over each
    mesh. With passes and plain tensors among the arguments, an all_reduce of three numbers at the
    beginning of each call.

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
        "fullgraph": fullgraph,
        "strict": strict,
        "check_state": check_state,
    }
    if f is None:
        return functools.partial(jit, **options)
    if isinstance(f, nn.Module):
        return jit_module(f, options)
    if not callable(f):
        raise TypeError(
            f"sm.jit takes a function, got {type(f).__name__}; write sm.jit(f, ...) or @sm.jit(...)"
        )
    return JitFunction(f, options)


class _NotesBackward(torch.autograd.Function):
    """The identity; calls a function when backward runs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, call: Callable[[], None]) -> Tensor:
        ctx.call = call
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        ctx.call()
        return grad, None


def _call_in_backward(x: Any, call: Callable[[], None]) -> Any:
    """Return a tensor with a history, the same values, and a call in its backward."""
    if not isinstance(x, Tensor) or x.is_leaf:
        return x
    return with_part(x, _NotesBackward.apply(local_of(x), call))


# -- signatures ------------------------------------------------------------------------------------


def _unflatten_arguments(tree: Any, leaves: Sequence[Any]) -> tuple[Sequence[Any], dict[str, Any]]:
    """Return the positional and the keyword arguments of a call."""
    return unflatten(tree, [x.value if type(x) is Static else x for x in leaves])


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


def _is_inside(world: World) -> bool:
    """Return whether the call is part of something that needs its operators one by one.

    That is another recording, a transform, a mapped function, `accumulate_grads`, or a backward
    pass that recomputes nothing.
    """
    if thread_context.needs_each_operator or is_accumulating(world):
        return True
    return thread_context.graphs_before is None and engine_hooks.current_backward() != -1


def _has_history(x: Tensor) -> bool:
    """Return whether a gradient flows on through a tensor."""
    return x.requires_grad and not x.is_leaf


@contextmanager
def _same_lineages(tensors: Sequence[ShardedTensor]) -> Iterator[None]:
    """Restore the lineages of tensors after the block, as a graph that writes to them leaves them.

    Another rank may run such a graph, or record where this one runs parts.
    """
    lineages = [x._lineage for x in tensors]
    yield
    for x, lineage in zip(tensors, lineages, strict=True):
        x._lineage = lineage


def _is_sharding(x: Any) -> bool:
    """Return whether this is no container; `device_put` refuses what is no sharding."""
    if x is None or isinstance(x, Sharding):
        return True
    return not isinstance(x, (tuple, list, dict)) and pytree.tree_is_leaf(x)


# A dict may leave out keys: those arguments and results stay as they are.
_SHARDINGS = PrefixKind(_is_sharding, "a NamedSharding or None", is_partial=True)


def _place(name: str, tree: Any, shardings: Any) -> Any:
    """Return a tree with its tensors laid out as a prefix of shardings says.

    None in the prefix leaves a subtree as it is.
    """

    def put(subtree: Any, sharding: Any) -> Any:
        return subtree if sharding is None else device_put(subtree, sharding)

    return map_prefix(name, put, shardings, tree, _SHARDINGS)


def _donate(args: list[Any], result: Any) -> None:
    """Take the arguments' sharded tensors from the caller, but for those in the result."""
    returned = {id(x) for x in tensors_in(result)}
    for x in pytree.tree_leaves(args):
        if type(x) is ShardedTensor and id(x) not in returned:
            DonatedTensor.take(x)
