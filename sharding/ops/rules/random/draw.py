"""Random tensors: numbers like an old tensor, fills in place, and draws whose distribution each element has for itself.

Every call takes one random tensor from the stream (`sharding.random`), whatever it does with it, so that the next call finds the
same place on every mesh. What is drawn depends on an element's global position; nothing is communicated for it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .....kernels import laws
from .....kernels.random import limits
from ....layout.layout import Layout
from ....layout.spec import P
from ....tensor import random
from ....tensor.factories import arange
from ....tensor.sharded_tensor import ShardedTensor
from ...dispatch import check_base
from ...lineage import drawn, with_drawn
from ..decomposition_utils import from_parts, settled, whole, with_dim
from ..elementwise.like import register_like
from ..elementwise.like import settled as settled_layout
from ..registry import RANDOM, form, functions, handler


def _drawn(draw: Callable[..., Tensor], *values: float) -> Callable[[Layout, torch.device], Tensor]:
    return lambda layout, device: draw(layout, *values).to(device)


register_like("rand_like", lambda x: _drawn(random.uniform))
register_like("randn_like", lambda x: _drawn(random.normal))
register_like("randint_like", lambda x, *bounds, **named: _drawn(random.integers, *_bounds(*bounds, **named)))


def _bounds(*bounds: int, low: int = 0, high: int | None = None) -> tuple[int, int]:
    """`randint_like(x, high)` or `randint_like(x, low, high)`."""
    if high is not None:
        return (bounds[0] if bounds else low), high
    return (0, bounds[0]) if len(bounds) == 1 else (bounds[0], bounds[1])


def _no_generator(generator: Any) -> None:
    if generator is not None:
        raise NotImplementedError(
            "a torch.Generator does not drive the random numbers of ShardedTensors; sm.manual_seed does"
        )


# -- in place ----------------------------------------------------------------------------------------------------------


def _fill(x: Any, generator: Any, values: Callable[..., Tensor], *parameters: Any) -> Any:
    """Overwrite x, in place, with random numbers; as in torch, its history ends here."""
    _no_generator(generator)
    _check_fillable(x)
    before = drawn.last
    x._local.copy_(values(x._layout, *parameters))
    x._lineage = with_drawn(x._lineage, before)
    x._sync_requires_grad()
    return x


def _check_fillable(x: Any) -> None:
    """A pending tensor has no elements to write."""
    if not isinstance(x, ShardedTensor):
        raise TypeError(
            "a plain tensor cannot be filled with the random numbers of a ShardedTensor; make it a ShardedTensor with distribute_tensor"
        )
    if x._layout.pending:
        raise ValueError(
            f"cannot fill {x._layout} with random numbers while a reduction is pending; redistribute it first"
        )
    check_base(x)


@handler("normal_")
def _normal_(x: Any, mean: float = 0, std: float = 1, *, generator: Any = None) -> Any:
    return _fill(x, generator, random.normal, mean, std)


@handler("uniform_")
def _uniform_(x: Any, a: float = 0, b: float = 1, *, generator: Any = None, **ends: float) -> Any:
    """torch calls the ends `from` and `to`."""
    return _fill(x, generator, random.uniform, ends.get("from", a), ends.get("to", b))


@handler("exponential_")
def _exponential_(x: Any, lambd: float = 1, *, generator: Any = None) -> Any:
    return _fill(x, generator, partial(random.draw, laws.exponential), lambd)


@handler("cauchy_")
def _cauchy_(x: Any, median: float = 0, sigma: float = 1, *, generator: Any = None) -> Any:
    return _fill(x, generator, partial(random.draw, laws.cauchy), median, sigma)


@handler("log_normal_")
def _log_normal_(x: Any, mean: float = 1, std: float = 2, *, generator: Any = None) -> Any:
    return _fill(x, generator, partial(random.draw, laws.log_normal), mean, std)


@handler("geometric_")
def _geometric_(x: Any, p: float, *, generator: Any = None) -> Any:
    return _fill(x, generator, partial(random.draw, laws.geometric), p)


@handler("random_")
def _random_(x: Any, *bounds: int, generator: Any = None, **ends: Any) -> Any:
    """`random_()`, `random_(to)`, `random_(from, to)`: whole numbers, up to the largest that the dtype holds with all below it."""
    low, high = (0, *bounds) if len(bounds) == 1 else (bounds or (0, None))
    low, high = ends.get("from", low), ends.get("to", high)
    return _fill(x, generator, random.integers, low, limits(x.dtype)[1] + 1 if high is None else high)


@handler("bernoulli_")
def _bernoulli_(x: Any, p: Any = 0.5, *, generator: Any = None) -> Any:
    """With one probability, or with each element's own."""
    if not isinstance(p, Tensor):
        return _fill(x, generator, random.bernoulli, p)
    _no_generator(generator)
    _check_fillable(x)
    chances = _as_operand(p, x).detach().expand(x.shape).redistribute(x.spec)
    before, units = drawn.last, random.units(x._layout)
    x._lineage = with_drawn(x._lineage, before)
    if x.mesh.coordinate is not None:
        x._local.copy_(_truths(chances._local, units))
        x._sync_requires_grad()
    return x


