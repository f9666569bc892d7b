"""Convolutions: channels may be split as in a matrix product; for split space ranks fetch halos."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ....layout.layout import Layout
from ..decomposition_utils import is_split
from ..notation import Rule, dim_names, einrule
from ..registry import decomposition, rules
from .window import Halo, Parts, Window, is_empty, names_by_dims, on_parts, per_dim, space_dims

_LINEAR: dict[str, Any] = {"linear": ((0, 2), (1, 2)), "additive": (2,)}


def _is_transposed(func: Any) -> bool:
    return "transpose" in func.__name__


def _rule(a: Any, whole: bool, **options: Any) -> Rule:
    """Return the rule of a convolution.

    Input channels are summed over; those of one group stay together unless every rank has whole
    groups.

    With `whole` the spatial dims must not be split, else they may be.
    """
    n = space_dims(a.func)
    transposed = _is_transposed(a.func)
    operands = (a.input, a.weight, a.bias)
    batch = "b" if a.input.ndim == n + 2 else ""
    into, out = ("i", "o") if a.groups == 1 else ("(g i)", "(g o)")
    space, kernel = dim_names(n, range(n) if whole else (), "h"), dim_names(n, range(n), "k")
    weight = f"{into} o {kernel}" if transposed else f"{out} i {kernel}"
    after = " ".join("1" if whole else f"h{d}" for d in range(n))
    channels = a.weight.shape[1] * a.groups if transposed else a.weight.shape[0]
    sizes = {"g": a.groups, "i": a.input.shape[-n - 1] // a.groups, "o": channels // a.groups}
    pattern = f"{batch} {into} {space}, {weight}, {out} -> {batch} {out} {after}"
    return einrule(pattern, *operands, sizes=sizes, **_LINEAR, **options)


def _local_groups(func: Any, targets: Sequence[Layout], result: Layout) -> int:
    """Return the number of groups that this rank's channels make up."""
    channels = (result if _is_transposed(func) else targets[0]).local_shape[-space_dims(func) - 1]
    return channels // targets[1].local_shape[1]


def _of_nothing(
    func: Parts,
    result: Layout,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *_: Any,
    **__: Any,
) -> Tensor:
    """Return the result of a part without input channels, or of an empty one.

    Its autograd graph has an unused convolution of single elements, so that it has the same nodes
    as on other ranks, and backward communicates alike on all, to every order.
    """
    n, kernel = space_dims(func), weight.shape[2:]
    single = _resize(input, [1] * (input.ndim - n) + [*kernel]), _resize(weight, [1, 1, *kernel])
    out = func(*single, None if bias is None else _resize(bias, [1]))
    return _plus(bias, _with_graph_of(out, result), n)


def _plus(bias: Tensor | None, out: Tensor, n: int) -> Tensor:
    return out if bias is None else out + bias.to(out.dtype).view(-1, *[1] * n)


def _resize(x: Tensor, sizes: Sequence[int]) -> Tensor:
    """Return the tensor cut, or padded with zeros, to these sizes.

    What is only cut is a view: if autograd saves it, it has the memory of a unit's gathered
    parameters, as on other ranks.
    """
    cut = x[tuple(map(slice, sizes))]
    missing = [size - n for n, size in zip(cut.shape, sizes, strict=True)]
    return F.pad(cut, [m for size in reversed(missing) for m in (0, size)]) if any(missing) else cut


def _with_graph_of(out: Tensor, result: Layout) -> Tensor:
    return out.new_zeros(result.local_shape) + out.flatten()[:0].sum()


# -- convolution -----------------------------------------------------------------------------------


def _bind(func: Parts, groups: int, targets: Sequence[Layout], results: Sequence[Layout]) -> Parts:
    """Return torch's own function, with the number of this rank's groups."""
    if is_empty(*targets, *results):
        return partial(_of_nothing, func, results[0])
    local, at = _local_groups(func, targets, results[0]), 7 if _is_transposed(func) else 6

    def run(*args: Any, **kwargs: Any) -> Tensor:
        if len(args) > at:
            return func(*args[:at], local, *args[at + 1 :], **kwargs)
        return func(*args, **{**kwargs, "groups": local})

    return func if local == groups else run


