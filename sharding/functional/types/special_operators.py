"""Operators that types are not followed through in the ordinary way.

Ordinary is: whatever is made of a varying value varies. Others write to what they are given, take random numbers, take but a shape,
or turn values into numbers. Each has here how to run it and what to note of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...ops.plain_operands import tensors_in
from ...ops.rules.registry import writes_first_operand
from ...ops.strategy import name_of
from .types import Origin, ShardingTypeError, place

if TYPE_CHECKING:
    from .type_checker import Following

Special = Callable[..., Any]  # of the follower, the function, its arguments

SPECIAL: dict[Any, Special | None] = {}  # None: an ordinary operator


def special(*functions: Any) -> Callable[[Special], Special]:
    """Register how to follow these functions."""

    def register(how: Special) -> Special:
        SPECIAL.update(dict.fromkeys(functions, how))
        return how

    return register


def _write(following: Following, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """An operator that writes to its first operand, or to all of a list; a fused optimizer to more lists than that."""
    tag = following.made(func, args, kwargs)
    result = func(*args, **kwargs)
    for written in tensors_in(args if name_of(func).startswith("_fused") else args[:1]):
        following.note(written, tag)
        following.wrote(written)
    return result


def _constant(following: Following, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """An operator that takes but the shape of its first operand."""
    result = func(*args, **kwargs)
    following.note(result, following.joined(tensors_in((*args[1:], *kwargs.values())), following.looked))
    return result


def _like(following: Following, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """An operator that takes the values of its first operand and but the shape or dtype of the second."""
    tag = following.joined(tensors_in(args[:1]), following.looked)
    result = func(*args, **kwargs)
    following.note(result, tag)
    return result


def _look(following: Following, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """An operator that gives a number."""
    following.look(func, following.made(torch.Tensor.clone, args[:1], None))
    return func(*args, **kwargs)


def _sized_by_values(following: Following, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """An operator whose result is as long as values say, so that the length is a number of theirs."""
    tag = following.made(func, args, kwargs)
    result = func(*args, **kwargs)
    following.note(result, tag)
    following.numbers = following.join(following.numbers, tag)
    return result


@special(Tensor.__getitem__)
def _index(following: Following, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    masked = any(x.dtype in (torch.bool, torch.uint8) for x in tensors_in(args[1:]))
    return (_sized_by_values if masked else _ordinary)(following, func, args, kwargs)


def _ordinary(following: Following, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    tag = following.made(func, args, kwargs)
    result = func(*args, **kwargs)
    following.note(result, tag)
    return result


def _draw(following: Following, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """An operator that may take random numbers: it did if the generator has moved on."""
    before = _generator_states()
    writes = writes_first_operand(func)
    tag = following.made(func, args, kwargs)
    result = func(*args, **kwargs)
    drew = kwargs.get("generator") is not None or not all(map(torch.equal, before, _generator_states()))
    if drew:
        tag = following.join(tag, following.varying(Origin(f"{name_of(func)} outside of sm.seeded(key)", place()), following.random))
    following.note(result, tag)
    if writes or kwargs.get("inplace") is True:
        following.wrote(result)
    return result


_LOOKS = (
    "item tolist numpy __array__ __bool__ __int__ __float__ __complex__ __index__ __contains__ is_nonzero equal allclose __dlpack__ "
    "untyped_storage storage data_ptr"
)  # fmt: skip
_DRAWS = (
    "rand randn randint randperm rand_like randn_like randint_like normal bernoulli multinomial poisson binomial rrelu rrelu_ dropout "
    "dropout_ dropout1d dropout2d dropout3d alpha_dropout alpha_dropout_ feature_dropout feature_dropout_ feature_alpha_dropout "
    "feature_alpha_dropout_ native_dropout gumbel_softmax scaled_dot_product_attention multi_head_attention_forward fractional_max_pool2d "
    "fractional_max_pool3d uniform_ normal_ exponential_ geometric_ cauchy_ log_normal_ random_ bernoulli_ lstm gru rnn_tanh rnn_relu"
)  # fmt: skip
_SIZED_BY_VALUES = "nonzero masked_select unique unique_consecutive argwhere bincount"
_CONSTANTS = "zeros_like ones_like empty_like full_like new_zeros new_ones new_empty new_full new_empty_strided"
_LIKES = "view_as expand_as reshape_as type_as"
_BY_NAME: dict[str, Special] = {
    **dict.fromkeys(_CONSTANTS.split(), _constant), **dict.fromkeys(_LIKES.split(), _like), **dict.fromkeys(_LOOKS.split(), _look),
    **dict.fromkeys(_DRAWS.split(), _draw), **dict.fromkeys(_SIZED_BY_VALUES.split(), _sized_by_values),
}  # fmt: skip


def special_of(func: Any) -> Special | None:
    """How to follow a function that no one has registered; None for an ordinary operator."""
    name = getattr(func, "__name__", "")
    if name.startswith("_foreach_") and name.endswith("_"):
        return _write
    return _BY_NAME.get(name) or (_write if writes_first_operand(func) else None)


# -- gradients ---------------------------------------------------------------------------------------------------------

_SEEDS = ("grad_outputs", "grad_tensors", "gradient")


def _check_seed(following: Following, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """What backward starts from by itself is 1 on every rank: right for a sum of losses that each rank has of its own.

    Raises: ShardingTypeError for a loss that is replicated, whose gradients would be n times too large.
    """
    if following.trusts:
        return
    position = 2 if func is torch.autograd.grad else 1
    if args[position : position + 1] not in ((), (None,)) or any(kwargs.get(name) is not None for name in _SEEDS):
        return
    for out in [args[0]] if isinstance(args[0], Tensor) else args[0]:
        same = sorted(following.names - following.of(out).type.varying)
        if same:
            raise ShardingTypeError(
                f"{place()}: {name_of(func)} of a loss that is replicated over {', '.join(map(repr, same))} starts from 1 on every "
                "rank, and gradients would be as many times too large as there are ranks; use sm.grad or sm.value_and_grad, which know"
            )


@special(torch.autograd.grad)
def _grad(following: Following, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """`torch.autograd.grad` on parts: each gradient is of the type dual to its input's."""
    inputs = args[1] if len(args) > 1 else kwargs["inputs"]
    _check_seed(following, func, args, kwargs)
    types = [following.of(x).type for x in ([inputs] if isinstance(inputs, Tensor) else inputs)]
    found = func(*args, **kwargs)
    for type_, g in zip(types, found, strict=True):
        if g is not None:
            following.note(g, following.gradient(type_.dual_over(following.names)))
    return found