def _as_operand(p: Tensor, like: Any) -> Any:
    """A tensor of probabilities on the mesh; a plain one with a single number is the same on every rank."""
    if isinstance(p, ShardedTensor):
        if p.mesh != like.mesh:
            raise ValueError(f"bernoulli_: the tensor lies on {like.mesh}, its probabilities on {p.mesh}; bring them to one mesh first")
        return settled(p)
    if p.ndim:
        raise RuntimeError(
            f"bernoulli_: mixes a plain tensor {p.dtype}{list(p.shape)} with a ShardedTensor; say how the plain tensor lies on the "
            "mesh with distribute_tensor(t, mesh, placements)"
        )
    return ShardedTensor._make(p.to(like.device), Layout.of(like.mesh, P(), (), p.dtype))


# -- one distribution for each element ---------------------------------------------------------------------------------


def _draw(layout: Layout, law: Callable[..., Tensor], *sources: Any) -> Any:
    """`law(parts..., units)` as a tensor of this layout, in which the sources lie. They get gradients of zero, as in torch."""
    units = random.units(layout)

    def values(*locals: Tensor) -> Tensor:
        drawn = law(*[local.detach() for local in locals], units).to(layout.dtype)
        return sum((_nothing_of(local) for local in locals if local.requires_grad), start=drawn)

    return from_parts(layout, values, *sources)


def _nothing_of(local: Tensor) -> Tensor:
    """Zeros with a gradient of zero."""
    return local.masked_fill(torch.ones((), dtype=torch.bool, device=local.device), 0)


def _aligned(*tensors: Any) -> list[Any]:
    """The operands broadcast against each other, lying alike: as the first of the full shape does."""
    tensors = tuple(map(settled, tensors))
    shape = torch.broadcast_shapes(*[x.shape for x in tensors])
    spec = next((x.spec for x in tensors if x.shape == shape), P())
    return [x.expand(shape).redistribute(spec) for x in tensors]


def _demand(sound: Tensor, text: str) -> None:
    """Values are looked at where they lie: the rank that holds a bad one raises."""
    if not bool(sound.all()):
        raise RuntimeError(text)


def _check_floating(name: str, *tensors: Tensor) -> None:
    for x in tensors:
        if not x.dtype.is_floating_point:
            raise RuntimeError(f"{name}: its parameters are of dtype {x.dtype}; give floating-point ones, such as x.float()")


@form("bernoulli")
def _bernoulli(input: Any, p: float | None = None, *, generator: Any = None) -> Callable[..., Any]:
    if p is None:
        _check_floating("bernoulli", input)
        return _run_bernoulli
    return _run_bernoulli_like


def _run_bernoulli(input: Any, p: None = None, *, generator: Any = None) -> Any:
    """True with the probability that the element says."""
    _no_generator(generator)
    x = settled(input)
    return _draw(x._layout, _truths, x)


