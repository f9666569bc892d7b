"""`SplitBackward`: a backward in two parts, I for a stage's inputs and W for its weights.

    F   with split.recording():     linear -> norm -> linear       operators with weights are marked
            y = stage(x)
    I   split.backward_input(       grad_x <- linear <- norm <- linear      x.grad is complete
            [y], [grad_y])                    |                 |
                                       input and gradient    input and gradient     are kept
    W   split.backward_weight()     grad_weight                grad_weight       in `.grad`

I is one backward of torch. Its operators add what W needs to a list, so nothing is computed twice
and recomputation (`torch.utils.checkpoint`) runs once, in I. W is one backward too, from the
weights on: hooks of parameters, `fully_shard` units and reductions see the whole gradient of a
microbatch in W, as they see it in a backward that is not split. Results have the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.overrides import TorchFunctionMode

from ....mesh.comm.thread_context import thread_context
from ...autograd import engine_hooks
from ...tensor.autograd.backward import backward_inside
from ...tensor.convert import autocast_dtype
from ...tensor.sharded_tensor import ShardedTensor
from ...trees import map_tensors, tensors_in
from .deferral.operands import OPERANDS, Operands
from .deferral.operators import Phase, defer, use
from .deferral.weights import Weights

State = Literal["forward", "input", "weight", "done", "failed"]


class SplitBackward:
    """SplitBackward(): the backward of one stage for one microbatch, in two parts.

    Deferred are the weight gradients of `linear`, of matrix products with a weight (`matmul`, `mm`,
    `addmm`, `bmm`, `@`), of `grouped_mm` and of `embedding`, on plain tensors and on the local
    parts of ShardedTensors. A weight is a parameter, or a view, copy, cast, redistribution or
    gather of one. Other operators, such as norms, convolutions and attention, compute the gradients
    of their parameters in `backward_input`; they too are added to `.grad` in `backward_weight`.
    What torch does not show to operator modes (functions of `torch.compile` and `sm.jit`, and
    parameters that are passed to an `autograd.Function`) has its whole backward in
    `backward_input`.

    `.grad` has the bits that one whole backward gives, but for a weight that is used in several
    reentrant checkpoints, or both in and outside of what torch does not show: there the sum has
    another order, and hooks of the weight run in both parts.

    Example:
        >>> split = SplitBackward()
        >>> with split.recording():
        ...     y = stage(x)
        >>> split.backward_input([y], [grad_y])
        >>> send(x.grad)
        >>> split.backward_weight()
    """

    def __init__(self) -> None:
        self._weights, self._phase = Weights(), Phase()
        self._state: State = "forward"

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Run the stage's forward in this block; it may be entered several times.

        Gradients of what runs in it are computed by `backward_input` only.

        Raises:
            RuntimeError: after `backward_input`.
        """
        self._expect("forward", "recording()")
        try:
            with (
                thread_context.setting(weights=self._weights),
                _MarkWeights(self._weights, self._phase, caches_casts=True),
            ):
                yield
        except BaseException:
            self._end("failed")
            raise

    def backward_input(
        self, outputs: Sequence[Tensor | GradientEdge], grads: Sequence[Tensor | None]
    ) -> None:
        """Run `torch.autograd.backward(outputs, grads)` without the deferred weight gradients.

        Gradients of the stage's inputs are complete afterwards, those of parameters come with
        `backward_weight`.

        Raises:
            RuntimeError: it was called before, or the forward failed.

        Communication: that of backward, without what follows the gradients of weights.
        """
        self._expect("forward", "backward_input()")
        self._state = "input"
        self._phase.is_input = True
        recomputing = (
            _MarkWeights(self._weights, self._phase, caches_casts=False)
            if self._phase.may_recompute
            else nullcontext()
        )
        try:
            with recomputing:
                torch.autograd.backward(outputs, grads)  # type: ignore[arg-type]
        except BaseException:
            self._end("failed")
            raise
        finally:
            self._phase.is_input = False
        self._weights.drop_unused()

    def backward_weight(self) -> None:
        """Compute the deferred gradients and add them to `.grad`, as backward would have.

        Raises:
            RuntimeError: before `backward_input`, a second time, or after a failure.

        Communication: that of the weights' part of backward: reductions of `fully_shard` units and
        of replicated parameters.
        """
        self._expect("input", "backward_weight()")
        self._state = "weight"
        roots = self._weights.take_roots()
        try:
            if roots:
                _run_backward(roots)
        except BaseException:
            self._end("failed")
            raise
        self._end("done")

    def _expect(self, state: State, call: str) -> None:
        if self._state == state:
            return
        problem = {
            "forward": "backward_input() has not been called",
            "input": "backward_input() has been called",
            "weight": "backward_weight() is running",
            "done": "backward_weight() has been called",
            "failed": "an earlier part has failed",
        }[self._state]
        raise RuntimeError(
            f"SplitBackward.{call}: {problem}. The order is recording(), backward_input(), "
            "backward_weight(), once for each microbatch"
        )

    def _end(self, state: State) -> None:
        self._state, self._weights = state, Weights()


