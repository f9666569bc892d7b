"""Random tensors.

Random values shaped like an old tensor, in-place fills, and distributions with parameters per
element.

Every call takes one random tensor from the stream (`sharding.tensor.random`), whatever it does with
it, so that the next call has the same position in the stream on every mesh. A drawn value depends
on an element's global position; nothing is communicated.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .....kernels.random import distributions, limits
from .....mesh.comm.thread_context import thread_context
from ....layout.layout import Layout
from ....layout.spec import P
from ....lineage import with_drawn
from ....tensor import random
from ....tensor.factories import arange
from ....tensor.sharded_tensor import ShardedTensor
from ...sliced_from import check_base
from ..decomposition_utils import from_parts, reduce_pending, unshard, with_dim, without_pending
from ..elementwise.like import register_like
from ..registry import RANDOM, decomposition, functions, handler


def _drawer(
    draw: Callable[..., Tensor], *values: float
) -> Callable[[Layout, torch.device], Tensor]:
    return lambda layout, device: draw(layout, *values).to(device)


register_like("rand_like", lambda x: _drawer(random.uniform))
register_like("randn_like", lambda x: _drawer(random.normal))
register_like(
    "randint_like", lambda x, *bounds, **named: _drawer(random.integers, *_bounds(*bounds, **named))
)


def _bounds(*bounds: int, low: int = 0, high: int | None = None) -> tuple[int, int]:
    """Return the bounds of `randint_like(x, high)` or `randint_like(x, low, high)`."""
    if high is not None:
        return (bounds[0] if bounds else low), high
    return (0, bounds[0]) if len(bounds) == 1 else (bounds[0], bounds[1])


def _no_generator(generator: Any) -> None:
    if generator is not None:
        raise NotImplementedError(
            "a torch.Generator does not seed the random numbers of ShardedTensors; drop generator= "
            "and call sm.random.manual_seed"
        )


# -- in place --------------------------------------------------------------------------------------


def _fill(x: Any, generator: Any, values: Callable[..., Tensor], *parameters: Any) -> Any:
    """Overwrite x in place with random numbers; as in torch, its autograd history ends here."""
    _no_generator(generator)
    _check_fillable(x)
    before = thread_context.last_draw
    x._local.copy_(values(x._layout, *parameters))
    x._lineage = with_drawn(x._lineage, before)
    x._sync_requires_grad()
    return x


def _check_fillable(x: Any) -> None:
    """Refuse plain tensors, and pending ones, which have no elements to write."""
    if not isinstance(x, ShardedTensor):
        raise TypeError(
            "a plain tensor cannot be filled with the random numbers of a ShardedTensor; make it a "
            "ShardedTensor with distribute_tensor"
        )
    if x._layout.pending:
        raise ValueError(
            f"cannot fill {x._layout} with random numbers while a reduction is pending; "
            "redistribute it first"
        )
    check_base(x)


_EXPONENTIAL = partial(random.draw, distributions.exponential)
_CAUCHY = partial(random.draw, distributions.cauchy)
_LOG_NORMAL = partial(random.draw, distributions.log_normal)
_GEOMETRIC = partial(random.draw, distributions.geometric)

handler("normal_")(
    lambda x, mean=0, std=1, *, generator=None: _fill(x, generator, random.normal, mean, std)
)
handler("exponential_")(
    lambda x, lambd=1, *, generator=None: _fill(x, generator, _EXPONENTIAL, lambd)
)
handler("cauchy_")(
    lambda x, median=0, sigma=1, *, generator=None: _fill(x, generator, _CAUCHY, median, sigma)
)
handler("log_normal_")(
    lambda x, mean=1, std=2, *, generator=None: _fill(x, generator, _LOG_NORMAL, mean, std)
)
handler("geometric_")(lambda x, p, *, generator=None: _fill(x, generator, _GEOMETRIC, p))


@handler("uniform_")
def _uniform_(x: Any, a: float = 0, b: float = 1, *, generator: Any = None, **ends: float) -> Any:
    """Fill from [a, b), which torch names `from` and `to`."""
    return _fill(x, generator, random.uniform, ends.get("from", a), ends.get("to", b))


@handler("random_")
def _random_(x: Any, *bounds: int, generator: Any = None, **ends: Any) -> Any:
    """Fill with integers, by default up to the largest contiguous one of the dtype."""
    low, high = (0, *bounds) if len(bounds) == 1 else (bounds or (0, None))
    low, high = ends.get("from", low), ends.get("to", high)
    return _fill(
        x, generator, random.integers, low, limits(x.dtype)[1] + 1 if high is None else high
    )


@handler("bernoulli_")
def _bernoulli_(x: Any, p: Any = 0.5, *, generator: Any = None) -> Any:
    """Draw with one probability, or with one for each element."""
    if not isinstance(p, Tensor):
        return _fill(x, generator, random.bernoulli, p)
    _no_generator(generator)
    _check_fillable(x)
    chances = _as_operand(p, x).detach().expand(x.shape).redistribute(x.spec)
    before, units = thread_context.last_draw, random.units(x._layout)
    x._lineage = with_drawn(x._lineage, before)
    if x.mesh.coordinate is not None:
        x._local.copy_(_truths(chances._local, units))
        x._sync_requires_grad()
    return x


def _as_operand(p: Tensor, like: Any) -> Any:
    """Return the probabilities as a tensor on the mesh; a plain 0-d one is alike on all ranks."""
    if isinstance(p, ShardedTensor):
        if p.mesh != like.mesh:
            raise ValueError(
                f"bernoulli_: the tensor is on {like.mesh}, its probabilities on {p.mesh}; move "
                "them to one mesh first"
            )
        return reduce_pending(p)
    if p.ndim:
        raise RuntimeError(
            f"bernoulli_: mixes a plain tensor {p.dtype}{list(p.shape)} with a ShardedTensor; "
            "shard the plain tensor with distribute_tensor(t, mesh, placements)"
        )
    return ShardedTensor._make(p.to(like.device), Layout.of(like.mesh, P(), (), p.dtype))


# -- one distribution for each element -------------------------------------------------------------


def _draw(layout: Layout, distribution: Callable[..., Tensor], *sources: Any) -> Any:
    """Return `distribution(parts..., units)` in the sources' layout; their gradients are zeros."""
    units = random.units(layout)

    def values(*locals: Tensor) -> Tensor:
        drawn = distribution(*[local.detach() for local in locals], units).to(layout.dtype)
        return sum((_nothing_of(local) for local in locals if local.requires_grad), start=drawn)

    return from_parts(layout, values, *sources)


