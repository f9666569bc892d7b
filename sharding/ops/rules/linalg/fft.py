"""Fourier transforms: dims that are transformed must be whole, the others stay split."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from ....layout.layout import Layout
from ..decomposition_utils import with_elements
from ..notation import Rule, along_dims
from ..reductions.reduction import Dims, normal_dims
from ..registry import rules

Transform = Callable[..., Tensor]

rules(
    {
        "fft.fft fft.ifft fft.rfft fft.irfft fft.hfft fft.ihfft"
        "(input, n=None, dim=-1, norm=None)": lambda a: _rule(a, a.dim),
        "fft.fft2 fft.ifft2 fft.rfft2 fft.irfft2 fft.hfft2 fft.ihfft2"
        "(input, s=None, dim=(-2, -1), norm=None)": lambda a: _rule(a, a.dim),
        "fft.fftn fft.ifftn fft.rfftn fft.irfftn fft.hfftn fft.ihfftn"
        "(input, s=None, dim=None, norm=None)": lambda a: _rule(
            a, range(-len(a.s), 0) if a.dim is None and a.s is not None else a.dim
        ),
        "fft.fftshift fft.ifftshift(input, dim=None)": lambda a: _rule(a, a.dim),
    },
    with_func=True,
)


def _rule(a: Any, dims: Dims) -> Rule:
    dims = normal_dims(dims, a.input.ndim)
    return along_dims(a.input, dims, "1", linear=((0,),), bind=partial(_bind, a.func))


def _bind(func: Transform, targets: Sequence[Layout], results: Sequence[Layout]) -> Transform:
    """Return torch's own function, which refuses a part without elements."""
    shape = results[0].local_shape
    if 0 not in targets[0].local_shape:
        return func
    return lambda local, *args, **kwargs: func(with_elements(local), *args, **kwargs)[
        tuple(map(slice, shape))
    ]
