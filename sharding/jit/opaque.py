"""Functions that run as they are inside of a graph: two nodes, one forward and one backward.

    graph       x, params ──► [ moe ] ──► result            shapes of inputs, results and gradients
                                │ saved                     are fixed
                grads     ◄── [ backward of moe ] ◄── grad

    inside      autograd's nodes, collectives of sizes that depend on values, reads on the host

What autograd saves inside leaves through the graph as any tensor does: a backward program that is
joined to its forward (`joined.py`), and hooks such as those of `torch.utils.checkpoint`, get it
like the tensors that eager code saves. Views of the inputs are saved as their place in the input,
which backward takes from the graph: under `fully_shard` it is gathered again.

A compiler does not look inside, and passes move nothing across the nodes.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, fx
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ...mesh.comm.call_site import DESCRIBERS, user_call
from ...mesh.comm.current_world import current_world
from ...mesh.comm.group import Group
from ...mesh.comm.thread_context import thread_context
from ..autograd import engine_hooks
from ..ops.recomputation import in_present_state
from .collectives import Site, at_site, group_name
from .draws import SEEDED, Draws
from .errors import at_line
from .graph_builder import GraphBuilder, storage_of

_Function = Callable[..., Tensor]


class _InputView(NamedTuple):
    """A saved tensor that is a view of an input, by its place in that."""

    number: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    whole_size: tuple[int, ...]
    whole_stride: tuple[int, ...]

    @classmethod
    def find(cls, x: Tensor, inputs: Sequence[Tensor], numbers: Iterable[int]) -> _InputView | None:
        """Return which of some inputs a tensor is a view of; None if it is of none."""
        start, stop = _extent(x)
        for i in numbers:
            other = inputs[i]
            if storage_of(x) != storage_of(other) or x.dtype is not other.dtype:
                continue
            first, last = _extent(other)
            if first <= start and stop <= last:
                of_whole = tuple(other.shape), other.stride()
                return cls(i, tuple(x.shape), x.stride(), start - first, *of_whole)
        return None

    def of(self, x: Tensor) -> Tensor:
        """Return the view of an input."""
        return x.detach().as_strided(self.size, self.stride, x.storage_offset() + self.offset)

    def whole(self, view: Tensor) -> Tensor | None:
        """Return the input of a view; None if the view is a copy."""
        offset = view.storage_offset() - self.offset
        end = offset + _span(self.whole_size, self.whole_stride)
        is_alike = (tuple(view.shape), view.stride()) == (self.size, self.stride)
        if offset < 0 or not is_alike or end * view.itemsize > view.untyped_storage().nbytes():
            return None
        return view.as_strided(self.whole_size, self.whole_stride, offset)


def _extent(x: Tensor) -> tuple[int, int]:
    """Return the first element of a tensor in its memory, and the end of the last one."""
    start = int(x.storage_offset())
    return start, start + _span(x.shape, x.stride())


def _span(size: Sequence[int], stride: Sequence[int]) -> int:
    """Return how many elements of memory a tensor spans."""
    if not math.prod(size):
        return 0
    return 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))


class _SavedHooks:
    """Save the tensors of a call for autograd and return them again.

    Nodes of autograd refer to the hooks as long as they live, so these hold tensors only while the
    call or its backward runs.

    Args:
        passed: numbers of the inputs that backward gets again.

    Attributes:
        inputs, tensors: those of the call, and what is saved besides views of inputs.
        keep: whether they are needed again after backward.
    """

    def __init__(self, passed: frozenset[int]) -> None:
        self._passed = passed
        self.inputs: Sequence[Any] = ()
        self.tensors: list[Tensor | None] = []
        self.keep = False

    @contextmanager
    def holding(
        self, inputs: Sequence[Tensor | None], tensors: list[Tensor | None]
    ) -> Iterator[None]:
        """Hold these tensors in the block."""
        self.inputs, self.tensors = inputs, tensors
        try:
            yield
        finally:
            self.inputs, self.tensors = (), []

    def pack(self, x: Tensor) -> int | _InputView:
        """Return the place of a tensor that autograd saves."""
        view = _InputView.find(x, self.inputs, self._passed)
        if view is not None:
            return view
        self.tensors.append(x.detach())
        return len(self.tensors) - 1

    def unpack(self, place: int | _InputView) -> Any:
        """Return the tensor at a place."""
        if isinstance(place, _InputView):
            return place.of(self.inputs[place.number])
        x = self.tensors[place]
        if not self.keep:
            self.tensors[place] = None
        return x


class Saved(NamedTuple):
    """What the backward of a call needs besides its inputs.

    Attributes:
        tensors: what autograd has saved, but for views of inputs. Backward empties the list as it
            uses them, unless they are needed again.
        tape: autograd's nodes of the call, without tensors.
    """

    tensors: list[Tensor | None]
    tape: Tape


class Tape:
    """Autograd's nodes of one call of a function.

    Args:
        inputs: the inputs of the call.
        needs_grad: which of them have a gradient.
        passed: numbers of those that backward gets again.

    Attributes:
        leaves: tensors besides the inputs to which a gradient flows.
    """

    def __init__(
        self, inputs: Sequence[Tensor], needs_grad: Sequence[bool], passed: frozenset[int]
    ) -> None:
        self._kinds = [
            (x.shape, x.dtype, x.device) if needs else None
            for x, needs in zip(inputs, needs_grad, strict=True)
        ]
        self._hooks = _SavedHooks(passed)
        self._edge: GradientEdge | None = None
        self._edges: list[GradientEdge] = []
        self.leaves: list[Tensor] = []

    def run(self, function: _Function, inputs: Sequence[Tensor]) -> tuple[Tensor, Saved]:
        """Return the result of the function, without history, and what backward needs."""
        hooks, tensors = self._hooks, list[Tensor | None]()
        root = torch.empty(0, requires_grad=True)
        with torch.enable_grad():
            operands: Any = [
                x if kind is None else _WithHistory.apply(root, x.detach())
                for x, kind in zip(inputs, self._kinds, strict=True)
            ]
        with hooks.holding(inputs, tensors), saved_tensors_hooks(hooks.pack, hooks.unpack):
            result = function(*operands)
        if result.requires_grad:
            self._edge = get_gradient_edge(result)
        self._edges = [
            get_gradient_edge(x)
            for x, kind in zip(operands, self._kinds, strict=True)
            if kind is not None
        ]
        self.leaves = _leaves_of(result, root)
        return result.detach(), Saved(tensors, self)

    def backward(
        self,
        tensors: list[Tensor | None],
        inputs: Sequence[Tensor | None],
        grad: Tensor,
        keep: bool,
        leaves: Sequence[Tensor] = (),
    ) -> list[Tensor | None]:
        """Return the gradients of the inputs, followed by those of some leaves.

        The gradient is zeros where a value has decided that there is none, and None for inputs
        without a gradient.
        """
        count = sum(kind is not None for kind in self._kinds)
        grads: Sequence[Tensor | None] = [None] * (count + len(leaves))
        if self._edge is not None:
            edges = [*self._edges, *map(get_gradient_edge, leaves)]
            self._hooks.keep = keep
            with self._hooks.holding(inputs, tensors):
                grads = torch.autograd.grad(
                    [self._edge], edges, [grad], retain_graph=keep, allow_unused=True
                )
        of_inputs = iter(grads)
        result: list[Tensor | None] = []
        for kind in self._kinds:
            if kind is None:
                result.append(None)
                continue
            shape, dtype, device = kind
            g = next(of_inputs)
            result.append(torch.zeros(shape, dtype=dtype, device=device) if g is None else g)
        return [*result, *of_inputs]


class _WithHistory(torch.autograd.Function):
    """Give a tensor a history that does not hold it, unlike that of a leaf."""

    @staticmethod
    def forward(ctx: Any, root: Tensor, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise AssertionError("gradients of inputs are taken before this node")


def _leaves_of(result: Tensor, root: Tensor) -> list[Tensor]:
    """Return the tensors besides the inputs to which a gradient flows."""
    leaves: list[Tensor] = []
    todo = [result.grad_fn]
    seen = set(todo)
    while todo:
        node = todo.pop()
        for other, _ in node.next_functions if node is not None else ():
            if other is None or other in seen:
                continue
            seen.add(other)
            leaf = getattr(other, "variable", None)
            if leaf is not None and leaf is not root:
                leaves.append(leaf)
            todo.append(other)
    return leaves


# -- nodes -----------------------------------------------------------------------------------------


class OpaqueFunction:
    """A function of plain tensors with one result.

    Args:
        function: the function. It runs in the state, and under the autocast, of now.
        name: of it, for people.
        needs_grad: which inputs have a gradient; all False for a function without backward.
        group: the group of the ranks that run it together.

    Attributes:
        passed: numbers of the inputs that backward gets again: those of which autograd has saved
            views in the recorded call, in which it gets none.
    """

    def __init__(
        self, function: _Function, name: str, needs_grad: Sequence[bool], group: Group
    ) -> None:
        self.name, self.needs_grad, self.group = name, list(needs_grad), group_name(group)
        self.passed: frozenset[int] = frozenset()
        self._function = in_present_state(function)
        devices = ("cpu", "cuda") if torch.cuda.is_initialized() else ("cpu",)
        self._autocast = [
            (device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device))
            for device in devices
        ]

    def run(self, inputs: Sequence[Tensor]) -> tuple[Tensor, Saved | None]:
        """Return the result, and what backward needs; None where no input has a gradient."""
        if any(self.needs_grad):
            tape = Tape(inputs, self.needs_grad, self.passed)
            return tape.run(self.with_history, inputs)
        with self._state(), torch.no_grad():
            return self._function(*inputs), None

    def with_history(self, *inputs: Tensor) -> Tensor:
        """Return the result with autograd's own history."""
        with self._state(), torch.enable_grad():
            return self._function(*inputs)

    @contextmanager
    def _state(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(thread_context.setting(runs_opaque=True))
            for device, dtype, enabled in self._autocast:
                stack.enter_context(torch.autocast(device, dtype, enabled, cache_enabled=False))
            yield


class OpaqueNode:
    """The target of a node.

    Attributes:
        site: what the collectives inside are part of.
    """

    def __init__(self, function: OpaqueFunction, site: Site) -> None:
        self.function, self.site = function, site
        self.group = function.group
        self.__name__ = self.__qualname__ = function.name

    def at(self, site: Site) -> OpaqueNode:
        """Return the same at another site."""
        return type(self)(self.function, site)

    def __repr__(self) -> str:
        return self.__name__


class Forward(OpaqueNode):
    """Calls a function: the target of a node whose value is a result and a `Saved`."""

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, Saved | None]:
        with at_site(current_world(), self.site):
            return self.function.run(inputs)


