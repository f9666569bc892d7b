"""Fourier transforms: the dims that are transformed must be whole, the others stay split. They are
linear.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ....layout.layout import Layout
from ..decomposition_utils import with_elements
from ..notation import Rule, along_dims
from ..reductions.reduction import Dims, normal_dims
from ..registry import rule

Transform = Callable[..., Tensor]


def _transformed(func: Transform, input: Tensor, dims: Dims) -> Rule:
    return along_dims(
        input, normal_dims(dims, input.ndim), "1", linear=((0,),), bind=partial(_bind, func)
    )


def _bind(func: Transform, targets: Sequence[Layout], results: Sequence[Layout]) -> Transform:
    """Return torch's own function, which refuses a part without elements."""
    shape = results[0].local_shape
    if 0 not in targets[0].local_shape:
        return func
    return lambda local, *args, **kwargs: func(with_elements(local), *args, **kwargs)[
        tuple(map(slice, shape))
    ]


def _one_dim(
    func: Transform, input: Tensor, n: int | None = None, dim: int = -1, norm: str | None = None
) -> Rule:
    return _transformed(func, input, dim)


def _two_dims(
    func: Transform,
    input: Tensor,
    s: Any = None,
    dim: Sequence[int] = (-2, -1),
    norm: str | None = None,
) -> Rule:
    return _transformed(func, input, dim)


def _any_dims(
    func: Transform, input: Tensor, s: Any = None, dim: Dims = None, norm: str | None = None
) -> Rule:
    return _transformed(func, input, range(-len(s), 0) if dim is None and s is not None else dim)


def _shift(func: Transform, input: Tensor, dim: Dims = None) -> Rule:
    return _transformed(func, input, dim)


_FAMILIES = {
    _one_dim: "fft ifft rfft irfft hfft ihfft",
    _two_dims: "fft2 ifft2 rfft2 irfft2 hfft2 ihfft2",
    _any_dims: "fftn ifftn rfftn irfftn hfftn ihfftn",
    _shift: "fftshift ifftshift",
}
for _maker, _names in _FAMILIES.items():
    for _name in _names.split():
        _func = getattr(torch.fft, _name)
        rule(also=(_func,))(partial(_maker, _func))
