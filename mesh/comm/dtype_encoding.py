"""Encode tensors whose dtype a backend does not support.

As bytes, or for a reduction as a dtype that it can reduce.

gloo and NCCL both move and reduce the eight dtypes in `NATIVE`. Any other dtype is moved as bytes,
and reduced in a native dtype that gives the same result.
"""

from __future__ import annotations

import torch
from torch import Tensor

NATIVE = frozenset(
    {
        torch.float32,
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.int8,
        torch.uint8,
        torch.int32,
        torch.int64,
    }
)

# Integer arithmetic modulo a power of two can be done in any wider type and truncated afterwards.
_WIDER = {torch.int16: torch.int32, torch.uint16: torch.int32, torch.uint32: torch.int64}
_SIGN_BIT = -(2**63)
# The sum of bools is "or", their product "and"; counting in uint8 would turn 256 times True into
# False.
_BOOL_OP = {"sum": "max", "max": "max", "product": "min", "min": "min"}


def as_bytes(x: Tensor) -> Tensor:
    """Return the memory as a flat uint8 tensor, a copy only for a lazy conjugate or negative."""
    return x.detach().resolve_conj().resolve_neg().reshape(-1).view(torch.uint8)


def encode(x: Tensor, op: str) -> tuple[Tensor, str]:
    """Return a flat tensor of a native dtype and the reduction on it.

    `decode` turns their result into that of `op` on x. The tensor may share x's memory.
    """
    flat = x.detach().reshape(-1)
    if x.dtype in NATIVE:
        return flat, op
    if x.dtype == torch.bool:
        return flat.view(torch.uint8), _BOOL_OP[op]
    if x.is_complex():
        return torch.view_as_real(flat.resolve_conj()).reshape(-1), op
    if x.dtype in _WIDER:
        return flat.to(_WIDER[x.dtype]), op
    if x.dtype == torch.uint64:
        signed = flat.view(torch.int64)
        return (signed if op in ("sum", "product") else signed ^ _SIGN_BIT), op
    return flat.to(torch.float32), op


def decode(y: Tensor, out: Tensor, op: str) -> None:
    """Write the reduced native values y into out; the inverse of `encode`."""
    flat = out.detach().view(-1)
    if out.dtype == torch.bool:
        y = y.view(torch.bool)
    elif out.is_complex():
        y = torch.view_as_complex(y.view(-1, 2))
    elif out.dtype == torch.uint64:
        y = (y if op in ("sum", "product") else y ^ _SIGN_BIT).view(torch.uint64)
    if y.data_ptr() != flat.data_ptr() or y.dtype != flat.dtype:
        flat.copy_(y)


def add_up(parts: Tensor, out: Tensor) -> None:
    """Write the sum of the rows of `parts` into out; `parts` is overwritten.

    Rows are added one by one, so that the result is the same bit for bit at every position (the
    order of `torch.sum` is not). 16-bit floats are added in float32.
    """
    with torch.inference_mode():  # it may write to inference tensors and to others
        total = (
            parts[0].to(torch.float32)
            if parts.dtype in (torch.float16, torch.bfloat16)
            else parts[0]
        )
        if len(parts) == 1:
            out.view(-1).copy_(total)
            return
        for part in parts[1:-1]:
            total.add_(part)
        torch.add(total, parts[-1], out=out.view(-1))
