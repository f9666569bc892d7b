"""Record a function as a graph while it runs.

A `GraphRecorder` sees every operator below autograd and every call of a `Group` in its thread. A
tensor that no recorded operator has made is *captured*: it becomes a placeholder. Which tensors may
be captured, and from where later calls take them, is decided when the recording ends
(`recording.py`).
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

from ...mesh.comm.call_site import _OURS, _TORCH, user_call
from ...mesh.comm.group import Group
from ...mesh.comm.thread_context import thread_context
from ...mesh.comm.work import DONE, Work
from ...mesh.comm.world import World
from ..ops import methods
from ..ops.dispatch import name_of
from ..tensor.sharded_tensor import ShardedTensor
from .collectives import OPERATORS, WAIT, Site, group_name, site_number
from .draws import Draw, Draws
from .dynamic_shapes import check_shape_is_static
from .errors import at_line, value_read
from .host_calls import Exchange, barrier, expect, item
from .scalars import Condition, TracedFloat, among
from .state.snapshot import is_installed

aten = torch.ops.aten
_VIEWS: dict[
    Any, Any
] = {  # operators that return views without saying so, and those that say so: a compiler must know
    aten.unsafe_split_with_sizes.default: aten.split_with_sizes.default,
    aten.unsafe_split.Tensor: aten.split.Tensor,
    aten._unsafe_view.default: aten.view.default,
}
_CONSTANTS = {aten.lift_fresh.default, aten.lift_fresh_copy.default}
_OURS_HERE, _OPTIMIZERS = __file__.rpartition("/")[0] + "/", torch.optim.__path__[0]


class Captured:
    """A tensor that the function uses and has not made.

    Attributes:
        ref: the tensor.
        node: its placeholder.
        place: the first line of the program that used it.
        address: where its memory was then.
    """

    def __init__(self, tensor: Tensor, node: fx.Node) -> None:
        self.ref, self.node = TensorWeakRef(tensor), node
        self.place = user_call().place
        self.address = tensor.data_ptr()


class GraphRecorder(TorchDispatchMode):
    """with recorder: record what runs in this thread as a graph.

    Attributes:
        abstract: whether the program's tensors are on "meta", as are those that stand for sharded
            ones.
        graph: the operators so far.
        captured: the tensors that it takes from outside.
        numbers: placeholders of numbers, by the key that `number` was given; `number_sources` has
            their sources.
        passed_as_double: traced numbers that an operator is about to get as C++ doubles.
        conditions: what the function has found out about numbers that are known before a call.
        draws: the random numbers drawn.
        arguments: placeholders of arguments.
        reachable: ids of the tensors that the function can reach in Python.
        exchanges: how many times the ranks exchanged Python objects.
    """

    def __init__(self, world: World, abstract: bool = False) -> None:
        super().__init__()
        self.abstract, self.world, self.graph = abstract, world, fx.Graph()
        self._stand_ins: dict[int, Any] = {}
        self.captured: list[Captured] = []
        self.constants: list[tuple[fx.Node, Tensor]] = []
        self.numbers: dict[Any, fx.Node] = {}
        self.number_sources: dict[Any, Callable[..., float]] = {}
        self.passed_as_double: list[Any] = []
        self.conditions: list[Condition] = []
        self.exchanges = 0
        self.draws = Draws(world)
        self.arguments: set[fx.Node] = set()
        self.reachable: set[int] = set()
        self._nodes: Any = WeakTensorKeyDictionary()
        self._aliases: dict[int, list[TensorWeakRef]] = {}
        self._body = self.graph.call_function(_begin)
        self._reads = _RefuseReads()

    def __enter__(self) -> GraphRecorder:
        thread_context.recorder = self
        self._reads.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        thread_context.recorder = None
        super().__exit__(*error)
        self._reads.__exit__(*error)

    # -- nodes -------------------------------------------------------------------------------------

    def call(self, target: Callable[..., Any], args: Any, kwargs: Any = None) -> fx.Node:
        """Append a node."""
        return self.graph.call_function(target, tuple(args), kwargs or {})

    def placeholder(self, name: str) -> fx.Node:
        """Add an input."""
        with self.graph.inserting_before(self._body):
            return self.graph.placeholder(name)

    def number(
        self, key: Any, hint: float, now: Callable[[], float] | None = None, name: str | None = None
    ) -> TracedFloat:
        """Return a number as an input, the same one for the same key; `now` and `name` as in
        `scalars.py`.
        """
        if key not in self.numbers:
            self.numbers[key] = self.placeholder(f"number_{len(self.numbers)}")
        return TracedFloat.of(self, self.numbers[key], hint, now, name)

    def node_of(self, x: Tensor) -> fx.Node | None:
        """Return the node of a tensor that the recording has made or captured; None for another."""
        found = self._nodes.get(x)
        return found[0] if found is not None and found[1] == _storage(x) else self._node_of_alias(x)

    def _node_of_alias(self, x: Tensor) -> fx.Node | None:
        """Return a view of a known tensor with the same memory: torch makes some aliases without an
        operator.

        A tensor that the program can reach is a separate input, so that its writes are counted.
        """
        if id(x) in self.reachable:
            return None
        for ref in self._aliases.get(_storage(x), ()):
            other = ref()
            if (
                other is not None
                and other is not x
                and _storage(other) == _storage(x)
                and other.dtype is x.dtype
            ):
                base = self._nodes[other]
                if base[1] == _storage(x):
                    if _geometry(x) == _geometry(other):
                        self.know(x, base[0])
                        return base[0]
                    if base[0] in self.arguments:
                        raise at_line(
                            "a view of an argument was made without an operator of torch",
                            "Pass a copy of it",
                        )
                    made = self.call(
                        aten.as_strided.default,
                        (base[0], list(x.shape), list(x.stride()), x.storage_offset()),
                    )
                    self.know(x, made)
                    return made
        return None

    def know(self, x: Tensor, node: fx.Node) -> None:
        """Record that this tensor is the result of this node."""
        self._nodes[x] = node, _storage(x)
        self._aliases.setdefault(_storage(x), []).append(TensorWeakRef(x))
        node.meta.setdefault("val", (tuple(x.shape), tuple(x.stride()), x.dtype, x.device))

    def add_argument(self, x: Tensor) -> None:
        """Make a tensor an input before anything uses it."""
        if self._nodes.get(x) is None:
            node = self.placeholder(f"argument_{len(self.arguments)}")
            self.captured.append(Captured(x, node))
            self.know(x, node)
            self.arguments.add(node)

    def input_of(self, x: Tensor) -> fx.Node:
        """Return the node of an operand, which is captured if it is not known."""
        found = self.node_of(x)
        if found is None:
            found = self.placeholder(f"captured_{len(self.captured)}")
            self.captured.append(Captured(x, found))
            self.know(x, found)
        return found

    # -- operators ---------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        with (
            torch._C.DisableTorchFunction()
        ):  # modes of functions, such as a type checker's, are not meant
            return self._operator(func, args, kwargs or {})

    def _operator(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if func.namespace == "profiler":
            return func(*args, **kwargs)
        flat, tree = pytree.tree_flatten((tuple(args), kwargs))
        if self._is_stand_in(flat, kwargs):
            with _disable_current_modes():
                made = func(*args, **kwargs)
            if self.abstract:  # kept, so that no other storage gets their addresses
                self._stand_ins.update(
                    {
                        _storage(x): x.untyped_storage()
                        for x in pytree.tree_leaves(made)
                        if isinstance(x, Tensor)
                    }
                )
            return made
        if func is aten._local_scalar_dense.default:
            return self._read(args[0])
        check_shape_is_static(func, args, kwargs)
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.draws.check_generator()
        doubles, self.passed_as_double = self.passed_as_double, []
        given, recorded = self._arguments(
            func, flat, among(doubles, func, args, kwargs) if doubles else {}
        )
        real_args, real_kwargs = pytree.tree_unflatten(given, tree)
        written = (
            list(args[0])
            if func._schema.is_mutable and func.__name__.startswith("_foreach_")
            else []
        )
        versions = [x._version for x in written]
        result = func(*real_args, **real_kwargs)
        # Under a mode, torch does not count the writes of operators over lists, on which views and
        # caches of parameters depend.
        torch.autograd.graph.increment_version(
            [x for x, version in zip(written, versions, strict=True) if x._version == version]
        )
        if func in _CONSTANTS:
            self._constant(result)
        elif func not in _EFFECTLESS:
            node_args, node_kwargs = pytree.tree_unflatten(recorded, tree)
            self._results(
                func, result, self.call(_VIEWS.get(func, func), node_args, node_kwargs), given
            )
        return result

    def _is_stand_in(self, flat: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        """Return whether an operator makes or takes a tensor on "meta" that stands for a sharded
        one and has no values.
        """
        tensors = [x for x in flat if isinstance(x, Tensor)]
        if any(type(x) is ShardedTensor for x in tensors):
            return True
        if self.abstract:
            known = tensors and all(x.is_meta and _storage(x) in self._stand_ins for x in tensors)
            return bool(known) or thread_context.on_stand_ins  # some are older than the recording
        device = kwargs.get("device")
        return (device is not None and torch.device(device).type == "meta") or any(
            x.is_meta for x in tensors
        )

    def _arguments(
        self, func: Any, flat: list[Any], doubles: dict[int, Any]
    ) -> tuple[list[Any], list[Any]]:
        """Return the arguments to run with and those to record."""
        given, recorded, constants = [], [], func in _CONSTANTS
        for i, x in enumerate(flat):
            if isinstance(x, torch.SymFloat):
                given.append(x.node.hint)
                recorded.append(x.node.node)
            elif isinstance(x, Tensor):
                given.append(x)
                recorded.append(None if constants else self.input_of(x))
            else:
                given.append(x)
                recorded.append(doubles[i].node if i in doubles else x)
        return given, recorded

    def _constant(self, made: Tensor) -> None:
        """Record a tensor that the program has made from Python numbers: a copy of its current
        values.
        """
        source = self.placeholder(f"constant_{len(self.constants)}")
        with _disable_current_modes():
            self.constants.append((source, made.detach().clone()))
        self.know(made, self.call(aten.clone.default, (source,)))

    def _results(self, func: Any, result: Any, node: fx.Node, operands: Sequence[Any]) -> None:
        """Record the result of an operator, and which operand's memory it shares, which the schemas
        of unsafe views do not say.
        """
        made = {_storage(x) for x in pytree.tree_leaves(result) if isinstance(x, Tensor)}
        known = [
            self._nodes[x][0]
            for x in operands
            if isinstance(x, Tensor) and _storage(x) in made and x.numel()
        ]
        if known:
            node.meta["owner"] = node.all_input_nodes.index(known[0])
        if isinstance(result, Tensor):
            if self._nodes.get(result) is None or self.node_of(result) is None:
                self.know(result, node)
            node.meta.setdefault(
                "val", (tuple(result.shape), tuple(result.stride()), result.dtype, result.device)
            )
        elif isinstance(result, (list, tuple)):
            for i, x in enumerate(result):
                if isinstance(x, Tensor):
                    self.know(x, self.call(operator.getitem, (node, i)))

    # -- values ------------------------------------------------------------------------------------

    def _read(self, x: Tensor) -> Any:
        """Return the value of a tensor with one element: a number of the graph; for libraries the
        value, which later calls compare.
        """
        with _disable_current_modes():
            value = math.nan if x.is_meta else x.item()
        frame = _caller()
        file = frame.f_code.co_filename
        ours = file.startswith(_OURS) and file != methods.__file__
        if x.dtype.is_floating_point and not ours:
            return TracedFloat.of(self, self.call(item, (self.input_of(x),)), value)
        if not ours and not (is_installed(file) and file != methods.__file__):
            raise value_read(f"a tensor of dtype {str(x.dtype).removeprefix('torch.')}: it")
        place = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        self.call(expect, (self.input_of(x), value, place))
        return value

    # -- collectives -------------------------------------------------------------------------------

    def collective(self, group: Group, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of a group and record it as operators of `collectives.py`."""
        if group.size == 1:
            thread_context.recorder = None
            try:
                return getattr(Group, name)(group, *args, **kwargs)
            finally:
                thread_context.recorder = self
        if name == "direct":
            raise at_line(
                "sm.jit records no symmetric memory",
                "Set mesh.topology = replace(mesh.topology, symmetric=None)",
            )
        if name in ("all_gather_object", "barrier"):
            with self._hidden():
                found = getattr(Group, name)(group, *args, **kwargs)
            if name == "barrier":
                self.call(barrier, (group_name(group),))
                return found
            self.call(Exchange(group_name(group), args[0], found, user_call().place), ())
            self.exchanges += 1
            return found
        return self._tensor_collective(group, name, args, kwargs)

    def _tensor_collective(self, group: Group, name: str, args: Any, kwargs: Any) -> Work | None:
        with torch._C.DisableTorchFunction():
            return self._start(group, name, args, kwargs)

    def _start(self, group: Group, name: str, args: Any, kwargs: Any) -> Work | None:
        context = group.world.comm_context
        call = user_call()
        where = (
            group_name(group),
            site_number(Site(kwargs["tag"], context.lineage, call.name, call.place)),
        )
        if name in ("all_reduce", "broadcast"):
            out, how, async_op = args
            node = self.call(_OPERATOR[name], (self.input_of(out), how, *where))
            node.meta["donate"] = True
        elif name == "permute":
            (out, x), async_op = args, kwargs["async_op"]
            size = 0 if kwargs["src"] is None else out.numel()
            node = self.call(
                _OPERATOR[name], (self.input_of(x), size, kwargs["dst"], kwargs["src"], *where)
            )
        else:
            out, x, *how, async_op = args
            how = [list(h) if isinstance(h, (list, tuple)) else h for h in how]
            node = self.call(_OPERATOR[name], (self.input_of(x), *how, *where))
        with self._hidden():
            work = getattr(Group, name)(group, *args, **kwargs)
        node.meta["val"] = (
            (size if name == "permute" else out.numel(),),
            (1,),
            out.dtype,
            out.device,
        )
        received = not (name == "permute" and kwargs["src"] is None)
        recorded = _RecordedWork(self, work, node, out if received else None)
        if async_op:
            return recorded
        recorded.wait()
        return None

    def draw(
        self, part: Callable[..., Tensor], seed: int, stream: int, parameters: Sequence[Any]
    ) -> Tensor:
        """Return a random tensor and record that it is drawn; see `StepRecorder`."""
        given = [self.input_of(x) if isinstance(x, Tensor) else x for x in parameters]
        with self._hidden():
            made = part(seed, stream, *parameters)
            self.know(made, self.call(Draw(part, self.draws.position(seed, stream)), given))
        return made

    def write(self, out: Tensor, node: fx.Node) -> None:
        """Record that a collective has written its result, flat, into a buffer."""
        result = self.call(aten.view.default, (node, list(out.shape)))
        if self._is_fresh(out):
            result.meta["fresh"] = True
            self.know(out, result)
        else:
            self.call(aten.copy_.default, (self.input_of(out), result))

    def _is_fresh(self, out: Tensor) -> bool:
        """Return whether nothing else can see this buffer's memory, so that the result may take its
        place.
        """
        known = self._nodes.get(out)
        if known is None or known[0].op == "placeholder" or _writes_or_views(known[0]):
            return False
        others = (ref() for ref in self._aliases.get(_storage(out), ()))
        return all(x is None or x is out or _storage(x) != _storage(out) for x in others)

    def _hidden(self) -> Any:
        return _Hidden(self)