@special(Tensor.backward, torch.autograd.backward)
def _backward(following: Following, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    _check_seed(following, func, args, kwargs)
    return func(*args, **kwargs)


@special(Tensor.grad.__get__)  # type: ignore[attr-defined]
def _read_grad(following: Following, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    found = func(*args, **kwargs)
    if found is not None:
        following.note(found, following.gradient(following.of(args[0]).type.dual_over(following.names)))
    return found


@special(Tensor.detach, torch.detach, Tensor.data.__get__)  # type: ignore[attr-defined]
def _detach(following: Following, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The same values without gradient: also those of a tensor from outside."""
    result = func(*args, **kwargs)
    with torch.no_grad():
        following.note(result, following.joined(iter(args), following.looked))
    return result


@special(Tensor.set_, Tensor.data.__set__)  # type: ignore[attr-defined]
def _set(following: Following, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The first operand is another tensor from now on."""
    tag = following.joined(tensors_in(args[1:]), following.looked)
    result = func(*args, **kwargs)
    following.note(args[0], tag)
    return result


@special(F.batch_norm, torch.batch_norm, F.instance_norm, torch.instance_norm)
def _norm_with_statistics(following: Following, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """A normalisation that may write statistics of its first operand into others."""
    tag = following.made(func, args, kwargs)
    result = func(*args, **kwargs)
    following.note(result, tag)
    names = ("running_mean", "running_var")
    for statistics in (*args[1:], *[kwargs[name] for name in names if name in kwargs]):
        if isinstance(statistics, Tensor) and not statistics.requires_grad:
            following.note(statistics, tag)
            following.wrote(statistics)
    return result


@special(*[getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_leaf", "grad_fn")])
@special(Tensor.requires_grad_, Tensor.retain_grad, Tensor.requires_grad.__set__, Tensor.register_hook, Tensor.detach_)  # type: ignore[attr-defined]
def _leave(following: Following, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """No values change."""
    return func(*args, **kwargs)


# ----------------------------------------------------------------------------------------------------------------------


def _generator_states() -> list[Tensor]:
    states = [torch.default_generator.get_state()]
    return [*states, *torch.cuda.get_rng_state_all()] if torch.cuda.is_initialized() else states
