"""Flops, memory traffic, saved activations and communication of a program that is evaluated.

    with OperatorCounts(model.parameters()) as counts:   one rank's operators, without values
        loss = ...                                       products, attention, bytes, what is saved
    counts.phase.matmul                                  1.1e12
    counts.tape.operations                               the operators in order

Attention counts as a fused kernel: it reads queries, keys and values, and saves these, its result
and a float32 per row. On "meta" torch computes it from products and stores its scores.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from ...mesh.comm.report import CommReport
from ...mesh.comm.thread_context import thread_context
from ..jit.inspection.flops import attention_flops
from ..ops.rules.nn.attention import attention_with_dropout
from ..tensor.sharded_tensor import ShardedTensor, local_of
from ..trees import tensors_in

GROUPED = frozenset({"_grouped_mm", "_scaled_grouped_mm"})  # products
# They move nothing. Results of collectives are zeroed by worlds without other ranks alone.
_FREE = frozenset({"detach", "alias", "lift_fresh", "_unsafe_view", "zero_"})
_FREE |= {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
# They read as many elements of their first operand as they return.
_PICKING = frozenset({"embedding", "index", "index_select", "gather", "nll_loss_forward"})
_PICKING |= {"nll_loss2d_forward"}

FUSED_ON_META = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

Kind = Literal["matmul", "attention", "other"]


class Kernel(NamedTuple):
    """What a kernel computes and moves.

    Attributes:
        kind: a matrix product, or another operator.
        flops: of a matrix product, for one row of the batch.
        moved: bytes that it reads and writes, for one row.
        fixed: the same of weights and of their gradients, whatever the number of rows.
        of_experts: whether it computes rows of experts.
    """

    kind: Kind
    flops: float
    moved: float
    fixed: float
    of_experts: bool = False


class Operation(NamedTuple):
    """An operator that ran.

    Attributes:
        kernel: what it computes and moves.
        name: the name of the operator.
        block: the index of the block in whose forward it ran; None outside.
        inputs, results: tensor -> bytes, by `Tape.key`.
    """

    kernel: Kernel
    name: str
    block: int | None
    inputs: dict[int, int]
    results: dict[int, int]


class Progress(NamedTuple):
    """How far a phase has come.

    Attributes:
        operations: the number of operators on the tape.
        attention, whole_attention: flops; see `Phase`.
        communication: collective -> (launches, bytes received).
    """

    operations: int
    attention: float
    whole_attention: float
    communication: dict[str, tuple[float, float]]


@dataclass
class Phase:
    """What one rank does in forward, or in backward.

    Attributes:
        attention: flops of attention; of causal attention those of the keys that are seen.
        whole_attention: the same as if no attention were causal.
        kernels: matrix products and other operators -> how often.
        communication: collective -> (launches, bytes received).
    """

    attention: float = 0
    whole_attention: float = 0
    kernels: dict[Kernel, float] = field(default_factory=dict)
    communication: dict[str, tuple[float, float]] = field(default_factory=dict)

    @property
    def matmul(self) -> float:
        """Flops of matrix products, grouped ones included."""
        return sum(count * kernel.flops for kernel, count in self.kernels.items())

    @property
    def traffic(self) -> float:
        """Bytes that operators other than products and attention read and write."""
        return sum(
            count * (kernel.moved + kernel.fixed)
            for kernel, count in self.kernels.items()
            if kernel.kind == "other"
        )

    def add(self, kernel: Kernel) -> None:
        """Count a kernel."""
        self.kernels[kernel] = self.kernels.get(kernel, 0) + 1

    def plus(self, other: Phase, factor: float = 1) -> Phase:
        """Return `self + factor * other`."""
        communication = dict(self.communication)
        for op, (launches, received) in other.communication.items():
            launches_before, received_before = communication.get(op, (0, 0))
            communication[op] = (
                launches_before + factor * launches,
                received_before + factor * received,
            )
        kernels = dict(self.kernels)
        for kernel, count in other.kernels.items():
            kernels[kernel] = kernels.get(kernel, 0) + factor * count
        return Phase(
            self.attention + factor * other.attention,
            self.whole_attention + factor * other.whole_attention,
            {kernel: count for kernel, count in kernels.items() if count},
            {op: use for op, use in communication.items() if use[0] > 0},
        )


class Tape:
    """The operators of a phase in order, and their tensors, each memory under a number of its own.

    Attributes:
        operations: the operators.
        sizes: number -> bytes of the memory.
        constants: the numbers of parameters and buffers.
    """

    def __init__(self, constants: Sequence[Tensor]) -> None:
        self.operations: list[Operation] = []
        self.sizes: list[int] = []
        self._numbers: dict[int, int] = {}
        self.constants = frozenset(self.key(x) for x in constants)

    def key(self, x: Tensor) -> int:
        """Return the number of a tensor's memory."""
        storage: Any = local_of(x).untyped_storage()
        number = self._numbers.get(storage._cdata)
        if number is None:
            number = self._numbers[storage._cdata] = len(self.sizes)
            self.sizes.append(storage.nbytes())
            weakref.finalize(storage, self._numbers.pop, storage._cdata).atexit = False
        return number

    def bytes_of(self, tensors: Iterable[Tensor]) -> dict[int, int]:
        """Return the bytes of tensors by number; of one memory those of the largest."""
        sizes: dict[int, int] = {}
        for x in tensors:
            key = self.key(x)
            sizes[key] = max(sizes.get(key, 0), _bytes(x))
        return sizes


