"""Normalisations. Over split dims their mean and variance are small reductions; nothing is gathered.

Statistics are those of the whole tensor: batch norm is synchronised over the axes that split the batch, and over those that
split the image.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .....kernels.box import Box
from ....redistribute.interval_exchange import Fetch
from ..decomposition_utils import check_by_torch, from_parts, layout_of, settled, splits, with_elements
from ..notation import Rule, einrule
from ..reductions.reduction import Dims, accumulator_dtype, normal_dims
from ..registry import form, rule

Form = Callable[..., Any]


def _check_running(*statistics: Any) -> None:
    """Running averages are written, and every rank must be able to write its own.

    Raises:
        ValueError: they are pending.
    """
    given = [layout_of(x) for x in statistics if x is not None]
    if any(layout.pending for layout in given):
        raise ValueError(f"running statistics laid out as {given} are pending: redistribute them to Replicate() or Shard(0) first")


def _scaled(x: Any, weight: Any, bias: Any, dtype: torch.dtype) -> Any:
    """`x * weight + bias`, rounded once."""
    x = x if weight is None else x * weight
    return (x if bias is None else x + bias).to(dtype)


def _standardised(x: Any, mean: Any, var: Any, eps: float) -> Any:
    return (x - mean) * (var + eps).rsqrt()


def _wide(input: Any) -> Any:
    """The whole values, in the dtype in which torch adds up."""
    return settled(input).to(accumulator_dtype(input.dtype))


def _beside_channels(x: Any, like: Any) -> Any:
    """One number for each channel, in the shape that broadcasts against a batch of images."""
    return None if x is None else x.view(x.shape[0], *[1] * (like.ndim - 2))


# -- of each row ------------------------------------------------------------------------------------------------------


def _normalised(normalized_shape: Sequence[int], *operands: Tensor | None) -> Rule:
    names = " ".join(f"[n{i}]" for i in range(len(normalized_shape)))
    rest = [names] * (len(operands) - 1)
    return einrule(f"{', '.join(['... ' + names, *rest])} -> ... {names}", *operands)


def _normalised_dims(input: Any, normalized_shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(range(input.ndim - len(normalized_shape), input.ndim))


@rule("layer_norm")
def _layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Rule:
    return _normalised(normalized_shape, input, weight, bias)


@form("layer_norm")
def _layer_norm_form(
    input: Any, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5, cudnn_enable: bool = True
) -> Form | None:
    check_by_torch(torch.layer_norm, input, normalized_shape, weight, bias, eps)
    dims = _normalised_dims(input, normalized_shape)
    return partial(_run_layer_norm, dims) if splits(input, dims) else None


def _run_layer_norm(
    dims: tuple[int, ...],
    input: Any,
    normalized_shape: Any,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Any:
    x = _wide(input)
    var, mean = torch.var_mean(x, dims, correction=0, keepdim=True)
    return _scaled(_standardised(x, mean, var, eps), weight, bias, input.dtype)


@rule("rms_norm")
def _rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Rule:
    return _normalised(normalized_shape, input, weight)


@form("rms_norm")
def _rms_norm_form(input: Any, normalized_shape: Any, weight: Any = None, eps: float | None = None) -> Form | None:
    check_by_torch(torch.rms_norm, input, normalized_shape, weight, eps)
    dims = _normalised_dims(input, normalized_shape)
    return partial(_run_rms_norm, dims) if splits(input, dims) else None


def _run_rms_norm(
    dims: tuple[int, ...], input: Any, normalized_shape: Any, weight: Any = None, eps: float | None = None
) -> Any:
    x = _wide(input)
    square = settled((x * x).mean(dims, keepdim=True))
    return _scaled(x * (square + (torch.finfo(x.dtype).eps if eps is None else eps)).rsqrt(), weight, None, input.dtype)


@rule("normalize")
def _normalize(input: Tensor, p: float = 2.0, dim: Dims = 1, eps: float = 1e-12, out: None = None) -> Rule:
    dims = normal_dims(dim, input.ndim)
    names = " ".join(f"[d{d}]" if d in dims else f"d{d}" for d in range(input.ndim))
    return einrule(f"{names} -> {names}", input)


@form("normalize")
def _normalize_form(input: Any, p: float = 2.0, dim: Dims = 1, eps: float = 1e-12, out: None = None) -> Form | None:
    check_by_torch(F.normalize, input, p, dim, eps)
    return _run_normalize if splits(input, normal_dims(dim, input.ndim)) else None


def _run_normalize(input: Any, p: float = 2.0, dim: Dims = 1, eps: float = 1e-12, out: None = None) -> Any:
    x = settled(input)
    return x / torch.linalg.vector_norm(x, p, dim, keepdim=True).clamp_min(eps)


# -- of weights -------------------------------------------------------------------------------------------------------


@form("norm_except_dim")
def _norm_except_dim(v: Any, pow: int = 2, dim: int = 0) -> Form:
    check_by_torch(torch.norm_except_dim, v, pow, dim)
    return _run_norm_except_dim


def _run_norm_except_dim(v: Any, pow: int = 2, dim: int = 0) -> Any:
    others = None if dim == -1 else [d for d in range(v.ndim) if d != dim]
    return torch.linalg.vector_norm(v, pow, others, keepdim=dim != -1)


@form("_weight_norm")
def _weight_norm(v: Any, g: Any, dim: int = 0) -> Form:
    check_by_torch(torch._weight_norm, v, g, dim)
    return _run_weight_norm


def _run_weight_norm(v: Any, g: Any, dim: int = 0) -> Any:
    return v * (g / _run_norm_except_dim(v, 2, dim))


# -- of groups of channels --------------------------------------------------------------------------------------------


@rule("group_norm")
def _group_norm(
    input: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5, *_: Any
) -> Rule:
    image = " ".join(f"[d{d}]" for d in range(2, input.ndim))
    return einrule(f"n [c] {image}, [c], [c] -> n [c] {image}", input, weight, bias, local=_group_norm_local)


def _group_norm_local(
    input: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5, *_: Any
) -> Tensor:
    """Without the check of the batch size, which would see this rank's part."""
    return torch.group_norm(input, num_groups, weight, bias, eps)


