"""Pooling: batch and channels may be split; over split space each rank fetches its windows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ....layout.layout import Layout
from ....layout.spec import P
from ....tensor.random import uniform
from ....tensor.sharded_tensor import ShardedTensor
from ..decomposition_utils import body_of, is_split, layout_of, reduce_pending
from ..notation import Rule, along_dims, dim_names, einrule
from ..registry import decomposition, decomposition_maker, rule
from .window import (
    Halo,
    Parts,
    Window,
    names_by_dims,
    on_parts,
    per_dim,
    space_dims,
    unless_empty,
)


def _rule_of_pool(a: Any, **options: Any) -> Rule:
    """Return the rule for whole space."""
    return along_dims(a.input, _space(a.func, a.input), "1", bind=unless_empty(a.func), **options)


def _over_space(
    func: Parts, input: Tensor, result: Any, bind: Callable[..., Parts], **options: Any
) -> Callable[..., Any]:
    """Return the decomposition of a pooling whose space may be split."""
    run = on_parts(einrule("... -> ...", input, **options), result, _space(func, input), bind)
    return lambda input, *args, **kwargs: run(input)


def _space(func: Parts, input: Tensor) -> range:
    return range(input.ndim - space_dims(func), input.ndim)


def _windows(
    func: Parts, input: Tensor, kernel_size: Any, stride: Any, padding: Any, dilation: Any = 1
) -> list[Window]:
    n = space_dims(func)
    sizes = per_dim(kernel_size, n)
    strides = per_dim(stride, n) if stride is not None and stride != [] and stride != () else sizes
    parts = zip(
        input.shape[-n:], sizes, strides, per_dim(dilation, n), per_dim(padding, n), strict=True
    )
    return [Window(*part) for part in parts]


# -- the largest -----------------------------------------------------------------------------------


@decomposition_maker(
    *names_by_dims("max_pool{}d", "max_pool{}d_with_indices"), with_func=True, rule=_rule_of_pool
)
def _max(
    func: Parts,
    input: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Callable[..., Any] | None:
    if not is_split(input, _space(func, input)):
        return None
    strides = [] if stride is None else stride
    result = func(input.detach(), kernel_size, strides, padding, dilation, ceil_mode)
    windows = _windows(func, input, kernel_size, stride, padding, dilation)
    return _over_space(func, input, result, partial(_bind_max, windows, ceil_mode))


def _bind_max(
    windows: Sequence[Window], ceil_mode: bool, targets: Sequence[Layout], results: Sequence[Layout]
) -> Parts:
    """Return torch's own function, with its own padding, on elements that start with a window.

    The padding is less than any element.

    Of its results those of this rank's part are kept.
    """
    n, src, dst = len(windows), targets[0], results[0]
    by_dim = dict(enumerate(windows, len(dst.shape) - n))
    halo = Halo(src, dst, {d: partial(_from_first_window, w) for d, w in by_dim.items()})
    pool = partial(
        getattr(F, f"max_pool{n}d"),
        kernel_size=[w.size for w in windows],
        stride=[w.stride for w in windows],
        ceil_mode=ceil_mode,
        padding=[w.before for w in windows],
        dilation=[w.dilation for w in windows],
        return_indices=len(results) == 2,
    )
    if 0 in dst.local_shape:
        empty = unless_empty(pool)(targets, results)
        return lambda local: empty(halo(local))
    firsts, own = [0] * n, [slice(None)] * len(dst.shape)
    for i, (d, w) in enumerate(by_dim.items()):
        if src.spec.dims[d]:
            start, stop = dst.box[d]
            firsts[i] = _from_first_window(w, start, stop)[0]
            own[d] = slice(start - firsts[i] // w.stride, stop - firsts[i] // w.stride)

    def local(part: Tensor) -> Any:
        if len(results) == 1:
            return pool(halo(part))[tuple(own)]
        values, indices = (x[tuple(own)] for x in pool(halo(part)))
        return values, _global_indices(indices, halo.shape[-n:], firsts, src.shape[-n:])

    return local


def _from_first_window(window: Window, start: int, stop: int) -> tuple[int, int]:
    low, high = window.elements(start, stop)
    return low // window.stride * window.stride, high


def _global_indices(
    indices: Tensor, shape: Sequence[int], firsts: Sequence[int], whole: Sequence[int]
) -> Tensor:
    """Convert row-major indices in a part that starts at `firsts` to those in the whole tensor."""
    total, scale = torch.zeros_like(indices), 1
    for size, first, length in reversed(list(zip(shape, firsts, whole, strict=True))):
        total += (indices % size + first) * scale
        indices, scale = indices // size, scale * length
    return total


# -- the mean --------------------------------------------------------------------------------------


@decomposition_maker(
    *names_by_dims("avg_pool{}d"), with_func=True, rule=lambda a: _rule_of_pool(a, linear=((0,),))
)
def _avg(
    func: Parts,
    input: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Callable[..., Any] | None:
    if not is_split(input, _space(func, input)):
        return None
    options = [[] if stride is None else stride, padding, ceil_mode, count_include_pad]
    if divisor_override is not None:
        options.append(divisor_override)
    result = func(input.detach(), kernel_size, *options)
    windows = _windows(func, input, kernel_size, stride, padding)
    counts = partial(
        _count_of_window, count_include_pad, per_dim(padding, len(windows)), divisor_override
    )
    return _over_space(func, input, result, partial(_bind_avg, windows, counts), linear=((0,),))


def _count_of_window(
    include: bool, padding: Sequence[int], override: int | None, window: Window, dim: int, at: int
) -> int:
    """Return the number of elements that count in the mean at one position along a dim."""
    if override is not None:
        return override if dim == 0 else 1
    start = at * window.stride - window.before
    if include:
        return min(start + window.size, window.length + padding[dim]) - start
    return min(start + window.size, window.length) - max(start, 0)


def _padded_halo(windows: Sequence[Window], src: Layout, dst: Layout) -> Callable[[Tensor], Tensor]:
    """Return a function that fetches elements, with zeros where windows reach into the padding."""
    first = len(dst.shape) - len(windows)
    halo = Halo(src, dst, {first + d: w.elements for d, w in enumerate(windows)})
    if 0 in dst.local_shape:
        return halo
    pads = [w.padding(*i) for w, i in zip(windows, dst.box[first:], strict=True)]
    flat = [max(0, p) for pair in reversed(pads) for p in pair]
    return (lambda local: F.pad(halo(local), flat)) if any(flat) else halo


def _bind_avg(
    windows: Sequence[Window],
    counts: Callable[..., int],
    targets: Sequence[Layout],
    results: Sequence[Layout],
) -> Parts:
    """Return the mean over windows, scaled to the elements that count, in torch's precision."""
    n, dtype, (result,) = len(windows), targets[0].dtype, results
    halo = _padded_halo(windows, targets[0], result)
    if 0 in result.local_shape:
        empty = unless_empty(halo)(targets, results)
        return lambda local: empty(halo(local))
    device, high = result.mesh.device, torch.float32 if dtype.itemsize < 4 else dtype  # type: ignore[attr-defined]
    factors = []
    for d, (w, interval) in enumerate(zip(windows, result.box[-n:], strict=True)):
        ratios = [w.size / counts(w, d, at) for at in range(*interval)]
        if set(ratios) != {1.0}:
            factors.append(
                torch.tensor(ratios, dtype=high, device=device).view(-1, *[1] * (n - 1 - d))
            )
    pool = partial(
        getattr(F, f"avg_pool{n}d"),
        kernel_size=[w.size for w in windows],
        stride=[w.stride for w in windows],
    )
    if not factors:
        return lambda local: pool(halo(local))

    def scaled(local: Tensor) -> Tensor:
        out = pool(halo(local).to(high))
        for factor in factors:
            out = out * factor
        return out.to(dtype)

    return scaled