class _Hidden:
    """Inside, nothing is recorded, and other ranks of a simulated world may run."""

    def __init__(self, recorder: GraphRecorder) -> None:
        self._recorder, self._modes = recorder, _disable_current_modes()

    def __enter__(self) -> None:
        thread_context.recorder = None
        self._recorder.draws.host.pause()
        self._modes.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._modes.__exit__(*error)
        self._recorder.draws.host.resume()
        thread_context.recorder = self._recorder


class _RecordedWork(Work):
    """A collective that a recording has started; waiting for it is recorded once."""

    def __init__(
        self, recorder: GraphRecorder, work: Work | None, node: fx.Node, out: Tensor | None
    ) -> None:
        self._recorder, self._work, self._node, self._out = recorder, work or DONE, node, out
        self._waited = False

    def wait(self) -> None:
        if thread_context.recorder is not self._recorder or self._waited:
            return self._work.wait()
        self._waited = True
        with self._recorder._hidden(), torch._C.DisableTorchFunction():
            self._work.wait()
        with torch._C.DisableTorchFunction():
            self._record()
        return None

    def _record(self) -> None:
        done = self._recorder.call(WAIT, (self._node,))
        done.meta["val"] = self._node.meta["val"]
        if self._out is not None:
            self._recorder.write(self._out, done)

    def is_completed(self) -> bool:
        return self._work.is_completed()


