"""Pooling: batch and channels may be split; over split space each rank fetches the windows of its
part of the result.
"""

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
from .window import Halo, Parts, Window, on_parts, per_dim, unless_empty


def _pooled(n: int, func: Parts, input: Tensor, **options: Any) -> Rule:
    """Return the rule for whole space."""
    return along_dims(input, _space(n, input), "1", bind=unless_empty(func), **options)


def _over_space(
    n: int, input: Tensor, result: Any, bind: Callable[..., Parts], **options: Any
) -> Callable[..., Any]:
    """Return the decomposition of a pooling whose space may be split."""
    run = on_parts(einrule("... -> ...", input, **options), result, _space(n, input), bind)
    return lambda input, *args, **kwargs: run(input)


def _space(n: int, input: Tensor) -> range:
    return range(input.ndim - n, input.ndim)


def _windows(
    n: int, input: Tensor, kernel_size: Any, stride: Any, padding: Any, dilation: Any = 1
) -> list[Window]:
    sizes = per_dim(kernel_size, n)
    strides = per_dim(stride, n) if stride is not None and stride != [] and stride != () else sizes
    parts = zip(
        input.shape[-n:], sizes, strides, per_dim(dilation, n), per_dim(padding, n), strict=True
    )
    return [Window(*part) for part in parts]


# -- the largest -----------------------------------------------------------------------------------


def _register_max(n: int, func: Parts) -> None:
    @decomposition_maker(also=(func,), rule=lambda a: _pooled(n, func, a.input))
    def make(
        input: Tensor,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        dilation: Any = 1,
        ceil_mode: bool = False,
        return_indices: bool = False,
    ) -> Callable[..., Any] | None:
        if not is_split(input, _space(n, input)):
            return None
        result = func(
            input.detach(),
            kernel_size,
            [] if stride is None else stride,
            padding,
            dilation,
            ceil_mode,
        )
        windows = _windows(n, input, kernel_size, stride, padding, dilation)
        return _over_space(n, input, result, partial(_bind_max, windows, ceil_mode))


