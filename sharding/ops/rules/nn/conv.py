"""Convolutions: batch, channels and groups may be split as in a matrix product; for split space
each rank fetches its halo.
"""

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
from ..registry import decomposition, rule
from .window import Halo, Parts, Window, is_empty, on_parts, per_dim

_LINEAR: dict[str, Any] = {"linear": ((0, 2), (1, 2)), "additive": (2,)}


def _rule(
    n: int, transposed: bool, groups: int, whole: bool, *operands: Any, **options: Any
) -> Rule:
    """Return the rule: input channels are summed over; those of one group stay together unless
    every rank has whole groups.

    With `whole` the spatial dims must not be split, else they may be.
    """
    batch = "b" if operands[0].ndim == n + 2 else ""
    into, out = ("i", "o") if groups == 1 else ("(g i)", "(g o)")
    space, kernel = dim_names(n, range(n) if whole else (), "h"), dim_names(n, range(n), "k")
    weight = f"{into} o {kernel}" if transposed else f"{out} i {kernel}"
    after = " ".join("1" if whole else f"h{d}" for d in range(n))
    channels = (
        operands[0].shape[-n - 1],
        operands[1].shape[1] * groups if transposed else operands[1].shape[0],
    )
    sizes = {"g": groups, "i": channels[0] // groups, "o": channels[1] // groups}
    pattern = f"{batch} {into} {space}, {weight}, {out} -> {batch} {out} {after}"
    return einrule(pattern, *operands, sizes=sizes, **_LINEAR, **options)


def _local_groups(n: int, transposed: bool, targets: Sequence[Layout], result: Layout) -> int:
    """Return the number of groups that this rank's channels make up."""
    channels = (result if transposed else targets[0]).local_shape[-n - 1]
    return channels // targets[1].local_shape[1]


def _of_nothing(
    n: int,
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
    kernel = weight.shape[2:]
    single = _sized(input, [1] * (input.ndim - n) + [*kernel]), _sized(weight, [1, 1, *kernel])
    return _plus(
        bias, _with_graph_of(func(*single, None if bias is None else _sized(bias, [1])), result), n
    )


def _plus(bias: Tensor | None, out: Tensor, n: int) -> Tensor:
    return out if bias is None else out + bias.to(out.dtype).view(-1, *[1] * n)


def _sized(x: Tensor, sizes: Sequence[int]) -> Tensor:
    """Return the tensor cut, or padded with zeros, to these sizes.

    What is only cut is a view: if autograd saves it, it has the memory of a unit's gathered
    parameters, as on other ranks.
    """
    cut = x[tuple(map(slice, sizes))]
    missing = [size - n for n, size in zip(cut.shape, sizes, strict=True)]
    return F.pad(cut, [m for size in reversed(missing) for m in (0, size)]) if any(missing) else cut


def _with_graph_of(made: Tensor, result: Layout) -> Tensor:
    return made.new_zeros(result.local_shape) + made.flatten()[:0].sum()


# -- convolution -----------------------------------------------------------------------------------


def _bind(
    n: int, func: Parts, groups: int, targets: Sequence[Layout], results: Sequence[Layout]
) -> Parts:
    if is_empty(*targets, *results):
        return partial(_of_nothing, n, func, results[0])
    local = _local_groups(n, False, targets, results[0])
    return func if local == groups else _with_groups(func, local)


def _with_groups(func: Parts, groups: int) -> Parts:
    """Return a convolution with another number of groups, its seventh argument."""

    def run(*args: Any, **kwargs: Any) -> Tensor:
        return (
            func(*args[:6], groups, *args[7:], **kwargs)
            if len(args) > 6
            else func(*args, **{**kwargs, "groups": groups})
        )

    return run


def _windows(
    n: int, input: Tensor, weight: Tensor, stride: Any, padding: Any, dilation: Any
) -> list[Window]:
    sizes, dilations = weight.shape[2:], per_dim(dilation, n)
    if padding == "same":
        padding = [d * (k - 1) // 2 for k, d in zip(sizes, dilations, strict=True)]
    before = per_dim(0 if padding == "valid" else padding, n)
    parts = zip(input.shape[-n:], sizes, per_dim(stride, n), dilations, before, strict=True)
    return [Window(*part) for part in parts]


def _bind_halo(
    n: int,
    func: Parts,
    windows: Sequence[Window],
    targets: Sequence[Layout],
    results: Sequence[Layout],
) -> Parts:
    first = len(results[0].shape) - n
    halo = Halo(targets[0], results[0], {first + d: w.elements for d, w in enumerate(windows)})
    if is_empty(*targets[1:], *results) or 0 in halo.shape[:first]:
        return lambda x, *rest: _of_nothing(n, func, results[0], halo(x), *rest)
    groups = _local_groups(n, False, targets, results[0])
    pads = [_padding(w, *i) for w, i in zip(windows, results[0].box[first:], strict=True)]
    even = [before if before == after else 0 for before, after in pads]
    odd = [
        p
        for before, after in reversed(pads)
        for p in ((0, 0) if before == after else (before, after))
    ]
    stride, dilation = [w.stride for w in windows], [w.dilation for w in windows]

    def local(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        x = halo(x)
        return func(F.pad(x, odd) if any(odd) else x, weight, bias, stride, even, dilation, groups)

    return local


def _padding(window: Window, start: int, stop: int) -> tuple[int, int]:
    """Return the padding of a part; elements after the last window need none."""
    before, after = window.padding(start, stop)
    return before, max(0, after)


def _over_space(
    n: int, func: Parts, transposed: bool, bind: Callable[..., Parts], a: Any
) -> Callable[..., Any] | None:
    """Return the function of the operands that runs the convolution over split space; None if space
    is not split.

    Args:
        bind: makes the function of the parts, see `on_parts`; it is passed n, func and the windows
            first.
        a: the arguments of the call.
    """
    dims = range(a.input.ndim - n, a.input.ndim)
    if not is_split(a.input, dims):
        return None
    result = func(**{**vars(a), "input": a.input.detach(), "weight": a.weight.detach()})
    windows = _windows(n, a.input, a.weight, a.stride, a.padding, a.dilation)
    made = _rule(n, transposed, a.groups, False, a.input, a.weight, a.bias)
    run = on_parts(made, result, dims, partial(bind, n, func, windows))
    return run if a.bias is not None else lambda input, weight, _: run(input, weight)


def _register(n: int) -> None:
    func: Any = getattr(torch, f"conv{n}d")

    def whole_space(a: Any) -> Rule:
        return _rule(
            n,
            False,
            a.groups,
            True,
            a.input,
            a.weight,
            a.bias,
            bind=partial(_bind, n, func, a.groups),
        )

    @decomposition(
        f"conv{n}d", prepare=partial(_over_space, n, func, False, _bind_halo), rule=whole_space
    )
    def run(
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


for _n in (1, 2, 3):
    _register(_n)


@rule("conv_tbc")
def _conv_tbc(input: Tensor, weight: Tensor, bias: Tensor, pad: int = 0) -> Rule:
    return einrule("[t] b i, [k] i o, o -> 1 b o", input, weight, bias, bind=_bind_tbc, **_LINEAR)


def _bind_tbc(targets: Sequence[Layout], results: Sequence[Layout]) -> Parts:
    return partial(_tbc_of_nothing, results[0]) if is_empty(*targets, *results) else torch.conv_tbc


def _tbc_of_nothing(
    result: Layout, input: Tensor, weight: Tensor, bias: Tensor, pad: int = 0
) -> Tensor:
    sizes = [len(weight), 1, 1]
    out = _with_graph_of(
        torch.conv_tbc(_sized(input, sizes), _sized(weight, sizes), _sized(bias, [1])), result
    )
    return out + bias.to(out.dtype)


# -- transposed ------------------------------------------------------------------------------------


def _bind_transposed(
    n: int, func: Parts, groups: int, targets: Sequence[Layout], results: Sequence[Layout]
) -> Parts:
    if is_empty(*targets, *results):
        return partial(_of_nothing, n, func, results[0])
    local = _local_groups(n, True, targets, results[0])
    return func if local == groups else _with_groups(func, local)


def _sources(window: Window, start: int, stop: int) -> tuple[int, int]:
    """Return the elements that a transposed window spreads into results [start, stop)."""
    reach = window.dilation * (window.size - 1)
    low = -(-(start + window.before - reach) // window.stride)
    high = (stop - 1 + window.before) // window.stride + 1
    low, high = min(max(low, 0), window.length), min(high, window.length)
    return (low, high) if start < stop and low < high else (0, 0)


def _bind_reach(
    n: int,
    func: Parts,
    windows: Sequence[Window],
    targets: Sequence[Layout],
    results: Sequence[Layout],
) -> Parts:
    first = len(results[0].shape) - n
    halo = Halo(
        targets[0], results[0], {first + d: partial(_sources, w) for d, w in enumerate(windows)}
    )
    if is_empty(*targets[1:], *results) or 0 in halo.shape:
        return lambda x, weight, bias=None: _plus(
            bias, _of_nothing(n, func, results[0], halo(x), weight), n
        )
    groups = _local_groups(n, True, targets, results[0])
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
    """Return what to pad before and after the sum of spread windows (negative: crop) to get results
    [start, stop).
    """
    start, stop = interval
    low, high = _sources(window, start, stop) if split else (0, window.length)
    first = low * window.stride - window.before
    end = (high - 1) * window.stride - window.before + window.dilation * (window.size - 1) + 1
    return first - start, stop - end


def _register_transposed(n: int) -> None:
    func: Any = getattr(torch, f"conv_transpose{n}d")

    def whole_space(a: Any) -> Rule:
        return _rule(
            n,
            True,
            a.groups,
            True,
            a.input,
            a.weight,
            a.bias,
            bind=partial(_bind_transposed, n, func, a.groups),
        )

    @decomposition(
        f"conv_transpose{n}d",
        prepare=partial(_over_space, n, func, True, _bind_reach),
        rule=whole_space,
    )
    def run(
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


for _n in (1, 2, 3):
    _register_transposed(_n)


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
