"""`torch.nn.init`: fills that do not call methods of the tensor; equal values on any mesh."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.nn import init

from ...sliced_from import check_base
from ..registry import handler


@handler(also=(init.uniform_,))
def _uniform(tensor: Any, a: float = 0.0, b: float = 1.0, generator: Any = None) -> Any:
    with torch.no_grad():
        return tensor.uniform_(a, b, generator=generator)


@handler(also=(init.normal_,))
def _normal(tensor: Any, mean: float = 0.0, std: float = 1.0, generator: Any = None) -> Any:
    with torch.no_grad():
        return tensor.normal_(mean, std, generator=generator)


@handler(also=(init.constant_,))
def _constant(tensor: Any, val: float) -> Any:
    with torch.no_grad():
        return tensor.fill_(val)


@handler(also=(init.kaiming_uniform_,))
def _kaiming_uniform(
    tensor: Any,
    a: float = 0,
    mode: str = "fan_in",
    nonlinearity: str = "leaky_relu",
    generator: Any = None,
) -> Any:
    """Compute bounds from the global shape (He et al. 2015, arXiv:1502.01852)."""
    mode = mode.lower()
    if mode not in ("fan_in", "fan_out"):
        raise ValueError(f"kaiming_uniform_: mode must be 'fan_in' or 'fan_out', got {mode!r}")
    if tensor.ndim < 2:
        raise ValueError(
            f"kaiming_uniform_: a tensor of shape {list(tensor.shape)} has no fan; it needs at "
            "least 2 dims"
        )
    outputs, inputs, *field = tensor.shape
    fan = (inputs if mode == "fan_in" else outputs) * math.prod(field)
    bound = init.calculate_gain(nonlinearity, a) * math.sqrt(3 / max(fan, 1))  # type: ignore[arg-type]
    return _uniform(tensor, -bound, bound, generator)


@handler(also=(torch.eye,))
def _eye(n: int, m: int | None = None, *, out: Any, **_: Any) -> Any:
    """Write this rank's part of `torch.eye(n, m, out=x)`, which `nn.init.eye_` calls."""
    shape = (n, n if m is None else m)
    if tuple(out.shape) != shape or out._layout.pending:
        raise ValueError(
            f"eye: out= is {out._layout}, and the result {list(shape)}; give a tensor of that "
            "shape that is not pending"
        )
    check_base(out)
    if out.mesh.coordinate is not None:
        rows, columns = [torch.arange(*interval, device=out.device) for interval in out._layout.box]
        out._local.copy_(rows.unsqueeze(1) == columns)
    return out
