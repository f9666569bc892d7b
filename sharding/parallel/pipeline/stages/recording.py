"""A forward on a skeleton, as a list of what happens in it: calls of modules, and operators.

    enter model      enter embed   embedding   exit embed   add   enter layers.0   ...   exit model

Operators name tensors and their memory by numbers, so that what a tensor was computed from can be
followed through views and writes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from .....mesh.comm import call_site
from .....mesh.comm.thread_context import thread_context
from ....ops.block_masks import closed_over
from ....ops.draws import draws_numbers
from ....ops.torch_compile import compiled_code_as_python
from .module_calls import intercept_calls
from .skeleton import as_fake
from .units import Place, places_of
from .values import ValueTree, leaves_of, split_value, tensors_of

_READS_VALUES = (DataDependentOutputException, DynamicOutputShapeException)

# -- what happens ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class TensorMeta:
    """What a stage knows of a tensor before it arrives.

    Attributes:
        shape, dtype, device, requires_grad: those of the tensor.
    """

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool


@dataclass(frozen=True)
class TensorKey:
    """The numbers of a tensor and of its memory, and the tensor's version."""

    tensor: int
    storage: int
    version: int = 0


@dataclass(eq=False)
class Enter:
    """The beginning of a call of a module.

    Attributes:
        path: the first path of the module.
        arguments: for each leaf of the arguments the tensor; None for other leaves.
    """

    path: str
    arguments: list[TensorKey | None]


@dataclass(eq=False)
class Exit:
    """The end of a call.

    Attributes:
        enter: its beginning.
        tree: the result without its tensors; a text, the class, where an object in it is neither a
            tensor nor a constant.
        tensors, metas: the tensors of the result.
    """

    enter: Enter
    tree: ValueTree | str
    tensors: list[TensorKey]
    metas: list[TensorMeta]


@dataclass(eq=False)
class Operator:
    """A call of an operator.

    Attributes:
        name: of the operator.
        inputs, outputs: tensors.
        written: the memory that it writes.
        draws: whether it draws random numbers.
        flops: the count of floating-point operations; 0 unless asked for.
    """

    name: str
    inputs: list[TensorKey]
    outputs: list[TensorKey]
    written: list[int]
    draws: bool
    flops: int


Event = Enter | Exit | Operator


@dataclass(eq=False)
class Recording:
    """A recorded forward.

    Attributes:
        device: that of the arguments.
        events: what happened, in order.
        result: the tensors of the result.
        places: the first place of each parameter and buffer, by the number of the tensor.
        place_storages: their memory.
    """

    device: torch.device
    events: list[Event] = field(default_factory=list)
    result: list[TensorKey] = field(default_factory=list)
    places: dict[int, Place] = field(default_factory=dict)
    place_storages: set[int] = field(default_factory=set)


# -- recording -------------------------------------------------------------------------------------


def record(
    skeleton: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    prepare: Callable[[nn.Module], None],
    is_in_unit: Callable[[str], bool],
    count_flops: bool,
) -> Recording:
    """Run a copy of the skeleton on arguments without values, and record it.

    Args:
        skeleton: the model on "meta".
        args, kwargs: of the forward; their values are not read.
        prepare: changes the copy before it is recorded: modes, dtypes.
        is_in_unit: of the path of a module, whether it is a unit or inside of one. If such a module
            reads values, its result counts as one tensor like its first floating-point argument, as
            that of experts is; the run of a stage checks what the unit then returns.
        count_flops: whether to count floating-point operations.

    Raises:
        RuntimeError: the forward reads a value of a tensor outside of units; the text has the line.
    """
    devices = sorted((x.device for x in tensors_of((args, kwargs))), key=_is_meta)
    device = devices[0] if devices else torch.device("cpu")
    fake_device = torch.device("cpu") if _is_meta(device) else device  # fake ones are on no meta
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fake_args, fake_kwargs = as_fake((args, kwargs), mode, fake_device)
    model = as_fake(skeleton, mode, fake_device)
    prepare(model)
    recorder = Recorder(model, device, is_in_unit, count_flops)
    for module in model.modules():
        intercept_calls(module)
    has_cache = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)  # a cast of one unit would be used in another
    try:
        observed = thread_context.setting(module_calls=recorder)
        with compiled_code_as_python(), mode, recorder, observed:
            result = model(*fake_args, **fake_kwargs)
    except _READS_VALUES as error:
        raise RuntimeError(
            f"{_line_of(error.__traceback__)}: the forward is recorded on shapes alone to split it "
            f"into stages, but this line reads values of a tensor ({error}). Pass the number as an "
            "argument, or choose an implementation whose shapes do not depend on values"
        ) from error
    finally:
        torch.set_autocast_cache_enabled(has_cache)
    recorder.recording.result = [recorder.key(x) for x in tensors_of(result)]
    return recorder.recording


def _is_meta(device: torch.device) -> bool:
    return device.type == "meta"