def _windows(a: Any) -> list[Window]:
    n, padding = space_dims(a.func), a.padding
    sizes, dilations = a.weight.shape[2:], per_dim(a.dilation, n)
    if padding == "same":
        padding = [d * (k - 1) // 2 for k, d in zip(sizes, dilations, strict=True)]
    before = per_dim(0 if padding == "valid" else padding, n)
    parts = zip(a.input.shape[-n:], sizes, per_dim(a.stride, n), dilations, before, strict=True)
    return [Window(*part) for part in parts]


def _bind_halo(
    func: Parts, windows: Sequence[Window], targets: Sequence[Layout], results: Sequence[Layout]
) -> Parts:
    n = len(windows)
    first = len(results[0].shape) - n
    halo = Halo(targets[0], results[0], {first + d: w.elements for d, w in enumerate(windows)})
    if is_empty(*targets[1:], *results) or 0 in halo.shape[:first]:
        return lambda x, *rest: _of_nothing(func, results[0], halo(x), *rest)
    groups = _local_groups(func, targets, results[0])
    pads = []
    for window, part in zip(windows, results[0].box[first:], strict=True):
        before, after = window.padding(*part)
        pads.append((before, max(0, after)))  # elements after the last window need none
    even = [before if before == after else 0 for before, after in pads]
    odd = [p for pair in reversed(pads) for p in ((0, 0) if pair[0] == pair[1] else pair)]
    stride, dilation = [w.stride for w in windows], [w.dilation for w in windows]

    def local(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        x = halo(x)
        return func(F.pad(x, odd) if any(odd) else x, weight, bias, stride, even, dilation, groups)

    return local


def _over_space(a: Any) -> Callable[..., Any] | None:
    """Return the function that runs the convolution over split space; None if it is not split."""
    dims = range(a.input.ndim - space_dims(a.func), a.input.ndim)
    if not is_split(a.input, dims):
        return None
    result = a.func(**{**vars(a), "input": a.input.detach(), "weight": a.weight.detach()})
    bind = partial(_bind_reach if _is_transposed(a.func) else _bind_halo, a.func, _windows(a))
    run = on_parts(_rule(a, False), result, dims, bind)
    return run if a.bias is not None else lambda input, weight, _: run(input, weight)


def _whole_space(a: Any) -> Rule:
    return _rule(a, True, bind=partial(_bind, a.func, a.groups))


@decomposition(*names_by_dims("conv{}d"), with_func=True, prepare=_over_space, rule=_whole_space)
def _conv(
    func: Any,
    over_space: Any,
    input: Any,
    weight: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Any:
    return over_space(input, weight, bias)


rules(
    {"conv_tbc(input, weight, bias, pad=0)": "[t] b i, [k] i o, o -> 1 b o"},
    bind=lambda targets, results: (
        partial(_tbc_of_nothing, results[0]) if is_empty(*targets, *results) else torch.conv_tbc
    ),
    **_LINEAR,
)


def _tbc_of_nothing(
    result: Layout, input: Tensor, weight: Tensor, bias: Tensor, pad: int = 0
) -> Tensor:
    sizes = [len(weight), 1, 1]
    single = torch.conv_tbc(_resize(input, sizes), _resize(weight, sizes), _resize(bias, [1]))
    out = _with_graph_of(single, result)
    return out + bias.to(out.dtype)


# -- transposed ------------------------------------------------------------------------------------


def _sources(window: Window, start: int, stop: int) -> tuple[int, int]:
    """Return the elements that a transposed window spreads into results [start, stop)."""
    reach = window.dilation * (window.size - 1)
    low = -(-(start + window.before - reach) // window.stride)
    high = (stop - 1 + window.before) // window.stride + 1
    low, high = min(max(low, 0), window.length), min(high, window.length)
    return (low, high) if start < stop and low < high else (0, 0)


def _bind_reach(
    func: Parts, windows: Sequence[Window], targets: Sequence[Layout], results: Sequence[Layout]
) -> Parts:
    n = len(windows)
    first = len(results[0].shape) - n
    halo = Halo(
        targets[0], results[0], {first + d: partial(_sources, w) for d, w in enumerate(windows)}
    )
    if is_empty(*targets[1:], *results) or 0 in halo.shape:
        return lambda x, weight, bias=None: _plus(
            bias, _of_nothing(func, results[0], halo(x), weight), n
        )
    groups = _local_groups(func, targets, results[0])
    split = [bool(targets[0].spec.dims[first + d]) for d in range(n)]
    parts = zip(windows, results[0].box[first:], split, strict=True)
    crop = [c for parts in reversed(list(parts)) for c in _crop(*parts)]
    stride, dilation = [w.stride for w in windows], [w.dilation for w in windows]

    def local(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return _plus(
            bias, F.pad(func(halo(x), weight, None, stride, 0, 0, groups, dilation), crop), n
        )

    return local


def _crop(window: Window, interval: tuple[int, int], split: bool) -> tuple[int, int]:
    """Return what to pad (negative: crop) around the sum of spread windows to get an interval."""
    start, stop = interval
    low, high = _sources(window, start, stop) if split else (0, window.length)
    first = low * window.stride - window.before
    end = (high - 1) * window.stride - window.before + window.dilation * (window.size - 1) + 1
    return first - start, stop - end


@decomposition(
    *names_by_dims("conv_transpose{}d"), with_func=True, prepare=_over_space, rule=_whole_space
)
def _conv_transposed(
    func: Any,
    over_space: Any,
    input: Any,
    weight: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Any:
    return over_space(input, weight, bias)


@decomposition("convolution")
def _convolution(
    input: Any,
    weight: Any,
    bias: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
) -> Any:
    n = weight.ndim - 2
    if transposed:
        return getattr(F, f"conv_transpose{n}d")(
            input, weight, bias, stride, padding, output_padding, groups, dilation
        )
    return getattr(F, f"conv{n}d")(input, weight, bias, stride, padding, dilation, groups)
