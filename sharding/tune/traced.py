"""A model's forward pass as a list of events: operators on its weights, and calls of its layers.

    Enter("layers.0.up")     value 7 -> 8        the layer sees its input as a value of its own,
    Call(linear, 8, w) -> 9                      which a style may redistribute
    Exit("layers.0.up")      value 9 -> 10       and the rest of the model sees its output likewise

Recorded are operators on what depends on a parameter. Everything else (ids, positions, masks) is a
constant, the same on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..trees import map_tensors, tensors_in
from .description import Loss, call


@dataclass(frozen=True)
class Ref:
    """A value of a trace as an argument of an operator."""

    value: int


@dataclass(frozen=True)
class Value:
    """A tensor of a trace.

    Attributes:
        shape, dtype: of the whole tensor.
        needs_grad: whether backward computes its gradient.
        parameter: the path of the parameter that it is, else None.
    """

    shape: torch.Size
    dtype: torch.dtype
    needs_grad: bool
    parameter: str | None = None


@dataclass(frozen=True)
class Call:
    """An operator.

    Attributes:
        func: what was called.
        args, kwargs: its arguments, with a `Ref` for each tensor.
        operands: the values among them, each once.
        results: the values that it returned.
        path: of the module that called it.
    """

    func: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    operands: tuple[int, ...]
    results: tuple[int, ...]
    path: str


@dataclass(frozen=True)
class Enter:
    """The call of a layer: its first input outside, and inside."""

    path: str
    outer: int
    inner: int


@dataclass(frozen=True)
class Exit:
    """The end of the call of a layer: its outputs inside, and outside."""

    path: str
    inner: tuple[int, ...]
    outer: tuple[int, ...]


@dataclass(frozen=True)
class Begin:
    """The call of a block: its first input, and a value of its own that has the same layout."""

    stream: int
    mark: int


@dataclass(frozen=True)
class End:
    """The end of the call of a block: its first output, and the value of its `Begin`.

    As blocks repeat, both have one layout.
    """

    stream: int
    mark: int


Event = Call | Enter | Exit | Begin | End


@dataclass(frozen=True)
class Trace:
    """The events of a forward pass and a loss, in order.

    Attributes:
        events: the events.
        values: the values, by number.
        last_use: of each value, the index of the last event that reads it.
    """

    events: tuple[Event, ...]
    values: tuple[Value, ...]
    last_use: Mapping[int, int]


def trace(
    model: nn.Module,
    batch: Any,
    loss: Loss,
    is_layer: Callable[[nn.Module], bool],
    blocks: Collection[nn.Module] = (),
) -> Trace:
    """Run a model on "meta", with its loss, and return what it did.

    Args:
        model, batch: on "meta".
        loss: a function of output and batch.
        is_layer: the modules whose calls are events.
        blocks: modules that repeat in the model.

    Raises:
        ValueError: the model reads values.
    """
    recorder = _Recorder(model)
    handles: list[Any] = []
    for path, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(recorder.enter_module(path), prepend=True))
        if is_layer(module):
            enter, leave = recorder.layer_hooks(path)
            handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
            handles.append(module.register_forward_hook(leave))
        if any(module is block for block in blocks):
            begin, end = recorder.block_hooks()
            handles.append(module.register_forward_pre_hook(begin, with_kwargs=True))
            handles.append(module.register_forward_hook(end))
        handles.append(module.register_forward_hook(recorder.leave_module, always_call=True))
    try:
        with torch.no_grad(), recorder:
            loss(call(model, batch), batch)
    except (RuntimeError, NotImplementedError) as error:
        raise ValueError(
            f"propose_plan: {type(model).__name__} cannot run without values, which tracing "
            f"needs: {error}"
        ) from error
    finally:
        for handle in handles:
            handle.remove()
    return recorder.finish()


class _Recorder(TorchFunctionMode):
    """Records operators on what depends on parameters; conditions on tensors count as true."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._events: list[Event] = []
        self._values: list[Value] = []
        self._numbers: dict[int, int] = {}  # id of a tensor -> its value
        self._alive: list[Tensor] = []  # so that no id is used twice
        self._paths: list[str] = [""]
        self._outer: list[tuple[Tensor, int]] = []
        for path, parameter in model.named_parameters():
            self._number(parameter, parameter.requires_grad, path)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.__bool__ and args[0].is_meta:
            return True
        result = func(*args, **kwargs)
        inputs = list(tensors_in((args, kwargs)))
        if not any(id(x) in self._numbers for x in inputs):
            return result
        results = list(tensors_in((result,)))
        if func is Tensor.__setitem__:
            func, results = set_item, [args[0]]
        if not results:
            return result
        operands = tuple(dict.fromkeys(self._operand(x) for x in inputs))
        needs_grad = any(self._values[operand].needs_grad for operand in operands)
        converted, named = map_tensors(lambda x: Ref(self._numbers[id(x)]), (args, kwargs))
        numbers = tuple(self._number(x, needs_grad and x.dtype.is_floating_point) for x in results)
        self._events.append(Call(func, tuple(converted), named, operands, numbers, self._paths[-1]))
        return result

    def finish(self) -> Trace:
        """Return the trace."""
        last_use: dict[int, int] = {}
        for index, event in enumerate(self._events):
            for value in _read(event):
                last_use[value] = index
        return Trace(tuple(self._events), tuple(self._values), last_use)

    def enter_module(self, path: str) -> Callable[..., None]:
        """Return a hook that notes which module is running."""

        def enter(module: nn.Module, args: Any) -> None:
            self._paths.append(path)

        return enter

    def leave_module(self, module: nn.Module, args: Any, output: Any) -> None:
        """End the call of a module."""
        self._paths.pop()

    def layer_hooks(self, path: str) -> tuple[Callable[..., None], Callable[..., None]]:
        """Return hooks that give the input and the outputs of a layer values of their own."""

        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            first = next(iter(tensors_in((args, kwargs))), None)
            if first is None:
                raise ValueError(f"propose_plan: {path!r} was called without a tensor")
            outer = self._operand(first)
            value = self._values[outer]
            inner = self._number(first, value.needs_grad)
            self._outer.append((first, outer))
            self._events.append(Enter(path, outer, inner))

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            first, outer = self._outer.pop()
            results = list(tensors_in((output,)))
            inside = tuple(self._operand(x) for x in results)
            self._numbers[id(first)] = outer
            outside = tuple(
                self._number(x, self._values[value].needs_grad)
                for x, value in zip(results, inside, strict=True)
            )
            self._events.append(Exit(path, inside, outside))

        return enter, leave

    def block_hooks(self) -> tuple[Callable[..., None], Callable[..., None]]:
        """Return hooks that note the first input and the first output of a block."""
        marks: list[int | None] = []

        def begin(module: nn.Module, args: Any, kwargs: Any) -> None:
            first = next(iter(tensors_in((args, kwargs))), None)
            marks.append(None)
            if first is not None and id(first) in self._numbers:
                stream = self._numbers[id(first)]
                value = self._values[stream]
                self._values.append(value)
                marks[-1] = len(self._values) - 1
                self._events.append(Begin(stream, marks[-1]))

        def end(module: nn.Module, args: Any, output: Any) -> None:
            mark = marks.pop()
            first = next(iter(tensors_in((output,))), None)
            if mark is None or first is None or id(first) not in self._numbers:
                return
            if first.shape == self._values[mark].shape:
                self._events.append(End(self._numbers[id(first)], mark))

        return begin, end

    def _operand(self, x: Tensor) -> int:
        """Return the value of a tensor, a new constant for one that is not known."""
        number = self._numbers.get(id(x))
        return self._number(x, False) if number is None else number

    def _number(self, x: Tensor, needs_grad: bool, parameter: str | None = None) -> int:
        """Give a tensor a new value."""
        self._alive.append(x)
        self._numbers[id(x)] = len(self._values)
        self._values.append(Value(x.shape, x.dtype, needs_grad, parameter))
        return len(self._values) - 1


def set_item(x: Any, index: Any, value: Any) -> Any:
    """Assign at an index, and return the tensor."""
    x[index] = value
    return x


def _read(event: Event) -> Iterable[int]:
    if isinstance(event, Call):
        return event.operands
    if isinstance(event, Begin):
        return (event.stream,)
    if isinstance(event, End):
        return (event.stream, event.mark)
    return (event.outer,) if isinstance(event, Enter) else event.inner
