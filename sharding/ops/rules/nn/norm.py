"""Normalisations.

Over split dims their mean and variance are small reductions; nothing is gathered.

Statistics are those of the whole tensor: batch norm is synchronised over the axes that split the
batch, and over those that split the image.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .....kernels.box import Box
from ....redistribute.interval_exchange import IntervalExchange
from ..decomposition_utils import from_parts, is_split, layout_of, reduce_pending, with_elements
from ..notation import Rule, along_dims, einrule
from ..reductions.reduction import Dims, accumulator_dtype, normal_dims
from ..registry import decomposition


def _check_running(*statistics: Any) -> None:
    """Check that every rank can write its own running averages.

    Raises:
        ValueError: they are pending.
    """
    layouts = [layout_of(x) for x in statistics if x is not None]
    if any(layout.pending for layout in layouts):
        raise ValueError(
            f"running statistics with the layouts {layouts} are pending; redistribute them to "
            "Replicate() or Shard(0) first"
        )


def _scale_and_shift(x: Any, weight: Any, bias: Any, dtype: torch.dtype) -> Any:
    """Return `x * weight + bias`, rounded once."""
    x = x if weight is None else x * weight
    return (x if bias is None else x + bias).to(dtype)


def _standardise(x: Any, mean: Any, var: Any, eps: float) -> Any:
    return (x - mean) * (var + eps).rsqrt()


def _wide(input: Any) -> Any:
    """Return the values with nothing pending, in the dtype in which torch accumulates sums."""
    return reduce_pending(input).to(accumulator_dtype(input.dtype))


def _beside_channels(x: Any, like: Any) -> Any:
    """Return one number for each channel in the shape that broadcasts against a batch of images."""
    return None if x is None else x.view(x.shape[0], *[1] * (like.ndim - 2))


# -- of each row -----------------------------------------------------------------------------------


def _split_last_dims(a: Any) -> tuple[int, ...] | None:
    """Return the dims of the input that `normalized_shape` describes; None if none is split."""
    dims = tuple(range(a.input.ndim - len(a.normalized_shape), a.input.ndim))
    return dims if is_split(a.input, dims) else None


def _rule(a: Any, *weights: Tensor | None) -> Rule:
    names = " ".join(f"[n{i}]" for i in range(len(a.normalized_shape)))
    left = ", ".join([f"... {names}", *[names] * len(weights)])
    return einrule(f"{left} -> ... {names}", a.input, *weights)


@decomposition(
    "layer_norm",
    check=torch.layer_norm,
    prepare=_split_last_dims,
    rule=lambda a: _rule(a, a.weight, a.bias),
)
def _layer_norm(
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
    return _scale_and_shift(_standardise(x, mean, var, eps), weight, bias, input.dtype)


@decomposition(
    "rms_norm",
    check=torch.rms_norm,
    prepare=_split_last_dims,
    rule=lambda a: _rule(a, a.weight),
)
def _rms_norm(
    dims: tuple[int, ...],
    input: Any,
    normalized_shape: Any,
    weight: Any = None,
    eps: float | None = None,
) -> Any:
    x = _wide(input)
    square = reduce_pending((x * x).mean(dims, keepdim=True))
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    return _scale_and_shift(x * (square + eps).rsqrt(), weight, None, input.dtype)


@decomposition(
    "normalize",
    check=F.normalize,
    when=lambda a: is_split(a.input, normal_dims(a.dim, a.input.ndim)),
    rule=lambda a: along_dims(a.input, normal_dims(a.dim, a.input.ndim)),
)
def _normalize(
    input: Any, p: float = 2.0, dim: Dims = 1, eps: float = 1e-12, out: None = None
) -> Any:
    x = reduce_pending(input)
    return x / torch.linalg.vector_norm(x, p, dim, keepdim=True).clamp_min(eps)


# -- of weights ------------------------------------------------------------------------------------


@decomposition("norm_except_dim", check=torch.norm_except_dim)
def _norm_except_dim(v: Any, pow: int = 2, dim: int = 0) -> Any:
    others = None if dim == -1 else [d for d in range(v.ndim) if d != dim]
    return torch.linalg.vector_norm(v, pow, others, keepdim=dim != -1)


@decomposition("_weight_norm", check=torch._weight_norm)
def _weight_norm(v: Any, g: Any, dim: int = 0) -> Any:
    return v * (g / _norm_except_dim(v, 2, dim))


# -- of groups of channels -------------------------------------------------------------------------


def _group_norm_rule(a: Any) -> Rule:
    image = " ".join(f"[d{d}]" for d in range(2, a.input.ndim))
    pattern = f"n [c] {image}, [c], [c] -> n [c] {image}"
    return einrule(
        pattern,
        a.input,
        a.weight,
        a.bias,
        # without `F.group_norm`'s check of the batch size, which would see this rank's part
        local=lambda input, num_groups, weight=None, bias=None, eps=1e-5, *_: torch.group_norm(
            input, num_groups, weight, bias, eps
        ),
    )


@decomposition(
    "group_norm",
    # torch.group_norm has one argument more
    check=lambda *args, **kwargs: F.group_norm(*args[:5], **kwargs),
    when=lambda a: is_split(a.input, range(1, a.input.ndim)) and a.input.numel(),
    rule=_group_norm_rule,
)
def _group_norm(
    input: Any, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5, *_: Any
) -> Any:
    x = _wide(input)
    distance = x - _mean_of_groups(x, num_groups)
    normal = distance * (_mean_of_groups(distance * distance, num_groups) + eps).rsqrt()
    return _scale_and_shift(
        normal, _beside_channels(weight, x), _beside_channels(bias, x), input.dtype
    )


def _mean_of_groups(x: Any, groups: int) -> Any:
    """Return the mean of each group of channels, for each channel: `n (g r) ... -> n (g r) 1 ...`.

    Groups may extend over several ranks: one number for each channel is communicated.

    Communication: a reduction of one number for each group and row, where the group is split.
    """
    n, channels = x.shape[:2]
    sums = x.sum(tuple(range(2, x.ndim))) if x.ndim > 2 else x
    count = x.numel() // max(n * groups, 1)
    means = reduce_pending(sums.unflatten(1, (groups, -1)).sum(2)) / count
    spread = means[:, :, None].expand(-1, -1, channels // groups).flatten(1)
    return spread.view(n, channels, *[1] * (x.ndim - 2))


# -- of channels -----------------------------------------------------------------------------------


def _batch_norm_rule(a: Any) -> Rule:
    """Return the rule; with given statistics every element is independent."""
    names = ["n", "c", *[f"d{d}" for d in range(2, a.input.ndim)]]
    left = " ".join(f"[{name}]" if a.training and name != "c" else name for name in names)
    operands = (a.input, a.running_mean, a.running_var, a.weight, a.bias)
    return einrule(f"{left}, c, c, c, c -> {left}", *operands, local=_batch_norm_local)


def _batch_norm_local(
    input: Tensor,
    running_mean: Any = None,
    running_var: Any = None,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Skip `F.batch_norm`'s check of the batch size, which would see this rank's part."""
    tensors = input, weight, bias, running_mean, running_var
    # torch refuses a part without channels
    some: list[Any] = [None if t is None else with_elements(t) for t in tensors]
    result = torch.batch_norm(*some, training, momentum, eps, torch.backends.cudnn.enabled)  # type: ignore[call-arg]
    return result if input.numel() else result[tuple(map(slice, input.shape))]


