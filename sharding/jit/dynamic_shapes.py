"""Operators whose results have a shape that depends on values: a graph would keep that of the first
call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .errors import at_line

_MASKS = (torch.bool, torch.uint8)


def check_shape_is_static(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Raise JitError if the shape of this operator's result depends on the values of its
    operands.
    """
    if torch.Tag.dynamic_output_shape not in func.tags:
        return
    name, given = (
        func.overloadpacket.__name__,
        dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs,
    )
    if name == "index":
        static = not any(isinstance(x, Tensor) and x.dtype in _MASKS for x in given["indices"])
    elif name == "bincount":  # as long as `minlength`, if that is more than all values
        static = not given["self"].is_meta and int(
            given["self"].max() if given["self"].numel() else 0
        ) < given.get("minlength", 0)
    else:
        static = given.get("output_size") is not None  # of repeat_interleave
    if not static:
        raise at_line(
            f"the shape of the result of {name} depends on values, and a graph has one shape",
            "Keep the shape: torch.where, a product with the mask, nonzero_static(size=...), "
            "repeat_interleave(output_size=...)",
        )
