"""Dropout of every kind. What is kept is drawn by global position: equal on replicas, and the same on any mesh.

A call takes one random tensor from the stream (`sharding.random`): of the input's shape or, where whole channels are dropped,
of its first dims. Plain dropout is linear in its input and keeps sums pending; alpha dropout adds a constant, and reduces first.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ....layout.layout import Layout
from ....layout.spec import P
from ....tensor import random
from ....tensor.sharded_tensor import ShardedTensor
from ...dispatch import check_base
from ..decomposition_utils import from_parts, layout_of, settled
from ..registry import form

_SELU_FLOOR = 1.7580993408473766  # the negative of what SELU tends to (Klambauer et al. 2017, "alpha prime")

Apply = Callable[[Tensor, Tensor, float], Tensor]


def _scale(x: Tensor, kept: Tensor, p: float) -> Tensor:
    return x * kept * _keeping(p)


def _scale_(x: Tensor, kept: Tensor, p: float) -> Tensor:
    return x.mul_(kept).mul_(_keeping(p))


def _keeping(p: float) -> float:
    """The factor that keeps the mean."""
    return 0.0 if p == 1 else 1 / (1 - p)


def _saturate(x: Tensor, kept: Tensor, p: float) -> Tensor:
    """To the floor of SELU where not kept; then what keeps mean and variance."""
    if p == 1:
        return x * 0
    a = _narrowing(p)
    return x * kept * a + _shift(x, kept, a, p)


def _saturate_(x: Tensor, kept: Tensor, p: float) -> Tensor:
    if p == 1:
        return x.mul_(0)
    a = _narrowing(p)
    return x.mul_(kept).mul_(a).add_(_shift(x, kept, a, p))


def _narrowing(p: float) -> float:
    return ((_SELU_FLOOR**2 * p + 1) * (1 - p)) ** -0.5


def _shift(x: Tensor, kept: Tensor, a: float, p: float) -> Tensor:
    return kept.to(x.dtype).sub_(1).mul_(_SELU_FLOOR * a).add_(_SELU_FLOOR * a * p)


# -- which elements share their fate ----------------------------------------------------------------------------------


def _mask_layout(layout: Layout, kept_dims: int) -> Layout:
    """How the mask lies: like the input in its first dims, of size one in the others."""
    cuts = [cut if d < kept_dims else () for d, cut in enumerate(layout.spec.cuts)]
    shape = [n if d < kept_dims else 1 for d, n in enumerate(layout.shape)]
    return Layout.of(layout.mesh, P.of_cuts(cuts, {}), shape, torch.bool)


def _kept(mask: Layout, p: float) -> Tensor:
    """Which elements stay."""
    return random.bernoulli(mask, 1 - p)


# -- forms -------------------------------------------------------------------------------------------------------------


def _form(func: Callable[..., Any], apply: Apply, train: str, training: bool, kept_dims: Callable[[int], int], in_place: bool) -> None:
    """Register a kind of dropout: `train` is the name of its switch, `training` what it is by default."""

    @form(also=(func,))
    def maker(input: Any, p: float = 0.5, *switches: bool, **named: bool) -> Callable[..., Any]:
        on, inside = _switches(train, training, switches, named)
        func(input.detach(), p, *switches, **named)  # torch's own complaints
        layout = layout_of(input)
        if not on or input.numel() == 0:
            return _unchanged
        if in_place or inside:
            return partial(_run_in_place, _writing(func, layout, apply), _mask_layout(layout, kept_dims(input.ndim)))
        return partial(_run, apply, _linear(apply, layout), _mask_layout(layout, kept_dims(input.ndim)))


def _switches(train: str, training: bool, switches: tuple[bool, ...], named: dict[str, bool]) -> tuple[bool, bool]:
    """Whether anything is to be dropped, and in place."""
    given = dict(zip((train, "inplace"), switches, strict=False)) | named
    return given.get(train, training), given.get("inplace", False)


def _linear(apply: Apply, layout: Layout) -> bool:
    """Whether it may be applied to each rank's part of what is pending."""
    return apply is _scale and set(layout.pending.values()) <= {"sum", "avg"}


def _writing(func: Callable[..., Any], layout: Layout, apply: Apply) -> Apply:
    """The form of `apply` that writes.

    Raises:
        ValueError: it would have to reduce its operand first.
    """
    if layout.pending and not _linear(apply, layout):
        raise ValueError(
            f"{func.__name__} in place on {layout}, while a reduction is pending; redistribute it first, or use the out-of-place form"
        )
    return _scale_ if apply is _scale else _saturate_


def _unchanged(input: Any, p: float = 0.5, *_: Any, **__: Any) -> Any:
    _check(p)
    return input


def _run(apply: Apply, linear: bool, mask: Layout, input: Any, p: float = 0.5, *_: Any, **__: Any) -> Any:
    _check(p)
    if p == 0:
        return input
    x = input if linear else settled(input)
    kept = _kept(mask, p)
    return from_parts(x._layout, lambda local: apply(local, kept, p), x)


def _run_in_place(apply: Apply, mask: Layout, input: Any, p: float = 0.5, *_: Any, **__: Any) -> Any:
    _check(p)
    if p == 0:
        return input
    check_base(input)
    kept = _kept(mask, p)
    if input.mesh.coordinate is not None:
        apply(input._local, kept, p)
        input._sync_requires_grad()
    return input


def _check(p: float) -> None:
    """Decisions do not tell one p from another."""
    if not 0 <= p <= 1:
        raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")


def _every(ndim: int) -> int:
    return ndim


def _channels(ndim: int) -> int:
    """Batch and channels."""
    return 2


def _channels_of(batched: int) -> Callable[[int], int]:
    """Batch and channels, or channels alone where there is one dim less."""
    return lambda ndim: 2 if ndim == batched else 1


for _name, _apply, _dims in (
    ("dropout", _scale, _every),
    ("alpha_dropout", _saturate, _every),
    ("feature_dropout", _scale, _channels),
    ("feature_alpha_dropout", _saturate, _channels),
):
    _form(getattr(torch, _name), _apply, "train", True, _dims, False)
    _form(getattr(torch, f"{_name}_"), _apply, "train", True, _dims, True)

for _func, _apply, _training, _dims in (
    (F.dropout, _scale, True, _every),
    (F.alpha_dropout, _saturate, False, _every),
    (F.dropout1d, _scale, True, _channels_of(3)),
    (F.dropout2d, _scale, True, _channels),
    (F.dropout3d, _scale, True, _channels_of(5)),
    (F.feature_alpha_dropout, _saturate, False, _channels),
):
    _form(_func, _apply, "training", _training, _dims, False)


@form("native_dropout")
def _native_dropout(input: Any, p: float, train: bool | None) -> Callable[..., Any]:
    torch.native_dropout(input.detach(), p, train)
    layout = layout_of(input)
    mask, on, linear = _mask_layout(layout, input.ndim), train is not False, _linear(_scale, layout)

    def run(input: Any, p: float, train: bool | None) -> tuple[Any, Any]:
        """The result, and which elements were kept."""
        _check(p)
        kept = _kept(mask, p if on else 0)
        x = input if linear else settled(input)
        dropped = from_parts(x._layout, lambda local: _scale(local, kept, p if on else 0), x)
        return dropped, ShardedTensor._make(kept, mask)

    return run
