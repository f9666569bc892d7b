"""Dropout of every kind.

What is kept is drawn by global position: equal on replicas, and the same on any mesh.

A call takes one random tensor from the stream (`sharding.tensor.random`): of the input's shape or,
where whole channels are dropped, of its first dims. Plain dropout is linear in its input and keeps
sums pending; alpha dropout adds a constant, and reduces first.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ....layout.layout import Layout
from ....layout.spec import P
from ....tensor import random
from ....tensor.sharded_tensor import ShardedTensor
from ...sliced_from import check_base
from ..decomposition_utils import from_parts, layout_of, reduce_pending
from ..registry import decomposition

# the negative of the limit of SELU (Klambauer et al. 2017, "alpha prime")
_SELU_FLOOR = 1.7580993408473766

Apply = Callable[[Tensor, Tensor, float], Tensor]


def _scale(x: Tensor, keep_mask: Tensor, p: float) -> Tensor:
    return x * keep_mask * _keeping(p)


def _scale_(x: Tensor, keep_mask: Tensor, p: float) -> Tensor:
    return x.mul_(keep_mask).mul_(_keeping(p))


def _keeping(p: float) -> float:
    """Return the factor that keeps the mean."""
    return 0.0 if p == 1 else 1 / (1 - p)


def _saturate(x: Tensor, keep_mask: Tensor, p: float) -> Tensor:
    """Set dropped elements to the limit of SELU, then scale and shift to keep mean and variance."""
    if p == 1:
        return x * 0
    a = _narrowing(p)
    return x * keep_mask * a + _shift(x, keep_mask, a, p)


def _saturate_(x: Tensor, keep_mask: Tensor, p: float) -> Tensor:
    if p == 1:
        return x.mul_(0)
    a = _narrowing(p)
    return x.mul_(keep_mask).mul_(a).add_(_shift(x, keep_mask, a, p))


def _narrowing(p: float) -> float:
    return ((_SELU_FLOOR**2 * p + 1) * (1 - p)) ** -0.5


def _shift(x: Tensor, keep_mask: Tensor, a: float, p: float) -> Tensor:
    return keep_mask.to(x.dtype).sub_(1).mul_(_SELU_FLOOR * a).add_(_SELU_FLOOR * a * p)


# -- masks -----------------------------------------------------------------------------------------


def _mask_layout(layout: Layout, dims: int) -> Layout:
    """Return the layout of the mask: that of the input in its first dims, then of size one."""
    cuts = [cut if d < dims else () for d, cut in enumerate(layout.spec.cuts)]
    shape = [n if d < dims else 1 for d, n in enumerate(layout.shape)]
    return Layout.of(layout.mesh, P.of_cuts(cuts, {}), shape, torch.bool)


# -- kinds -----------------------------------------------------------------------------------------


class _Kind(NamedTuple):
    """A kind of dropout.

    Attributes:
        apply: what it does with the mask.
        mask_dims: from the number of dims to that of the first ones which the mask has.
        switch, training: the name of the argument that switches it on, and its default.
        in_place: whether it always writes its operand.
    """

    apply: Apply
    mask_dims: Callable[[int], int]
    training: bool = True
    switch: str = "training"
    in_place: bool = False


def _every(ndim: int) -> int:
    return ndim


def _channels(ndim: int) -> int:
    """Return the number of dims of batch and channels."""
    return 2


_KINDS: dict[Any, _Kind] = {
    F.dropout: _Kind(_scale, _every),
    F.alpha_dropout: _Kind(_saturate, _every, training=False),
    # Batch and channels; channels alone where there is no batch dim.
    F.dropout1d: _Kind(_scale, lambda ndim: 2 if ndim == 3 else 1),
    F.dropout2d: _Kind(_scale, _channels),
    F.dropout3d: _Kind(_scale, lambda ndim: 2 if ndim == 5 else 1),
    F.feature_alpha_dropout: _Kind(_saturate, _channels, training=False),
}
for _name, _apply, _dims in (
    ("dropout", _scale, _every),
    ("alpha_dropout", _saturate, _every),
    ("feature_dropout", _scale, _channels),
    ("feature_alpha_dropout", _saturate, _channels),
):
    _KINDS[getattr(torch, _name)] = _Kind(_apply, _dims, switch="train")
    _KINDS[getattr(torch, f"{_name}_")] = _Kind(_apply, _dims, switch="train", in_place=True)


def _prepare(a: Any) -> Callable[[Any, float], Any]:
    kind, layout = _KINDS[a.func], layout_of(a.input)
    a.func(a.input.detach(), a.p, *a.switches, **a.named)  # raises torch's own errors
    switches = dict(zip((kind.switch, "inplace"), a.switches, strict=False)) | a.named
    if not switches.get(kind.switch, kind.training) or a.input.numel() == 0:
        return lambda input, p: input
    mask = _mask_layout(layout, kind.mask_dims(a.input.ndim))
    if kind.in_place or switches.get("inplace", False):
        return partial(_run_in_place, _writing(a.func, layout, kind.apply), mask)
    return partial(_run, kind.apply, _linear(kind.apply, layout), mask)


@decomposition(also=tuple(_KINDS), with_func=True, prepare=_prepare)
def _dropout(
    func: Any,
    prepared: Callable[[Any, float], Any],
    input: Any,
    p: float = 0.5,
    *switches: bool,
    **named: bool,
) -> Any:
    _check(p)
    return input if p == 0 else prepared(input, p)


def _linear(apply: Apply, layout: Layout) -> bool:
    """Return whether dropout may be applied to each rank's contribution to a pending value."""
    return apply is _scale and set(layout.pending.values()) <= {"sum", "avg"}


