"""Images: resizing, sampling, and moving elements between channels and space."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ....layout.layout import Layout
from ..decomposition_utils import is_split, layout_of
from ..notation import Rule, dim_names, einrule
from ..registry import decomposition_maker, rule, rules
from .window import Halo, Parts, on_parts, per_dim, unless_empty

# -- resizing --------------------------------------------------------------------------------------


def _interpolate_rule(a: Any) -> Rule:
    n, linear = a.input.ndim - 2, ((0,),) if a.input.is_floating_point() else ()
    bind = unless_empty(F.interpolate, True)
    whole = dim_names(n, range(n), "h")
    return einrule(f"b c {whole} -> b c {'1 ' * n}", a.input, linear=linear, bind=bind)


@decomposition_maker("interpolate", rule=_interpolate_rule)
def _interpolate(
    input: Tensor,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> Callable[..., Any] | None:
    """Over split space fetch the elements that this rank's part of the result repeats or mixes."""
    n, known = input.ndim - 2, ("nearest", "nearest-exact", "area", *_LINEAR)
    if mode not in known or antialias or not is_split(input, range(2, input.ndim)):
        return None
    result = F.interpolate(
        input.detach(), size, scale_factor, mode, align_corners, recompute_scale_factor
    )
    if mode == "area":
        average = getattr(F, f"adaptive_avg_pool{n}d")
        sizes = list(result.shape[2:])
        return lambda input, *args, **kwargs: average(input, sizes)
    scales: Any = [None] * n if scale_factor is None else per_dim(scale_factor, n)
    lengths = result.shape[2:] if scale_factor is None else [None] * n
    taps, kind = (_linear, "linear") if mode in _LINEAR else (_nearest, mode)
    options = {
        "mode": kind,
        "align_corners": align_corners,
        "recompute_scale_factor": recompute_scale_factor,
    }
    dims = zip(input.shape[2:], lengths, scales, strict=True)
    like: dict[str, Any] = {
        "dtype": _computed_in(input.dtype),
        "device": layout_of(input).mesh.device,  # type: ignore[attr-defined]
    }
    bind = partial(_bind_taps, [taps(like, *dim, **options) for dim in dims])
    run = on_parts(einrule("... -> ...", input, linear=((0,),)), result, range(2, input.ndim), bind)
    return lambda input, *args, **kwargs: run(input)


_LINEAR = ("linear", "bilinear", "trilinear")


class Taps(NamedTuple):
    """The elements of the operand that each element of the result is computed from, along one dim.

    Attributes:
        first, last: the indices of the one or two elements.
        weights: of these two; None if the result repeats one.
    """

    first: list[int]
    last: list[int]
    weights: tuple[Tensor, Tensor] | None = None

    def reach(self, start: int, stop: int) -> tuple[int, int]:
        """Return the elements that results [start, stop) are computed from."""
        return (self.first[start], self.last[stop - 1] + 1) if start < stop else (0, 0)


def _nearest(
    like: dict[str, Any], length: int, size: int | None, scale: float | None, **options: Any
) -> Taps:
    """Find the elements that torch repeats by interpolating the indices of this dim."""
    numbers = torch.arange(length, **like).view(1, 1, -1)
    picked = F.interpolate(numbers, size, scale, **options).flatten().long().tolist()
    return Taps(picked, picked)


def _linear(
    like: dict[str, Any], length: int, size: int | None, scale: float | None, **options: Any
) -> Taps:
    """Find torch's weights along this dim by interpolating ones at every third index, thrice."""
    numbers = torch.arange(length)
    probes = torch.stack([numbers, *[numbers % 3 == offset for offset in range(3)]]).to(**like)
    position, *weights = F.interpolate(probes[None], size, scale, **options)[0]
    by_offset, near = torch.stack(weights), position.round().long()
    at = torch.arange(len(near), device=near.device)
    first = near - (by_offset[(near - 1) % 3, at] != 0).long()
    last = (first + 1).clamp_max(length - 1)
    return Taps(
        first.tolist(), last.tolist(), (by_offset[first % 3, at], by_offset[(first + 1) % 3, at])
    )