def _truths(p: Tensor, units: laws.Units) -> Tensor:
    _demand((p >= 0) & (p <= 1), "bernoulli: expected probabilities between 0 and 1, and this rank holds others")
    return laws.bernoulli(p, units)


def _run_bernoulli_like(input: Any, p: float, *, generator: Any = None) -> Any:
    _no_generator(generator)
    drawn = random.bernoulli(settled_layout(input._layout), p)
    layout = settled_layout(input._layout)

    def values(local: Tensor) -> Tensor:
        return drawn.to(local.dtype) + _nothing_of(local) if local.requires_grad else drawn.to(local.dtype)

    return from_parts(layout, values, settled(input))


@form("poisson")
def _poisson(input: Any, generator: Any = None) -> Callable[..., Any]:
    _check_floating("poisson", input)
    return _run_poisson


def _run_poisson(input: Any, generator: Any = None) -> Any:
    _no_generator(generator)
    x = settled(input)
    return _draw(x._layout, _counts, x)


def _counts(rate: Tensor, units: laws.Units) -> Tensor:
    _demand(rate >= 0, "poisson: expected rates of at least 0, and this rank holds others")
    return laws.poisson(rate, units)


@form("binomial")
def _binomial(count: Any, prob: Any, generator: Any = None) -> Callable[..., Any]:
    _check_floating("binomial", count, prob)
    _check_sharded("binomial", count, prob)
    if count.dtype != prob.dtype:
        raise RuntimeError(f"binomial: count is {count.dtype} and prob {prob.dtype}; give both in one dtype")
    return _run_binomial


def _check_sharded(name: str, *tensors: Any) -> None:
    if any(isinstance(x, Tensor) and not hasattr(x, "_operand") for x in tensors):
        raise RuntimeError(f"{name}: one of its tensors is a plain one; place it with distribute_tensor(t, mesh, placements)")


def _run_binomial(count: Any, prob: Any, generator: Any = None) -> Any:
    _no_generator(generator)
    count, prob = _aligned(count.detach(), prob)
    return _draw(count._layout, laws.binomial, count, prob)


@form("normal")
def _normal(mean: Any, std: Any = 1.0, *, generator: Any = None) -> Callable[..., Any]:
    tensors = [x for x in (mean, std) if isinstance(x, Tensor)]
    _check_floating("normal", *tensors)
    _check_sharded("normal", *tensors)
    return _run_normal


def _run_normal(mean: Any, std: Any = 1.0, *, generator: Any = None) -> Any:
    """A standard normal tensor, scaled and shifted by each element's own."""
    _no_generator(generator)
    tensors = _aligned(*[x for x in (mean, std) if isinstance(x, Tensor)])
    layout = tensors[0]._layout
    centered = random.normal(layout)

    def values(*locals: Tensor) -> Tensor:
        own = iter(local.detach() for local in locals)
        center, spread = [next(own) if isinstance(x, Tensor) else x for x in (mean, std)]
        _demand(torch.as_tensor(spread) >= 0, "normal: expected std of at least 0, and found others")
        drawn = (centered * spread + center).to(layout.dtype)
        return sum((_nothing_of(local) for local in locals if local.requires_grad), start=drawn)

    return from_parts(layout, values, *tensors)


# -- categories --------------------------------------------------------------------------------------------------------


@form("multinomial")
def _multinomial(input: Any, num_samples: int, replacement: bool = False, *, generator: Any = None) -> Callable[..., Any]:
    _check_floating("multinomial", input)
    if input.ndim not in (1, 2) or num_samples <= 0:
        raise RuntimeError(f"multinomial: expected weights of 1 or 2 dims and samples > 0, not {list(input.shape)} and {num_samples}")
    if not replacement and num_samples > input.shape[-1]:
        raise RuntimeError(
            f"multinomial: cannot draw {num_samples} of {input.shape[-1]} categories without replacement; give replacement=True"
        )
    return _run_multinomial