def _writing(func: Callable[..., Any], layout: Layout, apply: Apply) -> Apply:
    """Return the in-place variant of `apply`.

    Raises:
        ValueError: the operand would have to be reduced first.
    """
    if layout.pending and not _linear(apply, layout):
        raise ValueError(
            f"{func.__name__} in place on {layout}, while a reduction is pending; redistribute it "
            "first, or use the out-of-place form"
        )
    return _scale_ if apply is _scale else _saturate_


def _run(apply: Apply, linear: bool, mask: Layout, input: Any, p: float) -> Any:
    x = input if linear else reduce_pending(input)
    keep_mask = random.bernoulli(mask, 1 - p)
    return from_parts(x._layout, lambda local: apply(local, keep_mask, p), x)


def _run_in_place(apply: Apply, mask: Layout, input: Any, p: float) -> Any:
    check_base(input)
    keep_mask = random.bernoulli(mask, 1 - p)
    if input.mesh.coordinate is not None:
        apply(input._local, keep_mask, p)
        input._sync_requires_grad()
    return input


def _check(p: float) -> None:
    """Raise for an invalid p; a cached strategy serves every p."""
    if not 0 <= p <= 1:
        raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")


def _native(a: Any) -> tuple[Layout, bool, bool]:
    torch.native_dropout(a.input.detach(), a.p, a.train)
    layout = layout_of(a.input)
    return _mask_layout(layout, a.input.ndim), a.train is not False, _linear(_scale, layout)


@decomposition("native_dropout", prepare=_native)
def _native_dropout(
    prepared: tuple[Layout, bool, bool], input: Any, p: float, train: bool | None
) -> tuple[Any, Any]:
    """Return the result and the mask of elements that were kept."""
    _check(p)
    mask, on, linear = prepared
    p = p if on else 0
    keep_mask = random.bernoulli(mask, 1 - p)
    x = input if linear else reduce_pending(input)
    dropped = from_parts(x._layout, lambda local: _scale(local, keep_mask, p), x)
    return dropped, ShardedTensor._make(keep_mask, mask)