class Recorder(TorchDispatchMode):
    """Records operators as a mode, and calls of modules as their observer.

    Attributes:
        units_around: how many calls of units, and of modules in them, are running.
        has_grad: whether the forward began with gradients enabled.
    """

    supports_higher_order_operators = True  # flex attention is one

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        is_in_unit: Callable[[str], bool],
        count_flops: bool,
    ) -> None:
        super().__init__()
        self._is_in_unit = is_in_unit
        self.units_around = 0
        self.has_grad = torch.is_grad_enabled()
        self.recording = Recording(device)
        self._paths = {id(module): path for path, module in model.named_modules()}
        self._flop_counts = _flop_counts() if count_flops else {}
        self._alive: dict[int, Tensor] = {}  # so that no number is used twice
        for place, x in places_of(model):
            key = self.key(x)
            self.recording.places.setdefault(key.tensor, place)
            self.recording.place_storages.add(key.storage)

    def key(self, x: Tensor) -> TensorKey:
        self._alive[id(x)] = x
        strided = x.layout is torch.strided
        storage = x.untyped_storage()._cdata if strided else id(x)
        return TensorKey(id(x), storage, x._version if not x.is_inference() else 0)

    def call(
        self,
        module: nn.Module,
        original: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        path = self._paths.get(id(module))
        if path is None:  # made in the forward
            return original(*args, **kwargs)
        leaves = leaves_of((args, kwargs))
        arguments = [x for x in leaves if isinstance(x, Tensor)]
        enter = Enter(path, [self.key(x) if isinstance(x, Tensor) else None for x in leaves])
        self.recording.events.append(enter)
        count = len(self.recording.events)
        is_in_unit = self._is_in_unit(path)
        self.units_around += is_in_unit
        try:
            result = original(*args, **kwargs)
        except _READS_VALUES:
            stand_in = _like_argument(module, arguments) if is_in_unit else None
            if stand_in is None:
                raise
            del self.recording.events[count:]
            result = stand_in
        finally:
            self.units_around -= is_in_unit
        try:
            tensors, tree = split_value(result)
        except TypeError as error:
            tensors, tree = tensors_of(result), str(error)
        metas = [TensorMeta(x.shape, x.dtype, x.device, x.requires_grad) for x in tensors]
        keys = [self.key(x) for x in tensors]
        self.recording.events.append(Exit(enter, tree, keys, metas))
        return result

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = _run(func, args, kwargs)
        inputs = [self.key(x) for x in _tensors((args, kwargs))]
        outputs = [self.key(x) for x in _tensors(result)]
        if isinstance(func, HigherOrderOperator):
            functions = [x for x in pytree.tree_leaves((args, kwargs)) if callable(x)]
            captured = [x for f in functions for x in closed_over(f) if isinstance(x, Tensor)]
            inputs += [self.key(x) for x in captured]
            written, draws, counted = [], False, func
        else:
            written = [self.key(x).storage for x in _written_tensors(func, args, kwargs)]
            draws, counted = draws_numbers(func, args, kwargs), func._overloadpacket
        count = self._flop_counts.get(counted)
        flops = int(count(*args, **kwargs, out_val=result)) if count is not None else 0
        event = Operator(str(func), inputs, outputs, written, draws, flops)
        self.recording.events.append(event)
        return result


def _like_argument(module: nn.Module, arguments: Sequence[Tensor]) -> Tensor | None:
    """Return a tensor like the first floating-point argument; None if there is no such argument.

    It is computed from all arguments and parameters.
    """
    first = next((x for x in arguments if x.is_floating_point()), None)
    if first is None:
        return None
    result = first.clone()
    for x in (*arguments, *module.parameters()):
        result = result + x.reshape(-1)[:0].sum().to(first.dtype)
    return result


def _run(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Call an operator.

    Grouped products are called in bfloat16: torch's rule for their shapes refuses other dtypes,
    which its kernels take.
    """
    dtypes = {x.dtype for x in _tensors((args, kwargs)) if x.is_floating_point()}
    if func is not torch.ops.aten._grouped_mm.default or dtypes == {torch.bfloat16}:
        return func(*args, **kwargs)
    as_bfloat16 = pytree.tree_map_only(
        Tensor, lambda x: x.to(torch.bfloat16) if x.is_floating_point() else x, (args, kwargs)
    )
    return func(*as_bfloat16[0], **as_bfloat16[1]).to(args[0].dtype)


def _tensors(tree: Any) -> list[Tensor]:
    return [x for x in pytree.tree_leaves(tree) if isinstance(x, Tensor)]


def _written_tensors(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    written: list[Tensor] = []
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            written += _tensors(value)
    return written


def _flop_counts() -> dict[Any, Callable[..., int]]:
    from torch.utils.flop_counter import flop_registry  # takes half a second to import

    return flop_registry


def _line_of(trace: TracebackType | None) -> str:
    """Return the innermost line of a traceback that is neither in this library nor in torch."""
    line = "the model's forward"
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if not file.startswith(call_site._INNER):
            line = f"{file}:{trace.tb_lineno}"
        trace = trace.tb_next
    return line