class _RefuseReads(TorchFunctionMode):
    """Refuse functions of tensors that read memory without an operator."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if (
            func in _READS
            and thread_context.recorder is not None
            and not (args[0].is_meta and type(args[0]) is not ShardedTensor)
        ):
            raise value_read(name_of(func))
        result = func(*args, **(kwargs or {}))
        return TracedFloat(result.node) if type(result) is torch.SymFloat else result


_READS = frozenset(
    {
        Tensor.tolist,
        Tensor.numpy,
        Tensor.__array__,
        Tensor.__dlpack__,
        Tensor.__repr__,
        Tensor.__reduce_ex__,
        Tensor.__format__,
    }
)
_EFFECTLESS = frozenset({aten.sym_size.int, aten.is_same_size.default})
_OPERATOR = {name: operator for operator, name in OPERATORS.items()}


def _begin() -> None:
    """Separate inputs from operators, as the target of a node."""


def _geometry(x: Tensor) -> Any:
    return x.shape, x.stride(), x.storage_offset()


def _storage(x: Tensor) -> int:
    return x.untyped_storage()._cdata


def _writes_or_views(node: fx.Node) -> bool:
    """Return whether a node's result shares memory with an operand."""
    if node.meta.get("fresh"):
        return False
    schema = getattr(node.target, "_schema", None)
    return (
        schema is None
        or any(r.alias_info is not None for r in schema.returns)
        or node.target is aten.view.default
    )


def _caller() -> FrameType:
    """Return the innermost frame that is neither of this folder nor of torch, but for its
    optimizers.
    """
    frame: Any = sys._getframe(1)
    while (
        (file := frame.f_code.co_filename).startswith((_OURS_HERE, _TORCH))
        and not file.startswith(_OPTIMIZERS)
        and frame.f_back
    ):
        frame = frame.f_back
    return frame