def _computed_in(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which torch computes positions and weights for an image of this dtype."""
    return dtype if dtype is torch.float64 else torch.float32


def _bind_taps(taps: Sequence[Taps], targets: Sequence[Layout], results: Sequence[Layout]) -> Parts:
    (src,), (dst,) = targets, results
    halo = Halo(src, dst, {d: each.reach for d, each in enumerate(taps, 2)})
    device: Any = dst.mesh.device  # type: ignore[attr-defined]
    steps = [_step(each, d, src, dst, device) for d, each in enumerate(taps, 2)]
    high = _computed_in(src.dtype) if any(each.weights for each in taps) else src.dtype

    def local(x: Tensor) -> Tensor:
        x = halo(x).to(high)
        for step in steps:
            x = step(x)
        return x.to(src.dtype)

    return local


def _step(
    taps: Taps, dim: int, src: Layout, dst: Layout, device: Any
) -> Callable[[Tensor], Tensor]:
    """Return the function that interpolates one dim of this rank's part."""
    own = slice(*dst.box[dim])
    start = taps.reach(*dst.box[dim])[0] if src.spec.dims[dim] else 0
    first, last = (
        torch.tensor(numbers[own], dtype=torch.int64, device=device) - start for numbers in taps[:2]
    )
    if taps.weights is None:
        return lambda x: x.index_select(dim, first)
    w, v = (weight[own].view(-1, *[1] * (len(dst.shape) - 1 - dim)) for weight in taps.weights)
    return lambda x: x.index_select(dim, first) * w + x.index_select(dim, last) * v


# -- sampling --------------------------------------------------------------------------------------


@rule("grid_sample")
def _grid_sample(input: Tensor, grid: Tensor, *args: Any, **kwargs: Any) -> Rule:
    n = input.ndim - 2
    whole, points = dim_names(n, range(n), "h"), dim_names(n, prefix="p")
    pattern = f"b c {whole}, b {points} [s] -> b c {points}"
    return einrule(pattern, input, grid, linear=((0,),), bind=unless_empty(F.grid_sample))


@rule("affine_grid")
def _affine_grid(theta: Tensor, size: Sequence[int], align_corners: bool | None = None) -> Rule:
    n = len(size) - 2
    return einrule(f"b [i] [j] -> b {'1 ' * n} 1", theta, linear=((0,),), bind=_bind_affine_grid)


def _bind_affine_grid(targets: Sequence[Layout], results: Sequence[Layout]) -> Parts:
    batch = results[0].local_shape[0]

    def local(theta: Tensor, size: Sequence[int], *args: Any, **kwargs: Any) -> Tensor:
        return F.affine_grid(theta, [batch, *size[1:]], *args, **kwargs)

    return unless_empty(local, True)(targets, results)


# -- between channels and space --------------------------------------------------------------------


def _moves(pattern: str, input: Tensor, whole: str = "", **options: Any) -> Rule:
    """Return the rule of an operator that only moves elements; factors in `whole` are not split."""
    options = {"linear": ((0,),), "transparent": True, **options}
    rule = einrule(pattern, input, **options)
    return replace(rule, whole=rule.whole | set(whole.split()))


@rule("pixel_shuffle")
def _pixel_shuffle(input: Tensor, upscale_factor: int) -> Rule:
    (c, h, w), r = input.shape[-3:], upscale_factor
    sizes = {"c": c // r**2, "h": h, "w": w, "p": r, "q": r}
    pattern, bind = "... (c p q) h w -> ... c (h p) (w q)", unless_empty(torch.pixel_shuffle, True)
    return _moves(pattern, input, "p q", sizes=sizes, bind=bind)


@rule("pixel_unshuffle")
def _pixel_unshuffle(input: Tensor, downscale_factor: int) -> Rule:
    (c, h, w), r = input.shape[-3:], downscale_factor
    sizes = {"c": c, "h": h // r, "w": w // r, "p": r, "q": r}
    pattern = "... c (h p) (w q) -> ... (c p q) h w"
    bind = unless_empty(torch.pixel_unshuffle, True)
    return _moves(pattern, input, "p q", sizes=sizes, bind=bind)


rules(
    {"channel_shuffle native_channel_shuffle(input, groups)": "b [c] ... -> b 1 ..."},
    linear=((0,),),
    transparent=True,
    bind=unless_empty(torch.channel_shuffle, True),
)


@rule("F.unfold")
def _unfold(
    input: Tensor, kernel_size: Any, dilation: Any = 1, padding: Any = 0, stride: Any = 1
) -> Rule:
    sizes = {"c": input.shape[-3], "k": math.prod(per_dim(kernel_size, 2))}
    options = {"sizes": sizes, "transparent": False, "bind": unless_empty(F.unfold, True)}
    return _moves("... c [h] [w] -> ... (c k) 1", input, "k", **options)


@rule("F.fold")
def _fold(
    input: Tensor,
    output_size: Any,
    kernel_size: Any,
    dilation: Any = 1,
    padding: Any = 0,
    stride: Any = 1,
) -> Rule:
    count = math.prod(per_dim(kernel_size, 2))
    sizes = {"c": input.shape[-2] // count, "k": count}
    options = {"sizes": sizes, "transparent": False, "bind": unless_empty(F.fold, True)}
    return _moves("... (c k) [l] -> ... c 1 1", input, "k", **options)