def _nothing_of(local: Tensor) -> Tensor:
    """Return zeros with a gradient of zero."""
    return local.masked_fill(torch.ones((), dtype=torch.bool, device=local.device), 0)


def _align(*tensors: Any) -> list[Any]:
    """Return the operands broadcast against each other, laid out as the first of the full shape."""
    tensors = tuple(map(reduce_pending, tensors))
    shape = torch.broadcast_shapes(*[x.shape for x in tensors])
    spec = next((x.spec for x in tensors if x.shape == shape), P())
    return [x.expand(shape).redistribute(spec) for x in tensors]


def _demand(sound: Tensor, text: str) -> None:
    """Raise on the rank that has a bad value."""
    if not bool(sound.all()):
        raise RuntimeError(text)


def _check_floating(name: str, *tensors: Tensor) -> bool:
    """Return True.

    Raises:
        RuntimeError: a tensor that is not of a floating-point dtype.
    """
    for x in tensors:
        if not x.dtype.is_floating_point:
            raise RuntimeError(
                f"{name}: its parameters are of dtype {x.dtype}; pass floating-point ones, such as "
                "x.float()"
            )
    return True


@decomposition("bernoulli", when=lambda a: a.p is not None or _check_floating("bernoulli", a.input))
def _bernoulli(input: Any, p: float | None = None, *, generator: Any = None) -> Any:
    """Draw True with the probability that each element gives, or with p."""
    _no_generator(generator)
    if p is None:
        x = reduce_pending(input)
        return _draw(x._layout, _truths, x)
    layout = without_pending(input._layout)
    drawn = random.bernoulli(layout, p)

    def values(local: Tensor) -> Tensor:
        truths = drawn.to(local.dtype)
        return truths + _nothing_of(local) if local.requires_grad else truths

    return from_parts(layout, values, reduce_pending(input))