class Backward(OpaqueNode):
    """Computes the gradients of inputs: the target of a node whose value is a list."""

    def __init__(self, function: OpaqueFunction, site: Site) -> None:
        super().__init__(function, site)
        self.__name__ = self.__qualname__ = f"backward_of_{function.name}"

    def __call__(
        self, saved: Saved, grad: Tensor, keep: bool, *inputs: Tensor | None
    ) -> list[Tensor | None]:
        """Return the gradients.

        Args:
            keep: whether what is saved is needed again; outside of a backward pass, which knows.
            inputs: those of forward; None for one that is not passed.
        """
        keep = engine_hooks.keeps_graph() if engine_hooks.current_backward() != -1 else keep
        with at_site(current_world(), self.site):
            return saved.tape.backward(saved.tensors, inputs, grad, keep)


for _call in (Forward.__call__, Backward.__call__):
    DESCRIBERS[_call.__code__] = lambda frame: frame["self"].site.name


# -- recording -------------------------------------------------------------------------------------


class Recorder(Protocol):
    """What records: see `recorder.py`."""

    abstract: bool
    builder: GraphBuilder
    draws: Draws
    ran_backward: bool

    def hidden(self) -> AbstractContextManager[None]:
        """Record nothing in the block."""
        ...

    def refuse(self, problem: str, advice: str) -> None:
        """Note that there is no graph, or raise the error."""