# -- to a given size -------------------------------------------------------------------------------


def _sizes(n: int, input: Tensor, output_size: Any) -> list[int]:
    """Return the size of each dim of space after an adaptive pooling; None keeps a dim's own."""
    own = input.shape[-n:]
    return [
        size if size is not None else old
        for size, old in zip(per_dim(output_size, n), own, strict=True)
    ]


def _adaptive_avg_steps(a: Any) -> Callable[[Any], Any] | None:
    """Return the steps over split dims: a mean to one element, equal windows to an even divisor."""
    input, n, space = a.input, space_dims(a.func), _space(a.func, a.input)
    sizes = _sizes(n, input, a.output_size)
    split = [is_split(input, [d]) for d in space]
    ones = [d for d, size in zip(space, sizes, strict=True) if size == 1]
    means = ones if is_split(input, ones) else []
    windows = [
        old // size if s and size > 1 and old % size == 0 else 1
        for old, size, s in zip(input.shape[-n:], sizes, split, strict=True)
    ]
    if not means and windows == [1] * n:
        return None if not any(split) or sizes != list(input.shape[-n:]) else torch.clone
    return partial(_average, n, means, windows, sizes)


@decomposition(
    *names_by_dims("adaptive_avg_pool{}d"),
    with_func=True,
    check=True,
    prepare=_adaptive_avg_steps,
    rule=lambda a: _rule_of_pool(a, linear=((0,),)),
)
def _adaptive_avg(func: Parts, steps: Callable[[Any], Any], input: Any, output_size: Any) -> Any:
    return steps(input)