def _truths(p: Tensor, units: distributions.Units) -> Tensor:
    _demand(
        (p >= 0) & (p <= 1),
        "bernoulli: expected probabilities between 0 and 1, and this rank holds others",
    )
    return distributions.bernoulli(p, units)


@decomposition("poisson", when=lambda a: _check_floating("poisson", a.input))
def _poisson(input: Any, generator: Any = None) -> Any:
    _no_generator(generator)
    x = reduce_pending(input)
    return _draw(x._layout, _counts, x)


def _counts(rate: Tensor, units: distributions.Units) -> Tensor:
    _demand(rate >= 0, "poisson: expected rates of at least 0, and this rank holds others")
    return distributions.poisson(rate, units)


def _check_sharded(name: str, *tensors: Any) -> None:
    if any(isinstance(x, Tensor) and not hasattr(x, "_operand") for x in tensors):
        raise RuntimeError(
            f"{name}: one of its tensors is a plain one; shard it with distribute_tensor(t, mesh, "
            "placements)"
        )


def _binomial_applies(a: Any) -> bool:
    _check_floating("binomial", a.count, a.prob)
    _check_sharded("binomial", a.count, a.prob)
    if a.count.dtype != a.prob.dtype:
        raise RuntimeError(
            f"binomial: count is {a.count.dtype} and prob {a.prob.dtype}; give both in one dtype"
        )
    return True


@decomposition("binomial", when=_binomial_applies)
def _binomial(count: Any, prob: Any, generator: Any = None) -> Any:
    _no_generator(generator)
    count, prob = _align(count.detach(), prob)
    return _draw(count._layout, distributions.binomial, count, prob)


def _normal_applies(a: Any) -> bool:
    tensors = [x for x in (a.mean, a.std) if isinstance(x, Tensor)]
    _check_floating("normal", *tensors)
    _check_sharded("normal", *tensors)
    return True


@decomposition("normal", when=_normal_applies)
def _normal(mean: Any, std: Any = 1.0, *, generator: Any = None) -> Any:
    """Draw a standard normal tensor, and scale and shift it by the parameters of each element."""
    _no_generator(generator)
    tensors = _align(*[x for x in (mean, std) if isinstance(x, Tensor)])
    layout = tensors[0]._layout
    centered = random.normal(layout)

    def values(*locals: Tensor) -> Tensor:
        own = iter(local.detach() for local in locals)
        center, spread = [next(own) if isinstance(x, Tensor) else x for x in (mean, std)]
        _demand(
            torch.as_tensor(spread) >= 0, "normal: expected std of at least 0, and found others"
        )
        drawn = (centered * spread + center).to(layout.dtype)
        return sum((_nothing_of(local) for local in locals if local.requires_grad), start=drawn)

    return from_parts(layout, values, *tensors)


# -- categories ------------------------------------------------------------------------------------


def _multinomial_applies(a: Any) -> bool:
    shape, count = a.input.shape, a.num_samples
    _check_floating("multinomial", a.input)
    if len(shape) not in (1, 2) or count <= 0:
        raise RuntimeError(
            f"multinomial: expected weights of 1 or 2 dims and samples > 0, not {list(shape)} and "
            f"{count}"
        )
    if not a.replacement and count > shape[-1]:
        raise RuntimeError(
            f"multinomial: cannot draw {count} of {shape[-1]} categories without replacement; give "
            "replacement=True"
        )
    return True