def record_opaque(
    recorder: Recorder,
    function: _Function,
    inputs: Sequence[Tensor],
    name: str,
    group: Group,
    like: Callable[[], Tensor],
) -> Tensor:
    """Call a function, and record the call as one node; its backward as another.

    Args:
        like: returns an empty tensor like the result, without communication.
    """
    builder = recorder.builder
    if engine_hooks.transforming() or thread_context.grad_is_nested:
        recorder.refuse(
            f"{name} inside of a transform runs one operator after the other, whose sizes depend "
            "on values",
            "Call it outside of sm.jit",
        )
        return function(*inputs)
    has_history = torch.is_grad_enabled()
    needs_grad = [has_history and x.requires_grad for x in inputs]
    opaque = OpaqueFunction(function, name, needs_grad, group)
    forward = Forward(opaque, _present_site())
    node = builder.call(forward, [builder.input_of(x) for x in inputs])
    node.meta["type"] = "(result, saved)"
    before = recorder.draws.end()
    watch = _Watch(recorder, inputs)
    with recorder.hidden():
        if recorder.abstract:
            result, saved = like(), None
        else:
            with watch:
                result, saved = forward(*[x.detach() for x in inputs])
    if builder.passed_as_double or recorder.draws.end() != before:
        builder.passed_as_double = []
        watch.problem = watch.problem or "numbers that the graph computes"
    if watch.problem is not None:
        recorder.refuse(
            f"{name} runs as one operator in a graph, and uses {watch.problem} besides its inputs",
            "Pass tensors as inputs (for experts: in params), and numbers as static arguments",
        )
    builder.know(result, builder.call(operator.getitem, (node, 0)))
    leaves = [] if saved is None else saved.tape.leaves
    if leaves:
        recorder.refuse(
            f"{name} runs as one operator in a graph, and a gradient flows to tensors that are no "
            f"inputs of it, of shapes {[list(x.shape) for x in leaves]}",
            "Pass them as inputs (for experts: in params)",
        )
    if not any(needs_grad):
        return result
    saved_node = builder.call(operator.getitem, (node, 1))
    saved_node.meta["type"] = "saved"
    call = _RecordedCall(recorder, opaque, saved, saved_node, leaves, [], None)
    if saved is not None:
        numbers = [i for i, needs in enumerate(needs_grad) if needs]
        views = [_InputView.find(x, inputs, numbers) for x in saved.tensors if x is not None]
        opaque.passed = frozenset(view.number for view in views if view is not None)
        is_own = [x is not None and storage_of(x) in watch.allocated for x in saved.tensors]
        call = call._replace(views=views, token=is_own.index(True) if any(is_own) else None)
        if call.token is not None:
            builder.know(saved.tensors[call.token], saved_node)  # type: ignore[arg-type]
            del saved_node.meta["val"]
    return _Recorded.apply(call, [result], *inputs, *leaves)  # type: ignore[return-value]


