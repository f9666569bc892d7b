"""Flops, memory traffic, saved activations and communication of a program that is evaluated.

    with OperatorCounts() as counts:     one rank's operators on tensors without values
        loss = ...                       products, attention, bytes of the others, tensors saved
    counts.flops                         {"matmul": 1.1e12, "attention": 8.6e10}

Attention counts as a fused kernel: it reads queries, keys and values, and saves these, its result
and a float32 per row. On "meta" torch computes it from products and stores its scores.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from ...mesh.comm.report import CommReport
from ...mesh.comm.thread_context import thread_context
from ..jit.inspection.flops import attention_flops
from ..tensor.sharded_tensor import ShardedTensor
from ..trees import tensors_in

_GROUPED = frozenset({"_grouped_mm", "_scaled_grouped_mm"})
_VIEWS = frozenset({"detach", "alias", "lift_fresh", "_unsafe_view", "empty", "empty_like"})


@dataclass
class Phase:
    """What one rank does in forward, or in backward.

    Attributes:
        matmul: flops of matrix products, grouped ones included.
        attention: flops of attention; of causal attention those of the keys that are seen.
        whole_attention: the same as if no attention were causal.
        traffic: bytes that other operators read and write.
        communication: collective -> (launches, bytes received).
    """

    matmul: float = 0
    attention: float = 0
    whole_attention: float = 0
    traffic: float = 0
    communication: dict[str, tuple[float, float]] = field(default_factory=dict)

    def plus(self, other: Phase, factor: float = 1) -> Phase:
        """Return `self + factor * other`."""
        communication = dict(self.communication)
        for op, (launches, received) in other.communication.items():
            launches_before, received_before = communication.get(op, (0, 0))
            communication[op] = (
                launches_before + factor * launches,
                received_before + factor * received,
            )
        return Phase(
            self.matmul + factor * other.matmul,
            self.attention + factor * other.attention,
            self.whole_attention + factor * other.whole_attention,
            self.traffic + factor * other.traffic,
            {op: use for op, use in communication.items() if use[0] > 0},
        )


class OperatorCounts(TorchDispatchMode):
    """with OperatorCounts() as counts: count this thread's operators.

    Attributes:
        phase: what is counted; the caller replaces it between forward and backward.
        saved: bytes that autograd saves, each storage once, without those of `ignored`.
        keys_and_values: bytes of the keys and values of all attention.
    """

    def __init__(self, ignored: Sequence[Tensor]) -> None:
        super().__init__()
        self.phase = Phase()
        self.saved = 0
        self.keys_and_values = 0
        self._saved: dict[int, Any] = {_storage(x)._cdata: _storage(x) for x in ignored}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if _is_shape_inference():
            return result
        packet = func.overloadpacket
        flops = flop_registry.get(packet)
        if flops is not None:
            self.phase.matmul += flops(*args, **kwargs, out_val=result)
        elif packet.__name__ in _GROUPED:  # not in torch's registry
            self.phase.matmul += _grouped_flops(*args[:2])
        elif not func.is_view and packet.__name__ not in _VIEWS:
            self.phase.traffic += sum(_bytes(x) for x in tensors_in((args, kwargs, result)))
        return result

    def save(self, x: Tensor) -> Tensor:
        """Count a tensor that autograd saves; a hook of `torch.autograd.graph`."""
        storage = _storage(x)
        if storage._cdata not in self._saved:
            self._saved[storage._cdata] = storage
            self.saved += storage.nbytes()
        return x

    def add_communication(self, report: CommReport) -> None:
        """Add the collectives of a report to the phase."""
        communication = {op: (float(n), float(size)) for op, (n, size) in report.by_op.items()}
        self.phase = self.phase.plus(Phase(communication=communication))


def _grouped_flops(a: Tensor, b: Tensor) -> int:
    """Return the flops of a grouped product, whose groups divide a dim of two matrices."""
    groups = a.shape[0] if a.ndim == b.ndim == 3 else 1
    return 2 * groups * a.shape[-2] * a.shape[-1] * b.shape[-1]


def _is_shape_inference() -> bool:
    """Return whether the library runs an operator on global shapes to learn its result's."""
    return thread_context.on_stand_ins or thread_context.outside_mesh


def _storage(x: Tensor) -> Any:
    local = x._local if isinstance(x, ShardedTensor) else x
    return local.untyped_storage()


def _bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()


class WithoutValues(TorchFunctionMode):
    """Inside, programs that ask a few things of values run on "meta", and attention is one kernel.

    A condition on a tensor counts as true, which is what models of Hugging Face ask of masks and
    positions: the batch has no padding, and no sequences are packed.
    """

    def __init__(self, counts: OperatorCounts) -> None:
        super().__init__()
        self._counts = counts

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.__bool__ and args[0].is_meta:
            return True
        if func is F.scaled_dot_product_attention:
            if any(isinstance(x, ShardedTensor) for x in args):
                with self:  # the operator of the parts comes back here
                    return ShardedTensor.__torch_function__(func, types, args, kwargs)
            return _fused_attention(self._counts, *args, **kwargs)
        return func(*args, **kwargs)


def _fused_attention(
    counts: OperatorCounts,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **_: Any,
) -> Tensor:
    shapes = tuple(map(tuple, (query.shape, key.shape, value.shape)))
    if _is_shape_inference():
        return query.new_empty(*query.shape[:-1], value.shape[-1])
    counts.phase.attention += attention_flops(*shapes, is_causal=is_causal)
    counts.phase.whole_attention += attention_flops(*shapes, is_causal=False)
    counts.keys_and_values += _bytes(key) + _bytes(value)

    def on_backward() -> None:
        phase = counts.phase
        phase.attention += attention_flops(*shapes, is_causal=is_causal, is_backward=True)
        phase.whole_attention += attention_flops(*shapes, is_causal=False, is_backward=True)

    return _FusedAttention.apply(query, key, value, on_backward)  # type: ignore[return-value]


class _FusedAttention(torch.autograd.Function):
    """Attention without values, which saves what fused kernels save."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, on_backward: Callable[[], None]
    ) -> Tensor:
        out = query.new_empty(*query.shape[:-1], value.shape[-1])
        normalizers = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, out, normalizers)
        ctx.on_backward = on_backward
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        query, key, value, *_ = ctx.saved_tensors
        ctx.on_backward()
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), None