def _run_backward(roots: Sequence[Tensor]) -> None:
    """Run `torch.autograd.backward` from many empty gradients, without comparing their shapes."""
    grads = tuple([root.detach() for root in roots])
    run = getattr(torch.autograd.graph, "_engine_run_backward", None)
    if run is None:
        torch.autograd.backward(roots, grads)
    else:
        run(tuple(roots), grads, False, False, (), allow_unreachable=True, accumulate_grad=True)


# -- marking operators -----------------------------------------------------------------------------

_CONVERSIONS = frozenset(  # of a weight to a weight
    {
        "bfloat16",
        "chunk",
        "contiguous",
        "cpu",
        "cuda",
        "double",
        "expand",
        "expand_as",
        "flatten",
        "float",
        "half",
        "movedim",
        "narrow",
        "permute",
        "reshape",
        "select",
        "split",
        "split_with_sizes",
        "squeeze",
        "swapaxes",
        "swapdims",
        "t",
        "to",
        "transpose",
        "type",
        "type_as",
        "unbind",
        "unflatten",
        "unsqueeze",
        "view",
        "view_as",
    }
)
_AUTOCAST_OPERATORS = frozenset(  # their operands are cast on every device
    {
        "addbmm",
        "addmm",
        "baddbmm",
        "bmm",
        "conv1d",
        "conv2d",
        "conv3d",
        "conv_transpose1d",
        "conv_transpose2d",
        "conv_transpose3d",
        "linear",
        "matmul",
        "mm",
    }
)
_NOT_OPERATORS = frozenset(  # what they return does not depend on the values of a weight
    {
        "__get__",
        "__set__",
        "__delete__",
        "__hash__",
        "__len__",
        "data_ptr",
        "detach",
        "dim",
        "element_size",
        "is_complex",
        "is_contiguous",
        "is_floating_point",
        "numel",
        "register_hook",
        "register_post_accumulate_grad_hook",
        "requires_grad_",
        "retain_grad",
        "share_memory_",
        "size",
        "storage_offset",
        "stride",
        "untyped_storage",
    }
)


