"""torch's fused attention kernels with the log-sum-exp, under `F.scaled_dot_product_attention`.

They do not materialise the scores. They are private in torch; the public operator neither returns
the log-sum-exp nor takes one for backward. If torch lacks them, or they do not support the tensors,
attention is computed by matrix products (`blockwise.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.utils._python_dispatch import _disable_current_modes


class FlashKernel(NamedTuple):
    """Attention of one block.

    Attributes:
        forward: `(q, k, v, scale, diagonal)` -> output and lse.
        backward: `(grad, q, k, v, out, lse, scale, diagonal)` -> gradients of q, k and v; out and
            lse are over all blocks.
    """

    forward: Callable[[Tensor, Tensor, Tensor, float, bool], tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]


def kernel_for(q: Tensor, k: Tensor, v: Tensor, diagonal: bool = False) -> FlashKernel | None:
    """Return a kernel that supports these tensors [b h l e]; there may be fewer key heads.

    On CUDA it is that of cuDNN where `F.scaled_dot_product_attention` would use it, else
    FlashAttention 2; on "meta" the latter.
    """
    if q.ndim != 4 or v.shape[-1] != q.shape[-1] or not (q.numel() and k.numel()):
        return None
    if q.device.type == "cpu" and _CPU.forward is not None:
        return FlashKernel(_on_cpu, _on_cpu_grads)
    halves = (
        q.dtype in (torch.float16, torch.bfloat16) and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256
    )
    if _CUDA.forward is None or not halves:
        return None
    if q.is_meta:
        return _CUDA_KERNEL
    if q.is_cuda and torch.cuda.get_device_capability(q.device) >= (8, 0):
        return _CUDNN_KERNEL if _prefers_cudnn(q, k, v, diagonal) else _CUDA_KERNEL
    return None


class _Operators(NamedTuple):
    forward: Any
    backward: Any


def _operators(name: str) -> _Operators:
    operators = [getattr(torch.ops.aten, name + end, None) for end in ("", "_backward")]
    return _Operators(*operators if None not in operators else (None, None))


_CPU = _operators("_scaled_dot_product_flash_attention_for_cpu")
_CUDA = _operators("_scaled_dot_product_flash_attention")
_CUDNN = _operators("_scaled_dot_product_cudnn_attention")
# Wider heads are for inference, and torch's choice does not know that a backward follows.
_CUDNN_WIDTH = 128


def _in_rows(x: Tensor) -> Tensor:
    """Return x with contiguous features, as the kernels require."""
    return x if x.stride(-1) == 1 else x.contiguous()


# -- on the CPU: half precision is computed in float32, so that blocks are not rounded before they a


def _on_cpu(q: Tensor, k: Tensor, v: Tensor, scale: float, diagonal: bool) -> tuple[Tensor, Tensor]:
    return _CPU.forward(*_at_least_float32(q, k, v), 0.0, diagonal, scale=scale)


def _on_cpu_grads(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    diagonal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    return _CPU.backward(
        *_at_least_float32(grad, q, k, v, out), lse.contiguous(), 0.0, diagonal, scale=scale
    )


def _at_least_float32(*tensors: Tensor) -> list[Tensor]:
    return [_in_rows(x.to(torch.promote_types(x.dtype, torch.float32))) for x in tensors]


# -- on CUDA, in half precision --------------------------------------------------------------------


def on_cuda(q: Tensor, k: Tensor, v: Tensor, scale: float, diagonal: bool) -> tuple[Tensor, Tensor]:
    out, lse, *_ = _CUDA.forward(*map(_in_rows, (q, k, v)), 0.0, diagonal, False, scale=scale)
    return out, lse


def on_cuda_grads(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    diagonal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    unused = torch.empty(0, dtype=torch.uint64, device=q.device)  # the random state for dropout
    options = (None, None, q.shape[-2], k.shape[-2], 0.0, diagonal, unused, unused)
    return _CUDA.backward(
        *map(_in_rows, (grad, q, k, v, out)), lse.contiguous(), *options, scale=scale
    )


_CUDA_KERNEL = FlashKernel(on_cuda, on_cuda_grads)


def _prefers_cudnn(q: Tensor, k: Tensor, v: Tensor, diagonal: bool) -> bool:
    if _CUDNN.forward is None or q.shape[-1] > _CUDNN_WIDTH:
        return False
    with _disable_current_modes():  # it is an operator, and `sm.jit` would record it
        choice = torch._fused_sdp_choice(
            q, k, v, None, 0.0, diagonal, enable_gqa=q.shape[1] != k.shape[1]
        )
    return choice == SDPBackend.CUDNN_ATTENTION.value


def on_cudnn(
    q: Tensor, k: Tensor, v: Tensor, scale: float, diagonal: bool
) -> tuple[Tensor, Tensor]:
    out, lse, *_ = _CUDNN.forward(
        *map(_in_rows, (q, k, v)), None, True, 0.0, diagonal, False, scale=scale
    )
    return out, lse.view(q.shape[:-1])  # cuDNN's has one more dim of size 1


def on_cudnn_grads(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    diagonal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    unused = torch.empty((), dtype=torch.int64, device=q.device)  # the random state for dropout
    options = (unused, unused, None, None, None, q.shape[-2], k.shape[-2], 0.0, diagonal)
    return _CUDNN.backward(
        *map(_in_rows, (grad, q, k, v, out)), lse.contiguous()[..., None], *options, scale=scale
    )


_CUDNN_KERNEL = FlashKernel(on_cudnn, on_cudnn_grads)