def _batch_norm_applies(a: Any) -> bool:
    """Return whether statistics are computed over split dims, or written."""
    if a.training:
        _check_running(a.running_mean, a.running_var)
    return a.training and (a.running_mean is not None or is_split(a.input, _not_channels(a.input)))


def _not_channels(input: Any) -> list[int]:
    return [d for d in range(input.ndim) if d != 1]


@decomposition("F.batch_norm", check=F.batch_norm, when=_batch_norm_applies, rule=_batch_norm_rule)
def _batch_norm(
    input: Any,
    running_mean: Any = None,
    running_var: Any = None,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    return _by_own_statistics(
        _not_channels(input), input, running_mean, running_var, weight, bias, momentum, eps
    )


def _by_own_statistics(
    dims: Sequence[int],
    input: Any,
    running_mean: Any,
    running_var: Any,
    weight: Any,
    bias: Any,
    momentum: float,
    eps: float,
) -> Any:
    """Normalise by the mean and variance over these dims, and add these to the running averages."""
    x = _wide(input)
    var, mean = torch.var_mean(x, tuple(dims), correction=0, keepdim=True)
    count = math.prod(x.shape[d] for d in dims)
    _update(running_mean, mean, momentum)
    _update(running_var, var * (count / max(count - 1, 1)), momentum)
    normal = _standardise(x, mean, var, eps)
    return _scale_and_shift(
        normal, _beside_channels(weight, x), _beside_channels(bias, x), input.dtype
    )


def _update(running: Any, value: Any, momentum: float) -> None:
    """Update the running average of each channel in place, alike on every rank that has it."""
    if running is not None:
        with torch.no_grad():
            average = value.flatten(1).mean(0).to(running.dtype)
            running.mul_(1 - momentum).add_(average, alpha=momentum)


def _instance_norm_rule(a: Any) -> Rule:
    image = " ".join(f"[d{d}]" for d in range(2, a.input.ndim))
    return einrule(
        f"n c {image}, c, c -> n c {image}", a.input, a.weight, a.bias, local=_instance_norm_local
    )


def _instance_norm_local(
    input: Tensor, *args: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5, **_: Any
) -> Tensor:
    """Call torch's own function, which refuses an empty batch."""
    weight, bias = (None if t is None else with_elements(t) for t in (weight, bias))
    result = torch.instance_norm(
        with_elements(input), weight, bias, None, None, True, 0.1, eps, torch.backends.cudnn.enabled
    )
    return result if input.numel() else result[tuple(map(slice, input.shape))]


def _instance_norm_applies(a: Any) -> bool:
    if a.use_input_stats:
        _check_running(a.running_mean, a.running_var)
    return a.running_mean is not None or is_split(a.input, range(2, a.input.ndim))


@decomposition(
    "F.instance_norm",
    check=F.instance_norm,
    when=_instance_norm_applies,
    rule=_instance_norm_rule,
)
def _instance_norm(
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
    return _by_own_statistics(
        range(2, input.ndim), input, running_mean, running_var, weight, bias, momentum, eps
    )


@decomposition("torch.batch_norm", "torch.instance_norm", with_func=True)
def _norm_of_torch(
    func: Any,
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
    """Call `F.batch_norm` or its like, which take the arguments in another order."""
    statistics = running_mean, running_var
    own = getattr(F, func.__name__)
    return own(input, *statistics, weight, bias, use_input_stats, momentum, eps)


# -- of neighbouring channels ----------------------------------------------------------------------


def _channels_around(a: Any) -> Callable[[int, int], list[tuple[int, int]]] | None:
    """Return, where channels are split, (start, stop) -> the channels in the windows of these."""
    before, after, channels = a.size // 2, (a.size - 1) // 2, a.input.shape[1]

    def around(start: int, stop: int) -> list[tuple[int, int]]:
        return [(max(start - before, 0), min(stop + after, channels))] if start < stop else []

    return around if is_split(a.input, [1]) else None


@decomposition(
    "local_response_norm",
    check=lambda input, size, *_, **__: F.local_response_norm(input, size),
    prepare=_channels_around,
    rule=lambda a: along_dims(a.input, [1]),
)
def _local_response_norm(
    around: Callable[[int, int], Any],
    input: Any,
    size: int,
    alpha: float = 1e-4,
    beta: float = 0.75,
    k: float = 1.0,
) -> Any:
    """Fetch the channels next to this rank's own."""
    x = reduce_pending(input)
    fetch = IntervalExchange(x._layout, x._layout, 1, around)
    box, channels = x._layout.box, x.shape[1]
    sums = from_parts(
        x._layout, lambda local: _window_sums(fetch(local), box, channels, size), x * x
    )
    return x / (sums * (alpha / size) + k) ** beta


def _window_sums(squares: Tensor, box: Box, channels: int, size: int) -> Tensor:
    """Return sums of `size` neighbours of each of this rank's channels, zeros beyond the ends."""
    start, stop = box[1]
    if start == stop:
        return squares
    missing = (max(size // 2 - start, 0), max(stop + (size - 1) // 2 - channels, 0))
    return F.pad(squares, (*[0, 0] * (squares.ndim - 2), *missing)).unfold(1, size, 1).sum(-1)