def _run_multinomial(input: Any, num_samples: int, replacement: bool = False, *, generator: Any = None) -> Any:
    """Rows may be split; categories are made whole.

    Without replacement every category waits for an exponential time by its weight, and those that come first are taken: what
    Efraimidis and Spirakis ("Weighted random sampling with a reservoir", 2006) show to be right.
    """
    _no_generator(generator)
    x = settled(whole(input.detach(), -1))
    layout = with_dim(x._layout, x.ndim - 1, (), num_samples).replace(dtype=torch.int64)
    units = random.units(layout if replacement else x._layout)
    return from_parts(layout, partial(_chosen, units=units, count=num_samples, replacement=replacement), x)


def _chosen(weights: Tensor, units: laws.Units, count: int, replacement: bool) -> Tensor:
    _demand((weights >= 0) & weights.isfinite(), "multinomial: expected finite weights of at least 0, and this rank holds others")
    enough = (weights > 0).sum(-1) >= (1 if replacement else count)
    _demand(enough, "multinomial: a row on this rank has too few weights above 0")
    if replacement:
        return laws.categories(weights, units(0))
    return (-units(0).log() / weights).topk(count, largest=False)[1]


# -- activations -------------------------------------------------------------------------------------------------------


@form("gumbel_softmax")
def _gumbel_softmax(logits: Any, tau: float = 1, hard: bool = False, eps: float = 1e-10, dim: int = -1) -> Callable[..., Any]:
    F.softmax(logits.detach(), dim)
    _check_floating("gumbel_softmax", logits)

    def run(logits: Any, tau: float = 1, hard: bool = False, eps: float = 1e-10, dim: int = -1) -> Any:
        """Softmax of what is perturbed; where hard, its one-hot maximum with the gradient of the softmax."""
        layout = settled_layout(logits._layout)
        noise = ShardedTensor._make(random.draw(laws.gumbel, layout), layout)
        soft = ((logits + noise) / tau).softmax(dim)
        return _one_hot_maximum(soft.detach(), dim) - soft.detach() + soft if hard else soft

    return run


def _one_hot_maximum(x: Any, dim: int) -> Any:
    dim %= x.ndim
    places = arange(x.shape[dim], device_mesh=x.mesh, placements=P.of_cuts([x.spec.cuts[dim]], {}))
    places = places.view(*[-1 if d == dim else 1 for d in range(x.ndim)])
    return (places == x.argmax(dim, keepdim=True)).to(x.dtype)


def _register_rrelu(func: Callable[..., Any], in_place: bool) -> None:
    @form(also=(func,))
    def maker(input: Any, *args: Any, inplace: bool = False, **named: Any) -> Callable[..., Any]:
        F.rrelu(input.detach(), *args[:3], **{k: v for k, v in named.items() if k != "generator"})
        return partial(_run_rrelu, in_place or inplace)


_register_rrelu(torch.rrelu, False)
_register_rrelu(torch.rrelu_, True)
_register_rrelu(F.rrelu, False)


def _run_rrelu(
    in_place: bool, input: Any, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False, generator: Any = None,
    inplace: bool = False,
) -> Any:  # fmt: skip
    _no_generator(generator)
    if not training:
        return F.leaky_relu(input, (lower + upper) / 2, in_place)
    if in_place:
        _check_fillable(input)
    x = settled(input)
    slopes = random.uniform(x._layout, lower, upper)
    if in_place and x.mesh.coordinate is not None:
        x._local.mul_(_rectified(x._local.detach(), slopes))
        x._sync_requires_grad()
    return input if in_place else from_parts(x._layout, lambda local: local * _rectified(local.detach(), slopes), x)


def _rectified(local: Tensor, slopes: Tensor) -> Tensor:
    """What each element is multiplied with."""
    return torch.where(local <= 0, slopes, 1)


# Functions that draw from torch's own generator: they run on gathered operands, with that generator in the same state
# on every rank, so that replicas agree and the mesh does not matter.
_DRAWING = """
    fractional_max_pool2d fractional_max_pool3d fractional_max_pool2d_with_indices fractional_max_pool3d_with_indices
    multi_head_attention_forward lstm gru rnn_tanh rnn_relu
"""
RANDOM.update(functions(*_DRAWING.split()))