class OperatorCounts(TorchDispatchMode):
    """with OperatorCounts() as counts: count this thread's operators.

    Attributes:
        phase: what is counted; the caller replaces it between forward and backward.
        tape: the operators; the caller replaces its list likewise.
        block: the index of the block whose forward is running; the caller sets it.
        in_experts: whether experts are running, forward or backward; the caller sets it.
        rows_of_experts: the numbers of what operators of experts returned in forward.
        saved: the numbers of what autograd saves, without parameters and buffers.
        keys_and_values: bytes of the keys and values of all attention.
        odd_attention: what attention was called with besides them, in words: a mask or dropout.
        report: what the program communicates; the caller sets it.
        until_saved: index of a block -> where its forward stood when autograd last saved something,
            which is where recomputation of the block ends.
        of_weights: the numbers of parameters, buffers, and gradients of parameters.
    """

    def __init__(self, constants: Sequence[Tensor]) -> None:
        super().__init__()
        self.phase = Phase()
        self.tape = Tape(constants)
        self.block: int | None = None
        self.in_experts = False
        self.rows_of_experts: set[int] = set()
        self.saved: set[int] = set()
        self.keys_and_values = 0
        self.odd_attention: str | None = None
        self.report = CommReport()
        self.until_saved: dict[int, Progress] = {}
        self._weights = {tuple(local_of(x).shape) for x in constants if x.ndim > 1}
        self.of_weights = set(self.tape.constants)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if _is_shape_inference():
            return result
        packet = func.overloadpacket
        name = packet.__name__
        count = flop_registry.get(packet)
        if count is not None:
            self._record(name, "matmul", count(*args, **kwargs, out_val=result), args, result)
        elif name in GROUPED:  # not in torch's registry
            self._record(name, "matmul", _grouped_flops(*args[:2]), args, result)
        elif not func.is_view and name not in _FREE:
            self._record(name, "other", 0, (args, kwargs), result)
        return result

    def record_attention(self, operands: Sequence[Tensor], results: Sequence[Tensor]) -> None:
        """Record attention as an operator that is neither product nor bound by memory."""
        self._record("attention", "attention", 0, operands, results)

    def _record(self, name: str, kind: Kind, flops: float, operands: Any, result: Any) -> None:
        results = [local_of(x) for x in tensors_in((result,))]
        inputs = [local_of(x) for x in tensors_in((operands,))]
        self._note_gradients(name, kind, inputs, results)
        if name in _PICKING:
            inputs = [*results, *inputs[1:]]  # as much of the first as of the result
        moved = fixed = 0
        for x in (*inputs, *results):
            if self.tape.key(x) in self.of_weights:
                fixed += _bytes(x)
            else:
                moved += _bytes(x)
        kernel = Kernel(kind, flops, moved, fixed, self.in_experts)
        if kind != "attention":
            self.phase.add(kernel)
        tape = self.tape
        reads, writes = tape.bytes_of(inputs), tape.bytes_of(results)
        if self.in_experts and self.block is not None:
            self.rows_of_experts.update(writes)
        tape.operations.append(Operation(kernel, name, self.block, reads, writes))

    def _note_gradients(
        self, name: str, kind: Kind, inputs: Sequence[Tensor], results: Sequence[Tensor]
    ) -> None:
        """Note results whose size is that of weights: products of activations, and what follows."""
        are_weights = [self.tape.key(x) in self.of_weights for x in inputs]
        if kind == "matmul":
            is_gradient = not any(are_weights) and all(
                tuple(x.shape) in self._weights or tuple(x.shape[::-1]) in self._weights
                for x in results
            )
        else:
            is_gradient = name == "embedding_dense_backward" or (
                bool(are_weights) and all(are_weights) and kind == "other"
            )
        if is_gradient:
            self.of_weights.update(map(self.tape.key, results))

    def save(self, x: Tensor) -> Tensor:
        """Note a tensor that autograd saves; a hook of `torch.autograd.graph`."""
        key = self.tape.key(x)
        if key not in self.tape.constants:
            self.saved.add(key)
        if self.block is not None:
            self.until_saved[self.block] = self.progress()
        return x

    def progress(self) -> Progress:
        """Return what has run so far in this phase."""
        phase = self.phase
        communication = by_op(self.report)
        return Progress(
            len(self.tape.operations), phase.attention, phase.whole_attention, communication
        )

    def between(self, begin: Progress, end: Progress, kernels: dict[Kernel, float]) -> Phase:
        """Return a part of the phase, with its kernels.

        Args:
            begin, end: where it begins and ends.
            kernels: of the operators between them.
        """
        part = Phase(
            end.attention - begin.attention,
            end.whole_attention - begin.whole_attention,
            kernels,
            end.communication,
        )
        return part.plus(Phase(communication=begin.communication), -1)

    def add_communication(self, report: CommReport) -> None:
        """Add the collectives of a report to the phase."""
        self.phase = self.phase.plus(Phase(communication=by_op(report)))


