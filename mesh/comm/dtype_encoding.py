"""How values of any dtype travel: as themselves, as bytes, or for a reduction as a dtype that every backend can add.

Backends differ in the dtypes they know. The eight in `NATIVE` work everywhere (gloo and NCCL, moving and reducing); any
other dtype moves as bytes, and is reduced in a native dtype that gives the same result.
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

# Integer arithmetic modulo a power of two may be done in any wider type and cut off afterwards.
_WIDER = {torch.int16: torch.int32, torch.uint16: torch.int32, torch.uint32: torch.int64}
_SIGN_BIT = -(2**63)
# A bool adds as "or" and multiplies as "and"; counting in uint8 would turn 256 times True into False.
_BOOL_OP = {"sum": "max", "max": "max", "product": "min", "min": "min"}


def as_bytes(x: Tensor) -> Tensor:
    """The same memory as a flat uint8 tensor (a copy only where a lazy conjugation must be carried out)."""
    return x.detach().resolve_conj().resolve_neg().reshape(-1).view(torch.uint8)


def encode(x: Tensor, op: str) -> tuple[Tensor, str]:
    """A flat native tensor, perhaps in x's memory, and the reduction on it that `decode` turns into `op` on x."""
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
    """Writes the reduced native values y into out, undoing `encode`."""
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
    """Writes the sum of the rows of `parts`, which it uses up, into out.

    One after the other, so that the bits depend on nothing else (`torch.sum` changes its order with the place); 16 bits are added in 32.
    """
    with torch.inference_mode():  # which may write to tensors of both kinds
        total = parts[0].to(torch.float32) if parts.dtype in (torch.float16, torch.bfloat16) else parts[0]
        if len(parts) == 1:
            out.view(-1).copy_(total)
            return
        for part in parts[1:-1]:
            total.add_(part)
        torch.add(total, parts[-1], out=out.view(-1))