@decomposition("multinomial", when=_multinomial_applies)
def _multinomial(
    input: Any, num_samples: int, replacement: bool = False, *, generator: Any = None
) -> Any:
    """Draw categories, which are made whole; rows may be split.

    Without replacement every category gets an exponential random time with its weight as rate, and
    the earliest are taken (Efraimidis and Spirakis, "Weighted random sampling with a reservoir",
    2006).
    """
    _no_generator(generator)
    x = reduce_pending(unshard(input.detach(), -1))
    layout = with_dim(x._layout, x.ndim - 1, (), num_samples).replace(dtype=torch.int64)
    units = random.units(layout if replacement else x._layout)
    return from_parts(
        layout, partial(_choose, units=units, count=num_samples, replacement=replacement), x
    )


def _choose(weights: Tensor, units: distributions.Units, count: int, replacement: bool) -> Tensor:
    _demand(
        (weights >= 0) & weights.isfinite(),
        "multinomial: expected finite weights of at least 0, and this rank holds others",
    )
    enough = (weights > 0).sum(-1) >= (1 if replacement else count)
    _demand(enough, "multinomial: a row on this rank has too few weights above 0")
    if replacement:
        return distributions.categories(weights, units(0))
    return (-units(0).log() / weights).topk(count, largest=False)[1]


# -- activations -----------------------------------------------------------------------------------


def _gumbel_applies(a: Any) -> bool:
    F.softmax(a.logits.detach(), a.dim)  # raises for a dim that does not exist
    return _check_floating("gumbel_softmax", a.logits)


@decomposition("gumbel_softmax", when=_gumbel_applies)
def _gumbel_softmax(
    logits: Any, tau: float = 1, hard: bool = False, eps: float = 1e-10, dim: int = -1
) -> Any:
    """Return the softmax of perturbed logits; with `hard` its one-hot maximum, its gradient too."""
    layout = without_pending(logits._layout)
    noise = ShardedTensor._make(random.draw(distributions.gumbel, layout), layout)
    soft = ((logits + noise) / tau).softmax(dim)
    return _one_hot_maximum(soft.detach(), dim) - soft.detach() + soft if hard else soft


def _one_hot_maximum(x: Any, dim: int) -> Any:
    dim %= x.ndim
    indices = arange(x.shape[dim], device_mesh=x.mesh, placements=P.of_cuts([x.spec.cuts[dim]], {}))
    indices = indices.view(*[-1 if d == dim else 1 for d in range(x.ndim)])
    return (indices == x.argmax(dim, keepdim=True)).to(x.dtype)


@decomposition(
    "torch.rrelu",
    "torch.rrelu_",
    "F.rrelu",
    with_func=True,
    check=lambda input, *args, generator=None, **named: F.rrelu(input.detach(), *args[:3], **named),
)
def _rrelu(
    func: Any,
    input: Any,
    lower: float = 1 / 8,
    upper: float = 1 / 3,
    training: bool = False,
    generator: Any = None,
    inplace: bool = False,
) -> Any:
    _no_generator(generator)
    in_place = inplace or func is torch.rrelu_
    if not training:
        return F.leaky_relu(input, (lower + upper) / 2, in_place)
    if in_place:
        _check_fillable(input)
    x = reduce_pending(input)
    slopes = random.uniform(x._layout, lower, upper)
    if not in_place:
        return from_parts(x._layout, lambda local: local * _rectify(local.detach(), slopes), x)
    if x.mesh.coordinate is not None:
        x._local.mul_(_rectify(x._local.detach(), slopes))
        x._sync_requires_grad()
    return input


def _rectify(local: Tensor, slopes: Tensor) -> Tensor:
    """Return the factor of each element."""
    return torch.where(local <= 0, slopes, 1)


# Functions that draw from torch's own generator: they run on gathered operands, with that generator
# in the same state on every rank, so that replicas agree and results do not depend on the mesh.
_DRAWING = """
    fractional_max_pool2d fractional_max_pool3d fractional_max_pool2d_with_indices
    fractional_max_pool3d_with_indices multi_head_attention_forward lstm gru rnn_tanh rnn_relu
"""
RANDOM.update(functions(*_DRAWING.split()))
