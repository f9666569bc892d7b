"""Record a function as a graph while it runs.

A `GraphRecorder` sees every operator below autograd and every call of a `Group` in its thread, runs
it, and adds it to the graph that it builds (`graph_builder.py`). Which tensors may come from
outside, and from where later calls take them, is decided when the recording ends (`recording.py`).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from ...mesh.comm.call_site import _INNER, _OURS, _TORCH, user_call
from ...mesh.comm.group import Group
from ...mesh.comm.thread_context import thread_context
from ...mesh.comm.work import DONE, Work
from ...mesh.comm.world import World
from ..autograd import engine_hooks
from ..ops import dispatch, methods
from ..ops.dispatch import name_of
from ..ops.draws import draws_numbers
from ..tensor.sharded_tensor import ShardedTensor
from .collectives import OPERATORS, WAIT, Site, group_name, site_number
from .draws import Draw, Draws, seed_error
from .errors import JitError, at_line, value_read
from .graph_builder import GraphBuilder, storage_of
from .opaque import record_opaque
from .program import Exchange, OfTraining, barrier, expect, item
from .scalars import TracedFloat, among, settle_base, settle_doubles
from .state.names import is_installed

aten = torch.ops.aten
_CONSTANTS = {aten.lift_fresh.default, aten.lift_fresh_copy.default}
_LOOKS_AT_GRAD_MODE = frozenset({aten.mkldnn_rnn_layer.default})  # below autograd
_EFFECTLESS = frozenset({aten.sym_size.int, aten.is_same_size.default})
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
_COLLECTIVES = {name: operator for operator, name in OPERATORS.items()}
_OPERATORS = methods.__file__, dispatch.__file__  # run torch's operators for the program
_OURS_HERE, _OPTIMIZERS = __file__.rpartition("/")[0] + "/", torch.optim.__path__[0]
_DISTRIBUTION = torch.distributions.distribution.__file__
_BELOW_DISTRIBUTIONS = (*_OURS, f"{_TORCH}_dynamo/", f"{_TORCH}_compile.py")


class GraphRecorder(TorchDispatchMode):
    """with recorder: record what runs in this thread as a graph.

    Attributes:
        abstract: whether the program's tensors are on "meta", as are those that stand for sharded
            ones.
        builder: the graph so far.
        draws: the random numbers drawn.
        exchanges: how many times the ranks exchanged Python objects.
        ran_backward: whether a backward pass has run.

    Args:
        fullgraph: whether what a graph cannot repeat is raised.
    """

    def __init__(self, world: World, abstract: bool = False, fullgraph: bool = True) -> None:
        super().__init__()
        self.abstract, self.world = abstract, world
        self.builder, self.draws, self.exchanges = GraphBuilder(fullgraph), Draws(world), 0
        self.ran_backward = False
        self._stand_ins: dict[int, Any] = {}
        self._reads = _RefuseReads(self.builder)

    def __enter__(self) -> GraphRecorder:
        thread_context.recorder = self
        self._reads.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        thread_context.recorder = None
        super().__exit__(*error)
        self._reads.__exit__(*error)

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Record nothing in the block, in which other ranks of a simulated world may run."""
        thread_context.recorder = None
        self.draws.host.pause()
        self.draws.torch.pause(self.builder.graph)
        try:
            with _disable_current_modes():
                yield
        finally:
            self.draws.host.resume()
            self.draws.torch.resume(self.builder.graph)
            thread_context.recorder = self

    def node_of(self, x: Tensor) -> fx.Node | None:
        """Return the node of a tensor; see `GraphRecorder`."""
        return self.builder.node_of(x)

    def note_equal(self, x: Tensor, ranks: Any) -> None:
        """Note on which ranks a tensor is the same; see `GraphRecorder`."""
        self.builder.input_of(x).meta["ranks"] = frozenset(ranks.flatten().tolist())

    def effect(self, function: Callable[..., None], values: Sequence[Any]) -> None:
        """Call a function, and record the call; see `GraphRecorder`."""
        operands = []
        for x in values:
            if isinstance(x, Tensor):
                operands.append(self.builder.input_of(x))
            else:
                operands.append(x.node.node if isinstance(x, TracedFloat) else x)
        self.builder.call(function, operands)
        if not self.abstract:
            with self.hidden():
                function(*[x.node.hint if isinstance(x, TracedFloat) else x for x in values])

    def opaque(
        self,
        function: Callable[..., Tensor],
        inputs: Sequence[Tensor],
        name: str,
        group: Group,
        like: Callable[[], Tensor],
    ) -> Tensor:
        """Call a function, and record the call as one node; see `GraphRecorder`."""
        self.follow_generators()
        with torch._C.DisableTorchFunction():
            result = record_opaque(self, function, inputs, name, group, like)
        self.draws.torch.pass_by(self.builder.graph)
        return result

    def follow_generators(self) -> None:
        """Record that the function has gone back to an earlier state of torch's generators.

        A state that is not known is refused.
        """
        if not self.draws.torch.follow(self.builder.graph):
            self.builder.refuse(seed_error())

    def refuse(self, problem: str, advice: str) -> None:
        """Note that there is no graph, or raise the error; see `GraphRecorder`."""
        self.builder.refuse(at_line(problem, advice))

    # -- operators ---------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        # Modes of functions, such as a type checker's, are not meant.
        with torch._C.DisableTorchFunction():
            return self._operator(func, args, kwargs or {})

    def _operator(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if func.namespace == "profiler":
            return func(*args, **kwargs)
        flat, tree = pytree.tree_flatten((tuple(args), kwargs))
        if self._is_stand_in(flat, kwargs):
            return self._run_on_stand_ins(func, args, kwargs)
        if func is aten._local_scalar_dense.default:
            return self._read(args[0])
        builder = self.builder
        if any(isinstance(x, Tensor) and x.layout is not torch.strided for x in flat):
            builder.refuse(_sparse())
            return func(*args, **kwargs)
        refusal = _dynamic_shape(func, args, kwargs)
        draws = draws_numbers(func, args, kwargs)
        if draws:
            self.follow_generators()
        if refusal is not None:
            builder.refuse(refusal)
        self.ran_backward = self.ran_backward or engine_hooks.current_backward() != -1
        doubles, builder.passed_as_double = builder.passed_as_double, []
        called = self._reads.called
        traced = (
            among(doubles, func, args, kwargs, called[-1] if called else None) if doubles else {}
        )
        operands = [x.node.hint if isinstance(x, torch.SymFloat) else x for x in flat]
        nodes = [self._operand(func, x, traced.get(i)) for i, x in enumerate(flat)]
        is_list_write = func._schema.is_mutable and func.__name__.startswith("_foreach_")
        written = list(args[0]) if is_list_write else []
        versions = [x._version for x in written]
        real_args, real_kwargs = pytree.tree_unflatten(operands, tree)
        result = func(*real_args, **real_kwargs)
        tensors = [x for x in pytree.tree_leaves(result) if isinstance(x, Tensor)]
        if any(x.layout is not torch.strided for x in tensors):
            builder.refuse(_sparse())
            return result
        # Under a mode, torch does not count the writes of operators over lists, on which views and
        # caches of parameters depend.
        torch.autograd.graph.increment_version(
            [x for x, version in zip(written, versions, strict=True) if x._version == version]
        )
        if func in _CONSTANTS:
            builder.constant(result)
        elif func not in _EFFECTLESS:
            is_of_training = func in _LOOKS_AT_GRAD_MODE and torch.is_grad_enabled()
            target = OfTraining(func) if is_of_training else func
            node = builder.call_operator(target, *pytree.tree_unflatten(nodes, tree))
            builder.results(result, node, operands)
        if draws:
            self.draws.torch.pass_by(builder.graph)
        return result

    def _operand(self, func: Any, x: Any, traced: Any) -> Any:
        """Return what stands for an argument of an operator in the graph."""
        if isinstance(x, torch.SymFloat):
            return x.node.node
        if isinstance(x, Tensor):
            return None if func in _CONSTANTS else self.builder.input_of(x)
        return x if traced is None else traced.node

    def _is_stand_in(self, flat: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        """Return whether an operator makes or takes a stand-in on "meta".

        A stand-in is a tensor that stands for a sharded one and has no values.
        """
        tensors = [x for x in flat if isinstance(x, Tensor)]
        if any(isinstance(x, ShardedTensor) for x in tensors):
            return True
        if self.abstract:
            known = tensors and all(x.is_meta and storage_of(x) in self._stand_ins for x in tensors)
            return bool(known) or thread_context.on_stand_ins  # some are older than the recording
        device = kwargs.get("device")
        is_made = device is not None and torch.device(device).type == "meta"
        return is_made or any(x.is_meta for x in tensors)

    def _run_on_stand_ins(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        with _disable_current_modes():
            result = func(*args, **kwargs)
        if self.abstract:  # kept, so that no other storage gets their addresses
            tensors = [x for x in pytree.tree_leaves(result) if isinstance(x, Tensor)]
            self._stand_ins.update({storage_of(x): x.untyped_storage() for x in tensors})
        return result

    def _read(self, x: Tensor) -> Any:
        """Return the value of a tensor with one element, as a number of the graph.

        Libraries get the value itself, which selects the recording in later calls.
        """
        with _disable_current_modes():
            value = math.nan if x.is_meta else x.item()
        if self.builder.refusal is not None:
            return value
        if self._reads.checks_indices or _validates_arguments():
            return value
        frame = _caller(_OURS_HERE)
        if frame.f_code.co_filename in _OPERATORS:  # of a ShardedTensor: who called it
            frame = _caller(*_INNER)
        file = frame.f_code.co_filename
        operand = self.builder.input_of(x)
        if x.dtype.is_floating_point and not file.startswith(_OURS):
            return TracedFloat.of(self.builder, self.builder.call(item, (operand,)), value)
        if not is_installed(file):
            self.builder.refuse(
                value_read(f"a tensor of dtype {str(x.dtype).removeprefix('torch.')}: it")
            )
            return value
        why = ("shardmesh itself reads it",) if file.startswith(_OURS) else ()
        node = self.builder.call(expect, (operand, value, f"{file}:{frame.f_lineno}", *why))
        node.meta["ranks"] = operand.meta.get("ranks", frozenset())
        return value

    # -- random numbers and collectives ------------------------------------------------------------

    def draw(
        self, part: Callable[..., Tensor], seed: int, stream: int, parameters: Sequence[Any]
    ) -> Tensor:
        """Return a random tensor and record that it is drawn; see `GraphRecorder`."""
        builder = self.builder
        operands = [self._operand(None, x, getattr(x, "node", None)) for x in parameters]
        values = [x.node.hint if isinstance(x, torch.SymFloat) else x for x in parameters]
        with self.hidden():
            tensor = part(seed, stream, *values)
            draw = Draw(part, self.draws.position(seed, stream))
            builder.know(tensor, builder.call(draw, operands))
        return tensor

    def collective(self, group: Group, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of a group and record it as operators of `collectives.py`."""
        call = getattr(Group, name)
        if group.size == 1:
            with thread_context.setting(recorder=None):
                return call(group, *args, **kwargs)
        if name == "direct":
            self.builder.refuse(
                at_line(
                    "sm.jit records no symmetric memory",
                    "Set mesh.topology = replace(mesh.topology, symmetric=None)",
                )
            )
            with self.hidden():
                return call(group, *args, **kwargs)
        if name in ("all_gather_object", "barrier"):
            with self.hidden():
                objects = call(group, *args, **kwargs)
            if name == "barrier":
                self.builder.call(barrier, (group_name(group),))
            else:
                exchange = Exchange(group_name(group), args[0], objects, user_call().place)
                self.builder.call(exchange, ())
                self.exchanges += 1
            return objects
        with torch._C.DisableTorchFunction():
            return self._start(group, name, args, kwargs)

    def _start(self, group: Group, name: str, args: Any, kwargs: Any) -> Work | None:
        """Start a collective and record its start; its wait too, unless it is left in flight."""
        call, lineage = user_call(), group.world.comm_context.lineage_on(group.ranks)
        where = group_name(group), site_number(Site(kwargs["tag"], lineage, call.name, call.place))
        if name in ("all_reduce", "broadcast"):
            out, how, async_op = args
            x, parameters, size = out, (how,), out.numel()
        elif name == "permute":
            (out, x), async_op = args, kwargs["async_op"]
            size = 0 if kwargs["src"] is None else out.numel()
            parameters = size, kwargs["dst"], kwargs["src"]
        else:
            out, x, *rest, async_op = args
            parameters = tuple(list(p) if isinstance(p, (list, tuple)) else p for p in rest)
            size = out.numel()
        node = self.builder.call(
            _COLLECTIVES[name], (self.builder.input_of(x), *parameters, *where)
        )
        if name in ("all_reduce", "broadcast"):
            node.meta["donate"] = True
        with self.hidden():
            work = getattr(Group, name)(group, *args, **kwargs)
        node.meta["val"] = (size,), (1,), out.dtype, out.device
        is_received = name != "permute" or kwargs["src"] is not None
        recorded = _RecordedWork(self, work, node, out if is_received else None)
        if async_op:
            return recorded
        recorded.wait()
        return None


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
        builder = self._recorder.builder
        with torch._C.DisableTorchFunction():
            with self._recorder.hidden():
                self._work.wait()
            done = builder.call(WAIT, (self._node,))
            done.meta["val"] = self._node.meta["val"]
            if self._out is not None:
                builder.write(self._out, done)
        return None

    def is_completed(self) -> bool:
        return self._work.is_completed()


# -- what a graph cannot repeat --------------------------------------------------------------------


class _RefuseReads(TorchFunctionMode):
    """Refuse functions of tensors that read memory without an operator.

    Attributes:
        called: the functions that are running, the innermost last.
        checks_indices: whether the innermost one reads values to check that they are in range, as
            the operators that it consists of do as well.
    """

    def __init__(self, builder: GraphBuilder) -> None:
        super().__init__()
        self._builder = builder
        self.called: list[Any] = []
        self.checks_indices = False

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        is_read = func in _READS and thread_context.recorder is not None
        if is_read and (not args[0].is_meta or type(args[0]) is ShardedTensor):
            self._builder.refuse(value_read(name_of(func)))
        self.called.append(func)
        self.checks_indices = func is F.one_hot and _num_classes(args, kwargs or {}) >= 0
        try:
            result = func(*settle_base(func, args), **(kwargs or {}))
        finally:
            self.called.pop()
            self.checks_indices = False
            doubles, self._builder.passed_as_double = self._builder.passed_as_double, []
        settle_doubles(doubles, func)
        return TracedFloat(result.node) if type(result) is torch.SymFloat else result


def _validates_arguments() -> bool:
    """Return whether torch reads a value to validate the arguments of a distribution.

    It does so in recorded calls only, and never in code that `torch.compile` compiles.
    """
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_BELOW_DISTRIBUTIONS):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename == _DISTRIBUTION


def _num_classes(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """Return that of a call of `one_hot`."""
    return args[1] if len(args) > 1 else kwargs.get("num_classes", -1)


def _sparse() -> JitError:
    """Return the error of an operator with a sparse tensor."""
    return at_line(
        "an operator takes or returns a sparse tensor, whose size depends on values",
        "Use dense tensors (sparse=False of an embedding)",
    )


def _dynamic_shape(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> JitError | None:
    """Return an error if the shape of an operator's result depends on values, None otherwise.

    The values are those of its operands.
    """
    if torch.Tag.dynamic_output_shape not in func.tags:
        return None
    name = func.overloadpacket.__name__
    arguments = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
    if name == "index":
        static = not any(
            isinstance(x, Tensor) and x.dtype in (torch.bool, torch.uint8)
            for x in arguments["indices"]
        )
    elif name == "bincount":  # as long as `minlength`, if that is more than all values
        x: Tensor = arguments["self"]
        static = not x.is_meta and int(x.max() if x.numel() else 0) < arguments.get("minlength", 0)
    else:
        static = arguments.get("output_size") is not None  # of repeat_interleave
    if static:
        return None
    return at_line(
        f"the shape of the result of {name} depends on values, and a graph has one shape",
        "Keep the shape: torch.where, a product with the mask, nonzero_static(size=...), "
        "repeat_interleave(output_size=...)",
    )


def _caller(*inner: str) -> FrameType:
    """Return the innermost frame that is in none of these files and folders.

    Frames of torch are left out, too, but for its optimizers.
    """
    frame: Any = sys._getframe(1)
    while (
        (file := frame.f_code.co_filename).startswith((*inner, _TORCH))
        and not file.startswith(_OPTIMIZERS)
        and frame.f_back
    ):
        frame = frame.f_back
    return frame