class _MarkWeights(TorchFunctionMode):
    """Runs operators so that they add their parts of weights' gradients to those in `weights`.

    A function of torch's that is written in Python, such as `F.multi_head_attention_forward`, is
    one operator here, as for every mode.
    """

    def __init__(self, weights: Weights, phase: Phase, *, caches_casts: bool) -> None:
        super().__init__()
        self._weights, self._phase, self._caches_casts = weights, phase, caches_casts
        self._casts: dict[int, tuple[Tensor, Tensor]] = {}  # leaves by id, and what autocast makes

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():
            return func(*args, **kwargs)
        operands = (*args, *kwargs.values()) if kwargs else args
        if not types and not self._may_have_weight(operands):  # most calls
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name in _NOT_OPERATORS:
            return func(*args, **kwargs)
        for kind in types:
            if issubclass(kind, ShardedTensor):
                return self._run_sharded(kind, func, types, args, kwargs)
        if func is torch.autograd.backward:
            run = partial(backward_inside, self) if torch.is_grad_enabled() else func
            return run(*args, **kwargs)
        weights = self._weights_in(operands)
        if not weights:
            return func(*args, **kwargs)
        if not torch.is_grad_enabled():  # as in the forward of a reentrant checkpoint
            self._phase.may_recompute = True
            return func(*args, **kwargs)
        if thread_context.in_joined_function or thread_context.recorder is not None:
            return func(*args, **kwargs)
        if engine_hooks.saved_tensor_hooks() is not None:
            self._phase.may_recompute = True
        if engine_hooks.transforming():
            return func(*args, **kwargs)
        if name in _AUTOCAST_OPERATORS and autocast_dtype(weights[0].device) is not None:
            args = map_tensors(self._cast, args)
            kwargs = dict(zip(kwargs, map_tensors(self._cast, kwargs.values()), strict=True))
            weights = self._weights_in((*args, *kwargs.values()))

        numbers = {id(weight) for weight in weights}

        def is_weight(x: Any) -> bool:
            return id(x) in numbers

        of_operator = OPERANDS.get(func)
        call = None if of_operator is None else of_operator(is_weight, *args, **kwargs)
        if call is not None and self._can_defer(call):
            return self._defer(call, is_weight(call.x))
        if args and weights[0] is args[0] and _is_conversion(name, args):
            return func(*args, **kwargs)
        written = args[0] if args and _writes_first(name) else None
        # Autograd adds gradients in the order of the operands, and runs the last node first.
        uses = [use(self._weights, self._phase, x) for x in reversed(weights) if x is not written]

        def next_use(x: Tensor) -> Tensor:
            return uses.pop() if x is not written and is_weight(x) else x

        args = [_map_operand(next_use, x) for x in args]
        kwargs = {key: _map_operand(next_use, x) for key, x in kwargs.items()}
        return func(*args, **kwargs)

    def _run_sharded(
        self, kind: Any, func: Any, types: Any, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        """Run an operator on ShardedTensors; those on their local parts are marked."""
        if not torch.is_grad_enabled():
            self._phase.may_recompute = True
            return func(*args, **kwargs)
        self._weights.add_sharded(tensors_in((*args, *kwargs.values())))
        with self:
            return kind.__torch_function__(func, types, args, kwargs)

    def _may_have_weight(self, operands: Iterable[Any]) -> bool:
        """Return False if there is no weight among these operands; True may be wrong."""
        for x in operands:
            kind = type(x)
            if kind is Tensor:
                if x.requires_grad and self._weights.is_weight(x):
                    return True
            elif kind is list or kind is tuple:
                if self._may_have_weight(x):
                    return True
            elif kind not in _CONSTANTS:
                return True
        return False

    def _weights_in(self, operands: Iterable[Any]) -> list[Tensor]:
        """Return the weights among the operands of a call, also those in lists and the like."""
        weights: list[Tensor] = []
        for x in operands:
            kind = type(x)
            if kind is nn.Parameter:
                if x.requires_grad and (x.is_leaf or self._weights.is_weight(x)):
                    weights.append(x)
            elif kind is Tensor:
                if x.requires_grad and self._weights.is_weight(x):
                    weights.append(x)
            elif isinstance(x, (list, tuple)):
                weights += self._weights_in(x)
            elif isinstance(x, dict):
                weights += self._weights_in(x.values())
        return weights

    def _can_defer(self, call: Operands) -> bool:
        if type(call.x) not in _PLAIN or type(call.weight) not in _PLAIN:
            return False
        if call.bias is not None and type(call.bias) not in _PLAIN:
            return False
        if not call.weight.is_floating_point():
            return False
        return call.autocast or autocast_dtype(call.weight.device) is None

    def _defer(self, call: Operands, is_input_a_weight: bool) -> Tensor:
        x, weight, bias = call.x, call.weight, call.bias
        grad = self._weights.add_use(weight)  # before that of the input, as in `__torch_function__`
        if is_input_a_weight:
            x = use(self._weights, self._phase, x)
        return defer(call.operator, self._weights, self._phase, x, weight, grad, bias)

    def _cast(self, x: Tensor) -> Tensor:
        """Return an operand as autocast does; a leaf is cast once in a forward."""
        dtype = autocast_dtype(x.device)
        if dtype is None:
            return x
        if not x.is_floating_point() or x.dtype in (torch.float64, dtype):
            return x
        is_cached = (
            self._caches_casts
            and torch.is_autocast_cache_enabled()
            and x.is_leaf
            and x.requires_grad
            and x.dtype is torch.float32
        )
        if not is_cached:
            return x.to(dtype)
        if id(x) not in self._casts:
            self._casts[id(x)] = x, x.to(dtype)
        return self._casts[id(x)][1]


_PLAIN = frozenset({Tensor, nn.Parameter})  # no other subclasses
_CONSTANTS = frozenset({int, float, bool, str, type(None), torch.dtype, torch.device, torch.Size})


def _map_operand(function: Callable[[Tensor], Tensor], x: Any) -> Any:
    """Apply a function to an operand, or to the tensors in it."""
    if isinstance(x, Tensor):
        return function(x)
    return x if type(x) in _CONSTANTS else map_tensors(function, x)


def _is_conversion(name: str, args: Sequence[Any]) -> bool:
    if name == "__getitem__":
        index = args[1] if type(args[1]) is tuple else (args[1],)
        return all(i is None or i is ... or type(i) in (int, slice) or _is_number(i) for i in index)
    return name in _CONVERSIONS


def _is_number(i: Any) -> bool:
    return isinstance(i, Tensor) and i.ndim == 0 and i.dtype is not torch.bool


def _writes_first(name: str) -> bool:
    """Return whether a function, by its name, writes to its first argument."""
    if name.endswith("__"):
        return name.startswith("__i")  # __iadd__ and others
    return name.endswith("_")