def _average(
    n: int, means: Sequence[int], windows: Sequence[int], sizes: Sequence[int], input: Any
) -> Any:
    out = input.float() if input.dtype in (torch.float16, torch.bfloat16) else input
    if means:
        out = reduce_pending(out.mean(means, keepdim=True))
    if set(windows) != {1}:
        out = getattr(F, f"avg_pool{n}d")(out, windows)
    if list(out.shape[-n:]) != list(sizes):
        out = getattr(F, f"adaptive_avg_pool{n}d")(out, sizes)
    return out.to(input.dtype)


@decomposition_maker(
    *names_by_dims("adaptive_max_pool{}d", "adaptive_max_pool{}d_with_indices"),
    with_func=True,
    rule=_rule_of_pool,
)
def _adaptive_max(
    func: Parts, input: Tensor, output_size: Any, return_indices: bool = False
) -> Callable[..., Any] | None:
    """Pool over split dims where all windows are equal."""
    n = space_dims(func)
    lengths = list(zip(input.shape[-n:], _sizes(n, input, output_size), strict=True))
    even = all(size > 0 and old % size == 0 for old, size in lengths)
    if not even or not is_split(input, _space(func, input)):
        return None
    # torch.adaptive_max_pool1d returns the indices too, unlike its namesake in F.
    indices = func is torch.adaptive_max_pool1d or "with_indices" in func.__name__
    windows = [old // size for old, size in lengths]
    pool = partial(getattr(F, f"max_pool{n}d"), kernel_size=windows, return_indices=indices)
    return lambda input, *args, **kwargs: pool(input)


# -- windows at random -----------------------------------------------------------------------------


def _fractional_rule(a: Any) -> Rule:
    n = space_dims(a.func)
    batch = "b" if a.input.ndim == n + 2 else ""
    pattern = f"{batch} c {dim_names(n, range(n), 'h')}, {batch or 1} c [s] -> {batch} c {'1 ' * n}"
    return einrule(pattern, a.input, a._random_samples, bind=unless_empty(a.func))


@decomposition_maker(
    *names_by_dims("fractional_max_pool{}d", "fractional_max_pool{}d_with_indices"),
    with_func=True,
    rule=_fractional_rule,
)
def _fractional(
    func: Parts,
    input: Tensor,
    kernel_size: Any,
    output_size: Any = None,
    output_ratio: Any = None,
    return_indices: bool = False,
    _random_samples: Tensor | None = None,
) -> Parts | None:
    """Draw samples where none are given, the same on every mesh."""
    if _random_samples is not None:
        return None
    n, layout = space_dims(func), layout_of(input)
    batch = [1] if input.ndim == n + 1 else []
    spec = P.of_cuts([*[() for _ in batch], *layout.spec.cuts[:-n], ()], {})
    drawn = Layout.of(layout.mesh, spec, (*batch, *input.shape[:-n], n), input.dtype)

    def run(input: Any, *args: Any, **kwargs: Any) -> Any:
        samples = ShardedTensor._make(uniform(drawn), drawn)
        return func(input, *args[:4], **{**kwargs, "_random_samples": samples})

    return run


@rule(*names_by_dims("max_unpool{}d"), with_func=True)
def _unpool(func: Parts, input: Tensor, indices: Tensor, *args: Any, **kwargs: Any) -> Rule:
    n = space_dims(func)
    space = dim_names(n, range(n), "h")
    pattern = f"... {space}, ... {space} -> ... {'1 ' * n}"
    return einrule(pattern, input, indices, linear=((0,),), bind=unless_empty(func, True))


# -- other norms -----------------------------------------------------------------------------------


@decomposition(
    *names_by_dims("lp_pool{}d"),
    with_func=True,
    when=lambda a: is_split(a.input, _space(a.func, a.input)),
    rule=_rule_of_pool,
)
def _lp(func: Any, input: Any, *args: Any, **kwargs: Any) -> Any:
    """Take torch's own steps: powers, a mean over windows, and a root."""
    return body_of(func)(input, *args, **kwargs)