@form("group_norm")
def _group_norm_form(
    input: Any, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5, *_: Any
) -> Form | None:
    check_by_torch(F.group_norm, input, num_groups, weight, bias, eps)
    return _run_group_norm if splits(input, range(1, input.ndim)) and input.numel() else None


def _run_group_norm(
    input: Any, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5, *_: Any
) -> Any:
    x = _wide(input)
    distance = x - _mean_of_groups(x, num_groups)
    normal = distance * (_mean_of_groups(distance * distance, num_groups) + eps).rsqrt()
    return _scaled(normal, _beside_channels(weight, x), _beside_channels(bias, x), input.dtype)


def _mean_of_groups(x: Any, groups: int) -> Any:
    """The mean of each group of channels, for each channel: `n (g r) ... -> n (g r) 1 ...`.

    Groups may straddle ranks: what is brought together is one number for each channel.

    Communication: a reduction of one number for each group and row, where the group is split.
    """
    n, channels = x.shape[:2]
    sums = x.sum(tuple(range(2, x.ndim))) if x.ndim > 2 else x
    means = settled(sums.unflatten(1, (groups, -1)).sum(2)) / (x.numel() // max(n * groups, 1))
    spread = means[:, :, None].expand(-1, -1, channels // groups).flatten(1)
    return spread.view(n, channels, *[1] * (x.ndim - 2))


# -- of channels ------------------------------------------------------------------------------------------------------


@rule(also=(F.batch_norm,))
def _batch_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Rule:
    """By statistics that are given, each element is by itself."""
    names = ["n", "c", *[f"d{d}" for d in range(2, input.ndim)]]
    left = " ".join(f"[{name}]" if training and name != "c" else name for name in names)
    operands = (input, running_mean, running_var, weight, bias)
    return einrule(f"{left}, c, c, c, c -> {left}", *operands, local=_batch_norm_local)


def _batch_norm_local(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Without the check of the batch size, which would see this rank's part; and torch refuses to have no channels."""
    given: list[Any] = [None if t is None else with_elements(t) for t in (input, weight, bias, running_mean, running_var)]
    result = torch.batch_norm(*given, training, momentum, eps, torch.backends.cudnn.enabled)  # type: ignore[call-arg]
    return result if input.numel() else result[tuple(map(slice, input.shape))]


@form(also=(F.batch_norm,))
def _batch_norm_form(
    input: Any,
    running_mean: Any = None,
    running_var: Any = None,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Form | None:
    check_by_torch(F.batch_norm, input, running_mean, running_var, weight, bias, training, momentum, eps)
    over = [d for d in range(input.ndim) if d != 1]
    if training:
        _check_running(running_mean, running_var)
    return _run_batch_norm if training and (running_mean is not None or splits(input, over)) else None


def _run_batch_norm(
    input: Any,
    running_mean: Any = None,
    running_var: Any = None,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    over = [d for d in range(input.ndim) if d != 1]
    return _by_own_statistics(over, input, running_mean, running_var, weight, bias, momentum, eps)


def _by_own_statistics(
    dims: Sequence[int], input: Any, running_mean: Any, running_var: Any, weight: Any, bias: Any, momentum: float, eps: float
) -> Any:
    """By the mean and variance over these dims, which go into the running averages."""
    x = _wide(input)
    var, mean = torch.var_mean(x, tuple(dims), correction=0, keepdim=True)
    count = math.prod(x.shape[d] for d in dims)
    _update(running_mean, mean, momentum)
    _update(running_var, var * (count / max(count - 1, 1)), momentum)
    normal = _standardised(x, mean, var, eps)
    return _scaled(normal, _beside_channels(weight, x), _beside_channels(bias, x), input.dtype)


def _update(running: Any, value: Any, momentum: float) -> None:
    """The running average of each channel, in place; the statistics are the same on every rank that holds it."""
    if running is not None:
        with torch.no_grad():
            running.mul_(1 - momentum).add_(value.flatten(1).mean(0).to(running.dtype), alpha=momentum)


@rule(also=(F.instance_norm,))
def _instance_norm(
    input: Tensor,
    running_mean: None = None,
    running_var: None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Rule:
    image = " ".join(f"[d{d}]" for d in range(2, input.ndim))
    return einrule(f"n c {image}, c, c -> n c {image}", input, weight, bias, local=_instance_norm_local)


def _instance_norm_local(input: Tensor, *args: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5, **_: Any) -> Tensor:
    """torch's own, which refuses an empty batch."""
    weight, bias = (None if t is None else with_elements(t) for t in (weight, bias))
    result = torch.instance_norm(with_elements(input), weight, bias, None, None, True, 0.1, eps, torch.backends.cudnn.enabled)
    return result if input.numel() else result[tuple(map(slice, input.shape))]


@form(also=(F.instance_norm,))
def _instance_norm_form(
    input: Any,
    running_mean: Any = None,
    running_var: Any = None,
    weight: Any = None,
    bias: Any = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Form | None:
    check_by_torch(F.instance_norm, input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps)
    if use_input_stats:
        _check_running(running_mean, running_var)
    composed = running_mean is not None or splits(input, range(2, input.ndim))
    return _run_instance_norm if composed else None


def _run_instance_norm(
    input: Any,
    running_mean: Any = None,
    running_var: Any = None,
    weight: Any = None,
    bias: Any = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    if not use_input_stats:
        return F.batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
    return _by_own_statistics(range(2, input.ndim), input, running_mean, running_var, weight, bias, momentum, eps)


def _of_torch(func: Callable[..., Any]) -> None:
    """`torch.batch_norm` and its like take the arguments of `func` in another order."""

    def run(
        input: Any,
        weight: Any,
        bias: Any,
        running_mean: Any,
        running_var: Any,
        use_input_stats: bool,
        momentum: float,
        eps: float,
        cudnn_enabled: bool,
    ) -> Any:
        return func(input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps)

    form(also=(getattr(torch, func.__name__),))(lambda *args, **kwargs: run)


_of_torch(F.batch_norm)
_of_torch(F.instance_norm)


# -- of neighbouring channels -----------------------------------------------------------------------------------------


@rule("local_response_norm")
def _local_response_norm(input: Tensor, size: int, alpha: float = 1e-4, beta: float = 0.75, k: float = 1.0) -> Rule:
    image = " ".join(f"d{d}" for d in range(2, input.ndim))
    return einrule(f"n [c] {image} -> n [c] {image}", input)


@form("local_response_norm")
def _local_response_norm_form(
    input: Any, size: int, alpha: float = 1e-4, beta: float = 0.75, k: float = 1.0
) -> Form | None:
    check_by_torch(F.local_response_norm, input, size)
    if not splits(input, [1]):
        return None
    before, after, channels = size // 2, (size - 1) // 2, input.shape[1]

    def around(start: int, stop: int) -> list[tuple[int, int]]:
        return [(max(start - before, 0), min(stop + after, channels))] if start < stop else []

    return partial(_run_local_response_norm, around)


def _run_local_response_norm(
    around: Callable[[int, int], Any], input: Any, size: int, alpha: float = 1e-4, beta: float = 0.75, k: float = 1.0
) -> Any:
    """Each rank fetches the channels beside its own."""
    x = settled(input)
    fetch = Fetch(x._layout, x._layout, 1, around)
    sums = from_parts(x._layout, lambda local: _window_sums(fetch(local), x._layout.box, x.shape[1], size), x * x)
    return x / (sums * (alpha / size) + k) ** beta


def _window_sums(squares: Tensor, box: Box, channels: int, size: int) -> Tensor:
    """Sums of `size` neighbouring channels around each channel of this rank; there are zeros beyond the first and last."""
    start, stop = box[1]
    if start == stop:
        return squares
    missing = (max(size // 2 - start, 0), max(stop + (size - 1) // 2 - channels, 0))
    return F.pad(squares, (*[0, 0] * (squares.ndim - 2), *missing)).unfold(1, size, 1).sum(-1)