def by_op(report: CommReport) -> dict[str, tuple[float, float]]:
    """Return the communication of a `Phase`."""
    return {op: (float(n), float(size)) for op, (n, size) in report.by_op.items()}


def _grouped_flops(a: Tensor, b: Tensor) -> int:
    """Return the flops of a grouped product, whose groups divide a dim of two matrices."""
    groups = a.shape[0] if a.ndim == b.ndim == 3 else 1
    return 2 * groups * a.shape[-2] * a.shape[-1] * b.shape[-1]


def _is_shape_inference() -> bool:
    """Return whether the library runs an operator on global shapes to learn its result's."""
    return thread_context.on_stand_ins or thread_context.outside_mesh


def _bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()


class WithoutValues(TorchFunctionMode):
    """Inside, programs that ask a few things of values run on "meta", and attention is one kernel.

    A condition on a tensor counts as true, which is what models of Hugging Face ask of masks and
    positions: the batch has no padding, and no sequences are packed.
    """

    def attention(self, *args: Any, **kwargs: Any) -> Tensor:
        """Compute `F.scaled_dot_product_attention` of local tensors by one operator."""
        raise NotImplementedError

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # a ShardedTensor reads the item of its part
        is_condition = func is Tensor.item and args[0].dtype == torch.bool
        if (func is Tensor.__bool__ or is_condition) and args[0].is_meta:
            return True
        if func is F.scaled_dot_product_attention:
            if any(isinstance(x, ShardedTensor) for x in args):
                with self:  # the operator of the parts comes back here
                    return ShardedTensor.__torch_function__(func, types, args, kwargs)
            return self.attention(*args, **kwargs)
        return func(*args, **kwargs)


class CountedWithoutValues(WithoutValues):
    """`WithoutValues`, and what attention takes is added to counts."""

    def __init__(self, counts: OperatorCounts) -> None:
        super().__init__()
        self._counts = counts

    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        if dropout_p:  # which is no kernel of parts, see `attention_with_dropout`
            self._counts.odd_attention = "dropout"
            arguments = query, key, value, attn_mask, dropout_p, *args
            with self:  # for the dropout of its weights
                return attention_with_dropout(*arguments, **kwargs)
        return _fused_attention(self._counts, query, key, value, attn_mask, *args, **kwargs)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is FUSED_ON_META:  # what the operator of the parts calls
            query, key, value, _, is_causal = args
            return self.attention(query, key, value, is_causal=is_causal), None
        if func is F.dropout and not isinstance(args[0], ShardedTensor):
            return _dropout(*args, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs)


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Compute `F.dropout` as it is of sharded tensors, which saves a mask of one byte."""
    if not training or p == 0:
        return input
    mask = torch.empty_like(input, dtype=torch.bool)
    return input.mul_(mask).mul_(1 - p) if inplace else input * mask * (1 - p)


def _fused_attention(
    counts: OperatorCounts,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    **_: Any,
) -> Tensor:
    shapes = tuple(map(tuple, (query.shape, key.shape, value.shape)))
    if _is_shape_inference():
        return query.new_empty(*query.shape[:-1], value.shape[-1])
    counts.phase.attention += attention_flops(*shapes, is_causal=is_causal)
    counts.phase.whole_attention += attention_flops(*shapes, is_causal=False)
    counts.keys_and_values += _bytes(key) + _bytes(value)
    if attn_mask is not None:
        counts.odd_attention = "a mask"

    def on_forward(*results: Tensor) -> None:
        counts.record_attention((query, key, value), results)

    def on_backward(operands: Sequence[Tensor], grads: Sequence[Tensor]) -> None:
        counts.record_attention(operands, grads)
        phase = counts.phase
        phase.attention += attention_flops(*shapes, is_causal=is_causal, is_backward=True)
        phase.whole_attention += attention_flops(*shapes, is_causal=False, is_backward=True)

    out: Any = _FusedAttention.apply(query, key, value, on_forward, on_backward)
    return out


class _FusedAttention(torch.autograd.Function):
    """Attention without values, which saves what fused kernels save."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        on_forward: Callable[..., None],
        on_backward: Callable[..., None],
    ) -> Tensor:
        # as kernels lay it out: heads next to features, so that joining them copies nothing
        rows = query.transpose(-3, -2).shape[:-1]
        out = query.new_empty(*rows, value.shape[-1]).transpose(-3, -2)
        normalizers = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, out, normalizers)
        ctx.on_backward = on_backward
        on_forward(out, normalizers)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        query, key, value, *_ = ctx.saved_tensors
        results = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
        ctx.on_backward((*ctx.saved_tensors, *grads), results)
        return *results, None, None