def _present_site() -> Site:
    call = user_call()
    return Site(None, current_world().comm_context.lineage, call.name, call.place)


class _Watch(TorchDispatchMode):
    """Note the first use of a tensor or number that belongs to one call of the recorded function.

    A later call would use it again.

    Attributes:
        problem: what it is.
        allocated: the memory that the function has allocated.
    """

    def __init__(self, recorder: Recorder, inputs: Sequence[Tensor]) -> None:
        super().__init__()
        self._recorder = recorder
        self._inside = {storage_of(x) for x in inputs}
        self.allocated: set[int] = set()
        self.problem: str | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        flat, tree = pytree.tree_flatten((tuple(args), kwargs or {}))
        if self.problem is None:
            self.problem = self._problem(func, flat)
        values = [x.node.hint if isinstance(x, torch.SymFloat) else x for x in flat]
        args, kwargs = pytree.tree_unflatten(values, tree)
        result = func(*args, **kwargs)
        results = {storage_of(x) for x in pytree.tree_leaves(result) if isinstance(x, Tensor)}
        self._inside |= results
        self.allocated |= results.difference(storage_of(x) for x in values if isinstance(x, Tensor))
        return result

    def _problem(self, func: Any, operands: Sequence[Any]) -> str | None:
        if torch.Tag.nondeterministic_seeded in func.tags and self._recorder.draws.was_seeded():
            return SEEDED
        for x in operands:
            if isinstance(x, torch.SymFloat):
                return "numbers that the graph computes"
            if not isinstance(x, Tensor) or storage_of(x) in self._inside:
                continue
            builder = self._recorder.builder
            node = builder.node_of(x)
            by_reference = node is None or node.op == "placeholder"
            if not by_reference or node in builder.arguments:
                return f"a tensor of shape {list(x.shape)} that the function computes or takes"
        return None


class _RecordedCall(NamedTuple):
    """The call that is recorded.

    Attributes:
        saved: what its backward needs; None on "meta".
        node: that of `saved`.
        leaves: tensors besides the inputs that have a gradient, which no graph computes.
        views: for each tensor that is saved, of which input it is a view.
        token: the number of a tensor that is saved and stands for all: a recomputation of the
            forward is recorded, too, and puts another in its place. None if all are views.
    """

    recorder: Recorder
    function: OpaqueFunction
    saved: Saved | None
    node: fx.Node
    leaves: list[Tensor]
    views: list[_InputView | None]
    token: int | None


