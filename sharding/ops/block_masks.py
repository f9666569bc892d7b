"""Masks of torch's flex attention: which rows of the batch they are for, and what they close over.

`torch.nn.attention.flex_attention` is not imported here: who has a `BlockMask` has imported it.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

# a function of (b, h, q, kv), or of (score, b, h, q, kv); a plain one: torch counts its parameters
Mod: TypeAlias = Callable[..., Tensor]

FLEX_ATTENTION = "torch.nn.attention.flex_attention"


def is_block_mask(x: Any) -> bool:
    """Return whether a value is a `BlockMask`."""
    module = sys.modules.get(FLEX_ATTENTION)
    return module is not None and isinstance(x, module.BlockMask)


def batch_size_of(mask: Any) -> int:
    """Return for how many rows of the batch a mask is made; 1 if it is the same for all rows."""
    return mask.kv_num_blocks.shape[0] if mask.kv_num_blocks.ndim == 3 else 1


def take_rows(mask: Any, rows: Tensor) -> Any:
    """Return the mask of some rows of its batch, in their order.

    Args:
        rows: their numbers, on the device of the mask.
    """
    part = mask[rows]
    whole = mask.mask_mod

    @torch._dynamo.dont_skip_tracing  # what flex attention compiles
    def mask_of_rows(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return whole(rows[b], h, q, kv)

    part.mask_mod = mask_of_rows
    return part


def mask_from(mask_mod: Mod, batch: int, head: int, row: int) -> Mod:
    """Return a mask function of positions in a part that begins at this batch, head and row."""

    def mask_of_part(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return mask_mod(b + batch, h + head, q + row, kv)

    return mask_of_part


def closed_over(function: Any) -> list[Any]:
    """Return what a function closes over, also through functions among that."""
    values: list[Any] = []
    functions = [function]
    for f in functions:
        content = []
        for cell in getattr(f, "__closure__", None) or ():
            with contextlib.suppress(ValueError):  # a name that has no value yet
                content.append(cell.cell_contents)
        if isinstance(f, functools.partial):
            content += [*f.args, *f.keywords.values(), f.func]
        values += content
        functions += [x for x in content if callable(x) and not any(x is one for one in functions)]
    return values
