"""New tensors like an old one, and random fills: values that depend on nothing but shape, layout and seed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import random
from ..dispatch import check_base
from ..layout import Layout, told_apart
from ..tensor import ShardedTensor
from .registry import RANDOM, functions, handler


def settled(layout: Layout) -> Layout:
    """The layout with whole values where they were pending: for values that are not a sum over ranks."""
    return layout.replace(layout.spec.with_unreduced({})) if layout.pending else layout


def _like(
    x: ShardedTensor, dtype: torch.dtype | None, device: Any, requires_grad: bool, make: Callable[[Layout], Tensor]
) -> Any:
    _check_device(x, device)
    layout = settled(x.layout).replace(dtype=dtype)
    out = ShardedTensor._make(make(layout), layout)
    return out.requires_grad_() if requires_grad else out


def _check_device(x: ShardedTensor, device: Any) -> None:
    if device is not None and torch.device(device).type != x.mesh.device_type:
        raise ValueError(
            f"a tensor like one on {x.mesh} cannot be made on {device}; drop device=, or use a mesh of that device type"
        )


def _register_like(name: str, make: Callable[..., Callable[[Layout], Tensor]]) -> None:
    @handler(name)
    def like(
        input: Any, *args: Any, dtype: Any = None, layout: Any = None, device: Any = None, requires_grad: bool = False,
        memory_format: Any = None, pin_memory: bool = False, **kwargs: Any,
    ) -> Any:  # fmt: skip
        return _like(input, dtype, device, requires_grad, make(input, *args, **kwargs))


def _filled(x: ShardedTensor, fill_value: float) -> Callable[[Layout], Tensor]:
    """Parts keep the strides of x, as in torch: fused optimizers go through parameter and state in one order."""
    return lambda layout: torch.full_like(x._local, fill_value, dtype=layout.dtype)


_register_like("zeros_like", lambda x: _filled(x, 0))
_register_like("ones_like", lambda x: _filled(x, 1))
_register_like("full_like", _filled)
_register_like("empty_like", lambda x: lambda layout: torch.empty_like(x._local, dtype=layout.dtype))
_register_like("rand_like", lambda x: random.uniform)
_register_like("randn_like", lambda x: random.normal)
_register_like(
    "randint_like", lambda x, *bounds, **named: lambda layout: random.integers(layout, *_bounds(*bounds, **named))
)


def _bounds(*bounds: int, low: int = 0, high: int | None = None) -> tuple[int, int]:
    """`randint_like(x, high)` or `randint_like(x, low, high)`."""
    if high is not None:
        return (bounds[0] if bounds else low), high
    return (0, bounds[0]) if len(bounds) == 1 else (bounds[0], bounds[1])


def _register_new(name: str, fill: Callable[..., Any]) -> None:
    """`x.new_zeros(shape)`: replicated on the mesh of x, since nothing says how to split another shape."""

    @handler(name)
    def new(
        input: Any, *size: Any, dtype: Any = None, device: Any = None, requires_grad: bool = False, **kwargs: Any
    ) -> Any:
        _check_device(input, device)
        local = fill(input._local, *size, dtype=dtype, **{k: v for k, v in kwargs.items() if v is not None})
        return _replicated(local, input.mesh, requires_grad)


@handler("new_tensor")
def _new_tensor(input: Any, data: Any, *, dtype: Any = None, device: Any = None, requires_grad: bool = False) -> Any:
    """A number stays a plain 0-d tensor; anything else is replicated, the same on every rank."""
    local = torch.as_tensor(data, dtype=dtype or input.dtype, device=device or input.device).clone()
    if local.ndim == 0:
        return local.requires_grad_(requires_grad)
    _check_device(input, device)
    return _replicated(local, input.mesh, requires_grad)


def _replicated(local: Tensor, mesh: Any, requires_grad: bool) -> Any:
    layout = Layout.of(mesh, None, local.shape, local.dtype)
    out = ShardedTensor._make(local if mesh.coordinate is not None else local.new_empty(0), layout)
    return out.requires_grad_() if requires_grad else out


for _name in ("new_zeros", "new_ones", "new_empty", "new_full"):
    _register_new(_name, getattr(torch.Tensor, _name))


# -- random fills -----------------------------------------------------------------------------------------------------


def _fill(x: Any, generator: Any, values: Callable[..., Tensor], *parameters: Any) -> Any:
    """Overwrite x, in place, with random numbers; a pending tensor has no elements to write."""
    if generator is not None:
        raise NotImplementedError(
            "a torch.Generator does not drive the random numbers of ShardedTensors; sm.manual_seed does"
        )
    if x.layout.pending:
        raise ValueError(
            f"cannot fill {x.layout} with random numbers while a reduction is pending; redistribute it first"
        )
    check_base(x)
    with torch.no_grad():
        x._local.copy_(values(x.layout, *parameters))
    return x


@handler("normal_")
def _normal_(x: Any, mean: float = 0, std: float = 1, *, generator: Any = None) -> Any:
    return _fill(x, generator, random.normal, mean, std)


@handler("uniform_")
def _uniform_(x: Any, a: float = 0, b: float = 1, *, generator: Any = None) -> Any:
    return _fill(x, generator, random.uniform, a, b)


@handler("bernoulli_")
def _bernoulli_(x: Any, p: Any = 0.5, *, generator: Any = None) -> Any:
    if isinstance(p, Tensor):
        raise NotImplementedError("bernoulli_: a tensor of probabilities has no rule; compare rand_like(p) < p instead")
    return _fill(x, generator, random.bernoulli, p)


# Functions that draw from torch's own generator: they run on gathered operands, with that generator in the same state
# on every rank, so that replicas agree and the mesh does not matter.
_DRAWING = """
    bernoulli multinomial normal poisson binomial rrelu rrelu_ dropout1d dropout2d dropout3d native_dropout
    alpha_dropout alpha_dropout_ feature_alpha_dropout feature_alpha_dropout_ feature_dropout feature_dropout_
    fractional_max_pool2d fractional_max_pool3d fractional_max_pool2d_with_indices fractional_max_pool3d_with_indices
    gumbel_softmax multi_head_attention_forward lstm gru rnn_tanh rnn_relu exponential_ cauchy_ log_normal_ geometric_
    random_