def _bind_max(
    windows: Sequence[Window], ceil_mode: bool, targets: Sequence[Layout], results: Sequence[Layout]
) -> Parts:
    """Return torch's own function, with its own padding (less than any element), on elements that
    start with a window.

    Of its results those of this rank's part are kept.
    """
    n, (src, dst) = len(windows), (targets[0], results[0])
    space = range(len(dst.shape) - n, len(dst.shape))
    halo = Halo(
        src, dst, {d: partial(_from_first_window, w) for d, w in zip(space, windows, strict=True)}
    )
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
    split = [(d, w, *dst.box[d]) for d, w in zip(space, windows, strict=True) if src.spec.dims[d]]
    firsts = [0] * len(dst.shape)
    for d, w, start, stop in split:
        firsts[d] = _from_first_window(w, start, stop)[0]

    def mine(out: Tensor) -> Tensor:
        for d, w, start, stop in split:
            out = out.narrow(d, start - firsts[d] // w.stride, stop - start)
        return out

    if len(results) == 1:
        return lambda local: mine(pool(halo(local)))

    def with_indices(local: Tensor) -> Any:
        values, indices = pool(halo(local))
        return mine(values), _global_indices(
            mine(indices), halo.shape[-n:], firsts[-n:], src.shape[-n:]
        )

    return with_indices


def _from_first_window(window: Window, start: int, stop: int) -> tuple[int, int]:
    low, high = window.elements(start, stop)
    return low // window.stride * window.stride, high


def _global_indices(
    indices: Tensor, shape: Sequence[int], firsts: Sequence[int], whole: Sequence[int]
) -> Tensor:
    """Convert row-major indices in a part of this shape, which starts at `firsts`, to indices in
    the whole tensor.
    """
    total, scale = torch.zeros_like(indices), 1
    for size, first, length in reversed(list(zip(shape, firsts, whole, strict=True))):
        total += (indices % size + first) * scale
        indices, scale = indices // size, scale * length
    return total


# -- the mean --------------------------------------------------------------------------------------


def _register_avg(n: int, func: Parts) -> None:
    @decomposition_maker(also=(func,), rule=lambda a: _pooled(n, func, a.input, linear=((0,),)))
    def make(
        input: Tensor,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> Callable[..., Any] | None:
        if not is_split(input, _space(n, input)):
            return None
        over = () if divisor_override is None else (divisor_override,)
        result = func(
            input.detach(),
            kernel_size,
            [] if stride is None else stride,
            padding,
            ceil_mode,
            count_include_pad,
            *over,
        )
        windows = _windows(n, input, kernel_size, stride, padding)
        counts = partial(_counted, count_include_pad, per_dim(padding, n), divisor_override)
        return _over_space(n, input, result, partial(_bind_avg, windows, counts), linear=((0,),))


def _counted(
    include: bool, padding: Sequence[int], override: int | None, window: Window, dim: int, at: int
) -> int:
    """Return the number of elements that count in the mean at one position along a dim."""
    if override is not None:
        return override if dim == 0 else 1
    start = at * window.stride - window.before
    if include:
        return min(start + window.size, window.length + padding[dim]) - start
    return min(start + window.size, window.length) - max(start, 0)


def _padded(windows: Sequence[Window], src: Layout, dst: Layout) -> Callable[[Tensor], Tensor]:
    """Return a function that fetches elements and adds zeros where windows extend into the
    padding.
    """
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
    """Return the function that scales a mean over all elements of a window to one over those that
    count, in torch's own precision.
    """
    n, dtype, (result,) = len(windows), targets[0].dtype, results
    halo = _padded(windows, targets[0], result)
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


def _adaptive_avg(n: int, a: Any) -> Callable[[Any], Any] | None:
    """Return the steps over split dims: to one element, a mean; to an even divisor, windows of
    equal size.
    """
    input, sizes, space = a.input, _sizes(n, a.input, a.output_size), _space(n, a.input)
    split = [is_split(input, [d]) for d in space]
    ones = [d for d, size in zip(space, sizes, strict=True) if size == 1]
    means = ones if is_split(input, ones) else []
    windows = [
        old // size if s and size > 1 and old % size == 0 else 1
        for old, size, s in zip(input.shape[-n:], sizes, split, strict=True)
    ]
    if not means and windows == [1] * n:
        return None if not any(split) or sizes != list(input.shape[-n:]) else torch.clone
    return partial(_averaged, n, means, windows, sizes)


def _register_adaptive_avg(n: int, func: Parts) -> None:
    @decomposition(
        also=(func,),
        check=func,
        prepare=partial(_adaptive_avg, n),
        rule=lambda a: _pooled(n, func, a.input, linear=((0,),)),
    )
    def run(averaged: Callable[[Any], Any], input: Any, output_size: Any) -> Any:
        return averaged(input)


def _averaged(
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


def _register_adaptive_max(n: int, func: Parts) -> None:
    """Register a pooling over split dims where all windows are equal."""
    # torch.adaptive_max_pool1d returns the indices too, unlike its namesake in F.
    indices = func is torch.adaptive_max_pool1d or "with_indices" in getattr(func, "__name__", "")

    @decomposition_maker(also=(func,), rule=lambda a: _pooled(n, func, a.input))
    def make(
        input: Tensor, output_size: Any, return_indices: bool = False
    ) -> Callable[..., Any] | None:
        sizes = _sizes(n, input, output_size)
        even = all(
            size > 0 and old % size == 0 for old, size in zip(input.shape[-n:], sizes, strict=True)
        )
        if not even or not is_split(input, _space(n, input)):
            return None
        windows = [old // size for old, size in zip(input.shape[-n:], sizes, strict=True)]
        pool = partial(getattr(F, f"max_pool{n}d"), kernel_size=windows, return_indices=indices)
        return lambda input, *args, **kwargs: pool(input)


# -- windows at random -----------------------------------------------------------------------------


def _fractional_rule(n: int, func: Parts, a: Any) -> Rule:
    batch = "b" if a.input.ndim == n + 2 else ""
    pattern = f"{batch} c {dim_names(n, range(n), 'h')}, {batch or 1} c [s] -> {batch} c {'1 ' * n}"
    return einrule(pattern, a.input, a._random_samples, bind=unless_empty(func))


def _register_fractional(n: int, func: Parts) -> None:
    """Register a pooling that draws its samples where none are given, the same on every mesh."""

    @decomposition_maker(also=(func,), rule=partial(_fractional_rule, n, func))
    def make(
        input: Tensor,
        kernel_size: Any,
        output_size: Any = None,
        output_ratio: Any = None,
        return_indices: bool = False,
        _random_samples: Tensor | None = None,
    ) -> Parts | None:
        if _random_samples is not None:
            return None
        batch = [1] if input.ndim == n + 1 else []
        layout, spec = layout_of(input), layout_of(input).spec
        cuts = [*[() for _ in batch], *spec.cuts[:-n], ()]
        drawn = Layout.of(
            layout.mesh, P.of_cuts(cuts, {}), (*batch, *input.shape[:-n], n), input.dtype
        )

        def run(input: Any, *args: Any, **kwargs: Any) -> Any:
            kwargs = {name: value for name, value in kwargs.items() if name != "_random_samples"}
            return func(
                input,
                *args[:4],
                **kwargs,
                _random_samples=ShardedTensor._make(uniform(drawn), drawn),
            )

        return run


def _register_unpool(n: int, func: Parts) -> None:
    space = dim_names(n, range(n), "h")

    @rule(also=(func,))
    def make(input: Tensor, indices: Tensor, *args: Any, **kwargs: Any) -> Rule:
        pattern = f"... {space}, ... {space} -> ... {'1 ' * n}"
        return einrule(pattern, input, indices, linear=((0,),), bind=unless_empty(func, True))


# -- other norms -----------------------------------------------------------------------------------


def _register_lp(n: int, func: Any) -> None:
    """Register torch's own steps: powers, a mean over windows, and a root."""
    body = body_of(func)

    @decomposition(
        also=(func,),
        when=lambda a: is_split(a.input, _space(n, a.input)),
        rule=lambda a: _pooled(n, func, a.input),
    )
    def run(input: Any, *args: Any, **kwargs: Any) -> Any:
        return body(input, *args, **kwargs)


# -- the table -------------------------------------------------------------------------------------

_FAMILIES = {
    "max_pool{}d": _register_max,
    "max_pool{}d_with_indices": _register_max,
    "avg_pool{}d": _register_avg,
    "lp_pool{}d": _register_lp,
    "adaptive_avg_pool{}d": _register_adaptive_avg,
    "adaptive_max_pool{}d": _register_adaptive_max,
    "adaptive_max_pool{}d_with_indices": _register_adaptive_max,
    "fractional_max_pool{}d": _register_fractional,
    "fractional_max_pool{}d_with_indices": _register_fractional,
    "max_unpool{}d": _register_unpool,
}
for _name, _register in _FAMILIES.items():
    for _n in (1, 2, 3):
        for _func in {
            getattr(owner, _name.format(_n))
            for owner in (torch, F)
            if hasattr(owner, _name.format(_n))
        }:
            _register(_n, _func)
