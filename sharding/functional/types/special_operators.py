"""Operators whose result type does not follow from their operands alone.

For most operators, the result varies if an operand varies. Those here write to an operand, draw
random numbers, use only the shape of an operand, or turn values into numbers. Each has a handler
that runs it and sets the tags.
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
from .types import ShardingTypeError, TypeOrigin, user_location

if TYPE_CHECKING:
    from .type_checker import TypeChecker

Special = Callable[..., Any]  # of the checker, the function, its arguments

SPECIAL: dict[Any, Special | None] = {}  # None: an ordinary operator


def special(*functions: Any) -> Callable[[Special], Special]:
    """Register a handler for these functions."""

    def register(handler: Special) -> Special:
        SPECIAL.update(dict.fromkeys(functions, handler))
        return handler

    return register


def _write(checker: TypeChecker, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Handle an operator that writes to its first operand, or to all of a list; fused optimizers
    write to several lists.
    """
    tag = checker.result_tag(func, args, kwargs)
    result = func(*args, **kwargs)
    for written in tensors_in(args if name_of(func).startswith("_fused") else args[:1]):
        checker.set_tag(written, tag)
        checker.record_write(written)
    return result


def _constant(checker: TypeChecker, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Handle an operator that uses only the shape of its first operand."""
    result = func(*args, **kwargs)
    checker.set_tag(
        result, checker.join_all(tensors_in((*args[1:], *kwargs.values())), checker.control_tag)
    )
    return result


def _like(checker: TypeChecker, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Handle an operator that uses the values of its first operand, and only the shape or dtype of
    the second.
    """
    tag = checker.join_all(tensors_in(args[:1]), checker.control_tag)
    result = func(*args, **kwargs)
    checker.set_tag(result, tag)
    return result


def _read(checker: TypeChecker, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Handle an operator that returns a number."""
    checker.record_read(func, checker.result_tag(torch.Tensor.clone, args[:1], None))
    return func(*args, **kwargs)


def _sized_by_values(
    checker: TypeChecker, func: Any, args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    """Handle an operator whose result's length depends on values."""
    tag = checker.result_tag(func, args, kwargs)
    result = func(*args, **kwargs)
    checker.set_tag(result, tag)
    checker.number_tag = checker.join(checker.number_tag, tag)
    return result


@special(Tensor.__getitem__)
def _index(checker: TypeChecker, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    masked = any(x.dtype in (torch.bool, torch.uint8) for x in tensors_in(args[1:]))
    return (_sized_by_values if masked else _ordinary)(checker, func, args, kwargs)


def _ordinary(checker: TypeChecker, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    tag = checker.result_tag(func, args, kwargs)
    result = func(*args, **kwargs)
    checker.set_tag(result, tag)
    return result


def _draw(checker: TypeChecker, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Handle an operator that may draw random numbers: it did if the generator's state has
    changed.
    """
    before = _generator_states()
    writes = writes_first_operand(func)
    tag = checker.result_tag(func, args, kwargs)
    result = func(*args, **kwargs)
    drew = kwargs.get("generator") is not None or not all(
        map(torch.equal, before, _generator_states())
    )
    if drew:
        origin = TypeOrigin(f"{name_of(func)} outside of sm.random.seeded(key)", user_location())
        tag = checker.join(tag, checker.make_tag(origin, checker.random_type))
    checker.set_tag(result, tag)
    if writes or kwargs.get("inplace") is True:
        checker.record_write(result)
    return result


_READS = (
    "item tolist numpy __array__ __bool__ __int__ __float__ __complex__ __index__ __contains__ "
    "is_nonzero equal allclose __dlpack__ untyped_storage storage data_ptr"
)
_DRAWS = (
    "rand randn randint randperm rand_like randn_like randint_like normal bernoulli multinomial "
    "poisson binomial rrelu rrelu_ dropout dropout_ dropout1d dropout2d dropout3d alpha_dropout "
    "alpha_dropout_ feature_dropout feature_dropout_ feature_alpha_dropout feature_alpha_dropout_ "
    "native_dropout gumbel_softmax scaled_dot_product_attention multi_head_attention_forward "
    "fractional_max_pool2d fractional_max_pool3d uniform_ normal_ exponential_ geometric_ cauchy_ "
    "log_normal_ random_ bernoulli_ lstm gru rnn_tanh rnn_relu"
)
_SIZED_BY_VALUES = "nonzero masked_select unique unique_consecutive argwhere bincount"
_CONSTANTS = (
    "zeros_like ones_like empty_like full_like new_zeros new_ones new_empty new_full "
    "new_empty_strided"
)
_LIKES = "view_as expand_as reshape_as type_as"
_BY_NAME: dict[str, Special] = {
    **dict.fromkeys(_CONSTANTS.split(), _constant),
    **dict.fromkeys(_LIKES.split(), _like),
    **dict.fromkeys(_READS.split(), _read),
    **dict.fromkeys(_DRAWS.split(), _draw),
    **dict.fromkeys(_SIZED_BY_VALUES.split(), _sized_by_values),
}


def special_of(func: Any) -> Special | None:
    """Return the handler of a function that is not registered; None for an ordinary operator."""
    name = getattr(func, "__name__", "")
    if name.startswith("_foreach_") and name.endswith("_"):
        return _write
    return _BY_NAME.get(name) or (_write if writes_first_operand(func) else None)


# -- gradients -------------------------------------------------------------------------------------

_SEEDS = ("grad_outputs", "grad_tensors", "gradient")


def _check_seed(
    checker: TypeChecker, func: Any, args: Sequence[Any], kwargs: dict[str, Any]
) -> None:
    """Check the default seed of backward, which is 1 on every rank: right for the sum of the ranks'
    losses.

    Raises: ShardingTypeError for a replicated loss, whose gradients would be n times too large.
    """
    if checker.captures_only:
        return
    position = 2 if func is torch.autograd.grad else 1
    if args[position : position + 1] not in ((), (None,)) or any(
        kwargs.get(name) is not None for name in _SEEDS
    ):
        return
    for out in [args[0]] if isinstance(args[0], Tensor) else args[0]:
        same = sorted(checker.names - checker.tag_of(out).type.varying)
        if same:
            raise ShardingTypeError(
                f"{user_location()}: {name_of(func)} of a loss that is replicated over "
                f"{', '.join(map(repr, same))} starts from 1 on every rank, and gradients would be "
                "too large by the number of ranks; use sm.grad or sm.value_and_grad, which scale "
                "the seed"
            )


@special(torch.autograd.grad)
def _grad(checker: TypeChecker, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Handle `torch.autograd.grad` on parts: each gradient has the type dual to its input's."""
    inputs = args[1] if len(args) > 1 else kwargs["inputs"]
    _check_seed(checker, func, args, kwargs)
    types = [checker.tag_of(x).type for x in ([inputs] if isinstance(inputs, Tensor) else inputs)]
    found = func(*args, **kwargs)
    for type_, g in zip(types, found, strict=True):
        if g is not None:
            checker.set_tag(g, checker.grad_tag(type_.dual_over(checker.names)))
    return found


@special(Tensor.backward, torch.autograd.backward)
def _backward(checker: TypeChecker, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    _check_seed(checker, func, args, kwargs)
    return func(*args, **kwargs)


@special(Tensor.grad.__get__)  # type: ignore[attr-defined]
def _read_grad(checker: TypeChecker, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    found = func(*args, **kwargs)
    if found is not None:
        checker.set_tag(
            found, checker.grad_tag(checker.tag_of(args[0]).type.dual_over(checker.names))
        )
    return found


@special(Tensor.detach, torch.detach, Tensor.data.__get__)  # type: ignore[attr-defined]
def _detach(checker: TypeChecker, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Handle detaching, which captured tensors allow too."""
    result = func(*args, **kwargs)
    with torch.no_grad():
        checker.set_tag(result, checker.join_all(iter(args), checker.control_tag))
    return result


@special(Tensor.set_, Tensor.data.__set__)  # type: ignore[attr-defined]
def _set(checker: TypeChecker, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Handle an operator after which the first operand is another tensor."""
    tag = checker.join_all(tensors_in(args[1:]), checker.control_tag)
    result = func(*args, **kwargs)
    checker.set_tag(args[0], tag)
    return result


@special(F.batch_norm, torch.batch_norm, F.instance_norm, torch.instance_norm)
def _norm_with_statistics(
    checker: TypeChecker, func: Any, args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    """Handle a normalization that may write statistics of its first operand into others."""
    tag = checker.result_tag(func, args, kwargs)
    result = func(*args, **kwargs)
    checker.set_tag(result, tag)
    names = ("running_mean", "running_var")
    for statistics in (*args[1:], *[kwargs[name] for name in names if name in kwargs]):
        if isinstance(statistics, Tensor) and not statistics.requires_grad:
            checker.set_tag(statistics, tag)
            checker.record_write(statistics)
    return result


@special(
    *[
        getattr(Tensor, name).__get__
        for name in (
            "shape",
            "dtype",
            "device",
            "layout",
            "ndim",
            "requires_grad",
            "is_leaf",
            "grad_fn",
        )
    ]
)
@special(
    Tensor.requires_grad_,
    Tensor.retain_grad,
    Tensor.requires_grad.__set__,  # type: ignore[attr-defined]
    Tensor.register_hook,
    Tensor.detach_,
)
def _leave(checker: TypeChecker, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Handle an operator that changes no values."""
    return func(*args, **kwargs)


# --------------------------------------------------------------------------------------------------


def _generator_states() -> list[Tensor]:
    states = [torch.default_generator.get_state()]
    return [*states, *torch.cuda.get_rng_state_all()] if torch.cuda.is_initialized() else states