"""
RANDOM.update(functions(*_DRAWING.split()))


# -- dropout ----------------------------------------------------------------------------------------------------------


@handler("dropout", also=(torch.dropout,))
def _dropout(
    input: Any, p: float = 0.5, training: bool = True, inplace: bool = False, train: bool | None = None
) -> Any:
    """The mask is drawn by global position: equal on replicas, and the same for every mesh."""
    if not 0 <= p <= 1:
        raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")
    if not (training if train is None else train) or p == 0:
        return input
    layout = settled(input.layout).replace(dtype=torch.bool)
    dropped = ShardedTensor._make(random.bernoulli(layout, p), layout)
    scale = 0.0 if p == 1 else 1 / (1 - p)
    if inplace:
        return input.masked_fill_(dropped, 0).mul_(scale)
    return input.masked_fill(dropped, 0) * scale


# -- values in ---------------------------------------------------------------------------------------------------------


@handler("copy_")
def _copy_(x: Any, src: Any, non_blocking: bool = False) -> Any:
    """Copy into x in its own layout. A plain `src` is taken as the whole tensor, the same on every rank.

    Communication: what redistributing a sharded `src` to the layout of x needs; none for a plain one.
    """
    if not isinstance(x, ShardedTensor):
        x.copy_(src.full_tensor())
        return x
    if not isinstance(src, ShardedTensor):
        src = ShardedTensor._make(src.to(x.device), Layout.of(x.mesh, None, src.shape, src.dtype))
    if src.mesh != x.mesh:
        here, there = told_apart(x.mesh, src.mesh)
        raise ValueError(f"copy_: the tensor lies on {here}, its source on {there}; copy source.full_tensor() instead")
    wide: Any = src if src.shape == x.shape else src.expand(x.shape)
    check_base(x)
    moved = wide.to(x.dtype).redistribute(x.spec)
    x._local.copy_(moved._local)
    x._sync_requires_grad()
    return x


@handler("detach")
def _detach(x: Any) -> Any:
    return ShardedTensor.detach(x)


@handler("is_nonzero")
def _is_nonzero(x: Any) -> bool:
    return bool(x)


@handler("_make_dual")
def _make_dual(tensor: Any, tangent: Any, level: int) -> Any:
    """Tangents live on local tensors and would be lost in every collective, without a word."""
    raise NotImplementedError(
        "forward-mode differentiation (torch.func.jvp, torch.autograd.forward_ad) of a ShardedTensor is not supported; "
        "use torch.autograd.grad, or torch.autograd.functional.jvp, which runs backward twice"
    )


def _register_autograd() -> None:
    from .. import gradients

    handler(also=(torch.autograd.grad,))(gradients.grad)
    handler(also=(torch.autograd.backward,))(gradients.backward)


_register_autograd()


def _register_own_methods() -> None:
    """What `ShardedTensor` defines itself, also where it is called as a function of torch."""
    for func in functions("item", "tolist", "requires_grad_"):
        handler(also=(func,))(getattr(ShardedTensor, func.__name__))


_register_own_methods()