class _Recorded(torch.autograd.Function):
    """The node of a recorded call.

    It saves what autograd has saved inside, one by one, as `torch.utils.checkpoint` compares their
    number with that of a call that is not recorded. Its backward is recorded if that runs inside of
    the recording.
    """

    @staticmethod
    def forward(ctx: Any, call: _RecordedCall, results: list[Tensor], *inputs: Tensor) -> Any:
        if call.saved is not None:
            tensors, tape = call.saved
            saved = [
                x if view is None else view.of(inputs[view.number])  # seen by the recorder
                for x, view in zip(tensors, call.views, strict=True)
            ]
            ctx.save_for_backward(*saved)
            call = call._replace(saved=Saved([], tape))
        else:
            needs_grad = zip(inputs, call.function.needs_grad, strict=True)
            ctx.save_for_backward(*[x for x, needs in needs_grad if needs])
        ctx.call = call
        return results.pop()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        call: _RecordedCall = ctx.call
        if torch.is_grad_enabled():
            raise at_line(
                f"{call.function.name} runs as one operator in a graph, and its gradient has no "
                "derivative there (create_graph=True)",
                "Call it outside of sm.jit",
            )
        grad = engine_hooks.with_memory(grads[0])
        saved = list(ctx.saved_tensors)
        if thread_context.recorder is call.recorder:
            return (None, None, *_record_backward(call, saved, grad))
        return (None, None, *_run_backward(call, saved, grad, _present_site()))


def _run_backward(
    call: _RecordedCall, saved: list[Any], grad: Tensor, site: Site
) -> list[Tensor | None]:
    if call.saved is None:  # on "meta"
        of_needed = map(torch.empty_like, saved)
        return [next(of_needed) if needs else None for needs in call.function.needs_grad]
    keep = engine_hooks.keeps_graph() or bool(call.leaves)
    with at_site(current_world(), site):
        return call.saved.tape.backward(saved, (), grad, keep, call.leaves)


def _record_backward(call: _RecordedCall, saved: list[Any], grad: Tensor) -> list[Tensor | None]:
    recorder, builder = call.recorder, call.recorder.builder
    recorder.ran_backward = True
    backward = Backward(call.function, _present_site())
    nodes = [None if x is None else builder.input_of(x) for x in _inputs_of_saved(call, saved)]
    node_of_saved = _node_of_saved(call, saved)
    keep = engine_hooks.keeps_graph()
    node = builder.call(backward, (node_of_saved, builder.input_of(grad), keep, *nodes))
    node.meta["type"] = "list"
    with recorder.hidden():
        gradients = _run_backward(call, saved, grad, backward.site)
    for i, g in enumerate(gradients[: len(nodes)]):
        if g is not None:
            builder.know(g, builder.call(operator.getitem, (node, i)))
    return gradients


def _inputs_of_saved(call: _RecordedCall, saved: Sequence[Tensor]) -> list[Tensor | None]:
    """Return the inputs of which tensors that are saved are views, None for the others."""
    inputs: list[Tensor | None] = [None] * len(call.function.needs_grad)
    if call.saved is None:  # on "meta"
        of_needed = iter(saved)
        return [next(of_needed) if needs else None for needs in call.function.needs_grad]
    for x, view in zip(saved, call.views, strict=True):
        if view is not None and inputs[view.number] is None:
            inputs[view.number] = view.whole(x)
            if inputs[view.number] is None:
                call.recorder.refuse(*_problem_of_copies(call.function.name))
    return inputs


def _node_of_saved(call: _RecordedCall, saved: Sequence[Tensor]) -> fx.Node:
    """Return the node of what is saved, of the call or of its recomputation."""
    if call.token is None:
        return call.node
    node = call.recorder.builder.node_of(saved[call.token])
    if node is not None and node.meta.get("type") == "saved":
        return node
    call.recorder.refuse(*_problem_of_copies(call.function.name))
    return call.node


def _problem_of_copies(name: str) -> tuple[str, str]:
    """Return the problem of a hook that copies what is saved, and what to do."""
    return (
        f"a hook for saved tensors copies what {name} saves, and in a graph that is one operator",
        "Leave it out of the hook",
    )
